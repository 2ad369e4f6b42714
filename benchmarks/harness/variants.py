"""What the kernels' benchmark needs: one gated, timed line per variant, and its problems.

To be imported before Triton: without a GPU it chooses Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from torchgw._sinkhorn.problem import FactoredCost
from torchgw._typing import Marginals

__all__ = [
    "DEVICE", "EXACT", "GPU", "LINES", "factored", "half_step_floor", "measure", "some_rows",
    "weights",
]  # fmt: skip

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
DEVICE = torch.device("cuda" if GPU else "cpu")
REPEATS = 10 if GPU else 1
LINES: list[str] = []
OUT = os.environ.get("OUT")

# Exponent errors (natural units) up to which a variant counts: the issue asks for 1e-4 from what is
# meant to be exact.
EXACT = 1e-4


def measure(
    group: str,
    name: str,
    run: Callable[[], object],
    error: Callable[[], float],
    *,
    limit: float,
    floor: float = 0.0,
) -> None:
    """Gate, time and report one variant; ``floor`` in ms."""
    row: dict[str, object] = {"group": group, "name": name, "limit": limit, "floor_ms": floor}
    begin = time.perf_counter()
    try:
        run()
        synchronize()
        row["first_call_s"] = round(time.perf_counter() - begin, 2)
        row["error"] = error()
        if not row["error"] <= limit:
            line = f"WRONG   error {row['error']:.2e} > {limit:.0e}"
        else:
            if GPU:
                torch.cuda.reset_peak_memory_stats()
                base = torch.cuda.memory_allocated()
            times = timings(run)
            if GPU:
                row["peak_mib"] = (torch.cuda.max_memory_allocated() - base) // 2**20
            row["p20"], row["p50"], row["p80"] = times
            line = f"{times[1]:9.3f} ms [{times[0]:.3f} {times[2]:.3f}]  error {row['error']:.1e}"
            if floor and GPU:
                line += f"  {times[1] / floor:.2f} x floor {floor:.2f}"
    except Exception as problem:  # noqa: BLE001 - one variant must not take the others down
        text = str(problem).strip().splitlines() or [""]
        row["failed"] = f"{type(problem).__name__}: {text[-1][:150]}"
        line = f"FAILED  {row['failed']}"
    LINES.append(f"{group:14s} {name:60s} {line}")
    print(LINES[-1], f"({time.perf_counter() - begin:.1f} s)", flush=True)
    if OUT:
        with Path(OUT, "kernels.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


def timings(run: Callable[[], object]) -> tuple[float, float, float]:
    """Return p20, p50, p80 in milliseconds."""
    run()
    samples = []
    for _ in range(REPEATS):
        if GPU:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            samples.append(start.elapsed_time(end))
        else:
            begin = time.perf_counter()
            run()
            samples.append(1e3 * (time.perf_counter() - begin))
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    cuts = statistics.quantiles(samples, n=10)
    return cuts[1], statistics.median(samples), cuts[7]


def factored(n: int, m: int, rank: int, dtype: torch.dtype) -> tuple[FactoredCost, float]:
    """Return squared distances of two clouds as factors, and an epsilon.

    The exponent S / epsilon has a standard deviation of 10, and spans about 100.
    """
    generator = torch.Generator(DEVICE).manual_seed(rank)
    left, right = (
        torch.randn(size, rank, generator=generator, device=DEVICE, dtype=torch.float64) + 0.5
        for size in (n, m)
    )
    parts = (2.0 * left, right, left.square().sum(1), right.square().sum(1))
    return FactoredCost(*parts).to(dtype), 0.2 * rank**0.5


def weights(n: int, m: int, dtype: torch.dtype) -> Marginals:
    generator = torch.Generator(DEVICE).manual_seed(n)
    a, b = (torch.rand(s, generator=generator, device=DEVICE) + 0.5 for s in (n, m))
    return Marginals((a / a.sum()).to(dtype), (b / b.sum()).to(dtype))


def some_rows(n: int) -> torch.Tensor:
    """Return 256 rows spread over all blocks, the last row among them."""
    return torch.linspace(0, n - 1, min(n, 256), device=DEVICE).long()


# One exponential each, at 16 a clock on 132 multiprocessors of 1.83 GHz; matrix products at 790e12.
def half_step_floor(n: int, m: int, rank: int) -> float:
    return 1e3 * max(n * m / (16 * 132 * 1.83e9), 6 * n * m * rank / 790e12)
