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
from torchgw._sinkhorn.kernels.operands import (
    KernelPlan,
    Operands,
    Walk,
    operands,
    padded,
    scale_of,
)
from torchgw._sinkhorn.kernels.softmin import Groups, half_step_, log_sum_exp
from torchgw._sinkhorn.kernels.sweeps import Workspace
from torchgw._sinkhorn.kernels.vectors import begin_
from torchgw._sinkhorn.problem import STRICT, LinearProblem
from torchgw._sinkhorn.softmin import checked
from torchgw._sinkhorn.tiles.block_scaling import block_scaling, grouped
from torchgw._sinkhorn.tiles.bounds import TileLists, TileProblem
from torchgw._sinkhorn.tiles.eager import LINEAR, Stagnation
from torchgw._sinkhorn.tiles.prepared import TiledBackend, TiledProblem
from torchgw._sinkhorn.tiles.tiling import SLACK
from torchgw._typing import Marginals, Potentials

__all__ = ["TiledTritonProblem"]

_LOG2E = math.log2(math.e)
# Bytes of the sums that are kept apart by groups of blocks, and groups at most: a small problem
# has one equation for each.
_GROUP_BYTES = 2**29
_MOST_GROUPS = 512
# Bytes of those that are added up to masses at a time.
_CHUNK_BYTES = 2**26


class TiledTritonProblem(TiledProblem):
    """A problem whose tiles the Triton kernels walk over.

    The tiles that sweeps have chosen serve what is read off the plan that follows, and so does the
    cost in the order of the blocks: choosing takes as long as a half-step.
    """

    def __init__(
        self,
        problem: LinearProblem,
        backend: TiledBackend,
        turned: TiledTritonProblem | None = None,
    ) -> None:
        super().__init__(problem, backend)
        # the same with source and target exchanged, which has the tiles of both
        self._turned = turned
        self._chosen: _Chosen | None = None

    @property
    def T(self) -> TiledTritonProblem:  # noqa: N802 - the name of every array library
        """The problem with source and target exchanged."""
        return self._turned or TiledTritonProblem(self.problem.T, self.backend.T, self)

    def choose(self, potentials: Potentials, slack: float = 0.0) -> _Chosen:
        """Choose the tiles that matter near some potentials, or take those chosen last if right.

        With a ``slack`` they are chosen anew, for potentials that rise by so much together.
        """
        if self._turned is not None:
            return self._turned.choose(Potentials(*potentials[::-1]), slack).T
        last = self._chosen
        if last is not None and slack == 0 and last.holds(potentials):
            return last
        # the old one goes before the new one comes: either may be as large as the factors
        del last
        self._chosen = None
        self._chosen = _Chosen.near(self, potentials, slack)
        return self._chosen

    def _tiled_sweeper(self, start: Potentials) -> Sweeper:
        return _TiledSweeper(self, start)

    def _softmin(self, g: Tensor) -> Tensor:
        cost, (_, b), epsilon, _ = self.problem
        tiles, scale = self.tiling.problem(self.problem), scale_of(epsilon)
        masked = torch.where(b > 0, g, -torch.inf)
        _, v = tiles.exponents(Potentials(tiles.row, masked))
        walk = _walk(self.tiling.softmin_lists(tiles, v))
        parts = _operands(tiles, cost, epsilon)
        columns = tiles.columns.order.point
        bias = (masked[columns] - parts.column) * scale + b.log()[columns] * _LOG2E
        bias = padded(bias.to(parts.dtype), -math.inf)
        log_sum = log_sum_exp(parts, bias, walk=walk).to(g.dtype)
        result = (parts.row - log_sum / scale).to(g.dtype)
        return result[tiles.rows.order.place]

    def _apply(self, potentials: Potentials, values: Tensor) -> Tensor:
        chosen = self.choose(potentials)
        rows, columns = chosen.tiles.rows.order, chosen.tiles.columns.order
        plan = chosen.plan(potentials)
        return read_off.apply(plan, values[columns.point], walk=chosen.walk)[rows.place]

    def topk(self, potentials: Potentials, k: int) -> tuple[Tensor, Tensor]:
        """Find the k largest entries of each row, exactly; many of them by sorting whole rows."""
        if k > read_off.MOST_PASSES:
            return self.whole.topk(potentials, k)
        return super().topk(potentials, k)

    def _topk(self, potentials: Potentials, k: int) -> tuple[Tensor, Tensor]:
        chosen = self.choose(potentials)
        rows, columns = chosen.tiles.rows.order, chosen.tiles.columns.order
        values, index = read_off.topk(chosen.plan(potentials), k, walk=chosen.walk)
        return values[rows.place], columns.point[index[rows.place]]


def _walk(lists: TileLists) -> Walk:
    """Take lists as the kernels read them."""
    return Walk(lists.start, lists.column, lists.width)


def _operands(tiles: TileProblem, cost: Cost, epsilon: float) -> Operands:
    """Prepare a cost for the kernels, in the order of the blocks."""
    assert isinstance(cost, FactoredCost)
    rows, columns = tiles.rows.order.point, tiles.columns.order.point
    ordered = FactoredCost(
        cost.left[rows], cost.right[columns], cost.row[rows], cost.column[columns]
    )
    return operands(ordered, epsilon)


class _Chosen(NamedTuple):
    """A problem in the order of the blocks, and its tiles that matter near some potentials."""

    tiles: TileProblem
    walk: Walk  # over the tiles of each block of rows
    across: Walk  # of columns
    cost: Operands
    marginals: Marginals
    exponents: tuple[Tensor, Tensor]  # for which the tiles were chosen
    slack: float  # how far they may rise together

    @classmethod
    def near(cls, prepared: TiledTritonProblem, potentials: Potentials, slack: float) -> _Chosen:
        """Choose the tiles that matter near some potentials."""
        problem, tiling = prepared.problem, prepared.tiling
        tiles = tiling.problem(problem)
        rows, columns = tiles.rows.order, tiles.columns.order
        exponents = tiles.exponents(potentials)
        kept = tiles.keep(*exponents, slack)
        walk = _walk(tiling.record(tiles, kept))
        across = _walk(TileLists.of(kept.T, tiling.width))
        a, b = problem.marginals
        parts = _operands(tiles, problem.cost, problem.epsilon)
        weights = Marginals(a[rows.point], b[columns.point])
        return cls(tiles, walk, across, parts, weights, exponents, slack)

    @property
    def T(self) -> _Chosen:  # noqa: N802 - the name of every array library
        """The same with source and target exchanged."""
        return _Chosen(
            self.tiles.T, self.across, self.walk, self.cost.transpose(),
            Marginals(*self.marginals[::-1]), self.exponents[::-1], self.slack,
        )  # fmt: skip

    def plan(self, potentials: Potentials) -> KernelPlan:
        """Describe a plan in the order of the blocks, as the kernels read it."""
        rows, columns = self.tiles.rows.order, self.tiles.columns.order
        ordered = Potentials(potentials.f[rows.point], potentials.g[columns.point])
        return KernelPlan(self.cost, self.marginals, ordered, self.tiles.epsilon)

    def holds(self, potentials: Potentials) -> bool:
        """Whether the tiles are right for a plan, whose potentials must be near by."""
        sides = self.tiles.rows, self.tiles.columns
        now = self.tiles.exponents(potentials)
        rises = [
            (x - before).masked_fill_(side.weight == 0, -torch.inf).amax()
            for x, before, side in zip(now, self.exponents, sides, strict=True)
        ]
        return float(rises[0] + rises[1]) <= self.slack


class _TiledSweeper:
    """Sweeps by two half-steps over lists, whole blocks scaled between iterations.

    Where that stops getting better it goes on with one level over all tiles.
    """

    def __init__(self, prepared: TiledTritonProblem, start: Potentials) -> None:
        self._prepared = prepared
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
        chosen = self._prepared.choose(start, SLACK)
        cost, tiles, width = chosen.cost, chosen.tiles, self._prepared.tiling.width
        self.rows, self.columns = tiles.rows.order, tiles.columns.order
        self.cost, self.other = cost, cost.transpose()
        self.walk, self.across = chosen.walk, chosen.across
        self.marginals = chosen.marginals
        self.skipping = len(chosen.walk.tiles) < self.rows.blocks * self.columns.blocks
        if self._workspace is None:
            self._workspace = Workspace(cost.shape, cost.dtype, cost.first.device)
        work = self._workspace
        work.prepare(chosen.plan(start), STRICT, (cost.row, cost.column))
        n, m = cost.shape
        most = min(_MOST_GROUPS, _GROUP_BYTES // (m * cost.dtype.itemsize))
        self.group = width * math.ceil(self.rows.blocks / max(most, 1))
        count = math.ceil(n / self.group)
        self.sums = torch.zeros(count, m, dtype=cost.dtype, device=cost.first.device)
        self.masses = (
            grouped(chosen.marginals.a, self.group),
            grouped(chosen.marginals.b, width),
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
        width = self._prepared.tiling.width
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
        problem = self._prepared.problem
        check = checked(ok, g, g_next, problem.marginals.b, problem.epsilon)
        if self._stagnation.after(float(check[1])):
            self._plain = self._prepared.whole.sweeper(going_on)
        return Sweep(f, g, g_next, going_on, check)
