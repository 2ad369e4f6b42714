"""Outer iterations whose linear problems are not looked at until they are over."""

from __future__ import annotations

import math
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
# Sweeps of the first linear problem, of those while epsilon falls, and of the others; and those of
# them that follow a Newton step. [L750]
_FIRST, _FALLING, _MOST, _AFTER = 3, (1, 2, 3), 5, 2
# Shares of the error at which linear problems end while epsilon falls: sweeps that left so much are
# enough for the next, and a plan may have that. [L750]
_ENOUGH, _TOO_MUCH = 0.7, 2.0
# What a linear problem takes over of the excess of the last one's relaxation. [L750]
_KEPT_EXCESS = 0.9
# Share of the error at the target above which an iteration has left much, the error up to which it
# may, over the tolerance, and how many such in a row show that linear problems take more. [L750]
_LEFT, _SMALL, _MOST_SLOW = 0.5, 10.0, 2


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
        # the last error at the target, and how often in a row it has stayed
        self._error, self._slow = math.inf, 0

    def __call__(
        self, state: LoopState, epsilon: float, most: int, tol: float, *, at_target: bool
    ) -> Told | None:
        """Iterate, with at most so many Sinkhorn iterations; ``None`` if it is not of use here."""
        sweeps = _MOST if at_target else self._while_falling()
        sweeps = _FIRST if state.start is None else sweeps
        if self._step is None or sweeps * SWEEP > most or self._slow == _MOST_SLOW:
            return None
        newton = at_target and self._newton and state.start and self._errors[-1] > tol
        relaxation = self._relaxation if at_target else 1.0
        coupling, potentials, told = self._step.iterate(
            sweeps, epsilon, relaxation, state.start, state.coupling, state.latest,
            after=_AFTER if newton else 0,
        )  # fmt: skip
        numbers = told.tolist()
        usable, errors = numbers[6::2], numbers[7::2]
        error = errors[-1]
        # NaN compares as false
        if not all(usable) or not error <= max(errors[0], _TOO_MUCH * ANNEALING_TOLERANCE):
            self._relaxation, self._errors = 1.0, [0.0]
            return None
        self._relaxation, self._errors = 1 + _KEPT_EXCESS * (numbers[5] - 1), errors
        if at_target:
            slow = error > max(_SMALL * tol, _LEFT * self._error)
            self._slow = self._slow + 1 if slow else 0
            self._error = error
        inner = SinkhornResult(potentials, error, sweeps * SWEEP, error <= tol)
        return Told(coupling, Verdict(*numbers[:5]), inner)

    def _while_falling(self) -> int:
        """Choose as many sweeps as the last linear problem would have needed."""
        enough = [error <= _ENOUGH * ANNEALING_TOLERANCE for error in self._errors]
        wanted = enough.index(True) + 1 if any(enough) else len(enough) + 1
        return next((count for count in _FALLING if count >= wanted), _MOST)
