"""How anchors are spread over a plan and which of them are redrawn."""

from __future__ import annotations

import torch
from torch import Tensor

from torchgw._plans.pairs import Anchors

__all__ = ["places", "replace_slots", "spread_slots"]


def places(slots: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw a place in [0, 1) for each slot, two independent ones in each of equal strata.

    Stratum t is [2t, 2t + 2) / count; where ``count`` is odd the last one is half as wide and has
    one place. Over all slots the places are uniform: so the mean over points at these places of the
    cumulative weight has no bias, and along an order in which neighbours are alike far less
    variance than that over independent draws. The two of a stratum show how much.

    Parameters
    ----------
    slots : Tensor of int64, shape (s,)
        Within 0 and count - 1.
    count : int
    generator : torch.Generator
        On the device of ``slots``.
    """
    uniform = torch.rand(len(slots), dtype=torch.float64, device=slots.device, generator=generator)
    first = slots - slots % 2
    return (first + (count - first).clamp(max=2) * uniform) / count


def spread_slots(count: int, total: int, generator: torch.Generator) -> Tensor:
    """Draw ``count`` distinct slots of ``total``, at equal steps."""
    device = generator.device
    offset = torch.rand((), dtype=torch.float64, device=device, generator=generator)
    steps = torch.arange(count, dtype=torch.float64, device=device) + offset
    return (steps * (total / max(1, count))).long().clamp_(max=total - 1)


def replace_slots(kept: Anchors, slots: Tensor, fresh: Anchors) -> Anchors:
    """Put fresh anchors into some slots.

    This averages plans, P <- (1 - share) P + share P_new, carried out on the sample:
    ``share`` is the number of slots over the size of ``kept``.
    """
    return Anchors(*(old.index_copy(0, slots, new) for old, new in zip(kept, fresh, strict=True)))
