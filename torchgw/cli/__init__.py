"""The command line: ``torchgw align`` and the commands that read what it writes."""

from torchgw.cli._main import main as main

__all__ = ["main"]
