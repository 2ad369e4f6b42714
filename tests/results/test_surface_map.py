"""Places on a surface: nearer to where points belong than the largest entry of their row."""

import numpy as np
import pytest
import scipy
import torch

import torchgw
from torchgw._results.maps import _least


def mesh(n, seed):
    """A closed surface without symmetry, with n vertices drawn by a seed; and where they were."""
    sphere = np.random.default_rng(seed).normal(size=(n, 3))
    sphere /= np.linalg.norm(sphere, axis=1, keepdims=True)
    return bend(sphere), scipy.spatial.ConvexHull(sphere).simplices, sphere


def bend(sphere):
    x, y, z = sphere.T
    return np.column_stack([2 * x + 0.5 * y**2, y + 0.4 * z * x, 0.7 * z + 0.3 * x**2])


@pytest.fixture(scope="module")
def two():
    """Two meshes of one surface, and their match."""
    source, target = mesh(300, 0), mesh(400, 1)
    # from where it belongs: the surface is nearly symmetric
    nearest = (source[2] @ target[2].T).argmax(1)
    return source, target, torchgw.solve(source[:2], target[:2], init=nearest)


def test_places_are_nearer_than_vertices(two):
    source, target, result = two
    found = result.surface_map()
    # the place of a point on the other mesh is where it is itself
    missed = {
        "argmax": target[0][result.lazy_plan.argmax()],
        "vertex": target[0][found.vertex],
        "place": found.points,
    }
    missed = {k: np.linalg.norm(v - source[0], axis=1).mean() for k, v in missed.items()}
    assert missed["vertex"] < missed["argmax"]
    assert missed["place"] < 0.9 * missed["argmax"]
    back = result.surface_map(inverse=True)
    assert np.linalg.norm(back.points - target[0], axis=1).mean() < 0.9 * missed["argmax"]


def test_places_lie_in_their_triangles(two):
    _, (points, faces, _), result = two
    found = result.surface_map()
    assert len(found) == 300
    assert found.barycentric.min() >= 0
    np.testing.assert_allclose(found.barycentric.sum(1), 1)
    corners = points[faces[found.face]]
    np.testing.assert_allclose((found.barycentric[:, :, None] * corners).sum(1), found.points)
    assert (faces[found.face] == found.vertex[:, None]).any(1).all()


def test_a_file_tells_the_same(two, tmp_path):
    _, _, result = two
    result.save(tmp_path / "match.npz", dense=True)
    again = torchgw.load(tmp_path / "match.npz").surface_map()
    np.testing.assert_allclose(again.points, result.surface_map().points, atol=1e-9)


def test_points_without_mass_go_nowhere():
    points, faces, _ = mesh(60, 0)
    a = np.full(60, 1 / 59)
    a[7] = 0
    found = torchgw.solve((points, faces), (points, faces), a=a, n_init=1).surface_map()
    assert found.face[7] == found.vertex[7] == -1
    assert np.isnan(found.points[7]).all()
    assert np.isfinite(np.delete(found.points, 7, 0)).all()


def test_a_side_without_triangles_is_refused():
    points, faces, _ = mesh(40, 0)
    result = torchgw.solve((points, faces), points, n_init=1)
    with pytest.raises(torchgw.InvalidInputError, match="Y was given without triangles"):
        result.surface_map()
    assert len(result.surface_map(inverse=True)) == 40


def test_the_least_of_a_triangle_is_the_nearest_point():
    rng = np.random.default_rng(0)
    corners = torch.from_numpy(rng.normal(size=(50, 3, 3)))
    centre = torch.from_numpy(rng.normal(size=(50, 1, 3)))
    energy = (corners - centre).square().sum(2)
    weights, height = _least(corners, energy)
    found = (weights[:, :, None] * corners).sum(1)
    # by trying many points of the triangle
    tried = torch.from_numpy(rng.dirichlet([0.5] * 3, size=20_000))
    places = torch.einsum("tc,ncd->ntd", tried, corners)
    best = (places - centre).square().sum(2).amin(1)
    mine = (found - centre[:, 0]).square().sum(1)
    assert (mine <= best + 1e-9).all()
    torch.testing.assert_close(height, mine)
