"""What a call was said to take, which is corrected, with the reason, where it does not hold.

All phases that ask whether the time is up ask here too, whether more has passed than was said.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from time import perf_counter

logger = logging.getLogger(__name__)

# How far off a forecast may be, either way, before it is corrected; and what is left, as a share of
# the time that has passed, of work that has gone on for longer than was said. Choices.
OFF, _AGAIN = 1.4, 0.5


@dataclass
class _Told:
    """What was said of one call; nothing of calls on a GPU."""

    start: float = 0.0
    usual: float | None = None  # seconds in all, before the search
    longer: float = 0.0
    total: float = 0.0  # as was said last
    since: float | None = None  # seconds after which the search began whose share was said first

    @property
    def passed(self) -> float:
        """Seconds since it was said how long the call takes."""
        return perf_counter() - self.start


_told: ContextVar[_Told | None] = ContextVar("told", default=None)


@contextmanager
def telling() -> Iterator[None]:
    """Let a block be a call of which something may be said."""
    before = _told.set(_Told())
    try:
        yield
    finally:
        _told.reset(before)


def said_last() -> tuple[float, float]:
    """Tell how many seconds have passed, and how many were said in all."""
    told = _told.get()
    return (0.0, 0.0) if told is None else (told.passed, told.total)


def promise(usual: float, longer: float) -> None:
    """Keep what has been said before any work, of two times that a search may take."""
    told = _told.get()
    if told is not None:
        told.start, told.usual, told.longer, told.total = perf_counter(), usual, longer, usual


def shorten(share: float) -> None:
    """Let a search follow that takes a share of the longer time at most."""
    told = _told.get()
    if told is not None:
        told.longer, told.since = share * told.longer, None


def say_share(share: float, why: str) -> None:
    """Say how much of the longer of two forecasts, that of the most chains, a search will take."""
    told = _told.get()
    if told is not None and told.usual is not None:
        told.since = told.passed if told.since is None else told.since
        told.total = max(told.usual, told.since + share * told.longer)
    logger.info("forecast: %.0f%% of the longer time, as %s", 100 * share, why)


def say_more(seconds: float, why: str) -> None:
    """Say what is yet to come of a solve, beside what was said before it."""
    told = _told.get()
    if told is not None and told.usual is not None:
        told.total = told.passed + seconds
    logger.info("forecast: about %.2g s more, as %s", seconds, why)


def say_beside(seconds: float, why: str) -> None:
    """Say what comes beside all that was said, and beside any share of the longer time."""
    told = _told.get()
    if told is not None and told.usual is not None:
        told.total += seconds
        told.since = None if told.since is None else told.since + seconds
    logger.info("forecast: about %.2g s more, as %s", seconds, why)


def correct(seconds: float, why: str) -> None:
    """Say what is yet to come if that is not what was said."""
    told = _told.get()
    if told is not None and told.usual is not None:
        total, told.since = told.passed + seconds, None
        if not told.total / OFF <= total <= OFF * told.total:
            say_more(seconds, why)


def notice() -> None:
    """Correct what was said if more time has passed."""
    told = _told.get()
    if told is not None and told.usual is not None and told.passed > OFF * told.total:
        say_more(_AGAIN * told.passed, "it goes on for longer than most")
