"""What a device can do at most, and the three softmins side by side at several widths."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks.harness.measure import synchronize
from benchmarks.harness.phases import Work
from benchmarks.harness.report import seconds
from torchgw import BackendUnavailableError
from torchgw._sinkhorn.choose import choose_backend
from torchgw._sinkhorn.contract import Backend
from torchgw._sinkhorn.problem import FactoredCost, LinearProblem
from torchgw._typing import Marginals, Potentials

__all__ = ["Ceilings", "compare_widths", "measure_ceilings"]

# Exponentials per second of an H200: 16 a clock on 132 multiprocessors of 1.83 GHz.
_H200_EXPONENTIALS = 16 * 132 * 1.83e9
_WIDTHS = {"cpu": (256, 1024, 4096), "cuda": (256, 1024, 4096, 16_384, 32_768)}
_RANKS = (16, 64)
# Full iterations of one sweep: the solver checks that often.
_SWEEP = 10


class Ceilings(NamedTuple):
    """Rates per second."""

    bytes: float
    operations: float
    exponentials: float
    note: str

    def floors(self, work: Work) -> dict[str, float]:
        """Return the least seconds for each kind of work."""
        return {
            "memory": work.bytes / self.bytes,
            "compute": max(
                work.operations / self.operations, work.exponentials / self.exponentials
            ),
        }


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure a copy, a matrix product, and (on a CPU) exponentials.

    On CUDA exponentials cannot be measured by PyTorch, whose ``exp`` is bound by memory: the H200's
    rate is stated. Float32 products count as three in half precision, which is how the kernels do
    them.
    """
    on_gpu = device.type == "cuda"
    copy = _copy_rate(device)
    size = 8192 if on_gpu else 1024
    half = on_gpu and dtype == torch.float32
    matrix = torch.randn(size, size, device=device).to(torch.float16 if half else dtype)
    products = 2 * size**3 / median_seconds(lambda: matrix @ matrix, device)
    if half:
        products /= 3
    if on_gpu:
        exponentials = _H200_EXPONENTIALS / (1 if dtype == torch.float32 else 16)
        how = "exponentials stated for an H200"
    else:
        block = torch.randn(2**17, dtype=dtype)
        exponentials = block.numel() / median_seconds(block.exp, device)
        how = "all measured"
    note = (
        f"copy {copy / 1e9:.4g} GB/s, products {products / 1e12:.3g} TFLOP/s ({dtype}), "
        f"exponentials {exponentials / 1e9:.4g} G/s; {how}"
    )
    return Ceilings(copy, products, exponentials, note)


def _copy_rate(device: torch.device) -> float:
    """Return the bytes read and written per second by a copy of more than any cache holds."""
    entries = 2**30 if device.type == "cuda" else 2**25
    source = torch.ones(entries, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source), device)


def median_seconds(call: Callable[[], object], device: torch.device, count: int = 7) -> float:
    """Return the median time of a call after two for warming up."""
    for _ in range(2):
        call()
    samples = []
    for _ in range(count):
        synchronize(device)
        begin = time.perf_counter()
        call()
        synchronize(device)
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples)


def compare_widths(device: torch.device, widths: tuple[int, ...] | None = None) -> str:
    """Return a table: a half-step and an iteration of each backend, dense and factored."""
    names = ("triton", "compile", "eager")
    backends: dict[str, Backend] = {}
    lines = []
    for name in names:
        try:
            backends[name] = choose_backend(name, device, torch.float32)
        except BackendUnavailableError as reason:
            lines.append(f"{name}: {reason}")
    chosen = choose_backend("auto", device, torch.float32).name
    lines.append(f"dispatched: {chosen}; * marks the fastest")
    lines.append(
        f"{'width':>6s} {'cost':10s} {'step':10s}" + "".join(f"{n:>13s}" for n in backends)
    )
    for width in widths or _WIDTHS[device.type]:
        factors = [(f"rank {rank}", _problem(width, rank, device)) for rank in _RANKS]
        first, origin = factors[0][1]
        dense = first._replace(cost=first.cost.dense()), origin
        for label, (problem, start) in [("dense", dense), *factors]:
            for step in ("rows", "columns", "iteration"):
                times = {
                    name: median_seconds(_step(backend, step, problem, start), device)
                    for name, backend in backends.items()
                }
                best = min(times.values())
                cells = (
                    f"{('*' if t == best else ' ') + _per_step(t, step):>13s}"
                    for t in times.values()
                )
                lines.append(f"{width:6d} {label:10s} {step:10s}" + "".join(cells))
    return "\n".join(lines)


def _per_step(time_s: float, step: str) -> str:
    return seconds(time_s / (_SWEEP if step == "iteration" else 1))


def _problem(width: int, rank: int, device: torch.device) -> tuple[LinearProblem, Potentials]:
    generator = torch.Generator().manual_seed(rank)
    x, y = (torch.randn(width, rank, generator=generator).to(device) for _ in range(2))
    cost = FactoredCost(2.0 * x, y, x.square().sum(1), y.square().sum(1))
    uniform = torch.full((width,), 1 / width, device=device)
    marginals, epsilon = Marginals(uniform, uniform), 0.2 * rank**0.5
    exact = choose_backend("eager", device, torch.float32)
    problem = LinearProblem(cost, marginals, epsilon)
    return problem, exact.prepare(problem).half_steps(torch.zeros_like(uniform))


def _step(
    backend: Backend, step: str, problem: LinearProblem, start: Potentials
) -> Callable[[], object]:
    if step == "rows":
        return lambda: backend.prepare(problem).softmin(start.g, axis=1)
    if step == "columns":
        return lambda: backend.prepare(problem).softmin(start.f, axis=0)
    return lambda: backend.prepare(problem).sweep(start, _SWEEP)
