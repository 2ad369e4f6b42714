"""The recipes of docs/architecture.md, followed at run time by what a newcomer writes."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import reference
import torch
from problems import distance_matrices, random_weights
from scipy.spatial.distance import cdist

import torchgw
from torchgw._problem.losses import LOSSES, Loss, LossName, identity
from torchgw._problem.named import NAMED, DistanceName, NamedDistance
from torchgw.cli import main
from torchgw.distances import DistanceProvider

TIGHT = {"tol": 1e-9, "inner_tol": 1e-11, "objective_tol": 0, "random_state": 0}


class ManhattanDistance(DistanceProvider):
    """Step 1 of a provider: its class, which needs columns and the way to another device."""

    def __init__(self, points):
        self.points, self.n = points, len(points)
        self.device, self.dtype = points.device, points.dtype

    def columns(self, index):
        return torch.cdist(self.points, self.points[index], p=1)

    def to(self, device, dtype):
        return ManhattanDistance(self.points.to(device, dtype))


@pytest.fixture
def manhattan(monkeypatch):
    """Step 2: an entry of the registry."""
    entry = NamedDistance(lambda points, stages: [ManhattanDistance(each) for each in points])
    monkeypatch.setitem(NAMED, "manhattan", entry)


@pytest.mark.parametrize("gradient", ["dense", "sampled"])
def test_recipe_for_a_provider(manhattan, gradient):
    rng = np.random.default_rng(0)
    X, Y = rng.normal(size=(14, 2)), rng.normal(size=(11, 3))
    tables = [cdist(points, points, "cityblock") for points in (X, Y)]
    tables = [table / table.max() for table in tables]
    result = torchgw.solve(
        X, Y, distances="manhattan", gradient=gradient, epsilon=0.05, max_iter=60, **TIGHT
    )
    assert result.gradient == gradient
    plan = result.plan.numpy()
    error = 6 * result.log["value_standard_error"] + 1e-9
    assert result.value == pytest.approx(reference.gw_value(*tables, plan), abs=error)
    if gradient == "dense":
        # the plan is the fixed point at its own cost
        a, b = plan.sum(1), plan.sum(0)
        cost = 2 * reference.gw_cost(*tables, plan)
        f, g, _ = reference.sinkhorn(cost, a, b, 0.05, 1000, g=result.potential_b.numpy())
        assert np.abs(plan - reference.plan(cost, a, b, f, g, 0.05)).sum() < 1e-6
    # points that it has not seen come with their distances
    with pytest.raises(torchgw.InvalidInputError, match="D_new"):
        result.transform(X[:3], values=Y)
    mapped = result.transform(D_new=cdist(X, X, "cityblock"), values=Y)
    expected = result.lazy_plan.barycentric(Y)
    assert (mapped - expected).abs().max() < (1e-6 if gradient == "dense" else 1)


def test_choices_and_messages_follow_the_registry(manhattan, capsys):
    X = np.random.default_rng(0).normal(size=(8, 2))
    with pytest.raises(torchgw.InvalidInputError, match="'manhattan'"):
        torchgw.solve(X, X, distances="chebyshev")
    graph = torchgw.distances.knn_graph(X, 3)
    with pytest.raises(torchgw.InvalidInputError, match="'manhattan'` needs points.*'landmark'"):
        torchgw.solve(graph, X, distances="manhattan")
    with pytest.raises(torchgw.InvalidInputError, match="`n_neighbors` is used for geodesics"):
        torchgw.solve(X, X, distances="manhattan", n_neighbors=3)
    with pytest.raises(SystemExit):
        main(["align", "--help"])
    assert "manhattan" in capsys.readouterr().out


@pytest.fixture
def hellinger(monkeypatch):
    """The one step of a loss, (sqrt x - sqrt y)^2 = x + y - 2 sqrt x sqrt y: an entry."""

    def root(distance):
        return distance.clamp_min(0).sqrt()

    entry = Loss("hellinger", (identity, identity), (root, root), order=2)
    monkeypatch.setitem(LOSSES, entry.name, entry)


def hellinger_loss(x, y):
    return (np.sqrt(x) - np.sqrt(y)) ** 2


D_X, D_Y = distance_matrices(14, 11)
GIVEN = {"D_X": D_X, "D_Y": D_Y, "a": random_weights(14), "b": random_weights(11, 1)}


@pytest.mark.parametrize("gradient", ["dense", "sampled"])
def test_recipe_for_a_loss(hellinger, gradient, tmp_path):
    options = {"epsilon": 0.05, "max_iter": 200, **TIGHT} | (
        {} if gradient == "dense" else {"n_anchors": 400, "max_iter": 60}
    )
    result = torchgw.solve(**GIVEN, loss="hellinger", gradient=gradient, **options)
    plan = result.plan.numpy()
    cost = reference.loss_cost(hellinger_loss, D_X, D_Y, plan)
    error = 6 * result.log["value_standard_error"] + 1e-9
    assert result.value == pytest.approx((cost * plan).sum(), abs=error)
    assert result.gw_distance == pytest.approx(np.sqrt(result.value))
    assert result.log["loss"] == "hellinger"
    if gradient == "dense":
        assert result.converged
        a, b = GIVEN["a"], GIVEN["b"]
        f, g, _ = reference.sinkhorn(2 * cost, a, b, 0.05, 1000, g=result.potential_b.numpy())
        assert np.abs(plan - reference.plan(2 * cost, a, b, f, g, 0.05)).sum() < 1e-6
    # a result of it goes into a file, and comes back
    result.save(tmp_path / "result.npz", dense=True)
    loaded = torchgw.load(tmp_path / "result.npz")
    values = np.arange(11.0)[:, None]
    mapped = [each.transform(D_new=D_X, values=values) for each in (result, loaded)]
    assert torch.allclose(*mapped, atol=1e-8)


def test_a_loss_may_have_a_minimum_for_its_cross_term(monkeypatch):
    """x + y - 2 min(x, y) is the absolute loss."""
    monkeypatch.setitem(LOSSES, "gap", Loss("gap", (identity, identity), None))
    gap, absolute = (
        torchgw.solve(**GIVEN, loss=loss, epsilon=0.1, **TIGHT) for loss in ("gap", "absolute")
    )
    assert gap.value == pytest.approx(absolute.value, rel=1e-9)
    assert (gap.plan - absolute.plan).abs().max() < 1e-9


def test_an_unknown_loss_is_told_the_names(hellinger):
    with pytest.raises(torchgw.InvalidInputError, match="'absolute', 'hellinger'"):
        torchgw.solve(**GIVEN, loss="huber")


def test_built_in_names_are_typed_and_documented():
    """The other places that a built-in name is written: its Literal, and the docs of solve."""
    assert get_args(DistanceName) == ("auto", *NAMED)
    assert get_args(LossName) == tuple(LOSSES)
    for name in (*NAMED, *LOSSES):
        assert f'"{name}"' in torchgw.solve.__doc__
