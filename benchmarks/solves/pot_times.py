"""Small dense problems by ``torchgw.pot`` and by POT: ``python -m benchmarks pot-times``.

Random Euclidean distances in two and in three dimensions, from the product plan, on one thread: CPU
seconds, the least of some calls, and values. Three pairs a row and size; their median is printed.
Values are compared where POT's plan moves the mass that was asked for: partial ones may move more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ot
from scipy.spatial.distance import cdist

import torchgw.pot

ROWS: dict[str, dict[str, Any]] = {
    "exact": {},
    "fused exact": {"M": True},
    "semi-relaxed exact": {"unbalanced_type": "semirelaxed"},
    "partial .7, exact": {"unbalanced_type": "partial", "unbalanced": 0.7},
    "entropic, reg .05": {"reg": 0.05},
}


def main(arguments: list[str] | None = None) -> int:
    """Measure, write one JSON line a pair, print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks pot-times", description=__doc__)
    parser.add_argument("--sizes", default="20,100,300", help="by commas")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--output", type=Path, help="file for the JSON lines")
    options = parser.parse_args(arguments)
    sizes = [int(size) for size in options.sizes.split(",")]
    records = [
        measure(row, n, seed, options.repeat)
        for row in ROWS
        for n in sizes
        for seed in range(options.seeds)
    ]
    if options.output:
        lines = (json.dumps(record) for record in records)
        options.output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(table(records))
    return 0


def measure(row: str, n: int, seed: int, repeat: int) -> dict[str, Any]:
    """Solve one problem by both."""
    rng = np.random.default_rng(seed)
    tables = (cdist(points, points) for points in (rng.normal(size=(n, d)) for d in (2, 3)))
    first, second = (distances / distances.max() for distances in tables)
    call = dict(ROWS[row])
    if "M" in call:
        call["M"] = rng.uniform(size=(n, n))
    record: dict[str, Any] = {"row": row, "n": n, "seed": seed}
    for name, solve in (("ours", torchgw.pot.solve_gromov), ("pot", ot.solve_gromov)):
        seconds, found = _timed(lambda solve=solve: solve(first, second, **call), repeat)
        record |= {name: seconds, f"{name} value": float(found.value)}
    record["comparable"] = abs(float(found.plan.sum()) - call.get("unbalanced", 1.0)) < 1e-9
    return record


def _timed(call: Callable[[], Any], repeat: int) -> tuple[float, Any]:
    """Call some times; return the least CPU seconds, and what the last returned."""
    least = float("inf")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(repeat):
            start = time.process_time()
            found = call()
            least = min(least, time.process_time() - start)
    return least, found


def summary(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Take medians over the seeds, and the largest excess of a value over POT's."""
    rows = []
    for row, n in dict.fromkeys((record["row"], record["n"]) for record in records):
        part = [record for record in records if (record["row"], record["n"]) == (row, n)]
        ours, pots = (statistics.median(r[name] for r in part) for name in ("ours", "pot"))
        compared = [record for record in part if record["comparable"]]
        excess = max((r["ours value"] - r["pot value"] for r in compared), default=float("nan"))
        rows.append({"row": row, "n": n, "ours": ours, "pot": pots, "excess": excess})
    return rows


def table(records: list[dict[str, Any]]) -> str:
    """Return seconds, their ratio and the largest excess of a value as a Markdown table."""
    lines = ["| row | n | ours, s | POT, s | ratio | excess |", "|---|---|---|---|---|---|"]
    for row in summary(records):
        times = f"{row['ours']:.4f} | {row['pot']:.4f} | {row['ours'] / row['pot']:.2f}"
        lines.append(f"| {row['row']} | {row['n']} | {times} | {row['excess']:+.1e} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
