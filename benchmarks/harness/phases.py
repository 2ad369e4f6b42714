"""Labels for the phases of a solve, put on from outside: the library carries no instruments.

``_TARGETS`` names the functions that make up each phase. While :func:`labelled` is active they run
under a label, and the least work that their arguments imply is added up.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.profiler import record_function

from benchmarks.harness.measure import synchronize
from torchgw import _api
from torchgw._gradients import contract, dense, factored, sampled
from torchgw._plans import transport
from torchgw._problem import named, providers
from torchgw._sinkhorn import loop
from torchgw._sinkhorn.compiled import CompiledProblem
from torchgw._sinkhorn.contract import Sweep, Sweeper
from torchgw._sinkhorn.eager import EagerProblem
from torchgw._sinkhorn.problem import Cost, DenseCost, FactoredCost
from torchgw._solve import evaluation, step, strategy
from torchgw._solve import loop as outer_loop
from torchgw._typing import Potentials
from torchgw.distances import dijkstra, landmark

__all__ = ["PHASES", "Clock", "Work", "labelled", "targets"]

# In the order of a solve. What no label covers is "other".
PHASES = (
    "graph",
    "distances",
    "setup",
    "cost",
    "Sinkhorn",
    "sampling",
    "apply",
    "checks",
    "evaluation",
    "other",
)


class Work(NamedTuple):
    """The least that any implementation has to do."""

    bytes: float = 0.0  # to and from memory
    operations: float = 0.0  # multiplications and additions of matrix products
    exponentials: float = 0.0

    def plus(self, other: Work) -> Work:
        """Return the sum."""
        return Work(*(x + y for x, y in zip(self, other, strict=True)))

    def times(self, count: float) -> Work:
        """Return so many times as much."""
        return Work(*(count * x for x in self))


def pass_over(cost: Cost, *, exponentials: bool = True) -> Work:
    """Return the work of looking once at every entry of exp(-C / epsilon)."""
    n, m = cost.shape
    entries, size = float(n) * m, cost.dtype.itemsize
    if isinstance(cost, DenseCost):
        return Work(entries * size, 0.0, entries * exponentials)
    # the kernel of factors is computed anew at every pass
    return Work((n + m) * (cost.rank + 2) * size, 2 * entries * cost.rank, entries)


def _softmin_work(arguments: dict[str, Any]) -> Work:
    return pass_over(arguments["self"].problem.cost)


def _sweeper_work(arguments: dict[str, Any]) -> Work:
    """Return the work of preparing sweeps: one kernel, if it is stored."""
    cost = arguments["self"].problem.cost
    return pass_over(cost) if isinstance(cost, DenseCost) else Work()


def _apply_work(arguments: dict[str, Any]) -> Work:
    cost, values = arguments["self"].problem.cost, arguments["values"]
    n, m = cost.shape
    return pass_over(cost).plus(Work(values.nbytes, 2.0 * n * m * values.shape[1]))


def _product_work(arguments: dict[str, Any]) -> Work:
    """Return the work of DX P DY."""
    plan = arguments["coupling"].values
    n, m = plan.shape
    return Work((n * n + m * m + 2 * n * m) * plan.itemsize, 2.0 * n * m * (n + m))


class Target(NamedTuple):
    """A function to label."""

    owner: Any
    attribute: str
    phase: str
    work: Callable[[dict[str, Any]], Work] | None = None


_TARGETS = (
    Target(providers, "_graph", "graph"),
    Target(named.Preparation, "all_pairs", "distances"),
    Target(_api, "build_providers", "distances"),
    Target(landmark.LandmarkDistance, "__init__", "distances"),
    Target(dijkstra.DijkstraDistance, "columns", "distances"),
    Target(strategy, "make_gradient", "setup"),
    Target(strategy, "natural_scale", "setup"),
    Target(dense.DenseGradient, "linearise", "cost", _product_work),
    Target(factored.FactoredGradient, "linearise", "cost"),
    Target(sampled.SampledGradient, "linearise", "cost"),
    Target(FactoredCost, "dense", "cost"),
    Target(step, "sinkhorn", "Sinkhorn"),
    Target(EagerProblem, "softmin", "Sinkhorn", _softmin_work),
    Target(EagerProblem, "sweeper", "Sinkhorn", _sweeper_work),
    Target(EagerProblem, "apply", "apply", _apply_work),
    Target(EagerProblem, "dense", "apply"),
    Target(CompiledProblem, "softmin", "Sinkhorn", _softmin_work),
    Target(CompiledProblem, "sweeper", "Sinkhorn", _sweeper_work),
    Target(transport.TransportPlan, "sample", "sampling"),
    Target(transport.TransportPlan, "to_dense", "apply"),
    Target(loop, "read", "checks"),
    Target(contract.StrictGradient, "dual_value", "checks"),
    Target(outer_loop, "check_finite", "checks"),
    Target(dense.PlanMatrix, "change", "checks"),
    Target(factored.Encoding, "change", "checks"),
    Target(dense.DenseGradient, "evaluate", "evaluation"),
    Target(factored.FactoredGradient, "evaluate", "evaluation"),
    Target(sampled.SampledGradient, "evaluate", "evaluation"),
    Target(evaluation, "_entropy_and_linear", "evaluation"),
)


def targets() -> tuple[Target, ...]:
    """Return every function to label, the Triton backend's where Triton is installed."""
    if find_spec("triton") is None:
        return _TARGETS
    from torchgw._triton_sinkhorn import TritonProblem

    return (
        *_TARGETS,
        Target(TritonProblem, "softmin", "Sinkhorn", _softmin_work),
        Target(TritonProblem, "sweeper", "Sinkhorn", _sweeper_work),
        Target(TritonProblem, "apply", "apply", _apply_work),
        Target(TritonProblem, "dense", "apply"),
    )


@dataclass
class Clock:
    """Seconds by phase, each second counted once: for the innermost label."""

    device: torch.device
    synchronised: bool  # wait for the device at every label, so that its time lands where it is due
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    work: dict[str, Work] = field(default_factory=lambda: defaultdict(Work))
    _stack: list[str] = field(default_factory=lambda: ["other"])
    _since: float = 0.0

    def start(self) -> None:
        """Begin with the phase "other"."""
        self._since = self._now()

    def stop(self) -> None:
        """Account for the time since the last label."""
        self._turn()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens inside for a phase."""
        self._turn()
        self._stack.append(name)
        self.calls[name] += 1
        try:
            with record_function(f"torchgw: {name}"):
                yield
        finally:
            self._turn()
            self._stack.pop()

    def add_work(self, name: str, work: Work) -> None:
        """Add work to a phase, unless an enclosing call has done so."""
        if "counted" not in self._stack:
            self.work[name] = self.work[name].plus(work)

    def _turn(self) -> None:
        now = self._now()
        self.seconds[next(name for name in reversed(self._stack) if name != "counted")] += (
            now - self._since
        )
        self._since = now

    def _now(self) -> float:
        if self.synchronised:
            synchronize(self.device)
        return time.perf_counter()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Keep calls inside from adding their work again."""
        self._stack.append("counted")
        try:
            yield
        finally:
            self._stack.pop()


@contextlib.contextmanager
def labelled(clock: Clock) -> Iterator[None]:
    """Label every target while the block runs, without graphs of iterations: they run no code."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(outer_loop, "choose_step", lambda step: step))
        for target in targets():
            wrapped = _wrap(getattr(target.owner, target.attribute), target, clock)
            stack.enter_context(mock.patch.object(target.owner, target.attribute, wrapped))
        clock.start()
        yield
        clock.stop()


def _wrap(function: Callable[..., Any], target: Target, clock: Clock) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with clock.phase(target.phase):
            if target.work is None:
                return function(*args, **kwargs)
            arguments = inspect.signature(function).bind(*args, **kwargs).arguments
            clock.add_work(target.phase, target.work(arguments))
            with clock.counted():
                result = function(*args, **kwargs)
        if target.attribute == "sweeper":
            return _LabelledSweeper(result, arguments["self"].problem.cost, target.phase, clock)
        return result

    return run


@dataclass(frozen=True)
class _LabelledSweeper:
    """Labels a sweeper; each of its iterations reads a stored kernel once, or makes it anew."""

    sweeper: Sweeper
    cost: Cost
    phase: str
    clock: Clock

    @property
    def two_level(self) -> bool:
        return self.sweeper.two_level

    def __call__(self, start: Potentials, count: int, relaxation: float) -> Sweep:
        with self.clock.phase(self.phase):
            passes = pass_over(self.cost, exponentials=False)
            self.clock.add_work(self.phase, passes.times(count))
            with self.clock.counted():
                return self.sweeper(start, count, relaxation)
