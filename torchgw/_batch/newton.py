"""Newton steps of many linear problems at once, where Sinkhorn's iteration is slow."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._batch.packing import products
from torchgw._sinkhorn.loop import LARGEST_STEP

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
    # one plan alone would have other bits; for a single problem see `_sinkhorn/loop.py`
    columns, light = plan.sum(1), torch.where(a > 0, a, 1.0)
    step, taken = column_step(plan, light, columns, b, (b == 0).to(b.dtype))
    sums = (plan * step.exp()[:, None, :]).sum(2)
    ratio = torch.where(a > 0, a / torch.where(a > 0, sums, 1.0), 1.0)
    return NewtonStep(ratio.log(), step, taken)


def column_step(
    plan: Tensor, a: Tensor, columns: Tensor, b: Tensor, unused: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Take steps of the potentials of columns (k, m), whose masses are given, and which count."""
    # nothing of `a` is zero; `unused` columns, which are empty, have one
    shared = products(plan.mT, plan / a[:, :, None])
    curvature = columns[:, :, None] * columns[:, None, :] - shared
    curvature.diagonal(dim1=1, dim2=2).add_((1 + RIDGE) * columns + unused)
    factor, failed = torch.linalg.cholesky_ex(curvature)
    # the library's solver of many problems cannot be captured in a graph
    step = torch.linalg.solve_triangular(factor, (b - columns)[:, :, None], upper=False)
    step = torch.linalg.solve_triangular(factor.mT, step, upper=True)[:, :, 0]
    # NaN compares as false
    taken = (failed == 0) & (torch.linalg.vector_norm(step, torch.inf, 1) <= LARGEST_STEP)
    return step.masked_fill_(~taken[:, None], 0.0), taken
