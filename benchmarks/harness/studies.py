"""What was measured, as it is kept in benchmarks/results: one JSON object a row, one file a study.

``python -m benchmarks log-tables STUDY`` prints a file as Markdown tables.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"

Row = dict[str, Any]

# What every row says of where it comes from; the other fields are its columns.
ORIGIN = ("table", "section", "environment", "commit", "recorded", "command")


class Numeral(float):
    """A number that remembers how it was written: 1.0000 and 4.70e-4 say how exact they are."""

    text: str

    def __new__(cls, text: str) -> Numeral:
        number = super().__new__(cls, text)
        number.text = text
        return number

    def __str__(self) -> str:
        return self.text


def studies() -> list[str]:
    """Files of measurements: all but the ledger, whose rows say what was tried."""
    return sorted({path.stem for path in RESULTS.glob("*.jsonl")} - {"ledger"})


def read(study: str) -> list[Row]:
    lines = (RESULTS / f"{study}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_float=Numeral) for line in lines]


def markdown(heads: Sequence[str], cells: Iterable[Sequence[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *cells]
    return "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)


def tables(study: str, word: str = "") -> str:
    """Tables of a study whose title contains a word, each under its title and origin."""
    found: dict[str, list[Row]] = {}
    for row in read(study):
        title = str(row.get("table", row.get("group", study)))
        if word.lower() in title.lower():
            found.setdefault(title, []).append(row)
    return "\n\n".join(_titled(title, rows) for title, rows in found.items())


def _titled(title: str, rows: list[Row]) -> str:
    heads = list(dict.fromkeys(key for row in rows for key in row if key not in ORIGIN))
    origin = [
        f"{key} {', '.join(values)}"
        for key in ORIGIN[1:]
        if (values := list(dict.fromkeys(str(row[key]) for row in rows if key in row)))
    ]
    body = markdown(heads, ([row.get(head, "") for head in heads] for row in rows))
    return f"**{title}**\n\n{'; '.join(origin)}\n\n{body}"


def _cell(value: object) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text.replace("|", "\\|")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks log-tables", description=__doc__)
    parser.add_argument("study", choices=studies())
    parser.add_argument("--table", default="", metavar="WORD", help="only titles that contain it")
    options = parser.parse_args(arguments)
    print(tables(options.study, options.table))
    return 0
