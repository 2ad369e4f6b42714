"""A problem as a differentiable function of the tensors that require gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._derivatives.sides import TrackedSide, side_of
from torchgw._problem.linear_term import FeatureMetric, feature_cost
from torchgw._problem.marginals import MarginalRule
from torchgw._problem.problem import Problem
from torchgw._sinkhorn.cost import Cost, DenseCost
from torchgw.distances.base import both_ways


class Definition(NamedTuple):
    """A problem, and the features that its linear cost was made from, if any."""

    problem: Problem
    features: tuple[Tensor, Tensor] | None
    metric: FeatureMetric
    rule: MarginalRule | None = None  # of relaxed marginals


@dataclass(frozen=True)
class Model:
    """Distances, weights and linear cost as functions of some inputs, float64."""

    source: TrackedSide
    target: TrackedSide
    a: Tensor
    b: Tensor
    linear: Cost | None
    alpha: float | Tensor
    tracked: frozenset[str]  # names of the inputs
    epsilon: Tensor | None = None  # if it is an input

    @property
    def source_moves(self) -> bool:
        """Whether alpha D_X moves."""
        return bool(self.tracked & {"X", "D_X", "alpha"})

    @property
    def target_moves(self) -> bool:
        """Whether alpha D_Y moves."""
        return bool(self.tracked & {"Y", "D_Y", "alpha"})

    @property
    def ways(self) -> list[tuple[TrackedSide, TrackedSide]]:
        """Both sides there and back, if costs of either have directions."""
        return both_ways(self.source, self.target)

    def crossed(self, table: Tensor) -> Tensor:
        """Compute D_X table D_Y, or the mean of D_X table D_Y' over both ways, (n, m)."""
        parts = [far.apply(near.apply(table).T).T for near, far in self.ways]
        return torch.stack(parts).mean(0)

    @property
    def linear_moves(self) -> bool:
        """Whether (1 - alpha) M moves."""
        return bool(self.tracked & {"M", "F_X", "F_Y", "alpha"})

    @classmethod
    def of(cls, definition: Definition, inputs: Mapping[str, Tensor]) -> Model:
        """Write a problem as a function of the inputs; the rest of it is constant."""
        problem, features, metric, _ = definition
        device, dtype = problem.source.device, torch.float64
        moved = {name: value.to(device, dtype) for name, value in inputs.items()}
        a, b = (
            moved[name] / moved[name].sum() if name in moved else given
            for name, given in zip(("a", "b"), problem.marginals, strict=True)
        )
        source = side_of(problem.source, moved.get("X"), moved.get("D_X"))
        target = side_of(problem.target, moved.get("Y"), moved.get("D_Y"))
        linear = problem.linear
        if "M" in moved:
            linear = DenseCost(moved["M"])
        if features is not None:
            pair = (item.to(device, dtype) for item in features)
            near, far = (
                moved.get(name, item) for name, item in zip(("F_X", "F_Y"), pair, strict=True)
            )
            linear = feature_cost(near, far, metric)
        alpha = moved.get("alpha", problem.alpha)
        tracked = frozenset(inputs)
        return cls(source, target, a, b, linear, alpha, tracked, moved.get("epsilon"))
