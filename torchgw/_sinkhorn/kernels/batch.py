"""Sinkhorn on many small problems in Triton: one program each, its kernel on chip throughout."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torchgw._sinkhorn import batch as definition
from torchgw._sinkhorn.batch import LARGEST, LEAST_EXPONENT, RELAXED_FACTOR, SMALLEST, BatchPlans
from torchgw._sinkhorn.kernels.operands import Blocks, launch_options
from torchgw._tensors.launch import launch
from torchgw._typing import Marginals

__all__ = ["solve_batch"]

# Points per side up to which a kernel stays in the registers of one multiprocessor. [L79]
_MOST_POINTS = 256


@triton.jit
def _relaxed(old, new, excess, BOUND: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr):
    """Multiply by (new / old)^(1 + excess), the excess factor bounded."""
    bounded = tl.minimum(tl.maximum(new / old, 1.0 / BOUND), BOUND)
    moved = new * tl.exp2(excess * tl.log2(bounded))
    return tl.minimum(tl.maximum(moved, LEAST), MOST)


@triton.jit(do_not_specialize=["s", "t", "iterations"])
def _batch_kernel(
    costs,  # [B, s, t] float32, contiguous
    a,  # [s] weights
    b,  # [t]
    g,  # [B, t] potentials to start from, cost units
    epsilon,  # [B]
    plans,  # [B, s, t] written
    g_out,  # [B, t] written
    s,
    t,
    iterations,
    excess,  # float, how much farther than a plain step a relaxed one goes
    BOUND: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    LEAST_EXPONENT: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Solve one problem; what lies beyond its shape has weight one and a kernel of zero."""
    number = tl.program_id(0).to(tl.int64)
    i, j = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_T)
    rows, columns = i < s, j < t
    inside = rows[:, None] & columns[None, :]
    at = number * s * t + i[:, None] * t + j[None, :]
    mass_a = tl.load(a + i, mask=rows, other=1.0).to(tl.float32)
    mass_b = tl.load(b + j, mask=columns, other=1.0).to(tl.float32)
    unit = tl.load(epsilon + number).to(tl.float32)
    start = tl.load(g + number * t + j, mask=columns, other=0.0).to(tl.float32)
    x = (start[None, :] - tl.load(costs + at, mask=inside, other=0.0)) / unit
    x = tl.where(inside, x, -float("inf"))
    largest = tl.where(rows, tl.max(x, 1), 0.0)
    kernel = tl.exp(tl.maximum(x - largest[:, None], LEAST_EXPONENT))
    kernel = tl.where(inside, kernel, 0.0)
    v = mass_b
    u = mass_a / tl.where(rows, tl.sum(kernel * v[None, :], 1), 1.0)
    for _ in range(iterations):
        new = mass_b / tl.where(columns, tl.sum(kernel * u[:, None], 0), 1.0)
        v = _relaxed(v, new, excess, BOUND, LEAST, MOST)
        new = mass_a / tl.where(rows, tl.sum(kernel * v[None, :], 1), 1.0)
        u = _relaxed(u, new, excess, BOUND, LEAST, MOST)
    v = mass_b / tl.where(columns, tl.sum(kernel * u[:, None], 0), 1.0)
    v = tl.minimum(tl.maximum(v, LEAST), MOST)
    u = mass_a / tl.where(rows, tl.sum(kernel * v[None, :], 1), 1.0)
    tl.store(plans + at, kernel * u[:, None] * v[None, :], mask=inside)
    tl.store(g_out + number * t + j, start + unit * tl.log(v / mass_b), mask=columns)


def solve_batch(
    costs: Tensor,
    marginals: Marginals,
    g: Tensor,
    epsilon: Tensor,
    iterations: int,
    relaxation: float,
) -> BatchPlans:
    """Compute :func:`torchgw._sinkhorn.batch.solve_batch`, on chip where problems fit."""
    count, s, t = costs.shape
    if max(s, t) > _MOST_POINTS:
        return definition.solve_batch(costs, marginals, g, epsilon, iterations, relaxation)
    costs, g, epsilon = costs.contiguous(), g.contiguous(), epsilon.contiguous()
    done = BatchPlans(costs.new_empty(costs.shape), g.new_empty(g.shape))
    blocks = Blocks(triton.next_power_of_2(s), triton.next_power_of_2(t), 0, 1)
    # 16 numbers of the kernel per thread up to 128 points: what is computed of a row, each of its
    # threads does; 128 of its registers beyond. [L446]
    warps = min(16 if max(s, t) > 128 else 32, max(1, blocks.n * blocks.m // 512))
    launch(
        _batch_kernel, (count,),
        costs, *marginals, g, epsilon, *done, s, t, iterations, relaxation - 1.0,
        BOUND=RELAXED_FACTOR, LEAST=SMALLEST, MOST=LARGEST, LEAST_EXPONENT=LEAST_EXPONENT,
        BLOCK_S=blocks.n, BLOCK_T=blocks.m, **launch_options(blocks._replace(warps=warps)),
    )  # fmt: skip
    return done
