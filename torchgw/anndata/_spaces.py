"""The data to compare, as arguments of solve, and options that all alignments take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import scipy
from numpy.typing import NDArray
from scipy.sparse.csgraph import dijkstra

from torchgw._boundary.arrays import as_labels, check_points, to_numpy
from torchgw._boundary.checks import check_choice, is_number
from torchgw._errors import GraphWarning, InvalidInputError, InvalidTypeError, warn_user
from torchgw._problem.table import Options
from torchgw.distances import knn_graph, symmetrise
from torchgw.distances.base import BLOCK_ENTRIES
from torchgw.distances.graph import GraphMetric

if TYPE_CHECKING:
    from anndata import AnnData

# One name for every object, one for each of two, or names by object.
Names = str | tuple[str | None, str | None] | Mapping[str, str] | None
Recipe = Literal["scot"]
# Points that SCOT joins each one to, itself counted, and its epsilon. [L358]
_SCOT_NEIGHBORS = 110
_SCOT_EPSILON = 1e-3


@dataclass(frozen=True)
class Side:
    """One object or batch that takes part."""

    name: str
    shown: str  # its name in messages
    adata: AnnData


@dataclass(frozen=True)
class Space:
    """The data of one side that a solve is given."""

    value: Any  # points (n, d) or a graph for X, Y; or distances (n, n) for D_X, D_Y
    is_matrix: bool
    points: NDArray[np.float64] | None  # coordinates that others are projected into
    shared: NDArray[np.float64] | None  # coordinates that all sides have


def is_object(value: Any) -> bool:
    """Say whether something has what AnnData has."""
    return all(hasattr(value, slot) for slot in ("obsm", "obsp", "obs", "uns"))


def check_objects(*objects: tuple[str, Any]) -> None:
    """Refuse anything but AnnData."""
    for shown, adata in objects:
        if not is_object(adata):
            raise InvalidTypeError(f"`{shown}` must be an AnnData; got {type(adata).__name__}.")


def check_name(argument: str, value: Any, *, none: bool = True) -> None:
    """Refuse anything but a name, or ``None`` if that will do."""
    if not isinstance(value, str) and not (none and value is None):
        raise InvalidTypeError(f"`{argument}` must be a name; got {value!r}.")


def check_sources(
    use_rep: Names, use_obsp: Names, recipe: Recipe | None, metric: GraphMetric | None
) -> None:
    """Refuse sources that contradict each other."""
    if use_rep is not None and use_obsp is not None:
        raise InvalidInputError("Pass `use_rep` or `use_obsp`, not both.")
    check_choice("recipe", recipe, get_args(Recipe), none=True)
    if recipe is not None and use_obsp is not None:
        raise InvalidInputError(f"`recipe={recipe!r}` is for `use_rep`: drop `use_obsp`.")
    if metric is not None:
        check_choice("metric", metric, get_args(GraphMetric))
        if recipe is None:
            raise InvalidInputError(
                f"`metric={metric!r}` is that of a recipe. Pass recipe='scot', or "
                f"solve_options={{'distances': {metric!r}}} to compare these distances."
            )


def _names_of(argument: str, names: Names, sides: Sequence[Side]) -> list[str | None]:
    """Return the name that each side goes by."""
    if names is None or isinstance(names, str):
        return [names] * len(sides)
    if isinstance(names, Mapping):
        missing = [side.name for side in sides if side.name not in names]
        if missing:
            raise InvalidInputError(f"`{argument}` has no entry for {', '.join(missing)}.")
        listed: list[Any] = [names[side.name] for side in sides]
    else:
        listed = list(names) if isinstance(names, (tuple, list)) and len(sides) == 2 else []
    if len(listed) != len(sides) or not all(isinstance(name, (str, type(None))) for name in listed):
        raise InvalidInputError(
            f"`{argument}` must be one name or a pair, or a dictionary of names by object; "
            f"got {names!r}."
        )
    return listed


def read_spaces(
    sides: Sequence[Side],
    use_rep: Names,
    use_obsp: Names,
    joint_rep: Names,
    recipe: Recipe | None,
    metric: GraphMetric | None,
) -> list[Space]:
    """Read what is compared of every side."""
    argument, names = ("use_rep", use_rep) if use_obsp is None else ("use_obsp", use_obsp)
    keys = _names_of(argument, names, sides)
    shared = _names_of("joint_rep", joint_rep, sides)
    spaces = []
    for side, key, joint in zip(sides, keys, shared, strict=True):
        common = None if joint_rep is None else points_of(side.shown, side.adata, joint)
        if use_obsp is not None:
            value = look_up(side.adata.obsp, key, f"`{side.shown}.obsp`")
            graph = scipy.sparse.issparse(value)
            if graph and str(key).endswith("connectivities"):
                value = _steps(value, f"{side.shown}.obsp[{key!r}]")
            spaces.append(Space(symmetrise(value) if graph else value, not graph, None, common))
            continue
        points = points_of(side.shown, side.adata, key)
        if recipe is None:
            spaces.append(Space(points, False, points, common))
        else:
            length = np.linalg.norm(points, axis=1, keepdims=True)
            points = points / np.where(length > 0, length, 1)
            spaces.append(
                Space(_scot_distances(points, metric or "correlation"), True, points, common)
            )
    return spaces


def solve_arguments(
    source: Space, target: Space, options: dict[str, Any], recipe: Recipe | None
) -> dict[str, Any]:
    """Make the arguments of a solve of two spaces."""
    arguments = dict(options)
    for letter, space in (("X", source), ("Y", target)):
        arguments[f"D_{letter}" if space.is_matrix else letter] = space.value
        if space.points is None:
            # scaled, as two modalities have no unit in common
            arguments.setdefault("scale", "max")
    if source.shared is not None and target.shared is not None:
        arguments["features"] = _joint(source.shared, target.shared)
    if recipe is not None:
        arguments.setdefault("epsilon", _SCOT_EPSILON)
        if not {"init", "n_init"} & set(options):
            # at the product plan and the last epsilon
            sizes = len(source.value), len(target.value)
            arguments["init"] = np.full(sizes, 1 / math.prod(sizes))
    return arguments


def look_up(table: Any, name: Any, where: str) -> Any:
    """Look up an entry of obsm or obsp, or a column of obs; an error lists those that exist."""
    if not isinstance(name, str) or name not in table:
        known = ", ".join(map(repr, table.keys())) or "nothing"
        raise InvalidInputError(f"There is no {name!r} in {where}, which has {known}.")
    return table[name]


def groups_of(side: Side, name: str) -> NDArray[Any]:
    """Read the types of the cells of a side, as words."""
    column = look_up(side.adata.obs, name, f"`{side.shown}.obs`")
    return as_labels(f"{side.shown}.obs[{name!r}]", np.asarray(column, dtype=object))


def pairs_of(sides: Sequence[Side], name: str) -> NDArray[np.int64]:
    """Find the cells of two sides that a column gives one name, (k, 2); others have none."""
    places: list[dict[str, int]] = []
    for side in sides:
        column = look_up(side.adata.obs, name, f"`{side.shown}.obs`")
        has_name = (column.notna() & (column.astype(str) != "")).to_numpy()
        named = column[has_name].astype(str)
        twice = named[named.duplicated()]
        if len(twice):
            raise InvalidInputError(
                f"`{side.shown}.obs[{name!r}]` names matched cells, and {twice.iloc[0]!r} is the "
                "name of several cells. Give types of cells as `groups_key`."
            )
        places.append(dict(zip(named, np.flatnonzero(has_name).tolist(), strict=True)))
    here, there = places
    both = [(place, there[each]) for each, place in here.items() if each in there]
    if not both:
        raise InvalidInputError(
            f"`pairs_key={name!r}`: no cell of `{sides[0].shown}` has the name of a cell of "
            f"`{sides[1].shown}`."
        )
    return np.array(both, dtype=np.int64)


def points_of(
    shown: str, adata: AnnData, name: str | None, *, sparse: bool = False
) -> NDArray[np.float64]:
    """Read the points of one side, as a copy: what is written back must not change with them."""
    if name is None:
        name = "X_pca" if "X_pca" in adata.obsm else "X"
    value = adata.X if name == "X" else look_up(adata.obsm, name, f"`{shown}.obsm`")
    what = f"{shown}.X" if name == "X" else f"{shown}.obsm[{name!r}]"
    if value is None:
        raise InvalidInputError(f"`{what}` is None; name an entry of obsm as `use_rep`.")
    if sparse and scipy.sparse.issparse(value):
        return np.asarray(value.toarray(), dtype=np.float64)
    # a class of anndata for files that are not read into memory
    if scipy.sparse.issparse(value) or hasattr(value, "to_memory"):
        raise InvalidInputError(
            f"`{what}` is sparse, and distances among counts say little. Reduce it first, for "
            "example by scanpy.pp.pca, and pass use_rep='X_pca'."
            if name == "X"
            else f"`{what}` is sparse. Make it dense: {what} = {what}.toarray()."
        )
    if not isinstance(value, np.ndarray) and hasattr(value, "chunks"):
        # an array of a file, copied once, some rows at a time
        stored, value = value, np.empty(value.shape)
        rows = max(1, BLOCK_ENTRIES // max(1, math.prod(stored.shape[1:])))
        for start in range(0, len(value), rows):
            value[start : start + rows] = stored[start : start + rows]
        return to_numpy(check_points(what, value))
    return np.array(to_numpy(check_points(what, value)), dtype=np.float64)


def _steps(graph: Any, what: str) -> Any:
    """Let every edge of a graph of similarities count as one step."""
    warn_user(
        f"`{what}` has large entries between near neighbours, so it is no graph of lengths: every "
        "edge was taken as one step.",
        GraphWarning,
    )
    steps = scipy.sparse.csr_matrix(graph, copy=True)
    steps.eliminate_zeros()
    steps.data = np.ones(len(steps.data))
    return steps


def _scot_distances(points: NDArray[np.float64], metric: GraphMetric) -> NDArray[np.float64]:
    """Count the steps between points on the graph of the nearest ones, by a metric."""
    n = len(points)
    count = min(_SCOT_NEIGHBORS, max(n // 5, 5), n) - 1
    graph = knn_graph(points, max(count, 1), metric=metric)
    steps = dijkstra(graph, directed=False, unweighted=True)
    steps[np.isinf(steps)] = steps[np.isfinite(steps)].max()
    return steps / (steps.max() or 1.0)


def _joint(source: NDArray[np.float64], target: NDArray[np.float64]) -> tuple[Any, Any]:
    """Scale shared coordinates so that their mean squared distance is one."""
    if source.shape[1] != target.shape[1]:
        raise InvalidInputError(
            f"`joint_rep` must have as many columns on both sides; got {source.shape[1]} and "
            f"{target.shape[1]}."
        )
    middle = (source.mean(0) + target.mean(0)) / 2
    source, target = source - middle, target - middle
    square = (source**2).sum(1).mean() + (target**2).sum(1).mean()
    unit = np.sqrt(square - 2 * source.mean(0) @ target.mean(0)) or 1.0
    return source / unit, target / unit


def check_options(solve_options: Any) -> dict[str, Any]:
    """Read options of a solve; the data come from the objects."""
    if isinstance(solve_options, Options):
        return solve_options.given
    if solve_options is not None and not isinstance(solve_options, Mapping):
        raise InvalidTypeError(
            "`solve_options` must be torchgw.Options(...) or a dictionary; got "
            f"{type(solve_options).__name__}."
        )
    options = dict(solve_options or {})
    taken = sorted({"X", "Y", "D_X", "D_Y", "M", "features"} & set(options))
    if taken:
        raise InvalidInputError(
            f"`solve_options` has {', '.join(taken)}, which come from the AnnData objects: use "
            "`use_rep`, `use_obsp` and `joint_rep`."
        )
    return options


def check_labels(labels: Any, key_added: Any) -> tuple[str, ...]:
    """Read names of columns."""
    check_name("key_added", key_added, none=False)
    listed = (labels,) if isinstance(labels, str) else () if labels is None else labels
    if not isinstance(listed, (tuple, list)) or not all(isinstance(name, str) for name in listed):
        raise InvalidTypeError(f"`labels` must be a name, or a list of names; got {labels!r}.")
    return tuple(listed)


def check_relaxation(tau_a: Any, tau_b: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Translate factors of half-steps, 2 rho / (2 rho + epsilon), into weights rho."""
    if tau_a is None and tau_b is None:
        return {}
    rho = []
    for name, tau in (("tau_a", tau_a), ("tau_b", tau_b)):
        tau = 1.0 if tau is None else tau
        if not is_number(tau) or not 0 < tau <= 1:
            raise InvalidInputError(
                f"`{name}` must be above 0 and at most 1, which is a strict marginal; got {tau!r}."
            )
        rho.append(float(tau))
    if rho == [1, 1]:
        return {}
    rivals = sorted({"unbalanced", "mass"} & set(options))
    if rivals:
        raise InvalidInputError(f"Pass `tau_a` and `tau_b` or `{rivals[0]}`, not both.")
    epsilon = options.get("epsilon", "auto")
    if not is_number(epsilon) or epsilon <= 0:
        raise InvalidInputError(
            "`tau_a` and `tau_b` are relative to epsilon, which has to be a positive number then: "
            "solve_options={'epsilon': 1e-3}."
        )
    weights = [math.inf if tau == 1 else float(epsilon) * tau / (2 * (1 - tau)) for tau in rho]
    return {"unbalanced": tuple(weights)}
