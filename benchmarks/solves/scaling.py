"""Time and memory of whole calls against n: ``python -m benchmarks scaling``.

A spiral is aligned to a Swiss roll of as many points, from NumPy arrays to a result, by defaults at
epsilon 5e-4; or two noisy samples of one surface in 3-D, at the automatic epsilon. Each size runs
alone in a process, a first call (which compiles) and some more, of which the median counts.
Spearman's correlation is that of 32,768 drawn points and their partners, the largest entries of
their rows; ``spearman_mean`` takes the mean of a row. One JSON line for each size, then a table and
the exponents of n that fit best, by least squares in logarithms.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

import torchgw
from benchmarks.harness.harness import tell
from benchmarks.harness.measure import MemoryProbe, synchronize
from benchmarks.solves.scaling_model import report
from torchgw._boundary.arrays import to_numpy
from torchgw.datasets import spiral, swiss_roll

ROOT = Path(__file__).resolve().parents[2]
_EPSILON = 5e-4
# Points whose partners are looked up, and entries of the plan that are built for it at once.
_PARTNERS, _BLOCK = 32768, 2**31
# Columns of the table that have an exponent, and are no phase.
_TOTALS = ("seconds", "cpu_seconds", "peak_mib")


def surface(n: int, seed: int) -> tuple[Any, Any]:
    """Draw points near a curved sheet in 3-D, (n, 3), and a coordinate along it, (n,)."""
    rng = np.random.default_rng(seed)
    u, v = rng.random((2, n)) * [[3.0], [2.0]]
    height = 0.6 * np.sin(1.3 * u) + 0.4 * np.cos(2 * v) + 0.3 * u
    return np.stack([u, v, height], axis=1) + 0.02 * rng.normal(size=(n, 3)), u


def measure(
    n: int,
    device: torch.device,
    repeat: int,
    *,
    all_tiles: bool = False,
    all_points: bool = False,
    space: str = "spiral",
) -> dict[str, Any]:
    """Return what whole calls of one size take, and how good the last result is."""
    if space == "spiral":
        (x, angle_x), (y, angle_y) = spiral(n, random_state=0), swiss_roll(n, random_state=1)
    else:
        (x, angle_x), (y, angle_y) = surface(n, 0), surface(n, 1)
    probe = MemoryProbe(device)
    calls: list[tuple[float, float, dict[str, float]]] = []
    result = None
    for _ in range(1 + repeat):
        # what a call needs, not what the last one left
        del result
        synchronize(device)
        begin, busy = time.perf_counter(), time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", torchgw.GraphWarning)
            result = torchgw.solve(
                x,
                y,
                epsilon=_EPSILON if space == "spiral" else "auto",
                device=device,
                random_state=0,
                options=torchgw.Options(
                    skip_tiles=False if all_tiles else "auto",
                    resolution=None if all_points else "auto",
                ),
            )
        synchronize(device)
        busy = time.process_time() - busy
        calls.append((time.perf_counter() - begin, busy, result.timings))
    # one call alone is its own first
    counted = sorted(calls[1:] or calls, key=lambda call: call[0])
    seconds, busy, phases = counted[len(counted) // 2]
    peak = probe.peak_mib()
    drawn = np.sort(np.random.default_rng(2).choice(n, min(n, _PARTNERS), replace=False))
    parts = np.array_split(drawn, max(1, math.ceil(len(drawn) * n / _BLOCK)))
    along = torch.from_numpy(angle_y).to(device)
    partners, means = list[Any](), list[Any]()
    for part in parts:
        rows = torch.as_tensor(result.lazy_plan.rows(torch.as_tensor(part)), device=device)
        partners.append(angle_y[to_numpy(rows.argmax(1))])
        means.append(to_numpy(rows @ along.to(rows.dtype) / rows.sum(1)))
    rank, mean_rank = (
        float(spearmanr(angle_x[drawn], np.concatenate(each)).statistic)
        for each in (partners, means)
    )
    errors = [float(np.abs(to_numpy(mass) * n - 1).max()) for mass in result.marginals]
    return {
        "n": n,
        "space": space,
        "device": device.type,
        "seconds": round(seconds, 4),
        # of all threads, which is what counts on a shared machine
        "cpu_seconds": round(busy, 4),
        "all_seconds": [round(call[0], 4) for call in calls],
        **peak,
        "phases": {name: round(spent, 4) for name, spent in phases.items()},
        "status": result.status.name,
        "value": result.value,
        "marginal_error": result.marginal_error,
        "worst_relative_masses": errors,
        # a sheet may be turned
        "spearman": rank if space == "spiral" else abs(rank),
        "spearman_mean": mean_rank if space == "spiral" else abs(mean_rank),
        "outer_iterations": result.n_iters,
        "inner_iterations": result.log["inner_iterations"],
        "rank": getattr(result.lazy_plan.cost, "rank", None),
        "tiles": result.log.get("tiles"),
        "resolution": result.log.get("resolution"),
        "torch": torch.__version__,
    }


def exponent(sizes: list[int], values: list[float]) -> float:
    """Return the slope of log(value) over log(n), NaN where it has none."""
    if len(sizes) < 2 or min(values) <= 0:
        return math.nan
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def table(records: list[dict[str, Any]]) -> str:
    """Return the measurements as a Markdown table, with exponents from all and the last two."""
    sizes = [record["n"] for record in records]
    names = list(dict.fromkeys(name for record in records for name in record["phases"]))
    lines = [
        "| |" + "".join(f" {n:,} |" for n in sizes) + " exponent | of the last two |",
        "|---|" + "---|" * (len(sizes) + 2),
    ]
    for name in (*_TOTALS, *names):
        values = [record.get(name, record["phases"].get(name, 0.0)) for record in records]
        slopes = exponent(sizes, values), exponent(sizes[-2:], values[-2:])
        cells = [*(f"{value:.4g}" for value in values), *(f"{slope:.2f}" for slope in slopes)]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    read = "value", "marginal_error", "spearman", "spearman_mean"
    for name in (*read, "outer_iterations", "inner_iterations"):
        cells = [f"{record[name]:.6g}" for record in records]
        lines.append(f"| {name} | " + " | ".join(cells) + " | | |")
    worst = [f"{max(record['worst_relative_masses']):.1e}" for record in records]
    lines.append("| worst relative mass | " + " | ".join(worst) + " | | |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure each size in a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks scaling", description=__doc__)
    parser.add_argument("--sizes", default="1000,10000,100000,1000000")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeat", type=int, default=2, help="calls after the first one")
    parser.add_argument("--all-tiles", action="store_true", help="skip no tile")
    parser.add_argument("--model", type=Path, help="predict from the JSON lines of a file")
    parser.add_argument("--all-points", action="store_true", help="solve on no cells")
    parser.add_argument("--space", choices=("spiral", "surface"), default="spiral")
    parser.add_argument("--output", type=Path, help="file that the JSON lines are added to")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.model is not None:
        print(report(options.model))
        return 0
    sizes = [int(size) for size in options.sizes.split(",")]
    if options.inside:
        device = torch.device(options.device)
        record = measure(
            sizes[0], device, options.repeat, all_tiles=options.all_tiles,
            all_points=options.all_points, space=options.space,
        )  # fmt: skip
        print(json.dumps(record))
        return 0
    records = []
    for n in sizes:
        command = [sys.executable, "-m", "benchmarks", "scaling", "--inside", "--sizes", str(n)]
        command += ["--device", options.device, "--repeat", str(options.repeat)]
        command += ["--all-tiles"] * options.all_tiles + ["--all-points"] * options.all_points
        command += ["--space", options.space]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            print(f"{n}: {done.stderr}", file=sys.stderr)
            return done.returncode
        records.append(json.loads(done.stdout.splitlines()[-1]))
        tell(records[-1], options.output)
    print(table(records))
    return 0
