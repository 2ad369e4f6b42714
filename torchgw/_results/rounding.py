"""Matchings of a plan: by an assignment problem, then improved on their own objective.

A matching is a plan that sends the weight w_i of each row to one column, none to a column more
often than there are places at it. Conditional gradient steps between such plans [1]_, with an exact
line search, leave a poor matching behind where its neighbours by exchange are no better; exchanges
of two partners mend what the last rounding has broken.

SciPy's ``quadratic_assignment`` does the former for equal weights, n = m and the square loss alone,
by dense products; see docs/algorithm.md.

References
----------
.. [1] J. Vogelstein et al. Fast approximate quadratic programming for graph matching. PLOS ONE
   2015.
"""

from typing import NamedTuple

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._errors import UnsupportedError
from torchgw._plans.contract import Plan
from torchgw._problem.cross_terms import Cross, MinimumCross, ProductCross
from torchgw._problem.losses import Loss

# The assignment is exact up to so many entries of a plan; it takes 4 s then, where most points have
# a clear partner. [L324]
_DENSE_ENTRIES = 25_000_000
# Beyond, it is made from so many of the largest entries of each row, and from so many in all at
# most. [L325]
_ENTRIES_PER_ROW = 32
_MOST_ENTRIES = 50_000_000
# Cost of leaving a row without a partner at first, where entries cost from 1 (the largest) to 2
# (zero). [L325]
_LEAVING = 4.0
# Conditional gradient steps of one descent at most, and the share of the objective that a step has
# to save. [L326]
_STEPS = 30
_SMALLEST_GAIN = 3e-4
# Changes below this share of the objective are rounding. [L326]
_ROUNDING = 1e-9
# Descents from the best matching so far, each followed by exchanges, and rounds of these. [L326]
_DESCENTS = 4
_ROUNDS = 20
# Rows up to which exchanges are tried: each round is a product of three tables. [L326]
_EXCHANGED_ROWS = 2048


def assign(plan: Plan, capacity: Tensor) -> Tensor:
    """Choose a target for each source point, none more often than ``capacity`` (m,) allows."""
    # Of large plans only the largest entries of each row are looked at first; points that these
    # leave without a partner get the best of the targets that are free, a block of points at a
    # time.
    n, m = plan.shape
    slots = places(capacity)
    if n * len(slots) <= _DENSE_ENTRIES:
        table = plan.stored().double().cpu().numpy()
        return torch.from_numpy(
            slots[scipy.optimize.linear_sum_assignment(table[:, slots], maximize=True)[1]]
        )
    chosen = _assign_largest(plan, slots)
    used = np.bincount(chosen[chosen >= 0], minlength=m)
    left = np.flatnonzero(chosen < 0)
    height = max(1, _DENSE_ENTRIES // len(slots))
    for block in np.split(left, range(height, len(left), height)):
        free = np.repeat(np.arange(m), capacity.cpu().numpy() - used)
        table = plan.rows(torch.from_numpy(block)).double().cpu().numpy()
        chosen[block] = free[scipy.optimize.linear_sum_assignment(table[:, free], maximize=True)[1]]
        used = np.bincount(chosen[chosen >= 0], minlength=m)
    return torch.from_numpy(chosen)


def assign_least(cost: Tensor, slots: NDArray[np.int64]) -> Tensor:
    """Choose the slots of least total cost (n, m), and give the target of each row."""
    table = cost.cpu().numpy()
    return torch.from_numpy(slots[scipy.optimize.linear_sum_assignment(table[:, slots])[1]]).to(
        cost.device
    )


def places(capacity: Tensor) -> NDArray[np.int64]:
    """List each point as often as its capacity says."""
    counts = capacity.cpu().numpy()
    return np.repeat(np.arange(len(counts), dtype=np.int64), counts)


def _assign_largest(plan: Plan, slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """Assign by the largest entries of each row; -1 for points that these leave without target."""
    n, m = plan.shape
    count = min(_ENTRIES_PER_ROW, m)
    first = np.searchsorted(slots, np.arange(m))
    sizes = np.bincount(slots, minlength=m)
    values, columns = (part.cpu().numpy() for part in plan.topk(count))
    copies = sizes[columns.ravel()]
    total = int(copies.sum())
    if total > _MOST_ENTRIES:
        raise UnsupportedError(
            f"A matching of {n:,} with {m:,} points would weigh {total:,} pairs, which is limited "
            f"to {_MOST_ENTRIES:,}. Take `lazy_plan.argmax()`, the likeliest partner of each point."
        )
    # every row also has a place of its own, which means that its partner is chosen later
    ends = copies.cumsum()
    within = np.arange(total) - np.repeat(ends - copies, copies)
    rows = np.repeat(np.repeat(np.arange(n), count), copies)
    place = np.repeat(first[columns.ravel()], copies) + within
    cost = np.repeat(2 - values.ravel().astype(np.float64) / values.max(), copies)
    own = np.arange(n)
    entries = (
        np.concatenate([cost, np.full(n, _LEAVING)]),
        (np.concatenate([rows, own]), np.concatenate([place, len(slots) + own])),
    )
    graph = scipy.sparse.csr_array(entries, shape=(n, len(slots) + n))
    found = scipy.sparse.csgraph.min_weight_full_bipartite_matching(graph)[1]
    chosen = np.full(n, -1, dtype=np.int64)
    placed = found < len(slots)
    chosen[placed] = slots[found[placed]]
    return chosen


class Assignment(NamedTuple):
    """The objective of matchings of k rows with l columns, float64, but for a constant."""

    # alpha sum_iI w_i w_I loss(near_iI, far_jJ) + <M, w>, for partners j of i and J of I.

    near: Tensor  # (k, k)
    far: Tensor  # (l, l)
    weights: Tensor  # (k,)
    linear: Tensor | None  # (k, l), with its own weight
    alpha: float
    loss: Loss  # of a near and a far distance
    slots: NDArray[np.int64]  # the column of each place

    def cross(self) -> Cross:
        """Make the cross term."""
        if self.loss.cross is None:
            return MinimumCross(self.near, self.far)
        near, far = self.loss.cross
        return ProductCross(near(self.near.clone()), far(self.far.clone()))

    def vertex(self, partners: Tensor) -> Tensor:
        """Build the plan (k, l) of a matching (k,)."""
        table = self.near.new_zeros(len(self.near), len(self.far))
        return table.scatter_(1, partners[:, None], self.weights[:, None])


class _Descent:
    """Conditional gradient steps on an objective, whose tables are made once."""

    def __init__(self, problem: Assignment) -> None:
        self.problem = problem
        self._cross = problem.cross()
        self._own = problem.loss.own[1](problem.far.clone())

    def gradient(self, plan: Tensor) -> tuple[Tensor, float]:
        """Compute the gradient but for terms of rows, and the objective."""
        alpha, linear = self.problem.alpha, self.problem.linear
        cross, masses = self._cross(plan), plan.sum(0)
        own = self._own @ masses
        value = alpha * (masses @ own - 2 * (cross * plan).sum())
        gradient = cross.mul_(-4 * alpha).add_(2 * alpha * own)
        if linear is not None:
            value = value + (linear * plan).sum()
            gradient += linear
        return gradient, float(value)

    def value(self, partners: Tensor) -> float:
        """Compute the objective of a matching."""
        return self.gradient(self.problem.vertex(partners))[1]

    def run(self, plan: Tensor) -> Tensor:
        """Descend from a plan, and round where that ends."""
        problem, weights = self.problem, self.problem.weights[:, None]
        gradient, value = self.gradient(plan)
        for _ in range(_STEPS):
            vertex = problem.vertex(assign_least(weights * gradient, problem.slots))
            direction = vertex - plan
            slope = float((gradient * direction).sum())
            if -slope <= _ROUNDING * abs(value):
                break
            there, _ = self.gradient(vertex)
            bend = float(((there - gradient) * direction).sum())
            length = min(1.0, -slope / bend) if bend > 0 else 1.0
            gain = -(length * slope + length**2 * bend / 2)
            if gain <= _SMALLEST_GAIN * abs(value):
                break
            plan = torch.lerp(plan, vertex, length)
            gradient = torch.lerp(gradient, there, length)
            value -= gain
        # the matching is chosen by shares of rows, so that rows of little weight count as much as
        # others
        share = plan / weights.clamp_min(torch.finfo(plan.dtype).tiny)
        return assign_least(-share, problem.slots)


def improve(problem: Assignment, plan: Tensor, partners: Tensor) -> Tensor:
    """Find partners (k,) that cost no more than the given ones, near these and near a plan."""
    descent = _Descent(problem)
    best = exchange(problem, partners)
    least, start = descent.value(best), plan
    for _ in range(_DESCENTS):
        before = least
        candidate = exchange(problem, descent.run(start))
        value = descent.value(candidate)
        if value < least:
            best, least = candidate, value
        if before - least <= _ROUNDING * abs(least):
            break
        start = problem.vertex(best)
    return best


def exchange(problem: Assignment, partners: Tensor) -> Tensor:
    """Exchange the partners of two rows for as long as that lowers the objective."""
    if len(partners) > _EXCHANGED_ROWS or problem.loss.cross is None:
        return partners
    near, far = (
        function(part.clone()).cpu().numpy()
        for function, part in zip(problem.loss.cross, (problem.near, problem.far), strict=True)
    )
    own = problem.loss.own[1](problem.far.clone()).cpu().numpy()
    weights, chosen = problem.weights.cpu().numpy(), partners.cpu().numpy().copy()
    product = problem.alpha * np.outer(weights, weights)
    # the sum of <A, B[chosen, chosen]> over pairs (A, B); masses of columns matter if they change
    parts = [(-2 * product * near, far)]
    if not np.allclose(weights, weights[0], rtol=1e-9, atol=0):
        parts.append((product, own))
    linear = None
    if problem.linear is not None:
        linear = problem.linear.cpu().numpy() * weights[:, None]
    smallest = _ROUNDING * sum(float(np.abs(a).mean() * np.abs(b).mean()) for a, b in parts)
    for _ in range(_ROUNDS):
        if not _exchange_once(parts, linear, chosen, smallest):
            break
    return torch.from_numpy(chosen).to(partners.device)


Parts = list[tuple[NDArray[np.float64], NDArray[np.float64]]]


def _exchange_once(
    parts: Parts, linear: NDArray[np.float64] | None, chosen: NDArray[np.int64], smallest: float
) -> bool:
    """Exchange partners in place, the most useful first, no row twice; tell whether any were."""
    change = _changes(parts, linear, chosen)
    first, second = np.nonzero(np.triu(change, 1) < -smallest)
    order = change[first, second].argsort()[: 4 * len(chosen)]
    used = np.zeros(len(chosen), dtype=bool)
    for p, q in zip(first[order], second[order], strict=True):
        # the gain is computed again: it changes with every exchange
        if not (used[p] or used[q]) and _change(parts, linear, chosen, p, q) < -smallest:
            chosen[[p, q]] = chosen[[q, p]]
            used[[p, q]] = True
    return bool(used.any())


def _changes(
    parts: Parts, linear: NDArray[np.float64] | None, chosen: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Compute by how much each exchange of two partners changes the objective, (k, k)."""
    total = np.zeros((len(chosen), len(chosen)))
    for a, b in parts:
        b = b[np.ix_(chosen, chosen)]
        inner, i, j = a @ b, a.diagonal(), b.diagonal()
        own = inner.diagonal()
        total += 2 * (inner + inner.T - own[:, None] - own)
        # correct for the two rows themselves, which the sums should leave out
        total -= 2 * ((i[:, None] - a) * (b - j[:, None]) + (a - i) * (j - b))
        total += (i[:, None] - i) * (j - j[:, None])
    if linear is not None:
        moved = linear[:, chosen]
        stay = moved.diagonal()
        total += moved + moved.T - stay[:, None] - stay
    return total


def _change(
    parts: Parts, linear: NDArray[np.float64] | None, chosen: NDArray[np.int64], p: int, q: int
) -> float:
    """Compute by how much an exchange of two partners changes the objective."""
    total = 0.0
    for a, b in parts:
        step, there, here = a[p] - a[q], b[chosen[q], chosen], b[chosen[p], chosen]
        gain = there - here
        total += 2 * float(step @ gain - step[p] * gain[p] - step[q] * gain[q])
        total += float((a[p, p] - a[q, q]) * (there[q] - here[p]))
    if linear is not None:
        i, j = chosen[p], chosen[q]
        total += float(linear[p, j] + linear[q, i] - linear[p, i] - linear[q, j])
    return total
