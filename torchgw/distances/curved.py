"""Distances in spaces of constant curvature: the Poincare ball, the hyperboloid, the sphere.

With unit curvature and y = sqrt(c) x, the distance d of two points of the Poincare ball is

    sinh(d / 2) = |y - y'| / sqrt((1 - |y|^2) (1 - |y'|^2)),

and in polar form, y = (1 - t) u with |u| = 1,

    |y - y'|^2 = (t - t')^2 + (1 - t) (1 - t') |u - u'|^2.

Every term is a difference of coordinates, and is positive, so that nothing cancels where points are
close together or near the border; arcosh(1 + x) and artanh would. On the sphere it is
2 atan2(|u - u'|, |u + u'|).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from torchgw._boundary.arrays import check_finite, check_tensor
from torchgw._boundary.checks import check_choice, check_positive
from torchgw._errors import InvalidInputError
from torchgw._tensors.operations import LARGEST_LOGARITHM, straight
from torchgw.distances.base import DistanceProvider
from torchgw.distances.points import (
    EXACT_MAXIMUM_POINTS,
    CurvedModel,
    check_rows,
    farthest_pair,
    walk,
)

# Points may miss their constraint by this relative error, in roundings of their dtype, which is
# rounding. [L381]
_ROUNDINGS = 256


class CurvedDistance(DistanceProvider):
    """Distances among n points of a space of constant curvature, computed when they are read.

    They are computed in float64 and rounded to ``dtype`` in the end. Products are streamed in
    blocks of columns; nothing of size n x n is stored.
    :class:`~torchgw.distances.NystromDistance` makes factors of them.

    Parameters
    ----------
    points : Tensor, float32/64
        ``"poincare"``: shape (n, d), c |x|^2 < 1. ``"lorentz"``: shape (n, d + 1), the time
        coordinate x_0 > 0 first, -x_0^2 + x_1^2 + ... + x_d^2 = -1 / c. ``"sphere"``: shape (n, d),
        |x|^2 = 1 / c.
    model : {"poincare", "lorentz", "sphere"}
    curvature : float
        c > 0. The sectional curvature is -c for ``"poincare"`` and ``"lorentz"``, and c for
        ``"sphere"``, whose radius is 1 / sqrt(c).
    depth : Tensor, shape (n,), float64, optional
        -log(1 - sqrt(c) |x|) of each point of the Poincare ball, at most 350. The coordinates then
        give its direction alone. That is how points lie farther out than coordinates can say: 1 - r
        is rounded to a multiple of 6e-8 in float32, and to one of 1e-16 in float64, which is 17 and
        37 from the origin, and coarse long before.

    Raises
    ------
    InvalidTypeError
        If the points are not a tensor.
    InvalidInputError
        If the points are not a finite (n, d) tensor of float32 or float64, or one of them, named by
        its row, lies on or outside the border of the ball, or not on the hyperboloid or the sphere.
        They are never projected.

    Notes
    -----
    Conventions clash. geoopt's ``PoincareBall(c)`` has c as here; its ``Lorentz(k)`` has curvature
    -1 / k, so c = 1 / k. HypLL's ``Curvature(value)`` is c as here once its constraint, by default
    a softplus, has been applied. geomstats' hyperbolic spaces have curvature -1.

    Of Lorentz coordinates the last d are read; x_0 is computed from them in float64, and checked.

    Examples
    --------
    >>> import torch
    >>> from torchgw.distances import CurvedDistance
    >>> distance = CurvedDistance(torch.tensor([[0.0, 0.0], [0.5, 0.0]]), "poincare")
    >>> round(float(distance.columns(torch.tensor([1]))[0, 0]), 4)  # log 3
    1.0986
    """

    capturable = True

    def __init__(
        self,
        points: Tensor,
        model: CurvedModel = "poincare",
        *,
        curvature: float = 1.0,
        depth: Tensor | None = None,
    ) -> None:
        check_choice("model", model, get_args(CurvedModel), "ManifoldDistance takes any function.")
        check_positive("curvature", curvature, "1 is the unit ball, hyperboloid and sphere")
        check_tensor("points", points)
        check_rows(points, least=2 if model == "lorentz" else 1)
        self.model: CurvedModel = model
        self.curvature = float(curvature)
        self.n, self.device, self.dtype = points.shape[0], points.device, points.dtype
        self._rounding = torch.finfo(points.dtype).eps
        self._place = _place(points.detach(), model, self.curvature, depth)

    def columns(self, index: Tensor) -> Tensor:
        """Compute D[:, index], with exact zeros where a point meets itself."""
        return self._scaled(self._place.between(self._at(index))).to(self.dtype)

    def to(self, device: torch.device, dtype: torch.dtype) -> "CurvedDistance":
        """Move the points to another device; ``dtype`` is that of the distances."""
        if self._lies_at(device, dtype):
            return self
        return self._moved(device, dtype, _place=_each(self._place, lambda part: part.to(device)))

    def maximum(self) -> float:
        """Find the largest distance; of more than 50,000 points a lower bound, at least half."""
        if self.n <= EXACT_MAXIMUM_POINTS:
            left, right = self._place.order()
            pair = farthest_pair(left[:, 0], lambda block: left[block] @ right.T)
            first, second = (self._at(one[None]) for one in pair)
            return float(self._scaled(first.between(second)))
        every = torch.arange(self.n, device=self.device)
        return walk(lambda point: self.columns(every[point, None])[:, 0], 0)[0]

    def uncertainty(self) -> Tensor:
        """Estimate how far rounding of the coordinates moves each point of the ball, (n,).

        Radii of other models are as precise far out as near.
        """
        if not isinstance(self._place, _Ball):
            return super().uncertainty()
        # the factor is c^(1/4) (1 - c |x|^2)^(-1/2), and 1 - c |x|^2 nearly 2 (1 - r)
        stretched = self._place.factor.square() / math.sqrt(self.curvature)
        return self._scaled(2 * self._rounding * stretched)

    def coordinates(self) -> Tensor | None:
        """Give rows (p, t, a, f) of hyperbolic points, (n, k + 3) float64; of others ``None``.

        sinh(d / 2)^2 = |p - p'|^2 (a a')^2 + (t - t')^2 (f f')^2 at unit curvature.
        """
        return self._place.coordinates()

    def _at(self, index: Tensor) -> Any:
        """Pick the places of some points."""
        return _each(self._place, lambda part: part[index])

    def _scaled(self, distance: Tensor) -> Tensor:
        """Turn distances of unit curvature into those of this one."""
        return distance / math.sqrt(self.curvature)


def curved_distances(x: Tensor, y: Tensor, model: CurvedModel, curvature: float) -> Tensor:
    """Compute the distances of two sets of points, shape (q, n), float64; check both."""
    places = (_place(points, model, curvature, None) for points in (x, y))
    return next(places).between(next(places)) / math.sqrt(curvature)


class _Ball(NamedTuple):
    """Points by their coordinates in the Poincare ball."""

    points: Tensor  # (n, d)
    factor: Tensor  # (n,) ((1 - c |x|^2) / sqrt(c))^(-1/2)

    def between(self, other: Any) -> Tensor:
        length = straight(self.points, other.points)
        return length.mul_(self.factor[:, None]).mul_(other.factor).asinh_().mul_(2)

    def coordinates(self) -> Tensor:
        zero = torch.zeros_like(self.factor)
        return torch.cat([self.points, torch.stack([zero, self.factor, zero], 1)], 1)

    def order(self) -> tuple[Tensor, Tensor]:
        return _squared_order(self.points, self.factor)


class _Polar(NamedTuple):
    """Points of hyperbolic space by their directions and their gaps to the border of the ball."""

    direction: Tensor  # (n, d) of length one
    gap: Tensor  # (n,) 1 - |y|
    factor: Tensor  # (n,) (1 - |y|^2)^(-1/2)

    def between(self, other: Any) -> Tensor:
        across = straight(self.direction, other.direction)
        across = across.mul_(self._across()[:, None]).mul_(other._across())
        along = (self.gap[:, None] - other.gap).mul_(self.factor[:, None]).mul_(other.factor)
        return across.square_().add_(along.square_()).sqrt_().asinh_().mul_(2)

    def _across(self) -> Tensor:
        """Compute what the lengths of directions are multiplied by, for each of two points."""
        return (1 - self.gap).sqrt() * self.factor

    def coordinates(self) -> Tensor:
        rest = torch.stack([self.gap, self._across(), self.factor], 1)
        return torch.cat([self.direction, rest], 1)

    def order(self) -> tuple[Tensor, Tensor]:
        return _squared_order((1 - self.gap)[:, None] * self.direction, self.factor)


class _Sphere(NamedTuple):
    """Unit vectors."""

    points: Tensor  # (n, d)

    def between(self, other: Any) -> Tensor:
        apart, together = (straight(self.points, sign * other.points) for sign in (1, -1))
        return torch.atan2(apart, together).mul_(2)

    def coordinates(self) -> None:
        return None

    def order(self) -> tuple[Tensor, Tensor]:
        return -self.points, self.points


# Where points lie in a space of unit curvature: ``between`` are the distances to others, (n, s);
# ``coordinates`` all that sinh(d / 2)^2 is made of, see CurvedDistance.coordinates; ``order`` two
# tables whose products, L @ R.T, are in the order of the distances.
_Place = _Ball | _Polar | _Sphere


def _each(place: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to all tensors of a place."""
    return type(place)(*map(function, place))


def _squared_order(points: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Write sinh(d / 2)^2 as a product; its cancellation is harmless where points are far apart."""
    square, one = points.square().sum(1, keepdim=True), torch.ones_like(factor)[:, None]
    weight = factor.square()[:, None]
    left = torch.cat([square, one, -2 * points], 1) * weight
    return left, torch.cat([one, square, points], 1) * weight


def _place(points: Tensor, model: CurvedModel, curvature: float, depth: Tensor | None) -> _Place:
    """Check points, and find where they lie in a space of unit curvature, float64."""
    rounding = _ROUNDINGS * torch.finfo(points.dtype).eps
    points = points.double()
    if depth is not None:
        if model != "poincare":
            raise InvalidInputError(
                "`depth` is a coordinate of the Poincare ball; drop it, or pass model='poincare'."
            )
        return _by_depth(points, depth)
    if model == "poincare":
        gap = _gap(points, curvature)
        inside = gap > 0
        _refuse(
            ~inside,
            lambda row: (
                "lies on or outside the border of the Poincare ball: c |x|^2 = "
                f"{float(curvature * points[row].square().sum()):.9g} must be less than 1"
            ),
            "Pass coordinates in float64, or directions and CurvedDistance(..., depth=-log(1 - r)) "
            "for points so far out.",
        )
        # coordinates as they are given: multiplying them would round their differences
        return _Ball(points, gap.rsqrt() * curvature**0.25)
    if model == "lorentz":
        time, space = points[:, 0] * math.sqrt(curvature), points[:, 1:] * math.sqrt(curvature)
        radius = space.norm(dim=1)
        exact = torch.hypot(radius, torch.ones_like(radius))
        _refuse(
            (time - exact).abs() > rounding * exact,
            lambda row: (
                "does not lie on the hyperboloid: sqrt(c) x_0 must be sqrt(1 + c |x_space|^2) = "
                f"{float(exact[row]):.9g}; got {float(time[row]):.9g}"
            ),
            "The time coordinate comes first. `curvature` is 1 / k of geoopt's Lorentz(k).",
        )
        direction = space / torch.where(radius > 0, radius, 1.0)[:, None]
        return _Polar(direction, 2 / (1 + exact + radius), ((1 + exact) / 2).sqrt())
    length = points.norm(dim=1) * math.sqrt(curvature)
    _refuse(
        (length - 1).abs() > rounding,
        lambda row: f"does not lie on the sphere: sqrt(c) |x| must be 1; got {length[row]:.9g}",
        "Divide the points by their lengths, or pass the `curvature` c of their radius, "
        "1 / sqrt(c).",
    )
    return _Sphere(points * (math.sqrt(curvature) / length)[:, None])


def _by_depth(points: Tensor, depth: Tensor) -> _Polar:
    """Place points by their directions and depths, -log(1 - r)."""
    check_tensor("depth", depth)
    if depth.shape != points.shape[:1]:
        raise InvalidInputError(
            f"`depth` must have shape ({len(points)},), one number per point; got "
            f"{tuple(depth.shape)}."
        )
    check_finite("depth", depth)
    depth = depth.to(points)
    _refuse(
        (depth < 0) | (depth > LARGEST_LOGARITHM),
        lambda row: f"has the depth {float(depth[row]):.9g}",
        f"-log(1 - r) must be between 0, the origin, and {LARGEST_LOGARITHM:g}.",
    )
    length = points.norm(dim=1)
    _refuse(
        (length == 0) & (depth > 0),
        lambda row: "is a zero vector, which has no direction",
        "Only the origin, of depth 0, may be one.",
    )
    gap = (-depth).exp()
    direction = points / torch.where(length > 0, length, 1.0)[:, None]
    return _Polar(direction, gap, (gap * (2 - gap)).rsqrt())


def _gap(points: Tensor, curvature: float) -> Tensor:
    """Compute 1 - c |x|^2, shape (n,), without the rounding of the square."""
    total, error = torch.zeros_like(points[:, 0]), torch.zeros_like(points[:, 0])
    for column in points.T:
        square, lost = _exact_product(column, column)
        # Knuth's sum of two numbers, and what it rounds off
        larger = total + square
        part = larger - total
        error = error + ((total - (larger - part)) + (square - part)) + lost
        total = larger
    product, lost = _exact_product(total, torch.full_like(total, curvature))
    return (1 - product) - (lost + curvature * error)


def _exact_product(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply float64 numbers, and compute what the product rounds off, by Dekker's splitting."""

    def halves(value: Tensor) -> tuple[Tensor, Tensor]:
        wide = value * 134217729.0
        high = wide - (wide - value)
        return high, value - high

    product = x * y
    (x_high, x_low), (y_high, y_low) = halves(x), halves(y)
    lost = ((x_high * y_high - product) + x_high * y_low + x_low * y_high) + x_low * y_low
    return product, lost


def _refuse(wrong: Tensor, what: Callable[[int], str], advice: str) -> None:
    """Refuse points, and name the first of them by its row."""
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0, 0])
        count = int(wrong.sum())
        others = f" ({count} rows in all)" if count > 1 else ""
        raise InvalidInputError(f"`points` row {row} {what(row)}{others}. {advice}")
