"""The time of a call: when it has to end, and what was said that it takes.

All phases ask here. A search, the outer loop and Sinkhorn's iterations end early once no time is
left but for what has to follow them: the last marginals, and the numbers of the plan. What a call
was said to take is corrected, with the reason, where it does not hold.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import monotonic, perf_counter, process_time

import torch

from torchgw._errors import PerformanceWarning, warn_user
from torchgw._tensors.ahead import has_compiled, waited

logger = logging.getLogger(__name__)

# Share of the time kept that the numbers of a plan take, beside its last marginals. [L1294]
_LAST = 0.4
# How late a limit of time is held to be, in seconds and as a share of it. [L1567]
_LATE, _LATE_SHARE = 2.0, 0.1
# Seconds of a processor without others that are taken for granted, as moments do not tell how
# loaded it is. A choice.
_QUIET = 0.1


@dataclass
class _Clock:
    """When a call has to end."""

    start: float
    end: float
    kept: float = 0.0  # seconds for what follows the phase that goes on
    least: float = 0.0  # of these
    after: float = 0.0  # steps of the last phase that what follows it takes as long as
    shared: bool = False  # whether processes share the work, and have to agree on when it ends
    told: bool = False  # whether it was said that the call ends late
    spent: float = field(default_factory=lambda: process_time())  # CPU seconds before it began
    waited: float = field(default_factory=lambda: waited())  # seconds for kernels, likewise

    @property
    def whole(self) -> float:
        """Seconds of the call."""
        return self.end - self.start

    @property
    def late(self) -> float:
        """Seconds by which it may end late."""
        return max(_LATE, _LATE_SHARE * self.whole)

    @property
    def load(self) -> float:
        """How many times as long as its work the call takes, where others use the processor too."""
        passed, used = monotonic() - self.start, process_time() - self.spent
        return max(1.0, (_QUIET + passed) / (_QUIET + used))


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
    if clock is None:
        return
    late, compiled = monotonic() - clock.end, waited() - clock.waited
    if late > clock.late >= late - compiled:
        warn_user(
            f"`time_limit` was passed by {late:.2g} s, as kernels were compiled for {compiled:.2g} "
            "s. They are kept for later calls; `torchgw.warmup()` compiles them beforehand.",
            PerformanceWarning,
        )


def compiles_within(seconds: float | None, device: torch.device) -> bool:
    """Whether a limit leaves time to compile kernels, should there be none yet."""
    # one that is no longer than it may be late does not [L1929]
    return seconds is None or seconds > _LATE or has_compiled(device)


def keep(seconds: float) -> None:
    """Keep some seconds, of those that are left, for what has to follow the phase that goes on."""
    clock = _clock.get()
    if clock is not None:
        clock.kept = max(seconds, clock.least)


def keep_least(seconds: float, share: float) -> None:
    """Keep the time for some seconds of work in any phase, and a share of all."""
    clock = _clock.get()
    if clock is not None:
        # a loaded processor lets it keep half at most
        clock.least = max(min(clock.load * seconds, 0.5 * clock.whole), share * clock.whole)
        clock.kept = max(clock.kept, clock.least)


def leaves(seconds: float, *, last: bool = False) -> bool:
    """Whether there is time for some seconds of work; with what was kept if it is the ``last``."""
    clock = _clock.get()
    if clock is None or clock.shared:
        return True
    return monotonic() + clock.load * seconds <= clock.end - (0 if last else clock.kept)


def patience() -> float | None:
    """Tell how many seconds to wait for what work can do without: half of those left, or any."""
    clock = _clock.get()
    if clock is None or clock.shared:
        return None
    return max(0.0, (clock.end - clock.kept - monotonic()) / 2)


def foresee(seconds: float, what: str) -> None:
    """Warn once that a limit of time cannot be held if what has to follow takes too long."""
    clock = _clock.get()
    if clock is None or clock.told:
        return
    # what is close to the most that a limit may be late is said too, as a forecast may be off
    cannot, clock.told = (not leaves(times * seconds - clock.late, last=True) for times in (1, OFF))
    if clock.told:
        passed = monotonic() - clock.start
        warn_user(
            f"`time_limit` is too short, as {what} alone take about {seconds:.2g} s on this CPU, "
            f"and {passed:.2g} s have passed: it {'cannot' if cannot else 'may not'} be held. The "
            "plan that comes late is hardly better than its start. Fewer points, "
            "`solve_low_rank`, a GPU or a larger limit help.",
            PerformanceWarning,
        )


def last_phase(after: float = 0.0) -> None:
    """Give the rest of the time to the phase that goes on, but for a part of what was kept.

    What follows takes as long as so many steps of this phase.
    """
    clock = _clock.get()
    if clock is not None:
        clock.after, clock.kept, clock.least = after, _LAST * clock.kept, 0.0


def step_took(seconds: float) -> None:
    """Keep the time for what follows the last phase, of which a step took some seconds."""
    clock = _clock.get()
    if clock is not None:
        clock.kept = max(clock.kept, clock.after * seconds)


def fitting(count: int, seconds: float | None, most: float) -> int:
    """Count how many of some steps fit into the time, one at least.

    A step takes some ``seconds``; before the first tells, ``most`` of a processor without others.
    """
    clock = _clock.get()
    if clock is None or clock.shared:
        return count
    seconds = clock.load * most if seconds is None else seconds
    left = clock.end - clock.kept - monotonic()
    return count if left >= count * seconds else max(1, int(left / seconds))


def is_over(*, agreed: bool = False) -> bool:
    """Whether the time is up, but for what was kept."""
    # Where processes share the work only those ask who will have `agreed` on the answer.
    notice()
    clock = _clock.get()
    if clock is None or (clock.shared and not agreed):
        return False
    return monotonic() >= clock.end - clock.kept


def countdown(seconds: float | None) -> Callable[[], float | None]:
    """Count the seconds that are left of some from now, a moment at least; ``None`` is any time."""
    end = None if seconds is None else monotonic() + seconds
    # a solve of a moment returns what it begins with
    return lambda: None if end is None else max(1e-3, end - monotonic())


# How far off a forecast may be, either way, before it is corrected; and what is left, as a share of
# the time that has passed, of work that has gone on for longer than was said. Choices.
OFF, _AGAIN = 1.4, 0.5


@dataclass
class _Told:
    """What was said of one call; nothing of calls on a GPU."""

    start: float = 0.0  # of the work of which something was said first
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
        told.start = told.start or perf_counter()
        told.usual, told.longer, told.total = usual, longer, usual


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
