"""The solves that an answer takes: one; others by shorter searches; one for each mass."""

import math
from collections.abc import Iterator
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from torchgw._search.chains import Trial
from torchgw._search.optima import WHY_APART, WHY_OPEN, Search, compare_ends, ends_settle, led_by
from torchgw._solve.begin import PATIENT
from torchgw._solve.copies import WHY_NOT_A_COPY
from torchgw._solve.options import Options
from torchgw._solve.outcome import Asked, Outcome
from torchgw._solve.pipeline import solve_once
from torchgw._solve.state import Recorder
from torchgw._solve.status import Status

# Masses that are tried where a linear cost depends on the mass; and by how many times `tol` two may
# differ where the cost is sampled. [L576]
_MOST_MASSES = 20
_ROUGHLY = 100
# Entries of a plan up to which a search is followed by a solve from a x b alone: the few points of
# such a problem have other optima with entropy than without. What is rounding of an objective, over
# the natural scale of the cost. [L634]
_SMALLEST, _NOTHING = 2**12, 1e-9


def solve_problem(asked: Asked, recorder: Recorder) -> Outcome:
    """Solve, as often as the answer takes."""
    problem, rule = asked.problem, asked.options.rule
    masses_differ = rule is not None and not rule.fixed_mass
    if masses_differ and problem.linear is not None and problem.alpha != 0:
        return _solve_for_mass(asked, recorder)
    outcome = _solve_searched(asked, recorder)
    for shorter in _shorter_searches(asked, outcome.search):
        outcome = _no_higher_than(outcome, asked, shorter)
    return outcome


def _shorter_searches(asked: Asked, search: Search | None) -> Iterator[Options]:
    """Shorten a search whose optima may not be the lowest, once or twice."""
    problem, options = asked.problem, asked.options
    if options.rule is not None or asked.checkpoint is not None or options.ranks is not None:
        return
    thorough = options.search == "thorough" and search is not None and bool(search.trials)
    if thorough:
        # the chains of a thorough search crowd out some that the default would follow to
        # the end
        yield replace(options, search="auto")
    if thorough or problem.source.n * problem.target.n <= _SMALLEST:
        yield replace(options, n_init=1)


def _solve_searched(asked: Asked, recorder: Recorder) -> Outcome:
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
        start, other_label = _solve_searched(strict, Recorder()).ending.plan, "all points"
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


def _no_higher_than(searched: Outcome, asked: Asked, options: Options) -> Outcome:
    """Solve by a shorter search as well, if there was a search, and return what is lower."""
    search, recorder, problem = searched.search, searched.recorder, asked.problem
    if search is None or not search.alternatives or searched.ending.status is Status.STOPPED:
        return searched
    nothing = _NOTHING * searched.strategy.scale
    if problem.linear is None and searched.ending.evaluation.value(problem.alpha) <= nothing:
        # nothing is better than a match that keeps all distances
        return searched
    clock, aside = perf_counter(), Recorder()
    # the same draws as if this solve were the only one
    asked.generator.manual_seed(asked.generator.initial_seed())
    other = _solve_searched(asked._replace(options=options, init=None, made=()), aside)
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
    if options.n_init != 1 and doubt != WHY_NOT_A_COPY:
        # the longer search has ended at another plan
        doubt = WHY_OPEN["thorough"].format(count=len(search.trials))
    # what is said of the plan itself
    search = led_by(search, problem, plan, value, label)._replace(doubt=doubt)
    aside.timings = recorder.timings
    return other._replace(search=search, recorder=aside)


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
        settled = abs(tried[-1][1]) <= (1 if outcome.noise is None else _ROUGHLY) * options.tol
        if settled or len(tried) == _MOST_MASSES or not outcome.ending.status.converged:
            break
        mass, asked = math.exp(_next(tried)), asked._replace(init=outcome.ending.plan)
        options = replace(options, n_init=None)
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
