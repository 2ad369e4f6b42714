"""Pairs of points: the random state of the sampled gradient, and matchings."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Anchors",
    "PairPlan",
    "accumulate",
    "categories_at",
    "places",
    "replace_slots",
    "sample_categories",
    "spread_slots",
]

# torch.multinomial refuses more categories than this.
_MULTINOMIAL_LIMIT = 2**24


class Anchors(NamedTuple):
    """Pairs (source[s], target[s]) drawn from a plan, with repetition.

    Those of a sampled gradient come in strata: slots 2t and 2t + 1 hold independent draws from
    stratum t, see :func:`places`.
    """

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
    shape = (*weights.shape[:-1], count)
    uniform = torch.rand(shape, dtype=torch.float64, device=weights.device, generator=generator)
    return categories_at(weights, uniform)


def categories_at(weights: Tensor, places: Tensor) -> Tensor:
    """Return the categories at places of the cumulative weight, the inverse distribution function.

    Parameters
    ----------
    weights : Tensor, shape (c,) or (rows, c)
        Non-negative; every row has a positive sum.
    places : Tensor, shape (s,) or (rows, s)
        In [0, 1).

    Returns
    -------
    Tensor of int64, shape (s,) or (rows, s)
    """
    cumulative = weights.double().cumsum(-1)
    total = cumulative[..., -1:]
    # rounding must not reach the total, beyond which there is nothing
    sought = (places * total).minimum(total.nextafter(torch.zeros_like(total)))
    # right=True never selects a category of zero weight, whose cumulative sum repeats
    return torch.searchsorted(cumulative, sought, right=True)


def places(slots: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw a place in [0, 1) for each slot, two independent ones in each of equal strata.

    Stratum t is [2t, 2t + 2) / count; where ``count`` is odd the last one is half as wide and has
    one place. Over all slots the places are uniform: so the mean over points at these places of the
    cumulative weight has no bias, and along an order in which neighbours are alike far less
    variance than that over independent draws. The two of a stratum show how much.

    Parameters
    ----------
    slots : Tensor of int64, shape (s,)
        Within 0 and count - 1.
    count : int
    generator : torch.Generator
        On the device of ``slots``.
    """
    uniform = torch.rand(len(slots), dtype=torch.float64, device=slots.device, generator=generator)
    first = slots - slots % 2
    return (first + (count - first).clamp(max=2) * uniform) / count


def spread_slots(count: int, total: int, generator: torch.Generator) -> Tensor:
    """Draw ``count`` distinct slots of ``total``, at equal steps."""
    device = generator.device
    offset = torch.rand((), dtype=torch.float64, device=device, generator=generator)
    steps = torch.arange(count, dtype=torch.float64, device=device) + offset
    return (steps * (total / max(1, count))).long().clamp_(max=total - 1)


def replace_slots(kept: Anchors, slots: Tensor, fresh: Anchors) -> Anchors:
    """Put fresh anchors into some slots.

    This is momentum on the plan, P <- (1 - share) P + share P_new, carried out on the sample:
    ``share`` is the number of slots over the size of ``kept``.
    """
    return Anchors(*(old.index_copy(0, slots, new) for old, new in zip(kept, fresh, strict=True)))


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

    def sample_at(self, places: Tensor, order: Tensor, generator: torch.Generator) -> Anchors:
        """Draw pairs whose source points are at places of the cumulative mass along an order."""
        turn = order.argsort()[self.pairs.source].argsort()
        drawn = turn[categories_at(self.mass[turn], places)]
        return Anchors(self.pairs.source[drawn], self.pairs.target[drawn])
