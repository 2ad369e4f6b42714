"""Maps of one space onto the other: rigid, affine or thin plates; places within triangles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._boundary.arrays import check_points, check_shape, in_kind, to_numpy
from torchgw._boundary.checks import check_flag, check_not_negative
from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw._plans.contract import Plan
from torchgw._results.modes import embeddings
from torchgw._tensors.machine import fits
from torchgw._tensors.operations import sparse_tensor
from torchgw.distances.base import BLOCK_ENTRIES
from torchgw.distances.graph import given_geodesics
from torchgw.distances.points import Space
from torchgw.distances.surface import Surface

MapKind = Literal["rigid", "affine", "thin_plate"]
Table = NDArray[np.float64]
# A map from points (q, d) to points (q, e).
Placing = Callable[[Table], Table]

# Residuals beyond so many times their typical size have no weight (J. W. Tukey's biweight, which
# then is 95% as efficient as least squares for normal errors); the typical size of normal ones is
# so many times their median. Both follow from the normal distribution.
_TUKEY = 4.685
_NORMAL = 1.4826
# Residuals below this share of the spread are rounding. A choice.
_ROUNDING = 1e-10
# Smoothing that is tried, per pair. Choices.
_SMOOTHINGS = [10.0**power for power in range(-6, 2)]


@dataclass(frozen=True, eq=False)
class SpaceMap:
    """A map of the source onto the target, as :meth:`torchgw.GWResult.rigid` and others fit it.

    Attributes
    ----------
    kind : {"rigid", "affine", "thin_plate"}
    matrix : ndarray, shape (d, e), or None
        Points go to ``points @ matrix + offset``. None for thin plates, which have none.
    offset : ndarray, shape (e,), or None
    scale : float
        Of a rigid map: the factor of all lengths. NaN for others.
    source, target : ndarray, shape (p, d) and (p, e)
        Pairs of places that it was fitted to.
    residuals : ndarray, shape (p,)
        Distances between the target of a pair and where its source goes.
    weights : ndarray, shape (p,)
        Weight of each pair in the fit, of sum 1: 0 for those that a robust fit leaves out.
    smoothing : float
        Of thin plates: per pair, in coordinates of spread 1. NaN for others.
    """

    kind: MapKind
    matrix: Table | None
    offset: Table | None
    scale: float
    source: Table
    target: Table
    residuals: Table
    weights: Table
    smoothing: float
    placed: Placing

    def transform(self, points: Any) -> Any:
        """Map points of the source space, also far from all known ones.

        Parameters
        ----------
        points : array-like, shape (q, d)

        Returns
        -------
        Tensor or ndarray, shape (q, e), float64
            A tensor, on the device of the points, for points in a tensor.

        Raises
        ------
        InvalidInputError
            If the points have another number of columns than the source.
        """
        given = check_points("points", points)
        check_shape("points", given, ("q", self.source.shape[1]), "the coordinates of the source")
        moved = torch.from_numpy(self.placed(to_numpy(given.double()))).to(given.device)
        return in_kind(points, moved)

    @property
    def error(self) -> float:
        """Root of the weighted mean of the squared residuals."""
        return float(np.sqrt(self.weights @ self.residuals**2))

    @property
    def reflects(self) -> bool:
        """Whether it is a mirror image: a matrix with a negative determinant."""
        matrix = self.matrix
        if matrix is None or matrix.shape[0] != matrix.shape[1]:
            return False
        return bool(np.linalg.det(matrix) < 0)

    def __repr__(self) -> str:
        """Summarise in a line."""
        told = f"{self.kind}, {len(self.residuals):,} pairs, error={self.error:.4g}"
        if self.kind == "rigid":
            told += f", scale={self.scale:.6g}" + (", mirrored" if self.reflects else "")
        left_out = int((self.weights == 0).sum())
        return f"SpaceMap({told}" + (f", {left_out} left out)" if left_out else ")")


@dataclass(frozen=True)
class Pairs:
    """Places that belong together: (p, d) and (p, e), with weights (p,) of sum 1."""

    source: Table
    target: Table
    weights: Table

    @classmethod
    def of(cls, source: Any, target: Any, weights: Any) -> Pairs:
        """Check them, and leave out those without weight."""
        x, y, w = (to_numpy(part).astype(np.float64) for part in (source, target, weights))
        kept = w > 0
        return cls(x[kept], y[kept], w[kept] / w[kept].sum())

    def centred(self) -> tuple[Table, Table, Table, Table]:
        """Give both means, and the places less these."""
        x, y = self.weights @ self.source, self.weights @ self.target
        return x, y, self.source - x, self.target - y

    def missed(self, placed: Placing) -> Table:
        """Compute the residuals of a map."""
        return np.linalg.norm(self.target - placed(self.source), axis=1)


@dataclass(frozen=True)
class _Linear:
    """points @ matrix + offset."""

    matrix: Table
    offset: Table
    scale: float = float("nan")

    def __call__(self, points: Table) -> Table:
        return points @ self.matrix + self.offset


@dataclass(frozen=True)
class _Plates:
    """Thin plates between coordinates less their means, over their spreads."""

    plates: Any
    source: tuple[Table, float]
    target: tuple[Table, float]

    def __call__(self, points: Table) -> Table:
        (mean_x, one), (mean_y, other) = self.source, self.target
        return self.plates((points - mean_x) / one) * other + mean_y


def placed_of(name: str, given: Any, space: Space | None, count: int) -> Table:
    """Read the places (count, d) of a side: those given, or those that were matched."""
    if given is None:
        if space is None or space.points is None:
            raise InvalidInputError(
                f"{name} was not given as points: pass `{name}`, coordinates of shape ({count}, d)."
            )
        given = space.points
    points = check_points(name, given)
    check_shape(name, points, (count, "d"), "one row per point that was matched")
    return to_numpy(points.double())


def fit_map(
    kind: MapKind,
    pairs: Pairs,
    *,
    robust: bool,
    reflection: bool = True,
    scale: bool = False,
    smoothing: float | None = None,
    neighbors: int | None = None,
) -> SpaceMap:
    """Fit a map of some kind to pairs of places."""
    for name, value in (("robust", robust), ("reflection", reflection), ("scale", scale)):
        check_flag(name, value)
    d, e = pairs.source.shape[1], pairs.target.shape[1]
    if kind == "rigid":
        if d != e:
            raise InvalidInputError(
                f"A rigid map needs as many coordinates on both sides; got {d} and {e}. Use "
                "`affine`."
            )
        fit: Callable[[Pairs], Placing] = lambda some: _rigid(some, reflection, scale)  # noqa: E731
    elif kind == "affine":
        _check_spread(pairs, d)
        fit = _affine
    else:
        _check_spread(pairs, d)
        chosen = _best_smoothing(pairs, neighbors) if smoothing is None else smoothing
        check_not_negative("smoothing", chosen)
        fit = lambda some: _thin_plate(some, float(chosen), neighbors)  # noqa: E731
    placed = fit(pairs)
    weights = pairs.weights
    if robust:
        # the bulk is found by maps that cannot follow a single pair
        weights = _robust(pairs, _affine if kind == "thin_plate" else fit, weights, absolute=True)
        weights = _robust(pairs, fit, weights, absolute=False)
        if kind == "thin_plate" and smoothing is None:
            # wrong pairs ask for stiff plates, those that are left for what follows them
            chosen = _best_smoothing(Pairs.of(pairs.source, pairs.target, weights), neighbors)
            weights = _robust(pairs, fit, weights, absolute=False)
        placed = fit(replace(pairs, weights=weights))
    linear = placed if isinstance(placed, _Linear) else None
    return SpaceMap(
        kind, None if linear is None else linear.matrix, None if linear is None else linear.offset,
        float("nan") if linear is None else linear.scale, pairs.source, pairs.target,
        pairs.missed(placed), weights, float(chosen) if kind == "thin_plate" else float("nan"),
        placed,
    )  # fmt: skip


def _check_spread(pairs: Pairs, d: int) -> None:
    """Refuse pairs that do not determine an affine map."""
    _, _, x, _ = pairs.centred()
    sizes = np.linalg.svd(x, compute_uv=False)
    if len(x) <= d or sizes[-1] <= 1e-9 * sizes[0]:
        raise InvalidInputError(
            f"{len(x)} pairs of places in {d} coordinates lie in a plane of fewer dimensions, "
            "which leaves a map of all space open. Use `rigid`, or drop coordinates."
        )


def _rigid(pairs: Pairs, reflection: bool, scale: bool) -> _Linear:
    """Solve the weighted problem of Procrustes (W. Kabsch 1976, S. Umeyama 1991)."""
    mean_x, mean_y, x, y = pairs.centred()
    left, sizes, right = np.linalg.svd(x.T @ (pairs.weights[:, None] * y))
    signs = np.ones(len(sizes))
    # pairs that lie in a plane do not tell whether space is mirrored at it
    flat = sizes[-1] <= _ROUNDING * sizes[0]
    if (flat or not reflection) and np.linalg.det(left @ right) < 0:
        signs[-1] = -1
    turn = left * signs @ right
    spread = float(pairs.weights @ (x**2).sum(1))
    factor = float(signs @ sizes) / spread if scale and spread > 0 else 1.0
    return _Linear(factor * turn, mean_y - factor * mean_x @ turn, factor)


def _affine(pairs: Pairs) -> _Linear:
    """Solve weighted least squares."""
    mean_x, mean_y, x, y = pairs.centred()
    root = np.sqrt(pairs.weights)[:, None]
    matrix = np.linalg.lstsq(root * x, root * y, rcond=None)[0]
    return _Linear(np.asarray(matrix, np.float64), mean_y - mean_x @ matrix)


def _thin_plate(pairs: Pairs, smoothing: float, neighbors: int | None) -> Placing:
    """Interpolate by thin plates: an affine map, and the least bending that pairs ask for."""
    mean_x, mean_y, x, y = pairs.centred()
    # in coordinates of spread 1 the smoothing has no unit
    one, other = (float(np.sqrt(pairs.weights @ (part**2).sum(1))) or 1.0 for part in (x, y))
    kept = pairs.weights > 0
    share = pairs.weights[kept] * kept.sum()
    # pairs of one place would be two conditions that contradict each other
    plates = scipy.interpolate.RBFInterpolator(
        x[kept] / one, y[kept] / other, kernel="thin_plate_spline", degree=1,
        smoothing=np.maximum(smoothing, _ROUNDING) / share,
        neighbors=None if neighbors is None else min(neighbors, int(kept.sum())),
    )  # fmt: skip
    return _Plates(plates, (mean_x, one), (mean_y, other))


def _best_smoothing(pairs: Pairs, neighbors: int | None) -> float:
    """Choose the smoothing with which half of the pairs tell most of the other half."""
    order = np.random.default_rng(0).permutation(len(pairs.weights))[:1_000]
    halves = order[::2], order[1::2]
    missed = []
    for smoothing in _SMOOTHINGS:
        total = 0.0
        for some, others in (halves, halves[::-1]):
            weights = pairs.weights[some] / pairs.weights[some].sum()
            fitted = Pairs(pairs.source[some], pairs.target[some], weights)
            placed = _thin_plate(fitted, smoothing, neighbors)
            rest = Pairs(pairs.source[others], pairs.target[others], pairs.weights[others])
            # not squared: a wrong pair says nothing of the others
            total += float(rest.weights @ rest.missed(placed))
        missed.append(total)
    return _SMOOTHINGS[int(np.argmin(missed))]


def _robust(
    pairs: Pairs, fit: Callable[[Pairs], Placing], weights: Table, *, absolute: bool
) -> Table:
    """Reweight pairs by their residuals until the weights no longer change."""
    _, _, _, y = pairs.centred()
    least = _ROUNDING * float(np.sqrt(pairs.weights @ (y**2).sum(1)) or 1.0)
    # steps end where weights no longer change; absolute residuals find the bulk
    for _ in range(20 if absolute else 30):
        missed = pairs.missed(fit(replace(pairs, weights=weights)))
        if absolute:
            factor = 1 / np.maximum(missed, least)
        else:
            typical = max(_NORMAL * _median(missed, pairs.weights), least)
            factor = np.maximum(1 - (missed / (_TUKEY * typical)) ** 2, 0) ** 2
        fresh = pairs.weights * factor
        fresh /= fresh.sum()
        if np.abs(fresh - weights).sum() <= 1e-9:
            break
        weights = fresh
    return weights


def _median(values: Table, weights: Table) -> float:
    order = values.argsort()
    total = weights[order].cumsum()
    return float(values[order][np.searchsorted(total, total[-1] / 2)])


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


def map_to_surface(
    plan: Plan, spaces: tuple[Space, Space], name: str, *, refine: bool
) -> SurfaceMap:
    """Find where the rows of a plan lie on the surface of its columns."""
    # The largest entry of a blurred row is that of a large triangle near by; its geodesic median is
    # where it lies. The median among vertices comes first, then a step of Weiszfeld's iteration, or
    # the nearest place among the modes of both surfaces.
    space = spaces[1]
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
    embedded = embeddings(plan, spaces, vertex) if refine else None
    if embedded is None:
        sizes = (points[faces[:, 0]] - points[faces[:, 1]]).norm(dim=1)
        size = float(sizes.median())
        face, corners = _places(
            vertex, points, faces, lambda point, at: _energies(rows, vertex, apart, point, at, size)
        )
    else:
        here, there, vertex = embedded

        def squares(point: Tensor, at: Tensor) -> Tensor:
            # corners of some triangles in all modes at a time
            step = max(1, BLOCK_ENTRIES // (3 * here.shape[1]))
            parts = zip(point.split(step), at.split(step), strict=True)
            return torch.cat([(here[i, None] - there[j]).square().sum(2) for i, j in parts])

        face, corners = _places(vertex, there, faces, squares)
    moved = rows.start.diff() > 0
    face, vertex = (torch.where(moved, part, -1) for part in (face, vertex))
    corners = torch.where(moved[:, None], corners, torch.nan)
    return SurfaceMap(face, corners, (corners[:, :, None] * points[faces[face]]).sum(1), vertex)


class _Rows(NamedTuple):
    """Entries of a plan that matter, by rows, each row of mass one."""

    start: Tensor  # (n + 1,) int64
    column: Tensor  # (e,) int64
    share: Tensor  # (e,) float64

    def part(self, first: int, last: int) -> _Rows:
        """Take some rows."""
        begin, end = self.start[first].item(), self.start[last].item()
        inside = slice(begin, end)
        return _Rows(self.start[first : last + 1] - begin, self.column[inside], self.share[inside])

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
    vertex: Tensor, points: Tensor, faces: Tensor, energies: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Find the best place of each row in the triangles around its vertex: triangle and corners."""
    # Energies (c, 3) are of vertices (c, 3) for rows (c,): squared distances but for a constant.
    # triangles by their corners
    corner, order = faces.reshape(-1).sort(stable=True)
    first = torch.searchsorted(corner, torch.arange(len(points) + 1, device=corner.device))
    around = first.diff()[vertex]
    # a row for each triangle around the vertex of each point
    point = torch.repeat_interleave(around)
    number = torch.arange(len(point), device=point.device) - (around.cumsum(0) - around)[point]
    face = order[first[vertex][point] + number] // 3
    found, height = _least(points[faces[face]], energies(point, faces[face]))
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
    apart = torch.where((weights >= 0).all(1), 0.0, torch.inf)
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
