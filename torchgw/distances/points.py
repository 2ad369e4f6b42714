"""Distances among points, computed when they are read; what the space of a side was made of."""

import copy
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from torchgw._boundary.arrays import check_finite, check_tensor
from torchgw._boundary.checks import check_choice
from torchgw._errors import InvalidInputError
from torchgw._tensors.operations import straight
from torchgw.distances.base import BLOCK_ENTRIES, DistanceProvider, Factors
from torchgw.distances.geodesics import Geodesics

PointMetric = Literal["euclidean", "sqeuclidean", "cosine", "correlation"]
CurvedModel = Literal["poincare", "lorentz", "sphere"]
# Those that compare directions alone.
ANGLES = ("cosine", "correlation")

# Points among which the largest distance is found exactly, by all pairs in blocks. [L313, L381]
EXACT_MAXIMUM_POINTS = 50_000
# For so few points all pairs take less time than the launches of any cleverer way. [L615]
_FEW_POINTS = 128
# Factors of at most so many entries are kept from call to call; those of many points would take as
# much memory as the points. [L1030]
_KEPT = 2**18
# Two unit vectors of one direction may differ by so many roundings: those of the largest entry, the
# norm and the quotients, and of a mean of equal vectors. [L313]
_UNIT_ROUNDING = 8


class PointDistance(DistanceProvider):
    """Distances among n points.

    All but Euclidean distances have exact factors of rank d + 2, so that products cost O(n d).
    Products of Euclidean distances are streamed in blocks of columns, except :meth:`mean_square`,
    which needs squares only. Nothing of size n x n is stored.

    Parameters
    ----------
    points : Tensor, shape (n, d), float32/64
    metric : {"euclidean", "sqeuclidean", "cosine", "correlation"}
        "cosine" is 1 - cos, half the squared Euclidean distance of the unit vectors; "correlation"
        is the same once the mean of each row is subtracted from it.

    Raises
    ------
    InvalidTypeError
        If the points are not a tensor.
    InvalidInputError
        If the points are not a finite (n, d) tensor of float32 or float64, or if one has length
        zero and the metric is "cosine", or is constant and the metric is "correlation".

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
        others = "a matrix to PrecomputedDistance or a function to CallableDistance."
        check_choice("metric", metric, get_args(PointMetric), f"For another distance pass {others}")
        check_tensor("points", points)
        check_rows(points, "Pass one row per point; `points[:, None]` makes rows of a vector.")
        self.metric: PointMetric = metric
        self.n, self.device, self.dtype = points.shape[0], points.device, points.dtype
        points = unit_vectors(points, metric) if metric in ANGLES else points
        # coordinates about the mean are small; where all points coincide, rounding of the mean
        # would set them apart from it, so they become zero
        coincide = (points == points[0]).all()
        self._points = (points - points.mean(dim=0)).mul_(~coincide)
        if metric in ANGLES:
            self._points = _without_rounding(self._points)
        self._weights: Tensor | None = None
        # factors, and the points that they were made of
        self._known: tuple[Tensor, Factors] | None = None

    def centred_on(self, weights: Tensor) -> "PointDistance":
        """Return the same distances, with little rounding among the points that carry weight."""
        moved = copy.copy(self)
        moved._weights = weights.to(self.device, self.dtype) / weights.sum()
        moved._points = self._points - moved._weights @ self._points
        return moved

    def subset(self, index: Tensor) -> DistanceProvider:
        """Keep the factors that the distances of all points have, if they have any."""
        if self.metric != "euclidean":
            return super().subset(index)
        chosen = self._moved(self.device, self.dtype, _points=self._points[index], n=len(index))
        chosen._weights = None if self._weights is None else self._weights[index]
        return chosen

    def columns(self, index: Tensor) -> Tensor:
        """Compute D[:, index], with exact zeros where a point meets itself."""
        return _between(self._points, self._points[index], self.metric)

    def to(self, device: torch.device, dtype: torch.dtype) -> "PointDistance":
        if self._lies_at(device, dtype):
            return self
        weights = None if self._weights is None else self._weights.to(device, dtype)
        return self._moved(device, dtype, _points=self._points.to(device, dtype), _weights=weights)

    def factors(self) -> Factors | None:
        """Compute exact factors of rank d + 2; ``None`` for "euclidean"."""
        if self.metric == "euclidean":
            return None
        if self._known is not None and self._known[0] is self._points:
            return self._known[1]
        matrix, signs = _squared_factors(self._points, self._weights)
        # not 1 - x_i . x_j, of which nothing is left where directions are alike
        factors = Factors(matrix, signs / 2 if self.metric in ANGLES else signs)
        if matrix.numel() <= _KEPT and not matrix.requires_grad:
            self._known = self._points, factors
        return factors

    def mean_square(self, weights: Tensor) -> Tensor:
        """Compute (D * D) @ weights, in O(n d^2) for many points, in O(n d) for "euclidean"."""
        # all columns, unless gradients are needed: columns have no second derivatives
        if self.n <= _FEW_POINTS and not self._points.requires_grad:
            return self.columns(torch.arange(self.n, device=self.device)).square() @ weights
        if self.metric == "euclidean":
            factors = _squared_factors(self._points, self._weights)
            return factors.apply(weights[:, None])[:, 0].clamp_min(0)
        return super().mean_square(weights)

    def maximum(self) -> float:
        """Find the largest distance.

        It is exact for up to 50,000 points, and usually for more. Otherwise it is a lower bound: at
        least half of the largest Euclidean distance, so a quarter of the largest squared or cosine
        distance, and in practice within a few percent.
        """
        if self.n <= _FEW_POINTS:
            return float(self.columns(torch.arange(self.n, device=self.device)).max())
        # A walk from each point to the farthest one gives a lower bound. All pairs are compared
        # among the points that are far enough from the mean to improve on it.
        points = self._points.detach()
        points = points - points.mean(dim=0)
        radius = points.norm(dim=1)
        start = int(radius.argmax())
        met = walk(lambda point: (points - points[point]).square().sum(dim=1), start)[1]
        pair = torch.tensor(met, device=points.device)
        found = torch.linalg.vector_norm(points[pair[0]] - points[pair[1]])
        # |x - y| <= radius_x + radius_y; the slack covers rounding
        candidates = (radius + radius.max() >= found * (1 - 1e-5)).nonzero()[:, 0]
        if candidates.shape[0] <= EXACT_MAXIMUM_POINTS:
            far = points[candidates]
            square = far.square().sum(dim=1)

            def rows_of(block: Tensor) -> Tensor:
                # cancellation is harmless here: only far pairs compete
                return torch.addmm(square, far[block], far.T, alpha=-2).add_(square[block, None])

            pair = candidates[farthest_pair(square, rows_of)]
        exact = torch.linalg.vector_norm(points[pair[0]] - points[pair[1]])
        largest = float(torch.maximum(found, exact))
        if self.metric == "euclidean":
            return largest
        return largest**2 / 2 if self.metric in ANGLES else largest**2


def check_rows(points: Tensor, advice: str = "", least: int = 0) -> None:
    """Refuse points that are no finite numbers of shape (n, d), n >= 1 and d >= ``least``."""
    if points.ndim != 2 or points.shape[0] == 0 or points.shape[1] < least:
        also = f" and d >= {least}" if least else ""
        raise InvalidInputError(
            f"`points` must have shape (n, d) with n >= 1{also}; got {tuple(points.shape)}. "
            f"{advice}".rstrip()
        )
    check_finite("points", points, "Drop or impute those rows.")


def pairwise_distances(x: Tensor, y: Tensor, metric: PointMetric) -> Tensor:
    """Compute the distances of two sets of points, (q, d) and (n, d), shape (q, n)."""
    if metric in ANGLES:
        return _between(unit_vectors(x, metric), unit_vectors(y, metric), metric)
    centre = y.mean(dim=0)
    return _between(x - centre, y - centre, metric)


def _between(x: Tensor, y: Tensor, metric: PointMetric) -> Tensor:
    """Compute distances of centred points, or of unit vectors, from their differences."""
    distance = straight(x, y)
    if metric == "euclidean":
        return distance
    return distance.square() if metric == "sqeuclidean" else distance.square() / 2


def unit_vectors(points: Tensor, metric: str, name: str = "points") -> Tensor:
    """Scale points, less their own mean for "correlation", to length one; refuse zero vectors."""
    # dividing by the largest entry first keeps the squares from over- and underflowing
    largest = points.abs().amax(dim=1, keepdim=True) if points.shape[1] else points.sum(1, True)
    flat = largest == 0
    if metric == "correlation" and points.shape[1]:
        # of a constant row, rounding is left after its mean is subtracted
        points = points / torch.where(flat, 1.0, largest)
        points = points - points.mean(dim=1, keepdim=True)
        largest = points.abs().amax(dim=1, keepdim=True)
        flat = largest <= _UNIT_ROUNDING * torch.finfo(points.dtype).eps
    if bool(flat.any()):
        row = int(flat[:, 0].nonzero()[0, 0])
        what = "zero vector" if metric == "cosine" else "constant row"
        raise InvalidInputError(
            f"`{name}` has a {what} in row {row}, which has no direction, and so no {metric!r} "
            "distance. Drop that row, or take 'euclidean' distances."
        )
    points = points / largest
    return torch.nn.functional.normalize(points, dim=1, eps=0.0)


def _without_rounding(points: Tensor) -> Tensor:
    """Set centred unit vectors to zero if they differ by rounding alone."""
    largest = points.detach().norm(dim=1).amax()
    return torch.where(largest > _UNIT_ROUNDING * torch.finfo(points.dtype).eps, points, 0.0)


def _squared_factors(points: Tensor, weights: Tensor | None = None) -> Factors:
    """Compute factors of |x_i - x_j|^2 = u_i + u_j - 2 x_i . x_j, u = |x|^2, of centred points."""
    # Rounding is small among points that carry weight (n,), and from these to others, however far
    # others lie; it may be large among others, between which nothing moves.
    # With u = mean + t v, where v has unit variance, u_i + u_j is the quadratic form of the rows
    # (1, v_i) with the matrix [[2 mean, t], [t, 0]]. Its eigenvalues are mean +- hypot(mean, t),
    # with eigenvectors (eigenvalue, t); taken as the first two factors they are nearly orthogonal,
    # so little cancels.
    tiny = torch.finfo(points.dtype).tiny
    square = points.square().sum(dim=1)
    if weights is None:
        mean = square.mean()
        spread = (square - mean).square().mean().sqrt()
    else:
        # the identity holds for any mean and any t > 0, without which far points would be lost
        mean = weights @ square
        spread = (weights @ (square - mean).square()).sqrt()
        spread = spread.maximum(torch.finfo(points.dtype).eps * square.max())
    deviation = square - mean
    positive = mean + torch.hypot(mean, spread)
    # the product of the eigenvalues is -t^2; their difference would cancel
    negative = -spread.square() / positive.clamp_min(tiny)
    matrix = [
        (value + deviation) * value.abs().sqrt() / torch.hypot(value, spread).clamp_min(tiny)
        for value in (positive, negative)
    ]
    signs = points.new_full((points.shape[1] + 2,), -1.0)
    signs[0] = 1.0
    return Factors(torch.cat([torch.stack(matrix, dim=1), points * 2**0.5], dim=1), signs)


def walk(distances_of: Callable[[int], Tensor], start: int) -> tuple[float, tuple[int, int]]:
    """Go to the farthest point again and again; return the largest distance found, its ends."""
    best, pair, current = -1.0, (start, start), start
    for _ in range(6):
        distance = distances_of(current)
        farthest = int(distance.argmax())
        if float(distance[farthest]) <= best:
            break
        best, pair, current = float(distance[farthest]), (current, farthest), farthest
    return best, pair


def farthest_pair(like: Tensor, rows_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Find the two indices of the largest entry of a table (n, n), by blocks of its rows."""
    n, best = len(like), torch.full_like(like[0], -torch.inf)
    pair = like.new_zeros(2, dtype=torch.int64)
    for block in torch.arange(n, device=like.device).split(max(1, BLOCK_ENTRIES // n)):
        value, flat = rows_of(block).flatten().max(dim=0)
        found = torch.stack([block[0] + flat // n, flat % n])
        pair = torch.where(value > best, found, pair)
        best = torch.maximum(value, best)
    return pair


class Space(NamedTuple):
    """The points or the graph of one side of a problem, and how new points are measured."""

    points: Tensor | None  # (n, d), not scaled; None for a graph, a matrix or a provider
    # metric between points; None for geodesics and given distances
    metric: PointMetric | CurvedModel | None
    geodesics: Geodesics | None
    n_neighbors: int  # known points that a new one is joined to in the graph
    scale: float  # factor that distances are multiplied by
    features: Tensor | None = None  # (n, f), from which the linear cost was computed
    feature_metric: PointMetric = "sqeuclidean"
    curvature: float | None = None  # of a space of constant curvature
    faces: Tensor | None = None  # (k, 3) int64, triangles between the points of a surface

    @property
    def given_graph(self) -> Geodesics | None:
        """The graph whose paths are compared, if it was given and not made from points."""
        return self.geodesics if self.points is None else None

    def to(self, device: torch.device) -> "Space":
        """Move the points to another device."""
        if self.points is None:
            return self
        faces = None if self.faces is None else self.faces.to(device)
        return self._replace(points=self.points.to(device), faces=faces)

    def copy(self) -> "Space":
        """Copy points and features, so that nobody else can change them."""
        points, features = (
            None if part is None else part.clone() for part in (self.points, self.features)
        )
        return self._replace(points=points, features=features)
