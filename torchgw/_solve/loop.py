"""The outer loop: linearise at the current plan, solve the linear problem, repeat."""

import math
from time import perf_counter
from typing import NamedTuple

from torchgw._plans.transport import TransportPlan
from torchgw._sinkhorn.contract import PreparedProblem
from torchgw._sinkhorn.loop import SinkhornResult
from torchgw._sinkhorn.problem import FactoredCost
from torchgw._solve.evaluation import evaluate
from torchgw._solve.inner import (
    Pace,
    check_finite,
    inner_tolerance,
    look_ahead,
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
from torchgw._tensors.deadline import keep
from torchgw._typing import Iteration

# Sinkhorn iterations that what follows the loop takes the time of, at least. [L1294]
_TAIL = 40
# Ends of a run whose plan has settled.
_SETTLED = Status.CONVERGED, Status.PRECISION_LIMIT


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
    pace = Pace(setting)
    left = options.max_iter - state.done
    for _ in range(left if most is None else min(most, left)):
        clock, point, done, annealed = perf_counter(), state.coupling, state.done, state.annealed
        epsilon = anneal(annealed)
        at_target = epsilon <= anneal.end
        # until then the plan has to settle as if it were the last stage
        wanted = setting.tol if epsilon <= anneal.sharp else options.tol
        first = done == 0 and state.start is None

        with recorder.timed("cost"):
            cost = step.linearise(point)
        with recorder.timed("sinkhorn"):
            prepared = prepare(setting, cost, epsilon)
            max_iter, tol = pace.limits(wanted, at_target=at_target, first=first)
            inner = solve_linear(setting, prepared, state.start, max_iter=max_iter, tol=tol)
            if at_target:
                inner = pace.until_met(inner, prepared)
        with recorder.timed("coupling"):
            latest, told = step.update(prepared, inner.potentials, point, state.latest)
            verdict = Verdict(*told.tolist())
            check_finite(verdict.dual, inner.error, epsilon)
            reachable = max(wanted, setting.rounding(epsilon))
            met = pace.meets(inner, at_target=at_target)
            reached = _Reached(prepared, inner, verdict, annealed, reachable, at_target, met)
            coupling = follow(point, latest, state.latest, verdict.change, annealed, met=met)
            start = look_ahead(anneal, annealed, inner.potentials, state.potentials)
        state = LoopState(
            coupling, latest, inner.potentials, start, done=done + 1, annealed=annealed + 1
        )
        if recorder.checkpoint is not None:
            recorder.checkpoint(state)
        entry = Iteration(
            done, epsilon, verdict.dual, inner.error, verdict.change, inner.n_iters, cost.shape,
            ending.objective(verdict),
        )  # fmt: skip
        # the last marginals and the numbers of the plan take about so long in float64
        keep(_TAIL * (perf_counter() - clock) / max(1, inner.n_iters))
        if recorder.add(entry):
            return state._replace(status=Status.STOPPED)

        settled = at_target and gradient.exact and verdict.change <= reachable
        pace.learn(inner, verdict.change, at_target=at_target, settled=settled)
        status = ending.status(reached, settled=settled, stuck=pace.stuck)
        if status is not None:
            solved = None
            # where steps are CUDA graphs the cost would be overwritten
            if status in _SETTLED and not step.overwrites and reached.is_result(setting):
                solved = Solved(TransportPlan.of(prepared, inner.potentials), point, latest)
            return state._replace(status=status, solved=solved)
        # the prepared problem may be as large as the factors, so it is freed before the next cost
        # is made
        del prepared, reached
    return state


class _Reached(NamedTuple):
    """What an outer iteration has reached."""

    prepared: PreparedProblem
    inner: SinkhornResult
    verdict: Verdict
    annealed: int
    reachable: float  # change of the plan that rounding and tolerance leave
    at_target: bool
    met: bool  # whether the plan has both marginals

    def look(self, setting: Setting) -> tuple[TransportPlan, float]:
        """Read off the plan and its value."""
        plan = TransportPlan.of(self.prepared, self.inner.potentials)
        return plan, evaluate(setting, plan, plan.epsilon).value(setting.problem.alpha)

    def is_result(self, setting: Setting) -> bool:
        """Whether one more linear problem would not change what the loop has converged to."""
        strict = setting.gradient.exact and setting.rule is None and not setting.anneal.proximal
        problem = self.prepared.problem
        if not strict or not isinstance(problem.cost, FactoredCost):
            return False
        precise = self.inner.error <= inner_tolerance(setting, problem.epsilon)
        return precise and self.inner.n_iters >= SETTLE_ITERATIONS


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

    def objective(self, verdict: Verdict) -> float:
        """Compute the objective that an iteration tells of, NaN where it does not."""
        known = self.setting.rule is None and not math.isnan(verdict.now)
        return verdict.dual - verdict.own / 2 - self.excess if known else math.nan

    def status(self, reached: _Reached, *, settled: bool, stuck: bool) -> Status | None:
        """Choose the status that an iteration ends the run with; ``None`` if it goes on."""
        setting, drift, verdict = self.setting, self.drift, reached.verdict
        at_target, reachable = reached.at_target, reached.reachable
        ended: Status | None = None
        if settled and reached.inner.error <= reachable:
            ended = Status.CONVERGED
            if drift is not None and setting.gradient.lossy:
                ended = drift.update(*reached.look(setting), reachable)
        elif self._comes_to_nothing(reached):
            ended = Status.FLAT
        if ended is Status.CONVERGED and verdict.change > max(setting.tol, RESOLVED):
            return Status.PRECISION_LIMIT
        if ended is not None:
            return ended
        if at_target and not setting.gradient.exact and self.average.update(verdict.dual):
            return Status.STATIONARY
        falling = at_target and setting.anneal.share(reached.annealed) == 1
        if falling and self.descent.update(verdict, met=reached.met):
            return Status.FLAT
        return Status.INNER_LIMIT if stuck else None

    def _comes_to_nothing(self, reached: _Reached) -> bool:
        """Whether proximal steps have come to a value of zero, which nothing can lower."""
        drift, there = self.drift, reached.at_target and reached.met
        if drift is None or not (self.positive and there and drift.is_due(reached.annealed)):
            return False
        return drift.is_zero(reached.look(self.setting)[1])
