"""Barycenters of structures and features: plans and the mean structure by turns."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.spatial.distance import cdist

from torchgw._boundary.arrays import check_list
from torchgw._errors import InvalidInputError
from torchgw.pot._arrays import Array, Arrays, generator
from torchgw.pot._quadratic import LOSSES
from torchgw.pot.gromov._call import Call, takes
from torchgw.pot.gromov._pieces import semirelaxed_start
from torchgw.pot.gromov._plans import (
    entropic_fused_gromov_wasserstein,
    entropic_gromov_wasserstein,
    fused_gromov_wasserstein,
    gromov_wasserstein,
    semirelaxed_fused_gromov_wasserstein,
    semirelaxed_gromov_wasserstein,
)
from torchgw.pot.gromov._read import (
    EACH,
    check_lengths,
    check_share,
    read_features,
    without_gradients,
)

_CRITERIA = ("barycenter", "loss")
_SIMPLE = ("product", "random_product", "random")


@takes(
    """Ts, Cs, lambdas, p=None, loss_fun="square_loss", target=True, check_zeros=True, nx=None"""
)
def update_barycenter_structure(call: Call) -> Any:
    """Compute the best structure at given plans, as ``ot.gromov.update_barycenter_structure``.

    Returns
    -------
    C : array of shape (N, N)
    """
    arrays, plans, weights, counts = _read_update(call, "Cs")
    structures = [
        arrays.read(f"Cs[{k}]", table, (count, count))
        for k, (table, count) in enumerate(zip(call.Cs, counts, strict=True))
    ]
    shares = _shares(call.lambdas, len(plans))
    new = _structure(plans, structures, shares, weights, call.loss_fun, call.target)
    return arrays.give(new)


@takes(
    """Ts, Ys, lambdas, p=None, loss_fun="square_loss", target=True, check_zeros=True, nx=None"""
)
def update_barycenter_feature(call: Call) -> Any:
    """Compute the best features at given plans, as ``ot.gromov.update_barycenter_feature``.

    Returns
    -------
    X : array of shape (N, d)
    """
    if call.loss_fun != "square_loss":
        raise InvalidInputError(f"`loss_fun` must be 'square_loss'; got {call.loss_fun!r}.")
    arrays, plans, weights, counts = _read_update(call, "Ys")
    features = read_features(arrays, "Ys", call.Ys, counts)
    shares = _shares(call.lambdas, len(plans))
    return arrays.give(_features(plans, features, shares, weights, call.target))


def _read_update(call: Call, name: str) -> tuple[Arrays, list[Array], Array | None, list[int]]:
    """Read plans, weights of the barycenter, and how many points each structure has."""
    side = 0 if call.target else 1
    Ts, tables = (check_list(key, call.get(key), EACH) for key in ("Ts", name))
    check_lengths(Ts=Ts, **{name: tables}, lambdas=call.lambdas)
    arrays = Arrays(*Ts, *tables, call.p)
    plans = [arrays.read(f"Ts[{k}]", plan) for k, plan in enumerate(Ts)]
    shapes = [plan.shape for plan in plans]
    if any(len(shape) != 2 for shape in shapes) or len({shape[1 - side] for shape in shapes}) > 1:
        raise InvalidInputError(
            "`Ts` must be matrices between each structure and the points of one barycenter, which "
            f"are {'columns' if call.target else 'rows'}; got shapes {shapes}."
        )
    size = shapes[0][1 - side]
    known = (size,), (len(plans), size)
    weights = None if call.p is None else arrays.read("p", call.p)
    if weights is not None and weights.shape not in known:
        raise InvalidInputError(
            f"`p` must have shape {known[0]} or {known[1]}; got {weights.shape}."
        )
    return arrays, plans, weights, [shape[side] for shape in shapes]


@takes(
    """N, Cs, ps=None, p=None, lambdas=None, loss_fun="square_loss", symmetric=True, armijo=False,
    max_iter=1000, tol=1e-9, stop_criterion="barycenter", warmstartT=False, verbose=False,
    log=False, init_C=None, random_state=None, **kwargs"""
)
def gromov_barycenters(call: Call) -> Any:
    """Compute a structure between several, as ``ot.gromov.gromov_barycenters``.

    Returns
    -------
    C : array of shape (N, N)
    log : dict, only with ``log=True``
        Plans ``T``, ``p``, ``err`` of each turn, and ``loss`` with ``stop_criterion="loss"``.
    """
    return _exact(call, gromov_wasserstein)


@takes(
    """N, Ys, Cs, ps=None, lambdas=None, alpha=0.5, fixed_structure=False, fixed_features=False,
    p=None, loss_fun="square_loss", armijo=False, symmetric=True, max_iter=100, tol=1e-9,
    stop_criterion="barycenter", warmstartT=False, verbose=False, log=False, init_C=None,
    init_X=None, random_state=None, **kwargs"""
)
def fgw_barycenters(call: Call) -> Any:
    """Compute a structure with features between several, as ``ot.gromov.fgw_barycenters``.

    Returns
    -------
    X, C : arrays of shapes (N, d) and (N, N)
    log : dict, only with ``log=True``
        Plans ``T``, costs ``Ms``, ``p``, and ``err_feature``, ``err_structure`` and ``Ts_iter``, or
        ``loss`` and ``err_rel_loss`` with ``stop_criterion="loss"``.
    """
    return _exact(call, fused_gromov_wasserstein)


@takes(
    """N, Cs, ps=None, p=None, lambdas=None, loss_fun="square_loss", epsilon=0.1, symmetric=True,
    max_iter=1000, tol=1e-9, stop_criterion="barycenter", warmstartT=False, verbose=False,
    log=False, init_C=None, random_state=None, **kwargs"""
)
def entropic_gromov_barycenters(call: Call) -> Any:
    """Compute a structure with entropic plans, as ``ot.gromov.entropic_gromov_barycenters``.

    Returns
    -------
    C : array of shape (N, N)
    log : dict, only with ``log=True``
        That of :func:`gromov_barycenters`.
    """
    return _entropic(call, entropic_gromov_wasserstein)


@takes(
    """N, Ys, Cs, ps=None, p=None, lambdas=None, loss_fun="square_loss", epsilon=0.1,
    symmetric=True, alpha=0.5, max_iter=1000, tol=1e-9, stop_criterion="barycenter",
    warmstartT=False, verbose=False, log=False, init_C=None, init_Y=None, fixed_structure=False,
    fixed_features=False, random_state=None, **kwargs"""
)
def entropic_fused_gromov_barycenters(call: Call) -> Any:
    """Compute both with entropic plans, as ``ot.gromov.entropic_fused_gromov_barycenters``.

    POT 0.9.7 returns the features that it began with; here they are those of the last turn.

    Returns
    -------
    Y, C : arrays of shapes (N, d) and (N, N)
    log : dict, only with ``log=True``
        That of :func:`fgw_barycenters`.
    """
    return _entropic(call, entropic_fused_gromov_wasserstein)


@takes(
    """N, Cs, ps=None, lambdas=None, loss_fun="square_loss", symmetric=True, max_iter=1000,
    tol=1e-9, stop_criterion="barycenter", warmstartT=False, verbose=False, log=False, init_C=None,
    G0="product", random_state=None, **kwargs"""
)
def semirelaxed_gromov_barycenters(call: Call) -> Any:
    """Compute a structure with free weights, as ``ot.gromov.semirelaxed_gromov_barycenters``.

    Returns
    -------
    C : array of shape (N, N)
    log : dict, only with ``log=True``
        Plans ``T``, weights ``p`` of shape (S, N), ``err`` of each turn, and ``loss``.
    """
    known = _read(call)
    C, plans = _free_structure(call, known)
    return _turns(call, known, C, None, _free(call, semirelaxed_gromov_wasserstein), plans)


@takes(
    """N, Ys, Cs, ps=None, lambdas=None, alpha=0.5, fixed_structure=False, fixed_features=False,
    p=None, loss_fun="square_loss", symmetric=True, max_iter=100, tol=1e-9,
    stop_criterion="barycenter", warmstartT=False, verbose=False, log=False, init_C=None,
    init_X=None, G0="product", random_state=None, **kwargs"""
)
def semirelaxed_fgw_barycenters(call: Call) -> Any:
    """Compute both with free weights, as ``ot.gromov.semirelaxed_fgw_barycenters``.

    Returns
    -------
    X, C : arrays of shapes (N, d) and (N, N)
    log : dict, only with ``log=True``
        Plans ``T``, costs ``Ms``, weights ``p`` of shape (S, N), ``err_feature`` and
        ``err_structure``, or ``loss`` and ``err_rel_loss``.
    """
    call.p = None
    known = _read(call)
    _check_fixed(call)
    assert known.features is not None
    X = None
    if call.init_X is not None:
        X = known.arrays.read("init_X", call.init_X, (call.N, known.features[0].shape[1]))
    elif call.G0 not in _SIMPLE:
        from sklearn.cluster import KMeans

        model = KMeans(n_clusters=call.N, random_state=call.random_state, n_init=1)
        X = model.fit(np.concatenate(known.features)).cluster_centers_
    C, plans = _free_structure(call, known, X)
    if X is None:
        X = _features(plans, known.features, known.shares, None, True)
    return _turns(call, known, C, X, _free(call, semirelaxed_fused_gromov_wasserstein), plans)


# A function that solves a space, given its weights, its start and the costs of features beside the
# barycenter, by name.
_Solve = Callable[[Array, Array, Array, Array, Any, dict[str, Array]], Any]


def _solver(call: Call, function: Callable[..., Any], **more: Any) -> Callable[..., Any]:
    """Fix what all solves of a call share."""
    names = ("loss_fun", "symmetric", "max_iter", "verbose", "alpha")
    shared = {name: call.get(name) for name in names if name in vars(call)}
    # a name that is given twice is an error, as in POT
    return lambda **given: function(**given, log=True, **shared, **more, **call.kwargs)


def _held(call: Call, function: Callable[..., Any], **more: Any) -> Any:
    """Compute a barycenter whose points have given weights."""
    known, solve = _read(call), _solver(call, function, **more)

    def solved(C: Array, p: Array, other: Array, q: Array, G0: Any, M: dict[str, Array]) -> Any:
        return solve(C1=C, C2=other, p=p, q=q, G0=G0, **M)

    return _turns(call, known, *_first_pair(call, known), solved)


def _exact(call: Call, function: Callable[..., Any]) -> Any:
    return _held(call, function, armijo=call.armijo, tol_rel=1e-5, tol_abs=0.0)


def _entropic(call: Call, function: Callable[..., Any]) -> Any:
    return _held(call, function, epsilon=call.epsilon, tol=1e-4)


def _free(call: Call, function: Callable[..., Any]) -> _Solve:
    solve = _solver(call, function, tol_rel=call.tol, tol_abs=0.0)

    def solved(C: Array, _: Array, other: Array, q: Array, start: Any, M: dict[str, Array]) -> Any:
        first = call.G0 if start is None else start
        turned = {name: cost.T for name, cost in M.items()}
        return solve(C1=other, C2=C, p=q, G0=first, **turned)

    return solved


class _Known(NamedTuple):
    """The arguments of a call, read."""

    arrays: Arrays
    structures: list[Array]
    features: list[Array] | None
    weights: list[Array]
    p: Array
    shares: list[float]


def _read(call: Call) -> _Known:
    Cs, Ys, ps, p = call.Cs, call.get("Ys"), call.ps, call.get("p")
    if call.stop_criterion not in _CRITERIA:
        raise InvalidInputError(
            f"Unknown `stop_criterion='{call.stop_criterion}'`. Use one of: {_CRITERIA}."
        )
    if call.loss_fun not in LOSSES:
        raise InvalidInputError(f"Unknown `loss_fun='{call.loss_fun}'`. Use one of: {LOSSES}.")
    check_lengths(Cs=Cs, Ys=Ys, ps=ps, lambdas=call.lambdas)
    for name, tables in (("Cs", Cs), ("Ys", Ys), ("ps", ps)):
        if tables is not None and isinstance(tables[0], list):
            raise InvalidInputError(f"`{name}` must be a list of arrays; got lists.")
    without_gradients("gromov_barycenters", Cs, Ys or (), ps or ())
    arrays = Arrays(*Cs, *(Ys or ()), *(ps or ()), p)
    structures = [arrays.table(f"Cs[{k}]", table) for k, table in enumerate(Cs)]
    given = ps if ps is not None else [None] * len(structures)
    weights = [
        arrays.weights(f"ps[{k}]", weight, len(table))
        for k, (weight, table) in enumerate(zip(given, structures, strict=True))
    ]
    sizes = [len(table) for table in structures]
    features = None if Ys is None else read_features(arrays, "Ys", Ys, sizes)
    check_share(call.get("alpha", 1.0))
    shares = _shares(call.lambdas, len(structures))
    return _Known(arrays, structures, features, weights, arrays.weights("p", p, call.N), shares)


def _shares(lambdas: Any, count: int) -> list[float]:
    if lambdas is None:
        return [1 / count] * count
    return [float(share) for share in lambdas]


def _structure(
    plans: list[Array],
    structures: list[Array],
    shares: list[float],
    p: Array | None,
    loss: str,
    target: bool,
) -> Array:
    """Compute the minimiser over structures; plans go from or, with ``target``, to them."""
    if loss not in LOSSES:
        raise InvalidInputError(f"Unknown `loss_fun='{loss}'`. Use one of: {LOSSES}.")
    logarithm = loss == "kl_loss" and not target
    if logarithm:
        structures = [np.log(np.maximum(table, 1e-16)) for table in structures]
    seen = [plan.T if target else plan for plan in plans]
    whole = np.zeros((len(seen[0]), len(seen[0])))
    for share, plan, table in zip(shares, seen, structures, strict=True):
        whole += share * (plan @ table @ plan.T)
    if p is None:
        p = np.stack([plan.sum(1) for plan in seen])
    if p.ndim == 1:
        mass = np.outer(p, p)
    else:
        mass = sum(
            (share * np.outer(own, own) for share, own in zip(shares, p, strict=True)),
            np.zeros_like(whole),
        )
    result = whole * _inverse(mass)
    return np.exp(result) if logarithm else result


def _features(
    plans: list[Array], features: list[Array], shares: list[float], p: Array | None, target: bool
) -> Array:
    """Compute the mean features."""
    seen = [plan.T if target else plan for plan in plans]
    whole = sum(
        (share * (plan @ table) for share, plan, table in zip(shares, seen, features, strict=True)),
        np.zeros((len(seen[0]), features[0].shape[1])),
    )
    if p is None:
        p = np.stack([plan.sum(1) for plan in seen])
    mass = p if p.ndim == 1 else np.asarray(shares) @ p
    return whole * _inverse(mass)[:, None]


def _inverse(mass: Array) -> Array:
    """Invert masses; those of zero, of points that are not in use, become one."""
    return np.divide(1.0, mass, out=np.ones_like(mass), where=mass > 0)


def _first_pair(call: Call, known: _Known) -> tuple[Array, Array | None]:
    """Read the first structure, or draw points in the plane as POT does, and the first features."""
    if known.features is not None:
        _check_fixed(call)
    if call.init_C is not None:
        C = known.arrays.read("init_C", call.init_C, (call.N, call.N))
    else:
        points = generator(call.random_state).randn(len(known.p), 2)
        C = cdist(points, points, "sqeuclidean")
        C = C / C.max() if known.features is None else C
    if known.features is None:
        return C, None
    name, shape = _name_of_start(call), (call.N, known.features[0].shape[1])
    if call.get(name) is not None:
        return C, known.arrays.read(name, call.get(name), shape)
    return C, np.zeros(shape)


def _name_of_start(call: Call) -> str:
    """Find what the first features are called."""
    return "init_X" if "init_X" in vars(call) else "init_Y"


def _check_fixed(call: Call) -> None:
    """Refuse to fix what is not given."""
    starts = "init_C", _name_of_start(call)
    for fixed, start in zip((call.fixed_structure, call.fixed_features), starts, strict=True):
        if not fixed or call.get(start) is not None:
            continue
        message = f"What is fixed must be given: pass `{start}`."
        try:
            from ot.utils import UndefinedParameter
        except ImportError:
            raise InvalidInputError(message) from None

        # callers may catch what POT raises
        class MissingStartError(InvalidInputError, UndefinedParameter):  # type: ignore[misc]
            pass

        raise MissingStartError(message)


def _free_structure(call: Call, known: _Known, X: Array | None = None) -> tuple[Array, list[Array]]:
    """Begin a barycenter with free weights: plans by name, and the structure that they give."""
    N = call.N
    given = None if call.init_C is None else known.arrays.read("init_C", call.init_C, (N, N))
    method, alpha, random_state = call.G0, call.get("alpha", 1.0), call.random_state
    simple = method in _SIMPLE
    costs: list[Array | None] = [None] * len(known.structures)
    if X is not None and known.features is not None and not simple:
        costs = [cdist(table, X, "sqeuclidean") for table in known.features]
    blank = np.zeros((N, N))

    def start(k: int, C: Array, use_target: bool) -> Array:
        given = known.structures[k], C, known.weights[k], costs[k], alpha, method, random_state
        return semirelaxed_start(*given, use_target=use_target)

    count = range(len(known.structures))
    if given is not None:
        return given, [start(k, given, not simple) for k in count]
    # larger graphs are partitioned, and smaller ones then fitted to what that gives
    larger = [k for k in count if simple or len(known.structures[k]) > N]
    plans = {k: start(k, blank, False) for k in larger}
    if larger:
        kept = [known.shares[k] / sum(known.shares[j] for j in larger) for k in larger]
        tables = [known.structures[k] for k in larger]
        blank = _structure([plans[k] for k in larger], tables, kept, None, call.loss_fun, True)
    plans |= {k: start(k, blank, False) for k in count if k not in plans}
    ordered = [plans[k] for k in count]
    C = _structure(ordered, known.structures, known.shares, None, call.loss_fun, True)
    if method in ("product", "random_product"):
        # noise, without which all parts would be alike
        noise = generator(random_state).uniform(-0.01, 0.01, size=C.shape)
        C = C + ((noise + noise.T) / 2 if call.symmetric else noise)
        if call.loss_fun == "kl_loss":
            C = np.maximum(C, 0)
    return C, ordered


class _Turn(NamedTuple):
    """What one update of plans, structure and features has led to."""

    loss: float
    relative: float  # change of the loss
    of_structure: float  # norm of its change
    of_features: float
    plans: list[Array]


def _turns(
    call: Call,
    known: _Known,
    C: Array,
    X: Array | None,
    solve: _Solve,
    plans: list[Array] | None = None,
) -> Any:
    """Update plans, then structure and features, until these or the loss stay; hand them out."""
    count, warm, free = len(known.structures), call.warmstartT, plans is not None
    starts: list[Any] = list(plans) if plans is not None and warm else [None] * count
    p, loss, turns = known.p, 1e15, list[_Turn]()
    fixed = call.get("fixed_structure", False), call.get("fixed_features", False)
    costs: list[dict[str, Array]] = [{}] * count
    for _ in range(int(call.max_iter)):
        if X is not None and known.features is not None:
            costs = [{"M": cdist(X, table, "sqeuclidean")} for table in known.features]
        sides = zip(known.structures, known.weights, starts, costs, strict=True)
        solved = [solve(C, p, *side) for side in sides]
        plans = [plan for plan, _ in solved]
        starts = list(plans) if warm else starts
        if free:
            p = np.stack([plan.sum(0) for plan in plans])
        old_C, old_X, old_loss = C, X, loss
        loss = sum(float(_distance(more)) for _, more in solved)
        if X is not None and known.features is not None and not fixed[1]:
            X = _features(plans, known.features, known.shares, p, free)
        if not fixed[0]:
            C = _structure(plans, known.structures, known.shares, p, call.loss_fun, free)
        of_features = 0.0 if X is None or old_X is None else float(np.linalg.norm(X - old_X))
        relative = abs(loss - old_loss) / old_loss if old_loss != 0 else np.nan
        turns.append(_Turn(loss, relative, float(np.linalg.norm(C - old_C)), of_features, plans))
        if _is_last(call, turns[-1], fixed, fused=X is not None):
            break
    assert plans is not None
    give = known.arrays.give
    more: dict[str, Any] = {"T": [give(plan) for plan in plans], "p": give(p)}
    if X is None or known.features is None:
        more |= _log(call, turns, give)
        return (give(C), more) if call.log else give(C)
    more["Ms"] = [give(cdist(X, table, "sqeuclidean")) for table in known.features]
    more |= _fused_log(call, turns, give)
    return (give(X), give(C), more) if call.log else (give(X), give(C))


def _is_last(call: Call, turn: _Turn, fixed: tuple[bool, bool], *, fused: bool) -> bool:
    """Whether updates end, as what is watched stays or nothing may move."""
    if all(fixed):
        return True
    if call.stop_criterion == "loss":
        return bool(turn.relative <= call.tol)
    if not fused:
        return bool(turn.of_structure <= call.tol)
    # a structure or features that are fixed do not count
    moved = [turn.of_structure] * (not fixed[0]) + [turn.of_features] * (not fixed[1])
    return bool(min(moved) <= call.tol)


def _log(call: Call, turns: list[_Turn], give: Callable[[Any], Any]) -> dict[str, Any]:
    """Log updates as POT does where there are no features."""
    if call.stop_criterion == "loss":
        errors = [give(turn.relative) for turn in turns]
        return {"err": errors, "loss": [turn.loss for turn in turns]}
    return {"err": [give(turn.of_structure) for turn in turns]}


def _fused_log(call: Call, turns: list[_Turn], give: Callable[[Any], Any]) -> dict[str, Any]:
    """Log updates as POT does where there are features."""
    if call.stop_criterion == "loss":
        losses = [turn.loss for turn in turns]
        return {"loss": losses, "err_rel_loss": [turn.relative for turn in turns]}
    return {
        "err_feature": [turn.of_features for turn in turns],
        "err_structure": [turn.of_structure for turn in turns],
        "Ts_iter": [[give(plan) for plan in turn.plans] for turn in turns],
    }


def _distance(log: dict[str, Any]) -> Any:
    """Find the value in the log of a solve."""
    names = ("gw_dist", "fgw_dist", "srgw_dist", "srfgw_dist")
    return next(log[name] for name in names if name in log)
