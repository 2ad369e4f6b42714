"""Steps of a training loop: ``python -m benchmarks loss --device cuda``.

Points are trained by Adam towards a shape through ``torchgw.losses.GWLoss``. Milliseconds of a
step (median, without the first five), wall and CPU; how far its gradient is from that of a tight
solve at the same points; and the growth of memory. Exit status 1 if memory grows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from benchmarks.harness.measure import synchronize
from torchgw.losses import GWLoss


def main(arguments: list[str] | None = None) -> int:
    """Measure some shapes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks loss", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--epsilon", type=float, default=0.05)
    parser.add_argument("--rate", type=float, default=0.01, help="of Adam")
    parser.add_argument("--debiased", action="store_true")
    parser.add_argument("--shapes", nargs="*", default=["1x10", "1x64", "16x64", "1x256"])
    options = parser.parse_args(arguments)
    device, grown = torch.device(options.device), False
    for shape in options.shapes:
        count, n = map(int, shape.split("x"))
        generator = torch.Generator().manual_seed(0)
        target = torch.randn(count, n, 3, generator=generator).to(device)
        points = torch.nn.Parameter(target[..., :2].clone())
        loss = GWLoss(epsilon=options.epsilon, debiased=options.debiased)
        tight = GWLoss(
            epsilon=options.epsilon, debiased=options.debiased, tol=1e-7, inner_tol=1e-9,
            max_iter=500,
        )  # fmt: skip
        optimiser = torch.optim.Adam([points], lr=options.rate)
        wall, busy, off, held = [], [], [], []
        for step in range(options.steps):
            if step % 10 == 5:
                (exact,) = torch.autograd.grad(tight(points, target), points)
            synchronize(device)
            begun = time.perf_counter(), time.process_time()
            value = loss(points, target)
            optimiser.zero_grad()
            value.backward()
            synchronize(device)
            wall.append(time.perf_counter() - begun[0])
            busy.append(time.process_time() - begun[1])
            assert points.grad is not None
            if step % 10 == 5:
                off.append(float((points.grad - exact).norm() / exact.norm()))
            optimiser.step()
            if device.type == "cuda":
                held.append(torch.cuda.memory_allocated(device))
        row = {
            "shape": shape, "device": device.type, "first_ms": round(1e3 * wall[0], 1),
            "wall_ms": round(1e3 * statistics.median(wall[5:]), 2),
            "cpu_ms": round(1e3 * statistics.median(busy[5:]), 2),
            "gradient_error": max(off), "value": float(value.detach()), "searches": loss.searches,
        }  # fmt: skip
        if held:
            row["grown_bytes"] = held[-1] - held[options.steps // 2]
            grown |= held[-1] > held[options.steps // 2]
        print(json.dumps(row), flush=True)
    return int(grown)
