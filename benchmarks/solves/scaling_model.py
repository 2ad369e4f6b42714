"""Time and memory beyond the machine: ``python -m benchmarks scaling --model FILE``.

FILE holds the JSON lines of ``python -m benchmarks scaling --output FILE`` on one GPU, of problems
that were solved on cells. Rates are fitted to those of a million points and more:

- preparation (neighbours, landmarks) takes c n^p; every process does all of it;
- cells take the same time whatever n is; every process solves them;
- the passes between points and cells take c n times the number of cells, shared by the GPUs;
- potentials and products are gathered over NVLink, or 400 Gb/s beyond eight GPUs;
- memory is c n, on each GPU, since every process holds all points.

The model is printed beside every row that it was fitted to.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

PREPARATION = ("decision", "graph", "geodesics", "landmarks", "distances")
CELLS = ("multistart", "setup", "cost", "sinkhorn", "coupling", "settle", "evaluation")
SIZES = (10**7, 10**8, 10**9)
GPUS = (1, 8, 64)
# Bytes a second between GPUs of one host, and of several (400 Gb/s).
_NVLINK, _NETWORK = 4.5e11, 5e10
_HOST = 8
# Tables of one float64 number a point that are gathered: potentials, and products in 64 columns.
_GATHERED = 2 + 64
_MEMORY = 141e9


def fit(records: list[dict[str, Any]]) -> dict[str, float]:
    """Fit the rates to measured rows."""
    rows = [row for row in records if row["n"] >= 10**6 and row["resolution"]]
    if len({row["n"] for row in rows}) < 2:
        raise SystemExit("the file needs rows of two sizes from 1,000,000 on, solved on cells")
    n = np.array([row["n"] for row in rows], dtype=float)
    prepared = np.array([_seconds(row, PREPARATION) for row in rows])
    power, level = np.polyfit(np.log(n), np.log(prepared), 1)
    pairs = np.array([_pairs(row) for row in rows])
    extended = np.array([row["phases"]["extension"] for row in rows])
    return {
        "power": float(power),
        "preparation": math.exp(level),
        "cells": float(np.median([_seconds(row, CELLS) for row in rows])),
        "pair": float((extended / pairs).mean()),
        "count": float(np.median([_pairs(row) / row["n"] for row in rows])),
        "bytes": float(np.max([row["peak_mib"] * 2**20 for row in rows] / n)),
    }


def predict(rates: dict[str, float], n: float, gpus: int, pairs: float) -> dict[str, float]:
    """Compute the seconds of each part, and the bytes on each GPU."""
    speed = math.inf if gpus == 1 else _NVLINK if gpus <= _HOST else _NETWORK
    return {
        "preparation": rates["preparation"] * n ** rates["power"],
        "cells": rates["cells"],
        "points and cells": rates["pair"] * pairs / gpus,
        "exchange": 2 * 8 * n * _GATHERED / speed,
        "bytes": rates["bytes"] * n,
    }


def report(path: Path) -> str:
    """Describe the model and what it predicts, as Markdown."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rates = fit(records)
    lines = [
        f"preparation grows as n^{rates['power']:.2f}; {rates['bytes']:.0f} bytes a point of "
        f"memory; {rates['count']:,.0f} cells",
        "",
        "| n | GPUs | preparation | cells | points and cells | exchange | sum, s | GiB | binds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    measured = [row for row in records if row["resolution"]]
    cases = [(row["n"], 1, _pairs(row), row["seconds"]) for row in measured]
    cases += [(n, gpus, n * rates["count"], None) for n in SIZES for gpus in GPUS]
    for n, gpus, pairs, seconds in cases:
        parts = predict(rates, n, gpus, pairs)
        memory = parts.pop("bytes")
        total = sum(parts.values())
        binds = "memory" if memory > _MEMORY else max(parts, key=lambda name: parts[name])
        told = "" if seconds is None else f" (measured {seconds:.3g})"
        cells = " | ".join(f"{part:.3g}" for part in parts.values())
        size = f"{memory / 2**30:.3g}"
        lines.append(f"| {n:,} | {gpus} | {cells} | {total:.3g}{told} | {size} | {binds} |")
    return "\n".join(lines)


def _seconds(row: dict[str, Any], names: tuple[str, ...]) -> float:
    return float(sum(row["phases"].get(name, 0.0) for name in names))


def _pairs(row: dict[str, Any]) -> float:
    return float(row["n"] * max(row["resolution"]["cells"]))
