"""Linear problems of one small problem in Triton, its kernel on chip: what other programs call.

Sinkhorn's iteration is slow where epsilon is small, and a Newton step solves a system. Plans of one
outer loop are alike, though: the inverse of one second derivative, float32, leads many of them to
their marginals in a step or two. Where it does not, Sinkhorn goes on, and it is made anew.
"""

import triton
import triton.language as tl

from torchgw._batch.sweep_triton import next_relaxation, relaxed
from torchgw._batch.tile_triton import (
    by_columns,
    by_rows,
    coarse,
    distance,
    line,
    read,
    sums_of_columns,
    sums_of_rows,
    write,
    write_row,
)


@triton.jit(noinline=True)
def invert(
    plan, a, b, out, lines, count, shift,
    N: tl.constexpr, M: tl.constexpr, CHUNK: tl.constexpr,
    RI: tl.constexpr, CI: tl.constexpr, RT: tl.constexpr, CT: tl.constexpr,
    LEVEL: tl.constexpr = True, RIDGE: tl.constexpr = 1e-6,
):  # fmt: skip
    """Write minus the inverse of the dual's second derivative in g, (M, M), all in memory."""
    # In units of the roots of `b`. `lines` begins with the masses of the plan's columns as shares
    # of `b`. `LEVEL` tells that a multiple of all masses is a plan alike, and `RIDGE` is added to
    # every derivative. By symmetric sweeps without pivoting of the first `count` rows; the others
    # have nothing beside their diagonal.
    columns, middle = tl.arange(0, M), tl.arange(0, CHUNK)
    root = tl.sqrt(tl.maximum(tl.load(b + columns), 1e-30).to(tl.float32))
    total = tl.zeros([M, M], tl.float32)
    for begin in range(0, N, CHUNK):
        mass = tl.maximum(tl.load(a + begin + middle), 1e-30).to(tl.float32)
        share = tl.rsqrt(mass)
        left = tl.load(plan + (begin + middle)[None, :] * M + columns[:, None]).to(tl.float32)
        left = left * share[None, :] / root[:, None]
        right = tl.load(plan + (begin + middle)[:, None] * M + columns[None, :]).to(tl.float32)
        right = right * share[:, None] / root[None, :]
        if LEVEL:
            coarse_left, coarse_right = coarse(left), coarse(right)
            total = tl.dot(left - coarse_left, coarse_right, total, input_precision="tf32")
            total = tl.dot(coarse_left, right - coarse_right, total, input_precision="tf32")
            total = tl.dot(coarse_left, coarse_right, total, input_precision="tf32")
        else:
            # what calls this needs the cache, of which tensor cores leave less. [L1263]
            total = tl.dot(left, right, total, input_precision="ieee")
    # a multiple of all masses may change nothing: that direction is given a derivative
    total = (root[:, None] * root[None, :] if LEVEL else 0.0) - total
    held = tl.load(lines + columns) + RIDGE
    total += tl.where(columns[:, None] == columns[None, :], held[None, :], 0.0)
    tl.store(out + columns[:, None] * M + columns[None, :], total)
    tl.debug_barrier()
    matrix = read(out, shift, RI, CI, RT, CT)
    rows, columns = line(RI, RT), line(CI, CT)
    for group in tl.static_range(RI):
        for place in range(tl.minimum(count - group * RT, RT)):
            k = group * RT + place
            shared = lines + (2 + place % 2) * M
            write_row(shared, matrix, group, place, shift, RI, CI, RT, CT)
            tl.debug_barrier()
            pivot = tl.maximum(tl.load(shared + k), 1e-6)
            share = tl.load(shared + rows) / pivot
            # row and column k are divided by the pivot by the same update
            share = tl.where(rows == k, 1.0 - 1.0 / pivot, share)
            row = tl.load(shared + columns)
            row = tl.where(columns == k, pivot - 1.0, row)
            matrix -= by_rows(share) * by_columns(row)
    # which leaves its diagonal two too large
    swept = (by_rows(rows) == by_columns(columns)) & by_columns(columns < count)
    matrix -= tl.where(swept, 2.0, 0.0)
    write(out, matrix, shift, RI, CI, RT, CT)
    tl.debug_barrier()


@triton.jit
def stepped(inverse, lines, missing, columns, M: tl.constexpr, CHUNK: tl.constexpr):
    """Multiply what the columns are missing [CI, CT] by the inverse, through memory."""
    tl.store(lines + columns, missing)
    tl.debug_barrier()
    across, down = tl.arange(0, M), tl.arange(0, CHUNK)
    sums = tl.zeros([CHUNK, M], tl.float32)
    for begin in range(0, M, CHUNK):
        values = tl.load(inverse + (begin + down)[:, None] * M + across[None, :])
        sums -= values * tl.load(lines + begin + down)[:, None]
    tl.store(lines + M + across, tl.sum(sums, 0))
    tl.debug_barrier()
    return tl.load(lines + M + columns)


@triton.jit
def _newton(
    kernel, exact, t, found, mass_a, mass_b, inverse, lines,
    M: tl.constexpr, CHUNK: tl.constexpr, CI: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Solve for the change of log t by conjugate gradients, an inverse alike before them."""
    # That inverse is of float32: it misses parts of a plan that are joined by next to nothing.
    columns = line(CI, CT)
    used, root = mass_b > 1e-29, tl.rsqrt(mass_b)
    missing = tl.where(used, mass_b - found, 0.0)
    change, direction, turns = missing * 0.0, missing * 0.0, 0
    left = tl.sum(tl.sum(tl.abs(missing), 0), 0)
    enough, size = 0.01 * left, left * 0.0
    while (turns < 16) & (left > enough):
        step = stepped(inverse, lines, (missing * root).to(tl.float32), columns, M, CHUNK)
        step = tl.where(used, step * root, 0.0)
        before, size = size, tl.sum(tl.sum(missing * step, 0), 0)
        kept = tl.where(before > 0, size / tl.where(before > 0, before, 1.0), 0.0)
        direction = step + kept * direction
        share = exact * exact * sums_of_rows(kernel * by_columns(t * direction)) / mass_a
        answer = found * direction - t * sums_of_columns(kernel * by_rows(share))
        answer = tl.where(used, answer, 0.0)
        curve = tl.sum(tl.sum(direction * answer, 0), 0)
        length = tl.where(curve > 0, size / tl.where(curve > 0, curve, 1.0), 0.0)
        change += length * direction
        missing -= length * answer
        left = tl.sum(tl.sum(tl.abs(missing), 0), 0)
        turns = tl.where(curve > 0, turns + 1, 16)
    return change, turns


@triton.jit
def solved(
    kernel, mass_a, mass_b, a, b, f, g, unit, near, factor, wanted, most, tick,
    held, inverse, lines, shift, CHUNK: tl.constexpr, BELOW: tl.constexpr,
    RI: tl.constexpr, CI: tl.constexpr, RT: tl.constexpr, CT: tl.constexpr,
    SQUARE_RI: tl.constexpr, SQUARE_CI: tl.constexpr,
    SQUARE_RT: tl.constexpr, SQUARE_CT: tl.constexpr,
):  # fmt: skip
    """Scale a kernel until the error of its columns is as ``wanted``; its rows are exact."""
    # `near` is one where `inverse` is that of a plan alike; it is made once the error is at most
    # `BELOW`. `f` and `g`, in memory, go with the kernel. Returns it, `near`, the factor of the
    # relaxation, the error, and how many iterations were spent.
    M: tl.constexpr = CI * CT
    TINY: tl.constexpr = 1e-30 if kernel.dtype == tl.float32 else 1e-290
    columns = line(CI, CT)
    count = tl.max(tl.max(tl.where(mass_b > 1e-29, columns + 1, 0), 1), 0)
    # nothing is divided by zero where there is no weight
    s = mass_a / (sums_of_rows(kernel) + TINY)
    t, exact = mass_b * 0.0 + 1.0, s
    found = sums_of_columns(kernel * by_rows(s)) + TINY
    error = distance(found, mass_b)
    spent, ticks, careful, limit = 0, 0, 0, BELOW * 1.0
    # NaN compares as false
    busy = tl.where((error > wanted) & (error < 1.0e38), 1, 0)
    while busy == 1:
        if (near == 0) & (error <= limit):
            write(held, kernel * by_rows(exact) * by_columns(t), shift, RI, CI, RT, CT)
            tl.store(f, tl.load(f) + unit * tl.log(exact))
            tl.store(g, tl.load(g) + unit * tl.log(t))
            tl.store(lines + columns, (found / mass_b).to(tl.float32))
            tl.debug_barrier()
            invert(
                held, a, b, inverse, lines, count, shift, RI * RT, M, CHUNK,
                SQUARE_RI, SQUARE_CI, SQUARE_RT, SQUARE_CT,
            )  # fmt: skip
            kernel = read(held, shift, RI, CI, RT, CT)
            s, t = mass_a * 0.0 + 1.0, mass_b * 0.0 + 1.0
            near, limit, careful = 1, (0.1 * error).to(tl.float32), 2
        if near == 1:
            root = tl.rsqrt(mass_b)
            step = stepped(
                inverse, lines, ((mass_b - found) * root).to(tl.float32), columns, M, CHUNK
            )
            step = tl.where(mass_b > 1e-29, step * root, 0.0)
            if kernel.dtype == tl.float64:  # noqa: SIM102, a constant beside numbers
                if careful == 1:
                    step, turns = _newton(
                        kernel, exact, t, found, mass_a, mass_b, inverse, lines,
                        M, CHUNK, CI, CT,
                    )  # fmt: skip
                    spent += turns
            t = t * tl.exp(tl.minimum(tl.maximum(step, -1.0), 1.0))
            spent += 1
        else:
            for _ in range(tick):
                sums = sums_of_columns(kernel * by_rows(s)) + TINY
                t = relaxed(t, mass_b, sums, factor - 1.0)
                sums = sums_of_rows(kernel * by_columns(t)) + TINY
                s = relaxed(s, mass_a, sums, factor - 1.0)
            spent += tick
            ticks += 1
        exact = mass_a / (sums_of_rows(kernel * by_columns(t)) + TINY)
        found = t * (sums_of_columns(kernel * by_rows(exact)) + TINY)
        before = error
        error = distance(found, mass_b)
        fitted = next_relaxation(factor, error / before)
        factor = tl.where((near == 0) & (ticks > 1), fitted, factor)
        if near == 1:
            s = exact
        # parts joined by too little must first grow together, which no error tells
        stalls = error > tl.where(careful == 1, 2.0, 0.7) * before
        if kernel.dtype == tl.float64:
            # an inverse of this very plan that does not lead on
            careful = tl.where(stalls, tl.where((near == 1) & (careful == 2), 1, 0), careful)
            stalls = stalls & (careful == 0)
        near = tl.where(stalls, 0, near)
        busy = tl.where((error > wanted) & (error < 1.0e38) & (spent < most), 1, 0)
    tl.store(f, tl.load(f) + unit * tl.log(exact))
    tl.store(g, tl.load(g) + unit * tl.log(t))
    return kernel * by_rows(exact) * by_columns(t), near, factor, error, spent
