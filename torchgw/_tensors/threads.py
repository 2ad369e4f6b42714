"""Small work on one thread, and threads that sleep: those that wait for each other cost time."""

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

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
    shapes = (getattr(one, "shape", None) for one in given)
    return max((shape[0] for shape in shapes if isinstance(shape, tuple) and shape), default=0)


def processors() -> int:
    """Count the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
