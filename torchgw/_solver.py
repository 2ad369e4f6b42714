"""The outer loop: linearise at the current plan, solve the linear problem, repeat."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, NamedTuple

import torch

from torchgw._acceleration import Anderson
from torchgw._dispatch import (
    choose_backend,
    choose_gradient,
    choose_precision,
    store_cost,
)
from torchgw._errors import InvalidInputError, NumericalError
from torchgw._gradient import (
    Coupling,
    FactoredGradient,
    Gradient,
    Problem,
    QuadraticValue,
    distance_spread,
    make_gradient,
)
from torchgw._inputs import check_linear_cost
from torchgw._multiscale import draw_subsample, extend
from torchgw._options import Options
from torchgw._plan import StoredPlan, TransportPlan
from torchgw._schedule import Annealing, MovingAverage, Status
from torchgw._sinkhorn import Backend, row_blocks, sinkhorn
from torchgw._typing import Marginals, Potentials

__all__ = ["Iteration", "Outcome", "Recorder", "entropy_and_linear", "solve_problem"]

# Column error at which an inner solve ends while epsilon still falls: the next linearisation
# matters more than this one's marginals.
_ANNEALING_TOLERANCE = 1e-2
# Column error that an inner solve aims at, as a share of the change of the plan that ends the loop.
_INNER_SHARE = 0.1
# Change of the plan below which the outer iteration is close enough to linear to be extrapolated.
_ACCELERATION_START = 0.01
# Sinkhorn iterations of one linearisation, if the cost is stored or streamed: about as much work as
# the linearisation itself.
_INNER_ITERATIONS = {True: 50, False: 20}
# Entries (n * m) above which a factored solve begins on a subsample, and its points per side: as
# many as give the coupling to a few percent within a second.
_COARSE_ENTRIES = 9_000_000
_COARSE_POINTS = 1_500
# Change of the plan at which a mixed-precision solve goes over from float32 to float64.
_HANDOVER_TOLERANCE = 1e-4
# epsilon="auto" and the start of annealing, as shares of natural_scale().
_AUTO_EPSILON = 0.0025
_ANNEAL_START = 1.0


class Iteration(NamedTuple):
    """What the callback and the history see of one outer iteration."""

    iteration: int
    epsilon: float
    objective: float  # dual value of the linearised entropic problem, free of charge
    marginal_error: float  # L1 distance of the column marginal to b
    change: float  # of the coupling, relative; NaN for sampled gradients
    inner_iterations: int
    shape: tuple[int, int]  # (n, m), or that of the subsample which a large solve begins with


@dataclass
class Recorder:
    """What is collected along the way: history, seconds by phase, the callback."""

    callback: Callable[[Iteration], Any] | None = None
    history: list[Iteration] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)

    def add(self, entry: Iteration) -> bool:
        """Record an iteration; return whether the callback asks to stop."""
        self.history.append(entry)
        return self.callback is not None and self.callback(entry) is True

    def time(self, phase: str, since: float) -> float:
        """Add the seconds since a moment to a phase; return the present moment."""
        now = perf_counter()
        self.timings[phase] = self.timings.get(phase, 0.0) + now - since
        return now


@dataclass(frozen=True)
class Setting:
    """What stays the same throughout a solve."""

    gradient: Gradient
    marginals: Marginals
    anneal: Annealing
    options: Options
    backend: Backend
    generator: torch.Generator
    recorder: Recorder
    store: bool  # build the (n, m) cost of an iteration: scaling a stored kernel is faster
    tol: float  # change of the coupling and marginal error at which the loop ends


class LoopState(NamedTuple):
    """What flows through the loop."""

    coupling: Coupling
    potentials: Potentials  # cost units
    status: Status = Status.OUTER_LIMIT


def iterate(setting: Setting, state: LoopState) -> LoopState:
    """Run outer iterations until the coupling settles or the budget is spent.

    One iteration is: linearise at the coupling (equation 2), solve the linear problem from warm
    potentials, take the coupling of its plan.
    """
    gradient, options, recorder = setting.gradient, setting.options, setting.recorder
    average = MovingAverage(weight=0.2, improvement=0.005, patience=options.patience)
    settled = False
    acceleration = Anderson()
    while (iteration := len(recorder.history)) < options.max_iter:
        epsilon = setting.anneal(iteration)
        at_target = epsilon == setting.anneal.target
        # once the plan has settled, only more Sinkhorn iterations can improve its marginals
        budget = options.inner_max_iter if settled else _INNER_ITERATIONS[setting.store]

        clock = perf_counter()
        cost = gradient.linearise(state.coupling)
        cost = cost.dense() if setting.store else cost
        clock = recorder.time("cost", clock)
        inner = sinkhorn(
            cost,
            setting.marginals,
            state.potentials,
            epsilon,
            backend=setting.backend,
            max_iter=min(options.inner_max_iter, budget),
            tol=_INNER_SHARE * setting.tol if at_target else _ANNEALING_TOLERANCE,
        )
        clock = recorder.time("sinkhorn", clock)
        plan = TransportPlan(cost, inner.potentials, setting.marginals, epsilon, setting.backend)
        coupling = gradient.update(plan, state.coupling, setting.generator)
        change = gradient.change(coupling, state.coupling)
        if gradient.exact and at_target and change < _ACCELERATION_START:
            coupling = acceleration.next(state.coupling, coupling)
        state = LoopState(coupling, inner.potentials)
        settled = at_target and gradient.exact and change <= setting.tol
        recorder.time("coupling", clock)

        objective = dual_value(inner.potentials, setting.marginals)
        check_finite(objective, inner.error, epsilon)
        entry = Iteration(
            iteration, epsilon, objective, inner.error, change, inner.n_iters, cost.shape
        )
        if recorder.add(entry):
            return state._replace(status=Status.STOPPED)
        if settled and inner.error <= setting.tol:
            return state._replace(status=Status.CONVERGED)
        if at_target and not gradient.exact and average.update(objective):
            return state._replace(status=Status.STATIONARY)
    return state


def settle(setting: Setting, state: LoopState, dtype: torch.dtype) -> tuple[TransportPlan, Status]:
    """Solve the last linear problem to the full tolerance; return its plan and the final status.

    This is where a mixed-precision solve gets its float64 marginals.
    """
    clock = perf_counter()
    options, epsilon = setting.options, setting.anneal.target
    cost = setting.gradient.linearise(state.coupling).to(dtype)
    inner = sinkhorn(
        cost.dense() if setting.store else cost,
        setting.marginals,
        state.potentials,
        epsilon,
        backend=setting.backend,
        max_iter=options.inner_max_iter,
        tol=options.inner_tol,
    )
    check_finite(dual_value(inner.potentials, setting.marginals), inner.error, epsilon)
    setting.recorder.time("settle", clock)
    status = state.status
    if status.converged and not inner.converged:
        status = Status.INNER_LIMIT
    plan = TransportPlan(cost, inner.potentials, setting.marginals, epsilon, setting.backend)
    return plan, status


def dual_value(potentials: Potentials, marginals: Marginals) -> float:
    """Return <a, f> + <b, g>, the entropic dual value once the rows of the plan are exact."""
    return float(marginals.a @ potentials.f + marginals.b @ potentials.g)


def check_finite(objective: float, error: float, epsilon: float) -> None:
    """Raise if a solve produced NaN or infinity; bad input was refused before the loop."""
    if not (math.isfinite(objective) and math.isfinite(error)):
        raise NumericalError(
            f"The solve became non-finite at epsilon={epsilon:.3g} (objective {objective}, "
            f"marginal error {error}). The input is finite, so epsilon is too small for the "
            "precision: raise `epsilon`, or pass `precision='float64'`."
        )


class Outcome(NamedTuple):
    """Everything that a result is made from."""

    plan: TransportPlan
    masses: Marginals  # row and column sums of the plan, float64
    quadratic: QuadraticValue
    status: Status
    gradient: str
    backend: str
    precision: str
    n_anchors: int | None
    recorder: Recorder


def solve_problem(
    problem: Problem, options: Options, init: Any, generator: torch.Generator, recorder: Recorder
) -> Outcome:
    """Choose how to solve, run the loop, settle the marginals and evaluate the plan."""
    clock = perf_counter()
    n, m, device = problem.source.n, problem.target.n, problem.source.device
    name = choose_gradient(options.gradient, problem.source, problem.target)
    precision, steps = choose_precision(options.precision, device, n * m)
    n_anchors = options.n_anchors or min(1024, max(256, 8 * math.isqrt(max(n, m))))
    scale = natural_scale(problem, generator)
    target = _AUTO_EPSILON * scale if options.epsilon == "auto" else float(options.epsilon)
    start = max(target, _ANNEAL_START * scale) if init is None else target

    def setting_in(dtype: torch.dtype, tol: float) -> Setting:
        gradient = make_gradient(name, problem.to(dtype), n_anchors, options.momentum, generator)
        # the plan cannot settle below the rounding of its exponents
        floor = 4 * scale / target * torch.finfo(dtype).eps
        return Setting(
            gradient=gradient,
            marginals=problem.marginals,
            anneal=Annealing(start, target),
            options=options,
            backend=choose_backend(options.backend, device, dtype),
            generator=generator,
            recorder=recorder,
            store=store_cost(device, n * m),
            tol=max(tol, floor),
        )

    handover = max(options.tol, _HANDOVER_TOLERANCE) if steps.again else options.tol
    setting = setting_in(steps.loop, handover)
    if init is None and can_start_coarse(setting.gradient, n * m):
        state = start_coarse(setting)
        setting = replace(setting, anneal=Annealing(target, target))
        start = target
    else:
        state = starting_point(setting, init, (n, m))
    recorder.time("setup", clock)
    state = iterate(setting, state)
    if setting.gradient.exact and steps.settle != steps.loop:
        setting = setting_in(steps.settle, options.tol)
        if steps.again and state.status.converged:
            state = iterate(setting, state)
    plan, status = settle(setting, state, steps.settle)

    clock = perf_counter()
    masses = Marginals(*plan.marginals())
    quadratic = setting.gradient.evaluate(plan, masses, generator)
    recorder.time("evaluation", clock)
    sampled = None if setting.gradient.exact else n_anchors
    backend = setting.backend.name
    return Outcome(plan, masses, quadratic, status, name, backend, precision, sampled, recorder)


def can_start_coarse(gradient: Gradient, entries: int) -> bool:
    """Whether a subsample is worth solving first, and can be."""
    if not isinstance(gradient, FactoredGradient) or gradient.problem.linear is not None:
        return False
    sides = (gradient.problem.source, gradient.problem.target)
    both = all(side.factors() is not None for side in sides)
    return both and entries > _COARSE_ENTRIES


def start_coarse(setting: Setting) -> LoopState:
    """Anneal on a subsample; return its coupling, and its potentials extended to all points."""
    gradient = setting.gradient
    assert isinstance(gradient, FactoredGradient)
    sample = draw_subsample(gradient.problem, _COARSE_POINTS, setting.generator)
    coarse = FactoredGradient(sample.problem)
    small = replace(
        setting,
        gradient=coarse,
        marginals=sample.problem.marginals,
        store=True,
        tol=max(setting.tol, _HANDOVER_TOLERANCE),
    )
    shape = (len(sample.source), len(sample.target))
    state = iterate(small, starting_point(small, None, shape))
    potentials = extend(
        sample, gradient, coarse, state.coupling, state.potentials, setting.anneal.target,
        setting.backend,
    )  # fmt: skip
    return LoopState(state.coupling, potentials, state.status)


def natural_scale(problem: Problem, generator: torch.Generator) -> float:
    """Return the spread of the cost at a concentrated plan.

    4 alpha std(DX) std(DY) + (1 - alpha) std(M). The spread at a x b itself would not do: it
    vanishes on homogeneous spaces, where all points have the same mean distance.
    """
    a, b = problem.marginals
    source = distance_spread(problem.source, a, generator)
    scale = 4 * problem.alpha * source * distance_spread(problem.target, b, generator)
    if problem.linear is not None:
        scale += (1 - problem.alpha) * float(problem.linear.std(correction=0))
    # All points coincide on one side: every plan costs the same and any epsilon will do.
    return scale or 1.0


def starting_point(setting: Setting, init: Any, shape: tuple[int, int]) -> LoopState:
    """Return the state to start from: of the product plan, or of ``init``."""
    a, b = setting.marginals
    zero = Potentials(torch.zeros_like(a), torch.zeros_like(b))
    coupling = setting.gradient.start()
    if init is None:
        return LoopState(coupling, zero)
    plan = getattr(init, "lazy_plan", init)
    if isinstance(plan, TransportPlan):
        _check_plan_shape(plan.shape, shape)
        return LoopState(setting.gradient.update(plan, None, setting.generator), plan.potentials)
    matrix = check_linear_cost(plan, shape, name="init").to(a.device, torch.float64)
    return LoopState(setting.gradient.update(StoredPlan(matrix), None, setting.generator), zero)


def _check_plan_shape(got: tuple[int, int], expected: tuple[int, int]) -> None:
    if got != expected:
        raise InvalidInputError(f"`init` must be a plan of shape {expected}; got {got}.")


def entropy_and_linear(plan: TransportPlan, problem: Problem) -> tuple[float, float]:
    """Return KL(P | a x b) and <M, P>, block by block.

    log(P_ij / (a_i b_j)) is the exponent itself, so the divergence needs no logarithm.
    """
    f, g = (part.to(plan.dtype) for part in plan.potentials)
    a, b = plan.weights
    kl = linear = 0.0
    for rows in row_blocks(plan.cost):
        exponent = plan.cost.rows(rows).exponent(f[rows], g, plan.epsilon)
        block = exponent.exp() * a[rows, None].to(plan.dtype) * b.to(plan.dtype)
        kl += float((block * exponent).sum(dtype=torch.float64))
        if problem.linear is not None:
            linear += float((block * problem.linear[rows]).sum(dtype=torch.float64))
    return kl, linear
