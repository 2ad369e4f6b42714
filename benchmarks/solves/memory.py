"""Peak memory of one large factored solve on the CPU: ``python -m benchmarks memory [N] [M]``.

The solve runs alone in a process. What counts is the peak resident size by getrusage minus the
resident size once everything is imported and the points are made.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_MIB = 1024


def solve(n: int, m: int, epsilon: float | str) -> dict[str, object]:
    """Align a spiral with a Swiss roll by landmark factors; return what it took."""
    import torchgw
    from benchmarks.harness.measure import MemoryProbe
    from torchgw.datasets import spiral, swiss_roll

    x, y = spiral(n, random_state=0)[0], swiss_roll(m, random_state=1)[0]
    import torch

    probe = MemoryProbe(torch.device("cpu"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    begin = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchgw.GraphWarning)
        result = torchgw.solve(
            x,
            y,
            distances="landmark",
            gradient="factored",
            n_neighbors=5,
            epsilon=epsilon,  # type: ignore[arg-type]
            random_state=0,
        )
    return {
        "n": n, "m": m, "time_s": time.perf_counter() - begin, **probe.peak_mib(),
        "peak_of_imports_mib": round(before, 1), "status": result.status.name,
        "value": result.value, "marginal_error": result.marginal_error,
        "iterations": result.n_iters, "epsilon": result.epsilon,
        "rank": getattr(result.lazy_plan.cost, "rank", None),
        "phases_s": {name: round(spent, 3) for name, spent in result.timings.items()},
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Measure in a process of its own; exit 1 if the limit is passed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks memory", description=__doc__)
    parser.add_argument("n", type=int, nargs="?", default=20_000)
    parser.add_argument("m", type=int, nargs="?", default=20_000)
    parser.add_argument("--epsilon", type=float, default=None, help="'auto' if not given")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    epsilon = "auto" if options.epsilon is None else options.epsilon
    if options.inside:
        print(json.dumps(solve(options.n, options.m, epsilon)))
        return 0
    command = [sys.executable, "-m", "benchmarks", "memory", str(options.n), str(options.m)]
    if options.epsilon is not None:
        command += ["--epsilon", str(options.epsilon)]
    done = subprocess.run([*command, "--inside"], cwd=ROOT, capture_output=True, text=True,
                          check=False)  # fmt: skip
    if done.returncode != 0:
        print(done.stderr, file=sys.stderr)
        return done.returncode
    report = json.loads(done.stdout.splitlines()[-1])
    for name, value in report.items():
        print(f"{name:20s} {value}")
    fits = report["peak_mib"] < LIMIT_MIB
    print(f"{'under' if fits else 'OVER'} {LIMIT_MIB} MiB above the imports")
    return 0 if fits else 1
