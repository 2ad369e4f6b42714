"""Scalars with the same derivatives as an objective or a plan, written by streamed products.

Each takes a ``moving`` model, which it is differentiated by, and a ``still`` one for all that is
held constant. Its value means nothing (docs/algorithm.md, equations 21, 22 and 26).
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchgw._derivatives.implicit import Response
from torchgw._derivatives.sides import TrackedSide
from torchgw._derivatives.tracked import Model
from torchgw._plans.pairs import Anchors
from torchgw._plans.transport import TransportPlan
from torchgw._sinkhorn.cost import DenseCost, FactoredCost
from torchgw.distances.base import both_ways

# A matrix over pairs of points, known by its products.
Map = TransportPlan | Response


def pairs(moving: Model, still: Model, left: Map, right: Map) -> Tensor:
    """Make a scalar that changes like <DX, left DY right'> with the distances that move."""
    total = moving.a.new_zeros(())
    if moving.tracked & {"X", "D_X"}:
        total = total + _pair(moving.source, still.source, still.target, left, right)
    if moving.tracked & {"Y", "D_Y"}:
        turned = left.T
        other = turned if left is right else right.T
        total = total + _pair(moving.target, still.target, still.source, turned, other)
    return total


def _pair(
    side: TrackedSide, held: TrackedSide, other: TrackedSide, left: Map, right: Map
) -> Tensor:
    """Make a scalar that changes with D like <D, left D_other right'>, equation 22."""
    form, held_form, far = side.form(), held.form(), other.form()
    if form is not None and held_form is not None:
        matrix = held_form.matrix
        reach = left @ other.apply(right.T @ matrix)
        # a plan with itself: both terms are the same
        back = reach if left is right else right @ other.apply(left.T @ matrix)
        return (form.matrix * ((reach + back) @ form.form)).sum()
    if far is not None:
        return ((left @ (far.matrix @ far.form)) * side.apply(right @ far.matrix)).sum()
    ways = both_ways(side, other)
    table = right.stored().T.double()
    return torch.stack([near.inner(left @ far.apply(table)) for near, far in ways]).mean()


def linear(moving: Model, still: Model, weights: Map) -> Tensor:
    """Make a scalar that changes like <M, weights> with a linear cost that moves."""
    cost, held = moving.linear, still.linear
    if cost is None or not moving.tracked & {"M", "F_X", "F_Y"}:
        return moving.a.new_zeros(())
    if isinstance(cost, DenseCost):
        return (cost.matrix * weights.stored().double()).sum()
    assert isinstance(held, FactoredCost)
    near = weights @ torch.cat([held.right, torch.ones_like(held.right[:, :1])], dim=1)
    far = weights.T @ torch.cat([held.left, torch.ones_like(held.left[:, :1])], dim=1)
    products = (cost.left * near[:, :-1]).sum() + (cost.right * far[:, :-1]).sum()
    return cost.row @ near[:, -1] + cost.column @ far[:, -1] - products


def sampled_pairs(moving: Model, still: Model, plan: TransportPlan, anchors: Anchors) -> Tensor:
    """Estimate :func:`pairs` of a plan with itself from pairs of points drawn from the plan."""
    # both ways are the same
    (source, target), (moved_source, moved_target) = still.ways[0], moving.ways[0]
    near, far = source.columns(anchors.source), target.columns(anchors.target)
    total = moving.a.new_zeros(())
    if moving.tracked & {"X", "D_X"}:
        total = total + (moved_source.columns(anchors.source) * (plan @ far)).sum()
    if moving.tracked & {"Y", "D_Y"}:
        total = total + (moved_target.columns(anchors.target) * (plan.T @ near)).sum()
    return total / len(anchors.source)
