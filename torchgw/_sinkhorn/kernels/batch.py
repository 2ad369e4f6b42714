"""Sinkhorn on many small problems in Triton: one program each, which reads its kernel from cache.

Larger ones are left to PyTorch operations, recorded as CUDA graphs.

A warp holds some rows of a block of the kernel, each lane every 32nd column: sums of rows stay in
the warp, and those of columns, over all its rows, are put together once an iteration. So an
iteration reads the kernel once. Rows are numbered by (block, inner, warp) and columns by (inner,
lane), and a block is a tensor [RI, CI, RT, CT]; it is read as [RI * CI, RT * CT], of which
compilers give each thread a column, where ``shift``, which is zero, keeps it from them that
addresses are aligned, as L532 of the log says.
"""

from collections.abc import Hashable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchgw._sinkhorn.eager import (
    LARGEST,
    LEAST_EXPONENT,
    RELAXED_FACTOR,
    SMALLEST,
    BatchPlans,
    solve_batch,
)
from torchgw._sinkhorn.kernels.operands import Blocks, launch_options
from torchgw._tensors.ahead import launch
from torchgw._tensors.cuda_graphs import Captured, GraphMemory, borrow_memory
from torchgw._tensors.operations import clone
from torchgw._typing import Marginals

# Points per side up to which a problem is solved by one program. [L613]
_MOST_POINTS = 256
# Entries of all plans up to which operations are recorded: beyond, they take longer than their
# launches. [L1285]
_RECORDED_ENTRIES = 2**24
# Entries of a block for each thread, warps, and threads that share a row. [L613, L1884]
_ENTRIES, _WARPS, _LANES = 64, 16, 32
# The same where all entries stay in the registers of the fewest warps: each warp computes the
# scalings of all columns, and each thread of a row that of the row. [L1884]
_HELD, _FEWEST, _SHARING, _MOST_HELD = 128, 2, 16, 2**14


@triton.jit
def _relaxed(old, new, excess, BOUND: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr):
    """Multiply by (new / old)^(1 + excess), the excess factor bounded."""
    bounded = tl.minimum(tl.maximum(new / old, 1.0 / BOUND), BOUND)
    moved = new * tl.exp2(excess * tl.log2(bounded))
    return tl.minimum(tl.maximum(moved, LEAST), MOST)


@triton.jit
def _line(INNER: tl.constexpr, THREADS: tl.constexpr):
    """List the numbers of the rows of a block, [RI, RT], or of its columns, [CI, CT]."""
    return tl.arange(0, INNER)[:, None] * THREADS + tl.arange(0, THREADS)[None, :]


@triton.jit
def _rows(RI: tl.constexpr, CI: tl.constexpr, RT: tl.constexpr, CT: tl.constexpr):
    """Find the rows of the entries of a block as they are read."""
    return tl.arange(0, RI * CI)[:, None] // CI * RT + tl.arange(0, RT * CT)[None, :] // CT


@triton.jit
def _columns(RI: tl.constexpr, CI: tl.constexpr, RT: tl.constexpr, CT: tl.constexpr):
    """Find the columns of the entries of a block as they are read."""
    return tl.arange(0, RI * CI)[:, None] % CI * CT + tl.arange(0, RT * CT)[None, :] % CT


@triton.jit
def _sums_of_rows(block, v):
    """Sum each row of a block times a scaling of the columns [CI, CT], [RI, RT]."""
    return tl.sum(tl.sum(block * v[None, :, None, :], 1), 2)


@triton.jit(do_not_specialize=["s", "t", "iterations", "shift"])
def _batch_kernel(
    costs,  # [B, s, t] float32, contiguous
    a,  # [s] weights
    b,  # [t]
    g,  # [B, t] potentials to start from, cost units
    epsilon,  # [B]
    plans,  # [B, s, t] written
    g_out,  # [B, t] written
    kernels,  # [B, N, M] float32, scratch
    scalings,  # [B, 2, N] float32, scratch: of rows, by turns
    s,
    t,
    iterations,
    excess,  # float, how much farther than a plain step a relaxed one goes
    shift,
    BOUND: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    LEAST_EXPONENT: tl.constexpr,
    BLOCKS: tl.constexpr,
    RI: tl.constexpr,
    CI: tl.constexpr,
    RT: tl.constexpr,
    CT: tl.constexpr,
):
    """Solve one problem; what lies beyond its shape has weight one and a kernel of zero."""
    ROWS: tl.constexpr = RI * RT
    M: tl.constexpr = CI * CT
    number = tl.program_id(0).to(tl.int64)
    costs += number * s * t
    plans += number * s * t
    kernels += number * BLOCKS * ROWS * M + shift
    scalings += 2 * number * BLOCKS * ROWS
    columns = _line(CI, CT)
    mass_b = tl.load(b + columns, mask=columns < t, other=1.0).to(tl.float32)
    start = tl.load(g + number * t + columns, mask=columns < t, other=0.0).to(tl.float32)
    unit = tl.load(epsilon + number).to(tl.float32)
    inner, column = _line(RI, RT), _columns(RI, CI, RT, CT)
    place = _rows(RI, CI, RT, CT) * M + column

    # make the kernel, and scale rows to their mass
    v = mass_b
    sums = tl.zeros([CI, RT, CT], tl.float32)
    held, u = tl.zeros([RI, CI, RT, CT], tl.float32), tl.zeros([RI, RT], tl.float32)
    for block in range(BLOCKS):
        row = block * ROWS + _rows(RI, CI, RT, CT)
        inside = (row < s) & (column < t)
        cost = tl.load(costs + row * t + column, mask=inside, other=float("inf"))
        x = (start[None, :, None, :] - tl.reshape(cost, [RI, CI, RT, CT])) / unit
        used = block * ROWS + inner < s
        largest = tl.where(used, tl.max(tl.max(x, 1), 2), 0.0)
        held = tl.exp(tl.maximum(x - largest[:, None, :, None], LEAST_EXPONENT))
        held = tl.where(x > -float("inf"), held, 0.0)
        tl.store(kernels + block * ROWS * M + place, tl.reshape(held, [RI * CI, RT * CT]))
        mass_a = tl.load(a + block * ROWS + inner, mask=used, other=1.0).to(tl.float32)
        u = mass_a / tl.where(used, _sums_of_rows(held, v), 1.0)
        tl.store(scalings + block * ROWS + inner, u)
        sums += tl.sum(held * u[:, None, :, None], 0)
    if BLOCKS == 1:
        # the only block stays in registers [L1241]
        mass_a = tl.load(a + inner, mask=inner < s, other=1.0).to(tl.float32)
        for _ in range(iterations):
            new = mass_b / tl.where(columns < t, tl.sum(sums, 1), 1.0)
            v = _relaxed(v, new, excess, BOUND, LEAST, MOST)
            exact = mass_a / tl.where(inner < s, _sums_of_rows(held, v), 1.0)
            u = _relaxed(u, exact, excess, BOUND, LEAST, MOST)
            sums = tl.sum(held * u[:, None, :, None], 0)
    else:
        tl.debug_barrier()
        for k in range(iterations):
            before, after = (k % 2) * BLOCKS * ROWS, (k + 1) % 2 * BLOCKS * ROWS
            new = mass_b / tl.where(columns < t, tl.sum(sums, 1), 1.0)
            v = _relaxed(v, new, excess, BOUND, LEAST, MOST)
            sums = tl.zeros([CI, RT, CT], tl.float32)
            for block in range(BLOCKS):
                held = tl.reshape(tl.load(kernels + block * ROWS * M + place), [RI, CI, RT, CT])
                used = block * ROWS + inner < s
                mass_a = tl.load(a + block * ROWS + inner, mask=used, other=1.0).to(tl.float32)
                old = tl.load(scalings + before + block * ROWS + inner)
                exact = mass_a / tl.where(used, _sums_of_rows(held, v), 1.0)
                u = _relaxed(old, exact, excess, BOUND, LEAST, MOST)
                tl.store(scalings + after + block * ROWS + inner, u)
                sums += tl.sum(held * u[:, None, :, None], 0)
            tl.debug_barrier()

    v = mass_b / tl.where(columns < t, tl.sum(sums, 1), 1.0)
    v = tl.minimum(tl.maximum(v, LEAST), MOST)
    for block in range(BLOCKS):
        held = tl.reshape(tl.load(kernels + block * ROWS * M + place), [RI, CI, RT, CT])
        used = block * ROWS + inner < s
        mass_a = tl.load(a + block * ROWS + inner, mask=used, other=1.0).to(tl.float32)
        u = mass_a / tl.where(used, _sums_of_rows(held, v), 1.0)
        plan = tl.reshape(held * u[:, None, :, None] * v[None, :, None, :], [RI * CI, RT * CT])
        row = block * ROWS + _rows(RI, CI, RT, CT)
        tl.store(plans + row * t + column, plan, mask=(row < s) & (column < t))
    tl.store(g_out + number * t + columns, start + unit * tl.log(v / mass_b), mask=columns < t)


class RecordingSolver:
    """Solves batches by programs where problems fit, others by graphs of PyTorch's operations."""

    # An operation takes longer to launch than to run. Graphs are recorded in the second call of a
    # kind, and live as long as this.

    def __init__(self) -> None:
        self._memory: GraphMemory | None = None
        self._graphs: dict[Hashable, Captured] = {}

    def __call__(
        self,
        costs: Tensor,
        marginals: Marginals,
        g: Tensor,
        epsilon: Tensor,
        iterations: int,
        relaxation: float,
    ) -> BatchPlans:
        """Compute :func:`torchgw._sinkhorn.eager.solve_batch`."""
        if max(costs.shape[1:]) <= _MOST_POINTS:
            return solve_by_programs(costs, marginals, g, epsilon, iterations, relaxation)
        device = costs.device
        recording = device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
        if not recording or costs.numel() > _RECORDED_ENTRIES:
            return solve_batch(costs, marginals, g, epsilon, iterations, relaxation)
        kind = costs.shape, costs.dtype, iterations, relaxation
        if kind not in self._graphs:
            if self._memory is None:
                self._memory = borrow_memory(self, device)
            solve = partial(solve_batch, iterations=iterations, relaxation=relaxation)
            self._graphs[kind] = Captured(solve, self._memory)
        done: BatchPlans = clone(self._graphs[kind](costs, marginals, g, epsilon))
        return done


def solve_by_programs(
    costs: Tensor,
    marginals: Marginals,
    g: Tensor,
    epsilon: Tensor,
    iterations: int,
    relaxation: float,
) -> BatchPlans:
    """Compute :func:`torchgw._sinkhorn.eager.solve_batch`, each problem by one program."""
    count, s, t = costs.shape
    costs, g, epsilon = costs.contiguous(), g.contiguous(), epsilon.contiguous()
    done = BatchPlans(costs.new_empty(costs.shape), g.new_empty(g.shape))
    n, m = (max(16, triton.next_power_of_2(size)) for size in (s, t))
    entries, warps, lanes = _ENTRIES, _WARPS, min(m, _LANES)
    if n * m <= _MOST_HELD:
        entries, warps, lanes = _HELD, max(_FEWEST, n * m // (32 * _HELD)), min(m, _SHARING)
    down = min(n, warps * 32 // lanes)
    inner = min(n // down, max(1, entries * lanes // m))
    launch(
        _batch_kernel, (count,),
        costs, *marginals, g, epsilon, *done, costs.new_empty(count, n, m),
        costs.new_empty(count, 2, n), s, t, iterations, relaxation - 1.0, 0,
        BOUND=RELAXED_FACTOR, LEAST=SMALLEST, MOST=LARGEST, LEAST_EXPONENT=LEAST_EXPONENT,
        BLOCKS=n // (down * inner), RI=inner, CI=m // lanes, RT=down, CT=lanes,
        **launch_options(Blocks(n, m, down * lanes // 32, 1)),
    )  # fmt: skip
    return done
