"""Solve problems of POT, with its argument names, return values and logs.

``import torchgw.pot as ot`` has every name of POT: those of ``ot.gromov`` that are solved here, and
:func:`solve_gromov`, by ours, everything else by POT itself, where it is installed.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # for readers of types; at run time they are imported when they are asked for
    from ot import *

from torchgw.pot import _arrays
from torchgw.pot import gromov as gromov
from torchgw.pot._solve import OTResult as OTResult
from torchgw.pot._solve import solve_gromov as solve_gromov

# what `ot` takes from `ot.gromov`, and is ours
from torchgw.pot.gromov import fused_gromov_wasserstein as fused_gromov_wasserstein
from torchgw.pot.gromov import fused_gromov_wasserstein2 as fused_gromov_wasserstein2
from torchgw.pot.gromov import gromov_wasserstein as gromov_wasserstein
from torchgw.pot.gromov import gromov_wasserstein2 as gromov_wasserstein2

__all__ = ["OTResult", "gromov", "solve_gromov"]


def __getattr__(name: str) -> Any:
    return _arrays.handed(name, "ot")


def __dir__() -> list[str]:
    return sorted({*__all__, *_arrays.names("ot")})
