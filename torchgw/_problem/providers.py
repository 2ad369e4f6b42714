"""From what the user passed to two distance providers, divided by their maximum or their mean."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from torchgw._boundary.arrays import as_weights
from torchgw._boundary.cache import Cache
from torchgw._boundary.checks import both, check_choice, check_count, check_positive, listed
from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw._problem.decide import UNRELATED, Decision, Judge, decide
from torchgw._problem.given import GivenSpace, recognise
from torchgw._problem.linear_term import FeatureMetric
from torchgw._problem.named import NAMED, DistanceName, from_graphs, of_curvature, pair_of_distances
from torchgw._problem.plausible import check_tables_fit, warn_of_far_points, warn_of_one_sign
from torchgw._problem.preparation import KeyedGraph, Preparation
from torchgw._tensors.ranks import Ranks
from torchgw._tensors.threads import small_on_one_thread
from torchgw.distances.base import DistanceProvider, refuse_directed
from torchgw.distances.graph import ConnectPolicy, Neighbourhood, default_n_neighbors
from torchgw.distances.landmark import LandmarkDistance
from torchgw.distances.new_points import Space
from torchgw.distances.nystrom import NystromDistance
from torchgw.distances.points import ANGLES, PointDistance, PointMetric
from torchgw.distances.precomputed import PrecomputedDistance

logger = logging.getLogger(__name__)

# Points per side up to which "auto" computes all geodesic pairs: beyond it takes minutes. [L95]
_ALL_PAIRS_POINTS = 3_000
# Points from which on "auto" tries landmarks first on a CPU, where products of tables take seconds;
# and the error of each side up to which it keeps them: the value of a plan is too high by the sum
# of both. [L95]
_LANDMARK_POINTS = 1_000
_SMALL_ERROR = 0.005
# Points per side up to which "dijkstra" computes all pairs too: a sampled solve asks for nearly
# every row in the end. Larger tables are too large for an exact gradient. [L126, L127]
_ALL_ROWS_POINTS = {"cpu": 1_000, "cuda": 6_000}
# Pairs of points from which on a solve without structure takes minutes on a CPU. [L359]
_MOST_PAIRS = 36_000_000
ScaleName = Literal["auto", "max", "mean"]
# Columns read at once to find the largest distance among some points. [L351]
_COLUMNS = 256
# Distances up to this share of the largest are rounding. [L351]
_NOTHING = 1e-9


@dataclass(frozen=True)
class DistanceOptions:
    """How distances are made from points or graphs."""

    n_neighbors: int | None
    n_landmarks: int | None
    scale: ScaleName | None
    disconnected: ConnectPolicy
    cache: Cache | None = None
    progress: bool = False
    # Whether factors are of use: if so, "auto" is low-rank for many points.
    factors: bool = True
    # Whether the gradient may be exact: if so, "dijkstra" is all pairs for few points.
    exact: bool = True
    # Whether "auto" may take accurate factors where all pairs would fit.
    approximate: bool = False
    # Whether tables of all pairs were asked for by `gradient="dense"`.
    dense: bool = False
    # Curvature of both sides, or a pair with that of each.
    curvature: float | tuple[float, float] | None = None
    # Whether the loss allows given tables with negative entries.
    signed: bool = False
    # Processes that share the preparation.
    ranks: Ranks | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        for value in self.curvatures:
            check_positive("curvature", value, "1 is the unit ball, hyperboloid and sphere")
        for name in ("n_neighbors", "n_landmarks"):
            check_count(name, getattr(self, name), none=True)
        check_choice("scale", self.scale, get_args(ScaleName), none=True)
        check_choice("disconnected", self.disconnected, get_args(ConnectPolicy))

    @property
    def curvatures(self) -> tuple[float, float]:
        """The curvature of each side."""
        pair = both(1.0 if self.curvature is None else self.curvature)
        if len(pair) != 2:
            raise InvalidInputError(
                f"`curvature` must be one number, or a pair of them; got {len(pair)} items."
            )
        return pair[0], pair[1]


class Spaces(NamedTuple):
    """Both sides of a problem, ready to solve."""

    providers: tuple[DistanceProvider, DistanceProvider]
    origins: tuple[Space, Space]  # what each was made from, for new points
    landmarks: dict[str, dict[str, float]]  # count, rank and error of each side that has them
    decision: Decision | None = None  # what "auto" was for points

    def featured(self, features: tuple[Tensor, Tensor], metric: FeatureMetric) -> "Spaces":
        """Add the features of both sides, by which new points are compared too."""
        device = self.providers[0].device
        first, second = (
            space._replace(features=part.to(device), feature_metric=metric)
            for space, part in zip(self.origins, features, strict=True)
        )
        return self._replace(origins=(first, second))


@dataclass
class _Side:
    """One side on its way from what was given to its distances."""

    given: GivenSpace
    spec: Any  # name or provider that `distances` gives for it
    curvature: float
    letter: str  # a or b, the name of its weights
    weights: Any
    is_table: bool  # whether it was given as D_X or D_Y
    name: str = "given"  # name of its distances, if they are computed here
    graph: KeyedGraph | None = None
    shape: Neighbourhood | None = None  # of all points, if it has been looked at

    def in_units(
        self, provider: DistanceProvider, options: DistanceOptions, *, decided: bool
    ) -> tuple[DistanceProvider, Space]:
        """Divide the distances by their scale, and record how new points are measured."""
        # Warn of points far away, which may have `decided` against straight distances.
        given, mass = self.given, None
        if self.weights is not None:
            mass = as_weights(self.letter, self.weights, provider.n, provider.device)
        used = None if mass is None else mass > 0
        flat = self.name not in ANGLES and self.name not in of_curvature()
        if given.points is not None and options.scale in ("auto", "max") and (flat or decided):
            warn_of_far_points(given.name, self.letter, given.points, used, flat=flat)
        if isinstance(given.provider, PrecomputedDistance):
            called = f"D_{given.name}" if self.is_table else given.name
            warn_of_far_points(called, self.letter, given.provider, used)
        computed = given.computed or given.provider is None
        divided, factor = scaled(provider, given.points, options.scale, mass, computed=computed)
        return divided, _origin(self, options, factor).to(provider.device)


def build_providers(
    sides: tuple[Any, Any],
    tables: tuple[Any, Any],
    distances: Any,
    options: DistanceOptions,
    device: torch.device,
    clock: Callable[[str, float], float] = lambda _, since: since,
    labels: tuple[str, str] = ("X", "Y"),
    weights: tuple[Any, Any] = (None, None),
    judge: Judge | None = None,
    *,
    directed: bool = False,
) -> Spaces:
    """Build the providers of both sides, scaled, and say what they were made from."""
    # `labels` are the names of the sides in messages; only X and Y can be given as `D_X` and `D_Y`.
    # Points of zero weight, if `weights` are given, do not count for the scale. `clock(phase,
    # since)` is told the time of each stage: graph, geodesics, landmarks, and distances for the
    # rest. With a `judge` the data decide what "auto" is for points on both sides, unless an option
    # asks for geodesics; otherwise it is geodesics. Costs with a direction are refused unless
    # `directed`.
    started = perf_counter()
    specs = pair_of_distances(distances)
    signed = options.signed and options.scale in (None, "auto")
    pair = [
        _Side(
            recognise(labels[k], sides[k], tables[k], specs[k], signed=signed),
            specs[k], options.curvatures[k], "ab"[k], weights[k], tables[k] is not None,
        )
        for k in range(2)
    ]  # fmt: skip
    ready = [side.given.provider for side in pair if side.given.provider is not None]
    for provider in ready:
        if not directed:
            refuse_directed(provider, "torchgw.solve compares them.")
    if signed:
        warn_of_one_sign(ready)
    largest = max(side.given.n for side in pair)
    decision = _decide(pair, options, device, judge)
    if decision is not None:
        started = clock("decision", started)
        for side, shape in zip(pair, decision.shapes, strict=False):
            side.shape = shape
    for side in pair:
        if decision is not None and decision.chosen != "geodesic":
            side.spec = decision.chosen
        if side.given.provider is None:
            side.name = _resolve(side.spec, largest, device, options)
    _refuse_unused(pair, options)
    stored = pair[0].name == "precomputed", pair[1].name == "precomputed"
    check_tables_fit((pair[0].given.n, pair[1].given.n), stored, device, dense=options.dense)
    stages = Preparation(
        device, clock, options.cache, options.progress, options.n_landmarks, options.ranks
    )
    connected = [side for side in pair if side.name in from_graphs()]
    makers = [partial(_graph, side, options, stages) for side in connected]
    # on a GPU finding all neighbours takes less time than the stages after it, and is not shared
    graphs = stages.divide(makers, together=device.type == "cpu")
    for side, graph in zip(connected, graphs, strict=True):
        side.graph = graph
    automatic = all((side.spec, side.name) == ("auto", "precomputed") for side in pair)
    found: list[LandmarkDistance] = []
    if automatic and options.approximate and device.type == "cpu" and largest >= _LANDMARK_POINTS:
        found = _accurate_landmarks(pair, stages)
    providers = [provider.to(device, provider.dtype) for provider in found or _make(pair, stages)]
    logger.info("distances: %s for X, %s for Y", *(side.name for side in pair))
    made = [
        side.in_units(provider, options, decided=decision is not None)
        for provider, side in zip(providers, pair, strict=True)
    ]
    clock("distances", started + stages.seconds)
    landmarks = {
        side.given.name: {"count": len(one.landmarks), "rank": one.rank, "error": one.error}
        for side, one in zip(pair, providers, strict=True)
        if isinstance(one, NystromDistance)
    }
    (source, first), (target, second) = made
    return Spaces((source, target), (first, second), landmarks, decision)


def build_provider(
    label: str,
    space: Any,
    distances: Any,
    options: DistanceOptions,
    device: torch.device,
    *,
    table: Any = None,
    weights: Any = None,
) -> DistanceProvider:
    """Build the provider of one space, as a side of a problem whose other side is one point."""
    point = PrecomputedDistance.unchecked(torch.zeros(1, 1, dtype=torch.float64, device="cpu"))
    sides = build_providers(
        (space, None), (table, point), distances, options, device,
        labels=(label, "Y"), weights=(weights, None),
    )  # fmt: skip
    return sides.providers[0]


def _decide(
    pair: list[_Side], options: DistanceOptions, device: torch.device, judge: Judge | None
) -> Decision | None:
    """Let the data decide what "auto" is, where no option asks for geodesics."""
    points = [
        side.given.points for side in pair if side.given.points is not None and side.spec == "auto"
    ]
    asked = options.n_neighbors is not None or options.n_landmarks is not None
    if judge is None or asked or len(points) < 2:
        return None
    with small_on_one_thread(1, 1, device):
        decision = decide((points[0], points[1]), judge, device)
    tried, pairs = decision.agreement, len(points[0]) * len(points[1])
    long = decision.chosen != "geodesic" and device.type == "cpu" and pairs > _MOST_PAIRS
    if long and max(tried.values()) < UNRELATED:
        shown = ", ".join(f"{name} {value:.2f}" for name, value in tried.items())
        raise UnsupportedError(
            f"A few points of X and Y agree in no way that was tried ({shown}; 1 is a match), and "
            f"{len(points[0])} x {len(points[1])} points without structure take many minutes on a "
            "CPU. Try some thousand points, `solve_low_rank` or a GPU; or pass "
            "distances='sqeuclidean' to solve nonetheless."
        )
    logger.info("distances='auto' is %s: %s", decision.chosen, decision.why)
    return decision


def _make(pair: list[_Side], stages: Preparation) -> list[DistanceProvider]:
    """Make the providers of both sides, those of one name together."""
    given = [side.given.provider for side in pair]
    made = {place: provider for place, provider in enumerate(given) if provider is not None}
    for name in dict.fromkeys(side.name for side in pair if side.name != "given"):
        places = [place for place, side in enumerate(pair) if side.name == name]
        entry, sources = NAMED[name], list[Any]()
        for side in (pair[place] for place in places):
            source = side.graph if entry.graph else side.given.points
            sources.append((source, side.curvature) if entry.curved else source)
        made |= zip(places, entry.make(sources, stages), strict=True)
    return [made[place] for place in range(len(pair))]


def _origin(side: _Side, options: DistanceOptions, scale: float) -> Space:
    """Record how new points of a side are measured."""
    curved = side.name in of_curvature()
    metric: Any = side.name if curved or side.name in get_args(PointMetric) else None
    # other names compute distances from points, but cannot compute those of new points
    points = None if metric is None and side.graph is None else side.given.points
    n_neighbors = options.n_neighbors or max(1, default_n_neighbors(side.given.n))
    geodesics = None if side.graph is None else side.graph.geodesics
    space = Space(points, metric, geodesics, n_neighbors, scale)
    return space._replace(curvature=float(side.curvature)) if curved else space


def _resolve(
    spec: DistanceName, largest: int, device: torch.device, options: DistanceOptions
) -> Any:
    """Choose what "auto" and "dijkstra" mean for problems of this size."""
    if spec == "dijkstra" and options.exact and largest <= _ALL_ROWS_POINTS.get(device.type, 0):
        return "precomputed"
    if spec != "auto":
        return spec
    if largest <= _ALL_PAIRS_POINTS and options.n_landmarks is None:
        return "precomputed"
    return "landmark" if options.factors or options.n_landmarks is not None else "dijkstra"


def _accurate_landmarks(pair: list[_Side], stages: Preparation) -> list[LandmarkDistance]:
    """Make landmark factors of both sides; none if those of a side are not accurate enough."""
    found: list[LandmarkDistance] = []
    for side in pair:
        assert side.graph is not None
        found += stages.landmarks([side.graph])
        if found[-1].error > _SMALL_ERROR:
            return []
    for side in pair:
        side.name = "landmark"
    return found


def _refuse_unused(pair: list[_Side], options: DistanceOptions) -> None:
    """Refuse an option that neither side would use."""
    names = {side.name for side in pair}
    if options.n_landmarks is not None and not {"landmark", *of_curvature()} & names:
        raise InvalidInputError(
            "`n_landmarks` is used by distances='landmark' and by those of curved spaces only; "
            "drop it, or pass distances='landmark'."
        )
    if options.curvature is not None and not {*of_curvature()} & names:
        raise InvalidInputError(
            f"`curvature` is that of distances={listed(of_curvature())}; drop it, or pass one of "
            "these. A provider has a curvature of its own."
        )
    neighbours = any(side.name in from_graphs() and side.given.points is not None for side in pair)
    if options.n_neighbors is not None and not neighbours:
        raise InvalidInputError(
            "`n_neighbors` is used for geodesics on the neighbour graph of points only; drop it, "
            f"or pass points with distances={listed(from_graphs())}."
        )


def _graph(
    side: _Side, options: DistanceOptions, stages: Preparation, ranks: Ranks | None
) -> KeyedGraph:
    """Make the connected graph of one side, by ``ranks`` together."""
    item = side.given
    if item.points is None:
        return stages.given_graph(item.name, item.graph, options.disconnected)
    count = options.n_neighbors
    if count is not None and count >= item.n and item.n > 1:
        raise InvalidInputError(
            f"`n_neighbors` must be below the number of points; got {count} for the {item.n} "
            f"points of {item.name}."
        )
    return stages.neighbour_graph(item.points, count, options.disconnected, ranks, side.shape)


def scaled(
    provider: DistanceProvider,
    points: Tensor | None,
    scale: ScaleName | None,
    weights: Tensor | None,
    *,
    computed: bool,
) -> tuple[DistanceProvider, float]:
    """Divide distances by their maximum or mean; also return what they were multiplied by."""
    if weights is not None and isinstance(provider, PointDistance):
        provider = provider.centred_on(weights)
    if scale is None or (scale == "auto" and not computed):
        return provider, 1.0
    used = torch.ones(provider.n, dtype=torch.bool, device=provider.device)
    if weights is not None:
        used = weights > 0
    if scale == "mean":
        size = provider.mean(used.to(provider.dtype) / used.sum())
        if isinstance(provider, PointDistance):
            # the distances of identical points are rounding of the factors, as often below zero as
            # above
            size = max(0.0, min(size, provider.maximum()))
    else:
        every = weights is None or bool(used.all())
        size = provider.maximum() if every else _maximum(provider, points, used)
        if not every:
            # a distance of zero, of which factors leave rounding, is no unit
            largest = provider.maximum()
            size = size if size > _NOTHING * largest else largest
    if size == 0:
        # A single point, or identical points: nothing to scale.
        return provider, 1.0
    if isinstance(provider, PointDistance) and points is not None and provider.metric not in ANGLES:
        # Squares of large coordinates would overflow in float32 before a factor is applied.
        unit = size if provider.metric == "euclidean" else math.sqrt(size)
        made = PointDistance((points / unit).to(provider.device), provider.metric)
        return made if weights is None else made.centred_on(weights), 1 / size
    return provider.scaled(1 / size), 1 / size


def _maximum(provider: DistanceProvider, points: Tensor | None, used: Tensor) -> float:
    """Find the largest distance among the points that are used, if not all are."""
    if isinstance(provider, PointDistance) and points is not None:
        return PointDistance(points[used.to(points.device)], provider.metric).maximum()
    index = used.nonzero()[:, 0]
    return max(float(provider.columns(block)[index].max()) for block in index.split(_COLUMNS))
