"""Log-domain Sinkhorn: the one loop.

Relaxation and stopping are written once, here, so no two backends can solve different problems. A
sweep (several full iterations) must equal the softmins it replaces, and its ``check`` tells when it
cannot.
"""

import math
import threading
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchgw._sinkhorn.contract import PreparedProblem, Sweep
from torchgw._sinkhorn.eager import SPARSE, entries_of
from torchgw._sinkhorn.exact import try_scipy
from torchgw._sinkhorn.problem import ROUNDINGS, STRICT, Cost, DenseCost, LinearProblem
from torchgw._tensors.cuda_graphs import Replayer
from torchgw._tensors.deadline import fitting, is_over, step_took
from torchgw._tensors.operations import EQUAL, Call, call_directly, clone, inverse
from torchgw._typing import Potentials

# Iterations after which a linear problem counts as slow, and the column error from which on a step
# may lead near its solution. [L443] [L464]
NEWTON_AFTER, NEWTON_BELOW = 20, 1e-3
# Up to so many points per side a step takes no longer than some ten iterations. [L443]
_MOST_POINTS = 256
# Ridge: the share of the mass of a column that is added to its second derivative. Between parts of
# a plan that share no mass the derivative is nothing but rounding. [L841]
RIDGE = 1e-11
# Largest change of a potential, over epsilon, for which quadratic convergence can be expected.
# [L443] [L464]
LARGEST_STEP = 10.0
# On a CPU plans with more and with at most so many points on a side get steps on the entries that
# matter. [L564]
_SHARP = 300, 4096
# Steps on one set of entries at most; how far they may lead, in units of epsilon; the shortest step
# that halving may come to; and the share of the tolerance that is added to the second derivative,
# in units of the mass of a column. What that leaves undone is this share of the length of a step.
# [L564]
_STEPS, FURTHEST, _SHORTEST, _BLUR = 8, 30.0, 1e-3, 0.01
# Steps on the entries of a plan take as long as so many iterations. [L564]
_SLOW = 200
# Whether a thread has a handle of cuSOLVER.
_thread = threading.local()


class NewtonSteps:
    """The steps of one linear problem, taken where they take less time than iterations."""

    def __init__(self, prepared: PreparedProblem, tol: float) -> None:
        self._prepared, self._tol, self._near = prepared, tol, NEWTON_BELOW
        self._small, self._sharp = is_small(prepared), may_be_sharp(prepared)

    def step(self, reached: Potentials, error: float, left: float) -> Potentials | None:
        """Go on by Newton's method, if so many iterations that are ``left`` take longer."""
        if not (self._small or (self._sharp and left > _SLOW)) or error > self._near:
            return None
        if self._small:
            nearer = newton_step(self._prepared, reached)
        else:
            nearer = newton_on_entries(self._prepared, reached, self._tol)
            self._near = error / 2
            if nearer is not None:
                # these steps lead beyond the potentials for which a kernel of few entries
                # is good
                self._prepared.end_sweeps()
        if nearer is None:
            self._near = error / 10
        return nearer


def is_small(prepared: PreparedProblem) -> bool:
    """Whether Newton steps are possible and may pay."""
    cost = prepared.problem.cost
    # a streamed cost must not lead to tables as large as the plan
    stored = isinstance(cost, DenseCost) and cost.dtype == torch.float64
    # a side that is free has the same potential throughout
    bound = min(prepared.problem.tau) > 0
    return _is_alone(prepared) and bound and stored and max(cost.shape) <= _MOST_POINTS


def _is_alone(prepared: PreparedProblem) -> bool:
    """Whether no other process has a part of the problem."""
    return getattr(prepared.backend, "ranks", None) is None


def newton_step(prepared: PreparedProblem, potentials: Potentials) -> Potentials | None:
    """Take a Newton step of the dual in g, at potentials whose plan has exact rows, if it is short.

    Where f follows g, the dual has the gradient b - q, with q the column sums of the plan P, and
    the Hessian -(diag(q) - P' diag(1 / a) P) / epsilon [1]_. A constant changes nothing; a step is
    orthogonal to q. The next iteration takes f from g. With penalties b is what the penalty asks of
    columns at g, which falls as g rises, and f moves by tau as far.

    References
    ----------
    .. [1] C. Brauer, C. Clason, D. Lorenz, B. Wirth. A Sinkhorn-Newton method for entropic optimal
       transport. arXiv:1710.06635.
    """
    problem, (f, g) = prepared.problem, potentials
    if g.is_cuda and problem.tau == STRICT:
        step, told = _recorded_step(prepared, potentials)
    else:
        step, told = _step(prepared, potentials)
    wrong, size = told.tolist()
    # NaN compares as false
    if wrong or not size <= LARGEST_STEP:
        return None
    return Potentials(f, g + problem.epsilon * step.to(g.dtype))


def _step(prepared: PreparedProblem, potentials: Potentials) -> tuple[Tensor, Tensor]:
    """Compute a step of g over epsilon, (m,); whether it has failed, and its size, (2,)."""
    problem = prepared.problem
    (a, b), tau = problem.marginals, problem.tau
    plan = prepared.dense(potentials).double()
    columns, strict, asked = plan.sum(0), tau == STRICT, b
    if not strict:
        asked = b * (potentials.g.double() * ((1 - 1 / tau[1]) / problem.epsilon)).exp()
    rows = a if strict else plan.sum(1)
    # a row of weight zero is zero, and a column of weight zero stays where it is
    shared = plan.T @ (plan * (tau[0] / rows.clamp_min(torch.finfo(a.dtype).tiny))[:, None])
    curvature = (torch.outer(columns, columns) if strict else 0) - shared
    curvature.diagonal().add_((1 + RIDGE) * columns).add_((1 / tau[1] - 1) * asked).add_(b == 0)
    factor, failed = torch.linalg.cholesky_ex(curvature)
    step = torch.cholesky_solve((asked - columns)[:, None], factor)[:, 0]
    return step, torch.stack([failed.double(), step.abs().amax()])


def _recorded_step(prepared: PreparedProblem, potentials: Potentials) -> tuple[Tensor, Tensor]:
    """Compute it by a CUDA graph, as forty launches take longer than what they run."""
    (cost, marginals, epsilon, _), backend = prepared.problem, prepared.backend
    units = torch.full((), epsilon, dtype=potentials.g.dtype, device=potentials.g.device)

    def step(cost: Cost, *given: Any) -> tuple[Tensor, Tensor]:
        # in units of epsilon, which a graph would take for a constant
        marginals, potentials, units = given
        problem = LinearProblem(cost.scaled(inverse(units)), marginals, 1.0)
        return _step(backend.prepare(problem), Potentials(*(part / units for part in potentials)))

    # a thread's first factors allocate, which no capture allows
    call: Call = call_directly
    if getattr(_thread, "has_factors", False):
        call = Replayer(units.device, ("newton", type(backend), cost.shape, potentials.g.dtype))
    _thread.has_factors = True
    found: tuple[Tensor, Tensor] = clone(call("step", step, cost, marginals, potentials, units))
    return found


def may_be_sharp(prepared: PreparedProblem) -> bool:
    """Whether Newton steps are possible on the entries that matter, if they are few."""
    cost, (least, most) = prepared.problem.cost, _SHARP
    here = cost.device.type == "cpu" and all(least < n <= most for n in cost.shape)
    return here and _is_alone(prepared) and prepared.problem.tau == STRICT


def newton_on_entries(
    prepared: PreparedProblem, potentials: Potentials, tol: float
) -> Potentials | None:
    """Take Newton steps on the entries of a plan that matter, until their columns are met."""
    # Between parts of a sharp plan that exchange little mass potentials have to move by some
    # epsilons, and Sinkhorn's iteration moves them by the share of the mass that is exchanged.
    # Steps are those of `newton_step`; each is doubled as long as the dual value rises.
    problem = prepared.problem
    found = entries_of(prepared.plan(potentials), EQUAL, SPARSE)
    if found is None:
        return None
    a, b = (weight.numpy() for weight in problem.marginals)
    plan = found.astype(np.float64) * b
    mass = plan.sum(1)
    used, moved, rises = b > 0, np.zeros_like(b), True
    for left in reversed(range(_STEPS)):
        # rows of mass one
        plan = plan.multiply(1 / np.where(mass > 0, mass, 1.0)[:, None]).tocsr()
        columns = plan.T @ a
        met = float(abs(columns - b).sum()) <= tol / 2
        if met or left == 0 or not rises or abs(moved).max() > FURTHEST:
            break
        curvature = torch.from_numpy((plan.T @ plan.multiply(a[:, None])).toarray()).neg_()
        # a column of weight zero stays where it is
        diagonal = np.where(used, (1 + _BLUR * tol) * columns, 1.0)
        curvature.diagonal().add_(torch.from_numpy(diagonal))
        factor, failed = torch.linalg.cholesky_ex(curvature)
        if failed:
            break
        missing = torch.from_numpy(np.where(used, b - columns, 0.0))
        step = torch.cholesky_solve(missing[:, None], factor)[:, 0].numpy()
        step, mass, rises = _longest(plan, a, b, step - b @ step / b.sum())
        plan, moved = plan.multiply(np.exp(step)), moved + step
    if not moved.any():
        return None
    g = potentials.g + problem.epsilon * torch.from_numpy(moved).to(potentials.g.dtype)
    return Potentials(prepared.softmin_rows(g), g)


def _longest(plan: Any, a: Any, b: Any, step: Any) -> tuple[Any, Any, bool]:
    """Double or halve a step by the dual value; return it, the mass of rows, whether it rises."""

    def rise(step: Any) -> tuple[float, Any]:
        mass = plan @ np.exp(step)
        return b @ step - a @ np.log(np.where(mass > 0, mass, 1.0)), mass

    step = step * min(1.0, LARGEST_STEP / abs(step).max())
    value, mass = rise(step)
    factor = 2.0 if value > 0 else 0.5
    while _SHORTEST < abs(factor * step).max() < FURTHEST:
        following, then = rise(factor * step)
        if value > 0 and not following > value:
            break
        step, value, mass = factor * step, following, then
    return (step, mass, True) if value > 0 else (np.zeros_like(step), plan.sum(1), False)


# An error stays if a sweep changes it by less than this share; it counts only above this multiple
# of the tolerance, which excludes what is left at the end. [L453]
_STAYS, _ABOVE = 0.02, 10
# An error has to stay for so many iterations before a larger epsilon is tried: the linear problems
# of most outer iterations end earlier. [L471]
_PATIENCE = 100
# How epsilon rises and falls then: in how many iterations up and down, of which the last have to be
# left; the error at which it falls; and the largest epsilon, as a multiple of the one asked for.
# [L471]
_RISING, _FALLING, _FALLS, _HIGHEST = 50, 400, 1e-4, 1e9
# Entries up to which a problem without entropy is solved in the time of some thousand iterations.
# [L1334]
_MOST_EXACT = 2**14


class SinkhornResult(NamedTuple):
    """Outcome of the inner loop."""

    potentials: Potentials  # rows of their plan have mass a
    error: float  # L1 distance of the column marginal to b
    n_iters: int
    converged: bool


# Iterations between two looks at the error. [L289]
CHECK_EVERY = 10


def attainable(tol: float, dtype: torch.dtype) -> float:
    """Raise a tolerance of marginal errors to what rounding leaves."""
    return max(tol, ROUNDINGS * torch.finfo(dtype).eps)


class Plateau:
    """Whether the error of a linear problem has stayed for long enough to begin elsewhere."""

    # While a point has yet to change partners the error stays, and each sweep moves the potentials
    # by a multiple of epsilon. Problems begin elsewhere once, or twice if from exact prices first.

    def __init__(self, tol: float, *, wanted: bool) -> None:
        self._tol, self._wanted, self._stayed = tol, wanted, 0

    def reached(self, before: float, error: float, count: int, most: int) -> bool:
        """Learn of the error after ``count`` iterations, where at most ``most`` are left."""
        stays = abs(error - before) <= _STAYS * error and error > _ABOVE * self._tol
        self._stayed = self._stayed + count if stays else 0
        found = self._wanted and self._stayed >= _PATIENCE and most >= _FALLING
        self._wanted = self._wanted and not found
        return found

    def again(self) -> None:
        """Let the error stay once more."""
        self._wanted, self._stayed = True, 0


def exact_prices(prepared: PreparedProblem) -> Potentials | None:
    """Solve a small problem without entropy, whose prices are near the potentials at small epsilon.

    ``None`` if it is not small, or cannot be solved.
    """
    a, b = (weights.cpu() for weights in prepared.problem.marginals)
    strict = prepared.problem.tau == STRICT
    if not (strict and is_small(prepared)) or len(a) * len(b) > _MOST_EXACT:
        return None
    rows, columns = a > 0, b > 0
    cost = prepared.problem.cost.dense().matrix.cpu()[rows][:, columns]
    found = try_scipy(a[rows].numpy(), b[columns].numpy(), cost.numpy())
    if isinstance(found, str):
        return None
    g = torch.zeros_like(b)
    g[columns] = torch.from_numpy(found.v).to(g)
    return prepared.half_steps(g.to(prepared.problem.marginals.b.device))


def from_larger_epsilon(
    prepared: PreparedProblem,
    start: Potentials,
    most: int,
    solve: Callable[..., SinkhornResult],
    factor: float,
) -> tuple[Potentials, int]:
    """Let epsilon rise until a problem is solved at once, and fall again; count iterations."""
    # Where epsilon is large points change partners soon, and nearly for those of the next problem:
    # B. Schmitzer. Stabilized sparse scaling algorithms for entropy regularized transport problems.
    # SIAM Journal on Scientific Computing 2019. ``solve`` is given ``max_iter`` and ``tol``.
    problem, used = prepared.problem, 0
    level, falling = 1, False
    while level > 0:
        above = factor**level
        # the penalty of a marginal, from which tau follows, is the same at every epsilon
        tau = (part / (part + (1 - part) * above) for part in problem.tau)
        at = problem._replace(epsilon=above * problem.epsilon, tau=(next(tau), next(tau)))
        budget = min(_FALLING if falling else _RISING, most - used)
        if budget <= 0:
            break
        found = solve(prepared.backend.prepare(at), start, max_iter=budget, tol=_FALLS)
        if not math.isfinite(found.error):
            break
        start, used = found.potentials, used + found.n_iters
        falling = falling or found.converged or above >= _HIGHEST
        level += -1 if falling else 1
    return start, used


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
    return math.inf if not 0 < reduction < 1 else count * math.log(excess) / -math.log(reduction)


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
