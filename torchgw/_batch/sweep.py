"""Sinkhorn's iteration on many problems at once, each at its own cost, epsilon and relaxation."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._batch.relaxed import LARGEST_EXPONENT, Relaxed
from torchgw._sinkhorn.eager import RELAXED_FACTOR
from torchgw._sinkhorn.loop import BACK_OFF, SMALLEST_GAP
from torchgw._tensors.operations import sums_of

# Full iterations of a sweep, a power of two: the rate of one iteration is then found by three
# square roots. [L391]
TICK = 8
# Decay of epsilon per outer iteration: slower than in a single solve, as that ends lower. [L391]
# [L693] [L1226]
DECAY = 0.85
# Change from which on a plan is not near its fixed point. [L465, L595]
FAR = 1e-2
# Iterations of the first linear problems. [L391]
BUDGET = 48


class Sweep(NamedTuple):
    """Potentials after some iterations, and their plan."""

    plan: Tensor  # (A, n, m), rows have mass a
    f: Tensor  # (A, n) potential of its rows
    f_next: Tensor  # (A, n) from which iterations go on
    g: Tensor  # (A, m) potential of its columns, likewise
    error: Tensor  # (A,) L1 distance of its columns to b, or to those after a half-step


def exact_rows(cost: Tensor, b: Tensor, g: Tensor, epsilon: Tensor) -> Tensor:
    """Compute potentials (A, n) by which rows have their mass at g (A, m); sweeps go on there."""
    unit = epsilon[:, None, None]
    exponent = torch.sub(torch.where(b > 0, g, -torch.inf)[:, None, :], cost).div_(unit)
    largest = exponent.amax(2, keepdim=True)
    sums = exponent.sub_(largest).exp_().mul_(b[:, None, :]).sum(2)
    return -epsilon[:, None] * (largest[:, :, 0] + sums.log())


def sweep(
    cost: Tensor,
    weights: tuple[Tensor, Tensor],
    potentials: tuple[Tensor, Tensor],
    epsilon: Tensor,
    relaxation: Tensor | None,
    out: Tensor,
    relaxed: Relaxed | None = None,
) -> Sweep:
    """Run full iterations of A problems (A, n, m) from potentials (A, n) and (A, m)."""
    # The bits of a problem are those of any batch if there are two at least: on a CPU a product
    # with a single one takes another way through the library. `out` (A, n, m) becomes the plan.
    # Points of zero weight keep their potentials. Without a `relaxation` iterations are plain.
    (a, b), (f, g), unit = weights, potentials, epsilon[:, None]
    plan = torch.sub((f / unit)[:, :, None], cost / unit[:, :, None], out=out)
    plan.add_((g / unit)[:, None, :]).clamp_(-LARGEST_EXPONENT, LARGEST_EXPONENT).exp_()
    plan.mul_(a[:, :, None]).mul_(b[:, None, :])
    turned = plan.mT
    excess = None if relaxation is None else (relaxation - 1)[:, None, None]
    # points without weight get 1 / 1, so that their scaling stays one
    rows, columns = (part[:, None, :] for part in (a, b))
    no_rows, no_columns = ((part == 0).to(part.dtype) for part in (rows, columns))
    rows, columns = rows + no_rows, columns + no_columns
    sides = ((no_rows, rows, turned), (no_columns, columns, plan))
    steps = (
        None
        if relaxed is None
        else [
            relaxed.half_step(side, weight[:, None, :], (potential / unit)[:, None, :], epsilon)
            for side, (weight, potential) in enumerate(((a, f), (b, g)))
        ]
    )

    def scaling(side: int, other: Tensor) -> Tensor:
        none, weight, table = sides[side]
        sums = _sums(none, other, table)
        return weight / sums if steps is None else steps[side](sums)

    one = torch.ones_like(unit)[:, :, None]

    def led_on(new: Tensor, last: Tensor) -> Tensor:
        if excess is None:
            return new
        # the power is taken to first order
        bounded = (new / last).clamp_(1 / RELAXED_FACTOR, RELAXED_FACTOR)
        return torch.lerp(one, bounded, excess).mul_(new)

    s, t = torch.ones_like(rows), torch.ones_like(columns)
    for _ in range(TICK):
        t = led_on(scaling(1, s), t)
        s = led_on(scaling(0, t), s)
    # iterations go on from the relaxed scalings; plain ones give rows their masses
    plain = scaling(0, t)
    found = _sums(no_columns, plain, plan).mul_(t)
    if relaxed is None:
        error = sums_of((found - columns).abs_())
    else:
        error = relaxed.error(b[:, None, :], found, scaling(1, plain) / t)
    plan.mul_(plain.mT).mul_(t)
    after, exact = (f + unit * part[:, 0].log() for part in (s, plain))
    return Sweep(plan, exact, after, g + unit * t[:, 0].log(), error)


def _sums(none: Tensor, factors: Tensor, table: Tensor) -> Tensor:
    """Add the rows of tables (A, n, m) times factors (A, 1, n), and what stands for no sum."""
    if table.is_cuda:
        # where a library chooses its way by the number of products
        return (factors.mT * table).sum(1, keepdim=True).add_(none)
    return torch.baddbmm(none, factors, table)


def next_relaxation(factor: Tensor, reduction: Tensor) -> Tensor:
    """Fit factors (A,) to errors that fell to a share ``reduction`` in ``TICK`` iterations."""
    # By Young's relation, as in `_sinkhorn/loop.py`; a share of zero leaves a factor as it is.
    # Roots are rounded alike wherever a number stands in a vector, and other powers are not.
    rate = reduction.clamp(max=1).sqrt().sqrt().sqrt()
    plain = (rate + factor - 1).square() / (rate * factor.square())
    fitted = 2 / (1 + (1 - plain).clamp_min(SMALLEST_GAP).sqrt())
    fitted = torch.where(rate <= factor - 1, 1 + BACK_OFF * (factor - 1), fitted)
    fitted = torch.where(reduction >= 1, 1.0, fitted)
    return torch.where(reduction == 0, factor, fitted)
