"""Sinkhorn's iteration on many problems at once, each at its own cost, epsilon and marginals.

Marginals are held by a penalty or bounds, as in ``_gradients/relaxed.py``: plans are normalised,
and the objective gives them their mass.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchgw._plans.transport import round_to_marginals
from torchgw._sinkhorn.eager import RELAXED_FACTOR
from torchgw._sinkhorn.loop import BACK_OFF, SMALLEST_GAP
from torchgw._tensors.operations import NEWTON_STEPS, few_on, sums_along, sums_of

# Exponents are kept within plus and minus this number, so that no row or column of a kernel is
# empty, and exponents of points without weight are finite. [L391, L690]
LARGEST_EXPONENT = 300.0


class Settled(NamedTuple):
    """What normalised plans are worth at their best mass."""

    mass: Tensor  # (k,)
    objective: Tensor  # (k,)
    violation: Tensor  # (k,) by how much strict marginals or bounds are broken


class Relaxed(NamedTuple):
    """Which marginals plans of k problems must have: one of two kinds for all."""

    rho: Tensor | None  # (k, 2) weights of penalties, infinite for strict marginals
    mass: Tensor | None  # (k,) share that is moved, where marginals are bounds

    def of(self, numbers: Tensor) -> "Relaxed":
        """Take some problems."""
        return Relaxed(*(None if part is None else part[numbers] for part in self))

    def half_step(
        self, side: int, weight: Tensor, potential: Tensor, epsilon: Tensor
    ) -> Callable[[Tensor], Tensor]:
        """Make what computes the factors of points (k, 1, n) from the sums of the plan."""
        # For strict marginals a factor would be weight / sums. `potential` is in units of epsilon
        # (k,).
        if self.mass is not None and not weight.is_cuda:
            return _within_bounds(weight, potential, self.mass)
        rho, mass, used = self.rho, self.mass, weight > 0
        tau = None
        if rho is not None:
            tau = 1 / (1 + epsilon / (2 * rho[:, side]))[:, None, None]
            # a free side has rho = 0, and its potentials are zero
            tau = torch.where(rho[:, side, None, None] > 0, tau, 0.0)

        def factors(sums: Tensor) -> Tensor:
            ratio = torch.where(used, weight / torch.where(used, sums, 1.0), 1.0)
            if tau is None:
                assert mass is not None
                # the level at which each point is full, as a logarithm
                full = torch.where(used, ratio.log() + potential, torch.inf)
                found = ratio * _filled(weight, full, mass)
            else:
                exponent = tau * ratio.log() - (1 - tau) * potential
                found = exponent.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT).exp()
            return torch.where(used, found, 1.0)

        return factors

    def error(self, weight: Tensor, sums: Tensor, factor: Tensor) -> Tensor:
        """Measure the change, (k,) L1, of columns (k, 1, m) by a half-step with a ``factor``."""
        if self.mass is not None:
            return sums_of(sums * (weight > 0) * (factor - 1).abs())
        # a constant in the logarithm changes the mass alone
        change = factor.log()
        change = change - sums_of(weight * change)[:, None, None]
        return sums_of(weight * change.expm1().abs())

    def rounded(self, plan: Tensor, weights: tuple[Tensor, Tensor]) -> Tensor:
        """Move normalised plans (k, n, m) to strict marginals, and within bounds."""
        wanted = []
        for side, weight in enumerate(weights):
            sums = plan.sum(2 - side)
            if self.mass is not None:
                most = weight / self.mass[:, None]
                sums = sums.minimum(most)
                # what is cut off goes where there is room
                missing, room = (1 - sums_along(sums)[:, None]).clamp_min(0), most - sums
                sums = sums + missing * (room / sums_along(room)[:, None])
            else:
                assert self.rho is not None
                sums = torch.where(self.rho[:, side, None].isinf(), weight, sums)
            wanted.append(sums)
        return round_to_marginals(plan, *wanted)

    def settle(
        self,
        value: Tensor,
        linear: Tensor,
        entropy: Tensor,
        masses: tuple[Tensor, Tensor],
        weights: tuple[Tensor, Tensor],
        epsilon: Tensor,
    ) -> Settled:
        """Give normalised plans their best mass (k,)."""
        # `value` grows with the square of the mass, `linear` with the mass itself; where the mass
        # is given the two are in the same units. `entropy` is KL(P | a x b).
        if self.mass is not None:
            over = [
                sums_along((self.mass[:, None] * part - weight).clamp_min(0))
                for part, weight in zip(masses, weights, strict=True)
            ]
            objective = value + linear + epsilon * (entropy + self.mass.log())
            return Settled(self.mass, self.mass.square() * objective, over[0].maximum(over[1]))
        assert self.rho is not None
        rho = self.rho
        strict = rho.isinf()
        held = torch.where(strict, 0.0, rho)
        parts, missed = [], []
        for part, weight in zip(masses, weights, strict=True):
            share = part / torch.where(weight > 0, weight, 1.0)
            parts.append(sums_along(torch.special.xlogy(part, share)))
            missed.append(sums_along((part - weight).abs()))
        divergences, errors = torch.stack(parts, 1), torch.stack(missed, 1)
        slope = value + 2 * (held * divergences).sum(1) + epsilon * entropy
        log, nothing = _best_logarithm(slope, linear / 2, 2 * held.sum(1) + epsilon)
        log = torch.where(strict.any(1), 0.0, log)
        missing = torch.where(strict, errors, 0.0).amax(1)
        missing = torch.where(nothing & ~strict.any(1), torch.inf, missing)
        # KL(mu x mu | a x a) of the two sides, and half of that of the plan
        mass = log.exp()
        square = mass.square()
        sides = 2 * square[:, None] * (divergences + log[:, None]) - square[:, None] + 1
        whole = square * (entropy + log) + (1 - square) / 2
        objective = square * value + mass * linear + (held * sides).sum(1) + epsilon * whole
        return Settled(mass, objective, missing)


def _best_logarithm(slope: Tensor, linear: Tensor, pull: Tensor) -> tuple[Tensor, Tensor]:
    """Find the largest l with slope + linear exp(-l) + pull l = 0, as ``best_mass`` does."""
    # Where there is no such l, because no mass is worth moving, l is where the sum is least.
    least = torch.where(linear > 0, (linear / pull).log(), -torch.inf)
    # from there Newton steps approach it from one side
    found = (-slope / pull).maximum(least)
    if bool((linear != 0).any()):
        for _ in range(NEWTON_STEPS):
            part = linear * (-found).exp()
            rest = (slope + part + pull * found) / (pull - part).clamp_min(1e-12 * pull)
            found = (found - rest).maximum(least)
    return found, slope + pull * (1 + least) > 0


def _filled(weight: Tensor, full: Tensor, mass: Tensor) -> Tensor:
    """Find which share of its weight each point (k, 1, n) has where all together have a mass (k,).

    Up to a level the shares grow with it alike; ``full`` are logarithms of the levels at which
    points have all of their weight.
    """
    ordered, order = full.sort(2)
    weights, level = weight.gather(2, order), mass[:, None, None]
    upto = _running(weights)
    # those before this point are full: levels may be too far apart for numbers, but for logarithms
    last = torch.searchsorted(upto, level).clamp_max(weights.shape[2] - 1)
    levels = (ordered - ordered.gather(2, last)).clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT).exp()
    rest = _running((weights / levels).flip(2)).flip(2)
    # the mass is a concave function of the level: the least of the lines on which as many are full,
    # so that it is reached where the last of them reaches it
    heights = torch.where(weights > 0, (level - (upto - weights)) / rest, 0.0)
    shares = (heights.amax(2, keepdim=True) / levels).clamp_max(1)
    return torch.empty_like(shares).scatter_(2, order, shares)


def _within_bounds(weight: Tensor, potential: Tensor, mass: Tensor) -> Callable[[Tensor], Tensor]:
    """Make the half-step within bounds by NumPy, in a fifth of the time on few points."""
    w, level = weight.numpy()[:, 0], mass.numpy()[:, None]
    count, n = w.shape
    first, unused = n * np.arange(count)[:, None], w <= 0
    start, padded = np.where(unused, np.inf, potential.numpy()[:, 0]), bool(unused.any())

    # points without weight divide nothing by nothing
    @np.errstate(all="ignore")
    def factors(sums: Tensor) -> Tensor:
        found = w / sums.numpy()[:, 0]
        if padded:
            found[unused] = 1.0
        # as in `_filled`
        full = np.log(found) + start
        order = full.argsort(1) + first
        weights = w.take(order)
        upto = np.add.accumulate(weights, 1)
        last = np.minimum(np.add.reduce(upto < level, 1, keepdims=True), n - 1)
        levels = full - full.take(order.take(last + first))
        levels = np.exp(np.minimum(np.maximum(levels, -LARGEST_EXPONENT), LARGEST_EXPONENT))
        rest = np.add.accumulate((w / levels).take(order)[:, ::-1], 1)[:, ::-1]
        heights = (level - (upto - weights)) / rest
        if padded:
            heights[weights <= 0] = 0.0
        found *= np.minimum(np.maximum.reduce(heights, 1, keepdims=True) / levels, 1.0)
        if padded:
            found[unused] = 1.0
        return torch.from_numpy(found[:, None])

    return factors


def _running(parts: Tensor) -> Tensor:
    """Add parts (k, 1, n) up to each, in an order that does not depend on k."""
    upto = parts.new_ones(parts.shape[2], parts.shape[2]).triu()
    return (parts.mT * upto).sum(1, keepdim=True)


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
    # in powers of two, which PyTorch computes in half of the time of others on some CPUs
    unit = epsilon[:, None, None] * math.log(2)
    exponent = torch.sub(g.masked_fill(b <= 0, -torch.inf)[:, None, :], cost).mul_(1 / unit)
    largest = exponent.amax(2, keepdim=True)
    sums = exponent.sub_(largest).exp2_().mul_(b[:, None, :]).sum(2)
    return -unit[:, :, 0] * (largest[:, :, 0] + sums.log2())


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
    # NumPy multiplies vectors by tables in half of PyTorch's time
    library, as_array, as_tensor = few_on(out.device)
    a, b, f, g, units = map(as_array, (*weights, *potentials, epsilon))
    unit = units[:, None]
    # by powers of two, as above
    digits = 1 / (unit * math.log(2))
    rates = as_tensor(digits[:, :, None])
    plan = torch.sub(as_tensor((f * digits)[:, :, None]), torch.mul(cost, rates, out=out), out=out)
    most = LARGEST_EXPONENT * math.log2(math.e)
    plan.add_(as_tensor((g * digits)[:, None, :])).clamp_(-most, most).exp2_()
    plan.mul_(weights[0][:, :, None]).mul_(weights[1][:, None, :])
    # points without weight get 1 / 1, so that their scaling stays one
    rows, columns = ((part + (part == 0))[:, None, :] for part in (a, b))
    table, turned = as_array(plan), as_array(plan.mT)
    sides = ((rows - a[:, None, :], rows, turned), (columns - b[:, None, :], columns, table))
    steps = (
        None
        if relaxed is None
        else [
            relaxed.half_step(side, weight[:, None, :], as_tensor(part / unit)[:, None, :], epsilon)
            for side, (weight, part) in enumerate(zip(weights, (f, g), strict=True))
        ]
    )

    def sums_at(side: int, other: Any) -> Any:
        none, _, table = sides[side]
        # where a library chooses its way by the number of products
        sums = (other.mT * table).sum(1, keepdim=True) if out.is_cuda else other @ table
        sums += none
        return sums

    def scaling(side: int, other: Any) -> Any:
        sums = sums_at(side, other)
        return sides[side][1] / sums if steps is None else as_array(steps[side](as_tensor(sums)))

    excess = None if relaxation is None else as_array(relaxation)[:, None, None] - 1

    def bounds(part: Any) -> Any:
        # as many numbers as there are points: to repeat one takes NumPy longer
        full = excess + 0 * part
        return full, 1 - full, 1 - full * (1 - 1 / RELAXED_FACTOR), 1 + full * (RELAXED_FACTOR - 1)

    led = [] if excess is None else [bounds(part) for part in (rows, columns)]

    def led_on(side: int, new: Any, last: Any) -> Any:
        if led:
            # the power is taken to first order
            part, rest, least, most = led[side]
            factor = new / last
            factor *= part
            factor += rest
            library.maximum(factor, least, out=factor)
            library.minimum(factor, most, out=factor)
            new *= factor
        return new

    with np.errstate(all="ignore"):
        s, t = library.ones_like(rows), library.ones_like(columns)
        for _ in range(TICK):
            t = led_on(1, scaling(1, s), t)
            s = led_on(0, scaling(0, t), s)
        # iterations go on from the relaxed scalings; plain ones give rows their masses
        plain = scaling(0, t)
        found = sums_at(1, plain)
        found *= t
        if relaxed is None:
            error = sums_of(as_tensor(abs(found - columns)))
        else:
            change = as_tensor(scaling(1, plain) / t)
            error = relaxed.error(weights[1][:, None, :], as_tensor(found), change)
        moved = [unit * library.log(part[:, 0]) for part in (plain, s, t)]
    plan.mul_(as_tensor(plain).mT).mul_(as_tensor(t))
    exact, f_next, g_next = map(as_tensor, (f + moved[0], f + moved[1], g + moved[2]))
    return Sweep(plan, exact, f_next, g_next, error)


def next_relaxation(factor: Any, reduction: Any, library: Any = torch) -> Any:
    """Fit factors (A,) to errors that fell to a share ``reduction`` in ``TICK`` iterations."""
    # By Young's relation, as in `_sinkhorn/loop.py`; a share of zero leaves a factor as it is.
    # Roots are rounded alike wherever a number stands in a vector, and other powers are not.
    root, where, clip = library.sqrt, library.where, library.clip
    rate = root(root(root(clip(reduction, None, 1.0))))
    plain = library.square(rate + factor - 1) / (rate * library.square(factor))
    fitted = 2 / (1 + root(clip(1 - plain, SMALLEST_GAP, None)))
    fitted = where(rate <= factor - 1, 1 + BACK_OFF * (factor - 1), fitted)
    fitted = where(reduction >= 1, 1.0, fitted)
    return where(reduction == 0, factor, fitted)
