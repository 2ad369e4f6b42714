"""Rounding a nearly feasible plan to its exact marginals: stored, or as an operator."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from torchgw._boundary.plans import as_index, as_values
from torchgw._typing import Marginals, Potentials

__all__ = ["Operator", "RoundedPlan", "round_plan", "round_to_marginals"]


class Operator(Protocol):
    """What rounding needs of a plan."""

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m)."""

    @property
    def T(self) -> Any:  # noqa: N802 - the name of every array library
        """The plan from target to source."""

    def __matmul__(self, values: Any) -> Tensor:
        """Return plan @ values."""

    def rows(self, index: Any) -> Tensor:
        """Return rows of the plan."""

    def to_dense(self) -> Tensor:
        """Build the (n, m) matrix."""


class RoundedPlan:
    """diag(x) P diag(y) + u v', a plan with exact marginals that is never stored, shape (n, m).

    Returned by :meth:`TransportPlan.rounded`.

    Parameters
    ----------
    scaled : Operator, shape (n, m)
        diag(x) P diag(y), which exceeds neither marginal.
    row, column : Tensor, shapes (n,) and (m,), float64
        u and v: the outer product of what is missing on each side.
    """

    def __init__(self, scaled: Operator, row: Tensor, column: Tensor) -> None:
        self.scaled = scaled
        self.row = row
        self.column = column

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m)."""
        return self.scaled.shape

    @property
    def T(self) -> RoundedPlan:  # noqa: N802 - the name of every array library
        """The plan from target to source."""
        return RoundedPlan(self.scaled.T, self.column, self.row)

    def __matmul__(self, values: Any) -> Tensor:
        """Return plan @ values for values of shape (m,) or (m, c)."""
        product = self.scaled @ values
        values = as_values("values", values, product.device).double()
        extra = torch.tensordot(self.column, values, dims=1)
        total: Tensor = product + torch.tensordot(self.row, extra, dims=0)
        return total.to(product.dtype)

    def marginals(self) -> tuple[Tensor, Tensor]:
        """Return row sums (n,) and column sums (m,), float64."""
        ones_n, ones_m = torch.ones_like(self.row), torch.ones_like(self.column)
        return self @ ones_m, self.T @ ones_n

    def rows(self, index: Any) -> Tensor:
        """Return rows of the plan, shape (s, m), for an integer index of shape (s,)."""
        index = as_index(index, len(self.row), self.row.device)
        block = self.scaled.rows(index)
        return block + torch.outer(self.row[index], self.column).to(block.dtype)

    def to_dense(self) -> Tensor:
        """Build the (n, m) matrix; PlanTooLargeError if it would not fit."""
        matrix = self.scaled.to_dense()
        return matrix + torch.outer(self.row, self.column).to(matrix.dtype)


def round_plan(plan: Any, a: Tensor, b: Tensor) -> RoundedPlan:
    """Return a TransportPlan moved to marginals of equal sums as by :func:`round_to_marginals`."""
    tiny = torch.finfo(torch.float64).tiny
    x = (a / (plan @ torch.ones_like(b)).clamp_min(tiny)).clamp_max(1.0)
    y = (b / (plan.T @ x).clamp_min(tiny)).clamp_max(1.0)
    f, g = (
        potential + plan.epsilon * torch.where(factor > 0, factor, 1.0).log()
        for potential, factor in zip(plan.potentials, (x, y), strict=True)
    )
    # a row or column whose marginal is zero is scaled away as one of weight zero
    used = [
        torch.where(factor > 0, weight, 0.0)
        for factor, weight in zip((x, y), plan.weights, strict=True)
    ]
    scaled = plan.replaced(Potentials(f, g), Marginals(*used))
    row, column = (
        (weight - mass).clamp_min(0.0)
        for weight, mass in zip((a, b), scaled.marginals(), strict=True)
    )
    return RoundedPlan(scaled, row, column / column.sum().clamp_min(tiny))


def round_to_marginals(plan: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the plan moved to exact marginals: rows, then columns shrunk, the rest spread.

    A plan that misses its marginals may have a value below the optimum, so values are compared
    after this.

    Parameters
    ----------
    plan : Tensor, shape (..., n, m)
        Non-negative.
    a, b : Tensor, shapes (..., n) and (..., m)
        Non-negative, of equal sums.

    Returns
    -------
    Tensor, shape (..., n, m)
        At an L1 distance of at most twice the marginal errors of ``plan`` [1]_.

    References
    ----------
    .. [1] J. Altschuler, J. Weed, P. Rigollet. Near-linear time approximation algorithms for
       optimal transport via Sinkhorn iteration. NeurIPS 2017, Algorithm 2.
    """
    tiny = torch.finfo(plan.dtype).tiny
    plan = plan * (a / plan.sum(-1).clamp_min(tiny)).clamp_max(1.0)[..., :, None]
    plan = plan * (b / plan.sum(-2).clamp_min(tiny)).clamp_max(1.0)[..., None, :]
    # what is missing is not negative, but for rounding
    row, column = (a - plan.sum(-1)).clamp_min(0.0), (b - plan.sum(-2)).clamp_min(0.0)
    missing = row.sum(-1)[..., None, None].clamp_min(tiny)
    return plan + row[..., :, None] * (column[..., None, :] / missing)
