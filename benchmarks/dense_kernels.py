"""The dense part of :mod:`benchmarks.kernels`: iterations and half-steps over a stored matrix."""

# ruff: noqa: I001 - benchmarks.variants chooses Triton's interpreter, before Triton is imported
from __future__ import annotations

from functools import cache

import torch

from benchmarks.variants import DEVICE, EXACT, GPU, factored, measure, weights
from torchgw import _triton_dense
from torchgw._compiled_sinkhorn import CompiledBackend
from torchgw._cost import DenseCost
from torchgw._sinkhorn import EagerBackend, Sweep, softmin
from torchgw._triton_operands import operands
from torchgw._triton_sinkhorn import TritonBackend
from torchgw._typing import Marginals, Potentials

__all__ = ["dense"]


def dense() -> None:
    """Time 100 iterations over a stored matrix."""
    sizes = [(5001, 6001), (10001, 12001)] if GPU else [(37, 130)]
    for n, m in sizes:
        for dtype in (torch.float32, torch.float64):
            dense_sweeps(n, m, dtype)
    if GPU:
        dense_sweeps(20001, 25001, torch.float32)


def dense_sweeps(n: int, m: int, dtype: torch.dtype) -> None:
    count = 100 if GPU else 3
    factors, epsilon = factored(n, m, 8, torch.float64)
    cost = factors.dense().to(dtype)
    marginals = weights(n, m, dtype)
    zero = torch.zeros(m, device=DEVICE, dtype=torch.float64)
    exact = EagerBackend()
    wide = Marginals(*(part.double() for part in marginals))
    f = exact.softmin(factors, wide.log_b, zero, epsilon, axis=1)
    start = Potentials(f, exact.softmin(factors, wide.log_a, f, epsilon, axis=0))
    # float32 entries differ from the float64 ones by rounding, which epsilon amplifies
    reference = exact.sweep(cost.to(torch.float64), wide, start, epsilon, 3)
    start = Potentials(*(part.to(dtype) for part in start))
    size = n * m * dtype.itemsize
    floor = 1e3 * count * size / 4.3e12
    group = f"dense {n}x{m} f{dtype.itemsize * 8}"
    base = _triton_dense.sweep_plan(operands(cost, epsilon))
    plans = {"default": base} | (plan_variants(base, m, dtype) if GPU else {})

    def close(sweep: object) -> float:
        if not bool(sweep.ok):
            return float("nan")
        pairs = zip(sweep[:3], reference[:3], strict=True)
        return max(float((x.double() - y).abs().max()) for x, y in pairs) / epsilon

    for name, plan in plans.items():
        backend = TritonBackend(plan=None if name == "default" else plan)
        measure(
            group,
            f"{count} sweeps {name} {plan_text(plan)}",
            lambda backend=backend: backend.sweep(cost, marginals, start, epsilon, count),
            lambda backend=backend: close(backend.sweep(cost, marginals, start, epsilon, 3)),
            limit=EXACT,
            floor=floor,
        )
    if GPU:
        captured = cache(lambda: capture(cost, marginals, start, epsilon, count))
        measure(group, "default as a CUDA graph", lambda: captured()[0].replay(),
                lambda: 0.0 if bool(captured()[1].ok) else float("nan"),
                limit=0.0, floor=floor)  # fmt: skip
    measure(
        group,
        "eager sweep",
        lambda: exact.sweep(cost, marginals, start, epsilon, count),
        lambda: close(exact.sweep(cost, marginals, start, epsilon, 3)),
        limit=EXACT,
        floor=floor,
    )
    softmins(group, cost, marginals, start, epsilon)


def capture(
    cost: DenseCost, marginals: Marginals, start: Potentials, epsilon: float, count: int
) -> tuple[torch.cuda.CUDAGraph, Sweep]:
    """Return a sweep as a CUDA graph, and the tensors that it writes."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = TritonBackend().sweep(cost, marginals, start, epsilon, count)
    return graph, result


def plan_variants(
    base: _triton_dense.SweepPlan, m: int, dtype: torch.dtype
) -> dict[str, _triton_dense.SweepPlan]:
    """Return what to try beside the default: fewer at the smaller size, which only fills gaps."""
    held = base._replace(reread=False, stored=False)
    again = base._replace(reread=True, stored=False, stages=1)
    stored = held._replace(stored=True, keep=0, stages=1)
    if m > 16384:
        again = again._replace(keep=1)
        return {"reread": again, "stored, reread": again._replace(stored=True)}
    variants = {f"stages {s} keep {k}": held._replace(stages=s, keep=k) for s, k in HELD[dtype]}
    variants |= {"stored": stored, "stored, 2 stages": stored._replace(stages=2)}
    if dtype == torch.float32:
        twice = held._replace(programs=2 * base.programs)
        variants |= {"unaligned": held._replace(aligned=False), "2 a processor": twice}
        variants |= {"8 warps, 2 a processor": halved(twice)}
    if m > 8192:
        variants |= {
            "reread": again._replace(keep=0),
            "reread, weights kept": again._replace(keep=1),
            "stored, reread": stored._replace(reread=True),
            "stored, reread, kept": stored._replace(reread=True, keep=1),
        }
    elif dtype == torch.float32:
        variants |= {"8 warps, 3 a processor": halved(held._replace(programs=396, stages=1))}
    return variants


# (stages, column vectors kept) to try where rows are held in registers.
HELD = {
    torch.float32: ((1, 2), (1, 0), (2, 2), (2, 0), (3, 1)),
    torch.float64: ((1, 1), (1, 0), (2, 0)),
}


def halved(plan: _triton_dense.SweepPlan) -> _triton_dense.SweepPlan:
    """Return the plan with half the warps and tiles of half the width."""
    return plan._replace(warps=plan.warps // 2, width=plan.width // 2, tiles=plan.tiles * 2)


def plan_text(plan: _triton_dense.SweepPlan) -> str:
    return f"{plan.tiles}x{plan.width} w{plan.warps} p{plan.programs} s{plan.stages} k{plan.keep}"


def softmins(
    group: str, cost: DenseCost, marginals: Marginals, start: Potentials, epsilon: float
) -> None:
    """Time one dense half-step on each axis, and beside it eager and compiled PyTorch."""
    # torch.compile takes its time for every dtype and layout: once is enough
    compiled = [CompiledBackend()] if group == "dense 10001x12001 f32" else []
    backends = [TritonBackend(), *compiled, EagerBackend()]
    for axis, name in ((1, "rows"), (0, "columns")):
        weight, potential = (marginals.log_b, start.g) if axis == 1 else (marginals.log_a, start.f)
        expected = softmin(
            cost.to(torch.float64), weight.double(), potential.double(), epsilon, axis
        )
        for backend in backends if GPU else backends[:1]:

            def run(backend: object = backend) -> torch.Tensor:
                return backend.softmin(cost, weight, potential, epsilon, axis)  # noqa: B023

            measure(
                group,
                f"softmin of {name}, {backend.name}",
                run,
                lambda run=run: float((run().double() - expected).abs().max() / epsilon),  # noqa: B023
                limit=EXACT,
                floor=1e3 * cost.matrix.nbytes / 4.3e12,
            )
