"""Two graphs of a coarse problem: how full their tables are, and products with them."""

from __future__ import annotations

import math

import scipy
import torch
from torch import Tensor

from torchgw._search.coarse import CoarseProblem


def density(problem: CoarseProblem) -> float:
    """Share of entries that are not zero, of the fuller table; 1 for losses that transform them."""
    if len(problem.x) > 1 or problem.unit != 1:
        return 1.0
    tables = problem.source.table, problem.target.table
    return max(int(table.count_nonzero()) / table.numel() for table in tables)


def least_value(problem: CoarseProblem) -> float:
    """Bound the values of all plans from below; no bound if a table has negative entries.

    <A P B, P> is at most the mass of A times the largest entry of B, and the other way round.
    Between 0/1 matrices and equal weights this is met where every edge of one meets one of the
    other.
    """
    sides = [(side.table, side.weights) for side in (problem.source, problem.target)]
    if min(float(table.min()) for table, _ in sides) < 0:
        return -math.inf
    masses = [float(weights @ table @ weights) for table, weights in sides]
    squares = sum(float(weights @ table.square() @ weights) for table, weights in sides)
    largest = [float(table.max()) for table, _ in sides]
    most = min(masses[0] * largest[1], masses[1] * largest[0])
    return float(problem.alpha) * (squares - 2 * most)


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
