"""The outer loop: linearise at the current plan, solve the linear problem, repeat."""

import math

from torchgw._plans.transport import TransportPlan
from torchgw._sinkhorn.contract import PreparedProblem
from torchgw._sinkhorn.loop import SinkhornResult
from torchgw._sinkhorn.problem import FactoredCost
from torchgw._solve.evaluation import evaluate
from torchgw._solve.inner import (
    ANNEALING_TOLERANCE,
    check_finite,
    inner_tolerance,
    is_behind,
    look_ahead,
    loop_tolerance,
    next_budget,
    prepare,
    solve_linear,
)
from torchgw._solve.next_point import NextPoint
from torchgw._solve.precision import RESOLVED
from torchgw._solve.settle import SETTLE_ITERATIONS
from torchgw._solve.state import LoopState, Setting, Solved
from torchgw._solve.status import Status
from torchgw._solve.step import Step, choose_step
from torchgw._solve.stopping import Descent, Drift, MovingAverage, Verdict
from torchgw._typing import Iteration

# Column error at the target epsilon up to which a plan counts as meeting both marginals. [L184]
_MET = 3e-3
# So many iterations may miss it, without two in a row that meet it, before their linear problems
# get more time: objectives are not compared meanwhile, and the loop would end by its limit alone.
# [L472] [L1146]
_MISSES = 5
# Sinkhorn iterations of one linearisation, if the cost is stored or streamed: about as much work as
# the linearisation itself. [L186]
_INNER_ITERATIONS = {True: 50, False: 20}
# Ends of a run whose plan has settled.
_SETTLED = Status.CONVERGED, Status.PRECISION_LIMIT
# Linear problems in a row of a settled plan, each with all its iterations, that leave more than a
# share of the column error: after so many, those that `max_iter` allows would not end it. [L352]
_STUCK, _STUCK_SHARE = 10, 0.99


def iterate(setting: Setting, state: LoopState, most: int | None = None) -> LoopState:
    """Run outer iterations, at most so many, until the coupling settles or the budget is spent."""
    # One iteration is: linearise at the coupling (equation 2), solve the linear problem from warm
    # potentials, take the coupling of its plan, or average it in (proximal steps, equation 11). The
    # status that comes back is that of this run, whatever the stage before it reached; only a solve
    # that was stopped stays so.
    if state.status is Status.STOPPED:
        return state
    state = state._replace(status=Status.OUTER_LIMIT, solved=None)
    gradient, options, recorder = setting.gradient, setting.options, setting.recorder
    anneal, marginals, generator = setting.anneal, setting.marginals, setting.generator
    step = choose_step(
        Step(gradient, marginals, setting.backend, generator, setting.store, anneal.proximal)
    )
    follow, ending = NextPoint(gradient, anneal, marginals, generator), _Ending(setting)
    change, budget = math.inf, _INNER_ITERATIONS[setting.store]
    met, missed = True, 0
    left = options.max_iter - state.done
    for _ in range(left if most is None else min(most, left)):
        point, done, annealed = state.coupling, state.done, state.annealed
        epsilon = anneal(annealed)
        at_target = epsilon <= anneal.end
        # until then the plan has to settle as if it were the last stage
        wanted = setting.tol if epsilon <= anneal.sharp else options.tol

        with recorder.timed("cost"):
            cost = step.linearise(point)
        with recorder.timed("sinkhorn"):
            prepared = prepare(setting, cost, epsilon)
            tol = loop_tolerance(setting, change, wanted) if at_target else ANNEALING_TOLERANCE
            most_inner = min(options.inner_max_iter, budget)
            if at_target and done == 0 and state.start is None:
                # the start that a search has found would be lost if the first plan missed its
                # marginals by far
                tol, most_inner = _MET, options.inner_max_iter
            inner = solve_linear(setting, prepared, state.start, max_iter=most_inner, tol=tol)
        with recorder.timed("coupling"):
            latest, told = step.update(prepared, inner.potentials, point, state.latest)
            verdict = Verdict(*told.tolist())
            change = verdict.change
            check_finite(verdict.dual, inner.error, epsilon)
            # objectives are compared, and steps followed, only for plans that meet both marginals
            before, met = met, not at_target or inner.error <= _MET
            # a plan that jumps to and fro may miss them every other time
            missed = missed + 1 if not met else 0 if before else missed
            coupling = follow(point, latest, state.latest, change, annealed, met=met)
            start = look_ahead(anneal, annealed, inner.potentials, state.potentials)
        state = LoopState(
            coupling, latest, inner.potentials, start, done=done + 1, annealed=annealed + 1
        )
        if recorder.checkpoint is not None:
            recorder.checkpoint(state)
        objective = ending.objective(verdict)
        entry = Iteration(
            done, epsilon, verdict.dual, inner.error, change, inner.n_iters, cost.shape, objective
        )
        if recorder.add(entry):
            return state._replace(status=Status.STOPPED)

        reachable = max(wanted, setting.rounding(epsilon))
        settled = at_target and gradient.exact and change <= reachable
        longer = at_target and is_behind(inner, ending.error, change)
        longer = longer or missed >= _MISSES
        budget = next_budget(setting, budget, inner.error, settled=settled, longer=longer)
        spent = settled and most_inner == options.inner_max_iter and not inner.converged
        status = ending.status(
            prepared, inner, verdict, annealed, reachable,
            at_target=at_target, settled=settled, met=met, spent=spent,
        )  # fmt: skip
        if status is not None:
            solved = None
            # where steps are CUDA graphs the cost would be overwritten
            if status in _SETTLED and not step.overwrites and _is_result(setting, prepared, inner):
                solved = Solved(TransportPlan.of(prepared, inner.potentials), point, latest)
            return state._replace(status=status, solved=solved)
        # the prepared problem may be as large as the factors, so it is freed before the next cost
        # is made
        del prepared
    return state


class _Ending:
    """When a run ends and with which status, judged by its iterations so far."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        gradient, options, problem = setting.gradient, setting.options, setting.problem
        a, b = setting.marginals
        # the linear cost has the terms of rows and columns alone twice, the objective has them once
        self.excess = float(a @ gradient.row + b @ gradient.column) / 2
        self.average = MovingAverage(weight=0.2, improvement=0.005, patience=options.patience)
        self.descent = Descent(options.objective_tol, self.excess)
        # not if another stage goes on from here
        final = setting.anneal.proximal and gradient.exact and setting.tol <= options.tol
        self.drift = Drift(options.objective_tol, gradient.squares()) if final else None
        self.positive = problem.linear is None and problem.loss.is_square
        self.error, self.stuck = math.inf, 0  # of the last linear problem; how often it stayed

    def objective(self, verdict: Verdict) -> float:
        """Compute the objective that an iteration tells of, NaN where it does not."""
        known = self.setting.rule is None and not math.isnan(verdict.now)
        return verdict.dual - verdict.own / 2 - self.excess if known else math.nan

    def status(
        self, prepared: PreparedProblem, inner: SinkhornResult, verdict: Verdict, annealed: int,
        reachable: float, *, at_target: bool, settled: bool, met: bool, spent: bool,
    ) -> Status | None:  # fmt: skip
        """Choose the status if an iteration ends the run; ``None`` if it goes on."""
        # `settled` says that the plan changes by at most `reachable`, `met` that it meets its
        # marginals, `spent` that its linear problem has taken all the iterations it may.
        setting, drift = self.setting, self.drift
        self.stuck = self.stuck + 1 if spent and inner.error > _STUCK_SHARE * self.error else 0
        self.error = inner.error
        ended: Status | None = None
        if settled and inner.error <= reachable:
            ended = Status.CONVERGED
            if drift is not None and setting.gradient.lossy:
                ended = drift.update(*_look(setting, prepared, inner), reachable)
        elif drift is not None and self.positive and at_target and met and drift.is_due(annealed):
            ended = Status.FLAT if drift.is_zero(_look(setting, prepared, inner)[1]) else None
        if ended is Status.CONVERGED and verdict.change > max(setting.tol, RESOLVED):
            return Status.PRECISION_LIMIT
        if ended is not None:
            return ended
        if at_target and not setting.gradient.exact and self.average.update(verdict.dual):
            return Status.STATIONARY
        falling = at_target and setting.anneal.share(annealed) == 1
        if falling and self.descent.update(verdict, met=met):
            return Status.FLAT
        return Status.INNER_LIMIT if self.stuck == _STUCK else None


def _look(
    setting: Setting, prepared: PreparedProblem, inner: SinkhornResult
) -> tuple[TransportPlan, float]:
    """Read off a plan and its value."""
    plan = TransportPlan.of(prepared, inner.potentials)
    return plan, evaluate(setting, plan, plan.epsilon).value(setting.problem.alpha)


def _is_result(setting: Setting, prepared: PreparedProblem, inner: SinkhornResult) -> bool:
    """Whether one more linear problem would not change what a loop has converged to."""
    strict = setting.gradient.exact and setting.rule is None and not setting.anneal.proximal
    problem = prepared.problem
    if not strict or not isinstance(problem.cost, FactoredCost):
        return False
    precise = inner.error <= inner_tolerance(setting, problem.epsilon)
    return precise and inner.n_iters >= SETTLE_ITERATIONS
