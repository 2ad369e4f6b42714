"""Progress, warnings and logs on standard error."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TextIO

from torchgw._errors import ConvergenceWarning
from torchgw._typing import Iteration

__all__ = ["Progress", "messages", "progress", "verbose_progress"]


class Progress:
    """Callback of a solve that shows its progress: one moving line on a terminal, else many."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._moving = stream.isatty()
        self._last = -float("inf")
        self._open = False

    def __call__(self, state: Iteration) -> None:
        """Show an iteration."""
        now = time.monotonic()
        if now - self._last < (0.1 if self._moving else 1.0):
            return
        self._last = now
        line = (
            f"iteration {state.iteration:5d}  epsilon {state.epsilon:.2e}  "
            f"dual {state.dual:.6g}  marginal error {state.marginal_error:.1e}"
        )
        # \x1b[K clears what a longer line left behind.
        self._stream.write(f"\r{line}\x1b[K" if self._moving else f"{line}\n")
        self._stream.flush()
        self._open = self._moving

    def close(self) -> None:
        """End the moving line."""
        if self._open:
            self._stream.write("\n")
            self._open = False


@contextmanager
def progress(quiet: bool) -> Iterator[Progress | None]:
    """Yield a callback that shows progress, or None if nothing is to be shown."""
    shown = None if quiet or sys.stderr is None else Progress(sys.stderr)
    try:
        yield shown
    finally:
        if shown is not None:
            shown.close()


@contextmanager
def verbose_progress(verbose: bool) -> Iterator[Callable[[Iteration], None] | None]:
    """Yield a callback that shows each iteration, as a bar of tqdm where one can move."""
    if not verbose or sys.stderr is None:
        yield None
    elif find_spec("tqdm") is None or not (sys.stderr.isatty() or _in_notebook()):
        yield _write_line
    else:
        from tqdm.auto import tqdm

        with tqdm(desc="torchgw", unit=" iterations") as bar:

            def advance(state: Iteration) -> None:
                bar.set_postfix_str(
                    f"epsilon {state.epsilon:.2e}, dual {state.dual:.5g}, marginal error "
                    f"{state.marginal_error:.1e}",
                    refresh=False,
                )
                bar.update()

            yield advance


def _write_line(entry: Iteration) -> None:
    sys.stderr.write(
        f"{entry.iteration + 1:4d}  epsilon {entry.epsilon:.3e}  dual "
        f"{entry.dual:.6e}  marginal error {entry.marginal_error:.1e}  change "
        f"{entry.change:.1e}  inner {entry.inner_iterations}\n"
    )


def _in_notebook() -> bool:
    """Tell whether the code runs in a Jupyter kernel, whose standard error is no terminal."""
    return "ipykernel" in sys.modules


@contextmanager
def messages(verbosity: int, quiet: bool) -> Iterator[None]:
    """Send warnings and logs of the package to standard error, as a command line tool does."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        sys.stderr.write(f"torchgw: warning: {message}\n")

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logger, level = logging.getLogger("torchgw"), logging.getLogger("torchgw").level
    logger.addHandler(handler)
    logger.setLevel((logging.WARNING, logging.INFO, logging.DEBUG)[min(verbosity, 2)])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if quiet else "default")
            # the status line and the exit code say it
            warnings.simplefilter("ignore", ConvergenceWarning)
            # other packages cause these, and a user of the command line cannot change that
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.showwarning = show
            yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
