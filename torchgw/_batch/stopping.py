"""When each of many outer loops stops, by what its iterations tell."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._sinkhorn.annealing import SETTLING, SETTLING_WINDOW, WINDOW

# How a problem ends: names of the status, as codes.
ENDINGS = (
    "CONVERGED", "FLAT", "OUTER_LIMIT", "INNER_LIMIT", "BOTH_LIMITS", "IMPLAUSIBLE",
)  # fmt: skip
CONVERGED, FLAT, OUTER, INNER, BOTH, IMPLAUSIBLE = range(len(ENDINGS))


class Rules(NamedTuple):
    """When problems end; the options of a single solve."""

    max_iter: int = 500
    tol: float = 1e-5
    objective_tol: float = 1e-4
    inner_max_iter: int = 2000
    inner_tol: float = 5e-7

    def within(self, max_iter: int, inner_max_iter: int) -> "Rules":
        """Allow at most so many outer and inner iterations."""
        most = min(max_iter, self.max_iter), min(inner_max_iter, self.inner_max_iter)
        return self._replace(max_iter=most[0], inner_max_iter=most[1])


class Descent:
    """Objectives that no longer fall: the rule of ``_solve/loop.py``, for many problems."""

    # Every tensor has a row for each problem.

    def __init__(self, count: int, like: Tensor) -> None:
        self.values = like.new_full((count, WINDOW + 1), torch.inf)  # the newest last
        self.changes = like.new_full((count, SETTLING_WINDOW), torch.inf)
        self.earlier = like.new_full((count,), torch.inf)  # least change of all iterations before

    def parts(self) -> tuple[Tensor, ...]:
        """List the tensors, which move when their problems do."""
        return self.values, self.changes, self.earlier

    def update(
        self, rows: Tensor, value: Tensor, change: Tensor, met: Tensor, tol: float
    ) -> Tensor:
        """Take an iteration of some problems; say which of them no longer fall, (k,) bool."""
        # Plans whose marginals are not `met` are not compared: their objective may be anything.
        dropped = self.changes[rows, 0]
        earlier = self.earlier[rows].minimum(dropped)
        changes = torch.cat([self.changes[rows, 1:], change[:, None]], 1)
        values = torch.cat([self.values[rows, 1:], value[:, None]], 1)
        values = torch.where(met[:, None], values, torch.inf)
        self.earlier[rows], self.changes[rows], self.values[rows] = earlier, changes, values
        fall = (values[:, 0] - value) / WINDOW
        settling = changes.amin(1) <= SETTLING * earlier
        # from a value that is not known yet the fall is infinite
        return (fall <= tol * value.abs()) & ~settling
