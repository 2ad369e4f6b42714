"""Linear problems without regularisation, and plans of least cost by the marginals that hold.

Strict marginals are an assignment, or exact transport; bounds get a point on either side that takes
the mass that stays; of a free marginal each row goes where it is cheapest.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import scipy
from numpy.typing import NDArray

from torchgw._errors import NumericalError

Array = NDArray[np.float64]

# Problems with more points on both sides are solved on part of their entries: so many a row, and so
# many more where prices of a partial problem are wrong, told by every few rows; for some rounds, of
# some pivots of the simplex at most. [L408, L482, L518, L740, L820]
LARGE = 150
_KEPT = 8
_EVERY = 16
ROUNDS = 6
_PIVOTS = 1_000_000
# The prices of a partial problem have to prove that its value is off by at most this share. [L518]
_EXACT = 1e-11


class Vertex(NamedTuple):
    """A plan of least cost, and the dual potentials that prove it."""

    plan: Any  # (n, m), sparse on some entries
    u: Array  # (n,)
    v: Array  # (m,)


class ExactTransport:
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
            emd = None
        self._emd: Any = emd
        self.by_pot = emd is not None
        # POT takes sparse costs since it takes these
        self.by_parts = (
            min(len(p), len(q)) >= LARGE
            and self.by_pot
            and "potentials_init" in inspect.signature(emd).parameters
        )
        self.last: Vertex | None = None
        self._used: NDArray[np.intp] | None = None  # entries of the last plan, if they are known

    def __call__(self, cost: Array, reached: float = -np.inf, below: float = -np.inf) -> Vertex:
        """Solve; a plan with half of the largest possible gain on a value reached will do.

        So will one whose value is ``below`` a number.
        """
        if not self.by_pot:
            self.last = by_scipy(self.p, self.q, cost)
        elif self.last is not None and self.by_parts:
            _, u, v = self.last
            # with the last prices subtracted the solver needs fewer pivots
            rest = cost - v
            rest -= u[:, None]
            value, least = float(self.p @ u + self.q @ v), cost.min()
            worth = value - least * self.p.sum(), max(cost.max(), -least)
            found = self._nearby(rest, worth, reached - value, below - value)
            self._used = found.plan.row.astype(np.intp) * cost.shape[1] + found.plan.col
            self.last = Vertex(found.plan.toarray(), u + found.u, v + found.v)
        else:
            # for negative costs the network simplex may report that there is no plan
            lowest = cost.min()
            found = self.on(cost - lowest if lowest else cost)
            self.last = found._replace(u=found.u + lowest)
        return self.last

    def _nearby(
        self, rest: Array, worth: tuple[float, float], reached: float, below: float
    ) -> Vertex:
        """Solve costs less the last prices on the entries that are cheapest, or of the last plan.

        Prices are to be added to the last ones, and the plan is sparse. ``worth`` are the value of
        the last prices above the least cost, and the largest cost. After some rounds all entries
        are taken.
        """
        u, v = np.zeros(len(self.p)), np.zeros(len(self.q))
        used = rest <= _cheap(rest)
        assert self.last is not None
        used.reshape(-1)[np.flatnonzero(self.last.plan) if self._used is None else self._used] = (
            True
        )
        rounds = 0
        while True:
            rounds += 1
            if rounds > ROUNDS:
                used = np.isfinite(rest)
            places = np.flatnonzero(used)
            few = rest.reshape(-1)[places]
            few -= (least := few.min())
            table = scipy.sparse.coo_array((few, np.divmod(places, rest.shape[1])), rest.shape)
            plan, log = self._by_simplex(table, _PIVOTS)
            first, second = log["u"] + least, log["v"]
            u, v = u + first, v + second
            value = float(self.p @ u + self.q @ v)
            if value < below:
                return Vertex(plan, u, v)
            rest -= first[:, None]
            rest -= second
            bounds = self.p @ rest.min(1).clip(max=0), self.q @ rest.min(0).clip(max=0)
            missed, wrong = -float(max(bounds)), -1e-12 * worth[1]
            proven = missed <= _EXACT * (worth[0] + value)
            exact = proven or rounds > ROUNDS or rest.min() >= wrong
            if exact or reached - value > missed:
                return Vertex(plan, u, v)
            used |= rest < (min(wrong, _cheap(rest)) if reached > -np.inf else wrong)

    def on(self, cost: Array, pivots: int = _PIVOTS) -> Vertex:
        """Solve by POT on all entries."""
        plan, log = self._by_simplex(cost, pivots)
        self.last, self._used = Vertex(plan, log["u"], log["v"]), None
        return self.last

    def few(self, table: Any, pivots: int) -> tuple[Any, Array] | None:
        """Solve on some entries (n, m), sparse: a plan and prices v (m,), if pivots suffice."""
        plan, log = self._by_simplex(table, pivots)
        return None if log["warning"] is not None else (plan.tocoo(), log["v"])

    def _by_simplex(self, cost: Any, pivots: int) -> tuple[Any, dict[str, Any]]:
        # sums of both weights are equal here
        plan, log = self._emd(
            self.p, self.q, cost, numItermax=pivots, log=True, check_marginals=False
        )
        return plan, log


def _cheap(rest: Array) -> float:
    """Estimate from some rows the cost below which only the cheapest entries lie."""
    few = rest[::_EVERY]
    place = few.size * _KEPT // min(rest.shape)
    return float(np.partition(few, place, axis=None)[place])


# Mass and range of costs of what HiGHS is given, whose tolerances are 1e-7. [L1514]
_UNITS = 1e7


def by_scipy(p: Array, q: Array, cost: Array) -> Vertex:
    """Solve a problem by HiGHS."""
    found = try_scipy(p, q, cost)
    if isinstance(found, str):
        raise NumericalError(f"The transport problem was not solved: {found}")
    return found


def try_scipy(p: Array, q: Array, cost: Array) -> Vertex | str:
    """Solve a problem by HiGHS, or say why that failed."""
    n, m = cost.shape
    rows = scipy.sparse.kron(scipy.sparse.eye_array(n), np.ones((1, m)))
    columns = scipy.sparse.kron(np.ones((1, n)), scipy.sparse.eye_array(m))
    sums = scipy.sparse.vstack([rows, columns]).tocsr()
    # the heaviest column follows from the others: asked for too, rounding may contradict them
    asked, prices = np.arange(n + m) != n + q.argmax(), np.zeros(n + m)
    mass, price = p.sum() / _UNITS, (np.ptp(cost) or 1.0) / _UNITS
    given = np.append(p / mass, q * (_UNITS / q.sum()))[asked]
    least = cost.min()
    found: Any = scipy.optimize.linprog(
        (cost - least).ravel() / price, A_eq=sums[asked], b_eq=given, method="highs"
    )
    if found.x is None:
        return str(found.message)
    prices[asked] = found.eqlin.marginals * price
    return Vertex(found.x.clip(0).reshape(n, m) * mass, prices[:n] + least, prices[n:])


# Rounds of shortest paths from a plan to its prices: more are of no use but to rounding. [L1352]
_PATHS = 500
# Costs are equal within this: a row is split among its least ones, and a path has to be shorter by
# this share of the largest. [L1303, L1352]
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
        self._table[:-1, :-1] = cost - least
        self._table[-1, -1] = cost.max() - least + 1
        shift = least * self.mass
        return Linear(self.general(self._table, reached - shift, below - shift).plan[:-1, :-1])


def partial_transport(p: Array, q: Array, mass: float, total: float | None = None) -> LinearSolver:
    """Prepare the solver where a mass moves, which may be all of both sides."""
    whole = all(math.isclose(mass, weights.sum(), rel_tol=1e-14) for weights in (p, q))
    return transport(p, q) if whole else PartialTransport(p, q, mass, total)


def prices_of(cost: Array, plan: Array) -> Array:
    """Find prices v (m,) that prove a plan of least cost, by shortest paths from all columns."""
    # v_k <= v_j + cost_ik - cost_ij wherever the plan moves mass from i to j
    rows, columns = plan.nonzero()
    there, starts = np.unique(rows, return_index=True)
    own, least = cost[rows, columns], _EQUAL * float(np.abs(cost).max())
    v, ends = np.zeros(cost.shape[1]), np.full(len(there), np.inf)
    for _ in range(_PATHS):
        nearer = np.minimum.reduceat(v[columns] - own, starts)
        changed = np.flatnonzero(nearer < ends - least)
        if len(changed) == 0:
            break
        ends[changed] = nearer[changed]
        v = np.minimum(v, (cost[there[changed]] + nearer[changed, None]).min(0))
    return v


def _assign(cost: Array, weight: float) -> Linear:
    rows, columns = scipy.optimize.linear_sum_assignment(cost)
    plan = np.zeros_like(cost)
    plan[rows, columns] = weight

    def potentials() -> tuple[Array, Array]:
        v = prices_of(cost, plan)
        return (cost - v).min(1), v

    return Linear(plan, potentials)
