"""What a search has found: optima, and how they stand to each other."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torchgw._boundary.arrays import to_tensor
from torchgw._plans.given import PairPlan
from torchgw._problem.problem import Problem
from torchgw._search.chain import Trial
from torchgw._search.coarse import Coarsened, CoarseProblem
from torchgw._search.starts import GUESS_EPSILON
from torchgw._typing import Potentials

SearchName = Literal["auto", "fast", "thorough"]

# Distance (CoarseProblem.distances) above which two plans are different optima. [L280]
DISTINCT = 0.05
# Share of the mean entry of a row below which an entry of a coarse plan is not pickled. [L378]
_PICKLED = 1e-4
# Values of less than this share of the natural scale of the cost are rounding of zero. [L1322]
_EXACT = 1e-12


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
    ended: bool = False  # whether the optima are those at which whole solves have ended
    settled: bool = False  # whether all plans, and the product plan, were followed to their ends
    few: "Search | None" = None  # that of few points, if it left open which optimum is the best
    match: PairPlan | None = None  # of distances alone, where few points leave open which is best


def is_whole(problem: Problem, found: Search) -> bool:
    """Tell whether a search was one on all points."""
    whole = problem.source.n, problem.target.n
    return any(item.plan.shape == whole for item in found.alternatives[:1])


def among_all(found: Alternative, whole: CoarseProblem) -> tuple[Tensor, Tensor | None]:
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
    # two exact matches are as good, whatever rounding has left of either
    least = _EXACT * coarse.scale
    best, second = (max(least, one.value - coarse.floor) for one in found[:2])
    return min(1.0, best / second) if second > 0 else 1.0
