"""SNARE-seq, cells measured twice, aligned end to end: ``python -m benchmarks snare --data PATH``.

The preparation and the scores are those of SCOT (Demetci et al., J. Comput. Biol. 2022). One side
is shuffled by a fixed permutation first, so that no solver scores by index order.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.csgraph import shortest_path
from scipy.spatial.distance import cdist

import torchgw
from benchmarks.harness.evaluate import gw_value, made_feasible, marginal_errors
from benchmarks.harness.harness import keep
from torchgw.metrics import foscttm, label_accuracy

__all__ = ["Snare", "align", "load", "ours", "ours_raw", "pot", "score"]

DATA_VARIABLE = "TORCHGW_SNARE"
DEFAULT_DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "snare.npz"
EPSILON = 1e-3
_NEIGHBORS = 110

Array = NDArray[np.float64]


class Snare(NamedTuple):
    """Both sides, the chromatin side shuffled; row ``match[i]`` of rna is row i of atac."""

    atac: Array  # (n, 19), as published
    rna: Array  # (n, 10)
    atac_type: NDArray[np.int64]  # (n,)
    rna_type: NDArray[np.int64]  # (n,)
    match: NDArray[np.int64]  # (n,)
    d_atac: Array  # (n, n), SCOT's distances, largest one
    d_rna: Array  # (n, n)


def data_path(given: str | Path | None = None) -> Path:
    """Return where the data are expected: given, or by environment, or beside the repository."""
    return Path(given or os.environ.get(DATA_VARIABLE) or DEFAULT_DATA)


def load(path: Path, seed: int = 0) -> Snare:
    """Read, shuffle and prepare the data."""
    with np.load(path, allow_pickle=False) as data:
        rna, atac = data["rna"], data["atac"]
        rna_type, atac_type = data["rna_type"], data["atac_type"]
    order = np.random.default_rng(seed).permutation(len(atac))
    atac, atac_type = atac[order], atac_type[order]
    return Snare(atac, rna, atac_type, rna_type, order, scot_distances(atac), scot_distances(rna))


def normalised(points: Array) -> Array:
    """Return rows of unit length."""
    return np.asarray(points / np.linalg.norm(points, axis=1, keepdims=True))


def scot_distances(points: Array) -> Array:
    """Return undirected hop counts on the graph of nearest neighbours by correlation, over the max.

    A point is among its own 110 neighbours; an unreachable pair gets the largest finite count.
    """
    distance = cdist(normalised(points), normalised(points), metric="correlation")
    np.fill_diagonal(distance, -1.0)
    nearest = np.argpartition(distance, _NEIGHBORS - 1, axis=1)[:, :_NEIGHBORS]
    graph = np.zeros_like(distance)
    np.put_along_axis(graph, nearest, 1.0, axis=1)
    hops = shortest_path(graph, directed=False, unweighted=True)
    hops[np.isinf(hops)] = hops[np.isfinite(hops)].max()
    return np.asarray(hops / hops.max())


def ours(data: Snare, epsilon: float = EPSILON, *, annealed: bool = True) -> Array:
    """Return our plan from SCOT's distances.

    Without annealing the solve starts where POT's does, at the product plan and the last epsilon,
    and ends once the plan moves by a thousandth.
    """
    n, m = len(data.atac), len(data.rna)
    from_pots = {} if annealed else {"init": np.full((n, m), 1 / (n * m)), "tol": 1e-3}
    result = torchgw.solve(
        D_X=data.d_atac, D_Y=data.d_rna, epsilon=epsilon, random_state=0, **from_pots
    )
    return np.asarray(result.plan, np.float64)


def ours_raw(data: Snare) -> Array:
    """Return our plan from the points as published, everything by default."""
    return np.asarray(torchgw.solve(data.atac, data.rna, random_state=0).plan, np.float64)


def pot(data: Snare, epsilon: float = EPSILON) -> Array:
    """Return POT's plan from SCOT's distances."""
    import ot

    return np.asarray(
        ot.gromov.entropic_gromov_wasserstein(
            data.d_atac, data.d_rna, loss_fun="square_loss", epsilon=epsilon
        )
    )


def score(data: Snare, plan: Array) -> dict[str, float]:
    """Return FOSCTTM, label transfer accuracy, GW value on SCOT's distances, marginal error.

    Chromatin is projected onto RNA, as in SCOT's published numbers. Labels are transferred from RNA
    to the projections, and from the projections back to RNA.
    """
    rna = normalised(data.rna)
    projected = plan @ rna / plan.sum(1, keepdims=True)
    sums = marginal_errors({"row": plan.sum(1), "column": plan.sum(0)})
    return {
        "foscttm": foscttm(projected, rna[data.match]),
        "label_accuracy": label_accuracy(projected, data.atac_type, rna, data.rna_type),
        "label_accuracy_back": label_accuracy(rna, data.rna_type, projected, data.atac_type),
        "gw_value": gw_value(data.d_atac, data.d_rna, plan),
        "gw_value_feasible": gw_value(data.d_atac, data.d_rna, made_feasible(plan)),
        "marginal_error": max(sums["row_error_l1"], sums["column_error_l1"]),
    }


def align(
    name: str, solver: Callable[[Snare], Array], data: Snare, repeat: int = 1
) -> dict[str, Any]:
    """Time a solver, score its plan, print one line, return the record."""
    samples = []
    for _ in range(repeat):
        begin = time.perf_counter()
        plan = solver(data)
        samples.append(time.perf_counter() - begin)
    record = {"solver": name, "time_s": float(np.median(samples)), **score(data, plan)}
    print(
        f"{name:28s} FOSCTTM {record['foscttm']:.4f}  labels {record['label_accuracy']:.3f} "
        f"and back {record['label_accuracy_back']:.3f}  GW {record['gw_value']:.6f} (made feasible "
        f"{record['gw_value_feasible']:.6f})  marginal error {record['marginal_error']:.1e}  "
        f"{record['time_s']:.2f} s",
        flush=True,
    )
    return record


def main(arguments: list[str] | None = None) -> int:
    """Align by all solvers; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks snare", description=__doc__)
    parser.add_argument("--data", help=f"snare.npz; or {DATA_VARIABLE}, or {DEFAULT_DATA.name}")
    parser.add_argument("--epsilon", type=float, default=EPSILON)
    parser.add_argument("--repeat", type=int, default=3, help="of ours, for the median time")
    parser.add_argument("--pot", action=argparse.BooleanOptionalAction, default=True,
                        help="POT's solver on the same matrices, over a minute")  # fmt: skip
    parser.add_argument("--output", type=Path, help="append the records here as JSON lines")
    options = parser.parse_args(arguments)
    path = data_path(options.data)
    if not path.is_file():
        print(
            f"{path} is not there. Pass --data, or set {DATA_VARIABLE}, to the preprocessed "
            "SNARE-seq embedding (GEO GSE126074, as published with SCOT): an npz with rna (n, 10), "
            "atac (n, 19), rna_type, atac_type (n,).",
            file=sys.stderr,
        )
        return 2
    data = load(path)
    print(f"{len(data.rna)} cells; distances as SCOT prepares them, epsilon {options.epsilon:g}")
    epsilon = options.epsilon
    records = [
        align("ours, SCOT distances", lambda item: ours(item, epsilon), data, options.repeat),
        align(
            "ours, and POT's start",
            lambda item: ours(item, epsilon, annealed=False),
            data,
            options.repeat,
        ),
        align("ours, raw points, defaults", ours_raw, data, options.repeat),
    ]
    if options.pot:
        records.append(align("POT, SCOT distances", lambda item: pot(item, epsilon), data))
    keep(options.output, *records)
    return 0
