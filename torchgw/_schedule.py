"""When epsilon falls and when the loop stops: annealing, moving average, status."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

__all__ = ["Annealing", "MovingAverage", "Status"]


@dataclass(frozen=True)
class Annealing:
    """Epsilon falls geometrically from ``start`` and then stays exactly at ``target``.

    With ``proximal`` it goes on as target / 2, target / 3, ... (docs/algorithm.md, equation 11).
    It begins at iteration ``first``, and does not know the iteration budget, so the answer does not
    depend on it.
    """

    start: float
    target: float
    decay: float = 0.6
    proximal: bool = False
    first: int = 0

    def __call__(self, iteration: int) -> float:
        """Return epsilon at an iteration counted from zero."""
        step = max(0, iteration - self.first)
        epsilon = max(self.target, self.start * self.decay**step)
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
        steps = math.ceil(math.log(self.target / self.start) / math.log(self.decay))
        return max(0, steps)


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
        first = not math.isfinite(self._average)
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
        return self in (Status.CONVERGED, Status.STATIONARY)
