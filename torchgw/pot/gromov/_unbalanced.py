"""Unbalanced problems across spaces: FUGW and unbalanced co-optimal transport."""

from typing import Any, cast

from torch import Tensor

from torchgw._boundary.arrays import check_shape
from torchgw._errors import InvalidInputError, TorchGWWarning, UnsupportedError, warn_user
from torchgw.pot._arrays import Array, Arrays
from torchgw.pot._quadratic import table_slopes, transform
from torchgw.pot._unbalanced import (
    Coupling,
    Divergence,
    Penalties,
    Side,
    Unbalanced,
    across_spaces,
    cost_of,
    local_cost,
    local_parameters,
    slopes_of,
    total_cost,
)
from torchgw.pot.gromov._call import Call, takes, valued
from torchgw.pot.gromov._read import check_known

_WEIGHTS = ("wx_samp", "wx_feat", "wy_samp", "wy_feat")
_SOLVERS = ("sinkhorn", "sinkhorn_log", "mm", "lbfgsb")


_ACROSS = """X, Y, wx_samp=None, wx_feat=None, wy_samp=None, wy_feat=None, reg_marginals=10,
    epsilon=0, {} alpha=0, M_samp=None, M_feat=None, rescale_plan=True, init_pi=None,
    init_duals=None, max_iter=100, tol=1e-7, max_iter_ot=500, tol_ot=1e-7, log=False,
    verbose=False, **{}"""
_UCOOT = 'divergence="kl", unbalanced_solver="{}",'
_FUGW = """Cx, Cy, wx=None, wy=None, reg_marginals=10, epsilon=0, divergence="kl",
    unbalanced_solver="mm", alpha=0, M=None, init_duals=None, init_pi=None, max_iter=100, tol=1e-7,
    max_iter_ot=500, tol_ot=1e-7, log=False, verbose=False, **kwargs_solve"""


@takes(_ACROSS.format('reg_type="joint", ' + _UCOOT.format("sinkhorn"), "kwargs_solver"))
def fused_unbalanced_across_spaces_divergence(call: Call) -> Any:
    """Find two plans, as ``ot.gromov.fused_unbalanced_across_spaces_divergence``.

    With two entropies that differ each plan has its own; POT 0.9.7 gives both that of the features.

    Returns
    -------
    pi_samp, pi_feat : arrays of shapes (n, m) and (d, d')
    log : dict, only with ``log=True``
        ``error`` of each turn, ``duals_sample``, ``duals_feature``, ``linear_cost``,
        ``ucoot_cost``, and ``backend``, POT's if it is installed.
    """
    return _across(call)


@takes(_ACROSS.format(_UCOOT.format("mm"), "kwargs_solve"))
def unbalanced_co_optimal_transport(call: Call) -> Any:
    """Align samples and features of two tables, as ``ot.gromov.unbalanced_co_optimal_transport``.

    It returns what :func:`fused_unbalanced_across_spaces_divergence` does.
    """
    return _across(call)


unbalanced_co_optimal_transport2 = valued(
    unbalanced_co_optimal_transport,
    "with gradients to tables and weights with KL penalties",
    signature=_ACROSS.format(_UCOOT.format("sinkhorn"), "kwargs_solve"),
)


@takes(_FUGW)
def fused_unbalanced_gromov_wasserstein(call: Call) -> Any:
    """Align with penalised weights, as ``ot.gromov.fused_unbalanced_gromov_wasserstein``.

    Returns
    -------
    pi_samp, pi_feat : arrays of shape (n, m), equal up to the tolerance
    log : dict, only with ``log=True``
        ``error``, ``duals``, ``linear_cost``, ``fugw_cost`` and ``backend``.
    """
    return _fugw(call)


fused_unbalanced_gromov_wasserstein2 = valued(
    fused_unbalanced_gromov_wasserstein,
    "with gradients to Cx, Cy, M, wx and wy with KL penalties",
)


def _across(call: Call) -> Any:
    problem = Across(call)
    found = problem.solve()
    return _answer(call, problem, found, problem.log(found) if call.log else {})


def _fugw(call: Call) -> Any:
    """Solve with both sides of one kind: the two plans are one up to the tolerance."""
    problem = Across(both_sides(call))
    found = problem.solve()
    log = problem.log(found) if call.log else {}
    names = {"duals_sample": "duals", "ucoot_cost": "fugw_cost", "duals_feature": None}
    renamed = {name: log[key] for key in log if (name := names.get(key, key))}
    return _answer(call, problem, found, renamed, M=call.M)


def both_sides(call: Call) -> Call:
    """Say a problem of one plan as one of two equal plans, of samples and of features."""
    pairs: dict[str, Any] = {"reg_type": "joint", "rescale_plan": True}
    pairs |= {"X": call.Cx, "Y": call.Cy, "alpha": (call.alpha / 2, call.alpha / 2)}
    for name in ("wx", "wy", "M"):
        pairs |= {f"{name}_{side}": call.get(name) for side in ("samp", "feat")}
    pairs |= {name: (call.get(name), call.get(name)) for name in ("init_pi", "init_duals")}
    return Call(**{**vars(call), **pairs})


def _answer(
    call: Call, problem: "Across", found: Unbalanced, log: dict[Any, Any], M: Any = None
) -> Any:
    """Hand out both plans or, in functions whose name ends in 2, the objective."""
    if call.function.endswith("2"):
        value = problem.value(found, M)
        return (value, log) if call.log else value
    plans = problem.arrays.give(found.samples), problem.arrays.give(found.features)
    return (*plans, log) if call.log else plans


class Across:
    """A problem of two plans, read and checked."""

    def __init__(
        self, call: Call, names: dict[str, str] | None = None, loss: str = "square_loss"
    ) -> None:
        more = call.get("kwargs_solve", {}) | call.get("kwargs_solver", {})
        check_known(call.function, more, ())
        reg_type = call.get("reg_type", "independent")
        for name, value, known in (
            ("reg_type", reg_type, ("joint", "independent")),
            ("divergence", call.divergence, ("kl", "l2")),
        ):
            if value not in known:
                raise UnsupportedError(f"`{name}` must be one of {known}; got {value!r}.")
        self.call, self.loss = call, loss
        weights = {name: call.get(name) for name in _WEIGHTS}
        linear = {name: call.get(name) for name in ("M_samp", "M_feat")}
        self.given = call.X, call.Y, *weights.values()
        self.arrays = Arrays(*self.given, *linear.values(), names=names)
        self.X, self.Y = self.arrays.read("X", call.X), self.arrays.read("Y", call.Y)
        for name, table in (("X", self.X), ("Y", self.Y)):
            check_shape(self.arrays.called(name), table, ("n", "d"), "one row per sample")
        self.parts = transform(self.X, self.Y, loss)
        (n, d), (m, e) = self.X.shape, self.Y.shape
        read = [
            self.arrays.weights(name, value, size)
            for (name, value), size in zip(weights.items(), (n, d, m, e), strict=True)
        ]
        self.alpha = _pair("alpha", call.alpha)
        costs = []
        for (name, value), shape, share in zip(
            linear.items(), ((n, m), (d, e)), self.alpha, strict=True
        ):
            if value is None and share > 0:
                warn_user(f"`{name}` is None, so its weight `alpha` has no effect.", TorchGWWarning)
            costs.append(None if value is None else share * self.arrays.read(name, value, shape))
        self.samples = Side(read[0], read[2], costs[0])
        self.features = Side(read[1], read[3], costs[1])
        self.penalties = Penalties(
            *_pair("reg_marginals", call.reg_marginals),
            *_pair("epsilon", call.epsilon),
            cast(Divergence, call.divergence),
            cast(Coupling, reg_type),
        )

    def solve(self) -> Unbalanced:
        """Run the turns."""
        call, solver = self.call, self.call.unbalanced_solver
        if solver not in _SOLVERS:
            raise UnsupportedError(f"`unbalanced_solver` must be one of {_SOLVERS}; got {solver!r}")
        epsilons = self.penalties.epsilon_samples, self.penalties.epsilon_features
        if solver.startswith("sinkhorn") and 0 in epsilons:
            warn_user("Sinkhorn's iterations need `epsilon` > 0; 'mm' is used.", TorchGWWarning)
            solver = "mm"
        sides = self.samples, self.features
        first, second = self.starts()
        of_samples, of_features = call.init_duals if call.init_duals is not None else (None, None)
        return across_spaces(
            self.parts, *sides, self.penalties, (first, second),
            (self._duals(of_samples), self._duals(of_features)), solver=solver,
            rescale=call.rescale_plan, max_iter=call.max_iter, tol=call.tol,
            inner_max_iter=call.max_iter_ot, inner_tol=call.tol_ot, verbose=call.verbose,
        )  # fmt: skip

    def starts(self) -> tuple[Array, Array]:
        """Read the plans to start from, by default the products of the weights."""
        plans = self.call.init_pi if self.call.init_pi is not None else (None, None)
        if not isinstance(plans, (tuple, list)) or len(plans) != 2:
            raise InvalidInputError(
                "`init_pi` must be a pair of plans, of samples and of features."
            )
        sides = self.samples, self.features
        first, second = (
            side.reference
            if plan is None
            else self.arrays.read("init_pi", plan, side.reference.shape)
            for plan, side in zip(plans, sides, strict=True)
        )
        return first, second

    def _duals(self, given: Any) -> tuple[Array, Array] | None:
        if given is None or given[0] is None:
            return None
        return self.arrays.read("init_duals", given[0]), self.arrays.read("init_duals", given[1])

    def objective(self, found: Unbalanced) -> tuple[float, float]:
        """Compute the quadratic term and the objective."""
        quadratic = cost_of(self.parts, found.samples, found.features)
        sides = self.samples, self.features
        whole = total_cost(quadratic, *sides, found.samples, found.features, self.penalties)
        return quadratic, whole

    def value(self, found: Unbalanced, M: Any = None) -> Any:
        """Hand out the objective with its derivatives."""
        _, whole = self.objective(found)
        if not any(isinstance(part, Tensor) and part.requires_grad for part in (*self.given, M)):
            return self.arrays.give(whole)
        if self.penalties.divergence != "kl":
            raise UnsupportedError(
                "Gradients of values with L2 penalties are not implemented; detach the inputs, or "
                "use divergence='kl'."
            )
        plans = found.samples, found.features
        samples_x, samples_y, features_x, features_y = slopes_of(
            self.samples, self.features, *plans, self.penalties
        )
        by_tables = table_slopes(self.X, self.Y, self.loss, *plans)
        x, y, wx_samp, wx_feat, wy_samp, wy_feat = self.given
        pairs = list(zip((x, y), by_tables, strict=True))
        pairs += [(wx_samp, samples_x), (wy_samp, samples_y)]
        pairs += [(wx_feat, features_x), (wy_feat, features_y)]
        if M is not None:
            pairs += [(M, self.alpha[0] * plans[0] + self.alpha[1] * plans[1])]
        return self.arrays.value(whole, pairs)

    def log(self, found: Unbalanced) -> dict[str, Any]:
        """Collect what POT puts into its log."""
        quadratic, whole = self.objective(found)
        give = self.arrays.give
        return {
            "error": [give(error) for error in found.errors],
            "duals_sample": _given(give, found.duals_samples),
            "duals_feature": _given(give, found.duals_features),
            "linear_cost": give(quadratic),
            "ucoot_cost": give(whole),
            "backend": pots_backend(give(self.X)),
        }


def pots_backend(like: Any) -> Any:
    """Find POT's own description of a kind of arrays, if POT is installed."""
    try:
        from ot.backend import get_backend
    except ImportError:
        return None
    return get_backend(like)


def _given(give: Any, duals: tuple[Array, Array] | None) -> Any:
    return None if duals is None else (give(duals[0]), give(duals[1]))


def _pair(name: str, value: Any) -> tuple[float, float]:
    """Read a number, or one for each side."""
    both = value if isinstance(value, (tuple, list)) else (value, value)
    if len(both) == 1:
        both = (both[0], both[0])
    numbers = [float(part) for part in both]
    if len(numbers) != 2 or not all(number >= 0 for number in numbers):
        raise InvalidInputError(
            f"`{name}` must be a nonnegative number, or a pair of them; got {value!r}."
        )
    return numbers[0], numbers[1]


@takes(
    """M_linear, data, tuple_pxy_samp, tuple_pxy_feat, pi_samp, pi_feat, hyperparams, divergence,
    reg_type, nx"""
)
def fused_unbalanced_across_spaces_cost(call: Call) -> tuple[Any, Any]:
    """Compute the objective, as ``ot.gromov.fused_unbalanced_across_spaces_cost``.

    Returns
    -------
    linear_cost, ucoot_cost : float, float
    """
    _, _, X, Y = call.data
    arrays = Arrays(X, Y, call.pi_samp, call.pi_feat)
    tables = arrays.read("X", X), arrays.read("Y", Y)
    plans = arrays.read("pi_samp", call.pi_samp), arrays.read("pi_feat", call.pi_feat)
    first, second = (
        Side(
            arrays.read("weights", weights[0]),
            arrays.read("weights", weights[1]),
            None if linear is None else arrays.read("M_linear", linear),
        )
        for weights, linear in zip(
            (call.tuple_pxy_samp, call.tuple_pxy_feat), call.M_linear, strict=True
        )
    )
    quadratic = cost_of(transform(*tables, "square_loss"), *plans)
    whole = total_cost(quadratic, first, second, *plans, _penalties(call))
    return arrays.give(quadratic), arrays.give(whole)


@takes("data, pi, tuple_p, hyperparams, divergence, reg_type, nx=None")
def uot_cost_matrix(call: Call) -> Any:
    """Compute the cost of one plan at the other, as ``ot.gromov.uot_cost_matrix``."""
    _, _, X, Y, M = call.data
    arrays, penalties = Arrays(X, Y, call.pi), _penalties(call)
    side = Side(arrays.read("a", call.tuple_p[0]), arrays.read("b", call.tuple_p[1]), None)
    linear = None if M is None else arrays.read("M", M)
    parts = transform(arrays.read("X", X), arrays.read("Y", Y), "square_loss")
    plan, epsilon = arrays.read("pi", call.pi), penalties.epsilon_samples
    return arrays.give(local_cost(parts, plan, side, linear, penalties, epsilon))


@takes("pi, tuple_weights, hyperparams, reg_type, divergence, nx")
def uot_parameters_and_measures(call: Call) -> tuple[Any, Any, Any]:
    """Compute weights and penalties, as ``ot.gromov.uot_parameters_and_measures``.

    Returns
    -------
    weights : tuple of arrays, shapes (n,), (m,) and (n, m)
    reg_marginals : tuple of float
    epsilon : float
    """
    given, penalties = call.tuple_weights, _penalties(call)
    arrays = Arrays(call.pi, *given)
    side = Side(arrays.read("wx", given[0]), arrays.read("wy", given[1]), None)
    plan, epsilon = arrays.read("pi", call.pi), penalties.epsilon_samples
    weights, rho, own = local_parameters(plan, side, penalties, epsilon)
    return tuple(map(arrays.give, weights)), tuple(map(arrays.give, rho)), arrays.give(own)


def _penalties(call: Call) -> Penalties:
    """Read the penalties of both marginals, and one entropy for both plans or two."""
    rho_x, rho_y, *epsilons = map(float, call.hyperparams)
    kinds = cast(Divergence, call.divergence), cast(Coupling, call.reg_type)
    return Penalties(rho_x, rho_y, epsilons[0], epsilons[-1], *kinds)
