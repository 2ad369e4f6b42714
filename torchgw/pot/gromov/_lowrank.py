"""Plans of low rank between two clouds, with POT's signature."""

import warnings
from typing import Any

import numpy as np
import torch

from torchgw._boundary.arrays import check_shape
from torchgw._errors import (
    ConvergenceWarning,
    InvalidInputError,
    TorchGWWarning,
    UnsupportedError,
    warn_user,
)
from torchgw._variants.solve_low_rank import solve_low_rank
from torchgw.pot._arrays import Array, Arrays
from torchgw.pot.gromov._read import Call, takes, without_gradients

# What POT takes by default for arguments that nothing here reads.
_UNREAD = {"stopThr_dykstra": 1e-3, "numItermax_dykstra": 10_000, "warn_dykstra": False}


class LazyPlan:
    """Q diag(1/g) R', (n, m), whose rows are computed when they are asked for, as in POT."""

    def __init__(self, Q: Any, R: Any, g: Any) -> None:
        self.Q, self.R, self.g = Q, R, g

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m)."""
        return len(self.Q), len(self.R)

    def __getitem__(self, rows: Any) -> Any:
        """Compute some rows, or the entries of some rows and columns."""
        rows, columns = rows if isinstance(rows, tuple) else (rows, slice(None))
        return (self.Q[rows] / self.g) @ self.R[columns].T


def _answer(call: Call) -> Any:
    a, b, rank, alpha = call.a, call.b, call.rank, call.alpha
    without_gradients(call.function, call.X_s, call.X_t, a, b)
    arrays = Arrays(call.X_s, call.X_t, a, b)
    points, others = arrays.read("X_s", call.X_s), arrays.read("X_t", call.X_t)
    for name, table in (("X_s", points), ("X_t", others)):
        check_shape(name, table, ("n", "d"), "one row per point")
    p, q = arrays.weights("a", a, len(points)), arrays.weights("b", b, len(others))
    count = min(len(points), len(others)) if rank is None else int(rank)
    if not 0 < count <= min(len(points), len(others)):
        raise InvalidInputError(
            f"`rank` must be between 1 and the number of points of either side; got {rank}."
        )
    if not 0 <= alpha <= 1 / count:
        raise InvalidInputError(f"`alpha` must be between 0 and 1 / rank; got {alpha}.")
    if alpha > 1e-10:
        raise UnsupportedError(
            f"`alpha={alpha}`: g has no lower bound here. Use POT's {call.function}."
        )
    if call.gamma_init not in ("rescale", "theory"):
        raise UnsupportedError(
            f"`gamma_init` must be 'rescale' or 'theory'; got {call.gamma_init!r}."
        )
    if call.cost_factorized_Xs is not None or call.cost_factorized_Xt is not None:
        raise UnsupportedError(
            "`cost_factorized_Xs` and `cost_factorized_Xt` are not read: pass such costs as "
            f"providers to torchgw.solve_low_rank, or use POT's {call.function}."
        )
    for name, default in _UNREAD.items():
        if call.get(name) != default:
            warn_user(f"`{name}` is not read: projections are exact here.", TorchGWWarning)
    if call.rescale_cost:
        points, others = _rescaled(points), _rescaled(others)
    with warnings.catch_warnings():
        if not call.warn:
            warnings.simplefilter("ignore", ConvergenceWarning)
        found = solve_low_rank(
            points,
            others,
            a=p / p.sum(),
            b=q / q.sum(),
            rank=count,
            distances="sqeuclidean",
            scale=None,
            epsilon=call.reg,
            max_iter=int(call.numItermax),
            # zero means no end in POT
            tol=max(call.stopThr, np.finfo(float).tiny),
            device="cpu",
            random_state=call.seed_init,
        )
    factors = found.lazy_plan.Q, found.lazy_plan.R, found.lazy_plan.g
    Q, R, g = (arrays.give(factor.numpy()) for factor in factors)
    if not call.log:
        return Q, R, g
    entropy = sum(float(torch.special.entr(factor).sum()) for factor in factors)
    more = {
        "value": arrays.give(np.float64(found.value - call.reg * entropy)),
        "value_quad": arrays.give(np.float64(found.value_quad)),
        "lazy_plan": LazyPlan(Q, R, g),
    }
    return Q, R, g, more


@takes(_answer)
def lowrank_gromov_wasserstein_samples(
    X_s: Any, X_t: Any, a: Any = None, b: Any = None, reg: float = 0, rank: int | None = None,
    alpha: float = 1e-10, gamma_init: str = "rescale", rescale_cost: bool = True,
    cost_factorized_Xs: Any = None, cost_factorized_Xt: Any = None, stopThr: float = 1e-4,
    numItermax: int = 1000, stopThr_dykstra: float = 1e-3, numItermax_dykstra: int = 10_000,
    seed_init: Any = 49, warn: bool = True, warn_dykstra: bool = False, log: bool = False,
) -> Any:  # fmt: skip
    """Find a plan of low rank, as ``ot.gromov.lowrank_gromov_wasserstein_samples``.

    The problem is POT's, squared Euclidean costs and ``reg`` times the entropy of Q, R and g; the
    start and the steps are those of :func:`torchgw.solve_low_rank`. So ``stopThr`` is the relative
    decrease of the objective over 20 steps, ``gamma_init`` makes no difference, and projections,
    which are exact, have no limits: their arguments give a warning.

    Parameters
    ----------
    X_s, X_t : arrays, shapes (n, d) and (m, e)

    Returns
    -------
    Q, R, g : arrays of shapes (n, r), (m, r) and (r,)
    log : dict, only with log=True
        ``value`` with ``reg`` times sum x log x of the three, ``value_quad`` without, and
        ``lazy_plan``, whose ``[:]`` is the plan.

    Raises
    ------
    UnsupportedError
        For factors of other costs, a lower bound ``alpha`` of g, and gradients.
    """


def _rescaled(points: Array) -> Array:
    """Scale points so that their squared distances are those of POT's rescaled factors."""
    # The factors of ||x - y||^2 are (||x||^2, 1, -2 x) and (1, ||y||^2, y); POT divides each by the
    # square root of its largest entry.
    square = (points**2).sum(1).max()
    left, right = max(square, 1.0, (-2 * points).max()), max(square, 1.0, points.max())
    return np.asarray(points / (left * right) ** 0.25)
