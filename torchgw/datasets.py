"""Small data sets with a known answer, for demonstrations and tests."""

import numpy as np
from numpy.typing import NDArray

from torchgw._boundary.checks import check_count, check_not_negative

__all__ = ["spiral", "swiss_roll"]


def spiral(
    n: int, random_state: int | np.random.Generator | None = None, *, noise: float = 0.05
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Draw a noisy spiral in the plane.

    The curve is (r cos t, r sin t) with t = linspace(0, 9) and r = linspace(0.3, 1).

    Parameters
    ----------
    n : int
        Number of points.
    random_state : int, numpy.random.Generator or None
        Source of the noise; ``None`` draws new noise each time.
    noise : float
        Standard deviation of the Gaussian noise of every coordinate. Draws beyond two of it are
        redrawn, so that neighbouring turns stay apart, and the answer is known, however many points
        there are.

    Returns
    -------
    points : ndarray, shape (n, 2), float64
        Points in the order of the curve.
    angle : ndarray, shape (n,), float64
        Angle t of each point.

    Examples
    --------
    >>> points, angle = spiral(400, random_state=0)
    >>> points.shape, angle.shape
    ((400, 2), (400,))
    """
    return _noisy_spiral(n, random_state, noise, None)


def swiss_roll(
    n: int,
    random_state: int | np.random.Generator | None = None,
    *,
    noise: float = 0.05,
    height: float = 0.3,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Draw a noisy Swiss roll: the curve of :func:`spiral` with a third, uniform axis.

    Parameters
    ----------
    n, random_state, noise
        As in :func:`spiral`; the heights are drawn as well.
    height : float
        Extent of the third axis. A roll of 500 points that is much taller is covered so thinly that
        a graph of 5 neighbours jumps between its turns.

    Returns
    -------
    points : ndarray, shape (n, 3), float64
        Points in the order of the curve.
    angle : ndarray, shape (n,), float64

    Examples
    --------
    >>> points, angle = swiss_roll(500, random_state=0)
    >>> points.shape, angle.shape
    ((500, 3), (500,))
    """
    check_not_negative("height", height)
    return _noisy_spiral(n, random_state, noise, height)


def _noisy_spiral(
    n: int, random_state: int | np.random.Generator | None, noise: float, height: float | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Draw points of the spiral, with a third axis if it has a height, and their angles."""
    check_count("n", n)
    check_not_negative("noise", noise)
    generator = np.random.default_rng(random_state)
    angle, radius = np.linspace(0.0, 9.0, n), np.linspace(0.3, 1.0, n)
    points = np.column_stack([radius * np.cos(angle), radius * np.sin(angle)])
    if height is not None:
        points = np.column_stack([points, height * generator.random(n)])
    return points + noise * _bounded_normal(points.shape, generator), angle


def _bounded_normal(shape: tuple[int, ...], generator: np.random.Generator) -> NDArray[np.float64]:
    """Draw standard normal numbers, each redrawn until it lies within two."""
    values = generator.standard_normal(shape)
    while (outside := np.abs(values) > 2).any():
        values[outside] = generator.standard_normal(int(outside.sum()))
    return values
