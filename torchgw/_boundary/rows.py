"""Tables that are read some rows at a time: files, arrays on disk, and the shards of a DTensor."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._boundary.arrays import check_points
from torchgw._errors import InvalidInputError, InvalidTypeError


class Rows:
    """A table (n, d) of which no more is read than is asked for.

    Attributes
    ----------
    name : str
        What messages call it.
    n, d : int
        Numbers of rows and columns.
    """

    def __init__(self, name: str, given: Any) -> None:
        self.name, self._table = name, opened(name, given)
        if len(getattr(self._table, "shape", ())) != 2:
            raise InvalidTypeError(
                f"`{name}` must be a table (n, d) that is read by rows: an array, a memory map, an "
                "array of Zarr or HDF5, a DTensor with Shard(0), or the path of a .npy, .zarr or "
                f".parquet file; got {type(given).__name__}."
            )
        self.n, self.d = (int(size) for size in self._table.shape)
        self._local, self._first, self._stop = None, 0, self.n
        if hasattr(self._table, "to_local"):
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

            place = self._table.device_mesh, self._table.placements
            shape, offset = compute_local_shape_and_global_offset(self._table.shape, *place)
            self._local = self._table.to_local()
            self._first, self._stop = offset[0], offset[0] + shape[0]

    def blocks(
        self, height: int, rank: int, size: int, done: Callable[[slice], bool] = lambda rows: False
    ) -> list[slice]:
        """List the rows that one of ``size`` processes reads, some at a time, but what is done."""
        # those of a DTensor stay where they are; others are dealt out, so that any number of
        # processes has the same blocks
        starts = range(self._first, self._stop, height)
        every = [slice(start, min(start + height, self._stop)) for start in starts]
        left = [rows for rows in every if not done(rows)]
        return left if self._local is not None else left[rank::size]

    def read(self, rows: slice) -> Tensor:
        """Read some rows in float64, and refuse those that are not finite."""
        if self._local is not None:
            part: Any = self._local[rows.start - self._first : rows.stop - self._first]
        else:
            part = self._table[rows.start : rows.stop]
        part = part if isinstance(part, Tensor) else np.asarray(part)
        return check_points(f"{self.name}[{rows.start}:{rows.stop}]", part).double()

    def at(self, index: NDArray[np.int64], rows: slice) -> Tensor:
        """Read those rows of a block that an ascending index names."""
        first, last = np.searchsorted(index, [rows.start, rows.stop])
        return self.read(rows)[torch.from_numpy(index[first:last] - rows.start)]


def opened(name: str, given: Any) -> Any:
    """Open what a path names; leave all else as it is."""
    if not isinstance(given, (str, os.PathLike)):
        return given
    path = Path(given)
    if not path.exists():
        raise InvalidInputError(f"`{name}`: there is no {path}.")
    if path.suffix == ".npy":
        return np.load(path, mmap_mode="r")
    if path.suffix == ".parquet":
        return _Parquet(path)
    if path.suffix == ".zarr":
        import zarr

        return zarr.open(path, mode="r")
    raise InvalidInputError(
        f"`{name}`: {path} is not read by rows; .npy, .zarr and .parquet files are. Open others "
        "yourself, and pass the array: that of a backed AnnData, or a data set of h5py."
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
