# mypy: disable-error-code="assignment"
"""A full Sinkhorn iteration over a stored matrix that reads it once, in Triton.

A program holds a row of the kernel E of :mod:`torchgw._triton_softmin` (T2) on chip: its sum gives
the new row scaling, and the rescaled row is added to column sums that stay in registers over all
rows of the program. A small second kernel adds the column sums of the programs in a fixed order and
gives the new column scalings. E is made anew from the cost in every iteration, or stored once
(``SweepPlan.stored``), which trades the exponentials for one more matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchgw._cost import DenseCost
from torchgw._triton_operands import Blocks, Operands, launch_options, multiprocessors
from torchgw._triton_softmin import Rule, Side, update

__all__ = ["SweepPlan", "fits", "iteration", "sweep_plan"]

# Widest row whose column sums fit the registers of a multiprocessor beside what a row needs: wider
# ones spill, and two passes over the matrix are faster.
_WIDEST = {torch.float32: 16384, torch.float64: 12288}


class SweepPlan(NamedTuple):
    """How the fused kernel is launched."""

    width: int  # columns of a tile
    tiles: int  # tiles of a row
    warps: int
    programs: int
    stages: int  # rows in flight through shared memory; 1 loads straight to registers
    aligned: bool  # read 16 bytes at a time whatever the alignment of the rows
    reread: bool  # read a row twice (the second time from a cache) instead of holding it
    keep: int  # how many of the two column vectors (weights, potentials) registers hold
    stored: bool  # store E instead of making it from the cost


@triton.jit
def _row_tile(
    base,  # pointer to the row, at or up to 3 entries before its first column
    lane,  # [WIDTH] position in the row of tiles
    lead,  # entries between base and the first column
    m,
    ALIGNED: tl.constexpr,  # entries per 16 bytes if base is aligned to them, else 0
    EDGE: tl.constexpr,  # whether the tile may reach over an end of the row
    POLICY: tl.constexpr,
):
    """Load a tile of one row; entries outside the row are finite, whatever lies there."""
    if ALIGNED > 0:
        # whole 16-byte groups: the mask is constant on a group, so loads stay wide
        limit = tl.multiple_of(tl.cdiv(lead + m, ALIGNED) * ALIGNED, ALIGNED)
        x = tl.load(base + lane, mask=lane < limit, other=0.0, eviction_policy=POLICY)
        if EDGE:
            x = tl.where((lane >= lead) & (lane < lead + m), x, 0.0)
        return x
    else:  # noqa: RET505 - Triton compiles both branches unless they are exclusive
        return tl.load(base + lane, mask=lane < m, other=0.0, eviction_policy=POLICY)


@triton.jit
def _column_tile(
    values,  # [m]
    column,  # [WIDTH] column numbers, also outside of [0, m)
    m,
    outside: tl.constexpr,
):
    """Load a value per column."""
    return tl.load(values + column, mask=(column >= 0) & (column < m), other=outside)


@triton.jit
def _sweep_kernel(
    matrix,  # (n, m) cost, rows contiguous; E if STORED
    scale,  # [1] -log2(e) / epsilon
    start,  # [n] row potentials p of (T2)
    column_start,  # [m] column potentials q of (T2)
    column_feed,  # [m] weights of the columns times their scalings
    shift,  # [n] these six as in update, for the rows
    control,  # [2]
    weight,  # [n]
    scaling,  # [n]
    feed,  # [n]
    bad,  # [1] int32
    partial,  # [programs, m] column sums of each program
    n,
    m,
    stride,  # of a row, in entries
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    ALIGNED: tl.constexpr,
    REREAD: tl.constexpr,
    KEEP: tl.constexpr,
    STORED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Update the scalings of the rows pid, pid + programs, ... and add up their columns."""
    first = tl.program_id(0)
    step = tl.num_programs(0)
    kind: tl.constexpr = partial.dtype.element_ty
    lane = tl.arange(0, WIDTH)
    lead = 0
    if ALIGNED > 0:
        # programs is a multiple of ALIGNED, so that all rows of a program have one alignment
        lead = ((first.to(tl.int64) * stride) % ALIGNED).to(tl.int32)
    factor = tl.load(scale)
    tau = tl.load(control)
    relaxation = tl.load(control + 1)
    hidden: tl.constexpr = -float("inf")
    q = ()
    w = ()
    sums = ()
    for k in tl.static_range(TILES):
        if KEEP >= 1:
            w = w + (_column_tile(column_feed, k * WIDTH + lane - lead, m, 0.0),)
        if KEEP >= 2 and not STORED:
            q = q + (_column_tile(column_start, k * WIDTH + lane - lead, m, hidden),)
        sums = sums + (tl.zeros((WIDTH,), kind),)
    unusable = 0
    own = tl.load(start + first, mask=first < n, other=0.0)
    old = tl.load(scaling + first, mask=first < n, other=0.0)
    for row in tl.range(first, n, step, num_stages=STAGES):
        # loaded one row ahead, so that their latency is hidden
        following = row + step
        next_own = tl.load(start + following, mask=following < n, other=0.0)
        next_old = tl.load(scaling + following, mask=following < n, other=0.0)
        mass = tl.load(weight + row)
        moved = tl.load(shift + row)
        offset = tl.cast(row, tl.int64) * stride - lead
        if ALIGNED > 0:
            offset = tl.multiple_of(offset, ALIGNED)
        held = ()
        spread = tl.zeros((WIDTH,), kind)
        for k in tl.static_range(TILES):
            x = _row_tile(
                matrix + offset, k * WIDTH + lane, lead, m, ALIGNED, k == 0 or k == TILES - 1,
                "evict_last" if REREAD else "evict_first",
            )  # fmt: skip
            if not STORED:
                qk = (
                    q[k]
                    if KEEP >= 2
                    else _column_tile(column_start, k * WIDTH + lane - lead, m, hidden)
                )
                x = tl.exp2(x * factor + (qk + own))
            wk = w[k] if KEEP >= 1 else _column_tile(column_feed, k * WIDTH + lane - lead, m, 0.0)
            spread += x * wk
            if not REREAD:
                held = held + (x,)
        log_sum = tl.log2(tl.sum(spread))
        unusable |= (tl.abs(log_sum) < 83.0) == 0
        new = old + relaxation * ((moved - tau * log_sum) - old)
        share = mass * tl.exp2(new)
        tl.store(scaling + row, new)
        tl.store(feed + row, share)
        added = ()
        for k in tl.static_range(TILES):
            if REREAD:
                x = _row_tile(
                    matrix + offset, k * WIDTH + lane, lead, m, ALIGNED,
                    k == 0 or k == TILES - 1, "evict_first",
                )  # fmt: skip
                if not STORED:
                    qk = (
                        q[k]
                        if KEEP >= 2
                        else _column_tile(column_start, k * WIDTH + lane - lead, m, hidden)
                    )
                    x = tl.exp2(x * factor + (qk + own))
                added = added + (sums[k] + x * share,)
            else:
                added = added + (sums[k] + held[k] * share,)
        sums = added
        own, old = next_own, next_old
    for k in tl.static_range(TILES):
        column = k * WIDTH + lane - lead
        inside = (column >= 0) & (column < m)
        tl.store(partial + first.to(tl.int64) * m + column, sums[k], mask=inside)
    tl.store(bad, 1, mask=unusable > 0)


@triton.jit
def _columns_kernel(
    partial,  # [programs, m]
    shift,  # [m] these six as in update, for the columns
    control,  # [2]
    weight,  # [m]
    scaling,  # [m]
    feed,  # [m]
    bad,  # [1] int32
    programs,
    m,
    BLOCK: tl.constexpr,
):
    """Add the column sums of all programs and update the column scalings."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < m
    total = tl.zeros((256, BLOCK), partial.dtype.element_ty)
    for begin in range(0, programs, 256):
        program = begin + tl.arange(0, 256)
        at = partial + program.to(tl.int64)[:, None] * m + column[None, :]
        total += tl.load(at, mask=(program < programs)[:, None] & inside[None, :], other=0.0)
    update(tl.sum(total, 0), column, inside, shift, control, weight, scaling, feed, bad)


def fits(cost: DenseCost) -> bool:
    """Whether a row's column sums fit on chip; wider matrices take two passes per iteration."""
    return cost.shape[1] <= _WIDEST[cost.dtype] - 4


def sweep_plan(cost: Operands) -> SweepPlan:
    """Return the launch shape for a matrix; measurements are in OPTIMIZATION_LOG.md.

    A tile gives each thread 16 bytes or a multiple, tiles cover a row closely (12,001 columns take
    three of 4,096), and one program per multiprocessor has all its registers. Programs come in
    multiples of 4, so that rows of a program are aligned alike.
    """
    wide = cost.dtype == torch.float64
    m = cost.shape[1] + 3
    unit = 2 if wide else 4
    warps = 4 if m <= 2048 else 8 if m <= 4096 else 16
    width = warps * 32 * unit
    while triton.cdiv(m, width) > 4:
        width *= 2
    programs = multiprocessors(cost.first.device) * (16 // warps) // 4 * 4
    # In float64 exponentials are slow, and a wide row leaves no registers to make them in.
    stored = wide and m > 8192
    return SweepPlan(
        width=width,
        tiles=triton.cdiv(m, width),
        warps=warps,
        programs=max(4, programs),
        stages=1 if wide else 2,
        aligned=cost.first.data_ptr() % 16 == 0,
        reread=stored,
        keep=1 if wide else 2,
        stored=stored,
    )


def iteration(
    cost: Operands, f: Side, g: Side, plan: SweepPlan | None = None
) -> Callable[[Side, Side, Rule, Rule, Tensor], None]:
    """Return what runs one iteration over a matrix with contiguous rows.

    Parameters
    ----------
    cost : Operands of a matrix, shape (n, m)
    f, g : Side
        At the start of the sweep.
    plan : SweepPlan, optional
        Override of the table, for measurements and tests.
    """
    plan = plan or sweep_plan(cost)
    n, m = cost.shape
    partial = cost.second.new_empty((plan.programs, m))
    matrix, stride = cost.first, cost.strides[0]
    if plan.stored:
        matrix = torch.addcmul(f.start[:n, None], matrix, cost.second)
        matrix = matrix.add_(g.start[:m]).exp2_()
        stride = m
    unit = 16 // cost.dtype.itemsize if plan.aligned else 0
    block = 32

    def iterate(f: Side, g: Side, rule_f: Rule, rule_g: Rule, bad: Tensor) -> None:
        _sweep_kernel[(plan.programs,)](
            matrix, cost.second, f.start, g.start, g.feed, *rule_f, f.weight, f.scaling, f.feed,
            bad, partial, n, m, stride, WIDTH=plan.width, TILES=plan.tiles, ALIGNED=unit,
            REREAD=plan.reread, KEEP=plan.keep, STORED=plan.stored, STAGES=plan.stages,
            **launch_options(Blocks(1, plan.width, plan.warps, 1)),
        )  # fmt: skip
        _columns_kernel[(triton.cdiv(m, block),)](
            partial, *rule_g, g.weight, g.scaling, g.feed, bad, plan.programs, m, BLOCK=block,
            **launch_options(Blocks(256, block, 8, 1)),
        )  # fmt: skip

    return iterate
