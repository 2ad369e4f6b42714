"""Freeze what the package makes of 400 problems, or compare: ``python -m benchmarks freeze``.

Without ``--compare`` all problems are solved and written down. With it they are solved again, and
what differs is printed, by kind; the exit code is 1 if anything differs that is not of a kind that
``--allow`` names. Bits are compared on the kind of machine that the record is of. Elsewhere values
are, with the room that was measured for each problem (``--rooms``), and problems that depend on the
machine are not compared.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks.freeze import compare
from benchmarks.freeze.cases import problems
from benchmarks.freeze.record import Row, attempt_all, environment, read, write

__all__ = ["frozen_file", "main"]

# Other ways to round: the same again, older instructions, and two threads.
_WAYS: dict[str, tuple[int, dict[str, str]]] = {
    "again": (1, {}),
    "default": (1, {"ATEN_CPU_CAPABILITY": "default"}),
    "avx2": (1, {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2",
                 "OPENBLAS_CORETYPE": "Haswell"}),
    "threads": (2, {}),
}  # fmt: skip


def frozen_file(device: str = "cpu") -> Path:
    """Return the record of a device that is kept in the repository."""
    return Path(__file__).with_name(f"{device}.jsonl")


def main(arguments: list[str] | None = None) -> int:
    """Freeze or compare; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks freeze", description=__doc__)
    parser.add_argument("--compare", action="store_true", help="with what was frozen")
    parser.add_argument("--frozen", type=Path, help="the record to compare with; the repository's")
    parser.add_argument("--out", type=Path, help="the file to write; by default the repository's")
    parser.add_argument("--slice", type=int, default=1, metavar="K", help="every K-th problem")
    parser.add_argument("--only", metavar="KIND", help="problems of this kind, such as pot")
    parser.add_argument(
        "--allow", default="time", metavar="KINDS",
        help=f"differences that are no failure, by commas; of {', '.join(compare.KINDS)}, "
        "or the first part of such names",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rooms", action="store_true", help="measure them: five times as long")
    options = parser.parse_args(arguments)
    kinds = sorted({problem.kind for problem in problems().values()})
    if options.only and options.only not in kinds:
        parser.error(f"unknown kind {options.only}; known: {', '.join(kinds)}")
    allowed = {
        kind for kind in compare.KINDS for word in options.allow.split(",") if word
        and f"{kind}-".startswith(f"{word}-")
    }  # fmt: skip
    chosen = [name for name, one in problems().items() if options.only in (None, one.kind)]
    chosen = chosen[:: options.slice]
    frozen = options.frozen or frozen_file(options.device)
    if options.compare:
        return _compare(chosen, frozen, allowed, options)
    if len(chosen) < len(problems()) and options.out is None:
        parser.error("a part of the problems goes to a file of its own: pass --out")
    rows = _solve(chosen, options)
    _keep_rooms(rows, frozen)
    if options.rooms:
        _measure_rooms(rows, options)
    out = options.out or frozen
    write(out, list(rows.values()), options.device)
    print(f"written {out}, {out.stat().st_size / 1000:.0f} KB")
    return 0


def _solve(
    names: list[str], options: argparse.Namespace, threads: int = 1, **variables: str
) -> dict[str, Row]:
    """Solve the problems, and tell the seconds."""
    begin = time.perf_counter()
    rows = {
        row["problem"]: row
        for row in attempt_all(names, options.device, options.jobs, threads, variables)
    }
    seconds, cpu = time.perf_counter() - begin, sum(row["s"] for row in rows.values())
    print(f"{len(rows)} problems in {seconds:.0f} s, {cpu:.0f} s of them solves", flush=True)
    for row in rows.values():
        if row["status"].startswith("crash"):
            print(f"{row['problem']}: {row['status']}")
    return rows


def _compare(names: list[str], frozen: Path, allowed: set[str], options: argparse.Namespace) -> int:
    head, old = read(frozen)
    changed = compare.same_machine(head, environment(options.device))
    if changed:
        print(f"another machine, so values are compared and no bits ({'; '.join(changed)})")
    new = _solve(names, options)
    if options.out is not None:
        write(options.out, list(new.values()), options.device)
    # a record of a part is compared with that part
    known = [name for name in old if name in new or name not in problems()]
    found = [
        difference
        for name in known
        for difference in compare.differences(old[name], new.get(name), same=not changed)
    ]
    found += [
        compare.Difference("absent", name, 0.0, "not frozen") for name in new if name not in old
    ]
    if changed:
        count = sum(old[name].get("room", 0) is None for name in known)
        print(f"{count} of {len(known)} problems depend on the machine and are not compared")
    if not found:
        print("no differences")
        return 0
    print(compare.table(found, allowed))
    failed = sorted({one.problem for one in found if one.kind not in allowed})
    print(f"\n{len(failed)} of {len(new)} problems differ" if failed else "\nall of it is allowed")
    return int(bool(failed))


def _keep_rooms(rows: dict[str, Row], frozen: Path) -> None:
    """Take the rooms that were measured before."""
    if frozen.is_file():
        for name, row in read(frozen)[1].items():
            if name in rows and "room" in row:
                rows[name]["room"] = row["room"]


def _measure_rooms(rows: dict[str, Row], options: argparse.Namespace) -> None:
    """Solve in other ways too, and set what values may be off on other machines."""
    others = {}
    for way, (threads, variables) in _WAYS.items():
        print(f"{way}: ", end="")
        others[way] = _solve(list(rows), options, threads, **variables)
    for name, row in rows.items():
        row["room"] = compare.room(row, [found[name] for found in others.values()])
        if row["room"] != min(compare.ROOMS):
            gaps = [f"{way} {compare.gap(row, found[name]):.1e}" for way, found in others.items()]
            print(f"{name}: room {row['room']}, {', '.join(gaps)}")
        if "bits" in row and row["bits"] != others["again"][name].get("bits"):
            print(f"{name}: other bits the second time; none are compared")
            del row["bits"]
