"""Options of many problems: one value for all, or one for each."""

import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from torchgw._batch.stopping import Rules
from torchgw._boundary.arrays import to_numpy
from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw._many.questions import Relaxations, Sharpening
from torchgw._many.spaces import Space, per_problem
from torchgw._problem.linear_term import check_alpha
from torchgw._problem.marginals import MarginalRule, check_marginal_rule
from torchgw._solve.polish import can_polish, check_polish
from torchgw._solve.table import check_options
from torchgw._typing import Marginals


def check_rules(
    max_iter: int,
    tol: float,
    objective_tol: float,
    inner_max_iter: int,
    inner_tol: float | None,
    n_init: int | None,
) -> Rules:
    """Check the options of the iteration."""
    check_options(
        max_iter=max_iter, tol=tol, objective_tol=objective_tol, inner_max_iter=inner_max_iter,
        inner_tol=inner_tol, n_init=n_init,
    )  # fmt: skip
    rules = Rules(int(max_iter), float(tol), float(objective_tol), int(inner_max_iter))
    return rules if inner_tol is None else rules._replace(inner_tol=float(inner_tol))


def weights_of_terms(alpha: Any, count: int, *, fused: bool) -> NDArray[np.float64]:
    """Read the weight of the quadratic term of each problem."""
    return per_problem("alpha", alpha, count, lambda value: check_alpha(value, fused=fused))


def epsilons(epsilon: Any, count: int) -> NDArray[np.float64]:
    """Read epsilon of each problem, NaN for "auto"."""
    return per_problem("epsilon", epsilon, count, _epsilon)


def _epsilon(value: Any) -> float:
    """Read epsilon of a problem, NaN for "auto"."""
    check_options(epsilon=value)
    if isinstance(value, str) and value == "auto":
        return math.nan
    return float(value)


def read_relaxed(
    unbalanced: Any, mass: Any, alpha: NDArray[np.float64], followed: tuple[Any, ...] = ()
) -> Relaxations:
    """Read which marginals the plans of B problems must have."""
    # `followed` are weights to which derivatives would go.
    count = len(alpha)
    shares = None if mass is None else per_problem("mass", mass, count, _share)
    if shares is not None and shares.min(initial=1.0) == 1:
        shares = None
    listed = isinstance(unbalanced, list) or getattr(unbalanced, "ndim", 0) > 0
    # one for all is read once
    each = [*unbalanced] if listed else [unbalanced]
    if listed and len(each) != count:
        raise InvalidInputError(
            "`unbalanced` must be a number or a pair (rho_a, rho_b), or a list with one of these "
            f"for each of the {count} problems; got {len(each)}."
        )
    penalties = [to_numpy(one).tolist() if hasattr(one, "tolist") else one for one in each]
    bound = None if mass is None else 1.0
    rules = [check_marginal_rule(one, bound) or MarginalRule() for one in penalties]
    rho = np.array([rule.rho for rule in rules]).reshape(len(rules), 2)
    rho = np.broadcast_to(rho, (count, 2))
    free = np.isfinite(rho)
    if (free.all(1) & (alpha == 0)).any():
        raise UnsupportedError(
            "alpha=0 with penalties on both sides is unbalanced transport, which batches do not "
            "solve. Raise `alpha`, make one side strict, (inf, rho), or loop over torchgw.solve."
        )
    found = Relaxations(rho if free.any() else None, shares)
    each = [part for weights in followed if weights is not None for part in weights]
    moving = any(isinstance(part, Tensor) and part.requires_grad for part in each)
    if moving and any(part is not None for part in found):
        raise UnsupportedError(
            "In batches, derivatives with respect to `a` and `b` are those of strict marginals. "
            "Detach the weights, leave `unbalanced` and `mass` out, or loop over torchgw.solve."
        )
    return found


def read_sharpening(
    regularization: Any,
    polish: Any,
    marginals: Relaxations,
    spaces: Sequence[Space],
    sides: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> Sharpening:
    """Read which of B problems take proximal steps, and which are polished; refuse what cannot.

    ``sides`` are the places of their spaces, (B,) each.
    """
    count = len(sides[0])
    proximal = per_problem("regularization", regularization, count, read_regularization) == 1
    wanted = per_problem("polish", polish, count, read_polish)
    due = np.where(np.isnan(wanted), proximal, wanted == 1)
    if not (proximal | due).any():
        return Sharpening()
    relaxed = marginals.used(count)
    if (proximal & relaxed).any():
        raise UnsupportedError(
            "regularization='proximal' is for plans of given marginals, and `unbalanced` or `mass` "
            "relaxes them. Pass regularization='entropic'."
        )
    if marginals.penalties is not None:
        free = (np.sort(marginals.penalties, 1) == (0.0, math.inf)).all(1)
        if (due & relaxed & ~free).any():
            raise UnsupportedError(
                "`polish=True` moves between plans whose marginals are given, free or bounded, and "
                "`unbalanced` penalises them. Pass polish=False, (inf, 0) or (0, inf)."
            )
    if find_spec("ot") is None:
        for number in np.flatnonzero(due).tolist():
            weights = Marginals(*(spaces[side[number]].weights for side in sides))
            rule = check_marginal_rule(**marginals.arguments(number))
            if wanted[number] == 1:
                check_polish(weights, rule)
            due[number] = can_polish(weights, rule)
    return Sharpening(proximal, due)


def read_regularization(value: Any) -> float:
    """Read whether a problem takes proximal steps."""
    check_options(regularization=value)
    return float(value == "proximal")


def read_polish(value: Any) -> float:
    """Read whether a problem is polished, NaN where that is left to its regularisation."""
    if value is None:
        return math.nan
    check_options(polish=value)
    return float(value)


def _share(value: Any) -> float:
    """Read the mass that one problem moves."""
    rule = check_marginal_rule(None, value)
    if rule is not None and rule.chosen:
        raise UnsupportedError(
            "mass='auto' compares many masses of one problem, which batches do not. Pass numbers, "
            "or loop over torchgw.solve."
        )
    return 1.0 if value is None else float(value)
