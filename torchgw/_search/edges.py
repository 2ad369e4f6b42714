"""Hops between the nodes of two graphs: matched by their edges where a plan keeps few of these.

Few nodes stand for the others, as distances go, but arcs of a ring or groups of one size may be
sent to wrong places at little cost. Edges tell more of where a node belongs.
"""

import torch
from torch import Tensor

from torchgw._plans.contract import Plan
from torchgw._problem.problem import Problem
from torchgw._search.alternatives import Alternative
from torchgw._search.chains import climb
from torchgw._search.coarse import coarse_problem
from torchgw._search.graphs import is_sparse
from torchgw._sinkhorn.choose import batch_solver
from torchgw._sinkhorn.contract import Backend
from torchgw.distances.base import DistanceProvider
from torchgw.distances.precomputed import PrecomputedDistance

# Two distances are the same up to this share. A choice. [L1282]
_SAME = 1e-4
# Share of the edges that a plan keeps from which it is left alone, unless it is doubted: whole
# groups keep theirs wherever they are sent. [L1282]
_KEPT = 0.5
# Epsilon of the match of edges, as a share of its natural scale, and chains. [L1282]
_EPSILON, _CHAINS = 0.0025, 4


def match_edges(
    problem: Problem, plan: Plan, doubted: bool, backend: Backend
) -> Alternative | None:
    """Match two graphs by their edges alone, if distances are hops.

    ``None`` if they are not, if that keeps no more edges than a plan (n, m) does, and if the plan
    keeps most of them and is not ``doubted``.
    """
    x = _edges(problem.source)
    y = None if x is None else _edges(problem.target)
    if x is None or y is None:
        return None
    before = _kept(x, y, torch.as_tensor(plan.argmax(1), device=x.device))
    if before >= _KEPT and not doubted:
        return None
    source, target = (PrecomputedDistance.unchecked(edges.to(torch.float64)) for edges in (x, y))
    graphs = Problem(source, target, problem.marginals, 1.0, None)
    whole = coarse_problem(graphs, max(len(x), len(y)))
    low = _EPSILON * whole.scale
    climbed = climb(whole, low, _CHAINS, solver=batch_solver(backend), in_time=True, told=True)
    best = climbed.plans[0]
    rows, columns = (side.indices for side in (whole.problem.source, whole.problem.target))
    partners = torch.empty_like(rows)
    partners[rows] = columns[best.argmax(1)]
    if _kept(x, y, partners) <= before:
        return None
    value, shape = climbed.trials[0].value, (len(x), len(y))
    return Alternative(value, "edges", best, rows, columns, shape, epsilon=0.0)


def _edges(provider: DistanceProvider) -> Tensor | None:
    """Return the pairs (n, n) at the least distance; ``None`` if they do not make a graph."""
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
    """Share of the edges x (n, n) whose ends have partners (n,) with an edge in y (m, m)."""
    i, j = x.nonzero().T
    return float(y[partners[i], partners[j]].double().mean())
