"""Spaces that are the same but for order and rounding: found, matched, and told from others."""

from __future__ import annotations

import copy
import pickle
import warnings

import networkx
import numpy as np
import pytest
import scipy
import torch
from scipy.spatial.distance import cdist

import torchgw
from benchmarks.distances.trees import tree_and_copy
from torchgw import UnsupportedError
from torchgw._problem.losses import ABSOLUTE
from torchgw._problem.problem import Problem
from torchgw._sinkhorn.problem import DenseCost
from torchgw._starts import isometry
from torchgw._starts.isometry import find_isometry, match_by_classes
from torchgw._typing import Marginals
from torchgw.distances import CurvedDistance, DirectedDistance, PointDistance, PrecomputedDistance
from torchgw.distances.base import ScaledDistance

RNG = np.random.default_rng


def weighted(table, seed=0):
    """A table, itself in another order, and that order."""
    order = RNG(seed).permutation(len(table))
    return table, table[np.ix_(order, order)], order


def problem(x, y, a=None, b=None, **options):
    """Two tables or providers, of equal weights unless others are given."""
    sides = [
        PrecomputedDistance(torch.as_tensor(side)) if isinstance(side, np.ndarray) else side
        for side in (x, y)
    ]
    weights = [
        torch.full((side.n,), 1 / side.n, dtype=torch.float64)
        if weight is None
        else torch.as_tensor(weight)
        for side, weight in zip(sides, (a, b), strict=True)
    ]
    return Problem(*sides, Marginals(*weights), **({"alpha": 1.0, "linear": None} | options))


def tree(n, seed, lengths=True):
    rng = RNG(seed)
    parents = [int(rng.integers(node)) for node in range(1, n)]
    length = rng.random(n - 1) + 0.1 if lengths else np.ones(n - 1)
    edges = scipy.sparse.coo_array((length, (np.arange(1, n), parents)), shape=(n, n))
    return scipy.sparse.csgraph.dijkstra(edges.tocsr(), directed=False)


def network(n, degree, seed):
    """Adjacency of a random graph in which every node has an edge."""
    rng = RNG(seed)
    upper = np.triu(rng.random((n, n)) < degree / n, 1)
    upper[np.arange(n - 1), np.arange(1, n)] = True
    return (upper | upper.T).astype(float)


def cloud(n, d=3, seed=0):
    return RNG(seed).normal(size=(n, d))


def moved(x, seed=0):
    """Points turned, moved and shuffled, and the order."""
    rng = RNG(seed)
    order = rng.permutation(len(x))
    turn = np.linalg.qr(rng.normal(size=(x.shape[1],) * 2))[0]
    return (x @ turn + 3)[order], order


TABLES = {
    "cloud": cdist(cloud(80), cloud(80)),
    "kernel": np.exp(-cdist(cloud(70), cloud(70))),
    "signed": (lambda half: half + half.T)(RNG(1).normal(size=(50, 50))),
    "weighted tree": tree(150, 2),
    "tree": tree(150, 3, lengths=False),
    "network": network(200, 3, 4),
    "paths in a network": scipy.sparse.csgraph.dijkstra(network(120, 4, 5)),
    "one pair": np.array([[0.0, 1.0], [1.0, 0.0]]),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_a_shuffled_table_is_matched_without_a_difference(name):
    x, y, order = weighted(TABLES[name])
    found = find_isometry(problem(x, y), streamed=False)
    image = found.partners.numpy()
    assert found.value == 0
    assert np.array_equal(np.sort(image), np.arange(len(x)))
    assert np.array_equal(y[np.ix_(image, image)], x)
    if name in ("cloud", "kernel", "signed", "weighted tree"):
        assert np.array_equal(order[image], np.arange(len(x)))


ALIKE = {
    "cycle": networkx.cycle_graph(150),
    "tree": networkx.balanced_tree(2, 6),
    "cube": networkx.hypercube_graph(7),
    "torus": networkx.grid_2d_graph(12, 15, periodic=True),
    "long grid": networkx.grid_2d_graph(3, 60),
    "regular": networkx.random_regular_graph(3, 150, seed=0),
}


@pytest.mark.parametrize("name", ALIKE)
def test_graphs_whose_nodes_look_alike_are_matched(name):
    """Partners by sums over distances were too many, or kept no distances."""
    x, y, _ = weighted(networkx.to_numpy_array(ALIKE[name]))
    found = find_isometry(problem(x, y), streamed=False)
    image = found.partners.numpy()
    assert np.array_equal(y[np.ix_(image, image)], x)


def test_points_that_look_alike_are_matched_by_their_distances_and_weights():
    angles = np.linspace(0, 2 * np.pi, 200, endpoint=False)
    polygon = np.column_stack([np.cos(angles), np.sin(angles)])
    copy_of_it, order = moved(polygon)
    sides = [PointDistance(torch.as_tensor(side)) for side in (polygon, copy_of_it)]
    assert find_isometry(problem(*sides), streamed=False).value < 1e-12
    # one corner is heavier, and goes to its image
    weights = np.full(200, 1 / 201)
    weights[7] *= 2
    found = find_isometry(problem(*sides, weights, weights[order]), streamed=False)
    assert order[found.partners[7]] == 7
    table, equal = torch.as_tensor(cdist(polygon, polygon)), torch.full((200,), 1 / 200.0)
    assert match_by_classes(table, table, torch.as_tensor(weights), equal.double()) is None


def test_graphs_that_only_look_the_same_are_no_copies():
    """Two cycles of 75 nodes have the degrees of one of 150."""
    one = networkx.to_numpy_array(networkx.cycle_graph(150))
    two = scipy.linalg.block_diag(*[networkx.to_numpy_array(networkx.cycle_graph(75))] * 2)
    assert find_isometry(problem(one, two), streamed=False) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("metric", ["euclidean", "sqeuclidean", "cosine"])
def test_turned_points_are_matched(metric, dtype):
    x = cloud(300)
    y, order = moved(x)
    if metric == "cosine":
        y = (x @ np.linalg.qr(cloud(3))[0])[order]
    sides = (PointDistance(torch.from_numpy(part).to(dtype), metric) for part in (x, y))
    found = find_isometry(problem(*sides), streamed=False)
    assert np.array_equal(order[found.partners.numpy()], np.arange(300))
    assert 0 < found.value < (1e-10 if dtype == torch.float32 else 1e-28)


def test_points_of_a_hyperbolic_tree_are_matched_without_a_table(limited):
    x, y, order, _ = tree_and_copy(400, 2.0)
    sides = [CurvedDistance(torch.from_numpy(part)) for part in (x, y)]
    stored = find_isometry(problem(*sides), streamed=False)
    limited(dense=0)
    assert find_isometry(problem(*sides), streamed=False) is None
    found = find_isometry(problem(*sides), streamed=True)
    assert np.array_equal(order[found.partners.numpy()], np.arange(400))
    assert torch.equal(found.partners, stored.partners)


@pytest.mark.parametrize("noise", [1e-3, 1e-4])
def test_noise_is_no_rounding(noise):
    x = cloud(200)
    y, _ = moved(x)
    y += noise * cloud(200, seed=1)
    assert find_isometry(problem(cdist(x, x), cdist(y, y)), streamed=True) is None


def test_what_differs_in_one_place_is_no_copy():
    x, y, _ = weighted(TABLES["weighted tree"])
    y[3, 7] = y[7, 3] = y[3, 7] * 1.01
    assert find_isometry(problem(x, y), streamed=True) is None
    # sums that are the same, of a switched pair of edges
    x, y, order = weighted(network(60, 4, 0))
    (i, j), (k, l) = next(
        (first, second)
        for first in zip(*np.triu(y).nonzero(), strict=True)
        for second in zip(*np.triu(y).nonzero(), strict=True)
        if len({*first, *second}) == 4 and y[first[0], second[0]] == y[first[1], second[1]] == 0
    )
    for p, q, value in ((i, j, 0.0), (k, l, 0.0), (i, k, 1.0), (j, l, 1.0)):
        y[p, q] = y[q, p] = value
    assert np.array_equal(np.sort(x.sum(0)), np.sort(y.sum(0)))
    assert find_isometry(problem(x, y), streamed=True) is None


def test_weights_have_to_go_along():
    x, y, order = weighted(TABLES["tree"])
    a = RNG(0).dirichlet(np.ones(len(x)))
    found = find_isometry(problem(x, y, a, a[order]), streamed=True)
    assert np.array_equal(a[order][found.partners.numpy()], a)
    assert find_isometry(problem(x, y, a, RNG(1).permutation(a)), streamed=True) is None
    a[:2] = 0, a[0] + a[1]
    assert find_isometry(problem(x, y, a, a[order]), streamed=True) is None


def test_other_problems_are_left_alone():
    x, y, _ = weighted(TABLES["cloud"])
    directed = DirectedDistance(torch.from_numpy(x + np.triu(x)))
    for other in (
        problem(x, y[1:, 1:]),
        problem(x, y, loss=ABSOLUTE),
        problem(x, y, alpha=0.5, linear=DenseCost(1 - torch.eye(80, dtype=torch.float64))),
        problem(directed, directed),
        problem(np.zeros((5, 5)), np.zeros((5, 5))),
    ):
        assert find_isometry(other, streamed=True) is None


@pytest.mark.parametrize("name", TABLES)
def test_a_linear_cost_may_say_which_match_is_the_best(name):
    x, y, order = weighted(TABLES[name])
    there, n = order.argsort(), len(x)
    # distances to a few points and their images, as known pairs have them
    few = np.arange(n)[:: 1 + n // 8]
    told = torch.from_numpy(((x[:, None, few] - y[None, :, there[few]]) ** 2).sum(2))
    nothing, away = torch.zeros(n, n), told.clone()
    away[0, there[0]] = away[0].max() + 1
    closed = torch.ones(n, n, dtype=torch.bool)
    closed[0, there[0]] = False
    found = [
        find_isometry(problem(x, y, alpha=0.5, **known), streamed=True)
        for known in (
            {"linear": DenseCost(told)},
            {"linear": DenseCost(nothing.double())},
            {"linear": DenseCost(away)},
            {"linear": DenseCost(told), "support": closed},
        )
    ]
    others = np.sort(told.numpy(), 1)[:, 1] > 1e-6 * told.numpy().mean()
    if others.all():
        assert found[0].only
        assert (found[0].partners.numpy() == there).all()
        assert found[2:] == [None, None]
    # where points are told apart by none of these distances more than one match may be left
    assert others.all() or found[0] is None or not found[0].only
    assert found[1] is None or not found[1].only


def test_points_at_one_place_are_no_partners_of_one_point():
    x = np.abs(np.repeat(np.arange(4.0), 2)[:, None] - np.repeat(np.arange(4.0), 2))
    linear = torch.ones(8, 8, dtype=torch.float64)
    linear[:, ::2] = 0
    assert find_isometry(problem(x, x, alpha=0.5, linear=DenseCost(linear)), streamed=True) is None


def regular(n):
    angle = 2 * np.pi * np.arange(n) / n
    return np.stack([np.cos(angle), np.sin(angle)], 1)


@pytest.mark.parametrize(
    "points",
    [
        pytest.param(regular(12), id="polygon"),
        pytest.param(np.array(list(np.ndindex(2, 2, 2)), float), id="cube"),
        pytest.param(regular(200), id="more alike than are looked at"),
    ],
)
@pytest.mark.parametrize("polish", [False, True])
@pytest.mark.filterwarnings("ignore::torchgw.AmbiguityWarning")
def test_symmetric_shapes_keep_their_distances(points, polish):
    y, _ = moved(points)
    result = torchgw.solve(points, y, distances="euclidean", polish=polish, random_state=0)
    partners = result.lazy_plan.argmax()
    assert result.converged
    assert result.is_ambiguous
    if polish:
        assert np.abs(cdist(y, y)[np.ix_(partners, partners)] - cdist(points, points)).max() < 1e-6
        assert result.value < 1e-10


@pytest.mark.parametrize("leaves", range(2, 9))
@pytest.mark.filterwarnings("ignore::torchgw.AmbiguityWarning")
def test_copies_whose_points_are_alike_are_ambiguous(leaves):
    """Optima whose values differ by rounding cost the same, and so do those of a moved star."""
    star = np.full((leaves + 1, leaves + 1), 2.0)
    star[0] = star[:, 0] = 1
    np.fill_diagonal(star, 0)
    noise = np.random.default_rng(leaves).normal(size=star.shape)
    for moved_by in (0, 1e-12):
        other = star * (1 + moved_by * (noise + noise.T))
        assert torchgw.solve(D_X=star, D_Y=other, random_state=0).is_ambiguous
    longer = star.copy()
    longer[1:, 1:] += np.abs(np.subtract.outer(range(leaves), range(leaves)) ** 2) / leaves
    longer[0, 1:] = longer[1:, 0] = range(1, leaves + 1)
    assert not torchgw.solve(D_X=longer, D_Y=longer, random_state=0).is_ambiguous


@pytest.mark.parametrize("name", ["cloud", "weighted tree", "network", "tree"])
def test_a_solve_from_the_match_ends_no_higher_than_the_match_and_others(name):
    x, y, order = weighted(TABLES[name])
    result = torchgw.solve(D_X=x, D_Y=y, random_state=0)
    assert result.converged
    assert not result.doubt
    for options in ({"n_init": 1}, {"init": order.argsort()}):
        with warnings.catch_warnings():
            # a single start may miss the copy, and says so
            warnings.simplefilter("ignore", torchgw.SearchWarning)
            other = torchgw.solve(D_X=x, D_Y=y, random_state=0, **options)
        assert result.report.objective <= other.report.objective * (1 + 1e-4)


@pytest.fixture(scope="module")
def kept():
    x = cloud(40)
    y, order = moved(x)
    result = torchgw.solve(x, y, distances="euclidean", polish=True, random_state=0)
    return x, y, order, result


def test_polish_ends_with_the_match(kept):
    x, y, order, result = kept
    plan = result.plan
    assert np.array_equal(order[plan.argmax(1)], np.arange(40))
    assert np.array_equal(plan.sum(0), np.full(40, 1 / 40))
    assert (plan > 0).sum() == 40
    assert result.status is torchgw.Status.CONVERGED
    # squares of relative errors of 1e-11
    assert 0 <= result.value < 1e-22
    assert result.epsilon == result.report.polish_gap == result.n_iters == 0
    assert result.report.kl == pytest.approx(np.log(40))
    assert result.marginal_error < 1e-15
    assert isinstance(result.marginal_a, np.ndarray)
    # sums that cancel
    assert result.matching().value < 1e-18
    assert result.distance_correlation == pytest.approx(1)
    assert np.allclose(result.lazy_plan.barycentric(y), y[result.lazy_plan.argmax()])


def test_potentials_of_the_match_are_optimal(kept):
    """The whole cost is zero at partners and positive elsewhere."""
    x, y, _, result = kept
    dx, dy = cdist(x, x), cdist(y, y)
    image = result.lazy_plan.argmax()
    cost = 2 * np.square(dx[:, None] - dy[:, image][None]).mean(2)
    assert np.abs(result.potential_a).max() == np.abs(result.potential_b).max() == 0
    assert np.array_equal(cost.argmin(1), image)
    # distances are divided by their largest
    reduced = -4 * (dx / dx.max()) @ result.plan @ (dy / dy.max())
    f, g = result.lazy_plan.potentials
    shifted = reduced - f.numpy()[:, None] - g.numpy()
    assert np.allclose(shifted, cost / dx.max() ** 2, atol=1e-11)


def test_new_points_follow_the_match(kept, tmp_path):
    x, y, order, result = kept
    back = np.argsort(order)
    far = np.abs(x).max(1).argsort()[-5:]
    assert np.allclose(result.transform(x[far]), y[back[far]], atol=0.02)
    assert np.allclose(result.inverse_transform(y[back[far]]), x[far], atol=0.02)
    result.save(tmp_path / "match.npz")
    again = torchgw.load(tmp_path / "match.npz")
    for other in (again, copy.deepcopy(result), pickle.loads(pickle.dumps(result))):
        assert np.array_equal(other.plan, result.plan)
        assert other.value == result.value
        assert np.allclose(other.transform(x[far]), result.transform(x[far]))


def test_a_match_needs_no_exact_gradient(limited):
    """Of more points than tables are made for, only copies can be polished."""
    limited(dense=0)
    x, y, order, _ = tree_and_copy(150, 2.0)
    result = torchgw.solve(x, y, distances="poincare", polish=True, search="fast")
    assert np.array_equal(order[result.lazy_plan.argmax()], np.arange(150))
    assert result.value < 1e-12
    with pytest.raises(UnsupportedError, match="needs an exact gradient"):
        torchgw.solve(x, 0.9 * y, distances="poincare", polish=True, search="fast")


def test_large_copies_need_no_subsample(limited):
    limited(subsample=1_000)
    x = cloud(120)
    y, order = moved(x)
    result = torchgw.solve(x, y, distances="sqeuclidean", gradient="factored", random_state=0)
    assert result.converged
    assert np.array_equal(order[result.lazy_plan.argmax()], np.arange(120))


def test_points_that_rounding_has_moved_in_order_are_matched_in_the_end(monkeypatch):
    monkeypatch.setattr(isometry, "_NEAR_OF_FEW", 1)
    x = cloud(600)
    y, order = moved(x)
    y[:3] += 2e-4 * cloud(3, seed=2)
    found = find_isometry(problem(cdist(x, x), cdist(y, y)), streamed=False)
    assert np.array_equal(order[found.partners.numpy()], np.arange(600))


def test_a_point_near_the_border_may_change_the_scale():
    """Distances are divided by the largest of each side, which rounding moves by 1e-4 here."""
    x, y, order, _ = tree_and_copy(150, 2.0)
    out = np.hypot(*y.T).argmax()
    x[order[out]] *= (1 - 2e-13) / np.hypot(*x[order[out]])
    away = CurvedDistance(torch.from_numpy(x)).maximum()
    near, far = (CurvedDistance(torch.from_numpy(side)) for side in (x, x[order]))
    copies = problem(near, ScaledDistance(far, 1 + 1e-3 / away))
    found = find_isometry(copies, streamed=False)
    assert np.array_equal(order[found.partners.numpy()], np.arange(150))
    noise = x * (1 - 1e-3 * RNG(0).random((150, 1)) * (1 - np.hypot(*x.T))[:, None])
    assert (
        find_isometry(problem(near, CurvedDistance(torch.from_numpy(noise[order]))), streamed=False)
        is None
    )


@pytest.mark.parametrize(("gap", "said"), [(1e-8, False), (1.8e-14, True)])
def test_it_is_said_that_rounding_may_hide_a_copy(gap, said):
    x = tree_and_copy(150, 2.0)[0]
    out = np.hypot(*x.T).argmax()
    x[out] *= (1 - gap) / np.hypot(*x[out])
    side = CurvedDistance(torch.from_numpy(x))
    assert ("near the border" in isometry.rounding_advice(problem(side, side))) == said
