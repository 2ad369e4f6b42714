"""Share of tiles kept, time and error of half-steps: ``python -m benchmarks tiles``.

Clouds are matched to a second draw of themselves by the squared distance, a linear problem whose
plan is as wide as the root of epsilon, on manifolds of 1, 2 and 3 dimensions and on clusters in 50.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.harness.measure import synchronize
from torchgw._sinkhorn.choose import choose_backend
from torchgw._sinkhorn.loop import sinkhorn
from torchgw._sinkhorn.problem import FactoredCost, LinearProblem, softmin
from torchgw._sinkhorn.tiles.tiling import Tiling, skipped_share
from torchgw._typing import Marginals

# Rows on which a half-step is compared with float64.
_CHECKED = 256


def cloud(kind: str, n: int, generator: torch.Generator) -> Tensor:
    """Return points of diameter about one, shape (n, d), in no order."""
    uniform = torch.rand(n, 3, generator=generator, dtype=torch.float64)
    if kind == "curve":
        t = 6 * uniform[:, 0]
        points = torch.stack([t.cos(), t.sin(), t / 6], 1) / 2
    elif kind == "sheet":
        t = 3 * uniform[:, 0]
        points = torch.stack([t.cos(), t.sin(), 2 * uniform[:, 1]], 1) / 2
    elif kind == "ball":
        points = uniform / 3**0.5
    else:
        centres = torch.randn(20, 50, dtype=torch.float64, generator=_seeded(0))
        label = (20 * uniform[:, 0]).long()
        noise = torch.randn(n, 50, generator=generator, dtype=torch.float64)
        return (centres[label] + 0.3 * noise) / 15
    return points + 0.002 * torch.randn(points.shape, generator=generator, dtype=torch.float64)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def squared_distance(x: Tensor, y: Tensor) -> FactoredCost:
    """Return |x_i - y_j|^2 in float32, centred."""
    cost = FactoredCost(2 * x, y, x.square().sum(1), y.square().sum(1)).centred()
    return cost.to(torch.float32)


def median_ms(call: Callable[[], object], device: torch.device, repeat: int = 5) -> float:
    """Return the median time of a call after one that is not counted."""
    seconds = []
    for _ in range(repeat + 1):
        synchronize(device)
        started = time.perf_counter()
        call()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return 1e3 * sorted(seconds[1:])[repeat // 2]


def main(arguments: list[str] | None = None) -> None:
    """Print one line for each cloud and epsilon."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks tiles", description=__doc__)
    parser.add_argument("--n", type=int, default=20_000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kinds", default="curve,sheet,ball,clusters")
    parser.add_argument("--epsilons", default="1e-2,1e-3,1e-4")
    parser.add_argument("--plain", action="store_true", help="count plain iterations too")
    options = parser.parse_args(arguments)
    n, device = options.n, torch.device(options.device)
    weight = torch.full((n,), 1 / n, dtype=torch.float64, device=device)
    marginals = Marginals(weight, weight)
    print(
        f"{n} x {n}, {device}, torch {torch.__version__}, bound {skipped_share(torch.float32):.1e}"
    )
    print(
        "| cloud | epsilon | kept | half-step ms, of all tiles | error over epsilon, of all tiles "
        "| apply ms, of all tiles | iterations to 1e-4, of all tiles |"
    )
    print("|---|---|---|---|---|---|---|")
    for kind in options.kinds.split(","):
        x, y = (cloud(kind, n, _seeded(seed)).to(device) for seed in (1, 2))
        cost = squared_distance(x, y)
        for epsilon in map(float, options.epsilons.split(",")):
            measure(kind, cost, marginals, epsilon, options.plain)


def measure(
    kind: str, cost: FactoredCost, marginals: Marginals, epsilon: float, plain: bool
) -> None:
    """Print the line of one problem."""
    device, n = cost.device, cost.shape[0]
    tiling = Tiling.of(cost.shape, device)
    tiled = choose_backend("auto", device, torch.float32, tiling)
    whole = choose_backend("auto", device, torch.float32)
    linear = LinearProblem(cost, marginals, epsilon)
    solved = sinkhorn(tiled.prepare(linear), None, max_iter=60, tol=1e-4)
    counts = [f"{solved.n_iters} ({solved.error:.0e})"]
    if plain:
        other = sinkhorn(whole.prepare(linear), None, max_iter=200, tol=1e-4)
        counts.append(f"{other.n_iters} ({other.error:.0e})")
    f, g = solved.potentials
    rows = torch.arange(0, n, max(1, n // _CHECKED), device=device)
    part = cost.rows(rows).to(torch.float64)
    exact = softmin(part, marginals.log_b, g, epsilon, axis=1)
    ones = cost.right
    times, errors, products = [], [], []
    for backend in (tiled, whole):

        def half_step(backend=backend) -> Tensor:
            return backend.prepare(linear).softmin(g, axis=1)

        def product(backend=backend) -> Tensor:
            return backend.prepare(linear).apply(solved.potentials, ones)

        errors.append(float((half_step()[rows] - exact).abs().max()) / epsilon)
        times.append(median_ms(half_step, device, 3))
        products.append(median_ms(product, device, 3))
    problem = tiling.problem(linear)
    kept = float(problem.keep(*problem.exponents(solved.potentials), 0.0).double().mean())
    print(
        f"| {kind} | {epsilon:g} | {kept:.4f} | {times[0]:.1f}, {times[1]:.1f} | "
        f"{errors[0]:.1e}, {errors[1]:.1e} | {products[0]:.1f}, {products[1]:.1f} | "
        f"{', '.join(counts)} |",
        flush=True,
    )
