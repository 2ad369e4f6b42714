"""The half-step of Sinkhorn's iteration, as every backend must compute it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torchgw._sinkhorn.cost import Cost, exp_

# Bytes of one (rows, m) working block. On a CPU it stays in cache from the product to the sums
# (2 MB took 2.2 ns per entry, 8 MB 4.1); on a GPU it must be large enough to fill the device. [L12]
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


def checked(ok: Tensor, g: Tensor, g_next: Tensor, b: Tensor, epsilon: float) -> Tensor:
    """Join whether a sweep is usable and its column error into its check, (2,) float64."""
    # The column mass of the plan (f, g) is q_j = b_j exp((g_j - g_next_j) / epsilon), so the error
    # sum_j |q_j - b_j| needs no plan.
    change = (g - g_next).double().div_(epsilon)
    error = torch.dot(b.double(), change.expm1_().abs_())
    return torch.stack([ok.to(torch.float64), error])
