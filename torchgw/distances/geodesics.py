"""Shortest-path lengths of a graph, with a finite value where there is no path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components, dijkstra

from torchgw.distances.relaxation import Relaxation

__all__ = ["Geodesics", "largest_path", "path_lengths"]

# Bytes of the float64 rows that one Dijkstra call returns.
_ROWS_BYTES = 128 * 2**20
# Shortest-path work, in (source, vertex) pairs, whose time (0.2 us each) repays the 1.4 s that
# worker processes take to start: two sides of about 2,000 vertices with many cores.
_PROCESS_PAIRS = 7_500_000


@dataclass(frozen=True, eq=False)
class Geodesics:
    """A symmetric graph and the distance given to pairs that no path connects.

    Made by :func:`torchgw.distances.connect`; every geodesic provider takes it in place of a graph.

    Parameters
    ----------
    graph : csr_matrix, shape (n, n)
        Symmetric, non-negative edge lengths; an explicit zero is an edge of length zero.
    unreachable : float or None
        Distance of a pair that no path connects; ``None`` for a connected graph.
    """

    graph: csr_matrix
    unreachable: float | None = None

    @property
    def n(self) -> int:
        """Number of vertices."""
        return int(self.graph.shape[0])

    def rows(
        self,
        sources: NDArray[np.int64],
        *,
        dtype: torch.dtype = torch.float64,
        n_jobs: int | None = 1,
    ) -> torch.Tensor:
        """Return D[sources], shape (s, n), on the CPU: one Dijkstra run for each source."""
        return path_lengths([(self, sources)], dtype=dtype, n_jobs=n_jobs)[0]

    def reader(self, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function from sources, int64 of shape (s,), to D[sources] on a device.

        On a GPU all sources are found together by relaxation, which needs the graph there: keep the
        function for several requests.
        """
        if device.type != "cuda":
            return lambda sources: self.rows(sources.numpy()).to(device)
        relaxation = Relaxation(self.graph, device)
        unreachable = torch.inf if self.unreachable is None else self.unreachable
        return lambda sources: (
            relaxation.columns(sources).T.nan_to_num(posinf=unreachable).contiguous()
        )

    def farthest(self, sweeps: int = 4) -> float:
        """Return a lower bound of the largest distance, exact on trees.

        It is at least half of it. See :func:`largest_path`.
        """
        return max(largest_path(self.graph, sweeps), self.unreachable or 0.0)


def largest_path(graph: csr_matrix, sweeps: int = 4) -> float:
    """Return a lower bound of the largest finite shortest-path length.

    Each sweep measures, in every component at once, from the vertex farthest from all those
    measured before. The second sweep is exact on trees, and any sweep gives at least half of the
    largest length.
    """
    n_components, labels = connected_components(graph, directed=False)
    _, sources = np.unique(labels, return_index=True)
    last = np.cumsum(np.bincount(labels, minlength=n_components)) - 1
    largest = 0.0
    closest = np.full(graph.shape[0], np.inf)
    for sweep in range(sweeps + 1):
        length = dijkstra(graph, directed=True, indices=sources, min_only=True)
        largest = max(largest, float(length.max()))
        # The first vertex is arbitrary: the next is the farthest from it, then it is forgotten.
        if sweep:
            length = closest = np.minimum(closest, length)
        sources = np.lexsort((length, labels))[last]
    return largest


def path_lengths(
    tasks: Sequence[tuple[Geodesics, NDArray[np.int64]]],
    *,
    dtype: torch.dtype = torch.float64,
    n_jobs: int | None = None,
) -> list[torch.Tensor]:
    """Return D[sources] of several graphs.

    Parameters
    ----------
    tasks : sequence of (Geodesics, ndarray)
        Graphs with their sources.
    dtype : torch.dtype
        Of the result; SciPy's float64 rows are rounded as they arrive.
    n_jobs : int or None
        Worker processes; ``None`` takes every core. SciPy's Dijkstra holds the interpreter lock, so
        threads would not help. One process is used when the work is small.
    """
    results = [torch.empty(len(sources), task.n, dtype=dtype) for task, sources in tasks]
    n_jobs = _worth_jobs(tasks, n_jobs)
    chunks = [
        (number, start, sources[start : start + step])
        for number, (task, sources) in enumerate(tasks)
        for step in [_chunk_rows(task.n, len(sources), n_jobs)]
        for start in range(0, len(sources), step)
    ]
    blocks = _run([(tasks[number][0].graph, index) for number, _, index in chunks], n_jobs)
    for (number, start, index), block in zip(chunks, blocks, strict=True):
        unreachable = tasks[number][0].unreachable
        if unreachable is not None:
            block[np.isinf(block)] = unreachable
        results[number][start : start + len(index)] = torch.from_numpy(block)
    return results


def _run(
    calls: list[tuple[csr_matrix, NDArray[np.int64]]], n_jobs: int
) -> Iterator[NDArray[np.float64]]:
    """Yield the shortest-path lengths of each (graph, sources) in turn."""
    if n_jobs == 1:
        for graph, index in calls:
            yield dijkstra(graph, directed=True, indices=index)
        return
    from joblib import Parallel, delayed

    # The task is SciPy's own function: a worker that had to import torch would start in seconds.
    work = (delayed(dijkstra)(graph, directed=True, indices=index) for graph, index in calls)
    yield from Parallel(n_jobs=n_jobs, backend="loky", return_as="generator")(work)


def _worth_jobs(tasks: Sequence[tuple[Geodesics, NDArray[np.int64]]], n_jobs: int | None) -> int:
    """Return the number of processes that the work repays."""
    pairs = sum(task.n * len(sources) for task, sources in tasks)
    if n_jobs == 1 or pairs < _PROCESS_PAIRS:
        return 1
    from joblib import effective_n_jobs

    available = int(effective_n_jobs(-1 if n_jobs is None else n_jobs))
    # All of the work is saved but one process's share.
    return available if pairs * (1 - 1 / available) >= _PROCESS_PAIRS else 1


def _chunk_rows(n: int, n_sources: int, n_jobs: int) -> int:
    """Return how many sources one call takes: even shares, bounded by memory."""
    return max(1, min(-(-n_sources // n_jobs), _ROWS_BYTES // (8 * n)))
