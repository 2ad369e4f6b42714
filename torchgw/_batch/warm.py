"""Where problems stand that something else has begun."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._sinkhorn.choose import why_not

# Points of a side up to which a problem is begun in float32, and iterated in float64, by a Triton
# program of its own. [L397] [L402]
LARGEST_ROUGH = 128
LARGEST_ON_CHIP = 64


# How programs end: the plan stays, the objective does, too many iterations, a number is lost, or
# the plan goes where float32 does not follow it.
ENDS = ("SETTLED", "FLAT", "LIMIT", "LOST", "AWAY")


class Warm(NamedTuple):
    """Plans of k problems that have nearly settled, and what made them."""

    plan: Tensor  # (k, n, m)
    f: Tensor  # (k, n) float64, potentials in cost units
    g: Tensor  # (k, m)
    done: Tensor  # (k,) int64, outer iterations
    ended: Tensor  # (k,) int64, places in ENDS
    value: Tensor  # (k,) float32, about the objective


def may_begin(shape: tuple[int, int], device: torch.device) -> bool:
    """Whether problems of these padded sizes can begin in Triton."""
    return max(shape) <= LARGEST_ROUGH and has_triton(device)


def on_chip(shape: tuple[int, int], device: torch.device) -> bool:
    """Whether problems of these padded sizes are iterated in Triton."""
    return max(shape) <= LARGEST_ON_CHIP and has_triton(device)


@cache
def has_triton(device: torch.device) -> bool:
    """Whether Triton runs there, compiled."""
    return device.type == "cuda" and why_not("triton", device, torch.float32) is None
