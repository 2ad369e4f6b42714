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
    own,
    problem,
    read,
    sums_of_columns,
    sums_of_rows,
    tile_of,
    total,
    write,
)
from torchgw._batch.warm import Warm
from torchgw._tensors.launch import launch

# Change of the plan at which float32 hands over, and the column error of its linear problems.
# [L532]
_ROUGH_TOLERANCE = 5e-4
_ROUGH_ERROR = 5e-5
# Iterations of a linear problem at most, and the error from which on they are twice as many.
# [L595]
_BUDGET, _MOST, _BEHIND = 48, 2000, 1e-2
# Column error up to which a plan has its marginals, and the change of a plan that is not near its
# fixed point. [L595]
MET, FAR = 3e-3, 1e-2
# Entries of a matrix for each thread, and registers of that: two programs of 128 points share a
# multiprocessor. And what of the inner dimension of a product is read at once. [L532]
# [L596]
ENTRIES, REGISTERS, CHUNK = 64, 128, 16


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
def scaled(kernel, s, mass_a, mass_b, factor, wanted, most):
    """Iterate scalings of a kernel from those of its rows, s; return it scaled, with exact rows.

    And these scalings, the factor of the relaxation, and the error of the columns.
    """
    t = mass_b * 0.0 + 1.0
    exact = s
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
    return kernel * by_rows(exact) * by_columns(t), exact, t, factor, error


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
    RI: tl.constexpr,
    CI: tl.constexpr,
    RT: tl.constexpr,
    CT: tl.constexpr,
):
    """Iterate one problem until its plan has nearly settled."""
    N: tl.constexpr = RI * RT
    M: tl.constexpr = CI * CT
    number, x, y, a, b = problem(x, y, a, b, i, j, N, M)
    weight = tl.load(alpha + number)
    squares_x, _ = own(x, a, N, 16)
    squares_y, _ = own(y, b, M, 16)
    fixed = weight * (squares_x + squares_y)
    weight *= -4.0
    a += line(RI, RT)
    b += line(CI, CT)
    f += number * N + line(RI, RT)
    g += number * M + line(CI, CT)
    plan += number * N * M
    work += number * N * M
    last = tl.load(target + number)
    epsilon = tl.maximum(tl.load(first + number), last)
    little = read(noise, shift, RI, CI, RT, CT)
    write(plan, by_rows(tl.load(a)) * by_columns(tl.load(b)) * little, shift, RI, CI, RT, CT)
    tl.store(g, tl.zeros([CI, CT], tl.float64))
    values = tl.full([16], float("inf"), tl.float32)
    changes, earlier, known = values, float("inf"), float("inf")
    change, error, factor, value = 0.0, 0.0, 1.0, 0.0
    budget, done, settling, end, going = BUDGET, 0, 0, 2, 1
    while going == 1:
        cross(x, plan, y, work, N, M, CHUNK, True)
        mass_a, mass_b = tl.maximum(tl.load(a), 1e-30), tl.maximum(tl.load(b), 1e-30)
        if epsilon <= last:
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
            # exact rows, so that the columns go on from g
            s = mass_a / (sums_of_rows(kernel) + 1e-30)
            arrived = epsilon <= last
            wanted = tl.where(arrived, inner_tol, 1e-2)
            kernel, exact, t, factor, error = scaled(
                kernel, s, mass_a, mass_b, factor, wanted, budget
            )
            change = total(tl.abs(kernel - read(plan, shift, RI, CI, RT, CT)))
            write(plan, kernel, shift, RI, CI, RT, CT)
            tl.store(f, (epsilon * (tl.log(exact) - largest)).to(tl.float64))
            tl.store(g, tl.load(g) + (epsilon * (tl.log(t) - top)).to(tl.float64))
            done += 1
            settling += tl.where(arrived, 1, 0)
            behind = (error > BEHIND) | (arrived & (error > change))
            budget = tl.where(behind, tl.minimum(2 * budget, MOST), budget)
            # not a number, or a plan that has nearly settled
            end = tl.where(change == change, tl.where(arrived & (change <= tol), 0, end), 3)
            going = tl.where((end == 2) & (done < most), 1, 0)
            factor = tl.where(arrived, 1.0 + 0.9 * (factor - 1.0), 1.0)
            epsilon = tl.maximum(0.85 * epsilon, last)
    tl.store(done_out + number, done)
    tl.store(ended + number, end)
    # that of the plan before, where this one has settled
    tl.store(value_out + number, value)


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
    tile, unread = tile_of(n, m, ENTRIES), noise.float()
    launch(
        _rough_kernel, (count,), *tables, *index, weight,
        *(epsilon.float() for epsilon in epsilons),
        unread if linear is None else linear.float(),
        *((unread, index[0]) if begin is None else (begin[0].float(), begin[1].long())), unread,
        torch.empty_like(made.plan), *made, 0, limits[0], _ROUGH_TOLERANCE, _ROUGH_ERROR, limits[1],
        LINEAR=linear is not None, BEGIN=begin is not None, CHUNK=min(CHUNK, n),
        BUDGET=_BUDGET, MOST=_MOST, BEHIND=_BEHIND, MET=MET, FAR=FAR, **tile._asdict(),
        num_warps=tile.warps, num_stages=2, maxnreg=REGISTERS,
    )  # fmt: skip
    return made
