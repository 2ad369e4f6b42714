"""Measure one runner on one problem, alone in a process.

Run as ``python -m benchmarks.harness.worker DIRECTORY``.

Reads config.json there; writes report.json and one plan-N.npz per evaluated repeat.
"""

from __future__ import annotations

import json
import platform
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import measure
from benchmarks.harness.registry import PROBLEMS
from benchmarks.harness.runners import RUNNERS, load_packages
from benchmarks.sinkhorn.linear import Unsupported


def main(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    problem, runner = PROBLEMS[config["problem"]], RUNNERS[config["runner"]]
    device = torch.device(config["device"])
    packages = load_packages(runner)
    probe = measure.MemoryProbe(device)
    assert runner.prepare is not None
    try:
        prepared = runner.prepare(problem, device)
    except Unsupported as reason:
        measure.write_json(directory, {"status": "unsupported", "message": str(reason)})
        return
    inputs = {"input_mib": round(probe.now_mib(), 1)}
    info: dict[str, Any] = {}

    def keep(number: int, result: Any) -> None:
        info.update(prepared.info(result))
        if prepared.rows is not None:
            summary = measure.summarise(
                prepared.rows(result), (problem.n, problem.m), device, number
            )
            measure.save(directory, number, summary)

    report = measure.first_and_repeats(prepared.call, config, probe, keep)
    report["per_call"] = prepared.per_call
    report["info"] = info
    report["versions"] = {
        "python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__,
        "triton": triton_version(), **packages,
    }  # fmt: skip
    measure.write_json(directory, report | inputs)


def triton_version() -> str | None:
    """Return the version of triton if it is installed."""
    if find_spec("triton") is None:
        return None
    import triton

    return str(triton.__version__)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
