"""The Triton backend: Sinkhorn half-steps, iterations and plan products on a CUDA device.

A thin door to the kernels in ``torchgw/_sinkhorn/kernels/``: half-steps in ``softmin``, a dense
iteration that reads its kernel once in ``stored``, sweeps of both in ``sweeps``, plan products in
``read_off``.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from torchgw._sinkhorn.contract import Sweeper
from torchgw._sinkhorn.cost import Cost, DenseCost, FactoredCost
from torchgw._sinkhorn.eager import EagerBackend
from torchgw._sinkhorn.kernels import read_off, stored
from torchgw._sinkhorn.kernels.operands import (
    ProductPrecision,
    interpreted,
    operands,
    scale_of,
)
from torchgw._sinkhorn.kernels.softmin import log_sum_exp, padded
from torchgw._sinkhorn.kernels.sweeps import Linear, dense_sweeper, factored_sweeper
from torchgw._sinkhorn.softmin import softmin
from torchgw._typing import Marginals, Potentials

__all__ = ["TritonBackend"]


class TritonBackend:
    """Triton kernels, on a CUDA device or under Triton's interpreter.

    Parameters
    ----------
    precision : {"fp16x3", "float32"}
        Of the products of float32 factors; float64 costs are always computed in float64.
    plan : SweepPlan, optional
        Launch shape of the one-read dense iteration, which is then used at any width; for
        measurements and tests.
    graphs : bool
        Whether sweeps over small matrices are replayed as CUDA graphs.
    least_entries : int
        A single half-step over factors with fewer entries (n * m) is left to PyTorch operations.
    """

    name = "triton"

    def __init__(
        self,
        precision: ProductPrecision = "fp16x3",
        plan: stored.SweepPlan | None = None,
        graphs: bool = True,
        least_entries: int = 0,
    ) -> None:
        self.precision = precision
        self.plan = plan
        self.graphs = graphs
        self.least_entries = least_entries

    @staticmethod
    @cache
    def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why the kernels cannot run here, found by one small probe, or ``None``."""
        if dtype not in (torch.float32, torch.float64):
            return f"the kernels compute in float32 and float64, not {dtype}."
        if device.type != "cuda" and not interpreted():
            return f"the device is {device}, and Triton compiles for CUDA devices."
        cost = FactoredCost(*(torch.ones(size, dtype=dtype, device=device) for size in _PROBE))
        weight = torch.zeros(8, dtype=dtype, device=device)
        try:
            TritonBackend().softmin(cost, weight, weight, 1.0, axis=1)
        except Exception as error:  # noqa: BLE001 - a missing compiler has no exception of its own
            reason = str(error).strip().splitlines() or [type(error).__name__]
            return f"Triton failed on an 8 x 8 probe: {reason[-1]}"
        return None

    def softmin(
        self, cost: Cost, log_weight: Tensor, potential: Tensor, epsilon: float, axis: int
    ) -> Tensor:
        """Compute :func:`torchgw._sinkhorn.softmin.softmin`."""
        if isinstance(cost, FactoredCost) and cost.shape[0] * cost.shape[1] < self.least_entries:
            return softmin(cost, log_weight, potential, epsilon, axis)
        scale = scale_of(epsilon)
        parts = operands(cost, epsilon, self.precision)
        if axis == 0:
            parts = parts.transpose()
        bias = (potential - parts.column) * scale + log_weight * math.log2(math.e)
        bias = padded(bias.to(parts.dtype), -math.inf)
        log_sum = log_sum_exp(parts, bias).to(potential.dtype)
        return (parts.row - log_sum / scale).to(potential.dtype)

    def sweeper(
        self,
        cost: Cost,
        marginals: Marginals,
        start: Potentials,
        epsilon: float,
        *,
        tau: tuple[float, float] = (1.0, 1.0),
    ) -> Sweeper:
        """Prepare full iterations, reading a matrix once per iteration where a row fits on chip.

        With ``tau`` below one the plain iteration is f = tau[0] * softmin(g),
        g = tau[1] * softmin(f): the potentials of marginals relaxed by a KL term.
        """
        problem = Linear(marginals, start, epsilon, tau)
        if isinstance(cost, DenseCost) and (self.plan or stored.fits(cost)):
            plan = self.plan or stored.sweep_plan(cost)
            return dense_sweeper(cost, problem, plan, graphs=self.graphs)
        parts = operands(cost, epsilon, self.precision)
        return factored_sweeper(parts, problem)

    def transposed(self) -> TritonBackend:
        """Return this backend, to which all costs are alike."""
        return self

    def apply(
        self,
        cost: Cost,
        marginals: Marginals,
        potentials: Potentials,
        epsilon: float,
        values: Tensor,
    ) -> Tensor:
        """Return plan @ values, shape (n, c), without the plan."""
        parts = operands(cost, epsilon, self.precision)
        return read_off.apply(parts, marginals, potentials, scale_of(epsilon), values)

    def dense(
        self, cost: Cost, marginals: Marginals, potentials: Potentials, epsilon: float
    ) -> Tensor:
        """Return the plan as a matrix, shape (n, m), in one pass."""
        parts = operands(cost, epsilon, self.precision)
        return read_off.dense(parts, marginals, potentials, scale_of(epsilon))

    def topk(
        self, cost: Cost, marginals: Marginals, potentials: Potentials, epsilon: float, k: int
    ) -> tuple[Tensor, Tensor]:
        """Return the k largest entries of each row, by a pass each while that is faster."""
        if k > read_off.MOST_PASSES:
            return EagerBackend().topk(cost, marginals, potentials, epsilon, k)
        parts = operands(cost, epsilon, self.precision)
        return read_off.topk(parts, marginals, potentials, scale_of(epsilon), k)

    def draw(
        self,
        cost: Cost,
        marginals: Marginals,
        potentials: Potentials,
        epsilon: float,
        rows: Tensor,
        generator: torch.Generator,
    ) -> Tensor:
        """Draw one column from each row, shape (s,); the generator gives the seed."""
        seed = torch.randint(2**31 - 1, (), generator=generator, device=generator.device)
        parts = operands(cost, epsilon, self.precision)
        return read_off.sample(parts, marginals, potentials, scale_of(epsilon), rows, seed)


# Shapes of a FactoredCost: left, right, row, column.
_PROBE = ((8, 2), (8, 2), (8,), (8,))
