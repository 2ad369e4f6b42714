"""The shortest edges that join the components of a neighbour graph."""

from typing import NamedTuple

import numpy as np
import scipy
import torch
from torch import Tensor

from torchgw.distances._graph.leaves import Leaves, into_leaves, pair_squares

# Points up to which all distances are computed: 0.6 ms for 400 points, by boxes 8 ms. [L162]
_TABLE_POINTS = 1_024
# Steps along the spatial order at which points of other components are looked for first. [L305]
_STEPS = (1, 2, 4, 8, 16, 32, 64)
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
    exact = "donot_use_mm_for_euclid_dist"
    table = torch.cdist(sorted_points, sorted_points, compute_mode=exact).cpu().numpy()
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
        self._low, self._high = [leaves.low], [leaves.high]
        lowest = torch.where(leaves.row >= 0, self._label, count).amin(dim=1)
        self._first, self._last = [lowest], [self._label.amax(dim=1)]
        for _ in range(self._height):
            self._low.insert(0, self._low[0].unflatten(0, (-1, 2)).amin(dim=1))
            self._high.insert(0, self._high[0].unflatten(0, (-1, 2)).amax(dim=1))
            self._first.insert(0, self._first[0].unflatten(0, (-1, 2)).amin(dim=1))
            self._last.insert(0, self._last[0].unflatten(0, (-1, 2)).amax(dim=1))

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
        low, high = self._low[level], self._high[level]
        first, last = self._first[level], self._last[level]
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
                exact = "donot_use_mm_for_euclid_dist"
                square = torch.cdist(points, others, compute_mode=exact).square_()
            label, foreign = self._label[here], self._label[there]
            square.masked_fill_(label[:, :, None] == foreign[:, None, :], torch.inf)
            nearest, at = square.min(dim=2)
            real = label >= 0
            target = self.leaves.row[there].gather(1, at)
            self._offer(label[real], nearest[real], self.leaves.row[here][real], target[real])


def _join(count: int, ends: np.ndarray, square: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Choose the shortest edge of each component, (count, 2), and number what they join."""
    parent = list(range(count))

    def root(label: int) -> int:
        while parent[label] != label:
            parent[label] = parent[parent[label]]
            label = parent[label]
        return label

    chosen = []
    for edge in np.argsort(square, kind="stable")[: int(np.isfinite(square).sum())].tolist():
        here, there = (root(label) for label in ends[edge].tolist())
        # equal lengths could otherwise close a cycle
        if here != there:
            parent[here] = there
            chosen.append(edge)
    roots = [root(label) for label in range(count)]
    return np.array(chosen, dtype=np.int64), np.unique(roots, return_inverse=True)[1]
