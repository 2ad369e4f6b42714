"""Small dense problems by ``torchgw.pot`` and by POT: ``python -m benchmarks pot-times``.

Random Euclidean distances in two and in three dimensions, from the product plan, on one thread: CPU
seconds, the least of some calls, and values. Three pairs a row and size; their median is printed.
Values are compared where POT's plan moves the mass that was asked for: partial ones may move more.

``--regs .005,.02,.1,1`` is the table of problems with entropy, of every kind, one pair each; values
of problems with given marginals are those of plans that are rounded to them, as POT's miss them by
more.

``--defaults 100x100,400x500`` is another table: ``torchgw.solve`` from points by defaults, beside
POT's ``entropic_gromov_wasserstein`` from the distances that it has decided on, at the epsilon that
it has chosen. Objectives, value + epsilon KL, are those of plans rounded to their marginals.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ot
import torch
from scipy.spatial.distance import cdist
from scipy.special import xlogy

import torchgw.pot
from torchgw._plans.transport import round_to_marginals
from torchgw.datasets import spiral, swiss_roll
from torchgw.distances import connect, knn_graph
from torchgw.distances.graph import default_n_neighbors

ROWS: dict[str, dict[str, Any]] = {
    "exact": {}, "exact, KL loss": {"loss": "KL"}, "fused exact": {"M": True},
    "semi-relaxed exact": {"unbalanced_type": "semirelaxed"},
    "partial .7, exact": {"unbalanced_type": "partial", "unbalanced": 0.7},
    "entropic, reg .05": {"reg": 0.05},
}  # fmt: skip
# With entropy, by each of the weights that are asked for.
ENTROPIC: dict[str, dict[str, Any]] = {
    "square": {}, "KL loss": {"loss": "KL"}, "fused": {"M": True},
    "semi-relaxed": {"unbalanced_type": "semirelaxed"},
    "partial .7": {"unbalanced_type": "partial", "unbalanced": 0.7},
    "penalties .3": {"unbalanced": 0.3},
}  # fmt: skip
# Seconds after which a call is not repeated.
_LONG = 1.0

# Points of both sides, of some sizes and a seed.
FAMILIES: dict[str, Callable[[int, int, int], tuple[Any, Any]]] = {
    "spiral, Swiss roll": lambda n, m, seed: (spiral(n, seed)[0], swiss_roll(m, seed + 100)[0]),
    "two clouds in 3-D": lambda n, m, seed: (_cloud(n, seed), _cloud(m, seed + 100)),
}


def _cloud(n: int, seed: int) -> Any:
    return np.random.default_rng(seed).normal(size=(n, 3))


def main(arguments: list[str] | None = None) -> int:
    """Measure, write one JSON line a pair, print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks pot-times", description=__doc__)
    parser.add_argument("--sizes", default="20,100,300", help="by commas")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--regs", default="", help="of problems with entropy, by commas")
    parser.add_argument("--kinds", default=",".join(ENTROPIC), help="of these, by commas")
    parser.add_argument("--defaults", default="", help="sizes of the other table, by commas")
    parser.add_argument("--output", type=Path, help="file for the JSON lines")
    options = parser.parse_args(arguments)
    if options.defaults:
        sides = [tuple(map(int, size.split("x"))) for size in options.defaults.split(",")]
        found = [
            measure_defaults(family, *shape, seed, options.repeat)
            for shape in sides
            for family in FAMILIES
            for seed in range(options.seeds)
        ]
        _write(found, options.output)
        print(table_of_defaults(found))
        return 0
    sizes = [int(size) for size in options.sizes.split(",")]
    rows = ROWS
    if options.regs:
        rows = {
            f"{kind}, reg {reg}": {**ENTROPIC[kind], "reg": float(reg)}
            for kind in options.kinds.split(",")
            for reg in options.regs.split(",")
        }
    records = []
    for row, call in rows.items():
        for n in sizes:
            records += [
                measure(row, call, n, seed, options.repeat) for seed in range(options.seeds)
            ]
            _write(records, options.output)
    print(table(records))
    return 0


def _write(records: list[dict[str, Any]], output: Path | None) -> None:
    """Write one JSON line for each record, if there is a file to write to."""
    if output is not None:
        lines = (json.dumps(record) for record in records)
        output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def measure(row: str, given: dict[str, Any], n: int, seed: int, repeat: int) -> dict[str, Any]:
    """Solve one problem by both."""
    rng = np.random.default_rng(seed)
    tables = (cdist(points, points) for points in (rng.normal(size=(n, d)) for d in (2, 3)))
    first, second = (distances / distances.max() for distances in tables)
    call, theirs = dict(given), ot.solve_gromov
    if "M" in call:
        call["M"] = rng.uniform(size=(n, n))
        if "reg" in call:
            theirs = _fused_by_pot
    record: dict[str, Any] = {"row": row, "n": n, "seed": seed}
    for name, solve in (("ours", torchgw.pot.solve_gromov), ("pot", theirs)):
        seconds, found = _timed(lambda solve=solve: solve(first, second, **call), repeat)
        plan, value = (
            (found, np.nan) if isinstance(found, np.ndarray) else (found.plan, found.value)
        )
        if "reg" in call and "unbalanced_type" not in call and "unbalanced" not in call:
            value = _value_of_rounded(first, second, plan, call)
        record |= {name: seconds, f"{name} value": float(value)}
        record["comparable"] = "unbalanced" in call and "unbalanced_type" not in call
        record["comparable"] |= abs(float(plan.sum()) - call.get("unbalanced", 1.0)) < 1e-9
    return record


def _fused_by_pot(first: Any, second: Any, *, M: Any, reg: float) -> Any:
    """Call what solves for the weight that is asked for: ot.solve_gromov solves for 0.1."""
    return ot.gromov.entropic_fused_gromov_wasserstein(M, first, second, epsilon=reg)


def _value_of_rounded(first: Any, second: Any, plan: Any, call: dict[str, Any]) -> float:
    """Compute the objective with entropy of a plan that is rounded to equal weights."""
    n, m = plan.shape
    a, b = (torch.full((size,), 1 / size, dtype=torch.float64) for size in (n, m))
    rounded = round_to_marginals(torch.from_numpy(np.asarray(plan))[None], a, b)[0].numpy()
    loss = "kl_loss" if call.get("loss") == "KL" else "square_loss"
    parts = ot.gromov.init_matrix(first, second, a.numpy(), b.numpy(), loss)
    value, entropy = ot.gromov.gwloss(*parts, rounded), xlogy(rounded, rounded).sum()
    if "M" in call:
        value = (value + np.vdot(call["M"], rounded)) / 2
    return float(value + call["reg"] * entropy)


def measure_defaults(family: str, n: int, m: int, seed: int, repeat: int) -> dict[str, Any]:
    """Solve from points by defaults, then the same problem by POT."""
    torch.set_num_threads(1)
    x, y = FAMILIES[family](n, m, seed)
    ours, found = _timed(lambda: torchgw.solve(x, y, random_state=0), repeat)
    chosen = (found.report.distances or {"chosen": "geodesic"})["chosen"]
    first, second = (_table(points, chosen) for points in (x, y))
    a, b = np.full(n, 1 / n), np.full(m, 1 / m)
    pot, plan = _timed(
        lambda: ot.gromov.entropic_gromov_wasserstein(
            first, second, a, b, "square_loss", epsilon=found.epsilon
        ),
        1,
    )
    values = {
        name: _objective(first, second, np.asarray(one), found.epsilon)
        for name, one in (("ours objective", found.plan), ("pot objective", plan))
    }
    problem = {"family": family, "n": n, "m": m, "seed": seed, "epsilon": found.epsilon}
    return {**problem, "distances": chosen, "ours": ours, "pot": pot, **values}


def _table(points: Any, chosen: str) -> Any:
    """Measure points as a solve does: all pairs, over the largest."""
    if chosen != "geodesic":
        found = cdist(points, points, chosen)
    else:
        tensor = torch.from_numpy(points)
        graph = connect(knn_graph(tensor, default_n_neighbors(len(points))), tensor)
        found = graph.reader(tensor.device)(torch.arange(graph.n)).double().numpy()
    return found / found.max()


def _objective(first: Any, second: Any, plan: Any, epsilon: float) -> float:
    """Compute value + epsilon KL(P | a x b) of a plan rounded to equal weights."""
    n, m = plan.shape
    a, b = (torch.full((size,), 1 / size, dtype=torch.float64) for size in (n, m))
    rounded = round_to_marginals(torch.from_numpy(plan)[None], a, b)[0].numpy()
    squares = np.square(first).sum() / n**2 + np.square(second).sum() / m**2
    value = squares - 2 * np.vdot(first @ rounded @ second, rounded)
    return float(value + epsilon * (xlogy(rounded, rounded).sum() + np.log(n * m)))


def table_of_defaults(records: list[dict[str, Any]]) -> str:
    """Return medians over the seeds, and the least and largest objective beside POT's."""
    lines = [
        "| points | size | epsilon | ours, s | POT, s | ratio | objective over POT's, less 1 |",
        "|---|---|---|---|---|---|---|",
    ]
    for family, n, m in dict.fromkeys((r["family"], r["n"], r["m"]) for r in records):
        part = [r for r in records if (r["family"], r["n"], r["m"]) == (family, n, m)]
        epsilon, ours, pots = (
            statistics.median(r[name] for r in part) for name in ("epsilon", "ours", "pot")
        )
        excess = [r["ours objective"] / r["pot objective"] - 1 for r in part]
        times = f"{epsilon:.1e} | {ours:.3f} | {pots:.3f} | {ours / pots:.2f}"
        lines.append(
            f"| {family} | {n} x {m} | {times} | {min(excess):+.1e} to {max(excess):+.1e} |"
        )
    return "\n".join(lines)


def _timed(call: Callable[[], Any], repeat: int) -> tuple[float, Any]:
    """Call some times; return the least CPU seconds, and what the last returned."""
    least = float("inf")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(repeat):
            start = time.process_time()
            found = call()
            spent = time.process_time() - start
            least = min(least, spent)
            if spent > _LONG:
                break
    return least, found


def summary(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Take medians over the seeds, and the largest excess of a value over POT's."""
    rows = []
    for row, n in dict.fromkeys((record["row"], record["n"]) for record in records):
        part = [record for record in records if (record["row"], record["n"]) == (row, n)]
        ours, pots = (statistics.median(r[name] for r in part) for name in ("ours", "pot"))
        compared = [record for record in part if record["comparable"]]
        excess = max((r["ours value"] - r["pot value"] for r in compared), default=float("nan"))
        rows.append({"row": row, "n": n, "ours": ours, "pot": pots, "excess": excess})
    return rows


def table(records: list[dict[str, Any]]) -> str:
    """Return seconds, their ratio and the largest excess of a value as a Markdown table."""
    lines = ["| row | n | ours, s | POT, s | ratio | excess |", "|---|---|---|---|---|---|"]
    for row in summary(records):
        times = f"{row['ours']:.4f} | {row['pot']:.4f} | {row['ours'] / row['pot']:.2f}"
        lines.append(f"| {row['row']} | {row['n']} | {times} | {row['excess']:+.1e} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
