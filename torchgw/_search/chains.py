"""Chains of solves on all points, for problems that few points do not represent.

Each chain begins near the product plan, breaks its symmetry in a way of its own, and follows
epsilon down a ladder. Chains are compared by the objective with entropy: first where epsilon is
still large enough to be cheap and small enough to tell good optima from bad ones, and the best of
them again at the target.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._plans.transport import round_to_marginals
from torchgw._problem.limits import limits_of
from torchgw._search.chain import (
    AGREEING,
    REFINED,
    SAME,
    Chain,
    Climbed,
    Trial,
    agree,
    enough,
    near,
    promising,
    stacked,
    stands_out,
)
from torchgw._search.chain_times import tell, warn_if_long, warn_if_more, within_time
from torchgw._search.coarse import Coarsened
from torchgw._search.graph_chains import Begun, begin_graphs
from torchgw._search.graphs import is_graph
from torchgw._search.kinds import COMPARED_AT, FIRST, LATER, LONG, QUICK
from torchgw._search.population import improve, name_of
from torchgw._search.rounds import Improvement
from torchgw._search.stack import Ends, Stack
from torchgw._search.tabu import best_matchings, can_exchange
from torchgw._search.world import World
from torchgw._sinkhorn.batch import BatchSolver, solve_batch
from torchgw._tensors.cuda_graphs import Call, call_directly
from torchgw._tensors.deadline import is_over

# Later chains run in groups of so many; after each group the search looks at what has been found.
# [L333]
_ROUND = 4
# Optima that rounds at the target keep, at most. [L345, L563]
_KEPT = 8
# Chains whose plans are followed to their ends, and rounds that improve them, at most. [L1291]
_WIDE, _ROUNDS = 8, 4
# Relative noise on the product plan, which may be a saddle point. [L391, L1292]
_NOISE = 1e-6
# Up to so many entries guesses are also followed at the target alone, and from a larger epsilon.
# [L1270]
_STAYING = 2**16


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
    sharp = low < COMPARED_AT
    begun = Begun()
    if is_graph(coarse.problem):
        over, begun = begin_graphs(world, low, sharpened=sharpened)
        if over is not None:
            return over
        # half as many chains: starts of graphs find what most of them do not
        count = max(len(FIRST), count // 2)
    rounds = Improvement(world, itertools.count(count))
    told = told or warn_if_long(world, count, low)
    followed = _follow(world, low, count, affordable, begun, in_time=in_time, told=told)
    best = [*followed.best, *begun.found, *_follow_guesses(world, guesses, low)]
    if stack is not None:
        if sharp:
            compared, spare = followed.compared, followed.affordable - followed.done
            best += rounds.halves(compared, spare)[0][:_WIDE]
        return _improved(world, stack, low, best, [*followed.best, *followed.behind], rounds.left)
    small = world.base.numel() <= limits_of(world.base.device).stacked
    matched, alike, repaired = list[Chain](), False, list[Chain]()
    if sharp and small and can_exchange(coarse.problem):
        matched, alike = _exchanged(world, best, low)
        best += matched
    behind, independent = followed.behind, None
    if not sharp:
        if small:
            again, independent = rounds.again(best, low, followed.most)
            best, behind = again[:_KEPT], again[_KEPT:] + behind
        world.settle(best, low)
    elif not enough(best):
        if repair and not matched:
            repaired, independent = rounds.repaired(best, low)
            best += repaired
        if not independent and not stands_out(best):
            compared, spare = followed.compared, followed.affordable - followed.done
            improved, independent = rounds.halves(compared, spare)
            improved = [chain for chain in improved if chain not in compared][:REFINED]
            world.finish(improved, low)
            best += improved
            if alike:
                # unless the best plan is no matching, for which the other chains have looked
                independent |= near(matched[0], min(best, key=_objective), SAME)
            if small:
                world.rest(best, LONG._replace(start=low))
    left = [*rounds.left, *(chain.trial("left behind") for chain in behind)]
    agreed = enough(best) if independent is None else independent
    lowest = min(best, key=_objective)
    alone = not agreed and all(chain in repaired for chain in best if near(chain, lowest, SAME))
    return world.report(best, left, agreed=agreed, alone=alone)


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
    kinds = itertools.islice(itertools.chain(FIRST, itertools.cycle(LATER)), len(chains), None)
    done, clock = len(chains), perf_counter()
    while True:
        if done == len(FIRST) and not told:
            warn_if_more(world, count, low)
        most = done + _ROUND if done >= len(FIRST) else len(FIRST)
        numbers = range(done, min(count, most))
        fresh = [world.begin(kind, number) for number, kind in zip(numbers, kinds, strict=False)]
        for ladder in dict.fromkeys(chain.kind.ladder for chain in fresh):
            world.descend([one for one in fresh if one.kind.ladder == ladder], ladder, above)
        if sharp:
            compared += map(replace, fresh)
        if level < above:
            world.descend(fresh, world.refine, level)
        chains = sorted(chains + fresh, key=_objective)
        if not opposed:
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
            affordable = count = within_time(world, done, count, low)
            if done >= count:
                break
    return _Followed(best, behind, compared, done, count, affordable)


def _improved(
    world: World,
    stack: Stack,
    low: float,
    best: Sequence[Chain],
    chains: Sequence[Chain],
    left: Sequence[Trial],
) -> Climbed:
    """Follow the best plans to their ends on a stack, and improve them there."""
    clock = perf_counter()
    best = sorted(best, key=_objective)
    starts = [(chain.name, chain.plan) for chain in (*chains, *best)]
    if can_exchange(world.problem):
        partners, _ = best_matchings(world.problem, stacked(best)[0])
        matched = torch.nn.functional.one_hot(partners, partners.shape[1]).to(world.base)
        starts += [(f"exchanges {place + 1}", plan) for place, plan in enumerate(matched)]
    # the product plan, annealed
    product = torch.outer(*world.marginals)
    generator = torch.Generator("cpu").manual_seed(0)
    noise = torch.randn(product.shape, device="cpu", generator=generator)
    product = stack.padded(product[None] * (1 + _NOISE * noise.to(product)))
    alone = torch.zeros(len(starts) + 1, dtype=torch.int64, device=product.device)
    annealed = stack.follow(alone[:1], product, first=1.0).plans
    plans = torch.cat([stack.padded(torch.stack([plan for _, plan in starts])), annealed])
    ends = Ends(*(part[None] for part in stack.follow(alone, plans)))
    # every other plan is of a group: chains know nothing of each other
    found = improve(stack, ends, _ROUNDS)
    labels = [*(label for label, _ in starts), "product"]
    seconds, epsilon = (perf_counter() - clock) / int(found.followed), low * world.scale
    (n, m), members = world.base.shape, found.members.alone()
    trials = [
        Trial(name_of(origin, labels), epsilon, objective, value, seconds, "refined")
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
    few = world.base.numel() <= _STAYING
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
