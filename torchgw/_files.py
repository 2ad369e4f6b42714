"""Reading arrays from files, for the command line. Nothing is ever unpickled."""

from __future__ import annotations

import csv
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchgw._errors import InvalidInputError

__all__ = ["read_array", "read_weights"]

_FORMS = "`.npy`, `.npz`, `file.npz:array`, `.csv` or `.tsv`"
_DELIMITERS = {".csv": ",", ".tsv": "\t"}


def read_array(name: str) -> NDArray[Any]:
    """Read a numeric array.

    Parameters
    ----------
    name : str
        A ``.npy``, ``.csv`` or ``.tsv`` file, or a ``.npz`` file, of which ``file.npz:array`` picks
        one array. Tables may begin with a line of column names.

    Returns
    -------
    ndarray
        The array; integers and booleans as float64, tables of shape (rows, columns).

    Raises
    ------
    InvalidInputError
        The file does not exist, is not of these forms, or holds something else than numbers.
    """
    path, member = _split(name)
    suffix = path.suffix.lower()
    if suffix not in {".npy", ".npz", *_DELIMITERS}:
        raise InvalidInputError(f"{name}: unknown kind of file; expected {_FORMS}.")
    if not path.is_file():
        raise InvalidInputError(f"{name}: there is no such file.")
    if suffix in _DELIMITERS:
        return _read_table(path, _DELIMITERS[suffix])
    return _numeric(_read_numpy(path, member), name)


def read_weights(name: str) -> NDArray[Any]:
    """Read one weight per point, in any unit, and divide by the total.

    Parameters
    ----------
    name : str
        As for `read_array`: an array of one dimension, or a table of one row or column.

    Returns
    -------
    ndarray, shape (n,)
        Weights of sum 1.

    Raises
    ------
    InvalidInputError
        The array has another shape, or its total is not positive and finite.
    """
    array = read_array(name)
    if max(array.shape, default=1) != array.size:
        raise InvalidInputError(
            f"{name}: weights must be one number per point; got an array of shape {array.shape}."
        )
    weights = array.reshape(-1).astype(np.float64)
    total = weights.sum()
    if not (0.0 < total < np.inf):
        raise InvalidInputError(f"{name}: weights must have a positive, finite total; got {total}.")
    return np.asarray(weights / total)


def _split(name: str) -> tuple[Path, str | None]:
    """Separate ``file.npz:array``; other colons belong to the path."""
    file, colon, member = name.rpartition(":")
    if colon and file.lower().endswith(".npz"):
        return Path(file), member
    return Path(name), None


def _read_numpy(path: Path, member: str | None) -> NDArray[Any]:
    """Read a .npy file, or one array of a .npz file."""
    try:
        # Opened here, because np.load leaves a damaged archive open.
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.lib.npyio.NpzFile):
                return np.asarray(loaded[_member(path, loaded.files, member)])
            return np.asarray(loaded)
    except InvalidInputError:
        raise
    except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise InvalidInputError(
            f"{path}: not a readable file of numbers. It is damaged, or it holds Python objects, "
            "which torchgw never unpickles: save it again as a numeric array."
        ) from error


def _member(path: Path, members: list[str], wanted: str | None) -> str:
    """Choose the array of a .npz file."""
    listing = ", ".join(members) or "none"
    if wanted is not None and wanted not in members:
        raise InvalidInputError(f"{path}: no array named {wanted!r}; the file has: {listing}.")
    if wanted is None and len(members) != 1:
        raise InvalidInputError(
            f"{path}: holds {len(members)} arrays, name one as {path}:ARRAY; the file has: "
            f"{listing}."
        )
    return members[0] if wanted is None else wanted


def _read_table(path: Path, delimiter: str) -> NDArray[Any]:
    """Read numbers in columns, after an optional line of column names."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path}: not a text file in UTF-8.") from error
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if lines:
        fields = next(csv.reader(lines[:1], delimiter=delimiter))
        if not fields[0].strip() and len(fields) > 1:
            raise InvalidInputError(
                f"{path}: the first column has no name, so it looks like a row index and not like "
                "data; save the table without it (pandas: `index=False`)."
            )
        lines = lines[0 if all(map(_is_number, fields)) else 1 :]
    if not lines:
        raise InvalidInputError(f"{path}: has no rows of numbers.")
    try:
        return np.loadtxt(lines, delimiter=delimiter, ndmin=2, quotechar='"', comments=None)
    except ValueError as error:
        raise InvalidInputError(
            f"{path}: {error} (data rows are counted from 0, without the header). Expected a "
            "number in every cell, and the same number of cells in every row."
        ) from error


def _is_number(field: str) -> bool:
    """Whether a cell is a number."""
    try:
        float(field)
    except ValueError:
        return False
    return True


def _numeric(array: NDArray[Any], name: str) -> NDArray[Any]:
    """Refuse what is not a number; integers become floating point."""
    if array.dtype.kind not in "biuf":
        raise InvalidInputError(
            f"{name}: expected an array of real numbers, got dtype {array.dtype}."
        )
    return array if array.dtype.kind == "f" else array.astype(np.float64)
