"""Relaxed problems in Triton: one program each, in float32 until its plan nearly settles.

The iteration is the engine's, and goes on in float64 by the same kernel. Plans are normalised, as
in ``relaxed.py``.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from torchgw._batch.inner_triton import invert, stepped
from torchgw._batch.relaxed import Relaxed
from torchgw._batch.rough_triton import NEAR
from torchgw._batch.sweep import BUDGET, DECAY, INNER_SHARE, MET
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
from torchgw._tensors.launch import launch

# Change of the plan at which float32 hands over, and the error of its linear problems. [L1141]
_ROUGH_TOLERANCE, _ROUGH_ERROR = 5e-5, 1e-5
# Error of a partial linear problem below which it is known which points are full. [L1141]
_NEAR = 1e-5
# Iterations at the last epsilon after which float32 hands over, and of a settled plan that float64
# does not bring to its marginals. [L870]
_STUCK = {torch.float32: 32, torch.float64: 10}
# Entries of a matrix for each thread, and registers in float32 and in float64. [L870] [L1200]
_ENTRIES, _REGISTERS = 64, {torch.float32: 128, torch.float64: 255}
# Sinkhorn iterations between two looks at the error. [L1200]
_TICK = 4


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
def _through(values, memory, here, there):
    """Write numbers of rows or of columns where they are ``here``, and read them ``there``.

    As a line of threads they are computed with once, and beside a matrix by every thread that has
    entries of theirs.
    """
    tl.store(memory + here, values)
    tl.debug_barrier()
    return tl.load(memory + there)


@triton.jit
def _own_costs(table, mass, out, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """Write sum_k D_ik^2 p_k of a symmetric table (SIZE, SIZE) and masses p, all in memory."""
    columns = tl.arange(0, SIZE)
    sums = tl.zeros([ROWS, SIZE], table.dtype.element_ty)
    for begin in range(0, SIZE, ROWS):
        rows = begin + tl.arange(0, ROWS)
        values = tl.load(table + rows[:, None] * SIZE + columns[None, :])
        sums += values * values * tl.load(mass + rows)[:, None]
    tl.store(out + columns, tl.sum(sums, 0))


@triton.jit
def _both(left, right, more_left, more_right):
    """Add pairs, so that two sums are one reduction."""
    return left + more_left, right + more_right


@triton.jit
def _level(weight, brim, level, mass):
    """Find the level at which sum_i weight_i min(1, level / brim_i) is ``mass``, from another one.

    By Newton's steps, which come from below but for the first.
    """
    last, steps = mass * 0.0 - 1.0, 0
    per_level = weight / brim
    while steps < 40:
        full = brim < level
        parts = tl.where(full, weight, 0.0), tl.where(full, 0.0, per_level)
        filled, slope = tl.reduce(parts, 0, _both)
        over = mass - filled <= tl.where(slope > 0, 0.0, -1e-6)
        steps = tl.where(over | ((filled != last) & (slope > 0)), steps + 1, 40)
        level = tl.where(slope > 0, (mass - filled) / tl.where(slope > 0, slope, 1.0), level)
        level = tl.where(over, 1e-30, level)
        last = tl.where(over, -1.0, filled)
    return level


@triton.jit
def _begun(weight, sums, potential, tau, mass, PARTIAL: tl.constexpr):
    """Compute logarithms of what a half-step multiplies points by, as ``Relaxed.scaling``.

    And what the next ones have to know of the potentials that this leads to.
    """
    used = weight > 0
    exact = tl.where(used, tl.log(tl.where(used, weight / (sums + 1e-37), 1.0)), 0.0)
    if PARTIAL:
        mean = tl.sum(weight * (exact + potential), 0)
        brim = tl.exp(tl.minimum(tl.maximum(exact + potential - mean, -80.0), 80.0))
        level = mean + tl.log(_level(weight, brim, mass * 0.0 + 1.0, mass))
        grown = tl.where(used, tl.minimum(exact, level - potential), 0.0)
        known = tl.exp(tl.minimum(tl.maximum(level - potential - grown, -60.0), 60.0))
    else:
        grown = tl.where(used, tau * exact + (tau - 1.0) * potential, 0.0)
        known = (tau - 1.0) * (potential + grown)
    return grown, known


@triton.jit
def _half_step(weight, sums, known, tau, PARTIAL: tl.constexpr):
    """Compute what a half-step multiplies points by: at most what is ``known``, if PARTIAL."""
    used = weight > 0
    ratio = tl.where(used, weight / (sums + 1e-37), 1.0)
    factor = tl.minimum(ratio, known) if PARTIAL else tl.exp(tau * tl.log(ratio) + known)
    return tl.where(used, factor, 1.0)


@triton.jit
def _filled(weight, sums, known, level, tau, mass, PARTIAL: tl.constexpr):
    """Compute a half-step of rows and, if PARTIAL, the level at which the plan has its mass.

    Columns keep theirs: a plan stays the same where the two levels move against each other.
    """
    if PARTIAL:
        ratio = tl.where(weight > 0, weight / (sums + 1e-37), 1.0)
        level = _level(weight, ratio / known, level, mass)
        known = level * known
    return _half_step(weight, sums, known, tau, PARTIAL), level


@triton.jit
def _further(old, new, excess):
    """Go further than from old to new, within a factor of two."""
    return new * (1.0 + excess * (tl.minimum(tl.maximum(new / old, 0.5), 2.0) - 1.0))


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


@triton.jit(do_not_specialize=["shift", "tick", "most", "budget", "most_inner"])
def _relaxed_kernel(
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
    step,  # [k, N, M] scratch, zero
    lines,  # [k, 4, N + M] scratch
    inverse,  # [k, M, M] float32, scratch
    columns_of,  # [k, 4, M] float32, scratch
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
    MET: tl.constexpr,
    STUCK: tl.constexpr,
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
    """Iterate one problem until its plan nearly settles or, if FINAL, has settled."""
    N: tl.constexpr = RI * RT
    M: tl.constexpr = CI * CT
    LEAST: tl.constexpr = -300.0 if FINAL else -80.0
    # which points are full is nearly known by then
    NEWTON: tl.constexpr = FINAL or not PARTIAL
    number, x, y, a, b = problem(x, y, a, b, i, j, N, M)
    rows, columns = line(RI, RT), line(CI, CT)
    down, across = tl.arange(0, N), tl.arange(0, M)
    f += number * N
    g += number * M
    plan += number * N * M
    work += number * N * M
    step += number * N * M
    linear += number * N * M
    begin += number * N * M
    lines += number * 4 * (N + M)
    own_costs, summed, scaled = lines + N + M, lines + 2 * (N + M), lines + 3 * (N + M)
    inverse += number * M * M
    columns_of += number * 4 * M
    bound += number * 2
    weight = tl.load(alpha + number)
    last = tl.load(target + number)
    epsilon = last if FINAL else tl.maximum(tl.load(first + number), last)
    all_a, all_b = tl.load(a + down), tl.load(b + across)
    zero = 0.0 * last
    one = zero + 1.0
    excess, change, rate, known, share, mass, error = zero, zero, zero, zero, one, one, one
    turns, spent, stuck, near = tl.load(done_out + number).to(tl.int32), 0, 0, 0
    count = tl.max(tl.where(all_b > 0, across + 1, 0), 0)
    root = tl.sqrt(tl.maximum(all_b, 1e-30))
    end = tl.load(ended + number).to(tl.int32)
    over = tl.where(end == 2, 1, 0)
    going = tl.where(end == 3, 0, 1)
    while going == 1:
        mass_a, mass_b = tl.load(a + rows), tl.load(b + columns)
        point = read(plan, shift, RI, CI, RT, CT)
        p, q = sums_of_rows(point), sums_of_columns(point)
        tl.store(lines + rows, p)
        tl.store(lines + N + columns, q)
        cross(x, plan, y, work, work, N, M, CHUNK)
        _own_costs(x, lines, own_costs, N, 16)
        _own_costs(y, lines + N, own_costs + N, M, 16)
        tl.debug_barrier()
        own_a = 2.0 * weight * tl.load(own_costs + rows)
        own_b = 2.0 * weight * tl.load(own_costs + N + columns)
        cost = -4.0 * weight * read(work, shift, RI, CI, RT, CT)
        if LINEAR and not PARTIAL:
            # with the mass of least objective
            point = read(plan, shift, RI, CI, RT, CT)
            value = 0.5 * (_sum(own_a * p) + _sum(own_b * q) + total(point * cost))
            divergence = _divergence(point, by_rows(mass_a) * by_columns(mass_b))
            bound_a, bound_b = tl.load(bound), tl.load(bound + 1)
            rho_a, rho_b = _penalty(bound_a), _penalty(bound_b)
            slope = value + epsilon * total(divergence)
            slope += rho_a * _sum(_divergence(p, mass_a)) + rho_b * _sum(_divergence(q, mass_b))
            spending = total(point * read(linear, shift, RI, CI, RT, CT))
            mass = _best_mass(slope, 0.5 * spending, rho_a + rho_b + epsilon)
            mass = tl.where((bound_a > 0) & (bound_b > 0), mass, one)
        if BEGIN:  # noqa: SIM102, a constant beside numbers
            if (turns == 0) & (tl.load(chosen + number) == 1):
                cost = weight * read(begin, shift, RI, CI, RT, CT)
        cost += by_rows(own_a) + by_columns(own_b)
        if LINEAR:
            cost += read(linear, shift, RI, CI, RT, CT) / mass
        cost -= total(cost * by_rows(p) * by_columns(q))
        tau_a, tau_b, part = one, one, one
        if PARTIAL:
            part = tl.load(bound)
        else:
            tau_a = 1.0 / (1.0 + epsilon * tl.load(bound))
            tau_b = 1.0 / (1.0 + epsilon * tl.load(bound + 1))
        # half-steps of logarithms, so that numbers are next to one
        kernel = (by_columns(tl.load(g + columns)) - cost) * (1.0 / epsilon)
        kernel = tl.where((by_rows(mass_a) > 0) & (by_columns(mass_b) > 0), kernel, -float("inf"))
        top_a = tl.where(mass_a > 0, tl.max(tl.max(kernel, 1), 2), 0.0)
        kernel -= by_rows(top_a)
        sums_a = sums_of_rows(tl.exp(kernel.to(tl.float32)) * by_columns(mass_b)) * mass_a
        tl.store(scaled + rows, top_a)
        found_a = _through(sums_a, summed, rows, down)
        potential_a = -tl.load(scaled + down)
        grown_a, known_a = _begun(all_a, found_a, potential_a, tau_a, part, PARTIAL)
        kernel += by_rows(_through(grown_a, lines, down, rows))
        top_b = tl.where(mass_b > 0, tl.max(tl.max(kernel, 0), 1), 0.0)
        kernel -= by_columns(top_b)
        sums_b = sums_of_columns(tl.exp(kernel.to(tl.float32)) * by_rows(mass_a)) * mass_b
        tl.store(scaled + N + columns, top_b)
        found_b = _through(sums_b, summed + N, columns, across)
        potential_b = tl.load(g + across) * (1.0 / epsilon) - tl.load(scaled + N + across)
        grown_b, known_b = _begun(all_b, found_b, potential_b, tau_b, part, PARTIAL)
        grown = _through(grown_b, lines + N, across, columns)
        # threads hold copies: each of them has read before one writes
        tl.store(f + down, epsilon * (potential_a + grown_a))
        tl.store(g + across, epsilon * (potential_b + grown_b))
        kernel = tl.exp(tl.maximum(kernel + by_columns(grown), LEAST))
        kernel = kernel * by_rows(mass_a) * by_columns(mass_b)
        wanted, limit = zero + 1e-2, budget
        if epsilon <= last:
            wanted = tl.minimum(tl.maximum(0.1 * change, least_error), MET)
        if over == 1:
            wanted, limit = zero + inner_tol, most_inner
        s, t, level = all_a * 0.0 + 1.0, all_b * 0.0 + 1.0, one
        plain, error, taken, busy = s, zero + float("inf"), 0, 1
        below, missing = zero + NEAR, all_b * 0.0
        # columns at their level, as the first half-step left them
        most_b = tl.where(all_b > 0, known_b, 1.0)
        held_b = (all_b > 0) & (known_b <= 1.0)
        while busy == 1:
            s_before, t_before, plain_before = s, t, plain
            if near == 1:
                # as the dual's second derivative says; the first time none, as nothing is known
                step_b = stepped(
                    inverse, columns_of, (missing / root).to(tl.float32), across, M, CHUNK
                )
                step_b = tl.where(all_b > 0, step_b / root, 0.0)
                t = t * tl.exp(tl.minimum(tl.maximum(step_b, -1.0), 1.0))
                if PARTIAL:
                    t = tl.where(held_b, most_b, tl.minimum(t, most_b))
                here_b = _through(t, scaled + N, across, columns)
                sums_a = sums_of_rows(kernel * by_columns(here_b))
                found_a = _through(sums_a, summed, rows, down)
                plain, level = _filled(all_a, found_a, known_a, level, tau_a, part, PARTIAL)
                s = plain
                taken += 1
            else:
                for _ in range(tick):
                    here_a = _through(s, scaled, down, rows)
                    sums_b = sums_of_columns(kernel * by_rows(here_a))
                    found_b = _through(sums_b, summed + N, columns, across)
                    new = _half_step(all_b, found_b, known_b, tau_b, PARTIAL)
                    t = _further(t, new, excess)
                    here_b = _through(t, scaled + N, across, columns)
                    sums_a = sums_of_rows(kernel * by_columns(here_b))
                    found_a = _through(sums_a, summed, rows, down)
                    plain, level = _filled(all_a, found_a, known_a, level, tau_a, part, PARTIAL)
                    s = _further(s, plain, excess)
                taken += tick
            here_a = _through(plain, scaled, down, rows)
            sums_b = sums_of_columns(kernel * by_rows(here_a))
            found_b = _through(sums_b, summed + N, columns, across)
            new = _half_step(all_b, found_b, known_b, tau_b, PARTIAL)
            before = error
            if PARTIAL:
                if NEWTON:
                    held_b = (all_b > 0) & (all_b > (found_b + 1e-37) * most_b)
                    missing = tl.where(held_b, 0.0, found_b * (new - t))
                error = tl.sum(found_b * tl.abs(new - t), 0)
            else:
                # constants change the mass alone
                missed = tl.log(new / t)
                missed -= tl.sum(all_b * missed, 0)
                error = tl.sum(all_b * tl.abs(tl.exp(missed) - 1.0), 0)
                missing = found_b * t * missed / tl.maximum(tau_b, 1e-2)
            worse = near < 0
            fitted = next_relaxation(excess + 1.0, error / before) - 1.0
            excess = tl.where(near == 0, fitted, excess)
            if PARTIAL and NEWTON:
                # other points are full there
                worse = (near == 1) & ((error > 0.7 * before) | (error != error)) & (before < 1e30)
                s = tl.where(worse, s_before, s)
                t = tl.where(worse, t_before, t)
                plain = tl.where(worse, plain_before, plain)
                error = tl.where(worse, before, error)
                near = tl.where(worse, 0, near)
            near = tl.where(error > 0.7 * before, 0, near)
            # NaN compares as false
            busy = tl.where((error > wanted) & (error < 1e30) & (taken < limit), 1, 0)
            if NEWTON:  # noqa: SIM102, a constant beside numbers
                if (busy == 1) & (near == 0) & (worse == 0) & (error <= below) & (tau_b > 1e-2):
                    here_b = tl.load(scaled + N + columns)
                    held = kernel * by_rows(here_a) * by_columns(here_b)
                    masses_a, masses_b = found_a * plain, found_b * t
                    if PARTIAL:
                        # rows at their level answer together, columns at theirs not at all
                        most_a = tl.where(all_a > 0, level * known_a, 1.0)
                        held_a = (all_a > 0) & (all_a > found_a * most_a)
                        first_a = tl.min(tl.where(held_a, down, N), 0)
                        together = tl.sum(tl.where(held_a, masses_a, 0.0), 0)
                        masses_a = tl.where(held_a, 1.0, masses_a)
                        masses_a = tl.where(down == first_a, together, masses_a)
                        masses_b = tl.where(held_b, all_b, masses_b)
                        free_a = _through(tl.where(held_a, one, zero), lines, down, rows)
                        full_b = _through(tl.where(held_b, zero, one), lines + N, across, columns)
                        held = held * by_columns(full_b)
                        merged = sums_of_columns(held * by_rows(free_a))
                        chosen_a = tl.where(rows == first_a, one, zero)
                        held = held * by_rows(1.0 - free_a) + by_rows(chosen_a) * by_columns(merged)
                    write(work, held, shift, RI, CI, RT, CT)
                    # a relaxed side answers less
                    tl.store(own_costs + down, masses_a / tl.maximum(tau_a, 1e-9))
                    masses_b = masses_b / tl.maximum(all_b, 1e-30) / tl.maximum(tau_b, 1e-2)
                    masses_b = tl.where(all_b > 0, masses_b, 1.0)
                    tl.store(columns_of + across, masses_b.to(tl.float32))
                    tl.debug_barrier()
                    invert(
                        work, own_costs, b, inverse, columns_of, count, shift, N, M, CHUNK,
                        SQUARE_RI, SQUARE_CI, SQUARE_RT, SQUARE_CT, not PARTIAL,
                    )  # fmt: skip
                    near, below = 1, 0.1 * error
        if PARTIAL and NEWTON:
            # where the last step led further away
            tl.debug_barrier()
            tl.store(scaled + down, plain)
            tl.store(scaled + N + across, t)
            tl.debug_barrier()
        spent += taken
        here_a, here_b = tl.load(scaled + rows), tl.load(scaled + N + columns)
        kernel = kernel * by_rows(here_a) * by_columns(here_b)
        whole = total(kernel)
        kernel = kernel / whole
        row, column = tl.load(f + down), tl.load(g + across)
        tl.debug_barrier()
        tl.store(f + down, row + epsilon * tl.log(plain / whole))
        tl.store(g + across, column + epsilon * tl.log(t))
        moved = kernel - read(plan, shift, RI, CI, RT, CT)
        change = total(tl.abs(moved))
        # steps that turn back are halved
        back = total(moved * read(step, shift, RI, CI, RT, CT)) < 0
        share = tl.where(back, 0.5 * share, tl.minimum(1.2 * share, 1.0))
        share = tl.maximum(share, 0.0625)
        write(step, moved, shift, RI, CI, RT, CT)
        at_target = epsilon <= last
        settled = at_target & (change <= tol)
        # a sequence that falls by the same share goes to its limit
        exact = at_target & (error <= 0.1 * change) & (share == 1.0) & (known > 0)
        now = tl.where(exact, change / tl.where(known > 0, known, one), zero)
        steady = keeps_falling(now, rate) & (change <= 1e-2)
        ahead = tl.where(steady, now / (1.0 - tl.where(steady, now, zero)), share - 1.0)
        ahead = tl.where(settled | (over == 1), zero, ahead)
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
            write(plan, kernel + ahead * moved, shift, RI, CI, RT, CT)
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
    """Solve relaxed problems (k,); arguments are those of ``rough`` and of ``finish``.

    ``limits`` are iterations in all and of a linear problem, the change of a plan that has settled,
    and the error of its linear problem.
    """
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
    for dtype, given in ((torch.float32, single), (torch.float64, tables)):
        final = dtype == torch.float64
        made = Eased(*(part.to(dtype) if part.is_floating_point() else part for part in made))
        (tiles, warps), work = tiles_of(n, m, _ENTRIES), torch.empty_like(made.plan)
        error = INNER_SHARE * tol if final else _ROUGH_ERROR
        launch(
            _relaxed_kernel, (count,), *given, *index,
            *(part.to(dtype) for part in (alpha, *epsilons, bound)),
            work if linear is None else linear.to(dtype),
            *((work, whole) if begin is None else (begin[0].to(dtype), begin[1].long())),
            work, torch.zeros_like(work), work.new_empty(count, 4, n + m),
            *(work.new_empty(count, rows, m, dtype=torch.float32) for rows in (m, 4)), *made, 0,
            _TICK, most, BUDGET, most_inner, tol if final else max(tol, _ROUGH_TOLERANCE), error,
            inner_tol,
            LINEAR=linear is not None, BEGIN=begin is not None and not final,
            PARTIAL=relaxed.mass is not None, FINAL=final, DECAY=DECAY, CHUNK=16, MET=MET,
            STUCK=_STUCK[dtype], NEAR=NEAR if relaxed.mass is None else _NEAR, **tiles,
            num_warps=warps, num_stages=1 if final else 3, maxnreg=_REGISTERS[dtype],
        )  # fmt: skip
    return made
