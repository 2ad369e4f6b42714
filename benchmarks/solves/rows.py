"""Tables that are matched by rows, from files to a folder: ``python -m benchmarks rows``.

A spiral and a Swiss roll, or two noisy samples of one surface, are written to .npy files, block by
block, and matched by ``torchgw.solve_rows`` in processes of one machine. One JSON line for each
size and number of processes: seconds of the call (of base, cells and their solve; of the rows),
the peak of each GPU and of each process, value, marginal error, Spearman's correlation of 32,768
drawn rows and their partners, and of the places that these rows go to, and a digest of files. What
a call says on its way goes to standard error, with seconds, so that one that is ended has told
where it was.

``--model FILE`` reads such lines and counts, for all that were measured on a device: each row that
a process matches takes the same time, whatever the base, as tiles of its plan are skipped; each
that it adds to a cell too; and the base as long as it has rows. A base that is chosen takes longer,
a first call most of all: by how much is told, and not foretold. Beside each row stands what the
others foretell of it, and then what all foretell of 1e8 and 1e9 rows a side. Memory of a process
does not grow with the table; disk does.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.spatial import cKDTree
from scipy.stats import spearmanr

import torchgw
from benchmarks.solves.scaling import surface
from torchgw.datasets import spiral, swiss_roll

_CHUNK, _DRAWN, _KNOWN = 10**6, 32768, 2**17


def write(folder: Path, space: str, n: int) -> None:
    """Write points and the true coordinate of both sides, some rows in each of some processes."""
    shapes = {"": (n, 3), "_truth": (n,)}
    for letter, (name, shape) in itertools.product("XY", shapes.items()):
        np.lib.format.open_memmap(folder / f"{letter}{name}.npy", "w+", np.float32, shape)
    parts = itertools.product([folder], [space], [n], "XY", range(0, n, _CHUNK))
    with multiprocessing.get_context("spawn").Pool(max(1, min(24, n // _CHUNK))) as pool:
        pool.starmap(_write, parts)


def _write(folder: Path, space: str, n: int, letter: str, start: int) -> None:
    """Draw some rows of a side."""
    count, side = min(_CHUNK, n - start), "XY".index(letter)
    seed = 2 * (start // _CHUNK) + side
    if space == "spiral":
        points, truth = (spiral, swiss_roll)[side](count, random_state=seed)
    else:
        points, truth = surface(count, seed)
    # a spiral lies in the plane
    points = np.pad(points, ((0, 0), (0, 3 - points.shape[1])))
    for name, part in (("", points), ("_truth", truth)):
        np.load(folder / f"{letter}{name}.npy", mmap_mode="r+")[start : start + count] = part


def run(folder: Path, epsilon: Any, n_base: Any, device: str, calls: int) -> None:
    """Match the files in this process, one of several or alone; the first one tells."""
    warnings.simplefilter("ignore")
    rank, several = int(os.environ.get("RANK", "0")), "RANK" in os.environ
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if several:
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    seconds = list[float]()
    for _ in range(calls):
        if rank == 0:
            shutil.rmtree(folder / "out", ignore_errors=True)
        if several:
            torch.distributed.barrier()
        begin = time.perf_counter()
        result = torchgw.solve_rows(
            folder / "X.npy", folder / "Y.npy", folder / "out", epsilon=epsilon, n_base=n_base,
            device=device, distributed="auto", random_state=0, verbose=True,
        )  # fmt: skip
        seconds.append(round(time.perf_counter() - begin, 2))
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    if several:
        peaks = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(peaks, [round(peak, 2), round(host, 2)])
        torch.distributed.destroy_process_group()
    else:
        peaks = [[round(peak, 2), round(host, 2)]]
    if rank == 0:
        told = {"call_s": seconds, "peaks_gib": peaks}
        print(json.dumps(told | {k: v for k, v in vars(result).items() if k not in _LEFT_OUT}))


_LEFT_OUT = ("folder", "device")


def judge(folder: Path, n: int) -> dict[str, Any]:
    """Compare partners and places with the truth, and digest files: of 64 blocks at most."""
    result = torchgw.RowsResult(folder / "out")
    points, *truth = (
        np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("Y", "X_truth", "Y_truth")
    )
    files = {side: sorted((folder / "out").glob(f"{side}-*.npz")) for side in "XY"}
    step, pairs = max(1, len(files["X"]) // 64), []
    # a place has the coordinate of the nearest of some rows
    rows = np.sort(np.random.default_rng(0).choice(n, min(n, _KNOWN), replace=False))
    tree, coordinates = cKDTree(points[rows]), truth[1][rows]
    ends = [tuple(map(int, path.stem.split("-")[1:])) for path in files["X"][::step]]
    # at even steps, whatever is left for the last block
    some = slice(None, None, max(1, sum(stop - start for start, stop in ends) // _DRAWN))
    for start, stop in ends:
        found = result.rows(start, stop)
        near = coordinates[tree.query(found["place"][some])[1]]
        pairs.append([truth[0][start:stop][some], truth[1][found["partner"][some]], near])
    first, second, third = np.concatenate(pairs, axis=1)
    digest = hashlib.sha256()
    for path in [*files["X"][::step], *files["Y"][::step]]:
        digest.update(path.name.encode() + path.read_bytes())
    size = sum(path.stat().st_size for side in files.values() for path in side)
    return {
        "spearman": abs(float(spearmanr(first, second).statistic)),
        "spearman_place": abs(float(spearmanr(first, third).statistic)),
        "bits": digest.hexdigest()[:12], "disk_gib": round(size / 2**30, 2),
    }  # fmt: skip


def _fit(work: Any, taken: Any) -> Any:
    """Fit rates, (k,), to counted work, (rows, k), as shares of the seconds that it took."""
    return np.linalg.lstsq(work / taken[:, None], np.ones(len(taken)), rcond=None)[0]


def _foretold(work: Any, taken: Any, known: Any) -> list[float]:
    """Foretell each row by the known ones among the others, NaN where these are too few."""
    found = []
    for number, own in enumerate(work):
        others = known & (np.arange(len(work)) != number)
        enough = np.linalg.matrix_rank(work[others]) == work.shape[1]
        found.append(float(own @ _fit(work[others], taken[others])) if enough else float("nan"))
    return found


def report(path: Path) -> str:
    """Describe the model of each device, its errors, and what it predicts, as Markdown."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    lines = []
    for device in dict.fromkeys(row["device"] for row in rows):
        here = [row for row in rows if row["device"] == device]
        share = np.array([row["n"] / row["processes"] / 1e6 for row in here])
        base = np.array([row["cells"][0] / 8192 for row in here])
        given = np.array([row["base"] != "auto" for row in here])
        begun, matched = np.array([row["seconds"] for row in here]).T
        count, work = share[:, None], np.stack([base, share], axis=1)
        (each,), (fixed, read) = _fit(count, matched), _fit(work[given], begun[given])
        gpu, host = np.max([peak for row in here for peak in row["peaks_gib"]], axis=0)
        lines += [
            f"{device}: {each:.3g} s to match and {read:.3g} s to add up a million rows of a "
            f"process, {fixed:.3g} s for each 8,192 rows of a base; at most {gpu} GiB of a GPU "
            f"and {host} of a host", "",
            "| rows a side | processes | base | rows, s | foretold | error | base, s | foretold | "
            "error |", "|---" * 9 + "|",
        ]  # fmt: skip
        said = _foretold(count, matched, given | True), _foretold(work, begun, given)
        for row, *told in zip(here, matched, said[0], begun, said[1], strict=True):
            kind = "" if row["base"] != "auto" else ", chosen"
            kind += ", first call" if len(row["call_s"]) == 1 else ""
            first, second = (
                f"{taken:.3g} | {said:.3g} | {said / taken - 1:+.0%}"
                for taken, said in (told[:2], told[2:])
            )
            lines.append(
                f"| {row['n']:,} | {row['processes']} | {row['cells'][0]:,}{kind} | {first} | "
                f"{second} |"
            )
        for n, processes in itertools.product((10**8, 10**9), (4, 8, 16, 64)):
            million = n / processes / 1e6
            lines.append(
                f"| {n:,} | {processes} | 8,192 | - | {each * million:.3g} | - | - | "
                f"{fixed + read * million:.3g} | - |"
            )
        lines.append("")
    return "\n".join(lines)


def tell(words: str) -> None:
    """Say on standard error where a measurement is."""
    sys.stderr.write(f"{words}\n")
    sys.stderr.flush()


def _base(text: str) -> int | str:
    """Read a number of base rows."""
    return text if text == "auto" else int(text)


def main(arguments: list[str] | None = None) -> int:
    """Measure each size in each number of processes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks rows", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--processes", type=int, nargs="+", default=[1])
    parser.add_argument("--base", type=_base, nargs="+", default=["auto"], help="or auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--space", choices=("spiral", "surface"), default="spiral")
    parser.add_argument("--epsilon", type=float, help="5e-4 for spirals and automatic for surfaces")
    parser.add_argument("--calls", type=int, default=2, help="in one process; the first compiles")
    parser.add_argument("--model", type=Path, help="predict from the JSON lines of a file")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.model is not None:
        print(report(options.model))
        return 0
    epsilon: Any = options.epsilon or (5e-4 if options.space == "spiral" else "auto")
    if options.inside is not None:
        run(options.inside, epsilon, options.base[0], options.device, options.calls)
        return 0
    for n in options.sizes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            begin = time.perf_counter()
            write(folder, options.space, n)
            tell(f"{n} rows a side are written after {time.perf_counter() - begin:.0f} s")
            for count in options.processes:
                for base in options.base:
                    launch = ["-m", "torch.distributed.run", "--standalone"]
                    launch = [*launch, "--nproc-per-node", str(count)] if count > 1 else []
                    inside = ["-m", "benchmarks", "rows", "--inside", name, "--base", str(base)]
                    inside += ["--device", options.device, "--space", options.space]
                    inside += [
                        "--calls", str(options.calls), "--epsilon", str(options.epsilon or 0),
                    ]  # fmt: skip
                    done = subprocess.run(
                        [sys.executable, *launch, *inside], stdout=subprocess.PIPE, text=True,
                        check=False, env={"OMP_NUM_THREADS": "1", **os.environ},
                    )  # fmt: skip
                    told = [line for line in done.stdout.splitlines() if line.startswith("{")]
                    if not told:
                        return 1
                    tell(f"{count} processes have ended after {time.perf_counter() - begin:.0f} s")
                    row = {"n": n, "space": options.space, "processes": count, "base": base}
                    row["device"] = options.device
                    print(json.dumps(row | json.loads(told[-1]) | judge(folder, n)), flush=True)
    return 0
