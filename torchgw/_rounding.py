"""Rounding a nearly feasible plan to its exact marginals."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["round_to_marginals"]


def round_to_marginals(plan: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the plan moved to exact marginals: rows, then columns shrunk, the rest spread.

    A plan that misses its marginals may have a value below the optimum, so values are compared
    after this.

    Parameters
    ----------
    plan : Tensor, shape (..., n, m)
        Non-negative.
    a, b : Tensor, shapes (..., n) and (..., m)
        Non-negative, of equal sums.

    Returns
    -------
    Tensor, shape (..., n, m)
        At an L1 distance of at most twice the marginal errors of ``plan`` [1]_.

    References
    ----------
    .. [1] J. Altschuler, J. Weed, P. Rigollet. Near-linear time approximation algorithms for
       optimal transport via Sinkhorn iteration. NeurIPS 2017, Algorithm 2.
    """
    tiny = torch.finfo(plan.dtype).tiny
    plan = plan * (a / plan.sum(-1).clamp_min(tiny)).clamp_max(1.0)[..., :, None]
    plan = plan * (b / plan.sum(-2).clamp_min(tiny)).clamp_max(1.0)[..., None, :]
    # what is missing is not negative, but for rounding
    row, column = (a - plan.sum(-1)).clamp_min(0.0), (b - plan.sum(-2)).clamp_min(0.0)
    missing = row.sum(-1)[..., None, None].clamp_min(tiny)
    return plan + row[..., :, None] * (column[..., None, :] / missing)
