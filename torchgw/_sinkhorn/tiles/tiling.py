"""Whether and how a solve skips tiles, and a report of how many it skipped."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._sinkhorn.problem import Cost, FactoredCost, LinearProblem
from torchgw._sinkhorn.tiles.bounds import (
    TileLists,
    TileProblem,
    block_orders,
    skipped_share,
    tile_problem,
)
from torchgw._tensors.block_order import Order
from torchgw._tensors.ranks import Ranks, pieces

# How far the potentials of both sides may rise together, in exponents, before the tiles of a sweep
# are chosen anew. Three units keep 6% more tiles. [L192]
SLACK = 3.0
# Points of a block: the width of a kernel's tile. Smaller ones keep hardly fewer tiles. [L199]
_WIDTH = 128
# Blocks of a side, the geometric mean of both, above which blocks are twice as wide: their bounds
# would cost as much as tiles. [L210]
_MOST_BLOCKS = 4096
# Share of the tiles above which a single pass goes over all: on an H200 softmins break even at 0.49
# and products at 0.66 (100,000 squared, rank 35), on a CPU between 0.42 and 0.66. [L215]
_MOST_KEPT = 0.5
# A CPU makes so many blocks of a side where it can, if need be of 32 points: the small problem
# between the blocks then leaves little for the iterations to do. [L206]
_BLOCKS = 256
_LEAST_WIDTH = 32


class TileReport(NamedTuple):
    """What ``result.log["tiles"]`` says."""

    bound: float  # share of a row's or column's mass that skipping may lose in a half-step
    kept: float  # mean share of tiles kept, over all lists made
    lists: int  # how often tiles were chosen
    width: int  # points of a block


def width_of(shape: tuple[int, int], device: str) -> int:
    """Choose the width of blocks that suits the size and the kind of device of a problem."""
    width = _WIDTH
    while math.prod(shape) > (width * _MOST_BLOCKS) ** 2:
        width *= 2
    while device == "cpu" and width > _LEAST_WIDTH and min(shape) < width * _BLOCKS:
        width //= 2
    return width


@dataclass
class _Memory:
    """What a tiling and its transpose share."""

    orders: tuple[Order, Order] | None = None
    shares: list[float] = field(default_factory=list)
    bound: float = 0.0


class Tiling:
    """The blocks of one problem; those of a transposed cost are ``tiling.T``."""

    # The order of the points is made at the first cost and kept: any order is right, a good one
    # skips more. Costs of another shape, as those of a subsample, are left alone. A width is that
    # of a block, in points; storable says whether sweeps on a CPU that end up with all tiles may
    # store the cost.

    def __init__(
        self, shape: tuple[int, int], width: int = _WIDTH, *, storable: bool = False
    ) -> None:
        self.shape, self.width, self.storable = shape, width, storable
        self._memory = _Memory()
        self._swapped = False

    @classmethod
    def of(
        cls, shape: tuple[int, int], device: torch.device, *, storable: bool = False
    ) -> "Tiling":
        """Make blocks that suit the size and the device of a problem."""
        return cls(shape, width_of(shape, device.type), storable=storable)

    def ordered(self, orders: tuple[Order, Order]) -> "Tiling":
        """Give the points an order that is known already, in blocks of any width."""
        first, second = (order._replace(width=self.width) for order in orders)
        self._memory.orders = first, second
        return self

    @property
    def T(self) -> "Tiling":  # noqa: N802 - the name of every array library
        """The tiling of the transposed problem."""
        other = Tiling(self.shape[::-1], self.width, storable=self.storable)
        other._memory, other._swapped = self._memory, not self._swapped
        return other

    def fits(self, cost: Cost) -> bool:
        """Whether a cost is one whose tiles can be skipped."""
        return isinstance(cost, FactoredCost) and cost.shape == self.shape

    def pays(self) -> bool:
        """Whether tiles should be chosen for a single pass."""
        # They should not where most tiles were kept the last time: the choice would then cost more
        # than it saves. Sweeps choose once for many passes, and gain a second level.
        shares = self._memory.shares
        return not (shares and shares[-1] > _MOST_KEPT)

    def problem(self, given: LinearProblem, ranks: Ranks | None = None) -> TileProblem:
        """Bring a linear problem into blocks, whose tiles ranks choose together."""
        cost = given.cost
        assert isinstance(cost, FactoredCost)
        if self._memory.orders is None:
            orders = block_orders(cost, (self.width, self.width))
            self._memory.orders = orders[::-1] if self._swapped else orders
        orders = self._memory.orders
        orders = orders[::-1] if self._swapped else orders
        return tile_problem(cost, given.marginals, given.epsilon, orders, ranks)

    def lists(self, problem: TileProblem, u: Tensor, v: Tensor, slack: float = 0.0) -> TileLists:
        """Choose the tiles of known potentials."""
        return self.record(problem, problem.keep(u, v, slack))

    def softmin_lists(self, problem: TileProblem, v: Tensor) -> TileLists:
        """Choose the tiles of a half-step, from the potentials of the columns."""
        return self.record(problem, problem.keep(problem.row_bound(v), v, 0.0))

    def record(self, problem: TileProblem, kept: Tensor) -> TileLists:
        """Make the lists of a table of kept tiles, and remember their share."""
        lists = TileLists.of(kept, self.width)
        self._memory.shares.append(lists.share)
        self._memory.bound = max(self._memory.bound, skipped_share(problem.dtype))
        return lists

    def report(self) -> TileReport | None:
        """Say what was skipped, or nothing if there was nothing to choose."""
        shares = self._memory.shares
        if not shares:
            return None
        return TileReport(self._memory.bound, sum(shares) / len(shares), len(shares), self.width)


class Cut:
    """The rows of this rank, in whole pieces of whole blocks and about as many tiles as others."""

    def __init__(self, ranks: Ranks | None, start: Tensor, n: int, width: int) -> None:
        # ``start`` says where the list of each block begins, as in a walk
        parts, owned, rank = [slice(0, n)], [range(1)], 0
        if ranks is not None:
            parts, first, rank = pieces(n, width), start.tolist(), ranks.rank
            work = [first[-(-part.stop // width)] - first[part.start // width] for part in parts]
            owned = ranks.own(len(parts), work)
        ends = [0, *(parts[own.stop - 1].stop if own.stop else 0 for own in owned)]
        block_ends = [-(-end // width) for end in ends]
        self._ranks = ranks
        self._counts, self._block_counts = (
            [after - before for before, after in zip(these, these[1:], strict=False)]
            for these in (ends, block_ends)
        )
        self.rows = slice(ends[rank], ends[rank + 1])  # from the first of a block on
        self.own = slice(block_ends[rank], block_ends[rank + 1])  # selects the blocks
        self.blocks = range(block_ends[rank], block_ends[rank + 1])
        origin = self.rows.start  # of the pieces, as places within the rows
        self.pieces = [slice(parts[k].start - origin, parts[k].stop - origin) for k in owned[rank]]

    def join(self, own: Tensor) -> Tensor:
        """Join values of the rows of all ranks, (n, ...), given one's own."""
        return own if self._ranks is None else self._ranks.gather(own, self._counts)

    def join_blocks(self, own: Tensor) -> Tensor:
        """Join values of blocks, (blocks, ...), given those of one's own."""
        return own if self._ranks is None else self._ranks.gather(own, self._block_counts)
