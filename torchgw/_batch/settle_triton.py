"""Outer iterations of many problems near their fixed points, in Triton: one program each.

In float32, but to float64's fixed point: potentials are float64, and where the point of
linearisation moves by dP, a difference of two numbers of float32 and exact, the plan is multiplied
by exp(4 alpha X dP Y / epsilon) before it is scaled again. Errors are relative to the change, which
vanishes.
"""

import torch
import triton
import triton.language as tl

from torchgw._batch.inner_triton import solved
from torchgw._batch.packing import Warm
from torchgw._batch.rough_triton import CHUNK, ENTRIES, NEAR, REGISTERS, STAGES, falls
from torchgw._batch.sweep import BUDGET, FAR
from torchgw._batch.sweep_triton import keeps_falling
from torchgw._batch.tile_triton import cross, line, problem, read, tiles_of, total, write
from torchgw._sinkhorn.annealing import INNER_SHARE, MET
from torchgw._tensors.ahead import launch

# Column error that float32 does not go below: Newton steps remove it afterwards. [L534]
_ERROR = 3e-6


@triton.jit
def _settle_begin_kernel(
    x,  # [S, N, N] float64
    y,  # [S', M, M] float64
    a,  # [S, N] float64
    b,  # [S', M] float64
    i,  # [k] int64
    j,  # [k] int64
    alpha,  # [k] float64
    epsilon,  # [k] float64
    linear,  # [k, N, M] float64, read if LINEAR
    plan,  # [k, N, M] float32
    work,  # [k, N, M] float64, scratch
    f,  # [k, N] float64
    g,  # [k, M] float64
    held,  # [k, N, M] float32, written
    LINEAR: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Compute exp((f + g - cost) / epsilon) a b of one problem at its plan."""
    number, x, y, a, b = problem(x, y, a, b, i, j, N, M)
    work += number * N * M
    plan += number * N * M
    columns = tl.arange(0, M)
    for begin in range(0, N, CHUNK):
        place = (begin + tl.arange(0, CHUNK))[:, None] * M + columns[None, :]
        tl.store(work + place, tl.load(plan + place).to(tl.float64))
    cross(x, work, y, work, work, N, M, CHUNK)
    rate = 1.0 / tl.load(epsilon + number)
    weight = -4.0 * tl.load(alpha + number)
    mass_b = tl.load(b + columns)
    column = tl.where(mass_b > 0, tl.load(g + number * M + columns), -float("inf"))
    for begin in range(0, N, CHUNK):
        rows = begin + tl.arange(0, CHUNK)
        place = rows[:, None] * M + columns[None, :]
        cost = weight * tl.load(work + place)
        if LINEAR:
            cost += tl.load(linear + number * N * M + place)
        kernel = tl.load(f + number * N + rows)[:, None] + column[None, :] - cost
        # no row or column is empty
        kernel = tl.minimum(tl.maximum((kernel * rate).to(tl.float32), -60.0), 60.0)
        mass = tl.maximum(tl.load(a + rows), 1e-30)[:, None] * tl.maximum(mass_b, 1e-30)[None, :]
        tl.store(held + number * N * M + place, tl.exp(kernel) * mass.to(tl.float32))


@triton.jit(do_not_specialize=["shift", "most", "most_inner"])
def _settle_kernel(
    x,  # [S, N, N] float32
    y,  # [S', M, M] float32
    a,  # [S, N] float32
    b,  # [S', M] float32
    i,  # [k] int64
    j,  # [k] int64
    alpha,  # [k] float32
    epsilon,  # [k] float64
    work,  # [k, N, M] float32, scratch
    step,  # [k, N, M] float32, scratch
    inverse,  # [k, M, M] float32, scratch
    lines,  # [k, 4, M] float32, scratch
    held,  # [k, N, M] float32, exp((f + g - cost) / epsilon) a b, updated
    plan,  # [k, N, M] float32, updated
    f,  # [k, N] float64, updated
    g,  # [k, M] float64, updated
    done,  # [k] int64, updated
    ended,  # [k] int64, a place in ``warm.ENDS``, updated
    value,  # [k] float32
    shift,  # zero
    most,
    most_inner,
    tol,  # float
    inner_tol,  # float
    share,  # float
    objective_tol,  # float
    CHUNK: tl.constexpr,
    MET: tl.constexpr,
    FAR: tl.constexpr,
    NEAR: tl.constexpr,
    RI: tl.constexpr,
    CI: tl.constexpr,
    RT: tl.constexpr,
    CT: tl.constexpr,
    SQUARE_RI: tl.constexpr,
    SQUARE_CI: tl.constexpr,
    SQUARE_RT: tl.constexpr,
    SQUARE_CT: tl.constexpr,
):
    """Iterate one problem until its plan stays where it is."""
    N: tl.constexpr = RI * RT
    M: tl.constexpr = CI * CT
    number, x, y, a, b = problem(x, y, a, b, i, j, N, M)
    all_a, all_b = a, b
    a += line(RI, RT)
    b += line(CI, CT)
    f += number * N + line(RI, RT)
    g += number * M + line(CI, CT)
    plan += number * N * M
    work += number * N * M
    step += number * N * M
    held += number * N * M
    inverse += number * M * M
    lines += number * 4 * M
    weight = -4.0 * tl.load(alpha + number)
    unit = tl.load(epsilon + number)
    per_unit = (1.0 / unit).to(tl.float32)
    least = objective_tol * tl.abs(tl.load(value + number))
    end = tl.load(ended + number).to(tl.int32)
    going = tl.where(end == 0, 1, 0)
    turns = tl.load(done + number).to(tl.int32)
    values = tl.full([16], float("inf"), tl.float32)
    changes, earlier = values, float("inf")
    factor, last, rate, turn, near = 1.0, 0.0, 0.0, 0, 0
    while going == 1:
        mass_a, mass_b = tl.maximum(tl.load(a), 1e-30), tl.maximum(tl.load(b), 1e-30)
        kernel = read(held, shift, RI, CI, RT, CT)
        wanted = tl.maximum(tl.minimum(tl.where(last > 0, share * last, 1e-4), 1e-4), inner_tol)
        kernel, near, factor, error, taken = solved(
            kernel, mass_a, mass_b, all_a, all_b, f, g, unit, near, factor, wanted, most_inner,
            8, work, inverse, lines, shift, CHUNK, NEAR, RI, CI, RT, CT,
            SQUARE_RI, SQUARE_CI, SQUARE_RT, SQUARE_CT,
        )  # fmt: skip
        write(held, kernel, shift, RI, CI, RT, CT)
        # matrices are read again rather than held: there are registers for one
        moved = kernel - read(plan, shift, RI, CI, RT, CT)
        write(step, moved, shift, RI, CI, RT, CT)
        change = total(tl.abs(moved))
        # what the objective falls by over epsilon, less what is quadratic in the change: to second
        # order the divergence of two plans
        sums = 2.0 * read(held, shift, RI, CI, RT, CT) - moved
        fall = total(moved * moved / tl.maximum(sums, 1e-37))
        turns += 1
        # not a number, a plan that stays, or one that goes away
        end = tl.where(change == change, tl.where(change <= tol, 0, 2), 3)
        end = tl.where(change > FAR, 4, end)
        going = tl.where((end == 2) & (turns < most), 1, 0)
        # a sequence that falls by the same share goes to its limit
        known = (last > 0) & (error <= 0.1 * change)
        now = tl.where(known, change / tl.where(last > 0, last, 1.0), 0.0)
        steady = keeps_falling(now, rate) & (going == 1)
        ahead = tl.where(steady, now / (1.0 - tl.where(steady, now, 0.0)), 0.0)
        rate = tl.where(steady, 0.0, now)
        last = tl.where(steady, 0.0, change)
        tl.debug_barrier()
        before = read(plan, shift, RI, CI, RT, CT)
        following = before + (1.0 + ahead) * read(step, shift, RI, CI, RT, CT)
        write(plan, following, shift, RI, CI, RT, CT)
        # of what is stored, so that costs follow the plan exactly
        write(step, following - before, shift, RI, CI, RT, CT)
        if going == 1:
            cross(x, step, y, work, work, N, M, CHUNK)
            moved = weight * read(work, shift, RI, CI, RT, CT)
            bent = total(moved * read(step, shift, RI, CI, RT, CT)) / (
                (1.0 + ahead) * (1.0 + ahead)
            )
            grown = tl.exp(tl.minimum(tl.maximum(-moved * per_unit, -60.0), 60.0))
            kernel = tl.maximum(read(held, shift, RI, CI, RT, CT) * grown, 1e-37)
            write(held, kernel, shift, RI, CI, RT, CT)
            values, changes, earlier, flat = falls(
                values, changes, earlier, turn, fall / per_unit - 0.5 * bent, change, error <= MET,
                least,
            )  # fmt: skip
            turn += 1
            end = tl.where(flat, 1, end)
            going = tl.where(flat, 0, going)
            tl.debug_barrier()
        factor = 1.0 + 0.9 * (factor - 1.0)
    tl.store(done + number, turns)
    tl.store(ended + number, end)


def settle(
    tables: tuple[torch.Tensor, ...],
    single: tuple[torch.Tensor, ...],
    index: tuple[torch.Tensor, torch.Tensor],
    alpha: torch.Tensor,
    linear: torch.Tensor | None,
    epsilon: torch.Tensor,
    warm: Warm,
    limits: tuple[int, float, float],
) -> None:
    """Iterate problems (k,) that have settled in ``rough``, in place."""
    # Arguments are as there, `tables` in float64 and in float32; `limits` are outer iterations in
    # all, the change of a plan that the engine asks for, and the fall of the objective that is
    # none.
    count, n, m = warm.plan.shape
    (tiles, warps), (most, tol, objective_tol) = tiles_of(n, m, ENTRIES), limits
    work, held = tables[0].new_empty(count, n, m), torch.empty_like(warm.plan)
    launch(
        _settle_begin_kernel, (count,), *tables, *index, alpha, epsilon,
        work if linear is None else linear, warm.plan, work, warm.f, warm.g, held,
        LINEAR=linear is not None, N=n, M=m, CHUNK=16, num_warps=warps, num_stages=2,
    )  # fmt: skip
    launch(
        _settle_kernel, (count,), *single, *index, alpha.float(), epsilon,
        torch.empty_like(held), torch.empty_like(held), held.new_empty(count, m, m),
        held.new_empty(count, 4, m), held, *warm, 0, most, BUDGET,
        tol, _ERROR, INNER_SHARE, objective_tol, CHUNK=min(CHUNK, n), MET=MET, FAR=FAR,
        NEAR=NEAR, **tiles, num_warps=warps, num_stages=STAGES, maxnreg=REGISTERS,
    )  # fmt: skip
