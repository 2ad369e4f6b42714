"""Quadratic assignment problems of QAPLIB by defaults and ``matching()``, beside the best known.

``python -m benchmarks qap`` minimises sum_ij A_ij B_p(i)p(j) over permutations p: points at
distances A and -B. ``--most 40`` leaves larger problems out; ``--torch-threads 1`` is the default.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch

import torchgw
from benchmarks.harness.harness import RunOptions, environment, keep
from benchmarks.quality.instances import Array
from benchmarks.quality.real import DATA_VARIABLE, read_data
from torchgw.distances import DirectedDistance

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run the study; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks qap")
    parser.add_argument("names", nargs="*", help=f"all of qap.npz of {DATA_VARIABLE} if none")
    parser.add_argument("--most", type=int, default=100, help="points of a side")
    parser.add_argument("--polish", action="store_true", help="solve with polish=True")
    parser.add_argument("--torch-threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out/qap.jsonl"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.torch_threads)
    shared = environment(RunOptions(device=options.device))
    data = read_data("qap.npz")
    names = options.names or sorted({key.split("/")[0] for key in data})
    rows = []
    for name in names:
        a, b = (data[f"{name}/{side}"].astype(np.float64) for side in "AB")
        if len(a) > options.most:
            continue
        best = float(data[f"{name}/best_known"])
        row = {"problem": name, "n": len(a), **_solved(a, b, best, options)}
        rows.append(row)
        print("  ".join(f"{value:.4g}" if isinstance(value, float) else f"{value:8}"
                        for value in row.values()), flush=True)  # fmt: skip
        keep(options.out, row | shared)
    _summarise(rows)
    return 0


def _solved(a: Array, b: Array, best: float, options: argparse.Namespace) -> dict[str, Any]:
    """Solve one problem; give its gap, and CPU seconds of the solve and of the matching."""
    sides = (a, -b)
    if not all((table == table.T).all() for table in sides):
        sides = tuple(DirectedDistance(table) for table in sides)
    settings = {"polish": True} if options.polish else {}
    with warnings.catch_warnings():
        # sides that have nothing in common are doubtful nearly always
        warnings.simplefilter("ignore")
        begin = process_time()
        result = torchgw.solve(D_X=sides[0], D_Y=sides[1], device=options.device, **settings)
        solved = process_time()
        chosen = np.asarray(torch.as_tensor(result.matching().target).cpu())
        matched = process_time()
    cost = float((a * b[np.ix_(chosen, chosen)]).sum())
    return {
        "gap_percent": 100 * (cost - best) / best, "solve_cpu_s": solved - begin,
        "matching_cpu_s": matched - solved, "status": result.status.name,
    }  # fmt: skip


def _summarise(rows: list[dict[str, Any]]) -> None:
    """Print the figures of all problems, and the worst of them."""
    gaps = np.array([row["gap_percent"] for row in rows])
    solve, matching = (sum(row[part] for row in rows) for part in ("solve_cpu_s", "matching_cpu_s"))
    print(
        f"{len(rows)} problems: median {np.median(gaps):.3f}%, mean {gaps.mean():.3f}%, "
        f"exact {(gaps <= 1e-9).sum()}, {solve + matching:.1f} CPU s ({matching:.1f} of matching)"
    )
    worst = sorted(rows, key=lambda row: -row["gap_percent"])[:5]
    print("worst: " + ", ".join(f"{row['problem']} {row['gap_percent']:.2f}%" for row in worst))
