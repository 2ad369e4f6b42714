"""The coarse problem: a few points of each side, with the mass of what is nearest to them.

What is computed on the way reads nothing back from the device and depends on shapes alone, so that
it can be recorded in a CUDA graph; :func:`coarsen` and :func:`choose_points` look at the outcome.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchgw._anchors import accumulate
from torchgw._capture import Call, call_directly
from torchgw._cost import Cost
from torchgw._gradient import Problem
from torchgw.distances.base import DistanceProvider

__all__ = [
    "CoarseProblem",
    "CoarseSide",
    "Coarsened",
    "centre",
    "choose_points",
    "coarsen",
    "cross_terms",
    "reader_of",
    "side_by_side",
]

# Power of the distance to the points so far that a point is drawn in proportion to: large enough to
# spread them evenly, small enough not to collect outliers.
_SPREAD = 4
# Weight, relative to the largest, of points that are left out: float32 could not hold their plan.
_NEGLIGIBLE = 1e-12


class Reader(Protocol):
    """What can be asked for columns of distances: a provider, or the tensors that it reads."""

    def columns(self, index: Tensor) -> Tensor:
        """Return D[:, index], shape (n, s)."""


class StoredColumns(NamedTuple):
    """The reader of a stored table."""

    matrix: Tensor  # (n, n)

    def columns(self, index: Tensor) -> Tensor:
        """Return D[:, index], a view of gathered rows."""
        return self.matrix[index].T


class CoarseSide(NamedTuple):
    """Some points of one side, float64. The first of them are a coarser choice."""

    points: Tensor  # (s,) int64
    table: Tensor  # (s, s) distances among them, symmetric
    weights: Tensor  # (s,) mass of the points nearest to each, total one
    square: Tensor  # () mean squared distance of all points to the nearest of them


class CoarseProblem(NamedTuple):
    """Two coarse sides, with the constants of their objective (docs/algorithm.md, equation 38).

    ``x`` and ``y`` are the doubly centred tables, one of each for the square loss and r for one
    that has r products (:mod:`torchgw._coarse_loss`). A plan with the marginals a, b has the value
    constant + <base, P> - 2 alpha <x P y, P>, and its linearised cost is base - 4 alpha x P y.
    """

    source: CoarseSide
    target: CoarseSide
    alpha: Tensor  # ()
    linear: Tensor | None  # (s, t), the least entry zero
    x: Tensor  # (r, s, s)
    y: Tensor  # (r, t, t)
    base: Tensor  # (s, t)
    constant: Tensor  # ()
    unit: Tensor  # () of the cost over that of the square loss

    def value(self, plans: Tensor) -> Tensor:
        """Return the objective without entropy of plans (B, s, t) whose marginals are exact."""
        cross = (cross_terms(self.x, plans, self.y) * plans).sum((-1, -2))
        linear: Tensor = (plans * self.base).sum((-1, -2))
        return self.constant + linear - 2 * self.alpha * cross

    def distances(self, plans: Tensor) -> Tensor:
        """Return how far plans (B, s, t) send a point apart, shape (B, B), 1 for unrelated plans.

        The energy distance of a source point's partners under two plans, averaged over the points,
        relative to the mean distance of two target points.
        """
        table, b = self.target.table, self.target.weights
        conditional = plans / self.source.weights[:, None]
        gram = (plans @ table).flatten(1) @ conditional.flatten(1).T
        gram = (gram + gram.T) / 2
        own = gram.diagonal()
        mean = (b @ table @ b).clamp_min(torch.finfo(gram.dtype).tiny)
        return (gram - (own[:, None] + own[None, :]) / 2) / mean


def cross_terms(x: Tensor, plans: Tensor, y: Tensor) -> Tensor:
    """Return sum_r x_r P y_r, (B, s, t), for x (r, s, k), plans (B, k, l) and y (r, l, t)."""
    terms: Tensor = side_by_side(x.flatten(0, 1) @ plans, len(x)) @ y.flatten(0, 1)
    return terms


def side_by_side(stacked: Tensor, count: int) -> Tensor:
    """Turn (B, r s, t), r matrices below each other, into (B, s, r t)."""
    beside: Tensor = stacked.unflatten(-2, (count, -1)).transpose(-2, -3).flatten(-2)
    return beside


class Coarsened(NamedTuple):
    """A coarse problem, and what the host knows of it."""

    problem: CoarseProblem
    floor: float  # no plan has a lower value: what the least linear cost amounts to
    scale: float  # natural scale of the cost, equation 8
    resolution: float  # mean distance to a coarse point, relative to that of two points


class _Drawn(NamedTuple):
    """A coarse side as drawn, which has to be checked."""

    side: CoarseSide
    counts: Tensor  # (2,) int64: points of positive weight; points drawn that are no duplicates


class _Built(NamedTuple):
    """A coarse problem as built, which has to be checked."""

    problem: CoarseProblem
    numbers: Tensor  # (7,) float64: floor, scale, resolution squared, counts of both sides


def coarsen(problem: Problem, size: int, call: Call = call_directly) -> Coarsened:
    """Choose at most ``size`` points per side, always the same ones for one problem."""
    # other draws: the same ones would favour equal indices where both sides are the same
    sides = (problem.source, problem.target)
    uniform = [_uniform(side, size, seed) for seed, side in enumerate(sides)]
    alpha = uniform[0].new_full((), problem.alpha)
    arguments = (*map(reader_of, sides), *problem.marginals, *uniform, alpha, problem.linear)
    built = call(f"coarsen {size}", partial(_build, size), *arguments)
    *numbers, used_x, drawn_x, used_y, drawn_y = built.numbers.tolist()
    counts = (int(used_x), int(drawn_x)), (int(used_y), int(drawn_y))
    coarse = built.problem
    if any(_is_short(side.n, size, *count) for side, count in zip(sides, counts, strict=True)):
        source, target = (
            _shortened(side, weights, drawn, size, count)
            for side, weights, drawn, count in zip(
                sides, problem.marginals, (coarse.source, coarse.target), counts, strict=True
            )
        )
        coarse, constants = _constants(source, target, alpha, problem.linear)
        numbers = constants.tolist()
    floor, scale, ratio = numbers
    # all points of one side coincide: every plan costs the same and any scale will do
    return Coarsened(coarse, floor, scale or 1.0, math.sqrt(ratio))


def reader_of(provider: DistanceProvider) -> Reader:
    """Return what a provider reads its columns from: a named tuple, or itself if it has none."""
    matrix = provider.matrix()
    return (provider.factors() or provider) if matrix is None else StoredColumns(matrix)


def choose_points(provider: DistanceProvider, weights: Tensor, size: int) -> CoarseSide:
    """Draw spread-out points in rounds; all those of positive weight if there are no more.

    The columns of a round are read together, and each round doubles the points, so that there are
    few rounds. A fixed seed draws them: exact solves do not depend on ``random_state``.
    """
    drawn = _draw_points(size, 0, provider, weights, _uniform(provider, size, 0))
    used, distinct = drawn.counts.tolist()
    if not _is_short(provider.n, size, used, distinct):
        return drawn.side
    return _shortened(provider, weights, drawn.side, size, (used, distinct))


def _is_short(n: int, size: int, used: int, distinct: int) -> bool:
    """Whether fewer points are to be had than were drawn."""
    return used <= size < n or min(n, size) > distinct


def _shortened(
    provider: DistanceProvider,
    weights: Tensor,
    drawn: CoarseSide,
    size: int,
    counts: tuple[int, int],
) -> CoarseSide:
    """Return a side without the points that were drawn for want of others."""
    used, distinct = counts
    weights = _cut(weights)
    if used <= size:
        return _all_points(provider, weights, weights.nonzero()[:, 0])
    index = drawn.points[:distinct]
    return _nearest(weights, index, provider.columns(index))


def _build(
    size: int,
    source: Reader,
    target: Reader,
    a: Tensor,
    b: Tensor,
    uniform_x: Tensor,
    uniform_y: Tensor,
    alpha: Tensor,
    linear: Cost | None,
) -> _Built:
    """Draw points of both sides and compute the constants."""
    x = _draw_points(size, 0, source, a, uniform_x)
    y = _draw_points(size, 1, target, b, uniform_y)
    coarse, numbers = _constants(x.side, y.side, alpha, linear)
    return _Built(coarse, torch.cat([numbers, x.counts.to(numbers), y.counts.to(numbers)]))


def _constants(
    source: CoarseSide, target: CoarseSide, alpha: Tensor, cost: Cost | None
) -> tuple[CoarseProblem, Tensor]:
    """Return the problem between two sides; floor, scale and squared resolution, (3,)."""
    x, row, mean_x, square_x = centre(source)
    y, column, mean_y, square_y = centre(target)
    base = -4 * alpha * torch.outer(row, column)
    spread = 4 * alpha * ((square_x - mean_x**2) * (square_y - mean_y**2)).clamp_min(0).sqrt()
    linear, floor = None, torch.zeros_like(alpha)
    if cost is not None:
        chosen = cost.rows(source.points).transpose().rows(target.points).transpose()
        linear = chosen.dense().matrix.double()
        # a constant moves no plan, and float32 would lose digits to it
        offset = linear.min()
        linear, floor = linear - offset, (1 - alpha) * offset
        base = base + (1 - alpha) * linear
        spread = spread + (1 - alpha) * linear.std(correction=0)
    ratios = [
        side.square / square.clamp_min(torch.finfo(square.dtype).tiny)
        for side, square in ((source, square_x), (target, square_y))
    ]
    constant = alpha * (square_x + square_y - 2 * mean_x * mean_y) + floor
    one = torch.ones_like(alpha)
    coarse = CoarseProblem(source, target, alpha, linear, x[None], y[None], base, constant, one)
    return coarse, torch.stack([floor, spread, torch.maximum(*ratios)])


def centre(side: CoarseSide) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the doubly centred table, centred row means, mean, and mean square."""
    table, weights = side.table, side.weights
    row = table @ weights
    mean = weights @ row
    square = weights @ table.square() @ weights
    return table - row[:, None] - row[None, :] + mean, row - mean, mean, square


def _cut(weights: Tensor) -> Tensor:
    """Return weights of total one, without negligible ones."""
    weights = torch.where(weights > _NEGLIGIBLE * weights.max(), weights, 0.0)
    return weights / weights.sum()


def _uniform(provider: DistanceProvider, size: int, seed: int) -> Tensor:
    """Return the random numbers that draw at most ``size`` points, (rounds, n) float64."""
    rounds = math.ceil(math.log2(size)) if provider.n > size else 0
    generator = torch.Generator(device=provider.device).manual_seed(seed)
    return torch.rand(
        rounds, provider.n, dtype=torch.float64, device=provider.device, generator=generator
    )


def _draw_points(
    size: int, first: int, provider: Reader, weights: Tensor, uniform: Tensor
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


def _all_points(provider: Reader, weights: Tensor, index: Tensor) -> CoarseSide:
    """Return the side of all points that have a weight."""
    table = provider.columns(index)[index].double()
    square = torch.zeros_like(weights[0])
    return CoarseSide(index, (table + table.T) / 2, weights[index], square)


def _nearest(weights: Tensor, index: Tensor, columns: Tensor) -> CoarseSide:
    """Return the side of some points, given their columns: each has the mass nearest to it."""
    closest, nearest = columns.min(1)
    # approximate distances may put a point nearer to another than to itself
    nearest = nearest.index_copy(0, index, torch.arange(len(index), device=index.device))
    mass = accumulate(nearest, weights, len(index))
    square = weights @ closest.double().square()
    table = columns[index].double()
    return CoarseSide(index, (table + table.T) / 2, mass, square)
