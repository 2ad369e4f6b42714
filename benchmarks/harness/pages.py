"""Tables of the documentation, made from benchmarks/results/standing.jsonl and the package.

``python -m benchmarks tables PAGE`` writes them between the markers of the page; ``--check`` only
says whether the page is what it would write.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.harness.studies import Row, markdown, read
from torchgw._problem.limits import LIMITS
from torchgw._problem.table import TABLE, spelled
from torchgw._solve.route import MOVES

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "performance": ROOT / "docs" / "performance.md", "readme": ROOT / "README.md",
    "log": ROOT / "OPTIMIZATION_LOG.md", "migrating": ROOT / "docs" / "migrating.md",
    "how-to-choose": ROOT / "docs" / "how-to-choose.md", "options": ROOT / "docs" / "options.md",
    "leaderboard": ROOT / "docs" / "leaderboard.md",
}  # fmt: skip
_MARKED = (
    r"(<!-- table ([a-z-]+), made by: python -m benchmarks tables {} -->\n)(.*?)(<!-- end -->)"
)

Column = tuple[str, Callable[[Row], str]]


def rendered(page: str) -> str:
    """The text of a page with its tables made anew."""
    text = PAGES[page].read_text(encoding="utf-8")
    return re.sub(
        _MARKED.format(page), lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[4]}", text,
        flags=re.S,
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks tables", description=__doc__)
    parser.add_argument("page", choices=list(PAGES))
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if it differs")
    options = parser.parse_args(arguments)
    path, text = PAGES[options.page], rendered(options.page)
    if path.read_text(encoding="utf-8") == text:
        return 0
    if options.check:
        print(f"{path.name} is not what the measurements say", file=sys.stderr)
        return 1
    path.write_text(text, encoding="utf-8")
    return 0


def _seconds(row: Row) -> str:
    """A time; two of a quick and a slow host; or, falling, one for each of several clouds."""
    if "seconds" not in row:
        return ""
    times = row["seconds"] if isinstance(row["seconds"], list) else [row["seconds"]]
    joint = " to " if times[0] < times[-1] else " / "
    if max(times) >= 0.1:
        return joint.join(map(str, times)) + " s"
    factor, unit = (1e6, "us") if max(times) < 1e-4 else (1e3, "ms")
    return joint.join(f"{factor * t:.4g}" for t in times) + f" {unit}"


def _power(number: float, digits: int = 2) -> str:
    """A number as 3.81e-4."""
    mantissa, exponent = f"{number:.{digits - 1}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _value(row: Row) -> str:
    if "value" not in row:
        return ""
    text = str(row["value"])
    if "value_error" in row:
        text += f" +- {row['value_error']}"
    return f"{text}, {row['value_of']}" if "value_of" in row else text


def _marginal(row: Row) -> str:
    return _power(row["l1_marginal"]) if "l1_marginal" in row else ""


def _memory(row: Row) -> str:
    return f"{row['peak_mib']:,} MiB" if "peak_mib" in row else ""


def _field(name: str) -> Callable[[Row], str]:
    return lambda row: str(row.get(name, ""))


def _command(row: Row) -> str:
    return f"`{row['command']}`" if "command" in row else ""


def _quality(row: Row) -> str:
    """What stands beside a time: the value and errors, or what was found."""
    parts = [row["quality"]] if "quality" in row else []
    if "value" in row:
        parts.append(f"value {_value(row)}")
    if "feasible_value" in row:
        parts.append(f"feasible {row['feasible_value']}")
    if "l1_marginal" in row:
        parts.append(f"L1 marginal {_marginal(row)}")
    if "spearman" in row and "Spearman" not in row.get("quality", ""):
        parts.append(f"Spearman {row['spearman']}")
    parts.extend(f"{name} {row[name]}" for name in ("error", "status") if name in row)
    return "; ".join(parts)


_COMMIT: Column = ("commit", _field("commit"))
_TIME: Column = ("time", _seconds)


def _table(group: str, *columns: Column, peers: bool = False) -> Callable[[], str]:
    def made() -> str:
        rows = [row for row in read("standing") if row["group"] == group]
        rows = [row for row in rows if peers or row["solver"].startswith("torchgw, ") or _ours(row)]
        return markdown(
            [head for head, _ in columns], ([f(row) for _, f in columns] for row in rows)
        )

    return made


def _ours(row: Row) -> bool:
    return bool(row["solver"] == "torchgw")


def _standing() -> str:
    """One row a goal, with what the peers reach on it."""
    rows = read("standing")
    heads = [
        "goal", "time, memory", "quality beside it", "peers", "asked", "E", "commit", "command",
    ]  # fmt: skip
    lines = []
    goals = dict.fromkeys((row["group"], row["goal"]) for row in rows)
    for goal in goals:
        own, *peers = [row for row in rows if (row["group"], row["goal"]) == goal]
        others = [
            f"{row['solver']}: " + "; ".join(filter(None, [_seconds(row), _quality(row)]))
            for row in peers
        ]
        measured = ", ".join(filter(None, [_seconds(own), _memory(own)]))
        rest = [own.get("asked", ""), own["environment"], own["commit"], _command(own)]
        lines.append([goal[1], measured, _quality(own), " / ".join(others), *rest])
    return markdown(heads, lines)


def _compared() -> str:
    """The rows of the first page: one size beside the peers, and the largest."""
    shown = {"spiral 4,000 x 5,000", "spiral 1,000,000 x 1,000,000"}
    rows = [row for row in read("standing") if row["goal"] in shown]
    heads = ["problem", "solver", "time", "peak memory", "value", "Spearman"]
    lines = [
        [
            row["goal"],
            row["solver"],
            *(f(row) for f in (_seconds, _memory, _value)),
            row["spearman"],
        ]
        for row in rows
    ]
    return markdown(heads, lines)


def _hard() -> str:
    """The hard cases of the quality suite, ours beside the peers."""
    heads = ["problem", "runner", "success", "right", "value", "value of the truth", "edges kept"]
    heads += ["s", "status", "doubt said", "commit"]
    rows = [row for row in read("hard-cases") if "success" in row]
    return markdown(heads, [[str(row.get(head, "")) for head in heads] for row in rows])


def _unseen() -> str:
    """Problems that no default was tuned on: how many seeds end within 1% of the best known."""
    heads = ["problem", "within 1%", "worst", "above and silent", "thorough", "POT"]
    heads += ["right", "right by POT", "CPU s", "of POT"]
    lines = [[str(row.get(head, "")) for head in heads] for row in read("unseen")]
    return markdown(heads, lines)


def _league() -> str:
    """How many problems each solver is right on, of those that it was run on."""
    heads = ["set", "solver", "problems won", "of", "share"]
    counts: dict[tuple[str, str], list[int]] = {}

    def add(kind: str, solver: str, cell: str) -> None:
        if "/" in cell:
            won, of = map(int, cell.split("/"))
            total = counts.setdefault((kind, solver), [0, 0])
            total[0] += won
            total[1] += of

    for row in read("hard-cases"):
        add("hard cases", row.get("runner", ""), row.get("success", ""))
    for row in read("unseen"):
        found = re.search(r"\((.*)\)$", row["problem"])
        for solver in ("within 1%", "thorough", "POT"):
            name = {"within 1%": "ours", "thorough": "ours, thorough"}.get(solver, solver)
            add(f"unseen, {found[1]}" if found else "unseen", name, row[solver])
    lines = [[*key, won, of, f"{won / of:.0%}"] for key, (won, of) in sorted(counts.items())]
    return markdown(heads, [[str(cell) for cell in line] for line in lines])


def _cells() -> str:
    """FOSCTTM of the cells of SNARE-seq."""
    rows = [row for row in read("standing") if "FOSCTTM" in row.get("quality", "")]
    heads = ["problem", "solver", "quality", "time", "commit"]
    return markdown(
        heads,
        [
            [row["goal"], row["solver"], row["quality"], _seconds(row), row["commit"]]
            for row in rows
        ],
    )


def _pot_tests() -> str:
    """What became of POT's tests, by file, and of all."""
    rows = [row for row in read("pot") if row["table"] == "POT's tests on torchgw.pot"]
    outcomes = ("passed", "better", "refused", "failed")
    heads = ["POT's tests", "the same", *outcomes[1:], "what is different"]
    lines = [
        [row["file"], *(row[name] for name in outcomes), "; ".join(row["reasons"])] for row in rows
    ]
    whole = [sum(row[name] for row in rows) for name in outcomes]
    share = f"{100 * whole[0] / sum(whole):.1f}% are the same"
    return markdown(heads, [*lines, ["all", *whole, share]])


def _pot_times() -> str:
    """Seconds of small problems beside POT's, and by how much values are higher at most."""
    rows = [row for row in read("pot") if row["table"] == "torchgw.pot beside POT, seconds"]
    sizes = sorted({row["n"] for row in rows})
    heads = ["seconds ours / POT", *(f"n = {n}" for n in sizes), "highest excess of a value"]
    lines = []
    for kind in dict.fromkeys(row["row"] for row in rows):
        part = {row["n"]: row for row in rows if row["row"] == kind}
        cells = [f"{part[n]['ours']} / {part[n]['pot']}" for n in sizes]
        excess = max(float(row["excess"]) for row in part.values())
        lines.append([kind, *cells, "none" if excess < 1e-9 else f"{excess:.0e}"])
    return markdown(heads, lines)


def _options(*, common: bool) -> str:
    """Options that `solve` has parameters for, or the others."""
    rows = (
        (
            f"`{name}`", spelled(option.type), f"`{option.default!r}`",
            f"`{option.flag}`" if option.flag else "",
            option.doc.replace("``", "`"),
        )
        for name, option in TABLE.items()
        if option.common == common
    )  # fmt: skip
    return markdown(["option", "values", "default", "flag", "what it is"], rows)


def _moves() -> str:
    """The moves of the search, and up to which sizes they are made."""
    lines = []
    for move in MOVES:
        cpu, gpu = (move.limit(LIMITS[device]) for device in ("cpu", "cuda"))
        lines.append([move.name, move.what, move.where, cpu, "" if cpu == gpu else gpu])
    return markdown(["move", "what", "where", "up to, CPU", "up to, GPU, if other"], lines)


TABLES: dict[str, Callable[[], str]] = {
    "moves": _moves,
    "common": partial(_options, common=True),
    "rare": partial(_options, common=False),
    "standing": _standing,
    "compared": _compared,
    "hard": _hard,
    "unseen": _unseen,
    "league": _league,
    "cells": _cells,
    "pot-tests": _pot_tests,
    "pot-times": _pot_times,
    "solves": _table(
        "whole solves",
        ("problem", _field("goal")),
        _TIME,
        ("peak memory", _memory),
        ("value", _value),
        ("worst L1 marginal error", _marginal),
        ("Spearman", _field("spearman")),
        _COMMIT,
    ),
    "unstructured": _table(
        "without structure",
        ("problem", _field("goal")),
        _TIME,
        ("value", _value),
        ("worst L1 marginal error", _marginal),
        ("status", _field("status")),
        _COMMIT,
    ),
    "first-use": _table(
        "first use",
        ("problem, defaults", _field("goal")),
        _TIME,
        ("beside it", _field("quality")),
        ("asked", _field("asked")),
        _COMMIT,
    ),
    "linear": _table(
        "linear problems", ("work", _field("goal")), _TIME, ("error", _field("error")), _COMMIT
    ),
    "graphs": _table(
        "graphs", ("work", _field("goal")), _TIME, ("error", _field("error")), _COMMIT
    ),
    "family": _table(
        "fused and low rank",
        ("problem", _field("goal")),
        _TIME,
        ("peak memory", _memory),
        ("value", _value),
        ("quality", _field("quality")),
        _COMMIT,
    ),
    "batch": _table(
        "many small problems",
        ("problem", _field("goal")),
        ("solver", _field("solver")),
        _TIME,
        ("beside it", _field("quality")),
        ("asked", _field("asked")),
        _COMMIT,
        peers=True,
    ),
    "cpu": _table(
        "two CPU cores",
        ("problem", _field("goal")),
        ("solver", _field("solver")),
        _TIME,
        ("value", _value),
        ("value made feasible", _field("feasible_value")),
        ("beside it", _field("quality")),
        _COMMIT,
        peers=True,
    ),
}
