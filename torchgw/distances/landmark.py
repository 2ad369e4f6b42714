"""Geodesic distances in low rank, from those to a few landmarks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._boundary.arrays import resolve_device
from torchgw._boundary.checks import check_within
from torchgw._errors import GraphWarning, warn_user
from torchgw.distances._graph.edges import components
from torchgw.distances.base import DistanceProvider, Factors
from torchgw.distances.graph import as_geodesics

__all__ = ["LandmarkDistance"]

# Landmarks found one by one, as farthest points. [L101]
_EXTREMES = 3
# Landmarks of graphs of up to so many vertices. The value of a plan is too high by as much as the
# errors of both sides: within 1% from 100 landmarks on. More factors cost every iteration more, but
# little where the cost is stored, as a GPU does at this size. [L100]
_FEW_VERTICES = 8_192
_FEW = 123
# Vertices up to which all are landmarks, so that the distances are exact. [L100]
_ALL_VERTICES = 256
# Landmarks of larger graphs at which their error is estimated. They are enough at this error,
# relative to the distances, or when a step took off less than this share of it. A step of 15 takes
# off 8% of an error of 10% in high-dimensional clouds, and a quarter on surfaces. [L170, L311]
_COUNTS = (18, 33, 48, 63, 78)
_TOLERANCE = 0.02
_LEAST_GAIN = 0.1
# Landmarks of a round that are drawn together. [L101]
_PART = 15
# A vertex is drawn in proportion to this power of its distance to the landmarks so far. [L311]
_SPREAD = 4
# Further columns that the error is estimated from; a GPU finds 16 at a time. [L103]
_HELD_OUT = 15
# Error, relative to the least, that a smaller rank may have. [L194]
_RANK_SLACK = 1.05


class LandmarkDistance(DistanceProvider):
    """Nystrom approximation of the geodesic distances of a graph.

    With the distances D_L, shape (n, L), to L landmarks and their block W = U diag(v) U.T,

        D ~ D_L W^+ D_L.T = A diag(sign v) A.T,    A = D_L U |v|^(-1/2).

    Columns, products and factors all come from this one approximation. It takes 15 runs of Dijkstra
    more than there are landmarks, and memory O(n L).

    Parameters
    ----------
    graph : SciPy sparse array or matrix, or Geodesics
        Symmetric edge lengths. Components of a graph that is not connected are given a finite
        distance, with a warning; :func:`torchgw.distances.connect` has the choices.
    n_landmarks : int or None, optional
        Number of landmarks, at most n. ``None`` takes all of up to 256 vertices, which is exact,
        and 123 of up to 8,192. Of more it begins with 18 and adds 15 at a time, until the error on
        held-out columns is 2% of their size, or a step takes off less than a tenth of it, or there
        are 78.
    start : int, optional
        First landmark.
    generator : torch.Generator or None, optional
        Generator on the CPU that draws landmarks and held-out columns; ``None`` has a fixed seed.
    device : torch.device or str, optional
        Device of everything that is returned.
    dtype : torch.dtype, optional
        Dtype of everything that is returned; the factors are computed in float64.

    Attributes
    ----------
    landmarks : Tensor, shape (L,), int64
        Landmarks in the order found; fewer than asked for if all others duplicate one of them.
    rank : int
        Number of factors.
    error : float
        Frobenius error relative to exact geodesics, estimated from 15 columns that are not
        landmarks'; 0 if all are landmarks.

    Raises
    ------
    InvalidInputError
        If the graph is not valid, or ``n_landmarks`` is not between 1 and n.

    Notes
    -----
    The first three landmarks are farthest points, which gives the largest distance. The others are
    drawn in proportion to the fourth power of the distance to those before. Farthest points alone
    are as good on curves, but in a large cloud they are all outliers: 7.0% error against 2.5% for
    100,000 Gaussian points in 3 dimensions.

    W^+ leaves out small eigenvalues, whose inverses amplify what the landmarks do not capture. No
    fixed tolerance suits both smooth and high-dimensional graphs: the rank is the smallest one
    whose error on the held-out columns is within 5% of the least. If there are fewer landmarks than
    components, some components cannot be told apart, and a warning says so.
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
            check_within("n_landmarks", n_landmarks, 1, self.n, ", the number of vertices")
        check_within("start", start, 0, self.n - 1)
        generator = generator or torch.Generator().manual_seed(0)
        rows_of = self.geodesics.reader(self.device)
        held_out = torch.from_numpy(_draw(self.n, min(_HELD_OUT, self.n), generator))
        held_out = held_out.to(self.device)
        self.landmarks = torch.tensor([start], device=self.device)
        # a GPU takes as long for one source as for a few
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
        """Give what :meth:`restore` needs besides the graph."""
        return {
            "landmarks": self.landmarks,
            "error": self.error,
            "largest": self._largest,
            "factors": tuple(self._factors),
        }

    @classmethod
    def restore(cls, graph: Any, state: dict[str, Any]) -> LandmarkDistance:
        """Make the provider that had this state, on the device of its tensors."""
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
        """Warn if there are more components than landmarks."""
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
        """Compute D[:, index] of the approximation, whose diagonal is small, not zero."""
        return self._factors.columns(index)

    def factors(self) -> Factors:
        """Give the factors of the approximation."""
        return self._factors

    def to(self, device: torch.device, dtype: torch.dtype) -> LandmarkDistance:
        """Move the landmarks and factors to another device or dtype."""
        if self._lies_at(device, dtype):
            return self
        moved = copy.copy(self)
        moved.device, moved.dtype = resolve_device(device), dtype
        moved.landmarks = self.landmarks.to(device)
        moved._factors = Factors(*(part.to(device, dtype) for part in self._factors))
        return moved

    def maximum(self) -> float:
        """Find the largest geodesic distance of a landmark.

        It is at least half of the largest distance and, because the first landmarks are farthest
        points, usually equal to it.
        """
        return self._largest

    def relative_error(
        self, sample: int = 64, *, generator: torch.Generator | None = None
    ) -> float:
        """Estimate the Frobenius error relative to exact geodesics from a sample of columns.

        Parameters
        ----------
        sample : int
            Columns to compare; each costs a run of Dijkstra.
        generator : torch.Generator or None
            Generator on the CPU that draws them; ``None`` has a fixed seed.
        """
        index = _draw(self.n, min(sample, self.n), generator)
        exact = self.geodesics.rows(index)
        error = self.columns(torch.from_numpy(index).to(self.device)).T.cpu().double() - exact
        size = float(exact.norm())
        return float(error.norm()) / size if size else float(error.norm())


def _default_counts(n: int) -> tuple[int, ...]:
    """Choose the numbers of landmarks at which to see whether they are enough."""
    if n > _FEW_VERTICES:
        return _COUNTS
    return (n if n <= _ALL_VERTICES else _FEW,)


def _draw(n: int, count: int, generator: torch.Generator | None) -> NDArray[np.int64]:
    """Draw distinct numbers below n."""
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
    """Add landmarks (L,) and their distances (L, n) until there are ``count``, or no more to add.

    ``others`` are distances of further vertices, which help to spread the draws.
    """
    while len(landmarks) < count:
        closest = rows.amin(dim=0)
        if closest.max() == 0:
            # all that is left duplicates a landmark
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
    """Draw the landmarks of a round in parts, each away from the parts before."""
    # Distances to the parts before are not known yet. By the triangle inequality they are at least
    # as large as the difference of the distances to any vertex; on a curve the largest of these
    # differences is the distance.
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
    # The largest of log(u) / weight are a draw without replacement (Efraimidis and Spirakis 2006).
    # Landmarks and their duplicates have weight zero and come last.
    uniform = torch.rand(len(closest), generator=generator, dtype=torch.float64, device="cpu")
    # the power of a small number would underflow
    weight = (closest / closest.max()) ** _SPREAD
    keys = uniform.to(closest.device).log() / weight
    possible = int((weight > 0).sum())
    return keys.topk(min(size, possible)).indices


def _nystrom(rows: Tensor, landmarks: Tensor) -> tuple[Tensor, Tensor]:
    """Compute factors from distances to landmarks, the largest eigenvalues first."""
    block = rows[:, landmarks]
    # on the CPU: the problem is small, and the answer does not depend on the device
    values, vectors = torch.linalg.eigh(((block + block.T) / 2).cpu())
    order = values.abs().argsort(descending=True)
    values, vectors = values[order], vectors[:, order]
    kept = values.abs() > 1e-12 * values[0].abs()
    # of a single point, or duplicates of one, all distances are zero
    if not kept.any():
        return rows.new_zeros(rows.shape[1], 1), rows.new_ones(1)
    values, vectors = values[kept], vectors[:, kept]
    return rows.T @ (vectors / values.abs().sqrt()).to(rows.device), values.sign().to(rows.device)


def _approximate(
    rows: Tensor, landmarks: Tensor, held_out: Tensor, exact: Tensor
) -> tuple[tuple[Tensor, Tensor], float]:
    """Compute factors of the smallest rank nearly as good as the best, and their relative error."""
    matrix, signs = _nystrom(rows, landmarks)
    fresh = ~torch.isin(held_out, landmarks)
    held_out, exact = held_out[fresh], exact[fresh]
    if not len(held_out):
        return (matrix, signs), 0.0
    # squared distances of the exact columns to the sums of the first r terms
    own, size = signs * matrix[held_out], exact.square().sum().clamp_min(1e-300)
    products = ((own.T @ own) * (matrix.T @ matrix)).cumsum(0).cumsum(1).diagonal()
    square = products - 2 * (own * (exact @ matrix)).sum(0).cumsum(0) + size
    # differences below rounding mean nothing
    errors = (square / size).clamp_min(torch.finfo(square.dtype).eps).sqrt()
    rank = int((errors <= _RANK_SLACK * errors.min()).nonzero()[0]) + 1
    return (matrix[:, :rank], signs[:rank]), float(errors[rank - 1])
