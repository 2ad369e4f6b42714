"""What a first call waits for: ``python -m benchmarks coldstart``.

A spiral is aligned to a Swiss roll by defaults in fresh processes: one for each size with an empty
cache of compiled kernels, then one with the cache that it left. Each solves other points with
another seed in every call, then the last ones again, of which the median is the steady time. One
JSON line for each process, then a table. Without a GPU nothing is compiled by Triton.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SIZES = "400x500,4000x5000,20000x25000,100000x100000"
_AGAIN = 3


def measure(n: int, m: int, device: str | None, calls: int) -> dict[str, Any]:
    """Return what this process waits for: imports, the device, each call, kernels."""
    marks = [time.perf_counter()]
    import torch

    marks.append(time.perf_counter())
    from torchgw import solve
    from torchgw.datasets import spiral, swiss_roll

    marks.append(time.perf_counter())
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.zeros(1, device=device).item()
    marks.append(time.perf_counter())
    variants = watch_kernels() if device.startswith("cuda") else []
    seconds, loaded = [], []
    for turn in range(calls + _AGAIN):
        seed = min(turn, calls - 1)
        x, y = spiral(n, random_state=seed)[0], swiss_roll(m, random_state=seed + 1)[0]
        begin = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = solve(x, y, device=device, random_state=seed)
        # reading a number waits for the device
        float(result.value)
        seconds.append(round(time.perf_counter() - begin, 4))
        loaded.append(len(variants))
    return {
        "n": n,
        "m": m,
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else device,
        "torch": torch.__version__,
        "import_torch": round(marks[1] - marks[0], 3),
        "import_torchgw": round(marks[2] - marks[1], 3),
        "start_device": round(marks[3] - marks[2], 3),
        "calls": seconds[:calls],
        "steady": statistics.median(seconds[calls:]),
        # variants of kernels that each call compiled or read from the cache
        "loaded": [now - before for now, before in zip(loaded, [0, *loaded], strict=False)][:calls],
        "variants": variants,
    }


def watch_kernels() -> list[str]:
    """Return a list that each variant of a kernel is added to when Triton loads it."""
    import triton

    variants: list[str] = []

    def note(**given: Any) -> None:
        kernel = given["fn"]
        arguments = {name: str(value) for name, value in given["compile"]["signature"].items()}
        numbers = {str(place): value for place, value in given["compile"]["constants"].items()}
        aligned = sorted(place for (place,), value in given["compile"]["configs"][0].items())
        known = f"{arguments} {numbers} {aligned} warps {given['compile']['num_warps']}"
        variants.append(f"{kernel.name} {known}")

    triton.knobs.runtime.jit_post_compile_hook = note
    return variants


def table(records: list[dict[str, Any]]) -> str:
    """Return the measurements as a Markdown table."""
    calls = len(records[0]["calls"])
    heads = ["", "cache", "import torchgw", *(f"call {k + 1}" for k in range(calls)), "steady"]
    heads += ["variants loaded", "compiled"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for record in records:
        times = [record["import_torchgw"], *record["calls"], record["steady"]]
        cells = [f"{record['n']:,} x {record['m']:,}", record["cache"]]
        cells += [f"{time:.3g}" for time in times]
        cells += [" + ".join(map(str, record["loaded"])), str(record["compiled"])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure each size in two processes of its own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks coldstart", description=__doc__)
    parser.add_argument("--sizes", default=SIZES, help=f"NxM,... (default: {SIZES})")
    parser.add_argument("--device", help="cuda where there is one, else cpu")
    parser.add_argument("--calls", type=int, default=3, help="calls with points of their own")
    parser.add_argument("--shared", action="store_true", help="one cache for all sizes, in turn")
    parser.add_argument("--variants", action="store_true", help="list the variants of kernels")
    parser.add_argument("--output", type=Path, help="file that the JSON lines are added to")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    sizes = options.sizes.split(",")
    if options.inside:
        n, m = map(int, sizes[0].split("x"))
        print(json.dumps(measure(n, m, options.device, options.calls)))
        return 0
    records = []
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            cache = Path(folder) / ("shared" if options.shared else size)
            for state in ("empty", "warm"):
                record = _run(size, cache, options)
                if record is None:
                    return 1
                record["cache"] = state
                for variant in record.pop("variants") if options.variants else ():
                    print(f"{size} {state}: {variant}")
                records.append(record)
                if options.output:
                    with options.output.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(record) + "\n")
    print(table(records))
    return 0


def _run(size: str, cache: Path, options: argparse.Namespace) -> dict[str, Any] | None:
    command = [sys.executable, "-m", "benchmarks.solves.coldstart", "--inside", "--sizes", size]
    command += ["--calls", str(options.calls)]
    command += ["--device", options.device] if options.device else []
    kernels = {"TRITON_CACHE_DIR": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
    before = len(list(cache.glob("**/*.cubin")))
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | kernels, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        print(f"{size}: {done.stderr}", file=sys.stderr)
        return None
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    record["compiled"] = len(list(cache.glob("**/*.cubin"))) - before
    return record


if __name__ == "__main__":
    raise SystemExit(main())
