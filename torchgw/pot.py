"""The call of POT, solved here: ``torchgw.pot.solve_gromov`` in place of ``ot.solve_gromov``.

Only the signature is POT's; POT need not be installed for regularised problems. What torchgw does
not solve is refused, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchgw._api import solve
from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw._inputs import to_tensor
from torchgw._options import Regularization
from torchgw._result import GWResult
from torchgw._schedule import Status

__all__ = ["OTResult", "solve_gromov"]

# Tolerance of the plan where POT's default, 1e-9 of the objective, was left. Proximal steps sharpen
# a plan for ever and settle more slowly.
_TOLERANCE = {"entropic": 1e-7, "proximal": 1e-5}


@dataclass(frozen=True)
class OTResult:
    """What POT's ``OTResult`` has, for :func:`solve_gromov`; arrays are of the kind of ``Ca``.

    Attributes
    ----------
    plan : array of shape (n, m)
    value : float
        Objective, with reg * sum P log P if there is a ``reg``, as in POT.
    value_linear, value_quad : float
        (1 - alpha) <M, P> and alpha <L(P), P>.
    potentials : tuple of arrays, shapes (n,) and (m,)
        Of the linearised cost; with ``reg=None``, of the last regularised problem.
    marginals : tuple of arrays, shapes (n,) and (m,)
        Mass that the plan moves.
    status : Status
    log : dict
    result : GWResult
        Everything else.
    """

    plan: Any
    value: float
    value_linear: float
    value_quad: float
    potentials: tuple[Any, Any]
    marginals: tuple[Any, Any]
    status: Status
    log: dict[str, Any]
    result: GWResult


def solve_gromov(
    Ca: Any,  # noqa: N803 - the names of POT
    Cb: Any,  # noqa: N803
    M: Any = None,  # noqa: N803
    a: Any = None,
    b: Any = None,
    loss: str = "L2",
    symmetric: bool | None = None,
    alpha: float = 0.5,
    reg: float | None = None,
    reg_type: str = "entropy",
    unbalanced: float | None = None,
    unbalanced_type: str = "KL",
    n_threads: int = 1,
    method: str | None = None,
    max_iter: int | None = None,
    plan_init: Any = None,
    tol: float | None = None,
    verbose: bool = False,
) -> OTResult:
    """Solve (fused) Gromov-Wasserstein with the signature of ``ot.solve_gromov``.

    Parameters
    ----------
    Ca, Cb : array-like, shapes (n, n) and (m, m)
        Symmetric distances, taken as they are.
    M : array-like, shape (n, m), optional
        Linear cost.
    a, b : array-like, shapes (n,) and (m,), optional
        Weights of sum 1; uniform by default.
    loss : {"L2"}
        "KL" is refused.
    symmetric : bool or None
        ``False`` is refused: distances must be symmetric.
    alpha : float
        Weight of the quadratic term; not used without ``M``.
    reg : float, optional
        Entropic regularisation, ``epsilon`` of :func:`torchgw.solve`. ``None`` or 0 is the problem
        without regularisation: proximal steps, then conditional gradient steps, for which POT
        must be installed unless n = m and the weights are uniform.
    reg_type : {"entropy"}
    unbalanced : float, optional
        With ``unbalanced_type="partial"`` and ``reg``: the mass that is moved, ``mass`` of
        :func:`torchgw.solve`.
    unbalanced_type : str
        Of others only ``unbalanced=None`` is solved; "semirelaxed" and KL penalties mean something
        else in POT, see :func:`torchgw.solve` for ours.
    n_threads : int
        1. Threads are PyTorch's: ``torch.set_num_threads``.
    method : {"PGD", "PPA"} or None
        With ``reg``: mirror descent (the default), or proximal point steps of weight ``reg``, whose
        plan is sharp.
    max_iter : int, optional
        Outer iterations; 500 by default.
    plan_init : array-like, shape (n, m), optional
        Plan to start from; by default a multi-start of coarse problems, not the product plan alone.
    tol : float, optional
        Relative change of the plan; 1e-7 by default, or 1e-5 for proximal steps.
    verbose : bool

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
    The problem is not convex. The value is often lower than POT's, which begins at the product
    plan; where both end in the same optimum they agree.

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
    partial = unbalanced is not None and str(unbalanced_type).lower() == "partial"
    if partial and (not reg or method == "PPA"):
        raise UnsupportedError(
            "A partial problem needs `reg` and method='PGD' here: polished and proximal plans keep "
            "both marginals. Use POT, or pass `reg`."
        )
    _refuse(loss, symmetric, reg_type, None if partial else unbalanced, unbalanced_type, n_threads)
    if reg is not None and reg < 0:
        raise InvalidInputError(f"`reg` must not be negative; got {reg!r}.")
    exact = not reg
    if exact and method is not None:
        raise UnsupportedError(
            f"`method={method!r}` is a choice for regularised problems. Pass `reg`, or drop it."
        )
    if method not in (None, "PGD", "PPA"):
        raise UnsupportedError(f"`method` must be 'PGD', 'PPA' or None; got {method!r}.")
    if exact and M is not None and alpha == 0:
        raise UnsupportedError(
            "`alpha=0` without `reg` is a linear program: use ot.solve(M, a, b). Or pass `reg`."
        )
    regularization: Regularization = "proximal" if exact or method == "PPA" else "entropic"
    result = solve(
        D_X=Ca,
        D_Y=Cb,
        M=M,
        a=a,
        b=b,
        alpha=None if M is None else alpha,
        epsilon=reg if reg else "auto",
        regularization=regularization,
        polish=exact,
        mass=unbalanced if partial else None,
        scale=None,
        init=plan_init,
        max_iter=500 if max_iter is None else max_iter,
        tol=_TOLERANCE[regularization] if tol is None else tol,
        objective_tol=0.0,
        inner_tol=1e-9,
        precision="float64",
        random_state=0,
        verbose=verbose,
    )
    plan = result.plan.double()
    entropy = 0.0 if exact else float(torch.special.xlogy(plan, plan).sum())
    return OTResult(
        plan=_like(Ca, plan),
        value=result.value + (reg or 0.0) * entropy,
        value_linear=result.value_linear,
        value_quad=result.value_quad,
        potentials=(_like(Ca, result.potential_a), _like(Ca, result.potential_b)),
        marginals=(_like(Ca, result.marginal_a), _like(Ca, result.marginal_b)),
        status=result.status,
        log=result.log,
        result=result,
    )


def _refuse(
    loss: str,
    symmetric: bool | None,
    reg_type: str,
    unbalanced: float | None,
    unbalanced_type: str,
    n_threads: int,
) -> None:
    """Refuse what is not solved here, with the reason."""
    if str(loss).upper() != "L2":
        raise UnsupportedError(
            f"`loss={loss!r}` is not implemented: factors of the cost, which torchgw is built on, "
            "are those of the square loss. Use POT, or loss='L2'."
        )
    if symmetric is False:
        raise UnsupportedError(
            "`symmetric=False` is not implemented: distances are symmetric. Use POT for directed "
            "costs, or pass (C + C.T) / 2."
        )
    if str(reg_type).lower() != "entropy":
        raise UnsupportedError(f"`reg_type` must be 'entropy'; got {reg_type!r}. Use POT.")
    if unbalanced is not None or str(unbalanced_type).lower() == "semirelaxed":
        raise UnsupportedError(
            f"`unbalanced={unbalanced!r}` with `unbalanced_type={unbalanced_type!r}` is not solved "
            "here as POT does: of problems that are not balanced only 'partial' with `reg` is. Use "
            "POT, or `unbalanced=` of torchgw.solve, whose meaning is documented there."
        )
    if n_threads != 1:
        raise UnsupportedError(
            f"`n_threads` must be 1; got {n_threads!r}. Threads are set for all of PyTorch: "
            "torch.set_num_threads."
        )


def _like(model: Any, tensor: Tensor) -> Any:
    """Return a tensor as the kind of array that the input was."""
    if isinstance(model, Tensor):
        given = to_tensor("Ca", model)
        dtype = given.dtype if given.dtype.is_floating_point else tensor.dtype
        return tensor.to(given.device, dtype)
    return tensor.cpu().numpy()
