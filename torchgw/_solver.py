"""The outer loop: linearise at the current plan, solve the linear problem, repeat."""

from __future__ import annotations

import math
from time import perf_counter

import torch

from torchgw._cost import Cost, FactoredCost
from torchgw._errors import NumericalError
from torchgw._factored_gradient import FactoredGradient
from torchgw._loop_state import LoopState, Setting, Solved
from torchgw._next_point import NextPoint
from torchgw._partial import partial_sinkhorn
from torchgw._plan import TransportPlan
from torchgw._relaxed import RelaxedGradient, RelaxedStep
from torchgw._schedule import Annealing, Descent, MovingAverage, Report, Status
from torchgw._sinkhorn import LinearProblem, SinkhornResult, sinkhorn
from torchgw._step import PlainStep, Step, choose_step, dual_value
from torchgw._typing import Iteration, Potentials

__all__ = ["check_finite", "inner_tolerance", "iterate", "settle"]

# Column error at which an inner solve ends while epsilon still falls: the next linearisation
# matters more than this one's marginals.
_ANNEALING_TOLERANCE = 1e-2
# Column error at the target epsilon up to which a plan counts as one with both marginals.
_MET = 3e-3
# Column error that an inner solve aims at, as a share of the change of the plan that ends the loop.
_INNER_SHARE = 0.1
# The same after a patient annealing, whose plans move for long: as a share of their change.
_PATIENT_SHARE = 0.01
# Iterations of the last linear problem at least. The error is a mean: with two levels, which take a
# few, single columns would be left behind.
_SETTLE_ITERATIONS = 3
# Share of the rounding of single exponents that is left in a marginal, a sum of many.
_ROUNDING_SHARE = 0.5
# Sinkhorn iterations of one linearisation, if the cost is stored or streamed: about as much work as
# the linearisation itself.
_INNER_ITERATIONS = {True: 50, False: 20}
# Column error to reach by default, if the cost is stored or settled in float64. Other costs are too
# large for anything but float32.
_INNER_TOLERANCE = {True: 5e-7, False: 1e-5}
# What becomes of a status when the last linear problem is not solved.
_INNER_FAILED = {
    Status.CONVERGED: Status.INNER_LIMIT,
    Status.FLAT: Status.INNER_LIMIT,
    Status.STATIONARY: Status.INNER_LIMIT,
    Status.OUTER_LIMIT: Status.BOTH_LIMITS,
}


def iterate(setting: Setting, state: LoopState) -> LoopState:
    """Run outer iterations until the coupling settles or the budget is spent.

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
    while (iteration := len(recorder.history)) < options.max_iter:
        epsilon = setting.anneal(iteration)
        at_target = epsilon <= setting.anneal.target

        clock = perf_counter()
        cost = step.linearise(state.coupling)
        clock = recorder.time("cost", clock)
        inner = solve_linear(
            setting,
            cost,
            state.start,
            epsilon,
            max_iter=min(options.inner_max_iter, budget),
            tol=_loop_tolerance(setting, change) if at_target else _ANNEALING_TOLERANCE,
        )
        clock = recorder.time("sinkhorn", clock)
        latest, told = step.update(cost, inner.potentials, state.coupling, state.latest, epsilon)
        report = Report(*told.tolist())
        change = report.change
        check_finite(report.dual, inner.error, epsilon)
        # objectives can be compared, and steps followed, of plans with both marginals
        met = not at_target or inner.error <= _MET
        coupling = follow(state.coupling, latest, state.latest, change, iteration, met=met)
        start = _look_ahead(setting.anneal, iteration, inner.potentials, state.potentials)
        point = state.coupling
        state = LoopState(coupling, latest, inner.potentials, start)
        reachable = max(setting.tol, setting.rounding(epsilon))
        settled = at_target and gradient.exact and change <= reachable
        budget = _next_budget(setting, budget, inner.error, settled=settled)
        recorder.time("coupling", clock)

        entry = Iteration(
            iteration, epsilon, report.dual, inner.error, change, inner.n_iters, cost.shape
        )
        if recorder.add(entry):
            return state._replace(status=Status.STOPPED)
        if settled and inner.error <= reachable:
            solved = None
            # graphs would overwrite the cost
            if type(step) is PlainStep and _is_result(setting, cost, inner, epsilon):
                solved = Solved(_plan(setting, cost, inner, epsilon), point, latest)
            return state._replace(status=Status.CONVERGED, solved=solved)
        if at_target and not gradient.exact and average.update(report.dual):
            return state._replace(status=Status.STATIONARY)
        falling = at_target and setting.anneal.share(iteration) == 1
        if falling and descent.update(report, met=met):
            return state._replace(status=Status.FLAT)
    return state


def _is_result(setting: Setting, cost: Cost, inner: SinkhornResult, epsilon: float) -> bool:
    """Whether solving one more linear problem would not change what a loop has converged to.

    Stored costs are left alone: what a plan keeps is factors. Proximal ones are those of a mean.
    """
    if not isinstance(setting.gradient, FactoredGradient) or setting.anneal.proximal:
        return False
    precise = inner.error <= inner_tolerance(setting, epsilon)
    return isinstance(cost, FactoredCost) and precise and inner.n_iters >= _SETTLE_ITERATIONS


def _plan(setting: Setting, cost: Cost, inner: SinkhornResult, epsilon: float) -> TransportPlan:
    """Return the plan of a linear problem."""
    return TransportPlan(cost, inner.potentials, setting.marginals, epsilon, setting.backend)


def solve_linear(
    setting: Setting,
    cost: Cost,
    start: Potentials | None,
    epsilon: float,
    *,
    max_iter: int,
    tol: float,
    min_iter: int = 0,
) -> SinkhornResult:
    """Solve the linear problem at a cost, whatever its marginals have to be."""
    problem = LinearProblem(cost, setting.marginals, epsilon, setting.backend)
    relaxation = setting.relaxation
    if relaxation is not None and relaxation.mass is not None:
        return partial_sinkhorn(problem, start, mass=relaxation.mass, max_iter=max_iter, tol=tol)
    if relaxation is not None:
        problem = problem._replace(tau=relaxation.tau(epsilon))
    return sinkhorn(problem, start, max_iter=max_iter, min_iter=min_iter, tol=tol)


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


def settle(
    setting: Setting, state: LoopState, dtype: torch.dtype
) -> tuple[TransportPlan, LoopState]:
    """Solve the last linear problem to the full tolerance; return its plan and the final state.

    This is where a mixed-precision solve gets its float64 marginals. Where the loop ended with a
    problem that is solved as well, its plan is the result.
    """
    clock = perf_counter()
    options, epsilon = setting.options, setting.anneal.final(len(setting.recorder.history))
    if state.solved is not None and state.solved.plan.dtype == dtype:
        plan = state.solved.plan
        state = state._replace(coupling=state.solved.point)
    else:
        state = state._replace(solved=None)
        cost = setting.gradient.linearise(state.coupling).to(dtype)
        inner = solve_linear(
            setting,
            cost.dense() if setting.store else cost,
            state.start,
            epsilon,
            max_iter=options.inner_max_iter,
            tol=inner_tolerance(setting, epsilon),
            min_iter=_SETTLE_ITERATIONS,
        )
        value = dual_value(inner.potentials, setting.marginals, setting.gradient)
        check_finite(float(value), inner.error, epsilon)
        setting.recorder.settle_iterations = inner.n_iters
        if not inner.converged:
            state = state._replace(status=_INNER_FAILED.get(state.status, state.status))
        plan = _plan(setting, cost, inner, epsilon)
    problem = LinearProblem(plan.cost, setting.marginals, epsilon, setting.backend)
    potentials = _reach_unused(problem, plan.potentials)
    setting.recorder.time("settle", clock)
    return TransportPlan(plan.cost, potentials, setting.marginals, epsilon, setting.backend), state


def _reach_unused(problem: LinearProblem, potentials: Potentials) -> Potentials:
    """Give points of zero weight, which sweeps leave where they are, the potentials of a half-step.

    Their conditional plans are then defined, so that they can be mapped like any other point.
    """
    a, b = problem.marginals
    if bool((a > 0).all()) and bool((b > 0).all()):
        return potentials
    f, g = potentials
    return Potentials(
        torch.where(a > 0, f, problem.rows(g)), torch.where(b > 0, g, problem.columns(f))
    )


def _next_budget(setting: Setting, budget: int, error: float, *, settled: bool) -> int:
    """Return how many Sinkhorn iterations the next linear problem may take."""
    # once the plan has settled, only more of them can improve its marginals
    if settled:
        return setting.options.inner_max_iter
    # a plan far from its marginals is no place to linearise at: at a small epsilon the loop would
    # go from one such plan to the next for ever
    return 2 * budget if error > _ANNEALING_TOLERANCE else budget


def _loop_tolerance(setting: Setting, change: float) -> float:
    """Return the column error to reach at the target epsilon, given the last change of the plan.

    The error of a proximal step is averaged out over the steps that follow, so it need not be much
    smaller than they are.
    """
    tol = _INNER_SHARE * max(setting.tol, setting.rounding(setting.anneal.target))
    if setting.anneal.proximal and setting.gradient.exact:
        return min(_ANNEALING_TOLERANCE, max(tol, _INNER_SHARE * change))
    if setting.anneal.patient:
        return min(_ANNEALING_TOLERANCE, max(tol, _PATIENT_SHARE * change))
    return tol


def _look_ahead(
    anneal: Annealing, iteration: int, potentials: Potentials, previous: Potentials | None
) -> Potentials:
    """Return where the next Sinkhorn solve begins: where this one ended, or one step further.

    In the long run a proximal step adds the same potentials every time, so f / epsilon grows
    linearly.
    """
    if previous is None or anneal.share(iteration - 1) == 1:
        return potentials
    before, now, after = (anneal(iteration + step) for step in (-1, 0, 1))
    return Potentials(
        *(
            after * (2 * new / now - old / before)
            for new, old in zip(potentials, previous, strict=True)
        )
    )


def inner_tolerance(setting: Setting, epsilon: float) -> float:
    """Return the L1 column error that a solve must reach in the end, as far as rounding allows."""
    precise = setting.store or setting.dtype == torch.float64
    asked = setting.options.inner_tol or _INNER_TOLERANCE[precise]
    return max(asked, _ROUNDING_SHARE * setting.rounding(epsilon))


def check_finite(objective: float, error: float, epsilon: float) -> None:
    """Raise if a solve produced NaN or infinity; bad input was refused before the loop."""
    if not (math.isfinite(objective) and math.isfinite(error)):
        raise NumericalError(
            f"The solve became non-finite at epsilon={epsilon:.3g} (objective {objective}, "
            f"marginal error {error}). The input is finite, so epsilon is too small for the "
            "precision: raise `epsilon`, or pass `precision='float64'`."
        )
