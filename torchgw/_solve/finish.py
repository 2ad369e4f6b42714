"""The end of a solve: polish its plan if asked to, compute its numbers, judge its status."""

from time import perf_counter

import torch

from torchgw._gradients.contract import Coupling
from torchgw._plans.contract import Plan
from torchgw._plans.transport import TransportPlan
from torchgw._sinkhorn.choose import alone
from torchgw._solve.evaluation import (
    Evaluation,
    evaluate,
    evaluate_relaxed,
    falls_further,
    judge,
)
from torchgw._solve.inner import promised_error
from torchgw._solve.outcome import Ending
from torchgw._solve.polish import polish
from torchgw._solve.precision import RESOLVED
from torchgw._solve.state import LoopState, Setting, Solved
from torchgw._solve.status import Status
from torchgw._solve.strategy import Strategy
from torchgw._tensors.deadline import is_over


def finish(
    strategy: Strategy,
    setting: Setting,
    plan: TransportPlan,
    state: LoopState,
    coupling: Coupling | None = None,
    begun: Plan | None = None,
) -> Ending:
    """Polish a settled plan, whose coupling may be known, if asked to, and compute its numbers.

    Also say what status it deserves. It is polished to no higher than what the solve had ``begun``
    at, if that was a plan.
    """
    clock, recorder, status = perf_counter(), setting.recorder, state.status
    epsilon, polished, unpolished = plan.epsilon, None, None
    solved = state.solved
    if strategy.options.polish:
        unpolished, solved, coupling = plan, None, None
        plan, polished = polish(setting.gradient, plan, setting.rule, setting.generator, begun)
        epsilon = 0.0
        if not polished.stationary and is_over():
            status = Status.STOPPED
        if status is not Status.STOPPED:
            status = Status.CONVERGED if polished.stationary else Status.POLISH_LIMIT
        clock = recorder.time("polish", clock)
    plan, evaluation = _appraise(setting, plan, epsilon, solved, coupling)
    promised = promised_error(setting)
    # where all plans cost the same, rounding decides nothing, and its size does not matter
    constant = strategy.constant
    unresolved = polished is None and not constant and setting.rounding(epsilon) > RESOLVED
    missed = status.converged and evaluation.marginal_error > promised
    if (unresolved or missed or constant) and plan.dtype == torch.float32:
        # rounding shifts each sum over the plan in its own way: the values would belong to no
        # single plan
        if status.converged and (unresolved or missed):
            status = Status.PRECISION_LIMIT
        setting = strategy.in_float64(setting)
        cost = plan.cost.to(torch.float64)
        plan = TransportPlan(
            cost, plan.potentials, plan.weights, epsilon, setting.backend, plan.masses
        )
        plan, evaluation = _appraise(setting, plan, epsilon)
    if unresolved and (status.converged or status is Status.INNER_LIMIT):
        status = Status.PRECISION_LIMIT
    # the status of the iteration is checked against the plan itself
    status = judge(
        status, evaluation, setting.problem, setting.gradient, promised, constant=constant
    )
    sampled = status is Status.STATIONARY and not constant
    if sampled and falls_further(setting, plan, evaluation, state.coupling, strategy.mass):
        status = Status.NOISE_LIMIT
    recorder.time("evaluation", clock)
    # so that the result keeps the factors and nothing larger
    backend = alone(setting.backend)
    plan, unpolished = plan.released(backend), unpolished and unpolished.released(backend)
    return Ending(plan, evaluation, epsilon * strategy.mass, status, polished, unpolished)


def _appraise(
    setting: Setting,
    plan: TransportPlan,
    epsilon: float,
    solved: Solved | None = None,
    coupling: Coupling | None = None,
) -> tuple[TransportPlan, Evaluation]:
    """Compute the numbers of a plan, and its best mass where that is part of the answer."""
    if setting.rule is not None:
        return evaluate_relaxed(setting, plan, setting.rule)
    return plan, evaluate(setting, plan, epsilon, solved, coupling)
