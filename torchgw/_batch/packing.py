"""Small spaces packed by size, where they are iterated, and the costs of problems between them.

What a problem is padded to depends on its own size alone, so that its bits do not depend on what is
solved beside it. Padding is points of weight zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._batch.sweep import Relaxed, exact_rows
from torchgw._problem.problem import STRICT
from torchgw._sinkhorn.annealing import START_NOISE
from torchgw._sinkhorn.choose import why_not
from torchgw._tensors.operations import sums_along, sums_of, weighted

# Points of a side up to which a problem is begun in float32, and iterated in float64, by a Triton
# program of its own. [L397] [L402]
LARGEST_ROUGH = 128
LARGEST_ON_CHIP = 64


# How a program ends: the plan has settled, the objective is flat, the iterations have run out, a
# number is not finite any more, or the plan moves beyond what float32 can follow.
ENDS = ("SETTLED", "FLAT", "LIMIT", "LOST", "AWAY")


class Warm(NamedTuple):
    """Plans of k problems that have nearly settled, and their potentials."""

    plan: Tensor  # (k, n, m)
    f: Tensor  # (k, n) float64, potentials in cost units
    g: Tensor  # (k, m)
    done: Tensor  # (k,) int64, outer iterations
    ended: Tensor  # (k,) int64, places in ENDS
    value: Tensor  # (k,) float32, roughly the objective


def may_begin(shape: tuple[int, int], device: torch.device) -> bool:
    """Whether problems of these padded sizes can begin in Triton."""
    return max(shape) <= LARGEST_ROUGH and has_triton(device)


def on_chip(shape: tuple[int, int], device: torch.device) -> bool:
    """Whether problems of these padded sizes are iterated in Triton."""
    return max(shape) <= LARGEST_ON_CHIP and has_triton(device)


@cache
def has_triton(device: torch.device) -> bool:
    """Whether Triton runs there, compiled."""
    return device.type == "cuda" and why_not("triton", device, torch.float32) is None


# Sizes that spaces are padded to: multiples of the first number, two for each doubling. Rows of
# tables are aligned then. And where many plans of a problem are followed on a CPU, which pays for
# what is padded: multiples of the second, four for each doubling. [L391] [L1312]
_WIDE, _NARROW = 16, 8
# Points of the largest space that is packed; larger problems are solved one by one. [L391]
LARGEST = 512
# Spaces whose spreads are computed together: each takes twice its table in between. [L1203]
_TOGETHER = 4096
# A variance below this share of the mean square, in machine epsilons, is rounding. [L391]
_ROUNDING = 64
# Least weight of a point in the scale of the cost, as a share of an equal weight. [L351, L391]
LEAST_WEIGHT = 1e-3
# The scale of a relaxed cost is at least this share of the sum of both sides' variances; that
# exceeds the product of the deviations where one is four times the other. [L298]
OWN_SHARE = 0.25


class Stack(NamedTuple):
    """Spaces of one padded size."""

    tables: Tensor  # (S, n, n) float64
    weights: Tensor  # (S, n) float64, zero beyond the points of a space
    sizes: Tensor  # (S,) int64, points of each
    spreads: Tensor  # (S,) float64, standard deviation of the distances of each


@dataclass(frozen=True)
class Packed:
    """B problems between the spaces of two stacks."""

    x: Stack
    y: Stack
    i: Tensor  # (B,) int64, which space of x
    j: Tensor  # (B,) int64, which space of y
    alpha: Tensor  # (B,) float64
    epsilon: Tensor  # (B,) float64, to reach; NaN for a share of the natural scale
    first: Tensor  # (B,) float64, the first epsilon, as a share of the natural scale
    # M of some problems, (k, n, m) float64, zero beyond their sizes
    linear: Callable[[Tensor], Tensor] | None = None
    # costs that some problems begin with, and which of them; the others begin at a x b
    begin: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    relaxed: Relaxed | None = None  # penalties or bounds, if marginals are not strict
    # whether entropies are those of a step from the last plan, in place of one from a x b
    proximal: bool = False

    @property
    def device(self) -> torch.device:
        """Where the problems are."""
        return self.x.tables.device

    @property
    def shape(self) -> tuple[int, int]:
        """Padded sizes (n, m)."""
        return self.x.tables.shape[1], self.y.tables.shape[1]

    def __len__(self) -> int:
        """Count the problems."""
        return len(self.i)

    def again(
        self, which: Tensor, first: Tensor, begin: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> Packed:
        """Take problems (k,), some perhaps several times, that begin with costs at an epsilon."""
        linear = self.linear
        return replace(
            self, i=self.i[which], j=self.j[which], alpha=self.alpha[which],
            epsilon=self.epsilon[which], first=first,
            linear=None if linear is None else lambda some: linear(which[some]), begin=begin,
            relaxed=None if self.relaxed is None else self.relaxed.of(which),
        )  # fmt: skip

    def damped(self) -> Packed:
        """Take shorter steps where strict plans turn back, as relaxed ones do."""
        return replace(self, relaxed=Relaxed(self.alpha.new_full((len(self), 2), torch.inf), None))


def padded_sizes(counts: NDArray[np.int64], *, narrow: bool = False) -> NDArray[np.int64]:
    """Find the padded sizes of spaces of so many points; zero for those too large to pack."""
    least, steps = (_NARROW, 4) if narrow else (_WIDE, 2)
    counts = np.maximum(counts, 1)
    step = np.maximum(2 ** np.ceil(np.log2(counts)).astype(np.int64) // (2 * steps), least)
    return np.where(counts > LARGEST, 0, -(-counts // step) * step)


def pack(tables: Sequence[Tensor], weights: Sequence[Tensor], size: int | None = None) -> Stack:
    """Pack spaces, (n, n) and (n,), all of one padded size."""
    size = size or int(padded_sizes(np.array(len(tables[0]))))
    counts = torch.tensor([len(table) for table in tables], device=tables[0].device)
    stacked = tables[0].new_zeros(len(tables), size, size, dtype=torch.float64)
    masses = stacked.new_zeros(len(tables), size)
    for place, (table, weight) in enumerate(zip(tables, weights, strict=True)):
        n = len(table)
        stacked[place, :n, :n] = table
        masses[place, :n] = weight
    return make_stack(stacked, masses, counts)


def make_stack(tables: Tensor, weights: Tensor, sizes: Tensor) -> Stack:
    """Make a stack of padded spaces (S, n, n), (S, n), of which the first points (S,) are used."""
    parts = zip(*(part.split(_TOGETHER) for part in (tables, weights, sizes)), strict=True)
    return Stack(tables, weights, sizes, torch.cat([_spreads(*part) for part in parts]))


def repad(tables: Tensor, size: int, sizes: Tensor) -> Tensor:
    """Copy the used part of tables (S, n, ...), padded by zeros to another size along axis 1."""
    least = min(size, tables.shape[1])
    inside = inside_of(least, sizes).view(len(tables), least, *[1] * (tables.ndim - 2))
    copied = tables.new_zeros(len(tables), size, *tables.shape[2:])
    copied[:, :least] = torch.where(inside, tables[:, :least], 0.0)
    return copied


def _spreads(tables: Tensor, weights: Tensor, sizes: Tensor) -> Tensor:
    """Compute the standard deviation of the distances of each space by weight, (S,)."""
    least = LEAST_WEIGHT / sizes.to(weights.dtype)
    raised = torch.where(weights > 0, weights.maximum(least[:, None]), 0.0)
    raised = raised / sums_along(raised)[:, None]
    mean, square = (
        sums_along((part * raised[:, None, :]).sum(2) * raised)
        for part in (tables, tables.square())
    )
    variance = square - mean.square()
    real = (variance > _ROUNDING * torch.finfo(variance.dtype).eps * square) & (
        (weights > 0).sum(1) > 1
    )
    return torch.where(real, variance, 0.0).sqrt()


def natural_scale(problems: Packed, numbers: Tensor, linear: Tensor | None) -> Tensor:
    """Compute the spread of the cost of some problems at a concentrated plan, (k,)."""
    # 4 alpha std(DX) std(DY) + (1 - alpha) std(M), given the last factor times M; one where all
    # plans cost the same and any epsilon will do. Relaxed plans see what either side decides alone.
    i, j = problems.i[numbers], problems.j[numbers]
    x, y = problems.x.spreads[i], problems.y.spreads[j]
    spread = x * y
    if problems.relaxed is not None:
        spread = spread.maximum(OWN_SHARE * (x.square() + y.square()))
    scale = 4 * problems.alpha[numbers] * spread
    if linear is not None:
        count = (problems.x.sizes[i] * problems.y.sizes[j]).to(scale.dtype)
        mean = sums_of(linear) / count
        inside = inside_of(linear.shape[1], problems.x.sizes[i])[:, :, None]
        inside = inside & inside_of(linear.shape[2], problems.y.sizes[j])[:, None, :]
        centred = torch.where(inside, linear - mean[:, None, None], 0.0)
        scale = scale + (sums_of(centred.square()) / count).sqrt()
    return torch.where(scale > 0, scale, 1.0)


def inside_of(size: int, counts: Tensor) -> Tensor:
    """Tell which places (k, size) belong to points."""
    return torch.arange(size, device=counts.device) < counts[:, None]


# epsilon="auto", and that of proximal steps, as shares of the natural scale [L132, L391, L1269],
# times the mass that moves: in the plane it spans as much of the squared lengths that costs are
# made of. [L1530]
AUTO_EPSILON, AUTO_STEP = 0.0025, 0.1


def units(
    problems: Packed, numbers: Tensor
) -> tuple[Tensor | None, Tensor, Tensor, Relaxed | None]:
    """Compute (1 - alpha) M of some problems, their target and first epsilon, and penalties."""
    linear, relaxed = None, problems.relaxed and problems.relaxed.of(numbers)
    if problems.linear is not None:
        share = 1 - problems.alpha[numbers]
        linear = share[:, None, None] * problems.linear(numbers)
    target = problems.epsilon[numbers]
    if relaxed is not None and relaxed.mass is not None:
        # M is divided by the mass that is moved, as the plan is normalised
        mass = relaxed.mass
        linear, target = None if linear is None else linear / mass[:, None, None], target / mass
    scale = natural_scale(problems, numbers, linear)
    auto = (AUTO_STEP if problems.proximal else AUTO_EPSILON) * scale
    if relaxed is not None and relaxed.mass is not None:
        auto = auto * relaxed.mass
    target = torch.where(target.isnan(), auto, target)
    if relaxed is not None and relaxed.rho is not None:
        heavy = relaxed.rho >= STRICT * scale[:, None]
        relaxed = relaxed._replace(rho=torch.where(heavy, torch.inf, relaxed.rho))
    return linear, target, (problems.first[numbers] * scale).maximum(target), relaxed


def start_noise(shape: tuple[int, int], device: torch.device) -> Tensor:
    """Make factors next to one, (n, m), which depend on the place of an entry alone."""
    # The product plan of two spaces whose points all look alike is a saddle point.
    generator = torch.Generator(device="cpu").manual_seed(0)
    noise = torch.randn(shape, dtype=torch.float64, device="cpu", generator=generator)
    return (1 + START_NOISE * noise).to(device)


def taken(tables: Tensor, which: Tensor) -> Tensor:
    """Take some tables (k, n, n); on a CPU not a copy for each where there is one alone."""
    shared = len(tables) == 1 and not tables.is_cuda
    return tables.expand(len(which), -1, -1) if shared else tables[which]


def squares_at(table: Tensor, mass: Tensor) -> Tensor:
    """Compute sum_j D_ij^2 p_j of tables (k, n, n) and masses (k, n)."""
    # those of one table are computed once
    square = table[: 1 if table.stride(0) == 0 else None].square().expand_as(table)
    return weighted(mass, square.mT)


def cross_product(x: Tensor, y: Tensor, plan: Tensor) -> Tensor:
    """Compute X P Y of some problems."""
    return products(products(x, plan), y)


def gradient(cross: Tensor, alpha: Tensor, linear: Tensor | None) -> Tensor:
    """Compute the costs of plans from X P Y, which is overwritten."""
    cost = cross.mul_(-4 * alpha[:, None, None])
    return cost if linear is None else cost.add_(linear)


def whole(
    cost: Tensor, alpha: Tensor, tables: tuple[Tensor, Tensor], masses: tuple[Tensor, Tensor]
) -> Tensor:
    """Add the terms of rows and of columns to costs, and subtract the mean of the whole."""
    sides = zip(tables, masses, strict=True)
    rows, columns = (2 * alpha[:, None] * squares_at(*side) for side in sides)
    cost = cost + rows[:, :, None] + columns[:, None, :]
    p, q = masses
    return cost - sums_along((cost * q[:, None, :]).sum(2) * p)[:, None, None]


def first_rows(
    relaxed: Relaxed | None, cost: Tensor, weights: tuple[Tensor, Tensor], g: Tensor, unit: Tensor
) -> Tensor:
    """Compute potentials of rows from which iterations go on from g, (k, n)."""
    a, rows = weights[0], exact_rows(cost, weights[1], g, unit)
    if relaxed is None:
        return rows
    rows_now, mass = (rows / unit[:, None])[:, None, :], a[:, None, :]
    return rows + unit[:, None] * relaxed.half_step(0, mass, rows_now, unit)(mass)[:, 0].log()


def products(left: Tensor, right: Tensor) -> Tensor:
    """Compute left (k, n, l) times right (k, l, m), float64; one pair alone is taken twice."""
    # a library chooses its way on a GPU by the number of products
    if (
        left.is_cuda
        and has_triton(left.device)
        and max(*left.shape[1:], right.shape[2]) <= LARGEST_ROUGH
    ):
        from torchgw._batch.product_triton import batch_product

        return batch_product(left, right)
    if len(left) == 1:
        return torch.bmm(left.expand(2, -1, -1), right.expand(2, -1, -1))[:1]
    return torch.bmm(left, right)
