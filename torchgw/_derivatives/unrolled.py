"""The last iterations of a small solve run again, recorded by autograd: Newton's.

A plan and its potentials z are where residuals r(z) vanish. A step z - M r(z, theta), with M the
inverse of the Jacobian at the solve, a constant, stays where the solve has ended and has the first
derivative there; a second step has the second one as well, and so on (docs/algorithm.md, equation
46). Autograd differentiates M any number of times, as it is linear: each time is one linear system.
Iterations of the solve itself would be the first terms of a series, which may shrink slowly or
grow.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchgw._derivatives.implicit import NEARLY_SINGULAR
from torchgw._derivatives.krylov import MOST_PRODUCTS, gmres, growth
from torchgw._derivatives.tracked import Model
from torchgw._errors import NumericalError, UnsupportedError
from torchgw._plans.transport import TransportPlan
from torchgw._tensors.operations import NOTHING

# Steps that are recorded: the order of the highest derivative. [L1321]
_STEPS = 3
# Largest relative residual of a linear system that is not refused: a tenth of the agreement with
# differences that docs/differentiation.md promises. [L1321]
_WRONG = 1e-6

Parts = tuple[Tensor, Tensor, Tensor]  # a table (n, m), and numbers of rows (n,) and columns (m,)


def unroll(model: Model, plan: TransportPlan) -> tuple[Tensor, Tensor]:
    """Iterate further from a solved plan; return the plan, (n, m), and its objective."""
    start = plan.stored().detach().double()
    ways = [
        [
            side.apply(torch.eye(size, dtype=torch.float64, device=plan.device))
            for side, size in zip(way, plan.shape, strict=True)
        ]
        for way in model.ways
    ]

    def curvature(table: Tensor) -> Tensor:
        """Compute C'(table), the change of the cost with the plan."""
        return -4 * model.alpha * torch.stack([near @ table @ far.T for near, far in ways]).mean(0)

    def cost(matrix: Tensor) -> Tensor:
        """Compute the cost without terms of rows and columns alone, which potentials take up."""
        found = curvature(matrix)
        return found if linear is None else found + (1 - model.alpha) * linear

    epsilon = plan.epsilon if model.epsilon is None else model.epsilon
    linear = None if model.linear is None else model.linear.dense().matrix
    weights = model.a[:, None] * model.b
    with torch.no_grad():
        a, b, before = model.a.clone(), model.b.clone(), cost(start)
        density = torch.where(start > 0, (start / weights).log(), 0.0)
        share = start / weights
        system = _System(start, plan.epsilon, curvature)
    if model.tracked & {"a", "b"} and int(system.closed.sum()) > 1:
        raise _meaningless("parts of it exchange no mass, and weights would have to move it there")

    def log_density(parts: Parts) -> Tensor:
        """Compute the logarithm of the density, where the solve has entries."""
        matrix, f, g = parts
        moved = f[:, None] + g - (cost(matrix) - before)
        return density + (density * (plan.epsilon - epsilon) + moved) / epsilon

    def residuals(parts: Parts) -> Parts:
        """Compute the residuals less those of the solve, which are zero where it has converged."""
        matrix = parts[0]
        following = share * weights * (log_density(parts) - density).exp()
        rows, columns = (matrix - start).sum(1), (matrix - start).sum(0)
        return matrix - following, rows - (model.a - a), columns - (model.b - b)

    parts = start, torch.zeros_like(a), torch.zeros_like(b)
    for _ in range(_STEPS):
        matrix, f, g = _inverse(system, 0, *residuals(parts))
        parts = parts[0] - matrix, parts[1] - f, parts[2] - g
    matrix = parts[0]
    p, q = matrix.sum(1), matrix.sum(0)
    squares = p @ model.source.mean_square(p) + q @ model.target.mean_square(q)
    loss = model.alpha * squares + 0.5 * (curvature(matrix) * matrix).sum()
    loss = loss + epsilon * (matrix * log_density(parts)).sum()
    if linear is not None:
        loss = loss + (1 - model.alpha) * (linear * matrix).sum()
    return matrix, loss


class _System:
    """The Jacobian of the residuals at a solve, whose linear systems are solved either way."""

    def __init__(self, plan: Tensor, epsilon: float, curvature: Callable[[Tensor], Tensor]) -> None:
        self.plan, self.curvature = plan / epsilon, curvature
        # (diag(p) P; P' diag(q)) in its own basis: for each singular value a sum of directions,
        # multiplied by 1 + s, and their difference, by 1 - s
        self.roots = self.plan.sum(1).sqrt(), self.plan.sum(0).sqrt()
        scaled = self.plan / self.roots[0][:, None] / self.roots[1]
        left, self.sizes, right = torch.linalg.svd(scaled, full_matrices=False)
        self.bases = left, right.T
        # parts of the plan that exchange nothing, such as all of it
        self.closed = 1 - self.sizes < len(self.sizes) * torch.finfo(plan.dtype).eps

    def potentials(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Find the changes of potentials that change the sums of the plan by these."""
        scaled = rows / self.roots[0], columns / self.roots[1]
        one, two = (basis.T @ part for basis, part in zip(self.bases, scaled, strict=True))
        together, apart = (one + two) / (1 + self.sizes), (one - two) / (1 - self.sizes)
        apart = torch.where(self.closed, 0.0, apart)
        moved = (together + apart) / 2 - one, (together - apart) / 2 - two
        u, v = (
            (part + basis @ change) / root
            for part, basis, change, root in zip(scaled, self.bases, moved, self.roots, strict=True)
        )
        return u, v

    def respond(self, cost: Tensor, rows: Tensor, columns: Tensor) -> Parts:
        """Change the plan by a cost and the sums by given amounts; give the potentials as well."""
        moved = self.plan * cost
        u, v = self.potentials(rows + moved.sum(1), columns + moved.sum(0))
        return self.plan * (u[:, None] + v) - moved, u, v

    def solve(self, parts: Parts) -> Parts:
        """Find the changes of the plan and of the potentials that have these residuals."""
        table, rows, columns = parts
        sums = rows - table.sum(1), columns - table.sum(0)
        none = torch.zeros_like(rows), torch.zeros_like(columns)

        def operator(x: Tensor) -> Tensor:
            change, *_ = self.respond(self.curvature(x.view_as(table)), *none)
            return x - change.flatten()

        right = (table + self.respond(torch.zeros_like(table), *sums)[0]).flatten()
        found, residual, _ = gmres(operator, right, tol=NOTHING, max_iter=MOST_PRODUCTS)
        grown, size = growth(found, right), float(right.norm())
        # where forces cancel, as at a point-by-point match, nothing moves, and rounding is left
        least = NOTHING * float(table.norm())
        unsolved = residual > _WRONG and residual * size > least
        if unsolved or (grown > NEARLY_SINGULAR and grown * size > least):
            raise _meaningless(
                f"a change of it grows {grown:.1e} times, and its linear system is left with a "
                f"relative residual of {residual:.1e}"
            )
        change, u, v = self.respond(self.curvature(found.view_as(table)), *sums)
        return table + change, u, v

    def solve_turned(self, parts: Parts) -> Parts:
        """Solve with the transpose of the Jacobian."""
        # the same system, if the first part of the solution is multiplied by P / epsilon
        table, rows, columns = parts
        change, u, v = self.solve((self.plan * table, -rows, -columns))
        return table - self.curvature(change) + u[:, None] + v, -u, -v


def _meaningless(why: str) -> NumericalError:
    return NumericalError(
        f"differentiable='unrolled' has no derivative here, as the plan is nearly singular: {why}. "
        "Raise `epsilon`, lower `tol` and `inner_tol`, or pass differentiable='value', which has "
        "the loss alone."
    )


class _Inverse(torch.autograd.Function):
    """The inverse of a Jacobian, or of its transpose, at residuals: linear in these."""

    @staticmethod
    def forward(
        ctx: Any, system: _System, order: int, table: Tensor, rows: Tensor, columns: Tensor
    ) -> Parts:
        # derivatives of odd order are those of the transpose
        ctx.system, ctx.order, parts = system, order, (table, rows, columns)
        if not any(bool(part.any()) for part in parts):
            return torch.zeros_like(table), torch.zeros_like(rows), torch.zeros_like(columns)
        return system.solve_turned(parts) if order % 2 else system.solve(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.order == _STEPS:
            raise UnsupportedError(
                f"differentiable='unrolled' has derivatives of up to order {_STEPS}. Write the "
                "next one as a difference."
            )
        return None, None, *_inverse(ctx.system, ctx.order + 1, *grads)


_inverse: Callable[..., Parts] = _Inverse.apply
