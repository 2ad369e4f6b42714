"""How a plan at a Gromov-Wasserstein fixed point changes with its inputs, without storing it.

docs/algorithm.md, equations 23 to 26. An entropic plan changes with its cost by S(E) =
P o (u + v - E) / epsilon, entry by entry, with u and v such that no row or column sum changes. A
fixed point changes by dP = S(dC + C'(dP)), where C'(dP) = -4 alpha DX dP DY. So a function whose
gradient in P is W changes by <Z, dC> + <u, da> + <v, db>, where

    Z = S(W + C'(Z)).

Three ways lead to Z: by moments where both sides have factors, by conjugate gradients where the
plan is stored, and by GMRES for all.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from torchgw._derivatives.density import Density, Equation, Response
from torchgw._derivatives.encoded import by_moments
from torchgw._derivatives.krylov import gmres, growth, unit_of
from torchgw._errors import ConvergenceWarning, warn_user
from torchgw._gradients.contract import Gradient
from torchgw._gradients.dense import DenseGradient, PlanMatrix
from torchgw._gradients.factored import FactoredGradient
from torchgw._plans.transport import TransportPlan
from torchgw._problem.problem import Problem
from torchgw._sinkhorn.cost import Cost, DenseCost, added

# Relative residual of the linear system. [L242, L266]
_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
_MAX_ITER = 1000
# Residual worth a warning: the marginal error of the plan leaves some that no iteration removes.
# [L244]
WORRYING = 1e-4
# Products of tables that conjugate gradients take, in units of those of moments, and operations
# below which only calls count. [L730]
_TABLES = 20
_FEW_OPERATIONS = 2.5e8
# Size of the solution over that of the right side from which the fixed point counts as nearly
# singular: then the default `tol`, 1e-5, leaves two digits of a derivative. [L355]
_NEARLY_SINGULAR = 1e3
# Columns up to which their linear system is factorised. [L385]
_SOLVED_COLUMNS = 8_192


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
    density = Density(plan)
    upstream = upstream.to(plan.dtype)
    problem = Problem(given.source, given.target, given.marginals, given.alpha, None)
    problem = problem.to(plan.dtype)
    forced = torch.zeros_like(density.a), torch.zeros_like(density.b)
    if masses is not None:
        forced = masses[0].to(density.a) * plan.epsilon, masses[1].to(density.b) * plan.epsilon
    small = density.is_stored and _is_small(problem)
    tables = small or (problem.source.factors() is None and problem.target.factors() is None)
    equation = Equation(
        density, problem, upstream, forced, tables, _TOLERANCE[plan.dtype], _MAX_ITER
    )
    found = None
    if all(bool((weight > 0).all()) for weight in plan.weights):
        ways = by_moments, by_conjugate_gradients
        one, two = reversed(ways) if small else ways
        found = one(equation)
        # at saddle points and where rounding ends conjugate gradients, moments take small problems
        if found is None or (small and found.residual > WORRYING):
            found = two(equation)
    found = found or by_gmres(equation)
    if max(found.residual / WORRYING, found.growth / _NEARLY_SINGULAR) > 1:
        share = _share(found, equation)
        # where forces cancel to rounding, as at a match point by point, there is nothing to solve
        if share * WORRYING < torch.finfo(plan.dtype).eps:
            found = replace(found, residual=found.residual * share, growth=1.0)
    if found.growth > _NEARLY_SINGULAR:
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
    return found


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


def by_conjugate_gradients(equation: Equation) -> Response | None:
    """Solve for a stored response.

    On plans without row and column sums -S is the inverse of epsilon diag(1 / P), and (24) is the
    system (-S^(-1) + C') Z = -W: symmetric, and positive at a minimum. So conjugate gradients with
    the preconditioner -S need five tables, where GMRES keeps sixty. ``None`` where they do not
    apply: at saddle points, with factors, or for tables that are too large.
    """
    density, problem, upstream, forced, tables, tol, max_iter = equation
    plan = density.plan
    if not (tables and density.is_stored) or plan.shape[1] > _SOLVED_COLUMNS:
        return None
    gradient = DenseGradient(problem)
    table = torch.cat([block for _, block in density.blocks()])
    table = table * density.a[:, None] * density.b
    a, b = table.sum(1), table.sum(0)
    # what a change of v does to column sums once u follows; constants change nothing
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
    # of a step, what it is times the preconditioner is known: the residuals that it is made of
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


def by_gmres(equation: Equation) -> Response:
    """Solve for the response of any plan: for v and the coupling of Z, as u follows from v.

    C'(Z) needs nothing but the coupling of Z (equation 25), and every product is two passes over
    the plan. Columns are divided by what a change of v does to their sums, and both parts count
    alike, whatever their units.
    """
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
        """Make Z for a v so that rows have given sums; also the errors of its column sums."""
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
    # the system is about the identity where a change of the plan dies out at once
    return Response(density, response.u, v, total, reached, products, growth(x, right))
