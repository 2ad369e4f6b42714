"""Outer iterations of many problems near their fixed points, in Triton: one program each.

In float32, but to float64's fixed point: costs and potentials are float64, and where the point of
linearisation moves by dP, a difference of two numbers of float32 and exact, costs change by
-4 alpha X dP Y. Errors are relative to the change, which vanishes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from torchgw._batch.rough_triton import ENTRIES, REGISTERS, scaled
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

__all__ = ["settle"]

# Outer iterations, and iterations of one linear problem, at most; its column error as a share of
# the last change, and what float32 does not go below: Newton steps remove it afterwards. [L534]
_ITERATIONS, _INNER_ITERATIONS = 40, 48
_SHARE, _ERROR = 0.1, 3e-6


@triton.jit(do_not_specialize=["shift", "most", "most_inner"])
def _settle_kernel(
    x,  # [S, N, N] float32
    y,  # [S', M, M] float32
    a,  # [S, N] float32
    b,  # [S', M] float32
    i,  # [B] int64
    j,  # [B] int64
    alpha,  # [B] float32
    epsilon,  # [B] float64
    cost,  # [k, N, M] float64, gradient at plan, updated
    work,  # [k, N, M] float32, scratch
    plan,  # [k, N, M] float32, updated
    f,  # [k, N] float64, updated
    g,  # [k, M] float64, updated
    done,  # [k] int64, updated
    shift,  # zero
    most,
    most_inner,
    tol,  # float
    inner_tol,  # float
    share,  # float
    CHUNK: tl.constexpr,
    RI: tl.constexpr,
    CI: tl.constexpr,
    RT: tl.constexpr,
    CT: tl.constexpr,
):
    """Iterate one problem until its plan stays where it is."""
    N: tl.constexpr = RI * RT
    M: tl.constexpr = CI * CT
    number = tl.program_id(0).to(tl.int64)
    x += tl.load(i + number) * N * N
    y += tl.load(j + number) * M * M
    a += tl.load(i + number) * N + line(RI, RT)
    b += tl.load(j + number) * M + line(CI, CT)
    f += number * N + line(RI, RT)
    g += number * M + line(CI, CT)
    cost += number * N * M
    plan += number * N * M
    work += number * N * M
    weight = -4.0 * tl.load(alpha + number)
    unit = tl.load(epsilon + number)
    factor, last, rate = 1.0, 0.0, 0.0
    turns = 0
    going = 1
    while going == 1:
        mass_a, mass_b = tl.maximum(tl.load(a), 1e-30), tl.maximum(tl.load(b), 1e-30)
        column = tl.where(mass_b > 1e-29, tl.load(g), -float("inf"))
        kernel = by_rows(tl.load(f)) + by_columns(column) - read(cost, shift, RI, CI, RT, CT)
        # no row or column is empty
        kernel = tl.minimum(tl.maximum((kernel / unit).to(tl.float32), -60.0), 60.0)
        kernel = tl.exp(kernel) * by_rows(mass_a) * by_columns(mass_b)
        s = mass_a / (sums_of_rows(kernel) + 1e-30)
        t = tl.full([CI, CT], 1.0, tl.float32)
        wanted = tl.maximum(tl.minimum(tl.where(last > 0, share * last, 1e-4), 1e-4), inner_tol)
        t, factor, error = scaled(kernel, s, t, mass_a, mass_b, factor, wanted, most_inner)
        exact = mass_a / (sums_of_rows(kernel * by_columns(t)) + 1e-30)
        kernel = kernel * by_rows(exact) * by_columns(t)
        tl.store(f, tl.load(f) + unit * tl.log(exact))
        tl.store(g, tl.load(g) + unit * tl.log(t))
        moved = kernel - read(plan, shift, RI, CI, RT, CT)
        change = tl.sum(tl.sum(sums_of_columns(tl.abs(moved)), 1), 0)
        turns += 1
        going = tl.where((change <= tol) | (turns >= most) | (change != change), 0, 1)
        # a sequence that falls by the same share goes to its limit, by the engine's rule [L465]
        known = (last > 0) & (error <= 0.1 * change) & (change <= 1e-2)
        now = tl.where(known, change / tl.where(last > 0, last, 1.0), 0.0)
        steady = (now > 0.3) & (now < 0.97) & (tl.abs(now - rate) <= 0.1 * rate) & (going == 1)
        ahead = tl.where(steady, now / (1.0 - tl.where(steady, now, 0.0)), 0.0)
        rate = tl.where(steady, 0.0, now)
        last = tl.where(steady, 0.0, change)
        following = kernel + ahead * moved
        if going == 1:
            # of what is stored, so that costs follow the plan exactly
            write(work, following - (kernel - moved), shift, RI, CI, RT, CT)
        write(plan, following, shift, RI, CI, RT, CT)
        if going == 1:
            cross(x, work, y, work, N, M, CHUNK, "tf32x3")
            moved = weight * read(work, shift, RI, CI, RT, CT)
            write(cost, read(cost, shift, RI, CI, RT, CT) + moved, shift, RI, CI, RT, CT)
            tl.debug_barrier()
        factor = 1.0 + 0.9 * (factor - 1.0)
    tl.store(done + number, tl.load(done + number) + turns)


def settle(
    tables: tuple[torch.Tensor, ...],
    index: tuple[torch.Tensor, torch.Tensor],
    alpha: torch.Tensor,
    warm: Warm,
    cost: torch.Tensor,
    epsilon: torch.Tensor,
    tol: float,
) -> None:
    """Iterate problems (k,) from plans with gradients ``cost`` (k, N, M) float64; change both.

    ``tables`` and ``index`` are as in ``rough``; ``tol`` is the change of a plan that the engine
    will ask for.
    """
    tile = tile_of(cost.shape[1], cost.shape[2], ENTRIES)
    launch(
        _settle_kernel, (len(cost),), *tables, *index, alpha.float(), epsilon, cost,
        torch.empty_like(warm.plan), *warm, 0, _ITERATIONS, _INNER_ITERATIONS, tol,
        _ERROR, _SHARE, CHUNK=min(32, cost.shape[1]), **tile._asdict(), num_warps=tile.warps,
        num_stages=2, maxnreg=REGISTERS,
    )  # fmt: skip
