"""Where a plan sends points of one side on a surface: places within triangles, not vertices alone.

The row of a plan is blurred by epsilon and by the size of triangles. Its largest entry is that of a
large triangle near by; its geodesic median is where it lies. The median among vertices comes first,
then one step of Weiszfeld's iteration, which weighs squared distances by inverse distances, finds
the place around that vertex.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw._plans.contract import Plan
from torchgw._tensors.memory import fits
from torchgw._tensors.sparse import sparse_tensor
from torchgw.distances.base import BLOCK_ENTRIES
from torchgw.distances.graph import given_geodesics
from torchgw.distances.new_points import Space
from torchgw.distances.surface import Surface


@dataclass(frozen=True, eq=False)
class SurfaceMap:
    """Places on a surface, as :meth:`torchgw.GWResult.surface_map` finds them.

    Attributes
    ----------
    face : Tensor or ndarray, shape (n,), int64
        Triangle of the surface that each point goes to; -1 for a point without mass.
    barycentric : Tensor or ndarray, shape (n, 3), float64
        Weights of the corners of that triangle, of sum 1; NaN for a point without mass.
    points : Tensor or ndarray, shape (n, 3), float64
        The places.
    vertex : Tensor or ndarray, shape (n,), int64
        Vertex where the geodesic median of each row is; -1 for a point without mass.
    """

    face: Any
    barycentric: Any
    points: Any
    vertex: Any

    def __len__(self) -> int:
        """Count the points."""
        return len(self.face)

    def __repr__(self) -> str:
        """Summarise in a line."""
        return f"SurfaceMap({len(self):,} points)"


def map_to_surface(plan: Plan, space: Space, name: str) -> SurfaceMap:
    """Find where the rows of a plan lie on the surface of its columns."""
    if space.faces is None or space.points is None:
        raise InvalidInputError(
            f"`surface_map` leads onto a surface, and {name} was given without triangles. Pass "
            "(vertices, faces) to the solve, or use `matching` or `transform`."
        )
    m, device = plan.shape[1], plan.device
    if not fits(8 * m * m, device):
        raise UnsupportedError(
            f"`surface_map` needs the distances of all {m:,} vertices of {name}, which do not fit. "
            "Use `matching`, or a coarser surface."
        )
    geodesics = space.geodesics
    if geodesics is None:
        # a file leaves it out where distances are known by factors
        geodesics = given_geodesics(name, Surface(space.points, space.faces), "stitch")
    rows = _rows(plan)
    apart = geodesics.reader(device)(torch.arange(m, device=device)).double()
    points, faces = (part.to(device) for part in (space.points.double(), space.faces))
    vertex = torch.cat([(_table(part, m) @ apart).argmin(1) for part in rows.parts(m)])
    face, corners = _places(rows, vertex, apart, points, faces)
    moved = rows.start.diff() > 0
    face, vertex = (torch.where(moved, part, -1) for part in (face, vertex))
    corners = torch.where(moved[:, None], corners, torch.nan)
    there = (corners[:, :, None] * points[faces[face]]).sum(1)
    return SurfaceMap(face, corners, there, vertex)


class _Rows(NamedTuple):
    """Entries of a plan that matter, by rows, each row of mass one."""

    start: Tensor  # (n + 1,) int64
    column: Tensor  # (e,) int64
    share: Tensor  # (e,) float64

    def part(self, first: int, last: int) -> _Rows:
        """Take some rows."""
        begin, end = self.start[first].item(), self.start[last].item()
        inside = slice(begin, end)
        start = self.start[first : last + 1] - begin
        return _Rows(start, self.column[inside], self.share[inside])

    def parts(self, width: int) -> Iterator[_Rows]:
        """Take them in parts, of which tables of some width fit."""
        n, step = len(self.start) - 1, max(1, BLOCK_ENTRIES // width)
        for first in range(0, n, step):
            yield self.part(first, min(n, first + step))

    @property
    def row(self) -> Tensor:
        """Number of the row of each entry, (e,)."""
        return torch.repeat_interleave(self.start.diff())


def _rows(plan: Plan) -> _Rows:
    found = plan.to_sparse()
    parts = found.indptr.astype(np.int64), found.indices.astype(np.int64), found.data
    start, column, entry = (torch.from_numpy(part).to(plan.device) for part in parts)
    made = _Rows(start, column, entry.double())
    mass = entry.new_zeros(len(start) - 1, dtype=torch.float64)
    mass.index_add_(0, made.row, made.share)
    return made._replace(share=made.share / mass[made.row])


def _table(rows: _Rows, width: int) -> Tensor:
    places = torch.stack([rows.row, rows.column])
    return sparse_tensor(places, rows.share, (len(rows.start) - 1, width))


def _places(
    rows: _Rows, vertex: Tensor, apart: Tensor, points: Tensor, faces: Tensor
) -> tuple[Tensor, Tensor]:
    """Find the best place of each row in the triangles around its vertex: triangle and corners."""
    # triangles by their corners
    corner, order = faces.reshape(-1).sort(stable=True)
    first = torch.searchsorted(corner, torch.arange(len(points) + 1, device=corner.device))
    around = first.diff()[vertex]
    # a row for each triangle around the vertex of each point
    point = torch.repeat_interleave(around)
    number = torch.arange(len(point), device=point.device) - (around.cumsum(0) - around)[point]
    face = order[first[vertex][point] + number] // 3
    sizes = (points[faces[:, 0]] - points[faces[:, 1]]).norm(dim=1)
    energy = _energies(rows, vertex, apart, point, faces[face], float(sizes.median()))
    found, height = _least(points[faces[face]], energy)
    # the lowest of each point comes first
    order = height.argsort(stable=True)
    order = order[point[order].argsort(stable=True)]
    least = order[(around.cumsum(0) - around).clamp_max(len(order) - 1)]
    return face[least], found[least]


def _energies(
    rows: _Rows, vertex: Tensor, apart: Tensor, point: Tensor, corners: Tensor, size: float
) -> Tensor:
    """Average squared distances of some vertices (c, 3), by weights of the points they are for."""
    # Weiszfeld's weights, bounded at the size of triangles
    row = rows.row
    weight = rows.share / apart[vertex[row], rows.column].clamp_min(size)
    total = weight.new_zeros(len(vertex)).index_add_(0, row, weight)
    weight = weight / total[row]
    count = rows.start.diff()
    found = []
    # entries of the rows of some triangles at a time
    step = max(1, BLOCK_ENTRIES // max(1, 3 * int(count.max())))
    for some, at in zip(point.split(step), corners.split(step), strict=True):
        each = torch.repeat_interleave(count[some])
        place = torch.arange(len(each), device=each.device)
        place += (rows.start[some] - (count[some].cumsum(0) - count[some]))[each]
        squares = apart[at[each], rows.column[place, None]].square() * weight[place, None]
        found.append(squares.new_zeros(len(some), 3).index_add_(0, each, squares))
    return torch.cat(found)


def _least(corners: Tensor, energy: Tensor) -> tuple[Tensor, Tensor]:
    """Minimise |p - c|^2 over triangles, known at their corners but for a constant; and how low."""
    # In the plane of a triangle a weighted mean of squared distances is |p - c|^2 plus a constant.
    first, second, third = corners.unbind(1)
    tiny = torch.finfo(corners.dtype).tiny
    base = (second - first).norm(dim=1).clamp_min(tiny**0.5)
    slant = (third - first).square().sum(1)
    along = ((third - first) * (second - first)).sum(1) / base
    away = (slant - along**2).clamp_min(0).sqrt().clamp_min(1e-9 * base)
    x = (energy[:, 0] - energy[:, 1] + base**2) / (2 * base)
    y = ((energy[:, 0] - energy[:, 2] + slant) / 2 - x * along) / away
    up = y / away
    right = (x - up * along) / base
    weights = torch.stack([1 - right - up, right, up], 1)
    inside = (weights >= 0).all(1)
    apart = torch.where(inside, 0.0, torch.inf)
    zero = torch.zeros_like(base)
    at = torch.stack([zero, zero, base, zero, along, away], 1).reshape(-1, 3, 2)
    centre = torch.stack([x, y], 1)
    for one, other in ((0, 1), (1, 2), (2, 0)):
        side = at[:, other] - at[:, one]
        share = ((centre - at[:, one]) * side).sum(1) / side.square().sum(1).clamp_min(tiny)
        share = share.clamp(0, 1)
        missed = (at[:, one] + share[:, None] * side - centre).square().sum(1)
        nearer = missed < apart
        on_side = torch.zeros_like(weights)
        on_side[:, one], on_side[:, other] = 1 - share, share
        weights = torch.where(nearer[:, None], on_side, weights)
        apart = torch.where(nearer, missed, apart)
    return weights, energy[:, 0] - x**2 - y**2 + apart
