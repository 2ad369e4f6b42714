"""What is drawn, checked, and axes to draw it in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from torchgw._boundary.arrays import as_labels, to_numpy, to_tensor
from torchgw._errors import InvalidInputError, InvalidTypeError
from torchgw._variants.solve_low_rank import LowRankResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["as_scale", "check_result", "columns_of", "new_axes", "new_pair", "projection_of"]


def check_result(result: Any, part: str = "lazy_plan") -> None:
    """Refuse what has no plan of an alignment; a plan of low rank has groups, not partners."""
    known = hasattr(result, part) and (part != "lazy_plan" or hasattr(result.lazy_plan, "argmax"))
    if not known or isinstance(result, LowRankResult):
        raise InvalidTypeError(
            f"`result` must be a GWResult, as torchgw.solve returns; got {type(result).__name__}."
        )


def as_scale(colour: Any) -> Any:
    """Return numbers as they are, and labels as their places in sorted order."""
    if np.ndim(colour) != 1 or to_numpy(colour).dtype.kind not in "OUS":
        return colour
    return np.unique(as_labels("colour", colour), return_inverse=True)[1]


def columns_of(points: Any, name: str = "points", count: int | None = None) -> list[NDArray[Any]]:
    """Return the two or three coordinates to draw."""
    array = to_tensor(name, points).cpu().numpy()
    if not (array.ndim in (1, 2) and array.size and count in (None, len(array))):
        raise InvalidInputError(
            f"`{name}` must have shape ({'n' if count is None else count}, d), one row per point; "
            f"got {array.shape}."
        )
    array = array.reshape(len(array), -1)
    if array.shape[1] == 1:
        array = np.column_stack([np.arange(len(array)), array])
    return list(array[:, :3].T)


def projection_of(dimensions: int) -> str | None:
    """Return matplotlib's name of the projection."""
    return "3d" if dimensions == 3 else None


def new_axes(dimensions: int) -> Axes:
    """Make axes in a new figure."""
    from matplotlib import pyplot

    axes: Axes = pyplot.figure().add_subplot(projection=projection_of(dimensions))
    return axes


def new_pair(source: int, target: int) -> tuple[Axes, Axes]:
    """Make the axes of two clouds in a new figure."""
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(9.0, 4.2), layout="constrained")
    return (
        figure.add_subplot(1, 2, 1, projection=projection_of(source)),
        figure.add_subplot(1, 2, 2, projection=projection_of(target)),
    )
