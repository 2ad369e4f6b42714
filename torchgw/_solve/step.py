"""One outer iteration: its linear problem, and the coupling of the plan that this leads to.

Between the cost at one coupling and the coupling of the next plan lies the Sinkhorn loop, which
looks at its error to stop. What comes before and after it looks at nothing, and on a small problem
consists of some 40 launches, each of which takes longer to make than to run: CUDA graphs make them.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._errors import NumericalError
from torchgw._gradients.contract import Coupling, Gradient
from torchgw._plans.transport import TransportPlan
from torchgw._problem.limits import limits_of
from torchgw._problem.problem import MarginalRule
from torchgw._sinkhorn.annealing import (
    ANNEALING_TOLERANCE,
    CONTRADICTION,
    INNER_ITERATIONS,
    INNER_SHARE,
    MET,
    STUCK,
    STUCK_SHARE,
    WINDOW,
    Annealing,
)
from torchgw._sinkhorn.blocks import BlockProblem
from torchgw._sinkhorn.contract import Backend, PreparedProblem
from torchgw._sinkhorn.loop import SinkhornResult, sinkhorn
from torchgw._sinkhorn.partial import partial_sinkhorn
from torchgw._sinkhorn.problem import Cost, DenseCost, LinearProblem
from torchgw._solve.state import RESOLVED, Setting
from torchgw._tensors.cuda_graphs import CAPTURED_BYTES, Captured, GraphMemory, borrow_memory
from torchgw._tensors.operations import clone, inverse
from torchgw._typing import Marginals, Potentials

# Column error that linear problems aim at after a patient annealing, whose plans keep moving for
# long: as a share of their last change. [L180]
_PATIENT_SHARE = 0.01
# Steps are slow, inner ones and outer ones, that leave more than this share of the error, or of the
# change, before. [L176, L513]
SLOW = 0.5
# A marginal is a sum of many entries: this share of the rounding of single exponents is left in it.
# [L294]
_ROUNDING_SHARE = 0.5
# Column error to reach by default, if the cost is stored or settled in float64 anyway. Other costs
# are so large that a few iterations in float64 have to do. [L294]
_INNER_TOLERANCE = {True: 5e-7, False: 1e-5}
# Iterations between looks at the error of a group of points while epsilon falls. [L1605]
_BLOCK_LOOK = 2
# Logarithms that a step between two points may add to the difference of their potentials, over
# epsilon; and exponent, with room, from which on float64 is zero. [L1374]
_STEP, _UNDERFLOW = 50.0, 2000.0


def confined(
    cost: Cost, support: Tensor, epsilon: float, rule: MarginalRule | None = None
) -> DenseCost:
    """Let a cost outside of a support be so high that entries of a plan there are exactly zero."""
    # A finite number, with which potentials stay finite. Along the entries of a plan with strict
    # marginals, those of any two points differ by what the costs and their logarithms on a path
    # between them add up to, which passes each point once. A point held by a penalty that has no
    # partner at all is drawn up by it to rho / (rho + epsilon) of the number.
    table = cost.dense().matrix
    low, high = table.aminmax()
    steps = sum(table.shape) * (high - low + _STEP * epsilon)
    held = [rho for rho in rule.rho if math.isfinite(rho)] if rule is not None else []
    out_of_reach = _UNDERFLOW * (max(held, default=0.0) + epsilon)
    return DenseCost(torch.where(support, table, high + steps + out_of_reach))


def prepare(setting: Setting, cost: Cost, epsilon: float) -> PreparedProblem:
    """Prepare the linear problem at a cost, for strict or relaxed marginals."""
    rule, support = setting.rule, setting.problem.support
    if support is not None:
        cost = confined(cost, support, epsilon, rule)
    problem = LinearProblem(cost, setting.marginals, epsilon)
    if rule is not None and rule.mass is None:
        problem = problem._replace(tau=rule.tau(epsilon))
    return setting.backend.prepare(problem)


def solve_linear(
    setting: Setting,
    prepared: PreparedProblem,
    start: Potentials | None,
    *,
    max_iter: int,
    tol: float,
    min_iter: int = 0,
    falling: bool = False,
) -> SinkhornResult:
    """Solve a linear problem, for strict or relaxed marginals."""
    # Without a start strict ones are led to its epsilon from larger ones, if these are `falling`.
    if isinstance(prepared, BlockProblem):
        return _solve_blocks(prepared, start, max_iter=max_iter, min_iter=min_iter, tol=tol)
    mass = None if setting.rule is None else setting.rule.mass
    if mass is not None:
        return partial_sinkhorn(prepared, start, mass=mass, max_iter=max_iter, tol=tol)
    falling &= setting.rule is None
    return sinkhorn(prepared, start, max_iter=max_iter, min_iter=min_iter, tol=tol, falling=falling)


def _solve_blocks(
    prepared: BlockProblem, start: Potentials | None, *, max_iter: int, min_iter: int, tol: float
) -> SinkhornResult:
    """Solve the problem of each group, to an error of its share of the mass."""
    begun = [(part, None) for part in prepared.parts] if start is None else prepared.split(start)
    # all points go through the annealing, whose errors a few iterations reach
    solve = partial(sinkhorn, max_iter=max_iter, min_iter=min_iter)
    if tol >= ANNEALING_TOLERANCE:
        solve = partial(solve, check_every=_BLOCK_LOOK)
    found = [solve(part, at, tol=tol * float(part.problem.marginals.a.sum())) for part, at in begun]
    return SinkhornResult(
        Potentials(
            prepared.joined([one.potentials.f for one in found], 0),
            prepared.joined([one.potentials.g for one in found], 1),
        ),
        sum(one.error for one in found),
        max(one.n_iters for one in found),
        all(one.converged for one in found),
    )


class Pace:
    """How well the linear problems of a run are solved, by how far its plan has settled."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._budget = INNER_ITERATIONS[setting.store]
        self._most = 0  # iterations that the last linear problem might take
        self._error = math.inf  # of the columns of the last plan
        self._change = math.inf  # of the last plan itself
        self._met, self._missed = True, 0  # whether it met its marginals; misses so far
        self._stuck = 0
        self._least = math.inf  # change of a plan at the target
        self._idle = 0  # unsolved plans since then that have changed no less

    def limits(self, wanted: float, *, at_target: bool, first: bool) -> tuple[int, float]:
        """Choose how many iterations a linear problem may take, and the column error to reach."""
        # ``wanted`` is the change at which the loop may end
        most = self._setting.options.inner_max_iter
        if at_target and first:
            # the start that a search has found would be lost if the first plan missed its marginals
            # by far
            self._most = most
            return most, MET
        self._most = min(most, self._budget)
        return self._most, self._tolerance(wanted) if at_target else ANNEALING_TOLERANCE

    def until_met(self, inner: SinkhornResult, prepared: PreparedProblem) -> SinkhornResult:
        """Go on with a linear problem until its plan nearly meets its marginals, if time allows."""
        # a plan far from its marginals is no place to linearise at: a solve that began at an
        # optimum would leave it. Others look for one meanwhile.
        left = self._setting.options.inner_max_iter - inner.n_iters
        if not self._setting.anneal.held or inner.error <= ANNEALING_TOLERANCE or left <= 0:
            return inner
        more = solve_linear(
            self._setting, prepared, inner.potentials, max_iter=left, tol=ANNEALING_TOLERANCE
        )
        return more._replace(n_iters=inner.n_iters + more.n_iters, converged=False)

    def _tolerance(self, wanted: float) -> float:
        """Choose the column error to reach at the target epsilon, given the last change."""
        # The error of a proximal step is averaged out over the steps that follow, so it need not be
        # much smaller than they are.
        setting = self._setting
        tol = INNER_SHARE * max(wanted, setting.rounding(setting.anneal.target))
        if setting.anneal.proximal and setting.gradient.exact:
            return min(ANNEALING_TOLERANCE, max(tol, INNER_SHARE * self._change))
        if setting.anneal.patient:
            return min(ANNEALING_TOLERANCE, max(tol, _PATIENT_SHARE * self._change))
        return tol

    def meets(self, inner: SinkhornResult, *, at_target: bool) -> bool:
        """Whether a plan has both marginals: only then objectives are compared, steps followed."""
        before, self._met = self._met, not at_target or inner.error <= MET
        # a plan that jumps to and fro may miss them every other time
        if not self._met:
            self._missed += 1
        elif before:
            self._missed = 0
        return self._met

    def learn(
        self,
        inner: SinkhornResult,
        change: float,
        *,
        at_target: bool,
        settled: bool,
        drowned: bool = False,
    ) -> None:
        """Choose how many iterations the next linear problem may take."""
        # ``drowned`` is a plan that misses its marginals where rounding does so too, which it does
        # at all smaller epsilons as well
        options = self._setting.options
        longer = at_target and is_behind(inner, self._error, change)
        # objectives are not compared while marginals are missed: the loop would end by its limit
        longer = longer or self._missed >= WINDOW
        if at_target:
            # plans may go round in a ring of linear problems that are all left unsolved
            shrinks = inner.converged or change < self._least
            self._least, self._idle = min(self._least, change), 0 if shrinks else self._idle + 1
            if self._idle > WINDOW and self._setting.gradient.exact:
                longer, self._idle = True, 0
        if settled:
            # only more of them can improve its marginals
            self._budget = options.inner_max_iter
        elif longer or inner.error > ANNEALING_TOLERANCE:
            # a plan far from its marginals is no place to linearise at: at a small epsilon the loop
            # would go from one such plan to the next for ever
            self._budget *= 2
        spent = self._most == options.inner_max_iter and not inner.converged
        stays = settled and inner.error > STUCK_SHARE * self._error
        self._stuck = self._stuck + 1 if spent and (stays or drowned) else 0
        self._error, self._change = inner.error, change

    @property
    def stuck(self) -> bool:
        """Whether more iterations would leave the marginals as they are, or to rounding."""
        return self._stuck == STUCK


def is_behind(inner: SinkhornResult, before: float, change: float) -> bool:
    """Whether a linear problem is solved more slowly than the plan settles."""
    # If so, plans change by the column error that is left. An error that has risen is rounding,
    # which more iterations do not reduce.
    slow = SLOW * before < inner.error < before
    return slow and not inner.converged and inner.error > INNER_SHARE * change


def look_ahead(
    anneal: Annealing, step: int, potentials: Potentials, previous: Potentials | None
) -> Potentials:
    """Choose where the next linear problem begins; proximal steps extrapolate linearly."""
    if previous is None or anneal.share(step - 1) == 1:
        return potentials
    before, now, after = (anneal(step + shift) for shift in (-1, 0, 1))
    return Potentials(
        *(
            after * (2 * new / now - old / before)
            for new, old in zip(potentials, previous, strict=True)
        )
    )


def inner_tolerance(setting: Setting, epsilon: float, asked: float | None = None) -> float:
    """Compute the L1 column error that a solve must reach in the end, as far as rounding allows."""
    return max(asked or _asked_error(setting), _ROUNDING_SHARE * setting.rounding(epsilon))


def promised_error(setting: Setting) -> float:
    """Compute the L1 marginal error that a converged plan has at most, whatever rounding allows."""
    own = setting.dtype == torch.float32 and setting.options.inner_tol is None
    return max(CONTRADICTION * _asked_error(setting), RESOLVED if own else 0.0)


def _asked_error(setting: Setting) -> float:
    a, b = setting.marginals
    known, limits = setting.problem.restriction, limits_of(a.device)
    entries = len(a) * len(b) if known is None else known.total()
    asked = setting.options.precision == "float64" or entries <= limits.settled
    precise = setting.store or (setting.dtype == torch.float64 and asked)
    return setting.options.inner_tol or _INNER_TOLERANCE[precise]


def check_finite(objective: float, error: float, epsilon: float) -> None:
    """Raise if a solve produced NaN or infinity; bad input was refused before the loop."""
    if not (math.isfinite(objective) and math.isfinite(error)):
        raise NumericalError(
            f"The solve became non-finite at epsilon={epsilon:.3g} (objective {objective}, "
            f"marginal error {error}). The input is finite, so epsilon is too small for the "
            "precision: raise `epsilon`, or pass `precision='float64'`."
        )


logger = logging.getLogger(__name__)


class Updated(NamedTuple):
    """The coupling of a new plan, and what the loop is told about it."""

    coupling: Coupling
    told: Tensor  # (5,) float64, what :class:`torchgw._solve.loop.Verdict` holds


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
        if memory is not None and 0 < size <= CAPTURED_BYTES:
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
    known = memory.recall(("step", type(step.backend), step.store, step.proximal, gradient.kind()))
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
    if len(a) * len(b) * step.gradient.dtype.itemsize > CAPTURED_BYTES:
        return f"launches are a small part of the time at {len(a)} x {len(b)}."
    return step.gradient.why_not_captured()
