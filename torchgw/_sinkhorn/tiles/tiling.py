"""Which tiles of a plan matter, whether a solve skips the others, and how many it skipped.

A tile is the block of entries of one block of rows and one block of columns. In exponent units

    x_ij = u_i + v_j + left_i . right_j        u = (f - row) / epsilon, v = (g - column) / epsilon

is the logarithm of P_ij / (a_i b_j). With any centres c_I and d_J of the blocks,

    x_ij <= max_I (u_i + left_i . d_J) + max_J (v_j + c_I . (right_j - d_J)) + z_IJ
    z_IJ = sum_r max_I |left_ir - c_Ir| max_J |right_jr - d_Jr|                              (S1)

because left_i . right_j = left_i . d_J + c_I . (right_j - d_J) + (left_i - c_I) . (right_j - d_J).
Tiles whose bound is at most log(delta) hold at most the share delta of any row or column, since
sum_j b_j delta <= delta: equation (S2) of docs/algorithm.md.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._sinkhorn.problem import ROUNDINGS, Cost, FactoredCost, LinearProblem
from torchgw._tensors.block_order import Order, block_order
from torchgw._tensors.operations import average, lengths
from torchgw._tensors.ranks import Ranks, pieces
from torchgw._typing import Marginals, Potentials

# Entries of a temporary table on its way to the bounds: there are three in float64. [L201, L1435]
_CHUNK = {"cpu": 2**20, "cuda": 2**24}
# Principal coordinates that points are ordered by. [L291]
_COORDINATES = 16


class TileSide(NamedTuple):
    """One side of a cost in blocks, exponent units: left / epsilon, or right."""

    order: Order
    factors: Tensor  # (blocks, width, r)
    weight: Tensor  # (blocks, width), zero beyond the last point
    centre: Tensor  # (blocks, r), mean by weight
    reach: Tensor  # (blocks, r), largest distance to the centre along each coordinate

    @classmethod
    def of(cls, order: Order, factors: Tensor, weight: Tensor, unit: float = 1.0) -> "TileSide":
        """Bring the points of a side into blocks, their factors in some unit."""
        # a copy, and no second one in the unit
        blocks, mass = order.split(factors).div_(unit), order.split(weight.to(factors.dtype), 0.0)
        # where no point has mass any centre will do
        share = torch.where(mass.sum(1, keepdim=True) > 0, mass, 1.0)
        share = share / share.sum(1, keepdim=True)
        centre = torch.einsum("kwr,kw->kr", blocks, share)
        return cls(order, blocks, mass, centre, (blocks - centre[:, None]).abs_().amax(1))

    def at(self, blocks: slice) -> "TileSide":
        """Choose some blocks."""
        return TileSide(self.order, *(part[blocks] for part in self[1:]))


class TileLists(NamedTuple):
    """For each block of rows the blocks of columns that are kept, ascending."""

    start: Tensor  # (row blocks + 1,) int64, where each list begins in ``column``
    column: Tensor  # (kept,) int64
    share: float  # of all tiles that is kept
    width: int  # points of a block, of rows and of columns

    @classmethod
    def of(cls, kept: Tensor, width: int) -> "TileLists":
        """Make the lists of a table of kept tiles, shape (row blocks, column blocks), bool."""
        counts = kept.sum(1)
        start = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        # a copy at an aligned address, for which kernels are compiled
        column = kept.nonzero()[:, 1].clone()
        return cls(start, column, len(column) / kept.numel(), width)


class TileProblem(NamedTuple):
    """A factored cost whose points are in blocks; potentials come in and go out in exponents."""

    rows: TileSide
    columns: TileSide
    row: Tensor  # (n,) float64, part of the cost outside the products, cost units
    column: Tensor  # (m,)
    epsilon: float
    ranks: Ranks | None = None  # who choose the tiles of some rows each

    @property
    def T(self) -> "TileProblem":  # noqa: N802 - the name of every array library
        """The problem with source and target exchanged."""
        return self._replace(rows=self.columns, columns=self.rows, row=self.column, column=self.row)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the factors."""
        return self.rows.factors.dtype

    def products(self, block: int, columns: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        """Compute left . right for rows of a block and some blocks of columns, (rows, columns)."""
        return self.rows.factors[block, rows] @ self.columns.factors[columns].flatten(0, 1).T

    def exponents(self, potentials: Potentials) -> tuple[Tensor, Tensor]:
        """Compute u and v of (S1), float64, -inf where there is no point."""
        f, g = potentials
        u = self.rows.order.split((f.double() - self.row) / self.epsilon, -torch.inf)
        return u, self.columns.order.split((g.double() - self.column) / self.epsilon, -torch.inf)

    def used(self, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Take exponents of points with mass; those of others become -inf."""
        sides = (self.rows, u), (self.columns, v)
        u, v = (torch.where(side.weight > 0, x, -torch.inf) for side, x in sides)
        return u, v

    def rise(self, now: tuple[Tensor, Tensor], before: tuple[Tensor, Tensor]) -> Tensor:
        """Compute how far exponents of points with mass have risen, the most of both sides, ()."""
        first, second = (
            torch.where(side.weight > 0, new - old, -torch.inf).amax()
            for new, old, side in zip(now, before, (self.rows, self.columns), strict=True)
        )
        return first + second

    def keep(self, u: Tensor, v: Tensor, slack: float) -> Tensor:
        """Choose the tiles to keep, so that potentials may rise by ``slack`` in all."""
        # What is skipped then stays at most skipped_share of any row or column.
        least = math.log(skipped_share(self.dtype)) - slack
        u, v = self.used(u, v)
        return self._by_rows(
            lambda some: tile_bounds(self.rows.at(some), self.columns, u[some], v) > least,
            torch.empty(0, len(v), dtype=torch.bool, device=v.device),
        )

    def row_bound(self, v: Tensor) -> Tensor:
        """Bound from above the u that make the sums of rows one, (row blocks, width)."""
        return self._by_rows(
            lambda some: potential_bound(self.rows.at(some), self.columns, v), self.rows.weight[:0]
        )

    def _by_rows(self, compute: Callable[[slice], Tensor], empty: Tensor) -> Tensor:
        """Compute something of each block of rows, (blocks, ...); ranks share them."""
        blocks = len(self.rows.weight)
        if self.ranks is None:
            return compute(slice(0, blocks))
        return self.ranks.in_pieces(blocks, compute, empty)


def tile_problem(
    cost: FactoredCost,
    marginals: Marginals,
    epsilon: float,
    orders: tuple[Order, Order],
    ranks: Ranks | None = None,
) -> TileProblem:
    """Bring a cost into blocks."""
    a, b = marginals
    return TileProblem(
        TileSide.of(orders[0], cost.left, a, epsilon), TileSide.of(orders[1], cost.right, b),
        cost.row.double(), cost.column.double(), epsilon, ranks,
    )  # fmt: skip


def block_orders(cost: FactoredCost, widths: tuple[int, int]) -> tuple[Order, Order]:
    """Order both sides by what moves the exponents."""
    return side_orders((lambda: cost.left, lambda: cost.right), widths)


def side_orders(
    sides: Sequence[Callable[[], Tensor]], widths: tuple[int, int]
) -> tuple[Order, Order]:
    """Order both sides, whose factors in the cost are made when they are needed."""
    # The distance of two points of a side is the root of the mean square, over the points of the
    # other side, of the difference of their costs.
    spreads, orders = [_spread(side()) for side in sides], []
    for own, mine, other, width in zip(sides, spreads, spreads[::-1], widths, strict=True):
        size, axes = _axes(other)
        metric = axes * size.clamp_min(0).sqrt()
        metric = metric @ _axes(metric.T @ mine @ metric)[1][:, -_COORDINATES:]
        factors = own()
        # what they are turned to takes their place
        factors = factors @ metric.to(factors.dtype)
        orders.append(block_order(factors, width))
    return orders[0], orders[1]


def _spread(factors: Tensor) -> Tensor:
    """Compute the covariance of factors, float64."""
    mean = average(factors)
    return (factors.T @ factors / len(factors) - torch.outer(mean, mean)).double()


def _axes(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Find the axes of a small symmetric matrix on the host: a GPU takes longer, and its start."""
    size, axes = torch.linalg.eigh(matrix.double().cpu())
    return size.to(matrix.device), axes.to(matrix.device)


def skipped_share(dtype: torch.dtype) -> float:
    """Choose delta: the share of a row or column that skipping may lose."""
    return ROUNDINGS * torch.finfo(dtype).eps


def tile_bounds(rows: TileSide, columns: TileSide, u: Tensor, v: Tensor) -> Tensor:
    """Bound the exponents in each tile from above, (S1), rounding included: (blocks, blocks)."""
    # u (row blocks, width) and v (column blocks, width) are -inf where a point does not count.
    dtype = rows.factors.dtype
    u, v = u.to(dtype), v.to(dtype)
    bound = _largest(rows.factors, columns.centre, u)
    offset = columns.factors - columns.centre[:, None]
    bound += _largest(offset, rows.centre, v).T
    bound.addmm_(rows.reach, columns.reach.T)
    size = lengths(rows.factors, 2).max() * lengths(columns.factors, 2).max()
    for potential in (u, v):
        size = size + torch.where(torch.isfinite(potential), potential, 0.0).abs().max()
    return bound.add_(ROUNDINGS * torch.finfo(dtype).eps * size)


def _largest(factors: Tensor, centres: Tensor, potential: Tensor) -> Tensor:
    """Find the maximum over each block of potential + factors . centre, (blocks, centres)."""
    blocks, width, _ = factors.shape
    result = factors.new_empty(blocks, len(centres))
    height = max(1, _CHUNK.get(factors.device.type, _CHUNK["cpu"]) // (width * len(centres)))
    for begin in range(0, blocks, height):
        part = slice(begin, begin + height)
        table = torch.baddbmm(
            potential[part, :, None], factors[part], centres.T.expand(len(factors[part]), -1, -1)
        )
        torch.amax(table, 1, out=result[part])
    return result


def potential_bound(rows: TileSide, columns: TileSide, v: Tensor) -> Tensor:
    """Bound from above the u that make the sums of rows one, shape (row blocks, width)."""
    # The exponential is convex, so that over a block J of mass b(J) sum_J b_j exp(v_j + left_i .
    # right_j) >= b(J) exp(mean_J v + left_i . d_J), d_J and the mean taken by weight: a softmin's
    # tiles are chosen without knowing its outcome.
    mass = columns.weight.sum(1)
    level = torch.where(columns.weight > 0, v.to(columns.weight.dtype), 0.0)
    mean = (columns.weight * level).sum(1) / mass
    bias = torch.where(mass > 0, mean + mass.log(), -torch.inf)
    blocks, width, _ = rows.factors.shape
    result = rows.factors.new_empty(blocks, width)
    height = max(1, _CHUNK.get(mass.device.type, _CHUNK["cpu"]) // (width * len(mass)))
    for begin in range(0, blocks, height):
        part = slice(begin, begin + height)
        table = torch.matmul(rows.factors[part], columns.centre.T).add_(bias)
        result[part] = -table.logsumexp(2)
    return result


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
# Entries of a cost that an iteration goes over while tiles are chosen once, and while the problem
# between the blocks is solved by a step of Newton's. A CPU does either while it goes over few.
# [L1545]
_PRICES = {"cuda": (5e9, 2e9)}
# What an iteration over all tiles is taken to bring until some have been seen, as the logarithm of
# the error before over that after, and how many of them outweigh that. [L1545]
_USUAL_GAIN, _PRIOR = 0.05, 20
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
class Tally:
    """What iterations of one kind have cost so far, and what they have brought."""

    price: float = 0.0  # in iterations over all tiles
    gain: float = 0.0  # logarithms of the errors before over those after, added up

    def add(self, price: float, gain: float) -> None:
        """Add some iterations."""
        self.price += price
        self.gain += gain if math.isfinite(gain) else 0.0


@dataclass
class _Memory:
    """What a tiling and its transpose share."""

    orders: tuple[Order, Order] | None = None
    two_level: Tally = field(default_factory=Tally)
    one_level: Tally = field(default_factory=lambda: Tally(_PRIOR, _PRIOR * _USUAL_GAIN))
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

    def pays(self, cost: Cost) -> bool:
        """Whether tiles should be chosen for a single pass over a cost."""
        # They should not where most tiles were kept the last time, or the choice takes as long as
        # the pass, half of an iteration: it would cost more than it saves. Sweeps choose once for
        # many passes, and gain a second level. Passes in float64 take many times as long.
        shares, precise = self._memory.shares, cost.dtype == torch.float64
        price = 0.0 if precise else 2 * self.price(cost.device.type, 1, 0)
        return (shares[-1] if shares else 0.0) + price <= _MOST_KEPT

    @property
    def made(self) -> int:
        """How many lists of tiles have been made."""
        return len(self._memory.shares)

    @property
    def share(self) -> float:
        """The share of the tiles that the last list kept."""
        return self._memory.shares[-1]

    @property
    def tallies(self) -> tuple[Tally, Tally]:
        """Iterations of two levels, over chosen tiles, and of one, over all."""
        return self._memory.two_level, self._memory.one_level

    def two_levels_pay(self) -> bool:
        """Whether iterations of two levels have brought more for their price than others."""
        two, one = self.tallies
        return two.gain * one.price >= one.gain * two.price

    def price(self, device: str, choices: int, steps: int) -> float:
        """Count what some work beside half-steps costs, in iterations over all tiles."""
        # ``choices`` are of tiles, and ``steps`` of the problem between the blocks.
        choice, step = _PRICES.get(device, (0.0, 0.0))
        return (choices * choice + steps * step) / math.prod(self.shape)

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
