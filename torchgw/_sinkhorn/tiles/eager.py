"""Streamed Sinkhorn over the tiles that matter, by PyTorch operations.

Tiles and their bounds are in :mod:`torchgw._sinkhorn.tiles.bounds`. The backend brings a problem
into blocks and
its results back, so that no caller sees the order.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from torchgw._sinkhorn.anderson import Anderson
from torchgw._sinkhorn.contract import Sweep, Sweeper
from torchgw._sinkhorn.cost import exp_
from torchgw._sinkhorn.eager import EagerBackend, usable_sums
from torchgw._sinkhorn.softmin import checked
from torchgw._sinkhorn.tiles.block_scaling import block_scaling
from torchgw._sinkhorn.tiles.bounds import TileLists, TileProblem
from torchgw._sinkhorn.tiles.prepared import TiledProblem
from torchgw._sinkhorn.tiles.tiling import SLACK
from torchgw._tensors.draws import sample_categories
from torchgw._typing import Potentials

__all__ = ["LINEAR", "Stagnation", "TiledEagerProblem"]

# Largest log-scaling of a block at which an iteration is near enough to linear to be extrapolated.
LINEAR = 2.0

# Rises of the error after which the second level is given up: where blocks hold many clusters, or
# points have hardly a partner, scaling whole blocks does not help, and over-relaxation does.
_MOST_RISES = 2

# A block of rows, its kept blocks of columns, and the sums over the rows, (columns, width).
Part = tuple[int, Tensor, Tensor]


class TiledEagerProblem(TiledProblem):
    """A problem whose tiles are computed by PyTorch operations.

    Tiles are chosen anew for each pass: on a CPU that takes less than the tiles of a margin.
    """

    @cached_property
    def tiles(self) -> TileProblem:
        """The problem in blocks."""
        return self.tiling.problem(self.problem)

    def _tiled_sweeper(self, start: Potentials) -> Sweeper:
        return _TiledSweeper(self, start)

    def _softmin(self, g: Tensor) -> Tensor:
        tiles, columns = self.tiles, self.tiles.columns
        weight = self.problem.marginals.b
        masked = torch.where(weight > 0, g, -torch.inf)
        _, v = tiles.exponents(Potentials(tiles.row, masked))
        lists = self.tiling.softmin_lists(tiles, v)
        bias = (v + columns.order.split(weight.log().double(), -torch.inf)).to(tiles.dtype)
        result = bias.new_empty(tiles.rows.weight.shape)
        for block, kept in _blocks(lists):
            exponent = tiles.products(block, kept).add_(bias[kept].flatten())
            largest = exponent.amax(1)
            total = exp_(exponent.sub_(largest[:, None])).sum(1)
            result[block] = largest + total.log()
        joined = tiles.rows.order.join(result.double())
        return (tiles.row - joined * self.problem.epsilon).to(g.dtype)

    def _apply(self, potentials: Potentials, values: Tensor) -> Tensor:
        tiles, columns = self.tiles, self.tiles.columns
        weighted = columns.order.split(values.to(tiles.dtype), 0.0) * columns.weight[..., None]
        result = weighted.new_zeros(*tiles.rows.weight.shape, values.shape[1])
        for block, kept, kernel in self._kernels(potentials):
            torch.mm(kernel, weighted[kept].flatten(0, 1), out=result[block])
        product = tiles.rows.order.join(result).to(values.dtype)
        return product * self.problem.marginals.a[:, None]

    def _topk(self, potentials: Potentials, k: int) -> tuple[Tensor, Tensor]:
        tiles, columns = self.tiles, self.tiles.columns
        m, device = self.problem.cost.shape[1], self.problem.cost.device
        points = columns.order.split(torch.arange(m, device=device))
        values = tiles.rows.weight.new_zeros(*tiles.rows.weight.shape, k)
        index = torch.zeros(values.shape, dtype=torch.int64, device=device)
        for block, kept, kernel in self._kernels(potentials):
            entries = kernel * columns.weight[kept].flatten()
            count = min(k, entries.shape[1])
            best = entries.topk(count, dim=1)
            values[block, :, :count] = best.values
            index[block, :, :count] = points[kept].flatten()[best.indices]
        return tiles.rows.order.join(values), tiles.rows.order.join(index)

    def draw(self, potentials: Potentials, rows: Tensor, generator: torch.Generator) -> Tensor:
        """Draw one column from each of ``rows``, from the tiles that matter."""
        if not self.tiling.pays():
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

    def _kernels(self, potentials: Potentials) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Go through the blocks of rows: which one, its kept blocks of columns, and E of these."""
        walk = _Walk(self, potentials)
        for block, kept in _blocks(walk.lists):
            yield block, kept, walk.kernel(block, kept)


def _blocks(lists: TileLists) -> Iterator[tuple[int, Tensor]]:
    """Go through the blocks of rows with the blocks of columns that each keeps, if any."""
    counts = lists.start.diff().tolist()
    for block, columns in enumerate(lists.column.split(counts)):
        if len(columns):
            yield block, columns


class _Walk:
    """Kernels E_ij = exp(x_ij) of a plan, block by block."""

    def __init__(self, prepared: TiledEagerProblem, potentials: Potentials) -> None:
        self.tiles = prepared.tiles
        u, v = self.tiles.exponents(prepared.problem.marginals.mask(potentials))
        self.lists = prepared.tiling.lists(self.tiles, u, v)
        self.u, self.v = u.to(self.tiles.dtype), v.to(self.tiles.dtype)

    def kernel(self, block: int, columns: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        """Compute E for rows of a block and some blocks of columns."""
        exponent = self.tiles.products(block, columns, rows)
        exponent.add_(self.v[columns].flatten()).add_(self.u[block, rows, None])
        return exp_(exponent)


class Stagnation:
    """Tells when an iteration has stopped getting better."""

    def __init__(self) -> None:
        self._last, self._rises = float("inf"), 0

    def after(self, error: float) -> bool:
        """Return whether it has, given the next error."""
        self._rises += error >= self._last
        self._last = error
        return self._rises >= _MOST_RISES


class _TiledSweeper:
    """Recomputes the kernel tile by tile; scales whole blocks between iterations.

    Where that stops getting better it goes on with one level over all tiles.
    """

    def __init__(self, prepared: TiledEagerProblem, start: Potentials) -> None:
        self._prepared = prepared
        self._plain: Sweeper | None = None
        self._stagnation = Stagnation()
        self.problem = prepared.tiles
        self.rows, self.columns = self.problem.rows, self.problem.columns
        self.acceleration = Anderson()
        self._choose(*self.problem.exponents(start))

    @property
    def two_level(self) -> bool:
        """Whether blocks are still scaled."""
        return self._plain is None

    def _choose(self, u: Tensor, v: Tensor) -> None:
        """Choose the tiles near some potentials."""
        self.chosen = u, v
        self.lists = self._prepared.tiling.lists(self.problem, u, v, SLACK)

    def __call__(self, start: Potentials, count: int, relaxation: float = 1.0) -> Sweep:
        """Run iterations, each followed by a scaling of whole blocks, without relaxation."""
        if self._plain is not None:
            return self._plain(start, count, relaxation)
        given, problem = self._prepared.problem, self.problem
        u, v = problem.exponents(start)
        ok = torch.ones((), dtype=torch.bool, device=u.device)
        for _ in range(count):
            if self._rise(u, v) > SLACK:
                self._choose(u, v)
            row_sum, parts = self._half_step(u, v)
            u = u - row_sum.double().log()
            if SLACK < self._rise(u, v) < torch.inf:
                # sums over too few tiles: their potentials are too large, and keep enough of them
                self._choose(u, v)
                row_sum, parts = self._half_step(u, v)
                u = u - row_sum.double().log()
            column_sum = self._column_sum(parts)
            plain = v - column_sum.double().log()
            ok = ok & usable_sums(row_sum) & usable_sums(column_sum)
            ok = ok & (self._rise(u, torch.maximum(v, plain)) <= SLACK)
            before, after = Potentials(u, v), Potentials(u, plain)
            scaling = self._block_scaling(parts)
            scaled = v - self._column_sum(parts, scaling).double().log()
            u = u + scaling[:, None] * (self.rows.weight > 0)
            scaled = torch.where(torch.isfinite(scaled), scaled, plain)
            if scaling.abs().max() > LINEAR:
                self.acceleration = Anderson()
                v = scaled
            else:
                v = self._extrapolate(v, scaled)
        f, g = problem.potentials(*before)
        g_next = problem.potentials(*after).g
        check = checked(ok, g, g_next, given.marginals.b, given.epsilon)
        state = problem.potentials(u, v)
        if self._stagnation.after(float(check[1])):
            # hundreds of iterations follow, each of which would make all entries again
            if self._prepared.tiling.storable:
                given = given._replace(cost=given.cost.dense())
            self._plain = EagerBackend().prepare(given).sweeper(state)
        return Sweep(f, g, g_next, state, check)

    def _extrapolate(self, v: Tensor, image: Tensor) -> Tensor:
        """Return the next potentials of the columns, from those before and what followed."""
        used = self.columns.weight > 0
        point, image_used = (torch.where(used, x, 0.0) for x in (v, image))
        return torch.where(used, self.acceleration.next(point, image_used), image)

    def _rise(self, u: Tensor, v: Tensor) -> Tensor:
        """Return how far the potentials have risen since the tiles were chosen, if it matters."""
        if self.lists.share == 1:
            return torch.zeros_like(u[0, 0])
        rises = [
            (now - before).masked_fill_(side.weight == 0, -torch.inf).amax()
            for now, before, side in zip(
                (u, v), self.chosen, (self.rows, self.columns), strict=True
            )
        ]
        return rises[0] + rises[1]

    def _half_step(self, u: Tensor, v: Tensor) -> tuple[Tensor, list[Part]]:
        """Return the row sums of E diag(b), and by block what the new rows add to each column.

        Sums of points without mass are one, so that they stay where they are.
        """
        rows, columns = self.rows, self.columns
        u, v = (
            torch.where(side.weight > 0, x, -torch.inf).to(self.problem.dtype)
            for side, x in ((rows, u), (columns, v))
        )
        row_sum = torch.ones_like(rows.weight)
        parts = []
        for block, kept in _blocks(self.lists):
            exponent = self.problem.products(block, kept).add_(v[kept].flatten())
            kernel = exp_(exponent.add_(u[block, :, None]))
            total = torch.mv(kernel, columns.weight[kept].flatten())
            used = rows.weight[block] > 0
            row_sum[block] = torch.where(used, total, 1.0)
            step = torch.where(used, rows.weight[block] / total, 0.0)
            parts.append((block, kept, torch.mv(kernel.T, step).view(len(kept), -1)))
        return row_sum, parts

    def _column_sum(self, parts: list[Part], scaling: Tensor | None = None) -> Tensor:
        """Return the column sums of E diag(a), with the rows of whole blocks scaled."""
        result = torch.zeros_like(self.columns.weight)
        for block, kept, sums in parts:
            result.index_add_(0, kept, sums if scaling is None else sums * scaling[block].exp())
        return result.masked_fill_(self.columns.weight == 0, 1.0)

    def _block_scaling(self, parts: list[Part]) -> Tensor:
        masses = self.lists.start.new_zeros(
            len(self.rows.weight), len(self.columns.weight), dtype=torch.float64
        )
        for block, kept, sums in parts:
            masses[block, kept] = (sums * self.columns.weight[kept]).sum(1).double()
        return block_scaling(
            masses, self.rows.weight.sum(1).double(), self.columns.weight.sum(1).double()
        )
