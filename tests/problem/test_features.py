"""Linear costs from features, and problems without structure."""

from __future__ import annotations

import numpy as np
import ot
import pytest
import torch
from problems import LargestTensor, solve_by_name
from torch.autograd import gradcheck, gradgradcheck

import torchgw
from torchgw._problem.problem import feature_cost, spread
from torchgw._sinkhorn.problem import FactoredCost


def given(n=40, m=30):
    rng = np.random.default_rng(0)
    spaces = rng.normal(size=(n, 2)), rng.normal(size=(m, 3))
    return spaces, (rng.normal(size=(n, 4)), rng.normal(size=(m, 4)) + 0.5)


def table(features, metric):
    x, y = features
    return {
        "sqeuclidean": lambda: ot.dist(x, y),
        "euclidean": lambda: ot.dist(x, y, "euclidean"),
        "cosine": lambda: ot.dist(x, y, "cosine"),
    }[metric]()


@pytest.mark.parametrize("metric", ["sqeuclidean", "cosine", "euclidean"])
@pytest.mark.parametrize("gradient", ["dense", "factored", "sampled"])
def test_features_are_their_table(metric, gradient):
    (x, y), features = given()
    distances = "sqeuclidean" if gradient == "factored" else "euclidean"
    options = {"distances": distances, "gradient": gradient, "alpha": 0.4, "epsilon": 0.1}
    if gradient == "sampled":
        options |= {"n_anchors": 50, "max_iter": 60, "random_state": 0, "storage": "stored"}
    by_table = solve_by_name(x, y, M=table(features, metric), **options)
    by_features = solve_by_name(x, y, features=features, feature_metric=metric, **options)
    # the same iteration up to rounding
    assert np.abs(by_table.plan - by_features.plan).sum() < 1e-8
    assert by_features.value_linear == pytest.approx(by_table.value_linear, rel=1e-8)


@pytest.mark.parametrize("metric", ["sqeuclidean", "cosine"])
def test_features_are_streamed(metric):
    (x, y), features = given()
    options = {"distances": "sqeuclidean", "alpha": 0.4, "epsilon": 0.1}
    stored = solve_by_name(x, y, M=table(features, metric), **options)
    streamed = solve_by_name(
        x, y, features=features, feature_metric=metric, storage="streamed", tol=1e-7, **options
    )
    assert isinstance(streamed.lazy_plan.cost, FactoredCost)
    # factors of squared Euclidean distances, a constant and the features
    assert streamed.lazy_plan.cost.rank <= 5 + 4
    assert np.abs(stored.plan - streamed.plan).sum() < 1e-4


def test_a_large_solve_with_features_begins_on_a_subsample(monkeypatch, limited):
    (x, y), features = given(400, 300)
    options = {"features": features, "distances": "sqeuclidean", "alpha": 0.5, "random_state": 0}
    whole = solve_by_name(x, y, **options)
    limited(subsample=1000)
    monkeypatch.setattr("torchgw._solve.pipeline._COARSE_POINTS", 200)
    coarse = solve_by_name(x, y, **options)
    assert coarse.history[0].shape == (200, 200)
    assert coarse.value == pytest.approx(whole.value, rel=1e-3)


@pytest.mark.slow
def test_tiles_are_skipped_with_features():
    """Features are more columns of the factors: tiles are bounded by all of them, none is built."""
    n, rng = 1200, np.random.default_rng(0)
    place = rng.random((2, n, 1))
    features = [np.cos(part * rng.uniform(1, 6, 16)) for part in place]
    features = [part + 0.05 * rng.normal(size=part.shape) for part in features]
    points = [np.concatenate([np.cos(3 * part), np.sin(2 * part)], 1) for part in place]
    options = {"distances": "sqeuclidean", "features": features, "alpha": 0.5, "epsilon": 0.02}
    options |= {"storage": "streamed", "precision": "float32", "random_state": 0}
    with LargestTensor() as largest:
        skipped = solve_by_name(*points, skip_tiles=True, **options)
    # blocks of rows come to a third of it
    assert largest.size < n * n / 2
    assert skipped.log["tiles"]["kept"] < 0.5
    whole = solve_by_name(*points, skip_tiles=False, **options)
    # both to the column error of 1e-5 that float32 solves aim at, which exponents amplify
    assert skipped.value == pytest.approx(whole.value, rel=1e-4)
    values = torch.from_numpy(place[1])
    first, second = (result.lazy_plan @ values for result in (skipped, whole))
    assert (first - second).abs().sum() < 1e-3 * second.sum()


def test_spread_of_factors_is_that_of_the_table():
    _, features = given()
    x, y = (torch.from_numpy(item) for item in features)
    for metric in ("sqeuclidean", "cosine", "euclidean"):
        cost = feature_cost(x, y, metric)
        assert spread(cost) == pytest.approx(float(cost.dense().matrix.std(correction=0)))


@pytest.mark.parametrize("kind", ["M", "features"])
def test_without_structure_it_is_entropic_transport(kind):
    _, features = given()
    cost = table(features, "sqeuclidean")
    linear = {"M": cost} if kind == "M" else {"features": features}
    result = solve_by_name(alpha=0, epsilon=0.5, inner_tol=1e-9, **linear)
    n, m = cost.shape
    expected = ot.sinkhorn(np.full(n, 1 / n), np.full(m, 1 / m), cost, 0.5, stopThr=1e-12)
    assert result.converged
    assert np.abs(np.asarray(result.plan) - expected).sum() < 1e-6
    assert result.value == pytest.approx((expected * cost).sum(), rel=1e-6)
    assert result.value_quad == 0
    # structure that alpha=0 does not weigh changes nothing
    (x, y), _ = given()
    same = torchgw.solve(x, y, distances="sqeuclidean", alpha=0, epsilon=0.5, **linear)
    assert np.abs(same.plan - result.plan).sum() < 1e-5


@pytest.mark.parametrize("metric", ["sqeuclidean", "cosine", "euclidean"])
@pytest.mark.parametrize("mode", ["value", "implicit"])
def test_features_have_gradients(metric, mode):
    (x, y), features = given(7, 6)

    def run(source, target):
        result = torchgw.solve(
            x, y, features=(source, target), distances="sqeuclidean", alpha=0.5, epsilon=1.5,
            tol=1e-9, differentiable=mode, n_init=1,
            options=torchgw.Options(feature_metric=metric, inner_tol=1e-10),
        )  # fmt: skip
        plan = result.lazy_plan @ torch.ones(6).double() if mode == "value" else result.plan
        return result.loss + plan.square().sum() * 10

    tensors = [torch.from_numpy(item).requires_grad_() for item in features]
    check = {"eps": 1e-4, "atol": 1e-5, "rtol": 1e-4, "fast_mode": True}
    assert gradcheck(run, tensors, **check)
    if (mode, metric) == ("implicit", "sqeuclidean"):
        tight = torchgw.Options(epsilon=1.5, tol=1e-9, inner_tol=1e-10, differentiable="implicit")

        def loss(*parts):
            return torchgw.solve(
                x, y, features=parts, distances="sqeuclidean", alpha=0.5, options=tight
            ).loss

        assert gradgradcheck(loss, tensors, **{**check, "rtol": 1e-3})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"M": np.ones((40, 30))}, torchgw.InvalidInputError, "two ways"),
        ({"features": np.ones((40, 4))}, torchgw.InvalidInputError, "must be a pair"),
        ({"feature_metric": "angle"}, torchgw.InvalidInputError, "'cosine'"),
        ({"features": (np.ones((40, 4)), np.ones((30, 3)))}, torchgw.InvalidInputError, "columns"),
        ({"features": (np.ones((39, 4)), np.ones((30, 4)))}, torchgw.InvalidInputError, "one row"),
        (
            {"features": (np.ones((40, 4)), np.zeros((30, 4))), "feature_metric": "cosine"},
            torchgw.InvalidInputError,
            "no direction",
        ),
        ({"features": None, "feature_metric": "cosine"}, torchgw.InvalidInputError, "without"),
        ({"features": None, "alpha": 0.5}, torchgw.InvalidInputError, "`features`"),
    ],
)
def test_bad_features_are_refused(change, error, message):
    (x, y), features = given()
    with pytest.raises(error, match=message):
        solve_by_name(x, y, **{"features": features, "distances": "sqeuclidean", **change})


def test_large_euclidean_features_are_refused(limited):
    (x, y), features = given()
    limited(kept_tables=100)
    with pytest.raises(torchgw.UnsupportedError, match="sqeuclidean"):
        torchgw.solve(x, y, features=features, options=torchgw.Options(feature_metric="euclidean"))


def test_no_linear_cost_and_no_structure():
    with pytest.raises(torchgw.InvalidInputError, match="alpha=0"):
        torchgw.solve(alpha=0)
