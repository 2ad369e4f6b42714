"""When the outer loop stops: a sampled objective by its average, an exact one by its fall.

Proximal steps stop by the change of the plan, which the few numbers of a coupling do not show.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._plans.contract import Plan
from torchgw._solve.status import Status

# Standard deviations of a moving average that count as progress at least. [L125]
_NOISE = 2.0
# Iterations over which the decrease of the objective is averaged. [L173, L178]
_WINDOW = 5
# A plan is settling if its smallest change in so many iterations is at most this share of the
# smallest one before. [L178]
_SETTLING_WINDOW, _SETTLING = 10, 0.5
# Products with a plan that tell its change: a single one may miss it by chance. [L640]
_PRODUCTS = 8
# If a value is below this share of the squares that cancel in it, its decrease is judged by these:
# the value of a copy falls to zero by the same share of itself in each step. [L640]
_LEAST_SHARE = 0.01
# The value is computed every so many steps, to see whether it has come to zero: that costs as much
# as a step. [L642]
_EVERY = 10


@dataclass
class MovingAverage:
    """Early stopping: an exponential moving average that has stopped improving."""

    # A decrease within the noise of the average is none: it would come by chance, again and again.
    # The noise is estimated from how successive values differ, which a steady fall hardly changes.

    weight: float  # of the newest value; 0 switches the stopping off
    improvement: float  # relative decrease of the average that counts as progress
    patience: int  # values without progress before stopping
    _average: float = field(default=float("nan"), init=False)
    _best: float = field(default=float("inf"), init=False)
    _stalled: int = field(default=0, init=False)
    _last: float = field(default=float("nan"), init=False)
    _squares: float = field(default=0.0, init=False)
    _count: int = field(default=0, init=False)

    def update(self, value: float) -> bool:
        """Take a value; return whether to stop."""
        if self.weight == 0:
            return False
        first = not math.isfinite(self._average)
        self._average = value if first else self._average + self.weight * (value - self._average)
        if not first:
            self._squares += (value - self._last) ** 2 / 2
            self._count += 1
        self._last = value
        variance = self._squares / max(1, self._count) * self.weight / (2 - self.weight)
        least = max(self.improvement * abs(self._best), _NOISE * math.sqrt(variance))
        if first or self._average < self._best - least:
            self._best = self._average
            self._stalled = 0
        else:
            self._stalled += 1
        return self._stalled >= self.patience


class Verdict(NamedTuple):
    """What an outer iteration tells of itself, linearised at X and ending in P."""

    change: float  # of the coupling, relative
    dual: float  # value of the linear problem
    now: float  # <C(X), P> without the linear term; NaN where unknown, as for samples
    before: float  # <C(X), P_before>
    own: float  # <C(X), X>


class Descent:
    """Early stopping of an exact solve: an objective that no longer falls, at one epsilon."""

    # The objective of a plan P is known one iteration later, from the cost at the point X next to P
    # where that was linearised: its quadratic part is <C(X), P> - <C(X), X> / 2, up to a term of
    # second order in P - X, and its entropy follows from the dual value.
    # `tol` is the mean relative decrease per iteration that counts as falling, 0 for no stopping;
    # `constant` is what the dual value has and the objective has not.

    def __init__(self, tol: float, constant: float) -> None:
        self._tol, self._constant = tol, constant
        self._last: Verdict | None = None
        self._changes: list[float] = []
        self._risen = False
        self.values: list[float] = []

    def update(self, verdict: Verdict, *, met: bool = True) -> bool:
        """Take what an iteration tells; return whether to stop."""
        # A plan whose changes shrink is about to settle, and is not stopped. Plans whose marginals
        # are not `met` are not compared either: their objective may be anything. Where plans go to
        # and fro between two, the loop ends at the lower one.
        if not met:
            self._last, self._risen = None, False
            self.values.clear()
            return False
        last, self._last = self._last, verdict
        self._changes.append(verdict.change)
        if last is None or self._tol == 0 or math.isnan(verdict.now):
            return False
        quadratic = verdict.before - verdict.own / 2
        self.values.append(last.dual - last.now + quadratic - self._constant)
        if len(self.values) <= _WINDOW:
            return False
        value = self.values[-1]
        fall = (self.values[-1 - _WINDOW] - value) / _WINDOW
        recent, earlier = self._changes[-_SETTLING_WINDOW:], self._changes[:-_SETTLING_WINDOW]
        settling = min(recent) <= _SETTLING * min(earlier, default=math.inf)
        least = self._tol * abs(value)
        if self._risen:
            return True
        flat = fall <= least and not settling
        self._risen = flat and value > self.values[-2] + least
        return flat and not self._risen


class Drift:
    """How proximal steps end once their coupling, of few numbers, has settled."""

    # The plan may still move: a coupling does not see which of two equal points has which mass, nor
    # does a linear cost; and a step that changes the coupling by little changes the plan by the
    # root of that. Products with random vectors see all of a plan: the mean of their squares is
    # that of its entries. `tol` is the relative decrease of the value in a step that counts as
    # falling, 0 for no stopping by it; `squares` are the squares that cancel in a value.

    def __init__(self, tol: float, squares: float) -> None:
        self._tol, self._least = tol, _LEAST_SHARE * squares
        self._last: tuple[Tensor, float] | None = None

    def is_due(self, step: int) -> bool:
        """Whether it is time to check that the value has not come to zero."""
        return self._tol > 0 and step % _EVERY == 0

    def is_zero(self, value: float) -> bool:
        """Whether a value that is never negative is too small to fall any further."""
        return value <= self._tol * self._least

    def update(self, plan: Plan, value: float, reachable: float) -> Status | None:
        """Take a plan and its value; return how the loop ends, ``None`` if it goes on."""
        generator = torch.Generator().manual_seed(0)
        vectors = torch.randn(plan.shape[1], _PRODUCTS, device="cpu", generator=generator)
        image = (plan @ vectors.to(plan.device, plan.dtype)).double()
        last, self._last = self._last, (image, value)
        if last is None:
            return None
        if float((image - last[0]).norm()) <= reachable * float(image.norm()):
            return Status.CONVERGED
        flat = self._tol > 0 and last[1] - value <= self._tol * max(abs(value), self._least)
        return Status.FLAT if flat else None
