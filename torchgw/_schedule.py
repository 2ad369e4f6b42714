"""When epsilon falls and when the loop stops: annealing, moving average, status."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

__all__ = ["Annealing", "Descent", "MovingAverage", "Report", "Status"]

# Annealing that is the only search for an optimum: quick down to this share of the start, where
# plans are still close to the product plan, and slow from there on.
_PATIENT_FROM = 0.02
_PATIENT_DECAYS = 0.5, 0.9
# Standard deviations of a moving average that count as progress at least.
_NOISE = 2.0
# Iterations over which the decrease of the objective is averaged.
_WINDOW = 5
# A plan is settling if its smallest change in so many iterations is at most this share of the
# smallest one before.
_SETTLING_WINDOW, _SETTLING = 10, 0.5


@dataclass(frozen=True)
class Annealing:
    """Epsilon falls geometrically from ``start`` and then stays exactly at ``target``.

    A ``patient`` one falls quickly at first and slowly later. With ``proximal`` it goes on as
    target / 2, target / 3, ... (docs/algorithm.md, equation 11). It begins at iteration ``first``,
    and does not know the iteration budget, so the answer does not depend on it.
    """

    start: float
    target: float
    decay: float = 0.6
    proximal: bool = False
    first: int = 0
    patient: bool = False

    def __call__(self, iteration: int) -> float:
        """Return epsilon at an iteration counted from zero."""
        step = max(0, iteration - self.first)
        epsilon = max(self.target, self.start * self._fallen(step))
        if not self.proximal or epsilon > self.target:
            return epsilon
        return self.target / (1 + step - self._arrival)

    def share(self, iteration: int) -> float:
        """Return the weight of an iteration's plan in the mean that is linearised next."""
        return min(1.0, self(iteration + 1) / self.target) if self.proximal else 1.0

    def final(self, iterations: int) -> float:
        """Return epsilon of the plan that a solve ends with after so many iterations."""
        return min(self.target, self(iterations))

    @property
    def _arrival(self) -> int:
        """Steps until the target."""
        share = min(1.0, self.target / self.start)
        if not self.patient:
            return math.ceil(math.log(share) / math.log(self.decay))
        quick, slow = _PATIENT_DECAYS
        first = math.ceil(math.log(max(share, _PATIENT_FROM)) / math.log(quick))
        rest = share / quick**first
        return first + max(0, math.ceil(math.log(rest) / math.log(slow)))

    def _fallen(self, step: int) -> float:
        """Return the share of the start that is left after so many steps."""
        if not self.patient:
            return self.decay**step
        quick, slow = _PATIENT_DECAYS
        first = math.ceil(math.log(_PATIENT_FROM) / math.log(quick))
        return quick ** min(step, first) * slow ** max(0, step - first)


@dataclass
class MovingAverage:
    """Early stopping: an exponential moving average that has stopped improving.

    A decrease within the noise of the average is none: it would come by chance, again and again.
    The noise is estimated from how successive values differ, which a steady fall hardly changes.

    Attributes
    ----------
    weight : float
        Of the newest value; 0 switches the stopping off.
    improvement : float
        Relative decrease of the average that counts as progress.
    patience : int
        Values without progress before stopping.
    """

    weight: float
    improvement: float
    patience: int
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


class Report(NamedTuple):
    """What an outer iteration with an exact gradient tells, linearised at X and ending in P."""

    change: float  # of the coupling, relative
    dual: float  # value of the linear problem
    now: float  # <C(X), P> without the linear term; NaN where it is not known, as of samples
    before: float  # <C(X), P_before>
    own: float  # <C(X), X>


class Descent:
    """Early stopping of an exact solve: an objective that no longer falls, at one epsilon.

    The objective of a plan P is known one iteration later, from the cost at the point X next to P
    where that was linearised: its quadratic part is <C(X), P> - <C(X), X> / 2, up to a term of
    second order in P - X, and its entropy follows from the dual value.

    Parameters
    ----------
    tol : float
        Mean relative decrease per iteration that counts as falling; 0 switches the stopping off.
    constant : float
        What the dual value has and the objective has not.
    """

    def __init__(self, tol: float, constant: float) -> None:
        self._tol = tol
        self._constant = constant
        self._last: Report | None = None
        self._changes: list[float] = []
        self.values: list[float] = []

    def update(self, report: Report, *, met: bool = True) -> bool:
        """Take what an iteration tells; return whether to stop.

        A plan whose changes shrink is about to settle, and not stopped. Nor are plans compared
        whose marginals are not ``met``: their objective may be anything.
        """
        if not met:
            self._last = None
            self.values.clear()
            return False
        last, self._last = self._last, report
        self._changes.append(report.change)
        if last is None or self._tol == 0 or math.isnan(report.now):
            return False
        quadratic = report.before - report.own / 2
        self.values.append(last.dual - last.now + quadratic - self._constant)
        if len(self.values) <= _WINDOW:
            return False
        value = self.values[-1]
        fall = (self.values[-1 - _WINDOW] - value) / _WINDOW
        recent, earlier = self._changes[-_SETTLING_WINDOW:], self._changes[:-_SETTLING_WINDOW]
        settling = min(recent) <= _SETTLING * min(earlier, default=math.inf)
        return fall <= self._tol * abs(value) and not settling


class Status(Enum):
    """How a solve ended. The value is the advice."""

    CONVERGED = "Converged: the plan is a fixed point and both marginals are met."
    STATIONARY = (
        "Converged in the mean: the moving average of the sampled objective stopped improving and "
        "both marginals are met. More `n_anchors` lower the remaining noise."
    )
    FLAT = (
        "Converged in value: the objective no longer falls and both marginals are met, though the "
        "plan still moves among plans of nearly the same objective. Pass `objective_tol=0` to go "
        "on until it settles."
    )
    STOPPED = "Stopped by the callback before convergence."
    OUTER_LIMIT = (
        "Outer iterations ran out before the plan settled: raise `max_iter`, loosen `tol`, or "
        "raise `epsilon`."
    )
    INNER_LIMIT = (
        "The plan settled but the last Sinkhorn solve stopped before the marginals were met: raise "
        "`inner_max_iter`, loosen `inner_tol`, or raise `epsilon`."
    )
    BOTH_LIMITS = (
        "Outer iterations ran out before the plan settled, and the last Sinkhorn solve stopped "
        "before the marginals were met: raise `max_iter` and `inner_max_iter`, or raise `epsilon`."
    )
    IMPLAUSIBLE = (
        "The plan costs more than the product plan a x b, or less than nothing: it is no useful "
        "answer, whatever the iteration says. Raise `epsilon`, or pass another `init`."
    )
    POLISH_LIMIT = (
        "The conditional gradient steps of `polish` ran out before the plan was stationary: it is "
        "valid, and its value may still fall by `log['polish_gap']`. Start closer "
        "(`regularization='proximal'`), or accept it."
    )

    @property
    def advice(self) -> str:
        """What happened and what to do."""
        return self.value

    @property
    def converged(self) -> bool:
        """Whether the answer may be used without reservation."""
        return self in (Status.CONVERGED, Status.STATIONARY, Status.FLAT)
