"""Solve problems of POT, with its argument names, return values and logs."""

from typing import TYPE_CHECKING, Any

from torchgw.pot import _handed
from torchgw.pot import gromov as gromov
from torchgw.pot._solve import OTResult as OTResult
from torchgw.pot._solve import solve_gromov as solve_gromov

if TYPE_CHECKING:
    from ot import solve_gromov_batch as solve_gromov_batch

__all__ = ["OTResult", "gromov", "solve_gromov"]


def __getattr__(name: str) -> Any:
    if name not in _handed.names(_handed.TOP):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _handed.handed(name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_handed.names(_handed.TOP)])
