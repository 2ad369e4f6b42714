"""Plans of least linear cost, by the marginals that hold: the oracles of conditional gradient.

Strict marginals are an assignment, or exact transport; bounds get a point on either side that takes
the mass that stays; of a free marginal each row goes where it is cheapest.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import scipy

from torchgw._sinkhorn.exact import Array, ExactTransport

# Costs of a row within this of the least are equal: it is split among them. [L1303]
_EQUAL = 1e-15


class Linear(NamedTuple):
    """A plan of least linear cost."""

    plan: Array  # (n, m)
    # dual potentials (n,) and (m,), computed when asked for
    potentials: Callable[[], tuple[Array, Array]] | None = None


class LinearSolver(Protocol):
    """Solves for a cost (n, m).

    A plan that lowers a value already ``reached`` by half of what can be gained may do, or one
    whose value is ``below`` a number.
    """

    def __call__(self, cost: Array, reached: float = ..., below: float = ...) -> Linear: ...


def transport(p: Array, q: Array) -> LinearSolver:
    """Prepare the solver of problems between two weights of equal sum."""
    general = ExactTransport(p, q)
    equal = len(p) == len(q) and (p == p[0]).all() and (q == q[0]).all()
    if equal and not general.by_parts:
        return lambda cost, reached=-np.inf, below=-np.inf: _assign(cost, p[0])

    def solve(cost: Array, reached: float = -np.inf, below: float = -np.inf) -> Linear:
        # a plan that only lowers the value is not enough: steps would be others
        plan, u, v = general(cost, below=below)
        return Linear(plan, lambda: (u, v))

    return solve


def one_sided(p: Array) -> LinearSolver:
    """Prepare the solver where columns are free: each row goes to its cheapest columns."""

    def solve(cost: Array, reached: float = -np.inf, below: float = -np.inf) -> Linear:
        plan = (cost <= cost.min(1, keepdims=True) + _EQUAL).astype(np.float64)
        plan *= (p / plan.sum(1))[:, None]
        return Linear(plan)

    return solve


class PartialTransport:
    """The solver where only a mass moves; weights, whose sum may be known as one, are bounds."""

    # A point without cost on either side takes the mass that stays. Mass between these two points
    # would make others move more, so it costs more than anything else.

    def __init__(self, p: Array, q: Array, mass: float, total: float | None = None) -> None:
        self.p, self.q, self.mass = p, q, mass
        first, second = (
            np.append(p, (total or q.sum()) - mass),
            np.append(q, (total or p.sum()) - mass),
        )
        self.general = ExactTransport(first, second / second.sum() * first.sum())
        self._table = np.zeros((len(p) + 1, len(q) + 1))

    def __call__(self, cost: Array, reached: float = -np.inf, below: float = -np.inf) -> Linear:
        """Solve, or find a plan that is good enough."""
        least = cost.min()
        table = self.with_rest(cost - least, cost.max() - least + 1)
        shift = least * self.mass
        return Linear(self.general(table, reached - shift, below - shift).plan[:-1, :-1])

    def with_rest(self, cost: Array, corner: float) -> Array:
        """Add the two points to a cost, given what mass between them costs."""
        self._table[:-1, :-1] = cost
        self._table[-1, -1] = corner
        return self._table


def partial_transport(p: Array, q: Array, mass: float, total: float | None = None) -> LinearSolver:
    """Prepare the solver where a mass moves, which may be all of both sides."""
    whole = all(math.isclose(mass, weights.sum(), rel_tol=1e-14) for weights in (p, q))
    return transport(p, q) if whole else PartialTransport(p, q, mass, total)


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
