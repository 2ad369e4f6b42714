"""Geodesic distances read on demand, with a bounded cache."""

import threading
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchgw._boundary.arrays import resolve_device
from torchgw._errors import InvalidInputError
from torchgw.distances.base import DistanceProvider
from torchgw.distances.graph import as_geodesics


class CacheInfo(NamedTuple):
    """Rows of the cache of a :class:`DijkstraDistance`, counted."""

    hits: int  # asked for, and found
    misses: int  # asked for, and computed
    size: int  # kept now


class DijkstraDistance(DistanceProvider):
    """Shortest-path lengths on a graph, one run of Dijkstra for each column that is asked for.

    Parameters
    ----------
    graph : SciPy sparse array or matrix, or Geodesics
        Symmetric edge lengths. Components of a graph that is not connected are given a finite
        distance, with a warning; :func:`torchgw.distances.connect` has the choices.
    device : torch.device or str, optional
        Device of the columns and of the cache.
    dtype : torch.dtype, optional
        Dtype of the columns and of the cache.
    cache_size : int, optional
        Rows of n numbers to keep; the oldest are dropped first, and 0 keeps none.
    cache_bytes : int, optional
        Bytes to keep; the smaller of both bounds counts.
    n_jobs : int or None, optional
        Worker processes for a request with many missing rows; ``None`` takes every core.

    Raises
    ------
    InvalidInputError
        If the graph is not valid or ``cache_size`` is negative.
    """

    cheap_columns = False

    def __init__(
        self,
        graph: Any,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float64,
        cache_size: int = 2000,
        cache_bytes: int = 2 * 2**30,
        n_jobs: int | None = 1,
    ) -> None:
        if cache_size < 0 or cache_bytes < 0:
            raise InvalidInputError(
                f"`cache_size` and `cache_bytes` must not be negative; got {cache_size} and "
                f"{cache_bytes}. Pass `cache_size=0` to keep no rows."
            )
        self.geodesics = as_geodesics(graph)
        self.n = self.geodesics.n
        self.device = resolve_device(device)
        self.dtype, self.cache_size, self.cache_bytes = dtype, cache_size, cache_bytes
        self.n_jobs = n_jobs
        self._cache = _RowCache(min(cache_size, cache_bytes // (self.n * dtype.itemsize)))

    def columns(self, index: Tensor) -> Tensor:
        """Read D[:, index]: rows from the cache, and a run of Dijkstra for each one missing."""
        wanted, inverse = torch.unique(index, return_inverse=True)
        sources = wanted.tolist()
        rows = self._cache.look_up(sources)
        missing = [source for source in sources if source not in rows]
        if missing:
            places = np.array(missing, dtype=np.int64)
            fresh = self.geodesics.rows(places, dtype=self.dtype, n_jobs=self.n_jobs)
            found = dict(zip(missing, fresh.to(self.device), strict=True))
            self._cache.store(found)
            rows |= found
        none = torch.empty(0, self.n, device=self.device, dtype=self.dtype)
        table = torch.stack([rows[source] for source in sources]) if sources else none
        return table[inverse.to(self.device)].T

    def to(self, device: torch.device, dtype: torch.dtype) -> "DijkstraDistance":
        """Move the distances to another device or dtype, with an empty cache."""
        if self._lies_at(device, dtype):
            return self
        return DijkstraDistance(
            self.geodesics, device=device, dtype=dtype, cache_size=self.cache_size,
            cache_bytes=self.cache_bytes, n_jobs=self.n_jobs,
        )  # fmt: skip

    def maximum(self) -> float:
        """Find a lower bound of the largest distance, exact on trees.

        It is the longest path from four vertices, each the farthest from those before: at least
        half of the largest distance, and usually equal to it. Pairs without a path count with the
        distance that they are given.
        """
        return self.geodesics.farthest()

    def cache_info(self) -> CacheInfo:
        """Count the distinct rows that were found in the cache, were computed, and are kept."""
        return CacheInfo(self._cache.hits, self._cache.misses, len(self._cache.rows))


class _RowCache:
    """Rows by vertex, the oldest dropped first; threads may share it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.rows: dict[int, Tensor] = {}
        self.hits = self.misses = 0
        self._lock = threading.Lock()

    def look_up(self, vertices: list[int]) -> dict[int, Tensor]:
        """Find the rows that are kept."""
        with self._lock:
            found = {vertex: self.rows[vertex] for vertex in vertices if vertex in self.rows}
            self.hits += len(found)
            self.misses += len(vertices) - len(found)
        return found

    def store(self, fresh: dict[int, Tensor]) -> None:
        """Keep rows; the last ones if not all fit."""
        with self._lock:
            for vertex in list(fresh)[max(0, len(fresh) - self.capacity) :]:
                # copies, as a part of a table keeps all of it
                self.rows[vertex] = fresh[vertex].clone()
                if len(self.rows) > self.capacity:
                    del self.rows[next(iter(self.rows))]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as an empty cache."""
        return _RowCache, (self.capacity,)
