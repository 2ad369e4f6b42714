"""Left and right: matches that are mirror images are told, and left out where that is asked."""

import numpy as np
import pytest
import scipy

import torchgw
from torchgw._results.handedness import without_reflections


def figure(n=150, seed=0):
    """A surface with a left and a right that are nearly the same, its triangles turned outwards."""
    sphere = np.random.default_rng(seed).normal(size=(n, 3))
    sphere /= np.linalg.norm(sphere, axis=1, keepdims=True)
    faces = scipy.spatial.ConvexHull(sphere).simplices
    a, b, c = (sphere[faces[:, corner]] for corner in range(3))
    inside = (np.cross(b - a, c - a) * a).sum(1) < 0
    faces[inside] = faces[inside][:, ::-1]
    x, y, z = sphere.T
    return np.column_stack([3 * x, y + 0.05 * y * x, 0.8 * z + 0.4 * x**2]), faces


def cloud(mirrored, d=3):
    rng = np.random.default_rng(1)
    points = rng.normal(size=(60, d)) ** 3
    turn, _ = np.linalg.qr(rng.normal(size=(d, d)))
    if (np.linalg.det(turn) < 0) != mirrored:
        turn[:, 0] *= -1
    return points, points @ turn


@pytest.mark.parametrize("d", [2, 3])
@pytest.mark.parametrize("mirrored", [False, True])
def test_handedness_of_clouds(d, mirrored):
    result = torchgw.solve(*cloud(mirrored, d), distances="euclidean", random_state=0)
    assert (result.handedness() < 0) == mirrored


@pytest.mark.parametrize("mirrored", [False, True])
def test_handedness_of_surfaces_that_bend(mirrored):
    points, faces = figure()
    bent = points.copy()
    # the second is in another pose
    bent[:, 2] += 0.2 * np.sin(2 * points[:, 0])
    identity = np.arange(len(points))
    other = bent * ([1, -1, 1] if mirrored else [1, 1, 1])
    # seen from outside, triangles of a mirror image are turned the other way
    turned = faces[:, ::-1] if mirrored else faces
    result = torchgw.solve((points, faces), (other, turned), init=identity)
    assert result.handedness() * (-1 if mirrored else 1) > 0.7


def test_a_mirror_image_is_left_out_where_that_is_asked():
    points, faces = figure()
    # the mirror image of the surface: its best match is a mirror image
    other = points * [1, -1, 1], faces[:, ::-1]
    free = torchgw.solve((points, faces), other, random_state=0)
    assert free.handedness() < 0
    options = torchgw.Options(reflections=False)
    kept = torchgw.solve((points, faces), other, random_state=0, options=options)
    assert kept.handedness() > 0
    assert kept.value >= free.value - 1e-9
    assert kept.alternatives[0].relation == ""
    assert any("mirrored" in one.relation for one in kept.alternatives[1:])
    assert isinstance(kept.alternatives[0].plan, np.ndarray)
    # which of both is meant has been said: others alone leave it open
    others = [one.value for one in kept.alternatives[1:] if "mirrored" not in one.relation]
    expected = min(1.0, kept.alternatives[0].value / min(others)) if others else 0.0
    assert kept.ambiguity == pytest.approx(expected)
    assert len(kept.alternatives) == len(free.alternatives)


def test_a_match_that_keeps_left_and_right_stays_as_it_is():
    x, y = cloud(False)
    one = torchgw.solve(x, y, distances="euclidean", random_state=0)
    options = torchgw.Options(reflections=False)
    other = torchgw.solve(x, y, distances="euclidean", random_state=0, options=options)
    assert one.value == other.value
    assert not other.is_ambiguous
    np.testing.assert_array_equal(one.plan, other.plan)


def test_it_is_said_where_nothing_else_was_found():
    x, y = cloud(True)
    only = torchgw.solve(x, y, distances="euclidean", init=np.arange(60))
    assert only.handedness() < 0
    with pytest.warns(torchgw.SearchWarning, match="mirror image"):
        result = without_reflections(lambda **_: only, None, torchgw.Options(reflections=False))
    assert "mirror image" in result.doubt


def test_sides_without_left_and_right_are_refused():
    x, y = cloud(False, 4)
    points, faces = figure(60)
    options = torchgw.Options(reflections=False)
    with pytest.raises(torchgw.InvalidInputError, match="points in 4 dimensions"):
        torchgw.solve(x, y, distances="euclidean", options=options, n_init=1)
    mixed = faces.copy()
    mixed[::2] = mixed[::2][:, ::-1]
    with pytest.raises(torchgw.InvalidInputError, match="fix_normals"):
        torchgw.solve((points, faces), (points, mixed), n_init=1).handedness()
    with pytest.raises(torchgw.InvalidInputError, match="Pass one of them"):
        torchgw.solve(points, points, init=np.arange(60), options=options)
    with pytest.raises(torchgw.UnsupportedError, match="`checkpoint` keeps one solve"):
        torchgw.solve(points, points, options=options.replace(checkpoint="kept.npz"))
