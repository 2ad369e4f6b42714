"""Several spaces at once: all pairs, and then plans that agree with each other."""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import scipy
import torch
from torch import Tensor

from torchgw._boundary.archive import read_archive
from torchgw._boundary.arrays import (
    as_weights,
    check_each,
    check_list,
    check_shape,
    make_generator,
    resolve_device,
    to_tensor,
    without_tensors,
)
from torchgw._boundary.cache import content_key
from torchgw._boundary.checks import check_choice, check_within, first_of, reject_unknown
from torchgw._errors import ConvergenceWarning, InvalidInputError, TorchGWWarning, warn_user
from torchgw._many.solve_many import solve_many
from torchgw._plans.contract import Plan
from torchgw._problem.given import Passed
from torchgw._problem.limits import limits_of
from torchgw._problem.named import DistanceName, ScaleName, refuse_names
from torchgw._problem.problem import check_alpha, stored_matrix
from torchgw._problem.providers import DistanceOptions, build_space
from torchgw._problem.table import check_options
from torchgw._results.base import load
from torchgw._results.result import GWResult
from torchgw._tensors.operations import at_even_steps
from torchgw._typing import Seed
from torchgw._variants.barycenter import (
    Alternation,
    BarycenterResult,
    Reached,
    Space,
    Start,
    features_of_each,
    solve_between,
)
from torchgw._variants.several import (
    AllResult,
    SeveralKind,
    agreeing,
    belonging,
    cycle_error,
    file_of,
    partners,
)
from torchgw.distances.points import Space as Origin

# Small pairs that are solved in one call; finished calls are kept. A choice. [L1416]
_TOGETHER = 64
# Turns of the common space at most. [L1416]
_TURNS = 50


@reject_unknown
def solve_all(
    Xs: Any = None,
    *,
    D: Any = None,
    kind: SeveralKind = "full",
    reference: int | None = None,
    masses: Sequence[Any] | None = None,
    weights: Any = None,
    features: Sequence[Any] | None = None,
    alpha: float | None = None,
    distances: DistanceName = "auto",
    n_neighbors: int | None = None,
    scale: ScaleName | None = "auto",
    epsilon: float | Literal["auto"] = "auto",
    tol: float = 1e-4,
    resume: str | os.PathLike[str] | None = None,
    device: Any = None,
    random_state: Seed | None = None,
) -> AllResult:
    """Match several spaces with each other, so that their plans agree.

    All pairs are solved. Then a common space is found: from each space the plans of its pairs lead
    to all others, and distances and plans are improved in turn as in :func:`torchgw.barycenter`,
    which see for the objective; of the ends the lowest one counts. Every pair is
    also solved from its matching through the common space, and takes that plan if its objective is
    lower; where any has, the common space is found again from the new plans.

    ``result[i, j]`` are the own plans of the pairs if these close every cycle. Otherwise they
    contradict each other, and it is the plan through the common space, where all cycles close.

    Parameters
    ----------
    Xs : sequence of k spaces
        Each points of shape (n_s, d_s), a graph, or a DistanceProvider.
    D : sequence of array-like, shapes (n_s, n_s), optional
        Distance matrices, in place of ``Xs``.
    kind : {"full", "star", "chain"}
        Which pairs are solved: all; those with ``reference``; or each space with the next one.
    reference : int, optional
        The space that the common one starts from, and the centre of a star: by default each space
        in turn, and the first one for a star.
    masses : sequence of array-like or None, optional
        Mass of the points of each space; uniform by default.
    weights : array-like, shape (k, k), optional
        Weight of each pair, symmetric; equal by default. The weight of a space in the common one
        is its share of the sum.
    features : sequence of array-like, shapes (n_s, c), optional
        Features of the points of each space, whose squared distances are the linear cost.
    alpha : float in [0, 1], optional
        Weight of the structure; 1 without features and 0.5 with them.
    distances, n_neighbors, scale, epsilon, device
        As in :func:`torchgw.solve`, but that ``distances="auto"`` does not compare the sides: it is
        geodesic for points.
    tol : float
        Relative change of the value at which the common space has converged, and relative fall
        of the objective for which a pair changes its plan.
    resume : path, optional
        Folder in which the results of pairs are kept, a file for each; a call with the same spaces
        and options goes on from them. The result then reads them from there when they are asked
        for, so that memory is that of the spaces, the common space and a pair.
    random_state : int, torch.Generator, numpy.random.Generator, RandomState or None
        Seed of the solves.

    Returns
    -------
    AllResult

    Raises
    ------
    InvalidInputError, InvalidTypeError
        For input that cannot be used, and for a ``resume`` folder of other spaces or options.

    Warns
    -----
    ConvergenceWarning, SearchWarning, AmbiguityWarning
        As those of :func:`torchgw.solve`, once for all pairs, with their names.

    Examples
    --------
    >>> import numpy as np, torchgw
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(12, 3))
    >>> Xs = [X + 0.01 * rng.normal(size=X.shape) for _ in range(3)]
    >>> result = torchgw.solve_all(Xs, distances="euclidean", random_state=0)
    >>> result.matching(0, 2).tolist() == list(range(12))
    True
    """
    check_choice("kind", kind, get_args(SeveralKind))
    check_options(tol=tol, scale=scale, epsilon=epsilon, n_neighbors=n_neighbors)
    if (Xs is None) == (D is None):
        raise InvalidInputError("Pass either `Xs`, the spaces, or `D`, their distance matrices.")
    name, given = ("Xs", Xs) if D is None else ("D", D)
    items = check_list(name, given, "of spaces")
    count = len(items)
    if count < 2:
        raise InvalidInputError(f"`{name}` must have at least two spaces; got {count}.")
    refuse_names(distances, {name: D is not None})
    where = resolve_device(device, *items)
    _, seed = make_generator(random_state, where)
    options = DistanceOptions(n_neighbors, None, scale, "stitch", signed=True)
    built = [
        build_space(
            Passed(f"{name}[{s}]", *((item, None) if D is None else (None, item))),
            distances, options, where,
        )
        for s, item in enumerate(items)
    ]  # fmt: skip
    providers = [provider.to(where, torch.float64) for provider, _ in built]
    origins = [origin for _, origin in built]
    held = check_each("masses", masses, count)
    traits = features_of_each(features, count, where)
    mass = [
        as_weights("a", item, provider.n, where, f"point of {name}[{s}]")
        for s, (provider, item) in enumerate(zip(providers, held, strict=True))
    ]
    importance = _importance(weights, count).to(where)
    shares = (importance.sum(1) / importance.sum()).tolist()
    spaces = list(map(Space, providers, mass, traits, shares))
    if reference is not None:
        check_within("reference", reference, 0, count - 1)
    centres = list(range(count)) if reference is None else [reference]
    check_alpha(alpha, fused=features is not None)
    asked = {"alpha": alpha, "epsilon": epsilon, "random_state": seed}
    pairs = _pairs(kind, count, centres[0])
    if kind == "star":
        centres = centres[:1]
    folder = None if resume is None else Path(resume)
    solved = _Solved(spaces, origins, asked, folder, where)
    # no graph is recorded, even if tensors of providers require gradients
    with torch.no_grad():
        solved.solve(pairs)
        best, centre, through = _synchronise(solved, pairs, centres, tol)
    solved.warn()
    if not best.settled:
        warn_user(
            f"The common space still moved after {_TURNS} turns: loosen `tol`.", ConvergenceWarning
        )
    settled = best.settled and all(item.converged for item in best.results)
    aligned = tuple(
        measured(item, None, origin) for item, origin in zip(best.results, origins, strict=True)
    )
    common = BarycenterResult(*best.mean, mass[centre], aligned, best.history, settled)
    found = AllResult(
        common,
        kind,
        torch.tensor(pairs, device=where),
        tuple(map(solved.get, pairs)) if folder is None else (),
        "" if folder is None else str(folder),
        torch.tensor(
            [solved.objectives[pair] for pair in pairs], dtype=torch.float64, device=where
        ),
        torch.tensor(through, dtype=torch.float64, device=where),
        importance,
        cycle_error(partners(solved.plan, pairs), count),
        agreeing([item.lazy_plan for item in best.results], solved.plan, pairs, importance),
    )
    return found.in_numpy() if without_tensors(*items, masses, weights, features) else found


def _importance(weights: Any, count: int) -> Tensor:
    """Read the weights of pairs, (k, k) float64 with a diagonal of zeros."""
    if weights is None:
        found = torch.ones(count, count, dtype=torch.float64, device="cpu")
    else:
        found = to_tensor("weights", weights).detach().cpu().double()
        check_shape("weights", found, (count, count), "one weight for each pair of spaces")
        if not bool((found >= 0).all()) or not torch.equal(found, found.T):
            raise InvalidInputError("`weights` must be non-negative and symmetric.")
    found = found - found.diag().diag()
    if bool((found.sum(1) == 0).any()):
        raise InvalidInputError("`weights` must leave each space a pair of positive weight.")
    return found


def _pairs(kind: SeveralKind, count: int, centre: int) -> list[tuple[int, int]]:
    """List the pairs to solve."""
    if kind == "full":
        return list(combinations(range(count), 2))
    if kind == "chain":
        return [(i, i + 1) for i in range(count - 1)]
    return [(min(centre, s), max(centre, s)) for s in range(count) if s != centre]


@dataclass
class _Solved:
    """Pairs that have been solved: in memory, or as files."""

    spaces: list[Space]
    origins: list[Origin]
    asked: dict[str, Any]
    folder: Path | None
    device: torch.device
    objectives: dict[tuple[int, int], float] = field(default_factory=dict)
    memory: dict[tuple[int, int], GWResult] = field(default_factory=dict)
    told: dict[tuple[int, int], list[warnings.WarningMessage]] = field(default_factory=dict)
    key: str = ""

    def solve(self, pairs: list[tuple[int, int]]) -> None:
        """Solve pairs that no file has: small ones together, the others one by one."""
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.key = self._content()
        left = [pair for pair in pairs if not self._found(pair)]
        most = limits_of(self.device).tiny
        sizes = [space.provider.n for space in self.spaces]
        small = [(i, j) for i, j in left if sizes[i] * sizes[j] <= most]
        for begin in range(0, len(small), _TOGETHER):
            self._solve_small(small[begin : begin + _TOGETHER])
        for pair in left:
            if pair not in self.objectives:
                self.keep(pair, self.once(pair, None))

    def once(self, pair: tuple[int, int], init: Any) -> GWResult:
        """Solve a pair, from a matching or with a search."""
        near, far = (self.spaces[side] for side in pair)
        found, said = solve_between(near, far, init, self.asked)
        if init is None:
            self.told[pair] = said
        return measured(found, *(self.origins[side] for side in pair))

    def keep(self, pair: tuple[int, int], found: GWResult) -> None:
        """Keep the result of a pair, in place of an earlier one."""
        self.objectives[pair] = found.report.objective
        if self.folder is None:
            self.memory[pair] = found
        else:
            found.save(file_of(str(self.folder), *pair), extra={"several": np.array(self.key)})

    def get(self, pair: tuple[int, int]) -> GWResult:
        """Give the result of a pair."""
        if self.folder is None:
            return self.memory[pair]
        return load(file_of(str(self.folder), *pair), device=self.device)

    def plan(self, pair: tuple[int, int]) -> Plan:
        """Give the plan of a pair."""
        return self.get(pair).lazy_plan

    def towards(self, centre: int, side: int, pairs: list[tuple[int, int]]) -> Any:
        """Find where plans from a space begin: the plan of the pair, or a matching along pairs."""
        if (centre, side) in self.objectives:
            return self.plan((centre, side))
        if (side, centre) in self.objectives:
            return self.plan((side, centre)).T
        steps = _path(centre, side, pairs)
        place = torch.arange(self.spaces[centre].provider.n, device=self.device)
        for i, j in zip(steps, steps[1:], strict=False):
            plan: Plan = self.towards(i, j, pairs)
            place = to_tensor("plan", plan.argmax())[place]
        return place

    def warn(self) -> None:
        """Warn of all pairs together, once of each kind of warning."""
        kinds: dict[type[Warning], dict[tuple[int, int], str]] = {}
        for pair, said in self.told.items():
            for item in said:
                kinds.setdefault(item.category, {})[pair] = str(item.message)
        for category, texts in kinds.items():
            warn_user(f"{next(iter(texts.values()))} Of pairs {first_of(list(texts))}.", category)

    def _solve_small(self, pairs: list[tuple[int, int]]) -> None:
        """Solve small pairs in one call."""
        sides = [[self.spaces[pair[side]] for pair in pairs] for side in (0, 1)]
        tables = [[stored_matrix(space.provider) for space in side] for side in sides]
        weights = [[space.mass for space in side] for side in sides]
        fused = sides[0][0].features is not None if sides[0] else False
        traits = tuple([space.features for space in side] for side in sides)
        with warnings.catch_warnings(record=True):
            # each result says what was in doubt
            warnings.simplefilter("always", TorchGWWarning)
            batch = solve_many(
                D_X=tables[0], D_Y=tables[1], a=weights[0], b=weights[1],
                features=(traits[0], traits[1]) if fused else None, alpha=self.asked["alpha"],
                epsilon=self.asked["epsilon"],
            )  # fmt: skip
        for place, pair in enumerate(pairs):
            init = batch.plan(place)
            same = self.asked | {"epsilon": float(batch.epsilon[place])}
            self.keep(pair, replace(self, asked=same, folder=None).once(pair, init / init.sum()))

    def _content(self) -> str:
        """Name the spaces and options."""
        parts: list[Any] = []
        for space in self.spaces:
            some = at_even_steps(space.provider.n, 32, self.device)
            parts += [space.provider.columns(some), space.mass, space.features]
        return content_key("several", *parts, tuple(sorted(self.asked.items(), key=str)))

    def _found(self, pair: tuple[int, int]) -> bool:
        """Tell whether a pair has a file, of these spaces and options."""
        if self.folder is None or not Path(file_of(str(self.folder), *pair)).exists():
            return False
        path = file_of(str(self.folder), *pair)
        if str(read_archive(path)[1].get("several")) != self.key:
            raise InvalidInputError(
                f"{path}: belongs to other spaces or options. Pass another `resume`, or remove it."
            )
        self.objectives[pair] = self.get(pair).report.objective
        return True


def measured(result: GWResult, near: Origin | None, far: Origin) -> GWResult:
    """Let a result measure new points as its spaces were, which it knows as providers."""
    assert result.extension is not None
    known = result.extension.spaces
    source, target = (
        own if origin is None
        else origin._replace(features=own.features, feature_metric=own.feature_metric)
        for own, origin in zip(known, (near, far), strict=True)
    )  # fmt: skip
    return replace(result, extension=replace(result.extension, spaces=(source, target)))


def _path(first: int, last: int, pairs: list[tuple[int, int]]) -> list[int]:
    """Find the shortest way from one space to another over pairs."""
    joined = np.zeros((1 + max(map(max, pairs)),) * 2)
    joined[tuple(zip(*pairs, strict=True))] = 1
    _, before = scipy.sparse.csgraph.breadth_first_order(joined, last, directed=False)
    way = [first]
    while way[-1] != last:
        way.append(int(before[way[-1]]))
    return way


def _synchronise(
    solved: _Solved, pairs: list[tuple[int, int]], centres: list[int], tol: float
) -> tuple[Reached, int, list[float]]:
    """Find the common space, and pairs that cost less from its matchings, until none is left."""
    spaces = solved.spaces
    while True:
        ends: list[tuple[Reached, int]] = []
        epsilons: list[float] = []
        for centre in centres:
            turns = Alternation(
                spaces, spaces[centre].mass, solved.asked, _TURNS, tol, epsilons=epsilons
            )
            own = torch.arange(spaces[centre].provider.n, device=solved.device)
            begin = [
                own if side == centre else solved.towards(centre, side, pairs)
                for side in range(len(spaces))
            ]
            start = Start(spaces[centre].provider, spaces[centre].features)
            ends.append((turns.follow(start, begin), centre))
            epsilons = turns.epsilons
        best, centre = min(ends, key=lambda end: end[0].value)
        through, lower = [], False
        groups = [belonging(item.lazy_plan) for item in best.results]
        for pair in pairs:
            found = solved.once(pair, _matched(*(groups[side] for side in pair)))
            through.append(found.report.objective)
            before = solved.objectives[pair]
            if found.report.objective < before - tol * abs(before):
                solved.keep(pair, found)
                lower = True
        if not lower:
            return best, centre, through


def _matched(near: Tensor, far: Tensor) -> Tensor:
    """Match points that belong to the same point of a common space, (n,) int64, -1 for none."""
    most = int(torch.cat([near, far]).max()) + 1
    holder = torch.full((most + 1,), -1, dtype=torch.int64, device=near.device)
    holder[far] = torch.arange(len(far), device=far.device)
    holder[most] = -1
    return holder[torch.where(near < 0, most, near)]
