"""What a backend of one's own is made from; ``solve(..., backend=object)`` takes it."""

from torchgw._sinkhorn.contract import Backend, Sweep, Sweeper
from torchgw._sinkhorn.cost import DenseCost, FactoredCost
from torchgw._sinkhorn.eager import EagerBackend
from torchgw._sinkhorn.softmin import LinearProblem, SoftminSweeper, softmin, softmin_sweep

__all__ = [
    "Backend",
    "DenseCost",
    "EagerBackend",
    "FactoredCost",
    "LinearProblem",
    "SoftminSweeper",
    "Sweep",
    "Sweeper",
    "softmin",
    "softmin_sweep",
]
