"""What a barycenter is returned as."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from torchgw._errors import InvalidInputError
from torchgw._gradient import stored_matrix
from torchgw._options import check_count
from torchgw._result import GWResult
from torchgw._storage import stored, write_result
from torchgw.distances.base import DistanceProvider

__all__ = ["BarycenterResult"]


@stored
@dataclass(frozen=True, repr=False, eq=False)
class BarycenterResult:
    """Outcome of :func:`torchgw.barycenter`.

    Attributes
    ----------
    distances : DistanceProvider
        Of the n points of the barycenter. If every space has factors so has this, of rank the sum
        of theirs, and nothing of size (n, n) is stored; it can be passed to ``solve(D_X=...)``.
    features : Tensor of shape (n, k), float64, or None
        Of the barycenter, if the spaces have features.
    weights : Tensor, shape (n,), float64
        Mass of its points.
    results : tuple of GWResult
        Of the barycenter, before its last update, with each space.
    value : float
        Weighted mean of their objectives, ``log["objective"]``.
    history : tuple of float
        That value at each iteration.
    converged : bool
        Whether its change fell below ``tol`` and the last solves converged.
    """

    distances: DistanceProvider
    features: Tensor | None
    weights: Tensor
    results: tuple[GWResult, ...]
    history: tuple[float, ...]
    converged: bool

    @property
    def value(self) -> float:
        """Weighted mean of the objectives."""
        return self.history[-1]

    def save(self, path: str | os.PathLike[str], *, dense: bool = False) -> None:
        """Write the result to a file that :func:`torchgw.load` reads.

        Distances of the barycenter are stored in full; of each of ``results`` what
        :meth:`GWResult.save` stores, with the same ``dense``, errors and warning.
        """
        write_result(path, self, dense=dense)

    def __repr__(self) -> str:
        """Summarise in a line."""
        ended = "converged" if self.converged else "not converged"
        return (
            f"BarycenterResult({self.distances.n} points, {len(self.results)} spaces, "
            f"value={self.value:.6g}, {ended} after {len(self.history)} rounds)"
        )

    @property
    def D(self) -> Tensor:  # noqa: N802 - the name of the field
        """The distances as a matrix, shape (n, n)."""
        return stored_matrix(self.distances)

    def points(self, dimension: int, *, squared: bool = False) -> Tensor:
        """Place the points of the barycenter by classical multidimensional scaling.

        Parameters
        ----------
        dimension : int
            Below n.
        squared : bool
            Whether ``distances`` are squares already, as with distances="sqeuclidean".

        Returns
        -------
        Tensor, shape (n, dimension), float64
            Centred, its axes in order of variance. Coordinates that the distances have no positive
            variance for are zero.
        """
        check_count("dimension", dimension)
        table = self.D.double()
        if dimension >= len(table):
            raise InvalidInputError(
                f"`dimension` must be below the {len(table)} points; got {dimension}."
            )
        square = table if squared else table.square()
        square = square - square.mean(0)
        gram = -(square - square.mean(1, keepdim=True)) / 2
        values, vectors = torch.linalg.eigh((gram + gram.T) / 2)
        size = values.flip(0)[:dimension].clamp_min(0).sqrt()
        placed: Tensor = vectors.flip(1)[:, :dimension] * size
        return placed
