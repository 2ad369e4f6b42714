"""Tables that are matched by rows, from files to a folder: ``python -m benchmarks rows``.

A spiral and a Swiss roll, or two noisy samples of one surface, are written to .npy files, block by
block, and matched by ``torchgw.solve_rows`` in processes of one machine. One JSON line for each
size and number of processes: seconds of the call (of base, cells and their solve; of the rows),
the peak of each GPU and of each process, value, marginal error, Spearman's correlation of 32,768
drawn rows and their partners, and a digest of the files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

import torchgw
from benchmarks.solves.scaling import surface
from torchgw.datasets import spiral, swiss_roll

_CHUNK, _DRAWN = 10**6, 32768


def write(folder: Path, space: str, n: int) -> None:
    """Write points and the true coordinate of both sides, some rows at a time."""
    for letter in "XY":
        shapes = {"": (n, 3), "_truth": (n,)}
        files = {
            name: np.lib.format.open_memmap(
                folder / f"{letter}{name}.npy", "w+", np.float32 if name == "" else np.float64, size
            )
            for name, size in shapes.items()
        }
        for start in range(0, n, _CHUNK):
            count, seed = min(_CHUNK, n - start), 2 * (start // _CHUNK) + "XY".index(letter)
            if space == "spiral":
                points, truth = (spiral, swiss_roll)["XY".index(letter)](count, random_state=seed)
                points = np.pad(points, ((0, 0), (0, 3 - points.shape[1])))
            else:
                points, truth = surface(count, seed)
            for name, part in (("", points), ("_truth", truth)):
                files[name][start : start + count] = part


def run(folder: Path, epsilon: Any, n_base: int, device: str) -> None:
    """Match the files in this process, one of several or alone; the first one tells."""
    warnings.simplefilter("ignore")
    rank, several = int(os.environ.get("RANK", "0")), "RANK" in os.environ
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if several:
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    begin = time.perf_counter()
    result = torchgw.solve_rows(
        folder / "X.npy", folder / "Y.npy", folder / "out", epsilon=epsilon, n_base=n_base,
        device=device, distributed="auto", random_state=0,
    )  # fmt: skip
    seconds = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    if several:
        peaks = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(peaks, [round(peak, 2), round(host, 2)])
        torch.distributed.destroy_process_group()
    else:
        peaks = [[round(peak, 2), round(host, 2)]]
    if rank == 0:
        told = {"call_s": round(seconds, 2), "peaks_gib": peaks}
        print(json.dumps(told | {k: v for k, v in vars(result).items() if k not in _LEFT_OUT}))


_LEFT_OUT = ("folder", "device")


def judge(folder: Path, n: int) -> dict[str, Any]:
    """Compare partners with the truth, and digest the files."""
    result = torchgw.RowsResult(folder / "out")
    truth = [np.load(folder / f"{letter}_truth.npy", mmap_mode="r") for letter in "XY"]
    step, pairs = max(1, n // _DRAWN), []
    for start in range(0, n, 2**20):
        stop = min(start + 2**20, n)
        partner = result.rows(start, stop)["partner"][::step]
        pairs.append([truth[0][start:stop:step], truth[1][partner]])
    first, second = np.concatenate(pairs, axis=1)
    digest = hashlib.sha256()
    for path in sorted((folder / "out").glob("[XY]-*.npz")):
        digest.update(path.name.encode() + path.read_bytes())
    return {
        "spearman": abs(float(spearmanr(first, second).statistic)), "bits": digest.hexdigest()[:12]
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Measure each size in each number of processes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks rows", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--processes", type=int, nargs="+", default=[1])
    parser.add_argument("--base", type=int, nargs="+", default=[2**13])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--space", choices=("spiral", "surface"), default="spiral")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    epsilon: Any = 5e-4 if options.space == "spiral" else "auto"
    if options.inside is not None:
        run(options.inside, epsilon, options.base[0], options.device)
        return 0
    for n in options.sizes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write(folder, options.space, n)
            for count in options.processes:
                for base in [base for base in options.base for _ in range(options.repeat)]:
                    subprocess.run(["rm", "-rf", str(folder / "out")], check=True)
                    launch = ["-m", "torch.distributed.run", "--standalone"]
                    launch = [*launch, "--nproc-per-node", str(count)] if count > 1 else []
                    inside = ["-m", "benchmarks", "rows", "--inside", name, "--base", str(base)]
                    inside += ["--device", options.device, "--space", options.space]
                    done = subprocess.run(
                        [sys.executable, *launch, *inside], capture_output=True, text=True,
                        check=False, env={"OMP_NUM_THREADS": "1", **os.environ},
                    )  # fmt: skip
                    told = [line for line in done.stdout.splitlines() if line.startswith("{")]
                    if not told:
                        print(done.stderr[-3000:])
                        return 1
                    row = {"n": n, "space": options.space, "processes": count, "base": base}
                    print(json.dumps(row | json.loads(told[-1]) | judge(folder, n)), flush=True)
    return 0
