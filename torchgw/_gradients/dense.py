"""The exact gradient by matrix products of stored tables."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from torchgw._gradients.contract import (
    CostRows,
    ExactCoupling,
    LinearCost,
    Linearised,
    Plan,
    QuadraticValue,
    StrictGradient,
    add_linear,
    exact_own_terms,
    own_value,
    product_value,
)
from torchgw._plans.transport import TransportPlan
from torchgw._problem.cross_terms import BothWays, MinimumCross
from torchgw._problem.losses import transformed
from torchgw._problem.problem import Problem, stored_matrix
from torchgw._sinkhorn.cost import Cost, DenseCost
from torchgw._typing import Marginals
from torchgw.distances.directed import DirectedDistance
from torchgw.distances.precomputed import PrecomputedDistance


def _total(matrix: Tensor) -> Tensor:
    """Sum a matrix in float64, without a float64 copy of it."""
    return matrix.sum(1).sum(dtype=torch.float64)


class PlanMatrix(ExactCoupling):
    """The plan itself, (n, m)."""

    def change(self, previous: PlanMatrix) -> Tensor:
        """Compute the L1 distance of two plans, which have mass one."""
        return _total((self.values - previous.values).abs_())


class DenseGradient(StrictGradient):
    """Exact, by matrix products of stored tables."""

    name = "dense"
    exact = True
    momentum = True
    stores = True

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._cross = problem.cross()
        self.row, self.column = exact_own_terms(problem)
        total = self._cross.total(*(weight.to(problem.dtype) for weight in problem.marginals))
        self.product = product_value(problem, (self.row, self.column), total)

    def why_not_captured(self) -> str | None:
        """Say why its calls cannot be recorded as CUDA graphs, or ``None``."""
        # the distances are stored, whatever provides them
        return None if self.problem.loss.cross is not None else super().why_not_captured()

    def kind(self) -> Hashable:
        """Say what its calls depend on besides :meth:`tables`."""
        problem, shapes = self.problem, tuple(part.shape for part in self.tables())
        return self.name, problem.dtype, problem.alpha, type(problem.linear), shapes

    def copy(self) -> DenseGradient:
        """Make the same linearisation on tables of its own, as one of the square loss."""
        tables = self._cross.tables()
        kind: type[PrecomputedDistance] = PrecomputedDistance
        if isinstance(self._cross, BothWays):
            (source_table, _, _, target_table), kind = tables, DirectedDistance
            tables = source_table, target_table
        source, target = (kind.unchecked(part.clone()) for part in tables)
        problem = self.problem
        marginals, linear = Marginals(*map(Tensor.clone, problem.marginals)), problem.linear
        # costs of either kind are named tuples of tensors
        linear = None if linear is None else type(linear)(*map(Tensor.clone, linear))
        return DenseGradient(Problem(source, target, marginals, problem.alpha, linear))

    def tables(self) -> tuple[Tensor, ...]:
        """List all that linearising reads, and the vectors beside its costs."""
        rest = self.problem.linear or ()
        return (
            *self._cross.tables(), self.row, self.column, *self.problem.marginals, *rest
        )  # fmt: skip

    def start(self) -> PlanMatrix:
        """Make a x b."""
        a, b = (weight.to(self.problem.dtype) for weight in self.problem.marginals)
        return PlanMatrix(torch.outer(a, b))

    def linearise(self, coupling: PlanMatrix) -> LinearCost:
        """Compute the stored cost at a plan."""
        matrix = self._products(coupling.values.to(self.problem.dtype))
        return LinearCost(add_linear(DenseCost(matrix), self.problem), self.row, self.column)

    def _products(self, plan: Tensor) -> Tensor:
        """Compute -4 alpha DX P DY."""
        return self._cross(plan).mul_(-4 * self.problem.alpha)

    def update(
        self, plan: Plan, previous: PlanMatrix | None, generator: torch.Generator
    ) -> PlanMatrix:
        """Build the plan as a matrix."""
        return PlanMatrix(plan.stored())

    def pairing(self, cost: Cost, point: PlanMatrix, coupling: PlanMatrix) -> Tensor:
        """Compute <C(X) - (1 - alpha) M, P> by one pass over both matrices."""
        whole = _total(cost.dense().matrix * coupling.values)
        linear = self.problem.linear
        if linear is None:
            return whole
        share = _total(linear.dense().matrix * coupling.values)
        return whole - (1 - self.problem.alpha) * share

    def evaluate(
        self,
        plan: TransportPlan,
        masses: Marginals,
        generator: torch.Generator,
        coupling: PlanMatrix | None = None,
    ) -> QuadraticValue:
        """Compute the value by matrix products."""
        dense = (coupling or self.update(plan, None, generator)).values.to(self.problem.dtype)
        own = own_value(self.problem, masses)
        cross = torch.sum(self._cross(dense) * dense, dtype=torch.float64)
        return QuadraticValue(float(own - 2 * cross), 0.0)

    def remember(self, coupling: PlanMatrix, masses: Marginals) -> Linearised:
        """Keep the plan and the distances."""
        problem = self.problem
        sides = problem.source, problem.target
        return Linearised("dense", sides, coupling.values, problem.alpha, problem.loss)

    @staticmethod
    def rows_at(known: Linearised, side: int) -> CostRows:
        """Make -4 alpha d P DY, for distances d of new points to all known ones."""
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
