"""One side of a solved problem, and what a user gives of new points there, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchgw._boundary.arrays import check_linear_cost, check_points, to_tensor
from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw._gradients.means import MeanDistances
from torchgw._problem.linear_term import feature_cost
from torchgw._sinkhorn.cost import Cost, DenseCost
from torchgw.distances.base import DistanceProvider
from torchgw.distances.new_points import CrossDistance, Space

__all__ = ["Side", "check_values", "read_linear_cost", "read_new_points"]


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


def read_new_points(side: Side, points: Any, table: Any) -> CrossDistance:
    """Return the distances of new points, given as such or by a table, to the known ones."""
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
        table = _check_table(table, side.distances.n).to(side.distances.device)
    return CrossDistance(side.space, side.distances, points, table)


def read_linear_cost(
    target: Side, table: Any, features: Any, count: int, *, solved: bool
) -> Cost | None:
    """Return the linear cost (count, m) of new points, from their table or their features.

    ``solved`` says whether the solve had one.
    """
    shape = count, target.distances.n
    if not solved:
        if table is None and features is None:
            return None
        raise InvalidInputError(
            "`M_new` or `F_new` was given, and the solve had no linear cost. Drop it."
        )
    if table is not None and features is None:
        return DenseCost(check_linear_cost(table, shape, name="M_new"))
    space = target.space
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


def _check_table(value: Any, n: int) -> Tensor:
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


def check_values(values: Any, count: int) -> Tensor:
    """Return values to average, shape (count, c), finite."""
    table = check_points("values", values)
    if table.shape[0] != count:
        raise InvalidInputError(
            f"`values` must have shape ({count}, c), one row per point of the side mapped to; got "
            f"{tuple(table.shape)}."
        )
    return table
