"""The last outer iterations of many problems in Triton, in float64: one program each.

Where ``settle`` has left a plan, one or two iterations are left. What has left the neighbourhood of
its fixed point goes on here until it ends.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from torchgw._batch.inner_triton import solved
from torchgw._batch.packing import Warm
from torchgw._batch.rough_triton import NEAR, REGISTERS, falls
from torchgw._batch.sweep import LARGEST_EXPONENT, TICK
from torchgw._batch.tile_triton import (
    by_columns,
    by_rows,
    cross,
    line,
    problem,
    read,
    tiles_of,
    total,
    write,
)
from torchgw._sinkhorn.annealing import MET, WINDOW
from torchgw._tensors.ahead import launch

# Entries of a matrix for each thread. [L532]
_ENTRIES = 32


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
    inverse,  # [k, M, M] float32, scratch
    lines,  # [k, 4, M] float32, scratch
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
    NEAR: tl.constexpr,
):
    """Iterate one problem until its plan stays, or its objective, or there are too many."""
    N: tl.constexpr = RI * RT
    M: tl.constexpr = CI * CT
    number, x, y, a, b = problem(x, y, a, b, i, j, N, M)
    rows, columns = line(RI, RT), line(CI, CT)
    f += number * N + rows
    g += number * M + columns
    plan += number * N * M
    work += number * N * M
    held += number * N * M
    inverse += number * M * M
    lines += number * 4 * M
    linear += number * N * M
    weight = -4.0 * tl.load(alpha + number)
    unit = tl.load(epsilon + number)
    factor = tl.full([], 1.0, tl.float64)
    end = tl.load(ended + number).to(tl.int32)
    # one iteration more for what has ended
    over = tl.where((end == 1) | (end == 2), 1, 0)
    least = objective_tol * tl.abs(tl.load(value + number))
    values = tl.full([16], float("inf"), tl.float32)
    changes, earlier = values, float("inf")
    known = tl.full([], float("inf"), tl.float64)
    change, error = factor, factor
    begun, turns, spent, near = tl.load(done + number).to(tl.int32), 0, 0, 0
    going = tl.where(end == 3, 0, 1)
    while going == 1:
        cross(x, plan, y, work, work, N, M, CHUNK)
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
        kernel, near, factor, error, taken = solved(
            kernel, mass_a, mass_b, a, b, f, g, unit, near, factor, inner_tol, most_inner,
            tick, held, inverse, lines, shift, CHUNK, NEAR, RI, CI, RT, CT,
            SQUARE_RI, SQUARE_CI, SQUARE_RT, SQUARE_CT,
        )  # fmt: skip
        spent += taken
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
    """Iterate problems (k,) from where they stand; arguments are those of ``rough``, in float64."""
    # `limits` are iterations in all and of a linear problem, the change of a plan that has settled,
    # the column error of a linear problem, and the fall of the objective that is none.
    plan = warm.plan.double()
    count, n, m = plan.shape
    made = Finished(
        plan, warm.f, warm.g, warm.done, torch.empty_like(warm.done),
        plan.new_empty(count), plan.new_empty(count), warm.ended,
    )  # fmt: skip
    tiles, warps = tiles_of(n, m, _ENTRIES)
    launch(
        _converge_kernel, (count,), *tables, *index, alpha, epsilon,
        plan if linear is None else linear, torch.empty_like(plan), torch.empty_like(plan),
        warm.plan.new_empty(count, m, m), warm.plan.new_empty(count, 4, m), *made,
        warm.value, 0, TICK, *limits,
        LINEAR=linear is not None, CHUNK=16, **tiles, QUICK=WINDOW, MET=MET,
        EXPONENT=LARGEST_EXPONENT, NEAR=NEAR, num_warps=warps, num_stages=1, maxnreg=REGISTERS,
    )  # fmt: skip
    return made
