"""Rounding a plan: to each point of one side a point of the other, by an assignment problem."""

from __future__ import annotations

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._errors import UnsupportedError
from torchgw._plans.contract import Plan

# Entries of a plan up to which the assignment is exact; it takes 4 s then where most points have a
# clear partner. [L324]
_DENSE_ENTRIES = 25_000_000
# Largest entries of each row that it is made from beyond, and how many there are at most. [L325]
_ENTRIES_PER_ROW = 32
_MOST_ENTRIES = 50_000_000
# Cost of leaving a row to later, where entries cost 1 (the largest) to 2 (zero). [L325]
_LEAVING = 4.0


def assign(plan: Plan, capacity: Tensor) -> Tensor:
    """Choose a target for each source point, none more often than ``capacity`` (m,) allows.

    Of large plans only the largest entries of each row are looked at first; points that these leave
    without a partner get the best of the targets that are free, a block of points at a time.
    """
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
    # every row has a place of its own too, where it is left to later
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
