"""Starts of large partial problems: solved for some points of each side, extended to all."""

import numpy as np

from torchgw.pot._arrays import Array, product
from torchgw.pot._descent import Line, descend
from torchgw.pot._quadratic import Quadratic
from torchgw.pot._vertices import PartialTransport

# Points of each side that are enough, and of the smaller side from which they are of use. [L433]
_POINTS = 60
LARGE = 150


def coarse_start(
    term: Quadratic, weight: float, linear: Array | float, solver: PartialTransport
) -> Array | None:
    """Find a vertex near a good plan, or None for few points.

    Points of equal shares of the weight stand for all. The gradient at their plan is a cost of all
    points, and its prices give those of all points, so that few entries have to be looked at.
    """
    p, q, mass = solver.p, solver.q, solver.mass
    if min(len(p), len(q)) < LARGE:
        return None
    (rows, few_p), (columns, few_q) = (_choose(weights) for weights in (p, q))
    part = np.ix_(rows, columns)
    tables = (
        (f1[np.ix_(kept, kept)])
        for f1, kept in zip(term.parts, (rows, columns, rows, columns), strict=True)
    )
    small = term._replace(parts=type(term.parts)(*tables))
    of_part = linear[part] if isinstance(linear, np.ndarray) else linear
    inner = PartialTransport(few_p, few_q, mass)
    begin = product(few_p, few_q, mass)
    line = Line(small, weight, of_part)
    found = descend(line, begin, inner, max_iter=100, tol_rel=1e-7, tol_abs=0.0)
    plan = np.zeros((len(p), len(q)))
    plan[part] = found.plan
    cost = linear + weight * term.gradient(plan)
    u, v = inner.prices
    first = np.minimum((cost[:, columns] - v[:-1]).min(1), -v[-1])
    second = np.minimum((cost[rows] - u[:-1, None]).min(0), -u[-1])
    solver.expect(np.append(first, u[-1]), np.append(second, v[-1]))
    return solver(cost, np.inf).plan


def _choose(weights: Array) -> tuple[Array, Array]:
    """Choose points at equal steps of the cumulative weight; also return what they stand for."""
    steps = (np.arange(_POINTS) + 0.5) / _POINTS * weights.sum()
    chosen, count = np.unique(np.searchsorted(weights.cumsum(), steps), return_counts=True)
    return chosen, count * (weights.sum() / _POINTS)
