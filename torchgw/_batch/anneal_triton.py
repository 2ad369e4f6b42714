"""Iterations of many problems while epsilon falls, in Triton: one program each, float32.

From a x b down to the target, where linear problems are easy and need not be exact: Sinkhorn alone
solves them, and what tensor cores multiply is in half precision. Plans are multiplied by ``SCALE``
there, so that small entries have digits.
"""

import triton
import triton.language as tl

from torchgw._batch.tile_triton import (
    by_columns,
    by_rows,
    cross,
    distance,
    line,
    problem,
    read,
    sums_of_columns,
    sums_of_rows,
    write,
)


@triton.jit
def _share(mass, sums):
    """Divide masses by sums, by two multiplications: a division is ten instructions."""
    root = tl.rsqrt(sums + 1e-30)
    return mass * root * root


@triton.jit
def exponentials(cost, column, mass_b, unit):
    """Compute exp((column - cost) / unit), of which the largest in each row and column is one."""
    # Returns them, and logarithms of what rows and columns were multiplied by, negative. Nothing is
    # empty but columns without weight.
    PER_UNIT: tl.constexpr = 1.4426950408889634  # exp(x) = exp2(PER_UNIT x)
    rate = PER_UNIT / unit
    column = tl.where(mass_b > 1e-29, rate * column, -float("inf"))
    kernel = by_columns(column) - rate * cost
    largest = tl.max(tl.max(kernel, 1), 2)
    kernel -= by_rows(largest)
    top = tl.where(mass_b > 1e-29, tl.max(tl.max(kernel, 0), 1), 0.0)
    kernel = tl.exp2(tl.maximum(kernel - by_columns(top), -115.0))
    return kernel, largest / PER_UNIT, top / PER_UNIT


@triton.jit(do_not_specialize=["shift", "most"])
def anneal_kernel(
    x,  # [S, N, N] float16, their largest entries are one
    y,  # [S', M, M] float16
    a,  # [S, N] float32
    b,  # [S', M] float32
    i,  # [B] int64
    j,  # [B] int64
    weight,  # [B] float32, what X P Y is multiplied by in the cost
    target,  # [B] float32, epsilon
    first,  # [B] float32, epsilon
    linear,  # [B, N, M] float32, read if LINEAR
    begin,  # [B, N, M] float32, cost to begin with times alpha, read if BEGIN
    chosen,  # [B] int64, one where a problem begins so, read if BEGIN
    noise,  # [N, M] float32
    work,  # [B, N, M] float32, scratch
    point,  # [B, N, M] float16, scratch, where it is linearised
    held,  # [B, N, M] float16, scratch, the last plan
    plan,  # [B, N, M] float32, written
    f,  # [B, N] float64, written
    g,  # [B, M] float64, written
    done,  # [B] int64, written
    ended,  # [B] int64, a place in ``warm.ENDS``, written
    shift,  # zero
    most,
    LINEAR: tl.constexpr,
    BEGIN: tl.constexpr,
    CHUNK: tl.constexpr,
    BUDGET: tl.constexpr,
    MOST: tl.constexpr,
    ERROR: tl.constexpr,
    RELAXATION: tl.constexpr,
    INERTIA: tl.constexpr,
    MOMENTUM: tl.constexpr,
    DAMPING: tl.constexpr,
    DECAY: tl.constexpr,
    SCALE: tl.constexpr,
    RI: tl.constexpr,
    CI: tl.constexpr,
    RT: tl.constexpr,
    CT: tl.constexpr,
):
    """Iterate one problem until epsilon has fallen."""
    N: tl.constexpr = RI * RT
    M: tl.constexpr = CI * CT
    number, x, y, a, b = problem(x, y, a, b, i, j, N, M)
    weight = tl.load(weight + number) / SCALE
    a += line(RI, RT)
    b += line(CI, CT)
    f += number * N + line(RI, RT)
    g += number * M + line(CI, CT)
    plan += number * N * M
    work += number * N * M
    point += number * N * M
    held += number * N * M
    linear += number * N * M
    begin += number * N * M
    last = tl.load(target + number)
    epsilon = tl.maximum(tl.load(first + number), last)
    kernel = by_rows(tl.load(a)) * by_columns(tl.load(b)) * read(noise, shift, RI, CI, RT, CT)
    kernel *= SCALE
    write(point, kernel.to(tl.float16), shift, RI, CI, RT, CT)
    write(held, kernel.to(tl.float16), shift, RI, CI, RT, CT)
    tl.store(g, tl.zeros([CI, CT], tl.float64))
    folded, step = tl.sum(tl.sum(kernel, 0), 0), tl.zeros([RT, CT], tl.float32)
    budget, turns, end, going = BUDGET, 0, 2, 1
    while going == 1:
        cross(x, point, y, point, work, N, M, CHUNK)
        mass_a, mass_b = tl.maximum(tl.load(a), 1e-30), tl.maximum(tl.load(b), 1e-30)
        cost = weight * read(work, shift, RI, CI, RT, CT)
        if BEGIN:  # noqa: SIM102, a constant beside numbers
            if (turns == 0) & (tl.load(chosen + number) == 1):
                cost = read(begin, shift, RI, CI, RT, CT)
        if LINEAR:
            cost += read(linear, shift, RI, CI, RT, CT)
        kernel, largest, top = exponentials(cost, tl.load(g).to(tl.float32), mass_b, epsilon)
        t, growth = mass_b, mass_b * 0.0 + 1.0
        s = _share(mass_a, sums_of_rows(kernel * by_columns(t)))
        spent, busy, error = 0, 1, 0.0
        while busy == 1:
            sums = sums_of_columns(kernel * by_rows(s))
            error = distance(t * sums, mass_b)
            ratio = _share(mass_b, t * sums)
            further = 1.0 + RELAXATION * (tl.minimum(tl.maximum(ratio, 0.5), 2.0) - 1.0)
            growth = ratio * further * (1.0 + INERTIA * (growth - 1.0))
            growth = tl.minimum(tl.maximum(growth, 0.125), 8.0)
            t = tl.maximum(t * growth, 1e-30)
            s = _share(mass_a, sums_of_rows(kernel * by_columns(t)))
            spent += 1
            # NaN compares as false
            busy = tl.where((error > ERROR) & (error < 1.0e38) & (spent < budget), 1, 0)
        kernel = SCALE * (kernel * by_rows(s) * by_columns(t))
        # plans go on in one direction while epsilon falls, or jump to and fro: sums of what each
        # thread holds tell which
        folded, folded_before, step_before = tl.sum(tl.sum(kernel, 0), 0), folded, step
        step = folded - folded_before
        back = tl.sum(tl.sum(step * step_before, 1), 0) < 0.0
        lead = tl.where(turns == 0, 0.0, tl.where(back, -DAMPING, MOMENTUM))
        turns += 1
        budget = tl.where(error > ERROR, tl.minimum(2 * budget, MOST), budget)
        end = tl.where(error == error, 2, 3)
        going = tl.where((DECAY * epsilon > last) & (end == 2) & (turns < most), 1, 0)
        moved = kernel - read(held, shift, RI, CI, RT, CT).to(tl.float32)
        write(point, (kernel + lead * moved).to(tl.float16), shift, RI, CI, RT, CT)
        write(held, kernel.to(tl.float16), shift, RI, CI, RT, CT)
        if going == 0:
            write(plan, kernel * (1.0 / SCALE), shift, RI, CI, RT, CT)
        tl.store(f, (epsilon * (tl.log(tl.maximum(s / mass_a, 1e-37)) - largest)).to(tl.float64))
        tl.store(g, tl.load(g) + (epsilon * (tl.log(t / mass_b) - top)).to(tl.float64))
        epsilon = tl.maximum(DECAY * epsilon, last)
    tl.store(done + number, turns)
    tl.store(ended + number, end)
