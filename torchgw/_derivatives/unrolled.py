"""The last iterations of a small solve run again, recorded by autograd."""

from collections.abc import Callable

import torch
from torch import Tensor

from torchgw._derivatives.tracked import Model
from torchgw._errors import ConvergenceWarning, warn_user
from torchgw._plans.transport import TransportPlan

# Outer iterations, and Sinkhorn iterations in each. [L268]
_OUTER = 20
_INNER = 60
# Changes of the cost that are followed through the iterations; a warning comes if more than so much
# of the change of the plan is missing. [L354] [L630]
_CHANGES = 3
_WORRYING = 1e-6
# If all iterations together change the plan by more than this share, they do not begin at a fixed
# point, and a warning says so. [L354]
_MOVED = 1e-3


def unroll(model: Model, plan: TransportPlan) -> tuple[Tensor, Tensor]:
    """Iterate further from a solved plan; return the plan, (n, m), and its objective."""
    # the derivative is that of these iterations alone, the first terms of the implicit series; they
    # take the plan to no marginals in particular, so callers keep the values of the solve
    epsilon = plan.epsilon if model.epsilon is None else model.epsilon
    ways = [
        [
            side.apply(torch.eye(size, dtype=torch.float64, device=plan.device))
            for side, size in zip(way, plan.shape, strict=True)
        ]
        for way in model.ways
    ]

    def crossed(table: Tensor) -> Tensor:
        """Compute the mean over both ways of D_X table D_Y'."""
        return torch.stack([near @ table @ far.T for near, far in ways]).mean(0)

    log_a, log_b = model.a.log(), model.b.log()
    matrix = plan.stored().detach().double()
    # the terms of rows and columns alone move into the potentials
    g = plan.potentials.g.detach().double()
    linear = None if model.linear is None else model.linear.dense().matrix

    def step(matrix: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Make an outer iteration; return the plan, its potential g, and its log-density."""
        cost = -4 * model.alpha * crossed(matrix)
        if linear is not None:
            cost = cost + (1 - model.alpha) * linear
        for _ in range(_INNER):
            f = -epsilon * torch.logsumexp(log_b + (g - cost) / epsilon, 1)
            g = -epsilon * torch.logsumexp(log_a[:, None] + (f[:, None] - cost) / epsilon, 0)
        f = -epsilon * torch.logsumexp(log_b + (g - cost) / epsilon, 1)
        log_density = (f[:, None] + g - cost) / epsilon
        return (log_density + log_a[:, None] + log_b).exp(), g, log_density

    start = matrix
    for _ in range(_OUTER):
        matrix, g, log_density = step(matrix, g)
    with torch.no_grad():
        moved = float((matrix - start).norm() / start.norm())
        _warn_of_slow_iterations(start, -4 * model.alpha / epsilon, crossed, moved)
    a, b = matrix.sum(1), matrix.sum(0)
    squares = a @ model.source.mean_square(a) + b @ model.target.mean_square(b)
    quadratic = squares - 2 * (crossed(matrix) * matrix).sum()
    loss = model.alpha * quadratic + epsilon * (matrix * log_density).sum()
    if linear is not None:
        loss = loss + (1 - model.alpha) * (linear * matrix).sum()
    return matrix, loss


def _warn_of_slow_iterations(
    plan: Tensor, factor: float | Tensor, crossed: Callable[[Tensor], Tensor], moved: float
) -> None:
    """Follow changes of the cost, and warn if the iterations miss part of their effect."""
    # Each iteration adds a term to the change of a fixed point. These terms become a geometric
    # series, of which the last term over one less the ratio is missing. `factor` D_X P D_Y is the
    # cost over epsilon. Several changes are followed, as a single one may hardly contain the part
    # that dies out slowly.
    generator = torch.Generator(device=plan.device).manual_seed(0)
    shape = (_CHANGES, *plan.shape)
    cost = torch.randn(shape, dtype=plan.dtype, device=plan.device, generator=generator)
    rows, columns = plan / plan.sum(1, keepdim=True), plan / plan.sum(0)
    g, total, sizes = cost.new_zeros(_CHANGES, plan.shape[1]), torch.zeros_like(cost), []
    for _ in range(_OUTER):
        row, column = (rows * cost).sum(2), (columns * cost).sum(1)
        for _ in range(_INNER):
            g = column - (row - g @ rows.T) @ columns
        term = plan * ((row - g @ rows.T)[:, :, None] + g[:, None] - cost)
        total += term
        sizes.append(term.flatten(1).norm(dim=1))
        cost = factor * crossed(term)
    half = _OUTER // 2
    tiny = torch.finfo(plan.dtype).tiny
    ratio = (sizes[-1] / sizes[-1 - half].clamp_min(tiny)) ** (1 / half)
    left = sizes[-1] / total.flatten(1).norm(dim=1).clamp_min(tiny)
    missing = torch.where(ratio < 1, left / (1 - ratio), torch.inf).where(left > 0, left)
    if not float(missing.amax()) <= _WORRYING or not moved <= _MOVED:
        warn_user(
            f"The unrolled derivative is not that of a fixed point: {_OUTER} iterations miss "
            f"{float(missing.amax()):.1e} of a change of the plan, each adds "
            f"{float(ratio.amax()):.3g} of what the one before did, and they move the plan itself "
            f"by {moved:.1e}. Pass differentiable='implicit', raise `epsilon`, or lower `tol`.",
            ConvergenceWarning,
        )
