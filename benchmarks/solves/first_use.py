"""What a new user meets, by defaults: ``python -m benchmarks first-use clusters-3000 --seeds 10``.

Each case is made from a seed and solved as the documentation says, without tuning. One line per
seed: the share that is right, whether the call said that it may be wrong, its status, and its
seconds, of the clock and of the processor. Cells are those of SNARE-seq, with ``--data``, and need
the package anndata.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr

import torchgw
from benchmarks.solves import snare
from torchgw.datasets import spiral, swiss_roll

__all__ = ["CASES", "clusters", "main", "network_pair", "rotated"]

Array = NDArray[np.float64]

_NEW_PROCESS = """
import time, torch
begin, processor = time.perf_counter(), time.process_time()
import numpy, torchgw
rng = numpy.random.default_rng({seed})
result = torchgw.solve(rng.normal(size=(100, 3)), rng.normal(size=(100, 3)))
print(result.status.name, time.perf_counter() - begin, time.process_time() - processor)
"""


class Answer(NamedTuple):
    """What came of a case."""

    right: float  # share of points, or a score where larger is better; NaN if none is known
    status: str
    seconds: float | None = None  # measured by the case itself
    cpu_seconds: float | None = None  # likewise


def clusters(
    rng: np.random.Generator, n: int, dimension: int = 20, count: int = 6, distance: float = 6.0
) -> tuple[Array, NDArray[np.int64]]:
    """Gaussian clusters of one size around random centres, and a label of each point."""
    centres = rng.normal(size=(count, dimension))
    centres *= distance / np.linalg.norm(centres, axis=1, keepdims=True)
    labels = np.arange(n) % count
    return centres[labels] + rng.normal(size=(n, dimension)), labels


def rotated(rng: np.random.Generator, points: Array, dimension: int | None = None) -> Array:
    """Points rotated into a space of some dimension, and moved."""
    wide = dimension or points.shape[1]
    basis = np.linalg.qr(rng.normal(size=(wide, wide)))[0][: points.shape[1]]
    return np.asarray(points @ basis + rng.normal(size=wide))


def network_pair(
    n: int, edges: int, extra: float, seed: int
) -> tuple[Array, Array, NDArray[np.int64]]:
    """Barabasi-Albert network, its shuffled copy with a share of extra edges, and the order."""
    rng = np.random.default_rng(seed)
    graph, ends = np.zeros((n, n)), list(range(edges))
    for node in range(edges, n):
        chosen: set[int] = set()
        while len(chosen) < edges:
            chosen.add(int(ends[rng.integers(len(ends))]))
        graph[node, list(chosen)] = graph[list(chosen), node] = 1
        ends += [*chosen, *[node] * edges]
    rng, noisy = np.random.default_rng(seed), graph.copy()
    absent = np.argwhere(np.triu(graph == 0, 1))
    for i, j in rng.choice(absent, int(extra * graph.sum() / 2), replace=False):
        noisy[i, j] = noisy[j, i] = 1
    order = rng.permutation(n)
    return graph, noisy[np.ix_(order, order)], order


def _clusters(n: int, seed: int) -> Answer:
    rng = np.random.default_rng(seed)
    points, labels = clusters(rng, n)
    order = rng.permutation(n)
    result = torchgw.solve(points, rotated(rng, points)[order], random_state=seed)
    found = labels[order][result.lazy_plan.argmax()]
    return Answer(float((found == labels).mean()), result.status.name)


def _spiral(n: int, seed: int) -> Answer:
    first, second = spiral(n, random_state=seed), swiss_roll(n, random_state=seed + 1_000)
    result = torchgw.solve(first[0], second[0], random_state=seed)
    found = second[1][result.lazy_plan.argmax()]
    return Answer(float(spearmanr(first[1], found).statistic), result.status.name)


def _network(n: int, edges: int, extra: float, seed: int) -> Answer:
    graph, copy, order = network_pair(n, edges, extra, seed)
    result = torchgw.solve(D_X=graph, D_Y=copy, regularization="proximal", random_state=0)
    found = order[result.lazy_plan.argmax()]
    return Answer(float((found == np.arange(n)).mean()), result.status.name)


def _cloud(n: int, seed: int) -> Answer:
    rng = np.random.default_rng(seed)
    sides = rng.normal(size=(n, 20)), rng.normal(size=(n, 20))
    try:
        return Answer(float("nan"), torchgw.solve(*sides, random_state=seed).status.name)
    except torchgw.UnsupportedError as error:
        return Answer(float("nan"), f"refused: {error}")


def _new_process(seed: int) -> Answer:
    # compiled files are there, as an installation leaves them, whatever the environment says
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": _compiled()}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _NEW_PROCESS.format(seed=seed)],
        check=True, capture_output=True, text=True, env=environment,
    )  # fmt: skip
    status, *seconds = done.stdout.split()
    return Answer(float("nan"), status, *map(float, seconds))


@functools.cache
def _compiled() -> str:
    """Compile what a first solve imports into a folder of this run."""
    folder = tempfile.mkdtemp(prefix="torchgw-compiled-")
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-W", "ignore", "-c", _NEW_PROCESS.format(seed=0)]
    subprocess.run(command, check=True, capture_output=True, env=environment)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _cells(data: str | None, options: dict[str, Any], seed: int) -> Answer:
    import anndata
    import pandas as pd

    import torchgw.anndata

    cells = snare.load(snare.data_path(data), seed)
    names = [f"cell {row}" for row in range(len(cells.rna))]
    rna, atac = (
        anndata.AnnData(points, pd.DataFrame({"type": pd.Categorical(types.astype(str))}, names))
        for points, types in ((cells.rna, cells.rna_type), (cells.atac, cells.atac_type))
    )
    begin = time.perf_counter()
    result = torchgw.anndata.align(atac, rna, use_rep="X", labels="type", **options)
    seconds = time.perf_counter() - begin
    score = snare.score(cells, torch.as_tensor(result.plan).double().numpy())
    status = f"{result.status.name}, FOSCTTM {score['foscttm']:.3f}"
    return Answer(score["label_accuracy"], status, seconds)


def _cases(data: str | None = None) -> dict[str, Callable[[int], Answer]]:
    """Return all cases by name, functions of a seed."""
    cases: dict[str, Callable[[int], Answer]] = {}
    for n in (400, 1_000, 3_000):
        cases[f"clusters-{n}"] = lambda seed, n=n: _clusters(n, seed)
    for n in (60, 80, 100, 120, 150):
        cases[f"spiral-{n}"] = lambda seed, n=n: _spiral(n, seed)
    for n, edges, extra in ((500, 4, 0.05), (500, 3, 0.0), (1_000, 3, 0.02)):
        name = f"network-{n}-{edges}"
        cases[name] = lambda seed, n=n, edges=edges, extra=extra: _network(n, edges, extra, seed)
    cases["cloud-10000"] = lambda seed: _cloud(10_000, seed)
    cases["new-process"] = _new_process
    cases["snare"] = lambda seed: _cells(data, {}, seed)
    cases["snare-scot"] = lambda seed: _cells(data, {"recipe": "scot"}, seed)
    return cases


CASES = tuple(_cases())


def run(name: str, case: Callable[[int], Answer], seed: int) -> dict[str, Any]:
    """Solve one case; return its record."""
    begin, processor = time.perf_counter(), time.process_time()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        answer = case(seed)
    taken = time.perf_counter() - begin, time.process_time() - processor
    given = answer.seconds, answer.cpu_seconds
    seconds, cpu = (own if one is None else one for own, one in zip(taken, given, strict=True))
    return {
        "case": name, "seed": seed, "right": round(answer.right, 4), "status": answer.status,
        "warned": sorted({warning.category.__name__ for warning in said}),
        "seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2),
        "threads": torch.get_num_threads(),
    }  # fmt: skip


def main(arguments: list[str]) -> int:
    """Solve some cases, and print a line for each seed; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks first-use", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; or all")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--data", help=f"snare.npz; or {snare.DATA_VARIABLE}")
    options = parser.parse_args(arguments)
    unknown = set(options.cases) - set(CASES)
    if unknown:
        parser.error(f"unknown cases {', '.join(sorted(unknown))}; known: {', '.join(CASES)}")
    cases = _cases(options.data)
    for name in options.cases or CASES:
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            print(json.dumps(run(name, cases[name], seed)), flush=True)
    return 0
