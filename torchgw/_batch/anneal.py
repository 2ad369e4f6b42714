"""Objectives of many problems of one shape and equal weights, all by the same few steps.

Epsilon falls to its target in float32, and each linear problem takes as many iterations, whatever
that leaves: nothing is decided for a problem, so that none is solved better than another.
The last linear problem is solved in float64.
"""

import math

import torch
from torch import Tensor

from torchgw._batch.engine import FEWEST, POOL_ENTRIES
from torchgw._batch.follow import Nearby, linearised, objective
from torchgw._batch.newton import newton_step
from torchgw._batch.packing import Packed, start_noise, taken, units
from torchgw._batch.sweep import DECAY, exact_rows, sweep

# Exponents of a plan, less the largest of its row, that float32 holds in sums and ratios of two
# scalings: a guard.
_LOWEST = -60.0
# Iterations of a linear problem; sweeps of the last one, each with a Newton step. [L1575]
_ITERATIONS, _LAST = 32, 4


def objectives(problems: Packed, steps: int) -> Tensor:
    """Compute the objectives (B,) of plans after so many steps from a x b, without linear costs."""
    n, m = problems.shape
    # some are split into chunks that differ by one
    width = max(FEWEST + 1, POOL_ENTRIES[problems.device.type] // (n * m))
    every = torch.arange(len(problems), device=problems.device)
    chunks = every.tensor_split(math.ceil(len(every) / width))
    return torch.cat([_objectives(problems, chunk, steps) for chunk in chunks])


def _objectives(problems: Packed, numbers: Tensor, steps: int) -> Tensor:
    """Compute those of some problems."""
    i, j = problems.i[numbers], problems.j[numbers]
    x, y = taken(problems.x.tables, i), taken(problems.y.tables, j)
    a, b = problems.x.weights[i], problems.y.weights[j]
    _, target, first, _ = units(problems, numbers)
    near = Nearby(x, y, None, a, b, problems.alpha[numbers], target)
    plan, g = _annealed(near, first, steps)
    cost, unit = linearised(near, plan), target[:, None]
    rows, out = exact_rows(cost, b, g, target), torch.empty_like(cost)
    for _ in range(_LAST):
        made = sweep(cost, (a, b), (rows, g), target, None, out)
        newton = newton_step(made.plan, a, b)
        rows, g = made.f + unit * newton.rows, made.g + unit * newton.columns
    plan = made.plan * newton.rows.exp()[:, :, None] * newton.columns.exp()[:, None, :]
    return objective(near, plan, linearised(near, plan))


def _annealed(near: Nearby, first: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Compute plans (k, n, m) and potentials of their columns (k, m) after steps."""
    x, y, _, a, b, alpha, target = near
    plan = a[:, :, None] * b[:, None, :] * start_noise((x.shape[1], y.shape[1]), x.device)
    cost = linearised(near, plan)
    # what all entries of a row or of a column cost moves no plan, and takes digits
    cost -= cost.mean(2, keepdim=True)
    cost = (cost - cost.mean(1, keepdim=True)).float()
    x, y, epsilon, weight = x.float(), y.float(), first, -4 * alpha.float()[:, None, None]
    g = torch.zeros_like(b, dtype=torch.float32)[:, None, :]
    decay = (target / first).pow(1 / max(1, steps - 1)).clamp(max=DECAY)
    for step in range(steps):
        if step:
            cost = torch.bmm(torch.bmm(x, plan), y).mul_(weight)
        unit = epsilon.float()[:, None, None]
        plan = torch.sub(g, cost).div_(unit)
        plan.sub_(plan.amax(2, keepdim=True)).clamp_(min=_LOWEST).exp_()
        # weights are equal: rows have sum one here, columns more or less
        turned, s = plan.mT, plan.sum(2)[:, None, :].reciprocal_()
        for _ in range(_ITERATIONS):
            t = torch.bmm(s, plan).reciprocal_()
            s = torch.bmm(t, turned).reciprocal_()
        plan.mul_(s.mT / plan.shape[1]).mul_(t)
        g = g + unit * t.log()
        epsilon = (epsilon * decay).maximum(target)
    return plan.double(), g[:, 0].double()
