"""Arrays from files and into files, for the command line. Nothing is ever unpickled."""

from __future__ import annotations

import csv
import gzip
import zlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchgw._boundary.archive import UNREADABLE, check_writable, written_whole
from torchgw._errors import InvalidInputError

__all__ = ["check_output", "read_array", "read_labels", "read_weights", "write_array"]

_FORMS = (
    "`.npy`, `.npz`, `file.npz:array`, `.csv`, `.tsv`, `.csv.gz`, `.tsv.gz`, `.parquet`, "
    "`file.h5ad:X` or `file.h5ad:obsm/NAME`"
)
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_COMPRESSED = ".gz"
# Forms that hold several arrays, one of which is named after a colon.
_WITH_MEMBERS = (".npz", ".h5ad", ".parquet")


def read_array(name: str) -> NDArray[Any]:
    """Read numbers from a file, integers and booleans as float64, tables as (rows, columns)."""
    path, member = _split(name)
    suffix = _form(path)
    if suffix not in {".npy", *_WITH_MEMBERS, *_DELIMITERS}:
        raise InvalidInputError(f"{name}: unknown kind of file; expected {_FORMS}.")
    _check_there(path)
    if suffix in _DELIMITERS:
        return _read_table(path, _DELIMITERS[suffix])
    if suffix == ".parquet":
        return _numeric(_read_parquet(path, member), name)
    if suffix == ".h5ad":
        return _numeric(_read_h5ad(path, member), name)
    return _numeric(_read_numpy(path, member), name)


def read_labels(name: str) -> NDArray[Any]:
    """Read one label per point, (n,), numbers or words; words are lines of a ``.txt`` file."""
    path, member = _split(name)
    suffix = path.suffix.lower()
    _check_there(path)
    if suffix == ".txt":
        labels = np.array(_read_text(path).split("\n"))
        labels = labels[:-1] if labels[-1] == "" else labels
    elif suffix in (".h5ad", ".parquet"):
        read = _read_h5ad if suffix == ".h5ad" else _read_parquet
        labels = np.asarray(read(path, member))
        labels = labels.astype(str) if labels.dtype.kind == "O" else labels
    elif suffix in (".npy", ".npz"):
        labels = _read_numpy(path, member)
    else:
        try:
            labels = read_array(name)
        except InvalidInputError as error:
            raise InvalidInputError(
                f"{error} Labels that are words go into a `.txt` file, one per line."
            ) from error
    if labels.size == 0 or max(labels.shape) != labels.size:
        raise InvalidInputError(
            f"{name}: labels must be one per point; got an array of shape {labels.shape}."
        )
    return labels.reshape(-1)


def _check_there(path: Path) -> None:
    """Refuse a file that does not exist."""
    if not path.is_file():
        raise InvalidInputError(f"{path}: there is no such file.")


def _form(path: Path) -> str:
    """Find the suffix that says what a file holds: of ``.csv.gz`` it is that of the table."""
    inner = Path(path.stem).suffix.lower()
    packed = path.suffix.lower() == _COMPRESSED and inner in _DELIMITERS
    return inner if packed else path.suffix.lower()


def _read_text(path: Path) -> str:
    """Read a text file, compressed or not."""
    try:
        if path.suffix.lower() == _COMPRESSED:
            with gzip.open(path, "rt", encoding="utf-8-sig") as file:
                return file.read()
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path}: not a text file in UTF-8.") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InvalidInputError(f"{path}: not a readable gzip file: {error}") from error


def check_output(path: Path, forms: tuple[str, ...], *inputs: str | None) -> None:
    """Refuse an output that cannot be written, is an input, or has the name of another form."""
    check_writable(path)
    others = {".npy", ".txt", _COMPRESSED, *_WITH_MEMBERS, *_DELIMITERS} - set(forms)
    if path.suffix.lower() in others:
        raise InvalidInputError(f"cannot write {path}: what is written is {' or '.join(forms)}.")
    for name in inputs:
        if name is not None and path.exists() and _split(name)[0].resolve() == path.resolve():
            raise InvalidInputError(f"cannot write {path}: it is the input {name}.")


def write_array(path: Path, array: NDArray[Any]) -> None:
    """Write a table as text if it is named ``.csv`` or ``.tsv``, otherwise as ``.npy``."""
    delimiter = _DELIMITERS.get(path.suffix.lower())
    with written_whole(path) as file:
        if delimiter is None:
            np.save(file, array)
        else:
            # every digit that float64 has
            np.savetxt(file, array, fmt="%.17g", delimiter=delimiter)


def _read_parquet(path: Path, member: str | None) -> NDArray[Any]:
    """Read a table or one column of it."""
    if find_spec("pandas") is None or find_spec("pyarrow") is None:
        raise InvalidInputError(
            f"{path}: parquet files need pandas and pyarrow: pip install pandas pyarrow"
        )
    import pandas
    from pyarrow.lib import ArrowException

    try:
        table = pandas.read_parquet(path)
    except (ArrowException, OSError) as error:
        raise InvalidInputError(f"{path}: not a readable parquet file: {error}") from error
    if member is None:
        return np.asarray(table)
    if member not in table.columns:
        columns = ", ".join(map(str, table.columns))
        raise InvalidInputError(f"{path}: no column named {member!r}; the file has: {columns}.")
    return np.asarray(table[member])


def _read_h5ad(path: Path, member: str | None) -> NDArray[Any]:
    """Read X, or an entry of obsm, or a column of obs."""
    if find_spec("anndata") is None:
        raise InvalidInputError(f"{path}: h5ad files need anndata: pip install anndata")
    import anndata

    try:
        data = anndata.read_h5ad(path)
    except (OSError, KeyError, ValueError) as error:
        raise InvalidInputError(f"{path}: not a readable h5ad file: {error}") from error
    members = {f"{slot}/{key}": table[key] for slot in ("obsm", "obs")
               for table in [getattr(data, slot)] for key in table}  # fmt: skip
    if data.X is not None:
        members["X"] = data.X
    member = _member(path, list(members), member)
    value = members[member]
    if hasattr(value, "toarray"):
        raise InvalidInputError(
            f"{path}: {member} is sparse; reduce it first (scanpy.pp.pca) and name obsm/X_pca."
        )
    return np.asarray(value)


def read_weights(name: str) -> NDArray[Any]:
    """Read one weight per point, (n,), in any unit, and divide by their sum."""
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
    """Split ``file.npz:array`` into its parts; other colons belong to the path."""
    file, colon, member = name.rpartition(":")
    if colon and file.lower().endswith(_WITH_MEMBERS):
        return Path(file), member
    return Path(name), None


def _read_numpy(path: Path, member: str | None) -> NDArray[Any]:
    """Read a .npy file, or one array of a .npz file."""
    try:
        # opened here, because np.load leaves a damaged archive open
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.lib.npyio.NpzFile):
                return np.asarray(loaded[_member(path, loaded.files, member)])
            return np.asarray(loaded)
    except InvalidInputError:
        raise
    except UNREADABLE as error:
        raise InvalidInputError(
            f"{path}: not a readable file of numbers. It is damaged, or it holds Python objects, "
            "which torchgw never unpickles: save it again as a numeric array."
        ) from error


def _member(path: Path, members: list[str], wanted: str | None) -> str:
    """Choose one of several arrays by its name, or the only one."""
    listing = ", ".join(members) or "none"
    if wanted is not None and wanted not in members:
        raise InvalidInputError(f"{path}: no array named {wanted!r}; the file has: {listing}.")
    if wanted is None and {"indptr", "indices", "shape"} <= set(members):
        raise InvalidInputError(
            f"{path}: holds a SciPy sparse matrix. Align graphs in Python: "
            f"torchgw.solve(scipy.sparse.load_npz({str(path)!r}), ...)."
        )
    if wanted is None and len(members) != 1:
        raise InvalidInputError(
            f"{path}: holds {len(members)} arrays, name one as {path}:ARRAY; the file has: "
            f"{listing}."
        )
    return members[0] if wanted is None else wanted


def _read_table(path: Path, delimiter: str) -> NDArray[Any]:
    """Read numbers in columns, after an optional line of column names."""
    text = _read_text(path)
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
        raise InvalidInputError(f"{path}: {_what_is_wrong(lines, delimiter)}") from error


def _what_is_wrong(lines: list[str], delimiter: str) -> str:
    """Name the cell that is no number, or the row that is shorter or longer than the others."""
    counted = "(rows are counted from 1, without the header)"
    width = None
    for row, fields in enumerate(csv.reader(lines, delimiter=delimiter), start=1):
        for column, field in enumerate(fields, start=1):
            if _is_number(field):
                continue
            if any(mark in field for mark in (";\t " if len(fields) == 1 else ";\t")):
                return (
                    "columns must be separated by commas in a .csv file and by tabs in a .tsv "
                    f"file; row {row} is {delimiter.join(fields)[:60]!r}."
                )
            return (
                f"row {row}, column {column} is {field[:40]!r}, and every cell must be a number "
                f"{counted}."
            )
        if width is not None and len(fields) != width:
            return f"row {row} has {len(fields)} columns, and those before it {width} {counted}."
        width = len(fields)
    return "this is not a table of numbers."


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
