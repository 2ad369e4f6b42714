"""What a gradient is: it linearises the objective at a coupling of a plan.

At a plan P the linear cost is (docs/algorithm.md, equation 2)

    C(P) = 2 alpha L(P) + (1 - alpha) M,    L(P)_ij = (DX^2 p)_i + (DY^2 q)_j - 2 (DX P DY)_ij

for the square loss. Another loss has other functions of the distances in place of their squares,
and of the distances themselves (``_problem/losses.py``).

The first two terms of L depend on rows or columns alone. A balanced plan does not see them (they
move into the potentials), and on distances of different size they would swamp the third in float32;
so they stand beside the cost, as ``row`` and ``column``.

Each gradient carries of P only what its cost needs, a *coupling* of its own class:

    dense      P itself, (n, m)
    factored   encoded P, (r_x, r_y) or (n, r_y)
    sampled    anchor pairs drawn from P
    relaxed    one of these, with the marginals of P
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Generator, Tensor

from torchgw._errors import UnsupportedError
from torchgw._plans.contract import Anchors
from torchgw._plans.contract import Plan as Plan
from torchgw._plans.transport import TransportPlan
from torchgw._problem.limits import limits_of
from torchgw._problem.losses import Loss, sums
from torchgw._problem.problem import Problem
from torchgw._sinkhorn.annealing import START_NOISE
from torchgw._sinkhorn.problem import Cost, FactoredCost, added, block
from torchgw._typing import Marginals, Points, Potentials
from torchgw.distances.base import DistanceProvider

if TYPE_CHECKING:
    from typing_extensions import Self
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

from torchgw._problem.losses import identity
from torchgw._tensors.operations import categories_at
from torchgw.distances.base import BLOCK_ENTRIES, Entrywise
from torchgw.distances.sampling import choose_points

# Columns that tell of all which distances anchors can show, and where a source point lies among
# the others; and anchors that are needed within a distance. [L119, L256]
FEW_COLUMNS, _FEWEST = 16, 32
# Levels of a minimum, the columns that means at every level are taken over at most, and how far
# beyond the largest distance of some columns levels reach. [L262, L271]
_LEVELS = 64
_LEVEL_COLUMNS = 1024
_MARGIN = 1.05


class Levels(NamedTuple):
    """Levels up to ``reach``, at equal steps or cuts, which make a minimum a mean of products."""

    # min(x, y) is the integral over t of [x > t] [y > t], to half a step; cuts where all distances
    # of two small tables lie make it exact.

    reach: float
    steps: int
    cuts: Tensor | None = None  # (steps + 1,) ascending

    def part(self, side: int, distance: Tensor, parts: Tensor) -> Tensor:
        """Evaluate the factor of side 0 or 1, (..., s), in the products named by ``parts`` (s,)."""
        cut = (parts + 0.5) * (self.reach / self.steps) if self.cuts is None else self.cuts[parts]
        above = (distance > cut).to(distance.dtype)
        if side == 1:
            return above
        return above * (self.reach if self.cuts is None else self.cuts.diff()[parts] * self.steps)


@dataclass(frozen=True)
class SampledLoss(Loss):
    """A loss as a sample of pairs shows it: with a floor, or with a minimum cut into levels."""

    floor: float = 0.0  # target distances below it count as this in the cross term
    levels: Levels | None = None

    @classmethod
    def of(cls, loss: Loss, *, floor: float = 0.0, levels: Levels | None = None) -> Loss:
        """Bound the cross term of a loss from below, or cut it if it is a minimum."""
        parts: dict[str, Any] = {field.name: getattr(loss, field.name) for field in fields(Loss)}
        if loss.cross is None:
            return loss if levels is None else cls(**parts, levels=levels)
        if floor == 0:
            return loss
        near, far = loss.cross
        parts["cross"] = near, partial(_raised, far, floor)
        return cls(**parts, floor=floor)

    @property
    def parts(self) -> int:
        return 1 if self.levels is None else self.levels.steps

    def part(self, side: int, distance: Tensor, parts: Tensor) -> Tensor:
        if self.levels is None:
            return super().part(side, distance, parts)
        return self.levels.part(side, distance, parts)


def _raised(function: Entrywise, floor: float, distance: Tensor) -> Tensor:
    """Evaluate a function of distances, each at least the floor."""
    return function(distance.clamp_min(floor))


def visible(problem: Problem, n_anchors: int) -> Problem:
    """Limit the problem to what anchors show of it."""
    # Where a distance of zero is extreme, a few anchors would stand for the distance of every point
    # to itself, and others for none. Distances within which fewer than `_FEWEST` anchors lie, by
    # the median of some columns, count as the largest such. A minimum becomes a mean of products.
    loss = problem.loss
    if loss.cross is None:
        reach = min(map(_largest, problem.sides, problem.marginals))
        return replace(problem, loss=SampledLoss.of(loss, levels=Levels(reach, _LEVELS)))
    if not loss.singular:
        return problem
    provider, weights = problem.target.relations()[0], problem.marginals.b
    index = _spaced(weights, FEW_COLUMNS)
    values, order = provider.columns(index).sort(dim=0)
    mass = weights[order].cumsum(0)
    share = mass.new_full((len(index), 1), _FEWEST / n_anchors)
    reached = torch.searchsorted(mass.T.contiguous(), share)[:, 0].clamp_(max=provider.n - 1)
    floor = values.gather(0, reached[None])
    return replace(problem, loss=SampledLoss.of(loss, floor=float(floor.median())))


def _largest(provider: DistanceProvider, weights: Tensor) -> float:
    """Find a bound of the distances, by some columns where columns are costly."""
    if provider.cheap_columns:
        return provider.maximum()
    nodes, _ = _quadrature(provider, weights)
    assert nodes is not None
    return _MARGIN * float(provider.columns(nodes).max())


def _spaced(weights: Tensor, count: int) -> Tensor:
    """Choose points at equal steps of the cumulative weight."""
    steps = torch.arange(count, dtype=weights.dtype, device=weights.device) + 0.5
    return categories_at(weights, steps / count)


def _quadrature(provider: DistanceProvider, weights: Tensor) -> tuple[Tensor | None, Tensor]:
    """Choose nodes, ``None`` for all points, and masses of a sum over all points by weight."""
    if provider.cheap_columns:
        return None, weights.to(provider.dtype)
    # where each column is a run of shortest paths; each node counts with the weight of the points
    # nearest to it
    nodes = choose_points(provider, weights, limits_of(provider.device).few_points)
    return nodes.indices, nodes.weights.to(provider.dtype)


def _moments(
    provider: DistanceProvider, weights: Tensor, functions: Sequence[Entrywise]
) -> list[Tensor]:
    """Compute function(D) @ w for each function, by :func:`_quadrature`."""
    nodes, mass = _quadrature(provider, weights)
    if nodes is None:
        return [sums(provider, function, mass) for function in functions]
    columns = provider.columns(nodes)
    return [function(columns) @ mass for function in functions]


class MeanDistances(NamedTuple):
    """The mean distances that a sampled cost has for control variates, and how they were found."""

    nodes: Tensor | None  # points summed over; None is all of them
    mass: Tensor
    values: Tensor  # (n, r) means of each part of the cross term

    @classmethod
    def of(
        cls, provider: DistanceProvider, weights: Tensor, loss: Loss, side: int
    ) -> MeanDistances:
        """Compute those of a provider, the source (0) or the target (1)."""
        nodes, mass = _quadrature(provider, weights)
        if loss.cross is not None:
            (values,) = _moments(provider, weights, (loss.cross[side],))
            return cls(nodes, mass, values[:, None])
        if nodes is None and provider.n > _LEVEL_COLUMNS:
            nodes = _spaced(weights, _LEVEL_COLUMNS)
            mass = torch.full_like(mass[:_LEVEL_COLUMNS], 1 / _LEVEL_COLUMNS)
        everything = torch.arange(provider.n, device=provider.device)
        width = max(1, BLOCK_ENTRIES // provider.n)
        blocks = (everything if nodes is None else nodes).split(width), mass.split(width)
        means = mass.new_zeros(provider.n, loss.parts)
        for index, share in zip(*blocks, strict=True):
            means += part_means(loss, side, provider.columns(index), share)
        return cls(nodes, mass, means)


def part_means(loss: Loss, side: int, columns: Tensor, mass: Tensor) -> Tensor:
    """Compute the means of columns (n, s) by mass (s,), for each part of the cross term, (n, r)."""
    parts = torch.arange(loss.parts, device=columns.device)
    return torch.stack([loss.part(side, columns, part) @ mass for part in parts], dim=1)


def mean_distances(problem: Problem, masses: Marginals) -> tuple[MeanDistances, MeanDistances]:
    """Compute DX p and DY q as the cross term sees them."""
    p, q = masses
    source = MeanDistances.of(problem.source, p, problem.loss, 0)
    return source, MeanDistances.of(problem.target, q, problem.loss, 1)


def own_terms(problem: Problem, masses: Marginals) -> tuple[Tensor, Tensor]:
    """Compute 2 alpha DX^2 p and 2 alpha DY^2 q, from some columns where columns are costly."""
    (p, q), (own_x, own_y) = masses, problem.loss.own
    source, target = _moments(problem.source, p, (own_x,)), _moments(problem.target, q, (own_y,))
    return 2 * problem.alpha * source[0], 2 * problem.alpha * target[0]


def distance_spread(provider: DistanceProvider, weights: Tensor) -> float:
    """Compute the standard deviation of a distance between two points drawn by weight."""
    # a single point has only the distance to itself, of which factors leave rounding
    several = (weights > 0).sum().double()
    mean, square = _moments(provider, weights, (identity, torch.square))
    weights = weights.to(provider.dtype)
    found = weights @ mean, weights @ square, square.max()
    count, first, second, largest = torch.stack([several, *(x.double() for x in found)]).tolist()
    variance = second - first**2
    # a variance of zero, of which rounding is left, is no scale; nor are distances that vanish
    # beside those to points without weight
    eps = torch.finfo(mean.dtype).eps
    least = max(64 * eps * second, eps**2 * largest)
    return math.sqrt(variance) if count > 1 and variance > least else 0.0


class QuadraticValue(NamedTuple):
    """<L(P), P>, exact (standard error zero) or estimated without bias."""

    value: float
    standard_error: float


class CostNoise(NamedTuple):
    """How well a sampled cost is known, root mean squares over all pairs, cost units."""

    standard_error: float
    size: float


class Coupling(Protocol):
    """What a gradient carries of a plan: a named tuple of tensors, which CUDA graphs copy."""

    @property
    def masses(self) -> Marginals | None:
        """Row and column sums of a relaxed plan, of sum one; ``None`` for those of the problem."""

    @property
    def empty(self) -> bool:
        """Whether it stands for a x b without numbers, so that its cost has another shape."""

    def mean(self, latest: Self, share: float, generator: Generator) -> Self:
        """Average: (1 - share) of this and share of the latest; of samples, a sample of it."""

    def change(self, previous: Self) -> Tensor:
        """Compute the relative change since another coupling, (), float64; NaN for samples."""

    def perturbed(self) -> Self:
        """Add a little noise, always the same; samples have their own."""

    def minus(self, point: Self) -> Tensor:
        """Compute the direction from another coupling; samples have none, (0,)."""

    def vector(self) -> Tensor:
        """List the numbers that extrapolation may move; samples have none, (0,)."""

    def with_vector(self, vector: Tensor) -> Self:
        """Make the coupling of such numbers."""


class ExactCoupling(NamedTuple):
    """A table of numbers that is linear in the plan."""

    values: Tensor

    @property
    def masses(self) -> None:
        """``None``: the marginals are those of the problem."""

    @property
    def empty(self) -> bool:
        return False

    def mean(self, latest: Self, share: float, generator: Generator) -> Self:
        mean = torch.lerp(self.values.to(latest.values.dtype), latest.values, share)
        return self._replace(values=mean)

    def perturbed(self) -> Self:
        """Multiply by noise that does not depend on a seed of the user's."""
        values = self.values
        generator = torch.Generator(device=values.device).manual_seed(0)
        noise = torch.randn(
            values.shape, dtype=values.dtype, device=values.device, generator=generator
        )
        return self._replace(values=values * (1 + START_NOISE * noise))

    def minus(self, point: Self) -> Tensor:
        return self.values - point.values

    def vector(self) -> Tensor:
        return self.values.flatten()

    def with_vector(self, vector: Tensor) -> Self:
        return self._replace(values=vector.view(self.values.shape))


# What is read of values of all points of a side, (n, ...): those of some points, or means of some.
Read = Callable[[Tensor], Tensor]


def every(values: Tensor) -> Tensor:
    """Read the values of all points."""
    return values


def none(values: Tensor) -> Tensor:
    """Read the values of no points."""
    return values[:0]


class InFactors(Protocol):
    """What a gradient whose cost and coupling are in factors offers to solves on fewer points."""

    def factored(self, coupling: Any, source: Read = every, target: Read = every) -> FactoredCost:
        """Compute C(P) - row - column at the coupling of P, of what is read of both sides."""

    def encode(self, source: Tensor, means: Tensor) -> Coupling:
        """Make the coupling of P of the source's factors, (n, r), and ``means`` = P A_Y, (n, s)."""

    def encoded(self, values: Tensor) -> Coupling:
        """Make the coupling of P of A_X' P A_Y, (r, s)."""


class LinearCost(NamedTuple):
    """C(P) = cost_ij + row_i + column_j at some plan."""

    cost: Cost
    row: Tensor  # (n,), 2 alpha DX^2 p (square loss)
    column: Tensor  # (m,), 2 alpha DY^2 q (square loss)

    def seen(self, masses: Marginals | None) -> Cost:
        """Return what the linear problem sees; for relaxed masses all but the mean."""
        # A constant changes the mass of a relaxed problem's plan only, and a large one would under-
        # or overflow it.
        cost = self.cost
        if masses is None:
            return cost
        p, q = (mass.to(cost.dtype) for mass in masses)
        row, column = self.row - p @ self.row, self.column - q @ self.column
        return cost.shifted(row - cost.mean(p, q), column)


class Linearised(NamedTuple):
    """The last cost C(P) of a solve, from which that of new points is computed; pairs of sides."""

    gradient: str  # name of the gradient that the cost is by
    providers: tuple[DistanceProvider | None, DistanceProvider | None]  # None: not in the file
    coupling: Tensor | Anchors  # of P, the source's points or factors along its rows
    alpha: float
    loss: Loss
    # for a side whose factors the coupling is in: points whose distances give new points their
    # factors
    references: tuple[Tensor | None, Tensor | None] = (None, None)
    means: tuple[MeanDistances | None, MeanDistances | None] = (None, None)  # of a sampled cost
    own: Marginals | None = None  # terms of rows (n,) and of columns (m,) in a relaxed plan's cost

    def distances(self, side: int) -> DistanceProvider:
        """Read the scaled distances of the source (0) or the target (1)."""
        provider = self.providers[side]
        if provider is None:
            raise UnsupportedError(
                f"The distances of {'XY'[side]} were given as a matrix or a function, and the file "
                "does not hold them. Save with `result.save(path, dense=True)`, which stores "
                "matrices."
            )
        return provider

    def oriented(self, side: int) -> Tensor:
        """Return a coupling that is a matrix in float64, with the given side along its rows."""
        assert isinstance(self.coupling, Tensor)
        return (self.coupling if side == 0 else self.coupling.T).double()


class CostRows(NamedTuple):
    """The cost of new points of one side as a function of their distances."""

    at: Callable[[Tensor], Cost]  # from distances (q, s), float64, to the cost (q, m)
    points: Tensor | None  # the s known points that distances are to; None is all


# A coupling of the class that the gradient itself makes.
Own = Any


class Gradient(ABC):
    """The methods that the solver calls; the defaults are those of an exact gradient."""

    name: str
    exact: bool
    dtype: torch.dtype  # of the distances
    marginals: Marginals  # weights of the points
    row: Tensor  # (n,) float64, terms of rows that are not in the linear problems
    column: Tensor  # (m,) float64, terms of columns that are not in them
    product: float | None  # alpha <L(a x b), a x b>, an upper bound of good values, or None
    linear_below: float  # change of the coupling below which steps are nearly linear in it
    momentum: bool = False  # whether slow steps are followed further
    shortens: bool = False  # whether steps that turn back are shortened
    stores: bool = False  # whether a coupling is the plan itself, as a matrix
    lossy: bool = False  # whether plans may differ where their couplings do not
    n_anchors: int | None = None  # of a sample

    @abstractmethod
    def start(self) -> Coupling:
        """Make the coupling of the product plan a x b."""

    @abstractmethod
    def linearise(self, coupling: Own) -> LinearCost:
        """Compute C(P) at the coupling of P."""

    def block(self, coupling: Own, rows: Points, columns: Points) -> Cost:
        """Compute the cost of :meth:`linearise`, but only between some points of either side."""
        return block(self.linearise(coupling).cost, rows, columns)

    @abstractmethod
    def update(self, plan: Plan, previous: Own | None, generator: Generator) -> Coupling:
        """Make the coupling of a plan; a sample may keep some of the ``previous`` one."""

    @abstractmethod
    def dual_value(self, potentials: Potentials, coupling: Own, epsilon: float) -> Tensor:
        """Compute the value of a linear problem from the coupling of its plan, ()."""

    def pairing(self, cost: Cost, point: Own, coupling: Own) -> Tensor:
        """Compute <C(X) - row - column - (1 - alpha) M, P>, (), float64; NaN where unknown."""
        # `cost` is that at the coupling `point` of X, and `coupling` is that of P. Unknown of
        # samples, and of relaxed plans, which the terms of rows and columns belong to.
        return self.row.new_full((), torch.nan, dtype=torch.float64)

    @abstractmethod
    def evaluate(
        self, plan: TransportPlan, masses: Marginals, generator: Generator, coupling: Own = None
    ) -> QuadraticValue:
        """Compute <L(P), P> of a plan of sums ``masses``, whose coupling may be known already."""

    @abstractmethod
    def squares(self) -> float:
        """Compute alpha (|a' DX^2 a| + |b' DY^2 b|), the scale of what cancels in a value."""

    @abstractmethod
    def remember(self, coupling: Own, masses: Marginals) -> Linearised:
        """Keep what a result needs of the cost at the coupling of a plan of these marginals."""

    @abstractmethod
    def why_not_captured(self) -> str | None:
        """Say why its calls cannot be recorded as CUDA graphs, or ``None``."""

    def tables(self) -> tuple[Tensor, ...]:
        """List all tensors that it reads, if graphs on a :meth:`copy` may serve later solves."""
        return ()

    def kind(self) -> Hashable:
        """Say what its calls depend on besides :meth:`tables`."""
        return self.name

    def copy(self) -> Gradient:
        """Make a gradient like it on tables of its own."""
        return self

    def centred_by(self, masses: Marginals) -> Gradient:
        """Make the gradient for plans of other marginals; exact gradients are not changed."""
        return self

    def in_factors(self) -> InFactors | None:
        """Return itself if its cost has factors of both sides, else ``None``."""
        return None

    def noise(self, coupling: Own) -> CostNoise | None:
        """Estimate the error of the cost at a coupling; ``None`` for exact ones."""
        return None

    def with_anchors(self, count: int) -> Gradient:
        """Make the same gradient with another number of anchors, if it has any."""
        return self


class StrictGradient(Gradient):
    """A gradient for strict marginals, whose terms of rows and columns are constant."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.dtype, self.marginals = problem.dtype, problem.marginals
        self.linear_below = problem.loss.linear_below

    def dual_value(self, potentials: Potentials, coupling: Own, epsilon: float) -> Tensor:
        """Compute <a, f> + <b, g> with the terms that the linear problem does not see."""
        a, b = self.marginals
        return a @ (potentials.f + self.row) + b @ (potentials.g + self.column)

    def squares(self) -> float:
        a, b = self.marginals
        return float((a @ self.row).abs() + (b @ self.column).abs()) / 2

    def remembered(self, coupling: Tensor | Anchors, **rest: Any) -> Linearised:
        """Keep a coupling, and what the cost depends on besides."""
        problem = self.problem
        return Linearised(self.name, problem.sides, coupling, problem.alpha, problem.loss, **rest)

    def why_not_captured(self) -> str | None:
        loss, sides = self.problem.loss, self.problem.sides
        if loss.cross is None:
            return f"loss={loss.name!r} takes one launch after the other for each point."
        if not all(side.capturable for side in sides):
            return "a provider computes its distances on the host, or looks at them."
        return None


def _own_sums(problem: Problem, masses: Marginals) -> tuple[Tensor, Tensor]:
    """Compute DX^2 p and DY^2 q, or the same of another loss, in the dtype of the distances."""
    p, q = (mass.to(problem.dtype) for mass in masses)
    source, target = problem.loss.own
    return sums(problem.source, source, p), sums(problem.target, target, q)


def exact_own_terms(problem: Problem) -> tuple[Tensor, Tensor]:
    """Compute 2 alpha DX^2 a and 2 alpha DY^2 b, float64."""
    source, target = _own_sums(problem, problem.marginals)
    return 2 * problem.alpha * source.double(), 2 * problem.alpha * target.double()


def own_value(problem: Problem, masses: Marginals) -> Tensor:
    """Compute p' DX^2 p + q' DY^2 q, ()."""
    p, q = masses
    source, target = _own_sums(problem, masses)
    return p @ source.double() + q @ target.double()


def product_value(problem: Problem, own: tuple[Tensor, Tensor], cross: Tensor) -> float:
    """Compute alpha <L(a x b), a x b>, given 2 alpha DX^2 a, 2 alpha DY^2 b and a' DX a b' DY b."""
    a, b = problem.marginals
    return float((a @ own[0] + b @ own[1]) / 2 - 2 * problem.alpha * cross.double())


def add_linear(cost: Cost, problem: Problem) -> Cost:
    """Add (1 - alpha) M: factors to factors, otherwise as stored matrices."""
    linear = problem.linear
    return cost if linear is None else added(cost, linear, 1 - problem.alpha)
