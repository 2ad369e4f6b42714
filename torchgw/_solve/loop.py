"""The outer loop: linearise at the current plan, solve the linear problem, repeat."""

from __future__ import annotations

import math
from time import perf_counter

from torchgw._gradients.factored import FactoredGradient
from torchgw._gradients.relaxed import RelaxedGradient
from torchgw._plans.transport import TransportPlan
from torchgw._sinkhorn.cost import Cost, FactoredCost
from torchgw._sinkhorn.loop import SinkhornResult
from torchgw._solve.inner import (
    ANNEALING_TOLERANCE,
    check_finite,
    inner_tolerance,
    look_ahead,
    loop_tolerance,
    next_budget,
    prepare,
    solve_linear,
)
from torchgw._solve.next_point import NextPoint
from torchgw._solve.relaxed_step import RelaxedStep
from torchgw._solve.settle import SETTLE_ITERATIONS
from torchgw._solve.state import LoopState, Setting, Solved
from torchgw._solve.status import Status
from torchgw._solve.step import PlainStep, Step, choose_step
from torchgw._solve.stopping import Descent, MovingAverage, Report
from torchgw._typing import Iteration

__all__ = ["iterate"]

# Column error at the target epsilon up to which a plan counts as one with both marginals. [L184]
_MET = 3e-3
# Sinkhorn iterations of one linearisation, if the cost is stored or streamed: about as much work as
# the linearisation itself. [L186]
_INNER_ITERATIONS = {True: 50, False: 20}


def iterate(setting: Setting, state: LoopState, most: int | None = None) -> LoopState:
    """Run outer iterations, at most so many, until the coupling settles or the budget is spent.

    One iteration is: linearise at the coupling (equation 2), solve the linear problem from warm
    potentials, take the coupling of its plan, or average it in (proximal steps, equation 11). The
    status that comes back is that of this run, whatever the stage before it reached; only a solve
    that was stopped stays so.
    """
    if state.status is Status.STOPPED:
        return state
    state = state._replace(status=Status.OUTER_LIMIT, solved=None)
    gradient, options, recorder = setting.gradient, setting.options, setting.recorder
    average = MovingAverage(weight=0.2, improvement=0.005, patience=options.patience)
    change, budget = math.inf, _INNER_ITERATIONS[setting.store]
    step = make_step(setting)
    follow = NextPoint(gradient, step, setting.anneal, setting.marginals, setting.generator)
    descent = Descent(options.objective_tol, _dual_excess(setting))
    left = options.max_iter - state.done
    for _ in range(left if most is None else min(most, left)):
        done, annealed = state.done, state.annealed
        epsilon = setting.anneal(annealed)
        at_target = epsilon <= setting.anneal.target

        clock = perf_counter()
        cost = step.linearise(state.coupling)
        clock = recorder.time("cost", clock)
        prepared = prepare(setting, cost, epsilon)
        inner = solve_linear(
            setting,
            prepared,
            state.start,
            max_iter=min(options.inner_max_iter, budget),
            tol=loop_tolerance(setting, change) if at_target else ANNEALING_TOLERANCE,
        )
        clock = recorder.time("sinkhorn", clock)
        latest, told = step.update(prepared, inner.potentials, state.coupling, state.latest)
        report = Report(*told.tolist())
        change = report.change
        check_finite(report.dual, inner.error, epsilon)
        # objectives can be compared, and steps followed, of plans with both marginals
        met = not at_target or inner.error <= _MET
        coupling = follow(state.coupling, latest, state.latest, change, annealed, met=met)
        start = look_ahead(setting.anneal, annealed, inner.potentials, state.potentials)
        point = state.coupling
        state = LoopState(
            coupling, latest, inner.potentials, start, done=done + 1, annealed=annealed + 1
        )
        reachable = max(setting.tol, setting.rounding(epsilon))
        settled = at_target and gradient.exact and change <= reachable
        budget = next_budget(setting, budget, inner.error, settled=settled)
        recorder.time("coupling", clock)

        entry = Iteration(
            done, epsilon, report.dual, inner.error, change, inner.n_iters, cost.shape
        )
        if recorder.add(entry):
            return state._replace(status=Status.STOPPED)
        if settled and inner.error <= reachable:
            solved = None
            # graphs would overwrite the cost
            if type(step) is PlainStep and _is_result(setting, cost, inner, epsilon):
                solved = Solved(TransportPlan.of(prepared, inner.potentials), point, latest)
            return state._replace(status=Status.CONVERGED, solved=solved)
        if at_target and not gradient.exact and average.update(report.dual):
            return state._replace(status=Status.STATIONARY)
        falling = at_target and setting.anneal.share(annealed) == 1
        if falling and descent.update(report, met=met):
            return state._replace(status=Status.FLAT)
        # what is prepared may be as large as the factors: it goes before the next cost comes
        del prepared
    return state


def _is_result(setting: Setting, cost: Cost, inner: SinkhornResult, epsilon: float) -> bool:
    """Whether solving one more linear problem would not change what a loop has converged to.

    Stored costs are left alone: what a plan keeps is factors. Proximal ones are those of a mean.
    """
    if not isinstance(setting.gradient, FactoredGradient) or setting.anneal.proximal:
        return False
    precise = inner.error <= inner_tolerance(setting, epsilon)
    return isinstance(cost, FactoredCost) and precise and inner.n_iters >= SETTLE_ITERATIONS


def _dual_excess(setting: Setting) -> float:
    """Return what the dual value of a linear problem has and the objective has not.

    The quadratic terms of rows and columns alone are twice in the linear cost.
    """
    a, b = setting.marginals
    return float(a @ setting.gradient.row + b @ setting.gradient.column) / 2


def make_step(setting: Setting) -> Step:
    """Return how an iteration linearises and reads off its plan."""
    gradient, marginals = setting.gradient, setting.marginals
    rest = marginals, setting.backend, setting.generator, setting.store
    if isinstance(gradient, RelaxedGradient):
        return RelaxedStep(gradient, *rest)
    step = PlainStep(gradient, *rest, proximal=setting.anneal.proximal)
    return choose_step(step, (len(marginals.a), len(marginals.b)))
