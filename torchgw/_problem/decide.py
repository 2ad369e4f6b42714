"""What ``distances="auto"`` means for points: geodesics, straight distances or angles.

1. Points on curves, on surfaces and in space, whose neighbour graph is in one piece on both sides,
   have geodesics. Their dimension is that of the neighbours' distances (Levina and Bickel). Relaxed
   problems go to step 2: paths lead over points that may have no partner.
2. Otherwise, and where points are so few that their graph may have short cuts, ways to measure
   compete: straight distances, geodesics (these first on many points in few dimensions), then
   angles, of more than three coordinates. Each is judged by the agreement that a small search finds
   between the two sides (``_search/optima.py``). The first that explains nearly all is taken;
   otherwise the best. In many dimensions a graph in pieces means clusters, between which paths go
   by chance: geodesics are then tried only if nothing else agrees. Angles, and geodesics in many
   dimensions or of a relaxed problem, have to be better by far than straight distances.
3. Beyond a thousand points some of them, drawn by a fixed seed, stand for all, and straight
   distances are squared, which gives them factors, if the plan that squares find agrees nearly as
   well in straight distances: their own agreement is lower, and that of a few far points.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchgw._errors import GraphWarning
from torchgw._problem.limits import CPU
from torchgw._tensors.operations import distinct
from torchgw.distances.base import DistanceProvider
from torchgw.distances.dijkstra import DijkstraDistance
from torchgw.distances.graph import Neighbourhood, neighbour_geodesics, neighbourhood
from torchgw.distances.points import PointDistance
from torchgw.distances.precomputed import PrecomputedDistance

# judge(source, target, found_by=None): agreement of the best plan between a few points of two
# sides, by their distances or by those of ``found_by``, of both sides too.
Judge = Callable[..., float]

# Dimension up to which geodesics are taken without a trial. [L356]
_FEW_DIMENSIONS = 3.5
# Agreement of straight distances and angles from which on nothing else is tried; and that of
# geodesics, which short cuts may raise. [L356]
_ENOUGH = 0.95
_ENOUGH_PATHS = 0.98
# By how much less than the best the plan found by squares may agree, if squares are to be taken.
# [L427]
_SLACK = 0.07
# Agreement below which nothing has been found. [L356]
UNRELATED = 0.8
# Share of what straight distances leave unexplained that angles may leave at most, to be taken:
# without their length points have a dimension less, and noise agrees better. [L356]
_SHARE_LEFT = 0.7
# The same share for geodesics in many dimensions, where paths between clusters depend on chance and
# cost more. [L428]
_SHARE_LEFT_PATHS = 0.25


class Decision(NamedTuple):
    """How points are measured, and why."""

    chosen: str  # "geodesic" or a point metric
    why: str
    # by way of measuring; squares have the agreement of their plan in straight distances
    agreement: dict[str, float]
    # the neighbour graphs of both sides, where all points were looked at
    shapes: tuple[Neighbourhood, ...] = ()


class _Few(NamedTuple):
    """Some points of each side, and the shapes of both clouds."""

    points: list[Tensor]
    shapes: list[Neighbourhood]
    many: bool  # whether there are points that are not looked at
    doubted: bool  # whether graphs may have short cuts, as points are few
    relaxed: bool  # whether paths may lead over points that have no partner

    @property
    def dimension(self) -> float:
        """The larger of both dimensions."""
        return max(shape.dimension for shape in self.shapes)

    @property
    def low(self) -> bool:
        """Whether points lie on curves, on surfaces or in space."""
        return self.dimension <= _FEW_DIMENSIONS

    @property
    def connected(self) -> bool:
        """Whether both graphs are in one piece."""
        return all(shape.connected for shape in self.shapes)

    def by(self, metric: Any) -> list[DistanceProvider]:
        """Measure them straight."""
        return [PointDistance(side, metric) for side in self.points]


def decide(
    points: tuple[Tensor, Tensor],
    judge: Judge,
    device: torch.device | None = None,
    *,
    relaxed: bool = False,
) -> Decision:
    """Decide how the points of both sides, (n, d) and (m, e), are measured."""
    # In a `relaxed` problem some points have no partner. Which side is first makes no difference.
    turned = _comes_second(*points)
    points = points[::-1] if turned else points
    some = [_some(side, seed) for seed, side in enumerate(points)]
    shapes = [neighbourhood(side, device or side.device) for side in some]
    fewer, most = sorted(map(len, points))
    few = _Few(some, shapes, most > CPU.looked_at, fewer <= CPU.doubted_points, relaxed)
    known = () if few.many else tuple(shapes[::-1] if turned else shapes)
    sure = few.low and few.connected and not few.doubted and not relaxed
    if sure or most <= CPU.untold_points:
        why = f"neighbour graphs of dimension {few.dimension:.1f}" if sure else "points are few"
        return Decision("geodesic", why, {}, known)
    found = _compete(few, judge, device or points[0].device)
    best = _best(found, few)
    if best == "euclidean" and few.many:
        x, y = few.by("euclidean")
        found["sqeuclidean"] = judge(x, y, found_by=few.by("sqeuclidean"))
        best = "sqeuclidean" if found["sqeuclidean"] >= found[best] - _SLACK else best
    pieces = "" if few.connected else "neighbour graphs in pieces, "
    shown = ", ".join(f"{name} {value:.2f}" for name, value in found.items())
    why = f"{pieces}dimension {few.dimension:.1f}; agreement of a few points: {shown}"
    return Decision(best, why + _passed_over(best, found), found, known)


def _compete(few: _Few, judge: Judge, device: torch.device) -> dict[str, float]:
    """Try ways to measure, until one explains nearly all; how well each agrees."""
    found: dict[str, float] = {}
    # paths between clusters depend on chance
    chance = not (few.low or few.connected)
    order = ["euclidean", "cosine", "geodesic"] if chance else ["euclidean", "geodesic", "cosine"]
    if few.low and not few.doubted and not few.relaxed:
        order = ["geodesic", "euclidean", "cosine"]
    for name in order:
        if name == "geodesic" and chance and max(found.values()) >= UNRELATED:
            continue
        sides = zip(few.points, few.shapes, strict=True)
        x, y = (_measured(*side, name, device) for side in sides)
        if x is not None and y is not None:
            found[name] = judge(x, y)
        if found.get(name, 0) >= (_ENOUGH_PATHS if name == "geodesic" else _ENOUGH):
            break
    return found


def _best(found: dict[str, float], few: _Few) -> str:
    """Choose the way that agrees best, of those to be doubted only if it does so by far."""
    best = next(iter(found))
    doubtful = ("cosine",) if few.low and not few.relaxed else ("cosine", "geodesic")
    for name, value in found.items():
        if value > found[best] and (name not in doubtful or value >= _needed(name, found)):
            best = name
    return best


def _passed_over(best: str, found: dict[str, float]) -> str:
    """Say by which rule a way that agrees better than the ``best`` was not taken."""
    for name, value in found.items():
        if best.endswith("euclidean") and name != "sqeuclidean" and value > found["euclidean"]:
            needed = _needed(name, found)
            return f" ({name} agrees better by chance: it is taken from {needed:.2f} on)"
    return ""


def _needed(name: str, found: dict[str, float]) -> float:
    """Compute from which agreement on a way is better than straight distances, not by chance."""
    angles = name == "cosine"
    share = _SHARE_LEFT if angles else _SHARE_LEFT_PATHS
    return max(1 - share * (1 - found["euclidean"]), UNRELATED if angles else 0.0)


def _comes_second(points: Tensor, other: Tensor) -> bool:
    """Whether a side has more points than the other or, of as many, is the more spread out."""
    if len(points) != len(other):
        return len(points) > len(other)
    spreads = [float(side.detach().double().var(0, correction=0).sum()) for side in (points, other)]
    return spreads[0] > spreads[1]


def _some(points: Tensor, seed: int) -> Tensor:
    """Draw the points of one side that are looked at, on the CPU."""
    if len(points) > CPU.looked_at:
        generator = torch.Generator().manual_seed(seed)
        index = distinct(len(points), CPU.looked_at, generator)
        points = points[index.sort().values.to(points.device)]
    return points.detach().cpu().double()


def _measured(
    points: Tensor, known: Neighbourhood, name: Any, device: torch.device
) -> DistanceProvider | None:
    """Measure points in one way; ``None`` where that is not possible."""
    if name == "geodesic":
        with warnings.catch_warnings():
            # the warning comes again if geodesics are chosen
            warnings.simplefilter("ignore", GraphWarning)
            graph = neighbour_geodesics(points, known=known)
        if len(points) <= CPU.doubted_points:
            # all paths at once take less time than half of them one after another
            return PrecomputedDistance.unchecked(graph.rows(np.arange(len(points))))
        if device.type == "cuda":
            return PrecomputedDistance.unchecked(graph.all_pairs(device).cpu())
        return DijkstraDistance(graph)
    # up to three coordinates are places, with an origin by chance, which angles would depend on
    if name == "cosine" and (points.shape[1] <= 3 or bool((points == 0).all(1).any())):
        return None
    return PointDistance(points, name)
