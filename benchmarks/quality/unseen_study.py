"""What the defaults make of problems that nobody tuned on: ``python -m benchmarks unseen``.

Each instance is solved by defaults, and again in other ways: more starts, a thorough search, from
the truth where one is known, and by POT from the product plan and from the truth. The lowest
objective of all, at the same epsilon and of exact marginals, is the best known. A solve that ends
more than 1% above it and has not said that it may be wrong is silent.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch

import torchgw
from benchmarks.harness.harness import RunOptions, environment, keep
from benchmarks.quality.communities import COMMUNITIES, PATHS
from benchmarks.quality.instances import Array, Instance
from benchmarks.quality.random_matrices import objective
from benchmarks.quality.small import SMALL
from benchmarks.quality.unseen import KEPT_ASIDE, LOOKED_AT

__all__ = ["PROBLEMS", "main"]

Row = dict[str, Any]
PROBLEMS = LOOKED_AT | KEPT_ASIDE | SMALL | COMMUNITIES | PATHS
# How far above the best known an objective may be.
_CLOSE = 1.01
# Its own limits are 1,000 iterations and 1e-9.
_POT = {"loss_fun": "square_loss", "tol": 1e-7, "max_iter": 300, "numItermax": 1_000}


def main(arguments: list[str] | None = None) -> int:
    """Run the study; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks unseen", description=__doc__)
    parser.add_argument("problems", nargs="*", metavar="PROBLEM", help="all looked at if none")
    kind = parser.add_mutually_exclusive_group()
    for flag, some, what in (
        ("--kept-aside", KEPT_ASIDE, "those kept aside"),
        ("--small", SMALL, "small ones"),
        ("--communities", COMMUNITIES, "graphs of communities"),
        ("--paths", PATHS, "shortest paths in graphs"),
    ):
        kind.add_argument(
            flag, dest="asked", action="store_const", const=some, help=f"{what}, if none named"
        )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--known", type=Path, help="take the best known from this file's rows")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out/unseen.jsonl"))
    options = parser.parse_args(arguments)
    names = options.problems or list(options.asked or LOOKED_AT)
    unknown = set(names) - set(PROBLEMS)
    if unknown:
        parser.error(f"unknown problems {sorted(unknown)}; known: {', '.join(PROBLEMS)}")
    torch.set_num_threads(1)
    shared = environment(RunOptions(device="cpu"))
    known = {}
    if options.known:
        rows = [json.loads(line) for line in options.known.read_text().splitlines()]
        known = {(row["problem"], row["seed"]): row["others"] for row in rows}
    found = []
    for name in names:
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            instance = PROBLEMS[name](np.random.default_rng([seed, *name.encode()]))
            row = _judged(name, seed, instance, known.get((name, seed)))
            row["kept_aside"] = name in KEPT_ASIDE
            found.append(row)
            keep(options.out, row | shared)
            print(_line(row), flush=True)
    print(_summary(found))
    return 0


def _judged(name: str, seed: int, instance: Instance, others: Row | None) -> Row:
    """Solve an instance by defaults and, unless that is known, in other ways."""
    row, result = _by_defaults(instance, seed)
    if others is None:
        others = _in_other_ways(instance, seed, result.epsilon)
    best = min(row["objective"], *(other["objective"] for other in others.values()))
    row["over_best"] = row["objective"] / best
    row["silent"] = row["over_best"] > _CLOSE and not row["said"]
    return {"problem": name, "seed": seed, "n": len(instance.d_x), **row, "others": others}


def _by_defaults(instance: Instance, seed: int) -> tuple[Row, torchgw.GWResult]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        begin = process_time()
        result = torchgw.solve(**instance.inputs, random_state=seed)
        seconds = process_time() - begin
    plan = np.asarray(result.plan, dtype=np.float64)
    names = {warning.category.__name__ for warning in caught}
    doubts = {"ConvergenceWarning", "SearchWarning", "AmbiguityWarning"}
    row = {
        "status": result.status.name, "said": sorted(names & doubts), "ambiguity": result.ambiguity,
        "distances": (result.report.distances or {}).get("chosen", ""), "value": result.value,
        "epsilon": result.epsilon, "objective": objective(instance, plan, result.epsilon),
        "right": instance.judge(plan), "iterations": result.n_iters, "cpu_s": round(seconds, 2),
    }  # fmt: skip
    return row, result


def _in_other_ways(instance: Instance, seed: int, epsilon: float) -> Row:
    """Return objective, share right and CPU seconds of other ways to solve."""
    a, b = instance.marginals
    mine = {"D_X": instance.d_x, "D_Y": instance.d_y, "epsilon": epsilon, "random_state": seed}
    if instance.weights is not None:
        mine |= {"a": a, "b": b}
    ways: dict[str, Any] = {
        "n_init=64": lambda: torchgw.solve(**mine, n_init=64).plan,
        "thorough": lambda: torchgw.solve(**mine, search="thorough").plan,
        "POT": lambda: _pot(instance, epsilon, None),
    }
    if instance.answer is not None:
        ways["truth"] = lambda: torchgw.solve(**mine, init=instance.answer).plan
        ways["POT, truth"] = lambda: _pot(instance, epsilon, instance.answer)
    found = {}
    with warnings.catch_warnings():
        # solves that end at a limit are judged by where they end
        warnings.simplefilter("ignore")
        for name, solve in ways.items():
            begin = process_time()
            plan = np.asarray(solve(), dtype=np.float64)
            seconds = round(process_time() - begin, 2)
            found[name] = {
                "objective": objective(instance, plan, epsilon) if np.isfinite(plan).all() else 1e9,
                "right": instance.judge(plan),
                "cpu_s": seconds,
            }
    return found


def _pot(instance: Instance, epsilon: float, start: Array | None) -> Array:
    import ot

    plan = ot.gromov.entropic_gromov_wasserstein(
        instance.d_x, instance.d_y, *instance.marginals, epsilon=epsilon, G0=start, **_POT
    )
    return np.asarray(plan)


def _line(row: Row) -> str:
    others = {name: other["objective"] / row["objective"] for name, other in row["others"].items()}
    shown = "  ".join(f"{name} {ratio:.3f}" for name, ratio in others.items())
    said = ",".join(name.removesuffix("Warning") for name in row["said"])
    return (
        f"{row['problem']:20s} {row['seed']:2d} {row['n']:4d} {row['distances'] or '-':9s} "
        f"{row['status']:12s} {row['over_best']:7.4f} {'SILENT' if row['silent'] else said:8s} "
        f"right {row['right']:.2f} amb {row['ambiguity']:.2f} {row['iterations']:3d} it "
        f"{row['cpu_s']:6.2f} s | {shown}"
    )


def _summary(rows: list[Row]) -> str:
    above = [row for row in rows if row["over_best"] > _CLOSE]
    silent = sum(row["silent"] for row in above)
    falsely = sum(bool(row["said"]) for row in rows) - (len(above) - silent)
    return (
        f"{len(rows)} solves; {len(above)} more than 1% above the best known, {silent} of them "
        f"silent; {falsely} said that they may be wrong and were not; CPU seconds: median "
        f"{np.median([row['cpu_s'] for row in rows]):.2f}, most {max(r['cpu_s'] for r in rows):.2f}"
    )
