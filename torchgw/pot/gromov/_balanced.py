"""Balanced problems without regularisation: conditional gradient from the given start."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchgw.pot._descent import Descent, descend
from torchgw.pot._vertices import transport
from torchgw.pot.gromov._read import (
    Problem,
    check_known,
    read_problem,
    read_start,
    value_of,
)

__all__ = [
    "fused_gromov_wasserstein",
    "fused_gromov_wasserstein2",
    "gromov_wasserstein",
    "gromov_wasserstein2",
]

# Further arguments of the conditional gradient steps. The linear problem has no limit of its own.
STEPS = ("verbose", "alpha_min", "alpha_max", "numItermaxEmd")


def gromov_wasserstein(
    C1: Any,
    C2: Any,
    p: Any = None,
    q: Any = None,
    loss_fun: str = "square_loss",
    symmetric: bool | None = None,
    log: bool = False,
    armijo: bool = False,
    G0: Any = None,
    max_iter: float = 1e4,
    tol_rel: float = 1e-9,
    tol_abs: float = 1e-9,
    **kwargs: Any,
) -> Any:
    """Find a Gromov-Wasserstein plan, as ``ot.gromov.gromov_wasserstein``.

    Returns
    -------
    T : array of shape (n, m)
    log : dict, only with ``log=True``
        ``loss`` of each step, ``gw_dist``, dual potentials ``u`` and ``v``.
    """
    problem, found = _solve(
        "gromov_wasserstein",
        (C1, C2, p, q, loss_fun, symmetric),
        G0,
        armijo,
        (max_iter, tol_rel, tol_abs),
        kwargs,
    )
    return _answer(problem, found, "gw_dist", log)


def gromov_wasserstein2(
    C1: Any,
    C2: Any,
    p: Any = None,
    q: Any = None,
    loss_fun: str = "square_loss",
    symmetric: bool | None = None,
    log: bool = False,
    armijo: bool = False,
    G0: Any = None,
    max_iter: float = 1e4,
    tol_rel: float = 1e-9,
    tol_abs: float = 1e-9,
    **kwargs: Any,
) -> Any:
    """Compute a Gromov-Wasserstein discrepancy, as ``ot.gromov.gromov_wasserstein2``.

    Returns
    -------
    gw : float or tensor with gradients to C1, C2, p and q
    log : dict, only with ``log=True``
        That of :func:`gromov_wasserstein`, and the plan ``T``.
    """
    problem, found = _solve(
        "gromov_wasserstein2",
        (C1, C2, p, q, loss_fun, symmetric),
        G0,
        armijo,
        (max_iter, tol_rel, tol_abs),
        kwargs,
    )
    return _value(problem, found, loss_fun, "gw_dist", {"p": p, "q": q, "C1": C1, "C2": C2}, log)


def fused_gromov_wasserstein(
    M: Any,
    C1: Any,
    C2: Any,
    p: Any = None,
    q: Any = None,
    loss_fun: str = "square_loss",
    symmetric: bool | None = None,
    alpha: Any = 0.5,
    armijo: bool = False,
    G0: Any = None,
    log: bool = False,
    max_iter: float = 1e4,
    tol_rel: float = 1e-9,
    tol_abs: float = 1e-9,
    **kwargs: Any,
) -> Any:
    """Find a fused Gromov-Wasserstein plan, as ``ot.gromov.fused_gromov_wasserstein``.

    Returns
    -------
    T : array of shape (n, m)
    log : dict, only with ``log=True``
        ``loss`` of each step, ``fgw_dist``, dual potentials ``u`` and ``v``.
    """
    problem, found = _solve(
        "fused_gromov_wasserstein",
        (C1, C2, p, q, loss_fun, symmetric),
        G0,
        armijo,
        (max_iter, tol_rel, tol_abs),
        kwargs,
        M,
        alpha,
    )
    return _answer(problem, found, "fgw_dist", log)


def fused_gromov_wasserstein2(
    M: Any,
    C1: Any,
    C2: Any,
    p: Any = None,
    q: Any = None,
    loss_fun: str = "square_loss",
    symmetric: bool | None = None,
    alpha: Any = 0.5,
    armijo: bool = False,
    G0: Any = None,
    log: bool = False,
    max_iter: float = 1e4,
    tol_rel: float = 1e-9,
    tol_abs: float = 1e-9,
    **kwargs: Any,
) -> Any:
    """Compute a fused discrepancy, as ``ot.gromov.fused_gromov_wasserstein2``.

    Returns
    -------
    fgw : float or tensor with gradients to M, C1, C2, p, q and alpha
    log : dict, only with ``log=True``
        That of :func:`fused_gromov_wasserstein`, the plan ``T``, ``lin_loss`` and ``quad_loss``.
    """
    problem, found = _solve(
        "fused_gromov_wasserstein2",
        (C1, C2, p, q, loss_fun, symmetric),
        G0,
        armijo,
        (max_iter, tol_rel, tol_abs),
        kwargs,
        M,
        alpha,
    )
    given = {"p": p, "q": q, "C1": C1, "C2": C2, "M": M, "alpha": alpha}
    return _value(problem, found, loss_fun, "fgw_dist", given, log)


def _solve(
    function: str,
    given: tuple[Any, ...],
    start: Any,
    armijo: bool,
    stop: tuple[float, float, float],
    kwargs: dict[str, Any],
    M: Any = None,
    alpha: Any = 1.0,
) -> tuple[Problem, Descent]:
    check_known(function, kwargs, STEPS)
    problem = read_problem(*given, M=M, alpha=alpha, also=(start,))
    max_iter, tol_rel, tol_abs = stop
    found = descend(
        problem.term,
        problem.alpha,
        problem.linear,
        read_start(problem, start),
        transport(problem.p, problem.q),
        max_iter=int(max_iter),
        tol_rel=tol_rel,
        tol_abs=tol_abs,
        armijo=armijo,
        limits=(kwargs.get("alpha_min"), kwargs.get("alpha_max")),
        verbose=kwargs.get("verbose", False),
    )
    return problem, found


def _log(problem: Problem, found: Descent, name: str) -> dict[str, Any]:
    log = {"loss": found.losses, name: np.float64(found.value), "warning": None}
    if found.potentials is not None:
        log["u"], log["v"] = found.potentials
    return problem.arrays.give_all(log)


def _answer(problem: Problem, found: Descent, name: str, log: bool) -> Any:
    """Hand out the plan, with what else is known if asked for."""
    plan = problem.arrays.give(found.plan)
    return (plan, _log(problem, found, name)) if log else plan


def _value(
    problem: Problem, found: Descent, loss: str, name: str, given: dict[str, Any], log: bool
) -> Any:
    """Hand out the value with its derivatives, with what else is known if asked for."""
    value = value_of(problem, loss, found.plan, found.value, given, found.potentials)
    if not log:
        return value
    more = _log(problem, found, name)
    more["T"] = problem.arrays.give(found.plan)
    if problem.M is not None:
        linear = (1 - problem.alpha) * np.vdot(problem.M, found.plan)
        more["lin_loss"] = problem.arrays.give(linear)
        more["quad_loss"] = problem.arrays.give(found.value - linear)
    return value, more
