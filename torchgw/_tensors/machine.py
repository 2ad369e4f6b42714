"""What a machine has: free memory, the speed of its processor, threads that may sleep."""

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from torchgw._tensors.operations import BLOCK_BYTES

# Files in which Linux tells of memory: that of the machine and of this process; and for a
# container, its limit, its use and the prefix of its totals, in both versions of control groups.
_MACHINE, _PROCESS = Path("/proc/meminfo"), Path("/proc/self/status")
_GROUPS = Path("/sys/fs/cgroup")
_CONTAINER = (
    (_GROUPS / "memory.max", _GROUPS / "memory.current", ""),
    (_GROUPS / "memory/memory.limit_in_bytes", _GROUPS / "memory/memory.usage_in_bytes", "total_"),
)


def fits(needed: int, device: torch.device) -> bool:
    """Whether so many bytes can be allocated on a device."""
    return needed <= BLOCK_BYTES or needed <= free_memory(device)


def known_free(needed: int, device: torch.device) -> int:
    """Count the bytes that can be allocated; so few as are taken to be free are not counted."""
    return sys.maxsize if needed <= BLOCK_BYTES else free_memory(device)


def free_memory(device: torch.device) -> int:
    """Count the bytes that can still be allocated on a device."""
    if device.type == "cuda":
        # PyTorch keeps what was freed, and gives it out again
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    # other systems do not tell: a generous fixed bound
    on_machine = 1024 * _field(_MACHINE, "MemAvailable:") or 16 * 2**30
    return min(on_machine, _free_in_container())


def peak_memory(device: torch.device) -> int:
    """Count the bytes that were in use at most: of tensors on a GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * _field(_PROCESS, "VmHWM:")


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
# Share of a solve's time that is like each: exponentials take four times as long on some processors
# that are as fast in all else. [L1885]
_LIKE = (0.35, 0.05, 0.6)
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
    parts = zip(probes, _REFERENCE, _LIKE, strict=True)
    mean = sum(share * math.log2(_least(probe) / one) for probe, one, share in parts)
    return float(2 ** (round(2 * mean) / 2))


def _least(work: Callable[[], object]) -> float:
    """Time some work a few times; return the least."""
    times = []
    for _ in range(_TIMES):
        clock = perf_counter()
        work()
        times.append(perf_counter() - clock)
    return max(min(times), 1e-9)


# Entries of a plan up to which one thread computes, on a CPU. [L349, L497, L602]
_SMALL = 2**21

# Rows of an array from which on all threads of a host read it for a GPU. [L456]
_LONG = 50_000

# Pools that do nothing at most, and entries of a tensor that is computed by all threads. [L503]
_MOST_IDLE = 8
_PARALLEL = 2**18
# Looks at what else runs, and seconds between two: what has just ended may still be seen. [L504]
_LOOKS, _APART = 3, 1e-3

_lock = threading.Lock()
_inside = threading.local()
# Solves on one thread that are under way, and the number of threads before the first of them.
_running = 0
_before = 1


@contextmanager
def small_on_one_thread(n: int, m: int, device: torch.device) -> Iterator[None]:
    """Compute on one thread if n x m points are few, or on a GPU; restore the threads."""
    # PyTorch's number of threads belongs to the process in part and to each thread in part, so
    # solves in several threads share what there was before the first of them.
    global _running, _before
    if (device.type == "cpu" and n * m > _SMALL) or getattr(_inside, "yes", False):
        yield
        return
    with _lock:
        if _running == 0:
            _before = torch.get_num_threads()
        _running += 1
    _inside.yes = True
    torch.set_num_threads(1)
    try:
        yield
    finally:
        _inside.yes = False
        with _lock:
            _running -= 1
            torch.set_num_threads(_before)


@contextmanager
def _waiting_asleep() -> Iterator[None]:
    """Let threads that wait for others sleep at once, in place of spinning for milliseconds."""
    # Where nothing else runs, spinning is two to three times as fast, and stays. GNU's OpenMP spins
    # while its threads are no more than the processors, whatever else runs there. Other pools that
    # do nothing make them more. The numbers of threads stay, and so do the bits.
    # `libgomp/config/linux/wait.h`, `do_spin`, of GCC.
    threads = torch.get_num_threads()
    if threads == 1 or not _is_busy():
        yield
        return
    idle = processors() // (threads - 1)
    if idle > _MOST_IDLE:
        yield
        return
    done = threading.Event()
    with ExitStack() as stack:
        for _ in range(idle):
            ready = threading.Event()
            keeper = threading.Thread(target=_keep_pool, args=(ready, done), daemon=True)
            keeper.start()
            stack.callback(keeper.join)
            ready.wait()
        stack.callback(done.set)
        yield


def most_points(given: Iterable[Any]) -> int:
    """Count the rows of the longest array among what was given."""
    # a nested tensor raises where it is asked for its shape
    plain = (one for one in given if not getattr(one, "is_nested", False))
    shapes = (getattr(one, "shape", None) for one in plain)
    return max((shape[0] for shape in shapes if isinstance(shape, tuple) and shape), default=0)


def processors() -> int:
    """Count the processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _is_busy() -> bool:
    """Whether other work could fill all processors; not known, so false, but on Linux."""
    if not sys.platform.startswith("linux"):
        return False
    for look in range(_LOOKS):
        if look:
            time.sleep(_APART)
        try:
            # what runs now, of all there is
            known = Path("/proc/loadavg").read_text(encoding="ascii").split()[3]
            running = int(known.partition("/")[0])
        except (OSError, IndexError, ValueError):
            return False
        if running <= processors() or running - _own_running() < processors():
            return False
    return True


def _own_running() -> int:
    """Count this process's threads that run: pools wait for work by running, for milliseconds."""
    states = []
    for task in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):
            # the state follows the name in brackets, which may have some in it
            states.append(
                task.read_text(encoding="utf-8", errors="replace").rpartition(") ")[2][:1]
            )
    # this thread is one of them
    return max(1, states.count("R"))


def _keep_pool(ready: threading.Event, done: threading.Event) -> None:
    """Make a pool of threads that belongs to this one, and hold it."""
    try:
        torch.ones(_PARALLEL, device="cpu").mul_(2.0)
    finally:
        ready.set()
    done.wait()


def host_threads(device: torch.device, *given: Any) -> AbstractContextManager[None]:
    """Choose how the host computes: on one thread beside a GPU, such as eigenvectors of few points.

    Not where arrays that are ``given`` are long: the host reads them on all threads. Without a GPU
    all threads compute, and sleep while they wait if other work wants the processors.
    """
    long = most_points(given) > _LONG
    if device.type == "cpu":
        return _waiting_asleep()
    return nullcontext() if long else small_on_one_thread(1, 1, device)
