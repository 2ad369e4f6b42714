"""The vertices of a polytope that is cut again and again, by double description."""

import numpy as np
from numpy.typing import NDArray

from torchgw._sinkhorn.duals import Array

Places = NDArray[np.int64]


class Polytope:
    """The points x (D,) with ``normals @ x >= heights``: its vertices, each on D faces.

    No vertex may lie on more faces: heights that are lowered by random shares of the least that
    matters see to it.
    """

    def __init__(self, low: Array, high: Array, seed: int = 0) -> None:
        dim = len(low)
        self.normals = np.concatenate([np.eye(dim), -np.eye(dim)])
        self.heights = np.concatenate([low, -high])
        sides = (np.arange(2**dim)[:, None] >> np.arange(dim)) & 1
        self.vertices = np.where(sides == 1, high, low)
        self.faces = (np.arange(dim) + dim * sides).astype(np.int64)  # (N, D)
        self._generator = np.random.default_rng(seed)
        self._signs = self._draw(2 * dim)

    def _draw(self, count: int) -> NDArray[np.uint64]:
        """Draw a number for each face; the sum of those of an edge is its name."""
        return self._generator.integers(0, 2**63, count, dtype=np.uint64)

    def cut(self, normal: Array, height: float) -> None:
        """Keep the points with ``normal @ x >= height``."""
        above = self.vertices @ normal - height
        gone = above < 0
        place = len(self.heights)
        self.normals = np.concatenate([self.normals, normal[None]])
        self.heights = np.append(self.heights, height)
        self._signs = np.append(self._signs, self._draw(1))
        if not gone.any():
            return
        # an edge leaves D - 1 faces and has two ends: if one is cut off, there is a new vertex
        names = self._signs[self.faces[gone]]
        edges = names.sum(1, dtype=np.uint64)[:, None] - names
        _, ends, counts = np.unique(edges, return_index=True, return_counts=True)
        row, missing = np.divmod(ends[counts == 1], edges.shape[1])
        faces = self.faces[gone][row]
        faces[np.arange(len(faces)), missing] = place
        made = np.linalg.solve(self.normals[faces], self.heights[faces][:, :, None])[:, :, 0]
        self.vertices = np.concatenate([self.vertices[~gone], made])
        self.faces = np.concatenate([self.faces[~gone], faces])
