"""When epsilon falls and when the loop stops: annealing, moving average, status."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import isfinite

__all__ = ["Annealing", "MovingAverage", "Status"]


@dataclass(frozen=True)
class Annealing:
    """Epsilon falls geometrically from ``start`` and then stays exactly at ``target``.

    The schedule does not know the iteration budget, so the answer does not depend on it.
    """

    start: float
    target: float
    decay: float = 0.6

    def __call__(self, iteration: int) -> float:
        """Return epsilon at an iteration counted from zero."""
        return max(self.target, self.start * self.decay**iteration)


@dataclass
class MovingAverage:
    """Early stopping: an exponential moving average that has stopped improving.

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

    def update(self, value: float) -> bool:
        """Take a value; return whether to stop."""
        if self.weight == 0:
            return False
        first = not isfinite(self._average)
        self._average = value if first else self._average + self.weight * (value - self._average)
        if self._average < self._best - self.improvement * abs(self._best) or first:
            self._best = self._average
            self._stalled = 0
        else:
            self._stalled += 1
        return self._stalled >= self.patience


class Status(Enum):
    """How a solve ended. The value is the advice."""

    CONVERGED = "Converged: the plan is a fixed point and both marginals are met."
    STATIONARY = (
        "Converged in the mean: the moving average of the sampled objective stopped improving and "
        "both marginals are met. More `n_anchors` lower the remaining noise."
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

    @property
    def advice(self) -> str:
        """What happened and what to do."""
        return self.value

    @property
    def converged(self) -> bool:
        """Whether the answer may be used without reservation."""
        return self in (Status.CONVERGED, Status.STATIONARY)
