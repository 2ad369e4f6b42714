"""Many starts on the coarse problem, solved as one batch; the distinct optima that they find."""

import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgw._batch.packing import AUTO_EPSILON
from torchgw._plans.transport import round_to_marginals
from torchgw._problem.limits import limits_of
from torchgw._problem.losses import SQUARE
from torchgw._problem.problem import Problem, weigh_alike
from torchgw._search.chains import climb
from torchgw._search.world import World
from torchgw._sinkhorn.annealing import Annealing
from torchgw._sinkhorn.choose import BackendName, batch_solver, choose_backend
from torchgw._sinkhorn.contract import Backend
from torchgw._sinkhorn.eager import BatchPlans, BatchSolver, EagerBackend
from torchgw._starts.alternatives import (
    DISTINCT,
    Alternative,
    Search,
    ambiguity_of,
    entropy,
    first_of_each,
)
from torchgw._starts.chain import GUESS_EPSILON, LAST_INNER, LAST_OUTER, LAST_RELAXATION
from torchgw._starts.coarse import (
    Coarsened,
    CoarseProblem,
    as_before,
    centre,
    coarse_problem,
    coarsen,
    cross_terms,
    is_graph,
    represent,
    side_by_side,
)
from torchgw._starts.guesses import Hints, find_hints, make_starts, start_costs
from torchgw._starts.isometry import ROUNDING
from torchgw._starts.standard import put_in_standard_form
from torchgw._tensors.cuda_graphs import CAPTURED_BYTES, Replayer
from torchgw._tensors.deadline import is_over, say_beside, say_share
from torchgw._tensors.machine import slowness
from torchgw._tensors.operations import Call, call_directly, clone, tensors_of, to_device
from torchgw._typing import Marginals
from torchgw.distances.base import DistanceProvider
from torchgw.distances.sampling import SpreadPoints, column_reader

# Sinkhorn iterations of one outer iteration. Plans far from their marginals have no value to
# compare, and where masses differ it takes many iterations to meet them. [L222]
_INNER = {"search": 10, "compare": LAST_INNER}
# Over-relaxation of Sinkhorn's iteration. [L107]
_RELAXATION = {"search": 1.5, "compare": LAST_RELAXATION}
# Relative difference of epsilons up to which a search is the same. A choice. [L610]
_SAME_SHARE = 0.2
# Lowest epsilon as a share of the natural scale: a coarse problem has no finer resolution. [L280]
LEAST_EPSILON = 1e-3


# What is computed on the device reads nothing back, and what is launched depends on shapes alone.


class Judged(NamedTuple):
    """Several starts, their values and their distances from each other."""

    batch: BatchPlans
    rounded: Tensor  # (B, s, t) float64, plans of exact marginals
    table: Tensor  # (B, 1 + B) float64, value and distances to the others


class Searched(NamedTuple):
    """A search between few points, kept for whoever asks for the same one again."""

    sizes: tuple[int, int]  # of the whole problem
    problem: CoarseProblem
    share: float  # final epsilon of the starts, as a share of the natural scale
    labels: tuple[str, ...]  # of its starts
    batch: BatchPlans


def made_before(
    problem: Problem, epsilon: float, count: int, made: Iterable[Searched], call: Call
) -> tuple[Coarsened, Searched] | None:
    """Find a search from so many starts among those that were ``made``, of distances alone."""
    # Its tables may be in another unit: the best plan is the same.
    for other in made:
        if other.sizes == problem.shape and len(other.labels) == count:
            coarse = as_before(problem, other.problem.sides, call)
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
    if not _has_graphs(device, backend) or size > CAPTURED_BYTES:
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
    last = epsilons[-1:].expand(LAST_OUTER, -1)
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
    costs = fine.linearised(plans[place].double(), rows, columns)
    costs = torch.cat([fine.base[None], costs])
    return judge(fine, _from_costs(fine, costs, epsilons, "compare", solve))


def _places(wanted: Tensor, index: Tensor) -> Tensor:
    """Return where the points ``wanted`` stand in ``index``, which contains them."""
    return (wanted[:, None] == index).byte().argmax(1)


def _from_costs(
    coarse: CoarseProblem, costs: Tensor, epsilons: Tensor, stage: str, solve: BatchSolver
) -> BatchPlans:
    """Take the plan of each start's first cost, then iterate."""
    costs = costs.float()
    start = costs.new_zeros(len(costs), 1, costs.shape[2])
    first = solve(costs, coarse.weights, start, epsilons[0], _INNER[stage], _RELAXATION[stage])
    return _iterate(coarse, first, epsilons[1:], stage, solve)


def _iterate(
    coarse: CoarseProblem, batch: BatchPlans, epsilons: Tensor, stage: str, solve: BatchSolver
) -> BatchPlans:
    """Run one outer iteration for each row of ``epsilons`` (iterations, B)."""
    # Nothing is read from the device, and all starts take the same number of iterations.
    # of few points a GPU computes costs in float64, as it does values: to load products of float32
    # takes 60 to 80 ms [L1020]
    most = limits_of(coarse.base.device).few_points
    few = max(coarse.base.shape) <= most and coarse.base.is_cuda
    dtype = torch.float64 if few else torch.float32
    tables = -4 * coarse.alpha * coarse.x, coarse.y, coarse.base
    x, y, base = (table.to(dtype) for table in tables)
    parts, count = len(x), len(batch.plans)
    x, y = x.flatten(0, 1), y.flatten(0, 1)
    x, y, base = (table.expand(count, *table.shape) for table in (x, y, base))
    how = _INNER[stage], _RELAXATION[stage]
    for epsilon in epsilons:
        # a GPU takes milliseconds, and repeats what it has recorded
        if not coarse.base.is_cuda and is_over():
            break
        costs = torch.baddbmm(base, side_by_side(x @ batch.plans.to(dtype), parts), y).float()
        batch = solve(costs, coarse.weights, batch.g, epsilon, *how)
    return batch


def follow_all(
    coarse: Coarsened, target: float, count: int, solve: BatchSolver, call: Call = call_directly
) -> tuple[tuple[str, ...], Judged]:
    """Follow so many starts between few points to a target; return their names and their ends."""
    hints = find_hints(coarse.problem)
    starts = make_starts(
        coarse.scale, target, count, _ITERATIONS, hints.x_axes.shape[1],
        linear=coarse.problem.linear is not None,
    )  # fmt: skip
    device, size = hints.apart.device, max(coarse.problem.base.shape)
    upload = starts.rotations.to(device), starts.epsilons.to(device)
    search = partial(search_all, solve, count)
    return starts.labels, call(f"search {size}", search, coarse.problem, hints, *upload, in_place=1)


def judge(coarse: CoarseProblem, batch: BatchPlans) -> Judged:
    """Compute the values of plans, and how far they are apart, after rounding to the marginals."""
    rounded = round_to_marginals(batch.plans.double(), *coarse.weights)
    # a plan whose value overflowed counts as the worst
    values = coarse.value(rounded).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return Judged(batch, rounded, torch.cat([values[:, None], coarse.distances(rounded)], dim=1))


# Starts by default: all that make_starts() has, and up to four random rotations. [L116]
DEFAULT_STARTS = 16
# Points per side of the finer problem on which the best optima are compared: a few points may
# favour an optimum that all of them do not. [L110, L116]
_FINER_POINTS = 256
# Outer iterations of all starts until their plans are to meet their marginals, and on the finer
# problem. [L116, L222]
_ITERATIONS = 20
_FINE_ITERATIONS = 18
# Share of the longer forecast that a search of all points takes, and a match of edges. [L1560]
# [L1887]
SEARCHED, MATCHED = 0.1, 0.25
# Optima that are polished and reported at most. [L280]
KEPT = 5
# Optima that are compared on the finer problem at most. [L110]
_COMPARED = 3
# They are not compared if the best is far enough ahead, by these multiples of its value, and of the
# natural scale times the resolution squared, which is the error of coarse points. [L115]
_CLOSE, _CLOSE_SHARE = 2.0, 4.0


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
    chains: int = 0,
) -> Search:
    """Solve the coarse problem from many starts and keep the distinct optima."""
    # Only `columns` of the distances of the whole problem are read, and `epsilon` is its target.
    # There are half as many starts as `count` where all points are searched. One of the searches
    # that this solve has `made` may have been this one. A `rough` search is of a few points even
    # where they are far from the others. A `match` of all points is one more start where these are
    # searched. So many `chains` are followed too where few points leave open which optimum is best.
    backend = backend or EagerBackend()
    call, limits = _way_to_call(problem, count, backend), limits_of(problem.source.device)
    solve = batch_solver(backend)
    plain = problem.alpha == 1 and problem.linear is None and problem.loss.is_square
    before = made_before(problem, epsilon, count, made if plain else (), call)
    if before is not None and before[0].resolution > limits.coarsest:
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
        say_share(SEARCHED, "few points say little of the others")
    else:
        # copies, as the next draw may be recorded over them
        few = coarse.problem.source.indices.clone(), coarse.problem.target.indices.clone()
    target = max(epsilon, LEAST_EPSILON * coarse.scale)
    if before is not None:
        labels = before[1].labels
        judged = call("judge", judge, coarse.problem, before[1].batch, in_place=1)
    else:
        labels, judged = follow_all(coarse, target, count, solve, call)
    found = distinct_optima(judged, labels)
    if chains and _is_open(coarse, found.values, limits.left_open) and not is_over():
        found = _with_chains(coarse, found, chains, target, solve)
    first: list[Alternative] = []
    if coarse.resolution > 0 and _is_close(coarse, found.values) and not is_over():
        # copies, as the functions called next may have been recorded over them
        coarse = coarse._replace(problem=clone(coarse.problem))
        found = found._replace(judged=clone(found.judged))
        close = found.part(None, _COMPARED)
        first = _compare_finely(problem, coarse.problem, close, target, solve, call)
        found = found.part(_COMPARED, None)
    alternatives = (*first, *_alternatives(problem, coarse.problem, found))
    if match is not None:
        match = match[None] if match.shape == coarse.problem.base.shape else None
    for label, plan in {"best matching": _best_matching(coarse.problem), "copies": match}.items():
        if plan is not None:
            alternatives = _with_plan(
                problem, coarse.problem, alternatives, plan, label, target, solve
            )
    ambiguity = ambiguity_of(coarse, alternatives)
    return Search(alternatives, ambiguity, resolution=coarse.resolution, points=few, compare=rough)


def _way_to_call(problem: Problem, count: int, backend: Backend) -> Call:
    """Return how to call the functions of the search: as graphs on a GPU, where they can be."""
    readers = column_reader(problem.source), column_reader(problem.target)
    # a provider that is no tuple of tensors may compute on the host, or look at its columns
    if not problem.plain or not all(isinstance(side, tuple) for side in readers):
        return call_directly
    return way_to_call("search", problem.source.device, backend, (*readers, problem.linear), count)


def _is_open(coarse: Coarsened, values: list[float], ambiguity: float) -> bool:
    """Whether few points of more leave open which of the optima is the best."""
    if coarse.resolution == 0 or len(values) < 2 or is_graph(coarse.problem):
        return False
    best, second = (value - coarse.floor for value in values[:2])
    return best > ambiguity * second


# By how many times chains between few points take longer than their products. [L1600]
_CHAINED = 5.0


def _with_chains(
    coarse: Coarsened, found: _Distinct, count: int, target: float, solve: BatchSolver
) -> _Distinct:
    """Follow chains between the few points too, whose epsilon falls slowly: starts find others."""
    modelled = World(coarse, solve).seconds(range(count), target / coarse.scale)
    say_beside(slowness() * _CHAINED * modelled, "few points leave open which optimum is best")
    climbed = climb(coarse, target, count, solver=solve, told=True, repair=False)
    before, more = found.judged.batch.plans[found.chosen], climbed.plans
    plans = torch.cat([before, more.to(before)])
    batch = BatchPlans(plans, plans.new_zeros(len(plans), 1, plans.shape[2]))
    labels = [*found.labels, *(trial.start for trial in climbed.trials[: len(more)])]
    return distinct_optima(judge(coarse.problem, batch), labels)


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
    compared = distinct_optima(judged, ["annealed", *found.labels])
    return _alternatives(problem, fine.problem, compared)


def _best_matching(coarse: CoarseProblem) -> Tensor | None:
    """Find the best of all matchings (1, s, s) of a few points; ``None`` if there are too many."""
    s = len(coarse.base)
    if s > limits_of(coarse.base.device).all_matchings or not weigh_alike(coarse.weights):
        return None
    orders = torch.tensor(list(itertools.permutations(range(s))), device=coarse.base.device)
    matchings = coarse.source.weights.diag()[orders]
    return matchings[coarse.value(matchings).argmin()[None]]


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
    least = found[0].value - ROUNDING * abs(found[0].value)
    if found[0].plan.shape == plan.shape[1:] and float(coarse.value(plan)) >= least:
        both = torch.cat([plan, found[0].plan[None]])
        if float(coarse.distances(both)[0, 1]) <= DISTINCT:
            return found
    points = coarse.source.indices, coarse.target.indices
    epsilons = coarse.base.new_full((_FINE_ITERATIONS, 2), target)
    place = torch.zeros(1, dtype=torch.int64, device=plan.device)
    judged = carry_over(solve, coarse, *points, plan, place, epsilons)
    # at a larger epsilon it may be left
    (led,) = _alternatives(
        problem, coarse, distinct_optima(judged, ("product", label)).part(None, 1)
    )
    stayed = replace(led, value=float(coarse.value(plan)), label=label, plan=plan[0])
    # and where costs are no distances of points, even at the target

    def objective(one: Alternative) -> float:
        return one.value + target * entropy(one.plan, *coarse.weights)

    taken = min(led, stayed, key=objective)
    if taken.value >= least:
        return found
    others = [one for one in found if one.plan.shape == taken.plan.shape]
    apart = coarse.distances(torch.stack([taken.plan, *(one.plan for one in others)]))[0, 1:]
    same = {id(one) for one, far in zip(others, apart.tolist(), strict=True) if far <= DISTINCT}
    return replace(taken, epsilon=0.0), *(one for one in found if id(one) not in same)


def _alternatives(problem: Problem, coarse: CoarseProblem, found: _Distinct) -> list[Alternative]:
    shape = problem.shape
    # copies: the next solve may overwrite what they are taken from
    source, target = coarse.source.indices.clone(), coarse.target.indices.clone()
    plans = found.judged.rounded[found.chosen]
    return [
        Alternative(value, label, plan, source, target, shape)
        for value, label, plan in zip(found.values, found.labels, plans, strict=True)
    ]


def distinct_optima(judged: Judged, labels: Sequence[str]) -> _Distinct:
    """Return the best start of each distinct optimum."""
    table = judged.table.tolist()
    order = sorted(range(len(table)), key=lambda i: (table[i][0], i))
    kept = first_of_each(order, [row[1:] for row in table])[:KEPT]
    return _Distinct(judged, kept, [labels[i] for i in kept], [table[i][0] for i in kept])


_HOST = torch.device("cpu")


def agreement(
    source: DistanceProvider,
    target: DistanceProvider,
    found_by: tuple[DistanceProvider, DistanceProvider] | None = None,
    device: torch.device = _HOST,
    backend: BackendName | Backend = "auto",
    made: list[Searched] | None = None,
) -> float:
    """Compute the agreement, at most 1, of the best plan between a few points of equal weights.

    It is the correlation of the doubly centred distances that the plan relates. Centring takes out
    how far each point is from the others on average, which any two spaces can be sorted by.
    """
    # With `found_by`, the plan is the best one for these distances of the same points. The
    # distances are on the CPU; plans are searched for on `device`, beside a backend. The search is
    # added to those that were `made`. It has the points, starts and epsilon of a multi-start, which
    # can take it over.
    sides = found_by or (source, target)
    weights = [
        torch.full((side.n,), 1 / side.n, dtype=torch.float64, device=side.device) for side in sides
    ]
    problem = Problem(*sides, Marginals(*weights), 1.0, None, SQUARE)
    standard, size = put_in_standard_form(problem), limits_of(problem.source.device).few_points
    coarse = coarsen(problem if standard is None else standard.problem, size)
    few = coarse.problem
    hints = find_hints(few)
    target_epsilon = AUTO_EPSILON * coarse.scale
    count, rank = DEFAULT_STARTS, hints.x_axes.shape[1]
    starts = make_starts(coarse.scale, target_epsilon, count, _ITERATIONS, rank)
    chosen = choose_backend(backend, device, torch.float32)
    arguments = to_device((few, hints, starts.rotations, starts.epsilons), device)
    few = arguments[0]
    search = partial(search_all, batch_solver(chosen), count)
    # kept to the end: once it is gone another thread may write over what it has returned
    call = way_to_call("agreement", device, chosen, arguments)
    found = call("search", search, *arguments)
    if made is not None:
        # a copy, as the next search may have been recorded over it
        sizes = (sides[0].n, sides[1].n) if standard is None else standard.sizes
        made.append(Searched(sizes, few, AUTO_EPSILON, starts.labels, clone(found.batch)))
    plan = found.rounded[found.table[:, 0].argmin()]
    x, y = few.x, few.y
    if found_by:
        points = few.source, few.target
        if standard is not None:
            source, target = standard.turned(source, target)
            points = standard.given_points(*points)
        x, y = _centred(source, points[0]), _centred(target, points[1])
    cross = (cross_terms(x, plan[None], y)[0] * plan).sum()
    p, q = few.weights
    size = (p @ x[0].square() @ p) * (q @ y[0].square() @ q)
    return float(cross / size.sqrt().clamp_min(torch.finfo(size.dtype).tiny))


def _centred(provider: DistanceProvider, points: SpreadPoints) -> Tensor:
    """Centre the distances of another provider among some points, (1, s, s)."""
    index = points.indices.to(provider.device)
    return centre(points._replace(table=provider.between(index, index).to(points.table)))[0][None]
