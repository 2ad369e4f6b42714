"""Relaxed marginals: unbalanced, semi-relaxed and partial problems, by the same outer loop.

The loop iterates on the normalised plan P / |P|, for which neither the cost nor epsilon depends on
the mass (docs/algorithm.md, equations 14 to 17); the mass is found at the end. A relaxed plan sees
the terms of rows and columns alone, which follow its own marginals.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchgw._gradients.contract import Coupling, Gradient, Linearised, QuadraticValue
from torchgw._gradients.means import mean_columns, own_terms
from torchgw._gradients.sampled import SampledGradient
from torchgw._plans.contract import Plan
from torchgw._plans.transport import DualPlan, TransportPlan
from torchgw._sinkhorn.cost import Cost, DenseCost
from torchgw._typing import Marginals, Potentials

__all__ = ["RelaxedCoupling", "RelaxedGradient", "normalise"]

Kind = TypeVar("Kind", bound=DualPlan)


class RelaxedCoupling(NamedTuple):
    """Of a normalised plan, with what its own terms need."""

    base: Coupling
    masses: Marginals  # row and column sums, of sum one, float64


class RelaxedGradient:
    """A gradient at a normalised plan, with the terms of its own rows and columns in the cost.

    The cost has mean zero over the product of the plan's marginals: a constant changes the mass of
    the linear problem's plan only, and a large one would under- or overflow it.
    """

    def __init__(self, base: Gradient) -> None:
        self.base = base
        self.name = base.name
        self.exact = base.exact
        self.problem = base.problem
        self.row, self.column = torch.zeros_like(base.row), torch.zeros_like(base.column)
        self.product = base.product

    def start(self) -> RelaxedCoupling:
        """Return the coupling of a x b."""
        return RelaxedCoupling(self.base.start(), self.problem.marginals)

    def linearise(self, coupling: RelaxedCoupling) -> Cost:
        """Return the whole cost at a normalised plan, less its mean."""
        problem, base = self.problem, self.base
        row, column = own_terms(problem, coupling.masses)
        if isinstance(base, SampledGradient):
            # what its anchors are compared with
            base = base.with_means(mean_columns(problem, coupling.masses))
        p, q = (mass.to(problem.dtype) for mass in coupling.masses)
        row, column = row - p @ row, column - q @ column
        cost = base.linearise(coupling.base)
        if isinstance(cost, DenseCost):
            mean = p @ (cost.matrix @ q)
            return DenseCost(cost.matrix + (row - mean)[:, None] + column)
        mean = p @ cost.row + q @ cost.column - (p @ cost.left) @ (q @ cost.right)
        return cost._replace(row=cost.row + row - mean, column=cost.column + column)

    def update(
        self,
        plan: Plan,
        coupling: RelaxedCoupling | None,
        generator: torch.Generator,
    ) -> RelaxedCoupling:
        """Return the coupling of a plan of any mass."""
        previous = None if coupling is None else coupling.base
        if not isinstance(plan, DualPlan):
            # a given start, of mass one
            a, b = (torch.ones_like(weight)[:, None] for weight in self.problem.marginals)
            masses = Marginals((plan @ b)[:, 0], (plan.T @ a)[:, 0])
            return RelaxedCoupling(self.base.update(plan, previous, generator), masses)
        normalised, masses, _ = normalise(plan)
        return RelaxedCoupling(self.base.update(normalised, previous, generator), masses)

    def mean(
        self,
        coupling: RelaxedCoupling,
        latest: RelaxedCoupling,
        share: float,
        generator: torch.Generator,
    ) -> RelaxedCoupling:
        """Return the mean of two couplings."""
        masses = Marginals(
            *(torch.lerp(x, y, share) for x, y in zip(coupling.masses, latest.masses, strict=True))
        )
        return RelaxedCoupling(self.base.mean(coupling.base, latest.base, share, generator), masses)

    def change(self, coupling: RelaxedCoupling, previous: RelaxedCoupling) -> Tensor:
        """Return the relative change of the base coupling."""
        return self.base.change(coupling.base, previous.base)

    def pairing(self, cost: Cost, point: RelaxedCoupling, coupling: RelaxedCoupling) -> Tensor:
        """Return NaN: the terms of rows and columns belong to the plan here."""
        return self.problem.marginals.a.new_full((), torch.nan, dtype=torch.float64)

    def evaluate(
        self, plan: TransportPlan, masses: Marginals, generator: torch.Generator
    ) -> QuadraticValue:
        """Return <L(P), P> of a normalised plan."""
        return self.base.evaluate(plan, masses, generator)

    def remember(self, coupling: RelaxedCoupling, masses: Marginals) -> Linearised:
        """Return what the base gradient keeps, and the own terms of the plan's marginals."""
        known = self.base.remember(coupling.base, coupling.masses)
        return known._replace(own=Marginals(*own_terms(self.problem, coupling.masses)))


def normalise(plan: Kind) -> tuple[Kind, Marginals, Tensor]:
    """Return P / |P|, its marginals and |P|.

    The weights of the rows become their masses, so that rows are drawn by what they carry.
    """
    p, q = plan.marginals()
    total = p.sum()
    p, q = p / total, q / q.sum()
    a, b = plan.weights
    shift = torch.where(p > 0, a / (p * total).clamp_min(torch.finfo(p.dtype).tiny), 1.0).log()
    potentials = Potentials(plan.potentials.f + plan.epsilon * shift, plan.potentials.g)
    scaled: Any = plan.replaced(potentials, Marginals(p, b))
    return scaled, Marginals(p, q), total
