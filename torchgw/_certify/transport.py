"""Least costs of linear transport, with dual potentials; and of numbers, by sorting."""

import numpy as np
import scipy
from numpy.typing import NDArray

from torchgw._certify.question import Array, Cost
from torchgw._sinkhorn.exact import ExactTransport

# Rounds of shortest paths from a plan to its prices: more are of no use but to rounding; and the
# share of the costs by which a path has to be shorter. [L1352]
_ROUNDS = 500
_ROUNDING = 1e-15
# Pivots of the simplex at most: where they run out, potentials prove less. A choice. [L1376]
_PIVOTS = 100_000_000
# Pivots for each row of a partial problem at most, beyond which all entries are as fast; how many
# such problems; and the share of a cut that these prices have to prove. [L1407, L1475]
_TURNS, _TRIES, _MOST = 50, 4, 0.8
# Entries of a row and of a column, the cheapest beside earlier prices, told by every few others;
# a point of how many in a coarse problem; and how far prices move to those of a partial one, until
# half as far proves less. [L1475]
_KEPT, _EVERY, _COARSE, _STEPS = 24, 8, 4, (1.0, 0.5, 0.25)


class Transport:
    """Solve linear problems between the same weights, one after another."""

    def __init__(self, a: Array, b: Array, allowed: NDArray[np.bool_] | None = None) -> None:
        self._a, self._b, self._allowed = a, b, allowed
        assigned = len(a) == len(b) and bool((a == a[0]).all() and (b == b[0]).all())
        simplex = ExactTransport(a, b)
        # an assignment has no prices: of many points they take longer than the simplex
        self._simplex = None if assigned and not simplex.by_parts else simplex
        # of the columns, from which the next problem begins; others can be given
        self.prices = np.zeros(len(b))
        self._used: scipy.sparse.coo_array | None = None  # the last plan of `reach`

    def __call__(self, cost: Array) -> tuple[Array, Array]:
        """Find a plan of least cost (n, m), and a potential f (n,) that proves it."""
        if self._allowed is not None:
            # no path that saves so much is as long
            out = float(np.ptp(cost)) * (sum(cost.shape) + 1) + 1
            cost = np.where(self._allowed, cost, cost.max() + out)
        # the last prices leave fewer paths to be found
        rest = cost - self.prices
        rest -= rest.min(1, keepdims=True)
        if self._simplex is None:
            partners = scipy.optimize.linear_sum_assignment(rest)[1]
            plan = np.zeros_like(cost)
            plan[np.arange(len(cost)), partners] = self._a
        else:
            if self._simplex.by_pot:
                # on all entries: the last plan says little about another cost
                self._simplex.on(rest, _PIVOTS)
            found = self._simplex.last if self._simplex.by_pot else self._simplex(rest)
            assert found is not None
            # its prices may be wrong between parts that the plan does not connect
            plan = found.plan.copy()
            rest -= found.v
            self.prices = self.prices + found.v
        self.prices = self.prices + _prices(rest, plan)
        return plan, (cost - self.prices).min(1)

    def reach(
        self, cost: Cost, floor: float, enough: float
    ) -> tuple[scipy.sparse.coo_array | None, Array, float]:
        """Find a potential f (n,) that proves ``enough``, or about the most, and maybe a plan.

        The prices at hand may do, or those of a problem on a few entries where they prove most of
        what its plan has above ``floor``. For an infinite ``floor`` the problem is solved exactly.
        What f proves comes last.
        """
        plan, free = None, self._allowed is None
        if self._simplex is not None and self._simplex.by_parts and free and np.isfinite(floor):
            f, self.prices = cost.lifted(self.prices)
            height = self._proven(f)
            if height < floor:
                # of another problem: those of a few points are nearer
                height, f, self.prices = max(
                    (height, f, self.prices), self._coarse(cost), key=lambda known: known[0]
                )
            for _ in range(_TRIES):
                if height >= enough:
                    return plan, f, height
                rest = cost.dense()
                rest -= self.prices
                rest -= f[:, None]
                found = self._simplex.few(self._cheapest(rest), _TURNS * len(rest))
                if found is None:
                    break
                plan, v = found
                self._used = plan
                enough = min(enough, floor + _MOST * (cost.of(plan) - floor))
                height, f, self.prices = self._moved(cost, v)
            if height >= enough:
                return plan, f, height
        exact, f = self(cost.dense())
        self._used = scipy.sparse.coo_array(exact)
        if not free:
            return self._used, f, self.bound(cost.dense(), f)
        f, last = cost.lifted(self.prices)
        return self._used, f, float(self._a @ f + self._b @ last)

    def _proven(self, f: Array) -> float:
        """Compute what the prices at hand prove with the potentials that they leave."""
        return float(self._a @ f + self._b @ self.prices)

    def _moved(self, cost: Cost, v: Array) -> tuple[float, Array, Array]:
        """Move the prices along v (m,), less far as long as that proves more."""
        # what they prove is concave
        best = (-np.inf, v, v)
        for step in _STEPS:
            f, prices = cost.lifted(self.prices + step * v)
            height = float(self._a @ f + self._b @ prices)
            if height < best[0]:
                break
            best = height, f, prices
        return best

    def _coarse(self, cost: Cost) -> tuple[float, Array, Array]:
        """Solve for some of the points, and give all others the prices that these leave."""
        assert self._simplex is not None
        (a, own), (b, others) = (
            (part[::_COARSE] / part[::_COARSE].sum(), slice(None, None, _COARSE))
            for part in (self._a, self._b)
        )
        few = Cost(
            cost.left[own], cost.right[others], None if cost.own is None else cost.own[own, others]
        ).dense()
        v = ExactTransport(a, b)(few).v
        f = (cost.dense()[:, others] - v).min(1)
        f, prices = cost.lifted((cost.dense() - f[:, None]).min(0))
        return float(self._a @ f + self._b @ prices), f, prices

    def _cheapest(self, rest: Array) -> scipy.sparse.coo_array:
        """Take the entries that cost least in each row and column, and those of the last plan."""
        # told by some of the others
        rows, columns = rest[:, ::_EVERY], rest[::_EVERY]
        place = max(1, _KEPT // _EVERY)
        used = rest <= np.partition(rows, place, axis=1)[:, place, None]
        used |= rest <= np.partition(columns, place, axis=0)[place]
        if self._used is not None:
            used[self._used.row, self._used.col] = True
        places = np.flatnonzero(used)
        return scipy.sparse.coo_array(
            (rest.reshape(-1)[places], np.divmod(places, rest.shape[1])), rest.shape
        )

    def bound(self, cost: Array, f: Array) -> float:
        """Bound <cost, P> of all plans from below by a potential f (n,)."""
        open_ = cost if self._allowed is None else np.where(self._allowed, cost, np.inf)
        return least(open_, f, self._a, self._b)


def _prices(cost: Array, plan: Array) -> Array:
    """Find prices v (m,) that prove a plan of least cost, by shortest paths from all columns."""
    # v_k <= v_j + cost_ik - cost_ij wherever the plan moves mass from i to j
    rows, columns = plan.nonzero()
    there, starts = np.unique(rows, return_index=True)
    own, least = cost[rows, columns], _ROUNDING * float(np.abs(cost).max())
    v, ends = np.zeros(cost.shape[1]), np.full(len(there), np.inf)
    for _ in range(_ROUNDS):
        nearer = np.minimum.reduceat(v[columns] - own, starts)
        changed = np.flatnonzero(nearer < ends - least)
        if len(changed) == 0:
            break
        ends[changed] = nearer[changed]
        v = np.minimum(v, (cost[there[changed]] + nearer[changed, None]).min(0))
    return v


def least(cost: Array, f: Array, a: Array, b: Array) -> float:
    """Bound <cost, P> from below for all plans, by a potential f (n,) and the best one beside."""
    used = b > 0
    return float(a @ f + b[used] @ (cost[:, used] - f[:, None]).min(0))


def largest_pairing(u: Array, a: Array, v: Array, b: Array) -> float:
    """Compute the largest u' P v of all plans: that of sorted numbers."""
    i, j = np.argsort(u), np.argsort(v)
    ends = np.cumsum(a[i]), np.cumsum(b[j])
    shares = np.union1d(*ends)
    width = np.diff(shares, prepend=0.0)
    middle = shares - width / 2
    first, second = (
        part[order][np.searchsorted(end, middle).clip(max=len(part) - 1)]
        for part, order, end in ((u, i, ends[0]), (v, j, ends[1]))
    )
    return float((width * first) @ second)
