"""Streamed Sinkhorn over the tiles that matter, by PyTorch operations.

Tiles and their bounds are in :mod:`torchgw._sinkhorn.tiles.tiling`. Problems are brought into
blocks and their results back, so that no caller sees the order.
"""

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from torchgw._sinkhorn.contract import Sweeper
from torchgw._sinkhorn.eager import sparse_sweeper, usable_sums
from torchgw._sinkhorn.problem import STRICT, exp_
from torchgw._sinkhorn.tiles.prepared import TiledProblem
from torchgw._sinkhorn.tiles.tiling import SLACK, Cut, TileLists, TileProblem
from torchgw._tensors.operations import sample_categories
from torchgw._tensors.ranks import Ranks
from torchgw._typing import Potentials

# A block of rows, its kept blocks of columns, and the sums over the rows, (columns, width).
Part = tuple[int, Tensor, Tensor]


class TiledEagerProblem(TiledProblem):
    """A problem whose tiles are computed by PyTorch operations."""

    # Each product and each draw chooses tiles of its own, without the margin that a sweep's have.

    @cached_property
    def tiles(self) -> TileProblem:
        """The problem in blocks."""
        return self.tiling.problem(self.problem, self.backend.ranks)

    def sweeper(self, start: Potentials) -> Sweeper:
        """Make sweeps over tiles, or over entries where these are few and yet in most tiles."""
        if self.problem.tau != STRICT:
            return self.whole.sweeper(start)
        if self.left_entries and self.tiling.storable:
            return self._all_tiles(start)
        sweeper = super().sweeper(start)
        # ranks share tiles, but would each go over all entries
        tiled = self.tiling.pays(self.problem.cost) or self.backend.ranks is not None
        sparse = None if tiled else sparse_sweeper(self.problem, start)
        self.left_entries = sparse is not None
        return sparse or sweeper

    def _all_tiles(self, start: Potentials) -> Sweeper:
        if not self.tiling.storable:
            return super()._all_tiles(start)
        # stored, as each of the hundreds of iterations to come would compute all entries again
        whole = self.backend.whole.prepare(self.problem._replace(cost=self.problem.cost.dense()))
        whole.left_entries, self.left_entries = self.left_entries, False
        return whole.sweeper(start)

    def _softmin(self, g: Tensor) -> Tensor:
        tiles, columns = self.tiles, self.tiles.columns
        weight = self.problem.marginals.b
        _, v = tiles.exponents(Potentials(tiles.row, torch.where(weight > 0, g, -torch.inf)))
        lists = self.tiling.softmin_lists(tiles, v)
        bias = (v + columns.order.split(weight.log().double(), -torch.inf)).to(tiles.dtype)
        result = bias.new_empty(tiles.rows.weight.shape)
        cut = self.cut(lists)
        for block, kept in _blocks(lists, cut.blocks):
            exponent = tiles.products(block, kept).add_(bias[kept].flatten())
            largest = exponent.amax(1)
            result[block] = largest + exp_(exponent.sub_(largest[:, None])).sum(1).log()
        joined = tiles.rows.order.join(cut.join_blocks(result[cut.own]).double())
        return (tiles.row - joined * self.problem.epsilon).to(g.dtype)

    def _apply(self, potentials: Potentials, values: Tensor) -> Tensor:
        tiles, columns = self.tiles, self.tiles.columns
        weighted = columns.order.split(values.to(tiles.dtype), 0.0) * columns.weight[..., None]
        result = weighted.new_zeros(*tiles.rows.weight.shape, values.shape[1])
        walk = _Walk(self, potentials)
        for block, kept, kernel in walk:
            torch.mm(kernel, weighted[kept].flatten(0, 1), out=result[block])
        product = tiles.rows.order.join(walk.cut.join_blocks(result[walk.cut.own])).to(values.dtype)
        return product * self.problem.marginals.a[:, None]

    def _topk(self, potentials: Potentials, k: int) -> tuple[Tensor, Tensor]:
        tiles, columns = self.tiles, self.tiles.columns
        m, device = self.problem.cost.shape[1], self.problem.cost.device
        points = columns.order.split(torch.arange(m, device=device))
        values = tiles.rows.weight.new_zeros(*tiles.rows.weight.shape, k)
        index = torch.zeros(values.shape, dtype=torch.int64, device=device)
        walk = _Walk(self, potentials)
        for block, kept, kernel in walk:
            entries = kernel * columns.weight[kept].flatten()
            count = min(k, entries.shape[1])
            best = entries.topk(count, dim=1)
            values[block, :, :count] = best.values
            index[block, :, :count] = points[kept].flatten()[best.indices]
        order, cut = tiles.rows.order, walk.cut
        values, index = (order.join(cut.join_blocks(x[cut.own])) for x in (values, index))
        return values, index

    def draw(self, potentials: Potentials, rows: Tensor, generator: torch.Generator) -> Tensor:
        if not self.tiling.pays(self.problem.cost):
            return self.whole.draw(potentials, rows, generator)
        tiles, order = self.tiles, self.tiles.columns.order
        place = tiles.rows.order.place[rows]
        result = torch.empty_like(rows)
        walk = _Walk(self, potentials)
        for block, kept in _blocks(walk.lists):
            here = (place // order.width == block).nonzero()[:, 0]
            if not len(here):
                continue
            kernel = walk.kernel(block, kept, place[here] % order.width)
            entries = kernel * tiles.columns.weight[kept].flatten()
            drawn = sample_categories(entries, 1, generator)[:, 0]
            result[here] = order.point[
                kept[drawn // order.width] * order.width + drawn % order.width
            ]
        return result


def _blocks(lists: TileLists, own: range | None = None) -> Iterator[tuple[int, Tensor]]:
    """Go through blocks of rows, or one's own, with the blocks of columns that each keeps."""
    for block, columns in enumerate(lists.column.split(lists.start.diff().tolist())):
        if len(columns) and (own is None or block in own):
            yield block, columns


class _Walk:
    """Kernels E_ij = exp(x_ij) of a plan, block by block."""

    def __init__(self, prepared: TiledEagerProblem, potentials: Potentials) -> None:
        self.tiles = prepared.tiles
        u, v = self.tiles.exponents(prepared.problem.marginals.mask(potentials, torch.float64))
        self.lists = prepared.tiling.lists(self.tiles, u, v)
        self.cut = prepared.cut(self.lists)
        self.u, self.v = u.to(self.tiles.dtype), v.to(self.tiles.dtype)

    def __iter__(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Go through one's own blocks of rows: which, its kept blocks of columns, E of these."""
        for block, kept in _blocks(self.lists, self.cut.blocks):
            yield block, kept, self.kernel(block, kept)

    def kernel(self, block: int, columns: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        """Compute E for rows of a block and some blocks of columns."""
        exponent = self.tiles.products(block, columns, rows)
        exponent.add_(self.v[columns].flatten()).add_(self.u[block, rows, None])
        return exp_(exponent)


class _EagerEngine:
    """Computes the kernel anew tile by tile, in float64 potentials of points in blocks."""

    slack = SLACK

    def __init__(self, prepared: TiledEagerProblem, start: Potentials) -> None:
        self.tiling, self.tiles = prepared.tiling, prepared.tiles
        self.rows, self.columns = self.tiles.rows, self.tiles.columns
        self.used = self.columns.weight > 0
        self.begin(start)
        self.choose()

    def begin(self, start: Potentials) -> None:
        self.u, self.v = self.tiles.exponents(start)

    def choose(self) -> None:
        self.chosen = self.u, self.v
        self.lists = self.tiling.lists(self.tiles, self.u, self.v, SLACK)

    def rise(self, v: Tensor) -> Tensor:
        if self.lists.share == 1:
            return torch.zeros_like(v[0, 0])
        return self.tiles.rise((self.u, v), self.chosen)

    def _used(self) -> tuple[Tensor, Tensor]:
        """Take the potentials of points with mass, in the dtype of the cost."""
        u, v = self.tiles.used(self.u, self.v)
        return u.to(self.tiles.dtype), v.to(self.tiles.dtype)

    def update_rows(self) -> None:
        """Take the half-step from v to u, and keep what its rows add to each column."""
        # Sums of points without mass are one, so that they stay where they are.
        self._row_sum = torch.ones_like(self.rows.weight)
        self._parts: list[Part] = []
        for block, kept, kernel, total in self._row_sums():
            weight = self.rows.weight[block]
            self._row_sum[block] = torch.where(weight > 0, total, 1.0)
            step = torch.where(weight > 0, weight / total, 0.0)
            self._parts.append((block, kept, torch.mv(kernel.T, step).view(len(kept), -1)))
        self.u = self.u - self._row_sum.double().log()

    def _row_sums(self, own: range | None = None) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """Go through blocks of rows: which, its kept blocks of columns, the kernel, its sums."""
        u, v = self._used()
        for block, kept in _blocks(self.lists, own):
            exponent = self.tiles.products(block, kept).add_(v[kept].flatten())
            kernel = exp_(exponent.add_(u[block, :, None]))
            yield block, kept, kernel, torch.mv(kernel, self.columns.weight[kept].flatten())

    def update_columns(self) -> tuple[Tensor, Tensor]:
        self._column_sum = self._column_sums()
        self._after = self.v - self._column_sum.double().log()
        return self.v, self._after

    def usable(self) -> Tensor:
        return usable_sums(self._row_sum) & usable_sums(self._column_sum)

    def masses(self) -> tuple[Tensor, Tensor, Tensor]:
        rows, columns = (side.weight.sum(1).double() for side in (self.rows, self.columns))
        masses = rows.new_zeros(len(rows), len(columns))
        for block, kept, sums in self._parts:
            masses[block, kept] = (sums * self.columns.weight[kept]).sum(1).double()
        return masses, rows, columns

    def scale_rows(self, scaling: Tensor) -> Tensor:
        scaled = self.v - self._column_sums(scaling).double().log()
        self.u = self.u + scaling[:, None] * (self.rows.weight > 0)
        return torch.where(torch.isfinite(scaled), scaled, self._after)

    def move_columns(self, v: Tensor) -> None:
        self.v = v

    def f(self, u: Tensor) -> Tensor:
        return self.rows.order.join(u) * self.tiles.epsilon + self.tiles.row

    def g(self, v: Tensor) -> Tensor:
        return self.columns.order.join(v) * self.tiles.epsilon + self.tiles.column

    def _column_sums(self, scaling: Tensor | None = None) -> Tensor:
        """Add up the column sums of diag(a) E, with the rows of whole blocks scaled."""
        result = torch.zeros_like(self.columns.weight)
        for block, kept, sums in self._parts:
            result.index_add_(0, kept, sums if scaling is None else sums * scaling[block].exp())
        return result.masked_fill_(self.columns.weight == 0, 1.0)


class _SharedEngine(_EagerEngine):
    """Shares the tiles among ranks: by blocks of rows in one half-step, of columns in the other."""

    # Column sums are made by whole columns, from entries that are computed once more: sums over the
    # rows of one rank would have to be added up over the ranks.

    def __init__(self, prepared: TiledEagerProblem, start: Potentials, ranks: Ranks) -> None:
        self._ranks = ranks
        super().__init__(prepared, start)

    def choose(self) -> None:
        self.chosen = self.u, self.v
        kept = self.tiles.keep(self.u, self.v, SLACK)
        self.lists = self.tiling.record(self.tiles, kept)
        self._across = TileLists.of(kept.T, self.lists.width)
        self._cut, self._cut_across = (
            Cut(self._ranks, lists.start, len(side.order.point), lists.width)
            for lists, side in ((self.lists, self.rows), (self._across, self.columns))
        )

    def update_rows(self) -> None:
        sums = torch.ones_like(self.rows.weight)
        for block, _, _, total in self._row_sums(self._cut.blocks):
            sums[block] = torch.where(self.rows.weight[block] > 0, total, 1.0)
        self._row_sum = self._cut.join_blocks(sums[self._cut.own])
        self.u = self.u - self._row_sum.double().log()

    def update_columns(self) -> tuple[Tensor, Tensor]:
        """Take the half-step from u, and keep what each block of rows adds to one's own columns."""
        turned, weight = self.tiles.T, self.rows.weight
        u, v = self._used()
        self._parts = []
        for block, kept in _blocks(self._across, self._cut_across.blocks):
            exponent = turned.products(block, kept).add_(u[kept].flatten())
            kernel = exp_(exponent.add_(v[block, :, None])).mul_(weight[kept].flatten())
            self._parts.append((block, kept, kernel.unflatten(1, (len(kept), -1)).sum(2)))
        return super().update_columns()

    def masses(self) -> tuple[Tensor, Tensor, Tensor]:
        rows, columns = (side.weight.sum(1).double() for side in (self.rows, self.columns))
        masses = rows.new_zeros(len(columns), len(rows))
        for block, kept, sums in self._parts:
            masses[block, kept] = (sums.T @ self.columns.weight[block]).double()
        return self._cut_across.join_blocks(masses[self._cut_across.own]).T, rows, columns

    def _column_sums(self, scaling: Tensor | None = None) -> Tensor:
        result = torch.zeros_like(self.columns.weight)
        for block, kept, sums in self._parts:
            result[block] = (sums if scaling is None else sums * scaling[kept].exp()).sum(1)
        return self._cut_across.join_blocks(result[self._cut_across.own]).masked_fill_(
            self.columns.weight == 0, 1.0
        )


TiledEagerProblem.engines = _EagerEngine, _SharedEngine
