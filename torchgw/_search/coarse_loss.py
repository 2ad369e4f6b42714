"""Coarse problems of other losses, those of directed costs, and the scale of their costs."""

from __future__ import annotations

import torch
from torch import Tensor

from torchgw._gradients.means import Levels, SampledLoss
from torchgw._problem.losses import SQUARE, Loss
from torchgw._problem.problem import Problem
from torchgw._search.coarse import Coarsened, centre
from torchgw._typing import Marginals
from torchgw.distances.sampling import SpreadPoints

# Levels of a minimum on a coarse problem. [L278]
_LEVELS = 16
# Quantiles of the distances of a side that the spread of a loss is computed from. [L278]
_QUANTILES = 256
# Share of the largest loss below which a spread is rounding. [L278]
_ROUNDING = 1e-9


def with_loss(coarse: Coarsened, problem: Problem) -> Coarsened:
    """Return a coarse problem of the square loss with the loss of ``problem`` in its place.

    With S and A the symmetric and antisymmetric parts of directed costs, and T and B those of the
    other side, the mean over both ways of the cross term is S P T - A P B: twice the parts.
    """
    if problem.loss.is_square and not problem.directed:
        return coarse
    square = coarse.problem
    sides, alpha = directed_points(square[:2], problem), square.alpha
    reach = min(float(side.table.max()) for side in sides)
    loss = SampledLoss.of(problem.loss, levels=Levels(reach, _LEVELS))
    (x, row, mean_x, own_x), (y, column, mean_y, own_y) = (
        _centre(loss, number, side, both=problem.directed) for number, side in enumerate(sides)
    )
    y = y.mT if problem.directed else y
    base = -4 * alpha * row.T @ column
    if square.linear is not None:
        base = base + (1 - alpha) * square.linear
    quadratic = 2 * problem.alpha * loss_spread(problem.loss, sides, problem.marginals)
    before = 2 * problem.alpha * loss_spread(SQUARE, sides, problem.marginals)
    unit = quadratic / before if quadratic > 0 and before > 0 else 1.0
    changed = square._replace(
        x=x,
        y=y,
        column=column,
        base=base,
        constant=alpha * (own_x + own_y - 2 * mean_x @ mean_y) + coarse.floor,
        unit=torch.full_like(alpha, unit),
    )
    scale = quadratic
    if square.linear is not None:
        scale += (1 - problem.alpha) * float(square.linear.std(correction=0))
    return coarse._replace(problem=changed, scale=scale or 1.0)


def directed_points(
    sides: tuple[SpreadPoints, SpreadPoints], problem: Problem
) -> tuple[SpreadPoints, SpreadPoints]:
    """Give the points of both sides with costs in their direction, where these have one."""
    source, target = (
        side._replace(table=provider.ways()[0].columns(side.indices)[side.indices].double())
        if provider.directed
        else side
        for side, provider in zip(sides, (problem.source, problem.target), strict=True)
    )
    return source, target


def _centre(
    loss: Loss, number: int, side: SpreadPoints, *, both: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return centred tables (r, s, s), row means and means of the cross term; mean own term.

    Of the source (0) or the target (1); of ``both`` ways the symmetric parts, then the others.
    """
    weights, table = side.weights, coarse_table(loss, side)
    parts = torch.arange(loss.parts, device=table.device)
    tables = [loss.part(number, table, part) for part in parts]
    if number == 0:
        # the cross term is the mean of its parts
        tables = [each / loss.parts for each in tables]
    centred, rows, means, _ = (
        torch.stack(each)
        for each in zip(
            *(
                centre(side._replace(table=(each + each.T) / 2 if both else each))
                for each in tables
            ),
            strict=True,
        )
    )
    if both:
        skew = torch.stack([(each - each.T) / 2 for each in tables])
        row = skew @ weights
        centred = torch.cat([centred, skew - row[:, :, None] + row[:, None, :]])
        rows, means = torch.cat([rows, row]), torch.cat([means, torch.zeros_like(means)])
    own = weights @ loss.own[number](table) @ weights
    return centred, rows, means, own


def coarse_table(loss: Loss, side: SpreadPoints) -> Tensor:
    """Return the distances of coarse points as a loss should see them.

    Each stands for many, so that its distance to itself is not zero where that is extreme.
    """
    if not loss.singular:
        return side.table
    table = side.table
    itself = torch.eye(len(table), dtype=table.dtype, device=table.device)
    return table + (2 * side.square).sqrt() * itself


def loss_spread(loss: Loss, sides: tuple[SpreadPoints, ...], weights: Marginals) -> float:
    """Return the standard deviation of the loss of two distances, less what either decides alone.

    For the square loss that is 2 std(DX) std(DY).

    Parameters
    ----------
    loss : Loss
    sides : pair of SpreadPoints
        Points that stand for all, whose weights are ``weights``.
    weights : Marginals
    """
    (x, p), (y, q) = (_distribution(*pair) for pair in zip(sides, weights, strict=True))
    table = loss(*torch.meshgrid(x, y, indexing="ij"))
    largest = float(table.abs().max())
    table = table - p @ table
    table = table - (table @ q)[:, None]
    spread = float((p @ table.square() @ q).sqrt())
    # what rounding leaves of distances that are all the same is no spread
    return spread if spread > _ROUNDING * largest else 0.0


def _distribution(side: SpreadPoints, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return distances of two points drawn by weight, the first of them zero, and their masses."""
    pairs = torch.outer(side.weights, side.weights)
    pairs = pairs - pairs.diagonal().diag()
    values, order = side.table.flatten().sort()
    cumulative = pairs.flatten()[order].cumsum(0)
    levels = torch.arange(_QUANTILES, dtype=values.dtype, device=values.device) + 0.5
    position = torch.searchsorted(cumulative, levels / _QUANTILES * cumulative[-1])
    values = values[position.clamp_(max=len(values) - 1)]
    # the chance that the same point is drawn twice
    same = (weights @ weights).to(values)
    mass = torch.full_like(values, 1 / _QUANTILES) * (1 - same)
    return torch.cat([values.new_zeros(1), values]), torch.cat([same[None], mass])
