"""The density of a plan by the product of its weights, and its responses, in blocks of rows."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._plans.transport import TransportPlan, times
from torchgw._problem.limits import limits_of
from torchgw._problem.problem import Problem
from torchgw._sinkhorn.problem import Cost, exp_, row_blocks
from torchgw._typing import Marginals

# Largest exponent: only entries between two zero weights exceed it, and these do not count. [L266]
_LARGEST_EXPONENT = {torch.float32: 80.0, torch.float64: 600.0}


class Density:
    """The density P_ij / (a_i b_j) of a plan by blocks of rows, stored where it fits."""

    def __init__(self, plan: TransportPlan) -> None:
        self.plan = plan
        self.a, self.b = (weight.to(plan.dtype) for weight in plan.weights)
        # or else exponentiated in every pass
        self.is_stored = limits_of(plan.device).stores(*plan.shape)
        self._kept = list(self._compute()) if self.is_stored else None

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the density by blocks of rows."""
        return iter(self._kept) if self._kept is not None else self._compute()

    def _compute(self) -> Iterator[tuple[slice, Tensor]]:
        plan = self.plan
        f, g = (part.to(plan.dtype) for part in plan.potentials)
        for rows in row_blocks(plan.cost):
            exponent = plan.cost.rows(rows).exponent(f[rows], g, plan.epsilon)
            yield rows, exp_(exponent.clamp_(max=_LARGEST_EXPONENT[plan.dtype]))

    def times(self, values: Tensor) -> Tensor:
        """Compute plan @ values, (n, c)."""
        if self._kept is None:
            found: Tensor = self.plan @ values
            return found
        weighted = self.b[:, None] * values
        return torch.cat([block @ weighted for _, block in self._kept]) * self.a[:, None]

    def times_transposed(self, values: Tensor) -> Tensor:
        """Compute plan.T @ values, (m, c)."""
        if self._kept is None:
            found: Tensor = self._turned @ values
            return found
        weighted, total = self.a[:, None] * values, torch.zeros_like(self.b)[:, None]
        for rows, block in self._kept:
            total = total + block.T @ weighted[rows]
        return total * self.b[:, None]

    @cached_property
    def _turned(self) -> TransportPlan:
        return self.plan.T

    def what_moves(self, column: Tensor, masses: Tensor) -> Tensor:
        """Compute the change of a column by v_j alone, with u adapted to it, (m,)."""
        # It is the sum of the column less `squares`. Where a plan is nearly a matching it is far
        # smaller than the sum, and rounding leaves some of it.
        least = torch.finfo(column.dtype).eps ** 0.75 * column
        return torch.maximum(column - self.squares(masses), least)

    def squares(self, masses: Tensor) -> Tensor:
        """Compute sum_i P_ij^2 / masses_i over rows that have a mass, (m,)."""
        masses = torch.where(masses > 0, masses, 1.0)
        if self._kept is None:
            plan = self.plan
            halved = TransportPlan(
                plan.cost, plan.potentials, Marginals(*(part.square() for part in plan.weights)),
                plan.epsilon / 2, plan.backend,
            )  # fmt: skip
            result: Tensor = (halved.T @ (1 / masses)[:, None])[:, 0]
            return result
        weights = self.a.square() / masses
        found = sum(weights[rows] @ block.square() for rows, block in self._kept)
        return self.b.square() * found


@dataclass(frozen=True, eq=False)
class Response:
    """Z = P o (u + v - cost) / epsilon, shape (n, m), read block by block."""

    density: Density
    u: Tensor  # (n,), derivatives by the weights
    v: Tensor  # (m,)
    cost: Cost
    residual: float = 0.0  # of its linear system, relative
    iterations: int = 0  # products with the matrix of that system
    growth: float = 1.0  # size of the solution over that of the right side
    transposed: bool = False

    @property
    def T(self) -> "Response":  # noqa: N802 - the name of every array library
        """The response from target to source."""
        return replace(self, transposed=not self.transposed)

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield Z by blocks of rows."""
        density = self.density
        for rows, block in density.blocks():
            change = self.cost.rows(rows).exponent(self.u[rows], self.v, density.plan.epsilon)
            yield rows, change.mul_(block).mul_(density.a[rows, None]).mul_(density.b)

    def __matmul__(self, values: Tensor) -> Tensor:
        """Multiply by values of shape (m, c), differentiable in these."""
        if values.requires_grad and torch.is_grad_enabled():
            return times(self, values)
        table = values.to(self.v.dtype)
        if self.transposed:
            result = table.new_zeros(len(self.v), *table.shape[1:])
            for rows, block in self.blocks():
                result += block.T @ table[rows]
            return result.to(values.dtype)
        return torch.cat([block @ table for _, block in self.blocks()]).to(values.dtype)

    def stored(self) -> Tensor:
        """Build the matrix."""
        matrix = torch.cat([block for _, block in self.blocks()])
        return matrix.T if self.transposed else matrix


class Equation(NamedTuple):
    """The linear system of a response, docs/algorithm.md, equation 24, and when it is solved."""

    density: Density
    problem: Problem  # without its linear cost
    upstream: Cost  # W
    forced: tuple[Tensor, Tensor]  # sums of rows and columns over weights, times epsilon
    tables: bool  # whether costs are tables, and not in factors
    tol: float  # relative residual
    max_iter: int  # products with the matrix
