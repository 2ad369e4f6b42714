"""Sinkhorn by PyTorch operations as they are, of one problem, or of many small ones of a shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import scipy
import torch
from torch import Tensor

from torchgw._sinkhorn.contract import Kernel, PreparedProblem, Sweep, Sweeper
from torchgw._sinkhorn.problem import (
    LEAST_EXPONENTS,
    ROUNDINGS,
    STRICT,
    DenseCost,
    EntropicPlan,
    LinearProblem,
    checked,
    exp_,
    row_blocks,
)
from torchgw._tensors.operations import exponentiate_
from torchgw._typing import Marginals, Potentials

# Factor of a scaling up to which over-relaxation is applied. [L107]
RELAXED_FACTOR = 2.0
# Scalings and their sums are kept between these, so that float32 neither over- nor underflows.
# [L283]
SMALLEST, LARGEST = 1e-30, 1e30
# Smaller exponents are raised to this one. [L283]
LEAST_EXPONENT = LEAST_EXPONENTS[torch.float32]
# Binary digits of a factor of e.
_DIGITS = math.log2(math.e)
# Entries of a kernel up to which a CPU iterates by NumPy. [L405, L463, L1383]
_HOST_ENTRIES = 2**16


class BatchPlans(NamedTuple):
    """Plans of B problems, and the potentials that made them."""

    plans: Tensor  # (B, s, t)
    g: Tensor  # (B, 1, t) cost units


# Costs, marginals, g, epsilon, iterations and relaxation, as :func:`solve_batch` takes them.
BatchSolver = Callable[[Tensor, Marginals, Tensor, Tensor, int, float], BatchPlans]


def solve_batch(
    costs: Tensor,
    marginals: Marginals,
    g: Tensor,
    epsilon: Tensor,
    iterations: int,
    relaxation: float,
) -> BatchPlans:
    """Run over-relaxed Sinkhorn iterations of many problems (B, s, t), each at its own epsilon."""
    # The marginals (s,) and (t,) are positive; g (B, 1, t) is where to start, in cost units; a
    # relaxation of at least 1 says how many times as far each scaling moves, in logarithms.
    # Rows are shifted by their largest exponent, so that no row underflows, and over-relaxation is
    # bounded, so that none overflows. A plain iteration comes last. Nothing is read from the
    # device.
    if costs.device.type == "cpu" and costs.numel() <= _HOST_ENTRIES * len(costs):
        return _solve_on_host(costs, marginals, g, epsilon, iterations, relaxation - 1)
    a, b = marginals.a.to(costs.dtype)[:, None], marginals.b.to(costs.dtype)
    epsilon = epsilon[:, None, None].to(costs.dtype)
    exponent = (g - costs).div_(epsilon)
    exponent = exponent.sub_(exponent.amax(-1, keepdim=True)).clamp_(min=LEAST_EXPONENT)
    kernel = exponentiate_(exponent)
    v = b.expand(len(costs), 1, -1)
    u = a / (v @ kernel.mT).mT
    for _ in range(iterations):
        v = _relax(v, b / (u.mT @ kernel), relaxation - 1)
        u = _relax(u, a / (v @ kernel.mT).mT, relaxation - 1)
    v = (b / (u.mT @ kernel)).clamp_(SMALLEST, LARGEST)
    u = a / (v @ kernel.mT).mT
    return BatchPlans(kernel.mul_(u).mul_(v), g + epsilon * (v / b).log())


# kernels of BLAS compute lanes beyond the edge of small matrices, whose flags NumPy warns of
@np.errstate(invalid="ignore")
def _solve_on_host(
    costs: Tensor, marginals: Marginals, g: Tensor, epsilon: Tensor, iterations: int, excess: float
) -> BatchPlans:
    """Do the same by NumPy, whose calls on few points take a fraction of PyTorch's."""
    start, kind = g.numpy(), g.numpy().dtype
    rows, columns = (weight.numpy().astype(kind, copy=False) for weight in marginals)
    unit = epsilon.numpy().astype(kind, copy=False)[:, None, None]
    # passes over all entries are left to PyTorch, by powers of two as in `exponentiate_`
    kernel = (g - costs).mul_(torch.from_numpy(_DIGITS / unit))
    kernel = kernel.sub_(kernel.amax(-1, keepdim=True)).clamp_(min=LEAST_EXPONENT * _DIGITS)
    forth = kernel.exp2_().numpy()  # (B, s, t)
    back = forth.swapaxes(1, 2)
    v = np.empty((len(forth), 1, len(columns)), kind)
    v[:] = columns
    u = rows / (v @ back)
    # v and u: their weights, and the kernel that leads to them
    sides = [
        (old, np.empty_like(old), np.empty_like(old), weight, table, _bounds(old.shape, kind))
        for old, weight, table in ((v, columns, forth), (u, rows, back))
    ]
    other = u
    for _ in range(iterations):
        for old, new, factor, weight, table, (least, most, smallest, largest) in sides:
            np.divide(weight, np.matmul(other, table, out=new), out=new)
            if excess:
                np.divide(new, old, out=factor)
                np.maximum(factor, least, out=factor)
                np.minimum(factor, most, out=factor)
                # a square root, which takes a third of the time of a power, where that is one
                factor **= excess
                np.multiply(new, factor, out=new)
            np.minimum(np.maximum(new, smallest, out=old), largest, out=old)
            other = old
    v = np.minimum(np.maximum(columns / (u @ forth), SMALLEST), LARGEST)
    kernel.mul_(torch.from_numpy(rows / (v @ back)).mT).mul_(torch.from_numpy(v))
    moved = unit * torch.from_numpy(v / columns).log_().numpy()
    return BatchPlans(kernel, torch.from_numpy(start + moved))


@lru_cache(maxsize=8)
def _bounds(shape: tuple[int, ...], kind: Any) -> list[Any]:
    """Make arrays of the bounds: NumPy takes longer to read a number."""
    bounds = (1 / RELAXED_FACTOR, RELAXED_FACTOR, SMALLEST, LARGEST)
    return [np.full(shape, bound, kind) for bound in bounds]


def _relax(old: Tensor, new: Tensor, excess: float) -> Tensor:
    """Multiply by (new / old)^(1 + excess), the excess factor bounded."""
    if not excess:
        return new.clamp_(SMALLEST, LARGEST)
    bounded = (new / old).clamp_(1 / RELAXED_FACTOR, RELAXED_FACTOR)
    return (new * bounded.pow_(excess)).clamp_(SMALLEST, LARGEST)


# Sums of a scaled kernel are one at a fixed point. Below this number underflow has cost float32
# digits. [L284]
_SMALLEST_SUM = 1e-25
# Largest log-scaling of a stored kernel. Entries of the plan that matter are then at least
# exp(-2 * 20) in the kernel, far from underflow. [L236, L284]
LARGEST_SCALING = 20.0
# Share of the entries of a kernel, on a CPU, up to which only those that matter are kept; numbers
# of entries, from and to, for which that is tried; and how far both scalings may rise together, in
# logarithms, before other entries may matter. [L403, L564]
SPARSE = 0.1
_SPARSE_ENTRIES = (250_000, 100_000_000)
_SLACK = 6.0


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
        """Make sweeps that scale one kernel, if it is small, or compute it anew from factors."""
        stored = isinstance(self.problem.cost, DenseCost)
        again = stored and self.left_entries
        sparse = None if again else sparse_sweeper(self.problem, start)
        self.left_entries = sparse is not None
        if sparse is not None:
            return sparse
        if stored:
            return StoredSweeper(self.problem, start, self.kernel(start))
        return _StreamedKernel(self.problem)


class StoredSweeper:
    """Scales one kernel that is kept: two matrix-vector products per iteration."""

    two_level = False

    def __init__(self, problem: LinearProblem, start: Potentials, kernel: Kernel) -> None:
        cost, self.marginals, self.epsilon, self.tau = problem
        self.kernel, self.dtype, self.precise = kernel, cost.dtype, start.f.dtype
        # an operation of PyTorch on a few numbers takes ten times as long as one of NumPy. [L413]
        self.on_host = cost.device.type == "cpu"
        self.origin, weights = ([*map(self._array, pair)] for pair in (start, self.marginals))
        self.a, self.b = (self._as(self.dtype, weight) for weight in weights)
        self.unused = [
            self._array(part.to(self.dtype)) if bool(part.any()) else None
            for part in self.marginals.unused(self.dtype)
        ]

    def __call__(self, start: Potentials, count: int, relaxation: float) -> Sweep:
        """Run a sweep on log-scalings: f = origin.f + epsilon u and g = origin.g + epsilon v."""
        library: Any = np if self.on_host else torch
        exp, minimum, maximum = library.exp, library.minimum, library.maximum
        u, v = (
            self._as(self.dtype, (self._array(part) - origin) / self.epsilon)
            for part, origin in zip(start, self.origin, strict=True)
        )
        # tau (origin + epsilon u) - origin, in units of epsilon
        shift = [
            None if tau == 1 else self._as(self.dtype, (tau - 1) / self.epsilon * part)
            for tau, part in zip(self.tau, self.origin, strict=True)
        ]

        def following(side: int, now: Any, sums: Any, step: float) -> Any:
            change = library.log(sums)
            if shift[side] is not None:
                change = self.tau[side] * change - shift[side]
            return -change if step == 1 else now - step * (change + now)

        least: list[Any] = []
        slack = self.kernel.slack
        ok: Any = True
        with np.errstate(all="ignore"):
            for last in _iterations(count, relaxation):
                step = 1.0 if last else relaxation
                row_sum = self._sums(0, self.b * exp(v))
                u_next = following(0, u, row_sum, step)
                column_sum = self._sums(1, self.a * exp(u_next))
                v_next = following(1, v, column_sum, step)
                # NaN stays; an infinite sum leaves nothing to the next one
                sums = [row_sum, column_sum]
                least = list(map(minimum, least or sums, sums))
                if slack is not None:
                    ok = ok & (u_next.max() + v_next.max() <= slack)
                if not last:
                    u, v = u_next, v_next
            ok = ok & (minimum(least[0].min(), least[1].min()) > _SMALLEST_SUM)
            largest = maximum(abs(u_next).max(), abs(v_next).max())
            ok = self._tensor(ok & (largest < LARGEST_SCALING))
        after, before = self._potentials(u_next, v_next), self._potentials(u, v)
        check = checked(ok, before.g, after.g, self.marginals.b, self.epsilon)
        return Sweep(after.f, before.g, after.g, after if relaxation == 1 else before, check)

    def _as(self, dtype: torch.dtype, numbers: Any) -> Any:
        """Convert vectors, NumPy arrays or tensors, to another dtype."""
        return self._array(self._tensor(numbers).to(dtype))

    def _array(self, numbers: Tensor) -> Any:
        """Convert a tensor to what a sweep computes with: on a CPU a NumPy array."""
        return numbers.numpy() if self.on_host else numbers

    def _tensor(self, numbers: Any) -> Tensor:
        """Convert them back to a tensor, whatever the default device is."""
        # a quarter of the time of as_tensor()
        return torch.from_numpy(np.asarray(numbers)) if self.on_host else numbers

    def _sums(self, side: int, scaling: Any) -> Any:
        """Sum the scaled kernel over rows (0) or columns (1); of unused points it is one."""
        product = self.kernel.columns if side else self.kernel.rows
        # products are PyTorch's, whose threads are those of the solve
        sums: Any = product(self._tensor(scaling))
        sums = self._array(sums)
        unused = self.unused[side]
        return sums if unused is None else sums + unused

    def _potentials(self, u: Any, v: Any) -> Potentials:
        """Turn log-scalings into potentials."""
        moved = (self.epsilon * self._as(self.precise, part) for part in (u, v))
        return Potentials(
            *(self._tensor(old + by) for old, by in zip(self.origin, moved, strict=True))
        )


def entries_of(plan: EntropicPlan, least: float, share: float) -> scipy.sparse.csr_array | None:
    """Collect the entries of a density from ``least`` on, if they are at most a share of all."""
    values, columns, counts, left = [], [], [], int(share * math.prod(plan.shape))
    for _, density in plan.densities():
        large = density >= least
        counts.append(large.sum(1))
        left -= int(counts[-1].sum())
        if left < 0:
            return None
        values.append(density[large])
        columns.append(large.nonzero()[:, 1].int())
    ends = torch.cat([counts[0].new_zeros(1), *counts]).cumsum(0).int()
    parts = (torch.cat(values), torch.cat(columns), ends)
    return scipy.sparse.csr_array(tuple(part.numpy() for part in parts), shape=plan.shape)


def sparse_sweeper(problem: LinearProblem, start: Potentials) -> Sweeper | None:
    """Make sweeps over the entries of the kernel that matter near ``start``, if they are few."""
    # At the fixed point the sum of each row of E b and of each column of a E is one, unless it is
    # relaxed. What is left out is less than ROUNDINGS of it, until scalings have risen by the
    # slack.
    cost = problem.cost
    fits = _SPARSE_ENTRIES[0] <= math.prod(cost.shape) <= _SPARSE_ENTRIES[1]
    if problem.tau != STRICT or cost.device.type != "cpu" or not fits:
        return None
    plan = EntropicPlan(cost, problem.marginals, start, problem.epsilon)
    entries = entries_of(plan, ROUNDINGS * torch.finfo(cost.dtype).eps * math.exp(-_SLACK), SPARSE)
    if entries is None:
        return None

    def times(matrix: Any, vector: Tensor) -> Tensor:
        return torch.from_numpy(matrix @ vector.numpy())

    kernel = Kernel(partial(times, entries), lambda vector: times(entries.T, vector), _SLACK)
    return StoredSweeper(problem, start, kernel)


class _StreamedKernel:
    """Computes the kernel anew block by block: one exponential per entry and iteration."""

    two_level = False

    def __init__(self, problem: LinearProblem) -> None:
        self.cost, self.marginals, self.epsilon, self.tau = problem
        self.a, self.b = (weight.to(self.cost.dtype) for weight in self.marginals)
        # one for points of weight zero, whose sums then leave them in place
        self.unused = Marginals(
            *(part.to(self.cost.dtype) for part in self.marginals.unused(self.cost.dtype))
        )

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
        f, g = self.marginals.mask(Potentials(f, g), self.cost.dtype)
        row_sum = torch.empty_like(self.a)
        column_sum = self.unused.b.clone()
        for rows in row_blocks(self.cost):
            kernel = exp_(self.cost.rows(rows).exponent(f[rows], g, self.epsilon))
            row_sum[rows] = torch.mv(kernel, self.b) + self.unused.a[rows]
            step_of_f = -step * (self.tau[0] * row_sum[rows].log() + pull[rows])
            column_sum.addmv_(kernel.T, self.a[rows] * step_of_f.exp())
        return row_sum, column_sum


def _iterations(count: int, relaxation: float) -> Iterator[bool]:
    """Say for each iteration of a sweep whether it is the last, plain one."""
    total = count if relaxation == 1 else count + 1
    return (remaining == 0 for remaining in reversed(range(total)))


def usable_sums(sums: Tensor) -> Tensor:
    """Whether every sum is finite and has lost nothing to underflow."""
    least, largest = sums.aminmax()
    # both are NaN if any is
    return (least > _SMALLEST_SUM) & (largest < math.inf)
