"""Where problems stand that something else has begun."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._sinkhorn.choose import unavailable_backends

__all__ = ["LARGEST_ROUGH", "Warm", "may_begin"]

# Points of a side up to which a problem fits the registers of a multiprocessor. [L397]
LARGEST_ROUGH = 128


class Warm(NamedTuple):
    """Plans of k problems that have nearly settled, and what made them."""

    plan: Tensor  # (k, n, m) float32
    g: Tensor  # (k, m) float32, potentials in cost units
    done: Tensor  # (k,) int64, outer iterations

    def at(self, places: Tensor) -> Warm:
        """Take some of them."""
        return Warm(*(part[places] for part in self))


def may_begin(shape: tuple[int, int], device: torch.device, *, chosen: bool) -> bool:
    """Whether problems of these padded sizes can begin in Triton, from ``chosen`` starts or not."""
    if device.type != "cuda" or chosen or max(shape) > LARGEST_ROUGH:
        return False
    return unavailable_backends(device)["triton"] is None
