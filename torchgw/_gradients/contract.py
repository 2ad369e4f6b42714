"""Three ways to linearise the Gromov-Wasserstein objective, one contract.

At a plan P the linear cost is (docs/algorithm.md, equation 2)

    C(P) = 2 alpha L(P) + (1 - alpha) M,    L(P)_ij = (DX^2 p)_i + (DY^2 q)_j - 2 (DX P DY)_ij

for the square loss. Another loss has other functions of the distances in place of their squares,
and of the distances themselves (``_problem/losses.py``).

The first two terms of L depend on rows or columns alone. A balanced plan does not see them (they
move into the potentials), and on distances of different size they would swamp the third in float32;
so linearised costs leave them out, and ``row`` and ``column`` hold them in float64.

Each gradient carries of P only what its cost needs, the *coupling*:

    dense      P itself, (n, m)
    factored   encoded P, (r_x, r_y) or (n, r_y)
    sampled    anchor pairs drawn from P
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torchgw._errors import UnsupportedError
from torchgw._gradients.means import MeanDistances
from torchgw._plans.contract import Plan
from torchgw._plans.transport import TransportPlan
from torchgw._problem.losses import Loss, sums
from torchgw._problem.problem import Problem
from torchgw._sinkhorn.cost import Cost, DenseCost, FactoredCost
from torchgw._typing import Marginals
from torchgw.distances.base import DistanceProvider

__all__ = [
    "CostRows",
    "Coupling",
    "Gradient",
    "Linearised",
    "Plan",
    "QuadraticValue",
    "add_linear",
    "exact_own_terms",
    "own_value",
    "product_value",
]


class QuadraticValue(NamedTuple):
    """<L(P), P>, exact (standard error zero) or estimated without bias."""

    value: float
    standard_error: float


# Each gradient's own: a plan, its encoding, or anchors; None stands for the product plan.
Coupling = Any


class Linearised(NamedTuple):
    """What a result keeps of its last cost C(P), from which points not yet seen have theirs.

    Pairs are of the source and the target.
    """

    gradient: str  # name of the gradient that the cost is by
    providers: tuple[DistanceProvider | None, DistanceProvider | None]  # None: not in the file
    coupling: Coupling  # of P, the source's points or factors along its rows
    alpha: float
    loss: Loss
    # of a side whose factors the coupling is in: points whose distances determine those of others
    references: tuple[Tensor | None, Tensor | None] = (None, None)
    means: tuple[MeanDistances | None, MeanDistances | None] = (None, None)  # of a sampled cost
    own: Marginals | None = None  # terms of rows (n,) and of columns (m,) in a relaxed plan's cost

    def distances(self, side: int) -> DistanceProvider:
        """Return the scaled distances of the source (0) or the target (1)."""
        provider = self.providers[side]
        if provider is None:
            raise UnsupportedError(
                f"The distances of {'XY'[side]} were given as a matrix or a function, and the file "
                "does not hold them. Save with `result.save(path, dense=True)`, which stores "
                "matrices."
            )
        return provider

    def oriented(self, side: int) -> Tensor:
        """Return a coupling that is a matrix, float64, with the given side along its rows."""
        coupling: Tensor = self.coupling if side == 0 else self.coupling.T
        return coupling.double()


class CostRows(NamedTuple):
    """The cost of new points of one side, but for terms of each alone, by their distances."""

    at: Callable[[Tensor], Cost]  # from distances (q, s), float64, to the cost (q, m)
    points: Tensor | None  # the s known points that distances are to; None is all


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

    def remember(self, coupling: Coupling, masses: Marginals) -> Linearised:
        """Return what a result keeps of its cost at the coupling of a plan of these marginals."""


def _own_sums(problem: Problem, masses: Marginals) -> tuple[Tensor, Tensor]:
    """Return DX^2 p and DY^2 q, or the same of another loss, in the dtype of the distances."""
    p, q = (mass.to(problem.dtype) for mass in masses)
    source, target = problem.loss.own
    return sums(problem.source, source, p), sums(problem.target, target, q)


def exact_own_terms(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return 2 alpha DX^2 a and 2 alpha DY^2 b, float64."""
    source, target = _own_sums(problem, problem.marginals)
    return 2 * problem.alpha * source.double(), 2 * problem.alpha * target.double()


def own_value(problem: Problem, masses: Marginals) -> float:
    """Return p' DX^2 p + q' DY^2 q."""
    p, q = (mass.to(problem.dtype) for mass in masses)
    source, target = _own_sums(problem, masses)
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
