"""Named distances: what the names that ``distances=`` takes stand for.

A name is one entry of ``NAMED``; choices and messages follow it. "auto" has none: it becomes one of
the others, by the size of the problem; so does "geodesic", of points without a look at others.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

from torchgw._boundary.checks import both
from torchgw._errors import InvalidInputError
from torchgw._problem.preparation import KeyedGraph, Preparation
from torchgw.distances.base import DistanceProvider
from torchgw.distances.curved import CurvedDistance, CurvedModel
from torchgw.distances.dijkstra import DijkstraDistance
from torchgw.distances.nystrom import NystromDistance
from torchgw.distances.points import PointDistance, PointMetric
from torchgw.distances.precomputed import PrecomputedDistance

DistanceName = Literal[
    "auto", "geodesic", "dijkstra", "precomputed", "landmark", PointMetric, CurvedModel
]
# Names that stand for others, by the size of the problem.
BY_SIZE = "auto", "geodesic"


class NamedDistance(NamedTuple):
    """How sides become providers under one name."""

    # A function from the sides of this name, each its KeyedGraph or its points (n, d), to a
    # provider for each. It gets both sides at once, because all pairs of both are found side by
    # side.
    make: Callable[[list[Any], Preparation], list[DistanceProvider]]
    graph: bool = False  # made from a graph, given or of nearest neighbours; otherwise from points
    curved: bool = False  # made from pairs of points and a curvature


def _on_demand(graphs: list[KeyedGraph], stages: Preparation) -> list[DistanceProvider]:
    return [DijkstraDistance(graph.geodesics, device=stages.device) for graph in graphs]


def _all_pairs(graphs: list[KeyedGraph], stages: Preparation) -> list[DistanceProvider]:
    return [PrecomputedDistance.unchecked(table) for table in stages.all_pairs(graphs)]


def _landmarks(graphs: list[KeyedGraph], stages: Preparation) -> list[DistanceProvider]:
    return [*stages.landmarks(graphs)]


def _among_points(
    metric: PointMetric, points: list[Any], stages: Preparation
) -> list[DistanceProvider]:
    # derived tensors are made on the device alone
    return [PointDistance(each.to(stages.device), metric) for each in points]


def _constant_curvature(
    model: CurvedModel, sides: list[Any], stages: Preparation
) -> list[DistanceProvider]:
    made = [
        CurvedDistance(points.to(stages.device), model, curvature=value) for points, value in sides
    ]
    if stages.n_landmarks is None:
        return [*made]
    return [NystromDistance(each, stages.n_landmarks) for each in made]


NAMED: dict[str, NamedDistance] = {
    "dijkstra": NamedDistance(_on_demand, graph=True),
    "precomputed": NamedDistance(_all_pairs, graph=True),
    "landmark": NamedDistance(_landmarks, graph=True),
    **{metric: NamedDistance(partial(_among_points, metric)) for metric in get_args(PointMetric)},
    **{
        model: NamedDistance(partial(_constant_curvature, model), curved=True)
        for model in get_args(CurvedModel)
    },
}


def from_graphs() -> list[str]:
    """List the names of distances that are made from a graph."""
    return [name for name, entry in NAMED.items() if entry.graph]


def of_curvature() -> list[str]:
    """List the names of distances that depend on a curvature."""
    return [name for name, entry in NAMED.items() if entry.curved]


def pair_of_distances(distances: Any) -> tuple[Any, Any]:
    """Split ``distances`` into a known name or a provider for each side."""
    pair = both(distances)
    if len(pair) != 2:
        raise InvalidInputError(
            f"`distances` must be one name or provider, or a pair of them; got {len(pair)} items."
        )
    for item in pair:
        known = isinstance(item, str) and item in (*BY_SIZE, *NAMED)
        if not known and not isinstance(item, DistanceProvider):
            raise InvalidInputError(
                f"`distances` must be one of {', '.join(map(repr, (*BY_SIZE, *NAMED)))}, a "
                f"DistanceProvider, or a pair of these; got {item!r}. Compute other distances and "
                "pass them as `D_X` and `D_Y`; a function or a manifold makes a ManifoldDistance."
            )
    return pair


def refuse_names(distances: Any, given: Mapping[str, bool]) -> None:
    """Refuse names in ``distances`` where sides, by what messages call them, have their own."""
    named = (isinstance(item, str) and item != "auto" for item in pair_of_distances(distances))
    idle = [side for (side, own), name in zip(given.items(), named, strict=False) if own and name]
    # one name for both sides has a use as long as one of them has
    if idle and (len(idle) == len(given) or not isinstance(distances, str)):
        raise InvalidInputError(
            f"`distances={distances!r}` measures points and graphs, and {' and '.join(idle)} "
            f"{'is' if len(idle) == 1 else 'are'} neither, so it would not be used. Pass 'auto' "
            "there, or points."
        )
