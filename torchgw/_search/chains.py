"""Chains of solves on all points, for problems that few points do not represent.

Each chain begins near the product plan, breaks its symmetry in a way of its own, and follows
epsilon down a ladder. Chains are compared by the objective with entropy: first where epsilon is
still large enough to be cheap and small enough to tell good optima from bad ones, and the best of
them again at the target.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._errors import PerformanceWarning, warn_user
from torchgw._plans.rounded import round_to_marginals
from torchgw._search.coarse import Coarsened, CoarseProblem, side_by_side
from torchgw._search.graphs import Graphs, convex_path, density, heat_costs, is_graph, least_value
from torchgw._search.modes import Modes
from torchgw._search.starts import GUESS_EPSILON
from torchgw._sinkhorn.batch import solve_batch
from torchgw._typing import Marginals

logger = logging.getLogger(__name__)

# Epsilons of this file are shares of the natural scale.
# Where chains are compared first: those that lead to a poor optimum are in it by then. [L323]
_COMPARED_AT = 0.02
# Objectives within this of each other, relative, are of the same optimum. [L333]
_SAME = 1e-3
# An objective is better if it is lower by this share. [L345]
_BETTER = 1e-4
# Noise on the product plan of a chain that has no other start. [L323]
_FAINT = 0.1
# Outer iterations of a kick, and Sinkhorn iterations of each. [L323]
_KICKS, _KICK_INNER = 5, 2
# Change of the plan (L1) below which a stage of a ladder is done. [L333]
_SETTLED = 2e-3
# Sinkhorn iterations of an outer iteration on a ladder. [L323]
_INNER = 5
# Outer and Sinkhorn iterations in which the plans meet their marginals, and over-relaxation. [L333]
_LAST, _LAST_INNER, _LAST_RELAXATION = 5, 60, 1.7
# Chains that go on to the target, and how far from the best objective they may be, relative. [L333]
_REFINED, _CLOSE = 4, 0.05
# Share of entries that are not zero up to which products on a CPU are sparse. [L333]
_SPARSE = 0.05
# Entries of plans that advance together: a CPU does best with what its cache holds. [L333]
_TOGETHER = {"cpu": 2**17, "cuda": 2**28}


class Ladder(NamedTuple):
    """How epsilon falls: geometrically, with some outer iterations at each stage."""

    start: float
    decay: float
    outer: int
    step: float = 1.0  # how far each linearisation goes from the last one to that of the plan
    meeting: int = _LAST_INNER  # Sinkhorn iterations in which the plans meet their marginals
    momentum: float = 0.0  # share of the last step that the next one repeats
    relaxation: float = 1.0  # over-relaxation of Sinkhorn iterations

    def stages(self, last: float) -> list[float]:
        """List the epsilons down to the last one."""
        count = math.ceil(math.log(last / self.start) / math.log(self.decay) - 1e-9)
        return [self.start * self.decay**stage for stage in range(count)] + [last]


class Kind(NamedTuple):
    """A way to begin a chain, and how it goes on."""

    name: str
    ladder: Ladder
    kick: tuple[float, float] | None = None  # epsilon, and the share of rows linearised at


# How far linearisations go where epsilon is small: whole steps go round for ever where the
# objective is steeply convex in a direction. [L559, L601]
_STEP = 0.75

# How the symmetry of the product plan is broken decides which optimum is found, and no way serves
# all problems: random rows serve dense similarities; on graphs noise so faint that the leading
# modes grow alone; and where plans branch late, ladders that converge at each epsilon.
_QUICK = Ladder(0.1, 0.7, 4)
_FAINT_NOISE = Kind("faint noise", _QUICK)
_SLOW = Kind("faint noise, slowly", Ladder(0.1, 0.5, 30))
_LOW = Kind("faint noise, from a low epsilon", Ladder(0.05, 0.7, 20))
_KICK = Kind("kick", _QUICK, (0.1, 0.1))
_HOT = Kind("hot kick", _QUICK, (0.3, 0.05))
# Chains that all problems get: the search is over if they agree. Then those that follow, by turns.
_FIRST = (_FAINT_NOISE, _KICK, _HOT, _KICK)
_LATER = (_LOW, _KICK, _SLOW, _KICK, _KICK, _HOT, _KICK, _FAINT_NOISE)
# Chains with the best objective, kicked ones among them, that make a search end early. [L333]
_AGREEING = 3
# The best optimum stands out, whichever chain has found it, if its value is less than this share of
# the second best. [L617, L971]
STANDS_OUT = 0.25
# L1 distance to the product plan, at most 2, up to which an optimum is too blurred to start from:
# .4 to .5 of random graphs with entropy, 1.7 to 2 elsewhere. [L1127]
SMEARED = 1.0
# Later chains run in groups of so many; after each group the search looks at what has been found.
# [L333]
_ROUND = 4
# The ladder after the convex start of graphs.
_CONVEX = Ladder(0.01, 0.5, 20)
# The ladder below the epsilon of the first comparison, and that of graphs, whose plans miss their
# marginals for long. [L1173]
_REFINE = Ladder(_COMPARED_AT, 0.7, 20, _STEP)
_REFINE_GRAPHS = _REFINE._replace(outer=12, relaxation=_LAST_RELAXATION)
# Epsilon and Sinkhorn iterations of the plan between signatures, whose costs have mean one. [L618]
_SIGNED_AT, _SIGNED_INNER = 0.01, 100
# Noise on the plans at each stage: exact products would keep equal what automorphisms of a graph
# make equal, and sharper plans cost less. [L336]
_STIR = 0.01
# Chains of large graphs that are followed first, each to the target: the search is over once so
# many of them, the very first among them, keep all edges but for a share of these. [L404]
_TRIED_FIRST, _ALL_EDGES = 2, 1e-4
# Kicks of the rounds below: the shares of rows at which they linearise, taken by turns, and the
# outer iterations of each. [L345, L561]
_AGAIN, _AGAIN_KICKS = (0.3, 0.4, 0.5), 3
# Cosine of the angle between plans above which they are of one optimum. [L561]
_ALIKE = 0.9
# The same of plans of graphs that come from different starts, above which they lead to one optimum
# without entropy, though their objectives still differ by a few percent. [L1236]
_MET = 0.95
# How fast epsilon falls from there: the optimum has been found. [L1260]
_STEEP = 0.2
# Sinkhorn iterations at the end of a ladder in these rounds. [L559]
_MEETING = 20
# Plans of at most so many entries get such rounds; chains of a round, and optima that are kept, at
# most. [L345, L563]
_SMALL, _WIDEST, _KEPT = 2**13, 48, 8
# Plans of so few entries: guesses are also compared as they are, without descending first, and
# chains that agree do not end the rounds. To be surer takes little here. [L661]
_TINY = 2**10
# Share of the last step that a step of these rounds repeats: without it plans had not settled
# within their iterations. [L760]
_MOMENTUM = 0.6
# So many times the rounds begin anew with other chains, unless two attempts end at the same
# optimum. [L762]
_ATTEMPTS = 3
# Groups of chains that are improved apart where the first ones disagree. [L345]
_GROUPS = 3
# A warning comes first if the chains to come will take more than so many seconds; seconds of one
# multiplication of an outer iteration on a CPU. [L549]
_LONG, _MULTIPLICATION = 5.0, 2e-11
# The same for the rest of an outer iteration, for each entry. [L1173]
_BESIDE = 300


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


class Guess(NamedTuple):
    """A plan that was found by other means."""

    name: str
    plan: Tensor  # (s, t)
    rows: Tensor | None  # the source points that it has, unless it has all


class Trial(NamedTuple):
    """How far one start was followed, and the objective that it reached."""

    start: str
    epsilon: float  # the last one it reached, units of the cost
    objective: float  # at that epsilon, with entropy
    value: float  # without entropy
    seconds: float
    status: str  # "refined", or "left behind" at the first comparison


class Climbed(NamedTuple):
    """What the chains have found, the best first."""

    plans: Tensor  # (k, s, t) float64, of exact marginals
    trials: tuple[Trial, ...]  # of all chains; the first k are those of the plans
    agreed: bool  # whether several found the best one
    met: bool  # whether that is told by their plans, which are yet to be sharpened
    g: Tensor  # (t,) potential of the first plan, as of the coarse cost


@dataclass(eq=False)
class _Chain:
    """One chain on its way."""

    kind: Kind
    number: int | None
    plan: Tensor  # (s, t) float32
    g: Tensor  # (1, t) potential, units of the cost
    epsilon: float = math.inf  # of its last linear problem, units of the cost
    objective: float = math.inf
    value: float = math.inf
    seconds: float = 0.0

    def trial(self, status: str) -> Trial:
        """Report it."""
        name = self.kind.name if self.number is None else f"{self.kind.name} {self.number}"
        return Trial(name, self.epsilon, self.objective, self.value, self.seconds, status)


def chains_within(operations: float, n: int, m: int) -> int:
    """Count the chains that a number of multiplications allows."""
    iterations = _QUICK.outer * len(_QUICK.stages(_COMPARED_AT))
    return int(operations / (iterations * n * m * (n + m)))


def climb(
    coarse: Coarsened,
    target: float,
    count: int,
    guesses: Sequence[Guess] = (),
    affordable: int = 0,
    *,
    in_time: bool = False,
    told: bool = False,
    sharpened: bool = False,
) -> Climbed:
    """Search all points from ``count`` starts, fewer if the first ones agree, down to an epsilon.

    Guesses are compared with the best at the end, by their names. If the starts disagree, their
    optima are kicked and mixed, up to ``affordable`` chains in all. ``in_time`` leaves out starts
    that would take a CPU long where nothing but chance tells them apart above the target. Nothing
    is said of how long that takes if it has been ``told``. If the plan is ``sharpened`` afterwards,
    a search of graphs is over once the best plan is that of two starts but for its entropy.
    """
    world = _World(coarse)
    low = target / coarse.scale
    level, sharp = max(low, _COMPARED_AT), low < _COMPARED_AT
    above = level
    graph = is_graph(coarse.problem)
    chains: list[_Chain] = []
    behind: list[_Chain] = []
    known: dict[_Chain, _Chain] = {}  # chains at that level, and at the target
    compared: list[_Chain] = []  # copies, at the epsilon of the first comparison
    found: list[_Chain] = []  # begun by other means
    if graph:
        begun = heat = None
        sharpened = sharpened and sharp and not world.tiny
        if sharpened:
            begun, heat = world.first(level), world.heat(level)
            one = _follow_one(world, [begun, heat], low)
            if one is not None:
                return one
        # smaller problems advance all chains together, in the same time
        if world.large:
            first, known = _first_chains(world, level, low, begun)
            if first is not None:
                return first
            chains += known
        # half as many chains: these starts find what most of them do not
        for high, chain in _graph_starts(world, level, low, heat):
            found.append(chain)
            if not sharp:
                continue
            compared += [] if high is None else [high]
            world.settle([chain], low)
            plan = world.rounded([chain])
            if _is_unbeaten(world, plan):
                behind = [*known.values(), *found[:-1]]
                left = [one.trial("left behind") for one in behind]
                return Climbed(plan, (chain.trial("refined"), *left), True, False, chain.g[0])
            ends = [*known.values(), *found]
            if sharpened and _have_met(world, ends):
                return _climbed(world, ends, agreed=True, met=True)
        count = max(len(_FIRST), count // 2)
    kinds = itertools.islice(itertools.chain(_FIRST, itertools.cycle(_LATER)), len(chains), None)
    clock = perf_counter()
    warned = told or _warn_if_long(world, count, low)
    independent = None
    more = _Improvement(world, itertools.count(count))
    while True:
        done = len(chains) + len(behind)
        if done == len(_FIRST) and not warned:
            _warn_if_more(world, count, low)
        most = done + _ROUND if done >= len(_FIRST) else len(_FIRST)
        numbers = range(done, min(count, most))
        fresh = [world.begin(kind, number) for number, kind in zip(numbers, kinds, strict=False)]
        for ladder in dict.fromkeys(chain.kind.ladder for chain in fresh):
            world.descend([one for one in fresh if one.kind.ladder == ladder], ladder, above)
        if sharp:
            compared += map(replace, fresh)
        if level < above:
            world.descend(fresh, world.refine, level)
        chains = sorted(chains + fresh, key=lambda chain: chain.objective)
        agreed = _agree(chains)
        _tell(numbers.stop, count, perf_counter() - clock, chains[0].objective)
        if not agreed and numbers.stop < count:
            continue
        best = _promising(chains)
        rest = [chain for chain in best if chain not in known]
        if low < level:
            world.descend(rest, world.refine, low)
            best = [known.get(chain, chain) for chain in best]
        if sharp:
            # unequal weights are met late: chains of one optimum differ until they are [L438]
            world.settle(rest, low)
        best.sort(key=lambda chain: chain.objective)
        behind += [chain for chain in chains if known.get(chain, chain) not in best]
        chains = best
        if not agreed or _agree(best) or numbers.stop >= count:
            break
        # chains that looked alike have parted, so the others are compared at the target too
        level = low
        if in_time:
            affordable = count = _within_time(world, numbers.stop, count, low)
            if numbers.stop >= count:
                break
    guessed = [world.take(name, plan) for name, plan, rows in guesses if rows is None]
    stayed = [replace(chain) for chain in guessed if world.tiny]
    # by a ladder: at the target at once they would be far from their marginals, and look worse than
    # they are
    world.descend(guessed, world.refine, low)
    # but an optimum at the target may be none on the way there
    world.settle(stayed, low)
    for place, chain in enumerate(stayed):
        guessed[place] = min(chain, guessed[place], key=lambda one: one.objective)
    lifted = [world.lift(name, plan, rows) for name, plan, rows in guesses if rows is not None]
    world.descend(lifted, _QUICK, low)
    guessed += lifted
    best += found + guessed
    if sharp:
        world.settle(guessed, low)
        spare = affordable - numbers.stop
        if not _enough(best) and not _stands_out(best):
            improved, independent = more.halves(compared, spare)
            improved = [chain for chain in improved if chain not in compared][:_REFINED]
            world.descend(improved, world.refine, low)
            world.settle(improved, low)
            best += improved
    elif world.base.numel() <= _SMALL:
        found_again, independent = more.again(best, low, count)
        best, behind = found_again[:_KEPT], found_again[_KEPT:] + behind
    if not sharp:
        world.settle(best, low)
    left = [*more.left, *(chain.trial("left behind") for chain in behind)]
    agreed = _enough(best) if independent is None else independent
    return _climbed(world, best, left, agreed=agreed)


def _climbed(
    world: _World,
    chains: list[_Chain],
    left: Sequence[Trial] = (),
    *,
    agreed: bool,
    met: bool = False,
) -> Climbed:
    """Report chains that were followed to the end, and trials of those that were left behind."""
    best = sorted(chains, key=lambda chain: chain.objective)
    trials = (*(chain.trial("refined") for chain in best), *left)
    return Climbed(world.rounded(best), trials, agreed, met, best[0].g[0])


def _tell(done: int, count: int, seconds: float, objective: float) -> None:
    """Log how far a search is, and what all its chains would take; they may agree before."""
    logger.info(
        "search: %d of at most %d chains on all points in %.1f s, best objective %.6g; at most "
        "about %.0f s more until they are compared", done, count, seconds, objective,
        seconds / done * (count - done),
    )  # fmt: skip


def _chain_seconds(world: _World, numbers: range, low: float) -> float:
    """Model the time of chains on a CPU by dense products, the best of them down to the target."""
    if world.base.device.type != "cpu" or world.sparse is not None:
        return 0.0
    level = max(low, _COMPARED_AT)
    kinds = [
        *_FIRST,
        *itertools.islice(itertools.cycle(_LATER), max(0, numbers.stop - len(_FIRST))),
    ]
    ladders = [(kind.ladder, level) for kind in kinds[numbers.start : numbers.stop]]
    ladders += [(world.refine, low)] * _REFINED if low < level else []
    work = (ladder.outer * sum(map(world.work, ladder.stages(last))) for ladder, last in ladders)
    return _MULTIPLICATION * sum(work)


def _warn_if_long(world: _World, count: int, low: float) -> bool:
    """Say what even the first chains will take on a CPU, if that is long; return whether it is."""
    least = _chain_seconds(world, range(len(_FIRST)), low)
    if least <= _LONG:
        return False
    most = least + _chain_seconds(world, range(len(_FIRST), count), low)
    warn_user(
        f"A few points do not represent these, and starts are followed on all of them: about "
        f"{least:.0f} s on this CPU if the first ones agree, up to {most:.0f} s if not. "
        "search='fast' leaves them out, and a start that is known (`init`) needs none.",
        PerformanceWarning,
    )
    return True


def _warn_if_more(world: _World, count: int, low: float) -> None:
    """Say what the chains that follow the first ones will take on a CPU, if that is long."""
    seconds = _chain_seconds(world, range(len(_FIRST), count), low)
    if seconds > _LONG:
        warn_user(
            f"The first starts, followed on all points, did not agree, and up to "
            f"{count - len(_FIRST)} more follow: about {seconds:.0f} s on this CPU. search='fast' "
            "leaves them out, and a start that is known (`init`) needs none.",
            PerformanceWarning,
        )


def _within_time(world: _World, done: int, count: int, low: float) -> int:
    """Count the chains, those that are done among them, that are followed to the target in time."""
    # each chain is followed to the target, not the best ones alone
    each = _chain_seconds(world, range(len(_FIRST)), low) / len(_FIRST)
    return count if each == 0 else min(count, max(done, int(_LONG / each)))


def _first_chains(
    world: _World, level: float, low: float, begun: _Chain | None = None
) -> tuple[Climbed | None, dict[_Chain, _Chain]]:
    """Follow few chains on two large graphs; no more are needed if none can beat the first.

    The first may have ``begun``. If one may be better, return the first chain at the epsilon of
    the comparison and at the target.
    """
    chains: list[_Chain] = []
    plans: list[Tensor] = []
    behind: list[_Chain] = []
    for number, kind in enumerate(_FIRST):
        if number == 0 and begun is not None:
            chain = begun
        else:
            chain = world.begin(kind, number)
            world.descend([chain], kind.ladder, level)
        high = replace(chain)
        world.descend([chain], world.refine, low)
        world.settle([chain], low)
        plan = world.rounded([chain])
        if _is_unbeaten(world, plan):
            chains.append(chain)
            plans.append(plan)
        else:
            behind.append(chain)
        if not chains:
            return None, {high: chain}
        if len(chains) == _TRIED_FIRST:
            break
    order = sorted(range(len(chains)), key=lambda place: chains[place].objective)
    trials = [chains[place].trial("refined") for place in order]
    trials += [chain.trial("left behind") for chain in behind]
    best = chains[order[0]]
    return Climbed(torch.cat(plans)[order], tuple(trials), True, False, best.g[0]), {}


def _follow_one(world: _World, chains: list[_Chain], low: float) -> Climbed | None:
    """Follow the best of different starts to the target if another one has the same plan."""
    if not _have_met(world, chains):
        return None
    best, *others = sorted(chains, key=lambda chain: chain.objective)
    world.descend([best], world.refine._replace(decay=_STEEP), low)
    world.settle([best], low)
    left = [chain.trial("left behind") for chain in others]
    return _climbed(world, [best], left, agreed=True, met=True)


def _graph_starts(
    world: _World, level: float, low: float, heat: _Chain | None
) -> Iterator[tuple[_Chain | None, _Chain]]:
    """Follow starts that only graphs have; yield each at a level that it passes, and at the end."""
    heat = heat or world.heat(level)
    high = replace(heat)
    if low < level:
        world.descend([heat], world.refine, low)
    yield high, heat
    convex = world.convex()
    world.descend([convex], _CONVEX, low)
    yield None, convex


def _is_unbeaten(world: _World, plan: Tensor) -> bool:
    """Whether no plan keeps more edges of two graphs than this one (1, s, t), or few more."""
    edges = float(world.problem.source.table.square().mean())
    enough = least_value(world.problem) + _ALL_EDGES * edges
    return float(world.problem.value(plan)) <= enough


class _Improvement:
    """Rounds in which the best chains are kicked and mixed, and a record of the others."""

    def __init__(self, world: _World, numbers: Iterator[int]) -> None:
        self.world, self.numbers = world, numbers
        self.left: list[Trial] = []

    def again(self, chains: list[_Chain], epsilon: float, count: int) -> tuple[list[_Chain], bool]:
        """Improve chains and, where they disagree, others as well, a few times over.

        Returns the best of different plans, and whether independent ones agree.
        """
        width = min(count, _WIDEST)
        ladder = _REFINE._replace(start=epsilon, meeting=_MEETING, momentum=_MOMENTUM)
        rounds = _Rounds(epsilon, ladder, width, _ROUNDS, _PATIENCE)
        first = sorted(chains, key=lambda chain: chain.objective)
        groups = [_apart(first, width, self.left)]
        alike = len(first) >= _AGREEING and _near(first[_AGREEING - 1], first[0], _SAME)
        if alike and not self.world.tiny:
            groups = self.improved(groups, rounds)
            # the first chains are asked: those of the rounds come from each other
            if _near(first[_AGREEING - 1], groups[0][0], _SAME):
                return groups[0], True
        pools: list[list[_Chain]] = []
        for _ in range(_ATTEMPTS):
            pool, alike = self.attempt(groups, rounds)
            pools = sorted([*pools, pool], key=lambda one: one[0].objective)
            twice = len(pools) > 1 and _near(pools[1][0], pools[0][0], _BETTER)
            if twice or (alike and pool is pools[0]):
                return pools[0], True
            groups = []
        return self.improved([list(itertools.chain(*pools))], rounds)[0], False

    def attempt(self, groups: list[list[_Chain]], rounds: _Rounds) -> tuple[list[_Chain], bool]:
        """Improve groups of chains, some of them new ones, apart and then together.

        Returns the best of different plans, and whether each group has found the best.
        """
        while len(groups) < _GROUPS:
            kinds = itertools.islice(itertools.cycle(_FIRST), rounds.width)
            fresh = [self.world.begin(kind, next(self.numbers)) for kind in kinds]
            self.world.descend(fresh, _QUICK._replace(step=_STEP), rounds.epsilon)
            groups = [*groups, _apart(fresh, rounds.width, self.left)]
        groups = self.improved(groups, rounds)
        wide = rounds._replace(width=_GROUPS * rounds.width)
        better = self.improved([list(itertools.chain(*groups))], wide)[0]
        return better, all(_near(group[0], better[0], _BETTER) for group in groups)

    def halves(self, chains: list[_Chain], spare: int) -> tuple[list[_Chain], bool]:
        """Improve two halves of the chains apart, at the epsilon of the first comparison.

        Returns the chains, the best first, and whether both halves agree.
        """
        chains = sorted(chains, key=lambda chain: chain.objective)
        width = min(_WIDE, spare // (_HALVES * _FEWEST_ROUNDS))
        if width < _NARROW:
            return chains, False
        most = min(_SHORT_ROUNDS, spare // (_HALVES * width))
        rounds = _Rounds(_COMPARED_AT, _BETWEEN, width, most, _SHORT_PATIENCE, settled=True)
        halves = self.improved([chains[start::_HALVES] for start in range(_HALVES)], rounds)
        # the state of these is reported at the end
        known = {chain.trial("left behind") for chain in chains}
        self.left = [trial for trial in self.left if trial not in known]
        chains = sorted(itertools.chain(*halves), key=lambda chain: chain.objective)
        return chains, all(_near(half[0], chains[0], _SAME) for half in halves)

    def improved(self, groups: list[list[_Chain]], rounds: _Rounds) -> list[list[_Chain]]:
        """Kick and mix the chains of each group, and keep the best of all, while that helps."""
        world, width = self.world, rounds.width
        groups = [_apart(chains, width // 2, self.left) for chains in groups]
        idle = [0] * len(groups)
        for _ in range(rounds.most):
            live = [place for place, count in enumerate(idle) if count < rounds.patience]
            if not live:
                break
            # all at once: short operations cost little more on many plans than on few
            fresh = {
                place: world.again(groups[place], width, rounds.ladder, self.numbers)
                for place in live
            }
            world.descend(list(itertools.chain(*fresh.values())), rounds.ladder, rounds.epsilon)
            for place, chains in fresh.items():
                before = groups[place][0]
                groups[place] = _apart(groups[place] + chains, width // 2, self.left)
                helped = not _near(before, groups[place][0], _BETTER)
                idle[place] = 0 if helped else idle[place] + 1
            best = sorted((group[0] for group in groups), key=lambda chain: chain.objective)
            if rounds.settled and min(idle) > 0 and _near(best[-1], best[0], _BETTER):
                break
        return groups


def _apart(chains: list[_Chain], count: int, left: list[Trial]) -> list[_Chain]:
    """Choose chains of different plans, the best first; record the others as left."""
    chains = sorted(chains, key=lambda chain: chain.objective)
    flat = torch.nn.functional.normalize(_stacked(chains)[0].flatten(1))
    alike = (flat @ flat.mT > _ALIKE).tolist()
    kept: list[int] = []
    for place, row in enumerate(alike):
        # plans are compared, not objectives: a plan on its way to an optimum is not a different one
        if not any(row[other] for other in kept):
            kept.append(place)
    chosen = [chains[place] for place in kept[:count]]
    left += [chain.trial("left behind") for chain in chains if chain not in chosen]
    return chosen


def _agree(chains: Sequence[_Chain]) -> bool:
    """Whether independent chains, the best first, have found the same optimum."""
    same = [chain for chain in chains if _near(chain, chains[0], _SAME)]
    kicked = sum(chain.kind.kick is not None for chain in same)
    # kicked chains are needed: all that begin with faint noise may follow the same modes into one
    # poor optimum
    return len(same) >= _AGREEING and kicked >= min(2, len(same))


def _have_met(world: _World, chains: Sequence[_Chain]) -> bool:
    """Whether the best of some chains has the plan of another one, far from the product plan."""
    product = torch.outer(*world.marginals)
    best, *others = sorted(chains, key=lambda chain: chain.objective)
    away = best.plan - product
    if float(away.abs().sum()) <= SMEARED:
        return False
    moves = ((one.plan - product).flatten() for one in others)
    return any(float(torch.cosine_similarity(away.flatten(), one, 0)) > _MET for one in moves)


def _enough(chains: Sequence[_Chain]) -> bool:
    """Whether enough chains are at the best optimum."""
    best = min(chains, key=lambda chain: chain.objective)
    return sum(_near(chain, best, _SAME) for chain in chains) >= _AGREEING


def _stands_out(chains: Sequence[_Chain]) -> bool:
    """Whether the best optimum costs far less than all others."""
    best = min(chains, key=lambda chain: chain.objective)
    others = [chain.value for chain in chains if not _near(chain, best, _SAME)]
    return best.value < STANDS_OUT * min(others, default=0)


def _near(chain: _Chain, best: _Chain, share: float) -> bool:
    """Whether the objective of a chain is within a share of the best."""
    return chain.objective - best.objective <= share * abs(best.objective)


def _promising(chains: Sequence[_Chain]) -> list[_Chain]:
    """Choose what goes on to the target: the best of each kind first, then the others."""
    close = [chain for chain in chains if _near(chain, chains[0], _CLOSE)]
    first = {chain.kind: chain for chain in reversed(close)}.values()
    ranked = sorted(close, key=lambda chain: (chain not in first, chain.objective))
    return ranked[:_REFINED]


class _World:
    """The problem between all points in single precision, and the steps that move its plans."""

    def __init__(self, coarse: Coarsened) -> None:
        problem = coarse.problem
        self.problem, self.scale = problem, coarse.scale
        self.marginals = Marginals(problem.source.weights.float(), problem.target.weights.float())
        self.base = problem.base.float()
        self.parts = len(problem.x)
        # centred tables: constants of rows and columns move no plan, and would cost digits
        self.x = (-4 * problem.alpha * problem.x).float()
        self.y = problem.y.float()
        self.column = problem.column.float()
        self.sparse = _Sparse.of(problem)
        self.modes = Modes.of(problem) if self.sparse is None else None
        self.tiny = self.base.numel() <= _TINY
        self.refine = _REFINE_GRAPHS if is_graph(problem) else _REFINE

    @property
    def large(self) -> bool:
        """Whether each chain is advanced alone."""
        return self.base.numel() > _TOGETHER[self.base.device.type]

    def costs(self, plans: Tensor, share: float = 0.0) -> Tensor:
        """Linearise at plans (B, s, t), as exactly as a share of the natural scale asks for."""
        if self.sparse is not None:
            return self.sparse(self.base, plans)
        found = self.modes(self.base, plans, share) if self.modes is not None else None
        if found is not None:
            return found
        left = side_by_side(self.x.flatten(0, 1) @ plans, self.parts)
        count = len(plans)
        y = self.y.flatten(0, 1).expand(count, -1, -1)
        return torch.baddbmm(self.base.expand(count, -1, -1), left, y)

    def work(self, share: float) -> float:
        """Count the multiplications that an outer iteration takes as long as, by dense tables."""
        n, m = self.base.shape
        least = n * m * (n + m) if self.modes is None else self.modes.work(self.modes.ranks(share))
        return least + _BESIDE * n * m

    def costs_at_rows(self, plan: Tensor, rows: Tensor) -> Tensor:
        """Linearise at some rows of a plan (s, t), scaled to mass one."""
        some = plan[rows] / plan[rows].sum()
        near = self.x[:, :, rows]
        # the mean distances of these points differ from those of all, which breaks the symmetry
        means = (near @ some.sum(1))[:, :, None] * self.column[:, None, :]
        return (near @ (some @ self.y) + means).sum(0) + self.base

    def begin(self, kind: Kind, number: int) -> _Chain:
        """Break the symmetry of the product plan."""
        clock = perf_counter()
        a, b = self.marginals
        generator = torch.Generator(device=a.device).manual_seed(number)
        plan, g = torch.outer(a, b), torch.zeros_like(b)[None]
        if kind.kick is None:
            noise = torch.randn(plan.shape, device=a.device, generator=generator)
            plan = plan * (1 + _FAINT * noise).clamp_(0.01)
            plan = plan / plan.sum()
            return _Chain(kind, number, plan, g, seconds=perf_counter() - clock)
        plan, g = self.kick(kind.kick, plan, g, _KICKS, generator)
        return _Chain(kind, number, plan, g, seconds=perf_counter() - clock)

    def again(
        self, parents: list[_Chain], count: int, ladder: Ladder, numbers: Iterator[int]
    ) -> list[_Chain]:
        """Kick plans out of their optima, and mix as many if there are several to mix."""
        clock = perf_counter()
        plans, g = _stacked(parents)
        seeds = list(itertools.islice(numbers, count))
        generator = torch.Generator(device=plans.device).manual_seed(seeds[0])
        mixed = count // 2 if len(parents) > 1 else 0
        turn = torch.arange(count - mixed, device=plans.device)
        shares = plans.new_tensor(_AGAIN)[turn % len(_AGAIN)]
        place = turn % len(plans)
        found = self.kick_all(plans[place], g[place], shares, ladder.start, generator)
        kinds = [Kind("again", ladder, (ladder.start, share)) for share in shares.tolist()]
        if mixed:
            drawn = torch.rand(mixed, len(plans), device=plans.device, generator=generator)
            one, other = drawn.argsort(1)[:, :2].T
            more = self.mix(plans[one], plans[other], g[one], ladder.start, generator)
            found = torch.cat([found[0], more[0]]), torch.cat([found[1], more[1]])
            kinds += [Kind("mixture", ladder)] * mixed
        seconds = (perf_counter() - clock) / count
        each = zip(kinds, seeds, *found, strict=True)
        return [
            _Chain(kind, seed, plan, potential, seconds=seconds)
            for kind, seed, plan, potential in each
        ]

    def kick_all(
        self, plans: Tensor, g: Tensor, shares: Tensor, epsilon: float, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Linearise at random rows of plans (B, s, t) a few times, each at its share of them."""
        counts = (shares * plans.shape[1]).round().clamp_(min=2)
        for _ in range(_AGAIN_KICKS):
            drawn = torch.rand(plans.shape[:2], device=plans.device, generator=generator)
            kept = drawn.argsort(1).argsort(1) < counts[:, None]
            costs = self.costs_anywhere(plans * kept[:, :, None], epsilon)
            plans, g = self.solve(costs, g, epsilon * self.scale, _KICK_INNER)
        return plans, g

    def mix(
        self, one: Tensor, other: Tensor, g: Tensor, epsilon: float, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Linearise at plans (B, s, t) whose rows come from one or the other by chance."""
        drawn = torch.rand(one.shape[:2], device=one.device, generator=generator)
        costs = self.costs_anywhere(torch.where(drawn[:, :, None] < 0.5, one, other), epsilon)
        return self.solve(costs, g, epsilon * self.scale, _INNER)

    def costs_anywhere(self, plans: Tensor, share: float = 0.0) -> Tensor:
        """Linearise at tables (B, s, t) of other marginals, scaled to mass one."""
        plans = plans / plans.sum((1, 2), keepdim=True)
        # as in costs_at_rows()
        means = torch.einsum("pij,bj->bpi", self.x, plans.sum(2))
        return self.costs(plans, share) + torch.einsum("bpi,pj->bij", means, self.column)

    def kick(
        self,
        kick: tuple[float, float],
        plan: Tensor,
        g: Tensor,
        times: int,
        generator: torch.Generator,
    ) -> tuple[Tensor, Tensor]:
        """Linearise at random rows of a plan (s, t) a few times."""
        epsilon, share = kick
        count = max(2, round(share * len(plan)))
        for _ in range(times):
            rows = torch.randperm(len(plan), device=plan.device, generator=generator)[:count]
            cost = self.costs_at_rows(plan, rows)[None]
            plans, g = self.solve(cost, g[None], epsilon * self.scale, _KICK_INNER)
            plan, g = plans[0], g[0]
        return plan, g

    def convex(self) -> _Chain:
        """Begin where the convex problem of two graphs has its minimum."""
        clock = perf_counter()

        def project(cost: Tensor, epsilon: float, iterations: int) -> Tensor:
            start = cost.new_zeros(1, 1, cost.shape[1])
            return self.solve(cost[None], start, epsilon, iterations)[0][0]

        chain = self.take("convex start", convex_path(self.problem, project))
        chain.seconds = perf_counter() - clock
        return chain

    def first(self, level: float) -> _Chain:
        """Follow the first of all chains to an epsilon."""
        chain = self.begin(_FIRST[0], 0)
        self.descend([chain], chain.kind.ladder, level)
        return chain

    def heat(self, level: float) -> _Chain:
        """Begin where the nodes of two graphs have alike signatures; follow that to an epsilon."""
        clock = perf_counter()
        costs = heat_costs(self.problem).float()[None]
        start = costs.new_zeros(1, 1, costs.shape[2])
        chain = self.take("heat", self.solve(costs, start, _SIGNED_AT, _SIGNED_INNER)[0][0])
        chain.seconds = perf_counter() - clock
        self.descend([chain], self.refine, level)
        return chain

    def take(self, name: str, plan: Tensor) -> _Chain:
        """Make a chain of a plan that was found by other means."""
        return _Chain(
            Kind(name, self.refine), None, plan.float(), torch.zeros_like(plan[:1]).float()
        )

    def lift(self, name: str, plan: Tensor, rows: Tensor) -> _Chain:
        """Make a chain of a plan that has some rows alone."""
        chain = self.take(name, plan)
        costs = self.costs_at_rows(chain.plan, rows)[None]
        start = torch.zeros_like(chain.g)[None]
        plans, g = self.solve(costs, start, GUESS_EPSILON * self.scale, _LAST_INNER)
        chain.plan, chain.g = plans[0], g[0]
        return chain

    def solve(
        self, costs: Tensor, g: Tensor, epsilon: float, iterations: int, relaxation: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Run Sinkhorn iterations of linear problems (B, s, t)."""
        each = costs.new_full((len(costs),), epsilon)
        plans, g = solve_batch(costs, self.marginals, g, each, iterations, relaxation)
        return plans, g

    def together(self, chains: list[_Chain]) -> Iterator[list[_Chain]]:
        """Divide chains into those that are advanced as one batch."""
        size = max(1, _TOGETHER[self.base.device.type] // self.base.numel())
        for start in range(0, len(chains), size):
            yield chains[start : start + size]

    def descend(self, chains: list[_Chain], ladder: Ladder, last: float) -> None:
        """Take chains down a ladder to an epsilon, until their plans have settled at each stage."""
        for some in self.together(chains):
            self._descend(some, ladder, ladder.stages(last))

    def _descend(self, chains: list[_Chain], ladder: Ladder, stages: Sequence[float]) -> None:
        """Take one batch down the ladder."""
        clock = perf_counter()
        plans, g = _stacked(chains)
        # each chain has noise of its own: chains that agree are to be independent
        seed = chains[0].number or 0
        generator = torch.Generator(device=plans.device).manual_seed(seed)
        stir = torch.randn(plans.shape, device=plans.device, generator=generator)
        stir = stir.mul_(_STIR).add_(1).clamp_(0.5)
        for share in stages:
            plans = plans * stir
            last = math.inf
            costs = push = None
            for _ in range(ladder.outer):
                before = plans
                if costs is None or not ladder.momentum:
                    costs = self.step(costs, plans, ladder.step, share)
                else:
                    way = self.costs(plans, share).sub_(costs).mul_(ladder.step)
                    push = way if push is None else push.mul_(ladder.momentum).add_(way)
                    costs.add_(push)
                plans, g = self.solve(costs, g, share * self.scale, _INNER, ladder.relaxation)
                change = float((plans - before).abs_().sum((1, 2)).amax())
                # a change that grows means that the plan leaves a saddle point, so the stage goes
                # on
                if change < min(_SETTLED, last):
                    break
                last = change
        epsilon = stages[-1] * self.scale
        costs = self.step(costs, plans, ladder.step, stages[-1])
        plans, g = self.solve(costs, g, epsilon, ladder.meeting, _LAST_RELAXATION)
        self._record(chains, plans, g, epsilon, clock)

    def step(self, costs: Tensor | None, plans: Tensor, step: float, share: float = 0.0) -> Tensor:
        """Linearise at plans, or go from the last costs a step towards that."""
        new = self.costs(plans, share)
        return new if costs is None or step == 1 else costs.lerp_(new, step)

    def settle(self, chains: list[_Chain], share: float) -> None:
        """Meet the marginals at the target."""
        for some in self.together(chains):
            self._settle(some, share * self.scale)

    def _settle(self, chains: list[_Chain], epsilon: float) -> None:
        """Settle one batch."""
        clock = perf_counter()
        plans, g = _stacked(chains)
        costs = None
        for _ in range(_LAST):
            costs = self.step(costs, plans, _STEP, epsilon / self.scale)
            plans, g = self.solve(costs, g, epsilon, _LAST_INNER, _LAST_RELAXATION)
        self._record(chains, plans, g, epsilon, clock, settled=True)

    def rounded(self, chains: list[_Chain]) -> Tensor:
        """Round plans to their marginals, (k, s, t) float64."""
        weights = self.problem.source.weights, self.problem.target.weights
        return round_to_marginals(_stacked(chains)[0].double(), *weights)

    def _record(
        self,
        chains: list[_Chain],
        plans: Tensor,
        g: Tensor,
        epsilon: float,
        clock: float,
        *,
        settled: bool = False,
    ) -> None:
        """Record plans, their objectives and times; of settled plans only those that are better."""
        # plans that miss their marginals have no objective to compare
        exact = round_to_marginals(plans, *self.marginals)
        costs = self.costs(exact).add_(self.base)
        values = self.problem.constant + 0.5 * _total(costs.mul_(exact))
        a, b = self.marginals
        entropy = _total(torch.special.xlogy(exact, exact / (a[:, None] * b)))
        objectives = (values + epsilon * entropy).nan_to_num(nan=torch.inf).tolist()
        seconds = (perf_counter() - clock) / len(chains)
        numbers = zip(chains, plans, g, objectives, values.tolist(), strict=True)
        for chain, plan, potential, objective, value in numbers:
            chain.seconds += seconds
            if settled and chain.epsilon == epsilon and chain.objective <= objective:
                continue
            chain.plan, chain.g, chain.epsilon = plan, potential, epsilon
            chain.objective, chain.value = objective, value


class _Sparse:
    """-4 alpha x P y by sparse tables A and B.

    x is A - r 1' - 1 r' + c 11', and y likewise.
    """

    def __init__(self, problem: CoarseProblem) -> None:
        tables = problem.source.table, problem.target.table
        weights = problem.source.weights, problem.target.weights
        means = [table @ weight for table, weight in zip(tables, weights, strict=True)]
        self.means = [mean.float() for mean in means]
        self.mean = [float(w @ mean) for w, mean in zip(weights, means, strict=True)]
        self.graphs = Graphs(problem)
        self.weight = float(-4 * problem.alpha)

    @classmethod
    def of(cls, problem: CoarseProblem) -> _Sparse | None:
        """Make it where it is worth it: on a CPU, both tables mostly zeros, the square loss."""
        on_cpu = problem.source.table.device.type == "cpu"
        return cls(problem) if on_cpu and density(problem) <= _SPARSE else None

    def __call__(self, base: Tensor, plans: Tensor) -> Tensor:
        """Add the products at plans (B, s, t) to the base."""
        found = torch.empty_like(plans)
        (row, column), (mean_x, mean_y) = self.means, self.mean
        for plan, costs in zip(plans, found, strict=True):
            total, down = plan.sum(0), row @ plan
            for rows, half in self.graphs.lefts(plan):
                half.addr_(row[rows] - mean_x, total, alpha=-1).sub_(down)
                sums = half.sum(1)
                product = self.graphs.right(half).addr_(sums, column, alpha=-1)
                product.sub_((half @ column - mean_y * sums)[:, None])
                torch.add(base[rows], product, alpha=self.weight, out=costs[rows])
        return found


def _stacked(chains: list[_Chain]) -> tuple[Tensor, Tensor]:
    """Put plans (B, s, t) and potentials (B, 1, t) of chains beside each other."""
    plans = torch.stack([chain.plan for chain in chains])
    return plans, torch.stack([chain.g for chain in chains])


def _total(tables: Tensor) -> Tensor:
    """Sum matrices (B, s, t) in float64."""
    return tables.sum(2).sum(1, dtype=torch.float64)
