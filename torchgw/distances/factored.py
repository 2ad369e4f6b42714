"""Distances given by factors."""

import torch
from torch import Tensor

from torchgw._boundary.arrays import check_finite, check_tensor
from torchgw._errors import InvalidInputError
from torchgw.distances.base import DistanceProvider, Factors


class FactoredDistance(DistanceProvider):
    """Distances D = matrix @ diag(signs) @ matrix.T, known by these factors only.

    Parameters
    ----------
    matrix : Tensor, shape (n, r), float32/64
    signs : Tensor, shape (r,), same dtype and device
        Weights of the factors, positive or negative.

    Raises
    ------
    InvalidTypeError
        If either is not a tensor.
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
        if signs.dtype != matrix.dtype:
            raise InvalidInputError(
                "`matrix` and `signs` must be both float32 or both float64; got "
                f"{matrix.dtype} and {signs.dtype}."
            )
        check_finite("matrix", matrix)
        check_finite("signs", signs)
        self._factors = Factors(matrix, signs)
        self.n, self.device, self.dtype = matrix.shape[0], matrix.device, matrix.dtype

    def columns(self, index: Tensor) -> Tensor:
        return self._factors.columns(index)

    def factors(self) -> Factors:
        return self._factors

    def to(self, device: torch.device, dtype: torch.dtype) -> "FactoredDistance":
        if self._lies_at(device, dtype):
            return self
        return FactoredDistance(*(part.to(device, dtype) for part in self._factors))
