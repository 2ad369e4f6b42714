"""Mapping points that a solve has not seen, without solving again.

One half-step against the potentials g of the solve gives a new point its row of the plan, at the
cost that the distances of the point have there (docs/algorithm.md, equation 13). A plan without
entropy has no potentials that do so: the entropic plan before it sends new points on their way, and
what it is off by at known points is made up for.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchgw._boundary.arrays import check_linear_cost, check_points, check_shape, to_tensor
from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw._gradients.contract import Linearised
from torchgw._gradients.dense import DenseGradient
from torchgw._gradients.factored import FactoredGradient
from torchgw._gradients.sampled import SampledGradient
from torchgw._plans.transport import TransportPlan
from torchgw._problem.limits import limits_of
from torchgw._problem.problem import feature_cost
from torchgw._problem.support import of_pairs
from torchgw._sinkhorn.problem import Cost, DenseCost, added
from torchgw._tensors.operations import plainly
from torchgw._typing import Indices
from torchgw.distances.base import DistanceProvider, refuse_directed
from torchgw.distances.new_points import CrossDistance
from torchgw.distances.points import Space
from torchgw.distances.precomputed import PrecomputedDistance


@dataclass(frozen=True, eq=False)
class Extension:
    """What a result keeps of its solve, so that new points can be mapped."""

    spaces: tuple[Space, Space]  # what the source and the target were made from
    known: Linearised  # the last cost of the solve
    linear: bool  # whether there was a linear cost
    # the entropic plan, where the plan of the result is a polished one, which has no potentials
    unpolished: TransportPlan | None
    mass: float = 1.0  # mass that a partial plan moves, by which the linear cost is divided
    # the linear cost, if it was given as a table; one of features is computed again
    table: Cost | None = None
    restricted: bool = False  # whether some pairs were allowed no mass
    support: Tensor | None = None  # (n, m) bool, the pairs that were; a file may lack it
    pairs: Indices | None = None  # known pairs, of which the support says nothing
    # likely pairs, and their weights (k,) in the linear cost
    likely: Indices | None = None
    likely_weights: Tensor | None = None

    def allowed(self) -> Tensor | None:
        """Give the pairs of points that may hold mass, (n, m) bool; ``None`` for all."""
        if self.restricted and self.support is None:
            raise UnsupportedError(
                "The solve was told which pairs may hold mass, and the file does not hold them. "
                "Save with `result.save(path, dense=True)`, which stores them."
            )
        shape = self.known.distances(0).n, self.known.distances(1).n
        device = self.known.distances(0).device
        # large plans are read by their entries, which are zero outside
        if self.pairs is None or not limits_of(device).stores(*shape):
            return self.support
        return of_pairs(self.support, self.pairs, shape)

    def linear_cost(self) -> Cost | None:
        """Give the linear cost M of the solve, (n, m)."""
        if self.table is not None:
            return self.table
        if self.likely is not None:
            raise UnsupportedError(
                "The linear cost of likely pairs was stored as a table, and the file does not hold "
                "it. Save with `result.save(path, dense=True)`, which stores it."
            )
        if not self.linear:
            return None
        source, target = self.spaces
        if source.features is None or target.features is None:
            raise UnsupportedError(
                "The linear cost was given as a table `M`, and the file does not hold it. Save "
                "with `result.save(path, dense=True)`, which stores it."
            )
        features = source.features.double(), target.features.double()
        return feature_cost(*features, target.feature_metric)

    def map(
        self,
        side: int,
        plan: TransportPlan,
        cross: CrossDistance,
        linear: Cost | None,
        values: Tensor,
    ) -> Tensor:
        """Average ``values`` (m, c) by the conditional plan of each new point of a side, (q, c)."""
        # `plan` leads from that side to the other, and `linear` is the linear cost (q, m) of the
        # new points
        kinds = {kind.name: kind for kind in (DenseGradient, FactoredGradient, SampledGradient)}
        known, rows = self.known, kinds[self.known.gradient].rows_at(self.known, side)
        step = cross.block_size(
            known.distances(side).n if rows.points is None else len(rows.points)
        )
        mapped = []
        for start in range(0, cross.n_new, step):
            block = slice(start, min(start + step, cross.n_new))
            cost = rows.at(cross.rows(block, rows.points))
            if linear is not None:
                table = linear.rows(block).dense().matrix.to(cost.device, cost.dtype)
                cost = added(cost, DenseCost(table), (1 - known.alpha) / self.mass)
            if self.likely is not None:
                likely = self._said_by_likely(side, cross.rows(block, self.likely[side]))
                cost = added(cost, likely.to(cost.dtype), (1 - known.alpha) / self.mass)
            if known.own is not None:
                column = known.own[1 - side].to(cost.dtype)
                cost = cost.shifted(column.new_zeros(cost.shape[0]), column)
            mapped.append(plan.extend(cost.to(plan.dtype)).barycentric(values))
        return torch.cat(mapped)

    def _said_by_likely(self, side: int, near: Tensor) -> DenseCost:
        """Compute the linear cost of new points, of distances (q, k) to their side of the pairs."""
        assert self.likely is not None
        assert self.likely_weights is not None
        loss = self.known.loss
        far = self.known.distances(1 - side).columns(self.likely[1 - side]).double()
        table = torch.zeros(len(near), len(far), dtype=torch.float64, device=near.device)
        for weight, x, y in zip(self.likely_weights.tolist(), near.T, far.T, strict=True):
            table += weight * loss(*((x[:, None], y) if side == 0 else (y, x[:, None])))
        return DenseCost(table)


def map_new(
    extension: Extension | None,
    plan: TransportPlan,
    side: int,
    values: Any,
    *,
    sharp: bool,
    points: Any,
    table: Any,
    linear: Any,
    features: Any,
) -> Tensor:
    """Map new points of the source (0) or the target (1), as the user gave them, to the other."""
    # A plan is `sharp` if it has no entropy, or is not the plan of its cost.
    if extension is None:
        raise UnsupportedError(
            "This result does not hold what new points are mapped by (`result.extension`). Solve "
            "again."
        )
    entropic = extension.unpolished or plan
    plan, entropic = (
        (part.T if side == 1 else part).giving(in_numpy=False) for part in (plan, entropic)
    )
    other, count = extension.spaces[1 - side], plan.shape[1]
    if values is None:
        values, name = other.points, "YX"[side]
        if values is None:
            raise InvalidInputError(
                f"{name} was not given as points: pass `values` of shape ({count}, c), one row per "
                f"point of {name}."
            )
    with plainly(plan.device):
        averaged = check_points("values", values).to(plan.device)
        check_shape("values", averaged, (count, "c"), "one row per point of the side mapped to")
        cross = _read_new_points(extension, side, points, table)
        cost = None
        if extension.linear:
            cost = _read_linear_cost(other, linear, features, (cross.n_new, count))
        elif linear is not None or features is not None:
            raise InvalidInputError(
                "`M_new` or `F_new` was given, and the solve had no linear cost. Drop it."
            )
        mapped = extension.map(side, entropic, cross, cost, averaged)
        if sharp:
            for rows, missed in _missed(extension, side, (plan, entropic), cross, averaged):
                mapped[rows] += missed
        return mapped


def _missed(
    extension: Extension,
    side: int,
    plans: tuple[TransportPlan, TransportPlan],
    cross: CrossDistance,
    values: Tensor,
) -> Iterator[tuple[slice, Tensor]]:
    """Interpolate by how far known points, mapped by the entropic plan, miss the sharp one's."""
    # Weights are inverse squares of distances (D. Shepard, ACM National Conference 1968): a known
    # point has its own, and far from all of them the means of both plans, which are the same.
    # Points that the sharp plan moves no mass of are not corrected.
    plan, entropic = plans
    sums = plan @ torch.cat([values.double(), values.new_ones(len(values), 1).double()], dim=1)
    if extension.unpolished is not None:
        known = entropic.barycentric(values.double())
    else:
        space, provider = extension.spaces[side], extension.known.distances(side)
        table = None
        if space.points is None:
            everything = torch.arange(provider.n, device=provider.device)
            table = provider.columns(everything).T.double() / space.scale
        itself = CrossDistance(space, provider, space.points, table)
        linear = extension.linear_cost()
        linear = linear.transpose() if linear is not None and side == 1 else linear
        known = extension.map(side, entropic, itself, linear, values)
    mass = sums[:, -1:]
    missed = torch.where(mass > 0, sums[:, :-1] / mass - known, 0.0)
    step = cross.block_size(len(missed))
    for start in range(0, cross.n_new, step):
        rows = slice(start, min(start + step, cross.n_new))
        apart = cross.apart(rows).abs()
        nearest = apart.amin(1, keepdim=True)
        # the ratio to the nearest one, as an inverse would be infinite
        weights = torch.where(apart > nearest, (nearest / apart).square(), 1.0)
        yield rows, weights / weights.sum(1, keepdim=True) @ missed


def _read_new_points(extension: Extension, side: int, points: Any, table: Any) -> CrossDistance:
    """Check new points, or their table of distances, and relate them to the known ones."""
    name, space = "XY"[side], extension.spaces[side]
    if (points is None) == (table is None):
        what = "neither was" if points is None else "both were"
        raise InvalidInputError(
            f"Pass exactly one of `{name}_new` (points) and `D_new` (their distances to the "
            f"points of {name}); {what} given."
        )
    provider, known = extension.known.distances(side), space.points
    refuse_directed(provider, "New points cannot be mapped by costs in one direction.")
    if table is not None:
        table = _check_table(table, provider).to(provider.device)
        return CrossDistance(space, provider, None, table)
    if known is None:
        raise InvalidInputError(
            f"{name} was not given as points, so new ones are given by their distances: "
            f"pass `D_new` of shape (q, {provider.n}), in the units of {name}'s."
        )
    points = check_points(f"{name}_new", points).to(known.device)
    if points.shape[1] != known.shape[1]:
        raise InvalidInputError(
            f"`{name}_new` must have {known.shape[1]} columns, as {name} has; got "
            f"{points.shape[1]}."
        )
    return CrossDistance(space, provider, points, None)


def _check_table(value: Any, provider: DistanceProvider) -> Tensor:
    """Check distances of new points, shape (q, n): finite, and non-negative as the known ones."""
    table = to_tensor("D_new", value)
    check_shape("D_new", table, ("q", provider.n), "one row of distances per new point")
    table = check_linear_cost(table, (len(table), provider.n), name="D_new")
    signed = isinstance(provider, PrecomputedDistance) and float(provider.matrix().min()) < 0
    if not signed and float(table.min()) < 0:
        raise InvalidInputError(
            f"`D_new` must be non-negative; its smallest entry is {float(table.min()):.3g}."
        )
    return table


def _read_linear_cost(other: Space, table: Any, features: Any, shape: tuple[int, int]) -> Cost:
    """Check the linear cost (q, m) of new points, given as a table or by their features."""
    known = other.features
    if table is not None and features is None:
        return DenseCost(check_linear_cost(table, shape, name="M_new"))
    if known is None or features is None or table is not None:
        also = "" if known is None else ", or `F_new`, their features"
        raise InvalidInputError(
            f"The solve had a linear cost: pass `M_new` of shape {shape}, the linear cost of "
            f"the new points{also}."
        )
    new = check_points("F_new", features).to(known.device).double()
    check_shape("F_new", new, (shape[0], known.shape[1]), "the features of each new point")
    return feature_cost(new, known.double(), other.feature_metric)
