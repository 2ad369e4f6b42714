"""A plan as a matrix, in one pass, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torchgw._launch import launch
from torchgw._triton_operands import Blocks, Operands, launch_options
from torchgw._triton_plan import column_bias, row_potential
from torchgw._triton_tiles import exponents, load_left
from torchgw._typing import Marginals, Potentials

__all__ = ["dense"]


@triton.jit
def _dense_kernel(
    first,  # [PARTS, n, RANK] left factors, or the (n, m) matrix
    second,  # [PARTS, m, RANK] right factors, or [1] -scale
    own,  # [n] row potential, exponent units
    bias,  # [m, padded with -inf to whole tiles] column potential plus base-2 log weight
    weight,  # [n]
    out,  # [n, m]
    n,
    m,
    stride_n,
    stride_m,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Write one tile of the plan."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    leading, trailing = rows, rows
    if RANK == BLOCK_R:
        leading, trailing = load_left(first, rows, 0, n, RANK, BLOCK_R, PARTS)
    x = exponents(
        first, second, leading, trailing, tl.load(bias + columns), rows, columns, n, m,
        stride_n, stride_m, RANK, BLOCK_R, PARTS, PRECISION,
    )  # fmt: skip
    potential = tl.load(own + rows, mask=rows < n, other=0.0)
    mass = tl.load(weight + rows, mask=rows < n, other=0.0)
    p = tl.exp2(x + potential[:, None]) * mass[:, None].to(x.dtype)
    inside = (rows < n)[:, None] & (columns < m)[None, :]
    tl.store(out + rows.to(tl.int64)[:, None] * m + columns[None, :], p, mask=inside)


def dense(cost: Operands, marginals: Marginals, potentials: Potentials, scale: float) -> Tensor:
    """Return the plan as a matrix, shape (n, m)."""
    n, m = cost.shape
    own = row_potential(cost, marginals, potentials, scale)
    bias = column_bias(cost, marginals, potentials, scale)
    out = own.new_empty((n, m))
    # a matrix is read and written along its rows; products want square tiles
    blocks = Blocks(8, 256, 4, 1) if cost.rank == 0 else Blocks(64, 64, 4, 2)
    launch(
        _dense_kernel, (triton.cdiv(n, blocks.n), triton.cdiv(m, blocks.m)),
        cost.first, cost.second, own, bias, marginals.a, out, n, m, *cost.strides,
        **cost.constants(), BLOCK_N=blocks.n, BLOCK_M=blocks.m, **launch_options(blocks),
    )  # fmt: skip
    return out
