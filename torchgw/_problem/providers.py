"""From what the user passed to two distance providers."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from time import perf_counter
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from torchgw._boundary.cache import Cache
from torchgw._errors import InvalidInputError
from torchgw._problem.given import (
    POINT_METRICS,
    DistanceName,
    GivenSpace,
    pair_of_distances,
    recognise,
)
from torchgw._problem.preparation import Graph, Preparation
from torchgw.distances.base import DistanceProvider, ScaledDistance
from torchgw.distances.dijkstra import DijkstraDistance
from torchgw.distances.graph import default_n_neighbors
from torchgw.distances.landmark import LandmarkDistance
from torchgw.distances.new_points import Space
from torchgw.distances.points import PointDistance
from torchgw.distances.precomputed import PrecomputedDistance

__all__ = ["DistanceOptions", "ScaleName", "Spaces", "build_providers"]

logger = logging.getLogger(__name__)

ScaleName = Literal["auto", "max", "mean"]
_GEODESIC = ("dijkstra", "precomputed", "landmark")
# Points per side up to which "auto" computes all geodesic pairs: minutes of Dijkstra lie beyond.
_ALL_PAIRS_POINTS = 3_000
# Points from which it tries landmarks first on a CPU, whose products of tables take seconds; and
# the error of each side up to which these do: the value of a plan is too high by about their sum.
_LANDMARK_POINTS = 1_000
_SMALL_ERROR = 0.005
# Points per side up to which "dijkstra" is all pairs too. A sampled solve of some thousand points
# asks for nearly every row in the end, so all at once are no more of them, and the exact solve
# takes a CPU no longer: spirals of 500 points 0.3 s for 0.6 to 1, of 1,000 1.6 s for 1.6 to 1.9; of
# 1,800 it would be 7 s for 4. On a GPU 0.07 s for 1 (1,800), 0.2 s for 11 (5,000), 0.55 s for 14
# (6,300), and beyond that tables do not fit an exact gradient (`_DENSE_ENTRIES`).
_ALL_ROWS_POINTS = {"cpu": 1_000, "cuda": 6_000}


@dataclass(frozen=True)
class DistanceOptions:
    """How distances are made from points or graphs."""

    n_neighbors: int | None
    n_landmarks: int | None
    scale: ScaleName | None
    disconnected: Literal["stitch", "fill"]
    cache: Cache | None = None
    progress: bool = False
    factors: bool = True  # whether factors are of use: "auto" is then low-rank for many points
    exact: bool = True  # whether the gradient may be exact: "dijkstra" is all pairs for few points
    approximate: bool = False  # whether "auto" may take accurate factors where all pairs would fit

    def __post_init__(self) -> None:
        """Check every field."""
        for name in ("n_neighbors", "n_landmarks"):
            value = getattr(self, name)
            if value is not None and (
                not isinstance(value, Integral) or isinstance(value, bool) or value < 1
            ):
                raise InvalidInputError(
                    f"`{name}` must be an integer of at least 1, or None; got {value!r}."
                )
        known = isinstance(self.scale, str) and self.scale in get_args(ScaleName)
        if self.scale is not None and not known:
            raise InvalidInputError(
                f"`scale` must be 'auto', 'max', 'mean' or None; got {self.scale!r}."
            )
        known = isinstance(self.disconnected, str) and self.disconnected in ("stitch", "fill")
        if not known:
            raise InvalidInputError(
                f"`disconnected` must be 'stitch' or 'fill'; got {self.disconnected!r}."
            )


class Spaces(NamedTuple):
    """Both sides of a problem, ready to solve."""

    providers: tuple[DistanceProvider, DistanceProvider]
    origins: tuple[Space, Space]  # what each was made from, for new points
    landmarks: dict[str, dict[str, float]]  # count, rank and error of each side that has them


def build_providers(
    sides: tuple[Any, Any],
    tables: tuple[Any, Any],
    distances: Any,
    options: DistanceOptions,
    device: torch.device,
    clock: Callable[[str, float], float],
    labels: tuple[str, str] = ("X", "Y"),
) -> Spaces:
    """Build the providers of both sides, scaled, and say what they were made from.

    ``labels`` are what messages call the sides; of others than X and Y there is no ``D_X``.
    ``clock(phase, since)`` is told the stages: graph, geodesics, landmarks, and distances for all
    else.
    """
    started = perf_counter()
    names = pair_of_distances(distances)
    inputs = [
        recognise(name, side, table, spec)
        for name, side, table, spec in zip(labels, sides, tables, names, strict=True)
    ]
    largest = max(item.n for item in inputs)
    kinds = [
        _resolve(spec, largest, device, options) if item.provider is None else "given"
        for item, spec in zip(inputs, names, strict=True)
    ]
    _refuse_unused(inputs, kinds, options)
    stages = Preparation(device, clock, options.cache, options.progress)
    graphs = {
        position: _graph(item, options, stages)
        for position, (item, kind) in enumerate(zip(inputs, kinds, strict=True))
        if kind in _GEODESIC
    }
    accurate: dict[int, LandmarkDistance] = {}
    automatic = [*zip(names, kinds, strict=True)] == 2 * [("auto", "precomputed")]
    if automatic and options.approximate and device.type == "cpu" and largest >= _LANDMARK_POINTS:
        accurate = _accurate_landmarks(graphs, stages)
        kinds = ["landmark"] * len(kinds) if accurate else kinds
    all_pairs = [position for position, kind in enumerate(kinds) if kind == "precomputed"]
    made = dict(zip(all_pairs, stages.all_pairs([graphs[p] for p in all_pairs]), strict=True))
    providers: list[DistanceProvider] = []
    landmarks: dict[str, dict[str, float]] = {}
    for position, (item, kind) in enumerate(zip(inputs, kinds, strict=True)):
        provider: DistanceProvider
        if position in accurate:
            provider = accurate[position]
        elif kind == "precomputed":
            provider = PrecomputedDistance.unchecked(made.pop(position))
        else:
            provider = _provider(item, kind, graphs.get(position), options, stages, device)
        if isinstance(provider, LandmarkDistance):
            landmarks[item.name] = {
                "count": len(provider.landmarks),
                "rank": provider.rank,
                "error": provider.error,
            }
        providers.append(provider.to(device, provider.dtype))
    logger.info("distances: %s for X, %s for Y", *kinds)
    scaled = [
        _scale(provider, item.points, options.scale, computed=kind != "given")
        for provider, item, kind in zip(providers, inputs, kinds, strict=True)
    ]
    spaces = [
        _space(item, kind, graphs.get(position), options, factor)
        for position, (item, kind, (_, factor)) in enumerate(
            zip(inputs, kinds, scaled, strict=True)
        )
    ]
    clock("distances", started + stages.seconds)
    return Spaces(
        (scaled[0][0], scaled[1][0]),
        (spaces[0].to(device), spaces[1].to(device)),
        landmarks,
    )


def _provider(
    item: GivenSpace,
    kind: Any,
    graph: Graph | None,
    options: DistanceOptions,
    stages: Preparation,
    device: torch.device,
) -> DistanceProvider:
    """Build the provider of one side, but for all pairs, which are found for both sides at once."""
    if item.provider is not None:
        return item.provider
    if graph is None:
        assert item.points is not None
        return PointDistance(item.points, kind)
    if kind == "dijkstra":
        return DijkstraDistance(graph.geodesics, device=device)
    return stages.landmarks(graph, options.n_landmarks)


def _space(
    item: GivenSpace, kind: Any, graph: Graph | None, options: DistanceOptions, scale: float
) -> Space:
    """Return what new points of a side need to know of it."""
    metric = kind if kind in POINT_METRICS else None
    n_neighbors = options.n_neighbors or max(1, default_n_neighbors(item.n))
    geodesics = None if graph is None else graph.geodesics
    return Space(item.points, metric, geodesics, n_neighbors, scale)


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


def _accurate_landmarks(
    graphs: dict[int, Graph], stages: Preparation
) -> dict[int, LandmarkDistance]:
    """Return the factors of both sides if they are as good as all pairs; otherwise none."""
    found: dict[int, LandmarkDistance] = {}
    for position, graph in graphs.items():
        found[position] = stages.landmarks(graph, None)
        if found[position].error > _SMALL_ERROR:
            return {}
    return found


def _refuse_unused(inputs: list[GivenSpace], kinds: list[Any], options: DistanceOptions) -> None:
    """Refuse an option that neither side would use."""
    made = [item for item, kind in zip(inputs, kinds, strict=True) if kind in _GEODESIC]
    if options.n_landmarks is not None and "landmark" not in kinds:
        raise InvalidInputError(
            "`n_landmarks` is used by distances='landmark' only; drop it, or pass "
            "distances='landmark'."
        )
    if options.n_neighbors is not None and all(item.points is None for item in made):
        raise InvalidInputError(
            "`n_neighbors` is used for geodesics on the neighbour graph of points only; drop it, "
            "or pass points with distances='precomputed', 'dijkstra' or 'landmark'."
        )


def _graph(item: GivenSpace, options: DistanceOptions, stages: Preparation) -> Graph:
    """Return the connected graph of one side."""
    if item.points is None:
        return stages.given_graph(item.name, item.graph, options.disconnected)
    count = options.n_neighbors
    if count is not None and count >= item.n and item.n > 1:
        raise InvalidInputError(
            f"`n_neighbors` must be below the number of points; got {count} for the {item.n} "
            f"points of {item.name}."
        )
    return stages.neighbour_graph(item.points, count, options.disconnected)


def _scale(
    provider: DistanceProvider, points: Tensor | None, scale: ScaleName | None, *, computed: bool
) -> tuple[DistanceProvider, float]:
    """Divide by the maximum or the mean distance, once, and return the factor."""
    if scale is None or (scale == "auto" and not computed):
        return provider, 1.0
    if scale == "mean":
        uniform = torch.full(
            (provider.n,), 1 / provider.n, dtype=provider.dtype, device=provider.device
        )
        size = provider.mean(uniform)
    else:
        size = provider.maximum()
    if size == 0:
        # A single point, or identical points: nothing to scale.
        return provider, 1.0
    if isinstance(provider, PointDistance) and points is not None and provider.metric != "cosine":
        # Squares of large coordinates would overflow in float32 before a factor is applied.
        unit = size if provider.metric == "euclidean" else math.sqrt(size)
        return PointDistance((points / unit).to(provider.device), provider.metric), 1 / size
    return ScaledDistance(provider, 1 / size), 1 / size
