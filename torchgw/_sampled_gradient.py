"""The sampled gradient: unbiased, from distance columns at anchor pairs drawn from the plan."""

from __future__ import annotations

import torch
from torch import Tensor

from torchgw._anchors import Anchors, redraw, sample_categories
from torchgw._cost import Cost, FactoredCost
from torchgw._gradient import (
    DenseGradient,
    FactoredGradient,
    Gradient,
    Plan,
    Problem,
    QuadraticValue,
    add_linear,
)
from torchgw._plan import TransportPlan
from torchgw._typing import Marginals
from torchgw.distances.base import DistanceProvider

__all__ = ["SampledGradient", "distance_spread", "make_gradient"]

# Columns used to estimate a sum over all points where each column is a shortest-path run.
_ESTIMATE_COLUMNS = 256


class SampledGradient:
    """Unbiased, from distance columns at anchor pairs drawn from the plan.

    Q = (4 alpha / s) DX[:, k] and K = DY[:, l] for s anchors (k, l) ~ P. Momentum keeps a share
    1 - ``momentum`` of the anchors from one iteration to the next.
    """

    name = "sampled"
    exact = False

    def __init__(
        self, problem: Problem, n_anchors: int, momentum: float, generator: torch.Generator
    ) -> None:
        self.problem = problem
        self.n_anchors = n_anchors
        self.momentum = momentum
        source = _moments(problem.source, problem.marginals.a, generator)
        target = _moments(problem.target, problem.marginals.b, generator)
        self._means = source[0], target[0]
        self.row = 2 * problem.alpha * source[1].double()
        self.column = 2 * problem.alpha * target[1].double()

    def start(self) -> None:
        """Return ``None``: the product plan needs no anchors."""

    def linearise(self, coupling: Anchors | None) -> Cost:
        """Return the factored cost at the anchors; at a x b it is known exactly, of rank one."""
        if coupling is None:
            left, right = (mean[:, None] for mean in self._means)
        else:
            left = self.problem.source.columns(coupling.source) / self.n_anchors
            right = self.problem.target.columns(coupling.target)
        cost = FactoredCost.of_products(4 * self.problem.alpha * left, right)
        return add_linear(cost.centred(), self.problem)

    def update(self, plan: Plan, coupling: Anchors | None, generator: torch.Generator) -> Anchors:
        """Redraw a share ``momentum`` of the anchors from the plan."""
        if coupling is None:
            return plan.sample(self.n_anchors, generator)
        count = max(1, round(self.momentum * self.n_anchors))
        return redraw(coupling, plan.sample(count, generator), generator)

    def mean(
        self, coupling: Anchors | None, latest: Anchors, share: float, generator: torch.Generator
    ) -> Anchors:
        """Replace a share of the anchors, which then are a sample of the mean (a reservoir)."""
        if coupling is None:
            coupling = Anchors(
                *(
                    sample_categories(weight, self.n_anchors, generator)
                    for weight in self.problem.marginals
                )
            )
        # rounded up or down so that the share is met in the mean, however small it is
        chance = torch.rand((), generator=generator, device=generator.device)
        count = int(share * self.n_anchors + float(chance))
        order = torch.randperm(self.n_anchors, generator=generator, device=generator.device)[:count]
        return redraw(coupling, Anchors(latest.source[order], latest.target[order]), generator)

    def change(self, coupling: Anchors, previous: Anchors | None) -> Tensor:
        """Return NaN: two samples of one plan differ."""
        return coupling.source.new_full((), torch.nan, dtype=torch.float64)

    def evaluate(
        self, plan: TransportPlan, masses: Marginals, generator: torch.Generator
    ) -> QuadraticValue:
        """Estimate the value from fresh anchors.

        Given an anchor (k, l) ~ P the mean of (DX_ik - DY_jl)^2 over (i, j) ~ P is computed
        exactly, so the anchors' values are independent and their mean is unbiased.
        """
        anchors = plan.sample(self.n_anchors, generator)
        left = self.problem.source.columns(anchors.source).double()
        right = self.problem.target.columns(anchors.target).double()
        p, q = masses
        cross = (left * (plan @ right)).sum(0)
        values = p @ left.square() + q @ right.square() - 2 * cross
        if self.n_anchors == 1:
            return QuadraticValue(float(values), float("nan"))
        return QuadraticValue(float(values.mean()), float(values.std() / self.n_anchors**0.5))


def _moments(
    provider: DistanceProvider, weights: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return D w and (D * D) w, exact where columns are cheap, otherwise from a sample of them."""
    weights = weights.to(provider.dtype)
    if provider.cheap_columns:
        return provider.apply(weights[:, None])[:, 0], provider.mean_square(weights)
    columns = provider.columns(sample_categories(weights, _ESTIMATE_COLUMNS, generator))
    return columns.mean(1), columns.square().mean(1)


def distance_spread(
    provider: DistanceProvider, weights: Tensor, generator: torch.Generator
) -> float:
    """Return the standard deviation of a distance between two points drawn by weight."""
    mean, square = _moments(provider, weights, generator)
    weights = weights.to(provider.dtype)
    second = weights @ square
    variance = second - (weights @ mean) ** 2
    # what rounding leaves of a variance of zero is no scale
    return float(variance.sqrt()) if variance > 64 * torch.finfo(mean.dtype).eps * second else 0.0


def make_gradient(
    name: str, problem: Problem, n_anchors: int, momentum: float, generator: torch.Generator
) -> Gradient:
    """Build a gradient by name."""
    if name == "dense":
        return DenseGradient(problem)
    if name == "factored":
        return FactoredGradient(problem)
    return SampledGradient(problem, n_anchors, momentum, generator)
