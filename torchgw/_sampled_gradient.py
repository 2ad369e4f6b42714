"""The sampled gradient: unbiased, from distance columns at anchor pairs drawn from the plan."""

from __future__ import annotations

import copy
from typing import NamedTuple

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
    product_value,
)
from torchgw._losses import LOSSES, spread_parts
from torchgw._moments import mean_columns, own_terms, visible
from torchgw._plan import TransportPlan
from torchgw._typing import Marginals

__all__ = ["CostNoise", "SampledGradient", "make_gradient"]

# Anchors that the noise is estimated from at most.
_NOISE_ANCHORS = 256
# Anchors times pairs of points, where a mean over a plan has to be one over pairs, and pairs.
_PAIR_ENTRIES = 2**20
_MOST_PAIRS = 2**13


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
        self.problem = visible(problem, n_anchors)
        self.n_anchors = n_anchors
        self.momentum = momentum
        self._means = mean_columns(self.problem, problem.marginals)
        self.row, self.column = (term.double() for term in own_terms(problem, problem.marginals))
        a, b = problem.marginals
        means = self._means
        if self.problem.loss.floor > 0:
            means = mean_columns(problem, problem.marginals)
        total = (a @ means[0].double()) @ (b @ means[1].double()) / self.problem.loss.parts
        self.product = product_value(problem, (self.row, self.column), total)

    def start(self) -> None:
        """Return ``None``: the product plan needs no anchors."""

    def linearise(self, coupling: Anchors | None) -> Cost:
        """Return the factored cost at the anchors; at a x b it is known, of a rank of few parts."""
        left, right = self._means
        left = left / self.problem.loss.parts
        if coupling is not None:
            near, far = self._centred_columns(coupling)
            left = torch.cat([near / self.n_anchors, left], dim=1)
            right = torch.cat([far, right], dim=1)
        cost = FactoredCost.of_products(4 * self.problem.alpha * left, right)
        return add_linear(cost.centred(), self.problem)

    def _centred_columns(self, anchors: Anchors) -> tuple[Tensor, Tensor]:
        """Return DX[:, k] - x and DY[:, l] - y, of a cross term in parts in one part for each pair.

        Any number of pairs in a row is spread evenly over the parts.
        """
        loss = self.problem.loss
        parts = spread_parts(len(anchors.source), loss.parts, anchors.source.device)
        near, far = (
            loss.part(side, provider.columns(index), parts)
            - (mean if loss.parts == 1 else mean[:, parts])
            for side, (provider, index, mean) in enumerate(
                zip((self.problem.source, self.problem.target), anchors, self._means, strict=True)
            )
        )
        return near, far

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
        near, far = self._centred_columns(index)
        left, right = (
            torch.cat(pair, dim=1) for pair in zip((near, far), self._means, strict=True)
        )
        left, right = left - (a * left).sum(0), right - (b * right).sum(0)
        # <u_s v_s', u_t v_t'> of the terms of the cost, one for each anchor; those after are known
        gram = ((a * left).T @ left * ((b * right).T @ right)).double()
        count, known = len(index.source), self.problem.loss.parts
        parts = spread_parts(count, known, gram.device)
        # two anchors of one part, which are drawn independently
        same = (parts[:, None] == parts).double().fill_diagonal_(0)
        drawn = gram[:count, :count]
        together = (same * drawn).sum() / same.sum().clamp_min(1)
        variance = (drawn.diagonal().mean() - together).clamp_min(0) * (same.sum() > 0)
        share = torch.full_like(gram[0], 1 / count)
        share[count:] = 1 / known
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

        Given an anchor (k, l) ~ P the mean loss of DX_ik and DY_jl over (i, j) ~ P is computed
        exactly, so the anchors' values are independent and their mean is unbiased. Where the cross
        term is no product that mean is one over further pairs, the same for all anchors.
        """
        anchors, loss = plan.sample(self.n_anchors, generator), LOSSES[self.problem.loss.name]
        left = self.problem.source.columns(anchors.source).double()
        right = self.problem.target.columns(anchors.target).double()
        shared = 0.0
        if loss.cross is None:
            count = min(_MOST_PAIRS, max(2, _PAIR_ENTRIES // self.n_anchors))
            pairs = plan.sample(count, generator)
            table = loss(left[pairs.source], right[pairs.target])
            values = table.mean(0)
            shared = float(table.mean(1).var()) / len(table)
        else:
            p, q = masses
            cross = (loss.cross[0](left) * (plan @ loss.cross[1](right))).sum(0)
            values = p @ loss.own[0](left) + q @ loss.own[1](right) - 2 * cross
        if self.n_anchors == 1:
            return QuadraticValue(float(values), float("nan"))
        error = (float(values.var()) / self.n_anchors + shared) ** 0.5
        return QuadraticValue(float(values.mean()), error)


def make_gradient(name: str, problem: Problem, n_anchors: int, momentum: float) -> Gradient:
    """Build a gradient by name."""
    if name == "dense":
        return DenseGradient(problem)
    if name == "factored":
        return FactoredGradient(problem)
    return SampledGradient(problem, n_anchors, momentum)
