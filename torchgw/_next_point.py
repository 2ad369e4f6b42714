"""Where an outer iteration linearises next."""

from __future__ import annotations

import math

import torch

from torchgw._acceleration import Anderson, Momentum
from torchgw._dense_gradient import DenseGradient
from torchgw._gradient import Coupling, Gradient
from torchgw._relaxed import RelaxedStep
from torchgw._schedule import Annealing
from torchgw._step import Step
from torchgw._typing import Marginals

__all__ = ["NextPoint"]


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
        iteration: int,
        *,
        met: bool,
    ) -> Coupling:
        """Return the next point, after ``latest`` and the coupling ``previous`` before it.

        ``met`` says whether the plan has its marginals; momentum does not follow others.
        """
        gradient, step, share = self._gradient, self._step, self._anneal.share(iteration)
        at_target = self._anneal(iteration) <= self._anneal.target
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
