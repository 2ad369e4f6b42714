"""Plans of clouds in the plane that are laid on each other at all angles, and mirrored.

With centred points and squared distances, F(P) = constant + <L, P> - 8 |X' P Y|^2: where X' P Y is
about a turn W, the plan of least cost L - 16 X W Y' is near the best of those. Few points leave
open which of the optima of round clouds is the best one; all points, at each turn, do not.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy

from torchgw._problem.problem import Problem
from torchgw._sinkhorn.duals import Array, ProductCost, Transport
from torchgw._tensors.operations import EQUAL
from torchgw.distances.base import DistanceProvider

# Angles of each of both ways up; how many of the plans found there are followed; and steps at most.
# [L1476]
_ANGLES, _FOLLOWED, _STEPS = 48, 4, 50
# Axes below this share of the largest are none. A choice.
_RANK = 1e-6


class _Seen(NamedTuple):
    cost: float  # what differs between plans of the objective
    pairing: Array  # (2, 2), X' P Y
    plan: scipy.sparse.coo_array
    prices: Array


def best_turned(problem: Problem, plan: Array) -> Array | None:
    """Find the best plan (n, m) of all turns, beside one whose axes are paired as well as they may.

    ``None`` unless both sides are in the plane. The problem is of squared losses, without a linear
    cost and with strict marginals.
    """
    a, b = (part.double().cpu().numpy() for part in problem.marginals)
    a, b = a / a.sum(), b / b.sum()
    x, y = _plane(problem.source, a), _plane(problem.target, b)
    if x is None or y is None:
        return None
    left, right = -2 * (x**2).sum(1), (y**2).sum(1) / 2
    transport = Transport(a, b)

    def follow(pairing: Array) -> _Seen:
        """Find a plan near the least of the objective linearised at a pairing."""
        cost = ProductCost(np.column_stack([left, -4 * x @ pairing]), np.column_stack([right, y]))
        found = transport.near(cost)
        pairing = x.T @ (found @ y)
        value = float((left[found.row] * right[found.col]) @ found.data)
        return _Seen(value - 2 * float((pairing**2).sum()), pairing, found, transport.prices)

    size = float(np.linalg.svd(x.T @ plan @ y, compute_uv=False).mean())
    seen = [follow(size * turn) for turn in _turns()]
    ends = []
    for one in sorted(seen, key=lambda each: each.cost)[:_FOLLOWED]:
        transport.begin(one.plan, one.prices)
        last = one
        for _ in range(_STEPS):
            now = follow(last.pairing)
            if now.cost >= last.cost - EQUAL * abs(last.cost):
                break
            last = now
        ends.append(last)
    best: Array = min(ends, key=lambda each: each.cost).plan.toarray()
    return best


def _turns() -> list[Array]:
    """List turns of the plane, each next to the one before it, then those of its mirror image."""
    angles = 2 * np.pi * np.arange(_ANGLES) / _ANGLES
    cosine, sine = np.cos(angles), np.sin(angles)
    turns = np.stack([np.stack([cosine, -sine], 1), np.stack([sine, cosine], 1)], 1)
    return [*turns, *(turns * np.array([1.0, -1.0]))]


def _plane(provider: DistanceProvider, weights: Array) -> Array | None:
    """Find the points (n, 2) whose squared distances a side has, times the root of two."""
    factors = provider.factors()
    if factors is None:
        return None
    matrix = factors.matrix.double().cpu().numpy()
    turned, rest = np.linalg.qr(matrix - weights @ matrix)
    sizes, axes = np.linalg.eigh(rest * factors.signs.double().cpu().numpy() @ rest.T)
    kept = np.abs(sizes) > _RANK * np.abs(sizes).max()
    if kept.sum() != 2 or (sizes[kept] > 0).any():
        return None
    points: Array = turned @ (axes[:, kept] * np.sqrt(-sizes[kept]))
    return points
