"""A coupling of a few pairs of points, and the plan that consists of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._tensors.draws import accumulate, categories_at

__all__ = ["Anchors", "PairPlan"]


class Anchors(NamedTuple):
    """Pairs (source[s], target[s]) drawn from a plan, with repetition.

    Those of a sampled gradient come in strata: slots 2t and 2t + 1 hold independent draws from
    stratum t, see :func:`places`.
    """

    source: Tensor  # (s,) int64
    target: Tensor  # (s,) int64


class PairPlan:
    """A coupling of a few pairs, with the operations by which a gradient reads a plan.

    Parameters
    ----------
    pairs : Anchors
        Source and target points, (p,) each; a pair that occurs twice has both masses.
    mass : Tensor, shape (p,)
        Non-negative, of total one.
    shape : tuple of int
        (n, m).
    """

    def __init__(self, pairs: Anchors, mass: Tensor, shape: tuple[int, int]) -> None:
        self.pairs = pairs
        self.mass = mass
        self.shape = shape

    @property
    def T(self) -> PairPlan:  # noqa: N802 - the name of every array library
        """The coupling from target to source."""
        return PairPlan(Anchors(*self.pairs[::-1]), self.mass, self.shape[::-1])

    def __matmul__(self, values: Tensor) -> Tensor:
        """Return plan @ values, values of shape (m, c)."""
        terms = self.mass[:, None].to(values.dtype) * values[self.pairs.target]
        return accumulate(self.pairs.source, terms, self.shape[0])

    def stored(self) -> Tensor:
        """Return the (n, m) matrix."""
        n, m = self.shape
        flat = self.pairs.source * m + self.pairs.target
        return accumulate(flat, self.mass, n * m).reshape(n, m)

    def sample_at(self, places: Tensor, order: Tensor, generator: torch.Generator) -> Anchors:
        """Draw pairs whose source points are at places of the cumulative mass along an order."""
        turn = order.argsort()[self.pairs.source].argsort()
        drawn = turn[categories_at(self.mass[turn], places)]
        return Anchors(self.pairs.source[drawn], self.pairs.target[drawn])
