"""One solve, a stage after the other: what it is asked, its end, and all that it comes to."""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgw._gradients.contract import CostNoise, Coupling, Linearised, QuadraticValue
from torchgw._gradients.factored import FactoredGradient
from torchgw._plans.contract import Plan
from torchgw._plans.given import SparsePlan, StoredPlan
from torchgw._plans.paired import PairedPlan
from torchgw._plans.transport import TransportPlan, round_to_marginals
from torchgw._problem.limits import limits_of
from torchgw._problem.problem import Problem, weigh_alike
from torchgw._search.given_graphs import GivenMatch, match_given
from torchgw._search.optima import Searched
from torchgw._sinkhorn.annealing import ANNEALING_TOLERANCE, MET, Annealing
from torchgw._sinkhorn.choose import alone, choose_backend
from torchgw._solve.begin import (
    ROUGH_TOLERANCE,
    best_found,
    first_guess,
    from_alternative,
    named_start,
    read_init,
    search_relaxed,
    searchable,
)
from torchgw._solve.evaluation import (
    Evaluation,
    Resolution,
    evaluate,
    evaluate_relaxed,
    falls_further,
    judge,
    leaves_saddle,
    misses_a_copy,
    settle,
)
from torchgw._solve.loop import LINEAR, PRODUCT, Guess, iterate, starting_point
from torchgw._solve.polish import Polished, plan_of, polish
from torchgw._solve.resolution import (
    Resolved,
    approach,
    choose_resolution,
    in_dtype,
    solve_on_cells,
    to_all_points,
)
from torchgw._solve.route import KEEPS_ALL, Route, matches_given
from torchgw._solve.state import (
    RESOLVED,
    Checkpoint,
    LoopState,
    Options,
    Recorder,
    Saved,
    Setting,
    Solved,
    Status,
)
from torchgw._solve.step import prepare, promised_error, solve_linear
from torchgw._solve.strategy import MOST_ANCHORS, Strategy, choose_strategy, strategy_of_copies
from torchgw._starts.alternatives import WHY_TIME, Search
from torchgw._starts.isometry import Isometry, find_isometry
from torchgw._starts.subsample import Coarse, draw_subsample
from torchgw._tensors.deadline import is_over, keep_least, leaves
from torchgw._tensors.operations import sparse_tensor
from torchgw._typing import Marginals, Potentials
from torchgw.distances.geodesics import Geodesics


class Asked(NamedTuple):
    """What is to be solved, and what a solve begins with."""

    problem: Problem
    options: Options
    init: Any  # as the user gave it
    generator: torch.Generator
    graphs: tuple[Geodesics | None, Geodesics | None]  # given, whose paths are compared
    scales: tuple[float, float] = (1.0, 1.0)  # that paths in them are multiplied by
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
    matched: GivenMatch | None = None  # by the edges of two given graphs, if it is not certain

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
    guess: Guess = PRODUCT,
) -> Ending:
    """Polish a settled plan, whose coupling may be known, if asked to, and compute its numbers."""
    # Also say what status it deserves. It is polished to no higher than what the solve had `begun`
    # at, if that was a plan of all points; and where it was stopped it is no higher than that, or
    # than such a plan of few points.
    clock, recorder, status = perf_counter(), setting.recorder, state.status
    epsilon, polished, unpolished, begun = plan.epsilon, None, None, guess.plan
    solved = state.solved
    if strategy.options.polish and is_over():
        # even the first step solves a linear problem without entropy, which has no early end
        status = Status.STOPPED
    elif strategy.options.polish:
        unpolished, solved, coupling = plan, None, None
        sharp = begun if guess.epsilon == 0 else None
        plan, polished = polish(
            setting.gradient, plan, setting.rule, setting.generator, sharp, setting.problem.support
        )
        epsilon = 0.0
        if not polished.stationary and is_over():
            status = Status.STOPPED
        if status is not Status.STOPPED:
            status = Status.CONVERGED if polished.stationary else Status.POLISH_LIMIT
        clock = recorder.time("polish", clock)
    stopped = status is Status.STOPPED and polished is None and _may_round(setting, plan.shape)
    settled = plan
    if stopped and _misses(setting, plan):
        plan, solved, coupling = _rounded(plan.to_dense().double(), plan.weights), None, None
        unpolished = settled
    plan, evaluation = _appraise(setting, plan, epsilon, solved, coupling)
    whole = _of_all_points(setting.problem, begun) if stopped and begun is not None else None
    if whole is not None:
        alpha, target = setting.problem.alpha, setting.anneal.target
        other = _rounded(whole, plan.weights)
        numbers = evaluate(setting, other, target)
        if numbers.objective(alpha, target) < evaluation.objective(alpha, target):
            unpolished, plan, evaluation, epsilon = settled, other, numbers, target
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


def _may_round(setting: Setting, shape: tuple[int, int]) -> bool:
    """Whether a plan whose solve was cut is rounded to its marginals: they are strict."""
    # What rounding spreads would leave a support, relaxed marginals are none to be met, and
    # derivatives are those of potentials. Larger plans would take longer than there is time.
    problem, rule, options = setting.problem, setting.rule, setting.options
    free = problem.support is None and problem.restriction is None
    strict = rule is None and free and options.differentiable is None
    return strict and shape[0] * shape[1] <= limits_of(problem.source.device).subsample


def _misses(setting: Setting, plan: TransportPlan) -> bool:
    """Whether a plan misses its marginals by more than a solve in float64 would."""
    missed = sum(
        float((mass - weight).abs().sum())
        for mass, weight in zip(plan.marginals(), plan.weights, strict=True)
    )
    return missed > promised_error(replace(setting, dtype=torch.float64))


def _of_all_points(problem: Problem, begun: Plan) -> Tensor | None:
    """Make a plan of all points, (n, m), of one that may be of few: others go with the nearest."""
    if begun.shape != problem.shape:
        return None
    table: Tensor = begun.to_dense().double()
    for axis, (side, weight) in enumerate(zip(problem.sides, problem.marginals, strict=True)):
        known = (table.sum(1 - axis) > 0).nonzero()[:, 0]
        if len(known) == len(weight):
            continue
        if not side.cheap_columns or not len(known):
            return None
        nearest = side.columns(known).argmin(1)
        masses = weight.new_zeros(len(known)).index_add_(0, nearest, weight)
        share = weight / masses[nearest].clamp_min(torch.finfo(weight.dtype).tiny)
        table = table.index_select(axis, known[nearest])
        table = table * (share[:, None] if axis == 0 else share)
    return table


def _rounded(plan: Tensor, weights: Marginals) -> TransportPlan:
    """Round a plan (n, m), float64, to its marginals."""
    return plan_of(round_to_marginals(plan, *weights), weights)


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


# The warning about a plan that costs more than a match of copies.
WHY_NOT_A_COPY = (
    "Both spaces seem to have the same distances in another order, and this plan does not keep "
    "them: it is a local optimum above the best. Pass a larger `n_init`, search='thorough', or "
    "an `init` that you know."
)


def find_copy(asked: Asked, recorder: Recorder) -> Isometry | None:
    """Look for a match that keeps all distances, where it would be the best start or plan."""
    problem, options = asked.problem, asked.options
    entropic = options.regularization == "entropic" or options.sharp
    free = options.rule is None and options.ranks is None and options.gradient != "sampled"
    whole = asked.checkpoint is None and searchable(problem, asked.init, options)
    if not (entropic and free and whole):
        return None
    with recorder.timed("copies"):
        return find_isometry(problem, streamed=options.sharp)


def end_at_copy(asked: Asked, match: Isometry, recorder: Recorder) -> Outcome:
    """End with a match that keeps all distances, which is the best without entropy, as the plan."""
    # Potentials of zero are optimal for the whole cost at the match: nothing is stored or solved.
    problem, options, n = asked.problem, asked.options, asked.problem.source.n
    a, b = problem.marginals
    means, squares = (torch.stack(part) for part in zip(*(s.T for s in match.moments), strict=True))
    weights = torch.stack([a, b])
    variances = (weights * squares).sum(1) - (weights * means).sum(1).square()
    spread = 4 * problem.alpha * float(variances.clamp_min(0).prod().sqrt())
    strategy = strategy_of_copies(problem, options, spread)
    entries = sparse_tensor(
        torch.stack([torch.arange(n, device=a.device), match.partners]), a, (n, n)
    )
    # of the reduced cost, which lacks terms of rows and columns alone
    potentials = Potentials(*(-2 * problem.alpha * part for part in squares))
    plan = SparsePlan(entries, potentials, problem.marginals, strategy.epsilon)
    masses = Marginals(*plan.masses)
    error = float((masses.b - b).abs().sum())
    kl = float(-(a @ b[match.partners].log()))
    evaluation = Evaluation(masses, error, QuadraticValue(match.value, 0.0), 0.0, kl)
    # nothing is better, but few points tell whether something is nearly as good
    with recorder.timed("multistart"):
        _, search = first_guess(problem, None, options, strategy.search_epsilon, match)
    polished = Polished(steps=0, stationary=True, gap=0.0)
    sides = problem.sides
    return Outcome(
        ending=Ending(plan, evaluation, 0.0, Status.CONVERGED, polished, None), strategy=strategy,
        potentials=Potentials(*map(torch.zeros_like, problem.marginals)),
        backend=choose_backend(options.backend, problem.source.device, torch.float64).name,
        n_anchors=None, noise=None, search=search, recorder=recorder,
        known=Linearised("dense", sides, entries, problem.alpha, problem.loss), resolution=None,
        route=strategy.route,
    )  # fmt: skip


def match_by_edges(asked: Asked, recorder: Recorder) -> GivenMatch | None:
    """Match two graphs that were given by their edges, where nothing asks for another plan."""
    problem, graphs = asked.problem, asked.graphs
    if graphs[0] is None or graphs[1] is None or asked.checkpoint is not None:
        return None
    alike = all(weigh_alike(Marginals(each, each)) for each in problem.marginals)
    if not (alike and searchable(problem, asked.init, asked.options)):
        return None
    strategy = strategy_of(asked)
    if not matches_given(strategy.facts, strategy.options, limits_of(problem.source.device)):
        return None
    with recorder.timed("multistart"):
        return match_given(problem, (graphs[0], graphs[1]), asked.scales)


def end_at_match(asked: Asked, match: GivenMatch, recorder: Recorder, doubt: str = "") -> Outcome:
    """End with a match of the edges of two graphs as the plan."""
    problem, strategy, plan = asked.problem, strategy_of(asked), match.plan
    zero = Potentials(*map(torch.zeros_like, problem.marginals))
    entries = sparse_tensor(torch.stack([*plan.pairs]), plan.mass, plan.shape)
    sparse = SparsePlan(entries, zero, problem.marginals, strategy.epsilon)
    error = float((sparse.masses.b - problem.marginals.b).abs().sum())
    # of one pair for each node
    kl = math.log(problem.source.n)
    return Outcome(
        ending=Ending(
            sparse, Evaluation(Marginals(*sparse.masses), error, match.value, 0.0, kl), 0.0,
            Status.CONVERGED, None, None,
        ),
        strategy=strategy, potentials=zero,
        backend=choose_backend(asked.options.backend, problem.source.device, torch.float64).name,
        n_anchors=None, noise=None, search=Search((), math.nan, doubt=doubt), recorder=recorder,
        known=Linearised("dense", match.sides, entries, problem.alpha, problem.loss),
        resolution=None, route=strategy.route.at_match("a match of the edges of both graphs",
            f"it keeps {match.kept:.1%} of those of the graph that has fewer"),
    )  # fmt: skip


# Points per side of a subsample: with so many the coupling is known to a few percent in a second.
# [L11]
_COARSE_POINTS = 1_500


class Start(NamedTuple):
    """Where a solve begins, and what was found on the way there."""

    guess: Guess
    search: Search | None = None  # what a multi-start found
    sample: Coarse | None = None  # fewer points, which are solved first
    saved: Saved | None = None  # where an earlier solve stood


def find_start(asked: Asked, strategy: Strategy, match: Isometry | None) -> Start:
    """Find where to begin: at a checkpoint, at what was passed, or by a search."""
    # the problem of the strategy has its linear cost divided by the mass of a partial plan
    problem, scaled = (each.priced(strategy.scale) for each in (asked.problem, strategy.problem))
    options = asked.options
    if asked.checkpoint is not None:
        numbers = [*strategy.fingerprint()[1][:4], float(len(strategy.gradient))]
        saved = asked.checkpoint.read(numbers, problem.source.device)
        if saved is not None:
            return Start(PRODUCT._replace(patient=saved.anneal.patient), saved=saved)
    alone = asked.checkpoint is None and options.ranks is None
    again = strategy.gradient if alone else None
    sample = None
    if asked.init is None and match is None and strategy.can_subsample:
        sample = draw_subsample(scaled, _COARSE_POINTS, asked.generator)
    if not searchable(problem, asked.init, options):
        mass = options.rule.fixed_mass if options.rule else 1.0
        return Start(read_init(asked.init, problem.marginals, mass), None, sample)
    if asked.found is not None:
        best = asked.found.alternatives[0]
        return Start(from_alternative(best, problem.source.device), asked.found, sample)
    if options.rule is not None:
        guess, others = search_relaxed(problem, strategy, asked.generator, again)
        return Start(guess, others, sample)
    guess, others = first_guess(
        scaled, sample, options, strategy.search_epsilon, match, asked.made, again
    )
    least, _ = strategy.route.seconds or (0.0, 0.0)
    if others.compare and others.alternatives and not leaves(least):
        # what is patient begins far from any optimum, and would end there
        guess = best_found(scaled, others)
        others = others._replace(compare=False, doubt=WHY_TIME)
    return Start(guess, others, sample)


def begin(
    strategy: Strategy, start: Start, generator: torch.Generator, recorder: Recorder
) -> tuple[Setting, LoopState]:
    """Make the first setting of the loop, and its state at the start."""
    dtypes, epsilon, guess = strategy.route.dtypes, strategy.epsilon, start.guess
    handover = strategy.options.tol
    if dtypes.again:
        handover = max(handover, ROUGH_TOLERANCE)
    sharp = math.inf
    goes_on = guess.sharp and strategy.proximal_polished and not strategy.facts.assignment
    if strategy.proximal_polished:
        enough = ANNEALING_TOLERANCE if goes_on else MET
        handover, sharp = max(handover, enough), strategy.search_epsilon
    anneal = Annealing(
        max(epsilon, guess.epsilon * strategy.scale), epsilon, proximal=strategy.proximal,
        patient=guess.patient, sharp=sharp, shortened=guess.ended, held=guess.plan is not None,
    )  # fmt: skip
    if goes_on:
        # an epsilon larger than that of the plan would blur it: steps go on as after annealing.
        # Plans of equal weights are sharp again soon, and end a little lower. [L1236]
        anneal = replace(anneal, start=sharp, floor=sharp)
    elif guess.sharp:
        # its potentials are of a far smaller epsilon
        guess = guess._replace(potentials=None)
    setting = strategy.setting(dtypes.loop, handover, anneal, generator, recorder)
    if start.saved is not None:
        return replace(setting, anneal=start.saved.anneal), start.saved.state
    if start.sample is None:
        return setting, starting_point(setting, guess)
    whole = replace(setting, anneal=Annealing(epsilon, epsilon, proximal=strategy.proximal))
    state, sample = _solve_coarse(setting, start.sample, guess), start.sample.problem
    fall, shape = None, sample.shape
    if sample.linear is not None and start.search is not None and not is_over():
        # few points may favour another optimum than all do, and what a linear cost tells is lost
        path = Annealing(max(epsilon, LINEAR.epsilon * strategy.scale), epsilon, held=True)
        aside = replace(setting, anneal=path, recorder=replace(recorder, history=[]))
        other = _solve_coarse(aside, start.sample, LINEAR)
        if float(other.coupling.change(state.coupling)) > ANNEALING_TOLERANCE:
            fall = path
    roughly = replace(whole, tol=max(whole.tol, ROUGH_TOLERANCE))
    return whole, approach(strategy, roughly, state, max(shape), fall)


def _solve_coarse(setting: Setting, sample: Coarse, guess: Guess) -> LoopState:
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
        tol=max(setting.tol, ROUGH_TOLERANCE),
    )
    return to_all_points(setting, sample, iterate(small, starting_point(small, guess)))


logger = logging.getLogger(__name__)

# The last cost has so many times the anchors of the iterations before. [L124]
_REFINING = 4
# Anchors are added until the sampled cost is so many times its standard error; and at most so many.
# [L114]
_SIGNAL_TO_NOISE, _MOST_ANCHORS = 10.0, _REFINING * MOST_ANCHORS
# Sinkhorn iterations in which plans that are compared meet their marginals, at most. [L951]
_COMPARED = 100


def run_stages(
    strategy: Strategy, setting: Setting, state: LoopState, guess: Guess
) -> tuple[Setting, LoopState]:
    """Iterate in the dtype of the loop; then with more anchors, or in the settling dtype."""
    options, dtypes = strategy.options, strategy.route.dtypes
    rough = guess.epsilon > 0 and setting.recorder.checkpoint is None
    if is_over() and not state.coupling.empty:
        # settling makes a plan of the start; iterations before that would be late
        state = state._replace(status=Status.STOPPED)
    elif rough and strategy.proximal_polished and strategy.problem.linear is None:
        setting, state = _choose_path(setting, state)
    state = iterate(setting, state)
    if options.n_anchors is None and options.rule is None and not setting.gradient.exact:
        setting, state = _refine_anchors(*_grow_anchors(setting, state, guess))
    # an end in float64 may take longer than all that was kept
    late = not leaves(_ITERATIONS_KEPT * strategy.route.each, last=True)
    if dtypes.settle == dtypes.loop or late:
        return setting, state
    if not setting.gradient.exact:
        # the anchors are kept; only their last linear problem is solved in the other dtype
        return replace(setting, dtype=dtypes.settle), state
    setting = strategy.stage(setting, dtypes.settle, options.tol)
    again = dtypes.again and not strategy.proximal_polished and state.status is not Status.FLAT
    return setting, iterate(setting, state) if again else state


def _choose_path(setting: Setting, state: LoopState) -> tuple[Setting, LoopState]:
    """Begin proximal steps in two ways, at a large epsilon and after annealing; keep the lower."""
    # Which of them breaks the symmetry of a rough start better depends on the problem. Both are
    # followed to one epsilon, where values of plans rounded to their marginals are compared. [L951]
    gradient, sharp, tol, paths = setting.gradient, setting.anneal.sharp, setting.tol, []
    left = range(setting.options.max_iter - state.done)
    for floor in (math.inf, sharp):
        anneal = replace(setting.anneal, floor=floor)
        path = replace(setting, anneal=anneal, recorder=replace(setting.recorder, history=[]))
        steps = next((step for step in left if anneal(step) <= sharp), len(left)) + 1
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


def _grow_anchors(setting: Setting, state: LoopState, guess: Guess) -> tuple[Setting, LoopState]:
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


def _refine_anchors(setting: Setting, state: LoopState) -> tuple[Setting, LoopState]:
    """Make one more iteration, with more anchors: the last cost decides on the noise."""
    # Many iterations with few columns and one with many take fewer of them than many with many.
    used = setting.gradient.n_anchors or 0
    count = min(_REFINING * used, MOST_ANCHORS)
    spent = state.status is Status.STOPPED or state.done >= setting.options.max_iter
    if count <= used or spent or setting.anneal.proximal:
        return setting, state
    setting = replace(setting, gradient=setting.gradient.with_anchors(count))
    refined = iterate(setting, state, most=1)
    status = refined.status if refined.status is Status.STOPPED else state.status
    return setting, refined._replace(status=status)


# Outer iterations whose time, and share of a time limit that, search and loop leave to what follows
# them. [L1294]
_ITERATIONS_KEPT, _SHARE_KEPT = 4, 0.2


def solve_once(asked: Asked, recorder: Recorder) -> Outcome:
    """Solve a problem, for one mass and by one search."""
    match = find_copy(asked, recorder)
    if match is not None and asked.options.sharp and asked.problem.linear is None:
        return end_at_copy(asked, match, recorder)
    of_edges = None if match is not None else match_by_edges(asked, recorder)
    if of_edges is not None and of_edges.certain and of_edges.of_all:
        return end_at_match(asked, of_edges, recorder)
    return conclude(asked, follow(asked, recorder, match))._replace(matched=of_edges)


def strategy_of(asked: Asked) -> Strategy:
    """Choose how a problem is solved, and go no further."""
    given = [len(graph.edges.vertex) for graph in asked.graphs if graph is not None]
    return choose_strategy(
        asked.problem, asked.options, init=named_start(asked.init),
        given=min(given) if len(given) == len(asked.graphs) else 0,
    )  # fmt: skip


class Followed(NamedTuple):
    """A solve up to where its loop has ended."""

    strategy: Strategy
    start: Start
    setting: Setting
    state: LoopState
    resolved: Resolved | None  # the plan of a problem that was solved on cells


def follow(asked: Asked, recorder: Recorder, match: Isometry | None = None) -> Followed:
    """Choose how to solve and where to begin, and run the loop."""
    options, checkpoint = asked.options, asked.checkpoint
    clock = perf_counter()
    strategy = strategy_of(asked)
    if match is not None and match.only:
        strategy = replace(
            strategy, route=strategy.route.at_match(
                KEEPS_ALL, "any other costs more by what is known of the match"
            ),
        )  # fmt: skip
    if options.ranks is not None:
        options.ranks.agree(*strategy.fingerprint())
    # a plan is of no use before its last marginals and its numbers
    keep_least(_ITERATIONS_KEPT * strategy.route.each, _SHARE_KEPT)
    untold = options.told == "nothing"
    if untold:
        route = strategy.route
        strategy.forecast.say(route.cost, route.longest, route.seconds)
        strategy.forecast.foresee(stored=route.storage.stored)
    start = find_start(asked, strategy, match)
    if start.guess.patient and options.skip_tiles == "auto":
        limits = limits_of(strategy.problem.source.device)
        route = strategy.route.annealed(strategy.facts, strategy.options, limits)
        strategy = replace(strategy, route=route)
    if untold and start.search is not None and start.search.compare:
        strategy.forecast.say_again()
    elif untold and start.guess.patient:
        parts = [strategy.problem] + ([] if start.sample is None else [start.sample.problem])
        count = sum(one.source.n * one.target.n for one in parts) / strategy.facts.entries
        strategy.forecast.say_solves(count, "nothing was found to begin at")
    elif untold:
        strategy.forecast.correct_loop(start.search, *strategy.route.tried)
    clock = recorder.time("multistart", clock)
    setting, state = begin(strategy, start, asked.generator, recorder)
    if checkpoint is not None:
        recorder.checkpoint = partial(checkpoint.keep, setting)
    recorder.time("setup", clock)
    resolved = None
    if start.sample is not None and (tolerance := choose_resolution(strategy)) is not None:
        # factors in the dtype of the loop take half as much once more, and are made again
        loop, setting = setting.dtype, strategy.in_float64(setting)
        state, resolved = solve_on_cells(strategy, setting, state, tolerance)
        setting = strategy.stage(setting, loop)
        if resolved is None:
            state = in_dtype(loop, state)
    if resolved is None:
        setting, state = run_stages(strategy, setting, state, start.guess)
    return Followed(strategy, start, setting, state, resolved)


def conclude(asked: Asked, followed: Followed) -> Outcome:
    """Settle the plan that a loop has come to, and compute its numbers."""
    checkpoint, (strategy, start, setting, state, resolved) = asked.checkpoint, followed
    options, moves = asked.options, strategy.route.tried[0]
    followers = (0, 0) if start.search is None else start.search.followed(options.search, moves)
    if options.told == "nothing" and not any(followers):
        strategy.forecast.correct_end()
    if resolved is None:
        if checkpoint is not None and state.status is Status.STOPPED:
            checkpoint.keep(setting, state, now=True)
        plan, state = settle(setting, state, setting.dtype)
        further, known = leaves_saddle(setting, state, plan)
        while further is not None:
            plan, state = settle(setting, iterate(setting, further), setting.dtype)
            further, known = leaves_saddle(setting, state, plan)
        ending = finish(strategy, setting, plan, state, known, start.guess)
        if checkpoint is not None and state.status is not Status.STOPPED:
            checkpoint.done()
    else:
        plan = resolved.plan
        ending = Ending(
            plan.released(alone(setting.backend)), resolved.evaluation, plan.epsilon,
            resolved.status, None, None,
        )  # fmt: skip
    gradient, search = setting.gradient, start.search
    # a plan from a given start is not compared with the match of copies
    searched = not named_start(asked.init) and asked.options.rule is None
    if searched and misses_a_copy(setting.problem, gradient, ending.evaluation, ending.epsilon):
        search = (search or Search((), math.nan))._replace(doubt=WHY_NOT_A_COPY)
    f, g = plan.potentials
    return Outcome(
        ending=ending, strategy=strategy,
        potentials=Potentials(f + gradient.row, g + gradient.column), backend=setting.backend.name,
        n_anchors=gradient.n_anchors, noise=gradient.noise(state.coupling), search=search,
        recorder=setting.recorder, known=gradient.remember(state.coupling, setting.marginals),
        resolution=resolved and resolved.resolution, route=strategy.route,
    )  # fmt: skip
