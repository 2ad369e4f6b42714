"""Problems of 12 to 100 points whose sides have nothing in common, and one whose sides have.

Such sides have many optima of nearly the same objective; what is asked is how low a solve ends.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.spatial.distance import cdist

from benchmarks.quality.instances import (
    Array,
    Instance,
    from_matrices,
    no_truth,
    permutation_plan,
)

__all__ = ["SMALL"]

Generator = np.random.Generator
Draw = Callable[[Generator], Instance]
Table = Callable[[Generator, int], Array]


def _tables(make: Table, n: int, m: int | None = None) -> Draw:
    """Two independent tables of one kind."""

    def draw(rng: Generator) -> Instance:
        pair = make(rng, n), make(rng, m or n)
        return from_matrices(*pair, no_truth, divided=False)

    return draw


def _uniform(rng: Generator, n: int) -> Array:
    """Symmetric entries, those of points with themselves among them."""
    table = rng.random((n, n))
    return np.asarray(table + table.T)


def _hollow(rng: Generator, n: int) -> Array:
    """The same, and zero from each point to itself."""
    table = _uniform(rng, n)
    np.fill_diagonal(table, 0)
    return table


def _sparse(rng: Generator, n: int) -> Array:
    """Edges of random weights, three a node."""
    upper = np.triu(rng.random((n, n)) * (rng.random((n, n)) < 3 / n), 1)
    return np.asarray(upper + upper.T)


def _edges(rng: Generator, n: int) -> Array:
    """Edges of weight one, four a node."""
    upper = np.triu(rng.random((n, n)) < 4 / n, 1)
    return np.asarray(upper + upper.T, dtype=np.float64)


def _cloud(d: int) -> Table:
    """Distances of normal points in d dimensions."""

    def make(rng: Generator, n: int) -> Array:
        points = rng.normal(size=(n, d))
        return np.asarray(cdist(points, points))

    return make


def _noisy_copy(rng: Generator) -> Instance:
    """Thirty points in space, and the same with noise of .15, shuffled."""
    points, order = rng.normal(size=(30, 3)), rng.permutation(30)
    moved = (points + 0.15 * rng.normal(size=points.shape))[order]
    answer = permutation_plan(np.argsort(order))
    tables = cdist(points, points), cdist(moved, moved)
    return from_matrices(*tables, no_truth, answer=answer, divided=False)


SMALL: dict[str, Draw] = {
    "hollow-12": _tables(_hollow, 12), "uniform-12": _tables(_uniform, 12),
    "sparse-16": _tables(_sparse, 16), "edges-30": _tables(_edges, 30),
    "cloud-14": _tables(_cloud(3), 14), "cloud-50": _tables(_cloud(3), 50),
    "cloud-in-5-32": _tables(_cloud(5), 32), "cloud-in-5-100": _tables(_cloud(5), 100),
    "cloud-24-31": _tables(_cloud(3), 24, 31), "copy-30": _noisy_copy,
}  # fmt: skip
