"""Multi-start: the right optimum by default, what else was found, and how sure it is."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import networkx
import numpy as np
import pytest
import reference
import scipy.stats
import torch
from problems import distance_matrices, isometric_copy, quick, random_weights, solve_by_name

import torchgw
from torchgw._plans.given import StoredPlan
from torchgw._plans.transport import round_to_marginals
from torchgw._problem.losses import LOSSES
from torchgw._problem.problem import Problem
from torchgw._search import optima
from torchgw._search.optima import agreement, find_optima
from torchgw._sinkhorn.choose import choose_backend
from torchgw._sinkhorn.problem import DenseCost
from torchgw._solve.strategy import natural_scale
from torchgw._starts.alternatives import Alternative, sent_apart
from torchgw._starts.coarse import coarse_problem, coarsen
from torchgw._tensors import cuda_graphs
from torchgw._typing import Marginals
from torchgw.distances import CallableDistance, PointDistance, PrecomputedDistance


def coarse_input(tables, a=None, b=None, linear=None, alpha=1.0):
    sides = [PrecomputedDistance(torch.as_tensor(table)) for table in tables]
    weights = [
        torch.full((side.n,), 1 / side.n, dtype=torch.float64, device=side.device)
        if weight is None
        else weight
        for side, weight in zip(sides, (a, b), strict=True)
    ]
    stored = None if linear is None else DenseCost(linear)
    return Problem(*sides, Marginals(*weights), alpha, stored)


def curve(n, seed=0, noise=0.01):
    """Points along an arc whose density falls: straight and mirrored matchings differ in value."""
    rng = np.random.default_rng(seed)
    t = np.sort(rng.uniform(size=n) ** 1.3)
    points = np.column_stack([np.cos(2 * t), np.sin(2 * t)])
    return points + noise * rng.normal(size=points.shape), t


def test_matches_of_similarities_are_apart():
    """The larger of two entries is the nearer point there, and a point is most like itself."""
    factors = np.random.default_rng(0).normal(size=(2, 5, 2))
    coarse = coarsen(coarse_input(factors @ factors.swapaxes(1, 2)), 5).problem
    orders = torch.tensor(list(itertools.permutations(range(5))))
    apart = coarse.distances(torch.eye(5, dtype=torch.float64)[orders] / 5)
    assert (apart.diagonal().abs() < 1e-12).all()
    assert (apart + torch.eye(len(apart)) > 1e-6).all()


@pytest.mark.parametrize("batch", [(), (4,)])
def test_rounding_is_feasible_and_near(batch):
    generator = torch.Generator().manual_seed(0)
    plan = torch.rand(*batch, 7, 9, generator=generator, dtype=torch.float64)
    a, b = (torch.rand(*batch, k, generator=generator, dtype=torch.float64) for k in (7, 9))
    a[..., 2] = 0
    a, b = a / a.sum(-1, keepdim=True), b / b.sum(-1, keepdim=True)
    plan = plan * a[..., None] / plan.sum(-1, keepdim=True)
    plan[..., 2, :] = 0.01
    rounded = round_to_marginals(plan, a, b)
    assert float(rounded.min()) >= 0
    torch.testing.assert_close(rounded.sum(-1), a, atol=1e-15, rtol=0)
    torch.testing.assert_close(rounded.sum(-2), b, atol=1e-15, rtol=0)
    error = (plan.sum(-1) - a).abs().sum(-1) + (plan.sum(-2) - b).abs().sum(-1)
    # the bound of Altschuler, Weed and Rigollet
    assert bool(((rounded - plan).abs().sum((-1, -2)) <= 2 * error + 1e-12).all())
    torch.testing.assert_close(round_to_marginals(rounded, a, b), rounded, atol=1e-15, rtol=0)


@pytest.mark.parametrize("fused", [False, True])
def test_coarse_problem_of_all_points_is_the_problem(fused):
    """Value and cost are those of the definition, whatever constants were taken out."""
    d_x, d_y = distance_matrices(12, 15)
    a, b = (torch.as_tensor(random_weights(n, seed)) for n, seed in ((12, 1), (15, 2)))
    linear = torch.rand(12, 15, dtype=torch.float64) if fused else None
    alpha = 0.3 if fused else 1.0
    whole = coarsen(coarse_input((d_x, d_y), a, b, linear, alpha), 20)
    assert whole.resolution == 0
    coarse = whole.problem
    plans = torch.rand(3, 12, 15, dtype=torch.float64)
    plans = round_to_marginals(plans / plans.sum((1, 2), keepdim=True), a, b)
    for plan, value in zip(plans, coarse.value(plans), strict=True):
        expected = alpha * reference.gw_value(d_x, d_y, plan.numpy())
        if fused:
            expected += (1 - alpha) * float((linear * plan).sum())
        assert float(value) == pytest.approx(expected, rel=1e-12)
    plans.requires_grad_(True)
    coarse.value(plans).sum().backward()
    cost = coarse.base - 4 * alpha * coarse.x @ plans.detach() @ coarse.y
    torch.testing.assert_close(plans.grad, cost)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_coarse_problem_of_all_points_has_the_scale_of_the_problem(loss, fused):
    linear = torch.rand(12, 15, dtype=torch.float64) if fused else None
    problem = coarse_input(distance_matrices(12, 15), None, None, linear, 0.3 if fused else 1.0)
    problem = replace(problem, loss=LOSSES[loss])
    made, scale = coarse_problem(problem, 20), natural_scale(problem, relaxed=False)
    assert made.scale == pytest.approx(scale, rel=1e-9)
    # what is taken out of the linear cost, so that no entry is below zero
    assert made.floor == pytest.approx(0.7 * float(linear.min()) if fused else 0.0)


def test_coarse_points_carry_the_mass_of_their_neighbours():
    x = np.random.default_rng(0).normal(size=(500, 2))
    weights = random_weights(500)
    weights[:100] = 0
    weights = torch.as_tensor(weights / weights.sum())
    table = np.linalg.norm(x[:, None] - x, axis=2)
    coarse = coarsen(coarse_input((table, table), weights, weights), 64)
    side = coarse.problem.source
    assert len(set(side.indices.tolist())) == 64
    assert bool((weights[side.indices] > 0).all())
    nearest = table[:, side.indices.numpy()].argmin(1)
    expected = np.bincount(nearest, weights=weights.numpy(), minlength=64)
    np.testing.assert_allclose(side.weights.numpy(), expected, atol=1e-15)
    assert 0 < coarse.resolution < 0.2
    finer = coarsen(coarse_input((table, table), weights, weights), 128)
    assert torch.equal(finer.problem.source.indices[:64], side.indices)
    assert finer.resolution < coarse.resolution


def test_search_finds_both_orders_of_a_line():
    points = np.linspace(0, 1, 40)
    table = abs(points[:, None] - points)
    found = find_optima(coarse_input((table, table)), 1e-3, 16)
    assert len(found.alternatives) == 2
    assert found.ambiguity == pytest.approx(1, abs=1e-3)
    orders = {
        round(float(scipy.stats.spearmanr(np.arange(40), one.plan.argmax(1)).statistic))
        for one in found.alternatives
    }
    assert orders == {-1, 1}
    for one in found.alternatives:
        torch.testing.assert_close(one.plan.sum(1), torch.full((40,), 1 / 40).double())


@pytest.mark.parametrize("gradient", ["dense", "factored", "sampled"])
@pytest.mark.parametrize(("n", "seeds"), [(40, 8), pytest.param(150, 20, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::torchgw.SearchWarning")
def test_isometric_copies_are_recovered_from_any_seed(gradient, n, seeds):
    """Clouds in space have eight mirror images; all but one are worse."""
    for seed in range(seeds):
        x, y, answer = isometric_copy(n, seed=seed)
        result = torchgw.solve(
            x, y, distances="sqeuclidean", gradient=gradient, random_state=seed, epsilon=1e-3
        )
        recovered = (np.asarray(result.lazy_plan.argmax()) == answer).mean()
        # neighbours are exchanged by the blur of epsilon and by sampling, mirror images are not
        assert recovered > 0.7, (seed, recovered)
        # drawn pairs do not tell that these are copies, and blurred starts may differ
        assert gradient == "sampled" or not result.doubt


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchgw.ConvergenceWarning")
def test_gaussian_clouds_with_few_anchors():
    """Without control variates the noise drowns the answer for most seeds of these."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 3)) * [3, 2, 1]
    for seed in range(3):
        result = torchgw.solve(
            x,
            x,
            distances="euclidean",
            gradient="sampled",
            random_state=seed,
            options=torchgw.Options(n_anchors=256),
        )
        recovered = (np.asarray(result.lazy_plan.argmax()) == np.arange(300)).mean()
        assert recovered > 0.8, (seed, recovered)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("distances", ["precomputed", "landmark", "dijkstra", "euclidean"])
def test_mirrored_curves_are_told_apart(distances, seed):
    (x, t_x), (y, t_y) = curve(130, seed), curve(110, seed + 50)
    count = None if distances == "euclidean" else 10
    gradient = "sampled" if distances == "dijkstra" else "auto"
    result = torchgw.solve(
        x, y, distances=distances, n_neighbors=count, gradient=gradient, random_state=seed
    )
    matched = t_y[np.asarray(result.lazy_plan.argmax())]
    assert scipy.stats.spearmanr(t_x, matched).statistic > 0.99
    assert 0 < result.ambiguity < 0.9
    assert "mbiguous" not in repr(result)


def same_search(one, other):
    assert one.ambiguity == other.ambiguity
    assert [a.value for a in one.alternatives] == [a.value for a in other.alternatives]
    for ours, theirs in zip(one.alternatives, other.alternatives, strict=True):
        assert ours.label == theirs.label
        assert all(
            torch.equal(getattr(ours, name), getattr(theirs, name))
            for name in ("plan", "source", "target")
        )


def searches_of_one_shape(device):
    """Clear and close ones, with duplicates, fused, from factors, in high dimensions."""
    linear = torch.rand(120, 110, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = Marginals(*(torch.full((n,), 1 / n).double().to(device) for n in (120, 110)))
    backend = choose_backend("auto", torch.device(device), torch.float32)

    def search(providers, alpha=1.0, stored=None):
        problem = Problem(*providers, weights, alpha, stored)
        return lambda: find_optima(problem, 0.01, 8, backend)

    for seed in range(3):
        points = [curve(n, seed + shift)[0] for n, shift in ((120, 0), (110, 50))]
        if seed == 2:
            # fewer distinct points than a coarse problem has
            points[0][20:60] = points[0][60:100]
        sides = [torch.as_tensor(part, device=device) for part in points]
        tables = [PrecomputedDistance(torch.cdist(side, side)) for side in sides]
        yield search(tables)
        yield search(tables, 0.5 + 0.1 * seed, DenseCost((seed + 1) * linear.to(device)))
        yield search([PointDistance(side, "sqeuclidean") for side in sides])
        clouds = (torch.as_tensor(part, device=device) for part in cosine_problem(120, seed)[:2])
        yield search(
            [
                PointDistance(cloud[:n], "cosine")
                for cloud, n in zip(clouds, (120, 110), strict=True)
            ]
        )


@pytest.mark.slow
def test_replayed_searches_follow_their_problem(monkeypatch):
    """With graphs that call the function again: nothing of a problem may stay in a recording."""

    class Graph:
        def __init__(self, record, *args, **kwargs):
            self.replay = record

    memory = cuda_graphs.GraphMemory(None, None, None, OrderedDict())
    monkeypatch.setattr(cuda_graphs, "capture", Graph)
    monkeypatch.setattr(cuda_graphs, "borrow_memory", lambda owner, device: memory)
    searches = list(searches_of_one_shape("cpu"))
    expected = [search() for search in searches]
    monkeypatch.setattr("torchgw._search.optima._has_graphs", lambda device, backend: True)
    for search, found in zip(searches, expected, strict=True):
        same_search(search(), found)
    assert memory.kept


def test_what_one_graph_returns_may_be_overwritten_by_the_next(monkeypatch):
    """Functions are not always recorded in the order of their calls: the worst of those."""
    sides = [torch.randn(140, 3, generator=torch.Generator().manual_seed(k)) for k in range(2)]
    problem = coarse_input([torch.cdist(side, side).double() for side in sides])
    expected = find_optima(problem, 0.01, 16)
    returned = []

    def call(name, function, *arguments, in_place=0):
        if name == "coarsen 256":
            for tensor in cuda_graphs.tensors_of(tuple(returned)):
                tensor.fill_(10**6)
        returned.append(function(*arguments))
        return returned[-1]

    monkeypatch.setattr(optima, "_way_to_call", lambda *_: call)
    same_search(find_optima(problem, 0.01, 16), expected)
    assert returned


class Lent:
    """Calls functions as graphs do: others may write over their results once this is gone."""

    def __call__(self, name, function, *arguments, in_place=0):
        found = cuda_graphs.clone(function(*arguments))
        parts = [part for part in cuda_graphs.tensors_of(found) if part.is_floating_point()]
        weakref.finalize(self, lambda: [part.fill_(torch.nan) for part in parts])
        return found


def test_what_a_graph_returns_is_read_while_its_memory_is_lent(monkeypatch):
    """Two threads with problems of one size would read each other's plans."""
    expected = searched_before(40, 0)[2]
    monkeypatch.setattr(optima, "way_to_call", lambda *_: Lent())
    found = searched_before(40, 0)[2]
    assert torch.equal(found[0].batch.plans, expected[0].batch.plans)


def searched_before(n, seed, where="cpu"):
    """Points of two sides, the problem between them in another unit, and what was searched."""
    x, y, _ = isometric_copy(n, 3, seed, noise=0.1)
    sides, device, made = [torch.as_tensor(side) for side in (x, y)], torch.device(where), []
    agreement(*(PointDistance(side, "euclidean") for side in sides), device=device, made=made)
    tables = [torch.cdist(side, side).to(device) for side in sides]
    tables = [tables[0] / 3, tables[1] / tables[1].max()]
    problem = coarse_input(tables)
    spreads = [table.std(correction=0) for table in tables]
    return problem, 0.01 * float(spreads[0] * spreads[1]), made


@pytest.mark.parametrize("n", [90, 140])
def test_a_search_that_was_made_elsewhere_has_the_same_optima(n):
    problem, epsilon, made = searched_before(n, n)
    fresh, found = (find_optima(problem, epsilon, 16, made=some) for some in ((), made))
    # starts that lead to the same optimum differ by rounding
    assert found.alternatives[0].value == pytest.approx(fresh.alternatives[0].value, rel=1e-3)


WEIGHTS_OF_60 = [torch.as_tensor(random_weights(60, seed)) for seed in (0, 1)]


@pytest.mark.parametrize("other", ["weights", "epsilon", "points", "features", "starts"])
def test_a_search_of_another_problem_is_made(other):
    problem, epsilon, made = searched_before(60, 1)
    count = 16
    if other == "weights":
        problem = replace(problem, marginals=Marginals(*WEIGHTS_OF_60))
    elif other == "epsilon":
        epsilon *= 2
    elif other == "points":
        problem = replace(problem, source=PrecomputedDistance(problem.source.matrix().flip(0, 1)))
    elif other == "features":
        problem = replace(problem, linear=DenseCost(problem.source.matrix().clone()), alpha=0.5)
    else:
        count = 8
    fresh, found = (find_optima(problem, epsilon, count, made=some) for some in ((), made))
    same_search(found, fresh)


def test_distances_that_were_chosen_lead_to_the_plan_of_those_that_are_named():
    x, y, _ = isometric_copy(80, 6, 0, noise=0.1)
    alone = torchgw.solve(x, y, distances="euclidean")
    known = torchgw.solve(x, y)
    assert known.report.distances["chosen"] == "euclidean"
    assert known.report.objective == pytest.approx(alone.report.objective, rel=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [90, 140, 400])
def test_a_search_that_was_made_on_a_gpu_has_the_same_optima(n):
    problem, epsilon, made = searched_before(n, n, "cuda")
    backend = choose_backend("auto", torch.device("cuda"), torch.float32)
    for _ in range(3):
        # called, recorded, replayed
        found = find_optima(problem, epsilon, 16, backend, made)
    fresh = find_optima(problem, epsilon, 16, backend)
    assert found.alternatives[0].value == pytest.approx(fresh.alternatives[0].value, rel=1e-3)


@pytest.mark.gpu
def test_a_search_is_the_same_from_graphs(monkeypatch):
    searches = list(searches_of_one_shape("cuda"))
    backend = choose_backend("auto", torch.device("cuda"), torch.float32)
    for seed in range(8):
        # mirror images of clouds are compared on more points, two to five of them
        x, y, _ = isometric_copy(300, 2 + seed % 2, seed, noise=0.3)
        sides = [torch.as_tensor(part, device="cuda") for part in (x, y)]
        problem = coarse_input([torch.cdist(side, side) for side in sides])
        searches.append(partial(find_optima, problem, 0.05, 16, backend))
    # in other orders too: the first of a kind calls, the second records, later ones replay
    orders = [searches, searches[::-1], searches[::2] + searches[1::2]]
    found = [[search() for search in order] for order in orders]
    monkeypatch.setattr("torchgw._search.optima._has_graphs", lambda device, backend: False)
    for order, results in zip(orders, found, strict=True):
        for search, result in zip(order, results, strict=True):
            same_search(search(), result)


@pytest.mark.gpu
def test_threads_do_not_share_graphs():
    searches = list(searches_of_one_shape("cuda"))
    for _ in range(2):
        expected = [search() for search in searches]

    def work(search):
        with torch.cuda.stream(torch.cuda.Stream()):
            found = [search() for _ in range(4)]
            torch.cuda.current_stream().synchronize()
            return found

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        for results, alone in zip(pool.map(work, searches), expected, strict=True):
            for result in results:
                same_search(result, alone)


def test_symmetric_shapes_are_ambiguous():
    angle = np.linspace(0, 2 * np.pi, 120, endpoint=False)
    ellipse = np.column_stack([2 * np.cos(angle), np.sin(angle)])
    result = torchgw.solve(ellipse, ellipse, distances="euclidean", random_state=0)
    assert result.ambiguity > 0.98
    # which of the other three symmetries starts come to depends on rounding
    first, *others = result.alternatives
    assert others
    assert all(one.value == pytest.approx(first.value, rel=1e-6) for one in others)
    symmetries = {"the first mirrored", "the first turned by 180 degrees"}
    symmetries |= {"the first mirrored, with its longest extent read backwards"}
    assert {one.relation for one in others} <= symmetries
    assert len({one.relation for one in others}) == len(others)
    assert "Ambiguous" in repr(result)
    assert result.value < 1e-3


# two of the starts find the better order, where three are asked
@pytest.mark.filterwarnings("ignore::torchgw.SearchWarning")
def test_alternatives_are_starts():
    (x, t_x), (y, t_y) = curve(130), curve(110, 1)
    options = {"distances": "euclidean", "random_state": 0}
    result = solve_by_name(x, y, **options)
    best, other = result.alternatives[:2]
    assert best.value < other.value
    assert result.ambiguity == pytest.approx(best.value / other.value)
    again = solve_by_name(x, y, init=best, **options)
    assert again.value == pytest.approx(result.value, rel=1e-5)
    assert again.alternatives == ()
    assert np.isnan(again.ambiguity)
    mirrored = solve_by_name(x, y, init=other, **options)
    assert mirrored.value > result.value
    matched = t_y[np.asarray(mirrored.lazy_plan.argmax())]
    assert scipy.stats.spearmanr(t_x, matched).statistic < -0.9
    with pytest.raises(torchgw.InvalidInputError, match=r"shape \(110, 130\)"):
        solve_by_name(y, x, init=other, **options)


def test_single_start_is_the_annealed_one():
    """n_init=1 begins at a x b at the natural scale, and searches nothing."""
    d_x, d_y = distance_matrices()
    single = torchgw.solve(D_X=d_x, D_Y=d_y, epsilon=0.01, n_init=1)
    assert single.alternatives == ()
    assert np.isnan(single.ambiguity)
    scale = 4 * float(np.std(d_x) * np.std(d_y))
    assert single.history[0].epsilon == pytest.approx(scale)
    asked = {"D_X": d_x, "D_Y": d_y, "epsilon": 0.01}
    several = torchgw.solve(**asked, search="fast")
    assert several.history[0].epsilon == pytest.approx(0.1 * scale)
    # a start can only find as low a value, up to the tolerance of the solve
    assert several.value <= single.value * 1.01
    assert np.array_equal(several.plan, torchgw.solve(**asked, search="fast").plan)


def cosine_problem(n, seed, noise=0.9):
    """Clustered vectors in 100 dimensions and a rotated, shuffled copy with noise."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(15, 100))[rng.integers(15, size=n)] + rng.normal(size=(n, 100))
    y = x + noise * rng.normal(size=x.shape)
    answer = rng.permutation(n)
    shuffled = np.empty_like(y)
    shuffled[answer] = y
    return x, shuffled, answer


def test_points_of_high_dimensions_find_their_partners():
    """A few points say nothing about the others' partners; a single start exchanges clusters."""
    x, y, answer = cosine_problem(150, seed=0)
    result = torchgw.solve(x, y, distances="cosine", random_state=0)
    assert (np.asarray(result.lazy_plan.argmax()) == answer).mean() > 0.95


def test_fused_search_follows_the_linear_term():
    """The linear term prefers the mirrored order of a line, whose distances do not care."""
    points = np.linspace(0, 1, 120)
    linear = abs(points[:, None] + points - 1)
    result = torchgw.solve(
        points[:, None], points[:, None], distances="euclidean", M=linear, alpha=0.9
    )
    order = np.asarray(result.lazy_plan.argmax())
    assert scipy.stats.spearmanr(np.arange(120), order).statistic < -0.99
    assert not result.doubt
    # a constant in the linear term changes no plan
    table = torch.as_tensor(abs(points[:, None] - points))
    shifts = [
        find_optima(coarse_input((table, table), None, None, torch.as_tensor(linear) + shift, 0.9),
                    1e-3, 16).ambiguity
        for shift in (0.0, -50.0)
    ]  # fmt: skip
    assert shifts[1] == pytest.approx(shifts[0], rel=1e-2)


def test_zero_weights_and_tiny_problems():
    x, y, _ = isometric_copy(120, 2)
    a = np.full(120, 1 / 60)
    a[::2] = 0
    result = torchgw.solve(x, y, a=a, distances="euclidean", random_state=0)
    assert result.converged
    assert not np.isin(result.alternatives[0].source, np.arange(0, 120, 2)).any()
    for n, m in ((1, 1), (1, 5), (2, 2), (3, 2)):
        small = torchgw.solve(x[:n], x[:m], distances="euclidean", scale=None)
        assert small.marginal_error < 1e-6
    # two against two leave the saddle point now: either matching is exact
    assert torchgw.solve(x[:2], x[:2], distances="euclidean").value < 1e-6


# two of the starts find the better order, where three are asked
@pytest.mark.filterwarnings("ignore::torchgw.SearchWarning")
def test_any_provider_that_gives_columns():
    (x, t_x), (y, t_y) = curve(130), curve(110, 1)
    providers = [
        CallableDistance(
            len(points),
            lambda index, p=points: torch.cdist(p, p[index]),
            dtype=torch.float64,
        )
        for points in map(torch.as_tensor, (x, y))
    ]
    result = torchgw.solve(*providers, gradient="sampled", random_state=0)
    matched = t_y[np.asarray(result.lazy_plan.argmax())]
    assert scipy.stats.spearmanr(t_x, matched).statistic > 0.99
    assert len(result.alternatives) >= 2


def test_potentials_are_those_of_the_whole_cost():
    """With them a problem whose linear cost decides begins nearly where it ends."""
    rng = np.random.default_rng(0)
    # terms of rows and columns that outweigh all else
    x, y = (rng.normal(size=(n, 3)) * rng.uniform(1, 9, size=(n, 1)) for n in (30, 25))
    options = {"M": 100 * rng.uniform(size=(30, 25)), "alpha": 0.1, "epsilon": 0.3, "n_init": 1}
    options |= {"distances": "euclidean", "scale": None}
    result = solve_by_name(x, y, **options)
    cold = np.zeros(30), np.zeros(25)
    first = [
        solve_by_name(x, y, init=init, **options).history[0].marginal_error
        for init in (result.potentials, cold)
    ]
    assert first[0] < 0.5 * first[1]


@pytest.mark.slow
def test_init_as_matching_and_potentials():
    (x, t_x), (y, t_y) = curve(60), curve(60, 1)
    options = {"distances": "euclidean", "random_state": 0}
    order = np.arange(60)
    backwards = solve_by_name(x, y, init=order[::-1].copy(), **options)
    matched = t_y[np.asarray(backwards.lazy_plan.argmax())]
    assert scipy.stats.spearmanr(t_x, matched).statistic < -0.9
    some = order.copy()
    some[10:50] = -1
    pairs = np.column_stack([order[some >= 0], some[some >= 0]])
    best = solve_by_name(x, y, **options)
    for init in (some, pairs, torch.as_tensor(pairs)):
        result = solve_by_name(x, y, init=init, **options)
        assert result.value == pytest.approx(best.value, rel=1e-4)
    for gradient in ("factored", "sampled"):
        other = torchgw.solve(x, y, init=pairs, gradient=gradient, distances="sqeuclidean")
        matched = t_y[np.asarray(other.lazy_plan.argmax())]
        assert scipy.stats.spearmanr(t_x, matched).statistic > 0.9
    warm = solve_by_name(x, y, init=best.potentials, **options)
    assert warm.marginal_error < 1e-6


@pytest.mark.parametrize(
    ("init", "message"),
    [
        (np.arange(5), r"integers of shape \(30,\)"),
        (np.full(30, 25), "target indices within 0 and 24"),
        (np.array([[0, 0], [30, 1]]), "source indices within 0 and 29"),
        (np.full(30, -1), "match at least one point"),
        ((np.zeros(30), np.zeros(24)), r"\(30,\) and \(25,\)"),
        ((np.zeros(30),), "pair of potentials"),
        ((np.zeros(30), np.full(25, np.nan)), "NaN or infinity"),
        (np.ones((25, 30)) / 750, r"shape \(30, 25\)"),
    ],
)
def test_wrong_starts_are_refused(init, message):
    d_x, d_y = distance_matrices(30, 25)
    with pytest.raises(torchgw.InvalidInputError, match=message):
        torchgw.solve(D_X=d_x, D_Y=d_y, init=init)


def test_init_and_several_starts_contradict():
    d_x, d_y = distance_matrices(30, 25)
    with pytest.raises(torchgw.InvalidInputError, match="n_init=4"):
        torchgw.solve(D_X=d_x, D_Y=d_y, init=np.full((30, 25), 1 / 750), n_init=4)


def test_large_factored_problems_search_their_subsample(monkeypatch, limited):
    """The optima come back as points of the whole problem, and the right one is found."""
    import torchgw._solve.pipeline as module

    limited(subsample=10_000)
    monkeypatch.setattr(module, "_COARSE_POINTS", 150)
    (x, t_x), (y, t_y) = curve(400), curve(300, 1)
    result = torchgw.solve(x, y, distances="landmark", n_neighbors=10, random_state=0)
    matched = t_y[np.asarray(result.lazy_plan.argmax())]
    assert scipy.stats.spearmanr(t_x, matched).statistic > 0.99
    best = result.alternatives[0]
    assert best.shape == (400, 300)
    partners = best.plan.argmax(1)
    assert scipy.stats.spearmanr(t_x[best.source], t_y[best.target[partners]]).statistic > 0.95
    with pytest.warns(torchgw.SearchWarning, match="began on a subsample"):
        torchgw.solve(x, y, distances="landmark", n_neighbors=10, random_state=0, search="thorough")


@pytest.mark.slow
@pytest.mark.parametrize("seed", quick(3, range(8)))
def test_a_plan_that_misses_a_copy_says_so(seed, monkeypatch):
    """A copy of a network in another order is matched at no cost, or there is a warning.

    That is, where it is not known to be one beforehand.
    """
    monkeypatch.setattr("torchgw._solve.pipeline.find_isometry", lambda *_, **__: None)
    table, other = (
        networkx.to_numpy_array(networkx.barabasi_albert_graph(60, 1, seed=one))
        for one in (seed, seed + 9)
    )
    order = np.random.default_rng(seed).permutation(60)
    options = {"search": "fast", "n_init": 2, "random_state": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchgw.TorchGWWarning)
        result = solve_by_name(D_X=table, D_Y=table[np.ix_(order, order)], **options)
        # another network of the same size is no copy
        apart = solve_by_name(D_X=table, D_Y=other, **options)
    said = "the same distances in another order"
    assert said not in apart.doubt
    assert (said in result.doubt) == (result.value > 0.01 * 2 * table.var())


@pytest.mark.parametrize("seed", [1, 3])
def test_a_small_search_ends_no_higher_than_its_close_optima(seed):
    """The plans of starts after a few iterations do not tell which of them ends lowest."""
    rng = np.random.default_rng(seed)
    points = (rng.normal(size=(n, 10)) for n in (40, 50))
    first, second = (scipy.spatial.distance.cdist(one, one) for one in points)
    options = {"D_X": first, "D_Y": second, "random_state": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchgw.SearchWarning)
        found = torchgw.solve(**options)
        best, *others = found.alternatives
        close = [one for one in others if one.value < 1.2 * best.value]
        ends = [torchgw.solve(**options, init=one).report.objective for one in close]
    # objectives within a thousandth are of one optimum
    assert found.report.objective <= min(ends, default=np.inf) * (1 + 1e-3)


def test_a_plan_of_few_points_is_compared_with_one_of_all():
    """0 for the same plan and for a blurred one, 1 for what has nothing to do with it."""
    rng = np.random.default_rng(0)
    y = torch.as_tensor(rng.normal(size=(300, 2)))
    table = torch.cdist(y, y)
    problem, points = coarse_input((table, table)), torch.arange(0, 300, 3)
    weights = torch.full((100,), 1 / 99, dtype=torch.float64)
    weights[0] = 0
    few = Alternative(0.0, "", weights.diag(), points, points, (300, 300))
    near = torch.exp(-(table**2) / 0.02)
    for plan, apart in (
        (torch.eye(300), 0.0),
        (near / near.sum(1, keepdim=True), 0.0),
        (torch.eye(300)[rng.permutation(300)], 1.0),
    ):
        told = sent_apart(problem, few, StoredPlan(plan.double() / 300))
        assert told == pytest.approx(apart, abs=0.1)


@pytest.mark.parametrize("least", [-3.0, 0.0, 0.3])
def test_listed_values_are_those_of_their_plans(least):
    """Those of features lacked what the least linear cost amounts to."""
    d_x, d_y = distance_matrices()
    linear = least + np.random.default_rng(0).random((len(d_x), len(d_y)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchgw.TorchGWWarning)
        result = solve_by_name(D_X=d_x, D_Y=d_y, M=linear, alpha=0.5, scale=None)
    for found in result.alternatives:
        plan = np.zeros(linear.shape)
        plan[np.ix_(found.source, found.target)] = found.plan
        own = 0.5 * reference.gw_value(d_x, d_y, plan) + 0.5 * (linear * plan).sum()
        assert found.value == pytest.approx(own, rel=1e-5)
    # and what is returned is none above them
    assert (
        result.value
        <= min(found.value for found in result.alternatives) * (1 + 1e-3 * np.sign(result.value))
        + 4 * result.epsilon
    )
