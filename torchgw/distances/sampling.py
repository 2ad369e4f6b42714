"""Spread-out points of a space, with the mass nearest to each."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchgw._tensors.draws import accumulate
from torchgw.distances.base import DistanceProvider

__all__ = [
    "ColumnReader",
    "SpreadPoints",
    "choose_points",
    "column_reader",
    "draw_points",
    "ran_out",
    "uniform_draws",
    "without_surplus",
]

# Power of the distance to the points so far that a point is drawn in proportion to: large enough to
# spread them evenly, small enough not to collect outliers.
_SPREAD = 4
# Weight, relative to the largest, of points that are left out: float32 could not hold their plan.
_NEGLIGIBLE = 1e-12


class ColumnReader(Protocol):
    """What can be asked for columns of distances: a provider, or the tensors that it reads."""

    def columns(self, index: Tensor) -> Tensor:
        """Return D[:, index], shape (n, s)."""


class StoredColumns(NamedTuple):
    """The reader of a stored table."""

    matrix: Tensor  # (n, n)

    def columns(self, index: Tensor) -> Tensor:
        """Return D[:, index], a view of gathered rows."""
        return self.matrix[index].T


class SpreadPoints(NamedTuple):
    """Some points of one side, float64. The first of them are a coarser choice."""

    indices: Tensor  # (s,) int64, which points these are
    table: Tensor  # (s, s) distances among them, symmetric
    weights: Tensor  # (s,) mass of the points nearest to each, total one
    square: Tensor  # () mean squared distance of all points to the nearest of them


class _Drawn(NamedTuple):
    """A coarse side as drawn, which has to be checked."""

    side: SpreadPoints
    counts: Tensor  # (2,) int64: points of positive weight; points drawn that are no duplicates


def column_reader(provider: DistanceProvider) -> ColumnReader:
    """Return what a provider reads its columns from: a named tuple, or itself if it has none."""
    matrix = provider.matrix()
    return (provider.factors() or provider) if matrix is None else StoredColumns(matrix)


def choose_points(provider: DistanceProvider, weights: Tensor, size: int) -> SpreadPoints:
    """Draw spread-out points in rounds; all those of positive weight if there are no more.

    The columns of a round are read together, and each round doubles the points, so that there are
    few rounds. A fixed seed draws them: exact solves do not depend on ``random_state``.
    """
    drawn = draw_points(size, 0, provider, weights, uniform_draws(provider, size, 0))
    used, distinct = drawn.counts.tolist()
    if not ran_out(provider.n, size, used, distinct):
        return drawn.side
    return without_surplus(provider, weights, drawn.side, size, (used, distinct))


def ran_out(n: int, size: int, used: int, distinct: int) -> bool:
    """Whether fewer points are to be had than were drawn."""
    return used <= size < n or min(n, size) > distinct


def without_surplus(
    provider: DistanceProvider,
    weights: Tensor,
    drawn: SpreadPoints,
    size: int,
    counts: tuple[int, int],
) -> SpreadPoints:
    """Return a side without the points that were drawn for want of others."""
    used, distinct = counts
    weights = _cut(weights)
    if used <= size:
        return _all_points(provider, weights, weights.nonzero()[:, 0])
    index = drawn.indices[:distinct]
    return _nearest(weights, index, provider.columns(index))


def _cut(weights: Tensor) -> Tensor:
    """Return weights of total one, without negligible ones."""
    weights = torch.where(weights > _NEGLIGIBLE * weights.max(), weights, 0.0)
    return weights / weights.sum()


def uniform_draws(provider: DistanceProvider, size: int, seed: int) -> Tensor:
    """Return the random numbers that draw at most ``size`` points, (rounds, n) float64."""
    rounds = math.ceil(math.log2(size)) if provider.n > size else 0
    generator = torch.Generator(device=provider.device).manual_seed(seed)
    return torch.rand(
        rounds, provider.n, dtype=torch.float64, device=provider.device, generator=generator
    )


def draw_points(
    size: int, first: int, provider: ColumnReader, weights: Tensor, uniform: Tensor
) -> _Drawn:
    """Draw spread-out points, beginning with that of number ``first``.

    When the points of positive weight that duplicate no other are used up, others follow.
    """
    weights = _cut(weights)
    positive = weights > 0
    used = positive.sum()
    if len(weights) <= size:
        index = torch.arange(len(weights), device=weights.device)
        return _Drawn(_all_points(provider, weights, index), torch.stack([used, used]))
    number = positive.cumsum(0) - 1
    index = (positive & (number == first % used)).byte().argmax()[None]
    columns = [provider.columns(index)]
    closest, distinct = columns[0].amin(1), torch.ones_like(used)
    for logarithm in uniform.log():
        share = weights * closest.double().clamp_min(0).pow(_SPREAD)
        # approximate distances may keep a point away from itself
        share = share.index_fill(0, index, 0.0)
        share = share / share.amax().clamp_min(torch.finfo(share.dtype).tiny)
        # the largest of log(u) / share are a draw without replacement
        # (Efraimidis and Spirakis 2006)
        keys = torch.where(share > 0, logarithm / share, -torch.inf)
        values, fresh = keys.topk(min(size - len(index), len(index)))
        distinct = distinct + (values > -torch.inf).sum()
        index = torch.cat([index, fresh])
        columns.append(provider.columns(fresh))
        closest = torch.minimum(closest, columns[-1].amin(1))
    side = _nearest(weights, index, torch.cat(columns, dim=1))
    return _Drawn(side, torch.stack([used, distinct]))


def _all_points(provider: ColumnReader, weights: Tensor, index: Tensor) -> SpreadPoints:
    """Return the side of all points that have a weight."""
    table = provider.columns(index)[index].double()
    square = torch.zeros_like(weights[0])
    return SpreadPoints(index, (table + table.T) / 2, weights[index], square)


def _nearest(weights: Tensor, index: Tensor, columns: Tensor) -> SpreadPoints:
    """Return the side of some points, given their columns: each has the mass nearest to it."""
    closest, nearest = columns.min(1)
    # approximate distances may put a point nearer to another than to itself
    nearest = nearest.index_copy(0, index, torch.arange(len(index), device=index.device))
    mass = accumulate(nearest, weights, len(index))
    square = weights @ closest.double().square()
    table = columns[index].double()
    return SpreadPoints(index, (table + table.T) / 2, mass, square)
