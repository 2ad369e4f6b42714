"""A step of the outer loop for relaxed marginals, shortened where it overshoots."""

from __future__ import annotations

import torch
from torch import Tensor

from torchgw._gradients.contract import Coupling
from torchgw._gradients.relaxed import RelaxedCoupling, RelaxedGradient, normalise
from torchgw._plans.transport import TransportPlan
from torchgw._sinkhorn.anderson import Anderson
from torchgw._sinkhorn.cost import Cost
from torchgw._solve.step import PlainStep, Updated
from torchgw._typing import Marginals, Potentials

__all__ = ["RelaxedStep"]

# Shortest step between couplings, and how much longer a step may be than the last one. [L135]
_SHORTEST = 1 / 16
_LENGTHENING = 1.2


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
