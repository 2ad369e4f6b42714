"""The command line: where the commands are entered, and how a process ends.

Exit codes: 0 converged; 1 not converged, or without the dense plan that was asked for, the result
is written all the same; 2 bad usage or input, or a solve that was refused, nothing is written; 3
converged to one of several matches that cost nearly the same, or that may cost less.
"""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torchgw
from torchgw._boundary.console import messages
from torchgw._errors import InvalidInputError, TorchGWError
from torchgw.cli._align import EXIT_CODES, add_align, align
from torchgw.cli._arguments import positive, spoken
from torchgw.cli._commands import add_commands
from torchgw.cli._processes import in_processes, rank

EXIT_REFUSED = 2
# 128 and the number of the signal, as shells have it
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
EXIT_PIPE = 141


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and whose help has defaults."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and leave."""
        self.exit(EXIT_REFUSED, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on arguments, those of the process by default; return the exit code."""
    _open_closed_streams()
    # bad usage and --help leave through SystemExit
    options = _parser().parse_args(arguments)
    try:
        count = options.gpus or options.processes
        if count is not None and rank() is None:
            return _shared(options, count, arguments)
        with _terminable(), messages(options.verbose, options.quiet, spoken):
            code = int(options.run(options))
            sys.stdout.flush()
            return code
    except BrokenPipeError:
        # the reader, such as head, has closed the pipe; at exit Python would flush into it once
        # more
        _let_go_of_output()
        return EXIT_PIPE
    except (OSError, TorchGWError) as error:
        if isinstance(error, OSError):
            # what is left to print would fail in the same way, as where the disk is full
            _let_go_of_output()
        print(f"torchgw: error: {spoken(error)}", file=sys.stderr)
        return EXIT_REFUSED
    except _Terminated:
        print("torchgw: terminated", file=sys.stderr)
        return EXIT_TERMINATED
    except KeyboardInterrupt:
        print("torchgw: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _shared(options: argparse.Namespace, count: int, arguments: Sequence[str] | None) -> int:
    """Run a command in several processes."""
    if options.run is not align:
        raise InvalidInputError("--gpus and --processes share out the work of `align` alone.")
    given = sys.argv[1:] if arguments is None else arguments
    return in_processes(count, main, given, gpus=options.gpus is not None)


class _Terminated(BaseException):
    """The process was asked to end."""


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM unwind the program like an interrupt, so that no half of a file stays."""

    def end(number: int, frame: object) -> None:
        raise _Terminated

    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _open_closed_streams() -> None:
    """Give a process that was started without standard output or error nowhere to write to."""
    # else the next file to be opened would get the number of the stream, and what is written to it
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def _let_go_of_output() -> None:
    """Leave nothing to be flushed at exit into an output that does not take it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = _Parser(
        prog="torchgw",
        description="Match two data sets by the distances inside each (Gromov-Wasserstein).",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"torchgw {torchgw.__version__}")
    shared = parser.add_mutually_exclusive_group()
    shared.add_argument(
        "--gpus", type=positive, metavar="N", help="share the work of align among N GPUs"
    )
    shared.add_argument(
        "--processes", type=positive, metavar="N", help="the same among N processes of the CPU"
    )
    commands: Any = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add_align(commands)
    add_commands(commands, parser)
    return parser
