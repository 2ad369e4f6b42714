"""The last linear problem of a solve, solved to the full tolerance."""

from time import perf_counter
from typing import NamedTuple

import torch

from torchgw._gradients.contract import Coupling
from torchgw._plans.transport import TransportPlan
from torchgw._sinkhorn.contract import PreparedProblem
from torchgw._solve.inner import (
    check_finite,
    inner_tolerance,
    prepare,
    promised_error,
    solve_linear,
)
from torchgw._solve.state import LoopState, Setting
from torchgw._solve.status import Status
from torchgw._tensors.deadline import is_over, last_phase
from torchgw._typing import Potentials

# Iterations of the last linear problem at least. The error is a mean: with two levels, which take
# few iterations, single columns would keep large errors. [L189]
SETTLE_ITERATIONS = 3
# Column error to which a plan is settled that steps have gone on from, and that is polished then:
# it only matters for where points go that were not solved for. [L1257]
_BEFORE_POLISHING = 3e-3
# A settled plan may differ from the point at which its cost was linearised by this multiple of the
# last change, or of the marginal error. [L547]
_GROWTH = 10.0
# The status in place of another one, if the last linear problem is not solved.
_INNER_FAILED = {
    Status.CONVERGED: Status.INNER_LIMIT,
    Status.FLAT: Status.INNER_LIMIT,
    Status.STATIONARY: Status.INNER_LIMIT,
    Status.OUTER_LIMIT: Status.BOTH_LIMITS,
}


def settle(
    setting: Setting, state: LoopState, dtype: torch.dtype
) -> tuple[TransportPlan, LoopState]:
    """Solve the last linear problem to the full tolerance; return its plan and the final state."""
    # This is where a mixed-precision solve gets its float64 marginals. Where the loop ended with a
    # problem that is solved as well, its plan is the result.
    clock = perf_counter()
    options, epsilon = setting.options, setting.anneal.final(state.annealed)
    if state.solved is not None and state.solved.plan.dtype == dtype:
        plan = state.solved.plan
        state = state._replace(coupling=state.solved.point)
    else:
        state = state._replace(solved=None)
        linear = setting.gradient.linearise(state.coupling)
        cost = linear.seen(state.coupling.masses).to(dtype)
        prepared = prepare(setting, cost.dense() if setting.store else cost, epsilon)
        last_phase()
        inner = solve_linear(
            setting,
            prepared,
            state.start,
            max_iter=options.inner_max_iter,
            tol=_tolerance(setting, epsilon),
            min_iter=SETTLE_ITERATIONS,
        )
        value = setting.gradient.dual_value(inner.potentials, state.coupling, epsilon)
        check_finite(float(value), inner.error, epsilon)
        setting.recorder.settle_iterations = inner.n_iters
        # an `inner_tol` that was passed has to be met; of the default the promised error is enough
        met = promised_error(setting) if options.inner_tol is None else 0.0
        if not inner.converged and is_over():
            state = state._replace(status=Status.STOPPED)
        elif not inner.converged and inner.error > met:
            state = state._replace(status=_INNER_FAILED.get(state.status, state.status))
        if setting.store:
            prepared = prepare(setting, cost, epsilon)
        plan = TransportPlan.of(prepared, inner.potentials)
    potentials = _reach_unused(plan.prepared, plan.potentials)
    setting.recorder.time("settle", clock)
    return TransportPlan.of(plan.prepared, potentials), state


def _tolerance(setting: Setting, epsilon: float) -> float:
    """Choose the column error of the settled plan."""
    options = setting.options
    rough = setting.anneal.goes_on and options.inner_tol is None
    return max(inner_tolerance(setting, epsilon), _BEFORE_POLISHING if rough else 0.0)


class Left(NamedTuple):
    """Whether settling has led away from a saddle point."""

    state: LoopState | None  # to go on from, if it has
    coupling: Coupling | None  # of the settled plan, if it was looked at


def leaves(setting: Setting, state: LoopState, plan: TransportPlan) -> Left:
    """Look whether settling has led away from a saddle point."""
    # Symmetry holds the iteration at a saddle point until rounding has grown: steps that looked
    # settled then grow by a factor in each iteration.
    gradient, history = setting.gradient, setting.recorder.history
    plain = gradient.exact and not setting.anneal.proximal and state.solved is None
    if state.status is not Status.CONVERGED or not plain or state.done >= setting.options.max_iter:
        return Left(None, None)
    latest = gradient.update(plan, state.latest, setting.generator)
    before = max(history[-1].change, history[-1].marginal_error)
    before = max(before, inner_tolerance(setting, plan.epsilon))
    if float(latest.change(state.coupling)) <= _GROWTH * before:
        return Left(None, latest)
    return Left(state._replace(coupling=latest, latest=latest, start=plan.potentials), latest)


def _reach_unused(prepared: PreparedProblem, potentials: Potentials) -> Potentials:
    """Give points of zero weight the potentials of a half-step, so that they can be mapped."""
    a, b = prepared.problem.marginals
    if min(torch.stack([a.min(), b.min()]).tolist()) > 0:
        return potentials
    f, g = potentials
    return Potentials(
        torch.where(a > 0, f, prepared.softmin(g, axis=1)),
        torch.where(b > 0, g, prepared.softmin(f, axis=0)),
    )
