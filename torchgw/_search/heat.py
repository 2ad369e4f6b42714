"""The start of graphs by heat: nodes are partners where it spreads from them alike."""

from __future__ import annotations

import torch
from torch import Tensor

from torchgw._search.coarse import CoarseProblem
from torchgw.distances.sampling import SpreadPoints

# Times of the heat kernel, and its largest entries of a row that are compared. [L618]
_TIMES = (1.0, 2.0, 4.0, 8.0)
_LARGEST = 32


def heat_costs(problem: CoarseProblem) -> Tensor:
    """Return squared differences of signatures of the nodes of two graphs, (s, t), mean one.

    A signature is what heat from a node leaves there and at the nodes that get most of it, in
    order. Unlike degrees, it differs among the nodes of a regular graph.

    References
    ----------
    J. Sun, M. Ovsjanikov, L. Guibas. A concise and provably informative multi-scale signature based
    on heat diffusion. Computer Graphics Forum 2009.
    """
    count = min(_LARGEST, *problem.base.shape)
    x, y = (_signatures(side, count) for side in (problem.source, problem.target))
    costs = torch.cdist(x, y).square()
    return costs / costs.mean().clamp_min(torch.finfo(costs.dtype).tiny)


def _signatures(side: SpreadPoints, count: int) -> Tensor:
    degree = side.table.abs().sum(1)
    root = degree.where(degree > 0, 1).sqrt()
    values, vectors = torch.linalg.eigh(side.table / root[:, None] / root)
    parts = []
    for time in _TIMES:
        kernel = (vectors * (time * (values - 1)).exp()) @ vectors.T
        largest, stays = kernel.topk(count, dim=1).values, kernel.diagonal()[:, None]
        parts += [largest / largest.max(), 4 * stays / stays.max()]
    return torch.cat(parts, dim=1)
