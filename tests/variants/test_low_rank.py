"""Plans of low rank against dense values, POT and the full-rank solve."""

from __future__ import annotations

import warnings

import numpy as np
import ot
import pytest
import torch
from problems import LargestTensor, random_weights
from reference import gw_value
from scipy.spatial.distance import cdist

import torchgw
from torchgw._problem.given import Passed
from torchgw._problem.problem import Problem, feature_cost
from torchgw._problem.providers import DistanceOptions, build_providers
from torchgw._typing import Marginals
from torchgw._variants.solve_low_rank import Factorisation, _measure, project

# clouds without a match have several that are nearly as good
pytestmark = pytest.mark.filterwarnings("ignore::torchgw.SearchWarning")


def clouds(n=60, m=50, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 2)), rng.normal(size=(m, 3))


def test_plan_marginals_value_and_products():
    x, y = clouds()
    a, b = random_weights(60), random_weights(50, 1)
    result = torchgw.solve_low_rank(
        x, y, a=a, b=b, rank=6, distances="sqeuclidean", scale=None, random_state=0, tol=1e-3
    )
    plan = np.asarray(result.plan)
    assert np.linalg.matrix_rank(plan, tol=1e-9) == 6
    assert plan.min() >= 0
    assert result.marginal_error < 1e-6
    np.testing.assert_allclose(plan.sum(1), a, atol=1e-7)
    np.testing.assert_allclose(plan.sum(0), b, atol=1e-7)
    tables = cdist(x, x, "sqeuclidean"), cdist(y, y, "sqeuclidean")
    assert result.value == pytest.approx(gw_value(*tables, plan), rel=1e-6)
    lazy = result.lazy_plan
    np.testing.assert_allclose(lazy @ y, plan @ y)
    np.testing.assert_allclose(lazy.T @ x, plan.T @ x)
    np.testing.assert_allclose(lazy.rows([3, 1]), plan[[3, 1]])
    np.testing.assert_allclose(lazy.barycentric(y), plan @ y / plan.sum(1)[:, None])
    assert all(np.diff(result.history) < 0)


@pytest.mark.parametrize("epsilon", [0.0, 0.3])
def test_gradients_are_those_of_the_objective(epsilon):
    """Finite differences in each entry of Q, R and g, free of their constraints."""
    x, y = clouds(7, 6)
    features = np.random.default_rng(1).normal(size=(13, 2))
    sides = build_providers(
        (Passed("X", x), Passed("Y", y)), "sqeuclidean",
        DistanceOptions(None, None, None, "stitch"), torch.device("cpu"),
    )  # fmt: skip
    cost = feature_cost(*torch.from_numpy(features).split([7, 6]), "cosine")
    uniform = [torch.full((size,), 1 / size, dtype=torch.float64) for size in (7, 6)]
    problem = Problem(*sides.providers, Marginals(*uniform), 0.6, cost)
    generator = torch.Generator().manual_seed(0)
    logs = [
        (0.5 + torch.rand(*shape, generator=generator, dtype=torch.float64)).log()
        for shape in ((7, 3), (6, 3), (3,))
    ]

    def value(*parts):
        point = Factorisation(*(part.log() for part in parts))
        return _measure(problem, point, 0.0, epsilon).objective(0.6)

    gradient = _measure(problem, Factorisation(*logs), 0.0, epsilon).gradient
    parts = [part.exp() for part in logs]
    for index, (part, slope) in enumerate(zip(parts, gradient, strict=True)):
        for place in range(0, part.numel(), 4):
            moved = [item.clone() for item in parts]
            moved[index].view(-1)[place] += 1e-6
            back = [item.clone() for item in parts]
            back[index].view(-1)[place] -= 1e-6
            expected = (value(*moved) - value(*back)) / 2e-6
            assert float(slope.view(-1)[place]) == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_projection_meets_its_constraints_and_leaves_what_meets_them():
    generator = torch.Generator().manual_seed(0)
    marginals = Marginals(*(torch.from_numpy(random_weights(n)) for n in (30, 20)))
    shapes = (30, 4), (20, 4), (4,)
    point = Factorisation(
        *(3 * torch.randn(*s, generator=generator, dtype=torch.float64) for s in shapes)
    )
    found = project(point, marginals)
    q, r, g = (part.exp() for part in found)
    for part, weight in ((q, marginals.a), (r, marginals.b)):
        torch.testing.assert_close(part.sum(1), weight, atol=1e-9, rtol=0)
        torch.testing.assert_close(part.sum(0), g, atol=1e-8, rtol=0)
    again = project(found, marginals)
    torch.testing.assert_close(again.q.exp(), q, atol=1e-8, rtol=0)


def test_entropy_blurs_the_plan():
    """A larger weight leaves more entropy and a higher value."""
    x, y = clouds(12, 10)
    found = [
        torchgw.solve_low_rank(
            x, y, rank=4, distances="sqeuclidean", epsilon=e, tol=1e-2, random_state=0
        )
        for e in (0.0, 0.01, 0.3)
    ]
    values = [one.value for one in found]
    spread = [float(torch.special.entr(one.lazy_plan.Q).sum()) for one in found]
    assert values == sorted(values)
    assert spread == sorted(spread)
    assert spread[2] > 1.05 * spread[0]
    assert found[2].marginal_error < 1e-6
    with pytest.raises(torchgw.InvalidInputError, match="epsilon"):
        torchgw.solve_low_rank(x, y, rank=4, epsilon=-1.0)


@pytest.mark.slow
def test_value_is_at_most_that_of_pot():
    x, y = clouds()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        *_, log = ot.gromov.lowrank_gromov_wasserstein_samples(
            x, y, rank=10, log=True, rescale_cost=False, numItermax=100, numItermax_dykstra=200
        )
    result = torchgw.solve_low_rank(
        x, y, rank=10, distances="sqeuclidean", scale=None, random_state=0, tol=1e-3
    )
    assert result.value < log["value_quad"]


@pytest.mark.slow
def test_more_groups_come_closer_to_the_full_plan():
    x, y = clouds(100, 80)
    full = torchgw.solve(x, y, distances="sqeuclidean", random_state=0)
    values = [
        torchgw.solve_low_rank(x, y, rank=rank, distances="sqeuclidean", init=full, tol=1e-2).value
        for rank in (2, 8, 32)
    ]
    assert values[0] > values[1] > values[2] > 0
    # blurring within 32 groups of 100 points
    assert values[2] < 1.35 * full.value


def test_a_start_that_may_not_be_the_best_is_doubted():
    x, y = clouds(30, 25)
    with pytest.warns(torchgw.SearchWarning, match="few points of each side that low-rank"):
        torchgw.solve_low_rank(x, y, rank=3, distances="sqeuclidean", random_state=0, tol=1e-2)


def test_a_result_is_a_start():
    x, y = clouds(30, 25)
    options = {"rank": 5, "distances": "sqeuclidean", "random_state": 0}
    with pytest.warns(torchgw.ConvergenceWarning, match="max_iter"):
        first = torchgw.solve_low_rank(x, y, max_iter=3, **options)
    with pytest.warns(torchgw.ConvergenceWarning, match="max_iter"):
        second = torchgw.solve_low_rank(x, y, max_iter=3, init=first, **options)
    assert second.history[0] == pytest.approx(first.value)
    assert second.value < first.value


@pytest.mark.parametrize("unit", [2**-10, pytest.param(2**10, marks=pytest.mark.slow)])
def test_units_do_not_matter(unit):
    """No step size overflows: steps are relative to the gradient, and taken in logarithms.

    Units that are powers of two round nothing: other roundings may end at another optimum.
    """
    x, y = clouds()
    options = {"rank": 5, "distances": "sqeuclidean", "random_state": 0, "tol": 1e-2}
    plain = torchgw.solve_low_rank(x, y, scale=None, **options)
    other = torchgw.solve_low_rank(x * unit, y * unit, scale=None, **options)
    assert other.value == pytest.approx(plain.value * unit**4, rel=1e-9)


def test_features_and_zero_weights():
    x, y = clouds()
    features = x, y[:, :2]
    a = np.r_[0.0, np.full(59, 1 / 59)]
    options = {"rank": 6, "distances": "sqeuclidean", "a": a, "alpha": 0.5, "random_state": 0}
    by_features = torchgw.solve_low_rank(x, y, features=features, tol=1e-2, **options)
    by_table = torchgw.solve_low_rank(x, y, M=ot.dist(*features), tol=1e-2, **options)
    # roundings grow along a descent that stops while 1% may be left
    assert by_features.value == pytest.approx(by_table.value, rel=1e-2)
    assert by_features.marginal_a[0] == 0
    expected = float((np.asarray(by_features.plan) * ot.dist(*features)).sum()) / 2
    assert by_features.value_linear == pytest.approx(expected, rel=1e-6)


def test_points_of_weight_zero_are_in_no_group():
    x, y = clouds()
    b = np.r_[0.0, np.full(len(y) - 1, 1 / (len(y) - 1))]
    options = {"distances": "sqeuclidean", "b": b, "random_state": 0, "tol": 1e-2}
    result = torchgw.solve_low_rank(x, y, rank=4, **options)
    with pytest.raises(torchgw.UnsupportedError, match="1 points of weight zero are in no group"):
        result.lazy_plan.T.barycentric(x)
    # and may join any of a start
    more = torchgw.solve_low_rank(x, y, rank=6, init=result, **options)
    assert more.value < result.value


@pytest.mark.slow
def test_nothing_of_the_size_of_the_plan():
    x, y = clouds(1500, 1400)
    with LargestTensor() as largest, pytest.warns(torchgw.ConvergenceWarning):
        result = torchgw.solve_low_rank(
            x, y, rank=8, distances="sqeuclidean", max_iter=2, random_state=0
        )
    assert result.marginal_error < 1e-6
    # the start has tables among 300 points, and columns of all points in blocks of 64; the multi-
    # start of those keeps a few of them
    assert largest.size < 1500 * 1400 / 2


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rank": 51}, torchgw.InvalidInputError, "at most the number of points"),
        ({"rank": 0}, torchgw.InvalidInputError, "`rank`"),
        ({"tol": -1}, torchgw.InvalidInputError, "`tol`"),
        ({"init": np.ones((60, 50))}, torchgw.InvalidTypeError, "`init` must be a GWResult"),
        ({"ranks": 3}, torchgw.InvalidTypeError, "Did you mean 'rank'"),
    ],
)
def test_bad_input(change, error, message):
    x, y = clouds()
    with pytest.raises(error, match=message):
        torchgw.solve_low_rank(x, y, **{"rank": 5, "distances": "sqeuclidean", **change})


@pytest.mark.gpu
def test_memory_and_value_on_cuda():
    """20,000 x 20,000 at rank 50: within 5% of the full rank, and no matrix of that size."""
    from torchgw.datasets import spiral

    n = 20_000
    x = torch.from_numpy(spiral(n, 0)[0]).cuda()
    y = torch.randn(n, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).cuda()
    options = {"distances": "sqeuclidean", "random_state": 0}
    full = torchgw.solve(x, y, **options)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = torchgw.solve_low_rank(x, y, rank=50, init=full, **options)
    peak = torch.cuda.max_memory_allocated() - before
    assert result.value < 1.05 * full.value
    assert result.marginal_error < 1e-6
    # a tenth of one float32 matrix
    assert peak < 0.1 * 4 * n * n * 8
