"""The first iterations of many problems in Triton: one program each, all of it on chip.

In float32, from a x b down to where the plan has nearly settled at the target epsilon.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from torchgw._batch.tile_triton import (
    by_columns,
    by_rows,
    cross,
    line,
    read,
    sums_of_columns,
    sums_of_rows,
    tile_of,
    write,
)
from torchgw._batch.warm import Warm
from torchgw._tensors.launch import launch

__all__ = ["ENTRIES", "REGISTERS", "rough", "scaled"]

# Change of the plan at which float32 hands over, outer iterations until then at most, and the
# column error of its linear problems. [L397] [L532]
_ROUGH_TOLERANCE = 5e-4
_ROUGH_ITERATIONS = 60
_ROUGH_ERROR = 5e-5
# Entries of a matrix for each thread, and registers of that: two programs of 128 points share a
# multiprocessor. [L532]
ENTRIES, REGISTERS = 64, 128


@triton.jit
def _relaxed(old, goal, sums, excess):
    """Go further than from old to goal / sums, within a factor of two."""
    ratio = goal / (sums * old)
    step = tl.minimum(tl.maximum(ratio, 0.5), 2.0)
    return ratio * old * (1.0 + excess * (step - 1.0))


@triton.jit
def _fitted(factor, reduction):
    """Fit the relaxation to the reduction of the error by eight iterations, as in the engine."""
    rate = tl.sqrt(tl.sqrt(tl.sqrt(tl.minimum(reduction, 1.0))))
    plain = (rate + factor - 1.0) * (rate + factor - 1.0)
    plain = plain / tl.maximum(rate * factor * factor, 1e-30)
    fitted = 2.0 / (1.0 + tl.sqrt(tl.maximum(1.0 - plain, 1e-6)))
    fitted = tl.where(rate <= factor - 1.0, 1.0 + 0.97 * (factor - 1.0), fitted)
    return tl.where(reduction >= 1.0, 1.0, fitted)


@triton.jit
def scaled(kernel, s, t, mass_a, mass_b, factor, wanted, most):
    """Iterate scalings of a kernel from s and t; return t, the factor and the error of columns."""
    error = 3.0e38
    spent = 0
    busy = 1
    while busy == 1:
        for _ in range(8):
            # nothing is divided by zero where there is no weight
            sums = sums_of_columns(kernel * by_rows(s)) + 1e-30
            t = _relaxed(t, mass_b, sums, factor - 1.0)
            sums = sums_of_rows(kernel * by_columns(t)) + 1e-30
            s = _relaxed(s, mass_a, sums, factor - 1.0)
        exact = mass_a / (sums_of_rows(kernel * by_columns(t)) + 1e-30)
        found = t * (sums_of_columns(kernel * by_rows(exact)) + 1e-30)
        before = error
        error = tl.sum(tl.sum(tl.abs(found - mass_b), 1), 0)
        factor = tl.where(before > 1.0e38, factor, _fitted(factor, error / before))
        spent += 8
        # NaN compares as false
        busy = tl.where((error > wanted) & (error < 1.0e38) & (spent < most), 1, 0)
    return t, factor, error


@triton.jit(do_not_specialize=["shift", "most"])
def _rough_kernel(
    x,  # [S, N, N] float32
    y,  # [S', M, M] float32
    a,  # [S, N] float32
    b,  # [S', M] float32
    i,  # [B] int64
    j,  # [B] int64
    alpha,  # [B] float32
    target,  # [B] float32, epsilon
    first,  # [B] float32, epsilon
    linear,  # [B, N, M] float32, read if LINEAR
    begin,  # [B, N, M] float32, cost to begin with, read if BEGIN
    chosen,  # [B] int64, one where a problem begins so, read if BEGIN
    noise,  # [N, M] float32
    work,  # [B, N, M] float32, scratch
    plan,  # [B, N, M] float32, written
    f,  # [B, N] float64, written
    g,  # [B, M] float64, written
    done_out,  # [B] int64, written
    shift,  # zero
    most,
    tol,  # float
    inner_tol,  # float
    LINEAR: tl.constexpr,
    BEGIN: tl.constexpr,
    CHUNK: tl.constexpr,
    RI: tl.constexpr,
    CI: tl.constexpr,
    RT: tl.constexpr,
    CT: tl.constexpr,
):
    """Iterate one problem until its plan has nearly settled."""
    N: tl.constexpr = RI * RT
    M: tl.constexpr = CI * CT
    number = tl.program_id(0).to(tl.int64)
    x += tl.load(i + number) * N * N
    y += tl.load(j + number) * M * M
    a += tl.load(i + number) * N + line(RI, RT)
    b += tl.load(j + number) * M + line(CI, CT)
    f += number * N + line(RI, RT)
    g += number * M + line(CI, CT)
    plan += number * N * M
    work += number * N * M
    weight = -4.0 * tl.load(alpha + number)
    last = tl.load(target + number)
    epsilon = tl.maximum(tl.load(first + number), last)
    little = read(noise, shift, RI, CI, RT, CT)
    write(plan, by_rows(tl.load(a)) * by_columns(tl.load(b)) * little, shift, RI, CI, RT, CT)
    tl.store(g, tl.zeros([CI, CT], tl.float64))
    factor = 1.0
    done = 0
    going = 1
    while going == 1:
        cross(x, plan, y, work, N, M, CHUNK, "tf32x3")
        mass_a, mass_b = tl.maximum(tl.load(a), 1e-30), tl.maximum(tl.load(b), 1e-30)
        cost = weight * read(work, shift, RI, CI, RT, CT)
        if BEGIN:  # noqa: SIM102, a constant beside numbers
            if (done == 0) & (tl.load(chosen + number) == 1):
                cost = -0.25 * weight * read(begin + number * N * M, shift, RI, CI, RT, CT)
        if LINEAR:
            cost += read(linear + number * N * M, shift, RI, CI, RT, CT)
        column = tl.where(mass_b > 1e-29, tl.load(g).to(tl.float32), -float("inf"))
        kernel = (by_columns(column) - cost) / epsilon
        # no row or column is empty
        largest = tl.max(tl.max(kernel, 1), 2)
        kernel = tl.exp(tl.maximum(kernel - by_rows(largest), -70.0))
        kernel = kernel * by_rows(mass_a) * by_columns(mass_b)
        # exact rows, so that the columns go on from g
        s = mass_a / (sums_of_rows(kernel) + 1e-30)
        t = tl.full([CI, CT], 1.0, tl.float32)
        arrived = epsilon <= last
        wanted = tl.where(arrived, inner_tol, 1e-2)
        t, factor, _ = scaled(kernel, s, t, mass_a, mass_b, factor, wanted, 48)
        exact = mass_a / (sums_of_rows(kernel * by_columns(t)) + 1e-30)
        kernel = kernel * by_rows(exact) * by_columns(t)
        moved = tl.abs(kernel - read(plan, shift, RI, CI, RT, CT))
        change = tl.sum(tl.sum(sums_of_columns(moved), 1), 0)
        write(plan, kernel, shift, RI, CI, RT, CT)
        tl.store(f, (epsilon * (tl.log(exact) - largest)).to(tl.float64))
        tl.store(g, tl.load(g) + (epsilon * tl.log(t)).to(tl.float64))
        done += 1
        settled = arrived & (change <= tol)
        # NaN compares as false, and ends with the iterations
        going = tl.where(settled | (done >= most), 0, 1)
        factor = tl.where(arrived, 1.0 + 0.9 * (factor - 1.0), 1.0)
        epsilon = tl.maximum(0.6 * epsilon, last)
    tl.store(done_out + number, done)


def rough(
    tables: tuple[torch.Tensor, ...],
    index: tuple[torch.Tensor, torch.Tensor],
    alpha: torch.Tensor,
    linear: torch.Tensor | None,
    begin: tuple[torch.Tensor, torch.Tensor] | None,
    target: torch.Tensor,
    first: torch.Tensor,
    noise: torch.Tensor,
) -> Warm:
    """Iterate problems (k,), from a x b times ``noise`` (N, M), or from costs that are chosen.

    ``tables`` are distances and weights of all spaces of both sides, float32, of powers of two;
    ``index`` is which of them each problem compares, ``linear`` (1 - alpha) M (k, N, M),
    ``begin`` costs and which problems begin with them, and the epsilons are (k,), in its units.
    """
    (n, m), count = noise.shape, len(alpha)
    made = Warm(
        torch.empty(count, n, m, dtype=torch.float32, device=noise.device),
        torch.empty(count, n, dtype=torch.float64, device=noise.device),
        torch.empty(count, m, dtype=torch.float64, device=noise.device),
        torch.empty(count, dtype=torch.int64, device=noise.device),
    )
    tile, unread = tile_of(n, m, ENTRIES), noise.float()
    launch(
        _rough_kernel, (count,), *tables, *index, alpha.float(), target.float(), first.float(),
        unread if linear is None else linear.float(),
        *((unread, index[0]) if begin is None else (begin[0].float(), begin[1].long())), unread,
        torch.empty_like(made.plan), *made, 0, _ROUGH_ITERATIONS, _ROUGH_TOLERANCE, _ROUGH_ERROR,
        LINEAR=linear is not None, BEGIN=begin is not None, CHUNK=min(32, n), **tile._asdict(),
        num_warps=tile.warps, num_stages=2, maxnreg=REGISTERS,
    )  # fmt: skip
    return made
