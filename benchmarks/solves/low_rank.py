"""Plans of low rank beside full rank and POT's: ``python -m benchmarks low-rank``.

Two unrelated shapes, a spiral and a Gaussian cloud, by squared Euclidean distances, which have
exact factors. Each method runs in a process of its own, so that its peak memory is its own. Exit
status 1 if the low rank, from the plan of full rank, is more than 5% above it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.harness.measure import MemoryProbe, timed

ROOT = Path(__file__).resolve().parents[2]
METHODS = ("full", "low-rank", "low-rank-from-full", "pot")
LIMIT = 1.05


def clouds(n: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return a spiral (n, 2) and a Gaussian cloud (n, 3), each of diameter about one."""
    from torchgw.datasets import spiral

    x, y = spiral(n, random_state=0)[0], np.random.default_rng(0).normal(size=(n, 3))
    return x, y


def measure(method: str, n: int, rank: int, max_iter: int, device: torch.device) -> dict[str, Any]:
    """Run one method; return its time, peak memory and value without entropy."""
    import torchgw

    x, y = clouds(n)
    options: dict[str, Any] = {"distances": "sqeuclidean", "device": device, "random_state": 0}

    def full(seed: int) -> torchgw.GWResult:
        return torchgw.solve(x, y, **options)

    def low_rank(init: torchgw.GWResult | None) -> torchgw.LowRankResult:
        return torchgw.solve_low_rank(x, y, rank=rank, max_iter=max_iter, init=init, **options)

    with warnings.catch_warnings():
        # a descent that was cut short says so in "converged"
        warnings.simplefilter("ignore", torchgw.ConvergenceWarning)
        if method == "full":
            full(0)
        start = full(0) if method == "low-rank-from-full" else None
        probe = MemoryProbe(device)
        if method == "pot":
            return _pot(x, y, rank, probe)
        call = full if method == "full" else lambda seed: low_rank(start)
        seconds, result = timed(call, 0, device)
    return {
        "time_s": round(seconds, 3), **probe.peak_mib(), "value": result.value,
        "marginal_error": result.marginal_error, "converged": result.converged,
        "iterations": len(result.history),
    }  # fmt: skip


def _pot(
    x: NDArray[np.float64], y: NDArray[np.float64], rank: int, probe: MemoryProbe
) -> dict[str, Any]:
    """Run POT's low-rank solver and score its plan in our units, distances of maximum one."""
    import ot
    from scipy.spatial import ConvexHull
    from scipy.spatial.distance import pdist

    # POT takes squared distances of these points, whose maximum is between corners of the hull
    scaled = [points / pdist(points[ConvexHull(points).vertices]).max() for points in (x, y)]

    def call(seed: int) -> Any:
        # its own rescaling would change the units of the value
        return ot.gromov.lowrank_gromov_wasserstein_samples(
            *scaled, rank=rank, rescale_cost=False, log=True, warn=False
        )

    seconds, (q, r, g, log) = timed(call, 0, torch.device("cpu"))
    return {
        "time_s": round(seconds, 3), **probe.peak_mib(), "value": value_of(q, r, g, scaled),
        "value_reported": float(log["value"]),
        "marginal_error": float(np.abs((q / g) @ r.sum(0) - 1 / len(x)).sum()),
    }  # fmt: skip


def value_of(
    q: NDArray[np.float64],
    r: NDArray[np.float64],
    g: NDArray[np.float64],
    points: list[NDArray[np.float64]],
) -> float:
    """Return <L(P), P> of P = q diag(1/g) r' for squared Euclidean distances of both sides."""
    plan_rows, plan_columns = (q / g) @ r.sum(0), (r / g) @ q.sum(0)
    squares, inner = [], []
    for cloud, mass, part in zip(points, (plan_rows, plan_columns), (q, r), strict=True):
        norm = np.square(cloud).sum(1)
        left = np.column_stack([norm, np.ones(len(cloud)), -2 * cloud])
        right = np.column_stack([np.ones(len(cloud)), norm, cloud])
        # sum_ik D_ik^2 p_i p_k, and Q' D Q, by the factors of D
        weighted = (left * mass[:, None]).T @ left, (right * mass[:, None]).T @ right
        squares.append(float((weighted[0] * weighted[1]).sum()))
        inner.append((part.T @ left) @ (right.T @ part))
    cross = float(((inner[0] / g[:, None] / g) * inner[1].T).sum())
    return squares[0] + squares[1] - 2 * cross


def main(arguments: list[str] | None = None) -> int:
    """Print one line for each method."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks low-rank", description=__doc__)
    parser.add_argument("--n", type=int, default=20_000, help="points per side")
    parser.add_argument("--rank", type=int, default=50)
    parser.add_argument("--max-iter", type=int, default=500, help="mirror steps at most")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one method")
    parser.add_argument("--inside", choices=METHODS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        device = torch.device(options.device)
        found = measure(options.inside, options.n, options.rank, options.max_iter, device)
        print(json.dumps(found))
        return 0
    values = {}
    for method in options.methods.split(","):
        command = [sys.executable, "-m", "benchmarks", "low-rank", "--inside", method,
                   "--n", str(options.n), "--rank", str(options.rank),
                   "--max-iter", str(options.max_iter), "--device", options.device]  # fmt: skip
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False,
                                  timeout=options.timeout)  # fmt: skip
        except subprocess.TimeoutExpired:
            print(f"{method:20s} not done after {options.timeout:.0f} s", flush=True)
            continue
        if done.returncode != 0:
            print(done.stderr, file=sys.stderr)
            return done.returncode
        report = json.loads(done.stdout.splitlines()[-1])
        values[method] = report["value"]
        print(f"{method:20s} {report}", flush=True)
    if not values.keys() >= {"full", "low-rank-from-full"}:
        return 0
    for method in values.keys() - {"full"}:
        print(f"{method:20s} {values[method] / values['full']:.4f} of the value of full rank")
    return 0 if values["low-rank-from-full"] <= LIMIT * values["full"] else 1
