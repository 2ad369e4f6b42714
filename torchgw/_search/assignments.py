"""Quadratic assignment problems: tabu search from many matchings side by side.

Each exchange of two partners is the one that costs least, even where that is more than none, and is
not undone for a while [1]. The best of each start are kicked and mixed with others of their group,
and the search goes on from there. Groups that know nothing of each other and end at the same value
have found the best. It serves matchings of a plan (``_results/rounding.py``); the search of small
problems has fewer exchanges and goes on without kicks (``_search/exchange.py``).

[1] E. Taillard. Robust taboo search for the quadratic assignment problem. Parallel Computing 1991.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._tensors.deadline import is_over

# Starts of a group, and groups at most: the first begins at what is known. [L1341]
_STARTS, _GROUPS = 8, 5
# Entries of a table of all starts side by side: there are fewer starts of more points. [L1341]
_SIDE_BY_SIDE = 120_000
# Groups that agree end the search after so many exchanges for each point. [L1341]
_AGREEING, _LEAST = 3, 10
# So do so many exchanges for each point after the last that helped any group. [L1341]
_PATIENCE = 60
# Exchanges for each point before starts are kicked or mixed. [L1341]
_ROUND = 2
# Share of the starts that are mixed; the others are kicked: so many points at least, and this share
# of them at most. [L1341]
_MIXED, _LEAST_KICKED, _MOST_KICKED = 0.8, 3, 0.5
# For how many exchanges for each point one is not undone, at least and at most. [L1341]
_TENURE = 0.9, 1.1
# Shares of the largest change of an exchange, and of the largest entry of a table, that are
# rounding. A choice. [L1341]
_ROUNDING, _SAME = 1e-12, 1e-12


class Assignments(NamedTuple):
    """A quadratic assignment problem: sum_r <A_r, B_r[p][:, p]> + sum_i L[i, p_i], in float64.

    Of each pair of tables A_r, B_r either both are symmetric or both are antisymmetric, and all
    have zero diagonals. The last rows may be those of no point: they take the places that are left.
    """

    near: Tensor  # (r, n, n), the tables A
    far: Tensor  # (r, n, n), the tables B
    linear: Tensor  # (n, n)
    symmetric: int  # pairs of symmetric tables; they come first
    points: int  # rows that are points

    @classmethod
    def of(cls, parts: Sequence[tuple[Tensor, Tensor]], linear: Tensor | None) -> Assignments:
        """Make the problem of any tables A (k, k) and B (n, n), and L (k, n), for k up to n."""
        near, far = (torch.stack(side) for side in zip(*parts, strict=True))
        k, n = near.shape[-1], far.shape[-1]
        own = torch.einsum("ri,rj->ij", *(side.diagonal(dim1=1, dim2=2) for side in (near, far)))
        whole = torch.zeros_like(far[0])
        whole[:k] = own if linear is None else own + linear
        near = torch.nn.functional.pad(near, (0, n - k, 0, n - k))
        other = 1 - torch.eye(n, dtype=far.dtype, device=far.device)
        even = [(side + side.mT) / 2 * other for side in (near, far)]
        odd = [(side - side.mT) / 2 for side in (near, far)]
        # a symmetric table sees nothing of an antisymmetric one
        directed = torch.ones(len(parts), dtype=torch.bool, device=far.device)
        for side, part in zip((near, far), odd, strict=True):
            directed &= part.abs().amax((1, 2)) > _SAME * side.abs().amax((1, 2))
        near, far = (
            torch.cat([first, second[directed]]) for first, second in zip(even, odd, strict=True)
        )
        return cls(near, far, whole, len(parts), k)

    def changes(self, partners: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute what each exchange of two partners of matchings (B, n) adds, (B, n, n).

        Then what each point costs, (B, n), twice of which but for the linear terms is shared by
        two; and the objectives, (B,).
        """
        far = self.far[:, partners[:, :, None], partners[:, None, :]]
        costs = 2 * (self.near[:, None] @ far.mT).sum(0)
        linear = self.linear[:, partners].transpose(0, 1)
        values = (costs / 2 + linear).diagonal(dim1=1, dim2=2).sum(1)
        costs += linear
        own = costs.diagonal(dim1=1, dim2=2).clone()
        costs += costs.mT.clone()
        costs -= own[:, :, None] + own[:, None, :]
        even = self.symmetric
        return costs.add_((self.near[:even, None] * far[:even]).sum(0), alpha=4), own, values

    def largest(self) -> float:
        """Bound what an exchange can add."""
        near, far = self.near.abs().sum(2).amax(1), self.far.abs().amax((1, 2))
        return 4 * float(self.linear.abs().max() + 2 * near @ far)


class Matched(NamedTuple):
    """Matchings that a search has found, the best first."""

    partners: Tensor  # (k, n)
    values: Tensor  # (k,)
    agreed: bool  # whether groups that know nothing of each other have ended at the best value


def search_matchings(problem: Assignments, known: Tensor, budget: float) -> Matched:
    """Search from known matchings (k, n), at most eight, and from random ones.

    The ``budget`` is of entries that are looked at. The first matching costs no more than any that
    is known.
    """
    n, device = problem.linear.shape[0], problem.linear.device
    groups = max(1, min(_GROUPS, int(_SIDE_BY_SIDE / (_STARTS * n * n))))
    draw, count = _Draws(n, device), groups * _STARTS
    walk = _Walk(problem, draw, count)
    walk.begin(torch.cat([known.to(device), draw.uniform(count, n).argsort(1)])[:count])
    done, helped, lowest, agreed = 0, 0, math.inf, False
    best, least = walk.partners, torch.full_like(walk.value, math.inf)
    while True:
        for _ in range(_ROUND * n):
            walk.exchange()
        done += _ROUND
        better = walk.least <= least
        best = torch.where(better[:, None], walk.best, best)
        least = torch.where(better, walk.least, least)
        each = least.view(groups, _STARTS).amin(1).cpu()
        if float(each.sum()) < lowest - walk.rounding:
            lowest, helped = float(each.sum()), done
        # the first group may have been led astray by what was known
        agreed = int((each[1:] <= each.min() + walk.rounding).sum()) >= _AGREEING
        spent = (done + _ROUND) * n * least.numel() * n * n > budget
        if (agreed and done >= _LEAST) or done - helped >= _PATIENCE or spent or is_over():
            break
        walk.begin(_kicked_and_mixed(best, draw))
    partners, places = torch.unique(best, dim=0, return_inverse=True)
    values = least.new_empty(len(partners)).scatter_(0, places, least)
    order = values.argsort()
    return Matched(partners[order], values[order], agreed)


class _Draws:
    """Random numbers, the same on all devices."""

    def __init__(self, n: int, device: torch.device) -> None:
        self.n, self.device = n, device
        self._generator = torch.Generator("cpu").manual_seed(0)

    def uniform(self, *shape: int) -> Tensor:
        """Draw numbers between zero and one."""
        drawn = torch.rand(*shape, generator=self._generator, dtype=torch.float64, device="cpu")
        return drawn.to(self.device)

    def waits(self, count: int) -> Tensor:
        """Draw for how many exchanges partners stay apart, of every exchange of a round."""
        low, high = _TENURE
        return (self.n * (low + (high - low) * self.uniform(_ROUND * self.n, count, 2))).round_()


class _Walk:
    """Exchanges of B starts side by side."""

    # With P a matching as a table, exchanging the partners p and q of two points i and j adds
    # D = (e_i - e_j) (e_q - e_p)' to it, and <C, D> + 4 sum_r A_ij B_pq to the objective over the
    # symmetric tables, with C = L + 2 sum_r A_r P B_r'. For other two points this changes by
    # -sum_r (x_i - x_j) (y_i - y_j), with x = 2 A (e_i - e_j) and y = B (e_q - e_p) at the
    # partners, a product of rank 2 r + 2; what the same two points add is computed anew.

    def __init__(self, problem: Assignments, draw: _Draws, count: int) -> None:
        self._problem, self._draw = problem, draw
        # rows of all tables side by side
        self._near, self._far = (side.transpose(0, 1).flatten(1) for side in problem[:2])
        self._across = self._near.T.contiguous(), self._far.T.contiguous()
        self._linear, self._turned = problem.linear, problem.linear.T.contiguous()
        parts, n = problem.near.shape[:2]
        device = self._linear.device
        self._starts = torch.arange(count, device=device)
        self._shifts = torch.arange(parts, device=device)[:, None] * n
        self._ones = self._linear.new_ones(count, 1, n)
        # nothing to exchange: a point with itself, and places that are both empty
        empty = torch.arange(n, device=device) >= problem.points
        closed = torch.eye(n, dtype=torch.bool, device=device) | (empty & empty[:, None])
        self._closed = torch.zeros_like(self._linear).masked_fill_(closed, math.inf)
        self._most = problem.largest() or 1.0
        self.rounding = _ROUNDING * self._most

    def begin(self, partners: Tensor) -> None:
        """Begin a round at matchings (B, n)."""
        self.partners = partners.clone()
        self._changes, self._costs, self.value = self._problem.changes(partners)
        self.best, self.least = partners, self.value.clone()
        self._waits, self._done = self._draw.waits(len(partners)), 0
        # when a point may have a partner again, and when two points may exchange theirs
        self._until = torch.zeros_like(self._changes)
        self._open = self._closed.expand_as(self._changes).clone()
        self._room = torch.empty_like(self._changes)

    def exchange(self) -> None:
        """Exchange two partners of each start."""
        starts, changes, partners = self._starts, self._changes, self.partners
        # the exchanges that have to wait longest come last
        held = torch.sub(self._open, self._done, out=self._room).clamp_(min=0)
        held = torch.add(changes, held, alpha=self._most, out=held)
        first, every = held.amin(2), changes.amin(2)
        # one that has to wait is made where it leads below all before
        below = self.value + every.amin(1) < self.least - self.rounding
        i = torch.where(below[:, None], every, first).argmin(1)
        j = torch.where(below[:, None], changes[starts, i], held[starts, i]).argmin(1)
        self.value += changes[starts, i, j]
        both = torch.stack([i, j], 1)
        before = partners.gather(1, both)
        after = before.flip(1)
        partners.scatter_(1, both, after)
        better = self.value < self.least - self.rounding
        self.least = torch.where(better, self.value, self.least)
        self.best = torch.where(better[:, None], partners, self.best)
        self._update(both, after)
        self._wait(both, before, after)
        self._done += 1

    def _update(self, both: Tensor, after: Tensor) -> None:
        """Change what exchanges add, once points (B, 2) have the partners ``after``."""
        count, n = self.partners.shape
        parts, even = len(self._problem.near), self._problem.symmetric
        partners = self.partners[:, None].expand(-1, 2, -1)
        places = (self.partners[:, None] + self._shifts).flatten(1)[:, None].expand(-1, 2, -1)
        near, far = self._near[both], self._far[after].gather(2, places)
        x, y = (2 * side.diff(dim=1).view(count, parts, n) for side in (near, far))
        products = (x * y).sum(1, keepdim=True) / 2
        self._costs += products[:, 0]
        left = torch.cat([products, self._ones, x, y / 2], 1).mT
        right = torch.cat([-self._ones, -products, y / 2, x], 1)
        self._changes.baddbmm_(left, right)
        # the two points, by the rows and the columns of their costs
        moved = torch.empty_like(near).scatter_(2, places, near)
        rows = torch.addmm(
            self._linear[both].view(-1, n), moved.flatten(0, 1), self._across[1], alpha=2
        )
        rows = rows.view(count, 2, n).gather(2, partners)
        columns = torch.addmm(
            self._turned[after].view(-1, n), far.flatten(0, 1), self._across[0], alpha=2
        )
        own = rows.gather(2, both[:, :, None])
        self._costs.scatter_(1, both, own[:, :, 0])
        rows += columns.view(count, 2, n)
        rows -= own + self._costs[:, None]
        near, far = (side.view(count, 2, parts, n)[:, :, :even] for side in (near, far))
        rows.add_((near * far).sum(2), alpha=4)
        self._put(self._changes, both, rows)

    def _wait(self, both: Tensor, before: Tensor, after: Tensor) -> None:
        """Let points (B, 2) wait until they have the partners ``before`` again."""
        starts, partners = self._starts[:, None], self.partners[:, None].expand(-1, 2, -1)
        self._until[starts, both, before] = self._waits[self._done] + (self._done + 1)
        rows = self._until[starts, both].gather(2, partners)
        rows = torch.minimum(rows, self._until[starts, :, after])
        self._put(self._open, both, rows + self._closed[both])

    def _put(self, tables: Tensor, both: Tensor, rows: Tensor) -> None:
        """Put rows (B, 2, n) into symmetric tables (B, n, n), and as columns."""
        starts = self._starts[:, None]
        tables[starts, both] = rows
        tables[starts, :, both] = rows


def _kicked_and_mixed(best: Tensor, draw: _Draws) -> Tensor:
    """Make new starts of the best matchings (B, n) of all, each group by itself."""
    count, n = best.shape
    starts = torch.arange(count, device=best.device)
    others = (draw.uniform(count) * _STARTS).long() + starts // _STARTS * _STARTS
    mixed = _mixed(best, best[others], draw)
    wanted = (draw.uniform(count) < _MIXED) & (mixed != best).any(1)
    return torch.where(wanted[:, None], mixed, _kicked(best, draw))


def _kicked(partners: Tensor, draw: _Draws) -> Tensor:
    """Exchange the partners of some points of each matching (B, n) in a circle."""
    count, n = partners.shape
    least = min(_LEAST_KICKED, n)
    share = max(least, _MOST_KICKED * n) / least
    size = (least * share ** draw.uniform(count, 1)).round_()
    order, place = draw.uniform(count, n).argsort(1), torch.arange(n, device=partners.device)
    source = torch.where(place < size, (place + 1) % size.long(), place)
    return partners.scatter(1, order, partners.gather(1, order.gather(1, source)))


def _mixed(first: Tensor, second: Tensor, draw: _Draws) -> Tensor:
    """Take the partner of each point from one of two matchings (B, n), and from both if the same.

    A partner that two points would have goes to one of them; the others get what is left.
    """
    count, n = first.shape
    chosen = torch.where(draw.uniform(count, n) < 0.5, first, second)
    # by partners, those of both matchings before others
    order = (chosen + (draw.uniform(count, n) + (first != second)) / 2).argsort(1)
    sorted_ = chosen.gather(1, order)
    again = torch.zeros_like(chosen, dtype=torch.bool)
    again[:, 1:] = sorted_[:, 1:] == sorted_[:, :-1]
    again = torch.zeros_like(again).scatter_(1, order, again)
    used = torch.zeros_like(again).scatter_(1, chosen, torch.ones_like(again))
    # points without a partner and partners without a point come first
    points = (draw.uniform(count, n) + ~again).argsort(1)
    left = used.byte().argsort(dim=1, stable=True)
    few = torch.arange(n, device=first.device) < again.sum(1, keepdim=True)
    return chosen.scatter(1, points, torch.where(few, left, chosen.gather(1, points)))
