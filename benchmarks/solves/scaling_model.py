"""Time and memory beyond the machine: ``python -m benchmarks scaling --model FILE``.

FILE holds the JSON lines of ``python -m benchmarks scaling --output FILE`` on one GPU, such as
benchmarks/results/scaling.jsonl; those of problems that were solved on cells count. Rates are
fitted to the last row of each size of a million points and more, for each space that has two sizes:

- preparation (neighbours, landmarks) takes c n^p; two processes do one side each;
- cells take the same time whatever n is; every process solves them;
- the passes between points and cells take c n times the number of cells, shared by the GPUs;
- prepared sides, potentials and products are sent over NVLink, or 400 Gb/s beyond eight GPUs;
- memory is c n, on each GPU, since every process holds all points, with c of the last row, as code
  has come to hold less; :func:`bytes_a_pair` counts the arrays.

It is printed beside every row, with its error, and with that of the same model fitted to the other
rows alone (preparation grows linearly where they have one size). A row without phases is only
predicted, and if it is a first call, with the seconds that other first calls took longer.
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
GPUS = (1, 4, 8, 16, 64)
# Bytes a second between GPUs of one host, and of several (400 Gb/s).
_NVLINK, _NETWORK = 4.5e11, 5e10
_HOST = 8
# Tables of one float64 number a point that are gathered: potentials, and products in 64 columns.
_GATHERED = 2 + 64
# Bytes a point that are sent of a prepared side: 20 edges of 16, and 25 factors.
_SENT = 20 * 16 + 25 * 8
_MEMORY = 141e9


def fit(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Fit the rates to measured rows."""
    n = np.array([row["n"] for row in rows], dtype=float)
    prepared = np.array([_seconds(row, PREPARATION) for row in rows])
    power = np.polyfit(np.log(n), np.log(prepared), 1)[0] if len(set(n)) > 1 else 1.0
    level = np.mean(np.log(prepared) - power * np.log(n))
    pairs = np.array([_pairs(row) for row in rows])
    extended = np.array([row["phases"]["extension"] for row in rows])
    return {
        "power": float(power),
        "preparation": math.exp(level),
        "cells": float(np.median([_seconds(row, CELLS) for row in rows])),
        "pair": float((extended / pairs).mean()),
        "count": float(np.median([_pairs(row) / row["n"] for row in rows])),
        # what a first call takes longer: kernels are compiled
        "first": float(np.median([max(_calls(row)) - row["seconds"] for row in rows])),
        "bytes": rows[-1]["peak_mib"] * 2**20 / rows[-1]["n"],
    }


def bytes_a_pair(
    columns: int, ranks: tuple[int, int], landmarks: int, edges: tuple[float, float]
) -> dict[str, float]:
    """Count the bytes that live at once for each pair of points, in the phases that hold most.

    Of points in so many ``columns`` of float64, both sides together, with paths in graphs of so
    many ``edges`` a point, both directions counted, to so many ``landmarks``, and factors of such
    ``ranks``. What does not grow with the points, such as cells and parts of them, is left out.
    A GPU has let go of the edges of a side once it looks for landmarks there; these count here.
    ``few points`` are drawn where a solve that has ended is compared with a match of parts.
    """
    points, vector = 8 * columns, 8
    factors = vector * sum(ranks)
    # rows of landmarks and of 15 held-out columns, which are let go for the factors
    rows = vector * (landmarks + max(15, *ranks))
    graphs = [16 * count + vector for count in edges]
    # weights, terms of rows and columns in two dtypes, the order in cells and back, and potentials:
    # of the first points, of the cells before and of these
    vectors = 2 * vector * (1 + 2 + 2 + 3)
    # factors once more in float32, and the cost of the plan
    cost = 4 * 2 * min(ranks)
    return {
        "landmarks": points + max(sum(graphs), vector * ranks[0] + graphs[1]) + rows,
        # 16 coordinates, by which points are ordered, once more as they were and squared
        "orders": points + factors + 3 * vector * 16 + vectors,
        "extension": points + 1.5 * factors + cost + vectors,
        "few points": points + 1.5 * factors + cost + vectors + vector * (48 + 24),
    }


def predict(rates: dict[str, float], n: float, gpus: int, pairs: float) -> dict[str, float]:
    """Compute the seconds of each part, and the bytes on each GPU."""
    speed = math.inf if gpus == 1 else _NVLINK if gpus <= _HOST else _NETWORK
    return {
        "preparation": rates["preparation"] * n ** rates["power"] / min(gpus, 2),
        "cells": rates["cells"], "points and cells": rates["pair"] * pairs / gpus,
        "exchange": 2 * n * (8 * _GATHERED + _SENT) / speed, "bytes": rates["bytes"] * n,
    }  # fmt: skip


def report(path: Path) -> str:
    """Describe the model of each space and what it predicts, as Markdown."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    measured = [row for row in records if isinstance(row.get("resolution"), dict)]
    spaces = dict.fromkeys(row.get("space", "spiral") for row in measured)
    parts = []
    for space in spaces:
        here = [row for row in measured if row.get("space", "spiral") == space]
        rows = list({(row["n"], "phases" in row): row for row in here}.values())
        known = [row for row in rows if row["n"] >= 10**6 and "phases" in row]
        if len({row["n"] for row in known}) > 1:
            parts.append(f"{space}: {_described(rows, known)}")
    if not parts:
        raise SystemExit("the file needs rows of two sizes from 1,000,000 on, solved on cells")
    return "\n\n".join(parts)


def _described(rows: list[dict[str, Any]], known: list[dict[str, Any]]) -> str:
    """Describe the model of one space, fitted to its ``known`` rows."""
    rates = fit(known) | {"bytes": rows[-1]["peak_mib"] * 2**20 / rows[-1]["n"]}
    lines = [
        f"preparation grows as n^{rates['power']:.2f}; {rates['bytes']:.0f} bytes a point of "
        f"memory; {rates['count']:,.0f} cells",
        "",
        "| n | measured, s | sum, s | error | fitted without | preparation | cells | "
        "points and cells | GiB, measured | GiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        n, seconds = row["n"], row["seconds"]
        # how many cells there were is not known of every row
        pairs = _pairs(row) if "cells" in row["resolution"] else n * rates["count"]
        parts = predict(rates, n, 1, pairs)
        memory = parts.pop("bytes")
        total = sum(parts.values()) + rates["first"] * bool(row.get("first"))
        alone = "-"
        others = [other for other in known if other is not row]
        if others and row in known:
            without = predict(fit(others), n, 1, pairs)
            del without["bytes"]
            alone = f"{sum(without.values()) / seconds - 1:+.0%}"
        del parts["exchange"]
        shares = " | ".join(f"{part:.3g}" for part in parts.values())
        sizes = f"{row['peak_mib'] / 2**10:.3g} | {memory / 2**30:.3g}"
        first = " (first call)" if row.get("first") else ""
        lines.append(
            f"| {n:,} | {seconds:.3g}{first} | {total:.3g} | {total / seconds - 1:+.0%} | {alone} "
            f"| {shares} | {sizes} |"
        )
    lines += [
        "",
        "| n | GPUs | preparation | cells | points and cells | exchange | sum, s | GiB | binds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for n, gpus in ((n, gpus) for n in SIZES for gpus in GPUS):
        parts = predict(rates, n, gpus, n * rates["count"])
        memory = parts.pop("bytes")
        total = sum(parts.values())
        binds = "memory" if memory > _MEMORY else max(parts, key=lambda name: parts[name])
        cells = " | ".join(f"{part:.3g}" for part in parts.values())
        size = f"{memory / 2**30:.3g}"
        lines.append(f"| {n:,} | {gpus} | {cells} | {total:.3g} | {size} | {binds} |")
    return "\n".join(lines)


def _seconds(row: dict[str, Any], names: tuple[str, ...]) -> float:
    return float(sum(row["phases"].get(name, 0.0) for name in names))


def _calls(row: dict[str, Any]) -> list[float]:
    return list(row.get("all_seconds", [row["seconds"]]))


def _pairs(row: dict[str, Any]) -> float:
    return float(row["n"] * max(row["resolution"]["cells"]))
