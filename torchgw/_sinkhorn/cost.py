"""What a linearised Gromov-Wasserstein cost is: a stored matrix, or factors.

Both kinds stand for the same object, an (n, m) cost C, and every consumer (softmin, plan products)
accepts either. ``FactoredCost`` is equation (1) of docs/algorithm.md,

    C_ij = row_i + column_j - left_i . right_j,

and never needs the matrix.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Exponents below which exp() is as good as zero. Results near the smallest number of a dtype take a
# CPU ten times as long. [L13]
_LEAST_EXPONENT = {torch.float32: -70.0, torch.float64: -600.0}


def exp_(exponent: Tensor) -> Tensor:
    """Exponentiate in place; what would underflow becomes a negligible positive number."""
    return exponent.clamp_(min=_LEAST_EXPONENT[exponent.dtype]).exp_()


class DenseCost(NamedTuple):
    """A stored cost matrix."""

    matrix: Tensor  # (n, m)

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m)."""
        return self.matrix.shape[0], self.matrix.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the matrix lies."""
        return self.matrix.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the matrix."""
        return self.matrix.dtype

    def to(self, dtype: torch.dtype) -> DenseCost:
        """Convert the cost to another dtype."""
        return DenseCost(self.matrix.to(dtype))

    def transpose(self) -> DenseCost:
        """Exchange source and target."""
        return DenseCost(self.matrix.T)

    def scaled(self, factor: Tensor) -> DenseCost:
        """Multiply the cost by a number, ()."""
        return DenseCost(self.matrix * factor)

    def rows(self, index: Tensor | slice) -> DenseCost:
        """Restrict the cost to some source points."""
        return DenseCost(self.matrix[index])

    def dense(self) -> DenseCost:
        """Return this cost."""
        return self

    def apply(self, values: Tensor) -> Tensor:
        """Compute C @ values, for values of shape (m, c)."""
        return self.matrix @ values

    def mean(self, a: Tensor, b: Tensor) -> Tensor:
        """Compute a' C b for weights of sum one, ()."""
        return a @ (self.matrix @ b)

    def shifted(self, row: Tensor, column: Tensor) -> DenseCost:
        """Add terms of rows (n,) and of columns (m,)."""
        return DenseCost(self.matrix + row[:, None] + column)

    def exponent(self, f: Tensor, g: Tensor, epsilon: float) -> Tensor:
        """Compute (f_i + g_j - C_ij) / epsilon, shape (n, m), a new tensor."""
        return torch.sub(g, self.matrix).add_(f[:, None]).div_(epsilon)


class FactoredCost(NamedTuple):
    """C_ij = row_i + column_j - left_i . right_j, never stored."""

    left: Tensor  # (n, r)
    right: Tensor  # (m, r)
    row: Tensor  # (n,)
    column: Tensor  # (m,)

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m)."""
        return self.left.shape[0], self.right.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the factors lie."""
        return self.left.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the factors."""
        return self.left.dtype

    @classmethod
    def of_products(cls, left: Tensor, right: Tensor) -> FactoredCost:
        """Make the cost -left @ right.T, without terms of rows or columns alone."""
        return cls(left, right, left.new_zeros(len(left)), right.new_zeros(len(right)))

    @property
    def rank(self) -> int:
        """Number r of columns of the factors."""
        return self.left.shape[1]

    def to(self, dtype: torch.dtype) -> FactoredCost:
        """Convert the cost to another dtype."""
        return FactoredCost(*(part.to(dtype) for part in self))

    def transpose(self) -> FactoredCost:
        """Exchange source and target."""
        return FactoredCost(self.right, self.left, self.column, self.row)

    def scaled(self, factor: Tensor) -> FactoredCost:
        """Multiply the cost by a number, ()."""
        return FactoredCost(self.left * factor, self.right, self.row * factor, self.column * factor)

    def rows(self, index: Tensor | slice) -> FactoredCost:
        """Restrict the cost to some source points."""
        return FactoredCost(self.left[index], self.right, self.row[index], self.column)

    def dense(self) -> DenseCost:
        """Build the (n, m) matrix."""
        matrix = torch.addmm(self.column[None, :], self.left, self.right.T, alpha=-1.0)
        return DenseCost(matrix.add_(self.row[:, None]))

    def apply(self, values: Tensor) -> Tensor:
        """Compute C @ values, for values of shape (m, c)."""
        own = torch.outer(self.row, values.sum(0)) + self.column @ values
        return own - self.left @ (self.right.T @ values)

    def mean(self, a: Tensor, b: Tensor) -> Tensor:
        """Compute a' C b for weights of sum one, ()."""
        return a @ self.row + b @ self.column - (a @ self.left) @ (b @ self.right)

    def shifted(self, row: Tensor, column: Tensor) -> FactoredCost:
        """Add terms of rows (n,) and of columns (m,)."""
        return self._replace(row=self.row + row, column=self.column + column)

    def exponent(self, f: Tensor, g: Tensor, epsilon: float) -> Tensor:
        """Compute (f_i + g_j - C_ij) / epsilon, shape (n, m), a new tensor."""
        column = (g - self.column) / epsilon
        row = (f - self.row) / epsilon
        return torch.addmm(column, self.left / epsilon, self.right.T).add_(row[:, None])

    def centred(self) -> FactoredCost:
        """Write the same cost with zero-mean factors."""
        # The cross terms move into row and column. Centred products are smaller, so that low-
        # precision products, which 1/epsilon amplifies, lose less.
        left_mean, right_mean = self.left.mean(0), self.right.mean(0)
        left, right = self.left - left_mean, self.right - right_mean
        return FactoredCost(
            left,
            right,
            self.row - left @ right_mean - left_mean @ right_mean,
            self.column - right @ left_mean,
        )


Cost = DenseCost | FactoredCost


def added(one: Cost, two: Cost, weight: float = 1.0) -> Cost:
    """Compute one + weight two, in factors if both are."""
    if isinstance(one, FactoredCost) and isinstance(two, FactoredCost):
        return FactoredCost(
            torch.cat([one.left, weight * two.left], 1), torch.cat([one.right, two.right], 1),
            one.row + weight * two.row, one.column + weight * two.column,
        )  # fmt: skip
    return DenseCost(one.dense().matrix.add(two.dense().matrix, alpha=weight))
