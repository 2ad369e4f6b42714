"""How often a solve of random matrices ends at the best optimum known: many seeds, few runners.

``python -m benchmarks random-matrices --seeds 20`` draws each pair once, and judges every runner by
its entropic objective over the lowest of all runners and of 64 descents.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.harness import RunOptions, environment, keep
from benchmarks.quality import random_matrices
from benchmarks.quality.problems import PROBLEMS, RANDOM_MATRICES
from benchmarks.quality.solvers import SOLVERS, Request

__all__ = ["main"]

_TOLERANCE = 1e-4


def main(arguments: list[str] | None = None) -> int:
    """Run the study; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks random-matrices")
    parser.add_argument("--seeds", type=int, default=20, help="of each size, from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--sizes", default=",".join(RANDOM_MATRICES), help="comma-separated")
    parser.add_argument("--runners", default="ours,ours-64", help="comma-separated")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out/random.jsonl"))
    options = parser.parse_args(arguments)
    # one thread, as in a sweep of several jobs
    torch.set_num_threads(1)
    shared = environment(RunOptions(device="cpu"))
    runners = options.runners.split(",")
    missed: dict[str, list[str]] = {name: [] for name in runners}
    count = 0
    for seed in range(options.first, options.first + options.seeds):
        for size in options.sizes.split(","):
            row = _judged(size, seed, runners)
            count += 1
            for name in runners:
                if row["over_best"][name] > 1 + _TOLERANCE:
                    missed[name].append(f"{size} seed {seed}: {row['over_best'][name]:.4f}")
            keep(options.out, row | shared)
            shown = "  ".join(f"{name} {ratio:.5f}" for name, ratio in row["over_best"].items())
            print(f"{size} {seed:3d}  {shown}", flush=True)
    for name, found in missed.items():
        print(f"{name}: {count - len(found)} of {count} within {_TOLERANCE:g}")
        print("".join(f"  {line}\n" for line in found), end="")
    return 0


def _judged(size: str, seed: int, runners: list[str]) -> dict[str, Any]:
    """Solve a pair by every runner; return objectives over the best, and seconds."""
    instance = PROBLEMS[size].instance(seed)
    epsilon = instance.epsilon
    assert instance.answer is not None
    assert epsilon is not None
    objectives = {"descents": random_matrices.objective(instance, instance.answer, epsilon)}
    seconds = {}
    with warnings.catch_warnings():
        # of solves that end at a limit; they are judged by where they end
        warnings.simplefilter("ignore")
        for name in runners:
            solution = SOLVERS[name].run(instance, Request(seed, epsilon, "cpu", None))
            objectives[name] = random_matrices.objective(instance, solution.plan, epsilon)
            seconds[name] = solution.seconds
    best = min(objectives.values())
    ratios = {name: value / best for name, value in objectives.items()}
    return {
        "problem": size, "seed": seed, "epsilon": epsilon, "over_best": ratios,
        "objective": objectives, "seconds": seconds,
    }  # fmt: skip
