"""Where an exact solve is slow: momentum, patient annealing, an objective that stops falling."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from problems import SHARED, distance_matrices, solve_by_name
from reference import gw_value
from sklearn.neighbors import kneighbors_graph

import torchgw
from benchmarks.quality.problems import PROBLEMS
from torchgw._problem.problem import Problem, stored_matrix
from torchgw._sinkhorn.annealing import Annealing
from torchgw._sinkhorn.choose import choose_backend
from torchgw._sinkhorn.loop import sinkhorn
from torchgw._sinkhorn.problem import DenseCost, LinearProblem
from torchgw._solve.loop import Descent, Nesterov, Verdict
from torchgw._solve.state import Status
from torchgw._solve.step import Step
from torchgw._solve.strategy import make_gradient
from torchgw._typing import Marginals
from torchgw.distances import PointDistance, PrecomputedDistance

SNARE = SHARED / "snare.npz"

EPSILON = 0.02


def clouds(n=120, m=140):
    rng = np.random.default_rng(1)
    return rng.normal(size=(n, 10)), rng.normal(size=(m, 12))


def providers(name):
    if name == "dense":
        return [PrecomputedDistance(torch.from_numpy(table)) for table in distance_matrices(30, 25)]
    points = [torch.from_numpy(cloud[:, :3] / 6) for cloud in clouds(30, 25)]
    return [PointDistance(cloud, "sqeuclidean") for cloud in points]


@pytest.mark.parametrize("name", ["dense", "factored"])
@pytest.mark.parametrize("alpha", [1.0, 0.6])
def test_the_objective_is_known_an_iteration_later(name, alpha):
    sides = providers(name)
    a, b = (torch.full((side.n,), 1 / side.n, dtype=torch.float64) for side in sides)
    linear = None
    if alpha < 1:
        table = torch.rand(30, 25, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        linear = DenseCost(table)
    problem = Problem(*sides, Marginals(a, b), alpha, linear)
    gradient = make_gradient(name, problem, 1, 1.0)
    backend = choose_backend("auto", torch.device("cpu"), torch.float64)
    step = Step(gradient, problem.marginals, backend, torch.Generator(), store=True)
    constant = float(a @ gradient.row + b @ gradient.column) / 2
    descent = Descent(1e-5, constant)
    tables = [stored_matrix(side).numpy() for side in sides]
    coupling, expected = gradient.start(), []
    for _ in range(4):
        cost = step.linearise(coupling)
        prepared = backend.prepare(LinearProblem(cost, problem.marginals, EPSILON))
        solved = sinkhorn(prepared, None, max_iter=3000, tol=1e-13)
        coupling, told = step.update(prepared, solved.potentials, coupling, coupling)
        descent.update(Verdict(*told.tolist()))
        f, g = solved.potentials
        plan = ((f[:, None] + g - cost.dense().matrix) / EPSILON).exp().numpy() / 750
        objective = alpha * gw_value(*tables, plan)
        objective += EPSILON * float((plan * np.log(plan * 750)).sum())
        if linear is not None:
            objective += (1 - alpha) * float((plan * linear.matrix.numpy()).sum())
        expected.append(objective)
    assert descent.values == pytest.approx(expected[:-1], rel=1e-9)


def report(change, value):
    """A report of a plan whose quadratic part is nothing and whose objective is the dual value."""
    return Verdict(change, value, 0.0, 0.0, 0.0)


def test_descent_stops_where_the_objective_does_and_the_plan_does_not():
    flat, steep, settling, off = (Descent(1e-4, 0.0) for _ in range(4))
    off = Descent(0.0, 0.0)
    for turn in range(30):
        stops = flat.update(report(0.1, 1 + 0.9**turn * 1e-3))
        assert not steep.update(report(0.1, 2 - 0.01 * turn))
        assert not settling.update(report(0.9**turn, 1.0))
        assert not off.update(report(0.1, 1.0))
        if stops:
            break
    assert 6 <= turn < 29
    unmet = Descent(1e-4, 0.0)
    assert not any(unmet.update(report(0.1, 1.0), met=turn % 5 != 0) for turn in range(30))
    unknown = Descent(1e-4, 0.0)
    assert not any(unknown.update(Verdict(math.nan, 1.0, *3 * [math.nan])) for _ in range(30))


def test_patient_annealing_arrives_exactly():
    anneal = Annealing(1.0, 0.0025, proximal=True, patient=True)
    values = [anneal(turn) for turn in range(60)]
    assert all(late <= early for early, late in zip(values, values[1:], strict=False))
    arrival = values.index(0.0025)
    # a fifth of the steps of the slow rate throughout would be too few, all of them too many
    assert 20 < arrival < 30
    assert values[arrival + 1] == pytest.approx(0.0025 / 2)
    assert Annealing(1e-3, 0.0025, patient=True)(0) == 0.0025


def test_momentum_has_the_weights_of_the_columns_and_begins_again():
    a, b = torch.full((4,), 0.25).double(), torch.tensor([0.1, 0.2, 0.7]).double()
    start, step = torch.outer(a, b), torch.zeros(4, 3).double()
    step[:2, :2] = torch.tensor([[0.01, -0.01], [-0.01, 0.01]])
    momentum = Nesterov(Marginals(a, b), wanted=False)
    begun = [momentum.wanted(change) for change in (1.0, 0.4, 0.3, 0.01)]
    assert begun == [False, False, True, True]
    point, image, lengths = start, start + step, []
    for _ in range(4):
        following = momentum.next(point, image, image - step)
        torch.testing.assert_close(following.sum(0), b)
        torch.testing.assert_close(following.sum(1), a)
        lengths.append(float((following - image).norm()))
        # a map that goes on in the same direction
        point, image = following, image + step
    assert lengths[0] == 0
    assert lengths == sorted(lengths)
    assert lengths[-1] > lengths[1]
    # an image that lies behind its point
    assert float((momentum.next(image + 5 * step, image, image - step) - image).norm()) == 0


@pytest.mark.slow
def test_random_clouds_end_with_a_flat_objective():
    x, y = clouds(200, 220)
    options = {"distances": "precomputed", "n_neighbors": 8, "n_init": 1}
    short = solve_by_name(x, y, **options)
    assert short.status is Status.FLAT
    assert short.converged
    assert short.n_iters < 60
    assert short.marginal_error < 1e-6
    with pytest.warns(torchgw.ConvergenceWarning, match="outer iterations"):
        long = solve_by_name(x, y, objective_tol=0, max_iter=100, tol=1e-12, **options)
    # what is left to gain from more than twice the iterations
    assert short.log["objective"] < 1.004 * long.log["objective"]


def test_momentum_ends_where_steps_grow():
    weights = torch.full((2,), 0.5)
    momentum = Nesterov(Marginals(weights, weights), wanted=True)
    assert [momentum.wanted(change) for change in (math.inf, 0.3, 0.1, 0.13, 0.14)] == 5 * [True]
    assert [momentum.wanted(change) for change in (0.16, 0.1, 0.09)] == 3 * [False]


@pytest.mark.skipif(not SNARE.is_file(), reason="needs ../shared/data/snare.npz")
def test_cells_do_not_go_round_in_circles():
    """With momentum for good, plans that are far apart follow one another for 500 iterations."""
    data = np.load(SNARE)
    kept = np.random.default_rng(1).choice(1047, 524, replace=False)
    graphs = []
    for name in ("atac", "rna"):
        graph = kneighbors_graph(data[name][kept], 55, metric="correlation", include_self=True)
        graphs.append(graph.maximum(graph.T))
    with warnings.catch_warnings():
        # that starts end at different optima
        warnings.simplefilter("ignore", torchgw.SearchWarning)
        result = torchgw.solve(*graphs, epsilon=1e-3, random_state=0, max_iter=100)
    assert result.converged
    assert result.report.objective <= min(trial.objective for trial in result.trials) * (1 + 1e-6)


def test_a_settled_plan_whose_marginals_stay_missed_ends_the_solve():
    """Some hundred linear problems of 2,000 iterations each, none of which changed a thing."""
    rng = np.random.default_rng(1)
    x, y = (rng.normal(size=(5, 2))[rng.integers(5, size=30)] for _ in range(2))
    with pytest.warns(torchgw.ConvergenceWarning, match="inner_max_iter"):
        result = torchgw.solve(
            x,
            y,
            distances="sqeuclidean",
            epsilon=1e-8,
            n_init=1,
            options=torchgw.Options(inner_max_iter=100),
        )
    assert result.status is torchgw.Status.INNER_LIMIT
    assert result.n_iters < 80
    assert result.marginal_error > 1e-5


@pytest.mark.slow
def test_plans_that_miss_their_marginals_every_other_time_do_not_run_to_the_limit():
    """Two plans followed each other for 500 iterations; one of them missed its marginals."""
    instance = PROBLEMS["erdos-renyi-500-rewired20"].instance(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = torchgw.solve(D_X=instance.d_x, D_Y=instance.d_y, search="fast", max_iter=100)
    assert result.converged
    assert result.marginal_error < 1e-6


@pytest.mark.parametrize("patient", [False, True])
@pytest.mark.parametrize("floor", [math.inf, 0.004])
def test_proximal_steps_begin_where_the_annealing_ends(patient, floor):
    """Epsilon falls to its end, which it meets, and is a harmonic sequence from there on."""
    anneal = Annealing(1.0, 0.01, 0.7, proximal=True, patient=patient, floor=floor)
    epsilons = [anneal(step) for step in range(120)]
    arrival = next(step for step, epsilon in enumerate(epsilons) if epsilon <= anneal.end)
    assert epsilons[arrival] == pytest.approx(min(0.01, floor))
    falls = [after / before for before, after in itertools.pairwise(epsilons[:arrival])]
    assert all(fall == pytest.approx(0.7) for fall in falls) or patient
    assert max(falls) < 1
    steps = [1 / after - 1 / before for before, after in itertools.pairwise(epsilons[arrival:])]
    assert steps == pytest.approx(len(steps) * [1 / 0.01])
