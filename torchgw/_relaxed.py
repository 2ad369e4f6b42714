"""Relaxed marginals: unbalanced, semi-relaxed and partial problems, by the same outer loop.

The loop iterates on the normalised plan P / |P|, for which neither the cost nor epsilon depends on
the mass (docs/algorithm.md, equations 14 to 17); the mass is found at the end. A relaxed plan sees
the terms of rows and columns alone, which follow its own marginals.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._acceleration import Anderson
from torchgw._anchors import PairPlan
from torchgw._cost import Cost, DenseCost
from torchgw._gradient import Coupling, Gradient, QuadraticValue
from torchgw._moments import mean_columns, own_terms
from torchgw._plan import TransportPlan
from torchgw._relaxation import Relaxation
from torchgw._sampled_gradient import SampledGradient
from torchgw._step import PlainStep, Updated
from torchgw._stored_plan import StoredPlan
from torchgw._typing import Marginals, Potentials

__all__ = [
    "RelaxedCoupling",
    "RelaxedGradient",
    "RelaxedStep",
    "Terms",
    "best_mass",
    "normalise",
    "quadratic_divergence",
    "relative_entropy",
]


# Shortest step between couplings, and how much longer a step may be than the last one.
_SHORTEST = 1 / 16
_LENGTHENING = 1.2


class RelaxedCoupling(NamedTuple):
    """Of a normalised plan, with what its own terms need."""

    base: Coupling
    masses: Marginals  # row and column sums, of sum one, float64


class RelaxedGradient:
    """A gradient at a normalised plan, with the terms of its own rows and columns in the cost.

    The cost has mean zero over the product of the plan's marginals: a constant changes the mass of
    the linear problem's plan only, and a large one would under- or overflow it.
    """

    def __init__(self, base: Gradient) -> None:
        self.base = base
        self.name = base.name
        self.exact = base.exact
        self.problem = base.problem
        self.row, self.column = torch.zeros_like(base.row), torch.zeros_like(base.column)
        self.product = base.product

    def start(self) -> RelaxedCoupling:
        """Return the coupling of a x b."""
        return RelaxedCoupling(self.base.start(), self.problem.marginals)

    def linearise(self, coupling: RelaxedCoupling) -> Cost:
        """Return the whole cost at a normalised plan, less its mean."""
        problem, base = self.problem, self.base
        row, column = own_terms(problem, coupling.masses)
        if isinstance(base, SampledGradient):
            # what its anchors are compared with
            base = base.with_means(mean_columns(problem, coupling.masses))
        p, q = (mass.to(problem.dtype) for mass in coupling.masses)
        row, column = row - p @ row, column - q @ column
        cost = base.linearise(coupling.base)
        if isinstance(cost, DenseCost):
            mean = p @ (cost.matrix @ q)
            return DenseCost(cost.matrix + (row - mean)[:, None] + column)
        mean = p @ cost.row + q @ cost.column - (p @ cost.left) @ (q @ cost.right)
        return cost._replace(row=cost.row + row - mean, column=cost.column + column)

    def update(
        self,
        plan: TransportPlan | StoredPlan | PairPlan,
        coupling: RelaxedCoupling | None,
        generator: torch.Generator,
    ) -> RelaxedCoupling:
        """Return the coupling of a plan of any mass."""
        previous = None if coupling is None else coupling.base
        if not isinstance(plan, TransportPlan):
            # a given start, of mass one
            a, b = (torch.ones_like(weight)[:, None] for weight in self.problem.marginals)
            masses = Marginals((plan @ b)[:, 0], (plan.T @ a)[:, 0])
            return RelaxedCoupling(self.base.update(plan, previous, generator), masses)
        normalised, masses, _ = normalise(plan)
        return RelaxedCoupling(self.base.update(normalised, previous, generator), masses)

    def mean(
        self,
        coupling: RelaxedCoupling,
        latest: RelaxedCoupling,
        share: float,
        generator: torch.Generator,
    ) -> RelaxedCoupling:
        """Return the mean of two couplings."""
        masses = Marginals(
            *(torch.lerp(x, y, share) for x, y in zip(coupling.masses, latest.masses, strict=True))
        )
        return RelaxedCoupling(self.base.mean(coupling.base, latest.base, share, generator), masses)

    def change(self, coupling: RelaxedCoupling, previous: RelaxedCoupling) -> Tensor:
        """Return the relative change of the base coupling."""
        return self.base.change(coupling.base, previous.base)

    def pairing(self, cost: Cost, point: RelaxedCoupling, coupling: RelaxedCoupling) -> Tensor:
        """Return NaN: the terms of rows and columns belong to the plan here."""
        return self.problem.marginals.a.new_full((), torch.nan, dtype=torch.float64)

    def evaluate(
        self, plan: TransportPlan, masses: Marginals, generator: torch.Generator
    ) -> QuadraticValue:
        """Return <L(P), P> of a normalised plan."""
        return self.base.evaluate(plan, masses, generator)


class RelaxedStep(PlainStep):
    """The two ends of an outer iteration, as calls, with a :class:`RelaxedGradient`.

    With strict marginals full steps go down on nearly all costs. Relaxed plans can step back and
    forth between two, each of which follows from the other; so a step that turns back is shortened.
    """

    gradient: RelaxedGradient
    # above, partial plans pass saddle points, and steps in float32 are noise
    linear_below = 3e-4
    _share = 1.0
    _direction: Tensor | None = None

    def read_off(
        self,
        cost: Cost,
        plan: TransportPlan,
        potentials: Potentials,
        point: RelaxedCoupling,
        previous: RelaxedCoupling,
    ) -> Updated:
        """Return the coupling of a plan, its change, and <C, P> + epsilon KL(P | a x b)."""
        normalised, masses, total = normalise(plan)
        base = self.gradient.base
        coupling = RelaxedCoupling(base.update(normalised, previous.base, self.generator), masses)
        change = self.gradient.change(coupling, point)
        f, g = potentials
        value = masses.a @ f + masses.b @ g - plan.epsilon * total.log()
        share = self._next_share(coupling.base, point.base)
        if share < 1:
            coupling = self.gradient.mean(point, coupling, share, self.generator)
        unknown = torch.full_like(change, torch.nan)
        return Updated(coupling, torch.stack([change, value, unknown, unknown, unknown]))

    def extrapolate(
        self, acceleration: Anderson, point: RelaxedCoupling, image: RelaxedCoupling
    ) -> RelaxedCoupling:
        """Return the next point and its marginals, extrapolated while steps are not shortened."""
        if self._share < 1 or not self.gradient.exact:
            return image
        whole = acceleration.next(*(_joined(coupling) for coupling in (point, image)))
        base, p, q = whole.split([part.numel() for part in (image.base, *image.masses)])
        return RelaxedCoupling(base.view_as(image.base), Marginals(p.double(), q.double()))

    def _next_share(self, base: Coupling, previous: Coupling) -> float:
        """Return the length of this step: half the last one's if it turns back."""
        if not self.gradient.exact:
            return 1.0
        direction = base - previous
        if self._direction is not None:
            back = float((direction * self._direction).sum()) < 0
            longer = min(1.0, _LENGTHENING * self._share)
            self._share = max(self._share / 2, _SHORTEST) if back else longer
        self._direction = direction
        return self._share


def _joined(coupling: RelaxedCoupling) -> Tensor:
    """Return the numbers of an exact gradient's coupling as one vector."""
    dtype = coupling.base.dtype
    return torch.cat([part.flatten().to(dtype) for part in (coupling.base, *coupling.masses)])


def normalise(plan: TransportPlan) -> tuple[TransportPlan, Marginals, Tensor]:
    """Return P / |P|, its marginals and |P|.

    The weights of the rows become their masses, so that rows are drawn by what they carry.
    """
    p, q = plan.marginals()
    total = p.sum()
    p, q = p / total, q / q.sum()
    a, b = plan.weights
    shift = torch.where(p > 0, a / (p * total).clamp_min(torch.finfo(p.dtype).tiny), 1.0).log()
    potentials = Potentials(plan.potentials.f + plan.epsilon * shift, plan.potentials.g)
    return plan.replaced(potentials, Marginals(p, b)), Marginals(p, q), total


class Terms(NamedTuple):
    """What the objective of a normalised plan consists of."""

    value: float  # alpha <L(P), P> (+ (1 - alpha) <M, P>)
    source: float  # sum p log(p / a)
    target: float  # sum q log(q / b)
    whole: float  # sum P log(P / (a x b))


def best_mass(terms: Terms, relaxation: Relaxation, epsilon: float) -> float:
    """Return the mass of least objective along multiples of a plan, exp(-B / 2R) (equation 16)."""
    if relaxation.fixed_mass is not None:
        return relaxation.fixed_mass
    source, target = relaxation.rho
    slope = terms.value + 2 * source * terms.source + 2 * target * terms.target
    slope += epsilon * terms.whole
    return math.exp(-slope / (2 * (source + target + epsilon / 2)))


def relative_entropy(masses: Tensor, weights: Tensor) -> float:
    """Return sum p log(p / a), where nothing lies outside the weights."""
    ratio = torch.where(
        masses > 0, masses / weights.clamp_min(torch.finfo(weights.dtype).tiny), 1.0
    )
    return float(torch.special.xlogy(masses, ratio).sum())


def quadratic_divergence(entropy: float, mass: float) -> float:
    """Return KL(mu x mu | a x a) for mu = mass * p, where a has sum one (equation 14)."""
    return 2 * mass**2 * (entropy + math.log(mass)) - mass**2 + 1
