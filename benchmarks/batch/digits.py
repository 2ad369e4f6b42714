"""All pairs of scikit-learn's digits, as fused problems: ``python -m benchmarks digits``.

An image is the cloud of its inked pixels, weighted by ink, with their places from the centre of
the ink as features. All pairs are computed at once by ``torchgw.pairwise``. POT's solvers, in a
loop on the CPU, get pairs of the first ``--peers`` images in a drawn order until ``--seconds`` are
spent. Compared are values without entropy on the same pairs, and nearest neighbours in
cross-validation. One JSON line.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ot
import torch
from numpy.typing import NDArray
from scipy.spatial.distance import cdist
from sklearn.datasets import load_digits
from sklearn.model_selection import cross_val_score
from sklearn.neighbors import KNeighborsClassifier

import torchgw
from benchmarks.harness.evaluate import made_feasible
from benchmarks.harness.harness import tell
from benchmarks.harness.measure import MemoryProbe, synchronize

_ALPHA, _EPSILON = 0.5, 0.005
_NEIGHBOURS, _FOLDS = 5, 5

Array = NDArray[np.float64]


class Digit(NamedTuple):
    """An image as a space."""

    table: Array  # (n, n) distances of inked pixels over the longest possible one
    weights: Array  # (n,) ink
    places: Array  # (n, 2) from the centre of the ink, over the same length


def read(count: int) -> tuple[list[Digit], NDArray[np.int64]]:
    """Read the first images, and what digits they are."""
    digits = load_digits()
    found = list[Digit]()
    for image in digits.images[:count]:
        places, weights = np.argwhere(image > 0) / np.hypot(7, 7), image[image > 0] / image.sum()
        table = np.linalg.norm(places[:, None] - places[None, :], axis=2)
        found.append(Digit(table, weights, places - weights @ places))
    return found, digits.target[:count]


def accuracy(values: Array, labels: NDArray[np.int64]) -> float:
    """Return the share of digits that their nearest neighbours name right, cross-validated."""
    nearest = KNeighborsClassifier(_NEIGHBOURS, metric="precomputed")
    distances = np.sqrt(np.maximum(values, 0))
    return float(cross_val_score(nearest, distances, labels, cv=_FOLDS).mean())


def exact(cost: Array, x: Digit, y: Digit) -> float:
    """Solve by POT's conditional gradient."""
    return float(
        ot.gromov.fused_gromov_wasserstein2(
            cost, x.table, y.table, x.weights, y.weights, alpha=_ALPHA, symmetric=True
        )
    )


def entropic(cost: Array, x: Digit, y: Digit) -> float:
    """Solve by POT's entropic solver at our epsilon; the value is that of its plan."""
    plan = ot.gromov.entropic_fused_gromov_wasserstein(
        cost, x.table, y.table, x.weights, y.weights, alpha=_ALPHA, epsilon=_EPSILON,
        symmetric=True,
    )  # fmt: skip
    plan = made_feasible(plan, x.weights, y.weights)
    constant, *factors = ot.gromov.init_matrix(x.table, y.table, x.weights, y.weights)
    quadratic = ot.gromov.gwloss(constant, *factors, plan)
    return float((1 - _ALPHA) * (cost * plan).sum() + _ALPHA * quadratic)


def loop(
    solve: Callable[[Array, Digit, Digit], float], digits: list[Digit], budget: float
) -> tuple[Array, float]:
    """Return values of the pairs that a budget allows, the rest NaN, and seconds of one."""
    values = np.full((len(digits), len(digits)), np.nan)
    pairs = np.random.default_rng(0).permutation(np.argwhere(np.triu(np.ones_like(values))))
    began, done = time.perf_counter(), 0
    while done < len(pairs) and time.perf_counter() - began < budget:
        i, j = pairs[done]
        cost = cdist(digits[i].places, digits[j].places, "sqeuclidean")
        values[i, j] = values[j, i] = solve(cost, digits[i], digits[j])
        done += 1
    return values, (time.perf_counter() - began) / done


def measure(
    count: int, device: torch.device, compared: int, budget: float, jobs: int
) -> dict[str, Any]:
    """Compute all pairs, and what POT takes for some of them."""
    digits, labels = read(count)
    tables, weights, places = (list(part) for part in zip(*digits, strict=True))
    probe = MemoryProbe(device)
    synchronize(device)
    began = time.perf_counter()
    values = torchgw.pairwise(
        D_X=tables, a=weights, features=places, alpha=_ALPHA, epsilon=_EPSILON, device=device,
        n_jobs=jobs, progress=False, n_init=1,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    pairs = count * (count + 1) // 2
    record: dict[str, Any] = {
        "digits": count, "pairs": pairs, "device": device.type, "threads": torch.get_num_threads(),
        "jobs": jobs, "seconds": round(seconds, 3), "ms_a_pair": round(1e3 * seconds / pairs, 4),
        **probe.peak_mib(), "accuracy": accuracy(values, labels),
    }  # fmt: skip
    if not compared:
        return record
    small = values[:compared, :compared]
    record["accuracy_of_compared"] = accuracy(small, labels[:compared])
    for name, solve in {"pot": exact, "pot-entropic": entropic}.items():
        theirs, each = loop(solve, digits[:compared], budget)
        seen = ~np.isnan(theirs)
        record[name] = {
            "ms_a_pair": round(1e3 * each, 3), "pairs": int(np.triu(seen).sum()),
            "mean_value": float(theirs[seen].mean()), "our_mean_value": float(small[seen].mean()),
            "ours_at_most_theirs": float((small[seen] <= theirs[seen] * (1 + 1e-4)).mean()),
            "accuracy": accuracy(theirs, labels[:compared]) if seen.all() else None,
        }  # fmt: skip
    return record


def main(arguments: list[str] | None = None) -> None:
    """Run the study from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks digits", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--count", type=int, default=200, help="images, 1,797 at most")
    parser.add_argument("--peers", type=int, default=200, help="images that POT gets; 0 for none")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each of POT's solvers")
    parser.add_argument("--jobs", type=int, default=1, help="processes of ours")
    parser.add_argument("--output", type=Path, help="file that the JSON line is added to")
    options = parser.parse_args(arguments)
    count = min(options.count, 1797)
    record = measure(
        count, torch.device(options.device), min(options.peers, count), options.seconds,
        options.jobs,
    )  # fmt: skip
    tell(record, options.output)
