"""The exact gradient by matrix products of stored tables."""

from __future__ import annotations

import torch
from torch import Tensor

from torchgw._gradients.contract import (
    CostRows,
    Linearised,
    Plan,
    QuadraticValue,
    add_linear,
    exact_own_terms,
    own_value,
    product_value,
)
from torchgw._plans.transport import TransportPlan
from torchgw._problem.cross_terms import MinimumCross
from torchgw._problem.losses import transformed
from torchgw._problem.problem import Problem, stored_matrix
from torchgw._sinkhorn.cost import Cost, DenseCost
from torchgw._typing import Marginals
from torchgw.distances.precomputed import PrecomputedDistance

__all__ = ["DenseGradient"]


def _total(matrix: Tensor) -> Tensor:
    """Return the sum of a matrix in float64, without a float64 copy of it."""
    return matrix.sum(1).sum(dtype=torch.float64)


class DenseGradient:
    """Exact, by matrix products of stored tables."""

    name = "dense"
    exact = True

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._cross = problem.cross()
        self.row, self.column = exact_own_terms(problem)
        total = self._cross.total(*(weight.to(problem.dtype) for weight in problem.marginals))
        self.product = product_value(problem, (self.row, self.column), total)

    def copy(self) -> DenseGradient:
        """Return the same linearisation on tables of its own, as one of the square loss."""
        source, target = (
            PrecomputedDistance.unchecked(part.clone()) for part in self._cross.tables()
        )
        problem = self.problem
        marginals, linear = Marginals(*map(Tensor.clone, problem.marginals)), problem.linear
        # costs of either kind are named tuples of tensors
        linear = None if linear is None else type(linear)(*map(Tensor.clone, linear))
        return DenseGradient(Problem(source, target, marginals, problem.alpha, linear))

    def tables(self) -> tuple[Tensor, ...]:
        """Return all that linearising reads, and the vectors that its costs leave out."""
        rest = self.problem.linear or ()
        return (
            *self._cross.tables(), self.row, self.column, *self.problem.marginals, *rest
        )  # fmt: skip

    def start(self) -> Tensor:
        """Return a x b."""
        a, b = (weight.to(self.problem.dtype) for weight in self.problem.marginals)
        return torch.outer(a, b)

    def linearise(self, coupling: Tensor | None) -> Cost:
        """Return the stored cost at a plan of shape (n, m)."""
        assert coupling is not None
        alpha = self.problem.alpha
        matrix = self._cross(coupling.to(self.problem.dtype)).mul_(-4 * alpha)
        return add_linear(DenseCost(matrix), self.problem)

    def update(self, plan: Plan, coupling: Tensor | None, generator: torch.Generator) -> Tensor:
        """Return the plan as a matrix."""
        return plan.stored()

    def mean(
        self, coupling: Tensor, latest: Tensor, share: float, generator: torch.Generator
    ) -> Tensor:
        """Return the mean itself, which is as large as either."""
        return torch.lerp(coupling.to(latest.dtype), latest, share)

    def change(self, coupling: Tensor, previous: Tensor | None) -> Tensor:
        """Return the L1 distance of two plans, which have mass one."""
        assert previous is not None
        return _total((coupling - previous).abs_())

    def pairing(self, cost: Cost, point: Tensor, coupling: Tensor) -> Tensor:
        """Return <C(X) - (1 - alpha) M, P> by one pass over both matrices."""
        whole = _total(cost.dense().matrix * coupling)
        linear = self.problem.linear
        if linear is None:
            return whole
        share = _total(linear.dense().matrix * coupling)
        return whole - (1 - self.problem.alpha) * share

    def evaluate(
        self, plan: TransportPlan, masses: Marginals, generator: torch.Generator
    ) -> QuadraticValue:
        """Return the value by matrix products."""
        dense = plan.stored().to(self.problem.dtype)
        own = own_value(self.problem, masses)
        cross = torch.sum(self._cross(dense) * dense, dtype=torch.float64)
        return QuadraticValue(own - 2 * float(cross), 0.0)

    def remember(self, coupling: Tensor, masses: Marginals) -> Linearised:
        """Return the plan and the distances."""
        problem = self.problem
        sides = problem.source, problem.target
        return Linearised("dense", sides, coupling, problem.alpha, problem.loss)

    @staticmethod
    def rows_at(known: Linearised, side: int) -> CostRows:
        """Return -4 alpha d P DY, for distances d of new points to all known ones."""
        far, weight = known.distances(1 - side), 4 * known.alpha
        coupling = known.oriented(side)
        if known.loss.cross is None:
            table = stored_matrix(far).double()
            plan = coupling.to_dense() if coupling.is_sparse else coupling
            return CostRows(lambda d: DenseCost(-weight * MinimumCross(d, table)(plan)), None)
        near, far = known.loss.cross[side], transformed(far, known.loss.cross[1 - side])

        def rows(distances: Tensor) -> Cost:
            # the coupling is sparse where it comes from a file
            right = coupling.T @ (near(distances) * weight).T
            return DenseCost(-far.apply(right.to(far.dtype)).T.double())

        return CostRows(rows, None)
