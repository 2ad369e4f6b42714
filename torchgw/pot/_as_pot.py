"""Where it matters that steps are POT's: ties, which rounding decides, and limits of pivots."""

import warnings
from typing import Any

import numpy as np

from torchgw._sinkhorn.exact import (
    ExactTransport,
    Linear,
    LinearSolver,
    PartialTransport,
    transport,
)
from torchgw.pot._arrays import Array
from torchgw.pot._stored import Stored

# A table counts as tied by so many of its rows: on average an entry of them is repeated so many
# times. [L660]
_ROWS, _TIMES = 8, 4


def tied(*tables: Array) -> bool:
    """Say whether any table repeats most of its entries, as 0/1 tables do."""
    few = (table[:_ROWS] for table in tables)
    return any(_TIMES * len(np.unique(rows)) <= rows.size for rows in few)


class StoredAsPot(Stored):
    """The same path by POT's operations in POT's order, so that equals differ by the same bits."""

    # Weights that are held are in the gradient as they are; ``None`` is what the plan has.

    def __init__(self, *pieces: Any, p: Array | None, q: Array | None) -> None:
        super().__init__(*pieces)
        self.p, self.q = p, q

    def begin(self) -> float:
        self._known = self._gradient(self.plan)
        half = 0.5 * float((self._known * self.plan).sum())
        return float(np.sum(self.linear * self.plan)) + self.weight * half

    def look(self) -> tuple[float, float]:
        self._turn(self.linear + self.weight * self._known)
        plan, direction = self.plan, self._direction
        if self.p is None:
            # for partial problems the next gradient is a mean of two
            self._change = self._gradient(direction + plan) - self._known
            bend, mixed = 0.5 * (self._change * direction).sum(), (self._known * direction).sum()
        else:
            across = self._across(direction)
            bend, mixed = (across * direction).sum(), (across * plan).sum()
            if self.term.symmetric and self.q is not None:
                mixed *= 2
            else:
                mixed += (self._across(plan) * direction).sum()
        fixed = float(np.sum(self.linear * direction))
        return float(self.weight * bend), fixed + float(self.weight * mixed)

    def go(self, length: float) -> None:
        self.plan = self.plan + length * self._direction
        if self.p is None:
            self._known = self._known + length * self._change
        else:
            self._known = self._gradient(self.plan)

    def _gradient(self, plan: Array) -> Array:
        f1, f2, h1, h2 = self.term.parts
        rows = plan.sum(1) if self.p is None else self.p
        columns = plan.sum(0) if self.q is None else self.q
        table: Array = 2 * ((f1 @ rows)[:, None] + columns @ f2.T - h1 @ plan @ h2.T)
        if not self.term.symmetric:
            other = (f1.T @ rows)[:, None] + columns @ f2 - h1.T @ plan @ h2
            table = 0.5 * (table + 2 * other)
        return table

    def _across(self, table: Array) -> Array:
        """Compute half the gradient of a change, but for what the weights hold."""
        _, f2, h1, h2 = self.term.parts
        across: Array = -(h1 @ table @ h2.T)
        if self.q is None:
            across += np.outer(np.ones(len(h1)), table.sum(0)) @ f2.T
        return across


def transport_as_pot(p: Array, q: Array) -> LinearSolver:
    """Prepare POT's solver on costs as they are, which POT gives it, where POT is installed."""
    general = ExactTransport(p, q)
    if not general.by_pot:
        return transport(p, q)

    def solve(cost: Array, reached: float = -np.inf, below: float = -np.inf) -> Linear:
        general.on(cost)
        if general.short:
            # for negative costs the network simplex may report that there is no plan
            general(cost)
        assert general.last is not None
        plan, u, v = general.last
        return Linear(plan, lambda: (u, v))

    return solve


class ShortTransport:
    """A partial problem by POT's cost of the mass that stays, ended after as many pivots."""

    def __init__(self, whole: PartialTransport, linear: Array | float, pivots: int) -> None:
        self._whole, self._corner, self._pivots = whole, 100 * float(np.max(linear)), pivots
        self._general = ExactTransport(whole.general.p, whole.general.q)

    def __call__(self, cost: Array, reached: float = -np.inf, below: float = -np.inf) -> Linear:
        """Solve, as far as the pivots last."""
        table = self._whole.with_rest(cost, self._corner)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Linear(self._general.on(table, self._pivots)[0][:-1, :-1])

    def solved(self, plan: Array) -> bool:
        """Say whether pivots never ran out, and the plan moves the mass asked for."""
        mass = self._whole.mass
        return not self._general.short and abs(plan.sum() - mass) <= 1e-9 * mass

    def within(self, plan: Array) -> Array | None:
        """Scale a plan that moves more; None for one that moves less."""
        moved, mass = plan.sum(), self._whole.mass
        if moved < mass * (1 - 1e-9):
            return None
        return plan if moved <= mass else plan * (mass / moved)
