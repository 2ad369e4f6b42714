"""One linear problem of the outer loop: its budget, its tolerance, its start."""

import math

import torch

from torchgw._errors import NumericalError
from torchgw._sinkhorn.annealing import Annealing
from torchgw._sinkhorn.contract import PreparedProblem
from torchgw._sinkhorn.loop import SinkhornResult, sinkhorn
from torchgw._sinkhorn.partial import partial_sinkhorn
from torchgw._sinkhorn.problem import Cost, LinearProblem
from torchgw._solve.precision import RESOLVED, settles_precisely
from torchgw._solve.state import Setting
from torchgw._typing import Potentials

# Column error at which an inner solve ends while epsilon still falls: the next linearisation
# matters more than this one's marginals. [L294]
ANNEALING_TOLERANCE = 1e-2
# Column error that an inner solve aims at, as a share of the change of the plan that ends the loop.
# [L129]
_INNER_SHARE = 0.1
# The same after a patient annealing, whose plans keep moving for long: as a share of their last
# change. [L180]
_PATIENT_SHARE = 0.01
# A linear problem is slow if it leaves more than this share of the error before. [L513]
_FALLING = 0.5
# A marginal is a sum of many entries: this share of the rounding of single exponents is left in it.
# [L294]
_ROUNDING_SHARE = 0.5
# Column error to reach by default, if the cost is stored or settled in float64 anyway. Other costs
# are so large that a few iterations in float64 have to do. [L294]
_INNER_TOLERANCE = {True: 5e-7, False: 1e-5}
# The plan itself may miss its marginals by this multiple of the column error that was asked for.
# [L293]
_CONTRADICTION = 10
# Column error at the target epsilon up to which a plan counts as meeting both marginals. [L184]
_MET = 3e-3
# So many iterations may miss it, without two in a row that meet it, before their linear problems
# get more time: objectives are not compared meanwhile, and the loop would end by its limit alone.
# [L472] [L1146]
_MISSES = 5
# Sinkhorn iterations of one linearisation, if the cost is stored or streamed: about as much work as
# the linearisation itself. [L186]
_INNER_ITERATIONS = {True: 50, False: 20}
# Linear problems in a row of a settled plan, each with all its iterations, that leave more than a
# share of the column error: after so many, those that `max_iter` allows would not end it. [L352]
_STUCK, _STUCK_SHARE = 10, 0.99


def prepare(setting: Setting, cost: Cost, epsilon: float) -> PreparedProblem:
    """Prepare the linear problem at a cost, for strict or relaxed marginals."""
    problem = LinearProblem(cost, setting.marginals, epsilon)
    rule = setting.rule
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
) -> SinkhornResult:
    """Solve a linear problem, for strict or relaxed marginals."""
    mass = None if setting.rule is None else setting.rule.mass
    if mass is not None:
        return partial_sinkhorn(prepared, start, mass=mass, max_iter=max_iter, tol=tol)
    return sinkhorn(prepared, start, max_iter=max_iter, min_iter=min_iter, tol=tol)


class Pace:
    """How well the linear problems of a run are solved, by how far its plan has settled."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._budget = _INNER_ITERATIONS[setting.store]
        self._most = 0  # iterations that the last linear problem might take
        self._error = math.inf  # of the columns of the last plan
        self._change = math.inf  # of the last plan itself
        self._met, self._missed = True, 0  # whether it met its marginals; misses so far
        self._stuck = 0

    def limits(self, wanted: float, *, at_target: bool, first: bool) -> tuple[int, float]:
        """Choose how many iterations a linear problem may take, and the column error to reach."""
        # ``wanted`` is the change at which the loop may end
        most = self._setting.options.inner_max_iter
        if at_target and first:
            # the start that a search has found would be lost if the first plan missed its marginals
            # by far
            self._most = most
            return most, _MET
        self._most = min(most, self._budget)
        return self._most, self._tolerance(wanted) if at_target else ANNEALING_TOLERANCE

    def until_met(self, inner: SinkhornResult, prepared: PreparedProblem) -> SinkhornResult:
        """Go on with a linear problem until its plan meets both marginals, if time is left."""
        # a plan far from its marginals is no place to linearise at: a solve that began at an
        # optimum would leave it. Others look for one meanwhile.
        left = self._setting.options.inner_max_iter - inner.n_iters
        if not self._setting.anneal.held or inner.error <= _MET or left <= 0:
            return inner
        more = solve_linear(self._setting, prepared, inner.potentials, max_iter=left, tol=_MET)
        return more._replace(n_iters=inner.n_iters + more.n_iters, converged=False)

    def _tolerance(self, wanted: float) -> float:
        """Choose the column error to reach at the target epsilon, given the last change."""
        # The error of a proximal step is averaged out over the steps that follow, so it need not be
        # much smaller than they are.
        setting = self._setting
        tol = _INNER_SHARE * max(wanted, setting.rounding(setting.anneal.target))
        if setting.anneal.proximal and setting.gradient.exact:
            return min(ANNEALING_TOLERANCE, max(tol, _INNER_SHARE * self._change))
        if setting.anneal.patient:
            return min(ANNEALING_TOLERANCE, max(tol, _PATIENT_SHARE * self._change))
        return tol

    def meets(self, inner: SinkhornResult, *, at_target: bool) -> bool:
        """Whether a plan has both marginals: only then objectives are compared, steps followed."""
        before, self._met = self._met, not at_target or inner.error <= _MET
        # a plan that jumps to and fro may miss them every other time
        if not self._met:
            self._missed += 1
        elif before:
            self._missed = 0
        return self._met

    def learn(
        self, inner: SinkhornResult, change: float, *, at_target: bool, settled: bool
    ) -> None:
        """Choose how many iterations the next linear problem may take."""
        options = self._setting.options
        longer = at_target and is_behind(inner, self._error, change)
        longer = longer or self._missed >= _MISSES
        if settled:
            # only more of them can improve its marginals
            self._budget = options.inner_max_iter
        elif longer or inner.error > ANNEALING_TOLERANCE:
            # a plan far from its marginals is no place to linearise at: at a small epsilon the loop
            # would go from one such plan to the next for ever
            self._budget *= 2
        spent = settled and self._most == options.inner_max_iter and not inner.converged
        stays = inner.error > _STUCK_SHARE * self._error
        self._stuck = self._stuck + 1 if spent and stays else 0
        self._error, self._change = inner.error, change

    @property
    def stuck(self) -> bool:
        """Whether more iterations would leave the marginals of a settled plan as they are."""
        return self._stuck == _STUCK


def is_behind(inner: SinkhornResult, before: float, change: float) -> bool:
    """Whether a linear problem is solved more slowly than the plan settles."""
    # If so, plans change by the column error that is left. An error that has risen is rounding,
    # which more iterations do not reduce.
    slow = _FALLING * before < inner.error < before
    return slow and not inner.converged and inner.error > _INNER_SHARE * change


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


def inner_tolerance(setting: Setting, epsilon: float) -> float:
    """Compute the L1 column error that a solve must reach in the end, as far as rounding allows."""
    return max(_asked_error(setting), _ROUNDING_SHARE * setting.rounding(epsilon))


def promised_error(setting: Setting) -> float:
    """Compute the L1 marginal error that a converged plan has at most, whatever rounding allows."""
    own = setting.dtype == torch.float32 and setting.options.inner_tol is None
    return max(_CONTRADICTION * _asked_error(setting), RESOLVED if own else 0.0)


def _asked_error(setting: Setting) -> float:
    a, b = setting.marginals
    asked = setting.options.precision == "float64" or settles_precisely(a.device, len(a) * len(b))
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
