"""Dense float64 Sinkhorn and Gromov-Wasserstein, as the formulas say."""

from __future__ import annotations

import numpy as np
from scipy.special import logsumexp


def softmin(cost, weight, potential, epsilon, axis):
    """-epsilon log sum weight * exp((potential - cost) / epsilon) over one axis."""
    shape = (1, -1) if axis == 1 else (-1, 1)
    exponent = (potential.reshape(shape) - cost) / epsilon
    return -epsilon * logsumexp(
        exponent, axis=axis, b=np.broadcast_to(weight.reshape(shape), cost.shape)
    )


def plan(cost, a, b, f, g, epsilon):
    return a[:, None] * b * np.exp((f[:, None] + g - cost) / epsilon)


def sinkhorn(cost, a, b, epsilon, count, f=None, g=None):
    """Full iterations, a row and a column update each; returns f, g, and the next g."""
    g_next = np.zeros_like(b) if g is None else g
    for _ in range(count):
        g = g_next
        f = softmin(cost, b, g, epsilon, axis=1)
        g_next = softmin(cost, a, f, epsilon, axis=0)
    return f, g, g_next


def gw_cost(d_x, d_y, p):
    """L(P) of the square loss, from the marginals that P has."""
    row, column = p.sum(1), p.sum(0)
    return (d_x**2 @ row)[:, None] + d_y**2 @ column - 2 * d_x @ p @ d_y


def gw_value(d_x, d_y, p):
    """sum_ijkl (DX_ik - DY_jl)^2 P_ij P_kl."""
    return float((gw_cost(d_x, d_y, p) * p).sum())


def kl_loss(x, y):
    """x log(x / y) - x + y, with POT's offset in the logarithms."""
    return x * np.log((x + 1e-18) / (y + 1e-18)) - x + y


def absolute_loss(x, y):
    return np.abs(x - y)


def loss_cost(loss, d_x, d_y, p):
    """L(P) of any loss, as a sum over all quadruples."""
    return np.einsum("ijkl,kl->ij", loss(d_x[:, None, :, None], d_y[None, :, None, :]), p)


def entropic_gw(d_x, d_y, a, b, epsilon, alpha=1.0, linear=0.0, outer=200, inner=500):
    """Projected mirror descent from a x b, to numerical convergence."""
    p = np.outer(a, b)
    g = None
    for _ in range(outer):
        cost = 2 * alpha * gw_cost(d_x, d_y, p) + (1 - alpha) * linear
        f, g, _ = sinkhorn(cost, a, b, epsilon, inner, g=g)
        p = plan(cost, a, b, f, g, epsilon)
    return p
