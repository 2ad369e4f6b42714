"""The shortest edges that join the components of a neighbour graph."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from torchgw.distances.neighbours import nearest_foreign

__all__ = ["Bridges", "shortest_bridges"]

Index = NDArray[np.int64]


class Bridges(NamedTuple):
    """Edges between points of different components."""

    source: Index  # (e,)
    target: Index  # (e,)
    length: NDArray[np.float64]  # (e,) Euclidean


def shortest_bridges(points: Tensor, labels: Index) -> Bridges:
    """Return the minimum spanning tree over components, whose distance is their closest pair's.

    Boruvka's algorithm: in each round every component but the largest takes its shortest edge to
    another one, and what is joined becomes one component.

    Parameters
    ----------
    points : Tensor, shape (n, d)
        The vertices.
    labels : ndarray, shape (n,)
        Component of each vertex, 0, 1, ...
    """
    found: list[tuple[int, int, float]] = []
    # The nearest point of another component, as last searched for; -1 before the first search.
    distance = np.zeros(labels.shape[0])
    target = np.full(labels.shape[0], -1, dtype=np.int64)
    while (n_components := int(labels.max()) + 1) > 1:
        _search(points, labels, distance, target)
        outside = np.flatnonzero((target >= 0) & (labels[target] != labels))
        # The first entry of each component, after sorting by component and distance.
        order = outside[np.lexsort((distance[outside], labels[outside]))]
        chosen = order[np.unique(labels[order], return_index=True)[1]]
        parent = np.arange(n_components)
        for i in chosen[np.argsort(distance[chosen], kind="stable")]:
            here, there = _root(parent, int(labels[i])), _root(parent, int(labels[target[i]]))
            # Equal lengths could otherwise close a cycle.
            if here != there:
                parent[here] = there
                found.append((int(i), int(target[i]), float(distance[i])))
        roots = np.array([_root(parent, label) for label in range(n_components)])
        labels = np.unique(roots, return_inverse=True)[1][labels]
    return Bridges(
        np.array([source for source, _, _ in found], dtype=np.int64),
        np.array([target for _, target, _ in found], dtype=np.int64),
        np.array([length for _, _, length in found], dtype=np.float64),
    )


def _search(points: Tensor, labels: Index, distance: NDArray[np.float64], target: Index) -> None:
    """Bring the nearest outside points up to date, in place, where it can matter.

    Components only grow, so an old answer that is still outside is right, and one that no longer is
    bounds the new distance from below: it need not be searched for if its component has a shorter
    edge already. The largest component is never searched from; the others reach it.
    """
    stale = (target < 0) | (labels[target] == labels)
    shortest = np.full(int(labels.max()) + 1, np.inf)
    np.minimum.at(shortest, labels[~stale], distance[~stale])
    largest = np.bincount(labels).argmax()
    query = np.flatnonzero(stale & (labels != largest) & (distance < shortest[labels]))
    if len(query):
        distance[query], target[query] = nearest_foreign(points, labels, query)


def _root(parent: Index, label: int) -> int:
    """Return the representative of a label, halving the path to it."""
    while parent[label] != label:
        parent[label] = parent[parent[label]]
        label = int(parent[label])
    return label
