"""Responses of stored plans, by conjugate gradients (equation 24)."""

import math

import torch
from torch import Tensor

from torchgw._derivatives.density import Equation, Response
from torchgw._derivatives.krylov import growth
from torchgw._gradients.dense import DenseGradient, PlanMatrix
from torchgw._sinkhorn.problem import DenseCost, added

# The linear system of the columns is factorised up to so many columns. [L385]
_SOLVED_COLUMNS = 8_192


def by_conjugate_gradients(equation: Equation) -> Response | None:
    """Solve for a stored response."""
    # On plans without row and column sums -S is the inverse of epsilon diag(1 / P), and (24) is the
    # system (-S^(-1) + C') Z = -W: symmetric, and positive at a minimum. So conjugate gradients
    # with the preconditioner -S need five tables, where GMRES keeps sixty. `None` where they do not
    # apply: at saddle points, with factors, or for tables that are too large.
    density, problem, upstream, forced, tables, tol, max_iter = equation
    plan = density.plan
    if not (tables and density.is_stored) or plan.shape[1] > _SOLVED_COLUMNS:
        return None
    gradient = DenseGradient(problem)
    table = torch.cat([block for _, block in density.blocks()])
    table = table * density.a[:, None] * density.b
    a, b = table.sum(1), table.sum(0)
    # the change of the column sums by v, with u adapted; constants change nothing
    schur = b.diag() - table.T @ (table / a[:, None]) + torch.outer(b, b)
    factor, failed = torch.linalg.cholesky_ex(schur.double())
    if int(failed):
        return None

    def respond_to(cost: Tensor, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute S(cost) with given changes of row and column sums, times epsilon; u and v."""
        moved = table * cost
        row, column = moved.sum(1) + row, moved.sum(0) + column
        right = (column - table.T @ (row / a)).double()[:, None]
        v = torch.cholesky_solve(right, factor)[:, 0].to(table.dtype)
        u = (row - table @ v) / a
        return ((u[:, None] + v) * table - moved).div_(plan.epsilon), u, v

    def curvature(change: Tensor) -> DenseCost:
        return gradient.linearise(PlanMatrix(change)).cost.dense().to(table.dtype)

    none = torch.zeros_like(a), torch.zeros_like(b)
    masses = forced[0] * density.a, forced[1] * density.b
    start, *_ = respond_to(upstream.dense().matrix, *masses)
    residual = -curvature(start).matrix
    found = torch.zeros_like(start)
    ahead = -respond_to(residual, *none)[0]
    size = first = float((residual * ahead).sum())
    # the product of a step and the preconditioner is known: the residuals of which the step is made
    step, weighed, count = ahead, residual, 1
    tolerance = tol**2 * max(first, 0.0)
    while size > tolerance and count < max_iter:
        bent = weighed + curvature(step).matrix
        curve = float((step * bent).sum())
        if not curve > 0:
            return None
        found.add_(step, alpha=size / curve)
        residual = residual.sub(bent, alpha=size / curve)
        ahead = -respond_to(residual, *none)[0]
        before, size = size, float((residual * ahead).sum())
        step = ahead.add(step, alpha=size / before)
        weighed = residual.add(weighed, alpha=size / before)
        count += 1
    found.add_(start)
    cost = added(upstream, curvature(found))
    _, u, v = respond_to(cost.dense().matrix, *masses)
    # rounding may leave a product below zero
    reached = math.sqrt(abs(size) / first) if first > 0 else 0.0
    return Response(density, u, v, cost, reached, count, growth(found, start))
