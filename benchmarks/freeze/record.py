"""What the problems come to, a short line each, and the file that keeps it."""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import platform
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import numpy as np
import ot
import scipy
import torch

import torchgw
import torchgw.pot
from benchmarks.freeze.cases import Problem, problems
from benchmarks.harness.harness import commit, cpu_model, finite, processor

__all__ = ["Row", "attempt", "attempt_all", "environment", "one_thread", "read", "write"]

Row = dict[str, Any]
# What POT's logs call the value of a plan.
_VALUES = ("fugw_cost", "ucoot_cost", "value", "loss")


class Found(NamedTuple):
    """What a call came to."""

    value: float
    objective: float
    status: str
    arrays: tuple[Any, ...]  # of which the bits are compared


def found_in(returned: Any) -> Found:
    """Read what a call returns."""
    if isinstance(returned, torchgw.GWResult):
        numbers = returned.value, returned.report.objective
        return Found(*numbers, returned.status.name, (returned.plan, *returned.potentials))
    if isinstance(returned, torchgw.BatchResult):
        ended = Counter(status.name for status in returned.statuses)
        status = " ".join(f"{name}*{count}" for name, count in sorted(ended.items()))
        numbers = float(returned.value.sum()), float(returned.objective.sum())
        return Found(*numbers, status, (returned.entries,))
    if isinstance(returned, torchgw.LowRankResult):
        plan = returned.lazy_plan
        status = "converged" if returned.converged else "not converged"
        return Found(returned.value, returned.history[-1], status, (plan.Q, plan.R, plan.g))
    if isinstance(returned, torchgw.BarycenterResult):
        status = "converged" if returned.converged else "not converged"
        plans = [result.plan for result in returned.results]
        return Found(returned.value, returned.value, status, tuple(plans))
    if isinstance(returned, ot.utils.OTResult):
        # of a function of POT's, which keeps no status
        value = float(np.sum(returned.value))
        return Found(value, value, "", (returned.plan,))
    if isinstance(returned, torchgw.pot.OTResult):
        value = float(np.sum(returned.value))
        return Found(value, value, returned.status.name, (returned.plan,))
    if isinstance(returned, tuple) and isinstance(
        returned[0], torchgw.GWResult | torchgw.BatchResult
    ):
        # beside derivatives, of which the value tells the length
        found = found_in(returned[0])
        slopes = [slope for slope in returned[1] if slope is not None]
        return found._replace(value=_length(slopes), arrays=(*found.arrays, *slopes))
    return _found_by_pot(returned)


def _found_by_pot(returned: Any) -> Found:
    """Read arrays, and the value in a log if there is one, otherwise the length of the arrays."""
    parts = returned if isinstance(returned, tuple) else (returned,)
    arrays = tuple(part for part in parts if not isinstance(part, dict))
    log = parts[-1] if isinstance(parts[-1], dict) else {}
    names = [name for name in log if name.endswith("gw_dist")] + [*_VALUES]
    known = next((log[name] for name in names if name in log), _length(arrays))
    value = float(np.ravel(known)[-1])
    return Found(value, value, "", arrays)


def _length(arrays: Iterable[Any]) -> float:
    return math.sqrt(sum(float((_doubles(array) ** 2).sum()) for array in arrays))


def _doubles(array: Any) -> Any:
    if isinstance(array, torch.Tensor):
        array = array.detach().cpu().numpy()
    if hasattr(array, "toarray"):
        array = array.toarray()
    if isinstance(array, (list, tuple)):
        array = np.concatenate([_doubles(part).ravel() for part in array])
    return np.ascontiguousarray(array, dtype=np.float64)


def _bits(arrays: Iterable[Any]) -> str:
    """Return the first 16 digits of SHA-256 of the float64 bytes of arrays."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(_doubles(array).tobytes())
    return digest.hexdigest()[:16]


def attempt(problem: Problem, device: str = "cpu") -> Row:
    """Solve a problem and say what it came to; errors are a status."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        begin = process_time()
        try:
            call = problem.call(device)
            # the unseen suite has input that is itself solved for
            said.clear()
            begin = process_time()
            found = found_in(call())
        except torchgw.TorchGWError as error:
            found = Found(math.nan, math.nan, type(error).__name__, ())
        except Exception as error:  # noqa: BLE001 - what crashes is a difference to be shown
            found = Found(math.nan, math.nan, f"crash: {type(error).__name__}", ())
        seconds = process_time() - begin
    row = {
        "problem": problem.name, "value": found.value, "objective": found.objective,
        "status": found.status, "said": sorted({warning.category.__name__ for warning in said}),
        "s": round(seconds, 3),
    }  # fmt: skip
    if problem.single and found.arrays:
        row["bits"] = _bits(found.arrays)
    # as they are read from a file: what is no number is None
    return finite(row)


def _attempt(task: tuple[str, str]) -> Row:
    """Solve a problem by its name, in a process of a pool."""
    name, device = task
    return attempt(problems()[name], device)


def attempt_all(
    names: list[str], device: str, jobs: int, threads: int = 1, variables: Row | None = None
) -> Iterator[Row]:
    """Solve problems in fresh processes, yield what each came to as soon as it is known.

    Variables of the environment choose instructions, and are read when a process begins.
    """
    fresh = {"OMP_NUM_THREADS": str(threads), "POT_BACKEND_DISABLE_JAX": "1"} | (variables or {})
    with _environ(fresh):
        context = multiprocessing.get_context("spawn")
        with context.Pool(jobs, torch.set_num_threads, (threads,)) as pool:
            yield from pool.imap_unordered(_attempt, [(name, device) for name in names])


@contextmanager
def _environ(fresh: dict[str, str]) -> Iterator[None]:
    kept = dict(os.environ)
    os.environ.update(fresh)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread, as what was recorded was."""
    kept = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(kept)


_ASKED = "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "OPENBLAS_CORETYPE"


def environment(device: str = "cpu") -> Row:
    """Return what bits depend on besides the code."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "cpu": cpu_model(),
        "processor": processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        # what asks libraries for the instructions of other processors
        "asked": " ".join(f"{name}={os.environ[name]}" for name in _ASKED if name in os.environ),
    }


def write(path: Path, rows: list[Row], device: str) -> None:
    """Write what was found: the environment, then a line for each problem in its order."""
    place = {name: number for number, name in enumerate(problems())}
    rows = sorted(rows, key=lambda row: place[row["problem"]])
    lines = [environment(device) | {"commit": commit()}, *rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = (json.dumps(line, separators=(",", ":"), allow_nan=False) for line in lines)
    path.write_text("\n".join(text) + "\n", encoding="utf-8")


def read(path: Path) -> tuple[Row, dict[str, Row]]:
    """Return the environment of a file, and its rows by problem."""
    head, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return head, {row["problem"]: row for row in rows}
