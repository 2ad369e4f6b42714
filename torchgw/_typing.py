"""Types shared by every layer."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Marginals", "Potentials"]


class Potentials(NamedTuple):
    """Dual potentials in cost units, so that they stay valid when epsilon changes.

    They define the plan  P_ij = a_i b_j exp((f_i + g_j - C_ij) / epsilon).
    """

    f: Tensor  # (n,) source
    g: Tensor  # (m,) target


class Marginals(NamedTuple):
    """Non-negative weights of both sides, each of total mass one, on the device of the solve."""

    a: Tensor  # (n,) source
    b: Tensor  # (m,) target

    @property
    def log_a(self) -> Tensor:
        """Logarithm of a; -inf where a weight is zero, which empties that row of the plan."""
        return self.a.log()

    @property
    def log_b(self) -> Tensor:
        """Logarithm of b; -inf where a weight is zero."""
        return self.b.log()
