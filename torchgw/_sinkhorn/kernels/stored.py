# mypy: disable-error-code="assignment"
"""A full Sinkhorn iteration that reads a stored kernel once, in Triton.

The kernel E of :mod:`torchgw._sinkhorn.kernels.softmin` (T2) is made once from a cost matrix. A
program then holds a row of it on chip: its sum gives the new row scaling, and the rescaled row is
added to column sums that stay in registers over all rows of the program. A small second kernel adds
the column sums of the programs in a fixed order and gives the new column scalings.
"""

from bisect import bisect_left
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from torchgw._sinkhorn.kernels.operands import Blocks, launch_options, multiprocessors, tiles_of
from torchgw._sinkhorn.kernels.softmin import KernelSide, Rule, rescaled, update, usable
from torchgw._sinkhorn.problem import ROW_BYTES, DenseCost
from torchgw._tensors.ahead import launch

# Tiles of a row that a sweep is compiled for, the last of which may be empty; more are as many as
# there are. [L363]
_TILES = (1, 2, 3, 4, 6, 8)
# Rows of E begin at multiples of so many entries, so that all loads are 16 bytes wide. [L38]
_PITCH = 32


class SweepShape(NamedTuple):
    """How the fused kernel is launched."""

    width: int  # columns of a tile
    warps: int
    programs: int
    ahead: int  # how many tiles of the next row to load while a row is summed, all at most
    held: bool  # hold a row in registers, or read it twice (the second time from a cache)


@triton.jit(do_not_specialize=["n", "m", "stride_n"])
def _store_kernel(
    matrix,  # (n, m) cost, any strides
    scale,  # [1] log2(e) / epsilon, float64
    row,  # [n] row potentials p of (T2)
    column,  # [m, padded with -inf] column potentials q of (T2)
    stored,  # [n, pitch]
    n,
    m,
    pitch,  # a multiple of 32
    stride_n,
    stride_m,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Store E, zero in the columns from m to the pitch."""
    kind: tl.constexpr = stored.dtype.element_ty
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    at = matrix + i.to(tl.int64)[:, None] * stride_n + j.to(tl.int64)[None, :] * stride_m
    cost = tl.load(at, mask=(i < n)[:, None] & (j < m)[None, :], other=0.0)
    p = tl.load(row + i, mask=i < n, other=0.0)
    q = tl.load(column + j, mask=j < pitch, other=0.0)
    entries = tl.exp2((p[:, None] + q[None, :]) - cost * tl.load(scale).to(kind))
    at = stored + i.to(tl.int64)[:, None] * pitch + j[None, :]
    tl.store(at, entries, mask=(i < n)[:, None] & (j < pitch)[None, :])


@triton.jit
def _tile(
    base,  # pointer to a row
    lane,  # [WIDTH] columns
    pitch,
    LAST: tl.constexpr,  # whether the tile may reach beyond the row
    POLICY: tl.constexpr,
):
    """Load a tile of one row."""
    if POLICY == "cg":
        return tl.load(base + lane, mask=lane < pitch, other=0.0, cache_modifier=".cg")
    if LAST:
        return tl.load(base + lane, mask=lane < pitch, other=0.0, eviction_policy=POLICY)
    else:  # noqa: RET505 - Triton compiles both branches unless they are exclusive
        return tl.load(base + lane, eviction_policy=POLICY)


@triton.jit(do_not_specialize=["n", "backwards"])
def _sweep_kernel(
    stored,  # [n, pitch] E, zero beyond column m
    column_feed,  # [pitch] weights of the columns times their scalings, zero beyond column m
    shift,  # [n] these six as in update, for the rows
    control,  # [2]
    weight,  # [n]
    scaling,  # [n]
    feed,  # [n]
    bad,  # [1] int32
    partial,  # [programs, pitch] column sums of each program
    n,
    pitch,  # a multiple of 32
    backwards,  # 1 from the last row to the first, or 0
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    FULL: tl.constexpr,  # tiles at least that end within the row
    AHEAD: tl.constexpr,
    HELD: tl.constexpr,
):
    """Update the scalings of the rows pid, pid + programs, ... and add up their columns."""
    first = tl.program_id(0)
    step = tl.num_programs(0)
    kind: tl.constexpr = partial.dtype.element_ty
    lane = tl.arange(0, WIDTH)
    tau = tl.load(control)
    relaxation = tl.load(control + 1)
    once: tl.constexpr = "evict_first" if HELD else ""
    sums = ()
    ahead = ()
    turn = tl.minimum(first, n - 1)
    row = tl.where(backwards != 0, n - 1 - turn, turn)
    base = stored + tl.cast(row, tl.int64) * pitch
    for k in tl.static_range(TILES):
        if k < AHEAD:
            ahead = ahead + (_tile(base, k * WIDTH + lane, pitch, k >= FULL, once),)
        sums = sums + (tl.zeros((WIDTH,), kind),)
    unusable = 0
    old = tl.load(scaling + row)
    mass = tl.load(weight + row)
    moved = tl.load(shift + row)
    for turn in tl.range(first, n, step):
        row = tl.where(backwards != 0, n - 1 - turn, turn)
        base = stored + tl.cast(row, tl.int64) * pitch
        held = ()
        spread = tl.zeros((WIDTH,), kind)
        for k in tl.static_range(TILES):
            x = (
                ahead[k]
                if k < AHEAD
                else _tile(
                    base, k * WIDTH + lane, pitch, k >= FULL,
                    "evict_first" if HELD else "evict_last",
                )
            )  # fmt: skip
            spread += x * _tile(column_feed, k * WIDTH + lane, pitch, k >= FULL, "")
            if HELD:
                held = held + (x,)
        # what the next row needs is loaded before this row's sum is waited for; the last row of a
        # program loads itself again
        turn = tl.where(turn + step < n, turn + step, turn)
        following = tl.where(backwards != 0, n - 1 - turn, turn)
        next_base = stored + tl.cast(following, tl.int64) * pitch
        ahead = ()
        for k in tl.static_range(AHEAD):
            ahead = ahead + (_tile(next_base, k * WIDTH + lane, pitch, k >= FULL, once),)
        next_old = tl.load(scaling + following)
        next_mass = tl.load(weight + following)
        next_moved = tl.load(shift + following)
        log_sum = tl.log2(tl.where(mass > 0, tl.sum(spread), 1.0))
        new = rescaled(log_sum, old, moved, tau, relaxation)
        unusable |= (mass > 0) & (usable(log_sum, new) == 0)
        share = mass * tl.exp2(new)
        tl.store(scaling + row, new)
        tl.store(feed + row, share)
        added = ()
        for k in tl.static_range(TILES):
            y = held[k] if HELD else _tile(base, k * WIDTH + lane, pitch, k >= FULL, "evict_first")
            added = added + (sums[k] + y * share,)
        sums = added
        old, mass, moved = next_old, next_mass, next_moved
    for k in tl.static_range(TILES):
        column = k * WIDTH + lane
        tl.store(partial + first.to(tl.int64) * pitch + column, sums[k], mask=column < pitch)
    tl.store(bad, 1, mask=unusable > 0)


@triton.jit(do_not_specialize=["programs", "m"])
def _columns_kernel(
    partial,  # [programs, pitch]
    shift,  # [m] these six as in update, for the columns
    control,  # [2]
    weight,  # [m]
    scaling,  # [m]
    feed,  # [m]
    bad,  # [1] int32
    programs,
    m,
    pitch,  # a multiple of 32
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the column sums of all programs and update the column scalings."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), partial.dtype.element_ty)
    for begin in range(0, programs, ROWS):
        program = begin + tl.arange(0, ROWS)
        at = partial + program.to(tl.int64)[:, None] * pitch + column[None, :]
        inside = (program < programs)[:, None] & (column < pitch)[None, :]
        total += tl.load(at, mask=inside, other=0.0)
    update(tl.sum(total, 0), column, column < m, shift, control, weight, scaling, feed, bad)


def fits(cost: DenseCost) -> bool:
    """Whether a row's column sums fit on chip; wider matrices take two passes per iteration."""
    return _pitch(cost.shape[1]) * cost.dtype.itemsize <= ROW_BYTES


def sweep_shape(cost: DenseCost) -> SweepShape:
    """Choose the launch shape for a matrix; measurements are in OPTIMIZATION_LOG.md."""
    # A tile gives each thread 16 bytes. Of the 128 registers per thread that 16 warps leave, a row
    # of 64 KiB takes 32 for its column sums, 32 for itself and 32 for the next row. Of wider rows
    # only four tiles are loaded ahead, and from 96 KiB on they are read again from the first-level
    # cache.
    (n, m), size = cost.shape, cost.dtype.itemsize
    row = _pitch(m) * size
    warps = 4 if row <= 2**13 else 8 if row <= 2**15 else 16
    return SweepShape(
        width=warps * 32 * (16 // size), warps=warps,
        programs=min(n, multiprocessors(cost.device) * (1 if warps == 16 else 2)),
        ahead=16 if row <= 2**16 else 4, held=row <= 96 * 2**10,
    )  # fmt: skip


class StoredKernel:
    """The kernel E of a matrix, and the iteration over it."""

    def __init__(self, cost: DenseCost, shape: SweepShape) -> None:
        self.shape = shape
        n, m = cost.shape
        self.matrix = cost.matrix.new_empty((n, _pitch(m)))
        self._partial = cost.matrix.new_empty((shape.programs, _pitch(m)))

    def store(self, cost: DenseCost, f: KernelSide, g: KernelSide, scale: Tensor) -> None:
        """Make E from a cost of the same shape and the potentials where the sweeps begin."""
        (n, m), pitch = cost.shape, self.matrix.shape[1]
        launch(
            _store_kernel, (tiles_of(n, 32), tiles_of(pitch, 128)),
            cost.matrix, scale, f.start, g.start, self.matrix, n, m, pitch, *cost.matrix.stride(),
            BLOCK_N=32, BLOCK_M=128, **launch_options(Blocks(32, 128, 8, 1)),
        )  # fmt: skip

    def iterate(
        self, f: KernelSide, g: KernelSide, rules: tuple[Rule, Rule], bad: Tensor, turn: int
    ) -> None:
        """Update both sides; every other turn begins with the rows that the cache still holds."""
        shape, (n, pitch), m = self.shape, self.matrix.shape, len(g.weight)
        tiles, full = _tiles(pitch, shape.width)
        launch(
            _sweep_kernel, (shape.programs,),
            self.matrix, g.feed, *rules[0], f.weight, f.scaling, f.feed, bad, self._partial,
            n, pitch, turn % 2, WIDTH=shape.width, TILES=tiles, FULL=full,
            AHEAD=min(shape.ahead, tiles), HELD=shape.held,
            **launch_options(Blocks(1, shape.width, shape.warps, 1)),
        )  # fmt: skip
        launch(
            _columns_kernel, (tiles_of(m, 16),),
            self._partial, *rules[1], g.weight, g.scaling, g.feed, bad, shape.programs, m, pitch,
            ROWS=512, BLOCK=16, **launch_options(Blocks(512, 16, 8, 1)),
        )  # fmt: skip


def _pitch(m: int) -> int:
    return _PITCH * tiles_of(m, _PITCH)


def _tiles(pitch: int, width: int) -> tuple[int, int]:
    """Choose how many tiles hold a row, of few numbers, and how many of them it surely fills."""
    tiles = tiles_of(pitch, width)
    if tiles > _TILES[-1]:
        return tiles, tiles - 1
    place = bisect_left(_TILES, tiles)
    return _TILES[place], _TILES[place - 1] if place else 0
