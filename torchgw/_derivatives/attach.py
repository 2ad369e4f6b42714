"""Gradients of a solve: of its objective by the envelope theorem, of its plan implicitly.

A solve ends as always, without a graph. Then its objective and its plan are attached to the inputs
that require gradients (docs/algorithm.md, equations 20 to 26).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torchgw._boundary.plans import as_index, as_points_of
from torchgw._derivatives.implicit import Response, respond
from torchgw._derivatives.relaxed import RelaxedSolve, check_relaxed
from torchgw._derivatives.second import (
    Change,
    along,
    change_of_cost,
    cross,
    own_terms,
    paired,
    scalar,
)
from torchgw._derivatives.surrogate import linear, pairs, sampled_pairs
from torchgw._derivatives.tracked import Definition, Model
from torchgw._derivatives.unrolled import check_unrolled, unroll
from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw._gradients.dense import DenseGradient
from torchgw._gradients.factored import FactoredGradient
from torchgw._plans.contract import Plan
from torchgw._plans.pairs import Anchors
from torchgw._plans.transport import TransportPlan
from torchgw._problem.marginals import MarginalRule
from torchgw._problem.problem import Problem
from torchgw._results.result import GWResult
from torchgw._sinkhorn.cost import Cost, FactoredCost
from torchgw._solve.options import Differentiable
from torchgw._typing import HessianProduct, Marginals, Potentials

__all__ = ["DifferentiablePlan", "attach", "check_stored", "implicit_plan", "loss_of"]

_TWICE_PLAN = (
    "The plan can be differentiated once; the derivative of its implicit derivative is not "
    "implemented. Pass differentiable='unrolled' on a small problem."
)
_SAMPLED = (
    "Second derivatives need a fixed point, and a sampled gradient has none. Pass gradient='dense' "
    "or 'factored'."
)
_THRICE = "The loss can be differentiated twice, and its third derivative is not implemented."
_ZERO_WEIGHTS = (
    "Second derivatives by `a` and `b` need positive weights. Drop the points of weight zero."
)


class Link(NamedTuple):
    """A finished solve, and the names of the inputs that its derivatives are taken by."""

    definition: Definition
    plan: TransportPlan
    potentials: Potentials  # of the whole cost
    objective: Tensor  # (), float64
    names: tuple[str, ...]
    anchors: Anchors | None  # of a sampled solve, in place of exact products
    # derivatives by numbers: <L(P), P> - <M, P> by alpha, KL(P | a x b) by epsilon
    slopes: Mapping[str, float]

    def model(self, inputs: tuple[Tensor, ...]) -> Model:
        """Write the problem as a function of the inputs named."""
        return Model.of(self.definition, dict(zip(self.names, inputs, strict=True)))

    def respond(self, upstream: Cost, masses: tuple[Tensor, Tensor] | None = None) -> Response:
        """Find how the plan responds to its inputs as far as a function of it can see."""
        given = self.definition.problem
        bare = Problem(given.source, given.target, given.marginals, given.alpha, None)
        bare = bare.to(self.plan.dtype)
        stored = bare.source.factors() is None and bare.target.factors() is None
        gradient = DenseGradient(bare) if stored else FactoredGradient(bare)
        return respond(self.plan, gradient, upstream, masses)

    def gradient(self, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        """Differentiate the objective by the inputs."""
        return _loss_gradient(self, inputs)

    def hessian_product(
        self, inputs: tuple[Tensor, ...], direction: tuple[Tensor, ...]
    ) -> tuple[list[Tensor], Response]:
        """Multiply a direction by the Hessian of the objective."""
        return _hessian_product(self, inputs, direction)

    def plan_gradient(
        self, inputs: tuple[Tensor, ...], left: Tensor, right: Tensor
    ) -> list[Tensor]:
        """Differentiate by the inputs a function whose gradient in P is left @ right.T."""
        return _plan_gradient(self, inputs, left, right)

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


class DifferentiablePlan(TransportPlan):
    """A plan whose products, rows and matrix carry gradients to the inputs of its solve.

    ``product(transposed, values)`` is plan @ values, or plan.T @ values, with a graph; a plan that
    is ``transposed`` leads from target to source.
    """

    def __init__(
        self,
        plan: TransportPlan,
        product: Callable[[bool, Tensor], Tensor],
        *,
        transposed: bool = False,
    ) -> None:
        super().__init__(plan.cost, plan.potentials, plan.weights, plan.epsilon, plan.backend)
        self._differentiable = product
        self._transposed = transposed

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the graph behind, for pickle and deepcopy, which make a constant plan."""
        parts = (self.cost, self.potentials, self.weights, self.epsilon, self.backend, self.masses)
        return TransportPlan, parts

    def __copy__(self) -> DifferentiablePlan:
        """Share everything, the graph too."""
        return DifferentiablePlan(self, self._differentiable, transposed=self._transposed)

    @property
    def T(self) -> DifferentiablePlan:  # noqa: N802 - the name of every array library
        """The plan from target to source."""
        return DifferentiablePlan(super().T, self._differentiable, transposed=not self._transposed)

    def _moved(self) -> tuple[Tensor, Tensor]:
        """Sum rows (n,) and columns (m,), float64; each call has a graph of its own."""
        return Plan._moved(self)

    def _product(self, table: Tensor) -> Tensor:
        """Multiply by values of shape (m, c)."""
        return self._differentiable(self._transposed, table)

    def barycentric(self, points: Any) -> Tensor:
        """Map each source point to the plan-weighted mean of target points.

        A source point of weight zero is mapped as by :meth:`TransportPlan.barycentric`, without a
        gradient.
        """
        points = as_points_of("points", points, self.shape[1], self.device)
        fallback = super().barycentric(points.detach())
        sums = self @ torch.cat([points, torch.ones_like(points[:, :1])], dim=1)
        used = (self.weights.a > 0)[:, None]
        return torch.where(used, sums[:, :-1] / torch.where(used, sums[:, -1:], 1.0), fallback)

    def rows(self, index: Any) -> Tensor:
        """Build the rows of an integer index of shape (s,), shape (s, m)."""
        index = as_index(index, self.shape[0], self.device)
        chosen = torch.zeros(self.shape[0], len(index), dtype=self.dtype, device=self.device)
        chosen[index, torch.arange(len(index), device=self.device)] = 1.0
        rows: Tensor = (self.T @ chosen).T
        return rows

    def stored(self) -> Tensor:
        """Build the (n, m) matrix."""
        matrix: Tensor = self @ torch.eye(self.shape[1], dtype=self.dtype, device=self.device)
        return matrix


def implicit_plan(link: Solved, inputs: tuple[Tensor, ...]) -> DifferentiablePlan:
    """Give the plan of a finished solve implicit derivatives by its inputs."""

    def product(transposed: bool, table: Tensor) -> Tensor:
        result: Tensor = _call(_Product, link, transposed, table, *inputs)
        return result

    return DifferentiablePlan(link.plan, product)


def _call(function: Any, *inputs: Any) -> Any:
    """Call an autograd function."""
    return function.apply(*inputs)


class _Product(torch.autograd.Function):
    """plan @ values, differentiable in the values and the inputs of the solve."""

    @staticmethod
    def forward(link: Solved, transposed: bool, values: Tensor, *inputs: Tensor) -> Tensor:
        result: Tensor = (link.plan.T if transposed else link.plan) @ values
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.link, ctx.transposed, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        (gradient,) = upstream
        link, transposed = ctx.link, ctx.transposed
        values, *inputs = ctx.saved_tensors
        by_values = None
        if ctx.needs_input_grad[2]:
            by_values = _call(_Product, link, not transposed, gradient, *inputs)
        if not any(ctx.needs_input_grad[3:]):
            return None, None, by_values, *(None for _ in inputs)
        left, right = (values, gradient) if transposed else (gradient, values)
        return None, None, by_values, *_call(_PlanGradient, link, left, right, *inputs)


class _PlanGradient(torch.autograd.Function):
    """The derivatives by the inputs of a function whose gradient in the plan is left @ right.T."""

    @staticmethod
    def forward(link: Solved, left: Tensor, right: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(link.plan_gradient(inputs, left, right))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        raise UnsupportedError(_TWICE_PLAN)


def _plan_gradient(
    link: Link, inputs: tuple[Tensor, ...], left: Tensor, right: Tensor
) -> list[Tensor]:
    """Differentiate by the inputs a function whose gradient in P is left @ right.T."""
    left, right = (part.to(link.plan.dtype) for part in (left, right))
    response = link.respond(FactoredCost.of_products(-left, right))
    still, alpha = link.model(inputs), link.definition.problem.alpha
    with torch.enable_grad():
        copies = tuple(part.detach().requires_grad_() for part in inputs)
        moving = link.model(copies)
        total = response.u.double() @ moving.a + response.v.double() @ moving.b
        total = total - 4 * alpha * pairs(moving, still, response, link.plan)
        total = total + (1 - alpha) * linear(moving, still, response)
        if isinstance(moving.alpha, Tensor):
            twice = 4 * cross(still, response, link.plan)
            total = total - moving.alpha * (twice + paired(still.linear, response))
        if moving.epsilon is not None:
            share = paired(link.plan.cost, response) / link.plan.epsilon
            total = total - moving.epsilon * share
    return _derivatives(total, copies)


class LinearSystem(Protocol):
    """How well the linear system of a product with the Hessian is solved."""

    @property
    def residual(self) -> float:
        """Relative residual."""

    @property
    def iterations(self) -> int:
        """Products with its matrix."""

    @property
    def converged(self) -> bool:
        """Whether it is solved."""


class Solved(Protocol):
    """A finished solve whose objective can be differentiated; what :class:`_Loss` reads."""

    @property
    def plan(self) -> TransportPlan:
        """The plan."""

    @property
    def objective(self) -> Tensor:
        """The objective, (), float64."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the inputs."""

    def gradient(self, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        """Differentiate the objective by the inputs."""

    def hessian_product(
        self, inputs: tuple[Tensor, ...], direction: tuple[Tensor, ...]
    ) -> tuple[list[Tensor], LinearSystem]:
        """Multiply a direction by the Hessian of the objective."""

    def plan_gradient(
        self, inputs: tuple[Tensor, ...], left: Tensor, right: Tensor
    ) -> list[Tensor]:
        """Differentiate by the inputs a function whose gradient in P is left @ right.T."""


class _Loss(torch.autograd.Function):
    """The entropic objective, whose derivative is that at a fixed plan."""

    @staticmethod
    def forward(link: Solved, *inputs: Tensor) -> Tensor:
        return link.objective.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.link, *tensors = inputs
        ctx.hessian_product = partial(hessian_product, ctx.link, tuple(tensors))
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        parts = _call(_Gradient, ctx.link, *ctx.saved_tensors)
        return None, *((upstream[0].to(part) * part) for part in parts)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return _one_by_one(_Loss, info, in_dims, *inputs)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        parts = _call(_Gradient, ctx.link, *ctx.saved_tensors)
        slope: Tensor = ctx.link.objective.new_zeros(())
        for part, step in zip(parts, tangents[1:], strict=True):
            if step is not None:
                slope = slope + (part * step).sum()
        return slope


class _Gradient(torch.autograd.Function):
    """The gradient of the objective, whose derivative is a product with the Hessian."""

    @staticmethod
    def forward(link: Solved, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(link.gradient(inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.link, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        # the Hessian is symmetric
        return None, *_call(_Curvature, ctx.link, *ctx.saved_tensors, *upstream)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        return _one_by_one(_Gradient, info, in_dims, *inputs)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        inputs = ctx.saved_tensors
        steps = [
            torch.zeros_like(item) if step is None else step
            for item, step in zip(inputs, tangents[1:], strict=True)
        ]
        return _call(_Curvature, ctx.link, *inputs, *steps)


class _Curvature(torch.autograd.Function):
    """A product with the Hessian; inputs and directions are given one after the other."""

    @staticmethod
    def forward(link: Solved, *tensors: Tensor) -> tuple[Tensor, ...]:
        count = len(tensors) // 2
        return tuple(link.hessian_product(tensors[:count], tensors[count:])[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        raise UnsupportedError(_THRICE)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        raise UnsupportedError(_THRICE)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], link: Solved, *tensors: Tensor) -> Any:
        # one linear system for each direction
        return _one_by_one(_Curvature, info, in_dims, link, *tensors)


def _one_by_one(function: Any, info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
    """Call a function for each member of a batch, as vmap wants it."""
    found = []
    for place in range(info.batch_size):
        one = (
            item.select(dim, place) if isinstance(item, Tensor) and dim is not None else item
            for item, dim in zip(inputs, in_dims, strict=True)
        )
        found.append(function.apply(*one))
    if isinstance(found[0], Tensor):
        return torch.stack(found), 0
    parts = tuple(torch.stack(part) for part in zip(*found, strict=True))
    return parts, (0,) * len(parts)


def _loss_gradient(link: Link, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Differentiate the objective at a fixed plan, equation 20."""
    plan, alpha = link.plan, link.definition.problem.alpha
    with torch.enable_grad():
        copies = tuple(part.detach().requires_grad_() for part in inputs)
        still, moving = link.model(tuple(part.detach() for part in inputs)), link.model(copies)
        total = link.potentials.f @ moving.a + link.potentials.g @ moving.b
        if moving.tracked & {"X", "D_X"}:
            total = total + alpha * (still.a @ moving.source.mean_square(still.a))
        if moving.tracked & {"Y", "D_Y"}:
            total = total + alpha * (still.b @ moving.target.mean_square(still.b))
        if link.anchors is None:
            products = pairs(moving, still, plan, plan)
        else:
            products = sampled_pairs(moving, still, plan, link.anchors)
        total = total - 2 * alpha * products
        total = total + (1 - alpha) * linear(moving, still, plan)
        for name, copy in zip(link.names, copies, strict=True):
            if name in link.slopes:
                total = total + link.slopes[name] * copy
        return _derivatives(total, copies)


def _hessian_product(
    link: Link, inputs: tuple[Tensor, ...], direction: tuple[Tensor, ...]
) -> tuple[list[Tensor], Response]:
    """Multiply a direction by the Hessian of the objective, equation 42."""
    if link.anchors is not None:
        raise UnsupportedError(_SAMPLED)
    copies = tuple(part.detach().requires_grad_() for part in inputs)
    steps = tuple(part.detach().to(item) for part, item in zip(direction, inputs, strict=True))
    change = link.change(copies, steps)
    with torch.enable_grad():
        still, moving = link.model(tuple(part.detach() for part in inputs)), link.model(copies)
        fixed = scalar(moving, still, link.plan, link.potentials)
        first = torch.autograd.grad(fixed, copies, create_graph=True, allow_unused=True)
        total = scalar(moving, still, link.plan, link.potentials, change)
        for part, step in zip(first, steps, strict=True):
            if part is not None and part.requires_grad:
                total = total + (part * step).sum()
        return _derivatives(total, copies), change.plan


def hessian_product(
    link: Solved, inputs: tuple[Tensor, ...], direction: Mapping[str, Tensor] | Tensor
) -> HessianProduct:
    """Multiply a direction, as the user gave it, by the Hessian of the objective."""
    names = link.names
    if isinstance(direction, Tensor):
        if len(names) != 1:
            raise InvalidInputError(
                f"`direction` must be a dictionary with some of {', '.join(names)}: these "
                "require gradients."
            )
        direction = {names[0]: direction}
    if not isinstance(direction, Mapping) or not set(direction) <= set(names) or not direction:
        raise InvalidInputError(
            f"`direction` must be a tensor, or a dictionary of tensors by name, for some of "
            f"{', '.join(names)}."
        )
    for name, item in zip(names, inputs, strict=True):
        given = direction.get(name)
        if given is not None and (not isinstance(given, Tensor) or given.shape != item.shape):
            raise InvalidInputError(
                f"`direction` for {name} must be a tensor of shape {tuple(item.shape)}."
            )
    steps = tuple(
        direction[name] if name in direction else torch.zeros_like(item)
        for name, item in zip(names, inputs, strict=True)
    )
    with torch.no_grad():
        parts, system = link.hessian_product(inputs, steps)
    found = {name: part.detach() for name, part in zip(names, parts, strict=True)}
    return HessianProduct(found, system.residual, system.iterations, system.converged)


def _derivatives(total: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Differentiate a scalar, with zeros for inputs that it does not depend on."""
    parts = torch.autograd.grad(total, inputs, allow_unused=True)
    return [
        torch.zeros_like(item) if part is None else part
        for part, item in zip(parts, inputs, strict=True)
    ]


def loss_of(link: Solved, inputs: tuple[Tensor, ...]) -> Tensor:
    """Give the objective of a finished solve its derivatives by the inputs."""
    loss: Tensor = _call(_Loss, link, *inputs)
    return loss


def check_stored(mode: Differentiable, rule: MarginalRule | None, weights: Marginals) -> None:
    """Refuse, before a solve, derivatives that would store too much, or that there are not."""
    if mode == "unrolled":
        check_unrolled(weights)
    elif rule is not None:
        check_relaxed(weights)


def attach(
    result: GWResult,
    definition: Definition,
    inputs: dict[str, Tensor],
    mode: Differentiable,
    generator: torch.Generator,
    slopes: Mapping[str, float],
) -> GWResult:
    """Attach the loss of a finished solve, and its plan, to the inputs that require gradients.

    ``slopes`` are the derivatives by alpha, <L(P), P> - <M, P>, and by epsilon, KL(P | a x b).
    """
    tensors, plan = tuple(inputs.values()), result.lazy_plan
    if mode == "unrolled":
        matrix, loss = unroll(Model.of(definition, inputs), plan)

        def product(turned: bool, values: Tensor) -> Tensor:
            return (matrix.T if turned else matrix).to(values.dtype) @ values

        return replace(result, loss=loss, lazy_plan=DifferentiablePlan(plan, product))
    potentials = Potentials(*result.potentials)
    objective = potentials.f.new_tensor(result.report.objective)
    link: Solved
    if definition.rule is not None:
        link = RelaxedSolve(definition, definition.rule, plan, objective, tuple(inputs))
        lazy = implicit_plan(link, tensors) if mode == "implicit" else plan
        return replace(result, loss=loss_of(link, tensors), lazy_plan=lazy)
    count = result.report.n_anchors
    anchors = None if count is None else plan.sample(count, generator)
    link = Link(
        definition,
        plan,
        potentials,
        objective,
        tuple(inputs),
        anchors,
        slopes,
    )
    loss = loss_of(link, tensors)
    lazy = implicit_plan(link, tensors) if mode == "implicit" else plan
    return replace(result, loss=loss, lazy_plan=lazy)
