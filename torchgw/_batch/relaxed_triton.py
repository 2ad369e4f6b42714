"""Relaxed problems in Triton: one program each, in float32 until its plan nearly settles.

The iteration is the engine's, and goes on in float64 by the same kernel. Plans are normalised, as
in ``relaxed.py``.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from torchgw._batch.half_step_triton import (
    begun,
    column_sums,
    filled,
    further,
    half_step,
    row_sums,
    through,
)
from torchgw._batch.inner_triton import invert, stepped
from torchgw._batch.rough_triton import (
    CHUNK,
    DAMPING,
    ENTRIES,
    MOMENTUM,
    NEAR,
    REGISTERS,
    SCALE,
    WIDE_CHUNK,
    halved,
)
from torchgw._batch.sweep import BUDGET, DECAY, Relaxed
from torchgw._batch.sweep_triton import keeps_falling, next_relaxation
from torchgw._batch.tile_triton import (
    by_columns,
    by_rows,
    cross,
    line,
    problem,
    read,
    sums_of_columns,
    sums_of_rows,
    tiles_of,
    total,
    write,
)
from torchgw._sinkhorn.annealing import INNER_SHARE, MET, STUCK
from torchgw._tensors.ahead import launch

# Change of the plan at which float32 hands over, and the error of its linear problems. [L1141]
_ROUGH_TOLERANCE, _ROUGH_ERROR = 5e-5, 1e-5
# Iterations at the last epsilon after which float32 hands over, and of a settled plan that float64
# does not bring to its marginals. [L870]
_STUCK = {torch.float32: 32, torch.float64: STUCK}
# Registers of a thread in float32 and in float64. [L870] [L1200]
_REGISTERS = {torch.float32: REGISTERS, torch.float64: 255}
# Bytes of an entry times the threads that share a row of a matrix, and columns of a kept kernel
# that each of them adds up. [L1225]
_ACROSS, _WIDE = 64, 4
# Sinkhorn iterations between two looks at the error. [L1200]
_TICK = 4
# Partial problems in float64 are led on by an inverse after so many Sinkhorn iterations, until so
# many inverses have not led on; the largest relative step, and the derivative that is given to
# pairs of points which nothing joins to others. [L1263]
_WAIT, _FAILURES, _FURTHEST, _RIDGE = 24, 4, 6.4, 1e-5


class Eased(NamedTuple):
    """Normalised plans of k problems, and what the engine asks of them."""

    plan: torch.Tensor  # (k, N, M)
    f: torch.Tensor  # (k, N) in cost units
    g: torch.Tensor  # (k, M)
    done: torch.Tensor  # (k,) int64, outer iterations
    inner: torch.Tensor  # (k,) int64, Sinkhorn iterations
    ended: torch.Tensor  # (k,) int64, places in ``warm.ENDS``
    error: torch.Tensor  # (k,) that a half-step would correct
    entropy: torch.Tensor  # (k,) KL(P | a x b)


@triton.jit
def _sum(line):
    """Sum numbers of rows or of columns."""
    return tl.sum(tl.sum(line, 1), 0)


@triton.jit
def _divergence(masses, weights):
    """Compute p log(p / a); logarithms in float32 are right to some 1e-7, and their sum to less."""
    share = (masses / tl.maximum(weights, 1e-37)).to(tl.float32)
    return masses * tl.log(tl.maximum(share, 1e-37))


@triton.jit
def _penalty(bound):
    """Compute 2 rho from 1 / (2 rho), and zero from zero: what is strict costs nothing."""
    return tl.where(bound > 0, 1.0 / tl.where(bound > 0, bound, 1.0), 0.0)


@triton.jit
def _best_mass(slope, linear, pull):
    """Find the mass at which slope + linear / mass + pull log(mass) = 0, as ``relaxed.py`` does."""
    least = tl.where(linear > 0, tl.log(tl.maximum(linear, 1e-37) / pull), -float("inf"))
    found = tl.maximum(-slope / pull, least)
    for _ in range(30):
        part = linear * tl.exp(-found)
        rest = (slope + part + pull * found) / tl.maximum(pull - part, 1e-12 * pull)
        found = tl.maximum(found - rest, least)
    return tl.exp(found)


@triton.jit
def _plan(
    plan, half, exactly, shift, SCALE: tl.constexpr,
    RI: tl.constexpr, CI: tl.constexpr, RT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Read a plan or, unless ``exactly``, one that is kept in half precision, times SCALE."""
    if exactly:
        values = read(plan, shift, RI, CI, RT, CT)
    else:
        values = read(half, shift, RI, CI, RT, CT).to(plan.dtype.element_ty) / SCALE
    return values


@triton.jit(noinline=True)
def _invert_partial(
    kept, scaled, work, masses, b, inverse, columns_of, count, shift,
    N: tl.constexpr, M: tl.constexpr, CHUNK: tl.constexpr, RIDGE: tl.constexpr,
    RI: tl.constexpr, CI: tl.constexpr, RT: tl.constexpr, CT: tl.constexpr,
    SQUARE_RI: tl.constexpr, SQUARE_CI: tl.constexpr,
    SQUARE_RT: tl.constexpr, SQUARE_CT: tl.constexpr,
):  # fmt: skip
    """Write the inverse by which full columns of a partial problem are led to their weights."""
    # Rows that are not full share a level: for the columns they are one row. `masses` (N) of rows,
    # and those of columns as shares of `b`, with which `columns_of` begins, are negative where
    # these are not full; both are updated. A call, so that its matrices need no registers
    # elsewhere.
    tl.debug_barrier()
    rows, columns, down, across = line(RI, RT), line(CI, CT), tl.arange(0, N), tl.arange(0, M)
    row, column = tl.load(masses + rows), tl.load(columns_of + columns)
    all_rows, all_columns = tl.load(masses + down), tl.load(columns_of + across)
    matrix = read(kept, shift, RI, CI, RT, CT)
    matrix = matrix * by_rows(tl.load(scaled + rows)) * by_columns(tl.load(scaled + N + columns))
    shared = sums_of_columns(tl.where(by_rows(row < 0), matrix, 0.0))
    place = tl.min(tl.where(all_rows < 0, down, N), 0)
    free = -tl.sum(tl.minimum(all_rows, 0.0), 0)
    matrix = tl.where(by_rows(row > 0), matrix, 0.0)
    matrix = tl.where(by_rows(rows == place), by_columns(shared), matrix)
    matrix = tl.where(by_columns(column > 0), matrix, 0.0)
    write(work, matrix, shift, RI, CI, RT, CT)
    tl.debug_barrier()
    all_rows = tl.where(all_rows > 0, all_rows, tl.where(down == place, free, 1.0))
    tl.store(masses + down, all_rows)
    tl.store(columns_of + across, tl.where(all_columns > 0, all_columns, 1.0))
    tl.debug_barrier()
    invert(
        work, masses, b, inverse, columns_of, count, shift, N, M, CHUNK,
        SQUARE_RI, SQUARE_CI, SQUARE_RT, SQUARE_CT, False, RIDGE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["shift", "tick", "most", "budget", "most_inner"])
def _relaxed_kernel(
    half_x,  # [S, N, N] float16, x over its largest entry, read unless FINAL
    half_y,  # [S', M, M] float16
    units,  # [k, 2] these largest entries
    half,  # [k, 3, N, M] float16, scratch, unless FINAL
    x,  # [S, N, N] of the dtype that is computed in, as all that has none here
    y,  # [S', M, M]
    a,  # [S, N]
    b,  # [S', M]
    i,  # [k] int64
    j,  # [k] int64
    alpha,  # [k]
    target,  # [k] epsilon
    first,  # [k] epsilon
    bound,  # [k, 2] 1 / (2 rho) of rows and columns, or the mass twice, if PARTIAL
    linear,  # [k, N, M], read if LINEAR
    begin,  # [k, N, M] cost to begin with, read if BEGIN
    chosen,  # [k] int64, one where a problem begins so, read if BEGIN
    work,  # [k, N, M] scratch
    kept,  # [k, N, M] scratch, if KEPT
    lines,  # [k, LINES] scratch
    inverse,  # [k, M, M] float32, scratch, unless PARTIAL and not FINAL
    columns_of,  # [k, 4, M] float32, scratch, likewise
    plan,  # [k, N, M] updated
    f,  # [k, N] written
    g,  # [k, M] updated
    done_out,  # [k] int64, updated
    inner_out,  # [k] int64, updated
    ended,  # [k] int64, a place in ``warm.ENDS``, updated
    error_out,  # [k] written
    entropy_out,  # [k] written
    shift,  # zero
    tick,
    most,
    budget,
    most_inner,
    tol,  # float
    least_error,  # float, what linear problems are solved to at most
    inner_tol,  # float
    LINEAR: tl.constexpr,
    BEGIN: tl.constexpr,
    PARTIAL: tl.constexpr,
    FINAL: tl.constexpr,
    DECAY: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDE_CHUNK: tl.constexpr,
    MET: tl.constexpr,
    STUCK: tl.constexpr,
    NEAR: tl.constexpr,
    WAIT: tl.constexpr,
    FAILURES: tl.constexpr,
    FURTHEST: tl.constexpr,
    RIDGE: tl.constexpr,
    LINES: tl.constexpr,
    KEPT: tl.constexpr,
    SCALE: tl.constexpr,
    MOMENTUM: tl.constexpr,
    DAMPING: tl.constexpr,
    RI: tl.constexpr,
    CI: tl.constexpr,
    RT: tl.constexpr,
    CT: tl.constexpr,
    SQUARE_RI: tl.constexpr,
    SQUARE_CI: tl.constexpr,
    SQUARE_RT: tl.constexpr,
    SQUARE_CT: tl.constexpr,
):
    """Iterate one problem until its plan nearly settles or, if FINAL, has settled."""
    N: tl.constexpr = RI * RT
    M: tl.constexpr = CI * CT
    LEAST: tl.constexpr = -430.0 if FINAL else -115.0
    LOG2_E: tl.constexpr = 1.4426950408889634
    number, x, y, a, b = problem(x, y, a, b, i, j, N, M)
    half_x += tl.load(i + number) * N * N
    half_y += tl.load(j + number) * M * M
    half += number * 3 * N * M
    point, last_plan = half + N * M, half + 2 * N * M
    rows, columns = line(RI, RT), line(CI, CT)
    down, across = tl.arange(0, N), tl.arange(0, M)
    f += number * N
    g += number * M
    plan += number * N * M
    work += number * N * M
    linear += number * N * M
    begin += number * N * M
    kept += number * N * M
    lines += number * LINES
    own_costs, scaled, masses = lines + N + M, lines + 2 * (N + M), lines + 3 * (N + M)
    summed = lines + 4 * (N + M)
    inverse += number * M * M
    columns_of += number * 4 * M
    bound += number * 2
    weight = tl.load(alpha + number)
    last = tl.load(target + number)
    epsilon = last if FINAL else tl.maximum(tl.load(first + number), last)
    all_a, all_b = tl.load(a + down), tl.load(b + across)
    zero = 0.0 * last
    one = zero + 1.0
    step = tl.zeros([RT, CT], plan.dtype.element_ty)
    excess, change, rate, known, share, mass, error = zero, zero, zero, zero, one, one, one
    turns, spent, stuck, near = tl.load(done_out + number).to(tl.int32), 0, 0, 0
    failures = 0
    count = tl.max(tl.where(all_b > 0, across + 1, 0), 0)
    root = tl.sqrt(tl.maximum(all_b, 1e-30))
    end = tl.load(ended + number).to(tl.int32)
    over = tl.where(end == 2, 1, 0)
    going = tl.where(end == 3, 0, 1)
    start = read(plan, shift, RI, CI, RT, CT)
    tl.store(masses + rows, sums_of_rows(start))
    tl.store(masses + N + columns, sums_of_columns(start))
    if not FINAL:
        write(point, (start * SCALE).to(tl.float16), shift, RI, CI, RT, CT)
        write(last_plan, (start * SCALE).to(tl.float16), shift, RI, CI, RT, CT)
    while going == 1:
        mass_a, mass_b = tl.load(a + rows), tl.load(b + columns)
        weight_a, weight_b, crossed = weight, weight, weight
        if FINAL:
            cross(x, plan, y, work, work, N, M, CHUNK, masses, own_costs)
        elif epsilon > last:
            unit_x, unit_y = tl.load(units + 2 * number), tl.load(units + 2 * number + 1)
            weight_a, weight_b = weight * unit_x * unit_x, weight * unit_y * unit_y
            crossed = weight * unit_x * unit_y / SCALE
            cross(half_x, point, half_y, half, work, N, M, WIDE_CHUNK, masses, own_costs)
        else:
            cross(x, plan, y, work, work, N, M, CHUNK, masses, own_costs)
        p, q = tl.load(masses + rows), tl.load(masses + N + columns)
        own_a = 2.0 * weight_a * tl.load(own_costs + rows)
        own_b = 2.0 * weight_b * tl.load(own_costs + N + columns)
        cost = -4.0 * crossed * read(work, shift, RI, CI, RT, CT)
        if LINEAR and not PARTIAL:
            # with the mass of least objective
            exactly = FINAL or epsilon <= last
            here = _plan(plan, point, exactly, shift, SCALE, RI, CI, RT, CT)
            # without what a plan that is led ahead has below zero
            here = here if FINAL else tl.maximum(here, 0)
            value = 0.5 * (_sum(own_a * p) + _sum(own_b * q) + total(here * cost))
            divergence = _divergence(here, by_rows(mass_a) * by_columns(mass_b))
            bound_a, bound_b = tl.load(bound), tl.load(bound + 1)
            rho_a, rho_b = _penalty(bound_a), _penalty(bound_b)
            slope = value + epsilon * total(divergence)
            slope += rho_a * _sum(_divergence(p, mass_a)) + rho_b * _sum(_divergence(q, mass_b))
            spending = total(here * read(linear, shift, RI, CI, RT, CT))
            mass = _best_mass(slope, 0.5 * spending, rho_a + rho_b + epsilon)
            mass = tl.where((bound_a > 0) & (bound_b > 0), mass, one)
        if BEGIN:  # noqa: SIM102, a constant beside numbers
            if (turns == 0) & (tl.load(chosen + number) == 1):
                cost = weight * read(begin, shift, RI, CI, RT, CT)
        if LINEAR:
            cost += read(linear, shift, RI, CI, RT, CT) / mass
        # of the product of the plan's marginals
        mean = _sum((sums_of_rows(cost * by_columns(q)) + own_a) * p) + _sum(own_b * q)
        tau_a, tau_b, part = one, one, one
        if PARTIAL:
            part = tl.load(bound)
        else:
            tau_a = 1.0 / (1.0 + epsilon * tl.load(bound))
            tau_b = 1.0 / (1.0 + epsilon * tl.load(bound + 1))
        # half-steps of logarithms to base two, so that numbers are next to one
        unit = LOG2_E / epsilon
        down_a = tl.where(mass_a > 0, (mean - own_a) * unit, -float("inf"))
        across_b = tl.where(mass_b > 0, (tl.load(g + columns) - own_b) * unit, -float("inf"))
        kernel = by_rows(down_a) + by_columns(across_b) - cost * unit
        top_a = tl.where(mass_a > 0, tl.max(tl.max(kernel, 1), 2), 0.0)
        kernel -= by_rows(top_a)
        sums_a = sums_of_rows(tl.exp2(kernel.to(tl.float32)) * by_columns(mass_b)) * mass_a
        tl.store(scaled + rows, top_a)
        found_a = through(sums_a, summed, rows, down)
        potential_a = -tl.load(scaled + down) / LOG2_E
        # points that are not full have the largest potential
        level_a = tl.max(tl.where(all_a > 0, tl.load(f + down), -float("inf")), 0) / epsilon
        grown_a, known_a = begun(all_a, found_a, potential_a, level_a, tau_a, part, PARTIAL)
        kernel += by_rows(through(grown_a * LOG2_E, lines, down, rows))
        top_b = tl.where(mass_b > 0, tl.max(tl.max(kernel, 0), 1), 0.0)
        kernel -= by_columns(top_b)
        near_one = tl.exp2(tl.maximum(kernel.to(tl.float32), LEAST))
        sums_b = sums_of_columns(near_one * by_rows(mass_a)) * mass_b
        tl.store(scaled + N + columns, top_b)
        found_b = through(sums_b, summed + N, columns, across)
        potential_b = tl.load(g + across) / epsilon - tl.load(scaled + N + across) / LOG2_E
        level_b = tl.max(tl.where(all_b > 0, tl.load(g + across), -float("inf")), 0) / epsilon
        grown_b, known_b = begun(all_b, found_b, potential_b, level_b, tau_b, part, PARTIAL)
        grown = through(grown_b * LOG2_E, lines + N, across, columns)
        # threads hold copies: each of them has read before one writes
        tl.store(f + down, epsilon * (potential_a + grown_a))
        tl.store(g + across, epsilon * (potential_b + grown_b))
        if FINAL:
            kernel = tl.exp2(tl.maximum(kernel + by_columns(grown), LEAST))
            kernel = kernel * by_rows(mass_a) * by_columns(mass_b)
        else:
            kernel = near_one * by_rows(mass_a) * by_columns(tl.exp2(grown) * mass_b)
        if KEPT:
            write(kept, kernel, shift, RI, CI, RT, CT)
        wanted, limit = zero + 1e-2, budget
        if epsilon <= last:
            wanted = tl.minimum(tl.maximum(0.1 * change, least_error), MET)
        if over == 1:
            wanted, limit = zero + inner_tol, most_inner
        s, t, level = all_a * 0.0 + 1.0, all_b * 0.0 + 1.0, one
        plain, error, taken, busy = s, zero + float("inf"), 0, 1
        below, missing, idle = zero + NEAR, all_b * 0.0, 0
        while busy == 1:
            if near == 1:
                # as the dual's second derivative says; the first time none, as nothing is known
                step_b = stepped(
                    inverse, columns_of, (missing / root).to(tl.float32), across, M, CHUNK
                )
                step_b = tl.where(all_b > 0, step_b / root, 0.0)
                if PARTIAL:
                    # as far as a pair of points that hardly anything joins to others can tell
                    times = 1.0 + tl.minimum(tl.abs(step_b), FURTHEST)
                    t = tl.minimum(tl.where(step_b > 0, t * times, t / times), known_b)
                else:
                    t = t * tl.exp(tl.minimum(tl.maximum(step_b, -1.0), 1.0))
                found_a = row_sums(kernel, t, scaled + N, summed, RI, CI, RT, CT)
                plain, level = filled(all_a, found_a, known_a, level, tau_a, part, PARTIAL)
                s = plain
                taken += 1
            else:
                for _ in range(tick):
                    found_b = column_sums(
                        kernel, kept, s, scaled, summed, shift, KEPT, RI, CI, RT, CT
                    )
                    new = half_step(all_b, found_b, known_b, tau_b, PARTIAL)
                    t = further(t, new, excess)
                    found_a = row_sums(kernel, t, scaled + N, summed, RI, CI, RT, CT)
                    plain, level = filled(all_a, found_a, known_a, level, tau_a, part, PARTIAL)
                    s = further(s, plain, excess)
                taken += tick
                idle += tick
            found_b = column_sums(kernel, kept, plain, scaled, summed, shift, KEPT, RI, CI, RT, CT)
            new = half_step(all_b, found_b, known_b, tau_b, PARTIAL)
            before = error
            if PARTIAL:
                missing = found_b * (new - t)
                error = tl.sum(tl.abs(missing), 0)
            else:
                # constants change the mass alone
                missed = tl.log(new / t)
                missed -= tl.sum(all_b * missed, 0)
                error = tl.sum(all_b * tl.abs(tl.exp(missed) - 1.0), 0)
                missing = found_b * t * missed / tl.maximum(tau_b, 1e-2)
            fallen = (error / before).to(tl.float32)
            fitted = (next_relaxation((excess + 1.0).to(tl.float32), fallen) - 1.0).to(excess.dtype)
            excess = tl.where(near == 0, fitted, excess)
            stalls = error > 0.7 * before
            if PARTIAL:
                failed = stalls & (near == 1)
                failures += tl.where(failed, 1, 0)
                idle = tl.where(failed, 0, idle)
                excess = tl.where(failed, zero, excess)
            near = tl.where(stalls, 0, near)
            # NaN compares as false
            busy = tl.where((error > wanted) & (error < 1e30) & (taken < limit), 1, 0)
            if FINAL or not PARTIAL:  # noqa: SIM102, constants beside numbers
                later = (idle >= WAIT) & (failures < FAILURES)
                ready = later if PARTIAL else (error <= below) & (tau_b > 1e-2)
                if (busy == 1) & (near == 0) & ready:
                    masses_a, masses_b = found_a * plain, found_b * t / tl.maximum(all_b, 1e-30)
                    if PARTIAL:
                        # the sign tells which points are full
                        full_a = all_a <= level * known_a * (found_a + 1e-37)
                        full_b = (all_b > 0) & (all_b <= known_b * (found_b + 1e-37))
                        tl.store(own_costs + down, tl.where(full_a, masses_a, -masses_a))
                        masses_b = tl.where(full_b, masses_b, -1.0)
                        tl.store(columns_of + across, masses_b.to(tl.float32))
                        _invert_partial(
                            kept, scaled, work, own_costs, b, inverse, columns_of, count, shift,
                            N, M, CHUNK, RIDGE, RI, CI, RT, CT,
                            SQUARE_RI, SQUARE_CI, SQUARE_RT, SQUARE_CT,
                        )  # fmt: skip
                        # read again, as registers do not last for it
                        kernel = read(kept, shift, RI, CI, RT, CT)
                    else:
                        here_a, here_b = tl.load(scaled + rows), tl.load(scaled + N + columns)
                        held = kernel * by_rows(here_a) * by_columns(here_b)
                        write(work, held, shift, RI, CI, RT, CT)
                        # a relaxed side answers less
                        tl.store(own_costs + down, masses_a / tl.maximum(tau_a, 1e-9))
                        masses_b = masses_b / tl.maximum(tau_b, 1e-2)
                        masses_b = tl.where(all_b > 0, masses_b, 1.0)
                        tl.store(columns_of + across, masses_b.to(tl.float32))
                        tl.debug_barrier()
                        invert(
                            work, own_costs, b, inverse, columns_of, count, shift, N, M, CHUNK,
                            SQUARE_RI, SQUARE_CI, SQUARE_RT, SQUARE_CT,
                        )  # fmt: skip
                    near, below = 1, 0.1 * error
        spent += taken
        here_a, here_b = tl.load(scaled + rows), tl.load(scaled + N + columns)
        kernel = kernel * by_rows(here_a) * by_columns(here_b)
        whole = total(kernel)
        kernel = kernel * (1.0 / whole)
        row, column = tl.load(f + down), tl.load(g + across)
        tl.debug_barrier()
        tl.store(f + down, row + epsilon * tl.log(plain / whole))
        tl.store(g + across, column + epsilon * tl.log(t))
        at_target = epsilon <= last
        exactly = FINAL or at_target
        moved = kernel - _plan(plan, last_plan, exactly, shift, SCALE, RI, CI, RT, CT)
        change = total(tl.abs(moved))
        # steps that turn back are halved: sums of what each thread holds tell which
        step_before, step = step, tl.sum(tl.sum(moved, 0), 0)
        back = tl.sum(tl.sum(step * step_before, 1), 0) < 0
        share = tl.where(back, 0.5 * share, tl.minimum(1.2 * share, 1.0))
        settled = at_target & (change <= tol)
        # a sequence that falls by the same share goes to its limit
        exact = at_target & (error <= 0.1 * change) & (share == 1.0) & (known > 0)
        now = tl.where(exact, change / tl.where(known > 0, known, one), zero)
        steady = keeps_falling(now, rate) & (change <= 1e-2)
        ahead = tl.where(steady, now / (1.0 - tl.where(steady, now, zero)), share - 1.0)
        ahead = tl.where(settled | (over == 1), zero, ahead)
        if not FINAL:
            # plans are led ahead while epsilon falls, or held back where they jump to and fro
            lead = tl.where(turns == 0, zero, tl.where(back, -DAMPING, MOMENTUM))
            lead = tl.where(DECAY * epsilon > last, lead, zero)
            share = tl.where(at_target, share, one)
            ahead = tl.where(at_target, ahead, lead)
        rate = tl.where(steady, zero, now)
        known = tl.where(steady, zero, change)
        behind = (error > 1e-2) | (at_target & (error > change))
        budget = tl.where(behind, 2 * budget, budget)
        budget = tl.minimum(tl.where(settled, most_inner, budget), most_inner)
        turns += tl.where(over == 1, 0, 1)
        if over == 1:
            going = 0
            divergences = _divergence(kernel, by_rows(mass_a) * by_columns(mass_b))
            tl.store(entropy_out + number, total(divergences))
            tl.store(error_out + number, error)
            write(plan, kernel, shift, RI, CI, RT, CT)
        else:
            # read again, as registers do not last for it
            led = _plan(plan, last_plan, exactly, shift, SCALE, RI, CI, RT, CT)
            led = kernel + ahead * (kernel - led)
            tl.store(masses + rows, sums_of_rows(led))
            tl.store(masses + N + columns, sums_of_columns(led))
            met = settled & (error <= tol)
            stuck = tl.where(settled if FINAL else at_target, stuck + 1, 0)
            end = tl.where(turns >= most, 2, end)
            # what float64 does not settle begins anew in the engine
            end = tl.where((turns < most) & (stuck >= STUCK), 3 if FINAL else 0, end)
            end = tl.where(met, 0, end)
            stop = met | (turns >= most) | (stuck >= STUCK)
            if FINAL:
                over = tl.where(stop & (end != 3), 1, 0)
            going = tl.where(stop & (over == 0), 0, 1)
            if FINAL:
                write(plan, led, shift, RI, CI, RT, CT)
            elif (going == 1) & (DECAY * epsilon > last):
                write(point, (led * SCALE).to(tl.float16), shift, RI, CI, RT, CT)
                write(last_plan, (kernel * SCALE).to(tl.float16), shift, RI, CI, RT, CT)
            else:
                write(plan, led, shift, RI, CI, RT, CT)
        lost = (change != change) | (error != error)
        end = tl.where(lost, 3, end)
        going = tl.where(lost, 0, going)
        epsilon = tl.maximum(DECAY * epsilon, last)
        excess = tl.where(epsilon <= last, 0.9 * excess, zero)
        tl.debug_barrier()
    tl.store(done_out + number, turns)
    tl.store(inner_out + number, tl.load(inner_out + number) + spent)
    tl.store(ended + number, end)


def ease(
    tables: tuple[torch.Tensor, ...],
    single: tuple[torch.Tensor, ...],
    index: tuple[torch.Tensor, torch.Tensor],
    alpha: torch.Tensor,
    linear: torch.Tensor | None,
    begin: tuple[torch.Tensor, torch.Tensor] | None,
    epsilons: tuple[torch.Tensor, torch.Tensor],
    relaxed: Relaxed,
    noise: torch.Tensor,
    limits: tuple[int, int, float, float],
) -> Eased:
    """Solve relaxed problems (k,); arguments are those of ``rough`` and of ``finish``."""
    # `limits` are iterations in all and of a linear problem, the change of a plan that has settled,
    # and the error of its linear problem.
    (n, m), count = noise.shape, len(alpha)
    a, b = tables[2][index[0]], tables[3][index[1]]
    nothing, whole = torch.zeros_like(alpha), torch.zeros_like(index[0])
    made = Eased(
        a[:, :, None] * b[:, None, :] * noise, torch.zeros_like(a), torch.zeros_like(b),
        whole, whole.clone(), whole - 1, nothing, nothing.clone(),
    )  # fmt: skip
    if relaxed.mass is None:
        assert relaxed.rho is not None
        bound = 0.5 / relaxed.rho
    else:
        bound = relaxed.mass[:, None].expand(-1, 2).contiguous()
    most, most_inner, tol, inner_tol = limits
    (half_x, units_x), (half_y, units_y) = (halved(table) for table in single[:2])
    halves, largest = (half_x, half_y), torch.stack([units_x[index[0]], units_y[index[1]]], 1)
    partial = relaxed.mass is not None
    half = torch.empty(count, 3, n, m, dtype=torch.float16, device=noise.device)
    for dtype, given in ((torch.float32, single), (torch.float64, tables)):
        final = dtype == torch.float64
        made = Eased(*(part.to(dtype) if part.is_floating_point() else part for part in made))
        tiles, warps = tiles_of(n, m, ENTRIES, _ACROSS // dtype.itemsize)
        work = torch.empty_like(made.plan)
        keeps = final and partial
        lines = 4 * (n + m) + max(32 * warps * _WIDE, n + m)
        error = INNER_SHARE * tol if final else _ROUGH_ERROR
        inverses = (m, 4) if final or not partial else (1, 1)
        launch(
            _relaxed_kernel, (count,), *halves, largest.to(dtype), half, *given, *index,
            *(part.to(dtype) for part in (alpha, *epsilons, bound)),
            work if linear is None else linear.to(dtype),
            *((work, whole) if begin is None else (begin[0].to(dtype), begin[1].long())),
            work, torch.empty_like(work) if keeps else work, work.new_empty(count, lines),
            *(work.new_empty(count, rows, m, dtype=torch.float32) for rows in inverses), *made, 0,
            _TICK, most, BUDGET, most_inner, tol if final else max(tol, _ROUGH_TOLERANCE), error,
            inner_tol,
            LINEAR=linear is not None, BEGIN=begin is not None and not final,
            PARTIAL=partial, FINAL=final, DECAY=DECAY, MOMENTUM=MOMENTUM,
            DAMPING=DAMPING, CHUNK=CHUNK, WIDE_CHUNK=min(WIDE_CHUNK, n, m), MET=MET,
            STUCK=_STUCK[dtype], NEAR=NEAR, WAIT=_WAIT, FAILURES=_FAILURES, FURTHEST=_FURTHEST,
            RIDGE=_RIDGE, LINES=lines, KEPT=_WIDE if keeps else 0, SCALE=SCALE,
            **tiles,
            num_warps=warps, num_stages=1 if final else 3, maxnreg=_REGISTERS[dtype],
        )  # fmt: skip
    return made
