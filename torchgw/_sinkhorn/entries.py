"""Linear problems on listed entries: costs, half-steps and plans of the pairs that may hold mass.

All other entries are exactly zero, and neither read nor computed: time and memory are those of the
list, in rows for one half-step and in columns for the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import scipy
import torch
from torch import Tensor

from torchgw._sinkhorn.blocks import RestrictedBackend, RestrictedProblem
from torchgw._sinkhorn.contract import Kernel, PreparedProblem, Sweeper
from torchgw._sinkhorn.eager import StoredSweeper
from torchgw._sinkhorn.problem import Cost, DenseCost, LinearProblem, block_height, exp_
from torchgw._tensors.operations import csr_tensor
from torchgw._typing import Indices, Marginals, Potentials

# Entries of the rows that a half-step takes at a time: some MB, which a cache holds. [L1459]
_PIECE = 2**20
# Time that a listed pair takes, in those of a streamed one, iterations until marginals are met
# included. [L1606]
_PRICE = 10.0


@dataclass(frozen=True, eq=False)
class Entries:
    """Pairs of points that may hold mass, listed row by row, columns ascending."""

    start: Tensor  # (n + 1,) int32, where each row begins in ``column``
    column: Tensor  # (k,) int32
    width: int  # m

    @classmethod
    def of(cls, listed: scipy.sparse.csr_array, device: torch.device) -> Entries:
        """Read the places of a sparse matrix."""
        listed.sort_indices()
        start, column = (
            torch.from_numpy(part.astype(np.int32, copy=False)).to(device)
            for part in (listed.indptr, listed.indices)
        )
        return cls(start, column, listed.shape[1])

    def listed(self) -> scipy.sparse.csr_array:
        """Write them as a sparse matrix of True."""
        start, column = (part.cpu().numpy() for part in (self.start, self.column))
        return scipy.sparse.csr_array(
            (np.ones(len(column), dtype=bool), column, start), shape=self.shape
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave behind what follows from the list, for pickle and deepcopy."""
        return Entries, (self.start, self.column, self.width)

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m)."""
        return len(self.start) - 1, self.width

    @cached_property
    def turned(self) -> tuple[Entries, Tensor]:
        """The same entries listed by columns, and the place of each in the list by rows, (k,)."""
        # SciPy counts, which takes a tenth of the time of sorting
        listed = self.listed()
        by_column = scipy.sparse.csr_array(
            (np.arange(listed.nnz, dtype=np.int32), listed.indices, listed.indptr), shape=self.shape
        ).tocsc()
        device = self.start.device
        start, row, order = (
            torch.from_numpy(part.astype(np.int32, copy=False)).to(device)
            for part in (by_column.indptr, by_column.indices, by_column.data)
        )
        return Entries(start, row, self.shape[0]), order

    @property
    def T(self) -> Entries:  # noqa: N802 - the name of every array library
        """The entries with source and target exchanged."""
        return self.turned[0]

    def partners(self) -> Tensor:
        """Count the target points allowed for each source point, (n,) int64."""
        return self.start.diff().long()

    def of_rows(self, index: Tensor) -> tuple[Entries, Tensor]:
        """List the entries of some rows (s,), and the place of each in this list."""
        first, count = self.start[:-1].long()[index], self.partners()[index]
        ends = torch.cat([count.new_zeros(1), count.cumsum(0)])
        moved = (first - ends[:-1]).repeat_interleave(count)
        places = moved + torch.arange(len(moved), device=moved.device)
        return Entries(ends.int(), self.column[places], self.width), places

    def rows(self, part: slice) -> Entries:
        """Keep the entries of some source points."""
        return self.of_rows(torch.arange(*part.indices(self.shape[0]), device=self.start.device))[0]

    def at(self, kept: Indices) -> Entries:
        """Keep the entries between some points of both sides."""
        source, target = (side.cpu().numpy() for side in kept)
        return Entries.of(self.listed()[source][:, target], self.start.device)

    def total(self) -> int:
        """Count the entries."""
        return len(self.column)

    def work(self) -> float:
        """Count the pairs of points whose streaming takes as long as these."""
        return _PRICE * self.total()

    def hold(self, pairs: Indices) -> Tensor:
        """Tell which pairs may hold mass, (k,) bool."""
        # SciPy makes the arrays that it is given writeable
        source, target = (side.cpu().numpy().copy() for side in pairs)
        inside = np.asarray(self.listed()[source, target]).ravel()
        return torch.from_numpy(inside).to(self.start.device)

    def prepare(self, problem: LinearProblem, backend: RestrictedBackend) -> PreparedProblem:
        """Prepare a linear problem on them."""
        return EntryProblem(problem, backend)

    def costs(self, cost: Cost) -> Tensor:
        """Read a cost at the entries, (k,)."""
        if isinstance(cost, DenseCost):
            return cost.matrix[
                self.per_row(torch.arange(self.shape[0], device=cost.device)), self.column
            ]
        products = self.products(cost.left, cost.right)
        return products.neg_().add_(self.per_row(cost.row)).add_(self.per_column(cost.column))

    def products(self, left: Tensor, right: Tensor) -> Tensor:
        """Compute left . right of each entry, (k,), for tables (n, r) and (m, r)."""
        if left.shape[1] == 0:
            return left.new_zeros(len(self.column))
        nothing = self.matrix(left.new_zeros(len(self.column)))
        found: Tensor = torch.sparse.sampled_addmm(nothing, left, right.T, beta=0.0).values()
        return found

    def matrix(self, values: Tensor) -> Tensor:
        """Make a sparse matrix (n, m) of values of the entries, (k,)."""
        return csr_tensor(self.start, self.column, values, self.shape)

    def per_row(self, values: Tensor) -> Tensor:
        """Repeat values of source points (n,) for each of their entries, (k,)."""
        return values.to(self.start.device).repeat_interleave(self.partners())

    def per_column(self, values: Tensor) -> Tensor:
        """Repeat values of target points (m,) for each of their entries, (k,)."""
        return values.index_select(0, self.column)

    def pieces(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Go through rows: which, which entries are theirs, and where each begins among these."""
        n, _ = self.shape
        height = max(1, n * _PIECE // max(1, len(self.column)))
        for first in range(0, n, height):
            start = self.start[first : first + height + 1].long()
            begin, end = int(start[0]), int(start[-1])
            yield slice(first, min(first + height, n)), slice(begin, end), start - begin


class EntryProblem(RestrictedProblem):
    """A linear problem whose plans have mass at listed entries alone."""

    def __init__(
        self, problem: LinearProblem, backend: RestrictedBackend, costs: Tensor | None = None
    ) -> None:
        super().__init__(problem, backend)
        assert isinstance(backend.restriction, Entries)
        self.entries, self._known = backend.restriction, costs

    @cached_property
    def costs(self) -> Tensor:
        """The cost of each entry, (k,)."""
        return self.entries.costs(self.problem.cost) if self._known is None else self._known

    @cached_property
    def T(self) -> PreparedProblem:
        entries, order = self.entries.turned
        backend = RestrictedBackend(self.restricted.whole, entries)
        return EntryProblem(self.problem.T, backend, self.costs.index_select(0, order))

    def softmin(self, potential: Tensor, axis: int) -> Tensor:
        """Compute a half-step over the entries; zero for a point whose partners weigh nothing."""
        if axis == 0:
            return self.T.softmin(potential, axis=1)
        cost, marginals, epsilon, _ = self.problem
        weighted = (potential + epsilon * marginals.log_b).to(cost.dtype)
        found = []
        for _, part, start in self.entries.pieces():
            exponent = weighted.index_select(0, self.entries.column[part])
            exponent = exponent.sub_(self.costs[part]).div_(epsilon)
            largest = torch.segment_reduce(exponent, "max", offsets=start)
            alone = largest == -math.inf
            largest = torch.where(alone, 0.0, largest)
            exponent.sub_(largest.repeat_interleave(start.diff()))
            total = torch.segment_reduce(exp_(exponent), "sum", offsets=start)
            found.append(largest + torch.where(alone, 1.0, total).log())
        return torch.cat(found).to(potential.dtype) * -epsilon

    def density(
        self, potentials: Potentials, marginals: Marginals | None = None, rows: Tensor | None = None
    ) -> Tensor:
        """Compute the density of a plan at all entries, (k,), or at those of some rows."""
        cost, weights, epsilon, _ = self.problem
        f, g = (marginals or weights).mask(potentials, cost.dtype)
        entries, costs = self.entries, self.costs
        if rows is not None:
            entries, places = entries.of_rows(rows)
            f, costs = f[rows], costs[places]
        return exp_(entries.per_row(f).add_(entries.per_column(g)).sub_(costs).div_(epsilon))

    def kernel(self, start: Potentials) -> Kernel:
        """Store the density at the entries, by rows and by columns."""
        density, (turned, order) = self.density(start), self.entries.turned
        rows, columns = self.entries.matrix(density), turned.matrix(density[order])
        return Kernel(
            lambda vector: (rows @ vector[:, None])[:, 0],
            lambda vector: (columns @ vector[:, None])[:, 0],
        )

    def sweeper(self, start: Potentials) -> Sweeper:
        return StoredSweeper(self.problem, start, self.kernel(start))

    def apply(self, potentials: Potentials, values: Tensor) -> Tensor:
        a, b = self.problem.marginals
        density = self.entries.matrix(self.density(potentials))
        product = density @ (b[:, None] * values).to(density.dtype)
        return product.to(values.dtype) * a[:, None]

    def block(self, potentials: Potentials, index: Tensor | slice) -> Tensor:
        """Compute rows of the plan, (s, m)."""
        a = self.problem.marginals.a
        density = self._conditional(potentials, index, self.problem.marginals)
        return density.mul_(a[index, None].to(density.dtype))

    def dense(self, potentials: Potentials) -> Tensor:
        return self.block(potentials, slice(None))

    def topk(self, potentials: Potentials, k: int) -> tuple[Tensor, Tensor]:
        n, a = self.problem.cost.shape[0], self.problem.marginals.a
        height, weights = block_height(self.problem.cost), self.problem.conditional.marginals
        best = [
            self._conditional(potentials, slice(first, first + height), weights).topk(k, dim=1)
            for first in range(0, n, height)
        ]
        values = torch.cat([part.values for part in best])
        return values * a[:, None].to(values.dtype), torch.cat([part.indices for part in best])

    def _conditional(
        self, potentials: Potentials, index: Tensor | slice, marginals: Marginals
    ) -> Tensor:
        """Compute rows of the plan over their weights, (s, m), zero where nothing is allowed."""
        n, m = self.problem.cost.shape
        if isinstance(index, slice):
            index = torch.arange(*index.indices(n), device=potentials.f.device)
        density = self.density(potentials, marginals, index)
        entries, _ = self.entries.of_rows(index)
        found = density.new_zeros(len(index), m)
        every = torch.arange(len(index), device=index.device)
        found[entries.per_row(every), entries.column] = density
        return found.mul_(self.problem.marginals.b.to(density.dtype))
