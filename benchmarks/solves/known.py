"""What is known of a match, at scale: ``python -m benchmarks known --n 1000000 --device cuda``.

A cloud of clusters is matched to its noisy copy in another order three times: with clusters as
groups, with known pairs, and with nothing known; if asked (``--only mask``), with a random mask of
a share of all pairs of points beside the right ones, where no table of it is kept. Exit status 1 if
mass is outside of what is allowed, or groups or pairs take longer than nothing. Epsilon is given,
so that all solve the same; with ``--cloud`` points are one cloud, and all is left to the defaults.
With ``--shows`` the rows of :mod:`benchmarks.solves.known_shows` instead, all or some.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from typing import Any

import numpy as np
import torch

import torchgw
from benchmarks.harness.measure import synchronize
from benchmarks.solves.known_shows import ROWS, shows
from torchgw._boundary.arrays import to_numpy


def main(arguments: list[str] | None = None) -> int:
    """Measure the three, each twice, of which the second is warm."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks known", description=__doc__)
    parser.add_argument("--n", type=int, default=20_000, help="points of each side")
    parser.add_argument("--groups", type=int, default=30)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--epsilon", type=float, default=1e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=["nothing", "pairs", "groups", "mask"])
    parser.add_argument("--cloud", action="store_true", help="one Gaussian cloud, by defaults")
    parser.add_argument("--share", type=float, default=0.1, help="allowed by a mask")
    parser.add_argument("--shows", nargs="*", choices=list(ROWS), help="small problems instead")
    options = parser.parse_args(arguments)
    if options.shows is not None:
        return int(not shows(options.shows or list(ROWS)))
    n, device = options.n, torch.device(options.device)
    rng = np.random.default_rng(0)
    kind, order = np.arange(n) % options.groups, rng.permutation(n)
    centre = 0.0 if options.cloud else 4 * rng.normal(size=(options.groups, 3))[kind]
    how = {} if options.cloud else {"epsilon": options.epsilon, "n_init": 1}
    x = centre + rng.normal(size=(n, 3))
    y = x[order] + (0.01 if options.cloud else 0.02) * rng.normal(size=(n, 3))
    x, y = (torch.tensor(points, device=device) for points in (x, y))
    known: dict[str, dict[str, Any]] = {
        "nothing": {},
        "pairs": {"pairs": np.stack([order, np.arange(n)], 1)[: options.pairs]},
        "groups": {"groups": (kind, kind[order])},
    }
    if "mask" in (options.only or []):
        mask = rng.random((n, n), dtype=np.float32) < options.share
        mask[order, np.arange(n)] = True
        known["mask"] = {"allowed": mask}
    seconds, wrong = {}, 0.0
    for name in options.only or known:
        for _ in range(options.repeat):
            synchronize(device)
            clock = time.perf_counter()
            found = torchgw.solve(
                x, y, distances="sqeuclidean", random_state=0, **how, **known[name]
            )
            synchronize(device)
            seconds[name] = time.perf_counter() - clock
        partner = to_numpy(found.lazy_plan.argmax())
        rows = rng.integers(n, size=min(n, 200))
        if name == "pairs":
            rows = order[: min(200, options.pairs)]
        mass = to_numpy(found.lazy_plan.rows(rows))
        place = order.argsort()
        allowed = kind[rows, None] == kind[order]
        if name == "pairs":
            allowed = np.arange(n) == place[rows, None]
        elif name == "mask":
            allowed = mask[rows]
        if name != "nothing":
            wrong = max(wrong, float(np.where(allowed, 0, mass).max()))
        print(
            json.dumps(
                {
                    "known": name,
                    "n": n,
                    "device": str(device),
                    "seconds": round(seconds[name], 3),
                    "status": found.status.name,
                    "outer": found.n_iters,
                    "inner": found.report.inner_iterations,
                    "objective": found.report.objective,
                    "marginal_error": found.marginal_error,
                    "in_group": float((kind[order][partner] == kind).mean()),
                    "right": float((partner == place).mean()),
                    "allowed": found.report.allowed,
                    "host_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
                    "device_mib": torch.cuda.max_memory_allocated() // 2**20
                    if device.type == "cuda"
                    else 0,
                }
            ),
            flush=True,
        )
    most = 1.25 * seconds.get("nothing", np.inf)
    slower = [name for name in seconds if name != "mask" and seconds[name] > most]
    if slower or wrong:
        print(f"outside of what is allowed: {wrong:g}; slower than with nothing: {slower}")
    return int(bool(wrong or slower))
