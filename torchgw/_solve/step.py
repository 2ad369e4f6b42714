"""The two ends of an outer iteration, as calls or as CUDA graphs.

Between the cost at one coupling and the coupling of the next plan lies the Sinkhorn loop, which
looks at its error to stop. What comes before and after it looks at nothing, and on a small problem
consists of some 40 launches, each of which takes longer to make than to run.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._gradients.contract import Coupling, Gradient
from torchgw._plans.transport import TransportPlan
from torchgw._sinkhorn.contract import Backend, PreparedProblem
from torchgw._sinkhorn.problem import Cost
from torchgw._tensors.cuda_graphs import Captured, GraphMemory, borrow_memory, clone
from torchgw._tensors.operations import inverse
from torchgw._typing import Marginals, Potentials

logger = logging.getLogger(__name__)

# Bytes of an (n, m) matrix up to which the ends of an iteration are captured. Beyond, they take as
# long as their launches, and graphs keep a few such matrices of their own. [L75]
_CAPTURED_BYTES = 2**25
# Bytes of tables up to which graphs are kept from solve to solve, with a copy of the tables. [L85]
_KEPT_BYTES = 2**25


class Updated(NamedTuple):
    """The coupling of a new plan, and what the loop is told about it."""

    coupling: Coupling
    told: Tensor  # (5,) float64, what :class:`torchgw._solve.stopping.Verdict` holds


@dataclass(eq=False)
class Step:
    """Linearise at a coupling; take the coupling of the plan that the linear problem led to."""

    gradient: Gradient
    marginals: Marginals
    backend: Backend
    generator: torch.Generator
    store: bool  # build the (n, m) cost
    proximal: bool = False  # compare plans with the one before, not with the point they came from

    overwrites = False

    def linearise(self, coupling: Coupling) -> Cost:
        """Compute the cost of the linear problem at a coupling."""
        cost = self.gradient.linearise(coupling).seen(coupling.masses)
        return cost.dense() if self.store else cost

    def update(
        self, prepared: PreparedProblem, potentials: Potentials, point: Coupling, previous: Coupling
    ) -> Updated:
        """Take the coupling of the plan of the cost at ``point``, after that of ``previous``."""
        plan = TransportPlan.of(prepared, potentials)
        return self._read_off(plan.cost, plan, potentials, point, previous)

    def update_in_units(
        self,
        cost: Cost,
        epsilon: Tensor,
        potentials: Potentials,
        point: Coupling,
        previous: Coupling,
    ) -> Updated:
        """Do the same where epsilon, (), is on the device: the plan is in units of epsilon."""
        scaled = Potentials(*(part / epsilon for part in potentials))
        plan = TransportPlan(
            cost.scaled(inverse(epsilon)), scaled, self.marginals, 1.0, self.backend
        )
        return self._read_off(cost, plan, potentials, point, previous)

    def _read_off(
        self,
        cost: Cost,
        plan: TransportPlan,
        potentials: Potentials,
        point: Coupling,
        previous: Coupling,
    ) -> Updated:
        """Take the coupling of a plan, and compute what to tell of it."""
        gradient = self.gradient
        coupling = gradient.update(plan, previous, self.generator)
        change = coupling.change(previous if self.proximal else point)
        value = gradient.dual_value(potentials, coupling, plan.epsilon)
        if gradient.exact:
            now, own = (gradient.pairing(cost, point, other) for other in (coupling, point))
            before = own if previous is point else gradient.pairing(cost, point, previous)
            pairings = [now, before, own]
        else:
            pairings = 3 * [torch.full_like(change, torch.nan)]
        return Updated(coupling, torch.stack([change, value, *pairings]))


class _Ends:
    """Both ends of an iteration, recorded as graphs in their second call if there is memory."""

    def __init__(self, step: Step, memory: GraphMemory | None) -> None:
        self.step = step
        self.epsilon = torch.ones((), dtype=torch.float64, device=step.marginals.a.device)
        self.linearise: Callable[..., Cost] = step.linearise
        self.update: Callable[..., Updated] = step.update_in_units
        if memory is not None:
            make = partial(Captured, memory=memory, generator=step.generator)
            self.linearise = make(step.linearise)
            # the cost lies in memory where the other graph leaves it
            self.update = make(step.update_in_units, in_place=2)


class CapturedStep:
    """A step as two graphs, recorded in the second iteration and replayed from then on."""

    # Where the gradient has few tables, the graphs work on tables of their own, into which a solve
    # copies its gradient's, and are kept from solve to solve.
    # The step is on a CUDA device and reads nothing back. Without `replay` the same calls are made
    # without graphs, which must not change a bit.

    overwrites = True

    def __init__(self, step: Step, *, replay: bool = True) -> None:
        # memory that is lent to this solve, until this object is gone
        memory = borrow_memory(self, step.marginals.a.device) if replay else None
        size = sum(table.nbytes for table in step.gradient.tables())
        if memory is not None and 0 < size <= _KEPT_BYTES:
            self._ends = _recall(step, memory)
        else:
            self._ends = _Ends(step, memory)

    def linearise(self, coupling: Coupling) -> Cost:
        """Compute the cost at a coupling; the next call overwrites it."""
        ends = self._ends
        # the product plan of a sampled gradient occurs once, and its cost has another shape
        return ends.step.linearise(coupling) if coupling.empty else ends.linearise(coupling)

    def update(
        self, prepared: PreparedProblem, potentials: Potentials, point: Coupling, previous: Coupling
    ) -> Updated:
        """Take the coupling of a plan."""
        ends, cost = self._ends, prepared.problem.cost
        ends.epsilon.fill_(prepared.problem.epsilon)
        update = ends.step.update_in_units if previous.empty else ends.update
        coupling, told = update(cost, ends.epsilon, potentials, point, previous)
        return Updated(clone(coupling), told)


def _recall(step: Step, memory: GraphMemory) -> _Ends:
    """Find graphs kept from a solve like this one, or make them, and give them its tables."""
    gradient = step.gradient
    kind = "step", type(step.backend), step.store, step.proximal, gradient.kind()
    known = memory.recall(kind)
    if not known:
        own = gradient.copy()
        # an exact gradient draws nothing
        generator = torch.Generator(step.marginals.a.device)
        alike = replace(step, gradient=own, marginals=own.marginals, generator=generator)
        known["ends"] = _Ends(alike, memory)
    ends: _Ends = known["ends"]
    for ours, given in zip(ends.step.gradient.tables(), gradient.tables(), strict=True):
        ours.copy_(given)
    return ends


def choose_step(step: Step) -> Step | CapturedStep:
    """Turn a step into graphs where they pay and can be recorded."""
    reason = _why_not_captured(step)
    if reason is not None:
        logger.debug("outer iterations are not captured: %s", reason)
        return step
    return CapturedStep(step)


def _why_not_captured(step: Step) -> str | None:
    a, b = step.marginals
    if a.device.type != "cuda":
        return "CUDA graphs need a CUDA device."
    if getattr(step.backend, "ranks", None) is not None:
        return "exchanges between ranks are not recorded."
    if step.backend.name != "triton":
        return f"the sweeps of the backend {step.backend.name!r} take more launches than the rest."
    if len(a) * len(b) * step.gradient.dtype.itemsize > _CAPTURED_BYTES:
        return f"launches are a small part of the time at {len(a)} x {len(b)}."
    return step.gradient.why_not_captured()
