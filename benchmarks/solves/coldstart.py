"""What a first call waits for: ``python -m benchmarks coldstart``.

A spiral is aligned to a Swiss roll by defaults in fresh processes: one for each size with an empty
cache of compiled kernels, then one with the cache that it left. Each solves other points with
another seed in every call, then the last ones again, of which the median is the steady time. One
JSON line for each process, then a table. Without a GPU nothing is compiled by Triton. Python's
sources are compiled before, as installed packages are.

``--record`` writes what the solves launch to the list of kernels that the package compiles beside
other work: after a change of a kernel or of how it is launched.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.harness.harness import keep

ROOT = Path(__file__).resolve().parents[2]
SIZES = "400x500,4000x5000,20000x25000,100000x100000,1000000x1000000"
_AGAIN = 3
# Points from which on solves of a surface are recorded too.
_SURFACES = 100_000
# Names of the distances whose kernels a solve by defaults launches, and one of points in a disk, of
# which there are more than have their distances stored.
_GRAPHS = ["auto", "dijkstra", "landmark"]
_CURVED = ["poincare", "lorentz"]
_STREAMED = 7_000


def measure(n: int, m: int, device: str | None, calls: int, record: bool = False) -> dict[str, Any]:
    """Return what this process waits for: imports, the device, each call, kernels."""
    marks = [time.perf_counter()]
    import torch

    marks.append(time.perf_counter())
    from torchgw import solve
    from torchgw._tensors import ahead
    from torchgw.datasets import spiral, swiss_roll

    if record:
        # what is launched, and nothing that is only listed
        ahead.variants = tuple
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
    if record and n >= _SURFACES:
        from benchmarks.solves.scaling import surface

        for seed in (0, 2):
            solve(*(surface(n, seed + side)[0] for side in (0, 1)), device=device)
        loaded[-1] = len(variants)
    if record and variants:
        import numpy as np

        points = np.random.default_rng(0).random((_STREAMED, 2)) - 0.5
        solve(points, points[::-1].copy(), distances="poincare", polish=True, device=device)
        for place, variant in enumerate(variants):
            if variant["kernel"].startswith("torchgw.distances."):
                variant["distances"] = _GRAPHS if place < loaded[-1] else _CURVED
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


def watch_kernels() -> list[dict[str, Any]]:
    """Return a list that each variant of a kernel is added to when Triton loads it."""
    import triton

    variants: list[dict[str, Any]] = []

    def note(**given: Any) -> None:
        kernel, known = given["fn"], given["compile"]
        multiples = {place for (place,), value in known["configs"][0].items() if value}
        arguments = {
            name: kind + (":16" if place in multiples else "")
            for place, (name, kind) in enumerate(known["signature"].items())
            if kind != "constexpr"
        }
        names = list(known["signature"])
        options = ast.literal_eval(known["key"][known["key"].rindex("{") :])
        variants.append(
            {
                "kernel": f"{kernel.module}:{kernel.name}",
                "arguments": arguments,
                "constants": {
                    names[place]: value for (place,), value in known["constants"].items()
                },
                # those that the launch gives
                "options": {
                    name: options[name]
                    for name in ("num_warps", "num_stages", "enable_fp_fusion")
                    if name in options
                },
            }
        )

    triton.knobs.runtime.jit_post_compile_hook = note
    return variants


def record_kernels(records: list[dict[str, Any]]) -> None:
    """Write the list of variants that the package compiles ahead."""
    from torchgw._tensors.ahead import LIST

    sizes, places = defaultdict[str, set[int]](set), defaultdict[str, list[float]](list)
    for record in records:
        for place, variant in enumerate(record["variants"]):
            kind = json.dumps(variant)
            sizes[kind].add(max(record["n"], record["m"]))
            places[kind].append(place / len(record["variants"]))
    # as early as a solve of any size launches them
    order = sorted(sizes, key=lambda kind: min(places[kind]))
    lines = [json.dumps({**json.loads(kind), "sizes": sorted(sizes[kind])}) for kind in order]
    LIST.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{len(lines)} variants: {LIST}")


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
    parser.add_argument("--record", action="store_true", help="write the list of kernels anew")
    parser.add_argument("--output", type=Path, help="file that the JSON lines are added to")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    sizes = options.sizes.split(",")
    if options.inside:
        n, m = map(int, sizes[0].split("x"))
        print(json.dumps(measure(n, m, options.device, options.calls, options.record)))
        return 0
    records = []
    with tempfile.TemporaryDirectory() as folder:
        if _run(sizes[0], Path(folder) / "unmeasured", options) is None:
            return 1
        for size in sizes:
            cache = Path(folder) / ("shared" if options.shared else size)
            for state in ("empty", "warm"):
                record = _run(size, cache, options)
                if record is None:
                    return 1
                record["cache"] = state
                for variant in record["variants"] if options.variants else ():
                    print(f"{size} {state}: {variant}")
                records.append(record)
                kept = {name: value for name, value in record.items() if name != "variants"}
                keep(options.output, kept)
    if options.record:
        record_kernels(records)
    print(table(records))
    return 0


def _run(size: str, cache: Path, options: argparse.Namespace) -> dict[str, Any] | None:
    command = [sys.executable, "-m", "benchmarks.solves.coldstart", "--inside", "--sizes", size]
    command += ["--calls", str(options.calls)]
    command += ["--device", options.device] if options.device else []
    command += ["--record"] if options.record else []
    places = {"TRITON_CACHE_DIR": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
    # sources compiled by the first of these processes
    places |= {"PYTHONPYCACHEPREFIX": str(cache.parent / "sources"), "PYTHONDONTWRITEBYTECODE": ""}
    before = len(list(cache.glob("**/*.cubin")))
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | places, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        print(f"{size}: {done.stderr}", file=sys.stderr)
        return None
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    record["compiled"] = len(list(cache.glob("**/*.cubin"))) - before
    return record


if __name__ == "__main__":
    raise SystemExit(main())
