"""Rounding a nearly feasible plan to its exact marginals: stored, or as an operator."""

from typing import Any

import torch
from torch import Tensor

from torchgw._plans.contract import Plan
from torchgw._typing import Marginals, Potentials


class RoundedPlan(Plan):
    """diag(x) P diag(y) + u v', a plan with exact marginals that is never stored, shape (n, m).

    Returned by :meth:`torchgw.TransportPlan.rounded`.

    Parameters
    ----------
    scaled : Plan, shape (n, m)
        diag(x) P diag(y), which exceeds neither marginal.
    row, column : Tensor, shapes (n,) and (m,), float64
        u and v: the outer product of what is missing on each side.
    """

    def __init__(self, scaled: Plan, row: Tensor, column: Tensor) -> None:
        self.scaled, self.row, self.column = scaled, row, column

    def _like(self) -> Plan:
        return self.scaled

    @property
    def T(self) -> "RoundedPlan":
        return RoundedPlan(self.scaled.T, self.column, self.row).giving(self.in_numpy)

    def stored(self) -> Tensor:
        matrix = self.scaled.stored()
        return matrix + torch.outer(self.row, self.column).to(matrix.dtype)

    def _product(self, table: Tensor) -> Tensor:
        product = self.scaled._product(table)
        extra = torch.tensordot(self.column, table.double(), dims=1)
        found: Tensor = (product + torch.tensordot(self.row, extra, dims=0)).to(product.dtype)
        return found

    def _block(self, index: Tensor | slice) -> Tensor:
        block = self.scaled._block(index)
        return block + torch.outer(self.row[index], self.column).to(block.dtype)


def round_plan(plan: Any, a: Tensor, b: Tensor) -> RoundedPlan:
    """Move a TransportPlan to marginals of equal sums as :func:`round_to_marginals` does."""
    tiny = torch.finfo(torch.float64).tiny
    x = (a / (plan @ torch.ones_like(b)).clamp_min(tiny)).clamp_max(1.0)
    y = (b / (plan.T @ x).clamp_min(tiny)).clamp_max(1.0)
    f, g = (
        potential + plan.epsilon * torch.where(factor > 0, factor, 1.0).log()
        for potential, factor in zip(plan.potentials, (x, y), strict=True)
    )
    # rows and columns of marginal zero are scaled to zero, as those of weight zero are
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
    """Move plans (..., n, m) to exact marginals: shrink rows, then columns, and spread the rest."""
    # At an L1 distance of at most twice the marginal errors: J. Altschuler, J. Weed, P. Rigollet.
    # Near-linear time approximation algorithms for optimal transport via Sinkhorn iteration.
    # NeurIPS 2017, Algorithm 2. A plan that misses its marginals may have a value below the
    # optimum, so values are compared after this.
    tiny = torch.finfo(plan.dtype).tiny
    plan = plan * (a / plan.sum(-1).clamp_min(tiny)).clamp_max(1.0)[..., :, None]
    plan = plan * (b / plan.sum(-2).clamp_min(tiny)).clamp_max(1.0)[..., None, :]
    # what is missing is not negative, but for rounding
    row, column = (a - plan.sum(-1)).clamp_min(0.0), (b - plan.sum(-2)).clamp_min(0.0)
    missing = row.sum(-1)[..., None, None].clamp_min(tiny)
    return plan + row[..., :, None] * (column[..., None, :] / missing)
