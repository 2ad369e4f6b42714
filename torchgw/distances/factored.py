"""Distances given by their factors."""

from __future__ import annotations

import torch
from torch import Tensor

from torchgw._boundary.arrays import check_tensor, resolve_device
from torchgw._errors import InvalidInputError
from torchgw.distances.base import DistanceProvider, Factors

__all__ = ["FactoredDistance"]


class FactoredDistance(DistanceProvider):
    """D = matrix @ diag(signs) @ matrix.T, known by its factors only.

    Parameters
    ----------
    matrix : Tensor, shape (n, r), float32/64
    signs : Tensor, shape (r,), same dtype and device
        Of any sign.

    Raises
    ------
    InvalidTypeError
        If either is no tensor.
    InvalidInputError
        If the shapes or dtypes do not fit, or an entry is not finite.

    Examples
    --------
    >>> import torch
    >>> from torchgw.distances import FactoredDistance
    >>> D = FactoredDistance(torch.tensor([[1.0, 1.0], [1.0, 0.0]]), torch.tensor([1.0, -1.0]))
    >>> D.columns(torch.tensor([0, 1])).tolist()
    [[0.0, 1.0], [1.0, 1.0]]
    """

    capturable = True

    def __init__(self, matrix: Tensor, signs: Tensor) -> None:
        check_tensor("matrix", matrix)
        check_tensor("signs", signs)
        if matrix.ndim != 2 or signs.shape != matrix.shape[1:]:
            raise InvalidInputError(
                "`matrix` must have shape (n, r) and `signs` (r,); got "
                f"{tuple(matrix.shape)} and {tuple(signs.shape)}."
            )
        if matrix.dtype not in (torch.float32, torch.float64) or signs.dtype != matrix.dtype:
            raise InvalidInputError(
                "`matrix` and `signs` must be both float32 or both float64; got "
                f"{matrix.dtype} and {signs.dtype}."
            )
        if not bool(matrix.isfinite().all()) or not bool(signs.isfinite().all()):
            raise InvalidInputError("`matrix` and `signs` must be finite; got NaN or infinity.")
        self._factors = Factors(matrix, signs)
        self.n = matrix.shape[0]
        self.device = matrix.device
        self.dtype = matrix.dtype

    def columns(self, index: Tensor) -> Tensor:
        """Return D[:, index], shape (n, s)."""
        return self._factors.columns(index)

    def factors(self) -> Factors:
        """Return the factors as given."""
        return self._factors

    def to(self, device: torch.device, dtype: torch.dtype) -> FactoredDistance:
        """Return the same distances on another device or in another dtype."""
        if (self.device, self.dtype) == (resolve_device(device), dtype):
            return self
        return FactoredDistance(*(part.to(device, dtype) for part in self._factors))
