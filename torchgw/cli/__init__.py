"""The command line: ``torchgw align`` and the commands that read what it writes."""

import sys
from collections.abc import Sequence

import torchgw


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on arguments, those of the process by default; return the exit code."""
    if list(sys.argv[1:] if arguments is None else arguments) == ["--version"]:
        # what else there is takes a second to import
        sys.stdout.write(f"torchgw {torchgw.__version__}\n")
        return 0
    from torchgw.cli._main import main as run

    return run(arguments)


__all__ = ["main"]
