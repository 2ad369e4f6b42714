"""What solves were said to take, and took: ``python -m benchmarks forecasts``.

Seconds of a process of one thread, without those of the distances, which explaining takes. A
forecast, corrected by what the search says, holds where the solve takes at least half and
at most twice of it.
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

import torchgw
from benchmarks.quality.unseen_study import PROBLEMS
from torchgw._tensors import machine

_SIZES = (5, 12, 30, 60, 90, 130, 200, 350, 600, 1000, 1600)

Inputs = dict[str, Any]


def _cloud(n: int, rng: np.random.Generator, d: int = 3) -> Inputs:
    return {"X": rng.normal(size=(n, d)), "Y": rng.normal(size=(n + n // 5, d))}


def _relaxed(n: int, rng: np.random.Generator) -> Inputs:
    return _cloud(n, rng) | {"mass": 0.7}


def _clusters(n: int, rng: np.random.Generator) -> Inputs:
    centres = 4 * rng.normal(size=(6, 20))
    x, y = (centres[rng.integers(6, size=n)] + rng.normal(size=(n, 20)) for _ in range(2))
    return {"X": x, "Y": y}


def _copies(n: int, rng: np.random.Generator) -> Inputs:
    x = rng.normal(size=(n, 3))
    return {"X": x, "Y": x + 0.05 * rng.normal(size=x.shape), "distances": "euclidean"}


def _spirals(n: int, rng: np.random.Generator) -> Inputs:
    seed = int(rng.integers(2**31))
    spiral = torchgw.datasets.spiral(n, random_state=seed)[0]
    return {"X": spiral, "Y": torchgw.datasets.swiss_roll(n, random_state=seed)[0]}


def cases() -> dict[str, Callable[[np.random.Generator], Inputs]]:
    """Name every problem, and how its inputs are drawn."""
    sized = {
        "cloud in 3": partial(_cloud, d=3), "cloud in 10": partial(_cloud, d=10),
        "mass .7": _relaxed, "clusters": _clusters, "copies": _copies, "spirals": _spirals,
    }  # fmt: skip
    made = {f"{name}, {n}": partial(draw, n) for name, draw in sized.items() for n in _SIZES}
    unseen = {
        name: (lambda rng, draw=draw: dict(draw(rng).inputs)) for name, draw in PROBLEMS.items()
    }
    return made | unseen


class _Said(logging.Handler):
    """What a solve has said last: all that it takes, from what it had taken by then."""

    def __init__(self, usual: float, longer: float, start: float) -> None:
        super().__init__()
        self.usual, self.longer, self.start = usual, longer, start
        self.seconds, self.share, self.why = usual, 0.0, ""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        share = re.match(r"forecast: (\d+)% of the longer time, as (.*)", message)
        more = re.match(r"forecast: about (\S+) s more, as (.*)", message)
        spent = process_time() - self.start
        if share is not None:
            self.share, self.why = int(share[1]) / 100, share[2]
            self.seconds = max(self.usual, spent + self.share * self.longer)
        elif more is not None:
            self.seconds, self.why = spent + float(more[1]), more[2]


def measured(name: str, seed: int) -> Inputs:
    """Say what one solve was said to take, and took."""
    torch.set_num_threads(1)
    # how fast the processor is, too, whatever else uses it
    machine.perf_counter = process_time  # type: ignore[attr-defined]
    given = cases()[name](np.random.default_rng([seed, *name.encode()]))
    logger = logging.getLogger("torchgw")
    level = logger.level
    logger.setLevel(logging.INFO)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start = process_time()
        route = torchgw.explain(**given, random_state=seed)
        before = process_time() - start
        usual, longer = route.seconds or (np.nan, np.nan)
        start = process_time()
        said = _Said(usual, longer, start + before)
        logger.addHandler(said)
        result = torchgw.solve(**given, random_state=seed)
        spent = process_time() - start
        logger.removeHandler(said)
        logger.setLevel(level)
    return {
        "problem": name, "seed": seed, "size": route.size, "usual": usual, "longer": longer,
        "said": said.seconds, "share": said.share, "why": said.why,
        "seconds": spent - before,
        "gradient": route.gradient.chosen,
        "moves": [choice.what for choice in route.begin], "iterations": result.n_iters,
        "multistart": result.timings.get("multistart", 0.0),
    }  # fmt: skip


def holds(row: Inputs) -> bool:
    """Whether a forecast held within a factor of two."""
    return bool(row["said"] / 2 <= row["seconds"] <= 2 * row["said"])


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
    kept = sum(map(holds, rows))
    print(f"{kept} of {len(rows)} forecasts held within a factor of two")
    return 0
