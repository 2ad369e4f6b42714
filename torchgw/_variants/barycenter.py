"""Barycenters of metric spaces, by plans and distances in turn, from several starts, by moves."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torchgw._api import solve
from torchgw._boundary.arrays import (
    as_weights,
    check_distances,
    check_each,
    check_list,
    check_points,
    check_shape,
    in_kind,
    make_generator,
    resolve_device,
    without_tensors,
)
from torchgw._boundary.checks import check_count, check_flag, reject_unknown
from torchgw._errors import ConvergenceWarning, InvalidInputError, TorchGWWarning, warn_user
from torchgw._problem.given import Passed
from torchgw._problem.named import DistanceName, ScaleName, refuse_names
from torchgw._problem.problem import stored_matrix
from torchgw._problem.providers import DistanceOptions, build_provider
from torchgw._problem.table import check_options
from torchgw._results.base import Result
from torchgw._results.result import GWResult
from torchgw._tensors.operations import centred
from torchgw._typing import Array, Seed
from torchgw.distances.base import DistanceProvider
from torchgw.distances.factored import FactoredDistance
from torchgw.distances.precomputed import PrecomputedDistance

# Other optima of one space that are followed with all others, the lowest first. [L1415]
_FOLLOWED = 3


class Space(NamedTuple):
    """One of the spaces of a barycenter, with its share."""

    provider: DistanceProvider
    mass: Any  # of its points, as given
    features: Tensor | None  # (n_s, k), float64
    share: float  # its weight in the mean


def solve_between(
    near: Space, far: Space, init: Any, asked: dict[str, Any]
) -> tuple[GWResult, list[warnings.WarningMessage]]:
    """Solve between two spaces; also give what was warned of, to be said with their names."""
    traits = None if near.features is None else (near.features, far.features)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", TorchGWWarning)
        found = solve(
            D_X=near.provider, D_Y=far.provider, a=near.mass, b=far.mass, features=traits,
            init=init, **asked,
        )  # fmt: skip
    return found, said


class Start(NamedTuple):
    """Where a common space begins."""

    distances: DistanceProvider  # of n points
    features: Tensor | None  # (n, k), float64


class Reached(NamedTuple):
    """Where turns of plans and means have ended."""

    aligned: Start  # what the plans were found for
    mean: Start  # the means that they give
    results: tuple[GWResult, ...]
    history: tuple[float, ...]  # weighted mean of the objectives at each turn
    settled: bool

    @property
    def value(self) -> float:
        """Weighted mean of the objectives."""
        return self.history[-1]


@dataclass
class Alternation:
    """Turns of plans to a common space, each by :func:`torchgw.solve`, and of its means."""

    members: list[Space]
    mass: Tensor  # (n,) of the points of the common space
    asked: dict[str, Any]  # of the solves
    max_iter: int
    tol: float
    # whether first plans are searched for briefly, since all are searched for again at the end
    brief: bool = False
    fixed: tuple[bool, bool] = (False, False)  # whether distances and features stay
    # epsilon of each space, which is kept once it was chosen, so that values can be compared
    epsilons: list[float] = field(default_factory=list)
    # what the last search of each space warned of
    told: dict[int, list[warnings.WarningMessage]] = field(default_factory=dict)

    def follow(self, start: Start, begin: Sequence[Any]) -> Reached:
        """Take turns until the value no longer changes; plans ``begin`` there, or with a search."""
        history: list[float] = []
        now, settled, results = start, False, tuple(begin)
        while len(history) < self.max_iter and not settled:
            here = now
            found = tuple(self._align(here, place, item) for place, item in enumerate(results))
            if not self.epsilons:
                self.epsilons = [item.epsilon for item in found]
            value = sum(
                member.share * item.report.objective
                for member, item in zip(self.members, found, strict=True)
            )
            settled = bool(history) and abs(history[-1] - value) <= self.tol * abs(value)
            history.append(value)
            now, results = self._average(here, found), found
        return Reached(here, now, found, tuple(history), settled)

    def improve(self, best: Reached) -> Reached:
        """Move one space at a time to other optima of its plan, while that lowers the value."""
        # All others follow each move. At the end every plan has been searched for, at the common
        # space that it belongs to, and says what the search has found.
        self.brief = False
        since, place = 0, 0
        searches: dict[int, GWResult] = {}
        while since < len(self.members):
            fresh = self._align(best.aligned, place, None)
            searches[place], moved = fresh, None
            for other in self._others(best, place, fresh):
                begin = [*best.results]
                begin[place] = other
                ended = self.follow(best.aligned, begin)
                if ended.value < best.value - self.tol * abs(best.value):
                    moved = ended
                    break
            best, since = (best, since + 1) if moved is None else (moved, 0)
            place = (place + 1) % len(self.members) if moved is None else place
        results = tuple(
            replace(
                item,
                ambiguity=searches[place].ambiguity,
                alternatives=searches[place].alternatives,
                doubt=searches[place].doubt,
            )
            for place, item in enumerate(best.results)
        )
        return best._replace(results=results)

    def warn(self, results: Sequence[GWResult], *, settled: bool, updates: int) -> bool:
        """Warn of what did not converge or is in doubt, by the space; tell if all converged."""
        open_ones = [place for place, item in enumerate(results) if not item.converged]
        for place in open_ones:
            warn_user(f"`spaces[{place}]`: {results[place].status.advice}", ConvergenceWarning)
        if not settled:
            warn_user(
                f"The barycenter still moved after {updates} updates: raise `max_iter`, or loosen "
                "`tol`.",
                ConvergenceWarning,
            )
        for place, said in sorted(self.told.items()):
            for item in said:
                # what did not converge in the search is told of the plans that are returned
                if not issubclass(item.category, ConvergenceWarning):
                    warn_user(f"`spaces[{place}]`: {item.message}", item.category)
        return settled and not open_ones

    def _align(self, common: Start, place: int, begin: Any) -> GWResult:
        """Align the common space with one space, from where it ``begin``s or with a search."""
        asked = self.asked | ({"epsilon": self.epsilons[place]} if self.epsilons else {})
        if begin is None and self.brief:
            asked["search"] = "fast"
        near = Space(common.distances, self.mass, common.features, 1.0)
        found, said = solve_between(near, self.members[place], begin, asked)
        if begin is None:
            self.told[place] = said
        return found

    def _others(self, best: Reached, place: int, fresh: GWResult) -> list[GWResult]:
        """Solve from the optima that a search has found, but for the present plan, best first."""
        now = best.results[place].report.objective
        # few points and all points may order them in other ways
        inits = fresh.alternatives[: _FOLLOWED + 1]
        found = [fresh, *(self._align(best.aligned, place, init) for init in inits)]
        kept: list[GWResult] = []
        for item in sorted(found, key=lambda item: item.report.objective):
            seen = [now, *(each.report.objective for each in kept)]
            value = item.report.objective
            if all(abs(value - each) > self.tol * abs(each) for each in seen):
                kept.append(item)
        return kept[:_FOLLOWED]

    def _average(self, common: Start, results: Sequence[GWResult]) -> Start:
        """Compute the distances and features that are best for these plans."""
        distances, features = common
        if not self.fixed[0]:
            distances = _mean_distances(results, self.members, self.mass)
        if features is not None and not self.fixed[1]:
            means = [
                member.share * result.lazy_plan.barycentric(member.features)
                for result, member in zip(results, self.members, strict=True)
            ]
            features = torch.stack(means).sum(0)
        return Start(distances, features)


def drawn(n: int, space: Space, generator: torch.Generator) -> Start:
    """Draw n points of a space, to start from their distances and features."""
    provider = space.provider
    order = torch.randperm(provider.n, device=provider.device, generator=generator)
    index = order.repeat(-(-n // provider.n))[:n]
    traits = None if space.features is None else space.features[index]
    factors = provider.factors()
    if factors is not None:
        return Start(FactoredDistance(factors.matrix[index], factors.signs), traits)
    table = provider.columns(index)[index]
    return Start(PrecomputedDistance((table + table.T) / 2), traits)


def _mean_distances(
    results: Sequence[GWResult], members: list[Space], mass: Tensor
) -> DistanceProvider:
    """Compute sum_s share_s P_s D_s P_s' / (a a'), in factors if every D_s has them."""
    factors = [member.provider.factors() for member in members]
    scale = torch.where(mass > 0, 1 / mass, 0.0)[:, None]
    if all(item is not None for item in factors):
        parts = [
            (scale * (result.lazy_plan @ item.matrix), member.share * item.signs)
            for result, item, member in zip(results, factors, members, strict=True)
            if item is not None
        ]
        return FactoredDistance(
            torch.cat([matrix for matrix, _ in parts], 1), torch.cat([signs for _, signs in parts])
        )
    unit = torch.eye(len(mass), dtype=torch.float64, device=mass.device)
    total = torch.zeros_like(unit)
    for result, member in zip(results, members, strict=True):
        plan = result.lazy_plan
        total += member.share * (plan @ member.provider.apply(plan.T @ unit))
    total = scale * total * scale.T
    return PrecomputedDistance(((total + total.T) / 2).clamp_min(0))


# Spaces from which a common space starts by default. [L1415]
_STARTS = 4


@reject_unknown
def barycenter(
    spaces: Sequence[Any],
    n: int,
    *,
    weights: Any = None,
    a: Any = None,
    masses: Sequence[Any] | None = None,
    features: Sequence[Any] | None = None,
    alpha: float | None = None,
    distances: DistanceName = "auto",
    scale: ScaleName | None = None,
    epsilon: float | Literal["auto"] = "auto",
    n_init: int | None = None,
    init: Any = None,
    init_features: Any = None,
    fixed_structure: bool = False,
    fixed_features: bool = False,
    max_iter: int = 50,
    tol: float = 1e-4,
    device: Any = None,
    random_state: Seed | None = None,
) -> "BarycenterResult":
    """Find the n points whose distances are nearest to those of several spaces.

    Minimises over distances D and plans P_s (and features F)

        sum_s weights_s (alpha <L(P_s), P_s> + (1 - alpha) <|F - F_s|^2, P_s> + epsilon KL_s)

    by two steps in turn: plans for the present distances, each by :func:`torchgw.solve`, and the
    best distances for these plans, D = sum_s weights_s P_s D_s P_s' / (a a'); from several starts.

    Parameters
    ----------
    spaces : sequence
        Each points of shape (n_s, d_s), a graph, or a DistanceProvider; wrap a matrix as
        ``torchgw.distances.PrecomputedDistance(torch.as_tensor(D))``.
    n : int
        Number of points of the barycenter.
    weights : array-like, shape (s,), optional
        Weight of each space, of sum 1; equal by default.
    a : array-like, shape (n,), optional
        Mass of the points of the barycenter; uniform by default. It stays fixed.
    masses : sequence of array-like or None, optional
        Mass of the points of each space; uniform by default.
    features : sequence of array-like, shapes (n_s, k), optional
        Features of each space, compared by squared Euclidean distance (fused barycenter).
    alpha : float in [0, 1], optional
        Weight of the structure; 1 without features and 0.5 with them.
    distances, scale, epsilon, device
        As in :func:`torchgw.solve`, but for three things. ``scale`` is ``None`` by default, as
        dividing each space by its own maximum would average shapes instead of spaces;
        ``epsilon="auto"`` is chosen in the first iteration and kept; and ``distances="auto"`` is
        all pairs of up to 3,000 points on every device.
    n_init : int, optional
        Starts of the common space, each followed to its end: n points drawn from each space in
        turn, that of largest weight first; by default one from each of up to four spaces. The best
        end is improved: each space is searched for again, and moved to other optima of its plan
        while that lowers the value of all. 1 is a single start without moves.
    init : array-like of shape (n, n), optional
        Distances to start from, in place of points drawn; by default the only start.
    init_features : array-like of shape (n, k), optional
        Features to start from; by default those of the points drawn.
    fixed_structure, fixed_features : bool
        Whether distances stay at ``init``, and features at ``init_features``.
    max_iter : int
        Updates of a start at most.
    tol : float
        Relative change of the value at which to stop.
    random_state : int, torch.Generator, numpy.random.Generator, RandomState or None
        Draws the start.

    Returns
    -------
    BarycenterResult

    Raises
    ------
    InvalidInputError
        For input that cannot be used.

    Warns
    -----
    ConvergenceWarning
        If ``max_iter`` updates were not enough, or a last solve did not converge.
    SearchWarning, AmbiguityWarning
        As those of :func:`torchgw.solve`, with the name of the space.

    Notes
    -----
    The alternation is that of [1]_, with features that of [2]_. Entropy blurs plans, and a mean
    over blurred plans has smaller distances: a small ``epsilon`` keeps them.

    References
    ----------
    .. [1] G. Peyre, M. Cuturi, J. Solomon. Gromov-Wasserstein averaging of kernel and distance
       matrices. ICML 2016.
    .. [2] T. Vayer, L. Chapel, R. Flamary, R. Tavenard, N. Courty. Optimal transport for structured
       data with application on graphs. ICML 2019.

    Examples
    --------
    >>> import numpy as np, torchgw
    >>> circle = [[np.cos(t), np.sin(t)] for t in np.linspace(0, 6, 40)]
    >>> circles = [circle, 2 * np.array(circle)]
    >>> result = torchgw.barycenter(circles, 20, distances="euclidean", random_state=0)
    >>> bool(1.4 < result.D.max() / 2 < 1.6)
    True
    """
    check_count("n", n)
    check_options(max_iter=max_iter, tol=tol, scale=scale, n_init=n_init)
    spaces = check_list("spaces", spaces, "of points, graphs or distance providers")
    if not spaces:
        raise InvalidInputError("`spaces` must have at least one space.")
    if getattr(spaces[0], "ndim", None) == 1:
        raise InvalidInputError(
            "`spaces` must be a list of spaces, each points of shape (n, d) if not a graph or a "
            f"provider; its first item has shape {tuple(spaces[0].shape)}. Pass [X] for one space."
        )
    in_numpy = without_tensors(spaces, weights, a, masses, features, init)
    own = all(isinstance(space, DistanceProvider) for space in spaces)
    refuse_names(distances, {"spaces": own})
    where = resolve_device(device, *spaces)
    generator, seed = make_generator(random_state, where)
    options = DistanceOptions(None, None, scale, "stitch")
    providers = [
        build_provider(Passed(f"spaces[{index}]", space), distances, options, where).to(
            where, torch.float64
        )
        for index, space in enumerate(spaces)
    ]
    shares = as_weights("weights", weights, len(providers), where, "space").tolist()
    mass = as_weights("a", a, n, where, "point of the barycenter")
    count = len(providers)
    given = check_each("masses", masses, count)
    members = list(map(Space, providers, given, features_of_each(features, count, where), shares))
    fixed = fixed_structure, fixed_features
    starts = _starts(n, members, generator, (init, init_features), fixed, n_init)
    asked = {"alpha": alpha, "epsilon": epsilon, "random_state": seed}
    turns = Alternation(members, mass, asked, max_iter, tol, n_init != 1, fixed)
    # no graph is recorded, even if tensors of providers require gradients
    with torch.no_grad():
        ends = [turns.follow(start, [None] * count) for start in starts]
        best = min(ends, key=lambda end: end.value)
        if n_init != 1:
            best = turns.improve(best)
    converged = turns.warn(best.results, settled=best.settled, updates=max_iter)
    found = BarycenterResult(
        *best.mean, mass, best.results, best.history, converged, tuple(end.value for end in ends)
    )
    return found.in_numpy() if in_numpy else found


def features_of_each(features: Any, count: int, device: torch.device) -> list[Tensor | None]:
    """Check the features of some spaces, float64."""
    items = check_each("features", features, count)
    if features is None:
        return items
    return [
        check_points(f"features[{s}]", item).to(device).double() for s, item in enumerate(items)
    ]


def _starts(
    n: int,
    members: list[Space],
    generator: torch.Generator,
    given: tuple[Any, Any],
    fixed: tuple[bool, bool],
    count: int | None,
) -> list[Start]:
    """Choose where to start: what is ``given`` first, then points of each space in turn."""
    order = sorted(members, key=lambda member: -member.share)
    init, init_features = given
    featured = members[0].features is not None
    for name, stays, needed, value in (
        ("structure", fixed[0], "init", init),
        ("features", fixed[1], "init_features", init_features),
    ):
        check_flag(f"fixed_{name}", stays)
        if stays and value is None:
            raise InvalidInputError(
                f"fixed_{name}=True keeps what the barycenter starts from: pass `{needed}`."
            )
    if init_features is not None and not featured:
        raise InvalidInputError("`init_features` are features of the barycenter: pass `features`.")
    if count is None:
        count = min(_STARTS, len(order)) if init is None else 1
    if fixed[0] and (fixed[1] or not featured):
        # there is no other
        count = 1
    starts = [drawn(n, order[k % len(order)], generator) for k in range(count)]
    where = members[0].provider.device
    if init is not None:
        matrix = check_distances("init", init).to(where).double()
        check_shape("init", matrix, (n, n), "the distances of the barycenter to start from")
        own = PrecomputedDistance(matrix)
        starts = [
            start._replace(distances=own) if fixed[0] or k == 0 else start
            for k, start in enumerate(starts)
        ]
    if init_features is not None:
        table = check_points("init_features", init_features).to(where).double()
        width = members[0].features.shape[1] if members[0].features is not None else 0
        check_shape("init_features", table, (n, width), "the features of the barycenter")
        starts = [
            start._replace(features=table) if fixed[1] or k == 0 else start
            for k, start in enumerate(starts)
        ]
    return starts


@dataclass(frozen=True, repr=False, eq=False)
class BarycenterResult(Result):
    """Outcome of :func:`torchgw.barycenter`.

    Attributes
    ----------
    distances : DistanceProvider
        Distances of the n points; ``solve(D_X=...)`` takes them. Where every space has factors
        they have some too, of rank the sum of all ranks, and nothing of size (n, n) is stored.
    features : Tensor or ndarray of shape (n, k), float64, or None
        Features of the n points, if the spaces have some.
    weights : Tensor or ndarray, shape (n,), float64
        Mass of the n points.
    results : tuple of GWResult
        The alignments with each space, of the barycenter before its last update.
    value : float
        Weighted mean of their objectives, ``report.objective``.
    history : tuple of float
        The value at each iteration since the last start or move.
    converged : bool
        Whether the value changed by ``tol`` at most in the last round, and the last alignments
        converged.
    starts : tuple of float
        The value at which each start ended, before the best was improved.
    """

    distances: DistanceProvider
    features: Array | None
    weights: Array
    results: tuple[GWResult, ...]
    history: tuple[float, ...]
    converged: bool
    starts: tuple[float, ...] = ()

    @property
    def value(self) -> float:
        """Weighted mean of the objectives of ``results``."""
        return self.history[-1]

    def _summary(self) -> tuple[str, dict[str, str], str]:
        ended = "converged" if self.converged else "not converged"
        return (
            f"{self.distances.n} points, {len(self.results)} spaces",
            {"value": f"{self.value:.6g}"},
            f"{ended} after {len(self.history)} rounds",
        )

    @property
    def D(self) -> Any:
        """The distances as a matrix, shape (n, n)."""
        return in_kind(self.weights, stored_matrix(self.distances))

    def points(self, dimension: int, *, squared: bool = False) -> Any:
        """Place the points of the barycenter by classical multidimensional scaling.

        Parameters
        ----------
        dimension : int
            Below n.
        squared : bool
            Whether ``distances`` are squares already, as those of ``distances="sqeuclidean"`` are.

        Returns
        -------
        Tensor or ndarray, shape (n, dimension), float64
            Centred coordinates, in order of variance; zero where the distances leave no variance.
        """
        check_count("dimension", dimension)
        table = stored_matrix(self.distances).double()
        if dimension >= len(table):
            raise InvalidInputError(
                f"`dimension` must be below the {len(table)} points; got {dimension}."
            )
        values, vectors = torch.linalg.eigh(-centred(table if squared else table.square()) / 2)
        size = values.flip(0)[:dimension].clamp_min(0).sqrt()
        return in_kind(self.weights, vectors.flip(1)[:, :dimension] * size)
