"""Distances that a function given by the user computes, of indices or of blocks of points."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchgw._boundary.arrays import check_finite, check_tensor, resolve_device, to_tensor
from torchgw._boundary.checks import check_count
from torchgw._errors import InvalidInputError, InvalidTypeError
from torchgw.distances.base import BLOCK_ENTRIES, DistanceProvider

# From two blocks of points, (q, ...) and (s, ...), to their distances, (q, s).
Between = Callable[[Tensor, Tensor], "Tensor | np.ndarray[Any, Any]"]


class CallableDistance(DistanceProvider):
    """Distances that a function returns on demand.

    Parameters
    ----------
    n : int
        Number of points.
    function : callable
        ``function(index)`` takes an int64 tensor of shape (s,), on ``device``, and returns the
        columns D[:, index], shape (n, s), as a tensor or an array. D must be symmetric.
    device : torch.device or str, optional
        Device of the index that the function gets and of the columns that the provider returns.
        After :meth:`to` the function still gets its index on this device.
    dtype : torch.dtype, optional
        Dtype of the columns.
    cheap_columns : bool, optional
        ``False`` when a column is too costly for the solver to ask for all n of them.
    """

    def __init__(
        self,
        n: int,
        function: Callable[[Tensor], Tensor | np.ndarray],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        cheap_columns: bool = True,
    ) -> None:
        if not callable(function):
            raise InvalidTypeError(
                f"`function` must be callable, index -> (n, s) columns; got "
                f"{type(function).__name__}. Pass a matrix to PrecomputedDistance instead."
            )
        check_count("n", n)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise InvalidTypeError(f"`dtype` must be a floating dtype of PyTorch; got {dtype!r}.")
        self.n = int(n)
        self.function = function
        self.device = resolve_device(device)
        self.dtype, self.cheap_columns = dtype, cheap_columns
        self._index_device = self.device

    def columns(self, index: Tensor) -> Tensor:
        """Call the function, and check what it returns.

        Raises
        ------
        InvalidInputError
            If the columns do not have shape (n, s), or are not finite.
        """
        block = _shaped(
            self.function(index.to(self._index_device)), "columns of shape (n, s)",
            (self.n, len(index)), "D[:, index], one column per index",
        ).to(self.device, self.dtype)  # fmt: skip
        if not bool(block.isfinite().all()):
            raise InvalidInputError(
                "`function` must return finite distances; got NaN or infinity. Replace unreachable "
                "pairs by a large finite distance, such as 1.5 times the largest one."
            )
        return block

    def to(self, device: torch.device, dtype: torch.dtype) -> "CallableDistance":
        """Convert what the function returns; its index stays on the device that it had."""
        return self if self._lies_at(device, dtype) else self._moved(device, dtype)


class ManifoldDistance(DistanceProvider):
    """Distances of points on a manifold, by any function of two blocks of points.

    The function is called for blocks of rows, so that even one that subtracts all pairs of points,
    q x s x d numbers, needs little memory. Nothing of size n x n x d is ever made.

    Parameters
    ----------
    points : Tensor, shape (n, ...), float32/64
        Points, one in each row; those of a manifold of matrices are matrices.
    function : callable, or a manifold of geoopt or geomstats
        ``function(x, y)`` takes points of shapes (q, ...) and (s, ...) and returns their distances,
        (q, s), as a tensor or an array. D must be symmetric. Of an object its method ``dist``, or
        that of its ``metric``, is called with q s pairs of points. Points are on the device of
        ``points``, in their dtype, and NumPy arrays for geomstats unless its backend is PyTorch.
    dtype : torch.dtype, optional
        Dtype of the distances; by default that of the points. The function gets points in the dtype
        that they have, also after :meth:`to`: pass float64 points where a formula needs it.

    Raises
    ------
    InvalidTypeError, InvalidInputError
        If the points are no finite tensor of float32 or float64, or the function cannot be called.

    Examples
    --------
    >>> import torch
    >>> from torchgw.distances import ManifoldDistance
    >>> points = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    >>> distance = ManifoldDistance(points, lambda x, y: (x[:, None] - y).abs().sum(2))
    >>> distance.columns(torch.tensor([0])).flatten().tolist()
    [0.0, 7.0]
    """

    def __init__(
        self, points: Tensor, function: Between | Any, *, dtype: torch.dtype | None = None
    ) -> None:
        check_tensor("points", points)
        if points.ndim < 2 or points.numel() == 0:
            raise InvalidInputError(
                f"`points` must have shape (n, ...), one row per point; got {tuple(points.shape)}."
            )
        check_finite("points", points, "Drop or impute those rows.")
        self._function = _as_function(function)
        self._points = points.detach()
        self.n, self.device, self.dtype = len(points), points.device, dtype or points.dtype

    def columns(self, index: Tensor) -> Tensor:
        """Call the function on blocks of rows, and check what it returns.

        Raises
        ------
        InvalidInputError
            If the distances do not have shape (q, s), are not finite, or are negative.
        """
        chosen = self._points[index.to(self._points.device)]
        height = max(1, BLOCK_ENTRIES // max(1, chosen.numel()))
        return torch.cat([self._between(rows, chosen) for rows in self._points.split(height)])

    def _between(self, rows: Tensor, chosen: Tensor) -> Tensor:
        # copies, as the function may write into its arguments, and a file may be mapped read-only
        block = _shaped(
            self._function(rows.clone(), chosen.clone()), "distances of shape (q, s)",
            (len(rows), len(chosen)), "the distances of all pairs of two blocks of points",
        ).detach().to(self.device, self.dtype)  # fmt: skip
        check_finite("function", block, "A formula such as arcosh(1 + x) needs x clamped at 0.")
        if block.numel() and float(block.min()) < 0:
            raise InvalidInputError(
                f"`function` must return non-negative distances; got {float(block.min()):.3g}."
            )
        return block

    def to(self, device: torch.device, dtype: torch.dtype) -> "ManifoldDistance":
        """Move the points to another device; ``dtype`` is that of the distances."""
        if self._lies_at(device, dtype):
            return self
        return self._moved(device, dtype, _points=self._points.to(device))


def _shaped(found: Any, what: str, expected: tuple[int, int], wanted: str) -> Tensor:
    """Convert what a function returned to a tensor; refuse one of another shape."""
    block = found if isinstance(found, Tensor) else to_tensor("function", found)
    if tuple(block.shape) != expected:
        raise InvalidInputError(
            f"`function` must return {what} = {expected}; got {tuple(block.shape)}. "
            f"Return {wanted}."
        )
    return block


def _as_function(function: Any) -> Between:
    """Find the function of two blocks in a function, or in a manifold."""
    for manifold in (function, getattr(function, "metric", None)):
        if callable(getattr(manifold, "dist", None)):
            return _of_pairs(manifold)
    if not callable(function):
        raise InvalidTypeError(
            "`function` must be callable, (q, ...) and (s, ...) points -> (q, s) distances, or "
            f"have a method `dist`; got {type(function).__name__}."
        )
    return function


def _of_pairs(manifold: Any) -> Between:
    """Call the method ``dist`` of a manifold with all pairs of two blocks."""
    foreign = type(manifold).__module__.partition(".")[0] == "geomstats"

    def between(x: Tensor, y: Tensor) -> Tensor:
        pairs = x.repeat_interleave(len(y), 0), y.repeat(len(x), *(1 for _ in y.shape[1:]))
        if not foreign:
            return torch.as_tensor(manifold.dist(*pairs), device=x.device).reshape(len(x), len(y))
        import geomstats.backend as gs

        found = manifold.dist(*(gs.from_numpy(part.cpu().numpy()) for part in pairs))
        return torch.from_numpy(gs.to_numpy(found)).reshape(len(x), len(y))

    return between
