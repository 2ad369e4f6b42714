"""Barycenters of structures and features with entropic plans: plans and the means by turns."""

from collections import defaultdict
from typing import Any

import numpy as np
from scipy.spatial.distance import cdist

from torchgw._errors import InvalidInputError
from torchgw.pot._arrays import Array, Arrays, generator
from torchgw.pot._quadratic import LOSSES
from torchgw.pot.gromov._plans import entropic_fused_gromov_wasserstein, entropic_gromov_wasserstein
from torchgw.pot.gromov._read import (
    Call,
    check_lengths,
    check_share,
    read_features,
    takes,
    without_gradients,
)

_CRITERIA = ("barycenter", "loss")


def _answer(call: Call) -> Any:
    """Update plans, then structure and features, until these or the loss stay."""
    arrays, structures, features, weights, p = _read(call)
    C, X = _first(call, arrays, features)
    count, fused = len(structures), features is not None
    shares = [1 / count] * count if call.lambdas is None else [float(one) for one in call.lambdas]
    fixed = call.get("fixed_structure", False), call.get("fixed_features", False)
    loss, plans = 1e15, list[Array]()
    starts: list[Any] = [None] * count
    given: list[Any] = starts if features is None else features
    log = defaultdict[str, list[Any]](list)
    for _ in range(call.max_iter):
        solved = [
            _solve(call, C, p, table, weight, start, None if Y is None else (X, Y))
            for table, weight, start, Y in zip(structures, weights, starts, given, strict=True)
        ]
        plans = [plan for plan, _ in solved]
        starts = plans if call.warmstartT else starts
        before, loss = loss, sum(value for _, value in solved)
        relative = abs(loss - before) / before if before != 0 else np.nan
        moved = []
        if features is not None and not fixed[1]:
            old, X = X, _mean(plans, features, shares) / _divisor(p)[:, None]
            moved.append(float(np.linalg.norm(X - old)))
        log["err_feature"].append(moved[0] if moved else 0.0)
        if not fixed[0]:
            old, C = C, _structure(plans, structures, shares, p, call.loss_fun)
            moved.append(float(np.linalg.norm(C - old)))
        log["err_structure"].append(moved[-1] if not fixed[0] else 0.0)
        log["loss"].append(loss)
        log["err_rel_loss"].append(relative)
        log["Ts_iter"].append([arrays.give(plan) for plan in plans])
        watched = relative if call.stop_criterion == "loss" else min(moved, default=0.0)
        if all(fixed) or watched <= call.tol:
            break
    found = (arrays.give(X), arrays.give(C)) if fused else arrays.give(C)
    if not call.log:
        return found
    more = {"T": [arrays.give(plan) for plan in plans], "p": arrays.give(p)}
    by_loss = call.stop_criterion == "loss"
    if features is not None:
        more["Ms"] = [arrays.give(cdist(X, Y, "sqeuclidean")) for Y in features]
        names = ("loss", "err_rel_loss") if by_loss else ("err_feature", "err_structure", "Ts_iter")
        return *found, more | {name: log[name] for name in names}
    more["err"] = [arrays.give(one) for one in log["err_rel_loss" if by_loss else "err_structure"]]
    return found, more | ({"loss": log["loss"]} if by_loss else {})


@takes(_answer)
def entropic_gromov_barycenters(
    N: int, Cs: Any, ps: Any = None, p: Any = None, lambdas: Any = None,
    loss_fun: str = "square_loss", epsilon: float = 0.1, symmetric: bool | None = True,
    max_iter: int = 1000, tol: float = 1e-9, stop_criterion: str = "barycenter",
    warmstartT: bool = False, verbose: bool = False, log: bool = False, init_C: Any = None,
    random_state: Any = None, **kwargs: Any,
) -> Any:  # fmt: skip
    """Compute a structure with entropic plans, as ``ot.gromov.entropic_gromov_barycenters``.

    Returns
    -------
    C : array of shape (N, N)
    log : dict, only with log=True
        ``T``, plans from the barycenter to each structure, ``p``, and ``err`` of each turn.
    """


@takes(_answer)
def entropic_fused_gromov_barycenters(
    N: int, Ys: Any, Cs: Any, ps: Any = None, p: Any = None, lambdas: Any = None,
    loss_fun: str = "square_loss", epsilon: float = 0.1, symmetric: bool | None = True,
    alpha: float = 0.5, max_iter: int = 1000, tol: float = 1e-9,
    stop_criterion: str = "barycenter", warmstartT: bool = False, verbose: bool = False,
    log: bool = False, init_C: Any = None, init_Y: Any = None, fixed_structure: bool = False,
    fixed_features: bool = False, random_state: Any = None, **kwargs: Any,
) -> Any:  # fmt: skip
    """Compute both with entropic plans, as ``ot.gromov.entropic_fused_gromov_barycenters``.

    POT 0.9.7 returns the features that it began with; here they are those of the last turn.

    Returns
    -------
    Y, C : arrays of shapes (N, d) and (N, N)
    log : dict, only with log=True
        Also ``Ms``, costs between the features, and the changes or the loss of each turn.
    """


def _solve(
    call: Call, C: Array, p: Array, table: Array, weight: Array, start: Any, features: Any
) -> tuple[Array, float]:
    """Find the plan from the barycenter to a structure, and its value."""
    names = ("loss_fun", "symmetric", "max_iter", "verbose", "epsilon")
    shared = {name: call.get(name) for name in names} | {"tol": 1e-4, "log": True, "G0": start}
    # a name that is given twice is an error, as in POT
    if features is None:
        plan, log = entropic_gromov_wasserstein(C, table, p, weight, **shared, **call.kwargs)
        return plan, float(log["gw_dist"])
    plan, log = entropic_fused_gromov_wasserstein(
        cdist(*features, "sqeuclidean"), C, table, p, weight, alpha=call.alpha, **shared,
        **call.kwargs,
    )  # fmt: skip
    return plan, float(log["fgw_dist"])


def _read(call: Call) -> tuple[Arrays, list[Array], list[Array] | None, list[Array], Array]:
    """Read structures, features, weights of both, and check what else a call has."""
    Cs, Ys, ps, p = call.Cs, call.get("Ys"), call.ps, call.p
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
    without_gradients(call.function, Cs, Ys or (), ps or ())
    arrays = Arrays(*Cs, *(Ys or ()), *(ps or ()), p)
    structures = [arrays.table(f"Cs[{k}]", table) for k, table in enumerate(Cs)]
    weights = [
        arrays.weights(f"ps[{k}]", None if ps is None else ps[k], len(table))
        for k, table in enumerate(structures)
    ]
    sizes = [len(table) for table in structures]
    features = None if Ys is None else read_features(arrays, Ys, sizes)
    check_share(call.get("alpha", 1.0))
    return arrays, structures, features, weights, arrays.weights("p", p, call.N)


def _first(call: Call, arrays: Arrays, features: list[Array] | None) -> tuple[Array, Any]:
    """Read the first structure, or draw points in the plane as POT does, and the first features."""
    for start in ("structure", "C"), ("features", "Y"):
        if call.get(f"fixed_{start[0]}") and call.get(f"init_{start[1]}") is None:
            raise _missing(f"What is fixed must be given: pass `init_{start[1]}`.")
    if call.init_C is not None:
        C = arrays.read("init_C", call.init_C, (call.N, call.N))
    else:
        points = generator(call.random_state).randn(call.N, 2)
        C = cdist(points, points, "sqeuclidean")
        C = C / C.max() if features is None else C
    if features is None:
        return C, None
    shape = call.N, features[0].shape[1]
    return C, np.zeros(shape) if call.init_Y is None else arrays.read("init_Y", call.init_Y, shape)


def _missing(message: str) -> InvalidInputError:
    """Make an error of ours, and of POT where it is installed: callers may catch what it raises."""
    try:
        from ot.utils import UndefinedParameter
    except ImportError:
        return InvalidInputError(message)

    class MissingStartError(InvalidInputError, UndefinedParameter):  # type: ignore[misc]
        pass

    return MissingStartError(message)


def _structure(
    plans: list[Array], structures: list[Array], shares: list[float], p: Array, loss: str
) -> Array:
    """Compute the structure of least loss at plans."""
    if loss == "kl_loss":
        structures = [np.log(np.maximum(table, 1e-16)) for table in structures]
    moved = [table @ plan.T for table, plan in zip(structures, plans, strict=True)]
    found = _mean(plans, moved, shares) / _divisor(np.outer(p, p))
    return np.exp(found) if loss == "kl_loss" else found


def _mean(plans: list[Array], tables: list[Array], shares: list[float]) -> Array:
    """Sum what plans make of tables, with weights."""
    parts = zip(shares, plans, tables, strict=True)
    return np.asarray(sum(share * (plan @ table) for share, plan, table in parts))


def _divisor(mass: Array) -> Array:
    """Replace masses of zero, of points that are not in use, by one."""
    return np.where(mass > 0, mass, 1.0)
