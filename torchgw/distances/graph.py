"""Neighbour graphs and given ones, made into connected graphs."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._boundary.arrays import to_tensor
from torchgw._boundary.checks import check_choice, check_within
from torchgw._errors import GraphWarning, InvalidInputError, warn_user
from torchgw._tensors.ranks import Ranks
from torchgw.distances._graph.edges import (
    Edges,
    components,
    from_csr,
    symmetric_edges,
    symmetrise,
    validate_graph,
    with_edges,
)
from torchgw.distances._graph.leaves import Leaves, into_leaves
from torchgw.distances._graph.neighbours import FEW_PAIRS, nearest_others
from torchgw.distances._graph.stitching import shortest_bridges
from torchgw.distances.geodesics import Geodesics, largest_path
from torchgw.distances.points import check_rows
from torchgw.distances.surface import Surface

GraphMetric = Literal["euclidean", "cosine", "correlation"]
ConnectPolicy = Literal["stitch", "fill"]

# Vertices up to which a graph is put together on the CPU, wherever its points are: a GPU would
# spend its time on launches. [L161]
_HOST_VERTICES = 16_384
# Points up to which a GPU finds paths as fast in any order, because it works on all at once. [L310]
_UNORDERED = 768


def default_n_neighbors(n: int) -> int:
    """Choose the number of neighbours for n points: log n, kept between 5 and 15.

    A random neighbour graph becomes connected at a multiple of log n neighbours. Few edges keep
    paths on the surface that the points lie on, and the time of Dijkstra grows with the edges.
    """
    return min(n - 1, max(5, min(15, math.ceil(math.log(max(n, 1))))))


def knn_graph(
    points: Tensor | NDArray[Any],
    n_neighbors: int | None = None,
    *,
    metric: GraphMetric = "euclidean",
    search: Literal["exact", "approximate"] = "exact",
) -> scipy.sparse.csr_matrix:
    """Build the symmetric nearest-neighbour graph of points.

    Two points are joined when either is among the nearest neighbours of the other.

    Parameters
    ----------
    points : Tensor or ndarray, shape (n, d)
        The search runs on their device.
    n_neighbors : int or None
        Neighbours of each point, itself not counted, at most n - 1. ``None`` is log n, kept between
        5 and 15, see :func:`default_n_neighbors`.
    metric : {"euclidean", "cosine", "correlation"}
        Length of the edges; the last two are 1 - cos and 1 - Pearson correlation of two rows.
    search : {"exact", "approximate"}
        How neighbours are found. An approximate search (faiss, on the CPU) misses some, and is for
        100,000 points and more in over a dozen dimensions without a GPU. Lengths are exact.

    Returns
    -------
    scipy.sparse.csr_matrix, shape (n, n), float64
        Symmetric edge lengths. Duplicated points are joined by explicit zeros, which SciPy's graph
        functions read as edges of length zero; sparse arithmetic such as ``maximum`` drops them.

    Raises
    ------
    InvalidInputError
        If ``n_neighbors`` is not between 1 and n - 1, or a point has no direction: a zero row, or a
        constant one for "correlation".
    BackendUnavailableError
        If ``search`` is "approximate" and faiss is not installed.

    Examples
    --------
    >>> import torch
    >>> from torchgw.distances import knn_graph
    >>> knn_graph(torch.tensor([[0.0], [1.0], [3.0]]), n_neighbors=1).toarray()
    array([[0., 1., 0.],
           [1., 0., 2.],
           [0., 2., 0.]])
    """
    check_choice("search", search, ("exact", "approximate"))
    return _neighbour_edges(_embed(points, metric), n_neighbors, metric, search).csr()


def neighbour_geodesics(
    points: Tensor,
    n_neighbors: int | None = None,
    *,
    policy: ConnectPolicy = "stitch",
    known: Neighbourhood | None = None,
    ranks: Ranks | None = None,
) -> Geodesics:
    """Compute ``connect(knn_graph(points, n_neighbors), points)`` on the device of the points."""
    # If something is `known` of the points, it has the edges of their graph with the default number
    # of neighbours; otherwise each of `ranks` finds the neighbours of some points.
    embedded = _embed(points, "euclidean")
    leaves = into_leaves(embedded) if embedded.is_cuda and len(embedded) > _UNORDERED else None
    edges = None if known is None else known.edges
    if edges is None:
        edges = _neighbour_edges(embedded, n_neighbors, "euclidean", leaves=leaves, ranks=ranks)
    connected = known is not None and known.edges is not None and known.connected
    geodesics = (
        Geodesics(edges)
        if connected
        else _connect(edges, embedded, policy, 1.5, "euclidean", leaves=leaves)
    )
    geodesics.order = None if leaves is None else leaves.order
    return geodesics


class Neighbourhood(NamedTuple):
    """What the nearest neighbours of points tell about their shape."""

    dimension: float  # by maximum likelihood (Levina and Bickel 2004)
    connected: bool  # whether their graph is in one piece
    edges: Edges | None  # of that graph; None if there is none


def neighbourhood(points: Tensor, device: torch.device) -> Neighbourhood:
    """Find the dimension of points on the CPU, and whether their graph is in one piece."""
    n, count = len(points), default_n_neighbors(len(points))
    if n <= count + 1:
        return Neighbourhood(0.0, True, None)
    # a GPU compares all pairs of a thousand points sooner than SciPy's trees are imported
    where = device if n * n > FEW_PAIRS else points.device
    distance, index = (part.cpu() for part in nearest_others(points.to(where), count))
    source = torch.arange(n, device="cpu").repeat_interleave(count)
    edges = symmetric_edges(n, source, index.flatten(), distance.flatten())
    pieces, _ = components(edges)
    near = distance.numpy()
    used = near[near[:, 0] > 0]
    spread = float(np.log(used[:, -1:] / used[:, :-1]).mean()) if len(used) else 0.0
    return Neighbourhood(1 / spread if spread > 0 else 0.0, pieces == 1, edges)


def _neighbour_edges(
    embedded: Tensor,
    n_neighbors: int | None,
    metric: GraphMetric,
    search: Literal["exact", "approximate"] = "exact",
    leaves: Leaves | None = None,
    ranks: Ranks | None = None,
) -> Edges:
    """Join each point to its nearest neighbours."""
    n = embedded.shape[0]
    if n_neighbors is None:
        n_neighbors = default_n_neighbors(n)
    else:
        why = ", because a point is not its own neighbour"
        check_within("n_neighbors", n_neighbors, 1, max(n - 1, 1), why)
        n_neighbors = int(n_neighbors)
    if n == 1:
        return from_csr(scipy.sparse.csr_matrix((1, 1)))
    distance, index = nearest_others(embedded, n_neighbors, search, leaves, ranks)
    if n <= _HOST_VERTICES:
        distance, index = distance.cpu(), index.cpu()
    length = _edge_length(distance.flatten(), metric)
    if not length.is_cuda and n > _HOST_VERTICES:
        ends = np.arange(0, n * n_neighbors + 1, n_neighbors)
        directed = (length.numpy(), index.flatten().numpy(), ends)
        return from_csr(symmetrise(scipy.sparse.csr_matrix(directed, shape=(n, n))))
    source = torch.arange(n, device=index.device).repeat_interleave(n_neighbors)
    return symmetric_edges(n, source, index.flatten(), length)


def given_geodesics(name: str, graph: Any, policy: ConnectPolicy) -> Geodesics:
    """Compute ``connect(graph, policy=policy)`` of a graph that messages call by its name."""
    if isinstance(graph, Surface):
        advice = "Join the pieces in the mesh, or drop some, if that is not meant."
        return _connect(
            graph.edges, graph.vertices, policy, 1.5, "euclidean", f"the surface `{name}`",
            advice=advice,
        )  # fmt: skip
    edges = from_csr(validate_graph(graph, name))
    return _connect(edges, None, policy, 1.5, "euclidean", f"the graph `{name}`")


def connect(
    graph: Any,
    points: Tensor | NDArray[Any] | None = None,
    *,
    policy: ConnectPolicy = "stitch",
    fill: float = 1.5,
    metric: GraphMetric = "euclidean",
) -> Geodesics:
    """Make every geodesic distance of a graph finite.

    Parameters
    ----------
    graph : SciPy sparse array or matrix, shape (n, n)
        Symmetric edge lengths, see :func:`validate_graph`.
    points : Tensor or ndarray, shape (n, d), or None
        The points that the graph was made from. Without them "stitch" acts as "fill".
    policy : {"stitch", "fill"}
        "stitch" joins the components by the shortest edges that do so, a minimum spanning tree over
        components. "fill" leaves the graph as it is and gives all unreachable pairs one distance.
    fill : float
        That distance over the largest path length within a component, at least 1. The length is
        found as a lower bound, at least half of it; for a graph without edges it is 1.
    metric : {"euclidean", "cosine", "correlation"}
        Length of the added edges.

    Returns
    -------
    Geodesics
        The graph, and the distance of unreachable pairs if any are left.

    Warns
    -----
    GraphWarning
        If the graph was not connected; the message says what was done.
    """
    check_choice("policy", policy, get_args(ConnectPolicy))
    if not (math.isfinite(fill) and fill >= 1):
        raise InvalidInputError(
            f"`fill` must be finite and at least 1, so that unreachable pairs are the farthest; "
            f"got {fill}."
        )
    graph = validate_graph(graph)
    embedded = None if points is None or policy == "fill" else _embed(points, metric)
    if embedded is not None and embedded.shape[0] != graph.shape[0]:
        raise InvalidInputError(
            f"`points` must have one row for each of the {graph.shape[0]} vertices; got "
            f"{embedded.shape[0]} rows. Pass the points that the graph was made from."
        )
    return _connect(from_csr(graph), embedded, policy, fill, metric)


def _connect(
    edges: Edges,
    embedded: Tensor | None,
    policy: ConnectPolicy,
    fill: float,
    metric: GraphMetric,
    what: str = "the graph",
    leaves: Leaves | None = None,
    advice: str = "Raise `n_neighbors` if they should be joined by more.",
) -> Geodesics:
    """Join the components of a graph, or give pairs in different ones a distance."""
    n_components, labels = components(edges)
    if n_components == 1:
        return Geodesics(edges)
    sizes, largest = labels.bincount().sort(descending=True, stable=True)
    # a vertex of each, so that they can be found
    first = [int((labels == piece).int().argmax()) for piece in largest[:5]]
    more = ", ..." if n_components > 5 else ""
    shown, begin = (", ".join(map(str, part)) + more for part in (sizes[:5].tolist(), first))
    found = f"{what} has {n_components} components (of {shown} vertices, the first of each {begin})"
    if policy == "stitch" and embedded is not None:
        if len(embedded) <= _HOST_VERTICES:
            embedded, leaves = embedded.cpu(), None
        bridges = shortest_bridges(embedded, labels.to(embedded.device), leaves)
        source, target = (end.to(labels.device) for end in (bridges.source, bridges.target))
        length = _edge_length(bridges.length, metric).to(labels.device)
        warn_user(
            f"{found}: joined them by the {len(length)} shortest edges that do so, the longest of "
            f"length {float(length.max()):.6g}. {advice}",
            GraphWarning,
        )
        return Geodesics(with_edges(edges, source, target, length))
    value = fill * (largest_path(edges.csr()) or 1.0)
    why = "" if policy == "fill" else " and no points to join them by"
    warn_user(
        f"{found}{why}: pairs without a path get the distance {value:.6g}, {fill:g} times the "
        "largest path length found. To avoid it add edges; those of points by more `n_neighbors`.",
        GraphWarning,
    )
    return Geodesics(edges, value)


def as_geodesics(graph: Any) -> Geodesics:
    """Connect a bare graph by the policy "fill", a surface; keep one that :func:`connect` made."""
    if isinstance(graph, Surface):
        return given_geodesics("graph", graph, "stitch")
    return graph if isinstance(graph, Geodesics) else connect(graph)


def _embed(points: Tensor | NDArray[Any], metric: GraphMetric) -> Tensor:
    """Map points to some whose Euclidean distance grows with the metric."""
    advice = "For another metric build a sparse graph and pass that."
    check_choice("metric", metric, get_args(GraphMetric), advice)
    points = to_tensor("points", points).double()
    check_rows(points, "Pass one row per point.")
    if metric == "euclidean":
        return points
    size = points.norm(dim=1, keepdim=True)
    if metric == "correlation":
        points = points - points.mean(dim=1, keepdim=True)
    length = points.norm(dim=1, keepdim=True)
    # subtracting the mean of a constant row can leave rounding
    flat = length <= 1e-14 * size
    if bool(flat.any()):
        row = int(flat[:, 0].nonzero()[0, 0])
        what = "zero" if metric == "cosine" else "constant"
        raise InvalidInputError(
            f"`points` has a {what} row (row {row}), without direction for metric={metric!r}. "
            "Drop that row, or pass metric='euclidean'."
        )
    return points.div(length)


def _edge_length(distance: Tensor, metric: GraphMetric) -> Tensor:
    """Convert Euclidean distances of embedded points to the metric: 1 - cos is |x - y|^2 / 2."""
    return distance if metric == "euclidean" else distance**2 / 2
