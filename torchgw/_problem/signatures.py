"""Features of the nodes of graphs by name: what is around a node, comparable across graphs."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._boundary.arrays import check_distances
from torchgw._boundary.graphs import as_graph, attribute_names, node_attribute
from torchgw._errors import InvalidInputError
from torchgw._problem.limits import CPU
from torchgw.distances import Geodesics, validate_graph
from torchgw.distances.base import BLOCK_ENTRIES

SignatureName = Literal["degree", "clustering", "heat", "wl"]
Array = NDArray[np.float64]

# Share of entries off the diagonal up to which a given matrix is that of a graph: of distances
# hardly any are zero. [L339]
_GRAPH_SHARE = 0.5
# Times of the heat kernel, each twice the one before. Eigenvalues are at most 2, so after the last
# only communities are left to see. [L339]
HEAT_TIMES = [2.0**power for power in range(5)]
# Times that degrees are averaged over neighbours. [L339]
_ROUNDS = 3


def is_signature(features: Any) -> bool:
    """Whether features are signatures that are made from the edges, not attributes or arrays."""
    return isinstance(features, str) and features in get_args(SignatureName)


class Scaling(NamedTuple):
    """What features of all nodes are reduced by: their mean, and a unit by column or of all."""

    middle: Array
    unit: Any


def named_features(
    features: Any, sides: tuple[Any, Any], tables: tuple[Any, Any]
) -> tuple[Any, Any] | None:
    """Replace a name by the features of both graphs, (n, q) and (m, q) float64; keep a pair."""
    # `sides` are X and Y, `tables` D_X and D_Y, as the user gave them
    if not isinstance(features, str):
        found: tuple[Any, Any] | None = features
        return found
    (first, second), _ = features_of_all(
        features, [*zip("XY", sides, tables, strict=True)], "a pair of arrays"
    )
    return first, second


def features_of_all(
    name: str, spaces: list[tuple[str, Any, Any]], instead: str, known: Scaling | None = None
) -> tuple[list[Tensor], Scaling | None]:
    """Compute the features of this name of all spaces, and what they were reduced by."""
    # A space is what messages call it, a graph, and its table if it was given as one. All are
    # divided by the same numbers, those that are `known` or else so that a column has mean zero and
    # the rows a total variance of one over all nodes. Words are 0/1 columns, which are not divided.
    if is_signature(name):
        raw = [_SIGNATURES[name](_adjacency(name, *space)) for space in spaces]
    else:
        raw = _attributes(name, spaces, instead)
        if raw[0].dtype.kind == "U":
            words = np.unique(np.concatenate(raw))
            # different words are at distance one
            return [torch.from_numpy((part[:, None] == words) / 2**0.5) for part in raw], None
        raw = [part.reshape(len(part), -1).astype(float) for part in raw]
    if known is None:
        pooled = np.concatenate(raw)
        spread = pooled.std(0)
        if is_signature(name):
            # a column that is constant up to rounding tells no node from another
            spread[spread <= 1e-9 * np.abs(pooled).max()] = np.inf
            unit = spread * max(1, np.isfinite(spread).sum()) ** 0.5
        else:
            unit = spread.max() * pooled.shape[1] ** 0.5 or 1.0
        known = Scaling(pooled.mean(0), unit)
    return [torch.from_numpy((part - known.middle) / known.unit) for part in raw], known


def _attributes(key: str, spaces: list[tuple[str, Any, Any]], instead: str) -> list[Array]:
    """Read an attribute of the nodes of all graphs, of one kind and width."""
    for label, graph, _ in spaces:
        names = attribute_names(graph)
        if key not in names:
            raise InvalidInputError(
                f"`features` must be one of {', '.join(map(repr, get_args(SignatureName)))}, an "
                f"attribute of the nodes of all graphs, or {instead}; got {key!r}, and nodes of "
                f"`{label}` have {', '.join(map(repr, names)) or 'none'}."
            )
    found = [node_attribute(label, graph, key) for label, graph, _ in spaces]
    first = found[0]
    for part, (label, _, _) in zip(found, spaces, strict=True):
        if (part.dtype.kind == "U", part.shape[1:]) != (first.dtype.kind == "U", first.shape[1:]):
            raise InvalidInputError(
                f"Attribute {key!r} must be of one kind in all graphs; got {first.dtype} of shape "
                f"{first.shape} of `{spaces[0][0]}` and {part.dtype} of shape {part.shape} of "
                f"`{label}`."
            )
    return found


def _adjacency(name: str, label: str, side: Any, table: Any) -> scipy.sparse.csr_array:
    """Find which nodes of a side are joined, 0/1 and without loops; refuse what is no graph."""
    given: Any = None
    what = f"`{label}` is a {type(side).__name__}"
    if table is not None:
        matrix = check_distances(f"D_{label}", table)
        given = edges_of(matrix)
        what = f"of `D_{label}` {_edge_share(matrix):.0%} of the entries are not zero"
    elif isinstance(side, Geodesics):
        given = scipy.sparse.csr_array(side.graph, copy=True)
    else:
        graph = as_graph(label, side)
        given = None if graph is None else scipy.sparse.csr_array(validate_graph(graph, label))
    if given is None:
        raise InvalidInputError(
            f"`features={name!r}` is made from the edges of a graph on both sides, and {what}. "
            "Pass graphs as X and Y (SciPy sparse, NetworkX, igraph, PyTorch Geometric data), or "
            "adjacency matrices as D_X and D_Y, at most half of whose entries are not zero; or "
            "pass your own features=(F_X, F_Y)."
        )
    # edges of length zero are edges
    given.data = np.ones(len(given.data))
    rows, columns = given.nonzero()
    off = rows != columns
    ones = np.ones(int(off.sum()))
    return scipy.sparse.csr_array((ones, (rows[off], columns[off])), shape=given.shape)


def edges_of(matrix: Tensor) -> scipy.sparse.csr_array | None:
    """Find which entries of a matrix are edges; ``None`` where too many would be."""
    if _edge_share(matrix) > _GRAPH_SHARE:
        return None
    return scipy.sparse.csr_array((matrix != 0).cpu().numpy())


def _edge_share(matrix: Tensor) -> float:
    """Share of the entries off the diagonal that are not zero."""
    n = len(matrix)
    count = int(matrix.count_nonzero()) - int(matrix.diagonal().count_nonzero())
    return count / max(1, n * (n - 1))


def _degree(adjacency: scipy.sparse.csr_array) -> Array:
    """Compute log(1 + degree), (n, 1)."""
    return np.log1p(_degrees(adjacency))[:, None]


def _degrees(adjacency: scipy.sparse.csr_array) -> Array:
    return np.asarray(adjacency.sum(1), dtype=np.float64).ravel()


def _clustering(adjacency: scipy.sparse.csr_array) -> Array:
    """Compute the share of the pairs of a node's neighbours that are joined, (n, 1)."""
    triangles = np.asarray((adjacency @ adjacency).multiply(adjacency).sum(1)).ravel()
    degree = _degrees(adjacency)
    return np.asarray(triangles / np.maximum(degree * (degree - 1), 1))[:, None]


def _heat(adjacency: scipy.sparse.csr_array) -> Array:
    """Compute the diagonal of exp(-t L) at some times, L the normalised Laplacian, (n, q)."""
    n = adjacency.shape[0]
    degree = _degrees(adjacency)
    root = scipy.sparse.diags_array(1 / np.sqrt(np.maximum(degree, 1)))
    # a node without edges keeps its heat
    own = scipy.sparse.diags_array(np.asarray(degree > 0, dtype=np.float64))
    laplacian = scipy.sparse.csr_array(own - root @ adjacency @ root)
    # all eigenvalues, or columns of the kernel by blocks
    if n <= CPU.all_pairs_points:
        values, vectors = torch.linalg.eigh(torch.from_numpy(laplacian.toarray()))
        decay = torch.exp(
            -values[:, None] * torch.tensor(HEAT_TIMES, dtype=torch.float64, device=values.device)
        )
        return np.asarray(vectors.square() @ decay)
    found = np.empty((n, len(HEAT_TIMES)))
    width = max(1, BLOCK_ENTRIES // n)
    for begin in range(0, n, width):
        chosen = np.arange(begin, min(n, begin + width))
        heat = np.zeros((n, len(chosen)))
        heat[chosen, np.arange(len(chosen))] = 1
        reached = 0.0
        for place, time in enumerate(HEAT_TIMES):
            # the diagonal at t is the squared length of a column at t / 2
            step = time / 2 - reached
            heat = scipy.sparse.linalg.expm_multiply(
                -step * laplacian, heat, traceA=-step * laplacian.trace()
            )
            reached = time / 2
            found[chosen, place] = np.square(heat).sum(0)
    return found


def _weisfeiler_lehman(adjacency: scipy.sparse.csr_array) -> Array:
    """Average log(1 + degree) again and again with the mean of the neighbours', (n, q)."""
    # The continuous Weisfeiler-Lehman scheme of M. Togninalli et al., Wasserstein Weisfeiler-Lehman
    # graph kernels, NeurIPS 2019.
    degree = _degrees(adjacency)
    rounds = [np.log1p(degree)]
    for _ in range(_ROUNDS):
        mean = (adjacency @ rounds[-1]) / np.maximum(degree, 1)
        rounds.append((rounds[-1] + mean) / 2)
    return np.stack(rounds, axis=1)


_SIGNATURES = {
    "degree": _degree,
    "clustering": _clustering,
    "heat": _heat,
    "wl": _weisfeiler_lehman,
}
