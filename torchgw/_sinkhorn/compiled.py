"""The softmin of :mod:`torchgw._sinkhorn.loop`, fused by torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor

from torchgw._sinkhorn.contract import STRICT, Sweeper
from torchgw._sinkhorn.cost import Cost, DenseCost, FactoredCost
from torchgw._sinkhorn.eager import EagerBackend
from torchgw._sinkhorn.softmin import LinearProblem, SoftminSweeper, row_blocks, softmin
from torchgw._typing import Marginals, Potentials

__all__ = ["CompiledBackend"]


def _reduce_columns(matrix: Tensor, weighted: Tensor, scale: Tensor) -> Tensor:
    return torch.logsumexp((weighted - matrix) * scale, dim=1)


def _reduce_rows(matrix: Tensor, weighted: Tensor, scale: Tensor) -> Tensor:
    return torch.logsumexp((weighted[:, None] - matrix) * scale, dim=0)


def _reduce_factors(left: Tensor, right: Tensor, weighted: Tensor, scale: Tensor) -> Tensor:
    return torch.logsumexp(torch.addmm(weighted * scale, left * scale, right.T), dim=1)


@cache
def _compiled() -> tuple[Callable[..., Tensor], ...]:
    # Dynamic shapes, and epsilon as a tensor: one graph per dtype serves all sizes. Extents of one,
    # which are specialised all the same, never reach these functions, and strides never vary: the
    # recompile limit cannot be met.
    return tuple(
        torch.compile(step, dynamic=True, fullgraph=True)
        for step in (_reduce_columns, _reduce_rows, _reduce_factors)
    )


class CompiledBackend(EagerBackend):
    """The eager backend with the half-step compiled; plan products stay as they are."""

    name = "compile"

    @staticmethod
    @cache
    def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why torch.compile cannot run here, found by one small probe, or ``None``."""
        cost = FactoredCost(*(torch.ones(shape, dtype=dtype, device=device) for shape in _PROBE))
        weight = torch.zeros(8, dtype=dtype, device=device)
        try:
            CompiledBackend().softmin(cost, weight, weight, 1.0, axis=1)
        except Exception as error:  # noqa: BLE001 - a missing compiler has no exception of its own
            reason = " ".join(str(error).split()[:40]) or type(error).__name__
            return f"torch.compile failed on an 8 x 8 probe: {reason}"
        return None

    def softmin(
        self, cost: Cost, log_weight: Tensor, potential: Tensor, epsilon: float, axis: int
    ) -> Tensor:
        """Compute the half-step, exponentials and sums fused into one kernel."""
        if min(cost.shape) == 1:
            return softmin(cost, log_weight, potential, epsilon, axis)
        weighted = (potential + epsilon * log_weight).to(cost.dtype)
        scale = torch.full((), 1 / epsilon, dtype=cost.dtype, device=cost.device)
        if isinstance(cost, DenseCost):
            step = _compiled()[0 if axis == 1 else 1]
            total = step(cost.matrix.contiguous(), weighted, scale)
        else:
            total = self._factored(cost if axis == 1 else cost.transpose(), weighted, scale)
        return total.to(potential.dtype) * -epsilon

    def _factored(self, cost: FactoredCost, weighted: Tensor, scale: Tensor) -> Tensor:
        """Return the log-sums over the columns, block by block of rows."""
        pad = (0, 1 if cost.rank == 1 else 0)
        left, right = (F.pad(side, pad).contiguous() for side in (cost.left, cost.right))
        bias = weighted - cost.column
        # One block is one graph call; blocks of equal height leave no single row over.
        count = min(cost.shape[0] // 2, sum(1 for _ in row_blocks(cost)))
        parts = [_compiled()[2](block, right, bias, scale) for block in left.tensor_split(count)]
        return torch.cat(parts) - cost.row * scale

    def sweeper(
        self,
        cost: Cost,
        marginals: Marginals,
        start: Potentials,
        epsilon: float,
        *,
        tau: tuple[float, float] = STRICT,
    ) -> Sweeper:
        """Return sweeps by two compiled softmins per iteration."""
        return SoftminSweeper(LinearProblem(cost, marginals, epsilon, self, tau))


# Shapes of a FactoredCost: left, right, row, column.
_PROBE = ((8, 2), (8, 2), (8,), (8,))
