"""Barycenters of structures and features: plans and the mean structure by turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.spatial.distance import cdist

from torchgw._errors import InvalidInputError
from torchgw.pot._arrays import Array, Arrays
from torchgw.pot._quadratic import LOSSES
from torchgw.pot.gromov._balanced import fused_gromov_wasserstein, gromov_wasserstein
from torchgw.pot.gromov._entropic import (
    entropic_fused_gromov_wasserstein,
    entropic_gromov_wasserstein,
)
from torchgw.pot.gromov._pieces import semirelaxed_start
from torchgw.pot.gromov._read import without_gradients
from torchgw.pot.gromov._semirelaxed import (
    semirelaxed_fused_gromov_wasserstein,
    semirelaxed_gromov_wasserstein,
)

__all__ = [
    "entropic_fused_gromov_barycenters",
    "entropic_gromov_barycenters",
    "fgw_barycenters",
    "gromov_barycenters",
    "semirelaxed_fgw_barycenters",
    "semirelaxed_gromov_barycenters",
    "update_barycenter_feature",
    "update_barycenter_structure",
]

_CRITERIA = ("barycenter", "loss")


def update_barycenter_structure(
    Ts: Any,
    Cs: Any,
    lambdas: Any,
    p: Any = None,
    loss_fun: str = "square_loss",
    target: bool = True,
    check_zeros: bool = True,
    nx: Any = None,
) -> Any:
    """Compute the best structure at given plans, as ``ot.gromov.update_barycenter_structure``.

    Returns
    -------
    C : array of shape (N, N)
    """
    arrays = Arrays(*Ts, *Cs, p)
    plans = [arrays.read("Ts", plan) for plan in Ts]
    structures = [arrays.read("Cs", table) for table in Cs]
    weights = None if p is None else arrays.read("p", p)
    shares = _shares(lambdas, len(plans))
    return arrays.give(_structure(plans, structures, shares, weights, loss_fun, target))


def update_barycenter_feature(
    Ts: Any,
    Ys: Any,
    lambdas: Any,
    p: Any = None,
    loss_fun: str = "square_loss",
    target: bool = True,
    check_zeros: bool = True,
    nx: Any = None,
) -> Any:
    """Compute the best features at given plans, as ``ot.gromov.update_barycenter_feature``.

    Returns
    -------
    X : array of shape (N, d)
    """
    if loss_fun != "square_loss":
        raise InvalidInputError(f"`loss_fun` must be 'square_loss'; got {loss_fun!r}.")
    arrays = Arrays(*Ts, *Ys, p)
    plans = [arrays.read("Ts", plan) for plan in Ts]
    features = [arrays.read("Ys", table) for table in Ys]
    weights = None if p is None else arrays.read("p", p)
    return arrays.give(_features(plans, features, _shares(lambdas, len(plans)), weights, target))


def gromov_barycenters(
    N: int,
    Cs: Any,
    ps: Any = None,
    p: Any = None,
    lambdas: Any = None,
    loss_fun: str = "square_loss",
    symmetric: bool | None = True,
    armijo: bool = False,
    max_iter: float = 1000,
    tol: float = 1e-9,
    stop_criterion: str = "barycenter",
    warmstartT: bool = False,
    verbose: bool = False,
    log: bool = False,
    init_C: Any = None,
    random_state: Any = None,
    **kwargs: Any,
) -> Any:
    """Compute a structure between several, as ``ot.gromov.gromov_barycenters``.

    Returns
    -------
    C : array of shape (N, N)
    log : dict, only with ``log=True``
        Plans ``T``, ``p``, ``err`` of each turn, and ``loss`` with ``stop_criterion="loss"``.
    """
    asked = _Asked(N, Cs, None, ps, p, lambdas, loss_fun, stop_criterion, max_iter, tol)

    def solve(C: Array, other: Array, weights: Array, start: Any, M: Array | None) -> Any:
        return gromov_wasserstein(
            C,
            other,
            known.p,
            weights,
            loss_fun,
            symmetric,
            True,
            armijo,
            start,
            max_iter,
            1e-5,
            0.0,
            verbose=verbose,
            **kwargs,
        )

    known = _read(asked)
    C = _first_structure(known, init_C, random_state, scaled=True)
    found = _turns(known, asked, C, None, solve, warmstartT)
    return _answer(known, found, asked, log)


def fgw_barycenters(
    N: int,
    Ys: Any,
    Cs: Any,
    ps: Any = None,
    lambdas: Any = None,
    alpha: float = 0.5,
    fixed_structure: bool = False,
    fixed_features: bool = False,
    p: Any = None,
    loss_fun: str = "square_loss",
    armijo: bool = False,
    symmetric: bool | None = True,
    max_iter: float = 100,
    tol: float = 1e-9,
    stop_criterion: str = "barycenter",
    warmstartT: bool = False,
    verbose: bool = False,
    log: bool = False,
    init_C: Any = None,
    init_X: Any = None,
    random_state: Any = None,
    **kwargs: Any,
) -> Any:
    """Compute a structure with features between several, as ``ot.gromov.fgw_barycenters``.

    Returns
    -------
    X, C : arrays of shapes (N, d) and (N, N)
    log : dict, only with ``log=True``
        Plans ``T``, costs ``Ms``, ``p``, and ``err_feature``, ``err_structure`` and ``Ts_iter``, or
        ``loss`` and ``err_rel_loss`` with ``stop_criterion="loss"``.
    """
    asked = _Asked(N, Cs, Ys, ps, p, lambdas, loss_fun, stop_criterion, max_iter, tol)

    def solve(C: Array, other: Array, weights: Array, start: Any, M: Array | None) -> Any:
        return fused_gromov_wasserstein(
            M,
            C,
            other,
            known.p,
            weights,
            loss_fun,
            symmetric,
            alpha,
            armijo,
            start,
            True,
            max_iter,
            1e-5,
            0.0,
            verbose=verbose,
            **kwargs,
        )

    known = _read(asked)
    fixed = fixed_structure, fixed_features
    C, X = _first_pair(known, fixed, init_C, init_X, "init_X", random_state)
    found = _turns(known, asked, C, X, solve, warmstartT, fixed)
    return _answer(known, found, asked, log)


def entropic_gromov_barycenters(
    N: int,
    Cs: Any,
    ps: Any = None,
    p: Any = None,
    lambdas: Any = None,
    loss_fun: str = "square_loss",
    epsilon: float = 0.1,
    symmetric: bool | None = True,
    max_iter: float = 1000,
    tol: float = 1e-9,
    stop_criterion: str = "barycenter",
    warmstartT: bool = False,
    verbose: bool = False,
    log: bool = False,
    init_C: Any = None,
    random_state: Any = None,
    **kwargs: Any,
) -> Any:
    """Compute a structure with entropic plans, as ``ot.gromov.entropic_gromov_barycenters``.

    Returns
    -------
    C : array of shape (N, N)
    log : dict, only with ``log=True``
        That of :func:`gromov_barycenters`.
    """
    asked = _Asked(N, Cs, None, ps, p, lambdas, loss_fun, stop_criterion, max_iter, tol)

    def solve(C: Array, other: Array, weights: Array, start: Any, M: Array | None) -> Any:
        return entropic_gromov_wasserstein(
            C,
            other,
            known.p,
            weights,
            loss_fun,
            epsilon,
            symmetric,
            start,
            max_iter,
            1e-4,
            verbose=verbose,
            log=True,
            **kwargs,
        )

    known = _read(asked)
    C = _first_structure(known, init_C, random_state, scaled=True)
    found = _turns(known, asked, C, None, solve, warmstartT)
    return _answer(known, found, asked, log)


def entropic_fused_gromov_barycenters(
    N: int,
    Ys: Any,
    Cs: Any,
    ps: Any = None,
    p: Any = None,
    lambdas: Any = None,
    loss_fun: str = "square_loss",
    epsilon: float = 0.1,
    symmetric: bool | None = True,
    alpha: float = 0.5,
    max_iter: float = 1000,
    tol: float = 1e-9,
    stop_criterion: str = "barycenter",
    warmstartT: bool = False,
    verbose: bool = False,
    log: bool = False,
    init_C: Any = None,
    init_Y: Any = None,
    fixed_structure: bool = False,
    fixed_features: bool = False,
    random_state: Any = None,
    **kwargs: Any,
) -> Any:
    """Compute both with entropic plans, as ``ot.gromov.entropic_fused_gromov_barycenters``.

    POT 0.9.7 returns the features that it began with; here they are those of the last turn.

    Returns
    -------
    Y, C : arrays of shapes (N, d) and (N, N)
    log : dict, only with ``log=True``
        That of :func:`fgw_barycenters`.
    """
    asked = _Asked(N, Cs, Ys, ps, p, lambdas, loss_fun, stop_criterion, max_iter, tol)

    def solve(C: Array, other: Array, weights: Array, start: Any, M: Array | None) -> Any:
        return entropic_fused_gromov_wasserstein(
            M,
            C,
            other,
            known.p,
            weights,
            loss_fun,
            epsilon,
            symmetric,
            alpha,
            start,
            max_iter,
            1e-4,
            verbose=verbose,
            log=True,
            **kwargs,
        )

    known = _read(asked)
    fixed = fixed_structure, fixed_features
    C, Y = _first_pair(known, fixed, init_C, init_Y, "init_Y", random_state)
    found = _turns(known, asked, C, Y, solve, warmstartT, fixed)
    return _answer(known, found, asked, log)


def semirelaxed_gromov_barycenters(
    N: int,
    Cs: Any,
    ps: Any = None,
    lambdas: Any = None,
    loss_fun: str = "square_loss",
    symmetric: bool | None = True,
    max_iter: float = 1000,
    tol: float = 1e-9,
    stop_criterion: str = "barycenter",
    warmstartT: bool = False,
    verbose: bool = False,
    log: bool = False,
    init_C: Any = None,
    G0: str = "product",
    random_state: Any = None,
    **kwargs: Any,
) -> Any:
    """Compute a structure with free weights, as ``ot.gromov.semirelaxed_gromov_barycenters``.

    Returns
    -------
    C : array of shape (N, N)
    log : dict, only with ``log=True``
        Plans ``T``, weights ``p`` of shape (S, N), ``err`` of each turn, and ``loss``.
    """
    asked = _Asked(N, Cs, None, ps, None, lambdas, loss_fun, stop_criterion, max_iter, tol)

    def solve(C: Array, other: Array, weights: Array, start: Any, M: Array | None) -> Any:
        return semirelaxed_gromov_wasserstein(
            other,
            C,
            weights,
            loss_fun,
            symmetric,
            True,
            G0 if start is None else start,
            max_iter,
            tol,
            0.0,
            verbose=verbose,
            **kwargs,
        )

    known = _read(asked)
    C, plans = _free_structure(known, asked, init_C, G0, random_state, symmetric)
    found = _turns(known, asked, C, None, solve, warmstartT, free=True, plans=plans)
    return _answer(known, found, asked, log)


def semirelaxed_fgw_barycenters(
    N: int,
    Ys: Any,
    Cs: Any,
    ps: Any = None,
    lambdas: Any = None,
    alpha: float = 0.5,
    fixed_structure: bool = False,
    fixed_features: bool = False,
    p: Any = None,
    loss_fun: str = "square_loss",
    symmetric: bool | None = True,
    max_iter: float = 100,
    tol: float = 1e-9,
    stop_criterion: str = "barycenter",
    warmstartT: bool = False,
    verbose: bool = False,
    log: bool = False,
    init_C: Any = None,
    init_X: Any = None,
    G0: str = "product",
    random_state: Any = None,
    **kwargs: Any,
) -> Any:
    """Compute both with free weights, as ``ot.gromov.semirelaxed_fgw_barycenters``.

    Returns
    -------
    X, C : arrays of shapes (N, d) and (N, N)
    log : dict, only with ``log=True``
        Plans ``T``, costs ``Ms``, weights ``p`` of shape (S, N), ``err_feature`` and
        ``err_structure``, or ``loss`` and ``err_rel_loss``.
    """
    asked = _Asked(N, Cs, Ys, ps, None, lambdas, loss_fun, stop_criterion, max_iter, tol)

    def solve(C: Array, other: Array, weights: Array, start: Any, M: Array | None) -> Any:
        return semirelaxed_fused_gromov_wasserstein(
            None if M is None else M.T,
            other,
            C,
            weights,
            loss_fun,
            symmetric,
            alpha,
            G0 if start is None else start,
            True,
            max_iter,
            tol,
            0.0,
            verbose=verbose,
            **kwargs,
        )

    known = _read(asked)
    _check_fixed(fixed_structure, init_C, "init_C")
    _check_fixed(fixed_features, init_X, "init_X")
    assert known.features is not None
    X = None
    if init_X is not None:
        X = known.arrays.read("init_X", init_X)
    elif G0 not in ("product", "random_product", "random"):
        X = _centres(np.concatenate(known.features), N, random_state)
    C, plans = _free_structure(known, asked, init_C, G0, random_state, symmetric, X, alpha)
    if X is None:
        X = _features(plans, known.features, known.shares, None, True)
    fixed = fixed_structure, fixed_features
    found = _turns(known, asked, C, X, solve, warmstartT, fixed, free=True, plans=plans)
    return _answer(known, found, asked, log)


class _Asked(NamedTuple):
    """What the six functions share."""

    N: int
    Cs: Any
    Ys: Any
    ps: Any
    p: Any
    lambdas: Any
    loss: str
    criterion: str
    max_iter: float
    tol: float


class _Known(NamedTuple):
    """The same, read."""

    arrays: Arrays
    structures: list[Array]
    features: list[Array] | None
    weights: list[Array]
    p: Array
    shares: list[float]


class _Found(NamedTuple):
    """Where the turns ended."""

    C: Array
    X: Array | None
    plans: list[Array]
    p: Array
    costs: list[Array] | None
    log: dict[str, Any]


def _read(asked: _Asked) -> _Known:
    if asked.criterion not in _CRITERIA:
        raise InvalidInputError(
            f"Unknown `stop_criterion='{asked.criterion}'`. Use one of: {_CRITERIA}."
        )
    if asked.loss not in LOSSES:
        raise InvalidInputError(f"Unknown `loss_fun='{asked.loss}'`. Use one of: {LOSSES}.")
    for name, tables in (("Cs", asked.Cs), ("Ys", asked.Ys), ("ps", asked.ps)):
        if tables is not None and isinstance(tables[0], list):
            raise InvalidInputError(f"`{name}` must be a list of arrays; got lists.")
    without_gradients("gromov_barycenters", asked.Cs, asked.Ys or (), asked.ps or ())
    arrays = Arrays(*asked.Cs, *(asked.Ys or ()), *(asked.ps or ()), asked.p)
    structures = [arrays.table(f"Cs[{k}]", table) for k, table in enumerate(asked.Cs)]
    given = asked.ps if asked.ps is not None else [None] * len(structures)
    return _Known(
        arrays,
        structures,
        None if asked.Ys is None else [arrays.read("Ys", table) for table in asked.Ys],
        [
            arrays.weights(f"ps[{k}]", weight, len(table))
            for k, (weight, table) in enumerate(zip(given, structures, strict=True))
        ],
        arrays.weights("p", asked.p, asked.N),
        _shares(asked.lambdas, len(structures)),
    )


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
    plans: list[Array],
    features: list[Array],
    shares: list[float],
    p: Array | None,
    target: bool,
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
    result: Array = whole * _inverse(mass)[:, None]
    return result


def _inverse(mass: Array) -> Array:
    """Invert masses; those of zero, of points that are not in use, become one."""
    return np.divide(1.0, mass, out=np.ones_like(mass), where=mass > 0)


def _first_structure(known: _Known, given: Any, random_state: Any, *, scaled: bool) -> Array:
    """Read the first structure, or draw points in the plane as POT does."""
    if given is not None:
        return known.arrays.table("init_C", given)
    random = random_state
    if not isinstance(random, np.random.RandomState):
        # the generator of POT, so that a seed means the same there and here
        random = np.random.RandomState(random_state)  # noqa: NPY002
    points = random.randn(len(known.p), 2)
    distances: Array = cdist(points, points, "sqeuclidean")
    return distances / distances.max() if scaled else distances


def _first_pair(
    known: _Known,
    fixed: tuple[bool, bool],
    init_C: Any,
    init_X: Any,
    name: str,
    random_state: Any,
) -> tuple[Array, Array]:
    _check_fixed(fixed[0], init_C, "init_C")
    _check_fixed(fixed[1], init_X, name)
    assert known.features is not None
    C = _first_structure(known, init_C, random_state, scaled=False)
    if init_X is not None:
        return C, known.arrays.read(name, init_X)
    return C, np.zeros((len(known.p), known.features[0].shape[1]))


def _check_fixed(fixed: bool, given: Any, name: str) -> None:
    if fixed and given is None:
        message = f"What is fixed must be given: pass `{name}`."
        try:
            from ot.utils import UndefinedParameter
        except ImportError:
            raise InvalidInputError(message) from None

        # callers may catch what POT raises
        class MissingStartError(InvalidInputError, UndefinedParameter):  # type: ignore[misc]
            pass

        raise MissingStartError(message)


def _free_structure(
    known: _Known,
    asked: _Asked,
    init_C: Any,
    method: str,
    random_state: Any,
    symmetric: bool | None,
    X: Array | None = None,
    alpha: float = 1.0,
) -> tuple[Array, list[Array]]:
    """Begin a barycenter with free weights: plans by name, and the structure that they give."""
    given = None if init_C is None else known.arrays.table("init_C", init_C)
    simple = method in ("product", "random_product", "random")
    costs: list[Array | None] = [None] * len(known.structures)
    if X is not None and known.features is not None and not simple:
        costs = [cdist(table, X, "sqeuclidean") for table in known.features]
    blank = np.zeros((asked.N, asked.N))

    def start(k: int, C: Array, use_target: bool) -> Array:
        return semirelaxed_start(
            known.structures[k],
            C,
            known.weights[k],
            costs[k],
            alpha,
            method,
            random_state,
            use_target=use_target,
        )

    count = range(len(known.structures))
    if given is not None:
        return given, [start(k, given, not simple) for k in count]
    # larger graphs are partitioned, and smaller ones then fitted to what that gives
    larger = [k for k in count if simple or len(known.structures[k]) > asked.N]
    plans = {k: start(k, blank, False) for k in larger}
    if larger:
        kept = [known.shares[k] / sum(known.shares[j] for j in larger) for k in larger]
        tables = [known.structures[k] for k in larger]
        blank = _structure([plans[k] for k in larger], tables, kept, None, asked.loss, True)
    plans |= {k: start(k, blank, False) for k in count if k not in plans}
    ordered = [plans[k] for k in count]
    C = _structure(ordered, known.structures, known.shares, None, asked.loss, True)
    if method in ("product", "random_product"):
        # all parts are alike otherwise
        random = np.random.RandomState(random_state)  # noqa: NPY002
        noise = random.uniform(-0.01, 0.01, size=C.shape)
        C = C + ((noise + noise.T) / 2 if symmetric else noise)
        if asked.loss == "kl_loss":
            C = np.maximum(C, 0)
    return C, ordered


def _centres(features: Array, count: int, random_state: Any) -> Array:
    from sklearn.cluster import KMeans

    model = KMeans(n_clusters=count, random_state=random_state, n_init=1)
    centres: Array = model.fit(features).cluster_centers_
    return centres


def _turns(
    known: _Known,
    asked: _Asked,
    C: Array,
    X: Array | None,
    solve: Callable[[Array, Array, Array, Any, Array | None], Any],
    warm: bool,
    fixed: tuple[bool, bool] = (False, False),
    *,
    free: bool = False,
    plans: list[Array] | None = None,
) -> _Found:
    """Update plans, then structure and features, until these or the loss stay."""
    count = len(known.structures)
    starts: list[Any] = list(plans) if plans is not None and warm else [None] * count
    by_loss, p, loss = asked.criterion == "loss", known.p, 1e15
    log: dict[str, list[Any]] = {"err": [], "loss": [], "err_rel_loss": []}
    log |= {"err_feature": [], "err_structure": [], "Ts_iter": []}
    costs = None
    for _ in range(int(asked.max_iter)):
        if X is not None and known.features is not None:
            costs = [cdist(X, table, "sqeuclidean") for table in known.features]
        solved = [
            solve(C, table, weight, start, None if costs is None else costs[k])
            for k, (table, weight, start) in enumerate(
                zip(known.structures, known.weights, starts, strict=True)
            )
        ]
        plans = [plan for plan, _ in solved]
        starts = list(plans) if warm else starts
        if free:
            p = np.stack([plan.sum(0) for plan in plans])
        old_C, old_X, old_loss = C, X, loss
        loss = sum(float(_distance(more)) for _, more in solved)
        if X is not None and known.features is not None and not fixed[1]:
            X = _features(plans, known.features, known.shares, p, free)
        if not fixed[0]:
            C = _structure(plans, known.structures, known.shares, p, asked.loss, free)
        of_features = 0.0 if X is None or old_X is None else float(np.linalg.norm(X - old_X))
        of_structure = float(np.linalg.norm(C - old_C))
        relative = abs(loss - old_loss) / old_loss if old_loss != 0 else np.nan
        log["loss"].append(loss)
        log["err_rel_loss"].append(relative)
        log["err_feature"].append(of_features)
        log["err_structure"].append(of_structure)
        log["err"].append(relative if by_loss else of_structure)
        log["Ts_iter"].append(plans)
        if by_loss:
            done = relative <= asked.tol
        elif X is None:
            done = of_structure <= asked.tol
        else:
            # what is fixed does not count
            moved = [of_structure] * (not fixed[0]) + [of_features] * (not fixed[1])
            done = not moved or min(moved) <= asked.tol
        if done or all(fixed):
            break
    assert plans is not None
    if X is not None and known.features is not None:
        costs = [cdist(X, table, "sqeuclidean") for table in known.features]
    return _Found(C, X, plans, p, costs, log)


def _distance(log: dict[str, Any]) -> Any:
    """Find the value in the log of a solve."""
    names = ("gw_dist", "fgw_dist", "srgw_dist", "srfgw_dist")
    return next(log[name] for name in names if name in log)


def _answer(known: _Known, found: _Found, asked: _Asked, log: bool) -> Any:
    """Hand out the barycenter, with what else is known if asked for."""
    give = known.arrays.give
    C = give(found.C)
    result = (C,) if found.X is None else (give(found.X), C)
    if not log:
        return C if found.X is None else result
    by_loss = asked.criterion == "loss"
    more: dict[str, Any] = {"T": [give(plan) for plan in found.plans], "p": give(found.p)}
    if found.X is None:
        more["err"] = [give(error) for error in found.log["err"]]
        if by_loss:
            more["loss"] = found.log["loss"]
    else:
        assert found.costs is not None
        more["Ms"] = [give(cost) for cost in found.costs]
        if by_loss:
            more |= {name: found.log[name] for name in ("loss", "err_rel_loss")}
        else:
            more |= {name: found.log[name] for name in ("err_feature", "err_structure")}
            more["Ts_iter"] = [[give(plan) for plan in turn] for turn in found.log["Ts_iter"]]
    return (*result, more)
