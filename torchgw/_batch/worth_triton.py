"""What plans of many problems are worth, in Triton: one program each.

Sums by PyTorch are split by how many there are, and have other bits in other batches.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from torchgw._batch.tile_triton import cross, own, problem
from torchgw._tensors.ahead import launch

# Rows that are read at once, and as many columns for each warp. A choice. [L535]
_ROWS = 16


class Worth(NamedTuple):
    """Sums over plans, and over a x b, (k,) each but for the last."""

    crossed: torch.Tensor  # <X P Y, P>
    linear: torch.Tensor  # (1 - alpha) <M, P>
    own: torch.Tensor  # sum of D_ij^2 p_i p_j, both sides
    potentials: torch.Tensor  # <f, p> + <g, q>
    missing: torch.Tensor  # L1 distance of the marginals to a and b, the larger one
    product_crossed: torch.Tensor  # the same of a x b
    product_linear: torch.Tensor
    product_own: torch.Tensor
    masses: torch.Tensor  # (k, N + M) of rows and columns of the plan


@triton.jit(do_not_specialize=["count"])
def _worth_kernel(
    x,  # [S, N, N] float64
    y,  # [S', M, M] float64
    a,  # [S, N] float64
    b,  # [S', M] float64
    i,  # [k] int64
    j,  # [k] int64
    linear,  # [k, N, M] float64, read if LINEAR
    plan,  # [k, N, M] float64
    f,  # [k, N] float64
    g,  # [k, M] float64
    work,  # [k, N, M] float64, scratch
    masses,  # [k, N + M] float64, written
    out,  # [8, k] float64, written
    count,
    LINEAR: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sum over the plan of one problem."""
    number, x, y, a, b = problem(x, y, a, b, i, j, N, M)
    f += number * N
    g += number * M
    plan += number * N * M
    linear += number * N * M
    work += number * N * M
    masses += number * (N + M)
    cross(x, plan, y, work, work, N, M, ROWS)
    columns = tl.arange(0, M)
    mass_b = tl.load(b + columns)
    q = tl.zeros([M], tl.float64)
    crossed, spent = tl.zeros([ROWS], tl.float64), tl.zeros([ROWS], tl.float64)
    product, potentials = tl.zeros([ROWS], tl.float64), tl.zeros([ROWS], tl.float64)
    missing = tl.zeros([ROWS], tl.float64)
    for begin in range(0, N, ROWS):
        rows = begin + tl.arange(0, ROWS)
        place = rows[:, None] * M + columns[None, :]
        values = tl.load(plan + place)
        p, mass_a = tl.sum(values, 1), tl.load(a + rows)
        q += tl.sum(values, 0)
        crossed += tl.sum(values * tl.load(work + place), 1)
        potentials += p * tl.load(f + rows)
        missing += tl.abs(p - mass_a)
        if LINEAR:
            costs = tl.load(linear + place)
            spent += tl.sum(values * costs, 1)
            product += tl.sum(costs * mass_b[None, :], 1) * mass_a
        tl.store(masses + rows, p)
    tl.store(masses + N + columns, q)
    tl.debug_barrier()
    own_x, _ = own(x, masses, N, ROWS)
    own_y, _ = own(y, masses + N, M, ROWS)
    product_x, mean_x = own(x, a, N, ROWS)
    product_y, mean_y = own(y, b, M, ROWS)
    out += number
    tl.store(out, tl.sum(crossed, 0))
    tl.store(out + count, tl.sum(spent, 0))
    tl.store(out + 2 * count, own_x + own_y)
    tl.store(out + 3 * count, tl.sum(potentials, 0) + tl.sum(q * tl.load(g + columns), 0))
    most = tl.maximum(tl.sum(missing, 0), tl.sum(tl.abs(q - mass_b), 0))
    tl.store(out + 4 * count, most)
    tl.store(out + 5 * count, mean_x * mean_y)
    tl.store(out + 6 * count, tl.sum(product, 0))
    tl.store(out + 7 * count, product_x + product_y)


def worth(
    tables: tuple[torch.Tensor, ...],
    index: tuple[torch.Tensor, torch.Tensor],
    linear: torch.Tensor | None,
    plan: torch.Tensor,
    potentials: tuple[torch.Tensor, torch.Tensor],
) -> Worth:
    """Sum over plans (k, N, M); arguments are as in ``finish``."""
    count, n, m = plan.shape
    out, masses = plan.new_empty(8, count), plan.new_empty(count, n + m)
    launch(
        _worth_kernel, (count,), *tables, *index, plan if linear is None else linear, plan,
        *potentials, torch.empty_like(plan), masses, out, count,
        LINEAR=linear is not None, N=n, M=m, ROWS=_ROWS, num_warps=m // _ROWS, num_stages=1,
    )  # fmt: skip
    return Worth(*(*out, masses))
