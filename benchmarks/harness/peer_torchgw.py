"""Run the PyPI package torchgw 0.4.2, a black box that shares our name, in its own interpreter.

``PEER_PYTHON peer_torchgw.py DIRECTORY`` reads config.json and input.npz there, and writes
report.json and one plan-N.npz per evaluated repeat. It sees this folder, never the repository root.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from pathlib import Path

import measure
import numpy as np
import torch


def main(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    device = torch.device(config["device"])
    from torchgw import sampled_gw

    probe = measure.MemoryProbe(device)
    with np.load(directory / "input.npz") as data:
        x, y = data["x"], data["y"]

    def call(seed: int) -> object:
        np.random.seed(seed)  # noqa: NPY002 - the peer takes no generator
        torch.manual_seed(seed)
        return sampled_gw(x, y, **config["arguments"])

    def keep(number: int, plan: object) -> None:
        where = torch.as_tensor(plan).device
        summary = measure.summarise(measure.dense_rows(plan), tuple(plan.shape), where, number)
        measure.save(directory, number, summary)

    report = measure.first_and_repeats(call, config, probe, keep)
    measure.write_json(
        directory,
        {
            **report,
            "info": {"arguments": config["arguments"], "timed": "whole solve"},
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "triton": triton_version(),
                "numpy": np.__version__,
                "torchgw-peer": importlib.metadata.version("torchgw"),
            },
        },
    )


def triton_version() -> str | None:
    """Return the version of triton if it is installed."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
