"""What can be said of a plan: how well distances agree, and how far the best value may be."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from mapping_cases import solve
from scipy.spatial.distance import cdist

import torchgw
from torchgw._plans.given import StoredPlan
from torchgw._results import bounds

LOSS = {"square": lambda x, y: (x - y) ** 2, "absolute": lambda x, y: np.abs(x - y)}
ORDER = {"square": 2, "absolute": 1}


def tables(n, m, seed):
    """Distances of clouds, or symmetric matrices that are none."""
    rng = np.random.default_rng(seed)
    if seed % 2:
        made = (rng.normal(size=(size, size)) for size in (n, m))
        return [np.abs(part + part.T) for part in made]
    return [cdist(points, points) for points in (rng.normal(size=(size, 2)) for size in (n, m))]


def value_of(plan, x, y, loss="square"):
    """Sum over all pairs of entries, in four indices."""
    each = LOSS[loss](x[:, None, :, None], y[None, :, None, :])
    return float(np.einsum("ij,kl,ijkl->", plan, plan, each))


def each_bound(result):
    """The three bounds of a pure problem."""
    known, weights = result.extension.known, result.lazy_plan.weights
    sides, order = known.providers, ORDER[known.loss.name]
    third = bounds._transport(bounds._local(sides, weights, order), weights)
    return (
        bounds._first(sides, weights, order),
        bounds._second(sides, weights, order),
        third,
    )


@pytest.mark.parametrize("loss", LOSS)
def test_no_matching_goes_below(loss):
    """The best of 720 permutations, and the plan found, cost at least the bounds, in order."""
    for seed in range(10):
        x, y = tables(6, 6, seed)
        result = solve(D_X=x, D_Y=y, loss=loss, n_init=1)
        permutations = np.array(list(itertools.permutations(range(6))))
        best = min(LOSS[loss](x, y[np.ix_(order, order)]).mean() for order in permutations)
        first, second, third = each_bound(result)
        # float64, but that the second is averaged over 65,536 parts
        assert max(first, second) <= third * (1 + 1e-9) + 1e-12
        assert result.lower_bound == third
        assert third <= best * (1 + 1e-9) + 1e-12
        assert third <= result.value * (1 + 1e-6) + 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSS)
def test_no_plan_goes_below_for_any_weights(loss):
    for seed in range(6):
        rng = np.random.default_rng(seed)
        x, y = tables(5, 8, seed)
        plan = rng.random((5, 8)) * (rng.random((5, 8)) < 0.4) + 1e-3
        plan /= plan.sum()
        weights = {"a": plan.sum(1), "b": plan.sum(0)}
        result = solve(D_X=x, D_Y=y, loss=loss, n_init=1, **weights)
        value = value_of(plan, x, y, loss)
        for bound in (*each_bound(result), result.lower_bound):
            assert 0 <= bound <= value * (1 + 1e-9)
        assert result.lower_bound > 0.05 * result.value
        # with a linear cost of any sign
        M = rng.normal(size=(5, 8))
        result = solve(D_X=x, D_Y=y, M=M, alpha=0.4, loss=loss, n_init=1, **weights)
        assert result.lower_bound <= 0.4 * value + 0.6 * float((plan * M).sum())
        assert result.lower_bound <= result.value + 1e-6


def test_a_dual_is_close_to_the_least_cost():
    ot = pytest.importorskip("ot")
    rng = np.random.default_rng(0)
    cost, a, b = rng.random((40, 50)), rng.random(40), rng.random(50)
    a, b = a / a.sum(), b / b.sum()
    exact = ot.emd2(a, b, cost)
    marginals = torchgw._typing.Marginals(torch.from_numpy(a), torch.from_numpy(b))
    found = bounds._transport(torch.from_numpy(cost), marginals)
    assert exact * 0.95 < found <= exact * (1 + 1e-9)
    least = bounds._least(torchgw._sinkhorn.problem.DenseCost(torch.from_numpy(cost)), marginals)
    assert 0 < least <= exact


def test_quantile_means():
    values = torch.tensor([[3.0, 1.0, 2.0]], dtype=torch.float64)
    weights = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    assert bounds.quantile_means(values, weights, 4).tolist() == [[1, 2, 3, 3]]
    assert bounds.quantile_means(values, weights, 2).tolist() == [[1.5, 3]]
    # 1 up to a quarter, 2 up to a half
    assert bounds.quantile_means(values, weights, 3)[0].tolist() == pytest.approx([1.25, 2.5, 3])


@pytest.mark.parametrize("distances", ["euclidean", "sqeuclidean", "landmark"])
def test_copies_have_bound_zero(distances):
    x = np.random.default_rng(0).normal(size=(50, 3)) * [3, 2, 1]
    order = np.random.default_rng(1).permutation(50)
    a = np.random.default_rng(2).random(50)
    for weights in ({}, {"a": a / a.sum(), "b": (a / a.sum())[order]}):
        result = torchgw.solve(x, x[order], distances=distances, random_state=0, **weights)
        # rounding of a mean of squares, or of landmarks chosen on either side
        assert result.lower_bound == pytest.approx(
            0, abs=1e-10 if distances != "landmark" else 1e-4
        )
        assert result.distance_correlation > 0.99


def test_large_problems_have_the_first_two(limited):
    x, y = tables(30, 40, 0)
    M = np.random.default_rng(0).random((30, 40)) + 1
    pure, fused = solve(D_X=x, D_Y=y), solve(D_X=x, D_Y=y, M=M, alpha=0.5)
    first, second, third = each_bound(pure)
    limited(exact=0)
    assert pure.lower_bound == max(first, second) < third
    assert 0.5 * max(first, second) + 0.5 < fused.lower_bound < fused.value
    limited(read=0)
    again = solve(D_X=x, D_Y=y)
    assert again.lower_bound == first


def test_a_linear_problem_is_bounded_by_itself():
    rng = np.random.default_rng(0)
    M = rng.random((30, 30))
    result = torchgw.solve(M=M, alpha=0, random_state=0)
    # the regularised plan costs more than the best one
    assert 0 < result.lower_bound <= result.value


@pytest.mark.slow
def test_where_no_bound_is_known(curves):
    x, y = curves
    for settings in (
        {"loss": "kl"},
        {"mass": 0.5},
        {"unbalanced": 1.0},
        {"unbalanced": (0, np.inf)},
    ):
        assert math.isnan(solve(x, y, distances="euclidean", **settings).lower_bound)
    assert math.isnan(solve(x, y, distances="dijkstra", gradient="sampled").lower_bound)


def test_the_summary_shows_the_gap_once_known():
    x, y = tables(20, 20, 0)
    result = solve(D_X=x, D_Y=y)
    assert "lower_bound" not in repr(result)
    gap = result.value - result.lower_bound
    assert f"above_lower_bound={gap:.6g}" in repr(result)
    assert "above lower bound" in result._repr_html_()


@pytest.mark.filterwarnings("ignore::torchgw.SearchWarning")
@pytest.mark.parametrize("shape", [(5, 7), (6, 6)])
def test_correlation_is_that_of_independent_pairs(shape):
    rng = np.random.default_rng(0)
    x, y = tables(*shape, 0)
    a, b = (weights / weights.sum() for weights in map(rng.random, shape))
    result = solve(D_X=x, D_Y=y, a=a, b=b, search="fast")
    plan = np.asarray(result.plan)
    each = np.einsum("ij,kl->ijkl", plan, plan).ravel()
    values = [
        np.broadcast_to(part, shape + shape).ravel()
        for part in (x[:, None, :, None], y[None, :, None, :])
    ]
    covariance = np.cov(*values, aweights=each, bias=True)
    expected = covariance[0, 1] / np.sqrt(covariance[0, 0] * covariance[1, 1])
    # the marginals of the plan are met to 1e-6
    assert result.distance_correlation == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("distances", ["sqeuclidean", ("landmark", "euclidean"), "cosine"])
def test_correlation_from_factors(distances):
    rng = np.random.default_rng(0)
    result = solve(rng.normal(size=(50, 3)), rng.normal(size=(60, 3)), distances=distances)
    plan = StoredPlan(torch.as_tensor(result.plan))
    providers = [
        torchgw.distances.PrecomputedDistance(side.columns(torch.arange(side.n)))
        for side in result.extension.known.providers
    ]
    stored = bounds._correlation([bounds._exactly(plan, *providers)])
    # factors of landmarks are float32 or float64
    assert result.distance_correlation == pytest.approx(stored, rel=1e-5)


def test_correlation_from_drawn_pairs(limited):
    """Off by less than four of the standard errors that its docstring gives."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 3)) * [3, 2, 1]
    y = x[::-1] + rng.normal(size=(300, 3))
    result = torchgw.solve(x, y, distances="euclidean", random_state=0)
    exact = result.distance_correlation
    limited(read=0)
    drawn = bounds.distance_correlation(result.lazy_plan, result.extension)
    assert drawn == bounds.distance_correlation(result.lazy_plan, result.extension)
    assert 0 < abs(drawn - exact) < 4 * 0.03 * (1 - exact**2)
    assert 0.5 < exact < 0.99


def test_correlation_of_equal_distances_is_undefined():
    x = np.ones((6, 6)) - np.eye(6)
    result = solve(D_X=np.zeros((6, 6)), D_Y=x)
    assert math.isnan(result.distance_correlation)


def test_results_from_files(tmp_path):
    x, y = tables(20, 20, 0)
    result = solve(D_X=x, D_Y=y)
    result.save(tmp_path / "dense.npz", dense=True)
    again = torchgw.load(tmp_path / "dense.npz")
    assert again.lower_bound == pytest.approx(result.lower_bound)
    assert again.distance_correlation == pytest.approx(result.distance_correlation)
    result.save(tmp_path / "short.npz")
    short = torchgw.load(tmp_path / "short.npz")
    for name in ("lower_bound", "distance_correlation"):
        with pytest.raises(torchgw.UnsupportedError, match="dense=True"):
            getattr(short, name)
