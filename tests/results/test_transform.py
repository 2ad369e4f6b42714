"""Mapping new points: known ones go where the plan sends them, held-out ones to their place."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch
from mapping_cases import DISTANCES, solve
from problems import distance_matrices, random_weights
from scipy.spatial.distance import cdist
from scipy.stats import spearmanr

import torchgw
from torchgw import GraphWarning, InvalidInputError, UnsupportedError
from torchgw.datasets import spiral, swiss_roll
from torchgw.distances import PointDistance
from torchgw.distances import new_points as cross


@pytest.mark.parametrize("gradient", ["dense", "factored", "sampled"])
@pytest.mark.parametrize("distances", DISTANCES, ids=str)
def test_training_points_go_where_the_plan_sends_them(curves, distances, gradient, monkeypatch):
    X, Y = curves
    settings = {"distances": distances, "gradient": gradient, "n_anchors": 64}
    try:
        result = solve(X, Y, epsilon=5e-3, **settings)
    except UnsupportedError:
        pytest.skip("no factors on either side")
    # many blocks, the last one ragged
    monkeypatch.setattr(cross, "BLOCK_ENTRIES", 7 * 90 * 5)
    for moved, expected in (
        (result.transform(X), result.lazy_plan.barycentric(Y)),
        (result.inverse_transform(Y), result.lazy_plan.T.barycentric(X)),
    ):
        # float64 throughout; rounding of the cost, 1e-16, is amplified by 1 / epsilon
        np.testing.assert_allclose(moved, expected, atol=1e-11)
        assert float(moved.std(axis=0).max()) > 0.05


@pytest.mark.parametrize("distances", ["euclidean", "landmark", "precomputed", "sqeuclidean"])
def test_training_points_in_mixed_precision(distances):
    X, Y = spiral(400, random_state=0)[0], swiss_roll(380, random_state=1)[0]
    result = solve(X, Y, distances=distances)
    assert result.precision == "mixed"
    expected = result.lazy_plan.barycentric(Y)
    # a cost kept in float32 is off by 1e-7, over an epsilon of about 1e-3
    assert np.abs(result.transform(X) - expected).max() < 2e-3


@pytest.mark.parametrize("gradient", ["dense", "factored", "sampled"])
def test_proximal_steps(curves, gradient):
    X, Y = curves
    settings = {"distances": "landmark", "gradient": gradient, "n_anchors": 64}
    result = solve(X, Y, regularization="proximal", polish=False, **settings)
    np.testing.assert_allclose(result.transform(X), result.lazy_plan.barycentric(Y), atol=1e-10)


def test_polished_plans_are_mapped_by_the_entropic_one(curves):
    """Far from all points both are the same, and a new point is moved as its neighbours are."""
    X = curves[0]
    Y = X[::-1] * 2 + 0.01 * np.random.default_rng(0).normal(size=X.shape)
    settings = {"distances": "euclidean", "epsilon": 2e-3}
    entropic = solve(X, Y, **settings)
    polished = solve(X, Y, polish=True, **settings)
    for new, most in ((X + 1e-3, 1), (X[:3] + 1e3, 1e-3)):
        moved = np.abs(polished.transform(new) - entropic.transform(new)).max()
        missed = np.abs(polished.lazy_plan.barycentric(Y) - entropic.transform(X)).max()
        assert missed > 1e-4
        # a mean of what is missed; all of it has the mean zero
        assert moved < most * missed


def test_unequal_and_zero_weights(curves):
    X, Y = curves
    a, b = random_weights(90), random_weights(110, 1)
    a[::7], b[3::11] = 0, 0
    result = solve(X, Y, a=a / a.sum(), b=b / b.sum(), distances="euclidean", epsilon=0.01)
    moved = result.transform(X)
    np.testing.assert_allclose(moved, result.lazy_plan.barycentric(Y), atol=1e-11)
    back = result.inverse_transform(Y)
    np.testing.assert_allclose(back, result.lazy_plan.T.barycentric(X), atol=1e-11)


@pytest.mark.parametrize(
    "relaxation", [{"unbalanced": 0.3}, {"unbalanced": (np.inf, 0)}, {"unbalanced": (0.1, np.inf)},
                   {"mass": 0.6}], ids=str,
)  # fmt: skip
@pytest.mark.parametrize("gradient", ["dense", "factored", "sampled"])
def test_relaxed_plans_map_new_points(curves, relaxation, gradient, tmp_path):
    """By their conditional plans, which know how much mass every target point may take."""
    X, Y = curves
    a = random_weights(90)
    a[::7] = 0
    settings = {"distances": "landmark" if gradient == "factored" else "euclidean", "n_init": 1}
    settings |= {"a": a / a.sum(), "epsilon": 0.01, "gradient": gradient, "n_anchors": 64}
    result = solve(X, Y, **settings, **relaxation)
    used = a > 0
    expected = result.lazy_plan.barycentric(Y)
    np.testing.assert_allclose(result.transform(X)[used], expected[used], atol=1e-11)
    back = result.inverse_transform(Y)
    np.testing.assert_allclose(back, result.lazy_plan.T.barycentric(X), atol=1e-11)
    # not what the same potentials with the cost of strict marginals say
    known = result.extension.known._replace(own=None)
    strict = dataclasses.replace(
        result, extension=dataclasses.replace(result.extension, known=known)
    )
    assert np.abs(strict.transform(X) - expected)[used].max() > 1e-3
    result.save(tmp_path / "result.npz", dense=True)
    again = torchgw.load(tmp_path / "result.npz")
    np.testing.assert_allclose(again.transform(X[:5]), result.transform(X[:5]), atol=1e-11)


def test_partial_plans_map_features(curves):
    """The linear cost of new points has the units of the mass, as that of the known ones has."""
    X, Y = curves
    rng = np.random.default_rng(0)
    F_X, F_Y = rng.normal(size=(90, 4)) / 3, rng.normal(size=(110, 4)) / 3
    result = solve(
        X, Y, features=(F_X, F_Y), alpha=0.5, distances="euclidean", epsilon=0.05, mass=0.4,
        n_init=1,
    )  # fmt: skip
    moved = result.transform(X[3:8], F_new=F_X[3:8])
    np.testing.assert_allclose(moved, result.lazy_plan.barycentric(Y)[3:8], atol=1e-10)


@pytest.mark.parametrize(
    ("distances", "count"), [("precomputed", 500), ("landmark", 500), ("euclidean", 200)]
)
def test_held_out_points_find_their_place(distances, count):
    X, angle = spiral(2 * count, random_state=0)
    # for a straight metric the copy is isometric, for a geodesic one it need not be
    Y = X @ np.array([[0.6, -0.8], [0.8, 0.6]]) + 3 if distances == "euclidean" else X * 2 - 1
    seen, unseen = slice(0, None, 2), slice(1, None, 2)
    result = torchgw.solve(X[seen], Y[seen], distances=distances, random_state=0)
    moved = result.transform(X[unseen])
    nearest = cdist(moved, Y).argmin(axis=1)
    assert abs(spearmanr(angle[nearest], angle[unseen]).statistic) > 0.99
    back = result.inverse_transform(Y[unseen])
    nearest = cdist(back, X).argmin(axis=1)
    assert abs(spearmanr(angle[nearest], angle[unseen]).statistic) > 0.99


def test_given_distances_and_linear_cost():
    d_x, d_y = distance_matrices(40, 30)
    linear = np.random.default_rng(0).uniform(size=(40, 30))
    values = np.random.default_rng(1).normal(size=(30, 2))
    result = solve(D_X=d_x, D_Y=d_y, M=linear, epsilon=0.02, scale="mean")
    expected = result.lazy_plan.barycentric(values)
    moved = result.transform(D_new=d_x[5:9], M_new=linear[5:9], values=values)
    np.testing.assert_allclose(moved, expected[5:9], atol=1e-12)
    with pytest.raises(InvalidInputError, match=r"pass `M_new` of shape \(4, 30\)"):
        result.transform(D_new=d_x[:4], values=values)
    back = result.inverse_transform(
        D_new=d_y[:3].tolist(), M_new=linear.T[:3].tolist(), values=np.eye(40).tolist()
    )
    np.testing.assert_allclose(back.sum(1), 1)


@pytest.mark.parametrize("metric", ["sqeuclidean", "cosine", "euclidean"])
def test_features(curves, metric):
    X, Y = curves
    rng = np.random.default_rng(0)
    F_X, F_Y = rng.normal(size=(90, 4)), rng.normal(size=(110, 4))
    result = solve(
        X, Y, features=(F_X, F_Y), feature_metric=metric, alpha=0.9, distances="landmark",
        epsilon=0.02,
    )  # fmt: skip
    moved = result.transform(X[3:8], F_new=F_X[3:8])
    np.testing.assert_allclose(moved, result.lazy_plan.barycentric(Y)[3:8], atol=1e-10)
    back = result.inverse_transform(Y[3:8], F_new=F_Y[3:8])
    np.testing.assert_allclose(back, result.lazy_plan.T.barycentric(X)[3:8], atol=1e-10)
    assert np.abs(result.transform(X[3:8], F_new=F_X[13:18]) - moved).max() > 1e-3
    with pytest.raises(InvalidInputError, match="or `F_new`, their features"):
        result.transform(X[3:8])
    with pytest.raises(InvalidInputError, match=r"`F_new` must have shape \(5, 4\)"):
        result.transform(X[3:8], F_new=F_X[:3])


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_what_was_given_may_change_afterwards(curves, kind):
    """As parameters do that an optimiser updates in place."""
    given = [kind(part[:40]) for part in (*curves, curves[0][:, :2], curves[1][:, :2])]
    X, Y, F_X, F_Y = given
    result = solve(X, Y, distances="euclidean", features=(F_X, F_Y), epsilon=0.05, n_init=1)
    new = curves[0][:5].copy(), curves[1][:5].copy()

    def mapped():
        return result.transform(new[0], F_new=new[0]), result.inverse_transform(
            new[1], F_new=new[1][:, :2]
        )

    expected = mapped()
    for part in given:
        part[:] = 0
    for got, before in zip(mapped(), expected, strict=True):
        np.testing.assert_array_equal(got, before)


def test_graph_is_mapped_by_distances():
    import networkx as nx

    graph = nx.path_graph(25)
    hops = np.abs(np.subtract.outer(np.arange(25), np.arange(25)))
    result = solve(graph, np.linspace(0, 1, 30)[:, None] ** 1.1, epsilon=2e-3)
    moved = result.transform(D_new=hops[:4])
    expected = result.lazy_plan.barycentric(np.linspace(0, 1, 30)[:, None] ** 1.1)[:4]
    np.testing.assert_allclose(moved, expected, atol=1e-11)


def test_new_points_of_a_disconnected_graph_use_its_distances():
    rng = np.random.default_rng(0)
    X = np.concatenate([rng.normal(size=(20, 2)), rng.normal(size=(25, 2)) + 30])
    with pytest.warns(GraphWarning):
        result = solve(X, X @ np.diag([1, -1]), disconnected="fill", n_neighbors=5)
    np.testing.assert_allclose(
        result.transform(X), result.lazy_plan.barycentric(X @ np.diag([1, -1])), atol=1e-11
    )


def test_values_of_labels(curves):
    X, Y = curves
    result = solve(X, Y, distances="euclidean")
    onehot = np.eye(4)[np.arange(110) % 4]
    shares = result.transform(X[:5], values=onehot)
    np.testing.assert_allclose(shares.sum(1), 1)
    np.testing.assert_allclose(shares, result.lazy_plan.barycentric(onehot)[:5], atol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "Pass exactly one of `X_new`"),
        ({"X_new": np.zeros((3, 2)), "D_new": np.zeros((3, 90))}, "both were"),
        ({"X_new": np.zeros((3, 5))}, "must have 2 columns, as X has; got 5"),
        ({"X_new": np.zeros((0, 2))}, "at least 1"),
        ({"X_new": [[np.nan, 0]]}, "NaN or infinite"),
        ({"D_new": np.zeros((3, 4))}, r"shape \(q, 90\)"),
        ({"D_new": np.zeros((0, 90))}, r"shape \(q, 90\)"),
        ({"D_new": np.full((1, 90), -1.0)}, "non-negative"),
        ({"X_new": np.zeros((3, 2)), "values": np.zeros((4, 1))}, r"shape \(110, c\)"),
        ({"X_new": np.zeros((3, 2)), "M_new": np.zeros((3, 110))}, "no linear cost"),
    ],
)
def test_bad_input(curves, arguments, message):
    result = solve(*curves, distances="euclidean")
    with pytest.raises(InvalidInputError, match=message):
        result.transform(**arguments)


def test_points_that_are_not_known(curves):
    X, Y = curves
    result = solve(PointDistance(torch.from_numpy(X)), D_Y=cdist(Y, Y))
    with pytest.raises(InvalidInputError, match="X was not given as points"):
        result.transform(X, values=Y)
    with pytest.raises(InvalidInputError, match="pass `values` of shape"):
        result.transform(D_new=cdist(X[:2], X))


@pytest.mark.gpu
@pytest.mark.parametrize("distances", ["landmark", "euclidean", "sqeuclidean"])
def test_training_points_on_a_gpu(distances):
    X, Y = spiral(3000, random_state=0)[0], swiss_roll(3500, random_state=1)[0]
    result = solve(X, Y, distances=distances, device="cuda")
    assert isinstance(result.transform(X[:100]), np.ndarray)
    moved = result.transform(torch.as_tensor(X[:100], device="cuda"))
    assert moved.device.type == "cuda"
    assert np.abs(moved.cpu().numpy() - result.lazy_plan.barycentric(Y)[:100]).max() < 5e-3


@pytest.mark.parametrize("kind", [np.asarray, np.ndarray.tolist, torch.from_numpy])
def test_new_points_come_back_as_they_were_given(curves, kind):
    X, Y = curves
    result = solve(X, Y, distances="euclidean", epsilon=0.05, n_init=1)
    type_ = torch.Tensor if kind is torch.from_numpy else np.ndarray
    moved = result.transform(kind(X[:4]))
    back = result.inverse_transform(kind(Y[:4]))
    far = result.transform(D_new=kind(cdist(X[:4], X) * result.scale[0]), values=Y)
    assert {type(part) for part in (moved, back, far)} == {type_}
    assert {str(part.dtype).split(".")[-1] for part in (moved, back, far)} == {"float64"}
    np.testing.assert_allclose(moved, result.lazy_plan.barycentric(Y)[:4], atol=1e-8)


def test_every_array_comes_as_the_input_was_given(tmp_path):
    X = np.random.default_rng(0).normal(size=(30, 3))
    settings = {"distances": "euclidean", "n_init": 4}
    given = torch.as_tensor(X)
    for points, kind in ((X, np.ndarray), (X.tolist(), np.ndarray), (given, torch.Tensor)):
        result = solve(points, points, **settings)
        plan, found = result.lazy_plan, result.matching()
        parts = [plan.argmax(), plan.argmax(axis=0), plan.T.argmax(), found.source, found.target]
        parts += [found.pairs, found.weights]
        parts += [plan @ X, X.T @ plan, plan.push(X), plan.pull(X), plan.barycentric(X)]
        parts += [*plan.topk(2), *plan.marginals(), plan.rows([0, 2]), plan.to_dense()]
        parts += [plan.T.to_dense(), plan.rounded().to_dense(), plan.rounded().T.topk(1)[0]]
        parts += plan.sample(5, torch.Generator().manual_seed(0))
        assert {type(part) for part in parts} == {kind}
        result.save(tmp_path / "result.npz")
        for each in (result, copy.copy(result), torchgw.load(tmp_path / "result.npz"),
                     pickle.loads(pickle.dumps(result))):  # fmt: skip
            parts = [each.plan, *each.potentials, *each.marginals, each.lazy_plan.T.argmax()]
            parts += [getattr(one, part) for one in each.alternatives
                      for part in ("plan", "source", "target")]  # fmt: skip
            assert {type(part) for part in parts} == {kind}
            np.testing.assert_array_equal(each.marginal_a, result.marginal_a)
            assert each.matching(improve=False).target.tolist() == list(range(30))
            # what a user was handed says where another solve begins
            if points is not X:
                continue
            for init in (each, each.potentials, each.plan / each.plan.sum(), each.alternatives[0]):
                again = solve(points, points, init=init, distances="euclidean")
                assert again.value == pytest.approx(result.value, abs=1e-3)
        # tensors come back as tensors from either
        parts = [
            plan @ given, given.T @ plan, plan.T.barycentric(given),
            plan.rows(torch.tensor([0, 3])),
        ]  # fmt: skip
        assert {type(part) for part in parts} == {torch.Tensor}
        np.testing.assert_array_equal(plan.argmax(), np.arange(30))
        np.testing.assert_array_equal(np.asarray(plan), result.plan)
    provider = torchgw.distances.PointDistance(given, "euclidean")
    assert isinstance(solve(provider, X, **settings).lazy_plan.argmax(), torch.Tensor)
    assert isinstance(solve(D_X=provider.columns(torch.arange(30)), Y=X, **settings).lazy_plan @ X,
                      torch.Tensor)  # fmt: skip
