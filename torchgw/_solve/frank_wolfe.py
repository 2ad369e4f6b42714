"""Conditional gradient steps (Frank-Wolfe) on a quadratic objective: the one loop of them.

A path knows how its plan is stored and which linear problem bounds it; the loop chooses how far to
go, exactly, and when to end [1]_ [2]_.

References
----------
.. [1] M. Frank, P. Wolfe. An algorithm for quadratic programming. Naval Research Logistics
   Quarterly 1956.
.. [2] T. Vayer, L. Chapel, R. Flamary, R. Tavenard, N. Courty. Optimal transport for structured
   data with application on graphs. ICML 2019.
"""

import sys
from collections.abc import Callable
from typing import NamedTuple, Protocol

from torchgw._problem.marginals import MarginalRule
from torchgw._sinkhorn.exact import Array
from torchgw._sinkhorn.vertices import LinearSolver, one_sided, partial_transport, transport


class Path(Protocol):
    """A plan on its way towards solutions of linear problems."""

    def begin(self) -> float:
        """Return the objective at the plan."""

    def look(self) -> tuple[float, float] | None:
        """Solve the linear problem at the plan; find the objective towards its solution.

        Along a share s of the way it changes by bend s^2 + slope s. None ends the steps.
        """

    def go(self, length: float) -> None:
        """Go a share of the way."""


class Descent(NamedTuple):
    """How steps ended."""

    value: float
    losses: list[float]  # the objective before each step and at the end
    converged: bool


def oracle(
    p: Array, q: Array, rule: MarginalRule | None, total: float | None = None
) -> LinearSolver:
    """Prepare the solver of linear problems between weights, whose second may be free.

    ``total`` is the sum of the weights of bounds where it is known without rounding.
    """
    if rule is None:
        return transport(p, q)
    return one_sided(p) if rule.mass is None else partial_transport(p, q, rule.mass, total)


def best_length(bend: float, slope: float) -> float:
    """Minimise bend s^2 + slope s over [0, 1]."""
    if bend > 0:
        return min(1.0, max(0.0, -slope / (2 * bend)))
    return 1.0 if bend + slope < 0 else 0.0


def descend(
    path: Path,
    *,
    max_iter: int,
    tol_rel: float | None = None,
    tol_abs: float = 0.0,
    length_of: Callable[[float, float], float] = best_length,
    verbose: bool = False,
) -> Descent:
    """Take steps along a path, one at least, until the objective stays or the path ends.

    Without ``tol_rel``, a share of the objective, only the path ends them.
    """
    value = path.begin()
    losses, converged = [value], False
    for step in range(max(max_iter, 1)):
        ahead = path.look()
        if ahead is None:
            break
        bend, slope = ahead
        length = length_of(bend, slope)
        path.go(length)
        before, value = value, value + bend * length**2 + slope * length
        losses.append(value)
        moved = abs(value - before)
        if verbose:
            sys.stderr.write(f"{step + 1:5d}|{value:8e}|{moved:8e}\n")
        if tol_rel is not None:
            converged = moved == 0 or moved < tol_abs or moved < tol_rel * abs(value)
        if converged:
            break
    return Descent(value, losses, converged)
