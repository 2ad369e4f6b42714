"""Responses of plans between spaces with factors, by moments of the plan (equation 25)."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._derivatives.density import Density, Equation, Response
from torchgw._derivatives.krylov import gmres, growth, unit_of
from torchgw._sinkhorn.problem import Cost, FactoredCost, added
from torchgw.distances.base import Factors

# Moments, as many as the square, are made of couplings of at most so many numbers. [L524]
MOST_NUMBERS = 4_356
# Columns of a product of the plan with many. [L524]
_COLUMNS = 256


def by_moments(equation: Equation) -> Response | None:
    """Solve for the response between spaces with factors of small ranks; ``None`` for others."""
    density, problem, upstream, forced, _, tol, max_iter = equation
    one, two, epsilon = problem.source.factors(), problem.target.factors(), density.plan.epsilon
    if one is None or two is None or one.signs.numel() * two.signs.numel() > MOST_NUMBERS:
        return None
    system = _Encoded(density, (one, two), problem.alpha)
    sums = forced[0] * density.a, forced[1] * density.b
    upstream = added(upstream, system.forced(sums[0] / epsilon, sums[1] / epsilon))
    moved = system.moved(upstream)
    given = _Moved(moved.row + sums[0], moved.column + sums[1], moved.coupling)
    m, shape = len(system.q), given.coupling.shape

    def ahead(w: Tensor, curve: _Moved) -> Tensor:
        """Compute v from its scaled unknown, which is small where columns follow the curve."""
        follow = curve.column - system.far((curve.row / system.p)[:, None])[:, 0]
        return (w + follow / system.root) / system.root

    def operator(x: Tensor) -> Tensor:
        coupling = x[m:].view(shape) / unit
        curve = system.bent(system.inner(coupling))
        error, answer = system.errors(ahead(x[:m], curve), curve)
        return torch.cat([error, (unit * (coupling - answer / epsilon)).flatten()])

    error, answer = system.errors(torch.zeros_like(system.q), given)
    unit = unit_of(error, answer / epsilon)
    right = torch.cat([-error, (answer * (unit / epsilon)).flatten()])
    x, residual, products = gmres(operator, right, tol=tol, max_iter=max_iter)
    inner = system.inner(x[m:].view(shape) / unit)
    curve = system.bent(inner)
    v = ahead(x[:m], curve)
    u = (given.row + curve.row - system.near(v[:, None])[:, 0]) / system.p
    # the terms of rows and columns alone that the centred factors leave out
    near, far = system.means
    u = u + system.A @ (inner @ far) + near @ inner @ far
    v = v + system.B @ (inner.T @ near)
    cost = added(upstream, system.cost(inner))
    return Response(density, u, v, cost, residual, products, growth(x, right))


class _Moved(NamedTuple):
    """Sums and coupling of P o C for some cost C."""

    row: Tensor  # (n,)
    column: Tensor  # (m,)
    coupling: Tensor  # (r_x, r_y), A' (P o C) B with the factors of `_Encoded`


class _Encoded:
    """Sums and moments of a plan for its response between spaces with factors (equation 25)."""

    # With D_X = A s A', D_Y = B t B' the change of the cost with a response Z is C'(Z) = A N B'
    # with N = -4 alpha s (A' Z B) t, so that everything about it is small: the sums of P o (A N B')
    # follow from P B and P' A, and its coupling A' (P o (A N B')) B from the moments A' (P o (A_k
    # B_l')) B, which are made once. Each step of GMRES is then three products of the plan with a
    # vector.

    def __init__(self, density: Density, factors: tuple[Factors, Factors], alpha: float) -> None:
        self.density, self.alpha = density, alpha
        self.near, self.far = density.times, density.times_transposed
        self.full, self.signs = zip(*factors, strict=True)
        one, two = self.full
        # terms of rows or columns alone belong to u and v
        self.means = one.mean(0), two.mean(0)
        self.A, self.B = one - self.means[0], two - self.means[1]
        ahead = self.near(torch.cat([torch.ones_like(two[:, :1]), self.B], 1))
        back = self.far(torch.cat([torch.ones_like(one[:, :1]), self.A], 1))
        self.p, self.PB = ahead[:, 0].contiguous(), ahead[:, 1:]
        self.q, self.PA = back[:, 0].contiguous(), back[:, 1:]
        self.root = density.what_moves(self.q, self.p).sqrt()
        self.null = self.root / self.root.norm()
        self.moments = self._make_moments()

    def _make_moments(self) -> Tensor:
        """Make A' (P o (A_k B_l')) B for all k and l, (r_x r_y, r_x r_y)."""
        r, s = self.A.shape[1], self.B.shape[1]
        first, second = torch.triu_indices(s, s, device=self.B.device)
        table = self.A.new_empty(s, s, r, r)
        for part in torch.arange(len(first), device=first.device).split(_COLUMNS):
            k, l = first[part], second[part]  # noqa: E741
            sums = self.near(self.B[:, k] * self.B[:, l])
            found = torch.stack([self.A.T @ (self.A * column[:, None]) for column in sums.T])
            table[k, l] = table[l, k] = found
        return table.permute(2, 0, 3, 1).reshape(r * s, r * s)

    def inner(self, coupling: Tensor) -> Tensor:
        """Make N of the coupling A' Z B."""
        return -4 * self.alpha * self.signs[0][:, None] * coupling * self.signs[1]

    def cost(self, inner: Tensor) -> FactoredCost:
        """Make the change of the cost, A N B' with factors that are not centred."""
        one, two = self.full
        return FactoredCost.of_products(-(one @ inner), two).centred()

    def forced(self, row: Tensor, column: Tensor) -> FactoredCost:
        """Compute the change of the cost by a Z of which only row and column sums are known."""
        (one, two), total = self.means, row.sum()
        coupling = torch.outer(self.A.T @ row + one * total, two)
        return self.cost(self.inner(coupling + torch.outer(one, self.B.T @ column)))

    def moved(self, cost: Cost) -> _Moved:
        """Compute the sums and the coupling of P o C for a cost C, in one pass over the plan."""
        a, b = self.density.a, self.density.b
        columns = torch.cat([torch.ones_like(self.B[:, :1]), self.B], 1) * b[:, None]
        means, column = [], torch.zeros_like(b)
        for rows, block in self.density.blocks():
            change = block * cost.rows(rows).dense().matrix
            means.append(change @ columns)
            column += a[rows] @ change
        table = torch.cat(means) * a[:, None]
        return _Moved(table[:, 0], column * b, self.A.T @ table[:, 1:])

    def bent(self, inner: Tensor) -> _Moved:
        """Compute the sums and the coupling of P o (A N B') from the moments."""
        return _Moved(
            ((self.A @ inner) * self.PB).sum(1),
            ((self.B @ inner.T) * self.PA).sum(1),
            (self.moments @ inner.flatten()).view(inner.shape),
        )

    def errors(self, v: Tensor, given: _Moved) -> tuple[Tensor, Tensor]:
        """Compute the errors of the columns, with u made from v, and of the coupling."""
        u = (given.row - self.near(v[:, None])[:, 0]) / self.p
        error = self.far(u[:, None])[:, 0] + self.q * v - given.column
        coupling = self.A.T @ (u[:, None] * self.PB) + (self.PA * v[:, None]).T @ self.B
        error = error / self.root
        return error - self.null * (self.null @ error), coupling - given.coupling
