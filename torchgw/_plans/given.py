"""Plans that are given: a matrix, or a few pairs of points."""

from typing import Any

import torch
from torch import Tensor

from torchgw._plans.contract import Anchors, Plan
from torchgw._tensors.draws import accumulate, categories_at, sample_categories


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
    def T(self) -> "StoredPlan":
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
    def T(self) -> "PairPlan":
        pairs = Anchors(*self.pairs[::-1])
        return PairPlan(pairs, self.mass, self.shape[::-1], distinct=self._distinct)

    def stored(self) -> Tensor:
        n, m = self.shape
        if self._distinct:
            matrix = self.mass.new_zeros(n, m)
            matrix[self.pairs] = self.mass
            return matrix
        flat = self.pairs.source * m + self.pairs.target
        return accumulate(flat, self.mass, n * m).reshape(n, m)

    def sample_at(self, places: Tensor, order: Tensor, generator: torch.Generator) -> Anchors:
        turn = order.argsort()[self.pairs.source].argsort()
        drawn = turn[categories_at(self.mass[turn], places)]
        return Anchors(self.pairs.source[drawn], self.pairs.target[drawn])

    def _product(self, table: Tensor) -> Tensor:
        terms = self.mass[:, None].to(table.dtype) * table[self.pairs.target]
        return accumulate(self.pairs.source, terms, self.shape[0])
