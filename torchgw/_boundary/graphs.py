"""Graphs of other packages become matrices of edge lengths here."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from torchgw._boundary.arrays import check_shape, is_sparse, to_tensor
from torchgw._errors import InvalidInputError, InvalidTypeError

# What to do where directions matter.
_DIRECTED = (
    "; where directions matter, torchgw.solve takes the graph, as it is or as "
    "`torchgw.distances.DirectedDistance.of_graph(graph)`."
)


def as_graph(name: str, value: Any, *, directed: bool = False) -> scipy.sparse.spmatrix | None:
    """Convert a graph of SciPy, NetworkX, igraph or PyTorch Geometric; ``None`` if it is none."""
    # Edges lead from the row to the column. NetworkX and igraph say of a graph whether its edges
    # have a direction; one whose edges do is refused unless `directed`.
    if is_sparse(value):
        return value
    kinds = is_sparse, _is_geometric, _is_networkx, _is_igraph
    if isinstance(value, (list, tuple)) and any(kind(one) for one in value for kind in kinds):
        raise InvalidTypeError(
            f"`{name}` must be one graph; got a {type(value).__name__} of them. Lists of graphs "
            "are for torchgw.solve_many, torchgw.pairwise and torchgw.barycenter."
        )
    if hasattr(value, "to_homogeneous"):
        raise InvalidTypeError(
            f"`{name}` must be a graph of one kind of nodes; got a {type(value).__name__}. Pass "
            "data.to_homogeneous()."
        )
    if _is_geometric(value):
        return _from_edge_index(name, value)
    if _is_networkx(value):
        return _from_networkx(name, value, directed)
    return _from_igraph(name, value, directed) if _is_igraph(value) else None


def has_directions(value: Any) -> bool:
    """Whether a graph of NetworkX or igraph says that its edges have a direction."""
    return (_is_networkx(value) or _is_igraph(value)) and bool(value.is_directed())


def attribute_names(value: Any) -> list[str]:
    """List the names of the attributes that nodes of a graph have, those of any of them."""
    if _is_igraph(value):
        return list(value.vs.attributes())
    if _is_networkx(value):
        return list(dict.fromkeys(str(key) for _, data in value.nodes(data=True) for key in data))
    if _is_geometric(value):
        keys = value.keys() if callable(value.keys) else value.keys
        count = value.num_nodes
        return [key for key in keys if len(getattr(value[key], "shape", ())) in (1, 2)
                and value[key].shape[0] == count and not key.startswith("edge")]  # fmt: skip
    return []


def names_of(label: str, given: Any, least: int) -> list[Any]:
    """List the names of the points of a side: nodes of a graph, an index, or a list of names."""
    if _is_networkx(given):
        names = list(given)
    elif _is_igraph(given):
        names = list(given.vs["name"]) if "name" in given.vs.attributes() else [*given.vs.indices]
    elif hasattr(given, "obs_names"):
        names = list(given.obs_names)
    elif hasattr(given, "index") and hasattr(given, "iloc"):
        names = list(given.index)
    elif isinstance(given, (list, tuple, np.ndarray)) and np.ndim(given) == 1:
        names = list(given)
    else:
        raise InvalidTypeError(
            f"`{label}` must have names: a graph of NetworkX or igraph, an AnnData, a DataFrame "
            f"or a list of names; got {type(given).__name__}. Leave it out for numbers."
        )
    if len(names) < least:
        raise InvalidInputError(
            f"`{label}` must have a name for each point, at least {least}; got {len(names)}."
        )
    return names


def node_attribute(name: str, value: Any, key: str) -> NDArray[Any]:
    """Read an attribute of all nodes in their order, (n,) or (n, f), numbers or words."""
    if _is_igraph(value):
        listed = list(value.vs[key])
    elif hasattr(value, "edge_index"):
        return to_tensor(f"{name}.{key}", value[key]).cpu().numpy()
    else:
        listed = [data.get(key) for _, data in value.nodes(data=True)]
    missing = sum(item is None for item in listed)
    if missing:
        raise InvalidInputError(
            f"{missing} of the {len(listed)} nodes of `{name}` have no attribute {key!r}."
        )
    try:
        array = np.asarray(listed)
    except ValueError as error:
        raise InvalidInputError(
            f"Attribute {key!r} of `{name}` has no one shape: {error}"
        ) from error
    return array if array.dtype.kind in "biuf" else array.astype(str)


def _is_geometric(value: Any) -> bool:
    return hasattr(value, "edge_index") and hasattr(value, "num_nodes")


def _is_networkx(value: Any) -> bool:
    return hasattr(value, "adjacency") and hasattr(value, "number_of_nodes")


def _is_igraph(value: Any) -> bool:
    return hasattr(value, "get_edgelist") and hasattr(value, "vcount") and hasattr(value, "es")


def _from_igraph(name: str, value: Any, directed: bool) -> scipy.sparse.csr_array:
    """Convert an igraph graph; an edge without a weight has length 1."""
    if value.is_directed() and not directed:
        raise InvalidInputError(
            f"`{name}` must be an undirected igraph graph; got a directed one. "
            f"Pass graph.as_undirected(){_DIRECTED}"
        )
    if value.has_multiple():
        raise InvalidInputError(
            f"`{name}` must have one edge between two nodes; got parallel ones. Pass "
            "graph.copy().simplify(), which keeps one of each."
        )
    n, weighted = value.vcount(), "weight" in value.es.attributes()
    weights = list(value.es["weight"]) if weighted else [1.0] * value.ecount()
    _check_numbers(name, weights)
    ends = np.array(value.get_edgelist(), dtype=np.int64).reshape(-1, 2)
    data = np.asarray(weights, dtype=float)
    # an edge without a direction is written both ways, a loop once
    back = np.full(len(ends), not value.is_directed()) & (ends[:, 0] != ends[:, 1])
    rows = np.concatenate([ends[:, 0], ends[back, 1]])
    columns = np.concatenate([ends[:, 1], ends[back, 0]])
    data = np.concatenate([data, data[back]])
    return scipy.sparse.csr_array((data, (rows, columns)), shape=(n, n))


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
        check_shape(f"{name}.{field}", lengths, (count,), "one weight per edge")
        return lengths
    features = getattr(value, "edge_attr", None)
    if count and tuple(getattr(features, "shape", ())) in ((count,), (count, 1)):
        raise InvalidInputError(
            f"`{name}.edge_attr` has one number per edge, which may be its length or a feature. "
            "Set data.edge_weight = data.edge_attr.view(-1) for lengths, or data.edge_attr = None "
            "to count steps."
        )
    return np.ones(count)


def _from_networkx(name: str, value: Any, directed: bool) -> scipy.sparse.csr_array:
    """Convert a NetworkX graph, its nodes in their order; an edge without a weight has length 1."""
    if value.is_directed() and not directed:
        raise InvalidInputError(
            f"`{name}` must be an undirected NetworkX graph; got a directed one. "
            f"Pass graph.to_undirected(){_DIRECTED}"
        )
    if value.is_multigraph():
        raise InvalidInputError(
            f"`{name}` must have one edge between two nodes; got a NetworkX multigraph. "
            f"Pass networkx.{'Di' * directed}Graph(graph), which keeps one of parallel edges."
        )
    nodes = {node: position for position, node in enumerate(value)}
    entries = [
        (nodes[source], nodes[target], data.get("weight", 1.0))
        for source, neighbours in value.adjacency()
        for target, data in neighbours.items()
    ]
    rows, columns, weights = zip(*entries, strict=True) if entries else ((), (), ())
    _check_numbers(name, weights)
    shape = (len(nodes), len(nodes))
    return scipy.sparse.csr_array((weights, (rows, columns)), shape=shape, dtype=float)


def _check_numbers(name: str, weights: Iterable[Any]) -> None:
    """Refuse edges whose weights are no numbers."""
    for weight in weights:
        if not isinstance(weight, Real):
            raise InvalidTypeError(
                f"`{name}` must have numbers as edge attribute 'weight'; got {weight!r}."
            )
