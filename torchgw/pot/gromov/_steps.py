"""Problems of each kind, solved from a start: without entropy by vertices, with it by scaling."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from torchgw._boundary.checks import called
from torchgw._errors import ConvergenceWarning, InvalidInputError, warn_user
from torchgw._sinkhorn.exact import LARGE
from torchgw.pot import _mirror
from torchgw.pot._arrays import Array, product, uniform
from torchgw.pot._coarse import coarse_start
from torchgw.pot._descent import Descent, Line, descend, follow
from torchgw.pot._ties import LineOfPot, tied
from torchgw.pot._vertices import (
    LinearSolver,
    PartialTransport,
    ShortTransport,
    partial_transport,
    semirelaxed,
    transport,
)
from torchgw.pot.gromov._call import Call
from torchgw.pot.gromov._read import Problem, check_epsilon, check_limits, read_start
from torchgw.pot.gromov._starts import semirelaxed_start

Marginals = Literal["balanced", "partial", "semirelaxed"]

# A plan may exceed a weight by this share without a warning. [L1060]
_EXCESS = 0.01


def exact(
    problem: Problem,
    kind: Marginals,
    start: Any,
    mass: Any = None,
    random_state: Any = 0,
    **stop: Any,
) -> Descent:
    """Take conditional gradient steps; ``stop`` are the further arguments of :func:`descend`."""
    p, q = problem.p, problem.q
    line = _line(problem, kind, **stop)
    solver: LinearSolver
    if kind == "partial":
        share = _read_mass(problem, mass)
        solver = partial_transport(p, q, share)
        if isinstance(solver, PartialTransport):
            return _partial(problem, solver, line, start, **stop)
        first = _read_partial_start(problem, start, share)
    elif kind == "semirelaxed":
        first, solver = _read_semirelaxed_start(problem, start, random_state), semirelaxed(p)
    else:
        as_pot = isinstance(line, LineOfPot)
        first, solver = read_start(problem, start), transport(p, q, as_pot=as_pot)
    return descend(line, first, solver, **stop)


def _line(problem: Problem, kind: Marginals, *, armijo: bool = False, **_: Any) -> Line:
    """Choose how objectives along lines are computed."""
    pieces = problem.term, problem.alpha, problem.linear
    costs = problem.C1, problem.C2
    # large partial problems do not begin where POT begins
    apart = kind == "partial" and min(map(len, costs)) >= LARGE
    if armijo or apart or not tied(*costs) or (problem.M is not None and not tied(problem.M)):
        return Line(*pieces)
    p, q = problem.p, problem.q
    return LineOfPot(*pieces, None if kind == "partial" else p, q if kind == "balanced" else None)


def _partial(
    problem: Problem,
    solver: PartialTransport,
    line: Line,
    start: Any,
    *,
    max_iter: int,
    **stop: Any,
) -> Descent:
    """Go where POT goes, then on from there; large ones of distances begin at a coarse start."""
    pieces = problem.term, problem.alpha, problem.linear
    if start is None and problem.M is None and solver.general.by_parts:
        return follow(coarse_start(*pieces[:2], solver), max_iter=max_iter, **stop)
    losses: list[float] = []
    first = _read_partial_start(problem, start, solver.mass)
    if solver.general.by_pot and min(first.shape) < LARGE:
        # POT ends its linear problems after `max_iter` pivots, the number of steps that it may take
        short = ShortTransport(solver, problem.linear, max_iter)
        found = descend(line, first, short, max_iter=max_iter, **stop)
        if short.solved(found.plan):
            return found
        reached = short.within(found.plan)
        if reached is not None:
            first, losses = reached, found.losses[:-1]
            max_iter -= len(losses)
    found = descend(Line(*pieces), first, solver, max_iter=max_iter, **stop)
    return found._replace(losses=losses + found.losses)


def entropic(
    problem: Problem,
    kind: Marginals,
    start: Any,
    epsilon: float,
    stop: _mirror.Stop,
    mass: Any = None,
    random_state: Any = 0,
    *,
    sharp: bool = False,
    most: int = 1000,
    tol: float = 1e-9,
) -> tuple[Array, _mirror.Mirrored]:
    """Take steps with entropy; ``most`` and ``tol`` are the limits of linear problems.

    Those of a ``sharp`` balanced plan have the entropy relative to the last plan.
    """
    if kind == "partial":
        mass = _read_mass(problem, mass)
        first = _read_partial_start(problem, start, mass)
    elif kind == "semirelaxed":
        first = _read_semirelaxed_start(problem, start, random_state)
    else:
        first = read_start(problem, start, exact=False)

    def solve(part: Problem, first: Array) -> _mirror.Mirrored:
        weights = part.p, part.q
        if sharp:
            return _mirror.proximal(part.slope, first, *weights, epsilon, stop, most, tol)
        solver = _mirror.Entropic(*weights, epsilon, mass if kind == "partial" else None, most)
        return _mirror.mirror(part.slope, first, solver, stop, tol)

    plan, found = on_positive(problem, first, solve)
    _say_how_it_ended(problem, kind, plan, found, stop.tol)
    return plan, found


def _say_how_it_ended(
    problem: Problem, kind: Marginals, plan: Array, found: _mirror.Mirrored, tol: float
) -> None:
    """Warn of a plan that has not settled, and of one that gives more than there is."""
    names = "`reg` or `epsilon`"
    if not found.converged and found.errors:
        warn_user(
            f"The plan still changes by {found.errors[-1]:.2g} in step {len(found.errors)}, where "
            f"{tol:.2g} was asked for. Allow more steps, or pass a larger {names}.",
            ConvergenceWarning,
        )
    sums = [(plan.sum(1), problem.p)] + [(plan.sum(0), problem.q)] * (kind != "semirelaxed")
    excess = max(float(((sum_ - weight) / weight.max()).max()) for sum_, weight in sums)
    if excess > _EXCESS:
        warn_user(
            f"The plan exceeds weights by up to {excess:.1%} of the largest: Sinkhorn's iterations "
            f"did not get further. Pass a larger {names}.",
            ConvergenceWarning,
        )


def exact_answer(call: Call, kind: Marginals, name: str, *known: str, **log: Any) -> Any:
    """Answer a call of a function without entropy, whose value has a name in the log."""
    call.check_known("verbose", "alpha_min", "alpha_max", "numItermaxEmd", *known)
    problem, more = call.problem(), call.kwargs
    check_limits(alpha_min=more.get("alpha_min"), alpha_max=more.get("alpha_max"))
    found = exact(
        problem,
        kind,
        call.G0,
        call.get("m"),
        call.get("random_state"),
        max_iter=int(call.get("max_iter", call.get("numItermax"))),
        tol_rel=call.get("tol_rel", call.get("tol")),
        tol_abs=call.get("tol_abs", 0.0),
        armijo=call.get("armijo", more.get("armijo", False)),
        limits=(more.get("alpha_min"), more.get("alpha_max")),
        verbose=call.get("verbose", more.get("verbose", False)),
    )
    pair = found.potentials if kind == "balanced" else None
    if pair is not None:
        log["u"], log["v"] = pair
        # of the last linear problem, by its prices
        log["cost"] = np.float64(problem.p @ pair[0] + problem.q @ pair[1])
    log = {"loss": found.losses, **log}
    return call.answer(problem, found.plan, name, log, value=found.value, potentials=pair)


def entropic_answer(call: Call, kind: Marginals, name: str, weight: str, **inner: Any) -> Any:
    """Answer a call of a function with entropy, whose ``weight`` is the argument of that name."""
    epsilon = check_epsilon(weight, call.get(weight))
    problem = call.problem(differentiable=False)
    limit = int(call.get("max_iter", call.get("numItermax")))
    stop, state = _mirror.Stop(limit, call.tol, call.verbose), call.get("random_state")
    plan, found = entropic(problem, kind, call.G0, epsilon, stop, call.get("m"), state, **inner)
    log, free = {"err": found.errors}, kind == "semirelaxed"
    return call.answer(problem, plan, name, log, with_parts=free)


def on_positive(
    problem: Problem, first: Array, solve: Callable[[Problem, Array], _mirror.Mirrored]
) -> tuple[Array, _mirror.Mirrored]:
    """Solve where both weights are positive; elsewhere the plan and the potentials are zero."""
    kept = rows, columns = problem.p > 0, problem.q > 0
    part = problem if rows.all() and columns.all() else problem.keep(rows, columns)
    place = np.ix_(rows, columns)
    found = solve(part, first[place])
    plan = np.zeros_like(first)
    plan[place] = found.plan
    if found.potentials is not None:
        whole = np.zeros(len(rows)), np.zeros(len(columns))
        for all_of, some, of_side in zip(whole, found.potentials, kept, strict=True):
            all_of[of_side] = some
        found = found._replace(potentials=whole)
    return plan, found


def _read_mass(problem: Problem, mass: Any) -> float:
    """Read the mass that moves; all that can move by default."""
    most = float(min(problem.p.sum(), problem.q.sum()))
    if mass is None:
        return most
    if not 0 <= float(mass) <= most * (1 + 1e-12):
        raise InvalidInputError(
            f"`{problem.arrays.called('m')}` must be between 0 and {most:.6g}, the "
            f"smaller of the two total weights; got "
            f"{float(mass):.6g}."
        )
    return min(float(mass), most)


def _read_partial_start(problem: Problem, start: Any, mass: float) -> Array:
    """Read a starting plan within the weights; a share of the product plan by default."""
    p, q = problem.p, problem.q
    if start is None:
        return product(p, q, mass)
    plan = problem.arrays.read("G0", start, (len(p), len(q)))
    slack = 1e-9 if problem.arrays.dtype.itemsize == 8 else 1e-6
    if (plan.sum(1) > p + slack).any() or (plan.sum(0) > q + slack).any():
        called = problem.arrays.called
        raise InvalidInputError(
            f"`{called('G0')}` must not move more than `{called('p')}` and `{called('q')}`."
        )
    return plan


def _read_semirelaxed_start(problem: Problem, start: Any, random_state: Any) -> Array:
    """Read a start, or compute the named one."""
    C1, C2, p = problem.C1, problem.C2, problem.p
    if isinstance(start, str):
        with called(method=problem.arrays.called("G0")):
            return semirelaxed_start(C1, C2, p, problem.M, problem.alpha, start, random_state)
    if start is None:
        return product(p, uniform(len(C2)))
    plan = problem.arrays.read("G0", start, (len(C1), len(C2)))
    tolerance = 1e-8 if problem.arrays.dtype.itemsize == 8 else 1e-6
    if not np.allclose(plan.sum(1), p, atol=tolerance):
        names = problem.arrays.called
        raise InvalidInputError(f"`{names('G0')}` must have the first marginal `{names('p')}`.")
    return plan
