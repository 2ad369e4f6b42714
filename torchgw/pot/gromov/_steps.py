"""Problems of each kind, solved from a start: without entropy by vertices, with it by scaling."""

import itertools
import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
import torch

from torchgw._errors import ConvergenceWarning, InvalidInputError, warn_user
from torchgw._problem.problem import MarginalRule
from torchgw._sinkhorn.exact import LARGE, LinearSolver, PartialTransport
from torchgw._solve.polish import best_length, oracle, take_steps
from torchgw._typing import Marginals
from torchgw.pot import _mirror
from torchgw.pot._arrays import Array, handed, product, uniform
from torchgw.pot._quadratic import Quadratic
from torchgw.pot.gromov._read import Call, Problem, check_epsilon, check_limits, meets, read_start

Kind = Literal["balanced", "partial", "semirelaxed"]

# Starts of semi-relaxed problems by name.
_PARTITIONS = ("fluid", "spectral", "kmeans", "fluid_soft", "spectral_soft", "kmeans_soft")
_STARTS = ("product", "random_product", "random", *_PARTITIONS)
# A table counts as tied by so many of its rows: on average an entry of them is repeated so many
# times. [L660]
_ROWS, _TIMES = 8, 4
# Armijo's rule asks for a decrease of this share of what the slope promises. [L386]
_ARMIJO = 1e-4
# A plan may miss its weights, or exceed them, by this share of its mass without a warning. [L1060]
_EXCESS = 0.01


class Stored:
    """A plan under the objective <M, T> + weight * quadratic(T), ``linear`` being M."""

    # Its gradient is linear in T, so that of the direction gives the line and the next gradient
    # too.

    def __init__(
        self,
        term: Quadratic,
        weight: float,
        linear: Array | float,
        start: Array,
        solver: LinearSolver,
    ) -> None:
        self.term, self.weight, self.linear = term, weight, linear
        self.plan, self.solver = start, solver

    def begin(self) -> float:
        """Return the objective at the plan."""
        self._slope = self.weight * self.term.gradient(self.plan)
        # the quadratic term at a plan is half the product of the plan with its gradient
        half = 0.5 * float(np.vdot(self._slope, self.plan))
        self._slope += self.linear
        return float(np.sum(self.linear * self.plan)) + half

    def look(self) -> tuple[float, float]:
        """Solve the linear problem; find the objective towards its solution."""
        self._turn(self._slope)
        self._change = self.term.gradient(self._direction)
        self._change *= self.weight
        bend = 0.5 * float(np.vdot(self._change, self._direction))
        return bend, float(np.vdot(self._slope, self._direction))

    def go(self, length: float) -> None:
        """Go a share of the way to the solution."""
        if length == 1:
            # at the vertex itself its zeros are exact, without rounding
            self._slope = self._slope + self._change
            self.plan = self._found.plan
            return
        self._slope = self._slope + length * self._change
        self.plan = self.plan + length * self._direction

    def _turn(self, slope: Array) -> None:
        self._found = self.solver(slope, float(np.vdot(slope, self.plan)))
        self._direction = self._found.plan - self.plan

    @property
    def potentials(self) -> tuple[Array, Array] | None:
        """Those of the last linear problem, if they are known."""
        known = self._found.potentials
        return None if known is None else known()


def exact(
    problem: Problem,
    kind: Kind,
    start: Any,
    mass: Any = None,
    random_state: Any = 0,
    *,
    armijo: bool = False,
    limits: tuple[float | None, float | None] = (None, None),
    max_iter: int,
    **stop: Any,
) -> _mirror.Ended:
    """Take conditional gradient steps; ``stop`` are further arguments of :func:`take_steps`."""
    p, q, pieces = problem.p, problem.q, (problem.term, problem.alpha, problem.linear)
    rule = _read_rule(problem, kind, mass)
    first = _read_first(problem, rule, start, random_state)
    solver = oracle(p, q, rule)
    losses: list[float] = []
    if armijo or limits != (None, None):
        stop["length_of"] = partial(_length, armijo, limits)
    elif start is None and find_spec("ot") is not None and _as_pot(problem, solver, first):
        found, is_over = _by_pot(problem, kind, rule, max_iter, stop)
        if is_over:
            return found
        first, losses = found.plan, found.told[:-1]
        max_iter -= len(losses)
    path = Stored(*pieces, first, solver)
    done = take_steps(path, max_iter=max_iter, **stop)
    return _mirror.Ended(path.plan, losses + done.losses, path.potentials, done.converged)


def _as_pot(problem: Problem, solver: LinearSolver, first: Array) -> bool:
    """Say whether steps have to be POT's: where costs tie, and of small partial problems."""
    # rounding decides among ties; POT ends linear problems of partial plans after as many pivots as
    # there may be steps, and large ones go nowhere then
    if isinstance(solver, PartialTransport):
        return bool(min(first.shape) < LARGE)
    tables = problem.C1, problem.C2, *(() if problem.M is None else (problem.M,))
    few = [table[:_ROWS] for table in tables]
    tied = [bool(_TIMES * len(np.unique(rows)) <= rows.size) for rows in few]
    return (tied[0] or tied[1]) and all(tied[2:])


def _by_pot(
    problem: Problem, kind: Kind, rule: MarginalRule | None, max_iter: int, stop: dict[str, Any]
) -> tuple[_mirror.Ended, bool]:
    """Take POT's steps, from which those of a partial plan may have to go on; tell if not."""
    fused, before = problem.M is not None, {"semirelaxed": "semirelaxed_", "partial": "partial_"}
    solve = handed(f"{before.get(kind, '')}{'fused_' if fused else ''}gromov_wasserstein")
    given: dict[str, Any] = {"M": problem.M, "alpha": problem.alpha} if fused else {}
    if kind == "partial":
        assert rule is not None
        given |= {"m": rule.mass, "numItermax": max_iter, "tol": stop["tol_rel"], "warn": False}
    else:
        given |= {"max_iter": max_iter, "tol_rel": stop["tol_rel"], "tol_abs": stop["tol_abs"]}
    if kind != "semirelaxed":
        given["q"] = problem.q
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan, log = solve(
            C1=problem.C1, C2=problem.C2, p=problem.p, loss_fun=problem.loss,
            symmetric=problem.term.symmetric, log=True, **given,
        )  # fmt: skip
    losses = [float(loss) for loss in log["loss"]]
    if stop.get("verbose"):
        for step, (last, loss) in enumerate(itertools.pairwise(losses), 1):
            sys.stderr.write(f"{step:5d}|{loss:8e}|{abs(loss - last):8e}\n")
    pair = (log["u"], log["v"]) if kind == "balanced" else None
    found = _mirror.Ended(plan, losses, pair, len(losses) <= max_iter)
    if rule is None or rule.mass is None:
        return found, True
    moved = float(plan.sum())
    if moved < rule.mass * (1 - 1e-9):
        # a plan of less mass is none to go on from
        return found._replace(plan=product(problem.p, problem.q, rule.mass), told=losses[:1]), False
    if moved > rule.mass:
        plan *= rule.mass / moved
    return found, log["warning"] is None and moved <= rule.mass * (1 + 1e-9)


def _length(
    armijo: bool, limits: tuple[float | None, float | None], bend: float, slope: float
) -> float:
    """Choose how far to go by POT's options, where they are given."""
    length = best_length(bend, slope)
    if armijo:
        length = 1.0
        # shortened until the value falls by a share of what the slope promises
        while bend * length**2 + slope * length > _ARMIJO * slope * length:
            # the minimum of the parabola, as bend is positive here
            length = -slope / (2 * bend)
            if length < 1e-12:
                length = 0.0
                break
    return length if limits == (None, None) else float(np.clip(length, *limits))


def entropic(
    problem: Problem,
    kind: Kind,
    start: Any,
    epsilon: float,
    stop: _mirror.Stop,
    mass: Any = None,
    *,
    sharp: bool = False,
    most: int = 1000,
    tol: float = 1e-9,
) -> _mirror.Ended:
    """Take steps with entropy; ``most`` and ``tol`` are the limits of linear problems."""
    # Those of a `sharp` balanced plan have the entropy relative to the last plan.
    rule = _read_rule(problem, kind, mass)
    first = _read_first(problem, rule, start, exactly=False)

    def solve(part: Problem, first: Array) -> _mirror.Ended:
        weights = part.p, part.q
        if sharp:
            return _mirror.proximal(part.slope, first, *weights, epsilon, stop, most, tol)
        solver = _mirror.Entropic(*weights, epsilon, rule.mass if rule else None, most)
        return _mirror.mirror(part.slope, first, solver, stop, tol)

    found = on_positive(problem, first, solve)
    plan, names = found.plan, "`reg` or `epsilon`"
    if not found.converged and found.told:
        warn_user(
            f"The plan still changes by {found.told[-1]:.2g} in step {len(found.told)}, where "
            f"{stop.tol:.2g} was asked for. Allow more steps, or pass a larger {names}.",
            ConvergenceWarning,
        )
    sums, weights = (
        Marginals(*map(torch.from_numpy, pair))
        for pair in ((plan.sum(1), plan.sum(0)), (problem.p, problem.q))
    )
    missed = (rule or MarginalRule()).violation(sums, weights) / plan.sum()
    if missed > _EXCESS:
        warn_user(
            f"The plan misses its weights by {missed:.1%} of its mass: Sinkhorn's iterations did "
            f"not get further. Pass a larger {names}.",
            ConvergenceWarning,
        )
    return found


def exact_answer(call: Call, kind: Kind, name: str, *known: str, **log: Any) -> Any:
    """Answer a call of a function without entropy, whose value has a name in the log."""
    call.check_known("verbose", "alpha_min", "alpha_max", "numItermaxEmd", *known)
    problem, more = call.problem(), call.kwargs
    check_limits(alpha_min=more.get("alpha_min"), alpha_max=more.get("alpha_max"))
    found = exact(
        problem, kind, call.G0, call.get("m"), call.get("random_state"),
        max_iter=int(call.get("max_iter", call.get("numItermax"))),
        tol_rel=call.get("tol_rel", call.get("tol")), tol_abs=call.get("tol_abs", 0.0),
        armijo=call.get("armijo", more.get("armijo", False)),
        limits=(more.get("alpha_min"), more.get("alpha_max")),
        verbose=call.get("verbose", more.get("verbose", False)),
    )  # fmt: skip
    pair = found.potentials if kind == "balanced" else None
    if pair is not None:
        log["u"], log["v"] = pair
        # of the last linear problem, by its prices
        log["cost"] = np.float64(problem.p @ pair[0] + problem.q @ pair[1])
    log = {"loss": found.told, **log}
    return call.answer(problem, found.plan, name, log, value=found.told[-1], potentials=pair)


def entropic_answer(call: Call, kind: Kind, name: str, weight: str, **inner: Any) -> Any:
    """Answer a call of a function with entropy, whose ``weight`` is the argument of that name."""
    epsilon = check_epsilon(weight, call.get(weight))
    problem = call.problem(differentiable=False)
    stop = _mirror.Stop(int(call.get("max_iter", call.get("numItermax"))), call.tol, call.verbose)
    found = entropic(problem, kind, call.G0, epsilon, stop, call.get("m"), **inner)
    return call.answer(problem, found.plan, name, {"err": found.told})


def on_positive(
    problem: Problem, first: Array, solve: Callable[[Problem, Array], _mirror.Ended]
) -> _mirror.Ended:
    """Solve where both weights are positive; elsewhere the plan and the potentials are zero."""
    kept = rows, columns = problem.p > 0, problem.q > 0
    if rows.all() and columns.all():
        return solve(problem, first)
    place = np.ix_(rows, columns)
    found = solve(problem.keep(rows, columns), first[place])
    plan = np.zeros_like(first)
    plan[place] = found.plan
    if found.potentials is not None:
        whole = np.zeros(len(rows)), np.zeros(len(columns))
        for all_of, some, of_side in zip(whole, found.potentials, kept, strict=True):
            all_of[of_side] = some
        found = found._replace(potentials=whole)
    return found._replace(plan=plan)


def _read_rule(problem: Problem, kind: Kind, mass: Any) -> MarginalRule | None:
    """Read which marginals a plan must have; a partial one moves all that it can by default."""
    if kind != "partial":
        return MarginalRule((np.inf, 0.0)) if kind == "semirelaxed" else None
    most = float(min(problem.p.sum(), problem.q.sum()))
    if mass is None:
        return MarginalRule(mass=most)
    if not 0 <= float(mass) <= most * (1 + 1e-12):
        raise InvalidInputError(
            f"`{problem.arrays.called('m')}` must be between 0 and {most:.6g}, the smaller of the "
            f"two total weights; got {float(mass):.6g}."
        )
    return MarginalRule(mass=min(float(mass), most))


def _read_first(
    problem: Problem,
    rule: MarginalRule | None,
    start: Any,
    random_state: Any = 0,
    *,
    exactly: bool = True,
) -> Array:
    """Read a starting plan, by default a product; ``exactly`` one of strict marginals has them."""
    p, q, called = problem.p, problem.q, problem.arrays.called
    if rule is None:
        return read_start(problem, start, exact=exactly)
    free = rule.mass is None
    if isinstance(start, str) and free:
        if start not in _STARTS:
            raise InvalidInputError(
                f"`{called('G0')}` must be one of {', '.join(_STARTS)}, or a plan; got {start!r}."
            )
        named = handed("semirelaxed_init_plan")
        return named(
            problem.C1, problem.C2, p, problem.M, problem.alpha, start, random_state=random_state,
        )  # fmt: skip
    if start is None:
        return product(p, uniform(len(q))) if free else product(p, q, rule.mass)
    plan = problem.arrays.read("G0", start, (len(p), len(q)))
    if free and not meets(problem, plan.sum(1), p):
        raise InvalidInputError(f"`{called('G0')}` must have the first marginal `{called('p')}`.")
    slack = 1e-9 if problem.arrays.dtype.itemsize == 8 else 1e-6
    if not free and ((plan.sum(1) > p + slack).any() or (plan.sum(0) > q + slack).any()):
        raise InvalidInputError(
            f"`{called('G0')}` must not move more than `{called('p')}` and `{called('q')}`."
        )
    return plan
