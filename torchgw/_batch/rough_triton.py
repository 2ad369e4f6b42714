"""The first iterations of many problems in Triton: one program each, all of it on chip.

In float32, from a x b down to where the plan has nearly settled at the target epsilon.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from torchgw._batch.inner_triton import solved
from torchgw._batch.tile_triton import (
    by_columns,
    by_rows,
    cross,
    line,
    own,
    problem,
    read,
    tiles_of,
    total,
    write,
)
from torchgw._batch.warm import Warm
from torchgw._tensors.launch import launch

# Change of the plan at which float32 hands over, and the column error of its linear problems.
# [L532] [L781]
_ROUGH_TOLERANCE = 5e-4
_ROUGH_ERROR = 2e-5
# Decay of epsilon an iteration, as in the engine, and the column error from which on the inverse of
# a second derivative leads nearby plans to their marginals. [L781] [L782]
_DECAY, NEAR = 0.85, 3e-2
# Iterations of a linear problem at most, and the error from which on they are twice as many.
# [L595]
_BUDGET, _MOST, _BEHIND = 48, 2000, 1e-2
# Column error up to which a plan has its marginals, and the change of a plan that is not near its
# fixed point. [L595]
MET, FAR = 3e-3, 1e-2
# Entries of a matrix for each thread, and registers of that: two programs of 128 points share a
# multiprocessor. And what of the inner dimension of a product is read at once, and how many of
# these are under way. [L532] [L596] [L782]
ENTRIES, REGISTERS, CHUNK, STAGES = 64, 128, 16, 3


@triton.jit
def falls(values, changes, earlier, turn, fall, change, met, least):
    """Take an iteration; say whether the objective still falls, by the rule of ``Descent``.

    ``fall`` is that of one iteration, and ``least`` what the mean of the last five has to be.
    """
    places = tl.arange(0, 16)
    here = places == turn % 10
    earlier = tl.minimum(earlier, tl.sum(tl.where(here, changes, 0.0), 0))
    changes = tl.where(here, change, changes)
    # an infinite fall is one that is not known yet
    values = tl.where(places == turn % 5, fall, values)
    values = tl.where(met, values, float("inf"))
    mean = tl.sum(tl.where(places < 5, values, 0.0), 0) / 5
    least_change = tl.min(tl.where(places < 10, changes, float("inf")), 0)
    flat = met & (mean <= least) & (least_change > 0.5 * earlier)
    return values, changes, earlier, flat


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
    inverse,  # [B, M, M] float32, scratch
    lines,  # [B, 4, M] float32, scratch
    plan,  # [B, N, M] float32, written
    f,  # [B, N] float64, written
    g,  # [B, M] float64, written
    done_out,  # [B] int64, written
    ended,  # [B] int64, a place in ``warm.ENDS``, written
    value_out,  # [B] float32, the objective or nearly so, written
    shift,  # zero
    most,
    tol,  # float
    inner_tol,  # float
    objective_tol,  # float
    LINEAR: tl.constexpr,
    BEGIN: tl.constexpr,
    CHUNK: tl.constexpr,
    BUDGET: tl.constexpr,
    MOST: tl.constexpr,
    BEHIND: tl.constexpr,
    MET: tl.constexpr,
    FAR: tl.constexpr,
    DECAY: tl.constexpr,
    NEAR: tl.constexpr,
    TARGET: tl.constexpr,
    RI: tl.constexpr,
    CI: tl.constexpr,
    RT: tl.constexpr,
    CT: tl.constexpr,
    SQUARE_RI: tl.constexpr,
    SQUARE_CI: tl.constexpr,
    SQUARE_RT: tl.constexpr,
    SQUARE_CT: tl.constexpr,
):
    """Iterate one problem while epsilon falls, or at its target until the plan nearly settles.

    By what programs do not do they are faster: the two are variants of a compiled kernel.
    """
    N: tl.constexpr = RI * RT
    M: tl.constexpr = CI * CT
    number, x, y, a, b = problem(x, y, a, b, i, j, N, M)
    weight = tl.load(alpha + number)
    squares_x, _ = own(x, a, N, 16)
    squares_y, _ = own(y, b, M, 16)
    fixed = weight * (squares_x + squares_y)
    weight *= -4.0
    all_a, all_b = a, b
    a += line(RI, RT)
    b += line(CI, CT)
    f += number * N + line(RI, RT)
    g += number * M + line(CI, CT)
    plan += number * N * M
    work += number * N * M
    inverse += number * M * M
    lines += number * 4 * M
    last = tl.load(target + number)
    values = tl.full([16], float("inf"), tl.float32)
    changes, earlier, known = values, float("inf"), float("inf")
    change, error, factor, value = 0.0, 0.0, 1.0, 0.0
    budget, done, settling, end, near = BUDGET, 0, 0, 2, 0
    if TARGET:
        epsilon = last
        done = tl.load(done_out + number).to(tl.int32)
        end = tl.load(ended + number).to(tl.int32)
        change = tl.load(value_out + number)
        going = tl.where((end == 2) & (done < most), 1, 0)
    else:
        epsilon = tl.maximum(tl.load(first + number), last)
        little = read(noise, shift, RI, CI, RT, CT)
        write(plan, by_rows(tl.load(a)) * by_columns(tl.load(b)) * little, shift, RI, CI, RT, CT)
        tl.store(g, tl.zeros([CI, CT], tl.float64))
        going = tl.where(epsilon > last, 1, 0)
    while going == 1:
        cross(x, plan, y, work, N, M, CHUNK, True)
        mass_a, mass_b = tl.maximum(tl.load(a), 1e-30), tl.maximum(tl.load(b), 1e-30)
        if TARGET:
            # the objective of the plan that the last iteration has made
            kernel = read(plan, shift, RI, CI, RT, CT)
            spent = 0.5 * weight * read(work, shift, RI, CI, RT, CT)
            if LINEAR:
                spent += read(linear + number * N * M, shift, RI, CI, RT, CT)
            share = tl.log(tl.maximum(kernel, 1e-37)) - by_rows(tl.log(mass_a))
            spent += last * (share - by_columns(tl.log(mass_b)))
            value = fixed + total(kernel * spent)
            met = (error <= MET) & (settling > 0)
            values, changes, earlier, flat = falls(
                values, changes, earlier, settling, known - value, change, met,
                objective_tol * tl.abs(value),
            )  # fmt: skip
            known = tl.where(met, value, float("inf"))
            # a slow plan goes on to settle; one that jumps to and fro ends
            end = tl.where(flat, tl.where(change <= FAR, 0, 1), end)
            going = tl.where(flat, 0, going)
        if going == 1:
            cost = weight * read(work, shift, RI, CI, RT, CT)
            if BEGIN:  # noqa: SIM102, a constant beside numbers
                if (done == 0) & (tl.load(chosen + number) == 1):
                    cost = -0.25 * weight * read(begin + number * N * M, shift, RI, CI, RT, CT)
            if LINEAR:
                cost += read(linear + number * N * M, shift, RI, CI, RT, CT)
            column = tl.where(mass_b > 1e-29, tl.load(g).to(tl.float32), -float("inf"))
            kernel = (by_columns(column) - cost) * (1.0 / epsilon)
            # the largest of each row and column is one, and none is empty
            largest = tl.max(tl.max(kernel, 1), 2)
            kernel -= by_rows(largest)
            top = tl.where(mass_b > 1e-29, tl.max(tl.max(kernel, 0), 1), 0.0)
            kernel = tl.exp(tl.maximum(kernel - by_columns(top), -80.0))
            kernel = kernel * by_rows(mass_a) * by_columns(mass_b)
            tl.store(f, (-epsilon * largest).to(tl.float64))
            tl.store(g, tl.load(g) - (epsilon * top).to(tl.float64))
            wanted = 1e-2
            if TARGET:
                wanted = tl.minimum(tl.maximum(0.1 * change, inner_tol), MET)
            kernel, near, factor, error, taken = solved(
                kernel, mass_a, mass_b, all_a, all_b, f, g, epsilon, near, factor, wanted, budget,
                8 if TARGET else 4, work, inverse, lines, shift, CHUNK, NEAR if TARGET else 0.0,
                RI, CI, RT, CT, SQUARE_RI, SQUARE_CI, SQUARE_RT, SQUARE_CT,
            )  # fmt: skip
            change = total(tl.abs(kernel - read(plan, shift, RI, CI, RT, CT)))
            write(plan, kernel, shift, RI, CI, RT, CT)
            done += 1
            behind = error > BEHIND
            if TARGET:
                settling += 1
                behind = behind | (error > change)
                factor = 1.0 + 0.9 * (factor - 1.0)
            else:
                factor = 1.0
                epsilon = tl.maximum(DECAY * epsilon, last)
            budget = tl.where(behind, tl.minimum(2 * budget, MOST), budget)
            # not a number, or a plan that has nearly settled
            end = tl.where(change == change, end, 3)
            if TARGET:
                end = tl.where(change <= tol, 0, end)
                going = 1
            else:
                going = tl.where(epsilon > last, 1, 0)
            going = tl.where((end == 2) & (done < most), going, 0)
    tl.store(done_out + number, done)
    tl.store(ended + number, end)
    # the objective is that of the plan before, where this one has settled
    tl.store(value_out + number, value if TARGET else change)


def rough(
    tables: tuple[torch.Tensor, ...],
    index: tuple[torch.Tensor, torch.Tensor],
    alpha: torch.Tensor,
    linear: torch.Tensor | None,
    begin: tuple[torch.Tensor, torch.Tensor] | None,
    epsilons: tuple[torch.Tensor, torch.Tensor],
    noise: torch.Tensor,
    limits: tuple[int, float],
) -> Warm:
    """Iterate problems (k,), from a x b times ``noise`` (N, M), or from costs that are chosen.

    ``tables`` are distances and weights of all spaces of both sides, float32, of powers of two;
    ``index`` is which of them each problem compares, ``linear`` (1 - alpha) M (k, N, M), ``begin``
    costs and which problems begin with them, ``epsilons`` the target and the first (k,), in its
    units, and ``limits`` are outer iterations and the fall of the objective that is none.
    """
    (n, m), count = noise.shape, len(alpha)
    weight = alpha.float()
    made = Warm(
        weight.new_empty(count, n, m), alpha.new_empty(count, n), alpha.new_empty(count, m),
        torch.empty_like(index[0]), torch.empty_like(index[0]), torch.empty_like(weight),
    )  # fmt: skip
    (tiles, warps), unread = tiles_of(n, m, ENTRIES), noise.float()
    given = (
        *tables, *index, weight, *(epsilon.float() for epsilon in epsilons),
        unread if linear is None else linear.float(),
        *((unread, index[0]) if begin is None else (begin[0].float(), begin[1].long())), unread,
        torch.empty_like(made.plan), weight.new_empty(count, m, m), weight.new_empty(count, 4, m),
    )  # fmt: skip
    for at_target in (False, True):
        launch(
            _rough_kernel, (count,), *given, *made, 0, limits[0], _ROUGH_TOLERANCE, _ROUGH_ERROR,
            limits[1], LINEAR=linear is not None, BEGIN=begin is not None, CHUNK=min(CHUNK, n),
            BUDGET=_BUDGET, MOST=_MOST, BEHIND=_BEHIND, MET=MET, FAR=FAR, DECAY=_DECAY, NEAR=NEAR,
            TARGET=at_target, **tiles, num_warps=warps, num_stages=STAGES, maxnreg=REGISTERS,
        )  # fmt: skip
    return made
