"""Graphs of other packages become matrices of edge lengths here."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from torchgw._boundary.arrays import to_tensor
from torchgw._errors import InvalidInputError, InvalidTypeError

__all__ = ["as_graph"]


def as_graph(name: str, value: Any) -> scipy.sparse.spmatrix | None:
    """Convert a graph of SciPy, NetworkX or PyTorch Geometric; ``None`` if the value is none."""
    if scipy.sparse.issparse(value):
        return value
    if hasattr(value, "to_homogeneous"):
        raise InvalidTypeError(
            f"`{name}` must be a graph of one kind of nodes; got a {type(value).__name__}. Pass "
            "data.to_homogeneous()."
        )
    if hasattr(value, "edge_index") and hasattr(value, "num_nodes"):
        return _from_edge_index(name, value)
    if hasattr(value, "adjacency") and hasattr(value, "number_of_nodes"):
        return _from_networkx(name, value)
    return None


def _from_edge_index(name: str, value: Any) -> scipy.sparse.csr_array:
    """Convert PyTorch Geometric data; a repeated edge is one edge, not the sum of its weights."""
    if value.edge_index is None:
        raise InvalidTypeError(
            f"`{name}.edge_index` must be the edges, integers of shape (2, e); got None. Pass "
            "points as an array, such as data.x or data.pos."
        )
    n = value.num_nodes
    if not isinstance(n, Integral) or n < 1:
        raise InvalidInputError(f"`{name}.num_nodes` must be a positive integer; got {n!r}.")
    index = to_tensor(f"{name}.edge_index", value.edge_index).cpu().numpy()
    if index.ndim != 2 or index.shape[0] != 2 or index.dtype.kind not in "iu":
        raise InvalidInputError(
            f"`{name}.edge_index` must be integers of shape (2, e), a column per edge; got "
            f"{index.dtype} of shape {index.shape}."
        )
    if index.size and not 0 <= index.min() <= index.max() < n:
        raise InvalidInputError(
            f"`{name}.edge_index` must be within 0 and num_nodes - 1 = {n - 1}; got "
            f"{index.min()} to {index.max()}."
        )
    data = _edge_lengths(name, value, index.shape[1])
    keys, first = np.unique(index[0].astype(np.int64) * int(n) + index[1], return_index=True)
    return scipy.sparse.csr_array((data[first], (keys // n, keys % n)), shape=(n, n))


def _edge_lengths(name: str, value: Any, count: int) -> NDArray[np.float64]:
    """Read the lengths of the edges of PyTorch Geometric data, 1 if it has none."""
    # its from_networkx writes ``weight``
    for field in ("edge_weight", "weight"):
        weight = getattr(value, field, None)
        if weight is None:
            continue
        lengths = to_tensor(f"{name}.{field}", weight).cpu().double().numpy()
        if lengths.shape != (count,):
            raise InvalidInputError(
                f"`{name}.{field}` must have shape ({count},), one weight per edge; got "
                f"{lengths.shape}."
            )
        return np.asarray(lengths)
    features = getattr(value, "edge_attr", None)
    if count and tuple(getattr(features, "shape", ())) in ((count,), (count, 1)):
        raise InvalidInputError(
            f"`{name}.edge_attr` has one number per edge, which may be its length or a feature. "
            "Set data.edge_weight = data.edge_attr.view(-1) for lengths, or data.edge_attr = None "
            "to count steps."
        )
    return np.ones(count)


def _from_networkx(name: str, value: Any) -> scipy.sparse.csr_array:
    """Convert a NetworkX graph, its nodes in their order; an edge without a weight has length 1."""
    if value.is_directed():
        raise InvalidInputError(
            f"`{name}` must be an undirected NetworkX graph; got a directed one. "
            "Pass graph.to_undirected()."
        )
    if value.is_multigraph():
        raise InvalidInputError(
            f"`{name}` must have one edge between two nodes; got a NetworkX multigraph. "
            "Pass networkx.Graph(graph), which keeps one of parallel edges."
        )
    nodes = {node: position for position, node in enumerate(value)}
    entries = [
        (nodes[source], nodes[target], data.get("weight", 1.0))
        for source, neighbours in value.adjacency()
        for target, data in neighbours.items()
    ]
    odd = [weight for _, _, weight in entries if not isinstance(weight, Real)]
    if odd:
        raise InvalidTypeError(
            f"`{name}` must have numbers as edge attribute 'weight'; got {odd[0]!r}."
        )
    rows, columns, weights = zip(*entries, strict=True) if entries else ((), (), ())
    shape = (len(nodes), len(nodes))
    return scipy.sparse.csr_array((weights, (rows, columns)), shape=shape, dtype=float)
