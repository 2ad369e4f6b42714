"""The solves that an answer takes: one; others by shorter searches; one for each mass."""

import math
import sys
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchgw._problem.limits import limits_of
from torchgw._search.all_points import few_enough, match_edges, repair_found
from torchgw._search.alternatives import (
    AGREED,
    OTHER,
    WHY_APART,
    WHY_EDGES,
    WHY_OPEN,
    WHY_TIME,
    Alternative,
    Search,
    compare_ends,
    ends_settle,
    led_by,
    sent_apart,
)
from torchgw._search.chain import COMPARED_AT, Trial
from torchgw._search.coarse import coarse_problem
from torchgw._search.starts import GUESS_EPSILON
from torchgw._search.tabu import best_matchings, can_exchange
from torchgw._sinkhorn.choose import choose_backend
from torchgw._sinkhorn.contract import Backend
from torchgw._solve.begin import MISSED, Guess, best_found, from_alternative
from torchgw._solve.outcome import Asked, Outcome
from torchgw._solve.pipeline import WHY_NOT_A_COPY, conclude, follow, solve_once
from torchgw._solve.state import Recorder, Status
from torchgw._tensors.deadline import is_over
from torchgw._typing import Iteration

# Masses that are tried where a linear cost depends on the mass; and by how many times `tol` two may
# differ where the cost is sampled. [L576]
_MOST_MASSES = 20
ROUGHLY = 100
# What is rounding of an objective, over the natural scale of the cost. [L634]
NOTHING = 1e-9
# An optimum may end lower than the best one unless its value is higher by more than this share, of
# few points, or of chains on all: they do not tell more. [L1254, L1291]
_CLOSE, _NEAR = 0.2, 0.05
# The best plan of few points leads to the plan that was found if it sends them no further apart
# than this. A solve from it ends early where its objective is higher by this share (and comes no
# nearer, if the two are not alike), after so many iterations, by which it has forgotten the grid of
# the few. [L1205]
_ALIKE, _ABOVE, _FORGOTTEN = 0.1, 0.015, 3
# What a start is called that is a match of points by their distances to all others.
_BY_MATCH = "distance distributions of all points"
# So many steps like the last one may be left of a path at its target. [L1291]
_STEPS = 10
# Value of a plan over the natural scale of the cost up to which it keeps distances so well that
# edges are not matched, unless it is in doubt. [L1283]
_WELL = 0.05


class _Other(NamedTuple):
    """Another solve, which may end lower than that from the optimum that a search chose."""

    asked: Asked
    way: Literal["search", "start", "optimum"]  # another search, or where it begins
    label: str = ""  # of its start; another search finds its own


def solve_problem(asked: Asked, recorder: Recorder) -> Outcome:
    """Solve, as often as the answer takes."""
    problem, rule = asked.problem, asked.options.rule
    masses_differ = rule is not None and not rule.fixed_mass
    if masses_differ and problem.linear is not None and 0 < problem.alpha < 1:
        return _solve_for_mass(asked, recorder)
    outcome = _solve_searched(asked, recorder)
    route = outcome.route
    for other in _other_solves(asked, outcome.search, {move.what for move in route.begin}):
        if is_over():
            break
        outcome = _no_higher_than(outcome, other)
    if is_over():
        outcome = _out_of_time(outcome)
    else:
        outcome = _no_higher_than_repaired(asked, _no_higher_than_by_edges(asked, outcome))
        outcome = _no_higher_than_matched(asked, outcome)
    if problem.support is not None and outcome.search is not None:
        outcome = outcome._replace(search=_confined(outcome.search, problem.support))
    return outcome._replace(route=route)


def _confined(search: Search, support: Tensor) -> Search:
    """Leave out optima that the price of a support has not kept on it, and what others lose of it.

    A search ends at plans whose marginals are rounded, which may put a little elsewhere.
    """
    kept = []
    for one in search.alternatives:
        plan = one.plan * support[one.source[:, None], one.target]
        if float(plan.sum()) >= (1 - MISSED) * float(one.plan.sum()):
            kept.append(replace(one, plan=plan))
    return search._replace(alternatives=tuple(kept))


def _out_of_time(outcome: Outcome) -> Outcome:
    """Say that other solves that may end lower were left out."""
    search = outcome.search
    if search is None or not search.alternatives or search.doubt:
        return outcome
    return outcome._replace(search=search._replace(doubt=WHY_TIME))


def _other_solves(asked: Asked, search: Search | None, moves: Set[str]) -> Iterator[_Other]:
    """Ask for other solves where the optimum that a search chose may not be the lowest.

    ``moves`` are those that the route of the problem has.
    """
    options = asked.options
    if not _may_go_on(asked):
        return
    thorough = options.search == "thorough" and search is not None and bool(search.trials)
    if thorough:
        # the chains of a thorough search crowd out some that the default would follow to
        # the end
        yield _Other(_again(asked, search="auto"), "search")
    if search is not None and search.settled and not thorough:
        return
    if thorough or "product" in moves:
        yield _Other(_again(asked, n_init=1), "start", "product")
    if search is None:
        return
    if search.match is not None:
        yield _Other(_again(asked, Guess(search.match, None, GUESS_EPSILON)), "optimum", _BY_MATCH)
    if search.few is not None:
        # where the solve would have begun without chains
        best, *_ = search.few.alternatives
        yield _Other(_again(asked, best), "optimum", best.label)
    if "optima" in moves:
        # those of few points have been among the guesses of chains
        for one in _may_end_lower(search):
            yield _Other(_again(asked, one), "optimum", one.label)


def _may_go_on(asked: Asked) -> bool:
    """Whether a solve by one process, of given weights and kept in no file, may be followed."""
    options = asked.options
    return options.rule is None and asked.checkpoint is None and options.ranks is None


def _may_end_lower(search: Search) -> Iterator[Alternative]:
    """Find the optima of a search whose values do not tell that they end above its best one."""
    for one in search.alternatives[1:]:
        best = search.alternatives[0].value
        if one.value - best <= (_NEAR if search.trials else _CLOSE) * abs(best):
            yield one


def _again(asked: Asked, init: Any = None, **options: Any) -> Asked:
    """Ask for a solve by another search, or from a start."""
    if init is not None:
        options["n_init"] = None
    return asked._replace(options=replace(asked.options, told="all", **options), init=init, made=())


def _solve_searched(asked: Asked, recorder: Recorder) -> Outcome:
    """Solve; where few points say little, from another start too, and return what is lower."""
    clock = perf_counter()
    found = solve_once(asked, recorder)
    search, status = found.search, found.ending.status
    if search is None or not search.compare or status is Status.STOPPED or is_over():
        return found
    relaxed = asked.options.rule is not None
    label = search.alternatives[0].label if relaxed and search.alternatives else "product"
    label = label if search.match is None else _BY_MATCH
    first = _told(label, found, perf_counter() - clock)
    return (_from_strict if relaxed else _from_few)(asked, found, search, first)


def _from_few(asked: Asked, found: Outcome, search: Search, first: Trial) -> Outcome:
    """Solve from the best plan of few points too, unless that leads to the plan that was found."""
    problem, few, ends = asked.problem, search.alternatives[0], [(first, found)]
    apart, left = sent_apart(problem, few, found.ending.plan), []
    if apart > _ALIKE:
        begun = _again(asked, best_found(problem, search))
        with _aside(asked, found) as aside:
            clock = perf_counter()
            if asked.options.regularization == "entropic":
                aside.callback = _NoLower(found.recorder.history, alike=apart <= OTHER)
            followed = follow(begun, aside)
            aside.callback = None
            if followed.state.status is Status.STOPPED:
                at, spent = aside.history[-1], perf_counter() - clock
                left = [Trial(few.label, at.epsilon, at.objective, math.nan, spent, "left behind")]
            else:
                other = conclude(begun, followed)
                ends.append((_told(few.label, other, perf_counter() - clock), other))
    ends.sort(key=lambda end: end[0].objective)
    plans = (end.ending.plan.to_dense().double() for _, end in ends)
    trials, best = [trial for trial, _ in ends], ends[0][1]
    search = compare_ends(problem, list(zip(trials, plans, strict=True)))
    if left:
        doubt = WHY_OPEN["auto"].format(count=2) if apart > OTHER else ""
        search = search._replace(trials=(*trials, *left), doubt=doubt)
    return _searched_by(search, best)


def _no_higher_than_by_edges(asked: Asked, outcome: Outcome) -> Outcome:
    """Where paths of graphs were compared and few edges kept, solve from a match of these too."""
    problem, options, search = asked.problem, asked.options, outcome.search
    if not _may_go_on(asked) or options.n_init is not None or options.search == "fast":
        return outcome
    if search is None or not search.alternatives or not outcome.ending.status.converged:
        return outcome
    blurred = outcome.ending.epsilon >= COMPARED_AT * outcome.strategy.scale
    if blurred or problem.linear is not None or not few_enough(problem, options.search):
        return outcome
    value = outcome.ending.evaluation.value(problem.alpha)
    if value <= _WELL * outcome.strategy.scale and not search.doubt:
        return outcome
    plan, clock = outcome.ending.plan, perf_counter()
    with outcome.recorder.timed("multistart"):
        match = match_edges(
            problem, asked.graphs, plan, bool(search.doubt), options.search, _batches(asked)
        )
    if match is None:
        return outcome
    if match.keeps_more:
        outcome = _no_higher_than_from(asked, outcome, match.found, clock)
    assert outcome.search is not None
    doubt = outcome.search.doubt
    # a match that is not certain vouches for no plan that came from it
    ours = outcome.ending.plan if match.certain else plan
    alike = sent_apart(problem, match.found, ours) <= OTHER
    if match.certain and alike and doubt != WHY_NOT_A_COPY:
        doubt = ""
    elif not (match.certain or alike):
        doubt = doubt or WHY_EDGES
    return outcome._replace(search=outcome.search._replace(doubt=doubt))


def _no_higher_than_repaired(asked: Asked, outcome: Outcome) -> Outcome:
    """Repair the better one of two whole solves in doubt, and solve from that too."""
    search = outcome.search
    if not _may_go_on(asked) or search is None or not search.ended or not search.doubt:
        return outcome
    best, epsilon, clock = search.alternatives[0], outcome.ending.epsilon, perf_counter()
    with outcome.recorder.timed("multistart"):
        problem = asked.problem.priced(outcome.strategy.scale)
        better = repair_found(problem, best, epsilon, asked.options.search, _batches(asked))
    return outcome if better is None else _no_higher_than_from(asked, outcome, better, clock)


def _no_higher_than_matched(asked: Asked, outcome: Outcome) -> Outcome:
    """Solve from the best matching of few points too, where a polished plan costs more."""
    problem, search = asked.problem, outcome.search
    n, m = problem.source.n, problem.target.n
    few = n == m <= limits_of(problem.source.device).exchanged_points
    if not (few and asked.options.sharp and _may_go_on(asked) and problem.loss.cross is not None):
        return outcome
    if search is None or not outcome.ending.status.converged:
        return outcome
    clock, whole = perf_counter(), coarse_problem(problem.priced(outcome.strategy.scale), n)
    if not can_exchange(whole.problem):
        return outcome
    source, target = (side.indices for side in whole.problem[:2])
    plan = outcome.ending.plan.to_dense()[source[:, None], target]
    partners, _ = best_matchings(whole.problem, plan[None].to(whole.problem.base))
    best = torch.nn.functional.one_hot(partners[:1], n).to(whole.problem.base) / n
    value = float(whole.problem.value(best))
    nothing = max(NOTHING * outcome.strategy.scale, whole.problem.rounding())
    if value >= outcome.ending.evaluation.value(problem.alpha) - nothing:
        return outcome
    better = Alternative(value, "exchanges", best[0], source, target, (n, m), epsilon=0.0)
    # steps with entropy would leave it
    guess = from_alternative(better, problem.source.device)._replace(sharp=True)
    options = replace(asked.options, regularization="proximal")
    return _no_higher_than_from(asked._replace(options=options), outcome, better, clock, guess)


def _no_higher_than_from(
    asked: Asked,
    outcome: Outcome,
    better: Alternative,
    clock: float,
    guess: Guess | None = None,
) -> Outcome:
    """Solve from another plan, searched for since ``clock``, and return what is lower.

    A ``guess`` made of it is followed to its end whatever it passes on its way.
    """
    way: Literal["start", "optimum"] = "optimum" if guess is None else "start"
    lower = _no_higher_than(outcome, _Other(_again(asked, guess or better), way, better.label))
    if lower is outcome or lower.search is None or outcome.search is None:
        return outcome
    trials = (_told(better.label, lower, perf_counter() - clock), *outcome.search.trials)
    return lower._replace(search=lower.search._replace(trials=trials))


def _batches(asked: Asked) -> Backend:
    """Choose what runs Sinkhorn's iterations of chains."""
    return choose_backend(asked.options.backend, asked.problem.source.device, torch.float32)


class _NoLower:
    """Whether a solve will come to no lower objective than an earlier one, by those on its path."""

    def __init__(self, path: Sequence[Iteration], *, alike: bool) -> None:
        # if both are `alike` they lead to the same optimum, or to ones next to each other
        last = {step.epsilon: step.objective for step in path}
        self._falls, self._objectives = [-math.log(epsilon) for epsilon in last], [*last.values()]
        self._target, self._alike, self._above = path[-1].epsilon, alike, math.inf
        self._lowest, self._before = path[-1].objective, math.inf
        self._start = path[0].epsilon

    def __call__(self, now: Iteration) -> bool:
        """Compare an iteration with the earlier path at the same epsilon."""
        fall, self._before = self._before - now.objective, now.objective
        if now.iteration < _FORGOTTEN:
            return False
        above = now.objective - self._lowest
        if now.epsilon <= self._target and above > AGREED * abs(self._lowest):
            # what is left of a fall that slows down
            return above > _STEPS * max(fall, 0.0)
        if now.epsilon > self._start:
            # a solve that began with a sharp plan has no path to compare with
            return False
        there = float(np.interp(-math.log(now.epsilon), self._falls, self._objectives))
        before, self._above = (
            self._above,
            (now.objective - there) / max(abs(there), sys.float_info.min),
        )
        if self._alike:
            return self._above > (_ABOVE if now.epsilon > self._target else -AGREED)
        return self._above > max(_ABOVE, before)


def _from_strict(asked: Asked, found: Outcome, search: Search, first: Trial) -> Outcome:
    """Solve from the best match of all points too, of which a relaxed plan leaves some out."""
    strict = asked._replace(options=replace(asked.options, rule=None, polish=False, told="loops"))
    with _aside(asked, found) as aside:
        clock = perf_counter()
        plan = _solve_searched(strict, Recorder()).ending.plan
        other = solve_once(_again(asked, plan), aside)
        second = _told("all points", other, perf_counter() - clock)
    ends = sorted([(first, found), (second, other)], key=lambda end: end[0].objective)
    trials = tuple(trial for trial, _ in ends)
    doubt = "" if ends_settle(trials) else WHY_APART
    return _searched_by(search._replace(trials=trials, doubt=doubt), ends[0][1])


@contextmanager
def _aside(asked: Asked, found: Outcome) -> Iterator[Recorder]:
    """Record one more solve, with the draws that it would have alone, as part of the search."""
    asked.generator.manual_seed(asked.generator.initial_seed())
    recorder = Recorder()
    with found.recorder.timed("multistart"):
        yield recorder
    recorder.timings = found.recorder.timings


def _searched_by(search: Search, best: Outcome) -> Outcome:
    """Say what a search has found; what is said of the plan itself goes first."""
    own = best.search.doubt if best.search else ""
    return best._replace(search=search._replace(doubt=own or search.doubt))


def _told(start: str, outcome: Outcome, seconds: float) -> Trial:
    """Report what a whole solve from a start has come to."""
    ending, alpha = outcome.ending, outcome.strategy.problem.alpha
    value, objective = ending.evaluation.value(alpha), _objective(outcome)
    return Trial(start, ending.epsilon, objective, value, seconds, "refined")


def _no_higher_than(searched: Outcome, again: _Other) -> Outcome:
    """Solve in another way as well, if there was a search, and return what is lower."""
    search, asked, problem = searched.search, again.asked, again.asked.problem
    if search is None or not search.alternatives or searched.ending.status is Status.STOPPED:
        return searched
    nothing = NOTHING * searched.strategy.scale
    if again.way == "optimum":
        # a mirror image of the plan ends at the same objective, up to the tolerances
        nothing = max(nothing, AGREED * abs(_objective(searched)))
    if problem.linear is None and searched.ending.evaluation.value(problem.alpha) <= nothing:
        # nothing is better than a match that keeps all distances
        return searched
    with _aside(asked, searched) as aside:
        if again.way == "optimum":
            aside.callback = _NoLower(searched.recorder.history, alike=False)
        if again.way == "search":
            other = _solve_searched(asked, aside)
        else:
            followed = follow(asked, aside)
            if followed.state.status is Status.STOPPED:
                return searched
            other = conclude(asked, followed)
    # a polished plan has its marginals, whether its steps have come to an end or not
    status = other.ending.status
    comparable = status.converged or status is Status.POLISH_LIMIT
    if not comparable or _objective(other) >= _objective(searched) - nothing:
        return searched
    value = other.ending.evaluation.value(problem.alpha)
    found = other.search or Search((), math.nan, doubt=search.doubt)
    doubt = found.doubt
    if again.way == "search" and doubt != WHY_NOT_A_COPY:
        # the longer search has ended at another plan
        doubt = WHY_OPEN["thorough"].format(count=len(search.trials))
    label = found.alternatives[0].label if found.alternatives else again.label
    plan = other.ending.plan.to_dense()
    # what is said of the plan itself: it stands beside the other one, not beside the rough plan
    # that the other began from
    first, *others = search.alternatives
    first = replace(first, value=searched.ending.evaluation.value(problem.alpha))
    search = search._replace(alternatives=(first, *others))
    search = led_by(search, problem, plan, value, label)._replace(doubt=doubt)
    return other._replace(search=search, recorder=aside)


def _objective(outcome: Outcome) -> float:
    """Read the objective that a solve has come to."""
    ending = outcome.ending
    return ending.evaluation.objective(outcome.strategy.problem.alpha, ending.epsilon)


def _solve_for_mass(asked: Asked, recorder: Recorder) -> Outcome:
    """Solve for one mass after the other, until it is the mass of the plan."""
    # The objective of a plan of mass t, over t squared, has the linear cost M / t: the plan for one
    # mass gives the next mass, and these are extrapolated until they agree.
    options = asked.options
    rule = options.rule
    assert rule is not None
    tried: list[tuple[float, float]] = []
    mass, asked = 1.0, asked._replace(checkpoint=None, made=())
    search: Search | None = None
    while True:
        options = replace(options, rule=replace(rule, held=mass))
        outcome = _solve_searched(asked._replace(options=options), recorder)
        search = search or outcome.search
        found = outcome.ending.evaluation.mass
        tried.append((math.log(mass), math.log(found / mass)))
        # sampled costs do not tell the mass more closely
        settled = abs(tried[-1][1]) <= (1 if outcome.noise is None else ROUGHLY) * options.tol
        if settled or len(tried) == _MOST_MASSES or not outcome.ending.status.converged:
            break
        mass, asked = math.exp(_next(tried)), asked._replace(init=outcome.ending.plan)
        options = replace(options, n_init=None, told="all")
    if not settled and outcome.ending.status.converged:
        outcome = outcome._replace(ending=outcome.ending._replace(status=Status.OUTER_LIMIT))
    # of the first mass; the others begin where it ended
    return outcome._replace(search=search)


def _next(tried: list[tuple[float, float]]) -> float:
    """Find where the change of a logarithm vanishes: a bounded secant step from two values."""
    here, change = tried[-1]
    step = change
    if len(tried) > 1:
        slope = (change - tried[-2][1]) / (here - tried[-2][0])
        step = -change / slope if slope < 0 else change
    return here + max(-1.0, min(1.0, step))
