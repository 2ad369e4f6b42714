"""The last iterations of a small solve run again, recorded by autograd."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from torchgw._derivatives.checks import check_stored_plan
from torchgw._derivatives.tracked import Model
from torchgw._errors import ConvergenceWarning, warn_user
from torchgw._plans.transport import TransportPlan
from torchgw._typing import Marginals

__all__ = ["check_unrolled", "unroll"]

# Outer iterations, Sinkhorn iterations in each, and entries of the plan: the graph keeps a few
# tables of that size for each of them, 2 GB at most. [L268]
_OUTER = 20
_INNER = 60
_MOST_ENTRIES = 50_000
# Relative change that is followed through the iterations, the share of it below which rounding is
# all that is left, and what may be missing of a derivative before a warning says so. [L354] [L506]
_CHANGE = 1e-6
_FLOOR = 1e-8
_WORRYING = 1e-6
# Relative change of the plan over all iterations from which they begin elsewhere. [L354]
_MOVED = 1e-3


def check_unrolled(weights: Marginals) -> None:
    """Refuse what cannot be unrolled."""
    check_stored_plan(
        weights,
        _MOST_ENTRIES,
        (
            "differentiable='unrolled' keeps every iteration and is",
            "Pass differentiable='implicit'.",
        ),
        "differentiable='unrolled' needs positive weights. Drop points of weight zero, or pass "
        "differentiable='implicit'.",
    )


def unroll(model: Model, plan: TransportPlan) -> tuple[Tensor, Tensor]:
    """Iterate further from a solved plan, and return the plan, (n, m), and its objective.

    The derivative is that of these iterations alone: the first terms of the series that an implicit
    derivative sums.
    """
    epsilon = plan.epsilon if model.epsilon is None else model.epsilon
    source, target = (
        side.apply(torch.eye(size, dtype=torch.float64, device=plan.device))
        for side, size in zip((model.source, model.target), plan.shape, strict=True)
    )
    log_a, log_b = model.a.log(), model.b.log()
    matrix = plan.stored().detach().double()
    # the terms of rows and columns alone move into the potentials
    g = plan.potentials.g.detach().double()
    linear = None if model.linear is None else model.linear.dense().matrix

    def step(matrix: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Make an outer iteration; return the plan, its potential g, and its log-density."""
        cost = -4 * model.alpha * (source @ matrix @ target)
        if linear is not None:
            cost = cost + (1 - model.alpha) * linear
        for _ in range(_INNER):
            f = -epsilon * torch.logsumexp(log_b + (g - cost) / epsilon, 1)
            g = -epsilon * torch.logsumexp(log_a[:, None] + (f[:, None] - cost) / epsilon, 0)
        f = -epsilon * torch.logsumexp(log_b + (g - cost) / epsilon, 1)
        log_density = (f[:, None] + g - cost) / epsilon
        return (log_density + log_a[:, None] + log_b).exp(), g, log_density

    _warn_of_slow_iterations(step, matrix, g)
    for _ in range(_OUTER):
        matrix, g, log_density = step(matrix, g)
    a, b = matrix.sum(1), matrix.sum(0)
    squares = a @ source.square() @ a + b @ target.square() @ b
    quadratic = squares - 2 * (source @ matrix @ target * matrix).sum()
    loss = model.alpha * quadratic + epsilon * (matrix * log_density).sum()
    if linear is not None:
        loss = loss + (1 - model.alpha) * (linear * matrix).sum()
    return matrix, loss


def _warn_of_slow_iterations(
    step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]], matrix: Tensor, g: Tensor
) -> None:
    """Follow a small change of the plan, whose share that is left at the end the derivative misses.

    Near a fixed point the derivative is a geometric series in the factor by which an iteration
    shrinks changes; what is not summed is the last term over one less the factor.
    """
    generator = torch.Generator(device=matrix.device).manual_seed(0)
    noise = torch.randn(matrix.shape, dtype=matrix.dtype, device=matrix.device, generator=generator)
    with torch.no_grad():
        pair = [(matrix, g), (matrix * (1 + _CHANGE * noise), g)]
        sizes = [_CHANGE * float((matrix * noise).norm())]
        for _ in range(_OUTER):
            pair = [step(*each)[:2] for each in pair]
            sizes.append(float((pair[0][0] - pair[1][0]).norm()))
        moved = float((pair[0][0] - matrix).norm() / matrix.norm())
    half = _OUTER // 2
    factor = (sizes[-1] / max(sizes[half], 1e-300)) ** (1 / half)
    left = sizes[-1] / sizes[0] if sizes[0] > 0 else 0.0
    missing = left / (1 - factor) if factor < 1 else math.inf
    if left > _FLOOR and missing > _WORRYING or moved > _MOVED:
        warn_user(
            f"The unrolled derivative is not that of a fixed point: {_OUTER} iterations leave "
            f"{left:.1e} of a change of the plan, each {factor:.3g} of the one before, and move "
            f"the plan itself by {moved:.1e}. Pass differentiable='implicit', raise `epsilon`, or "
            "lower `tol`.",
            ConvergenceWarning,
        )
