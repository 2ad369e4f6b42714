"""Nearest neighbours among all points: products on matrix units and selection, in one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchgw._tensors.ahead import launch
from torchgw._tensors.operations import lengths

# Candidates that a row's registers can hold. [L304]
MOST_KEPT = 128
# Relative error of a product of two vectors rounded to half precision, and of one to which products
# with the remainders are added; each of the terms that are added up contributes 2^-23 more. [L304]
_ROUNDING = {1: 2.0**-9, 3: 2.0**-19}


@triton.jit(do_not_specialize=["q", "n"])
def _nearest_kernel(
    query,  # [q, D] half precision, leading part
    query_rest,  # [q, D] half precision, what it leaves out
    slack,  # [q] error bound of a product with a unit vector
    base,  # [n, D] half precision
    base_rest,  # [n, D]
    half_square,  # [n] |y|^2 / 2
    norm,  # [n] |y|
    best_score,  # [q, KEEP] out
    best_index,  # [q, KEEP] out
    q,
    n,
    D: tl.constexpr,
    KEEP: tl.constexpr,
    PRODUCTS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Keep the KEEP smallest lower bounds of |y|^2 / 2 - x.y for each x."""
    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    inside = rows < q
    feature = tl.arange(0, D)
    slot = tl.arange(0, KEEP)
    local = tl.arange(0, BLOCK_N)
    offset = rows[:, None].to(tl.int64) * D + feature[None, :]
    x = tl.load(query + offset, mask=inside[:, None], other=0.0)
    if PRODUCTS == 3:
        x_rest = tl.load(query_rest + offset, mask=inside[:, None], other=0.0)
    bound = tl.load(slack + rows, mask=inside, other=0.0)
    score = tl.full((BLOCK_Q, KEEP), float("inf"), tl.float32)
    index = tl.full((BLOCK_Q, KEEP), -1, tl.int32)
    # rows beyond the last take nothing
    worst = tl.where(inside, float("inf"), float("-inf"))
    for start in range(0, n, BLOCK_N):
        columns = start + local
        there = columns < n
        place = columns[None, :].to(tl.int64) * D + feature[:, None]
        y = tl.load(base + place, mask=there[None, :], other=0.0)
        product = tl.dot(x, y)
        if PRODUCTS == 3:
            y_rest = tl.load(base_rest + place, mask=there[None, :], other=0.0)
            product = tl.dot(x, y_rest, product)
            product = tl.dot(x_rest, y, product)
        square = tl.load(half_square + columns, mask=there, other=float("inf"))
        length = tl.load(norm + columns, mask=there, other=0.0)
        value = square[None, :] - product - bound[:, None] * length[None, :]
        least = tl.min(value, axis=1)
        # few entries pass once the lists have settled: K log(n / K) in all for points in any order
        while tl.max((least < worst).to(tl.int32), axis=0) > 0:
            at = tl.argmin(value, axis=1)
            take = least < worst
            replaced = (slot[None, :] == tl.argmax(score, axis=1)[:, None]) & take[:, None]
            score = tl.where(replaced, least[:, None], score)
            index = tl.where(replaced, (start + at)[:, None], index)
            worst = tl.where(inside, tl.max(score, axis=1), float("-inf"))
            value = tl.where(local[None, :] == at[:, None], float("inf"), value)
            least = tl.min(value, axis=1)
    out = rows[:, None].to(tl.int64) * KEEP + slot[None, :]
    tl.store(best_score + out, score, mask=inside[:, None])
    tl.store(best_index + out, index, mask=inside[:, None])


def nearest_candidates(
    base: Tensor, query: Tensor, keep: int, products: int
) -> tuple[Tensor, Tensor]:
    """Find the base points that may be nearest to each query point, and a bound for the others."""
    # Of the candidates, int32 (q, keep), -1 is none. Every other base point is at a squared
    # distance of at least twice the bound, (q,). `base` (n, d) and `query` (q, d) are float64,
    # centred, of norm one at most; `keep` is a power of two; `products` is 1, of the leading parts,
    # or 3, of the remainders too.
    width = max(16, triton.next_power_of_2(base.shape[1]))
    parts = [_halves(points, width) for points in (base, query)]
    norm, length = lengths(base, 1), lengths(query, 1)
    relative = _ROUNDING[products] + (width * products + 8) * 2.0**-23
    # numbers too small for half precision are off by 2^-25 each; squares are rounded to float32
    slack = relative * length + 2.0**-24 * width**0.5
    floor = 2.0**-24 * width**0.5 * length + 2.0**-22 * length * length
    half_square = norm * norm / 2 * (1 - 2.0**-21)
    device, q, n = base.device, len(query), len(base)
    score = torch.empty(q, keep, dtype=torch.float32, device=device)
    index = torch.empty(q, keep, dtype=torch.int32, device=device)
    block_q = 128 if keep <= 32 else 64
    launch(
        _nearest_kernel, (triton.cdiv(q, block_q),),
        *parts[1], slack.float(), *parts[0], half_square.float(),
        norm.float() * (1 + 2.0**-22), score, index, q, n, D=width, KEEP=keep, PRODUCTS=products,
        BLOCK_Q=block_q, BLOCK_N=128 if width <= 128 else 64,
        num_warps=8, num_stages=3 if width <= 128 else 2,
    )  # fmt: skip
    return index, score.amax(dim=1).double() + length * length / 2 - floor


def _halves(points: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Split points into sums of two in half precision, padded to a width."""
    padded = torch.nn.functional.pad(points.float(), (0, width - points.shape[1]))
    leading = padded.half()
    return leading, (padded - leading.float()).half()
