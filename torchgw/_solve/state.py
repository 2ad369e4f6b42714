"""The state of the outer loop: what it is given, what it changes and what it records."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch

from torchgw._gradients.contract import Coupling, Gradient
from torchgw._plans.transport import TransportPlan
from torchgw._problem.marginals import MarginalRule
from torchgw._problem.problem import Problem
from torchgw._sinkhorn.annealing import Annealing
from torchgw._sinkhorn.contract import Backend
from torchgw._solve.options import Options
from torchgw._solve.precision import rounding
from torchgw._solve.status import Status
from torchgw._tensors.deadline import is_over
from torchgw._tensors.ranks import Ranks
from torchgw._typing import Iteration, Marginals, Potentials


@dataclass
class Recorder:
    """What is collected along the way: history, seconds by phase, the callback."""

    callback: Callable[[Iteration], Any] | None = None
    history: list[Iteration] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    settle_iterations: int = 0  # Sinkhorn iterations of the last linear problem
    ranks: Ranks | None = None  # processes that go on or stop together
    # function that keeps a state in a file, once the loop over all points has begun
    checkpoint: "Callable[[LoopState], None] | None" = None

    def add(self, entry: Iteration) -> bool:
        """Record an iteration; return whether to stop: the callback or the time, on any rank."""
        self.history.append(entry)
        if self.ranks is not None:
            self.ranks.agree("(iteration, epsilon, dual value, error, change)", entry[:5])
        answer = None if self.callback is None else self.callback(entry)
        stop = (isinstance(answer, (bool, np.bool_)) and bool(answer)) or is_over(agreed=True)
        return stop if self.ranks is None else self.ranks.any(stop)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the seconds of a block to a phase, if it ends."""
        clock = perf_counter()
        yield
        self.time(phase, clock)

    def time(self, phase: str, since: float) -> float:
        """Add the seconds since a moment to a phase; return the present moment."""
        now = perf_counter()
        self.timings[phase] = self.timings.get(phase, 0.0) + now - since
        return now


@dataclass(frozen=True)
class Setting:
    """What stays the same throughout a solve."""

    gradient: Gradient
    problem: Problem  # in the dtype of the gradient
    anneal: Annealing
    options: Options
    backend: Backend
    generator: torch.Generator
    recorder: Recorder
    store: bool  # build the (n, m) cost of an iteration: scaling a stored kernel is faster
    tol: float  # change of the coupling and marginal error at which the loop ends
    scale: float  # natural scale of the cost
    dtype: torch.dtype  # of the exponents
    rule: MarginalRule | None = None  # relaxed marginals; None for strict ones

    @property
    def marginals(self) -> Marginals:
        """Weights of the points."""
        return self.problem.marginals

    def rounding(self, epsilon: float) -> float:
        """Return the rounding of the exponents of the plan."""
        return rounding(self.scale, epsilon, self.dtype)


class Solved(NamedTuple):
    """The last linear problem of a loop, if it is solved as well as a result needs."""

    plan: TransportPlan
    point: Coupling  # where its cost is linearised
    coupling: Coupling  # of the plan


class LoopState(NamedTuple):
    """What flows through the loop."""

    coupling: Coupling  # where the next cost is linearised
    latest: Coupling  # of the last plan
    potentials: Potentials | None  # of the last plan, cost units; None before there is one
    start: Potentials | None  # where the next linear problem begins
    status: Status = Status.OUTER_LIMIT
    done: int = 0  # outer iterations of the whole solve so far
    annealed: int = 0  # of these since the annealing began; they determine the next epsilon
    solved: Solved | None = None  # what the result can be, if the loop has reached it
