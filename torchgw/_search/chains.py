"""Chains of solves on all points, for problems that few points do not represent.

Each chain begins near the product plan, breaks its symmetry in a way of its own, and follows
epsilon down a ladder. Chains are compared by the objective with entropy: first where epsilon is
still large enough to be cheap and small enough to tell good optima from bad ones, and the best of
them again at the target.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from torchgw._gradients.contract import START_NOISE
from torchgw._plans.transport import round_to_marginals
from torchgw._problem.limits import limits_of
from torchgw._search.beliefs import Graph, believed_plan
from torchgw._search.chain import (
    AGREEING,
    COMPARED_AT,
    FIRST,
    LONG,
    QUICK,
    REFINED,
    SAME,
    Chain,
    Climbed,
    Ladder,
    Trial,
    agree,
    enough,
    kinds_of_chains,
    near,
    promising,
    stacked,
    stands_out,
    tell,
)
from torchgw._search.coarse import Coarsened
from torchgw._search.edge_exchange import Edges, exchange_ends
from torchgw._search.graphs import convex_path, heat_costs, is_graph, least_value
from torchgw._search.population import improve, name_of
from torchgw._search.rounds import Improvement
from torchgw._search.stack import Ends, Stack
from torchgw._search.tabu import best_matchings, can_exchange, has_matchings
from torchgw._search.world import World
from torchgw._sinkhorn.batch import BatchSolver, solve_batch
from torchgw._tensors.cuda_graphs import Call, call_directly
from torchgw._tensors.deadline import is_over

# L1 distance to the product plan, at most 2, up to which an optimum is too blurred to start from:
# .4 to .5 of random graphs with entropy, 1.7 to 2 elsewhere. [L1127]
SMEARED = 1.0
# The ladder after the convex start of graphs.
_CONVEX = Ladder(0.01, 0.5, 20)
# Epsilon and Sinkhorn iterations of the plan between signatures, whose costs have mean one. [L618]
_SIGNED_AT, _SIGNED_INNER = 0.01, 100
# Chains of large graphs that are followed first, each to the target: the search is over once so
# many of them, the very first among them, keep all edges but for a share of these. [L404]
_TRIED_FIRST, _ALL_EDGES = 2, 1e-4
# Cosine of the angle between plans that come from different starts, above which they lead to one
# optimum without entropy, though their objectives still differ by a few percent. [L1236]
_MET = 0.95
# How fast epsilon falls from there: the optimum has been found. [L1260]
_STEEP = 0.2


class Begun(NamedTuple):
    """What chains between two graphs have found before the others begin."""

    known: Mapping[Chain, Chain] = {}  # where chains are compared first, and at the target
    found: Sequence[Chain] = ()  # from starts that only graphs have, at the target
    compared: Sequence[Chain] = ()  # copies of those, where chains are compared first


def begin_graphs(world: World, low: float, *, sharpened: bool) -> tuple[Climbed | None, Begun]:
    """Follow chains between two graphs down to an epsilon; return a result where they end early.

    They do where no plan keeps more edges, or, if the plan is ``sharpened`` afterwards, where two
    starts have the same one but for its entropy.
    """
    if is_over():
        return None, Begun()
    level = max(low, COMPARED_AT)
    sharp = low < level
    sharpened = sharpened and sharp and not world.tiny
    first = heat = None
    if sharpened:
        first, heat = _first(world, level), _heat(world, level)
        over = _follow_one(world, [first, heat], low)
        if over is not None:
            return over, Begun()
    known: dict[Chain, Chain] = {}
    # smaller problems advance all chains together, in the same time
    if world.large:
        over, known = _first_chains(world, level, low, first)
        if over is not None:
            return over, Begun()
    found: list[Chain] = []
    compared: list[Chain] = []
    for high, chain in _starts(world, level, low, heat):
        if is_over() and found:
            break
        before = [*known.values(), *found]
        found.append(chain)
        if not sharp:
            continue
        compared += [] if high is None else [high]
        world.settle([chain], low)
        matched, unbeaten = _matched(world, chain, low)
        found += matched
        if unbeaten or _is_unbeaten(world, chain):
            left = [one.trial("left behind") for one in before]
            return world.report([chain, *matched], left, agreed=True), Begun()
        if sharpened and _have_met(world, [*before, chain]):
            return world.report([*before, chain], agreed=True, met=True), Begun()
    return None, Begun(known, found, compared)


def _first_chains(
    world: World, level: float, low: float, begun: Chain | None = None
) -> tuple[Climbed | None, dict[Chain, Chain]]:
    """Follow few chains on two large graphs; no more are needed if none can beat the first.

    The first may have ``begun``. If one may be better, return the first chain at the epsilon of
    the comparison and at the target.
    """
    unbeaten: list[Chain] = []
    behind: list[Chain] = []
    for number, kind in enumerate(FIRST):
        if number == 0 and begun is not None:
            chain = begun
        else:
            chain = world.begin(kind, number)
            world.descend([chain], kind.ladder, level)
        high = replace(chain)
        world.finish([chain], low)
        (unbeaten if _is_unbeaten(world, chain) else behind).append(chain)
        if not unbeaten:
            return None, {high: chain}
        if len(unbeaten) == _TRIED_FIRST or is_over():
            break
    left = [chain.trial("left behind") for chain in behind]
    return world.report(unbeaten, left, agreed=True), {}


def _follow_one(world: World, chains: list[Chain], low: float) -> Climbed | None:
    """Follow the best of different starts to the target if another one has the same plan."""
    if not _have_met(world, chains):
        return None
    best, *others = sorted(chains, key=lambda chain: chain.objective)
    world.descend([best], world.refine._replace(decay=_STEEP), low)
    world.settle([best], low)
    left = [chain.trial("left behind") for chain in others]
    return world.report([best], left, agreed=True, met=True)


def _starts(
    world: World, level: float, low: float, heat: Chain | None
) -> Iterator[tuple[Chain | None, Chain]]:
    """Follow starts that only graphs have; yield each at a level that it passes, and at the end."""
    for begin in (_beliefs, _heat):
        chain = heat if begin is _heat and heat is not None else begin(world, level)
        high = replace(chain)
        if low < level:
            world.descend([chain], world.refine, low)
        yield high, chain
        if is_over():
            return
    convex = _convex(world)
    world.descend([convex], _CONVEX, low)
    yield None, convex


def _is_unbeaten(world: World, chain: Chain) -> bool:
    """Whether no plan keeps more edges of two graphs than that of a chain, or few more."""
    return _keeps_most(world, world.rounded([chain]))


def _keeps_most(world: World, plan: Tensor) -> bool:
    """Tell the same of a plan (1, s, t) of exact marginals."""
    edges = float(world.problem.source.table.square().mean())
    return float(world.problem.value(plan)) <= least_value(world.problem) + _ALL_EDGES * edges


def _matched(world: World, chain: Chain, low: float) -> tuple[list[Chain], bool]:
    """Follow the matching of a chain, improved along edges; tell whether none keeps more of them.

    Nodes that can be exchanged share their partners in a plan, which keeps fewer edges than either
    way. Small problems have exchanges of all pairs.
    """
    problem, clock = world.problem, perf_counter()
    if can_exchange(problem) or not has_matchings(problem):
        return [], False
    near_edges, far_edges = (Edges.of(side.table) for side in (problem.source, problem.target))
    if near_edges is None or far_edges is None:
        return [], False
    plan = world.rounded([chain])
    partners = linear_sum_assignment(plan[0].cpu(), maximize=True)[1]
    partners = exchange_ends(near_edges, far_edges, partners)
    matched = torch.nn.functional.one_hot(torch.from_numpy(partners), plan.shape[2])
    matched = matched.to(plan) / len(partners)
    found = world.take("exchanges along edges", matched)
    found.seconds = perf_counter() - clock
    world.settle([found], low)
    return [found], _keeps_most(world, matched[None])


def _have_met(world: World, chains: Sequence[Chain]) -> bool:
    """Whether the best of some chains has the plan of another one, far from the product plan."""
    product = torch.outer(*world.marginals)
    best, *others = sorted(chains, key=lambda chain: chain.objective)
    away = best.plan - product
    if float(away.abs().sum()) <= SMEARED:
        return False
    moves = ((one.plan - product).flatten() for one in others)
    return any(float(torch.cosine_similarity(away.flatten(), one, 0)) > _MET for one in moves)


def _convex(world: World) -> Chain:
    """Begin where the convex problem of two graphs has its minimum."""
    clock = perf_counter()

    def project(cost: Tensor, epsilon: float, iterations: int) -> Tensor:
        start = cost.new_zeros(1, 1, cost.shape[1])
        return world.solve(cost[None], start, epsilon, iterations)[0][0]

    chain = world.take("convex start", convex_path(world.problem, project))
    chain.seconds = perf_counter() - clock
    return chain


def _first(world: World, level: float) -> Chain:
    """Follow the first of all chains to an epsilon."""
    chain = world.begin(FIRST[0], 0)
    world.descend([chain], chain.kind.ladder, level)
    return chain


def _beliefs(world: World, level: float) -> Chain:
    """Begin at the partners that messages along edges tell of; follow that to an epsilon."""
    clock = perf_counter()
    sides = world.problem.source.table, world.problem.target.table
    largest = max(float(table.abs().max()) for table in sides)
    source, target = (Graph.of(table, largest) for table in sides)
    chain = world.take("beliefs", believed_plan(source, target, world.marginals))
    chain.seconds = perf_counter() - clock
    world.descend([chain], world.refine, level)
    return chain


def _heat(world: World, level: float) -> Chain:
    """Begin where the nodes of two graphs have alike signatures; follow that to an epsilon."""
    clock = perf_counter()
    costs = heat_costs(world.problem).float()[None]
    start = costs.new_zeros(1, 1, costs.shape[2])
    chain = world.take("heat", world.solve(costs, start, _SIGNED_AT, _SIGNED_INNER)[0][0])
    chain.seconds = perf_counter() - clock
    world.descend([chain], world.refine, level)
    return chain


# Later chains run in groups of so many; after each group the search looks at what has been found.
# [L333]
_ROUND = 4
# Optima that rounds at the target keep, at most. [L345, L563]
_KEPT = 8
# Chains whose plans are followed to their ends, and rounds that improve them, at most. [L1291]
_WIDE, _ROUNDS = 8, 4


class Guess(NamedTuple):
    """A plan that was found by other means."""

    name: str
    plan: Tensor  # (s, t)
    rows: Tensor | None  # the source points that it has, unless it has all


class _Followed(NamedTuple):
    """Independent chains, where they agree or all have been followed."""

    best: list[Chain]  # at the target, unless that is above the epsilon of the first comparison
    behind: list[Chain]  # those that did not go on to the target
    compared: list[Chain]  # copies, at the epsilon of the first comparison
    done: int  # how many there are
    most: int  # how many there could have been
    affordable: int  # how many more there may be

    @property
    def spare(self) -> tuple[list[Chain], int]:
        """The chains that halves are made of, and how many more there may be."""
        return self.compared, self.affordable - self.done


def climb(
    coarse: Coarsened,
    target: float,
    count: int,
    guesses: Sequence[Guess] = (),
    affordable: int = 0,
    *,
    solver: BatchSolver = solve_batch,
    in_time: bool = False,
    told: bool = False,
    sharpened: bool = False,
    repair: bool = True,
    stack: Stack | None = None,
    call: Call = call_directly,
) -> Climbed:
    """Search all points from ``count`` starts, fewer if the first ones agree, down to an epsilon.

    Guesses are compared with the best at the end, by their names. If the starts disagree, their
    optima are kicked and mixed, up to ``affordable`` chains in all. Small plans are matched by
    exchanges as well. The ``solver`` runs Sinkhorn's iterations. ``in_time`` leaves out starts
    that would take a CPU long where nothing but chance tells them apart above the target. Nothing
    is said of how long that takes if it has been ``told``. If the plan is ``sharpened`` afterwards,
    a search of graphs is over once the best plan is that of two starts but for its entropy. Chains
    that disagree are only put right by regions if they are to ``repair``. Plans are followed to
    their ends on a ``stack``, if there is one. Steps run by ``call``.
    """
    world = World(coarse, solver, call)
    low = target / coarse.scale
    begun = Begun()
    if is_graph(coarse.problem):
        over, begun = begin_graphs(world, low, sharpened=sharpened)
        if over is not None:
            return over
        # half as many chains: starts of graphs find what most of them do not
        count = max(len(FIRST), count // 2)
    rounds = Improvement(world, itertools.count(count))
    told = told or world.warn_if_long(count, low)
    followed = _follow(world, low, count, affordable, begun, in_time=in_time, told=told)
    best = [*followed.best, *begun.found, *_follow_guesses(world, guesses, low)]
    if stack is not None:
        if low < COMPARED_AT and not is_over():
            best += rounds.halves(*followed.spare)[0][:_WIDE]
        starts = [(chain.name, chain.plan) for chain in (*followed.best, *followed.behind)]
        return _improved(world, stack, low, starts, best, rounds.left)
    if low < COMPARED_AT:
        return _sharp(world, rounds, low, best, followed, repair=repair)
    return _blurred(world, rounds, low, best, followed)


def follow_to_ends(
    coarse: Coarsened,
    target: float,
    guesses: Sequence[Guess],
    stack: Stack,
    solver: BatchSolver = solve_batch,
) -> Climbed:
    """Follow guesses between all points to their ends on a stack, without any chain."""
    world = World(coarse, solver)
    best = [world.take(guess.name, guess.plan) for guess in guesses]
    return _improved(world, stack, target / coarse.scale, [], best, [])


def _blurred(
    world: World, rounds: Improvement, low: float, best: list[Chain], followed: _Followed
) -> Climbed:
    """Improve the best chains where the target is above the epsilon of the first comparison."""
    behind, agreed = followed.behind, None
    if _is_small(world) and not is_over():
        again, agreed = rounds.again(best, low, followed.most)
        best, behind = again[:_KEPT], again[_KEPT:] + behind
    world.settle(best, low)
    left = [*rounds.left, *(chain.trial("left behind") for chain in behind)]
    return world.report(best, left, agreed=enough(best) if agreed is None else agreed)


def _sharp(
    world: World,
    rounds: Improvement,
    low: float,
    best: list[Chain],
    followed: _Followed,
    *,
    repair: bool,
) -> Climbed:
    """Improve the best chains at the target, move by move, until enough of them agree."""
    matched, alike, repaired, independent = list[Chain](), False, list[Chain](), None
    if _is_small(world) and can_exchange(world.problem):
        matched, alike = _exchanged(world, best, low)
        best += matched
    if not enough(best) and not is_over():
        if repair and not matched:
            repaired, independent = rounds.repaired(best, low)
            best += repaired
        if not independent and not stands_out(best):
            improved, independent = rounds.halves(*followed.spare)
            improved = [chain for chain in improved if chain not in followed.compared][:REFINED]
            world.finish(improved, low)
            best += improved
            if alike:
                # unless the best plan is no matching, for which the other chains have looked
                independent |= near(matched[0], min(best, key=_objective), SAME)
            if _is_small(world):
                world.rest(best, LONG._replace(start=low))
    left = [*rounds.left, *(chain.trial("left behind") for chain in followed.behind)]
    agreed = enough(best) if independent is None else independent
    lowest = min(best, key=_objective)
    alone = not agreed and all(chain in repaired for chain in best if near(chain, lowest, SAME))
    return world.report(best, left, agreed=agreed, alone=alone)


def _is_small(world: World) -> bool:
    """Whether plans are so small that to be surer takes little."""
    return world.base.numel() <= limits_of(world.base.device).stacked


def _follow(
    world: World,
    low: float,
    count: int,
    affordable: int,
    begun: Begun,
    *,
    in_time: bool,
    told: bool,
) -> _Followed:
    """Follow independent chains by groups until the best ones agree at the target."""
    above = level = max(low, COMPARED_AT)
    sharp = low < level
    known = begun.known
    chains, compared = list(known), list(begun.compared)
    opposed: list[Chain] = []
    behind: list[Chain] = []
    kinds = itertools.islice(kinds_of_chains(), len(chains), None)
    done, clock = len(chains), perf_counter()
    while True:
        if done == len(FIRST) and not told:
            world.warn_if_more(count, low)
        most = done + _ROUND if done >= len(FIRST) else len(FIRST)
        if is_over():
            # one chain is needed, to be compared
            most = max(done, 1)
        numbers = range(done, min(count, most))
        fresh = [world.begin(kind, number) for number, kind in zip(numbers, kinds, strict=False)]
        for ladder in dict.fromkeys(chain.kind.ladder for chain in fresh):
            world.descend([one for one in fresh if one.kind.ladder == ladder], ladder, above)
        if sharp:
            compared += map(replace, fresh)
        if level < above:
            world.descend(fresh, world.refine, level)
        chains = sorted(chains + fresh, key=_objective)
        if not opposed and not is_over():
            # what breaks the symmetry of the product plan grows to one side, often the same for all
            # chains, and the best optimum may be on the other [L1289]
            opposed = _opposites(world, chains[:1], above)
            if near(chains[0], opposed[0], SAME):
                behind += opposed
            else:
                opposed += _opposites(world, chains[1:], above)
                chains = sorted(chains + opposed, key=_objective)
        # opposites of chains that were wrong together are not independent of each other
        agreed = agree([chain for chain in chains if chain not in opposed[1:]])
        done = numbers.stop
        tell(done, count, perf_counter() - clock, chains[0].objective)
        if not agreed and done < count and not is_over():
            continue
        best = promising(chains)
        rest = [chain for chain in best if chain not in known]
        if low < level:
            world.descend(rest, world.refine, low)
            best = [known.get(chain, chain) for chain in best]
        if sharp:
            # unequal weights are met late: chains of one optimum differ until they are [L438]
            world.settle(rest, low)
        best.sort(key=_objective)
        behind += [chain for chain in chains if known.get(chain, chain) not in best]
        if not agreed or agree(best) or done >= count or is_over():
            break
        # chains that looked alike have parted, so the others are compared at the target too
        chains, level = best, low
        if in_time:
            affordable = count = world.within_time(done, count, low)
            if done >= count:
                break
    return _Followed(best, behind, compared, done, count, affordable)


def _improved(
    world: World,
    stack: Stack,
    low: float,
    starts: Sequence[tuple[str, Tensor]],
    best: Sequence[Chain],
    left: Sequence[Trial],
) -> Climbed:
    """Follow starts and the best chains to their ends on a stack, and improve them there."""
    clock = perf_counter()
    best = sorted(best, key=_objective)
    starts = [*starts, *((chain.name, chain.plan) for chain in best)]
    if can_exchange(world.problem):
        partners, _ = best_matchings(world.problem, stacked(best)[0])
        matched = torch.nn.functional.one_hot(partners, partners.shape[1]).to(world.base)
        starts += [(f"exchanges {place + 1}", plan) for place, plan in enumerate(matched)]
    # the product plan, annealed
    product = torch.outer(*world.marginals)
    generator = torch.Generator("cpu").manual_seed(0)
    noise = torch.randn(product.shape, device="cpu", generator=generator)
    product = stack.padded(product[None] * (1 + START_NOISE * noise.to(product)))
    alone = torch.zeros(len(starts) + 1, dtype=torch.int64, device=product.device)
    annealed = stack.follow(alone[:1], product, first=1.0).plans
    plans = torch.cat([stack.padded(torch.stack([plan for _, plan in starts])), annealed])
    ends = Ends(*(part[None] for part in stack.follow(alone, plans)))
    # every other plan is of a group: chains know nothing of each other
    found = improve(stack, ends, _ROUNDS)
    labels = [*(label for label, _ in starts), "product"]
    seconds, epsilon = (perf_counter() - clock) / int(found.followed), low * world.scale
    (n, m), members = world.base.shape, found.members.alone()
    # the stack leaves out what the least linear cost amounts to
    floor = float(world.problem.value(members.plans[:1, :n, :m]) - members.values[0])
    floor = floor if world.problem.linear is not None else 0.0
    trials = [
        Trial(
            name_of(origin, labels), epsilon, objective + floor, value + floor, seconds, "refined"
        )
        for objective, value, origin in zip(*map(Tensor.tolist, members[1:]), strict=True)
    ]
    plans = members.plans[:, :n, :m]
    weights = world.problem.source.weights, world.problem.target.weights
    first = world.take("", plans[0])
    world.settle([first], low)
    return Climbed(
        round_to_marginals(plans, *weights), (*trials, *left),
        bool(found.agreed | (found.met >= AGREEING)), met=False, g=first.g[0], alone=False,
        settled=True,
    )  # fmt: skip


def _opposites(world: World, chains: Sequence[Chain], above: float) -> list[Chain]:
    """Follow the opposites of chains to the epsilon of the first comparison."""
    found = [world.oppose(chain) for chain in chains]
    world.descend(found, QUICK, above)
    return found


def _follow_guesses(world: World, guesses: Sequence[Guess], low: float) -> list[Chain]:
    """Follow plans that were found by other means to the target."""
    guessed = [world.take(name, plan) for name, plan, rows in guesses if rows is None]
    few = world.base.numel() <= limits_of(world.base.device).open_most
    stayed, smoothed = ([replace(chain) for chain in guessed if few] for _ in range(2))
    # by a ladder: at the target at once they would be far from their marginals, and look worse than
    # they are
    world.descend(guessed, world.refine, low)
    # but an optimum at the target may be none on the way there
    world.settle(stayed, low)
    # and from a larger epsilon they come to better ones next to them
    world.descend(smoothed, QUICK, low)
    if low < COMPARED_AT:
        world.settle(smoothed, low)
    for place, ways in enumerate(zip(guessed, stayed, smoothed, strict=False)):
        guessed[place] = min(ways, key=_objective)
    lifted = [world.lift(name, plan, rows) for name, plan, rows in guesses if rows is not None]
    world.descend(lifted, QUICK, low)
    if low < COMPARED_AT:
        world.settle([*guessed, *lifted], low)
    return [*guessed, *lifted]


def _exchanged(world: World, best: Sequence[Chain], low: float) -> tuple[list[Chain], bool]:
    """Follow the best matchings at the target, and tell whether independent starts agree."""
    clock = perf_counter()
    known = sorted(best, key=_objective)
    partners, alike = best_matchings(world.problem, stacked(known)[0])
    seconds = perf_counter() - clock
    count, n = partners.shape
    plans = torch.nn.functional.one_hot(partners, n).to(world.base) / n
    found = [world.take(f"exchanges {place + 1}", plan) for place, plan in enumerate(plans)]
    for chain in found:
        chain.seconds = seconds / count
    world.settle(found, low)
    return sorted(found, key=_objective), alike


def _objective(chain: Chain) -> float:
    return chain.objective
