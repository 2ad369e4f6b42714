"""Geodesic distances read on demand, with a bounded cache."""

import threading
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
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
        row_bytes = self.n * dtype.itemsize
        capacity = min(cache_size, cache_bytes // row_bytes, self.n)
        self._cache = _RowCache(capacity, self.n, self.device, dtype)

    def columns(self, index: Tensor) -> Tensor:
        """Read D[:, index]: rows from the cache, and a run of Dijkstra for each one missing."""
        wanted, inverse = torch.unique(index, return_inverse=True)
        sources = wanted.cpu().numpy()
        rows, missing = self._cache.look_up(sources)
        if missing.any():
            fresh = self.geodesics.rows(sources[missing], dtype=self.dtype, n_jobs=self.n_jobs)
            fresh = fresh.to(self.device)
            rows[torch.from_numpy(missing).to(self.device)] = fresh
            # the answer is copied before any row of the cache is overwritten: it may be larger than
            # the cache
            self._cache.store(sources[missing], fresh)
        return rows[inverse.to(self.device)].T

    def to(self, device: torch.device, dtype: torch.dtype) -> "DijkstraDistance":
        """Move the distances to another device or dtype, with an empty cache."""
        if self._lies_at(device, dtype):
            return self
        return DijkstraDistance(
            self.geodesics,
            device=device,
            dtype=dtype,
            cache_size=self.cache_size,
            cache_bytes=self.cache_bytes,
            n_jobs=self.n_jobs,
        )

    def maximum(self) -> float:
        """Find a lower bound of the largest distance, exact on trees.

        It is the longest path from four vertices, each the farthest from those before: at least
        half of the largest distance, and usually equal to it. Pairs without a path count with the
        distance that they are given.
        """
        return self.geodesics.farthest()

    def cache_info(self) -> CacheInfo:
        """Count the distinct rows that were found in the cache, were computed, and are kept."""
        cache = self._cache
        return CacheInfo(cache.hits, cache.misses, int((cache.owner_of >= 0).sum()))


class _RowCache:
    """Rows by vertex in a ring of slots, the oldest overwritten first; threads may share it."""

    def __init__(self, capacity: int, n: int, device: torch.device, dtype: torch.dtype) -> None:
        self.capacity, self._n = capacity, n
        self._rows = torch.empty(0, n, device=device, dtype=dtype)
        # slot of each vertex and vertex of each slot, -1 for none
        self._slot_of = np.full(n, -1, dtype=np.int64)
        self.owner_of = np.full(capacity, -1, dtype=np.int64)
        self._next = 0
        self.hits = 0
        self.misses = 0
        # a row must not be overwritten between looking up its slot and reading it
        self._lock = threading.Lock()

    def look_up(self, vertices: NDArray[np.int64]) -> tuple[Tensor, NDArray[np.bool_]]:
        """Read rows (s, n), and tell which of them are missing, whose content is undefined."""
        with self._lock:
            slots = self._slot_of[vertices]
            missing = slots < 0
            self.misses += int(missing.sum())
            self.hits += int((~missing).sum())
            rows = self._rows.new_empty(len(vertices), self._n)
            rows[self._tensor(~missing)] = self._rows[self._tensor(slots[~missing])]
        return rows, missing

    def store(self, vertices: NDArray[np.int64], rows: Tensor) -> None:
        """Keep rows of vertices that have none yet; the last ones if not all fit."""
        kept = min(len(vertices), self.capacity)
        if kept == 0:
            return
        with self._lock:
            self._grow(min(self.capacity, self._next + kept))
            slots = np.arange(self._next, self._next + kept) % self.capacity
            evicted = self.owner_of[slots]
            self._slot_of[evicted[evicted >= 0]] = -1
            self.owner_of[slots] = vertices[-kept:]
            self._slot_of[vertices[-kept:]] = slots
            self._rows[self._tensor(slots)] = rows[-kept:]
            self._next = (self._next + kept) % self.capacity

    def _grow(self, size: int) -> None:
        """Make room for ``size`` rows, at least twice as many as now."""
        old = self._rows.shape[0]
        if size > old:
            size = min(self.capacity, max(size, 2 * old))
            self._rows = torch.cat([self._rows, self._rows.new_empty(size - old, self._n)])

    def _tensor(self, values: NDArray[Any]) -> Tensor:
        """Convert an index or a mask to a tensor on the device of the rows."""
        return torch.from_numpy(values).to(self._rows.device)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as an empty cache."""
        rows = self._rows
        return _RowCache, (self.capacity, self._n, rows.device, rows.dtype)
