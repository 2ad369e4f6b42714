"""What a backend of one's own is made from; ``solve(..., backend=object)`` takes it."""

from torchgw._backend import Backend, Sweep, Sweeper
from torchgw._compiled_sinkhorn import SoftminSweeper
from torchgw._cost import DenseCost, FactoredCost
from torchgw._eager_sinkhorn import EagerBackend
from torchgw._sinkhorn import softmin, softmin_sweep

__all__ = [
    "Backend",
    "DenseCost",
    "EagerBackend",
    "FactoredCost",
    "SoftminSweeper",
    "Sweep",
    "Sweeper",
    "softmin",
    "softmin_sweep",
]
