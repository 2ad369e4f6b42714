"""Sinkhorn by half-steps that torch.compile fuses."""

import platform
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor

from torchgw._errors import BackendUnavailableError
from torchgw._sinkhorn.contract import PreparedProblem
from torchgw._sinkhorn.problem import DenseCost, FactoredCost, LinearProblem, row_blocks
from torchgw._typing import Marginals


def _reduce_columns(matrix: Tensor, weighted: Tensor, scale: Tensor) -> Tensor:
    return torch.logsumexp((weighted - matrix) * scale, dim=1)


def _reduce_rows(matrix: Tensor, weighted: Tensor, scale: Tensor) -> Tensor:
    return torch.logsumexp((weighted[:, None] - matrix) * scale, dim=0)


def _reduce_factors(left: Tensor, right: Tensor, weighted: Tensor, scale: Tensor) -> Tensor:
    return torch.logsumexp(torch.addmm(weighted * scale, left * scale, right.T), dim=1)


# Bits of a vector, by the instructions that PyTorch uses on a CPU; 1 stands for none.
_WIDTHS = {"DEFAULT": 1, "AVX2": 256, "AVX512": 512} if platform.machine() == "x86_64" else {}
_STEPS = _reduce_columns, _reduce_rows, _reduce_factors


@cache
def _compiled() -> tuple[Callable[..., Tensor], ...]:
    # Dynamic shapes, and epsilon as a tensor: one graph per dtype serves all sizes. Extents of one,
    # which are specialised all the same, never reach these functions, and strides never vary: the
    # recompile limit cannot be met.
    # Kernels are kept on disk under their options: with the width of vectors among these, those of
    # another processor, which would be silently wrong, are not taken up.
    width = _WIDTHS.get(torch.backends.cpu.get_cpu_capability())
    options: dict[str, Any] | None = None if width is None else {"cpp.simdlen": width}
    return tuple(
        torch.compile(step, dynamic=True, fullgraph=True, options=options) for step in _STEPS
    )


@cache
def _checked(number: int, dtype: torch.dtype, device: torch.device) -> Callable[..., Tensor]:
    """Return a compiled step once its numbers have been compared with those of the plain one."""
    # Kernels on disk may have been compiled for another processor, and are then silently wrong.
    n, m = _TRIED
    shapes = (((n, m), (m,)), ((n, m), (n,)), ((n, 3), (m, 3), (m,)))[number]
    generator = torch.Generator("cpu").manual_seed(0)
    given = [torch.rand(shape, dtype=dtype, device="cpu", generator=generator) for shape in shapes]
    given = [part.to(device) for part in given] + [torch.full((), 2.0, dtype=dtype, device=device)]
    compiled = _compiled()[number]
    off = float((compiled(*given) - _STEPS[number](*given)).abs().max())
    if not off < _ROUNDED * torch.finfo(dtype).eps:
        raise BackendUnavailableError(
            f"torch.compile returned wrong numbers (off by {off:.2g}), perhaps by kernels that it "
            "has kept for another processor. Delete the folder in which it keeps them "
            "(TORCHINDUCTOR_CACHE_DIR, or torchinductor_<user> among temporary files), or pass "
            "another `backend`."
        )
    return compiled


class CompiledBackend:
    """The half-step compiled; what is read off a plan is computed as it is defined."""

    name = "compile"

    @staticmethod
    @cache
    def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
        """Say why torch.compile cannot run here, found by one small probe, or nothing."""
        weight = torch.ones(8, dtype=dtype, device=device)
        cost = FactoredCost.of_products(weight[:, None], weight[:, None])
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
            step = _checked(0 if axis == 1 else 1, cost.dtype, cost.device)
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
    step = _checked(2, cost.dtype, cost.device)
    parts = [step(block, right, bias, scale) for block in left.tensor_split(count)]
    return torch.cat(parts) - cost.row * scale


# Points of the table on which compiled steps are tried, and by how many roundings they may be off.
# Choices. [L1335]
_TRIED, _ROUNDED = (20, 26), 64
