"""Mirror descent with entropy on dense problems, from the start that is given."""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.special import logsumexp

from torchgw.pot._arrays import Array
from torchgw.pot._scaling import scale, scale_partial

# A linear problem is solved to this error of its marginals, as a share of the last change of the
# plan. [L388]
_INEXACT = 1e-3
# Plans alternate if one step changes them so many times as much as two steps do. Steps that shrink
# by less than 0.01% a turn would look the same, and would need countless turns to end. [L1060]
_ALTERNATES = 1e4


class Stop(NamedTuple):
    """When a loop over plans ends: by the Frobenius norm of a change, or after some iterations."""

    max_iter: int
    tol: float
    verbose: bool = False


class Mirrored(NamedTuple):
    """The end of mirror descent."""

    plan: Array  # (n, m)
    errors: list[float]  # change of the plan by each iteration
    potentials: tuple[Array, Array] | None
    converged: bool
    alternates: bool = False  # between two plans; that of the last of `max_iter` steps is given


Slope = Callable[[Array], Array]  # the derivative of the objective at a plan


def balanced(
    slope: Slope,
    start: Array,
    p: Array,
    q: Array,
    epsilon: float,
    stop: Stop,
    *,
    proximal: bool,
    inner_max_iter: int,
    inner_tol: float,
) -> Mirrored:
    """Alternate the gradient and Sinkhorn's iterations (Peyre, Cuturi, Solomon, ICML 2016)."""
    potentials = np.zeros(len(p)), np.zeros(len(q))
    logarithm = _log(start)

    def step(plan: Array, error: float) -> Array:
        nonlocal logarithm, potentials
        cost = slope(plan)
        if proximal:
            cost = cost - epsilon * logarithm
        tol = max(inner_tol, _INEXACT * error)
        found = scale(cost, epsilon, p, q, potentials, max_iter=inner_max_iter, tol=tol)
        potentials = found.f, found.g
        if proximal:
            logarithm = (found.f[:, None] + found.g - cost) / epsilon
            potentials = np.zeros(len(p)), np.zeros(len(q))
        return found.plan

    result = _iterate(step, start, stop)
    return result._replace(potentials=potentials)


def partial(
    slope: Slope, start: Array, p: Array, q: Array, mass: float, epsilon: float, stop: Stop
) -> Mirrored:
    """Alternate the gradient and the linear problem with bounds in place of marginals."""
    potentials = np.zeros(len(p)), np.zeros(len(q))

    def step(plan: Array, error: float) -> Array:
        nonlocal potentials
        limits: Any = {"max_iter": 1000, "tol": 1e-10}
        found = scale_partial(slope(plan), epsilon, p, q, mass, potentials, **limits)
        potentials = found.f, found.g
        return found.plan

    return _iterate(step, start, stop)


def semirelaxed(slope: Slope, start: Array, p: Array, epsilon: float, stop: Stop) -> Mirrored:
    """Take proximal steps with free columns, each in closed form."""
    logarithm, log_p = _log(start), np.log(p)

    def step(plan: Array, error: float) -> Array:
        nonlocal logarithm
        logarithm = logarithm - slope(plan) / epsilon
        logarithm += (log_p - logsumexp(logarithm, axis=1))[:, None]
        return np.exp(logarithm)

    return _iterate(step, start, stop)


def alternate(
    slope: Slope, start: Array, p: Array, q: Array, epsilon: float, stop: Stop
) -> Mirrored:
    """Take Bregman steps onto rows and columns by turns (BAPG; J. Li et al., ICLR 2023)."""
    logarithm = _log(start)
    log_p, log_q = np.log(p), np.log(q)

    def step(plan: Array, error: float) -> Array:
        nonlocal logarithm
        logarithm = logarithm - slope(plan) / epsilon
        logarithm += (log_p - logsumexp(logarithm, axis=1))[:, None]
        logarithm = logarithm - slope(np.exp(logarithm)) / epsilon
        logarithm += log_q - logsumexp(logarithm, axis=0)
        return np.exp(logarithm)

    return _iterate(step, start, stop)


def _iterate(step: Callable[[Array, float], Array], plan: Array, stop: Stop) -> Mirrored:
    """Repeat a step until the plan stays; a step gets the last change, at first zero."""
    errors: list[float] = []
    converged = alternates = False
    before = plan
    for left in reversed(range(int(stop.max_iter))):
        older, before, plan = before, plan, step(plan, errors[-1] if errors else 0.0)
        errors.append(float(np.linalg.norm(plan - before)))
        if stop.verbose:
            sys.stderr.write(f"{len(errors) - 1:5d}|{errors[-1]:8e}\n")
        converged = errors[-1] <= stop.tol
        twice = float(np.linalg.norm(plan - older))
        alternates = twice <= stop.tol and _ALTERNATES * twice <= errors[-1]
        if converged or (alternates and left % 2 == 0):
            break
    return Mirrored(plan, errors, None, converged, alternates and not converged)


def _log(plan: Array) -> Array:
    """Take the logarithm of a plan, of which entries may be zero."""
    with np.errstate(divide="ignore"):
        return np.log(plan)
