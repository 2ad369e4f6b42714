"""The dense part of the study of kernels: iterations and half-steps over a stored matrix."""

# ruff: noqa: I001 - benchmarks.variants chooses Triton's interpreter, before Triton is imported
from __future__ import annotations

from typing import NamedTuple

import torch

from benchmarks.harness.variants import DEVICE, EXACT, GPU, factored, measure, weights
from torchgw._sinkhorn.kernels import stored
from torchgw._sinkhorn.compiled import CompiledBackend
from torchgw._sinkhorn.problem import DenseCost
from torchgw._sinkhorn.eager import EagerBackend
from torchgw._sinkhorn.contract import Sweep
from torchgw._sinkhorn.problem import LinearProblem
from torchgw._sinkhorn.problem import softmin
from torchgw._sinkhorn.kernels.stored import SweepShape
from torchgw._triton_sinkhorn import TritonBackend
from torchgw._typing import Marginals, Potentials

__all__ = ["dense", "graphs", "plans"]

COUNT = 100 if GPU else 3
SIZES = [(5001, 6001), (10001, 12001)] if GPU else [(37, 130)]
DTYPES = (torch.float32, torch.float64)


class Problem(NamedTuple):
    """A stored cost, and three iterations on it in float64."""

    group: str
    linear: LinearProblem
    start: Potentials
    reference: Sweep

    @property
    def cost(self) -> DenseCost:
        return self.linear.cost

    def error(self, sweep: Sweep) -> float:
        """Return the largest error of a sweep of three iterations."""
        if not bool(sweep.check[0]):
            return float("nan")
        pairs = zip(sweep[:3], self.reference[:3], strict=True)
        return max(float((x.double() - y).abs().max()) for x, y in pairs) / self.linear.epsilon

    def time(self, name: str, backend: object, count: int = COUNT) -> None:
        """Gate and time one sweep; what all sweeps share is prepared before."""
        sweeper = backend.prepare(self.linear).sweeper(self.start)
        measure(
            self.group, f"{count} iterations, {name}", lambda: sweeper(self.start, count, 1.0),
            lambda: self.error(sweeper(self.start, 3, 1.0)), limit=EXACT,
            floor=1e3 * count * self.cost.matrix.nbytes / 4.3e12,
        )  # fmt: skip


def problem(n: int, m: int, dtype: torch.dtype) -> Problem:
    factors, epsilon = factored(n, m, 8, torch.float64)
    cost = factors.dense().to(dtype)
    marginals = weights(n, m, dtype)
    zero = torch.zeros(m, device=DEVICE, dtype=torch.float64)
    exact = EagerBackend()
    wide = Marginals(*(part.double() for part in marginals))
    start = exact.prepare(LinearProblem(factors, wide, epsilon)).half_steps(zero)
    # float32 entries differ from the float64 ones by rounding, which epsilon amplifies
    reference = exact.prepare(LinearProblem(cost.to(torch.float64), wide, epsilon)).sweep(start, 3)
    start = Potentials(*(part.to(dtype) for part in start))
    group = f"dense {n}x{m} f{dtype.itemsize * 8}"
    return Problem(group, LinearProblem(cost, marginals, epsilon), start, reference)


def dense() -> None:
    """Time 100 iterations over a stored matrix, and what surrounds them."""
    for n, m in SIZES:
        for dtype in DTYPES:
            dense_steps(problem(n, m, dtype))
    if GPU:
        dense_steps(problem(20001, 25001, torch.float32))


def dense_steps(case: Problem) -> None:
    backend, exact = TritonBackend(), EagerBackend()
    case.time(f"default {plan_text(stored.sweep_shape(case.cost))}", backend)
    measure(
        case.group, "sweeper made and 10 iterations",
        lambda: backend.prepare(case.linear).sweep(case.start, 10), lambda: 0.0, limit=0.0,
    )  # fmt: skip
    case.time("eager", exact)
    softmins(case)


def plans() -> None:
    """Time 100 iterations with other launch shapes than the default."""
    for (n, m, dtype), variants in PLANS.items() if GPU else ():
        case = problem(n, m, dtype)
        for plan in variants:
            case.time(plan_text(plan), TritonBackend(shape=plan))
            torch.cuda.empty_cache()


def graphs() -> None:
    """Time 10 iterations with and without a CUDA graph."""
    for n, m in [(400, 500), (1500, 1500), (4000, 5000)] if GPU else [(20, 30)]:
        for dtype in DTYPES:
            case = problem(n, m, dtype)
            for name, backend in (
                ("launched", TritonBackend(graphs=False)),
                ("graph", TritonBackend()),
                ("eager", EagerBackend()),
            ):
                case.time(name, backend, 10)
                measure(
                    case.group,
                    f"sweeper made, {name}",
                    lambda backend=backend, case=case: backend.prepare(case.linear).sweeper(
                        case.start
                    ),
                    lambda: 0.0,
                    limit=0.0,
                )


def plan_text(plan: SweepShape) -> str:
    return " ".join(f"{name}={value}" for name, value in plan._asdict().items())


_WIDE = SweepShape(width=2048, warps=16, programs=132, ahead=16, held=True)
_MIDDLE = SweepShape(width=1024, warps=8, programs=264, ahead=16, held=True)
_SMALL = SweepShape(width=512, warps=4, programs=264, ahead=16, held=True)
_DOUBLE = SweepShape(width=1024, warps=16, programs=132, ahead=4, held=True)
# The default first; then what came next to it, or fails it most instructively.
PLANS = {
    (10001, 12001, torch.float32): [
        _WIDE,
        _WIDE._replace(ahead=0),
        _WIDE._replace(held=False),
        _WIDE._replace(width=4096),
    ],
    (5001, 6001, torch.float32): [_MIDDLE, _WIDE, _SMALL, _MIDDLE._replace(programs=396)],
    (10001, 12001, torch.float64): [
        _DOUBLE,
        _DOUBLE._replace(ahead=0),
        _DOUBLE._replace(ahead=8, held=False),
    ],
    (5001, 6001, torch.float64): [_DOUBLE._replace(ahead=16), _DOUBLE],
    (20001, 25001, torch.float32): [
        _WIDE._replace(ahead=4, held=False),
        _WIDE._replace(ahead=0, held=False),
    ],
    (4000, 5000, torch.float32): [_MIDDLE, _WIDE, _SMALL],
    (1500, 1500, torch.float32): [_SMALL, _SMALL._replace(programs=528), _MIDDLE],
    (400, 500, torch.float32): [_SMALL, _SMALL._replace(programs=400)],
}


def softmins(case: Problem) -> None:
    """Time one dense half-step on each axis, and beside it eager and compiled PyTorch."""
    (cost, marginals, epsilon, _), start = case.linear, case.start
    # torch.compile takes its time for every dtype and layout: once is enough
    compiled = [CompiledBackend()] if case.group == "dense 10001x12001 f32" else []
    backends = [TritonBackend(), *compiled, EagerBackend()]
    for axis, name in ((1, "rows"), (0, "columns")):
        weight, potential = (marginals.log_b, start.g) if axis == 1 else (marginals.log_a, start.f)
        expected = softmin(
            cost.to(torch.float64), weight.double(), potential.double(), epsilon, axis
        )
        for backend in backends if GPU else backends[:1]:

            def run(backend: object = backend) -> torch.Tensor:
                return backend.prepare(case.linear).softmin(potential, axis)  # noqa: B023

            measure(
                case.group,
                f"softmin of {name}, {backend.name}",
                run,
                lambda run=run: float((run().double() - expected).abs().max() / epsilon),  # noqa: B023
                limit=EXACT,
                floor=1e3 * cost.matrix.nbytes / 4.3e12,
            )
