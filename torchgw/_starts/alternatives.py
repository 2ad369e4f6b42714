"""What a search has found: optima, how they stand to each other, and doubts that there are more."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchgw._boundary.arrays import to_tensor
from torchgw._plans.contract import Plan
from torchgw._plans.given import PairPlan, places_in
from torchgw._plans.transport import round_to_marginals
from torchgw._problem.limits import CPU, limits_of
from torchgw._problem.problem import Problem
from torchgw._starts.chain import GUESS_EPSILON, SAME, STANDS_OUT, Trial
from torchgw._starts.coarse import AXES, Coarsened, CoarseProblem, coarse_problem, eigenpairs
from torchgw._tensors.operations import same
from torchgw._typing import Potentials
from torchgw.distances.base import DistanceProvider

# Distance (CoarseProblem.distances) above which two plans are different optima. [L280]
DISTINCT = 0.05
# Share of the mean entry of a row below which an entry of a coarse plan is not pickled. [L378]
_PICKLED = 1e-4


@dataclass(frozen=True, eq=False)
class Alternative:
    """A local optimum of the coarse problem; pass it as ``init`` to solve from there.

    Attributes
    ----------
    value : float
        Objective without entropy of the coarse plan, which has exact marginals. Comparable among
        the alternatives of one result; the whole problem's value is usually a little lower. Where
        solves from several have ended, the values of these, and those of few points in proportion.
        Of a relaxed problem: with penalty and entropy, which decide what its mass is.
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
    images : int
        How many matches the symmetries of both sides make of this one, itself included: counted of
        the first, of up to 96 points. Those listed after it differ in how they relate to it.
    """

    value: float
    label: str
    plan: Any
    source: Any
    target: Any
    shape: tuple[int, int]
    epsilon: float = GUESS_EPSILON
    relation: str = ""
    images: int = 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep what matters of the plan, for pickle: 1e-4 of each row's mass may be missing."""
        plan = to_tensor("plan", self.plan).cpu()
        row, column = (plan >= _PICKLED * plan.sum(1, keepdim=True) / plan.shape[1]).nonzero().T
        short = torch.int16 if max(plan.shape) < 2**15 else torch.int32
        entries = row.to(short), column.to(short), plan[row, column], tuple(plan.shape)
        rest = {item.name: getattr(self, item.name) for item in fields(self)}
        device = self.plan.device if isinstance(self.plan, Tensor) else None
        return _unpickled, (rest | {"plan": entries}, device)

    def __deepcopy__(self, memo: dict[int, Any]) -> Alternative:
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


class Ends(NamedTuple):
    """Where plans have led; of k plans, or of as many (B, k) of each of B problems."""

    plans: Tensor  # (..., n, m) float64; of mass one but for relaxed problems
    objectives: Tensor  # (...) with entropy, and with penalties; infinite where a number was lost
    values: Tensor  # (...) without them

    def lower(self, other: Ends) -> Ends:
        """Take the other one of two plans where its objective is lower."""
        less = other.objectives < self.objectives
        return Ends(
            torch.where(less[:, None, None], other.plans, self.plans),
            *(torch.where(less, *both) for both in zip(other[1:], self[1:], strict=True)),
        )


class End(NamedTuple):
    """Where a whole solve has ended."""

    plan: Plan
    value: float  # as that of an alternative
    label: str  # of its start


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
    ended: bool = False  # whether the optima are those at which whole solves have ended
    settled: bool = False  # whether all plans, and the product plan, were followed to their ends
    few: Search | None = None  # that of few points, where chains or messages have led elsewhere
    match: PairPlan | None = None  # of distances alone, where few points leave open which is best

    @property
    def others(self) -> list[Alternative]:
        """The optima whose values do not tell that they end above the best one."""
        share, best = CPU.all_above if self.trials else CPU.few_above, self.alternatives[:1]
        return [
            one for one in self.alternatives[1:]
            if one.value - best[0].value <= share * abs(best[0].value)
        ]  # fmt: skip

    @property
    def rivals(self) -> list[Alternative]:
        """The best at the target at once, if a solve has begun where it is blurred; the others."""
        best = self.alternatives[0]
        # more are solved on a subsample first, and then at the target alone
        whole = math.prod(best.shape) <= limits_of(best.plan.device).subsample
        begun = whole and best.epsilon > 0
        return [*([replace(best, epsilon=0.0)] if begun else []), *self.others]

    def thorough(self, how: str) -> bool:
        """Whether chains of a thorough search were followed."""
        return how == "thorough" and bool(self.trials)

    def followed(self, how: str, moves: Set[str]) -> tuple[int, int]:
        """Count the solves that some moves make from the product plan, and from what was found."""
        thorough = self.thorough(how)
        if self.settled and not thorough:
            return 0, 0
        few = 0 if self.few is None else 1 if self.trials else len(self.few.alternatives)
        optima = len(self.rivals) if "optima" in moves and self.alternatives else 0
        product = thorough + (thorough or "product" in moves)
        return product, (self.match is not None) + few + optima


def is_whole(problem: Problem, found: Search) -> bool:
    """Tell whether a search was one on all points."""
    whole = problem.shape
    return any(item.plan.shape == whole for item in found.alternatives[:1])


def entropy(plan: Tensor, a: Tensor, b: Tensor) -> float:
    """Compute what entropy adds to the objective of a plan (s, t) for an epsilon of one."""
    product = torch.outer(a, b).to(plan)
    tiny = torch.finfo(plan.dtype).tiny
    return float(torch.special.xlogy(plan, plan / product.clamp_min(tiny)).sum())


def among_all(found: Alternative, whole: CoarseProblem) -> tuple[Tensor, Tensor | None]:
    """Put a plan of some points into a table of all; return its rows, ``None`` for all."""
    sides = (whole.source.indices, found.source), (whole.target.indices, found.target)
    rows, columns = (
        places_in(every, size)[some] for (every, some), size in zip(sides, found.shape, strict=True)
    )
    plan = whole.base.new_zeros(whole.base.shape)
    plan[rows[:, None], columns] = found.plan.to(plan)
    return plan, None if found.plan.shape == plan.shape else rows


def first_of_each(
    order: Iterable[int], distances: Sequence[Sequence[float]], least: float = DISTINCT
) -> list[int]:
    """Keep those that are apart from all that were kept before them."""
    kept: list[int] = []
    for i in order:
        if all(distances[i][j] > least for j in kept):
            kept.append(i)
    return kept


def ambiguity_of(coarse: Coarsened, found: tuple[Alternative, ...]) -> float:
    """Return the best value over the second best, above the least that the linear term can cost."""
    if len(found) < 2:
        return 0.0
    rounding = coarse.problem.rounding() or 1.0
    best, second = (max(rounding, one.value - coarse.floor) for one in found[:2])
    return best / max(best, second)


WHY_SINGLE = {
    "auto": "A few points do not represent these distances, and there are too many to search them "
    "all by default, so this is the optimum of a single start; there may be a better one. Pass "
    "search='thorough', or an `init` that you know.",
    "thorough": "A few points do not represent these distances, and there are too many to search "
    "them all, so this is the optimum of a single start; there may be a better one. Pass an `init` "
    "that you know, or fewer points.",
}
WHY_BESIDE = (
    "A few points do not represent these graphs, and there are too many nodes to search them all "
    "by default, so this is the best end of a match by messages along edges and of what the few "
    "tell; there may be a better one. Pass search='thorough', or an `init` that you know."
)
WHY_FAST = (
    "A few points, or rough plans, do not tell which optimum is best here, and search='fast' "
    "follows no start to its end on all points; there may be a better one. Pass search='auto', or "
    "an `init` that you know."
)
WHY_APART = (
    "A few points do not represent these distances. A rough start and the best match of all points"
    " led to different optima, of which this is the better one; there may be a better one still. "
    "See `result.trials`; pass an `init` that you know."
)
WHY_RELAXED = (
    "Starts of this problem, whose marginals are relaxed, did not agree on an optimum; there may "
    "be a better one. See `result.alternatives`; pass an `init` that you know."
)
WHY_BLUR = (
    "Another plan of the same mass keeps distances better and loses by its entropy alone, so "
    "epsilon decides which one is found, as it is too large to tell points from their neighbours. "
    "Pass a smaller `epsilon`, such as a tenth of `result.epsilon`."
)
WHY_SUBSAMPLE = (
    "The problem is so large that its solve began on a subsample, and no starts were followed on "
    "all points; there may be a better optimum. Pass search='auto', or an `init` that you know."
)
WHY_TIME = (
    "The time limit ended the search before it had followed everything that it found; there may be "
    "a better optimum. Pass a larger `time_limit`, or an `init` that you know."
)
WHY_LEFT = (
    "The search has seen a plan of a lower objective, from which the last steps lead away: "
    "{lowest:.6g} for {own:.6g}. It is in `result.alternatives`; pass search='thorough', or "
    "regularization='proximal'."
)
WHY_EDGES = (
    "The plan sends few of the edges of X to edges of Y, and starts that matched these alone did "
    "not agree on how; there may be a better optimum. Pass search='thorough' to search longer, or "
    "an `init` that you know."
)
WHY_UNMATCHED = (
    "The plan sends few of the edges of X to edges of Y, and no match of these alone keeps nearly "
    "all; there may be a better optimum. Pass an `init` that you know."
)
WHY_PART = (
    "The plan sends few of the edges of the smaller graph to edges, and a match keeps nearly all: "
    "with weights that are met on both sides a part of a graph has no plan of its own. See "
    "`result.matching()`, which goes by the edges; or pass `mass` or `unbalanced`."
)
WHY_OPEN = {
    "auto": "Starts, followed on all points, did not agree on an optimum ({count} of them); there "
    "may be a better one. See `result.trials`; pass search='thorough' to search longer.",
    "thorough": "Starts, followed on all points, did not agree on an optimum ({count} of them); "
    "there may be a better one. See `result.trials`; pass a larger `n_init` to search longer.",
}
WHY_NO_ELBOW = (
    "The cost of more mass rises without a break, so how much of the two sides matches is open: "
    "{share:g} of the mass was taken. See `result.report.masses`; pass the `mass` that you know, "
    "and both sides in one unit."
)
WHY_PARTS = (
    "Parts of the two may have other shares in each: {share:.0%} of the mass, matched otherwise, "
    "costs {times:.0f} times less than all of it. Pass mass='auto', which finds how much matches."
)
WHY_BATCH = (
    "Starts of this problem did not agree on an optimum; there may be a better one. Pass "
    "search='thorough', which solves each as torchgw.solve does."
)
WHY_ALONE = (
    "There may be a better optimum of this problem. Pass it to torchgw.solve, whose result says "
    "why."
)


# The same of plans of all points (all_sent_apart), and of a plan and a matching near it.
# [L617, L1966]
OTHER = 0.2
# Objectives of whole solves within this of each other, relative, are of the same optimum, as those
# of chains are. [L1161]
AGREED = SAME


def compare_ends(problem: Problem, ends: Sequence[tuple[Trial, Tensor]]) -> Search:
    """Say what solves of all points, the lowest first, with plans (n, m), tell of each other."""
    n, m = problem.shape
    whole = coarse_problem(problem, max(n, m))
    source, target = (side.indices for side in whole.problem.sides)
    weights = whole.problem.weights
    plans = torch.stack(
        [round_to_marginals(plan[source[:, None], target], *weights) for _, plan in ends]
    )
    trials = tuple(trial for trial, _ in ends)
    alternatives, ambiguity = different_optima(whole, trials, plans, (n, m))
    certain = ends_settle(trials) or ambiguity < STANDS_OUT
    doubt = "" if certain else WHY_OPEN["auto"].format(count=len(ends))
    return Search(alternatives, ambiguity, trials, doubt, ended=True)


def different_optima(
    whole: Coarsened, trials: Sequence[Trial], plans: Tensor, shape: tuple[int, int]
) -> tuple[tuple[Alternative, ...], float]:
    """Keep those of plans (k, s, t), the best first, that are different; tell their ambiguity."""
    source, target = whole.problem.source.indices, whole.problem.target.indices
    apart = all_sent_apart(whole.problem, plans).tolist() if len(plans) > 1 else [[0.0]]
    optima = tuple(
        Alternative(trials[i].value, trials[i].start, plans[i], source, target, shape, epsilon=0.0)
        for i in first_of_each(range(len(plans)), apart, OTHER)
    )
    return optima, ambiguity_of(whole, optima)


def ends_settle(trials: Sequence[Trial]) -> bool:
    """Whether solves from different starts, the lowest first, agree, or the first stands out."""
    best, worst = trials[0].objective, trials[-1].objective
    return worst - best <= AGREED * abs(best) or best < STANDS_OUT * worst


def sent_apart(problem: Problem, few: Alternative, plan: Plan) -> float:
    """Return how far a plan sends points from where the best plan of few points sends those few.

    As :func:`all_sent_apart`, but 0 also where one plan is the other one blurred by entropy: the
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
    # points without distances are nowhere apart
    spread = float(b @ columns[few.target].square() @ b)
    return (min(own, other) - both) / max(spread, torch.finfo(b.dtype).tiny)


def with_end(
    search: Search, problem: Problem, ends: tuple[End, End], new: int, *, relaxed: bool = False
) -> Search:
    """List the ends of two solves, the lower first, of which one is ``new`` to a search (0 or 1).

    The other one is the answer so far, for which the first optimum stands. What few points, or
    chains, have found is compared in its proportion to that, as whole solves end at other values.
    What few points have found is listed so too; plans of all points have a value of their own.
    Values of ``relaxed`` plans, of other masses each, tell of no ambiguity.
    """
    first, *others = search.alternatives
    whole = coarse_problem(problem, max(first.plan.shape))
    nothing = whole.problem.rounding()
    before, known = first.value - whole.floor, ends[1 - new].value - whole.floor
    unit = known / before if min(before, known) > nothing else 1.0
    lowest, other = (_listed_as(first, problem, end) for end in ends)
    others = [one for one in others if sent_apart(problem, one, ends[new].plan) > OTHER]
    ended = [other] if sent_apart(problem, lowest, ends[1].plan) > OTHER else []
    scaled = [replace(one, value=whole.floor + unit * (one.value - whole.floor)) for one in others]
    compared, listed = (
        (lowest, *sorted([*them, *ended], key=lambda one: one.value)) for them in (scaled, others)
    )
    few = max(first.plan.shape) < max(problem.shape)
    ambiguity = math.nan if relaxed else ambiguity_of(whole, compared)
    return search._replace(alternatives=compared if few else listed, ambiguity=ambiguity)


def _listed_as(like: Alternative, problem: Problem, end: End) -> Alternative:
    """Describe the plan of a solve by the points of an optimum."""
    rows, weights = end.plan.rows(like.source).to(like.plan), like.plan.sum(1, keepdim=True)
    plan = rows[:, like.target]
    if max(like.plan.shape) < max(problem.shape):
        # each point stands for those next to it
        nearest = problem.target.columns(like.target).argmin(1)
        plan = torch.zeros_like(plan).index_add_(1, nearest, rows)
        plan *= weights / plan.sum(1, keepdim=True)
    plan = plan / plan.sum()
    return replace(like, value=end.value, label=end.label, plan=plan, epsilon=0.0)


def all_sent_apart(problem: CoarseProblem, plans: Tensor) -> Tensor:
    """Return how far plans (k, s, t) send points apart by all distances of where they go, (k, k).

    0 where those are the same, as of nodes that have the same neighbours; 1 for unrelated matches.
    An entry of a table that is no distance says nothing of how far two points are apart.
    """
    table, b = problem.target.table, problem.target.weights
    images = (plans @ (table - b @ table) * (b / problem.source.weights[:, None]).sqrt()).flatten(1)
    spread = b @ (table - b @ table).square() @ b
    return torch.cdist(images, images).square() / (2 * spread).clamp_min(torch.finfo(b.dtype).tiny)


# A coordinate in which matches are compared is left out if its extent, relative to the largest, is
# below this. [L374]
_EXTENT = 0.15
# Share of the spread that a rigid motion may leave unexplained. [L374]
_RIGID = 0.15
# A point goes elsewhere if it is apart by this share of the spread. [L374]
_ELSEWHERE = 0.5
# A turn whose cosine is at most minus this is a half turn; from plus this on it is none. [L374]
_STRAIGHT = 0.97


def related(
    found: tuple[Alternative, ...], source: DistanceProvider, target: DistanceProvider
) -> tuple[Alternative, ...]:
    """Describe how each alternative but the first relates to the first.

    Of images under symmetries one of each description is listed.
    """
    if len(found) < 2:
        return found
    # by NumPy: a GPU takes ten times as long, and many relations are between the same points
    first, told = found[0], [found[0]]
    # coordinates are found from the distances to few points, up to twice as many
    every = max(1, len(first.target) // limits_of(target.device).few_points)
    squares = {
        id(points): _squares(target, first.target[::every], points)
        for points in {id(each.target): each.target for each in found}.values()
    }
    mean, axes = _axes(squares[id(first.target)][::every])
    mass, places = None, None
    for each in found:
        plan = each.plan.cpu().numpy()
        rows = plan.sum(1, keepdims=True)
        there = (mean - squares[id(each.target)]) / 2 @ axes
        moved = plan @ there / np.maximum(rows, np.finfo(plan.dtype).tiny)
        if places is None:
            mass, places = rows / rows.sum(), moved
            continue
        if each.source is not first.source and not same(each.source, first.source):
            moved = moved[_squares(source, each.source, first.source).argmin(1)]
        relation = _relation(places, moved, mass)
        if each.images == 1 or relation not in {one.relation for one in told}:
            told.append(replace(each, relation=relation))
    return tuple(told)


def _squares(side: DistanceProvider, others: Tensor, points: Tensor) -> Any:
    """Read the squared distances of some points to others, (p, o)."""
    table = side.between(points.to(side.device), others.to(side.device))
    return table.cpu().numpy().astype(np.float64) ** 2


def _axes(square: Any) -> tuple[Any, Any]:
    """Find the mean and the axes that turn squared distances to some points into coordinates."""
    mean = square.mean(0)
    gram = -(square - mean - mean[:, None] + mean.mean()) / 2
    found = eigenpairs(gram, max(0, len(gram) - AXES), len(gram) - 1)
    sizes, vectors = (part[..., ::-1] for part in found)
    kept = (sizes > _EXTENT**2 * sizes[0]) & (sizes > 0)
    return mean, vectors[:, kept] / np.sqrt(sizes[kept])


def _relation(first: Any, other: Any, weight: Any) -> str:
    """Describe the motion that takes the places under one match to those under another."""
    first, other = first - (weight * first).sum(0), other - (weight * other).sum(0)
    spread = float((weight * other**2).sum())
    if first.shape[1] == 0 or spread == 0:
        return "another match"
    left, _, right = np.linalg.svd(first.T @ (weight * other))
    turn = left @ right
    apart = ((other - first) ** 2).sum(1)
    elsewhere = float((apart > _ELSEWHERE**2 * spread) @ weight[:, 0])
    if float((weight * (other - first @ turn) ** 2).sum()) > _RIGID * spread:
        return f"another match, which sends {elsewhere:.0%} of the points elsewhere"
    return _name_of(turn, elsewhere)


def _name_of(turn: Any, elsewhere: float) -> str:
    """Name a rigid motion of the coordinates, the longest extent first."""
    size = len(turn)
    trace, mirrored = float(turn.trace()), float(np.linalg.det(turn)) < 0
    if mirrored:
        if size == 1:
            return "the first read backwards"
        along = float(turn[0, 0]) < -_STRAIGHT and trace > size - 2 - (1 - _STRAIGHT) * size
        return "the first mirrored" + (", with its longest extent read backwards" if along else "")
    # a turn in the plane has trace 2 cos, one in space 1 + 2 cos; in one dimension there is none
    cosine = 1.0 if size == 1 else (trace - (size - 2)) / 2
    degrees = 180 if cosine < -_STRAIGHT else round(math.degrees(math.acos(min(cosine, 1))))
    moved = f"{elsewhere:.0%}"
    if cosine > _STRAIGHT and (moved != "0%" or degrees == 0):
        return "almost the first" + (
            f", with {moved} of the points elsewhere" if moved != "0%" else ""
        )
    return f"the first turned by {degrees} degrees"
