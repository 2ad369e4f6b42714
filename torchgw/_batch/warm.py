"""The state of a problem that one Triton program hands to the next, or to the engine."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._sinkhorn.choose import why_not

# Points of a side up to which a problem is begun in float32, and iterated in float64, by a Triton
# program of its own. [L397] [L402]
LARGEST_ROUGH = 128
LARGEST_ON_CHIP = 64


# How a program ends: the plan has settled, the objective is flat, the iterations have run out, a
# number is not finite any more, or the plan moves beyond what float32 can follow.
ENDS = ("SETTLED", "FLAT", "LIMIT", "LOST", "AWAY")


class Warm(NamedTuple):
    """Plans of k problems that have nearly settled, and their potentials."""

    plan: Tensor  # (k, n, m)
    f: Tensor  # (k, n) float64, potentials in cost units
    g: Tensor  # (k, m)
    done: Tensor  # (k,) int64, outer iterations
    ended: Tensor  # (k,) int64, places in ENDS
    value: Tensor  # (k,) float32, roughly the objective


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
