"""The last outer iterations of many problems in Triton, in float64: one program each.

Where ``settle`` has left a plan, one or two iterations are left, with Newton's steps as in
``newton.py``. What has left the neighbourhood of its fixed point goes on here until it ends.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from torchgw._batch.newton import LARGEST_STEP, NEWTON_BELOW, RIDGE
from torchgw._batch.rough_triton import MET, falls
from torchgw._batch.sweep import LARGEST_EXPONENT, TICK
from torchgw._batch.sweep_triton import next_relaxation, relaxed
from torchgw._batch.tile_triton import (
    by_columns,
    by_rows,
    cross,
    line,
    problem,
    read,
    sums_of_columns,
    sums_of_rows,
    tile_of,
    total,
    write,
    write_row,
)
from torchgw._batch.warm import Warm
from torchgw._tensors.launch import launch

# Outer iterations after which the objective is looked at. [L595]
_QUICK = 5
# Entries of a matrix for each thread, and its registers. [L532]
_ENTRIES, _REGISTERS = 32, 128


class Finished(NamedTuple):
    """Plans of k problems, and what the engine asks of them."""

    plan: torch.Tensor  # (k, N, M)
    f: torch.Tensor  # (k, N)
    g: torch.Tensor  # (k, M)
    done: torch.Tensor  # (k,) int64, outer iterations
    inner: torch.Tensor  # (k,) int64, Sinkhorn iterations of these
    error: torch.Tensor  # (k,) L1 distance of the columns to b
    spending: torch.Tensor  # (k,) <cost, plan>
    ended: torch.Tensor  # (k,) int64, places in ``ENDS``


@triton.jit
def _curvature(
    plan, mass_a, sums, out, N: tl.constexpr, M: tl.constexpr, CHUNK: tl.constexpr,
    RIDGE: tl.constexpr,
):  # fmt: skip
    """Write the second derivative of the dual in g, (M, M), of a plan (N, M), all in memory.

    ``mass_a`` is that of its rows, ``sums`` that of its columns.
    """
    columns, middle = tl.arange(0, M), tl.arange(0, CHUNK)
    total = tl.zeros([M, M], tl.float64)
    for begin in range(0, N, CHUNK):
        share = tl.load(mass_a + begin + middle)
        share = tl.where(share > 0, 1.0 / tl.where(share > 0, share, 1.0), 0.0)
        left = tl.load(plan + (begin + middle)[None, :] * M + columns[:, None])
        right = tl.load(plan + (begin + middle)[:, None] * M + columns[None, :])
        total = tl.dot(left * share[None, :], right, total, out_dtype=tl.float64)
    held = tl.load(sums + columns)
    diagonal = tl.where(held > 0, (1.0 + RIDGE) * held, 1.0)
    total = tl.where(columns[:, None] == columns[None, :], diagonal[None, :] - total, -total)
    tl.store(out + columns[:, None] * M + columns[None, :], total)


@triton.jit
def _solved(
    matrix, right, count, lines, shift,
    RI: tl.constexpr, CI: tl.constexpr, RT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Solve matrix x = right [RI, RT] by sweeps without pivoting; NaN where it is not definite.

    A sweep leaves the matrix symmetric but for its diagonal, which is not read again. The first
    ``count`` rows are swept; the others have nothing beside their diagonal. ``lines`` (4, M) is
    scratch: what all threads read of row k, by turns.
    """
    M: tl.constexpr = CI * CT
    rows, columns = line(RI, RT), line(CI, CT)
    for k in range(count):
        shared = lines + k % 2 * 2 * M
        write_row(shared, matrix, k, shift, RI, CI, RT, CT)
        tl.store(shared + M + rows, right, mask=rows == k)
        tl.debug_barrier()
        pivot, value = tl.load(shared + k), tl.load(shared + M + k)
        pivot = tl.where(pivot > 0, pivot, float("nan"))
        share = tl.load(shared + rows) / pivot
        # row and column k are divided by the pivot by the same update
        share = tl.where(rows == k, 1.0 - 1.0 / pivot, share)
        row = tl.load(shared + columns)
        row = tl.where(columns == k, pivot - 1.0, row)
        right -= share * value
        matrix -= by_rows(share) * by_columns(row)
    return right


@triton.jit(do_not_specialize=["shift", "tick", "most", "most_inner"])
def _converge_kernel(
    x,  # [S, N, N] float64
    y,  # [S', M, M] float64
    a,  # [S, N] float64
    b,  # [S', M] float64
    i,  # [k] int64
    j,  # [k] int64
    alpha,  # [k] float64
    epsilon,  # [k] float64
    linear,  # [k, N, M] float64, read if LINEAR
    work,  # [k, N, M] float64, scratch
    held,  # [k, N, M] float64, scratch
    square,  # [k, M, M] float64, scratch
    lines,  # [k, 6, M] float64, scratch
    plan,  # [k, N, M] float64, updated
    f,  # [k, N] float64, updated
    g,  # [k, M] float64, updated
    done,  # [k] int64, updated
    inner_out,  # [k] int64
    error_out,  # [k] float64
    spending,  # [k] float64
    ended,  # [k] int64, a place in ``warm.ENDS``, updated
    value,  # [k] float32, about the objective
    shift,  # zero
    tick,  # iterations between two looks at the error; as a constant, they would be unrolled
    most,
    most_inner,
    tol,  # float, change of a plan that has settled
    inner_tol,  # float, column error
    objective_tol,  # float
    LINEAR: tl.constexpr,
    CHUNK: tl.constexpr,
    RI: tl.constexpr,
    CI: tl.constexpr,
    RT: tl.constexpr,
    CT: tl.constexpr,
    SQUARE_RI: tl.constexpr,
    SQUARE_CI: tl.constexpr,
    SQUARE_RT: tl.constexpr,
    SQUARE_CT: tl.constexpr,
    QUICK: tl.constexpr,
    MET: tl.constexpr,
    EXPONENT: tl.constexpr,
    BELOW: tl.constexpr,
    RIDGE: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Iterate one problem until its plan stays, or its objective, or there are too many."""
    N: tl.constexpr = RI * RT
    M: tl.constexpr = CI * CT
    number, x, y, a, b = problem(x, y, a, b, i, j, N, M)
    rows, columns = line(RI, RT), line(CI, CT)
    square_rows = line(SQUARE_RI, SQUARE_RT)
    f += number * N + rows
    g += number * M + columns
    plan += number * N * M
    work += number * N * M
    held += number * N * M
    square += number * M * M
    lines += number * 6 * M
    linear += number * N * M
    weight = -4.0 * tl.load(alpha + number)
    unit = tl.load(epsilon + number)
    count = tl.max(tl.max(tl.where(tl.load(b + columns) > 0, columns + 1, 0), 1), 0)
    factor = tl.full([], 1.0, tl.float64)
    end = tl.load(ended + number).to(tl.int32)
    # one iteration more for what has ended
    over = tl.where((end == 1) | (end == 2), 1, 0)
    least = objective_tol * tl.abs(tl.load(value + number))
    values = tl.full([16], float("inf"), tl.float32)
    changes, earlier = values, float("inf")
    known = tl.full([], float("inf"), tl.float64)
    change, error = factor, factor
    begun, turns, spent = tl.load(done + number).to(tl.int32), 0, 0
    going = tl.where(end == 3, 0, 1)
    while going == 1:
        cross(x, plan, y, work, N, M, CHUNK, False)
        cost = weight * read(work, shift, RI, CI, RT, CT)
        if LINEAR:
            cost += read(linear, shift, RI, CI, RT, CT)
        if turns >= QUICK:
            # the objective of the plan that the last iteration has made, but for a constant
            kernel = read(plan, shift, RI, CI, RT, CT)
            share = tl.log(tl.maximum(kernel, 1e-37).to(tl.float32))
            share -= by_rows(tl.log(tl.maximum(tl.load(a + rows), 1e-37).to(tl.float32)))
            share -= by_columns(tl.log(tl.maximum(tl.load(b + columns), 1e-37).to(tl.float32)))
            costs = 0.5 * cost
            if LINEAR:
                costs += 0.5 * read(linear, shift, RI, CI, RT, CT)
            objective = total(kernel * (costs + unit * share))
            met = error <= MET
            values, changes, earlier, flat = falls(
                values, changes, earlier, turns, (known - objective).to(tl.float32),
                change.to(tl.float32), met, least,
            )  # fmt: skip
            known = tl.where(met, objective, float("inf"))
            end = tl.where(flat, 1, end)
            over = tl.where(flat, 1, over)
        write(work, cost, shift, RI, CI, RT, CT)
        # nothing is divided by zero where there is no weight
        mass_a = tl.maximum(tl.load(a + rows), 1e-290)
        mass_b = tl.maximum(tl.load(b + columns), 1e-290)
        kernel = (by_rows(tl.load(f)) + by_columns(tl.load(g)) - cost) * (1.0 / unit)
        kernel = tl.exp(tl.minimum(tl.maximum(kernel, -EXPONENT), EXPONENT))
        kernel = kernel * by_rows(mass_a) * by_columns(mass_b)
        # exact rows, so that the columns go on from g
        s = mass_a / (sums_of_rows(kernel) + 1e-290)
        kernel = kernel * by_rows(s)
        tl.store(f, tl.load(f) + unit * tl.log(s))
        s = tl.full([RI, RT], 1.0, tl.float64)
        found = sums_of_columns(kernel)
        error = tl.sum(tl.sum(tl.abs(found - mass_b), 1), 0)
        last = spent + most_inner
        # NaN compares as false
        busy = tl.where((error > inner_tol) & (error < float("inf")), 1, 0)
        while busy == 1:
            t = tl.full([CI, CT], 1.0, tl.float64)
            for _ in range(tick):
                sums = sums_of_columns(kernel * by_rows(s)) + 1e-290
                t = relaxed(t, mass_b, sums, factor - 1.0)
                sums = sums_of_rows(kernel * by_columns(t)) + 1e-290
                s = relaxed(s, mass_a, sums, factor - 1.0)
            exact = mass_a / (sums_of_rows(kernel * by_columns(t)) + 1e-290)
            kernel = kernel * by_rows(exact) * by_columns(t)
            tl.store(f, tl.load(f) + unit * tl.log(exact))
            tl.store(g, tl.load(g) + unit * tl.log(t))
            s = s / exact
            found = sums_of_columns(kernel)
            before = error
            error = tl.sum(tl.sum(tl.abs(found - mass_b), 1), 0)
            factor = next_relaxation(factor, error / before)
            spent += tick
            busy = tl.where((error > inner_tol) & (error < float("inf")) & (spent < last), 1, 0)
            if (busy == 1) & (error < BELOW):
                write(held, kernel, shift, RI, CI, RT, CT)
                tl.store(lines + columns, tl.where(mass_b > 1e-289, found, 0.0))
                tl.store(lines + M + columns, tl.where(mass_b > 1e-289, mass_b - found, 0.0))
                tl.debug_barrier()
                _curvature(held, a, lines, square, N, M, CHUNK, RIDGE)
                tl.debug_barrier()
                matrix = read(square, shift, SQUARE_RI, SQUARE_CI, SQUARE_RT, SQUARE_CT)
                right = tl.load(lines + M + square_rows)
                right = _solved(
                    matrix, right, count, lines + 2 * M, shift,
                    SQUARE_RI, SQUARE_CI, SQUARE_RT, SQUARE_CT,
                )  # fmt: skip
                tl.store(lines + square_rows, right)
                tl.debug_barrier()
                step = tl.load(lines + columns)
                good = tl.max(tl.max(tl.where(tl.abs(step) <= LARGEST, 0, 1), 1), 0) == 0
                step = tl.where(good, step, 0.0)
                kernel = read(held, shift, RI, CI, RT, CT) * by_columns(tl.exp(step))
                exact = mass_a / (sums_of_rows(kernel) + 1e-290)
                kernel = kernel * by_rows(exact)
                tl.store(f, tl.load(f) + unit * tl.log(exact))
                tl.store(g, tl.load(g) + unit * step)
                # the fit of the relaxation is to errors of iterations alone
                s = tl.where(good, 1.0, s)
                factor = tl.where(good, 1.0, factor)
                found = sums_of_columns(kernel)
                error = tl.sum(tl.sum(tl.abs(found - mass_b), 1), 0)
                busy = tl.where((error > inner_tol) & (error < float("inf")), 1, 0)
        change = total(tl.abs(kernel - read(plan, shift, RI, CI, RT, CT)))
        kernel = tl.where(by_rows(mass_a > 1e-289) & by_columns(mass_b > 1e-289), kernel, 0.0)
        write(plan, kernel, shift, RI, CI, RT, CT)
        turns += 1
        settled = (change <= tol) & (error <= inner_tol)
        # not a number, or too many iterations
        limit = tl.where(error == error, tl.where(begun + turns >= most, 2, 4), 3)
        end = tl.where(over == 1, end, tl.where(settled, 0, limit))
        going = tl.where(end == 4, 1, 0)
        factor = 1.0 + 0.9 * (factor - 1.0)
        if going == 0:
            spent_on = kernel * read(work, shift, RI, CI, RT, CT)
            tl.store(spending + number, total(spent_on))
            tl.store(error_out + number, error)
    tl.store(ended + number, end)
    tl.store(done + number, begun + turns)
    tl.store(inner_out + number, spent)


def finish(
    tables: tuple[torch.Tensor, ...],
    index: tuple[torch.Tensor, torch.Tensor],
    alpha: torch.Tensor,
    linear: torch.Tensor | None,
    epsilon: torch.Tensor,
    warm: Warm,
    limits: tuple[int, int, float, float, float],
) -> Finished:
    """Iterate problems (k,) from where they stand; arguments are those of ``rough``, in float64.

    ``limits`` are iterations in all and of a linear problem, the change of a plan that has settled,
    the column error of a linear problem, and the fall of the objective that is none.
    """
    plan = warm.plan.double()
    count, n, m = plan.shape
    made = Finished(
        plan, warm.f, warm.g, warm.done, torch.empty_like(warm.done),
        plan.new_empty(count), plan.new_empty(count), warm.ended,
    )  # fmt: skip
    square = tile_of(m, m, _ENTRIES)
    # as many threads
    tile = tile_of(n, m, max(1, n * m // (32 * square.warps)))
    launch(
        _converge_kernel, (count,), *tables, *index, alpha, epsilon,
        plan if linear is None else linear, torch.empty_like(plan), torch.empty_like(plan),
        plan.new_empty(count, m, m), plan.new_empty(count, 6, m), *made,
        warm.value, 0, TICK, *limits,
        LINEAR=linear is not None, CHUNK=16, **tile._asdict(),
        SQUARE_RI=square.RI, SQUARE_CI=square.CI, SQUARE_RT=square.RT, SQUARE_CT=square.CT,
        QUICK=_QUICK, MET=MET, EXPONENT=LARGEST_EXPONENT, BELOW=NEWTON_BELOW, RIDGE=RIDGE,
        LARGEST=LARGEST_STEP,
        num_warps=square.warps, num_stages=1, maxnreg=_REGISTERS,
    )  # fmt: skip
    return made
