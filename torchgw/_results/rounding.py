"""Matchings of a plan: by an assignment problem, then improved on their own objective.

A matching is a plan that sends the weight w_i of each row to one column, none to a column more
often than there are places at it. Conditional gradient steps between such plans [1]_, with an exact
line search, leave a poor matching behind where its neighbours by exchange are no better. A matching
of few points is searched for from there (``_search/tabu.py``); of many, exchanges of two
partners mend what the last rounding has broken.

SciPy's ``quadratic_assignment`` does the first for equal weights, n = m and the square loss alone,
by dense products; see docs/algorithm.md.

References
----------
.. [1] J. Vogelstein et al. Fast approximate quadratic programming for graph matching. PLOS ONE
   2015.
"""

import math
from typing import NamedTuple

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._errors import UnsupportedError
from torchgw._plans.contract import Plan
from torchgw._problem.limits import limits_of
from torchgw._problem.losses import Cross, Loss, MinimumCross, ProductCross, mean_of
from torchgw._search.tabu import Assignments, Exchanges, search
from torchgw._solve.polish import best_length, take_steps
from torchgw._starts.candidates import assign_listed
from torchgw._tensors.deadline import is_over
from torchgw._tensors.operations import EQUAL
from torchgw.distances.base import BLOCK_ENTRIES

# Beyond, it is made from so many of the largest entries of each row, and from so many in all at
# most. [L325]
_ENTRIES_PER_ROW = 32
_MOST_ENTRIES = 50_000_000
# Conditional gradient steps of one descent at most, and the share of the objective that a step has
# to save. [L326]
_STEPS = 30
_SMALLEST_GAIN = 3e-4
# Descents from the best matching so far, each followed by exchanges, and rounds of these. [L326]
_DESCENTS = 4
_ROUNDS = 20
# Entries of tables that a search for the best matching may look at: a second or two. [L1296]
_LOOKED_AT = 2.5e8


def assign(
    plan: Plan, capacity: Tensor, support: Tensor | None = None, *, few: bool = False
) -> Tensor:
    """Choose a target for each source point, none more often than ``capacity`` (m,) allows.

    Pairs outside of a support (n, m) are chosen where nothing else is possible. Of a plan whose
    entries are all alike a ``few`` of each row are looked at first, as otherwise of large ones.
    """
    # Of large plans only the largest entries of each row are looked at first; points that these
    # leave without a partner get the best of the targets that are free, a block of points at a
    # time.
    n, m = plan.shape
    slots = places(capacity)
    if n * len(slots) <= limits_of(plan.device).read and not few:
        whole = plan.stored().double()
        if support is not None:
            # a plan has less mass in all
            whole = whole.masked_fill(~support, -2.0)
        table = whole.cpu().numpy()
        likeliest = table.argmax(1)
        if (np.bincount(likeliest, minlength=m) <= capacity.numpy()).all():
            # nothing more can be had, as of a plan that is a matching
            return torch.from_numpy(likeliest)
        return torch.from_numpy(
            slots[scipy.optimize.linear_sum_assignment(table[:, slots], maximize=True)[1]]
        )
    chosen = _assign_largest(plan, slots)
    used = np.bincount(chosen[chosen >= 0], minlength=m)
    left = np.flatnonzero(chosen < 0)
    # the time of an exact assignment grows with the square of its rows
    height = max(1, BLOCK_ENTRIES // len(slots))
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
    ends = copies.cumsum()
    within = np.arange(total) - np.repeat(ends - copies, copies)
    rows = np.repeat(np.repeat(np.arange(n), count), copies)
    place = np.repeat(first[columns.ravel()], copies) + within
    cost = np.repeat(2 - values.ravel().astype(np.float64) / values.max(), copies)
    # rows that are left out get a partner later
    found = assign_listed(rows, place, cost, n, len(slots))
    return np.where(found < 0, -1, slots[found])


class Assignment(NamedTuple):
    """The objective of matchings of k rows with l columns, float64, but for a constant."""

    # alpha sum_iI w_i w_I loss(near_iI, far_jJ) + <M, w>, for partners j of i and J of I; the loss
    # is the mean over relations.

    near: Tensor  # (r, k, k), a table for each relation
    far: Tensor  # (r, l, l)
    weights: Tensor  # (k,)
    linear: Tensor | None  # (k, l), with its own weight
    alpha: float
    loss: Loss  # of a near and a far distance
    slots: NDArray[np.int64]  # the column of each place

    def crossed(self) -> tuple[Tensor, Tensor]:
        """Compute the tables whose products the cross term consists of."""
        assert self.loss.cross is not None
        near, far = self.loss.cross
        return near(self.near.clone()), far(self.far.clone())

    def own(self) -> Tensor:
        """Compute what the distances of columns cost alone, (l, l)."""
        return self.loss.own[1](self.far.clone()).mean(0)

    def cross(self) -> Cross:
        """Make the cross term, the mean over all ways of directed distances."""
        there = self[:2] if self.loss.cross is None else self.crossed()
        back = [table.mT for table in there]
        directed = [not torch.equal(one, other) for one, other in zip(there, back, strict=True)]
        if self.loss.cross is None:
            ways = [there, back] if any(directed) else [there]
            return mean_of([MinimumCross(*pair) for way in ways for pair in zip(*way, strict=True)])
        if not all(directed):
            means = ((one + other) / 2 for one, other in zip(there, back, strict=True))
            return mean_of([ProductCross(*pair) for pair in zip(*means, strict=True)])
        ways = [(there[0], back[1]), (back[0], there[1])]
        return mean_of([ProductCross(*pair) for way in ways for pair in zip(*way, strict=True)])

    def vertex(self, partners: Tensor) -> Tensor:
        """Build the plan (k, l) of a matching (k,)."""
        table = self.near.new_zeros(self.near.shape[-1], self.far.shape[-1])
        return table.scatter_(1, partners[:, None], self.weights[:, None])

    def assignments(self, columns: Tensor) -> Assignments:
        """Make the problem of matching the rows with some columns, as many or more."""
        near, far = self.crossed()
        product = self.alpha * torch.outer(self.weights, self.weights)
        parts = [
            (-2 / len(near) * product * one, other[columns][:, columns])
            for one, other in zip(near, far, strict=True)
        ]
        equal = bool((product - product[0, 0]).abs().max() <= EQUAL * product.abs().max())
        if not equal or len(columns) > len(product):
            # the masses of columns change
            parts.append((product, self.own()[columns][:, columns]))
        linear = self.linear
        if linear is not None:
            linear = linear[:, columns] * self.weights[:, None]
        return Assignments.of(parts, linear)


class _Descent:
    """A plan on its way towards matchings, by an objective whose tables are made once."""

    def __init__(self, problem: Assignment) -> None:
        self.problem = problem
        self._cross = problem.cross()
        own = problem.own()
        self._own = (own + own.T) / 2

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
        self._plan = plan
        take_steps(self, max_iter=_STEPS)
        # the matching is chosen by shares of rows, so that rows of little weight count as much as
        # others
        share = self._plan / self.problem.weights[:, None].clamp_min(torch.finfo(plan.dtype).tiny)
        return assign_least(-share, self.problem.slots)

    def begin(self) -> float:
        """Compute the gradient and the objective at the start."""
        self._gradient, self._value = self.gradient(self._plan)
        return self._value

    def look(self) -> tuple[float, float] | None:
        """Find the matching of least linear cost; None where it gains too little."""
        problem = self.problem
        cost = problem.weights[:, None] * self._gradient
        self._vertex = problem.vertex(assign_least(cost, problem.slots))
        direction = self._vertex - self._plan
        slope = float((self._gradient * direction).sum())
        if -slope <= EQUAL * abs(self._value) or is_over():
            return None
        self._there, _ = self.gradient(self._vertex)
        bend = float(((self._there - self._gradient) * direction).sum()) / 2
        length = best_length(bend, slope)
        self._gain = -(length * slope + length**2 * bend)
        return (bend, slope) if self._gain > _SMALLEST_GAIN * abs(self._value) else None

    def go(self, length: float) -> None:
        """Go a share of the way to the matching."""
        self._plan = torch.lerp(self._plan, self._vertex, length)
        self._gradient = torch.lerp(self._gradient, self._there, length)
        self._value -= self._gain


def improve(problem: Assignment, plan: Tensor, partners: Tensor) -> Tensor:
    """Find partners (k,) that cost no more than the given ones, near these and near a plan."""
    descent, weights = _Descent(problem), problem.weights
    products = problem.loss.cross is not None
    limits = limits_of(plan.device)
    few = products and len(problem.slots) <= limits.matched_points
    exchanged = products and not few and len(partners) <= limits.exchanged_rows
    best = _exchange(problem, partners) if exchanged else partners
    least, start, known = descent.value(best), plan, [best]
    for _ in range(_DESCENTS):
        if is_over():
            break
        before = least
        candidate = descent.run(start)
        known.append(candidate)
        if exchanged:
            candidate = _exchange(problem, candidate)
        value = descent.value(candidate)
        if value < least:
            best, least = candidate, value
        if before - least <= EQUAL * abs(least):
            break
        start = problem.vertex(best)
    # every loss is at least zero, which copies reach
    own = problem.loss.own[0](problem.near.clone()).mean(0)
    spent = problem.alpha * float(weights @ own @ weights)
    floor = max(-spent, _in_order(problem)) if few else -spent
    perfect = problem.linear is None and least - floor <= EQUAL * abs(spent)
    if few and not (perfect or is_over()):
        candidate = _search(problem, known)
        if descent.value(candidate) < least:
            return candidate
    return best


def _in_order(problem: Assignment) -> float:
    """Bound from below what matchings cost that use every column once, by equal weights.

    Products of two tables are largest where the entries of both are in order, which matchings of
    graphs reach that keep all edges. No bound (minus infinity) for other matchings.
    """
    weights, count = problem.weights, problem.far.shape[-1]
    if not len(weights) == count == len(problem.slots) or bool((weights != weights[0]).any()):
        return -math.inf
    near, far = (table.flatten(1).sort(1).values for table in problem.crossed())
    products = (near * far).sum(1).mean()
    return problem.alpha * float(weights[0] ** 2 * (problem.own().sum() - 2 * products))


def _search(problem: Assignment, known: list[Tensor]) -> Tensor:
    """Search for the best partners (k,) of the rows, from some that are known and from others."""
    slots = torch.from_numpy(problem.slots).to(problem.near.device)
    starts = np.stack([_placed(problem, partners.cpu().numpy()) for partners in known])
    found = search(Exchanges(problem.assignments(slots)), starts, _LOOKED_AT)
    return slots[torch.from_numpy(found.states[0, : len(problem.weights)]).to(slots.device)]


def _placed(problem: Assignment, partners: NDArray[np.int64]) -> NDArray[np.int64]:
    """Give each partner (k,) a place of its own, and the places that are left to nobody, (l,)."""
    order = partners.argsort(kind="stable")
    ordered = partners[order]
    places = np.empty_like(partners)
    # columns of several places are used from the first one on
    places[order] = (
        np.searchsorted(problem.slots, ordered)
        + np.arange(len(order))
        - np.searchsorted(ordered, ordered)
    )
    return np.concatenate([places, np.setdiff1d(np.arange(len(problem.slots)), places)])


def _exchange(problem: Assignment, partners: Tensor) -> Tensor:
    """Exchange the partners of two rows for as long as that lowers the objective."""
    tables, chosen = problem.assignments(partners), np.arange(len(partners))
    near, far, linear = (part.cpu().numpy() for part in tables[:3])
    smallest = float((abs(near).mean((1, 2)) * abs(far).mean((1, 2))).sum()) * EQUAL
    for _ in range(_ROUNDS):
        order = torch.from_numpy(chosen).to(partners.device)
        change = tables.changes(order[None])[0][0].cpu().numpy()
        first, second = np.nonzero(np.triu(change, 1) < -smallest)
        used = np.zeros(len(chosen), dtype=bool)
        # the most useful first, no row twice
        for place in change[first, second].argsort()[: 4 * len(chosen)]:
            p, q = first[place], second[place]
            if used[p] or used[q]:
                continue
            # the gain is computed again: it changes with every exchange
            i, j = chosen[p], chosen[q]
            apart = (near[:, p] - near[:, q]) * (far[:, j][:, chosen] - far[:, i][:, chosen])
            gain = 2 * apart.sum() + linear[p, j] + linear[q, i] - linear[p, i] - linear[q, j]
            even = slice(tables.symmetric)
            if gain + 4 * (near[even, p, q] * far[even, i, j]).sum() < -smallest:
                chosen[[p, q]] = j, i
                used[[p, q]] = True
        if not used.any() or is_over():
            break
    return partners[torch.from_numpy(chosen).to(partners.device)]
