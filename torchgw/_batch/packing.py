"""Small spaces packed by size, where they are iterated, and what one program hands on.

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

from torchgw._batch.relaxed import Relaxed
from torchgw._sinkhorn.choose import why_not
from torchgw._tensors.operations import sums_along, sums_of

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
