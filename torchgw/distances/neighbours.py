"""Exact nearest neighbours: a KD-tree in few dimensions, tiles of distances in many."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial import cKDTree
from torch import Tensor

__all__ = ["Neighbours", "nearest", "nearest_foreign", "nearest_others"]

Neighbours = tuple[NDArray[np.float64], NDArray[np.int64]]

# In more dimensions a KD-tree visits most of its leaves: for a Gaussian cloud of 20,000 points it
# is four times faster than tiles in 8, as fast in 12 and half as fast in 15.
_TREE_DIMENSIONS = 12
# A GPU's tiles (0.36 s for 100,000 points on an H200) are faster than a tree on its host (0.06 s in
# 3 dimensions, 2.8 s in 10) unless there are more pairs than this in few dimensions.
_DEVICE_PAIRS = 2**32
_DEVICE_TREE_DIMENSIONS = 6
_TILE_BYTES = 256 * 2**20
# Queries, in few dimensions, that take one core less time (0.4 ms for 500) than starting a thread
# on each core does (2.5 ms on 16).
_ONE_CORE_QUERIES = 1_000
_ONE_CORE_DIMENSIONS = 3


def nearest(base: Tensor, query: Tensor, n_neighbors: int) -> Neighbours:
    """Find the nearest base points of each query point.

    Parameters
    ----------
    base : Tensor, shape (n, d)
        The points to find.
    query : Tensor, shape (q, d), same device and dtype as base
        The points to find them for.
    n_neighbors : int
        At most n.

    Returns
    -------
    distances : ndarray, shape (q, n_neighbors)
        Euclidean distances, ascending, computed from differences in float64.
    indices : ndarray, shape (q, n_neighbors)
        Rows of ``base``.
    """
    if _prefers_tree(base, query):
        return _nearest_by_tree(base, query, n_neighbors)
    return _nearest_by_tiles(base, query, n_neighbors)


def nearest_others(points: Tensor, n_neighbors: int) -> Neighbours:
    """Find the nearest neighbours of each point among the others; duplicates count."""
    distances, indices = nearest(points, points, n_neighbors + 1)
    keep = indices != np.arange(points.shape[0])[:, None]
    # A point with many duplicates need not find itself: its last neighbour goes instead.
    keep[keep.all(axis=1), -1] = False
    shape = points.shape[0], n_neighbors
    return distances[keep].reshape(shape), indices[keep].reshape(shape)


def nearest_foreign(
    points: Tensor, labels: NDArray[np.int64], query: NDArray[np.int64]
) -> Neighbours:
    """Find, for each query vertex, the nearest point with another label.

    Returns
    -------
    distance, index : ndarray, shape (q,)
        There must be a point with another label.
    """
    if not _prefers_tree(points, points[query]):
        both = torch.from_numpy(labels).to(points.device)
        distances, indices = _nearest_by_tiles(points, points[query], 1, (both, both[query]))
        return distances[:, 0], indices[:, 0]
    # Two different labels differ in at least one bit, so the nearest over all bits, among the
    # points with the opposite bit, is exact: log2(labels) trees instead of one for each label.
    distance = np.full(query.shape[0], np.inf)
    index = np.full(query.shape[0], -1, dtype=np.int64)
    for bit in range(int(labels.max()).bit_length()):
        on = (labels >> bit) & 1
        for value in (0, 1):
            base = np.flatnonzero(on != value)
            rows = np.flatnonzero(on[query] == value)
            if len(base) and len(rows):
                found, at = _nearest_by_tree(points[base], points[query[rows]], 1)
                closer = found[:, 0] < distance[rows]
                distance[rows[closer]] = found[closer, 0]
                index[rows[closer]] = base[at[closer, 0]]
    return distance, index


def _prefers_tree(base: Tensor, query: Tensor) -> bool:
    """Whether a KD-tree is the faster way."""
    if base.is_cuda:
        many = base.shape[0] * query.shape[0] > _DEVICE_PAIRS
        return many and base.shape[1] <= _DEVICE_TREE_DIMENSIONS
    return base.shape[1] <= _TREE_DIMENSIONS


def _nearest_by_tree(base: Tensor, query: Tensor, n_neighbors: int) -> Neighbours:
    """Query a KD-tree of the base points, on all cores where it is worth the threads."""
    # The sliding-midpoint rule builds faster than medians and copes with many duplicates.
    tree = cKDTree(base.detach().double().cpu().numpy(), balanced_tree=False)
    ranks = np.arange(1, n_neighbors + 1)
    few = query.shape[0] <= _ONE_CORE_QUERIES and query.shape[1] <= _ONE_CORE_DIMENSIONS
    distances, indices = tree.query(
        query.detach().double().cpu().numpy(), k=ranks, workers=1 if few else -1
    )
    return distances, indices.astype(np.int64, copy=False)


def _nearest_by_tiles(
    base: Tensor, query: Tensor, n_neighbors: int, labels: tuple[Tensor, Tensor] | None = None
) -> Neighbours:
    """Select from tiles of products on the device of the points, then measure by differences.

    With labels, of the base and the query points, only points of another label count.
    """
    centre = base.detach().double().mean(dim=0)
    base = base.detach().double() - centre
    query = query.detach().double() - centre
    square = base.square().sum(dim=1)
    rows = max(1, _TILE_BYTES // (8 * max(base.shape[0], n_neighbors * base.shape[1])))
    distances, indices = [], []
    for start in range(0, query.shape[0], rows):
        tile = query[start : start + rows]
        # The order within a row needs no |query|^2. The products are float64 because they cancel.
        score = torch.addmm(square, tile, base.T, alpha=-2)
        if labels is not None:
            score[labels[1][start : start + rows, None] == labels[0]] = torch.inf
        index = score.topk(n_neighbors, dim=1, largest=False, sorted=False).indices
        length = (base[index] - tile[:, None]).norm(dim=2)
        length, order = length.sort(dim=1, stable=True)
        distances.append(length.cpu())
        indices.append(index.gather(1, order).cpu())
    return torch.cat(distances).numpy(), torch.cat(indices).numpy()
