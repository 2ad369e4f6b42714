"""Live bytes of tensors, on any device: what the allocator of a GPU tells, for a CPU too."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class StorageMeter(TorchDispatchMode):
    """Counts the storages of tensors that operations make, until they are let go.

    Tensors from before do not count, nor do arrays of NumPy and what an operation uses inside.
    Operations of other threads are not seen.

    Parameters
    ----------
    size : int, optional
        Tensors count that have a dimension of this size: those of that many points, no others.

    Attributes
    ----------
    now, peak : int
        Bytes that live now, and the most so far.
    """

    def __init__(self, size: int | None = None) -> None:
        super().__init__()
        self._size = size
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count what it has made."""
        result = func(*args, **(kwargs or {}))
        for one in tree_iter(result):
            if isinstance(one, torch.Tensor) and one.layout is torch.strided:
                storage = one.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self._known and self._size in (None, *one.shape):
                    self._known.add(key)
                    weakref.finalize(storage, self._let_go, key, size)
                    self.now += size
                    self.peak = max(self.peak, self.now)
        return result

    def _let_go(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
