"""Surfaces: paths that lie on them, areas, and meshes as people have them."""

from types import SimpleNamespace

import numpy as np
import pytest
import scipy
import torch
from scipy.sparse.csgraph import dijkstra

import torchgw
from torchgw.distances import DijkstraDistance, Surface
from torchgw.distances.surface import as_surface


def blob(n=150, seed=0):
    """A closed surface without symmetry: a sphere of n vertices, stretched and bent."""
    points = np.random.default_rng(seed).normal(size=(n, 3))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    faces = scipy.spatial.ConvexHull(points).simplices
    x, y, z = points.T
    bent = np.column_stack([2 * x + 0.5 * y**2, y + 0.4 * z * x, 0.7 * z + 0.3 * x**2])
    return bent, faces.astype(np.int64)


def square(steps, rng=None):
    """The unit square, by triangles, whose inner vertices are moved by chance."""
    grid = np.stack(np.meshgrid(*[np.linspace(0, 1, steps)] * 2), -1).reshape(-1, 2)
    inner = ((grid > 0) & (grid < 1)).all(1)
    if rng is not None:
        grid[inner] += rng.uniform(-0.3, 0.3, (inner.sum(), 2)) / steps
    corner = np.arange(steps * steps).reshape(steps, steps)
    a, b, c, d = (part.ravel() for part in (
        corner[:-1, :-1], corner[:-1, 1:], corner[1:, 1:], corner[1:, :-1]))  # fmt: skip
    return grid, np.concatenate([np.column_stack([a, b, c]), np.column_stack([a, c, d])])


def distances(surface, sources=None):
    return dijkstra(surface.graph(), indices=sources)


def test_paths_are_nearly_straight_in_the_plane():
    points, faces = square(30, np.random.default_rng(0))
    apart = np.linalg.norm(points[:, None] - points, axis=2)
    found = distances(Surface(points, faces))
    # paths lie on the surface: none is shorter than the distance
    assert found.min() >= 0
    assert (found - apart).min() > -1e-11
    # as ways along the edges alone are
    ends = np.concatenate([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]])
    length = np.linalg.norm(points[ends[:, 0]] - points[ends[:, 1]], axis=1)
    edges = scipy.sparse.csr_array((length, tuple(ends.T)), shape=found.shape)
    by_edges = dijkstra(edges.maximum(edges.T))
    far = apart > 0.5
    longer, before = ((table[far] / apart[far]).mean() - 1 for table in (found, by_edges))
    assert before > 0.05
    assert longer < 0.01


def test_a_line_over_a_fold_is_as_long_as_before_the_fold():
    flat = np.array([[0, 0, 0], [1, -1, 0], [1, 1, 0], [2.0, 0, 0]])
    angle = 1.1
    folded = flat.copy()
    folded[3] = [1 + np.cos(angle), 0, np.sin(angle)]
    faces = np.array([[0, 1, 2], [1, 3, 2]])
    for points in (flat, folded):
        assert distances(Surface(points, faces))[0, 3] == pytest.approx(2, abs=1e-12)


def test_no_line_leads_over_a_hole():
    # a square ring: the way from one side to the other goes around the hole
    points, faces = square(4)
    centre = points[faces].mean(1)
    ring = faces[np.abs(centre - 0.5).max(1) > 1 / 6]
    found = distances(Surface(points, ring))
    start, end = (int(np.abs(points - at).sum(1).argmin()) for at in ([0, 1 / 3], [1, 2 / 3]))
    around = np.linalg.norm([1 / 3, 0]) + 1 / 3 * 2**0.5 + np.linalg.norm([1 / 3, 0])
    assert found[start, end] > np.linalg.norm(points[start] - points[end]) + 1e-3
    assert found[start, end] <= around + 1 / 3 + 1e-12


def test_orientation_and_repeated_triangles_do_not_matter():
    points, faces = blob()
    rng = np.random.default_rng(1)
    turned = np.where(rng.random((len(faces), 1)) < 0.5, faces, faces[:, ::-1])
    twice = np.concatenate([turned, faces[:7], [[3, 3, 5]]])
    one, other = Surface(points, faces), Surface(points, twice)
    np.testing.assert_allclose(distances(one), distances(other), atol=1e-12)
    np.testing.assert_allclose(one.areas, other.areas, rtol=1e-12)


def test_a_soup_of_triangles_is_the_surface():
    points, faces = blob(60)
    whole = Surface(points, faces)
    soup = Surface(points[faces].reshape(-1, 3), np.arange(faces.size).reshape(-1, 3))
    np.testing.assert_allclose(
        distances(soup), distances(whole)[np.ix_(faces.ravel(), faces.ravel())], atol=1e-12
    )
    shares = np.bincount(faces.ravel(), soup.areas, len(points))
    np.testing.assert_allclose(shares, whole.areas, rtol=1e-12)


def test_areas_are_those_of_the_triangles():
    points, faces = square(5)
    surface = Surface(points, faces)
    assert surface.areas.sum() == pytest.approx(1, rel=1e-12)
    assert surface.weights.sum() == pytest.approx(1, rel=1e-12)


def test_an_edge_of_three_triangles_is_crossed_at_its_ends_alone():
    # a book of three pages: the way between two pages is over the back
    points = np.array([[0, 0, 0], [0, 1, 0], [1, 0.5, 0], [-1, 0.5, 0], [0, 0.5, 1.0]])
    faces = np.array([[0, 1, 2], [0, 1, 3], [0, 1, 4]])
    found = distances(Surface(points, faces))
    assert found[2, 3] == pytest.approx(2 * np.hypot(1, 0.5))


def test_pieces_and_single_vertices_are_joined_and_named():
    points, faces = blob(80)
    two = np.concatenate([points, points + [9, 0, 0], [[4.5, 5, 0]]])
    both = np.concatenate([faces, faces + 80])
    with pytest.warns(torchgw.GraphWarning, match=r"3 components .*the first of each 0, 80, 160"):
        provider = DijkstraDistance(Surface(two, both))
    table = provider.columns(torch.arange(161))
    assert torch.isfinite(table).all()
    np.testing.assert_allclose(table[:80, :80], distances(Surface(points, faces)), atol=1e-12)


def forms(points, faces):
    """The same surface as packages have it."""
    padded = np.column_stack([np.full(len(faces), 3), faces]).ravel()
    return {
        "arrays": (points, faces),
        "lists": [points.tolist(), faces.tolist()],
        "trimesh": SimpleNamespace(vertices=points, faces=faces),
        "pyvista": SimpleNamespace(
            points=points, faces=padded, n_points=len(points), n_cells=len(faces)
        ),
        "geometric": SimpleNamespace(
            pos=torch.from_numpy(points), face=torch.from_numpy(faces.T.copy())
        ),
    }


# numbers are read as they are
@pytest.mark.exact
@pytest.mark.parametrize("kind", ["arrays", "lists", "trimesh", "pyvista", "geometric"])
def test_surfaces_of_other_packages(kind):
    points, faces = blob(40)
    found = as_surface("X", forms(points, faces)[kind])
    np.testing.assert_array_equal(found.vertices, points)
    np.testing.assert_array_equal(found.faces, faces)
    assert (found.device is None) == (kind != "geometric")


def test_trimesh_and_pyvista_themselves():
    points, faces = blob(40)
    trimesh = pytest.importorskip("trimesh")
    found = as_surface("X", trimesh.Trimesh(points, faces, process=False))
    np.testing.assert_array_equal(found.faces, faces)
    with pytest.raises(torchgw.InvalidTypeError, match="to_mesh"):
        as_surface("X", trimesh.Scene([trimesh.Trimesh(points, faces)]))


@pytest.mark.parametrize("value", [np.zeros((2, 3)), [[0.0, 1], [2, 3]], [[1, 2, 3], [4, 5, 6]]])
def test_points_are_no_surface(value):
    assert as_surface("X", value) is None


REFUSED = [
    (lambda p, f: (p, f - 1), "within 0 and n - 1"),
    (lambda p, f: (p, f + 1), "count from 1"),
    (lambda p, f: (p, f.astype(float)), "astype"),
    (lambda p, f: (p, np.column_stack([f, f[:, :1]])), "riangulate"),
    (lambda p, f: (np.column_stack([p, p]), f), r"\(n, 3\)"),
    (lambda p, f: (np.where(p > 1, np.nan, p), f), "finite"),
    (lambda p, f: (p * 0 + 1, f), "no area"),
    (lambda p, f: SimpleNamespace(
        points=p, faces=np.r_[4, 0, 1, 2, 3], n_points=len(p), n_cells=1
    ), r"triangulate\(\)"),
    (lambda p, f: SimpleNamespace(
        points=p, n_points=len(p), n_cells=1
    ), "extract_surface"),
]  # fmt: skip


@pytest.mark.parametrize(("made", "message"), REFUSED)
def test_what_is_no_surface_is_refused_with_the_way_out(made, message):
    points, faces = blob(30)
    with pytest.raises(torchgw.InvalidInputError.__bases__[0], match=message):
        torchgw.solve(made(points, faces), (points, faces))


def relabelled(points, faces, seed=5):
    """The surface with its vertices in another order; and the new place of each."""
    order = np.random.default_rng(seed).permutation(len(points))
    place = np.argsort(order)
    return points[order], place[faces], place


def test_an_isometric_copy_is_matched_to_rounding():
    points, faces = blob(200)
    other, triangles, place = relabelled(points @ np.diag([1, 1, -1]) + 3, faces)
    result = torchgw.solve((points, faces), (other, triangles), random_state=0)
    pairs = result.matching()
    np.testing.assert_array_equal(pairs.target, place)
    assert pairs.value < 1e-15
    np.testing.assert_allclose(result.marginal_a, Surface(points, faces).weights, atol=1e-7)
    # mapped by way of vertices nearby
    np.testing.assert_allclose(
        result.transform(points[:5]), result.lazy_plan.barycentric(other)[:5], atol=1e-6
    )


def test_weights_given_are_kept():
    points, faces = blob(60)
    result = torchgw.solve((points, faces), (points, faces), a=np.full(60, 1 / 60), n_init=1)
    np.testing.assert_allclose(result.marginal_a, 1 / 60, atol=1e-6)
    np.testing.assert_allclose(result.marginal_b, Surface(points, faces).weights, atol=1e-3)


def test_a_surface_beside_points_and_in_lists():
    points, faces = blob(60)
    surface = Surface(points, faces)
    result = torchgw.solve(surface, points, n_init=1)
    assert result.lazy_plan.shape == (60, 60)
    many = torchgw.solve_many([(points, faces), surface], [surface, (points, faces)], n_init=1)
    assert (np.asarray(many.value) < 1e-4).all()
    assert torchgw.solve_low_rank(surface, surface, rank=5, random_state=0).lazy_plan.shape == (
        60, 60,
    )  # fmt: skip
    with pytest.raises(torchgw.InvalidInputError, match="is a surface"):
        torchgw.solve(surface, surface, distances="euclidean")


def test_files_keep_a_surface(tmp_path):
    points, faces = blob(60)
    result = torchgw.solve((points, faces), (points, faces), random_state=0)
    result.save(tmp_path / "match.npz", dense=True)
    again = torchgw.load(tmp_path / "match.npz")
    np.testing.assert_array_equal(again.extension.spaces[1].faces, faces)
    assert again.value == result.value
