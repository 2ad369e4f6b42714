"""Maps of one space onto the other: rigid, affine or thin plates, fitted to pairs of a match."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import scipy
import torch
from numpy.typing import NDArray

from torchgw._boundary.arrays import check_points, check_shape, in_kind, to_numpy
from torchgw._boundary.checks import check_not_negative
from torchgw._errors import InvalidInputError, InvalidTypeError
from torchgw.distances.new_points import Space

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
_SMOOTHINGS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)


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

    def weighed(self, weights: Table) -> Pairs:
        """Give the same pairs other weights."""
        return Pairs(self.source, self.target, weights)

    def centred(self) -> tuple[Table, Table, Table, Table]:
        """Give both means, and the places less these."""
        x, y = self.weights @ self.source, self.weights @ self.target
        return x, y, self.source - x, self.target - y

    def missed(self, placed: Placing) -> Table:
        """Compute the residuals of a map."""
        return np.asarray(np.linalg.norm(self.target - placed(self.source), axis=1))


@dataclass(frozen=True)
class _Linear:
    """points @ matrix + offset."""

    matrix: Table
    offset: Table
    scale: float = float("nan")

    def __call__(self, points: Table) -> Table:
        return np.asarray(points @ self.matrix + self.offset)


@dataclass(frozen=True)
class _Plates:
    """Thin plates between coordinates less their means, over their spreads."""

    plates: Any
    source: tuple[Table, float]
    target: tuple[Table, float]

    def __call__(self, points: Table) -> Table:
        (mean_x, one), (mean_y, other) = self.source, self.target
        return np.asarray(self.plates((points - mean_x) / one) * other + mean_y)


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
    return np.asarray(to_numpy(points.double()))


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
        if not isinstance(value, bool):
            raise InvalidTypeError(f"`{name}` must be True or False; got {value!r}.")
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
        if smoothing is None:
            smoothing = _best_smoothing(pairs, neighbors)
        check_not_negative("smoothing", smoothing)
        chosen = float(smoothing)
        fit = lambda some: _thin_plate(some, chosen, neighbors)  # noqa: E731
    placed = fit(pairs)
    weights = pairs.weights
    if robust:
        # the bulk is found by maps that cannot follow a single pair
        stiff = _affine if kind == "thin_plate" else fit
        weights = _robust(pairs, stiff, weights, absolute=True)
        weights = _robust(pairs, fit, weights, absolute=False)
        placed = fit(pairs.weighed(weights))
    linear = placed if isinstance(placed, _Linear) else None
    return SpaceMap(
        kind,
        None if linear is None else linear.matrix,
        None if linear is None else linear.offset,
        float("nan") if linear is None else linear.scale,
        pairs.source,
        pairs.target,
        pairs.missed(placed),
        weights,
        float("nan") if smoothing is None or kind != "thin_plate" else float(smoothing),
        placed,
    )


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
    if not reflection and np.linalg.det(left @ right) < 0:
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
        missed = pairs.missed(fit(pairs.weighed(weights)))
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
