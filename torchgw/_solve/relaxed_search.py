"""Where relaxed problems begin: a coarse relaxed problem, solved from several starts and compared.

Optima of strict marginals are starts here, no more: which of them is best depends on what relaxing
the marginals makes of it.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._problem.limits import limits_of
from torchgw._problem.marginals import MarginalRule
from torchgw._problem.problem import Problem
from torchgw._search.all_points import search_twice
from torchgw._search.alternatives import Alternative, Search
from torchgw._search.chain import AGREEING
from torchgw._search.coarse import coarse_table, directed_points, represent
from torchgw._search.doubts import WHY_RELAXED
from torchgw._search.maps import Sides, best_maps
from torchgw._search.optima import DEFAULT_STARTS, find_optima
from torchgw._search.population import improve, name_of
from torchgw._search.stack import MISSED, Ends, Stack, can_stack
from torchgw._search.standard import StandardForm, put_in_standard_form
from torchgw._search.starts import GUESS_EPSILON
from torchgw._search.structure import tells_all
from torchgw._sinkhorn.annealing import Annealing
from torchgw._sinkhorn.problem import DenseCost
from torchgw._solve.begin import PRODUCT, Guess, from_alternative, starting_point
from torchgw._solve.evaluation import evaluate_relaxed
from torchgw._solve.loop import iterate
from torchgw._solve.settle import settle
from torchgw._solve.state import Recorder
from torchgw._solve.strategy import Strategy, choose_strategy
from torchgw._typing import Marginals
from torchgw.distances.precomputed import DirectedDistance, PrecomputedDistance

# How far each start is solved: enough to tell which optimum it has come to. [L297]
_OUTER, _INNER, _TOLERANCE = 60, 200, 1e-3
# L1 distance of normalised plans above which they are different optima. [L297]
_DISTINCT = 0.1
# Lowest epsilon as a share of the natural scale, as in a search with strict marginals. [L297]
_LEAST_EPSILON = 1e-3
# Penalties above this multiple of the natural scale are compared as strict marginals: they would
# multiply the marginal errors that these few iterations leave. [L970]
_HARD = 1e4
# Starts from the neighbours of a point of either side; rounds that improve the best; relative noise
# on the product plan. [L1292]
_BALLS, _ROUNDS, _NOISE = 16, 8, 1e-6


class _Found(NamedTuple):
    """Where a start has ended."""

    label: str
    objective: float  # with penalty and entropy
    missed: bool
    plan: Tensor  # (s, t) float64, of mass one


def search_relaxed(
    problem: Problem, strategy: Strategy, generator: torch.Generator, again: str | None
) -> tuple[Guess, Search]:
    """Find the best start of a relaxed problem, and the optima that were found."""
    rule = strategy.options.rule
    assert rule is not None
    # squared penalties see how the mass of copies of a point is divided
    standard = None if rule.squares else put_in_standard_form(problem)
    if standard is None:
        search = _search(problem, strategy, generator, again)
    else:
        small = _in_units_of(standard, strategy)
        search = standard.lift(_search(standard.problem, small, generator, again))
    if not search.alternatives:
        return PRODUCT, search
    return from_alternative(search.alternatives[0], problem.source.device), search


def _in_units_of(standard: StandardForm, strategy: Strategy) -> Strategy:
    """Return what was chosen for a problem, in the units of its standard form."""
    rule = strategy.options.rule
    assert rule is not None
    rho = standard.turned(*(weight / standard.factor for weight in rule.rho))
    rule = replace(rule, rho=rho, totals=standard.turned(*rule.totals))
    facts = strategy.facts._replace(
        spread=strategy.spread / standard.factor, epsilon=standard.epsilon(strategy.epsilon)
    )
    return replace(strategy, options=replace(strategy.options, rule=rule), facts=facts)


def _search(
    problem: Problem, strategy: Strategy, generator: torch.Generator, again: str | None
) -> Search:
    """Search for the best optimum of a relaxed problem."""
    # Where few points do not represent the spaces that is a x b, or what few have found; a second
    # solve, if there can be one by a gradient, is compared with it.
    # The starts are a x b annealed from a large epsilon, a x b at the target epsilon, and the best
    # optima of strict marginals.
    # All of it runs on the CPU: launches would take longer than the work. Nothing is drawn from the
    # generator, as the gradients here are exact.
    # iterations of a loss that is no product take too long for many starts
    represented = None if problem.loss.cross is None else represent(problem)
    how = strategy.options.search
    if represented is None:
        return search_twice(problem, how, again, relaxed=True)
    coarse = represented.problem
    sides = directed_points(coarse[:2], problem)
    kind = DirectedDistance if problem.directed else PrecomputedDistance
    source, target = (kind(coarse_table(problem.loss, side).cpu()) for side in sides)
    # each start takes as long as the whole solve: 500 x 480 points 85 s for 1% of the objective
    most = limits_of(problem.source.device).relaxed_points
    many = max(len(side.indices) for side in sides) > most
    if many and strategy.options.n_init is None:
        return search_twice(problem, how, again, relaxed=True)
    small = Problem(
        source,
        target,
        Marginals(*(side.weights.cpu() for side in sides)),
        problem.alpha,
        None if coarse.linear is None else DenseCost(coarse.linear.cpu()),
        problem.loss,
    )
    rule = strategy.options.rule
    assert rule is not None
    hard = [math.inf if rho > _HARD * strategy.scale else rho for rho in rule.rho]
    level = replace(rule, rho=(hard[0], hard[1]))
    epsilon = max(strategy.epsilon, _LEAST_EPSILON * strategy.scale) * strategy.mass
    options = replace(
        strategy.options, epsilon=epsilon, rule=level,
        gradient="dense", n_anchors=None, max_iter=_OUTER, tol=_TOLERANCE, inner_max_iter=_INNER,
        inner_tol=_TOLERANCE, backend="auto", precision="float64", storage="stored", polish=False,
        skip_tiles=False,
    )  # fmt: skip
    strict = find_optima(small, epsilon, options.n_init or DEFAULT_STARTS)
    cpu, device, doubt = torch.device("cpu"), problem.source.device, ""
    if can_stack(small) and not rule.squares:
        found, agreed = _improved(Stack.of(coarse, epsilon, level), small, level, strict)
        doubt = "" if agreed else WHY_RELAXED
    else:
        starts = [("annealed", PRODUCT), ("product", Guess(None, None, 0.0))]
        starts += [(one.label, from_alternative(one, cpu)) for one in strict.alternatives]
        few = choose_strategy(small, options)
        found = [_solve(few, label, guess, generator) for label, guess in starts]
        found = _distinct(sorted(found, key=lambda one: (one.missed, one.objective)))
    shape = problem.source.n, problem.target.n
    points = [side.indices for side in sides]
    alternatives = tuple(
        Alternative(one.objective, one.label, one.plan.to(device), points[0], points[1], shape)
        for one in found
    )
    if small.source.n == shape[0] and small.target.n == shape[1]:
        # all points were searched: a larger epsilon would only lead away from the optimum
        alternatives = tuple(replace(one, epsilon=0.0) for one in alternatives)
        return Search(alternatives, float("nan"), doubt=doubt)
    found_by_few = Search(alternatives, float("nan"), resolution=represented.resolution)
    if not tells_all(problem, found_by_few):
        found_by_few = search_twice(problem, how, again, relaxed=True)
    return found_by_few._replace(alternatives=alternatives)


def _improved(
    stack: Stack, small: Problem, rule: MarginalRule, strict: Search
) -> tuple[list[_Found], bool]:
    """Follow many starts to their ends on a stack, and improve them; whether groups agreed."""
    a, b = small.marginals
    product = torch.outer(a, b)
    generator = torch.Generator("cpu").manual_seed(0)
    noise = torch.randn(product.shape, device="cpu", generator=generator, dtype=torch.float64)
    product = product * (1 + _NOISE * noise)
    starts = [("product", product)]
    alone = torch.zeros(1, dtype=torch.int64, device="cpu")
    annealed = stack.follow(alone, stack.padded(product[None]), first=1.0).plans[0]
    starts.append(("annealed", annealed[: len(a), : len(b)]))
    for one in strict.alternatives:
        plan = torch.zeros_like(product)
        plan[one.source.cpu()[:, None], one.target.cpu()] = one.plan.cpu()
        starts.append((one.label, plan))
    # the neighbours of a point of either side, of as much mass as moves
    share = 0.5 if rule.mass is None else rule.mass
    every = (*(torch.arange(side.n, device="cpu") for side in (small.source, small.target)),)
    tables = small.source.columns(every[0]), small.target.columns(every[1])
    sides = list(zip(tables, (a, b), strict=True))
    for number in range(_BALLS):
        near = [_ball(*side, share, generator) for side in sides]
        starts.append((f"ball {number}", torch.outer(near[0] * a, near[1] * b)))
    maps = _maps(tables, small, rule, torch.stack([plan for _, plan in starts]))
    starts += [(f"map {place + 1}", plan) for place, plan in enumerate(maps)]
    # from a larger epsilon they come to other optima
    alone = alone.expand(len(starts))
    plans = stack.padded(torch.stack([plan for _, plan in starts]))
    plans = torch.cat([plans, stack.follow(alone, plans, GUESS_EPSILON).plans])
    ends = stack.follow(alone.repeat(2), plans)
    found = improve(stack, Ends(*(part[None] for part in ends)), _ROUNDS)
    labels = [label for label, _ in starts]
    labels += [f"{label}, blurred" for label in labels]
    members = found.members.alone()
    # values without entropy are not compared here: the penalty decides what the mass is
    told = zip(*members[:2], members.origins.tolist(), strict=True)
    return [
        _Found(
            name_of(origin, labels), float(objective), False,
            plan[: len(a), : len(b)] / plan.sum(),
        )
        for plan, objective, origin in told
    ], bool(found.agreed | (found.met >= AGREEING))  # fmt: skip


def _maps(
    tables: tuple[Tensor, Tensor], small: Problem, rule: MarginalRule, plans: Tensor
) -> Tensor:
    """Find the best maps of a side whose marginal is strict into one that is free, (k, n, m)."""
    if rule.mass is not None or sorted(rule.rho) != [0, math.inf]:
        return plans[:0]
    linear = None if small.linear is None else small.linear.dense().matrix
    sides = Sides(*tables, small.marginals.a, small.alpha, linear)
    if rule.rho[1] == 0:
        return best_maps(sides, plans)
    turned = None if linear is None else linear.mT
    return best_maps(
        sides._replace(x=sides.y, y=sides.x, a=small.marginals.b, linear=turned), plans.mT
    ).mT


def _ball(table: Tensor, weights: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Choose the points nearest to one that is drawn, which have a share of the mass."""
    centre = int(torch.randint(len(table), (1,), device="cpu", generator=generator))
    order = table[centre].argsort()
    inside = torch.zeros_like(weights)
    inside[order] = (weights[order].cumsum(0) - weights[order] < share).to(weights)
    return inside


def _solve(strategy: Strategy, label: str, guess: Guess, generator: torch.Generator) -> _Found:
    """Solve the coarse problem from a start."""
    start = max(strategy.epsilon, guess.epsilon * strategy.scale)
    anneal = Annealing(start, strategy.epsilon)
    setting = strategy.setting(torch.float64, _TOLERANCE, anneal, generator, Recorder())
    state = iterate(setting, starting_point(setting, guess))
    plan, _ = settle(setting, state, torch.float64)
    assert setting.rule is not None
    plan, found = evaluate_relaxed(setting, plan, setting.rule)
    table = plan.to_dense()
    missed = found.marginal_error > MISSED * found.mass
    objective = found.objective(setting.problem.alpha, strategy.epsilon * strategy.mass)
    return _Found(label, objective, missed, table / table.sum())


def _distinct(found: list[_Found]) -> list[_Found]:
    """Keep the first of plans that are alike."""
    kept: list[_Found] = []
    for one in found:
        if all(float((one.plan - other.plan).abs().sum()) > _DISTINCT for other in kept):
            kept.append(one)
    return kept
