"""Surfaces of different shape: areas are penalised where nothing else is asked for."""

import numpy as np
import pytest
import scipy

import torchgw
from torchgw._solve.strategy import with_penalised_areas
from torchgw.distances import Surface


def mesh(stretch=1.0, n=420, seed=0):
    """A sphere that is longer along one axis."""
    sphere = np.random.default_rng(seed).normal(size=(n, 3))
    sphere /= np.linalg.norm(sphere, axis=1, keepdims=True)
    return sphere * [1, 1.5, 2 * stretch], scipy.spatial.ConvexHull(sphere).simplices


def two(seed=0):
    """Two surfaces of one shape each, as one."""
    points, faces = mesh(seed=seed)
    return np.concatenate([points, points + 10]), np.concatenate([faces, faces + len(points)])


def test_areas_of_other_shapes_are_penalised_and_it_is_said():
    long, short = mesh(2.0), mesh(seed=1)
    for x, y in ((long, short), (short, long)):
        with pytest.warns(torchgw.TorchGWWarning, match="areas are penalised"):
            found = with_penalised_areas(Surface(*x), Surface(*y), torchgw.Options())
        assert found == torchgw.Options(unbalanced=0.003, scale="max")


@pytest.mark.parametrize(
    ("x", "y", "asked"),
    [
        # another size, pose and sampling of one shape
        ((mesh()[0][:, ::-1] * 7, mesh()[1]), mesh(seed=1), {}),
        # several pieces
        (two(), two(seed=1), {}),
        # few vertices tell little
        (mesh(2.0, 100), mesh(1.0, 100), {}),
        (mesh(2.0), mesh(), {"mass": 0.5}),
        (mesh(2.0), mesh(), {"scale": "mean"}),
        (mesh(2.0), mesh(), {"unbalanced": 1.0}),
        (mesh(2.0), mesh(), {"polish": True}),
    ],
)
def test_what_is_alike_or_asked_for_stays(x, y, asked):
    asked = torchgw.Options(**asked)
    assert with_penalised_areas(Surface(*x), Surface(*y), asked) is asked


def test_weights_that_are_given_are_kept():
    long, short = mesh(2.0), mesh(seed=1)
    a, b = Surface(*long).weights, Surface(*short).weights
    init = np.arange(420)
    kept = torchgw.solve(long, short, a=a, b=b, init=init, epsilon=0.1)
    np.testing.assert_allclose(kept.marginal_a, a, atol=1e-6)
    with pytest.warns(torchgw.TorchGWWarning, match="Pass `a` and `b` to keep them"):
        found = torchgw.solve(long, short, init=init, epsilon=0.1)
    asked = torchgw.solve(
        long, short, a=a, b=b, unbalanced=0.003, scale="max", init=init, epsilon=0.1
    )
    assert found.value == asked.value
