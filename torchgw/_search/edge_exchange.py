"""Exchanges of partners between two graphs, by sums over edges.

Between tables that are mostly zeros an exchange of two partners only helps if it puts an end of an
edge next to where the other end is. These few exchanges are listed, many that do not touch each
other are made at once, and some that cost a little too, fewer and fewer of them [1].

[1] S. Kirkpatrick, C. Gelatt, M. Vecchi. Optimization by simulated annealing. Science 1983.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]

# How likely exchanges are that cost as much as the heaviest edge: exp(-1 / T), with T falling
# geometrically from the first to the last. [L1363]
_FIRST, _LAST = 0.4, 0.05
# Entries of tables that are looked up, and rounds at most: a second or two. [L1363]
_LOOKED_UP, _ROUNDS = 1.5e7, 400
# Share of entries that are not zero up to which a table is a graph. [L1363]
_FEW = 0.05
# Share of the heaviest edge that is rounding. A choice.
_ROUNDING = 1e-9


class Edges(NamedTuple):
    """A symmetric table (n, n) without negative entries, by those that are not zero."""

    starts: Array  # (n + 1,) where each row begins
    columns: Array  # (e,)
    weights: Array  # (e,) float64
    keys: Array  # (e,) row n + column, in order

    @classmethod
    def of(cls, table: Tensor) -> Edges | None:
        """List the edges of a table; ``None`` if it is no graph."""
        n = len(table)
        if int(table.count_nonzero()) > _FEW * n * n or bool((table < 0).any()):
            return None
        if not torch.equal(table, table.T) or bool(table.diagonal().any()):
            return None
        rows, columns = table.nonzero().T
        weights = table[rows, columns].double().cpu().numpy()
        rows, columns = rows.cpu().numpy(), columns.cpu().numpy()
        return cls(np.searchsorted(rows, np.arange(n + 1)), columns, weights, rows * n + columns)

    @property
    def n(self) -> int:
        """Count the nodes."""
        return len(self.starts) - 1

    def among(self, nodes: Array) -> Edges:
        """Keep some nodes, in their order."""
        place = np.full(self.n, -1)
        place[nodes] = np.arange(len(nodes))
        rows, columns = (place[side] for side in (self.keys // self.n, self.columns))
        inside = (rows >= 0) & (columns >= 0)
        keys = rows[inside] * len(nodes) + columns[inside]
        order = keys.argsort()
        keys, weights = keys[order], self.weights[inside][order]
        rows, columns = np.divmod(keys, len(nodes))
        return Edges(np.searchsorted(rows, np.arange(len(nodes) + 1)), columns, weights, keys)

    def at(self, i: Array, j: Array) -> Array:
        """Look up weights; zero where there is no edge."""
        keys = i * self.n + j
        place = np.searchsorted(self.keys, keys).clip(max=len(self.keys) - 1)
        return np.where(self.keys[place] == keys, self.weights[place], 0.0)

    def beside(self, nodes: Array) -> tuple[Array, Array]:
        """List all edges of some nodes: which of these it belongs to, and which edge it is."""
        counts = self.starts[nodes + 1] - self.starts[nodes]
        owner = np.repeat(np.arange(len(nodes)), counts)
        within = np.arange(len(owner)) - np.repeat(counts.cumsum() - counts, counts)
        return owner, self.starts[nodes[owner]] + within


def exchange_ends(near: Edges, far: Edges, partners: Array) -> Array:
    """Find partners (n,), an order of the same ones, that keep no less weight of edges.

    What is kept is the sum of products of the weights of edges that lie on each other.
    """
    if not (len(near.keys) and len(far.keys)):
        return partners
    used = np.sort(partners)
    if len(used) < far.n:
        far = far.among(used)
    state = _Ends(near, far, np.searchsorted(used, partners))
    state.run()
    return used[state.best]


class _Ends:
    """Partners (n,) of the nodes of one graph among as many of another."""

    def __init__(self, near: Edges, far: Edges, partners: Array) -> None:
        self.near, self.far, self.partners = near, far, partners.copy()
        self.nodes = partners.argsort()
        self.rows = near.keys // near.n
        # no edge of a node weighs more
        heaviest = np.zeros(far.n)
        np.maximum.at(heaviest, far.keys // far.n, far.weights)
        self.heaviest, self.unit = heaviest, near.weights.max() * far.weights.max()
        self.draw, self.looked_up = np.random.default_rng(0), 0
        self.best, self.most = partners.copy(), self.kept()
        self.perfect = False  # whether every edge lies on the heaviest one that it can

    def here(self) -> Array:
        """Look up what lies under each edge."""
        return self.far.at(self.partners[self.rows], self.partners[self.near.columns])

    def kept(self) -> float:
        """Sum up what is kept."""
        return float(self.near.weights @ self.here()) / 2

    def run(self) -> None:
        """Exchange until nothing helps; then warm up, and cool down again."""
        while self.step(0.0):
            pass
        for done in range(_ROUNDS):
            share = max(done / _ROUNDS, self.looked_up / _LOOKED_UP)
            if share >= 1 or self.perfect:
                break
            self.step(_FIRST * (_LAST / _FIRST) ** share)
        while self.step(0.0):
            pass

    def step(self, temperature: float) -> bool:
        """Make exchanges that do not touch each other; tell whether they keep more than ever."""
        p, q = self.listed()
        self.perfect = not len(p)
        gains = self.gains(p, q) / self.unit
        if temperature:
            wanted = np.log(self.draw.random(len(gains))) < gains / temperature
        else:
            wanted = gains > _ROUNDING
        p, q, gains = p[wanted], q[wanted], gains[wanted]
        order = (-gains - self.draw.random(len(gains)) / 2).argsort()
        chosen = self.apart(p[order], q[order])
        p, q = p[order][chosen], q[order][chosen]
        self.partners[p], self.partners[q] = self.partners[q], self.partners[p]
        self.nodes[self.partners[p]], self.nodes[self.partners[q]] = p, q
        kept = self.kept()
        better = bool(kept > self.most + _ROUNDING * self.unit)
        if better:
            self.most, self.best = kept, self.partners.copy()
        elif not temperature:
            # what was gained before is less than the best
            self.partners, self.nodes = self.best.copy(), self.best.argsort()
        return better

    def listed(self) -> tuple[Array, Array]:
        """List exchanges of nodes p and q that put an edge of p on a heavier one."""
        here, to = self.here(), self.near.columns
        light = here < self.heaviest[self.partners[to]]
        p, anchor, here = self.rows[light], self.partners[to[light]], here[light]
        owner, edge = self.far.beside(anchor)
        q = self.nodes[self.far.columns[edge]]
        useful = (self.far.weights[edge] > here[owner]) & (q != p[owner])
        return p[owner][useful], q[useful]

    def gains(self, p: Array, q: Array) -> Array:
        """Compute what exchanges of the partners of p and q keep more."""
        found = np.zeros(len(p))
        for one, other in ((p, q), (q, p)):
            owner, edge = self.near.beside(one)
            end = self.near.columns[edge]
            before, after = self.partners[one[owner]], self.partners[other[owner]]
            at = self.partners[end]
            change = self.far.at(after, at) - self.far.at(before, at)
            change *= self.near.weights[edge] * (end != other[owner])
            found += np.bincount(owner, change, len(p))
            self.looked_up += 2 * len(edge)
        return found

    def apart(self, p: Array, q: Array) -> list[int]:
        """Choose exchanges, the first ones first, whose nodes are no neighbours of each other."""
        used, chosen = np.zeros(self.near.n, dtype=bool), []
        starts, columns = self.near.starts, self.near.columns
        for place, ends in enumerate(zip(p.tolist(), q.tolist(), strict=True)):
            if used[ends[0]] or used[ends[1]]:
                continue
            chosen.append(place)
            for node in ends:
                used[node] = True
                used[columns[starts[node] : starts[node + 1]]] = True
        return chosen
