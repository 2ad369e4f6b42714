"""Sinkhorn by PyTorch operations as they are, on any device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torchgw._sinkhorn.contract import Kernel, PreparedProblem, Sweep, Sweeper
from torchgw._sinkhorn.cost import DenseCost, exp_
from torchgw._sinkhorn.problem import LinearProblem
from torchgw._sinkhorn.softmin import checked, row_blocks
from torchgw._typing import Marginals, Potentials

__all__ = ["EagerBackend", "EagerProblem", "StoredSweeper", "usable_sums"]

# A scaling sum is one at a fixed point. Below this a float32 sum has lost digits to underflow.
# [L284]
_SMALLEST_SUM = 1e-25
# Largest log-scaling of a stored kernel. Entries of the plan that matter are then at least
# exp(-2 * 20) in the kernel, far from underflow. [L284]
_LARGEST_SCALING = 20.0


class EagerBackend:
    """PyTorch operations as they are, on any device."""

    name = "eager"

    @staticmethod
    def why_not(device: torch.device, dtype: torch.dtype) -> None:
        """Say why PyTorch cannot run here: it always can."""

    def prepare(self, problem: LinearProblem) -> PreparedProblem:
        """Prepare a linear problem, whose sweeps take one exponential per entry or none."""
        return EagerProblem(problem, self)


class EagerProblem(PreparedProblem):
    """A problem whose sweeps take one exponential per entry, or none if the cost is stored."""

    # With warm potentials E_ij = exp((f_i + g_j - C_ij) / epsilon) needs no running maximum: an
    # iteration divides f by the row sums of E diag(b) and g by the column sums of diag(a) E.

    def sweeper(self, start: Potentials) -> Sweeper:
        """Make sweeps that scale one kernel of a stored cost, or compute it anew from factors."""
        if isinstance(self.problem.cost, DenseCost):
            return StoredSweeper(self.problem, start, self.kernel(start))
        return _StreamedKernel(self.problem)


class StoredSweeper:
    """Scales one stored kernel: two matrix-vector products per iteration."""

    two_level = False

    def __init__(self, problem: LinearProblem, start: Potentials, kernel: Kernel) -> None:
        cost, self.marginals, self.epsilon, self.tau = problem
        self.origin, self.dtype = start, cost.dtype
        self.a, self.b = (weight.to(cost.dtype) for weight in self.marginals)
        self.unused = _unused(self.marginals, cost.dtype)
        self.kernel = kernel

    def __call__(self, start: Potentials, count: int, relaxation: float) -> Sweep:
        """Run a sweep on log-scalings: f = origin.f + epsilon u and g = origin.g + epsilon v."""
        u, v = (
            ((part - origin) / self.epsilon).to(self.dtype)
            for part, origin in zip(start, self.origin, strict=True)
        )
        # tau (origin + epsilon u) - origin, in units of epsilon
        shift = [
            ((tau - 1) / self.epsilon * part).to(self.dtype)
            for tau, part in zip(self.tau, self.origin, strict=True)
        ]
        ok = torch.ones((), dtype=torch.bool, device=u.device)
        for last in _iterations(count, relaxation):
            step = 1.0 if last else relaxation
            row_sum = self.kernel.rows(self.b * v.exp()) + self.unused.a
            u_next = u - step * (self.tau[0] * row_sum.log() - shift[0] + u)
            column_sum = self.kernel.columns(self.a * u_next.exp()) + self.unused.b
            v_next = v - step * (self.tau[1] * column_sum.log() - shift[1] + v)
            ok = ok & usable_sums(row_sum) & usable_sums(column_sum)
            if not last:
                u, v = u_next, v_next
        ok = ok & (u_next.abs().max() < _LARGEST_SCALING) & (v_next.abs().max() < _LARGEST_SCALING)
        after, before = self._potentials(u_next, v_next), self._potentials(u, v)
        check = checked(ok, before.g, after.g, self.marginals.b, self.epsilon)
        return Sweep(after.f, before.g, after.g, after if relaxation == 1 else before, check)

    def _potentials(self, u: Tensor, v: Tensor) -> Potentials:
        """Turn log-scalings into potentials."""
        f, g = self.origin
        return Potentials(f + self.epsilon * u.to(f.dtype), g + self.epsilon * v.to(g.dtype))


class _StreamedKernel:
    """Computes the kernel anew block by block: one exponential per entry and iteration."""

    two_level = False

    def __init__(self, problem: LinearProblem) -> None:
        self.cost, self.marginals, self.epsilon, self.tau = problem
        self.a, self.b = (weight.to(self.cost.dtype) for weight in self.marginals)
        self.unused = _unused(self.marginals, self.cost.dtype)

    def __call__(self, start: Potentials, count: int, relaxation: float) -> Sweep:
        """Run a sweep; each iteration starts a kernel of its own from the last potentials."""
        f, g = start
        ok = torch.ones((), dtype=torch.bool, device=f.device)
        for last in _iterations(count, relaxation):
            step = 1.0 if last else relaxation
            row_sum, column_sum = self._sums(f, g, step)
            f_next = self._next(f, row_sum, step, self.tau[0])
            g_next = self._next(g, column_sum, step, self.tau[1])
            ok = ok & usable_sums(row_sum) & usable_sums(column_sum)
            if not last:
                f, g = f_next, g_next
        after = Potentials(f_next, g_next)
        check = checked(ok, g, g_next, self.marginals.b, self.epsilon)
        return Sweep(f_next, g, g_next, after if relaxation == 1 else Potentials(f, g), check)

    def _next(self, potential: Tensor, sums: Tensor, step: float, tau: float) -> Tensor:
        """Move a potential towards tau * softmin, given the sums of its kernel."""
        moved = tau * self.epsilon * sums.to(potential.dtype).log() + (1 - tau) * potential
        return potential - step * moved

    def _sums(self, f: Tensor, g: Tensor, step: float) -> tuple[Tensor, Tensor]:
        """Compute the row sums of E diag(b), and the column sums of E after the rows' step."""
        pull = ((1 - self.tau[0]) / self.epsilon * f).to(self.cost.dtype)
        f, g = (part.to(self.cost.dtype) for part in self.marginals.mask(Potentials(f, g)))
        row_sum = torch.empty_like(self.a)
        column_sum = self.unused.b.clone()
        for rows in row_blocks(self.cost):
            kernel = exp_(self.cost.rows(rows).exponent(f[rows], g, self.epsilon))
            row_sum[rows] = torch.mv(kernel, self.b) + self.unused.a[rows]
            step_of_f = -step * (self.tau[0] * row_sum[rows].log() + pull[rows])
            column_sum.addmv_(kernel.T, self.a[rows] * step_of_f.exp())
        return row_sum, column_sum


def _unused(marginals: Marginals, dtype: torch.dtype) -> Marginals:
    """Make the sums of points that no mass uses: one where a weight is zero, so that they stay."""
    return Marginals(*((weight == 0).to(dtype) for weight in marginals))


def _iterations(count: int, relaxation: float) -> Iterator[bool]:
    """Say for each iteration of a sweep whether it is the last, plain one."""
    total = count if relaxation == 1 else count + 1
    return (remaining == 0 for remaining in reversed(range(total)))


def usable_sums(sums: Tensor) -> Tensor:
    """Whether every sum is finite and has lost nothing to underflow."""
    return (sums > _SMALLEST_SUM).all() & torch.isfinite(sums).all()
