"""Partners that distances alone show, between nearly isometric spaces."""

import torch
from torch import Tensor

from torchgw._plans.contract import Anchors
from torchgw._plans.given import PairPlan
from torchgw._problem.problem import Problem
from torchgw._search.starts import distance_quantiles
from torchgw.distances.base import DistanceProvider

# Squared number of points of the larger side up to which all distances are read. [L279]
_MOST_ENTRIES = 9_000_000
# Share of the partners that are looked at: those that are clearest beside their second nearest, as
# most right ones are. [L232]
_CLEAR_SHARE = 1 / 3
# The partners are believed if the distances among them correlate by this; so many partners are
# needed at least. [L233, L279]
_BELIEVED = 0.7
_FEWEST = 32
# Distances read at once. [L279]
_BLOCK_ELEMENTS = 2**22


def match_points(problem: Problem) -> PairPlan | None:
    """Match points by their distance distributions, if the matches agree with each other."""
    # Two points are partners if the quantiles of their distances to all others (Memoli's third
    # lower bound) are nearest to each other both ways. Of a noisy copy some are right and the
    # others are anywhere, so the doubly centred distances among partners correlate on both sides;
    # otherwise, or where distances come by costly columns or a linear cost has a say, there is no
    # plan.
    sides = (problem.source, problem.target)
    largest = max(side.n for side in sides)
    if problem.linear is not None or largest**2 > _MOST_ENTRIES:
        return None
    if not all(side.cheap_columns for side in sides):
        return None
    used = [(weight > 0).nonzero()[:, 0] for weight in problem.marginals]
    x, y = (
        _quantiles(side, weight, index)
        for side, weight, index in zip(sides, problem.marginals, used, strict=True)
    )
    if min(len(x), len(y)) < _FEWEST:
        return None
    distance = torch.cdist(x, y)
    nearest, there = distance.topk(2, dim=1, largest=False)
    back = distance.argmin(0)
    mutual = (back[there[:, 0]] == torch.arange(len(x), device=x.device)).nonzero()[:, 0]
    clear = (nearest[mutual, 0] / nearest[mutual, 1].clamp_min(torch.finfo(x.dtype).tiny)).argsort()
    chosen = mutual[clear[: max(_FEWEST, int(_CLEAR_SHARE * len(mutual)))]]
    pairs = Anchors(used[0][chosen], used[1][there[chosen, 0]])
    if len(chosen) < _FEWEST or _correlation(problem, pairs) < _BELIEVED:
        return None
    mass = (problem.marginals.a[pairs.source] * problem.marginals.b[pairs.target]).sqrt()
    return PairPlan(pairs, mass / mass.sum(), (problem.source.n, problem.target.n))


def _quantiles(provider: DistanceProvider, weights: Tensor, index: Tensor) -> Tensor:
    """Return quantiles of the distances of some points to all others, float32."""
    blocks = index.split(max(1, _BLOCK_ELEMENTS // provider.n))
    tables = (provider.columns(block).T for block in blocks)
    return torch.cat([distance_quantiles(table.float(), weights.float()) for table in tables])


def _correlation(problem: Problem, pairs: Anchors) -> float:
    """Return the correlation of the doubly centred distances among pairs, but those to itself."""
    sides = zip((problem.source, problem.target), pairs, strict=True)
    x, y = (_centred(side.columns(index)[index].double()) for side, index in sides)
    size = (x.norm() * y.norm()).clamp_min(torch.finfo(x.dtype).tiny)
    return float((x * y).sum() / size)


def _centred(table: Tensor) -> Tensor:
    others = table.sum(1) / (len(table) - 1)
    table = table - table.diag().diag() + others.diag()
    return table - table.mean(0) - table.mean(1, keepdim=True) + table.mean()
