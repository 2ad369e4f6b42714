"""The vector part of a sweep in Triton: the work before, between and after passes over a cost.

A vector holds both sides, each padded by points of weight zero to whole blocks, so that a block
belongs to one side and needs no mask. Fused, because on a small problem the number of launches and
not their work sets the time: 12 vector operations to prepare a sweep, and 16 around one, are four
launches.
"""

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchgw._sinkhorn.kernels.operands import BLOCK, Blocks, launch_options
from torchgw._tensors.ahead import launch
from torchgw._typing import Marginals, Potentials


class Vectors(NamedTuple):
    """Vectors that all sweeps of a problem share; both sides, (length,) each."""

    scale: Tensor  # (1,) float64, cost units to exponents
    given: Tensor  # float64, potentials to go on from, cost units
    origin: Tensor  # float64, potentials of the kernel as it was rounded, cost units
    start: Tensor  # the same in exponents, without the part of the cost outside the products
    weight: Tensor
    feed: Tensor  # weight * 2^scaling
    scalings: Tensor  # (2, length) before and after the last iteration
    bad: Tensor  # (1,) int32
    result: Tensor  # (2 * length + 2,) float64, potentials before and after; ok; column error
    partial: Tensor  # (blocks,) float64
    split: int  # where the target side begins


@triton.jit(
    do_not_specialize=["n", "m", "rest"],
    do_not_specialize_on_alignment=["f", "g", "a", "b", "row", "column"],
)
def _prepare_kernel(
    f,  # [n] potentials where the kernel is made, cost units
    g,  # [m]
    a,  # [n] weights
    b,  # [m]
    row,  # [n] part of the cost outside the products, read if there is any
    column,  # [m]
    scale,  # [1]
    given,  # [length] these four are written
    origin,  # [length]
    start,  # [length]
    weight,  # [length]
    n,
    m,
    split,  # where the target side begins, a multiple of BLOCK
    rest,  # 1 if the cost has such a part, or 0
    BLOCK: tl.constexpr,
):
    """Read both sides, and round the kernel's potentials as the kernel will round them."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(0) * BLOCK < split:
        inside = at < n
        potential = tl.load(f + at, mask=inside, other=0.0).to(tl.float64)
        mass = tl.load(a + at, mask=inside, other=0.0).to(tl.float64)
        part = tl.load(row + at, mask=at < tl.where(rest > 0, n, 0), other=0.0).to(tl.float64)
    else:
        inside = at - split < m
        potential = tl.load(g + at - split, mask=inside, other=0.0).to(tl.float64)
        mass = tl.load(b + at - split, mask=inside, other=0.0).to(tl.float64)
        read = at - split < tl.where(rest > 0, m, 0)
        part = tl.load(column + at - split, mask=read, other=0.0).to(tl.float64)
    unit = tl.load(scale)
    exponent = ((potential - part) * unit).to(start.dtype.element_ty)
    kept = mass.to(weight.dtype.element_ty)
    tl.store(given + at, potential)
    # from the rounded exponent, as its rounding is part of the kernel
    tl.store(origin + at, exponent.to(tl.float64) / unit + part)
    # points without mass are left out of all sums: nothing bounds their exponentials
    tl.store(start + at, tl.where(kept > 0, exponent, -float("inf")))
    tl.store(weight + at, kept)


@triton.jit
def _begin_kernel(
    given,  # [length]
    origin,  # [length]
    scale,  # [1]
    weight,  # [length]
    scaling,  # [length] written: where the sweep begins
    feed,  # [length] written
    bad,  # [1] cleared
    BLOCK: tl.constexpr,
):
    """Turn potentials into log-scalings of the kernel."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    moved = (tl.load(given + at) - tl.load(origin + at)) * tl.load(scale)
    exponent = moved.to(scaling.dtype.element_ty)
    tl.store(scaling + at, exponent)
    tl.store(feed + at, tl.exp2(exponent) * tl.load(weight + at))
    tl.store(bad, 0)


@triton.jit(do_not_specialize=["plain"])
def _finish_kernel(
    scalings,  # [2, length] before and after the last iteration
    origin,  # [length]
    scale,  # [1]
    weight,  # [length]
    result,  # [2, length, and more] written: potentials
    given,  # [length] written: where the next sweep begins
    partial,  # [blocks] written: column error of each block
    length,  # a multiple of BLOCK
    split,  # a multiple of BLOCK
    plain,  # 1 if the next sweep goes on from after the last iteration, 0 if from before
    BLOCK: tl.constexpr,
):
    """Turn log-scalings into potentials, and measure the column error."""
    # The column mass of the plan is q_j = b_j exp((g_j - g_next_j) / epsilon), a ratio of scalings.
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    old = tl.load(scalings + at).to(tl.float64)
    new = tl.load(scalings + length + at).to(tl.float64)
    unit, centre = tl.load(scale), tl.load(origin + at)
    before, after = old / unit + centre, new / unit + centre
    tl.store(result + at, before)
    tl.store(result + length + at, after)
    tl.store(given + at, tl.where(plain != 0, after, before))
    gap = tl.abs(tl.exp2(old - new) - 1.0) * tl.load(weight + at).to(tl.float64)
    target = tl.program_id(0) * BLOCK >= split
    tl.store(partial + tl.program_id(0), tl.where(target, tl.sum(gap, 0), 0.0))


@triton.jit(do_not_specialize=["blocks"])
def _check_kernel(
    partial,  # [blocks]
    bad,  # [1]
    check,  # [2] written: one if nothing was bad, else zero; the column error
    blocks,
    BLOCK: tl.constexpr,
):
    """Add up the error in a fixed order."""
    total = tl.zeros((BLOCK,), tl.float64)
    for begin in range(0, blocks, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        total += tl.load(partial + at, mask=at < blocks, other=0.0)
    tl.store(check, (tl.load(bad) == 0).to(tl.float64))
    tl.store(check + 1, tl.sum(total, 0))


_OPTIONS = launch_options(Blocks(BLOCK, 1, 4, 1))


def prepare_(
    vectors: Vectors, marginals: Marginals, start: Potentials, rest: tuple[Tensor, Tensor] | None
) -> None:
    """Read the weights and the potentials where the kernel is made."""
    # of one dtype with the vectors, read or not: each kernel is compiled for few
    row, column = rest or (vectors.start, vectors.start)
    launch(
        _prepare_kernel, (len(vectors.partial),),
        *start, *marginals, row, column, vectors.scale, vectors.given, vectors.origin,
        vectors.start, vectors.weight, len(start.f), len(start.g), vectors.split,
        int(rest is not None), BLOCK=BLOCK, **_OPTIONS,
    )  # fmt: skip


def begin_(vectors: Vectors) -> None:
    """Set the scalings from which a sweep starts, and clear its flag."""
    launch(
        _begin_kernel, (len(vectors.partial),),
        vectors.given, vectors.origin, vectors.scale, vectors.weight, vectors.scalings[1],
        vectors.feed, vectors.bad, BLOCK=BLOCK, **_OPTIONS,
    )  # fmt: skip


def finish_(vectors: Vectors, plain: bool) -> None:
    """Write the potentials and the check of a sweep, and where the next one goes on."""
    launch(
        _finish_kernel, (len(vectors.partial),),
        vectors.scalings, vectors.origin, vectors.scale, vectors.weight, vectors.result,
        vectors.given, vectors.partial, len(vectors.given), vectors.split,
        int(plain), BLOCK=BLOCK, **_OPTIONS,
    )  # fmt: skip
    _check(vectors.partial, vectors.bad, vectors.result[-2:])


def probe(device: torch.device) -> None:
    """Compile and launch a kernel that every solve needs; an error says why Triton cannot run."""
    exact = partial(torch.zeros, dtype=torch.float64, device=device)
    _check(exact(1), torch.zeros(1, dtype=torch.int32, device=device), exact(2))


def _check(errors: Tensor, bad: Tensor, check: Tensor) -> None:
    """Add up the error of each block, and tell whether anything was bad."""
    launch(_check_kernel, (1,), errors, bad, check, len(errors), BLOCK=BLOCK, **_OPTIONS)
