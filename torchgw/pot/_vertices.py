"""Linear transport problems without regularisation: plans of least cost, and their prices."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy

from torchgw._errors import NumericalError
from torchgw.pot._arrays import Array

__all__ = ["Linear", "LinearSolver", "partial_transport", "semirelaxed", "transport"]


class Linear(NamedTuple):
    """A plan of least linear cost."""

    plan: Array  # (n, m)
    # dual potentials (n,) and (m,), computed when asked for
    potentials: Callable[[], tuple[Array, Array]] | None = None


LinearSolver = Callable[[Array], Linear]


def transport(p: Array, q: Array) -> LinearSolver:
    """Prepare the solver of transport problems between two weights of equal sum."""
    equal = len(p) == len(q) and (p == p[0]).all() and (q == q[0]).all()
    if equal:
        return lambda cost: _assign(cost, p[0])
    return _General(p, q)


def semirelaxed(p: Array) -> LinearSolver:
    """Prepare the solver where columns are free: each row goes to its cheapest columns."""

    def solve(cost: Array) -> Linear:
        plan = (cost <= cost.min(1, keepdims=True) + 1e-15).astype(np.float64)
        plan *= (p / plan.sum(1))[:, None]
        return Linear(plan)

    return solve


def partial_transport(p: Array, q: Array, mass: float) -> LinearSolver:
    """Prepare the solver where only part of the mass moves.

    A point of no cost on either side takes what stays; what the two sent to each other would move
    more than the share, so that costs more than anything else.
    """
    n, m = len(p), len(q)
    more_p, more_q = np.append(p, q.sum() - mass), np.append(q, p.sum() - mass)
    whole = np.isclose(mass, p.sum(), rtol=1e-14), np.isclose(mass, q.sum(), rtol=1e-14)
    if all(whole):
        return transport(p, q)
    general = _General(more_p, more_q)

    def solve(cost: Array) -> Linear:
        table = np.zeros((n + 1, m + 1))
        table[:n, :m] = cost - cost.min()
        table[-1, -1] = 2 * table.max() + 1
        return Linear(general(table).plan[:n, :m])

    return solve


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

    The simplex begins at the prices of the last problem, which is near where steps are small.
    """

    def __init__(self, p: Array, q: Array) -> None:
        self.p, self.q = p, q
        self.prices: tuple[Array, Array] | None = None

    def __call__(self, cost: Array) -> Linear:
        try:
            import ot
        except ImportError:
            return _by_scipy(self.p, self.q, cost)
        options: dict[str, Any] = {}
        if self.prices is not None and "potentials_init" in inspect.signature(ot.emd).parameters:
            options["potentials_init"] = self.prices
        # of negative costs the network simplex may say that there is no plan
        lowest = cost.min()
        plan, log = ot.emd(self.p, self.q, cost - lowest, numItermax=1_000_000, log=True, **options)
        self.prices = log["u"], log["v"]
        return Linear(plan, lambda: (log["u"] + lowest, log["v"]))


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
