"""A Gromov-Wasserstein problem: two spaces, weights, alpha, linear cost, loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchgw._problem.cross_terms import Cross, MinimumCross, ProductCross
from torchgw._problem.losses import SQUARE, Loss
from torchgw._sinkhorn.cost import Cost
from torchgw._typing import Marginals
from torchgw.distances.base import DistanceProvider

__all__ = ["Problem", "stored_matrix"]


@dataclass(frozen=True)
class Problem:
    """What is asked: two metric spaces with weights, and a linear term."""

    source: DistanceProvider  # (n, n)
    target: DistanceProvider  # (m, m)
    marginals: Marginals  # float64
    alpha: float  # weight of the quadratic term; 1 is pure Gromov-Wasserstein
    linear: Cost | None  # (n, m) linear cost M, stored or in factors
    loss: Loss = SQUARE

    def to(self, dtype: torch.dtype) -> Problem:
        """Return the problem with its distances and linear cost in another dtype."""
        return Problem(
            self.source.to(self.source.device, dtype),
            self.target.to(self.target.device, dtype),
            self.marginals,
            self.alpha,
            None if self.linear is None else self.linear.to(dtype),
            self.loss,
        )

    def crossed(self) -> tuple[DistanceProvider, DistanceProvider] | None:
        """Pair the functions of the distances whose product the loss's cross term is, if it is."""
        return self.loss.crossed(self.source, self.target)

    def cross(self) -> Cross:
        """Return the cross term of stored distances."""
        crossed = self.crossed()
        if crossed is None:
            return MinimumCross(stored_matrix(self.source), stored_matrix(self.target))
        return ProductCross(*map(stored_matrix, crossed))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the distances."""
        return self.source.dtype


def stored_matrix(provider: DistanceProvider) -> Tensor:
    """Return the whole table of a provider, building it if need be."""
    matrix = provider.matrix()
    if matrix is None:
        return provider.columns(torch.arange(provider.n, device=provider.device))
    return matrix
