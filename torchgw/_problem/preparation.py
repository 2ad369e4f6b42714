"""The costly stages before a solve: neighbour graphs, geodesics, landmarks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from torchgw._boundary.arrays import check_magnitude
from torchgw._boundary.cache import Cache, content_key
from torchgw._tensors.ranks import Ranks
from torchgw.distances.geodesics import Geodesics, path_lengths
from torchgw.distances.graph import (
    ConnectPolicy,
    Neighbourhood,
    given_geodesics,
    neighbour_geodesics,
)
from torchgw.distances.landmark import LandmarkDistance

T = TypeVar("T")

# Pairs in a part of all-pairs geodesics that is cached by itself: half a minute of Dijkstra. [L275]
_PART_PAIRS = 100_000_000


class KeyedGraph(NamedTuple):
    """A graph and, where results are cached, the key of its content."""

    geodesics: Geodesics
    key: str | None


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
            return KeyedGraph(Geodesics.restore(state), key)

    def given_graph(self, name: str, graph: Any, policy: ConnectPolicy) -> KeyedGraph:
        """Check and connect a graph that the user gave."""
        with self._timed("graph"):
            geodesics = graph
            if not isinstance(graph, Geodesics):
                geodesics = given_geodesics(name, graph, policy)
                check_magnitude(name, geodesics.edges.length)
            content = (*geodesics.edges, geodesics.unreachable)
            key = None if self.cache is None else content_key("given graph", *content)
            return KeyedGraph(geodesics, key)

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
            LandmarkDistance.restore(graph.geodesics, state)
            for graph, state in zip(graphs, states, strict=True)
        ]

    def _landmarks(self, graph: KeyedGraph, ranks: Ranks | None) -> dict[str, Any]:
        def make() -> dict[str, Any]:
            geodesics, count = graph.geodesics, self.n_landmarks
            if ranks is not None:
                return LandmarkDistance.shared(geodesics, count, self.device, ranks).state()
            return LandmarkDistance(geodesics, count, device=self.device).state()

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
                task = graph.geodesics, sources[some]
                return path_lengths([task], progress=self.progress)[0]

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
            torch.cuda.synchronize(self.device)
        self.seconds += self.clock(phase, started) - started
