"""What autocast and autograd see of a product with a plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["differentiable_product", "exactly"]

Method = TypeVar("Method", bound=Callable[..., Any])


def exactly(method: Method) -> Method:
    """Keep autocast, which would round products of exponents, out of a method of a plan."""

    @functools.wraps(method)
    def run(plan: Any, *args: Any, **options: Any) -> Any:
        kind = plan.device.type
        if not torch.is_autocast_enabled(kind):
            return method(plan, *args, **options)
        with torch.autocast(kind, enabled=False):
            return method(plan, *args, **options)

    return run  # type: ignore[return-value]


def differentiable_product(plan: Any, values: Tensor) -> Tensor:
    """Return plan @ values, (n, c), for a plan that is constant and values that are not."""
    product: Tensor = _Product.apply(plan, values)  # type: ignore[no-untyped-call]
    return product


class _Product(torch.autograd.Function):
    """plan @ values for a plan that is constant; its derivative is streamed likewise."""

    @staticmethod
    def forward(ctx: Any, plan: Any, values: Tensor) -> Tensor:
        ctx.plan = plan
        product: Tensor = plan @ values
        return product

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        return None, ctx.plan.T @ upstream[0]
