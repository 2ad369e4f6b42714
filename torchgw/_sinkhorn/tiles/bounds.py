"""Which tiles of a plan matter: points ordered into compact blocks, and a bound for each tile.

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
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._sinkhorn.problem import FactoredCost
from torchgw._tensors.block_order import Order, block_order
from torchgw._tensors.operations import average, lengths
from torchgw._tensors.ranks import Ranks
from torchgw._typing import Marginals, Potentials

# Skipped share of a row or column, in units of the rounding of the dtype: far less than what
# rounding of the exponents makes of a sum. [L201]
_DELTA = 16
# Entries of a temporary table on its way to the bounds. [L201]
_CHUNK = {"cpu": 2**20, "cuda": 2**26}
# Principal coordinates that points are ordered by. [L291]
_COORDINATES = 16
# Rounding of a bound, in units of the rounding of its largest term. [L201]
_ROUNDING = 16


class TileSide(NamedTuple):
    """One side of a cost in blocks, exponent units: left / epsilon, or right."""

    order: Order
    factors: Tensor  # (blocks, width, r)
    weight: Tensor  # (blocks, width), zero beyond the last point
    centre: Tensor  # (blocks, r), mean by weight
    reach: Tensor  # (blocks, r), largest distance to the centre along each coordinate

    @classmethod
    def of(cls, order: Order, factors: Tensor, weight: Tensor) -> "TileSide":
        """Bring the points of a side into blocks."""
        blocks, mass = order.split(factors), order.split(weight.to(factors.dtype), 0.0)
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
        v = self.columns.order.split((g.double() - self.column) / self.epsilon, -torch.inf)
        return u, v

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
        TileSide.of(orders[0], cost.left / epsilon, a),
        TileSide.of(orders[1], cost.right, b),
        cost.row.double(),
        cost.column.double(),
        epsilon,
        ranks,
    )


def block_orders(cost: FactoredCost, widths: tuple[int, int]) -> tuple[Order, Order]:
    """Order both sides by what moves the exponents."""
    # The distance of two points of a side is the root of the mean square, over the points of the
    # other side, of the difference of their costs.
    sides = (cost.left, cost.right), (cost.right, cost.left)
    orders = []
    for (own, other), width in zip(sides, widths, strict=True):
        own, other = own - average(own), other - average(other)
        size, axes = _axes(other.T @ other / len(other))
        metric = (axes * size.clamp_min(0).sqrt()).to(own.dtype)
        spread = own @ metric
        axes = _axes(spread.T @ spread)[1].to(own.dtype)
        orders.append(block_order(spread @ axes[:, -_COORDINATES:], width))
    return orders[0], orders[1]


def _axes(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Find the axes of a small symmetric matrix on the host: a GPU takes longer, and its start."""
    size, axes = torch.linalg.eigh(matrix.double().cpu())
    return size.to(matrix.device), axes.to(matrix.device)


def skipped_share(dtype: torch.dtype) -> float:
    """Choose delta: the share of a row or column that skipping may lose."""
    return _DELTA * torch.finfo(dtype).eps


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
    return bound.add_(_ROUNDING * torch.finfo(dtype).eps * size)


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
