"""The path of a stored plan towards the solutions of linear problems."""

import numpy as np

from torchgw._sinkhorn.exact import LinearSolver
from torchgw.pot._arrays import Array
from torchgw.pot._quadratic import Quadratic


class Stored:
    """A plan under the objective <M, T> + weight * quadratic(T), ``linear`` being M."""

    # Its gradient is linear in T, so that of the direction gives the line and the next gradient
    # too.

    def __init__(
        self,
        term: Quadratic,
        weight: float,
        linear: Array | float,
        start: Array,
        solver: LinearSolver,
    ) -> None:
        self.term, self.weight, self.linear = term, weight, linear
        self.plan, self.solver = start, solver

    def begin(self) -> float:
        """Return the objective at the plan."""
        self._slope = self.weight * self.term.gradient(self.plan)
        # the quadratic term at a plan is half the product of the plan with its gradient
        half = 0.5 * float(np.vdot(self._slope, self.plan))
        self._slope += self.linear
        return float(np.sum(self.linear * self.plan)) + half

    def look(self) -> tuple[float, float]:
        """Solve the linear problem; find the objective towards its solution."""
        self._turn(self._slope)
        self._change = self.term.gradient(self._direction)
        self._change *= self.weight
        bend = 0.5 * float(np.vdot(self._change, self._direction))
        return bend, float(np.vdot(self._slope, self._direction))

    def go(self, length: float) -> None:
        """Go a share of the way to the solution."""
        if length == 1:
            # at the vertex itself its zeros are exact, without rounding
            self._slope = self._slope + self._change
            self.plan = self._found.plan
            return
        self._slope = self._slope + length * self._change
        self.plan = self.plan + length * self._direction

    def _turn(self, slope: Array) -> None:
        self._found = self.solver(slope, float(np.vdot(slope, self.plan)))
        self._direction = self._found.plan - self.plan

    @property
    def potentials(self) -> tuple[Array, Array] | None:
        """Those of the last linear problem, if they are known."""
        known = self._found.potentials
        return None if known is None else known()
