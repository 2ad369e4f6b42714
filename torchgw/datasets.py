"""Small data sets with a known answer, for demonstrations and tests."""

from __future__ import annotations

from numbers import Real

import numpy as np
from numpy.typing import NDArray

from torchgw._boundary.checks import check_count
from torchgw._errors import InvalidInputError

__all__ = ["spiral", "swiss_roll"]


def spiral(
    n: int, random_state: int | np.random.Generator | None = None, *, noise: float = 0.05
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Draw a noisy spiral in the plane.

    The curve is  (r cos t, r sin t)  with t = linspace(0, 9) and r = linspace(0.3, 1).

    Parameters
    ----------
    n : int
        Number of points.
    random_state : int, numpy.random.Generator or None
        Source of the noise; None draws a new one each time.
    noise : float
        Scale of the Gaussian added to every coordinate. Draws beyond two of it are redrawn:
        neighbouring turns then stay apart however many points there are, and the answer is known.

    Returns
    -------
    points : ndarray, shape (n, 2), float64
        The points, in the order of the curve.
    angle : ndarray, shape (n,), float64
        Where on the curve each point lies.

    Examples
    --------
    >>> points, angle = spiral(400, random_state=0)
    >>> points.shape, angle.shape
    ((400, 2), (400,))
    """
    check_count("n", n)
    _check_size("noise", noise)
    generator = np.random.default_rng(random_state)
    angle = np.linspace(0.0, 9.0, n)
    points = _curve(angle)
    return points + noise * _bounded_normal(points.shape, generator), angle


def swiss_roll(
    n: int,
    random_state: int | np.random.Generator | None = None,
    *,
    noise: float = 0.05,
    height: float = 0.3,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Draw a noisy Swiss roll: the curve of `spiral` with a third, uniform axis.

    Parameters
    ----------
    n : int
        Number of points.
    random_state : int, numpy.random.Generator or None
        Source of the heights and of the noise; None draws new ones each time.
    noise : float
        Scale of the Gaussian added to every coordinate. Draws beyond two of it are redrawn:
        neighbouring turns then stay apart however many points there are, and the answer is known.
    height : float
        Extent of the third axis. A roll of 500 points that is much taller is so thinly covered that
        a 5-nearest-neighbour graph jumps between its turns.

    Returns
    -------
    points : ndarray, shape (n, 3), float64
        The points, in the order of the curve.
    angle : ndarray, shape (n,), float64
        Where on the curve each point lies.

    Examples
    --------
    >>> points, angle = swiss_roll(500, random_state=0)
    >>> points.shape, angle.shape
    ((500, 3), (500,))
    """
    check_count("n", n)
    _check_size("noise", noise)
    _check_size("height", height)
    generator = np.random.default_rng(random_state)
    angle = np.linspace(0.0, 9.0, n)
    points = np.column_stack([_curve(angle), height * generator.random(n)])
    return points + noise * _bounded_normal(points.shape, generator), angle


def _check_size(name: str, value: float) -> None:
    if not isinstance(value, Real) or not 0 <= value < np.inf:
        raise InvalidInputError(f"`{name}` must be finite and not negative; got {value!r}.")


def _bounded_normal(shape: tuple[int, ...], generator: np.random.Generator) -> NDArray[np.float64]:
    """Draw standard normal numbers, each redrawn until it lies within two."""
    values = generator.standard_normal(shape)
    while (outside := np.abs(values) > 2).any():
        values[outside] = generator.standard_normal(int(outside.sum()))
    return values


def _curve(angle: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the plane spiral at some angles, shape (n, 2)."""
    radius = np.linspace(0.3, 1.0, len(angle))
    return np.column_stack([radius * np.cos(angle), radius * np.sin(angle)])
