"""Two large graphs that were given, matched by their edges: nothing (n, m) is stored.

Paths of large graphs are compared through landmarks, and few nodes stand for the others. Where all
paths are short neither tells where a node belongs; its edges do. What a match of these costs is
estimated from the exact paths of some nodes, as is what a plan costs that landmarks have led to.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchgw._gradients.contract import QuadraticValue
from torchgw._plans.contract import Anchors, Plan
from torchgw._plans.given import PairPlan
from torchgw._problem.limits import limits_of
from torchgw._problem.problem import Problem, weigh_alike
from torchgw._search.beliefs import MATCHING_TRIES, rematch_regions, seconds_of_candidates
from torchgw._starts.graphs import Edges
from torchgw._tensors.deadline import is_over, leaves
from torchgw._tensors.operations import EQUAL
from torchgw.distances.base import DistanceProvider
from torchgw.distances.dijkstra import DijkstraDistance
from torchgw.distances.geodesics import Geodesics

# Nodes whose paths are read to estimate what a plan costs. [L327]
_READ = 256


class GivenMatch(NamedTuple):
    """A match of the nodes of two graphs."""

    edges: tuple[Edges, Edges]
    sides: tuple[DistanceProvider, DistanceProvider]  # exact paths, in the units of the problem
    plan: PairPlan
    kept: float  # share of the edges of the graph that has fewer
    alike: float  # correlation of paths in one graph with those in the other
    value: QuadraticValue
    certain: bool

    def keeps(self, partners: Tensor) -> float:
        """Compute the share of edges that partners (n,) keep."""
        return _kept(*self.edges, partners)

    def value_of(self, plan: Plan) -> QuadraticValue:
        """Estimate what another plan costs."""
        return _value(self.sides, plan)[0]


def match_given(
    problem: Problem, graphs: tuple[Geodesics, Geodesics], scales: tuple[float, float]
) -> GivenMatch | None:
    """Match two graphs, whose paths a problem compares by some scales; ``None`` if time is over."""
    device, limits = problem.source.device, limits_of(problem.source.device)
    near, far = (Edges.given(graph) for graph in graphs)
    fewer = min(len(near.keys), len(far.keys))
    seconds = seconds_of_candidates(fewer) if device.type == "cpu" else 0.0
    if not (fewer and leaves(seconds)):
        return None
    partners = torch.from_numpy(rematch_regions(near, far, None, MATCHING_TRIES, device))
    if is_over():
        return None
    n, partners = problem.source.n, partners.to(device)
    pairs = Anchors(torch.arange(n, device=device), partners)
    plan = PairPlan(pairs, problem.marginals.a, (n, n), distinct=True)
    first, second = (
        DijkstraDistance(graph, device=device).scaled(scale)
        for graph, scale in zip(graphs, scales, strict=True)
    )
    value, *told = _value((first, second), plan)
    kept, alike = _kept(near, far, partners), _correlation(*told, graphs, scales)
    certain = kept >= limits.kept_edges and alike >= limits.believed
    return GivenMatch((near, far), (first, second), plan, kept, alike, value, certain)


def matches_given(
    problem: Problem, graphs: tuple[Geodesics | None, Geodesics | None]
) -> tuple[Geodesics, Geodesics] | None:
    """Return graphs that are matched by their edges: too large for stored paths, of one size."""
    source, target = graphs
    large = problem.source.n * problem.target.n > limits_of(problem.source.device).subsample
    plain = problem.linear is None and problem.support is None and problem.restriction is None
    plain &= problem.loss.is_square and problem.alpha == 1
    alike = problem.source.n == problem.target.n and weigh_alike(problem.marginals)
    if source is None or target is None or not (large and plain and alike):
        return None
    stored = any(side.matrix() is not None for side in problem.sides)
    return None if stored else (source, target)


def _kept(near: Edges, far: Edges, partners: Tensor) -> float:
    """Compute the share of the edges of the graph that has fewer which partners (n,) keep."""
    there = partners.cpu().numpy()
    found = far.at(there[near.rows], there[near.columns], near.layer)
    return float(np.count_nonzero(found) / min(len(near.keys), len(far.keys)))


def _value(
    sides: tuple[DistanceProvider, DistanceProvider], plan: Plan
) -> tuple[QuadraticValue, Tensor, Tensor]:
    """Estimate the value of a plan from some pairs; return paths from these, and their images."""
    n, m = plan.shape
    device = sides[0].device
    generator = torch.Generator(device).manual_seed(0)
    places = torch.rand(_READ, dtype=torch.float64, device=device, generator=generator)
    pairs = plan.sample_at(places, torch.arange(n, device=device), generator)
    x, y = (side.columns(index).double() for side, index in zip(sides, pairs, strict=True))
    images = plan @ y  # of mass 1 / n each
    each = x.square().sum(0) / n + y.square().sum(0) / m - 2 * (x * images).sum(0)
    value = QuadraticValue(float(each.mean()), float(each.std()) / math.sqrt(len(each)))
    return value, x, n * images


def _correlation(
    x: Tensor, y: Tensor, graphs: tuple[Geodesics, Geodesics], scales: tuple[float, float]
) -> float:
    """Correlate the lengths of paths, where there are some in both graphs."""
    most = [
        math.inf if graph.unreachable is None else (1 - EQUAL) * graph.unreachable * scale
        for graph, scale in zip(graphs, scales, strict=True)
    ]
    joined = (x < most[0]) & (y < most[1])
    return float(torch.corrcoef(torch.stack([x[joined], y[joined]]))[0, 1].nan_to_num())
