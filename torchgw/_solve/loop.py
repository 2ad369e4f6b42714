"""The outer loop: from a guess on linearise at the plan, solve the linear problem, repeat."""

import math
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._gradients.contract import Coupling
from torchgw._plans.contract import Plan
from torchgw._plans.transport import TransportPlan
from torchgw._problem.problem import spread
from torchgw._sinkhorn import annealing
from torchgw._sinkhorn.contract import PreparedProblem
from torchgw._sinkhorn.loop import SinkhornResult
from torchgw._sinkhorn.problem import Cost, DenseCost, FactoredCost
from torchgw._solve.evaluation import SETTLE_ITERATIONS, evaluate
from torchgw._solve.state import RESOLVED, LoopState, Setting, Solved, Status
from torchgw._solve.step import (
    SLOW,
    Pace,
    Step,
    check_finite,
    choose_step,
    inner_tolerance,
    look_ahead,
    prepare,
    solve_linear,
)
from torchgw._starts.chain import GUESS_EPSILON
from torchgw._tensors.deadline import is_over, keep
from torchgw._typing import Iteration, Marginals, Potentials

# Standard deviations of a moving average that count as progress at least. [L125]
_NOISE = 2.0
# Products with a plan that tell its change: a single one may miss it by chance. [L640]
_PRODUCTS = 8
# If a value is below this share of the squares that cancel in it, its decrease is judged by these:
# the value of a copy falls to zero by the same share of itself in each step. [L640]
_LEAST_SHARE = 0.01
# The value is computed every so many steps, to see whether it has come to zero: that costs as much
# as a step. [L642]
_EVERY = 10


class MovingAverage:
    """Early stopping: an exponential moving average that has stopped improving."""

    # A decrease within the noise of the average is none: it would come by chance, again and again.
    # The noise is estimated from how successive values differ, which a steady fall hardly changes.

    weight = 0.2  # of the newest value
    improvement = 0.005  # relative decrease of the average that counts as progress

    def __init__(self, patience: int) -> None:
        self.patience = patience  # values without progress before stopping
        self._average = self._last = math.nan
        self._best, self._squares = math.inf, 0.0
        self._stalled = self._count = 0

    def update(self, value: float) -> bool:
        """Take a value; return whether to stop."""
        first = not math.isfinite(self._average)
        self._average = value if first else self._average + self.weight * (value - self._average)
        if not first:
            self._squares += (value - self._last) ** 2 / 2
            self._count += 1
        self._last = value
        variance = self._squares / max(1, self._count) * self.weight / (2 - self.weight)
        least = max(self.improvement * abs(self._best), _NOISE * math.sqrt(variance))
        if first or self._average < self._best - least:
            self._best = self._average
            self._stalled = 0
        else:
            self._stalled += 1
        return self._stalled >= self.patience


class Verdict(NamedTuple):
    """What an outer iteration tells of itself, linearised at X and ending in P."""

    change: float  # of the coupling, relative
    dual: float  # value of the linear problem
    now: float  # <C(X), P> without the linear term; NaN where unknown, as for samples
    before: float  # <C(X), P_before>
    own: float  # <C(X), X>


class Descent:
    """Early stopping of an exact solve: an objective that no longer falls, at one epsilon."""

    # The objective of a plan P is known one iteration later, from the cost at the point X next to P
    # where that was linearised: its quadratic part is <C(X), P> - <C(X), X> / 2, up to a term of
    # second order in P - X, and its entropy follows from the dual value.
    # `tol` is the mean relative decrease per iteration that counts as falling, 0 for no stopping;
    # `constant` is what the dual value has and the objective has not.

    def __init__(self, tol: float, constant: float) -> None:
        self._tol, self._constant = tol, constant
        self._last: Verdict | None = None
        self._changes: list[float] = []
        self._risen = False
        self.values: list[float] = []

    def update(self, verdict: Verdict, *, met: bool = True) -> bool:
        """Take what an iteration tells; return whether to stop."""
        # A plan whose changes shrink is about to settle, and is not stopped. Plans whose marginals
        # are not `met` are not compared either: their objective may be anything. Where plans go to
        # and fro between two, the loop ends at the lower one.
        if not met:
            self._last, self._risen = None, False
            self.values.clear()
            return False
        last, self._last = self._last, verdict
        self._changes.append(verdict.change)
        if last is None or self._tol == 0 or math.isnan(verdict.now):
            return False
        quadratic = verdict.before - verdict.own / 2
        self.values.append(last.dual - last.now + quadratic - self._constant)
        if len(self.values) <= annealing.WINDOW:
            return False
        value = self.values[-1]
        fall = (self.values[-1 - annealing.WINDOW] - value) / annealing.WINDOW
        recent, earlier = (
            self._changes[-annealing.SETTLING_WINDOW :],
            self._changes[: -annealing.SETTLING_WINDOW],
        )
        settling = min(recent) <= annealing.SETTLING * min(earlier, default=math.inf)
        least = self._tol * abs(value)
        if self._risen:
            return True
        flat = fall <= least and not settling
        self._risen = flat and value > self.values[-2] + least
        return flat and not self._risen


class Drift:
    """How proximal steps end once their coupling, of few numbers, has settled."""

    # The plan may still move: a coupling does not see which of two equal points has which mass, nor
    # does a linear cost; and a step that changes the coupling by little changes the plan by the
    # root of that. Products with random vectors see all of a plan: the mean of their squares is
    # that of its entries. `tol` is the relative decrease of the value in a step that counts as
    # falling, 0 for no stopping by it; `squares` are the squares that cancel in a value.

    def __init__(self, tol: float, squares: float) -> None:
        self.tol, self.least = tol, _LEAST_SHARE * squares
        self._last: tuple[Tensor, float] | None = None

    def update(self, plan: Plan, value: float, reachable: float) -> Status | None:
        """Take a plan and its value; return how the loop ends, ``None`` if it goes on."""
        generator = torch.Generator().manual_seed(0)
        vectors = torch.randn(plan.shape[1], _PRODUCTS, device="cpu", generator=generator)
        image = (plan @ vectors.to(plan.device, plan.dtype)).double()
        last, self._last = self._last, (image, value)
        if last is None:
            return None
        if float((image - last[0]).norm()) <= reachable * float(image.norm()):
            return Status.CONVERGED
        flat = self.tol > 0 and last[1] - value <= self.tol * max(abs(value), self.least)
        return Status.FLAT if flat else None


class NextPoint:
    """Choose the next point, after one and the plan that it led to."""

    # That is the coupling of the plan, a mean with those before (proximal steps, equation 11; steps
    # that turn back), or one further on in the same direction: by Anderson's method near a fixed
    # point, by Nesterov's where dense iteration is slow (equation 18).

    def __init__(self, setting: Setting) -> None:
        self._gradient, self._anneal = gradient, anneal = setting.gradient, setting.anneal
        self._generator, self._anderson = setting.generator, annealing.Anderson()
        self._nesterov = Nesterov(setting.marginals, wanted=anneal.patient)
        self._held = anneal.shortened and gradient.exact
        if self._held:
            self._length = StepLength(_FIRST_HELD, _SHORTEST_HELD)
        else:
            # noise turns the steps of samples back, however short these are
            self._length = StepLength(shortest=0.0 if gradient.exact else annealing.SHORT_STEP)

    def __call__(
        self, point: Coupling, latest: Coupling, previous: Coupling, reached: "_Reached"
    ) -> Coupling:
        """Choose the next point, after ``latest`` and the coupling ``previous`` before it."""
        gradient, share = self._gradient, self._anneal.share(reached.annealed)
        at_target, change = reached.at_target, reached.verdict.change
        if share == 1 and (gradient.shortens or self._held):
            share = self._length.next(latest.minus(point))
        if share < 1:
            return point.mean(latest, share, self._generator)
        if at_target and change < gradient.linear_below:
            return latest.with_vector(self._anderson.next(point.vector(), latest.vector()))
        # steps to plans that miss their marginals are not extrapolated
        slow = gradient.momentum and reached.met
        if slow and self._nesterov.wanted(change if at_target else math.inf):
            past = (coupling.vector() for coupling in (point, latest, previous))
            return latest.with_vector(self._nesterov.next(*past))
        return latest


# The first and the shortest step from a plan at which a search has ended: a whole one may leave it.
# [L1451]
_FIRST_HELD, _SHORTEST_HELD = 1 / 8, 1 / 1024


class StepLength:
    """Halve a step that turns back on the one before, and lengthen the others."""

    def __init__(self, first: float = 1.0, shortest: float = 0.0) -> None:
        self._share, self._shortest = first, shortest
        self._direction: Tensor | None = None

    def next(self, direction: Tensor) -> float:
        """Choose the length of a step in some direction, as a share of it."""
        if self._direction is not None:
            back = float((direction * self._direction).sum()) < 0
            longer = min(1.0, annealing.LENGTHENING * self._share)
            self._share = max(self._share / 2, self._shortest) if back else longer
        self._direction = direction
        return self._share


# Largest multiple of the last step that momentum adds. [L174]
_LARGEST_MOMENTUM = 0.9
# Momentum ends when a change is this multiple of the least change: it has then led away from the
# path of plain steps. The multiple is below 2, as changes between plans that are far apart, of
# adjacency matrices for example, vary by factors from 1/2 to 2. [L143]
_ASTRAY = 1.5


class Nesterov:
    """Choose where to linearise next: at a plan and some of the way that led to it."""

    # The objective of plain iteration falls by little steps in a direction that hardly turns. After
    # k steps in it the next point is P + min(0.9, (k - 1) / (k + 2)) (P - P_before) [1]; where the
    # last step leads back to the point before, k begins again [2]. Nothing is read from the
    # device.
    # Columns of P that miss their weights are put right, by a multiple of the row weights: on plans
    # with given marginals the quadratic form of most distances is concave, and iteration goes down,
    # but not across them. A step out of them would come back as a larger one.
    # [1] Y. Nesterov. A method for solving the convex programming problem with convergence rate
    # O(1/k^2). Soviet Mathematics Doklady 1983.
    # [2] B. O'Donoghue, E. Candes. Adaptive restart for accelerated gradient schemes. Foundations
    # of Computational Mathematics 2015.

    def __init__(self, marginals: Marginals, *, wanted: bool) -> None:
        self._marginals, self._wanted = marginals, wanted
        self._change = self._least = float("inf")
        self._astray = False
        self._steps: Tensor | None = None

    def wanted(self, change: float) -> bool:
        """Whether the next step should go further, given the change by one at the target."""
        # If `wanted` from the start, steps go further at once, otherwise only once plain steps are
        # slow. Where the steps grow, as between plans that are far apart, momentum would go round
        # for ever while plain iteration would settle: from then on there is none.
        self._wanted = self._wanted or change > SLOW * self._change
        self._least = min(self._least, change)
        self._astray = self._astray or change > _ASTRAY * self._least
        self._change = change
        return self._wanted and not self._astray

    def next(self, point: Tensor, image: Tensor, previous: Tensor) -> Tensor:
        """Compute the next point, given the last one, its image, and the image before that."""
        step = image - previous.to(image.dtype)
        back = torch.dot((point.to(image.dtype) - image).flatten(), step.flatten()) > 0
        before = torch.zeros_like(back, dtype=image.dtype) if self._steps is None else self._steps
        self._steps = torch.where(back, 1.0, before + 1)
        weight = ((self._steps - 1) / (self._steps + 2)).clamp(max=_LARGEST_MOMENTUM)
        a, b = self._marginals
        following = image + weight * step
        table = following.view(len(a), len(b))
        table.addr_(a.to(table.dtype), table.sum(0) - b.to(table.dtype), alpha=-1)
        return following


# Sinkhorn iterations that what follows the loop takes the time of, at least; and how many times as
# long as the products of an outer iteration those of the plan's numbers take. [L1294, L1917]
_TAIL, _EVALUATED = 40, 2.0
# Change of a plan, relative, up to which it is as good as the point that shortened steps have led
# to. [L1451]
_HELD = 1e-4
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
    follow, ending = NextPoint(setting), _Ending(setting)
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
        swept = perf_counter()
        with recorder.timed("sinkhorn"):
            prepared = prepare(setting, cost, epsilon)
            max_iter, tol = pace.limits(wanted, at_target=at_target, first=first)
            # at the target at once, potentials of nothing are far away [L1812]
            falling = first and at_target
            inner = solve_linear(
                setting, prepared, state.start, max_iter=max_iter, tol=tol, falling=falling
            )
            if at_target:
                inner = pace.until_met(inner, prepared)
        swept = perf_counter() - swept
        with recorder.timed("coupling"):
            latest, told = step.update(prepared, inner.potentials, point, state.latest)
            verdict = Verdict(*told.tolist())
            check_finite(verdict.dual, inner.error, epsilon)
            reachable = max(wanted, setting.rounding(epsilon))
            met = pace.meets(inner, at_target=at_target)
            reached = _Reached(prepared, inner, verdict, annealed, reachable, at_target, met)
            coupling = follow(point, latest, state.latest, reached)
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
        products = perf_counter() - clock - swept
        keep(_TAIL * swept / max(1, inner.n_iters) + _EVALUATED * products)
        if recorder.add(entry):
            plan, solved = TransportPlan.of(prepared, inner.potentials), None
            dense = gradient.exact and gradient.in_factors() is None
            if dense and is_over() and not step.overwrites:
                solved = Solved(plan, point, latest, cut=True)
            return state._replace(status=Status.STOPPED, solved=solved)

        settled = at_target and gradient.exact and verdict.change <= reachable
        drowned = not met and setting.rounding(epsilon) > annealing.MET
        pace.learn(inner, verdict.change, at_target=at_target, settled=settled, drowned=drowned)
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
        self.average = MovingAverage(options.patience)
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
        # a plan of steps that are shortened is where its point leads, and not what has settled
        falling &= not setting.anneal.shortened or verdict.change <= _HELD
        if falling and self.descent.update(verdict, met=reached.met):
            return Status.FLAT
        return Status.INNER_LIMIT if stuck else None

    def _comes_to_nothing(self, reached: _Reached) -> bool:
        """Whether proximal steps have come to a value of zero, which nothing can lower."""
        drift, due = self.drift, reached.annealed % _EVERY == 0 and reached.at_target
        if drift is None or drift.tol == 0 or not (self.positive and due and reached.met):
            return False
        return reached.look(self.setting)[1] <= drift.tol * drift.least


# Iterations of a linear problem that is solved roughly. [L297]
INNER = 200


class Guess(NamedTuple):
    """Where a solve begins."""

    plan: Plan | None  # None is the product plan
    potentials: Potentials | None  # of the linear problem at that plan
    epsilon: float  # at which annealing begins, as a share of the natural scale
    patient: bool = False  # annealing is slow, as it is the only search
    whole: bool = False  # potentials are of the whole cost, not of the reduced one
    sharp: bool = False  # proximal steps go on from the plan itself, if they lead to polishing
    ended: bool = False  # the plan is one at which a search has ended, which steps are not to leave
    linear: bool = False  # the plan is the best for the linear cost alone
    named: str = ""  # what it was passed as, if it was passed


# Annealing from the natural scale of the cost forgets every plan but the product plan; slowly where
# nothing else tells where to start.
PRODUCT = Guess(None, None, 1.0)
PATIENT = PRODUCT._replace(patient=True)
LINEAR = Guess(None, None, GUESS_EPSILON, linear=True)


def starting_point(setting: Setting, guess: Guess) -> LoopState:
    """Make the state of the loop from which a guess starts."""
    gradient, support = setting.gradient, setting.problem.support
    if guess.linear:
        coupling = gradient.update(_best_linear(setting, guess.epsilon), None, setting.generator)
    elif guess.plan is None and support is not None:
        # the plan nearest to a x b on it
        nothing = torch.zeros(support.shape, dtype=setting.dtype, device=support.device)
        even = _rough(setting, DenseCost(nothing), 1.0)
        coupling = gradient.update(even, None, setting.generator).perturbed()
    elif guess.plan is None:
        coupling = gradient.start().perturbed()
    else:
        coupling = gradient.update(guess.plan, None, setting.generator)
    # potentials of strict marginals are of little use to relaxed ones
    potentials = guess.potentials if setting.rule is None else None
    if potentials is not None and guess.whole:
        potentials = Potentials(potentials.f - gradient.row, potentials.g - gradient.column)
    return LoopState(coupling, coupling, potentials, potentials)


def _best_linear(setting: Setting, share: float) -> Plan:
    """Compute the best plan for the linear cost alone, at a share of its spread, roughly."""
    cost = setting.problem.linear
    assert cost is not None
    scale = spread(cost) or 1.0
    return _rough(setting, cost.to(setting.dtype), share * scale)


def _rough(setting: Setting, cost: Cost, epsilon: float) -> Plan:
    """Solve a linear problem, roughly."""
    prepared = prepare(setting, cost, epsilon)
    inner = solve_linear(setting, prepared, None, max_iter=INNER, tol=annealing.ANNEALING_TOLERANCE)
    return TransportPlan.of(prepared, inner.potentials)
