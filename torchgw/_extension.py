"""Mapping points that a solve has not seen, without solving again.

The cost (2) at a plan P is linear in the distances of a source point: its row needs d(x, .) alone,

    C(x, j) = -4 alpha sum_kl d(x, k) P_kl DY_lj + (1 - alpha) M(x, j)

up to a term of the row, which no conditional plan sees, and for relaxed plans with a term of the
column; another loss than the square one has its functions of d and DY in their places. One
half-step against the potentials g of
the solve then gives the new row of the plan (docs/algorithm.md, equation 13).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchgw._anchors import Anchors
from torchgw._cost import Cost, DenseCost, FactoredCost
from torchgw._cross import MinimumCross
from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw._features import feature_cost
from torchgw._gradient import Coupling, Problem, stored_matrix
from torchgw._inputs import check_linear_cost, check_points, to_tensor
from torchgw._losses import SQUARE, Loss, spread_parts, transformed
from torchgw._moments import MeanDistances, own_terms, part_means
from torchgw._plan import TransportPlan
from torchgw._relaxed import RelaxedCoupling
from torchgw._typing import Marginals
from torchgw.distances.base import DistanceProvider
from torchgw.distances.cross import CrossDistance, Space, factor_reference, factor_rows

__all__ = ["Extension", "NewPoints", "Side"]


@dataclass(frozen=True, eq=False)
class Side:
    """One side of a solved problem.

    Attributes
    ----------
    name : {"X", "Y"}
    space : Space
        What it was made from.
    provider : DistanceProvider or None
        Scaled distances as the last linearisation read them; ``None`` if a file did not hold them.
    reference : Tensor of shape (s,) or None
        If the coupling is in the factors of the provider rather than in its points: the points
        whose distances determine the factors of a new one.
    mean : MeanDistances or None
        If the coupling is anchors: what their cost is centred by.
    """

    name: str
    space: Space
    provider: DistanceProvider | None
    reference: Tensor | None
    mean: MeanDistances | None = None

    @property
    def encoded(self) -> bool:
        """Whether the coupling is in the factors of the provider."""
        return self.reference is not None

    @property
    def distances(self) -> DistanceProvider:
        """The provider.

        Raises
        ------
        UnsupportedError
            If the result was loaded from a file that does not hold it.
        """
        if self.provider is None:
            raise UnsupportedError(
                f"The distances of {self.name} were given as a matrix or a function, and the file "
                "does not hold them. Save with `result.save(path, dense=True)`, which stores "
                "matrices."
            )
        return self.provider


@dataclass(frozen=True, eq=False)
class NewPoints:
    """New points of one side as a user gives them, checked.

    Attributes
    ----------
    distances : CrossDistance
        To the known points of their side.
    linear : DenseCost or FactoredCost of shape (q, m), or None
        Their linear cost.
    """

    distances: CrossDistance
    linear: Cost | None


@dataclass(frozen=True, eq=False)
class Extension:
    """What is left of a solve that new points are mapped by.

    Attributes
    ----------
    source, target : Side
    coupling : Tensor or Anchors
        Of the plan that the final cost was linearised at. A tensor has the points or factors of the
        source along its rows, those of the target along its columns.
    alpha : float
        Weight of the quadratic term.
    linear : bool
        Whether there was a linear cost.
    unpolished : TransportPlan or None
        The entropic plan, where the plan of the result is a polished one, which has no potentials.
    own : Marginals or None
        Terms of the rows, (n,), and of the columns, (m,), in the cost of a relaxed plan.
    mass : float
        Of a partial plan, whose linear cost is divided by it; otherwise one.
    loss : Loss
    """

    source: Side
    target: Side
    coupling: Coupling
    alpha: float
    linear: bool
    unpolished: TransportPlan | None
    own: Marginals | None = None
    mass: float = 1.0
    loss: Loss = SQUARE

    @classmethod
    def of(
        cls,
        gradient: str,
        problem: Problem,
        coupling: Coupling,
        spaces: tuple[Space, Space],
        unpolished: TransportPlan | None,
        mass: float,
    ) -> Extension:
        """Return the extension of a solved problem, given the mass of a partial plan or one."""
        providers = problem.source, problem.target
        masses, own = problem.marginals, None
        if isinstance(coupling, RelaxedCoupling):
            coupling, masses = coupling
            own = Marginals(*own_terms(problem, masses))
        factored, sampled = gradient == "factored", isinstance(coupling, Anchors)
        crossed = problem.sides() or providers
        encoded = [factored and side.factors() is not None for side in crossed]
        sides = [
            Side(
                name,
                space.copy(),
                provider,
                factor_reference(provider) if in_factors else None,
                MeanDistances.of(provider, weights, problem.loss, "XY".index(name))
                if sampled
                else None,
            )
            for name, space, provider, in_factors, weights in zip(
                "XY", spaces, providers, encoded, masses, strict=True
            )
        ]
        if factored and not isinstance(coupling, Anchors):
            sizes = [_size(side) for side in sides]
            # the gradient keeps the side of smaller rank on the right
            swapped = sides[0].encoded and (
                not sides[1].encoded or _rank(sides[0]) < _rank(sides[1])
            )
            coupling = coupling.T if swapped else coupling
            assert tuple(coupling.shape) == tuple(sizes)
        linear = problem.linear is not None
        first, second = sides
        return cls(
            first, second, coupling, problem.alpha, linear, unpolished, own, mass, problem.loss
        )

    @property
    def T(self) -> Extension:  # noqa: N802 - the name of every array library
        """The extension from target to source."""
        coupling = self.coupling
        turned = Anchors(*coupling[::-1]) if isinstance(coupling, Anchors) else coupling.T
        plan = None if self.unpolished is None else self.unpolished.T
        own = None if self.own is None else Marginals(*self.own[::-1])
        return replace(
            self, source=self.target, target=self.source, coupling=turned, unpolished=plan, own=own
        )

    def new_points(self, points: Any, table: Any, linear: Any, features: Any) -> NewPoints:
        """Check what a user gives of new source points."""
        side = self.source
        name = side.name
        if (points is None) == (table is None):
            what = "neither was" if points is None else "both were"
            raise InvalidInputError(
                f"Pass exactly one of `{name}_new` (points) and `D_new` (their distances to the "
                f"points of {name}); {what} given."
            )
        if table is None:
            known = side.space.points
            if known is None:
                raise InvalidInputError(
                    f"{name} was not given as points, so new ones are given by their distances: "
                    f"pass `D_new` of shape (q, {side.distances.n}), in the units of {name}'s."
                )
            points = check_points(f"{name}_new", points).to(known.device)
            if points.shape[1] != known.shape[1]:
                raise InvalidInputError(
                    f"`{name}_new` must have {known.shape[1]} columns, as {name} has; got "
                    f"{points.shape[1]}."
                )
        else:
            table = check_table(table, side.distances.n).to(side.distances.device)
        cross = CrossDistance(side.space, side.distances, points, table)
        return NewPoints(cross, self._linear_cost(linear, features, cross.n_new))

    def _linear_cost(self, table: Any, features: Any, count: int) -> Cost | None:
        """Return the linear cost of new points from their table or their features."""
        shape = count, self.target.distances.n
        if not self.linear:
            if table is None and features is None:
                return None
            raise InvalidInputError(
                "`M_new` or `F_new` was given, and the solve had no linear cost. Drop it."
            )
        if table is not None and features is None:
            return DenseCost(check_linear_cost(table, shape, name="M_new"))
        space = self.target.space
        if space.features is None or features is None or table is not None:
            also = "" if space.features is None else ", or `F_new`, their features"
            raise InvalidInputError(
                f"The solve had a linear cost: pass `M_new` of shape {shape}, the linear cost of "
                f"the new points{also}."
            )
        other = space.features
        new = check_points("F_new", features).to(other.device).double()
        if new.shape != (count, other.shape[1]):
            raise InvalidInputError(
                f"`F_new` must have shape {(count, other.shape[1])}, the features of each new "
                f"point; got {tuple(new.shape)}."
            )
        return feature_cost(new, other.double(), space.feature_metric)

    def map(self, plan: TransportPlan, new: NewPoints, values: Tensor) -> Tensor:
        """Return the plan-weighted mean of ``values``, shape (m, c), at each new point, (q, c)."""
        plan = self.unpolished or plan
        cost_of, width = self._cost_function()
        cross = new.distances
        step = cross.block_size(width)
        mapped = []
        for start in range(0, cross.n_new, step):
            block = slice(start, min(start + step, cross.n_new))
            cost = cost_of(cross, block)
            if new.linear is not None:
                linear = new.linear.rows(block).dense().matrix.to(cost.device, cost.dtype)
                share = (1 - self.alpha) / self.mass
                cost = DenseCost(cost.dense().matrix.add(linear, alpha=share))
            if self.own is not None:
                cost = _with_columns(cost, self.own.b.to(cost.dtype))
            mapped.append(plan.extend(cost.to(plan.dtype)).barycentric(values))
        return torch.cat(mapped)

    def _cost_function(self) -> tuple[Any, int]:
        """Return a function from a block of new points to its cost, and distances read of each."""
        source, coupling = self.source, self.coupling
        if isinstance(coupling, Anchors):
            return self._sampled_cost_function(coupling)
        weight = 4 * self.alpha
        functions = self.loss.cross
        if functions is None:
            return self._minimum_cost_function()
        near, far = functions if source.name == "X" else functions[::-1]
        target = transformed(self.target.distances, far)
        index: Tensor | None
        turn: Tensor | float
        if source.reference is not None:
            index = source.reference
            factors = source.distances.factors()
            assert factors is not None
            turn = weight * factor_rows(source.distances, index) * factors.signs.double()
        else:
            index, turn = None, weight
        width = source.distances.n if index is None else len(index)

        def left_of(cross: CrossDistance, block: slice) -> Tensor:
            rows = near(cross.rows(block, index))
            return rows @ turn if isinstance(turn, Tensor) else rows * turn

        coupling = coupling.double()
        if self.target.encoded:
            factors = target.factors()
            assert factors is not None
            right = factors.matrix
            coupling = coupling * factors.signs.double()
        elif source.encoded:
            right = target.apply(coupling.T.to(target.dtype))
            coupling = None
        else:
            # may be sparse, where it comes from a file
            turned = coupling.T

            def stored(cross: CrossDistance, block: slice) -> Cost:
                right = turned @ left_of(cross, block).T
                return DenseCost(-target.apply(right.to(target.dtype)).T.double())

            return stored, width

        def factored(cross: CrossDistance, block: slice) -> Cost:
            left = left_of(cross, block)
            if isinstance(coupling, Tensor):
                left = left @ coupling
            return FactoredCost.of_products(left, right.double()).centred()

        return factored, width

    def _minimum_cost_function(self) -> tuple[Any, int]:
        """Return the same for the absolute loss and stored distances."""
        table = stored_matrix(self.target.distances).double()
        coupling = self.coupling.double()
        coupling = coupling.to_dense() if coupling.is_sparse else coupling

        def cost(cross: CrossDistance, block: slice) -> Cost:
            term = MinimumCross(cross.rows(block, None), table)(coupling)
            return DenseCost(-4 * self.alpha * term)

        return cost, self.source.distances.n

    def _sampled_cost_function(self, anchors: Anchors) -> tuple[Any, int]:
        """Return the same from anchors: the cost of a sampled gradient, with its mean distances."""
        weight, count = 4 * self.alpha, len(anchors.source)
        source, target, loss = self.source.distances, self.target.distances, self.loss
        side = "XY".index(self.source.name)
        parts = spread_parts(count, loss.parts, anchors.source.device)
        assert self.source.mean is not None
        assert self.target.mean is not None
        nodes, mass, _ = self.source.mean
        index = None if nodes is None else torch.cat([anchors.source, nodes])
        mean = self.target.mean.values.reshape(target.n, -1)
        far = loss.part(1 - side, target.columns(anchors.target), parts)
        right = torch.cat([far - mean[:, parts], mean], dim=1).double()

        def cost(cross: CrossDistance, block: slice) -> Cost:
            rows = cross.rows(block, index)
            to_anchors = rows[:, anchors.source] if index is None else rows[:, :count]
            to_nodes = rows if index is None else rows[:, count:]
            own = part_means(loss, side, to_nodes, mass.to(rows.dtype))
            near = loss.part(side, to_anchors, parts) - own[:, parts]
            left = torch.cat([near / count, own / loss.parts], dim=1)
            return FactoredCost.of_products(weight * left.double(), right).centred()

        return cost, source.n if index is None else len(index)


def check_table(value: Any, n: int) -> Tensor:
    """Return given distances of new points, shape (q, n), non-negative and finite."""
    table = to_tensor("D_new", value)
    if table.ndim != 2 or len(table) == 0 or table.shape[1] != n:
        raise InvalidInputError(
            f"`D_new` must have shape (q, {n}), one row of distances per new point; got "
            f"{tuple(table.shape)}."
        )
    table = check_linear_cost(table, (len(table), n), name="D_new")
    if float(table.min()) < 0:
        raise InvalidInputError(
            f"`D_new` must be non-negative; its smallest entry is {float(table.min()):.3g}."
        )
    return table


def _with_columns(cost: Cost, column: Tensor) -> Cost:
    """Add a term of the columns, (m,)."""
    if isinstance(cost, DenseCost):
        return DenseCost(cost.matrix + column)
    return cost._replace(column=cost.column + column)


def _rank(side: Side) -> int:
    factors = side.distances.factors()
    return 0 if factors is None else factors.signs.numel()


def _size(side: Side) -> int:
    return _rank(side) if side.encoded else side.distances.n
