"""What a machine has: free memory of a device, and how fast its processor is."""

import math
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from time import perf_counter

import torch

# Files in which Linux tells of memory: that of the machine; and for a container, its limit, its use
# and the prefix of its totals, in both versions of control groups.
_MACHINE = Path("/proc/meminfo")
_GROUPS = Path("/sys/fs/cgroup")
_CONTAINER = (
    (_GROUPS / "memory.max", _GROUPS / "memory.current", ""),
    (_GROUPS / "memory/memory.limit_in_bytes", _GROUPS / "memory/memory.usage_in_bytes", "total_"),
)


# So many bytes are taken to be free without asking, which takes half a millisecond on a GPU. [L751]
_FREE = 2**26


def fits(needed: int, device: torch.device) -> bool:
    """Whether so many bytes can be allocated on a device."""
    return needed <= _FREE or needed <= free_memory(device)


def known_free(needed: int, device: torch.device) -> int:
    """Count the bytes that can be allocated; so few as are taken to be free are not counted."""
    return sys.maxsize if needed <= _FREE else free_memory(device)


def free_memory(device: torch.device) -> int:
    """Count the bytes that can still be allocated on a device."""
    if device.type == "cuda":
        # PyTorch keeps what was freed, and gives it out again
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    # other systems do not tell: a generous fixed bound
    on_machine = 1024 * _field(_MACHINE, "MemAvailable:") or 16 * 2**30
    return min(on_machine, _free_in_container())


def _free_in_container() -> int:
    """Count the bytes below the limit of a container, beyond which its processes are killed."""
    for limit, used, total in _CONTAINER:
        text = limit.read_text().strip() if limit.is_file() and used.is_file() else "max"
        if text != "max":
            # pages of files that were read count as used, and go when memory is wanted
            kinds = (f"{total}inactive_file", f"{total}active_file")
            cached = sum(_field(used.parent / "memory.stat", kind) for kind in kinds)
            return int(text) - int(used.read_text()) + cached
    return sys.maxsize


def _field(path: Path, name: str) -> int:
    """Read the number after a name in a table of the system; zero if there is none."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)


# Seconds of a product of two tables of 256 x 256, of 2^17 exponentials, and of 64 small operations,
# on the processor that the models of times were fitted on, one thread. [L1346]
_REFERENCE = (2.1e-4, 2.7e-5, 1.3e-4)
# How often each is timed: the least is that of a core which nothing else uses meanwhile. [L1346]
_TIMES = 7


@cache
def slowness() -> float:
    """Measure how many times as long as the reference this processor takes, in some milliseconds.

    In steps of a factor of the square root of two, so that it is mostly the same each time.
    """
    table = torch.linspace(0, 1, 2**16, dtype=torch.float32, device="cpu").reshape(256, 256)
    row, small = torch.linspace(-1, 0, 2**17, dtype=torch.float32, device="cpu"), table[:4, :4]

    def operations() -> None:
        for _ in range(64):
            small.sum()

    probes = (lambda: table @ table), row.exp, operations
    logs = [math.log2(_least(probe) / one) for probe, one in zip(probes, _REFERENCE, strict=True)]
    return float(2 ** (round(2 * sum(logs) / len(logs)) / 2))


def _least(work: Callable[[], object]) -> float:
    """Time some work a few times; return the least."""
    times = []
    for _ in range(_TIMES):
        clock = perf_counter()
        work()
        times.append(perf_counter() - clock)
    return max(min(times), 1e-9)
