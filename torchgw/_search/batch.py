"""What a multi-start computes on the device: plans of many starts at once, and their values.

Nothing is read back, and what is launched depends on shapes alone.
"""

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgw._plans.transport import round_to_marginals
from torchgw._problem.problem import Problem
from torchgw._search.coarse import Coarsened, CoarseProblem, as_before, cross_terms, side_by_side
from torchgw._search.starts import Hints, start_costs
from torchgw._sinkhorn.batch import BatchSolver
from torchgw._sinkhorn.contract import Backend
from torchgw._tensors.cuda_graphs import Call, Replayer, call_directly, tensors_of
from torchgw._typing import Marginals

# Sinkhorn iterations of one outer iteration. Plans far from their marginals have no value to
# compare, and where masses differ it takes many iterations to meet them. [L222]
_INNER = {"search": 10, "compare": 60}
# Over-relaxation of Sinkhorn's iteration. [L107]
_RELAXATION = {"search": 1.5, "compare": 1.7}
# A search is captured if what it reads has at most so many bytes, of which a graph keeps a copy.
# [L82]
_CAPTURED_BYTES = 2**25
# Up to so many points a GPU computes costs in float64, as it does values: to load products of
# float32 takes 60 to 80 ms. A choice. [L1020]
_FEW = 128
# Relative difference of epsilons up to which a search is the same. A choice. [L610]
_SAME_SHARE = 0.2
# Lowest epsilon as a share of the natural scale: a coarse problem has no finer resolution. [L280]
LEAST_EPSILON = 1e-3
# Outer iterations that a search ends with, in which the marginals are met. [L225]
_LAST_ITERATIONS = 5


class Batch(NamedTuple):
    """Several starts: their plans, and the potentials that made these."""

    plans: Tensor  # (B, s, t) float32
    g: Tensor  # (B, 1, t) cost units


class Judged(NamedTuple):
    """Several starts, their values and their distances from each other."""

    batch: Batch
    rounded: Tensor  # (B, s, t) float64, plans of exact marginals
    table: Tensor  # (B, 1 + B) float64, value and distances to the others


class Searched(NamedTuple):
    """A search between few points, kept for whoever asks for the same one again."""

    sizes: tuple[int, int]  # of the whole problem
    problem: CoarseProblem
    share: float  # final epsilon of the starts, as a share of the natural scale
    labels: tuple[str, ...]  # of its starts
    batch: Batch


def made_before(
    problem: Problem, epsilon: float, count: int, made: Iterable[Searched], call: Call
) -> tuple[Coarsened, Searched] | None:
    """Find a search from so many starts among those that were ``made``, of distances alone."""
    # Its tables may be in another unit: the best plan is the same.
    for other in made:
        if other.sizes == (problem.source.n, problem.target.n) and len(other.labels) == count:
            coarse = as_before(problem, (other.problem.source, other.problem.target), call)
            share = 0.0 if coarse is None else max(epsilon / coarse.scale, LEAST_EPSILON)
            if coarse is not None and abs(other.share / share - 1) <= _SAME_SHARE:
                return coarse, other
    return None


def way_to_call(
    name: str, device: torch.device, backend: Backend, read: tuple[Any, ...], *more: Hashable
) -> Call:
    """Find how to call functions that read some tensors: by CUDA graphs, where there are any."""
    # `more` is what else the functions depend on.
    parts = tensors_of(read)
    size = sum(part.nbytes for part in parts)
    if not _has_graphs(device, backend) or size > _CAPTURED_BYTES:
        return call_directly
    shapes = tuple((part.shape, part.dtype) for part in parts)
    return Replayer(device, (name, type(backend), tuple(map(type, read)), shapes, *more))


def _has_graphs(device: torch.device, backend: Backend) -> bool:
    return device.type == "cuda" and backend.name == "triton"


def search_all(
    solve: BatchSolver,
    count: int,
    coarse: CoarseProblem,
    hints: Hints,
    rotations: Tensor,
    epsilons: Tensor,
) -> Judged:
    """Solve from all starts."""
    costs = start_costs(coarse, hints, rotations, count)
    batch = _from_costs(coarse, costs, epsilons, "search", solve)
    last = epsilons[-1:].expand(_LAST_ITERATIONS, -1)
    return judge(coarse, _iterate(coarse, batch, last, "compare", solve))


def carry_over(
    solve: BatchSolver,
    fine: CoarseProblem,
    source: Tensor,
    target: Tensor,
    plans: Tensor,
    place: Tensor,
    epsilons: Tensor,
) -> Judged:
    """Solve from an annealed start and from some of the plans between coarse points."""
    rows, columns = _places(source, fine.source.indices), _places(target, fine.target.indices)
    cross = cross_terms(fine.x[:, :, rows], plans[place].double(), fine.y[:, columns])
    costs = torch.cat([fine.base[None], fine.base - 4 * fine.alpha * cross])
    return judge(fine, _from_costs(fine, costs, epsilons, "compare", solve))


def _places(wanted: Tensor, index: Tensor) -> Tensor:
    """Return where the points ``wanted`` stand in ``index``, which contains them."""
    return (wanted[:, None] == index).byte().argmax(1)


def _from_costs(
    coarse: CoarseProblem, costs: Tensor, epsilons: Tensor, stage: str, solve: BatchSolver
) -> Batch:
    """Take the plan of each start's first cost, then iterate."""
    costs = costs.float()
    first = Batch(costs, costs.new_zeros(len(costs), 1, costs.shape[2]))
    first = _solve(coarse, first, costs, epsilons[0], stage, solve)
    return _iterate(coarse, first, epsilons[1:], stage, solve)


def _iterate(
    coarse: CoarseProblem, batch: Batch, epsilons: Tensor, stage: str, solve: BatchSolver
) -> Batch:
    """Run one outer iteration for each row of ``epsilons`` (iterations, B)."""
    # Nothing is read from the device, and all starts take the same number of iterations.
    few = max(coarse.base.shape) <= _FEW and coarse.base.is_cuda
    dtype = torch.float64 if few else torch.float32
    tables = -4 * coarse.alpha * coarse.x, coarse.y, coarse.base
    x, y, base = (table.to(dtype) for table in tables)
    parts, count = len(x), len(batch.plans)
    x, y = x.flatten(0, 1), y.flatten(0, 1)
    x, y, base = (table.expand(count, *table.shape) for table in (x, y, base))
    for epsilon in epsilons:
        costs = torch.baddbmm(base, side_by_side(x @ batch.plans.to(dtype), parts), y).float()
        batch = _solve(coarse, batch, costs, epsilon, stage, solve)
    return batch


def _solve(
    coarse: CoarseProblem,
    batch: Batch,
    costs: Tensor,
    epsilon: Tensor,
    stage: str,
    solve: BatchSolver,
) -> Batch:
    """Run the Sinkhorn iterations of one outer iteration."""
    weights = Marginals(coarse.source.weights, coarse.target.weights)
    return Batch(*solve(costs, weights, batch.g, epsilon, _INNER[stage], _RELAXATION[stage]))


def judge(coarse: CoarseProblem, batch: Batch) -> Judged:
    """Compute the values of plans, and how far they are apart, after rounding to the marginals."""
    rounded = round_to_marginals(batch.plans.double(), coarse.source.weights, coarse.target.weights)
    # a plan whose value overflowed counts as the worst
    values = coarse.value(rounded).nan_to_num(nan=torch.inf)
    return Judged(batch, rounded, torch.cat([values[:, None], coarse.distances(rounded)], dim=1))
