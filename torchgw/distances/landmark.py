"""Geodesic distances as factors, from a few landmarks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from torchgw._errors import GraphWarning, InvalidInputError
from torchgw.distances.base import DistanceProvider, Factors, resolve_device
from torchgw.distances.graph import as_geodesics

__all__ = ["DEFAULT_N_LANDMARKS", "LandmarkDistance"]

DEFAULT_N_LANDMARKS = 50
# Landmarks after the first that are farthest points; the others are drawn.
_EXTREMES = 4
# Rounds in which those are drawn.
_ROUNDS = 3
# Power of the distance to the landmarks so far that a vertex is drawn in proportion to.
_SPREAD = 4
# Columns besides the landmarks' that choose the rank.
_HELD_OUT = 4
# Error, relative to the least, that a smaller rank may have.
_RANK_SLACK = 1.05


class LandmarkDistance(DistanceProvider):
    """Nystrom approximation of the geodesic distances of a graph.

    With the distances D_L, shape (n, L), to L landmarks and their block W = U diag(v) U.T,

        D ~ D_L W^+ D_L.T = A diag(sign v) A.T,    A = D_L U |v|^(-1/2).

    Columns, products and factors all come from this one approximation. Only 4 runs of Dijkstra more
    than landmarks are made, and memory is O(n L).

    Parameters
    ----------
    graph : SciPy sparse array or matrix, or Geodesics
        Symmetric edge lengths. A graph in several components is given a finite distance between
        them with a warning; :func:`torchgw.distances.connect` has the choices.
    n_landmarks : int or None, optional
        At most n. ``None`` is the smaller of n and 50: relative errors of 0.2% on a spiral, 0.9% on
        a Swiss roll, 4% on a cloud in 3 and 12% in 10 dimensions, at 1,000 points each.
    start : int, optional
        First landmark.
    generator : torch.Generator or None, optional
        Draws landmarks and the columns that the rank is chosen by, on the CPU; ``None`` is a fixed
        seed.
    device : torch.device or str, optional
        Device of everything that is returned.
    dtype : torch.dtype, optional
        Dtype of everything that is returned; the factors are computed in float64.

    Attributes
    ----------
    landmarks : Tensor, shape (L,), int64
        Vertices, in the order found. Fewer than asked for if the rest are their duplicates.
    rank : int
        Number of factors.

    Raises
    ------
    InvalidInputError
        If the graph is not valid, or ``n_landmarks`` is not within 1 and n.

    Notes
    -----
    The first landmarks are farthest points, which gives the largest distance; the others are drawn
    in proportion to the fourth power of the distance to those before. Farthest points alone are as
    good on curves, but in a large cloud they are all outliers: 7.0% error against 2.5% for 100,000
    Gaussian points in 3 dimensions.

    W^+ leaves out small eigenvalues, whose inverses amplify what the landmarks do not capture. No
    fixed tolerance suits both smooth and high-dimensional graphs, so the rank is the smallest one
    whose error on four held-out columns is within 5% of the least. Fewer landmarks than components
    cannot tell all components apart, which a warning says.
    """

    capturable = True

    def __init__(
        self,
        graph: Any,
        n_landmarks: int | None = None,
        *,
        start: int = 0,
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.geodesics = as_geodesics(graph)
        self.n = self.geodesics.n
        self.device = resolve_device(device)
        self.dtype = dtype
        if n_landmarks is None:
            n_landmarks = min(self.n, DEFAULT_N_LANDMARKS)
        _check_choice("n_landmarks", n_landmarks, 1, self.n)
        _check_choice("start", start, 0, self.n - 1)
        generator = generator or torch.Generator().manual_seed(0)
        rows_of = self.geodesics.reader(self.device)
        self.landmarks, rows = _choose_landmarks(
            rows_of, n_landmarks, torch.tensor([start], device=self.device), generator
        )
        matrix, signs = _nystrom(rows, self.landmarks)
        rest = np.setdiff1d(np.arange(self.n), self.landmarks.cpu().numpy())
        self._warn_if_too_few(len(self.landmarks))
        if len(rest):
            drawn = rest[_draw(len(rest), min(_HELD_OUT, len(rest)), generator)]
            held_out = torch.from_numpy(drawn).to(self.device)
            exact = rows_of(held_out)
            rank = _choose_rank(matrix, signs, held_out, exact)
            matrix, signs = matrix[:, :rank], signs[:rank]
        self._largest = float(rows.max())
        self._factors = Factors(matrix.to(dtype).contiguous(), signs.to(dtype))

    def _warn_if_too_few(self, n_landmarks: int) -> None:
        """Warn when some component has no landmark."""
        if self.geodesics.unreachable is None:
            return
        n_components = connected_components(self.geodesics.graph, directed=False)[0]
        if n_components > n_landmarks:
            warnings.warn(
                f"{n_landmarks} landmarks cannot tell the {n_components} components of the graph "
                f"apart. Pass `n_landmarks={n_components}` or more, or join the components with "
                "`connect(graph, points)`.",
                GraphWarning,
                stacklevel=3,
            )

    @property
    def rank(self) -> int:
        """Number of factors."""
        return self._factors.matrix.shape[1]

    def columns(self, index: Tensor) -> Tensor:
        """Return the approximate D[:, index]; its diagonal is small, not zero."""
        return self._factors.columns(index)

    def factors(self) -> Factors:
        """Return the factors of the approximation."""
        return self._factors

    def to(self, device: torch.device, dtype: torch.dtype) -> LandmarkDistance:
        """Return the same distances on another device or in another dtype."""
        device = resolve_device(device)
        if (device, dtype) == (self.device, self.dtype):
            return self
        moved = copy.copy(self)
        moved.device, moved.dtype = device, dtype
        moved.landmarks = self.landmarks.to(device)
        moved._factors = Factors(*(part.to(device, dtype) for part in self._factors))
        return moved

    def maximum(self) -> float:
        """Return the largest geodesic distance of a landmark.

        A lower bound of the largest distance, at least half of it. As the first landmarks are
        farthest points it usually is the largest one, which the approximation may differ from by
        its error.
        """
        return self._largest

    def relative_error(
        self, sample: int = 64, *, generator: torch.Generator | None = None
    ) -> float:
        """Return the Frobenius error relative to exact geodesics, from a sample of columns.

        Parameters
        ----------
        sample : int
            Columns compared, at most n; each costs a Dijkstra run.
        generator : torch.Generator or None
            Draws them, on the CPU; ``None`` is a fixed seed.
        """
        index = _draw(self.n, min(sample, self.n), generator)
        exact = self.geodesics.rows(index)
        error = self.columns(torch.from_numpy(index).to(self.device)).T.cpu().double() - exact
        size = float(exact.norm())
        return float(error.norm()) / size if size else float(error.norm())


def _check_choice(name: str, value: int, low: int, high: int) -> None:
    """Refuse a number out of its range."""
    if not low <= value <= high:
        raise InvalidInputError(
            f"`{name}` must be within {low} and {high} for a graph of "
            f"{high if name == 'n_landmarks' else high + 1} vertices; got {value}."
        )


def _draw(n: int, count: int, generator: torch.Generator | None) -> NDArray[np.int64]:
    """Return distinct numbers below n."""
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    return torch.randperm(n, generator=generator)[:count].numpy()


def _choose_landmarks(
    rows_of: Callable[[Tensor], Tensor], count: int, first: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return landmarks, shape (L,), and their distances, shape (L, n), float64, on the device.

    The first are found one by one. The others are drawn in a few rounds, so that the shortest paths
    of a round can be found together.
    """
    landmarks, rows = first, rows_of(first)
    while len(landmarks) < count:
        closest = rows.amin(dim=0)
        farthest = closest.max()
        if farthest == 0:
            # What is left duplicates a landmark.
            break
        if len(landmarks) <= _EXTREMES:
            fresh = closest.argmax()[None]
        else:
            left = count - len(landmarks)
            size = min(left, -(-(count - 1 - _EXTREMES) // _ROUNDS))
            fresh = _draw_spread(closest / farthest, size, generator)
        landmarks = torch.cat([landmarks, fresh])
        rows = torch.cat([rows, rows_of(fresh)])
    return landmarks, rows


def _draw_spread(closest: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Draw distinct vertices in proportion to a power of their distance to the landmarks."""
    # The largest of log(u) / weight are a draw without replacement (Efraimidis and Spirakis 2006);
    # landmarks and their duplicates have weight zero and come last.
    uniform = torch.rand(len(closest), generator=generator, dtype=torch.float64)
    keys = uniform.to(closest.device).log() / closest**_SPREAD
    possible = int((closest > 0).sum())
    return keys.topk(min(size, possible)).indices


def _nystrom(rows: Tensor, landmarks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors, the largest eigenvalues first, down to rounding."""
    block = rows[:, landmarks]
    # A small problem, and LAPACK's answer does not depend on the device.
    values, vectors = torch.linalg.eigh(((block + block.T) / 2).cpu())
    order = values.abs().argsort(descending=True)
    values, vectors = values[order], vectors[:, order]
    kept = values.abs() > 1e-12 * values[0].abs()
    # A single point, or duplicates of one, are at distance zero: one factor of zeros.
    if not kept.any():
        return rows.new_zeros(rows.shape[1], 1), rows.new_ones(1)
    values, vectors = values[kept], vectors[:, kept]
    return rows.T @ (vectors / values.abs().sqrt()).to(rows.device), values.sign().to(rows.device)


def _choose_rank(matrix: Tensor, signs: Tensor, held_out: Tensor, exact: Tensor) -> int:
    """Return the smallest rank nearly as good as the best on the held-out columns."""
    terms = (signs * matrix[held_out])[:, None, :] * matrix
    errors = (exact[:, :, None] - terms.cumsum(dim=2)).square().sum(dim=(0, 1)).sqrt()
    return int((errors <= _RANK_SLACK * errors.min()).nonzero()[0]) + 1
