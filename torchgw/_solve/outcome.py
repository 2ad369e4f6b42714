"""What a solve is asked, its end, and all that it comes to."""

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgw._gradients.contract import CostNoise, Coupling, Linearised
from torchgw._plans.contract import Plan
from torchgw._plans.given import SparsePlan
from torchgw._plans.paired import PairedPlan
from torchgw._plans.transport import TransportPlan, round_to_marginals
from torchgw._problem.limits import limits_of
from torchgw._problem.problem import Problem
from torchgw._search.optima import Searched
from torchgw._sinkhorn.choose import alone
from torchgw._solve.evaluation import (
    Evaluation,
    Resolution,
    evaluate,
    evaluate_relaxed,
    falls_further,
    judge,
)
from torchgw._solve.polish import Polished, plan_of, polish
from torchgw._solve.route import Route
from torchgw._solve.state import (
    RESOLVED,
    Checkpoint,
    LoopState,
    Options,
    Recorder,
    Setting,
    Solved,
    Status,
)
from torchgw._solve.step import promised_error
from torchgw._solve.strategy import Strategy
from torchgw._starts.alternatives import Search
from torchgw._tensors.deadline import is_over
from torchgw._typing import Potentials
from torchgw.distances.geodesics import Geodesics


class Asked(NamedTuple):
    """What is to be solved, and what a solve begins with."""

    problem: Problem
    options: Options
    init: Any  # as the user gave it
    generator: torch.Generator
    graphs: tuple[Geodesics | None, Geodesics | None]  # given, whose paths are compared
    checkpoint: Checkpoint | None = None
    made: Sequence[Searched] = ()  # searches that decided on distances
    found: Search | None = None  # by a search of this problem that went before

    def again(self, init: Any = None, **options: Any) -> "Asked":
        """Ask for one more solve of the same call, by another search or from a start."""
        if init is not None:
            options["n_init"] = None
        fresh = replace(self.options, **{"told": "all", **options})
        return self._replace(options=fresh, init=init, made=(), found=None)


class Ending(NamedTuple):
    """The plan of a solve, and its numbers."""

    plan: TransportPlan | SparsePlan | PairedPlan
    evaluation: Evaluation
    epsilon: float  # entropic regularisation that the plan has
    status: Status
    polished: Polished | None
    # the plan of the last cost, if ``plan`` is a polished one, or was rounded to its marginals
    unpolished: TransportPlan | PairedPlan | None


class Overlap(NamedTuple):
    """What more mass costs, and how much of it was chosen."""

    shares: tuple[float, ...]  # of the mass, ascending
    added: tuple[float, ...]  # mean cost of what each share adds to the one before it
    chosen: float
    step: float  # by how many times the cost rises there; 1 if all mass was chosen
    contrast: float  # the logarithm of that, over how far logarithms of costs lie from two lines


class Outcome(NamedTuple):
    """Everything that a result is made from."""

    ending: Ending
    strategy: Strategy
    potentials: Potentials  # of the whole cost, float64; those of `plan` are reduced ones
    backend: str
    n_anchors: int | None
    noise: CostNoise | None  # of a sampled cost
    search: Search | None  # what a multi-start found, if there was one
    recorder: Recorder
    known: Linearised  # the cost of the plan, by which new points are mapped
    resolution: Resolution | None  # of a problem that was solved on cells
    route: Route  # that was chosen before anything was solved
    overlap: Overlap | None = None  # how much of the mass matches, if that was asked

    @property
    def plan(self) -> Tensor:
        """The plan (n, m), of mass one, from which another solve may begin."""
        plan: Tensor = self.ending.plan.to_dense()
        return plan / plan.sum()

    @property
    def value(self) -> float:
        """What the plan costs, without entropy and penalty."""
        return self.ending.evaluation.value(self.strategy.problem.alpha)

    @property
    def objective(self) -> float:
        """What was minimised."""
        ending = self.ending
        return ending.evaluation.objective(self.strategy.problem.alpha, ending.epsilon)


def finish(
    strategy: Strategy,
    setting: Setting,
    plan: TransportPlan,
    state: LoopState,
    coupling: Coupling | None = None,
    begun: Plan | None = None,
) -> Ending:
    """Polish a settled plan, whose coupling may be known, if asked to, and compute its numbers."""
    # Also say what status it deserves. It is polished to no higher than what the solve had `begun`
    # at, if that was a plan.
    clock, recorder, status = perf_counter(), setting.recorder, state.status
    epsilon, polished, unpolished = plan.epsilon, None, None
    solved = state.solved
    if strategy.options.polish and is_over():
        # even the first step solves a linear problem without entropy, which has no early end
        status = Status.STOPPED
    elif strategy.options.polish:
        unpolished, solved, coupling = plan, None, None
        plan, polished = polish(
            setting.gradient, plan, setting.rule, setting.generator, begun, setting.problem.support
        )
        epsilon = 0.0
        if not polished.stationary and is_over():
            status = Status.STOPPED
        if status is not Status.STOPPED:
            status = Status.CONVERGED if polished.stationary else Status.POLISH_LIMIT
        clock = recorder.time("polish", clock)
    rounded = _rounded(setting, plan) if status is Status.STOPPED and polished is None else None
    if rounded is not None:
        unpolished, plan, solved, coupling = plan, rounded, None, None
    plan, evaluation = _appraise(setting, plan, epsilon, solved, coupling)
    promised = promised_error(setting)
    # where all plans cost the same, rounding decides nothing, and its size does not matter
    constant = strategy.constant
    unresolved = polished is None and not constant and setting.rounding(epsilon) > RESOLVED
    missed = status.converged and evaluation.marginal_error > promised
    cut = status is Status.STOPPED and not constant
    if (unresolved or missed or constant) and not cut and plan.dtype == torch.float32:
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


def _rounded(setting: Setting, plan: TransportPlan) -> TransportPlan | None:
    """Round a plan whose solve was cut to its marginals, if it misses them and a table is kept."""
    # What rounding spreads would leave a support, relaxed marginals are none to be met, and
    # derivatives are those of potentials. Larger plans would take longer than there is time.
    problem, rule, options = setting.problem, setting.rule, setting.options
    free = problem.support is None and problem.restriction is None
    strict = rule is None and free and options.differentiable is None
    if not strict or plan.shape[0] * plan.shape[1] > limits_of(plan.device).subsample:
        return None
    missed = sum(
        float((mass - weight).abs().sum())
        for mass, weight in zip(plan.marginals(), plan.weights, strict=True)
    )
    # that of float64, in which a solve that is late has not ended
    if missed <= promised_error(replace(setting, dtype=torch.float64)):
        return None
    return plan_of(round_to_marginals(plan.to_dense().double(), *plan.weights), plan.weights)


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
