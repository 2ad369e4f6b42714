"""Log-domain Sinkhorn: the one loop.

Relaxation and stopping are written once, here, so no two backends can solve different problems. A
sweep (several full iterations) must equal the softmins it replaces, and its ``check`` tells when it
cannot.
"""

import math
from functools import partial
from time import perf_counter

import torch

from torchgw._sinkhorn.contract import PreparedProblem, Sweep
from torchgw._sinkhorn.newton import (
    CHECK_EVERY,
    NEWTON_AFTER,
    NewtonSteps,
    Plateau,
    SinkhornResult,
    attainable,
    exact_prices,
    from_larger_epsilon,
)
from torchgw._sinkhorn.problem import STRICT, LinearProblem
from torchgw._tensors.deadline import fitting, is_over, step_took
from torchgw._typing import Potentials

# Increases of the error after which what is left of it is taken to be rounding. [L15] [L391]
MOST_RESTARTS = 5
# Errors above these are no rounding: the error of a plan that has yet to change partners may stay
# the same for as long as potentials take to get there. [L288]
MOST_ROUNDING = {torch.float32: 0.05, torch.float64: 1e-6}
# Least distance of a rate to one that over-relaxation assumes: it bounds the factor by 1.98, where
# an overestimate still contracts. [L6] [L391]
SMALLEST_GAP = 1e-6
# The factor by which epsilon rises where an error stays. [L471]
_RISE = 10.0
# Seconds that an iteration takes at most for each pair of points, before one was timed. A choice.
_SLOWEST = {"cpu": 1e-7, "cuda": 1e-10}
# What is left of the factor's excess over one after a sweep that shows it to be too large. [L6]
# [L391]
BACK_OFF = 0.97


def sinkhorn(
    prepared: PreparedProblem,
    start: Potentials | None,
    *,
    max_iter: int,
    tol: float,
    check_every: int = CHECK_EVERY,
    min_iter: int = 0,
    from_above: bool = True,
    falling: bool = False,
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
    # Where the error stays a small problem begins anew at the prices of the one without entropy; if
    # it stays again, and at once for others, the problem is solved from larger epsilons down, once,
    # unless ``from_above`` is false. Without a start it begins so if epsilon is ``falling``.
    problem = prepared.problem
    current, (rows, columns) = start, map(torch.zeros_like, problem.marginals)
    tol = attainable(tol, problem.cost.dtype)
    newton = NewtonSteps(prepared, tol)
    done, restarts, error, relaxation = 0, 0, float("inf"), 1.0
    plateau = Plateau(tol, wanted=from_above)
    each: float | None = None  # seconds of an iteration
    slowest = _SLOWEST[problem.cost.device.type] * math.prod(problem.cost.shape)
    before: tuple[Potentials, float] | None = None  # potentials and error before it began anew
    again = partial(sinkhorn, from_above=False)
    while done < max_iter:
        # each iteration of two levels leaves a tenth of the error
        every = 1 if prepared.two_level else check_every
        wanted = min(every, max_iter - done)
        count = fitting(max(2, wanted), each, slowest)
        # where there is time for one iteration only, none is made twice
        cut, count = count == 1, min(count, wanted)
        if current is None and cut and problem.tau == STRICT:
            current = Potentials(rows, columns)
        elif current is None:
            current = prepared.half_steps(columns)
            if falling:
                current, done = from_larger_epsilon(
                    prepared, current, max_iter - every, again, _RISE
                )
        previous, clock = error, perf_counter()
        sweep, error = _sweep(prepared, current, count, relaxation, safe=cut)
        each = (perf_counter() - clock) / count
        step_took(each)
        done += count
        current = sweep.state
        restarts += previous <= error < MOST_ROUNDING[problem.cost.dtype]
        met = error <= tol and (done >= min_iter or error >= previous)
        if met or not math.isfinite(error) or restarts == MOST_RESTARTS or is_over():
            break
        if not prepared.two_level:
            relaxation = next_relaxation(relaxation, error / previous, count)
            if NEWTON_AFTER <= done < max_iter:
                left = iterations_left(error / previous, error / tol, count)
                nearer = newton.step(Potentials(sweep.f, sweep.g), error, left)
                if nearer is not None:
                    current, relaxation = nearer, 1.0
                    continue
        most = max_iter - done - every
        if plateau.reached(previous, error, count, most):
            # the old kernel goes before the new one comes
            prepared.end_sweeps()
            prices, used = exact_prices(prepared) if before is None else None, 0
            if before is None or error < before[1]:
                before = Potentials(sweep.f, sweep.g), error
            if prices is not None:
                current = prices
                plateau.again()
            else:
                current, used = from_larger_epsilon(prepared, before[0], most, again, _RISE)
            done, error, relaxation = done + used, float("inf"), 1.0
    prepared.end_sweeps()
    if before is not None and error > before[1]:
        # too few iterations were left to come back to the epsilon asked for
        return SinkhornResult(*before, done, converged=False)
    return SinkhornResult(Potentials(sweep.f, sweep.g), error, done, error <= tol)


def _sweep(
    prepared: PreparedProblem, start: Potentials, count: int, relaxation: float, *, safe: bool
) -> tuple[Sweep, float]:
    """Run some iterations, without relaxation or a kernel if these fail, and read their error."""
    if not safe:
        sweep = prepared.sweep(start, count, relaxation)
        ok, error = read(sweep, prepared.problem)
        if ok:
            return sweep, error
        start = prepared.half_steps(start.g)
        # the old kernel goes before the new one comes: either may be as large as the cost
        prepared.end_sweeps()
        sweep = prepared.sweep(start, count, 1.0)
        ok, error = read(sweep, prepared.problem)
        if ok:
            return sweep, error
    sweep = prepared.safe_sweep(start, count)
    error = read(sweep, prepared.problem)[1]
    prepared.end_sweeps()
    return sweep, error


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
        return 1 + BACK_OFF * (factor - 1)
    plain = (rate + factor - 1) ** 2 / (rate * factor**2)
    return 2 / (1 + math.sqrt(max(1 - plain, SMALLEST_GAP)))


def iterations_left(reduction: float, excess: float, count: int) -> float:
    """Count the iterations to an error ``excess`` times smaller at the present rate."""
    if not 0 < reduction < 1:
        return math.inf
    return count * math.log(excess) / -math.log(reduction)


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
