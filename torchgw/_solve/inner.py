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


def is_behind(inner: SinkhornResult, before: float, change: float) -> bool:
    """Whether a linear problem is solved more slowly than the plan settles."""
    # If so, plans change by the column error that is left. An error that has risen is rounding,
    # which more iterations do not reduce.
    slow = _FALLING * before < inner.error < before
    return slow and not inner.converged and inner.error > _INNER_SHARE * change


def next_budget(setting: Setting, budget: int, error: float, *, settled: bool, longer: bool) -> int:
    """Choose how many Sinkhorn iterations the next linear problem may take."""
    # once the plan has settled, only more of them can improve its marginals
    if settled:
        return setting.options.inner_max_iter
    # a plan far from its marginals is no place to linearise at: at a small epsilon the loop would
    # go from one such plan to the next for ever
    return 2 * budget if longer or error > ANNEALING_TOLERANCE else budget


def loop_tolerance(setting: Setting, change: float, wanted: float) -> float:
    """Choose the column error to reach at the target epsilon, given the last change of the plan."""
    # ``wanted`` is the change at which the loop may end. The error of a proximal step is averaged
    # out over the steps that follow, so it need not be much smaller than they are.
    tol = _INNER_SHARE * max(wanted, setting.rounding(setting.anneal.target))
    if setting.anneal.proximal and setting.gradient.exact:
        return min(ANNEALING_TOLERANCE, max(tol, _INNER_SHARE * change))
    if setting.anneal.patient:
        return min(ANNEALING_TOLERANCE, max(tol, _PATIENT_SHARE * change))
    return tol


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
            "precision: raise `epsilon` (weak penalties of `unbalanced` need a larger one), or "
            "pass `precision='float64'`."
        )
