"""Check and time the Triton kernels, one variant a line: ``python -m benchmarks kernels [GROUP]``.

A variant's time is printed only if its error, against float64, passed; a variant that cannot run is
printed as FAILED and the rest go on. With $OUT set, JSON lines go to $OUT/kernels.jsonl. Without a
GPU the same script runs tiny sizes under Triton's interpreter, as a check of itself.
"""

# ruff: noqa: I001 - benchmarks.variants chooses Triton's interpreter, before Triton is imported
from __future__ import annotations

import argparse
import time
import traceback

import torch

from benchmarks.harness.variants import (
    DEVICE,
    EXACT,
    GPU,
    LINES,
    factored,
    half_step_floor,
    measure,
    some_rows,
    weights,
)
from benchmarks.sinkhorn.dense_kernels import dense, graphs, plans as dense_plans
from torchgw._sinkhorn.kernels import read_off as read_off_module
from torchgw._sinkhorn.problem import Cost
from torchgw._sinkhorn.eager import EagerBackend
from torchgw._plans.transport import TransportPlan
from torchgw._sinkhorn.problem import softmin
from torchgw._sinkhorn.kernels.operands import Blocks, KernelPlan, operands, padded, scale_of
from torchgw._sinkhorn.problem import LinearProblem
from torchgw._triton_sinkhorn import TritonBackend
from torchgw._sinkhorn.kernels.softmin import (
    Rule,
    KernelSide,
    half_step_,
    log_sum_exp,
    softmin_blocks,
)
from torchgw._typing import Marginals, Potentials

import triton


def exact_rows(
    cost: Cost, marginals: Marginals, g: torch.Tensor, epsilon: float, rows: torch.Tensor
) -> torch.Tensor:
    """Return the softmin of some rows in float64."""
    part = cost.rows(rows).to(torch.float64)
    return softmin(part, marginals.log_b.double(), g.double(), epsilon, axis=1)


def side(potential: torch.Tensor, weight: torch.Tensor) -> KernelSide:
    """Return a side at the start of a sweep, all scalings one."""
    start = padded(potential, -float("inf"))
    return KernelSide(start, weight, torch.zeros_like(weight), padded(weight, 0.0))


def streamed() -> None:
    """Time a half-step at 100,000 points."""
    n = 100_000 if GPU else 200
    backend = TritonBackend()
    for rank in (16, 64, 32, 128):
        cost, epsilon = factored(n, n, rank, torch.float32)
        marginals = weights(n, n, torch.float32)
        zero = torch.zeros(n, device=DEVICE)
        linear = LinearProblem(cost, marginals, epsilon)
        prepared = backend.prepare(linear)
        g = prepared.half_steps(zero).g
        f = prepared.softmin(g, axis=1)
        rows = some_rows(n)
        expected = exact_rows(cost, marginals, g, epsilon, rows)
        scale, floor = scale_of(epsilon), half_step_floor(n, n, rank)
        plain = Rule(torch.zeros_like(zero), zero.new_ones(2))
        bad = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        for precision, stable, blocks in half_step_variants(rank):
            parts = operands(cost, epsilon, precision)
            blocks = blocks or softmin_blocks(parts)
            own = side((f - parts.row) * scale, marginals.a)
            other = side((g - parts.column) * scale, marginals.b)
            bias = padded((g - parts.column) * scale + marginals.b.log2(), -float("inf"))
            bad.zero_()

            def run() -> torch.Tensor:
                if stable:  # noqa: B023
                    half_step_(parts, own, other, plain, bad, blocks=blocks)  # noqa: B023
                    return own.start[:n] + own.scaling  # noqa: B023
                return -log_sum_exp(parts, bias, blocks=blocks)  # noqa: B023

            def error() -> float:
                if bool(bad):  # noqa: B023
                    return float("nan")
                got = run().double()[rows] / scale + parts.row.double()[rows]  # noqa: B023
                return float((got - expected).abs().max() / epsilon)  # noqa: B023

            measure(
                f"half-step R{rank}",
                f"{precision} {'stable' if stable else 'online'} {tuple(blocks)}", run, error,
                limit=EXACT, floor=floor,
            )  # fmt: skip
        measure(
            f"half-step R{rank}",
            "softmin, preparation included",
            lambda: backend.prepare(linear).softmin(g, axis=1),  # noqa: B023
            lambda: 0.0,
            limit=0.0,
            floor=floor,
        )


def half_step_variants(rank: int) -> list[tuple]:
    """Return (precision, stable, blocks or None) to time at one rank."""
    variants = [
        (precision, stable, None) for precision in ("fp16x3", "float32") for stable in (True, False)
    ]
    if rank == 32:
        return variants
    shapes = [
        Blocks(64, 128, 4, 2), Blocks(128, 128, 4, 2), Blocks(128, 128, 8, 2), Blocks(64, 64, 4, 2),
    ]  # fmt: skip
    if rank == 128:
        shapes += [Blocks(128, 128, 8, 3), Blocks(128, 64, 4, 3), Blocks(128, 256, 8, 2)]
        return [("fp16x3", True, blocks) for blocks in shapes]
    return variants + [("fp16x3", True, blocks) for blocks in shapes]


def read_off() -> None:
    """Time what is read off a plan at 100,000 points."""
    n = 100_000 if GPU else 150
    cost, epsilon = factored(n, n, 16, torch.float32)
    marginals = weights(n, n, torch.float32)
    g = torch.zeros(n, device=DEVICE)
    f = TritonBackend().prepare(LinearProblem(cost, marginals, epsilon)).softmin(g, axis=1)
    potentials = Potentials(f, g)
    rows = some_rows(n)
    part = cost.rows(rows).to(torch.float64)
    block = part.exponent(f[rows].double(), g.double(), epsilon).exp_()
    block *= marginals.a[rows, None].double() * marginals.b.double()
    generator = torch.Generator(DEVICE).manual_seed(0)
    read = KernelPlan(operands(cost, epsilon), marginals, potentials, epsilon)
    for channels in (1, 16, 64, 256):
        # of one sign, so that a bias of the sums shows
        values = torch.rand(n, channels, generator=generator, device=DEVICE)
        expected = block @ values.double()
        size = block @ values.double().abs()
        shapes = [None]
        if GPU and channels > 1:
            shapes += [Blocks(64, 32, 4, 2), Blocks(128, 64, 4, 2)]
        for blocks in shapes:

            def run() -> torch.Tensor:
                return read_off_module.apply(read, values, blocks=blocks)  # noqa: B023

            def error() -> float:
                return float(((run()[rows].double() - expected).abs() / size).max())  # noqa: B023

            measure(
                "plan 100k R16", f"apply c={channels} {blocks and tuple(blocks)}", run, error,
                limit=EXACT, floor=half_step_floor(n, n, 16 + channels),
            )  # fmt: skip
    best = block.argmax(1)

    def argmax_error() -> float:
        _, columns = read_off_module.topk(read, 1)
        return float((1 - block.gather(1, columns[rows]) / block.gather(1, best[:, None])).max())

    measure("plan 100k R16", "topk 1",
            lambda: read_off_module.topk(read, 1),
            argmax_error, limit=EXACT)  # fmt: skip
    for k in (5, 10):
        measure("plan 100k R16", f"topk {k}",
                lambda k=k: read_off_module.topk(read, k),
                lambda: 0.0, limit=0.0)  # fmt: skip
    if GPU:
        plan = TransportPlan(cost, potentials, marginals, epsilon)
        for k in (1, 10):
            measure("plan 100k R16", f"topk {k}, eager", lambda k=k: plan.topk(k),
                    lambda: 0.0, limit=0.0)  # fmt: skip
        measure("plan 100k R16", "sample 1000, eager", lambda: plan.sample(1000, generator),
                lambda: 0.0, limit=0.0)  # fmt: skip
    chosen = torch.randint(0, n, (1000,), generator=generator, device=DEVICE)
    measure("plan 100k R16", "sample 1000 rows",
            lambda: read_off_module.sample(read, chosen, torch.tensor(3, device=DEVICE)),
            lambda: 0.0, limit=0.0)  # fmt: skip


def bandwidth() -> None:
    """Time a copy of 4 GiB: 8.6 GB read and written."""
    source = torch.randn(2**30 if GPU else 2**10, device=DEVICE)
    target = torch.empty_like(source)
    measure("copy", "8.6 GB moved", lambda: target.copy_(source),
            lambda: float((target != source).sum()), limit=0.0, floor=2.0)  # fmt: skip


def float64() -> None:
    """Time a streamed half-step in float64."""
    n = 20_000 if GPU else 100
    cost, epsilon = factored(n, n, 16, torch.float64)
    marginals = weights(n, n, torch.float64)
    g = torch.zeros(n, device=DEVICE, dtype=torch.float64)
    rows = some_rows(n)
    expected = exact_rows(cost, marginals, g, epsilon, rows)
    linear = LinearProblem(cost, marginals, epsilon)
    for backend in (TritonBackend(), EagerBackend()):

        def run(backend: object = backend) -> torch.Tensor:
            return backend.prepare(linear).softmin(g, axis=1)

        measure("float64 20k R16", backend.name, run,
                lambda run=run: float((run()[rows] - expected).abs().max() / epsilon),
                limit=1e-10)  # fmt: skip


GROUPS = {
    "copy": bandwidth, "half": streamed, "dense": dense, "graphs": graphs, "shapes": dense_plans,
    "plan": read_off, "float64": float64,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks kernels", description=__doc__)
    parser.add_argument("groups", nargs="*", default=[], choices=[*GROUPS, []])
    groups = parser.parse_args(arguments).groups or list(GROUPS)
    name = torch.cuda.get_device_name() if GPU else "CPU, interpreted"
    head = f"{name}, torch {torch.__version__}, triton {triton.__version__}"
    print(head, flush=True)
    for group in groups:
        begin = time.perf_counter()
        try:
            GROUPS[group]()
        except Exception:  # noqa: BLE001 - what one group needs must not take the others down
            LINES.append(traceback.format_exc())
        LINES.append(f"-- {group}: {time.perf_counter() - begin:.0f} s")
    print("\n".join(["", head, *LINES]))
