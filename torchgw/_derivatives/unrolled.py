"""The last iterations of a small solve run again, recorded by autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from torchgw._derivatives.tracked import Model
from torchgw._errors import UnsupportedError
from torchgw._plans.transport import TransportPlan

__all__ = ["unroll"]

# Outer iterations, Sinkhorn iterations in each, and entries of the plan: the graph keeps a few
# tables of that size for each of them, 2 GB at most. [L268]
_OUTER = 20
_INNER = 60
_MOST_ENTRIES = 50_000


def unroll(model: Model, plan: TransportPlan) -> tuple[Tensor, Tensor]:
    """Iterate further from a solved plan, and return the plan, (n, m), and its objective.

    The derivative is that of these iterations alone: the first terms of the series that an implicit
    derivative sums.
    """
    n, m = plan.shape
    if n * m > _MOST_ENTRIES:
        raise UnsupportedError(
            f"differentiable='unrolled' keeps every iteration and is limited to {_MOST_ENTRIES:,} "
            f"pairs; got {n} x {m}. Pass differentiable='implicit'."
        )
    if not all(bool((weight > 0).all()) for weight in plan.weights):
        raise UnsupportedError(
            "differentiable='unrolled' needs positive weights. Drop points of weight zero, or pass "
            "differentiable='implicit'."
        )
    epsilon = plan.epsilon
    source, target = (
        side.apply(torch.eye(size, dtype=torch.float64, device=plan.device))
        for side, size in ((model.source, n), (model.target, m))
    )
    log_a, log_b = model.a.log(), model.b.log()
    matrix = plan.stored().detach().double()
    # the terms of rows and columns alone move into the potentials
    g = plan.potentials.g.detach().double()
    linear = None if model.linear is None else model.linear.dense().matrix
    for _ in range(_OUTER):
        cost = -4 * model.alpha * (source @ matrix @ target)
        if linear is not None:
            cost = cost + (1 - model.alpha) * linear
        for _ in range(_INNER):
            f = -epsilon * torch.logsumexp(log_b + (g - cost) / epsilon, 1)
            g = -epsilon * torch.logsumexp(log_a[:, None] + (f[:, None] - cost) / epsilon, 0)
        f = -epsilon * torch.logsumexp(log_b + (g - cost) / epsilon, 1)
        log_density = (f[:, None] + g - cost) / epsilon
        matrix = (log_density + log_a[:, None] + log_b).exp()
    a, b = matrix.sum(1), matrix.sum(0)
    squares = a @ source.square() @ a + b @ target.square() @ b
    quadratic = squares - 2 * (source @ matrix @ target * matrix).sum()
    loss = model.alpha * quadratic + epsilon * (matrix * log_density).sum()
    if linear is not None:
        loss = loss + (1 - model.alpha) * (linear * matrix).sum()
    return matrix, loss
