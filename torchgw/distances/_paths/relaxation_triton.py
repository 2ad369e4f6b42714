"""Edge relaxation: a round over the tiles where something may change, or all in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torchgw._tensors.launch import launch

__all__ = ["ROWS", "SOURCES", "relax_", "relax_rows_"]

# Vertices and sources in a tile. [L157]
ROWS = 64
SOURCES = 8
# Passes over a tile before it is its neighbours' turn. [L157]
_PASSES = 16
# Tiles that a program looks after: those that nothing passes cost little then. [L510]
_TILES = 8


@triton.jit(
    do_not_specialize=["n", "width", "tiles"],
    do_not_specialize_on_alignment=["now", "later"],
)
def _relax_kernel(
    distance,  # [n, s] path lengths so far, shortened in place
    neighbour,  # [n, width] int32 vertices
    length,  # [n, width] edge lengths
    now,  # [tiles, source blocks] float32, shortest path that a visit would extend; cleared
    later,  # [tiles, source blocks] the same for the next round
    threshold,  # [1] float32, with ``ahead`` the longest path that is extended in this round
    ahead,  # float
    n,
    s,  # a multiple of 16
    width,  # a multiple of TOGETHER
    tiles,
    PASSES: tl.constexpr,
    ROWS: tl.constexpr,
    SOURCES: tl.constexpr,
    TILES: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Shorten the paths of some tiles by their last edges until each settles.

    Programs read what others are writing. Lengths only fall, towards the same least fixed point in
    any order, and whoever shortens a path has the tiles around it visited again.
    """
    # the tiles of a program are far from each other, so that few of them are due together
    number, block = tl.program_id(0), tl.program_id(1)
    blocks = tl.num_programs(1)
    several = tl.arange(0, TILES)
    each = number + several * tl.num_programs(0)
    place = each * blocks + block
    pending = tl.load(now + place, mask=each < tiles, other=float("inf"))
    # all threads have read it before one of them clears it
    tl.debug_barrier()
    if tl.min(pending, axis=0) == float("inf"):
        return
    tl.store(now + place, float("inf"), mask=pending < float("inf"))
    due = (pending <= tl.load(threshold) + ahead).to(tl.int32)
    tl.atomic_min(later + place, pending, mask=(pending < float("inf")) & (due == 0))
    source = block * SOURCES + tl.arange(0, SOURCES)
    while tl.max(due, axis=0) > 0:
        chosen = tl.argmax(due, axis=0)
        due = tl.where(several == chosen, 0, due)
        tile = number + chosen * tl.num_programs(0)
        row = tile * ROWS + tl.arange(0, ROWS)
        vertex = row.to(tl.int64)
        here = row < n
        inside = here[:, None] & (source < s)[None, :]
        at = distance + vertex[:, None] * s + source[None, :]
        least = tl.full((ROWS,), float("inf"), tl.float32)
        passes = 0
        going = 1
        again = float("inf")
        while going > 0:
            old = tl.load(at, mask=inside, other=0.0)
            best = old
            for first in range(0, width, TOGETHER):
                for k in tl.static_range(TOGETHER):
                    edge = vertex * width + first + k
                    other = tl.load(neighbour + edge, mask=here, other=0).to(tl.int64)
                    step = tl.load(length + edge, mask=here, other=0.0)
                    path = distance + other[:, None] * s + source[None, :]
                    path = tl.load(path, mask=inside, other=0.0)
                    best = tl.minimum(best, path + step[:, None])
            shorter = best < old
            tl.store(at, best, mask=inside & shorter)
            # the next pass of this program reads what all of its threads wrote
            tl.debug_barrier()
            found = tl.min(tl.where(shorter, best.to(tl.float32), float("inf")), axis=1)
            least = tl.minimum(least, found)
            again = tl.min(found, axis=0)
            passes += 1
            going = ((again < float("inf")) & (passes < PASSES)).to(tl.int32)
        # if the last pass still changed something there has to be another visit
        if again < float("inf"):
            tl.atomic_min(later + tile * blocks + block, again)
        if tl.min(least, axis=0) < float("inf"):
            for k in range(width):
                other = tl.load(neighbour + vertex * width + k, mask=here, other=0) // ROWS
                wake = here & (least < float("inf")) & (other != tile)
                tl.atomic_min(later + other * blocks + block, least, mask=wake)


@triton.jit(do_not_specialize=["n", "width"])
def _relax_rows_kernel(
    distance,  # [s, n] path lengths so far, shortened in place
    neighbour,  # [n, width] int32 vertices
    length,  # [n, width] edge lengths
    n,
    width,
    BLOCK: tl.constexpr,
):
    """Shorten the paths of one source until no edge does.

    A row belongs to one program, whose barrier makes a pass visible to the next. A pass that
    changes nothing has read nothing stale, so the last one is a proof.
    """
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
    together: int,
) -> None:
    """Run one round over paths of shape (n, s).

    ``pending`` are two tables of shape (tiles, source blocks): of this round, which clears it, and
    of the next. Tiles whose shortest pending path is longer than ``threshold + ahead`` wait. Of the
    columns of ``neighbour``, so many are read together, which divides them.
    """
    (n, s), (tiles, blocks) = distance.shape, pending[0].shape
    launch(
        _relax_kernel, (triton.cdiv(tiles, _TILES), blocks),
        distance, neighbour, length, *pending, threshold, ahead, n, s,
        neighbour.shape[1], tiles, PASSES=_PASSES, ROWS=ROWS, SOURCES=SOURCES, TILES=_TILES,
        TOGETHER=together, num_warps=4,
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
