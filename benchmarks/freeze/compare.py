"""Differences between what was frozen and what was found, by kind."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from benchmarks.freeze.record import Row

__all__ = ["KINDS", "ROOMS", "Difference", "differences", "gap", "room", "same_machine", "table"]

# How far a value is off, relative to it; the highest that it exceeds counts.
_STEPS = (1e-3, 1e-6, 1e-9)
KINDS = (
    "absent", "status", "warnings", "bits", "higher-1e-3", "higher-1e-6", "higher-1e-9",
    "lower-1e-3", "lower-1e-6", "lower-1e-9", "time",
)  # fmt: skip
# Values of exact copies are rounding: what is smaller than this counts as this.
_FLOOR = 1e-6
# A time differs by this factor and by so many seconds at least.
_FACTOR, _SECONDS = 2.0, 0.2
# What a value may be off on another machine, and ten times less was measured.
ROOMS, _SPARE = (1e-6, 1e-3), 10.0


class Difference(NamedTuple):
    """One way in which a problem came out differently."""

    kind: str
    problem: str
    size: float  # relative, of values; the factor, of times; otherwise 0
    text: str


def same_machine(frozen: Row, found: Row) -> list[str]:
    """Return what differs between two environments, on which bits depend."""
    return [
        f"{name}: {frozen.get(name)} -> {found[name]}"
        for name in found
        if name != "commit" and frozen.get(name) != found[name]
    ]


def gap(old: Row, new: Row) -> float:
    """Return how far value and objective are from those of old, relative to the larger of these."""
    pairs = [(old[name], new[name]) for name in ("value", "objective")]
    if any((first is None) != (second is None) for first, second in pairs):
        return math.inf
    if None in pairs[0] + pairs[1]:
        return 0.0
    size = max(_FLOOR, *(abs(first) for first, _ in pairs))
    return max(abs(first - second) for first, second in pairs) / size


def room(old: Row, others: Iterable[Row]) -> float | None:
    """Return what a value may be off on other machines; None of a problem that says nothing there.

    These are problems whose status, warnings or optimum were not the same everywhere.
    """
    worst = 0.0
    for new in others:
        if any(old[name] != new[name] for name in ("status", "said")):
            return None
        worst = max(worst, gap(old, new))
    return next((step for step in ROOMS if _SPARE * worst <= step), None)


def differences(old: Row, new: Row | None, *, same: bool) -> Iterator[Difference]:
    """Compare two rows of a problem, to the bit where the machine is the same."""
    name = old["problem"]
    if new is None:
        yield Difference("absent", name, 0.0, "no such problem")
        return
    allowed = _STEPS[-1] if same else old.get("room", ROOMS[0])
    if allowed is None:
        return
    if old["status"] != new["status"]:
        yield Difference("status", name, 0.0, f"{old['status']} -> {new['status']}")
    if old["said"] != new["said"]:
        texts = ("+".join(row["said"]) or "none" for row in (old, new))
        yield Difference("warnings", name, 0.0, " -> ".join(texts))
    if same and old.get("bits") != new.get("bits"):
        yield Difference("bits", name, 0.0, "")
    off = gap(old, new)
    if off > allowed:
        step = next((step for step in _STEPS if off > step), _STEPS[-1])
        lower = _least(new) < _least(old)
        kind = f"{'lower' if lower else 'higher'}-{step:.0e}".replace("e-0", "e-")
        text = f"{old['objective']} -> {new['objective']}"
        yield Difference(kind, name, off, text)
    factor = max(old["s"], 1e-3) / max(new["s"], 1e-3)
    factor = max(factor, 1 / factor)
    if same and factor > _FACTOR and abs(old["s"] - new["s"]) > _SECONDS:
        yield Difference("time", name, factor, f"{old['s']:.2f} -> {new['s']:.2f} s")


def _least(row: Row) -> list[float]:
    """Order rows by objective, those of one objective by value; what has none is above."""
    numbers = (row["objective"], row["value"])
    return [math.inf if number is None else number for number in numbers]


def table(found: list[Difference], allowed: set[str]) -> str:
    """Return a Markdown table, a row for each kind of difference."""
    lines = ["| difference | problems | largest | which |", "|---|---|---|---|"]
    for kind in KINDS:
        some = sorted((one for one in found if one.kind == kind), key=lambda one: -one.size)
        if not some:
            continue
        shown = [f"{one.problem} {one.text}".strip() for one in some[:4]]
        more = [f"{len(some) - 4} more"] if len(some) > 4 else []
        largest = f"{some[0].size:.2g}" if some[0].size else "-"
        label = f"{kind} (allowed)" if kind in allowed else kind
        lines.append(f"| {label} | {len(some)} | {largest} | {'; '.join(shown + more)} |")
    return "\n".join(lines)
