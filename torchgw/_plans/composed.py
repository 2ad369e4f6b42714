"""A plan between two spaces that goes through a third one."""

from __future__ import annotations

import torch
from torch import Tensor

from torchgw._plans.contract import Plan


class ComposedPlan(Plan):
    """P = A' diag(1 / w) B of plans A (c, n) and B (c, m) from one space of masses w (c,).

    Nothing of shape (n, m) is stored.
    """

    def __init__(self, near: Plan, far: Plan, masses: Tensor, *, in_numpy: bool = False) -> None:
        self.near, self.far = (plan.giving(in_numpy=False) for plan in (near, far))
        self.masses, self.in_numpy = masses, in_numpy

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m)."""
        return self.near.shape[1], self.far.shape[1]

    def _like(self) -> Tensor:
        return self.masses

    @property
    def T(self) -> ComposedPlan:
        """The plan from target to source."""
        return ComposedPlan(self.far, self.near, self.masses, in_numpy=self.in_numpy)

    def _product(self, table: Tensor) -> Tensor:
        share = torch.where(self.masses > 0, 1 / self.masses, 0.0)[:, None]
        found: Tensor = self.near.T @ (share * (self.far @ table))
        return found
