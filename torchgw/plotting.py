"""Drawings of a match. Needs matplotlib: ``pip install matplotlib``.

``result`` is always what ``torchgw.solve(X, Y)`` returned. What is drawn goes on ``ax``, axes of
matplotlib, or into a new figure without them; the axes drawn on are returned.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from importlib.util import find_spec
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import scipy
import torch
from numpy.typing import NDArray

from torchgw._boundary.arrays import as_labels, check_shape, to_numpy, to_tensor
from torchgw._boundary.checks import reject_unknown
from torchgw._boundary.graphs import as_graph
from torchgw._errors import InvalidInputError, InvalidTypeError, UnsupportedError
from torchgw._tensors.operations import at_even_steps
from torchgw._variants.solve_low_rank import LowRankResult
from torchgw.distances.base import DistanceProvider
from torchgw.distances.surface import as_triangles

if find_spec("matplotlib") is None:
    raise ImportError("torchgw.plotting needs matplotlib: pip install matplotlib")

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from torchgw._many.permutation import MatchTest
    from torchgw._results.result import GWResult
    from torchgw._variants.path import PathResult

__all__ = [
    "plot_alternatives", "plot_confusion", "plot_convergence", "plot_demo", "plot_masses",
    "plot_match", "plot_path", "plot_plan", "plot_points", "plot_test", "plot_trials",
]  # fmt: skip

# Rows or columns of the largest picture of a plan. [L317]
_LARGEST_PICTURE = 4_000
# Names in a legend and bars at most, alternatives side by side, and letters below a picture. [L379]
_MOST_NAMES = 20
_SIDE_BY_SIDE = 4
_WIDEST_NAMES = 44
# Steps of the layout of a graph; a second one that begins at the places of the first needs as many.
# A choice. [L1371]
_LAYOUT_STEPS = 100
# The order of points has a meaning if successive points are apart by less than this share of the
# distance of any two. [L379]
_ORDERED = 0.5
# Area of a marker that is not to be seen. A choice.
_UNSEEN = 1e-6
# The first coordinate of a side is found from the distances to so many points. [L318]
_SCALING_POINTS = 200


@reject_unknown
def plot_points(
    points: Any, *, colour: Any = None, ax: Axes | None = None, size: float = 8.0
) -> Axes:
    """Draw a cloud of points in two or three dimensions.

    Parameters
    ----------
    points : array-like, shape (n, d)
        The points. One column is drawn against the index, more than three as the first three.
    colour : array-like, shape (n,), or None
        One number per point, with a colour bar, or one label, words in sorted order, with a legend;
        None draws all points alike.
    ax : matplotlib Axes or None
        Three-dimensional when d >= 3.
    size : float
        Area of a marker, in points squared.
    """
    coordinates = _columns_of(points)
    ax = ax or _new_axes(len(coordinates))
    _check_depth(ax, coordinates)
    _draw_points(ax, coordinates, _Shades.of(colour), size=size, bar=[ax])
    return ax


class _Shades(NamedTuple):
    """The colours of points, the same in all pictures of them."""

    values: Any  # a number per point, or the place of its label; or what matplotlib takes
    names: NDArray[Any] | None = None  # of labels
    limits: tuple[float, float] | None = None  # of numbers

    @classmethod
    def of(cls, colour: Any) -> _Shades:
        """Tell labels from numbers; a colour that is no array of one per point stays as it is."""
        array = None if np.ndim(colour) != 1 else to_numpy(colour)
        if array is None or array.size == 0:
            return cls(colour)
        if array.dtype.kind in "OUSb":
            names, places = np.unique(as_labels("colour", colour), return_inverse=True)
            return cls(places, names)
        return cls(array, None, (float(np.nanmin(array)), float(np.nanmax(array))))

    def at(self, index: NDArray[np.int64]) -> _Shades:
        """Take the shades of some points."""
        return self._replace(values=self.values[index])


def _draw_points(
    axes: Any,
    coordinates: list[NDArray[Any]],
    shades: _Shades,
    *,
    size: float,
    named: bool = True,
    bar: Sequence[Any] = (),
) -> None:
    """Draw a cloud, with a legend of its labels, or a bar of its numbers beside the axes given."""
    deep: dict[str, Any] = {"depthshade": False} if len(coordinates) == 3 else {}
    if shades.names is None:
        limits = dict(zip(("vmin", "vmax"), shades.limits or (), strict=False))
        drawn = axes.scatter(*coordinates, s=size, c=shades.values, **limits, **deep)
        if shades.limits is not None and bar:
            axes.figure.colorbar(drawn, ax=list(bar), shrink=0.8)
    else:
        table = _colours_of(len(shades.names))
        for place, name in enumerate(shades.names):
            some = [part[shades.values == place] for part in coordinates]
            axes.scatter(*some, s=size, color=table[place], label=str(name), **deep)
        if named and len(shades.names) <= _MOST_NAMES:
            axes.legend(frameon=False, fontsize="small", markerscale=max(1.0, 6 / size**0.5))
    if len(coordinates) == 3:
        # from high enough to see into a roll
        axes.view_init(elev=50)
        axes.set_aspect("equal")
    else:
        axes.set_aspect("equal", adjustable="datalim")
    axes.locator_params(nbins=5)
    if len(coordinates) == 3:
        axes.locator_params(axis="z", nbins=3)


@reject_unknown
def plot_match(
    result: GWResult,
    X: Any,
    Y: Any,
    *,
    colour: Any = None,
    lines: int = 0,
    ax: tuple[Axes, Axes] | None = None,
    size: float = 8.0,
) -> tuple[Axes, Axes]:
    """Draw both clouds, each point of Y in the colour of the X point that it matches best.

    Graphs are drawn with their edges, where NetworkX is installed: those whose ends are matched to
    the ends of an edge of the other graph in grey, others dashed and red. Surfaces are drawn as
    such, each triangle in the mean colour of its corners, or the label of the first.

    Parameters
    ----------
    X, Y : array-like, shape (n, d) and (m, d'), graphs or surfaces
        What was matched.
    colour : array-like, shape (n,), "confidence", or None
        One number or label per point of X; None takes the order of
        the points if it says something, and else their places along the longest extent of X.
        Labels have a legend, numbers a colour bar. ``"confidence"`` is the share of resamples that
        keep the partner of a point, of ``result.stability``, or of ``result.confidence()``.
    lines : int
        How many lines to draw between points of X, spread over its extent, and their partners. They
        stay where they are if axes in space are turned afterwards.
    ax : pair of matplotlib Axes or None
        Of X and of Y.
    size : float
        Area of a marker, in points squared.
    """
    _check_result(result)
    n, m = result.lazy_plan.shape
    partners = to_numpy(result.lazy_plan.argmax(axis=1))
    partner = to_numpy(result.lazy_plan.argmax(axis=0))
    graphs = [as_graph(name, side) for name, side in (("X", X), ("Y", Y))]
    if graphs[0] is not None:
        X = _layout("X", graphs[0], n, None)
    if graphs[1] is not None:
        # from the places of partners, so that both look alike
        Y = _layout("Y", graphs[1], m, X[partner] if graphs[0] is not None else None)
    surfaces = [as_triangles(name, side) for name, side in (("X", X), ("Y", Y))]
    X, Y = (
        side if surface is None else to_numpy(surface[0])
        for side, surface in zip((X, Y), surfaces, strict=True)
    )
    source, target = _columns_of(X, "X", n), _columns_of(Y, "Y", m)
    if not isinstance(lines, Integral) or lines < 0:
        raise InvalidInputError(f"`lines` must be a number of lines, 0 or more; got {lines!r}.")
    shades = _source_shades(result, colour)
    if ax is None:
        from matplotlib import pyplot

        figure = pyplot.figure(figsize=(9.0, 4.2), layout="constrained")
        first, second = (
            figure.add_subplot(1, 2, place, projection=_projection_of(len(side)))
            for place, side in ((1, source), (2, target))
        )
        ax = first, second
    elif not hasattr(ax, "__len__") or len(ax) != 2:
        raise InvalidInputError(f"`ax` must be a pair of Axes, for X and for Y; got {ax!r}.")
    for axes, cloud in zip(ax, (source, target), strict=True):
        _check_depth(axes, cloud)
    # no bar for a default colour, whose numbers mean nothing
    bar = () if colour is None else ax
    # the points of a surface are in it; a legend and a bar are made of what is too small to see
    first, second = (size if surface is None else _UNSEEN for surface in surfaces)
    _draw_points(ax[0], source, shades, size=first)
    _draw_points(ax[1], target, shades.at(partner), size=second, named=False, bar=bar)
    ax[0].set_title("X")
    ax[1].set_title("Y, coloured by its match in X")
    for place, (images, cloud) in enumerate(((partners, source), (partner, target))):
        if graphs[place] is not None:
            _draw_edges(ax[place], cloud, graphs[place], graphs[1 - place], images)
        surface = surfaces[place]
        if surface is not None:
            _draw_triangles(ax[place], cloud, surface[1], shades.at(partner) if place else shades)
    if lines:
        _draw_lines(result, source, target, ax, int(lines))
    return ax


def _layout(name: str, graph: Any, count: int, start: NDArray[Any] | None) -> NDArray[np.float64]:
    """Place the nodes of a graph in the plane, (count, 2)."""
    check_shape(name, graph, (count, count), "a node for each point")
    try:
        import networkx
    except ImportError:
        raise UnsupportedError(
            f"`{name}` is a graph, and places for its nodes are found by NetworkX, which is not "
            "installed: run `pip install networkx`. Or pass places of your own, (n, 2)."
        ) from None
    steps = networkx.from_scipy_sparse_array(abs(scipy.sparse.csr_array(graph)).sign())
    begun = None if start is None else dict(enumerate(start))
    places = networkx.spring_layout(steps, pos=begun, seed=0, iterations=_LAYOUT_STEPS)
    return np.array([places[node] for node in range(count)])


def _draw_edges(axes: Any, cloud: Any, graph: Any, other: Any, images: NDArray[Any]) -> None:
    """Draw the edges of one graph, by whether their images are edges of the other."""
    from matplotlib.collections import LineCollection

    rows, columns = scipy.sparse.triu(graph, 1).nonzero()
    kept = np.ones(len(rows), bool)
    if other is not None:
        known = scipy.sparse.csr_array(other) != 0
        kept = np.asarray(known[images[rows], images[columns]]).ravel().astype(bool)
    points = np.column_stack(cloud)
    for mask, colour, style in ((kept, "0.7", "solid"), (~kept, "tab:red", "dashed")):
        ends = np.stack([points[rows[mask]], points[columns[mask]]], 1)
        axes.add_collection(
            LineCollection(list(ends), colors=colour, linestyles=style, linewidths=0.8, zorder=0)
        )
    axes.set_xticks([])
    axes.set_yticks([])


def _draw_triangles(axes: Any, cloud: Any, faces: NDArray[np.int64], shades: _Shades) -> None:
    """Draw triangles in the mean colours of their corners, or those of the first one's label."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import Normalize
    from mpl_toolkits.mplot3d.art3d import Poly3DCollection

    if shades.names is None:
        values = np.asarray(shades.values, float)[faces].mean(1)
        colours = ScalarMappable(Normalize(*(shades.limits or ()))).to_rgba(values)
    else:
        colours = _colours_of(len(shades.names))[shades.values[faces[:, 0]]]
    corners = np.column_stack(cloud)[faces]
    if len(cloud) == 3:
        axes.add_collection3d(Poly3DCollection(corners, facecolors=colours, shade=True))
    else:
        axes.add_collection(PolyCollection(list(corners), facecolors=colours))


def _draw_lines(
    result: Any, source: list[NDArray[Any]], target: list[NDArray[Any]], ax: Any, count: int
) -> None:
    """Draw lines from some points of X, spread over its extent, to their partners."""
    from matplotlib.patches import ConnectionPatch

    n = len(source[0])
    order = np.argsort(_structure(result), kind="stable")
    rows = order[at_even_steps(n, min(n, count), torch.device("cpu"))]
    partner = to_numpy(result.lazy_plan.argmax(axis=1))[rows]
    figure = ax[0].figure
    # places in space are known on the page once the layout is
    figure.canvas.draw()
    ends = [
        _on_page(part[0], np.column_stack([column[index] for column in part[1]]))
        for part, index in (((ax[0], source), rows), ((ax[1], target), partner))
    ]
    for first, second in zip(*ends, strict=True):
        line = ConnectionPatch(
            first, second, "data", "data", axesA=ax[0], axesB=ax[1],
            color="0.5", alpha=0.5, linewidth=0.6, zorder=1,
        )  # fmt: skip
        line.set_in_layout(False)
        figure.add_artist(line)


def _on_page(ax: Any, points: NDArray[Any]) -> NDArray[Any]:
    """Project points (p, d) to the plane that axes have on the page, (p, 2)."""
    if points.shape[1] == 2:
        return points
    from mpl_toolkits.mplot3d import proj3d

    return np.column_stack(proj3d.proj_transform(*points.T, ax.get_proj())[:2])


def _source_shades(result: Any, colour: Any) -> _Shades:
    """Colour the points of X as asked for, or by their order or extent."""
    n = result.lazy_plan.shape[0]
    if isinstance(colour, str) and colour == "confidence":
        colour = (result.stability or result.confidence()).partner
    given = _default_colour(result) if colour is None else to_numpy(colour)
    if given.shape[:1] != (n,):
        raise InvalidInputError(
            f"`colour` must have shape ({n},), a number per point of X; got {given.shape}."
        )
    return _Shades.of(given)


def _source_distances(result: Any) -> DistanceProvider | None:
    """Look up the distances of X, if the result holds what they are read from."""
    extension = getattr(result, "extension", None)
    return None if extension is None else extension.known.providers[0]


def _default_colour(result: Any) -> NDArray[Any]:
    """Colour X by its order if neighbours in it are near each other, else along its extent."""
    provider = _source_distances(result)
    n = result.lazy_plan.shape[0]
    if provider is None or n < 3:
        return np.arange(n)
    some = at_even_steps(n - 1, min(n - 1, _SCALING_POINTS), provider.device)
    block = provider.columns(some)
    step = block[some + 1, torch.arange(len(some), device=some.device)]
    ordered = float(step.mean()) < _ORDERED * float(block.mean())
    return np.arange(n) if ordered else _extent(provider)


def _structure(result: Any) -> NDArray[Any]:
    """Find places of X along its longest extent, or the order of its points if that is unknown."""
    provider = _source_distances(result)
    return np.arange(result.lazy_plan.shape[0]) if provider is None else _extent(provider)


@reject_unknown
def plot_plan(result: GWResult, *, order: Any = "structure", ax: Axes | None = None) -> Axes:
    """Draw the plan as a heat map, rows are points of X and columns points of Y.

    Each row is divided by its largest entry, so that light rows can be seen as well. Plans of more
    than 4,000 rows or columns are drawn on evenly spaced ones.

    Parameters
    ----------
    order : {"structure", "index"} or array-like, shape (n,)
        ``"structure"`` sorts X along its longest extent and Y by where its mass comes from, so that
        a consistent match is a band along the diagonal, whatever order the points came in; an array
        sorts X by its numbers or labels instead. ``"index"`` leaves both as they are.
    """
    _check_result(result)
    plan = result.lazy_plan
    n, m = plan.shape
    by_row, by_column = _plan_orders(result, order)
    rows, columns = (
        places[at_even_steps(len(places), min(len(places), _LARGEST_PICTURE), torch.device("cpu"))]
        for places in (by_row, by_column)
    )
    # one row at a time would be slow, all at once would be n x m
    picture = np.concatenate(
        [to_numpy(plan.rows(block))[:, columns] for block in torch.from_numpy(rows).split(256)]
    )
    largest = picture.max(axis=1, keepdims=True)
    picture = np.divide(picture, largest, out=np.zeros_like(picture), where=largest > 0)
    ax = ax or _new_axes(2)
    extent = (-0.5, m - 0.5, n - 0.5, -0.5)
    shown = ax.imshow(
        picture, aspect="auto", extent=extent, cmap="magma_r", interpolation="antialiased"
    )
    ax.figure.colorbar(shown, ax=ax, label="share of the row's largest entry", shrink=0.8)
    as_given = isinstance(order, str) and order == "index"
    ax.set_xlabel("point of Y" if as_given else "point of Y, sorted by its matches")
    ax.set_ylabel("point of X" if as_given else "point of X, sorted")
    ax.set_title("plan")
    return ax


@reject_unknown
def plot_convergence(result: GWResult, *, ax: Axes | None = None) -> Axes:
    """Draw epsilon, marginal error, change of the plan and objective over the outer iterations.

    The objective, on an axis of its own at the right, counts the entropy at the epsilon of each
    iteration, so it falls with epsilon too. Iterations that do not know it, with a sampled gradient
    or relaxed marginals, have their dual value drawn. The title has that of the plan returned. The
    axes have a logarithmic scale.
    """
    _check_result(result, "history")
    ax = ax or _new_axes(2)
    history = result.history
    iteration = np.arange(1, len(history) + 1)
    for name, label in (
        ("epsilon", "epsilon"),
        ("marginal_error", "marginal error"),
        ("change", "change of the plan"),
    ):
        values = np.array([getattr(entry, name) for entry in history], dtype=float)
        shown = np.isfinite(values) & (values > 0)
        if shown.any():
            ax.plot(iteration[shown], values[shown], ".-", markersize=4, label=label)
    whole = [entry.shape == tuple(result.lazy_plan.shape) for entry in history]
    if whole and not whole[0]:
        last = whole.index(True) if any(whole) else len(whole)
        ax.axvspan(0.5, last + 0.5, color="0.9", zorder=0, label="on fewer points")
    name = "objective" if any(np.isfinite(entry.objective) for entry in history) else "dual"
    title = "objective" if name == "objective" else "dual value"
    falling = np.array([getattr(entry, name) for entry in history], dtype=float)
    right = ax.twinx()
    right.plot(iteration, falling, "--", color="0.4", label=f"{title} (right)")
    right.set_ylabel(title)
    right.margins(y=0.1)
    ax.set(yscale="log", xlabel="outer iteration")
    ax.locator_params(axis="x", integer=True)
    ended = result.status.name.lower().replace("_", " ")
    ax.set_title(f"{ended}, objective {result.report.objective:.4g}, value {result.value:.4g}")
    handles = [*ax.get_lines(), *right.get_lines()]
    right.legend(handles=handles, frameon=False, fontsize="small", loc="upper right")
    return ax


@reject_unknown
def plot_masses(result: GWResult, *, ax: Axes | None = None) -> Axes:
    """Draw what more mass costs, and the share that ``mass="auto"`` has chosen.

    The cost is the mean one of what each share of the mass adds to the one before it, on a
    logarithmic scale.
    """
    _check_result(result, "report")
    masses = result.report.masses
    if masses is None:
        raise InvalidInputError("`result` is of one mass: solve with mass='auto' to compare some.")
    ax = ax or _new_axes(2)
    ax.semilogy(masses["shares"], masses["added"], ".-", label="cost of what is added")
    ax.axvline(masses["chosen"], linestyle="--", color="0.4", label="chosen")
    ax.set(xlabel="share of the mass", ylabel="cost")
    ax.set_title(f"{masses['chosen']:.0%} of the mass match")
    ax.legend(frameon=False, fontsize="small")
    return ax


@reject_unknown
def plot_path(found: PathResult, *, ax: Axes | None = None) -> Axes:
    """Draw agreement, entropy and stability along a path, its values, and the one recommended.

    Parameters
    ----------
    found : PathResult
        What :func:`torchgw.path` returned.
    """
    _check_kind("found", found, "recommended", "a PathResult, as torchgw.path")
    ax = ax or _new_axes(2)
    place = np.arange(len(found.points))
    for name in ("agreement", "entropy", "stability"):
        ax.plot(place, to_numpy(getattr(found, name)), ".-", label=name)
    ax.axvline(found.recommended, linestyle="--", color="0.4", label="recommended")
    ax.set(xlabel=found.option, title=f"{found.option} = {found.points[found.recommended]}")
    ax.set_xticks(place, found.points, rotation=45)
    right = ax.twinx()
    right.plot(place, to_numpy(found.value), "--", color="0.7", label="value (right)")
    right.legend(handles=[*ax.get_lines(), *right.get_lines()], frameon=False, fontsize="small")
    return ax


@reject_unknown
def plot_test(found: MatchTest, *, ax: Axes | None = None) -> Axes:
    """Draw the null distribution of a test, and where the observed statistic lies in it.

    Parameters
    ----------
    found : MatchTest
        What :func:`torchgw.test` or :func:`torchgw.test_groups` returned.
    """
    _check_kind("found", found, "null_distribution", "a MatchTest, as torchgw.test")
    ax = ax or _new_axes(2)
    ax.hist(to_numpy(found.null_distribution), bins="auto", color="0.7", label=found.null)
    ax.axvline(found.statistic, color="C3", label="observed")
    ax.set(xlabel="statistic", ylabel="draws", title=f"p = {found.p_value:.3g}")
    ax.legend(frameon=False, fontsize="small")
    return ax


@reject_unknown
def plot_alternatives(
    result: GWResult, X: Any = None, Y: Any = None, *, colour: Any = None, ax: Axes | None = None
) -> Any:
    """Draw the optima that several starts found: their values, or their matches side by side.

    Values that are nearly equal mean that the data allow several alignments; pass one of
    ``result.alternatives`` as ``init`` to solve from there. Matches have a new figure; returned are
    its axes, those of X and of each alternative.

    Parameters
    ----------
    X, Y : array-like, shapes (n, d) and (m, d'), optional
        The points that were matched. With them the few points that were searched are drawn: X, and
        Y once for each of the first four alternatives, coloured by its match.
    colour : array-like, shape (n,), or None
        As in :func:`plot_match`.
    ax : matplotlib Axes or None
        For values alone.
    """
    _check_result(result, "alternatives")
    found = result.alternatives
    if not found:
        raise InvalidInputError(
            "The result has no alternatives: there was a single start. Pass `n_init` to solve()."
        )
    if (X is None) != (Y is None):
        raise InvalidInputError("`X` and `Y` go together; only one was given.")
    if X is not None:
        if ax is not None:
            raise InvalidInputError("`ax` is for values; matches side by side have a new figure.")
        return _draw_matches(result, X, Y, colour)
    names = [
        textwrap.fill(f"{place}: {item.relation or 'the best'}", 30)
        for place, item in enumerate(found)
    ]
    values = [item.value for item in found]
    texts = [f"{value:.4g}" for value in values]
    ax = _draw_bars(ax, names, values, texts, ["C0"] + ["0.7"] * (len(found) - 1))
    ax.margins(x=0.2)
    ax.set_xlabel("value")
    ax.set_title(f"{len(found)} optima, ambiguity {result.ambiguity:.2f}")
    return ax


def _draw_matches(result: Any, X: Any, Y: Any, colour: Any) -> tuple[Axes, ...]:
    """Draw X, and Y as each of the first alternatives matches it."""
    from matplotlib import pyplot

    n, m = result.lazy_plan.shape
    source, target = _columns_of(X, "X", n), _columns_of(Y, "Y", m)
    shades = _source_shades(result, colour)
    shown = result.alternatives[:_SIDE_BY_SIDE]
    count = len(shown) + 1
    figure = pyplot.figure(figsize=(3.4 * count, 3.8), layout="constrained")
    axes = [figure.add_subplot(1, count, 1, projection=_projection_of(len(source)))]
    _draw_points(axes[0], source, shades, size=8.0)
    axes[0].set_title("X", fontsize="medium")
    for place, item in enumerate(shown):
        ax = figure.add_subplot(1, count, place + 2, projection=_projection_of(len(target)))
        rows, columns = to_numpy(item.source), to_numpy(item.target)
        partner = rows[to_numpy(item.plan).argmax(axis=0)]
        some = [part[columns] for part in target]
        _draw_points(ax, some, shades.at(partner), size=8.0, named=False)
        said = textwrap.fill(item.relation or "the match returned", 28)
        ax.set_title(f"Y by match {place + 1}, value {item.value:.4g}\n{said}", fontsize="medium")
        axes.append(ax)
    return tuple(axes)


@reject_unknown
def plot_trials(result: GWResult, *, ax: Axes | None = None) -> Axes:
    """Draw the objectives that the starts of a search on all points (chains) have reached.

    The first 20 of ``result.trials`` are drawn in their order, the best on top. Those that were not
    followed to the final epsilon have their objective at the last one they reached, in grey.
    """
    _check_result(result, "trials")
    known = result.trials
    if not known:
        raise InvalidInputError(
            "The result has no trials: there was no search on all points. Pass search='thorough' "
            "to solve()."
        )
    trials = known[:_MOST_NAMES]
    colours = ["C0" if trial.status == "refined" else "0.7" for trial in trials]
    texts = [
        f"{one.objective:.4g}, epsilon {one.epsilon:.2g}, {one.seconds:.1f} s" for one in trials
    ]
    names, values = [one.start for one in trials], [one.objective for one in trials]
    # room for what the longest bars say
    ax = _draw_bars(ax or _new_axes(2, width=9.0), names, values, texts, colours)
    ax.margins(x=0.8)
    ax.set_xlabel("objective with entropy")
    count = f"{len(known)} chains"
    if len(trials) < len(known):
        count = f"the first {len(trials)} of {count}"
    ax.set_title(count + (", in doubt" if result.doubt else ""))
    return ax


@reject_unknown
def plot_confusion(
    result: GWResult, source_labels: Any, target_labels: Any, *, ax: Axes | None = None
) -> Axes:
    """Draw which labels of Y the mass of each label of X goes to.

    Each row sums to one; a label without mass has an empty row.

    Parameters
    ----------
    source_labels, target_labels : array-like, shapes (n,) and (m,)
        Labels of the points. Both sides need not have the same ones.
    """
    _check_result(result)
    n, m = result.lazy_plan.shape
    rows = as_labels("source_labels", source_labels, n)
    columns = as_labels("target_labels", target_labels, m)
    source, by_row = np.unique(rows, return_inverse=True)
    target, by_column = np.unique(columns, return_inverse=True)
    moved = to_numpy(result.lazy_plan @ np.eye(len(target))[by_column])
    mass = np.eye(len(source))[by_row].T @ moved
    total = mass.sum(axis=1, keepdims=True)
    share = np.divide(mass, total, out=np.zeros_like(mass), where=total > 0)
    ax = ax or _new_axes(2)
    shown = ax.imshow(share, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    # numbers side by side have to fit into the width of their columns too
    size = min(10.0, 100 / len(target))
    for (row, column), value in np.ndenumerate(share):
        if value >= 0.005 and share.size <= 400:
            colour = "white" if value > 0.5 else "black"
            ax.text(
                column, row, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=size
            )
    ax.figure.colorbar(shown, ax=ax, label="share of the mass of a row", shrink=0.8)
    names = [str(label) for label in target]
    # words side by side have to fit into the width of their columns
    turned = max(map(len, names)) * len(names) > _WIDEST_NAMES
    angle, side = (45, "right") if turned else (0, "center")
    ax.set_xticks(range(len(target)), names, rotation=angle, ha=side, rotation_mode="anchor")
    ax.set_yticks(range(len(source)), [str(label) for label in source])
    ax.set(xlabel="label of Y", ylabel="label of X", title="share of each label's mass")
    return ax


@reject_unknown
def plot_demo(result: GWResult, X: Any, Y: Any, *, colour: Any = None) -> Figure:
    """Draw both clouds coloured by the match, and the plan, side by side.

    Parameters
    ----------
    X, Y, colour : array-like
        As in :func:`plot_match`.

    Returns
    -------
    Figure
        The figure; save it with ``figure.savefig(path)``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.0, 4.2), layout="constrained")
    grid = figure.add_gridspec(1, 3)
    source = figure.add_subplot(grid[0], projection=_projection_of(len(_columns_of(X))))
    target = figure.add_subplot(grid[1], projection=_projection_of(len(_columns_of(Y))))
    plot_match(result, X, Y, colour=colour, ax=(source, target))
    plot_plan(result, order="index", ax=figure.add_subplot(grid[2]))
    return figure


def _draw_bars(
    ax: Axes | None, names: list[str], values: list[float], texts: list[str], colours: list[str]
) -> Axes:
    """Draw named bars with a text at the end of each, the first on top."""
    ax = ax or _new_axes(2)
    ax.barh(range(len(values)), values, color=colours)
    for place, (value, text) in enumerate(zip(values, texts, strict=True)):
        ax.text(value, place, f" {text}", va="center")
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    return ax


def _check_kind(name: str, given: Any, part: str, kind: str) -> None:
    """Refuse what has not such a part; a plan of low rank has groups, not partners."""
    whole = part != "lazy_plan" or hasattr(getattr(given, part, None), "argmax")
    if not (hasattr(given, part) and whole) or isinstance(given, LowRankResult):
        raise InvalidTypeError(f"`{name}` must be {kind} returns; got {type(given).__name__}.")


def _check_result(result: Any, part: str = "lazy_plan") -> None:
    """Refuse what is no alignment."""
    _check_kind("result", result, part, "a GWResult, as torchgw.solve")


def _check_depth(axes: Any, coordinates: list[NDArray[Any]]) -> None:
    """Refuse flat axes for points in space."""
    if len(coordinates) == 3 and not hasattr(axes, "set_zlim"):
        raise InvalidInputError(
            "`ax` must be three-dimensional for points of d >= 3. Make it by "
            "add_subplot(projection='3d'), or pass points[:, :2]."
        )


def _colours_of(count: int) -> Any:
    """Choose so many colours that can be told apart."""
    from matplotlib import colormaps

    table = colormaps["tab10" if count <= 10 else "tab20" if count <= 20 else "turbo"]
    return table(np.linspace(0, 1, count)) if count > 20 else table(np.arange(count))


def _columns_of(points: Any, name: str = "points", count: int | None = None) -> list[NDArray[Any]]:
    """Split points into the two or three coordinates that are drawn."""
    array = to_tensor(name, points).cpu().numpy()
    if not (array.ndim in (1, 2) and array.size and count in (None, len(array))):
        raise InvalidInputError(
            f"`{name}` must have shape ({'n' if count is None else count}, d), one row per point; "
            f"got {array.shape}."
        )
    array = array.reshape(len(array), -1)
    if array.shape[1] == 1:
        array = np.column_stack([np.arange(len(array)), array])
    return list(array[:, :3].T)


def _projection_of(dimensions: int) -> str | None:
    """Name the projection for so many dimensions as matplotlib does."""
    return "3d" if dimensions == 3 else None


def _new_axes(dimensions: int, width: float = 6.4) -> Axes:
    """Make axes in a new figure, of a width in inches."""
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(width, 4.8), layout="constrained")
    return figure.add_subplot(projection=_projection_of(dimensions))


def _plan_orders(result: Any, order: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Order rows and columns so that a consistent match is a band along the diagonal."""
    n, m = result.lazy_plan.shape
    if isinstance(order, str) and order == "index":
        return np.arange(n), np.arange(m)
    if isinstance(order, str):
        if order != "structure":
            raise InvalidInputError(
                f"`order` must be 'structure', 'index' or an array of shape ({n},); got {order!r}."
            )
        keys = _structure(result)
    else:
        keys = np.unique(to_numpy(order), return_inverse=True)[1]
        check_shape("order", keys, (n,))
    by_row = np.argsort(keys, kind="stable")
    rank = np.empty(n)
    rank[by_row] = np.arange(n)
    moved, weight = to_numpy(result.lazy_plan.T @ np.column_stack([rank, np.ones(n)])).T
    centre = np.divide(moved, weight, out=np.zeros(m), where=weight > 0)
    return by_row, np.argsort(centre, kind="stable")


def _extent(distances: DistanceProvider) -> NDArray[np.float64]:
    """Find the first coordinate of classical scaling from distances to some points."""
    count = min(distances.n, _SCALING_POINTS)
    some = at_even_steps(distances.n, count, distances.device)
    square = distances.columns(some).double().square()
    square = square - square.mean(dim=0)
    square = square - square.mean(dim=1, keepdim=True)
    return to_numpy(torch.linalg.svd(square, full_matrices=False)[0][:, 0])
