"""Large problems beside POT's quantized Gromov-Wasserstein: ``python -m benchmarks quantized``.

A spiral is matched to a Swiss roll of as many points. Both solvers get the same distances,
geodesics by landmarks, as factors, and the plans of both are valued by these. POT aligns ``parts``
representatives of each side and then the points around each, by their distances to it
(``quantized_fused_gromov_wasserstein_partitioned``: its other two functions store matrices of all
pairs). Representatives are drawn, and a point belongs to the nearest one by the graph's own paths:
factors are too coarse to tell near representatives apart, and plans by them are worse. That counts
as POT's time, as does its plan being put together. Other distances count for neither. Ours is
solved at each ``--epsilon``. POT computes on one CPU
thread here. Its local plans are dense, 16 n^2 / parts bytes in all: more than ``--memory`` GB are
not tried, and a setting that passes ``--limit`` seconds is ended. One JSON line a setting.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ot
import torch
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.csgraph import dijkstra
from scipy.stats import spearmanr

import torchgw
from benchmarks.harness.harness import tell
from benchmarks.harness.measure import synchronize
from torchgw.datasets import spiral, swiss_roll
from torchgw.distances import LandmarkDistance
from torchgw.distances.graph import neighbour_geodesics

ROOT = Path(__file__).resolve().parents[2]
# Local plans are as many as entries of a vertex, twice the parts at most; 8 bytes an entry.
_LOCAL_BYTES = 16
# Points whose partners are looked at, and entries of the plan that are computed together.
_PARTNERS, _BLOCK = 20_000, 2**28

Array = NDArray[np.float64]


class Side(NamedTuple):
    """Points of one side by factors of their distances, the largest of which is one."""

    factors: Array  # (n, r)
    signs: Array  # (r,)
    angle: Array  # (n,) place on the curve
    graph: sparse.csr_matrix | None  # of edges in units of the factors; of POT's sides alone

    def among(self, index: NDArray[np.int64]) -> Array:
        """Distances among some points, (k, k)."""
        table: Array = (self.factors[index] * self.signs) @ self.factors[index].T
        return table

    def square(self, weight: Array) -> float:
        """Compute p' D^2 p, with D^2 = sum over pairs of factors."""
        gram = self.factors.T @ (self.factors * weight[:, None])
        return float(self.signs @ gram**2 @ self.signs)


def make_side(points: Array, angle: Array, device: str, *, graph: bool) -> Side:
    """Compute the factors of the distances of one side, and its graph on the host if asked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchgw.GraphWarning)
        paths = neighbour_geodesics(torch.from_numpy(points).to(device), 10)
        distance = LandmarkDistance(paths, device=device)
    found = distance.factors()
    factors, signs = found.matrix.cpu().numpy(), found.signs.cpu().numpy().astype(float)
    longest = float(distance.maximum())
    edges = paths.graph / longest if graph else None
    return Side(factors / np.sqrt(longest), signs, angle, edges)


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
    chosen = np.sort(np.random.default_rng(seed).choice(n, parts, replace=False))
    near, _, source = dijkstra(
        side.graph, directed=False, indices=chosen, min_only=True, return_predecessors=True
    )
    nearest = np.searchsorted(chosen, source)
    order = np.argsort(nearest, kind="stable")
    cuts = np.searchsorted(nearest[order], np.arange(1, parts))
    members = np.split(order, cuts)
    return side.among(chosen), members, [near[each] for each in members]


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


def measure(
    n: int, parts: int, epsilons: list[float], resolution: Any, device: str
) -> Iterator[dict[str, Any]]:
    """Measure one setting of POT, or ours at each epsilon where there are no ``parts``."""
    clock = time.perf_counter()
    source = make_side(*spiral(n, random_state=0), device, graph=parts > 0)
    target = make_side(*swiss_roll(n, random_state=1), device, graph=parts > 0)
    record = {"n": n, "prepared": round(time.perf_counter() - clock, 2), "pot": ot.__version__}
    drawn = np.random.default_rng(2).choice(n, min(n, _PARTNERS), replace=False)
    for epsilon in epsilons:
        if parts:
            found, partners = _pots(source, target, parts)
        else:
            # a GPU compiles kernels in a first call
            for _ in range(1 + (device == "cuda")):
                found, partners = _ours(source, target, epsilon, resolution, device, drawn)
        rank = spearmanr(source.angle[drawn], target.angle[partners[drawn]]).statistic
        yield record | found | {"spearman": round(float(abs(rank)), 6)}


def _pots(source: Side, target: Side, parts: int) -> tuple[dict[str, Any], NDArray[np.int64]]:
    """Measure POT's plan; find the partner of each point."""
    clock, busy = time.perf_counter(), time.process_time()
    plan = quantized(source, target, parts)
    found = {"solver": "POT, quantized", "parts": parts, **_spent(clock, busy)}
    sums = (np.asarray(plan.sum(axis)).ravel() for axis in (1, 0))
    found["value"] = value(source, target, plan)
    found["marginal_error"] = max(float(np.abs(each - 1 / len(each)).sum()) for each in sums)
    return found, np.asarray(plan.argmax(1)).ravel()


def _ours(
    source: Side,
    target: Side,
    epsilon: float,
    resolution: Any,
    device: str,
    drawn: NDArray[np.int64],
) -> tuple[dict[str, Any], NDArray[np.int64]]:
    """Measure our plan; find the partners of the points drawn."""
    clock, busy = time.perf_counter(), time.process_time()
    x, y = (
        torchgw.distances.FactoredDistance(
            torch.from_numpy(side.factors).to(device), torch.from_numpy(side.signs).to(device)
        )
        for side in (source, target)
    )
    result = torchgw.solve(
        D_X=x, D_Y=y, epsilon=epsilon, scale=None, random_state=0,
        options=torchgw.Options(resolution=resolution),
    )  # fmt: skip
    synchronize(torch.device(device))
    found = {
        "solver": "torchgw", "device": device, "epsilon": epsilon, **_spent(clock, busy),
        "status": result.status.name, "value": result.value,
        "marginal_error": result.marginal_error, "resolution": result.log.get("resolution"),
    }  # fmt: skip
    partners = np.zeros(len(source.angle), dtype=np.int64)
    for part in np.array_split(drawn, max(1, len(drawn) * len(partners) // _BLOCK)):
        partners[part] = result.lazy_plan.rows(torch.from_numpy(part)).argmax(1).cpu()
    return found, partners


def _spent(clock: float, busy: float) -> dict[str, float]:
    seconds, cpu = time.perf_counter() - clock, time.process_time() - busy
    return {"seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2)}


def main(arguments: list[str] | None = None) -> int:
    """Measure each setting in a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks quantized", description=__doc__)
    parser.add_argument("--sizes", default="10000,100000")
    parser.add_argument("--parts", default="0,100,300,1000", help="0 is this package")
    parser.add_argument("--epsilon", default="5e-4", help="ours alone; several, with commas")
    parser.add_argument("--all-points", action="store_true", help="ours without cells")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--memory", type=float, default=8.0, help="GB of local plans at most")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds of a setting")
    parser.add_argument("--output", type=Path, help="file that the JSON lines are added to")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    sizes, counts = (
        [int(word) for word in given.split(",")] for given in (options.sizes, options.parts)
    )
    epsilons = [float(word) for word in options.epsilon.split(",")]
    if options.inside:
        torch.set_num_threads(1)
        resolution = None if options.all_points else "auto"
        for record in measure(sizes[0], counts[0], epsilons, resolution, options.device):
            tell(record, options.output)
        return 0
    for n in sizes:
        for parts in counts:
            why = _apart(n, parts, epsilons[:1] if parts else epsilons, options)
            if why is not None:
                told = {"n": n, "solver": "POT, quantized" if parts else "torchgw", "parts": parts}
                tell(told | {"error": why}, options.output)
    return 0


def _apart(n: int, parts: int, epsilons: list[float], options: argparse.Namespace) -> str | None:
    """Measure one setting in a process that tells what it finds; say why not, if it does not."""
    needed = _LOCAL_BYTES * n**2 / parts / 1e9 if parts else 0.0
    if needed > options.memory:
        return f"local plans of {needed:.0f} GB"
    command = [sys.executable, "-m", "benchmarks", "quantized", "--inside", "--sizes", str(n)]
    command += ["--parts", str(parts), "--epsilon", ",".join(map(str, epsilons))]
    command += ["--device", options.device, *["--all-points"] * options.all_points]
    if options.output is not None:
        command += ["--output", str(options.output.resolve())]
    try:
        done = subprocess.run(
            command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False,
            timeout=options.limit,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"not done after {options.limit:g} s"
    if done.returncode == 0:
        return None
    killed = done.returncode < 0
    return f"killed by signal {-done.returncode}" if killed else done.stderr.splitlines()[-1]
