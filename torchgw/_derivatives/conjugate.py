"""The response of a stored plan by conjugate gradients."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._derivatives.density import Density
from torchgw._gradients.contract import Gradient
from torchgw._gradients.dense import PlanMatrix
from torchgw._sinkhorn.cost import Cost

# Columns up to which their linear system is factorised. [L385]
_SOLVED_COLUMNS = 8_192


class Solution(NamedTuple):
    """The response, and how well its linear system is solved."""

    v: Tensor  # (m,)
    response: Tensor  # (n m,), as a coupling
    growth: float  # size of the solution over that of the right side
    residual: float  # relative
    products: int  # with the matrix of the linear system


def by_conjugate_gradients(
    density: Density,
    gradient: Gradient,
    upstream: Cost,
    forced: tuple[Tensor, Tensor],
    *,
    tol: float,
    max_iter: int,
) -> Solution | None:
    """Solve for a stored response.

    On plans without row and column sums -S is the inverse of epsilon diag(1 / P), and (24) is the
    system (-S^(-1) + C') Z = -W: symmetric, and positive at a minimum. So conjugate gradients with
    the preconditioner -S need five tables, where GMRES keeps sixty. ``None`` where they do not
    apply: at saddle points, with weights of zero, with factors, or for tables that are too large.
    """
    plan = density.plan
    if not density.is_stored or plan.shape[1] > _SOLVED_COLUMNS or gradient.name != "dense":
        return None
    if not all(bool((weight > 0).all()) for weight in (density.a, density.b)):
        return None
    table = torch.cat([block for _, block in density.blocks()])
    table = table * density.a[:, None] * density.b
    a, b = table.sum(1), table.sum(0)
    # what a change of v does to column sums once u follows; constants change nothing
    schur = b.diag() - table.T @ (table / a[:, None]) + torch.outer(b, b)
    factor, failed = torch.linalg.cholesky_ex(schur.double())
    if int(failed):
        return None

    def respond_to(cost: Tensor, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        """Compute S(cost) with given changes of row and column sums, times epsilon; and v."""
        moved = table * cost
        row, column = moved.sum(1) + row, moved.sum(0) + column
        right = (column - table.T @ (row / a)).double()[:, None]
        v = torch.cholesky_solve(right, factor)[:, 0].to(table.dtype)
        u = (row - table @ v) / a
        return ((u[:, None] + v) * table - moved).div_(plan.epsilon), v

    def curvature(change: Tensor) -> Tensor:
        cost = gradient.linearise(PlanMatrix(change)).cost.dense().matrix
        return cost.to(table.dtype)

    none = torch.zeros_like(a), torch.zeros_like(b)
    given = upstream.dense().matrix
    masses = forced[0] * density.a, forced[1] * density.b
    start = respond_to(given, *masses)[0]
    residual = -curvature(start)
    found = torch.zeros_like(start)
    ahead = -respond_to(residual, *none)[0]
    size = first = float((residual * ahead).sum())
    # of a step, what it is times the preconditioner is known: the residuals that it is made of
    step, weighed, count = ahead, residual, 1
    tolerance = tol**2 * max(first, 0.0)
    while size > tolerance and count < max_iter:
        bent = weighed + curvature(step)
        curve = float((step * bent).sum())
        if not curve > 0:
            return None
        found.add_(step, alpha=size / curve)
        residual = residual.sub(bent, alpha=size / curve)
        ahead = -respond_to(residual, *none)[0]
        before, size = size, float((residual * ahead).sum())
        step, weighed = (
            ahead.add(step, alpha=size / before),
            residual.add(weighed, alpha=size / before),
        )
        count += 1
    tiny = torch.finfo(start.dtype).tiny
    answer = found.add_(start)
    growth = float(answer.norm()) / max(float(start.norm()), tiny)
    v = respond_to(given + curvature(answer), *masses)[1]
    # rounding may leave a product below zero
    reached = math.sqrt(abs(size) / first) if first > 0 else 0.0
    return Solution(v, answer.flatten(), growth, reached, count)
