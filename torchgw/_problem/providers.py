"""From what the user passed to two distance providers, divided by their maximum or their mean."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from torchgw._boundary.arrays import as_weights
from torchgw._boundary.cache import Cache
from torchgw._boundary.checks import both, listed
from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw._problem import named
from torchgw._problem.decide import UNRELATED, Decision, Judge, decide
from torchgw._problem.given import (
    GivenSpace,
    Passed,
    check_tables_fit,
    common_unit,
    recognise,
    warn_of_far_points,
    warn_of_two_kinds,
    warn_of_two_units,
    warn_of_unlike_edges,
)
from torchgw._problem.limits import limits_of
from torchgw._problem.problem import FeatureMetric
from torchgw._tensors.machine import small_on_one_thread
from torchgw._tensors.ranks import Ranks
from torchgw.distances.base import DistanceProvider, refuse_directed
from torchgw.distances.geodesics import Geodesics
from torchgw.distances.graph import ConnectPolicy, Neighbourhood, default_n_neighbors
from torchgw.distances.landmark import LandmarkDistance, NystromDistance
from torchgw.distances.points import ANGLES, PointMetric, Space
from torchgw.distances.precomputed import PrecomputedDistance
from torchgw.distances.surface import Surface

logger = logging.getLogger(__name__)

# Error of each side up to which landmarks are kept: the value of a plan is too high by the sum of
# both. [L95]
_SMALL_ERROR = 0.005


@dataclass(frozen=True)
class DistanceOptions:
    """How distances are made from points or graphs; options of the call, which are checked."""

    n_neighbors: int | None
    n_landmarks: int | None
    scale: named.ScaleName | float | None  # a number is the unit of both sides
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
    # Whether some points may have no partner.
    relaxed: bool = False
    # Processes that share the preparation.
    ranks: Ranks | None = None


class Spaces(NamedTuple):
    """Both sides of a problem, ready to solve."""

    providers: tuple[DistanceProvider, DistanceProvider]
    origins: tuple[Space, Space]  # what each was made from, for new points
    landmarks: dict[str, dict[str, float]]  # count, rank and error of each side that has them
    decision: Decision | None = None  # what "auto" was for points

    @property
    def graphs(self) -> tuple[Geodesics | None, Geodesics | None]:
        """Graphs that were given and whose paths are compared; ``None`` for other sides."""
        first, second = self.origins
        return first.given_graph, second.given_graph

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

    passed: Passed
    given: GivenSpace
    spec: Any  # name or provider that `distances` gives for it
    curvature: float
    letter: str  # a or b, the name of its weights
    name: str = "given"  # name of its distances, if they are computed here
    graph: named.KeyedGraph | None = None
    shape: Neighbourhood | None = None  # of all points, if it has been looked at

    def in_units(
        self, provider: DistanceProvider, options: DistanceOptions, *, decided: bool
    ) -> tuple[DistanceProvider, Space]:
        """Divide the distances by their scale, and record how new points are measured."""
        # Warn of points far away, which may have `decided` against straight distances.
        given, mass = self.given, None
        if self.passed.weights is not None:
            mass = as_weights(self.letter, self.passed.weights, provider.n, provider.device)
        used = None if mass is None else mass > 0
        flat = self.name not in ANGLES and self.name not in named.of_curvature()
        if given.points is not None and options.scale in ("auto", "max") and (flat or decided):
            warn_of_far_points(given.name, self.letter, given.points, used, flat=flat)
        if isinstance(given.provider, PrecomputedDistance):
            called = given.name if self.passed.table is None else f"D_{given.name}"
            warn_of_far_points(called, self.letter, given.provider, used)
        computed = given.computed or given.provider is None
        divided, factor = named.scaled(
            provider, given.points, options.scale, mass, computed=computed
        )
        return divided, _origin(self, options, factor).to(provider.device)


def build_providers(
    sides: tuple[Passed, Passed],
    distances: Any,
    options: DistanceOptions,
    device: torch.device,
    clock: Callable[[str, float], float] = lambda _, since: since,
    judge: Judge | None = None,
    *,
    directed: bool = False,
) -> Spaces:
    """Build the providers of both sides, scaled, and say what they were made from."""
    # Points of zero weight, if weights are passed, do not count for the scale. `clock(phase,
    # since)` is told the time of each stage: graph, geodesics, landmarks, and distances for the
    # rest. With a `judge` the data decide what "auto" is for points on both sides, unless an option
    # asks for geodesics; otherwise it is geodesics. Costs with a direction are refused unless
    # `directed`.
    started = perf_counter()
    pair = _recognised(sides, distances, options, directed=directed)
    decision = _decide(pair, options, device, judge)
    if decision is not None:
        started = clock("decision", started)
    _name(pair, decision, options, device)
    stages = named.Preparation(
        device, clock, options.cache, options.progress, options.n_landmarks, options.ranks
    )
    _connect(pair, options, stages)
    providers = _make(pair, options, stages)
    logger.info("distances: %s for X, %s for Y", *(side.name for side in pair))
    made = [
        side.in_units(provider, options, decided=decision is not None)
        for provider, side in zip(providers, pair, strict=True)
    ]
    shared = options.relaxed and options.scale == "auto"
    unit = common_unit(made[0][1], made[1][1]) if shared else None
    if unit is not None:
        options = replace(options, scale=unit)
        made = [
            side.in_units(provider, options, decided=False)
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
    passed: Passed, distances: Any, options: DistanceOptions, device: torch.device
) -> DistanceProvider:
    """Build the provider of one space, as a side of a problem whose other side is one point."""
    return build_space(passed, distances, options, device)[0]


def build_space(
    passed: Passed, distances: Any, options: DistanceOptions, device: torch.device
) -> tuple[DistanceProvider, Space]:
    """Build the provider of one space, and what it was made from."""
    spec = named.pair_of_distances(distances)[0]
    if passed.table is not None or isinstance(passed.space, DistanceProvider):
        # the name is meant for other spaces of a list
        spec = "auto" if isinstance(spec, str) else spec
    point = PrecomputedDistance.unchecked(torch.zeros(1, 1, dtype=torch.float64, device="cpu"))
    spaces = build_providers((passed, Passed("Y", point)), (spec, "auto"), options, device)
    return spaces.providers[0], spaces.origins[0]


def _recognised(
    sides: tuple[Passed, Passed], distances: Any, options: DistanceOptions, *, directed: bool
) -> list[_Side]:
    """Recognise what was passed of both sides."""
    specs = named.pair_of_distances(distances)
    curvatures = both(1.0 if options.curvature is None else options.curvature)
    signed = options.signed and options.scale in (None, "auto")
    pair = [
        _Side(passed, recognise(passed, spec, signed=signed), spec, curvature, letter)
        for passed, spec, curvature, letter in zip(sides, specs, curvatures, "ab", strict=True)
    ]
    ready = [side.given.provider for side in pair if side.given.provider is not None]
    for provider in ready:
        if not directed:
            refuse_directed(provider, "torchgw.solve compares them.")
    counts = [
        1 if side.given.provider is None else len(side.given.provider.relations()) for side in pair
    ]
    if counts[0] != counts[1]:
        raise InvalidInputError(
            "Both sides must have as many relations, each of which is compared with the same one "
            f"of the other side; X has {counts[0]} and Y {counts[1]}."
        )
    warn_of_two_kinds(ready)
    if options.relaxed and options.scale == "auto":
        warn_of_two_units(ready)
    first, second = pair
    warn_of_unlike_edges(
        (first.given.name, second.given.name), (first.given.steps, second.given.steps)
    )
    own = (side.given.provider is not None and not side.given.computed for side in pair)
    named.refuse_names(distances, dict(zip("XY", own, strict=True)))
    return pair


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
        decision = decide((points[0], points[1]), judge, device, relaxed=options.relaxed)
    tried, pairs = decision.agreement, len(points[0]) * len(points[1])
    many = pairs > limits_of(device).unstructured
    long = decision.chosen != "geodesic" and device.type == "cpu" and many
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


def _name(
    pair: list[_Side], decision: Decision | None, options: DistanceOptions, device: torch.device
) -> None:
    """Give both sides the names of their distances; refuse options that no name has a use for."""
    if decision is not None:
        for side, shape in zip(pair, decision.shapes, strict=False):
            side.shape = shape
    largest = max(side.given.n for side in pair)
    for side in pair:
        if decision is not None and decision.chosen != "geodesic":
            side.spec = decision.chosen
        if side.given.provider is None:
            side.name = _resolve(side.spec, largest, device, options)
    _refuse_unused(pair, options, decided=decision is not None)
    stored = pair[0].name == "precomputed", pair[1].name == "precomputed"
    check_tables_fit((pair[0].given.n, pair[1].given.n), stored, device, dense=options.dense)


def _connect(pair: list[_Side], options: DistanceOptions, stages: named.Preparation) -> None:
    """Make the graphs of the sides whose distances are geodesics."""
    connected = [side for side in pair if side.name in named.from_graphs()]
    makers = [partial(_graph, side, options, stages) for side in connected]
    # on a GPU finding all neighbours takes less time than the stages after it, and is not shared
    graphs = stages.divide(makers, together=stages.device.type == "cpu")
    for side, graph in zip(connected, graphs, strict=True):
        side.graph = graph


def _make(
    pair: list[_Side], options: DistanceOptions, stages: named.Preparation
) -> list[DistanceProvider]:
    """Make the providers of both sides, those of one name together."""
    providers: dict[int, DistanceProvider] = {}
    for place, side in enumerate(pair):
        if side.given.provider is not None:
            providers[place] = side.given.provider
    automatic = all(side.spec in named.BY_SIZE and side.name == "precomputed" for side in pair)
    many = max(side.given.n for side in pair) >= limits_of(stages.device).all_rows_points
    if automatic and options.approximate and stages.device.type == "cpu" and many:
        providers |= enumerate(_accurate_landmarks(pair, stages))
    missing = {place: side for place, side in enumerate(pair) if place not in providers}
    for name in dict.fromkeys(side.name for side in missing.values()):
        places = [place for place, side in missing.items() if side.name == name]
        entry, sources = named.NAMED[name], list[Any]()
        for side in (pair[place] for place in places):
            source = side.graph if entry.graph else side.given.points
            sources.append((source, side.curvature) if entry.curved else source)
        providers |= zip(places, entry.make(sources, stages), strict=True)
    made = (providers[place] for place in range(len(pair)))
    return [provider.to(stages.device, provider.dtype) for provider in made]


def _origin(side: _Side, options: DistanceOptions, scale: float) -> Space:
    """Record how new points of a side are measured."""
    curved = side.name in named.of_curvature()
    metric: Any = side.name if curved or side.name in get_args(PointMetric) else None
    # other names compute distances from points, but cannot compute those of new points
    points = None if metric is None and side.graph is None else side.given.points
    n_neighbors = 1
    if side.graph is not None:
        n_neighbors = options.n_neighbors or max(1, default_n_neighbors(side.given.n))
    geodesics = None if side.graph is None else side.graph.geodesics
    if side.graph is not None and side.name == "landmark" and not side.graph.given:
        # as large as the factors, and needed no longer
        geodesics = None
    space = Space(points, metric, geodesics, n_neighbors, scale)
    if isinstance(side.given.graph, Surface):
        # new points on the surface are joined to vertices near them
        return space._replace(points=side.given.graph.vertices, faces=side.given.graph.faces)
    return space._replace(curvature=float(side.curvature)) if curved else space


def _resolve(
    spec: named.DistanceName, largest: int, device: torch.device, options: DistanceOptions
) -> Any:
    """Choose what "auto", "geodesic" and "dijkstra" mean for problems of this size."""
    limits = limits_of(device)
    if spec == "dijkstra" and options.exact and largest <= limits.all_rows_points:
        return "precomputed"
    if spec not in named.BY_SIZE:
        return spec
    if largest <= limits.all_pairs_points and options.n_landmarks is None:
        return "precomputed"
    return "landmark" if options.factors or options.n_landmarks is not None else "dijkstra"


def _accurate_landmarks(pair: list[_Side], stages: named.Preparation) -> list[LandmarkDistance]:
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


def _refuse_unused(pair: list[_Side], options: DistanceOptions, *, decided: bool) -> None:
    """Refuse an option that neither side would use, unless the data ``decided`` that."""
    names = {side.name for side in pair}
    if options.disconnected != "stitch" and not decided and names.isdisjoint(named.from_graphs()):
        raise InvalidInputError(
            "`disconnected` is used for geodesics on graphs only; drop it, or pass graphs or "
            f"points with distances={listed(named.from_graphs())}."
        )
    if options.n_landmarks is not None and not {"landmark", *named.of_curvature()} & names:
        raise InvalidInputError(
            "`n_landmarks` is used by distances='landmark' and by those of curved spaces only; "
            "drop it, or pass distances='landmark'."
        )
    if options.curvature is not None and not {*named.of_curvature()} & names:
        raise InvalidInputError(
            f"`curvature` is that of distances={listed(named.of_curvature())}; drop it, or pass "
            "one of these. A provider has a curvature of its own."
        )
    neighbours = any(
        side.name in named.from_graphs() and side.given.points is not None for side in pair
    )
    if options.n_neighbors is not None and not neighbours:
        raise InvalidInputError(
            "`n_neighbors` is used for geodesics on the neighbour graph of points only; drop it, "
            f"or pass points with distances={listed(named.from_graphs())}."
        )


def _graph(
    side: _Side, options: DistanceOptions, stages: named.Preparation, ranks: Ranks | None
) -> named.KeyedGraph:
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
