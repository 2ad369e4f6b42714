"""Plans that are right in some regions, of which the rest is matched anew."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from torchgw._search.chain import QUICK, SAME, Chain, near
from torchgw._search.graphs import is_sparse
from torchgw._search.world import INNER, World
from torchgw._tensors.deadline import is_over

# Shares of the points that are held, by turns; plans in a row that may be no better before any has
# been, after which all shares may; and plans of all chains at most. [L1280]
_HELD_SHARES, _REPAIR_PATIENCE, _MOST_REPAIRS = (0.2, 0.4, 0.6, 0.8, 0.3, 0.5, 0.7, 0.9), 4, 64
# Repairs of one plan by different shares, of which the best is taken. [L1284]
_AT_ONCE = 4
# How epsilon falls while points are held.
_REPAIR_LADDER = QUICK._replace(meeting=INNER)
# Sinkhorn iterations at the end of a ladder. [L559, L1280]
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
