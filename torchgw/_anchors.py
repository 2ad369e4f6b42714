"""Pairs of points: the random state of the sampled gradient, and matchings."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Anchors", "PairPlan", "accumulate", "redraw", "sample_categories"]

# torch.multinomial refuses more categories than this.
_MULTINOMIAL_LIMIT = 2**24


class Anchors(NamedTuple):
    """Pairs (source[s], target[s]) drawn from a plan, with repetition."""

    source: Tensor  # (s,) int64
    target: Tensor  # (s,) int64


def sample_categories(weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw ``count`` categories per row, with repetition, in proportion to the weights.

    Parameters
    ----------
    weights : Tensor, shape (c,) or (rows, c)
        Non-negative; every row has a positive sum.
    count : int
    generator : torch.Generator
        On the device of ``weights``.

    Returns
    -------
    Tensor of int64, shape (count,) or (rows, count)
    """
    if weights.shape[-1] <= _MULTINOMIAL_LIMIT:
        return torch.multinomial(weights, count, replacement=True, generator=generator)
    cumulative = weights.double().cumsum(-1)
    shape = (*weights.shape[:-1], count)
    uniform = torch.rand(shape, dtype=torch.float64, device=weights.device, generator=generator)
    # right=True never selects a category of zero weight, whose cumulative sum repeats
    drawn = torch.searchsorted(cumulative, uniform * cumulative[..., -1:], right=True)
    return drawn.clamp_(max=weights.shape[-1] - 1)


def redraw(kept: Anchors, fresh: Anchors, generator: torch.Generator) -> Anchors:
    """Replace a random subset of the kept anchors by the fresh ones.

    This is momentum on the plan, P <- (1 - share) P + share P_new, carried out on the sample:
    ``share`` is the size of ``fresh`` over the size of ``kept``.
    """
    count = kept.source.shape[0]
    order = torch.randperm(count, device=kept.source.device, generator=generator)
    survivors = order[: count - fresh.source.shape[0]]
    return Anchors(
        torch.cat([kept.source[survivors], fresh.source]),
        torch.cat([kept.target[survivors], fresh.target]),
    )


def accumulate(index: Tensor, values: Tensor, size: int) -> Tensor:
    """Return the sums of values (p, ...) that share an index (p,), shape (size, ...).

    The order of additions, and so every bit, is the same each time.
    """
    result = values.new_zeros(size, *values.shape[1:])
    if values.is_cuda:
        # index_add_ adds by atomics there, in any order; this sorts first
        return result.index_put_((index,), values, accumulate=True)
    return result.index_add_(0, index, values)


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

    def sample(self, count: int, generator: torch.Generator) -> Anchors:
        """Draw pairs, with repetition."""
        drawn = sample_categories(self.mass, count, generator)
        return Anchors(self.pairs.source[drawn], self.pairs.target[drawn])
