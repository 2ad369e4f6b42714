"""From what the user listed to spaces whose distances are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgw._boundary.arrays import as_weights, check_points
from torchgw._boundary.graphs import as_graph
from torchgw._errors import InvalidInputError, InvalidTypeError
from torchgw._problem.linear_term import FeatureMetric
from torchgw._problem.named import DistanceName
from torchgw._problem.problem import stored_matrix
from torchgw._problem.providers import DistanceOptions, ScaleName, build_providers
from torchgw.distances.base import DistanceProvider
from torchgw.distances.precomputed import PrecomputedDistance

__all__ = ["Measure", "Space", "check_columns", "listed_spaces", "per_problem", "read_spaces"]


@dataclass(frozen=True)
class Measure:
    """How spaces are measured and compared; the same for all, so that values can be compared."""

    distances: DistanceName | tuple[Any, Any] = "auto"
    scale: ScaleName | None = "auto"
    n_neighbors: int | None = None
    feature_metric: FeatureMetric = "sqeuclidean"

    def options(self) -> DistanceOptions:
        """Make the options of one call; this checks them."""
        return DistanceOptions(self.n_neighbors, None, self.scale, "stitch", factors=False)


_POINT = PrecomputedDistance.unchecked(torch.zeros(1, 1, dtype=torch.float64, device="cpu"))


class Space(NamedTuple):
    """One space: its distances in units of the problem, weights, features."""

    table: Tensor  # (n, n) float64
    weights: Tensor  # (n,) float64
    features: Tensor | None = None  # (n, d) float64, of unit length if compared by angle


def listed_spaces(name: str, given: Any) -> list[Any]:
    """Make a list of anything that holds several spaces."""
    if hasattr(given, "to_data_list"):
        return list(given.to_data_list())
    if isinstance(given, Tensor) and given.is_nested:
        return list(given.unbind())
    if isinstance(given, (list, tuple)):
        return list(given)
    if getattr(given, "ndim", 0) == 3:
        return list(given)
    shape = getattr(given, "shape", None)
    what = type(given).__name__ + (f" of shape {tuple(shape)}" if shape is not None else "")
    raise InvalidTypeError(
        f"`{name}` must be a list of spaces, a nested tensor, an array of shape (B, n, d) or a "
        f"batch of PyTorch Geometric; got {what}. One problem is for torchgw.solve."
    )


def read_spaces(
    name: str,
    given: list[Any] | None,
    tables: list[Any] | None,
    weights: list[Any] | None,
    features: list[Any] | None,
    measure: Measure,
    side: int,
    device: torch.device,
) -> list[Space]:
    """Read the spaces of one side, ``given`` or as ``tables`` of distances."""
    count = len(given if given is not None else tables or [])
    for label, part in (("weights", weights), ("features", features)):
        if part is not None and len(part) != count:
            raise InvalidInputError(
                f"The {label} of `{name}` must be one for each space, {count}; got {len(part)}."
            )
    known: dict[int, tuple[Tensor, Tensor]] = {}
    made = []
    for place in range(count):
        item = None if given is None else given[place]
        table = None if tables is None else tables[place]
        weight = None if weights is None else weights[place]
        feature = None if features is None else features[place]
        # a space that is listed many times is measured once
        key = id(item if item is not None else table)
        if key not in known or weight is not None:
            known[key] = _measured(f"{name}[{place}]", item, table, weight, measure, side, device)
        made.append(Space(*known[key], _directed(f"{name}[{place}]", feature, measure, device)))
    for place, space in enumerate(made):
        if space.features is not None and len(space.features) != len(space.table):
            raise InvalidInputError(
                f"The features of `{name}[{place}]` must have one row per point, "
                f"{len(space.table)}; got {len(space.features)}."
            )
    return made


def check_columns(*sides: list[Space]) -> None:
    """Refuse features of different kinds, which have no distances."""
    widths = {
        space.features.shape[1] for side in sides for space in side if space.features is not None
    }
    if len(widths) > 1:
        raise InvalidInputError(
            "Features must have the same columns in all spaces; got "
            f"{', '.join(map(str, sorted(widths)))} of them."
        )


def _measured(
    name: str, item: Any, table: Any, weight: Any, measure: Measure, side: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Compute the distances of one space in their units, and its weights."""
    spec = measure.distances
    if isinstance(spec, (tuple, list)):
        spec = spec[side]
    if isinstance(spec, DistanceProvider):
        raise InvalidInputError(
            "`distances` must be a name here, as every space has distances of its own. List "
            "providers as Xs and Ys."
        )
    if spec == "auto" and item is not None and not isinstance(item, DistanceProvider):
        spec = "euclidean" if as_graph(name, item) is None else "precomputed"
    if isinstance(item, DistanceProvider) or table is not None:
        spec = "auto"
    # a call measures two sides: the other is a point
    built = build_providers(
        (item, _POINT), (table, None), (spec, "auto"), measure.options(), device, _no_clock,
        (name, "Y"), (weight, None),
    )  # fmt: skip
    provider = built.providers[0]
    return (
        stored_matrix(provider).to(device, torch.float64),
        as_weights("a", weight, provider.n, device, f"point of {name}"),
    )


def _no_clock(phase: str, since: float) -> float:
    return since


def _directed(name: str, feature: Any, measure: Measure, device: torch.device) -> Tensor | None:
    """Check features, and bring them to where their squared distances are the linear cost."""
    if feature is None:
        return None
    found = check_points(f"features of {name}", feature).to(device, torch.float64)
    if measure.feature_metric == "correlation":
        found = found - found.mean(1, keepdim=True)
    if measure.feature_metric in ("cosine", "correlation"):
        length = found.norm(dim=1, keepdim=True)
        if bool((length == 0).any()):
            raise InvalidInputError(
                f"The features of `{name}` have a row without a direction. Drop it, or pass "
                "feature_metric='sqeuclidean'."
            )
        # half the squared distance of unit vectors is one less their product
        found = found / length / 2**0.5
    return found


def per_problem(name: str, value: Any, count: int) -> Sequence[Any]:
    """Spread one value over all problems, or check that there is one for each."""
    if isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) == 1:
        if len(value) != count:
            raise InvalidInputError(
                f"`{name}` must be one value, or one for each of the {count} problems; got "
                f"{len(value)}."
            )
        return [item.item() if hasattr(item, "item") else item for item in value]
    return [value] * count
