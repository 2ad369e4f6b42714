"""Spaces as the user lists them, the stored distances made of them, and these packed by size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._batch.packing import Stack, make_stack, pack, padded_sizes
from torchgw._boundary.arrays import as_weights, check_each, check_points
from torchgw._boundary.checks import both
from torchgw._boundary.graphs import as_graph
from torchgw._errors import InvalidInputError, InvalidTypeError
from torchgw._problem.given import Passed, with_area
from torchgw._problem.limits import limits_of
from torchgw._problem.named import DistanceName, ScaleName, pair_of_distances, refuse_names
from torchgw._problem.problem import FeatureMetric, stored_matrix
from torchgw._problem.providers import DistanceOptions, build_provider
from torchgw._problem.table import check_options
from torchgw._starts.coarse import AXES
from torchgw.distances.base import DistanceProvider
from torchgw.distances.points import ANGLES, unit_vectors
from torchgw.distances.sampling import distance_quantiles
from torchgw.distances.surface import Surface

_HOST = torch.device("cpu")

# What users call the lists beside the spaces, by side.
_PARTS = {"weights": ("a", "b"), "features": ("features", "features")}


@dataclass(frozen=True)
class Measure:
    """How spaces are measured and compared; the same for all, so that values can be compared."""

    distances: DistanceName | tuple[Any, Any] = "auto"
    scale: ScaleName | None = "auto"
    n_neighbors: int | None = None
    feature_metric: FeatureMetric = "sqeuclidean"

    def options(self) -> DistanceOptions:
        """Make the options of one call."""
        return DistanceOptions(
            self.n_neighbors, None, self.scale, "stitch", factors=False, signed=True
        )


class Space(NamedTuple):
    """One space: its distances in units of the problem, weights, features."""

    table: Tensor  # (n, n) float64
    weights: Tensor  # (n,) float64
    features: Tensor | None = None  # (n, d) float64; unit vectors if compared by angle


class Listed(NamedTuple):
    """The spaces of one side, as the user gave them."""

    name: str  # of the argument
    are_tables: bool
    items: list[Any]

    @property
    def are_measured(self) -> bool:
        """Whether the distances of each space are given."""
        measured = [isinstance(item, DistanceProvider) for item in self.items]
        return self.are_tables or (bool(measured) and all(measured))

    @classmethod
    def of(cls, name: str, spaces: Any, tables: Any) -> Listed:
        """List the spaces of side X or Y, given as points or as distance matrices."""
        if (spaces is None) == (tables is None):
            what = "neither was given" if spaces is None else "both were given"
            raise InvalidInputError(
                f"Pass exactly one of `{name}s` (spaces) and `D_{name}` (distance matrices); "
                f"{what}."
            )
        if tables is None:
            return cls(f"{name}s", False, listed_spaces(f"{name}s", spaces))
        return cls(f"D_{name}", True, listed_spaces(f"D_{name}", tables))


def check_measure(measure: Measure, *sides: Listed) -> None:
    """Refuse names of distances that are unknown or not used, and a second one for one list."""
    check_options(scale=measure.scale, n_neighbors=measure.n_neighbors)
    first, second = pair_of_distances(measure.distances)
    if len(sides) == 1 and first != second:
        raise InvalidInputError(
            f"`distances` must be one name where there is one list of spaces; got "
            f"{measure.distances!r}."
        )
    refuse_names(measure.distances, {side.name: side.are_measured for side in sides})


def listed_spaces(name: str, given: Any) -> list[Any]:
    """Make a list of anything that holds several spaces."""
    if hasattr(given, "to_data_list"):
        return list(given.to_data_list())
    if isinstance(given, Tensor) and given.is_nested:
        return list(given.unbind())
    if isinstance(given, (list, tuple)) or getattr(given, "ndim", 0) == 3:
        return list(given)
    shape = getattr(given, "shape", None)
    what = type(given).__name__ + (f" of shape {tuple(shape)}" if shape is not None else "")
    raise InvalidTypeError(
        f"`{name}` must be a list of spaces, a nested tensor, an array of shape (B, n, d) or a "
        f"batch of PyTorch Geometric; got {what}. One problem is for torchgw.solve."
    )


def read_spaces(
    listed: Listed, weights: Any, features: Any, measure: Measure, side: int, device: torch.device
) -> list[Space]:
    """Read the spaces of one side, 0 or 1."""
    count = len(listed.items)
    parts: list[list[Any]] = []
    for label, part in (("weights", weights), ("features", features)):
        each = f"spaces of {listed.name}"
        parts.append(check_each(_PARTS[label][side], part, count, "array", each))
    known: dict[int, tuple[Tensor, Tensor]] = {}
    made = []
    for place, (item, weight, feature) in enumerate(zip(listed.items, *parts, strict=True)):
        name = f"{listed.name}[{place}]"
        # a space that is listed many times is measured once
        if id(item) not in known or weight is not None:
            known[id(item)] = _measured(
                name, item, listed.are_tables, weight, measure, side, device
            )
        made.append(Space(*known[id(item)], _directed(name, feature, measure, device)))
    for place, space in enumerate(made):
        if space.features is not None and len(space.features) != len(space.table):
            raise InvalidInputError(
                f"The features of `{listed.name}[{place}]` must have one row per point, "
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
    name: str,
    item: Any,
    is_table: bool,
    weight: Any,
    measure: Measure,
    side: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Compute the scaled distances of one space, and its weights."""
    spec = both(measure.distances)[side]
    if isinstance(spec, DistanceProvider):
        raise InvalidInputError(
            "`distances` must be a name here, as every space has distances of its own. List "
            "providers as Xs and Ys."
        )
    if not is_table:
        item, weight = with_area(name, item, weight)
    if spec == "auto" and not is_table and not isinstance(item, DistanceProvider):
        paths = isinstance(item, Surface) or as_graph(name, item) is not None
        spec = "precomputed" if paths else "euclidean"
    space, table = (None, item) if is_table else (item, None)
    # messages put the letters before the name of a matrix themselves
    passed = Passed(name.removeprefix("D_") if is_table else name, space, table, weight)
    # distances of few points take a GPU as long as its launches [L1883]
    listed = isinstance(item, np.ndarray) and item.ndim == 2
    few = listed and len(item) <= limits_of(device).few_points
    provider = build_provider(passed, spec, measure.options(), _HOST if few else device)
    return (
        stored_matrix(provider).to(device, torch.float64),
        as_weights("a", weight, provider.n, device, f"point of {name}"),
    )


def _directed(name: str, feature: Any, measure: Measure, device: torch.device) -> Tensor | None:
    """Check features, and scale them so that their squared distances are the linear cost."""
    if feature is None:
        return None
    found = check_points(f"features of {name}", feature).to(device, torch.float64)
    if measure.feature_metric in ANGLES:
        # half the squared distance of unit vectors is one less their product
        found = unit_vectors(found, measure.feature_metric, f"features of {name}") / 2**0.5
    return found


def per_problem(
    name: str, value: Any, count: int, read: Callable[[Any], float]
) -> NDArray[np.float64]:
    """Read one value for all problems, or check that there is one for each and read them."""
    if isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) == 1:
        if len(value) != count:
            raise InvalidInputError(
                f"`{name}` must be one value, or one for each of the {count} problems; got "
                f"{len(value)}."
            )
        items = (item.item() if hasattr(item, "item") else item for item in value)
        return np.array([read(item) for item in items], dtype=np.float64)
    return np.full(count, read(value), dtype=np.float64)


class Shelves:
    """Spaces packed by size, with what starts of their problems are made from.

    They are padded less for a search on a CPU, which follows many plans of each problem.
    """

    def __init__(self, spaces: Sequence[Space], *, searched: bool) -> None:
        counts = np.array([len(space.table) for space in spaces], dtype=np.int64)
        self.sizes = counts
        narrow = searched and bool(spaces) and spaces[0].table.device.type == "cpu"
        for size in self._sort(spaces, padded_sizes(counts, narrow=narrow)):
            mine = [spaces[k] for k in (self.padded == size).nonzero()[0]]
            self.stacks[size] = pack(
                [space.table for space in mine], [space.weights for space in mine], size
            )
            features = [space.features for space in mine]
            if features[0] is not None:
                self.features[size] = _padded(features, size)

    @classmethod
    def stacked(cls, sides: Sequence[tuple[Tensor, Tensor, Tensor]], *, searched: bool) -> Shelves:
        """Shelve zero-padded stacks (S, n, n), (S, n) of so many points (S,), one after another."""
        shelves = cls.__new__(cls)
        narrow = searched and sides[0][0].device.type == "cpu"
        padded = [padded_sizes(sizes.cpu().numpy(), narrow=narrow) for _, _, sizes in sides]
        shelves.sizes = np.concatenate([sizes.cpu().numpy() for _, _, sizes in sides])
        for size in shelves._sort(_Slices(sides), np.concatenate(padded)):
            tables = sides[0][0].new_zeros(int((shelves.padded == size).sum()), size, size)
            weights, sizes, done = tables.new_zeros(tables.shape[:2]), [], 0
            for (table, weight, used), sizes_of in zip(sides, padded, strict=True):
                index = torch.from_numpy((sizes_of == size).nonzero()[0]).to(used.device)
                least = min(size, table.shape[1])
                # a stack of one size is not copied twice
                mine = slice(None) if len(index) == len(table) else index
                here = slice(done, done + len(index))
                tables[here, :least, :least] = table[mine, :least, :least]
                weights[here, :least] = weight[mine, :least]
                sizes.append(used[index])
                done += len(index)
            shelves.stacks[size] = make_stack(tables, weights, torch.cat(sizes))
        return shelves

    def _sort(self, spaces: Sequence[Space], padded: NDArray[np.int64]) -> list[int]:
        """Find the stack of each space, by its padded size, and its place; list the stacks."""
        self.spaces, self.padded = spaces, padded
        self.place = np.zeros_like(padded)
        self.stacks: dict[int, Stack] = {}
        self.features: dict[int, Tensor] = {}
        self._signatures: dict[int, Tensor] = {}
        self._axes: dict[int, Tensor] = {}
        used: list[int] = np.unique(self.padded[self.padded > 0]).tolist()
        for size in used:
            mine = self.padded == size
            self.place[mine] = np.arange(mine.sum())
        return used

    def signatures(self, size: int) -> Tensor:
        """Compute quantiles of the distances of each point, (S, n, q)."""
        if size not in self._signatures:
            tables, weights, sizes, _ = self.stacks[size]
            found = [
                distance_quantiles(table[:n, :n], weight[:n])
                for table, weight, n in zip(tables, weights, sizes.tolist(), strict=True)
            ]
            self._signatures[size] = _padded(found, size)
        return self._signatures[size]

    def axes(self, size: int) -> Tensor:
        """Compute leading axes of the distances of each space, and means, (S, n, 4)."""
        if size not in self._axes:
            tables, weights, _, _ = self.stacks[size]
            self._axes[size] = _leading_axes(tables.cpu(), weights.cpu()).to(tables.device)
        return self._axes[size]


class _Slices(Sequence[Space]):
    """Spaces of stacks, cut out when they are asked for."""

    def __init__(self, sides: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        self._sides = sides

    def __len__(self) -> int:
        return sum(len(tables) for tables, _, _ in self._sides)

    def __getitem__(self, place: Any) -> Any:
        for tables, weights, sizes in self._sides:
            if place < len(tables):
                n = int(sizes[place])
                return Space(tables[place, :n, :n], weights[place, :n])
            place -= len(tables)
        raise IndexError(place)


def _leading_axes(tables: Tensor, weights: Tensor) -> Tensor:
    """Compute axes of centred tables, table ~ +- axes axes', and centred mean distances."""
    means = (tables * weights[:, None, :]).sum(2)
    overall = (means * weights).sum(1)[:, None]
    centred = tables - means[:, :, None] - means[:, None, :] + overall[:, :, None]
    root = weights.sqrt()
    values, vectors = torch.linalg.eigh(root[:, :, None] * centred * root[:, None, :])
    order = values.abs().argsort(1, descending=True)[:, None, :AXES]
    found = vectors.gather(2, order.expand(-1, len(root[0]), -1))
    found = found * values.abs().gather(1, order[:, 0])[:, None, :]
    used = torch.where(root > 0, root, torch.inf)[:, :, None]
    return torch.cat([found / used, (means - overall)[:, :, None]], 2)


def _padded(parts: Sequence[Any], size: int) -> Tensor:
    """Stack tables (n, q) as (S, size, q)."""
    stacked: Tensor = parts[0].new_zeros(len(parts), size, parts[0].shape[1])
    for place, part in enumerate(parts):
        stacked[place, : len(part)] = part
    return stacked
