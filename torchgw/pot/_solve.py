"""The call of POT, solved here: ``torchgw.pot.solve_gromov`` in place of ``ot.solve_gromov``."""

import warnings
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple

import numpy as np
import scipy
from scipy.special import xlogy

from torchgw._boundary.arrays import to_numpy, to_tensor
from torchgw._boundary.checks import reject_unknown
from torchgw._errors import InvalidInputError, TorchGWWarning, UnsupportedError, warn_user
from torchgw._plans.given import StoredPlan
from torchgw._results.base import Result
from torchgw._solve.state import Status
from torchgw.pot import _mirror
from torchgw.pot._arrays import Array, Arrays, handed
from torchgw.pot.gromov._read import (
    Problem,
    check_share,
    needs_gradients,
    read_problem,
    read_start,
    value_of,
)
from torchgw.pot.gromov._steps import Kind, entropic, exact, on_positive

# Penalties of marginals.
Divergence = Literal["kl", "l2"]

# The losses of solve_gromov, and those of ot.gromov.
LOSSES = {"L2": "square_loss", "KL": "kl_loss"}
# Names that arguments of ot.gromov have here.
_NAMES = {"C1": "Ca", "C2": "Cb", "p": "a", "q": "b", "G0": "plan_init", "m": "unbalanced"}


@dataclass(frozen=True, repr=False, eq=False)
class OTResult(Result):
    """Outcome of :func:`solve_gromov`, with the attributes of POT's ``OTResult``.

    Arrays are of the kind of ``Ca``.

    Attributes
    ----------
    plan : array of shape (n, m)
    value : float or tensor
        Objective, with reg * sum P log P if there is a ``reg``, as in POT. Of tensors that require
        gradients it carries them: ``value.backward()``.
    value_linear, value_quad : float or tensor
        (1 - alpha) <M, P> and alpha <L(P), P>.
    potentials, potential_a, potential_b : tuple of arrays, shapes (n,) and (m,), and each
        Dual potentials of the last linear problem; None where that has none.
    marginals, marginal_a, marginal_b : tuple of arrays, shapes (n,) and (m,), and each
        Mass that the plan moves.
    status : Status
        How the solve ended; its value is the advice.
    log : dict
        ``loss`` or ``err`` of each step.
    """

    plan: Any
    value: Any
    value_linear: Any
    value_quad: Any
    potentials: tuple[Any, Any] | None
    status: Status
    log: dict[str, Any]

    def _summary(self) -> tuple[str, dict[str, str], str]:
        n, m = self.plan.shape
        return f"{n} x {m}", {"value": f"{float(self.value):.6g}"}, self.status.advice

    @property
    def potential_a(self) -> Any:
        """The first of the potentials."""
        return None if self.potentials is None else self.potentials[0]

    @property
    def potential_b(self) -> Any:
        """The second of the potentials."""
        return None if self.potentials is None else self.potentials[1]

    @property
    def marginals(self) -> tuple[Any, Any]:
        """Sums of the plan over columns and over rows."""
        return self.plan.sum(1), self.plan.sum(0)

    @property
    def marginal_a(self) -> Any:
        """The first of the marginals."""
        return self.marginals[0]

    @property
    def marginal_b(self) -> Any:
        """The second of the marginals."""
        return self.marginals[1]

    @property
    def lazy_plan(self) -> StoredPlan:
        """The plan as an operator."""
        return StoredPlan(to_tensor("plan", self.plan))

    @property
    def sparse_plan(self) -> scipy.sparse.csr_array:
        """The entries of the plan that are not zero."""
        return scipy.sparse.csr_array(to_numpy(self.plan))

    @property
    def _backend(self) -> Any:
        """POT's description of the kind of arrays, None where POT is not installed."""
        try:
            from ot.backend import get_backend
        except ImportError:
            return None
        return get_backend(self.plan)


class Found(NamedTuple):
    """A plan, its values, and the log of its solve."""

    plan: Array
    linear: float
    quadratic: float
    value: float
    potentials: tuple[Array, Array] | None
    converged: bool
    log: dict[str, Any]


@reject_unknown
def solve_gromov(
    Ca: Any,
    Cb: Any,
    M: Any = None,
    a: Any = None,
    b: Any = None,
    loss: str = "L2",
    symmetric: bool | None = None,
    alpha: Any = 0.5,
    reg: float | None = None,
    reg_type: str = "entropy",
    unbalanced: Any = None,
    unbalanced_type: str = "KL",
    n_threads: int = 1,
    method: str | None = None,
    max_iter: int | None = None,
    plan_init: Any = None,
    tol: float | None = None,
    verbose: bool = False,
) -> OTResult:
    """Solve a small dense problem with the signature of ``ot.solve_gromov``.

    Parameters
    ----------
    Ca, Cb : array-like, shapes (n, n) and (m, m)
        Costs within each space, taken as they are: distances, similarities, directed ones.
    M : array-like, shape (n, m), optional
        Linear cost.
    a, b : array-like, shapes (n,) and (m,), optional
        Weights, uniform by default; of the same sum unless marginals are relaxed.
    loss : {"L2", "KL"}
        (x - y)^2 or x log(x / y) - x + y, in any case of letters; ``loss="square"`` and ``"kl"`` of
        :func:`torchgw.solve`.
    symmetric : bool, optional
        Whether costs are symmetric; found out by default.
    alpha : float or tensor
        Weight of the quadratic term; without ``M`` only KL and L2 penalties use it.
    reg : float, optional
        Entropic regularisation. ``None`` or 0 is the problem without: conditional gradient steps.
    reg_type : {"entropy"}
    unbalanced : float or pair of float, optional
        With "KL" and "L2" twice the weight of the penalty of each marginal, of mu x mu from a x a;
        with "partial" the mass that is moved; not used with "semirelaxed".
    unbalanced_type : {"KL", "L2", "semirelaxed", "partial"}
        "semirelaxed" holds ``a`` and frees ``b``. Problems with penalties, "KL" and "L2", are
        solved by POT, of the first loss.
    n_threads : int
        1.
    method : {"PGD", "PPA"} or None
        With ``reg``: mirror descent (the default), or proximal point steps of weight ``reg``, whose
        plan is sharp.
    max_iter : int, optional
        Steps: 10,000 without ``reg``, but 100 turns with penalties; with it 1,000.
    plan_init : array-like, shape (n, m), optional
        Plan to start from, by default the product plan; a name such as "fluid" for "semirelaxed".
    tol : float, optional
        Relative or absolute decrease of the objective without ``reg``, otherwise change of the
        plan; 1e-9, or 1e-7 for partial plans and penalties.
    verbose : bool
        Write each step to standard error.

    Returns
    -------
    OTResult

    Raises
    ------
    UnsupportedError
        For what torchgw does not solve.
    InvalidInputError, InvalidTypeError
        For input that cannot be used.

    Notes
    -----
    The problem is not convex. Like POT's solver this one ends at an optimum near its start;
    :func:`torchgw.solve` searches for a better one, and is meant for large problems and GPUs. Plans
    are stored here, and all is computed in float64 on the CPU.

    What POT 0.9.7 does is followed where it is particular. Its KL problem weighs the quadratic term
    by ``alpha`` even without ``M``, and its value counts the entropy, reg / 2 times KL(P x P | Q x
    Q) of Q = a x b. Its regularised semi-relaxed solver takes proximal steps: the plan has no
    entropy in the end, ``reg`` is the size of a step, and only the value counts reg * sum P log P.
    Where ``ot.solve_gromov`` forgets ``reg`` (0.1 is used with ``M``), this one does not.

    Examples
    --------
    >>> import numpy as np
    >>> from torchgw.pot import solve_gromov
    >>> Ca = np.array([[0.0, 1.0, 2.0], [1.0, 0.0, 1.5], [2.0, 1.5, 0.0]])
    >>> np.round(solve_gromov(Ca, Ca[::-1, ::-1], reg=0.01).plan * 3)
    array([[0., 0., 1.],
           [0., 1., 0.],
           [1., 0., 0.]])
    """
    kind = _kind_of(unbalanced, unbalanced_type)
    _refuse(kind, loss, reg, reg_type, n_threads, method)
    stop = _stop(kind, reg, max_iter, tol, verbose)
    loss_fun = LOSSES[str(loss).upper()]
    given = {"C1": Ca, "C2": Cb, "M": M, "p": a, "q": b, "alpha": alpha}
    if kind == "kl" or kind == "l2":
        return _penalised(kind, given, loss_fun, reg or 0.0, unbalanced, plan_init, stop)
    if isinstance(alpha, (int, float)) and alpha == 1:
        # the weight of M is zero
        M = given["M"] = None
    if kind == "semirelaxed":
        b = given["q"] = None
    start = None if isinstance(plan_init, str) else plan_init
    share = 1.0 if M is None else alpha
    problem = read_problem(
        Ca, Cb, a, b, loss_fun, symmetric, M=M, alpha=share, also=(start,), names=_NAMES
    )
    if reg:
        if not (kind == "balanced" and method != "PPA") and needs_gradients(*given.values()):
            raise UnsupportedError(
                "The value of this problem is differentiated for method='PGD' with both marginals "
                "held, or without `reg`. Detach the inputs, or see torchgw.solve(differentiable=)."
            )
        if kind == "semirelaxed":
            found = _semirelaxed(problem, float(reg), plan_init, stop)
        else:
            found = _regularised(problem, kind, float(reg), method, unbalanced, plan_init, stop)
    else:
        found = _exact(problem, kind, unbalanced, plan_init, stop)
    weights = found.potentials if kind == "balanced" else None
    value = value_of(problem, found.plan, found.value, given, weights)
    return result_of(problem.arrays, found, value)


def _kind_of(unbalanced: Any, unbalanced_type: str) -> Kind | Divergence:
    """Say which marginals a plan must have."""
    name = str(unbalanced_type).lower()
    if name == "semirelaxed":
        return "semirelaxed"
    if unbalanced is None:
        if name == "partial":
            warn_user(
                "`unbalanced=None` is the balanced problem whatever `unbalanced_type` says; pass "
                "the mass that is to move.",
                TorchGWWarning,
            )
        return "balanced"
    if name not in ("kl", "l2", "partial"):
        raise UnsupportedError(
            f"`unbalanced_type={unbalanced_type!r}` is not solved here. Use 'KL', 'L2', "
            "'semirelaxed' or 'partial'."
        )
    both = unbalanced if isinstance(unbalanced, (tuple, list)) and name != "partial" else None
    if not all(isinstance(weight, Real) and float(weight) > 0 for weight in both or (unbalanced,)):
        raise InvalidInputError(
            f"`unbalanced` must be a positive number, the weight of a penalty or the mass that a "
            f"partial plan moves; got {unbalanced!r}."
        )
    return name  # type: ignore[return-value]


def _refuse(
    kind: Kind | Divergence,
    loss: str,
    reg: float | None,
    reg_type: str,
    n_threads: int,
    method: str | None,
) -> None:
    """Refuse arguments that torchgw has no counterpart for, with the reason."""
    if str(loss).upper() not in LOSSES:
        known = " or ".join(map(repr, LOSSES))
        raise UnsupportedError(f"`loss` must be {known}, as in POT; got {loss!r}.")
    if reg is not None and not (isinstance(reg, Real) and reg >= 0):
        raise InvalidInputError(f"`reg` must be a number, not negative; got {reg!r}.")
    if str(reg_type).lower() != "entropy":
        raise UnsupportedError(f"`reg_type` must be 'entropy'; got {reg_type!r}. Use POT.")
    if n_threads != 1:
        raise UnsupportedError(
            f"`n_threads` must be 1; got {n_threads!r}: the linear solvers have one thread."
        )
    if method not in (None, "PGD", "PPA"):
        raise UnsupportedError(f"`method` must be 'PGD', 'PPA' or None; got {method!r}.")
    if not reg and method is not None:
        raise UnsupportedError(
            f"`method={method!r}` is a choice for regularised problems. Pass `reg`, or drop it."
        )
    if kind != "balanced" and method == "PPA":
        raise UnsupportedError(
            "method='PPA' keeps to the last plan and so both of its marginals. Drop it, or "
            "`unbalanced`."
        )


def _stop(
    kind: Kind | Divergence,
    reg: float | None,
    max_iter: int | None,
    tol: float | None,
    verbose: bool,
) -> _mirror.Stop:
    """Fill in POT's limits where none are given."""
    for name, given in (("max_iter", max_iter), ("tol", tol)):
        if given is not None and not (isinstance(given, Real) and given >= 0):
            raise InvalidInputError(f"`{name}` must be a number, not negative; got {given!r}.")
    if kind in ("kl", "l2"):
        limits: tuple[int, float] = (1000 if reg else 100, 1e-7)
    elif kind == "partial":
        limits = (1000, 1e-7)
    else:
        limits = (1000 if reg else 10_000, 1e-9)
    steps, change = limits
    return _mirror.Stop(
        steps if max_iter is None else int(max_iter), change if tol is None else tol, verbose
    )


def _exact(problem: Problem, kind: Kind, mass: Any, start: Any, stop: _mirror.Stop) -> Found:
    """Take conditional gradient steps."""
    absolute = 0.0 if kind == "partial" else stop.tol
    found = exact(
        problem, kind, start, mass, max_iter=stop.max_iter, tol_rel=stop.tol, tol_abs=absolute,
        verbose=stop.verbose,
    )  # fmt: skip
    linear, value = float(np.sum(problem.linear * found.plan)), found.told[-1]
    parts, log = (linear, value - linear), {"loss": found.told}
    return Found(found.plan, *parts, value, found.potentials, found.converged, log)


def _regularised(
    problem: Problem,
    kind: Kind,
    reg: float,
    method: str | None,
    mass: Any,
    start: Any,
    stop: _mirror.Stop,
) -> Found:
    """Take steps with entropy where both weights are positive."""

    def linear_problem(part: Problem, _: Array) -> _mirror.Ended:
        assert part.M is not None
        solver = _mirror.Entropic(part.p, part.q, reg, most=10 * stop.max_iter)
        plan = solver.plan(solver(part.M, stop.tol))
        return _mirror.Ended(plan, [], solver.potentials, solver.converged)

    if kind == "balanced" and problem.alpha == 0:
        first = read_start(problem, start, exact=False)
        return _with_entropy(problem, reg, on_positive(problem, first, linear_problem))
    found = entropic(problem, kind, start, reg, stop, mass, sharp=method == "PPA")
    return _with_entropy(problem, reg, found)


def _semirelaxed(problem: Problem, reg: float, start: Any, stop: _mirror.Stop) -> Found:
    """Take POT's proximal steps, which are in closed form where columns are free."""
    shape = len(problem.p), len(problem.q)
    if start is not None and not isinstance(start, str):
        start = problem.arrays.read("G0", start, shape)
    call = {
        "p": problem.p, "loss_fun": problem.loss, "symmetric": problem.term.symmetric,
        "epsilon": reg, "G0": start, "max_iter": stop.max_iter, "tol": stop.tol,
        "verbose": stop.verbose, "log": True,
    }  # fmt: skip
    if problem.M is None:
        solve = handed("entropic_semirelaxed_gromov_wasserstein")
        plan, log = solve(problem.C1, problem.C2, **call)
    else:
        solve = handed("entropic_semirelaxed_fused_gromov_wasserstein")
        plan, log = solve(problem.M, problem.C1, problem.C2, alpha=problem.alpha, **call)
    errors = [float(error) for error in log["err"]]
    converged = bool(errors and errors[-1] <= stop.tol)
    return _with_entropy(problem, reg, _mirror.Ended(plan, errors, None, converged))


def _with_entropy(problem: Problem, reg: float, ended: _mirror.Ended) -> Found:
    """Evaluate where steps have ended, with the entropy as POT counts it."""
    plan, errors, potentials, converged = ended
    linear, quadratic = problem.parts(plan)
    value = linear + quadratic + reg * float(xlogy(plan, plan).sum())
    return Found(plan, linear, quadratic, value, potentials, converged, {"err": errors})


def _penalised(
    kind: Divergence,
    given: dict[str, Any],
    loss: str,
    reg: float,
    unbalanced: Any,
    start: Any,
    stop: _mirror.Stop,
) -> OTResult:
    """Have POT solve a problem with penalised marginals, whose weights it counts otherwise."""
    alpha, M, tracked = check_share(given["alpha"]), given["M"], needs_gradients(*given.values())
    if needs_gradients(given["alpha"]):
        raise UnsupportedError("`alpha` has no gradients with penalised marginals: detach it.")
    if alpha == 0 and M is None:
        raise InvalidInputError("`alpha=0` leaves only the linear cost: pass `M`.")
    if alpha == 0 and tracked:
        raise UnsupportedError("`alpha=0` with penalised marginals has no gradients: use ot.solve.")
    if kind == "l2" and tracked:
        raise UnsupportedError(
            "Gradients of values with L2 penalties are not implemented; detach the inputs, or "
            "use unbalanced_type='KL'."
        )
    if loss != "square_loss":
        warn_user(
            "Problems with penalties are solved by POT, by the loss 'L2' whatever `loss` says; "
            "torchgw.solve(D_X=, D_Y=, unbalanced=, loss='kl') has the other.",
            TorchGWWarning,
        )
    problem = read_problem(
        given["C1"], given["C2"], given["p"], given["q"], "square_loss", None, M=M, alpha=alpha,
        also=(start,), names=_NAMES,
    )  # fmt: skip
    arrays, p, q = problem.arrays, problem.p, problem.q
    first = None if start is None else arrays.read("G0", start, (len(p), len(q)))
    both = unbalanced if isinstance(unbalanced, (tuple, list)) else (unbalanced, unbalanced)
    if alpha == 0:
        with warnings.catch_warnings():
            # of SciPy, to POT
            warnings.simplefilter("ignore", DeprecationWarning)
            made = handed("solve", "ot")(
                problem.M, p, q, reg, reg_type="entropy", unbalanced=both, unbalanced_type=kind,
                max_iter=max(stop.max_iter, 1000), plan_init=first, tol=stop.tol,
                verbose=stop.verbose,
            )  # fmt: skip
        found = Found(made.plan, made.value_linear, 0.0, made.value, None, True, {})
        return result_of(arrays, found, arrays.give(np.float64(made.value)))
    rho, epsilon = [float(weight) / (2 * alpha) for weight in both], reg / (2 * alpha)
    value = np.nan

    def solve(part: Problem, begin: Array) -> _mirror.Ended:
        nonlocal value
        plan, _, log = handed("fused_unbalanced_gromov_wasserstein")(
            part.C1, part.C2, part.p, part.q, rho, epsilon, kind, M=part.M, init_pi=begin, log=True,
            alpha=0 if M is None else (1 - alpha) / alpha, max_iter=stop.max_iter, tol=stop.tol,
            verbose=stop.verbose,
        )  # fmt: skip
        value, errors = alpha * float(log["fugw_cost"]), [float(error) for error in log["error"]]
        return _mirror.Ended(plan, errors, None, bool(errors and errors[-1] < stop.tol))

    solved = on_positive(problem, np.outer(p, q) if first is None else first, solve)
    plan = solved.plan
    derivatives: list[tuple[Any, Any]] = []
    if tracked:
        mass, sides = float(plan.sum()), ((p, q), (q, p))
        by_weights = []
        for weight, sums, (own, other) in zip(rho, (plan.sum(1), plan.sum(0)), sides, strict=True):
            slope = weight * (own.sum() - mass * sums / own)
            slope += epsilon * (own.sum() * other.sum() ** 2 - mass * sums / own)
            by_weights.append(2 * alpha * slope)
        slopes = *problem.slopes(plan), *by_weights, (1 - alpha) * plan
        inputs = (given[name] for name in ("C1", "C2", "p", "q", "M"))
        derivatives += zip(inputs, slopes, strict=True)
    found = Found(plan, *problem.parts(plan), value, None, solved.converged, {"err": solved.told})
    return result_of(arrays, found, arrays.value(value, derivatives))


def result_of(arrays: Arrays, found: Found, value: Any) -> OTResult:
    """Hand a plan out, with its value, as the kind of arrays that came in."""
    give = arrays.give
    pair = found.potentials
    return OTResult(
        plan=give(found.plan), value=value, value_linear=give(found.linear),
        value_quad=give(found.quadratic),
        potentials=None if pair is None else (give(pair[0]), give(pair[1])),
        status=Status.CONVERGED if found.converged else Status.OUTER_LIMIT, log=found.log,
    )  # fmt: skip
