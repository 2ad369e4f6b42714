"""One problem at one seed: two spaces, the known answer, and the score of a plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from torchgw import GraphWarning
from torchgw.distances import connect, default_n_neighbors, geodesic_matrix, knn_graph

__all__ = [
    "Array", "Index", "Instance", "Points", "euclidean_copy", "from_geodesics", "from_matrices",
    "hits", "monotone_plan", "no_truth", "permutation_plan", "rotation", "uniform",
]  # fmt: skip

Array = NDArray[np.float64]
Index = NDArray[np.int64]


class Points(NamedTuple):
    """What a peer that makes its own geodesics is given."""

    x: Array  # (n, d)
    y: Array  # (m, d')
    n_neighbors: int


@dataclass(frozen=True)
class Instance:
    """A problem at one seed; the order of Y is random."""

    d_x: Array  # (n, n)
    d_y: Array  # (m, m)
    judge: Callable[[Array], float]  # task metric of a plan (n, m)
    inputs: dict[str, Any]  # what torchgw.solve is given; everything else is a default
    answer: Array | None = None  # plan (n, m) that is known to be right
    points: Points | None = None
    epsilon: float | None = None  # None: what torchgw.solve takes by default
    weights: tuple[Array, Array] | None = None  # None: uniform
    network: bool = False  # 0/1 adjacency; a one-to-one matching is judged in place of the plan

    @property
    def marginals(self) -> tuple[Array, Array]:
        """Weights of both sides, shapes (n,) and (m,)."""
        return self.weights or (uniform(len(self.d_x)), uniform(len(self.d_y)))


def no_truth(plan: Array) -> float:
    """Judge a plan where no match is true: NaN."""
    return float("nan")


def uniform(n: int) -> Array:
    """Return n equal weights of sum one."""
    return np.full(n, 1 / n)


def from_matrices(
    d_x: Array,
    d_y: Array,
    judge: Callable[[Array], float],
    *,
    answer: Array | None = None,
    epsilon: float | None = None,
    weights: tuple[Array, Array] | None = None,
    divided: bool = True,
    network: bool = False,
) -> Instance:
    """Return an instance of given distances, both divided by the larger maximum or left alone."""
    largest = max(d_x.max(), d_y.max()) if divided else 1.0
    d_x, d_y = d_x / largest, d_y / largest
    inputs: dict[str, Any] = {"D_X": d_x, "D_Y": d_y}
    if weights is not None:
        inputs |= {"a": weights[0], "b": weights[1]}
    return Instance(
        d_x, d_y, judge, inputs, answer=answer, epsilon=epsilon, weights=weights, network=network,
    )  # fmt: skip


def from_geodesics(
    x: Array, y: Array, judge: Callable[[Array], float], answer: Array | None = None
) -> Instance:
    """Return an instance given as points, with geodesics on the default neighbour graph.

    The matrices are what torchgw.solve makes of the points by default, for solvers that need them.
    """
    d_x, d_y = (_geodesics(points) for points in (x, y))
    neighbors = default_n_neighbors(max(len(x), len(y)))
    inputs = {"X": x, "Y": y}
    return Instance(d_x, d_y, judge, inputs, answer=answer, points=Points(x, y, neighbors))


def _geodesics(points: Array) -> Array:
    tensor = torch.from_numpy(points)
    with warnings.catch_warnings():
        # ours says so itself when it solves
        warnings.simplefilter("ignore", GraphWarning)
        table = geodesic_matrix(connect(knn_graph(tensor), tensor)).numpy()
    return np.asarray(table / table.max())


def rotation(d: int, rng: np.random.Generator) -> Array:
    """Draw an orthogonal matrix (d, d), reflections included."""
    return np.asarray(np.linalg.qr(rng.normal(size=(d, d)))[0])


def permutation_plan(match: Index) -> Array:
    """Return the plan of weights 1 / n that sends i to match[i]."""
    n = len(match)
    plan = np.zeros((n, n))
    plan[np.arange(n), match] = 1 / n
    return plan


def monotone_plan(position_x: Array, position_y: Array) -> Array:
    """Return the plan between uniform weights that keeps the order of positions on a line."""
    n, m = len(position_x), len(position_y)
    edges_x, edges_y = np.arange(n + 1) / n, np.arange(m + 1) / m
    low = np.maximum(edges_x[:-1, None], edges_y[:-1])
    high = np.minimum(edges_x[1:, None], edges_y[1:])
    plan = np.zeros((n, m))
    plan[np.ix_(np.argsort(position_x), np.argsort(position_y))] = np.maximum(high - low, 0)
    return plan


def hits(match: Index) -> Callable[[Array], float]:
    """Return the metric "share of the points whose largest entry is at their true partner"."""
    return lambda plan: float((plan.argmax(1) == match).mean())


def euclidean_copy(
    x: Array, y_ordered: Array, rng: np.random.Generator, metric: str = "euclidean"
) -> tuple[Array, Array, Index]:
    """Shuffle the copy; return distances of both sides and where each point went."""
    order = rng.permutation(len(y_ordered))
    y = y_ordered[order]
    return cdist(x, x, metric), cdist(y, y, metric), np.argsort(order)
