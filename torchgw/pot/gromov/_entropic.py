"""Balanced problems with entropy: mirror descent, proximal steps, and single loops (BAPG)."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchgw._errors import InvalidInputError, TorchGWWarning, warn_user
from torchgw.pot import _mirror
from torchgw.pot._arrays import Array, Mask
from torchgw.pot.gromov._read import (
    Problem,
    check_known,
    read_problem,
    read_start,
    without_gradients,
)

__all__ = [
    "BAPG_fused_gromov_wasserstein",
    "BAPG_fused_gromov_wasserstein2",
    "BAPG_gromov_wasserstein",
    "BAPG_gromov_wasserstein2",
    "entropic_fused_gromov_wasserstein",
    "entropic_fused_gromov_wasserstein2",
    "entropic_gromov_wasserstein",
    "entropic_gromov_wasserstein2",
]

# Further arguments, those of POT's Sinkhorn iterations.
_INNER = ("numItermax", "stopThr", "method", "warn")


def entropic_gromov_wasserstein(
    C1: Any,
    C2: Any,
    p: Any = None,
    q: Any = None,
    loss_fun: str = "square_loss",
    epsilon: float = 0.1,
    symmetric: bool | None = None,
    G0: Any = None,
    max_iter: float = 1000,
    tol: float = 1e-9,
    solver: str = "PGD",
    warmstart: bool = False,
    verbose: bool = False,
    log: bool = False,
    **kwargs: Any,
) -> Any:
    """Find an entropic plan, as ``ot.gromov.entropic_gromov_wasserstein``.

    Sinkhorn's iterations begin at the last potentials whatever ``warmstart`` says, and are stable
    at any ``epsilon``, so that ``method`` makes no difference.

    Returns
    -------
    T : array of shape (n, m)
    log : dict, only with ``log=True``
        ``err`` of each step and ``gw_dist``, without entropy.
    """
    given = (C1, C2, p, q, loss_fun, symmetric)
    plan, more = _mirror_descent(
        "entropic_gromov_wasserstein", given, G0, epsilon, solver, (max_iter, tol, verbose), kwargs
    )
    more["gw_dist"] = more.pop("fgw_dist")
    del more["lin_loss"], more["quad_loss"]
    return (plan, more) if log else plan


def entropic_gromov_wasserstein2(
    C1: Any,
    C2: Any,
    p: Any = None,
    q: Any = None,
    loss_fun: str = "square_loss",
    epsilon: float = 0.1,
    symmetric: bool | None = None,
    G0: Any = None,
    max_iter: float = 1000,
    tol: float = 1e-9,
    solver: str = "PGD",
    warmstart: bool = False,
    verbose: bool = False,
    log: bool = False,
    **kwargs: Any,
) -> Any:
    """Compute the value there, as ``ot.gromov.entropic_gromov_wasserstein2``.

    Returns
    -------
    gw : float, without entropy
    log : dict, only with ``log=True``
        ``err``, ``gw_dist`` and the plan ``T``.
    """
    given = (C1, C2, p, q, loss_fun, symmetric)
    plan, more = _mirror_descent(
        "entropic_gromov_wasserstein2", given, G0, epsilon, solver, (max_iter, tol, verbose), kwargs
    )
    value = more["gw_dist"] = more.pop("fgw_dist")
    del more["lin_loss"], more["quad_loss"]
    more["T"] = plan
    return (value, more) if log else value


def entropic_fused_gromov_wasserstein(
    M: Any,
    C1: Any,
    C2: Any,
    p: Any = None,
    q: Any = None,
    loss_fun: str = "square_loss",
    epsilon: float = 0.1,
    symmetric: bool | None = None,
    alpha: float = 0.5,
    G0: Any = None,
    max_iter: float = 1000,
    tol: float = 1e-9,
    solver: str = "PGD",
    warmstart: bool = False,
    verbose: bool = False,
    log: bool = False,
    **kwargs: Any,
) -> Any:
    """Find a fused entropic plan, as ``ot.gromov.entropic_fused_gromov_wasserstein``.

    Returns
    -------
    T : array of shape (n, m)
    log : dict, only with ``log=True``
        ``err`` of each step and ``fgw_dist``, without entropy.
    """
    given = (C1, C2, p, q, loss_fun, symmetric)
    plan, more = _mirror_descent(
        "entropic_fused_gromov_wasserstein",
        given,
        G0,
        epsilon,
        solver,
        (max_iter, tol, verbose),
        kwargs,
        M,
        alpha,
    )
    del more["lin_loss"], more["quad_loss"]
    return (plan, more) if log else plan


def entropic_fused_gromov_wasserstein2(
    M: Any,
    C1: Any,
    C2: Any,
    p: Any = None,
    q: Any = None,
    loss_fun: str = "square_loss",
    epsilon: float = 0.1,
    symmetric: bool | None = None,
    alpha: float = 0.5,
    G0: Any = None,
    max_iter: float = 1000,
    tol: float = 1e-9,
    solver: str = "PGD",
    warmstart: bool = False,
    verbose: bool = False,
    log: bool = False,
    **kwargs: Any,
) -> Any:
    """Compute the value there, as ``ot.gromov.entropic_fused_gromov_wasserstein2``.

    Returns
    -------
    fgw : float, without entropy
    log : dict, only with ``log=True``
        ``err``, ``fgw_dist``, ``lin_loss``, ``quad_loss`` and the plan ``T``.
    """
    given = (C1, C2, p, q, loss_fun, symmetric)
    plan, more = _mirror_descent(
        "entropic_fused_gromov_wasserstein2",
        given,
        G0,
        epsilon,
        solver,
        (max_iter, tol, verbose),
        kwargs,
        M,
        alpha,
    )
    more["T"] = plan
    return (more["fgw_dist"], more) if log else more["fgw_dist"]


def BAPG_gromov_wasserstein(  # noqa: N802 - the name of POT
    C1: Any,
    C2: Any,
    p: Any = None,
    q: Any = None,
    loss_fun: str = "square_loss",
    epsilon: float = 0.1,
    symmetric: bool | None = None,
    G0: Any = None,
    max_iter: float = 1000,
    tol: float = 1e-9,
    marginal_loss: bool = False,
    verbose: bool = False,
    log: bool = False,
) -> Any:
    """Find a plan by single Bregman steps, as ``ot.gromov.BAPG_gromov_wasserstein``.

    Returns
    -------
    T : array of shape (n, m)
    log : dict, only with ``log=True``
        ``err`` of each step, ``gw_dist``; without ``marginal_loss`` ``loss``, the term that counts.
    """
    given = (C1, C2, p, q, loss_fun, symmetric)
    plan, more = _single_loop(
        "BAPG_gromov_wasserstein", given, G0, epsilon, (max_iter, tol, verbose), marginal_loss
    )
    more["gw_dist"] = more.pop("fgw_dist")
    del more["lin_loss"], more["quad_loss"]
    return (plan, more) if log else plan


def BAPG_gromov_wasserstein2(  # noqa: N802
    C1: Any,
    C2: Any,
    p: Any = None,
    q: Any = None,
    loss_fun: str = "square_loss",
    epsilon: float = 0.1,
    symmetric: bool | None = None,
    G0: Any = None,
    max_iter: float = 1000,
    tol: float = 1e-9,
    marginal_loss: bool = False,
    verbose: bool = False,
    log: bool = False,
) -> Any:
    """Compute the value there, as ``ot.gromov.BAPG_gromov_wasserstein2``.

    Returns
    -------
    gw : float
    log : dict, only with ``log=True``
        That of :func:`BAPG_gromov_wasserstein`, and the plan ``T``.
    """
    given = (C1, C2, p, q, loss_fun, symmetric)
    plan, more = _single_loop(
        "BAPG_gromov_wasserstein2", given, G0, epsilon, (max_iter, tol, verbose), marginal_loss
    )
    value = more["gw_dist"] = more.pop("fgw_dist")
    del more["lin_loss"], more["quad_loss"]
    more["T"] = plan
    return (value, more) if log else value


def BAPG_fused_gromov_wasserstein(  # noqa: N802
    M: Any,
    C1: Any,
    C2: Any,
    p: Any = None,
    q: Any = None,
    loss_fun: str = "square_loss",
    epsilon: float = 0.1,
    symmetric: bool | None = None,
    alpha: float = 0.5,
    G0: Any = None,
    max_iter: float = 1000,
    tol: float = 1e-9,
    marginal_loss: bool = False,
    verbose: bool = False,
    log: bool = False,
) -> Any:
    """Find a fused plan by single steps, as ``ot.gromov.BAPG_fused_gromov_wasserstein``.

    Returns
    -------
    T : array of shape (n, m)
    log : dict, only with ``log=True``
        That of :func:`BAPG_gromov_wasserstein`, with ``fgw_dist``.
    """
    given = (C1, C2, p, q, loss_fun, symmetric)
    plan, more = _single_loop(
        "BAPG_fused_gromov_wasserstein",
        given,
        G0,
        epsilon,
        (max_iter, tol, verbose),
        marginal_loss,
        M,
        alpha,
    )
    del more["lin_loss"], more["quad_loss"]
    return (plan, more) if log else plan


def BAPG_fused_gromov_wasserstein2(  # noqa: N802
    M: Any,
    C1: Any,
    C2: Any,
    p: Any = None,
    q: Any = None,
    loss_fun: str = "square_loss",
    epsilon: float = 0.1,
    symmetric: bool | None = None,
    alpha: float = 0.5,
    G0: Any = None,
    max_iter: float = 1000,
    tol: float = 1e-9,
    marginal_loss: bool = False,
    verbose: bool = False,
    log: bool = False,
) -> Any:
    """Compute the value there, as ``ot.gromov.BAPG_fused_gromov_wasserstein2``.

    Returns
    -------
    fgw : float
    log : dict, only with ``log=True``
        That of :func:`BAPG_fused_gromov_wasserstein`, ``T``, ``lin_loss`` and ``quad_loss``.
    """
    given = (C1, C2, p, q, loss_fun, symmetric)
    plan, more = _single_loop(
        "BAPG_fused_gromov_wasserstein2",
        given,
        G0,
        epsilon,
        (max_iter, tol, verbose),
        marginal_loss,
        M,
        alpha,
    )
    more["T"] = plan
    return (more["fgw_dist"], more) if log else more["fgw_dist"]


def _read(
    function: str, given: tuple[Any, ...], start: Any, M: Any, alpha: Any
) -> tuple[Problem, Problem, Array, Mask]:
    """Read a problem, the part of it where weights are, its start, and which entries that is."""
    without_gradients(function, *given[:4], M, alpha)
    problem = read_problem(*given, M=M, alpha=alpha, also=(start,))
    plan = read_start(problem, start, exact=False)
    rows, columns = problem.p > 0, problem.q > 0
    if rows.all() and columns.all():
        return problem, problem, plan, np.ones(plan.shape, dtype=bool)
    entries = np.outer(rows, columns)
    part = problem.keep(rows, columns)
    return problem, part, plan[entries].reshape(len(part.p), -1), entries


def _log(
    problem: Problem, found: _mirror.Mirrored, entries: Mask, **more: Any
) -> tuple[Any, dict[str, Any]]:
    plan = np.zeros(entries.shape)
    plan[entries] = found.plan.ravel()
    linear, quadratic = problem.parts(plan)
    log = {
        "err": found.errors,
        "lin_loss": np.float64(linear),
        "quad_loss": np.float64(quadratic),
        "fgw_dist": np.float64(linear + quadratic),
        **more,
    }
    return problem.arrays.give(plan), problem.arrays.give_all(log)


def _mirror_descent(
    function: str,
    given: tuple[Any, ...],
    start: Any,
    epsilon: float,
    solver: str,
    stop: tuple[float, float, bool],
    kwargs: dict[str, Any],
    M: Any = None,
    alpha: Any = 1.0,
) -> tuple[Any, dict[str, Any]]:
    if solver not in ("PGD", "PPA"):
        raise InvalidInputError(f"`solver` must be 'PGD' or 'PPA'; got {solver!r}.")
    check_known(function, kwargs, _INNER)
    _check_epsilon(epsilon)
    problem, part, plan, entries = _read(function, given, start, M, alpha)
    max_iter, tol, verbose = stop
    found = _mirror.balanced(
        part.term,
        part.alpha,
        part.linear,
        plan,
        part.p,
        part.q,
        float(epsilon),
        _mirror.Stop(int(max_iter), tol, verbose),
        proximal=solver == "PPA",
        inner_max_iter=int(kwargs.get("numItermax", 1000)),
        inner_tol=float(kwargs.get("stopThr", 1e-9)),
    )
    return _log(problem, found, entries)


def _single_loop(
    function: str,
    given: tuple[Any, ...],
    start: Any,
    epsilon: float,
    stop: tuple[float, float, bool],
    marginal_loss: bool,
    M: Any = None,
    alpha: Any = 1.0,
) -> tuple[Any, dict[str, Any]]:
    _check_epsilon(epsilon)
    problem, part, plan, entries = _read(function, given, start, M, alpha)
    max_iter, tol, verbose = stop
    term, linear = part.term, part.linear

    def slope(plan: Array) -> Array:
        if marginal_loss:
            return linear + part.alpha * term.gradient(plan)
        cross = term.cross(plan)
        other = cross if term.symmetric else term.cross_transposed(plan)
        result: Array = linear - part.alpha * (cross + other)
        return result

    def constant(plan: Array) -> float:
        f1, f2, _, _ = problem.term.parts
        own = (f1 @ problem.p)[:, None] + f2 @ problem.q
        return problem.alpha * float(np.vdot(own, plan))

    found = _mirror.alternate(
        slope, plan, part.p, part.q, float(epsilon), _mirror.Stop(int(max_iter), tol, verbose)
    )
    if not np.isfinite(found.plan).all():
        warn_user("The plan is not finite. Pass a larger `epsilon`.", TorchGWWarning)
    result, log = _log(problem, found, entries)
    # the columns are exact and the rows are not: as in POT values have the weights, not these
    whole = np.zeros(entries.shape)
    whole[entries] = found.plan.ravel()
    linear_part, _ = problem.parts(whole)
    counted = linear_part - problem.alpha * float(np.vdot(problem.term.cross(whole), whole))
    own = constant(whole)
    log["fgw_dist"] = problem.arrays.give(counted + own)
    log["quad_loss"] = problem.arrays.give(counted + own - linear_part)
    if not marginal_loss:
        log["loss"] = problem.arrays.give(counted)
    return result, log


def _check_epsilon(epsilon: Any) -> None:
    if not float(epsilon) > 0:
        raise InvalidInputError(f"`epsilon` must be positive; got {epsilon!r}.")
