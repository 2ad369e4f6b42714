"""Streamed Sinkhorn over the tiles that matter, by the Triton kernels.

Bounds, lists and the two levels are as in :mod:`torchgw._sinkhorn.tiles.eager`; kernels walk over
lists.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._sinkhorn.anderson import Anderson
from torchgw._sinkhorn.contract import Sweep, Sweeper
from torchgw._sinkhorn.cost import Cost, FactoredCost
from torchgw._sinkhorn.kernels import read_off
from torchgw._sinkhorn.kernels.operands import Operands, Walk, operands, scale_of
from torchgw._sinkhorn.kernels.softmin import Groups, half_step_, log_sum_exp, padded
from torchgw._sinkhorn.kernels.sweeps import Linear, Workspace
from torchgw._sinkhorn.kernels.vectors import begin_
from torchgw._sinkhorn.softmin import checked
from torchgw._sinkhorn.tiles.block_scaling import block_scaling, grouped
from torchgw._sinkhorn.tiles.bounds import TileLists, TileProblem
from torchgw._sinkhorn.tiles.eager import LINEAR, Stagnation, unsure_rows
from torchgw._sinkhorn.tiles.tiling import SLACK, Tiling
from torchgw._triton_sinkhorn import TritonBackend
from torchgw._typing import Marginals, Potentials

__all__ = ["TiledTritonBackend"]

_LOG2E = math.log2(math.e)
# Bytes of the sums that are kept apart by groups of blocks, and groups at most: a small problem
# has one equation for each.
_GROUP_BYTES = 2**29
_MOST_GROUPS = 512
# Bytes of those that are added up to masses at a time.
_CHUNK_BYTES = 2**26


class TiledTritonBackend(TritonBackend):
    """Triton kernels that walk over the tiles that matter.

    Costs that the tiling does not fit are left to :class:`TritonBackend`, and so are draws: they
    look at a few rows of few blocks, whose lists save less than rows of other points would cost.
    """

    def __init__(self, tiling: Tiling) -> None:
        super().__init__()
        self.tiling = tiling

    def transposed(self) -> TiledTritonBackend:
        """Return the backend for transposed costs."""
        return TiledTritonBackend(self.tiling.T)

    def softmin(
        self, cost: Cost, log_weight: Tensor, potential: Tensor, epsilon: float, axis: int
    ) -> Tensor:
        """Compute :func:`torchgw._sinkhorn.softmin.softmin`."""
        if not self.tiling.pays(cost):
            return super().softmin(cost, log_weight, potential, epsilon, axis)
        tiling, weight, scale = self.tiling, log_weight.exp(), scale_of(epsilon)
        if axis == 0:
            cost, tiling = cost.transpose(), tiling.T
        ones = torch.ones(cost.shape[0], dtype=weight.dtype, device=cost.device)
        problem = tiling.problem(cost, Marginals(ones, weight), epsilon)
        masked = torch.where(weight > 0, potential, -torch.inf)
        _, v = problem.exponents(Potentials(problem.row, masked))
        walk = _walk(tiling.softmin_lists(problem, v))
        parts = _operands(problem, cost, epsilon)
        columns = problem.columns.order.point
        bias = (masked[columns] - parts.column) * scale + log_weight[columns] * _LOG2E
        bias = padded(bias.to(parts.dtype), -math.inf)
        log_sum = log_sum_exp(parts, bias, walk=walk).to(potential.dtype)
        result = (parts.row - log_sum / scale).to(potential.dtype)
        return result[problem.rows.order.place]

    def sweeper(
        self,
        cost: Cost,
        marginals: Marginals,
        start: Potentials,
        epsilon: float,
        *,
        tau: tuple[float, float] = (1.0, 1.0),
    ) -> Sweeper:
        """Return sweeps over the tiles that matter near ``start``; relaxed ones over all tiles."""
        if not self.tiling.fits(cost) or tau != (1.0, 1.0):
            return super().sweeper(cost, marginals, start, epsilon, tau=tau)
        return _TiledSweeper(self.tiling, cost, marginals, start, epsilon)

    def apply(
        self,
        cost: Cost,
        marginals: Marginals,
        potentials: Potentials,
        epsilon: float,
        values: Tensor,
    ) -> Tensor:
        """Return plan @ values, shape (n, c), without the plan."""
        if not self.tiling.pays(cost):
            return super().apply(cost, marginals, potentials, epsilon, values)
        ordered = _order(self.tiling, cost, marginals, potentials, epsilon)
        rows, columns = ordered.problem.rows.order, ordered.problem.columns.order
        result = read_off.apply(
            ordered.parts, ordered.marginals, ordered.potentials(potentials), scale_of(epsilon),
            values[columns.point], walk=ordered.walk,
        )  # fmt: skip
        return result[rows.place]

    def topk(
        self, cost: Cost, marginals: Marginals, potentials: Potentials, epsilon: float, k: int
    ) -> tuple[Tensor, Tensor]:
        """Return the k largest entries of each row, exactly; see :class:`TiledEagerBackend`."""
        if not self.tiling.pays(cost) or k > read_off.MOST_PASSES:
            return super().topk(cost, marginals, potentials, epsilon, k)
        conditional = Marginals(torch.ones_like(marginals.a), marginals.b)
        ordered = _order(self.tiling, cost, conditional, potentials, epsilon)
        values, index = read_off.topk(
            ordered.parts, ordered.marginals, ordered.potentials(potentials), scale_of(epsilon), k,
            walk=ordered.walk,
        )  # fmt: skip
        rows, columns = ordered.problem.rows.order, ordered.problem.columns.order
        values, index = values[rows.place], columns.point[index[rows.place]]
        unsure = unsure_rows(values, marginals, cost.dtype)
        if len(unsure):
            part = Marginals(conditional.a[unsure], marginals.b)
            found = Potentials(potentials.f[unsure], potentials.g)
            values[unsure], index[unsure] = super().topk(cost.rows(unsure), part, found, epsilon, k)
        return values * marginals.a.to(values.dtype)[:, None], index


def _walk(lists: TileLists) -> Walk:
    return Walk(lists.start, lists.column, lists.width)


def _operands(problem: TileProblem, cost: Cost, epsilon: float) -> Operands:
    """Return a cost in the order of the blocks, prepared for the kernels."""
    assert isinstance(cost, FactoredCost)
    rows, columns = problem.rows.order.point, problem.columns.order.point
    ordered = FactoredCost(
        cost.left[rows], cost.right[columns], cost.row[rows], cost.column[columns]
    )
    return operands(ordered, epsilon)


class _Ordered(NamedTuple):
    """A cost in the order of the blocks, and the tiles of it that matter near some potentials."""

    given: tuple[Cost, Marginals, float]  # cost, weights and epsilon
    problem: TileProblem
    walk: Walk  # over the tiles of each block of rows
    across: Walk  # of columns
    parts: Operands
    marginals: Marginals
    chosen: tuple[Tensor, Tensor]  # exponents that the tiles were chosen for
    slack: float  # how far they may rise together

    @property
    def T(self) -> _Ordered:  # noqa: N802 - the name of every array library
        """The same with source and target exchanged."""
        cost, marginals, epsilon = self.given
        return _Ordered(
            (cost.transpose(), Marginals(*marginals[::-1]), epsilon), self.problem.T, self.across,
            self.walk, self.parts.transpose(), Marginals(*self.marginals[::-1]), self.chosen[::-1],
            self.slack,
        )  # fmt: skip

    def potentials(self, given: Potentials) -> Potentials:
        """Return potentials in the order of the blocks."""
        rows, columns = self.problem.rows.order, self.problem.columns.order
        return Potentials(given.f[rows.point], given.g[columns.point])

    def holds(
        self, cost: Cost, marginals: Marginals, potentials: Potentials, epsilon: float
    ) -> bool:
        """Whether the tiles are right for a plan: that of the same cost, at potentials near by."""
        own, weights, own_epsilon = self.given
        pairs = zip((*own, *weights), (*cost, *marginals), strict=True)
        if epsilon != own_epsilon or any(one is not other for one, other in pairs):
            return False
        sides = self.problem.rows, self.problem.columns
        now = self.problem.exponents(potentials)
        rises = [
            (x - before).masked_fill_(side.weight == 0, -torch.inf).amax()
            for x, before, side in zip(now, self.chosen, sides, strict=True)
        ]
        return float(rises[0] + rises[1]) <= self.slack


def _order(
    tiling: Tiling,
    cost: Cost,
    marginals: Marginals,
    potentials: Potentials,
    epsilon: float,
    slack: float = 0.0,
) -> _Ordered:
    """Return a cost in blocks, with the tiles that matter near some potentials.

    Those chosen last are taken if they are right: choosing takes as long as a half-step.
    """
    last = tiling.last
    if last is not None and slack == 0 and last.holds(cost, marginals, potentials, epsilon):
        ordered: _Ordered = last
        return ordered
    # the old one goes before the new one comes: either may be as large as the factors
    del last
    tiling.last = None
    problem = tiling.problem(cost, marginals, epsilon)
    rows, columns = problem.rows.order, problem.columns.order
    chosen = problem.exponents(potentials)
    kept = problem.keep(*chosen, slack)
    walk = _walk(tiling.record(problem, kept))
    across = _walk(TileLists.of(kept.T, tiling.width))
    weights = Marginals(marginals.a[rows.point], marginals.b[columns.point])
    tiling.last = ordered = _Ordered(
        (cost, marginals, epsilon), problem, walk, across, _operands(problem, cost, epsilon),
        weights, chosen, slack,
    )  # fmt: skip
    return ordered


class _TiledSweeper:
    """Sweeps by two half-steps over lists, whole blocks scaled between iterations.

    Where that stops getting better it goes on with one level over all tiles.
    """

    def __init__(
        self, tiling: Tiling, cost: Cost, marginals: Marginals, start: Potentials, epsilon: float
    ) -> None:
        self._given = tiling, cost, marginals, epsilon
        self._workspace: Workspace | None = None
        self._plain: Sweeper | None = None
        self._stagnation = Stagnation()
        self.acceleration = Anderson()
        self._choose(start)

    @property
    def two_level(self) -> bool:
        """Whether blocks are still scaled."""
        return self._plain is None

    def _choose(self, start: Potentials) -> None:
        """Choose the tiles near some potentials, and make a kernel there."""
        tiling, cost, marginals, epsilon = self._given
        ordered = _order(tiling, cost, marginals, start, epsilon, SLACK)
        parts = ordered.parts
        self.rows, self.columns = ordered.problem.rows.order, ordered.problem.columns.order
        self.cost, self.other = parts, parts.transpose()
        self.walk, self.across = ordered.walk, ordered.across
        self.marginals = ordered.marginals
        self.skipping = len(ordered.walk.tiles) < self.rows.blocks * self.columns.blocks
        if self._workspace is None:
            self._workspace = Workspace(cost.shape, parts.dtype, cost.device)
        work = self._workspace
        problem = Linear(ordered.marginals, ordered.potentials(start), epsilon, (1.0, 1.0))
        work.prepare(problem, (parts.row, parts.column))
        n, m = cost.shape
        most = min(_MOST_GROUPS, _GROUP_BYTES // (m * parts.dtype.itemsize))
        self.group = tiling.width * math.ceil(self.rows.blocks / max(most, 1))
        count = math.ceil(n / self.group)
        self.sums = torch.zeros(count, m, dtype=parts.dtype, device=cost.device)
        self.masses = (
            grouped(ordered.marginals.a, self.group),
            grouped(ordered.marginals.b, tiling.width),
        )

    def __call__(self, start: Potentials, count: int, relaxation: float = 1.0) -> Sweep:
        """Run iterations, each followed by a scaling of whole blocks, without relaxation."""
        if self._plain is not None:
            return self._plain(start, count, relaxation)
        work = self._workspace
        assert work is not None
        ordered = Potentials(start.f[self.rows.point], start.g[self.columns.point])
        work.read(ordered)
        vectors = work.vectors
        begin_(vectors)
        live = vectors.scalings[1]
        f, g = (live[part] for part in work.sides)
        if self._rise(f, g) > SLACK * _LOG2E:
            self._choose(start)
            return self(start, count, relaxation)
        ok = torch.ones((), dtype=torch.bool, device=live.device)
        for turn in range(count):
            half_step_(self.cost, work.f, work.g, work.plain[0], vectors.bad, walk=self.walk)
            if SLACK * _LOG2E < float(self._rise(f, g)) < math.inf:
                # sums over too few tiles: their potentials are too large, and keep enough of them
                reached = Potentials(self._potential(f, 0), self._potential(g, 1))
                self._choose(reached)
                return self(reached, count - turn, relaxation)
            before = g.clone()
            self.sums.zero_()
            half_step_(
                self.other, work.g, work.f, work.plain[1], vectors.bad, walk=self.across,
                groups=Groups(self.sums, self.group),
            )  # fmt: skip
            ok = ok & (self._rise(f, torch.maximum(before, g)) <= SLACK * _LOG2E)
            read = f.clone(), before, g.clone()
            self._correct(f, g, before)
            torch.exp2(live, out=vectors.feed).mul_(vectors.weight)
        return self._sweep(read, (f, g), ok & (vectors.bad == 0).reshape(()))

    def _correct(self, f: Tensor, g: Tensor, before: Tensor) -> None:
        """Scale whole blocks, let a half-step over the columns follow, and extrapolate it."""
        feed = torch.exp2(before) * self.marginals.b.to(g.dtype)
        width = self._given[0].width
        rows = max(1, _CHUNK_BYTES // (len(feed) * feed.element_size()))
        masses = torch.cat(
            [grouped((part * feed).T, width).T.double() for part in self.sums.split(rows)]
        )
        scaling = block_scaling(masses, *self.masses)
        factor = scaling.exp().to(g.dtype)
        sums = factor @ self.sums
        scaled = torch.where((sums > 0) & (feed > 0), -sums.log2(), g)
        step = (scaling * _LOG2E).to(f.dtype).repeat_interleave(self.group)[: len(f)]
        f.add_(torch.where(self.marginals.a > 0, step, 0.0))
        if scaling.abs().max() > LINEAR:
            self.acceleration = Anderson()
        else:
            scaled = self.acceleration.next(before, scaled)
        g.copy_(scaled)

    def _rise(self, u: Tensor, v: Tensor) -> Tensor:
        """Return how far the potentials have risen since the tiles were chosen, in bits."""
        return u.amax() + v.amax() if self.skipping else torch.zeros_like(u[0])

    def _potential(self, scaling: Tensor, side: int) -> Tensor:
        """Return log-scalings as potentials, in cost units and in the order of the points."""
        work = self._workspace
        assert work is not None
        order, vectors = (self.rows, self.columns)[side], work.vectors
        return (scaling / vectors.scale + vectors.origin[work.sides[side]])[order.place]

    def _sweep(
        self, read: tuple[Tensor, Tensor, Tensor], state: tuple[Tensor, Tensor], ok: Tensor
    ) -> Sweep:
        """Return what a sweep led to."""
        f, g, g_next = (self._potential(read[i], side) for i, side in enumerate((0, 1, 1)))
        going_on = Potentials(self._potential(state[0], 0), self._potential(state[1], 1))
        _, cost, marginals, epsilon = self._given
        check = checked(ok, g, g_next, marginals.b, epsilon)
        if self._stagnation.after(float(check[1])):
            self._plain = TritonBackend().sweeper(cost, marginals, going_on, epsilon)
        return Sweep(f, g, g_next, going_on, check)
