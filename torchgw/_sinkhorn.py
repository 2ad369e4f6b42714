"""Log-domain Sinkhorn: the reference softmin, the eager backend, and the one loop.

A backend supplies ``softmin``; damping, annealing and stopping are written once, here, so no two
backends can solve different problems. ``sweep`` (several full iterations) is an optional second
primitive that must equal the softmins it replaces; ``Sweep.ok`` tells when it does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchgw._cost import Cost, DenseCost
from torchgw._typing import Marginals, Potentials

__all__ = ["Backend", "EagerBackend", "SinkhornResult", "Sweep", "sinkhorn", "softmin"]

# Bytes of one (rows, m) working block: several fit the last-level cache of a CPU; on a GPU a block
# must be large enough to fill the device.
_BLOCK_BYTES = {"cpu": 8 * 2**20, "cuda": 256 * 2**20}
# A scaling sum is one at a fixed point. Below this a float32 sum has lost digits to underflow.
_SMALLEST_SUM = 1e-25
# Multiple of the machine epsilon below which a marginal error is noise.
_ROUNDING = 16
# Least distance of a rate to one that over-relaxation assumes: it bounds the factor by 1.98, where
# an overestimate still contracts.
_SMALLEST_GAP = 1e-6
# What is left of the factor's excess over one after a sweep that shows it to be too large.
_BACK_OFF = 0.97


class Sweep(NamedTuple):
    """Potentials after some full Sinkhorn iterations."""

    f: Tensor  # (n,) softmin of g: the rows of the plan (f, g) have mass a
    g: Tensor  # (m,)
    g_next: Tensor  # (m,) softmin of f; its distance to g measures the column error
    state: Potentials  # where the iteration goes on
    ok: Tensor  # () bool: no sum over- or underflowed


class Backend(Protocol):
    """What a way of computing must offer."""

    name: str

    def softmin(
        self, cost: Cost, log_weight: Tensor, potential: Tensor, epsilon: float, axis: int
    ) -> Tensor:
        """Compute the half-step defined by :func:`softmin`."""

    def sweep(
        self,
        cost: Cost,
        marginals: Marginals,
        start: Potentials,
        epsilon: float,
        count: int,
        relaxation: float = 1.0,
    ) -> Sweep:
        """Run ``count`` full iterations from ``start``, as :func:`softmin_sweep` defines them."""

    def apply(
        self,
        cost: Cost,
        marginals: Marginals,
        potentials: Potentials,
        epsilon: float,
        values: Tensor,
    ) -> Tensor:
        """Return plan @ values, shape (n, c)."""


def row_blocks(cost: Cost) -> Iterator[slice]:
    """Split the rows so that one (rows, m) block stays within the memory of its device."""
    n, m = cost.shape
    budget = _BLOCK_BYTES.get(cost.device.type, _BLOCK_BYTES["cpu"])
    height = max(1, budget // (m * cost.dtype.itemsize))
    return (slice(start, min(start + height, n)) for start in range(0, n, height))


def softmin(cost: Cost, log_weight: Tensor, potential: Tensor, epsilon: float, axis: int) -> Tensor:
    """Compute one Sinkhorn half-step, the definition every backend must equal.

    For ``axis=1`` (reduce over columns, as ``torch.sum`` counts axes)

        f_i = -epsilon * log sum_j exp(log_weight_j + (potential_j - C_ij) / epsilon)

    and for ``axis=0`` the same with the roles of i and j exchanged.

    Parameters
    ----------
    cost : DenseCost or FactoredCost, shape (n, m)
    log_weight : Tensor, shape (m,) for axis 1, (n,) for axis 0
        log b or log a; -inf for a weight of zero.
    potential : Tensor, same shape as ``log_weight``
        g or f, in cost units.
    epsilon : float
    axis : {0, 1}

    Returns
    -------
    Tensor, shape (n,) for axis 1, (m,) for axis 0, in cost units
    """
    if axis == 0:
        cost = cost.transpose()
    weighted = (potential + epsilon * log_weight).to(cost.dtype)
    zero = torch.zeros((), dtype=cost.dtype, device=cost.device)
    blocks = [
        cost.rows(rows)
        .exponent(zero.expand(rows.stop - rows.start), weighted, epsilon)
        .logsumexp(1)
        for rows in row_blocks(cost)
    ]
    return torch.cat(blocks).to(potential.dtype) * -epsilon


def softmin_sweep(
    backend: Backend,
    cost: Cost,
    marginals: Marginals,
    start: Potentials,
    epsilon: float,
    count: int,
    relaxation: float = 1.0,
) -> Sweep:
    """Run full iterations by two softmins each: the definition of a sweep, always safe.

    ``relaxation`` w moves each potential w times as far, f <- f + w (softmin(g) - f), successive
    over-relaxation. Relaxed potentials have no exact marginal, so a relaxed sweep ends with a plain
    iteration that is read off and not continued from.
    """
    f, g = start
    for _ in range(count - (relaxation == 1)):
        f = f + relaxation * (backend.softmin(cost, marginals.log_b, g, epsilon, axis=1) - f)
        g = g + relaxation * (backend.softmin(cost, marginals.log_a, f, epsilon, axis=0) - g)
    f_exact = backend.softmin(cost, marginals.log_b, g, epsilon, axis=1)
    g_next = backend.softmin(cost, marginals.log_a, f_exact, epsilon, axis=0)
    state = Potentials(f_exact, g_next) if relaxation == 1 else Potentials(f, g)
    return Sweep(f_exact, g, g_next, state, torch.isfinite(g_next).all())


class EagerBackend:
    """PyTorch operations as they are, on any device."""

    name = "eager"

    def softmin(
        self, cost: Cost, log_weight: Tensor, potential: Tensor, epsilon: float, axis: int
    ) -> Tensor:
        """Compute :func:`softmin`."""
        return softmin(cost, log_weight, potential, epsilon, axis)

    def sweep(
        self,
        cost: Cost,
        marginals: Marginals,
        start: Potentials,
        epsilon: float,
        count: int,
        relaxation: float = 1.0,
    ) -> Sweep:
        """Run full iterations with one exponential per entry, or one per sweep if C is stored.

        With warm potentials E_ij = exp((f_i + g_j - C_ij) / epsilon) needs no running maximum: an
        iteration divides f by the row sums of E diag(b) and g by the column sums of diag(a) E.
        """
        step = _dense_sweep if isinstance(cost, DenseCost) else _streamed_sweep
        return step(cost, marginals, start, epsilon, count, relaxation)

    def apply(
        self,
        cost: Cost,
        marginals: Marginals,
        potentials: Potentials,
        epsilon: float,
        values: Tensor,
    ) -> Tensor:
        """Return plan @ values block by block."""
        f, g = (part.to(cost.dtype) for part in potentials)
        weighted = (marginals.b[:, None] * values).to(cost.dtype)
        blocks = [
            cost.rows(rows).exponent(f[rows], g, epsilon).exp_() @ weighted
            for rows in row_blocks(cost)
        ]
        return torch.cat(blocks).to(values.dtype) * marginals.a[:, None]


def _dense_sweep(
    cost: Cost,
    marginals: Marginals,
    start: Potentials,
    epsilon: float,
    count: int,
    relaxation: float,
) -> Sweep:
    """Scale one stored kernel: two matrix-vector products per iteration."""
    dtype = cost.dtype
    a, b = (weight.to(dtype) for weight in marginals)
    kernel = cost.exponent(start.f.to(dtype), start.g.to(dtype), epsilon).exp_()
    # log-scalings: the potentials are f = start.f + epsilon u and g = start.g + epsilon v
    u, v = torch.zeros_like(a), torch.zeros_like(b)
    ok = torch.ones((), dtype=torch.bool, device=cost.device)
    for last in _iterations(count, relaxation):
        step = 1.0 if last else relaxation
        row_sum = torch.mv(kernel, b * v.exp())
        u_next = u - step * (row_sum.log() + u)
        column_sum = torch.mv(kernel.T, a * u_next.exp())
        v_next = v - step * (column_sum.log() + v)
        ok = ok & _usable(row_sum) & _usable(column_sum)
        if not last:
            u, v = u_next, v_next

    def potentials(row: Tensor, column: Tensor) -> Potentials:
        f = start.f + epsilon * row.to(start.f.dtype)
        return Potentials(f, start.g + epsilon * column.to(start.g.dtype))

    after = potentials(u_next, v_next)
    before = potentials(u, v)
    return Sweep(after.f, before.g, after.g, after if relaxation == 1 else before, ok)


def _streamed_sweep(
    cost: Cost,
    marginals: Marginals,
    start: Potentials,
    epsilon: float,
    count: int,
    relaxation: float,
) -> Sweep:
    """Recompute the kernel block by block: one exponential per entry and iteration."""
    dtype = cost.dtype
    a, b = (weight.to(dtype) for weight in marginals)
    f, g = start
    ok = torch.ones((), dtype=torch.bool, device=cost.device)
    for last in _iterations(count, relaxation):
        step = 1.0 if last else relaxation
        row_sum = torch.empty_like(a)
        column_sum = torch.zeros_like(b)
        for rows in row_blocks(cost):
            kernel = cost.rows(rows).exponent(f[rows].to(dtype), g.to(dtype), epsilon).exp_()
            row_sum[rows] = torch.mv(kernel, b)
            column_sum.addmv_(kernel.T, a[rows] * row_sum[rows].pow(-step))
        f_next = f - step * epsilon * row_sum.to(f.dtype).log()
        g_next = g - step * epsilon * column_sum.to(g.dtype).log()
        ok = ok & _usable(row_sum) & _usable(column_sum)
        if not last:
            f, g = f_next, g_next
    after = Potentials(f_next, g_next)
    state = after if relaxation == 1 else Potentials(f, g)
    return Sweep(after.f, g, after.g, state, ok)


def _iterations(count: int, relaxation: float) -> Iterator[bool]:
    """Say for each iteration of a sweep whether it is the last, plain one."""
    total = count if relaxation == 1 else count + 1
    return (remaining == 0 for remaining in reversed(range(total)))


def _usable(sums: Tensor) -> Tensor:
    """Whether every sum is finite and has lost nothing to underflow."""
    return (sums > _SMALLEST_SUM).all() & torch.isfinite(sums).all()


class SinkhornResult(NamedTuple):
    """Outcome of the inner loop."""

    potentials: Potentials  # rows of their plan have mass a
    error: float  # L1 distance of the column marginal to b
    n_iters: int
    converged: bool


def sinkhorn(
    cost: Cost,
    marginals: Marginals,
    start: Potentials,
    epsilon: float,
    *,
    backend: Backend,
    max_iter: int,
    tol: float,
    check_every: int = 10,
) -> SinkhornResult:
    """Run over-relaxed Sinkhorn iterations from warm potentials until the columns are met.

    Sinkhorn's iteration is block Gauss-Seidel on the dual, so over-relaxation turns a rate of
    1 - s into about 1 - 2 sqrt(s) once the factor fits the rate [1]_ [2]_. The factor follows the
    observed rate and falls back to one (plain Sinkhorn) whenever the error grows.

    The device is read from once every ``check_every`` iterations only.

    Parameters
    ----------
    cost : DenseCost or FactoredCost, shape (n, m)
    marginals : Marginals
    start : Potentials
        Warm start in cost units.
    epsilon : float
    backend : Backend
    max_iter : int
        Full iterations at most; one is a row and a column update.
    tol : float
        Stop when the L1 column error, sum_j |q_j - b_j|, is at most this, or at most what rounding
        in the dtype of the cost leaves of it.
    check_every : int

    Returns
    -------
    SinkhornResult
        ``error`` is non-finite when the cost or the potentials were.

    References
    ----------
    .. [1] D. Young. Iterative solution of large linear systems. Academic Press 1971.
    .. [2] A. Thibault, L. Chizat, C. Dossal, N. Papadakis. Overrelaxed Sinkhorn-Knopp algorithm for
       regularized optimal transport. Algorithms 2021.
    """
    current = start
    tol = max(tol, _ROUNDING * torch.finfo(cost.dtype).eps)
    done, error, relaxation = 0, float("inf"), 1.0
    while done < max_iter:
        count = min(check_every, max_iter - done)
        sweep = safe_sweep(backend, cost, marginals, current, epsilon, count, relaxation)
        done += count
        previous, error = error, float(column_error(sweep, marginals.b, epsilon))
        current = sweep.state
        if error <= tol or not math.isfinite(error):
            break
        relaxation = next_relaxation(relaxation, error / previous, count)
    return SinkhornResult(Potentials(sweep.f, sweep.g), error, done, error <= tol)


def safe_sweep(
    backend: Backend,
    cost: Cost,
    marginals: Marginals,
    start: Potentials,
    epsilon: float,
    count: int,
    relaxation: float,
) -> Sweep:
    """Run a sweep; where its sums over- or underflow, first stabilise, then go by softmins."""
    sweep = backend.sweep(cost, marginals, start, epsilon, count, relaxation)
    if bool(sweep.ok):
        return sweep
    # one exact half-step each way makes almost any start a stabiliser
    f = backend.softmin(cost, marginals.log_b, start.g, epsilon, axis=1)
    start = Potentials(f, backend.softmin(cost, marginals.log_a, f, epsilon, axis=0))
    sweep = backend.sweep(cost, marginals, start, epsilon, count)
    if bool(sweep.ok):
        return sweep
    return softmin_sweep(backend, cost, marginals, start, epsilon, count)


def next_relaxation(factor: float, reduction: float, count: int) -> float:
    """Return the factor that fits an error that fell to a share ``reduction`` in ``count`` steps.

    Young's relation (rate + factor - 1)^2 = rate * factor^2 * plain_rate between the rate under a
    factor and that of plain iterations gives plain_rate, and that the best factor
    2 / (1 + sqrt(1 - plain_rate)).
    """
    if reduction == 0:
        return factor
    if reduction >= 1:
        return 1.0
    rate = reduction ** (1 / count)
    if rate <= factor - 1:
        return 1 + _BACK_OFF * (factor - 1)
    plain = (rate + factor - 1) ** 2 / (rate * factor**2)
    return 2 / (1 + math.sqrt(max(1 - plain, _SMALLEST_GAP)))


def column_error(sweep: Sweep, b: Tensor, epsilon: float) -> Tensor:
    """Return sum_j |q_j - b_j| of the plan (f, g), without the plan.

    The column mass is q_j = b_j exp((g_j - g_next_j) / epsilon).
    """
    change = (sweep.g - sweep.g_next).double() / epsilon
    return torch.where(b > 0, b * change.expm1().abs(), 0.0).sum()
