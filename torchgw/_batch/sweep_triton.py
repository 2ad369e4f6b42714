"""Sinkhorn's iterations of many small problems in Triton: one program each, its plan on chip.

In float64. The iteration, the relaxation and the rules of ending are those of ``sweep.py`` and of
the engine's tick, but a program goes on by itself until its linear problem is done.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from torchgw._batch.sweep import LARGEST_EXPONENT, TICK
from torchgw._tensors.ahead import launch

# Entries of a plan for each warp, and columns of a block: eight threads by two. [L402]
_ENTRIES_PER_WARP = 256
_WIDTH = 16


class Scaling(NamedTuple):
    """Plans to be scaled to their marginals: tensors with a row for each of A problems."""

    cost: torch.Tensor  # (A, n, m)
    point: torch.Tensor  # (A, n, m), plan where the cost is the gradient
    plan: torch.Tensor  # (A, n, m), written; its rows have mass a
    a: torch.Tensor  # (A, n)
    b: torch.Tensor  # (A, m)
    f: torch.Tensor  # (A, n) potential of the rows
    g: torch.Tensor  # (A, m) potential of the columns
    epsilon: torch.Tensor  # (A,)
    s: torch.Tensor  # (A, n) scaling of the rows from which iterations would go on, written
    t: torch.Tensor  # (A, m) scaling of the columns, written
    exact: torch.Tensor  # (A, n) scaling of the rows of the plan, written
    relaxation: torch.Tensor  # (A,), updated
    error: torch.Tensor  # (A,) L1 distance of the columns to b, updated
    restarts: torch.Tensor  # (A,) int64, increases of a small error, updated
    spent: torch.Tensor  # (A,) int64, iterations, updated
    budget: torch.Tensor  # (A,) int64, iterations at most
    tol: torch.Tensor  # (A,) error at which the linear problem is solved
    change: torch.Tensor  # (A,) L1 distance of the plan to ``point``, written
    spending: torch.Tensor  # (A,) <cost, plan>, written


@triton.jit
def relaxed(old, goal, sums, excess):
    """Go further than from old to goal / sums, within a factor of two."""
    if sums.dtype == tl.float32:
        # a division is ten instructions
        root = tl.rsqrt(sums * old)
        ratio = goal * root * root
    else:
        ratio = goal / (sums * old)
    step = tl.minimum(tl.maximum(ratio, 0.5), 2.0)
    return ratio * old * (1.0 + excess * (step - 1.0))


@triton.jit
def next_relaxation(factor, reduction):
    """Fit the factor to the reduction of the error by a tick, as ``next_relaxation`` does."""
    rate = tl.sqrt(tl.sqrt(tl.sqrt(tl.minimum(reduction, 1.0))))
    plain = (rate + factor - 1.0) * (rate + factor - 1.0)
    plain = plain / tl.maximum(rate * factor * factor, 1e-30)
    fitted = 2.0 / (1.0 + tl.sqrt(tl.maximum(1.0 - plain, 1e-6)))
    fitted = tl.where(rate <= factor - 1.0, 1.0 + 0.97 * (factor - 1.0), fitted)
    fitted = tl.where(reduction >= 1.0, 1.0, fitted)
    return tl.where(reduction == 0.0, factor, fitted)


@triton.jit
def keeps_falling(rate, before):
    """Whether changes fall by the same share as before, slowly, by the engine's rule [L465]."""
    return (rate > 0.3) & (rate < 0.97) & (tl.abs(rate - before) <= 0.1 * before)


@triton.jit(do_not_specialize=["n", "m", "tick", "most", "most_restarts"])
def _scaling_kernel(
    chosen,  # [k] int64, which problems
    cost,  # [A, n, m] float64
    point,  # [A, n, m] float64
    plan,  # [A, n, m] float64
    a,  # [A, n] float64
    b,  # [A, m] float64
    f,  # [A, n] float64
    g,  # [A, m] float64
    epsilon,  # [A] float64
    s_out,  # [A, n] float64
    t_out,  # [A, m] float64
    exact_out,  # [A, n] float64
    relaxation,  # [A] float64
    error_out,  # [A] float64
    restarts_out,  # [A] int64
    spent_out,  # [A] int64
    budget,  # [A] int64
    tol,  # [A] float64
    change,  # [A] float64
    spending,  # [A] float64
    n,
    m,
    tick,  # iterations between two looks at the error; as a constant, they would be unrolled
    most,  # iterations of this launch
    most_restarts,
    most_rounding,  # float
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Find the scalings at which the columns of one plan are met, or its iterations spent."""
    at = tl.load(chosen + tl.program_id(0))
    # columns by blocks of WIDTH: a thread holds a part of each block, and most of a sum is its own
    block, rows, within = tl.arange(0, BLOCKS), tl.arange(0, BLOCK_N), tl.arange(0, WIDTH)
    columns = block[:, None] * WIDTH + within[None, :]
    in_rows, in_columns = rows < n, columns < m
    inside = in_rows[None, :, None] & in_columns[:, None, :]
    place = at * n * m + rows[None, :, None] * m + columns[:, None, :]
    mass_a = tl.load(a + at * n + rows, mask=in_rows, other=0.0)
    mass_b = tl.load(b + at * m + columns, mask=in_columns, other=0.0)
    rate = 1.0 / tl.load(epsilon + at)
    row = rate * tl.load(f + at * n + rows, mask=in_rows, other=0.0)
    column = rate * tl.load(g + at * m + columns, mask=in_columns, other=0.0)
    kernel = row[None, :, None] - rate * tl.load(cost + place, mask=inside, other=0.0)
    kernel = kernel + column[:, None, :]
    kernel = tl.exp(tl.minimum(tl.maximum(kernel, -LARGEST), LARGEST))
    kernel = kernel * mass_a[None, :, None] * mass_b[:, None, :]
    # where there is no weight, one over one leaves the scaling at one
    none_a = tl.where(mass_a > 0, 0.0, 1.0).to(tl.float64)
    none_b = tl.where(mass_b > 0, 0.0, 1.0).to(tl.float64)
    mass_a, mass_b = mass_a + none_a, mass_b + none_b
    factor = tl.load(relaxation + at)
    error = tl.load(error_out + at)
    restarts = tl.load(restarts_out + at)
    spent = tl.load(spent_out + at)
    wanted = tl.load(tol + at)
    last = tl.minimum(tl.load(budget + at), spent + most)
    s = tl.full([BLOCK_N], 1.0, tl.float64)
    t = tl.full([BLOCKS, WIDTH], 1.0, tl.float64)
    exact = s
    going = 1
    while going == 1:
        for _ in range(tick):
            sums = tl.sum(kernel * s[None, :, None], 1) + none_b
            t = relaxed(t, mass_b, sums, factor - 1.0)
            sums = tl.sum(tl.sum(kernel * t[:, None, :], 0), 1) + none_a
            s = relaxed(s, mass_a, sums, factor - 1.0)
        exact = mass_a / (tl.sum(tl.sum(kernel * t[:, None, :], 0), 1) + none_a)
        found = t * (tl.sum(kernel * exact[None, :, None], 1) + none_b)
        before = error
        error = tl.sum(tl.sum(tl.abs(found - mass_b), 1), 0)
        factor = next_relaxation(factor, error / before)
        restarts += tl.where((before <= error) & (error < most_rounding), 1, 0)
        spent += tick
        # NaN compares as false
        unsolved = (error > wanted) & (error < float("inf")) & (restarts < most_restarts)
        going = tl.where(unsolved & (spent < last), 1, 0)
    kernel = kernel * exact[None, :, None] * t[:, None, :]
    tl.store(plan + place, kernel, mask=inside)
    spent_on = kernel * tl.load(cost + place, mask=inside, other=0.0)
    tl.store(spending + at, tl.sum(tl.sum(tl.sum(spent_on, 0), 1), 0))
    moved = tl.abs(kernel - tl.load(point + place, mask=inside, other=0.0))
    tl.store(change + at, tl.sum(tl.sum(tl.sum(moved, 0), 1), 0))
    tl.store(s_out + at * n + rows, s, mask=in_rows)
    tl.store(t_out + at * m + columns, t, mask=in_columns)
    tl.store(exact_out + at * n + rows, exact, mask=in_rows)
    tl.store(relaxation + at, factor)
    tl.store(error_out + at, error)
    tl.store(restarts_out + at, restarts)
    tl.store(spent_out + at, spent)


def scale(
    chosen: torch.Tensor, given: Scaling, most: int, most_restarts: int, most_rounding: float
) -> None:
    """Iterate the problems of ``chosen`` (k,), at most ``most`` times; leave the others alone."""
    n, m = given.cost.shape[1:]
    rows, columns = triton.next_power_of_2(n), triton.next_power_of_2(m)
    width = min(_WIDTH, columns)
    launch(
        _scaling_kernel, (len(chosen),), chosen, *given, n, m, TICK, most, most_restarts,
        most_rounding, BLOCK_N=rows, BLOCKS=columns // width, WIDTH=width,
        LARGEST=LARGEST_EXPONENT,
        num_warps=max(1, min(16, rows * columns // _ENTRIES_PER_WARP)),
    )  # fmt: skip
