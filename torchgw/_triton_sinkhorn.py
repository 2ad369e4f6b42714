"""The Triton backend: Sinkhorn half-steps, iterations and plan products on a CUDA device.

A thin door to the kernels in ``torchgw/_sinkhorn/kernels/``: half-steps in ``softmin``, a dense
iteration that reads its kernel once in ``stored``, sweeps of both in ``sweeps``, plan products in
``read_off``.
"""

import math
from functools import cache, cached_property

import torch
from torch import Tensor

from torchgw._sinkhorn.contract import PreparedProblem, Sweep, Sweeper
from torchgw._sinkhorn.kernels import read_off, stored
from torchgw._sinkhorn.kernels.operands import (
    KernelPlan,
    Operands,
    ProductPrecision,
    interpreted,
    operands,
    padded,
    scale_of,
)
from torchgw._sinkhorn.kernels.softmin import log_sum_exp
from torchgw._sinkhorn.kernels.sweeps import StreamedSweeper, dense_sweeper, recorded_sweep, records
from torchgw._sinkhorn.kernels.vectors import probe
from torchgw._sinkhorn.problem import DenseCost, LinearProblem
from torchgw._typing import Marginals, Potentials

__all__ = ["TritonBackend"]

# Plans of at most so many entries are stored to be multiplied. [L445]
_STORED_ENTRIES = 2**22


class TritonBackend:
    """Triton kernels, on a CUDA device or under Triton's interpreter."""

    # `precision` is that of products of float32 factors; float64 costs are always computed in
    # float64. `shape` is the launch shape of the one-read dense iteration, which is then used at
    # any width, for measurements and tests. Without `graphs` sweeps over small matrices are
    # launched one by one. A half-step by itself with fewer than `least_entries` entries (n * m),
    # and products with a plan whose cost is such a matrix, are left to PyTorch operations: a kernel
    # that a solve launches a few times takes longest to compile. [L445]

    name = "triton"

    def __init__(
        self,
        precision: ProductPrecision = "fp16x3",
        shape: stored.SweepShape | None = None,
        graphs: bool = True,
        least_entries: int = 0,
    ) -> None:
        self.precision = precision
        self.shape = shape
        self.graphs = graphs
        self.least_entries = least_entries

    @staticmethod
    @cache
    def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
        """Say why the kernels cannot run here, found by one small probe, or nothing."""
        if dtype not in (torch.float32, torch.float64):
            return f"the kernels compute in float32 and float64, not {dtype}."
        if device.type != "cuda" and not interpreted():
            return f"the device is {device}, and Triton compiles for CUDA devices."
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (7, 0):
            return f"{device} has a compute capability below 7.0, which Triton needs."
        try:
            probe(device)
        except Exception as error:  # noqa: BLE001 - a missing compiler has no exception of its own
            reason = str(error).strip().splitlines() or [type(error).__name__]
            return f"Triton failed on a probe: {reason[-1]}"
        return None

    def prepare(self, problem: LinearProblem) -> "TritonProblem":
        """Prepare a linear problem, whose operands are made when a kernel first needs them."""
        return TritonProblem(problem, self)


class TritonProblem(PreparedProblem):
    """A problem that the kernels solve and read."""

    backend: TritonBackend

    def __init__(
        self, problem: LinearProblem, backend: TritonBackend, turned: "TritonProblem | None" = None
    ) -> None:
        super().__init__(problem, backend)
        self._turned = turned

    @property
    def T(self) -> "TritonProblem":
        return self._turned or TritonProblem(self.problem.T, self.backend, self)

    @cached_property
    def _operands(self) -> Operands:
        """The cost as the kernels read it."""
        if self._turned is not None:
            return self._turned._operands.transpose()
        return operands(self.problem.cost, self.problem.epsilon, self.backend.precision)

    def rows(self, part: slice) -> "TritonProblem":
        """Prepare the problem of some source points, on the operands of this one."""
        a, b = self.problem.marginals
        cost = self.problem.cost.rows(part)
        problem = self.problem._replace(cost=cost, marginals=Marginals(a[part], b))
        result = TritonProblem(problem, self.backend)
        result.__dict__["_operands"] = self._operands.rows(part)
        return result

    def _kernel_plan(self, potentials: Potentials) -> KernelPlan:
        """Describe the plan of some potentials as the kernels read it."""
        return KernelPlan(self._operands, self.problem.marginals, potentials, self.problem.epsilon)

    def softmin(self, potential: Tensor, axis: int) -> Tensor:
        """Compute the half-step, following the maximum."""
        cost, marginals, epsilon, _ = self.problem
        n, m = cost.shape
        if n * m < self.backend.least_entries:
            return super().softmin(potential, axis)
        parts = self._operands if axis == 1 else self._operands.transpose()
        log_weight = marginals.log_b if axis == 1 else marginals.log_a
        scale = scale_of(epsilon)
        bias = (potential - parts.column) * scale + log_weight * math.log2(math.e)
        bias = padded(bias.to(parts.dtype), -math.inf)
        log_sum = log_sum_exp(parts, bias).to(potential.dtype)
        return (parts.row - log_sum / scale).to(potential.dtype)

    def sweeper(self, start: Potentials) -> Sweeper:
        """Make sweeps that read a matrix once per iteration, where a row of it fits on chip."""
        cost, tau, backend = self.problem.cost, self.problem.tau, self.backend
        if isinstance(cost, DenseCost) and (backend.shape or stored.fits(cost)):
            shape = backend.shape or stored.sweep_shape(cost)
            return dense_sweeper(self.plan(start), tau, shape, graphs=backend.graphs)
        return StreamedSweeper(self._kernel_plan(start), tau)

    def safe_sweep(self, start: Potentials, count: int) -> Sweep:
        """Run iterations by half-steps, by a CUDA graph where launches would dominate."""
        cost, backend = self.problem.cost, self.backend
        few = isinstance(cost, DenseCost) and math.prod(cost.shape) < backend.least_entries
        if few and backend.graphs and records(self.problem):
            return recorded_sweep(self.problem, start, count)
        return super().safe_sweep(start, count)

    def apply(self, potentials: Potentials, values: Tensor) -> Tensor:
        """Compute plan @ values, shape (n, c), without the plan unless a small cost is stored."""
        cost, least = self.problem.cost, self.backend.least_entries
        if isinstance(cost, DenseCost) and math.prod(cost.shape) < min(least, _STORED_ENTRIES):
            plan = self.dense(potentials)
            return (plan @ values.to(plan.dtype)).to(values.dtype)
        return read_off.apply(self._kernel_plan(potentials), values)

    def dense(self, potentials: Potentials) -> Tensor:
        """Build the plan as a matrix, shape (n, m), in one pass."""
        if self._turned is not None:
            return self._turned.dense(Potentials(*reversed(potentials))).T
        return read_off.dense(self._kernel_plan(potentials))

    def topk(self, potentials: Potentials, k: int) -> tuple[Tensor, Tensor]:
        """Find the k largest entries of each row, by a pass each while that is faster."""
        if k > read_off.MOST_PASSES:
            return super().topk(potentials, k)
        return read_off.topk(self._kernel_plan(potentials), k)

    def draw(self, potentials: Potentials, rows: Tensor, generator: torch.Generator) -> Tensor:
        """Draw one column from each row, shape (s,); the generator gives the seed."""
        seed = torch.randint(2**31 - 1, (), generator=generator, device=generator.device)
        return read_off.sample(self._kernel_plan(potentials), rows, seed)
