"""Distances among points, computed when they are read."""

from __future__ import annotations

import copy
from typing import Literal, get_args

import torch
from torch import Tensor

from torchgw._boundary.arrays import check_tensor, resolve_device
from torchgw._errors import InvalidInputError
from torchgw.distances.base import DistanceProvider, Factors

__all__ = ["PointDistance", "PointMetric", "pairwise_distances"]

PointMetric = Literal["euclidean", "sqeuclidean", "cosine"]

# The largest distance is found exactly among this many points, by all pairs in blocks.
_EXACT_MAXIMUM_POINTS = 50_000
# Elements of one (rows, points) block of that search.
_BLOCK_ELEMENTS = 2**24
# Distance of two unit vectors of one direction, in units of rounding, at most: that of the largest
# entry, the norm and the quotients, and of a mean of equal vectors.
_UNIT_ROUNDING = 8


class PointDistance(DistanceProvider):
    """Distances among n points.

    Squared Euclidean and cosine distances have exact factors of rank d + 2, so products cost
    O(n d). The Euclidean distance has none; its products are streamed in blocks of columns,
    except :meth:`mean_square`, which needs squares only. Nothing of size n x n is stored.

    Parameters
    ----------
    points : Tensor, shape (n, d), float32/64
        Moved to their mean (for "cosine" once they have unit length), so that numbers stay small.
    metric : {"euclidean", "sqeuclidean", "cosine"}
        "cosine" is 1 - cos, half the squared Euclidean distance of the unit vectors.

    Raises
    ------
    InvalidTypeError
        If the points are no tensor.
    InvalidInputError
        If the points are not a finite (n, d) floating tensor, or one has length zero and the metric
        is "cosine".

    Notes
    -----
    Columns are computed from differences, never from x.x + y.y - 2 x.y, whose cancellation would
    make near-duplicates equal or the diagonal positive.

    Examples
    --------
    >>> import torch
    >>> from torchgw.distances import PointDistance
    >>> distance = PointDistance(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), "euclidean")
    >>> distance.columns(torch.tensor([1])).flatten().tolist()
    [5.0, 0.0]
    """

    capturable = True

    def __init__(self, points: Tensor, metric: PointMetric = "euclidean") -> None:
        if metric not in get_args(PointMetric):
            raise InvalidInputError(
                f"`metric` must be one of {', '.join(get_args(PointMetric))}; got {metric!r}. "
                "For another distance pass a matrix to PrecomputedDistance or a function to "
                "CallableDistance."
            )
        _check_points(points)
        self.metric: PointMetric = metric
        self.n = points.shape[0]
        self.device = points.device
        self.dtype = points.dtype
        points = _unit(points) if metric == "cosine" else points
        # the mean of points that coincide is rounded, which would set them apart from it
        coincide = (points == points[0]).all()
        self._points = torch.where(coincide, 0.0, points - points.mean(dim=0))
        if metric == "cosine":
            self._points = _without_rounding(self._points)

    def columns(self, index: Tensor) -> Tensor:
        """Return D[:, index], with exact zeros where a point meets itself."""
        return _between(self._points, self._points[index], self.metric)

    def to(self, device: torch.device, dtype: torch.dtype) -> PointDistance:
        """Return the same distances on another device or in another dtype."""
        if (resolve_device(device), dtype) == (self.device, self.dtype):
            return self
        moved = copy.copy(self)
        moved._points = self._points.to(device, dtype)
        moved.device, moved.dtype = moved._points.device, dtype
        return moved

    def factors(self) -> Factors | None:
        """Return exact factors of rank d + 2, ``None`` for "euclidean"."""
        if self.metric == "euclidean":
            return None
        matrix, signs = _squared_factors(self._points)
        # not 1 - x_i . x_j, of which nothing is left where directions are alike
        return Factors(matrix, signs / 2 if self.metric == "cosine" else signs)

    def mean_square(self, weights: Tensor) -> Tensor:
        """Return (D * D) @ weights: O(n d) for "euclidean", O(n d^2) for the others."""
        if self.metric == "euclidean":
            factors = _squared_factors(self._points)
            return factors.apply(weights[:, None])[:, 0].clamp_min(0)
        return super().mean_square(weights)

    def maximum(self) -> float:
        """Return the largest distance.

        A few sweeps, each from the point farthest from the last, give a lower bound; points too
        close to the mean to improve on it are dropped. It is exact when at most 50,000 points
        remain. Otherwise the bound is returned: at least half of the largest Euclidean distance, so
        a quarter of the largest squared or cosine distance, and in practice within a few percent.
        """
        points = self._points.detach()
        points = points - points.mean(dim=0)
        radius = points.norm(dim=1)
        pair = _sweep(points, int(radius.argmax()))
        found = torch.linalg.vector_norm(points[pair[0]] - points[pair[1]])
        # |x - y| <= radius_x + radius_y; the slack covers rounding.
        candidates = (radius + radius.max() >= found * (1 - 1e-5)).nonzero()[:, 0]
        if candidates.shape[0] <= _EXACT_MAXIMUM_POINTS:
            pair = candidates[_farthest_pair(points[candidates])]
        exact = torch.linalg.vector_norm(points[pair[0]] - points[pair[1]])
        largest = float(torch.maximum(found, exact))
        return {"euclidean": largest, "sqeuclidean": largest**2, "cosine": largest**2 / 2}[
            self.metric
        ]


def pairwise_distances(x: Tensor, y: Tensor, metric: PointMetric) -> Tensor:
    """Return the distances of two sets of points, shape (q, n)."""
    if metric == "cosine":
        return _between(_unit(x), _unit(y), metric)
    centre = y.mean(dim=0)
    return _between(x - centre, y - centre, metric)


def _between(x: Tensor, y: Tensor, metric: PointMetric) -> Tensor:
    """Return the distances of two sets of prepared points from their differences."""
    distance = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")
    if metric == "euclidean":
        return distance
    return distance.square() if metric == "sqeuclidean" else distance.square() / 2


def _check_points(points: Tensor) -> None:
    """Refuse anything but a finite floating (n, d) tensor with n >= 1."""
    check_tensor("points", points)
    if points.ndim != 2 or points.shape[0] == 0:
        raise InvalidInputError(
            f"`points` must have shape (n, d) with n >= 1; got {tuple(points.shape)}. "
            "Pass one row per point; `points[:, None]` makes rows of a vector."
        )
    if points.dtype not in (torch.float32, torch.float64):
        raise InvalidInputError(
            f"`points` must be float32 or float64; got {points.dtype}. Pass `points.float()`."
        )
    if not bool(points.isfinite().all()):
        raise InvalidInputError(
            "`points` must be finite; got NaN or infinity. Drop or impute those rows."
        )


def _unit(points: Tensor) -> Tensor:
    """Return the points scaled to length one."""
    # Dividing by the largest entry first keeps the squares from over- and underflowing.
    largest = points.abs().amax(dim=1, keepdim=True) if points.shape[1] else points.sum(1, True)
    if bool((largest == 0).any()):
        row = int((largest[:, 0] == 0).nonzero()[0, 0])
        raise InvalidInputError(
            "`points` must have no zero vector when metric='cosine', which has no direction; got "
            f"one in row {row}. Drop that row or use metric='euclidean'."
        )
    points = points / largest
    return torch.nn.functional.normalize(points, dim=1, eps=0.0)


def _without_rounding(points: Tensor) -> Tensor:
    """Return centred unit vectors, all zero if they were equal but for rounding."""
    largest = points.detach().norm(dim=1).amax()
    return torch.where(largest > _UNIT_ROUNDING * torch.finfo(points.dtype).eps, points, 0.0)


def _squared_factors(points: Tensor) -> Factors:
    """Factors of |x_i - x_j|^2 = u_i + u_j - 2 x_i . x_j, u = |x|^2, for centred points.

    With u = mean + t v, where v has unit variance, u_i + u_j is the quadratic form of the rows
    (1, v_i) with the matrix [[2 mean, t], [t, 0]]. Its eigenvalues are mean +- hypot(mean, t), with
    eigenvectors (eigenvalue, t); taken as the first two factors they are nearly orthogonal, so
    little cancels.
    """
    tiny = torch.finfo(points.dtype).tiny
    square = points.square().sum(dim=1)
    mean = square.mean()
    deviation = square - mean
    spread = deviation.square().mean().sqrt()
    positive = mean + torch.hypot(mean, spread)
    # The product of the eigenvalues is -t^2; their difference would cancel.
    negative = -spread.square() / positive.clamp_min(tiny)
    matrix = [
        (value + deviation) * value.abs().sqrt() / torch.hypot(value, spread).clamp_min(tiny)
        for value in (positive, negative)
    ]
    signs = points.new_full((points.shape[1] + 2,), -1.0)
    signs[0] = 1.0
    return Factors(torch.cat([torch.stack(matrix, dim=1), points * 2**0.5], dim=1), signs)


def _sweep(points: Tensor, start: int, sweeps: int = 6) -> Tensor:
    """Return the farthest pair met on a walk to the farthest point, again and again."""
    best, pair, current = -1.0, (start, start), start
    for _ in range(sweeps):
        distance = (points - points[current]).square().sum(dim=1)
        farthest = int(distance.argmax())
        if float(distance[farthest]) <= best:
            break
        best, pair, current = float(distance[farthest]), (current, farthest), farthest
    return torch.tensor(pair, device=points.device)


def _farthest_pair(points: Tensor) -> Tensor:
    """Return the two indices of the largest distance, by all pairs in blocks."""
    square = points.square().sum(dim=1)
    best, pair = torch.full_like(square[0], -torch.inf), square.new_zeros(2, dtype=torch.int64)
    rows = max(1, _BLOCK_ELEMENTS // points.shape[0])
    for block in torch.arange(points.shape[0], device=points.device).split(rows):
        # Cancellation is harmless here: only far pairs compete.
        distance = torch.addmm(square, points[block], points.T, alpha=-2).add_(square[block, None])
        value, flat = distance.flatten().max(dim=0)
        found = torch.stack([block[0] + flat // points.shape[0], flat % points.shape[0]])
        pair = torch.where(value > best, found, pair)
        best = torch.maximum(value, best)
    return pair
