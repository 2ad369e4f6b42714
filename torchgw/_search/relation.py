"""How one match relates to another, in words: its mirror image, a turn, or something else."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from torchgw._search.alternatives import Alternative
from torchgw._search.starts import eigenpairs
from torchgw._tensors.operations import same
from torchgw.distances.base import DistanceProvider

# Coordinates in which matches are compared; a coordinate is left out if its extent, relative to the
# largest, is below this. [L374]
_AXES = 3
_EXTENT = 0.15
# Target points, up to twice as many, from whose distances coordinates are found. [L1121]
_LANDMARKS = 96
# Share of the spread that a rigid motion may leave unexplained. [L374]
_RIGID = 0.15
# A point goes elsewhere if it is apart by this share of the spread. [L374]
_ELSEWHERE = 0.5
# A turn whose cosine is at most minus this is a half turn; from plus this on it is none. [L374]
_STRAIGHT = 0.97


def related(
    found: tuple[Alternative, ...], source: DistanceProvider, target: DistanceProvider
) -> tuple[Alternative, ...]:
    """Describe how each alternative but the first relates to the first."""
    if len(found) < 2:
        return found
    # by NumPy: a GPU takes ten times as long, and many relations are between the same points
    first, told = found[0], [found[0]]
    every = max(1, len(first.target) // _LANDMARKS)
    squares = {
        id(points): _squares(target, first.target[::every], points)
        for points in {id(each.target): each.target for each in found}.values()
    }
    mean, axes = _axes(squares[id(first.target)][::every])
    mass, places = None, None
    for each in found:
        plan = each.plan.cpu().numpy()
        rows = plan.sum(1, keepdims=True)
        there = (mean - squares[id(each.target)]) / 2 @ axes
        moved = plan @ there / np.maximum(rows, np.finfo(plan.dtype).tiny)
        if places is None:
            mass, places = rows / rows.sum(), moved
            continue
        if each.source is not first.source and not same(each.source, first.source):
            moved = moved[_squares(source, each.source, first.source).argmin(1)]
        told.append(replace(each, relation=_relation(places, moved, mass)))
    return tuple(told)


def _squares(side: DistanceProvider, others: Tensor, points: Tensor) -> Any:
    """Read the squared distances of some points to others, (p, o)."""
    table = side.columns(others.to(side.device))[points.to(side.device)]
    return table.cpu().numpy().astype(np.float64) ** 2


def _axes(square: Any) -> tuple[Any, Any]:
    """Find the mean and the axes that turn squared distances to some points into coordinates."""
    mean = square.mean(0)
    gram = -(square - mean - mean[:, None] + mean.mean()) / 2
    found = eigenpairs(gram, max(0, len(gram) - _AXES), len(gram) - 1)
    sizes, vectors = (part[..., ::-1] for part in found)
    kept = (sizes > _EXTENT**2 * sizes[0]) & (sizes > 0)
    return mean, vectors[:, kept] / np.sqrt(sizes[kept])


def _relation(first: Any, other: Any, weight: Any) -> str:
    """Describe the motion that takes the places under one match to those under another."""
    first, other = first - (weight * first).sum(0), other - (weight * other).sum(0)
    spread = float((weight * other**2).sum())
    if first.shape[1] == 0 or spread == 0:
        return "another match"
    left, _, right = np.linalg.svd(first.T @ (weight * other))
    turn = left @ right
    apart = ((other - first) ** 2).sum(1)
    elsewhere = float((apart > _ELSEWHERE**2 * spread) @ weight[:, 0])
    if float((weight * (other - first @ turn) ** 2).sum()) > _RIGID * spread:
        return f"another match, which sends {elsewhere:.0%} of the points elsewhere"
    return _name_of(turn, elsewhere)


def _name_of(turn: Any, elsewhere: float) -> str:
    """Name a rigid motion of the coordinates, the longest extent first."""
    size = len(turn)
    trace, mirrored = float(turn.trace()), float(np.linalg.det(turn)) < 0
    if mirrored:
        if size == 1:
            return "the first read backwards"
        along = float(turn[0, 0]) < -_STRAIGHT and trace > size - 2 - (1 - _STRAIGHT) * size
        return "the first mirrored" + (", with its longest extent read backwards" if along else "")
    # a turn in the plane has trace 2 cos, one in space 1 + 2 cos; in one dimension there is none
    cosine = 1.0 if size == 1 else (trace - (size - 2)) / 2
    degrees = 180 if cosine < -_STRAIGHT else round(math.degrees(math.acos(min(cosine, 1))))
    moved = f"{elsewhere:.0%}"
    if cosine > _STRAIGHT and (moved != "0%" or degrees == 0):
        return "almost the first" + (
            f", with {moved} of the points elsewhere" if moved != "0%" else ""
        )
    return f"the first turned by {degrees} degrees"
