"""Solve problems of POT, with its argument names, return values and logs."""

from torchgw.pot import gromov as gromov
from torchgw.pot._batch import solve_gromov_batch as solve_gromov_batch
from torchgw.pot._solve import OTResult as OTResult
from torchgw.pot._solve import solve_gromov as solve_gromov

__all__ = ["OTResult", "gromov", "solve_gromov", "solve_gromov_batch"]
