"""Options that commands share: words of the command line, and how much is reported."""

import argparse
import os
import re
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from torchgw._problem.table import TABLE, Option
from torchgw.distances.base import DistanceProvider

# Arguments of a solve that are files here.
_INPUTS = {
    "a": "--a", "b": "--b", "M": "--linear-cost", "allowed": "--allowed", "pairs": "--pairs",
    "groups": "--same-labels", "D_X": "X with --distance-matrices",
    "D_Y": "Y with --distance-matrices",
}  # fmt: skip


# What messages offer that a command line cannot be given.
_PYTHON = re.compile(
    r",? or None\b|, a DistanceProvider\b|; a function or a manifold makes a ManifoldDistance"
)


def spoken(message: object) -> str:
    """Write a message without Python: names as flags, such as `mass=0.7`, and words unquoted."""
    flags = {name: option.flag for name, option in TABLE.items() if option.flag} | _INPUTS
    quotes = str.maketrans("", "", "'\"")

    def flag(found: re.Match[str]) -> str:
        tick, name, value, end = found.groups()
        if name not in flags or tick != end or (not tick and value is None):
            return found[0]
        said = {
            "True": flags[name],
            "False": f"--no-{flags[name][2:]}",
            "None": f"no {flags[name]}",
        }
        if value in said:
            return said[value]
        return flags[name] if value is None else f"{flags[name]} {value.translate(quotes)}"

    text = re.sub(r"(`?)\b(\w+)(?:=('[^']*'|\"[^\"]*\"|[\w.+-]*\w))?(`?)", flag, str(message))
    known = {word for option in TABLE.values() for word in _words(option)}
    text = re.sub(r"'([\w-]+)'", lambda quoted: quoted[quoted[1] in known], text)
    return _PYTHON.sub("", text)


def add_columns(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which columns of tables are no coordinates."""
    parser.add_argument(
        "--id-column", metavar="NAME", help="column of tables that names their rows (default: the "
        "first, if it has no name or holds words alone)",
    )  # fmt: skip
    parser.add_argument(
        "--label-column", metavar="NAME", help="column of tables that is a label, no coordinate"
    )


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how much is reported."""
    volume = parser.add_mutually_exclusive_group()
    volume.add_argument("-q", "--quiet", action="store_true", help="report errors only")
    volume.add_argument("-v", "--verbose", action="count", default=0, help="log more; -vv for all")


def positive(text: str) -> int:
    """Read a whole number above zero."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1; got {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """Read a time in seconds, minutes or hours."""
    units = {"s": 1, "m": 60, "h": 3600}
    number, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1)
    try:
        total = float(number) * unit
    except ValueError:
        total = 0.0
    if not 0 < total < float("inf"):
        raise argparse.ArgumentTypeError(f"must be seconds, such as 90, 10m or 2h; got {text!r}")
    return total


def _number(text: str, wanted: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be {wanted}; got {text!r}") from error


def number_or_auto(text: str) -> float | str:
    """Read a number, or the word auto."""
    return text if text == "auto" else _number(text, "a number, or auto")


def numbers(text: str) -> float | tuple[float, ...]:
    """Read one number, or some joined by commas."""
    wanted = "a number, or two joined by a comma"
    found = tuple(_number(part, wanted) for part in text.split(","))
    return found[0] if len(found) == 1 else found


def pair(text: str) -> str | tuple[str, str]:
    """Read one name, or two joined by a comma."""
    names = text.split(",")
    if len(names) > 2:
        raise argparse.ArgumentTypeError(f"one name or two, got {text}")
    return names[0] if len(names) == 1 else (names[0], names[1])


class _Words(list[str]):
    """Words that are shown, and that a shell completes; others are refused by the solver."""

    def __contains__(self, word: object) -> bool:
        return True


def _kinds(option: Option) -> set[Any]:
    """Take the type of an option apart."""
    return set(get_args(option.type) or (option.type,)) - {NoneType}


def _words(option: Option) -> list[str]:
    """List the words that an option may be."""
    literals = [kind for kind in (option.type, *_kinds(option)) if get_origin(kind) is Literal]
    return [word for kind in literals for word in get_args(kind)]


def flag_of(option: Option) -> dict[str, Any]:
    """Describe the flag of an option to argparse: its help, and how its values are read."""
    kinds, words = _kinds(option), _words(option)
    about = option.doc.replace("``", "").partition(". ")[0].rstrip(".")
    if DistanceProvider in kinds:
        about += f": one of {', '.join(words)}, or two of these for X and Y, as euclidean,cosine"
    if option.default not in (None, False):
        about += f" (default: {option.default})"
    reading: dict[str, Any] = {}
    if option.name == "time_limit":
        reading = {"type": seconds, "metavar": "TIME"}
    elif DistanceProvider in kinds:
        reading = {"type": pair, "metavar": "NAME[,NAME]", "choices": _Words(words)}
    elif {bool, float} <= kinds:
        reading = {"nargs": "?", "const": True, "type": float, "metavar": "NUMBER"}
    elif bool in kinds:
        reading = {"action": argparse.BooleanOptionalAction}
    elif tuple[float, float] in kinds:
        reading = {"type": numbers, "metavar": "NUMBER[,NUMBER]"}
    elif float in kinds:
        reading = {"type": float, "metavar": "NUMBER"}
        if words:
            reading = {
                "type": number_or_auto, "metavar": "NUMBER|auto", "choices": _Words(words)
            }  # fmt: skip
    elif os.PathLike[str] in kinds:
        reading = {"metavar": "DIR" if option.name == "cache" else "FILE"}
    elif words:
        reading = {
            "choices": _Words([*words, "none"] if NoneType in get_args(option.type) else words)
        }
    elif int in kinds and str not in kinds:
        reading = {"type": int, "metavar": "N"}
    return {"help": about.replace("%", "%%"), **reading}
