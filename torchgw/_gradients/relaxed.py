"""Relaxed marginals: unbalanced, semi-relaxed and partial problems, by the same outer loop.

The loop iterates on the normalised plan P / |P|, for which neither the cost nor epsilon depends on
the mass (docs/algorithm.md, equations 14 to 17); the mass is found at the end. A relaxed plan sees
the terms of rows and columns alone, which follow its own marginals.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Generator, Tensor

from torchgw._errors import NumericalError
from torchgw._gradients import contract
from torchgw._gradients.contract import Own
from torchgw._plans.contract import Plan
from torchgw._plans.transport import DualPlan, TransportPlan
from torchgw._problem.problem import Problem
from torchgw._sinkhorn.problem import keeps_digits
from torchgw._typing import Marginals, Potentials

Kind = TypeVar("Kind", bound=DualPlan)


class RelaxedCoupling(NamedTuple):
    """The coupling of a normalised plan, with the marginals that its own terms need."""

    base: contract.Coupling
    masses: Marginals  # row and column sums, of sum one, float64
    log_total: Tensor  # logarithm of the mass of the plan before, ()

    @property
    def empty(self) -> bool:
        return False

    def mean(self, latest: RelaxedCoupling, share: float, generator: Generator) -> RelaxedCoupling:
        masses = Marginals(
            *(torch.lerp(x, y, share) for x, y in zip(self.masses, latest.masses, strict=True))
        )
        mean = self.base.mean(latest.base, share, generator)
        return RelaxedCoupling(mean, masses, latest.log_total)

    def change(self, previous: RelaxedCoupling) -> Tensor:
        """Compute the relative change: of a coupling of distances that vanish, the marginals'."""
        changes = [
            (now - last).norm() / now.norm()
            for now, last in zip(self.masses, previous.masses, strict=True)
        ]
        return torch.stack([self.base.change(previous.base).double(), *changes]).amax()

    def perturbed(self) -> RelaxedCoupling:
        """Add noise to the coupling alone."""
        return self._replace(base=self.base.perturbed())

    def minus(self, point: RelaxedCoupling) -> Tensor:
        """Subtract another coupling, without its marginals; of samples, the marginals alone."""
        base = self.base.minus(point.base)
        if len(base) > 0:
            return base
        return torch.cat([now - last for now, last in zip(self.masses, point.masses, strict=True)])

    def vector(self) -> Tensor:
        numbers = self.base.vector()
        return torch.cat([numbers, *(mass.to(numbers.dtype) for mass in self.masses)])

    def with_vector(self, vector: Tensor) -> RelaxedCoupling:
        n, m = (len(mass) for mass in self.masses)
        base, p, q = vector.split([len(vector) - n - m, n, m])
        masses = Marginals(p.double(), q.double())
        return self._replace(base=self.base.with_vector(base), masses=masses)


class RelaxedGradient(contract.Gradient):
    """A gradient at a normalised plan, whose row and column terms are those of the plan itself."""

    # Relaxed plans see these terms, so that the potentials lack none: `row` and `column` are zero
    # here, and `LinearCost.seen` puts those of the plan into the cost.

    # above, partial plans pass saddle points, and steps in float32 are noise
    linear_below = 3e-4
    momentum = False
    # full steps go down on nearly all costs with strict marginals; relaxed plans can step back and
    # forth between two, each of which follows from the other
    shortens = True
    # a relaxed plan may be worth more than a x b: its penalty is less
    product = None

    def __init__(self, base: contract.Gradient, problem: Problem) -> None:
        self._base, self._problem = base, problem
        self.name, self.exact, self.n_anchors = base.name, base.exact, base.n_anchors
        self.dtype, self.marginals = base.dtype, base.marginals
        self.row, self.column = torch.zeros_like(base.row), torch.zeros_like(base.column)

    def start(self) -> RelaxedCoupling:
        zero = torch.zeros_like(self.marginals.a[0])
        return RelaxedCoupling(self._base.start(), self.marginals, zero)

    def linearise(self, coupling: RelaxedCoupling) -> contract.LinearCost:
        """Compute the cost at a normalised plan, with the terms of its rows and columns."""
        row, column = contract.own_terms(self._problem, coupling.masses)
        base = self._base.centred_by(coupling.masses)
        return contract.LinearCost(base.linearise(coupling.base).cost, row, column)

    def update(
        self, plan: Plan, previous: RelaxedCoupling | None, generator: Generator
    ) -> RelaxedCoupling:
        known = None if previous is None else previous.base
        if not isinstance(plan, DualPlan):
            # a given start, of mass one
            a, b = (torch.ones_like(weight)[:, None] for weight in self.marginals)
            masses = Marginals((plan @ b)[:, 0], (plan.T @ a)[:, 0])
            zero = torch.zeros_like(self.marginals.a[0])
            return RelaxedCoupling(self._base.update(plan, known, generator), masses, zero)
        normalised, masses, log_total = normalise(plan)
        if not self.exact and not math.isfinite(float(log_total + 0 * masses.b.sum())):
            # samples could not be drawn; exact gradients fail later, when their value is computed
            raise NumericalError(
                f"The plan of a relaxed problem has the mass e^{float(log_total):.3g}, or columns "
                "of more than numbers can hold: its exponents are too large for the precision. "
                "Raise `epsilon`, or pass `precision='float64'`."
            )
        return RelaxedCoupling(self._base.update(normalised, known, generator), masses, log_total)

    def dual_value(
        self, potentials: Potentials, coupling: RelaxedCoupling, epsilon: float
    ) -> Tensor:
        """Compute <C, P> + epsilon KL(P | a x b) of the normalised plan P."""
        (p, q), (f, g) = coupling.masses, potentials
        return p @ f + q @ g - epsilon * coupling.log_total

    def evaluate(
        self, plan: TransportPlan, masses: Marginals, generator: Generator, coupling: Own = None
    ) -> contract.QuadraticValue:
        return self._base.evaluate(plan, masses, generator)

    def squares(self) -> float:
        return self._base.squares()

    def noise(self, coupling: RelaxedCoupling) -> contract.CostNoise | None:
        return self._base.noise(coupling.base)

    def why_not_captured(self) -> str:
        return "relaxed steps look at their plans."

    def remember(self, coupling: RelaxedCoupling, masses: Marginals) -> contract.Linearised:
        """Keep what the base gradient keeps, and the own terms of the plan's marginals."""
        known = self._base.remember(coupling.base, coupling.masses)
        return known._replace(own=Marginals(*contract.own_terms(self._problem, coupling.masses)))


def normalise(plan: Kind) -> tuple[Kind, Marginals, Tensor]:
    """Compute P / |P| whose rows have their masses as weights, its marginals and log |P|."""
    plan, moved = _in_range(plan)
    p, q = plan.marginals()
    total = p.sum()
    p, q = p / total, q / q.sum()
    a, b = plan.weights
    shift = torch.where(p > 0, a / (p * total).clamp_min(torch.finfo(p.dtype).tiny), 1.0).log()
    potentials = Potentials(plan.potentials.f + plan.epsilon * shift, plan.potentials.g)
    scaled: Any = plan.replaced(potentials, Marginals(p, b))
    return scaled, Marginals(p, q), total.log() + moved


def _in_range(plan: Kind) -> tuple[Kind, float]:
    """Scale a plan whose mass is no number of its dtype; return it and log of what it lost."""
    # The mass of a plan that weak penalties hold is about exp(-cost / epsilon): it is found at the
    # end, and until then only its logarithm has to be a number.
    mass = float(plan.marginals()[0].sum())
    if not isinstance(plan, TransportPlan) or keeps_digits(mass, plan.dtype):
        return plan, 0.0
    f, g = plan.potentials
    rows = plan.weights.log_a + (f - plan.prepared.softmin(g, axis=1)) / plan.epsilon
    moved = float(rows.logsumexp(0))
    scaled: Any = plan.replaced(Potentials(f - plan.epsilon * moved, g), plan.weights, plan.masses)
    return scaled, moved
