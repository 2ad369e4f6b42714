"""Where the time of a solve goes, and whether the device or the interpreter is the limit."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from benchmarks.harness.ceilings import Ceilings, compare_widths, measure_ceilings
from benchmarks.harness.measure import synchronize
from benchmarks.harness.phases import PHASES, Clock, Work, labelled
from benchmarks.harness.registry import GWProblem, Problem
from benchmarks.harness.report import seconds
from benchmarks.harness.runners import RUNNERS

__all__ = ["profile"]

# Share of a floor in the time from which on it is what bounds the time.
_BOUND = 0.3


def profile(problem: Problem, device_name: str, trace: Path, widths: bool = True) -> str:
    """Return a report of our runner on a problem; write a Chrome trace.

    Three solves after a warm-up: as they are, for the wall time; labelled and synchronised, for the
    table of phases; labelled under torch.profiler, for the trace and the busy time of the device.
    """
    device = torch.device(device_name)
    prepare = RUNNERS["ours"].prepare
    assert prepare is not None
    call = prepare(problem, device).call
    first = call(0)
    precision = getattr(first, "precision", getattr(problem, "dtype", "float32"))
    dtype = torch.float64 if precision == "float64" else torch.float32
    wall = statistics.median(_seconds(call, device) for _ in range(3))
    clock = Clock(device, synchronised=True)
    with labelled(clock):
        call(0)
    busy, launches = _trace(call, device, trace)
    ceilings = measure_ceilings(device, dtype)
    parts = [
        f"{problem.name} on {device}: {seconds(wall)} a call, median of 3",
        _phase_table(clock),
        f"{device.type} busy with operators and kernels {seconds(busy)} "
        f"({busy / wall:.0%} of the wall time), {launches} of them",
        f"ceilings: {ceilings.note}",
        *_verdicts(clock, ceilings, isinstance(problem, GWProblem), wall),
        f"trace written to {trace} (chrome://tracing or ui.perfetto.dev)",
    ]
    if widths:
        parts += ["", compare_widths(device)]
    return "\n".join(parts)


def _seconds(call: Any, device: torch.device) -> float:
    synchronize(device)
    begin = time.perf_counter()
    call(0)
    synchronize(device)
    return time.perf_counter() - begin


def _trace(call: Any, device: torch.device, path: Path) -> tuple[float, int]:
    """Write a Chrome trace; return the busy seconds and the number of kernels (or operators).

    On CUDA these are the device's kernels and copies; on a CPU PyTorch's own operators, so that
    SciPy's shortest paths are not among them.
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with torch_profile(activities=activities) as recorded, labelled(Clock(device, False)):
        call(0)
        synchronize(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    recorded.export_chrome_trace(str(path))
    busy = launches = 0
    for event in recorded.key_averages():
        if device.type == "cuda":
            if event.device_type == torch.autograd.DeviceType.CUDA and not _is_label(event.key):
                busy, launches = busy + event.self_device_time_total, launches + event.count
        elif event.key.startswith("aten::"):
            busy, launches = busy + event.self_cpu_time_total, launches + event.count
    return busy / 1e6, launches


def _is_label(name: str) -> bool:
    return name.startswith("torchgw: ")


def _phase_table(clock: Clock) -> str:
    total = sum(clock.seconds.values())
    lines = [f"{'phase':12s} {'time':>10s} {'share':>6s} {'calls':>6s} {'GB':>9s} {'GFLOP':>9s} "
             f"{'G exp':>9s}"]  # fmt: skip
    for name in PHASES:
        spent, work = clock.seconds.get(name, 0.0), clock.work.get(name, Work())
        counts = "".join(f" {amount / 1e9:9.3g}" if amount else " " * 10 for amount in work)
        lines.append(
            f"{name:12s} {seconds(spent):>10s} {spent / total:6.1%} {clock.calls.get(name, 0):6d}"
            f"{counts}"
        )
    lines.append(f"{'sum':12s} {seconds(total):>10s}   (labelled and synchronised)")
    return "\n".join(lines)


def _verdicts(clock: Clock, ceilings: Ceilings, whole: bool, wall: float) -> list[str]:
    """Say for each phase with counted work, and for the whole, what bounds it."""
    lines = []
    for name, work in clock.work.items():
        lines.append(f"{name}: {_verdict(ceilings.floors(work), clock.seconds[name])}")
    if whole:
        total = Work()
        for work in clock.work.values():
            total = total.plus(work)
        host = clock.seconds.get("graph", 0.0) + clock.seconds.get("distances", 0.0)
        lines.append(f"whole call: {_verdict(ceilings.floors(total), wall)}")
        if host > 0.5 * wall:
            lines.append(
                f"whole call: graph and distances, made on the host, take {seconds(host)}: they "
                "are the limit, not the solver"
            )
    return lines


def _verdict(floors: dict[str, float], spent: float) -> str:
    name, floor = max(floors.items(), key=lambda item: item[1])
    share = floor / spent
    kind = f"{name}-bound" if share >= _BOUND else "overhead-bound"
    listed = ", ".join(f"{key} {seconds(value)}" for key, value in floors.items())
    return f"{kind}: floors {listed}; {seconds(spent)} taken, {share:.0%} of it the highest floor"
