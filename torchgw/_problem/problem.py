"""A Gromov-Wasserstein problem: two spaces, weights, alpha, linear cost, loss."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchgw._problem.cross_terms import BothWays, Cross, MinimumCross, ProductCross
from torchgw._problem.losses import SQUARE, Loss
from torchgw._sinkhorn.problem import Cost
from torchgw._typing import Marginals
from torchgw.distances.base import DistanceProvider, both_ways


@dataclass(frozen=True)
class Problem:
    """What is asked: two metric spaces with weights, how they are compared, and a linear cost."""

    source: DistanceProvider  # (n, n)
    target: DistanceProvider  # (m, m)
    marginals: Marginals  # float64
    alpha: float  # weight of the quadratic term; 1 is pure Gromov-Wasserstein
    linear: Cost | None  # (n, m) linear cost M, stored or in factors
    loss: Loss = SQUARE

    def to(self, dtype: torch.dtype) -> "Problem":
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
        """Make the cross term of stored distances, the mean over both ways of directed ones."""
        crossed = self.crossed()
        made: list[Cross]
        if crossed is None:
            made = [
                MinimumCross(*map(stored_matrix, way))
                for way in both_ways(self.source, self.target)
            ]
        elif all(side.directed for side in crossed):
            (x, back_x), (y, back_y) = (map(stored_matrix, side.ways()) for side in crossed)
            made = [ProductCross(x, back_y), ProductCross(back_x, y)]
        else:
            # a symmetric side sees the mean of the other over both directions
            made = [ProductCross(*map(stored_matrix, crossed))]
        return made[0] if len(made) == 1 else BothWays(*made)

    @property
    def directed(self) -> bool:
        """Whether costs of either side differ with the direction."""
        return self.source.directed or self.target.directed

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the distances."""
        return self.source.dtype


def stored_matrix(provider: DistanceProvider) -> Tensor:
    """Read the whole table of a provider, building it if it is not stored."""
    matrix = provider.matrix()
    if matrix is None:
        return provider.columns(torch.arange(provider.n, device=provider.device))
    return matrix
