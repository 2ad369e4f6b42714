"""Pairs of points drawn from a plan."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Anchors(NamedTuple):
    """Pairs (source[s], target[s]) drawn from a plan, with repetition."""

    # Those of a sampled gradient come in strata: slots 2t and 2t + 1 hold independent draws from
    # stratum t, see torchgw._gradients.sampled.places.

    source: Tensor  # (s,) int64
    target: Tensor  # (s,) int64
