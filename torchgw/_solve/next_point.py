"""Where an outer iteration linearises next."""

import math

import torch
from torch import Tensor

from torchgw._gradients.contract import Coupling, Gradient
from torchgw._sinkhorn.anderson import Anderson
from torchgw._sinkhorn.annealing import Annealing
from torchgw._typing import Marginals


class NextPoint:
    """Choose the next point, after one and the plan that it led to."""

    # That is the coupling of the plan, a mean with those before (proximal steps, equation 11; steps
    # that turn back), or one further on in the same direction: by Anderson's method near a fixed
    # point, by Nesterov's where dense iteration is slow (equation 18).

    def __init__(
        self,
        gradient: Gradient,
        anneal: Annealing,
        marginals: Marginals,
        generator: torch.Generator,
    ) -> None:
        self._gradient, self._anneal, self._generator = gradient, anneal, generator
        self._anderson = Anderson()
        self._nesterov = Nesterov(marginals, wanted=anneal.patient)
        self._length = StepLength()

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
        """Choose the next point, after ``latest`` and the coupling ``previous`` before it."""
        # `met` says whether the plan meets its marginals; steps to other plans are not
        # extrapolated.
        gradient, share = self._gradient, self._anneal.share(annealed)
        at_target = self._anneal(annealed) <= self._anneal.end
        if share == 1 and (gradient.shortens or self._anneal.shortened):
            share = self._length.next(latest.minus(point))
        if share < 1:
            return point.mean(latest, share, self._generator)
        if at_target and change < gradient.linear_below:
            return latest.with_vector(self._anderson.next(point.vector(), latest.vector()))
        slow = gradient.momentum and met
        if slow and self._nesterov.wanted(change if at_target else math.inf):
            past = (coupling.vector() for coupling in (point, latest, previous))
            return latest.with_vector(self._nesterov.next(*past))
        return latest


# Shortest step between couplings, and how much longer a step may be than the last one. [L135]
_SHORTEST = 1 / 16
_LENGTHENING = 1.2


class StepLength:
    """Halve a step that turns back on the one before, and lengthen the others."""

    def __init__(self) -> None:
        self._share = 1.0
        self._direction: Tensor | None = None

    def next(self, direction: Tensor) -> float:
        """Choose the length of a step in some direction, as a share of it."""
        if self._direction is not None:
            back = float((direction * self._direction).sum()) < 0
            longer = min(1.0, _LENGTHENING * self._share)
            self._share = max(self._share / 2, _SHORTEST) if back else longer
        self._direction = direction
        return self._share


# Largest multiple of the last step that momentum adds. [L174]
_LARGEST_MOMENTUM = 0.9
# Plain steps are slow enough for momentum if a change is more than this share of the last one.
# [L176]
_SLOW = 0.5
# Momentum ends when a change is this multiple of the least change: it has then led away from the
# path of plain steps. The multiple is below 2, as changes between plans that are far apart, of
# adjacency matrices for example, vary by factors from 1/2 to 2. [L143]
_ASTRAY = 1.5


class Nesterov:
    """Choose where to linearise next: at a plan and some of the way that led to it."""

    # The objective of plain iteration falls by little steps in a direction that hardly turns. After
    # k steps in it the next point is P + min(0.9, (k - 1) / (k + 2)) (P - P_before) [1]; where the
    # last step leads back to the point before, k begins again [2]. Nothing is read from the
    # device.
    # Columns of P that miss their weights are put right, by a multiple of the row weights: on plans
    # with given marginals the quadratic form of most distances is concave, and iteration goes down,
    # but not across them. A step out of them would come back as a larger one.
    # [1] Y. Nesterov. A method for solving the convex programming problem with convergence rate
    # O(1/k^2). Soviet Mathematics Doklady 1983.
    # [2] B. O'Donoghue, E. Candes. Adaptive restart for accelerated gradient schemes. Foundations
    # of Computational Mathematics 2015.

    def __init__(self, marginals: Marginals, *, wanted: bool) -> None:
        self._marginals, self._wanted = marginals, wanted
        self._change = self._least = float("inf")
        self._astray = False
        self._steps: Tensor | None = None

    def wanted(self, change: float) -> bool:
        """Whether the next step should go further, given the change by one at the target."""
        # If `wanted` from the start, steps go further at once, otherwise only once plain steps are
        # slow. Where the steps grow, as between plans that are far apart, momentum would go round
        # for ever while plain iteration would settle: from then on there is none.
        self._wanted = self._wanted or change > _SLOW * self._change
        self._least = min(self._least, change)
        self._astray = self._astray or change > _ASTRAY * self._least
        self._change = change
        return self._wanted and not self._astray

    def next(self, point: Tensor, image: Tensor, previous: Tensor) -> Tensor:
        """Compute the next point, given the last one, its image, and the image before that."""
        step = image - previous.to(image.dtype)
        back = torch.dot((point.to(image.dtype) - image).flatten(), step.flatten()) > 0
        before = torch.zeros_like(back, dtype=image.dtype) if self._steps is None else self._steps
        self._steps = torch.where(back, 1.0, before + 1)
        weight = ((self._steps - 1) / (self._steps + 2)).clamp(max=_LARGEST_MOMENTUM)
        a, b = self._marginals
        following = image + weight * step
        table = following.view(len(a), len(b))
        table.addr_(a.to(table.dtype), table.sum(0) - b.to(table.dtype), alpha=-1)
        return following
