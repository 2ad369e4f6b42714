"""Drawings: which points get which colour, and axes that are given back."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import matplotlib as mpl
import numpy as np
import pytest
import torch

mpl.use("Agg")

from matplotlib import pyplot  # noqa: E402

import torchgw  # noqa: E402
from torchgw import InvalidInputError, InvalidTypeError  # noqa: E402
from torchgw.plotting import (
    plot_alternatives,
    plot_confusion,
    plot_convergence,
    plot_demo,
    plot_match,
    plot_plan,
    plot_points,
    plot_trials,
)


class StoredPlan:
    """A plan of given entries."""

    def __init__(self, matrix):
        self.matrix = torch.as_tensor(matrix)
        self.shape = tuple(self.matrix.shape)

    def argmax(self, axis=1):
        return self.matrix.argmax(axis)

    def rows(self, index):
        return self.matrix[index]

    @property
    def T(self):
        return StoredPlan(self.matrix.T)

    def __matmul__(self, values):
        return self.matrix.double() @ torch.as_tensor(values, dtype=torch.float64)


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
    axes = plot_plan(result, order="index")
    picture = axes.images[0].get_array()
    np.testing.assert_array_equal(picture, np.eye(5)[permutation])


def test_empty_rows_are_drawn_empty():
    axes = plot_plan(SimpleNamespace(lazy_plan=StoredPlan(np.diag([1.0, 0.0]))))
    np.testing.assert_array_equal(axes.images[0].get_array(), np.diag([1.0, 0.0]))


def test_sorted_plan_is_a_band(permutation):
    """Without distances X stays, and Y follows it; with numbers X follows them."""
    matrix = np.eye(5)[permutation]
    result = SimpleNamespace(lazy_plan=StoredPlan(matrix))
    np.testing.assert_array_equal(plot_plan(result).images[0].get_array(), np.eye(5))
    drawn = plot_plan(result, order=["c", "a", "b", "e", "d"]).images[0].get_array()
    np.testing.assert_array_equal(drawn, np.eye(5))


def test_results_whose_file_holds_no_distances_are_drawn(tmp_path):
    """In the order that the points came in."""
    distances = np.abs(np.subtract.outer(np.arange(9.0), np.arange(9.0)))
    result = torchgw.solve(D_X=distances, D_Y=distances[::-1, ::-1], epsilon=0.5, n_init=1)
    result.save(tmp_path / "result.npz")
    loaded = torchgw.load(tmp_path / "result.npz")
    assert loaded.extension.known.providers[0] is None
    drawn = plot_plan(loaded).images[0].get_array()
    rows = result.plan / result.plan.max(1, keepdims=True)
    np.testing.assert_allclose(np.sort(drawn, axis=1), np.sort(rows, axis=1), atol=1e-9)


def test_structure_is_found_in_the_distances():
    """Points of a line and of its copy, both in random order."""
    rng = np.random.default_rng(0)
    line = np.linspace(0, 1, 40)[:, None] ** 1.2
    first, second = rng.permutation(40), rng.permutation(40)
    result = torchgw.solve(line[first], line[second] * 3, distances="euclidean", epsilon=1e-3)
    drawn = plot_plan(result).images[0].get_array()
    assert np.abs(drawn.argmax(1) - np.arange(40)).max() <= 1
    with pytest.raises(torchgw.InvalidInputError, match="`order` must be 'structure'"):
        plot_plan(result, order="random")
    with pytest.raises(torchgw.InvalidInputError, match=r"shape \(40,\); got \(3,\)"):
        plot_plan(result, order=[1, 2, 3])


def test_confusion_counts_mass(result, permutation):
    source = np.array(["a", "a", "b", "b", "c"])
    target = np.empty(5, dtype=int)
    target[permutation] = [0, 1, 1, 1, 0]
    axes = plot_confusion(result, source, target)
    # masses 0.1, 0.2 | 0.3, 0.4 | 1e-9 of a, b and c
    np.testing.assert_allclose(
        axes.images[0].get_array(), [[1 / 3, 2 / 3], [0, 1], [1, 0]], rtol=1e-12
    )
    assert [text.get_text() for text in axes.get_yticklabels()] == ["a", "b", "c"]
    assert {text.get_text() for text in axes.texts} == {"0.33", "0.67", "1.00"}
    with pytest.raises(torchgw.InvalidInputError, match="one label per point"):
        plot_confusion(result, source[:3], target)


def test_convergence_draws_what_is_positive():
    rng = np.random.default_rng(0)
    clouds = rng.normal(size=(30, 2)), rng.normal(size=(25, 2))
    result = torchgw.solve(*clouds, max_iter=60, n_init=1)
    axes = plot_convergence(result)
    curves = {line.get_label(): line.get_ydata() for line in axes.lines}
    assert set(curves) == {"epsilon", "marginal error", "change of the plan"}
    np.testing.assert_array_equal(curves["epsilon"], [item.epsilon for item in result.history])
    assert axes.get_yscale() == "log"
    assert (axes.get_xticks() % 1 == 0).all()
    (right,) = (other for other in axes.figure.axes if other is not axes)
    assert right.get_ylabel() == "objective"
    assert right.lines[0].get_ydata()[-1] == pytest.approx(result.report.objective, rel=1e-3)
    assert plot_convergence(result, ax=axes) is axes


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
    assert [axes.name for axes in figure.axes] == ["rectilinear", "3d", *["rectilinear"] * 2]
    assert figure.axes[3].get_ylabel() == "share of the row's largest entry"
    figure.savefig(tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert pyplot.get_fignums() == [], "a figure left in pyplot's list is never freed"


def test_alternatives_are_bars_of_their_values():
    X = np.random.default_rng(0).normal(size=(60, 2)) * [3, 1]
    result = torchgw.solve(X, X, distances="euclidean", n_init=8, random_state=0)
    axes = plot_alternatives(result)
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == [item.value for item in result.alternatives]
    assert len(widths) > 1
    single = torchgw.solve(X, X, distances="euclidean", n_init=1, random_state=0)
    with pytest.raises(torchgw.InvalidInputError, match="Pass `n_init`"):
        plot_alternatives(single)


def test_what_cannot_be_drawn():
    points = np.random.default_rng(0).normal(size=(12, 2))
    result = torchgw.solve(points, points, distances="euclidean", epsilon=0.5, random_state=0)
    low = torchgw.solve_low_rank(points, points, rank=2, tol=0.1, init=result)
    for draw in (plot_plan, plot_convergence, plot_alternatives):
        for odd in (None, "plan", result.plan):
            with pytest.raises(InvalidTypeError, match="`result` must be a GWResult"):
                draw(odd)
    with pytest.raises(InvalidTypeError, match="got LowRankResult"):
        plot_plan(low)
    for odd in (points[:5], np.zeros((12, 2, 2)), np.zeros(0), 3.0):
        with pytest.raises(InvalidInputError, match=r"`X` must have shape \(12, d\)"):
            plot_match(result, odd, points)
    with pytest.raises(InvalidInputError, match=r"`colour` must have shape \(12,\)"):
        plot_match(result, points, points, colour=[1, 2])


def test_color_is_colour(result, clouds):
    with pytest.raises(InvalidTypeError, match="no argument 'color'. Did you mean 'colour'"):
        plot_match(result, *clouds, color=np.arange(5))


def test_missing_labels_are_refused(result):
    with pytest.raises(InvalidInputError, match="`target_labels` has 2 missing labels, of 5"):
        plot_confusion(result, list("ababa"), np.array(["a", None, "b", np.nan, "a"], dtype=object))


def test_labels_are_colours(result, clouds):
    labels = np.array(["b", "x", "b", "red", "x"], dtype=object)
    source, target = plot_match(result, *clouds, colour=labels)
    assert [text.get_text() for text in source.get_legend().get_texts()] == ["b", "red", "x"]
    assert target.get_legend() is None
    # the same colour for the same label on both sides, each of its own
    shades = []
    for axes in (source, target):
        drawn = [tuple(part.get_facecolor()[0]) for part in axes.collections]
        sizes = [len(part.get_offsets()) for part in axes.collections]
        assert (len(set(drawn)), sizes) == (3, [2, 1, 2])
        shades.append(drawn)
    assert shades[0] == shades[1]
    assert len(plot_points(clouds[0], colour=list("ababc")).collections) == 3


def test_lines_lead_to_partners(result, clouds, permutation):
    source, target = plot_match(result, *clouds, lines=3)
    lines = source.figure.artists
    assert len(lines) == 3
    assert all(line.axesA is source and line.axesB is target for line in lines)
    for line in lines:
        (row,) = np.flatnonzero(np.isclose(clouds[0][:, :2], line.xy1, rtol=1e-11).all(1))
        assert row in range(5)
    assert len(plot_match(result, *clouds, lines=99)[0].figure.artists) == 5
    for odd in (-1, 0.5, "all"):
        with pytest.raises(InvalidInputError, match="number of lines"):
            plot_match(result, *clouds, lines=odd)


def test_alternatives_side_by_side():
    angle = np.linspace(0, 2 * np.pi, 40, endpoint=False)
    X = np.column_stack([np.cos(angle), 2 * np.sin(angle)])
    result = torchgw.solve(X, X, distances="euclidean", random_state=0)
    axes = plot_alternatives(result, X, X)
    assert len(axes) == 1 + min(4, len(result.alternatives))
    titles = [ax.get_title().replace("\n", " ") for ax in axes]
    assert titles[0] == "X"
    assert "the match returned" in titles[1]
    for title, item in zip(titles[2:], result.alternatives[1:], strict=False):
        assert item.relation in title
    for ax, item in zip(axes[1:], result.alternatives, strict=False):
        partner = item.source[item.plan.argmax(0)]
        np.testing.assert_array_equal(ax.collections[0].get_array(), partner)
    with pytest.raises(InvalidInputError, match="go together"):
        plot_alternatives(result, X)
    with pytest.raises(InvalidInputError, match="a new figure"):
        plot_alternatives(result, X, X, ax=axes[0])


def test_axes_that_do_not_fit(result, clouds):
    flat = pyplot.figure().subplots(1, 2)
    with pytest.raises(InvalidInputError, match="three-dimensional for points of d >= 3"):
        plot_match(result, *clouds, ax=flat)
    with pytest.raises(InvalidInputError, match="a pair of Axes"):
        plot_match(result, *clouds, ax=flat[0])
    assert plot_match(result, clouds[0], clouds[0], ax=flat) is flat


def test_numbers_have_a_colour_bar(result, clouds):
    numbers = np.array([3.0, 1.0, 4.0, 1.5, 5.0])
    source, _ = plot_match(result, *clouds, colour=numbers)
    _, _, bar = source.figure.axes
    assert bar.get_ylim() == (1.0, 5.0)
    assert len(plot_points(clouds[0], colour=numbers).figure.axes) == 2
    for colour in (None, list("ababc")):
        assert len(plot_match(result, *clouds, colour=colour)[0].figure.axes) == 2


def test_many_chains_are_drawn_as_far_as_they_can_be_read():
    trials = tuple(
        SimpleNamespace(start=f"kick {i}", objective=1.0 + i, epsilon=0.1, seconds=0.0, status="")
        for i in range(64)
    )
    axes = plot_trials(SimpleNamespace(trials=trials, doubt=""))
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        f"kick {i}" for i in range(20)
    ]
    assert axes.get_title() == "the first 20 of 64 chains"
    axes.figure.canvas.draw()
    edge = axes.get_window_extent().x1
    assert all(text.get_window_extent().x1 < edge for text in axes.texts)
    few = plot_trials(SimpleNamespace(trials=trials[:3], doubt=""))
    assert few.get_title() == "3 chains"


@pytest.mark.parametrize("count", [4, 12, 20])
def test_shares_fit_into_their_columns(count):
    labels = np.repeat([f"a long class name {i}" for i in range(count)], count)
    mixed = np.tile(np.unique(labels), count)
    result = SimpleNamespace(lazy_plan=StoredPlan(np.eye(count**2)))
    axes = plot_confusion(result, labels, mixed)
    axes.figure.canvas.draw()
    width = axes.get_window_extent().width / count
    assert len(axes.texts) == count**2
    assert max(text.get_window_extent().width for text in axes.texts) < width


def test_graphs_are_drawn_with_edges_kept_and_lost():
    networkx = pytest.importorskip("networkx")
    graph = networkx.path_graph(8)
    graph.add_edges_from([(0, 2), (1, 5)])
    other = networkx.relabel_nodes(graph, str)
    other.remove_edge("1", "5")
    result = torchgw.solve(graph, other, random_state=0)
    first, second = plot_match(result, graph, other, lines=2)
    images = np.asarray(result.lazy_plan.argmax(axis=1))
    lost = sum(not other.has_edge(str(images[i]), str(images[j])) for i, j in graph.edges)
    for axes, count in ((first, 9), (second, 8)):
        drawn = [len(it.get_segments()) for it in axes.collections if hasattr(it, "get_segments")]
        assert sum(drawn) == count
        assert axes is second or drawn[1] == lost >= 1
    with pytest.raises(InvalidInputError, match="a node for each point"):
        plot_match(result, networkx.path_graph(3), other)


def test_surfaces_are_drawn_as_such():
    """All triangles in the colours of their corners: in space, in the plane, numbers or labels."""
    from matplotlib.collections import PolyCollection
    from mpl_toolkits.mplot3d.art3d import Poly3DCollection

    rng = np.random.default_rng(0)
    ring = np.arange(12) * np.pi / 6
    vertices = np.r_[np.c_[np.cos(ring), np.sin(ring), rng.random(12)], [[0, 0, 1.5]]]
    faces = np.c_[np.arange(12), np.roll(np.arange(12), -1), np.full(12, 12)]
    mesh = SimpleNamespace(vertices=vertices, faces=faces)
    other = vertices[:, :2] * [1, 1.5], faces
    result = torchgw.solve(vertices, other[0], distances="euclidean", random_state=0, n_init=1)
    for colour in (None, vertices[:, 0], np.where(vertices[:, 0] > 0, "right", "left")):
        axes = plot_match(result, mesh, other, colour=colour)
        for ax, kind in zip(axes, (Poly3DCollection, PolyCollection), strict=True):
            (drawn,) = (one for one in ax.collections if type(one) is kind)
            assert len(drawn.get_facecolor()) == len(faces)
            assert len(np.unique(drawn.get_facecolor().round(6), axis=0)) > 1
    with pytest.raises(InvalidInputError, match="one row per point"):
        plot_match(result, (vertices[:3], [[0, 1, 2]]), other)


def test_graphs_without_networkx_say_what_to_install(monkeypatch):
    import scipy.sparse

    graph = scipy.sparse.csr_array(np.ones((4, 4)) - np.eye(4))
    result = torchgw.solve(graph, graph, random_state=0)
    monkeypatch.setitem(sys.modules, "networkx", None)
    with pytest.raises(torchgw.UnsupportedError, match="pip install networkx"):
        plot_match(result, graph, graph)


def test_the_module_says_what_it_needs():
    code = """
import importlib.util
known = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "matplotlib" else known(name, *rest)
import torchgw
torchgw.plotting
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: torchgw.plotting needs matplotlib: pip install matplotlib" in done.stderr
