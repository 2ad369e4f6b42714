"""Geodesic distances as factors, from a few landmarks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from numbers import Integral
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._boundary.arrays import resolve_device
from torchgw._errors import GraphWarning, InvalidInputError, warn_user
from torchgw.distances._graph.edges import components
from torchgw.distances.base import DistanceProvider, Factors
from torchgw.distances.graph import as_geodesics

__all__ = ["LandmarkDistance"]

# Landmarks found one by one, as farthest points.
_EXTREMES = 3
# Landmarks of graphs of up to so many vertices: the value of a plan is too high by as much as the
# errors of both sides, and within 1% from 100 on. More factors cost every iteration more, but
# little where the cost is stored, as a GPU does at this size.
_FEW_VERTICES = 8_192
_FEW = 123
# Vertices up to which all are landmarks, and the distances exact.
_ALL_VERTICES = 256
# Those of larger graphs when their error is estimated. It ends there at this error, relative to the
# distances, or when a step takes off less than this share of it. A step of 15 takes off 8% of an
# error of 10% in high-dimensional clouds, and a quarter on surfaces.
_COUNTS = (18, 33, 48, 63, 78)
_TOLERANCE = 0.02
_LEAST_GAIN = 0.1
# Landmarks of a round that are drawn together.
_PART = 15
# Power of the distance to the landmarks so far that a vertex is drawn in proportion to.
_SPREAD = 4
# Columns besides the landmarks' that the error is estimated from; a GPU finds 16 at a time.
_HELD_OUT = 15
# Error, relative to the least, that a smaller rank may have.
_RANK_SLACK = 1.05


class LandmarkDistance(DistanceProvider):
    """Nystrom approximation of the geodesic distances of a graph.

    With the distances D_L, shape (n, L), to L landmarks and their block W = U diag(v) U.T,

        D ~ D_L W^+ D_L.T = A diag(sign v) A.T,    A = D_L U |v|^(-1/2).

    Columns, products and factors all come from this one approximation. Only 15 runs of Dijkstra
    more than landmarks are made, and memory is O(n L).

    Parameters
    ----------
    graph : SciPy sparse array or matrix, or Geodesics
        Symmetric edge lengths. A graph in several components is given a finite distance between
        them with a warning; :func:`torchgw.distances.connect` has the choices.
    n_landmarks : int or None, optional
        At most n. ``None`` is all up to 256 vertices, which is exact, and 123 up to 8,192. Above,
        it adds 15 at a time, from 18 on, until the error on held-out columns is 2% of their size,
        or a step takes off less than a tenth of it, or there are 78.
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
    error : float
        Frobenius error relative to exact geodesics, estimated from 15 columns that are not
        landmarks; 0 if there are no others.

    Raises
    ------
    InvalidInputError
        If the graph is not valid, or ``n_landmarks`` is not within 1 and n.

    Notes
    -----
    The first three landmarks are farthest points, which gives the largest distance; the others are
    drawn in proportion to the fourth power of the distance to those before. Farthest points alone
    are as good on curves, but in a large cloud they are all outliers: 7.0% error against 2.5% for
    100,000 Gaussian points in 3 dimensions.

    W^+ leaves out small eigenvalues, whose inverses amplify what the landmarks do not capture. No
    fixed tolerance suits both smooth and high-dimensional graphs, so the rank is the smallest one
    whose error on the held-out columns is within 5% of the least. Fewer landmarks than components
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
        if n_landmarks is not None:
            check_choice("n_landmarks", n_landmarks, 1, self.n)
        check_choice("start", start, 0, self.n - 1)
        generator = generator or torch.Generator().manual_seed(0)
        rows_of = self.geodesics.reader(self.device)
        held_out = torch.from_numpy(_draw(self.n, min(_HELD_OUT, self.n), generator))
        held_out = held_out.to(self.device)
        self.landmarks = torch.tensor([start], device=self.device)
        # together, as a GPU takes as long for one source as for a few
        first = rows_of(torch.cat([self.landmarks, held_out]))
        rows, exact, before = first[:1], first[1:], math.inf
        counts = (n_landmarks,) if n_landmarks is not None else _default_counts(self.n)
        for count in counts:
            self.landmarks, rows = _add_landmarks(
                rows_of, self.landmarks, rows, exact, count, generator
            )
            factors, self.error = _approximate(rows, self.landmarks, held_out, exact)
            exhausted = len(self.landmarks) < count
            stuck = self.error > (1 - _LEAST_GAIN) * before
            if exhausted or stuck or self.error <= _TOLERANCE:
                break
            before = self.error
        self._warn_if_too_few(len(self.landmarks))
        self._largest = float(rows.max())
        self._factors = Factors(*(part.to(dtype).contiguous() for part in factors))

    def state(self) -> dict[str, Any]:
        """Return everything but the graph, for :meth:`restore`."""
        return {
            "landmarks": self.landmarks,
            "error": self.error,
            "largest": self._largest,
            "factors": tuple(self._factors),
        }

    @classmethod
    def restore(cls, graph: Any, state: dict[str, Any]) -> LandmarkDistance:
        """Return the provider that had this state, on the device of its tensors."""
        provider = cls.__new__(cls)
        provider.geodesics = as_geodesics(graph)
        provider.n = provider.geodesics.n
        provider.landmarks, provider.error = state["landmarks"], state["error"]
        provider._largest = state["largest"]
        provider._factors = Factors(*state["factors"])
        provider.device = provider._factors.matrix.device
        provider.dtype = provider._factors.matrix.dtype
        return provider

    def _warn_if_too_few(self, n_landmarks: int) -> None:
        """Warn when some component has no landmark."""
        if self.geodesics.unreachable is None:
            return
        n_components = components(self.geodesics.edges)[0]
        if n_components > n_landmarks:
            warn_user(
                f"{n_landmarks} landmarks cannot tell the {n_components} components of the graph "
                f"apart. Pass `n_landmarks={n_components}` or more, or join the components with "
                "`connect(graph, points)`.",
                GraphWarning,
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


def check_choice(name: str, value: int, low: int, high: int) -> None:
    """Refuse a number out of its range."""
    if not isinstance(value, Integral) or not low <= value <= high:
        raise InvalidInputError(
            f"`{name}` must be an integer within {low} and {high} for a graph of "
            f"{high if name == 'n_landmarks' else high + 1} vertices; got {value!r}."
        )


def _default_counts(n: int) -> tuple[int, ...]:
    """Return the numbers of landmarks at which to see whether they are enough."""
    if n > _FEW_VERTICES:
        return _COUNTS
    return (n if n <= _ALL_VERTICES else _FEW,)


def _draw(n: int, count: int, generator: torch.Generator | None) -> NDArray[np.int64]:
    """Return distinct numbers below n."""
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    return torch.randperm(n, generator=generator, device="cpu")[:count].numpy()


def _add_landmarks(
    rows_of: Callable[[Tensor], Tensor],
    landmarks: Tensor,
    rows: Tensor,
    others: Tensor,
    count: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Return more landmarks, shape (L,), and their distances, shape (L, n), on the device.

    The first are found one by one, the others drawn and their shortest paths found together;
    ``others`` are distances of further vertices, which help to spread the draws.
    """
    while len(landmarks) < count:
        closest = rows.amin(dim=0)
        if closest.max() == 0:
            # What is left duplicates a landmark.
            break
        if len(landmarks) < _EXTREMES:
            fresh = closest.argmax()[None]
        else:
            known = torch.cat([rows, others])
            fresh = _draw_round(closest, known, count - len(landmarks), generator)
        landmarks = torch.cat([landmarks, fresh])
        rows = torch.cat([rows, rows_of(fresh)])
    return landmarks, rows


def _draw_round(closest: Tensor, known: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Draw landmarks of a round in parts, each away from the parts before.

    Distances to those are not known yet. By the triangle inequality they are at least as large as
    the difference of the distances to any vertex, and on a curve equal to the largest of these.
    """
    drawn = _draw_spread(closest, min(size, _PART), generator)
    while len(drawn) < size:
        least = torch.cdist(known.T, known[:, drawn[-_PART:]].T, p=torch.inf)
        closest = torch.minimum(closest, least.amin(dim=1)).index_fill(0, drawn, 0.0)
        part = _draw_spread(closest, min(size - len(drawn), _PART), generator)
        if not len(part):
            break
        drawn = torch.cat([drawn, part])
    return drawn


def _draw_spread(closest: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Draw distinct vertices in proportion to a power of their distance to the landmarks."""
    # The largest of log(u) / weight are a draw without replacement (Efraimidis and Spirakis 2006);
    # landmarks and their duplicates have weight zero and come last.
    uniform = torch.rand(len(closest), generator=generator, dtype=torch.float64, device="cpu")
    # the power of a small number would underflow
    weight = (closest / closest.max()) ** _SPREAD
    keys = uniform.to(closest.device).log() / weight
    possible = int((weight > 0).sum())
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


def _approximate(
    rows: Tensor, landmarks: Tensor, held_out: Tensor, exact: Tensor
) -> tuple[tuple[Tensor, Tensor], float]:
    """Return factors of the smallest rank nearly as good as the best, and their relative error."""
    matrix, signs = _nystrom(rows, landmarks)
    fresh = ~torch.isin(held_out, landmarks)
    held_out, exact = held_out[fresh], exact[fresh]
    if not len(held_out):
        return (matrix, signs), 0.0
    # squared distances of the exact columns to the sums of the first r terms
    own, size = signs * matrix[held_out], exact.square().sum().clamp_min(1e-300)
    products = ((own.T @ own) * (matrix.T @ matrix)).cumsum(0).cumsum(1).diagonal()
    square = products - 2 * (own * (exact @ matrix)).sum(0).cumsum(0) + size
    # what cancels leaves nothing below that
    errors = (square / size).clamp_min(torch.finfo(square.dtype).eps).sqrt()
    rank = int((errors <= _RANK_SLACK * errors.min()).nonzero()[0]) + 1
    return (matrix[:, :rank], signs[:rank]), float(errors[rank - 1])
