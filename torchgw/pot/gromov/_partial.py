"""Partial problems: a share of the mass moves, and no point gives or takes more than its weight."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchgw._errors import InvalidInputError
from torchgw.pot import _mirror
from torchgw.pot._arrays import Array, product
from torchgw.pot._coarse import coarse_start
from torchgw.pot._descent import descend
from torchgw.pot._vertices import LinearSolver, PartialTransport, partial_transport
from torchgw.pot.gromov._balanced import STEPS
from torchgw.pot.gromov._read import (
    Problem,
    check_known,
    read_problem,
    value_and_log,
    without_gradients,
)

__all__ = [
    "entropic_partial_fused_gromov_wasserstein",
    "entropic_partial_fused_gromov_wasserstein2",
    "entropic_partial_gromov_wasserstein",
    "entropic_partial_gromov_wasserstein2",
    "partial_fused_gromov_wasserstein",
    "partial_fused_gromov_wasserstein2",
    "partial_gromov_wasserstein",
    "partial_gromov_wasserstein2",
    "read_mass",
    "read_partial_start",
    "read_vertex_start",
]


def partial_gromov_wasserstein(
    C1: Any,
    C2: Any,
    p: Any = None,
    q: Any = None,
    m: float | None = None,
    loss_fun: str = "square_loss",
    nb_dummies: int = 1,
    G0: Any = None,
    thres: float = 1,
    numItermax: float = 1e4,
    tol: float = 1e-8,
    symmetric: bool | None = None,
    warn: bool = True,
    log: bool = False,
    verbose: bool = False,
    **kwargs: Any,
) -> Any:
    """Find a partial plan, as ``ot.gromov.partial_gromov_wasserstein``.

    One dummy point is enough here, so ``nb_dummies`` makes no difference; ``thres`` has none in POT
    either.

    Returns
    -------
    T : array of shape (n, m), of mass m
    log : dict, only with ``log=True``
        ``loss`` of each step and ``partial_gw_dist``.
    """
    problem = read_problem(C1, C2, p, q, loss_fun, symmetric, also=(G0,))
    plan, more = _descend(problem, G0, m, (numItermax, tol, verbose), kwargs, "partial_gw_dist")
    return (plan, more) if log else plan


def partial_gromov_wasserstein2(
    C1: Any,
    C2: Any,
    p: Any = None,
    q: Any = None,
    m: float | None = None,
    loss_fun: str = "square_loss",
    nb_dummies: int = 1,
    G0: Any = None,
    thres: float = 1,
    numItermax: float = 1e4,
    tol: float = 1e-7,
    symmetric: bool | None = None,
    warn: bool = False,
    log: bool = False,
    verbose: bool = False,
    **kwargs: Any,
) -> Any:
    """Compute the value there, as ``ot.gromov.partial_gromov_wasserstein2``.

    Returns
    -------
    partial_gw : float or tensor with gradients to C1 and C2
    log : dict, only with ``log=True``
        That of :func:`partial_gromov_wasserstein`, and the plan ``T``.
    """
    problem = read_problem(C1, C2, p, q, loss_fun, symmetric, also=(G0,))
    plan, more = _descend(problem, G0, m, (numItermax, tol, verbose), kwargs, "partial_gw_dist")
    given = {"C1": C1, "C2": C2}
    return value_and_log(problem, plan, more, loss_fun, "partial_gw_dist", given, log)


def partial_fused_gromov_wasserstein(
    M: Any,
    C1: Any,
    C2: Any,
    p: Any = None,
    q: Any = None,
    m: float | None = None,
    loss_fun: str = "square_loss",
    alpha: Any = 0.5,
    nb_dummies: int = 1,
    G0: Any = None,
    thres: float = 1,
    numItermax: float = 1e4,
    tol: float = 1e-8,
    symmetric: bool | None = None,
    warn: bool = True,
    log: bool = False,
    verbose: bool = False,
    **kwargs: Any,
) -> Any:
    """Find a fused partial plan, as ``ot.gromov.partial_fused_gromov_wasserstein``.

    Returns
    -------
    T : array of shape (n, m), of mass m
    log : dict, only with ``log=True``
        ``loss`` of each step and ``partial_fgw_dist``.
    """
    problem = read_problem(C1, C2, p, q, loss_fun, symmetric, M=M, alpha=alpha, also=(G0,))
    plan, more = _descend(problem, G0, m, (numItermax, tol, verbose), kwargs, "partial_fgw_dist")
    return (plan, more) if log else plan


def partial_fused_gromov_wasserstein2(
    M: Any,
    C1: Any,
    C2: Any,
    p: Any = None,
    q: Any = None,
    m: float | None = None,
    loss_fun: str = "square_loss",
    alpha: Any = 0.5,
    nb_dummies: int = 1,
    G0: Any = None,
    thres: float = 1,
    numItermax: float = 1e4,
    tol: float = 1e-7,
    symmetric: bool | None = None,
    warn: bool = False,
    log: bool = False,
    verbose: bool = False,
    **kwargs: Any,
) -> Any:
    """Compute the value there, as ``ot.gromov.partial_fused_gromov_wasserstein2``.

    Returns
    -------
    partial_fgw : float or tensor with gradients to M, C1, C2 and alpha
    log : dict, only with ``log=True``
        That of :func:`partial_fused_gromov_wasserstein`, ``T``, ``lin_loss`` and ``quad_loss``.
    """
    problem = read_problem(C1, C2, p, q, loss_fun, symmetric, M=M, alpha=alpha, also=(G0,))
    plan, more = _descend(problem, G0, m, (numItermax, tol, verbose), kwargs, "partial_fgw_dist")
    given = {"C1": C1, "C2": C2, "M": M, "alpha": alpha}
    return value_and_log(problem, plan, more, loss_fun, "partial_fgw_dist", given, log)


def entropic_partial_gromov_wasserstein(
    C1: Any,
    C2: Any,
    p: Any = None,
    q: Any = None,
    reg: float = 1.0,
    m: float | None = None,
    loss_fun: str = "square_loss",
    G0: Any = None,
    numItermax: float = 1000,
    tol: float = 1e-7,
    symmetric: bool | None = None,
    log: bool = False,
    verbose: bool = False,
) -> Any:
    """Find an entropic partial plan, as ``ot.gromov.entropic_partial_gromov_wasserstein``.

    Returns
    -------
    T : array of shape (n, m), of mass m
    log : dict, only with ``log=True``
        ``err`` of each step and ``partial_gw_dist``, without entropy.
    """
    without_gradients("entropic_partial_gromov_wasserstein", C1, C2, p, q)
    problem = read_problem(C1, C2, p, q, loss_fun, symmetric, also=(G0,))
    plan, more = _steps(problem, G0, m, reg, (numItermax, tol, verbose), "partial_gw_dist")
    return (plan, more) if log else plan


def entropic_partial_gromov_wasserstein2(
    C1: Any,
    C2: Any,
    p: Any = None,
    q: Any = None,
    reg: float = 1.0,
    m: float | None = None,
    loss_fun: str = "square_loss",
    G0: Any = None,
    numItermax: float = 1000,
    tol: float = 1e-7,
    symmetric: bool | None = None,
    log: bool = False,
    verbose: bool = False,
) -> Any:
    """Compute the value there, as ``ot.gromov.entropic_partial_gromov_wasserstein2``.

    Returns
    -------
    partial_gw : float, without entropy
    log : dict, only with ``log=True``
        ``err``, ``partial_gw_dist`` and the plan ``T``.
    """
    plan, more = entropic_partial_gromov_wasserstein(
        C1, C2, p, q, reg, m, loss_fun, G0, numItermax, tol, symmetric, True, verbose
    )
    more["T"] = plan
    return (more["partial_gw_dist"], more) if log else more["partial_gw_dist"]


def entropic_partial_fused_gromov_wasserstein(
    M: Any,
    C1: Any,
    C2: Any,
    p: Any = None,
    q: Any = None,
    reg: float = 1.0,
    m: float | None = None,
    loss_fun: str = "square_loss",
    alpha: float = 0.5,
    G0: Any = None,
    numItermax: float = 1000,
    tol: float = 1e-7,
    symmetric: bool | None = None,
    log: bool = False,
    verbose: bool = False,
) -> Any:
    """Find a fused plan, as ``ot.gromov.entropic_partial_fused_gromov_wasserstein``.

    POT 0.9.7 adds the number <M, T> to its gradient where M belongs, so that M has no influence on
    its plan; here it has.

    Returns
    -------
    T : array of shape (n, m), of mass m
    log : dict, only with ``log=True``
        ``err`` of each step and ``partial_fgw_dist``, without entropy.
    """
    without_gradients("entropic_partial_fused_gromov_wasserstein", M, C1, C2, p, q, alpha)
    problem = read_problem(C1, C2, p, q, loss_fun, symmetric, M=M, alpha=alpha, also=(G0,))
    plan, more = _steps(problem, G0, m, reg, (numItermax, tol, verbose), "partial_fgw_dist")
    return (plan, more) if log else plan


def entropic_partial_fused_gromov_wasserstein2(
    M: Any,
    C1: Any,
    C2: Any,
    p: Any = None,
    q: Any = None,
    reg: float = 1.0,
    m: float | None = None,
    loss_fun: str = "square_loss",
    alpha: float = 0.5,
    G0: Any = None,
    numItermax: float = 1000,
    tol: float = 1e-7,
    symmetric: bool | None = None,
    log: bool = False,
    verbose: bool = False,
) -> Any:
    """Compute the value there, as ``ot.gromov.entropic_partial_fused_gromov_wasserstein2``.

    Returns
    -------
    partial_fgw : float, without entropy
    log : dict, only with ``log=True``
        ``err``, ``partial_fgw_dist``, ``lin_loss``, ``quad_loss`` and the plan ``T``.
    """
    without_gradients("entropic_partial_fused_gromov_wasserstein2", M, C1, C2, p, q, alpha)
    problem = read_problem(C1, C2, p, q, loss_fun, symmetric, M=M, alpha=alpha, also=(G0,))
    plan, more = _steps(problem, G0, m, reg, (numItermax, tol, verbose), "partial_fgw_dist")
    linear, quadratic = problem.parts(problem.arrays.read("T", plan))
    more["T"] = plan
    more["lin_loss"] = problem.arrays.give(np.float64(linear))
    more["quad_loss"] = problem.arrays.give(np.float64(quadratic))
    return (more["partial_fgw_dist"], more) if log else more["partial_fgw_dist"]


def read_mass(problem: Problem, mass: Any) -> float:
    """Read the mass that moves; all that can move by default."""
    most = float(min(problem.p.sum(), problem.q.sum()))
    if mass is None:
        return most
    if not 0 <= float(mass) <= most * (1 + 1e-12):
        raise InvalidInputError(
            f"`{problem.arrays.called('m')}` must be between 0 and {most:.6g}, the "
            f"smaller of the two total weights; got "
            f"{float(mass):.6g}."
        )
    return min(float(mass), most)


def read_partial_start(problem: Problem, start: Any, mass: float) -> Array:
    """Read a starting plan within the weights; a share of the product plan by default."""
    p, q = problem.p, problem.q
    if start is None:
        return product(p, q, mass)
    plan = problem.arrays.read("G0", start, (len(p), len(q)))
    slack = 1e-9 if problem.arrays.dtype.itemsize == 8 else 1e-6
    if (plan.sum(1) > p + slack).any() or (plan.sum(0) > q + slack).any():
        called = problem.arrays.called
        raise InvalidInputError(
            f"`{called('G0')}` must not move more than `{called('p')}` and `{called('q')}`."
        )
    return plan


def read_vertex_start(problem: Problem, start: Any, solver: LinearSolver, mass: float) -> Array:
    """Read a starting plan for steps to vertices; by default one of fewer points, if many."""
    if start is None and isinstance(solver, PartialTransport):
        found = coarse_start(problem.term, problem.alpha, problem.linear, solver)
        if found is not None:
            return found
    return read_partial_start(problem, start, mass)


def _descend(
    problem: Problem,
    start: Any,
    mass: Any,
    stop: tuple[float, float, bool],
    kwargs: dict[str, Any],
    name: str,
) -> tuple[Any, dict[str, Any]]:
    check_known("partial_gromov_wasserstein", kwargs, STEPS)
    share = read_mass(problem, mass)
    max_iter, tol, verbose = stop
    solver = partial_transport(problem.p, problem.q, share)
    found = descend(
        problem.term,
        problem.alpha,
        problem.linear,
        read_vertex_start(problem, start, solver, share),
        solver,
        max_iter=int(max_iter),
        tol_rel=tol,
        tol_abs=0.0,
        limits=(kwargs.get("alpha_min"), kwargs.get("alpha_max")),
        verbose=verbose,
    )
    log = {"loss": found.losses, name: np.float64(found.value), "warning": None}
    return problem.arrays.give(found.plan), problem.arrays.give_all(log)


def _steps(
    problem: Problem,
    start: Any,
    mass: Any,
    epsilon: float,
    stop: tuple[float, float, bool],
    name: str,
) -> tuple[Any, dict[str, Any]]:
    share = read_mass(problem, mass)
    plan = read_partial_start(problem, start, share)
    rows, columns = problem.p > 0, problem.q > 0
    entries = np.outer(rows, columns)
    part = problem if entries.all() else problem.keep(rows, columns)
    max_iter, tol, verbose = stop
    found = _mirror.partial(
        part.term,
        part.alpha,
        part.linear,
        plan[entries].reshape(len(part.p), -1),
        part.p,
        part.q,
        share,
        float(epsilon),
        _mirror.Stop(int(max_iter), tol, verbose),
    )
    whole = np.zeros(plan.shape)
    whole[entries] = found.plan.ravel()
    log = {"err": found.errors, name: np.float64(sum(problem.parts(whole)))}
    return problem.arrays.give(whole), problem.arrays.give_all(log)
