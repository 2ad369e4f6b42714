"""Shortest paths from many sources at once, by rounds of edge relaxation on a GPU.

Dijkstra's queue serialises; Bellman and Ford's relaxation does the same work for all vertices and
sources in parallel, once per edge of the longest path. On a neighbour graph that is a few hundred
passes over a table of a few megabytes, each of which takes microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import torch
from scipy.sparse import csr_matrix
from torch import Tensor

from torchgw._capture import capture

__all__ = ["Relaxation"]

# Passes between two looks at whether anything still changes.
_PASSES = 16
# Neighbours kept in the rectangular table; the rare vertex with more goes to a list of edges.
_MOST_NEIGHBOURS = 32
# So many sources on so few vertices are found by one launch, a program for each source; on more
# vertices a program's passes take too long (0.6 ms for 1.7 at 500, 34 for 8.4 at 2,000).
_ROW_VERTICES = 768
_ROW_SOURCES = 128
# Bytes of the (n, neighbours, sources) table of candidate paths.
_CANDIDATE_BYTES = 2**30


class Relaxation:
    """A graph laid out for relaxation on one device.

    Parameters
    ----------
    graph : csr_matrix, shape (n, n)
        Symmetric, non-negative edge lengths; an explicit zero is an edge.
    device : torch.device
    """

    def __init__(self, graph: csr_matrix, device: torch.device) -> None:
        n = graph.shape[0]
        degree = np.diff(graph.indptr)
        width = int(max(1, min(degree.max(initial=1), _MOST_NEIGHBOURS)))
        position = np.arange(graph.nnz) - np.repeat(graph.indptr[:-1], degree)
        vertex = np.repeat(np.arange(n), degree)
        fits = position < width
        # a vertex is its own neighbour at distance zero where it has none: nothing changes
        neighbour = np.repeat(np.arange(n)[:, None], width, axis=1)
        length = np.zeros((n, width))
        neighbour[vertex[fits], position[fits]] = graph.indices[fits]
        length[vertex[fits], position[fits]] = graph.data[fits]
        self.n = n
        self.device = device
        self._neighbour = torch.from_numpy(neighbour).to(device)
        self._length = torch.from_numpy(length).to(device)[:, :, None]
        more = ~fits
        self._extra = (
            torch.from_numpy(vertex[more]).to(device),
            torch.from_numpy(graph.indices[more].astype(np.int64)).to(device),
            torch.from_numpy(graph.data[more]).to(device)[:, None],
        )
        self._plans: dict[int, tuple[Tensor, Tensor, Callable[[], None]]] = {}
        self._kernel: Callable[..., None] | None = None
        self._row_kernel: Callable[..., None] | None = None
        if device.type == "cuda" and not more.any() and find_spec("triton") is not None:
            from torchgw.distances._triton_relaxation import relax_, relax_rows_

            self._kernel = relax_
            self._row_kernel = relax_rows_ if n <= _ROW_VERTICES else None

    def columns(self, sources: Tensor) -> Tensor:
        """Return D[:, sources], shape (n, s), float64; infinite where there is no path."""
        if self._row_kernel is not None and len(sources) >= _ROW_SOURCES:
            distance = torch.full(
                (len(sources), self.n), torch.inf, dtype=torch.float64, device=self.device
            )
            distance[torch.arange(len(sources), device=self.device), sources] = 0
            self._row_kernel(distance, self._neighbour, self._length)
            return distance.T
        width = self._length.shape[1]
        most = max(1, _CANDIDATE_BYTES // (8 * self.n * width))
        return torch.cat([self._solve(part) for part in sources.split(most)], dim=1)

    def _solve(self, sources: Tensor) -> Tensor:
        count = len(sources)
        if count not in self._plans:
            self._plans[count] = self._prepare(count)
        distance, changed, advance = self._plans[count]
        distance.fill_(torch.inf)
        distance[sources, torch.arange(count, device=self.device)] = 0
        changed.fill_(1)
        while int(changed):
            advance()
        return distance.clone()

    def _prepare(self, count: int) -> tuple[Tensor, Tensor, Callable[[], None]]:
        """Return a table of path lengths, a flag, and what makes some passes over the table."""
        shape = (self.n, count)
        distance = torch.zeros(shape, dtype=torch.float64, device=self.device)
        changed = torch.ones(1, dtype=torch.int32, device=self.device)

        def passes() -> None:
            changed.zero_()
            for _ in range(_PASSES):
                self._relax_(distance, changed)

        if self.device.type != "cuda":
            return distance, changed, passes
        # Launching a pass from Python costs several times what the pass does. The first one, which
        # is not recorded, compiles it.
        self._relax_(distance, changed)
        recorded = capture(passes, torch.cuda.Stream(self.device))
        return distance, changed, recorded.replay

    def _relax_(self, distance: Tensor, changed: Tensor) -> None:
        """Shorten every path by its best last edge, and note whether any became so."""
        if self._kernel is not None:
            self._kernel(distance, self._neighbour, self._length, changed)
            return
        shorter = (distance[self._neighbour] + self._length).amin(dim=1)
        vertex, neighbour, length = self._extra
        if len(vertex):
            index = vertex[:, None].expand(-1, distance.shape[1])
            shorter.scatter_reduce_(0, index, distance[neighbour] + length, "amin")
        changed.logical_or_((shorter < distance).any())
        torch.minimum(distance, shorter, out=distance)
