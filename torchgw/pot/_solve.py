"""The call of POT, solved here: ``torchgw.pot.solve_gromov`` in place of ``ot.solve_gromov``.

Only the signature is POT's; POT need not be installed for regularised problems. What torchgw does
not solve is refused, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import scipy
import torch
from torch import Tensor

from torchgw._api import solve
from torchgw._boundary.arrays import to_tensor
from torchgw._boundary.checks import reject_unknown
from torchgw._plans.transport import TransportPlan
from torchgw._results.base import Result
from torchgw._results.result import GWResult
from torchgw._solve.status import Status
from torchgw.pot._call import LOSSES, call_of, kind_of, refuse, refuse_combination

__all__ = ["OTResult", "solve_gromov"]

# Tolerance of the plan where POT's default, 1e-9 of the objective, was left. Proximal steps sharpen
# a plan for ever and settle more slowly; polishing takes over from where they have come. [L319]
_TOLERANCE = {"entropic": 1e-7, "proximal": 1e-5, "polished": 1e-5}


@dataclass(frozen=True, repr=False, eq=False)
class OTResult(Result):
    """Outcome of :func:`solve_gromov`, with the attributes of POT's ``OTResult``.

    Arrays are of the kind of ``Ca``.

    Attributes
    ----------
    plan : array of shape (n, m)
    value : float
        Objective, with reg * sum P log P if there is a ``reg``, as in POT. It carries no gradients:
        pass ``differentiable`` to :func:`torchgw.solve` for those.
    value_linear, value_quad : float
        (1 - alpha) <M, P> and alpha <L(P), P>.
    potentials, potential_a, potential_b : tuple of arrays, shapes (n,) and (m,), and each
        Dual potentials of the linearised cost; with ``reg=None`` those of the last regularised
        problem.
    marginals, marginal_a, marginal_b : tuple of arrays, shapes (n,) and (m,), and each
        Mass that the plan moves.
    result : GWResult
        Everything else; ``lazy_plan``, ``sparse_plan``, ``status`` and ``log`` are its own.
    """

    plan: Any
    value: float
    value_linear: float
    value_quad: float
    potentials: tuple[Any, Any]
    marginals: tuple[Any, Any]
    status: Status
    result: GWResult

    def _summary(self) -> tuple[str, dict[str, str], str]:
        n, m = self.plan.shape
        return f"{n} x {m}", {"value": f"{self.value:.6g}"}, self.status.advice

    @property
    def potential_a(self) -> Any:
        """The first of the potentials."""
        return self.potentials[0]

    @property
    def potential_b(self) -> Any:
        """The second of the potentials."""
        return self.potentials[1]

    @property
    def marginal_a(self) -> Any:
        """The first of the marginals."""
        return self.marginals[0]

    @property
    def marginal_b(self) -> Any:
        """The second of the marginals."""
        return self.marginals[1]

    @property
    def log(self) -> dict[str, Any]:
        """The log of the result."""
        return self.result.log

    @property
    def lazy_plan(self) -> TransportPlan:
        """The plan as an operator."""
        return self.result.lazy_plan

    @property
    def sparse_plan(self) -> scipy.sparse.csr_array:
        """The entries of the plan that matter."""
        return self.result.sparse_plan


@reject_unknown
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
    loss : {"L2", "KL"}
        (x - y)^2 or x log(x / y) - x + y, in any case of letters; ``loss="square"`` and ``"kl"`` of
        :func:`torchgw.solve`.
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
        With ``unbalanced_type="KL"`` twice the weight of each marginal's KL(mu x mu | a x a); with
        "partial" the mass that is moved; not used with "semirelaxed".
    unbalanced_type : {"KL", "semirelaxed", "partial"}
        "semirelaxed" holds ``a`` and frees ``b``. With KL a linear cost is refused. "L2" is too.
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

    What POT 0.9.7 does is followed where it is particular. Its KL problem weighs the quadratic term
    by ``alpha`` even without ``M``, and its value counts the entropy, reg / 2 times KL(P x P | Q x
    Q) of Q = a x b. Its regularised semi-relaxed solver takes proximal steps: the plan has no
    entropy in the end, ``reg`` is the size of a step, and only the value counts reg * sum P log P.
    So ours is the plan of ``reg=None``. Without ``reg`` balanced, semi-relaxed and partial plans
    are polished by conditional gradient steps; KL plans keep an entropy of 0.0025 of the natural
    scale of the cost, which the value leaves out.

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
    kind = kind_of(unbalanced, unbalanced_type)
    refuse(loss, symmetric, reg_type, n_threads)
    refuse_combination(kind, linear=M is not None, alpha=alpha, reg=reg, method=method)
    call = call_of(kind, unbalanced, alpha, reg, method)
    if kind == "kl":
        M = None  # noqa: N806 - alpha is one: it weighs nothing
    elif kind == "semirelaxed":
        b = None
    result = solve(
        D_X=Ca,
        D_Y=Cb,
        M=M,
        loss=LOSSES[str(loss).upper()],
        a=a,
        b=b,
        alpha=None if M is None else alpha,
        epsilon=call.epsilon,
        unbalanced=call.unbalanced,
        mass=call.mass,
        regularization=call.regularization,
        polish=call.polish,
        scale=None,
        init=plan_init if plan_init is None or kind == "balanced" else _of_mass_one(plan_init),
        max_iter=500 if max_iter is None else max_iter,
        tol=_TOLERANCE["polished" if call.polish else call.regularization] if tol is None else tol,
        # polishing makes marginals exact
        inner_tol=None if call.polish else 1e-9,
        # and ends in double precision
        precision="auto" if call.polish else "float64",
        random_state=0,
        verbose=verbose,
    )
    plan = result.plan.double()
    if kind == "kl":
        entropy = result.epsilon * result.report.kl if reg else 0.0
        value = call.unit * (result.value + result.report.penalty + entropy)
    else:
        value = result.value
        if reg:
            value += reg * float(torch.special.xlogy(plan, plan).sum())
    return OTResult(
        plan=_like(Ca, plan),
        value=value,
        value_linear=result.value_linear,
        value_quad=call.unit * result.value_quad,
        potentials=(_like(Ca, result.potential_a), _like(Ca, result.potential_b)),
        marginals=(_like(Ca, result.marginal_a), _like(Ca, result.marginal_b)),
        status=result.status,
        result=result,
    )


def _of_mass_one(plan: Any) -> Tensor:
    """Scale a plan to start from to mass one."""
    table = to_tensor("plan_init", plan).double()
    return table / table.sum()


def _like(model: Any, tensor: Tensor) -> Any:
    """Turn a tensor into the kind of array that the input was, float32 if that was."""
    given = to_tensor("Ca", model)
    dtype = given.dtype if given.dtype.is_floating_point else tensor.dtype
    if isinstance(model, Tensor):
        return tensor.to(given.device, dtype)
    return tensor.to("cpu", dtype).numpy()
