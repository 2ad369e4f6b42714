"""How a plan between spaces with factors responds, by products of the plan with vectors.

docs/algorithm.md, equation 25. With D_X = A s A', D_Y = B t B' the change of the cost with a
response Z is C'(Z) = A N B' with N = -4 alpha s (A' Z B) t, so that everything about it is small:
the sums of P o (A N B') follow from P B and P' A, and its coupling A' (P o (A N B')) B from the
moments A' (P o (A_k B_l')) B, which are made once. Each step of GMRES is then three products of
the plan with a vector, and nothing of size (n, m) is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._derivatives.krylov import gmres
from torchgw._sinkhorn.cost import FactoredCost
from torchgw.distances.base import Factors

# Numbers of a coupling up to which its moments, as many squared, are made. [L524]
MOST_NUMBERS = 4_356
# Columns of a product of the plan with many. [L524]
_COLUMNS = 256

# A product of the plan, or of the plan transposed, with values of shape (m, c) or (n, c).
Times = Callable[[Tensor], Tensor]


class Moved(NamedTuple):
    """Sums and coupling of P o C for some cost C."""

    row: Tensor  # (n,)
    column: Tensor  # (m,)
    coupling: Tensor  # (r_x, r_y), A' (P o C) B with the factors of `Encoded`


class Solution(NamedTuple):
    """The response P o (u + v - C - C') / epsilon to a cost C, with C' the ``curve``."""

    u: Tensor  # (n,)
    v: Tensor  # (m,)
    curve: FactoredCost
    growth: float  # size of the solution over that of the right side
    residual: float  # relative
    products: int  # with the matrix of the linear system


def what_moves(column: Tensor, squares: Tensor) -> Tensor:
    """Compute what a change of v_j alone does to its column once u follows, q_j - squares_j, (m,).

    Where a plan is nearly a matching that is far less than q_j; rounding leaves some of it.
    """
    return torch.maximum(column - squares, torch.finfo(column.dtype).eps ** 0.75 * column)


class Encoded:
    """The linear system of a response, and what is made of a plan for it.

    ``near`` and ``far`` are the plan times values and the plan transposed times values; ``squares``
    (m,) are sum_i P_ij^2 / p_i with p the row sums of P.
    """

    def __init__(
        self,
        factors: tuple[Factors, Factors],
        products: tuple[Times, Times],
        squares: Callable[[Tensor], Tensor],
        alpha: float,
        epsilon: float,
    ) -> None:
        self._alpha, self._epsilon = alpha, epsilon
        self._full = tuple(item.matrix for item in factors)
        self._signs = tuple(item.signs for item in factors)
        self._near, self._far = products
        one, two = self._full
        # terms of rows or columns alone belong to u and v
        self._means = one.mean(0), two.mean(0)
        self.A, self.B = one - self._means[0], two - self._means[1]
        ahead = self._near(torch.cat([torch.ones_like(two[:, :1]), self.B], 1))
        back = self._far(torch.cat([torch.ones_like(one[:, :1]), self.A], 1))
        self.p, self._PB = ahead[:, 0].contiguous(), ahead[:, 1:]
        self.q, self._PA = back[:, 0].contiguous(), back[:, 1:]
        root = what_moves(self.q, squares(self.p)).sqrt()
        self._root, self._null = root, root / root.norm()
        self._moments = self._make_moments()

    def _make_moments(self) -> Tensor:
        """Make A' (P o (A_k B_l')) B for all k and l, (r_x r_y, r_x r_y)."""
        r, s = self.A.shape[1], self.B.shape[1]
        first, second = torch.triu_indices(s, s, device=self.B.device)
        table = self.A.new_empty(s, s, r, r)
        for part in torch.arange(len(first), device=first.device).split(_COLUMNS):
            k, l = first[part], second[part]  # noqa: E741
            sums = self._near(self.B[:, k] * self.B[:, l])
            found = torch.stack([self.A.T @ (self.A * column[:, None]) for column in sums.T])
            table[k, l] = table[l, k] = found
        return table.permute(2, 0, 3, 1).reshape(r * s, r * s)

    def _inner(self, coupling: Tensor) -> Tensor:
        """Make N of the coupling A' Z B."""
        return -4 * self._alpha * self._signs[0][:, None] * coupling * self._signs[1]

    def _cost(self, inner: Tensor) -> FactoredCost:
        one, two = self._full
        return FactoredCost.of_products(-(one @ inner), two).centred()

    def forced(self, row: Tensor, column: Tensor) -> FactoredCost:
        """Compute how the cost changes with a Z of which only the row and column sums are known."""
        (one, two), total = self._means, row.sum()
        coupling = torch.outer(self.A.T @ row + one * total, two)
        return self._cost(self._inner(coupling + torch.outer(one, self.B.T @ column)))

    def solve(
        self, moved: Moved, sums: tuple[Tensor, Tensor], *, tol: float, max_iter: int
    ) -> Solution:
        """Find the response to a cost of which ``moved`` is known, with given sums times epsilon.

        The change of the cost with those sums themselves, :meth:`forced`, is part of that cost.
        """
        row, column = moved.row + sums[0], moved.column + sums[1]
        m, shape = len(self.q), moved.coupling.shape

        def errors(v: Tensor, given: Moved) -> tuple[Tensor, Tensor]:
            """Compute the errors of the columns, with u made from v, and of the coupling."""
            u = (given.row - self._near(v[:, None])[:, 0]) / self.p
            error = self._far(u[:, None])[:, 0] + self.q * v - given.column
            coupling = self.A.T @ (u[:, None] * self._PB) + (self._PA * v[:, None]).T @ self.B
            error = error / self._root
            return error - self._null * (self._null @ error), coupling - given.coupling

        def bent(inner: Tensor) -> Moved:
            return Moved(
                ((self.A @ inner) * self._PB).sum(1),
                ((self.B @ inner.T) * self._PA).sum(1),
                (self._moments @ inner.flatten()).view(shape),
            )

        def ahead(w: Tensor, curve: Moved) -> Tensor:
            """Compute v from its scaled unknown, which is small where columns follow the curve."""
            follow = curve.column - self._far((curve.row / self.p)[:, None])[:, 0]
            return (w + follow / self._root) / self._root

        products = 0

        def operator(x: Tensor) -> Tensor:
            nonlocal products
            products += 1
            coupling = x[m:].view(shape) / unit
            curve = bent(self._inner(coupling))
            error, answer = errors(ahead(x[:m], curve), curve)
            return torch.cat([error, (unit * (coupling - answer / self._epsilon)).flatten()])

        given = Moved(row, column, moved.coupling)
        error, answer = errors(torch.zeros_like(self.q), given)
        sizes = float(error.norm()), float(answer.norm()) / self._epsilon
        # both parts count alike, whatever their units
        unit = sizes[0] / sizes[1] if min(sizes) > 0 else 1.0
        right = torch.cat([-error, (answer * (unit / self._epsilon)).flatten()])
        x, residual = gmres(operator, right, tol=tol, max_iter=max_iter)
        inner = self._inner(x[m:].view(shape) / unit)
        curve = bent(inner)
        v = ahead(x[:m], curve)
        u = (row + curve.row - self._near(v[:, None])[:, 0]) / self.p
        # the terms of rows and columns alone that the centred factors leave out
        one, two = self._means
        u = u + self.A @ (inner @ two) + one @ inner @ two
        v = v + self.B @ (inner.T @ one)
        growth = float(x.norm()) / max(float(right.norm()), torch.finfo(right.dtype).tiny)
        return Solution(u, v, self._cost(inner), growth, residual, products)
