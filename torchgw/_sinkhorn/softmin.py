"""The half-step of Sinkhorn's iteration, as every backend must compute it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._sinkhorn.contract import STRICT, Backend, Sweep, Sweeper
from torchgw._sinkhorn.cost import Cost, exp_
from torchgw._typing import Marginals, Potentials

__all__ = ["LinearProblem", "SoftminSweeper", "checked", "row_blocks", "softmin", "softmin_sweep"]

# Bytes of one (rows, m) working block. On a CPU it stays in cache from the product to the sums
# (2 MB took 2.2 ns per entry, 8 MB 4.1); on a GPU it must be large enough to fill the device.
_BLOCK_BYTES = {"cpu": 2 * 2**20, "cuda": 32 * 2**20}


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


class LinearProblem(NamedTuple):
    """min <C, P> + epsilon KL(P | a x b), and what computes its half-steps."""

    cost: Cost  # (n, m)
    marginals: Marginals
    epsilon: float
    backend: Backend
    # Factors of the half-steps of f and g, rho / (rho + epsilon) for a marginal held by rho KL.
    tau: tuple[float, float] = STRICT

    def rows(self, g: Tensor) -> Tensor:
        """Return tau[0] * softmin of each row, (n,)."""
        log_b = self.marginals.log_b
        return self.tau[0] * self.backend.softmin(self.cost, log_b, g, self.epsilon, axis=1)

    def columns(self, f: Tensor) -> Tensor:
        """Return tau[1] * softmin of each column, (m,)."""
        log_a = self.marginals.log_a
        return self.tau[1] * self.backend.softmin(self.cost, log_a, f, self.epsilon, axis=0)

    def half_steps(self, g: Tensor) -> Potentials:
        """Return potentials after an exact half-step each way: sweeps can start from almost any."""
        f = self.rows(g)
        return Potentials(f, self.columns(f))

    def sweeper(self, start: Potentials) -> Sweeper:
        """Return the sweeps of the backend, prepared near ``start``."""
        return self.backend.sweeper(self.cost, self.marginals, start, self.epsilon, tau=self.tau)


def softmin_sweep(
    problem: LinearProblem, start: Potentials, count: int, relaxation: float = 1.0
) -> Sweep:
    """Run full iterations by two softmins each: the definition of a sweep, always safe.

    An iteration is f = problem.rows(g), g = problem.columns(f). With tau = rho / (rho + epsilon)
    below one its fixed point solves the problem whose marginal is held by rho KL (equation 15).

    ``relaxation`` w moves each potential w times as far, f <- f + w (softmin(g) - f), successive
    over-relaxation. Relaxed potentials have no exact marginal, so a relaxed sweep ends with a plain
    iteration that is read off and not continued from.
    """
    f, g = start
    for _ in range(count - (relaxation == 1)):
        f = f + relaxation * (problem.rows(g) - f)
        g = g + relaxation * (problem.columns(f) - g)
    exact = problem.half_steps(g)
    state = exact if relaxation == 1 else Potentials(f, g)
    ok = torch.isfinite(exact.g).all()
    check = checked(ok, g, exact.g, problem.marginals.b, problem.epsilon)
    return Sweep(exact.f, g, exact.g, state, check)


@dataclass(frozen=True)
class SoftminSweeper:
    """Sweeps as they are defined."""

    problem: LinearProblem
    two_level: bool = False

    def __call__(self, start: Potentials, count: int, relaxation: float) -> Sweep:
        """Run a sweep."""
        return softmin_sweep(self.problem, start, count, relaxation)


def checked(ok: Tensor, g: Tensor, g_next: Tensor, b: Tensor, epsilon: float) -> Tensor:
    """Return the check of a sweep: whether it is usable, and its column error.

    The column mass of the plan (f, g) is q_j = b_j exp((g_j - g_next_j) / epsilon), so the error
    sum_j |q_j - b_j| needs no plan.
    """
    change = (g - g_next).double().div_(epsilon)
    error = torch.dot(b.double(), change.expm1_().abs_())
    return torch.stack([ok.to(torch.float64), error])
