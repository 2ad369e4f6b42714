"""Newton's method for partial transport, where marginals are bounds."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchgw._sinkhorn.level import host_level

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

# Its steps at most, the shares of a step that are tried, how far potentials may move in a step and
# in all, in units of epsilon, and the ridge, a share of the mass of a column. [L1202]
_STEPS, _SHARES = 30, 0.3 ** np.arange(8)
_LONGEST, _FURTHEST, _RIDGE = 3.0, 30.0, 1e-11


class OnBounds(NamedTuple):
    """What Newton's method adds to potentials, in units of epsilon."""

    rows: Array  # to exact rows at the new columns
    columns: Array
    solved: bool
    far: bool  # whether it would have gone on from a plan made anew


class _Point(NamedTuple):
    """Where columns are scaled by exp(u): rows that carry the mass, and the dual value."""

    u: Array
    x: Array  # logarithms of what rows are scaled by
    full: Mask  # rows whose bound is met
    gain: float  # of the dual value, over epsilon


class _Columns(NamedTuple):
    """How the columns of a plan miss their masses."""

    masses: Array
    held: Mask  # those at g = 0, short of mass all the same
    room: Array  # up to g = 0, in units of epsilon
    missing: Array  # zero at columns that are held
    error: float


def newton_on_bounds(
    plan: Array,
    potentials: tuple[Array, Array],
    weights: tuple[Array, Array],
    mass: float,
    tol: float,
) -> OnBounds:
    """Go on from a plan of exact rows by Newton's method on the dual.

    Potentials f and g are in units of epsilon; g is zero at columns below their bounds, and f has
    the level in it.
    """
    # Points at their bounds are known for a step: full rows follow the columns one by one, those
    # that are not full rise and fall together with the level, and columns with g = 0 that would go
    # on stay. Where a step changes which these are, the dual may rise on its way; it is shortened
    # until it does not: D. Bertsekas. Projected Newton methods for optimization problems with
    # simple constraints. SIAM Journal on Control and Optimization 1982.
    dual = _Dual(plan, potentials, weights, mass)
    here, solved, far = dual.at(np.zeros_like(potentials[1])), False, False
    for _ in range(_STEPS):
        now = plan * np.exp(here.x)[:, None] * np.exp(here.u)
        columns = dual.columns(now, here.u)
        solved = columns.error <= tol / 2
        if solved:
            break
        there = dual.climb(here, now, columns)
        if not there.gain > here.gain:
            break
        here = there
        if far := bool(abs(here.u).max() > _FURTHEST):
            break
    return OnBounds(here.x, here.u, solved, far)


class _Dual:
    """The dual value of a partial problem, as its change from a plan of exact rows."""

    # All but the bounds is relative to that plan: potentials of thousands of epsilons would leave
    # rounding of the size of the last steps in the value.

    def __init__(
        self,
        plan: Array,
        potentials: tuple[Array, Array],
        weights: tuple[Array, Array],
        mass: float,
    ) -> None:
        (f, self.g), (self.a, self.b), self.mass, self.kernel = potentials, weights, mass, plan
        self.rows, self.used = self.a > 0, self.b > 0
        # the level is that of the highest row
        self.f = np.where(self.rows, f - f[self.rows].max(), 0.0)
        self.weighted = np.where(self.rows, self.a, 1.0)

    def at(self, u: Array) -> _Point:
        """Find the rows that carry the mass, and the value."""
        with np.errstate(divide="ignore"):
            own = np.log(self.weighted / np.where(self.rows, self.kernel @ np.exp(u), 1.0))
        rows = np.where(self.rows, self.f + own, np.inf)
        with np.errstate(all="ignore"):
            height = host_level(rows, self.a, self.mass, 1.0)
        full = rows < height
        x = np.where(full, own, height - self.f)
        gain = self.mass * height + self.a @ (x - height) + self.b @ u
        return _Point(u, np.where(self.rows, x, 0.0), full, float(gain))

    def columns(self, plan: Array, u: Array) -> _Columns:
        """Find the columns that are held, and what the others miss."""
        masses, room = plan.sum(0), -(self.g + u)
        short = np.log(np.where(self.used, self.b, 1.0) / np.maximum(masses, 1e-300))
        held = self.used & (short >= room)
        missing = np.where(self.used & ~held, self.b - masses, 0.0)
        error = float(abs(missing).sum() + masses[held] @ np.expm1(room[held]))
        return _Columns(masses, held, room, missing, error)

    def climb(self, here: _Point, now: Array, columns: _Columns) -> _Point:
        """Take a step, shortened until the dual does not fall."""
        direction = self._direction(now, here.full, columns)
        for share in _SHARES:
            there = self.at(np.minimum(here.u + share * direction, -self.g))
            if there.gain >= here.gain:
                break
        return there

    def _direction(self, now: Array, full: Mask, columns: _Columns) -> Array:
        """Solve Newton's equations for given full rows and held columns."""
        masses, held, room, missing, _ = columns
        parts, together = now[full], now[~full].sum(0)
        shared = parts.T @ (parts / np.maximum(parts.sum(1), 1e-300)[:, None])
        shared += np.outer(together, together) / max(together.sum(), 1e-300)
        curvature = np.diag((1 + _RIDGE) * masses) - shared
        # columns whose mass has underflowed wait for iterations
        free = self.used & ~held & (masses > 1e-30)
        direction = np.where(held, room, 0.0)
        wanted = (missing - curvature @ direction)[free]
        direction[free] = np.linalg.solve(curvature[np.ix_(free, free)], wanted)
        direction *= min(1.0, _LONGEST / max(abs(direction).max(), 1e-300))
        return direction
