"""Log-domain Sinkhorn: the reference softmin and the one loop.

A backend supplies ``softmin``; relaxation and stopping are written once, here, so no two backends
can solve different problems. A sweep (several full iterations) is a second primitive that must
equal the softmins it replaces, and whose ``ok`` tells when it cannot.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchgw._batch_sinkhorn import BatchPlans
from torchgw._cost import Cost, exp_
from torchgw._typing import Marginals, Potentials

__all__ = [
    "STRICT",
    "Backend",
    "SinkhornResult",
    "Sweep",
    "Sweeper",
    "checked",
    "row_blocks",
    "sinkhorn",
    "softmin",
    "softmin_sweep",
]

# Bytes of one (rows, m) working block. On a CPU it stays in cache from the product to the sums
# (2 MB took 2.2 ns per entry, 8 MB 4.1); on a GPU it must be large enough to fill the device.
_BLOCK_BYTES = {"cpu": 2 * 2**20, "cuda": 32 * 2**20}
# Increases of the error after which what is left of it is taken to be rounding.
_MOST_RESTARTS = 5
# Errors above which it is not: the error of a plan that has yet to change partners may stay the
# same for as long as potentials take to get there.
_MOST_ROUNDING = 0.05
# Multiple of the machine epsilon below which a marginal error is noise.
_ROUNDING = 16
# Least distance of a rate to one that over-relaxation assumes: it bounds the factor by 1.98, where
# an overestimate still contracts.
_SMALLEST_GAP = 1e-6
# Iterations between two looks at the error of a sweeper of two levels: each leaves about a tenth.
_TWO_LEVEL_CHECK = 1
# What is left of the factor's excess over one after a sweep that shows it to be too large.
_BACK_OFF = 0.97


# Factors of the half-steps of f and g under strict marginals.
STRICT = (1.0, 1.0)


class Sweep(NamedTuple):
    """Potentials after some full Sinkhorn iterations."""

    f: Tensor  # (n,) softmin of g: the rows of the plan (f, g) have mass a
    g: Tensor  # (m,)
    g_next: Tensor  # (m,) softmin of f; its distance to g measures the column error
    state: Potentials  # where the iteration goes on
    check: Tensor  # (2,) float64: one if no sum over- or underflowed, else zero; the column error


class Sweeper(Protocol):
    """Runs sweeps of one linear problem; what they share is prepared once.

    A sweeper of ``two_level`` also removes slow errors, between its iterations, by a small problem
    of its own. It needs no over-relaxation, and few iterations.
    """

    @property
    def two_level(self) -> bool:
        """Whether it does."""

    def __call__(self, start: Potentials, count: int, relaxation: float) -> Sweep:
        """Run ``count`` full iterations from ``start``, as :func:`softmin_sweep` defines them."""


class Backend(Protocol):
    """What a way of computing must offer."""

    name: str

    def softmin(
        self, cost: Cost, log_weight: Tensor, potential: Tensor, epsilon: float, axis: int
    ) -> Tensor:
        """Compute the half-step defined by :func:`softmin`."""

    def sweeper(
        self,
        cost: Cost,
        marginals: Marginals,
        start: Potentials,
        epsilon: float,
        *,
        tau: tuple[float, float] = STRICT,
    ) -> Sweeper:
        """Prepare sweeps that begin at or near ``start``, with half-steps tau * softmin."""

    def solve_batch(
        self,
        costs: Tensor,
        marginals: Marginals,
        g: Tensor,
        epsilon: Tensor,
        iterations: int,
        relaxation: float,
    ) -> BatchPlans:
        """Compute :func:`torchgw._batch_sinkhorn.solve_batch`."""

    def apply(
        self,
        cost: Cost,
        marginals: Marginals,
        potentials: Potentials,
        epsilon: float,
        values: Tensor,
    ) -> Tensor:
        """Return plan @ values, shape (n, c)."""

    def dense(
        self, cost: Cost, marginals: Marginals, potentials: Potentials, epsilon: float
    ) -> Tensor:
        """Return the plan as a matrix, shape (n, m)."""

    def transposed(self) -> Backend:
        """Return the backend for costs with source and target exchanged."""

    def topk(
        self, cost: Cost, marginals: Marginals, potentials: Potentials, epsilon: float, k: int
    ) -> tuple[Tensor, Tensor]:
        """Return the k largest entries of each row, values (n, k), and their columns (n, k).

        A row of weight zero has the columns of its conditional plan.
        """

    def draw(
        self,
        cost: Cost,
        marginals: Marginals,
        potentials: Potentials,
        epsilon: float,
        rows: Tensor,
        generator: torch.Generator,
    ) -> Tensor:
        """Draw one column from each of ``rows``, shape (s,); none may have weight zero."""


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
    blocks = []
    for rows in row_blocks(cost):
        exponent = cost.rows(rows).exponent(zero.expand(rows.stop - rows.start), weighted, epsilon)
        largest = exponent.amax(1)
        blocks.append(largest + exp_(exponent.sub_(largest[:, None])).sum(1).log())
    return torch.cat(blocks).to(potential.dtype) * -epsilon


def softmin_sweep(
    backend: Backend,
    cost: Cost,
    marginals: Marginals,
    start: Potentials,
    epsilon: float,
    count: int,
    relaxation: float = 1.0,
    tau: tuple[float, float] = STRICT,
) -> Sweep:
    """Run full iterations by two softmins each: the definition of a sweep, always safe.

    An iteration is f = tau[0] softmin(g), g = tau[1] softmin(f). With tau = rho / (rho + epsilon)
    below one its fixed point solves the problem whose marginal is held by rho KL (equation 15).

    ``relaxation`` w moves each potential w times as far, f <- f + w (softmin(g) - f), successive
    over-relaxation. Relaxed potentials have no exact marginal, so a relaxed sweep ends with a plain
    iteration that is read off and not continued from.
    """

    def half_f(g: Tensor) -> Tensor:
        return tau[0] * backend.softmin(cost, marginals.log_b, g, epsilon, axis=1)

    def half_g(f: Tensor) -> Tensor:
        return tau[1] * backend.softmin(cost, marginals.log_a, f, epsilon, axis=0)

    f, g = start
    for _ in range(count - (relaxation == 1)):
        f = f + relaxation * (half_f(g) - f)
        g = g + relaxation * (half_g(f) - g)
    f_exact = half_f(g)
    g_next = half_g(f_exact)
    state = Potentials(f_exact, g_next) if relaxation == 1 else Potentials(f, g)
    ok = torch.isfinite(g_next).all()
    return Sweep(f_exact, g, g_next, state, checked(ok, g, g_next, marginals.b, epsilon))


class SinkhornResult(NamedTuple):
    """Outcome of the inner loop."""

    potentials: Potentials  # rows of their plan have mass a
    error: float  # L1 distance of the column marginal to b
    n_iters: int
    converged: bool


def sinkhorn(
    cost: Cost,
    marginals: Marginals,
    start: Potentials | None,
    epsilon: float,
    *,
    backend: Backend,
    max_iter: int,
    tol: float,
    check_every: int = 10,
    min_iter: int = 0,
    tau: tuple[float, float] = STRICT,
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
    start : Potentials or None
        Warm start in cost units; ``None`` begins with an exact half-step each way.
    epsilon : float
    backend : Backend
    max_iter : int
        Full iterations at most; one is a row and a column update.
    tol : float
        Stop when the L1 column error, sum_j |q_j - b_j|, is at most this, or at most what rounding
        in the dtype of the cost leaves of it, or has risen five times.
    check_every : int
    min_iter : int
        Full iterations at least, unless the error rises.
    tau : tuple of float
        Factors of the half-steps of f and g, rho / (rho + epsilon) for a marginal held by rho KL.
        The error is then the distance to the fixed point, up to the mass of the plan.

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
    current = start or stabilise(
        cost, marginals, torch.zeros_like(marginals.b), epsilon, backend, tau
    )
    tol = max(tol, _ROUNDING * torch.finfo(cost.dtype).eps)
    sweeper = backend.sweeper(cost, marginals, current, epsilon, tau=tau)
    done, restarts, error, relaxation = 0, 0, float("inf"), 1.0
    while done < max_iter:
        every = _TWO_LEVEL_CHECK if sweeper.two_level else check_every
        count = min(every, max_iter - done)
        previous = error
        sweep = sweeper(current, count, relaxation)
        ok, error = read(sweep, marginals.b, epsilon, tau)
        if not ok:
            current = stabilise(cost, marginals, current.g, epsilon, backend, tau)
            # the old kernel goes before the new one comes: either may be as large as the cost
            del sweeper
            sweeper = backend.sweeper(cost, marginals, current, epsilon, tau=tau)
            sweep = sweeper(current, count, 1.0)
            ok, error = read(sweep, marginals.b, epsilon, tau)
        if not ok:
            sweep = softmin_sweep(backend, cost, marginals, current, epsilon, count, tau=tau)
            error = read(sweep, marginals.b, epsilon, tau)[1]
            del sweeper
            sweeper = backend.sweeper(cost, marginals, sweep.state, epsilon, tau=tau)
        done += count
        current = sweep.state
        restarts += previous <= error < _MOST_ROUNDING
        done_enough = done >= min_iter or error >= previous
        if (error <= tol and done_enough) or not math.isfinite(error) or restarts == _MOST_RESTARTS:
            break
        if not sweeper.two_level:
            relaxation = next_relaxation(relaxation, error / previous, count)
    return SinkhornResult(Potentials(sweep.f, sweep.g), error, done, error <= tol)


def stabilise(
    cost: Cost,
    marginals: Marginals,
    g: Tensor,
    epsilon: float,
    backend: Backend,
    tau: tuple[float, float] = STRICT,
) -> Potentials:
    """Return potentials after an exact half-step each way: sweeps can start from almost any."""
    f = tau[0] * backend.softmin(cost, marginals.log_b, g, epsilon, axis=1)
    return Potentials(f, tau[1] * backend.softmin(cost, marginals.log_a, f, epsilon, axis=0))


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


def checked(ok: Tensor, g: Tensor, g_next: Tensor, b: Tensor, epsilon: float) -> Tensor:
    """Return the check of a sweep: whether it is usable, and its column error.

    The column mass of the plan (f, g) is q_j = b_j exp((g_j - g_next_j) / epsilon), so the error
    sum_j |q_j - b_j| needs no plan.
    """
    change = (g - g_next).double().div_(epsilon)
    error = torch.dot(b.double(), change.expm1_().abs_())
    return torch.stack([ok.to(torch.float64), error])


def read(sweep: Sweep, b: Tensor, epsilon: float, tau: tuple[float, float]) -> tuple[bool, float]:
    """Return whether a sweep is usable, and its column error, in one read of the device.

    Relaxed potentials settle to their constants slowly, at a rate of tau[0] * tau[1]. Constants
    change the mass of the plan and nothing else, so the error is then taken without them.
    """
    check = sweep.check
    if tau != STRICT:
        change = (sweep.g - sweep.g_next).double() / epsilon
        change = torch.where(b > 0, change - torch.dot(b.double(), change) / b.sum(), 0.0)
        error = torch.dot(b.double(), change.expm1().abs())
        check = torch.stack([check[0].to(error.dtype), error])
    ok, value = check.tolist()
    return bool(ok), value
