"""Tables that are read some rows at a time: files, arrays on disk, and the shards of a DTensor."""

import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._boundary.arrays import check_points, check_shape
from torchgw._errors import InvalidInputError, InvalidTypeError, UnsupportedError

# Weights that are added up at once. A choice.
_WEIGHTS = 2**20


class Rows:
    """A table (n, d) of which no more is read than is asked for.

    Attributes
    ----------
    name : str
        What messages call it.
    n, d : int
        Numbers of rows and columns.
    """

    def __init__(self, name: str, given: Any, weights_name: str = "", weights: Any = None) -> None:
        self.name, self._table = name, opened(name, given)
        if len(getattr(self._table, "shape", ())) != 2:
            raise InvalidTypeError(
                f"`{name}` must be a table (n, d) that is read by rows: an array, a memory map, an "
                "array of Zarr or HDF5, a DTensor with Shard(0), or the path of a .npy, .zarr, "
                f".parquet or .h5ad file, and dense; got {type(given).__name__}."
            )
        check_shape(name, self._table, ("n", "d"), "one row per point, with n and d at least 1")
        self.n, self.d = (int(size) for size in self._table.shape)
        self._local, self._first, self._stop = None, 0, self.n
        if hasattr(self._table, "to_local"):
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

            place = self._table.device_mesh, self._table.placements
            shape, offset = compute_local_shape_and_global_offset(self._table.shape, *place)
            self._local = self._table.to_local()
            self._first, self._stop = offset[0], offset[0] + shape[0]
        self._weights = None if weights is None else self._weighed(weights_name, weights)

    def _weighed(self, name: str, given: Any) -> "tuple[Rows, float]":
        """Open weights, and add them up, some at a time in order."""
        given = opened(name, given)
        rows = Rows(name, given if len(given.shape) == 2 else given[:, None])
        if (rows.n, rows.d) != (self.n, 1):
            raise InvalidInputError(
                f"`{name}` must have shape ({self.n},); got ({rows.n}, {rows.d})."
            )
        if rows._local is not None:
            raise UnsupportedError(f"`{name}` must be whole in each process, not a DTensor.")
        sums = list[float]()
        for some in rows.blocks(_WEIGHTS, 0, 1):
            part = rows.read(some, torch.device("cpu"))
            if float(part.min()) < 0:
                raise InvalidInputError(f"`{name}` must be non-negative.")
            sums.append(float(part.sum()))
        if (total := math.fsum(sums)) <= 0:
            raise InvalidInputError(f"`{name}` must have a positive sum.")
        return rows, total

    def shares(self, rows: slice, device: torch.device) -> Tensor:
        """Read the weights of some rows, (q,) float64, whose sum over all is one."""
        if self._weights is None:
            share = torch.full((1,), 1 / self.n, dtype=torch.float64, device=device)
            return share.expand(rows.stop - rows.start)
        weights, total = self._weights
        return weights.read(rows, device)[:, 0] / total

    def blocks(
        self, height: int, rank: int, size: int, done: Iterable[tuple[int, int]] = ()
    ) -> list[slice]:
        """List the rows that one of ``size`` processes reads, some at a time, but what is done."""
        # those of a DTensor stay where they are; others are dealt out, so that any number of
        # processes has the same blocks
        left, here = list[slice](), self._first
        for first, last in [*done, (self._stop, self._stop)]:
            end = min(first, self._stop)
            left += [slice(k, min(k + height, end)) for k in range(here, end, height)]
            here = max(here, last)
        return left if self._local is not None else left[rank::size]

    def read(self, rows: slice, device: torch.device) -> Tensor:
        """Read some rows in float64 on a device, and refuse those that are not finite."""
        if self._local is not None:
            part: Any = self._local[rows.start - self._first : rows.stop - self._first]
        else:
            part = self._table[rows.start : rows.stop]
        return self._checked(part, np.arange(rows.start, rows.stop), device)

    def at(self, index: NDArray[np.int64], rows: slice, device: torch.device) -> Tensor:
        """Read those rows of a block that an ascending index names."""
        first, last = np.searchsorted(index, [rows.start, rows.stop])
        if isinstance(self._table, np.ndarray):
            return self._checked(self._table[index[first:last]], index[first:last], device)
        return self.read(rows, device)[torch.from_numpy(index[first:last] - rows.start).to(device)]

    def _checked(self, part: Any, index: NDArray[np.int64], device: torch.device) -> Tensor:
        """Bring rows to a device as they are, look at them there, and name one that is refused."""
        if not isinstance(part, Tensor):
            part = np.array(part)
            part = torch.from_numpy(part) if part.dtype.kind == "f" else part
        part = part.to(device) if isinstance(part, Tensor) else part
        if not len(index) == len(part) or tuple(part.shape[1:]) != (self.d,):
            raise InvalidInputError(
                f"`{self.name}` has shape ({self.n}, {self.d}), and its rows "
                f"[{index[0]}:{index[-1] + 1}] have {tuple(part.shape)}."
            )
        if not len(index):
            return torch.empty(0, self.d, dtype=torch.float64, device=device)
        try:
            return check_points(self.name, part).to(device).double()
        except InvalidInputError as error:
            first = ""
            if isinstance(part, Tensor) and len(bad := (~torch.isfinite(part)).any(1).nonzero()):
                first = f" The first such row is {index[int(bad[0])]}."
            raise InvalidInputError(f"{error}{first}") from None


def opened(name: str, given: Any) -> Any:
    """Open what a path names; leave all else as it is."""
    if not isinstance(given, (str, os.PathLike)):
        return given
    # file.h5ad:obsm/NAME, as the command line has it
    named = re.fullmatch(r"(.+\.h5(?:ad)?)(?::(.+))?", os.fspath(given))
    path = Path(given if named is None else named[1])
    if not path.exists():
        raise InvalidInputError(f"`{name}`: there is no {path}.")
    if path.suffix == ".npy":
        return np.load(path, mmap_mode="r")
    if path.suffix == ".parquet":
        return _Parquet(path)
    if path.suffix == ".zarr":
        import zarr

        return zarr.open(path, mode="r")
    if named is not None:
        import h5py

        file, member = h5py.File(path), named[2] or "X"
        if member not in file:
            raise InvalidInputError(f"`{name}`: {path} has no {member}, but {', '.join(file)}.")
        return file[member]
    raise InvalidInputError(
        f"`{name}`: {path} is not read by rows; .npy, .zarr, .parquet, file.h5:NAME and "
        "file.h5ad:obsm/NAME are. Open others yourself, and pass the array."
    )


class _Parquet:
    """The columns of a Parquet file, read by its groups of rows."""

    def __init__(self, path: Path) -> None:
        from pyarrow import parquet

        self._file = parquet.ParquetFile(path)
        data = self._file.metadata
        self.shape = data.num_rows, data.num_columns
        counts = [data.row_group(group).num_rows for group in range(data.num_row_groups)]
        self._ends = np.cumsum(counts)

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        return np.concatenate(list(self._groups(rows)))

    def _groups(self, rows: slice) -> Iterator[NDArray[Any]]:
        first = int(np.searchsorted(self._ends, rows.start, side="right"))
        last = int(np.searchsorted(self._ends, rows.stop))
        for group in range(first, last + 1):
            table = self._file.read_row_group(group)
            begin = int(self._ends[group]) - table.num_rows
            part = np.stack([column.to_numpy() for column in table.columns], axis=1)
            yield part[max(rows.start - begin, 0) : rows.stop - begin]
