"""The density of a plan by the product of its weights, in blocks of rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from torchgw._plans.transport import TransportPlan
from torchgw._sinkhorn.cost import exp_
from torchgw._sinkhorn.softmin import row_blocks
from torchgw._typing import Marginals

# Entries of the plan up to which its density is stored instead of exponentiated in every pass.
# [L266]
_STORED_ENTRIES = {"cpu": 25_000_000, "cuda": 200_000_000}
# Largest exponent, which only entries of two zero weights exceed, and those count for nothing.
# [L266]
_LARGEST_EXPONENT = {torch.float32: 80.0, torch.float64: 600.0}


class Density:
    """The density P_ij / (a_i b_j) of a plan by blocks of rows, stored where it fits."""

    def __init__(self, plan: TransportPlan) -> None:
        self.plan = plan
        self.a, self.b = (weight.to(plan.dtype) for weight in plan.weights)
        n, m = plan.shape
        small = n * m <= _STORED_ENTRIES.get(plan.device.type, 0)
        self._kept = list(self._compute()) if small else None

    @property
    def is_stored(self) -> bool:
        """Whether all of it is kept."""
        return self._kept is not None

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
            ahead: Tensor = self.plan @ values
            return ahead
        weighted = self.b[:, None] * values
        return torch.cat([block @ weighted for _, block in self._kept]) * self.a[:, None]

    def times_transposed(self, values: Tensor) -> Tensor:
        """Compute plan.T @ values, (m, c)."""
        if self._kept is None:
            back: Tensor = self._turned @ values
            return back
        weighted, total = self.a[:, None] * values, torch.zeros_like(self.b)[:, None]
        for rows, block in self._kept:
            total = total + block.T @ weighted[rows]
        return total * self.b[:, None]

    @cached_property
    def _turned(self) -> TransportPlan:
        return self.plan.T

    def squares(self, masses: Tensor) -> Tensor:
        """Compute sum_i P_ij^2 / masses_i over rows that have a mass, (m,)."""
        masses = torch.where(masses > 0, masses, 1.0)
        if self._kept is None:
            plan = self.plan
            halved = TransportPlan(
                plan.cost, plan.potentials, Marginals(*(part.square() for part in plan.weights)),
                plan.epsilon / 2, plan.backend,
            )  # fmt: skip
            sums: Tensor = halved.T @ (1 / masses)[:, None]
            return sums[:, 0]
        weights = self.a.square() / masses
        found = sum(weights[rows] @ block.square() for rows, block in self._kept)
        return self.b.square() * found
