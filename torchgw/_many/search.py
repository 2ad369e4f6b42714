"""The search of many problems: starts of all of them are followed side by side, and improved."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._batch.engine import solve_linear
from torchgw._batch.packing import (
    Packed,
    inside_of,
    may_begin,
    natural_scale,
    on_chip,
    products,
    units,
)
from torchgw._batch.worth import own_squares
from torchgw._many.spaces import Shelves
from torchgw._problem.problem import Problem, stored_matrix
from torchgw._search.optima import LEAST_EPSILON
from torchgw._search.population import Members, exchange, improve
from torchgw._search.stack import Stack, neighbourhoods
from torchgw._search.tabu import has_maps, maps_where_free, matchings_of_many
from torchgw._starts.alternatives import OTHER, Ends
from torchgw._starts.chain import AGREEING, GUESS_EPSILON, STANDS_OUT
from torchgw._starts.coarse import SQUARE_OF_FLOAT32
from torchgw._starts.guesses import congruent_pairs
from torchgw._tensors.ahead import compile_together
from torchgw._tensors.operations import EQUAL, straight, sums_of

# Starts by random mixtures of quantiles of distances; random costs, at most, and entries of them;
# and rounds that improve the best of all starts, at most. [L1311]
_MIXTURES, _RANDOM, _RANDOM_ENTRIES, _ROUNDS = 7, 48, 2**14, 6
# Matchings that are followed. [L1850]
_MATCHINGS = 8
# Plans from which a larger problem is solved, and the epsilon at which, as a share of the natural
# scale. [L1932, L1988]
TOLD, TOLD_AT = 2, 0.01
# Ambiguity below which the lowest optimum is clear, if solves agree. [L1932, L1988]
_CLEAR = 0.75
# Optima of a search from which solves go on: those within this share of the lowest. [L1311]
_NEAR = 2e-3


class Searched(NamedTuple):
    """What a search has found of B problems."""

    members: Members
    ambiguity: Tensor  # (B,) as of a single solve
    doubtful: Tensor  # (B,) whether starts did not agree on an optimum

    def nearly_best(self) -> tuple[Tensor, Tensor]:
        """Choose the plans from which solves go on: their problems and places, (k,) each."""
        objectives = self.members.objectives
        lowest = objectives[:, :1]
        near = objectives.isfinite() & (objectives - lowest <= _NEAR * lowest.abs())
        problem, place = near.nonzero().T
        return problem, place


class Told(NamedTuple):
    """What the starts of B larger problems tell."""

    plans: Tensor  # (B, TOLD, n, m) to begin at
    ambiguity: Tensor  # (B,) as of a single solve
    clear: Tensor  # (B,) whether no other optimum is near the first


class Starts:
    """First costs of the problems between the spaces of two shelves."""

    def __init__(self, shelves: Shelves, sizes: tuple[int, int], i: Tensor, j: Tensor) -> None:
        self.places = i, j
        self.quantiles = shelves.signatures(sizes[0]), shelves.signatures(sizes[1])
        self.axes = shelves.axes(sizes[0]), shelves.axes(sizes[1])
        rank, device = self.axes[0].shape[2] - 1, i.device
        bits = torch.arange(rank, device="cpu")
        patterns = torch.arange(2**rank, device="cpu")[:, None] >> bits & 1
        # the last axis is that of the mean distances, which has a sign already
        signs = 1.0 - 2.0 * patterns.double()
        signs = torch.cat([signs, signs.new_ones(2**rank, 1)], 1)
        generator = torch.Generator("cpu").manual_seed(0)
        levels = self.quantiles[0].shape[2]
        mixing = torch.randn(
            _MIXTURES, levels, dtype=torch.float64, device="cpu", generator=generator
        )
        mixing = torch.cat([mixing.new_ones(1, levels), mixing])
        self.signs, self.mixing = signs.to(device), mixing.to(device)
        self.named = len(self.signs) + len(self.mixing)
        # plans of no reason at all find most where there are few
        more = min(_RANDOM, _RANDOM_ENTRIES // (sizes[0] * sizes[1]))
        self.random = torch.randn(
            more, *sizes, dtype=torch.float64, device="cpu", generator=generator
        ).to(device)
        self.count = self.named + more

    def costs(self, problem: Tensor, kind: Tensor, scale: Tensor) -> Tensor:
        """Compute first costs (k, n, m) of problems, each by a kind of start."""
        mixed = kind < len(self.mixing)
        turned = (kind - len(self.mixing)).clamp_(min=0, max=len(self.signs) - 1)
        sides = [
            (quantiles[at[problem]], axes[at[problem]])
            for quantiles, axes, at in zip(self.quantiles, self.axes, self.places, strict=True)
        ]
        mixing = self.mixing[kind.clamp(max=len(self.mixing) - 1)][:, None, :]
        x, y = (quantiles * mixing for quantiles, _ in sides)
        apart = straight(x, y).square_()
        x, y = (axes for _, axes in sides)
        across = x.new_zeros(apart.shape)
        for axis in range(x.shape[2]):
            sign = self.signs[turned, axis, None, None]
            across += sign * x[:, :, None, axis] * y[:, None, :, axis]
        found = torch.where(mixed[:, None, None], apart, -4 * across)
        drawn = (kind >= self.named).nonzero()[:, 0]
        if len(drawn):
            found[drawn] = scale[drawn, None, None] * self.random[kind[drawn] - self.named]
        return found

    def settle(self, stack: Stack, every: Tensor, start: int = 0) -> Ends:
        """Follow all starts of all problems (B,), or those from one on, until they settle."""
        scale = natural_scale(stack.problems, every, None)
        kinds = torch.arange(start, self.count, device=every.device)
        which, kind = every.repeat_interleave(len(kinds)), kinds.repeat(len(every))
        yes = torch.ones_like(which, dtype=torch.bool)

        def begin(some: Tensor) -> tuple[Tensor, Tensor]:
            return self.costs(which[some], kind[some], scale[which[some]]), yes[some]

        return stack.settle(which, torch.full_like(scale, GUESS_EPSILON)[which], begin)


def stack_of(packed: Packed) -> Stack:
    """Stack problems for their search, at the epsilon at which plans are compared."""
    every = torch.arange(len(packed), device=packed.device)
    if packed.proximal:
        # steps have an epsilon of their own
        packed = replace(packed, epsilon=torch.full_like(packed.epsilon, torch.nan), proximal=False)
    linear, target, _, relaxed = units(packed, every)
    epsilon = target.maximum(LEAST_EPSILON * natural_scale(packed, every, linear))
    if relaxed is not None and relaxed.mass is not None:
        epsilon = epsilon * relaxed.mass
    return Stack(replace(packed, epsilon=epsilon, begin=None))


def strict_of(stack: Stack) -> Stack:
    """Ask for strict marginals in place of relaxed ones."""
    return replace(stack, problems=replace(stack.problems, relaxed=None))


def ask_starts(stack: Stack, starts: Starts) -> Told:
    """Follow the starts of all problems side by side, and keep the lowest optima of each."""
    every = torch.arange(len(stack.problems), device=stack.problems.device)
    # relaxed plans may leave points out before these have found their place
    stack = strict_of(stack)
    ends = starts.settle(stack, every, len(starts.mixing))
    ends = Ends(*(part.unflatten(0, (len(every), -1)) for part in ends))
    # a linear cost leads all starts to one optimum, also where kicks find lower ones [L1989]
    found = improve(stack, ends, int(stack.problems.linear is not None)).members
    ambiguity, there = _ambiguity(stack, found), found.objectives[:, :TOLD].isfinite()
    plans = found.plans[:, :TOLD].where(there[:, :, None, None], found.plans[:, :1])
    return Told(plans, ambiguity, ambiguity < _CLEAR)


def congruent_plan(problem: Problem, share: float) -> Tensor:
    """Make a plan (1, n, m) between points at equal distances: these tell what two sides share."""
    generator = torch.Generator("cpu").manual_seed(0)
    x, y = (stored_matrix(side) for side in problem.sides)
    pairs = congruent_pairs(x, y, problem.marginals, share, 1, generator)
    return pairs.plans(*problem.shape)


def compile_programs(packed: Packed, stack: Stack) -> None:
    """Begin to compile what the solves of a search launch on a GPU, all of it side by side."""
    if not may_begin(packed.shape, packed.device):
        return
    from torchgw._batch.programs_triton import Programs

    begun = stack.begun()
    # steps of strict problems may be damped, and starts of relaxed ones are strict at first
    other = begun.damped() if packed.relaxed is None else replace(begun, relaxed=None)
    kinds = (begun,) if packed.proximal else (packed, begun, other)
    programs = [Programs(kind, stack.rules) for kind in kinds]
    if all(each.begun for each in programs):
        return
    for each in programs:
        each.compile()
    if packed.relaxed is None and on_chip(packed.shape, packed.device):
        # no iteration, but all that one launches
        compile_together(packed.device, lambda: solve_linear(begun, 1.0, 0))


def search(stack: Stack, starts: Starts, plans: Tensor) -> Searched:
    """Search all problems, of which plans (B, n, m) are known."""
    count, every = len(plans), torch.arange(len(plans), device=plans.device)
    alike, matched = _matchings(stack, every)
    known = stack.follow(torch.cat([every, alike]), torch.cat([plans, matched]))
    groups = [Ends(*(part[:count] for part in known)), starts.settle(stack, every)]
    if stack.problems.relaxed is not None:
        # relaxed plans may leave points out before these have found their place
        strict = starts.settle(strict_of(stack), every)
        balls = neighbourhoods(stack, every)
        more = torch.cat([strict.plans.view(count, -1, *balls.shape[2:]), balls], 1)
        groups.append(stack.follow(every.repeat_interleave(more.shape[1]), more.flatten(0, 1)))
        groups += follow_maps(stack, plans)
    if len(alike):
        # the others have no such end, and an infinite objective there
        nowhere = plans.new_full((count, _MATCHINGS), math.inf)
        led = Ends(plans.new_zeros(*nowhere.shape, *plans.shape[1:]), nowhere, nowhere.clone())
        for part, mine in zip(led, known, strict=True):
            part[alike[::_MATCHINGS]] = mine[count:].view(-1, *part.shape[1:])
        groups.append(Ends(*(part.flatten(0, 1) for part in led)))
    ends = Ends(
        *(
            torch.cat([part.view(count, -1, *part.shape[1:]) for part in parts], 1)
            for parts in zip(*groups, strict=True)
        )
    )
    found = exchange(stack, ends, improve(stack, ends, _ROUNDS))
    ambiguity = _ambiguity(stack, found.members)
    certain = (found.met >= AGREEING) | found.agreed
    if stack.problems.relaxed is not None:
        # groups of that many starts agree on what few of them have come to; and each start is
        # followed in two ways
        certain = found.met >= 2 * AGREEING
    certain |= ambiguity < STANDS_OUT
    return Searched(found.members, ambiguity, ~certain)


def _matchings(stack: Stack, every: Tensor) -> tuple[Tensor, Tensor]:
    """Find the best matchings of strict problems whose points weigh alike."""
    # As a search of one problem does. Returns problems (k,) and plans (k, n, m).
    problems = stack.problems
    (x, y), weights = stack.tables(every), stack.weights(every)
    n, sizes = x.shape[1], stack.rows(every)
    if weights[0].shape != weights[1].shape or problems.relaxed is not None:
        return every[:0], x.new_zeros(0, n, y.shape[1])
    alike = sizes == problems.y.sizes[problems.j]
    for side in weights:
        other = (side * sizes[:, None] - 1).abs() > EQUAL
        alike &= ~(other & inside_of(n, sizes)).any(1)
    which = alike.nonzero()[:, 0]
    if not len(which):
        return which, x.new_zeros(0, n, n)
    few, linear = sizes[which], units(problems, which)[0]
    near = (-2 * problems.alpha[which] / few.square())[:, None, None] * x[which]
    linear = None if linear is None else linear / few[:, None, None]
    partners = matchings_of_many(near, y[which], linear, few)[:, :_MATCHINGS]
    matched = torch.nn.functional.one_hot(partners, n) * weights[0][which, None, :, None]
    return which.repeat_interleave(_MATCHINGS), matched.flatten(0, 1)


def follow_maps(stack: Stack, plans: Tensor) -> list[Ends]:
    """Follow the best map of each problem whose one side is strict and the other free."""
    # As a search of one problem does; the others have no such end, and an infinite objective there.
    problems, every = stack.problems, torch.arange(len(plans), device=plans.device)
    rho = None if problems.relaxed is None else problems.relaxed.rho
    penalties = [] if rho is None else rho.tolist()
    mapped = [number for number, pair in enumerate(penalties) if has_maps(pair)]
    if not mapped:
        return []
    known, found = plans.cpu(), torch.zeros(plans.shape, dtype=plans.dtype, device="cpu")
    linear = None if problems.linear is None else problems.linear(every).cpu()
    sides = [
        (side.tables.cpu(), side.weights.cpu(), side.sizes[at].tolist(), at.tolist())
        for side, at in ((problems.x, problems.i), (problems.y, problems.j))
    ]
    alpha = problems.alpha.tolist()
    for number in mapped:
        (x, a), (y, b) = (
            (tables[at[number], :size, :size], weights[at[number], :size])
            for tables, weights, sizes, at in sides
            for size in sizes[number : number + 1]
        )
        n, m = len(a), len(b)
        cost = None if linear is None else linear[number, :n, :m]
        begin = known[number : number + 1, :n, :m]
        found[number, :n, :m] = maps_where_free(
            penalties[number], (x, y), (a, b), alpha[number], cost, begin
        )[0]
    which, nowhere = every[mapped], plans.new_full((len(plans),), math.inf)
    ends = Ends(found.to(plans), nowhere, nowhere.clone())
    for part, led in zip(ends, stack.follow(which, ends.plans[which]), strict=True):
        part[which] = led
    return [ends]


def _ambiguity(stack: Stack, members: Members) -> Tensor:
    """Compare the value of the lowest plan with that of the next one of another optimum, (B,)."""
    problems = stack.problems
    if problems.relaxed is not None:
        return torch.full_like(members.values[:, 0], torch.nan)
    a, b = problems.x.weights[problems.i], problems.y.weights[problems.j]
    sides = (problems.x.tables[problems.i], a), (problems.y.tables[problems.j], b)
    # closer values are the same, as CoarseProblem.rounding
    rounding = problems.alpha * sum(own_squares(*side) for side in sides) * SQUARE_OF_FLOAT32
    table = sides[1][0]
    table = table - (table * b[:, None, :]).sum(2)[:, None, :]
    spread = own_squares(table, b)
    # as all_sent_apart, of the first plan and the others
    away = members.plans - members.plans[:, :1]
    images = products(away.flatten(1, 2), table).view_as(away)
    share = b[:, None, None, :] / a.where(a > 0, torch.inf)[:, None, :, None]
    apart = sums_of((images.square() * share).flatten(0, 1)).view(images.shape[:2])
    apart = apart / (2 * spread).clamp_min(torch.finfo(table.dtype).tiny)[:, None]
    other = (apart > OTHER) & members.objectives.isfinite()
    second = members.values.where(other, torch.inf).amin(1)
    best, second = members.values[:, 0].maximum(rounding), second.maximum(rounding)
    return torch.where(second > 0, (best / second).clamp_max(1), 1.0)
