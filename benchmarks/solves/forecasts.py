"""What solves were said to take, and took: ``python -m benchmarks forecasts``.

Seconds of a process of one thread, without those of the distances, which explaining takes, and
without what a first call of each kind imports. A
forecast, corrected by what the search says, holds where the solve takes at least half and
at most twice of it. What was in force when half of the time had passed is counted too.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import shortest_path

import torchgw
from benchmarks.quality.unseen_study import PROBLEMS
from torchgw._answer import passes
from torchgw._api import as_arguments
from torchgw._solve import pipeline, state
from torchgw._tensors import deadline, machine

Inputs = dict[str, Any]
Draw = Callable[[int, np.random.Generator], Inputs]


def _cloud(n: int, rng: np.random.Generator, d: int = 3, **options: Any) -> Inputs:
    return {"X": rng.normal(size=(n, d)), "Y": rng.normal(size=(n + n // 5, d))} | options


def _clusters(n: int, rng: np.random.Generator, **options: Any) -> Inputs:
    centres = 4 * rng.normal(size=(6, 20))
    x, y = (centres[rng.integers(6, size=n)] + rng.normal(size=(n, 20)) for _ in range(2))
    return {"X": x, "Y": y} | options


def _copies(n: int, rng: np.random.Generator) -> Inputs:
    x = rng.normal(size=(n, 3))
    return {"X": x, "Y": x + 0.05 * rng.normal(size=x.shape), "distances": "euclidean"}


def _spirals(n: int, rng: np.random.Generator) -> Inputs:
    seed = int(rng.integers(2**31))
    spiral = torchgw.datasets.spiral(n, random_state=seed)[0]
    return {"X": spiral, "Y": torchgw.datasets.swiss_roll(n, random_state=seed)[0]}


def _fused(n: int, rng: np.random.Generator, alpha: float = 0.5) -> Inputs:
    return _cloud(n, rng) | {"M": rng.random((n, n + n // 5)), "alpha": alpha}


def _groups(n: int, rng: np.random.Generator) -> Inputs:
    labels = np.arange(n) % 3
    return _copies(n, rng) | {"groups": (labels, labels)}


def _pairs(n: int, rng: np.random.Generator) -> Inputs:
    known = [(i, i) for i in range(max(2, n // 20))]
    return _copies(n, rng) | {"pairs": known}


def _tables(n: int, rng: np.random.Generator) -> Inputs:
    x, y = (np.triu(rng.random((n, n)), 1) for _ in range(2))
    return {"D_X": x + x.T, "D_Y": y + y.T}


def _graphs(n: int, rng: np.random.Generator) -> Inputs:
    """Draw a random graph, and the same reordered without a tenth of its edges."""
    edges = np.triu(rng.random((n, n)) < 6 / n, 1)
    lost = edges & (rng.random((n, n)) < 0.9)
    order = rng.permutation(n)
    x, y = (np.float64(one | one.T) for one in (edges, lost))
    return {"D_X": x, "D_Y": y[np.ix_(order, order)]}


def _hops(n: int, rng: np.random.Generator, kind: str = "growing") -> Inputs:
    """Draw hop distances of two graphs that have nothing in common."""
    import networkx

    draw = {
        "growing": partial(networkx.barabasi_albert_graph, n, 2),
        "rings": partial(networkx.watts_strogatz_graph, n, 4, 0.1),
    }[kind]
    seeds = rng.integers(2**31, size=2).tolist()
    tables = [networkx.to_numpy_array(draw(seed=seed)) for seed in seeds]
    x, y = (shortest_path(table, unweighted=True) for table in tables)
    return {"D_X": x, "D_Y": y}


def _trees(n: int, rng: np.random.Generator) -> Inputs:
    graphs = {}
    for side in "XY":
        parents = [int(rng.integers(node)) for node in range(1, n)]
        shape, rows = (np.ones(n - 1), (np.arange(1, n), parents)), (n, n)
        graphs[side] = csr_array(shape, shape=rows) + csr_array(shape, shape=rows).T
    return graphs


# Kinds of calls, with the fewest and the most points of which sizes are drawn.
KINDS: dict[str, tuple[Draw, int, int]] = {
    "cloud in 3": (_cloud, 5, 1600), "cloud in 10": (partial(_cloud, d=10), 5, 1600),
    "plane": (partial(_cloud, d=2), 5, 1000),
    "squared": (partial(_cloud, distances="sqeuclidean"), 10, 3000),
    "landmarks": (partial(_cloud, distances="landmark"), 500, 3000),
    "clusters": (_clusters, 5, 2500), "copies": (_copies, 5, 1600), "spirals": (_spirals, 20, 2500),
    "tables": (_tables, 10, 300), "graphs": (_graphs, 20, 600), "trees": (_trees, 20, 600),
    "hops": (_hops, 20, 200), "small world": (partial(_hops, kind="rings"), 20, 200),
    "fused": (_fused, 10, 1000), "fused, .9": (partial(_fused, alpha=0.9), 10, 600),
    "groups": (_groups, 10, 1000), "pairs": (_pairs, 20, 1500),
    "mass .7": (partial(_cloud, mass=0.7), 10, 600),
    "penalties": (partial(_cloud, unbalanced=0.1), 10, 600),
    "squares": (partial(_cloud, unbalanced=0.1, unbalanced_type="l2"), 10, 200),
    "absolute": (partial(_cloud, loss="absolute"), 10, 150),
    "kl": (partial(_cloud, loss="kl"), 10, 600),
    "sampled": (partial(_cloud, gradient="sampled"), 100, 1600),
    "one start": (partial(_cloud, n_init=1), 10, 3000),
    "fast": (partial(_cloud, search="fast"), 20, 3000),
    "fast clusters": (partial(_clusters, search="fast"), 20, 3000),
    "thorough": (partial(_cloud, search="thorough"), 10, 300),
    "polished": (partial(_cloud, polish=True), 10, 600),
    "proximal": (partial(_cloud, regularization="proximal"), 10, 200),
    "sharp": (partial(_cloud, epsilon=1e-3), 10, 400),
    "blurred": (partial(_cloud, epsilon=0.5), 10, 1600),
}  # fmt: skip


def _drawn(name: str, rng: np.random.Generator) -> Inputs:
    """Draw a call of a kind, of a size whose logarithm is uniform."""
    draw, fewest, most = KINDS[name]
    return draw(int(np.exp(rng.uniform(np.log(fewest), np.log(most)))), rng)


def cases() -> dict[str, Callable[[np.random.Generator], Inputs]]:
    """Name every problem, and how its inputs are drawn."""
    unseen = {
        name: (lambda rng, draw=draw: dict(draw(rng).inputs)) for name, draw in PROBLEMS.items()
    }
    return {name: partial(_drawn, name) for name in KINDS} | unseen


class _Said(logging.Handler):
    """What a solve has said last: all that it takes, from what it had taken by then."""

    def __init__(self, usual: float) -> None:
        super().__init__()
        # after so many seconds, so many were said in all, and why
        self.told: list[tuple[float, float, str]] = [(0.0, usual, "")]

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if re.match(r"forecast: .*(more|longer time), as ", message):
            self.told.append((*deadline.said_last(), message.partition(", as ")[2]))


def measured(name: str, seed: int) -> Inputs:
    """Say what one solve was said to take, and took."""
    torch.set_num_threads(1)
    # how fast the processor is, and what a solve tells itself, too, whatever else uses it
    for module in (machine, deadline, passes, pipeline, state):
        module.perf_counter = process_time  # type: ignore[attr-defined]
    given = as_arguments(cases()[name](np.random.default_rng([seed, *name.encode()])))
    logger = logging.getLogger("torchgw")
    level = logger.level
    logger.setLevel(logging.INFO)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # what a first call of a kind imports is no part of a forecast
        draw, fewest, _ = KINDS.get(name, (_cloud, 12, 0))
        small = as_arguments(draw(fewest, np.random.default_rng(0)))
        torchgw.solve(**small, random_state=0)
        start = process_time()
        route = torchgw.explain(**given, random_state=seed)
        before = process_time() - start
        usual, longer = route.seconds or (np.nan, np.nan)
        start = process_time()
        said = _Said(usual)
        logger.addHandler(said)
        result = torchgw.solve(**given, random_state=seed)
        spent = process_time() - start
        logger.removeHandler(said)
        logger.setLevel(level)
    return {
        "problem": name, "seed": seed, "size": route.size, "usual": usual, "longer": longer,
        "said": said.told[-1][1], "told": said.told,
        "seconds": spent - before,
        "gradient": route.gradient.chosen,
        "moves": [choice.what for choice in route.begin], "iterations": result.n_iters,
        "multistart": result.timings.get("multistart", 0.0),
    }  # fmt: skip


def holds(row: Inputs) -> bool:
    """Whether a forecast held within a factor of two."""
    return bool(row["said"] / 2 <= row["seconds"] <= 2 * row["said"])


def holds_by_half(row: Inputs) -> bool:
    """Whether what was in force when half of the time had passed held within a factor of two."""
    said = [total for at, total, _ in row["told"] if 2 * at <= row["seconds"]]
    return bool(said[-1] / 2 <= row["seconds"] <= 2 * said[-1])


def main(arguments: list[str] | None = None) -> int:
    """Run the study; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks forecasts", description=__doc__)
    parser.add_argument("problems", nargs="*", help="all if none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out/forecasts.jsonl"))
    options = parser.parse_args(arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    names = options.problems or list(cases())
    rows = []
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        futures = [pool.submit(measured, name, options.seed) for name in names]
        with options.out.open("w") as file:
            for future in futures:
                row = future.result()
                rows.append(row)
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(
                    f"{row['problem']:32} {row['usual']:8.3f} or {row['longer']:8.3f} s, "
                    f"{row['said']:8.3f} said, "
                    f"{row['seconds']:8.3f} taken{'' if holds(row) else '  *'}",
                    flush=True,
                )
    kept, early = (sum(map(rule, rows)) for rule in (holds, holds_by_half))
    print(f"{kept} of {len(rows)} forecasts held within a factor of two, {early} by half time")
    return 0
