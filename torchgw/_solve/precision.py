"""Dtypes of the outer loop and of the settling."""

from typing import NamedTuple

import torch

from torchgw._solve.options import Precision

# A solve may count as converged if the exponents are rounded by at most this; in float32 its
# marginal error, and the last change of the plan, may then be as large. [L350] [L478]
RESOLVED = 2e-4

# Entries up to which a mixed solve goes on in float64 from where float32 has settled. [L296]
_AGAIN_ENTRIES = {"cpu": 25_000_000, "cuda": 200_000_000}
# Entries up to which float64 throughout costs less than a separate float64 settling: on a GPU
# launches take the time there, not arithmetic. [L89]
_FLOAT64_ENTRIES = {"cpu": 100_000, "cuda": 2_000_000}
# Entries up to which a float32 solve settles marginals in float64, whatever its rounding. [L296]
_SETTLE_ENTRIES = {"cpu": 100_000_000, "cuda": 1_000_000_000}


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
    return entries <= _SETTLE_ENTRIES.get(device.type, 0)


def choose_precision(
    name: Precision, device: torch.device, entries: int, *, unresolved: bool
) -> tuple[Precision, Dtypes]:
    """Return the precision and its dtypes; "auto" is float64 for small problems."""
    # `unresolved` says that float32 would leave a plan that is not `RESOLVED`, and that its last
    # linear problem can be solved in float64: it takes a few of all iterations.
    if name == "auto":
        name = "float64" if entries <= _FLOAT64_ENTRIES.get(device.type, 0) else "mixed"
    if name == "float64":
        return name, Dtypes(torch.float64, torch.float64, again=False)
    if name == "mixed" and (unresolved or settles_precisely(device, entries)):
        return name, Dtypes(
            torch.float32, torch.float64, again=entries <= _AGAIN_ENTRIES.get(device.type, 0)
        )
    return name, Dtypes(torch.float32, torch.float32, again=False)
