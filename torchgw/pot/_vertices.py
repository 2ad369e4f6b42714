"""Linear transport problems without regularisation: plans of least cost, and their prices."""

import warnings
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import scipy

from torchgw._sinkhorn.exact import ExactTransport
from torchgw.pot._arrays import Array


class Linear(NamedTuple):
    """A plan of least linear cost."""

    plan: Array  # (n, m)
    # dual potentials (n,) and (m,), computed when asked for
    potentials: Callable[[], tuple[Array, Array]] | None = None


class LinearSolver(Protocol):
    """Solves for a cost; a plan that lowers a value already reached by enough may do."""

    def __call__(self, cost: Array, reached: float = ...) -> Linear: ...


def transport(p: Array, q: Array, *, as_pot: bool = False) -> LinearSolver:
    """Prepare the solver of problems between two weights of equal sum, or POT's (``as_pot``)."""
    general = ExactTransport(p, q)
    as_pot &= general.by_pot
    equal = len(p) == len(q) and (p == p[0]).all() and (q == q[0]).all()
    if equal and not as_pot and not general.by_parts:
        return lambda cost, reached=-np.inf: _assign(cost, p[0])

    def solve(cost: Array, reached: float = -np.inf) -> Linear:
        if as_pot:
            general.on(cost)
        if not as_pot or general.short:
            # a plan that only lowers the value is not enough: the steps have to be those of POT
            general(cost)
        assert general.last is not None
        plan, u, v = general.last
        return Linear(plan, lambda: (u, v))

    return solve


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
    """The solver where only part of the mass moves."""

    # A point without cost on either side takes the mass that stays. Mass between these two points
    # would make others move more, so it costs more than anything else.

    def __init__(self, p: Array, q: Array, mass: float) -> None:
        self.p, self.q, self.mass = p, q, mass
        self.general = _with_rest(p, q, mass)
        self._table = np.zeros((len(p) + 1, len(q) + 1))

    def __call__(self, cost: Array, reached: float = -np.inf) -> Linear:
        """Solve; a plan with half of the largest possible gain on a value reached will do."""
        self._table[:-1, :-1] = cost
        self._table[-1, -1] = 2 * max(cost.max(), -cost.min()) + 1
        return Linear(self.general(self._table, reached).plan[:-1, :-1])


class ShortTransport:
    """The same with POT's cost of the mass that stays, ended after as many pivots as POT's."""

    def __init__(self, whole: PartialTransport, linear: Array | float, pivots: int) -> None:
        self.mass = whole.mass
        self._general = _with_rest(whole.p, whole.q, whole.mass)
        self._corner = 100 * float(np.max(linear))
        self._pivots = pivots

    def __call__(self, cost: Array, reached: float = -np.inf) -> Linear:
        """Solve, as far as the pivots last."""
        table = np.zeros((len(cost) + 1, cost.shape[1] + 1))
        table[:-1, :-1] = cost
        table[-1, -1] = self._corner
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Linear(self._general.on(table, self._pivots)[0][:-1, :-1])

    def solved(self, plan: Array) -> bool:
        """Say whether pivots never ran out, and the plan moves the mass asked for."""
        return not self._general.short and abs(plan.sum() - self.mass) <= 1e-9 * self.mass

    def within(self, plan: Array) -> Array | None:
        """Scale a plan that moves more; None for one that moves less."""
        moved = plan.sum()
        if moved < self.mass * (1 - 1e-9):
            return None
        return plan if moved <= self.mass else plan * (self.mass / moved)


def _with_rest(p: Array, q: Array, mass: float) -> ExactTransport:
    """Add a point on either side that takes the mass that stays."""
    return ExactTransport(np.append(p, q.sum() - mass), np.append(q, p.sum() - mass))


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


def in_order(p: Array, q: Array, mass: float = np.inf) -> Array:
    """Make a plan that moves the first to the first, (n, m): a vertex, without a cost."""
    ends = [np.minimum(weights.cumsum(), mass) for weights in (p, q)]
    steps = np.unique(np.concatenate([[0.0], *ends]))
    middles = (steps[1:] + steps[:-1]) / 2
    rows, columns = (np.searchsorted(end[:-1], middles) for end in ends)
    plan = np.zeros((len(p), len(q)))
    np.add.at(plan, (rows, columns), np.diff(steps))
    return plan
