"""Surfaces: triangles whose distances are lengths of paths that lie on them.

A path along edges zigzags, and is too long by several percent wherever it leads. Here a vertex is
also joined to vertices a few triangles away, by the straight line that unfolding the triangles
between them gives: shortest paths among all these edges are paths on the surface, so they are never
shorter than the distance along it, and longer by a fraction of a percent.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._boundary.arrays import check_points, to_numpy, to_tensor
from torchgw._errors import InvalidInputError, InvalidTypeError
from torchgw.distances._graph.edges import Edges, symmetric_edges

# What surfaces are made of: an array of vertices (n, d) and one of triangles (k, 3).
Triangles = tuple[Any, NDArray[np.int64]]


def as_triangles(name: str, value: Any) -> Triangles | None:
    """Read a surface of trimesh, PyVista, PyTorch Geometric or a pair; ``None`` if it is none."""
    found = _parts(name, value)
    if found is None:
        return None
    vertices, faces = check_points(f"{name}.vertices", found[0]), to_numpy(found[1])
    if not 2 <= vertices.shape[1] <= 3:
        raise InvalidInputError(
            f"The vertices of the surface `{name}` must have shape (n, 3), or (n, 2) in the plane; "
            f"got {tuple(vertices.shape)}."
        )
    if faces.ndim == 2 and not len(faces):
        raise InvalidInputError(
            f"The surface `{name}` has no faces. Pass its vertices alone, which are points."
        )
    if faces.ndim != 2 or faces.shape[1] != 3:
        raise InvalidInputError(
            f"The faces of the surface `{name}` must be triangles, integers of shape (k, 3); got "
            f"{faces.shape}. Triangulate others first: mesh.triangulate() of PyVista, "
            "trimesh.geometry.triangulate_quads(faces)."
        )
    if faces.dtype.kind not in "iu":
        raise InvalidTypeError(
            f"The faces of the surface `{name}` must be numbers of vertices, integers; got "
            f"{faces.dtype}. A surface is (vertices, faces), in this order; pass "
            "(vertices, faces.astype(int)) if that is what they are."
        )
    if not 0 <= int(faces.min()) <= int(faces.max()) < len(vertices):
        raise InvalidInputError(
            f"The faces of the surface `{name}` must be within 0 and n - 1 = {len(vertices) - 1}; "
            f"got {faces.min()} to {faces.max()}. Files that count from 1 need faces - 1."
        )
    return vertices, faces.astype(np.int64)


def _parts(name: str, value: Any) -> tuple[Any, Any] | None:
    """Find the vertices and the faces of what may be a surface."""
    if isinstance(value, (tuple, list)):
        if any(hasattr(part, "vertices") and hasattr(part, "faces") for part in value[:1]):
            raise InvalidTypeError(
                f"`{name}` must be one surface; got a {type(value).__name__} of them. Lists of "
                "surfaces are for torchgw.solve_many and torchgw.pairwise."
            )
        # points may come as a list of two rows, which have one axis each
        axes = [_axes(part) for part in value] if len(value) == 2 else []
        if axes == [2, 1]:
            raise InvalidTypeError(
                f"The faces of the surface `{name}` must have shape (k, 3). Pass (mesh.points, "
                "mesh.regular_faces) of PyVista, or faces.reshape(-1, 4)[:, 1:] where a 3 is "
                "before each triangle."
            )
        return (value[0], value[1]) if axes == [2, 2] else None
    if hasattr(value, "vertices") and hasattr(value, "faces"):
        return value.vertices, value.faces
    if hasattr(value, "vertices") and hasattr(value, "bounds"):
        raise InvalidTypeError(
            f"`{name}` must be points or a surface; got a {type(value).__name__}, which has no "
            f"faces. Pass its points, {name}.vertices."
        )
    if hasattr(value, "geometry") and hasattr(value, "graph") and hasattr(value, "bounds"):
        raise InvalidTypeError(
            f"`{name}` must be one surface; got a {type(value).__name__} of several. Pass "
            f"{name}.to_mesh() of trimesh, which joins them, or one of {name}.geometry.values()."
        )
    if hasattr(value, "points") and hasattr(value, "cells_dict"):
        raise InvalidTypeError(
            f"`{name}` must be points or a surface; got a {type(value).__name__} of cells. Pass "
            f"({name}.points, {name}.cells_dict['triangle'])."
        )
    if hasattr(value, "n_blocks") and hasattr(value, "combine"):
        raise InvalidTypeError(
            f"`{name}` must be one surface; got a {type(value).__name__} of several. Pass "
            f"{name}.combine().extract_surface().triangulate(), which joins them, or one of them."
        )
    if hasattr(value, "points") and hasattr(value, "n_points") and hasattr(value, "n_cells"):
        return value.points, _padded(name, value)
    if getattr(value, "face", None) is not None and getattr(value, "pos", None) is not None:
        return value.pos, to_tensor(f"{name}.face", value.face).T
    return None


def _axes(part: Any) -> int:
    """Count the axes of an array or of nested lists."""
    if hasattr(part, "ndim"):
        return int(part.ndim)
    count = 0
    while isinstance(part, (list, tuple)) and len(part):
        part, count = part[0], count + 1
    return count


def _padded(name: str, value: Any) -> NDArray[Any]:
    """Read the faces of a PyVista surface, each with its number of vertices before it."""
    flat = getattr(value, "faces", None)
    if flat is None:
        raise InvalidTypeError(
            f"`{name}` must be a surface; got {type(value).__name__}. Pass "
            f"{name}.extract_surface().triangulate(), or its points."
        )
    flat = np.asarray(flat)
    rows = flat.reshape(-1, 4) if len(flat) % 4 == 0 else flat[:, None]
    if not len(rows) or rows.shape[1] != 4 or (rows[:, 0] != 3).any():
        raise InvalidInputError(
            f"The faces of the surface `{name}` must be triangles. Pass {name}.triangulate(), or "
            f"{name}.points if it has no faces."
        )
    return rows[:, 1:]


# Triangles that a straight edge may cross. [L1357]
_CROSSED = 4

Points = NDArray[np.float64]
Index = NDArray[np.int64]


class Surface:
    """A triangulated surface, as :func:`torchgw.solve` takes it for X or Y.

    Distances are lengths of paths along the surface, and weights areas. Vertices at the same place
    are joined, as those of triangles that share none (STL files) or of seams. Pieces that do not
    hang together, single vertices too, are joined by the shortest lines between them, with a
    warning. Paths do not cross an edge of three or more triangles but at its ends.

    Parameters
    ----------
    vertices : array-like, shape (n, 3), or (n, 2) in the plane
        Where the vertices are. A surface of trimesh, PyVista or PyTorch Geometric (``pos`` and
        ``face``) can take the place of both arguments.
    faces : array-like of int, shape (k, 3)
        The triangles, by their vertices, in any orientation.

    Attributes
    ----------
    vertices : Tensor, shape (n, d), float64
        On the CPU.
    faces : Tensor, shape (k, 3), int64
        On the CPU.
    areas : ndarray, shape (n,), float64
        A third of the area of the triangles around each vertex. Vertices at the same place have
        equal shares of it, one without triangles has none.

    Raises
    ------
    InvalidInputError, InvalidTypeError
        If the faces are no triangles between the vertices, or have no area.

    Examples
    --------
    >>> from torchgw.distances import Surface
    >>> square = Surface([[0, 0], [1, 0], [1, 1], [0, 1.0]], [[0, 1, 2], [0, 2, 3]])
    >>> square.graph().toarray().round(2)[1]
    array([1.  , 0.  , 1.  , 1.41])
    """

    def __init__(self, vertices: Any, faces: Any = None, *, name: str = "surface") -> None:
        found = as_triangles(name, vertices if faces is None else (vertices, faces))
        if found is None:
            raise InvalidInputError(
                "`vertices` and `faces` must be arrays of shape (n, 3) and (k, 3), or `vertices` a "
                f"surface of trimesh or PyVista; got {type(vertices).__name__}."
            )
        given = found[0]
        # where a solve computes, as for other inputs
        self.device = None if not isinstance(self._given(vertices), Tensor) else given.device
        self.vertices: Tensor = given.detach().cpu().double()
        self.faces = torch.from_numpy(found[1])
        if not float(self.areas.sum()) > 0:
            raise InvalidInputError(f"The triangles of `{name}` have no area.")

    @staticmethod
    def _given(vertices: Any) -> Any:
        """Find the array of vertices in what was given."""
        if isinstance(vertices, (tuple, list)) and len(vertices):
            return vertices[0]
        return getattr(vertices, "pos", vertices)

    @property
    def n(self) -> int:
        """Number of vertices."""
        return len(self.vertices)

    @property
    def shape(self) -> tuple[int, int]:
        """(n, n), as a matrix of distances has."""
        return self.n, self.n

    @cached_property
    def _merged(self) -> _Merged:
        return _merge(to_numpy(self.vertices), to_numpy(self.faces))

    @cached_property
    def areas(self) -> Points:
        """Area around each vertex, shape (n,)."""
        points, faces, place, _ = self._merged
        third = _areas(points, faces) / 3
        each = np.bincount(faces.ravel(), np.repeat(third, 3), minlength=len(points))
        return (each / np.bincount(place))[place]

    @property
    def weights(self) -> Points:
        """Share of the area around each vertex, shape (n,)."""
        return self.areas / self.areas.sum()

    @property
    def joined(self) -> tuple[Points, Index, Index]:
        """Places (p, 3), triangles between them (k, 3), and the place of each vertex (n,)."""
        return self._merged[:3]

    @property
    def is_oriented(self) -> bool:
        """Whether neighbouring triangles are turned the same way, as where all look outside."""
        # then no side leads twice from one end to the other
        ends, _ = _sides(self._merged.points, self._merged.faces)
        return len(np.unique(ends, axis=0)) == len(ends)

    @cached_property
    def edges(self) -> Edges:
        """Edges of the triangles and straight lines over a few of them, with their lengths."""
        points, faces, place, first = self._merged
        ends, length = _sides(points, faces)
        lines, lengths = _lines(points, faces)
        ends, length = np.concatenate([ends, lines]), np.concatenate([length, lengths])
        # the shortest of several lines between two vertices
        (low, high), order = np.sort(ends, axis=1).T, np.argsort(length, kind="stable")
        at = order[np.unique((low * self.n + high)[order], return_index=True)[1]]
        low, high, length = first[low[at]], first[high[at]], length[at]
        # vertices at the same place are no distance apart
        again = np.nonzero(first[place] != np.arange(self.n))[0]
        low, high = np.r_[low, first[place[again]]], np.r_[high, again]
        length = np.r_[length, np.zeros(len(again))]
        return symmetric_edges(self.n, *map(torch.from_numpy, (low, high, length)))

    def graph(self) -> scipy.sparse.csr_matrix:
        """Give the edges and their lengths as a SciPy matrix, (n, n), of any number of pieces."""
        return self.edges.csr()

    def __repr__(self) -> str:
        """Summarise in a line."""
        return f"Surface({self.n:,} vertices, {len(self.faces):,} triangles)"


def as_surface(name: str, value: Any) -> Surface | None:
    """Make a surface of one of another package or a pair of arrays; ``None`` if it is none."""
    if isinstance(value, Surface):
        return value
    return None if as_triangles(name, value) is None else Surface(value, name=name)


class _Merged(NamedTuple):
    """A surface each of whose places has one vertex."""

    points: Points  # (p, 3)
    faces: Index  # (k, 3), each triangle once, none with two ends at one place
    place: Index  # (n,), place of each vertex as given
    first: Index  # (p,), a vertex at each place


def _merge(vertices: Points, faces: Index) -> _Merged:
    points, first, place = np.unique(vertices, axis=0, return_index=True, return_inverse=True)
    place = place.reshape(-1)
    corners = place[faces]
    kept = (corners != np.roll(corners, 1, axis=1)).all(1)
    _, once = np.unique(np.sort(corners[kept], axis=1), axis=0, return_index=True)
    if points.shape[1] == 2:
        points = np.column_stack([points, np.zeros(len(points))])
    return _Merged(points, corners[kept][np.sort(once)], place, first)


def _areas(points: Points, faces: Index) -> Points:
    one, two, three = (points[faces[:, corner]] for corner in range(3))
    return np.linalg.norm(np.cross(two - one, three - one), axis=1) / 2


def _sides(points: Points, faces: Index) -> tuple[Index, Points]:
    """List the sides of all triangles, those of two triangles twice, with their lengths."""
    ends = np.concatenate([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]])
    return ends, _apart(points, ends[:, 0], ends[:, 1])


def _apart(points: Points, one: Index, other: Index) -> Points:
    return np.linalg.norm(points[one] - points[other], axis=1)


class _Fan(NamedTuple):
    """Lines from vertices through sides of triangles, unfolded into a plane of each vertex."""

    side: Index  # (s,), by its number among the sides of all triangles
    source: Index  # (s,), the vertex, which lies at the origin of its plane
    near: Index  # (s,), the ends of the side
    far: Index
    left: Points  # (s, 2), where these lie
    right: Points
    first: Points  # (s, 2), the directions that lines lead between
    last: Points

    def taken(self, kept: Any) -> _Fan:
        """Keep some."""
        return _Fan(*(part[kept] for part in self))


def _lines(points: Points, faces: Index) -> tuple[Index, Points]:
    """List the straight lines from a vertex to another over up to ``_CROSSED`` triangles."""
    sides, length = _sides(points, faces)
    count, twin = len(faces), _twins(sides)
    apex = np.concatenate([faces[:, 2], faces[:, 0], faces[:, 1]])
    near, far = sides.T
    along, away = _unfold(length, _apart(points, apex, near), _apart(points, apex, far))
    at = np.column_stack([-along, away]), np.column_stack([length - along, away])
    fan = _Fan(np.arange(len(sides)), apex, near, far, *at, *at)
    found: list[tuple[Index, Points]] = [(np.empty((0, 2), np.int64), np.empty(0))]
    for _ in range(_CROSSED - 1):
        fan = fan.taken(twin[fan.side] >= 0)
        behind = twin[fan.side]
        _, source, near, far, left, right, first, last = fan
        corner, base = apex[behind], length[fan.side]
        along, away = _unfold(base, _apart(points, corner, near), _apart(points, corner, far))
        axis = (right - left) / base[:, None]
        # the plane is laid out so that the source lies on the right side of left to right
        beyond = np.column_stack([-axis[:, 1], axis[:, 0]])
        there = left + along[:, None] * axis + away[:, None] * beyond
        # where a corner is seen through the window, a straight line leads to it
        after, before = _turn(first, there) <= 0, _turn(last, there) >= 0
        seen = after & before & (corner != source)
        pairs = np.column_stack([source[seen], corner[seen]])
        found.append((pairs, np.linalg.norm(there[seen], axis=1)))
        # beyond the corner the window parts into those of the other two sides
        lower = np.where((_turn(last, there) >= 0)[:, None], there, last)
        upper = np.where((_turn(first, there) <= 0)[:, None], there, first)
        parts = (
            _Fan(
                _other(sides, behind, count, near), source, near, corner, left, there, first, lower
            ),
            _Fan(_other(sides, behind, count, far), source, corner, far, there, right, upper, last),
        )
        both = _Fan(*(np.concatenate(part) for part in zip(*parts, strict=True)))
        # angles up to this are rounding: a window of lines that is no wider holds none
        width = 1e-12 * np.r_[base, base] ** 2
        fan = both.taken(_turn(both.last, both.first) > width)
    ends, lengths = zip(*found, strict=True)
    return np.concatenate(ends), np.concatenate(lengths)


def _unfold(base: Points, near: Points, far: Points) -> tuple[Points, Points]:
    """Place the apex of triangles over their base: along it from the near end, and away from it."""
    along = (near**2 - far**2 + base**2) / (2 * base)
    return along, np.sqrt(np.maximum(0.0, near**2 - along**2))


def _turn(one: Points, other: Points) -> Points:
    """Compute the cross products of vectors in a plane, positive where the other lies left."""
    return one[:, 0] * other[:, 1] - one[:, 1] * other[:, 0]


def _twins(sides: Index) -> Index:
    """Find the same side of the other triangle; -1 where there is none, or more than one."""
    low, high = np.sort(sides, axis=1).T
    order = np.lexsort((high, low))
    low, high = low[order], high[order]
    start = np.nonzero(np.r_[True, (low[1:] != low[:-1]) | (high[1:] != high[:-1])])[0]
    two = start[np.diff(np.r_[start, len(sides)]) == 2]
    twin = np.full(len(sides), -1)
    twin[order[two]], twin[order[two + 1]] = order[two + 1], order[two]
    return twin


def _other(sides: Index, side: Index, count: int, end: Index) -> Index:
    """Find the other side of the same triangle that ends in a vertex."""
    # sides of one triangle are `count` apart
    found = (side + count) % len(sides)
    return np.where((sides[found] == end[:, None]).any(1), found, (side + 2 * count) % len(sides))
