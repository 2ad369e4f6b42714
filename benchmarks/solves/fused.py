"""Fused Gromov-Wasserstein with features, at scale: ``python -m benchmarks fused --n 200000``.

A spiral is matched to a Swiss roll by landmark geodesics and 16 features a point, with default
options. Features are smooth functions of the place on the curve and noise: they tell roughly where
a point belongs, and geodesics tell the rest. Exit status 1 if a GPU passes a limit.
"""

from __future__ import annotations

import argparse
import json
import resource
import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr

import torchgw
from benchmarks.harness.measure import MemoryProbe, synchronize, timed
from torchgw._boundary.arrays import to_numpy
from torchgw.datasets import spiral, swiss_roll

# What a GPU must not exceed at 200,000 x 200,000.
LIMIT_S, LIMIT_MIB = 15.0, 4096.0
# Points per side at which the matching of features alone is scored.
_SCORED = 2000


class Data(NamedTuple):
    """Both sides, as arrays; ``angle`` is the place on the curve."""

    points: tuple[NDArray[np.float64], NDArray[np.float64]]
    features: tuple[NDArray[np.float64], NDArray[np.float64]]
    angle: tuple[NDArray[np.float64], NDArray[np.float64]]


def make_data(n: int, noise: float, dimension: int = 16) -> Data:
    """Return clouds of n points each, and their features.

    A feature is cos(w t + s) of the place t in [0, 1], with slow w; ``noise`` is the standard
    deviation of a feature's error over its own. The mean squared distance of two features is one,
    as is the largest distance: both terms of the objective are then of one order.
    """
    x, angle_x = spiral(n, random_state=0)
    y, angle_y = swiss_roll(n, random_state=1)
    rng = np.random.default_rng(2)
    frequency, shift = rng.uniform(1, 6, dimension), rng.uniform(0, 2 * np.pi, dimension)

    def features(angle: NDArray[np.float64]) -> NDArray[np.float64]:
        clean = np.cos(frequency * (angle / angle.max())[:, None] + shift)
        spread = clean.std(0)
        clean += noise * spread * rng.standard_normal(clean.shape)
        scaled: NDArray[np.float64] = clean / np.sqrt(2 * np.square(spread).sum())
        return scaled

    return Data((x, y), (features(angle_x), features(angle_y)), (angle_x, angle_y))


def solve(data: Data, device: torch.device, options: argparse.Namespace) -> torchgw.GWResult:
    """Solve with everything left to its default but what is measured here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchgw.GraphWarning)
        return torchgw.solve(
            *data.points, features=data.features, distances="landmark", alpha=options.alpha,
            device=device, random_state=0,
            options=torchgw.Options(skip_tiles=False if options.all_tiles else "auto"),
        )  # fmt: skip


def score(result: torchgw.GWResult, data: Data, device: torch.device) -> dict[str, Any]:
    """Return value, L1 distances of both marginals, signed Spearman, and what it took."""
    partner = to_numpy(result.lazy_plan.argmax())
    shape = result.lazy_plan.shape
    weights = [1 / size for size in shape]
    errors = [
        float((torch.as_tensor(mass) - weight).abs().sum())
        for mass, weight in zip((result.marginal_a, result.marginal_b), weights, strict=True)
    ]
    whole = [entry for entry in result.history if entry.shape == shape]
    return {
        "status": result.status.name,
        "value": result.value,
        "value_quad": result.value_quad,
        "value_linear": result.value_linear,
        "epsilon": result.epsilon,
        "marginal_l1": errors,
        "spearman": float(spearmanr(data.angle[0], data.angle[1][partner]).statistic),
        "spearman_features_alone": nearest_features(data),
        "rank": getattr(result.lazy_plan.cost, "rank", None),
        "tiles": result.log["tiles"],
        "outer_iterations": [len(result.history), len(whole)],
        "inner_iterations": [
            result.log["inner_iterations"],
            sum(entry.inner_iterations for entry in whole),
        ],
        "settle_iterations": result.log["settle_iterations"],
    }


def nearest_features(data: Data) -> float:
    """Return the Spearman correlation of matching some points to the nearest features."""
    step = max(1, len(data.features[0]) // _SCORED)
    x, y = (torch.from_numpy(part[::step]) for part in data.features)
    nearest = torch.cdist(x, y).argmin(1).numpy()
    angle = data.angle[1][::step][nearest]
    return float(spearmanr(data.angle[0][::step], angle).statistic)


def main(arguments: list[str] | None = None) -> int:
    """Print times, memory and quality as JSON, then whether the limits are kept."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks fused", description=__doc__)
    parser.add_argument("--n", type=int, default=200_000, help="points per side")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--noise", type=float, default=0.5, help="of a feature, over its spread")
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--all-tiles", action="store_true", help="skip no tiles")
    parser.add_argument("--repeat", type=int, default=2)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    data = make_data(options.n, options.noise)
    synchronize(device)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    report: dict[str, Any] = {
        "n": options.n, "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "noise": options.noise, "alpha": options.alpha, "peak_of_imports_mib": round(before, 1),
    }  # fmt: skip
    calls = []
    result = None
    for _ in range(options.repeat):
        # two results need not fit
        del result
        probes = MemoryProbe(device), MemoryProbe(torch.device("cpu"))
        seconds, result = timed(lambda seed: solve(data, device, options), 0, device)
        peaks = [probe.peak_mib() for probe in probes]
        calls.append(
            {
                "wall_s": round(seconds, 3),
                "peak_device_mib": peaks[0]["peak_mib"],
                "peak_host_mib": peaks[1]["peak_mib"],
                "phases_s": {name: round(spent, 3) for name, spent in result.timings.items()},
            }
        )
        print(json.dumps(calls[-1]), flush=True)
    assert result is not None
    report |= score(result, data, device)
    for name, value in report.items():
        print(f"{name:24s} {value}")
    if device.type != "cuda":
        return 0
    fits = calls[-1]["wall_s"] <= LIMIT_S and calls[-1]["peak_device_mib"] <= LIMIT_MIB
    print(f"{'within' if fits else 'BEYOND'} {LIMIT_S:.0f} s and {LIMIT_MIB:.0f} MiB (second call)")
    return 0 if fits else 1
