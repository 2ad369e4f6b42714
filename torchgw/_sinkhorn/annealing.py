"""The course of a loop: how epsilon falls, when it ends, how its end is extrapolated."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Relative size of the noise on the first plan, or its coupling. The product plan of two spaces
# whose points all look alike is a saddle point that exact arithmetic would never leave. [L292]
# [L391]
START_NOISE = 1e-6
# Column error at which a linear problem ends while epsilon still falls: the next linearisation
# matters more than this one's marginals. Change of a sharp plan that starts have met at, at which
# polishing takes over. [L294] [L391] [L1257]
ANNEALING_TOLERANCE = 1e-2
# Sinkhorn iterations of one linearisation, if the cost is stored or streamed: about as much work as
# the linearisation itself. [L186]
INNER_ITERATIONS = {True: 50, False: 20}
# Column error at the target that linear problems aim at, as a share of the change of the plan that
# ends the loop. [L129] [L391]
INNER_SHARE = 0.1
# Column error at the target up to which a plan counts as meeting both marginals; and change of a
# plan at which polishing takes over from proximal steps: hundreds more would sharpen it, and lead
# to the same vertex. [L141] [L184] [L391] [L595]
MET = 3e-3
# The plan itself may miss its marginals by this multiple of the column error that was asked for.
# [L293] [L391]
CONTRADICTION = 10
# Linear problems in a row of a settled plan, each with all its iterations, that leave more than a
# share of the column error: after so many, those that `max_iter` allows would not end it. [L352]
# [L391]
STUCK, STUCK_SHARE = 10, 0.99
# Iterations over which the decrease of the objective is averaged; after as many that show nothing
# else a run ends, or its linear problems get more time. [L173, L178, L391, L472]
# [L1146, L1253, L1641]
WINDOW = 5
# A plan is settling if its smallest change in so many iterations is at most this share of the
# smallest one before. [L178] [L391]
SETTLING_WINDOW, SETTLING = 10, 0.5
# A step between plans that is short enough for its linear problem to get more iterations, which is
# the shortest one of samples, and how much longer a step may be than the last one. [L135] [L690]
SHORT_STEP, LENGTHENING = 1 / 16, 1.2
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


# Iterates combined at most: enough for a few slow modes, in a tiny least-squares problem. [L8]
_DEPTH = 6
# Ridge of the least-squares problem, relative to its largest diagonal entry. [L282]
_RIDGE = 1e-10
# Growth of the residual after which the past is forgotten. [L282]
_RESTART_GROWTH = 2.0
# Plain steps in a row that must contract first. An iteration that leaves a saddle point grows, and
# extrapolating it would lead back to the saddle. [L8]
_CONTRACTIONS = 3


class Anderson:
    """Chooses the next coupling to linearise at, from the last few and their images."""

    # For a map x -> T(x) with residuals r_k = T(x_k) - x_k the next point is sum_k w_k T(x_k),
    # where the weights sum to one and minimise |sum_k w_k r_k|: H. Walker, P. Ni. Anderson
    # acceleration for fixed-point iterations. SIAM Journal on Numerical Analysis 2011. Near a fixed
    # point this removes the slow modes of plain iteration. A point may leave the transport
    # polytope; that is harmless where it is used, because the cost is linear in the coupling.

    def __init__(self) -> None:
        # the last images and residuals, a row each in no order; made once they are needed
        self._images: Tensor | None = None
        self._residuals: Tensor | None = None
        # products of the residuals, on the host, which solves for a few numbers before a GPU has
        # started
        self._gram = np.zeros((_DEPTH, _DEPTH))
        self._count = 0
        self._contractions = 0
        self._norm = float("inf")

    def next(self, point: Tensor, image: Tensor) -> Tensor:
        """Find the next point, given the last one and its image."""
        residual = (image - point).flatten()
        if self._count == 0:
            previous, self._norm = self._norm, math.sqrt(float(residual @ residual))
            self._contractions = self._contractions + 1 if self._norm < previous else 0
            if self._contractions < _CONTRACTIONS:
                return image
        if self._images is None or self._residuals is None:
            self._images = image.new_empty(_DEPTH, image.numel())
            self._residuals = torch.empty_like(self._images)
        row, used = self._count % _DEPTH, min(self._count + 1, _DEPTH)
        self._images[row], self._residuals[row] = image.flatten(), residual
        # everything that the host needs is read from the device at once
        self._gram[row, :used] = self._gram[:used, row] = (
            self._residuals[:used] @ residual
        ).tolist()
        if self._count:
            previous, self._norm = self._norm, math.sqrt(self._gram[row, row])
            if self._norm > _RESTART_GROWTH * previous:
                self._count = self._contractions = 0
                return image
        self._count += 1
        if self._count == 1:
            return image
        gram = self._gram[:used, :used]
        # if all residuals are zero, any weights will do
        ridge = _RIDGE * gram.diagonal().max() or 1.0
        weights = np.linalg.solve(gram + ridge * np.eye(used), np.ones(used))
        mixed = torch.from_numpy(weights / weights.sum()).to(image) @ self._images[:used]
        return mixed.view_as(image)
