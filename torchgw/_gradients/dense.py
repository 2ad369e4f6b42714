"""The exact gradient by products of stored tables, some of them in half precision."""

from collections.abc import Hashable

import torch
from torch import Generator, Tensor

from torchgw._gradients import contract
from torchgw._gradients.contract import Own, Plan
from torchgw._plans.transport import TransportPlan
from torchgw._problem.losses import MinimumCross, transformed
from torchgw._problem.problem import Problem, stored_matrix
from torchgw._sinkhorn.eager import SMALLEST
from torchgw._sinkhorn.problem import Cost, DenseCost, block
from torchgw._typing import Marginals, Points
from torchgw.distances.precomputed import DirectedDistance, PrecomputedDistance

# The largest entry of a factor is scaled to this: below the largest half-precision number, and far
# from the smallest. [L270]
_LARGEST = 2.0**13


def _total(matrix: Tensor) -> Tensor:
    """Sum a matrix in float64, without a float64 copy of it."""
    return matrix.sum(1).sum(dtype=torch.float64)


class PlanMatrix(contract.ExactCoupling):
    """The plan itself, (n, m)."""

    def change(self, previous: "PlanMatrix") -> Tensor:
        """Compute the L1 distance of two plans, which have mass one."""
        return _total((self.values - previous.values).abs_())


class DenseGradient(contract.StrictGradient):
    """Exact, by matrix products of stored tables."""

    name = "dense"
    exact = True
    momentum = True
    stores = True

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._cross = problem.cross()
        self.row, self.column = contract.exact_own_terms(problem)
        total = self._cross.total(*(weight.to(problem.dtype) for weight in problem.marginals))
        self.product = contract.product_value(problem, (self.row, self.column), total)

    def why_not_captured(self) -> str | None:
        # tables are stored, so the provider of the distances does not matter
        return None if self.problem.loss.cross is not None else super().why_not_captured()

    def kind(self) -> Hashable:
        problem, shapes = self.problem, tuple(part.shape for part in self.tables())
        return self.name, problem.dtype, problem.alpha, type(problem.linear), shapes

    def copy(self) -> "DenseGradient":
        """Make the same linearisation on tables of its own, as one of the square loss."""
        problem, crossed = self.problem, self.problem.crossed()
        assert crossed is not None
        directed = len(self._cross.tables()) > 2
        source, target = (
            DirectedDistance.unchecked(side.table.clone())
            if directed and isinstance(side, DirectedDistance)
            else PrecomputedDistance.unchecked(stored_matrix(side).clone())
            for side in crossed
        )
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
        a, b = (weight.to(self.problem.dtype) for weight in self.problem.marginals)
        return PlanMatrix(torch.outer(a, b))

    def linearise(self, coupling: PlanMatrix) -> contract.LinearCost:
        matrix = self._products(coupling.values.to(self.problem.dtype))
        return contract.LinearCost(
            contract.add_linear(DenseCost(matrix), self.problem), self.row, self.column
        )

    def _products(self, plan: Tensor) -> Tensor:
        """Compute -4 alpha DX P DY."""
        return self._cross(plan).mul_(-4 * self.problem.alpha)

    def block(self, coupling: PlanMatrix, rows: Points, columns: Points) -> Cost:
        problem, plan = self.problem, coupling.values.to(self.problem.dtype)
        table = self._cross.block(rows, columns)(plan).mul_(-4 * problem.alpha)
        if problem.linear is not None:
            linear = block(problem.linear, rows, columns).dense().matrix
            table = table.add_(linear, alpha=1 - problem.alpha)
        return DenseCost(table)

    def update(self, plan: Plan, previous: PlanMatrix | None, generator: Generator) -> PlanMatrix:
        return PlanMatrix(plan.stored())

    def pairing(self, cost: Cost, point: PlanMatrix, coupling: PlanMatrix) -> Tensor:
        """Compute <C(X) - (1 - alpha) M, P> by one pass over both matrices."""
        whole = _total(cost.dense().matrix * coupling.values)
        linear = self.problem.linear
        if linear is None:
            return whole
        return whole - (1 - self.problem.alpha) * _total(linear.dense().matrix * coupling.values)

    def evaluate(
        self, plan: TransportPlan, masses: Marginals, generator: Generator, coupling: Own = None
    ) -> contract.QuadraticValue:
        dense = (coupling or self.update(plan, None, generator)).values.to(self.problem.dtype)
        own = contract.own_value(self.problem, masses)
        cross = torch.sum(self._cross(dense) * dense, dtype=torch.float64)
        return contract.QuadraticValue(float(own - 2 * cross), 0.0)

    def remember(self, coupling: PlanMatrix, masses: Marginals) -> contract.Linearised:
        return self.remembered(coupling.values)

    @staticmethod
    def rows_at(known: contract.Linearised, side: int) -> contract.CostRows:
        """Make -4 alpha d P DY, for distances d of new points to all known ones."""
        far, weight = known.distances(1 - side), 4 * known.alpha
        coupling = known.oriented(side)
        if known.loss.cross is None:
            table = stored_matrix(far).double()
            plan = coupling.to_dense() if coupling.is_sparse else coupling
            return contract.CostRows(
                lambda d: DenseCost(-weight * MinimumCross(d, table)(plan)), None
            )
        near, far = known.loss.cross[side], transformed(far, known.loss.cross[1 - side])

        def rows(distances: Tensor) -> Cost:
            # the coupling is sparse where it comes from a file
            right = coupling.T @ (near(distances) * weight).T
            return DenseCost(-far.apply(right.to(far.dtype)).T.double())

        return contract.CostRows(rows, None)


class HalfGradient(DenseGradient):
    """Exact up to float32 by half-precision products; for strict marginals."""

    # With the centred distances X = (I - 1 a') DX (I - a 1') and u = DX a - a' DX a, and Y and w
    # the same of the target, a plan P has
    #   DX P DY = X P Y + (X P w + cy u) 1' + 1 (Y P' u + cx w)' + u w' + (u' P w + cx cy)
    # where cx = a' DX a. The numbers of X P Y are small and of both signs. Each factor of a product
    # is a sum of two half-precision numbers, and three of the four products of these are kept, as
    # one product of three times the length. Accumulation is in float32.
    # The problem has the square loss and is in float32. A `rough` gradient keeps the first part of
    # each number only, which is a third of the work: each entry of a factor is then off by up to
    # 5e-4 of itself, at random, and a sum over n of them by a root of n less.

    def __init__(self, problem: Problem, *, rough: bool = False) -> None:
        super().__init__(problem)
        a, b = problem.marginals
        self._x, self._u, self._cx = _centre(stored_matrix(problem.source), a)
        self._y, self._w, self._cy = _centre(stored_matrix(problem.target), b)
        units = [1 / float(table.abs().max().clamp_min(SMALLEST)) for table in (self._x, self._y)]
        self._rough = rough
        self._left = self._parts(self._x * units[0], dim=1, other=False)
        self._right = self._parts(self._y * units[1], dim=0, other=True)
        self._unit = 1 / (units[0] * units[1])

    def tables(self) -> tuple[Tensor, ...]:
        """List nothing: graphs on so large a problem serve one solve."""
        return ()

    def _products(self, plan: Tensor) -> Tensor:
        """Compute -4 alpha DX P DY by half-precision products."""
        # a plan between coarse points has entries far above the weights
        first = _scale(plan)
        inner = product(self._left, self._parts(plan * first, dim=0, other=True))
        second = _scale(inner)
        matrix = product(self._parts(inner.mul_(second), dim=1, other=False), self._right)
        along, down = plan @ self._w, self._u @ plan
        row = self._x @ along + self._cy * self._u
        column = self._y @ down + self._cx * self._w
        factor = -4 * self.problem.alpha
        matrix.mul_(factor * self._unit / (first * second))
        # X P w and Y P' u have mean zero, and carry no constant
        column += self._u @ along + self._cx * self._cy
        left = torch.stack([self._u, row, torch.ones_like(row)], dim=1)
        right = torch.stack([self._w, torch.ones_like(column), column])
        return matrix.addmm_(left, right, alpha=factor)

    def _parts(self, matrix: Tensor, *, dim: int, other: bool) -> Tensor:
        return matrix.half() if self._rough else split(matrix, dim=dim, other=other)


def _scale(matrix: Tensor) -> Tensor:
    """Compute the factor, (), that makes the largest entry a large half-precision number."""
    largest = torch.linalg.vector_norm(matrix, torch.inf)
    found: Tensor = _LARGEST / largest.clamp_min(torch.finfo(matrix.dtype).tiny * _LARGEST)
    return found


def _centre(table: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, float]:
    """Compute the doubly centred table, the centred row means, and the mean, by weight."""
    mean = table.double() @ weight
    whole = float(mean @ weight)
    mean = mean - whole
    centred = table - mean[:, None].to(table.dtype) - (mean + whole).to(table.dtype)
    return centred, mean.to(table.dtype), whole


def split(matrix: Tensor, *, dim: int, other: bool) -> Tensor:
    """Split a matrix into half-precision parts, ordered to match those of the other factor."""
    # High, high, low, or for the `other` factor high, low, high, put one after another in a
    # dimension, so that their product is high high + high low + low high.
    high = matrix.half()
    low = (matrix - high).half()
    return torch.cat([high, low, high] if other else [high, high, low], dim)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply two half-precision matrices in float32."""
    if left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=torch.float32)
    # the same numbers: products of two half-precision numbers are exact in float32
    return left.float() @ right.float()
