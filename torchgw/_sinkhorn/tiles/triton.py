"""Streamed Sinkhorn over the tiles that matter, by the Triton kernels, which walk over lists."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._sinkhorn.kernels import read_off
from torchgw._sinkhorn.kernels.operands import (
    KernelPlan,
    Operands,
    Walk,
    operands,
    padded,
    scale_of,
)
from torchgw._sinkhorn.kernels.softmin import Groups, KernelSide, Rule, half_step_, log_sum_exp
from torchgw._sinkhorn.kernels.sweeps import Workspace
from torchgw._sinkhorn.kernels.vectors import begin_
from torchgw._sinkhorn.problem import STRICT, Cost, FactoredCost, LinearProblem
from torchgw._sinkhorn.tiles.prepared import MOST_BLOCKS, TiledBackend, TiledProblem, grouped
from torchgw._sinkhorn.tiles.tiling import SLACK, Cut, TileLists, TileProblem
from torchgw._tensors.operations import BLOCK_BYTES, both, negative, power_of_two
from torchgw._tensors.ranks import Ranks
from torchgw._typing import Marginals, Potentials

_LOG2E = math.log2(math.e)
# Bytes of the sums that are kept apart by groups of blocks. [L209]
_GROUP_BYTES = 2**29


class TiledTritonProblem(TiledProblem):
    """A problem whose tiles the Triton kernels walk over."""

    # The tiles that sweeps have chosen serve what is read off the plan that follows, and so does
    # the cost in the order of the blocks: choosing takes as long as a half-step.

    def __init__(
        self,
        problem: LinearProblem,
        backend: TiledBackend,
        turned: "TiledTritonProblem | None" = None,
    ) -> None:
        super().__init__(problem, backend)
        # the same with source and target exchanged, which has the tiles of both
        self._turned = turned
        self._chosen: _Chosen | None = None

    @property
    def T(self) -> "TiledTritonProblem":  # noqa: N802 - the name of every array library
        return self._turned or TiledTritonProblem(self.problem.T, self.backend.T, self)

    def choose(self, potentials: Potentials, slack: float = 0.0) -> "_Chosen":
        """Choose the tiles that matter near some potentials, or take those chosen last if right."""
        # With a slack they are chosen anew, for potentials that rise by so much together.
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

    def _softmin(self, g: Tensor) -> Tensor:
        cost, (_, b), epsilon, _ = self.problem
        tiles, scale = self.tiling.problem(self.problem, self.backend.ranks), scale_of(epsilon)
        masked = torch.where(b > 0, g, -torch.inf)
        _, v = tiles.exponents(Potentials(tiles.row, masked))
        walk = _walk(self.tiling.softmin_lists(tiles, v))
        cut = self.cut(walk)
        parts = _operands(tiles, cost, epsilon)
        columns = tiles.columns.order.point
        bias = (masked[columns] - parts.column) * scale + b.log()[columns] * _LOG2E
        bias = padded(bias.to(parts.dtype), -math.inf)
        own = bias.new_empty(0)
        if cut.blocks:
            own = log_sum_exp(parts.rows(cut.rows), bias, walk=walk.rows(cut.blocks))
        log_sum = cut.join(own).to(g.dtype)
        result = (parts.row - log_sum / scale).to(g.dtype)
        return result[tiles.rows.order.place]

    def _apply(self, potentials: Potentials, values: Tensor) -> Tensor:
        chosen = self.choose(potentials)
        rows, columns = chosen.tiles.rows.order, chosen.tiles.columns.order
        cut, ordered = self.cut(chosen.walk), values[columns.point]
        own = ordered[:0]
        if cut.blocks:
            plan, walk = chosen.plan(potentials).rows(cut.rows), chosen.walk.rows(cut.blocks)
            own = read_off.apply(plan, ordered, walk=walk)
        return cut.join(own)[rows.place]

    def topk(self, potentials: Potentials, k: int) -> tuple[Tensor, Tensor]:
        """Find the k largest entries of each row, exactly; many of them by sorting whole rows."""
        if k > read_off.MOST_PASSES:
            return self.whole.topk(potentials, k)
        return super().topk(potentials, k)

    def _topk(self, potentials: Potentials, k: int) -> tuple[Tensor, Tensor]:
        chosen = self.choose(potentials)
        rows, columns = chosen.tiles.rows.order, chosen.tiles.columns.order
        cut = self.cut(chosen.walk)
        values = torch.empty(0, k, dtype=chosen.cost.dtype, device=potentials.f.device)
        index = values.long()
        if cut.blocks:
            plan, walk = chosen.plan(potentials).rows(cut.rows), chosen.walk.rows(cut.blocks)
            values, index = read_off.topk(plan, k, walk=walk)
        values, index = cut.join(values), cut.join(index)
        return values[rows.place], columns.point[index[rows.place]]


def _walk(lists: TileLists) -> Walk:
    """Take lists as the kernels read them."""
    return Walk.of(lists.start, lists.column, lists.width)


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
    def near(cls, prepared: TiledTritonProblem, potentials: Potentials, slack: float) -> "_Chosen":
        """Choose the tiles that matter near some potentials."""
        problem, tiling = prepared.problem, prepared.tiling
        tiles = tiling.problem(problem, prepared.backend.ranks)
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
    def T(self) -> "_Chosen":  # noqa: N802 - the name of every array library
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
        now = self.tiles.exponents(potentials)
        return float(self.tiles.rise(now, self.exponents)) <= self.slack


class _TritonEngine:
    """Scales one kernel, made near where its tiles were chosen, by base-2 log-scalings."""

    slack = SLACK * _LOG2E

    def __init__(self, prepared: TiledTritonProblem, start: Potentials) -> None:
        problem = prepared.problem
        (n, m), dtype, device = problem.cost.shape, problem.cost.dtype, problem.cost.device
        self._prepared = prepared
        self._width = prepared.tiling.width
        self._work = Workspace((n, m), dtype, device)
        most = min(MOST_BLOCKS, _GROUP_BYTES // (m * dtype.itemsize))
        self._group = self._width * math.ceil(math.ceil(n / self._width) / max(most, 1))
        self._sums = torch.zeros(math.ceil(n / self._group), m, dtype=dtype, device=device)
        # where the iteration stands, as long as it has not moved since it was told
        self._at: Potentials | None = start
        self._tiles: _Chosen | None = None
        self.choose()

    @property
    def _chosen(self) -> _Chosen:
        assert self._tiles is not None
        return self._tiles

    def begin(self, start: Potentials) -> None:
        self._at = start
        self._work.read(self._chosen.plan(start).potentials)
        begin_(self._work.vectors)

    def choose(self) -> None:
        """Choose the tiles near where the iteration stands, and make a kernel there."""
        at = self._at or Potentials(self.f(self.u), self.g(self.v))
        # the old ones go before the new ones come
        self._tiles = None
        self._tiles = chosen = self._prepared.choose(at, SLACK)
        a, b = chosen.marginals
        self.used = b > 0
        self._masses = grouped(a, self._group), grouped(b, self._width)
        tiles = chosen.tiles.rows.order.blocks * chosen.tiles.columns.order.blocks
        self._skipping = len(chosen.walk.tiles) < tiles
        self._work.prepare(chosen.plan(at), STRICT, (chosen.cost.row, chosen.cost.column))
        self.begin(at)

    @property
    def u(self) -> Tensor:
        return self._work.vectors.scalings[1][self._work.sides[0]]

    @property
    def v(self) -> Tensor:
        return self._work.vectors.scalings[1][self._work.sides[1]]

    def rise(self, v: Tensor) -> Tensor:
        return self.u.amax() + v.amax() if self._skipping else torch.zeros_like(v[0])

    def update_rows(self) -> None:
        work, chosen = self._work, self._chosen
        self._at = None
        half_step_(chosen.cost, work.f, work.g, work.plain[0], work.vectors.bad, walk=chosen.walk)

    def update_columns(self) -> tuple[Tensor, Tensor]:
        work, chosen = self._work, self._chosen
        # the half-step writes in place
        before = self.v.clone()
        self._sums.zero_()
        half_step_(
            chosen.cost.transpose(), work.g, work.f, work.plain[1], work.vectors.bad,
            walk=chosen.across, groups=Groups(self._sums, self._group),
        )  # fmt: skip
        self._feed = power_of_two(before) * chosen.marginals.b.to(before.dtype)
        return before, self.v.clone()

    def usable(self) -> Tensor:
        return (self._work.vectors.bad == 0).reshape(())

    def masses(self) -> tuple[Tensor, Tensor, Tensor]:
        rows = max(1, BLOCK_BYTES // (len(self._feed) * self._feed.element_size()))
        masses = [
            grouped((part * self._feed).T, self._width).T.double()
            for part in self._sums.split(rows)
        ]
        return (torch.cat(masses), *self._masses)

    def scale_rows(self, scaling: Tensor) -> Tensor:
        u, sums = self.u, self._scaled_sums(scaling.exp().to(self._sums.dtype))
        scaled = torch.where(both(sums > 0, self._feed > 0), negative(sums.log2()), self.v)
        step = (scaling * _LOG2E).to(u.dtype).repeat_interleave(self._group)[: len(u)]
        u.add_(torch.where(self._chosen.marginals.a > 0, step, 0.0))
        return scaled

    def _scaled_sums(self, factor: Tensor) -> Tensor:
        """Add up the sums of groups of rows, each scaled by a factor, (m,)."""
        return factor @ self._sums

    def move_columns(self, v: Tensor) -> None:
        vectors = self._work.vectors
        self.v.copy_(v)
        torch.mul(power_of_two(vectors.scalings[1]), vectors.weight, out=vectors.feed)

    def f(self, u: Tensor) -> Tensor:
        vectors, side = self._work.vectors, self._work.sides[0]
        return (u / vectors.scale + vectors.origin[side])[self._chosen.tiles.rows.order.place]

    def g(self, v: Tensor) -> Tensor:
        vectors, side = self._work.vectors, self._work.sides[1]
        return (v / vectors.scale + vectors.origin[side])[self._chosen.tiles.columns.order.place]


class _SharedEngine(_TritonEngine):
    """Shares tiles among ranks, by blocks of rows or columns, and sums in fixed pieces."""

    def __init__(self, prepared: TiledTritonProblem, start: Potentials, ranks: Ranks) -> None:
        self._ranks = ranks
        super().__init__(prepared, start)

    def choose(self) -> None:
        """Choose tiles as alone, and what of the cost is this rank's."""
        self._own: list[tuple[Operands, Walk]] = []
        super().choose()
        chosen, (n, m) = self._chosen, self._prepared.problem.cost.shape
        rows = Cut(self._ranks, chosen.walk.start, n, self._width)
        columns = Cut(self._ranks, chosen.across.start, m, self._width)
        self._cuts = rows, columns
        self._own = [
            (chosen.cost.rows(rows.rows), chosen.walk.rows(rows.blocks)),
            (chosen.cost.transpose().rows(columns.rows), chosen.across.rows(columns.blocks)),
        ]
        width = columns.rows.stop - columns.rows.start
        # the sums of one's own columns alone
        self._sums = self._sums.new_zeros(len(self._sums), width)

    def update_rows(self) -> None:
        work = self._work
        self._at = None
        self._share(0, work.f, work.g, work.plain[0], None)

    def update_columns(self) -> tuple[Tensor, Tensor]:
        work, chosen = self._work, self._chosen
        before = self.v.clone()
        self._sums.zero_()
        self._share(1, work.g, work.f, work.plain[1], Groups(self._sums, self._group))
        self._feed = power_of_two(before) * chosen.marginals.b.to(before.dtype)
        return before, self.v.clone()

    def _share(
        self, axis: int, side: KernelSide, other: KernelSide, rule: Rule, groups: Groups | None
    ) -> None:
        """Take the half-step of one's own points, and then those of the others."""
        cut, (cost, walk) = self._cuts[axis], self._own[axis]
        if cut.blocks:
            own, begin = cut.rows, cut.rows.start
            here = KernelSide(
                side.start[begin:], side.weight[own], side.scaling[own], side.feed[begin:]
            )
            there = rule._replace(shift=rule.shift[own])
            half_step_(cost, here, other, there, self._work.vectors.bad, walk=walk, groups=groups)
        side.scaling.copy_(cut.join(side.scaling[cut.rows]))
        n = len(side.weight)
        torch.mul(power_of_two(side.scaling), side.weight, out=side.feed[:n])

    def usable(self) -> Tensor:
        bad = self._work.vectors.bad
        return torch.tensor(not self._ranks.any(bool(bad)), device=bad.device)

    def masses(self) -> tuple[Tensor, Tensor, Tensor]:
        own, cut = self._feed[self._cuts[1].rows], self._cuts[1]
        masses = [
            grouped((self._sums[:, piece] * own[piece]).T, self._width).double()
            for piece in cut.pieces
        ]
        empty = own.new_empty(0, len(self._sums), dtype=torch.float64)
        return (cut.join_blocks(torch.cat([empty, *masses])).T, *self._masses)

    def _scaled_sums(self, factor: Tensor) -> Tensor:
        cut = self._cuts[1]
        own = [factor @ self._sums[:, piece].contiguous() for piece in cut.pieces]
        return cut.join(torch.cat([factor[:0], *own]))


TiledTritonProblem.engines = _TritonEngine, _SharedEngine
