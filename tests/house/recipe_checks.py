"""What has to hold once a recipe of docs/architecture.md has been followed.

``test_recipes.py`` runs each of these in a copy of the package that has the recipe's changes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from problems import distance_matrices, random_weights, solve_by_name
from scipy.spatial.distance import cdist

import torchgw
from torchgw.backends import NAMES
from torchgw.cli import main

TIGHT = {"tol": 1e-9, "inner_tol": 1e-11, "objective_tol": 0, "random_state": 0}
D_X, D_Y = distance_matrices(14, 11)
GIVEN = {"D_X": D_X, "D_Y": D_Y, "a": random_weights(14), "b": random_weights(11, 1)}
POINTS = np.random.default_rng(0).normal(size=(8, 2))


def help_of_align(capsys):
    with pytest.raises(SystemExit):
        main(["align", "--help"])
    return capsys.readouterr().out


def test_it_is_the_copy():
    assert Path(torchgw.__file__).parent == Path.cwd() / "torchgw"


@pytest.mark.parametrize("gradient", ["dense", "sampled"])
def test_provider(gradient):
    rng = np.random.default_rng(0)
    X, Y = rng.normal(size=(14, 2)), rng.normal(size=(11, 3))
    tables = [cdist(points, points, "cityblock") for points in (X, Y)]
    tables = [table / table.max() for table in tables]
    result = solve_by_name(
        X, Y, distances="manhattan", gradient=gradient, epsilon=0.05, max_iter=60, **TIGHT
    )
    assert result.gradient == gradient
    plan = np.asarray(result.plan)
    error = 6 * result.log["value_standard_error"] + 1e-9
    assert result.value == pytest.approx(reference.gw_value(*tables, plan), abs=error)
    if gradient == "dense":
        # the plan is the fixed point at its own cost
        a, b = plan.sum(1), plan.sum(0)
        cost = 2 * reference.gw_cost(*tables, plan)
        f, g, _ = reference.sinkhorn(cost, a, b, 0.05, 1000, g=np.asarray(result.potential_b))
        assert np.abs(plan - reference.plan(cost, a, b, f, g, 0.05)).sum() < 1e-6
    # points that it has not seen come with their distances
    with pytest.raises(torchgw.InvalidInputError, match="D_new"):
        result.transform(X[:3], values=Y)
    mapped = result.transform(D_new=cdist(X, X, "cityblock"), values=Y)
    expected = result.lazy_plan.barycentric(Y)
    assert np.abs(mapped - np.asarray(expected)).max() < (1e-6 if gradient == "dense" else 1)


def test_provider_in_choices_and_messages(capsys):
    with pytest.raises(torchgw.InvalidInputError, match="'manhattan'"):
        torchgw.solve(POINTS, POINTS, distances="chebyshev")
    graph = torchgw.distances.knn_graph(POINTS, 3)
    with pytest.raises(torchgw.InvalidInputError, match="'manhattan'` needs points.*'landmark'"):
        torchgw.solve(graph, POINTS, distances="manhattan")
    with pytest.raises(torchgw.InvalidInputError, match="`n_neighbors` is used for geodesics"):
        torchgw.solve(POINTS, POINTS, distances="manhattan", n_neighbors=3)
    assert "manhattan" in help_of_align(capsys)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("distances", ["euclidean", "sqeuclidean"])
def test_backend(dtype, distances):
    """Of costs that are stored, and of factors."""
    options = {"distances": distances, "epsilon": 0.05, "dtype": dtype}
    options |= TIGHT if dtype == torch.float64 else {"random_state": 0}
    if distances == "sqeuclidean":
        options |= {"gradient": "factored", "storage": "streamed"}
    got, expected = (
        solve_by_name(POINTS, 2 * POINTS[:7], backend=name, **options)
        for name in ("logsumexp", "eager")
    )
    assert (got.backend, expected.backend) == ("logsumexp", "eager")
    assert np.abs(got.plan - expected.plan).sum() < (1e-8 if dtype == torch.float64 else 1e-3)


def test_backend_in_choices_and_messages(capsys):
    assert torchgw.solve(POINTS, POINTS, distances="euclidean").backend == "eager"
    with pytest.raises(torchgw.InvalidInputError, match="'compile', 'logsumexp', 'eager'"):
        torchgw.solve(POINTS, POINTS, options=torchgw.Options(backend="even"))
    assert "logsumexp" in NAMES
    assert main(["info"]) == 0
    assert "logsumexp" in capsys.readouterr().out
    assert "logsumexp" in help_of_align(capsys)


def hellinger(x, y):
    return (np.sqrt(x) - np.sqrt(y)) ** 2


@pytest.mark.parametrize("gradient", ["dense", "sampled"])
def test_loss(gradient, tmp_path):
    options = {"epsilon": 0.05, "max_iter": 200, **TIGHT} | (
        {} if gradient == "dense" else {"n_anchors": 400, "max_iter": 60}
    )
    result = solve_by_name(**GIVEN, loss="hellinger", gradient=gradient, **options)
    plan = np.asarray(result.plan)
    cost = reference.loss_cost(hellinger, D_X, D_Y, plan)
    error = 6 * result.log["value_standard_error"] + 1e-9
    assert result.value == pytest.approx((cost * plan).sum(), abs=error)
    # it is no power of |x - y|
    assert np.isnan(result.gw_distance)
    assert result.log["loss"] == "hellinger"
    if gradient == "dense":
        assert result.converged
        a, b = GIVEN["a"], GIVEN["b"]
        f, g, _ = reference.sinkhorn(2 * cost, a, b, 0.05, 1000, g=np.asarray(result.potential_b))
        assert np.abs(plan - reference.plan(2 * cost, a, b, f, g, 0.05)).sum() < 1e-6
    # a result of it goes into a file, and comes back
    result.save(tmp_path / "result.npz", dense=True)
    loaded = torchgw.load(tmp_path / "result.npz")
    values = np.arange(11.0)[:, None]
    mapped = [each.transform(D_new=D_X, values=values) for each in (result, loaded)]
    np.testing.assert_allclose(*mapped, atol=1e-8)


def test_loss_in_choices_and_messages(capsys):
    with pytest.raises(torchgw.InvalidInputError, match="'absolute', 'hellinger'"):
        solve_by_name(**GIVEN, loss="huber")
    assert "hellinger" in help_of_align(capsys)


def test_option(capsys):
    plain, sharp, default = (
        solve_by_name(POINTS, 2 * POINTS, distances="euclidean", random_state=0, **options)
        for options in ({"sharpness": 1.0}, {"sharpness": 2}, {})
    )
    assert sharp.epsilon == pytest.approx(plain.epsilon / 2)
    assert default.value == plain.value
    for wrong in (0, -1.0, "high", None):
        with pytest.raises(torchgw.TorchGWError, match="sharpness"):
            torchgw.Options(sharpness=wrong)
    assert "sharpness : float" in torchgw.Options.__doc__
    assert "--sharpness" in help_of_align(capsys)
