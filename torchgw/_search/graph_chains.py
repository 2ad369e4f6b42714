"""Chains between two graphs: from starts that only graphs have, and ended where they meet."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._search.chain import Chain, Climbed
from torchgw._search.graphs import convex_path, heat_costs, least_value
from torchgw._search.kinds import COMPARED_AT, FIRST, Ladder
from torchgw._search.world import World
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
        if _is_unbeaten(world, chain):
            left = [one.trial("left behind") for one in before]
            return world.report([chain], left, agreed=True), Begun()
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
    heat = heat or _heat(world, level)
    high = replace(heat)
    if low < level:
        world.descend([heat], world.refine, low)
    yield high, heat
    convex = _convex(world)
    world.descend([convex], _CONVEX, low)
    yield None, convex


def _is_unbeaten(world: World, chain: Chain) -> bool:
    """Whether no plan keeps more edges of two graphs than that of a chain, or few more."""
    edges = float(world.problem.source.table.square().mean())
    enough = least_value(world.problem) + _ALL_EDGES * edges
    return float(world.problem.value(world.rounded([chain]))) <= enough


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


def _heat(world: World, level: float) -> Chain:
    """Begin where the nodes of two graphs have alike signatures; follow that to an epsilon."""
    clock = perf_counter()
    costs = heat_costs(world.problem).float()[None]
    start = costs.new_zeros(1, 1, costs.shape[2])
    chain = world.take("heat", world.solve(costs, start, _SIGNED_AT, _SIGNED_INNER)[0][0])
    chain.seconds = perf_counter() - clock
    world.descend([chain], world.refine, level)
    return chain
