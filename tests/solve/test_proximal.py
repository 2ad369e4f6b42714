"""Proximal point steps and polishing: sharp plans, lower values, in every gradient form."""

from __future__ import annotations

import itertools
import sys
import warnings
from dataclasses import replace

import networkx as nx
import numpy as np
import ot
import pytest
import reference
import torch
from problems import distance_matrices, isometric_copy, random_weights, solve_by_name
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

import torchgw
from torchgw import ConvergenceWarning, Status
from torchgw._gradients.sampled import AnchorCoupling, SampledGradient
from torchgw._problem.problem import Problem
from torchgw._sinkhorn.annealing import Annealing
from torchgw._typing import Marginals
from torchgw.distances import DirectedDistance, PrecomputedDistance


def noisy_graph_copy(n=80, extra=0.05, seed=1):
    """Adjacency of a geometric network, of a permuted copy with more edges, and the answer."""
    rng = np.random.default_rng(seed)
    graph = nx.random_geometric_graph(n, (10 / (np.pi * n)) ** 0.5, seed=seed)
    source = nx.to_numpy_array(graph, weight=None)
    target = source.copy()
    absent = np.argwhere(np.triu(target == 0, k=1))
    more = absent[rng.choice(len(absent), int(extra * source.sum() / 2), replace=False)]
    target[more[:, 0], more[:, 1]] = target[more[:, 1], more[:, 0]] = 1
    order = rng.permutation(n)
    return source, target[order][:, order], np.argsort(order)


def test_schedule_adds_one_step_of_regularisation_each_time():
    anneal = Annealing(start=1.0, target=0.1, proximal=True)
    values = [anneal(i) for i in range(30)]
    arrival = next(i for i, value in enumerate(values) if value == 0.1)
    assert all(value > 0.1 for value in values[:arrival])
    assert [anneal.share(i) for i in range(arrival)] == [1.0] * arrival
    for i in range(arrival, 29):
        # the exponents of a step: those of the plan before, and the cost over the target
        assert 1 / values[i + 1] == pytest.approx(1 / values[i] + 1 / 0.1)
        assert anneal.share(i) == pytest.approx(values[i + 1] / 0.1)
    assert anneal.final(0) == 0.1
    low = replace(anneal, floor=0.01)
    values = [low(i) for i in range(30)]
    arrival = values.index(0.01)
    assert [low.share(i) for i in range(arrival)] == [1.0] * arrival
    # as steps go on that have come to the floor by themselves: 1 / 0.01 is ten of 1 / 0.1
    assert values[arrival + 5] == pytest.approx(0.1 / 15)
    assert low.share(arrival) == pytest.approx(1 / 11)
    later = Annealing(start=0.1, target=0.1, proximal=True)
    assert [later(i) for i in (0, 1)] == [0.1, 0.05]


@pytest.mark.parametrize("steps", [2, 5])
def test_steps_equal_pot(steps):
    d_x, d_y = distance_matrices(30, 25)
    a, b = random_weights(30), random_weights(25, 1)
    expected = ot.gromov.entropic_gromov_wasserstein(
        d_x, d_y, a, b, "square_loss", epsilon=0.05, solver="PPA", max_iter=steps + 1, tol=0,
        numItermax=5000, stopThr=1e-13,
    )  # fmt: skip
    with pytest.warns(ConvergenceWarning, match="max_iter"):
        result = torchgw.solve(
            D_X=d_x,
            D_Y=d_y,
            a=a,
            b=b,
            epsilon=0.05,
            regularization="proximal",
            init=np.outer(a, b),
            max_iter=steps,
            polish=False,
            options=torchgw.Options(inner_tol=1e-11),
        )
    assert result.epsilon == pytest.approx(0.05 / (steps + 1))
    # each step's columns are met to a tenth of its change only; a wrong step is off by 0.1
    assert np.abs(np.asarray(result.plan) - expected).sum() < 0.01


def test_noisy_graph_copy():
    """The value of POT's proximal solver or less, and most nodes found, with marginals met."""
    d_x, d_y, answer = noisy_graph_copy()
    epsilon = 0.1 * 4 * d_x.std() * d_y.std()
    result = torchgw.solve(D_X=d_x, D_Y=d_y, regularization="proximal")
    assert result.status is Status.CONVERGED
    assert result.epsilon < epsilon / 10
    assert result.marginal_error < 1e-6

    plan = ot.gromov.entropic_gromov_wasserstein(
        d_x, d_y, loss_fun="square_loss", epsilon=epsilon, solver="PPA", max_iter=200,
        numItermax=200, warn=False,
    )  # fmt: skip
    assert result.value <= 1.001 * reference.gw_value(d_x, d_y, plan)
    # nodes with the same neighbours look alike, and which of them meet is chance: edges count
    match = np.asarray(result.lazy_plan.argmax())
    assert d_y[np.ix_(match, match)][d_x > 0].mean() > 0.95
    assert (match == answer).mean() > 0.85
    assert (plan.argmax(1) == answer).mean() > 0.85


@pytest.mark.slow
def test_every_gradient_form():
    x, y, answer = isometric_copy(40, noise=0.2, seed=1)
    options = {"distances": "sqeuclidean", "regularization": "proximal", "random_state": 0}
    options["polish"] = False
    dense = solve_by_name(x, y, gradient="dense", **options)
    factored = solve_by_name(x, y, gradient="factored", **options)
    sampled = solve_by_name(x, y, gradient="sampled", n_anchors=800, inner_max_iter=9000, **options)
    entropic = torchgw.solve(x, y, gradient="dense", distances="sqeuclidean")
    assert dense.status is Status.CONVERGED
    # its coupling settles before the plan does
    assert factored.status is Status.FLAT
    for result in (dense, factored):
        assert result.value < 0.99 * entropic.value
        # sharp: nearly all of a row's mass at one target
        assert result.plan.max(1).mean() * 40 > 0.95
    # the two measure the change of the plan differently, and end at different steps
    assert factored.value == pytest.approx(dense.value, rel=0.03)
    assert sampled.status is Status.STATIONARY
    assert sampled.value < 1.3 * dense.value + 6 * sampled.log["value_standard_error"]
    assert (np.asarray(sampled.lazy_plan.argmax()) == answer).mean() > 0.8


@pytest.mark.parametrize("alpha", [0.1, 0.99])
@pytest.mark.parametrize("objective_tol", [0, 1e-4])
def test_a_coupling_that_sees_nothing_does_not_end_the_steps(alpha, objective_tol):
    """All points of a side are one, and the linear cost alone moves the plan.

    It was CONVERGED after two steps. Followed to its end it is the best of all for that cost.
    """
    rng = np.random.default_rng(3)
    options = {
        "M": rng.random((7, 7)), "alpha": alpha, "distances": "sqeuclidean", "epsilon": 1e-3,
        "gradient": "factored", "regularization": "proximal", "scale": None, "max_iter": 2000,
    }  # fmt: skip
    x, y = np.zeros((7, 2)), rng.normal(size=(7, 2))
    result = solve_by_name(x, y, objective_tol=objective_tol, **options)
    best = options["M"][linear_sum_assignment(options["M"])].mean()
    if objective_tol:
        assert result.status in (Status.FLAT, Status.CONVERGED)
        return
    assert result.status is Status.CONVERGED
    assert result.value_linear == pytest.approx((1 - alpha) * best, rel=1e-3)


def test_steps_to_a_copy_end_before_the_limit():
    """The plan moves on where the value has nothing left to fall by; 500 points met the limit."""
    x = np.random.default_rng(5).normal(size=(150, 3))
    options = {"distances": "euclidean", "regularization": "proximal", "random_state": 0}
    options |= {"max_iter": 180, "polish": False}
    with pytest.warns(ConvergenceWarning, match="max_iter"):
        solve_by_name(x, x[::-1].copy(), objective_tol=0, **options)
    result = solve_by_name(x, x[::-1].copy(), **options)
    assert result.status is Status.FLAT
    assert result.gradient == "dense"
    assert result.value < 1e-6
    assert (np.asarray(result.lazy_plan.argmax()) == np.arange(150)[::-1]).all()


def test_the_change_of_a_plan_is_that_of_the_next_step():
    """CONVERGED where the next step moved .3% of the plan: a coupling moves by the square of it."""
    x, y, _ = isometric_copy(40, noise=0.2, seed=1)
    options = {
        "distances": "sqeuclidean", "gradient": "factored", "regularization": "proximal",
        "random_state": 0, "tol": 1e-4,
    }  # fmt: skip
    result = solve_by_name(x, y, objective_tol=0, max_iter=3000, **options)
    assert result.status is Status.CONVERGED
    more = result.n_iters + 1
    with pytest.warns(ConvergenceWarning, match="max_iter"):
        after = solve_by_name(x, y, **options | {"tol": 1e-12}, objective_tol=0, max_iter=more)
    plan = np.asarray(result.plan)
    assert np.linalg.norm(np.asarray(after.plan) - plan) <= 1.5e-4 * np.linalg.norm(plan)
    flat = solve_by_name(x, y, **options)
    assert flat.status is Status.FLAT
    assert flat.n_iters < result.n_iters


@pytest.mark.filterwarnings("ignore:Rounding ends:torchgw.ConvergenceWarning")
@pytest.mark.parametrize("precision", ["mixed", "float32"])
@pytest.mark.parametrize("storage", ["stored", "streamed"])
def test_precisions_end_at_one_value(precision, storage):
    x, y, _ = isometric_copy(60, noise=0.2, seed=1)
    options = {"distances": "sqeuclidean", "regularization": "proximal"}
    exact = solve_by_name(x, y, precision="float64", **options)
    result = solve_by_name(x, y, precision=precision, storage=storage, **options)
    rounded = precision == "float32" and result.status is Status.PRECISION_LIMIT
    assert result.converged or rounded
    # float32 stops earlier, where the rounding of the exponents is the change of the plan; others
    # within a few steps of each other, as linear problems are not solved by the same iterations
    assert result.value == pytest.approx(exact.value, rel=0.15 if precision == "float32" else 5e-3)
    # what the rounding of exponents leaves hangs on the start: 5e-5 to 1.02e-4 here
    assert result.marginal_error < (1.5e-4 if precision == "float32" else 1e-5)


def test_reservoir_keeps_its_share():
    table = PrecomputedDistance(1 - torch.eye(50, dtype=torch.float64))
    uniform = torch.full((50,), 0.02, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    problem = Problem(table, table, Marginals(uniform, uniform), 1.0, None)
    gradient = SampledGradient(problem, 1000, 1.0)
    latest = AnchorCoupling(*(torch.arange(1000) + 1000 for _ in range(2)))
    first = gradient.start().mean(latest, 0.5, generator)
    assert int((first.source >= 1000).sum()) == 500
    assert torch.equal(first.source >= 1000, first.target >= 1000)
    # shares below one anchor are met in the mean: 200 draws of 0.3 anchors
    counts = [
        int((gradient.start().mean(latest, 3e-4, generator).source >= 1000).sum())
        for _ in range(200)
    ]
    assert set(counts) == {0, 1}
    assert 30 < sum(counts) < 90


@pytest.mark.parametrize("gradient", ["dense", "factored"])
def test_polish_ends_at_a_stationary_vertex(gradient):
    x, y, answer = isometric_copy(50, noise=0.2, seed=1)
    options = {"distances": "sqeuclidean", "gradient": gradient, "epsilon": 1e-3}
    plain = solve_by_name(x, y, **options)
    result = solve_by_name(x, y, polish=True, **options)
    assert result.epsilon == 0
    assert result.log["polish_steps"] >= 1
    assert 0 <= result.log["polish_gap"] < 1e-6 * plain.value
    assert result.value < plain.value
    plan = np.asarray(result.plan)
    assert np.abs(plan.sum(1) - 1 / 50).max() < 1e-12
    assert result.marginal_error < 1e-12
    # zeros are zeros
    assert ((plan != 0).sum(1) == 1).all()
    assert (result.lazy_plan.rows([0, 3]) != 0).sum() == 2
    assert (plan.argmax(1) == answer).mean() > 0.9
    tables = [ot.dist(side, side) for side in (x, y)]
    tables = [table / table.max() for table in tables]
    assert result.value == pytest.approx(reference.gw_value(*tables, plan), rel=1e-9)
    # what POT's conditional gradient finds from there is no lower
    after, log = ot.gromov.gromov_wasserstein(*tables, G0=plan, log=True)
    assert log["gw_dist"] >= result.value * (1 - 1e-9)
    assert np.abs(after - plan).sum() < 1e-9


def test_polish_takes_over_from_proximal_steps():
    x, y, _ = isometric_copy(50, noise=0.2, seed=1)
    options = {"distances": "sqeuclidean", "gradient": "dense", "regularization": "proximal"}
    sharp = solve_by_name(x, y, polish=False, **options)
    result = solve_by_name(x, y, **options)
    assert result.status is Status.CONVERGED
    assert result.n_iters < sharp.n_iters
    # a vertex: what is left of the entropy of the sharp plan does not count
    assert result.value <= sharp.value * (1 + 1e-6)
    assert result.epsilon == 0 < sharp.epsilon


def test_a_rough_start_is_followed_by_two_paths():
    """From the product plan of a ring steps at a large epsilon alone lead nowhere."""
    ring = nx.to_numpy_array(nx.cycle_graph(21))
    order = np.random.default_rng(0).permutation(21)
    options = {"D_X": ring, "D_Y": ring[order][:, order], "regularization": "proximal"}
    result = torchgw.solve(n_init=1, **options)
    assert result.status is Status.CONVERGED
    assert result.value < 1e-12
    # one path is in the history, as the only one that there was
    assert [entry.iteration for entry in result.history] == list(range(result.n_iters))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchgw.SearchWarning)
        steps = torchgw.solve(n_init=1, polish=False, **options)
    assert steps.value < 1e-3 or "same distances" in steps.doubt


def test_steps_at_a_huge_epsilon_are_counted_up_to_the_limit_alone(monkeypatch):
    """How many lead to a sharp plan was counted one by one, for ever and past any time limit."""
    call, counted = Annealing.__call__, itertools.count(1)

    def called(anneal, step):
        assert next(counted) < 2000
        return call(anneal, step)

    monkeypatch.setattr(Annealing, "__call__", called)
    x, y, _ = isometric_copy(9, noise=0.2, seed=0)
    result = solve_by_name(
        x, y, regularization="proximal", epsilon=1e9, n_init=1, max_iter=20, random_state=0
    )
    assert result.n_iters <= 20
    assert result.status in (Status.CONVERGED, Status.POLISH_LIMIT)


def test_steps_go_on_from_a_plan_that_starts_agree_on():
    """At a larger epsilon it would be blurred, to be made sharp anew in tens of steps."""
    rng = np.random.default_rng(3)
    graph = nx.to_numpy_array(nx.barabasi_albert_graph(130, 3, seed=3))
    copy = graph.copy()
    for i, j in rng.integers(130, size=(40, 2)):
        copy[i, j] = copy[j, i] = float(i != j)
    order = rng.permutation(130)
    weights = {"a": graph.sum(0) / graph.sum(), "b": copy[order].sum(1) / copy.sum()}
    options = {"D_X": graph, "D_Y": copy[order][:, order], "regularization": "proximal", **weights}
    result = torchgw.solve(**options)
    assert result.status is Status.CONVERGED
    assert not result.doubt
    # one start alone, by steps at a large epsilon, takes many more and ends no lower
    steps = torchgw.solve(n_init=1, **options)
    assert result.n_iters < steps.n_iters
    assert result.value <= steps.value * (1 + 1e-6)
    # what is polished need not have met its weights closely
    exact = solve_by_name(inner_tol=1e-7, **options)
    assert result.value == pytest.approx(exact.value, rel=1e-6)
    sharp = torchgw.solve(polish=False, **options)
    assert sharp.value == pytest.approx(result.value, rel=1e-3)


# starts end at different optima, and it is of no matter which of them is the best
@pytest.mark.filterwarnings("ignore::torchgw.SearchWarning")
def test_without_an_exact_solver_steps_go_on(monkeypatch):
    d_x, d_y = distance_matrices(12, 9)
    options = {"D_X": d_x, "D_Y": d_y, "regularization": "proximal"}
    polished = torchgw.solve(**options)
    assert polished.epsilon == 0
    monkeypatch.setitem(sys.modules, "ot", None)
    steps, refused = torchgw.solve(**options), torchgw.solve(polish=False, **options)
    assert steps.epsilon > 0
    np.testing.assert_array_equal(steps.plan, refused.plan)
    assert polished.value <= steps.value * (1 + 1e-6)


def test_polish_with_general_weights_and_a_linear_cost():
    d_x, d_y = distance_matrices(20, 15)
    a, b = random_weights(20), random_weights(15, 1)
    linear = np.random.default_rng(0).uniform(size=(20, 15))
    options = {"D_X": d_x, "D_Y": d_y, "a": a, "b": b, "M": linear, "alpha": 0.7}
    plain = solve_by_name(**options)
    result = solve_by_name(polish=True, **options)
    # the plain plan misses its marginals by 3e-7, which may buy that much
    assert result.value < plain.value * (1 + 1e-6)
    assert result.marginal_error < 1e-12
    after = ot.gromov.fused_gromov_wasserstein(
        linear, d_x, d_y, a, b, alpha=0.7, G0=np.asarray(result.plan)
    )
    value = 0.3 * (linear * after).sum() + 0.7 * reference.gw_value(d_x, d_y, after)
    assert value >= result.value * (1 - 1e-6)


def test_polish_ends_between_vertices():
    """Where the objective is convex on plans; steps to one vertex at a time take hundreds."""
    rng = np.random.default_rng(0)
    y, linear = rng.normal(size=(12, 2)), rng.uniform(size=(12, 12))
    # -C_X is positive definite on rows that sum to zero, and so is C_Y
    d_x, d_y = 1 - np.eye(12), np.exp(-cdist(y, y, "sqeuclidean"))
    with pytest.warns(torchgw.TorchGWWarning, match="similarities"):
        result = torchgw.solve(D_X=d_x, D_Y=d_y, M=linear, alpha=0.7, n_init=1, polish=True)
    assert result.status is Status.CONVERGED
    assert result.log["polish_steps"] < 50
    plan = np.asarray(result.plan)
    # the objective changes by this from plan to plan, but for terms of the marginals
    cost = 0.3 * linear - 4 * 0.7 * d_x @ plan @ d_y
    rows, columns = linear_sum_assignment(cost)
    assert (cost * plan).sum() - cost[rows, columns].mean() < 1e-8
    assert (plan > 1e-6).sum() > 15


def test_polish_is_refused_with_the_reason(monkeypatch):
    d_x, d_y = distance_matrices(12, 9)
    with pytest.raises(torchgw.UnsupportedError, match="exact gradient"):
        torchgw.solve(D_X=d_x, D_Y=d_y, gradient="sampled", polish=True)
    monkeypatch.setitem(sys.modules, "ot", None)
    with pytest.raises(torchgw.UnsupportedError, match="pip install pot"):
        torchgw.solve(D_X=d_x, D_Y=d_y, polish=True)
    with pytest.raises(torchgw.InvalidInputError, match="polish"):
        torchgw.solve(D_X=d_x, D_Y=d_y, polish=1)
    with pytest.raises(torchgw.InvalidInputError, match="'entropic' or 'proximal'"):
        torchgw.solve(D_X=d_x, D_Y=d_y, regularization="ppa")


@pytest.mark.parametrize("seed", [13, 16, 27, 45, 160])
@pytest.mark.filterwarnings("ignore::torchgw.TorchGWWarning")
def test_no_matching_costs_less_than_a_polished_plan(seed):
    """Tables of either sign, directed ones too, where plans with entropy lead elsewhere."""
    rng = np.random.default_rng(seed)
    n = 4 + seed % 4
    sides = rng.normal(size=(2, n, n))
    if seed % 8 < 5:
        sides = sides + sides.transpose(0, 2, 1)
    orders = map(list, itertools.permutations(range(n)))
    least = min(((sides[0] - sides[1][np.ix_(one, one)]) ** 2).mean() for one in orders)
    kind = PrecomputedDistance.unchecked if seed % 8 < 5 else DirectedDistance
    result = torchgw.solve(*(kind(torch.as_tensor(side)) for side in sides), polish=True)
    assert result.value <= least * (1 + 1e-9) or result.doubt


def test_polish_of_negative_costs():
    """Distances in large units: the linearised cost is far below zero, and still has a plan."""
    steps = np.abs(np.subtract.outer(np.arange(12.0), np.arange(12.0)))
    y = np.random.default_rng(0).normal(size=(9, 3))
    options = {"D_X": steps, "D_Y": cdist(y, y), "epsilon": 0.1, "random_state": 0}
    plain = solve_by_name(**options)
    result = solve_by_name(polish=True, **options)
    assert result.marginal_error < 1e-12
    assert result.value < plain.value


@pytest.mark.parametrize("gradient", ["dense", "factored"])
def test_polish_in_single_precision(gradient):
    x, y, _ = isometric_copy(30, noise=0.05, seed=1)
    options = {"distances": "sqeuclidean", "gradient": gradient, "polish": True}
    single, double = (
        solve_by_name(x, y, precision=name, random_state=0, **options)
        for name in ("float32", "float64")
    )
    # the rounding of float32, relative to squared distances of up to one
    assert single.value == pytest.approx(double.value, abs=1e-6)
    np.testing.assert_array_equal(single.lazy_plan.argmax(), double.lazy_plan.argmax())


@pytest.mark.parametrize("seed", [0, 5])
def test_a_plan_that_needs_no_polish_is_a_vertex(seed):
    """Entropy too weak to be seen leaves entries of 1e-15, which are none."""
    rng = np.random.default_rng(seed)
    tables = [cdist(points, points) for points in (rng.normal(size=(6, 2)) for _ in range(2))]
    result = torchgw.solve(D_X=tables[0], D_Y=tables[1], polish=True, scale=None, random_state=0)
    assert int((result.plan != 0).sum()) == 6
