"""The quadratic term of a dense problem: sum L(C1_ik, C2_jl) T_ij T_kl for any plan T."""

from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array

from torchgw._errors import InvalidInputError
from torchgw._problem.losses import LOG_OFFSET
from torchgw.pot._arrays import ROUNDING, Array, is_symmetric

LOSSES = ("square_loss", "kl_loss")

# POT adds this to arguments of the derivative of a logarithm. [L389]
_TINY_SLOPE = 1e-15
# Plans with fewer entries than all over this number are multiplied entry by entry, those of more
# than so many entries. [L483, L1304]
_SPARSE, _SMALL = 50, 10_000


class Transformed(NamedTuple):
    """The parts of a loss L(x, y) = f1(x) + f2(y) - h1(x) h2(y), of tables."""

    f1: Array  # (n, n)
    f2: Array  # (m, m)
    h1: Array  # (n, n)
    h2: Array  # (m, m)


def transform(C1: Array, C2: Array, loss: str) -> Transformed:
    """Apply the parts of a loss to two tables."""
    if loss not in LOSSES:
        raise InvalidInputError(f"Unknown `loss_fun='{loss}'`. Use one of: {LOSSES}.")
    if loss == "square_loss":
        return Transformed(C1**2, C2**2, C1, 2 * C2)
    for table in (C1, C2):
        if table.min() < -ROUNDING * abs(table).max():
            raise InvalidInputError(
                "`loss_fun='kl_loss'` takes a logarithm: costs must not be negative. Use "
                "'square_loss'."
            )
    C1, C2 = np.maximum(C1, 0), np.maximum(C2, 0)
    return Transformed(C1 * np.log(C1 + LOG_OFFSET) - C1, C2, C1, np.log(C2 + LOG_OFFSET))


class Quadratic(NamedTuple):
    """The quadratic term, with the terms of the marginals that the plan itself has."""

    parts: Transformed
    symmetric: bool

    def cross(self, plan: Array) -> Array:
        """Compute h1 T h2', (n, m)."""
        return _product(self.parts.h1, plan, self.parts.h2.T)

    def value(self, plan: Array) -> float:
        """Compute the term."""
        f1, f2, _, _ = self.parts
        rows, columns = plan.sum(1), plan.sum(0)
        sides = rows @ f1 @ rows + columns @ f2 @ columns
        return float(sides * 1.0 - np.vdot(self.cross(plan), plan))

    def gradient(self, plan: Array) -> Array:
        """Compute its derivative by the plan, which is linear in the plan."""
        f1, f2, _, _ = self.parts
        rows, columns = plan.sum(1), plan.sum(0)
        if self.symmetric:
            table = self.cross(plan)
            table *= -2
            rows, columns = 2 * (f1 @ rows), 2 * (f2 @ columns)
        else:
            table = -self.cross(plan) - _product(self.parts.h1.T, plan, self.parts.h2)
            rows, columns = f1 @ rows + f1.T @ rows, f2 @ columns + f2.T @ columns
        table += rows[:, None]
        table += columns
        return table


def _product(left: Array, plan: Array, right: Array) -> Array:
    """Multiply three matrices; of a plan with few entries by these entries alone."""
    if plan.size <= _SMALL or np.count_nonzero(plan) * _SPARSE > plan.size:
        return left @ plan @ right
    entries = np.flatnonzero(plan)
    places, columns = np.divmod(entries, plan.shape[1])
    rows, starts = np.unique(places, return_index=True)
    shape = len(rows), plan.shape[1]
    few = csr_array((plan.ravel()[entries], columns, np.append(starts, len(entries))), shape=shape)
    return left[:, rows] @ (few @ right)


def quadratic(C1: Array, C2: Array, loss: str, symmetric: bool | None) -> Quadratic:
    """Build the quadratic term of two tables; ``symmetric=None`` tests them."""
    if symmetric is None:
        symmetric = is_symmetric(C1, C2)
    return Quadratic(transform(C1, C2, loss), bool(symmetric))


def table_slopes(C1: Array, C2: Array, loss: str, plan: Array) -> tuple[Array, Array]:
    """Differentiate sum L(C1_ik, C2_jl) P_ij P_kl by the two tables, at a fixed plan."""
    first, second = (np.outer(sums, sums) for sums in (plan.sum(1), plan.sum(0)))
    if loss == "square_loss":
        return (2 * (C1 * first - plan @ C2 @ plan.T), 2 * (C2 * second - plan.T @ C1 @ plan))
    return (
        np.log(C1 + _TINY_SLOPE) * first - plan @ np.log(C2 + _TINY_SLOPE) @ plan.T,
        second - plan.T @ C1 @ plan / (C2 + _TINY_SLOPE),
    )
