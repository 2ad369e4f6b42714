"""Modes of vibration of surfaces, and whether two of them may be poses of one shape."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

from torchgw.distances.surface import Surface

# Modes that surfaces are compared by, and that a map begins with; the most that are computed, and
# vertices for each of them. [L1532]
FIRST, _LAST, _EACH = 20, 150, 20
# Squares up to this are the rounding of zero, of which each piece of a surface has one. A choice.
_SILENT = 1e-6
# Cotangents of angles beyond this are those of triangles without area. A choice.
_FLAT = 1e3


class Modes(NamedTuple):
    """The lowest modes of a surface of area one, which depend on distances along it alone."""

    squares: NDArray[np.float64]  # (k,), of their frequencies, the first zero
    functions: NDArray[np.float64]  # (n, k), of mean square one by area


def modes(surface: Surface, most: int = _LAST) -> Modes | None:
    """Compute eigenfunctions of the Laplacian; ``None`` for few vertices, or without triangles."""
    points, faces, place = surface.joined
    n = len(points)
    count = min(most, n // _EACH)
    area = np.bincount(place, surface.weights, minlength=n)
    if count < FIRST or (area <= 0).any():
        return None
    root = scipy.sparse.diags_array(area**-0.5)
    # those of a surface of area one are about 4 pi times their number
    squares, found = scipy.sparse.linalg.eigsh(
        (root @ _stiffness(points, faces) @ root).tocsc(), k=count, sigma=-1.0,
        v0=np.random.default_rng(0).normal(size=n),
    )  # fmt: skip
    return Modes(squares, (found / np.sqrt(area)[:, None])[place])


def apart(one: Modes, other: Modes) -> float:
    """Tell how different two surfaces sound: the logarithms of their first squares, in the mean."""
    # lengths that are stretched by a factor divide these squares by its square
    heard = [np.maximum(side.squares[1:FIRST], _SILENT) for side in (one, other)]
    return float(np.abs(np.log(heard[0] / heard[1])).mean())


def _stiffness(points: NDArray[np.float64], faces: NDArray[np.int64]) -> scipy.sparse.csr_array:
    """Sum half the cotangents of the angles that face each edge, as finite elements do."""
    rows, columns, weights = [], [], []
    for corner in range(3):
        at, one, other = (faces[:, (corner + step) % 3] for step in range(3))
        left, right = points[one] - points[at], points[other] - points[at]
        double = np.linalg.norm(np.cross(left, right), axis=1)
        inner = (left * right).sum(1)
        half = inner / np.maximum(double, np.abs(inner) / _FLAT + np.finfo(float).tiny) / 2
        rows += [one, other]
        columns += [other, one]
        weights += [half, half]
    ends = np.concatenate(rows), np.concatenate(columns)
    table = scipy.sparse.coo_array((np.concatenate(weights), ends), shape=(len(points),) * 2)
    table = table.tocsr()
    return scipy.sparse.diags_array(table.sum(1)) - table
