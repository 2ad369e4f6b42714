"""How fast this processor is, measured once, so that forecasts hold on any."""

import math
from collections.abc import Callable
from functools import cache
from time import perf_counter

import torch

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
