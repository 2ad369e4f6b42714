"""Starts of large partial problems: solved for some points of each side, extended to all."""

import numpy as np

from torchgw._sinkhorn.exact import PartialTransport, in_order
from torchgw._solve.polish import take_steps
from torchgw.pot._arrays import Array, product
from torchgw.pot._few import FewEntries
from torchgw.pot._quadratic import Quadratic
from torchgw.pot._stored import Stored

# Points of each side of the coarse problem. [L433]
_POINTS = 60


def coarse_start(term: Quadratic, weight: float, solver: PartialTransport) -> FewEntries:
    """Find a vertex near a good plan.

    Points of equal shares of the weight stand for all. The gradient at their plan is a cost of all
    points, and its prices give those of all points, so that few entries have to be looked at.
    """
    p, q, mass = solver.p, solver.q, solver.mass
    (rows, few_p), (columns, few_q) = (_choose(weights) for weights in (p, q))
    part = np.ix_(rows, columns)
    tables = (
        table[np.ix_(kept, kept)]
        for table, kept in zip(term.parts, (rows, columns, rows, columns), strict=True)
    )
    small = term._replace(parts=type(term.parts)(*tables))
    inner = PartialTransport(few_p, few_q, mass)
    found = Stored(small, weight, 0.0, product(few_p, few_q, mass), inner)
    take_steps(found, max_iter=100, tol_rel=1e-7)
    plan = np.zeros((len(p), len(q)))
    plan[part] = found.plan
    path = FewEntries(term, weight, solver.general)
    cost = path.stand(plan)
    last = inner.general.last
    assert last is not None
    first = np.minimum((cost[:, columns] - last.v[:-1]).min(1), -last.v[-1])
    second = np.minimum((cost[rows] - last.u[:-1, None]).min(0), -last.u[-1])
    prices = np.append(first, last.u[-1]), np.append(second, last.v[-1])
    path.expect(*prices, in_order(p, q, mass))
    return path


def _choose(weights: Array) -> tuple[Array, Array]:
    """Choose points at equal steps of the cumulative weight; also return what they stand for."""
    steps = (np.arange(_POINTS) + 0.5) / _POINTS * weights.sum()
    chosen, count = np.unique(np.searchsorted(weights.cumsum(), steps), return_counts=True)
    return chosen, count * (weights.sum() / _POINTS)
