"""The sampled gradient: unbiased, from distance columns at anchor pairs drawn from the plan."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._anchors import Anchors, redraw, sample_categories
from torchgw._coarse import choose_points
from torchgw._cost import Cost, FactoredCost
from torchgw._gradient import (
    DenseGradient,
    FactoredGradient,
    Gradient,
    Plan,
    Problem,
    QuadraticValue,
    add_linear,
    product_value,
)
from torchgw._plan import TransportPlan
from torchgw._typing import Marginals
from torchgw.distances.base import DistanceProvider

__all__ = [
    "CostNoise",
    "MeanDistances",
    "SampledGradient",
    "distance_spread",
    "make_gradient",
    "moments",
    "quadrature",
]

# Columns of the quadrature of a sum over all points where each column is a shortest-path run.
_QUADRATURE_COLUMNS = 96
# Anchors that the noise is estimated from at most.
_NOISE_ANCHORS = 256


class CostNoise(NamedTuple):
    """How well a sampled cost is known, root mean squares over all pairs, cost units."""

    standard_error: float
    size: float


class SampledGradient:
    """Unbiased, from distance columns at anchor pairs drawn from the plan.

    With the mean columns x = DX a and y = DY b, which are known, and s anchors (k, l) ~ P

        Q = 4 alpha [(DX[:, k] - x) / s, x],    K = [DY[:, l] - y, y]

    give the cost up to terms of rows or columns alone. The means are control variates: without
    them the error of the anchors' own marginals is multiplied by distances as a whole, and is
    larger than what is to be found. Momentum keeps a share 1 - ``momentum`` of the anchors from one
    iteration to the next.
    """

    name = "sampled"
    exact = False

    def __init__(self, problem: Problem, n_anchors: int, momentum: float) -> None:
        self.problem = problem
        self.n_anchors = n_anchors
        self.momentum = momentum
        source = moments(problem.source, problem.marginals.a)
        target = moments(problem.target, problem.marginals.b)
        self._means = source[0], target[0]
        self.row = 2 * problem.alpha * source[1].double()
        self.column = 2 * problem.alpha * target[1].double()
        self.product = product_value(problem, (self.row, self.column), self._means)

    def start(self) -> None:
        """Return ``None``: the product plan needs no anchors."""

    def linearise(self, coupling: Anchors | None) -> Cost:
        """Return the factored cost at the anchors; at a x b it is known exactly, of rank one."""
        left, right = (mean[:, None] for mean in self._means)
        if coupling is not None:
            anchors = self.problem.source.columns(coupling.source) - left
            left = torch.cat([anchors / self.n_anchors, left], dim=1)
            right = torch.cat([self.problem.target.columns(coupling.target) - right, right], dim=1)
        cost = FactoredCost.of_products(4 * self.problem.alpha * left, right)
        return add_linear(cost.centred(), self.problem)

    def update(self, plan: Plan, coupling: Anchors | None, generator: torch.Generator) -> Anchors:
        """Redraw a share ``momentum`` of the anchors from the plan."""
        if coupling is None:
            return plan.sample(self.n_anchors, generator)
        count = max(1, round(self.momentum * self.n_anchors))
        return redraw(coupling, plan.sample(count, generator), generator)

    def noise(self, coupling: Anchors) -> CostNoise:
        """Return the standard error of the cost at some anchors, and its size, both estimated.

        Of the part that depends on rows and columns together; the rest does not move a plan.
        """
        index = Anchors(*(side[:_NOISE_ANCHORS] for side in coupling))
        a, b = (weight.to(self.problem.dtype)[:, None] for weight in self.problem.marginals)
        means = [mean[:, None] for mean in self._means]
        left = self.problem.source.columns(index.source) - means[0]
        right = self.problem.target.columns(index.target) - means[1]
        left, right = torch.cat([left, means[0]], dim=1), torch.cat([right, means[1]], dim=1)
        left, right = left - (a * left).sum(0), right - (b * right).sum(0)
        # <u_s v_s', u_t v_t'> of the terms of the cost, one for each anchor; the last is known
        gram = ((a * left).T @ left * ((b * right).T @ right)).double()
        count = len(index.source)
        share = torch.full_like(gram[0], 1 / count)
        share[-1] = 0
        square, mean = gram.diagonal() @ share, share @ gram @ share
        variance = (square - mean).clamp_min(0) * count / max(count - 1, 1)
        share[-1] = 1
        size = (share @ gram @ share - variance / count).clamp_min(0)
        error = (variance / self.n_anchors).sqrt()
        return CostNoise(*(4 * self.problem.alpha * torch.stack([error, size.sqrt()])).tolist())

    def with_anchors(self, count: int) -> SampledGradient:
        """Return the same gradient with another number of anchors."""
        other = copy.copy(self)
        other.n_anchors = count
        return other

    def with_means(self, means: tuple[Tensor, Tensor]) -> SampledGradient:
        """Return the same gradient for plans of other marginals, DX p and DY q."""
        other = copy.copy(self)
        other._means = means
        return other

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

    def pairing(self, cost: Cost, point: Anchors | None, coupling: Anchors) -> Tensor:
        """Return NaN: anchors of a plan are not drawn with its cost in mind."""
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


def quadrature(provider: DistanceProvider, weights: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return nodes, ``None`` for all points, and masses of a sum over all points by weight.

    All points where columns are cheap; otherwise a coarse choice of them, each with the weight of
    those nearest to it.
    """
    if provider.cheap_columns:
        return None, weights.to(provider.dtype)
    nodes = choose_points(provider, weights, _QUADRATURE_COLUMNS)
    return nodes.points, nodes.weights.to(provider.dtype)


def moments(provider: DistanceProvider, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return D w and (D * D) w, by :func:`quadrature`."""
    nodes, mass = quadrature(provider, weights)
    if nodes is None:
        return provider.apply(mass[:, None])[:, 0], provider.mean_square(mass)
    columns = provider.columns(nodes)
    return columns @ mass, columns.square() @ mass


class MeanDistances(NamedTuple):
    """The mean distances that a sampled cost has for control variates, and how they were found."""

    nodes: Tensor | None  # points summed over; None is all of them
    mass: Tensor
    values: Tensor  # (n,) mean distance of each point

    @classmethod
    def of(cls, provider: DistanceProvider, weights: Tensor) -> MeanDistances:
        """Return those of a provider."""
        return cls(*quadrature(provider, weights), moments(provider, weights)[0])


def distance_spread(provider: DistanceProvider, weights: Tensor) -> float:
    """Return the standard deviation of a distance between two points drawn by weight."""
    mean, square = moments(provider, weights)
    weights = weights.to(provider.dtype)
    second = weights @ square
    variance = second - (weights @ mean) ** 2
    # what rounding leaves of a variance of zero is no scale
    return float(variance.sqrt()) if variance > 64 * torch.finfo(mean.dtype).eps * second else 0.0


def make_gradient(name: str, problem: Problem, n_anchors: int, momentum: float) -> Gradient:
    """Build a gradient by name."""
    if name == "dense":
        return DenseGradient(problem)
    if name == "factored":
        return FactoredGradient(problem)
    return SampledGradient(problem, n_anchors, momentum)
