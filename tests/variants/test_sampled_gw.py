"""``torchgw.sampled_gw`` is ``torchgw.solve`` under other names."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from problems import isometric_copy, solve_by_name

import torchgw

X, Y, MATCH = isometric_copy(40, noise=0.05)
LINEAR = np.random.default_rng(0).uniform(size=(40, 40))
NAMES = (
    "X_source X_target distance_mode M alpha fgw_alpha epsilon k n_landmarks s_shared semi_relaxed "
    "rho differentiable multiscale lambda_ema_beta mixed_precision log dist_source dist_target "
    "max_iter tol p q device verbose T_init rho_a grad_mode n_coarse min_iter_before_converge"
)


def test_names_are_those_of_the_design():
    assert set(NAMES.split()) <= set(inspect.signature(torchgw.sampled_gw).parameters)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (
            {"distance_mode": "euclidean", "M": 60, "alpha": 0.8, "epsilon": 0.1},
            {"distances": "euclidean", "n_anchors": 60, "redraw": 0.8, "epsilon": 0.1},
        ),
        (
            {"k": 6, "M": 60, "epsilon": 0.1, "mixed_precision": True, "log": True},
            {
                "distances": "dijkstra", "n_neighbors": 6, "n_anchors": 60, "epsilon": 0.1,
                "precision": "mixed",
            },
        ),
        (
            {"distance_mode": "landmark", "n_landmarks": 20, "M": 60, "epsilon": 0.1},
            {"distances": "landmark", "n_landmarks": 20, "n_anchors": 60, "epsilon": 0.1},
        ),
        (
            {
                "distance_mode": "euclidean", "M": 60, "epsilon": 0.1, "C_linear": LINEAR,
                "fgw_alpha": 0.3,
            },
            {"distances": "euclidean", "n_anchors": 60, "epsilon": 0.1, "M": LINEAR, "alpha": 0.7},
        ),
    ],
)  # fmt: skip
def test_each_name_means_what_its_documentation_says(theirs, ours):
    by_names = torchgw.sampled_gw(X, Y, random_state=0, **theirs)
    by_solve = solve_by_name(X, Y, gradient="sampled", random_state=0, **ours)
    assert isinstance(by_names, torchgw.GWResult)
    assert np.array_equal(by_names.plan, by_solve.plan)


def test_weights_at_both_ends_of_the_range():
    """Nothing is divided by alpha or 1 - alpha."""
    options = {"distance_mode": "euclidean", "M": 60, "epsilon": 0.2, "random_state": 0}
    pure = torchgw.sampled_gw(X, Y, C_linear=LINEAR, fgw_alpha=0, **options)
    linear = torchgw.sampled_gw(X, Y, C_linear=LINEAR, fgw_alpha=1, **options)
    assert pure.value_linear == 0
    assert pure.value_quad > 0
    assert linear.value_quad == 0
    assert linear.value == pytest.approx(float((np.asarray(linear.plan) * LINEAR).sum()), rel=1e-6)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"semi_relaxed": True}, (np.inf, 0)),
        ({"semi_relaxed": True, "rho": 0.5}, (np.inf, 0.5)),
        ({"rho": 0.5}, 0.5),
        ({"rho_a": 0.4}, (0.4, np.inf)),
        ({"rho_a": 0.4, "rho": 0.5}, (0.4, 0.5)),
    ],
)
def test_relaxed_marginals(theirs, ours):
    options = {"epsilon": 0.3, "random_state": 0}
    by_names = torchgw.sampled_gw(X, Y, distance_mode="euclidean", M=200, **theirs, **options)
    by_solve = solve_by_name(
        X, Y, distances="euclidean", gradient="sampled", n_anchors=200, unbalanced=ours, **options
    )
    assert np.array_equal(by_names.plan, by_solve.plan)
    if "semi_relaxed" in theirs:
        # one side is strict, the other is not
        assert np.abs(by_names.marginal_a - 1 / 40).sum() < 1e-6
        assert np.abs(by_names.marginal_b - 1 / 40).sum() > 1e-4


def test_loss_has_gradients():
    x = torch.from_numpy(X).requires_grad_()
    result = torchgw.sampled_gw(
        x, Y, distance_mode="euclidean", M=100, epsilon=2.0, differentiable=True, random_state=0
    )
    result.loss.backward()
    assert x.grad.norm() > 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"s_shared": 10}, torchgw.UnsupportedError, "s_shared"),
        ({"lambda_ema_beta": 0.5}, torchgw.UnsupportedError, "fixed unit"),
        ({"rho": -1.0}, torchgw.InvalidInputError, "`rho` must be"),
        ({"semi_relaxed": True, "rho_a": 1.0}, torchgw.InvalidInputError, "Drop one"),
        ({"differentiable": True, "grad_mode": "tape"}, torchgw.InvalidInputError, "'implicit'"),
        ({"multiscale": False}, torchgw.UnsupportedError, "subsample"),
        ({"fgw_alpha": 0.5}, torchgw.InvalidInputError, "C_linear"),
        ({"fgw_alpha": 1.5, "C_linear": LINEAR}, torchgw.InvalidInputError, "fgw_alpha"),
        ({"fgw_alpha": "1", "C_linear": LINEAR}, torchgw.InvalidInputError, "fgw_alpha"),
        ({"n_neighbors": 5}, torchgw.InvalidTypeError, "no argument"),
    ],
)
def test_what_has_no_meaning_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        torchgw.sampled_gw(X, Y, **change)


def test_tables_weights_and_starts_by_the_names_of_the_design():
    points = np.random.default_rng(0).normal(size=(40, 2)) * [1, 3]
    table = np.abs(points[:, None] - points[None]).sum(2)
    weights = np.full(40, 1 / 40)
    call = {"M": 200, "epsilon": 0.05, "random_state": 0, "max_iter": 5, "tol": 1e-3}
    with pytest.warns(torchgw.ConvergenceWarning):
        found = torchgw.sampled_gw(
            dist_source=table, dist_target=table, p=weights, q=weights, T_init=np.eye(40) / 40,
            **call,
        )  # fmt: skip
    assert (np.asarray(found.lazy_plan.argmax()) == np.arange(40)).mean() > 0.9
    with pytest.raises(torchgw.InvalidInputError, match="go together"):
        torchgw.sampled_gw(points, points, dist_source=table)


def test_low_rank_and_graphs_by_the_names_of_the_design():
    call = {"rank": 2, "random_state": 0, "tol": 0.1}
    points = X[:15], Y[:12]
    found = torchgw.sampled_lowrank_gw(*points, distance_mode="sqeuclidean", **call)
    same = torchgw.solve_low_rank(*points, distances="sqeuclidean", **call)
    assert np.array_equal(found.plan, same.plan)
    graph = torchgw.build_knn_graph(X, k=4)
    assert (graph != torchgw.distances.knn_graph(torch.as_tensor(X), 4)).nnz == 0
    with pytest.raises(torchgw.InvalidInputError, match="C_linear"):
        torchgw.sampled_lowrank_gw(X, Y, rank=4, fgw_alpha=0.5)


def test_what_has_no_effect_is_said():
    with pytest.warns(torchgw.TorchGWWarning, match="n_coarse"):
        torchgw.sampled_gw(X, Y, n_coarse=50, M=60, epsilon=0.1, random_state=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"C_linear": np.zeros((3, 3)), "fgw_alpha": 0.5}, "`C_linear` must have shape"),
        ({"T_init": np.zeros((3, 3))}, "`T_init` must have shape"),
        ({"p": np.ones(12)}, r"`p` must sum to 1; it sums to 12. Pass `p / p.sum\(\)`"),
        ({"q": -np.ones(12) / 12}, "`q` must be non-negative"),
        ({"M": -3}, "`M` must be an integer"),
        ({"alpha": 7.0}, "`alpha` is the share of anchors"),
        ({"k": 100}, "`k` must be below"),
        ({"rho": -1.0}, "`rho` must be"),
        ({"distance_mode": "near"}, "`distance_mode` must be one of"),
        ({"min_iter_before_converge": 0}, "`min_iter_before_converge` must be"),
        ({"differentiable": True, "grad_mode": "none"}, "`grad_mode` must be"),
        ({"X_source": np.full((12, 2), np.nan)}, "`X_source` has 24 entries"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_messages_name_arguments_as_the_caller_did(change, message):
    points = np.random.default_rng(0).normal(size=(12, 2))
    with pytest.raises(torchgw.InvalidInputError, match=message):
        torchgw.sampled_gw(**{"X_source": points, "X_target": points, **change})


def test_low_rank_and_graphs_name_arguments_as_the_caller_did():
    points = np.random.default_rng(0).normal(size=(12, 2))
    with pytest.raises(torchgw.InvalidInputError, match="`p` must sum"):
        torchgw.sampled_lowrank_gw(points, points, rank=2, p=np.ones(12))
    with pytest.raises(torchgw.InvalidInputError, match="`k`"):
        torchgw.build_knn_graph(points, 0)
