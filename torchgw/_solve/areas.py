"""Surfaces of different shape: their areas are penalised, where nothing else was asked for."""

from __future__ import annotations

from typing import Any

from torchgw._errors import TorchGWWarning, warn_user
from torchgw._problem.limits import CPU
from torchgw._solve.table import Options
from torchgw.distances.modes import FIRST, apart, modes
from torchgw.distances.surface import Surface

# Penalty of areas that a match does not keep, where both sides are divided by their largest
# distances. [L1533]
_AREAS = 0.003
# What rules or certifies masses, or needs them to be kept.
_ASKED = (
    "unbalanced", "unbalanced_type", "unbalanced_unit", "mass", "scale", "distances", "loss",
    "regularization", "polish", "certify", "gradient", "distributed", "checkpoint",
)  # fmt: skip


def with_penalised_areas(x: Any, y: Any, asked: Options) -> Options:
    """Penalise the areas of two surfaces that are no poses of one shape, and say so."""
    # The same parts have other shares of the area then. A plan that has to move all of it puts
    # arms on legs, and costs less than the right one.
    usual = Options()
    left = all(getattr(asked, name) == getattr(usual, name) for name in _ASKED)
    if not (left and isinstance(x, Surface) and isinstance(y, Surface)):
        return asked
    one, other = modes(x, FIRST), modes(y, FIRST)
    if one is None or other is None or apart(one, other) <= CPU.alike:
        return asked
    warn_user(
        "X and Y are surfaces of different shape (their modes of vibration differ), so that the "
        f"same parts have other shares of the area: areas are penalised (unbalanced={_AREAS}, "
        "scale='max') and not kept. Pass `a` and `b` to keep them.",
        TorchGWWarning,
    )
    return asked.replace(unbalanced=_AREAS, scale="max")
