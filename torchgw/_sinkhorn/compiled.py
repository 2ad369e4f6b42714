"""Sinkhorn by half-steps that torch.compile fuses."""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor

from torchgw._sinkhorn.contract import PreparedProblem
from torchgw._sinkhorn.problem import DenseCost, FactoredCost, LinearProblem, row_blocks
from torchgw._typing import Marginals


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


class CompiledBackend:
    """The half-step compiled; what is read off a plan is computed as it is defined."""

    name = "compile"

    @staticmethod
    @cache
    def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
        """Say why torch.compile cannot run here, found by one small probe, or nothing."""
        cost = FactoredCost(*(torch.ones(shape, dtype=dtype, device=device) for shape in _PROBE))
        weight = torch.ones(8, dtype=dtype, device=device)
        problem = LinearProblem(cost, Marginals(weight, weight), 1.0)
        try:
            CompiledBackend().prepare(problem).softmin(weight, axis=1)
        except Exception as error:  # noqa: BLE001 - a missing compiler has no exception of its own
            reason = " ".join(str(error).split()[:40]) or type(error).__name__
            return f"torch.compile failed on an 8 x 8 probe: {reason}"
        return None

    def prepare(self, problem: LinearProblem) -> PreparedProblem:
        """Prepare a linear problem, whose sweeps take two compiled half-steps per iteration."""
        return CompiledProblem(problem, self)


class CompiledProblem(PreparedProblem):
    """A problem whose half-steps are compiled, exponentials and sums fused into one kernel."""

    def softmin(self, potential: Tensor, axis: int) -> Tensor:
        cost, marginals, epsilon, _ = self.problem
        if min(cost.shape) == 1:
            return super().softmin(potential, axis)
        log_weight = marginals.log_b if axis == 1 else marginals.log_a
        weighted = (potential + epsilon * log_weight).to(cost.dtype)
        scale = torch.full((), 1 / epsilon, dtype=cost.dtype, device=cost.device)
        if isinstance(cost, DenseCost):
            step = _compiled()[0 if axis == 1 else 1]
            total = step(cost.matrix.contiguous(), weighted, scale)
        else:
            total = _factored(cost if axis == 1 else cost.transpose(), weighted, scale)
        return total.to(potential.dtype) * -epsilon


def _factored(cost: FactoredCost, weighted: Tensor, scale: Tensor) -> Tensor:
    """Compute the log-sums over the columns, block by block of rows."""
    pad = (0, 1 if cost.rank == 1 else 0)
    left, right = (F.pad(side, pad).contiguous() for side in (cost.left, cost.right))
    bias = weighted - cost.column
    # One block is one graph call; blocks of equal height leave no single row over.
    count = min(cost.shape[0] // 2, sum(1 for _ in row_blocks(cost)))
    parts = [_compiled()[2](block, right, bias, scale) for block in left.tensor_split(count)]
    return torch.cat(parts) - cost.row * scale


# Shapes of a FactoredCost: left, right, row, column.
_PROBE = ((8, 2), (8, 2), (8,), (8,))
