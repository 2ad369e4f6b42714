"""The exact gradient from factors of the distances, whose coupling is small."""

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from torchgw._gradients.contract import (
    CostRows,
    ExactCoupling,
    LinearCost,
    Linearised,
    Own,
    Plan,
    QuadraticValue,
    Read,
    StrictGradient,
    every,
    exact_own_terms,
    own_value,
    product_value,
)
from torchgw._plans.transport import TransportPlan
from torchgw._problem.losses import transformed
from torchgw._problem.problem import Problem
from torchgw._sinkhorn.problem import Cost, DenseCost, FactoredCost, added
from torchgw._tensors.operations import average, inner_products, lengths
from torchgw._typing import Marginals
from torchgw.distances.base import DistanceProvider, Factors
from torchgw.distances.new_points import factor_reference, factor_rows


class _Side(NamedTuple):
    """One factor of DX P DY: D = decode(metric . encode), with or without factors of D."""

    provider: DistanceProvider
    factors: Factors | None

    def encode(self, values: Tensor) -> Tensor:
        """Compute A' V, or V where D has no factors."""
        return values if self.factors is None else inner_products(self.factors.matrix, values)

    def metric(self, encoded: Tensor) -> Tensor:
        """Compute diag(s) W, or D W where D has no factors."""
        if self.factors is None:
            return self.provider.apply(encoded)
        return self.factors.signs[:, None] * encoded


class Encoding(ExactCoupling):
    """The product of a plan with the factors of the distances."""

    def change(self, previous: "Encoding") -> Tensor:
        """Compute the relative change in the Frobenius norm."""
        values = self.values
        step, size = (lengths(part.flatten(), 0) for part in (values - previous.values, values))
        return (step / size.clamp_min(torch.finfo(values.dtype).tiny)).double()


class FactoredGradient(StrictGradient):
    """Exact, from factors D = A diag(s) A' of at least one side."""

    # With factors on both sides the coupling is G = A_X' P A_Y, whose size does not depend on n;
    # with factors on one side only it is P A_Y, and the other side multiplies it by D as a whole.

    name = "factored"
    exact = True
    lossy = True

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        both = problem.crossed()
        assert both is not None
        self.row, self.column = exact_own_terms(problem)
        a, b = (weight.to(problem.dtype)[:, None] for weight in problem.marginals)
        total = (a * both[0].apply(a)).sum() * (b * both[1].apply(b)).sum()
        self.product = product_value(problem, (self.row, self.column), total)
        source, target = (side.factors() for side in both)
        # The side of smaller rank carries the streamed products, whose cost is its rank.
        ranks = [factors.signs.numel() if factors else float("inf") for factors in (source, target)]
        self._swapped = ranks[0] < ranks[1]
        sides = _Side(both[0], source), _Side(both[1], target)
        self._left, self._right = sides[::-1] if self._swapped else sides
        assert self._right.factors is not None
        self._factors = self._right.factors
        self._shared, self._linear = self._in_same_factors(problem.linear)

    def start(self) -> Encoding:
        a, b = (weight.to(self.problem.dtype) for weight in self.problem.marginals)
        left, right = (b, a) if self._swapped else (a, b)
        return Encoding(self._left.encode(torch.outer(left, right @ self._factors.matrix)))

    def _measured(self, coupling: Encoding) -> Tensor:
        """Apply the metrics of both sides to a coupling."""
        return self._left.metric(coupling.values.to(self.problem.dtype)) * self._factors.signs

    def linearise(self, coupling: Encoding) -> LinearCost:
        return LinearCost(self._cost(coupling), self.row, self.column)

    @cached_property
    def _mean(self) -> Tensor:
        """Average the factors of the right side."""
        return average(self._factors.matrix)

    def _cost(self, coupling: Encoding, source: Read = every, target: Read = every) -> Cost:
        """Compute the cost between what is read of the points of both sides."""
        # Factors have zero mean over all points: products are smaller then, so that low-precision
        # ones, which 1/epsilon amplifies, lose less. Cross terms are those of rows and columns.
        first, second = (target, source) if self._swapped else (source, target)
        turn = 4 * self.problem.alpha * self._measured(coupling)
        if self._left.factors is None:
            mean = average(turn)
            left = first(turn) - mean
        else:
            matrix = self._left.factors.matrix
            mean = average(matrix) @ turn
            left = torch.addmm(-mean, first(matrix), turn)
        if self._shared is not None:
            ours = average(self._shared)
            mean, left = mean + ours, left + (first(self._shared) - ours)
        right = second(self._factors.matrix) - self._mean
        row, column = -(left @ self._mean) - mean @ self._mean, -(right @ mean)
        cost = FactoredCost(left, right, row, column)
        cost = cost.transpose() if self._swapped else cost
        if self._linear is None:
            return cost
        linear = self._linear
        if isinstance(linear, FactoredCost):
            linear = FactoredCost(
                source(linear.left), target(linear.right), source(linear.row), target(linear.column)
            )
        return added(cost, linear, 1 - self.problem.alpha)

    def _in_same_factors(self, linear: Cost | None) -> tuple[Tensor | None, Cost | None]:
        """Split off (1 - alpha) M what is in the factors of the distances, as of known pairs."""
        # What they share costs nothing more.
        known, rank = self._factors.matrix, self._factors.signs.numel()
        if not isinstance(linear, FactoredCost) or linear.rank < rank:
            return None, linear
        turned = linear.transpose() if self._swapped else linear
        # made of the same numbers in another dtype
        rounding = 8 * torch.finfo(known.dtype).eps * known.abs().max()
        if bool(((turned.right[:, :rank] - known).abs() > rounding).any()):
            return None, linear
        rest = turned._replace(left=turned.left[:, rank:], right=turned.right[:, rank:])
        shared = (1 - self.problem.alpha) * turned.left[:, :rank]
        return shared, rest.transpose() if self._swapped else rest

    def in_factors(self) -> "FactoredGradient | None":
        """Give itself if both sides have factors, and a linear term has them or is none."""
        both = self._left.factors is not None and not isinstance(self.problem.linear, DenseCost)
        return self if both else None

    def factored(
        self, coupling: Encoding, source: Read = every, target: Read = every
    ) -> FactoredCost:
        """Compute the cost at a coupling, which has factors where :meth:`in_factors` says so."""
        # It is that between what is read of the points of both sides, so that parts of it are made
        # when they are needed.
        cost = self._cost(coupling, source, target)
        assert isinstance(cost, FactoredCost)
        return cost

    def update(self, plan: Plan, previous: Encoding | None, generator: Generator) -> Encoding:
        plan = plan.T if self._swapped else plan
        return Encoding(self._left.encode(plan @ self._factors.matrix))

    def encode(self, source: Tensor, means: Tensor) -> Encoding:
        """Encode a plan P by its product with the target's factors, ``means`` = P A_Y, (n, r)."""
        return self.encoded(inner_products(source, means))

    def encoded(self, values: Tensor) -> Encoding:
        """Make the coupling of a plan P by A_X' P A_Y, (r, s)."""
        return Encoding(values.T if self._swapped else values)

    def pairing(self, cost: Cost, point: Encoding, coupling: Encoding) -> Tensor:
        """Compute -4 alpha <DX X DY, P>, from the couplings alone."""
        cross = torch.sum(self._measured(point).double() * coupling.values.double())
        return -4 * self.problem.alpha * cross

    def evaluate(
        self, plan: TransportPlan, masses: Marginals, generator: Generator, coupling: Own = None
    ) -> QuadraticValue:
        coupling = self.update(plan, None, generator) if coupling is None else coupling
        own = float(own_value(self.problem, masses))
        values = coupling.values.to(self.problem.dtype)
        cross = torch.sum(self._measured(coupling).double() * values.double())
        return QuadraticValue(own - 2 * float(cross), 0.0)

    def remember(self, coupling: Encoding, masses: Marginals) -> Linearised:
        """Keep the coupling from source to target, and what gives new points their factors."""
        sides = (self._right, self._left) if self._swapped else (self._left, self._right)
        known = [
            None if side.factors is None else factor_reference(side.provider) for side in sides
        ]
        values = coupling.values.T if self._swapped else coupling.values
        return self.remembered(values, references=(known[0], known[1]))

    @staticmethod
    def rows_at(known: Linearised, side: int) -> CostRows:
        """Make -4 alpha d P DY, by the factors that distances d give new points."""
        assert known.loss.cross is not None
        near, far = known.loss.cross[side], known.loss.cross[1 - side]
        crossed = transformed(known.distances(1 - side), far)
        coupling, index = known.oriented(side), known.references[side]
        turn: Tensor | float = 4 * known.alpha
        if index is not None:
            provider = known.distances(side)
            turn = turn * factor_rows(provider, index) * _known_factors(provider).signs.double()
        inner: Tensor | None = None
        if known.references[1 - side] is None:
            right = crossed.apply(coupling.T.to(crossed.dtype))
        else:
            right, signs = _known_factors(crossed)
            inner = coupling * signs.double()

        def rows(distances: Tensor) -> Cost:
            left = near(distances)
            left = left @ turn if isinstance(turn, Tensor) else left * turn
            left = left if inner is None else left @ inner
            return FactoredCost.of_products(left, right.double()).centred()

        return CostRows(rows, index)


def _known_factors(provider: DistanceProvider) -> Factors:
    """Read the factors of a provider that has them."""
    factors = provider.factors()
    assert factors is not None
    return factors
