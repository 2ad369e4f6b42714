"""Linear transport problems without regularisation: plans of least cost, and their prices."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import scipy

from torchgw._errors import NumericalError
from torchgw.pot._arrays import Array, Places

__all__ = ["Linear", "LinearSolver", "partial_transport", "semirelaxed", "transport"]


# Problems with more points on both sides are solved on part of their entries: so many a row, and so
# many more where prices of a partial problem are wrong, told by every few rows; for some rounds, of
# some pivots of the simplex at most. [L408, L482]
_LARGE = 150
_KEPT = 12
_EVERY = 16
_ROUNDS = 3
_PIVOTS = 1_000_000
# Share of the last gain that entries once chosen have to give. [L433]
_ENOUGH = 0.1


class Linear(NamedTuple):
    """A plan of least linear cost."""

    plan: Array  # (n, m)
    # dual potentials (n,) and (m,), computed when asked for
    potentials: Callable[[], tuple[Array, Array]] | None = None


class LinearSolver(Protocol):
    """Solves a cost; where a value is reached already, a plan that gains enough on it may do."""

    def __call__(self, cost: Array, reached: float = ...) -> Linear: ...


def transport(p: Array, q: Array) -> LinearSolver:
    """Prepare the solver of transport problems between two weights of equal sum."""
    equal = len(p) == len(q) and (p == p[0]).all() and (q == q[0]).all()
    if equal:
        return lambda cost, reached=-np.inf: _assign(cost, p[0])
    general = _General(p, q)
    # gaining on a value is not enough: the steps are POT's
    return lambda cost, reached=-np.inf: general(cost)


def semirelaxed(p: Array) -> LinearSolver:
    """Prepare the solver where columns are free: each row goes to its cheapest columns."""

    def solve(cost: Array, reached: float = -np.inf) -> Linear:
        plan = (cost <= cost.min(1, keepdims=True) + 1e-15).astype(np.float64)
        plan *= (p / plan.sum(1))[:, None]
        return Linear(plan)

    return solve


def partial_transport(p: Array, q: Array, mass: float) -> LinearSolver:
    """Prepare the solver where only part of the mass moves."""
    whole = (np.isclose(mass, weights.sum(), rtol=1e-14) for weights in (p, q))
    return transport(p, q) if all(whole) else PartialTransport(p, q, mass)


class PartialTransport:
    """The solver where only part of the mass moves.

    A point of no cost on either side takes what stays; what the two sent to each other would move
    more than the share, so that costs more than anything else.
    """

    def __init__(self, p: Array, q: Array, mass: float) -> None:
        self.p, self.q, self.mass = p, q, mass
        self._general = _General(np.append(p, q.sum() - mass), np.append(q, p.sum() - mass))
        self._gain = np.inf  # of the last plan over what was reached

    def __call__(self, cost: Array, reached: float = -np.inf) -> Linear:
        """Solve; where a value is reached already, a plan that gains half of the most will do.

        So does one on the entries of the last, while these gain a share of what they gave.
        """
        if self._general.used is not None and reached > -np.inf:
            plan, gain = self._again(cost, *self._general.used, reached)
            if gain > _ENOUGH * self._gain:
                self._gain = gain
                return Linear(plan)
        lowest = cost.min()
        table = np.zeros((len(cost) + 1, cost.shape[1] + 1))
        np.subtract(cost, lowest, out=table[:-1, :-1])
        table[-1, -1] = 2 * table.max() + 1
        plan = self._general(table, reached - self.mass * lowest).plan[:-1, :-1]
        self._gain = reached - float(np.vdot(cost, plan))
        return Linear(plan)

    def _again(
        self, cost: Array, rows: Places, columns: Places, reached: float
    ) -> tuple[Array, float]:
        """Solve on the entries of the last problem; also return the gain."""
        real = (rows < len(self.p)) & (columns < len(self.q))
        values = np.zeros(len(rows))
        values[real] = cost[rows[real], columns[real]]
        lowest = values[real].min()
        values[real] -= lowest
        shape = len(self.p) + 1, len(self.q) + 1
        plan, worth = self._general.on(scipy.sparse.coo_array((values, (rows, columns)), shape))
        return plan[:-1, :-1], reached - worth - self.mass * lowest

    @property
    def prices(self) -> tuple[Array, Array]:
        """Prices of the last solution, and last those of the points that take what stays."""
        assert self._general.last is not None
        return self._general.last[1:]

    def expect(self, u: Array, v: Array) -> None:
        """Look for the next solution near such prices."""
        self._general.last = _in_order(self._general.p, self._general.q), u, v


def _assign(cost: Array, weight: float) -> Linear:
    rows, columns = scipy.optimize.linear_sum_assignment(cost)
    plan = np.zeros_like(cost)
    plan[rows, columns] = weight

    def potentials() -> tuple[Array, Array]:
        # shortest paths over the alternatives to each match, by Bellman and Ford
        detours = cost - cost[rows, columns][:, None]
        second = np.zeros(len(cost))
        smallest = 1e-14 * max(abs(cost).max(), 1e-300)
        for _ in range(len(cost)):
            shorter = (detours + second[columns][:, None]).min(0)
            if (second - shorter).max() <= smallest:
                break
            second = np.minimum(second, shorter)
        first = np.empty(len(cost))
        first[rows] = cost[rows, columns] - second[columns]
        return first, second

    return Linear(plan, potentials)


class _General:
    """Solve by POT's network simplex if it is installed, otherwise by SciPy's HiGHS.

    Large problems after the first are solved on the entries that cost least beside the last prices,
    and on those that the prices found leave too cheap, until there are none [1]_.

    References
    ----------
    .. [1] B. Schmitzer. A sparse multiscale algorithm for dense optimal transport. Journal of
       Mathematical Imaging and Vision 2016.
    """

    def __init__(self, p: Array, q: Array) -> None:
        self.p, self.q = p, q
        try:
            from ot import emd
        except ImportError:
            self._emd: Any = None
            self._sparse = False
        else:
            # POT takes sparse costs since it takes these
            self._emd = emd
            self._sparse = "potentials_init" in inspect.signature(emd).parameters
        self.last: tuple[Array, Array, Array] | None = None  # the plan, and its prices
        self.used: tuple[Places, Places] | None = None  # entries that the last was found on

    def __call__(self, cost: Array, reached: float = -np.inf) -> Linear:
        """Solve; where a value is reached already, any plan that gains half of the most will do."""
        if self._emd is None:
            return _by_scipy(self.p, self.q, cost)
        # of negative costs the network simplex may say that there is no plan
        lowest = cost.min()
        if lowest:
            cost = cost - lowest
        plan = self._by_parts(cost, reached - lowest * self.p.sum())
        if plan is None:
            plan, _ = self.on(cost)
        assert self.last is not None
        _, u, v = self.last
        return Linear(plan, lambda: (u + lowest, v))

    def _by_parts(self, cost: Array, worth: float) -> Array | None:
        """Solve on some entries; None where these would be many or POT takes no sparse costs."""
        if self.last is None or min(cost.shape) < _LARGE or not self._sparse:
            return None
        plan, u, v = self.last
        rest = cost - u[:, None] - v
        used = (plan > 0) | (rest <= _cheap(rest))
        slack = 1e-12 * cost.max()
        for _ in range(_ROUNDS):
            entries = rows, columns = np.nonzero(used)
            part, value = self.on(scipy.sparse.coo_array((cost[entries], entries), cost.shape))
            _, u, v = self.last
            rest = cost - u[:, None] - v
            bounds = self.p @ rest.min(1).clip(max=0), self.q @ rest.min(0).clip(max=0)
            if float(worth) - value > -max(bounds) or rest.min() >= -slack:
                self.used = rows, columns
                return part
            used |= rest < (min(-slack, _cheap(rest)) if worth > -np.inf else -slack)
        return None

    def on(self, cost: Any) -> tuple[Array, float]:
        """Solve by POT, on the entries of a sparse cost or on all; also return the value."""
        assert self._emd is not None
        plan, log = self._emd(self.p, self.q, cost, numItermax=_PIVOTS, log=True)
        if not isinstance(plan, np.ndarray):
            plan = plan.toarray()
        self.last = plan, log["u"], log["v"]
        return plan, float(log["cost"])


def _cheap(rest: Array) -> float:
    """Find what only the cheapest entries are below, from some of the rows."""
    few = rest[::_EVERY]
    place = few.size * _KEPT // min(rest.shape)
    return float(np.partition(few, place, axis=None)[place])


def _in_order(p: Array, q: Array) -> Array:
    """Make a plan that moves the first to the first, (n, m): a vertex, without a cost."""
    ends = p.cumsum(), q.cumsum() * (p.sum() / q.sum())
    steps = np.unique(np.concatenate([[0.0], *ends]))
    middles = (steps[1:] + steps[:-1]) / 2
    rows, columns = (np.searchsorted(end[:-1], middles) for end in ends)
    plan = np.zeros((len(p), len(q)))
    np.add.at(plan, (rows, columns), np.diff(steps))
    return plan


def _by_scipy(p: Array, q: Array, cost: Array) -> Linear:
    n, m = cost.shape
    rows = scipy.sparse.kron(scipy.sparse.eye_array(n), np.ones((1, m)))
    columns = scipy.sparse.kron(np.ones((1, n)), scipy.sparse.eye_array(m))
    sums = scipy.sparse.vstack([rows, columns]).tocsr()
    found: Any = scipy.optimize.linprog(
        cost.ravel(), A_eq=sums, b_eq=np.append(p, q * (p.sum() / q.sum())), method="highs"
    )
    if found.x is None:
        raise NumericalError(f"The transport problem was not solved: {found.message}")
    prices = np.asarray(found.eqlin.marginals)
    return Linear(found.x.reshape(n, m), lambda: (prices[:n], prices[n:]))
