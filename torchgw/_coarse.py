"""The coarse problem: a few points of each side, with the mass of what is nearest to them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._anchors import accumulate
from torchgw._gradient import Problem
from torchgw.distances.base import DistanceProvider

__all__ = ["CoarseProblem", "CoarseSide", "choose_points", "coarsen"]

# Power of the distance to the points so far that a point is drawn in proportion to: large enough to
# spread them evenly, small enough not to collect outliers.
_SPREAD = 4
# Weight, relative to the largest, of points that are left out: float32 could not hold their plan.
_NEGLIGIBLE = 1e-12


class CoarseSide(NamedTuple):
    """Some points of one side, float64. The first of them are a coarser choice."""

    points: Tensor  # (s,) int64
    table: Tensor  # (s, s) distances among them, symmetric
    weights: Tensor  # (s,) mass of the points nearest to each, total one
    square: Tensor  # () mean squared distance of all points to the nearest of them


@dataclass(frozen=True)
class CoarseProblem:
    """Two coarse sides, with the constants of their objective (docs/algorithm.md, equation 14).

    ``x`` and ``y`` are the doubly centred tables. A plan with the marginals a, b has the value
    constant + <base, P> - 2 alpha <x P y, P>, and its linearised cost is base - 4 alpha x P y.
    """

    source: CoarseSide
    target: CoarseSide
    alpha: float
    linear: Tensor | None  # (s, t), the least entry zero
    x: Tensor  # (s, s)
    y: Tensor  # (t, t)
    base: Tensor  # (s, t)
    constant: Tensor  # ()
    floor: float  # no plan has a lower value: what the least linear cost amounts to
    scale: float  # natural scale of the cost, equation 8
    resolution: float  # mean distance to a coarse point, relative to that of two points

    def value(self, plans: Tensor) -> Tensor:
        """Return the objective without entropy of plans (B, s, t) whose marginals are exact."""
        cross = ((self.x @ plans) @ self.y * plans).sum((-1, -2))
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


def coarsen(problem: Problem, size: int) -> CoarseProblem:
    """Choose at most ``size`` points per side, always the same ones for one problem."""
    source = choose_points(problem.source, problem.marginals.a, size)
    # other draws: the same ones would favour equal indices where both sides are the same
    target = choose_points(problem.target, problem.marginals.b, size, seed=1)
    alpha, linear, shift = problem.alpha, None, source.square.new_zeros(())
    if problem.linear is not None:
        chosen = problem.linear.rows(source.points).transpose().rows(target.points).transpose()
        linear = chosen.dense().matrix.double()
        # a constant moves no plan, and float32 would lose digits to it
        offset = linear.min()
        linear, shift = linear - offset, (1 - alpha) * offset
    x, row, mean_x, square_x = _centre(source)
    y, column, mean_y, square_y = _centre(target)
    base = -4 * alpha * torch.outer(row, column)
    spread = 4 * alpha * ((square_x - mean_x**2) * (square_y - mean_y**2)).clamp_min(0).sqrt()
    if linear is not None:
        base = base + (1 - alpha) * linear
        spread = spread + (1 - alpha) * linear.std(correction=0)
    ratios = torch.stack(
        [
            side.square / square.clamp_min(torch.finfo(square.dtype).tiny)
            for side, square in ((source, square_x), (target, square_y))
        ]
    )
    scale, ratio = torch.stack([spread, ratios.amax()]).tolist()
    return CoarseProblem(
        source=source,
        target=target,
        alpha=alpha,
        linear=linear,
        x=x,
        y=y,
        base=base,
        constant=alpha * (square_x + square_y - 2 * mean_x * mean_y) + shift,
        floor=float(shift),
        # all points of one side coincide: every plan costs the same and any scale will do
        scale=scale or 1.0,
        resolution=math.sqrt(ratio),
    )


def _centre(side: CoarseSide) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the doubly centred table, centred row means, mean, and mean square."""
    table, weights = side.table, side.weights
    row = table @ weights
    mean = weights @ row
    square = weights @ table.square() @ weights
    return table - row[:, None] - row[None, :] + mean, row - mean, mean, square


def choose_points(
    provider: DistanceProvider, weights: Tensor, size: int, seed: int = 0
) -> CoarseSide:
    """Draw spread-out points in rounds; all those of positive weight if there are no more.

    The columns of a round are read together, and each round doubles the points, so that there are
    few rounds. A fixed seed draws them: exact solves do not depend on ``random_state``.
    """
    weights = torch.where(weights > _NEGLIGIBLE * weights.max(), weights, 0.0)
    weights = weights / weights.sum()
    used = weights.nonzero()[:, 0]
    if len(used) <= size:
        table = provider.columns(used)[used].double()
        return CoarseSide(used, (table + table.T) / 2, weights[used], weights.new_zeros(()))
    generator = torch.Generator(device=weights.device).manual_seed(seed)
    index = used[seed % len(used)][None]
    columns = provider.columns(index)
    while len(index) < size:
        share = weights * columns.amin(1).double().clamp_min(0).pow(_SPREAD)
        # approximate distances may keep a point away from itself
        share[index] = 0
        fresh = _draw(share, min(size - len(index), len(index)), generator)
        if len(fresh) == 0:
            # what is left duplicates a point
            break
        index = torch.cat([index, fresh])
        columns = torch.cat([columns, provider.columns(fresh)], dim=1)
    closest, nearest = columns.min(1)
    # approximate distances may put a point nearer to another than to itself
    nearest[index] = torch.arange(len(index), device=index.device)
    mass = accumulate(nearest, weights, len(index))
    square = weights @ closest.double().square()
    table = columns[index].double()
    return CoarseSide(index, (table + table.T) / 2, mass, square)


def _draw(share: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw distinct points in proportion to shares; fewer if fewer have a positive one.

    The largest of log(u) / share are a draw without replacement (Efraimidis and Spirakis 2006).
    """
    uniform = torch.rand(len(share), dtype=share.dtype, device=share.device, generator=generator)
    share = share / share.amax().clamp_min(torch.finfo(share.dtype).tiny)
    keys = torch.where(share > 0, uniform.log() / share, -torch.inf)
    values, index = keys.topk(count)
    return index[values > -torch.inf]
