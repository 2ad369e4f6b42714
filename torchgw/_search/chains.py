"""Chains of solves on all points, for problems that few points do not represent.

Each chain begins near the product plan, breaks its symmetry in a way of its own, and follows
epsilon down a ladder. What they and other moves have found is compared by the objective with
entropy: first where epsilon is still large enough to be cheap and small enough to tell good optima
from bad ones, and the best again at the target.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._plans.transport import round_to_marginals
from torchgw._problem.limits import limits_of
from torchgw._problem.problem import PRICE, is_sparse, weigh_alike
from torchgw._search.beliefs import SEARCH_TRIES, believed_plan, rematched
from torchgw._search.population import FRESH, follow_starts, improve, name_of, noisy_product
from torchgw._search.stack import Stack
from torchgw._search.tabu import best_matchings
from torchgw._search.world import World
from torchgw._sinkhorn.eager import BatchSolver, solve_batch
from torchgw._starts.alternatives import Ends
from torchgw._starts.chain import (
    AGREED_SOON,
    ALIKE,
    BETTER,
    COMPARED_AT,
    FIRST,
    INNER,
    LONG,
    MOMENTUM,
    NOTHING_BEGUN,
    QUICK,
    REFINE,
    REFINED,
    SAME,
    Begun,
    Chain,
    Climbed,
    Ladder,
    agree,
    enough,
    is_smeared,
    kinds_of_chains,
    near,
    promising,
    stacked,
    stands_out,
)
from torchgw._starts.coarse import Coarsened, CoarseProblem, can_exchange, has_graphs, is_graph
from torchgw._starts.graphs import Edges, Graph, convex_path, graphs_of, heat_costs, least_value
from torchgw._tensors.deadline import is_over, say_share
from torchgw._tensors.operations import Call, call_directly
from torchgw.distances.base import DistanceProvider

logger = logging.getLogger(__name__)

# The ladder after the convex start of graphs.
_CONVEX = Ladder(0.01, 0.5, 20)
# Epsilon and Sinkhorn iterations of the plan between signatures, whose costs have mean one. [L618]
_SIGNED_AT, _SIGNED_INNER = 0.01, 100
# Cosine of the angle between plans that come from different starts, above which they lead to one
# optimum without entropy, though their objectives still differ by a few percent. [L1236]
_MET = 0.95
# How fast epsilon falls from there: the optimum has been found. [L1260]
_STEEP = 0.2
# Rounds that improve plans, where these are followed to their ends, and where chains are compared.
# [L1291, L1298]
_ROUNDS, _MOST_ROUNDS = 4, 16
# Sinkhorn iterations at the end of a ladder. [L559, L1280]
_MEETING = 20
# Epsilon at which plans that are kicked on the way begin, a share of the natural scale: more than
# where they are kicked at their ends. [L1773]
_KICKED = 0.04
# The ladder from the epsilon of kicks to that of the first comparison. [L559, L616]
_BETWEEN = REFINE._replace(outer=QUICK.outer, meeting=_MEETING, momentum=MOMENTUM)
# Chains that are repaired at most; so many unless these come lower by a share. [L1280]
_REPAIRED, _FIRST, _HELPED = 6, 2, 0.02
# Shares of the points that are held, by turns; plans of one by different shares, of which the best
# is taken: if these are no better than it at first, or those of all shares later, it is left; and
# plans of all chains at most. [L1280, L1284]
_HELD_SHARES, _AT_ONCE, _MOST_REPAIRS = (0.2, 0.4, 0.6, 0.8, 0.3, 0.5, 0.7, 0.9), 4, 64
# How epsilon falls while points are held.
_REPAIR_LADDER = QUICK._replace(meeting=INNER)
# Neighbours of a point where the table is no graph, and how often means over them are taken.
# [L1280]
_NEIGHBORS, _MEANS = 8, 4
# Entries of a row that is held, as shares of the largest one; and columns that are full if held
# rows have so much of their weight. Choices. [L1280]
_HELD, _FULL = 0.01, 0.9


class Guess(NamedTuple):
    """A plan that was found by other means."""

    name: str
    plan: Tensor  # (s, t)
    rows: Tensor | None  # the source points that it has, unless it has all


@dataclass
class Climb:
    """What the moves of a search on all points have found so far."""

    world: World
    low: float  # target epsilon, as a share of the natural scale
    count: int  # chains at most
    affordable: int  # plans at most
    guesses: Sequence[Guess]
    stack: Stack | None  # on which plans are followed to their ends
    told: bool  # whether it was said how long chains take
    sharpened: bool  # whether the plan is sharpened afterwards
    repair: bool  # whether regions may be wrong
    share: float  # of the longer forecast, if starts do not agree soon; zero says nothing
    edges: tuple[Edges, Edges] | None  # of both sides, along which partners are exchanged
    begun: Begun  # what another search between the same points has followed
    best: list[Chain] = field(default_factory=list)  # at the target
    behind: list[Chain] = field(default_factory=list)  # that were left on their way
    compared: list[Chain] = field(default_factory=list)  # copies, at the first comparison
    repaired: list[Chain] = field(default_factory=list)
    graphs: list[Chain] = field(default_factory=list)  # whose partners were not exchanged yet
    related: tuple[str, ...] = ()  # chains that were made of each other
    agreed: bool = False  # whether what is independent has led to the best
    met: bool = False  # whether that is told by plans, which are yet to be sharpened
    settled: bool = False  # whether all plans were followed to their ends

    @property
    def level(self) -> float:
        """Return the epsilon of the first comparison."""
        return max(self.low, COMPARED_AT)

    @property
    def sharp(self) -> bool:
        """Whether chains are compared before the target."""
        return self.low < COMPARED_AT

    @property
    def small(self) -> bool:
        """Whether plans are so small that to be surer takes little."""
        base = self.world.base
        return base.numel() <= limits_of(base.device).stacked

    @property
    def lowest(self) -> Chain:
        """Return the best chain so far."""
        return min(self.best, key=_objective)

    def report(self) -> Climbed:
        """Report what was found, the best first."""
        best = sorted(dict.fromkeys([*self.best, *self.begun.ended]), key=_objective)
        trials = [chain.trial("refined") for chain in best]
        trials += [chain.trial("left behind") for chain in self.behind]
        own = [chain for chain in best if near(chain, best[0], SAME)]
        alone = not self.agreed and all(chain in self.repaired for chain in own)
        return Climbed(
            self.world.rounded(best), tuple(trials), self.agreed, self.met, best[0].g[0], alone,
            self.settled, self.begun._replace(ended=best),
        )  # fmt: skip


def climb(
    coarse: Coarsened,
    target: float,
    count: int,
    guesses: Sequence[Guess] = (),
    affordable: int = 0,
    *,
    solver: BatchSolver = solve_batch,
    told: bool = False,
    sharpened: bool = False,
    repair: bool = True,
    stack: Stack | None = None,
    share: float = 0.0,
    call: Call = call_directly,
    sides: Sequence[DistanceProvider] = (),
    moves: Sequence[Callable[[Climb], None]] | None = None,
    begun: Begun = NOTHING_BEGUN,
) -> Climbed:
    """Search all points move by move, down to an epsilon, until what is independent agrees."""
    # At most `count` chains begin near the product plan, none if that is zero; up to `affordable`
    # plans in all come of kicks and mixtures. Guesses are compared with them, by their names. The
    # `solver` runs Sinkhorn's iterations, and steps run by `call`. Nothing is said of how long
    # chains take if it has been `told`. If the plan is `sharpened` afterwards, a search of graphs
    # is over once two starts have the same plan but for its entropy. Regions are only put right if
    # they are to be (`repair`). Plans are followed to their ends on a `stack`, if there is one.
    # All moves take a `share` of the longer forecast, which is said once starts do not agree. The
    # `sides` are those of the whole problem. All `moves` are made unless some are named. What
    # another search between the same points has `begun` is not followed again.
    world = World(coarse, solver, call)
    low, edges = target / coarse.scale, _edges(coarse.problem, sides)
    found = Climb(
        world, low, count, affordable, guesses, stack, told, sharpened, repair, share, edges, begun
    )  # fmt: skip
    for move in moves or MOVES:
        if found.agreed or ((found.best or begun.ended) and is_over()):
            break
        move(found)
    return found.report()


def _edges(problem: CoarseProblem, sides: Sequence[DistanceProvider]) -> tuple[Edges, Edges] | None:
    """List the edges of both sides of graphs whose partners are exchanged along them."""
    # Nodes that can be exchanged share their partners in a plan, which keeps fewer edges than
    # either way. Small problems have exchanges of all pairs.
    small = can_exchange(problem) or not weigh_alike(problem.weights)
    graphs = graphs_of(sides) if sides and has_graphs(problem) and not small else None
    if graphs is None:
        return None
    source, target = (side.indices.cpu().numpy() for side in problem.sides)
    return graphs[0].among(source), graphs[1].among(target)


def _from_graphs(found: Climb) -> None:
    """Follow starts that only graphs have, until one keeps all edges that any plan can."""
    # If the plan is sharpened afterwards, until two have the same one but for its entropy.
    world, low = found.world, found.low
    problem = world.problem
    if not (found.count and has_graphs(problem)):
        return
    plain = is_graph(problem)
    sharpened = found.sharpened and found.sharp and not world.tiny
    # chains of large graphs take less than messages do, and are mostly right
    quick = sharpened or world.large
    begun, told = list[Chain](), list[Chain]()
    for begin in (_noise, _heat, _beliefs, _convex) if quick else (_beliefs, _heat, _convex):
        clock = perf_counter()
        chain = begin(found)
        chain.seconds = perf_counter() - clock
        begun.append(chain)
        if begin is _beliefs and found.edges is not None:
            # on the way down from where it is blurred it may lose edges
            found.graphs.append(chain)
            found.agreed = _keeps_most(found, _exchanged(found, tries=0.0))
            if found.agreed:
                return
            told = found.best[-1:]
        if begin is not _convex:
            world.descend([chain], chain.kind.ladder, found.level)
            found.compared += [replace(chain)] if found.sharp else []
        if sharpened and _have_met(world, found.compared):
            best, *others = sorted(found.compared, key=_objective)
            world.descend([best], world.refine._replace(decay=_STEEP), low)
            world.settle([best], low)
            found.best, found.behind, found.graphs = [best, *told], others, [best]
            # plans of a whole search are alike where edges of a few nodes are lost
            _exchanged(found)
            found.agreed = found.met = True
            return
        if sharpened and begin is _noise:
            # two starts are compared before either is followed
            continue
        for chain in begun:
            world.descend([chain], _CONVEX if begin is _convex else world.refine, low)
            world.settle([chain], low)
            found.best.append(chain)
            lowest = min([chain, *(told if begin is _beliefs else [])], key=_objective)
            found.graphs.append(lowest)
            plans = _exchanged(found) if found.lowest is lowest else world.rounded([lowest])
            # edges of a mean over directions are starts, and no measure of a match
            found.agreed = (plain or found.edges is not None) and _keeps_most(found, plans)
            if found.agreed or is_over():
                return
        begun = []
    if found.share:
        say_share(AGREED_SOON * found.share, "no start of graphs keeps all edges")
    # the first of all chains is followed again, with the others, and counts once
    found.best = [chain for chain in found.best if chain.kind != FIRST[0]]
    # half as many chains: starts of graphs find what most of them do not
    if plain:
        found.count = max(len(FIRST), found.count // 2)


def _keeps_most(found: Climb, plans: Tensor) -> bool:
    """Whether one of plans (k, s, t) of exact marginals keeps all edges that any plan can."""
    problem = found.world.problem
    edges = float(problem.source.table.square().mean())
    least = least_value(problem, found.edges)
    return float(problem.value(plans).min()) <= least + BETTER * edges


def _exchanged(found: Climb, tries: float = SEARCH_TRIES) -> Tensor:
    """Exchange partners of the last start of graphs along edges, and follow that to the target.

    Return the plan of the start, rounded, and that of the matching if there is one, (k, s, t).
    """
    world, chain = found.world, found.graphs.pop()
    plan = world.rounded([chain])
    if found.edges is None:
        return plan
    matched = _matchings(rematched(*found.edges, plan[0], tries)[None], plan)
    along = world.take("exchanges along edges", matched[0])
    along.seconds = chain.seconds
    world.settle([along], found.low)
    found.best.append(along)
    return torch.cat([plan, matched])


def _matchings(partners: Tensor, like: Tensor) -> Tensor:
    """Make plans (k, n, n) of partners (k, n)."""
    n = partners.shape[1]
    return torch.nn.functional.one_hot(partners.to(like.device), n).to(like) / n


def _have_met(world: World, chains: Sequence[Chain]) -> bool:
    """Whether the best of some chains has the plan of another one, far from the product plan."""
    best, *others = sorted(chains, key=_objective)
    if is_smeared(best.plan):
        return False
    product = torch.outer(*world.marginals)
    away, *moves = ((one.plan - product).flatten() for one in (best, *others))
    return any(float(torch.cosine_similarity(away, one, 0)) > _MET for one in moves)


def _noise(found: Climb) -> Chain:
    """Begin as the first of all chains does."""
    return found.world.begin(FIRST[0], 0)


def _beliefs(found: Climb) -> Chain:
    """Begin at the partners that messages along edges tell of."""
    world = found.world
    tables = world.problem.source.table, world.problem.target.table
    source, target = Graph.both(found.edges, tables)
    return world.take("beliefs", believed_plan(source, target, world.marginals))


def _heat(found: Climb) -> Chain:
    """Begin where the nodes of two graphs have alike signatures."""
    world = found.world
    costs = heat_costs(world.problem).float()[None]
    start = costs.new_zeros(1, 1, costs.shape[2])
    return world.take("heat", world.solve(costs, start, _SIGNED_AT, _SIGNED_INNER)[0][0])


def _convex(found: Climb) -> Chain:
    """Begin where the convex problem of two graphs has its minimum."""
    world = found.world

    def project(cost: Tensor, epsilon: float, iterations: int) -> Tensor:
        start = cost.new_zeros(1, 1, cost.shape[1])
        return world.solve(cost[None], start, epsilon, iterations)[0][0]

    return world.take("convex start", convex_path(world.problem, project))


def _from_product(found: Climb) -> None:
    """Follow independent chains by groups until the best ones agree, and these to the target."""
    world, count = found.world, found.count
    (chains, opposed), clock = map(list, found.begun[:2]), perf_counter()
    kinds = itertools.islice(kinds_of_chains(), len(chains) - len(opposed), None)
    told = found.told or (count > 0 and world.warn_if_long(count, found.low))
    while len(chains) - len(opposed) < count:
        # opposites of chains that were wrong together are not independent of each other
        independent = [chain for chain in chains if chain not in opposed[1:]]
        if chains and (is_over() or agree(independent)):
            break
        done = len(chains) - len(opposed)
        if done == len(FIRST) and not told:
            world.warn_if_more(count, found.low)
        # one chain is needed, to be compared
        some = 1 if is_over() else len(FIRST)
        numbers = range(done, min(count, done + some))
        fresh = [world.begin(kind, number) for number, kind in zip(numbers, kinds, strict=False)]
        for ladder in dict.fromkeys(chain.kind.ladder for chain in fresh):
            world.descend([one for one in fresh if one.kind.ladder == ladder], ladder, found.level)
        chains = sorted(chains + fresh, key=_objective)
        if not opposed and not is_over():
            # what breaks the symmetry of the product plan grows to one side, often the same for all
            # chains, and the best optimum may be on the other [L1289]
            opposed = _opposites(world, chains[:1], found.level)
            if not near(chains[0], opposed[0], SAME):
                opposed += _opposites(world, chains[1:], found.level)
            chains = sorted(chains + opposed, key=_objective)
        done, seconds = numbers.stop, perf_counter() - clock
        # all chains, that is: they may agree before
        logger.info(
            "search: %d of at most %d chains on all points in %.1f s, best objective %.6g; at most "
            "about %.0f s more until they are compared", done, count, seconds,
            chains[0].objective, seconds / done * (count - done),
        )  # fmt: skip
    if not chains:
        return
    # copies, as the best go on
    copies = {chain: replace(chain) for chain in chains}
    found.begun = found.begun._replace(
        chains=[*copies.values()], opposed=[copies[chain] for chain in opposed]
    )
    found.compared += copies.values()
    ended = [chain.name for chain in found.begun.ended]
    best = [chain for chain in promising(chains) if chain.name not in ended]
    if found.sharp:
        world.descend(best, world.refine, found.low)
        # unequal weights are met late: chains of one optimum differ until they are [L438]
        world.settle(best, found.low)
    found.best += best
    found.behind += [chain for chain in chains if chain not in best and chain.name not in ended]


def _opposites(world: World, chains: Sequence[Chain], above: float) -> list[Chain]:
    """Follow the opposites of chains to the epsilon of the first comparison."""
    found = [world.oppose(chain) for chain in chains]
    world.descend(found, QUICK, above)
    return found


def _from_guesses(found: Climb) -> None:
    """Follow plans that were found by other means to the target."""
    world, low = found.world, found.low
    guessed = [world.take(name, plan) for name, plan, rows in found.guesses if rows is None]
    few = world.base.numel() <= limits_of(world.base.device).open_most
    stayed = [replace(chain) for chain in guessed if few]
    # an optimum at the target may be none on the way there
    world.settle(stayed, low)
    if found.stack is not None:
        found.best += stayed
    else:
        # but at the target at once plans are far from their marginals, and look worse than they
        # are; and from a larger epsilon they come to better ones next to them [L1382]
        world.descend(guessed, QUICK if few else world.refine, low)
        if found.sharp:
            world.settle(guessed, low)
        ways = zip(guessed, stayed or guessed, strict=True)
        found.best += [min(each, key=_objective) for each in ways]
    lifted = [
        world.lift(name, plan, rows) for name, plan, rows in found.guesses if rows is not None
    ]
    world.descend(lifted, QUICK, low)
    if found.sharp:
        world.settle(lifted, low)
    found.best += lifted
    found.best += found.begun.ended
    # what is followed to its end is judged there
    found.agreed = found.stack is None and found.sharp and enough(found.best)


def _say_that_starts_differ(found: Climb) -> None:
    """Say what the moves take that are made where starts do not agree."""
    if found.share:
        say_share(found.share, "starts on all points do not agree")


def _by_exchanges(found: Climb) -> None:
    """Follow the best matchings at the target."""
    world, clock = found.world, perf_counter()
    if not (found.small and can_exchange(world.problem)):
        return
    known = sorted(found.best, key=_objective)
    many = max(1.0, found.count / limits_of(world.base.device).chains_of("auto"))
    partners, alike = best_matchings(world.problem, stacked(known)[0], many)
    matched = _matchings(partners, world.base)
    seconds = (perf_counter() - clock) / len(matched)
    chains = [world.take(f"exchanges {k + 1}", plan) for k, plan in enumerate(matched)]
    for chain in chains:
        chain.seconds = seconds
    world.settle(chains, found.low)
    found.best += chains
    if found.stack is not None:
        # from the matchings themselves a stack may come to lower ends
        found.best += [
            replace(chain, plan=plan) for chain, plan in zip(chains, matched, strict=True)
        ]
    # unless the best plan is no matching, for which chains have looked
    sure = alike and near(min(chains, key=_objective), found.lowest, SAME)
    found.repair = False
    # states of one search are made of each other, and say no more than the best of them
    one = [min(chains, key=_objective), *known]
    found.related = () if sure else tuple(chain.name for chain in chains)
    found.agreed = found.stack is None and (sure or enough(one))


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
        self.left = max(_AT_ONCE, world.repairs_within(self.ladder, _MOST_REPAIRS))

    def improved(self, chain: Chain) -> Chain:
        """Take a chain to the epsilon of the repairs, and repair it until it gets no better."""
        best = self.world.take("repair", chain.plan)
        self._follow([best])
        idle, patience = 0, _AT_ONCE
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
        penalties = (PRICE * self.world.scale) * torch.stack(barred)
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


def _by_repair(found: Climb) -> None:
    """Repair the best of different chains, and follow them to the target, until two agree."""
    if not (found.repair and found.sharp and found.stack is None):
        return
    # of more starts there are more that are right in some regions; the lowest alone has its regions
    # matched anew [L1704]
    while found.graphs:
        _exchanged(found, tries=0.0)
    repair, lowest = Repair(found.world, COMPARED_AT), found.lowest
    # one that stands out is the best, unless it can be repaired
    alone = stands_out(found.best)
    for chain in _apart(found.best, _REPAIRED):
        fresh = repair.improved(chain)
        found.world.finish([fresh], found.low)
        found.repaired = sorted([*found.repaired, fresh], key=_objective)
        best, done = found.repaired[:2], len(found.repaired)
        logger.info(
            "search: %d of at most %d chains repaired, best objective %.6g", done, _REPAIRED,
            best[0].objective,
        )  # fmt: skip
        # chains that are no better may differ in nothing but their plans
        if len(best) > 1 and near(best[1], best[0], SAME) and len(_apart(best, 2)) == 1:
            found.agreed = True
            break
        if done == (1 if alone else _FIRST) and near(lowest, best[0], SAME if alone else _HELPED):
            break
    found.best += found.repaired


def _apart(chains: list[Chain], count: int) -> list[Chain]:
    """Choose chains of different plans, the best first."""
    chains = sorted(chains, key=_objective)
    flat = torch.nn.functional.normalize(stacked(chains)[0].flatten(1))
    alike = (flat @ flat.mT > ALIKE).tolist()
    kept: list[int] = []
    for place, row in enumerate(alike):
        # plans are compared, not objectives: a plan on its way to an optimum is not a different one
        if not any(row[other] for other in kept):
            kept.append(place)
    return [chains[place] for place in kept[:count]]


class _Level(NamedTuple):
    """What follows plans of all points to an epsilon, as a stack does to the target."""

    world: World
    share: float

    def follow(self, which: Tensor, plans: Tensor, first: float = 0.0) -> Ends:
        """Follow plans (k, s, t) from a ``first`` epsilon, or from that of kicks if larger."""
        world, first = self.world, max(first, _KICKED, self.share)
        start = torch.zeros_like(plans[:, :1])
        plans, g = world.solve(
            world.costs_anywhere(plans, first), start, first * world.scale, INNER
        )
        chains = [replace(world.take("", plan), g=own) for plan, own in zip(plans, g, strict=True)]
        world.descend(chains, _BETWEEN._replace(start=first), self.share)
        return ends_of(chains)

    def rows(self, which: Tensor) -> Tensor:
        """Count the rows of plans, (k,)."""
        return torch.full_like(which, self.world.base.shape[0])


def ends_of(chains: Sequence[Chain]) -> Ends:
    """Put chains beside each other."""
    numbers = [[chain.objective, chain.value] for chain in chains]
    table = torch.tensor(numbers, dtype=torch.float64, device=chains[0].plan.device)
    return Ends(stacked(list(chains))[0], *table.T)


def _by_rounds(found: Climb) -> None:
    """Kick and mix the best plans in two groups that know nothing of each other."""
    world = found.world
    spare = (found.affordable - found.count) // FRESH
    rounds = min(_MOST_ROUNDS, spare)
    stack, some = found.stack, found.sharp if found.stack else found.sharp or found.small
    if rounds > 0 and some and not stands_out(found.best):
        starts = sorted(found.compared if found.sharp else found.best, key=_objective)
        ends = Ends(*(part[None] for part in ends_of(starts)))
        improved = improve(_Level(world, found.level), ends, rounds)
        members = improved.members.alone()
        fresh = [
            replace(world.take(name_of(origin, ()), plan), objective=objective, value=value)
            for plan, objective, value, origin in zip(
                members.plans, *map(Tensor.tolist, members[1:]), strict=True
            )
            if origin >= len(starts)
        ][:REFINED]
        if stack is None:
            world.finish(fresh, found.low)
            # where plans are compared all may be one blur, which leads to different ones below it
            found.agreed = bool(improved.agreed) and not is_smeared(members.plans[0])
        elif not improved.agreed:
            # groups that were put together have made them of each other
            found.related += tuple(chain.name for chain in fresh)
        found.best += fresh
    if found.small and stack is None:
        world.rest(found.best, LONG._replace(start=found.low))


def _to_ends(found: Climb) -> None:
    """Follow all plans to their ends, and improve them there."""
    clock, world, stack = perf_counter(), found.world, found.stack
    if stack is None:
        return
    chains = [*found.behind, *sorted(found.best, key=_objective)]
    weights = world.problem.weights
    # an optimum that no ladder comes to may be met from the product plan at the target
    starts = [("product", noisy_product(*weights)), *((chain.name, chain.plan) for chain in chains)]
    # where plans may be matchings, tabu search has exchanged their partners; of more points too few
    # exchanges are looked at to tell anything [L1867]
    checked = world.tiny and not can_exchange(world.problem)
    ends = follow_starts(stack, starts, weights, _ROUNDS, related=found.related, checked=checked)
    seconds = (perf_counter() - clock) / ends.followed
    plans = round_to_marginals(ends.plans, *weights)
    best = [
        replace(world.take(name, plan), plan=plan)
        for name, plan in zip(ends.names, plans, strict=True)
    ]
    for chain, objective, value in zip(best, ends.objectives, ends.values, strict=True):
        chain.epsilon, chain.seconds = found.low * world.scale, seconds
        chain.objective, chain.value = objective, value
    first = world.take("", plans[0])
    world.settle([first], found.low)
    best[0].g = first.g
    found.best, found.behind, found.agreed, found.settled = best, [], ends.certain, True


# The starts that know of edges, and those that know of nothing.
STARTS = _from_graphs, _from_product
# In the order in which they are made, until what is independent agrees.
MOVES = (
    _from_graphs, _from_product, _from_guesses, _say_that_starts_differ, _by_exchanges, _by_rounds,
    _by_repair, _to_ends,
)  # fmt: skip


def _objective(chain: Chain) -> float:
    return chain.objective
