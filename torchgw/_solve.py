"""A whole solve: choose how, run the loop, settle the marginals, evaluate the plan."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

import torch

from torchgw._cost import DenseCost
from torchgw._dispatch import (
    choose_backend,
    choose_gradient,
    choose_precision,
    choose_tiling,
    store_cost,
    why_no_tiles,
)
from torchgw._evaluation import Evaluation, evaluate, evaluate_relaxed, judge
from torchgw._features import spread as linear_spread
from torchgw._gradient import (
    Coupling,
    FactoredGradient,
    Problem,
)
from torchgw._multiscale import Subsample, draw_subsample, extend
from torchgw._multistart import Search
from torchgw._options import Options
from torchgw._plan import TransportPlan
from torchgw._polish import check_polish, polish
from torchgw._relaxed import RelaxedCoupling, RelaxedGradient
from torchgw._sampled_gradient import CostNoise, SampledGradient, distance_spread, make_gradient
from torchgw._schedule import Annealing, Status
from torchgw._solver import (
    LoopState,
    Recorder,
    Setting,
    inner_tolerance,
    iterate,
    settle,
)
from torchgw._starts import Guess, first_guess
from torchgw._tiling import TileReport
from torchgw._typing import Potentials

__all__ = ["Outcome", "solve_problem"]

logger = logging.getLogger(__name__)

# epsilon="auto" as a share of natural_scale().
_AUTO_EPSILON = {"entropic": 0.0025, "proximal": 0.1}
# Entries (n * m) above which a factored solve begins on a subsample, and its points per side: as
# many as give the coupling to a few percent within a second.
_COARSE_ENTRIES = 9_000_000
_COARSE_POINTS = 1_500
# Size of a sampled cost over its standard error below which anchors are added, up to so many.
_SIGNAL_TO_NOISE = 10.0
_MOST_ANCHORS = 4096
# Change of the plan at which a mixed-precision solve goes over from float32 to float64.
_HANDOVER_TOLERANCE = 1e-3
# Relative size of the noise on the first coupling. The product plan of two spaces whose points all
# look alike is a saddle point that exact arithmetic would never leave.
_START_NOISE = 1e-6


class Outcome(NamedTuple):
    """Everything that a result is made from."""

    plan: TransportPlan
    evaluation: Evaluation
    potentials: Potentials  # of the whole cost, float64; the plan's are those of its reduced cost
    epsilon: float  # entropic regularisation that the plan has
    polish_steps: int | None
    polish_gap: float | None
    status: Status
    gradient: str
    backend: str
    precision: str
    n_anchors: int | None
    noise: CostNoise | None  # of a sampled cost
    search: Search | None  # what a multi-start found, if there was one
    tiles: TileReport | None
    recorder: Recorder
    options: Options
    linearised: Problem  # the problem and the coupling that the plan's cost was linearised at
    coupling: Coupling
    unpolished: TransportPlan | None  # the plan of that cost, if ``plan`` is a polished one


def solve_problem(
    problem: Problem, options: Options, init: Any, generator: torch.Generator, recorder: Recorder
) -> Outcome:
    """Choose how to solve, run the loop, settle the marginals and evaluate the plan."""
    clock = perf_counter()
    n, m, device = problem.source.n, problem.target.n, problem.source.device
    name = choose_gradient(options.gradient, problem.source, problem.target)
    if options.polish:
        check_polish(problem.marginals, exact=name != "sampled")
    relaxation = options.relaxation
    unit = (relaxation and relaxation.mass) or 1.0
    if unit < 1 and problem.linear is not None:
        # the objective over the square of the mass, as a function of the normalised plan
        problem = replace(problem, linear=problem.linear.scaled(torch.tensor(1 / unit)))
    precision, steps = choose_precision(options.precision, device, n * m)
    n_anchors = options.n_anchors or min(1024, max(256, 8 * math.isqrt(max(n, m))))
    spread = natural_scale(problem)
    # all points coincide on one side: every plan costs the same and any epsilon will do
    scale = spread or 1.0
    share = _AUTO_EPSILON[options.regularization]
    target = share * scale if options.epsilon == "auto" else float(options.epsilon) / unit
    proximal = options.regularization == "proximal"
    sample = None
    if init is None and relaxation is None and can_subsample(problem, name):
        sample = draw_subsample(problem, _COARSE_POINTS, generator)
    # proximal steps end at sharp plans, whatever their epsilon
    resolved = _AUTO_EPSILON["entropic"] * scale if proximal else target
    guess, search = first_guess(problem, sample, init, options, resolved)
    clock = recorder.time("multistart", clock)
    start = max(target, guess.epsilon * scale)

    rank = cost_rank(name, problem, n_anchors)
    matrix = isinstance(problem.linear, DenseCost)
    reason = why_no_tiles(name, options.backend, linear=matrix, store=False)
    tiled = reason is None and options.skip_tiles is not False
    store = store_cost(options.storage, device, steps, (n, m), rank, tiled=tiled)
    reason = why_no_tiles(name, options.backend, linear=matrix, store=store)
    tiling = choose_tiling(options.skip_tiles, (n, m), device, reason)

    def setting_in(dtype: torch.dtype, tol: float, anneal: Annealing) -> Setting:
        base = make_gradient(name, problem.to(dtype), n_anchors, options.momentum)
        gradient = base if relaxation is None else RelaxedGradient(base)
        return Setting(
            gradient=gradient,
            marginals=problem.marginals,
            anneal=anneal,
            options=options,
            backend=choose_backend(options.backend, device, dtype, tiling),
            generator=generator,
            recorder=recorder,
            store=store,
            tol=tol,
            scale=scale,
            dtype=dtype,
            relaxation=relaxation,
        )

    handover = max(options.tol, _HANDOVER_TOLERANCE) if steps.again else options.tol
    setting = setting_in(steps.loop, handover, Annealing(start, target, proximal=proximal))
    if sample is not None:
        state = start_coarse(setting, sample, guess)
        done = Annealing(target, target, proximal=proximal, first=len(recorder.history))
        setting = replace(setting, anneal=done)
    else:
        state = starting_point(setting, guess)
    recorder.time("setup", clock)
    state = iterate(setting, state)
    if isinstance(setting.gradient, SampledGradient) and options.n_anchors is None:
        setting, state = grow_anchors(setting, state, guess)
    if steps.settle != steps.loop:
        if setting.gradient.exact:
            setting = setting_in(steps.settle, options.tol, setting.anneal)
        else:
            # the anchors are kept; only their last linear problem is solved in the other dtype
            setting = replace(setting, dtype=steps.settle)
        if setting.gradient.exact and steps.again:
            state = iterate(setting, state)
    plan, status = settle(setting, state, steps.settle)
    gradient = setting.gradient
    potentials = Potentials(plan.potentials.f + gradient.row, plan.potentials.g + gradient.column)
    epsilon, polished, unpolished = plan.epsilon, None, None
    if options.polish:
        clock, unpolished = perf_counter(), plan
        polished = polish(gradient, plan, generator)
        plan, epsilon = polished.plan, 0.0
        if status is not Status.STOPPED:
            status = Status.CONVERGED if polished.stationary else Status.POLISH_LIMIT
        recorder.time("polish", clock)

    clock = perf_counter()
    if isinstance(gradient, RelaxedGradient) and relaxation is not None:
        plan, evaluation = evaluate_relaxed(gradient, plan, relaxation, generator)
    else:
        evaluation = evaluate(gradient, plan, epsilon, generator)
    # what the iteration believes is checked against the plan itself
    tolerance = inner_tolerance(setting, epsilon or target)
    constant = spread == 0 or min(n, m) == 1
    status = judge(status, evaluation, gradient, tolerance, constant=constant)
    recorder.time("evaluation", clock)
    base, anchors = gradient, state.coupling
    if isinstance(gradient, RelaxedGradient):
        base, anchors = gradient.base, state.coupling.base
    sampled = base if isinstance(base, SampledGradient) else None
    return Outcome(
        plan=plan,
        evaluation=evaluation,
        potentials=potentials,
        epsilon=epsilon * unit,
        polish_steps=polished.steps if polished else None,
        polish_gap=polished.gap if polished else None,
        status=status,
        gradient=name,
        backend=setting.backend.name,
        precision=precision,
        n_anchors=sampled.n_anchors if sampled else None,
        noise=sampled.noise(anchors) if sampled else None,
        search=search,
        tiles=None if tiling is None else tiling.report(),
        recorder=recorder,
        options=options,
        linearised=gradient.problem,
        coupling=state.coupling,
        unpolished=unpolished,
    )


def grow_anchors(setting: Setting, state: LoopState, guess: Guess) -> tuple[Setting, LoopState]:
    """Solve again with more anchors until the cost stands out of its noise, or there are enough."""
    while state.status is not Status.STOPPED:
        assert isinstance(setting.gradient, SampledGradient)
        noise, count = setting.gradient.noise(state.coupling), setting.gradient.n_anchors
        # a cost that vanishes, such as that of a single point, has nothing to stand out of
        ratio = noise.standard_error / noise.size if noise.size > 0 else 0.0
        wanted = count * min((_SIGNAL_TO_NOISE * ratio) ** 2, _MOST_ANCHORS)
        left = setting.options.max_iter - len(setting.recorder.history)
        if wanted <= count or count >= _MOST_ANCHORS or left <= 0:
            break
        grown = min(_MOST_ANCHORS, max(2 * count, math.ceil(min(wanted, _MOST_ANCHORS))))
        logger.info("the sampled cost is drowned in noise: %d anchors in place of %d", grown, count)
        anneal = replace(setting.anneal, first=len(setting.recorder.history))
        gradient = setting.gradient.with_anchors(grown)
        setting = replace(setting, gradient=gradient, anneal=anneal)
        state = iterate(setting, starting_point(setting, guess))
    return setting, state


def can_subsample(problem: Problem, gradient: str) -> bool:
    """Whether a subsample is worth solving first, and can be."""
    sides = (problem.source, problem.target)
    both = gradient == "factored" and all(side.factors() is not None for side in sides)
    return (
        both
        and not isinstance(problem.linear, DenseCost)
        and sides[0].n * sides[1].n > _COARSE_ENTRIES
    )


def start_coarse(setting: Setting, sample: Subsample, guess: Guess) -> LoopState:
    """Solve the subsample; return its coupling, and its potentials extended to all points."""
    gradient = setting.gradient
    assert isinstance(gradient, FactoredGradient)
    sample = sample.to(gradient.problem.dtype)
    coarse = FactoredGradient(sample.problem)
    small = replace(
        setting,
        gradient=coarse,
        marginals=sample.problem.marginals,
        anneal=replace(setting.anneal, proximal=False),
        store=True,
        tol=max(setting.tol, _HANDOVER_TOLERANCE),
    )
    state = iterate(small, starting_point(small, guess))
    assert state.potentials is not None
    potentials = extend(
        sample, gradient, state.coupling, state.potentials, setting.anneal.target, setting.backend
    )  # fmt: skip
    return LoopState(state.coupling, state.coupling, potentials, potentials, state.status)


def cost_rank(gradient: str, problem: Problem, n_anchors: int) -> int:
    """Return the columns of the factors of a linearised cost, zero if it is a matrix anyway."""
    if gradient == "dense" or isinstance(problem.linear, DenseCost):
        return 0
    linear = 0 if problem.linear is None else problem.linear.rank
    if gradient == "sampled":
        return n_anchors + linear
    factors = (problem.source.factors(), problem.target.factors())
    return min(side.signs.numel() for side in factors if side is not None) + linear


def natural_scale(problem: Problem) -> float:
    """Return the spread of the cost at a concentrated plan, zero where every plan costs the same.

    4 alpha std(DX) std(DY) + (1 - alpha) std(M). The spread at a x b itself would not do: it
    vanishes on homogeneous spaces, where all points have the same mean distance.
    """
    a, b = problem.marginals
    source = distance_spread(problem.source, a)
    scale = 4 * problem.alpha * source * distance_spread(problem.target, b)
    if problem.linear is not None:
        scale += (1 - problem.alpha) * linear_spread(problem.linear)
    return scale


def starting_point(setting: Setting, guess: Guess) -> LoopState:
    """Return the state that a guess stands for."""
    gradient = setting.gradient
    if guess.plan is None:
        coupling = _perturb(gradient.start())
    else:
        coupling = gradient.update(guess.plan, None, setting.generator)
    # potentials of strict marginals are of little use to relaxed ones
    potentials = guess.potentials if setting.relaxation is None else None
    return LoopState(coupling, coupling, potentials, potentials)


def _perturb(coupling: Coupling) -> Coupling:
    """Add a little noise to a coupling that is a tensor; sampled ones have their own.

    The noise is always the same, so that exact solves do not depend on a seed.
    """
    if isinstance(coupling, RelaxedCoupling):
        return coupling._replace(base=_perturb(coupling.base))
    if not isinstance(coupling, torch.Tensor):
        return coupling
    generator = torch.Generator(device=coupling.device).manual_seed(0)
    noise = torch.randn(
        coupling.shape, dtype=coupling.dtype, device=coupling.device, generator=generator
    )
    return coupling * (1 + _START_NOISE * noise)
