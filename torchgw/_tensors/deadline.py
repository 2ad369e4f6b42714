"""When a call has to end, which all of its phases look at.

A search, the outer loop and Sinkhorn's iterations end early once no time is left but for what has
to follow them: the last marginals, and the numbers of the plan.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from time import monotonic

# Share of the time kept that the numbers of a plan take, beside its last marginals. [L1294]
_LAST = 0.4


@dataclass
class _Clock:
    """When a call has to end."""

    start: float
    end: float
    kept: float = 0.0  # seconds for what follows the phase that goes on
    least: float = 0.0  # of these
    shared: bool = False  # whether processes share the work, and have to agree on when it ends


_clock: ContextVar[_Clock | None] = ContextVar("clock", default=None)


@contextmanager
def within(seconds: float | None, *, shared: bool = False) -> Iterator[None]:
    """Let a block end within some seconds from now; ``None`` is any time."""
    now = monotonic()
    clock = None if seconds is None else _Clock(now, now + seconds, shared=shared)
    before = _clock.set(clock)
    try:
        yield
    finally:
        _clock.reset(before)


def keep(seconds: float) -> None:
    """Keep some seconds, of those that are left, for what has to follow the phase that goes on."""
    clock = _clock.get()
    if clock is not None:
        clock.kept = max(seconds, clock.least)


def keep_least(seconds: float, share: float) -> None:
    """Keep some seconds in any phase, and a share of all."""
    clock = _clock.get()
    if clock is not None:
        clock.least = max(seconds, share * (clock.end - clock.start))
        clock.kept = max(clock.kept, clock.least)


def last_phase() -> None:
    """Give the rest of the time to the phase that goes on, but for a part of what was kept."""
    clock = _clock.get()
    if clock is not None:
        clock.kept, clock.least = _LAST * clock.kept, 0.0


def is_over(*, agreed: bool = False) -> bool:
    """Whether the time is up, but for what was kept.

    Where processes share the work only those ask who will have ``agreed`` on the answer.
    """
    clock = _clock.get()
    if clock is None or (clock.shared and not agreed):
        return False
    return monotonic() >= clock.end - clock.kept
