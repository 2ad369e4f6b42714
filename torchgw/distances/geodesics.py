"""Shortest-path lengths of a graph: by Dijkstra's queue, or by rounds of relaxation on a GPU."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._boundary.console import counted
from torchgw._tensors.cuda_graphs import GraphMemory, borrow_memory, capture
from torchgw._tensors.deadline import foresee
from torchgw._tensors.machine import slowness
from torchgw._tensors.operations import BLOCK_BYTES, quotient
from torchgw.distances._graph.edges import VERTICES, Edges, from_csr

# Vertices above which a graph without an order is given one for relaxation. [L309]
_ORDERED_VERTICES = 10_000
# Seconds on an H200: of relaxation, for each source and edge; and of closing a table of all pairs,
# for each of n^3 and of n. [L166] [L540]
_RELAXATION_SECONDS = 1.8e-10
_CLOSING_SECONDS = (3.6e-13, 3.7e-6)
# Folder of Linux whose files are in memory.
_IN_MEMORY = "/dev/shm"
# Calls for each process: several, so that processes end together and progress shows. [L309]
_SHARES = 4
# Up to so many edges the graph is laid out on the host: each of the 40 operations would take a GPU
# longer to launch. [L86]
_FEW_EDGES = 8_192
# Shortest-path work, in (source, vertex) pairs, from which on worker processes are started: at 0.2
# us a pair it repays their start of 1.4 s. That is two sides of about 2,000 vertices with many
# cores. [L16]
_PROCESS_PAIRS = 7_500_000
# Seconds of Dijkstra's queue for each node that a path leads to, and for each edge. [L1602]
_NODE, _EDGE = 1.15e-7, 4.7e-9


class Geodesics:
    """A symmetric graph, and the distance given to pairs that no path connects.

    :func:`torchgw.distances.connect` makes it; every geodesic provider takes it as a graph.

    Parameters
    ----------
    graph : scipy.sparse.csr_matrix, shape (n, n), or Edges
        Symmetric, non-negative edge lengths; an explicit zero is an edge of length zero.
    unreachable : float or None
        Distance of a pair that no path connects; ``None`` for a connected graph.
    order : Tensor of int64, optional
        Vertices in an order in which near ones follow each other, if one is known; -1 is none, and
        fills up a tile of 64.
    """

    def __init__(
        self,
        graph: scipy.sparse.csr_matrix | Edges,
        unreachable: float | None = None,
        order: torch.Tensor | None = None,
    ) -> None:
        self.unreachable, self.order = unreachable, order
        self.edges = graph if isinstance(graph, Edges) else from_csr(graph)

    def forget(self) -> None:
        """Let all edges go, where nothing more will be asked."""
        self.edges = Edges(
            *(part.new_zeros(size) for part, size in zip(self.edges, (1, 0, 0), strict=True))
        )
        vars(self).pop("graph", None)

    @property
    def n(self) -> int:
        """Number of vertices."""
        return self.edges.n

    @property
    def shape(self) -> tuple[int, int]:
        """(n, n), as a matrix has."""
        return self.n, self.n

    @cached_property
    def graph(self) -> scipy.sparse.csr_matrix:
        """The graph as a SciPy matrix."""
        return self.edges.csr()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the copy in SciPy's format out of pickles."""
        return {name: value for name, value in self.__dict__.items() if name != "graph"}

    def rows(
        self,
        sources: NDArray[np.int64],
        *,
        dtype: torch.dtype = torch.float64,
        n_jobs: int | None = 1,
    ) -> torch.Tensor:
        """Compute D[sources], shape (s, n), on the CPU, by one run of Dijkstra for each source."""
        return path_lengths([(self, sources)], dtype=dtype, n_jobs=n_jobs)[0]

    def reader(
        self, device: torch.device, dtype: torch.dtype = torch.float64, *, last: bool = False
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Make a function from sources, int64 of shape (s,), to D[sources] on a device.

        On a GPU that has Triton it works on all sources together by relaxation, and holds the graph
        there: keep the function for several requests; it adds edges up in ``dtype``, which its rows
        have. If it is the ``last`` one, the edges, which it has in a form of its own, are let go
        there. Otherwise processes of the CPU share the sources.
        """
        if device.type != "cuda" or find_spec("triton") is None:
            rows = partial(self.rows, dtype=dtype, n_jobs=None)
            return lambda sources: rows(sources.cpu().numpy()).to(device)
        few = len(self.edges.vertex) <= _FEW_EDGES
        edges = self.edges.to(torch.device("cpu") if few else device)
        order = self._device_order(edges.start.device)
        relaxation = EdgeRelaxation(edges, order, device=device, dtype=dtype)
        if last and self.unreachable is None:
            # where there are pieces they are counted later
            self.forget()
        unreachable = torch.inf if self.unreachable is None else self.unreachable
        return lambda sources: (
            relaxation.columns(sources).T.nan_to_num_(posinf=unreachable).contiguous()
        )

    def state(self) -> dict[str, Any]:
        """Give what :meth:`restore` needs."""
        return {"edges": tuple(self.edges), "unreachable": self.unreachable, "order": self.order}

    @classmethod
    def restore(cls, state: dict[str, Any]) -> Geodesics:
        """Make the graph that had this state."""
        return cls(Edges(*state["edges"]), state["unreachable"], state["order"])

    def _device_order(self, device: torch.device) -> torch.Tensor | None:
        """Find the order of the vertices; that of a large graph without one from its structure."""
        if self.order is None and self.n > _ORDERED_VERTICES:
            order = scipy.sparse.csgraph.reverse_cuthill_mckee(self.graph, symmetric_mode=True)
            self.order = torch.from_numpy(order.astype(np.int64))
        return None if self.order is None else self.order.to(device)

    def all_pairs(self, device: torch.device) -> torch.Tensor:
        """Compute D, shape (n, n), float64, on a GPU."""
        # a dense graph has too many edges for relaxation from every vertex
        n = self.n
        slots = 1.3 * len(self.edges.vertex)
        closing = _CLOSING_SECONDS[0] * n**3 + _CLOSING_SECONDS[1] * n
        if find_spec("triton") is None or _RELAXATION_SECONDS * n * slots < closing:
            return self.reader(device)(torch.arange(n, device=device))
        from torchgw.distances._paths.min_plus_triton import close_

        edges = self.edges.to(device)
        table = torch.full((n, n), torch.inf, dtype=torch.float64, device=device)
        table[edges.source, edges.vertex] = edges.length
        unreachable = torch.inf if self.unreachable is None else self.unreachable
        return close_(table.fill_diagonal_(0)).nan_to_num_(posinf=unreachable)

    def farthest(self, sweeps: int = 4) -> float:
        """Find a lower bound of the largest distance, at least half of it, and exact on trees."""
        return max(largest_path(self.graph, sweeps), self.unreachable or 0.0)


def largest_path(graph: scipy.sparse.csr_matrix, sweeps: int = 4) -> float:
    """Find a lower bound of the largest finite shortest-path length, at least half of it."""
    # Each sweep measures, in every component at once, from the vertex farthest from all those
    # measured before. The second sweep is exact on trees.
    n_components, labels = scipy.sparse.csgraph.connected_components(graph, directed=False)
    _, sources = np.unique(labels, return_index=True)
    last = np.cumsum(np.bincount(labels, minlength=n_components)) - 1
    largest = 0.0
    closest = np.full(graph.shape[0], np.inf)
    for sweep in range(sweeps + 1):
        length = scipy.sparse.csgraph.dijkstra(graph, directed=True, indices=sources, min_only=True)
        largest = max(largest, float(length.max()))
        # the first vertex is arbitrary: the next is the farthest from it, then it is forgotten
        if sweep:
            length = closest = np.minimum(closest, length)
        sources = np.lexsort((length, labels))[last]
    return largest


def path_lengths(
    tasks: Sequence[tuple[Geodesics, NDArray[np.int64]]],
    *,
    dtype: torch.dtype = torch.float64,
    n_jobs: int | None = None,
    progress: bool = False,
) -> list[torch.Tensor]:
    """Compute D[sources] of several graphs by processes that share memory if that pays."""
    # SciPy's Dijkstra holds the interpreter lock: threads would not help.
    n_jobs = _worth_jobs(tasks, n_jobs)
    # even shares, several for each job, within memory
    shares = n_jobs * _SHARES if n_jobs > 1 else 1
    shapes = [(len(sources), task.n) for task, sources in tasks]
    size = dtype.itemsize * sum(rows * n for rows, n in shapes)
    # a process that writes beyond the room in memory, 64 MB in a container, is killed
    roomy = os.path.isdir(_IN_MEMORY) and shutil.disk_usage(_IN_MEMORY).free > size
    place = _IN_MEMORY if roomy else None
    with TemporaryDirectory(dir=place, ignore_cleanup_errors=True) as folder:
        results = [_rows_of(shape, dtype, n_jobs > 1, folder, i) for i, shape in enumerate(shapes)]
        calls = [
            (task.graph, sources[start : start + step], rows[start : start + step])
            for (task, sources), rows in zip(tasks, results, strict=True)
            for step in [max(1, min(-(-len(sources) // shares), BLOCK_BYTES // (8 * task.n)))]
            for start in range(0, len(sources), step)
        ]
        work = sum(
            len(sources) * (_NODE * task.n + _EDGE * len(task.edges.vertex))
            for task, sources in tasks
        )
        total = sum(map(len, results))
        foresee(slowness() * work / n_jobs, f"the paths from {total:,} nodes")
        # no bar for a single process, which is done in a second
        with counted(total, "geodesics, row", shown=progress and n_jobs > 1) as advance:
            for count in _run(calls, n_jobs):
                advance(count)
    tables = [torch.from_numpy(rows) for rows in results]
    for table, (task, _) in zip(tables, tasks, strict=True):
        if task.unreachable is not None:
            table[table.isinf()] = task.unreachable
    return tables


def _rows_of(
    shape: tuple[int, int], dtype: torch.dtype, shared: bool, folder: str, number: int
) -> NDArray[Any]:
    """Make an array to write to, in a file that other processes can map if it is shared."""
    kind = torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    if not shared or 0 in shape:
        return np.empty(shape, kind)
    return np.memmap(os.path.join(folder, str(number)), kind, mode="w+", shape=shape)


def _run(
    calls: list[tuple[scipy.sparse.csr_matrix, NDArray[np.int64], NDArray[Any]]], n_jobs: int
) -> Iterator[int]:
    """Fill the rows of each (graph, sources, rows), and yield how many were filled."""

    # A function defined here is sent by value: to import it, a worker would import torch, which
    # takes seconds.
    def fill(graph: scipy.sparse.csr_matrix, index: NDArray[np.int64], rows: NDArray[Any]) -> int:
        rows[:] = scipy.sparse.csgraph.dijkstra(graph, directed=True, indices=index)
        return len(index)

    if n_jobs == 1:
        yield from (fill(*call) for call in calls)
        return
    from joblib import Parallel, delayed

    work = (delayed(fill)(*call) for call in calls)
    yield from Parallel(n_jobs=n_jobs, backend="loky", return_as="generator")(work)


def _worth_jobs(tasks: Sequence[tuple[Geodesics, NDArray[np.int64]]], n_jobs: int | None) -> int:
    """Choose the number of processes: one, unless the work repays more."""
    pairs = sum(task.n * len(sources) for task, sources in tasks)
    if n_jobs == 1 or pairs < _PROCESS_PAIRS:
        return 1
    from joblib import effective_n_jobs

    available = int(effective_n_jobs(-1 if n_jobs is None else n_jobs))
    # all of the work but one process's share is saved
    return available if pairs * (1 - 1 / available) >= _PROCESS_PAIRS else 1


# Rounds between two checks of whether anything still changes. [L148]
_ROUNDS = 16
# Edges in a row of the table, as a share of the mean degree. A vertex with more has several rows.
# [L307]
_SPARE = 1.25
_MOST_EDGES = 32
# Path length, in mean edge lengths, by which a round goes further. Long paths that are extended
# before the short ones are final have to be extended again; a GPU that is otherwise idle can afford
# that. [L156, L164, L831]
_STEP = 2.0
_IDLE_ROWS = 2**17
_IDLE_STEP = 4.0
# On a table of so few rows one launch finds all paths, with a program for each source; on more rows
# a program's passes take too long. [L1286]
_ONE_LAUNCH_ROWS = 1024
# Sources that a table of so few rows has room for at least: recording another graph of launches
# would take longer than the rounds of some empty columns. [L163]
_SHARED_SOURCES = 16
_SHARED_ROWS = 2**16
# Bytes of the (rows, sources) table of path lengths, and sources that it has room for at least:
# half as many would take twice the rounds. [L307] [L539]
_TABLE_BYTES = 2**30
_LEAST_SOURCES = 32


class _Rounds(NamedTuple):
    """A table for some number of sources and the rounds over it, kept for the next request."""

    distance: Tensor  # (sources, rows)
    pending: Tensor  # (sources, tiles) float32, shortest path that a visit would find
    threshold: Tensor  # (1,) float32, path length that the rounds have reached
    advance: Callable[[], None]
    held: tuple[Tensor, ...]  # other tensors that recorded launches write to


class EdgeRelaxation:
    """A graph laid out for relaxation on one device, of all vertices and sources in parallel.

    A round visits the tiles in which something may change: those that fronts are passing.
    ``order`` are the vertices in an order in which near ones follow each other, perhaps with some
    -1 between them that fill up tiles. By default work is done where the edges are. Edges are added
    up in ``dtype``.
    """

    # The graph becomes a rectangular table of neighbours. A vertex with more neighbours than
    # columns has several rows, each joined to the next by an edge of length zero. In high
    # dimensions there are such hubs, nearest neighbours of thousands.

    def __init__(
        self,
        edges: Edges,
        order: Tensor | None = None,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        from torchgw.distances._paths import relaxation_triton

        here = edges.start.device
        self.device = device or here
        order = torch.arange(edges.n, device=here) if order is None else order.to(here)
        self._neighbour, self._length, self._row_of = (
            part.to(self.device) for part in _laid_out(edges, order, dtype)
        )
        self._rows = len(self._neighbour)
        self._rounds: dict[int, _Rounds] = {}
        self._memory: GraphMemory | None = None
        step = _IDLE_STEP if self._rows <= _IDLE_ROWS else _STEP
        self._step = (
            step * float(edges.length.sum() / len(edges.length)) if len(edges.length) else 0.0
        )
        self._kernel = relaxation_triton

    def columns(self, sources: Tensor) -> Tensor:
        """Compute D[:, sources], shape (n, s), infinite where there is no path."""
        most = max(_LEAST_SOURCES, _TABLE_BYTES // (8 * self._rows))
        parts = [self._solve(part) for part in sources.split(most)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _solve(self, sources: Tensor) -> Tensor:
        row, column = self._row_of[sources], torch.arange(len(sources), device=self.device)
        if self._rows <= _ONE_LAUNCH_ROWS:
            distance = torch.full(
                (len(sources), self._rows), torch.inf, dtype=self._length.dtype, device=self.device
            )
            distance[column, row] = 0
            self._kernel.relax_rows_(distance, self._neighbour, self._length)
            return distance[:, self._row_of].T
        count = len(sources)
        if self._rows <= _SHARED_ROWS:
            # rounded up, so that graphs are recorded for few counts
            count = _SHARED_SOURCES * -(-count // _SHARED_SOURCES)
        if count not in self._rounds:
            if self._rows > _SHARED_ROWS:
                # another table of path lengths takes as much as all edges
                self._rounds.clear()
            self._rounds[count] = self._prepare(count)
        rounds = self._rounds[count]
        rounds.distance.fill_(torch.inf)
        rounds.distance[column, row] = 0
        near = quotient(self._neighbour[row].long(), self._kernel.ROWS)
        rounds.pending[column, quotient(row, self._kernel.ROWS)] = 0
        rounds.pending[column[:, None], near] = 0
        rounds.threshold.fill_(0)
        while float(rounds.threshold) < torch.inf:
            rounds.advance()
        return rounds.distance[: len(sources), self._row_of].T

    def _prepare(self, count: int) -> _Rounds:
        """Make a table of path lengths for ``count`` sources, and a call for rounds over it."""
        kernel = self._kernel
        distance = torch.zeros(count, self._rows, dtype=self._length.dtype, device=self.device)
        shape = 2, count, -(-self._rows // kernel.ROWS)
        pending = torch.full(shape, torch.inf, dtype=torch.float32, device=self.device)
        threshold = torch.zeros(1, dtype=torch.float32, device=self.device)
        tables = pending.unbind()
        due = torch.empty(tables[0].numel(), dtype=torch.int32, device=self.device)
        counts = torch.zeros(_ROUNDS, dtype=torch.int32, device=self.device)

        def advance() -> None:
            counts.zero_()
            for number in range(_ROUNDS):
                now, later = tables[number % 2], tables[1 - number % 2]
                kernel.relax_(
                    distance, self._neighbour, self._length, (now, later), threshold,
                    number * self._step, due, counts[number:],
                )  # fmt: skip
            # the next rounds begin at the shortest pending path; infinity is the end
            # by operations that are loaded, as those of `_tensors/operations`
            ends = [threshold.add_(_ROUNDS * self._step), pending[0].min()[None]]
            torch.amax(torch.stack(ends), 0, out=threshold)

        if self.device.type != "cuda":
            return _Rounds(distance, tables[0], threshold, advance, (due, counts))
        # Launching a round from Python takes several times as long as the round. The first rounds,
        # over nothing, compile the kernel.
        advance()
        if self._memory is None or self._memory.is_broken:
            self._memory = borrow_memory(self, self.device)
        recorded = capture(advance, self._memory.stream, pool=self._memory.pool)
        again = advance if recorded is None else recorded.replay
        return _Rounds(distance, tables[0], threshold, again, (due, counts))


def _laid_out(edges: Edges, order: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Lay a graph out as a table: neighbours and lengths (rows, width), row of each vertex (n,).

    Vertex order[i], unless that is -1, has row i.
    """
    here, size = order.device, len(order)
    filled = (order >= 0).nonzero()[:, 0]
    vertex = order[filled]
    row_of = torch.empty_like(filled).scatter_(0, vertex, filled)
    degree, begin = torch.zeros_like(order), torch.zeros_like(order)
    degree[filled], begin[filled] = edges.degree[vertex], edges.start[vertex]
    # all edges of most vertices fit, and few columns are left empty
    mean = len(edges.vertex) / edges.n
    width = min(_MOST_EDGES, 4 * -(-int(_SPARE * mean) // 4) + 4)
    width = max(3, min(width, int(degree.max())))
    # two columns of a vertex with several rows join them; all but the first come after those of all
    # vertices
    most = torch.where(degree <= width, width, width - 2)
    more = quotient((degree - 1).clamp_(min=0), most)
    further = size + more.cumsum(0) - more
    rows = size + int(more.sum())

    def edges_of(some: Tensor) -> tuple[Tensor, ...]:
        """List where edges of some places begin, their rows and columns, ends, and numbers."""
        count = degree[some]
        source = some.repeat_interleave(count)
        column = torch.arange(len(source), device=here)
        column -= (count.cumsum(0) - count).repeat_interleave(count)
        number = begin[source] + column
        part = quotient(column, most[source])
        column -= most[source] * part
        row = torch.where(part == 0, source, further[source] + part - 1)
        return source, row, column, row_of[edges.vertex[number]], number

    source, row, _, end, _ = edges_of(more.nonzero()[:, 0])
    several, by = (source * size + end).sort()
    row_of_several = row[by]
    itself = torch.arange(rows, dtype=torch.int32, device=here)
    # where a row has no neighbour it is its own, at distance zero: nothing changes
    neighbour = itself[:, None].repeat(1, width)
    length = torch.zeros(rows, width, dtype=dtype, device=here)
    # tables of all edges would take several times as much as the graph
    for some in torch.arange(size, device=here).split(VERTICES):
        source, row, column, end, number = edges_of(some)
        # an edge leads to that row of its end which holds the same edge in reverse
        far = more[end].nonzero()[:, 0]
        end[far] = row_of_several[torch.searchsorted(several, end[far] * size + source[far])]
        neighbour[row, column] = end.int()
        length[row, column] = edges.length[number].to(dtype)
    owner = torch.repeat_interleave(more, output_size=rows - size)
    later = itself[size:].long()
    earlier = torch.where(later == further[owner], owner, later - 1)
    neighbour[later, width - 2] = earlier.int()
    neighbour[earlier, width - 1] = later.int()
    return neighbour, length, row_of
