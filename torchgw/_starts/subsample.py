"""Coarse to fine: a few points that stand for all of a large factored problem.

The coupling of a factored gradient, G = A_X' P A_Y, does not depend on the number of points, so
that of a coarse problem is an estimate of the whole one's, and potentials extend from it to all
points by one half-step. Coarse points are drawn (a first guess), or are the means of cells of near
points, whose potentials are as exact as the cells are small.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._gradients.contract import Read, every
from torchgw._problem.problem import Problem
from torchgw._sinkhorn.contract import Backend
from torchgw._sinkhorn.problem import FactoredCost, LinearProblem
from torchgw._starts.alternatives import Search
from torchgw._tensors.block_order import Order
from torchgw._tensors.operations import systematic_categories
from torchgw._typing import Marginals, Potentials
from torchgw.distances.base import BLOCK_ENTRIES
from torchgw.distances.factored import FactoredDistance


class Drawn(NamedTuple):
    """Some of the points."""

    chosen: Tensor  # (coarse,) int64

    def take(self, values: Tensor) -> Tensor:
        """Read the values of the drawn points."""
        return values[self.chosen]

    def points(self, index: Tensor) -> Tensor:
        """Name the points themselves."""
        return self.chosen[index]


class Cells(NamedTuple):
    """Blocks of near points, each at its mean."""

    order: Order
    share: Tensor  # (blocks, width) float64, of the weight of a block that each point has

    @classmethod
    def of(cls, order: Order, weight: Tensor) -> "Cells":
        """Weigh the points of each block; where none has weight, all have the same."""
        mass = order.split(weight, 0.0)
        place = torch.arange(mass.numel(), device=mass.device).view(mass.shape)
        mass = torch.where(mass.sum(1, keepdim=True) > 0, mass, (place < len(weight)).to(mass))
        return cls(order, mass / mass.sum(1, keepdim=True))

    def take(self, values: Tensor) -> Tensor:
        """Compute the weighted means of blocks."""
        points = self.order.split(torch.arange(len(values), device=values.device))
        # some at a time, as values of all points in another order take as much as they
        height = max(1, BLOCK_ENTRIES // self.order.width)
        means = [
            torch.einsum("kw...,kw->k...", values[some], share.to(values.dtype))
            for some, share in zip(points.split(height), self.share.split(height), strict=True)
        ]
        return torch.cat(means)

    def points(self, index: Tensor) -> Tensor:
        """Name the first point of each cell."""
        return self.order.point[index * self.order.width]


# How the coarse points of one side come from its points.
Part = Drawn | Cells


class Coarse(NamedTuple):
    """A smaller problem, and where its points come from."""

    problem: Problem
    source: Part
    target: Part

    def to(self, dtype: torch.dtype) -> "Coarse":
        """Return the coarse problem with its distances in another dtype."""
        return self._replace(problem=self.problem.to(dtype))

    def lift(self, search: Search, shape: tuple[int, int]) -> Search:
        """Return optima of the coarse problem as optima of the one that it comes from."""
        lifted = [
            replace(
                found,
                source=self.source.points(found.source),
                target=self.target.points(found.target),
                shape=shape,
            )
            for found in search.alternatives
        ]
        return search._replace(alternatives=tuple(lifted))


def draw_subsample(problem: Problem, size: int, generator: torch.Generator) -> Coarse:
    """Draw at most ``size`` points of each side, all with factors, in proportion to their weights.

    Steps along the order of their widest factor leave less to chance than independent draws would.
    """
    drawn, weights = [], []
    for provider, weight in zip(problem.sides, problem.marginals, strict=True):
        factors = provider.factors()
        assert factors is not None
        mean = factors.matrix.sum(dim=0) / provider.n
        centred = factors.matrix - mean
        widest = int(centred.mul_(centred).sum(dim=0).argmax())
        del centred
        order = (factors.matrix[:, widest] - mean[widest]).argsort()
        index = order[systematic_categories(weight[order], min(size, provider.n), generator)]
        drawn.append(Drawn(index))
        weights.append(torch.full_like(weight[index], 1 / len(index)))
    return _coarsen(problem, (drawn[0], drawn[1]), Marginals(*weights))


def make_cells(problem: Problem, orders: tuple[Order, Order]) -> Coarse:
    """Replace the points of each block, of either side, by their mean; all have factors."""
    sides = list(zip(orders, problem.marginals, strict=True))
    cells = [Cells.of(order, weight) for order, weight in sides]
    weights = (order.split(weight, 0.0).sum(1) for order, weight in sides)
    return _coarsen(problem, (cells[0], cells[1]), Marginals(*weights))


def _coarsen(problem: Problem, parts: tuple[Part, Part], weights: Marginals) -> Coarse:
    """Make the problem of coarse points, whose factors are those that the points stand for."""
    sides = []
    for provider, part in zip(problem.sides, parts, strict=True):
        factors = provider.factors()
        assert factors is not None
        sides.append(FactoredDistance(part.take(factors.matrix), factors.signs))
    linear = problem.linear
    if linear is not None:
        assert isinstance(linear, FactoredCost)
        linear = take(linear, *parts)
    return Coarse(Problem(sides[0], sides[1], weights, problem.alpha, linear), *parts)


def take(cost: FactoredCost, source: Part | None, target: Part | None) -> FactoredCost:
    """Restrict a cost to the coarse points of one side or both."""
    left, right, row, column = cost
    if source is not None:
        left, row = source.take(left), source.take(row)
    if target is not None:
        right, column = target.take(right), target.take(column)
    return FactoredCost(left, right, row, column)


def extend(
    coarse: Coarse,
    whole: Callable[[Read, Read], FactoredCost],
    fine: Marginals,
    potentials: Potentials,
    epsilon: float,
    backend: Backend,
) -> Potentials:
    """Extend the potentials of a coarse problem to all points, by one half-step each way."""
    # `whole` makes the cost of what is read of all points, at the coupling of the coarse problem,
    # and `fine` are their weights.
    few = coarse.problem.marginals
    near = LinearProblem(whole(every, coarse.target.take), Marginals(fine.a, few.b), epsilon)
    f = backend.prepare(near).softmin(potentials.g, axis=1)
    del near
    far = LinearProblem(whole(coarse.source.take, every), Marginals(few.a, fine.b), epsilon)
    return Potentials(f, backend.prepare(far).softmin(potentials.f, axis=0))
