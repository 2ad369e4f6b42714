"""The contract of a distance provider: one side of a problem, read by columns.

A provider answers for the (n, n) symmetric distance matrix D of one space without having to store
it. Only ``columns`` is required. What more a provider can do (a stored matrix, factors, products)
lets the solver use an exact gradient; ``_gradients/choose.py`` holds the rule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._boundary.arrays import resolve_device

__all__ = [
    "DerivedDistance",
    "DistanceProvider",
    "Entrywise",
    "EntrywiseDistance",
    "Factors",
    "ScaledDistance",
]

# A function of every distance on its own.
Entrywise = Callable[[Tensor], Tensor]

# Columns fetched at once by the default implementations, in bytes of the (n, s) block.
_BLOCK_BYTES = 64 * 2**20


class Factors(NamedTuple):
    """D = matrix @ diag(signs) @ matrix.T."""

    matrix: Tensor  # (n, r)
    signs: Tensor  # (r,) of any sign; a distance is rarely positive definite

    def columns(self, index: Tensor) -> Tensor:
        """Return D[:, index], shape (n, s)."""
        return (self.matrix * self.signs) @ self.matrix[index].T

    def apply(self, values: Tensor) -> Tensor:
        """Return D @ values, shape (n, c), in O(n r c)."""
        return self.matrix @ (self.signs[:, None] * (self.matrix.T @ values))

    def mean_square(self, weights: Tensor) -> Tensor:
        """Return (D * D) @ weights, shape (n,), in O(n r^2).

        Row i is the quadratic form A_i H A_i with H = diag(s) A.T diag(weights) A diag(s).
        """
        form = self.signs[:, None] * (self.matrix.T @ (weights[:, None] * self.matrix)) * self.signs
        return ((self.matrix @ form) * self.matrix).sum(dim=1).clamp_min(0)


class DistanceProvider(ABC):
    """Symmetric distances among the n points of one side.

    Subclasses set ``n``, ``device`` and ``dtype`` (of the columns that they return) and implement
    :meth:`columns` and :meth:`to`. The other methods have defaults.

    Attributes
    ----------
    n : int
        Number of points.
    device, dtype
        Of everything that the provider returns.
    cheap_columns : bool
        Whether all n columns may be asked for (``True``), or each one is costly, as a shortest-path
        run is (``False``); sums over all points are then estimated from ``sample_size`` columns.
    capturable : bool
        Whether :meth:`columns`, :meth:`apply` and :meth:`factors` only launch work on a CUDA
        device, whatever the index, and never wait for it or look at a value: the solver may then
        record them in a CUDA graph.
    """

    n: int
    device: torch.device
    dtype: torch.dtype
    cheap_columns: bool = True
    capturable: bool = False

    @abstractmethod
    def columns(self, index: Tensor) -> Tensor:
        """Return D[:, index], shape (n, s), for an int64 index of shape (s,), repeats allowed."""

    @abstractmethod
    def to(self, device: torch.device, dtype: torch.dtype) -> DistanceProvider:
        """Return the same distances on another device or in another dtype."""

    def matrix(self) -> Tensor | None:
        """Return D, shape (n, n), if it is stored; otherwise ``None``."""
        return None

    def factors(self) -> Factors | None:
        """Return factors of D if it has them; otherwise ``None``."""
        return None

    def apply(self, values: Tensor) -> Tensor:
        """Return D @ values, shape (n, c), for values of shape (n, c)."""
        factors = self.factors()
        if factors is not None:
            return factors.apply(values)
        result = values.new_zeros(self.n, values.shape[1])
        for index in self._column_blocks():
            result.addmm_(self.columns(index), values[index])
        return result

    def mean_square(self, weights: Tensor) -> Tensor:
        """Return (D * D) @ weights, shape (n,)."""
        factors = self.factors()
        if factors is not None:
            return factors.mean_square(weights)
        result = weights.new_zeros(self.n)
        for index in self._column_blocks():
            result.addmv_(self.columns(index).square(), weights[index])
        return result

    def maximum(self) -> float:
        """Return the largest distance."""
        return max(float(self.columns(index).max()) for index in self._column_blocks())

    def mean(self, weights: Tensor) -> float:
        """Return weights.T @ D @ weights, the mean distance."""
        return float(weights @ self.apply(weights[:, None])[:, 0])

    def _column_blocks(self) -> tuple[Tensor, ...]:
        width = max(1, _BLOCK_BYTES // (self.n * self.dtype.itemsize))
        blocks: tuple[Tensor, ...] = torch.arange(self.n, device=self.device).split(width)
        return blocks


class DerivedDistance(DistanceProvider):
    """Something made of the distances of another provider."""

    def __init__(self, provider: DistanceProvider) -> None:
        self.provider = provider
        self.n = provider.n
        self.device = provider.device
        self.dtype = provider.dtype
        self.cheap_columns = provider.cheap_columns
        self.capturable = provider.capturable

    @abstractmethod
    def of(self, provider: DistanceProvider) -> DerivedDistance:
        """Return the same made of another provider."""

    def to(self, device: torch.device, dtype: torch.dtype) -> DerivedDistance:
        """Return the same on another device or in another dtype."""
        if (resolve_device(device), dtype) == (self.device, self.dtype):
            return self
        return self.of(self.provider.to(device, dtype))


class ScaledDistance(DerivedDistance):
    """The distances of another provider, each multiplied by one positive number."""

    def __init__(self, provider: DistanceProvider, scale: float) -> None:
        super().__init__(provider)
        self.scale = scale
        matrix = provider.matrix()
        # Scaling a stored matrix once costs less than scaling what is read from it for ever.
        self._matrix = None if matrix is None else matrix * scale

    def columns(self, index: Tensor) -> Tensor:
        """Return scale * D[:, index]."""
        if self._matrix is not None:
            return self._matrix[index].T
        return self.provider.columns(index) * self.scale

    def of(self, provider: DistanceProvider) -> ScaledDistance:
        """Return the distances of another provider times the same number."""
        return ScaledDistance(provider, self.scale)

    def matrix(self) -> Tensor | None:
        """Return scale * D if D is stored."""
        return self._matrix

    def factors(self) -> Factors | None:
        """Return the factors of D with the scale in their signs."""
        factors = self.provider.factors()
        return None if factors is None else Factors(factors.matrix, factors.signs * self.scale)

    def apply(self, values: Tensor) -> Tensor:
        """Return scale * D @ values."""
        return self.provider.apply(values) * self.scale

    def mean_square(self, weights: Tensor) -> Tensor:
        """Return scale^2 * (D * D) @ weights."""
        return self.provider.mean_square(weights) * self.scale**2

    def maximum(self) -> float:
        """Return scale times the largest distance."""
        return self.provider.maximum() * self.scale


class EntrywiseDistance(DerivedDistance):
    """A function of every distance of another provider."""

    def __init__(self, provider: DistanceProvider, function: Entrywise) -> None:
        super().__init__(provider)
        self.function = function
        # made once it is asked for
        self._matrix: Tensor | None = None

    def columns(self, index: Tensor) -> Tensor:
        """Compute the function of D[:, index]."""
        if self._matrix is not None:
            return self._matrix[index].T
        return self.function(self.provider.columns(index))

    def of(self, provider: DistanceProvider) -> EntrywiseDistance:
        """Apply the same function to the distances of another provider."""
        return EntrywiseDistance(provider, self.function)

    def matrix(self) -> Tensor | None:
        """Compute the function of D, if D is stored."""
        if self._matrix is None and (matrix := self.provider.matrix()) is not None:
            self._matrix = self.function(matrix)
        return self._matrix

    def apply(self, values: Tensor) -> Tensor:
        """Multiply by values of shape (n, c)."""
        matrix = self.matrix()
        return super().apply(values) if matrix is None else matrix @ values
