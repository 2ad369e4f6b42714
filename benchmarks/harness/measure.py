"""Time, memory, and what is kept of a plan. Imported by the peers' processes too.

Needs NumPy and torch only, and nothing of ours: a peer's interpreter has no other package of this
repository, and one peer shares our package's name.
"""

from __future__ import annotations

import json
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = [
    "MemoryProbe", "dense_rows", "first_and_repeats", "save", "summarise", "synchronize", "timed",
    "write_json",
]  # fmt: skip

# Entries (n * m) up to which the whole plan is handed to the evaluator.
WHOLE_PLAN_ENTRIES = 32_000_000
# Pairs drawn from a plan: the evaluator averages over all pairs of them.
SAMPLED_PAIRS = 512
# Entries of one float64 block of rows.
_BLOCK_ENTRIES = {"cpu": 4_000_000, "cuda": 100_000_000}
_MIB = 2**20


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def resident_bytes(process: int | str = "self") -> int:
    """Return what a process holds in memory now."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


class MemoryProbe:
    """Peak memory above the moment of construction.

    On CUDA it is the allocator's maximum. On a CPU it is the peak resident size by getrusage, minus
    the resident size now; worker processes are sampled 20 times a second and reported apart, as
    most of theirs is the interpreter's.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._children_peak = 0
        self._stop = threading.Event()
        if device.type == "cuda":
            torch.empty(1, device=device)
            torch.cuda.reset_peak_memory_stats(device)
            self._base = torch.cuda.memory_allocated(device)
        else:
            self._base = resident_bytes()
            self._thread = threading.Thread(target=self._watch_children, daemon=True)
            self._thread.start()

    def now_mib(self) -> float:
        """Return what has been added so far."""
        if self.device.type == "cuda":
            return (torch.cuda.memory_allocated(self.device) - self._base) / _MIB
        return (resident_bytes() - self._base) / _MIB

    def peak_mib(self) -> dict[str, float]:
        """Return the peak since construction and stop watching."""
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
            return {"peak_mib": round((peak - self._base) / _MIB, 1)}
        self._stop.set()
        self._thread.join()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "peak_mib": round((peak - self._base) / _MIB, 1),
            "peak_workers_mib": round(self._children_peak / _MIB, 1),
        }

    def _watch_children(self) -> None:
        while not self._stop.wait(0.05):
            total = sum(_resident_or_zero(child) for child in _children())
            self._children_peak = max(self._children_peak, total)


def _children() -> list[str]:
    """Return the process ids of the children of this process's threads."""
    found: list[str] = []
    for file in Path("/proc/self/task").glob("*/children"):
        # a thread may end between the listing and the reading
        try:
            found += file.read_text().split()
        except OSError:
            continue
    return found


def _resident_or_zero(process: str) -> int:
    try:
        return resident_bytes(process)
    except (OSError, IndexError):
        return 0


def timed(call: Callable[[int], Any], seed: int, device: torch.device) -> tuple[float, Any]:
    """Return the seconds of one call, and its result."""
    synchronize(device)
    begin = time.perf_counter()
    result = call(seed)
    synchronize(device)
    return time.perf_counter() - begin, result


def first_and_repeats(
    call: Callable[[int], Any],
    config: dict[str, Any],
    probe: MemoryProbe,
    keep: Callable[[int, Any], None],
) -> dict[str, Any]:
    """Time a first call and the repeats, each with its own seed, and read the peak memory.

    Parameters
    ----------
    call : callable
        ``call(seed)`` is what is timed.
    config : dict
        ``repeat``, at most so many; ``budget_s``, after which no further one is begun;
        ``evaluations``, how many results are handed to ``keep``.
    probe : MemoryProbe
        Read after the first call: the evaluation of a plan may take more than the solve.
    keep : callable
        ``keep(number, result)`` stores what will be evaluated.

    Returns
    -------
    dict
        first_call_s, seconds (one per repeat), and the probe's peaks.
    """
    first, result = timed(call, 0, probe.device)
    report: dict[str, Any] = {"first_call_s": first, "seconds": [], **probe.peak_mib()}
    for number in range(config["repeat"]):
        # two results of a large problem need not fit
        del result
        seconds, result = timed(call, number, probe.device)
        report["seconds"].append(seconds)
        if number < config["evaluations"]:
            keep(number, result)
        if sum(report["seconds"]) > config["budget_s"]:
            break
    return report


def dense_rows(plan: Any) -> Callable[[torch.Tensor | slice], torch.Tensor]:
    """Return a function that gives some rows of a stored plan in float64."""
    matrix = torch.as_tensor(plan)
    return lambda index: matrix[index].double()


def summarise(
    rows: Callable[[torch.Tensor | slice], torch.Tensor],
    shape: tuple[int, int],
    device: torch.device,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Reduce a plan to what the evaluator needs.

    Parameters
    ----------
    rows : callable
        ``rows(index)`` returns P[index] in float64, for a slice or an int64 tensor on ``device``.
    shape : tuple
        (n, m).
    device : torch.device
    seed : int
        For the pairs.

    Returns
    -------
    dict
        row, column : sums of the plan, shapes (n,), (m,)
        best : the largest entry of every row, shape (n,)
        pairs : (2, s) pairs drawn from the plan
        plan : (n, m), if it is not too large
    """
    n, m = shape
    row = torch.empty(n, dtype=torch.float64, device=device)
    column = torch.zeros(m, dtype=torch.float64, device=device)
    best = torch.empty(n, dtype=torch.int64, device=device)
    parts = []
    for index in _blocks(n, m, device):
        block = rows(index)
        row[index] = block.sum(1)
        column += block.sum(0)
        best[index] = block.argmax(1)
        if n * m <= WHOLE_PLAN_ENTRIES:
            parts.append(block.cpu().numpy())
    rng = np.random.default_rng(seed)
    summary = {
        "row": row.cpu().numpy(),
        "column": column.cpu().numpy(),
        "best": best.cpu().numpy(),
    }
    if parts:
        summary["plan"] = np.concatenate(parts)
    else:
        summary["pairs"] = _draw_pairs(rows, summary["row"], m, device, rng)
    return summary


def _blocks(n: int, m: int, device: torch.device) -> Iterator[slice]:
    height = max(1, _BLOCK_ENTRIES[device.type] // m)
    return (slice(start, min(start + height, n)) for start in range(0, n, height))


def _draw_pairs(
    rows: Callable[[torch.Tensor | slice], torch.Tensor],
    row: np.ndarray,
    m: int,
    device: torch.device,
    rng: np.random.Generator,
) -> np.ndarray:
    share = np.clip(np.nan_to_num(row), 0, None)
    source = rng.choice(len(row), size=SAMPLED_PAIRS, p=share / share.sum())
    level = torch.from_numpy(rng.random(SAMPLED_PAIRS)).to(device)
    index = torch.from_numpy(source).to(device)
    target = []
    for block in _blocks(SAMPLED_PAIRS, m, device):
        cumulative = rows(index[block]).cumsum(1)
        threshold = level[block, None] * cumulative[:, -1:]
        target.append(torch.searchsorted(cumulative, threshold, right=True)[:, 0])
    found = torch.cat(target).clamp_max(m - 1).cpu().numpy()
    return np.stack([source, found])


def save(directory: Path, number: int, summary: dict[str, np.ndarray]) -> None:
    """Write the summary of one repeat."""
    np.savez(directory / f"plan-{number}.npz", **summary)


def write_json(directory: Path, report: dict[str, Any]) -> None:
    """Write what a process found."""
    (directory / "report.json").write_text(json.dumps(report))
