"""Progress, warnings and logs on standard error."""

import logging
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO

import numpy as np

from torchgw._errors import ConvergenceWarning
from torchgw._typing import Iteration

# The pace, and the decrease of the changes, are estimated from so many iterations. [L377]
_WINDOW = 12


class Progress:
    """Callback of a solve that shows its progress: one moving line on a terminal, else many."""

    # `total` is the largest number of iterations, `tol` the change of the plan at which they end,
    # and `pause` the seconds between two lines where none moves.

    def __init__(
        self, stream: TextIO, total: int | None = None, tol: float = 1e-5, pause: float = 1.0
    ) -> None:
        self._stream = stream
        # in a notebook standard error is no terminal, and lines move nonetheless
        self.moves = stream.isatty() or "ipykernel" in sys.modules
        self._pause = 0.1 if self.moves else pause
        self._last = -float("inf")
        self._open = False
        self._total, self._tol = total, tol
        self._start = time.monotonic()
        # iteration, time and change of the iterations at the present epsilon and size
        self._recent: list[tuple[int, float, float]] = []
        self._stage: tuple[float, tuple[int, int]] | None = None

    def __call__(self, state: Iteration) -> None:
        """Show an iteration."""
        now = time.monotonic()
        stage = state.epsilon, state.shape
        if stage != self._stage:
            # the pace at another size, and changes at another epsilon, do not count for this stage
            self._recent, self._stage = self._recent[-1:] if self._stage else [], stage
        self._recent.append((state.iteration, now, state.change))
        if now - self._last >= self._pause:
            self._last = now
            self._show(state, now)

    def _show(self, state: Iteration, now: float) -> None:
        """Write a line."""
        of = "" if self._total is None else f" of at most {self._total}"
        line = (
            f"iteration {state.iteration + 1}{of}  epsilon {state.epsilon:.2e}  "
            f"dual {state.dual:.6g}  marginal error {state.marginal_error:.1e}  "
            f"{_duration(now - self._start)}{self._left(state)}"
        )
        self._write(line)

    def part(self, what: str, done: int, count: int, spent: float, before: int = 0) -> None:
        """Show how much is done, after so many seconds, all but what was done ``before``."""
        now = time.monotonic()
        if done == count or now - self._last >= self._pause:
            self._last = now
            left = _duration(spent / (done - before) * (count - done))
            self._write(f"{what} {done} of {count}  {_duration(spent)}, about {left} left")

    def _write(self, line: str) -> None:
        """Write a line, over the last one where it moves."""
        # \x1b[K clears what a longer line left behind.
        self._stream.write(f"\r{line}\x1b[K" if self.moves else f"{line}\n")
        self._stream.flush()
        self._open = self.moves

    def _left(self, state: Iteration) -> str:
        """Say how long the solve will take: about so long if changes shrink, else at most."""
        recent = self._recent[-_WINDOW:]
        if self._total is None or len(recent) < 2:
            return ""
        (first, start, _), (last, now, _) = recent[0], recent[-1]
        pace = (now - start) / max(1, last - first)
        most = self._total - 1 - state.iteration
        left = _iterations_left(recent[1:], self._tol)
        if left is None or left >= most:
            return f", at most {_duration(most * pace)} left"
        return f", about {_duration(left * pace)} left"

    def close(self) -> None:
        """End the moving line."""
        if self._open:
            self._stream.write("\n")
            self._open = False


def _iterations_left(recent: list[tuple[int, float, float]], tol: float) -> float | None:
    """Estimate the iterations to the tolerance from how changes shrink; ``None`` if they do not."""
    known = [(step, math.log(change)) for step, _, change in recent if 0 < change < math.inf]
    if len(known) < _WINDOW // 2:
        return None
    steps, logs = zip(*known, strict=True)
    slope = np.polyfit(steps, logs, 1)[0]
    return None if slope >= 0 else max(0.0, (math.log(tol) - logs[-1]) / slope)


def _duration(seconds: float) -> str:
    """Write a time as people read it."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes / 60:.1f} h"


@contextmanager
def progress(
    shown: bool,
    total: int | None = None,
    tol: float = 1e-5,
    spoken: Callable[[object], str] = str,
    pause: float = 1.0,
) -> Iterator[Progress | None]:
    """Yield a callback that shows progress, with logs as `spoken`, or None if it had no use."""
    if not shown or sys.stderr is None:
        yield None
        return
    report = Progress(sys.stderr, total, tol, pause)
    with _search_shown(spoken):
        try:
            yield report
        finally:
            report.close()


@contextmanager
def counted(total: int, what: str, *, shown: bool, done: int = 0) -> Iterator[Callable[[int], Any]]:
    """Yield a function that takes how much more is done, and shows it where lines move."""
    report = Progress(sys.stderr) if shown and sys.stderr is not None else None
    start, before = time.monotonic(), done

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if report is not None and report.moves:
            report.part(what, done, total, time.monotonic() - start, before)

    try:
        yield advance
    finally:
        if report is not None:
            report.close()


class _Spoken(logging.Formatter):
    """Write logs in the words of who shows them."""

    def __init__(self, form: str, spoken: Callable[[object], str]) -> None:
        super().__init__(form)
        self._spoken = spoken

    def format(self, record: logging.LogRecord) -> str:
        return self._spoken(super().format(record))


# What a search logs comes before all iterations, and the forecast before that.
_SHOWN = (
    "torchgw._solve.forecast", "torchgw._search", "torchgw._tensors.deadline",
    "torchgw._variants.solve_rows",
)  # fmt: skip


@contextmanager
def _search_shown(spoken: Callable[[object], str] = str) -> Iterator[None]:
    """Write what a solve will take and what its search logs, unless logs are shown anyway."""
    with ExitStack() as shown:
        for name in _SHOWN:
            if not logging.getLogger(name).isEnabledFor(logging.INFO):
                handler = logging.StreamHandler(sys.stderr)
                handler.setFormatter(_Spoken("%(message)s", spoken))
                shown.enter_context(_logging(name, logging.INFO, handler))
        yield


@contextmanager
def _logging(name: str, level: int, handler: logging.Handler) -> Iterator[None]:
    """Let a logger log to a handler as well, from a level on."""
    logger = logging.getLogger(name)
    before = logger.level
    # what a child of the logger shows by a handler of its own is not said twice
    handler.setLevel(level)
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


@contextmanager
def messages(verbosity: int, quiet: bool, spoken: Callable[[object], str] = str) -> Iterator[None]:
    """Send warnings, as `spoken`, and logs to standard error, as a command line tool does."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        sys.stderr.write(f"torchgw: warning: {spoken(message)}\n")

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Spoken("%(name)s: %(message)s", spoken))
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbosity, 2)]
    with _logging(__name__.partition(".")[0], level, handler), warnings.catch_warnings():
        warnings.simplefilter("ignore" if quiet else "default")
        # the status line and the exit code say this already
        warnings.simplefilter("ignore", ConvergenceWarning)
        # other packages cause these, and a user of the command line cannot change that
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.showwarning = show
        yield
