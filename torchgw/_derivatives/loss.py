"""The objective of a finished solve as a function of its inputs, differentiable twice.

Its gradient is that at a fixed plan (the envelope theorem); products with its Hessian are linear
systems, which the solve knows how to solve (docs/algorithm.md, equations 20 and 42).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgw._boundary.arrays import check_finite, check_magnitude
from torchgw._derivatives.tracked import Definition, Model
from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw._plans.transport import TransportPlan
from torchgw._typing import HessianProduct

_THRICE = "The loss can be differentiated twice, and its third derivative is not implemented."


class System(NamedTuple):
    """The residual and the iterations of a product with the Hessian."""

    residual: float  # relative
    iterations: int  # products with its matrix
    converged: bool


@dataclass(eq=False)
class Solved(ABC):
    """A finished solve whose objective can be differentiated, with marginals held or relaxed."""

    definition: Definition
    plan: TransportPlan
    objective: Tensor  # (), float64
    names: tuple[str, ...]  # of the inputs

    def model(self, inputs: tuple[Tensor, ...]) -> Model:
        """Write the problem as a function of the inputs; weights have sum one."""
        return Model.of(self.definition, dict(zip(self.names, inputs, strict=True)))

    @abstractmethod
    def gradient(self, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        """Differentiate the objective by the inputs."""

    @abstractmethod
    def hessian_product(
        self, inputs: tuple[Tensor, ...], direction: tuple[Tensor, ...]
    ) -> tuple[list[Tensor], System]:
        """Multiply a direction by the Hessian of the objective."""

    @abstractmethod
    def plan_gradient(
        self, inputs: tuple[Tensor, ...], left: Tensor, right: Tensor
    ) -> list[Tensor]:
        """Differentiate by the inputs a function whose gradient in P is left @ right.T."""


def loss_of(solved: Solved, inputs: tuple[Tensor, ...]) -> Tensor:
    """Give the objective of a finished solve its derivatives by the inputs."""
    return call(_Loss, solved, *inputs)


class Step(torch.autograd.Function):
    """An autograd function that keeps nothing, and is called for each member of a batch."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        found = []
        for place in range(info.batch_size):
            one = (
                item.select(dim, place) if isinstance(item, Tensor) and dim is not None else item
                for item, dim in zip(inputs, in_dims, strict=True)
            )
            found.append(call(cls, *one))
        if isinstance(found[0], Tensor):
            return torch.stack(found), 0
        parts = tuple(torch.stack(part) for part in zip(*found, strict=True))
        return parts, (0,) * len(parts)


def refused(message: str) -> Any:
    """Make a method that refuses a derivative with a message."""

    def refuse(ctx: Any, *given: Tensor | None) -> Any:
        raise UnsupportedError(message)

    return staticmethod(refuse)


class _Loss(Step):
    """The entropic objective, whose derivative is that at a fixed plan."""

    @staticmethod
    def forward(solved: Solved, *inputs: Tensor) -> Tensor:
        return solved.objective.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.solved, *tensors = inputs
        ctx.hessian_product = partial(hessian_product, ctx.solved, tuple(tensors))
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        parts = call(_Gradient, ctx.solved, *ctx.saved_tensors)
        return None, *((upstream[0].to(part) * part) for part in parts)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        parts = call(_Gradient, ctx.solved, *ctx.saved_tensors)
        slope: Tensor = ctx.solved.objective.new_zeros(())
        for part, step in zip(parts, tangents[1:], strict=True):
            if step is not None:
                slope = slope + (part * step).sum()
        return slope


class _Gradient(Step):
    """The gradient of the objective, whose derivative is a product with the Hessian."""

    @staticmethod
    def forward(solved: Solved, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(solved.gradient(inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.solved, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        # the Hessian is symmetric
        return None, *call(_Curvature, ctx.solved, *ctx.saved_tensors, *upstream)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        inputs = ctx.saved_tensors
        steps = [
            torch.zeros_like(item) if step is None else step
            for item, step in zip(inputs, tangents[1:], strict=True)
        ]
        return call(_Curvature, ctx.solved, *inputs, *steps)


class _Curvature(Step):
    """A product with the Hessian; inputs and directions are given one after the other."""

    @staticmethod
    def forward(solved: Solved, *tensors: Tensor) -> tuple[Tensor, ...]:
        count = len(tensors) // 2
        return tuple(solved.hessian_product(tensors[:count], tensors[count:])[0])

    backward = jvp = refused(_THRICE)


def hessian_product(
    solved: Solved, inputs: tuple[Tensor, ...], direction: Mapping[str, Tensor] | Tensor
) -> HessianProduct:
    """Multiply a direction, as the user gave it, by the Hessian of the objective."""
    names = solved.names
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
    steps = []
    for name, item in zip(names, inputs, strict=True):
        step = direction.get(name, torch.zeros_like(item))
        if not isinstance(step, Tensor) or step.shape != item.shape or step.is_complex():
            raise InvalidInputError(
                f"`direction` for {name} must be a real tensor of shape {tuple(item.shape)}."
            )
        steps.append(step.to(item))
        check_finite(f"direction[{name!r}]", step)
        check_magnitude(f"direction[{name!r}]", steps[-1])
    with torch.no_grad():
        parts, system = solved.hessian_product(inputs, tuple(steps))
    found = {name: part.detach() for name, part in zip(names, parts, strict=True)}
    return HessianProduct(found, *system)


def derivatives(total: Tensor, inputs: tuple[Tensor, ...], *, retain: bool = False) -> list[Tensor]:
    """Differentiate a scalar, with zeros for inputs that it does not depend on."""
    parts = torch.autograd.grad(total, inputs, retain_graph=retain, allow_unused=True)
    return [
        torch.zeros_like(item) if part is None else part
        for part, item in zip(parts, inputs, strict=True)
    ]


def call(function: Any, *inputs: Any) -> Any:
    """Call an autograd function."""
    return function.apply(*inputs)
