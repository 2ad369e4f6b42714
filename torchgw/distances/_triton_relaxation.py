"""Edge relaxation in one kernel: one pass over all sources, or all passes for each source."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torchgw._launch import launch

__all__ = ["relax_", "relax_rows_"]


@triton.jit
def _relax_kernel(
    distance,  # [n, s] path lengths so far, shortened in place
    neighbour,  # [n, WIDTH] int64 vertices
    length,  # [n, WIDTH] edge lengths
    changed,  # [1] int32, set to 1 where a path became shorter
    n,
    s,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Shorten paths by their last edge.

    Programs read what others are writing. Lengths only fall, towards the same least fixed point in
    any order, so a stale one costs a later pass and nothing else.
    """
    vertex = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    source = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    here = vertex < n
    inside = here[:, None] & (source < s)[None, :]
    at = distance + vertex[:, None] * s + source[None, :]
    old = tl.load(at, mask=inside, other=0.0)
    best = old
    for k in range(WIDTH):
        other = tl.load(neighbour + vertex * WIDTH + k, mask=here, other=0)
        edge = tl.load(length + vertex * WIDTH + k, mask=here, other=0.0)
        path = tl.load(distance + other[:, None] * s + source[None, :], mask=inside, other=0.0)
        best = tl.minimum(best, path + edge[:, None])
    shorter = best < old
    tl.store(at, best, mask=inside & shorter)
    if tl.max(tl.max(shorter.to(tl.int32), 1), 0) > 0:
        tl.store(changed, 1)


@triton.jit
def _relax_rows_kernel(
    distance,  # [s, n] path lengths so far, shortened in place
    neighbour,  # [n, WIDTH] int64 vertices
    length,  # [n, WIDTH] edge lengths
    n,
    WIDTH: tl.constexpr,
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
            for k in range(WIDTH):
                other = tl.load(neighbour + vertex * WIDTH + k, mask=inside, other=0)
                edge = tl.load(length + vertex * WIDTH + k, mask=inside, other=0.0)
                best = tl.minimum(best, tl.load(row + other, mask=inside, other=0.0) + edge)
            shorter = inside & (best < old)
            tl.store(row + vertex, best, mask=shorter)
            changed = tl.maximum(changed, tl.max(shorter.to(tl.int32), 0))


def relax_(distance: Tensor, neighbour: Tensor, length: Tensor, changed: Tensor) -> None:
    """Shorten every path of shape (n, s) by its best last edge, and note whether any became so."""
    n, s = distance.shape
    block_s = min(32, triton.next_power_of_2(s))
    block_n = 256 // block_s
    launch(
        _relax_kernel, (triton.cdiv(n, block_n), triton.cdiv(s, block_s)),
        distance, neighbour, length, changed, n, s, WIDTH=neighbour.shape[1],
        BLOCK_N=block_n, BLOCK_S=block_s, num_warps=4,
    )  # fmt: skip


def relax_rows_(distance: Tensor, neighbour: Tensor, length: Tensor) -> None:
    """Shorten every path of shape (s, n) until it is shortest, by one launch."""
    s, n = distance.shape
    block = min(1024, triton.next_power_of_2(n))
    launch(
        _relax_rows_kernel, (s,),
        distance, neighbour, length, n, WIDTH=neighbour.shape[1], BLOCK=block,
        num_warps=max(1, min(8, block // 64)),
    )  # fmt: skip
