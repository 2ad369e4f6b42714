"""What one reads off a plan that is never stored, in Triton: products, best partners, samples.

Each operation walks over tiles of exponents (T1) of :mod:`torchgw._sinkhorn.kernels.exponents`, for
stored and for factored costs alike. The other direction is that of the transposed cost.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchgw._sinkhorn.kernels.exponents import exponents, load_left, walk_column, walk_range
from torchgw._sinkhorn.kernels.operands import (
    Blocks,
    KernelPlan,
    Operands,
    Walk,
    interpreted,
    launch_options,
    split_columns,
    tiles_of,
    whole,
)
from torchgw._tensors.ahead import launch
from torchgw._tensors.operations import power_of_two

# Passes over a plan, one for each of the k largest, that take less time than sorting its rows once.
# [L65]
MOST_PASSES = 16

# log2 of zero for candidates: below every exponent, and above the value for columns that are no
# candidates.
_FLOOR = tl.constexpr(-1e30)


@triton.jit
def _dot_bfloat16(
    left,  # [BLOCK_N, BLOCK_M] bfloat16
    right,  # [BLOCK_C, BLOCK_M] bfloat16
    total,  # [BLOCK_N, BLOCK_C] float32
    EMULATE: tl.constexpr,
):
    """Compute total + left . right."""
    if EMULATE:
        return tl.dot(left.to(tl.float32), right.to(tl.float32).T, total, input_precision="ieee")
    else:  # noqa: RET505 - Triton compiles both branches unless they are exclusive
        return tl.dot(left, right.T, total)


@triton.jit(do_not_specialize=["n", "m", "c", "stride_n", "stride_m"])
def _apply_kernel(
    first,  # [PARTS, n, rank] left factors, or the (n, m) matrix
    second,  # [PARTS, m, rank] right factors, or [1] -scale
    own,  # [n] row potential, exponent units
    bias,  # [m, padded with -inf to whole tiles] column potential plus base-2 log weight
    values,  # [parts, channels, pitch] transposed, padded by zeros; float32 as 2 bfloat16 parts
    out,  # [splits, n, c]
    lists,  # [row blocks, 3] those of a walk, read if WALK
    tiles,  # [kept]
    n,
    m,
    c,
    pitch,  # of a row of values, a multiple of 1024
    width,  # columns of one split, a multiple of BLOCK_M
    stride_n,
    stride_m,
    rank,  # of the factors, a multiple of 16
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PARTS: tl.constexpr,
    AXIS: tl.constexpr,
    ALIGNED: tl.constexpr,
    WALK: tl.constexpr,  # points of a block of the lists; 0 for all columns
    STAGES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,  # 1 for a vector, which needs no matrix unit
    EMULATE: tl.constexpr,  # Triton's interpreter has no bfloat16 product: use float32 on the parts
):
    """Multiply a block of rows of the plan, without its row weights, by a block of values."""
    rows, begin, end = walk_range(lists, width, m, WALK, BLOCK_N)
    kind: tl.constexpr = bias.dtype.element_ty
    channel = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    leading, trailing = rows, rows
    if RANK == BLOCK_R:
        leading, trailing = load_left(first, rows, 0, n, RANK, BLOCK_R, PARTS)
    potential = tl.load(own + rows, mask=rows < n, other=0.0)
    total = tl.zeros((BLOCK_N, BLOCK_C), kind)
    plane = tl.num_programs(2).to(tl.int64) * BLOCK_C * pitch
    for position in tl.range(begin, end, BLOCK_M, num_stages=STAGES):
        column = walk_column(tiles, position, WALK)
        columns = column + tl.arange(0, BLOCK_M)
        x = exponents(
            first, second, leading, trailing, tl.load(bias + columns), rows, columns, n, m,
            stride_n, stride_m, rank, RANK, BLOCK_R, PARTS, AXIS, ALIGNED,
        )  # fmt: skip
        p = tl.exp2(x + potential[:, None])
        at = values + channel.to(tl.int64)[:, None] * pitch + columns[None, :]
        value = tl.load(at)
        if BLOCK_C == 1:
            total += tl.sum(p * value, 1)[:, None]
        elif kind == tl.float64:
            total = tl.dot(p, value.T, total, input_precision="ieee", out_dtype=kind)
        else:
            # two bfloat16 parts hold 16 bits, whatever the size of a number: the error of an
            # entry is at most 2^-18 of it for p, for the values, and for the product left out.
            # Matrix units add by truncation, a bias that would grow with m: a tile starts at zero.
            low = tl.load(at + plane)
            p1 = p.to(tl.bfloat16)
            p2 = (p - p1.to(tl.float32)).to(tl.bfloat16)
            part = _dot_bfloat16(p1, low, tl.zeros((BLOCK_N, BLOCK_C), kind), EMULATE)
            part = _dot_bfloat16(p2, value, part, EMULATE)
            total += _dot_bfloat16(p1, value, part, EMULATE)
    row_out = (tl.program_id(1).to(tl.int64) * n + rows)[:, None] * c
    inside = (rows < n)[:, None] & (channel < c)[None, :]
    tl.store(out + row_out + channel[None, :], total, mask=inside)


@triton.jit
def _log_exponential(
    seed,  # int64
    draw,  # [BLOCK_N] number of the draw
    columns,  # [BLOCK_M]
):
    """Draw log2 of standard exponential variables, [BLOCK_N, BLOCK_M], from the seed."""
    # The smallest of E_j / p_j is at j with probability p_j. What decides is the resolution of E
    # near zero: 2^-33, where a 24-bit uniform number would give ties among a million columns.
    zero = (draw[:, None] * 0 + columns[None, :] * 0).to(tl.uint32)
    word, _, _, _ = tl.philox(
        tl.cast(seed, tl.uint64), zero + columns[None, :].to(tl.uint32),
        zero + draw[:, None].to(tl.uint32), zero, zero,
    )  # fmt: skip
    uniform = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    near = uniform * (1.0 + 0.5 * uniform)
    return tl.log2(tl.where(uniform < 1e-4, near, -0.6931471805599453 * tl.log2(1.0 - uniform)))


@triton.jit(do_not_specialize=["s", "n", "m", "stride_n", "stride_m"])
def _best_kernel(
    first,  # [PARTS, n, rank] left factors, or the (n, m) matrix
    second,  # [PARTS, m, rank] right factors, or [1] -scale
    bias,  # [m, padded with -inf to whole tiles] column potential plus base-2 log weight
    index,  # [s] int64 rows to look at, read if INDEXED; else s = n
    last_score,  # [s] previous pick, read if NEXT
    last_column,  # [s] int64, read if NEXT
    score_out,  # [splits, s]
    column_out,  # [splits, s] int64
    lists,  # [row blocks, 3] those of a walk, read if WALK
    tiles,  # [kept]
    seed,  # [1] int64, read if RANDOM
    s,
    n,
    m,
    width,  # columns of one split, a multiple of BLOCK_M
    stride_n,
    stride_m,
    rank,  # of the factors, a multiple of 16
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PARTS: tl.constexpr,
    AXIS: tl.constexpr,
    ALIGNED: tl.constexpr,
    INDEXED: tl.constexpr,
    NEXT: tl.constexpr,  # only what comes after the previous pick, by score, then by column
    WALK: tl.constexpr,  # points of a block of the lists; 0 for all columns
    RANDOM: tl.constexpr,  # race exponential variables: a draw from the row
    STAGES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Find the largest exponent of each row, the lowest column among equals."""
    place, begin, end = walk_range(lists, width, m, WALK, BLOCK_N)
    kind: tl.constexpr = bias.dtype.element_ty
    rows = tl.load(index + place, mask=place < s, other=0) if INDEXED else place
    leading, trailing = rows, rows
    if RANK == BLOCK_R:
        leading, trailing = load_left(first, rows, 0, n, RANK, BLOCK_R, PARTS)
    if NEXT:
        bound = tl.load(last_score + place, mask=place < s, other=0.0)[:, None]
        after = tl.load(last_column + place, mask=place < s, other=0)[:, None]
    best = tl.full((BLOCK_N,), -float("inf"), kind)
    where = tl.zeros((BLOCK_N,), tl.int64)
    for position in tl.range(begin, end, BLOCK_M, num_stages=STAGES):
        column = walk_column(tiles, position, WALK)
        columns = column + tl.arange(0, BLOCK_M)
        x = exponents(
            first, second, leading, trailing, tl.load(bias + columns), rows, columns, n, m,
            stride_n, stride_m, rank, RANK, BLOCK_R, PARTS, AXIS, ALIGNED,
        )  # fmt: skip
        if RANDOM:
            x -= _log_exponential(tl.load(seed), place, columns)
        candidate = (columns < m)[None, :]
        x = tl.where(x > _FLOOR, x, _FLOOR)
        if NEXT:
            candidate &= (x < bound) | ((x == bound) & (columns[None, :] > after))
        top, at = tl.max(tl.where(candidate, x, -float("inf")), 1, return_indices=True)
        where = tl.where(top > best, column + at, where)
        best = tl.maximum(best, top)
    out = tl.program_id(1).to(tl.int64) * s + place
    tl.store(score_out + out, best, mask=place < s)
    tl.store(column_out + out, where, mask=place < s)


def apply(
    plan: KernelPlan,
    values: Tensor,
    *,
    walk: Walk | None = None,
    blocks: Blocks | None = None,
    splits: int | None = None,
) -> Tensor:
    """Compute plan @ values, shape (n, c), for values of shape (m, c)."""
    cost = plan.cost
    (n, m), c = cost.shape, values.shape[1]
    own, bias = plan.row_potential(), plan.column_bias()
    exact = cost.dtype == torch.float64
    # few widths, as each is compiled
    block_c = 1 if c == 1 and not exact else 32 if c <= 32 else 64 if exact or c <= 64 else 128
    channels = tiles_of(c, block_c)
    walk = walk or whole(own.device)
    blocks = walk.fit(blocks or _product_blocks(cost, walk, block_c))
    splits, width = split_columns(n, m, blocks, walk, splits)
    pitch = len(bias)
    table = own.new_zeros((1, channels * block_c, pitch))
    table[0, :c, :m] = values.T
    if block_c > 1 and cost.dtype == torch.float32:
        table = _split_bfloat16(table[0])
    out = own.new_empty((splits, n, c))
    launch(
        _apply_kernel, (walk.programs(n, blocks), splits, channels),
        cost.first, cost.second, own, bias, table, out, walk.lists, walk.tiles, n, m, c, pitch,
        width, *cost.strides, **cost.constants(), WALK=walk.width, STAGES=blocks.stages,
        BLOCK_N=blocks.n, BLOCK_M=blocks.m, BLOCK_C=block_c, EMULATE=interpreted(),
        **launch_options(blocks),
    )  # fmt: skip
    return out.sum(0).to(values.dtype) * plan.marginals.a[:, None].to(values.dtype)


def _product_blocks(cost: Operands, walk: Walk, block_c: int) -> Blocks:
    """Choose the tiles of a product: exponents, their two parts and the sums share registers."""
    narrow = cost.dtype == torch.float32 and 0 < cost.rank <= 32 and 1 < block_c <= 32
    return Blocks(128 if narrow and walk.width else 64, 64, 4, 2)


def topk(plan: KernelPlan, k: int, *, walk: Walk | None = None) -> tuple[Tensor, Tensor]:
    """Find the k largest entries of each row: values (n, k), and columns (n, k) in int64."""
    # One pass over the plan for each of the k; of equal entries the lowest column comes first.
    bias, scores, columns = plan.column_bias(), [], []
    previous: tuple[Tensor, Tensor] | None = None
    for _ in range(k):
        previous = _best(plan.cost, bias, previous=previous, walk=walk)
        scores.append(previous[0])
        columns.append(previous[1])
    values = power_of_two(torch.stack(scores, 1) + plan.row_potential()[:, None])
    return values * plan.marginals.a[:, None].to(values.dtype), torch.stack(columns, 1)


def sample(plan: KernelPlan, rows: Tensor, seed: Tensor) -> Tensor:
    """Draw one column from P(i, :) for each i in ``rows``, shape (s,), int64."""
    # The draw is a function of the seed, shape () in int64, and of the place in rows only.
    return _best(plan.cost, plan.column_bias(), rows=rows.contiguous(), seed=seed)[1]


def _best(
    cost: Operands,
    bias: Tensor,
    *,
    rows: Tensor | None = None,
    previous: tuple[Tensor, Tensor] | None = None,
    seed: Tensor | None = None,
    walk: Walk | None = None,
) -> tuple[Tensor, Tensor]:
    """Find the largest exponent of each row and its column."""
    n, m = cost.shape
    count = n if rows is None else len(rows)
    walk = walk or whole(bias.device)
    blocks = Blocks(32, 64, 4, 2) if cost.dtype == torch.float64 else Blocks(64, 128, 4, 2)
    blocks = walk.fit(blocks)
    splits, width = split_columns(count, m, blocks, walk)
    score = bias.new_empty((splits, count))
    column = torch.empty((splits, count), dtype=torch.int64, device=bias.device)
    last_score, last_column = previous or (score, column)
    launch(
        _best_kernel, (walk.programs(count, blocks), splits),
        cost.first, cost.second, bias, column if rows is None else rows, last_score, last_column,
        score, column, walk.lists, walk.tiles, column if seed is None else seed, count,
        n, m, width, *cost.strides,
        **cost.constants(), INDEXED=rows is not None, NEXT=previous is not None,
        RANDOM=seed is not None, WALK=walk.width, STAGES=blocks.stages,
        BLOCK_N=blocks.n, BLOCK_M=blocks.m, **launch_options(blocks),
    )  # fmt: skip
    top = score.amax(0)
    return top, torch.where(score == top, column, m).amin(0)


def _split_bfloat16(table: Tensor) -> Tensor:
    """Split a table into two bfloat16 parts, (2, channels, pitch), that sum to it to 2^-18."""
    parts = torch.empty((2, *table.shape), dtype=torch.bfloat16, device=table.device)
    for part in parts:
        part.copy_(table)
        table = table - part.to(table.dtype)
    return parts


@triton.jit(do_not_specialize=["n", "m", "stride_n", "stride_m"])
def _dense_kernel(
    first,  # [PARTS, n, rank] left factors, or the (n, m) matrix
    second,  # [PARTS, m, rank] right factors, or [1] -scale
    own,  # [n] row potential, exponent units
    bias,  # [m, padded with -inf to whole tiles] column potential plus base-2 log weight
    weight,  # [n]
    out,  # [n, m]
    n,
    m,
    stride_n,
    stride_m,
    rank,  # of the factors, a multiple of 16
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PARTS: tl.constexpr,
    AXIS: tl.constexpr,
    ALIGNED: tl.constexpr,
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
        stride_n, stride_m, rank, RANK, BLOCK_R, PARTS, AXIS, ALIGNED,
    )  # fmt: skip
    potential = tl.load(own + rows, mask=rows < n, other=0.0)
    mass = tl.load(weight + rows, mask=rows < n, other=0.0)
    p = tl.exp2(x + potential[:, None]) * mass[:, None].to(x.dtype)
    inside = (rows < n)[:, None] & (columns < m)[None, :]
    tl.store(out + rows.to(tl.int64)[:, None] * m + columns[None, :], p, mask=inside)


def dense(plan: KernelPlan) -> Tensor:
    """Build the plan as a matrix, shape (n, m)."""
    cost, (n, m) = plan.cost, plan.cost.shape
    own, bias = plan.row_potential(), plan.column_bias()
    out = own.new_empty((n, m))
    # a matrix is read and written along its rows; products want square tiles
    blocks = Blocks(8, 256, 4, 1) if cost.rank == 0 else Blocks(64, 64, 4, 2)
    launch(
        _dense_kernel, (tiles_of(n, blocks.n), tiles_of(m, blocks.m)),
        cost.first, cost.second, own, bias, plan.marginals.a, out, n, m, *cost.strides,
        **cost.constants(), BLOCK_N=blocks.n, BLOCK_M=blocks.m, **launch_options(blocks),
    )  # fmt: skip
    return out
