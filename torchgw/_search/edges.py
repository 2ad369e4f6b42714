"""Paths in two graphs: matched by their edges where a plan keeps few of these.

Few nodes stand for the others, as distances go, but arcs of a ring or groups of one size may be
sent to wrong places at little cost. Edges tell more of where a node belongs.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._plans.contract import Plan
from torchgw._problem.limits import limits_of
from torchgw._problem.problem import Problem
from torchgw._search.alternatives import Alternative, SearchName
from torchgw._search.chains import climb
from torchgw._search.coarse import coarse_problem
from torchgw._search.ends import different_optima
from torchgw._search.graphs import is_sparse
from torchgw._search.standard import put_in_standard_form
from torchgw._sinkhorn.choose import batch_solver
from torchgw._sinkhorn.contract import Backend
from torchgw.distances.base import DistanceProvider
from torchgw.distances.geodesics import Geodesics
from torchgw.distances.precomputed import PrecomputedDistance

# Two distances are the same up to this share. A choice. [L1282]
_SAME = 1e-4
# Share of the edges that a plan keeps from which it is left alone, unless it is doubted. [L1283]
_KEPT = 0.9
# Epsilon of the match of edges, as a share of its natural scale; chains, and how many more there
# are of plans of at most so many entries. [L1282, L1283]
_EPSILON, _CHAINS = 0.0025, {"auto": 4, "thorough": 16}
_FEW, _TIMES = 2**16, 4
# A match is found, by whatever chain, if its value is less than this share of the second best: what
# two graphs have in common is kept as a whole or not at all. [L1283]
_FOUND = 0.7


class EdgeMatch(NamedTuple):
    """The best match of two graphs by their edges alone."""

    found: Alternative
    certain: bool  # whether several chains have led to it, or it is better by far
    keeps_more: bool  # than the plan does, of the edges


def match_edges(
    problem: Problem,
    graphs: tuple[Geodesics | None, Geodesics | None],
    plan: Plan,
    doubted: bool,
    how: SearchName,
    backend: Backend,
) -> EdgeMatch | None:
    """Match two graphs by their edges alone: those given, or those that hops tell of.

    ``None`` if there are none, and if a plan (n, m) is not ``doubted`` and keeps most of them, or
    is large.
    """
    x = _edges(problem.source, graphs[0])
    y = None if x is None else _edges(problem.target, graphs[1])
    if x is None or y is None:
        return None
    # nodes without weight have no partner, and chains leave them out
    partners = torch.as_tensor(plan.argmax(1), device=x.device)
    before = _kept(x, y, partners.where(problem.marginals.a > 0, -1))
    most = limits_of(x.device).edges
    if (before >= _KEPT or len(x) * len(y) > most) and not doubted:
        return None
    source, target = (PrecomputedDistance.unchecked(edges.to(torch.float64)) for edges in (x, y))
    of_edges = Problem(source, target, problem.marginals, 1.0, None)
    standard = put_in_standard_form(of_edges)
    of_edges = of_edges if standard is None else standard.problem
    shape = of_edges.source.n, of_edges.target.n
    whole = coarse_problem(of_edges, max(shape))
    low, count = _EPSILON * whole.scale, _CHAINS[how]
    count *= _TIMES if len(x) * len(y) <= _FEW else 1
    chains = climb(whole, low, count, solver=batch_solver(backend), in_time=True)
    optima, ambiguity = different_optima(whole, chains.trials, chains.plans, shape)
    best, certain = optima[0], chains.agreed or ambiguity < _FOUND
    best = best if standard is None else standard.lift_optimum(best)
    partners = torch.full_like(partners, -1)
    partners[best.source] = best.target[best.plan.argmax(1)]
    return EdgeMatch(replace(best, label="edges"), certain, _kept(x, y, partners) > before)


def _edges(provider: DistanceProvider, given: Geodesics | None) -> Tensor | None:
    """Return the edges (n, n) of a given graph, or the pairs at the least distance, if hops."""
    if given is not None:
        start, vertex = given.edges.source, given.edges.vertex
        edges = torch.zeros(given.shape, dtype=torch.bool, device=provider.device)
        edges[start.to(edges.device), vertex.to(edges.device)] = True
        return edges if is_sparse(edges) and bool(edges.any()) else None
    table = provider.matrix()
    if table is None or provider.directed:
        return None
    apart = table > 0
    least = table.where(apart, torch.inf).min()
    edges = apart & (table <= (1 + _SAME) * least)
    # distances that are no hops have few pairs at the least one; a graph itself has no others
    graph = bool((edges.sum() >= len(table)) & (table.max() > 2 * (1 - _SAME) * least))
    return edges if graph and is_sparse(edges) else None


def _kept(x: Tensor, y: Tensor, partners: Tensor) -> float:
    """Share of the edges x (n, n) whose ends have partners (n,), not -1, with an edge in y."""
    i, j = partners[x.nonzero().T]
    matched = (i >= 0) & (j >= 0)
    kept = y[i[matched], j[matched]]
    return float(kept.double().mean()) if len(kept) else 1.0
