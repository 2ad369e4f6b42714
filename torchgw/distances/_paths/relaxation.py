"""Shortest paths from many sources at once, by rounds of edge relaxation on a GPU.

Dijkstra's queue takes one vertex after the other; Bellman and Ford's relaxation does the same work
for all vertices and sources in parallel. Vertices that are near in the graph are kept in one tile,
and a round visits the tiles in which something may change: those that the front of some source is
passing.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgw._tensors.cuda_graphs import GraphMemory, borrow_memory, capture
from torchgw._tensors.operations import quotient
from torchgw.distances._graph.edges import Edges

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
    """A graph laid out for relaxation on one device.

    ``order`` are the vertices in an order in which near ones follow each other, perhaps with some
    -1 between them that fill up tiles. By default work is done where the edges are, with the Triton
    kernel on a GPU that has Triton. Edges are added up in ``dtype``.
    """

    # The graph becomes a rectangular table of neighbours. A vertex with more neighbours than
    # columns has several rows, each joined to the next by an edge of length zero. In high
    # dimensions there are such hubs, nearest neighbours of thousands.

    def __init__(
        self,
        edges: Edges,
        order: Tensor | None = None,
        *,
        kernel: bool | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        here = edges.start.device
        self.device = device or here
        row_of = torch.arange(edges.n, device=here)
        if order is not None:
            edges, row_of = _renumbered(edges, order.to(here))
        # all edges of most vertices fit, and few columns are left empty
        n, source, degree = edges.n, edges.source, edges.degree
        mean = len(edges.vertex) / len(row_of)
        width = min(_MOST_EDGES, 4 * -(-int(_SPARE * mean) // 4) + 4)
        width = max(3, min(width, int(degree.max())))
        # two columns of a vertex with several rows join them; all but the first come after those of
        # all vertices
        most = torch.where(degree <= width, width, width - 2)
        more = quotient((degree - 1).clamp_(min=0), most)
        further = n + more.cumsum(0) - more
        self._rows = n + int(more.sum())
        # a table of the edges takes as much as the whole graph: each is let go as soon as it may be
        column = torch.arange(len(source), device=here).sub_(edges.start[source])
        limit = most[source]
        part = quotient(column, limit)
        column.sub_(limit.mul_(part))
        del limit
        row = torch.where(part == 0, source, further[source].add_(part).sub_(1))
        del part
        # an edge leads to that row of its end which holds the same edge in reverse
        mirror = edges.vertex.clone()
        ours, theirs = (more[end].nonzero()[:, 0] for end in (source, mirror))
        ours = ours[(source[ours] * n + mirror[ours]).argsort()]
        theirs = theirs[(mirror[theirs] * n + source[theirs]).argsort()]
        mirror[theirs] = row[ours]
        del source
        itself = torch.arange(self._rows, dtype=torch.int32, device=here)
        # where a row has no neighbour it is its own, at distance zero: nothing changes
        neighbour = itself[:, None].repeat(1, width)
        length = torch.zeros(self._rows, width, dtype=dtype, device=here)
        neighbour[row, column] = mirror.int()
        length[row, column] = edges.length.to(dtype)
        owner = torch.repeat_interleave(more, output_size=self._rows - n)
        later = itself[n:].long()
        earlier = torch.where(later == further[owner], owner, later - 1)
        neighbour[later, width - 2] = earlier.int()
        neighbour[earlier, width - 1] = later.int()
        self._neighbour, self._length, self._row_of = (
            part.to(self.device) for part in (neighbour, length, row_of)
        )
        self._rounds: dict[int, _Rounds] = {}
        self._memory: GraphMemory | None = None
        step = _IDLE_STEP if self._rows <= _IDLE_ROWS else _STEP
        self._step = (
            step * float(edges.length.sum() / len(edges.length)) if len(edges.length) else 0.0
        )
        self._kernel: Any = None
        if kernel is None:
            kernel = self.device.type == "cuda" and find_spec("triton") is not None
        if kernel:
            from torchgw.distances._paths import relaxation_triton

            self._kernel = relaxation_triton

    def columns(self, sources: Tensor) -> Tensor:
        """Compute D[:, sources], shape (n, s), float64, infinite where there is no path."""
        most = max(_LEAST_SOURCES, _TABLE_BYTES // (8 * self._rows))
        parts = [self._solve(part) for part in sources.split(most)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).double()

    def _solve(self, sources: Tensor) -> Tensor:
        row, column = self._row_of[sources], torch.arange(len(sources), device=self.device)
        if self._kernel is None:
            distance = torch.full(
                (self._rows, len(sources)), torch.inf, dtype=self._length.dtype, device=self.device
            )
            distance[row, column] = 0
            while self._relax_(distance):
                pass
            return distance[self._row_of]
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
        if self._memory is None:
            self._memory = borrow_memory(self, self.device)
        recorded = capture(advance, self._memory.stream, pool=self._memory.pool)
        return _Rounds(distance, tables[0], threshold, recorded.replay, (due, counts))

    def _relax_(self, distance: Tensor) -> bool:
        """Shorten every path by its best last edge; tell whether any became shorter."""
        step = max(1, _TABLE_BYTES // (8 * self._rows * self._neighbour.shape[1]))
        changed = torch.zeros((), dtype=torch.bool, device=self.device)
        for part in distance.split(step, dim=1):
            shorter = (part[self._neighbour.long()] + self._length[:, :, None]).amin(dim=1)
            changed |= (shorter < part).any()
            torch.minimum(part, shorter, out=part)
        return bool(changed)


def _renumbered(edges: Edges, order: Tensor) -> tuple[Edges, Tensor]:
    """Renumber the vertices of a graph: order[i], unless that is -1, becomes i; also tell them.

    The edges of a vertex stay in the order in which they were.
    """
    place = (order >= 0).nonzero()[:, 0]
    vertex = order[place]
    rank = torch.empty_like(place).scatter_(0, vertex, place)
    degree = edges.degree[vertex]
    start = edges.start.new_zeros(len(order) + 1)
    start[place + 1] = degree
    start = start.cumsum(0)
    moved = edges.start[vertex] - start[place]
    moved = moved.repeat_interleave(degree, output_size=len(edges.vertex))
    at = torch.arange(len(moved), device=order.device) + moved
    return Edges(start, rank[edges.vertex[at]], edges.length[at]), rank
