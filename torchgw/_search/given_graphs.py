"""Two graphs that were given, matched by their edges: nothing (n, m) is stored.

An edge that is missing makes many paths longer, and a piece that it cuts off has none to the rest:
paths then cost less elsewhere than where the nodes belong, which their edges tell. What a match of
these costs is computed from the paths that are compared; where these go through landmarks, from the
exact ones of some nodes, as is what a plan costs that landmarks have led to.
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
from torchgw._problem.problem import Problem
from torchgw._search.beliefs import is_kept, kept_share, match_edges_alone, seconds_of_candidates
from torchgw._starts.graphs import Array, Edges
from torchgw._tensors.deadline import leaves
from torchgw._typing import Marginals
from torchgw.distances.base import DistanceProvider
from torchgw.distances.dijkstra import DijkstraDistance
from torchgw.distances.geodesics import Geodesics

# Nodes whose paths are read to estimate what a plan costs. A choice.
_READ = 256


class GivenMatch(NamedTuple):
    """A match of the nodes of two graphs."""

    edges: tuple[Edges, Edges]  # of the graph with fewer nodes, and of the other
    sides: tuple[DistanceProvider, DistanceProvider]  # exact paths, in the units of the problem
    plan: PairPlan
    kept: float  # share of the edges of the graph that has fewer
    value: QuadraticValue
    certain: bool  # whether it keeps nearly all of them, and with these its largest piece
    exact: bool  # whether these sides are the tables that are compared

    @property
    def of_all(self) -> bool:
        """Whether no node is left out, so that the match is a plan."""
        return self.edges[0].n == self.edges[1].n

    def keeps(self, plan: Plan) -> float:
        """Compute the share of edges that a plan keeps, as it is read."""
        smaller = plan if plan.shape[0] <= plan.shape[1] else plan.T
        return kept_share(*self.edges, torch.as_tensor(smaller.argmax(1), device=plan.device))

    def filled(self, marginals: Marginals) -> Tensor:
        """Make a plan (n, m) of these marginals, which shares out what the match leaves."""
        plan = self.plan.stored().to(marginals.a)
        left = Marginals(marginals.a - plan.sum(1), marginals.b - plan.sum(0))
        rest = max(float(left.a.sum()), torch.finfo(plan.dtype).tiny)
        return plan.addr(left.a, left.b, alpha=1 / rest)

    def value_of(self, plan: Plan) -> QuadraticValue:
        """Estimate what another plan costs."""
        return _value(self.sides, plan)


def match_given(
    problem: Problem, graphs: tuple[Geodesics, Geodesics], scales: tuple[float, float]
) -> GivenMatch | None:
    """Match two graphs, of which paths are compared by some scales; ``None`` if it takes long."""
    device, limits = problem.source.device, limits_of(problem.source.device)
    given = [Edges.given(graph) for graph in graphs]
    near, far = sorted(given, key=lambda one: one.n)
    fewer = min(len(near.keys), len(far.keys))
    seconds = seconds_of_candidates(fewer) if device.type == "cpu" else 0.0
    if not (fewer and leaves(seconds)):
        return None
    partners = match_edges_alone(near, far, problem.marginals)
    ends = torch.arange(near.n, device=device), partners
    pairs = Anchors(*(ends if given[0] is near else ends[::-1]))
    mass = torch.full_like(partners, 1 / far.n, dtype=problem.marginals.a.dtype)
    plan = PairPlan(pairs, mass, problem.shape, distinct=True)
    # tables of paths that are stored anyway; others come by columns, or go through landmarks
    exact = all(side.cheap_columns and side.factors() is None for side in problem.sides)
    sides = problem.sides
    if not exact:
        first, second = (
            DijkstraDistance(graph, device=device).scaled(scale)
            for graph, scale in zip(graphs, scales, strict=True)
        )
        sides = first, second
    kept = kept_share(near, far, partners)
    certain = kept >= limits.kept_edges and connects(near, far, partners, limits.kept_edges)
    return GivenMatch((near, far), sides, plan, kept, _value(sides, plan), certain, exact)


def connects(near: Edges, far: Edges, partners: Tensor, share: float) -> bool:
    """Tell whether edges that are kept join as many nodes as the fewer edges of a graph do."""
    # regions of a grid, or parts of a ring, may each lie on others as a whole: few edges are lost
    # between them, but all paths
    kept = is_kept(near, far, partners)
    fewer = near if len(near.keys) <= len(far.keys) else far
    whole = np.ones(len(fewer.keys), dtype=bool)
    return _largest_piece(near, kept) >= share * _largest_piece(fewer, whole)


def _largest_piece(graph: Edges, some: Array) -> int:
    """Count the nodes that some edges of a graph join, those of the largest piece."""
    from scipy import sparse  # SciPy takes long to import

    places = graph.rows[some], graph.columns[some]
    table = sparse.csr_array((np.ones(len(places[0])), places), shape=(graph.n, graph.n))
    return int(np.bincount(sparse.csgraph.connected_components(table)[1]).max())


def _value(sides: tuple[DistanceProvider, DistanceProvider], plan: Plan) -> QuadraticValue:
    """Estimate the value of a plan from the paths of some pairs; of all of a match, if stored."""
    n, m = plan.shape
    device = sides[0].device
    if isinstance(plan, PairPlan) and all(side.cheap_columns for side in sides):
        pairs, share = plan.pairs, 0.0
    else:
        generator = torch.Generator(device).manual_seed(0)
        places = torch.rand(_READ, dtype=torch.float64, device=device, generator=generator)
        pairs = plan.sample_at(places, torch.arange(n, device=device), generator)
        share = 1 / math.sqrt(_READ)
    x, y = (side.columns(index).double() for side, index in zip(sides, pairs, strict=True))
    each = x.square().sum(0) / n + y.square().sum(0) / m - 2 * (x * (plan @ y)).sum(0)
    return QuadraticValue(float(each.mean()), share * float(each.std()))
