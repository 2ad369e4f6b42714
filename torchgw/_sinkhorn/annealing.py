"""How epsilon falls, how well linear problems are solved, when loops end; alone or in a batch."""

import math
from dataclasses import dataclass

# Column error at which a linear problem ends while epsilon still falls: the next linearisation
# matters more than this one's marginals. [L294] [L391]
ANNEALING_TOLERANCE = 1e-2
# Column error at the target that linear problems aim at, as a share of the change of the plan that
# ends the loop. [L129] [L391]
INNER_SHARE = 0.1
# Column error at the target up to which a plan counts as meeting both marginals. [L184] [L391]
# [L595]
MET = 3e-3
# The plan itself may miss its marginals by this multiple of the column error that was asked for.
# [L293] [L391]
CONTRADICTION = 10
# Linear problems in a row of a settled plan, each with all its iterations, that leave more than a
# share of the column error: after so many, those that `max_iter` allows would not end it. [L352]
# [L391]
STUCK, STUCK_SHARE = 10, 0.99
# Iterations over which the decrease of the objective is averaged. [L173, L178, L391]
WINDOW = 5
# A plan is settling if its smallest change in so many iterations is at most this share of the
# smallest one before. [L178] [L391]
SETTLING_WINDOW, SETTLING = 10, 0.5
# Shortest step between plans, and how much longer a step may be than the last one. [L135] [L690]
SHORTEST_STEP, LENGTHENING = 1 / 16, 1.2
# By how much rounding and marginal error may raise a value, as shares of its two squared terms.
# [L293] [L391]
VALUE_ROUNDING, VALUE_PER_MARGINAL = 1e-6, 4.0
# Annealing that is the only search for an optimum: quick down to this share of the start, where
# plans are still close to the product plan, and slow from there on. [L177]
_PATIENT_FROM = 0.02
_PATIENT_DECAYS = 0.5, 0.9


@dataclass(frozen=True)
class Annealing:
    """Epsilon falls geometrically from ``start`` and then stays exactly at ``target``."""

    # A patient annealing falls quickly at first and slowly later. With proximal steps epsilon goes
    # on as target / 2, target / 3, ... (docs/algorithm.md, equation 11); or, if it has fallen
    # further to a ``floor``, with those of these values that are below it. It does not depend on
    # the iteration budget, so neither does the answer.

    start: float
    target: float
    decay: float = 0.6
    proximal: bool = False
    patient: bool = False
    # Largest epsilon at which a plan is sharp enough for another stage to go on from it.
    sharp: float = math.inf
    floor: float = math.inf
    shortened: bool = False  # whether steps that turn back on the one before are shortened
    held: bool = False  # whether it began at a plan, whose optimum a solve is to stay in

    @property
    def end(self) -> float:
        """Epsilon at which the annealing ends, and proximal steps begin."""
        return min(self.target, self.floor)

    @property
    def goes_on(self) -> bool:
        """Whether proximal steps go on from a plan that is sharp already."""
        return self.start == self.floor

    def __call__(self, step: int) -> float:
        """Compute epsilon at a step counted from zero."""
        epsilon = max(self.end, self.start * self._fallen(step))
        if not self.proximal or epsilon > self.end:
            return epsilon
        return self.target / (self.target / self.end + step - self._arrival)

    def share(self, step: int) -> float:
        """Compute the weight of a step's plan in the mean that is linearised next."""
        steps = self.proximal and self(step) <= self.end
        return min(1.0, self(step + 1) / self.target) if steps else 1.0

    def final(self, steps: int) -> float:
        """Compute epsilon of the plan that a solve ends with after so many steps."""
        return min(self.target, self(steps))

    def reached(self, steps: int) -> float:
        """Compute the same where no time is left to go on from the epsilon of the last step."""
        latest = self(max(0, steps - 1))
        return latest if latest > self.target else self.final(steps)

    @property
    def _arrival(self) -> int:
        """Steps until the end."""
        share = min(1.0, self.end / self.start)
        if not self.patient:
            return math.ceil(math.log(share) / math.log(self.decay))
        quick, slow = _PATIENT_DECAYS
        first = math.ceil(math.log(max(share, _PATIENT_FROM)) / math.log(quick))
        rest = share / quick**first
        return first + max(0, math.ceil(math.log(rest) / math.log(slow)))

    def _fallen(self, step: int) -> float:
        """Compute the share of the start that is left after so many steps."""
        if not self.patient:
            return self.decay**step
        quick, slow = _PATIENT_DECAYS
        first = math.ceil(math.log(_PATIENT_FROM) / math.log(quick))
        return quick ** min(step, first) * slow ** max(0, step - first)
