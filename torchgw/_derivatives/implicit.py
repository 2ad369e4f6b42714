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

from torchgw._derivatives.conjugate import by_conjugate_gradients
from torchgw._derivatives.density import Density, Equation, Response
from torchgw._derivatives.encoded import by_moments
from torchgw._derivatives.streamed import by_gmres
from torchgw._errors import ConvergenceWarning, warn_user
from torchgw._plans.transport import TransportPlan
from torchgw._problem.problem import Problem
from torchgw._sinkhorn.cost import Cost

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
