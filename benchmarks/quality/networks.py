"""Trees and networks against noisy copies, and cells measured twice."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components, minimum_spanning_tree, shortest_path
from scipy.spatial.distance import cdist

from benchmarks.quality.instances import (
    Array,
    Index,
    Instance,
    from_geodesics,
    from_matrices,
    hits,
    permutation_plan,
)
from benchmarks.solves import snare

__all__ = [
    "MissingDataError", "edges_kept", "geometric", "rewired", "scale_free", "snare_cells",
    "snare_points", "snare_scot", "tree",
]  # fmt: skip

Generator = np.random.Generator


class MissingDataError(Exception):
    """The data of a problem are not on this machine."""


def tree(rng: Generator, n: int, noise: float) -> Instance:
    """Random tree with random edge lengths against a copy whose lengths are off by a share."""
    parent = np.array([int(rng.integers(node)) for node in range(1, n)])
    edges = np.column_stack([np.arange(1, n), parent])
    length = rng.uniform(0.5, 1.5, size=n - 1)
    other = length * (1 + noise * rng.normal(size=n - 1))
    order = rng.permutation(n)
    match = np.argsort(order)
    d_x = _path_lengths(edges, n, length)
    d_y = _path_lengths(match[edges], n, other)
    return from_matrices(d_x, d_y, hits(match), answer=permutation_plan(match))


def scale_free(rng: Generator, n: int, extra: float, attached: int = 3) -> Instance:
    """Barabasi-Albert network against a copy with a share of random extra edges, hop counts."""
    edges = []
    # nodes are listed once for each of their edges: a draw is by degree
    ends = list(range(attached))
    for node in range(attached, n):
        targets: set[int] = set()
        while len(targets) < attached:
            targets.add(ends[int(rng.integers(len(ends)))])
        edges += [(node, target) for target in sorted(targets)]
        ends += [*sorted(targets), *[node] * attached]
    return _network_pair(rng, np.array(edges), n, extra)


def rewired(rng: Generator, n: int, degree: float, share: float) -> Instance:
    """Erdos-Renyi network against a copy with a share of its edges put elsewhere, 0/1 adjacency.

    The metric is the edges kept by a matching over those that the true one keeps: leaves and
    isolated nodes can be exchanged.
    """
    d_x = np.triu(rng.random((n, n)) < degree / n, 1)
    copy = d_x.copy()
    edges = np.argwhere(d_x)
    gone = edges[rng.choice(len(edges), round(share * len(edges)), replace=False)]
    free = np.argwhere(np.triu(~d_x, 1))
    copy[tuple(gone.T)] = False
    copy[tuple(free[rng.choice(len(free), len(gone), replace=False)].T)] = True
    order = rng.permutation(n)
    match = np.argsort(order)
    tables = [np.asarray(table | table.T, dtype=np.float64) for table in (d_x, copy)]
    tables[1] = tables[1][np.ix_(order, order)]
    most = edges_kept(tables[0], tables[1], match)
    return from_matrices(
        *tables, lambda plan: edges_kept(tables[0], tables[1], plan.argmax(1)) / most,
        answer=permutation_plan(match), network=True,
    )  # fmt: skip


def edges_kept(d_x: Array, d_y: Array, match: Index) -> int:
    """Count the edges of X whose ends are matched to the ends of an edge of Y."""
    return int(((d_x > 0) & (d_y[np.ix_(match, match)] > 0)).sum()) // 2


def geometric(rng: Generator, n: int, extra: float, *, local: bool, degree: int = 8) -> Instance:
    """Points of the unit square joined within a radius, against a copy with extra edges, hops.

    Extra edges are drawn among pairs within two radii, or (not ``local``) among all. The second
    makes shortcuts, with which the true match has a higher value than others.
    """
    points = rng.random((n, 2))
    table = cdist(points, points)
    radius = (degree / (np.pi * n)) ** 0.5
    near = np.argwhere(np.triu(table < radius, 1))
    # a spanning tree joins what the radius leaves apart
    spanning = np.argwhere(minimum_spanning_tree(table).toarray() > 0)
    edges = np.unique(np.sort(np.concatenate([near, spanning]), axis=1), axis=0)
    allowed = np.argwhere(np.triu(table < 2 * radius, 1)) if local else None
    return _network_pair(rng, edges, n, extra, allowed)


def _network_pair(
    rng: Generator, edges: Index, n: int, extra: float, allowed: Index | None = None
) -> Instance:
    """Return hop counts of a network and of its shuffled copy with a share of extra edges."""
    known = set(map(tuple, np.sort(edges, axis=1).tolist()))
    count = len(known) + round(extra * len(known))
    while len(known) < count:
        ends = rng.integers(n, size=2) if allowed is None else rng.choice(allowed)
        low, high = sorted(ends.tolist())
        if low != high:
            known.add((low, high))
    order = rng.permutation(n)
    match = np.argsort(order)
    d_x = _path_lengths(edges, n)
    d_y = _path_lengths(match[np.array(sorted(known))], n)
    return from_matrices(d_x, d_y, hits(match), answer=permutation_plan(match))


def _path_lengths(edges: Index, n: int, length: Array | None = None) -> Array:
    weight = np.ones(len(edges)) if length is None else length
    graph = coo_array((weight, (edges[:, 0], edges[:, 1])), shape=(n, n)).tocsr()
    assert connected_components(graph, directed=False)[0] == 1
    return np.asarray(shortest_path(graph, directed=False, unweighted=length is None))


def snare_scot(rng: Generator) -> Instance:
    """SNARE-seq, SCOT's distances and epsilon; the metric is FOSCTTM, lower is better."""
    data = snare_cells(rng)
    answer = permutation_plan(data.match)
    return from_matrices(
        data.d_atac, data.d_rna, _foscttm(data), answer=answer, epsilon=snare.EPSILON
    )


def snare_points(rng: Generator) -> Instance:
    """SNARE-seq as published, points with default geodesics."""
    data = snare_cells(rng)
    return from_geodesics(data.atac, data.rna, _foscttm(data), permutation_plan(data.match))


def snare_cells(rng: Generator) -> snare.Snare:
    path = snare.data_path()
    if not path.is_file():
        raise MissingDataError(f"{path} is absent; set {snare.DATA_VARIABLE}")
    return snare.load(path, seed=int(rng.integers(2**31)))


def _foscttm(data: snare.Snare) -> Callable[[Array], float]:
    rna = snare.normalised(data.rna)

    def judge(plan: Array) -> float:
        projected = plan @ rna / np.maximum(plan.sum(1, keepdims=True), 1e-300)
        return snare.foscttm(projected, rna[data.match])

    return judge
