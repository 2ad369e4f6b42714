"""Plans that are given: a matrix, a few pairs of points, or the largest entries that a file has."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import scipy
import torch
from torch import Tensor

from torchgw._boundary.checks import check_draw, check_threshold
from torchgw._errors import UnsupportedError
from torchgw._plans.contract import Anchors, Plan, handed_out
from torchgw._plans.transport import DualPlan, TransportPlan
from torchgw._sinkhorn.eager import EagerBackend
from torchgw._tensors.operations import accumulate, categories_at, sample_categories, sparse_tensor
from torchgw._typing import Indices, Marginals, Potentials, Seed


class _GivenPlan(Plan):
    """A plan for gradients alone: products have the dtype of the values, which are trusted."""

    def __matmul__(self, values: Any) -> Tensor:
        product = self._product(values.reshape(len(values), -1))
        return product.reshape(self.shape[0], *values.shape[1:])


class StoredPlan(_GivenPlan):
    """A matrix (n, m): one that the user gave, or a plan that is being polished."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix

    def _like(self) -> Tensor:
        return self.matrix

    @property
    def T(self) -> StoredPlan:
        return StoredPlan(self.matrix.T)

    def stored(self) -> Tensor:
        return self.matrix

    def _product(self, table: Tensor) -> Tensor:
        return self.matrix.to(table.dtype) @ table

    def _block(self, index: Tensor | slice) -> Tensor:
        return self.matrix[index]

    def _row_masses(self) -> Tensor:
        return self.matrix.sum(1)

    def _partners(self, source: Tensor, generator: torch.Generator) -> Tensor:
        return sample_categories(self.matrix[source], 1, generator)[:, 0]


def places_in(index: Tensor, size: int) -> Tensor:
    """Say where in an index each of some points is; -1 for those that are not."""
    place = torch.full((size,), -1, device=index.device)
    place[index] = torch.arange(len(index), device=index.device)
    return place


class PairPlan(_GivenPlan):
    """Pairs of points with masses (p,), as a matching or a coarse problem's optimum has them."""

    # If pairs are known to be `distinct`, they need no sort, whose code takes 100 ms to load on a
    # GPU. [L1020]

    def __init__(
        self, pairs: Anchors, mass: Tensor, shape: tuple[int, int], *, distinct: bool = False
    ) -> None:
        self.pairs, self.mass, self._shape, self._distinct = pairs, mass, shape, distinct

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    def _like(self) -> Tensor:
        return self.mass

    @property
    def T(self) -> PairPlan:
        pairs = Anchors(*self.pairs[::-1])
        return PairPlan(pairs, self.mass, self.shape[::-1], distinct=self._distinct)

    def among(self, kept: Indices) -> PairPlan:
        """Keep the pairs of some points of both sides, (k,) and (l,), scaled to a mass of one."""
        source, target = (
            places_in(index, size)[side]
            for index, size, side in zip(kept, self.shape, self.pairs, strict=True)
        )
        inside = (source >= 0) & (target >= 0)
        pairs, mass = Anchors(source[inside], target[inside]), self.mass[inside]
        shape = len(kept.source), len(kept.target)
        return PairPlan(pairs, mass / mass.sum(), shape, distinct=self._distinct)

    def stored(self) -> Tensor:
        n, m = self.shape
        if self._distinct:
            matrix = self.mass.new_zeros(n, m)
            matrix[self.pairs] = self.mass
            return matrix
        return accumulate(self.pairs.source * m + self.pairs.target, self.mass, n * m).reshape(n, m)

    def sample_at(self, places: Tensor, order: Tensor, generator: torch.Generator) -> Anchors:
        turn = order.argsort()[self.pairs.source].argsort()
        drawn = turn[categories_at(self.mass[turn], places)]
        return Anchors(self.pairs.source[drawn], self.pairs.target[drawn])

    def _product(self, table: Tensor) -> Tensor:
        terms = self.mass[:, None].to(table.dtype) * table[self.pairs.target]
        return accumulate(self.pairs.source, terms, self.shape[0])


class SparsePlan(DualPlan):
    """The largest entries of each row of a plan; others count as zero.

    What :func:`torchgw.load` returns for a result whose cost was a stored matrix, unless it was
    saved with ``dense=True``. It is read like a :class:`torchgw.TransportPlan`, of the entries that
    are kept; the cost is gone, and with it :meth:`rounded`.

    Parameters
    ----------
    entries : Tensor, sparse COO, shape (n, m), float64
    potentials : Potentials
    marginals : Marginals
    epsilon : float
    """

    _unmapped = (
        "have no entry in this sparse plan, so they are mapped nowhere. Save the result with "
        "`result.save(path, dense=True)`."
    )

    def __init__(
        self, entries: Tensor, potentials: Potentials, marginals: Marginals, epsilon: float
    ) -> None:
        self.entries = entries.coalesce()
        values, places = self.entries.values(), self.entries.indices()
        self.masses = Marginals(
            *(
                values.new_zeros(size).index_add_(0, place, values)
                for place, size in zip(places, self.shape, strict=True)
            )
        )
        self.potentials, self.weights, self.epsilon = potentials, marginals, epsilon
        self.backend = EagerBackend()

    @classmethod
    def of(cls, plan: TransportPlan, k: int, share: float) -> SparsePlan:
        """Keep of each row the k largest entries that carry at least ``share`` of its mass."""
        values, columns = plan.giving(in_numpy=False).topk(min(k, plan.shape[1]))
        kept = values >= share * values.sum(1, keepdim=True)
        rows = torch.arange(plan.shape[0], device=plan.device)[:, None].expand_as(columns)
        places = torch.stack([rows[kept], columns[kept]])
        entries = sparse_tensor(places, values[kept].double(), plan.shape)
        return cls(entries, plan.potentials, plan.weights, plan.epsilon)

    @property
    def cost(self) -> NoReturn:
        """Refuse: only the largest entries of the plan were stored."""
        raise UnsupportedError(
            "This plan was stored by its largest entries, without its cost. Save the result with "
            "`result.save(path, dense=True)`."
        )

    def _like(self) -> Tensor:
        return self.entries

    @property
    def T(self) -> SparsePlan:
        (f, g), (a, b) = self.potentials, self.weights
        turned = SparsePlan(self.entries.t(), Potentials(g, f), Marginals(b, a), self.epsilon)
        return turned.giving(self.in_numpy)

    def replaced(
        self, potentials: Potentials, weights: Marginals, masses: Marginals | None = None
    ) -> SparsePlan:
        """Return the plan of other potentials and weights, its entries scaled accordingly."""
        values, places = self.entries.values(), self.entries.indices()
        sides = zip(places, potentials, self.potentials, weights, self.weights, strict=True)
        for place, now, before, weight, old in sides:
            share = torch.where(old > 0, weight / old, 0.0)
            values = values * (share * ((now - before) / self.epsilon).exp())[place]
        entries = sparse_tensor(places, values, self.shape)
        return SparsePlan(entries, potentials, weights, self.epsilon)

    def __repr__(self) -> str:
        """Say what the plan is."""
        return (
            f"SparsePlan(shape={self.shape}, epsilon={self.epsilon:.4g}, "
            f"{self.entries.values().numel():,} entries, {self.dtype}, {self.device})"
        )

    @handed_out
    def sample(self, count: int, random_state: Seed | None = None) -> Anchors:
        generator = check_draw(count, random_state, self.device)
        drawn = sample_categories(self.entries.values(), count, generator)
        source, target = self.entries.indices()[:, drawn]
        return Anchors(source, target)

    def stored(self) -> Tensor:
        return self.entries.to_dense()

    def to_sparse(self, k: int | None = None, threshold: float = 1e-4) -> scipy.sparse.csr_array:
        """Return the entries, or those that :meth:`torchgw.TransportPlan.to_sparse` keeps."""
        if k is not None:
            return super().to_sparse(k)
        check_threshold(threshold)
        rows, columns = self.entries.indices().cpu().numpy()
        data = self.entries.values().cpu().numpy()
        mass, largest = np.bincount(rows, data, minlength=self.shape[0]), np.zeros(self.shape[0])
        np.maximum.at(largest, rows, data)
        kept = (data >= threshold * mass[rows]) | (data == largest[rows])
        return scipy.sparse.csr_array((data[kept], (rows[kept], columns[kept])), shape=self.shape)

    def rounded(self, a: Any = None, b: Any = None) -> NoReturn:
        """Refuse: rounding works on the whole plan."""
        raise UnsupportedError(
            "A plan stored by its largest entries cannot be rounded to marginals. Save the "
            "result with `result.save(path, dense=True)`."
        )

    def _product(self, table: Tensor) -> Tensor:
        return torch.sparse.mm(self.entries, table.contiguous())

    def _largest(self, k: int) -> tuple[Tensor, Tensor]:
        """Find the k largest entries of each row, of the entries alone if all rows have so many."""
        rows, columns = self.entries.indices()
        count = torch.bincount(rows, minlength=self.shape[0])
        if int(count.min()) < k:
            return super()._largest(k)
        place = torch.arange(len(rows), device=self.device) - (count.cumsum(0) - count)[rows]
        values = self.entries.values().new_full((self.shape[0], int(count.max())), -torch.inf)
        values[rows, place] = self.entries.values()
        table = torch.zeros_like(values, dtype=torch.int64)
        table[rows, place] = columns
        best = values.topk(k, dim=1)
        return best.values, table.gather(1, best.indices)

    def _block(self, index: Tensor | slice) -> Tensor:
        if isinstance(index, slice):
            index = torch.arange(*index.indices(self.shape[0]), device=self.device)
        return self.entries.index_select(0, index).to_dense()
