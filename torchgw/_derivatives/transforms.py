"""Solves inside the transforms of torch.func: grad, vjp, jvp, jacrev, jacfwd and hessian.

A solve draws numbers, stops when it has converged and changes tensors in place, none of which a
transform can follow. So it runs below all of them, on the plain tensors, and its loss and its plan
are then attached to those that are transformed.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchgw._errors import UnsupportedError

F = TypeVar("F", bound=Callable[..., Any])

_BATCHED = (
    "torch.func.vmap would need one solve for each input of the batch. Pass the list to "
    "torchgw.solve_many, or call solve in a loop. Directions may be batched, as by "
    "torch.func.hessian."
)


class _Below(torch.autograd.Function):
    """Call a function with plain tensors in place of those of the transforms around it."""

    @staticmethod
    def forward(call: Callable[..., None], *tensors: Tensor) -> Tensor:
        with torch.enable_grad():
            call(*(item.detach().requires_grad_() for item in tensors))
        return torch.zeros((), device="cpu")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        return tuple(None for _ in ctx.needs_input_grad)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> None:
        return None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        raise UnsupportedError(_BATCHED)


def through_transforms(function: F) -> F:
    """Make a solve one step of the transforms of torch.func, where one is around it."""

    @functools.wraps(function)
    def called(**kwargs: Any) -> Any:
        given = kwargs
        features = given.get("features")
        if isinstance(features, (tuple, list)) and len(features) == 2:
            given |= {"F_X": features[0], "F_Y": features[1]}
        # torch.func has no public name for this
        is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
        tensors = {name: item for name, item in given.items() if isinstance(item, Tensor)}
        moved = {name: item for name, item in tensors.items() if is_transformed(item)}
        return _attached(function, given, moved) if moved else function(**kwargs)

    return called  # type: ignore[return-value]


def _attached(function: Callable[..., Any], given: dict[str, Any], moved: dict[str, Tensor]) -> Any:
    """Solve below the transforms, and attach loss and plan to the tensors that they follow."""
    from torchgw._derivatives.loss import loss_of
    from torchgw._derivatives.plan import DifferentiablePlan, implicit_plan

    if given["differentiable"] == "unrolled":
        raise UnsupportedError(
            "differentiable='unrolled' records iterations, which transforms of torch.func cannot "
            "follow. Pass 'value' or 'implicit'."
        )
    results = []

    def call(*tensors: Tensor) -> None:
        inner = given | dict(zip(moved, tensors, strict=True))
        pair = inner.pop("F_X", None), inner.pop("F_Y", None)
        if pair[0] is not None:
            inner["features"] = pair
        results.append(function(**inner))

    _Below.apply(call, *moved.values())  # type: ignore[no-untyped-call]
    (result,) = results
    solved = result.loss.grad_fn.solved
    inputs = tuple(moved[name] for name in solved.names)
    plan = result.lazy_plan
    if isinstance(plan, DifferentiablePlan):
        plan = implicit_plan(solved, inputs)
    return replace(result, tracked=loss_of(solved, inputs), lazy_plan=plan)
