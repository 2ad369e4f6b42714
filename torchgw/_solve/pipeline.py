"""A whole solve: choose how, run the loop, settle the marginals, evaluate the plan."""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from time import perf_counter
from typing import Any, NamedTuple

import torch

from torchgw._gradients.contract import CostNoise, Linearised, QuadraticValue
from torchgw._gradients.factored import FactoredGradient
from torchgw._plans.given import StoredPlan
from torchgw._plans.rounded import round_to_marginals
from torchgw._plans.sparse import SparsePlan, sparse_tensor
from torchgw._plans.transport import TransportPlan
from torchgw._problem.problem import Problem
from torchgw._search.batch import Searched
from torchgw._search.chains import Trial
from torchgw._search.matching import Isometry, find_isometry
from torchgw._search.optima import WHY_APART, WHY_OPEN, Search, compare_ends, ends_settle, led_by
from torchgw._search.subsample import Coarse, draw_subsample, extend
from torchgw._sinkhorn.annealing import Annealing
from torchgw._sinkhorn.choose import alone, choose_backend
from torchgw._sinkhorn.problem import DenseCost
from torchgw._solve.begin import PATIENT, PRODUCT, Guess, first_guess, searchable, starting_point
from torchgw._solve.checkpoint import Checkpoint
from torchgw._solve.evaluation import (
    Evaluation,
    evaluate,
    evaluate_relaxed,
    falls_further,
    judge,
    misses_a_copy,
)
from torchgw._solve.forecast import forecast
from torchgw._solve.inner import prepare, promised_error, solve_linear
from torchgw._solve.loop import iterate
from torchgw._solve.options import Options
from torchgw._solve.polish import Polished, polish
from torchgw._solve.precision import RESOLVED, Dtypes
from torchgw._solve.relaxed_search import search_relaxed
from torchgw._solve.resolution import Resolution, choose_resolution, solve_on_cells
from torchgw._solve.settle import leaves, settle
from torchgw._solve.state import LoopState, Recorder, Setting, Solved
from torchgw._solve.status import Status
from torchgw._solve.strategy import (
    COARSE_ENTRIES,
    Strategy,
    annealed,
    choose_strategy,
    target_epsilon,
)
from torchgw._typing import Marginals, Potentials

logger = logging.getLogger(__name__)

# Points per side of a subsample: these give the coupling to a few percent in a second. [L11]
_COARSE_POINTS = 1_500
# Size of a sampled cost over its standard error that anchors are added for; how many. [L114]
_SIGNAL_TO_NOISE = 10.0
_MOST_ANCHORS = 4096
# How many times the anchors of the iterations the last cost has, and how many at most. [L124]
_REFINING = 4
_REFINED_ANCHORS = 1024
# Change of the plan at which a mixed-precision solve goes over from float32 to float64. [L139]
_HANDOVER_TOLERANCE = 1e-3
# The same at which polishing takes over from proximal steps: hundreds more would sharpen the plan,
# and lead to the same vertex. [L141]
_POLISH_TOLERANCE = 3e-3
# Sinkhorn iterations in which plans that are compared meet their marginals, at most. [L951]
_COMPARED = 100
# Masses that are tried where a linear cost depends on them, and how much less they have to agree,
# over `tol`, where the cost is sampled. [L576]
_MOST_MASSES = 20
_ROUGHLY = 100
# Entries of a plan up to which a search is followed by a solve from a x b alone: the few points of
# such a problem have other optima with entropy than without. [L634]
# What is rounding of an objective, over the natural scale of the cost.
_SMALLEST, _NOTHING = 2**12, 1e-9
# What is said of a plan that is no optimum.
_WHY_NOT_A_COPY = (
    "Both spaces seem to have the same distances in another order, and this plan does not keep "
    "them: it is a local optimum above the best. Pass a larger `n_init`, search='thorough', or "
    "an `init` that you know."
)


class Asked(NamedTuple):
    """What is to be solved, and what a solve begins with."""

    problem: Problem
    options: Options
    init: Any  # as the user gave it
    generator: torch.Generator
    checkpoint: Checkpoint | None = None
    made: Sequence[Searched] = ()  # searches that decided on distances


class Ending(NamedTuple):
    """The plan of a solve, and what it is worth."""

    plan: TransportPlan | SparsePlan
    evaluation: Evaluation
    epsilon: float  # entropic regularisation that the plan has
    status: Status
    polished: Polished | None
    unpolished: TransportPlan | None  # the plan of the last cost, if ``plan`` is a polished one


class Outcome(NamedTuple):
    """Everything that a result is made from."""

    ending: Ending
    strategy: Strategy
    potentials: Potentials  # of the whole cost, float64; the plan's are those of its reduced cost
    backend: str
    n_anchors: int | None
    noise: CostNoise | None  # of a sampled cost
    search: Search | None  # what a multi-start found, if there was one
    recorder: Recorder
    known: Linearised  # the cost of the plan, by which new points are mapped
    resolution: Resolution | None  # of a problem that was solved on cells


def solve_problem(asked: Asked, recorder: Recorder) -> Outcome:
    """Solve; where a linear cost meets a mass that is part of the answer, once for each mass."""
    # The objective of a plan of mass t, over t squared, has the linear cost M / t: the plan for one
    # mass gives the next mass, and these are extrapolated until they agree.
    problem, options = asked.problem, asked.options
    rule = options.rule
    if rule is None or rule.fixed_mass or problem.linear is None or problem.alpha == 0:
        outcome = solve_searched(asked, recorder)
        if rule is None and asked.checkpoint is None and options.ranks is None:
            thorough = options.search == "thorough" and outcome.search and outcome.search.trials
            if thorough:
                # its chains crowd out some that the default follows to the end
                outcome = no_higher_than(outcome, asked, replace(options, search="auto"))
            if thorough or problem.source.n * problem.target.n <= _SMALLEST:
                outcome = no_higher_than(outcome, asked, replace(options, n_init=1))
        return outcome
    tried: list[tuple[float, float]] = []
    mass, asked = 1.0, asked._replace(checkpoint=None, made=())
    search: Search | None = None
    while True:
        options = replace(options, rule=replace(rule, held=mass))
        outcome = solve_searched(asked._replace(options=options), recorder)
        search = search or outcome.search
        found = outcome.ending.evaluation.mass
        tried.append((math.log(mass), math.log(found / mass)))
        # samples say no more
        settled = abs(tried[-1][1]) <= (1 if outcome.noise is None else _ROUGHLY) * options.tol
        if settled or len(tried) == _MOST_MASSES or not outcome.ending.status.converged:
            break
        mass, asked = math.exp(_next(tried)), asked._replace(init=outcome.ending.plan)
        options = replace(options, n_init=None)
    if not settled and outcome.ending.status.converged:
        outcome = outcome._replace(ending=outcome.ending._replace(status=Status.OUTER_LIMIT))
    # of the first mass; the others begin where it ended
    return outcome._replace(search=search)


def solve_searched(asked: Asked, recorder: Recorder) -> Outcome:
    """Solve; where few points say little, from another start too, and return what is lower."""
    clock = perf_counter()
    found = solve_once(asked, recorder)
    search, status = found.search, found.ending.status
    if search is None or not search.compare or status is Status.STOPPED:
        return found
    now, aside, options = perf_counter(), Recorder(), asked.options
    # what it would be if it were the only one
    asked.generator.manual_seed(asked.generator.initial_seed())
    label = search.alternatives[0].label if search.alternatives else "product"
    start: Any = PATIENT
    other_label = "product"
    if options.rule is not None:
        # the best match of all points, of which a relaxed plan leaves some out
        strict = asked._replace(options=replace(options, rule=None, polish=False))
        start, other_label = solve_searched(strict, Recorder()).ending.plan, "all points"
    begun = asked._replace(options=replace(options, n_init=None), init=start, made=())
    other = solve_once(begun, aside)
    recorder.time("multistart", now)
    ends = [
        (_told(label, found, now - clock), found),
        (_told(other_label, other, perf_counter() - now), other),
    ]
    ends.sort(key=lambda end: end[0].objective)
    trials, best = tuple(trial for trial, _ in ends), ends[0][1]
    if options.rule is None:
        plans = (torch.as_tensor(end.ending.plan.to_dense()).double() for _, end in ends)
        search = compare_ends(asked.problem, list(zip(trials, plans, strict=True)))
    else:
        search = search._replace(trials=trials, doubt="" if ends_settle(trials) else WHY_APART)
    if best.search and best.search.doubt:
        # what is said of the plan itself
        search = search._replace(doubt=best.search.doubt)
    aside.timings = recorder.timings
    return best._replace(search=search)


def _told(start: str, outcome: Outcome, seconds: float) -> Trial:
    """Report what a whole solve from a start has come to."""
    ending, alpha = outcome.ending, outcome.strategy.problem.alpha
    value, epsilon = ending.evaluation.value(alpha), ending.epsilon
    objective = ending.evaluation.objective(alpha, epsilon)
    return Trial(start, epsilon, objective, value, seconds, "refined")


def no_higher_than(searched: Outcome, asked: Asked, options: Options) -> Outcome:
    """Solve by a shorter search as well, if there was a search, and return what is lower."""
    search, recorder, problem = searched.search, searched.recorder, asked.problem
    if search is None or not search.alternatives or searched.ending.status is Status.STOPPED:
        return searched
    nothing = _NOTHING * searched.strategy.scale
    if problem.linear is None and searched.ending.evaluation.value(problem.alpha) <= nothing:
        # nothing is better than a match that keeps all distances
        return searched
    clock, aside = perf_counter(), Recorder()
    # what it would be if it were the only one
    asked.generator.manual_seed(asked.generator.initial_seed())
    other = solve_searched(asked._replace(options=options, init=None, made=()), aside)
    recorder.time("multistart", clock)
    before, now = (
        one.ending.evaluation.objective(problem.alpha, one.ending.epsilon)
        for one in (searched, other)
    )
    if not other.ending.status.converged or now >= before - nothing:
        return searched
    value = other.ending.evaluation.value(problem.alpha)
    found = other.search or Search((), math.nan, doubt=search.doubt)
    label = found.alternatives[0].label if found.alternatives else "product"
    plan = torch.as_tensor(other.ending.plan.to_dense())
    doubt = found.doubt
    if options.n_init != 1 and doubt != _WHY_NOT_A_COPY:
        # a longer search has ended elsewhere
        doubt = WHY_OPEN["thorough"].format(count=len(search.trials))
    # what is said of the plan itself
    search = led_by(search, problem, plan, value, label)._replace(doubt=doubt)
    aside.timings = recorder.timings
    return other._replace(search=search, recorder=aside)


def _next(tried: list[tuple[float, float]]) -> float:
    """Find where the change of a logarithm vanishes, by its last two values, not too far away."""
    here, change = tried[-1]
    step = change
    if len(tried) > 1:
        slope = (change - tried[-2][1]) / (here - tried[-2][0])
        step = -change / slope if slope < 0 else change
    return here + max(-1.0, min(1.0, step))


def solve_once(asked: Asked, recorder: Recorder) -> Outcome:
    """Choose how to solve, find a start, run the loop, settle the marginals, evaluate the plan."""
    problem, options, init, generator, checkpoint, made = asked
    clock, match = perf_counter(), None
    if checkpoint is None and may_be_copies(problem, init, options):
        match = find_isometry(problem, streamed=options.sharp)
        clock = recorder.time("copies", clock)
    if match is not None and options.sharp:
        return kept(problem, options, match, recorder)
    strategy = choose_strategy(problem, options)
    if options.ranks is not None:
        options.ranks.agree(*strategy.fingerprint())
    forecast(strategy)
    # in units of the mass of a partial plan
    scaled = strategy.problem
    sample = None
    saved = None if checkpoint is None else checkpoint.read(strategy, problem.source.device)
    if init is None and saved is None and match is None and can_subsample(scaled, strategy):
        sample = draw_subsample(scaled, _COARSE_POINTS, generator)
    search: Search | None
    again = strategy.gradient if checkpoint is None and options.ranks is None else None
    if saved is not None:
        guess, search = PRODUCT._replace(patient=saved.anneal.patient), None
    elif options.rule is not None and searchable(problem, init, options):
        guess, search = search_relaxed(problem, strategy, generator, again)
    else:
        guess, search = first_guess(
            scaled, sample, init, options, strategy.search_epsilon, match, made, again
        )
    if guess.patient and options.skip_tiles == "auto":
        strategy = annealed(scaled, strategy)
    clock = recorder.time("multistart", clock)
    setting, state = begin(strategy, sample, guess, generator, recorder)
    if saved is not None:
        setting, state = replace(setting, anneal=saved.anneal), saved.state
    if checkpoint is not None:
        recorder.checkpoint = partial(checkpoint.keep, setting)
    recorder.time("setup", clock)
    resolved = None
    tolerance = choose_resolution(strategy)
    if sample is not None and tolerance is not None:
        state, resolved = solve_on_cells(strategy, setting, state, tolerance)
    if resolved is None:
        setting, state = run(strategy, setting, state, guess)
        if checkpoint is not None and state.status is Status.STOPPED:
            checkpoint.keep(setting, state, now=True)
        plan, state = settle(setting, state, strategy.dtypes.settle)
        while (away := leaves(setting, state, plan)) is not None:
            plan, state = settle(setting, iterate(setting, away), strategy.dtypes.settle)
        ending = finish(strategy, setting, plan, state)
        if checkpoint is not None and state.status is not Status.STOPPED:
            checkpoint.done()
    else:
        plan = resolved.plan
        ending = Ending(
            plan.released(alone(setting.backend)), resolved.evaluation, plan.epsilon,
            resolved.status, None, None,
        )  # fmt: skip
    found, gradient = ending.evaluation, setting.gradient
    # a start that was given is what was asked for
    searched = (init is None or isinstance(init, Guess)) and options.rule is None
    if searched and misses_a_copy(setting.problem, gradient, found, ending.epsilon):
        search = (search or Search((), math.nan))._replace(doubt=_WHY_NOT_A_COPY)
    coupling = state.coupling
    return Outcome(
        ending=ending,
        strategy=strategy,
        potentials=Potentials(
            plan.potentials.f + gradient.row, plan.potentials.g + gradient.column
        ),
        backend=setting.backend.name,
        n_anchors=gradient.n_anchors,
        noise=gradient.noise(coupling),
        search=search,
        recorder=recorder,
        known=gradient.remember(coupling, setting.marginals),
        resolution=resolved and resolved.resolution,
    )


def may_be_copies(problem: Problem, init: Any, options: Options) -> bool:
    """Whether to look for a match that keeps all distances."""
    entropic = options.regularization == "entropic" or options.sharp
    free = options.rule is None and options.ranks is None and options.gradient != "sampled"
    return entropic and free and searchable(problem, init, options)


def kept(problem: Problem, options: Options, match: Isometry, recorder: Recorder) -> Outcome:
    """End with a match that keeps all distances, which is the best without entropy, as the plan."""
    # Potentials of zero are optimal for the whole cost at the match: nothing is stored or solved.
    (a, b), n = problem.marginals, problem.source.n
    means, squares = (torch.stack(part) for part in zip(*(s.T for s in match.moments), strict=True))
    weights = torch.stack([a, b])
    variances = (weights * squares).sum(1) - (weights * means).sum(1).square()
    spread = 4 * problem.alpha * float(variances.clamp_min(0).prod().sqrt())
    epsilon = target_epsilon(options, spread)
    dtypes = Dtypes(torch.float64, torch.float64, again=False)
    strategy = Strategy(
        problem, options, "dense", "float64", dtypes, n_anchors=0, spread=spread, epsilon=epsilon,
        mass=1.0, store=False, tiling=None,
    )  # fmt: skip
    entries = sparse_tensor(
        torch.stack([torch.arange(n, device=a.device), match.partners]), a, (n, n)
    )
    # of the reduced cost, which lacks terms of rows and columns alone
    potentials = Potentials(*(-2 * problem.alpha * part for part in squares))
    plan = SparsePlan(entries, potentials, problem.marginals, epsilon)
    masses = Marginals(*plan.masses)
    error = float((masses.b - b).abs().sum())
    kl = float(-(a @ b[match.partners].log()))
    evaluation = Evaluation(masses, error, QuadraticValue(match.value, 0.0), 0.0, kl)
    clock = perf_counter()
    # nothing is better, but few points tell whether something is nearly as good
    _, search = first_guess(problem, None, None, options, strategy.search_epsilon, match)
    recorder.time("multistart", clock)
    polished = Polished(steps=0, stationary=True, gap=0.0)
    sides = problem.source, problem.target
    return Outcome(
        ending=Ending(plan, evaluation, 0.0, Status.CONVERGED, polished, None),
        strategy=strategy,
        potentials=Potentials(*map(torch.zeros_like, problem.marginals)),
        backend=choose_backend(options.backend, problem.source.device, torch.float64).name,
        n_anchors=None,
        noise=None,
        search=search,
        recorder=recorder,
        known=Linearised("dense", sides, entries, problem.alpha, problem.loss),
        resolution=None,
    )


def begin(
    strategy: Strategy,
    sample: Coarse | None,
    guess: Guess,
    generator: torch.Generator,
    recorder: Recorder,
) -> tuple[Setting, LoopState]:
    """Make the first setting of the loop, and the state that a guess stands for there."""
    options, dtypes, epsilon = strategy.options, strategy.dtypes, strategy.epsilon
    handover = max(options.tol, _HANDOVER_TOLERANCE) if dtypes.again else options.tol
    sharp = math.inf
    if strategy.proximal_polished:
        handover, sharp = max(handover, _POLISH_TOLERANCE), strategy.search_epsilon
    start = max(epsilon, guess.epsilon * strategy.scale)
    anneal = Annealing(
        start, epsilon, proximal=strategy.proximal, patient=guess.patient, sharp=sharp
    )
    setting = strategy.setting(dtypes.loop, handover, anneal, generator, recorder)
    if sample is None:
        return setting, starting_point(setting, guess)
    state = start_coarse(setting, sample, guess)
    done = Annealing(epsilon, epsilon, proximal=strategy.proximal)
    return replace(setting, anneal=done), state


def run(
    strategy: Strategy, setting: Setting, state: LoopState, guess: Guess
) -> tuple[Setting, LoopState]:
    """Iterate in the dtype of the loop, then with more anchors or in that of the settling."""
    options, dtypes = strategy.options, strategy.dtypes
    rough = guess.epsilon > 0 and setting.recorder.checkpoint is None
    if rough and strategy.proximal_polished and strategy.problem.linear is None:
        setting, state = choose_path(setting, state)
    state = iterate(setting, state)
    if options.n_anchors is None and options.rule is None and not setting.gradient.exact:
        setting, state = refine_anchors(*grow_anchors(setting, state, guess))
    if dtypes.settle == dtypes.loop:
        return setting, state
    if not setting.gradient.exact:
        # the anchors are kept; only their last linear problem is solved in the other dtype
        return replace(setting, dtype=dtypes.settle), state
    setting = strategy.setting(
        dtypes.settle, options.tol, setting.anneal, setting.generator, setting.recorder
    )
    again = dtypes.again and not strategy.proximal_polished and state.status is not Status.FLAT
    return setting, iterate(setting, state) if again else state


def choose_path(setting: Setting, state: LoopState) -> tuple[Setting, LoopState]:
    """Begin proximal steps at a large epsilon and where an annealing ends; take what is lower.

    Which of them breaks the symmetry of a rough start better depends on the problem. Both are
    followed to one epsilon, where values of plans rounded to their marginals are compared. [L951]
    """
    gradient, sharp, tol, paths = setting.gradient, setting.anneal.sharp, setting.tol, []
    for floor in (math.inf, sharp):
        anneal = replace(setting.anneal, floor=floor)
        path = replace(setting, anneal=anneal, recorder=replace(setting.recorder, history=[]))
        steps = next(step for step in count() if anneal(step) <= sharp) + 1
        reached = iterate(path, state, most=steps)
        cost = gradient.linearise(reached.coupling).seen(reached.coupling.masses).dense()
        prepared = prepare(path, cost, anneal(reached.annealed))
        inner = solve_linear(path, prepared, reached.start, max_iter=_COMPARED, tol=tol)
        matrix = TransportPlan.of(prepared, inner.potentials).to_dense().double()
        plan = round_to_marginals(matrix, *setting.marginals)
        there = gradient.update(StoredPlan(plan), None, setting.generator)
        value = gradient.pairing(gradient.linearise(there).seen(there.masses), there, there)
        paths.append((float(value), path, reached))
        if reached.status is Status.STOPPED:
            break
    _, path, reached = min(paths, key=lambda each: each[0])
    setting.recorder.history += path.recorder.history
    return replace(path, recorder=setting.recorder), reached


def finish(strategy: Strategy, setting: Setting, plan: TransportPlan, state: LoopState) -> Ending:
    """Polish a settled plan if asked to, compute its numbers, and say what status it deserves."""
    clock, recorder, status = perf_counter(), setting.recorder, state.status
    epsilon, polished, unpolished = plan.epsilon, None, None
    solved = state.solved
    if strategy.options.polish:
        unpolished, solved = plan, None
        plan, polished = polish(setting.gradient, plan, setting.rule, setting.generator)
        epsilon = 0.0
        if status is not Status.STOPPED:
            status = Status.CONVERGED if polished.stationary else Status.POLISH_LIMIT
        clock = recorder.time("polish", clock)
    plan, evaluation = appraise(setting, plan, epsilon, solved)
    promised = promised_error(setting)
    # where all plans cost the same, rounding has nothing to decide, and its size is not known
    constant = strategy.constant
    unresolved = polished is None and not constant and setting.rounding(epsilon) > RESOLVED
    missed = status.converged and evaluation.marginal_error > promised
    if (unresolved or missed or constant) and plan.dtype == torch.float32:
        # rounding shifts each sum over the plan in its own way: values would not be those of a plan
        if status.converged and (unresolved or missed):
            status = Status.PRECISION_LIMIT
        setting = strategy.in_float64(setting)
        cost = plan.cost.to(torch.float64)
        plan = TransportPlan(
            cost, plan.potentials, plan.weights, epsilon, setting.backend, plan.masses
        )
        plan, evaluation = appraise(setting, plan, epsilon)
    if unresolved and (status.converged or status is Status.INNER_LIMIT):
        status = Status.PRECISION_LIMIT
    # what the iteration believes is checked against the plan itself
    status = judge(
        status, evaluation, setting.problem, setting.gradient, promised, constant=constant
    )
    sampled = status is Status.STATIONARY and not constant
    if sampled and falls_further(setting, plan, evaluation, state.coupling, strategy.mass):
        status = Status.NOISE_LIMIT
    recorder.time("evaluation", clock)
    # a result is as small as its factors
    backend = alone(setting.backend)
    plan, unpolished = plan.released(backend), unpolished and unpolished.released(backend)
    return Ending(plan, evaluation, epsilon * strategy.mass, status, polished, unpolished)


def appraise(
    setting: Setting, plan: TransportPlan, epsilon: float, solved: Solved | None = None
) -> tuple[TransportPlan, Evaluation]:
    """Compute the numbers of a plan, which gets its best mass where that is part of the answer."""
    if setting.rule is not None:
        return evaluate_relaxed(setting, plan, setting.rule)
    return plan, evaluate(setting, plan, epsilon, solved)


def grow_anchors(setting: Setting, state: LoopState, guess: Guess) -> tuple[Setting, LoopState]:
    """Solve again with more anchors until the cost stands out of its noise, or there are enough."""
    while state.status is not Status.STOPPED:
        noise, count = setting.gradient.noise(state.coupling), setting.gradient.n_anchors
        if noise is None or count is None:
            break
        # a cost that vanishes, such as that of a single point, has nothing to stand out of
        ratio = noise.standard_error / noise.size if noise.size > 0 else 0.0
        wanted = count * min((_SIGNAL_TO_NOISE * ratio) ** 2, _MOST_ANCHORS)
        left = setting.options.max_iter - state.done
        if wanted <= count or count >= _MOST_ANCHORS or left <= 0:
            break
        grown = min(_MOST_ANCHORS, max(2 * count, math.ceil(min(wanted, _MOST_ANCHORS))))
        logger.info("the sampled cost is drowned in noise: %d anchors in place of %d", grown, count)
        setting = replace(setting, gradient=setting.gradient.with_anchors(grown))
        state = iterate(setting, starting_point(setting, guess)._replace(done=state.done))
    return setting, state


def refine_anchors(setting: Setting, state: LoopState) -> tuple[Setting, LoopState]:
    """Make one more iteration, with more anchors of its plan: the last cost decides on the noise.

    Many iterations with few columns and one with many take fewer of them than many with many.
    """
    used = setting.gradient.n_anchors or 0
    count = min(_REFINING * used, _REFINED_ANCHORS)
    spent = state.status is Status.STOPPED or state.done >= setting.options.max_iter
    if count <= used or spent or setting.anneal.proximal:
        return setting, state
    setting = replace(setting, gradient=setting.gradient.with_anchors(count))
    refined = iterate(setting, state, most=1)
    status = refined.status if refined.status is Status.STOPPED else state.status
    return setting, refined._replace(status=status)


def can_subsample(problem: Problem, strategy: Strategy) -> bool:
    """Whether a subsample is worth solving first, and can be."""
    crossed = problem.crossed()
    if strategy.gradient != "factored" or strategy.options.rule is not None:
        return False
    if isinstance(problem.linear, DenseCost) or crossed is None:
        return False
    if any(side.factors() is None for side in crossed):
        return False
    return crossed[0].n * crossed[1].n > COARSE_ENTRIES


def start_coarse(setting: Setting, sample: Coarse, guess: Guess) -> LoopState:
    """Solve the coarse problem; go on from its coupling, its potentials extended to all points."""
    sample = sample.to(setting.problem.dtype)
    small = replace(
        setting,
        # too small to be shared
        backend=alone(setting.backend),
        gradient=FactoredGradient(sample.problem),
        problem=sample.problem,
        anneal=replace(setting.anneal, proximal=False),
        store=True,
        tol=max(setting.tol, _HANDOVER_TOLERANCE),
    )
    state = iterate(small, starting_point(small, guess))
    fine, epsilon = setting.gradient.in_factors(), setting.anneal.target
    assert state.potentials is not None
    assert fine is not None
    whole, weights = fine.factored(state.coupling), setting.gradient.marginals
    potentials = extend(sample, whole, weights, state.potentials, epsilon, small.backend)
    return LoopState(
        state.coupling, state.coupling, potentials, potentials, state.status, done=state.done
    )
