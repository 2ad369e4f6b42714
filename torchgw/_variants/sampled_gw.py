"""The names of the published sampled design, for functions of ours."""

import math
from numbers import Real
from typing import Any, Literal

import scipy
import torch

from torchgw._api import solve
from torchgw._boundary.arrays import to_tensor
from torchgw._boundary.checks import called, reject_unknown
from torchgw._errors import InvalidInputError, TorchGWWarning, UnsupportedError, warn_user
from torchgw._problem.named import DistanceName
from torchgw._problem.table import Differentiable, Options
from torchgw._results.result import GWResult
from torchgw._typing import Seed
from torchgw._variants.solve_low_rank import LowRankResult, solve_low_rank
from torchgw.distances.graph import knn_graph

# Names of arguments of ``solve`` in this design.
_NAMES = {
    "X": "X_source", "Y": "X_target", "D_X": "dist_source", "D_Y": "dist_target",
    "distances": "distance_mode", "a": "p", "b": "q", "init": "T_init", "M": "C_linear",
    "n_anchors": "M", "redraw": "alpha", "n_neighbors": "k", "min_iter": "min_iter_before_converge",
    "unbalanced": "rho", "differentiable": "grad_mode",
}  # fmt: skip


@reject_unknown
def sampled_gw(
    X_source: Any = None,
    X_target: Any = None,
    *,
    distance_mode: DistanceName = "dijkstra",
    M: int | None = None,
    alpha: float = 0.9,
    C_linear: Any = None,
    fgw_alpha: float | None = None,
    epsilon: float | Literal["auto"] = "auto",
    k: int | None = None,
    n_landmarks: int | None = None,
    s_shared: int | None = None,
    semi_relaxed: bool = False,
    rho: float | None = None,
    rho_a: float | None = None,
    differentiable: bool = False,
    grad_mode: Differentiable = "value",
    multiscale: bool = True,
    n_coarse: int | None = None,
    lambda_ema_beta: float | None = None,
    mixed_precision: bool = False,
    log: bool = False,
    dist_source: Any = None,
    dist_target: Any = None,
    p: Any = None,
    q: Any = None,
    T_init: Any = None,
    max_iter: int = 500,
    tol: float = 1e-5,
    min_iter_before_converge: int = 40,
    device: torch.device | str | None = None,
    verbose: bool = False,
    random_state: Seed | None = None,
) -> GWResult:
    """Solve with a sampled gradient, by the keyword names of the published sampled design.

    A thin layer over :func:`torchgw.solve`, for code that has those names. New code is better off
    with ``solve``, whose names are the field's and which takes an exact gradient where one fits.

    Parameters
    ----------
    X_source, X_target, dist_source, dist_target, p, q, T_init : array-like, optional
        ``X``, ``Y``, ``D_X``, ``D_Y``, ``a``, ``b`` and ``init``; distances come both or neither,
        in place of the points.
    distance_mode, k, n_landmarks : str, int and int, optional
        ``distances``, ``n_neighbors`` and ``n_landmarks``.
    M : int, optional
        Number of anchor pairs, ``n_anchors``; not the linear cost.
    alpha : float in (0, 1]
        Step size, ``redraw``: the share of the anchors redrawn in an iteration. It averages the
        plan that the gradient is taken at, on the sample; potentials are never damped, which would
        only slow down the approach to the same point.
    C_linear : array-like, shape (n, m), optional
        The linear cost, ``M`` of ``solve``.
    fgw_alpha : float in [0, 1], optional
        Weight of the linear term, so ``alpha = 1 - fgw_alpha`` of ``solve`` and of POT; 0.5 with
        ``C_linear``. Any weight may be 0 or 1: no ratio alpha / (1 - alpha) is formed.
    epsilon : float or "auto"
        ``epsilon``, in units of squared distances that are scaled once, not by the maximum of every
        sample.
    s_shared, lambda_ema_beta : None
        Refused. Anchors are pairs drawn from one plan, so there is no second sample to share; and
        the unit of epsilon is fixed, so there is no running scale to average.
    semi_relaxed : bool
        ``unbalanced=(inf, rho)``: the source marginal is exact, and that of the target is relaxed,
        or free without ``rho``.
    rho, rho_a : float, optional
        Weights of the divergences of marginals, penalties and no damping of the iteration:
        ``unbalanced=(rho_a, rho)``, and ``unbalanced=rho`` without ``rho_a``. ``semi_relaxed`` has
        no ``rho_a``.
    differentiable, grad_mode : bool and {"value", "implicit", "unrolled"}
        ``differentiable=grad_mode``: ``result.loss`` carries gradients to the points, for distances
        that have gradients; with "value" by fresh anchors, the only way for sampled gradients.
        Needs a number for ``epsilon``.
    multiscale : True
        Large problems with factors begin on a subsample by themselves; others have nothing to begin
        on.
    n_coarse : int, optional
        No effect, and a warning: the size of that subsample is chosen.
    mixed_precision : bool
        ``precision="mixed"``: float32 iterations, float64 marginals and values.
    log : bool
        No effect: the result is one object with everything, also ``result.log``, never a tuple.
    max_iter, tol, min_iter_before_converge, device, verbose, random_state
        ``max_iter``, ``tol``, ``min_iter``, ``device``, ``verbose`` and ``random_state``.

    Returns
    -------
    GWResult

    Raises
    ------
    UnsupportedError
        For values that have no meaning here; the message says what to use.
    InvalidInputError, InvalidTypeError
        For input that cannot be used.

    Examples
    --------
    >>> import numpy as np, torchgw
    >>> X = np.random.default_rng(0).normal(size=(80, 3)) * [1, 2, 4]
    >>> result = torchgw.sampled_gw(
    ...     X, X[::-1], distance_mode="euclidean", M=200, epsilon=0.05, random_state=0
    ... )
    >>> result.gradient
    'sampled'
    """
    for name, value in (("s_shared", s_shared), ("lambda_ema_beta", lambda_ema_beta)):
        if value is not None:
            raise UnsupportedError(
                f"`{name}={value!r}` has no meaning here: anchors are pairs from one plan, and "
                "epsilon has a fixed unit. Drop it; `M` sets the number of anchors."
            )
    unbalanced: float | tuple[float, float] | None = rho
    if semi_relaxed and rho_a is not None:
        raise InvalidInputError(
            "`semi_relaxed=True` holds the weights of the source, and `rho_a` relaxes them. Drop "
            "one of them."
        )
    if semi_relaxed:
        unbalanced = (math.inf, 0.0 if rho is None else rho)
    elif rho_a is not None:
        unbalanced = (rho_a, math.inf if rho is None else rho)
    if not multiscale:
        raise UnsupportedError(
            "`multiscale=False` is not available: large problems with factors begin on a subsample."
            " Pass a plan as `init` to `torchgw.solve` to begin elsewhere."
        )
    if n_coarse is not None:
        warn_user("`n_coarse` has no effect: the subsample's size is chosen.", TorchGWWarning)
    with called(**_NAMES):
        return solve(
            **_spaces(X_source, X_target, dist_source, dist_target, distance_mode),
            **_linear(C_linear, fgw_alpha), a=p, b=q, init=T_init, max_iter=max_iter, tol=tol,
            device=device, verbose=verbose, gradient="sampled", epsilon=epsilon, n_neighbors=k,
            differentiable=grad_mode if differentiable else None, unbalanced=unbalanced,
            random_state=random_state, options=Options(
                min_iter=min_iter_before_converge, n_anchors=M, redraw=alpha,
                n_landmarks=n_landmarks, precision="mixed" if mixed_precision else "auto",
            ),
        )  # fmt: skip


@reject_unknown
def sampled_lowrank_gw(
    X_source: Any = None,
    X_target: Any = None,
    *,
    rank: int,
    distance_mode: DistanceName = "landmark",
    C_linear: Any = None,
    fgw_alpha: float | None = None,
    k: int | None = None,
    n_landmarks: int | None = None,
    dist_source: Any = None,
    dist_target: Any = None,
    p: Any = None,
    q: Any = None,
    T_init: Any = None,
    max_iter: int = 500,
    tol: float = 1e-4,
    device: torch.device | str | None = None,
    log: bool = False,
    random_state: Seed | None = None,
) -> LowRankResult:
    """Find a plan of low rank, by the keyword names of the published sampled design.

    :func:`torchgw.solve_low_rank`: nothing is sampled, and there is no epsilon.

    Parameters
    ----------
    rank : int
        Number of groups of points, at most the smaller of n and m.
    X_source, X_target, distance_mode, C_linear, fgw_alpha, k, n_landmarks, dist_source, \
dist_target, p, q, device, log, random_state
        As in :func:`torchgw.sampled_gw`.
    T_init : GWResult or LowRankResult, optional
        ``init``.
    max_iter, tol : int and float
        Mirror steps at most, and the decrease at which to stop.

    Returns
    -------
    LowRankResult

    Raises
    ------
    InvalidInputError, InvalidTypeError
        For input that cannot be used.
    """
    with called(**_NAMES):
        return solve_low_rank(
            **_spaces(X_source, X_target, dist_source, dist_target, distance_mode),
            **_linear(C_linear, fgw_alpha), rank=rank, a=p, b=q, init=T_init, n_neighbors=k,
            n_landmarks=n_landmarks, max_iter=max_iter, tol=tol, device=device,
            random_state=random_state,
        )  # fmt: skip


def build_knn_graph(X: Any, k: int | None = None) -> scipy.sparse.csr_matrix:
    """Build a neighbour graph: :func:`torchgw.distances.knn_graph` under another name.

    Parameters
    ----------
    X : array-like, shape (n, d)
        Points.
    k : int, optional
        Neighbours of each point, ``n_neighbors``; log n by default, kept between 5 and 15.

    Returns
    -------
    scipy.sparse.csr_matrix, shape (n, n), float64
        Symmetric edge lengths.

    Raises
    ------
    InvalidInputError
        For input that cannot be used.
    """
    with called(points="X", n_neighbors="k"):
        return knn_graph(to_tensor("X", X), k)


def _spaces(
    source: Any, target: Any, dist_source: Any, dist_target: Any, mode: DistanceName
) -> dict[str, Any]:
    """Name two sides of points, or of tables, as ``solve`` does."""
    if (dist_source is None) != (dist_target is None):
        raise InvalidInputError(
            "`dist_source` and `dist_target` go together: pass both, or points alone."
        )
    if dist_source is None:
        return {"X": source, "Y": target, "distances": mode}
    return {"D_X": dist_source, "D_Y": dist_target}


def _linear(cost: Any, weight: Any) -> dict[str, Any]:
    """Name a linear cost and its weight as ``solve`` does."""
    known = isinstance(weight, Real) and 0 <= float(weight) <= 1
    if weight is not None and not known:
        raise InvalidInputError(f"`fgw_alpha` must be in [0, 1]; got {weight!r}.")
    if weight and cost is None:
        raise InvalidInputError(
            f"`fgw_alpha={weight}` weighs a linear cost, and none was given. Pass `C_linear`."
        )
    return {"M": cost, "alpha": None if weight is None or cost is None else 1 - weight}
