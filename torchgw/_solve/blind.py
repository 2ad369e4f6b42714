"""Outer iterations whose linear problems are not looked at until they are over."""

from __future__ import annotations

from typing import NamedTuple, cast

from torchgw._gradients.contract import Coupling
from torchgw._sinkhorn.loop import SinkhornResult
from torchgw._sinkhorn.newton import may_pay
from torchgw._solve.inner import ANNEALING_TOLERANCE
from torchgw._solve.state import LoopState, Setting
from torchgw._solve.step import SWEEP, CapturedStep, Step
from torchgw._solve.stopping import Verdict

# Entries of a plan up to which looking at the device takes longer than some sweeps. [L750]
_ENTRIES = 2**18
# Sweeps of the first linear problem, of those while epsilon falls, where one is enough or not, and
# of the others. [L750]
_FIRST, _FALLING, _MOST = 3, (1, 2), 5
# Shares of the error at which linear problems end while epsilon falls: one sweep is enough for the
# next where the last left so much, and a plan may have it. [L750]
_ENOUGH, _TOO_MUCH = 0.7, 2.0
# What a linear problem takes over of the excess of the last one's relaxation. [L750]
_KEPT_EXCESS = 0.9
# Share of an error that sweeps leave where Newton steps, and more sweeps, are of no use. [L750]
_LEFT = 0.1


class Told(NamedTuple):
    """The coupling of a new plan, and how its iteration went."""

    latest: Coupling
    verdict: Verdict
    inner: SinkhornResult


class BlindIteration:
    """Makes an outer iteration by one graph and one read, its sweeps in a number known before."""

    def __init__(self, setting: Setting, step: Step | CapturedStep) -> None:
        problem = setting.problem
        strict = setting.gradient.exact and not setting.anneal.proximal and setting.rule is None
        few = setting.store and problem.source.n * problem.target.n <= _ENTRIES
        useful = strict and few and isinstance(step, CapturedStep)
        self._step = cast(CapturedStep, step) if useful else None
        self._newton = may_pay((problem.source.n, problem.target.n), setting.dtype)
        self._relaxation, self._errors = 1.0, [0.0]

    def __call__(
        self, state: LoopState, epsilon: float, most: int, tol: float, *, at_target: bool
    ) -> Told | None:
        """Iterate, with at most so many Sinkhorn iterations; ``None`` if it is not of use here."""
        errors = self._errors
        if self._step is None:
            return None
        sweeps = _FIRST if state.start is None else _MOST
        if not at_target and state.start is not None and errors[-1] <= ANNEALING_TOLERANCE:
            sweeps = _FALLING[errors[0] > _ENOUGH * ANNEALING_TOLERANCE]
        slow = at_target and errors[-1] > max(tol / _LEFT, _LEFT * errors[0])
        if sweeps * SWEEP > most or (slow and (self._newton or most > 2 * _MOST * SWEEP)):
            return None
        relaxation = self._relaxation if at_target else 1.0
        coupling, potentials, told = self._step.iterate(
            sweeps, epsilon, relaxation, state.start, state.coupling, state.latest
        )
        numbers = told.tolist()
        usable, self._errors = numbers[6::2], numbers[7::2]
        error = self._errors[-1]
        # NaN compares as false
        if not all(usable) or not error <= max(self._errors[0], _TOO_MUCH * ANNEALING_TOLERANCE):
            self._relaxation, self._errors = 1.0, [0.0]
            return None
        self._relaxation = 1 + _KEPT_EXCESS * (numbers[5] - 1)
        inner = SinkhornResult(potentials, error, sweeps * SWEEP, error <= tol)
        return Told(coupling, Verdict(*numbers[:5]), inner)
