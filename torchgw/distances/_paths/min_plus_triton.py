"""Shortest paths of all pairs by blocks: Floyd and Warshall's algorithm on a symmetric matrix."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchgw._tensors.ahead import launch

# Intermediate vertices that one step adds, and the side of the tiles that it updates. [L306]
_PIVOT = 64
_TILE = 128


@triton.jit
def _pivot_kernel(
    distance,  # [n, n]
    first,  # first intermediate vertex of the step, a multiple of PIVOT
    n,  # a multiple of 128
    PIVOT: tl.constexpr,
):
    """Close the block of the intermediate vertices."""
    here = tl.arange(0, PIVOT)
    at = distance + (first + here[:, None]).to(tl.int64) * n + first + here[None, :]
    block = tl.load(at)
    for k in range(PIVOT):
        row = tl.min(tl.where(here[:, None] == k, block, float("inf")), axis=0)
        column = tl.min(tl.where(here[None, :] == k, block, float("inf")), axis=1)
        block = tl.minimum(block, column[:, None] + row[None, :])
    tl.store(at, block)


@triton.jit
def _panel_kernel(
    distance,  # [n, n]
    first,  # a multiple of PIVOT
    n,  # a multiple of 128
    PIVOT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Close the paths from the intermediate vertices to a tile of others, and back."""
    here = tl.arange(0, PIVOT)
    there = tl.program_id(0) * TILE + tl.arange(0, TILE)
    rows = distance + first.to(tl.int64) * n
    block = tl.load(rows + here[:, None].to(tl.int64) * n + there[None, :])
    for k in range(PIVOT):
        # the closed block is symmetric: its column is its row
        inner = tl.load(rows + k * n + first + here)
        outer = tl.load(rows + k * n + there)
        block = tl.minimum(block, inner[:, None] + outer[None, :])
    # the block's own tile is closed already, and others are reading it
    beside = (there < first) | (there >= first + PIVOT)
    tl.debug_barrier()
    tl.store(rows + here[:, None].to(tl.int64) * n + there[None, :], block, mask=beside[None, :])
    tl.store(
        distance + there[None, :].to(tl.int64) * n + first + here[:, None],
        block,
        mask=beside[None, :],
    )


@triton.jit
def _update_kernel(
    distance,  # [n, n]
    first,  # a multiple of PIVOT
    n,  # a multiple of 128
    PIVOT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Shorten the paths of a tile by way of the intermediate vertices, and its mirror image."""
    i, j = tl.program_id(0), tl.program_id(1)
    if i > j:
        return
    row = i * TILE + tl.arange(0, TILE)
    column = j * TILE + tl.arange(0, TILE)
    at = distance + row[:, None].to(tl.int64) * n + column[None, :]
    block = tl.load(at)
    panel = distance + first.to(tl.int64) * n
    for _ in range(PIVOT):
        left = tl.load(panel + row)
        right = tl.load(panel + column)
        block = tl.minimum(block, left[:, None] + right[None, :])
        panel += n
    outside_rows = (row < first) | (row >= first + PIVOT)
    outside_columns = (column < first) | (column >= first + PIVOT)
    # the intermediate vertices' own rows are closed, and others are reading them
    inside = outside_rows[:, None] & outside_columns[None, :]
    tl.store(at, block, mask=inside)
    if i < j:
        mirror = distance + column[None, :].to(tl.int64) * n + row[:, None]
        tl.store(mirror, block, mask=inside)


def close_(distance: Tensor) -> Tensor:
    """Turn edge lengths (n, n) into shortest-path lengths, in place if n is a multiple of 128."""
    # They are symmetric, infinite where there is no edge, and zero on the diagonal.
    n = distance.shape[0]
    padding = -n % _TILE
    if padding:
        distance = torch.nn.functional.pad(distance, (0, padding, 0, padding), value=torch.inf)
    whole = distance.shape[0]
    tiles = whole // _TILE
    for first in range(0, n, _PIVOT):
        launch(_pivot_kernel, (1,), distance, first, whole, PIVOT=_PIVOT, num_warps=8)
        launch(
            _panel_kernel, (tiles,), distance, first, whole, PIVOT=_PIVOT, TILE=_TILE, num_warps=8
        )
        launch(
            _update_kernel, (tiles, tiles), distance, first, whole, PIVOT=_PIVOT, TILE=_TILE,
            num_warps=8,
        )  # fmt: skip
    return distance[:n, :n].contiguous()
