"""Tabu search of matchings by exchanges of partners, and of maps point by point.

Many states are side by side on the host. Each makes the move that costs least, even where that is
more than nothing, and does not undo it for a while [1]. The best states of a group are kicked and
mixed, and the search goes on from there. Groups that know nothing of each other and end at the same
value have found the best. It finds optima that no plan comes to that follows epsilon down.

[1] E. Taillard. Robust taboo search for the quadratic assignment problem. Parallel Computing 1991.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._batch.packing import products
from torchgw._starts.chain import AGREEING
from torchgw._starts.coarse import CoarseProblem
from torchgw._tensors.deadline import is_over
from torchgw._tensors.operations import EQUAL, NOTHING

Array = NDArray[Any]

# Starts of a group, of which the first begins at what is known, and as many states at most are
# returned; and groups at most. [L1296, L1341]
_STARTS, _GROUPS = 8, 5
# Entries of a table of all starts side by side: there are fewer starts of more points. [L1341]
_SIDE_BY_SIDE = 120_000
# Groups that agree end the search after so many moves for each point. [L1341]
_LEAST = 10
# So do so many moves for each point after the last that helped any group. [L1296]
_PATIENCE = 40
# Moves for each point before states are kicked or mixed. [L1296]
_ROUND = 8
# Share of the states that are mixed; the others are kicked: so many points at least, and this share
# of them at most. [L1341]
_MIXED, _LEAST_KICKED, _MOST_KICKED = 0.8, 3, 0.5
# Until when what is no move has to wait: more than there are. A choice.
_EVER = np.iinfo(np.int32).max
# Entries that a search of starts looks at. [L1296, L1300]
_LOOKED_AT = 1.2e8


class Found(NamedTuple):
    """States that a search has found, the best first."""

    states: Array  # (k, n) int64
    values: Array  # (k,) float64
    agreed: bool  # whether groups that know nothing of each other have ended at the best value


class Walk(ABC):
    """B states (B, n) of a problem with their moves, and the steps that all of them take."""

    # for how many moves for each point one is not undone, at least and at most
    tenure: ClassVar[tuple[float, float]]
    floor = -math.inf  # no value is lower

    def __init__(self, shape: tuple[int, int], most: float) -> None:
        # how many moves there are of a state; and what bounds the change by one of them
        self.shape, self.most, self.rounding = shape, most or 1.0, NOTHING * (most or 1.0)
        self.draw, self.done = np.random.default_rng(0), 0

    def begin(self, states: Array) -> None:
        """Begin at states (B, n)."""
        self.states, self.done = states.copy(), 0
        self.every = np.arange(len(states))
        # values (B,), and what each move adds to them, (B, n, k)
        self.values, changes = self.evaluated(self.states)
        self.changes = np.ascontiguousarray(changes)
        # until when no move (B, n, k) is made
        self.until = self.barred(self.states)
        self.best, self.least = self.states.copy(), self.values.copy()
        self._waits = np.empty(self.changes.shape, dtype=bool)

    def step(self) -> None:
        """Make a move of each state."""
        every, whole = self.every, self.changes.ravel()
        flat = whole.reshape(len(every), -1)
        enough = self.least - self.rounding
        # few moves have to wait
        waiting = np.greater(self.until, self.done, out=self._waits).ravel().nonzero()[0]
        kept = whole[waiting]
        whole[waiting] = math.inf
        place = flat.argmin(1)
        none = flat[every, place] == math.inf
        whole[waiting] = kept
        if none.any():
            place = np.where(none, self.until.reshape(flat.shape).argmin(1), place)
        # one that has to wait is made where it leads below all before
        if (kept < (enough - self.values)[waiting // flat.shape[1]]).any():
            least = flat.argmin(1)
            place = np.where(self.values + flat[every, least] < enough, least, place)
        self.values += flat[every, place]
        waits = self.shape[0] * self.draw.uniform(*self.tenure, (len(every), 2))
        i, j = np.divmod(place, self.shape[1])
        self.move(i, j, (self.done + 1 + waits.round()).astype(np.int32))
        better = (self.values < enough).nonzero()[0]
        self.least[better], self.best[better] = self.values[better], self.states[better]
        self.done += 1

    @abstractmethod
    def evaluated(self, states: Array) -> tuple[Array, Array]:
        """Compute the values (B,) of states, and what their moves add, (B, n, k)."""

    @abstractmethod
    def barred(self, states: Array) -> Array:
        """Bar what is no move of states for ever, and nothing else."""

    @abstractmethod
    def move(self, i: Array, j: Array, until: Array) -> None:
        """Make a move (B,) of each state, which is not undone until (B, 2) a number of moves."""

    @abstractmethod
    def drawn(self, count: int) -> Array:
        """Draw states."""

    @abstractmethod
    def kicked(self, states: Array, sizes: Array) -> Array:
        """Change so many points (B, 1) of each state."""

    @abstractmethod
    def mixed(self, states: Array, others: Array) -> Array:
        """Take what each point has in one of two states, and what it has in both."""


def search(walk: Walk, known: Array, budget: float) -> Found:
    """Search from some known states (k, n), and from random ones."""
    # The `budget` is of entries of tables that are looked at. The first state costs no more than
    # any that is known.
    size, (n, _) = math.prod(walk.shape), walk.shape
    groups = max(1, min(_GROUPS, int(_SIDE_BY_SIDE / (_STARTS * size))))
    count = groups * _STARTS
    walk.begin(np.concatenate([known, walk.drawn(count)])[:count])
    done, helped, lowest = 0, 0, math.inf
    best, least = walk.states.copy(), np.full(count, math.inf)
    while True:
        for _ in range(_ROUND * n):
            if is_over():
                break
            walk.step()
        done += _ROUND
        better = walk.least <= least
        best[better], least[better] = walk.best[better], walk.least[better]
        each = least.reshape(groups, _STARTS).min(1)
        if each.sum() < lowest - walk.rounding:
            lowest, helped = each.sum(), done
        # the first group may have been led astray by what was known
        agreed = int((each[1:] <= each.min() + walk.rounding).sum()) >= AGREEING
        ended = (agreed and done >= _LEAST) or each.min() <= walk.floor + walk.rounding
        spent = (done + _ROUND) * n * count * size > budget
        if ended or spent or done - helped >= _PATIENCE or is_over():
            break
        walk.begin(_kicked_and_mixed(walk, best))
    states, places = np.unique(best, axis=0, return_index=True)
    order = least[places].argsort(kind="stable")
    return Found(states[order], least[places][order], agreed)


def _kicked_and_mixed(walk: Walk, best: Array) -> Array:
    """Make new states of the best ones (B, n) of all, each group by itself."""
    draw, (count, n) = walk.draw, best.shape
    group = np.arange(count) // _STARTS * _STARTS
    mixed = walk.mixed(best, best[group + draw.integers(0, _STARTS, count)])
    wanted = (draw.random(count) < _MIXED) & (mixed != best).any(1)
    least = min(_LEAST_KICKED, n)
    share = max(least, _MOST_KICKED * n) / least
    kicked = walk.kicked(best, (least * share ** draw.random((count, 1))).round())
    return np.where(wanted[:, None], mixed, kicked)


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
            directed &= part.abs().amax((1, 2)) > NOTHING * side.abs().amax((1, 2))
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


def best_matchings(
    problem: CoarseProblem, plans: Tensor, times: float = 1.0
) -> tuple[Tensor, bool]:
    """Find the best matchings (k, n), and tell whether independent groups of starts agree."""
    # One group begins at the best of some plans (k, n, n), the first of them; the others at random.
    # Where more chains are wanted, so many `times` as many entries are looked at.
    from scipy.optimize import linear_sum_assignment

    n, device = len(problem.base), problem.base.device
    known = [linear_sum_assignment(plan.cpu(), maximize=True)[1] for plan in plans[:_STARTS]]
    walk = Exchanges.of(problem)
    found = search(walk, np.array(known, dtype=np.int64).reshape(-1, n), times * _LOOKED_AT)
    return torch.from_numpy(found.states[:_STARTS]).to(device), found.agreed


def walk_from(problem: CoarseProblem, plan: Tensor) -> Tensor | None:
    """Walk from the matching that is most like a plan (n, n); return a better one (n,), if any."""
    from scipy.optimize import linear_sum_assignment

    walk, left = Exchanges.of(problem), len(plan)
    begun = linear_sum_assignment(plan.cpu(), maximize=True)[1]
    walk.begin(begun[None])
    # few moves tell that a matching cannot be helped; one that can is worth more
    while left and not is_over():
        before, left = walk.least[0], left - 1
        walk.step()
        left = left if walk.least[0] == before else _ROUND * len(plan)
    best = walk.best[0]
    return None if (best == begun).all() else torch.from_numpy(best).to(plan.device)


def exchange(near: Tensor, far: Tensor, cost: Tensor, plan: Tensor) -> Tensor | None:
    """Let the two entries of a plan (n, m) exchange partners that lower it most, if any do."""
    # Its objective is that of the tables `near` (r, n, n) and `far` (r, m, m), sum_r <A_r P B_r,
    # P>, with linear terms, and `cost` (n, m) is the gradient. Where a plan stays to first order,
    # as steps towards vertices of the polytope of plans leave it, an exchange may still lower it.
    i, p = (plan > EQUAL * plan.max()).nonzero().T
    masses, slopes = plan[i, p], cost[i[:, None], p[None, :]]
    moved = torch.minimum(masses[:, None], masses[None, :])
    own = slopes.diagonal()
    slopes = slopes + slopes.mT - own[:, None] - own[None, :]
    # <A D B, D> of D = (e_i - e_k) (e_q - e_p)'
    bends = torch.ones_like(slopes)[None]
    for tables, at in ((near, i), (far, p)):
        across, own = tables[:, at[:, None], at[None, :]], tables.diagonal(dim1=1, dim2=2)[:, at]
        bends = bends * (own[:, :, None] + own[:, None, :] - across - across.mT)
    changes = moved * (slopes + moved * bends.sum(0))
    place = int(changes.argmin())
    if float(changes.flatten()[place]) >= -EQUAL * float(plan.sum() * cost.abs().max()):
        return None
    pair = list(divmod(place, len(masses)))
    rows, columns = i[pair], p[pair]
    better = plan.clone()
    better[rows, columns] -= moved.flatten()[place]
    better[rows, columns.flip(0)] += moved.flatten()[place]
    return better


# Matchings of each of many problems, and exchanges of each for every point. [L1850]
_STATES, _EXCHANGES = 16, 4


def matchings_of_many(near: Tensor, far: Tensor, linear: Tensor | None, sizes: Tensor) -> Tensor:
    """Search matchings (B, k, n) of B problems side by side, on their device, the best first."""
    # Problems are as `Assignments`, of one pair of symmetric tables each, (B, n, n), of which the
    # first points (B,) are used. All changes are computed anew in each step, and states, drawn
    # alike for all problems, are never kicked: there are few points.
    (count, n, _), device = far.shape, far.device
    generator, steps = torch.Generator("cpu").manual_seed(0), _EXCHANGES * n

    def drawn(*shape: int) -> Tensor:
        return torch.rand(*shape, device="cpu", generator=generator, dtype=torch.float64).to(device)

    diagonals = [side.diagonal(dim1=1, dim2=2) for side in (near, far)]
    own = diagonals[0][:, :, None] * diagonals[1][:, None]
    linear = (own if linear is None else own + linear)[:, None].expand(-1, _STATES, -1, -1)
    near, far = near - diagonals[0].diag_embed(), far - diagonals[1].diag_embed()
    near = near[:, None].expand_as(linear)
    beyond = torch.arange(n, device=device) >= sizes[:, None]
    closed = (beyond[:, None] | beyond[:, :, None] | torch.eye(n, device=device).bool())[:, None]
    partners = (drawn(_STATES, n) + 2 * beyond[:, None]).argsort(2)
    least, most = Exchanges.tenure
    tenures = least + (most - least) * drawn(steps, 2, 1, _STATES)
    # when a point may have a partner again
    waits = torch.zeros(linear.shape, dtype=torch.int32, device=device)
    at = torch.arange(count, device=device)[:, None, None]
    best, lowest = partners, torch.full_like(linear[:, :, 0, 0], torch.inf)
    for step in range(steps):
        columns = partners[:, :, None].expand_as(waits)
        there = far[at, partners].gather(3, columns)
        costs = 2 * products(near.flatten(0, 1), there.flatten(0, 1)).view_as(there)
        values = costs.diagonal(dim1=2, dim2=3).sum(2) / 2
        costs += linear.gather(3, columns)
        own = costs.diagonal(dim1=2, dim2=3)
        values = own.sum(2) - values
        changes = costs + costs.mT - own[:, :, :, None] - own[:, :, None] + 4 * near * there
        enough = lowest - NOTHING * lowest.abs().where(lowest.isfinite(), 0.0)
        best = partners.where((values < enough)[:, :, None], best)
        lowest = values.where(values < enough, lowest)
        # one that has to wait is made where it leads below all before, or where all have to
        until = waits.gather(3, columns)
        waiting = closed | (until.minimum(until.mT) > step)
        waiting &= changes >= (enough.minimum(lowest) - values)[:, :, None, None]
        waiting &= ~waiting.flatten(2).all(2)[:, :, None, None]
        place = changes.masked_fill(closed | waiting, torch.inf).flatten(2).argmin(2)
        pair = torch.stack([place // n, place % n], 2)
        before = partners.gather(2, pair)
        until = (step + 1 + (sizes[:, None] * tenures[step]).round()).movedim(0, 2)
        waits.flatten(2).scatter_(2, n * pair + before, until.int())
        partners = partners.scatter(2, pair, before.flip(2))
    order = lowest.argsort(dim=1, stable=True)
    return best.gather(1, order[:, :, None].expand_as(best))


class Exchanges(Walk):
    """Matchings, whose points exchange their partners."""

    # With P a matching as a table, exchanging the partners p and q of two points i and j adds
    # D = (e_i - e_j) (e_q - e_p)' to it, and <C, D> + 4 sum_r A_ij B_pq to the objective over the
    # symmetric tables, with C = L + 2 sum_r A_r P B_r'. For other two points this changes by
    # -sum_r (x_i - x_j) (y_i - y_j), with x = 2 A (e_i - e_j) and y = B (e_q - e_p) at the
    # partners, a product of rank 2 r + 2; what the same two points add is computed anew.

    tenure = 0.9, 1.1  # [L1341]

    def __init__(self, problem: Assignments) -> None:
        near, far, linear = (part.cpu() for part in problem[:3])
        self.problem = problem._replace(near=near, far=far, linear=linear)
        n = len(problem.linear)
        super().__init__((n, n), problem.largest())
        self.near, self.far, self.linear = near.numpy(), far.numpy(), linear.numpy()
        # rows of all tables side by side
        self.rows = [side.swapaxes(0, 1).reshape(n, -1).T.copy() for side in (self.far, self.near)]
        # nothing to exchange: a point with itself, and places that are both empty
        empty = np.arange(n) >= problem.points
        closed = np.eye(n, dtype=bool) | (empty & empty[:, None])
        self.closed = np.where(closed, _EVER, 0).astype(np.int32)

    @classmethod
    def of(cls, problem: CoarseProblem) -> Exchanges:
        """Begin with the matchings of a problem."""
        n = len(problem.base)
        near = (-2 * problem.alpha / n**2) * problem.x.double()
        parts = list(zip(near, problem.y.double().mT, strict=True))
        return cls(Assignments.of(parts, problem.base.double() / n))

    def evaluated(self, states: Array) -> tuple[Array, Array]:
        """Compute what the exchanges of matchings add."""
        changes, own, values = self.problem.changes(torch.from_numpy(states))
        self.costs, self.points = own.numpy(), states.argsort(1)
        return values.numpy(), changes.numpy()

    def barred(self, states: Array) -> Array:
        """Bar exchanges of a point with itself; no partner has to wait."""
        # when a point may have a partner again
        self.waits = np.zeros(self.changes.shape, dtype=np.int32)
        return np.broadcast_to(self.closed, self.changes.shape).copy()

    def move(self, i: Array, j: Array, until: Array) -> None:
        """Exchange the partners of points i and j, (B,) each."""
        at, both = self.every[:, None], np.stack([i, j], 1)
        before = self.states[at, both]
        after = before[:, ::-1]
        self.states[at, both], self.points[at, after] = after, both
        self._change(at, both, after)
        self.waits[at, both, before] = until
        rows = self.waits[at[:, :, None], both[:, :, None], self.states[:, None]]
        rows = np.minimum(rows, self.waits[self.every[:, None], :, after])
        _put(self.until, at, both, np.maximum(rows, self.closed[both]))

    def _change(self, at: Array, both: Array, after: Array) -> None:
        """Change what exchanges add, once points (B, 2) have the partners ``after``."""
        parts, even = len(self.near), self.problem.symmetric
        states, (count, n) = self.states[:, None], self.states.shape
        # (r, B, 2, n)
        near, far = self.near[:, both], self.far[:, after[:, :, None], states]
        x, y = (2 * (side[:, :, 1] - side[:, :, 0]).swapaxes(0, 1) for side in (near, far))
        products = (x * y).sum(1, keepdims=True) / 2
        self.costs += products[:, 0]
        ones = np.ones_like(products)
        left = np.concatenate([products, ones, x, y / 2], 1)
        _add_product(self.changes, left, np.concatenate([-ones, -products, y / 2, x], 1))
        # the two points, by the rows and the columns of their costs
        moved = self.near[:, both[:, :, None], self.points[:, None]]
        sides = (
            2 * side.transpose(1, 2, 0, 3).reshape(2 * count, parts * n) @ rows
            for side, rows in zip((moved, far), self.rows, strict=True)
        )
        first, second = (side.reshape(count, 2, n) for side in sides)
        rows = (first + self.linear[both])[at[:, :, None], np.arange(2)[:, None], states]
        own = rows[at, np.arange(2), both]
        self.costs[at, both] = own
        rows += second + self.linear.T[after]
        rows -= own[:, :, None] + self.costs[:, None]
        rows += 4 * (near[:even] * far[:even]).sum(0)
        _put(self.changes, at, both, rows)

    def drawn(self, count: int) -> Array:
        """Draw matchings."""
        return self.draw.random((count, self.shape[0])).argsort(1)

    def kicked(self, states: Array, sizes: Array) -> Array:
        """Exchange the partners of some points of each matching in a circle."""
        at, n = np.arange(len(states))[:, None], states.shape[1]
        order, place = self.drawn(len(states)), np.arange(n)
        source = np.where(place < sizes, (place + 1) % sizes.astype(int), place)
        found = np.empty_like(states)
        found[at, order] = states[at, order[at, source]]
        return found

    def mixed(self, states: Array, others: Array) -> Array:
        """Take partners of either; one that two points would have goes to one of them."""
        (count, n), draw = states.shape, self.draw
        at = np.arange(count)[:, None]
        chosen = np.where(draw.random((count, n)) < 0.5, states, others)
        # by partners, those of both matchings before others
        order = (chosen + (draw.random((count, n)) + (states != others)) / 2).argsort(1)
        ranked = chosen[at, order]
        again = np.zeros((count, n), dtype=bool)
        again[at, order[:, 1:]] = ranked[:, 1:] == ranked[:, :-1]
        used = np.zeros((count, n), dtype=bool)
        used[at, chosen] = True
        # points without a partner and partners without a point come first
        points = (draw.random((count, n)) + ~again).argsort(1)
        left = used.argsort(1, kind="stable")
        few = np.arange(n) < again.sum(1, keepdims=True)
        chosen[at, points] = np.where(few, left, chosen[at, points])
        return chosen


def _add_product(tables: Array, left: Array, right: Array) -> None:
    """Add products of left (B, k, n), transposed, and right (B, k, m) to tables (B, n, m)."""
    # by PyTorch, which needs no room for them
    torch.from_numpy(tables).baddbmm_(torch.from_numpy(left).mT, torch.from_numpy(right))


def _put(tables: Array, at: Array, both: Array, rows: Array) -> None:
    """Put rows (B, 2, n) into symmetric tables (B, n, n), and as columns."""
    tables[at, both] = rows
    tables[at, :, both] = rows


class Sides(NamedTuple):
    """A problem of the square loss, whose source has a strict marginal and whose target is free."""

    x: Tensor  # (n, n)
    y: Tensor  # (m, m)
    a: Tensor  # (n,) weights of the source
    alpha: float
    linear: Tensor | None  # (n, m)


class Maps(Walk):
    """Maps of one space into another, whose points go elsewhere one by one.

    Where one marginal is strict and the other one free, the best plans without entropy are maps:
    each point of the strict side goes to one point, and several may go to the same.
    """

    # With p the map, c_iu = sum_j a_j (x_ij - y_u p_j)^2 is what a point i at u would see of the
    # others, and of itself where it is now.

    tenure = 0.3, 0.6  # [L1332]

    def __init__(self, sides: Sides) -> None:
        self.x, self.y, self.a = (part.double().cpu().numpy() for part in sides[:3])
        self.alpha, self.linear = sides.alpha, np.zeros((len(self.x), len(self.y)))
        if sides.linear is not None:
            self.linear = (1 - self.alpha) * sides.linear.double().cpu().numpy()
        else:
            # no map is better than one that keeps all distances
            self.floor = 0.0
        most = (np.abs(self.x).max() + np.abs(self.y).max()) ** 2
        most = 2 * self.alpha * most + 2 * np.abs(self.linear).max()
        super().__init__(self.linear.shape, float(self.a.max() * most))

    def evaluated(self, states: Array) -> tuple[Array, Array]:
        """Compute what it adds to send each point elsewhere."""
        x, y, a, at = self.x, self.y, self.a, states[:, :, None]
        # (B, j, u)
        there = np.moveaxis(y[:, states], 0, 2)
        costs = (x**2 @ a)[:, None] - 2 * x @ (a[:, None] * there)
        costs += (a[:, None] * there**2).sum(1)[:, None]
        here = np.take_along_axis(costs, at, 2)[:, :, 0]
        values = (self.alpha * here + self.linear[np.arange(len(x)), states]) @ a
        # of a point's own pair: what a move changes beside the others
        own = 2 * (x.diagonal()[:, None] - there) ** 2 - (x.diagonal()[:, None] - y.diagonal()) ** 2
        seen = a[:, None] * (self.alpha * (2 * costs - a[:, None] * own) + self.linear)
        return values, seen - np.take_along_axis(seen, at, 2)

    def barred(self, states: Array) -> Array:
        """Bar moves to where points are."""
        until = np.zeros(self.changes.shape, dtype=np.int32)
        np.put_along_axis(until, states[:, :, None], _EVER, 2)
        return until

    def move(self, i: Array, j: Array, until: Array) -> None:
        """Send points i (B,) to others j (B,)."""
        every, a = self.every, self.a
        before = self.states[every, i]
        self.until[every, i, before] = until[:, 0]
        self.until[every, i, j] = _EVER
        self.states[every, i] = j
        new, old = self.y[j], self.y[before]
        # (B, 3, n) and (B, 3, m): what other points see, where they might be and where they are
        left = np.stack([np.broadcast_to(a, (len(i), len(a))), -2 * a * self.x[i]], 1)
        left *= (2 * self.alpha * a[i])[:, None, None]
        right = np.stack([new**2 - old**2, new - old], 1)
        here = (left * right[every[:, None], :, self.states].swapaxes(1, 2)).sum(1, keepdims=True)
        right = np.concatenate([right, -np.ones_like(right[:, :1])], 1)
        _add_product(self.changes, np.concatenate([left, here], 1), right)
        # the point itself
        own = self.x.diagonal()[i][:, None]
        row = self.changes[every, i]
        row += (2 * self.alpha * a[i] ** 2)[:, None] * ((own - old) ** 2 - (own - new) ** 2)
        self.changes[every, i] = row - row[every, j][:, None]

    def drawn(self, count: int) -> Array:
        """Draw maps."""
        return self.draw.integers(0, self.shape[1], (count, self.shape[0]))

    def kicked(self, states: Array, sizes: Array) -> Array:
        """Send some points of each map anywhere."""
        chosen = self.draw.random(states.shape).argsort(1) < sizes
        return np.where(chosen, self.drawn(len(states)), states)

    def mixed(self, states: Array, others: Array) -> Array:
        """Take the image of each point from one of two maps."""
        return np.where(self.draw.random(states.shape) < 0.5, states, others)


def best_maps(sides: Sides, plans: Tensor) -> Tensor:
    """Find the best plans (k, n, m) that are maps."""
    # Some maps begin at plans (s, n, m), the first of them, the others at random.
    walk = Maps(sides)
    known = plans[:_STARTS].argmax(2).cpu().numpy()
    kept = torch.from_numpy(search(walk, known, _LOOKED_AT).states[:_STARTS])
    found: Tensor = torch.nn.functional.one_hot(kept, walk.shape[1]) * sides.a.cpu()[:, None]
    return found


def has_maps(rho: Sequence[float]) -> bool:
    """Whether penalties keep one side strict and leave the other free."""
    return sorted(rho) == [0, math.inf]


def maps_where_free(
    rho: Sequence[float],
    tables: tuple[Tensor, Tensor],
    weights: tuple[Tensor, Tensor],
    alpha: float,
    linear: Tensor | None,
    plans: Tensor,
) -> Tensor:
    """Find the best maps of a side whose marginal is strict into one that is free, (k, n, m)."""
    # None for other penalties `rho`.
    if not has_maps(rho):
        return plans[:0]
    (x, y), (a, b) = tables, weights
    if rho[1] == 0:
        return best_maps(Sides(x, y, a, alpha, linear), plans)
    turned = None if linear is None else linear.mT
    return best_maps(Sides(y, x, b, alpha, turned), plans.mT).mT
