"""How well two spaces agree in one way of measuring, as a small search finds.

The agreement of a plan is the correlation of the doubly centred distances that it relates. Centring
takes out how far each point is from the others on average, which any two spaces can be sorted by.
"""

from functools import partial

import torch
from torch import Tensor

from torchgw._problem.losses import SQUARE
from torchgw._problem.problem import Problem
from torchgw._search.batch import Searched, search_all, way_to_call
from torchgw._search.coarse import centre, coarsen, cross_terms
from torchgw._search.optima import DEFAULT_STARTS
from torchgw._search.standard import put_in_standard_form
from torchgw._search.starts import find_hints, make_starts
from torchgw._sinkhorn.choose import BackendName, batch_solver, choose_backend
from torchgw._sinkhorn.contract import Backend
from torchgw._tensors.cuda_graphs import clone, to_device
from torchgw._typing import Marginals
from torchgw.distances.base import DistanceProvider
from torchgw.distances.sampling import SpreadPoints

# Points per side, outer iterations, and epsilon as a share of the natural scale. They are those of
# a multi-start, which can then take this search over instead of making it again. [L356, L610]
_POINTS = 96
_ITERATIONS = 20
_EPSILON = 2.5e-3
_HOST = torch.device("cpu")


def agreement(
    source: DistanceProvider,
    target: DistanceProvider,
    found_by: tuple[DistanceProvider, DistanceProvider] | None = None,
    device: torch.device = _HOST,
    backend: BackendName | Backend = "auto",
    made: list[Searched] | None = None,
) -> float:
    """Compute the agreement, at most 1, of the best plan between a few points of equal weights."""
    # With `found_by`, the plan is the best one for these distances of the same points. The
    # distances are on the CPU; plans are searched for on `device`, beside a backend. The search is
    # added to those that were `made`.
    sides = found_by or (source, target)
    weights = [
        torch.full((side.n,), 1 / side.n, dtype=torch.float64, device=side.device) for side in sides
    ]
    problem = Problem(*sides, Marginals(*weights), 1.0, None, SQUARE)
    standard = put_in_standard_form(problem)
    coarse = coarsen(problem if standard is None else standard.problem, _POINTS)
    few = coarse.problem
    hints = find_hints(few)
    target_epsilon = _EPSILON * coarse.scale
    count, rank = DEFAULT_STARTS, hints.x_axes.shape[1]
    starts = make_starts(coarse.scale, target_epsilon, count, _ITERATIONS, rank)
    chosen = choose_backend(backend, device, torch.float32)
    arguments = to_device((few, hints, starts.rotations, starts.epsilons), device)
    few = arguments[0]
    search = partial(search_all, batch_solver(chosen), count)
    found = way_to_call("agreement", device, chosen, arguments)("search", search, *arguments)
    if made is not None:
        # a copy, as the next search may have been recorded over it
        sizes = (sides[0].n, sides[1].n) if standard is None else standard.sizes
        made.append(Searched(sizes, few, _EPSILON, starts.labels, clone(found.batch)))
    plan = found.rounded[found.table[:, 0].argmin()]
    x, y = few.x, few.y
    if found_by:
        points = few.source, few.target
        if standard is not None:
            source, target = standard.turned(source, target)
            points = standard.given_points(*points)
        x, y = _centred(source, points[0]), _centred(target, points[1])
    cross = (cross_terms(x, plan[None], y)[0] * plan).sum()
    p, q = few.source.weights, few.target.weights
    size = (p @ x[0].square() @ p) * (q @ y[0].square() @ q)
    return float(cross / size.sqrt().clamp_min(torch.finfo(size.dtype).tiny))


def _centred(provider: DistanceProvider, points: SpreadPoints) -> Tensor:
    """Centre the distances of another provider among some points, (1, s, s)."""
    index = points.indices.to(provider.device)
    table = provider.columns(index)[index].to(points.table)
    return centre(points._replace(table=table))[0][None]
