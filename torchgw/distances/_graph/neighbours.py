"""Nearest neighbours, exact ones and by faiss approximate ones.

On a CPU exact ones are found by a KD-tree in few dimensions, and by tiles of distances in many. On
a GPU a program visits the leaves of a tree that can hold neighbours, if they are few and so are the
neighbours; otherwise products of all pairs on the matrix units choose candidates, which exact
distances confirm. Without Triton it takes tiles.
"""

import logging
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Literal, NamedTuple

import numpy as np
import scipy
import torch
from torch import Tensor

from torchgw._errors import BackendUnavailableError, PerformanceWarning, warn_user
from torchgw._tensors.operations import ALL_PAIRS, FEW_PAIRS, average, lengths
from torchgw._tensors.ranks import Ranks
from torchgw.distances._graph.leaves import Leaves, box_gaps, into_leaves, leaf_count, pair_squares

logger = logging.getLogger(__name__)


class Neighbours(NamedTuple):
    """The nearest base points of some query points, on their device."""

    distances: Tensor  # (q, k) float64, Euclidean, ascending
    indices: Tensor  # (q, k) int64, rows of the base points


# In more dimensions a KD-tree visits most of its leaves: for a Gaussian cloud of 20,000 points it
# is four times faster than tiles in 8, as fast in 12 and half as fast in 15. [L303]
_TREE_DIMENSIONS = 12
# Pairs of points, in more dimensions, that take a core several minutes. [L303]
_MANY_PAIRS = 10**10
# Bytes that one step of a search may work on for each point, and bounds of the whole: with more, a
# few thousand points gain nothing that can be measured. [L165]
_WORK_BYTES_EACH = 2**11
_WORK_BYTES = (2**27, 2**30)
# Seconds for a pair of points on an H200: in leaves, for each coordinate and in addition; as
# products, for each 64 coordinates and in addition. [L303]
_LEAF_SECONDS = (1.2e-11, 2.4e-11)
_PRODUCT_SECONDS = (1.0e-12, 1.5e-12)
# In so few dimensions three products on matrix units cost as little as one. [L682]
_NARROW = 16
# Leaves that give a first bound, and query leaves that the share to visit is estimated from. [L154]
_SEEDS = 4
_PROBES = 256
# Neighbours that the registers of a kernel can hold for each point, and rows that are sorted at
# once. A choice. [L538]
_MOST_LISTED = 32
_SORTED = 2**21
# Edges of the search graph, and candidates kept while building it and while searching. [L171]
_EDGES = 32
_BUILDING = 80
_SEARCHING = 64


def nearest(
    base: Tensor, query: Tensor, n_neighbors: int, leaves: Leaves | None = None
) -> Neighbours:
    """Find the nearest of the base points (n, d), whose leaves may be known, for each of (q, d)."""
    # Distances are computed from differences in float64. Of points at one distance any is found.
    if not base.is_cuda:
        pairs, wide = len(base) * len(query), base.shape[1] > _TREE_DIMENSIONS
        if wide and pairs > _MANY_PAIRS:
            warn_user(
                f"an exact search among {len(base)} points in {base.shape[1]} dimensions compares "
                "all pairs, which takes long on a CPU. Use a GPU, fewer dimensions, or pass as X "
                "`connect(knn_graph(points, search='approximate'), points)` from "
                "torchgw.distances.",
                PerformanceWarning,
            )
        search = _nearest_by_tiles if wide or pairs <= FEW_PAIRS else _nearest_by_tree
        return search(base, query, n_neighbors)
    if len(base) * len(query) <= ALL_PAIRS:
        return _nearest_by_tiles(base, query, n_neighbors)
    # those that are visited in any case, before any are made
    share = min(1.0, _SEEDS / leaf_count(len(base)))
    listed = n_neighbors <= _MOST_LISTED and find_spec("triton") is not None
    if not (listed and _visits_pay(share, base.shape[1])):
        return _nearest_by_products(base, query, n_neighbors)
    leaves = into_leaves(base) if leaves is None else leaves
    query_leaves = leaves if query is base else into_leaves(query)
    if _leaves_pay(leaves, query_leaves, n_neighbors):
        return _nearest_by_one_launch(leaves, query_leaves, n_neighbors)
    return _nearest_by_products(base, query, n_neighbors)


def _work_bytes(n: int) -> int:
    """Choose the bytes that one step of a search among n points may work on."""
    least, most = _WORK_BYTES
    return min(most, max(least, n * _WORK_BYTES_EACH))


def nearest_others(
    points: Tensor,
    n_neighbors: int,
    search: Literal["exact", "approximate"] = "exact",
    leaves: Leaves | None = None,
    ranks: Ranks | None = None,
) -> Neighbours:
    """Find the nearest neighbours of each point, whose leaves may be known, among the others."""
    if search == "approximate":
        return _nearest_others_approximate(points, n_neighbors)
    if ranks is None or points.is_cuda or len(points) ** 2 <= FEW_PAIRS:
        distance, index = nearest(points, points, n_neighbors + 1, leaves)
    else:
        distance, index = _nearest_by_ranks(points, n_neighbors + 1, ranks)
    others = Neighbours(*(part.new_empty(len(part), n_neighbors) for part in (distance, index)))
    for some in torch.arange(len(points), device=points.device).split(_SORTED):
        own = index[some] == some[:, None]
        # a point with many duplicates may not have found itself: its last neighbour is dropped
        own[:, -1] |= ~own.any(dim=1)
        for kept, part in zip(others, (distance, index), strict=True):
            kept[some] = part[some][~own].reshape(-1, n_neighbors)
    return others


def _nearest_by_ranks(points: Tensor, n_neighbors: int, ranks: Ranks) -> Neighbours:
    """Find the nearest points of each on a CPU; each rank finds those of some points."""
    n, tree = len(points), points.shape[1] <= _TREE_DIMENSIONS
    # ranks get whole tiles, as among equal distances the choice may depend on the other rows of a
    # tile
    unit = 1 if tree else _tile_rows(points, n_neighbors)
    ends = [0, *(min(own.stop * unit, n) for own in ranks.own(-(-n // unit)))]
    begin, end = ends[ranks.rank], ends[ranks.rank + 1]
    search = _nearest_by_tree if tree else _nearest_by_tiles
    # a rank without rows of its own searches for one row, and drops it
    found = search(points, points[min(begin, n - 1) : max(end, begin + 1)], n_neighbors)
    counts = [after - before for before, after in zip(ends, ends[1:], strict=False)]
    return Neighbours(*(ranks.gather(part[: end - begin], counts) for part in found))


def _nearest_others_approximate(points: Tensor, n_neighbors: int) -> Neighbours:
    """Measure the neighbours of an approximate search; where these are too few, search exactly."""
    points = points.detach().double()
    candidates = nearest_approximate(points, n_neighbors + 1).to(points.device)
    candidates[candidates == torch.arange(len(points), device=points.device)[:, None]] = -1
    distance, index = _measure(points, points, candidates, n_neighbors)
    few = distance[:, -1].isinf().nonzero()[:, 0]
    if len(few):
        found, rows = nearest(points, points[few], n_neighbors + 1)
        other = rows != few[:, None]
        other[:, -1] &= ~other.all(dim=1)
        distance[few], index[few] = (
            part[other].reshape(len(few), n_neighbors) for part in (found, rows)
        )
    return Neighbours(distance, index)


def nearest_approximate(points: Tensor, n_neighbors: int) -> Tensor:
    """Find most of the nearest points of each point, itself included, as rows; -1 for none."""
    # A hierarchical navigable small world (Malkov and Yashunin, IEEE TPAMI 2020), built by all
    # cores in no fixed order: two runs can differ in a few neighbours.
    if find_spec("faiss") is None:
        raise BackendUnavailableError(
            "search='approximate' needs faiss: pip install faiss-cpu. Or pass search='exact'."
        )
    import faiss

    logger.info("approximate neighbours of %d points by faiss %s", len(points), faiss.__version__)
    centred = points.detach().double() - points.detach().double().mean(dim=0)
    table = np.ascontiguousarray(centred.cpu().numpy(), dtype=np.float32)
    index = faiss.IndexHNSWFlat(table.shape[1], _EDGES)
    index.hnsw.efConstruction = _BUILDING
    index.hnsw.efSearch = max(_SEARCHING, 2 * n_neighbors)
    index.add(table)
    return torch.from_numpy(index.search(table, n_neighbors)[1])


def _nearest_by_tree(base: Tensor, query: Tensor, n_neighbors: int) -> Neighbours:
    """Query a KD-tree of the base points, on all cores."""
    # the sliding-midpoint rule builds faster than medians and copes with many duplicates
    tree = scipy.spatial.cKDTree(base.detach().double().numpy(), balanced_tree=False)
    ranks = np.arange(1, n_neighbors + 1)
    distance, index = tree.query(query.detach().double().numpy(), k=ranks, workers=-1)
    return Neighbours(
        torch.from_numpy(distance), torch.from_numpy(index.astype(np.int64, copy=False))
    )


def _leaves_pay(base: Leaves, query: Leaves, n_neighbors: int) -> bool:
    """Estimate from some query leaves whether visiting leaves beats products of all pairs."""
    d = base.points.shape[2]
    probes = query.at(slice(None, None, max(1, len(query.low) // _PROBES)))
    visited = 0.0
    for part in _leaf_blocks(probes, base):
        visited += float(_worth_a_look(probes.at(part), base, n_neighbors).sum())
    return _visits_pay(visited / (len(probes.low) * len(base.low)), d)


def _visits_pay(share: float, d: int) -> bool:
    """Whether so many leaves of the base are visited sooner than products of all pairs are made."""
    by_leaves = share * (d * _LEAF_SECONDS[0] + _LEAF_SECONDS[1])
    return by_leaves < d / 64 * _PRODUCT_SECONDS[0] + _PRODUCT_SECONDS[1]


def _leaf_blocks(query: Leaves, base: Leaves) -> Iterator[slice]:
    """Cut the query leaves into blocks whose gaps and first distances fit into memory."""
    size = max(base.row.shape[1], query.row.shape[1])
    numbers = 4 * len(base.low) + 4 * _SEEDS * size**2
    step = max(1, _work_bytes(base.row.numel()) // (8 * numbers))
    return (slice(start, start + step) for start in range(0, len(query.low), step))


def _worth_a_look(query: Leaves, base: Leaves, n_neighbors: int) -> Tensor:
    """Tell which leaves of the base can hold neighbours of points of each query leaf, (q, b)."""
    # The leaves with the smallest gaps give distances that the neighbours cannot exceed. Only a
    # leaf nearer than the largest of them can hold anything nearer; those first leaves count too.
    gap = box_gaps(query, base)
    enough = -(-2 * n_neighbors // base.row.shape[1])
    seeds = gap.topk(min(max(_SEEDS, enough), len(base.low)), dim=1, largest=False).indices
    square = pair_squares(query.points, base.points[seeds].flatten(1, 2))
    square.masked_fill_((base.row[seeds] < 0).flatten(1)[:, None], torch.inf)
    reach = square.topk(n_neighbors, dim=2, largest=False).values[:, :, -1].amax(dim=1)
    return (gap < reach[:, None]).scatter_(1, seeds, torch.ones_like(seeds, dtype=torch.bool))


def _nearest_by_one_launch(base: Leaves, query: Leaves, n_neighbors: int) -> Neighbours:
    """Visit the leaves that can hold neighbours, a program for each leaf of the query."""
    from torchgw.distances._graph.leaves_triton import nearest_in_leaves

    if query is base:
        seeds = torch.arange(len(query.low), device=query.low.device)
    else:
        blocks = map(query.at, _leaf_blocks(query, base))
        seeds = torch.cat([box_gaps(part, base).argmin(dim=1) for part in blocks])
    square, place = nearest_in_leaves(base, query, seeds, n_neighbors)
    row = base.row.flatten()
    distance = square.new_empty(len(square), n_neighbors)
    index = row.new_empty(distance.shape)
    for some in torch.arange(len(square), device=row.device).split(_SORTED):
        nearest, order = square[some].sort(dim=1)
        distance[some] = nearest[:, :n_neighbors].sqrt()
        index[some] = row[place[some].gather(1, order[:, :n_neighbors]).long()]
    return Neighbours(distance, index)


def _nearest_by_products(base: Tensor, query: Tensor, n_neighbors: int) -> Neighbours:
    """Choose candidates by products in half precision, and measure them by differences."""
    # A row is done if its last neighbour is nearer than any point can be that was no candidate. The
    # others are searched again with more products, and those still left then by tiles in float64.
    keep = max(16, 2 ** (n_neighbors + max(8, n_neighbors // 2) - 1).bit_length())
    distance = query.new_empty(len(query), n_neighbors, dtype=torch.float64)
    index = torch.empty(len(query), n_neighbors, dtype=torch.int64, device=query.device)
    left = torch.arange(len(query), device=query.device)
    base, query = base.detach().double(), query.detach().double()
    if find_spec("triton") is not None:
        from torchgw.distances._graph.neighbours_triton import MOST_KEPT, nearest_candidates

        centre = average(base)
        small, looking = base - centre, query - centre
        unit = max(float(lengths(side, 1).max()) for side in (small, looking)) or 1.0
        small, looking = small / unit, looking / unit
        # in few dimensions a product costs less than the selection
        stages = (3,) if base.shape[1] <= _NARROW else (1, 3)
        for products in stages if keep <= MOST_KEPT else ():
            candidates, bound = nearest_candidates(small, looking[left], keep, products)
            length, found = _measure(base, query[left], candidates, n_neighbors)
            last = length[:, -1] / unit
            sure = last * last / 2 <= bound
            distance[left[sure]], index[left[sure]] = length[sure], found[sure]
            left = left[~sure]
            if not len(left):
                return Neighbours(distance, index)
    distance[left], index[left] = _nearest_by_tiles(base, query[left], n_neighbors)
    return Neighbours(distance, index)


def _measure(
    base: Tensor, query: Tensor, candidates: Tensor, n_neighbors: int
) -> tuple[Tensor, Tensor]:
    """Compute the exact distances of the nearest candidates, and their rows."""
    step = max(1, _work_bytes(len(base)) // (8 * 3 * candidates.shape[1] * base.shape[1]))
    distances, rows = [], []
    for points, index in zip(query.split(step), candidates.split(step), strict=True):
        length = lengths(base[index] - points[:, None], 2)
        length = torch.where(index < 0, torch.inf, length)
        length, order = length.topk(n_neighbors, dim=1, largest=False)
        distances.append(length)
        rows.append(index.long().gather(1, order))
    return torch.cat(distances), torch.cat(rows)


def _tile_rows(base: Tensor, n_neighbors: int) -> int:
    """Choose the query points of a tile."""
    wide = max(base.shape[0], n_neighbors * base.shape[1])
    return max(1, _work_bytes(len(base)) // 4 // (8 * wide))


def _nearest_by_tiles(base: Tensor, query: Tensor, n_neighbors: int) -> Neighbours:
    """Select from tiles of products in float64, then measure by differences."""
    base, query = base.detach().double(), query.detach().double()
    centre = base.sum(dim=0) / len(base)
    centred = base - centre
    square = (centred * centred).sum(dim=1)
    rows = _tile_rows(base, n_neighbors)
    distances, indices = [], []
    for start in range(0, query.shape[0], rows):
        tile = query[start : start + rows]
        # the order within a row needs no |query|^2; the products are float64 because they cancel
        score = torch.addmm(square, tile - centre, centred.T, alpha=-2)
        index = score.topk(n_neighbors, dim=1, largest=False, sorted=False).indices
        length, order = lengths(base[index] - tile[:, None], 2).sort(dim=1, stable=True)
        distances.append(length)
        indices.append(index.gather(1, order))
    return Neighbours(torch.cat(distances), torch.cat(indices))
