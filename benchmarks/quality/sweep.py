"""Every runner on every problem and seed, each in a process of its own; one JSON line each."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from scipy.special import xlogy

from benchmarks.harness.evaluate import gw_value, made_feasible
from benchmarks.harness.harness import RunOptions, environment, keep
from benchmarks.quality.instances import Array, Index, Instance, permutation_plan
from benchmarks.quality.networks import MissingDataError, edges_kept
from benchmarks.quality.problems import PROBLEMS
from benchmarks.quality.solvers import SOLVERS, Request, default_epsilon, versions
from benchmarks.sinkhorn.linear import Unsupported

__all__ = ["SweepOptions", "attempt", "prepare", "score", "sweep"]

Record = dict[str, Any]
# Of the start of a process and the drawing of an instance, which are no part of a solve.
_DRAWING_LIMIT_S = 300.0
Task = tuple[str, str, int]  # problem, runner, seed


@dataclass(frozen=True)
class SweepOptions:
    """What the command line says."""

    device: str = "cpu"
    jobs: int = 1
    limit_s: float = 120.0  # of one solve
    peer_python: str | None = None
    commit: str | None = None


def sweep(
    problems: Iterable[str],
    runners: Iterable[str],
    seeds: Iterable[int],
    options: SweepOptions,
    output: Path,
) -> int:
    """Append the records that are not in the file yet; return how many were new.

    A record is kept as long as what it depends on is the same: the instance and epsilon, the
    versions of the package, for ours the commit. Seeds are the outer loop, so that a sweep that is
    cut short has some of every problem.
    """
    if options.jobs > 1:
        # read by BLAS when a process starts
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    shared = environment(RunOptions(device=options.device, commit=options.commit))
    known: dict[Task, list[Record]] = {}
    if output.exists():
        for line in output.read_text().splitlines():
            item = json.loads(line)
            known.setdefault((item["problem"], item["runner"], item["seed"]), []).append(item)
    tasks = [
        (problem, runner, seed) for seed in seeds for problem in problems for runner in runners
    ]
    lock, written = threading.Lock(), 0

    def one(task: Task) -> None:
        nonlocal written
        record = _in_process(task, options, shared, _done(known.get(task, []), options))
        if record is None:
            return
        with lock:
            written += 1
            keep(output, record)
            print(line_of(record), flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        # list() raises what a task raised
        list(pool.map(one, tasks))
    return written


def key_of(record: Record) -> str:
    """Return what must be the same for a record to be valid still."""
    ours = "torchgw" in record["versions"]
    parts = [record["fingerprint"], record["versions"], record["commit"] if ours else ""]
    return json.dumps(parts, sort_keys=True)


def _done(records: list[Record], options: SweepOptions) -> set[str]:
    """Return the keys of what need not be done again; a higher limit is worth another try."""
    return {
        key_of(item)
        for item in records
        if item["device"] == options.device
        and not (item["status"] == "timeout" and item["limit_s"] < options.limit_s)
    }


def _in_process(task: Task, options: SweepOptions, shared: Record, done: set[str]) -> Record | None:
    """Solve in a process that is ended at the limit; None if the record is there already."""
    context = multiprocessing.get_context("forkserver")
    # what a process imports is imported once
    context.set_forkserver_preload(["benchmarks.__main__", "ot"])
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there, task, options, shared, done))
    process.start()
    there.close()
    record = _head(task, shared)
    try:
        # first what is to be solved, then the same with what came of it
        while "status" not in record:
            limit = options.limit_s if record["fingerprint"] else _DRAWING_LIMIT_S
            if not here.poll(limit):
                record |= {"status": "timeout", "message": f"not done in {limit:g} s"}
                break
            record = here.recv()
            if key_of(record) in done:
                return None
    except EOFError:
        process.join()
        record |= {"status": "failed", "message": f"process ended with {process.exitcode}"}
    finally:
        _end(process)
        here.close()
    return record | {"limit_s": options.limit_s}


def _end(process: BaseProcess) -> None:
    """End a process and what it has started; a peer runs in a process of its own."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _work(
    parent: Connection, task: Task, options: SweepOptions, shared: Record, done: set[str]
) -> None:
    """Send what is to be solved, and, unless it has been, the record; the body of a process."""
    os.setsid()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    if options.jobs > 1:
        torch.set_num_threads(1)
    record, instance = prepare(task, shared)
    parent.send(record)
    if instance is not None and key_of(record) not in done:
        parent.send(record | attempt(task, instance, record["epsilon"], options))


def _end_with(parent: Connection) -> None:
    """End this process and what it has started once the parent, which says nothing, is gone."""
    with contextlib.suppress(EOFError, ConnectionResetError):
        parent.recv()
    os.killpg(0, signal.SIGKILL)


def _head(task: Task, shared: Record) -> Record:
    problem, runner, seed = task
    head = {"problem": problem, "runner": runner, "seed": seed, "fingerprint": ""}
    return {**head, "versions": versions(SOLVERS[runner]), **shared}


def prepare(task: Task, shared: Record) -> tuple[Record, Instance | None]:
    """Draw an instance; return what is known before it is solved. No instance without its data."""
    record = _head(task, shared)
    try:
        instance = PROBLEMS[task[0]].instance(task[2])
    except MissingDataError as error:
        return record | {"status": "unsupported", "message": str(error)}, None
    epsilon = default_epsilon(instance, shared["device"])
    product = gw_value(instance.d_x, instance.d_y, np.outer(*instance.marginals))
    record |= {"epsilon": epsilon, "product_value": product}
    record["fingerprint"] = f"{product:.6e} {epsilon:.6e}"
    if instance.answer is not None:
        record["answer"] = score(instance, instance.answer, epsilon)
    return record, instance


def attempt(task: Task, instance: Instance, epsilon: float, options: SweepOptions) -> Record:
    """Run a runner; return its scores, or why there are none."""
    name, runner, seed = task
    request = Request(seed, epsilon, options.device, options.peer_python)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            plan, seconds, says, matching = SOLVERS[runner].run(instance, request)
        except Unsupported as reason:
            return {"status": "unsupported", "message": str(reason)}
        # whatever a runner raises, here is where it is recorded as its failure
        except Exception as error:  # noqa: BLE001
            message = f"{type(error).__name__}: {str(error)[:200]}"
            return {"status": "failed", "message": message}
    if not np.isfinite(plan).all():
        return {"status": "failed", "message": "the plan is not finite", "time_s": seconds}
    found = score(instance, plan, epsilon, matching)
    return {
        "status": "ok", "success": bool(PROBLEMS[name].succeeds(found["metric"])),
        "time_s": seconds, "says": says,
        "warnings": sorted({str(item.message)[:100] for item in caught}), **found,
    }  # fmt: skip


def score(
    instance: Instance, plan: Array, epsilon: float, matching: Index | None = None
) -> dict[str, float]:
    """Return the task metric, value and entropic objective once feasible, and marginal error.

    Of a network also the edges that a one-to-one matching keeps: the solver's own, or the largest
    assignment within its plan.
    """
    a, b = instance.marginals
    feasible = made_feasible(plan, a, b)
    value = gw_value(instance.d_x, instance.d_y, feasible)
    kl = xlogy(feasible, feasible).sum() - xlogy(a, a).sum() - xlogy(b, b).sum()
    judged, found = plan, {}
    if instance.network:
        match = linear_sum_assignment(plan, maximize=True)[1] if matching is None else matching
        judged = permutation_plan(match)
        found["edges_kept"] = edges_kept(instance.d_x, instance.d_y, match)
        if instance.answer is not None:
            truth = instance.answer.argmax(1)
            found["right"] = float((match == truth).mean())
            found["right_by_arg_max"] = float((plan.argmax(1) == truth).mean())
    return {
        "metric": instance.judge(judged), "value": value, "objective": value + epsilon * float(kl),
        "marginal_error": float(max(np.abs(plan.sum(1) - a).sum(), np.abs(plan.sum(0) - b).sum())),
        **found,
    }  # fmt: skip


def line_of(record: Record) -> str:
    """Return one record as a line for the terminal."""
    head = f"{record['problem']:26s} {record['seed']:3d} {record['runner']:13s}"
    if record["status"] != "ok":
        return f"{head} {record['status']}: {record['message']}"
    mark = "+" if record["success"] else "-"
    return (
        f"{head} {mark} {record['metric']:7.4f}  value {record['value']:.4e}  objective "
        f"{record['objective']:.4e}  marginals {record['marginal_error']:.0e}  "
        f"{record['time_s']:.2f} s"
    )
