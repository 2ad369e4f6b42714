"""The contract of a distance provider: the distances of one space, read by columns.

A provider answers for a symmetric distance matrix D, (n, n), without having to store it. Only
``columns`` and ``to`` are required. If it can do more (a stored matrix, factors, products), the
solver can use an exact gradient; ``_solve/route.py`` holds the rule.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torchgw._boundary.arrays import BLOCK, resolve_device
from torchgw._errors import UnsupportedError
from torchgw._tensors.operations import BLOCK_BYTES, ROWS, inner_products

if TYPE_CHECKING:
    from typing_extensions import Self

# A function that is applied to every distance on its own.
Entrywise = Callable[[Tensor], Tensor]

# Entries of a table that is made and read block by block. [L267, L271, L279, L320, L327, L329]
# [L382, L852, L1502]
BLOCK_ENTRIES = BLOCK


class Factors(NamedTuple):
    """D = matrix @ diag(signs) @ matrix.T."""

    matrix: Tensor  # (n, r)
    signs: Tensor  # (r,) of any sign; a distance is rarely positive definite

    def columns(self, index: Tensor) -> Tensor:
        """Compute D[:, index], shape (n, s)."""
        return self.matrix @ (self.matrix[index] * self.signs).T

    def between(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Compute D[rows][:, columns], shape (k, s)."""
        return (self.matrix[rows] * self.signs) @ self.matrix[columns].T

    def apply(self, values: Tensor) -> Tensor:
        """Compute D @ values, shape (n, c), in O(n r c)."""
        return self.matrix @ (self.signs[:, None] * (self.matrix.T @ values))

    def mean_square(self, weights: Tensor) -> Tensor:
        """Compute (D * D) @ weights, shape (n,), in O(n r^2)."""
        # row i is the quadratic form A_i H A_i with H = diag(s) A.T diag(weights) A diag(s)
        blocks = self.matrix.split(ROWS)
        moments = torch.stack(
            [
                inner_products(weight[:, None] * block, block)
                for weight, block in zip(weights.split(ROWS), blocks, strict=True)
            ]
        ).sum(0)
        form = self.signs[:, None] * moments * self.signs
        return torch.cat([((block @ form) * block).sum(dim=1) for block in blocks]).clamp_min(0)


class DistanceProvider(ABC):
    """Symmetric distances among the n points of one space.

    Subclasses set ``n``, ``device`` and ``dtype`` and implement :meth:`columns` and :meth:`to`. The
    other methods have defaults.

    Attributes
    ----------
    n : int
        Number of points.
    device : torch.device
        Device of everything that the provider returns.
    dtype : torch.dtype
        Dtype of everything that the provider returns.
    cheap_columns : bool
        ``True`` if all n columns may be asked for. ``False`` if each one is costly, as a run of
        Dijkstra is: sums over all points are then estimated from some columns.
    capturable : bool
        Whether :meth:`columns`, :meth:`apply` and :meth:`factors` only launch work on a CUDA
        device, whatever the index, and never wait for it or look at a value: the solver may then
        record them in a CUDA graph.
    directed : bool
        Whether the costs differ with the direction, or are of several relations; then D is their
        mean.
    given : Tensor or None
        The tensor that it was made from, if that requires a gradient and is known.
    """

    n: int
    device: torch.device
    dtype: torch.dtype
    cheap_columns: bool = True
    capturable: bool = False
    directed: bool = False
    given: Tensor | None = None

    @abstractmethod
    def columns(self, index: Tensor) -> Tensor:
        """Read D[:, index], shape (n, s), for an int64 index of shape (s,), repeats allowed."""

    @abstractmethod
    def to(self, device: torch.device, dtype: torch.dtype) -> DistanceProvider:
        """Move the distances to another device or dtype; ``self`` if they are there already."""

    def between(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Read D[rows][:, columns], shape (k, s), for int64 indices of shapes (k,) and (s,)."""
        return self.columns(columns)[rows]

    def _lies_at(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Tell whether the distances are on a device, in a dtype."""
        return (self.device, self.dtype) == (resolve_device(device), dtype)

    def _moved(self, device: torch.device, dtype: torch.dtype, **parts: Any) -> Self:
        """Copy the provider for another device or dtype, where the ``parts`` already are."""
        moved = copy.copy(self)
        vars(moved).update(parts, device=resolve_device(device), dtype=dtype)
        return moved

    def matrix(self) -> Tensor | None:
        """Give D, shape (n, n), if it is stored; otherwise ``None``."""
        return None

    def factors(self) -> Factors | None:
        """Give factors of D, if there are any; otherwise ``None``."""
        return None

    def apply(self, values: Tensor) -> Tensor:
        """Compute D @ values, shape (n, c), for values of shape (n, c)."""
        factors = self.factors()
        if factors is not None:
            return factors.apply(values)
        result = values.new_zeros(self.n, values.shape[1])
        for index in self._column_blocks():
            result.addmm_(self.columns(index), values[index])
        return result

    def mean_square(self, weights: Tensor) -> Tensor:
        """Compute (D * D) @ weights, shape (n,)."""
        factors = self.factors()
        if factors is not None:
            return factors.mean_square(weights)
        result = weights.new_zeros(self.n)
        for index in self._column_blocks():
            columns = self.columns(index)
            result.addmv_(columns * columns, weights[index])
        return result

    def maximum(self) -> float:
        """Find the largest distance."""
        return max(float(self.columns(index).max()) for index in self._column_blocks())

    def uncertainty(self) -> Tensor:
        """Estimate how far rounding of the input moves the distances of each point, (n,) float64.

        It is zero where that is as little as distances are rounded themselves.
        """
        return torch.zeros(self.n, dtype=torch.float64, device=self.device)

    def ways(self) -> tuple[DistanceProvider, ...]:
        """List the costs in both directions as providers; itself alone if they are equal."""
        return (self,)

    def relations(self) -> tuple[DistanceProvider, ...]:
        """List the costs of every relation, there is mostly one, in one of their directions."""
        return self.ways()[:1]

    def mapped(self, function: Entrywise) -> DistanceProvider:
        """Make the provider of a function of every distance."""
        return EntrywiseDistance(self, function)

    def scaled(self, factor: float) -> DistanceProvider:
        """Make the provider of the distances times a positive number."""
        return ScaledDistance(self, factor)

    def subset(self, index: Tensor) -> DistanceProvider:
        """Make the provider of the distances among some of the points, (k,) int64."""
        return SubsetDistance(self, index)

    def mean(self, weights: Tensor) -> float:
        """Compute weights.T @ D @ weights, the mean distance."""
        return float(weights @ self.apply(weights[:, None])[:, 0])

    def _column_blocks(self) -> tuple[Tensor, ...]:
        width = max(1, BLOCK_BYTES // (self.n * self.dtype.itemsize))
        return torch.arange(self.n, device=self.device).split(width)


def both_ways(first: Any, second: Any) -> list[tuple[Any, Any]]:
    """Pair the ways of two sides; a side without directions is the same in both."""
    one, two = first.ways(), second.ways()
    count = max(len(one), len(two))
    return [(one[way % len(one)], two[way % len(two)]) for way in range(count)]


def refuse_directed(provider: DistanceProvider, advice: str) -> None:
    """Refuse costs with a direction where it would be ignored."""
    if provider.directed:
        raise UnsupportedError(f"A DirectedDistance would lose its directions here. {advice}")


class DerivedDistance(DistanceProvider):
    """Numbers made from the distances of another provider, one from each distance."""

    def __init__(self, provider: DistanceProvider) -> None:
        refuse_directed(provider, "Make a DirectedDistance of the numbers instead.")
        self.provider = provider
        self.n, self.device, self.dtype = provider.n, provider.device, provider.dtype
        self.cheap_columns = provider.cheap_columns
        self.capturable = provider.capturable
        self._matrix: Tensor | None = None  # made once it is asked for

    def __getstate__(self) -> dict[str, Any]:
        """Pickle and copy without the table of numbers, which is made again."""
        return {**vars(self), "_matrix": None}

    @abstractmethod
    def made(self, distances: Tensor) -> Tensor:
        """Compute the numbers from some distances."""

    @abstractmethod
    def of(self, provider: DistanceProvider) -> DerivedDistance:
        """Make an object of this kind from the distances of another provider."""

    def to(self, device: torch.device, dtype: torch.dtype) -> DerivedDistance:
        return self if self._lies_at(device, dtype) else self.of(self.provider.to(device, dtype))

    def columns(self, index: Tensor) -> Tensor:
        if self._matrix is not None:
            return self._matrix[index].T
        return self.made(self.provider.columns(index))

    def between(self, rows: Tensor, columns: Tensor) -> Tensor:
        if self._matrix is not None:
            return self._matrix[rows][:, columns]
        return self.made(self.provider.between(rows, columns))

    def matrix(self) -> Tensor | None:
        if self._matrix is None and (matrix := self.provider.matrix()) is not None:
            self._matrix = self.made(matrix)
        return self._matrix


class ScaledDistance(DerivedDistance):
    """The distances of another provider, each multiplied by one positive number."""

    def __init__(self, provider: DistanceProvider, scale: float) -> None:
        super().__init__(provider)
        self.scale = scale
        # scaling a stored matrix once costs less than scaling whatever is read from it
        self.matrix()

    def made(self, distances: Tensor) -> Tensor:
        return distances * self.scale

    def of(self, provider: DistanceProvider) -> ScaledDistance:
        return ScaledDistance(provider, self.scale)

    def factors(self) -> Factors | None:
        factors = self.provider.factors()
        return None if factors is None else Factors(factors.matrix, factors.signs * self.scale)

    def apply(self, values: Tensor) -> Tensor:
        return self.provider.apply(values) * self.scale

    def mean_square(self, weights: Tensor) -> Tensor:
        return self.provider.mean_square(weights) * self.scale**2

    def maximum(self) -> float:
        return self.provider.maximum() * self.scale

    def uncertainty(self) -> Tensor:
        return self.provider.uncertainty() * self.scale


class EntrywiseDistance(DerivedDistance):
    """A function of every distance of another provider."""

    def __init__(self, provider: DistanceProvider, function: Entrywise) -> None:
        super().__init__(provider)
        self.function = function

    def made(self, distances: Tensor) -> Tensor:
        return self.function(distances)

    def of(self, provider: DistanceProvider) -> EntrywiseDistance:
        return EntrywiseDistance(provider, self.function)

    def apply(self, values: Tensor) -> Tensor:
        matrix = self.matrix()
        return super().apply(values) if matrix is None else matrix @ values


class SubsetDistance(DistanceProvider):
    """The distances among some points of another provider, which are read from its own."""

    def __init__(self, provider: DistanceProvider, index: Tensor) -> None:
        self.provider, self.index, self.n = provider, index, len(index)
        self.device, self.dtype = provider.device, provider.dtype
        self.cheap_columns, self.capturable = provider.cheap_columns, provider.capturable
        refuse_directed(provider, "Give `subset` of its own to a provider of directed costs.")

    def columns(self, index: Tensor) -> Tensor:
        return self.between(torch.arange(self.n, device=self.device), index)

    def between(self, rows: Tensor, columns: Tensor) -> Tensor:
        return self.provider.between(self.index[rows], self.index[columns])

    def to(self, device: torch.device, dtype: torch.dtype) -> DistanceProvider:
        if self._lies_at(device, dtype):
            return self
        return SubsetDistance(self.provider.to(device, dtype), self.index.to(device))

    def factors(self) -> Factors | None:
        factors = self.provider.factors()
        return factors and Factors(factors.matrix[self.index], factors.signs)

    def matrix(self) -> Tensor | None:
        matrix = self.provider.matrix()
        return None if matrix is None else matrix[self.index][:, self.index]

    def apply(self, values: Tensor) -> Tensor:
        if self.provider.factors() is not None:
            return super().apply(values)
        whole = values.new_zeros(self.provider.n, values.shape[1])
        return self.provider.apply(whole.index_copy_(0, self.index, values))[self.index]

    def mean_square(self, weights: Tensor) -> Tensor:
        whole = weights.new_zeros(self.provider.n).index_copy_(0, self.index, weights)
        return self.provider.mean_square(whole)[self.index]

    def maximum(self) -> float:
        # a bound is enough where the largest distance is asked for
        return self.provider.maximum()

    def uncertainty(self) -> Tensor:
        return self.provider.uncertainty()[self.index]
