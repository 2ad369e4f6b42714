"""Error of the plan and time of a solve at each precision: ``python -m benchmarks precision``."""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Any
from unittest import mock

import torch

import torchgw
from benchmarks.harness.measure import synchronize
from torchgw._solve import strategy
from torchgw.datasets import spiral, swiss_roll

# Name, precision of solve(), and of the factors' products in the Triton kernels (None: the rest).
_VARIANTS = (
    ("float64", "float64", None),
    ("mixed, fp16x3", "mixed", "fp16x3"),
    ("float32, fp16x3", "float32", "fp16x3"),
    ("float32, float32", "float32", "float32"),
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks precision", description=__doc__)
    parser.add_argument("sizes", nargs="*", type=int, default=[3000, 3000])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--storage", default="streamed", choices=["stored", "streamed"])
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args(arguments)
    n, m = options.sizes
    device = torch.device(options.device)
    x, y = (torch.from_numpy(part).to(device) for part in (spiral(n, 0)[0], swiss_roll(m, 1)[0]))
    print(f"{n} x {m}, {options.storage}, {device}, torch {torch.__version__}, epsilon 5e-4")
    print("| precision, products | plan error (L1) | marginal error | time p50 | status |")
    print("|---|---|---|---|---|")
    exact = None
    for name, precision, products in _VARIANTS:
        if products not in (None, "float32") and device.type != "cuda":
            continue
        seconds, result = [], None
        with _products(products if device.type == "cuda" else None), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(options.repeat + 1):
                started = time.perf_counter()
                result = torchgw.solve(
                    x, y, distances="landmark", n_neighbors=5, epsilon=5e-4, random_state=0,
                    options=torchgw.Options(precision=precision, storage=options.storage),
                )  # fmt: skip
                synchronize(device)
                seconds.append(time.perf_counter() - started)
        plan = torch.as_tensor(result.plan).double()
        exact = plan if exact is None else exact
        error = float((plan - exact).abs().sum())
        median = statistics.median(seconds[1:])
        print(
            f"| {name} | {error:.1e} | {result.marginal_error:.1e} | {median * 1e3:.0f} ms | "
            f"{result.status.name} |",
            flush=True,
        )


def _products(precision: str | None) -> Any:
    """Make the solver use Triton kernels of one product precision."""
    if precision is None:
        return mock.patch.object(strategy, "choose_backend", strategy.choose_backend)
    from torchgw._triton_sinkhorn import TritonBackend

    backend = TritonBackend(precision)
    return mock.patch.object(strategy, "choose_backend", return_value=backend)
