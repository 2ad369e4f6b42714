"""Stored distances, symmetric or with a direction, and geodesics of all pairs to be stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy
import torch
from torch import Tensor

from torchgw._boundary.arrays import (
    check_finite,
    check_magnitude,
    check_tensor,
    symmetric_advice,
    to_tensor,
)
from torchgw._boundary.graphs import as_graph
from torchgw._errors import GraphWarning, InvalidInputError, warn_user
from torchgw._tensors.operations import BLOCK_BYTES
from torchgw.distances._graph.edges import validate_graph
from torchgw.distances.base import DistanceProvider, Entrywise
from torchgw.distances.geodesics import path_lengths
from torchgw.distances.graph import as_geodesics

if TYPE_CHECKING:
    from typing_extensions import Self

# Relative asymmetry that passes: nearly that of float32 distances from x.x + y.y - 2 x.y. [L314]
_SYMMETRY_TOLERANCE = 1e-3


class PrecomputedDistance(DistanceProvider):
    """A stored (n, n) distance matrix.

    Parameters
    ----------
    matrix : Tensor, shape (n, n), float32/64
        Symmetric and finite. It is kept, not copied. Any symmetric costs will do: no other property
        of distances is used.

    Raises
    ------
    InvalidTypeError
        If the matrix is not a tensor.
    InvalidInputError
        If it is not square, finite, symmetric, and of float32 or float64.

    Examples
    --------
    >>> import torch
    >>> from torchgw.distances import PrecomputedDistance
    >>> PrecomputedDistance(torch.tensor([[0.0, 2.0], [2.0, 0.0]])).maximum()
    2.0
    """

    capturable = True

    def __init__(self, matrix: Tensor) -> None:
        check_tensor("matrix", matrix)
        _check_square("matrix", matrix, " Pass points to PointDistance.")
        self._hold(matrix)
        self._check()

    @classmethod
    def unchecked(cls, matrix: Tensor) -> Self:
        """Make the provider of a table that needs no check, because it was computed here."""
        provider = cls.__new__(cls)
        provider._hold(matrix)
        return provider

    def _hold(self, table: Tensor) -> None:
        self.table = self._matrix = table
        self.n, self.device, self.dtype = table.shape[0], table.device, table.dtype

    def columns(self, index: Tensor) -> Tensor:
        """Read D[:, index], a view of gathered rows, which are contiguous."""
        return self._matrix[index].T

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        if self._lies_at(device, dtype):
            return self
        return self.unchecked(self.table.to(device, dtype))

    def matrix(self) -> Tensor:
        return self._matrix

    def subset(self, index: Tensor) -> Self:
        return self.unchecked(self.table[index][:, index])

    def apply(self, values: Tensor) -> Tensor:
        return self._matrix @ values

    def mean_square(self, weights: Tensor) -> Tensor:
        """Compute (D * D) @ weights, a block of rows at a time."""
        return torch.cat([(block * block) @ weights for block in self._row_blocks()])

    def maximum(self) -> float:
        return float(self.table.max())

    def _row_blocks(self) -> tuple[Tensor, ...]:
        return self._matrix.split(max(1, BLOCK_BYTES // (self.n * self.dtype.itemsize)))

    def _check(self) -> None:
        """Refuse a matrix that is not finite or not symmetric, a block at a time."""
        largest = self._matrix.detach().abs().max()
        if not bool(largest.isfinite()):
            raise InvalidInputError(
                "`matrix` must be finite; got NaN or infinity. Replace unreachable pairs by a "
                "large finite distance, such as 1.5 times the largest one."
            )
        start = 0
        for block in self._row_blocks():
            gap = (block - self._matrix[:, start : start + block.shape[0]].T).detach().abs().max()
            if bool(gap > _SYMMETRY_TOLERANCE * largest):
                raise InvalidInputError(
                    f"`matrix` must be symmetric; entries differ from their transposes by up to "
                    f"{float(gap):.3g}. {symmetric_advice('matrix', self._matrix)}"
                )
            start += block.shape[0]


def _check_square(name: str, table: Tensor, advice: str = "") -> None:
    if table.ndim != 2 or table.shape[0] != table.shape[1] or table.shape[0] == 0:
        raise InvalidInputError(
            f"`{name}` must have shape (n, n) with n >= 1; got {tuple(table.shape)}.{advice}"
        )


def geodesic_matrix(graph: Any, *, n_jobs: int | None = None) -> Tensor:
    """Compute the shortest-path lengths of all pairs of vertices.

    Parameters
    ----------
    graph : SciPy sparse array or matrix, or Geodesics
        Symmetric edge lengths, or what :func:`torchgw.distances.connect` returned.
    n_jobs : int or None
        Worker processes, see :func:`geodesic_matrices`.

    Returns
    -------
    Tensor, shape (n, n), float64, on the CPU
        For :class:`PrecomputedDistance`.
    """
    return geodesic_matrices([graph], n_jobs=n_jobs)[0]


def geodesic_matrices(graphs: Sequence[Any], *, n_jobs: int | None = None) -> list[Tensor]:
    """Compute the shortest-path lengths of all pairs of several graphs, side by side.

    Parameters
    ----------
    graphs : sequence of SciPy sparse arrays or matrices, or Geodesics
        Each as in :func:`geodesic_matrix`.
    n_jobs : int or None
        Worker processes, which share the sources of all graphs; ``None`` takes every core. Small
        graphs are computed in this process, because starting others takes longer.

    Returns
    -------
    list of Tensor, shapes (n, n), float64, on the CPU
    """
    geodesics = [as_geodesics(graph) for graph in graphs]
    return path_lengths([(each, np.arange(each.n)) for each in geodesics], n_jobs=n_jobs)


def are_tables(value: Any) -> bool:
    """Tell whether a value is a stack of tables, or a sequence of them, one for each relation."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(getattr(part, "ndim", 0) == 2 for part in value)
    return getattr(value, "ndim", 0) == 3


class DirectedDistance(PrecomputedDistance):
    """A stored table T of costs, (n, n), or one for each of several relations, (r, n, n).

    T_ik is the cost from point i to point k. :func:`torchgw.solve` takes it as X or Y, compares
    costs in both directions, and those of a relation with the same relation of the other side: its
    objective is the mean over relations. To weigh one, multiply its tables on both sides by the
    root of the weight. The methods of a provider answer for the mean of T and T' over relations;
    :meth:`ways` for T of each and then T' of each.

    Parameters
    ----------
    table : array-like, shape (n, n) or (r, n, n), or sequence of tables (n, n), float32/64
        Finite costs, of any sign. A tensor that requires a gradient gets one from
        ``solve(..., differentiable=...)``.
    name : str
        What errors call it.

    Raises
    ------
    InvalidInputError
        If it is not square and finite.

    Examples
    --------
    >>> import torch
    >>> from torchgw.distances import DirectedDistance
    >>> DirectedDistance(torch.tensor([[0.0, 3.0], [1.0, 0.0]])).matrix()
    tensor([[0., 2.],
            [2., 0.]])
    """

    directed = True

    def __init__(self, table: Any, *, name: str = "table") -> None:
        if isinstance(table, Tensor) and table.requires_grad:
            self.given = table
        if are_tables(table):
            parts = [to_tensor(f"{name}[{place}]", part) for place, part in enumerate(table)]
            shapes = {tuple(part.shape) for part in parts}
            if len(shapes) > 1:
                raise InvalidInputError(
                    f"`{name}` must have one shape for all relations; got {sorted(shapes)}."
                )
            table = torch.stack([part.to(parts[0].device) for part in parts])
        table = to_tensor(name, table)
        if not table.dtype.is_floating_point:
            table = table.double()
        _check_square(name, table[0] if table.ndim == 3 and len(table) > 0 else table)
        check_finite(name, table, "Give pairs without a path a large finite cost.")
        check_magnitude(name, table)
        self._hold(table)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out of pickles and copies a tensor that may be a step of the caller's graph."""
        return {name: part for name, part in vars(self).items() if name != "given"}

    def _hold(self, table: Tensor) -> None:
        super()._hold(table)
        self.n = table.shape[-1]
        self._matrix = (table + table.mT) / 2 if table.ndim == 2 else (table + table.mT).mean(0) / 2

    @classmethod
    def of_graph(cls, graph: Any, *, fill: float = 1.5) -> DirectedDistance:
        """Compute the lengths of the shortest paths of a directed graph.

        Parameters
        ----------
        graph : graph of n vertices
            SciPy sparse array or matrix, shape (n, n), of the lengths of the edges from the vertex
            of the row to that of the column; or a NetworkX graph, an igraph graph or PyTorch
            Geometric data, whose edges without a weight have length 1.
        fill : float
            Distance of pairs without a path over the largest path length, at least 1.

        Returns
        -------
        DirectedDistance
            float64, on the CPU.

        Raises
        ------
        InvalidTypeError, InvalidInputError
            If it is no graph, not square, or has lengths that are negative or not finite; if
            ``fill`` is below 1.

        Warns
        -----
        GraphWarning
            If there are pairs without a path.
        """
        if not (np.isfinite(fill) and fill >= 1):
            raise InvalidInputError(f"`fill` must be finite and at least 1; got {fill}.")
        known = as_graph("graph", graph, directed=True)
        graph = validate_graph(graph if known is None else known, directed=True)
        table = scipy.sparse.csgraph.dijkstra(graph)
        reached = np.isfinite(table)
        if not reached.all():
            largest = float(table[reached].max()) or 1.0
            missing = int(table.size - reached.sum())
            warn_user(
                "Some pairs have no path in their direction, and as their distance "
                f"{fill} times the largest path length, {fill * largest:.3g}: {missing} of "
                f"{table.size}.",
                GraphWarning,
            )
            table[~reached] = fill * largest
        return cls.unchecked(torch.from_numpy(table))

    def ways(self) -> tuple[DistanceProvider, ...]:
        """List T of each relation, then T', each read in its direction."""
        return (*self.relations(), *map(_OneWay.unchecked, self._relations().mT))

    def relations(self) -> tuple[DistanceProvider, ...]:
        return tuple(map(_OneWay.unchecked, self._relations()))

    def _relations(self) -> Tensor:
        return self.table if self.table.ndim == 3 else self.table[None]

    def subset(self, index: Tensor) -> Self:
        return self.unchecked(self.table[..., index, :][..., index])

    def mapped(self, function: Entrywise) -> Self:
        return self.unchecked(function(self.table))

    def scaled(self, factor: float) -> DirectedDistance:
        return self.mapped(lambda costs: costs * factor)

    def mean_square(self, weights: Tensor) -> Tensor:
        """Compute the mean of (T * T) @ weights and (T' * T') @ weights."""
        square = self.table.square()
        found = (square @ weights + square.mT @ weights) / 2
        return found if found.ndim == 1 else found.mean(0)


class _OneWay(PrecomputedDistance):
    """A stored table that is no mean over directions, so that columns are not rows."""

    directed = True

    mapped = DirectedDistance.mapped

    def columns(self, index: Tensor) -> Tensor:
        return self.table[:, index]
