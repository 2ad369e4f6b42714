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
from dataclasses import replace

import torch
from torch import Tensor

from torchgw._derivatives.conjugate import by_conjugate_gradients
from torchgw._derivatives.density import Density, Equation, Response
from torchgw._derivatives.krylov import gmres, growth, unit_of
from torchgw._derivatives.moments import by_moments
from torchgw._errors import ConvergenceWarning, warn_user
from torchgw._gradients.contract import Gradient
from torchgw._gradients.dense import DenseGradient
from torchgw._gradients.factored import FactoredGradient
from torchgw._plans.transport import TransportPlan
from torchgw._problem.problem import Problem
from torchgw._sinkhorn.problem import Cost, added

# Relative residual of the linear system. [L242, L266]
_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
_MAX_ITER = 1000
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
    """Solve for the response of a plan at a fixed point, given a function's gradient in the plan.

    ``given`` is the problem of the plan; C' does not depend on its linear term. The response is
    also the change of the plan with a cost that changes by ``upstream``, S being symmetric;
    ``masses`` are then the changes of the weights over the weights, (n,) and (m,).
    """
    upstream = upstream.to(plan.dtype)
    problem = Problem(given.source, given.target, given.marginals, given.alpha, None)
    problem, density = problem.to(plan.dtype), Density(plan)
    forced = torch.zeros_like(density.a), torch.zeros_like(density.b)
    if masses is not None:
        forced = masses[0].to(density.a) * plan.epsilon, masses[1].to(density.b) * plan.epsilon
    small = density.is_stored and _is_small(problem)
    tables = small or (problem.source.factors() is None and problem.target.factors() is None)
    equation = Equation(
        density, problem, upstream, forced, tables, _TOLERANCE[plan.dtype], _MAX_ITER
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
