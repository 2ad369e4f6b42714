"""Anderson's acceleration of the outer fixed-point iteration near its end."""

import math

import numpy as np
import torch
from torch import Tensor

# Iterates combined at most: enough for a few slow modes, in a tiny least-squares problem. [L8]
_DEPTH = 6
# Ridge of the least-squares problem, relative to its largest diagonal entry. [L282]
_RIDGE = 1e-10
# Growth of the residual after which the past is forgotten. [L282]
_RESTART_GROWTH = 2.0
# Plain steps in a row that must contract first. An iteration that leaves a saddle point grows, and
# extrapolating it would lead back to the saddle. [L8]
_CONTRACTIONS = 3


class Anderson:
    """Chooses the next coupling to linearise at, from the last few and their images."""

    # For a map x -> T(x) with residuals r_k = T(x_k) - x_k the next point is sum_k w_k T(x_k),
    # where the weights sum to one and minimise |sum_k w_k r_k|: H. Walker, P. Ni. Anderson
    # acceleration for fixed-point iterations. SIAM Journal on Numerical Analysis 2011. Near a fixed
    # point this removes the slow modes of plain iteration. A point may leave the transport
    # polytope; that is harmless where it is used, because the cost is linear in the coupling.

    def __init__(self) -> None:
        # the last images and residuals, a row each in no order; made once they are needed
        self._images: Tensor | None = None
        self._residuals: Tensor | None = None
        # products of the residuals, on the host, which solves for a few numbers before a GPU has
        # started
        self._gram = np.zeros((_DEPTH, _DEPTH))
        self._count = 0
        self._contractions = 0
        self._norm = float("inf")

    def next(self, point: Tensor, image: Tensor) -> Tensor:
        """Find the next point, given the last one and its image."""
        residual = (image - point).flatten()
        if self._count == 0:
            previous, self._norm = self._norm, math.sqrt(float(residual @ residual))
            self._contractions = self._contractions + 1 if self._norm < previous else 0
            if self._contractions < _CONTRACTIONS:
                return image
        if self._images is None or self._residuals is None:
            self._images = image.new_empty(_DEPTH, image.numel())
            self._residuals = torch.empty_like(self._images)
        row, used = self._count % _DEPTH, min(self._count + 1, _DEPTH)
        self._images[row], self._residuals[row] = image.flatten(), residual
        # everything that the host needs is read from the device at once
        self._gram[row, :used] = self._gram[:used, row] = (
            self._residuals[:used] @ residual
        ).tolist()
        if self._count:
            previous, self._norm = self._norm, math.sqrt(self._gram[row, row])
            if self._norm > _RESTART_GROWTH * previous:
                self._count = self._contractions = 0
                return image
        self._count += 1
        if self._count == 1:
            return image
        gram = self._gram[:used, :used]
        # if all residuals are zero, any weights will do
        ridge = _RIDGE * gram.diagonal().max() or 1.0
        weights = np.linalg.solve(gram + ridge * np.eye(used), np.ones(used))
        mixed = torch.from_numpy(weights / weights.sum()).to(image) @ self._images[:used]
        return mixed.view_as(image)
