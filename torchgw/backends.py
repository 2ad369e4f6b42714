"""What a backend of one's own is made from; ``solve(..., backend=object)`` takes it."""

from torchgw._backend import Backend, Sweep, Sweeper
from torchgw._cost import DenseCost, FactoredCost
from torchgw._eager_sinkhorn import EagerBackend
from torchgw._sinkhorn import LinearProblem, SoftminSweeper, softmin, softmin_sweep

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
