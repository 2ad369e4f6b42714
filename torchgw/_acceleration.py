"""Anderson acceleration of the outer fixed-point iteration."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Anderson"]

# Iterates combined at most: enough for a few slow modes, and the least-squares problem stays tiny.
_DEPTH = 6
# Ridge of the least-squares problem, relative to its largest diagonal entry.
_RIDGE = 1e-10
# Growth of the residual after which the past is forgotten.
_RESTART_GROWTH = 2.0
# Plain steps in a row that must contract first. An iteration that leaves a saddle point grows, and
# extrapolating it would lead back to the saddle.
_CONTRACTIONS = 3


class Anderson:
    """Choose where to linearise next from the last few couplings and what they led to.

    For a map x -> T(x) with residuals r_k = T(x_k) - x_k the next point is sum_k w_k T(x_k), where
    the weights sum to one and minimise |sum_k w_k r_k| [1]_. Near a fixed point this removes the
    slow modes of plain iteration. A point may leave the transport polytope; that is harmless where
    it is used, because the cost is linear in the coupling.

    References
    ----------
    .. [1] H. Walker, P. Ni. Anderson acceleration for fixed-point iterations. SIAM Journal on
       Numerical Analysis 2011.
    """

    def __init__(self) -> None:
        # the last images and residuals, a row each in no order; made once they are needed
        self._images: Tensor | None = None
        self._residuals: Tensor | None = None
        self._count = 0
        self._contractions = 0
        self._norm = float("inf")

    def next(self, point: Tensor, image: Tensor) -> Tensor:
        """Return the next point, given the last one and its image."""
        residual = image - point
        previous, self._norm = self._norm, float(residual.norm())
        if self._count == 0:
            self._contractions = self._contractions + 1 if self._norm < previous else 0
            if self._contractions < _CONTRACTIONS:
                return image
        elif self._norm > _RESTART_GROWTH * previous:
            self._count = self._contractions = 0
            return image
        if self._images is None or self._residuals is None:
            self._images = image.new_empty(_DEPTH, image.numel())
            self._residuals = torch.empty_like(self._images)
        row = self._count % _DEPTH
        self._images[row] = image.flatten()
        self._residuals[row] = residual.flatten()
        self._count += 1
        if self._count == 1:
            return image
        used = min(self._count, _DEPTH)
        # a few numbers: the host solves for them sooner than a device starts to
        gram = (self._residuals[:used] @ self._residuals[:used].T).double().cpu()
        gram.diagonal().add_(_RIDGE * gram.diagonal().max())
        weights = torch.linalg.solve(gram, torch.ones(used, 1, dtype=gram.dtype))[:, 0]
        weights = (weights / weights.sum()).to(image)
        mixed: Tensor = (weights @ self._images[:used]).view_as(image)
        return mixed
