"""Coarse to fine: begin a large factored solve where a small one ended.

The coupling of a factored gradient, G = A_X' P A_Y, does not depend on the number of points, so
that of a subsample is an estimate of the whole one's, and potentials extend from the subsample to
all points by one half-step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._gradients.contract import Coupling, Gradient
from torchgw._problem.problem import Problem
from torchgw._search.optima import Search
from torchgw._sinkhorn.contract import Backend
from torchgw._sinkhorn.cost import FactoredCost
from torchgw._sinkhorn.problem import LinearProblem
from torchgw._tensors.draws import categories_at
from torchgw._typing import Marginals, Potentials
from torchgw.distances.factored import FactoredDistance

__all__ = ["Subsample", "draw_subsample", "extend"]


class Subsample(NamedTuple):
    """A smaller problem of equally weighted points, and where they come from."""

    problem: Problem
    source: Tensor  # (n_coarse,) int64
    target: Tensor  # (m_coarse,) int64

    def to(self, dtype: torch.dtype) -> Subsample:
        """Return the subsample with its distances in another dtype."""
        return self._replace(problem=self.problem.to(dtype))

    def lift(self, search: Search, shape: tuple[int, int]) -> Search:
        """Return optima of the subsample as optima of the problem that it comes from."""
        lifted = [
            replace(
                found,
                source=self.source[found.source],
                target=self.target[found.target],
                shape=shape,
            )
            for found in search.alternatives
        ]
        return search._replace(alternatives=tuple(lifted))


def draw_subsample(problem: Problem, size: int, generator: torch.Generator) -> Subsample:
    """Draw at most ``size`` points of each side in proportion to their weights.

    Parameters
    ----------
    problem : Problem
        Both sides have factors, and a linear term has them too.
    size : int
    generator : torch.Generator
    """
    indices, sides, weights = [], [], []
    both = (problem.source, problem.target)
    for provider, weight in zip(both, problem.marginals, strict=True):
        factors = provider.factors()
        assert factors is not None
        index = _systematic(factors.matrix, weight, min(size, provider.n), generator)
        indices.append(index)
        sides.append(FactoredDistance(factors.matrix[index], factors.signs))
        weights.append(torch.full_like(weight[index], 1 / len(index)))
    linear = problem.linear
    if linear is not None:
        linear = linear.rows(indices[0]).transpose().rows(indices[1]).transpose()
    coarse = Problem(sides[0], sides[1], Marginals(*weights), problem.alpha, linear)
    return Subsample(coarse, indices[0], indices[1])


def _systematic(factors: Tensor, weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw indices at equal steps of the cumulative weight, along the widest factor.

    A point is drawn weight * count times, rounded up or down: equal weights give distinct points.
    Steps along the order of a coordinate leave less to chance than independent draws would.
    """
    widest = int(factors.var(dim=0).argmax())
    order = factors[:, widest].argsort()
    offset = torch.rand((), dtype=weights.dtype, device=weights.device, generator=generator)
    steps = torch.arange(count, device=weights.device, dtype=weights.dtype) + offset
    return order[categories_at(weights[order], steps / count)]


def extend(
    sample: Subsample,
    fine: Gradient,
    coupling: Coupling,
    potentials: Potentials,
    epsilon: float,
    backend: Backend,
) -> Potentials:
    """Extend the potentials of a subsample to all points, by one half-step each way.

    Both problems share the coupling, hence the factors of the cost.
    """
    whole = fine.linearise(coupling).cost
    assert isinstance(whole, FactoredCost)
    marginals = sample.problem.marginals
    columns = FactoredCost(
        whole.left, whole.right[sample.target], whole.row, whole.column[sample.target]
    )
    fine_a, fine_b = fine.marginals
    near = LinearProblem(columns, Marginals(fine_a, marginals.b), epsilon)
    far = LinearProblem(whole.rows(sample.source), Marginals(marginals.a, fine_b), epsilon)
    return Potentials(
        backend.prepare(near).softmin(potentials.g, axis=1),
        backend.prepare(far).softmin(potentials.f, axis=0),
    )
