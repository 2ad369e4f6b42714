"""Surfaces in files, on the command line."""

import numpy as np
import pytest
import scipy

import torchgw
from torchgw._errors import InvalidInputError
from torchgw.cli import main
from torchgw.cli._files import read_array, read_side

trimesh = pytest.importorskip("trimesh")


@pytest.fixture
def surface():
    points = np.random.default_rng(0).normal(size=(60, 3))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    faces = scipy.spatial.ConvexHull(points).simplices
    x, y, z = points.T
    bent = np.column_stack([2 * x + 0.5 * y**2, y + 0.4 * z * x, 0.7 * z])
    return trimesh.Trimesh(bent, faces, process=False)


@pytest.mark.parametrize("form", ["off", "obj", "ply", "stl"])
def test_surfaces_are_read(form, surface, tmp_path):
    path = tmp_path / f"shape.{form}"
    surface.export(path)
    side = read_side(str(path))
    points, faces = side.space
    if form == "stl":
        # which has no vertices of its own
        assert len(points) == len(surface.vertices)
    else:
        np.testing.assert_allclose(points, surface.vertices, atol=1e-6)
        np.testing.assert_array_equal(faces, surface.faces)
    with pytest.raises(InvalidInputError, match="is a surface"):
        read_array(str(path))


def test_two_surfaces_are_matched(surface, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    surface.export("x.off")
    surface.export("y.ply")
    command = ["align", "x.off", "y.ply", "-o", "out.npz", "--partners", "pairs.csv", "-q"]
    assert main([*command, "--seed", "0"]) in (0, 3)
    result = torchgw.load("out.npz")
    assert (result.lazy_plan.argmax() == np.arange(60)).mean() > 0.7
    assert len(np.loadtxt("pairs.csv", delimiter=",", skiprows=1)) == 60
    assert main([*command, "--distance-matrices"]) == 2
    assert "square tables" in capsys.readouterr().err


NO_FACES = "OFF\n3 0 0\n0 0 0\n1 0 0\n0 1 0\n"


@pytest.mark.parametrize(
    ("content", "message"), [(NO_FACES, "no triangles"), ("nonsense", "not a readable surface")]
)
def test_files_without_a_surface_are_refused(content, message, tmp_path):
    (tmp_path / "shape.off").write_text(content)
    with pytest.raises(InvalidInputError, match=message):
        read_side(str(tmp_path / "shape.off"))
