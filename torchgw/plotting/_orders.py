"""Orders in which a plan is a band along the diagonal, for drawings."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from torchgw._boundary.arrays import to_numpy
from torchgw._errors import InvalidInputError
from torchgw.distances.base import DistanceProvider

__all__ = ["plan_orders"]

# Points whose distances give the first coordinate of a side.
_SCALING_POINTS = 200


def plan_orders(result: Any, order: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the order of rows and columns that shows a consistent match as a diagonal band."""
    n, m = result.lazy_plan.shape
    if isinstance(order, str) and order == "index":
        return np.arange(n), np.arange(m)
    if isinstance(order, str):
        if order != "structure":
            raise InvalidInputError(
                f"`order` must be 'structure', 'index' or an array of shape ({n},); got {order!r}."
            )
        extension = getattr(result, "extension", None)
        provider = None if extension is None else extension.known.providers[0]
        # without distances to sort by, the order that the points came in is as good as any
        keys = np.arange(n) if provider is None else _extent(provider)
    else:
        keys = np.unique(to_numpy(order), return_inverse=True)[1]
        if keys.shape != (n,):
            raise InvalidInputError(f"`order` must have shape ({n},); got {keys.shape}.")
    by_row = np.argsort(keys, kind="stable")
    rank = np.empty(n)
    rank[by_row] = np.arange(n)
    mean = result.lazy_plan.T @ np.column_stack([rank, np.ones(n)])
    weight = to_numpy(mean)[:, 1]
    centre = np.divide(to_numpy(mean)[:, 0], weight, out=np.zeros(m), where=weight > 0)
    return by_row, np.argsort(centre, kind="stable")


def _extent(distances: DistanceProvider) -> NDArray[np.float64]:
    """Return the first coordinate of classical scaling, from distances to some points."""
    count = min(distances.n, _SCALING_POINTS)
    some = torch.linspace(0, distances.n - 1, count, device=distances.device).round().long()
    square = distances.columns(some).double().square()
    square = square - square.mean(dim=0)
    square = square - square.mean(dim=1, keepdim=True)
    coordinates = torch.linalg.svd(square, full_matrices=False)[0]
    return to_numpy(coordinates[:, 0])
