"""Neighbour graphs and given ones, made into connected graphs by the shortest edges that do so."""

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
from torchgw._tensors.operations import FEW_PAIRS, straight
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
from torchgw.distances._graph.leaves import Leaves, into_leaves, pair_squares
from torchgw.distances._graph.neighbours import nearest_others
from torchgw.distances.geodesics import Geodesics, largest_path
from torchgw.distances.points import check_rows, unit_vectors
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
    return points if metric == "euclidean" else unit_vectors(points, metric)


def _edge_length(distance: Tensor, metric: GraphMetric) -> Tensor:
    """Convert Euclidean distances of embedded points to the metric: 1 - cos is |x - y|^2 / 2."""
    return distance if metric == "euclidean" else distance**2 / 2


# Points up to which all distances are computed: 0.6 ms for 400 points, by boxes 8 ms. [L162]
_TABLE_POINTS = 1_024
# Steps along the spatial order at which points of other components are looked for first: powers of
# two. [L305]
_STEPS = tuple(2**power for power in range(7))
# Pairs of boxes, and bytes of distances, that are looked at together. [L305]
_PAIRS = 2**21
_WORK_BYTES = {"cpu": 2**28, "cuda": 2**30}


class Bridges(NamedTuple):
    """Edges between points of different components."""

    source: Tensor  # (e,) int64
    target: Tensor  # (e,) int64
    length: Tensor  # (e,) float64, Euclidean


def shortest_bridges(points: Tensor, labels: Tensor, leaves: Leaves | None = None) -> Bridges:
    """Find the minimum spanning tree over the components ``labels`` (n,), by closest pairs."""
    # Boruvka's algorithm: in each round every component but the largest takes its shortest edge to
    # another one, and what is joined becomes one component. All these edges are found together by
    # descending a tree of boxes in pairs (March, Ram, Gray. Fast Euclidean minimum spanning tree.
    # KDD 2010).
    if len(points) <= _TABLE_POINTS:
        return _bridges_of_table(points, labels)
    leaves = into_leaves(points) if leaves is None else leaves
    found: list[Tensor] = []
    while (count := int(labels.max()) + 1) > 1:
        shortest = _ShortestEdges(leaves, labels, count)
        shortest.search()
        ends = torch.stack([shortest.source, shortest.target], dim=1)
        chosen, names = _join(count, labels[ends].cpu().numpy(), shortest.square.cpu().numpy())
        found.append(ends[torch.from_numpy(chosen).to(points.device)])
        labels = torch.from_numpy(names).to(points.device)[labels]
    edges = torch.cat(found)
    length = (points[edges[:, 0]].double() - points[edges[:, 1]].double()).norm(dim=1)
    return Bridges(edges[:, 0], edges[:, 1], length)


def _bridges_of_table(points: Tensor, labels: Tensor) -> Bridges:
    """Find the tree over the closest pairs of components from all distances."""
    order = labels.argsort(stable=True)
    sorted_points = points[order].double()
    table = straight(sorted_points, sorted_points).cpu().numpy()
    sizes = labels.bincount().cpu().numpy()
    first = np.cumsum(sizes) - sizes
    closest = np.minimum.reduceat(np.minimum.reduceat(table, first, axis=0), first, axis=1)
    # SciPy takes no edge of length zero; the tree depends on the order of the lengths alone
    rank = np.unique(closest, return_inverse=True)[1].reshape(closest.shape) + 1
    tree = scipy.sparse.csgraph.minimum_spanning_tree(np.triu(rank, 1)).tocoo()
    ends = np.empty((len(tree.row), 2), dtype=np.int64)
    for edge, (one, other) in enumerate(zip(tree.row, tree.col, strict=True)):
        rows, columns = (slice(first[part], first[part] + sizes[part]) for part in (one, other))
        block = table[rows, columns]
        ends[edge] = np.unravel_index(block.argmin(), block.shape) + first[[one, other]]
    source, target = order[torch.from_numpy(ends).to(order.device)].T
    length = torch.from_numpy(table[ends[:, 0], ends[:, 1]])
    return Bridges(source, target, length.to(points.device))


class _ShortestEdges:
    """The shortest edge out of each component but the largest, so far."""

    def __init__(self, leaves: Leaves, labels: Tensor, count: int) -> None:
        # empty boxes fill the tree up, so that every box has two halves; nothing is near them
        self._height = (len(leaves.row) - 1).bit_length()
        self.leaves = leaves = Leaves(
            *(
                torch.cat([part, part.new_full((2**self._height - len(part), *part.shape[1:]), x)])
                for part, x in zip(leaves, (-1, 0.0, torch.inf, -torch.inf), strict=True)
            )
        )
        # squared lengths, (components,) float64, infinite where no edge is known; their ends
        self.square = torch.full((count,), torch.inf, dtype=torch.float64, device=labels.device)
        self.source = torch.zeros_like(labels[:1]).repeat(count)
        self.target = torch.zeros_like(self.source)
        # bounds of the squared lengths, which boxes show
        self._bound = self.square.clone()
        self._largest = labels.bincount().argmax()
        # copies of points belong to no component
        self._label = torch.where(leaves.row >= 0, labels[leaves.row], -1)
        # and are infinitely far from everything
        self._points = leaves.points.masked_fill((leaves.row < 0)[:, :, None], torch.inf)
        lowest = torch.where(leaves.row >= 0, self._label, count).amin(dim=1)
        # corners of the boxes of each level, and the first and last component in each
        self._boxes = [(leaves.low, leaves.high, lowest, self._label.amax(dim=1))]
        for _ in range(self._height):
            low, high, first, last = (part.unflatten(0, (-1, 2)) for part in self._boxes[0])
            self._boxes.insert(0, (low.amin(1), high.amax(1), first.amin(1), last.amax(1)))

    def search(self) -> None:
        """Find the shortest edges."""
        self._try_neighbours_in_order()
        root = torch.zeros_like(self.source[:1])
        waiting = [(0, root, root)]
        while waiting:
            level, one, other = waiting.pop()
            one, other = self._worth_visiting(level, one, other)
            if not len(one):
                continue
            if level == self._height:
                self._visit(one, other)
                continue
            child = torch.arange(2, device=one.device)
            ones = (2 * one[:, None, None] + child[:, None]).expand(-1, 2, 2).flatten()
            others = (2 * other[:, None, None] + child).expand(-1, 2, 2).flatten()
            # the nearest pairs come first: the edges they give make it harder for others to be
            # shorter
            parts = list(zip(ones.split(_PAIRS), others.split(_PAIRS), strict=True))
            waiting += [(level + 1, *part) for part in reversed(parts)]
        # the edge of the largest component is dropped: no shorter one was looked for, so it need
        # not be in the tree
        self.square[self._largest] = torch.inf

    def _try_neighbours_in_order(self) -> None:
        """Offer edges between points that follow each other in the spatial order."""
        real = self.leaves.row >= 0
        row, label, points = self.leaves.row[real], self._label[real], self.leaves.points[real]
        for step in _STEPS:
            cross = (label[step:] != label[:-step]).nonzero()[:, 0]
            square = (points[cross + step] - points[cross]).square().sum(dim=1)
            for here, there in ((cross, cross + step), (cross + step, cross)):
                self._offer(label[here], square, row[here], row[there])

    def _offer(self, label: Tensor, square: Tensor, source: Tensor, target: Tensor) -> None:
        """Keep the edges that are shorter than those of their components."""
        before = self.square.clone()
        self.square.scatter_reduce_(0, label, square, "amin")
        best = ((square == self.square[label]) & (square < before[label])).nonzero()[:, 0]
        # of several equally short edges the last one
        place = torch.full_like(self.source, -1)
        place.scatter_reduce_(0, label[best], best, "amax")
        changed = place >= 0
        self.source[changed] = source[place[changed]]
        self.target[changed] = target[place[changed]]

    def _worth_visiting(self, level: int, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """Select the pairs of boxes that may hold a shorter edge, the nearest first."""
        low, high, first, last = self._boxes[level]
        gap = torch.zeros(len(one), dtype=torch.float64, device=one.device)
        reach = torch.zeros_like(gap)
        for axis in range(low.shape[1]):
            right = low[other, axis] - high[one, axis]
            left = low[one, axis] - high[other, axis]
            gap.add_(torch.maximum(right, left).clamp_(min=0).square_())
            reach.add_(torch.minimum(right, left).square_())
        alone = first[one] == last[one]
        within = alone & (first[other] == last[other]) & (first[one] == first[other])
        # a box with one component has some point of another within reach of all its points
        known = alone & ~within
        self._bound.scatter_reduce_(0, first[one][known], reach[known], "amin")
        # an edge as long as a known one is of no use; an edge as long as a bound may be
        best = torch.where(self._label >= 0, self._beaten(self.square)[self._label], -1.0)
        bound = torch.where(self._label >= 0, self._beaten(self._bound)[self._label], -1.0)
        shape = len(low), -1
        keep = (gap < best.reshape(shape).amax(dim=1)[one]) & ~within
        keep &= gap <= bound.reshape(shape).amax(dim=1)[one] * (1 + 1e-12)
        order = gap[keep].argsort()
        return one[keep][order], other[keep][order]

    def _beaten(self, square: Tensor) -> Tensor:
        """Give the lengths to beat; -1 for the largest component, which needs no edge."""
        return square.index_fill(0, self._largest, -1.0)

    def _visit(self, one: Tensor, other: Tensor) -> None:
        """Measure and offer all edges between pairs of leaves, the nearest pairs first."""
        device = one.device.type
        step = max(1, _WORK_BYTES[device] // (8 * 4 * self.leaves.row.shape[1] ** 2))
        for pairs in zip(one.split(step), other.split(step), strict=True):
            # edges found meanwhile have made some of these pairs useless
            here, there = self._worth_visiting(self._height, *pairs)
            points, others = self.leaves.points[here], self._points[there]
            if device == "cuda":
                square = pair_squares(points, others)
            else:
                square = straight(points, others).square_()
            label, foreign = self._label[here], self._label[there]
            square.masked_fill_(label[:, :, None] == foreign[:, None, :], torch.inf)
            nearest, at = square.min(dim=2)
            real = label >= 0
            target = self.leaves.row[there].gather(1, at)
            self._offer(label[real], nearest[real], self.leaves.row[here][real], target[real])


def _join(count: int, ends: np.ndarray, square: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Choose the shortest edge of each component, (count, 2), and number what they join."""
    joined = scipy.cluster.hierarchy.DisjointSet(range(count))
    order = np.argsort(square, kind="stable")[: int(np.isfinite(square).sum())]
    # equal lengths could otherwise close a cycle
    chosen = [edge for edge in order.tolist() if joined.merge(*ends[edge].tolist())]
    roots = [joined[label] for label in range(count)]
    return np.array(chosen, dtype=np.int64), np.unique(roots, return_inverse=True)[1]
