"""The vertices of a polytope that is cut again and again, of those where a concave cost is low."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from torchgw._sinkhorn.duals import TOGETHER, Array

Places = NDArray[np.int64]

# A slack that is rounding, in units of the box. A choice.
_LEAST = 1e-15


class Polytope:
    """The points x (D,) with ``normals @ x >= heights``: its vertices of a cost below ``most``.

    A cut makes vertices on edges, where a concave cost is at least that of one of the ends: each
    vertex that costs less than ``most`` lies on an edge of an earlier one that does, so that no
    others are kept. No vertex may lie on more than D faces: heights that are lowered by random
    shares of the least that matters see to it.
    """

    def __init__(
        self, low: Array, high: Array, cost: Callable[[Array], Array], most: float
    ) -> None:
        dim = len(low)
        self._cost = cost
        self.normals = np.concatenate([np.eye(dim), -np.eye(dim)])
        self.heights = np.concatenate([low, -high])
        self._generator = np.random.default_rng(0)
        self._signs = self._draw(2 * dim)
        self.faces = np.empty((0, dim), dtype=np.int64)  # those of each vertex
        self.costs = np.empty(0)
        # each vertex, and the ends of its edges, which leave a face each
        self._points = np.empty((0, 1 + dim, dim))
        sides = (np.arange(2**dim)[:, None] >> np.arange(dim)) & 1
        self._change(self.costs < most, (np.arange(dim) + dim * sides).astype(np.int64), most)

    @property
    def vertices(self) -> Array:
        """The vertices (N, D)."""
        return self._points[:, 0]

    def _draw(self, count: int) -> NDArray[np.uint64]:
        """Draw a number for each face; the sum of those of a vertex is its name."""
        return self._generator.integers(0, 2**63, count, dtype=np.uint64)

    def cut(self, normal: Array, height: float, most: float) -> None:
        """Keep the points with ``normal @ x >= height``, and vertices that cost less than most."""
        place = len(self.heights)
        self.normals = np.concatenate([self.normals, normal[None]])
        self.heights = np.append(self.heights, height)
        self._signs = np.append(self._signs, self._draw(1))
        slack = self._points @ normal - height
        above = slack >= 0
        row, left = np.nonzero(above[:, 1:] != above[:, :1])
        share = slack[row, 0] / (slack[row, 0] - slack[row, left + 1])
        start, end = self._points[row, 0], self._points[row, left + 1]
        self._points[row, left + 1] = end = start + share[:, None] * (end - start)
        faces = self.faces[row]
        faces[np.arange(len(faces)), left] = place
        faces = faces[self._cost(end) < most]
        # the two ends of an edge may both have been there
        _, first = np.unique(self._signs[faces].sum(1, dtype=np.uint64), return_index=True)
        self._change(above[:, 0] & (self.costs < most), faces[first], most)

    def _change(self, kept: NDArray[np.bool_], faces: Places, most: float) -> None:
        """Leave out vertices, and add others by their faces (N, D)."""
        step = max(1, TOGETHER // self.normals.size)
        made = [(self.faces[kept], self.costs[kept], self._points[kept])]
        for part in np.split(faces, range(step, len(faces), step)):
            # rows lead along edges
            edges = np.linalg.inv(self.normals[part].transpose(0, 2, 1))
            points = self.heights[part][:, None] @ edges  # (N, 1, D)
            costs = self._cost(points[:, 0])
            low = costs < most
            part, edges, points = part[low], edges[low], points[low]
            slack = (points @ self.normals.T - self.heights).clip(min=_LEAST)
            # the face that each edge meets first
            rates = edges @ self.normals.T  # (N, D, F)
            rates /= -slack
            np.put_along_axis(rates, part[:, None], 0.0, 2)
            ends = points + edges / rates.max(2, keepdims=True)
            made.append((part, costs[low], np.concatenate([points, ends], 1)))
        self.faces, self.costs, self._points = map(np.concatenate, zip(*made, strict=True))
