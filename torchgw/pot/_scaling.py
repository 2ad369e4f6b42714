"""Linear problems with entropy on stored costs: matrix scaling with warm potentials."""

from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp

from torchgw.pot._arrays import Array

# A scaling moves into the potentials if its logarithm exceeds this, so that products of scalings
# and kernel stay within the range of a float. [L388]
_LARGEST_LOGARITHM = 100.0


class Scaled(NamedTuple):
    """An entropic plan exp((f + g - C) / epsilon)."""

    plan: Array  # (n, m)
    f: Array  # (n,)
    g: Array  # (m,)
    converged: bool


def scale(
    cost: Array,
    epsilon: float,
    p: Array,
    q: Array,
    potentials: tuple[Array, Array],
    *,
    max_iter: int,
    tol: float,
) -> Scaled:
    """Run Sinkhorn's iterations [1] with positive weights, until rows err by ``tol`` in L2."""
    # The kernel contains the potentials found so far, so that scalings stay near one. Where they do
    # not, half-steps in logarithms take their place for a turn. [1] B. Schmitzer. Stabilized sparse
    # scaling algorithms for entropy regularized transport problems. SIAM Journal on Scientific
    # Computing 2019.
    f, g = potentials
    done = 0
    # a kernel that overflows is not used
    with np.errstate(over="ignore"):
        kernel = np.exp((f[:, None] + g - cost) / epsilon)
    while True:
        if not _usable(kernel):
            g = epsilon * (np.log(q) - logsumexp((f[:, None] - cost) / epsilon, axis=0))
            f = epsilon * (np.log(p) - logsumexp((g - cost) / epsilon, axis=1))
            kernel = np.exp((f[:, None] + g - cost) / epsilon)
        u, v = np.ones_like(p), np.ones_like(q)
        transposed = np.ascontiguousarray(kernel.T)
        inside, converged = True, False
        while inside and not converged and done < max_iter:
            done += 1
            new_v = q / (transposed @ u)
            rows = kernel @ new_v
            new_u = p / rows
            inside = _logarithm(new_u) < _LARGEST_LOGARITHM > _logarithm(new_v)
            if inside:
                error = float(np.linalg.norm(u * rows - p))
                converged = error <= tol
                u, v = new_u, new_v
        f, g = f + epsilon * np.log(u), g + epsilon * np.log(v)
        if converged or done >= max_iter:
            return Scaled(u[:, None] * kernel * v, f, g, converged)
        kernel = np.zeros_like(kernel)


def _usable(kernel: Array) -> bool:
    """Say whether sums over a kernel are positive and finite."""
    sums = kernel.sum(0).min(), kernel.sum(1).min()
    return bool(min(sums) > 1e-100 and np.isfinite(kernel.max()) and kernel.max() < 1e100)


def _logarithm(scaling: Array) -> float:
    """Compute the largest size of a logarithm; infinite where there is none."""
    low, high = float(scaling.min()), float(scaling.max())
    if not (low > 0 and np.isfinite(high)):
        return np.inf
    return float(max(-np.log(low), np.log(high)))


def scale_partial(
    cost: Array,
    epsilon: float,
    p: Array,
    q: Array,
    mass: float,
    potentials: tuple[Array, Array],
    *,
    max_iter: int,
    tol: float,
) -> Scaled:
    """Find the plan of a given mass whose marginals are at most p and q [1]."""
    # Block ascent on the dual: f and g, at most zero, and a constant for the mass, which is in the
    # plan that is returned.
    # [1] J.-D. Benamou, G. Carlier, M. Cuturi, L. Nenna, G. Peyre. Iterative Bregman projections
    # for regularized transportation problems. SIAM Journal on Scientific Computing 2015.
    f, g = potentials
    log_p, log_q = np.log(p), np.log(q)
    # the least cost is subtracted from the cost: it only changes the constant that belongs to the
    # mass
    kernel = np.exp((cost.min() - cost) / epsilon)
    if _usable(kernel):
        return _scale_bounds(kernel, epsilon, p, q, mass, potentials, max_iter=max_iter, tol=tol)
    exponent = -cost / epsilon
    f, g, level = f / epsilon, g / epsilon, 0.0
    converged = False
    for _ in range(max_iter):
        before = f
        f = np.minimum(0, log_p - level - logsumexp(exponent + g, axis=1))
        g = np.minimum(0, log_q - level - logsumexp(exponent + f[:, None], axis=0))
        total = exponent + f[:, None] + g
        level = np.log(mass) - logsumexp(total)
        converged = bool(abs(f - before).max() <= tol)
        if converged:
            break
    return Scaled(np.exp(total + level), epsilon * f, epsilon * g, converged)


def _scale_bounds(
    kernel: Array,
    epsilon: float,
    p: Array,
    q: Array,
    mass: float,
    potentials: tuple[Array, Array],
    *,
    max_iter: int,
    tol: float,
) -> Scaled:
    """Run the same iterations by products with the kernel."""
    u, v = (np.exp(potential / epsilon) for potential in potentials)
    level = mass / float(u @ kernel @ v)
    converged = False
    for _ in range(max_iter):
        before = u
        u = np.minimum(1, p / (level * (kernel @ v)))
        columns = u @ kernel
        v = np.minimum(1, q / (level * columns))
        level = mass / float(columns @ v)
        converged = bool(abs(u - before).max() <= tol)
        if converged:
            break
    tiny = np.finfo(np.float64).tiny
    f, g = (epsilon * np.log(np.maximum(scaling, tiny)) for scaling in (u, v))
    return Scaled(u[:, None] * kernel * (v * level), f, g, converged)
