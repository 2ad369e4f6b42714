"""Mapping points that a solve has not seen, without solving again.

One half-step against the potentials g of the solve gives a new point its row of the plan
(docs/algorithm.md, equation 13); its cost is that of :mod:`torchgw._results.new_cost`, for relaxed
plans with a term of the column.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw._gradients.contract import Coupling
from torchgw._gradients.means import MeanDistances, own_terms
from torchgw._gradients.relaxed import RelaxedCoupling
from torchgw._plans.pairs import Anchors
from torchgw._plans.transport import TransportPlan
from torchgw._problem.losses import SQUARE, Loss
from torchgw._problem.problem import Problem
from torchgw._results.new_cost import cost_function
from torchgw._results.new_points import Side, check_values, read_linear_cost, read_new_points
from torchgw._sinkhorn.cost import Cost, DenseCost
from torchgw._typing import Marginals
from torchgw.distances.new_points import CrossDistance, Space, factor_reference

__all__ = ["Extension", "map_new"]


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
        crossed = problem.crossed() or providers
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

    def map(
        self, plan: TransportPlan, cross: CrossDistance, linear: Cost | None, values: Tensor
    ) -> Tensor:
        """Return the plan-weighted mean of ``values``, shape (m, c), at each new point, (q, c).

        ``linear`` is the linear cost (q, m) of the new points, and ``cross`` has their distances.
        """
        plan = self.unpolished or plan
        cost_of, width = cost_function(
            self.source, self.target, self.coupling, self.alpha, self.loss
        )
        step = cross.block_size(width)
        mapped = []
        for start in range(0, cross.n_new, step):
            block = slice(start, min(start + step, cross.n_new))
            cost = cost_of(cross, block)
            if linear is not None:
                table = linear.rows(block).dense().matrix.to(cost.device, cost.dtype)
                share = (1 - self.alpha) / self.mass
                cost = DenseCost(cost.dense().matrix.add(table, alpha=share))
            if self.own is not None:
                cost = _with_columns(cost, self.own.b.to(cost.dtype))
            mapped.append(plan.extend(cost.to(plan.dtype)).barycentric(values))
        return torch.cat(mapped)


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


def map_new(
    extension: Extension | None, plan: TransportPlan, given: tuple[Any, ...], values: Any
) -> Tensor:
    """Map new source points, ``given`` as points, table of distances, linear cost and features."""
    if extension is None:
        raise UnsupportedError(
            "This result does not hold what new points are mapped by (`result.extension`). Solve "
            "again."
        )
    source, target = extension.source, extension.target
    if values is None:
        values = target.space.points
        if values is None:
            raise InvalidInputError(
                f"{target.name} was not given as points: pass `values` of shape "
                f"({plan.shape[1]}, c), one row per point of {target.name}."
            )
    points, table, linear, features = given
    with torch.no_grad(), torch.autocast(plan.device.type, enabled=False):
        averaged = check_values(values, plan.shape[1]).to(plan.device)
        cross = read_new_points(source, points, table)
        cost = read_linear_cost(target, linear, features, cross.n_new, solved=extension.linear)
        return extension.map(plan, cross, cost, averaged)
