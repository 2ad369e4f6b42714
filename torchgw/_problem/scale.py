"""The unit of distances: their maximum or mean, which they are divided by."""

import math
from typing import Literal

import torch
from torch import Tensor

from torchgw.distances.base import DistanceProvider
from torchgw.distances.points import ANGLES, PointDistance

ScaleName = Literal["auto", "max", "mean"]
# Columns read at once to find the largest distance among some points. [L351]
_COLUMNS = 256
# Distances up to this share of the largest are rounding. [L351]
_NOTHING = 1e-9


def scaled(
    provider: DistanceProvider,
    points: Tensor | None,
    scale: ScaleName | None,
    weights: Tensor | None,
    *,
    computed: bool,
) -> tuple[DistanceProvider, float]:
    """Divide distances by their maximum or mean; also return what they were multiplied by."""
    if weights is not None and isinstance(provider, PointDistance):
        provider = provider.centred_on(weights)
    if scale is None or (scale == "auto" and not computed):
        return provider, 1.0
    size = _size(provider, points, scale, weights)
    if size == 0:
        # A single point, or identical points: nothing to scale.
        return provider, 1.0
    if isinstance(provider, PointDistance) and points is not None and provider.metric not in ANGLES:
        # Squares of large coordinates would overflow in float32 before a factor is applied.
        unit = size if provider.metric == "euclidean" else math.sqrt(size)
        made = PointDistance((points / unit).to(provider.device), provider.metric)
        return made if weights is None else made.centred_on(weights), 1 / size
    return provider.scaled(1 / size), 1 / size


def _size(
    provider: DistanceProvider, points: Tensor | None, scale: ScaleName, weights: Tensor | None
) -> float:
    """Compute the mean or the maximum of the distances among points of positive weight."""
    used = torch.ones(provider.n, dtype=torch.bool, device=provider.device)
    if weights is not None:
        used = weights > 0
    if scale == "mean":
        mean = provider.mean(used.to(provider.dtype) / used.sum())
        if isinstance(provider, PointDistance):
            # the distances of identical points are rounding of the factors, as often below zero as
            # above
            return max(0.0, min(mean, provider.maximum()))
        return mean
    largest = provider.maximum()
    if weights is None or bool(used.all()):
        return largest
    # a distance of zero, of which factors leave rounding, is no unit
    among = _maximum(provider, points, used)
    return among if among > _NOTHING * largest else largest


def _maximum(provider: DistanceProvider, points: Tensor | None, used: Tensor) -> float:
    """Find the largest distance among the points that are used, if not all are."""
    if isinstance(provider, PointDistance) and points is not None:
        return PointDistance(points[used.to(points.device)], provider.metric).maximum()
    index = used.nonzero()[:, 0]
    return max(float(provider.columns(block)[index].max()) for block in index.split(_COLUMNS))
