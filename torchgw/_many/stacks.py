"""Padded stacks of problems, as they were passed: distances, linear costs, weights."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._batch.packing import inside_of
from torchgw._boundary.arrays import check_finite, check_magnitude, check_shape, to_numpy, to_tensor
from torchgw._errors import InvalidInputError

# Difference of an entry from its transpose, and of a sum of weights from 1, as rounding. [L391]
_SYMMETRY, _MASS = 1e-5, 1e-4


def read_stack(
    name: str, value: Any, sizes_name: str, sizes: Any, device: torch.device, *, signed: bool
) -> tuple[Tensor, Tensor]:
    """Read distance matrices (B, n, n), zero beyond the points in use, and how many these are."""
    stack = to_tensor(name, value).detach()
    if stack.ndim != 3 or stack.shape[1] != stack.shape[2] or stack.shape[1:] == (0, 0):
        raise InvalidInputError(
            f"`{name}` must be a stack of square matrices, (B, n, n) with n at least 1; got "
            f"{tuple(stack.shape)}. "
            "Lists of matrices are for torchgw.solve_many."
        )
    count, most = stack.shape[:2]
    used = torch.from_numpy(_read_sizes(sizes_name, sizes, count, most)).to(device)
    inside = inside_of(most, used)
    stack = stack.to(device, torch.float64)
    if not bool(inside.all()):
        stack = torch.where(inside[:, :, None] & inside[:, None, :], stack, 0.0)
    check_finite(name, stack, "Replace infinite entries (unreachable pairs) by a finite distance.")
    largest = check_magnitude(name, stack)
    # what is above zero on one side of the diagonal is below it on the other
    if count and float((stack - stack.mT).max()) > _SYMMETRY * largest:
        raise InvalidInputError(f"`{name}` must hold symmetric matrices.")
    least = float(stack.min()) if count else 0.0
    if least < 0 and not signed:
        raise InvalidInputError(
            f"`{name}` must be non-negative where `scale` divides by the largest or the mean "
            f"entry; its smallest entry is {least:.3g}. Pass scale=None."
        )
    return stack, used


def _read_sizes(name: str, sizes: Any, count: int, most: int) -> NDArray[np.int64]:
    """Read how many points of each space are in use."""
    if sizes is None:
        return np.full(count, most)
    found = np.asarray(to_numpy(sizes))
    good = found.shape == (count,) and found.dtype.kind in "iu"
    if not good or (count and not 1 <= found.min() <= found.max() <= most):
        raise InvalidInputError(
            f"`{name}` must be {count} integers between 1 and {most}; got "
            f"{str(found.tolist())[:60]}."
        )
    return found.astype(np.int64)


def read_costs(M: Any, x: Tensor, rows: Tensor, y: Tensor, columns: Tensor) -> Tensor:
    """Read linear costs (B, n, m), zero beyond the points in use."""
    costs = to_tensor("M", M).detach().to(x)
    check_shape("M", costs, (len(x), x.shape[1], y.shape[1]))
    inside = inside_of(x.shape[1], rows)[:, :, None] & inside_of(y.shape[1], columns)[:, None, :]
    costs = torch.where(inside, costs, 0.0)
    check_finite("M", costs)
    check_magnitude("M", costs, smallest=0.0)
    return costs


def read_weights(name: str, value: Any, sizes: Tensor, like: Tensor) -> Tensor:
    """Read weights (B, n), each row of sum one, zero beyond the points in use."""
    inside = inside_of(like.shape[1], sizes)
    if value is None:
        return inside.to(like) / sizes[:, None]
    weights = to_tensor(name, value).detach().to(like)
    check_shape(name, weights, tuple(inside.shape))
    weights = torch.where(inside, weights, 0.0)
    check_finite(name, weights)
    total = weights.sum(1, keepdim=True)
    off = float((total - 1).abs().max()) if len(total) else 0.0
    if off > _MASS or bool((weights < 0).any()):
        raise InvalidInputError(
            f"`{name}` must have non-negative rows of sum 1; sums are off by up to {off:.3g}."
        )
    return weights / total


def scaled(stack: Tensor, weights: Tensor, scale: str) -> Tensor:
    """Divide each matrix by its largest or its mean distance among points of positive weight."""
    used = (weights > 0).to(stack)
    if scale == "max":
        size = (stack * used[:, :, None] * used[:, None, :]).amax((1, 2))
    else:
        share = used / used.sum(1, keepdim=True)
        size = ((stack * share[:, None, :]).sum(2) * share).sum(1)
    return stack / torch.where(size > 0, size, 1.0)[:, None, None]
