"""What the user gave of each side, recognised: points, a graph, a provider or a matrix."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchgw._boundary.arrays import check_distances, check_points
from torchgw._boundary.checks import listed
from torchgw._boundary.graphs import as_graph, has_directions
from torchgw._errors import InvalidInputError, InvalidTypeError, TorchGWWarning, warn_user
from torchgw._problem.named import BY_SIZE, from_graphs
from torchgw._problem.plausible import warn_of_transposed_points
from torchgw.distances.base import DistanceProvider
from torchgw.distances.geodesics import Geodesics
from torchgw.distances.precomputed import DirectedDistance, PrecomputedDistance


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
    graph: Any = None
    provider: DistanceProvider | None = None  # also that of a given matrix
    computed: bool = False  # whether its distances were computed from a graph
    steps: bool | None = None  # whether all edges of the graph have length one, if it is one

    @property
    def n(self) -> int:
        """Number of points."""
        if self.provider is not None:
            return self.provider.n
        return int((self.graph if self.points is None else self.points).shape[0])


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
        matrix = check_distances(table_name, table, signed=signed)
        return GivenSpace(name, provider=PrecomputedDistance.unchecked(matrix))
    directed = has_directions(value)
    graph = value if directed or isinstance(value, Geodesics) else as_graph(name, value)
    if graph is not None:
        if spec not in (*BY_SIZE, *from_graphs()):
            raise InvalidInputError(
                f"`distances={spec!r}` needs points; `{name}` is a graph. Use "
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
    if _looks_like_distances(points):
        _warn_of_distances(name, spec)
    return GivenSpace(name, points=points)


def _only_steps(graph: Any) -> bool | None:
    """Whether all edges have length one; ``None`` where there are none, or no lengths to see."""
    lengths = getattr(graph, "data", None)
    if not isinstance(lengths, np.ndarray) or lengths.dtype.kind not in "fiub":
        return None
    lengths = lengths[lengths != 0]
    return bool((lengths == 1).all()) if len(lengths) else None


def _looks_like_distances(points: Tensor) -> bool:
    if points.shape[0] != points.shape[1] or not bool(points.any()):
        return False
    return bool((points.diagonal() == 0).all()) and bool(torch.equal(points, points.T))


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
