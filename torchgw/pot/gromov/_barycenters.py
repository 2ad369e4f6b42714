"""Barycenters of structures and features: plans and the mean structure by turns."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.spatial.distance import cdist

from torchgw._errors import InvalidInputError
from torchgw.pot._arrays import Array, Arrays, generator
from torchgw.pot._quadratic import LOSSES
from torchgw.pot.gromov._call import Call, takes
from torchgw.pot.gromov._plans import (
    entropic_fused_gromov_wasserstein,
    entropic_gromov_wasserstein,
)
from torchgw.pot.gromov._read import (
    check_lengths,
    check_share,
    read_features,
    without_gradients,
)

_CRITERIA = ("barycenter", "loss")


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


def _entropic(call: Call, function: Callable[..., Any]) -> Any:
    return _held(call, function, epsilon=call.epsilon, tol=1e-4)


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
