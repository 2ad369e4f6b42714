"""Clouds, curves and shapes with a known match."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import ot
from scipy.spatial.distance import cdist
from scipy.stats import spearmanr

from benchmarks.quality.instances import (
    Array,
    Index,
    Instance,
    euclidean_copy,
    from_geodesics,
    from_matrices,
    hits,
    monotone_plan,
    permutation_plan,
    rotation,
    uniform,
)
from torchgw.datasets import spiral, swiss_roll

__all__ = [
    "cosine_copy", "fork", "isometric_copy", "mixture", "moons", "shape", "spiral_to_roll", "words",
]  # fmt: skip

Generator = np.random.Generator


def isometric_copy(
    rng: Generator, n: int, d: int, noise: float, *, round_: bool = False
) -> Instance:
    """Gaussian cloud and its rotated, shuffled copy with noise on every point.

    The axes have lengths 1, 2, ..., d; of a round cloud all are one, which leaves only the chance
    places of its points to tell directions apart.
    """
    x = rng.normal(size=(n, d)) * (1 if round_ else np.arange(1, d + 1))
    y = x @ rotation(d, rng) + noise * rng.normal(size=(n, d))
    d_x, d_y, match = euclidean_copy(x, y, rng)
    return from_matrices(d_x, d_y, hits(match), answer=permutation_plan(match))


def moons(rng: Generator, n: int, noise: float) -> Instance:
    """Two moons and a rotated, shuffled copy with noise, Euclidean distances.

    Half a turn swaps the moons: two optima of equal value, and either is right.
    """
    half = n // 2
    t = np.linspace(0, np.pi, half)
    upper = np.column_stack([np.cos(t), np.sin(t) - 0.25]) - [0.5, 0]
    clean = np.concatenate([upper, -upper])
    x = clean + noise * rng.normal(size=(n, 2))
    y = clean @ rotation(2, rng) + noise * rng.normal(size=(n, 2))
    d_x, d_y, match = euclidean_copy(x, y, rng)
    swap = np.roll(np.arange(n), half)
    return from_matrices(
        d_x, d_y, _best_of([np.arange(n), swap], clean, match, tolerance=0.1),
        answer=permutation_plan(match),
    )  # fmt: skip


def shape(rng: Generator, corners: int, n: int, noise: float) -> Instance:
    """Outline of a regular polygon (or an ellipse: 0 corners) and a rotated, shuffled copy.

    Equal steps along the outline, so that each symmetry maps points to points; any is right.
    """
    if corners:
        angle = 2 * np.pi * np.arange(corners + 1) / corners
        ring = np.column_stack([np.cos(angle), np.sin(angle)])
        position = np.arange(n) * corners / n
        side, share = position.astype(int), (position % 1)[:, None]
        clean = (1 - share) * ring[side] + share * ring[side + 1]
        folds = corners
    else:
        angle = 2 * np.pi * np.arange(n) / n
        clean = np.column_stack([np.cos(angle), 0.6 * np.sin(angle)])
        folds = 2
    index = np.arange(n)
    turns = [(index + n * turn // folds) % n for turn in range(folds)]
    symmetries = [*turns, *[(-turn) % n for turn in turns]]
    x = clean + noise * rng.normal(size=(n, 2))
    y = clean @ rotation(2, rng) + noise * rng.normal(size=(n, 2))
    d_x, d_y, match = euclidean_copy(x, y, rng)
    judge = _best_of(symmetries, clean, match, tolerance=0.15)
    return from_matrices(d_x, d_y, judge, answer=permutation_plan(match))


def _best_of(
    symmetries: list[Index], clean: Array, match: Index, tolerance: float
) -> Callable[[Array], float]:
    """Share of the points sent within a distance of their partner, under the best symmetry."""
    back = np.argsort(match)

    def judge(plan: Array) -> float:
        landed = clean[back[plan.argmax(1)]]
        return max(
            float((np.linalg.norm(landed - clean[symmetry], axis=1) <= tolerance).mean())
            for symmetry in symmetries
        )

    return judge


def spiral_to_roll(rng: Generator, n: int, m: int) -> Instance:
    """Plane spiral against a Swiss roll, geodesics; the metric is the signed rank correlation."""
    seed = int(rng.integers(2**31))
    x, angle_x = spiral(n, random_state=seed)
    y, angle_y = swiss_roll(m, random_state=seed + 1)
    order = rng.permutation(m)
    y, angle_y = y[order], angle_y[order]

    def judge(plan: Array) -> float:
        matched = angle_y[plan.argmax(1)]
        # one partner for all has no order
        return float(spearmanr(angle_x, matched).statistic) if np.ptp(matched) > 0 else 0.0

    return from_geodesics(x, y, judge, monotone_plan(angle_x, angle_y))


def fork(rng: Generator, n: int, m: int, noise: float) -> Instance:
    """Spiral that forks into a long and a short arm, plane against a thin roll, geodesics.

    The metric is the share of points sent to the right branch within 0.5 rad of their place.
    """
    angle_x, branch_x = _fork_places(n)
    angle_y, branch_y = _fork_places(m)
    order = rng.permutation(m)
    angle_y, branch_y = angle_y[order], branch_y[order]
    x = _fork_points(angle_x, branch_x) + noise * _bounded_normal(rng, (n, 2))
    y = np.column_stack([_fork_points(angle_y, branch_y), 0.1 * rng.random(m)])
    y = y + noise * _bounded_normal(rng, (m, 3))

    def judge(plan: Array) -> float:
        best = plan.argmax(1)
        near = np.abs(angle_y[best] - angle_x) <= 0.5
        # around the fork itself the branches are one place
        same = (branch_y[best] == branch_x) | (angle_x < _FORK + 0.5)
        return float((near & same).mean())

    # the branches have the same shares on both sides
    answer = monotone_plan(angle_x + 100 * branch_x, angle_y + 100 * branch_y)
    return from_geodesics(x, y, judge, answer)


_FORK = 6.0


def _fork_places(n: int) -> tuple[Array, Index]:
    """Angle and branch (0 trunk, 1 long arm, 2 short arm) of n points at equal steps of angle."""
    lengths = np.array([6.0, 3.0, 2.0])
    edges = np.cumsum(lengths)
    step = (np.arange(n) + 0.5) / n * edges[-1]
    branch = np.searchsorted(edges, step)
    start = np.array([0.0, _FORK, _FORK])
    return start[branch] + step - (edges - lengths)[branch], branch


def _fork_points(angle: Array, branch: Index) -> Array:
    radius = 0.4 + 0.1 * angle
    away = angle - _FORK
    radius = np.where(branch == 1, radius + 0.35 * away, radius)
    radius = np.where(branch == 2, radius - 0.05 * away, radius)
    return np.column_stack([radius * np.cos(angle), radius * np.sin(angle)])


def _bounded_normal(rng: Generator, size: tuple[int, int]) -> Array:
    return np.clip(rng.normal(size=size), -2, 2)


def mixture(rng: Generator, n: int, m: int, shares: tuple[float, ...]) -> Instance:
    """Five blobs at random places in 3-D, n points of equal shares against m of given shares.

    The metric is the share of points whose partner lies in the same blob.
    """
    count = len(shares)
    while True:
        centres = rng.normal(size=(count, 3))
        gaps = cdist(centres, centres)[np.triu_indices(count, 1)]
        # blobs apart, and no two gaps alike: the right match of blobs is then unique
        if gaps.min() > 1 and np.diff(np.sort(gaps)).min() > 0.05:
            break
    label_x = np.sort(np.arange(n) % count)
    label_y = rng.permutation(np.repeat(np.arange(count), _counts(m, shares)))
    x = centres[label_x] + 0.15 * rng.normal(size=(n, 3))
    placed = centres[label_y] + 0.15 * rng.normal(size=(m, 3))
    y = placed @ rotation(3, rng)

    def judge(plan: Array) -> float:
        return float((label_y[plan.argmax(1)] == label_x).mean())

    # the best transport where both lie in the same place, a near optimum of the right kind
    answer = ot.emd(uniform(n), uniform(m), cdist(x, placed, "sqeuclidean"))
    return from_matrices(cdist(x, x), cdist(y, y), judge, answer=answer)


def _counts(total: int, shares: tuple[float, ...]) -> Index:
    edges = np.rint(np.cumsum((0, *shares)) / sum(shares) * total).astype(np.int64)
    return np.diff(edges)


def cosine_copy(rng: Generator, n: int, clusters: int, noise: float) -> Instance:
    """Clustered vectors in 100-d against a rotated copy with noise, cosine distances."""
    d = 100
    x = rng.normal(size=(clusters, d))[rng.integers(clusters, size=n)] + rng.normal(size=(n, d))
    y = (x + noise * rng.normal(size=(n, d))) @ rotation(d, rng)
    d_x, d_y, match = euclidean_copy(x, y, rng, "cosine")
    return from_matrices(d_x, d_y, hits(match), answer=permutation_plan(match))


def words(rng: Generator, n: int, noise: float, *, zipf: bool) -> Instance:
    """Vectors like those of words: a common direction, a decaying spectrum, hubs, rare ones noisy.

    With ``zipf`` the weights are frequencies, 1 / (rank + 2.7); otherwise uniform.
    """
    d = 100
    frequency = 1 / (np.arange(n) + 2.7)
    spectrum = np.arange(1, d + 1) ** -0.5
    # frequent words lie near the common direction, which makes them hubs
    spread = (frequency[0] / frequency) ** 0.15
    common = rng.normal(size=d) * spectrum
    x = common + spread[:, None] * rng.normal(size=(n, d)) * spectrum
    error = noise * spread[:, None] * rng.normal(size=(n, d)) * spectrum
    y = (x + error) @ rotation(d, rng)
    d_x, d_y, match = euclidean_copy(x, y, rng, "cosine")
    a = frequency / frequency.sum()
    b = a[np.argsort(match)]
    answer = np.zeros((n, n))
    answer[np.arange(n), match] = a if zipf else 1 / n
    return from_matrices(
        d_x, d_y, hits(match), answer=answer, weights=(a, b) if zipf else None
    )  # fmt: skip
