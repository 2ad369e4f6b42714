"""Rounds in which the best chains are kicked out of their optima and mixed, and their repair."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._search.chain import (
    AGREEING,
    ALIKE,
    BETTER,
    COMPARED_AT,
    FIRST,
    MOMENTUM,
    QUICK,
    REFINE,
    SAME,
    STEP,
    Chain,
    Kind,
    Ladder,
    Trial,
    alike,
    near,
    stacked,
    stands_out,
    tell_repaired,
)
from torchgw._search.graphs import is_sparse
from torchgw._search.world import INNER, KICK_INNER, World
from torchgw._tensors.deadline import is_over

# Shares of the points that are held, by turns; plans in a row that may be no better before any has
# been, after which all shares may; and plans of all chains at most. [L1280]
_HELD_SHARES, _REPAIR_PATIENCE, _MOST_REPAIRS = (0.2, 0.4, 0.6, 0.8, 0.3, 0.5, 0.7, 0.9), 4, 64
# Repairs of one plan by different shares, of which the best is taken. [L1284]
_AT_ONCE = 4
# How epsilon falls while points are held.
_REPAIR_LADDER = QUICK._replace(meeting=INNER)
# Sinkhorn iterations at the end of a ladder, of repairs and of the rounds below. [L559, L1280]
_MEETING = 20
# Neighbours of a point where the table is no graph, and how often means over them are taken.
# [L1280]
_NEIGHBORS, _MEANS = 8, 4
# Entries of a row that is held, as shares of the largest one; columns that are full if held rows
# have so much of their weight; and what all others cost, as a multiple of the natural scale.
# Choices. [L1280]
_HELD, _FULL, _BARRED = 0.01, 0.9, 10.0


class Repair:
    """Plans that are right in some regions: what is left of them is matched anew, given those.

    Where a space has clusters, a plan may send whole ones to wrong partners: all distances within
    them are kept, so that no kick leads out of it, and few others are. How well the points of a
    region keep their distances tells which regions those are. The best ones are held, the others
    forgotten, and epsilon falls again from where no match has begun.
    """

    def __init__(self, world: World, level: float) -> None:
        self.world, self.level = world, level
        self.nearby = _nearby(world)
        self.ladder = world.refine._replace(start=level, meeting=_MEETING)
        # that may still be made
        self.left = max(_REPAIR_PATIENCE, world.repairs_within(self.ladder, _MOST_REPAIRS))

    def improved(self, chain: Chain) -> Chain:
        """Take a chain to the epsilon of the repairs, and repair it until it gets no better."""
        best = self.world.take("repair", chain.plan)
        self._follow([best])
        idle, patience = 0, _REPAIR_PATIENCE
        shares = itertools.cycle(_HELD_SHARES)
        while idle < patience and self.left > 0 and not is_over():
            some = tuple(itertools.islice(shares, min(_AT_ONCE, self.left)))
            self.left -= len(some)
            chains = self._held(best.plan, some)
            self._follow(chains)
            seconds = sum(chain.seconds for chain in (best, *chains))
            fresh = min(chains, key=lambda chain: chain.objective)
            if near(best, fresh, SAME):
                idle += len(some)
            else:
                best, idle, patience = fresh, 0, len(_HELD_SHARES)
            best.seconds = seconds
        return best

    def _follow(self, chains: list[Chain]) -> None:
        self.world.descend(chains, self.ladder, self.level)

    def _held(self, plan: Tensor, shares: tuple[float, ...]) -> list[Chain]:
        """Match all but a share of the points anew, down to the epsilon of the repairs."""
        a, b = self.world.marginals
        order = self._faults(plan).argsort()
        elsewhere = plan < _HELD * plan.amax(1, keepdim=True)
        chains, barred = list[Chain](), list[Tensor]()
        for share in shares:
            held = torch.zeros_like(a, dtype=torch.bool)
            held[order[: round(share * len(order))]] = True
            kept = plan.where(held[:, None], 0)
            left, right = (a - kept.sum(1)).clamp_min(0), (b - kept.sum(0)).clamp_min(0)
            rest = torch.outer(left, right / right.sum().clamp_min(torch.finfo(b.dtype).tiny))
            chains.append(self.world.take("repair", kept + rest))
            barred.append(torch.where(held[:, None], elsewhere, kept.sum(0) > _FULL * b))
        penalties = (_BARRED * self.world.scale) * torch.stack(barred)
        batches = zip(self.world.together(chains), penalties.split(self.world.batch), strict=True)
        for some, own in batches:
            self.world.beside(own).descend(some, _REPAIR_LADDER, self.level)
        return chains

    def _faults(self, plan: Tensor) -> Tensor:
        """Tell how badly the points around each one keep their distances, (s,): 0 is perfect."""
        found = 1 - _correlations(self.world, plan)
        for _ in range(_MEANS):
            found = (found + self.nearby @ found) / 2
        return found


def _correlations(world: World, plan: Tensor) -> Tensor:
    """Correlate the centred distances of each source point with those of its images, (s,)."""
    a, b = world.marginals
    tiny = torch.finfo(plan.dtype).tiny
    images = plan / a[:, None].clamp_min(tiny)
    # linearised costs are a linear cost less the products, by the factor that the world's x has
    products = world.base - world.costs(plan[None])[0]
    both = (products * images).sum(1)
    own = world.x.square().sum(0) @ a
    other = images @ (world.y.square().sum(0) @ b)
    return both / (own * other).clamp_min(tiny).sqrt()


def _nearby(world: World) -> Tensor:
    """Return the matrix (s, s) of means over the points near each one."""
    table = world.problem.source.table.float()
    if is_sparse(table):
        weights = table.abs()
    else:
        # points that see all others alike, whether the table is one of distances or similarities
        rows = torch.nn.functional.normalize(world.problem.x[0].float())
        alike = (rows @ rows.mT).fill_diagonal_(-2)
        nearest = alike.topk(min(_NEIGHBORS, len(alike) - 1)).indices
        weights = torch.zeros_like(alike).scatter_(1, nearest, 1.0)
        weights = weights + weights.mT
    # nodes without an edge have nothing but themselves
    weights = weights + (weights.sum(1) == 0).to(weights).diag()
    return weights / weights.sum(1, keepdim=True)


# Kicks of the rounds below: the shares of rows at which they linearise, taken by turns, and the
# outer iterations of each. [L345, L561]
_AGAIN, _AGAIN_KICKS = (0.3, 0.4, 0.5), 3
# Chains of a round, at most. [L345, L563]
_WIDEST = 48
# So many times the rounds begin anew with other chains, unless two attempts end at the same
# optimum. [L762]
_ATTEMPTS = 3
# Groups of chains that are improved apart where the first ones disagree. [L345]
_GROUPS = 3
# Chains that are repaired at most; so many unless these come lower by a share. [L1280]
_REPAIRED, _FIRST, _HELPED = 6, 2, 0.02


class _Rounds(NamedTuple):
    """How chains are kicked and mixed by rounds."""

    epsilon: float  # where they are compared
    ladder: Ladder  # from the epsilon at which they are kicked
    width: int  # chains of a group in each round
    most: int  # rounds
    patience: int  # rounds that may pass without a better optimum
    settled: bool = False  # whether the rounds end once all groups agree


# Rounds at most, and how many may pass without a better optimum. [L345, L442]
_ROUNDS, _PATIENCE = 32, 8
# Rounds where the target epsilon is small: partly right optima are kicked at a larger epsilon, and
# compared where chains are. The ladder, rounds at most, and rounds without a better optimum; then
# groups, chains of a group at least and at most, and rounds that have to be affordable. [L616]
_BETWEEN, _SHORT_ROUNDS, _SHORT_PATIENCE = Ladder(0.04, 0.7, 4), 16, 4
_HALVES, _NARROW, _WIDE, _FEWEST_ROUNDS = 2, 3, 8, 4


class Improvement:
    """Rounds in which the best chains are kicked and mixed, and a record of the others."""

    def __init__(self, world: World, numbers: Iterator[int]) -> None:
        self.world, self.numbers = world, numbers
        self.left: list[Trial] = []

    def again(self, chains: list[Chain], epsilon: float, count: int) -> tuple[list[Chain], bool]:
        """Improve chains and, where they disagree, others as well, a few times over.

        Returns the best of different plans, and whether independent ones agree.
        """
        width = min(count, _WIDEST)
        ladder = REFINE._replace(start=epsilon, meeting=_MEETING, momentum=MOMENTUM)
        rounds = _Rounds(epsilon, ladder, width, _ROUNDS, _PATIENCE)
        first = sorted(chains, key=lambda chain: chain.objective)
        groups = [_apart(first, width, self.left)]
        alike = len(first) >= AGREEING and near(first[AGREEING - 1], first[0], SAME)
        if alike and not self.world.tiny:
            groups = self._improved(groups, rounds)
            # the first chains are asked: those of the rounds come from each other
            if near(first[AGREEING - 1], groups[0][0], SAME):
                return groups[0], True
        pools: list[list[Chain]] = []
        for _ in range(_ATTEMPTS):
            pool, alike = self._attempt(groups, rounds)
            pools = sorted([*pools, pool], key=lambda one: one[0].objective)
            twice = len(pools) > 1 and near(pools[1][0], pools[0][0], BETTER)
            if twice or (alike and pool is pools[0]):
                return pools[0], True
            groups = []
        return self._improved([list(itertools.chain(*pools))], rounds)[0], False

    def _attempt(self, groups: list[list[Chain]], rounds: _Rounds) -> tuple[list[Chain], bool]:
        """Improve groups of chains, some of them new ones, apart and then together.

        Returns the best of different plans, and whether each group has found the best.
        """
        while len(groups) < _GROUPS:
            kinds = itertools.islice(itertools.cycle(FIRST), rounds.width)
            fresh = [self.world.begin(kind, next(self.numbers)) for kind in kinds]
            self.world.descend(fresh, QUICK._replace(step=STEP), rounds.epsilon)
            groups = [*groups, _apart(fresh, rounds.width, self.left)]
        groups = self._improved(groups, rounds)
        wide = rounds._replace(width=_GROUPS * rounds.width)
        better = self._improved([list(itertools.chain(*groups))], wide)[0]
        return better, all(near(group[0], better[0], BETTER) for group in groups)

    def halves(self, chains: list[Chain], spare: int) -> tuple[list[Chain], bool]:
        """Improve two halves of the chains apart, at the epsilon of the first comparison.

        Returns the chains, the best first, and whether both halves agree.
        """
        chains = sorted(chains, key=lambda chain: chain.objective)
        width = min(_WIDE, spare // (_HALVES * _FEWEST_ROUNDS))
        if width < _NARROW:
            return chains, False
        most = min(_SHORT_ROUNDS, spare // (_HALVES * width))
        rounds = _Rounds(COMPARED_AT, _BETWEEN, width, most, _SHORT_PATIENCE, settled=True)
        halves = self._improved([chains[start::_HALVES] for start in range(_HALVES)], rounds)
        # the state of these is reported at the end
        known = {chain.trial("left behind") for chain in chains}
        self.left = [trial for trial in self.left if trial not in known]
        chains = sorted(itertools.chain(*halves), key=lambda chain: chain.objective)
        return chains, len(alike([half[0] for half in halves], chains[0])) == _HALVES

    def repaired(self, chains: list[Chain], low: float) -> tuple[list[Chain], bool]:
        """Repair the best of different chains, and follow them to the target, until two agree.

        Returns them, and whether the best two have the same plan.
        """
        repair, found = Repair(self.world, COMPARED_AT), list[Chain]()
        lowest = min(chains, key=lambda chain: chain.objective)
        # one that stands out is the best, unless it can be repaired
        enough = 1 if stands_out(chains) else _FIRST
        for chain in _apart(chains, _REPAIRED, []):
            fresh = repair.improved(chain)
            self.world.finish([fresh], low)
            found = sorted([*found, fresh], key=lambda chain: chain.objective)
            best = found[:2]
            tell_repaired(len(found), _REPAIRED, best[0].objective)
            # chains that are no better may differ in nothing but their plans
            if len(best) > 1 and near(best[1], best[0], SAME) and len(_apart(best, 2, [])) == 1:
                return found, True
            if len(found) == enough and near(lowest, best[0], SAME if enough == 1 else _HELPED):
                break
        return found, False

    def _improved(self, groups: list[list[Chain]], rounds: _Rounds) -> list[list[Chain]]:
        """Kick and mix the chains of each group, and keep the best of all, while that helps."""
        world, width = self.world, rounds.width
        groups = [_apart(chains, width // 2, self.left) for chains in groups]
        idle = [0] * len(groups)
        for _ in range(rounds.most):
            if is_over():
                break
            live = [place for place, count in enumerate(idle) if count < rounds.patience]
            if not live:
                break
            # all at once: short operations cost little more on many plans than on few
            fresh = {place: self._kicked(groups[place], width, rounds.ladder) for place in live}
            world.descend(list(itertools.chain(*fresh.values())), rounds.ladder, rounds.epsilon)
            for place, chains in fresh.items():
                before = groups[place][0]
                groups[place] = _apart(groups[place] + chains, width // 2, self.left)
                helped = not near(before, groups[place][0], BETTER)
                idle[place] = 0 if helped else idle[place] + 1
            best = sorted((group[0] for group in groups), key=lambda chain: chain.objective)
            if rounds.settled and min(idle) > 0 and near(best[-1], best[0], BETTER):
                break
        return groups

    def _kicked(self, parents: list[Chain], count: int, ladder: Ladder) -> list[Chain]:
        """Kick plans out of their optima, and mix as many if there are several to mix."""
        clock = perf_counter()
        plans, g = stacked(parents)
        seeds = list(itertools.islice(self.numbers, count))
        generator = torch.Generator(device=plans.device).manual_seed(seeds[0])
        mixed = count // 2 if len(parents) > 1 else 0
        turn = torch.arange(count - mixed, device=plans.device)
        shares = plans.new_tensor(_AGAIN)[turn % len(_AGAIN)]
        place = turn % len(plans)
        found = self._kick_all(plans[place], g[place], shares, ladder.start, generator)
        kinds = [Kind("again", ladder, (ladder.start, share)) for share in shares.tolist()]
        if mixed:
            drawn = torch.rand(mixed, len(plans), device=plans.device, generator=generator)
            one, other = drawn.argsort(1)[:, :2].T
            more = self._mix(plans[one], plans[other], g[one], ladder.start, generator)
            found = torch.cat([found[0], more[0]]), torch.cat([found[1], more[1]])
            kinds += [Kind("mixture", ladder)] * mixed
        seconds = (perf_counter() - clock) / count
        each = zip(kinds, seeds, *found, strict=True)
        return [
            Chain(kind, seed, plan, potential, seconds=seconds)
            for kind, seed, plan, potential in each
        ]

    def _kick_all(
        self, plans: Tensor, g: Tensor, shares: Tensor, epsilon: float, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Linearise at random rows of plans (B, s, t) a few times, each at its share of them."""
        counts = (shares * plans.shape[1]).round().clamp_(min=2)
        for _ in range(_AGAIN_KICKS):
            drawn = torch.rand(plans.shape[:2], device=plans.device, generator=generator)
            kept = drawn.argsort(1).argsort(1) < counts[:, None]
            costs = self.world.costs_anywhere(plans * kept[:, :, None], epsilon)
            plans, g = self.world.solve(costs, g, epsilon * self.world.scale, KICK_INNER)
        return plans, g

    def _mix(
        self, one: Tensor, other: Tensor, g: Tensor, epsilon: float, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Linearise at plans (B, s, t) whose rows come from one or the other by chance."""
        drawn = torch.rand(one.shape[:2], device=one.device, generator=generator)
        costs = self.world.costs_anywhere(torch.where(drawn[:, :, None] < 0.5, one, other), epsilon)
        return self.world.solve(costs, g, epsilon * self.world.scale, INNER)


def _apart(chains: list[Chain], count: int, left: list[Trial]) -> list[Chain]:
    """Choose chains of different plans, the best first; record the others as left."""
    chains = sorted(chains, key=lambda chain: chain.objective)
    flat = torch.nn.functional.normalize(stacked(chains)[0].flatten(1))
    alike = (flat @ flat.mT > ALIKE).tolist()
    kept: list[int] = []
    for place, row in enumerate(alike):
        # plans are compared, not objectives: a plan on its way to an optimum is not a different one
        if not any(row[other] for other in kept):
            kept.append(place)
    chosen = [chains[place] for place in kept[:count]]
    left += [chain.trial("left behind") for chain in chains if chain not in chosen]
    return chosen
