"""Where the starts of a multi-start begin: linear costs whose plans are guesses.

Each guess is a linear cost on the coarse problem, in units of the Gromov-Wasserstein cost, and a
schedule for epsilon. Guesses of different kinds fail on different problems.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._coarse import CoarseProblem, CoarseSide
from torchgw._schedule import Annealing

__all__ = ["GUESS_EPSILON", "Start", "Starts", "make_starts"]

# Leading axes of each side whose signs are tried in all combinations.
_AXES = 3
# Levels of the distance distributions that are compared.
_QUANTILES = 32
# Epsilon at which a guess is taken up, as a share of the natural scale: above it is forgotten.
GUESS_EPSILON = 0.1
# How far below the target a ladder goes before it comes back, as a share of it.
_LADDER = 0.25


class Start(NamedTuple):
    """One start: what it is called, its first cost, and how epsilon moves."""

    label: str
    cost: Tensor | None  # (s, t) float64, or that of the rotation
    rotation: Tensor | None  # (rank, rank) float64 on the CPU
    anneal: Annealing
    ladder: bool  # whether epsilon goes below the target in between


class Starts(NamedTuple):
    """Starts to be solved together."""

    labels: tuple[str, ...]
    costs: Tensor  # (B, s, t)
    epsilons: Tensor  # (iterations, B)


def make_starts(problem: CoarseProblem, target: float, count: int, iterations: int) -> Starts:
    """Return ``count`` starts, the most useful ones first.

    The product plan annealed from the natural scale; distance distributions (third lower bound
    [1]_) with and without a ladder of epsilons; eccentricities (first lower bound [1]_); all signs
    of the leading axes; then random rotations of these.

    References
    ----------
    .. [1] F. Memoli. Gromov-Wasserstein distances and the metric approach to object matching.
       Foundations of Computational Mathematics 2011.
    """
    whole = Annealing(max(target, problem.scale), target)
    guess = Annealing(max(target, GUESS_EPSILON * problem.scale), target)
    x_axes, y_axes = (
        _axes(problem.x, problem.source.weights),
        _axes(problem.y, problem.target.weights),
    )
    rank = min(x_axes.shape[1], y_axes.shape[1])
    x_axes, y_axes = x_axes[:, :rank], y_axes[:, :rank]

    distribution = _lower_bound(
        problem, _distribution(problem.source), _distribution(problem.target)
    )
    eccentricity = _lower_bound(
        problem, _eccentricity(problem.source), _eccentricity(problem.target)
    )
    starts = [
        Start("annealed", problem.base, None, whole, ladder=False),
        Start("distance distributions", distribution, None, guess, ladder=False),
        Start("distance distributions, ladder", distribution, None, guess, ladder=True),
        Start("eccentricities", eccentricity, None, guess, ladder=False),
    ]
    for pattern in range(2**rank):
        signs = [1.0 - 2.0 * (pattern >> axis & 1) for axis in range(rank)]
        label = "spectral " + "".join("+" if sign > 0 else "-" for sign in signs)
        diagonal = torch.diag(torch.tensor(signs, dtype=torch.float64))
        starts.append(Start(label, None, diagonal, guess, ladder=False))
    generator = torch.Generator().manual_seed(0)
    for number in range(count - len(starts)):
        normal = torch.randn(rank, rank, dtype=torch.float64, generator=generator)
        label = f"rotation {number + 1}" + (", ladder" if number % 2 else "")
        rotation = torch.linalg.qr(normal).Q
        starts.append(Start(label, None, rotation, guess, ladder=bool(number % 2)))
    starts = starts[:count]
    rotations = [start.rotation for start in starts if start.rotation is not None]
    # all together: on a GPU each product would take longer to launch than to compute
    table = torch.stack(rotations) if rotations else torch.empty(0, rank, rank)
    costs = iter(problem.base - 4 * problem.alpha * (x_axes @ table.to(x_axes)) @ y_axes.T)
    return Starts(
        labels=tuple(start.label for start in starts),
        costs=torch.stack([next(costs) if start.cost is None else start.cost for start in starts]),
        epsilons=torch.tensor(
            [_schedule(start, iterations) for start in starts],
            dtype=torch.float64,
            device=problem.base.device,
        ).T,
    )


def _schedule(start: Start, iterations: int) -> list[float]:
    """Return epsilon at each iteration; the last quarter is at the target."""
    epsilons = [start.anneal(iteration) for iteration in range(iterations)]
    if start.ladder:
        rest = iterations - iterations // 4
        lowest = _LADDER * start.anneal.target
        below = Annealing(start.anneal.start, lowest, decay=start.anneal.decay)
        epsilons[:rest] = [below(iteration) for iteration in range(rest)]
    return epsilons


def _axes(table: Tensor, weights: Tensor) -> Tensor:
    """Return leading axes of a centred table, (s, rank), scaled so that table ~ +- axes axes'.

    The scale of a pair of axes in x P y is then that of a perfect match of the two.
    """
    root = weights.sqrt()
    # a small problem, and LAPACK's answer does not depend on the device
    values, vectors = torch.linalg.eigh((root[:, None] * table * root).cpu())
    order = values.abs().argsort(descending=True)[:_AXES]
    scaled = (vectors[:, order] * values[order].abs()).to(table.device)
    axes: Tensor = scaled / root[:, None]
    return axes


def _lower_bound(problem: CoarseProblem, x: Tensor, y: Tensor) -> Tensor:
    """Return the cost alpha |x_i - y_j|^2 + (1 - alpha) M of two signatures (s, q) and (t, q)."""
    cost = problem.alpha * torch.cdist(x, y).square()
    return cost if problem.linear is None else cost + (1 - problem.alpha) * problem.linear


def _eccentricity(side: CoarseSide) -> Tensor:
    """Return the root mean squared distance of each point, (s, 1)."""
    eccentricity: Tensor = (side.table.square() @ side.weights).sqrt()
    return eccentricity[:, None]


def _distribution(side: CoarseSide) -> Tensor:
    """Return quantiles of the distances of each point, (s, q), each over sqrt(q)."""
    values, order = side.table.sort(dim=1)
    cumulative = side.weights[order].cumsum(1)
    levels = torch.arange(_QUANTILES, dtype=values.dtype, device=values.device) + 0.5
    levels = (levels / _QUANTILES * cumulative[:, -1:]).contiguous()
    position = torch.searchsorted(cumulative, levels).clamp_(max=values.shape[1] - 1)
    quantiles: Tensor = values.gather(1, position) / _QUANTILES**0.5
    return quantiles
