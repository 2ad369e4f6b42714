"""Mean distances by weight, and the problem as a sample of pairs can show it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgw._problem.losses import Loss, identity, sums
from torchgw._problem.problem import Problem
from torchgw._tensors.operations import categories_at
from torchgw._typing import Marginals
from torchgw.distances.base import BLOCK_ENTRIES, DistanceProvider, Entrywise
from torchgw.distances.sampling import choose_points

# A sum over all points takes so many columns as nodes, where each column is a run of shortest
# paths. [L111]
_QUADRATURE_COLUMNS = 96
# Columns from which it is judged which distances anchors can show, and anchors that are needed
# within a distance. [L256]
_VISIBLE_COLUMNS = 16
_FEWEST = 32
# Levels of a minimum, the columns that means at every level are taken over at most, and how far
# beyond the largest distance of some columns levels reach. [L262, L271]
_LEVELS = 64
_LEVEL_COLUMNS = 1024
_MARGIN = 1.05


class Levels(NamedTuple):
    """Levels up to ``reach``, at equal steps or cuts, which make a minimum a mean of products."""

    # min(x, y) is the integral over t of [x > t] [y > t], to half a step; cuts where all distances
    # of two small tables lie make it exact.

    reach: float
    steps: int
    cuts: Tensor | None = None  # (steps + 1,) ascending

    def part(self, side: int, distance: Tensor, parts: Tensor) -> Tensor:
        """Evaluate the factor of side 0 or 1, (..., s), in the products named by ``parts`` (s,)."""
        cut = (parts + 0.5) * (self.reach / self.steps) if self.cuts is None else self.cuts[parts]
        above = (distance > cut).to(distance.dtype)
        if side == 1:
            return above
        return above * (self.reach if self.cuts is None else self.cuts.diff()[parts] * self.steps)


@dataclass(frozen=True)
class SampledLoss(Loss):
    """A loss as a sample of pairs shows it: with a floor, or with a minimum cut into levels."""

    floor: float = 0.0  # target distances below it count as this in the cross term
    levels: Levels | None = None

    @classmethod
    def of(cls, loss: Loss, *, floor: float = 0.0, levels: Levels | None = None) -> Loss:
        """Bound the cross term of a loss from below, or cut it if it is a minimum."""
        parts: dict[str, Any] = {field.name: getattr(loss, field.name) for field in fields(Loss)}
        if loss.cross is None:
            return loss if levels is None else cls(**parts, levels=levels)
        if floor == 0:
            return loss
        near, far = loss.cross
        parts["cross"] = near, partial(_raised, far, floor)
        return cls(**parts, floor=floor)

    @property
    def parts(self) -> int:
        return 1 if self.levels is None else self.levels.steps

    def part(self, side: int, distance: Tensor, parts: Tensor) -> Tensor:
        if self.levels is None:
            return super().part(side, distance, parts)
        return self.levels.part(side, distance, parts)


def _raised(function: Entrywise, floor: float, distance: Tensor) -> Tensor:
    """Evaluate a function of distances, each at least the floor."""
    return function(distance.clamp_min(floor))


def visible(problem: Problem, n_anchors: int) -> Problem:
    """Limit the problem to what anchors show of it."""
    # Where a distance of zero is extreme, a few anchors would stand for the distance of every point
    # to itself, and others for none. Distances within which fewer than `_FEWEST` anchors lie, by
    # the median of some columns, count as the largest such. A minimum becomes a mean of products.
    loss = problem.loss
    if loss.cross is None:
        sides = (problem.source, problem.target)
        reach = min(map(_largest, sides, problem.marginals))
        return replace(problem, loss=SampledLoss.of(loss, levels=Levels(reach, _LEVELS)))
    if not loss.singular:
        return problem
    provider, weights = problem.target.ways()[0], problem.marginals.b
    index = _spaced(weights, _VISIBLE_COLUMNS)
    values, order = provider.columns(index).sort(dim=0)
    mass = weights[order].cumsum(0)
    share = mass.new_full((len(index), 1), _FEWEST / n_anchors)
    reached = torch.searchsorted(mass.T.contiguous(), share)[:, 0].clamp_(max=provider.n - 1)
    floor = values.gather(0, reached[None])
    return replace(problem, loss=SampledLoss.of(loss, floor=float(floor.median())))


def _largest(provider: DistanceProvider, weights: Tensor) -> float:
    """Find a bound of the distances, by some columns where columns are costly."""
    if provider.cheap_columns:
        return provider.maximum()
    nodes, _ = _quadrature(provider, weights)
    assert nodes is not None
    return _MARGIN * float(provider.columns(nodes).max())


def _spaced(weights: Tensor, count: int) -> Tensor:
    """Choose points at equal steps of the cumulative weight."""
    steps = torch.arange(count, dtype=weights.dtype, device=weights.device) + 0.5
    return categories_at(weights, steps / count)


def _quadrature(provider: DistanceProvider, weights: Tensor) -> tuple[Tensor | None, Tensor]:
    """Choose nodes, ``None`` for all points, and masses of a sum over all points by weight."""
    if provider.cheap_columns:
        return None, weights.to(provider.dtype)
    # each node counts with the weight of the points nearest to it
    nodes = choose_points(provider, weights, _QUADRATURE_COLUMNS)
    return nodes.indices, nodes.weights.to(provider.dtype)


def _moments(
    provider: DistanceProvider, weights: Tensor, functions: Sequence[Entrywise]
) -> list[Tensor]:
    """Compute function(D) @ w for each function, by :func:`_quadrature`."""
    nodes, mass = _quadrature(provider, weights)
    if nodes is None:
        return [sums(provider, function, mass) for function in functions]
    columns = provider.columns(nodes)
    return [function(columns) @ mass for function in functions]


class MeanDistances(NamedTuple):
    """The mean distances that a sampled cost has for control variates, and how they were found."""

    nodes: Tensor | None  # points summed over; None is all of them
    mass: Tensor
    values: Tensor  # (n, r) means of each part of the cross term

    @classmethod
    def of(
        cls, provider: DistanceProvider, weights: Tensor, loss: Loss, side: int
    ) -> "MeanDistances":
        """Compute those of a provider, the source (0) or the target (1)."""
        nodes, mass = _quadrature(provider, weights)
        if loss.cross is not None:
            (values,) = _moments(provider, weights, (loss.cross[side],))
            return cls(nodes, mass, values[:, None])
        if nodes is None and provider.n > _LEVEL_COLUMNS:
            nodes = _spaced(weights, _LEVEL_COLUMNS)
            mass = torch.full_like(mass[:_LEVEL_COLUMNS], 1 / _LEVEL_COLUMNS)
        everything = torch.arange(provider.n, device=provider.device)
        width = max(1, BLOCK_ENTRIES // provider.n)
        blocks = (everything if nodes is None else nodes).split(width), mass.split(width)
        means = mass.new_zeros(provider.n, loss.parts)
        for index, share in zip(*blocks, strict=True):
            means += part_means(loss, side, provider.columns(index), share)
        return cls(nodes, mass, means)


def part_means(loss: Loss, side: int, columns: Tensor, mass: Tensor) -> Tensor:
    """Compute the means of columns (n, s) by mass (s,), for each part of the cross term, (n, r)."""
    parts = torch.arange(loss.parts, device=columns.device)
    return torch.stack([loss.part(side, columns, part) @ mass for part in parts], dim=1)


def mean_distances(problem: Problem, masses: Marginals) -> tuple[MeanDistances, MeanDistances]:
    """Compute DX p and DY q as the cross term sees them."""
    p, q = masses
    source = MeanDistances.of(problem.source, p, problem.loss, 0)
    return source, MeanDistances.of(problem.target, q, problem.loss, 1)


def own_terms(problem: Problem, masses: Marginals) -> tuple[Tensor, Tensor]:
    """Compute 2 alpha DX^2 p and 2 alpha DY^2 q, from some columns where columns are costly."""
    (p, q), (own_x, own_y) = masses, problem.loss.own
    source, target = _moments(problem.source, p, (own_x,)), _moments(problem.target, q, (own_y,))
    return 2 * problem.alpha * source[0], 2 * problem.alpha * target[0]


def distance_spread(provider: DistanceProvider, weights: Tensor) -> float:
    """Compute the standard deviation of a distance between two points drawn by weight."""
    # a single point has only the distance to itself, of which factors leave rounding
    several = (weights > 0).sum().double()
    mean, square = _moments(provider, weights, (identity, torch.square))
    weights = weights.to(provider.dtype)
    found = weights @ mean, weights @ square, square.max()
    count, first, second, largest = torch.stack([several, *(x.double() for x in found)]).tolist()
    variance = second - first**2
    # a variance of zero, of which rounding is left, is no scale; nor are distances that vanish
    # beside those to points without weight
    eps = torch.finfo(mean.dtype).eps
    least = max(64 * eps * second, eps**2 * largest)
    return math.sqrt(variance) if count > 1 and variance > least else 0.0
