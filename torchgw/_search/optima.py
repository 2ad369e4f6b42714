"""Many starts on the coarse problem, solved as one batch; the distinct optima that they find."""

import copy
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torchgw._boundary.arrays import to_tensor
from torchgw._plans.contract import Plan
from torchgw._plans.rounded import round_to_marginals
from torchgw._problem.problem import Problem
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
from torchgw._search.chain import STANDS_OUT, Trial
from torchgw._search.chain_times import chains_within
from torchgw._search.chains import Guess, climb
from torchgw._search.coarse import Coarsened, CoarseProblem, centre, coarsen, with_loss
from torchgw._search.graph_chains import SMEARED
from torchgw._search.graphs import is_sparse
from torchgw._search.starts import GUESS_EPSILON, find_hints, make_starts
from torchgw._sinkhorn.annealing import Annealing
from torchgw._sinkhorn.batch import BatchSolver
from torchgw._sinkhorn.choose import batch_solver
from torchgw._sinkhorn.contract import Backend
from torchgw._sinkhorn.eager import EagerBackend
from torchgw._sinkhorn.problem import DenseCost, softmin
from torchgw._tensors.cuda_graphs import Call, call_directly, clone
from torchgw._typing import Potentials
from torchgw.distances.base import DistanceProvider
from torchgw.distances.sampling import choose_points, column_reader

SearchName = Literal["auto", "fast", "thorough"]

# Starts by default: all that make_starts() has, and four random rotations. [L116]
DEFAULT_STARTS = 16
# Points per side of the coarse problem, and of the finer one on which its best optima are compared:
# a few points may favour an optimum that all of them do not. [L110, L116]
_POINTS = 96
_FINER_POINTS = 256
# Outer iterations of all starts until their plans are to meet their marginals, and on the finer
# problem. [L116, L222]
_ITERATIONS = 20
_FINE_ITERATIONS = 18
# Distance (CoarseProblem.distances) above which two plans are different optima. [L280]
_DISTINCT = 0.05
# The same of plans of all points (_sent_apart). [L617]
OTHER = 0.2
# Objectives of whole solves within this of each other, relative, are of the same optimum, as those
# of chains are. [L1161]
AGREED = 1e-3
# Entries of a plan up to which problems of factored distances are solved twice: where solves begin
# on a subsample beyond. A choice. [L1161]
_TWICE = 9_000_000
# Optima that are polished and reported at most. [L280]
_KEPT = 5
# Optima that are compared on the finer problem at most. [L110]
_COMPARED = 3
# They are not compared if the best is far enough ahead, by these multiples of its value, and of the
# natural scale times the resolution squared, which is the error of coarse points. [L115]
_CLOSE, _CLOSE_SHARE = 2.0, 4.0
# Resolution above which coarse points say little about their neighbours' partners. All points are
# then searched, from half as many starts, if there are no more than this on either side.
# [L109, L219]
_COARSEST = 0.2
_WHOLE = 512
# Loneliness (see there) above which a few points say nothing about the others: 0.05 to 0.9 for
# curves, clouds in up to 10 dimensions, clusters; 0.9 to 14 for word vectors, networks, noise.
# [L332]
_LONELY = 0.9
# A resolution as small as this does not occur for distances, but for those of very few points or on
# a line. [L335]
_NO_DISTANCE = 0.01
# Value of a plan of all points, as a share of the scale, up to which it keeps all distances. [L335]
_ISOMETRIC = 1e-3
# Share of a value by which another has to be lower to be better. [L546]
_SAME = 1e-6
# Points of equal weight up to which all matchings are looked at. [L546]
_ALL_MATCHINGS = 7
# Points of the larger side from which on chains are of use. [L662]
_TINY = 5
# Multiplications that chains on all points may take by default, and where a search is thorough.
# [L331]
_OPERATIONS = {"cpu": 1e12, "cuda": 1.2e13}
_THOROUGH = 16
# Chains on all points, unless ``n_init`` says how many; no chain is followed if fewer than this are
# affordable. [L331]
_CHAINS = {"auto": 16, "thorough": 64}
_FEWEST_CHAINS = 4
# Doubts that are reported where the search cannot vouch for its optimum.
_WHY_SINGLE = {
    "auto": "A few points do not represent these distances, and there are too many to search them "
    "all by default, so this is the optimum of a single start; there may be a better one. Pass "
    "search='thorough', or an `init` that you know.",
    "thorough": "A few points do not represent these distances, and there are too many to search "
    "them all, so this is the optimum of a single start; there may be a better one. Pass an `init` "
    "that you know, or fewer points.",
}
_WHY_FAST = (
    "A few points, or rough plans, do not tell which optimum is best here, and search='fast' "
    "follows no start to its end on all points; there may be a better one. Pass search='auto', or "
    "an `init` that you know."
)
WHY_APART = (
    "A few points do not represent these distances. A rough start and the best match of all points"
    " led to different optima, of which this is the better one; there may be a better one still. "
    "See `result.trials`; pass an `init` that you know."
)
WHY_SUBSAMPLE = (
    "The problem is so large that its solve began on a subsample, and no starts were followed on "
    "all points; there may be a better optimum. Pass search='auto', or an `init` that you know."
)
WHY_OPEN = {
    "auto": "{count} starts, followed on all points, did not agree on an optimum; there may be a "
    "better one. See `result.trials`; pass search='thorough' to search longer.",
    "thorough": "{count} starts, followed on all points, did not agree on an optimum; there may be "
    "a better one. See `result.trials`; pass a larger `n_init` to search longer.",
}
# Share of the mean entry of a row below which an entry of a coarse plan is not pickled. [L378]
_PICKLED = 1e-4


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
    plan : Tensor or ndarray, shape (s, t), float64
        Mass between coarse points, one in all.
    source, target : Tensor or ndarray, shapes (s,) and (t,), int64
        Which points of X and of Y those are.
    shape : tuple of int
        (n, m), of the whole problem.
    epsilon : float
        Where it is taken up as a start, as a share of the natural scale of the cost; 0 is the
        target.
    relation : str
        What the match is to the first one, such as "the first mirrored"; empty for that itself.
    """

    value: float
    label: str
    plan: Any
    source: Any
    target: Any
    shape: tuple[int, int]
    epsilon: float = GUESS_EPSILON
    relation: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep what matters of the plan, for pickle: 1e-4 of each row's mass may be missing."""
        plan = to_tensor("plan", self.plan).cpu()
        row, column = (plan >= _PICKLED * plan.sum(1, keepdim=True) / plan.shape[1]).nonzero().T
        short = torch.int16 if max(plan.shape) < 2**15 else torch.int32
        entries = row.to(short), column.to(short), plan[row, column], tuple(plan.shape)
        rest = {item.name: getattr(self, item.name) for item in fields(self)}
        device = self.plan.device if isinstance(self.plan, Tensor) else None
        return _unpickled, (rest | {"plan": entries}, device)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Alternative":
        """Copy the whole plan."""
        return replace(self, plan=copy.deepcopy(self.plan, memo))

    def __repr__(self) -> str:
        """Leave out the tensors."""
        s, t = self.plan.shape
        what = f", {self.relation}" if self.relation else ""
        return (
            f"Alternative({self.label!r}, value={self.value:.6g}, {s} x {t} of {self.shape}{what})"
        )


def _unpickled(parts: dict[str, Any], device: torch.device | None) -> Alternative:
    """Build an alternative from its parts, the plan from its entries; None is for NumPy's."""
    row, column, values, shape = parts["plan"]
    plan = values.new_zeros(shape)
    plan[row.long(), column.long()] = values
    whole = plan.numpy() if device is None else plan.to(device)
    return Alternative(**(parts | {"plan": whole}))


class Search(NamedTuple):
    """What a multi-start has found."""

    alternatives: tuple[Alternative, ...]  # the best first; none if nothing could tell
    ambiguity: float  # in [0, 1], NaN if nothing could tell
    trials: tuple[Trial, ...] = ()  # of chains on all points
    doubt: str = ""  # why there may be a better optimum, and what to do
    resolution: float = float("nan")  # of the few points; NaN if they cannot tell
    points: tuple[Tensor | None, Tensor | None] = (None, None)  # spread out, if few were searched
    compare: bool = False  # whether a solve from another start has to be compared with it
    potentials: Potentials | None = None  # of the first plan, if it is of all points
    met: bool = False  # whether starts have led to the first plan, if not to its objective


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
) -> Search:
    """Solve the coarse problem from many starts and keep the distinct optima."""
    # Only `columns` of the distances of the whole problem are read, and `epsilon` is its target.
    # There are half as many starts as `count` where all points are searched. One of the searches
    # that this solve has `made` may have been this one. A `rough` search is of a few points even
    # where they are far from the others.
    backend = backend or EagerBackend()
    call = _way_to_call(problem, count, backend)
    solve = batch_solver(backend)
    plain = problem.alpha == 1 and problem.linear is None and problem.loss.is_square
    before = made_before(problem, epsilon, count, made if plain else (), call)
    if before is not None and before[0].resolution > _COARSEST:
        before = None
    coarse: Coarsened | None
    if rough:
        before, coarse = None, _coarsen(problem, _POINTS, call)
    else:
        coarse = represent(problem, call) if before is None else before[0]
    if coarse is None:
        return Search((), float("nan"))
    few: tuple[Tensor | None, Tensor | None] = (None, None)
    size = max(len(coarse.problem.source.indices), len(coarse.problem.target.indices))
    if size > _POINTS:
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
    ambiguity = _ambiguity(coarse, alternatives)
    return Search(alternatives, ambiguity, resolution=coarse.resolution, points=few, compare=rough)


def search_all_points(
    problem: Problem,
    epsilon: float,
    first: Search,
    n_init: int | None,
    how: SearchName,
    gradient: str | None,
    *,
    told: bool = False,
    sharpened: bool = False,
) -> Search:
    """Follow ``n_init`` chains on all points where a few do not represent them, or say so."""
    # Chains are compared at the target `epsilon`, together with the optima that few points have
    # found `first`, if these are of all points.
    # Unless `gradient` is None the problem can be solved from another start too, by that gradient.
    # Whether it has been `told` before how long that takes, and whether the plan is `sharpened`.
    n, m = problem.source.n, problem.target.n
    if max(n, m) < _TINY or problem.loss.cross is None:
        return first
    if how != "thorough" and tells_all(problem, first):
        if first.alternatives:
            return first
        first = search_twice(problem, how, gradient)
        if not first.compare:
            return first
        return find_optima(problem, epsilon, n_init or DEFAULT_STARTS, rough=True)
    affordable = _affordable(problem, how)
    if affordable < _FEWEST_CHAINS:
        return first._replace(doubt=_WHY_SINGLE["thorough" if how == "thorough" else "auto"])
    whole = _coarsen(problem, max(n, m), call_directly)
    if epsilon >= whole.scale:
        # there is only one plan, at which every chain would end
        return first
    if max(n, m) <= _POINTS and n_init is None and how != "fast":
        # other starts, which are cheap
        more = find_optima(problem, epsilon, _CHAINS["thorough"])
        first = min(more, first, key=_least)
    coarse = whole.problem
    guesses = [Guess(one.label, *_among_all(one, coarse)) for one in first.alternatives]
    if (
        any(guess.rows is None for guess in guesses)
        and first.alternatives[0].value <= _ISOMETRIC * whole.scale
    ):
        # nothing is better than a match that keeps all distances
        return first
    if how == "fast":
        return first._replace(doubt=_WHY_FAST)
    # for a far smaller epsilon a ladder of stages would not end
    target = max(epsilon, LEAST_EPSILON * whole.scale)
    count = min(n_init or _CHAINS[how], affordable)
    plain = how == "auto" and n_init is None
    found = climb(
        whole, target, count, guesses, 2 * affordable,
        in_time=plain, told=told, sharpened=sharpened and plain,
    )  # fmt: skip
    apart = _sent_apart(coarse, found.plans).tolist()
    kept = _first_of_each(range(len(found.plans)), apart, OTHER)
    alternatives = tuple(
        Alternative(
            found.trials[i].value,
            found.trials[i].start,
            found.plans[i],
            coarse.source.indices,
            coarse.target.indices,
            (n, m),
            epsilon=0.0,
        )
        for i in kept
    )
    ambiguity = _ambiguity(whole, alternatives)
    certain = found.agreed or ambiguity < STANDS_OUT
    doubt = "" if certain else WHY_OPEN[how].format(count=len(found.trials))
    potentials = None
    # smaller problems are solved in no time, and a few iterations more make them more exact
    square = problem.loss.is_square and not problem.directed
    if square and max(n, m) > _POINTS and found.plans.shape[1:] == (n, m):
        potentials = _of_whole_cost(whole, found.plans[0], found.g, target)
    return Search(
        alternatives, ambiguity, found.trials, doubt, potentials=potentials, met=found.met
    )


def _of_whole_cost(whole: Coarsened, plan: Tensor, g: Tensor, epsilon: float) -> Potentials:
    """Turn g (t,) at a plan of all points into potentials of the cost without centring."""
    # The terms of rows, of columns and the constant that the search leaves out; see HalfGradient.
    coarse = whole.problem
    (x, u, mean_x, _), (y, w, mean_y, _) = centre(coarse.source), centre(coarse.target)
    cost = coarse.base.addmm(x @ plan, y, alpha=-4 * float(coarse.alpha)).float()
    g = g.double()
    f = softmin(DenseCost(cost), coarse.target.weights.log(), g, epsilon, axis=1)
    own_x, own_y = (side.table.square() @ side.weights for side in (coarse.source, coarse.target))
    along, down = plan @ w, plan.T @ u
    row = own_x - 2 * (x @ along + mean_y * u + u @ along + mean_x * mean_y)
    column = own_y - 2 * (y @ down + mean_x * w)
    f, g = f + 2 * coarse.alpha * row + whole.floor, g + 2 * coarse.alpha * column
    source, target = torch.empty_like(f), torch.empty_like(g)
    source[coarse.source.indices], target[coarse.target.indices] = f, g
    return Potentials(source, target)


def search_twice(
    problem: Problem, how: SearchName, gradient: str | None, *, relaxed: bool = False
) -> Search:
    """Ask for a second solve, by a gradient, where few points say little, or say why not."""
    nothing = Search((), float("nan"))
    if gradient in (None, "sampled") or problem.loss.cross is None:
        return nothing
    cheap = gradient == "factored" and problem.source.n * problem.target.n <= _TWICE
    if not cheap and _affordable(problem, how) < _FEWEST_CHAINS:
        # relaxed problems have no thorough search
        return nothing._replace(doubt=_WHY_SINGLE["thorough" if relaxed else "auto"])
    if how == "fast":
        return nothing._replace(doubt=_WHY_FAST)
    return nothing._replace(compare=True)


def _affordable(problem: Problem, how: SearchName) -> int:
    """Count the chains that a search may follow."""
    operations = _OPERATIONS[problem.source.device.type] * (_THOROUGH if how == "thorough" else 1)
    return chains_within(operations, problem.source.n, problem.target.n)


def compare_ends(problem: Problem, ends: Sequence[tuple[Trial, Tensor]]) -> Search:
    """Say what solves of all points, the lowest first, with plans (n, m), tell of each other."""
    n, m = problem.source.n, problem.target.n
    whole = _coarsen(problem, max(n, m), call_directly)
    source, target = (side.indices for side in whole.problem[:2])
    weights = whole.problem.source.weights, whole.problem.target.weights
    plans = torch.stack(
        [round_to_marginals(plan[source[:, None], target], *weights) for _, plan in ends]
    )
    trials = tuple(trial for trial, _ in ends)
    apart = _sent_apart(whole.problem, plans).tolist() if len(ends) > 1 else [[0.0]]
    alternatives = tuple(
        Alternative(trials[i].value, trials[i].start, plans[i], source, target, (n, m), epsilon=0.0)
        for i in _first_of_each(range(len(ends)), apart, OTHER)
    )
    ambiguity = _ambiguity(whole, alternatives)
    certain = ends_settle(trials) or ambiguity < STANDS_OUT
    doubt = "" if certain else WHY_OPEN["auto"].format(count=len(ends))
    return Search(alternatives, ambiguity, trials, doubt)


def ends_settle(trials: Sequence[Trial]) -> bool:
    """Whether solves from different starts, the lowest first, agree, or the first stands out."""
    best, worst = trials[0].objective, trials[-1].objective
    return worst - best <= AGREED * abs(best) or best < STANDS_OUT * worst


def sent_apart(problem: Problem, few: Alternative, plan: Plan) -> float:
    """Return how far a plan sends points from where the best plan of few points sends those few.

    As :func:`_sent_apart`, but 0 also where one plan is the other one blurred by entropy: the
    smaller variance of the images less their covariance, over the variance of distances.
    """
    a, b = few.plan.sum(1), few.plan.sum(0)
    columns = problem.target.columns(few.target).to(few.plan)
    # a point without weight is sent nowhere
    sends = [
        part / part.sum(1, keepdim=True).clamp_min(torch.finfo(part.dtype).tiny)
        for part in (few.plan, plan.rows(few.source).to(few.plan))
    ]
    columns = columns - b @ columns[few.target]
    ours, theirs = sends[0] @ columns[few.target], sends[1] @ columns
    own, other, both = (
        float(a @ (one * another) @ b)
        for one, another in ((ours, ours), (theirs, theirs), (ours, theirs))
    )
    return (min(own, other) - both) / float(b @ columns[few.target].square() @ b)


def led_by(search: Search, problem: Problem, plan: Tensor, value: float, label: str) -> Search:
    """Put the plan (n, m) of a solve first among the optima of a search on the same points."""
    first = search.alternatives[0]
    plan = plan[first.source[:, None], first.target].to(first.plan)
    mine = replace(first, value=value, label=label, plan=plan, epsilon=0.0)
    whole = _coarsen(problem, max(problem.source.n, problem.target.n), call_directly)
    both = mine, *search.alternatives
    apart = whole.problem.distances(
        torch.stack([_among_all(one, whole.problem)[0] for one in both])
    )
    alternatives = tuple(both[i] for i in _first_of_each(range(len(both)), apart.tolist()))
    ambiguity = _ambiguity(whole, alternatives)
    return search._replace(alternatives=alternatives, ambiguity=ambiguity)


def _least(found: Search) -> float:
    """Return the lowest value that a search has found."""
    return min((one.value for one in found.alternatives), default=torch.inf)


def tells_all(problem: Problem, first: Search) -> bool:
    """Whether the optima of few points determine where all points go."""
    # entries of adjacency matrices and similarities are no distances, and small ones abound
    few = first.resolution > _NO_DISTANCE or is_structured(problem, first)
    return few and not any(map(_is_similarity, (problem.source, problem.target)))


def _sent_apart(problem: CoarseProblem, plans: Tensor) -> Tensor:
    """Return how far plans (k, s, t) send points apart by all distances of where they go, (k, k).

    0 where those are the same, as of nodes that have the same neighbours; 1 for unrelated matches.
    An entry of a table that is no distance says nothing of how far two points are apart.
    """
    table, b = problem.target.table, problem.target.weights
    a = problem.source.weights[:, None]
    images = (plans @ (table - b @ table) * (b / a).sqrt()).flatten(1)
    spread = b @ (table - b @ table).square() @ b
    return torch.cdist(images, images).square() / (2 * spread).clamp_min(torch.finfo(b.dtype).tiny)


def _among_all(found: Alternative, whole: CoarseProblem) -> tuple[Tensor, Tensor | None]:
    """Put a plan of some points into a table of all; return its rows, ``None`` for all."""
    sides = (whole.source.indices, found.source), (whole.target.indices, found.target)
    rows, columns = (_places_in(every, some) for every, some in sides)
    plan = whole.base.new_zeros(whole.base.shape)
    plan[rows[:, None], columns] = found.plan
    return plan, None if found.plan.shape == plan.shape else rows


def _places_in(every: Tensor, some: Tensor) -> Tensor:
    """Find the places of some distinct numbers in a longer list."""
    known = every.sort()
    return known.indices[torch.searchsorted(known.values, some)]


def is_structured(problem: Problem, found: Search | None = None) -> bool:
    """Tell whether points have others like them, so that few of them represent all."""
    # The few are those of a search, if it has drawn some.
    drawn = found.points if found else (None, None)
    sides = zip((problem.source, problem.target), problem.marginals, drawn, strict=True)
    return all(_loneliness(*side) <= _LONELY for side in sides)


def is_whole(problem: Problem, found: Search) -> bool:
    """Tell whether a search was one on all points."""
    whole = problem.source.n, problem.target.n
    return any(item.plan.shape == whole for item in found.alternatives[:1])


def is_smeared(problem: Problem, found: Search) -> bool:
    """Tell whether the best plan between the nodes of two graphs hardly tells partners."""
    best = found.alternatives[0]
    plan, epsilon = best.plan, best.epsilon
    if epsilon == 0:
        return False
    product = torch.outer(plan.sum(1), plan.sum(0))
    if float((plan - product).abs().sum()) > SMEARED:
        return False
    tables = problem.source.matrix(), problem.target.matrix()
    return all(table is not None and is_sparse(table) for table in tables)


def _is_similarity(provider: DistanceProvider) -> bool:
    """Whether the first point is further from itself than from others, as by similarities."""
    columns = provider.columns(torch.arange(1, device=provider.device))
    return bool(provider.n * columns[0, 0] > columns.sum())


def _loneliness(provider: DistanceProvider, weights: Tensor, drawn: Tensor | None) -> float:
    """Root mean square difference of a point's distances to those of the nearest coarse point."""
    # Relative to the deviation of distances: about 1 where points have nothing in common. That also
    # holds for adjacency matrices and similarities, which say "near" with large numbers or not at
    # all.
    points = choose_points(provider, weights, _POINTS).indices if drawn is None else drawn
    columns = provider.columns(points).double()
    others = columns.clone()
    others[points, torch.arange(len(points), device=points.device)] = torch.inf
    nearest = points[others.argmin(1)]
    columns = torch.cat([way.columns(points).double() for way in provider.ways()], dim=1)
    error = (columns - columns[nearest]).square().mean(1) @ weights
    variance = columns.var().clamp_min(torch.finfo(columns.dtype).tiny)
    return float((error / variance).sqrt())


def represent(problem: Problem, call: Call = call_directly) -> Coarsened | None:
    """Return the coarse problem to search: all points if few say too little, none if too many."""
    coarse = _coarsen(problem, _POINTS, call)
    if coarse.resolution <= _COARSEST:
        return coarse
    if max(problem.source.n, problem.target.n) > _WHOLE:
        return None
    return _coarsen(problem, _WHOLE, call)


def _coarsen(problem: Problem, size: int, call: Call) -> Coarsened:
    """Return a coarse problem with the loss of the whole one."""
    return with_loss(coarsen(problem, size, call), problem)


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
    fine = _coarsen(problem, _FINER_POINTS, call)
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
    both = torch.cat([matchings[best], found[0].plan[None]])
    if found[0].plan.shape == (s, t) and float(coarse.distances(both)[0, 1]) <= _DISTINCT:
        return found
    points = coarse.source.indices, coarse.target.indices
    epsilons = coarse.base.new_full((_FINE_ITERATIONS, 2), target)
    judged = carry_over(solve, coarse, *points, matchings, best, epsilons)
    led = _distinct(judged, ("product", "best matching"))
    better = led.values[0] < found[0].value - _SAME * abs(found[0].value)
    # at a larger epsilon it may be left
    taken = _alternatives(problem, coarse, led.part(None, 1)) if better else []
    return (*(replace(one, epsilon=0.0) for one in taken), *found)


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
    kept = _first_of_each(order, [row[1:] for row in table])[:_KEPT]
    return _Distinct(judged, kept, [labels[i] for i in kept], [table[i][0] for i in kept])


def _first_of_each(
    order: Iterable[int], distances: Sequence[Sequence[float]], least: float = _DISTINCT
) -> list[int]:
    """Keep those that are apart from all that were kept before them."""
    kept: list[int] = []
    for i in order:
        if all(distances[i][j] > least for j in kept):
            kept.append(i)
    return kept


def _ambiguity(coarse: Coarsened, found: tuple[Alternative, ...]) -> float:
    """Return the best value over the second best, above the least that the linear term can cost."""
    if len(found) < 2:
        return 0.0
    best, second = (max(0.0, one.value - coarse.floor) for one in found[:2])
    # two exact matches, or rounding between them
    return min(1.0, best / second) if second > 0 else 1.0
