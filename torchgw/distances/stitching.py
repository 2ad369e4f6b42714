"""The shortest edges that join the components of a neighbour graph."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw.distances.neighbours import nearest_foreign

__all__ = ["Bridges", "shortest_bridges"]

Index = NDArray[np.int64]


class Bridges(NamedTuple):
    """Edges between points of different components."""

    source: Tensor  # (e,) int64
    target: Tensor  # (e,) int64
    length: Tensor  # (e,) float64, Euclidean


def shortest_bridges(points: Tensor, labels: Tensor) -> Bridges:
    """Return the minimum spanning tree over components, whose distance is their closest pair's.

    Boruvka's algorithm: in each round every component but the largest takes its shortest edge to
    another one, and what is joined becomes one component.

    Parameters
    ----------
    points : Tensor, shape (n, d)
        The vertices.
    labels : Tensor of int64, shape (n,)
        Component of each vertex, 0, 1, ...
    """
    component = labels.cpu().numpy()
    found: list[tuple[int, int, float]] = []
    # The nearest point of another component, as last searched for; -1 before the first search.
    distance = np.zeros(len(component))
    target = np.full(len(component), -1, dtype=np.int64)
    while (n_components := int(component.max()) + 1) > 1:
        _search(points, component, distance, target)
        outside = np.flatnonzero((target >= 0) & (component[target] != component))
        # The first entry of each component, after sorting by component and distance.
        order = outside[np.lexsort((distance[outside], component[outside]))]
        chosen = order[np.unique(component[order], return_index=True)[1]]
        parent = np.arange(n_components)
        for i in chosen[np.argsort(distance[chosen], kind="stable")]:
            here, there = _root(parent, int(component[i])), _root(parent, int(component[target[i]]))
            # Equal lengths could otherwise close a cycle.
            if here != there:
                parent[here] = there
                found.append((int(i), int(target[i]), float(distance[i])))
        roots = np.array([_root(parent, label) for label in range(n_components)])
        component = np.unique(roots, return_inverse=True)[1][component]
    ends = [torch.tensor([edge[i] for edge in found], device=points.device) for i in (0, 1)]
    length = torch.tensor([edge[2] for edge in found], dtype=torch.float64, device=points.device)
    return Bridges(ends[0], ends[1], length)


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
        marks, where = (torch.from_numpy(part).to(points.device) for part in (labels, query))
        found = nearest_foreign(points, marks, where)
        distance[query], target[query] = (part[:, 0].cpu().numpy() for part in found)


def _root(parent: Index, label: int) -> int:
    """Return the representative of a label, halving the path to it."""
    while parent[label] != label:
        parent[label] = parent[parent[label]]
        label = int(parent[label])
    return label
