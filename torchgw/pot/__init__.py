"""Solve problems of POT, with its argument names and its result."""

from __future__ import annotations

from torchgw.pot._solve import OTResult as OTResult
from torchgw.pot._solve import solve_gromov as solve_gromov

__all__ = ["OTResult", "solve_gromov"]
