"""The linear problem and its plan, as data, and the half-step that every backend must compute.

A cost is a stored matrix or factors. Both kinds stand for the same object, an (n, m) cost C, and
every reader (softmin, plan products) takes either. ``FactoredCost`` is equation (1) of
docs/algorithm.md,

    C_ij = row_i + column_j - left_i . right_j,

and never needs the matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._tensors.operations import average
from torchgw._typing import Marginals, Points, Potentials

# Factors of the half-steps of f and g under strict marginals.
STRICT = (1.0, 1.0)
# Exponents below which exp() counts as zero. Results near the smallest number of a dtype take a CPU
# ten times as long. [L13]
LEAST_EXPONENTS = {torch.float32: -70.0, torch.float64: -600.0}
# A row or column may lose so much mass, a bound be off by as much, and an error of marginals is
# noise below, in units of the rounding of the dtype. [L201, L288, L403]
ROUNDINGS = 16
# Bytes of one (rows, m) working block. On a CPU it stays in cache from the product to the sums
# (2 MB took 2.2 ns per entry, 8 MB 4.1); on a GPU it must be large enough to fill the device. [L12]
_BLOCK_BYTES = {"cpu": 2**21, "cuda": 2**25}
# Bytes of the widest row of a cost whose column sums fit the registers of a GPU's multiprocessor;
# beyond, two passes over the cost are faster. [L54, L55, L91]
ROW_BYTES = 2**17


def exp_(exponent: Tensor) -> Tensor:
    """Exponentiate in place; what would underflow becomes a negligible positive number."""
    return exponent.clamp_(min=LEAST_EXPONENTS[exponent.dtype]).exp_()


def keeps_digits(mass: float, dtype: torch.dtype) -> bool:
    """Whether the densities that make up a mass are far from underflow and overflow."""
    most = math.exp(-LEAST_EXPONENTS[dtype] / 2)
    return 1 / most < mass < most


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

    def at(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Read the cost of pairs of points, (k,)."""
        return self.matrix[rows, columns]

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
    """C_ij = row_i + column_j - left_i . right_j, never stored; it does what `DenseCost` does."""

    left: Tensor  # (n, r)
    right: Tensor  # (m, r)
    row: Tensor  # (n,)
    column: Tensor  # (m,)

    @property
    def shape(self) -> tuple[int, int]:
        return self.left.shape[0], self.right.shape[0]

    @property
    def device(self) -> torch.device:
        return self.left.device

    @property
    def dtype(self) -> torch.dtype:
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
        return FactoredCost(*(part.to(dtype) for part in self))

    def transpose(self) -> FactoredCost:
        return FactoredCost(self.right, self.left, self.column, self.row)

    def scaled(self, factor: Tensor) -> FactoredCost:
        return FactoredCost(self.left * factor, self.right, self.row * factor, self.column * factor)

    def rows(self, index: Tensor | slice) -> FactoredCost:
        return FactoredCost(self.left[index], self.right, self.row[index], self.column)

    def at(self, rows: Tensor, columns: Tensor) -> Tensor:
        products = (self.left[rows] * self.right[columns]).sum(1)
        return self.row[rows] + self.column[columns] - products

    def dense(self) -> DenseCost:
        """Build the (n, m) matrix."""
        matrix = torch.addmm(self.column[None, :], self.left, self.right.T, alpha=-1.0)
        return DenseCost(matrix.add_(self.row[:, None]))

    def apply(self, values: Tensor) -> Tensor:
        own = torch.outer(self.row, values.sum(0)) + self.column @ values
        return own - self.left @ (self.right.T @ values)

    def mean(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ self.row + b @ self.column - (a @ self.left) @ (b @ self.right)

    def shifted(self, row: Tensor, column: Tensor) -> FactoredCost:
        return self._replace(row=self.row + row, column=self.column + column)

    def exponent(self, f: Tensor, g: Tensor, epsilon: float) -> Tensor:
        column = (g - self.column) / epsilon
        row = (f - self.row) / epsilon
        return torch.addmm(column, self.left / epsilon, self.right.T).add_(row[:, None])

    def centred(self) -> FactoredCost:
        """Write the same cost with zero-mean factors."""
        # The cross terms move into row and column. Centred products are smaller, so that low-
        # precision products, which 1/epsilon amplifies, lose less.
        left_mean, right_mean = average(self.left), average(self.right)
        left, right = self.left - left_mean, self.right - right_mean
        return FactoredCost(
            left, right, self.row - left @ right_mean - left_mean @ right_mean,
            self.column - right @ left_mean,
        )  # fmt: skip


Cost = DenseCost | FactoredCost


def added(one: Cost, two: Cost, weight: float = 1.0) -> Cost:
    """Compute one + weight two, in factors if both are."""
    if isinstance(one, FactoredCost) and isinstance(two, FactoredCost):
        return FactoredCost(
            torch.cat([one.left, weight * two.left], 1), torch.cat([one.right, two.right], 1),
            one.row + weight * two.row, one.column + weight * two.column,
        )  # fmt: skip
    return DenseCost(one.dense().matrix.add(two.dense().matrix, alpha=weight))


def block(cost: Cost, rows: Points, columns: Points) -> Cost:
    """Restrict a cost to some points of either side."""
    return cost.rows(rows).transpose().rows(columns).transpose()


def block_height(cost: Cost) -> int:
    """Count the rows of which a (rows, m) block stays within the memory of its device."""
    budget = _BLOCK_BYTES.get(cost.device.type, _BLOCK_BYTES["cpu"])
    return max(1, budget // (cost.shape[1] * cost.dtype.itemsize))


def row_blocks(cost: Cost) -> Iterator[slice]:
    """Split the rows so that one (rows, m) block stays within the memory of its device."""
    n, height = cost.shape[0], block_height(cost)
    return (slice(start, min(start + height, n)) for start in range(0, n, height))


class LinearProblem(NamedTuple):
    """min <C, P> + epsilon KL(P | a x b) over plans P with row sums a and column sums b."""

    cost: Cost  # (n, m)
    marginals: Marginals
    epsilon: float
    # Factors of the half-steps of f and g: rho / (rho + epsilon) for a marginal that rho KL holds.
    tau: tuple[float, float] = STRICT

    @property
    def T(self) -> LinearProblem:  # noqa: N802 - the name of every array library
        """The problem with source and target exchanged."""
        a, b = self.marginals
        return LinearProblem(self.cost.transpose(), Marginals(b, a), self.epsilon, self.tau[::-1])

    @property
    def conditional(self) -> LinearProblem:
        """The problem whose plans have rows of mass one each, where weights of zero count too."""
        ones = torch.ones_like(self.marginals.a)
        return self._replace(marginals=Marginals(ones, self.marginals.b))


class EntropicPlan(NamedTuple):
    """P_ij = a_i b_j exp((f_i + g_j - C_ij) / epsilon), shape (n, m), described by its parts."""

    cost: Cost  # (n, m)
    marginals: Marginals
    potentials: Potentials
    epsilon: float

    @property
    def shape(self) -> tuple[int, int]:
        return self.cost.shape

    @property
    def device(self) -> torch.device:
        return self.cost.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the cost, and of the entries of the plan."""
        return self.cost.dtype

    @property
    def T(self) -> EntropicPlan:  # noqa: N802 - the name of every array library
        """The plan from target to source."""
        (a, b), (f, g) = self.marginals, self.potentials
        return EntropicPlan(self.cost.transpose(), Marginals(b, a), Potentials(g, f), self.epsilon)

    @property
    def problem(self) -> LinearProblem:
        """The linear problem that the plan solves, if its marginals are strict."""
        return LinearProblem(self.cost, self.marginals, self.epsilon)

    def density(self) -> Tensor:
        """Compute P_ij / (a_i b_j), shape (n, m), a new tensor."""
        return exp_(self.cost.exponent(*self._finite_potentials(), self.epsilon))

    def densities(self) -> Iterator[tuple[slice, Tensor]]:
        """Go through blocks of rows of the density, shape (s, m), each a new tensor."""
        f, g = self._finite_potentials()
        for rows in row_blocks(self.cost):
            yield rows, exp_(self.cost.rows(rows).exponent(f[rows], g, self.epsilon))

    def rows(self, index: Tensor | slice) -> Tensor:
        """Compute rows of the plan, shape (s, m), a new tensor."""
        f, g = self._finite_potentials()
        a, b = (part.to(self.dtype) for part in self.marginals)
        density = exp_(self.cost.rows(index).exponent(f[index], g, self.epsilon))
        return density.mul_(a[index, None]).mul_(b)

    def _finite_potentials(self) -> Potentials:
        """Round potentials to the dtype of the cost, and let no density overflow."""
        return self.marginals.mask(self.potentials, self.dtype)


def softmin(cost: Cost, log_weight: Tensor, potential: Tensor, epsilon: float, axis: int) -> Tensor:
    """Compute one Sinkhorn half-step, the definition every backend must equal.

    For ``axis=1`` (reduce over columns, as ``torch.sum`` counts axes)

        f_i = -epsilon * log sum_j exp(log_weight_j + (potential_j - C_ij) / epsilon)

    and for ``axis=0`` the same with the roles of i and j exchanged.

    Parameters
    ----------
    cost : DenseCost or FactoredCost, shape (n, m)
    log_weight : Tensor, shape (m,) for axis 1, (n,) for axis 0
        log b or log a; -inf for a weight of zero.
    potential : Tensor, same shape as log_weight
        g or f, in cost units.
    epsilon : float
    axis : {0, 1}

    Returns
    -------
    Tensor, shape (n,) for axis 1, (m,) for axis 0, in cost units
    """
    if axis == 0:
        cost = cost.transpose()
    weighted = (potential + epsilon * log_weight).to(cost.dtype)
    zero = torch.zeros((), dtype=cost.dtype, device=cost.device)
    blocks = []
    for rows in row_blocks(cost):
        exponent = cost.rows(rows).exponent(zero.expand(rows.stop - rows.start), weighted, epsilon)
        largest = exponent.amax(1)
        blocks.append(largest + exp_(exponent.sub_(largest[:, None])).sum(1).log())
    return torch.cat(blocks).to(potential.dtype) * -epsilon


def checked(ok: Tensor, g: Tensor, g_next: Tensor, b: Tensor, epsilon: float) -> Tensor:
    """Join whether a sweep is usable and its column error into its check, (2,) float64."""
    # The column mass of the plan (f, g) is q_j = b_j exp((g_j - g_next_j) / epsilon), so the error
    # sum_j |q_j - b_j| needs no plan.
    change = (g - g_next).double().div_(epsilon)
    error = torch.dot(b.double(), change.expm1_().abs_())
    return torch.stack([ok.to(torch.float64), error])
