"""Distances that a function given by the user computes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from torchgw._boundary.arrays import resolve_device, to_tensor
from torchgw._boundary.checks import check_count
from torchgw._errors import InvalidInputError, InvalidTypeError
from torchgw.distances.base import DistanceProvider


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
        found = self.function(index.to(self._index_device))
        block = found if isinstance(found, Tensor) else to_tensor("function", found)
        expected = (self.n, index.shape[0])
        if tuple(block.shape) != expected:
            raise InvalidInputError(
                f"`function` must return columns of shape (n, s) = {expected}; got "
                f"{tuple(block.shape)}. Return D[:, index], one column per index."
            )
        block = block.to(self.device, self.dtype)
        if not bool(block.isfinite().all()):
            raise InvalidInputError(
                "`function` must return finite distances; got NaN or infinity. Replace unreachable "
                "pairs by a large finite distance, such as 1.5 times the largest one."
            )
        return block

    def to(self, device: torch.device, dtype: torch.dtype) -> CallableDistance:
        """Convert what the function returns; its index stays on the device that it had."""
        if self._lies_at(device, dtype):
            return self
        moved = copy.copy(self)
        moved.device, moved.dtype = resolve_device(device), dtype
        return moved
