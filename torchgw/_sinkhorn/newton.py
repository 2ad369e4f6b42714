"""Newton steps where Sinkhorn's iteration is slow and a plan is small."""

from __future__ import annotations

import torch

from torchgw._sinkhorn.contract import PreparedProblem
from torchgw._sinkhorn.cost import DenseCost
from torchgw._sinkhorn.problem import STRICT
from torchgw._typing import Potentials

__all__ = ["NEWTON_AFTER", "is_small", "newton_step"]

# Iterations after which a linear problem counts as slow, and the column error from which on a step
# may lead near its solution. [L443]
NEWTON_AFTER, NEWTON_BELOW = 20, 1e-3
# Points per side up to which a step takes no longer than some ten iterations. [L443]
_MOST_POINTS = 256
# Share of the mass of a column that is added to its second derivative, against rounding. [L443]
_RIDGE = 1e-13
# Largest change of a potential, in units of epsilon, that quadratic convergence is expected of.
# [L443]
_LARGEST_STEP = 10.0


def is_small(prepared: PreparedProblem) -> bool:
    """Whether Newton steps are possible and may pay."""
    problem = prepared.problem
    alone = getattr(prepared.backend, "ranks", None) is None
    exact = problem.tau == STRICT and problem.cost.dtype == torch.float64
    # a streamed cost asks for nothing as large as the plan
    stored = isinstance(problem.cost, DenseCost)
    return exact and alone and stored and max(problem.cost.shape) <= _MOST_POINTS


def newton_step(prepared: PreparedProblem, potentials: Potentials) -> Potentials | None:
    """Take a Newton step of the dual in g, at potentials whose plan has exact rows, if it is short.

    Where f follows g, the dual has the gradient b - q, with q the column sums of the plan P, and
    the Hessian -(diag(q) - P' diag(1 / a) P) / epsilon [1]_. A constant changes nothing; a step is
    orthogonal to q. The next iteration takes f from g.

    References
    ----------
    .. [1] C. Brauer, C. Clason, D. Lorenz, B. Wirth. A Sinkhorn-Newton method for entropic optimal
       transport. arXiv:1710.06635.
    """
    problem, (f, g) = prepared.problem, potentials
    a, b = problem.marginals
    plan = prepared.dense(potentials).double()
    columns = plan.sum(0)
    # a row of weight zero is zero, and a column of weight zero stays where it is
    shared = plan.T @ (plan / torch.where(a > 0, a, 1.0)[:, None])
    curvature = torch.outer(columns, columns) - shared
    curvature.diagonal().add_(torch.where(b > 0, (1 + _RIDGE) * columns, 1.0))
    factor, failed = torch.linalg.cholesky_ex(curvature)
    step = torch.cholesky_solve((b - columns)[:, None], factor)[:, 0]
    size = torch.where(failed == 0, torch.where(b > 0, step, 0.0).abs().amax(), torch.inf)
    # NaN compares as false
    if not bool(size <= _LARGEST_STEP):
        return None
    return Potentials(f, g + problem.epsilon * torch.where(b > 0, step, 0.0).to(g.dtype))
