"""What an exact iteration makes of the plan of a sampled solve, where that costs little."""

from __future__ import annotations

from dataclasses import replace

import torch

from torchgw._gradients.contract import Coupling, Gradient
from torchgw._gradients.dense import DenseGradient
from torchgw._gradients.relaxed import RelaxedGradient
from torchgw._plans.transport import TransportPlan
from torchgw._solve.evaluation import Evaluation, evaluate, evaluate_relaxed
from torchgw._solve.inner import inner_tolerance, prepare, solve_linear
from torchgw._solve.precision import RESOLVED
from torchgw._solve.state import Setting

# Multiplications of an exact cost up to which it is computed, and minima of a loss that is no
# product, which take a thousand times as long. [L545]
_PRODUCTS, _MINIMA = 2**26, 2**20
# What the objective may fall by: a share of it, and standard errors of the sampled cost. [L545]
_SHARE, _ERRORS = 0.01, 3.0


def falls_further(
    setting: Setting, plan: TransportPlan, found: Evaluation, coupling: Coupling, mass: float
) -> bool:
    """Whether an exact iteration lowers the objective by more than STATIONARY says.

    ``found`` are the numbers of the plan, ``coupling`` is where the sampled cost was taken, and
    ``mass`` is that of a partial plan. Not where an exact cost takes long.
    """
    problem = setting.problem
    n, m = plan.shape
    affordable = _MINIMA if problem.loss.cross is None else _PRODUCTS
    if setting.gradient.exact or n * m * max(n, m) > affordable:
        return False
    base = DenseGradient(problem)
    gradient: Gradient = base if setting.rule is None else RelaxedGradient(base, problem)
    exact = replace(setting, gradient=gradient, store=True, dtype=torch.float64)
    here = gradient.update(plan, None, setting.generator)
    cost = gradient.linearise(here).seen(here.masses).dense().to(torch.float64)
    prepared = prepare(exact, cost, plan.epsilon)
    tol, most = inner_tolerance(exact, plan.epsilon), setting.options.inner_max_iter
    inner = solve_linear(exact, prepared, None, max_iter=most, tol=tol)
    following = TransportPlan.of(prepared, inner.potentials)
    if setting.rule is None:
        there = evaluate(exact, following, plan.epsilon)
    else:
        there = evaluate_relaxed(exact, following, setting.rule)[1]
    before, after = (one.objective(problem.alpha, plan.epsilon * mass) for one in (found, there))
    noise = setting.gradient.noise(coupling)
    error = noise.standard_error if noise is not None else 0.0
    missed = found.marginal_error + there.marginal_error
    slack = (RESOLVED + missed) * gradient.squares()
    return before - after > _SHARE * abs(before) + _ERRORS * error + slack
