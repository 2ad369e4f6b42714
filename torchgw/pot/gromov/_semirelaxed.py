"""Semi-relaxed problems: the first marginal is held, the second is free."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchgw._boundary.checks import called
from torchgw._errors import InvalidInputError
from torchgw.pot import _mirror
from torchgw.pot._arrays import Array, product, uniform
from torchgw.pot._descent import descend
from torchgw.pot._vertices import semirelaxed
from torchgw.pot.gromov._balanced import STEPS
from torchgw.pot.gromov._pieces import semirelaxed_start
from torchgw.pot.gromov._read import (
    Problem,
    check_known,
    read_problem,
    value_and_log,
    without_gradients,
)

__all__ = [
    "entropic_semirelaxed_fused_gromov_wasserstein",
    "entropic_semirelaxed_fused_gromov_wasserstein2",
    "entropic_semirelaxed_gromov_wasserstein",
    "entropic_semirelaxed_gromov_wasserstein2",
    "semirelaxed_fused_gromov_wasserstein",
    "semirelaxed_fused_gromov_wasserstein2",
    "semirelaxed_gromov_wasserstein",
    "read_semirelaxed_start",
    "semirelaxed_gromov_wasserstein2",
]


def semirelaxed_gromov_wasserstein(
    C1: Any,
    C2: Any,
    p: Any = None,
    loss_fun: str = "square_loss",
    symmetric: bool | None = None,
    log: bool = False,
    G0: Any = None,
    max_iter: float = 1e4,
    tol_rel: float = 1e-9,
    tol_abs: float = 1e-9,
    random_state: Any = 0,
    **kwargs: Any,
) -> Any:
    """Find a semi-relaxed plan, as ``ot.gromov.semirelaxed_gromov_wasserstein``.

    Returns
    -------
    T : array of shape (n, m)
    log : dict, only with ``log=True``
        ``loss`` of each step and ``srgw_dist``.
    """
    problem = read_problem(C1, C2, p, None, loss_fun, symmetric, also=(_array(G0),))
    start = read_semirelaxed_start(problem, G0, random_state)
    plan, more = _descend(problem, start, (max_iter, tol_rel, tol_abs), kwargs, "srgw_dist")
    return (plan, more) if log else plan


def semirelaxed_gromov_wasserstein2(
    C1: Any,
    C2: Any,
    p: Any = None,
    loss_fun: str = "square_loss",
    symmetric: bool | None = None,
    log: bool = False,
    G0: Any = None,
    max_iter: float = 1e4,
    tol_rel: float = 1e-9,
    tol_abs: float = 1e-9,
    random_state: Any = 0,
    **kwargs: Any,
) -> Any:
    """Compute the semi-relaxed value, as ``ot.gromov.semirelaxed_gromov_wasserstein2``.

    Returns
    -------
    srgw : float or tensor with gradients to C1 and C2
    log : dict, only with ``log=True``
        That of :func:`semirelaxed_gromov_wasserstein`, and the plan ``T``.
    """
    problem = read_problem(C1, C2, p, None, loss_fun, symmetric, also=(_array(G0),))
    start = read_semirelaxed_start(problem, G0, random_state)
    plan, more = _descend(problem, start, (max_iter, tol_rel, tol_abs), kwargs, "srgw_dist")
    given = {"C1": C1, "C2": C2}
    return value_and_log(problem, plan, more, loss_fun, "srgw_dist", given, log)


def semirelaxed_fused_gromov_wasserstein(
    M: Any,
    C1: Any,
    C2: Any,
    p: Any = None,
    loss_fun: str = "square_loss",
    symmetric: bool | None = None,
    alpha: Any = 0.5,
    G0: Any = None,
    log: bool = False,
    max_iter: float = 1e4,
    tol_rel: float = 1e-9,
    tol_abs: float = 1e-9,
    random_state: Any = 0,
    **kwargs: Any,
) -> Any:
    """Find a fused semi-relaxed plan, as ``ot.gromov.semirelaxed_fused_gromov_wasserstein``.

    Returns
    -------
    T : array of shape (n, m)
    log : dict, only with ``log=True``
        ``loss`` of each step and ``srfgw_dist``.
    """
    problem = read_problem(
        C1, C2, p, None, loss_fun, symmetric, M=M, alpha=alpha, also=(_array(G0),)
    )
    start = read_semirelaxed_start(problem, G0, random_state)
    plan, more = _descend(problem, start, (max_iter, tol_rel, tol_abs), kwargs, "srfgw_dist")
    return (plan, more) if log else plan


def semirelaxed_fused_gromov_wasserstein2(
    M: Any,
    C1: Any,
    C2: Any,
    p: Any = None,
    loss_fun: str = "square_loss",
    symmetric: bool | None = None,
    alpha: Any = 0.5,
    G0: Any = None,
    log: bool = False,
    max_iter: float = 1e4,
    tol_rel: float = 1e-9,
    tol_abs: float = 1e-9,
    random_state: Any = 0,
    **kwargs: Any,
) -> Any:
    """Compute the fused value, as ``ot.gromov.semirelaxed_fused_gromov_wasserstein2``.

    Returns
    -------
    srfgw : float or tensor with gradients to M, C1, C2 and alpha
    log : dict, only with ``log=True``
        That of :func:`semirelaxed_fused_gromov_wasserstein`, ``T``, ``lin_loss``, ``quad_loss``.
    """
    problem = read_problem(
        C1, C2, p, None, loss_fun, symmetric, M=M, alpha=alpha, also=(_array(G0),)
    )
    start = read_semirelaxed_start(problem, G0, random_state)
    plan, more = _descend(problem, start, (max_iter, tol_rel, tol_abs), kwargs, "srfgw_dist")
    given = {"C1": C1, "C2": C2, "M": M, "alpha": alpha}
    return value_and_log(problem, plan, more, loss_fun, "srfgw_dist", given, log)


def entropic_semirelaxed_gromov_wasserstein(
    C1: Any,
    C2: Any,
    p: Any = None,
    loss_fun: str = "square_loss",
    epsilon: float = 0.1,
    symmetric: bool | None = None,
    G0: Any = None,
    max_iter: float = 1e4,
    tol: float = 1e-9,
    log: bool = False,
    verbose: bool = False,
    random_state: Any = 0,
) -> Any:
    """Take proximal steps, as ``ot.gromov.entropic_semirelaxed_gromov_wasserstein``.

    Returns
    -------
    T : array of shape (n, m)
    log : dict, only with ``log=True``
        ``err`` of each step and ``srgw_dist``.
    """
    without_gradients("entropic_semirelaxed_gromov_wasserstein", C1, C2, p)
    problem = read_problem(C1, C2, p, None, loss_fun, symmetric, also=(_array(G0),))
    start = read_semirelaxed_start(problem, G0, random_state)
    stop = _mirror.Stop(int(max_iter), tol, verbose)
    plan, more = _steps(problem, start, epsilon, stop, "srgw_dist")
    del more["lin_loss"], more["quad_loss"]
    return (plan, more) if log else plan


def entropic_semirelaxed_gromov_wasserstein2(
    C1: Any,
    C2: Any,
    p: Any = None,
    loss_fun: str = "square_loss",
    epsilon: float = 0.1,
    symmetric: bool | None = None,
    G0: Any = None,
    max_iter: float = 1e4,
    tol: float = 1e-9,
    log: bool = False,
    verbose: bool = False,
    random_state: Any = 0,
    **kwargs: Any,
) -> Any:
    """Compute the value there, as ``ot.gromov.entropic_semirelaxed_gromov_wasserstein2``.

    Returns
    -------
    srgw : float
    log : dict, only with ``log=True``
        ``err``, ``srgw_dist`` and the plan ``T``.
    """
    check_known("entropic_semirelaxed_gromov_wasserstein2", kwargs, ())
    plan, more = entropic_semirelaxed_gromov_wasserstein(
        C1,
        C2,
        p,
        loss_fun,
        epsilon,
        symmetric,
        G0,
        max_iter,
        tol,
        True,
        verbose,
        random_state,
    )
    more["T"] = plan
    return (more["srgw_dist"], more) if log else more["srgw_dist"]


def entropic_semirelaxed_fused_gromov_wasserstein(
    M: Any,
    C1: Any,
    C2: Any,
    p: Any = None,
    loss_fun: str = "square_loss",
    symmetric: bool | None = None,
    epsilon: float = 0.1,
    alpha: float = 0.5,
    G0: Any = None,
    max_iter: float = 1e4,
    tol: float = 1e-9,
    log: bool = False,
    verbose: bool = False,
    random_state: Any = 0,
) -> Any:
    """Take fused steps, as ``ot.gromov.entropic_semirelaxed_fused_gromov_wasserstein``.

    Returns
    -------
    T : array of shape (n, m)
    log : dict, only with ``log=True``
        ``err`` of each step, ``srfgw_dist``, ``lin_loss`` and ``quad_loss``.
    """
    without_gradients("entropic_semirelaxed_fused_gromov_wasserstein", M, C1, C2, p, alpha)
    problem = read_problem(
        C1, C2, p, None, loss_fun, symmetric, M=M, alpha=alpha, also=(_array(G0),)
    )
    start = read_semirelaxed_start(problem, G0, random_state)
    stop = _mirror.Stop(int(max_iter), tol, verbose)
    plan, more = _steps(problem, start, epsilon, stop, "srfgw_dist")
    return (plan, more) if log else plan


def entropic_semirelaxed_fused_gromov_wasserstein2(
    M: Any,
    C1: Any,
    C2: Any,
    p: Any = None,
    loss_fun: str = "square_loss",
    symmetric: bool | None = None,
    epsilon: float = 0.1,
    alpha: float = 0.5,
    G0: Any = None,
    max_iter: float = 1e4,
    tol: float = 1e-9,
    log: bool = False,
    verbose: bool = False,
    random_state: Any = 0,
) -> Any:
    """Compute the value, as ``ot.gromov.entropic_semirelaxed_fused_gromov_wasserstein2``.

    Returns
    -------
    srfgw : float
    log : dict, only with ``log=True``
        ``err``, ``srfgw_dist``, ``lin_loss``, ``quad_loss`` and the plan ``T``.
    """
    plan, more = entropic_semirelaxed_fused_gromov_wasserstein(
        M,
        C1,
        C2,
        p,
        loss_fun,
        symmetric,
        epsilon,
        alpha,
        G0,
        max_iter,
        tol,
        True,
        verbose,
        random_state,
    )
    more["T"] = plan
    return (more["srfgw_dist"], more) if log else more["srfgw_dist"]


def _array(start: Any) -> Any:
    return None if isinstance(start, str) else start


def read_semirelaxed_start(problem: Problem, start: Any, random_state: Any) -> Array:
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


def _descend(
    problem: Problem,
    start: Array,
    stop: tuple[float, float, float],
    kwargs: dict[str, Any],
    name: str,
) -> tuple[Any, dict[str, Any]]:
    check_known("semirelaxed_gromov_wasserstein", kwargs, (*STEPS, "armijo"))
    max_iter, tol_rel, tol_abs = stop
    found = descend(
        problem.term,
        problem.alpha,
        problem.linear,
        start,
        semirelaxed(problem.p),
        max_iter=int(max_iter),
        tol_rel=tol_rel,
        tol_abs=tol_abs,
        armijo=kwargs.get("armijo", False),
        limits=(kwargs.get("alpha_min"), kwargs.get("alpha_max")),
        verbose=kwargs.get("verbose", False),
    )
    log = {"loss": found.losses, name: np.float64(found.value)}
    return problem.arrays.give(found.plan), problem.arrays.give_all(log)


def _steps(
    problem: Problem, start: Array, epsilon: float, stop: _mirror.Stop, name: str
) -> tuple[Any, dict[str, Any]]:
    kept = problem.p > 0
    whole = np.zeros_like(start)
    part = problem if kept.all() else problem.keep(kept, None)
    found = _mirror.semirelaxed(
        part.term, part.alpha, part.linear, start[kept], part.p, epsilon, stop
    )
    whole[kept] = found.plan
    linear, quadratic = problem.parts(whole)
    log = {"err": found.errors, "lin_loss": np.float64(linear), "quad_loss": np.float64(quadratic)}
    log[name] = np.float64(linear + quadratic)
    return problem.arrays.give(whole), problem.arrays.give_all(log)
