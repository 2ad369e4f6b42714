"""Checks of what a plan is asked for: values, points, rows, counts."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import Tensor

from torchgw._boundary.arrays import to_tensor
from torchgw._boundary.checks import check_count, check_within
from torchgw._errors import InvalidInputError

# Relative difference of two masses that rounding can explain. [L265]
_MASS_TOLERANCE = 1e-4


def as_values(name: str, value: Any, device: torch.device) -> Tensor:
    """Convert numbers that a plan multiplies, on its device; a tensor keeps its gradient."""
    checked = to_tensor(name, value)
    return (value if isinstance(value, Tensor) else checked).to(device)


def as_points_of(name: str, value: Any, count: int, device: torch.device) -> Tensor:
    """Convert points that a plan averages to float64, (count, d)."""
    points = as_values(name, value, device).double()
    if points.ndim != 2 or points.shape[0] != count:
        raise InvalidInputError(
            f"`{name}` must have shape ({count}, d), one row per target point; "
            f"got {tuple(points.shape)}."
        )
    return points


def as_index(value: Any, count: int, device: torch.device) -> Tensor:
    """Convert row numbers to an integer tensor (s,); negative ones count from the end."""
    index = torch.atleast_1d(to_tensor("index", value)).to(device)
    whole = not (index.dtype.is_floating_point or index.dtype == torch.bool)
    if index.ndim != 1 or not (whole or index.numel() == 0):
        raise InvalidInputError(
            f"`index` must be row numbers, integers of shape (s,); got {index.dtype} of shape "
            f"{tuple(index.shape)}. Pass `mask.nonzero()[:, 0]` for a mask."
        )
    index = index.to(torch.int64)
    if index.numel() and not -count <= int(index.min()) <= int(index.max()) < count:
        raise InvalidInputError(
            f"`index` must be within 0 and {count - 1}; got {int(index.min())} to "
            f"{int(index.max())}."
        )
    return torch.where(index < 0, index + count, index)


def as_mass(name: str, value: Any, weight: Tensor) -> Tensor:
    """Convert masses that a plan is to have in place of its weights."""
    mass = as_values(name, value, weight.device).to(weight.dtype)
    if mass.shape != weight.shape or not bool((mass >= 0).all() and mass.isfinite().all()):
        raise InvalidInputError(
            f"`{name}` must be {len(weight)} finite masses, none negative; got shape "
            f"{tuple(mass.shape)}."
        )
    return mass


def check_equal_masses(a: Tensor, b: Tensor) -> None:
    """Refuse marginals of different mass, which no plan can have."""
    first, second = float(a.sum()), float(b.sum())
    if abs(first - second) > _MASS_TOLERANCE * max(first, second):
        raise InvalidInputError(
            f"`a` and `b` must have equal sums; got {first:.6g} and {second:.6g}. Scale one of "
            "them, or pass both."
        )


def check_entries(k: Any, count: int) -> int:
    """Check how many entries of each row are wanted, of ``count``."""
    check_within("k", k, 1, count)
    return int(k)


def check_threshold(threshold: Any) -> None:
    """Refuse anything but a share of a row's mass."""
    if not isinstance(threshold, Real) or not 0 <= threshold <= 1:  # type: ignore[operator]
        raise InvalidInputError(
            f"`threshold` must be a share of a row's mass, within 0 and 1; got {threshold!r}."
        )


def check_draw(count: object, generator: object, device: torch.device) -> None:
    """Check the number of draws from a plan and their generator."""
    check_count("count", count)
    if not isinstance(generator, torch.Generator) or generator.device.type != device.type:
        where = getattr(generator, "device", type(generator).__name__)
        raise InvalidInputError(
            f"`generator` must be a torch.Generator(device='{device}'), where the plan is; got "
            f"{where}."
        )
