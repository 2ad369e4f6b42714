"""A table and a plot from JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["latest", "plot", "read_records", "table"]

Record = dict[str, Any]

_HEAD = (
    "problem",
    "runner",
    "device",
    "time p50 [p20, p80]",
    "x ours",
    "first call",
    "peak MiB",
    "GW value",
    "made feasible",
    "row / column error",
    "Spearman",
    "error in exponent",
    "commit",
)


def read_records(path: Path) -> list[Record]:
    """Return the records of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def latest(records: list[Record]) -> list[Record]:
    """Keep the last record of each problem, runner and device, in order of first appearance."""
    kept = {(item["problem"], item["runner"], item["device_name"]): item for item in records}
    order = list(dict.fromkeys(item["problem"] for item in records))
    return sorted(kept.values(), key=lambda item: order.index(item["problem"]))


def table(records: list[Record]) -> str:
    """Return a Markdown table, and one line for each environment."""
    records = latest(records)
    ours = {
        (item["problem"], item["device_name"]): item["time_p50_s"]
        for item in records
        if item["runner"] == "ours" and item["status"] == "ok"
    }
    lines = [_row(_HEAD), _row(["---"] * len(_HEAD))]
    for item in records:
        own = ours.get((item["problem"], item["device_name"]))
        lines.append(_row(_cells(item, own)))
    where = dict.fromkeys(_environment(item) for item in records)
    return "\n".join([*lines, "", *where])


def _row(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"


def _cells(item: Record, ours: float | None) -> list[str]:
    head = [item["problem"], item["runner"], item["device"]]
    if item["status"] != "ok":
        message = item["message"].replace("|", "/")
        return [*head, f"{item['status']}: {message}", *[""] * 8, item["commit"] or ""]
    low, middle, high = (item[f"time_p{point}_s"] for point in (20, 50, 80))
    return [
        *head, f"{seconds(middle)} [{seconds(low)}, {seconds(high)}]",
        f"{middle / ours:.2f}" if ours else "", seconds(item["first_call_s"]),
        f"{item['peak_mib']:.0f}", _value(item), _number(item.get("gw_value_feasible"), ".4g"),
        _pair(item.get("row_error_max_relative"), item.get("column_error_max_relative")),
        _number(item.get("spearman"), "+.4f"), _number(item["info"].get("exponent_error"), ".1e"),
        item["commit"] or "",
    ]  # fmt: skip


def seconds(value: float) -> str:
    """Return a time in the unit that suits it."""
    return f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.3g} s"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _value(item: Record) -> str:
    text = _number(item.get("gw_value"), ".4g")
    spread = item.get("gw_value_standard_error")
    return f"{text} ± {spread:.1g}" if spread else text


def _pair(row: float | None, column: float | None) -> str:
    return "" if row is None and column is None else f"{row or 0:.0e} / {column or 0:.0e}"


def _environment(item: Record) -> str:
    if item["status"] != "ok":
        return f"- {item['device_name']}, {item['cores']} cores ({item['cpu']})"
    versions = ", ".join(f"{name} {version}" for name, version in item["versions"].items())
    return (
        f"- {item['runner']}: {item['device_name']}, {item['cores']} cores ({item['cpu']}), "
        f"{item['threads']} threads; {versions}"
    )


def plot(records: list[Record], path: Path) -> None:
    """Draw the median times, with bars from the 20th to the 80th percentile."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    records = [item for item in latest(records) if item["status"] == "ok"]
    labels = [f"{item['problem']} ({item['device']})" for item in records]
    groups = list(dict.fromkeys(labels))
    runners = list(dict.fromkeys(item["runner"] for item in records))
    figure, axes = plt.subplots(
        figsize=(9, 1.2 + 0.22 * (len(records) + len(groups))), layout="constrained"
    )
    for item, label in zip(records, labels, strict=True):
        slot = runners.index(item["runner"])
        height = groups.index(label) + 0.8 * ((slot + 0.5) / len(runners) - 0.5)
        low, middle, high = (item[f"time_p{point}_s"] for point in (20, 50, 80))
        axes.barh(height, middle, 0.8 / len(runners), color=f"C{slot}")
        axes.plot([low, high], [height, height], color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("seconds, median (line: 20th to 80th percentile)")
    axes.set_yticks(range(len(groups)), groups)
    axes.invert_yaxis()
    axes.legend(
        handles=[
            plt.Rectangle((0, 0), 1, 1, color=f"C{slot}", label=name)
            for slot, name in enumerate(runners)
        ],
        loc="best",
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)
