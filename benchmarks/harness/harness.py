"""Runs every runner on every problem in its own process and writes one JSON line for each."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness.evaluate import Evaluator, combine
from benchmarks.harness.registry import PROBLEMS, GWProblem, Problem, make_clouds
from benchmarks.harness.runners import RUNNERS, Runner

__all__ = ["PEER_PYTHON", "RunOptions", "gate", "measure_all"]

ROOT = Path(__file__).resolve().parents[2]
# Command that starts an interpreter with torchgw 0.4.2; "env PYTHONPATH=... python" is one, too.
PEER_PYTHON = "TORCHGW_PEER_PYTHON"
# What must be green before a speed is recorded: the solver's laws, in well under a minute.
_GATE = ("test_sinkhorn.py", "test_gradient.py", "test_plan.py", "test_solve.py")
_GATE_CUDA = "test_triton*.py"
# Repeats whose plan is evaluated: all that are likely of a small problem, one of a large one.
_EVALUATIONS, _SMALL_ENTRIES = 5, 1_000_000


@dataclass(frozen=True)
class RunOptions:
    """What the command line says."""

    device: str = "cpu"
    repeat: int = 10
    budget_s: float = 120.0  # of repeats of one runner; none is begun after it
    timeout_s: float = 1800.0  # of one runner's process
    peer_python: str | None = None
    commit: str | None = None


def gate(device: str) -> str | None:
    """Run the solver's fast tests; return ``None`` if they are green, otherwise what is not.

    The files run side by side, on as many cores as there are.
    """
    files = [path for name in _GATE for path in sorted((ROOT / "tests").rglob(name))]
    marker = "not slow and not gpu and not dist"
    if device == "cuda":
        files += sorted((ROOT / "tests").rglob(_GATE_CUDA))
        marker = "not slow and not dist"
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        failures = list(pool.map(lambda file: _red(file, marker), files))
    return next((failure for failure in failures if failure is not None), None)


def _red(file: Path, marker: str) -> str | None:
    """Return the end of what pytest says of a file that is not green."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", marker, str(file)]
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    # 5: all tests of the file are for another device
    if done.returncode in (0, 5):
        return None
    return "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])


def measure_all(
    problems: list[str], runners: list[str], options: RunOptions, output: Path
) -> list[dict[str, Any]]:
    """Measure, evaluate, print and append one record for each problem and runner."""
    shared = environment(options)
    records = []
    for name in problems:
        problem = PROBLEMS[name]
        evaluator = Evaluator(problem)
        for runner in (RUNNERS[runner] for runner in runners):
            if problem.kind not in runner.kinds:
                continue
            record = {"problem": name, "runner": runner.name, **asdict(problem)}
            del record["name"]
            record |= measure_one(problem, runner, options, evaluator)
            record |= shared
            records.append(record)
            keep(output, record)
            print(line_of(record), flush=True)
    return records


def measure_one(
    problem: Problem, runner: Runner, options: RunOptions, evaluator: Evaluator
) -> dict[str, Any]:
    """Return status, times, memory and scores of one runner on one problem."""
    with tempfile.TemporaryDirectory(prefix="torchgw-benchmark-") as name:
        directory = Path(name)
        config = {
            "problem": problem.name, "runner": runner.name, "device": options.device,
            "repeat": options.repeat, "budget_s": options.budget_s,
            "evaluations": _EVALUATIONS if problem.n * problem.m <= _SMALL_ENTRIES else 1,
        }  # fmt: skip
        if runner.prepare is None:
            assert isinstance(problem, GWProblem)
            if options.peer_python is None:
                message = f"set {PEER_PYTHON} or --peer-python to an interpreter that has it"
                return {"status": "unsupported", "message": message}
            _prepare_peer(problem, config, directory)
            command = [
                *shlex.split(options.peer_python),
                str(ROOT / "benchmarks/harness/peer_torchgw.py"),
            ]
            where = directory
        else:
            command, where = [sys.executable, "-m", "benchmarks.harness.worker"], ROOT
        (directory / "config.json").write_text(json.dumps(config))
        failure = _run([*command, name], where, options)
        if failure is not None:
            return {"status": "failed", "message": failure}
        report: dict[str, Any] = json.loads((directory / "report.json").read_text())
        if "status" in report:
            return report
        scores = []
        for file in sorted(directory.glob("plan-*.npz")):
            with np.load(file) as summary:
                scores.append(evaluator.score(dict(summary)))
    return {"status": "ok"} | combine(scores) | timing(report) | report


def _prepare_peer(problem: GWProblem, config: dict[str, Any], directory: Path) -> None:
    clouds = make_clouds(problem)
    np.savez(directory / "input.npz", x=clouds.x, y=clouds.y)
    config["arguments"] = {
        "distance_mode": problem.distances, "M": 80, "epsilon": 0.005, "k": problem.n_neighbors,
        "mixed_precision": True,
    }  # fmt: skip


def _run(command: list[str], where: Path, options: RunOptions) -> str | None:
    """Run a process; return ``None``, or why it failed."""
    variables = dict(os.environ)
    if options.device == "cpu":
        # a peer that looks for a GPU must not find one
        variables["CUDA_VISIBLE_DEVICES"] = ""
    try:
        done = subprocess.run(
            command, cwd=where, env=variables, capture_output=True, text=True,
            timeout=options.timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"not done after {options.timeout_s:.0f} s"
    except FileNotFoundError as error:
        return str(error)
    if done.returncode == 0:
        return None
    lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
    return f"exit {done.returncode}: {lines[-1][:400]}"


def timing(report: dict[str, Any]) -> dict[str, float]:
    """Return the 20th, 50th and 80th percentile of the seconds for one unit of work."""
    unit = report.get("per_call", 1)
    points = np.percentile(np.array(report["seconds"]) / unit, (20, 50, 80))
    names = ("time_p20_s", "time_p50_s", "time_p80_s")
    return dict(zip(names, map(float, points), strict=True))


def environment(options: RunOptions) -> dict[str, Any]:
    """Return what the numbers depend on besides the code of the runner."""
    on_gpu = options.device == "cuda"
    return {
        "device": options.device,
        "device_name": torch.cuda.get_device_name() if on_gpu else cpu_model(), "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)), "threads": torch.get_num_threads(),
        "commit": options.commit or commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }  # fmt: skip


def cpu_model() -> str:
    """Return the name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def processor() -> str:
    """Tell processors of one name apart, which those of clouds share."""
    kinds = ("cpu family", "model\t", "stepping", "cache size", "flags")
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    known = "\n".join(line for line in lines if line.startswith(kinds))
    return hashlib.sha256(known.encode()).hexdigest()[:12]


def commit() -> str | None:
    """Return the commit of the checkout, with a mark if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON has no word for, by null."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def keep(output: Path | None, *records: dict[str, Any]) -> None:
    """Add records to a file, if there is one, a line of JSON each."""
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(finite(row), allow_nan=False) + "\n" for row in records)


def tell(record: dict[str, Any], output: Path | None) -> None:
    """Print a record as soon as it is known, and keep it."""
    print(json.dumps(record), flush=True)
    keep(output, record)


def line_of(record: dict[str, Any]) -> str:
    """Return one record as a line for the terminal."""
    head = f"{record['problem']:30s} {record['runner']:11s}"
    if record["status"] != "ok":
        return f"{head} {record['status']}: {record['message']}"
    text = f"{head} {record['time_p50_s']:9.4g} s  {record['peak_mib']:9.1f} MiB"
    if "gw_value" in record:
        spread = record["gw_value_standard_error"]
        text += f"  GW {record['gw_value']:.6g}" + (f" +- {spread:.1g}" if spread else "")
    if "gw_value_feasible" in record:
        text += f" (made feasible {record['gw_value_feasible']:.6g})"
    if "column_error_max_relative" in record:
        errors = (record["row_error_max_relative"], record["column_error_max_relative"])
        text += f"  marginals {max(errors):.1e}"
    if "spearman" in record:
        text += f"  Spearman {record['spearman']:+.4f}"
    if "exponent_error" in record["info"]:
        text += f"  exponent error {record['info']['exponent_error']:.1e}"
    return text
