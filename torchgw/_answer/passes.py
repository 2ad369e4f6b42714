"""The solves that an answer takes: every start that may end lower is followed, the lowest stays.

One solve begins where a search has led. Then each move of ``MOVES`` asks for others, by the facts
of the problem and what is known by then, and what ends lower takes the place of the lowest.
"""

import math
import sys
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter
from time import perf_counter
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchgw._batch.packing import has_triton
from torchgw._gradients.contract import own_value
from torchgw._problem.limits import limits_of
from torchgw._problem.problem import MarginalRule, Problem
from torchgw._search.all_points import few_enough, match_edges, repair_found
from torchgw._search.given_graphs import GivenMatch
from torchgw._search.optima import LEAST_EPSILON
from torchgw._search.stack import STEPS_LEFT, Stack, can_stack
from torchgw._search.tabu import best_matchings, exchange, walk_from
from torchgw._sinkhorn.annealing import ANNEALING_TOLERANCE
from torchgw._sinkhorn.choose import choose_backend
from torchgw._sinkhorn.contract import Backend
from torchgw._solve.begin import best_found, from_alternative
from torchgw._solve.evaluation import ERRORS
from torchgw._solve.loop import PRODUCT, Guess
from torchgw._solve.pipeline import (
    WHY_NOT_A_COPY,
    Asked,
    Outcome,
    conclude,
    end_at_match,
    follow,
    solve_once,
    strategy_of,
)
from torchgw._solve.state import Recorder, Status
from torchgw._solve.strategy import Strategy
from torchgw._starts.alternatives import (
    AGREED,
    OTHER,
    WHY_APART,
    WHY_BLUR,
    WHY_EDGES,
    WHY_LEFT,
    WHY_OPEN,
    WHY_PART,
    WHY_PARTS,
    WHY_RELAXED,
    WHY_SINGLE,
    WHY_TIME,
    WHY_UNMATCHED,
    Alternative,
    End,
    Ends,
    Search,
    compare_ends,
    ends_settle,
    entropy,
    sent_apart,
    with_end,
)
from torchgw._starts.chain import ALIKE, COMPARED_AT, GUESS_EPSILON, SAME, STANDS_OUT, Trial
from torchgw._starts.coarse import CoarseProblem, can_exchange, coarse_problem
from torchgw._starts.guesses import congruent_pairs, nearest
from torchgw._starts.labels import LABELS, POINTS, label_points
from torchgw._starts.turns import best_turned
from torchgw._tensors.deadline import is_over, leaves, promise, shorten
from torchgw._tensors.machine import slowness
from torchgw._tensors.operations import EQUAL
from torchgw._typing import Iteration
from torchgw.distances.base import BLOCK_ENTRIES
from torchgw.distances.precomputed import PrecomputedDistance
from torchgw.distances.sampling import choose_points

# Masses that are tried where a linear cost depends on the mass; and by how many times `tol` two may
# differ where the cost is sampled. [L576]
_MOST_MASSES = 20
ROUGHLY = 100
# The best plan of few points leads to the plan that was found if it sends them no further apart
# than this. A solve from it ends early where its objective is higher by this share (and comes no
# nearer, if the two are not alike), after so many iterations, by which it has forgotten the grid of
# the few. [L1205]
_ALIKE, _ABOVE, _FORGOTTEN = 0.1, 0.015, 3
# The part of the mass that is matched apart from the rest, on so many points a side, from so many
# congruent pairs and from images blurred by this share of their distances. [L1680]
_PART, _PART_POINTS, _PART_SEEDS, _IMAGES = 0.85, 48, 4, 0.05
# Points whose distances to all others are read at once. A choice.
_READ = 16
# What a start is called that is a match of points by their distances to all others.
_BY_MATCH = "distance distributions of all points"
# Epsilon at which seeds of congruent pairs are taken up, as a share of the natural scale: plans
# between so few pairs settle within few iterations from there. [L1394]
_SEEDED = 0.01
# Seconds in which congruent pairs are found and taken up, for each point. [L1594]
_CONGRUENT = 0.008


class Rival(NamedTuple):
    """Another solve, which may end lower than the lowest so far."""

    asked: Asked
    way: Literal["search", "start", "optimum"]  # another search, or where it begins
    label: str = ""  # of its start; another search finds its own


class Incumbent:
    """The lowest end that the solves of a problem have come to, and what was found before."""

    def __init__(self, asked: Asked, lowest: Outcome, led: "_Led | None" = None) -> None:
        self.asked, self.lowest, self.led = asked, lowest, led
        self.first = lowest.search  # what the first search has found
        self.moves: Set[str] = {move.what for move in lowest.route.begin}

    @property
    def goes_on(self) -> bool:
        """Whether one process, of given weights and kept in no file, may solve again."""
        return self.asked.checkpoint is None and self.asked.options.ranks is None

    @property
    def strict(self) -> bool:
        """The same where marginals are strict."""
        return self.goes_on and self.asked.options.rule is None

    @property
    def proven(self) -> bool:
        """Whether the plan is known to be the best, as it costs nothing."""
        return self.lowest.ending.status.converged and _costs_nothing(self.lowest)

    @property
    def thorough(self) -> bool:
        """Whether chains of a thorough search were followed."""
        how, first = self.asked.options.search, self.first
        return self.strict and first is not None and first.thorough(how)

    @property
    def open(self) -> bool:
        """Whether marginals are strict, and something that was found is yet to be followed."""
        settled = self.first is not None and self.first.settled and not self.thorough
        return self.strict and not settled

    @property
    def searched(self) -> bool:
        """Whether starts were asked for, and others may follow them."""
        options, first = self.asked.options, self.first
        plain = options.n_init is None and options.search != "fast"
        return plain and first is not None and bool(first.alternatives)

    @property
    def has_parts(self) -> bool:
        """Whether parts of the plan may leave it in doubt: it is in none, and no copy's."""
        outcome, problem = self.lowest, self.asked.problem
        search, ending = outcome.search, outcome.ending
        free = self.goes_on and self.searched and "parts" in self.moves
        if not free or search is None or search.doubt or not ending.status.converged:
            return False
        copies = limits_of(problem.source.device).copies * outcome.strategy.scale
        return outcome.value > copies

    @property
    def labelled(self) -> bool:
        """Whether labels of few points may be followed; smaller problems have begun with them."""
        return "pairs" in self.moves and self.goes_on and self.searched

    @property
    def labels(self) -> list[Alternative]:
        """The ends of labels that are yet to be followed."""
        led = self.led if self.labelled else None
        return [] if led is None else [*led.found.values()][led.sure :]

    def follow(self, rival: Rival) -> bool:
        """Solve in another way, unless time is over; tell whether that has ended lower."""
        before = self.lowest
        if not is_over():
            self.lowest = _no_higher_than(before, rival)
        return self.lowest.ending is not before.ending

    def follow_found(self, better: Alternative, clock: float, rival: Rival | None = None) -> bool:
        """Solve from a plan that was searched for since ``clock``, and report that search."""
        before = self.lowest.search
        rival = rival or Rival(self.asked.again(better), "optimum", better.label)
        if not self.follow(rival) or self.lowest.search is None or before is None:
            return False
        self.say(trials=(_told(better.label, self.lowest, perf_counter() - clock), *before.trials))
        return True

    def doubt(self, why: str) -> None:
        """Doubt the lowest end, if nothing has been said of it."""
        assert self.lowest.search is not None
        self.say(doubt=self.lowest.search.doubt or why)

    def say(self, **what: Any) -> None:
        """Change what the search says."""
        assert self.lowest.search is not None
        self.lowest = self.lowest._replace(search=self.lowest.search._replace(**what))


def solve_problem(asked: Asked, recorder: Recorder) -> Outcome:
    """Solve, as often as the answer takes."""
    problem, rule = asked.problem, asked.options.rule
    masses_differ = rule is not None and not rule.fixed_mass
    if masses_differ and problem.linear is not None and 0 < problem.alpha < 1:
        return _solve_for_mass(asked, recorder)
    led, found = _labels(asked, recorder), None
    if led is not None and led.sure:
        found = Search(tuple(led.found.values()), math.nan)
    clock = perf_counter() - recorder.timings.get("multistart", 0.0)
    # few points are searched where labels do not agree on what is lowest
    outcome = _solve_searched(asked._replace(found=found), recorder)
    incumbent = Incumbent(asked, outcome, led)
    seconds = perf_counter() - clock - recorder.timings.get("multistart", 0.0)
    if asked.options.told == "nothing":
        of_others = incumbent.first, *outcome.route.tried, seconds
        outcome.strategy.forecast.correct_others(
            *of_others, parts=incumbent.has_parts, labels=len(incumbent.labels)
        )
    for move in MOVES:
        if is_over() or incumbent.proven:
            break
        move(incumbent)
    if incumbent.proven and incumbent.lowest.search is not None:
        # whatever was doubted before
        incumbent.say(doubt="")
    elif is_over() and incumbent.lowest.search and incumbent.lowest.search.alternatives:
        incumbent.doubt(WHY_TIME)
    lowest = incumbent.lowest
    if problem.support is not None and lowest.search is not None:
        lowest = lowest._replace(search=_confined(lowest.search, problem.support))
    return lowest._replace(route=outcome.route)


def _confined(search: Search, support: Tensor) -> Search:
    """Leave out optima that a support's price has not kept on it, and what others lose of it."""
    # A search ends at plans whose marginals are rounded, which may put a little elsewhere.
    kept = []
    for one in search.alternatives:
        plan = one.plan * support[one.source[:, None], one.target]
        if float(plan.sum()) >= (1 - ANNEALING_TOLERANCE) * float(one.plan.sum()):
            kept.append(replace(one, plan=plan))
    return search._replace(alternatives=tuple(kept))


def _from_starts(incumbent: Incumbent) -> None:
    """Solve from all starts that were found, or left out, and are yet to be followed."""
    for rival in _starts(incumbent):
        if not incumbent.proven:
            incumbent.follow(rival)


def _starts(incumbent: Incumbent) -> Iterator[Rival]:
    """List the starts that may end lower, by what the first search has found."""
    asked, first, moves = incumbent.asked, incumbent.first, incumbent.moves
    product = Rival(asked.again(n_init=1), "start", "product")
    if incumbent.thorough:
        # a thorough search crowds out some that the default would follow
        limits = limits_of(asked.problem.source.device)
        shorten(limits.chains / limits.chains_of("thorough"))
        yield Rival(asked.again(search="auto"), "search")
    if not incumbent.open:
        return
    if incumbent.thorough:
        yield product
    if incumbent.thorough or "product" in moves:
        # where epsilon falls slowly some optima are passed by, even from another side
        yield Rival(asked.again(PRODUCT._replace(epsilon=0.0)), "start", "product")
    if first is None:
        return
    if first.match is not None:
        yield Rival(asked.again(Guess(first.match, None, GUESS_EPSILON)), "optimum", _BY_MATCH)
    found: list[Alternative] = []
    if first.few is not None and not first.few.alternatives:
        yield product
    elif first.few is not None:
        # where the solve would have begun without chains, or messages along edges
        best, *others = first.few.alternatives
        yield Rival(asked.again(best_found(asked.problem, first.few)), "optimum", best.label)
        # those are among the guesses of chains, where any were followed
        found += others if not first.trials else []
    found += first.rivals if "optima" in moves and first.alternatives else []
    for one in found:
        yield Rival(asked.again(one), "optimum", one.label)


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
        begun = asked.again(best_found(problem, search))
        with _aside(asked, found) as aside:
            clock = perf_counter()
            if asked.options.regularization == "entropic":
                aside.callback = _NoLower(found, alike=apart <= OTHER)
            followed = follow(begun, aside)
            aside.callback = None
            if followed.state.status is Status.STOPPED:
                spent = perf_counter() - clock
                # where time is over it may have ended before its first iteration
                left = [
                    Trial(few.label, at.epsilon, at.objective, math.nan, spent, "left behind")
                    for at in aside.history[-1:]
                ]
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
    return _searched_by(search, best, found)


class _Led(NamedTuple):
    """Where labels of few points have led."""

    pairs: "_Pairs"
    ends: Ends
    whole: bool  # whether these are all points of weight
    costs: Tensor  # (k,) of the labels that have led to the ends, the lowest first
    met: Tensor  # (k,) float64, seeds that have come to each
    found: dict[int, Alternative]  # the lowest ends that differ, by their places, in order

    def alike(self, plan: Tensor) -> Tensor:
        """Tell which ends are like a plan of these points, (k,)."""
        ends = self.ends.plans.flatten(1)
        return torch.nn.functional.cosine_similarity(ends, plan.flatten(), dim=1) > ALIKE

    def agreeing(self, plan: Tensor) -> int:
        """Count the seeds that have led to a plan of these points."""
        return int(self.met[self.alike(plan)].sum())

    def ambiguity(self, plan: Tensor) -> float:
        """Compare the cost of the labels of a plan with the least of others."""
        # labels have no entropy, which would be most of both
        alike = self.alike(plan)
        own, other = (
            float(self.costs[some].min()) if bool(some.any()) else math.nan
            for some in (alike, ~alike)
        )
        return 0.0 if math.isnan(other) else own / max(own, other)

    @property
    def sure(self) -> bool:
        """Whether few points need not be searched: seeds have met in the first that was found."""
        # where some points of both sides are left out, others may be, and end lower [L1860]
        first = next(iter(self.found), None)
        rule = self.pairs.rule
        told = first is not None and (rule.mass is None or rule.chosen or _stand_out(self.costs))
        enough = limits_of(self.pairs.rows.device).relaxed_met
        return told and self.agreeing(self.ends.plans[first]) >= enough


def _stand_out(costs: Tensor) -> bool:
    """Whether the labels of lowest cost are in no doubt."""
    return len(costs) == 1 or float(costs[0]) < STANDS_OUT * float(costs[1])


def _labels(asked: Asked, recorder: Recorder) -> _Led | None:
    """Follow labels of few points of a relaxed problem; ``None`` if it has none, or no time."""
    problem, options = asked.problem, asked.options
    alone = asked.checkpoint is None and options.ranks is None
    by_default = options.n_init is None and options.search != "fast"
    if options.rule is None or not (alone and by_default):
        return None
    strategy, limits = strategy_of(asked), limits_of(problem.source.device)
    moves, (n, m) = {move.what for move in strategy.route.begin}, problem.shape
    # of larger problems some points are looked at
    whole = n * m <= limits.congruent and can_stack(problem)
    size = max(n, m) if whole else math.isqrt(limits.congruent)
    if "pairs" not in moves or not leaves(slowness() * _CONGRUENT * size):
        return None
    if options.told == "nothing" and strategy.route.seconds is not None:
        promise(*strategy.route.seconds)
    with recorder.timed("multistart"):
        assert strategy.soft_rule is not None
        pairs = _Pairs.of(problem, size, strategy.soft_rule, strategy.mass, strategy)
        seeds, costs, met = pairs.labelled()
        if not len(seeds):
            return _Led(pairs, Ends(seeds, met, met), whole, costs, met, {})
        ends = pairs.follow(seeds)
    plans, found = ends.plans.flatten(1), dict[int, Alternative]()
    alike = torch.nn.functional.cosine_similarity(plans[:, None], plans, dim=2) > ALIKE
    lowest = float(ends.objectives.min())
    near = lowest + limits.all_above * abs(lowest)
    order = sorted(enumerate(ends.objectives.tolist()), key=itemgetter(1))
    for place, objective in (
        sorted(order, key=lambda end: end[0] > 0) if _stand_out(costs) else order
    ):
        # the lowest labels are solved from wherever few iterations have led them [L1862]
        if (place and objective > near) or bool(alike[place, [*found]].any()):
            continue
        plan = ends.plans[place] / ends.plans[place].sum()
        one = Alternative(objective, f"labels {place + 1}", plan, pairs.rows, pairs.columns, (n, m))
        found[place] = replace(one, epsilon=0.0) if whole else one
    return _Led(pairs, ends, whole, costs, met, found)


def _from_labels(incumbent: Incumbent) -> None:
    """Solve a relaxed problem from labels of few points, those that end lowest."""
    led, problem, rule = incumbent.led, incumbent.asked.problem, incumbent.asked.options.rule
    if not incumbent.labelled:
        return
    if led is None:
        incumbent.doubt(WHY_TIME)
    if led is None or not led.found:
        return
    assert rule is not None
    clock, lower = perf_counter(), False
    # few iterations do not tell where small epsilons end: the best is followed in any case
    for one in incumbent.labels:
        lower |= incumbent.follow_found(one, clock)
    ending, doubt, value = incumbent.lowest.ending, "", incumbent.lowest.value
    rows, columns, ends = led.pairs.rows, led.pairs.columns, led.ends.plans
    if led.whole:
        own, known = ending.plan.to_dense().to(ends)[rows[:, None], columns], True
    else:
        # some points have the mass of others in their ends, and their own alone in the whole plan
        apart = {place: sent_apart(problem, one, ending.plan) for place, one in led.found.items()}
        nearest = min(apart, key=apart.__getitem__)
        own, known = ends[nearest], apart[nearest] <= OTHER
    # few points do not vouch for an optimum that leaves some of them out
    limits = limits_of(problem.source.device)
    if not known or led.agreeing(own) + (not (led.sure or lower)) < limits.relaxed_met:
        doubt = WHY_RELAXED
    elif led.whole and rule.mass and float(led.ends.values.min()) < (1 - AGREED) * value:
        doubt = WHY_BLUR
    incumbent.doubt(doubt)
    search, alike, ambiguity = incumbent.lowest.search, led.alike(own), led.ambiguity(own)
    if known and search is not None:
        # few points may not have known the others
        label, objective = search.alternatives[0].label, incumbent.lowest.objective
        mine = Alternative(objective, label, own / own.sum(), rows, columns, problem.shape)
        # what few points have found is compared in its proportion to their own end
        unit = 1.0 if led.whole else objective / led.found[nearest].value
        others = sorted(
            (
                replace(one, value=unit * one.value)
                for place, one in led.found.items()
                if not bool(alike[place])
            ),
            key=lambda one: one.value,
        )
        incumbent.say(alternatives=(replace(mine, epsilon=0.0), *others))
        if others:
            # another match that ends nearly as low may be right, whatever its labels cost
            ambiguity = max(ambiguity, objective / max(objective, others[0].value))
    incumbent.say(ambiguity=ambiguity)


class _Pairs(NamedTuple):
    """Some or all points of a relaxed problem, from whose congruent pairs plans are followed."""

    rows: Tensor  # (s,) the points, those of weight
    columns: Tensor  # (t,)
    coarse: CoarseProblem
    rule: MarginalRule
    stack: Stack

    @classmethod
    def of(
        cls,
        problem: Problem,
        size: int,
        rule: MarginalRule,
        mass: float,
        strategy: Strategy,
        *,
        by_programs: bool = False,
    ) -> "_Pairs":
        """Choose up to ``size`` points of each side; few are followed on the CPU, as elsewhere.

        Or ``by_programs`` of a GPU that need not be compiled first: some doubt changes no plan.
        """
        coarse, device = coarse_problem(problem, size).problem, problem.source.device
        few = size <= limits_of(device).few_points
        epsilon = max(strategy.epsilon, LEAST_EPSILON * strategy.scale) * mass
        stack = Stack.of(coarse, epsilon, rule, torch.device("cpu") if few else device)
        if few and by_programs and has_triton(device):
            there = Stack.of(coarse, epsilon, rule, device)
            stack = there if there.runs_at_once() else stack
        return cls(coarse.source.indices, coarse.target.indices, coarse, rule, stack)

    def seeds(self, count: int) -> Tensor:
        """Find plans (k, s, t) between few pairs of points whose distances agree."""
        # a GPU looks at many in no time, of few points too
        (x, a), (y, b) = ((side.table.double(), side.weights) for side in self.coarse.sides)
        generator = torch.Generator("cpu").manual_seed(0)
        found = congruent_pairs(x, y, (a, b), self.rule.share, count, generator)
        return found.plans(len(a), len(b))

    def labelled(self) -> tuple[Tensor, Tensor, Tensor]:
        """Find plans (k, s, t) by labels of some points of one side, their costs and seeds."""
        device, rule = self.stack.problems.device, self.rule
        # points whose masses are strict are labelled
        turned = math.isinf(rule.rho[1]) and not math.isinf(rule.rho[0])
        tables = [side.table.double().to(device) for side in self.coarse.sides]
        # where all points are looked at they lie as they were given
        counts = (LABELS, POINTS) if turned else (POINTS, LABELS)
        few = [
            choose_points(PrecomputedDistance.unchecked(table), side.weights.to(device), count)
            for table, side, count in zip(tables, self.coarse.sides, counts, strict=True)
        ]
        # what surrounds a point is the same within a shared part, but not among some points of it
        near = [part[side.indices] for part, side in zip(nearest(*tables), few, strict=True)]
        (x, around), (y, there) = list(zip(few, near, strict=True))[:: -1 if turned else 1]
        generator = torch.Generator("cpu").manual_seed(0)
        weights, linear = (x.weights, y.weights), self.coarse.linear
        if linear is not None:
            rows, columns = (side.indices for side in few)
            alpha = float(self.coarse.alpha)
            linear = linear.to(x.table)[rows[:, None], columns] * (1 - alpha) / alpha
            linear = linear.mT if turned else linear
        labels = label_points(
            x.table, y.table, weights, rule.share, generator, (around, there), linear
        )
        found = labels.plans(len(y.weights))
        plans = found.new_zeros(len(found), len(self.rows), len(self.columns))
        rows, columns = (side.indices for side in few)
        plans[:, rows[:, None], columns] = found.mT if turned else found
        return plans, labels.costs, labels.met

    def follow(self, plans: Tensor) -> Ends:
        """Follow plans (k, s, t) to their ends."""
        device, (count, s, t) = self.stack.problems.device, plans.shape
        alone = torch.zeros(count, dtype=torch.int64, device=device)
        led = self.stack.follow(alone, self.stack.padded(plans.to(device)), _SEEDED)
        return led._replace(plans=led.plans[:, :s, :t].to(self.rows.device))


def _by_parts(incumbent: Incumbent) -> None:
    """Doubt a plan if part of the mass costs far less, and least where it is matched otherwise."""
    # Where parts of the two have other shares in each, strict marginals send some to wrong places,
    # and what is gained by sending the others there too may be more than what is lost.
    if not incumbent.has_parts:
        return
    outcome, problem = incumbent.lowest, incumbent.asked.problem
    strategy = outcome.strategy
    value, plan = outcome.value, outcome.ending.plan
    with outcome.recorder.timed("multistart"):
        rule = MarginalRule(mass=_PART)
        pairs = _Pairs.of(problem, _PART_POINTS, rule, _PART, strategy, by_programs=True)
        weights = pairs.coarse.source.weights
        # each point goes where the others of its side are as far as from its images
        images = list[Tensor]()
        height = len(weights)
        if problem.target.cheap_columns:
            height = max(1, BLOCK_ENTRIES // problem.target.n)
        for rows in pairs.rows.split(height):
            sent = plan.rows(rows).to(weights)
            columns = map(problem.target.columns, pairs.columns.split(min(height, _READ)))
            apart = torch.cat([sent @ part.to(weights) for part in columns], 1)
            images.append(apart / sent.sum(1, keepdim=True))
        apart = torch.cat(images)
        near = torch.softmax(-apart / (_IMAGES * apart.mean()), 1) * weights[:, None]
        limits = limits_of(problem.source.device)
        stack = replace(pairs.stack, rules=pairs.stack.rules._replace(max_iter=1))
        begun = pairs._replace(stack=stack).follow(near[None])
        if float(begun.values) >= limits.part_begun * value or is_over():
            return
        # side by side, as five take little longer than one
        led = pairs.follow(torch.cat([near[None], pairs.seeds(_PART_SEEDS).to(near)]))
    own, *others = zip(led.plans, led.values.tolist(), strict=True)
    if own[1] >= limits.part_ended * value:
        return
    shape, least = problem.shape, {True: own[1], False: math.inf}
    for end, costs in others:
        part = Alternative(costs, "part", end / end.sum(), pairs.rows, pairs.columns, shape)
        alike = sent_apart(problem, part, plan) <= OTHER
        least[alike] = min(least[alike], costs)
    enough = min(limits.part_ended * value, limits.part_otherwise * least[True])
    if least[False] < enough:
        incumbent.say(doubt=WHY_PARTS.format(share=_PART, times=value / least[False]))


def _by_edges(incumbent: Incumbent) -> None:
    """Where paths of graphs were compared and few edges kept, solve from a match of these too."""
    asked, outcome = incumbent.asked, incumbent.lowest
    problem, options, search = asked.problem, asked.options, outcome.search
    if not incumbent.strict or options.n_init is not None or options.search == "fast":
        return
    if outcome.matched is not None:
        _by_match(incumbent, outcome.matched)
        return
    graphs = None not in asked.graphs and outcome.strategy.can_subsample
    # where a match is certain nothing was searched
    if (
        graphs
        and "few points" in incumbent.moves
        and search is not None
        and not search.alternatives
    ):
        # nothing has matched graphs this large by their edges
        incumbent.doubt(WHY_SINGLE["thorough"])
    if search is None or not search.alternatives or not outcome.ending.status.converged:
        return
    blurred = outcome.ending.epsilon >= COMPARED_AT * outcome.strategy.scale
    if blurred or problem.linear is not None or not few_enough(problem, options.search):
        return
    value = outcome.value
    well = limits_of(problem.source.device).well
    if value <= well * outcome.strategy.scale and not search.doubt:
        return
    plan, clock = outcome.ending.plan, perf_counter()
    with outcome.recorder.timed("multistart"):
        match = match_edges(
            problem, asked.graphs, plan, bool(search.doubt), options.search, _batches(asked)
        )
    if match is None:
        return
    lower = match.keeps_more and incumbent.follow_found(match.found, clock)
    if not match.of_edges:
        # other entries have a say too, and vouch for no plan; but starts differ then
        if lower:
            incumbent.doubt(WHY_OPEN["auto"].format(count=len(search.trials) + 1))
        return
    assert incumbent.lowest.search is not None
    doubt = incumbent.lowest.search.doubt
    # a match that is not certain vouches for no plan that came from it
    ours = incumbent.lowest.ending.plan if match.certain else plan
    alike = sent_apart(problem, match.found, ours) <= OTHER
    if match.certain and alike and doubt != WHY_NOT_A_COPY:
        doubt = ""
    elif not (match.certain or alike):
        doubt = doubt or WHY_EDGES
    incumbent.say(doubt=doubt)


def _by_match(incumbent: Incumbent, match: GivenMatch) -> None:
    """End at a match of the edges of two graphs if that costs less; doubt what keeps fewer."""
    outcome, problem = incumbent.lowest, incumbent.asked.problem
    fewer = WHY_PART if match.certain and not match.of_all else WHY_UNMATCHED
    if match.exact:
        rows, columns = (torch.arange(size, device=match.plan.device) for size in problem.shape)
        found = Alternative(
            match.value.value, "edges", match.filled(problem.marginals), rows, columns,
            problem.shape, epsilon=0.0,
        )  # fmt: skip
        incumbent.follow_found(found, perf_counter())
    elif match.of_all:
        plan = outcome.ending.plan
        with outcome.recorder.timed("multistart"):
            own = match.value_of(plan)
        # of paths that were read, not of those by landmarks; with the entropy of both
        epsilon = outcome.ending.epsilon
        more = own.value - match.value.value
        more += epsilon * (outcome.ending.evaluation.kl - math.log(problem.source.n))
        if more > ERRORS * math.hypot(own.standard_error, match.value.standard_error):
            incumbent.lowest = end_at_match(incumbent.asked, match, outcome.recorder, fewer)
    if match.keeps(incumbent.lowest.ending.plan) < match.kept:
        incumbent.doubt(fewer)
    elif outcome.search is not None and not outcome.search.alternatives:
        incumbent.doubt(WHY_SINGLE["thorough"])


def _by_repair(incumbent: Incumbent) -> None:
    """Repair the better one of two whole solves in doubt, and solve from that too."""
    outcome, search = incumbent.lowest, incumbent.lowest.search
    if not incumbent.strict or search is None or not search.ended or not search.doubt:
        return
    best, epsilon, clock = search.alternatives[0], outcome.ending.epsilon, perf_counter()
    with outcome.recorder.timed("multistart"):
        asked = incumbent.asked
        problem, how = asked.problem.priced(outcome.strategy.scale), asked.options.search
        told = asked.options.told != "nothing"
        better = repair_found(problem, best, epsilon, how, _batches(asked), told=told)
    if better is not None:
        incumbent.follow_found(better, clock)


def _by_exchanges(incumbent: Incumbent) -> None:
    """Solve from the best matching of few points, or from plans whose entries exchange partners."""
    strategy, problem = incumbent.lowest.strategy, incumbent.asked.problem
    limits, larger = limits_of(problem.source.device), max(problem.shape)
    few, many = larger <= limits.exchanged_points, larger <= limits.all_points
    matched = many and incumbent.searched and strategy.facts.assignment
    looked_at = strategy.options.sharp if few else matched
    if not (looked_at and incumbent.strict and problem.loss.cross is not None):
        return
    while _exchange(incumbent, few):
        pass


def _exchange(incumbent: Incumbent, few: bool) -> bool:
    """Follow the best matching, or the best exchange; tell whether another may be lower still."""
    asked, outcome, search = incumbent.asked, incumbent.lowest, incumbent.lowest.search
    problem, clock = asked.problem, perf_counter()
    shape = problem.shape
    if search is None or not outcome.ending.status.converged or is_over():
        return False
    whole = coarse_problem(problem.priced(outcome.strategy.scale), max(shape)).problem
    source, target = (side.indices for side in whole.sides)
    before = outcome.ending.plan.to_dense()[source[:, None], target].to(whole.base)
    partners = None
    if can_exchange(whole):
        partners = best_matchings(whole, before[None])[0][0]
    elif not few:
        # steps with entropy stop near a matching, from which exchanges may lead lower; where other
        # optima are told of anyway, that is asked of matchings alone
        blur = 1 - float(before.amax(1).sum() / before.norm()) / math.sqrt(len(before))
        first, most = incumbent.first, limits_of(whole.base.device).left_open
        told = first is not None and (first.doubt or first.ambiguity > most)
        partners = walk_from(whole, before) if blur <= (SAME if told else OTHER) else None
        if partners is None:
            return False
    if partners is not None:
        plan = torch.nn.functional.one_hot(partners, before.shape[1]).to(before) / len(before)
    else:
        plan, better = before, None if problem.directed else before
        while better is not None:
            plan, cost = better, whole.linearised(better[None])[0]
            better = exchange(-2 * whole.alpha * whole.x, whole.y, cost, plan)
    value = float(whole.value(plan[None]))
    nothing = max(EQUAL * outcome.strategy.scale, whole.rounding())
    if value >= outcome.value - nothing:
        return False
    better = Alternative(value, "exchanges", plan, source, target, shape, epsilon=0.0)
    if few:
        return _follow_sharp(incumbent, better, clock) and partners is None
    lower = incumbent.follow_found(better, clock)
    if lower:
        incumbent.doubt(WHY_OPEN["auto"].format(count=len(search.trials) + 1))
    return lower


def _follow_sharp(incumbent: Incumbent, better: Alternative, clock: float) -> bool:
    """Solve from a plan that steps with entropy would leave, whatever it passes on its way."""
    guess = from_alternative(better, incumbent.asked.problem.source.device)._replace(sharp=True)
    options = replace(incumbent.asked.options, regularization="proximal")
    rival = Rival(incumbent.asked._replace(options=options).again(guess), "start", better.label)
    return incumbent.follow_found(better, clock, rival)


def _by_turns(incumbent: Incumbent) -> None:
    """Solve from the best plan of all turns of the plane, where few points leave open which."""
    asked, outcome, search = incumbent.asked, incumbent.lowest, incumbent.first
    problem = asked.problem
    if "turns" not in incumbent.moves or not incumbent.strict or problem.support is not None:
        return
    if search is None or not search.others or not outcome.ending.status.converged:
        return
    clock = perf_counter()
    outcome.strategy.forecast.say_turns()
    with outcome.recorder.timed("multistart"):
        plan = best_turned(problem, outcome.ending.plan.to_dense().double().cpu().numpy())
    if plan is None:
        return
    found = torch.from_numpy(plan).to(problem.source.device)
    shape = problem.shape
    source, target = (torch.arange(size, device=found.device) for size in shape)
    better = Alternative(0.0, "turns", found, source, target, shape, epsilon=0.0)
    value, own = _value(problem, better), outcome.value
    if value < own - max(EQUAL * outcome.strategy.scale, AGREED * abs(own)):
        _follow_sharp(incumbent, replace(better, value=value), clock)


def _from_lowest_seen(incumbent: Incumbent) -> None:
    """Solve from the lowest plan of all points that a search has listed, where all end higher."""
    asked, outcome, search = incumbent.asked, incumbent.lowest, incumbent.first
    problem, epsilon = asked.problem, outcome.ending.epsilon
    if not incumbent.strict or problem.support is not None or search is None:
        return
    if not outcome.ending.status.converged or outcome.noise is not None:
        # numbers of a plan on its way, or of a sample
        return
    shape = problem.shape
    whole = [one for one in search.alternatives if one.plan.shape == shape]
    if not whole:
        return
    a, b = problem.marginals
    objectives = [
        (one.value if problem.loss.cross is not None else _value(problem, one))
        + epsilon * entropy(one.plan, a[one.source], b[one.target])
        for one in whole
    ]
    lowest = min(objectives)
    better, own = whole[objectives.index(lowest)], outcome.objective
    nothing = max(EQUAL * outcome.strategy.scale, AGREED * abs(own))
    if lowest >= own - nothing:
        return
    # steps from a larger epsilon have left it; short ones from the plan itself stay
    guess = from_alternative(better, problem.source.device)._replace(epsilon=0.0, ended=True)
    rival = Rival(asked.again(guess), "start", better.label)
    incumbent.follow_found(better, perf_counter(), rival)
    own = incumbent.lowest.objective
    if own - lowest > AGREED * abs(own) and incumbent.lowest.search is not None:
        incumbent.doubt(WHY_LEFT.format(lowest=lowest, own=own))


def _value(problem: Problem, one: Alternative) -> float:
    """Evaluate a plan of all points; a search does so roughly for losses that are no products."""
    plan = torch.zeros(problem.shape, dtype=torch.float64, device=one.plan.device)
    plan[one.source[:, None], one.target] = one.plan.double()
    crossed = (problem.cross()(plan.to(problem.dtype)) * plan).sum()
    value = problem.alpha * float(own_value(problem, problem.marginals) - 2 * crossed)
    if problem.linear is not None:
        value += (1 - problem.alpha) * float((problem.linear.dense().matrix * plan).sum())
    return value


# In the order in which they are made; each looks at what the moves before it have left.
MOVES: tuple[Callable[[Incumbent], None], ...] = (
    _from_starts, _from_labels, _by_edges, _by_repair, _by_turns, _by_exchanges,
    _from_lowest_seen, _by_parts,
)  # fmt: skip


def _batches(asked: Asked) -> Backend:
    """Choose what runs Sinkhorn's iterations of chains."""
    return choose_backend(asked.options.backend, asked.problem.source.device, torch.float32)


class _NoLower:
    """Whether a solve will come to no lower objective than an earlier one, by those on its path."""

    def __init__(self, earlier: Outcome, *, alike: bool, again: bool = False) -> None:
        path = earlier.recorder.history
        # if both are `alike` they lead to the same optimum, or to ones next to each other; and
        # both may begin at one plan, which is followed `again` another way
        last = {step.epsilon: step.objective for step in path}
        self._falls, self._objectives = [-math.log(epsilon) for epsilon in last], [*last.values()]
        self._target, self._alike, self._above = path[-1].epsilon, alike, math.inf
        # on its path marginals may have been missed, and objectives lower
        self._lowest, self._before = max(path[-1].objective, earlier.objective), math.inf
        self._start, self._again = path[0].epsilon, again

    def __call__(self, now: Iteration) -> bool:
        """Compare an iteration with the earlier path at the same epsilon."""
        fall, self._before = self._before - now.objective, now.objective
        if now.iteration < _FORGOTTEN:
            return False
        above, near = now.objective - self._lowest, AGREED * abs(self._lowest)
        if now.epsilon <= self._target and (above > near or self._again):
            # what is left of a fall that slows down; an end as low has been found from there
            return above + (near if abs(above) <= near else 0.0) > STEPS_LEFT * max(fall, 0.0)
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
        other = solve_once(asked.again(plan), aside)
        second = _told("all points", other, perf_counter() - clock)
    ends = sorted([(first, found), (second, other)], key=lambda end: end[0].objective)
    trials = tuple(trial for trial, _ in ends)
    doubt = "" if ends_settle(trials) else WHY_APART
    return _searched_by(search._replace(trials=trials, doubt=doubt), ends[0][1], found)


@contextmanager
def _aside(asked: Asked, found: Outcome) -> Iterator[Recorder]:
    """Record one more solve, with the draws that it would have alone, as part of the search."""
    asked.generator.manual_seed(asked.generator.initial_seed())
    recorder = Recorder()
    with found.recorder.timed("multistart"):
        yield recorder
    recorder.timings = found.recorder.timings


def _searched_by(search: Search, best: Outcome, first: Outcome) -> Outcome:
    """Say what a search has found; what is said of the plan itself goes first."""
    own = best.search.doubt if best.search else ""
    # a plan from which one more solve began was not passed by the user
    return best._replace(search=search._replace(doubt=own or search.doubt), route=first.route)


def _told(start: str, outcome: Outcome, seconds: float) -> Trial:
    """Report what a whole solve from a start has come to."""
    epsilon = outcome.ending.epsilon
    return Trial(start, epsilon, outcome.objective, outcome.value, seconds, "refined")


def _no_higher_than(searched: Outcome, again: Rival) -> Outcome:
    """Solve in another way as well, if there was a search; return what is lower, list the other."""
    search, asked, problem = searched.search, again.asked, again.asked.problem
    if search is None or not search.alternatives or searched.ending.status is Status.STOPPED:
        return searched
    nothing = EQUAL * searched.strategy.scale
    if again.way == "optimum":
        # a mirror image of the plan ends at the same objective, up to the tolerances
        nothing = max(nothing, AGREED * abs(searched.objective))
    rule = asked.options.rule
    if _costs_nothing(searched):
        return searched
    with _aside(asked, searched) as aside:
        if again.way == "optimum":
            same = again.label == search.alternatives[0].label
            aside.callback = _NoLower(searched, alike=False, again=same)
        if again.way == "search":
            default = Incumbent(asked, _solve_searched(asked, aside))
            _from_starts(default)
            other = default.lowest
        else:
            followed = follow(asked, aside)
            if followed.state.status is Status.STOPPED:
                return searched
            other = conclude(asked, followed)
    # a polished plan has its marginals, whether its steps have come to an end or not
    status = other.ending.status
    if not (status.converged or status is Status.POLISH_LIMIT):
        return searched
    lower = other.objective < searched.objective - nothing
    found = other.search or Search((), math.nan, doubt=search.doubt)
    label = found.alternatives[0].label if found.alternatives else again.label
    told = searched, search.alternatives[0].label
    both = ((other, label), told) if lower else (told, (other, label))
    # relaxed plans are listed by their objectives
    ends = [
        End(one.ending.plan, one.value if rule is None else one.objective, name)
        for one, name in both
    ]
    pair, new = (ends[0], ends[1]), int(not lower)
    search = with_end(search, problem, pair, new, relaxed=rule is not None)
    if not lower:
        return searched._replace(search=search)
    doubt = found.doubt
    if again.way == "search" and doubt != WHY_NOT_A_COPY:
        # the longer search has ended at another plan
        doubt = WHY_OPEN["thorough"].format(count=len(search.trials))
    # another solve of that search may have ended lower than its first
    own = replace(other.recorder, timings=aside.timings)
    return other._replace(search=search._replace(doubt=doubt), recorder=own)


def _costs_nothing(outcome: Outcome) -> bool:
    """Whether a plan keeps all distances and marginals up to rounding: no plan costs less."""
    problem, found = outcome.strategy.problem, outcome.ending.evaluation
    if problem.linear is not None:
        return False
    cost = found.value(problem.alpha) + found.penalty + found.quadratic.standard_error
    return cost <= EQUAL * outcome.strategy.scale


def _solve_for_mass(asked: Asked, recorder: Recorder) -> Outcome:
    """Solve for one mass after the other, until it is the mass of the plan."""
    # The objective of a plan of mass t, over t squared, has the linear cost M / t: the plan for one
    # mass gives the next mass, and these are extrapolated until they agree.
    options = asked.options
    rule = options.rule
    assert rule is not None
    tried: list[tuple[float, float]] = []
    mass, asked = 1.0, asked._replace(checkpoint=None, made=())
    first: Outcome | None = None
    while True:
        options = replace(options, rule=replace(rule, held=mass))
        outcome = _solve_searched(asked._replace(options=options), recorder)
        first = first or outcome
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
    # those of the first mass; the others begin where it ended
    return outcome._replace(search=first.search, route=first.route)


def _next(tried: list[tuple[float, float]]) -> float:
    """Find where the change of a logarithm vanishes: a bounded secant step from two values."""
    here, change = tried[-1]
    step = change
    if len(tried) > 1:
        slope = (change - tried[-2][1]) / (here - tried[-2][0])
        step = -change / slope if slope < 0 else change
    return here + max(-1.0, min(1.0, step))
