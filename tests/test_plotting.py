"""Drawings: which points get which colour, and axes that are given back."""

from __future__ import annotations

from types import SimpleNamespace

import matplotlib as mpl
import numpy as np
import pytest
import torch

mpl.use("Agg")

from matplotlib import pyplot  # noqa: E402

from torchgw.plotting import plot_demo, plot_match, plot_plan, plot_points  # noqa: E402


class StoredPlan:
    """A plan of given entries."""

    def __init__(self, matrix):
        self.matrix = torch.as_tensor(matrix)
        self.shape = tuple(self.matrix.shape)

    def argmax(self, axis=1):
        return self.matrix.argmax(axis)

    def rows(self, index):
        return self.matrix[index]


@pytest.fixture
def permutation():
    return np.array([3, 0, 4, 1, 2])


@pytest.fixture
def result(permutation):
    """Point i of X is matched with point permutation[i] of Y, light rows and heavy ones."""
    matrix = np.zeros((5, 5))
    matrix[np.arange(5), permutation] = [0.1, 0.2, 0.3, 0.4, 0.0]
    matrix[4, permutation[4]] = 1e-9
    return SimpleNamespace(lazy_plan=StoredPlan(matrix))


@pytest.fixture
def clouds():
    generator = np.random.default_rng(0)
    return generator.random((5, 2)), torch.as_tensor(generator.random((5, 3)))


@pytest.fixture(autouse=True)
def _close():
    yield
    pyplot.close("all")


def test_match_carries_colours_over(result, clouds, permutation):
    colour = np.array([10.0, 20.0, 30.0, 40.0, 50.0])
    source, target = plot_match(result, *clouds, colour=colour)
    assert (source.name, target.name) == ("rectilinear", "3d")
    np.testing.assert_array_equal(source.collections[0].get_array(), colour)
    np.testing.assert_array_equal(target.collections[0].get_array()[permutation], colour)


def test_plan_rows_are_scaled_to_one(result, permutation):
    axes = plot_plan(result)
    picture = axes.images[0].get_array()
    np.testing.assert_array_equal(picture, np.eye(5)[permutation])


def test_empty_rows_are_drawn_empty():
    axes = plot_plan(SimpleNamespace(lazy_plan=StoredPlan(np.diag([1.0, 0.0]))))
    np.testing.assert_array_equal(axes.images[0].get_array(), np.diag([1.0, 0.0]))


def test_large_plan_is_thinned():
    """More than 4,000 columns are drawn on evenly spaced ones, first and last among them."""
    matrix = np.zeros((2, 9_001))
    matrix[0, 0] = matrix[1, -1] = 1.0
    picture = plot_plan(SimpleNamespace(lazy_plan=StoredPlan(matrix))).images[0].get_array()
    assert picture.shape == (2, 4_000)
    assert picture[0, 0] == picture[1, -1] == picture.sum() / 2 == 1.0


@pytest.mark.parametrize(
    ("dimensions", "name"), [(1, "rectilinear"), (2, "rectilinear"), (5, "3d")]
)
def test_points_of_any_dimension(dimensions, name):
    points = np.random.default_rng(1).random((7, dimensions))
    axes = plot_points(points)
    assert axes.name == name
    assert len(axes.collections[0].get_offsets()) == 7
    assert plot_points(points, ax=axes) is axes


def test_demo_figure_draws_three_panels(result, clouds, tmp_path):
    figure = plot_demo(result, *clouds)
    assert [axes.name for axes in figure.axes] == ["rectilinear", "3d", "rectilinear"]
    figure.savefig(tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert pyplot.get_fignums() == [], "a figure left in pyplot's list is never freed"
