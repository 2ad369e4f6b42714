"""Many problems in one call of POT: ``torchgw.pot.solve_gromov_batch``, one after the other."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from torchgw._boundary.checks import reject_unknown
from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw._solve.status import Status
from torchgw.pot import _mirror
from torchgw.pot._solve import Found, OTResult, result_of
from torchgw.pot.gromov._read import needs_gradients, read_problem, read_start, value_of

# Names that arguments of ot.gromov have here.
_NAMES = {"C1": "Ca", "C2": "Cb", "p": "a", "q": "b", "G0": "T_init"}


@reject_unknown
def solve_gromov_batch(
    Ca: Any,
    Cb: Any,
    reg: float = 1e-2,
    a: Any = None,
    b: Any = None,
    loss: str = "sqeuclidean",
    symmetric: bool | None = None,
    M: Any = None,
    alpha: float | None = None,
    T_init: Any = None,
    max_iter: int = 50,
    tol: float = 1e-5,
    max_iter_inner: int = 50,
    tol_inner: float = 1e-5,
    grad: Literal["envelope", "detach"] = "envelope",
    logits: bool | None = None,
) -> OTResult:
    """Solve problems of one size by proximal steps, as ``ot.solve_gromov_batch``.

    They are solved one after the other, each until its own plan stays; :func:`torchgw.solve_batch`
    solves many at once, by another method.

    Parameters
    ----------
    Ca, Cb : array-like, shapes (k, n, n) and (k, m, m)
    reg : float
        Weight of a step's divergence from the last plan.
    a, b : array-like, shapes (k, n) and (k, m), optional
        Weights, uniform by default.
    loss : {"sqeuclidean"}
    symmetric : bool, optional
        Whether all tables are; tested if it is not said.
    M : array-like, shape (k, n, m), optional
        Linear costs, together with ``alpha``, the weight of the quadratic term.
    T_init : array-like, shape (k, n, m), optional
        Where to start; by default the product plans.
    max_iter, tol : int, float
        Steps at most, and the mean change of an entry to end at.
    max_iter_inner, tol_inner : int, float
        The same of Sinkhorn's iterations in a step.
    grad : {"envelope", "detach"}
        Whether values carry gradients to Ca, Cb, M and alpha.

    Returns
    -------
    OTResult
        With a first axis of k problems; values have no entropy.

    Raises
    ------
    InvalidInputError
        For shapes that do not fit, or one of ``M`` and ``alpha`` alone.
    UnsupportedError
        For several features an edge, as ``loss="kl"`` has them, ``logits`` and ``grad="autodiff"``.
    """
    if loss != "sqeuclidean" or logits:
        raise UnsupportedError(
            f"`loss` must be 'sqeuclidean', without `logits`; got {loss!r}. 'kl' compares several "
            "features an edge, which are not known here."
        )
    if grad not in ("envelope", "detach"):
        raise UnsupportedError(
            f"`grad` must be 'envelope' or 'detach'; got {grad!r}. "
            "torchgw.solve(differentiable='unrolled') differentiates plans."
        )
    if (M is None) != (alpha is None):
        raise InvalidInputError("Pass `M` and `alpha` together, or neither.")
    for name, tables in (("Ca", Ca), ("Cb", Cb)):
        if getattr(tables, "ndim", 3) == 4:
            raise UnsupportedError(
                f"`{name}` has several features an edge, (k, n, n, d), which are not known here."
            )
        if getattr(tables, "ndim", 0) != 3:
            raise InvalidInputError(f"`{name}` must be an array of shape (k, n, n).")
    given = {"C1": Ca, "C2": Cb, "p": a, "q": b, "M": M, "G0": T_init}
    for name, value in given.items():
        if value is not None and len(value) != len(Ca):
            raise InvalidInputError(
                f"`{_NAMES.get(name, name)}` must have one item for each of the {len(Ca)} problems "
                f"of `Ca`; got {len(value)}."
            )
    found = [
        _solve_one(
            {name: None if value is None else value[one] for name, value in given.items()},
            1.0 if alpha is None else alpha,
            symmetric,
            float(reg),
            (int(max_iter), float(tol), int(max_iter_inner), float(tol_inner)),
            attached=grad == "envelope",
        )
        for one in range(len(Ca))
    ]
    pairs = [one.potentials for one in found if one.potentials is not None]
    ended = all(one.status is Status.CONVERGED for one in found)
    return OTResult(
        plan=_stack([one.plan for one in found]),
        value=_stack([one.value for one in found]),
        value_linear=_stack([one.value_linear for one in found]),
        value_quad=_stack([one.value_quad for one in found]),
        potentials=(_stack([f for f, _ in pairs]), _stack([g for _, g in pairs])),
        status=Status.CONVERGED if ended else Status.OUTER_LIMIT,
        log={"n_iter": max(one.log["n_iter"] for one in found)},
    )


def _solve_one(
    given: dict[str, Any],
    alpha: Any,
    symmetric: bool | None,
    reg: float,
    limits: tuple[int, float, int, float],
    *,
    attached: bool,
) -> OTResult:
    """Solve one problem."""
    start, M = given.pop("G0"), given["M"]
    C1, C2, a, b = (given[name] for name in ("C1", "C2", "p", "q"))
    problem = read_problem(
        C1, C2, a, b, "square_loss", symmetric, M=M, alpha=alpha, also=(start,), names=_NAMES
    )
    max_iter, tol, max_iter_inner, tol_inner = limits
    p, q = problem.p, problem.q
    first = read_start(problem, start, exact=False)
    stop = _mirror.Stop(max_iter, tol * (len(p) * len(q)) ** 0.5)
    found = _mirror.proximal(problem.slope, first, p, q, reg, stop, max_iter_inner, tol_inner)
    parts, inputs = problem.parts(found.plan), {**given, "alpha": alpha}
    value = problem.arrays.give(np.float64(sum(parts)))
    if attached and needs_gradients(*inputs.values()):
        value = value_of(problem, "square_loss", found.plan, sum(parts), inputs)
    log = {"n_iter": len(found.errors)}
    solved = Found(found.plan, *parts, sum(parts), found.potentials, found.converged, log)
    return result_of(problem.arrays, solved, value)


def _stack(parts: Sequence[Any]) -> Any:
    """Join results of the problems along a new first axis."""
    return torch.stack(list(parts)) if isinstance(parts[0], Tensor) else np.stack(parts)
