"""Adjacency matrices of edge lengths: checked, and made symmetric."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy

from torchgw._errors import InvalidInputError, InvalidTypeError

# The two weights of an edge may differ by this share, which counts as rounding. [L302]
_SYMMETRY_TOLERANCE = 1e-5


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
    if not same_edges or not np.allclose(graph.data, reverse.data, _SYMMETRY_TOLERANCE, atol=0):
        raise InvalidInputError(
            f"`{name}` must be symmetric; got a directed graph (a nearest-neighbour graph is one "
            "until it is symmetrised). Pass `graph.maximum(graph.T)`, or "
            "`torchgw.distances.symmetrise(graph)`, which keeps edges of length zero; of PyTorch "
            "Geometric data both directions of each edge, as its `to_undirected` gives them. Where "
            "directions matter, pass `torchgw.distances.DirectedDistance.of_graph(graph)`."
        )
    graph.data = (graph.data + reverse.data) / 2
    return graph
