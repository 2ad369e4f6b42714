"""The linear problem of partial transport: marginals are bounds, and the mass is given."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._boundary.arrays import FEW_NUMBERS
from torchgw._sinkhorn import loop
from torchgw._sinkhorn.annealing import Anderson
from torchgw._sinkhorn.contract import PreparedProblem
from torchgw._sinkhorn.eager import LARGEST_SCALING, EagerBackend
from torchgw._sinkhorn.problem import DenseCost
from torchgw._tensors.deadline import is_over
from torchgw._tensors.operations import NEWTON_STEPS, TINY
from torchgw._typing import Marginals, Potentials


def level(softmin: Any, weight: Any, mass: float, epsilon: float) -> Any:
    """Find the level h, (), with sum_i a_i min(1, exp((h - s_i) / epsilon)) = mass, in (0, 1)."""
    if isinstance(softmin, np.ndarray):
        return host_level(softmin, weight, mass, epsilon)
    if softmin.device.type == "cpu":
        with np.errstate(all="ignore"):
            height = host_level(softmin.numpy(), weight.numpy(), mass, epsilon)
        return torch.as_tensor(height, device=softmin.device)
    return device_level(softmin, weight, mass, epsilon)


def device_level(softmin: Tensor, weight: Tensor, mass: float, epsilon: float) -> Tensor:
    """Find the level without a look at the device."""
    # Points with s_i <= h are full. In the order of s the level follows from how many are: exp(h /
    # epsilon) = (mass - what the full ones carry) / sum over the others a_i exp(-s_i / epsilon),
    # and the right number is the least whose level lies below the next point.
    ordered, order = torch.where(weight > 0, softmin.double() / epsilon, torch.inf).sort()
    sizes = weight.double()[order]
    full = sizes.cumsum(0) - sizes
    terms = torch.where(sizes > 0, sizes.log() - ordered, -torch.inf)
    others = terms.flip(0).logcumsumexp(0).flip(0)
    heights = (mass - full).clamp_min(0).log() - others
    room = (full < mass) & (sizes > 0)
    # a level above its next point would fill that point too; the search always ends at the last
    # point with mass, also after rounding
    fits = (heights <= ordered) & room
    first = torch.where(fits.any(), fits.to(torch.int8).argmax(), room.sum() - 1)
    return (heights[first].minimum(ordered[first]) * epsilon).to(softmin.dtype)


def host_level(
    softmin: NDArray[Any], weight: NDArray[np.float64], mass: float, epsilon: float
) -> Any:
    """Find the same in NumPy."""
    exponent = softmin.astype(np.float64) / epsilon
    exponent[weight == 0] = np.inf
    order = exponent.argsort(kind="stable")
    ordered, sizes = exponent[order], weight[order]
    full = sizes.cumsum() - sizes
    # those without weight are last: log 0 - inf
    others = np.logaddexp.accumulate((np.log(sizes) - ordered)[::-1])[::-1]
    room = (full < mass) & (sizes > 0)
    heights = np.log(np.maximum(mass - full, 0)) - others
    fits = (heights <= ordered) & room
    first = fits.argmax() if fits.any() else room.sum() - 1
    return (min(heights[first], ordered[first]) * epsilon).astype(softmin.dtype)


Array = NDArray[np.float64]
Pair = tuple[Array, Array]
Mask = NDArray[np.bool_]

# The shares of a step that are tried, and how far potentials may move in one, in units of epsilon.
# [L1202]
_SHARES, _LONGEST = 0.3 ** np.arange(8), 3.0


class OnBounds(NamedTuple):
    """What Newton's method adds to potentials, in units of epsilon."""

    rows: Array  # to exact rows at the new columns
    columns: Array
    solved: bool
    far: bool  # whether it would have gone on from a plan made anew


class _Point(NamedTuple):
    """Where columns are scaled by exp(u): rows that carry the mass, and the dual value."""

    u: Array
    x: Array  # logarithms of what rows are scaled by
    full: Mask  # rows whose bound is met
    gain: float  # of the dual value, over epsilon


class _Columns(NamedTuple):
    """How the columns of a plan miss their masses."""

    masses: Array
    held: Mask  # those at g = 0, short of mass all the same
    room: Array  # up to g = 0, in units of epsilon
    missing: Array  # zero at columns that are held
    error: float


def newton_on_bounds(
    plan: Array, potentials: Pair, weights: Pair, mass: float, tol: float
) -> OnBounds:
    """Go on from a plan of exact rows by Newton's method on the dual.

    Potentials f and g are in units of epsilon; g is zero at columns below their bounds, and f has
    the level in it.
    """
    # Points at their bounds are known for a step: full rows follow the columns one by one, those
    # that are not full rise and fall together with the level, and columns with g = 0 that would go
    # on stay. Where a step changes which these are, the dual may rise on its way; it is shortened
    # until it does not: D. Bertsekas. Projected Newton methods for optimization problems with
    # simple constraints. SIAM Journal on Control and Optimization 1982.
    dual = _Dual(plan, potentials, weights, mass)
    here, solved, far = dual.at(np.zeros_like(potentials[1])), False, False
    for _ in range(NEWTON_STEPS):
        now = plan * np.exp(here.x)[:, None] * np.exp(here.u)
        columns = dual.columns(now, here.u)
        solved = columns.error <= tol / 2
        if solved:
            break
        there = dual.climb(here, now, columns)
        if not there.gain > here.gain:
            break
        here = there
        if far := bool(abs(here.u).max() > loop.FURTHEST):
            break
    return OnBounds(here.x, here.u, solved, far)


class _Dual:
    """The dual value of a partial problem, as its change from a plan of exact rows."""

    # All but the bounds is relative to that plan: potentials of thousands of epsilons would leave
    # rounding of the size of the last steps in the value.

    def __init__(self, plan: Array, potentials: Pair, weights: Pair, mass: float) -> None:
        (f, self.g), (self.a, self.b), self.mass, self.kernel = potentials, weights, mass, plan
        self.rows, self.used = self.a > 0, self.b > 0
        # the level is that of the highest row
        self.f = np.where(self.rows, f - f[self.rows].max(), 0.0)
        self.weighted = np.where(self.rows, self.a, 1.0)

    def at(self, u: Array) -> _Point:
        """Find the rows that carry the mass, and the value."""
        with np.errstate(divide="ignore"):
            own = np.log(self.weighted / np.where(self.rows, self.kernel @ np.exp(u), 1.0))
        rows = np.where(self.rows, self.f + own, np.inf)
        with np.errstate(all="ignore"):
            height = host_level(rows, self.a, self.mass, 1.0)
        full = rows < height
        x = np.where(full, own, height - self.f)
        gain = self.mass * height + self.a @ (x - height) + self.b @ u
        return _Point(u, np.where(self.rows, x, 0.0), full, float(gain))

    def columns(self, plan: Array, u: Array) -> _Columns:
        """Find the columns that are held, and what the others miss."""
        masses, room = plan.sum(0), -(self.g + u)
        short = np.log(np.where(self.used, self.b, 1.0) / np.maximum(masses, TINY))
        held = self.used & (short >= room)
        missing = np.where(self.used & ~held, self.b - masses, 0.0)
        error = float(abs(missing).sum() + masses[held] @ np.expm1(room[held]))
        return _Columns(masses, held, room, missing, error)

    def climb(self, here: _Point, now: Array, columns: _Columns) -> _Point:
        """Take a step, shortened until the dual does not fall."""
        direction = self._direction(now, here.full, columns)
        for share in _SHARES:
            there = self.at(np.minimum(here.u + share * direction, -self.g))
            if there.gain >= here.gain:
                break
        return there

    def _direction(self, now: Array, full: Mask, columns: _Columns) -> Array:
        """Solve Newton's equations for given full rows and held columns."""
        masses, held, room, missing, _ = columns
        parts, together = now[full], now[~full].sum(0)
        shared = parts.T @ (parts / np.maximum(parts.sum(1), TINY)[:, None])
        shared += np.outer(together, together) / max(together.sum(), TINY)
        curvature = np.diag((1 + loop.RIDGE) * masses) - shared
        # columns whose mass has underflowed wait for iterations
        free = self.used & ~held & (masses > 1e-30)
        direction = np.where(held, room, 0.0)
        wanted = (missing - curvature @ direction)[free]
        direction[free] = np.linalg.solve(curvature[np.ix_(free, free)], wanted)
        direction *= min(1.0, _LONGEST / max(abs(direction).max(), TINY))
        return direction


# After so many kernels whose potentials turn out too far away, softmins are computed without one.
# [L289]
_MOST_FAILURES = 3
# After so many iterations Newton's method goes on with a small problem; where it does not solve it,
# four times as many iterations come before it is tried again. [L1202] [L1245]
_SLOW, _PATIENCE = 50, 4
# Plans that Newton's method is begun from, one after another where potentials move far. [L1245]
_PLANS = 4
# The factor by which epsilon rises where an error stays. [L1245]
_RISE = 10**0.5


class _Round(NamedTuple):
    """Potentials and error after some iterations."""

    potentials: Potentials  # f with the level in it, and g
    g_next: Tensor
    error: Tensor  # () float64, L1 distance of the columns' masses to those after their half-step


def partial_sinkhorn(
    prepared: PreparedProblem,
    start: Potentials | None,
    *,
    mass: float,
    max_iter: int,
    tol: float,
    from_above: bool = True,
) -> loop.SinkhornResult:
    """Solve a linear problem over P 1 <= a, P' 1 <= b, |P| = mass."""
    # Dual coordinate ascent in closed form, which is Dykstra's method with the projections of J.-D.
    # Benamou, G. Carlier, M. Cuturi, L. Nenna, G. Peyre. Iterative Bregman projections for
    # regularized transportation problems. SIAM Journal on Scientific Computing 2015, in another
    # order: P = a x b exp((f + g + level - C) / epsilon) with f, g <= 0, and f = min(0, softmin(g)
    # - level) with the level at which the rows carry the mass, and the same for g. Each half-step
    # moves the mass exactly, and meets one of the bounds exactly. The potential f that comes back
    # contains the level; the error is the L1 distance between the columns' masses and those after
    # their next half-step.
    # Softmins of a stored cost scale one kernel for as long as the potentials stay near those that
    # it was made from. Where the error stays the problem is solved from larger epsilons down, once,
    # unless ``from_above`` is false.
    cost, marginals, epsilon, _ = prepared.problem
    if marginals.a.device.type != "cpu" and math.prod(cost.shape) <= FEW_NUMBERS:
        return _on_host(prepared, start, mass=mass, max_iter=max_iter, tol=tol)
    storable = isinstance(cost, DenseCost)
    g = torch.zeros_like(marginals.b) if start is None else start.g.clamp_max(0.0)
    # where operations of NumPy take a tenth. [L414]
    make_kernel = _HostKernel if g.device.type == "cpu" else _Kernel
    kernel: _Kernel | None = None
    if storable and start is not None:
        kernel = make_kernel(prepared, Potentials(start.f, g))
    tol = loop.attainable(tol, cost.dtype)
    acceleration, done, failures = Anderson(), 0, 0
    few = loop.is_small(prepared)
    wait = _SLOW if from_above else loop.CHECK_EVERY
    slow = wait if few else max_iter
    plateau, previous = loop.Plateau(tol, wanted=from_above), math.inf
    before: tuple[Potentials, float] | None = None  # potentials and error before epsilon rose

    while True:
        # one exact iteration is enough to make a kernel from
        count = min(1 if storable and kernel is None else loop.CHECK_EVERY, max_iter - done)
        found = _iterate(kernel or prepared, g, marginals, count, epsilon, mass)
        moved = torch.zeros_like(found.error)
        if kernel is not None:
            moved = _distance(found.potentials, kernel.origin, marginals) / epsilon
        error, scaling = torch.stack([found.error, moved]).tolist()
        if not scaling < LARGEST_SCALING:
            kernel, failures = None, failures + 1
            if failures == _MOST_FAILURES:
                storable = False
            continue
        done += count
        if error <= tol or done >= max_iter or not math.isfinite(error) or is_over():
            break
        most = max_iter - done - loop.CHECK_EVERY
        stays = plateau.reached(previous, error, count, most)
        previous = error
        if few and (stays or done >= slow):
            g, solved = _by_newton(prepared, found.potentials, mass, tol)
            stays &= not solved
            wait = wait if solved else _PATIENCE * wait
            slow = done + wait
        elif not stays:
            g = acceleration.next(g, found.g_next) if error < loop.NEWTON_BELOW else found.g_next
            g = g.clamp_max(0.0)
            if storable and kernel is None:
                kernel = make_kernel(prepared, found.potentials)
            continue
        acceleration, kernel = Anderson(), None
        if stays:
            before = found.potentials, error
            again = partial(partial_sinkhorn, mass=mass, from_above=False)
            nearer, used = loop.from_larger_epsilon(prepared, found.potentials, most, again, _RISE)
            g, done, previous = nearer.g, done + used, math.inf
            storable, failures = isinstance(cost, DenseCost), 0
            wait, slow = _SLOW, done + _SLOW
    if before is not None and error > before[1]:
        # too few iterations were left to come back to the epsilon asked for
        return loop.SinkhornResult(*before, done, converged=False)
    return loop.SinkhornResult(found.potentials, error, done, error <= tol)


def _by_newton(
    prepared: PreparedProblem, potentials: Potentials, mass: float, tol: float
) -> tuple[Tensor, bool]:
    """Go on from exact rows by Newton's method; return g, and whether the problem is solved."""
    epsilon, weights = prepared.problem.epsilon, prepared.problem.marginals
    a, b = (part.numpy() for part in weights)
    for _ in range(_PLANS):
        f, g = (part.numpy() / epsilon for part in potentials)
        plan = prepared.dense(potentials).double().numpy()
        steps = newton_on_bounds(plan, (f, g), (a, b), mass, tol)
        potentials = Potentials(
            *(
                part + epsilon * torch.from_numpy(change)
                for part, change in zip(potentials, steps[:2], strict=True)
            )
        )
        if not steps.far:
            break
    return potentials.g, steps.solved


def _on_host(
    prepared: PreparedProblem, start: Potentials | None, *, mass: float, max_iter: int, tol: float
) -> loop.SinkhornResult:
    """Solve a small problem of another device on the host."""
    cost, marginals = prepared.problem.cost.dense().matrix, prepared.problem.marginals
    weights = Marginals(*(part.cpu() for part in marginals))
    problem = prepared.problem._replace(cost=DenseCost(cost.cpu()), marginals=weights)
    begun = None if start is None else Potentials(*(part.cpu() for part in start))
    found = partial_sinkhorn(
        EagerBackend().prepare(problem), begun, mass=mass, max_iter=max_iter, tol=tol
    )
    potentials = Potentials(*(part.to(cost.device) for part in found.potentials))
    return found._replace(potentials=potentials)


def _iterate(
    softmins: "PreparedProblem | _Kernel",
    g: Tensor,
    marginals: Marginals,
    count: int,
    epsilon: float,
    mass: float,
) -> _Round:
    """Run some iterations from g, by the half-steps of a problem or by those of a kernel."""
    a: Any = marginals.a
    b: Any = marginals.b
    at: Any = g
    zero: Any = torch.zeros_like(g[:1])
    least: Any = torch.minimum
    if isinstance(softmins, _HostKernel):
        a, b, at, zero, least = a.numpy(), b.numpy(), at.numpy(), zero.numpy(), np.minimum
    with np.errstate(all="ignore"):
        for remaining in reversed(range(count)):
            rows = softmins.softmin_rows(at)
            height = level(rows, a, mass, epsilon)
            f = least(rows - height, zero) + height
            columns = softmins.softmin_columns(f)
            rise = level(columns, b, mass, epsilon)
            g_next = least(columns - rise, zero)
            if remaining:
                at = g_next
    f, g, g_next, columns, rise = (
        torch.as_tensor(part, device=marginals.b.device) for part in (f, at, g_next, columns, rise)
    )
    masses = [_masses(part, columns, marginals.b, epsilon) for part in (g, g_next + rise)]
    error = (masses[0] - masses[1]).abs().sum(dtype=torch.float64)
    return _Round(Potentials(f, g), g_next, error)


class _Kernel:
    """Softmins by one kernel E = exp((f + g - C) / epsilon), each a product with it."""

    # Sums of points with next to no mass underflow. Their softmins are then too small, but still
    # far above the level, which is all that matters.

    def __init__(self, prepared: PreparedProblem, origin: Potentials) -> None:
        cost, marginals, self.epsilon, _ = prepared.problem
        self.origin, self.dtype = origin, cost.dtype
        self.a, self.b = (self._array(weight.to(cost.dtype)) for weight in marginals)
        self.f, self.g = map(self._array, origin)
        self.kernel, self.tiny = prepared.kernel(origin), torch.finfo(cost.dtype).tiny

    def softmin_rows(self, g: Any) -> Any:
        return self._softmin(self.kernel.rows, self.b, g - self.g, self.f)

    def softmin_columns(self, f: Any) -> Any:
        return self._softmin(self.kernel.columns, self.a, f - self.f, self.g)

    def _array(self, numbers: Tensor) -> Any:
        return numbers

    def _softmin(
        self, product: Callable[[Tensor], Tensor], weight: Any, change: Any, origin: Any
    ) -> Any:
        scaling = torch.where(weight > 0, change / self.epsilon, 0.0).to(self.dtype).exp()
        sums = product(weight * scaling).clamp_min(self.tiny)
        return origin - self.epsilon * sums.to(origin.dtype).log()


class _HostKernel(_Kernel):
    """The same with arrays of NumPy, whose operations on a few numbers take a tenth."""

    def _array(self, numbers: Tensor) -> Any:
        return numbers.numpy()

    def _softmin(
        self, product: Callable[[Tensor], Tensor], weight: Any, change: Any, origin: Any
    ) -> Any:
        change = change / self.epsilon
        change[weight == 0] = 0.0
        scaling = np.exp(change.astype(weight.dtype, copy=False))
        sums = product(torch.from_numpy(weight * scaling)).numpy()
        sums = np.maximum(sums, self.tiny).astype(origin.dtype, copy=False)
        return origin - self.epsilon * np.log(sums)


def _distance(potentials: Potentials, origin: Potentials, marginals: Marginals) -> Tensor:
    """Find the largest change of a potential among points of positive weight, (), float64."""
    changes = [
        torch.where(weight > 0, part - other, 0.0).abs().amax().double()
        for part, other, weight in zip(potentials, origin, marginals, strict=True)
    ]
    return torch.stack(changes).amax()


def _masses(potential: Tensor, softmin: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Compute the masses that a potential gives to points, given their half-step."""
    return weight * torch.where(weight > 0, (potential - softmin) / epsilon, 0.0).exp()
