"""How a plan at a Gromov-Wasserstein fixed point changes with its inputs, without storing it.

docs/algorithm.md, equations 23 to 26. An entropic plan changes with its cost by S(E) =
P o (u + v - E) / epsilon, entry by entry, with u and v such that no row or column sum changes. A
fixed point changes by dP = S(dC + C'(dP)), where C'(dP) = -4 alpha DX dP DY. So a function whose
gradient in P is W changes by <Z, dC> + <u, da> + <v, db>, where

    Z = S(W + C'(Z)).

The unknowns are v and the coupling of Z, which is all that C'(Z) needs; u follows from v.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from torchgw._derivatives.encoded import MOST_NUMBERS, Encoded, Moved, what_moves
from torchgw._derivatives.krylov import gmres
from torchgw._errors import ConvergenceWarning, warn_user
from torchgw._gradients.contract import Gradient
from torchgw._gradients.dense import DenseGradient, PlanMatrix
from torchgw._gradients.factored import FactoredGradient
from torchgw._plans.transport import TransportPlan
from torchgw._problem.problem import Problem
from torchgw._sinkhorn.cost import Cost, added, exp_
from torchgw._sinkhorn.softmin import row_blocks
from torchgw._typing import Marginals

__all__ = ["Response", "respond"]

# Relative residual of the linear system. [L242, L266]
_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
_MAX_ITER = 1000
# Residual worth a warning: the marginal error of the plan leaves some that no iteration removes.
# [L244]
_WORRYING = 1e-4
# Size of the solution over that of the right side from which the fixed point counts as nearly
# singular: then the default `tol`, 1e-5, leaves two digits of a derivative. [L355]
_NEARLY_SINGULAR = 1e3
# Entries of the plan up to which its density is stored instead of exponentiated in every pass.
# [L266]
_STORED_ENTRIES = {"cpu": 25_000_000, "cuda": 200_000_000}
# Columns up to which their linear system is factorised. [L385]
_SOLVED_COLUMNS = 8_192
# Largest exponent, which only entries of two zero weights exceed, and those count for nothing.
# [L266]
_LARGEST_EXPONENT = {torch.float32: 80.0, torch.float64: 600.0}


class Response:
    """Z, shape (n, m), read block by block; ``u`` and ``v`` are derivatives by the weights."""

    def __init__(
        self,
        density: _Density,
        u: Tensor,
        v: Tensor,
        cost: Cost,
        transposed: bool = False,
        residual: float = 0.0,
        iterations: int = 0,
    ) -> None:
        # how well the linear system is solved, relative to its right side, and by how many products
        self.residual = residual
        self.iterations = iterations
        self.u = u
        self.v = v
        self._density = density
        self._cost = cost
        self._transposed = transposed

    @property
    def converged(self) -> bool:
        """Whether the linear system is solved; a warning said so otherwise."""
        return self.residual <= _WORRYING

    @property
    def T(self) -> Response:  # noqa: N802 - the name of every array library
        """The response from target to source."""
        return Response(
            self._density, self.u, self.v, self._cost, not self._transposed, self.residual,
            self.iterations,
        )  # fmt: skip

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m), or (m, n) when transposed."""
        n, m = self._density.plan.shape
        return (m, n) if self._transposed else (n, m)

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield Z by blocks of rows."""
        plan, density = self._density.plan, self._density
        for rows, block in density.blocks():
            change = self._cost.rows(rows).exponent(self.u[rows], self.v, plan.epsilon)
            yield rows, change.mul_(block).mul_(density.a[rows, None]).mul_(density.b)

    def __matmul__(self, values: Tensor) -> Tensor:
        """Multiply by values of shape (m, c)."""
        table = values.to(self._density.plan.dtype)
        if self._transposed:
            result = table.new_zeros(self.shape[0], *table.shape[1:])
            for rows, block in self.blocks():
                result += block.T @ table[rows]
            return result.to(values.dtype)
        return torch.cat([block @ table for _, block in self.blocks()]).to(values.dtype)

    def stored(self) -> Tensor:
        """Build the matrix."""
        matrix = torch.cat([block for _, block in self.blocks()])
        return matrix.T if self._transposed else matrix


class _Density:
    """The density P_ij / (a_i b_j) of a plan by blocks of rows, stored where it fits."""

    def __init__(self, plan: TransportPlan) -> None:
        self.plan = plan
        self.a, self.b = (weight.to(plan.dtype) for weight in plan.weights)
        n, m = plan.shape
        small = n * m <= _STORED_ENTRIES.get(plan.device.type, 0)
        self._kept = list(self._compute()) if small else None

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the density by blocks of rows."""
        return iter(self._kept) if self._kept is not None else self._compute()

    def _compute(self) -> Iterator[tuple[slice, Tensor]]:
        plan = self.plan
        f, g = (part.to(plan.dtype) for part in plan.potentials)
        for rows in row_blocks(plan.cost):
            exponent = plan.cost.rows(rows).exponent(f[rows], g, plan.epsilon)
            yield rows, exp_(exponent.clamp_(max=_LARGEST_EXPONENT[plan.dtype]))

    def times(self, values: Tensor) -> Tensor:
        """Compute plan @ values, (n, c)."""
        if self._kept is None:
            ahead: Tensor = self.plan @ values
            return ahead
        weighted = self.b[:, None] * values
        return torch.cat([block @ weighted for _, block in self._kept]) * self.a[:, None]

    def times_transposed(self, values: Tensor) -> Tensor:
        """Compute plan.T @ values, (m, c)."""
        if self._kept is None:
            back: Tensor = self._turned @ values
            return back
        weighted, total = self.a[:, None] * values, torch.zeros_like(self.b)[:, None]
        for rows, block in self._kept:
            total = total + block.T @ weighted[rows]
        return total * self.b[:, None]

    @cached_property
    def _turned(self) -> TransportPlan:
        return self.plan.T

    def squares(self, masses: Tensor) -> Tensor:
        """Compute sum_i P_ij^2 / masses_i over rows that have a mass, (m,)."""
        masses = torch.where(masses > 0, masses, 1.0)
        if self._kept is None:
            plan = self.plan
            halved = TransportPlan(
                plan.cost, plan.potentials, Marginals(*(part.square() for part in plan.weights)),
                plan.epsilon / 2, plan.backend,
            )  # fmt: skip
            sums: Tensor = halved.T @ (1 / masses)[:, None]
            return sums[:, 0]
        weights = self.a.square() / masses
        found = sum(weights[rows] @ block.square() for rows, block in self._kept)
        return self.b.square() * found


def respond(
    plan: TransportPlan,
    given: Problem,
    upstream: Cost,
    masses: tuple[Tensor, Tensor] | None = None,
) -> Response:
    """Solve for the response of a plan at a fixed point, given a function's gradient in the plan.

    ``given`` is the problem of the plan; C' does not depend on its linear term. The response is
    also the change of the plan with a cost that changes by ``upstream``, S being symmetric;
    ``masses`` are then the changes of the weights over the weights, (n,) and (m,).
    """
    # one step of GMRES on (v, coupling of Z) is two passes over the plan
    density = _Density(plan)
    upstream = upstream.to(plan.dtype)
    problem = Problem(given.source, given.target, given.marginals, given.alpha, None)
    problem = problem.to(plan.dtype)
    zero_sums = torch.zeros_like(density.a), torch.zeros_like(density.b)
    forced = zero_sums
    if masses is not None:
        forced = masses[0].to(density.a) * plan.epsilon, masses[1].to(density.b) * plan.epsilon
    if all(bool((weight > 0).all()) for weight in plan.weights):
        response = _by_moments(density, problem, upstream, forced)
        if response is not None:
            return response
    stored = problem.source.factors() is None and problem.target.factors() is None
    gradient: Gradient = DenseGradient(problem) if stored else FactoredGradient(problem)
    generator = torch.Generator(device=plan.device)
    product = gradient.start()
    no_change = product.vector()
    root = what_moves(density.b, density.squares(density.a)).sqrt()
    null = root / root.norm()

    def step(
        v: Tensor, term: Cost, sums: tuple[Tensor, Tensor] = zero_sums
    ) -> tuple[Response, Tensor]:
        """Make Z whose rows have given sums for a v, and by how much those of its columns err."""
        u = torch.empty_like(density.a)
        column = -sums[1]
        weighted = density.b * v
        for rows, block in density.blocks():
            change = term.rows(rows).dense().matrix
            u[rows] = (block * change) @ density.b - block @ weighted + sums[0][rows]
            column += density.a[rows] @ (block * (u[rows, None] + v - change))
        return Response(density, u, v, term), column

    def curvature(coupling: Tensor) -> Cost:
        return gradient.linearise(product.with_vector(coupling)).cost.to(plan.dtype)

    def residual(
        v: Tensor, coupling: Tensor, term: Cost, sums: tuple[Tensor, Tensor] = zero_sums
    ) -> tuple[Tensor, Tensor]:
        response, column = step(v, term, sums)
        answer = gradient.update(response, None, generator).vector()  # type: ignore[arg-type]
        scaled = torch.where(root > 0, density.b * column / root, 0.0)
        # potentials are defined up to a constant, which rounding must not excite
        return scaled - (scaled @ null) * null, (coupling - answer).to(plan.dtype)

    def finish(v: Tensor, coupling: Tensor, reached: float, count: int) -> Response:
        """Read Z off the solution of the system."""
        total = added(upstream, curvature(coupling))
        response, column = step(v, total, forced)
        # columns of weight zero take the potential that their conditional plan defines
        v = torch.where(root > 0, v, -column)
        return Response(density, response.u, v, total, residual=reached, iterations=count)

    found = _by_conjugate_gradients(density, gradient, upstream, forced)
    if found is not None:
        v, coupling, reached, count = found
        _warn_of_residual(reached)
        return finish(v, coupling, reached, count)
    zero_v, zero = torch.zeros_like(density.b), torch.zeros_like(no_change)
    parts = residual(zero_v, zero, upstream, forced)
    sizes = [float(part.norm()) for part in parts]
    # both parts count alike, whatever their units
    unit = sizes[0] / sizes[1] if min(sizes) > 0 else 1.0

    def unpack(x: Tensor) -> tuple[Tensor, Tensor]:
        v = torch.where(root > 0, x[: len(root)] / root, 0.0)
        return v, (x[len(root) :] / unit).to(no_change.dtype)

    products = 0

    def operator(x: Tensor) -> Tensor:
        nonlocal products
        products += 1
        v, coupling = unpack(x)
        column, rest = residual(v, coupling, curvature(coupling))
        return torch.cat([column, rest * unit])

    right = -torch.cat([parts[0], parts[1] * unit])
    tol = _TOLERANCE[plan.dtype]
    x, reached = gmres(operator, right, tol=tol, max_iter=_MAX_ITER)
    # the system is about the identity where a change of the plan dies out at once
    growth = float(x.norm()) / max(float(right.norm()), torch.finfo(right.dtype).tiny)
    _warn_of_growth(growth)
    _warn_of_residual(reached)
    return finish(*unpack(x), reached, products)


def _by_moments(
    density: _Density, problem: Problem, upstream: Cost, forced: tuple[Tensor, Tensor]
) -> Response | None:
    """Solve between spaces that both have factors; ``None`` for others and large ranks."""
    plan = density.plan
    one, two = problem.source.factors(), problem.target.factors()
    if one is None or two is None or one.signs.numel() * two.signs.numel() > MOST_NUMBERS:
        return None
    system = Encoded(
        (one, two), (density.times, density.times_transposed), density.squares, problem.alpha,
        plan.epsilon,
    )  # fmt: skip
    sums = forced[0] * density.a, forced[1] * density.b
    given = added(upstream, system.forced(sums[0] / plan.epsilon, sums[1] / plan.epsilon))
    columns = torch.cat([torch.ones_like(system.B[:, :1]), system.B], 1) * density.b[:, None]
    means, column = [], torch.zeros_like(density.b)
    for rows, block in density.blocks():
        change = block * given.rows(rows).dense().matrix
        means.append(change @ columns)
        column += density.a[rows] @ change
    table = torch.cat(means) * density.a[:, None]
    moved = Moved(table[:, 0], column * density.b, system.A.T @ table[:, 1:])
    found = system.solve(moved, sums, tol=_TOLERANCE[plan.dtype], max_iter=_MAX_ITER)
    _warn_of_growth(found.growth)
    _warn_of_residual(found.residual)
    return Response(
        density, found.u, found.v, added(given, found.curve), residual=found.residual,
        iterations=found.products,
    )  # fmt: skip


def _warn_of_growth(growth: float) -> None:
    """Warn of a solution far larger than the right side."""
    if growth > _NEARLY_SINGULAR:
        warn_user(
            "The fixed point of the solve is nearly singular: the implicit derivative enlarges "
            f"errors of the plan {growth:.1e} times. Lower `tol` and `inner_tol`, or raise "
            "`epsilon`.",
            ConvergenceWarning,
        )


def _warn_of_residual(reached: float) -> None:
    """Warn of a linear system that is not solved."""
    if reached > _WORRYING:
        warn_user(
            f"The implicit derivative of the plan has a relative residual of {reached:.1e}. "
            "Raise `epsilon`, or lower `tol` and `inner_tol`.",
            ConvergenceWarning,
        )


def _by_conjugate_gradients(
    density: _Density, gradient: Gradient, upstream: Cost, forced: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, float, int] | None:
    """Solve for a stored response; return v, the response as a coupling, residual and products.

    On plans without row and column sums -S is the inverse of epsilon diag(1 / P), and (24) is the
    system (-S^(-1) + C') Z = -W: symmetric, and positive at a minimum. So conjugate gradients with
    the preconditioner -S need five tables, where GMRES keeps sixty. ``None`` where they do not
    apply: at saddle points, with weights of zero, with factors, or for tables that are too large.
    """
    plan = density.plan
    m = plan.shape[1]
    small = plan.shape[0] * m <= _STORED_ENTRIES.get(plan.device.type, 0) and m <= _SOLVED_COLUMNS
    if not small or gradient.name != "dense":
        return None
    if not all(bool((weight > 0).all()) for weight in (density.a, density.b)):
        return None
    table = torch.cat([block for _, block in density.blocks()])
    table = table * density.a[:, None] * density.b
    a, b = table.sum(1), table.sum(0)
    # what a change of v does to column sums once u follows; constants change nothing
    schur = b.diag() - table.T @ (table / a[:, None]) + torch.outer(b, b)
    factor, failed = torch.linalg.cholesky_ex(schur.double())
    if int(failed):
        return None

    def respond_to(cost: Tensor, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        """Compute S(cost) with given changes of row and column sums, times epsilon; and v."""
        moved = table * cost
        row, column = moved.sum(1) + row, moved.sum(0) + column
        right = (column - table.T @ (row / a)).double()[:, None]
        v = torch.cholesky_solve(right, factor)[:, 0].to(table.dtype)
        u = (row - table @ v) / a
        return ((u[:, None] + v) * table - moved).div_(plan.epsilon), v

    def curvature(change: Tensor) -> Tensor:
        cost = gradient.linearise(PlanMatrix(change)).cost.dense().matrix
        return cost.to(table.dtype)

    none = torch.zeros_like(a), torch.zeros_like(b)
    given = upstream.dense().matrix
    masses = forced[0] * density.a, forced[1] * density.b
    start = respond_to(given, *masses)[0]
    residual = -curvature(start)
    found = torch.zeros_like(start)
    ahead = -respond_to(residual, *none)[0]
    size = first = float((residual * ahead).sum())
    # of a step, what it is times the preconditioner is known: the residuals that it is made of
    step, weighed, count = ahead, residual, 1
    tolerance = _TOLERANCE[plan.dtype] ** 2 * max(first, 0.0)
    while size > tolerance and count < _MAX_ITER:
        bent = weighed + curvature(step)
        curve = float((step * bent).sum())
        if not curve > 0:
            return None
        found.add_(step, alpha=size / curve)
        residual = residual.sub(bent, alpha=size / curve)
        ahead = -respond_to(residual, *none)[0]
        before, size = size, float((residual * ahead).sum())
        step, weighed = (
            ahead.add(step, alpha=size / before),
            residual.add(weighed, alpha=size / before),
        )
        count += 1
    tiny = torch.finfo(start.dtype).tiny
    answer = found.add_(start)
    _warn_of_growth(float(answer.norm()) / max(float(start.norm()), tiny))
    v = respond_to(given + curvature(answer), *masses)[1]
    reached = math.sqrt(max(size, 0.0) / first) if first > 0 else 0.0
    return v, answer.flatten(), reached, count
