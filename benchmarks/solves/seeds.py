"""How often the right optimum is found: ``python -m benchmarks seeds 400x500 --seeds 100``.

For each seed a new spiral and Swiss roll, solved with each kind of distances and gradient by
default arguments. One line per kind: how many reach a signed Spearman correlation of 0.998, how
many a value within 1% of the best known, how many an objective that near, and the worst of each.
Values are those of exact geodesics, after rounding to uniform marginals; the objective, which is
what a solve minimises, adds epsilon KL(P | a x b) of the rounded plan. The best known of either is
the least of all kinds and of a solve from the true matching.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

import torchgw
from benchmarks.harness.harness import keep
from torchgw._boundary.arrays import to_numpy
from torchgw._plans.transport import round_to_marginals
from torchgw.datasets import spiral, swiss_roll
from torchgw.distances import connect, knn_graph

__all__ = ["KINDS", "run_seed", "summarise"]

KINDS: dict[str, dict[str, str]] = {
    "precomputed": {"distances": "precomputed"},
    "landmark": {"distances": "landmark"},
    "dijkstra": {"distances": "dijkstra"},
    "dijkstra, sampled": {"distances": "dijkstra", "gradient": "sampled"},
    "precomputed, sampled": {"distances": "precomputed", "gradient": "sampled"},
    "landmark, sampled": {"distances": "landmark", "gradient": "sampled"},
}
_SPEARMAN = 0.998
_NEAR = 1.01


def run_seed(
    n: int, m: int, seed: int, kinds: list[str], device: str, *, epsilon: float, n_init: int | None
) -> list[dict[str, Any]]:
    """Solve the problem of a seed by each kind, and from the true matching; return the scores."""
    torch.set_num_threads(1)
    x, angle_x = spiral(n, seed)
    y, angle_y = swiss_roll(m, seed + 10_000)
    where = torch.device(device)
    records = []
    with warnings.catch_warnings():
        # some noisy curves fall into pieces, and sampled solves end at their noise
        warnings.simplefilter("ignore")
        graphs = [connect(knn_graph(torch.from_numpy(p), 5), torch.from_numpy(p)) for p in (x, y)]
        tables = [graph.reader(where)(torch.arange(graph.n, device=where)) for graph in graphs]
        tables = [(table / table.max()).double() for table in tables]
        truth = np.searchsorted(angle_y, angle_x).clip(0, m - 1)
        points = [torch.as_tensor(p, device=where) for p in (x, y)]
        for kind in ["truth", *kinds]:
            options: dict[str, Any] = dict(KINDS.get(kind, {}))
            if kind == "truth":
                options |= {"D_X": tables[0], "D_Y": tables[1], "init": truth}
            else:
                options |= {"X": points[0], "Y": points[1], "n_neighbors": 5, "n_init": n_init}
            begin = time.perf_counter()
            try:
                result = torchgw.solve(epsilon=epsilon, random_state=seed, **options)
            except torchgw.TorchGWError as error:
                records.append(_failure(seed, kind, error, time.perf_counter() - begin))
                continue
            seconds = time.perf_counter() - begin
            matched = angle_y[to_numpy(result.lazy_plan.argmax())]
            value, divergence = _score(tables, torch.as_tensor(result.plan).double())
            records.append(
                {
                    "seed": seed,
                    "kind": kind,
                    "spearman": float(spearmanr(angle_x, matched).statistic),
                    "value": value,
                    "objective": value + epsilon * divergence,
                    "ambiguity": result.ambiguity,
                    "status": result.status.name,
                    "seconds": seconds,
                }
            )
    return records


def _failure(seed: int, kind: str, error: Exception, seconds: float) -> dict[str, Any]:
    """Return the scores of a solve that gave no plan."""
    worst = dict.fromkeys(("value", "objective"), float("inf"))
    scores = {"spearman": -1.0, **worst, "ambiguity": float("nan")}
    return {"seed": seed, "kind": kind, **scores, "status": repr(error), "seconds": seconds}


def _score(tables: list[torch.Tensor], plan: torch.Tensor) -> tuple[float, float]:
    """Return the value and the KL(P | a x b) of a plan P rounded to uniform marginals."""
    n, m = plan.shape
    a, b = (plan.new_full((size,), 1 / size) for size in (n, m))
    plan = round_to_marginals(plan, a, b)
    square = a @ tables[0].square() @ a + b @ tables[1].square() @ b
    value = square - 2 * ((tables[0] @ plan) @ tables[1] * plan).sum()
    return float(value), float(torch.xlogy(plan, plan * (n * m)).sum())


def summarise(records: list[dict[str, Any]]) -> Iterator[str]:
    """Yield one line per kind."""
    scores = ("value", "objective")
    best = {
        (score, seed): min(record[score] for record in records if record["seed"] == seed)
        for score in scores
        for seed in {record["seed"] for record in records}
    }
    for kind in dict.fromkeys(record["kind"] for record in records):
        mine = [record for record in records if record["kind"] == kind]
        correlations = np.array([record["spearman"] for record in mine])
        line = (
            f"{kind:22s} Spearman >= {_SPEARMAN}: {(correlations >= _SPEARMAN).sum():3d} of "
            f"{len(mine)} (least {correlations.min():+.4f})"
        )
        for score in scores:
            ratios = np.array([record[score] / best[score, record["seed"]] for record in mine])
            line += (
                f"  {score} within 1%: {(ratios <= _NEAR).sum():3d} (median "
                f"{np.median(ratios):.4f}, worst {ratios.max():.3f})"
            )
        yield f"{line}  {np.median([record['seconds'] for record in mine]):.3f} s"


def main(arguments: list[str] | None = None) -> None:
    """Run all seeds and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks seeds", description=__doc__)
    parser.add_argument("size", help="for example 400x500")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--kinds", default=",".join(KINDS).replace(", ", "+"),
                        help="of those above, a comma between two, + for ', '")  # fmt: skip
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--epsilon", type=float, default=5e-4)
    parser.add_argument("--n-init", type=int, default=None, help="1 is a single start")
    parser.add_argument("--output", type=Path, help="append the records here as JSON lines")
    options = parser.parse_args(arguments)
    n, m = (int(part) for part in options.size.split("x"))
    kinds = [kind.replace("+", ", ") for kind in options.kinds.split(",")]
    seeds = range(options.first, options.first + options.seeds)
    work = [(n, m, seed, kinds, options.device, options.epsilon, options.n_init) for seed in seeds]
    records = []
    with ExitStack() as stack:
        run: Any = map
        if options.jobs > 1:
            context = get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(options.jobs, mp_context=context))
            run = pool.map
        for batch in run(_run, work):
            records += batch
            # one seed after the other: what is cut off keeps what it has
            keep(options.output, *batch)
    print(f"{options.size}, {options.seeds} seeds, epsilon {options.epsilon:g}, {options.device}")
    print("\n".join(summarise(records)), flush=True)


def _run(item: tuple[Any, ...]) -> list[dict[str, Any]]:
    n, m, seed, kinds, device, epsilon, n_init = item
    return run_seed(n, m, seed, kinds, device, epsilon=epsilon, n_init=n_init)
