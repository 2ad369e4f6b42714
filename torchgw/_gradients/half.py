"""The dense gradient by half-precision products: float32 accuracy at the speed of matrix units."""

from __future__ import annotations

import torch
from torch import Tensor

from torchgw._gradients.dense import DenseGradient
from torchgw._problem.problem import Problem, stored_matrix

# What the largest entry of a factor is scaled to: below the largest half-precision number, and far
# from the smallest. [L270]
_LARGEST = 2.0**13


class HalfGradient(DenseGradient):
    """Exact up to float32, for plans with the marginals of the problem.

    With the centred distances X = (I - 1 a') DX (I - a 1') and u = DX a - a' DX a, and Y and w the
    same of the target, a plan P has

        DX P DY = X P Y + (X P w + cy u) 1' + 1 (Y P' u + cx w)' + u w' + (u' P w + cx cy)

    where cx = a' DX a. The numbers of X P Y are small and of both signs. Each factor of a product
    is a sum of two half-precision numbers, and three of the four products of these are kept, as
    one product of three times the length. Accumulation is in float32.

    The problem has the square loss and is in float32. A ``rough`` gradient keeps the first part of
    each number only, which is a third of the work: each entry of a factor is then off by up to 5e-4
    of itself, at random, and a sum over n of them by a root of n less.
    """

    def __init__(self, problem: Problem, *, rough: bool = False) -> None:
        super().__init__(problem)
        a, b = problem.marginals
        self._x, self._u, self._cx = _centre(stored_matrix(problem.source), a)
        self._y, self._w, self._cy = _centre(stored_matrix(problem.target), b)
        units = [1 / float(table.abs().max().clamp_min(1e-30)) for table in (self._x, self._y)]
        self._rough = rough
        self._left = self._parts(self._x * units[0], dim=1, other=False)
        self._right = self._parts(self._y * units[1], dim=0, other=True)
        self._unit = 1 / (units[0] * units[1])

    def tables(self) -> tuple[Tensor, ...]:
        """List nothing: graphs on so large a problem serve one solve."""
        return ()

    def _products(self, plan: Tensor) -> Tensor:
        """Compute -4 alpha DX P DY by half-precision products."""
        # a plan between coarse points has entries far above the weights
        first = _scale(plan)
        inner = product(self._left, self._parts(plan * first, dim=0, other=True))
        second = _scale(inner)
        matrix = product(self._parts(inner.mul_(second), dim=1, other=False), self._right)
        along, down = plan @ self._w, self._u @ plan
        row = self._x @ along + self._cy * self._u
        column = self._y @ down + self._cx * self._w
        factor = -4 * self.problem.alpha
        matrix.mul_(factor * self._unit / (first * second))
        # X P w and Y P' u have mean zero, and carry no constant
        column += self._u @ along + self._cx * self._cy
        left = torch.stack([self._u, row, torch.ones_like(row)], dim=1)
        right = torch.stack([self._w, torch.ones_like(column), column])
        return matrix.addmm_(left, right, alpha=factor)

    def _parts(self, matrix: Tensor, *, dim: int, other: bool) -> Tensor:
        return matrix.half() if self._rough else split(matrix, dim=dim, other=other)


def _scale(matrix: Tensor) -> Tensor:
    """Compute what makes the largest entry of a matrix a large half-precision number, ()."""
    largest = torch.linalg.vector_norm(matrix, torch.inf)
    return _LARGEST / largest.clamp_min(torch.finfo(matrix.dtype).tiny * _LARGEST)


def _centre(table: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, float]:
    """Compute the doubly centred table, the centred row means, and the mean, by weight."""
    mean = table.double() @ weight
    whole = float(mean @ weight)
    mean = mean - whole
    centred = table - mean[:, None].to(table.dtype) - (mean + whole).to(table.dtype)
    return centred, mean.to(table.dtype), whole


def split(matrix: Tensor, *, dim: int, other: bool) -> Tensor:
    """Split a matrix into half-precision parts, in the order that the other factor's match.

    High, high, low, or for the ``other`` factor high, low, high, put one after another in a
    dimension, so that their product is high high + high low + low high.
    """
    high = matrix.half()
    low = (matrix - high).half()
    return torch.cat([high, low, high] if other else [high, high, low], dim)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply two half-precision matrices in float32."""
    if left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=torch.float32)
    # the same numbers: products of two half-precision numbers are exact in float32
    return left.float() @ right.float()
