"""The slow part of a Sinkhorn iteration, solved on blocks of points.

Sinkhorn's iteration settles differences between near points at once and those between far ones
slowly. Scaling whole blocks of a plan to the masses of the blocks is the same problem with one
unknown per block, small enough for Newton's method: the aggregation step of a two-level method.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Blocks of a side above which neighbours are taken together: a step solves as many equations.
# [L290]
_MOST_BLOCKS = 512
# Newton steps at most, and the step after which convergence, which is quadratic, has made the rest
# negligible beside what the next iteration changes. [L207]
_STEPS = 25
_LAST_STEP = 0.05
# Longest step of a log-scaling, in which the quadratic model can be trusted. [L207]
_LONGEST = 1.0
# Ridge, relative to the diagonal: parts that share less mass are not scaled against each other.
# [L290]
_RIDGE = 1e-9


def block_scaling(masses: Tensor, row_mass: Tensor, column_mass: Tensor) -> Tensor:
    """Find log-scalings x, (k,), so that some diag(e^x) M diag(e^y) has the given marginals."""
    # By a few Newton steps in y on the dual, which is concave; x is eliminated. M (k, l) is the
    # mass of the plan in each tile; blocks without mass are not scaled. All of it is float64, in
    # natural logarithms.
    blocks = len(row_mass)
    height, width = (math.ceil(size / _MOST_BLOCKS) for size in masses.shape)
    row_mass, column_mass = grouped(row_mass, height), grouped(column_mass, width)
    masses = grouped(grouped(masses, height).T, width).T
    inverse_mass = _ratio(torch.ones_like(row_mass), row_mass)
    y = torch.zeros_like(column_mass)
    for _ in range(_STEPS):
        scaled = masses * y.exp()
        scaled = scaled * _ratio(row_mass, scaled.sum(1))[:, None]
        columns = scaled.sum(0)
        hessian = -(scaled.T @ (scaled * inverse_mass[:, None]))
        # blocks without mass on either side are left out
        used = (columns > 0) & (column_mass > 0)
        hessian.diagonal().add_(torch.where(used, (1 + _RIDGE) * columns, 1.0))
        missing = torch.where(used, column_mass - columns, 0.0)
        step, _ = torch.linalg.solve_ex(hessian, missing)
        step = step - column_mass @ step / column_mass.sum()
        longest = float(step.abs().max())
        # a plan that is far from any marginals; the next iteration comes closer without help
        if not math.isfinite(longest):
            break
        y = y + step * min(1.0, _LONGEST / longest) if longest > 0 else y
        if not longest > _LAST_STEP:
            break
    x = _ratio(row_mass, masses @ y.exp()).log().nan_to_num(neginf=0.0)
    return x.repeat_interleave(height)[:blocks]


def grouped(values: Tensor, size: int) -> Tensor:
    """Add up groups of ``size`` neighbours along the first axis; the last may be smaller."""
    if size == 1:
        return values
    groups = math.ceil(len(values) / size)
    full = values.new_zeros(groups * size, *values.shape[1:])
    full[: len(values)] = values
    return full.unflatten(0, (groups, size)).sum(1)


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """Divide, zero where nothing is below."""
    return torch.where(below > 0, above / below, 0.0)
