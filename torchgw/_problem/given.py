"""What the user gave of each side: recognised, and warned of where it may be meant otherwise."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchgw._boundary.arrays import SAME_DISTANCE, check_distances, check_points, is_sparse
from torchgw._boundary.checks import listed
from torchgw._boundary.graphs import as_graph, has_directions
from torchgw._errors import (
    GraphWarning,
    InvalidInputError,
    InvalidTypeError,
    TorchGWWarning,
    UnsupportedError,
    warn_user,
)
from torchgw._problem.limits import CPU, limits_of
from torchgw._problem.named import BY_SIZE, from_graphs
from torchgw._problem.problem import Problem, stored_matrix
from torchgw._tensors.machine import fits, free_memory
from torchgw._tensors.operations import at_even_steps
from torchgw.distances.base import DistanceProvider
from torchgw.distances.geodesics import Geodesics
from torchgw.distances.points import Space
from torchgw.distances.precomputed import DirectedDistance, PrecomputedDistance, are_tables
from torchgw.distances.surface import Surface, as_surface

# Points of at most so many rows, and so many columns for each row, were probably transposed. [L376]
_FEW_ROWS = 10
# A point is too far if its distances are so many times as large as typical ones; there is a warning
# of one such point of as many. [L376]
_FAR = 100.0
# Points that all others are compared with. [L376]
_COMPARED = 15
# Points that are drawn to tell whether the box around all is too small for any to be far away.
# [L701]
_PROBED = 4096
# Ratio of two largest distances from which on they may have other units: half of a shape is more
# than half as wide as the whole. [L1393]
_UNITS = 2.0
# The same of given tables, which are left as they are: metres and kilometres are warned of; from a
# ratio of 2 on relaxed problems that are meant so would be. [L1952]
_OTHER_UNITS = 10.0


def warn_of_transposed_points(name: str, points: Tensor) -> None:
    """Warn of very few points in very many dimensions."""
    n, d = points.shape
    if 1 < n <= _FEW_ROWS and d >= _FEW_ROWS * n:
        warn_user(
            f"`{name}` has {n} rows and {d} columns, and is taken as {n} points in {d} "
            f"dimensions. Rows are points: pass {name}.T if these are {d} points.",
            TorchGWWarning,
        )


def warn_of_two_kinds(providers: list[DistanceProvider]) -> None:
    """Warn of two given tables of which one seems to hold distances, the other similarities."""
    given = [part for part in providers if isinstance(part, PrecomputedDistance)]
    # a point has no distances
    tables = [part.matrix().detach() for part in given if part.n > 1]
    if len(tables) < 2:
        return
    least = [float(table.min()) for table in tables]
    if min(least) < 0 <= max(least):
        negative, other = ("D_X", "D_Y") if least[0] < 0 else ("D_Y", "D_X")
        said = f"`{negative}` has negative entries and `{other}` has none."
    else:
        near = [_nearest_on_diagonal(table) for table in tables]
        if set(near) != {"largest", "smallest"}:
            return
        said = (
            f"Every row of `D_X` has its {near[0]} entry on the diagonal, and every row of `D_Y` "
            f"its {near[1]}, as similarities have the largest and distances the smallest."
        )
    warn_user(
        f"{said} Entries are compared as they are, so both have to be distances, or both "
        "similarities.",
        TorchGWWarning,
    )


def _nearest_on_diagonal(table: Tensor) -> str:
    """Tell whether the diagonal alone has the largest or the smallest entry of each row."""
    own = table.diagonal()[:, None]
    # no entry but that of the diagonal itself
    if int((table >= own).sum()) == len(table) > 1:
        return "largest"
    return "smallest" if int((table <= own).sum()) == len(table) > 1 else "neither"


def common_unit(x: Space, y: Space) -> float | None:
    """Find the larger of the numbers that sides of a relaxed problem were divided by."""
    # The largest distance of a side may be that of a point without a partner, so the sides share a
    # unit if both may: if both are points with as many columns, or both are graphs.
    first, second = (
        (s.metric, s.given_graph is None, None if s.points is None else s.points.shape[1])
        for s in (x, y)
    )
    if first != second or x.scale == y.scale:
        return None
    sizes = 1 / x.scale, 1 / y.scale
    unit = max(sizes)
    if unit > _UNITS * min(sizes):
        warn_user(
            f"The largest distance of X is {sizes[0]:.4g}, that of Y {sizes[1]:.4g}. As `mass` and "
            "`unbalanced` leave points out, both were divided by the larger one: distances of "
            "both sides are taken to be in one unit. If they are, pass scale=None; if not, "
            "scale='max'.",
            TorchGWWarning,
        )
    return unit


def warn_of_two_units(providers: list[DistanceProvider]) -> None:
    """Warn of two given tables of a relaxed problem that may have other units."""
    given = [part for part in providers if isinstance(part, PrecomputedDistance)]
    widths = [float(part.matrix().detach().abs().max()) for part in given]
    if len(widths) == 2 and max(widths) > _OTHER_UNITS * min(widths) > 0:
        warn_user(
            f"The largest entry of `D_X` is {widths[0]:.4g}, that of `D_Y` {widths[1]:.4g}. As "
            "`mass` and `unbalanced` leave points out, a unit that is wrong makes the match wrong, "
            "and given tables are compared as they are. If they are in one unit, pass scale=None; "
            "if not, scale='max'.",
            TorchGWWarning,
        )


def warn_of_unlike_edges(names: tuple[str, str], steps: tuple[bool | None, bool | None]) -> None:
    """Warn where edges of one graph all have length one, as without weights, and others not."""
    # ``steps`` says of each side whether they do; ``None`` if it is no graph.
    if set(steps) == {True, False}:
        plain, weighted = names if steps[0] else names[::-1]
        warn_user(
            f"Every edge of `{plain}` has length 1, as in a graph without weights, and the edges "
            f"of `{weighted}` have other lengths, so that steps are compared with lengths. Pass "
            "both graphs with weights, or both without (NetworkX: "
            "networkx.create_empty_copy and add_edges_from(graph.edges); SciPy: graph != 0).",
            GraphWarning,
        )


def warn_of_angles(relaxed: bool, chosen: str) -> None:
    """Warn where angles were chosen for a problem that does not match all points."""
    if relaxed and chosen == "cosine":
        warn_user(
            "distances='auto' took cosine distances, which agree best where all points are "
            "matched; `mass` and `unbalanced` leave some out. If the lengths of the rows mean "
            "something, pass distances='euclidean'; pass distances='cosine' to confirm.",
            TorchGWWarning,
        )


def warn_of_far_points(
    name: str,
    weight: str,
    given: Tensor | PrecomputedDistance,
    used: Tensor | None,
    *,
    flat: bool = True,
) -> None:
    """Warn of a few points so far away that all other distances are tiny beside theirs."""
    # `given` are points or their distances. Where these are angles, and not `flat`, they were
    # chosen because they agree better in the presence of such a point.
    count = given.n if isinstance(given, PrecomputedDistance) else len(given)
    if isinstance(given, Tensor) and count <= CPU.looked_at:
        # each of some twenty operations would take a GPU as long as to send the points [L1243]
        given = given.detach().cpu()
    rows = torch.arange(count, device=given.device)
    if used is not None:
        # points without weight do not count for the scale
        rows = used.to(given.device).nonzero()[:, 0]
        count = len(rows)
    if count <= 2 * _COMPARED:
        return
    some = rows[at_even_steps(count, _COMPARED, rows.device)]
    if isinstance(given, PrecomputedDistance):
        table = given.columns(some).detach()[rows]
    else:
        if count > _PROBED:
            probed = rows[at_even_steps(count, _PROBED, rows.device)]
            typical = float(torch.cdist(given[probed], given[some]).median(1).values.median())
            low, high = torch.aminmax(given, dim=0)
            if float((high - low).norm()) <= _FAR / 2 * typical:
                return
        table = torch.cdist(given[rows], given[some])
    apart = table.median(1).values
    middle = apart.median()
    # both numbers are read from the device at once
    typical, far = torch.stack([middle, (apart > _FAR * middle).sum().to(middle)]).tolist()
    if typical == 0 or not 0 < far <= max(1.0, count / _FAR):
        return
    worst = int(apart.argmax())
    row = int(rows[worst])
    follows = "their match means little" if flat else "angles are compared instead"
    others = "" if far == 1 else f" ({far:.0f} rows are that far away)"
    warn_user(
        f"`{name}` has points far from all others: row {row} is {float(apart[worst]):.3g} away, "
        f"which are {typical:.3g} apart{others}. Beside such distances those of the others are "
        f"nearly zero, and {follows}. If that is an error, drop the row, or give it no weight in "
        f"`{weight}`.",
        TorchGWWarning,
    )


def check_tables_fit(
    sizes: tuple[int, int], stored: tuple[bool, bool], device: torch.device, *, dense: bool
) -> None:
    """Refuse distances of all pairs (``stored``) and dense gradients that cannot fit."""
    n, m = sizes
    entries = sum(size**2 for size, one in zip(sizes, stored, strict=True) if one or dense)
    # the cost, the plan, and the next of them while it is made
    entries += 3 * n * m if dense else 0
    # the least that is needed, in float32
    needed = 4 * entries
    if fits(needed, device):
        return
    free = free_memory(device)
    what = "gradient='dense'" if dense else "distances='precomputed'"
    instead = (
        "gradient='auto', which streams the cost or samples it"
        if dense
        else "distances='landmark', of low rank, or 'dijkstra', computed as they are read"
    )
    raise UnsupportedError(
        f"`{what}` stores tables of {n:,} x {m:,} points, at least {needed / 2**30:,.1f} GiB, and "
        f"{free / 2**30:,.1f} GiB are free on {device}. Pass {instead}."
    )


def are_copies(problem: Problem) -> bool:
    """Tell whether weights and distances of both spaces are the same, by weighted eigenvalues."""
    sides = problem.sides
    a, b = problem.marginals
    many = len(a) > limits_of(a.device).cubed_points
    if len(a) != len(b) or many or not all(side.cheap_columns for side in sides):
        return False
    if not torch.allclose(a.sort().values, b.sort().values, rtol=SAME_DISTANCE, atol=0):
        return False
    tables = [
        weight.sqrt()[:, None] * stored_matrix(side).double() * weight.sqrt()
        for side, weight in zip(sides, (a, b), strict=True)
    ]
    # eigenvalues take a GPU milliseconds; the sum of their squares costs next to nothing and is
    # compared first
    if not torch.isclose(tables[0].norm(), tables[1].norm(), rtol=SAME_DISTANCE, atol=0):
        return False
    one, other = map(torch.linalg.eigvalsh, tables)
    return bool((one - other).abs().max() <= SAME_DISTANCE * one.abs().max())


class Passed(NamedTuple):
    """What the user passed of one side, as it came."""

    label: str  # what messages call it; only X and Y can be given as `D_X` and `D_Y`
    space: Any = None
    table: Any = None  # distances that were given as `D_X` or `D_Y`
    weights: Any = None


class GivenSpace(NamedTuple):
    """One side as the user gave it: points, a graph or a provider."""

    name: str  # what messages call it, X or Y
    points: Tensor | None = None
    graph: Any = None  # a surface too
    provider: DistanceProvider | None = None  # also that of a given matrix
    computed: bool = False  # whether its distances were computed from a graph
    steps: bool | None = None  # whether all edges of the graph have length one, if it is one

    @property
    def n(self) -> int:
        """Number of points."""
        if self.provider is not None:
            return self.provider.n
        return int((self.graph if self.points is None else self.points).shape[0])


def with_area(name: str, value: Any, weights: Any) -> tuple[Any, Any]:
    """Read a surface, whose vertices are weighted by area; leave all else as it is."""
    surface = None if _is_array(value) else as_surface(name, value)
    if surface is None:
        return value, weights
    return surface, surface.weights if weights is None else weights


def with_relations(name: str, value: Any, table: Any) -> tuple[Any, Any]:
    """Read a stack of given tables, one for each relation, as a space; leave all else as it is."""
    if value is not None or not are_tables(table):
        return value, table
    return DirectedDistance(table, name=f"D_{name}"), None


def _is_array(value: Any) -> bool:
    """Whether a value is an array, which is neither a surface nor a graph, or nothing."""
    return value is None or isinstance(value, (np.ndarray, Tensor))


def recognise(passed: Passed, spec: Any, *, signed: bool = False) -> GivenSpace:
    """Tell points, graphs, providers and matrices apart."""
    # `spec` is what `distances` says of this side; `signed` matrices may have negative entries.
    name, value, table, _ = passed
    table_name = f"D_{name}"
    given = [item for item in (value, table) if item is not None]
    if isinstance(spec, DistanceProvider):
        if given:
            other = name if table is None else table_name
            raise InvalidInputError(
                f"`distances` gives a provider for this side, so `{other}` would not be used. "
                "Pass one of them."
            )
        return GivenSpace(name, provider=spec)
    if len(given) != 1:
        what = "neither was given" if not given else "both were given"
        raise InvalidInputError(
            f"Pass exactly one of `{name}` (points or a graph) and `{table_name}` (a distance "
            f"matrix); {what}."
        )
    if isinstance(given[0], DistanceProvider):
        return GivenSpace(name, provider=given[0])
    if table is not None:
        if not (_is_array(table) or is_sparse(table)) and (
            has_directions(table) or as_graph(table_name, table) is not None
        ):
            raise InvalidTypeError(
                f"`{table_name}` is a graph. Pass it as `{name}`: its points are as far apart as "
                "its shortest paths are long."
            )
        matrix = check_distances(table_name, table, signed=signed)
        return GivenSpace(name, provider=PrecomputedDistance.unchecked(matrix))
    directed, graph = False, None
    if not _is_array(value):
        directed, graph = has_directions(value), as_surface(name, value)
        if graph is None:
            known = directed or isinstance(value, Geodesics)
            graph = value if known else as_graph(name, value)
    if graph is not None:
        if spec not in (*BY_SIZE, *from_graphs()):
            raise InvalidInputError(
                f"`distances={spec!r}` needs points; `{name}` is a "
                f"{'surface' if isinstance(graph, Surface) else 'graph'}. Use "
                f"{listed([*BY_SIZE, *from_graphs()])}."
            )
        if directed:
            edges = as_graph(name, value, directed=True)
            provider = DirectedDistance.of_graph(graph)
            return GivenSpace(name, provider=provider, computed=True, steps=_only_steps(edges))
        return GivenSpace(name, graph=graph, steps=_only_steps(graph))
    if callable(value):
        raise InvalidTypeError(
            f"`{name}` is a function. Wrap it: torchgw.distances.CallableDistance(n, function)."
        )
    points = check_points(name, value)
    warn_of_transposed_points(name, points)
    square = points.shape[0] == points.shape[1] and bool(points.any())
    if square and bool((points.diagonal() == 0).all()) and torch.equal(points, points.T):
        _warn_of_distances(name, spec)
    return GivenSpace(name, points=points)


def _only_steps(graph: Any) -> bool | None:
    """Whether all edges have length one; ``None`` where there are none, or no lengths to see."""
    lengths = getattr(graph, "data", None)
    if not isinstance(lengths, np.ndarray) or lengths.dtype.kind not in "fiub":
        return None
    lengths = lengths[lengths != 0]
    return bool((lengths == 1).all()) if len(lengths) else None


def _warn_of_distances(name: str, spec: Any) -> None:
    """Warn that what looks like a matrix of distances is taken as points; refuse "precomputed"."""
    what = f"`{name}` is a square symmetric matrix with a zero diagonal"
    wrapped = "torchgw.distances.PrecomputedDistance(torch.as_tensor(matrix))"
    has_table = name in ("X", "Y")
    instead = f"`D_{name}`" if has_table else wrapped
    if spec == "precomputed":
        raise InvalidInputError(
            f"{what}, and 'precomputed' means geodesics computed once from points. Pass a "
            f"given matrix as {instead}."
        )
    if has_table:
        instead += f", or as {wrapped}; --distance-matrices on the command line"
    warn_user(
        f"{what}, and is taken as points. Pass a matrix of distances as {instead}. Pass the "
        "edge lengths of a graph as a scipy.sparse.csr_array.",
        TorchGWWarning,
    )
