"""Matchings: pairs that are feasible, their value, edges kept, and what is refused."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.sparse
import torch
from mapping_cases import solve
from problems import quick
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

import torchgw
from torchgw._problem import limits
from torchgw._problem.losses import LOSSES
from torchgw._results import matching as matchings
from torchgw._results import rounding
from torchgw._results.rounding import Assignment, _Descent, _exchange, _in_order, improve
from torchgw.distances import DirectedDistance

LOSS = {
    "square": lambda x, y: (x - y) ** 2,
    "absolute": lambda x, y: np.abs(x - y),
    "kl": lambda x, y: x * np.log((x + 1e-18) / (y + 1e-18)) - x + y,
}


def clouds(n, m, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 3)) * [3, 2, 1], rng.normal(size=(m, 3)) * [3, 2, 1]


def objective(x, y, source, target, weights, loss="square"):
    table = LOSS[loss](x[np.ix_(source, source)], y[np.ix_(target, target)])
    return weights @ table @ weights


@pytest.mark.parametrize("loss", LOSS)
@pytest.mark.parametrize("shape", [(30, 30), (25, 40), (40, 25)])
def test_value_is_that_of_the_pairs(loss, shape):
    x, y = (cdist(points, points) for points in clouds(*shape))
    rng = np.random.default_rng(1)
    a, b = (weights / weights.sum() for weights in map(rng.random, shape))
    M = rng.random(shape)
    result = solve(D_X=x, D_Y=y, a=a, b=b, M=M, alpha=0.3, loss=loss, n_init=1)
    for kind in ("one_to_one", "many_to_one"):
        found = result.matching(kind)
        source, target = found.source, found.target
        smaller = shape[0] <= shape[1]
        rows = smaller if kind == "one_to_one" else not smaller or shape[0] == shape[1]
        weights = a[source] if rows else b[target]
        assert len(found) == (min if kind == "one_to_one" else max)(shape)
        assert len(set((source if rows else target).tolist())) == len(found)
        assert np.allclose(found.weights, weights, rtol=1e-12)
        value = (
            0.3 * objective(x, y, source, target, weights, loss) + 0.7 * weights @ M[source, target]
        )
        # float64 sums of a thousand terms
        assert found.value == pytest.approx(value, rel=1e-9)
        assert found.value <= result.matching(kind, improve=False).value * (1 + 1e-9)
        assert found.value_standard_error == 0


def test_one_to_one_gives_each_its_own():
    x, y = clouds(30, 45)
    found = solve(x, y, distances="euclidean", n_init=1).matching()
    assert found.source.tolist() == list(range(30))
    assert len(set(found.target.tolist())) == 30
    found = solve(y, x, distances="euclidean", n_init=1).matching()
    assert found.target.tolist() == list(range(30))
    assert len(set(found.source.tolist())) == 30
    assert found.pairs.shape == (30, 2)
    assert found.source.dtype == found.target.dtype == np.int64


def test_many_to_one_gives_each_point_its_share():
    x, y = clouds(60, 20)
    b = np.arange(1.0, 21)
    found = solve(x, y, b=b / b.sum(), distances="euclidean", n_init=1).matching("many_to_one")
    assert found.source.tolist() == list(range(60))
    counts = np.bincount(found.target, minlength=20)
    # 60 b_j is 2 j / 7
    assert (counts <= np.ceil(60 * b / b.sum() - 1e-9)).all()


def test_a_copy_is_found_with_value_zero():
    x, _ = clouds(60, 1)
    order = np.random.default_rng(0).permutation(60)
    result = torchgw.solve(x, x[order] + 5, distances="euclidean", random_state=0)
    found = result.matching()
    assert np.array_equal(order[found.target], np.arange(60))
    assert found.value == pytest.approx(0, abs=1e-15)
    again = torchgw.solve(x, x[order], distances="euclidean", init=found.pairs)
    assert again.value == pytest.approx(result.value, rel=1e-3)


def noisy_graphs(n=40, seed=0):
    rng = np.random.default_rng(seed)
    first = np.triu(rng.random((n, n)) < 0.15, 1)
    second = first | np.triu(rng.random((n, n)) < 0.01, 1)
    first, second = ((part | part.T).astype(float) for part in (first, second))
    order = rng.permutation(n)
    return first, second[np.ix_(order, order)], np.argsort(order)


def test_edges_kept():
    first, second, truth = noisy_graphs()
    result = torchgw.solve(D_X=first, D_Y=second, random_state=0, init=truth)
    found = result.matching()
    target = found.target
    kept = int((first * second[np.ix_(target, target)]).sum()) // 2
    edges = int(first.sum()) // 2, int(second.sum()) // 2
    assert (found.edges_kept, found.edges) == (kept, edges)
    assert kept == edges[0]
    assert "edges_kept" in repr(found)
    turned = torchgw.solve(D_X=second, D_Y=first, random_state=0, init=np.argsort(truth))
    assert turned.matching().edges == edges[::-1]


def test_edges_of_graphs_that_are_given_as_graphs():
    networkx = pytest.importorskip("networkx")
    grid = networkx.grid_2d_graph(4, 7)
    matrix = scipy.sparse.csr_array(networkx.to_scipy_sparse_array(grid))
    found = torchgw.solve(grid, matrix, random_state=0).matching()
    assert found.edges == (grid.number_of_edges(),) * 2
    assert found.edges_kept == grid.number_of_edges()


def test_points_and_distances_have_no_edges():
    x, y = clouds(20, 20)
    assert solve(x, y, distances="euclidean").matching().edges is None
    assert solve(D_X=cdist(x, x), D_Y=cdist(y, y)).matching().edges_kept is None


@pytest.mark.parametrize("loss", ["square", "kl"])
@pytest.mark.parametrize("shape", [(6, 6), (5, 7), (7, 5)])
@pytest.mark.parametrize("seed", quick(1, range(3)))
def test_small_matchings_are_the_best(seed, shape, loss):
    rng = np.random.default_rng(seed)
    x, y = (cdist(p, p) for p in (rng.normal(size=(size, 2)) for size in shape))
    a = rng.random(shape[0])
    a, M = a / a.sum(), rng.random(shape)
    result = solve(D_X=x, D_Y=y, a=a, M=M, alpha=0.8, loss=loss)
    few, many, swapped = min(shape), max(shape), shape[0] > shape[1]
    weights = a if not swapped else np.full(few, 1 / few)

    def value(order):
        pairs = np.arange(few), np.array(order)
        source, target = pairs[::-1] if swapped else pairs
        quadratic = objective(x, y, source, target, weights, loss)
        return 0.8 * quadratic + 0.2 * weights @ M[source, target]

    least = min(map(value, itertools.permutations(range(many), few)))
    found = result.matching()
    assert found.value == pytest.approx(least, rel=1e-9)
    assert found.value <= result.matching(improve=False).value * (1 + 1e-9)


@pytest.mark.parametrize("seed", quick(1, range(3)))
def test_many_to_one_matchings_are_the_best(seed):
    rng = np.random.default_rng(seed)
    x, y = (cdist(p, p) for p in (rng.normal(size=(size, 2)) for size in (6, 3)))
    found = solve(D_X=x, D_Y=y).matching("many_to_one")
    orders = [order for order in itertools.product(range(3), repeat=6)
              if (np.bincount(order, minlength=3) == 2).all()]  # fmt: skip
    every, weights = np.arange(6), np.full(6, 1 / 6)
    least = min(objective(x, y, every, np.array(order), weights) for order in orders)
    assert found.value == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize("seed", quick(1, range(3)))
def test_matchings_of_directed_tables_are_the_best(seed):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(2, 6, 6))
    found = solve(DirectedDistance(x), DirectedDistance(y)).matching()
    every, weights = np.arange(6), np.full(6, 1 / 6)
    least = min(objective(x, y, every, np.array(order), weights)
                for order in itertools.permutations(range(6)))  # fmt: skip
    assert found.value == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize("loss", LOSS)
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("searched", [True, False])
def test_improvement_lowers_the_objective(loss, equal, searched, monkeypatch):
    rng = np.random.default_rng(0)
    near, far = (cdist(p, p) for p in (rng.normal(size=(7, 2)), rng.normal(size=(9, 2))))
    weights = np.full(7, 1 / 7) if equal else rng.random(7)
    parts = near[None], far[None], weights, rng.random((7, 9))
    tables = (torch.from_numpy(part) for part in parts)
    problem = Assignment(*tables, 0.6, LOSSES[loss], np.arange(9))
    if not searched:
        few = limits.CPU._replace(matched_points=5)
        monkeypatch.setitem(limits.LIMITS, "cpu", few)
    value = _Descent(problem).value
    start = torch.from_numpy(rng.permutation(9)[:7])
    better = start
    if loss != "absolute":
        better = _exchange(problem, start)
        # a random matching can be mended
        assert value(better) < value(start)
        assert sorted(better.tolist()) == sorted(start.tolist())
    plan = problem.near.new_full((7, 9), 1 / 63)
    best = improve(problem, plan, start)
    assert value(best) <= value(better)
    assert len(set(best.tolist())) == 7
    # own terms of the near side are the same for all matchings
    chosen = best.numpy()
    quadratic = LOSS[loss](near, far[np.ix_(chosen, chosen)])
    own = LOSSES[loss].own[0](torch.from_numpy(near.copy())).numpy()
    linear = problem.linear.numpy()[np.arange(7), chosen]
    expected = 0.6 * (weights @ (quadratic - own) @ weights) + weights @ linear
    assert value(best) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("loss", ["square", "kl"])
@pytest.mark.parametrize("kind", ["tables", "graphs", "columns left over", "unequal"])
def test_no_matching_costs_less_than_entries_in_order(loss, kind):
    rng = np.random.default_rng(2)
    count = 7 if kind == "columns left over" else 6
    near, far = rng.random((2, 6, 6)) + 0.1, rng.random((2, count, count)) + 0.1
    weights = rng.random(6) if kind == "unequal" else np.full(6, 1 / 6)
    order = rng.permutation(6)
    if kind == "graphs":
        # the far one has all edges of the near one, and others
        near, far = (np.triu(table < part, 1) * 1.0 for table, part in ((near, 0.3), (far, 0.5)))
        far = np.maximum(near, far)
        near, far = (table + table.transpose(0, 2, 1) for table in (near, far))
        far = far[:, order][:, :, order]
    tables = (torch.from_numpy(part) for part in (near, far, weights))
    problem = Assignment(*tables, None, 0.6, LOSSES[loss], np.arange(count))
    value, floor = _Descent(problem).value, _in_order(problem)
    least = min(
        value(torch.tensor(partners)) for partners in itertools.permutations(range(count), 6)
    )
    assert floor <= least + 1e-12
    assert (floor == -math.inf) == (kind in ("columns left over", "unequal"))
    if kind == "graphs" and loss == "square":
        # which keeps all edges
        assert floor == pytest.approx(least, rel=1e-12)


def test_mends_a_good_matching():
    """A tenth of the partners exchanged at random is put right again."""
    first, second, truth = noisy_graphs(60, 3)
    result = torchgw.solve(D_X=first, D_Y=second, random_state=0, init=truth)
    assert np.mean(result.matching().target == truth) > 0.9


def test_large_plans_are_assigned_by_their_largest_entries(monkeypatch, limited):
    x, _ = clouds(80, 1)
    y = x[::-1].copy()
    result = torchgw.solve(x, y, distances="euclidean", random_state=0)
    exact = result.matching(improve=False)
    limited(read=400)
    monkeypatch.setattr(rounding, "_ENTRIES_PER_ROW", 8)
    assert np.array_equal(result.matching(improve=False).target, exact.target)
    # a plan that says nothing leaves most points to later
    plan = torchgw._plans.given.StoredPlan(torch.full((50, 60), 1 / 3000, dtype=torch.float64))
    monkeypatch.setattr(rounding, "_ENTRIES_PER_ROW", 2)
    assert len(set(rounding.assign(plan, torch.ones(60, dtype=torch.int64)).tolist())) == 50
    capacity = torch.full((60,), 2)
    chosen = rounding.assign(plan, capacity)
    assert np.bincount(chosen.numpy()).max() <= 2
    monkeypatch.setattr(rounding, "_MOST_ENTRIES", 10)
    with pytest.raises(torchgw.UnsupportedError, match="would weigh 200 pairs"):
        rounding.assign(plan, capacity)


def test_rounding_is_the_largest_sum():
    rng = np.random.default_rng(0)
    table = rng.random((20, 30))
    plan = torchgw._plans.given.StoredPlan(torch.from_numpy(table))
    chosen = rounding.assign(plan, torch.ones(30, dtype=torch.int64)).numpy()
    assert np.array_equal(chosen, linear_sum_assignment(table, maximize=True)[1])


def test_partial_plans_match_their_share():
    x, _ = clouds(40, 1)
    far = np.vstack([x[:30], x[30:] + 100])
    result = torchgw.solve(x, far, distances="euclidean", scale=None, mass=0.75, random_state=0)
    found = result.matching()
    assert len(found) == 30
    assert float(found.weights.sum()) == pytest.approx(0.75, rel=1e-6)
    # distances of these 30 are the same on both sides, whichever they are matched to
    assert found.value <= result.value * (1 + 1e-6)


@pytest.mark.slow
def test_unbalanced_and_polished():
    x, y = clouds(30, 30)
    result = solve(x, y, distances="euclidean", scale="max", unbalanced=1.0)
    found = result.matching()
    assert float(found.weights.sum()) == pytest.approx(result.report.mass, rel=1e-6)
    assert np.isfinite(found.value)
    polished = torchgw.solve(
        D_X=cdist(x, x), D_Y=cdist(y, y), random_state=0, polish=True, epsilon=0.2
    )
    # a polished plan of equal weights is a matching, unless it ends between two
    assert polished.matching().value <= polished.value * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize("gradient", ["sampled", "factored", "dense"])
def test_every_gradient(gradient):
    x, y = clouds(60, 60)
    settings = {"distances": "sqeuclidean", "gradient": gradient, "n_init": 8}
    found = solve(x, x[::-1].copy(), **settings).matching()
    assert found.value < 0.05
    assert sorted(found.target.tolist()) == list(range(60))


def test_costly_distances_are_sampled(monkeypatch, curves):
    result = solve(*curves, distances="dijkstra", gradient="sampled")
    exact = result.matching(improve=False)
    monkeypatch.setattr(matchings, "_SAMPLED_ROWS", 64)
    found = result.matching()
    assert np.array_equal(found.target, exact.target)
    assert found.value_standard_error > 0
    # four standard errors
    assert abs(found.value - exact.value) < 4 * found.value_standard_error
    assert "+-" in repr(found)


def test_results_from_files(tmp_path):
    x, y = clouds(30, 30)
    tables = cdist(x, x), cdist(y, y)
    result = solve(D_X=tables[0], D_Y=tables[1], M=cdist(x, y), n_init=1)
    result.save(tmp_path / "dense.npz", dense=True)
    again = torchgw.load(tmp_path / "dense.npz")
    assert again.matching().value == pytest.approx(result.matching().value, rel=1e-9)
    result.save(tmp_path / "short.npz")
    with pytest.raises(torchgw.UnsupportedError, match="dense=True"):
        torchgw.load(tmp_path / "short.npz").matching()
    result = solve(x, y, distances="euclidean", M=cdist(x, y), n_init=1)
    result.save(tmp_path / "points.npz")
    with pytest.raises(torchgw.UnsupportedError, match="table `M`"):
        torchgw.load(tmp_path / "points.npz").matching()
    result = solve(x, y, distances="euclidean", features=(x, y), n_init=1)
    result.save(tmp_path / "features.npz")
    again = torchgw.load(tmp_path / "features.npz")
    assert again.matching().value == pytest.approx(result.matching().value, rel=1e-9)


def test_refusals():
    x, y = clouds(20, 20)
    result = solve(x, y, distances="euclidean", n_init=1)
    with pytest.raises(torchgw.InvalidInputError, match="kind"):
        result.matching("both")
    with pytest.raises(torchgw.InvalidTypeError, match="improve"):
        result.matching(improve=3)
    low = torchgw.solve_low_rank(x, y, rank=3, distances="sqeuclidean", random_state=0)
    with pytest.raises(torchgw.UnsupportedError, match="low rank"):
        low.matching()


@pytest.mark.gpu
def test_on_a_gpu():
    x, _ = clouds(60, 1)
    result = torchgw.solve(x, x[::-1].copy(), distances="euclidean", device="cuda", random_state=0)
    found = result.matching()
    assert found.target.tolist() == list(range(59, -1, -1))
    assert result.lower_bound == pytest.approx(0, abs=1e-12)
    assert result.distance_correlation > 0.99


def test_names_of_nodes():
    networkx = pytest.importorskip("networkx")
    pandas = pytest.importorskip("pandas")
    graph = networkx.relabel_nodes(networkx.path_graph(5), dict(enumerate("abcde")))
    graph.add_edge("b", "f")
    copy = networkx.relabel_nodes(graph, str.upper)
    matching = torchgw.solve(graph, copy, random_state=0).matching()
    named = matching.as_dict(graph, copy)
    assert sorted(named) == list("abcdef")
    assert named["b"] == "B"
    numbered = matching.as_dict()
    assert {list(graph)[i]: list(copy)[j] for i, j in numbered.items()} == named
    index = pandas.DataFrame(index=list("uvwxyz"))
    frame = matching.as_frame(index, list(copy))
    assert list(frame.columns) == ["source", "target", "weight"]
    assert set(frame.source) == set("uvwxyz")
    assert frame.weight.sum() == pytest.approx(1)
    for wrong in (list("abc"), 3, np.ones((6, 2))):
        with pytest.raises(torchgw.TorchGWError, match="`X`.*name"):
            matching.as_dict(wrong)
    X = np.random.default_rng(0).normal(size=(9, 2))
    many = torchgw.solve(X[:4], X, distances="euclidean", random_state=0).matching("many_to_one")
    with pytest.raises(torchgw.InvalidInputError, match="as_frame"):
        many.as_dict()


@pytest.mark.parametrize("networks", [True, False])
def test_a_limit_of_time_ends_the_search_for_better_pairs(networks, monkeypatch):
    """The answer is a matching all the same, no better than that of more time, and says so."""
    rng = np.random.default_rng(0)
    if networks:
        x, y = (np.triu(rng.random((60, 60)) < 0.1, 1) for _ in range(2))
        given = {"D_X": np.float64(x | x.T), "D_Y": np.float64(y | y.T)}
    else:
        given = dict(zip(("D_X", "D_Y"), map(cdist, *[clouds(150, 160)] * 2), strict=True))
    result = solve(**given, n_init=1)
    whole, rough = result.matching(), result.matching(improve=False)
    assert whole.complete
    assert rough.complete
    clock = [0.0]

    def passing():
        clock[0] += 1.0
        return clock[0]

    # each look at the clock takes a second, so that the limit is met at some place of the search
    monkeypatch.setattr("torchgw._tensors.deadline.monotonic", passing)
    values = []
    for limit in (0, 1, 2, 3, 5, 9, 20, 100):
        found = result.matching(time_limit=limit)
        assert len(set(found.target.tolist())) == len(found) == len(whole)
        assert found.value <= rough.value * (1 + 1e-12)
        values.append(found.value)
    assert not result.matching(time_limit=0).complete
    assert np.isclose(values[0], rough.value, rtol=1e-12)
    monkeypatch.undo()
    assert np.isclose(result.matching(time_limit=600).value, whole.value, rtol=1e-12)
    with pytest.raises(torchgw.InvalidInputError, match="time_limit"):
        result.matching(time_limit=-1)


def test_a_matching_is_a_start():
    X = np.random.default_rng(0).normal(size=(20, 3))
    options = {"distances": "euclidean", "random_state": 0}
    result = torchgw.solve(X, X[::-1] + 0.01, **options)
    matching = result.matching()
    again = torchgw.solve(X, X[::-1] + 0.01, init=matching, **options)
    same = torchgw.solve(X, X[::-1] + 0.01, init=matching.pairs, **options)
    assert again.value == same.value
    with pytest.raises(torchgw.InvalidInputError, match=r"Pass one, as result.alternatives\[1\]"):
        torchgw.solve(X, X[::-1] + 0.01, init=result.alternatives, **options)
