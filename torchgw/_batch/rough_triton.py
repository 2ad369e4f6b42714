"""The first iterations of many problems in Triton: one program each, all of it on chip.

In float32, from a x b down to where the plan has nearly settled at the target epsilon: by one
kernel while epsilon falls, and by another at the target.
"""

import torch
import triton
import triton.language as tl

from torchgw._batch.anneal_triton import anneal_kernel, exponentials
from torchgw._batch.inner_triton import solved
from torchgw._batch.packing import Warm
from torchgw._batch.sweep import BUDGET, FAR
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
from torchgw._sinkhorn.annealing import MET
from torchgw._tensors.ahead import launch

# Change of the plan at which float32 hands over, and the column error of its linear problems.
# [L532] [L781]
_ROUGH_TOLERANCE = 5e-4
_ROUGH_ERROR = 2e-5
# Decay of epsilon an iteration, what of its last change a plan is led ahead by, and what it is held
# back by where changes turn. Column errors of linear problems meanwhile, the excess of steps of
# their columns, and what these take over of the step before. [L860] [L1226]
_DECAY, MOMENTUM, DAMPING = 0.86, 0.6, 0.4
_ERROR, _RELAXATION, _INERTIA = 5e-3, 1.0, 0.4
# Column error from which on the inverse of a second derivative leads nearby plans to their
# marginals. [L781] [L782] [L941]
NEAR = 3e-2
# Iterations of a linear problem at most, and the error from which on they are twice as many.
# [L595]
_MOST, _BEHIND = 2000, 1e-2
# Entries of a matrix for each thread, and registers of that: two programs of 128 points share a
# multiprocessor. And what of the inner dimension of a product is read at once, and how many of
# these are under way; more is where epsilon falls. [L532] [L596] [L782] [L860]
ENTRIES, REGISTERS, CHUNK, WIDE_CHUNK, STAGES = 64, 128, 16, 32, 3
# What plans are multiplied by in half precision: they and their products with distances, which are
# at most one, stay below its largest number, with what they are led ahead by. [L940]
SCALE = 2.0**14


@triton.jit
def falls(values, changes, earlier, turn, fall, change, met, least):
    """Take an iteration; say whether the objective still falls, by the rule of ``Descent``."""
    # `fall` is that of one iteration, and `least` what the mean of the last five has to be.
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
    epsilon,  # [B] float32
    linear,  # [B, N, M] float32, read if LINEAR
    work,  # [B, N, M] float32, scratch
    inverse,  # [B, M, M] float32, scratch
    lines,  # [B, 4, M] float32, scratch
    plan,  # [B, N, M] float32, updated
    f,  # [B, N] float64, updated
    g,  # [B, M] float64, updated
    done_out,  # [B] int64, updated
    ended,  # [B] int64, a place in ``warm.ENDS``, updated
    value_out,  # [B] float32, the objective or nearly so, written
    shift,  # zero
    most,
    tol,  # float
    inner_tol,  # float
    objective_tol,  # float
    LINEAR: tl.constexpr,
    CHUNK: tl.constexpr,
    BUDGET: tl.constexpr,
    MOST: tl.constexpr,
    BEHIND: tl.constexpr,
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
    """Iterate one problem at its epsilon until the plan nearly settles."""
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
    linear += number * N * M
    inverse += number * M * M
    lines += number * 4 * M
    unit = tl.load(epsilon + number)
    values = tl.full([16], float("inf"), tl.float32)
    changes, earlier, known = values, float("inf"), float("inf")
    change, error, factor, value = 1.0, 0.0, 1.0, 0.0
    budget, settling, near = BUDGET, 0, 0
    done = tl.load(done_out + number).to(tl.int32)
    end = tl.load(ended + number).to(tl.int32)
    going = tl.where((end == 2) & (done < most), 1, 0)
    while going == 1:
        cross(x, plan, y, work, work, N, M, CHUNK)
        mass_a, mass_b = tl.maximum(tl.load(a), 1e-30), tl.maximum(tl.load(b), 1e-30)
        # the objective of the plan that the last iteration has made
        kernel = read(plan, shift, RI, CI, RT, CT)
        spent = 0.5 * weight * read(work, shift, RI, CI, RT, CT)
        if LINEAR:
            spent += read(linear, shift, RI, CI, RT, CT)
        share = tl.log(tl.maximum(kernel, 1e-37)) - by_rows(tl.log(mass_a))
        spent += unit * (share - by_columns(tl.log(mass_b)))
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
            if LINEAR:
                cost += read(linear, shift, RI, CI, RT, CT)
            kernel, largest, top = exponentials(cost, tl.load(g).to(tl.float32), mass_b, unit)
            kernel = kernel * by_rows(mass_a) * by_columns(mass_b)
            tl.store(f, (-unit * largest).to(tl.float64))
            tl.store(g, tl.load(g) - (unit * top).to(tl.float64))
            wanted = tl.minimum(tl.maximum(0.1 * change, inner_tol), MET)
            kernel, near, factor, error, taken = solved(
                kernel, mass_a, mass_b, all_a, all_b, f, g, unit, near, factor, wanted, budget,
                8, work, inverse, lines, shift, CHUNK, NEAR, RI, CI, RT, CT,
                SQUARE_RI, SQUARE_CI, SQUARE_RT, SQUARE_CT,
            )  # fmt: skip
            change = total(tl.abs(kernel - read(plan, shift, RI, CI, RT, CT)))
            write(plan, kernel, shift, RI, CI, RT, CT)
            done += 1
            settling += 1
            behind = (error > BEHIND) | (error > change)
            budget = tl.where(behind, tl.minimum(2 * budget, MOST), budget)
            factor = 1.0 + 0.9 * (factor - 1.0)
            # a plan that has nearly settled, or not a number
            end = tl.where(change == change, tl.where(change <= tol, 0, end), 3)
            going = tl.where((end == 2) & (done < most), 1, 0)
    tl.store(done_out + number, done)
    tl.store(ended + number, end)
    # the objective is that of the plan before, where this one has settled
    tl.store(value_out + number, value)


def halved(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide distances of each space by the largest, which is returned too, in half precision."""
    largest = table.amax((1, 2)).clamp_min(1e-30)
    return (table / largest[:, None, None]).half(), largest


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
    """Iterate problems (k,), from a x b times ``noise`` (N, M), or from costs that are chosen."""
    # `tables` are distances and weights of all spaces of both sides, float32, of powers of two;
    # `index` is which of them each problem compares, `linear` (1 - alpha) M (k, N, M), `begin`
    # costs and which problems begin with them, `epsilons` the target and the first (k,), in its
    # units, and `limits` are outer iterations and the fall of the objective that is none.
    (n, m), count = noise.shape, len(alpha)
    weight, unread = alpha.float(), noise.float()
    target, first = (epsilon.float() for epsilon in epsilons)
    costs = unread if linear is None else linear.float()
    halves = [halved(table) for table in tables[:2]]
    units = [largest[place] for (_, largest), place in zip(halves, index, strict=True)]
    made = Warm(
        weight.new_empty(count, n, m), alpha.new_empty(count, n), alpha.new_empty(count, m),
        torch.empty_like(index[0]), torch.empty_like(index[0]), torch.empty_like(weight),
    )  # fmt: skip
    starts = unread, index[0]
    if begin is not None:
        starts = weight[:, None, None] * begin[0].float(), begin[1].long()
    (tiles, warps), work = tiles_of(n, m, ENTRIES), torch.empty_like(made.plan)
    shared = {
        "LINEAR": linear is not None, "BUDGET": BUDGET, "MOST": _MOST,
        "num_warps": warps, "num_stages": STAGES, "maxnreg": REGISTERS,
    }  # fmt: skip
    launch(
        anneal_kernel, (count,), *(half for half, _ in halves), *tables[2:], *index,
        -4 * weight * units[0] * units[1], target, first, costs, *starts, unread,
        work, *(torch.empty_like(work, dtype=torch.float16) for _ in range(2)), *made[:-1], 0,
        limits[0], BEGIN=begin is not None,
        CHUNK=min(WIDE_CHUNK, n), ERROR=_ERROR, RELAXATION=_RELAXATION, INERTIA=_INERTIA,
        DECAY=_DECAY, MOMENTUM=MOMENTUM, DAMPING=DAMPING, SCALE=SCALE,
        **{name: tiles[name] for name in ("RI", "CI", "RT", "CT")}, **shared,
    )  # fmt: skip
    launch(
        _rough_kernel, (count,), *tables, *index, weight, target, costs, work,
        weight.new_empty(count, m, m), weight.new_empty(count, 4, m), *made, 0, limits[0],
        _ROUGH_TOLERANCE, _ROUGH_ERROR, limits[1], CHUNK=min(CHUNK, n), BEHIND=_BEHIND, MET=MET,
        FAR=FAR, NEAR=NEAR, **tiles, **shared,
    )  # fmt: skip
    return made
