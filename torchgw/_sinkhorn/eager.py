"""Sinkhorn by PyTorch operations as they are, on any device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torchgw._sinkhorn.contract import STRICT, Sweep, Sweeper
from torchgw._sinkhorn.cost import Cost, DenseCost, exp_
from torchgw._sinkhorn.softmin import checked, row_blocks, softmin
from torchgw._tensors.draws import sample_categories
from torchgw._typing import Marginals, Potentials

__all__ = ["EagerBackend", "plan_rows", "usable_sums"]

# A scaling sum is one at a fixed point. Below this a float32 sum has lost digits to underflow.
_SMALLEST_SUM = 1e-25
# Largest log-scaling of a stored kernel. Entries of the plan that matter are then at least
# exp(-2 * 20) in the kernel, far from underflow.
_LARGEST_SCALING = 20.0


class EagerBackend:
    """PyTorch operations as they are, on any device."""

    name = "eager"

    def transposed(self) -> EagerBackend:
        """Return this backend, to which all costs are alike."""
        return self

    def softmin(
        self, cost: Cost, log_weight: Tensor, potential: Tensor, epsilon: float, axis: int
    ) -> Tensor:
        """Compute :func:`torchgw._sinkhorn.softmin.softmin`."""
        return softmin(cost, log_weight, potential, epsilon, axis)

    def sweeper(
        self,
        cost: Cost,
        marginals: Marginals,
        start: Potentials,
        epsilon: float,
        *,
        tau: tuple[float, float] = STRICT,
    ) -> Sweeper:
        """Return sweeps with one exponential per entry and iteration, or none if C is stored.

        With warm potentials E_ij = exp((f_i + g_j - C_ij) / epsilon) needs no running maximum: an
        iteration divides f by the row sums of E diag(b) and g by the column sums of diag(a) E.
        """
        if isinstance(cost, DenseCost):
            return _StoredKernel(cost, marginals, start, epsilon, tau)
        return _StreamedKernel(cost, marginals, epsilon, tau)

    def apply(
        self,
        cost: Cost,
        marginals: Marginals,
        potentials: Potentials,
        epsilon: float,
        values: Tensor,
    ) -> Tensor:
        """Return plan @ values block by block."""
        f, g = (part.to(cost.dtype) for part in marginals.mask(potentials))
        weighted = (marginals.b[:, None] * values).to(cost.dtype)
        blocks = [
            exp_(cost.rows(rows).exponent(f[rows], g, epsilon)) @ weighted
            for rows in row_blocks(cost)
        ]
        return torch.cat(blocks).to(values.dtype) * marginals.a[:, None]

    def dense(
        self, cost: Cost, marginals: Marginals, potentials: Potentials, epsilon: float
    ) -> Tensor:
        """Return the plan as a matrix, made block by block."""
        plan = torch.empty(cost.shape, dtype=cost.dtype, device=cost.device)
        for rows in row_blocks(cost):
            plan[rows] = plan_rows(cost, marginals, potentials, epsilon, rows)
        return plan

    def topk(
        self, cost: Cost, marginals: Marginals, potentials: Potentials, epsilon: float, k: int
    ) -> tuple[Tensor, Tensor]:
        """Sort block by block, conditional rows."""
        ones = Marginals(torch.ones_like(marginals.a), marginals.b)
        best = [
            plan_rows(cost, ones, potentials, epsilon, rows).topk(k, dim=1)
            for rows in row_blocks(cost)
        ]
        values = torch.cat([part.values for part in best])
        values *= marginals.a.to(values.dtype)[:, None]
        return values, torch.cat([part.indices for part in best])

    def draw(
        self,
        cost: Cost,
        marginals: Marginals,
        potentials: Potentials,
        epsilon: float,
        rows: Tensor,
        generator: torch.Generator,
    ) -> Tensor:
        """Draw block by block by torch.multinomial."""
        height = max(1, next(row_blocks(cost)).stop)
        columns = [
            sample_categories(plan_rows(cost, marginals, potentials, epsilon, part), 1, generator)[
                :, 0
            ]
            for part in rows.split(height)
        ]
        return torch.cat(columns)


def plan_rows(
    cost: Cost,
    marginals: Marginals,
    potentials: Potentials,
    epsilon: float,
    index: Tensor | slice,
) -> Tensor:
    """Return rows of the plan, shape (s, m), a new tensor."""
    f, g = (part.to(cost.dtype) for part in marginals.mask(potentials))
    a, b = (part.to(cost.dtype) for part in marginals)
    kernel = exp_(cost.rows(index).exponent(f[index], g, epsilon))
    return kernel.mul_(a[index, None]).mul_(b)


class _StoredKernel:
    """Scales one stored kernel: two matrix-vector products per iteration."""

    two_level = False

    def __init__(
        self,
        cost: DenseCost,
        marginals: Marginals,
        start: Potentials,
        epsilon: float,
        tau: tuple[float, float],
    ) -> None:
        self.tau = tau
        self.origin = start
        self.epsilon = epsilon
        self.marginals = marginals
        self.a, self.b = (weight.to(cost.dtype) for weight in marginals)
        self.unused = _unused(marginals, cost.dtype)
        f, g = (part.to(cost.dtype) for part in marginals.mask(start))
        self.kernel = exp_(cost.exponent(f, g, epsilon))

    def __call__(self, start: Potentials, count: int, relaxation: float) -> Sweep:
        """Run a sweep on log-scalings: f = origin.f + epsilon u and g = origin.g + epsilon v."""
        u, v = (
            ((part - origin) / self.epsilon).to(self.kernel.dtype)
            for part, origin in zip(start, self.origin, strict=True)
        )
        # tau (origin + epsilon u) - origin, in units of epsilon
        shift = [
            ((tau - 1) / self.epsilon * part).to(self.kernel.dtype)
            for tau, part in zip(self.tau, self.origin, strict=True)
        ]
        ok = torch.ones((), dtype=torch.bool, device=u.device)
        for last in _iterations(count, relaxation):
            step = 1.0 if last else relaxation
            row_sum = torch.mv(self.kernel, self.b * v.exp()) + self.unused.a
            u_next = u - step * (self.tau[0] * row_sum.log() - shift[0] + u)
            column_sum = torch.mv(self.kernel.T, self.a * u_next.exp()) + self.unused.b
            v_next = v - step * (self.tau[1] * column_sum.log() - shift[1] + v)
            ok = ok & usable_sums(row_sum) & usable_sums(column_sum)
            if not last:
                u, v = u_next, v_next
        ok = ok & (u_next.abs().max() < _LARGEST_SCALING) & (v_next.abs().max() < _LARGEST_SCALING)
        after, before = self._potentials(u_next, v_next), self._potentials(u, v)
        check = checked(ok, before.g, after.g, self.marginals.b, self.epsilon)
        return Sweep(after.f, before.g, after.g, after if relaxation == 1 else before, check)

    def _potentials(self, u: Tensor, v: Tensor) -> Potentials:
        f, g = self.origin
        return Potentials(f + self.epsilon * u.to(f.dtype), g + self.epsilon * v.to(g.dtype))


class _StreamedKernel:
    """Recomputes the kernel block by block: one exponential per entry and iteration."""

    two_level = False

    def __init__(
        self, cost: Cost, marginals: Marginals, epsilon: float, tau: tuple[float, float]
    ) -> None:
        self.tau = tau
        self.cost = cost
        self.epsilon = epsilon
        self.marginals = marginals
        self.a, self.b = (weight.to(cost.dtype) for weight in marginals)
        self.unused = _unused(marginals, cost.dtype)

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
        """Return a potential moved towards tau * softmin, given the sums of its kernel."""
        moved = tau * self.epsilon * sums.to(potential.dtype).log() + (1 - tau) * potential
        return potential - step * moved

    def _sums(self, f: Tensor, g: Tensor, step: float) -> tuple[Tensor, Tensor]:
        """Return the row sums of E diag(b), and the column sums of E after the rows' step."""
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
    """Return one where a weight is zero: the sum of a point that no mass uses, which stays put."""
    return Marginals(*((weight == 0).to(dtype) for weight in marginals))


def _iterations(count: int, relaxation: float) -> Iterator[bool]:
    """Say for each iteration of a sweep whether it is the last, plain one."""
    total = count if relaxation == 1 else count + 1
    return (remaining == 0 for remaining in reversed(range(total)))


def usable_sums(sums: Tensor) -> Tensor:
    """Whether every sum is finite and has lost nothing to underflow."""
    return (sums > _SMALLEST_SUM).all() & torch.isfinite(sums).all()
