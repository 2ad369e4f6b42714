"""Many starts on the coarse problem, solved as one batch; the distinct optima that they find."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._problem.limits import limits_of
from torchgw._problem.problem import Problem
from torchgw._search.alternatives import DISTINCT, Alternative, Search, ambiguity_of, first_of_each
from torchgw._search.batch import (
    LEAST_EPSILON,
    Judged,
    Searched,
    carry_over,
    judge,
    made_before,
    search_all,
    way_to_call,
)
from torchgw._search.coarse import (
    COARSEST,
    Coarsened,
    CoarseProblem,
    coarse_problem,
    represent,
)
from torchgw._search.starts import GUESS_EPSILON, find_hints, make_starts
from torchgw._sinkhorn.annealing import Annealing
from torchgw._sinkhorn.batch import BatchSolver
from torchgw._sinkhorn.choose import batch_solver
from torchgw._sinkhorn.contract import Backend
from torchgw._sinkhorn.eager import EagerBackend
from torchgw._tensors.cuda_graphs import Call, call_directly, clone
from torchgw.distances.sampling import column_reader

# Starts by default: all that make_starts() has, and four random rotations. [L116]
DEFAULT_STARTS = 16
# Points per side of the finer problem on which the best optima are compared: a few points may
# favour an optimum that all of them do not. [L110, L116]
_FINER_POINTS = 256
# Outer iterations of all starts until their plans are to meet their marginals, and on the finer
# problem. [L116, L222]
_ITERATIONS = 20
_FINE_ITERATIONS = 18
# Optima that are polished and reported at most. [L280]
_KEPT = 5
# Optima that are compared on the finer problem at most. [L110]
_COMPARED = 3
# They are not compared if the best is far enough ahead, by these multiples of its value, and of the
# natural scale times the resolution squared, which is the error of coarse points. [L115]
_CLOSE, _CLOSE_SHARE = 2.0, 4.0
# Share of a value by which another has to be lower to be better. [L546]
_SAME = 1e-6
# Points of equal weight up to which all matchings are looked at. [L546]
_ALL_MATCHINGS = 7


class _Distinct(NamedTuple):
    """The best start of each distinct optimum, the lowest value first."""

    judged: Judged
    places: list[int]  # where they are there
    labels: list[str]  # what found them
    values: list[float]

    def part(self, start: int | None, stop: int | None) -> "_Distinct":
        """Return some of them."""
        some = slice(start, stop)
        return _Distinct(self.judged, self.places[some], self.labels[some], self.values[some])

    @property
    def chosen(self) -> Tensor:
        """Where they are, on the device."""
        return torch.tensor(self.places, dtype=torch.int64, device=self.judged.table.device)


def find_optima(
    problem: Problem,
    epsilon: float,
    count: int,
    backend: Backend | None = None,
    made: Sequence[Searched] = (),
    *,
    rough: bool = False,
    match: Tensor | None = None,
) -> Search:
    """Solve the coarse problem from many starts and keep the distinct optima."""
    # Only `columns` of the distances of the whole problem are read, and `epsilon` is its target.
    # There are half as many starts as `count` where all points are searched. One of the searches
    # that this solve has `made` may have been this one. A `rough` search is of a few points even
    # where they are far from the others. A `match` of all points is one more start where these are
    # searched.
    backend = backend or EagerBackend()
    call, limits = _way_to_call(problem, count, backend), limits_of(problem.source.device)
    solve = batch_solver(backend)
    plain = problem.alpha == 1 and problem.linear is None and problem.loss.is_square
    before = made_before(problem, epsilon, count, made if plain else (), call)
    if before is not None and before[0].resolution > COARSEST:
        before = None
    coarse: Coarsened | None
    if rough:
        before, coarse = None, coarse_problem(problem, limits.few_points, call)
    else:
        coarse = represent(problem, call) if before is None else before[0]
    if coarse is None:
        return Search((), float("nan"))
    few: tuple[Tensor | None, Tensor | None] = (None, None)
    size = max(len(coarse.problem.source.indices), len(coarse.problem.target.indices))
    if size > limits.few_points:
        count = (count + 1) // 2
    else:
        # copies, as the next draw may be recorded over them
        few = coarse.problem.source.indices.clone(), coarse.problem.target.indices.clone()
    target = max(epsilon, LEAST_EPSILON * coarse.scale)
    if before is not None:
        labels = before[1].labels
        judged = call("judge", judge, coarse.problem, before[1].batch, in_place=1)
    else:
        hints = find_hints(coarse.problem)
        starts = make_starts(coarse.scale, target, count, _ITERATIONS, hints.x_axes.shape[1])
        labels, device = starts.labels, hints.apart.device
        upload = starts.rotations.to(device), starts.epsilons.to(device)
        search = partial(search_all, solve, count)
        judged = call(f"search {size}", search, coarse.problem, hints, *upload, in_place=1)
    found = _distinct(judged, labels)
    first: list[Alternative] = []
    if coarse.resolution > 0 and _is_close(coarse, found.values):
        # copies, as the functions called next may have been recorded over them
        coarse = coarse._replace(problem=clone(coarse.problem))
        found = found._replace(judged=clone(found.judged))
        close = found.part(None, _COMPARED)
        first = _compare_finely(problem, coarse.problem, close, target, solve, call)
        found = found.part(_COMPARED, None)
    alternatives = (*first, *_alternatives(problem, coarse.problem, found))
    alternatives = _with_best_matching(problem, coarse.problem, alternatives, target, solve)
    if match is not None and match.shape == coarse.problem.base.shape:
        alternatives = _with_plan(
            problem, coarse.problem, alternatives, match[None], "copies", target, solve
        )
    ambiguity = ambiguity_of(coarse, alternatives)
    return Search(alternatives, ambiguity, resolution=coarse.resolution, points=few, compare=rough)


def _way_to_call(problem: Problem, count: int, backend: Backend) -> Call:
    """Return how to call the functions of the search: as graphs on a GPU, where they can be."""
    readers = column_reader(problem.source), column_reader(problem.target)
    # a provider that is no tuple of tensors may compute on the host, or look at its columns
    plain = problem.loss.is_square and not problem.directed
    if not plain or not all(isinstance(side, tuple) for side in readers):
        return call_directly
    read = (*readers, problem.linear)
    return way_to_call("search", problem.source.device, backend, read, count)


def _is_close(coarse: Coarsened, values: list[float]) -> bool:
    """Whether more points may turn round the order of the best two optima."""
    doubt = _CLOSE * (values[0] - coarse.floor) + _CLOSE_SHARE * coarse.scale * coarse.resolution**2
    return len(values) > 1 and values[1] <= values[0] + doubt


def _compare_finely(
    problem: Problem,
    coarse: CoarseProblem,
    found: _Distinct,
    target: float,
    solve: BatchSolver,
    call: Call,
) -> list[Alternative]:
    """Carry optima over to more points, and compare them there with an annealed start."""
    fine = coarse_problem(problem, _FINER_POINTS, call)
    whole = Annealing(max(target, fine.scale), target)
    fall = Annealing(max(target, GUESS_EPSILON * fine.scale), target)
    epsilons = [
        [whole(iteration), *[fall(iteration)] * len(found.places)]
        for iteration in range(_FINE_ITERATIONS)
    ]
    points = coarse.source.indices, coarse.target.indices
    plans, table = found.judged.batch.plans, fine.problem.base.new_tensor(epsilons)
    judged = call(
        f"compare {len(found.places)}", partial(carry_over, solve),
        fine.problem, *points, plans, found.chosen, table, in_place=3,
    )  # fmt: skip
    compared = _distinct(judged, ["annealed", *found.labels])
    return _alternatives(problem, fine.problem, compared)


def _with_best_matching(
    problem: Problem,
    coarse: CoarseProblem,
    found: tuple[Alternative, ...],
    target: float,
    solve: BatchSolver,
) -> tuple[Alternative, ...]:
    """Put the best of all matchings of a few points first, if what it leads to costs less."""
    s, t = coarse.base.shape
    weights = torch.cat([coarse.source.weights, coarse.target.weights])
    if not s == t <= _ALL_MATCHINGS or bool((weights - 1 / s).abs().max() > 1e-12):
        return found
    orders = torch.tensor(list(itertools.permutations(range(s))), device=coarse.base.device)
    matchings = coarse.source.weights.diag()[orders]
    best = coarse.value(matchings).argmin()[None]
    return _with_plan(problem, coarse, found, matchings[best], "best matching", target, solve)


def _with_plan(
    problem: Problem,
    coarse: CoarseProblem,
    found: tuple[Alternative, ...],
    plan: Tensor,
    label: str,
    target: float,
    solve: BatchSolver,
) -> tuple[Alternative, ...]:
    """Put what a plan (1, s, t) leads to first, if that is another optimum and costs less."""
    both = torch.cat([plan, found[0].plan[None]])
    if found[0].plan.shape == plan.shape[1:] and float(coarse.distances(both)[0, 1]) <= DISTINCT:
        return found
    points = coarse.source.indices, coarse.target.indices
    epsilons = coarse.base.new_full((_FINE_ITERATIONS, 2), target)
    place = torch.zeros(1, dtype=torch.int64, device=plan.device)
    judged = carry_over(solve, coarse, *points, plan, place, epsilons)
    led = _distinct(judged, ("product", label))
    better = led.values[0] < found[0].value - _SAME * abs(found[0].value)
    if not better:
        return found
    # at a larger epsilon it may be left
    (taken,) = _alternatives(problem, coarse, led.part(None, 1))
    others = [one for one in found if one.plan.shape == taken.plan.shape]
    apart = coarse.distances(torch.stack([taken.plan, *(one.plan for one in others)]))[0, 1:]
    same = {id(one) for one, far in zip(others, apart.tolist(), strict=True) if far <= DISTINCT}
    return replace(taken, epsilon=0.0), *(one for one in found if id(one) not in same)


def _alternatives(problem: Problem, coarse: CoarseProblem, found: _Distinct) -> list[Alternative]:
    shape = (problem.source.n, problem.target.n)
    # copies: the next solve may overwrite what they are taken from
    source, target = coarse.source.indices.clone(), coarse.target.indices.clone()
    plans = found.judged.rounded[found.chosen]
    return [
        Alternative(value, label, plan, source, target, shape)
        for value, label, plan in zip(found.values, found.labels, plans, strict=True)
    ]


def _distinct(judged: Judged, labels: Sequence[str]) -> _Distinct:
    """Return the best start of each distinct optimum."""
    table = judged.table.tolist()
    order = sorted(range(len(table)), key=lambda i: (table[i][0], i))
    kept = first_of_each(order, [row[1:] for row in table])[:_KEPT]
    return _Distinct(judged, kept, [labels[i] for i in kept], [table[i][0] for i in kept])
