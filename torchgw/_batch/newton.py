"""Newton steps of many linear problems at once, where Sinkhorn's iteration is slow."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._batch.costs import products
from torchgw._sinkhorn.newton import LARGEST_STEP

# Ridge against rounding: the share of the mass of a column that is added to its second derivative.
# [L464]
RIDGE = 1e-13


class NewtonStep(NamedTuple):
    """Changes of potentials in units of epsilon, zero where a step is too long."""

    rows: Tensor  # (k, n), to exact rows at the new columns
    columns: Tensor  # (k, m)
    taken: Tensor  # (k,) bool


def newton_step(plan: Tensor, a: Tensor, b: Tensor) -> NewtonStep:
    """Take steps of the dual in g from at least two plans (k, n, m) with row masses a (k, n)."""
    # one plan alone would have other bits; for a single problem see `_sinkhorn/newton.py`
    columns = plan.sum(1)
    unused = b == 0
    shared = products(plan.mT, plan / torch.where(a > 0, a, 1.0)[:, :, None])
    curvature = columns[:, :, None] * columns[:, None, :] - shared
    curvature.diagonal(dim1=1, dim2=2).add_(torch.where(unused, 1.0, (1 + RIDGE) * columns))
    factor, failed = torch.linalg.cholesky_ex(curvature)
    # the library's solver of many problems cannot be captured in a graph
    step = torch.linalg.solve_triangular(factor, (b - columns)[:, :, None], upper=False)
    step = torch.linalg.solve_triangular(factor.mT, step, upper=True)[:, :, 0]
    step = torch.where(unused, 0.0, step)
    # NaN compares as false
    taken = (failed == 0) & (step.abs().amax(1) <= LARGEST_STEP)
    step = torch.where(taken[:, None], step, 0.0)
    sums = (plan * step.exp()[:, None, :]).sum(2)
    ratio = torch.where(a > 0, a / torch.where(a > 0, sums, 1.0), 1.0)
    return NewtonStep(ratio.log(), step, taken)
