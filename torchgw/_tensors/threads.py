"""Small work on one thread: threads that wait for each other cost more than they compute."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["small_on_one_thread"]

# Entries of a plan up to which one thread computes, on a CPU. [L349]
_SMALL = 2**18

_lock = threading.Lock()
_inside = threading.local()
# Solves on one thread that are under way, and the number of threads before the first of them.
_running = 0
_before = 1


@contextmanager
def small_on_one_thread(n: int, m: int, device: torch.device) -> Iterator[None]:
    """Compute a problem of n x m points on one thread if it is small; restore the threads.

    PyTorch's number of threads belongs to the process in part and to each thread in part, so solves
    in several threads share what there was before the first of them.
    """
    global _running, _before
    if device.type != "cpu" or n * m > _SMALL or getattr(_inside, "yes", False):
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
