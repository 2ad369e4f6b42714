"""Derivatives of solves whose marginals are held: of the objective, and of the plan.

The objective is differentiated at a fixed plan, the plan by its fixed point (docs/algorithm.md,
equations 20 to 26 and 42).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchgw._derivatives.density import Response
from torchgw._derivatives.implicit import WORRYING, respond
from torchgw._derivatives.loss import Solved, System, derivatives
from torchgw._derivatives.second import (
    Change,
    along,
    change_of_cost,
    cross,
    own_terms,
    paired,
    scalar,
)
from torchgw._derivatives.tracked import Definition
from torchgw._errors import UnsupportedError
from torchgw._plans.contract import Anchors
from torchgw._plans.transport import TransportPlan
from torchgw._sinkhorn.cost import Cost, FactoredCost
from torchgw._typing import Potentials

_SAMPLED = (
    "Second derivatives need a fixed point, and a sampled gradient has none. Pass gradient='dense' "
    "or 'factored'."
)
_ZERO_WEIGHTS = (
    "Second derivatives by `a` and `b` need positive weights. Drop the points of weight zero."
)


@dataclass(eq=False)
class BalancedSolve(Solved):
    """A finished solve, and the names of the inputs that its derivatives are taken by."""

    definition: Definition
    plan: TransportPlan
    potentials: Potentials  # of the whole cost
    objective: Tensor  # (), float64
    names: tuple[str, ...]
    anchors: Anchors | None  # of a sampled solve, in place of exact products
    # derivatives by numbers: <L(P), P> - <M, P> by alpha, KL(P | a x b) by epsilon
    slopes: Mapping[str, float]

    def gradient(self, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        """Differentiate the objective at a fixed plan, equation 20."""
        with torch.enable_grad():
            copies = tuple(part.detach().requires_grad_() for part in inputs)
            still, moving = self.model(tuple(part.detach() for part in inputs)), self.model(copies)
            # its derivative by alpha is known
            alpha, tracked = self.definition.problem.alpha, moving.tracked - {"alpha"}
            moving = replace(moving, alpha=alpha, tracked=tracked)
            total = scalar(moving, still, self.plan, self.potentials, anchors=self.anchors)
            for name, copy in zip(self.names, copies, strict=True):
                if name in self.slopes:
                    total = total + self.slopes[name] * copy
            return derivatives(total, copies)

    def hessian_product(
        self, inputs: tuple[Tensor, ...], direction: tuple[Tensor, ...]
    ) -> tuple[list[Tensor], System]:
        """Multiply a direction by the Hessian of the objective, equation 42."""
        if self.anchors is not None:
            raise UnsupportedError(_SAMPLED)
        copies = tuple(part.detach().requires_grad_() for part in inputs)
        steps = tuple(part.detach().to(item) for part, item in zip(direction, inputs, strict=True))
        change = self.change(copies, steps)
        with torch.enable_grad():
            still, moving = self.model(tuple(part.detach() for part in inputs)), self.model(copies)
            fixed = scalar(moving, still, self.plan, self.potentials)
            total = scalar(moving, still, self.plan, self.potentials, change)
            # epsilon alone has a derivative that only the plan moves
            if fixed.requires_grad:
                first = torch.autograd.grad(fixed, copies, create_graph=True, allow_unused=True)
                for part, step in zip(first, steps, strict=True):
                    if part is not None and part.requires_grad:
                        total = total + (part * step).sum()
            made = change.plan
            system = System(made.residual, made.iterations, made.residual <= WORRYING)
            return derivatives(total, copies), system

    def plan_gradient(
        self, inputs: tuple[Tensor, ...], left: Tensor, right: Tensor
    ) -> list[Tensor]:
        """Differentiate by the inputs a function whose gradient in P is left @ right.T."""
        left, right = (part.to(self.plan.dtype) for part in (left, right))
        response = self.respond(FactoredCost.of_products(-left, right))
        with torch.enable_grad():
            copies = tuple(part.detach().requires_grad_() for part in inputs)
            moving = self.model(copies)
            total = response.u.double() @ moving.a + response.v.double() @ moving.b
            if moving.source_moves or moving.target_moves:
                total = total - 4 * moving.alpha * cross(moving, response, self.plan)
            if moving.linear_moves:
                total = total + (1 - moving.alpha) * paired(moving.linear, response)
            if moving.epsilon is not None:
                share = paired(self.plan.cost, response) / self.plan.epsilon
                total = total - moving.epsilon * share
        return derivatives(total, copies)

    def respond(self, upstream: Cost, masses: tuple[Tensor, Tensor] | None = None) -> Response:
        """Compute the response of the plan to an upstream gradient or a change of the cost."""
        return respond(self.plan, self.definition.problem, upstream, masses)

    def change(self, inputs: tuple[Tensor, ...], direction: tuple[Tensor, ...]) -> Change:
        """Find how weights, plan and potentials change along a direction of the inputs."""
        with torch.enable_grad():
            model = self.model(inputs)
            cost = change_of_cost(model, self.plan, inputs, direction).to(self.plan.dtype)
            rates = [along(part, inputs, direction).detach() for part in (model.a, model.b)]
            own = [along(part, inputs, direction).detach() for part in own_terms(model)]
            growth: Tensor | float = 0.0
            if model.epsilon is not None:
                growth = along(model.epsilon, inputs, direction).detach() / self.plan.epsilon
        shares = []
        for rate, weight in zip(rates, (model.a.detach(), model.b.detach()), strict=True):
            if bool((rate[weight == 0] != 0).any()):
                raise UnsupportedError(_ZERO_WEIGHTS)
            shares.append(torch.where(weight > 0, rate / torch.where(weight > 0, weight, 1.0), 0.0))
        response = self.respond(cost, (shares[0], shares[1]))
        f, g = (
            part.double() - self.plan.epsilon * share + term + growth * before.double()
            for part, share, term, before in zip(
                (response.u, response.v), shares, own, self.plan.potentials, strict=True
            )
        )
        return Change(rates[0], rates[1], response, f, g)
