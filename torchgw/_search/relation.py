"""What one match is to another, in words: its mirror image, a turn, or something else."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from torchgw._search.optima import Alternative
from torchgw.distances.base import DistanceProvider

# Coordinates that matches are compared in, and the extent of one, relative to the largest, below
# which the target has none that way. [L374]
_AXES = 3
_EXTENT = 0.15
# Share of the spread that a rigid motion may leave unexplained. [L374]
_RIGID = 0.15
# Share of the spread by which a point has to be apart to count as going elsewhere. [L374]
_ELSEWHERE = 0.5
# Cosine of a turn up to which it is half a turn, and from which on it is none. [L374]
_STRAIGHT = 0.97


def related(
    found: tuple[Alternative, ...], source: DistanceProvider, target: DistanceProvider
) -> tuple[Alternative, ...]:
    """Say of each alternative but the first what it is to that."""
    if len(found) < 2:
        return found
    # small decompositions, for which a GPU takes milliseconds
    first, *others = (
        replace(each, source=each.source.cpu(), target=each.target.cpu(), plan=each.plan.cpu())
        for each in found
    )
    mean, axes = _axes(target, first.target)
    places, told = _places(first, target, first.target, mean, axes), []
    for other, given in zip(others, found[1:], strict=True):
        moved = _places(other, target, first.target, mean, axes)
        if not torch.equal(other.source, first.source):
            moved = moved[_squares(source, other.source, first.source).argmin(1)]
        told.append(replace(given, relation=_relation(places, moved, first.plan.sum(1))))
    return (found[0], *told)


def _squares(side: DistanceProvider, others: Tensor, points: Tensor) -> Tensor:
    """Read the squared distances of some points to others, (p, o)."""
    table = side.columns(others.to(side.device))[points.to(side.device)]
    return table.double().square().to(points.device)


def _axes(target: DistanceProvider, points: Tensor) -> tuple[Tensor, Tensor]:
    """Find what makes coordinates of squared distances to some points: their mean, and axes."""
    square = _squares(target, points, points)
    mean = square.mean(0)
    gram = -(square - mean - mean[:, None] + mean.mean()) / 2
    sizes, vectors = (part.flip(-1)[..., :_AXES] for part in torch.linalg.eigh(gram))
    kept = (sizes > _EXTENT**2 * sizes[0]) & (sizes > 0)
    return mean, vectors[:, kept] / sizes[kept].sqrt()


def _places(
    match: Alternative, target: DistanceProvider, anchors: Tensor, mean: Tensor, axes: Tensor
) -> Tensor:
    """Find where a match sends its source points, in coordinates of the target, (s, k)."""
    square = _squares(target, anchors, match.target)
    plan: Tensor = match.plan
    mass = plan.sum(1, keepdim=True).clamp_min(torch.finfo(plan.dtype).tiny)
    return plan @ ((mean - square) / 2 @ axes) / mass


def _relation(first: Tensor, other: Tensor, mass: Tensor) -> str:
    """Say in words what takes the places under one match to those under another."""
    weight = (mass / mass.sum())[:, None]
    first, other = first - (weight * first).sum(0), other - (weight * other).sum(0)
    spread = float((weight * other.square()).sum())
    if first.shape[1] == 0 or spread == 0:
        return "another match"
    left, sizes, right = torch.linalg.svd(first.T @ (weight * other))
    turn = left @ right
    apart = (other - first).square().sum(1)
    elsewhere = float((apart > _ELSEWHERE**2 * spread).double() @ weight[:, 0])
    if float((weight * (other - first @ turn).square()).sum()) > _RIGID * spread:
        return f"another match, which sends {elsewhere:.0%} of the points elsewhere"
    return _name_of(turn, elsewhere)


def _name_of(turn: Tensor, elsewhere: float) -> str:
    """Name a rigid motion of the coordinates, the longest extent first."""
    size = len(turn)
    trace, mirrored = float(turn.trace()), float(torch.linalg.det(turn)) < 0
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
