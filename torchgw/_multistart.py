"""Many starts on the coarse problem, solved as one batch; the distinct optima that they find."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._candidates import GUESS_EPSILON, Starts, make_starts
from torchgw._coarse import CoarseProblem, coarsen
from torchgw._eager_sinkhorn import EagerBackend
from torchgw._gradient import Problem
from torchgw._rounding import round_to_marginals
from torchgw._schedule import Annealing
from torchgw._sinkhorn import Backend
from torchgw._typing import Marginals

__all__ = ["DEFAULT_STARTS", "Alternative", "Search", "find_optima", "represent"]

# Starts by default: all that make_starts() has, and four random rotations.
DEFAULT_STARTS = 16
# Points per side of the coarse problem, and of the finer one on which its best optima are compared:
# a few points may favour an optimum that all of them do not.
_POINTS = 96
_FINER_POINTS = 256
# Outer iterations of all starts, and of the distinct optima afterwards; Sinkhorn iterations of one.
_ITERATIONS = 20
_POLISH = 10
_FINE_ITERATIONS = 18
_INNER = {"search": 10, "polish": 20, "compare": 60}
# Over-relaxation of Sinkhorn's iteration.
_RELAXATION = {"search": 1.5, "polish": 1.7, "compare": 1.7}
# Distance (CoarseProblem.distances) above which two plans are different optima.
_DISTINCT = 0.05
# Optima that are polished and reported at most.
_KEPT = 5
# Optima that are compared on the finer problem at most.
_COMPARED = 3
# They are not if the best is this far ahead: multiples of its value, and of the natural scale times
# the resolution squared, which is what coarse points make up.
_CLOSE, _CLOSE_SHARE = 2.0, 4.0
# Lowest epsilon as a share of the natural scale: a coarse problem has no finer resolution.
_LEAST_EPSILON = 1e-3
# Resolution above which coarse points say little about their neighbours' partners. All points are
# then searched, from half as many starts, if there are no more than this on either side.
_COARSEST = 0.2
_WHOLE = 512


@dataclass(frozen=True, eq=False)
class Alternative:
    """A local optimum of the coarse problem; pass it as ``init`` to solve from there.

    Attributes
    ----------
    value : float
        Objective without entropy of the coarse plan, which has exact marginals. Comparable among
        the alternatives of one result; the whole problem's value is usually a little lower. Of a
        relaxed problem: with penalty and entropy, which decide what its mass is.
    label : str
        The start that found it.
    plan : Tensor, shape (s, t), float64
        Mass between coarse points, one in all.
    source, target : Tensor, shapes (s,) and (t,), int64
        Which points of X and of Y those are.
    shape : tuple of int
        (n, m), of the whole problem.
    """

    value: float
    label: str
    plan: Tensor
    source: Tensor
    target: Tensor
    shape: tuple[int, int]

    def __repr__(self) -> str:
        """Leave out the tensors."""
        s, t = self.plan.shape
        return f"Alternative({self.label!r}, value={self.value:.6g}, {s} x {t} of {self.shape})"


class Search(NamedTuple):
    """What a multi-start has found."""

    alternatives: tuple[Alternative, ...]  # the best first; none if the coarse problem cannot tell
    ambiguity: float  # in [0, 1], NaN if the coarse problem cannot tell


class _Batch(NamedTuple):
    """Several starts: what found them, their plans, and the potentials that made these."""

    labels: tuple[str, ...]
    plans: Tensor  # (B, s, t) float32
    g: Tensor  # (B, 1, t) cost units

    def take(self, index: list[int]) -> _Batch:
        """Return some of them."""
        return _Batch(tuple(self.labels[i] for i in index), self.plans[index], self.g[index])


def find_optima(
    problem: Problem, epsilon: float, count: int, backend: Backend | None = None
) -> Search:
    """Solve the coarse problem from many starts and keep the distinct optima.

    Parameters
    ----------
    problem : Problem
        The whole problem, of which only ``columns`` of the distances are read.
    epsilon : float
        Target of the whole solve.
    count : int
        Number of starts; half as many where all points are searched.
    backend : Backend, optional
        PyTorch operations unless given.
    """
    backend = backend or EagerBackend()
    coarse = represent(problem)
    if coarse is None:
        return Search((), float("nan"))
    if max(len(coarse.source.points), len(coarse.target.points)) > _POINTS:
        count = (count + 1) // 2
    target = max(epsilon, _LEAST_EPSILON * coarse.scale)
    starts = make_starts(coarse, target, count, _ITERATIONS)
    batch, _ = _distinct(coarse, _from_costs(coarse, starts, backend))
    constant = batch.g.new_full((_POLISH, len(batch.labels)), target)
    batch, values = _distinct(coarse, _iterate(coarse, batch, constant, "polish", backend))
    first: list[Alternative] = []
    if coarse.resolution > 0 and _is_close(coarse, values):
        compared = list(range(min(_COMPARED, len(values))))
        first = _compare_finely(problem, coarse, batch.take(compared), target, backend)
        rest = list(range(len(compared), len(values)))
        batch, values = batch.take(rest), values[len(compared) :]
    found = (*first, *_alternatives(problem, coarse, batch, values))
    return Search(found, _ambiguity(coarse, found))


def represent(problem: Problem) -> CoarseProblem | None:
    """Return the coarse problem to search: all points if few say too little, none if too many."""
    coarse = coarsen(problem, _POINTS)
    if coarse.resolution <= _COARSEST:
        return coarse
    if max(problem.source.n, problem.target.n) > _WHOLE:
        return None
    return coarsen(problem, _WHOLE)


def _is_close(coarse: CoarseProblem, values: list[float]) -> bool:
    """Whether more points may turn round the order of the best two optima."""
    doubt = _CLOSE * (values[0] - coarse.floor) + _CLOSE_SHARE * coarse.scale * coarse.resolution**2
    return len(values) > 1 and values[1] <= values[0] + doubt


def _compare_finely(
    problem: Problem, coarse: CoarseProblem, batch: _Batch, target: float, backend: Backend
) -> list[Alternative]:
    """Carry optima over to more points, and compare them there with an annealed start."""
    fine = coarsen(problem, _FINER_POINTS)
    rows = _positions(coarse.source.points, fine.source.points, problem.source.n)
    columns = _positions(coarse.target.points, fine.target.points, problem.target.n)
    cross = (fine.x[:, rows] @ batch.plans.double()) @ fine.y[columns]
    costs = torch.cat([fine.base[None], fine.base - 4 * fine.alpha * cross])
    whole = Annealing(max(target, fine.scale), target)
    fall = Annealing(max(target, GUESS_EPSILON * fine.scale), target)
    epsilons = [
        [whole(iteration), *[fall(iteration)] * len(batch.labels)]
        for iteration in range(_FINE_ITERATIONS)
    ]
    starts = Starts(("annealed", *batch.labels), costs, fine.x.new_tensor(epsilons))
    batch, values = _distinct(fine, _from_costs(fine, starts, backend, "compare"))
    return _alternatives(problem, fine, batch, values)


def _positions(wanted: Tensor, index: Tensor, n: int) -> Tensor:
    """Return where the points ``wanted`` stand in ``index``, which contains them."""
    position = torch.empty(n, dtype=torch.int64, device=index.device)
    position[index] = torch.arange(len(index), device=index.device)
    return position[wanted]


def _alternatives(
    problem: Problem, coarse: CoarseProblem, batch: _Batch, values: list[float]
) -> list[Alternative]:
    plans = round_to_marginals(batch.plans.double(), coarse.source.weights, coarse.target.weights)
    shape = (problem.source.n, problem.target.n)
    return [
        Alternative(value, label, plan, coarse.source.points, coarse.target.points, shape)
        for value, label, plan in zip(values, batch.labels, plans, strict=True)
    ]


def _from_costs(
    coarse: CoarseProblem, starts: Starts, backend: Backend, stage: str = "search"
) -> _Batch:
    """Take the plan of each start's first cost, then iterate."""
    costs = starts.costs.float()
    first = _Batch(starts.labels, costs, costs.new_zeros(len(costs), 1, costs.shape[2]))
    first = _solve(coarse, first, costs, starts.epsilons[0], stage, backend)
    return _iterate(coarse, first, starts.epsilons[1:], stage, backend)


def _iterate(
    coarse: CoarseProblem, batch: _Batch, epsilons: Tensor, stage: str, backend: Backend
) -> _Batch:
    """Run one outer iteration for each row of ``epsilons`` (iterations, B), in float32.

    Nothing is read from the device, and all starts take the same number of iterations.
    """
    x, y, base = (table.float() for table in (coarse.x, coarse.y, coarse.base))
    count = len(batch.plans)
    x, y, base = (table.expand(count, *table.shape) for table in (x, y, base))
    for epsilon in epsilons:
        costs = torch.baddbmm(base, x @ batch.plans, y, alpha=-4 * coarse.alpha)
        batch = _solve(coarse, batch, costs, epsilon, stage, backend)
    return batch


def _solve(
    coarse: CoarseProblem,
    batch: _Batch,
    costs: Tensor,
    epsilon: Tensor,
    stage: str,
    backend: Backend,
) -> _Batch:
    """Run the Sinkhorn iterations of one outer iteration."""
    weights = Marginals(coarse.source.weights, coarse.target.weights)
    plans, g = backend.solve_batch(
        costs, weights, batch.g, epsilon, _INNER[stage], _RELAXATION[stage]
    )
    return _Batch(batch.labels, plans, g)


def _distinct(coarse: CoarseProblem, batch: _Batch) -> tuple[_Batch, list[float]]:
    """Return the best start of each distinct optimum and its value, the lowest value first."""
    plans = round_to_marginals(batch.plans.double(), coarse.source.weights, coarse.target.weights)
    # an overflow that slipped through loses to everything
    values = coarse.value(plans).nan_to_num_(nan=torch.inf)
    table = torch.cat([values[:, None], coarse.distances(plans)], dim=1).tolist()
    kept: list[int] = []
    for i in sorted(range(len(table)), key=lambda i: (table[i][0], i)):
        if len(kept) < _KEPT and all(table[i][1 + j] > _DISTINCT for j in kept):
            kept.append(i)
    return batch.take(kept), [table[i][0] for i in kept]


def _ambiguity(coarse: CoarseProblem, found: tuple[Alternative, ...]) -> float:
    """Return the best value over the second best, above the least that the linear term can cost."""
    if len(found) < 2:
        return 0.0
    best, second = (max(0.0, one.value - coarse.floor) for one in found[:2])
    # two exact matches, or rounding between them
    return min(1.0, best / second) if second > 0 else 1.0
