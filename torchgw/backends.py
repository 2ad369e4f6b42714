"""The parts from which you can make a backend of your own; ``Options(backend=object)`` takes it.

``NAMES`` are the words that ``Options(backend=...)`` takes in place of such an object.
"""

from typing import get_args

from torchgw._sinkhorn.choose import BackendName
from torchgw._sinkhorn.contract import (
    Backend,
    PreparedProblem,
    SoftminSweeper,
    Sweep,
    Sweeper,
    softmin_sweep,
)
from torchgw._sinkhorn.eager import EagerBackend
from torchgw._sinkhorn.problem import DenseCost, EntropicPlan, FactoredCost, LinearProblem, softmin

__all__ = [
    "NAMES", "Backend", "DenseCost", "EagerBackend", "EntropicPlan", "FactoredCost",
    "LinearProblem", "PreparedProblem", "SoftminSweeper", "Sweep", "Sweeper", "softmin",
    "softmin_sweep",
]  # fmt: skip

NAMES: tuple[str, ...] = get_args(BackendName)
