"""Places on a surface: nearer to where points belong than the largest entry of their row."""

import numpy as np
import pytest
import scipy
import torch

import torchgw
from torchgw._plans.given import StoredPlan
from torchgw._problem import limits
from torchgw._results.maps import _least, map_to_surface
from torchgw.distances import Surface
from torchgw.distances.points import Space


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


def placed(source, target, share=1.0):
    """Map by a blurred plan that leads beside where points belong: refined by modes, and not."""
    weights = [Surface(*side[:2]).weights for side in (source, target)]
    turn = scipy.spatial.transform.Rotation.from_rotvec([0.2, 0.2, 0.2]).as_matrix()
    table = np.exp(50 * (source[2] @ turn @ target[2].T - 1))
    for _ in range(50):
        table *= weights[1] / table.sum(0)
        table *= (weights[0] / table.sum(1))[:, None]
    # what lies beyond some height has no partners
    table *= target[2][:, 2] < 2 * share - 1
    spaces = tuple(
        Space(torch.from_numpy(points), None, None, 10, 1.0, faces=torch.from_numpy(faces).long())
        for points, faces, _ in (source, target)
    )
    plan = StoredPlan(torch.from_numpy(table))
    return [map_to_surface(plan, spaces, "Y", refine=refine) for refine in (True, False)]


def test_modes_refine_the_map_of_whole_surfaces():
    source, target = mesh(600, 0), mesh(500, 1)
    found, plain = placed(source, target)
    missed = [(one.points - torch.from_numpy(source[0])).norm(dim=1) for one in (found, plain)]
    assert missed[0].mean() < 0.5 * missed[1].mean()
    corners = torch.from_numpy(target[0])[target[1][found.face]]
    torch.testing.assert_close((found.barycentric[:, :, None] * corners).sum(1), found.points)


@pytest.mark.parametrize(
    ("source", "target", "share"),
    [
        # another shape, a surface of few vertices, and one whose upper part has no partners
        (mesh(500, 0), (mesh(500, 1)[0] * [3, 1, 1], *mesh(500, 1)[1:]), 1.0),
        (mesh(500, 0), mesh(300, 1), 1.0),
        (mesh(500, 0), mesh(500, 1), 0.6),
    ],
)
def test_modes_say_nothing_of_other_shapes_of_few_points_and_of_parts(source, target, share):
    found, plain = placed(source, target, share)
    torch.testing.assert_close(found.points, plain.points, equal_nan=True)


def test_matchings_go_by_the_modes_where_these_cost_less(monkeypatch):
    # without the steps that improve matchings of few points
    monkeypatch.setitem(limits.LIMITS, "cpu", limits.CPU._replace(cubed_points=0))
    source, target = mesh(500, 0), mesh(500, 1)
    nearest = (source[2] @ target[2].T).argmax(1)
    result = torchgw.solve(source[:2], target[:2], init=nearest, n_init=1)
    found, assigned = (result.matching(improve=improve) for improve in (True, False))
    assert sorted(found.target) == list(range(500))
    assert found.value < 0.8 * assigned.value
    missed = [np.linalg.norm(target[0][m.target] - source[0], axis=1) for m in (found, assigned)]
    assert missed[0].mean() < 0.95 * missed[1].mean()
