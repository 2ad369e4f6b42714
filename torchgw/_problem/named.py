"""Named distances: what the names that ``distances=`` takes stand for, their stages, their unit.

A name is one entry of ``NAMED``; choices and messages follow it. "auto" has none: it becomes one of
the others, by the size of the problem; so does "geodesic", of points without a look at others.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from torchgw._boundary.arrays import check_magnitude
from torchgw._boundary.cache import Cache, content_key
from torchgw._boundary.checks import both
from torchgw._errors import InvalidInputError
from torchgw._tensors.operations import EQUAL
from torchgw._tensors.ranks import Ranks
from torchgw.distances.base import BLOCK_ENTRIES, DistanceProvider
from torchgw.distances.curved import CurvedDistance
from torchgw.distances.dijkstra import DijkstraDistance
from torchgw.distances.geodesics import Geodesics, path_lengths
from torchgw.distances.graph import (
    ConnectPolicy,
    Neighbourhood,
    given_geodesics,
    neighbour_geodesics,
)
from torchgw.distances.landmark import LandmarkDistance, NystromDistance
from torchgw.distances.points import ANGLES, CurvedModel, PointDistance, PointMetric
from torchgw.distances.precomputed import PrecomputedDistance

ScaleName = Literal["auto", "max", "mean"]


def scaled(
    provider: DistanceProvider,
    points: Tensor | None,
    scale: ScaleName | float | None,
    weights: Tensor | None,
    *,
    computed: bool,
) -> tuple[DistanceProvider, float]:
    """Divide distances by their maximum, mean or a number; also return what multiplies them."""
    if weights is not None and isinstance(provider, PointDistance):
        provider = provider.centred_on(weights)
    if scale is None or (scale == "auto" and not computed):
        return provider, 1.0
    size = scale if isinstance(scale, float) else _size(provider, points, scale, weights)
    if size == 0:
        # A single point, or identical points: nothing to scale.
        return provider, 1.0
    if isinstance(provider, PointDistance) and points is not None and provider.metric not in ANGLES:
        # Squares of large coordinates would overflow in float32 before a factor is applied.
        unit = size if provider.metric == "euclidean" else math.sqrt(size)
        made = PointDistance((points / unit).to(provider.device), provider.metric)
        return made if weights is None else made.centred_on(weights), 1 / size
    return provider.scaled(1 / size), 1 / size


def _size(
    provider: DistanceProvider, points: Tensor | None, scale: ScaleName, weights: Tensor | None
) -> float:
    """Compute the mean or the maximum of the distances among points of positive weight."""
    used = torch.ones(provider.n, dtype=torch.bool, device=provider.device)
    if weights is not None:
        used = weights > 0
    if scale == "mean":
        mean = provider.mean(used.to(provider.dtype) / used.sum())
        if isinstance(provider, PointDistance):
            # the distances of identical points are rounding of the factors, as often below zero as
            # above
            return max(0.0, min(mean, provider.maximum()))
        return mean
    largest = provider.maximum()
    if weights is None or bool(used.all()):
        return largest
    # a distance of zero, of which factors leave rounding, is no unit
    among = _maximum(provider, points, used)
    return among if among > EQUAL * largest else largest


def _maximum(provider: DistanceProvider, points: Tensor | None, used: Tensor) -> float:
    """Find the largest distance among the points that are used, if not all are."""
    if isinstance(provider, PointDistance) and points is not None:
        return PointDistance(points[used.to(points.device)], provider.metric).maximum()
    index = used.nonzero()[:, 0]
    blocks = index.split(max(1, BLOCK_ENTRIES // provider.n))
    return max(float(provider.columns(block)[index].max()) for block in blocks)


T = TypeVar("T")

# Pairs in a part of all-pairs geodesics that is cached by itself: half a minute of Dijkstra. [L275]
_PART_PAIRS = 100_000_000


class KeyedGraph(NamedTuple):
    """A graph and, where results are cached, the key of its content."""

    geodesics: Geodesics
    key: str | None
    given: bool  # or made of points, whose distances need it no longer once factors are known


@dataclass
class Preparation:
    """Runs stages on one device, times them, and reads them from a cache if there is one."""

    device: torch.device
    clock: Callable[[str, float], float]  # (phase, since): adds the time since then to a phase
    cache: Cache | None
    progress: bool  # whether to show a bar where a stage takes long on a CPU
    n_landmarks: int | None
    ranks: Ranks | None = None  # each prepares a side; if there are more, they share its sources
    seconds: float = 0.0  # of all stages so far

    def neighbour_graph(
        self,
        points: Tensor,
        n_neighbors: int | None,
        policy: ConnectPolicy,
        ranks: Ranks | None,
        known: Neighbourhood | None = None,
    ) -> KeyedGraph:
        """Build the connected neighbour graph of points, of which something may be known."""

        def make() -> dict[str, Any]:
            here = points.to(self.device)
            return neighbour_geodesics(
                here, n_neighbors, policy=policy, known=known, ranks=ranks
            ).state()

        with self._timed("graph"):
            state, key = self._fetch("graph", (points, n_neighbors, policy), make, ranks)
            return KeyedGraph(Geodesics.restore(state), key, given=False)

    def given_graph(self, name: str, graph: Any, policy: ConnectPolicy) -> KeyedGraph:
        """Check and connect a graph that the user gave."""
        with self._timed("graph"):
            geodesics = graph
            if not isinstance(graph, Geodesics):
                geodesics = given_geodesics(name, graph, policy)
                check_magnitude(name, geodesics.edges.length)
            content = (*geodesics.edges, geodesics.unreachable)
            key = None if self.cache is None else content_key("given graph", *content)
            return KeyedGraph(geodesics, key, given=True)

    def all_pairs(self, graphs: list[KeyedGraph]) -> list[Tensor]:
        """Find the geodesics of all pairs: on a GPU, or by processes that share the sources."""
        # a single process works on all sources of both sides together
        shares = [graphs] if self.ranks is None else [[graph] for graph in graphs]
        makers = [partial(self._all_pairs, share) for share in shares]
        with self._timed("geodesics"):
            return [table for part in self.divide(makers) for table in part]

    def landmarks(self, graphs: list[KeyedGraph]) -> list[LandmarkDistance]:
        """Find the Nystrom factors of the geodesics."""
        states = self.divide([partial(self._landmarks, graph) for graph in graphs])
        return [
            LandmarkDistance.restore(graph.geodesics if graph.given else None, state)
            for graph, state in zip(graphs, states, strict=True)
        ]

    def _landmarks(self, graph: KeyedGraph, ranks: Ranks | None) -> dict[str, Any]:
        def make() -> dict[str, Any]:
            return LandmarkDistance.prepared(
                graph.geodesics, self.n_landmarks, self.device, ranks, last=not graph.given
            ).state()

        with self._timed("landmarks"):
            return self._fetch("landmarks", (graph.key, self.n_landmarks), make, ranks)[0]

    def divide(
        self, makers: Sequence[Callable[[Ranks | None], T]], *, together: bool = True
    ) -> list[T]:
        """Call the makers: all in this process, each on a rank, or each on several together."""
        # a maker is given the ranks that work on it, if several do
        ranks = self.ranks
        if ranks is None or (together and ranks.size > len(makers)):
            return [make(ranks) for make in makers]
        return ranks.divide([partial(make, None) for make in makers])

    def _all_pairs(self, graphs: list[KeyedGraph], ranks: Ranks | None) -> list[Tensor]:
        if self.device.type == "cuda":
            return [
                self._fetch("geodesics", (graph.key,), partial(self._table, graph))[0]["table"]
                for graph in graphs
            ]
        if self.cache is None and ranks is None:
            tasks = [(graph.geodesics, np.arange(graph.geodesics.n)) for graph in graphs]
            return path_lengths(tasks, progress=self.progress)
        return [torch.cat(self._parts(graph, ranks)) for graph in graphs]

    def _table(self, graph: KeyedGraph) -> dict[str, Any]:
        """Find all pairs on a GPU."""
        return {"table": graph.geodesics.all_pairs(self.device)}

    def _parts(self, graph: KeyedGraph, ranks: Ranks | None) -> list[Tensor]:
        """Find all pairs in parts, each cached, so that a run cut short can go on."""
        n = graph.geodesics.n
        found = []
        for sources in np.array_split(np.arange(n), -(-n * n // _PART_PAIRS)):

            def rows(some: slice, sources: Any = sources) -> Tensor:
                return path_lengths([(graph.geodesics, sources[some])], progress=self.progress)[0]

            def make(rows: Any = rows, count: int = len(sources)) -> dict[str, Any]:
                if ranks is None:
                    return {"rows": rows(slice(None))}
                empty = torch.empty(0, n, dtype=torch.float64, device=self.device)
                return {"rows": ranks.at_once(count, rows, empty)}

            content = graph.key, int(sources[0]), len(sources)
            found.append(self._fetch("geodesics", content, make, ranks)[0]["rows"])
        return found

    def _fetch(
        self,
        stage: str,
        content: tuple[Any, ...],
        make: Callable[[], dict[str, Any]],
        ranks: Ranks | None = None,
    ) -> tuple[dict[str, Any], str | None]:
        """Read the result of a stage for some content, or compute it; return it and its key."""
        if self.cache is None:
            return make(), None
        key = content_key(stage, *content)
        if ranks is None:
            return self.cache.fetch(stage, key, self.device, make), key
        found = ranks.divide([partial(self.cache.read, stage, key, self.device)])[0]
        if found is None:
            found = make()
            if ranks.rank == 0:
                self.cache.write(stage, key, found)
        return found, key

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Account for the time of a stage that runs to its end."""
        started = perf_counter()
        yield
        if self.device.type == "cuda":
            # not the whole device, on which another thread may record a graph
            torch.cuda.current_stream(self.device).synchronize()
        self.seconds += self.clock(phase, started) - started


DistanceName = Literal[
    "auto", "geodesic", "dijkstra", "precomputed", "landmark", PointMetric, CurvedModel
]
# Names that stand for others, by the size of the problem.
BY_SIZE = "auto", "geodesic"


class NamedDistance(NamedTuple):
    """How sides become providers under one name."""

    # A function from the sides of this name, each its KeyedGraph or its points (n, d), to a
    # provider for each. It gets both sides at once, because all pairs of both are found side by
    # side.
    make: Callable[[list[Any], Preparation], list[DistanceProvider]]
    graph: bool = False  # made from a graph, given or of nearest neighbours; otherwise from points
    curved: bool = False  # made from pairs of points and a curvature


def _on_demand(graphs: list[KeyedGraph], stages: Preparation) -> list[DistanceProvider]:
    return [DijkstraDistance(graph.geodesics, device=stages.device) for graph in graphs]


def _all_pairs(graphs: list[KeyedGraph], stages: Preparation) -> list[DistanceProvider]:
    return [PrecomputedDistance.unchecked(table) for table in stages.all_pairs(graphs)]


def _landmarks(graphs: list[KeyedGraph], stages: Preparation) -> list[DistanceProvider]:
    if stages.ranks is not None:
        return [*stages.landmarks(graphs)]
    providers = list[DistanceProvider]()
    for graph in graphs:
        providers += stages.landmarks([graph])
        if not graph.given:
            # before the other side is read, as it is as large as the factors
            graph.geodesics.forget()
    return providers


def _among_points(
    metric: PointMetric, points: list[Any], stages: Preparation
) -> list[DistanceProvider]:
    # derived tensors are made on the device alone
    return [PointDistance(each.to(stages.device), metric) for each in points]


def _constant_curvature(
    model: CurvedModel, sides: list[Any], stages: Preparation
) -> list[DistanceProvider]:
    made = [
        CurvedDistance(points.to(stages.device), model, curvature=value) for points, value in sides
    ]
    if stages.n_landmarks is None:
        return [*made]
    return [NystromDistance(each, stages.n_landmarks) for each in made]


NAMED: dict[str, NamedDistance] = {
    "dijkstra": NamedDistance(_on_demand, graph=True),
    "precomputed": NamedDistance(_all_pairs, graph=True),
    "landmark": NamedDistance(_landmarks, graph=True),
    **{metric: NamedDistance(partial(_among_points, metric)) for metric in get_args(PointMetric)},
    **{
        model: NamedDistance(partial(_constant_curvature, model), curved=True)
        for model in get_args(CurvedModel)
    },
}


def from_graphs() -> list[str]:
    """List the names of distances that are made from a graph."""
    return [name for name, entry in NAMED.items() if entry.graph]


def of_curvature() -> list[str]:
    """List the names of distances that depend on a curvature."""
    return [name for name, entry in NAMED.items() if entry.curved]


def pair_of_distances(distances: Any) -> tuple[Any, Any]:
    """Split ``distances`` into a known name or a provider for each side."""
    pair = both(distances)
    if len(pair) != 2:
        raise InvalidInputError(
            f"`distances` must be one name or provider, or a pair of them; got {len(pair)} items."
        )
    for item in pair:
        known = isinstance(item, str) and item in (*BY_SIZE, *NAMED)
        if not known and not isinstance(item, DistanceProvider):
            raise InvalidInputError(
                f"`distances` must be one of {', '.join(map(repr, (*BY_SIZE, *NAMED)))}, a "
                f"DistanceProvider, or a pair of these; got {item!r}. Compute other distances and "
                "pass them as `D_X` and `D_Y`; a function or a manifold makes a ManifoldDistance."
            )
    return pair


def refuse_names(distances: Any, given: Mapping[str, bool]) -> None:
    """Refuse names in ``distances`` where sides, by what messages call them, have their own."""
    named = (isinstance(item, str) and item != "auto" for item in pair_of_distances(distances))
    idle = [side for (side, own), name in zip(given.items(), named, strict=False) if own and name]
    # one name for both sides has a use as long as one of them has
    if idle and (len(idle) == len(given) or not isinstance(distances, str)):
        raise InvalidInputError(
            f"`distances={distances!r}` measures points and graphs, and {' and '.join(idle)} "
            f"{'is' if len(idle) == 1 else 'are'} neither, so it would not be used. Pass 'auto' "
            "there, or points."
        )
