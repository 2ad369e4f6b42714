"""The ledger: what was tried and what came of it, a row for each attempt, kept or not.

``python -m benchmarks ledger L123 L130-L135`` prints rows by their ids, ``python -m benchmarks
ledger anchors strata`` those that have all of these words.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator

from benchmarks.harness.studies import Row, read

# Fields of a row, all of them strings but `constants`, a dict of names by file; "-" is none.
FIELDS = (
    "id",
    "study",
    "environment",
    "commit",
    "constants",
    "tried",
    "gate",
    "result",
    "kept",
)


def rows() -> dict[str, Row]:
    """Rows by id, in order."""
    return {row["id"]: row for row in read("ledger")}


def ids(text: str) -> Iterator[str]:
    """The ids that a text such as "L3, L5-L7" stands for."""
    for first, last in re.findall(r"L(\d+)(?:-L(\d+))?", text):
        yield from (f"L{number}" for number in range(int(first), int(last or first) + 1))


def shown(row: Row) -> str:
    """A row as a person reads it."""
    origin = [row["kept"], f"commit {row['commit']}"]
    origin += [f"{key} {row[key]}" for key in ("environment", "study") if row[key] != "-"]
    lines = [f"{row['id']}: {', '.join(origin)}"]
    parts = {file: ", ".join(names) for file, names in row["constants"].items()}
    parts |= {"tried": row["tried"], "gate": row["gate"], "before -> after": row["result"]}
    for name, text in parts.items():
        if text != "-":
            lines += textwrap.wrap(
                f"{name}: {text}".rstrip(": "), 96, initial_indent="  ", subsequent_indent="    "
            )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks ledger", description=__doc__)
    parser.add_argument("wanted", nargs="+", metavar="ID|WORD", help="L12, L12-L15, or words")
    options = parser.parse_args(arguments)
    ledger = rows()
    if all(re.fullmatch(r"L\d+(-L\d+)?,?", word) for word in options.wanted):
        wanted = list(ids(" ".join(options.wanted)))
        if missing := [number for number in wanted if number not in ledger]:
            print(f"no row {', '.join(missing)}; the last is {list(ledger)[-1]}", file=sys.stderr)
            return 1
        found = [ledger[number] for number in wanted]
    else:
        words = [word.lower() for word in options.wanted]
        found = [row for row in ledger.values() if all(w in shown(row).lower() for w in words)]
    print("\n\n".join(map(shown, found)) or "no row has these words")
    return 0
