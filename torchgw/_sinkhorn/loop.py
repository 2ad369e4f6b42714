"""Log-domain Sinkhorn: the one loop.

Relaxation and stopping are written once, here, so no two backends can solve different problems. A
sweep (several full iterations) must equal the softmins it replaces, and its ``check`` tells when it
cannot.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from torchgw._sinkhorn.contract import PreparedProblem, Sweep, softmin_sweep
from torchgw._sinkhorn.newton import NEWTON_AFTER, NEWTON_BELOW, is_small, newton_step
from torchgw._sinkhorn.problem import STRICT, LinearProblem
from torchgw._typing import Potentials

__all__ = ["SinkhornResult", "sinkhorn"]

# Increases of the error after which what is left of it is taken to be rounding. [L15]
_MOST_RESTARTS = 5
# Errors above which it is not: the error of a plan that has yet to change partners may stay the
# same for as long as potentials take to get there. [L288]
_MOST_ROUNDING = {torch.float32: 0.05, torch.float64: 1e-6}
# Multiple of the machine epsilon below which a marginal error is noise. [L288]
_ROUNDING = 16
# Least distance of a rate to one that over-relaxation assumes: it bounds the factor by 1.98, where
# an overestimate still contracts. [L6]
_SMALLEST_GAP = 1e-6
# Iterations between two looks at the error of a sweeper of two levels: each leaves about a tenth.
# [L288]
_TWO_LEVEL_CHECK = 1
# Share of the error by which a sweep changes one that stays; multiple of the tolerance above which
# it may be followed; how much further than a sweep potentials may then go at once. [L453]
_STAYS, _ABOVE, _FARTHEST = 0.02, 10, 65536.0
# Sweeps in a row that have to leave it where it was before: the linear problems of an outer
# iteration are ended earlier than that. [L455]
_PATIENCE = 10
# What is left of the factor's excess over one after a sweep that shows it to be too large. [L6]
_BACK_OFF = 0.97


class SinkhornResult(NamedTuple):
    """Outcome of the inner loop."""

    potentials: Potentials  # rows of their plan have mass a
    error: float  # L1 distance of the column marginal to b
    n_iters: int
    converged: bool


class _Kept(NamedTuple):
    """Where potentials were before they went on by many steps at once."""

    sweep: Sweep
    step: Potentials

    def agrees(self, after: Potentials, before: Potentials, problem: LinearProblem) -> bool:
        """Whether a sweep from there goes on in the direction of the step."""
        b = problem.marginals.b
        change = after.g - before.g
        # a constant moves no mass
        change = torch.where(b > 0, change - torch.dot(b, change.to(b.dtype)) / b.sum(), 0.0)
        return float(change @ self.step.g) > 0


def sinkhorn(
    prepared: PreparedProblem,
    start: Potentials | None,
    *,
    max_iter: int,
    tol: float,
    check_every: int = 10,
    min_iter: int = 0,
) -> SinkhornResult:
    """Run over-relaxed Sinkhorn iterations from warm potentials until the columns are met."""
    # Stops when the L1 column error, sum_j |q_j - b_j|, is at most tol, or at most what rounding in
    # the dtype of the cost leaves of it, or has risen five times; but for a rising error not before
    # min_iter full iterations, each a row and a column update. Without a start it begins with an
    # exact half-step each way. With tau below one the error is the distance to the fixed point, up
    # to the mass of the plan; it is non-finite when the cost or the potentials were. The device is
    # read from once every check_every iterations only.
    # Sinkhorn's iteration is block Gauss-Seidel on the dual, so over-relaxation turns a rate of 1 -
    # s into about 1 - 2 sqrt(s) once the factor fits the rate: D. Young. Iterative solution of
    # large linear systems. Academic Press 1971; A. Thibault, L. Chizat, C. Dossal, N. Papadakis.
    # Overrelaxed Sinkhorn-Knopp algorithm for regularized optimal transport. Algorithms 2021. The
    # factor follows the observed rate and falls back to one (plain Sinkhorn) whenever the error
    # grows.
    # While a point has yet to change partners the error stays, and each sweep moves the potentials
    # by the same step. They then go on by more and more of these steps at once, until a larger
    # error or a step back says that it was too far.
    problem = prepared.problem
    current = start or prepared.half_steps(torch.zeros_like(problem.marginals.b))
    tol = max(tol, _ROUNDING * torch.finfo(problem.cost.dtype).eps)
    done, restarts, error, relaxation = 0, 0, float("inf"), 1.0
    near, stayed, steps = NEWTON_BELOW, 0, 0.0
    kept: _Kept | None = None
    while done < max_iter:
        every = _TWO_LEVEL_CHECK if prepared.two_level else check_every
        count = min(every, max_iter - done)
        previous = error
        sweep = prepared.sweep(current, count, relaxation)
        ok, error = read(sweep, problem)
        if not ok:
            current = prepared.half_steps(current.g)
            # the old kernel goes before the new one comes: either may be as large as the cost
            prepared.end_sweeps()
            sweep = prepared.sweep(current, count, 1.0)
            ok, error = read(sweep, problem)
        if not ok:
            sweep = softmin_sweep(prepared, current, count)
            error = read(sweep, problem)[1]
            prepared.end_sweeps()
        done += count
        if kept is not None and not (
            error <= (1 + _STAYS) * previous and kept.agrees(sweep.state, current, problem)
        ):
            sweep, error, steps, kept = kept.sweep, previous, steps / 8, None
            current = sweep.state
            continue
        before, current, kept = current, sweep.state, None
        restarts += previous <= error < _MOST_ROUNDING[problem.cost.dtype]
        done_enough = done >= min_iter or error >= previous
        if (error <= tol and done_enough) or not math.isfinite(error) or restarts == _MOST_RESTARTS:
            break
        if not prepared.two_level:
            relaxation = next_relaxation(relaxation, error / previous, count)
            if NEWTON_AFTER <= done < max_iter and error <= near and is_small(prepared):
                nearer = newton_step(prepared, Potentials(sweep.f, sweep.g))
                if nearer is not None:
                    current, relaxation, steps = nearer, 1.0, 0.0
                    continue
                near = error / 10
        stays = abs(error - previous) <= _STAYS * error and error > _ABOVE * tol
        stayed = stayed + 1 if stays else 0
        steps = min(max(1.0, 2 * steps), _FARTHEST) if stayed > _PATIENCE else 0.0
        if stayed >= _PATIENCE:
            # relaxed potentials swing about the way that they go
            relaxation = 1.0
        if steps > 1:
            step = Potentials(*(x - y for x, y in zip(current, before, strict=True)))
            kept = _Kept(sweep, step)
            current = Potentials(*(x + steps * y for x, y in zip(current, step, strict=True)))
    prepared.end_sweeps()
    return SinkhornResult(Potentials(sweep.f, sweep.g), error, done, error <= tol)


def next_relaxation(factor: float, reduction: float, count: int) -> float:
    """Fit the factor to an error that fell to a share ``reduction`` in ``count`` steps."""
    # Young's relation (rate + factor - 1)^2 = rate * factor^2 * plain_rate between the rate under a
    # factor and that of plain iterations gives plain_rate, and that the best factor 2 / (1 + sqrt(1
    # - plain_rate)).
    if reduction == 0:
        return factor
    if reduction >= 1:
        return 1.0
    rate = reduction ** (1 / count)
    if rate <= factor - 1:
        return 1 + _BACK_OFF * (factor - 1)
    plain = (rate + factor - 1) ** 2 / (rate * factor**2)
    return 2 / (1 + math.sqrt(max(1 - plain, _SMALLEST_GAP)))


def read(sweep: Sweep, problem: LinearProblem) -> tuple[bool, float]:
    """Tell whether a sweep is usable, and its column error, in one read of the device."""
    # Relaxed potentials settle to their constants slowly, at a rate of tau[0] * tau[1]. Constants
    # change the mass of the plan and nothing else, so the error is then taken without them.
    check = sweep.check
    if problem.tau != STRICT:
        b = problem.marginals.b
        change = (sweep.g - sweep.g_next).double() / problem.epsilon
        change = torch.where(b > 0, change - torch.dot(b.double(), change) / b.sum(), 0.0)
        error = torch.dot(b.double(), change.expm1().abs())
        check = torch.stack([check[0].to(error.dtype), error])
    ok, value = check.tolist()
    return bool(ok), value
