"""Small work on one thread: threads that wait for each other cost more than they compute."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

__all__ = ["beside_gpu", "small_on_one_thread"]

# Entries of a plan up to which one thread computes, on a CPU. [L349, L497]
_SMALL = 2**22

# Rows of an array from which on all threads of a host read it for a GPU. [L456]
_LONG = 50_000

_lock = threading.Lock()
_inside = threading.local()
# Solves on one thread that are under way, and the number of threads before the first of them.
_running = 0
_before = 1


@contextmanager
def small_on_one_thread(n: int, m: int, device: torch.device) -> Iterator[None]:
    """Compute on one thread if n x m points are few, or on a GPU; restore the threads.

    PyTorch's number of threads belongs to the process in part and to each thread in part, so solves
    in several threads share what there was before the first of them.
    """
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


def beside_gpu(device: torch.device, *given: Any) -> AbstractContextManager[None]:
    """Keep what a host does beside a GPU, such as eigenvectors of few points, on one thread.

    Not where arrays that are ``given`` are long: the host reads them on all threads.
    """
    shapes = (getattr(one, "shape", None) for one in given)
    long = any(isinstance(shape, tuple) and shape and shape[0] > _LONG for shape in shapes)
    return nullcontext() if device.type == "cpu" or long else small_on_one_thread(1, 1, device)
