"""Families unlike those of the other suites, and the law of the search on them.

``python -m benchmarks strangers``: each problem is solved by defaults, for three seeds and
with its sides swapped, and beside these from the truth, from plans that are listed, from random
plans, and from where POT's conditional gradient and SciPy's FAQ end. All are followed to the same
epsilon. One line of JSON each; problems that the file has are not solved again.
"""

from __future__ import annotations

import argparse
import json
import warnings
import zlib
from pathlib import Path
from time import process_time, time
from typing import Any

import numpy as np
from scipy.optimize import quadratic_assignment
from scipy.sparse.csgraph import minimum_spanning_tree, shortest_path
from scipy.spatial import Delaunay
from scipy.spatial.distance import cdist

import torchgw

__all__ = ["FAMILIES", "main"]

Generator = np.random.Generator
Array = np.ndarray[Any, Any]
Problem = tuple[dict[str, Any], Array | None]  # arguments, and the true plan


# -- tools ----------------------------------------------------------------------------------------


def _turn(g: Generator, d: int) -> Array:
    return np.linalg.qr(g.normal(size=(d, d)))[0]


def _copies(g: Generator, x: Array, y: Array, weights: Array | None = None, **more: Any) -> Problem:
    """Reorder the second of two tables of the same things."""
    n = len(y)
    order = g.permutation(n)
    truth = np.zeros((n, n))
    mass = np.full(n, 1 / n) if weights is None else weights
    truth[order, np.arange(n)] = mass[order]
    given = {"D_X": x, "D_Y": y[order][:, order], **more}
    if weights is not None:
        given |= {"a": weights, "b": weights[order]}
    return given, truth


def _two(x: Array, y: Array, **more: Any) -> Problem:
    return {"D_X": x, "D_Y": y, **more}, None


def _hops(adjacency: Array) -> Array:
    found = shortest_path(adjacency, directed=False, unweighted=True)
    return np.where(np.isinf(found), found[np.isfinite(found)].max() + 1, found)


def _flips(g: Generator, adjacency: Array, share: float) -> Array:
    """Move so many of the edges elsewhere."""
    upper = np.triu(adjacency, 1)
    rows, columns = np.nonzero(upper)
    count = max(1, round(share * len(rows)))
    out = g.choice(len(rows), count, replace=False)
    upper[rows[out], columns[out]] = 0
    rows, columns = np.nonzero(np.triu(upper == 0, 1))
    into = g.choice(len(rows), count, replace=False)
    upper[rows[into], columns[into]] = 1
    return upper + upper.T


def _geometric(g: Generator, n: int) -> Array:
    """Join near points of the unit square, and all by a spanning tree."""
    points = g.random((n, 2))
    table = cdist(points, points)
    tree = minimum_spanning_tree(table).toarray() > 0
    near = table < np.sqrt(5 / (np.pi * n))
    np.fill_diagonal(near, False)
    return (near | tree | tree.T).astype(float)


def _dtw(first: Array, second: Array) -> float:
    cost = np.abs(first[:, None] - second)
    total = np.full((len(first) + 1, len(second) + 1), np.inf)
    total[0, 0] = 0
    for i in range(len(first)):
        for j in range(len(second)):
            total[i + 1, j + 1] = cost[i, j] + min(total[i, j], total[i, j + 1], total[i + 1, j])
    return float(total[-1, -1])


def _edit(first: Array, second: Array) -> float:
    before = np.arange(len(second) + 1)
    for i, letter in enumerate(first):
        change = before[:-1] + (second != letter)
        now = np.minimum(change, before[1:] + 1)
        now = np.concatenate([[i + 1], now])
        # insertions run along the row
        now = np.minimum.accumulate(now - np.arange(len(now))) + np.arange(len(now))
        before = now
    return float(before[-1])


def _pairwise(things: Any, distance: Any) -> Array:
    n = len(things)
    table = np.zeros((n, n))
    for i in range(n):
        for j in range(i):
            table[i, j] = table[j, i] = distance(things[i], things[j])
    return table


def _coalescent(g: Generator, n: int, rate: float = 1.0) -> tuple[Array, list[tuple[Any, ...]]]:
    """Draw a coalescent tree: the heights at which leaves meet."""
    groups = [[i] for i in range(n)]
    height, table, merges = 0.0, np.zeros((n, n)), []
    while len(groups) > 1:
        height += g.exponential(rate * 2 / (len(groups) * (len(groups) - 1)))
        one, other = sorted(g.choice(len(groups), 2, replace=False))
        second, first = groups.pop(other), groups[one]
        table[np.ix_(first, second)] = table[np.ix_(second, first)] = height
        merges.append((list(first), second, height))
        first += second
    return table, merges


def _additive(g: Generator, n: int, parents: Array) -> Array:
    """Measure along a tree with random branch lengths."""
    lengths = g.gamma(2.0, 0.5, size=n)
    table = np.zeros((n, n))
    for node in range(1, n):
        up = parents[node]
        table[node, :node] = table[up, :node] + lengths[node]
        table[:node, node] = table[node, :node]
    return table


def _zipf(g: Generator, n: int, power: float = 1.0) -> Array:
    shares = 1 / np.arange(1, n + 1) ** power
    return g.permutation(shares / shares.sum())


def _sphere(x: Array) -> Array:
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    return np.arccos(np.clip(x @ x.T, -1, 1)) * (1 - np.eye(len(x)))


def _circular(x: Array, y: Array, period: float = 1.0) -> Array:
    gap = np.abs(x[:, None] - y)
    return np.minimum(gap, period - gap)


def _klein(points: Array) -> Array:
    """Measure on a flat Klein bottle, by the images of the second point."""
    s, t = points.T
    best = np.full((len(s), len(s)), np.inf)
    for turn in (-1, 0, 1):
        other = s if turn == 0 else 1 - s
        for around in (-1, 0, 1):
            across = s[:, None] - other - around
            best = np.minimum(best, across**2 + (t[:, None] - t - turn) ** 2)
    best = np.sqrt(np.minimum(best, best.T))
    np.fill_diagonal(best, 0)
    return best


def _poincare(x: Array) -> Array:
    gap = cdist(x, x, "sqeuclidean")
    left = 1 - (x**2).sum(1)
    return np.arccosh(1 + 2 * gap / (left[:, None] * left))


def _maze(g: Generator, side: int, openings: float) -> tuple[Array, Array]:
    """Open the walls of a grid along a random spanning tree, and some more."""
    n = side * side
    joined = np.zeros((n, n), dtype=bool)
    cells = np.arange(n).reshape(side, side)
    pairs = np.concatenate([
        np.stack([cells[:, :-1].ravel(), cells[:, 1:].ravel()], 1),
        np.stack([cells[:-1].ravel(), cells[1:].ravel()], 1),
    ])  # fmt: skip
    cost = np.zeros((n, n))
    cost[pairs[:, 0], pairs[:, 1]] = g.random(len(pairs)) + 0.1
    joined |= minimum_spanning_tree(cost).toarray() > 0
    more = pairs[g.random(len(pairs)) < openings]
    joined[more[:, 0], more[:, 1]] = True
    return (joined | joined.T).astype(float), pairs


def _chain(g: Generator, n: int) -> tuple[Array, Array]:
    """Draw a branched molecule: a tree of atoms a bond apart, that keep off each other."""
    parents, where = [0], [np.zeros(3)]
    while len(where) < n:
        up = len(where) - 1 if g.random() < 0.75 else int(g.integers(len(where)))
        step = g.normal(size=3)
        spot = where[up] + 1.5 * step / np.linalg.norm(step)
        if min(np.linalg.norm(spot - one) for one in where) > 1.2:
            where.append(spot)
            parents.append(up)
    bonds = np.zeros((n, n))
    for node in range(1, n):
        bonds[node, parents[node]] = bonds[parents[node], node] = 1
    return np.array(where), bonds


# -- families -------------------------------------------------------------------------------------


def embeddings(g: Generator, n: int) -> Problem:
    """Words of two languages: topics of power-law shares, noisy turned vectors, cosine."""
    topics = g.choice(max(2, n // 6), size=n, p=_zipf(g, max(2, n // 6), 1.2))
    x = 1.2 * g.normal(size=(max(2, n // 6), 30))[topics] + g.normal(size=(n, 30))
    y = x + 0.5 * g.normal(size=x.shape)
    return _copies(g, cdist(x, x, "cosine"), cdist(y, y, "cosine"))


def frequent_words(g: Generator, n: int) -> Problem:
    """The same with the frequencies of words as weights."""
    x = g.normal(size=(n, 20)) * 0.85 ** np.arange(20)
    y = x + 0.3 * g.normal(size=x.shape) * 0.85 ** np.arange(20)
    return _copies(g, cdist(x, x, "cosine"), cdist(y, y, "cosine"), _zipf(g, n))


def time_series(g: Generator, n: int) -> Problem:
    """Series and warped ones, by dynamic time warping."""
    length = 24
    phase, pace = g.random((n, 1)), g.uniform(1, 4, size=(n, 1))
    t = np.linspace(0, 1, length)
    x = np.sin(2 * np.pi * (pace * t + phase)) * g.uniform(0.5, 2, size=(n, 1))
    warped = t ** g.uniform(0.8, 1.25, size=(n, 1))
    y = np.sin(2 * np.pi * (pace * warped + phase)) + 0.1 * g.normal(size=(n, length))
    return _copies(g, _pairwise(x, _dtw), _pairwise(y, _dtw))


def ultrametric(g: Generator, n: int) -> Problem:
    """A coalescent tree and itself with other heights."""
    table, _ = _coalescent(g, n)
    heights, place = np.unique(table, return_inverse=True)
    steps = np.diff(heights) * g.lognormal(0, 0.5, size=len(heights) - 1)
    other = np.concatenate([[0], np.cumsum(steps)])[place.reshape(table.shape)]
    return _copies(g, table, other)


def two_coalescents(g: Generator, n: int) -> Problem:
    """Two trees that have nothing to do with each other, of other sizes."""
    return _two(_coalescent(g, n)[0], _coalescent(g, max(3, n - n // 4))[0])


def phylogeny(g: Generator, n: int) -> Problem:
    """Distances along one tree, branch lengths drawn twice, a tenth of the branches moved."""
    parents = np.array([0] + [int(g.integers(i)) for i in range(1, n)])
    moved = parents.copy()
    for node in g.choice(np.arange(1, n), max(1, n // 10), replace=False):
        moved[node] = g.integers(node)
    return _copies(g, _additive(g, n, parents), _additive(g, n, moved))


def strings(g: Generator, n: int) -> Problem:
    """Edit distances of strings of descent, and of mutated ones: integers."""
    words = [g.integers(4, size=12)]
    while len(words) < n:
        new = words[int(g.integers(len(words)))].copy()
        new[g.random(len(new)) < 0.25] = g.integers(4)
        words.append(np.delete(new, g.integers(len(new))) if len(new) > 8 else new)
    others = []
    for word in words:
        new = word.copy()
        new[g.random(len(new)) < 0.08] = g.integers(4)
        others.append(new)
    return _copies(g, _pairwise(words, _edit), _pairwise(others, _edit))


def hyperbolic(g: Generator, n: int) -> Problem:
    """Points of a Poincare disk and their noisy copy."""
    angle, radius = 2 * np.pi * g.random(n), np.tanh(np.sqrt(g.random(n)) * 2)
    x = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], 1) * 0.98
    y = x + 0.03 * (1 - radius[:, None] ** 2) * g.normal(size=x.shape)
    y /= np.maximum(1, np.linalg.norm(y, axis=1, keepdims=True) / 0.99)
    return _copies(g, _poincare(x), _poincare(y))


def torus(g: Generator, n: int) -> Problem:
    """Two draws of a flat torus."""
    x, y = g.random((n, 2)), g.random((max(4, n - n // 5), 2))
    tables = [
        np.sqrt(_circular(p[:, 0], p[:, 0]) ** 2 + (0.6 * _circular(p[:, 1], p[:, 1])) ** 2)
        for p in (x, y)
    ]
    return _two(*tables)


def klein(g: Generator, n: int) -> Problem:
    """Two draws of a Klein bottle."""
    return _two(_klein(g.random((n, 2))), _klein(g.random((n, 2))))


def conformers(g: Generator, n: int) -> Problem:
    """Bonds counted along a molecule, and its atoms' distances in space."""
    where, bonds = _chain(g, n)
    return _copies(g, _hops(bonds) ** 0.6, cdist(where, where))


def molecules(g: Generator, n: int) -> Problem:
    """Fused: two molecules' bonds, elements as features."""
    m = max(4, n - n // 6)
    sides = [_hops(_chain(g, size)[1]) for size in (n, m)]
    kinds = [g.choice(4, size=size, p=[0.6, 0.2, 0.15, 0.05]) for size in (n, m)]
    linear = (kinds[0][:, None] != kinds[1]).astype(float)
    return _two(*sides, M=linear, alpha=float(g.choice([0.5, 0.8, 0.95])))


def expression(g: Generator, n: int) -> Problem:
    """Correlation distances of cells in types of other shares, with batch effects."""
    k, genes = 6, 60
    centres = g.gamma(1.0, 1.0, size=(k, genes))
    kinds = [g.choice(k, size=size, p=g.dirichlet(np.full(k, 2.0))) for size in (n, n - n // 10)]
    cells = [
        np.log1p(g.poisson(3 * centres[kind] * g.gamma(4, 0.25, size=genes))) for kind in kinds
    ]
    return _two(*[cdist(x, x, "correlation") for x in cells])


def correlated(g: Generator, n: int) -> Problem:
    """Correlation distances of two assays of the same cells."""
    hidden = g.normal(size=(n, 6))
    x = hidden @ g.normal(size=(6, 40)) + g.normal(size=(n, 40))
    y = np.tanh(hidden @ g.normal(size=(6, 25))) + 0.4 * g.normal(size=(n, 25))
    return _copies(g, cdist(x, x, "correlation"), cdist(y, y, "correlation"))


def images(g: Generator, n: int) -> Problem:
    """Pixels with their brightness as weights: strokes, and strokes turned and moved."""
    side = max(4, round(np.sqrt(3 * n)))
    grid = np.stack(np.meshgrid(np.arange(side), np.arange(side)), -1).reshape(-1, 2) / side
    centre = g.uniform(0.2, 0.8, size=(3, 2))
    tables, weights = [], []
    for angle, spread in ((0.0, 0.1), (g.uniform(0, 6), 0.13)):
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        bright = np.exp(-cdist(grid, (centre - 0.5) @ turn + 0.5, "sqeuclidean") / spread**2).sum(1)
        lit = np.sort(np.argsort(-bright, kind="stable")[:n])
        tables.append(cdist(grid[lit], grid[lit]))
        weights.append(bright[lit] / bright[lit].sum())
    return _two(*tables, a=weights[0], b=weights[1])


def directions(g: Generator, n: int) -> Problem:
    """Great circles between draws of two densities of three modes on a sphere."""
    modes = g.normal(size=(3, 3))
    draws = [
        modes[g.choice(3, size=size, p=p)] + 0.5 * g.normal(size=(size, 3))
        for size, p in ((n, [0.5, 0.3, 0.2]), (n, [0.4, 0.3, 0.3]))
    ]
    return _two(*[_sphere(x) for x in draws])


def clocks(g: Generator, n: int) -> Problem:
    """Times of a day, of two densities with weights: a circle."""
    x, y = g.vonmises(0, 1, size=n) / (2 * np.pi), g.vonmises(0, 0.7, size=n + 3) / (2 * np.pi)
    a, b = g.dirichlet(np.full(n, 2.0)), g.dirichlet(np.full(n + 3, 2.0))
    return _two(_circular(x % 1, x % 1), _circular(y % 1, y % 1), a=a, b=b)


def mazes(g: Generator, n: int) -> Problem:
    """Steps in a maze and in one with some walls elsewhere."""
    side = max(3, round(np.sqrt(n)))
    maze, pairs = _maze(g, side, 0.08)
    other = maze.copy()
    for one, two in pairs[g.choice(len(pairs), max(1, len(pairs) // 12), replace=False)]:
        other[one, two] = other[two, one] = 1
    return _copies(g, _hops(maze), _hops(other))


def shares(g: Generator, n: int) -> Problem:
    """Clusters of other shares on either side."""
    k, d = 5, 8
    centres = 3 * g.normal(size=(k, d)) / np.sqrt(d)
    draws = [
        centres[g.choice(k, size=size, p=g.dirichlet(np.full(k, 1.5)))]
        + 0.35 * g.normal(size=(size, d))
        for size in (n, max(5, n - n // 7))
    ]
    return _two(*[cdist(x, x) for x in draws])


def integers(g: Generator, n: int) -> Problem:
    """Tables of small integers: nothing but ties."""
    tables = [np.triu(g.integers(1, 5, size=(size, size)), 1) for size in (n, n)]
    return _two(*[(table + table.T).astype(float) for table in tables])


def hops(g: Generator, n: int) -> Problem:
    """Hops between near points, some edges elsewhere in the copy."""
    graph = _geometric(g, n)
    return _copies(g, _hops(graph), _hops(_flips(g, graph, 0.06)))


def blocks(g: Generator, n: int) -> Problem:
    """Adjacency of communities; the copy has a tenth of its edges elsewhere."""
    kind = g.integers(4, size=n)
    chance = np.where(kind[:, None] == kind, 0.5, 0.06)
    upper = np.triu(g.random((n, n)) < chance, 1)
    graph = (upper | upper.T).astype(float)
    return _copies(g, graph, _flips(g, graph, 0.1))


def hubs(g: Generator, n: int) -> Problem:
    """Citations: new nodes prefer hubs; weights by degree."""
    graph = np.zeros((n, n))
    for node in range(1, n):
        chance = graph[:node].sum(1) + 1
        for up in g.choice(node, min(2, node), replace=False, p=chance / chance.sum()):
            graph[node, up] = graph[up, node] = 1
    other = _flips(g, graph, 0.05)
    order = g.permutation(n)
    degree = [graph.sum(0) + 0.5, (other.sum(0) + 0.5)[order]]
    a, b = (one / one.sum() for one in degree)
    return _two(graph, other[order][:, order], a=a, b=b)


def products(g: Generator, n: int) -> Problem:
    """Gram matrices, which have negative entries and a diagonal."""
    x, y = g.normal(size=(n, 4)), g.normal(size=(n, 4)) * [1.5, 1, 1, 0.5]
    return _two(x @ x.T, y @ y.T, scale=None)


def noisy_products(g: Generator, n: int) -> Problem:
    x = g.normal(size=(n, 5))
    y = x + 0.2 * g.normal(size=x.shape)
    return _copies(g, x @ x.T, y @ y.T)


def squared(g: Generator, n: int) -> Problem:
    """Squared distances of draws of two shapes."""
    x = g.normal(size=(n, 3)) * [2, 1, 0.4]
    y = g.normal(size=(n + 2, 3)) * [2, 1, 0.5]
    return _two(cdist(x, x, "sqeuclidean"), cdist(y, y, "sqeuclidean"))


def few_to_many(g: Generator, n: int) -> Problem:
    """Landmarks of a shape, and many points of it."""
    y = g.normal(size=(n, 3)) * [3, 1.5, 0.7]
    x = y[g.choice(n, max(4, n // 12), replace=False)]
    x = (x + 0.1 * g.normal(size=x.shape)) @ _turn(g, 3)
    return _two(cdist(x, x), cdist(y, y))


def fused_blobs(g: Generator, n: int) -> Problem:
    """Fused: structure and features tell different stories."""
    x, y = g.normal(size=(n, 3)), g.normal(size=(n, 3))
    f, h = g.normal(size=(n, 2)), g.normal(size=(n, 2))
    given = {"D_X": cdist(x, x), "D_Y": cdist(y, y), "M": cdist(f, h)}
    return given | {"alpha": float(g.choice([0.3, 0.6, 0.9]))}, None


def slices(g: Generator, n: int) -> Problem:
    """Fused and partial: slices of a tissue that share three quarters, with noisy genes."""
    spots = g.random((round(n * 4 / 3), 2))
    genes = np.sin(4 * spots @ g.normal(size=(2, 6))) + 0.5 * g.normal(size=(len(spots), 6))
    first = np.argsort(spots[:, 0])[:n]
    second = g.permutation(np.argsort(-spots[:, 0])[:n])
    linear = cdist(genes[first], genes[second] + 0.4 * g.normal(size=(n, 6)))
    turned = spots[second] @ _turn(g, 2)
    shared = np.isin(first, second).sum() / n
    truth = (first[:, None] == second) / n
    given = {"D_X": cdist(spots[first], spots[first]), "D_Y": cdist(turned, turned), "M": linear}
    return given | {"alpha": 0.7, "mass": float(shared)}, truth


def partial(g: Generator, n: int) -> Problem:
    """Two shapes that share a part."""
    part = round(0.7 * n)
    x = g.normal(size=(n, 3)) * [2, 1.2, 0.8]
    y = np.concatenate(
        [x[:part] + 0.03 * g.normal(size=(part, 3)), 3 + g.normal(size=(n - part, 3))]
    )
    order = g.permutation(n)
    truth = (np.arange(n)[:, None] == order) * (order < part) / n
    given = {"D_X": cdist(x, x), "D_Y": cdist(y[order], y[order]), "mass": part / n}
    return given, truth


def unbalanced(g: Generator, n: int) -> Problem:
    """Clusters of other shares, masses free."""
    given, _ = shares(g, n)
    return given | {"unbalanced": float(g.choice([0.1, 0.5, 2.0]))}, None


def semi_relaxed(g: Generator, n: int) -> Problem:
    """A part of a network in the network."""
    graph = _hops(_geometric(g, n))
    some = np.sort(g.choice(n, max(4, round(0.7 * n)), replace=False))
    truth = (some[:, None] == np.arange(n)) / len(some)
    given = {"D_X": graph[np.ix_(some, some)], "D_Y": graph, "unbalanced": (np.inf, 0.0)}
    return given, truth


def kl_kernels(g: Generator, n: int) -> Problem:
    """Positive similarities under the KL loss."""
    x = g.normal(size=(n, 3))
    y = x + 0.15 * g.normal(size=x.shape)
    tables = [np.exp(-cdist(p, p, "sqeuclidean") / 4) + 0.02 for p in (x, y)]
    return _copies(g, *tables, loss="kl")


def absolute(g: Generator, n: int) -> Problem:
    """Strings' lengths of the way, under the absolute loss."""
    given, truth = phylogeny(g, n)
    return given | {"loss": "absolute"}, truth


def blurred(g: Generator, n: int) -> Problem:
    given, truth = conformers(g, n)
    return given | {"epsilon": 0.05}, truth


def sharp(g: Generator, n: int) -> Problem:
    given, truth = directions(g, n)
    return given | {"epsilon": 3e-4}, truth


def single(g: Generator, n: int) -> Problem:
    """Tables of float32."""
    given, truth = correlated(g, n)
    return given | {name: given[name].astype(np.float32) for name in ("D_X", "D_Y")}, truth


def directed(g: Generator, n: int) -> Problem:
    """Travel times: uphill takes longer."""
    x = g.normal(size=(n, 2))
    height = np.sin(2 * x[:, 0]) + x[:, 1]
    rise = np.maximum(height - height[:, None], 0)
    tables = [cdist(x, x) + 0.7 * rise, cdist(x, x) + rise]
    order = g.permutation(n)
    tables[1] = tables[1][order][:, order] * g.lognormal(0, 0.05, size=(n, n))
    np.fill_diagonal(tables[1], 0)
    truth = np.zeros((n, n))
    truth[order, np.arange(n)] = 1 / n
    sides = [torchgw.distances.DirectedDistance(table) for table in tables]
    return {"X": sides[0], "Y": sides[1]}, truth


def polygons(g: Generator, n: int) -> Problem:
    """A regular polygon and a lattice: symmetry everywhere."""
    angle = 2 * np.pi * np.arange(n) / n
    ring = np.stack([np.cos(angle), np.sin(angle)], 1)
    side = int(np.ceil(np.sqrt(n)))
    lattice = np.stack(np.divmod(np.arange(side * side), side), 1).astype(float)
    return _two(cdist(ring, ring), cdist(lattice, lattice, "cityblock"))


def heat(g: Generator, n: int) -> Problem:
    """Heat kernels of a network and of itself with edges elsewhere."""
    graph = _geometric(g, n)
    tables = []
    for one in (graph, _flips(g, graph, 0.08)):
        values, vectors = np.linalg.eigh(np.diag(one.sum(1)) - one)
        tables.append((vectors * np.exp(-0.7 * values)) @ vectors.T)
    return _copies(g, *tables)


def codes(g: Generator, n: int) -> Problem:
    """Hamming distances of binary codes of which some bits flip."""
    x = g.random((n, 16)) < g.random(16)
    y = x ^ (g.random(x.shape) < 0.06)
    return _copies(g, *[cdist(p, p, "cityblock") for p in (x.astype(float), y.astype(float))])


def connectomes(g: Generator, n: int) -> Problem:
    """Weights of brain regions: log-normal, modular, between two subjects."""
    kind = np.sort(g.integers(6, size=n))
    strength = np.where(kind[:, None] == kind, 0.5, -0.8)
    shared = g.normal(size=(n, n)) + strength
    tables = []
    for _ in range(2):
        upper = np.triu(np.exp(shared + 0.5 * g.normal(size=(n, n))), 1)
        tables.append(upper + upper.T)
    return _copies(g, *tables)


def histograms(g: Generator, n: int) -> Problem:
    """Earth mover's distances of histograms, and of noisy counts of them."""
    x = g.dirichlet(np.full(12, 0.4), size=n)
    y = np.stack([g.multinomial(60, row) for row in x]) / 60
    return _copies(g, *[cdist(p.cumsum(1), p.cumsum(1), "cityblock") for p in (x, y)])


def rankings(g: Generator, n: int) -> Problem:
    """Kendall's distances of rankings around three opinions."""
    opinions = np.stack([g.permutation(9) for _ in range(3)])
    ranks = [
        np.argsort(opinions[g.integers(3, size=size)] + 2.5 * g.normal(size=(size, 9)), axis=1)
        for size in (n, n)
    ]
    i, j = np.triu_indices(9, 1)
    signs = [(rank[:, i] < rank[:, j]).astype(float) for rank in ranks]
    return _two(*[cdist(sign, sign, "cityblock") for sign in signs])


def heavy(g: Generator, n: int) -> Problem:
    """Points with heavy tails, given as points."""
    x = g.standard_t(1.5, size=(n, 3))
    y = (x + 0.1 * g.normal(size=x.shape)) @ _turn(g, 3)
    order = g.permutation(n)
    truth = np.zeros((n, n))
    truth[order, np.arange(n)] = 1 / n
    return {"X": x, "Y": y[order]}, truth


def curves(g: Generator, n: int) -> Problem:
    """A spiral and a wave, as points: lengths along them, of other densities."""
    s, t = np.sort(g.random(n)), np.sort(g.beta(2, 1, size=n))
    spiral = np.stack([(1 + 3 * s) * np.cos(9 * s), (1 + 3 * s) * np.sin(9 * s)], 1)
    wave = np.stack([8 * t, np.sin(6 * t)], 1)
    noise = 0.02 * g.normal(size=(2, n, 2))
    return {"X": spiral + noise[0], "Y": g.permutation(wave + noise[1])}, None


def polished(g: Generator, n: int) -> Problem:
    given, truth = hops(g, n)
    return given | {"polish": True}, truth


def proximal(g: Generator, n: int) -> Problem:
    given, truth = blocks(g, n)
    return given | {"regularization": "proximal"}, truth


def lattices(g: Generator, n: int) -> Problem:
    """City blocks of two rectangles of streets, some lots empty."""
    width = max(3, round(np.sqrt(n)))
    sides = []
    for wide in (width, width + 1):
        lots = np.stack(np.divmod(np.arange(wide * width), wide), 1).astype(float)
        lots = lots[np.sort(g.choice(len(lots), round(0.85 * len(lots)), replace=False))]
        sides.append(cdist(lots, lots, "cityblock"))
    return _two(*sides)


def _roads(g: Generator, n: int) -> Array:
    """Measure along the roads of a town: edges of a triangulation, of which half are left."""
    places = g.random((n, 2)) ** g.uniform(1, 1.6)
    gap, length = cdist(places, places), np.zeros((n, n))
    for triangle in Delaunay(places).simplices:
        pairs = np.ix_(triangle, triangle)
        length[pairs] = gap[pairs]
    tree = minimum_spanning_tree(length).toarray()
    kept = np.triu(g.random((n, n)) < 0.55, 1) * length
    return shortest_path(np.maximum(tree, kept), directed=False)


def towns(g: Generator, n: int) -> Problem:
    """Ways along the roads of two towns."""
    return _two(_roads(g, n), _roads(g, max(5, n - n // 5)))


def kl_towns(g: Generator, n: int) -> Problem:
    """The same under the KL loss, nothing at distance zero."""
    given, _ = towns(g, n)
    return _two(*[table + 0.01 * table.max() for table in given.values()], loss="kl")


def kl_counts(g: Generator, n: int) -> Problem:
    """How often things occur together, counted twice, under the KL loss."""
    topics = g.dirichlet(np.full(4, 0.6), size=n)
    tables = []
    for _ in range(2):
        upper = np.triu(g.poisson(40 * topics @ topics.T + 0.5))
        table = upper + np.triu(upper, 1).T + 0.5
        tables.append(table / table.mean())
    return _copies(g, *tables, loss="kl")


def lines(g: Generator, n: int) -> Problem:
    """Angles between lines through the origin: a projective plane, two draws."""
    sides = []
    for size in (n, max(5, n - n // 8)):
        x = g.normal(size=(size, 3)) * [1, 0.8, 0.6]
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        sides.append(np.arccos(np.minimum(abs(x @ x.T), 1)) * (1 - np.eye(size)))
    return _two(*sides)


def laid_trees(g: Generator, n: int) -> Problem:
    """Hops of a binary tree, and the tree laid into a Poincare disk."""
    place = np.arange(1, n + 1)
    depth = np.floor(np.log2(place))
    graph = np.zeros((n, n))
    graph[place[1:] - 1, place[1:] // 2 - 1] = 1
    angle = 2 * np.pi * (place - 2**depth + 0.5) / 2**depth + 0.05 * g.normal(size=n)
    radius = 0.985 * np.tanh(0.55 * depth)
    x = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], 1)
    return _copies(g, _hops(graph + graph.T), _poincare(x))


# Each family, and the most points that it is asked for.
FAMILIES = {
    family: most for most, some in {
        400: (embeddings, frequent_words, ultrametric, two_coalescents, hyperbolic, torus, klein,
              expression, correlated, images, directions, clocks, mazes, shares, few_to_many,
              single, squared, products, noisy_products, codes, histograms, rankings, heavy,
              curves, hops, lattices),
        130: (phylogeny, conformers, molecules, integers, blocks, hubs, fused_blobs, blurred,
              sharp, polygons, heat, connectomes, unbalanced, semi_relaxed, kl_kernels,
              time_series, strings, polished, proximal, partial, slices),
        48: (absolute, directed),
        300: (towns, lines, laid_trees),
        180: (kl_towns, kl_counts),
    }.items() for family in some
}  # fmt: skip
BY_NAME = {family.__name__: family for family in FAMILIES}
SIZES = 6, 9, 14, 20, 30, 45, 70, 110, 180, 300, 400


# -- the law --------------------------------------------------------------------------------------


def _solved(given: dict[str, Any], **more: Any) -> tuple[Any, float, list[str]]:
    """Solve; return the result, the seconds of a CPU and what was warned of."""
    clock = process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = torchgw.solve(**given, **more)
    names = sorted({one.category.__name__ for one in caught})
    return found, process_time() - clock, names


def swapped(given: dict[str, Any]) -> dict[str, Any]:
    """Exchange the sides of a problem."""
    names = {"D_X": "D_Y", "D_Y": "D_X", "X": "Y", "Y": "X", "a": "b", "b": "a"}
    other = {names.get(name, name): part for name, part in given.items()}
    if "M" in given:
        other["M"] = given["M"].T.copy()
    if isinstance(given.get("unbalanced"), tuple):
        other["unbalanced"] = given["unbalanced"][::-1]
    return other


def make(name: str, n: int, seed: int) -> Problem:
    """Make a problem from its name and numbers alone."""
    return BY_NAME[name](np.random.default_rng([zlib.crc32(name.encode()), n, seed]), n)


def weights_of(given: dict[str, Any], shape: tuple[int, int]) -> list[Array]:
    return [
        np.asarray(given.get(name, np.full(size, 1 / size)))
        for name, size in zip("ab", shape, strict=True)
    ]


def random_plan(g: Generator, a: Array, b: Array) -> Array:
    """Draw a plan: a random one, more or less sharp, scaled to its marginals."""
    plan = np.exp(g.choice([1.0, 4.0, 15.0]) * g.random((len(a), len(b))))
    for _ in range(1_000):
        plan *= (a / plan.sum(1))[:, None]
        plan *= b / plan.sum(0)
        if np.abs(plan.sum(1) - a).max() < 1e-9:
            break
    return plan


DOUBTS = {"ConvergenceWarning", "SearchWarning", "AmbiguityWarning"}


def judge(name: str, n: int, seed: int, budget: float) -> dict[str, Any]:
    """Solve one problem by defaults and in other ways, for so many seconds beyond the defaults."""
    given, truth = make(name, n, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        told = torchgw.explain(**given, random_state=0)
    found, seconds, names = _solved(given, random_state=0)
    shape, epsilon = tuple(found.plan.shape), found.epsilon
    a, b = weights_of(given, shape)
    mass = given.get("mass", 1.0)
    own = found.report.objective

    def said(one: Any, warned: list[str]) -> str:
        words = [one.doubt] if one.doubt else []
        words += ["ambiguous"] if one.is_ambiguous else []
        words += [one.status.name] if not one.converged else []
        return "; ".join(words + sorted(DOUBTS & set(warned)))

    row = {
        "family": name, "n": n, "seed": seed, "shape": shape, "status": found.status.name,
        "objective": own, "epsilon": epsilon, "said": said(found, names), "cpu_s": seconds,
        "forecast": told.seconds,
        "warned": names, "ambiguity": float(found.ambiguity),
    }  # fmt: skip
    runs, ends = [[own, row["said"], seconds]], {}
    # what takes long is asked once more only
    for state in (1, 2)[: 1 if seconds > 3 else 2]:
        again, took, warned = _solved(given, random_state=state)
        runs.append([again.report.objective, said(again, warned), took])
        ends[f"seed {state}"] = again.report.objective
    plans = {}
    # the loss of KL is of one side from the other
    if given.get("loss") != "kl":
        again, took, warned = _solved(swapped(given), random_state=0)
        ends["swapped"] = again.report.objective
        runs.append([again.report.objective, said(again, warned), took])
        plans["swapped plan"] = np.asarray(again.plan).T.copy()
    if truth is not None:
        plans["truth"] = truth
    # a sharp plan has none
    given = given | ({"epsilon": epsilon} if epsilon else {})

    def follow(label: str, init: Any) -> None:
        try:
            end = _solved(given, random_state=0, init=init)[0]
        except torchgw.TorchGWError as error:
            row.setdefault("refused", f"{label}: {error}")
            return
        # what misses its marginals has no objective to compare
        if end.converged and np.isfinite(end.report.objective):
            ends[label] = min(end.report.objective, ends.get(label, np.inf))

    for label, plan in plans.items():
        follow(label, plan)
    for k, one in enumerate(found.alternatives):
        follow(f"listed {k}", one)
    clock = process_time()
    g = np.random.default_rng([7, n, seed])
    tables = [given.get(side) for side in ("D_X", "D_Y")]
    plain = tables[0] is not None and given.get("loss", "square") == "square"
    plain &= not {"M", "mass", "unbalanced"} & set(given)
    k = 0
    while process_time() - clock < budget and k < 60:
        start = random_plan(g, a, b) if k else np.outer(a, b)
        follow(f"random {k}" if k else "product", start * mass)
        if plain and k % 3 == 0 and np.allclose(start.sum(1), a, atol=1e-8):
            follow(f"POT {k}", _conditional_gradient(tables, a, b, start))
            if shape[0] == shape[1] and "a" not in given:
                follow(f"FAQ {k}", _faq(tables, g))
        k += 1
    row["starts"] = k
    least = min(ends, key=ends.__getitem__)
    scale = max(abs(own), abs(ends[least]), 1e-300)
    row |= {
        "least": ends[least], "by": least, "above": (own - ends[least]) / scale, "runs": runs,
        "truth": ends.get("truth"), "spent": process_time() - clock,
    }  # fmt: skip
    best = min(own, ends[least])
    row["each"] = [(one - best) / scale for one, *_ in runs]
    return row


def _conditional_gradient(tables: list[Any], a: Array, b: Array, start: Array) -> Array:
    import ot

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x, y = (np.asarray(table, dtype=float) for table in tables)
        return np.asarray(ot.gromov.gromov_wasserstein(x, y, a, b, G0=start, max_iter=200))


def _faq(tables: list[Any], g: Generator) -> Array:
    x, y = (np.asarray(table, dtype=float) for table in tables)
    n = len(x)
    start = 0.5 * np.eye(n)[g.permutation(n)] + 0.5 / n
    options = {"maximize": True, "P0": start}
    order = quadratic_assignment(x, y, method="faq", options=options).col_ind
    plan = np.zeros((n, n))
    plan[np.arange(n), order] = 1 / n
    return plan


def problems(count: int, first: int) -> list[tuple[str, int, int]]:
    """List problems, all families by turns, of sizes that each family goes through."""
    listed = []
    for turn in range(first, first + count):
        for place, (family, most) in enumerate(FAMILIES.items()):
            sizes = [size for size in SIZES if size <= most]
            listed.append((family.__name__, sizes[(3 * turn + place) % len(sizes)], turn))
    return listed


def _work(asked: argparse.Namespace, part: int) -> None:
    """Solve every so-manieth problem that the file does not have, until the time is up."""
    out = asked.out.with_suffix(f".{part}.jsonl")
    files = asked.out.parent.glob(asked.out.stem + ".*.jsonl")
    done = {
        (row["family"], row["n"], row["seed"])
        for file in files for row in map(json.loads, file.read_text().splitlines())
    }  # fmt: skip
    listed = [one for one in problems(asked.turns, asked.first)
              if not asked.families or one[0] in asked.families]  # fmt: skip
    with out.open("a") as file:
        for place, one in enumerate(listed):
            if place % asked.jobs != part or one in done or time() > asked.end:
                continue
            try:
                row = judge(*one, asked.budget)
            except Exception as error:  # noqa: BLE001 - a crash is a finding
                row = dict(zip(("family", "n", "seed"), one, strict=True))
                row["crash"] = f"{type(error).__name__}: {error}"
            file.write(json.dumps(row) + "\n")
            file.flush()


def main(arguments: list[str] | None = None) -> int:
    """Run the study; return the exit code."""
    import multiprocessing

    parser = argparse.ArgumentParser(prog="python -m benchmarks strangers", description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--turns", type=int, default=9, help="problems of each family")
    parser.add_argument("--first", type=int, default=0, help="number of the first of these")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=400, help="no problem begins after these")
    parser.add_argument("--budget", type=float, default=4, help="CPU seconds of other starts")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out/strangers.jsonl"))
    asked = parser.parse_args(arguments)
    asked.end = time() + asked.seconds
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    if asked.jobs == 1:
        _work(asked, 0)
        return 0
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_work, args=(asked, part)) for part in range(asked.jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return 0
