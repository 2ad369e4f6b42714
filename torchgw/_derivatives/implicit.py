"""How a plan at a Gromov-Wasserstein fixed point changes with its inputs, without storing it.

docs/algorithm.md, equations 23 to 26. An entropic plan changes with its cost by S(E) =
P o (u + v - E) / epsilon, entry by entry, with u and v such that no row or column sum changes. A
fixed point changes by dP = S(dC + C'(dP)), where C'(dP) = -4 alpha DX dP DY. So a function whose
gradient in P is W changes by <Z, dC> + <u, da> + <v, db>, where

    Z = S(W + C'(Z)).

Three ways lead to Z: by moments where both sides have factors, by conjugate gradients where the
plan is stored, and by GMRES for all.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._derivatives.krylov import MOST_PRODUCTS, gmres, growth, unit_of
from torchgw._errors import ConvergenceWarning, warn_user
from torchgw._gradients.contract import Gradient
from torchgw._gradients.dense import DenseGradient, PlanMatrix
from torchgw._gradients.factored import FactoredGradient
from torchgw._plans.transport import TransportPlan, times
from torchgw._problem.limits import limits_of
from torchgw._problem.problem import Problem
from torchgw._sinkhorn.problem import (
    LEAST_EXPONENTS,
    Cost,
    DenseCost,
    FactoredCost,
    added,
    exp_,
    row_blocks,
)
from torchgw._typing import Marginals
from torchgw.distances.base import Factors


class Density:
    """The density P_ij / (a_i b_j) of a plan by blocks of rows, stored where it fits."""

    def __init__(self, plan: TransportPlan) -> None:
        self.plan = plan
        self.a, self.b = (weight.to(plan.dtype) for weight in plan.weights)
        # or else exponentiated in every pass
        self.is_stored = limits_of(plan.device).stores(*plan.shape)
        self._kept = list(self._compute()) if self.is_stored else None

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the density by blocks of rows."""
        return iter(self._kept) if self._kept is not None else self._compute()

    def _compute(self) -> Iterator[tuple[slice, Tensor]]:
        plan = self.plan
        f, g = (part.to(plan.dtype) for part in plan.potentials)
        for rows in row_blocks(plan.cost):
            exponent = plan.cost.rows(rows).exponent(f[rows], g, plan.epsilon)
            # only entries between two zero weights exceed it, and these do not count [L266]
            yield rows, exp_(exponent.clamp_(max=-LEAST_EXPONENTS[plan.dtype]))

    def times(self, values: Tensor) -> Tensor:
        """Compute plan @ values, (n, c)."""
        if self._kept is None:
            return self.plan @ values
        weighted = self.b[:, None] * values
        return torch.cat([block @ weighted for _, block in self._kept]) * self.a[:, None]

    def times_transposed(self, values: Tensor) -> Tensor:
        """Compute plan.T @ values, (m, c)."""
        if self._kept is None:
            return self._turned @ values
        weighted, total = self.a[:, None] * values, torch.zeros_like(self.b)[:, None]
        for rows, block in self._kept:
            total = total + block.T @ weighted[rows]
        return total * self.b[:, None]

    @cached_property
    def _turned(self) -> TransportPlan:
        return self.plan.T

    def what_moves(self, column: Tensor, masses: Tensor) -> Tensor:
        """Compute the change of a column by v_j alone, with u adapted to it, (m,)."""
        # It is the sum of the column less `squares`. Where a plan is nearly a matching it is far
        # smaller than the sum, and rounding leaves some of it.
        least = torch.finfo(column.dtype).eps ** 0.75 * column
        return torch.maximum(column - self.squares(masses), least)

    def squares(self, masses: Tensor) -> Tensor:
        """Compute sum_i P_ij^2 / masses_i over rows that have a mass, (m,)."""
        masses = torch.where(masses > 0, masses, 1.0)
        if self._kept is None:
            plan = self.plan
            halved = TransportPlan(
                plan.cost, plan.potentials, Marginals(*(part.square() for part in plan.weights)),
                plan.epsilon / 2, plan.backend,
            )  # fmt: skip
            return (halved.T @ (1 / masses)[:, None])[:, 0]
        weights = self.a.square() / masses
        found = sum(weights[rows] @ block.square() for rows, block in self._kept)
        return self.b.square() * found


@dataclass(frozen=True, eq=False)
class Response:
    """Z = P o (u + v - cost) / epsilon, shape (n, m), read block by block."""

    density: Density
    u: Tensor  # (n,), derivatives by the weights
    v: Tensor  # (m,)
    cost: Cost
    residual: float = 0.0  # of its linear system, relative
    iterations: int = 0  # products with the matrix of that system
    growth: float = 1.0  # size of the solution over that of the right side
    transposed: bool = False

    @property
    def T(self) -> "Response":  # noqa: N802 - the name of every array library
        """The response from target to source."""
        return replace(self, transposed=not self.transposed)

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield Z by blocks of rows."""
        density = self.density
        for rows, block in density.blocks():
            change = self.cost.rows(rows).exponent(self.u[rows], self.v, density.plan.epsilon)
            yield rows, change.mul_(block).mul_(density.a[rows, None]).mul_(density.b)

    def __matmul__(self, values: Tensor) -> Tensor:
        """Multiply by values of shape (m, c), differentiable in these."""
        if values.requires_grad and torch.is_grad_enabled():
            return times(self, values)
        table = values.to(self.v.dtype)
        if self.transposed:
            result = table.new_zeros(len(self.v), *table.shape[1:])
            for rows, block in self.blocks():
                result += block.T @ table[rows]
            return result.to(values.dtype)
        return torch.cat([block @ table for _, block in self.blocks()]).to(values.dtype)

    def stored(self) -> Tensor:
        """Build the matrix."""
        matrix = torch.cat([block for _, block in self.blocks()])
        return matrix.T if self.transposed else matrix


class Equation(NamedTuple):
    """The linear system of a response, docs/algorithm.md, equation 24, and when it is solved."""

    density: Density
    problem: Problem  # without its linear cost
    upstream: Cost  # W
    forced: tuple[Tensor, Tensor]  # sums of rows and columns over weights, times epsilon
    tables: bool  # whether costs are tables, and not in factors
    tol: float  # relative residual
    max_iter: int  # products with the matrix


def by_conjugate_gradients(equation: Equation) -> Response | None:
    """Solve for a stored response."""
    # On plans without row and column sums -S is the inverse of epsilon diag(1 / P), and (24) is the
    # system (-S^(-1) + C') Z = -W: symmetric, and positive at a minimum. So conjugate gradients
    # with the preconditioner -S need five tables, where GMRES keeps sixty. `None` where they do not
    # apply: at saddle points, with factors, or for tables that are too large.
    density, problem, upstream, forced, tables, tol, max_iter = equation
    plan = density.plan
    most = limits_of(plan.device).solved_columns
    if not (tables and density.is_stored) or plan.shape[1] > most:
        return None
    gradient = DenseGradient(problem)
    table = torch.cat([block for _, block in density.blocks()])
    table = table * density.a[:, None] * density.b
    a, b = table.sum(1), table.sum(0)
    # the change of the column sums by v, with u adapted; constants change nothing
    schur = b.diag() - table.T @ (table / a[:, None]) + torch.outer(b, b)
    factor, failed = torch.linalg.cholesky_ex(schur.double())
    if int(failed):
        return None

    def respond_to(cost: Tensor, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute S(cost) with given changes of row and column sums, times epsilon; u and v."""
        moved = table * cost
        row, column = moved.sum(1) + row, moved.sum(0) + column
        right = (column - table.T @ (row / a)).double()[:, None]
        v = torch.cholesky_solve(right, factor)[:, 0].to(table.dtype)
        u = (row - table @ v) / a
        return ((u[:, None] + v) * table - moved).div_(plan.epsilon), u, v

    def curvature(change: Tensor) -> DenseCost:
        return gradient.linearise(PlanMatrix(change)).cost.dense().to(table.dtype)

    none = torch.zeros_like(a), torch.zeros_like(b)
    masses = forced[0] * density.a, forced[1] * density.b
    start, *_ = respond_to(upstream.dense().matrix, *masses)
    residual = -curvature(start).matrix
    found = torch.zeros_like(start)
    ahead = -respond_to(residual, *none)[0]
    size = first = float((residual * ahead).sum())
    # the product of a step and the preconditioner is known: the residuals of which the step is made
    step, weighed, count = ahead, residual, 1
    tolerance = tol**2 * max(first, 0.0)
    while size > tolerance and count < max_iter:
        bent = weighed + curvature(step).matrix
        curve = float((step * bent).sum())
        if not curve > 0:
            return None
        found.add_(step, alpha=size / curve)
        residual = residual.sub(bent, alpha=size / curve)
        ahead = -respond_to(residual, *none)[0]
        before, size = size, float((residual * ahead).sum())
        step = ahead.add(step, alpha=size / before)
        weighed = residual.add(weighed, alpha=size / before)
        count += 1
    found.add_(start)
    cost = added(upstream, curvature(found))
    _, u, v = respond_to(cost.dense().matrix, *masses)
    # rounding may leave a product below zero
    reached = math.sqrt(abs(size) / first) if first > 0 else 0.0
    return Response(density, u, v, cost, reached, count, growth(found, start))


# Columns of a product of the plan with many. [L524]
_COLUMNS = 256


def by_moments(equation: Equation) -> Response | None:
    """Solve for the response between spaces with factors of small ranks; ``None`` for others."""
    density, problem, upstream, forced, _, tol, max_iter = equation
    one, two, epsilon = problem.source.factors(), problem.target.factors(), density.plan.epsilon
    if one is None or two is None:
        return None
    if one.signs.numel() * two.signs.numel() > limits_of(density.plan.device).moments:
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


# Relative residual of the linear system. [L242, L266, L492]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
# Residuals above this get a warning: the marginal error of the plan leaves some residual that
# nothing removes. [L244]
WORRYING = 1e-4
# Conjugate gradients take so many products of tables. They are preferred if these are cheaper than
# making the moments, or by so few operations more that only the number of calls counts. [L730]
_TABLES = 20
_FEW_OPERATIONS = 2.5e8
# Size of the solution over that of the right side from which the fixed point counts as nearly
# singular: then the default `tol`, 1e-5, leaves two digits of a derivative. [L355]
NEARLY_SINGULAR = 1e3


def respond(
    plan: TransportPlan, given: Problem, upstream: Cost, masses: tuple[Tensor, Tensor] | None = None
) -> Response:
    """Solve for the response of a plan at a fixed point to a function's gradient in the plan."""
    # ``given`` is the problem of the plan; C' does not depend on its linear term. The response is
    # also the change of the plan with a cost that changes by ``upstream``, S being symmetric;
    # ``masses`` are then the changes of the weights over the weights, (n,) and (m,).
    upstream = upstream.to(plan.dtype)
    problem = Problem(given.source, given.target, given.marginals, given.alpha, None)
    problem, density = problem.to(plan.dtype), Density(plan)
    forced = torch.zeros_like(density.a), torch.zeros_like(density.b)
    if masses is not None:
        forced = masses[0].to(density.a) * plan.epsilon, masses[1].to(density.b) * plan.epsilon
    small = density.is_stored and _is_small(problem)
    tables = small or (problem.source.factors() is None and problem.target.factors() is None)
    equation = Equation(
        density, problem, upstream, forced, tables, TOLERANCE[plan.dtype], MOST_PRODUCTS
    )
    found = _solve(equation, small=small)
    if max(found.residual / WORRYING, found.growth / NEARLY_SINGULAR) > 1:
        share = _share(found, equation)
        # where forces cancel up to rounding, as at a point-by-point match, there is nothing to
        # solve
        if share * WORRYING < torch.finfo(plan.dtype).eps:
            found = replace(found, residual=found.residual * share, growth=1.0)
    _warn(found)
    return found


def _solve(equation: Equation, *, small: bool) -> Response:
    """Solve by the first way that applies."""
    if any(bool((weight <= 0).any()) for weight in equation.density.plan.weights):
        return by_gmres(equation)
    ways = by_moments, by_conjugate_gradients
    one, two = reversed(ways) if small else ways
    found = one(equation)
    # at saddle points, and where rounding ends conjugate gradients, small problems are solved by
    # moments
    if found is None or (small and found.residual > WORRYING):
        found = two(equation)
    return found or by_gmres(equation)


def _warn(found: Response) -> None:
    """Warn of a response that may be wrong."""
    if found.growth > NEARLY_SINGULAR:
        warn_user(
            "The fixed point of the solve is nearly singular: the implicit derivative enlarges "
            f"errors of the plan {found.growth:.1e} times. Lower `tol` and `inner_tol`, or raise "
            "`epsilon`.",
            ConvergenceWarning,
        )
    if found.residual > WORRYING:
        warn_user(
            f"The implicit derivative of the plan has a relative residual of {found.residual:.1e}. "
            "Raise `epsilon`, or lower `tol` and `inner_tol`.",
            ConvergenceWarning,
        )


def _share(found: Response, equation: Equation) -> float:
    """Divide the size of a response by that of the forces along which a plan would move."""
    density, size, forces = equation.density, 0.0, 0.0
    for (rows, change), (_, block) in zip(found.blocks(), density.blocks(), strict=True):
        plan = block * density.a[rows, None] * density.b
        size += float(change.square().sum())
        forces += float((plan * equation.upstream.rows(rows).dense().matrix).square().sum())
    return density.plan.epsilon * math.sqrt(size / forces) if forces > 0 else 1.0


def _is_small(problem: Problem) -> bool:
    """Whether some products of tables are less work than the moments of factors."""
    one, two = problem.source.factors(), problem.target.factors()
    if one is None or two is None:
        return False
    (n, r), (m, s) = one.matrix.shape, two.matrix.shape
    moments = s * s * n * (m + r * r)
    return _TABLES * n * m * (n + m) < moments + _FEW_OPERATIONS


def by_gmres(equation: Equation) -> Response:
    """Solve for the response of any plan: for v and the coupling of Z, as u follows from v."""
    # C'(Z) needs nothing but the coupling of Z (equation 25), and every product is two passes over
    # the plan. The equations of columns are divided by the effect of v on their sums; and both
    # parts are scaled to count alike, whatever their units.
    density, problem, upstream, forced, tables, tol, max_iter = equation
    a, b, dtype = density.a, density.b, density.plan.dtype
    gradient: Gradient = DenseGradient(problem) if tables else FactoredGradient(problem)
    generator = torch.Generator(device=density.plan.device)
    start = gradient.start()
    root = density.what_moves(b, a).sqrt()
    null = root / root.norm()

    def curvature(coupling: Tensor) -> Cost:
        """Compute C' at a coupling."""
        return gradient.linearise(start.with_vector(coupling)).cost.to(dtype)

    def step(v: Tensor, term: Cost, sums: tuple[Tensor, Tensor]) -> tuple[Response, Tensor]:
        """Make the Z of a v whose rows have given sums; also the errors of its column sums."""
        u = torch.empty_like(a)
        column = -sums[1]
        weighted = b * v
        for rows, block in density.blocks():
            change = term.rows(rows).dense().matrix
            u[rows] = (block * change) @ b - block @ weighted + sums[0][rows]
            column += a[rows] @ (block * (u[rows, None] + v - change))
        return Response(density, u, v, term), column

    def errors(
        v: Tensor, coupling: Tensor, term: Cost, sums: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Compute the errors of the column sums and of the coupling of Z."""
        response, column = step(v, term, sums)
        answer = gradient.update(response, None, generator)  # type: ignore[arg-type]
        scaled = torch.where(root > 0, b * column / root, 0.0)
        # potentials are defined up to a constant, which rounding must not excite
        scaled = scaled - (scaled @ null) * null
        return scaled, (coupling - answer.vector()).to(dtype)

    def unpack(x: Tensor) -> tuple[Tensor, Tensor]:
        v = torch.where(root > 0, x[: len(b)] / root, 0.0)
        return v, (x[len(b) :] / unit).to(nothing[1].dtype)

    def operator(x: Tensor) -> Tensor:
        v, coupling = unpack(x)
        column, rest = errors(v, coupling, curvature(coupling), unforced)
        return torch.cat([column, rest * unit])

    nothing = torch.zeros_like(b), torch.zeros_like(start.vector())
    unforced = torch.zeros_like(a), torch.zeros_like(b)
    column, rest = errors(*nothing, upstream, forced)
    unit = unit_of(column, rest)
    right = -torch.cat([column, rest * unit])
    x, reached, products = gmres(operator, right, tol=tol, max_iter=max_iter)
    v, coupling = unpack(x)
    total = added(upstream, curvature(coupling))
    response, column = step(v, total, forced)
    # columns of weight zero take the potential that their conditional plan defines
    v = torch.where(root > 0, v, -column)
    # the system is nearly the identity where a change of the plan dies out at once
    return Response(density, response.u, v, total, reached, products, growth(x, right))
