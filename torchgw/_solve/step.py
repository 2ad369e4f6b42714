"""The two ends of an outer iteration, as calls or as CUDA graphs.

Between the cost at one coupling and the coupling of the next plan lies the Sinkhorn loop, which
looks at its error to stop. What comes before and after it looks at nothing, and on a small problem
consists of some 40 launches, each of which takes longer to make than to run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchgw._gradients.contract import Coupling, Gradient
from torchgw._gradients.dense import DenseGradient
from torchgw._plans.transport import TransportPlan
from torchgw._problem.problem import Problem
from torchgw._sinkhorn.contract import Backend, PreparedProblem
from torchgw._sinkhorn.cost import Cost
from torchgw._tensors.cuda_graphs import Captured, GraphMemory, borrow_memory, clone
from torchgw._typing import Marginals, Potentials

__all__ = ["CapturedStep", "KeptStep", "PlainStep", "Step", "Updated", "choose_step", "dual_value"]

logger = logging.getLogger(__name__)

# Bytes of an (n, m) matrix up to which the ends of an iteration are captured. Beyond, they take as
# long as their launches, and graphs keep a few such matrices of their own. [L75]
_CAPTURED_BYTES = 2**25
# Bytes of tables up to which graphs are kept from solve to solve, with a copy of the tables. [L85]
_KEPT_BYTES = 2**25


class Updated(NamedTuple):
    """What an outer iteration leads to."""

    coupling: Coupling
    report: Tensor  # (5,) float64, what :class:`torchgw._solve.stopping.Report` holds


class Step(Protocol):
    """Linearise at a coupling; take the coupling of the plan that the linear problem led to."""

    def linearise(self, coupling: Coupling) -> Cost:
        """Return the cost at a coupling, which the next call may overwrite."""

    def update(
        self, prepared: PreparedProblem, potentials: Potentials, point: Coupling, previous: Coupling
    ) -> Updated:
        """Return the coupling of a plan of the cost at ``point``, and what to make of it.

        ``previous`` is the coupling of the plan before. A sampled gradient keeps some of its
        anchors.
        """


@dataclass(eq=False)
class PlainStep:
    """A step as calls, on any device."""

    gradient: Gradient
    marginals: Marginals
    backend: Backend
    generator: torch.Generator
    store: bool  # build the (n, m) cost
    proximal: bool = False  # compare plans with the one before, not with the point they came from

    def linearise(self, coupling: Coupling) -> Cost:
        """Return the cost at a coupling."""
        cost = self.gradient.linearise(coupling)
        return cost.dense() if self.store else cost

    def update(
        self, prepared: PreparedProblem, potentials: Potentials, point: Coupling, previous: Coupling
    ) -> Updated:
        """Return the coupling of a plan."""
        plan = TransportPlan.of(prepared, potentials)
        return self.read_off(plan.cost, plan, potentials, point, previous)

    def update_in_units(
        self,
        cost: Cost,
        epsilon: Tensor,
        potentials: Potentials,
        point: Coupling,
        previous: Coupling,
    ) -> Updated:
        """Return the same where epsilon, (), is on the device: its plan in units of epsilon."""
        scaled = Potentials(*(part / epsilon for part in potentials))
        plan = TransportPlan(cost.scaled(1 / epsilon), scaled, self.marginals, 1.0, self.backend)
        return self.read_off(cost, plan, potentials, point, previous)

    def read_off(
        self,
        cost: Cost,
        plan: TransportPlan,
        potentials: Potentials,
        point: Coupling,
        previous: Coupling,
    ) -> Updated:
        """Return the coupling of a plan, and what to report of it."""
        gradient = self.gradient
        coupling = gradient.update(plan, previous, self.generator)
        change = gradient.change(coupling, previous if self.proximal else point)
        value = dual_value(potentials, self.marginals, gradient)
        if gradient.exact:
            pairings = [
                gradient.pairing(cost, point, other) for other in (coupling, previous, point)
            ]
        else:
            pairings = 3 * [torch.full_like(change, torch.nan)]
        return Updated(coupling, torch.stack([change, value, *pairings]))


class CapturedStep:
    """A step as two graphs, recorded in the second iteration and replayed from then on.

    Parameters
    ----------
    step : PlainStep
        On a CUDA device; what it calls must read nothing back.
    memory : GraphMemory, optional
        That of its own unless given.
    replay : bool, optional
        ``False`` makes the same calls without graphs, which must not change a bit.
    """

    def __init__(
        self, step: PlainStep, memory: GraphMemory | None = None, *, replay: bool = True
    ) -> None:
        device = step.marginals.a.device
        self._step = step
        self._epsilon = torch.ones((), dtype=torch.float64, device=device)
        self._linearise: Callable[..., Cost] = step.linearise
        self._update: Callable[..., Updated] = step.update_in_units
        if replay:
            memory = memory or borrow_memory(self, device)
            make = partial(Captured, memory=memory, generator=step.generator)
            self._linearise = make(step.linearise)
            # the cost lies where the other graph leaves it
            self._update = make(step.update_in_units, in_place=2)

    def linearise(self, coupling: Coupling) -> Cost:
        """Return the cost at a coupling; the next call overwrites it."""
        # the product plan of a sampled gradient comes once, and makes a cost of another shape
        return self._step.linearise(None) if coupling is None else self._linearise(coupling)

    def update(
        self, prepared: PreparedProblem, potentials: Potentials, point: Coupling, previous: Coupling
    ) -> Updated:
        """Return the coupling of a plan."""
        cost = prepared.problem.cost
        self._epsilon.fill_(prepared.problem.epsilon)
        update = self._step.update_in_units if previous is None else self._update
        coupling, report = update(cost, self._epsilon, potentials, point, previous)
        return Updated(clone(coupling), report)


class KeptStep:
    """A step as two graphs on tables of their own, kept from solve to solve.

    Parameters
    ----------
    step : PlainStep
        With a dense gradient, whose tables are copied.
    """

    def __init__(self, step: PlainStep) -> None:
        gradient = step.gradient
        assert isinstance(gradient, DenseGradient)
        device = step.marginals.a.device
        memory = borrow_memory(self, device)
        alpha, linear = gradient.problem.alpha, type(gradient.problem.linear)
        shapes = tuple(part.shape for part in gradient.tables())
        how = type(step.backend), step.store, step.proximal, gradient.problem.dtype
        kind = ("step", *how, alpha, linear, shapes)
        known = memory.recall(kind)
        if not known:
            own = gradient.copy()
            # a dense gradient draws nothing
            generator = torch.Generator(device)
            marginals = own.problem.marginals
            plain = replace(step, gradient=own, marginals=marginals, generator=generator)
            known.update(gradient=own, step=CapturedStep(plain, memory))
        for ours, given in zip(known["gradient"].tables(), gradient.tables(), strict=True):
            ours.copy_(given)
        # this lends them for one solve
        kept: CapturedStep = known["step"]
        self.linearise, self.update = kept.linearise, kept.update


def choose_step(step: PlainStep, shape: tuple[int, int]) -> Step:
    """Return a step as graphs where they pay and can be, and otherwise as it is."""
    reason = _why_not_captured(step, shape)
    if reason is not None:
        logger.debug("outer iterations are not captured: %s", reason)
        return step
    gradient = step.gradient
    if type(gradient) is DenseGradient and _size(gradient) <= _KEPT_BYTES:
        return KeptStep(step)
    return CapturedStep(step)


def _size(gradient: DenseGradient) -> int:
    return sum(part.nbytes for part in gradient.tables())


def _why_not_captured(step: PlainStep, shape: tuple[int, int]) -> str | None:
    problem: Problem = step.gradient.problem
    if problem.source.device.type != "cuda":
        return "CUDA graphs need a CUDA device."
    if step.backend.name != "triton":
        return f"the sweeps of the backend {step.backend.name!r} take more launches than the rest."
    if shape[0] * shape[1] * problem.dtype.itemsize > _CAPTURED_BYTES:
        return f"launches are a small part of the time at {shape[0]} x {shape[1]}."
    if problem.loss.cross is None:
        return f"loss={problem.loss.name!r} takes one launch after the other for each point."
    stored = step.gradient.name == "dense"
    if not (stored or (problem.source.capturable and problem.target.capturable)):
        return "a provider computes its distances on the host, or looks at them."
    return None


def dual_value(potentials: Potentials, marginals: Marginals, gradient: Gradient) -> Tensor:
    """Return <a, f> + <b, g>, the entropic dual value once the rows of the plan are exact.

    The terms that the linearised cost leaves out are part of f and g here.
    """
    return marginals.a @ (potentials.f + gradient.row) + marginals.b @ (
        potentials.g + gradient.column
    )
