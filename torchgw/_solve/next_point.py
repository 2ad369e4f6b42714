"""Where an outer iteration linearises next."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchgw._gradients.contract import Coupling, Gradient
from torchgw._gradients.dense import DenseGradient
from torchgw._sinkhorn.anderson import Anderson
from torchgw._sinkhorn.annealing import Annealing
from torchgw._solve.relaxed_step import RelaxedStep
from torchgw._solve.step import Step
from torchgw._typing import Marginals

__all__ = ["Momentum", "NextPoint"]


class NextPoint:
    """Choose the next point, after one and the plan that it led to.

    That is the coupling of the plan, a mean with those before (proximal steps, equation 11), or one
    further on in the same direction: by Anderson's method near a fixed point, with momentum where
    dense iteration is slow (equation 18).

    Parameters
    ----------
    gradient : Gradient
    step : Step
    anneal : Annealing
    marginals : Marginals
    generator : torch.Generator
    """

    def __init__(
        self,
        gradient: Gradient,
        step: Step,
        anneal: Annealing,
        marginals: Marginals,
        generator: torch.Generator,
    ) -> None:
        self._gradient = gradient
        self._step = step
        self._anneal = anneal
        self._generator = generator
        self._anderson = Anderson()
        self._momentum = Momentum(marginals, wanted=anneal.patient)

    def __call__(
        self,
        point: Coupling,
        latest: Coupling,
        previous: Coupling,
        change: float,
        annealed: int,
        *,
        met: bool,
    ) -> Coupling:
        """Return the next point, after ``latest`` and the coupling ``previous`` before it.

        ``met`` says whether the plan has its marginals; momentum does not follow others.
        """
        gradient, step, share = self._gradient, self._step, self._anneal.share(annealed)
        at_target = self._anneal(annealed) <= self._anneal.target
        if share < 1:
            return gradient.mean(point, latest, share, self._generator)
        if isinstance(step, RelaxedStep):
            near = at_target and change < step.linear_below
            return step.extrapolate(self._anderson, point, latest) if near else latest
        if not isinstance(latest, torch.Tensor):
            return latest
        if at_target and change < gradient.problem.loss.linear_below:
            return self._anderson.next(point, latest)
        followed = isinstance(gradient, DenseGradient) and met
        if followed and self._momentum.wanted(change if at_target else math.inf):
            return self._momentum.next(point, latest, previous)
        return latest


# Largest multiple of the last step that momentum adds. [L174]
_LARGEST_MOMENTUM = 0.9
# Share of the last change from which on plain steps are slow enough for it. [L176]
_SLOW = 0.5
# Multiple of the least change at which it has led away from where plain steps go. No more than two:
# changes of plans that are far apart, as on adjacency matrices, lie between one half and two.
# [L143]
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
