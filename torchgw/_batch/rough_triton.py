"""The first iterations of many problems in Triton: one program each, all of it on chip.

In float32, from a x b down to where the plan has nearly settled at the target epsilon. The engine
goes on from there in float64, by its own rules, so that answers are judged in one place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from torchgw._batch.packing import Packed
from torchgw._batch.warm import Warm
from torchgw._tensors.launch import launch

__all__ = ["rough"]

# Change of the plan at which float32 hands over, outer iterations until then at most, and the
# column error of its linear problems. [L397] [L466]
_ROUGH_TOLERANCE = 2e-4
_ROUGH_ITERATIONS = 60
_ROUGH_ERROR = 3e-5
# Entries of a block for each warp, and warps at most. [L397] [L467]
_ENTRIES_PER_WARP = 1024
_MOST_WARPS = 16


@triton.jit
def _relaxed(old, new, excess):
    """Go further than from old to new, within a factor of two."""
    ratio = tl.minimum(tl.maximum(new / old, 0.5), 2.0)
    return new * (1.0 + excess * (ratio - 1.0))


@triton.jit(do_not_specialize=["n", "m", "most"])
def _rough_kernel(
    x,  # [S, n, n] float32
    y,  # [S', m, m] float32
    a,  # [S, n] float32
    b,  # [S', m] float32
    i,  # [B] int64
    j,  # [B] int64
    alpha,  # [B] float32
    target,  # [B] float32, epsilon
    first,  # [B] float32, epsilon
    linear,  # [B, n, m] float32, read if LINEAR
    noise,  # [n, m] float32
    plan,  # [B, n, m] float32, written
    g_out,  # [B, m] float32, written
    done_out,  # [B] int64, written
    n,
    m,
    most,
    tol,  # float
    inner_tol,  # float
    LINEAR: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Iterate one problem until its plan has nearly settled."""
    number = tl.program_id(0).to(tl.int64)
    at_x, at_y = tl.load(i + number), tl.load(j + number)
    rows, columns = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    in_rows, in_columns = rows < n, columns < m
    inside = in_rows[:, None] & in_columns[None, :]
    place = rows[:, None] * m + columns[None, :]
    mass_a = tl.load(a + at_x * n + rows, mask=in_rows, other=0.0)
    mass_b = tl.load(b + at_y * m + columns, mask=in_columns, other=0.0)
    used_a, used_b = mass_a > 0, mass_b > 0
    used = used_a[:, None] & used_b[None, :]
    weight = -4.0 * tl.load(alpha + number)
    last = tl.load(target + number)
    epsilon = tl.maximum(tl.load(first + number), last)
    little = tl.load(noise + place, mask=inside, other=0.0)
    point = mass_a[:, None] * mass_b[None, :] * little
    g = tl.zeros([BLOCK_M], tl.float32)
    relaxation = 1.0
    done = 0
    going = 1
    while going == 1:
        left = tl.load(
            x + at_x * n * n + rows[:, None] * n + rows[None, :],
            mask=in_rows[:, None] & in_rows[None, :],
            other=0.0,
        )
        product = tl.dot(left, point, input_precision="tf32x3")
        right = tl.load(
            y + at_y * m * m + columns[:, None] * m + columns[None, :],
            mask=in_columns[:, None] & in_columns[None, :],
            other=0.0,
        )
        cost = weight * tl.dot(product, right, input_precision="tf32x3")
        if LINEAR:
            cost += tl.load(linear + number * n * m + place, mask=inside, other=0.0)
        x_exp = (g[None, :] - cost) / epsilon
        x_exp = tl.where(used, x_exp, -float("inf"))
        shift = tl.where(used_a, tl.max(x_exp, 1), 0.0)
        # no row or column is empty, and what is not used has no mass
        kernel = tl.exp(tl.maximum(x_exp - shift[:, None], -70.0))
        kernel = tl.where(used, kernel * mass_a[:, None] * mass_b[None, :], 0.0)
        # exact rows, so that the columns go on from g
        sums = tl.sum(kernel, 1)
        s = tl.where(used_a, mass_a / tl.where(used_a, sums, 1.0), 1.0)
        t = tl.full([BLOCK_M], 1.0, tl.float32)
        exact = s
        arrived = epsilon <= last
        wanted = tl.where(arrived, inner_tol, 1e-2)
        error = 3.0e38
        spent = 0
        busy = 1
        while busy == 1:
            for _ in range(8):
                sums = tl.sum(kernel * s[:, None], 0)
                new = tl.where(used_b, mass_b / tl.where(used_b, sums, 1.0), 1.0)
                t = _relaxed(t, new, relaxation - 1.0)
                sums = tl.sum(kernel * t[None, :], 1)
                new = tl.where(used_a, mass_a / tl.where(used_a, sums, 1.0), 1.0)
                s = _relaxed(s, new, relaxation - 1.0)
            sums = tl.sum(kernel * t[None, :], 1)
            exact = tl.where(used_a, mass_a / tl.where(used_a, sums, 1.0), 1.0)
            found = t * tl.sum(kernel * exact[:, None], 0)
            before = error
            error = tl.sum(tl.where(used_b, tl.abs(found - mass_b), 0.0), 0)
            # Young's relation, as in the engine
            rate = tl.sqrt(tl.sqrt(tl.sqrt(tl.minimum(error / before, 1.0))))
            plain = (rate + relaxation - 1.0) * (rate + relaxation - 1.0)
            plain = plain / tl.maximum(rate * relaxation * relaxation, 1e-30)
            fitted = 2.0 / (1.0 + tl.sqrt(tl.maximum(1.0 - plain, 1e-6)))
            fitted = tl.where(rate <= relaxation - 1.0, 1.0 + 0.97 * (relaxation - 1.0), fitted)
            fitted = tl.where(error >= before, 1.0, fitted)
            relaxation = tl.where(before > 1.0e38, relaxation, fitted)
            spent += 8
            busy = tl.where((error > wanted) & (spent < 48), 1, 0)
        following = kernel * exact[:, None] * t[None, :]
        change = tl.sum(tl.sum(tl.abs(following - point), 1), 0)
        point = following
        g = tl.where(used_b, g + epsilon * tl.log(t), g)
        done += 1
        settled = arrived & (change <= tol)
        # NaN compares as false, and ends with the iterations
        going = tl.where(settled | (done >= most), 0, 1)
        relaxation = tl.where(arrived, 1.0 + 0.9 * (relaxation - 1.0), 1.0)
        epsilon = tl.maximum(0.6 * epsilon, last)
    tl.store(plan + number * n * m + place, point, mask=inside)
    tl.store(g_out + number * m + columns, g, mask=in_columns)
    tl.store(done_out + number, done)


def rough(
    problems: Packed,
    numbers: torch.Tensor,
    linear: torch.Tensor | None,
    target: torch.Tensor,
    first: torch.Tensor,
    noise: torch.Tensor,
) -> Warm:
    """Iterate some problems (k,), from a x b times ``noise`` (n, m).

    ``linear`` is (1 - alpha) M, and the epsilons are (k,), in its units.
    """
    (n, m), count = problems.shape, len(numbers)
    x, y = problems.x, problems.y
    made = Warm(
        torch.empty(count, n, m, dtype=torch.float32, device=problems.device),
        torch.empty(count, m, dtype=torch.float32, device=problems.device),
        torch.empty(count, dtype=torch.int64, device=problems.device),
    )
    blocks = triton.next_power_of_2(n), triton.next_power_of_2(m)
    warps = max(1, min(_MOST_WARPS, blocks[0] * blocks[1] // _ENTRIES_PER_WARP))
    launch(
        _rough_kernel, (count,),
        x.tables.float(), y.tables.float(), x.weights.float(), y.weights.float(),
        problems.i[numbers], problems.j[numbers], problems.alpha[numbers].float(),
        target.float(), first.float(),
        noise.float() if linear is None else linear.float().contiguous(), noise.float(),
        *made, n, m, _ROUGH_ITERATIONS, _ROUGH_TOLERANCE, _ROUGH_ERROR,
        LINEAR=linear is not None, BLOCK_N=blocks[0], BLOCK_M=blocks[1], num_warps=warps,
    )  # fmt: skip
    return made
