"""A Gromov-Wasserstein problem: two spaces, weights, alpha, linear cost, loss."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchgw._problem.cross_terms import BothWays, Cross, MinimumCross, ProductCross
from torchgw._problem.losses import SQUARE, Loss
from torchgw._sinkhorn.cost import Cost
from torchgw._typing import Marginals
from torchgw.distances.base import DistanceProvider
from torchgw.distances.directed import DirectedDistance


@dataclass(frozen=True)
class Problem:
    """What is asked: two metric spaces with weights, how they are compared, and a linear cost."""

    source: DistanceProvider  # (n, n)
    target: DistanceProvider  # (m, m)
    marginals: Marginals  # float64
    alpha: float  # weight of the quadratic term; 1 is pure Gromov-Wasserstein
    linear: Cost | None  # (n, m) linear cost M, stored or in factors
    loss: Loss = SQUARE

    def to(self, dtype: torch.dtype) -> Problem:
        """Convert the distances and the linear cost to another dtype."""
        return replace(
            self,
            source=self.source.to(self.source.device, dtype),
            target=self.target.to(self.target.device, dtype),
            linear=None if self.linear is None else self.linear.to(dtype),
        )

    def crossed(self) -> tuple[DistanceProvider, DistanceProvider] | None:
        """Pair the functions of the distances whose product the cross term is, if it is one."""
        return self.loss.crossed(self.source, self.target)

    def cross(self) -> Cross:
        """Make the cross term of stored distances."""
        crossed = self.crossed()
        if crossed is None:
            x, y = map(costs_of, (self.source, self.target))
            if self.directed:
                return BothWays(MinimumCross(x, y), MinimumCross(x.T, y.T))
            return MinimumCross(x, y)
        if not all(side.directed for side in crossed):
            # a symmetric side sees the mean of the other over both directions
            return ProductCross(*map(stored_matrix, crossed))
        x, y = map(costs_of, crossed)
        return BothWays(ProductCross(x, y.T), ProductCross(x.T, y))

    @property
    def directed(self) -> bool:
        """Whether costs of either side differ with the direction."""
        return self.source.directed or self.target.directed

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the distances."""
        return self.source.dtype


def costs_of(provider: DistanceProvider) -> Tensor:
    """Read the costs of a provider, with their direction if it has one."""
    return provider.table if isinstance(provider, DirectedDistance) else stored_matrix(provider)


def stored_matrix(provider: DistanceProvider) -> Tensor:
    """Read the whole table of a provider, building it if it is not stored."""
    matrix = provider.matrix()
    if matrix is None:
        return provider.columns(torch.arange(provider.n, device=provider.device))
    return matrix
