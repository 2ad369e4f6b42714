"""Acceleration of the outer fixed-point iteration: momentum far from its end, Anderson near it."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from torchgw._typing import Marginals

__all__ = ["Anderson", "Momentum"]

# Iterates combined at most: enough for a few slow modes, and the least-squares problem stays tiny.
_DEPTH = 6
# Ridge of the least-squares problem, relative to its largest diagonal entry.
_RIDGE = 1e-10
# Growth of the residual after which the past is forgotten.
_RESTART_GROWTH = 2.0
# Plain steps in a row that must contract first. An iteration that leaves a saddle point grows, and
# extrapolating it would lead back to the saddle.
_CONTRACTIONS = 3
# Largest multiple of the last step that momentum adds.
_LARGEST_MOMENTUM = 0.9
# Share of the last change from which on plain steps are slow enough for it.
_SLOW = 0.5
# Multiple of the least change at which it has led away from where plain steps go. No more than two:
# changes of plans that are far apart, as on adjacency matrices, lie between one half and two.
_ASTRAY = 1.5


class Momentum:
    """Choose where to linearise next: a plan, and some of the way that led to it.

    The objective of plain iteration falls by little steps in a direction that hardly turns. After
    k steps in it the next point is P + min(0.9, (k - 1) / (k + 2)) (P - P_before) [1]_; where the
    last step leads back to the point before, k begins again [2]_. Nothing is read from the device.

    Columns of P that miss their weights are put right, by a multiple of the row weights: on plans
    with given marginals the quadratic form of most distances is concave, and iteration goes down,
    but not across them. A step out of them would come back as a larger one.

    Parameters
    ----------
    marginals : Marginals
        Of plans as matrices.
    wanted : bool
        Whether to begin at once; otherwise once plain steps at the target epsilon are slow.

    References
    ----------
    .. [1] Y. Nesterov. A method for solving the convex programming problem with convergence rate
       O(1/k^2). Soviet Mathematics Doklady 1983.
    .. [2] B. O'Donoghue, E. Candes. Adaptive restart for accelerated gradient schemes. Foundations
       of Computational Mathematics 2015.
    """

    def __init__(self, marginals: Marginals, *, wanted: bool) -> None:
        self._marginals = marginals
        self._wanted = wanted
        self._change = self._least = float("inf")
        self._astray = False
        self._steps: Tensor | None = None

    def wanted(self, change: float) -> bool:
        """Return whether the next step should have it, given the change by one at the target.

        Where the steps grow, as between plans that are far apart, it goes round them for ever while
        plain iteration would settle: from then on there is none.
        """
        self._wanted = self._wanted or change > _SLOW * self._change
        self._least = min(self._least, change)
        self._astray = self._astray or change > _ASTRAY * self._least
        self._change = change
        return self._wanted and not self._astray

    def next(self, point: Tensor, image: Tensor, previous: Tensor) -> Tensor:
        """Return the next point, given the last one, its image, and the image before that."""
        step = image - previous.to(image.dtype)
        back = torch.dot((point.to(image.dtype) - image).flatten(), step.flatten()) > 0
        before = torch.zeros_like(back, dtype=image.dtype) if self._steps is None else self._steps
        self._steps = torch.where(back, 1.0, before + 1)
        weight = ((self._steps - 1) / (self._steps + 2)).clamp(max=_LARGEST_MOMENTUM)
        a, b = self._marginals
        point = image + weight * step
        excess = point.sum(0) - b.to(point.dtype)
        return point.addr_(a.to(point.dtype), excess, alpha=-1)


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
        # products of the residuals: the host solves for a few numbers sooner than a device starts
        self._gram = np.zeros((_DEPTH, _DEPTH))
        self._count = 0
        self._contractions = 0
        self._norm = float("inf")

    def next(self, point: Tensor, image: Tensor) -> Tensor:
        """Return the next point, given the last one and its image."""
        residual = (image - point).flatten()
        if self._count == 0:
            previous, self._norm = self._norm, float(residual.norm())
            self._contractions = self._contractions + 1 if self._norm < previous else 0
            if self._contractions < _CONTRACTIONS:
                return image
        if self._images is None or self._residuals is None:
            self._images = image.new_empty(_DEPTH, image.numel())
            self._residuals = torch.empty_like(self._images)
        row, used = self._count % _DEPTH, min(self._count + 1, _DEPTH)
        self._images[row], self._residuals[row] = image.flatten(), residual
        # all that the host needs in one read
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
        # residuals that are all zero leave any weights
        ridge = _RIDGE * gram.diagonal().max() or 1.0
        weights = np.linalg.solve(gram + ridge * np.eye(used), np.ones(used))
        mixed = torch.from_numpy(weights / weights.sum()).to(image) @ self._images[:used]
        return mixed.view_as(image)
