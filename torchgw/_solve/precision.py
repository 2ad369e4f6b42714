"""Dtypes of the outer loop and of the settling."""

from typing import NamedTuple

import torch

from torchgw._problem.limits import limits_of

# A solve may count as converged if the exponents are rounded by at most this; in float32 its
# marginal error, and the last change of the plan, may then be as large. [L350] [L478]
RESOLVED = 2e-4


class Dtypes(NamedTuple):
    """Dtypes of a solve."""

    loop: torch.dtype  # of the outer iterations
    settle: torch.dtype  # of the final marginals and values
    again: bool  # whether the outer iterations go on in the second dtype


def rounding(scale: float, epsilon: float, dtype: torch.dtype) -> float:
    """Compute the rounding of the exponents of a plan whose costs have a scale."""
    return 4 * scale / epsilon * torch.finfo(dtype).eps


def settles_precisely(device: torch.device, entries: int) -> bool:
    """Whether a mixed-precision solve of so many entries settles in float64 in any case."""
    return entries <= limits_of(device).settled
