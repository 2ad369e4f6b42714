"""Whether few points say where all of them go."""

import torch
from torch import Tensor

from torchgw._problem.limits import limits_of
from torchgw._problem.problem import Problem
from torchgw._search.alternatives import Search
from torchgw._search.graph_chains import SMEARED
from torchgw._search.graphs import is_sparse
from torchgw.distances.base import DistanceProvider
from torchgw.distances.sampling import choose_points

# Loneliness (see there) above which a few points say nothing about the others: 0.05 to 0.9 for
# curves, clouds in up to 10 dimensions, clusters; 0.9 to 14 for word vectors, networks, noise.
# [L332]
_LONELY = 0.9
# A resolution as small as this does not occur for distances, but for those of very few points or on
# a line. [L335]
_NO_DISTANCE = 0.01


def tells_all(problem: Problem, first: Search) -> bool:
    """Whether the optima of few points determine where all points go."""
    # entries of adjacency matrices and similarities are no distances, and small ones abound
    few = first.resolution > _NO_DISTANCE or is_structured(problem, first)
    sides = problem.source, problem.target
    return few and not any(_is_similarity(side) or _is_adjacency(side) for side in sides)


def is_structured(problem: Problem, found: Search | None = None) -> bool:
    """Tell whether points have others like them, so that few of them represent all."""
    # The few are those of a search, if it has drawn some.
    drawn = found.points if found else (None, None)
    sides = zip((problem.source, problem.target), problem.marginals, drawn, strict=True)
    return all(_loneliness(*side) <= _LONELY for side in sides)


def is_smeared(problem: Problem, found: Search) -> bool:
    """Tell whether the best plan between the nodes of two graphs hardly tells partners."""
    best = found.alternatives[0]
    plan, epsilon = best.plan, best.epsilon
    if epsilon == 0:
        return False
    product = torch.outer(plan.sum(1), plan.sum(0))
    if float((plan - product).abs().sum()) > SMEARED:
        return False
    tables = problem.source.matrix(), problem.target.matrix()
    return all(table is not None and is_sparse(table) for table in tables)


def _is_similarity(provider: DistanceProvider) -> bool:
    """Whether the first point is further from itself than from others, as by similarities."""
    columns = provider.columns(torch.arange(1, device=provider.device))
    return bool(provider.n * columns[0, 0] > columns.sum())


def _is_adjacency(provider: DistanceProvider) -> bool:
    """Whether most entries of a table are zero."""
    table = provider.matrix()
    return table is not None and is_sparse(table)


def _loneliness(provider: DistanceProvider, weights: Tensor, drawn: Tensor | None) -> float:
    """Root mean square difference of a point's distances to those of the nearest coarse point."""
    # Relative to the deviation of distances: about 1 where points have nothing in common. That also
    # holds for adjacency matrices and similarities, which say "near" with large numbers or not at
    # all.
    few = limits_of(provider.device).few_points
    points = choose_points(provider, weights, few).indices if drawn is None else drawn
    columns = provider.columns(points).double()
    others = columns.clone()
    others[points, torch.arange(len(points), device=points.device)] = torch.inf
    nearest = points[others.argmin(1)]
    columns = torch.cat([way.columns(points).double() for way in provider.ways()], dim=1)
    error = (columns - columns[nearest]).square().mean(1) @ weights
    variance = columns.var().clamp_min(torch.finfo(columns.dtype).tiny)
    return float((error / variance).sqrt())
