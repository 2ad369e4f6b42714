"""``torchgw completion``: what a shell needs to complete our commands, made by shtab."""

from __future__ import annotations

import argparse
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from torchgw._errors import UnsupportedError

__all__ = ["add_completion"]

_SHELLS = ("bash", "zsh", "tcsh")
# Arguments without a placeholder that are files.
_FILES = {"X", "Y", "result", "points"}


def add_completion(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], whole: argparse.ArgumentParser
) -> None:
    """Add the command, which describes the whole parser."""
    completion = commands.add_parser(
        "completion", help="print a completion script for a shell",
        description="Print a script that makes a shell complete commands, options and files.",
    )  # fmt: skip
    completion.add_argument("shell", choices=_SHELLS)
    completion.set_defaults(run=partial(_print_script, whole, commands), verbose=0, quiet=False)


def _print_script(
    whole: argparse.ArgumentParser,
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    options: argparse.Namespace,
) -> int:
    """Print the script."""
    if find_spec("shtab") is None:
        raise UnsupportedError(
            "`torchgw completion` needs shtab, which is not installed: "
            "run `pip install 'torchgw[completion]'`."
        )
    import shtab

    for command in commands.choices.values():
        for action in command._actions:
            if action.metavar == "DIR":
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
            elif action.type is Path or action.metavar == "FILE" or action.dest in _FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(whole, shell=options.shell))
    return 0
