"""Plans of small problems, led down by steps that never raise the objective.

The fixed-point iteration may step over the optimum that it begins near: towards the solution of the
linear problem at a plan the objective falls at first, but not always all the way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchgw._batch.engine import Scaled, solve_linear
from torchgw._search.stack import Ends, Stack

# Shares of a step that are tried; steps at most; and by what share the objective has to fall for
# another one. [L1313]
_SHARES, _STEPS, _LEAST = (1.0, 0.5, 0.2, 0.08, 0.03, 0.01), 32, 1e-6
# Iterations of a linear problem at most, and the error of its columns at which it is solved.
# [L1313]
_ITERATIONS, _SOLVED = 1024, 1e-6


def descend(stack: Stack, which: Tensor, plans: Tensor) -> tuple[Ends, Tensor]:
    """Lead plans (k, n, m) of problems (k,) down until they stay; tell which still fall."""
    lowest = stack.judged(which, plans)
    live = torch.arange(len(which), device=which.device)
    for _ in range(_STEPS):
        if not len(live):
            break
        mine, before = which[live], Ends(*(part[live] for part in lowest))
        here, there = (
            plans / plans.sum((1, 2), keepdim=True)
            for plans in (before.plans, linear_solutions(stack, mine, before.plans).plan)
        )
        best = before
        for share in _SHARES:
            best = best.lower(stack.judged(mine, torch.lerp(here, there, share)))
        for part, found in zip(lowest, best, strict=True):
            part[live] = found
        fall = before.objectives - best.objectives
        live = live[fall > _LEAST * before.objectives.abs()]
    falling = torch.zeros_like(which, dtype=torch.bool)
    falling[live] = True
    return lowest, falling


def linear_solutions(stack: Stack, which: Tensor, plans: Tensor) -> Scaled:
    """Solve the linear problems at plans (k, n, m) of problems (k,)."""
    first = torch.zeros_like(stack.problems.first[which])
    begun = stack.problems.again(which, first, stack.beginning(which, plans))
    return solve_linear(begun, _SOLVED, _ITERATIONS)
