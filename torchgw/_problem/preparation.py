"""The costly stages before a solve: neighbour graphs, geodesics, landmarks."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from torchgw._boundary.arrays import check_magnitude
from torchgw._boundary.cache import Cache, content_key
from torchgw.distances.geodesics import Geodesics, path_lengths
from torchgw.distances.graph import given_geodesics, neighbour_geodesics
from torchgw.distances.landmark import LandmarkDistance

__all__ = ["KeyedGraph", "Preparation"]

T = TypeVar("T")

# Pairs in a part of all-pairs geodesics that is cached by itself: half a minute of Dijkstra.
_PART_PAIRS = 100_000_000


class KeyedGraph(NamedTuple):
    """A graph and, where results are cached, the key of its content."""

    geodesics: Geodesics
    key: str | None


class Preparation:
    """Runs stages on one device, times them, and reads them from a cache if there is one.

    Parameters
    ----------
    device : torch.device
    clock : callable
        ``clock(phase, since)`` adds the time since a moment to a phase.
    cache : Cache or None
    progress : bool
        Whether to show a progress bar where a stage takes long on a CPU.
    n_landmarks : int or None
        Landmarks of each side; None chooses.
    """

    def __init__(
        self,
        device: torch.device,
        clock: Callable[[str, float], float],
        cache: Cache | None,
        progress: bool,
        n_landmarks: int | None = None,
    ) -> None:
        self.device = device
        self._clock = clock
        self._cache = cache
        self._progress = progress
        self._n_landmarks = n_landmarks
        self.seconds = 0.0

    def neighbour_graph(
        self, points: Tensor, n_neighbors: int | None, policy: Literal["stitch", "fill"]
    ) -> KeyedGraph:
        """Return the connected neighbour graph of some points."""

        def make() -> Geodesics:
            return neighbour_geodesics(points.to(self.device), n_neighbors, policy=policy)

        return self._timed("graph", lambda: self._graph((points, n_neighbors, policy), make))

    def given_graph(self, name: str, graph: Any, policy: Literal["stitch", "fill"]) -> KeyedGraph:
        """Return a graph that the user gave, checked and connected."""

        def make() -> KeyedGraph:
            geodesics = graph
            if not isinstance(graph, Geodesics):
                geodesics = given_geodesics(name, graph, policy)
                check_magnitude(name, geodesics.edges.length)
            content = (*geodesics.edges, geodesics.unreachable)
            key = None if self._cache is None else content_key("given graph", *content)
            return KeyedGraph(geodesics, key)

        return self._timed("graph", make)

    def all_pairs(self, graphs: list[KeyedGraph]) -> list[Tensor]:
        """Return the geodesics of all pairs: on a GPU, or by processes that share the sources."""
        return self._timed("geodesics", lambda: self._all_pairs(graphs)) if graphs else []

    def landmarks(self, graph: KeyedGraph) -> LandmarkDistance:
        """Return the Nystrom factors of the geodesics."""

        def make() -> LandmarkDistance:
            return LandmarkDistance(graph.geodesics, self._n_landmarks, device=self.device)

        def cached() -> LandmarkDistance:
            if self._cache is None:
                return make()
            key = content_key("landmarks", graph.key, self._n_landmarks)
            state = self._cache.fetch("landmarks", key, self.device, lambda: make().state())
            return LandmarkDistance.restore(graph.geodesics, state)

        return self._timed("landmarks", cached)

    def _graph(self, content: tuple[Any, ...], make: Callable[[], Geodesics]) -> KeyedGraph:
        if self._cache is None:
            return KeyedGraph(make(), None)
        key = content_key("graph", *content)
        state = self._cache.fetch("graph", key, self.device, lambda: make().state())
        return KeyedGraph(Geodesics.restore(state), key)

    def _all_pairs(self, graphs: list[KeyedGraph]) -> list[Tensor]:
        if self.device.type == "cuda":
            return [self._table(graph) for graph in graphs]
        if self._cache is None:
            tasks = [(graph.geodesics, np.arange(graph.geodesics.n)) for graph in graphs]
            return path_lengths(tasks, progress=self._progress)
        return [torch.cat(self._parts(graph)) for graph in graphs]

    def _table(self, graph: KeyedGraph) -> Tensor:
        """Return all pairs on a GPU."""
        if self._cache is None:
            return graph.geodesics.all_pairs(self.device)
        key = content_key("geodesics", graph.key)
        parts = self._cache.fetch(
            "geodesics",
            key,
            self.device,
            lambda: {"table": graph.geodesics.all_pairs(self.device)},
        )
        table: Tensor = parts["table"]
        return table

    def _parts(self, graph: KeyedGraph) -> list[Tensor]:
        """Return all pairs in parts that are cached one by one: a run cut short goes on there."""
        assert self._cache is not None
        n = graph.geodesics.n
        parts = []
        for sources in np.array_split(np.arange(n), -(-n * n // _PART_PAIRS)):
            key = content_key("geodesics", graph.key, int(sources[0]), len(sources))

            def make(sources: Any = sources) -> dict[str, Any]:
                task = graph.geodesics, sources
                return {"rows": path_lengths([task], progress=self._progress)[0]}

            parts.append(self._cache.fetch("geodesics", key, self.device, make)["rows"])
        return parts

    def _timed(self, phase: str, stage: Callable[[], T]) -> T:
        """Run a stage to its end and account for its time."""
        started = perf_counter()
        result = stage()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds += self._clock(phase, started) - started
        return result
