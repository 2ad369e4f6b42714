"""Families like nine of those that no default was tuned on when they were drawn (L1400, L1403).

``python -m benchmarks heldout``: each problem is solved by defaults, from the truth where one is
known, from random starts and with its sides swapped, at the same epsilon. One line of JSON each.
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse.csgraph import shortest_path
from scipy.spatial import Delaunay
from scipy.spatial.distance import cdist

import torchgw
from benchmarks.harness.harness import tell

__all__ = ["FAMILIES", "main"]

Generator = np.random.Generator
Array = np.ndarray[Any, Any]


class Drawn(NamedTuple):
    """Two spaces, the match that they were made with, if there is one, and options."""

    x: Array
    y: Array
    truth: Array | None = None  # the partner of each point of x, or a plan
    options: dict[str, Any] = {}


def _turn(g: Generator, d: int) -> Array:
    return np.linalg.qr(g.normal(size=(d, d)))[0]


def _paths(points: Array, k: int = 8) -> Array:
    """Measure along a neighbour graph; what is not joined is half as far again as the farthest."""
    table = cdist(points, points)
    graph = np.zeros_like(table)
    for i, row in enumerate(table):
        near = row.argsort()[1 : k + 1]
        graph[i, near] = row[near]
    found = shortest_path(np.maximum(graph, graph.T), directed=False)
    return np.where(np.isinf(found), 1.5 * found[np.isfinite(found)].max(), found)


def _shuffled(g: Generator, x: Array, y: Array) -> Drawn:
    """Reorder y, whose points are copies of those of x."""
    order = g.permutation(len(y))
    return Drawn(x / x.max(), (y / y.max())[order][:, order], order.argsort())


def clusters(g: Generator, n: int) -> Drawn:
    """Draw clusters of other shares in twenty dimensions."""
    centres, first = 4 * g.normal(size=(6, 20)), g.integers(0, 6, n)
    second = g.integers(0, 6, n + n // 5)
    x, y = (centres[label] + g.normal(size=(len(label), 20)) for label in (first, second))
    return Drawn(x, y @ _turn(g, 20))


def limbs(g: Generator, n: int) -> Drawn:
    """Draw bodies of five limbs of like lengths in two poses."""
    length, ways = 1 + 0.15 * g.normal(size=5), g.normal(size=(5, 3))
    ways /= np.linalg.norm(ways, axis=1)[:, None]
    limb, place, base = g.integers(0, 5, n), g.uniform(0, 1, n), 0.08 * g.normal(size=(n, 3))
    other = ways + 0.5 * g.normal(size=(5, 3))
    other /= np.linalg.norm(other, axis=1)[:, None]
    far = (length[limb] * place)[:, None]
    return _shuffled(g, *(_paths(far * way[limb] + base) for way in (ways, other)))


def overlap(g: Generator, n: int) -> Drawn:
    """Cut two windows out of one cloud; the share that both have is the mass."""
    points = g.uniform(size=(3 * n, 2))
    left, right = points[points[:, 0] < 0.6][:n], points[points[:, 0] > 0.25][: n + 5]
    same = cdist(left, right) < 1e-12
    larger = max(len(left), len(right))
    seen = 2 * right @ _turn(g, 2) + 0.01 * g.normal(size=right.shape)
    return Drawn(2 * left, seen, same / larger, {"mass": float(min(same.sum() / larger, 0.95))})


def penalties(g: Generator, n: int) -> Drawn:
    """Draw clusters of other shares whose marginals are penalised."""
    centres = 3 * g.normal(size=(8, 3))
    sides = [centres[g.choice(8, n, p=g.dirichlet(np.ones(8)))] for _ in range(2)]
    x, y = (
        cdist(side, side) for side in (part + 0.4 * g.normal(size=part.shape) for part in sides)
    )
    return Drawn(x / x.max(), y / y.max(), None, {"unbalanced": 0.05})


def roads(g: Generator, n: int) -> Drawn:
    """Draw a planar graph, and the same without a twentieth of its edges."""
    triangles = Delaunay(g.uniform(size=(n, 2))).simplices
    edges = np.unique(np.sort(triangles[:, [0, 1, 1, 2, 0, 2]].reshape(-1, 2), axis=1), axis=0)
    edges = edges[g.random(len(edges)) < 0.55]
    tables = []
    for some in (edges, edges[g.random(len(edges)) > 0.05]):
        table = np.zeros((n, n))
        table[some[:, 0], some[:, 1]] = table[some[:, 1], some[:, 0]] = 1
        tables.append(table)
    return _shuffled(g, *tables)


def representations(g: Generator, n: int) -> Drawn:
    """Draw two noisy representations of the same things, by correlation."""
    things = g.normal(size=(n, 8)) * np.exp(-0.3 * np.arange(8))
    seen = (np.tanh(things @ g.normal(size=(8, d))) + 0.5 * g.normal(size=(n, d)) for d in (40, 50))
    return _shuffled(g, *(1 - np.corrcoef(part) for part in seen))


def coils(g: Generator, n: int) -> Drawn:
    """Draw a random walk in space, and one whose steps are turned a little."""
    steps = g.normal(size=(n, 3))
    walks = []
    for some in (steps, steps + 0.4 * g.normal(size=(n, 3))):
        walk = (some / np.linalg.norm(some, axis=1)[:, None]).cumsum(0)
        walks.append(cdist(walk, walk))
    return _shuffled(g, *walks)


def tables(g: Generator, n: int) -> Drawn:
    """Draw symmetric tables without structure."""
    drawn = [np.abs(g.normal(size=(size, size))) for size in (n, n + 4)]
    x, y = ((part + part.T) / 2 * (1 - np.eye(len(part))) for part in drawn)
    return Drawn(x, y)


def unrelated(g: Generator, n: int) -> Drawn:
    """Draw clouds that have nothing in common."""
    x, y = (cdist(part, part) for part in (g.normal(size=(n, 3)), g.normal(size=(n + n // 3, 4))))
    return Drawn(x / x.max(), y / y.max())


FAMILIES = {
    draw.__name__: draw
    for draw in (
        clusters, limbs, overlap, penalties, roads, representations, coils, tables, unrelated,
    )
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run the suite; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks heldout", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="all if none")
    parser.add_argument("--points", type=int, nargs="*", default=[24, 40])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--starts", type=int, default=3, help="random starts beside the defaults")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out/heldout.jsonl"))
    asked = parser.parse_args(arguments)
    seeds = range(asked.first_seed, asked.first_seed + asked.seeds)
    for name, n, seed in itertools.product(asked.families or FAMILIES, asked.points, seeds):
        row = _judged(name, n, seed, asked.starts)
        tell({"family": name, "n": n, "seed": seed} | row, asked.out)
    return 0


def _judged(name: str, n: int, seed: int, starts: int) -> dict[str, Any]:
    """Solve one problem by defaults and in other ways."""
    g = np.random.default_rng([seed, n, list(FAMILIES).index(name)])
    x, y, truth, options = FAMILIES[name](g, n)
    found, seconds = _solved(x, y, **options)
    shape, mass = found.plan.shape, options.get("mass", 1.0)
    plans = {f"random {k}": _random_plan(g, shape) for k in range(starts)}
    if truth is not None:
        plans["truth"] = truth if truth.ndim == 2 else np.eye(shape[1])[truth] / shape[0]
    ends = {}
    for start, plan in plans.items():
        given = options | {"epsilon": found.epsilon, "init": plan / plan.sum() * mass}
        ends[start] = _solved(x, y, **given)[0].report.objective
    ends["swapped"] = _solved(y, x, epsilon=found.epsilon, **options)[0].report.objective
    least = min(ends, key=ends.__getitem__)
    own = found.report.objective
    return {
        "objective": own, "least": ends[least], "by": least,
        "above": (own - ends[least]) / abs(ends[least]), "cpu_s": seconds,
        "said": bool(found.doubt) or bool(found.is_ambiguous),
    }  # fmt: skip


def _solved(x: Array, y: Array, **options: Any) -> tuple[Any, float]:
    """Solve, by tables if both sides are square; return the seconds of a CPU too."""
    names = ("D_X", "D_Y") if len(x) == x.shape[1] else ("X", "Y")
    clock = process_time()
    with warnings.catch_warnings():
        # the row tells what they say
        warnings.simplefilter("ignore")
        found = torchgw.solve(**dict(zip(names, (x, y), strict=True)), **options)
    return found, process_time() - clock


def _random_plan(g: Generator, shape: tuple[int, int]) -> Array:
    """Draw a plan of equal weights, half of it a random matching."""
    n, m = shape
    size = max(n, m)
    plan = np.zeros(shape)
    plan[np.arange(size) % n, g.permutation(size) % m] = 1
    for _ in range(50):
        plan /= n * plan.sum(1, keepdims=True).clip(1e-300)
        plan /= m * plan.sum(0).clip(1e-300)
    return plan / 2 + 1 / (2 * n * m)
