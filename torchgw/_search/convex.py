"""The convex start of graphs: the plan that makes two adjacency matrices commute."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._search.coarse import CoarseProblem
from torchgw._search.graphs import Graphs, density
from torchgw._typing import Marginals

# Share of entries that are not zero up to which two tables are taken for graphs. [L337]
_DENSITY = 0.2
# Steps on the convex objective, stages of the path to the other one, and steps of each. [L337]
_CONVEX_STEPS, _STAGES, _STAGE_STEPS = 100, 10, 6
# Sinkhorn iterations of a step. [L337]
_INNER = 5
# How the weight of a step changes when it was good and when it was not. [L337]
_LOWER, _HIGHER = 0.85, 2.0
# Largest weight, as a multiple of the first: from a smaller one no step would be short enough.
# [L337]
_LARGEST = 1e6
# Least share of a b that a logarithm is taken of. [L337]
_LEAST = 1e-30

# Plans of costs (s, t) at an epsilon after some Sinkhorn iterations.
Project = Callable[[Tensor, float, int], Tensor]


def is_graph(problem: CoarseProblem) -> bool:
    """Tell whether both tables are mostly zeros, as of graphs, and nothing else has a say."""
    return problem.linear is None and density(problem) <= _DENSITY


def convex_path(problem: CoarseProblem, project: Project) -> Tensor:
    """Minimise |S Q - Q T|^2 over plans (s, t), then turn its convex part off by stages.

    S_ij is A_ij sqrt(a_i a_j), T is B likewise, Q_ij is P_ij / sqrt(a_i b_j): a permutation where
    P is a matching of equal weights. The first problem is convex, and sees what graphs have in
    common wherever that is; what is left at the end is the Gromov-Wasserstein objective. Mirror
    descent, whose step becomes shorter when the objective has risen.

    References
    ----------
    M. Zaslavskiy, F. Bach, J.-P. Vert. A path following algorithm for the graph matching problem.
    IEEE Transactions on Pattern Analysis and Machine Intelligence 2009.
    """
    graphs = Graphs(problem)
    weights = Marginals(problem.source.weights.float(), problem.target.weights.float())
    product = torch.outer(*weights)
    plan, slopes = product, _slopes(graphs, weights, product)
    first = weight = float(slopes.at(1.0).std())
    shares = [1.0] * _CONVEX_STEPS
    shares += [1 - stage / _STAGES for stage in range(1, _STAGES + 1) for _ in range(_STAGE_STEPS)]
    for share in shares:
        slope = slopes.at(share)
        # a proximal step: its entropy is relative to the plan itself
        near = (plan / product).clamp_min(_LEAST).log_()
        moved = project(slope - weight * near, weight, _INNER)
        after = _slopes(graphs, weights, moved)
        # the objective is quadratic: half the product with its derivative
        if float((after.at(share) * moved).sum()) <= float((slope * plan).sum()):
            plan, slopes = moved, after
            weight *= _LOWER
        else:
            weight = min(_LARGEST * first, _HIGHER * weight)
    return plan


class _Slopes(NamedTuple):
    """Derivatives of |S Q|^2 + |Q T|^2 and of -2 <A P B, P>, (s, t)."""

    convex: Tensor
    crossed: Tensor

    def at(self, share: float) -> Tensor:
        """Add them, the convex part by a share."""
        return torch.add(self.crossed, self.convex, alpha=share)


def _slopes(graphs: Graphs, weights: Marginals, plan: Tensor) -> _Slopes:
    """Differentiate both parts at a plan (s, t)."""
    a, b = weights.a[:, None], weights.b
    left, right = graphs.left(plan), graphs.right(plan)
    # plans have nothing where a weight is zero
    convex = graphs.left(a * left) / b.where(b > 0, 1) + graphs.right(right * b) / a.where(a > 0, 1)
    return _Slopes(2 * convex, -4 * graphs.right(left))
