"""One Markdown table a problem: success, value, metric, marginals, time; failures are shown."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import numpy as np

from benchmarks.harness.report import seconds
from benchmarks.quality.problems import PROBLEMS
from benchmarks.quality.solvers import SOLVERS

__all__ = ["quality_table", "relative"]

Record = dict[str, Any]

_HEAD = (
    "runner",
    "success",
    "objective / best",
    "value / best",
    "worst",
    "metric",
    "marginal error",
    "time",
    "failures",
)


def quality_table(records: list[Record]) -> str:
    """Return an overview, and a table for each problem and device, in the registry's order.

    Success counts every seed tried, failures included. Medians are over the solves that gave a
    plan. The best of an instance is the lowest of all runners on it and of the known answer, after
    the plan was given exact marginals; for the objective, of runners at the same epsilon.
    """
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in _current(records):
        groups[record["problem"], record["device"]].append(record)
    parts = []
    for (name, device), group in sorted(groups.items(), key=lambda item: _place(item[0][0])):
        parts.append(_problem_table(name, device, group))
    kept = [record for group in groups.values() for record in group]
    where = "\n".join(dict.fromkeys(map(_environment, kept)))
    return "\n\n".join([_overview(groups), *parts, where])


def _overview(groups: dict[tuple[str, str], list[Record]]) -> str:
    """Return a row for each problem: success and median value over the best known, by runner."""
    used = {record["runner"] for group in groups.values() for record in group}
    runners = [name for name in SOLVERS if name in used]
    lines = [_row(["success, value / best", *runners]), _row(["---"] * (1 + len(runners)))]
    for (name, device), group in sorted(groups.items(), key=lambda item: _place(item[0][0])):
        values = relative(group, "value")
        cells = [name if device == "cpu" else f"{name} ({device})"]
        for runner in runners:
            tried = [
                (record, value)
                for record, value in zip(group, values, strict=True)
                if record["runner"] == runner and record["status"] != "unsupported"
            ]
            found = [value for _, value in tried if value is not None]
            success = sum(record.get("success", False) for record, _ in tried)
            cells.append(
                f"{success}/{len(tried)}" + (f", {np.median(found):.3f}" if found else "")
                if tried
                else ""
            )
        lines.append(_row(cells))
    return "\n".join(lines)


def _place(problem: str) -> int:
    return list(PROBLEMS).index(problem)


def _current(records: list[Record]) -> list[Record]:
    """Keep the last record of each runner on each instance; an instance of old is left out."""
    instance: dict[tuple[str, ...], str] = {}
    latest: dict[tuple[str, ...], Record] = {}
    for record in records:
        drawn = tuple(str(record[key]) for key in ("problem", "device", "seed"))
        # a process that ended early has not said which instance it had
        instance[drawn] = record["fingerprint"] or instance.get(drawn, "")
        latest[(*drawn, record["runner"])] = record
    return [
        record for key, record in latest.items() if record["fingerprint"] in ("", instance[key[:3]])
    ]


def _environment(record: Record) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    own = f", commit {record['commit']}" if "torchgw" in record["versions"] else ""
    return f"- {record['device_name']}, {record['cores']} cores: {versions}{own}"


def relative(group: list[Record], field: str) -> list[float | None]:
    """Return each record's field over the lowest of its seed, known answer included."""
    best: dict[int, float] = {}
    for record in group:
        found = [record[field]] if record["status"] == "ok" else []
        found += [record["answer"][field]] if "answer" in record else []
        for value in found:
            best[record["seed"]] = min(value, best.get(record["seed"], np.inf))
    return [
        record[field] / best[record["seed"]] if record["status"] == "ok" else None
        for record in group
    ]


def _problem_table(name: str, device: str, group: list[Record]) -> str:
    problem = PROBLEMS[name]
    sign = "<=" if problem.lower_is_better else ">="
    values, objectives = relative(group, "value"), relative(group, "objective")
    lines = [
        f"**{name}** ({device}): {problem.metric}, success {sign} {problem.threshold:g}", "",
        _row(_HEAD), _row(["---"] * len(_HEAD)),
    ]  # fmt: skip
    for runner in sorted({record["runner"] for record in group}, key=list(SOLVERS).index):
        mine = [index for index, record in enumerate(group) if record["runner"] == runner]
        lines.append(_row(_cells(runner, mine, group, values, objectives)))
    return "\n".join(lines)


def _cells(
    runner: str,
    mine: list[int],
    group: list[Record],
    values: list[float | None],
    objectives: list[float | None],
) -> list[str]:
    rows = [group[index] for index in mine]
    ok = [index for index in mine if group[index]["status"] == "ok"]
    failures = Counter(_reason(row) for row in rows if row["status"] != "ok")
    shown = "; ".join(f"{count} x {reason}" for reason, count in failures.items())
    if all(row["status"] == "unsupported" for row in rows):
        return [runner, *[""] * 7, shown]
    success = sum(group[index]["success"] for index in ok)
    head = [runner, f"{success}/{len(rows)}"]
    if not ok:
        return [*head, *[""] * 6, shown]
    done = [group[index] for index in ok]
    return [
        *head, f"{_median(objectives, ok):.4f}" if SOLVERS[runner].entropic else "",
        f"{_median(values, ok):.4f}", f"{max(values[index] or 0 for index in ok):.4f}",
        f"{np.median([row['metric'] for row in done]):.4f}",
        f"{max(row['marginal_error'] for row in done):.0e}",
        seconds(float(np.median([row["time_s"] for row in done]))), shown,
    ]  # fmt: skip


def _median(values: list[float | None], index: list[int]) -> float:
    return float(np.median([values[number] for number in index]))


def _reason(row: Record) -> str:
    return str(row["message"]).replace("|", "/")


def _row(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"
