"""Problems with ties, where rounding decides among equal plans: operations in POT's order."""

import numpy as np

from torchgw.pot._arrays import Array
from torchgw.pot._descent import Line
from torchgw.pot._quadratic import Quadratic

# A table counts as tied by so many of its rows: on average an entry of them is repeated so many
# times. [L660]
_ROWS, _TIMES = 8, 4


def tied(*tables: Array) -> bool:
    """Say whether any table repeats most of its entries, as 0/1 tables do."""
    few = (table[:_ROWS] for table in tables)
    return any(_TIMES * len(np.unique(rows)) <= rows.size for rows in few)


class LineOfPot(Line):
    """The same line by POT's operations in POT's order, so that equals differ by the same bits."""

    def __init__(
        self,
        term: Quadratic,
        weight: float,
        linear: Array | float,
        p: Array | None,
        q: Array | None,
    ) -> None:
        super().__init__(term, weight, linear)
        self.p, self.q = p, q

    def begin(self, plan: Array) -> float:
        self._known = self._gradient(plan)
        half = 0.5 * float((self._known * plan).sum())
        return float(np.sum(self.linear * plan)) + self.weight * half

    def slope(self, plan: Array) -> Array:
        return self.linear + self.weight * self._known

    def look(self, plan: Array, direction: Array) -> tuple[float, float]:
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

    def go(self, plan: Array, direction: Array, end: Array, length: float) -> Array:
        plan = plan + length * direction
        if self.p is None:
            self._known = self._known + length * self._change
        else:
            self._known = self._gradient(plan)
        return plan

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
