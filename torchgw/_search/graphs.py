"""Two graphs of a coarse problem: how full their tables are, and products with them."""

from __future__ import annotations

import scipy
import torch
from torch import Tensor

from torchgw._search.coarse import CoarseProblem

__all__ = ["Graphs", "density"]


def density(problem: CoarseProblem) -> float:
    """Share of entries that are not zero, of the fuller table; 1 for losses that transform them."""
    if len(problem.x) > 1 or problem.unit != 1:
        return 1.0
    tables = problem.source.table, problem.target.table
    return max(int(table.count_nonzero()) / table.numel() for table in tables)


class Graphs:
    """The tables A (s, s) and B (t, t) in single precision: sparse on a CPU, dense elsewhere."""

    def __init__(self, problem: CoarseProblem) -> None:
        self.x, self.y = problem.source.table.float(), problem.target.table.float()
        self.sparse = None
        if self.x.device.type == "cpu":
            self.sparse = tuple(scipy.sparse.csr_array(each.numpy()) for each in (self.x, self.y))

    def left(self, plan: Tensor) -> Tensor:
        """Compute A P."""
        if self.sparse is None:
            return self.x @ plan
        return torch.from_numpy(self.sparse[0] @ plan.numpy())

    def right(self, plan: Tensor) -> Tensor:
        """Compute P B."""
        if self.sparse is None:
            return plan @ self.y
        return torch.from_numpy(self.sparse[1] @ plan.T.numpy()).T.contiguous()
