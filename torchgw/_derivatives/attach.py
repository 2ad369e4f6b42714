"""Gradients of a solve: of its objective by the envelope theorem, of its plan implicitly.

A solve ends as always, without a graph. Then its objective and its plan are attached to the inputs
that require gradients (docs/algorithm.md, equations 20 to 26).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgw._boundary.plans import as_index, as_points_of
from torchgw._derivatives.implicit import Response, Upstream, respond
from torchgw._derivatives.second import Change, along, change_of_cost, own_terms, scalar
from torchgw._derivatives.surrogate import linear, pairs, sampled_pairs
from torchgw._derivatives.tracked import Definition, Model
from torchgw._derivatives.unrolled import unroll
from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw._gradients.dense import DenseGradient
from torchgw._gradients.factored import FactoredGradient
from torchgw._plans.contract import Plan
from torchgw._plans.pairs import Anchors
from torchgw._plans.transport import TransportPlan
from torchgw._problem.problem import Problem
from torchgw._results.result import GWResult
from torchgw._solve.options import Differentiable
from torchgw._typing import HessianProduct, Potentials

__all__ = ["DifferentiablePlan", "attach"]

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
    objective: float
    names: tuple[str, ...]
    anchors: Anchors | None  # of a sampled solve, in place of exact products
    by_alpha: float = 0.0  # <L(P), P> - <M, P>, the derivative by alpha

    def model(self, inputs: tuple[Tensor, ...]) -> Model:
        """Write the problem as a function of the inputs named."""
        return Model.of(self.definition, dict(zip(self.names, inputs, strict=True)))

    def respond(self, upstream: Upstream, masses: tuple[Tensor, Tensor] | None = None) -> Response:
        """Find how the plan responds to its inputs as far as a function of it can see."""
        given = self.definition.problem
        bare = Problem(given.source, given.target, given.marginals, given.alpha, None)
        bare = bare.to(self.plan.dtype)
        stored = bare.source.factors() is None and bare.target.factors() is None
        gradient = DenseGradient(bare) if stored else FactoredGradient(bare)
        return respond(self.plan, gradient, upstream, masses)

    def change(self, inputs: tuple[Tensor, ...], direction: tuple[Tensor, ...]) -> Change:
        """Find how weights, plan and potentials change along a direction of the inputs."""
        with torch.enable_grad():
            model = self.model(inputs)
            cost = change_of_cost(model, self.plan, inputs, direction).to(self.plan.dtype)
            rates = [along(part, inputs, direction).detach() for part in (model.a, model.b)]
            own = [along(part, inputs, direction).detach() for part in own_terms(model)]
        shares = []
        for rate, weight in zip(rates, (model.a.detach(), model.b.detach()), strict=True):
            if bool((rate[weight == 0] != 0).any()):
                raise UnsupportedError(_ZERO_WEIGHTS)
            shares.append(torch.where(weight > 0, rate / torch.where(weight > 0, weight, 1.0), 0.0))
        response = self.respond(lambda rows: cost.rows(rows).dense().matrix, (shares[0], shares[1]))
        f, g = (
            part.double() - self.plan.epsilon * share + term
            for part, share, term in zip((response.u, response.v), shares, own, strict=True)
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


def implicit_plan(link: Link, inputs: tuple[Tensor, ...]) -> DifferentiablePlan:
    """Give the plan of a finished solve implicit derivatives by its inputs."""

    def product(transposed: bool, table: Tensor) -> Tensor:
        result: Tensor = _Product.apply(link, transposed, table, *inputs)  # type: ignore[no-untyped-call]
        return result

    return DifferentiablePlan(link.plan, product)


class _Refuse(torch.autograd.Function):
    """The identity, with an error in place of a derivative."""

    @staticmethod
    def forward(ctx: Any, message: str, value: Tensor, *inputs: Tensor) -> Tensor:
        ctx.message = message
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        raise UnsupportedError(ctx.message)


class _Product(torch.autograd.Function):
    """plan @ values, differentiable in the values and the inputs of the solve."""

    @staticmethod
    def forward(ctx: Any, link: Link, transposed: bool, values: Tensor, *inputs: Tensor) -> Tensor:
        ctx.link, ctx.transposed = link, transposed
        ctx.save_for_backward(values, *inputs)
        result: Tensor = (link.plan.T if transposed else link.plan) @ values
        return result

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        (gradient,) = upstream
        link, transposed = ctx.link, ctx.transposed
        values, *inputs = ctx.saved_tensors
        by_values = None
        if ctx.needs_input_grad[2]:
            by_values = _Product.apply(link, not transposed, gradient, *inputs)  # type: ignore[no-untyped-call]
        if not any(ctx.needs_input_grad[3:]):
            return None, None, by_values, *(None for _ in inputs)
        left, right = (values, gradient) if transposed else (gradient, values)
        with torch.no_grad():
            by_inputs = _plan_gradient(link, tuple(inputs), left.detach(), right.detach())
        if torch.is_grad_enabled():
            by_inputs = [
                _refuse(_TWICE_PLAN, part, gradient, values, *inputs) for part in by_inputs
            ]
        return None, None, by_values, *by_inputs


def _plan_gradient(
    link: Link, inputs: tuple[Tensor, ...], left: Tensor, right: Tensor
) -> list[Tensor]:
    """Differentiate by the inputs a function whose gradient in P is left @ right.T."""
    left, right = (part.to(link.plan.dtype) for part in (left, right))
    response = link.respond(lambda rows: left[rows] @ right.T)
    still = link.model(inputs)
    with torch.enable_grad():
        copies = tuple(part.detach().requires_grad_() for part in inputs)
        moving = link.model(copies)
        total = response.u.double() @ moving.a + response.v.double() @ moving.b
        total = total - 4 * moving.alpha * pairs(moving, still, response, link.plan)
        total = total + (1 - moving.alpha) * linear(moving, still, response)
    return _derivatives(total, copies)


class _Loss(torch.autograd.Function):
    """The entropic objective, whose derivative is that at a fixed plan."""

    @staticmethod
    def forward(ctx: Any, link: Link, *inputs: Tensor) -> Tensor:
        ctx.link = link
        ctx.hessian_product = partial(hessian_product, link, inputs)
        ctx.save_for_backward(*inputs)
        return link.potentials.f.new_tensor(link.objective)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        inputs = ctx.saved_tensors
        if torch.is_grad_enabled():
            parts = _Gradient.apply(ctx.link, *inputs)  # type: ignore[no-untyped-call]
        else:
            parts = _loss_gradient(ctx.link, inputs)
        return None, *((upstream[0].to(part) * part) for part in parts)


class _Gradient(torch.autograd.Function):
    """The gradient of the objective, whose derivative is a product with the Hessian."""

    @staticmethod
    def forward(ctx: Any, link: Link, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.link = link
        ctx.save_for_backward(*inputs)
        return tuple(_loss_gradient(link, inputs))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        inputs = ctx.saved_tensors
        # the Hessian is symmetric
        parts, _ = _hessian_product(ctx.link, inputs, upstream)
        if torch.is_grad_enabled():
            parts = [_refuse(_THRICE, part, *inputs, *upstream) for part in parts]
        return None, *parts


def _refuse(message: str, value: Tensor, *inputs: Tensor) -> Tensor:
    """Make the derivative of a value by the inputs an error."""
    refused: Tensor = _Refuse.apply(message, value, *inputs)  # type: ignore[no-untyped-call]
    return refused


def _loss_gradient(link: Link, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Differentiate the objective at a fixed plan, equation 20."""
    plan = link.plan
    with torch.enable_grad():
        copies = tuple(part.detach().requires_grad_() for part in inputs)
        still, moving = link.model(tuple(part.detach() for part in inputs)), link.model(copies)
        total = link.potentials.f @ moving.a + link.potentials.g @ moving.b
        if moving.tracked & {"X", "D_X"}:
            total = total + moving.alpha * (still.a @ moving.source.mean_square(still.a))
        if moving.tracked & {"Y", "D_Y"}:
            total = total + moving.alpha * (still.b @ moving.target.mean_square(still.b))
        if link.anchors is None:
            cross = pairs(moving, still, plan, plan)
        else:
            cross = sampled_pairs(moving, still, plan, link.anchors)
        total = total - 2 * moving.alpha * cross
        total = total + (1 - moving.alpha) * linear(moving, still, plan)
        if "alpha" in link.names:
            total = total + link.by_alpha * copies[link.names.index("alpha")]
        return _derivatives(total, copies)


def _hessian_product(
    link: Link, inputs: tuple[Tensor, ...], direction: tuple[Tensor, ...]
) -> tuple[list[Tensor], Response]:
    """Multiply a direction by the Hessian of the objective, equation 42."""
    if link.anchors is not None:
        raise UnsupportedError(_SAMPLED)
    if "alpha" in link.names:
        raise UnsupportedError("Second derivatives do not know `alpha`: pass float(alpha).")
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
    link: Link, inputs: tuple[Tensor, ...], direction: Mapping[str, Tensor] | Tensor
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
        parts, response = _hessian_product(link, inputs, steps)
    found = {name: part.detach() for name, part in zip(names, parts, strict=True)}
    return HessianProduct(found, response.residual, response.iterations, response.converged)


def _derivatives(total: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Differentiate a scalar, with zeros for inputs that it does not depend on."""
    parts = torch.autograd.grad(total, inputs, allow_unused=True)
    return [
        torch.zeros_like(item) if part is None else part
        for part, item in zip(parts, inputs, strict=True)
    ]


def attach(
    result: GWResult,
    definition: Definition,
    inputs: dict[str, Tensor],
    mode: Differentiable,
    generator: torch.Generator,
    by_alpha: float,
) -> GWResult:
    """Attach the loss of a finished solve, and its plan, to the inputs that require gradients.

    ``by_alpha`` is <L(P), P> - <M, P>, the derivative by alpha.
    """
    tensors, plan = tuple(inputs.values()), result.lazy_plan
    if mode == "unrolled":
        matrix, loss = unroll(Model.of(definition, inputs), plan)

        def product(turned: bool, values: Tensor) -> Tensor:
            return (matrix.T if turned else matrix).to(values.dtype) @ values

        return replace(result, loss=loss, lazy_plan=DifferentiablePlan(plan, product))
    count = result.report.n_anchors
    anchors = None if count is None else plan.sample(count, generator)
    link = Link(
        definition,
        plan,
        Potentials(*result.potentials),
        result.report.objective,
        tuple(inputs),
        anchors,
        by_alpha,
    )
    loss = _Loss.apply(link, *tensors)  # type: ignore[no-untyped-call]
    lazy = implicit_plan(link, tensors) if mode == "implicit" else plan
    return replace(result, loss=loss, lazy_plan=lazy)
