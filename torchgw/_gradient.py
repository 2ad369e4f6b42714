"""Three ways to linearise the Gromov-Wasserstein objective, one contract.

At a plan P the linear cost is (docs/algorithm.md, equation 2)

    C(P) = 2 alpha L(P) + (1 - alpha) M,    L(P)_ij = (DX^2 p)_i + (DY^2 q)_j - 2 (DX P DY)_ij

for the square loss. Another loss (_losses.py) has other functions of the distances in place of
their squares, and of the distances themselves.

The first two terms of L depend on rows or columns alone. A balanced plan does not see them (they
move into the potentials), and on distances of different size they would swamp the third in float32;
so linearised costs leave them out, and ``row`` and ``column`` hold them in float64.

Each gradient carries of P only what its cost needs, the *coupling*:

    dense      P itself, (n, m)
    factored   encoded P, (r_x, r_y) or (n, r_y)
    sampled    anchor pairs drawn from P
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torchgw._anchors import PairPlan
from torchgw._cost import Cost, DenseCost, FactoredCost
from torchgw._cross import Cross, MinimumCross, ProductCross
from torchgw._losses import SQUARE, Loss, sums
from torchgw._plan import TransportPlan
from torchgw._stored_plan import StoredPlan
from torchgw._typing import Marginals
from torchgw.distances.base import DistanceProvider, Factors
from torchgw.distances.precomputed import PrecomputedDistance

__all__ = [
    "DenseGradient",
    "FactoredGradient",
    "Gradient",
    "Plan",
    "Problem",
    "QuadraticValue",
    "add_linear",
    "product_value",
    "stored_matrix",
]


@dataclass(frozen=True)
class Problem:
    """What is asked: two metric spaces with weights, and a linear term."""

    source: DistanceProvider  # (n, n)
    target: DistanceProvider  # (m, m)
    marginals: Marginals  # float64
    alpha: float  # weight of the quadratic term; 1 is pure Gromov-Wasserstein
    linear: Cost | None  # (n, m) linear cost M, stored or in factors
    loss: Loss = SQUARE

    def to(self, dtype: torch.dtype) -> Problem:
        """Return the problem with its distances and linear cost in another dtype."""
        return Problem(
            self.source.to(self.source.device, dtype),
            self.target.to(self.target.device, dtype),
            self.marginals,
            self.alpha,
            None if self.linear is None else self.linear.to(dtype),
            self.loss,
        )

    def sides(self) -> tuple[DistanceProvider, DistanceProvider] | None:
        """Return what the cross term of the loss is a product of, (n, n) and (m, m)."""
        return self.loss.sides(self.source, self.target)

    def cross(self) -> Cross:
        """Return the cross term of stored distances."""
        sides = self.sides()
        if sides is None:
            return MinimumCross(stored_matrix(self.source), stored_matrix(self.target))
        return ProductCross(*map(stored_matrix, sides))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the distances."""
        return self.source.dtype


class QuadraticValue(NamedTuple):
    """<L(P), P>, exact (standard error zero) or estimated without bias."""

    value: float
    standard_error: float


# Each gradient's own: a plan, its encoding, or anchors; None stands for the product plan.
Coupling = Any
# What a coupling can be taken of.
Plan = TransportPlan | StoredPlan | PairPlan


class Gradient(Protocol):
    """How the solver sees each of the three."""

    name: str
    exact: bool
    problem: Problem
    row: Tensor  # (n,) float64, 2 alpha DX^2 a (square loss)
    column: Tensor  # (m,) float64, 2 alpha DY^2 b (square loss)
    product: float  # alpha <L(a x b), a x b>

    def start(self) -> Coupling:
        """Return the coupling of the product plan a x b; ``None`` where it has its own cost."""

    def linearise(self, coupling: Coupling) -> Cost:
        """Return C(P) - row - column at the coupling of P, for ``None`` at the product plan."""

    def update(self, plan: Plan, coupling: Coupling, generator: torch.Generator) -> Coupling:
        """Return the coupling of a plan."""

    def mean(
        self, coupling: Coupling, latest: Coupling, share: float, generator: torch.Generator
    ) -> Coupling:
        """Return (1 - share) coupling + share latest; a sample of it where they are samples."""

    def change(self, coupling: Coupling, previous: Coupling) -> Tensor:
        """Return the relative change between two couplings, (), float64; NaN for samples."""

    def pairing(self, cost: Cost, point: Coupling, coupling: Coupling) -> Tensor:
        """Return <C(X) - row - column - (1 - alpha) M, P>, (), float64; NaN for samples.

        ``cost`` is that at the coupling ``point`` of X, and ``coupling`` is that of P.
        """

    def evaluate(
        self, plan: TransportPlan, masses: Marginals, generator: torch.Generator
    ) -> QuadraticValue:
        """Return <L(P), P> for the plan as it is, whose row and column sums are ``masses``."""


def own_sums(problem: Problem, masses: Marginals) -> tuple[Tensor, Tensor]:
    """Return DX^2 p and DY^2 q, or the same of another loss, in the dtype of the distances."""
    p, q = (mass.to(problem.dtype) for mass in masses)
    source, target = problem.loss.own
    return sums(problem.source, source, p), sums(problem.target, target, q)


def _own_terms(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return 2 alpha DX^2 a and 2 alpha DY^2 b, float64."""
    source, target = own_sums(problem, problem.marginals)
    return 2 * problem.alpha * source.double(), 2 * problem.alpha * target.double()


def _own_value(problem: Problem, masses: Marginals) -> float:
    """Return p' DX^2 p + q' DY^2 q."""
    p, q = (mass.to(problem.dtype) for mass in masses)
    source, target = own_sums(problem, masses)
    return float((p @ source + q @ target).double())


def product_value(problem: Problem, own: tuple[Tensor, Tensor], cross: Tensor) -> float:
    """Return alpha <L(a x b), a x b>, given 2 alpha DX^2 a, 2 alpha DY^2 b and a' DX a b' DY b."""
    a, b = problem.marginals
    return float((a @ own[0] + b @ own[1]) / 2 - 2 * problem.alpha * cross.double())


def add_linear(cost: Cost, problem: Problem) -> Cost:
    """Add (1 - alpha) M: factors to factors, otherwise as stored matrices."""
    linear, weight = problem.linear, 1 - problem.alpha
    if linear is None:
        return cost
    if isinstance(cost, FactoredCost) and isinstance(linear, FactoredCost):
        return FactoredCost(
            torch.cat([cost.left, weight * linear.left], dim=1),
            torch.cat([cost.right, linear.right], dim=1),
            cost.row + weight * linear.row,
            cost.column + weight * linear.column,
        )
    return DenseCost(cost.dense().matrix.add(linear.dense().matrix, alpha=weight))


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
        self.row, self.column = _own_terms(problem)
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
        own = _own_value(self.problem, masses)
        cross = torch.sum(self._cross(dense) * dense, dtype=torch.float64)
        return QuadraticValue(own - 2 * float(cross), 0.0)


def stored_matrix(provider: DistanceProvider) -> Tensor:
    """Return the whole table of a provider, building it if need be."""
    matrix = provider.matrix()
    if matrix is None:
        return provider.columns(torch.arange(provider.n, device=provider.device))
    return matrix


class _Side(NamedTuple):
    """One factor of DX P DY: D = decode(metric . encode), with or without factors of D."""

    provider: DistanceProvider
    factors: Factors | None

    def encode(self, values: Tensor) -> Tensor:
        """Return A' V, or V where D has no factors."""
        # a polished plan is double precision in any solve
        return values if self.factors is None else self.factors.matrix.T.to(values.dtype) @ values

    def metric(self, encoded: Tensor) -> Tensor:
        """Return diag(s) W, or D W where D has no factors."""
        if self.factors is None:
            return self.provider.apply(encoded)
        return self.factors.signs[:, None] * encoded

    def decode(self, measured: Tensor) -> Tensor:
        """Return A W, or W where D has no factors."""
        return measured if self.factors is None else self.factors.matrix @ measured


class FactoredGradient:
    """Exact, from factors D = A diag(s) A' of at least one side.

    With factors on both sides the coupling is G = A_X' P A_Y, whose size does not depend on n; with
    factors on one side only it is P A_Y, and the other side multiplies it by D as a whole.
    """

    name = "factored"
    exact = True

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        both = problem.sides()
        assert both is not None
        self.row, self.column = _own_terms(problem)
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

    def _oriented(self, plan: Plan) -> Plan:
        return plan.T if self._swapped else plan

    def start(self) -> Tensor:
        """Return the coupling of a x b."""
        a, b = (weight.to(self.problem.dtype) for weight in self.problem.marginals)
        left, right = (b, a) if self._swapped else (a, b)
        return self._left.encode(torch.outer(left, right @ self._factors.matrix))

    @property
    def _factors(self) -> Factors:
        factors = self._right.factors
        assert factors is not None
        return factors

    def linearise(self, coupling: Tensor | None) -> Cost:
        """Return the factored cost at a coupling."""
        assert coupling is not None
        measured = self._left.metric(coupling.to(self.problem.dtype)) * self._factors.signs
        left = 4 * self.problem.alpha * self._left.decode(measured)
        cost = FactoredCost.of_products(left, self._factors.matrix)
        cost = cost.transpose() if self._swapped else cost
        return add_linear(cost.centred(), self.problem)

    def update(self, plan: Plan, coupling: Tensor | None, generator: torch.Generator) -> Tensor:
        """Return the coupling of a plan, by one streamed product."""
        return self._left.encode(self._oriented(plan) @ self._factors.matrix)

    def mean(
        self, coupling: Tensor, latest: Tensor, share: float, generator: torch.Generator
    ) -> Tensor:
        """Return the mean itself, which is as large as either."""
        return torch.lerp(coupling.to(latest.dtype), latest, share)

    def change(self, coupling: Tensor, previous: Tensor | None) -> Tensor:
        """Return the relative change in the Frobenius norm."""
        assert previous is not None
        size = coupling.norm().clamp_min(torch.finfo(coupling.dtype).tiny)
        relative: Tensor = (coupling - previous).norm() / size
        return relative.double()

    def pairing(self, cost: Cost, point: Tensor, coupling: Tensor) -> Tensor:
        """Return -4 alpha <DX X DY, P>, from the couplings alone."""
        measured = self._left.metric(point.to(self.problem.dtype)) * self._factors.signs
        return -4 * self.problem.alpha * torch.sum(measured.double() * coupling.double())

    def evaluate(
        self, plan: TransportPlan, masses: Marginals, generator: torch.Generator
    ) -> QuadraticValue:
        """Return the value from one streamed product."""
        return self.value(self.update(plan, None, generator), masses)

    def value(self, coupling: Tensor, masses: Marginals) -> QuadraticValue:
        """Return the value of the plan that has a coupling."""
        own = _own_value(self.problem, masses)
        coupling = coupling.to(self.problem.dtype)
        measured = self._left.metric(coupling) * self._factors.signs
        cross = torch.sum(measured.double() * coupling.double())
        return QuadraticValue(own - 2 * float(cross), 0.0)
