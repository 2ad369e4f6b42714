"""Least costs of linear transport, with dual potentials; and of numbers, by sorting."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

from torchgw._sinkhorn.exact import ROUNDS, ExactTransport, prices_of
from torchgw._sinkhorn.exact import Array as Array

# Pivots of the simplex at most: where they run out, potentials prove less. A choice. [L1376]
_PIVOTS = 100_000_000
# Pivots for each row of a partial problem at most, beyond which all entries are as fast; and the
# share of a cut that these prices have to prove. [L1407, L1475]
_TURNS, _MOST = 50, 0.95
# Entries of a row and of a column, the cheapest beside earlier prices, told by every few others;
# a point of how many in a coarse problem; and how far prices move to those of a partial one, until
# half as far proves less. [L1475]
_KEPT, _EVERY, _COARSE, _SHARES = 24, 8, 4, (0.5, 0.25)
# Entries that are computed together: they stay in the cache. [L1475, L1806]
TOGETHER = 2**18


class ProductCost(NamedTuple):
    """A linear cost (n, m), ``left @ right'`` and one that is given, read some rows at a time."""

    left: Array  # (n, k)
    right: Array  # (m, k)
    own: Array | None = None  # (n, m)

    def dense(self) -> Array:
        """Compute all entries."""
        return self.left @ self.right.T + (0.0 if self.own is None else self.own)

    def of(self, plan: scipy.sparse.coo_array) -> float:
        """Compute what a plan costs."""
        cross = float(np.einsum("ik,ik->", self.left, plan @ self.right))
        return cross + (
            0.0 if self.own is None else float(self.own[plan.row, plan.col] @ plan.data)
        )

    def lifted(self, prices: Array) -> tuple[Array, Array]:
        """Raise prices (m,) as far as they go, beside the potentials f (n,) that they leave."""
        n, m = len(self.left), len(self.right)
        f, lifted, rows = np.empty(n), np.full(m, np.inf), max(1, TOGETHER // m)
        for start in range(0, n, rows):
            part = slice(start, start + rows)
            block = self.left[part] @ self.right.T
            if self.own is not None:
                block += self.own[part]
            f[part] = (block - prices).min(1)
            block -= f[part, None]
            np.minimum(lifted, block.min(0), out=lifted)
        return f, lifted


class _Known(NamedTuple):
    """What prices prove."""

    height: float
    f: Array  # (n,) the potentials that they leave
    prices: Array  # (m,) as high as they go beside these


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
            simplex = self._simplex
            # on all entries: the last plan says little about another cost
            found = simplex.on(rest, _PIVOTS) if simplex.by_pot else simplex(rest)
            # its prices may be wrong between parts that the plan does not connect
            plan = found.plan.copy()
            rest -= found.v
            self.prices = self.prices + found.v
        self.prices = self.prices + prices_of(rest, plan)
        return plan, (cost - self.prices).min(1)

    def reach(
        self, cost: ProductCost, floor: float, enough: float
    ) -> tuple[scipy.sparse.coo_array | None, Array, float]:
        """Find a potential f (n,) that proves ``enough``, or about the most, and maybe a plan.

        The prices at hand may do, or those of a problem on a few entries where they prove most of
        what its plan has above ``floor``. For an infinite ``floor`` the problem is solved exactly.
        What f proves comes last.
        """
        plan, free = None, self._allowed is None
        if self._simplex is not None and self._simplex.by_parts and free and np.isfinite(floor):
            known = self._lifted(cost, self.prices)
            if known.height < floor:
                # of another problem: those of a few points are nearer
                known = max(known, self._coarse(cost), key=lambda one: one.height)
            for _ in range(ROUNDS):
                if known.height >= enough:
                    break
                found = self._few(cost, known)
                if found is None:
                    break
                plan, known = found
                enough = min(enough, floor + _MOST * (cost.of(plan) - floor))
            self.prices = known.prices
            if known.height >= enough:
                return plan, known.f, known.height
        exact, f = self(cost.dense())
        self._used = scipy.sparse.coo_array(exact)
        if not free:
            return self._used, f, self.bound(cost.dense(), f)
        known = self._lifted(cost, self.prices)
        return self._used, known.f, known.height

    def begin(self, plan: scipy.sparse.coo_array, prices: Array) -> None:
        """Begin the next problem at an earlier plan and its prices (m,)."""
        self._used, self.prices = plan, prices

    def near(self, cost: ProductCost) -> scipy.sparse.coo_array:
        """Find a plan of about the least cost, near the last one if there are many points."""
        found = None
        if self._used is not None and self._simplex is not None and self._simplex.by_parts:
            found = self._few(cost, self._lifted(cost, self.prices))
        if found is None:
            exact, _, _ = self.reach(cost, np.inf, np.inf)
            assert exact is not None
            return exact
        plan, known = found
        self.prices = known.prices
        return plan

    def _lifted(self, cost: ProductCost, prices: Array) -> _Known:
        """Raise prices (m,) as far as they go."""
        f, prices = cost.lifted(prices)
        return _Known(float(self._a @ f + self._b @ prices), f, prices)

    def _few(
        self, cost: ProductCost, known: _Known
    ) -> tuple[scipy.sparse.coo_array, _Known] | None:
        """Solve on few entries beside what is known, and move the prices as long as they gain."""
        assert self._simplex is not None
        rest = cost.dense()
        rest -= known.prices
        rest -= known.f[:, None]
        found = self._simplex.few(self._cheapest(rest), _TURNS * len(rest))
        if found is None:
            return None
        self._used, v = found
        # what prices prove is concave
        best = self._lifted(cost, known.prices + v)
        for share in _SHARES:
            other = self._lifted(cost, known.prices + share * v)
            if other.height < best.height:
                break
            best = other
        return self._used, best

    def _coarse(self, cost: ProductCost) -> _Known:
        """Solve for some of the points, and give all others the prices that these leave."""
        (left, right, own), few = cost, slice(None, None, _COARSE)
        part = ProductCost(left[few], right[few], None if own is None else own[few, few])
        a, b = self._a[few], self._b[few]
        v = ExactTransport(a / a.sum(), b / b.sum())(part.dense()).v
        # the potentials of all rows by the columns of that problem
        dense = cost.dense()
        f = (dense[:, few] - v).min(1)
        return self._lifted(cost, (dense - f[:, None]).min(0))

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
