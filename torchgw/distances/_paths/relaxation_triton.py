"""Edge relaxation: a round over the tiles where something may change, or all in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchgw._tensors.ahead import launch

# Vertices in a tile. [L157]
ROWS = 64
# Tiles that a program looks at to list those that are due, and programs that visit these. [L540]
_LISTED = 1024
_PROGRAMS = 1056
# [L831]
_WARPS = 8


@triton.jit(do_not_specialize=["entries"], do_not_specialize_on_alignment=["now", "later", "count"])
def _list_kernel(
    now,  # [s, tiles] float32, shortest path that a visit would find
    later,  # [s, tiles] the same for the next round, overwritten
    threshold,  # [1] float32, with ``ahead`` the longest path that is extended in this round
    ahead,  # float
    due,  # [s * tiles] int32 out, entries that this round visits, in no order
    count,  # [1] int32, how many, zero at first
    entries,
    BLOCK: tl.constexpr,
):
    """List the tiles that are due; the others wait for the next round."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < entries
    pending = tl.load(now + at, mask=inside, other=float("inf"))
    ready = (pending < float("inf")) & (pending <= tl.load(threshold) + ahead)
    tl.store(later + at, tl.where(ready, float("inf"), pending), mask=inside)
    one = ready.to(tl.int32)
    found = tl.sum(one, axis=0)
    if found > 0:
        first = tl.atomic_add(count, found, sem="relaxed")
        tl.store(due + first + tl.cumsum(one, axis=0) - one, at, mask=ready)


@triton.jit(
    do_not_specialize=["n", "width", "tiles"], do_not_specialize_on_alignment=["later", "count"]
)
def _relax_kernel(
    distance,  # [s, n] path lengths so far, shortened in place
    neighbour,  # [n, width] int32 vertices
    length,  # [n, width] edge lengths
    later,  # [s, tiles] int32, bits of the shortest path that a visit of the next round would find
    due,  # [s * tiles] int32, entries to visit
    count,  # [1] int32, how many
    n,
    width,
    tiles,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Shorten the paths of one source to a tile by their last edges until it settles."""
    # Programs read what others are writing. Lengths only fall, towards the same least fixed point
    # in any order. Whoever shortens a path has the tiles around it visited again where that
    # shortens another one: what it reads of them is never too short, so that no visit is missed.
    column = tl.arange(0, WIDTH)
    for number in range(tl.program_id(0), tl.load(count), tl.num_programs(0)):
        entry = tl.load(due + number)
        source = entry // tiles
        tile = entry - source * tiles
        paths = distance + source.to(tl.int64) * n
        waiting = later + source * tiles
        local = tl.arange(0, ROWS)
        here = tile * ROWS + local < n
        mine = paths + tile * ROWS + local
        known = here[:, None] & (column < width)[None, :]
        first = (tile * ROWS).to(tl.int64) * width
        edge = local[:, None] * width + column[None, :]
        other = tl.load(neighbour + first + edge, mask=known, other=0)
        step = tl.load(length + first + edge, mask=known, other=float("inf"))
        before = tl.load(mine, mask=here, other=0.0)
        going = 1
        while going > 0:
            old = tl.load(mine, mask=here, other=0.0)
            path = tl.load(paths + other, mask=known, other=0.0) + step
            best = tl.minimum(old, tl.min(path, axis=1))
            shorter = here & (best < old)
            tl.store(mine, best, mask=shorter)
            # the next pass of this program reads what all of its threads wrote
            tl.debug_barrier()
            going = tl.max(shorter.to(tl.int32), axis=0)
        after = tl.load(mine, mask=here, other=0.0)
        near = other // ROWS
        wake = known & (after < before)[:, None] & (near != tile)
        reach = after[:, None] + step
        wake = wake & (reach < tl.load(paths + other, mask=wake, other=0.0))
        # lengths are not negative: their bits order them. The next launch sees all of them, so that
        # none has to wait for what this program wrote before.
        bits = reach.to(tl.float32).to(tl.int32, bitcast=True)
        tl.atomic_min(waiting + near, bits, mask=wake, sem="relaxed")


@triton.jit(do_not_specialize=["n", "width"])
def _relax_rows_kernel(
    distance,  # [s, n] path lengths so far, shortened in place
    neighbour,  # [n, width] int32 vertices
    length,  # [n, width] edge lengths
    n,
    width,
    BLOCK: tl.constexpr,
):
    """Shorten the paths of one source until no edge does."""
    # A row belongs to one program, whose barrier makes a pass visible to the next. A pass that
    # changes nothing has read nothing stale, so the last one is a proof.
    row = distance + tl.program_id(0).to(tl.int64) * n
    changed = 1
    while changed > 0:
        tl.debug_barrier()
        changed = 0
        for start in range(0, n, BLOCK):
            vertex = start + tl.arange(0, BLOCK)
            inside = vertex < n
            old = tl.load(row + vertex, mask=inside, other=0.0)
            best = old
            for k in range(width):
                other = tl.load(neighbour + vertex * width + k, mask=inside, other=0)
                edge = tl.load(length + vertex * width + k, mask=inside, other=0.0)
                best = tl.minimum(best, tl.load(row + other, mask=inside, other=0.0) + edge)
            shorter = inside & (best < old)
            tl.store(row + vertex, best, mask=shorter)
            changed = tl.maximum(changed, tl.max(shorter.to(tl.int32), 0))


def relax_(
    distance: Tensor,
    neighbour: Tensor,
    length: Tensor,
    pending: tuple[Tensor, Tensor],
    threshold: Tensor,
    ahead: float,
    due: Tensor,
    count: Tensor,
) -> None:
    """Run one round over paths of shape (s, n)."""
    # `pending` are two tables of shape (s, tiles): of this round, and of the next. Tiles whose
    # shortest pending path is longer than `threshold + ahead` wait. `due` has room for all tiles,
    # int32, and `count` is a zero.
    now, later = pending
    n, tiles, width = distance.shape[1], now.shape[1], neighbour.shape[1]
    launch(
        _list_kernel, (triton.cdiv(now.numel(), _LISTED),),
        now, later, threshold, ahead, due, count, now.numel(), BLOCK=_LISTED, num_warps=4,
    )  # fmt: skip
    launch(
        _relax_kernel, (min(_PROGRAMS, now.numel()),),
        distance, neighbour, length, later.view(torch.int32), due, count, n, width, tiles,
        ROWS=ROWS, WIDTH=max(32, triton.next_power_of_2(width)), num_warps=_WARPS,
    )  # fmt: skip


def relax_rows_(distance: Tensor, neighbour: Tensor, length: Tensor) -> None:
    """Shorten every path of shape (s, n) until it is shortest, by one launch."""
    s, n = distance.shape
    block = min(1024, triton.next_power_of_2(n))
    launch(
        _relax_rows_kernel, (s,),
        distance, neighbour, length, n, neighbour.shape[1], BLOCK=block,
        num_warps=max(1, min(8, block // 64)),
    )  # fmt: skip
