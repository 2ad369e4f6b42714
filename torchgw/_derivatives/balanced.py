"""Derivatives of solves whose marginals are held: of the objective, and of the plan.

With T(theta, P, f, g) the objective as equation 20 of docs/algorithm.md differentiates it, whose
derivative by theta at a fixed plan and fixed potentials is the gradient, the derivative of the
gradient along a direction d is

    grad_theta [ grad_theta T . d + <dT/dP, P'> + <f', a> + <g', b> ],

where P', f' and g' are how plan and potentials change along d: one linear system. This is equation
42 there. The plan is differentiated by its fixed point, equations 23 to 26.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgw._derivatives.implicit import WORRYING, Response, respond
from torchgw._derivatives.loss import Solved, System, derivatives
from torchgw._derivatives.tracked import Model
from torchgw._errors import UnsupportedError
from torchgw._plans.contract import Anchors
from torchgw._plans.transport import TransportPlan
from torchgw._sinkhorn.problem import Cost, DenseCost, FactoredCost, added
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
    """A finished solve whose marginals are held."""

    potentials: Potentials  # of the whole cost
    anchors: Anchors | None  # of a sampled solve, in place of exact products
    # derivatives that are numbers: <L(P), P> - <M, P> by alpha, KL(P | a x b) by epsilon
    slopes: Mapping[str, float]

    def gradient(self, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        """Differentiate the objective at a fixed plan, equation 20."""
        with torch.enable_grad():
            copies = tuple(part.detach().requires_grad_() for part in inputs)
            still, moving = self.model(tuple(part.detach() for part in inputs)), self.model(copies)
            # the derivative by alpha is known already
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
            # if epsilon is the only input, its derivative changes with the plan alone
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

    def change(self, inputs: tuple[Tensor, ...], direction: tuple[Tensor, ...]) -> "Change":
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


class Change(NamedTuple):
    """How weights, a plan and the potentials of its whole cost change along a direction."""

    a: Tensor  # (n,)
    b: Tensor  # (m,)
    plan: Response  # (n, m)
    f: Tensor  # (n,)
    g: Tensor  # (m,)


def cross(model: Model, matrix: Any, other: Any) -> Tensor:
    """Compute <D_X matrix D_Y, other>, for constant maps over pairs."""
    near, far = model.source.form(), model.target.form()
    if near is not None and far is not None:
        one = near.matrix.T @ (matrix @ far.matrix)
        two = one if other is matrix else near.matrix.T @ (other @ far.matrix)
        return torch.sum((near.form @ one @ far.form) * two)
    if far is not None:
        measured = model.source.apply(matrix @ (far.matrix @ far.form))
        return torch.sum(measured * (other @ far.matrix))
    if near is not None:
        measured = model.target.apply(matrix.T @ (near.matrix @ near.form))
        return torch.sum(measured * (other.T @ near.matrix))
    one, two = (each.stored().double() for each in (matrix, other))
    return torch.sum(model.crossed(one) * two)


def _sampled_cross(moving: Model, still: Model, plan: TransportPlan, anchors: Anchors) -> Tensor:
    """Estimate a scalar that changes like :func:`cross` of a plan with itself, from drawn pairs."""
    # both directions are the same
    (source, target), (moved_source, moved_target) = still.ways[0], moving.ways[0]
    near, far = source.columns(anchors.source), target.columns(anchors.target)
    ahead = (moved_source.columns(anchors.source) * (plan @ far)).sum()
    back = (moved_target.columns(anchors.target) * (plan.T @ near)).sum()
    return torch.add(ahead, back) / len(anchors.source)


def _cross_factors(model: Model, matrix: Any) -> tuple[Tensor, Tensor] | Tensor:
    """Compute D_X matrix D_Y, (n, m), as left @ right.T where a side has factors."""
    near, far = model.source.form(), model.target.form()
    if near is not None:
        encoded = matrix.T @ near.matrix
        return near.matrix @ near.form, model.target.apply(encoded)
    if far is not None:
        encoded = matrix @ far.matrix
        return model.source.apply(encoded), far.matrix @ far.form
    return model.crossed(matrix.stored().double())


def paired(cost: Cost | None, matrix: Any) -> Tensor | float:
    """Compute <cost, matrix>, for a constant map over pairs; without a cost 0."""
    if cost is None:
        return 0.0
    cost = cost.to(torch.float64)
    if isinstance(cost, DenseCost):
        return torch.sum(cost.matrix * matrix.stored().double())
    assert isinstance(cost, FactoredCost)
    one = torch.ones_like(cost.right[:, :1])
    sums = matrix @ one, matrix.T @ torch.ones_like(cost.left[:, :1])
    products = (cost.left * (matrix @ cost.right)).sum()
    return cost.row @ sums[0][:, 0] + cost.column @ sums[1][:, 0] - products


def own_terms(model: Model) -> tuple[Tensor, Tensor]:
    """Compute the terms of rows and columns alone of the whole cost, 2 alpha D^2 a."""
    return (
        2 * model.alpha * model.source.mean_square(model.a),
        2 * model.alpha * model.target.mean_square(model.b),
    )


def scalar(
    moving: Model,
    still: Model,
    plan: TransportPlan,
    potentials: Potentials,
    change: Change | None = None,
    anchors: Anchors | None = None,
) -> Tensor:
    """Make the scalar T, or its derivative along a ``change`` of all but the ``moving`` model."""
    # `anchors` are those of a sampled solve, in place of exact products.
    a, b = still.a, still.b
    f, g, factor = potentials.f, potentials.g, 1.0
    other: TransportPlan | Response = plan
    if change is not None:
        a, b, factor = change.a, change.b, 2.0
        f, g, other = change.f, change.g, change.plan
    total = f @ moving.a + g @ moving.b
    if moving.source_moves:
        total = total + factor * moving.alpha * (a @ moving.source.mean_square(still.a))
    if moving.target_moves:
        total = total + factor * moving.alpha * (b @ moving.target.mean_square(still.b))
    if moving.source_moves or moving.target_moves:
        if anchors is None:
            products = cross(moving, plan, other)
        else:
            products = _sampled_cross(moving, still, plan, anchors)
        total = total - 2 * factor * moving.alpha * products
    if moving.linear_moves:
        total = total + (1 - moving.alpha) * paired(moving.linear, other)
    if moving.epsilon is not None and change is not None:
        # T contains epsilon KL(P | a x b), which is linear in epsilon
        duals = a @ plan.potentials.f.double() + b @ plan.potentials.g.double()
        total = total + moving.epsilon * (duals - paired(plan.cost, other)) / plan.epsilon
    return total


def along(value: Tensor, inputs: tuple[Tensor, ...], direction: tuple[Tensor, ...]) -> Tensor:
    """Differentiate a tensor along a direction of the inputs, by two reverse passes."""
    if not value.requires_grad:
        return torch.zeros_like(value)
    weight = torch.zeros_like(value, requires_grad=True)
    # as an upstream gradient the weight would make PyTorch load sympy
    total = (value * weight).sum()
    parts = torch.autograd.grad(total, inputs, create_graph=True, allow_unused=True)
    terms = [
        (part * step).sum()
        for part, step in zip(parts, direction, strict=True)
        if part is not None and part.requires_grad
    ]
    if not terms:
        return torch.zeros_like(value)
    (found,) = torch.autograd.grad(torch.stack(terms).sum(), weight, allow_unused=True)
    return torch.zeros_like(value) if found is None else found


def change_of_cost(
    model: Model, plan: TransportPlan, inputs: tuple[Tensor, ...], direction: tuple[Tensor, ...]
) -> Cost:
    """Compute how -4 alpha D_X P D_Y + (1 - alpha) M changes along a direction at a fixed P."""

    def step(value: Tensor) -> Tensor:
        return along(value, inputs, direction).detach()

    def factors(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Write the change of left @ right.T as such a product."""
        changed, kept = step(left), right.detach()
        return torch.cat([changed, left.detach()], 1), torch.cat([kept, step(right)], 1)

    parts: list[Cost] = []
    if model.source_moves or model.target_moves:
        found = _cross_factors(model, plan)
        if isinstance(found, Tensor):
            parts.append(DenseCost(step(-4 * model.alpha * found)))
        else:
            parts.append(FactoredCost.of_products(*factors(4 * model.alpha * found[0], found[1])))
    cost, share = model.linear, 1 - model.alpha
    if cost is not None and model.linear_moves:
        cost = cost.to(torch.float64)
        if isinstance(cost, DenseCost):
            parts.append(DenseCost(step(share * cost.matrix)))
        else:
            own = (step(share * part) for part in (cost.row, cost.column))
            parts.append(FactoredCost(*factors(share * cost.left, cost.right), *own))
    if model.epsilon is not None:
        # a step of epsilon changes the plan as one of -step / epsilon times the cost does
        rate = step(model.epsilon) / plan.epsilon
        parts.append(plan.cost.to(torch.float64).scaled(-rate))
    if not parts:
        return FactoredCost.of_products(
            model.a.new_zeros(len(model.a), 1), model.b.new_zeros(len(model.b), 1)
        )
    return reduce(added, parts)
