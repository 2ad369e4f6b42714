"""Graphs, geodesics and landmarks, stage by stage, and whole calls with their phases.

    python -m benchmarks graphs [--device cuda] [--points 1000000] [stages ...]

Each line has the seconds of a first call and of a second one, the peak of GPU memory, and the error
against SciPy or scikit-learn on a sample.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.sparse.csgraph import dijkstra
from scipy.spatial import cKDTree
from scipy.stats import spearmanr

import torchgw
from benchmarks.harness.measure import synchronize
from torchgw._boundary.arrays import to_numpy
from torchgw.datasets import spiral, swiss_roll
from torchgw.distances._graph.neighbours import nearest_others
from torchgw.distances.graph import connect, knn_graph, neighbour_geodesics
from torchgw.distances.landmark import LandmarkDistance

_SAMPLE = 1_000


def timed(device: torch.device, work: Callable[[], Any]) -> tuple[list[float], float, Any]:
    """Return the seconds of two calls, the peak of GPU memory in GiB, and what was returned."""
    seconds = []
    for _ in range(2):
        result = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        synchronize(device)
        start = time.perf_counter()
        result = work()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return seconds, peak, result


def line(name: str, seconds: list[float], peak: float, rest: str = "") -> None:
    first, second = seconds
    print(f"{name:34s} {first:8.3f} {second:8.3f} s {peak:6.2f} GiB  {rest}", flush=True)


def clouds(n: int) -> dict[str, np.ndarray]:
    """Return point sets by name."""
    rng = np.random.default_rng(0)
    return {
        "spiral": spiral(n, 0)[0],
        "Swiss roll": swiss_roll(n, 0)[0],
        "Gaussian, 3": rng.normal(size=(n, 3)),
    }


def neighbour_stage(n: int, device: torch.device) -> None:
    """Measure neighbour searches: in 3 dimensions against a tree, in 50 against tiles."""
    rng = np.random.default_rng(0)
    sample = rng.choice(n, min(n, _SAMPLE), replace=False)
    sets = {**clouds(n), "Gaussian, 50": rng.normal(size=(n, 50)).astype(np.float32)}
    for name, points in sets.items():
        tensor = torch.from_numpy(points).to(device)
        seconds, peak, found = timed(device, lambda tensor=tensor: nearest_others(tensor, 14))
        if points.shape[1] <= 3:
            exact = cKDTree(points).query(points[sample], 15, workers=-1)[0]
        else:
            at = torch.from_numpy(sample).to(device)
            tile = torch.cdist(
                tensor[at].double(), tensor.double(), compute_mode="donot_use_mm_for_euclid_dist"
            )
            exact = tile.topk(15, largest=False).values.cpu().numpy()
        error = np.abs(found.distances[sample].cpu().numpy() - exact[:, 1:]).max()
        line(f"neighbours, {name}", seconds, peak, f"largest error {error:.1e}")


def landmark_stage(n: int, device: torch.device) -> None:
    """Measure graphs, 50 columns of geodesics, and landmarks."""
    for name, points in clouds(n).items():
        tensor = torch.from_numpy(points).to(device)
        seconds, peak, graph = timed(device, lambda tensor=tensor: neighbour_geodesics(tensor))
        line(f"graph, {name}", seconds, peak, f"{len(graph.edges.vertex)} edges")
        drawn = torch.randperm(n, generator=torch.Generator().manual_seed(0))[:50].to(device)
        seconds, peak, rows = timed(device, lambda graph=graph, at=drawn: graph.reader(device)(at))
        start = time.perf_counter()
        exact = dijkstra(graph.graph, indices=drawn[:2].cpu().numpy())
        scipy = (time.perf_counter() - start) / 2
        positive = exact > 0
        error = np.abs(rows[:2].cpu().numpy()[positive] / exact[positive] - 1).max()
        line(f"50 columns, {name}", seconds, peak, f"error {error:.1e}; SciPy {scipy:.2f} s each")
        del rows
        for count in (50, None):
            seconds, peak, found = timed(
                device,
                lambda graph=graph, count=count: LandmarkDistance(graph, count, device=device),
            )
            rest = f"{len(found.landmarks)} landmarks, rank {found.rank}, error {found.error:.4f}"
            line(f"landmarks={count}, {name}", seconds, peak, rest)


def all_pairs_stage(n: int, device: torch.device) -> None:
    """Measure all-pairs geodesics of up to 10,000 points."""
    rng = np.random.default_rng(0)
    for size in (1_000, 2_000, 5_000, 10_000):
        sets = {
            "spiral": (spiral(size, 0)[0], 5),
            "Gaussian, 10": (rng.normal(size=(size, 10)), None),
            "a tenth of all edges": (rng.normal(size=(size, 3)), size // 20),
        }
        for name, (points, count) in sets.items():
            if size > n:
                continue
            graph = connect(knn_graph(points, count), points)
            seconds, peak, table = timed(device, lambda graph=graph: graph.all_pairs(device))
            exact = dijkstra(graph.graph, indices=np.arange(20))
            positive = exact > 0
            error = np.abs(table[:20].cpu().numpy()[positive] / exact[positive] - 1).max()
            line(f"all pairs, {size}, {name}", seconds, peak, f"error {error:.1e}")


def whole_stage(n: int, device: torch.device) -> None:
    """Measure whole calls from points."""
    rng = np.random.default_rng(0)
    random = rng.normal(size=(5_000, 10)), rng.normal(size=(6_000, 12))
    report("random 5,000 x 6,000", device, random, None, distances="precomputed")
    sizes = [size for size in (20_000, 100_000, 1_000_000) if size <= n]
    for size in sizes:
        (x, along_x), (y, along_y) = spiral(size, 0), swiss_roll(size, 1)
        report(f"spiral {size}", device, (x, y), (along_x, along_y), epsilon=5e-4)


def report(
    name: str,
    device: torch.device,
    pair: tuple[np.ndarray, np.ndarray],
    truth: tuple[np.ndarray, np.ndarray] | None,
    **options: Any,
) -> None:
    """Print the time of a whole call, its phases, and how good the plan is."""

    def call() -> torchgw.GWResult:
        return torchgw.solve(
            *pair, device=device, random_state=0, options=torchgw.Options(**options)
        )

    seconds, peak, result = timed(device, call)
    rest = f"value {result.value:.3e} marginals {result.marginal_error:.1e} {result.status.name}"
    if truth is not None:
        best = to_numpy(result.lazy_plan.argmax())
        rest += f" Spearman {spearmanr(truth[0], truth[1][best])[0]:+.4f}"
    line(name, seconds, peak, rest)
    print("    ", {phase: round(spent, 3) for phase, spent in result.timings.items()})
    print("    ", result.log.get("landmarks"), flush=True)


STAGES = {
    "neighbours": neighbour_stage, "landmarks": landmark_stage, "pairs": all_pairs_stage,
    "whole": whole_stage,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks graphs", description=__doc__)
    parser.add_argument("stages", nargs="*", default=[], choices=[*STAGES, []])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--points", type=int, default=1_000_000)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", torchgw.GraphWarning)
    warnings.simplefilter("ignore", torchgw.ConvergenceWarning)
    device = torch.device(options.device)
    for stage in options.stages or STAGES:
        STAGES[stage](options.points, device)
