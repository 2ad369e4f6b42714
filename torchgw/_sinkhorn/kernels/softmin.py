"""One streamed base-2 log-sum-exp in Triton, for stored and for factored costs.

Two forms of it: the half-step of :func:`torchgw._sinkhorn.problem.softmin`, which follows the
maximum, and the half-step of a sweep, which scales one fixed kernel

    E_ij = exp2(p_i + q_j + S_ij),   p, q the potentials when the sweeper was made,           (T2)

by E diag(b 2^v) and its transpose. The log-scalings u, v stay small, so that float32 loses nothing
by adding them to potentials of hundreds: rounding of E is the same in every iteration.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchgw._sinkhorn.kernels.exponents import (
    exponents,
    load_left,
    logsumexp_step,
    walk_column,
    walk_range,
)
from torchgw._sinkhorn.kernels.operands import (
    Blocks,
    Operands,
    Walk,
    launch_options,
    split_columns,
    tiles_of,
    whole,
)
from torchgw._tensors.ahead import launch
from torchgw._tensors.operations import power_of_two


class Rule(NamedTuple):
    """How a row sum s_i of E diag(b 2^v) changes its log-scaling."""

    # u <- u + w (shift - tau log2 s - u), with relaxation w and KL damping tau.

    shift: Tensor  # (n,) (tau - 1) f_i / epsilon log2(e), f the potential of p
    control: Tensor  # (2,) tau, w


class KernelSide(NamedTuple):
    """One side of the problem during a sweep, in exponent units."""

    start: Tensor  # (n, padded with -inf) p of (T2), -inf too where the weight is zero
    weight: Tensor  # (n,)
    scaling: Tensor  # (n,) u, 0 where sweeps start from p
    feed: Tensor  # (n, padded with 0) weight * 2^u: what the other side's sums are weighted by


class Groups(NamedTuple):
    """Where the sums of rows are kept apart by groups of columns."""

    sums: Tensor  # (groups, n or more), zero where no tile of a group is kept
    width: int  # columns of a group, a multiple of the width of a block


@triton.jit
def rescaled(log_sum, old, shift, tau, relaxation):
    """Compute the log-scaling that follows from a sum, as Rule says."""
    return old + relaxation * ((shift - tau * log_sum) - old)


@triton.jit
def usable(log_sum, scaling):
    """Whether a sum kept its digits, and an update stays near the kernel's own potentials."""
    # 2^83 is 1e25, where float32 has lost digits to over- or underflow. Log-scalings within 2^29
    # leave entries of the plan that matter at 2^-58 or more in the kernel. float64 has as many
    # digits left at 2^-800. NaN compares false. [L1882]
    if scaling.dtype == tl.float64:
        return (tl.abs(log_sum) < 900.0) & (tl.abs(scaling) < 400.0)
    else:  # noqa: RET505 - Triton compiles both branches unless they are exclusive
        return (tl.abs(log_sum) < 83.0) & (tl.abs(scaling) < 29.0)


@triton.jit
def update(
    total,  # [BLOCK] sums of whole rows
    place,  # [BLOCK] row numbers
    inside,  # [BLOCK] which of them exist
    shift,  # [n] as in Rule
    control,  # [2]
    weight,  # [n]
    scaling,  # [n] read and written
    feed,  # [n] written
    bad,  # [1] int32, set to 1 where something is not usable
):
    """Turn sums into log-scalings; a point without mass, whose sum is empty, stays put."""
    mass = tl.load(weight + place, mask=inside, other=0.0)
    log_sum = tl.log2(tl.where(mass > 0, total, 1.0))
    old = tl.load(scaling + place, mask=inside, other=0.0)
    moved = tl.load(shift + place, mask=inside, other=0.0)
    new = rescaled(log_sum, old, moved, tl.load(control), tl.load(control + 1))
    tl.store(bad + place * 0, 1, mask=(mass > 0) & (usable(log_sum, new) == 0))
    tl.store(scaling + place, new, mask=inside)
    tl.store(feed + place, mass * tl.exp2(new), mask=inside)


@triton.jit(do_not_specialize=["group_pitch", "group_width", "n", "m", "stride_n", "stride_m"])
def _softmin_kernel(
    first,  # [PARTS, n, rank] left factors, or the (n, m) matrix
    second,  # [PARTS, m, rank] right factors, or [1] -scale
    bias,  # [m, padded with -inf] column potential; online also plus log weight
    feed,  # [m, padded with 0] weights of the columns, read if STABLE
    start,  # [n] row potentials p, read if STABLE
    shift,  # [n] these six as in update, used if STABLE and SPLITS == 1
    control,  # [2]
    weight,  # [n]
    scaling,  # [n]
    feed_out,  # [n]
    bad,  # [1] int32
    partial,  # [splits, n] log-sum, or sum if STABLE, of each share of the columns
    lists,  # [row blocks, 3] those of a walk, read if WALK
    tiles,  # [kept]
    groups,  # [groups, group_pitch] sums over groups of the columns' blocks, if STABLE
    group_pitch,
    group_width,  # points of a group; 0 if sums by group are not wanted
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
    STABLE: tl.constexpr,
    SPLITS: tl.constexpr,
    WALK: tl.constexpr,  # points of a block of the lists; 0 for all columns
    STAGES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Reduce a block of rows over one share of the columns, or over the tiles of a list."""
    rows, begin, end = walk_range(lists, width, m, WALK, BLOCK_N)
    kind: tl.constexpr = bias.dtype.element_ty
    leading, trailing = rows, rows
    if RANK == BLOCK_R:
        leading, trailing = load_left(first, rows, 0, n, RANK, BLOCK_R, PARTS)
    if STABLE:
        own = tl.load(start + rows, mask=rows < n, other=0.0)
    best = tl.full((BLOCK_N,), -float("inf"), kind)
    total = tl.zeros((BLOCK_N,), kind)
    part = tl.zeros((BLOCK_N,), kind)
    last = tl.cast(-1, tl.int32)
    for position in tl.range(begin, end, BLOCK_M, num_stages=STAGES):
        column = walk_column(tiles, position, WALK)
        columns = column + tl.arange(0, BLOCK_M)
        x = exponents(
            first, second, leading, trailing, tl.load(bias + columns), rows, columns, n, m,
            stride_n, stride_m, rank, RANK, BLOCK_R, PARTS, AXIS, ALIGNED,
        )  # fmt: skip
        if STABLE:
            scaled = tl.exp2(x + own[:, None]) * tl.load(feed + columns)[None, :]
            added = tl.sum(scaled, 1)
            total += added
            if group_width > 0:
                group = column // group_width
                part = tl.where(group == last, part, 0.0) + added
                last = group
                tl.store(groups + group.to(tl.int64) * group_pitch + rows, part, mask=rows < n)
        else:
            best, total = logsumexp_step(best, total, x)
    if STABLE and SPLITS == 1:
        update(total, rows, rows < n, shift, control, weight, scaling, feed_out, bad)
    else:
        result = total if STABLE else tl.log2(total) + best
        tl.store(partial + tl.program_id(1).to(tl.int64) * n + rows, result, mask=rows < n)


@triton.jit(do_not_specialize=["n", "splits"])
def _combine_kernel(
    partial,  # [splits, n] sums
    shift,  # [n] these six as in update
    control,  # [2]
    weight,  # [n]
    scaling,  # [n]
    feed,  # [n]
    bad,  # [1] int32
    n,
    splits,
    BLOCK: tl.constexpr,
):
    """Add the shares of each row in a fixed order."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), partial.dtype.element_ty)
    for split in range(splits):
        total += tl.load(partial + tl.cast(split, tl.int64) * n + rows, mask=rows < n, other=0.0)
    update(total, rows, rows < n, shift, control, weight, scaling, feed, bad)


def log_sum_exp(
    cost: Operands,
    bias: Tensor,
    *,
    walk: Walk | None = None,
    blocks: Blocks | None = None,
    splits: int | None = None,
) -> Tensor:
    """Compute log2 sum_j exp2(S_ij + bias_j), shape (n,), following the maximum."""
    # The bias is the column potential plus base-2 log weight in exponents, (m, padded with -inf);
    # the sum is over the tiles of the walk, all unless given. blocks and splits override the
    # tables, for measurements and tests.
    n, m = cost.shape
    walk = walk or whole(bias.device)
    blocks = walk.fit(blocks or softmin_blocks(cost))
    splits, width = split_columns(n, m, blocks, walk, splits)
    partial = bias.new_empty((splits, n))
    # what the kernel does not touch may be any tensor
    launch(
        _softmin_kernel, (walk.programs(n, blocks), splits),
        cost.first, cost.second, bias, bias, bias, bias, bias, bias, bias, bias, bias, partial,
        walk.lists, walk.tiles, bias, 0, 0, n, m, width, *cost.strides, **cost.constants(),
        STABLE=False, SPLITS=1, WALK=walk.width, STAGES=blocks.stages, BLOCK_N=blocks.n,
        BLOCK_M=blocks.m, **launch_options(blocks),
    )  # fmt: skip
    if splits == 1:
        return partial[0]
    best = partial.amax(0)
    shift = torch.where(torch.isfinite(best), best, 0.0)
    return power_of_two(partial - shift).sum(0).log2() + shift


def half_step_(
    cost: Operands,
    rows: KernelSide,
    columns: KernelSide,
    rule: Rule,
    bad: Tensor,
    *,
    walk: Walk | None = None,
    groups: Groups | None = None,
    blocks: Blocks | None = None,
    splits: int | None = None,
) -> None:
    """Update the scalings of the rows from the sums of E diag(columns.feed), (T2)."""
    # bad, shape (1,), int32, is set to one if a sum or a scaling is not usable. With a walk the
    # sums are over its tiles, and groups may take them by group of columns.
    n, m = cost.shape
    walk = walk or whole(bad.device)
    groups = groups or Groups(rows.feed, 0)
    blocks = walk.fit(blocks or softmin_blocks(cost))
    splits, width = split_columns(n, m, blocks, walk, splits)
    partial = rows.weight.new_empty((splits, n)) if splits > 1 else rows.weight
    outcome = (*rule, rows.weight, rows.scaling, rows.feed, bad)
    launch(
        _softmin_kernel, (walk.programs(n, blocks), splits),
        cost.first, cost.second, columns.start, columns.feed, rows.start, *outcome, partial,
        walk.lists, walk.tiles, groups.sums, groups.sums.stride(0), groups.width, n, m, width,
        *cost.strides, **cost.constants(), STABLE=True, SPLITS=min(splits, 2), WALK=walk.width,
        STAGES=blocks.stages, BLOCK_N=blocks.n, BLOCK_M=blocks.m, **launch_options(blocks),
    )  # fmt: skip
    if splits > 1:
        launch(
            _combine_kernel, (tiles_of(n, 256),),
            partial, *outcome, n, splits, BLOCK=256, **launch_options(Blocks(256, 1, 4, 1)),
        )  # fmt: skip


def softmin_blocks(cost: Operands) -> Blocks:
    """Choose the tile of a half-step; measurements are in OPTIMIZATION_LOG.md."""
    # A matrix is read along its contiguous axis. Factored tiles keep exponents in registers: 64 per
    # thread leave room for 16 warps on a multiprocessor, which hide the products behind
    # exponentials.
    if cost.rank == 0:
        return Blocks(4, 1024, 4, 1) if cost.strides[1] == 1 else Blocks(128, 32, 4, 1)
    if cost.precision == "float64":
        return Blocks(64, 64, 8, 2)
    if cost.precision == "float32":
        return Blocks(64, 128, 8, 3)
    if cost.rank > cost.block_rank:
        return Blocks(128, 256, 8, 2)
    return Blocks(128, 128, 4, 2) if cost.rank == 64 else Blocks(64, 128, 4, 2)
