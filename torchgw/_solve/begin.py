"""Where a solve begins: what the user passed, or what a search has found."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgw._boundary.arrays import check_plan, to_tensor
from torchgw._errors import InvalidInputError, InvalidTypeError
from torchgw._plans.contract import Anchors
from torchgw._plans.given import PairPlan, StoredPlan
from torchgw._plans.transport import DualPlan
from torchgw._problem.limits import limits_of
from torchgw._problem.problem import MarginalRule, Problem
from torchgw._search import all_points
from torchgw._search.optima import DEFAULT_STARTS, LEAST_EPSILON, Searched, find_optima
from torchgw._search.population import Ending, follow_starts, noisy_product
from torchgw._search.stack import Stack, can_stack, neighbourhoods
from torchgw._search.tabu import maps_where_free
from torchgw._sinkhorn.annealing import ANNEALING_TOLERANCE, Annealing
from torchgw._sinkhorn.choose import choose_backend
from torchgw._sinkhorn.problem import DenseCost
from torchgw._solve.evaluation import evaluate_relaxed, settle
from torchgw._solve.loop import INNER, LINEAR, PATIENT, PRODUCT, Guess, iterate, starting_point
from torchgw._solve.state import Options, Recorder
from torchgw._solve.strategy import Strategy, choose_strategy
from torchgw._starts.alternatives import (
    WHY_RELAXED,
    WHY_SUBSAMPLE,
    Alternative,
    Ends,
    Search,
    is_whole,
)
from torchgw._starts.chain import AGREEING, GUESS_EPSILON
from torchgw._starts.coarse import coarse_table, directed_points, represent, support_of
from torchgw._starts.guesses import congruent_pairs
from torchgw._starts.isometry import Isometry, match_points
from torchgw._starts.standard import StandardForm, put_in_standard_form
from torchgw._starts.subsample import Coarse
from torchgw._typing import Marginals, Potentials
from torchgw.distances.precomputed import DirectedDistance, PrecomputedDistance


def named_start(init: Any) -> str:
    """Say what was passed as ``init``; nothing is empty."""
    if init is None:
        return ""
    if isinstance(init, Guess):
        return init.named
    if isinstance(init, tuple) and not isinstance(init, Anchors):
        return "potentials"
    return "an optimum of a search" if isinstance(init, Alternative) else "a plan or a matching"


def searchable(problem: Problem, init: Any, options: Options) -> bool:
    """Whether to search for a start: none is given, and there may be several optima."""
    if init is not None and (options.n_init or 1) > 1:
        raise InvalidInputError(
            f"`init` says where to start, so `n_init={options.n_init}` starts have no use. Pass "
            "one of them."
        )
    trivial = problem.alpha == 0 or min(problem.shape) == 1
    # few points say little of what others may be matched with, or of how groups stand to each other
    trivial |= problem.restriction is not None
    trivial |= options.rule is None and problem.has_one_plan
    return init is None and options.n_init != 1 and not trivial


def read_init(init: Any, marginals: Marginals, mass: float | None = 1.0) -> Guess:
    """Read the start that ``init`` asks for, of a problem whose plans have a mass, or any."""
    if isinstance(init, Guess):
        return init
    return _as_guess(init, marginals, mass)._replace(named=named_start(init))


def _as_guess(init: Any, marginals: Marginals, mass: float | None) -> Guess:
    # A plan is continued at the target epsilon. Pairs and optima of a coarse problem are rough:
    # they are taken up at a larger epsilon, which smooths them without forgetting them.
    device = marginals.a.device
    shape = (len(marginals.a), len(marginals.b))
    if init is None:
        return PRODUCT
    if isinstance(init, Alternative):
        _check_shape(init.shape, shape)
        return from_alternative(init, device)
    if isinstance(init, tuple) and not isinstance(init, Anchors):
        return Guess(None, _potentials(init, shape, device), 0.0, whole=True)
    plan = getattr(init, "lazy_plan", init)
    if isinstance(plan, DualPlan):
        _check_shape(plan.shape, shape)
        here, name = plan.potentials.f.device, "init" if plan is init else "init.lazy_plan"
        if here != device:
            raise InvalidInputError(
                f"`init` lies on {here}, the problem on {device}. Pass `device={str(here)!r}` or "
                f"`init={name}.to_dense()`."
            )
        return Guess(plan.giving(in_numpy=False), plan.potentials, 0.0)
    if hasattr(plan, "to_dense") and not isinstance(plan, Tensor):
        name = "init" if plan is init else "init.lazy_plan"
        raise InvalidTypeError(
            f"`{name}` is a {type(plan).__name__}, which is read by products alone. Pass "
            f"`{name}.to_dense()`."
        )
    # a matching has pairs
    table = to_tensor("init", getattr(init, "pairs", init))
    if not table.dtype.is_floating_point and table.dtype is not torch.bool:
        return Guess(_matching(table.to(device).long(), marginals), None, GUESS_EPSILON)
    return Guess(StoredPlan(check_plan(table, shape, mass).to(device)), None, 0.0)


def from_alternative(found: Alternative, device: torch.device) -> Guess:
    """Turn an optimum of a coarse problem into a start for the whole one."""
    parts = found.plan, found.source, found.target
    plan, source, target = (to_tensor("init", part) for part in parts)
    s, t = plan.shape
    pairs = Anchors(source.repeat_interleave(t), target.repeat(s))
    mass = plan.flatten()
    used = mass > 0
    pairs = Anchors(*(side[used].to(device) for side in pairs))
    distinct = all(len(set(side.tolist())) == len(side) for side in (source, target))
    pair_plan = PairPlan(pairs, mass[used].to(device), found.shape, distinct=distinct)
    return Guess(pair_plan, None, found.epsilon)


def _potentials(init: tuple[Any, ...], shape: tuple[int, int], device: torch.device) -> Potentials:
    if any(isinstance(item, Alternative) for item in init):
        raise InvalidInputError(
            f"`init` has {len(init)} optima of a search. Pass one, as result.alternatives[1]."
        )
    if len(init) != 2:
        raise InvalidInputError(
            f"`init` as a tuple must be a pair of potentials (f, g); got {len(init)} items. "
            "Pass a plan or a matching as an array."
        )
    parts = []
    for name, value, size in zip("fg", init, shape, strict=True):
        part = to_tensor("init", value).to(device, torch.float64)
        if tuple(part.shape) != (size,):
            raise InvalidInputError(
                f"`init` as a pair of potentials (f, g) must have shapes ({shape[0]},) and "
                f"({shape[1]},); got {tuple(part.shape)} for {name}."
            )
        if not bool(torch.isfinite(part).all()):
            raise InvalidInputError(f"`init` has NaN or infinity in the potential {name}.")
        parts.append(part)
    return Potentials(*parts)


def _matching(table: Tensor, marginals: Marginals) -> PairPlan:
    """Make the coupling of a matching: a partner of each source point, or pairs of indices."""
    a, b = marginals
    n, m = len(a), len(b)
    if table.ndim == 2 and table.shape[1] == 2 and len(table):
        source, target = table.unbind(1)
        mass = a.new_full((len(table),), 1 / len(table))
    elif tuple(table.shape) == (n,):
        source = (table != -1).nonzero()[:, 0]
        target = table[source]
        mass = a[source] / a[source].sum()
    else:
        raise InvalidInputError(
            f"`init` as a matching must be integers of shape ({n},), the target of each source "
            f"point or -1 for none, or (pairs, 2); got shape {tuple(table.shape)}. A plan has "
            "floating-point entries."
        )
    for name, index, size in (("source", source, n), ("target", target, m)):
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < size:
            raise InvalidInputError(
                f"`init` as a matching must have {name} indices within 0 and {size - 1}; got "
                f"{int(index.min())} to {int(index.max())}."
            )
    if not len(mass) or not bool(torch.isfinite(mass).all()):
        raise InvalidInputError("`init` as a matching must match at least one point with weight.")
    return PairPlan(Anchors(source, target), mass, (n, m))


def _check_shape(got: tuple[int, int], expected: tuple[int, int]) -> None:
    if got != expected:
        raise InvalidInputError(f"`init` must be a plan of shape {expected}; got {got}.")


def first_guess(
    problem: Problem,
    sample: Coarse | None,
    options: Options,
    epsilon: float,
    match: Isometry | None = None,
    made: Sequence[Searched] = (),
    again: str | None = None,
) -> tuple[Guess, Search]:
    """Find where to start, on the subsample if there is one, and what a multi-start found."""
    # A `match` that keeps all distances is the start, if there is one: no other optimum is better.
    # Searches that were `made` before are not made again.
    # `again` is the gradient by which the problem can be solved from another start as well.
    standard = put_in_standard_form(problem) if sample is None else None
    searched = problem if sample is None else sample.problem
    if standard is not None:
        searched, epsilon = standard.problem, standard.epsilon(epsilon)
    backend = choose_backend(options.backend, problem.source.device, torch.float32)
    copies = None
    if match is not None and standard is not None:
        points = torch.arange(problem.source.n, device=match.partners.device)
        plan = problem.marginals.a.diag()
        kept = Alternative(0.0, "copies", plan, points, match.partners, (len(plan), len(plan)))
        copies = standard.lower(kept).plan
    count = options.n_init or DEFAULT_STARTS
    if match is not None:
        a, b = problem.marginals
        pairs = Anchors(torch.arange(len(a), device=a.device), match.partners)
        # potentials of zero are optimal at a match that keeps all distances
        zero = Potentials(torch.zeros_like(a), torch.zeros_like(b))
        guess = Guess(PairPlan(pairs, a, (len(a), len(b))), zero, 0.0, whole=True)
        if match.only:
            return guess, Search((), math.nan)
    plain = options.n_init is None and options.search != "fast" and problem.loss.cross is not None
    limits = limits_of(problem.source.device)
    chains = limits.few_chains if plain else 0
    search = find_optima(searched, epsilon, count, backend, made, match=copies, chains=chains)
    if match is not None:
        # a search on few points may say nothing of the others, and so nothing of other optima
        told = is_whole(searched, search) or all_points.is_structured(searched, search)
        if not told:
            return guess, Search((), math.nan)
        return guess, search if standard is None else standard.lift(search)
    # whether only some points were searched, and they do not tell the best optimum from the others
    unsure = not is_whole(searched, search) and search.ambiguity > limits.left_open
    matched = match_points(searched) if unsure or not search.alternatives else None
    alone = matched is not None and not search.alternatives
    if sample is None:
        search = all_points.search_all_points(
            searched, epsilon, search, options.n_init, options.search, again,
            backend=backend, told=options.told == "all",
            sharpened=options.regularization == "proximal",
        )._replace(match=matched)  # fmt: skip
    if standard is not None:
        search = standard.lift(search)
    if alone and not search.alternatives:
        guess = Guess(matched if sample is not None else search.match, None, GUESS_EPSILON)
    elif search.compare or not search.alternatives:
        # where nothing is compared, what a linear cost tells would be lost in annealing
        told = problem.linear is not None and not search.compare and sample is None
        guess = LINEAR if told else PATIENT
    else:
        guess = best_found(problem, search)
        if guess.plan is not None and (options.regularization == "entropic" or search.met):
            guess = guess._replace(potentials=search.potentials, whole=True, sharp=search.met)
        guess = guess._replace(ended=search.settled)
    if sample is not None:
        search = sample.lift(search, problem.shape)
        if options.search == "thorough":
            search = search._replace(doubt=WHY_SUBSAMPLE)
    return guess, search


def best_found(problem: Problem, search: Search) -> Guess:
    """Begin at the best optimum that a search has found."""
    if all_points.is_blurred(problem, search):
        # begun at the smaller epsilon of the optimum, the plan would stay where it is
        return PRODUCT
    guess = from_alternative(search.alternatives[0], problem.source.device)
    return guess._replace(patient=search.compare)


# Change of a plan at which it is told which optimum it has come to: what follows settles it, in
# float64, or at all points. [L139, L297]
ROUGH_TOLERANCE = 1e-3
# Iterations of each start of a relaxed problem. [L297]
_OUTER = 60
# Starts from congruent pairs; rounds that improve the best, and where they are whole solves.
# [L1292, L1401, L1492]
SEEDS, _ROUNDS, _SOLVED = 16, 8, 2
# Starts at pairs that are allowed, and the deviation of their logarithms. [L1540]
_ALLOWED, _SPREAD = 8, 4.0


def search_relaxed(
    problem: Problem, strategy: Strategy, generator: torch.Generator, again: str | None
) -> tuple[Guess, Search]:
    """Find the best start of a relaxed problem, and the optima that were found."""
    rule = strategy.options.rule
    assert rule is not None
    standard = put_in_standard_form(problem)
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
        spread=strategy.facts.spread / standard.factor, epsilon=standard.epsilon(strategy.epsilon)
    )
    return replace(strategy, options=replace(strategy.options, rule=rule), facts=facts)


def _search(
    problem: Problem, strategy: Strategy, generator: torch.Generator, again: str | None
) -> Search:
    """Search for the best optimum of a relaxed problem."""
    # Where few points do not represent the spaces that is a x b, or what few have found; a second
    # solve, if there can be one by a gradient, is compared with it.
    # All of it runs on the CPU: launches would take longer than the work. Nothing is drawn from the
    # generator, as the gradients here are exact.
    # iterations of a loss that is no product take too long for many starts
    represented = None if problem.loss.cross is None else represent(problem)
    how = strategy.options.search
    if represented is None:
        return all_points.search_twice(problem, how, again, relaxed=True)
    coarse = represented.problem
    sides, support = coarse.sides, support_of(problem, *coarse.sides)
    tables = [
        torch.stack([coarse_table(problem.loss, one).cpu() for one in side])
        for side in zip(*directed_points(sides, problem), strict=True)
    ]
    source, target = (
        DirectedDistance(table) if problem.directed else PrecomputedDistance(table[0])
        for table in tables
    )
    # each start takes as long as the whole solve: 500 x 480 points 85 s for 1% of the objective
    most = limits_of(problem.source.device).few_points
    many = max(len(side.indices) for side in sides) > most
    if many and strategy.options.n_init is None:
        return all_points.search_twice(problem, how, again, relaxed=True)
    small = Problem(
        source, target, Marginals(*(side.weights.cpu() for side in sides)), problem.alpha,
        None if coarse.linear is None else DenseCost(coarse.linear.cpu()), problem.loss,
        None if support is None else support.cpu(),
    )  # fmt: skip
    level = strategy.soft_rule
    assert level is not None
    epsilon = max(strategy.epsilon, LEAST_EPSILON * strategy.scale) * strategy.mass
    options = replace(
        strategy.options, epsilon=epsilon, rule=level,
        gradient="dense", n_anchors=None, max_iter=_OUTER, inner_max_iter=INNER,
        tol=ROUGH_TOLERANCE, inner_tol=ROUGH_TOLERANCE, backend="auto", precision="float64",
        storage="stored", polish=False, skip_tiles=False,
    )  # fmt: skip
    strict = find_optima(small, epsilon, options.n_init or DEFAULT_STARTS)
    device, solved = problem.source.device, _Solves(choose_strategy(small, options), generator)
    stack: Ending = solved
    if can_stack(small):
        scale = None if support is None else represented.scale
        stack = Stack.of(coarse, epsilon, level, scale=scale)
    (starts, related), whole = _starts(small, level, strict), stack is solved
    if isinstance(stack, Stack):
        n, m = small.shape
        around = neighbourhoods(stack, torch.zeros(1, dtype=torch.int64, device="cpu"))
        starts += [(f"neighbours {k + 1}", plan[:n, :m]) for k, plan in enumerate(around[0])]
    rounds = 0 if whole else _ROUNDS
    found = follow_starts(stack, starts, small.marginals, rounds, GUESS_EPSILON, related)
    if whole and not found.certain and found.plans.numel():
        # whole solves take long, and mostly agree
        starts = list(zip(found.names, found.plans, strict=True))
        found = follow_starts(stack, starts, small.marginals, _SOLVED)
    # where a support has many optima, groups that were kicked and mixed may agree by chance, and a
    # start knows of itself blurred [L1540]
    certain = found.certain and (support is None or whole or found.met >= AGREEING)
    doubt = "" if certain else WHY_RELAXED
    shape = problem.shape
    first, second = (side.indices for side in sides)
    # values without entropy are not compared here: the penalty decides what the mass is
    alternatives = tuple(
        Alternative(objective, label, (plan / plan.sum()).to(device), first, second, shape)
        for label, objective, plan in zip(found.names, found.objectives, found.plans, strict=True)
    )
    if small.source.n == shape[0] and small.target.n == shape[1]:
        # all points were searched: a larger epsilon would only lead away from the optimum
        alternatives = tuple(replace(one, epsilon=0.0) for one in alternatives)
        return Search(alternatives, float("nan"), doubt=doubt)
    found_by_few = Search(alternatives, float("nan"), resolution=represented.resolution)
    if not all_points.tells_all(problem, found_by_few):
        found_by_few = all_points.search_twice(problem, how, again, relaxed=True)
    return found_by_few._replace(alternatives=alternatives)


def _starts(
    small: Problem, rule: MarginalRule, strict: Search
) -> tuple[list[tuple[str, Tensor]], list[str]]:
    """Make the plans from which a relaxed problem is followed; name those of one search."""
    a, b = small.marginals
    product = noisy_product(a, b)
    starts, related = [("product", product), *_where_allowed(small)], list[str]()
    for one in strict.alternatives:
        plan = torch.zeros_like(product)
        plan[one.source.cpu()[:, None], one.target.cpu()] = one.plan.cpu()
        starts.append((one.label, plan))
    if can_stack(small):
        generator = torch.Generator("cpu").manual_seed(0)
        every = (*(torch.arange(side.n, device="cpu") for side in (small.source, small.target)),)
        tables = small.source.columns(every[0]), small.target.columns(every[1])
        pairs = congruent_pairs(*tables, (a, b), rule.share, SEEDS, generator)
        seeds = pairs.plans(len(a), len(b))
        starts += [(f"congruent pairs {place + 1}", plan) for place, plan in enumerate(seeds)]
        known = torch.stack([plan for _, plan in starts])
        linear = None if small.linear is None else small.linear.dense().matrix
        maps = known[:0]
        if rule.mass is None:
            maps = maps_where_free(rule.rho, tables, (a, b), small.alpha, linear, known)
        # maps are of one search, which begins at the other starts
        related = [f"map {place + 1}" for place in range(len(maps))]
        starts += zip(related, maps, strict=True)
    return starts, related


def _where_allowed(small: Problem) -> list[tuple[str, Tensor]]:
    """Make plans at random pairs that are allowed, of which no other start knows."""
    if small.support is None:
        return []
    generator = torch.Generator("cpu").manual_seed(0)
    shape, starts = small.support.shape, []
    for place in range(_ALLOWED):
        noise = torch.randn(shape, device="cpu", generator=generator, dtype=torch.float64)
        plan = (_SPREAD * noise).exp() * small.support
        starts.append((f"allowed pairs {place + 1}", plan / plan.sum()))
    return starts


class _Solves(NamedTuple):
    """What follows plans to their ends by whole solves, where no stack does."""

    strategy: Strategy
    generator: torch.Generator

    def padded(self, plans: Tensor) -> Tensor:
        """Return plans (k, n, m), as there are no other sizes."""
        return plans

    def rows(self, which: Tensor) -> Tensor:
        """Count the rows of plans, (k,)."""
        return torch.full_like(which, self.strategy.problem.source.n)

    def follow(self, which: Tensor, plans: Tensor, first: float | Tensor = 0.0) -> Ends:
        """Solve from plans (k, n, m), each annealed from a ``first`` epsilon."""
        epsilons = torch.as_tensor(first, device="cpu").expand(len(plans)).tolist()
        found = [
            self._solve(Guess(StoredPlan(plan / plan.sum()), None, epsilon))
            for plan, epsilon in zip(plans, epsilons, strict=True)
        ]
        tables, objectives, values = zip(*found, strict=True)
        numbers = torch.tensor([objectives, values], dtype=torch.float64, device="cpu")
        return Ends(torch.stack(tables), *numbers)

    def descend(self, which: Tensor, plans: Tensor) -> Ends:
        """Solve again from plans where solves have ended."""
        return self.follow(which, plans)

    def _solve(self, guess: Guess) -> tuple[Tensor, float, float]:
        """Solve from a start; give the plan, its objective and that without entropy."""
        strategy = self.strategy
        anneal = Annealing(max(strategy.epsilon, guess.epsilon * strategy.scale), strategy.epsilon)
        setting = strategy.setting(
            torch.float64, ROUGH_TOLERANCE, anneal, self.generator, Recorder()
        )
        state = iterate(setting, starting_point(setting, guess))
        plan, _ = settle(setting, state, torch.float64)
        assert setting.rule is not None
        plan, found = evaluate_relaxed(setting, plan, setting.rule)
        # plans that break strict marginals or bounds are not compared [L239]
        missed = found.marginal_error > ANNEALING_TOLERANCE * found.mass
        alpha = setting.problem.alpha
        ends = (found.objective(alpha, part * strategy.mass) for part in (strategy.epsilon, 0.0))
        objective, value = ends
        return plan.to_dense().double(), math.inf if missed else objective, value
