"""Large problems beside POT's quantized Gromov-Wasserstein: ``python -m benchmarks quantized``.

A spiral is matched to a Swiss roll of as many points. Both solvers get the same distances,
geodesics by landmarks, as factors, and the plans of both are valued by these. POT aligns ``parts``
representatives of each side and then the points around each, by their distances to it
(``quantized_fused_gromov_wasserstein_partitioned``: its other two functions store matrices of all
pairs). Representatives are drawn, and a point belongs to the nearest one; that counts as POT's
time, as does its plan being put together. Distances count for neither. POT computes on one CPU
thread here. Its local plans are dense, 16 n^2 / parts bytes in all: more than ``--memory`` GB are
not tried, and a setting that passes ``--limit`` seconds is ended. One JSON line a setting.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ot
import torch
from numpy.typing import NDArray
from scipy import sparse
from scipy.stats import spearmanr

import torchgw
from benchmarks.harness.measure import synchronize
from torchgw.datasets import spiral, swiss_roll
from torchgw.distances import LandmarkDistance, connect, knn_graph

ROOT = Path(__file__).resolve().parents[2]
EPSILON = 5e-4
# Local plans are as many as entries of a vertex, twice the parts at most; 8 bytes an entry.
_LOCAL_BYTES = 16
_ROWS = 2**16

Array = NDArray[np.float64]


class Side(NamedTuple):
    """Points of one side by factors of their distances, the largest of which is one."""

    factors: Array  # (n, r)
    signs: Array  # (r,)
    angle: Array  # (n,) place on the curve

    def rows(self, index: NDArray[np.int64]) -> Array:
        """Distances of some points to all, (k, n)."""
        table: Array = (self.factors[index] * self.signs) @ self.factors.T
        return table

    def square(self, weight: Array) -> float:
        """Compute p' D^2 p, with D^2 = sum over pairs of factors."""
        gram = self.factors.T @ (self.factors * weight[:, None])
        return float(self.signs @ gram**2 @ self.signs)


def make_side(points: Array, angle: Array) -> Side:
    """Compute the factors of one side."""
    tensor = torch.from_numpy(points)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchgw.GraphWarning)
        distance = LandmarkDistance(connect(knn_graph(tensor, 10), tensor))
    found = distance.factors()
    factors, signs = found.matrix.numpy(), found.signs.numpy().astype(float)
    return Side(factors / np.sqrt(distance.maximum()), signs, angle)


def value(source: Side, target: Side, plan: sparse.csr_matrix) -> float:
    """Compute the sum of (DX_ik - DY_jl)^2 P_ij P_kl."""
    p, q = (np.asarray(plan.sum(axis)).ravel() for axis in (1, 0))
    cross = source.factors.T @ (plan @ target.factors)
    both = source.signs @ cross**2 @ target.signs
    return source.square(p) + target.square(q) - 2 * float(both)


def voronoi(
    side: Side, parts: int, seed: int
) -> tuple[Array, list[NDArray[np.int64]], list[Array]]:
    """Draw representatives: their distances, the points around each, and these points' own."""
    n = len(side.factors)
    chosen = np.random.default_rng(seed).choice(n, parts, replace=False)
    nearest, near = np.empty(n, dtype=np.int64), np.empty(n)
    metric = (side.factors[chosen] * side.signs).T
    for start in range(0, n, _ROWS):
        block = side.factors[start : start + _ROWS] @ metric
        nearest[start : start + _ROWS] = block.argmin(1)
        near[start : start + _ROWS] = block.min(1)
    nearest[chosen] = np.arange(parts)
    order = np.argsort(nearest, kind="stable")
    cuts = np.searchsorted(nearest[order], np.arange(1, parts))
    members = np.split(order, cuts)
    return side.rows(chosen)[:, chosen], members, [near[each] for each in members]


def quantized(source: Side, target: Side, parts: int, seed: int = 0) -> sparse.csr_matrix:
    """Compute POT's plan from Voronoi cells of drawn representatives."""
    n, m = len(source.factors), len(target.factors)
    table_x, in_x, near_x = voronoi(source, parts, seed)
    table_y, in_y, near_y = voronoi(target, parts, seed + 1)
    weights = (
        [np.full(len(each), 1 / n) for each in in_x],
        [np.full(len(each), 1 / m) for each in in_y],
    )
    outer, local, _ = ot.gromov.quantized_fused_gromov_wasserstein_partitioned(
        table_x, table_y, near_x, near_y, *weights, alpha=1.0, build_OT=False
    )
    rows, columns, masses = [], [], []
    for (i, j), plan in local.items():
        at = np.nonzero(plan)
        rows.append(in_x[i][at[0]])
        columns.append(in_y[j][at[1]])
        masses.append(outer[i, j] * plan[at])
    entries = np.concatenate(masses), (np.concatenate(rows), np.concatenate(columns))
    return sparse.csr_matrix(entries, shape=(n, m))


def measure(n: int, parts: int, device: str) -> dict[str, Any]:
    """Measure one setting of POT, or ours where there are no ``parts``."""
    clock = time.perf_counter()
    source = make_side(*spiral(n, random_state=0))
    target = make_side(*swiss_roll(n, random_state=1))
    record: dict[str, Any] = {"n": n, "prepared": round(time.perf_counter() - clock, 2)}
    clock, busy = time.perf_counter(), time.process_time()
    if parts:
        plan = quantized(source, target, parts)
        spent = time.perf_counter() - clock, time.process_time() - busy
        best = np.asarray(plan.argmax(1)).ravel()
        sums = (np.asarray(plan.sum(axis)).ravel() for axis in (1, 0))
        record |= {"solver": "POT, quantized", "parts": parts, "value": value(source, target, plan)}
        record["marginal_error"] = max(float(np.abs(each - 1 / n).sum()) for each in sums)
    else:
        x, y = (
            torchgw.distances.FactoredDistance(
                torch.from_numpy(side.factors).to(device), torch.from_numpy(side.signs).to(device)
            )
            for side in (source, target)
        )
        found = torchgw.solve(D_X=x, D_Y=y, epsilon=EPSILON, scale=None, random_state=0)
        synchronize(torch.device(device))
        spent = time.perf_counter() - clock, time.process_time() - busy
        best = np.concatenate(
            [
                found.lazy_plan.rows(part).argmax(1).cpu()
                for part in np.array_split(np.arange(n), n // 500)
            ]
        )
        record |= {"solver": "torchgw", "device": device, "status": found.status.name}
        record |= {"value": found.value, "marginal_error": found.marginal_error}
        record["resolution"] = found.log.get("resolution")
    record |= {"seconds": round(spent[0], 2), "cpu_seconds": round(spent[1], 2)}
    rank = spearmanr(source.angle, target.angle[best]).statistic
    return record | {"spearman": round(float(abs(rank)), 6), "pot": ot.__version__}


def main(arguments: list[str] | None = None) -> int:
    """Measure each setting in a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks quantized", description=__doc__)
    parser.add_argument("--sizes", default="10000,100000")
    parser.add_argument("--parts", default="0,100,300,1000", help="0 is this package")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--memory", type=float, default=8.0, help="GB of local plans at most")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds of a setting")
    parser.add_argument("--output", type=Path, help="file that the JSON lines are added to")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    sizes, settings = (
        [int(word) for word in given.split(",")] for given in (options.sizes, options.parts)
    )
    if options.inside:
        torch.set_num_threads(1)
        print(json.dumps(measure(sizes[0], settings[0], options.device)))
        return 0
    for n in sizes:
        for parts in settings:
            line = _apart(n, parts, options)
            print(line, flush=True)
            if options.output is not None:
                with options.output.open("a") as file:
                    file.write(line + "\n")
    return 0


def _apart(n: int, parts: int, options: argparse.Namespace) -> str:
    """Measure one setting in a process, or say why not."""
    told = {"n": n, "solver": "POT, quantized" if parts else "torchgw", "parts": parts}
    needed = _LOCAL_BYTES * n**2 / parts / 1e9 if parts else 0.0
    if needed > options.memory:
        return json.dumps(told | {"error": f"local plans of {needed:.0f} GB"})
    command = [sys.executable, "-m", "benchmarks", "quantized", "--inside", "--sizes", str(n)]
    command += ["--parts", str(parts), "--device", options.device]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=options.limit
        )
    except subprocess.TimeoutExpired:
        return json.dumps(told | {"error": f"not done after {options.limit:g} s"})
    if done.returncode != 0:
        return json.dumps(told | {"error": (done.stderr.splitlines() or ["killed"])[-1]})
    return done.stdout.splitlines()[-1]
