"""Products with the Hessian beside their solve: ``python -m benchmarks hvp --case rank-64``.

Points and a rotated, noisy copy of them are solved, and one direction of all points is multiplied
by the Hessian. One line of JSON per case: the seconds and the peak memory of both, how well the
linear system is solved, and how far the product is from central differences of the gradient.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

import torchgw
from benchmarks.harness.measure import MemoryProbe, timed

__all__ = ["CASES", "main", "measure"]

T = TypeVar("T")


class Case(NamedTuple):
    """A kind of points and how they are compared."""

    distances: str
    dimension: int
    epsilon: float  # over the mean of the squared distances, to the power of `power`
    power: int


CASES = {
    "rank-64": Case("sqeuclidean", 62, 0.02, 2),
    "dense": Case("euclidean", 3, 0.005, 1),
}


def clouds(case: Case, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Draw points whose k-th variance is 1 / k, a rotated noisy copy, and a direction."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.arange(1, case.dimension + 1).double() ** -0.5

    def normal(rows: int) -> Tensor:
        return torch.randn(rows, case.dimension, generator=generator, dtype=torch.float64)

    x, turn = normal(n) * scale, torch.linalg.qr(normal(case.dimension)).Q
    y = (x + 0.3 * scale * normal(n)) @ turn
    return x.to(dtype), y.to(dtype), (normal(n) * scale).to(dtype)


def spent_on(
    device: torch.device, call: Callable[[Tensor], T], points: Tensor
) -> tuple[T, tuple[float, float], dict[str, float]]:
    """Call; return the result, seconds of the clock and of the processor, and peak memory."""
    probe, processor = MemoryProbe(device), time.process_time()
    seconds, result = timed(lambda _: call(points), 0, device)
    return result, (seconds, time.process_time() - processor), probe.peak_mib()


def measure(
    name: str, n: int, device: torch.device, dtype: torch.dtype, repeat: int, **settings: Any
) -> dict[str, Any]:
    """Solve, multiply, and compare with differences; the last of ``repeat`` calls is timed.

    Differences divide the error of two solves by the ``step``: those have a tolerance of their own.
    """
    case = CASES[name]
    x, y, step = (part.to(device) for part in clouds(case, n, dtype))
    mean = 2 * float(x.double().var(0, unbiased=False).sum())
    settings = {
        "distances": case.distances, "epsilon": case.epsilon * mean**case.power, "n_init": 1,
        "differentiable": "value", "random_state": 0, **settings,
    }  # fmt: skip
    size, tight = settings.pop("step"), settings.pop("check_tol")
    precise = {"tol": tight, "inner_tol": tight / 10, "inner_max_iter": 20_000}

    def solve(points: Tensor, **more: Any) -> torchgw.GWResult:
        return torchgw.solve(
            points.clone().requires_grad_(), y, options=torchgw.Options(**settings | more)
        )

    for _ in range(repeat):
        result, solved, memory = spent_on(device, solve, x)
        found, spent, more = spent_on(device, result.hvp, step)
    ends = []
    for sign in (1, -1):
        moved = (x + sign * size * step).requires_grad_()
        end = torchgw.solve(
            moved, y, init=result.lazy_plan, options=torchgw.Options(**settings | precise)
        )
        ends.append(torch.autograd.grad(end.loss, moved)[0].double())
    expected, product = (ends[0] - ends[1]) / (2 * size), found.products["X"].double()
    along = float((expected * step).sum())
    return {
        "case": name, "n": n, "device": str(device), "dtype": str(dtype)[6:],
        "threads": torch.get_num_threads(), **settings, "status": result.status.name,
        "iterations": [result.log["outer_iterations"], result.log["inner_iterations"]],
        "gradient_used": result.gradient,
        "solve_s": round(solved[0], 3), "product_s": round(spent[0], 3),
        "ratio": round(spent[0] / solved[0], 3),
        "solve_cpu_s": round(solved[1], 3), "product_cpu_s": round(spent[1], 3),
        "cpu_ratio": round(spent[1] / solved[1], 3),
        "solve_mib": memory["peak_mib"], "product_mib": more["peak_mib"],
        "products": found.iterations, "residual": found.residual, "converged": found.converged,
        "error_along": abs(float((product * step).sum()) / along - 1),
        "error": float((product - expected).norm() / expected.norm()),
    }  # fmt: skip


def main(arguments: list[str]) -> None:
    """Measure some cases of some sizes, and print a line for each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks hvp", description=__doc__)
    parser.add_argument("--case", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--n", type=int, nargs="+", default=[2_000])
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float64")
    parser.add_argument("--tol", type=float, default=1e-5)
    parser.add_argument("--check-tol", type=float, default=1e-8, help="of the differences' solves")
    parser.add_argument("--step", type=float, default=3e-4, help="of the differences")
    parser.add_argument("--repeat", type=int, default=2, help="the first call compiles")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    for name in options.case:
        for n in options.n:
            settings = {part: getattr(options, part) for part in ("tol", "check_tol", "step")}
            record = measure(name, n, device, dtype, options.repeat, **settings)
            print(json.dumps(record), flush=True)
