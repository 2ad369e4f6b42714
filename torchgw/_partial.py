"""Sinkhorn's iteration for partial transport: marginals are bounds, and the mass is given."""

from __future__ import annotations

import torch
from torch import Tensor

from torchgw._cost import Cost
from torchgw._sinkhorn import Backend, SinkhornResult
from torchgw._typing import Marginals, Potentials

__all__ = ["level", "partial_sinkhorn"]


def partial_sinkhorn(
    cost: Cost,
    marginals: Marginals,
    start: Potentials | None,
    epsilon: float,
    *,
    backend: Backend,
    max_iter: int,
    tol: float,
    mass: float,
    check_every: int = 10,
) -> SinkhornResult:
    """Solve min <C, P> + epsilon KL(P | a x b) over P 1 <= a, P' 1 <= b, |P| = mass.

    Dual coordinate ascent in closed form, which is Dykstra's method with the projections of [1]_ in
    another order: P = a x b exp((f + g + level - C) / epsilon) with f, g <= 0, and

        f = min(0, softmin(g) - level)    with the level at which the rows carry the mass

    and the same for g. Each half-step moves the mass exactly, and meets one of the bounds exactly.

    Returns
    -------
    SinkhornResult
        ``potentials.f`` contains the level; ``error`` is the L1 distance between the columns'
        masses and those after their next half-step.

    References
    ----------
    .. [1] J.-D. Benamou, G. Carlier, M. Cuturi, L. Nenna, G. Peyre. Iterative Bregman projections
       for regularized transportation problems. SIAM Journal on Scientific Computing 2015.
    """
    a, b = marginals
    g = torch.zeros_like(b) if start is None else start.g.clamp_max(0.0)
    tol = max(tol, 16 * torch.finfo(cost.dtype).eps)
    done, error = 0, float("inf")
    while True:
        rows = backend.softmin(cost, marginals.log_b, g, epsilon, axis=1)
        height = level(rows, a, mass, epsilon)
        f = (rows - height).clamp_max(0.0)
        columns = backend.softmin(cost, marginals.log_a, f, epsilon, axis=0)
        after = level(columns, b, mass, epsilon)
        g_next = (columns - after).clamp_max(0.0)
        done += 1
        if done % check_every == 0 or done >= max_iter:
            moved = _masses(g + height, columns, b, epsilon)
            error = float((moved - _masses(g_next + after, columns, b, epsilon)).abs().sum())
            if error <= tol or done >= max_iter or not torch.isfinite(moved.sum()):
                break
        g = g_next
    return SinkhornResult(Potentials(f + height, g), error, done, error <= tol)


def _masses(potential: Tensor, softmin: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return the masses that a potential gives to points, given their half-step."""
    exponent = torch.where(weight > 0, (potential - softmin) / epsilon, 0.0)
    return weight * exponent.exp()


def level(softmin: Tensor, weight: Tensor, mass: float, epsilon: float) -> Tensor:
    """Return the level h with sum_i a_i min(1, exp((h - s_i) / epsilon)) = mass.

    Points with s_i <= h are full. In the order of s the level follows from how many are:
    exp(h / epsilon) = (mass - what the full ones carry) / sum over the others a_i exp(-s_i /
    epsilon), and the right number is the least whose level lies below the next point.

    Parameters
    ----------
    softmin : Tensor, shape (n,), cost units
    weight : Tensor, shape (n,)
        Of sum one.
    mass : float in (0, 1)
    epsilon : float

    Returns
    -------
    Tensor, shape ()
    """
    exponent = torch.where(weight > 0, softmin.double() / epsilon, torch.inf)
    ordered, order = exponent.sort()
    sizes = weight.double()[order]
    full = sizes.cumsum(0) - sizes
    terms = torch.where(sizes > 0, sizes.log() - ordered, -torch.inf)
    others = terms.flip(0).logcumsumexp(0).flip(0)
    heights = torch.where(full < mass, (mass - full).clamp_min(0).log() - others, torch.inf)
    # levels above their next point would fill it too
    fits = (heights <= ordered) & (full < mass)
    first = fits.to(torch.int8).argmax()
    return (heights[first] * epsilon).to(softmin.dtype)
