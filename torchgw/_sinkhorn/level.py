"""The level of a partial problem: how much every point below its bound carries."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def level(softmin: Any, weight: Any, mass: float, epsilon: float) -> Any:
    """Find the level h, (), with sum_i a_i min(1, exp((h - s_i) / epsilon)) = mass, in (0, 1)."""
    if isinstance(softmin, np.ndarray):
        return host_level(softmin, weight, mass, epsilon)
    if softmin.device.type == "cpu":
        with np.errstate(all="ignore"):
            height = host_level(softmin.numpy(), weight.numpy(), mass, epsilon)
        return torch.as_tensor(height, device=softmin.device)
    # Points with s_i <= h are full. In the order of s the level follows from how many are: exp(h /
    # epsilon) = (mass - what the full ones carry) / sum over the others a_i exp(-s_i / epsilon),
    # and the right number is the least whose level lies below the next point.
    exponent = torch.where(weight > 0, softmin.double() / epsilon, torch.inf)
    ordered, order = exponent.sort()
    sizes = weight.double()[order]
    full = sizes.cumsum(0) - sizes
    terms = torch.where(sizes > 0, sizes.log() - ordered, -torch.inf)
    others = terms.flip(0).logcumsumexp(0).flip(0)
    heights = (mass - full).clamp_min(0).log() - others
    room = full < mass
    # a level above its next point would fill that point too; the search always ends at the last
    # point with mass, also after rounding
    fits = (heights <= ordered) & room
    first = torch.where(fits.any(), fits.to(torch.int8).argmax(), room.sum() - 1)
    return (heights[first].minimum(ordered[first]) * epsilon).to(softmin.dtype)


def host_level(
    softmin: NDArray[Any], weight: NDArray[np.float64], mass: float, epsilon: float
) -> Any:
    """Find the same in NumPy."""
    exponent = softmin.astype(np.float64) / epsilon
    exponent[weight == 0] = np.inf
    order = exponent.argsort(kind="stable")
    ordered, sizes = exponent[order], weight[order]
    full = sizes.cumsum() - sizes
    # those without weight are last: log 0 - inf
    others = np.logaddexp.accumulate((np.log(sizes) - ordered)[::-1])[::-1]
    room = full < mass
    heights = np.log(np.maximum(mass - full, 0)) - others
    fits = (heights <= ordered) & room
    first = fits.argmax() if fits.any() else room.sum() - 1
    return (min(heights[first], ordered[first]) * epsilon).astype(softmin.dtype)
