"""Sums over all hyperbolic distances of each point, which are computed and added on chip.

Rows of a table describe points: (p_1, ..., p_d, t, a, f), float64, where
sinh(d / 2)^2 = |p - p'|^2 (a a')^2 + (t - t')^2 (f f')^2.
"""

import triton
import triton.language as tl
from torch import Tensor

from torchgw._tensors.ahead import launch

# Points of a program, and those that it meets at once. [L587]
_ROWS = 32
_WARPS = 4


@triton.jit
def _half_distance(
    table,  # [n, dimensions + 3]
    rows,
    columns,
    inside,
    there,
    dimensions,
):
    """Compute half the distances of some points to some others."""
    x = table + rows.to(tl.int64) * (dimensions + 3)
    y = table + columns.to(tl.int64) * (dimensions + 3)
    square = tl.zeros((rows.shape[0], columns.shape[0]), tl.float64)
    for k in range(dimensions):
        left = tl.load(x + k, mask=inside, other=0.0)
        right = tl.load(y + k, mask=there, other=0.0)
        apart = left[:, None] - right[None, :]
        square += apart * apart
    across = tl.load(x + dimensions + 1, mask=inside, other=0.0)[:, None]
    across *= tl.load(y + dimensions + 1, mask=there, other=0.0)[None, :]
    along = tl.load(x + dimensions, mask=inside, other=0.0)[:, None]
    along -= tl.load(y + dimensions, mask=there, other=0.0)[None, :]
    along *= tl.load(x + dimensions + 2, mask=inside, other=0.0)[:, None]
    along *= tl.load(y + dimensions + 2, mask=there, other=0.0)[None, :]
    square = square * (across * across) + along * along
    return tl.log(tl.sqrt(square) + tl.sqrt(square + 1.0))


@triton.jit(do_not_specialize=["n", "dimensions", "decay"])
def _functions_kernel(
    table,  # [n, dimensions + 3]
    weights,  # [n]
    sums,  # [n, 2] out
    rate,  # [1] of the decay
    n,
    dimensions,
    decay,  # 1 for the functions of the rate, 0 for powers
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum d and d^2 by weight, or exp(-rate d) and its fourth power."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    first = tl.zeros((ROWS,), tl.float64)
    second = tl.zeros((ROWS,), tl.float64)
    falling = tl.load(rate)
    for start in range(0, n, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        there = columns < n
        weight = tl.load(weights + columns, mask=there, other=0.0)[None, :]
        value = 2.0 * _half_distance(table, rows, columns, inside, there, dimensions)
        if decay:
            value = tl.exp(-falling * value)
        square = value * value
        if decay:
            square = square * square
        first += tl.sum(value * weight, axis=1)
        second += tl.sum(square * weight, axis=1)
    tl.store(sums + 2 * rows, first, mask=inside)
    tl.store(sums + 2 * rows + 1, second, mask=inside)


@triton.jit(do_not_specialize=["n", "dimensions", "far_dimensions"])
def _differences_kernel(
    source,  # [n, dimensions + 3]
    target,  # [n, far_dimensions + 3]
    weights,  # [n]
    sums,  # [n] out
    scales,  # [2] of both distances
    n,
    dimensions,
    far_dimensions,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum the squared differences of both distances of each pair of rows, by weight."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    total = tl.zeros((ROWS,), tl.float64)
    near_scale, far_scale = 2.0 * tl.load(scales), 2.0 * tl.load(scales + 1)
    for start in range(0, n, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        there = columns < n
        weight = tl.load(weights + columns, mask=there, other=0.0)[None, :]
        near = near_scale * _half_distance(source, rows, columns, inside, there, dimensions)
        far = far_scale * _half_distance(target, rows, columns, inside, there, far_dimensions)
        total += tl.sum((near - far) * (near - far) * weight, axis=1)
    tl.store(sums + rows, total, mask=inside)


def sum_functions(table: Tensor, weights: Tensor, rate: float | None) -> Tensor:
    """Sum d and d^2 over all points by weight, or with a rate exp(-rate d) and exp(-4 rate d)."""
    n = len(table)
    sums = table.new_empty(n, 2)
    launch(
        _functions_kernel, (triton.cdiv(n, _ROWS),),
        table, weights, sums, table.new_tensor([rate or 0.0]), n,
        table.shape[1] - 3, int(rate is not None), ROWS=_ROWS, COLUMNS=_ROWS, num_warps=_WARPS,
    )  # fmt: skip
    return sums


def sum_differences(
    source: Tensor, target: Tensor, weights: Tensor, scales: tuple[float, float]
) -> Tensor:
    """Sum (s d_ij - s' d'_ij)^2 over all j by weight, of two tables whose rows are partners."""
    n = len(source)
    sums = source.new_empty(n)
    launch(
        _differences_kernel, (triton.cdiv(n, _ROWS),),
        source, target, weights, sums, source.new_tensor(scales), n,
        source.shape[1] - 3, target.shape[1] - 3, ROWS=_ROWS, COLUMNS=_ROWS, num_warps=_WARPS,
    )  # fmt: skip
    return sums
