"""Products of small matrices in Triton, whose bits do not depend on how many others there are."""

import torch
import triton
import triton.language as tl

from torchgw._tensors.ahead import launch

# Rows of a product that a program computes, and as much of the inner dimension is read at once. A
# choice. [L535]
_SIDE = 32


@triton.jit(
    do_not_specialize=[
        "n", "inner", "m",
        "left_stride", "left_row", "left_column", "right_stride", "right_row", "right_column",
    ]
)  # fmt: skip
def _product_kernel(
    left,  # [k, n, inner] float64
    right,  # [k, inner, m] float64
    out,  # [k, n, m] float64, contiguous, written
    n,
    inner,
    m,
    left_stride,
    left_row,
    left_column,
    right_stride,
    right_row,
    right_column,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Multiply some rows of one pair."""
    number = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_M)
    in_rows, in_columns = rows < n, columns < m
    left += number * left_stride
    right += number * right_stride
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float64)
    for begin in range(0, inner, CHUNK):
        middle = begin + tl.arange(0, CHUNK)
        inside = middle < inner
        here = tl.load(
            left + rows[:, None] * left_row + middle[None, :] * left_column,
            mask=in_rows[:, None] & inside[None, :],
            other=0.0,
        )
        there = tl.load(
            right + middle[:, None] * right_row + columns[None, :] * right_column,
            mask=inside[:, None] & in_columns[None, :],
            other=0.0,
        )
        total = tl.dot(here, there, total, out_dtype=tl.float64)
    place = number * n * m + rows[:, None] * m + columns[None, :]
    tl.store(out + place, total, mask=in_rows[:, None] & in_columns[None, :])


def batch_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Compute left (k, n, inner) times right (k, inner, m), float64."""
    (count, n, inner), m = left.shape, right.shape[2]
    out = torch.empty(count, n, m, dtype=left.dtype, device=left.device)
    launch(
        _product_kernel, (count, triton.cdiv(n, _SIDE)), left, right, out, n, inner, m,
        *left.stride(), *right.stride(),
        BLOCK_N=_SIDE, BLOCK_M=max(16, triton.next_power_of_2(m)), CHUNK=_SIDE, num_warps=4,
    )  # fmt: skip
    return out
