"""Graphs as tensors: adjacency matrices that are checked, and symmetric edges on a device."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy
import torch
from torch import Tensor

from torchgw._boundary.arrays import SAME_DISTANCE
from torchgw._errors import InvalidInputError, InvalidTypeError
from torchgw._tensors.operations import same

# Vertices that are worked on at once: to sort their edges or lay them out takes 70 to 80 bytes an
# edge, distances to landmarks up to 1,000 bytes each. [L1500, L1502, L1730]
VERTICES = 2**18


class Edges(NamedTuple):
    """Both directions of every edge, sorted by first and second vertex."""

    start: Tensor  # (n + 1,) int64, first edge of each vertex
    vertex: Tensor  # (e,) int64, where each edge leads to
    length: Tensor  # (e,) float64

    @property
    def n(self) -> int:
        """Number of vertices."""
        return len(self.start) - 1

    @property
    def degree(self) -> Tensor:
        """Number of edges of each vertex, shape (n,)."""
        return self.start.diff()

    @property
    def source(self) -> Tensor:
        """Vertex that each edge leads from, shape (e,)."""
        return torch.repeat_interleave(self.degree, output_size=len(self.vertex))

    def to(self, device: torch.device) -> Edges:
        """Move the graph to another device."""
        return Edges(*(part.to(device) for part in self))

    def csr(self) -> scipy.sparse.csr_matrix:
        """Convert to a SciPy matrix, keeping edges of length zero."""
        start, vertex, length = (part.cpu().numpy() for part in self)
        # SciPy would find the smallest index type itself, by reading all indices
        kind = np.int32 if max(len(vertex), self.n) < 2**31 else np.int64
        return scipy.sparse.csr_matrix(
            (length, vertex.astype(kind), start.astype(kind)), shape=(self.n, self.n)
        )


def from_csr(graph: scipy.sparse.csr_matrix) -> Edges:
    """Convert a symmetric SciPy matrix to tensors on the CPU."""
    if not graph.has_canonical_format:
        graph = graph.copy()
        graph.sum_duplicates()
    return Edges(
        torch.from_numpy(graph.indptr.astype(np.int64)),
        torch.from_numpy(graph.indices.astype(np.int64)),
        torch.from_numpy(graph.data),
    )


def symmetric_edges(n: int, source: Tensor, target: Tensor, length: Tensor) -> Edges:
    """Unite directed edges (e,) and their reverses, for n vertices, at most 2^31."""
    # by parts of the vertices, as to sort takes several times the memory of what is sorted
    parts, counted = list[Edges](), 0
    for low in range(0, n, VERTICES):
        here = torch.arange(low, min(low + VERTICES, n), device=source.device)
        parts.append(_edges_of(here, n, source, target, length))
        parts[-1].start.add_(counted)
        counted += len(parts[-1].vertex)
    starts, vertices, lengths = (list(some) for some in zip(*parts, strict=True))
    del parts
    starts.append(torch.full((1,), counted, device=source.device))
    start, vertex = torch.cat(starts), torch.cat(vertices)
    del vertices
    return Edges(start, vertex, torch.cat(lengths))


def _edges_of(here: Tensor, n: int, source: Tensor, target: Tensor, length: Tensor) -> Edges:
    """Take the edges of consecutive vertices, in both directions; the last start is left out."""
    ahead, back = (
        ((end >= here[0]) & (end <= here[-1])).nonzero()[:, 0] for end in (source, target)
    )
    key = torch.cat([source[ahead] * n + target[ahead], target[back] * n + source[back]])
    key, order = key.sort()
    # edges that are given more than once, in either direction, have one length
    first = torch.ones_like(key, dtype=torch.bool)
    first[1:] = key[1:] != key[:-1]
    key, order = key[first], order[first]
    start = torch.searchsorted(key, here * n)
    vertex = torch.cat([target[ahead], source[back]])[order]
    return Edges(start, vertex, torch.cat([length[ahead], length[back]])[order])


def with_edges(edges: Edges, source: Tensor, target: Tensor, length: Tensor) -> Edges:
    """Add edges that a graph does not have, in both directions."""
    n = edges.n
    key, order = torch.cat([source * n + target, target * n + source]).sort()
    at = torch.searchsorted(edges.source * n + edges.vertex, key)
    at += torch.arange(len(key), device=key.device)
    old = torch.ones(len(edges.vertex) + len(key), dtype=torch.bool, device=key.device)
    old[at] = False
    vertex = torch.empty(len(old), dtype=torch.int64, device=key.device)
    lengths = torch.empty(len(old), dtype=torch.float64, device=key.device)
    vertex[old], vertex[at] = edges.vertex, torch.cat([target, source])[order]
    lengths[old], lengths[at] = edges.length, torch.cat([length, length])[order]
    before = torch.searchsorted(key, torch.arange(n + 1, device=key.device) * n)
    return Edges(edges.start + before, vertex, lengths)


def components(edges: Edges) -> tuple[int, Tensor]:
    """Count the connected components and number the component of each vertex, shape (n,)."""
    # The smallest vertex of each tree hooks on to a smaller neighbouring one, and trees are
    # flattened by pointer jumping, until no edge has its ends in two trees.
    source, target = edges.source, edges.vertex
    root = torch.arange(edges.n, device=source.device)
    while len(source):
        root.scatter_reduce_(0, source, target, "amin")
        while not same(above := root[root], root):
            root = above
        # edges between trees are edges between their roots
        source, target = root[source], root[target]
        apart = source != target
        source, target = source[apart], target[apart]
    # a root is its own; they are numbered in order
    number = (root == torch.arange(edges.n, device=root.device)).cumsum(0)
    return int(number[-1]), number[root] - 1


def symmetrise(graph: Any) -> scipy.sparse.csr_matrix:
    """Unite a directed graph and its reverse, with the larger weight where they differ.

    Unlike ``graph.maximum(graph.T)`` this keeps explicit zeros, the edges between duplicates.
    """
    graph = scipy.sparse.csr_matrix(graph, dtype=np.float64, copy=True)
    tiny = np.finfo(np.float64).tiny
    # a tiny number stands for zero, because the sparse maximum drops explicit zeros
    graph.data[graph.data == 0] = tiny
    graph = scipy.sparse.csr_matrix(graph.maximum(graph.T))
    graph.data[graph.data == tiny] = 0
    graph.sort_indices()
    return graph


def validate_graph(
    graph: Any, name: str = "graph", *, directed: bool = False
) -> scipy.sparse.csr_matrix:
    """Convert a graph given by the user to float64 CSR, symmetric unless it may be directed.

    Parameters
    ----------
    graph : SciPy sparse array or matrix, shape (n, n)
        Symmetric edge lengths. A boolean graph has edges of length one where it is ``True``; in
        others an explicit zero is an edge of length zero. Repeated COO entries are summed. Both as
        in SciPy.
    name : str
        Name of the graph in errors.
    directed : bool
        Whether edges may have one direction, from the row to the column.

    Raises
    ------
    InvalidTypeError
        If it is not sparse.
    InvalidInputError
        If it is not square, has a negative or non-finite weight, or is directed and must not be.
    """
    if not scipy.sparse.issparse(graph):
        raise InvalidTypeError(
            f"`{name}` must be a SciPy sparse matrix of edge lengths; got {type(graph).__name__}. "
            "Pass points to `knn_graph`, or a full distance matrix to `PrecomputedDistance`."
        )
    if graph.shape == (0, 0):
        raise InvalidInputError(f"`{name}` is a graph without nodes.")
    if graph.ndim != 2 or graph.shape[0] != graph.shape[1]:
        raise InvalidInputError(
            f"`{name}` is sparse, which stands for a graph: it must be square, (n, n) with n >= 1, "
            f"a row and a column for each node; got {graph.shape}. Pass sparse points as "
            f"`{name}.toarray()`."
        )
    if graph.dtype.kind not in "buif":
        raise InvalidInputError(f"`{name}` must have real weights; got dtype {graph.dtype}.")
    unweighted = graph.dtype.kind == "b"
    graph = scipy.sparse.csr_matrix(graph, dtype=np.float64, copy=True)
    graph.sum_duplicates()
    if unweighted:
        graph.eliminate_zeros()
        graph.data[:] = 1.0
    bad = ~np.isfinite(graph.data) | (graph.data < 0)
    if bad.any():
        raise InvalidInputError(
            f"`{name}` must have finite, non-negative edge lengths; got {int(bad.sum())} others, "
            f"such as {graph.data[bad][0]}. Leave out edges of infinite length; turn similarities "
            "into distances first."
        )
    return graph if directed else _check_symmetric(graph, name)


def _check_symmetric(graph: scipy.sparse.csr_matrix, name: str) -> scipy.sparse.csr_matrix:
    """Refuse a directed graph; in another, average what differs by rounding."""
    reverse = scipy.sparse.csr_matrix(graph.T)
    reverse.sort_indices()
    same_edges = np.array_equal(graph.indptr, reverse.indptr) and np.array_equal(
        graph.indices, reverse.indices
    )
    # relative to the lengths, which may be 1e-9
    if not same_edges or not np.allclose(graph.data, reverse.data, SAME_DISTANCE, atol=0):
        raise InvalidInputError(
            f"`{name}` must be symmetric; got a directed graph (a nearest-neighbour graph is one "
            "until it is symmetrised). Pass `graph.maximum(graph.T)`, or "
            "`torchgw.distances.symmetrise(graph)`, which keeps edges of length zero; of PyTorch "
            "Geometric data both directions of each edge, as its `to_undirected` gives them. Where "
            "directions matter, pass `torchgw.distances.DirectedDistance.of_graph(graph)`."
        )
    graph.data = (graph.data + reverse.data) / 2
    return graph
