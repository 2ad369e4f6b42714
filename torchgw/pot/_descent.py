"""Conditional gradient steps on a dense problem, from the start that is given."""

import sys
from typing import Any, NamedTuple

import numpy as np

from torchgw.pot._arrays import Array
from torchgw.pot._few import FewEntries
from torchgw.pot._quadratic import Quadratic
from torchgw.pot._vertices import LinearSolver

# Armijo's rule asks for a decrease of this share of what the slope promises. [L386]
_ARMIJO = 1e-4


class Descent(NamedTuple):
    """The end of conditional gradient steps."""

    plan: Array  # (n, m)
    value: float
    losses: list[float]  # the objective before each step and at the end
    potentials: tuple[Array, Array] | None  # of the last linear problem
    converged: bool


class Line:
    """The objective <M, T> + weight * quadratic(T) from a plan towards another."""

    # Its gradient is linear in T, so that of the direction gives the line and the next gradient
    # too.

    def __init__(self, term: Quadratic, weight: float, linear: Array | float) -> None:
        self.term, self.weight, self.linear = term, weight, linear

    def begin(self, plan: Array) -> float:
        """Go to a plan; return its value."""
        self._slope = self.weight * self.term.gradient(plan)
        # the quadratic term at a plan is half the product of the plan with its gradient
        value = float(np.sum(self.linear * plan)) + 0.5 * float(np.vdot(self._slope, plan))
        self._slope += self.linear
        return value

    def slope(self, plan: Array) -> Array:
        """Compute the gradient at the plan that was reached."""
        return self._slope

    def look(self, plan: Array, direction: Array) -> tuple[float, float]:
        """Find bend and slope of the objective, bend s^2 + slope s, along a direction."""
        self._change = self.term.gradient(direction)
        self._change *= self.weight
        bend = 0.5 * float(np.vdot(self._change, direction))
        return bend, float(np.vdot(self._slope, direction))

    def go(self, plan: Array, direction: Array, end: Array, length: float) -> Array:
        """Go a share of the way along a direction."""
        if length == 1:
            # at the vertex itself its zeros are exact, without rounding
            self._slope = self._slope + self._change
            return end
        self._slope = self._slope + length * self._change
        return plan + length * direction


class _Dense:
    """A plan that is stored, on its way towards solutions of linear problems."""

    def __init__(self, line: Line, start: Array, solver: LinearSolver) -> None:
        self.line, self.plan, self.solver = line, start, solver

    def begin(self) -> float:
        """Return the value of the plan."""
        return self.line.begin(self.plan)

    def look(self) -> tuple[float, float]:
        """Solve the linear problem; find bend and slope of the objective towards its solution."""
        slope = self.line.slope(self.plan)
        self._found = self.solver(slope, float(np.vdot(slope, self.plan)))
        self._direction = self._found.plan - self.plan
        return self.line.look(self.plan, self._direction)

    def go(self, length: float) -> None:
        """Go a share of the way to the solution."""
        self.plan = self.line.go(self.plan, self._direction, self._found.plan, length)

    @property
    def potentials(self) -> tuple[Array, Array] | None:
        """Those of the last linear problem, if they are known."""
        known = self._found.potentials
        return None if known is None else known()


def descend(line: Line, start: Array, solver: LinearSolver, **stop: Any) -> Descent:
    """Minimise an objective from a plan; ``stop`` are the further arguments of :func:`follow`."""
    return follow(_Dense(line, start, solver), **stop)


def follow(
    path: _Dense | FewEntries,
    *,
    max_iter: int,
    tol_rel: float,
    tol_abs: float,
    armijo: bool = False,
    limits: tuple[float | None, float | None] = (None, None),
    verbose: bool = False,
) -> Descent:
    """Minimise an objective by conditional gradient (Frank-Wolfe; T. Vayer et al., ICML 2019)."""
    value = path.begin()
    losses = [value]
    converged = False
    for step in range(max(int(max_iter), 1)):
        bend, descent = path.look()
        length = _armijo(bend, descent) if armijo else best_step(bend, descent)
        if limits != (None, None):
            length = float(np.clip(length, *limits))
        path.go(length)
        before, value = value, value + bend * length**2 + descent * length
        losses.append(value)
        moved = abs(value - before)
        if verbose:
            sys.stderr.write(f"{step + 1:5d}|{value:8e}|{moved:8e}\n")
        converged = moved == 0 or moved < tol_abs or moved < tol_rel * abs(value)
        if converged:
            break
    return Descent(path.plan, value, losses, path.potentials, converged)


def best_step(bend: float, slope: float) -> float:
    """Minimise bend s^2 + slope s over [0, 1]."""
    if bend > 0:
        return min(1.0, max(0.0, -slope / (2 * bend)))
    return 1.0 if bend + slope < 0 else 0.0


def _armijo(bend: float, slope: float) -> float:
    """Shorten a step of one until the value falls by a share of what the slope promises."""
    length = 1.0
    while bend * length**2 + slope * length > _ARMIJO * slope * length:
        # the minimum of the parabola, as bend is positive here
        length = -slope / (2 * bend)
        if length < 1e-12:
            return 0.0
    return length
