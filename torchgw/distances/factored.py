"""Distances given by factors, and those in a product of spaces."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torchgw._boundary.arrays import check_finite, check_tensor
from torchgw._boundary.checks import check_positive
from torchgw._errors import InvalidInputError, InvalidTypeError
from torchgw.distances.base import DistanceProvider, Factors, refuse_directed


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

    def between(self, rows: Tensor, columns: Tensor) -> Tensor:
        return self._factors.between(rows, columns)

    def factors(self) -> Factors:
        return self._factors

    def to(self, device: torch.device, dtype: torch.dtype) -> "FactoredDistance":
        if self._lies_at(device, dtype):
            return self
        return FactoredDistance(*(part.to(device, dtype) for part in self._factors))


class ProductDistance(DistanceProvider):
    """Distances among points of a product of spaces, such as hyperbolic times spherical.

    With the distances D_k in each of them, D^2 = w_1 D_1^2 + w_2 D_2^2 + ...

    Parameters
    ----------
    parts : sequence of DistanceProvider
        Distances of the same n points in each space, on one device.
    weights : sequence of float, optional
        w_k > 0; 1 by default. Multiplying a metric by w multiplies distances by its root.

    Raises
    ------
    InvalidTypeError, InvalidInputError
        If the parts are not providers of the same points.

    Examples
    --------
    >>> import torch
    >>> from torchgw.distances import PointDistance, ProductDistance
    >>> x, y = torch.tensor([[0.0], [3.0]]), torch.tensor([[0.0], [4.0]])
    >>> product = ProductDistance([PointDistance(x), PointDistance(y)])
    >>> product.columns(torch.tensor([0])).flatten().tolist()
    [0.0, 5.0]
    """

    def __init__(
        self, parts: Sequence[DistanceProvider], weights: Sequence[float] | None = None
    ) -> None:
        parts = tuple(parts) if isinstance(parts, Iterable) else (parts,)
        if not parts or not all(isinstance(part, DistanceProvider) for part in parts):
            raise InvalidTypeError("`parts` must be one or more DistanceProviders.")
        if weights is None:
            weights = (1.0,) * len(parts)
        weights = tuple(weights) if isinstance(weights, Iterable) else (weights,)
        if len(weights) != len(parts):
            raise InvalidInputError(
                f"`weights` must have one number for each of the {len(parts)} parts; got "
                f"{len(weights)}."
            )
        for weight in weights:
            check_positive("weights", weight, "1 leaves the distances of a part as they are")
        sizes, devices = {part.n for part in parts}, {str(part.device) for part in parts}
        if len(sizes) > 1 or len(devices) > 1:
            raise InvalidInputError(
                f"`parts` must be distances of the same points, on one device; got {sorted(sizes)} "
                f"points on {', '.join(sorted(devices))}."
            )
        for part in parts:
            refuse_directed(part, "Combine the tables, and make one DirectedDistance of them.")
        first = parts[0]
        self.n, self.device = first.n, first.device
        self.dtype = max((part.dtype for part in parts), key=lambda dtype: dtype.itemsize)
        self._parts = [part.to(self.device, self.dtype) for part in parts]
        self._weights = weights
        self.cheap_columns = all(part.cheap_columns for part in parts)
        self.capturable = all(part.capturable for part in parts)

    def columns(self, index: Tensor) -> Tensor:
        terms = zip(self._weights, self._parts, strict=True)
        roots = torch.stack([weight**0.5 * part.columns(index) for weight, part in terms])
        return torch.linalg.vector_norm(roots, dim=0)

    def mean_square(self, weights: Tensor) -> Tensor:
        """Compute (D * D) @ weights from the parts."""
        result = torch.zeros_like(weights)
        for weight, part in zip(self._weights, self._parts, strict=True):
            result += weight * part.mean_square(weights)
        return result

    def to(self, device: torch.device, dtype: torch.dtype) -> "ProductDistance":
        if self._lies_at(device, dtype):
            return self
        return ProductDistance([part.to(device, dtype) for part in self._parts], self._weights)
