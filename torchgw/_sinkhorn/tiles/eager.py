"""Streamed Sinkhorn over the tiles that matter, by PyTorch operations.

Tiles and their bounds are in :mod:`torchgw._sinkhorn.tiles.bounds`. The backend brings a problem
into blocks and
its results back, so that no caller sees the order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torchgw._sinkhorn.anderson import Anderson
from torchgw._sinkhorn.contract import STRICT, Sweep, Sweeper
from torchgw._sinkhorn.cost import Cost, exp_
from torchgw._sinkhorn.eager import EagerBackend, usable_sums
from torchgw._sinkhorn.softmin import checked
from torchgw._sinkhorn.tiles.block_scaling import block_scaling
from torchgw._sinkhorn.tiles.bounds import TileLists, skipped_share
from torchgw._sinkhorn.tiles.tiling import SLACK, Tiling
from torchgw._tensors.draws import sample_categories
from torchgw._typing import Marginals, Potentials

__all__ = ["LINEAR", "Stagnation", "TiledEagerBackend", "unsure_rows"]

# Largest log-scaling of a block at which an iteration is near enough to linear to be extrapolated.
LINEAR = 2.0

# Rises of the error after which the second level is given up: where blocks hold many clusters, or
# points have hardly a partner, scaling whole blocks does not help, and over-relaxation does.
_MOST_RISES = 2

# A block of rows, its kept blocks of columns, and the sums over the rows, (columns, width).
Part = tuple[int, Tensor, Tensor]


class TiledEagerBackend(EagerBackend):
    """PyTorch operations on the tiles of a plan that matter.

    Costs that the tiling does not fit are left to :class:`EagerBackend`.
    """

    def __init__(self, tiling: Tiling) -> None:
        self.tiling = tiling

    def transposed(self) -> TiledEagerBackend:
        """Return the backend for transposed costs."""
        return TiledEagerBackend(self.tiling.T)

    def softmin(
        self, cost: Cost, log_weight: Tensor, potential: Tensor, epsilon: float, axis: int
    ) -> Tensor:
        """Compute :func:`torchgw._sinkhorn.softmin.softmin`."""
        if not self.tiling.pays(cost):
            return super().softmin(cost, log_weight, potential, epsilon, axis)
        tiling, weight = self.tiling, log_weight.exp()
        if axis == 0:
            cost, tiling = cost.transpose(), tiling.T
        ones = torch.ones(cost.shape[0], dtype=weight.dtype, device=cost.device)
        problem = tiling.problem(cost, Marginals(ones, weight), epsilon)
        potential = torch.where(weight > 0, potential, -torch.inf)
        _, v = problem.exponents(Potentials(problem.row, potential))
        lists = tiling.softmin_lists(problem, v)
        bias = (v + problem.columns.order.split(log_weight.double(), -torch.inf)).to(cost.dtype)
        result = bias.new_empty(problem.rows.weight.shape)
        for block, columns in _blocks(lists):
            exponent = problem.products(block, columns).add_(bias[columns].flatten())
            largest = exponent.amax(1)
            total = exp_(exponent.sub_(largest[:, None])).sum(1)
            result[block] = largest + total.log()
        return (problem.row - problem.rows.order.join(result.double()) * epsilon).to(
            potential.dtype
        )

    def sweeper(
        self,
        cost: Cost,
        marginals: Marginals,
        start: Potentials,
        epsilon: float,
        *,
        tau: tuple[float, float] = STRICT,
    ) -> Sweeper:
        """Return sweeps over the tiles that matter near ``start``."""
        # two levels and the choice of tiles know strict marginals only
        if tau != STRICT or not self.tiling.fits(cost):
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
        """Return plan @ values, tile by tile."""
        if not self.tiling.pays(cost):
            return super().apply(cost, marginals, potentials, epsilon, values)
        walk = _Walk(self.tiling, cost, marginals, potentials, epsilon)
        columns = walk.problem.columns
        weighted = columns.order.split(values.to(cost.dtype), 0.0) * columns.weight[..., None]
        result = weighted.new_zeros(*walk.problem.rows.weight.shape, values.shape[1])
        for block, kept in _blocks(walk.lists):
            torch.mm(walk.kernel(block, kept), weighted[kept].flatten(0, 1), out=result[block])
        return walk.problem.rows.order.join(result).to(values.dtype) * marginals.a[:, None]

    def topk(
        self, cost: Cost, marginals: Marginals, potentials: Potentials, epsilon: float, k: int
    ) -> tuple[Tensor, Tensor]:
        """Return the k largest entries of each row, exactly.

        A row whose k-th entry is not larger than what a skipped tile may hold is searched as a
        whole.
        """
        if not self.tiling.pays(cost):
            return super().topk(cost, marginals, potentials, epsilon, k)
        conditional = Marginals(torch.ones_like(marginals.a), marginals.b)
        walk = _Walk(self.tiling, cost, conditional, potentials, epsilon)
        problem = walk.problem
        points = problem.columns.order.split(torch.arange(cost.shape[1], device=cost.device))
        values = problem.rows.weight.new_zeros(*problem.rows.weight.shape, k)
        index = torch.zeros(values.shape, dtype=torch.int64, device=values.device)
        for block, kept in _blocks(walk.lists):
            entries = walk.kernel(block, kept) * problem.columns.weight[kept].flatten()
            count = min(k, entries.shape[1])
            best = entries.topk(count, dim=1)
            values[block, :, :count] = best.values
            index[block, :, :count] = points[kept].flatten()[best.indices]
        values, index = problem.rows.order.join(values), problem.rows.order.join(index)
        unsure = unsure_rows(values, marginals, cost.dtype)
        if len(unsure):
            part = Marginals(conditional.a[unsure], marginals.b)
            rows = Potentials(potentials.f[unsure], potentials.g)
            whole = super().topk(cost.rows(unsure), part, rows, epsilon, k)
            values[unsure], index[unsure] = whole[0].to(values.dtype), whole[1]
        return values * marginals.a.to(values.dtype)[:, None], index

    def draw(
        self,
        cost: Cost,
        marginals: Marginals,
        potentials: Potentials,
        epsilon: float,
        rows: Tensor,
        generator: torch.Generator,
    ) -> Tensor:
        """Draw one column from each of ``rows``, from the tiles that matter."""
        if not self.tiling.pays(cost):
            return super().draw(cost, marginals, potentials, epsilon, rows, generator)
        walk = _Walk(self.tiling, cost, marginals, potentials, epsilon)
        order = walk.problem.columns.order
        place = walk.problem.rows.order.place[rows]
        result = torch.empty_like(rows)
        for block, kept in _blocks(walk.lists):
            here = (place // order.width == block).nonzero()[:, 0]
            if not len(here):
                continue
            kernel = walk.kernel(block, kept, place[here] % order.width)
            entries = kernel * walk.problem.columns.weight[kept].flatten()
            drawn = sample_categories(entries, 1, generator)[:, 0]
            result[here] = order.point[
                kept[drawn // order.width] * order.width + drawn % order.width
            ]
        return result


def unsure_rows(values: Tensor, marginals: Marginals, dtype: torch.dtype) -> Tensor:
    """Return the rows whose k-th entry is not larger than what a skipped tile may hold.

    ``values`` (n, k) are the largest entries of conditional rows, in the kept tiles.
    """
    least = skipped_share(dtype) * float(marginals.b.max())
    return (values[:, -1] <= least).nonzero()[:, 0]


def _blocks(lists: TileLists) -> Iterator[tuple[int, Tensor]]:
    """Go through the blocks of rows with the blocks of columns that each keeps, if any."""
    counts = lists.start.diff().tolist()
    for block, columns in enumerate(lists.column.split(counts)):
        if len(columns):
            yield block, columns


class _Walk:
    """Kernels E_ij = exp(x_ij) of a plan, block by block."""

    def __init__(
        self,
        tiling: Tiling,
        cost: Cost,
        marginals: Marginals,
        potentials: Potentials,
        epsilon: float,
    ) -> None:
        self.problem = tiling.problem(cost, marginals, epsilon)
        u, v = self.problem.exponents(marginals.mask(potentials))
        self.lists = tiling.lists(self.problem, u, v)
        self.u, self.v = u.to(cost.dtype), v.to(cost.dtype)

    def kernel(self, block: int, columns: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        """Return E for rows of a block and some blocks of columns."""
        exponent = self.problem.products(block, columns, rows)
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

    def __init__(
        self, tiling: Tiling, cost: Cost, marginals: Marginals, start: Potentials, epsilon: float
    ) -> None:
        self.tiling = tiling
        self._given = cost, marginals, epsilon
        self._plain: Sweeper | None = None
        self._stagnation = Stagnation()
        self.problem = tiling.problem(cost, marginals, epsilon)
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
        self.lists = self.tiling.lists(self.problem, u, v, SLACK)

    def __call__(self, start: Potentials, count: int, relaxation: float = 1.0) -> Sweep:
        """Run iterations, each followed by a scaling of whole blocks, without relaxation."""
        if self._plain is not None:
            return self._plain(start, count, relaxation)
        cost, marginals, epsilon = self._given
        problem = self.problem
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
        check = checked(ok, g, g_next, marginals.b, epsilon)
        state = problem.potentials(u, v)
        if self._stagnation.after(float(check[1])):
            # hundreds of iterations follow, each of which would make all entries again
            whole = cost.dense() if self.tiling.storable else cost
            self._plain = EagerBackend().sweeper(whole, marginals, state, epsilon)
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
