"""A plan that is a matrix, as one is given by the user or met while polishing."""

from __future__ import annotations

import torch
from torch import Tensor

from torchgw._plans.pairs import Anchors
from torchgw._tensors.draws import categories_at, sample_categories

__all__ = ["StoredPlan"]


class StoredPlan:
    """A given (n, m) coupling, with the few operations by which a gradient reads a plan."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix

    @property
    def T(self) -> StoredPlan:  # noqa: N802 - the name of every array library
        """The coupling from target to source."""
        return StoredPlan(self.matrix.T)

    def __matmul__(self, values: Tensor) -> Tensor:
        """Return plan @ values."""
        return self.matrix.to(values.dtype) @ values

    def stored(self) -> Tensor:
        """Return the matrix."""
        return self.matrix

    def sample_at(self, places: Tensor, order: Tensor, generator: torch.Generator) -> Anchors:
        """Draw pairs whose source points are at places of the cumulative mass along an order."""
        source = order[categories_at(self.matrix.sum(1)[order], places)]
        target = sample_categories(self.matrix[source], 1, generator)[:, 0]
        return Anchors(source, target)
