"""Arrays from files and into files, for the command line. Nothing is ever unpickled."""

import csv
import gzip
import io
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchgw._boundary.archive import UNREADABLE, check_writable, written_whole
from torchgw._boundary.arrays import ends_among
from torchgw._errors import InvalidInputError
from torchgw.cli._networks import LENGTH, NETWORKS, from_edges, read_network, read_sparse

_FORMS = (
    "`.npy`, `.npz`, `file.npz:array`, `.csv`, `.tsv`, `.csv.gz`, `.tsv.gz`, `.parquet`, "
    "`file.csv:COLUMN,COLUMN`, `file.h5ad:X` or `file.h5ad:obsm/NAME`; a surface: `.off`, `.obj`, "
    "`.ply` or `.stl`; a network: `.graphml`, `.gml`, `.mtx`, `.edgelist` or `.edges`"
)
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_COMPRESSED = ".gz"
_SURFACES = (".off", ".obj", ".ply", ".stl")
# Forms that hold several arrays, one of which is named after a colon.
_WITH_MEMBERS = (".npz", ".h5ad", ".parquet", ".csv", ".tsv", ".csv.gz", ".tsv.gz")


class Side(NamedTuple):
    """The points of a side, or a network, and what its file says of each."""

    points: NDArray[Any] | None  # (n, d)
    ids: NDArray[Any] | None = None  # (n,), words
    labels: NDArray[Any] | None = None  # (n,), words
    faces: NDArray[Any] | None = None  # (k, 3), triangles between the points of a surface
    graph: Any = None  # of NetworkX

    @property
    def space(self) -> Any:
        """What `torchgw.solve` takes: the points, a surface or a graph."""
        if self.points is None:
            return self.graph
        return self.points if self.faces is None else (self.points, self.faces)

    @property
    def kind(self) -> str:
        """What the side is, in a word."""
        return "network" if self.points is None else "table" if self.faces is None else "surface"


def read_array(
    name: str, id_column: str | None = None, label_column: str | None = None
) -> NDArray[Any]:
    """Read numbers from a file, integers and booleans as float64, tables as (rows, columns)."""
    side = read_side(name, id_column, label_column)
    if side.points is None or side.faces is not None:
        raise InvalidInputError(f"{name}: is a {side.kind}, and numbers are expected: {_FORMS}.")
    return side.points


def read_side(name: str, id_column: str | None = None, label_column: str | None = None) -> Side:
    """Read points, and names and labels of them where the file has such."""
    # Of a table the first column holds names if it has no name itself or holds words alone; another
    # can be chosen. Chosen columns are no coordinates.
    path, member = _split(name)
    suffix = _form(path)
    if suffix in _SURFACES:
        return _read_surface(path)
    if suffix not in {".npy", *_WITH_MEMBERS, *_DELIMITERS, *NETWORKS}:
        raise InvalidInputError(f"{name}: unknown kind of file; expected {_FORMS}.")
    _check_there(path)
    graph = None
    if suffix in NETWORKS:
        graph = read_network(path)
    elif suffix == ".npz" and member is None:
        graph = read_sparse(path)
    if graph is not None:
        return _network(graph)
    if suffix in (*_DELIMITERS, ".parquet"):
        return _side_of(_read_columns(path), path, member, id_column, label_column)
    if suffix == ".h5ad":
        with _opened_h5ad(path) as data:
            for column in (id_column, label_column):
                if column is not None and column not in data.obs:
                    raise InvalidInputError(
                        f"{path}: no column named {column!r} in obs, which has: "
                        f"{', '.join(data.obs) or 'none'}."
                    )
            names = data.obs_names if id_column is None else data.obs[id_column]
            ids = np.asarray(names).astype(str)
            labels = None if label_column is None else np.asarray(data.obs[label_column], str)
            return Side(_numeric(_h5ad_member(path, data, member), name), ids, labels)
    return Side(_numeric(_read_numpy(path, member), name))


def _network(graph: Any) -> Side:
    """Make a side of a graph, whose nodes have names."""
    return Side(None, np.array(list(graph)).astype(str), graph=graph)


def has_column(name: str, column: str | None) -> bool:
    """Whether a file is a table that has a column, or an AnnData file with it in ``obs``."""
    path = _split(name)[0]
    if column is None:
        return False
    _check_there(path)
    if _form(path) == ".h5ad":
        with _opened_h5ad(path) as data:
            return column in data.obs
    return _form(path) in (*_DELIMITERS, ".parquet") and column in _read_columns(path).names


def read_labels(name: str) -> NDArray[Any]:
    """Read one label per point, (n,), numbers or words; words are lines of a ``.txt`` file."""
    path, member = _split(name)
    suffix = path.suffix.lower()
    _check_there(path)
    if suffix == ".txt":
        labels = np.array(_read_text(path).split("\n"))
        labels = labels[:-1] if labels[-1] == "" else labels
    elif suffix == ".h5ad":
        with _opened_h5ad(path) as data:
            labels = _h5ad_member(path, data, member)
        labels = labels.astype(str) if labels.dtype.kind == "O" else labels
    elif _form(path) in (*_DELIMITERS, ".parquet"):
        labels = _label_column(path, member)
    elif suffix in (".npy", ".npz"):
        labels = _read_numpy(path, member)
    else:
        labels = read_array(name)
    if labels.size == 0 or max(labels.shape) != labels.size:
        raise InvalidInputError(
            f"{name}: labels must be one per point; got an array of shape {labels.shape}."
        )
    return labels.reshape(-1)


def _read_surface(path: Path) -> Side:
    """Read a surface; vertices keep their order, and those of STL files are joined."""
    _check_there(path)
    _need(path, "surfaces", "trimesh")
    import trimesh

    try:
        # one file may hold several objects, which are joined
        mesh = trimesh.load_mesh(path, process=False, maintain_order=True)
    except (ValueError, TypeError, IndexError, KeyError, OSError, struct.error) as error:
        raise InvalidInputError(f"{path}: not a readable surface: {error}") from error
    faces = getattr(mesh, "faces", None)
    if faces is None or not len(faces):
        raise InvalidInputError(f"{path}: has no triangles. Save points as .csv or .npy.")
    if path.suffix.lower() == ".stl":
        mesh.merge_vertices()
    return Side(np.asarray(mesh.vertices, dtype=np.float64), faces=np.asarray(mesh.faces))


def _label_column(path: Path, member: str | None) -> NDArray[Any]:
    """Read labels from a column of a table, which needs no name if it is the only one."""
    table = _read_columns(path)
    if member is not None:
        return table.column(path, member)
    if len(table.values) > 1:
        raise InvalidInputError(
            f"{path}: has {len(table.values)} columns; name that of the labels as {path}:NAME."
        )
    return _numbers_or_words(table.values[0])


def _need(path: Path, what: str, *packages: str) -> None:
    """Refuse a file that is read by packages that are not installed."""
    if any(find_spec(package) is None for package in packages):
        raise InvalidInputError(
            f"{path}: {what} need {' and '.join(packages)}: pip install {' '.join(packages)}"
        )


def _check_there(path: Path) -> None:
    """Refuse a file that does not exist."""
    if not path.is_file():
        raise InvalidInputError(f"{path}: there is no such file.")


def _form(path: Path) -> str:
    """Find the suffix that says what a file holds; that of ``.csv.gz`` is ``.csv``."""
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


def check_output(path: Path, forms: tuple[str, ...], *inputs: str | None) -> str:
    """Refuse an output that cannot be written, is an input, or has the name of another form."""
    # Returns what is printed once it is written: whether over a file that was there.
    check_writable(path)
    if path.suffix.lower() not in forms:
        raise InvalidInputError(
            f"cannot write {path}: what is written is {' or '.join(forms)}, so name it "
            f"{path.stem}{forms[0]}."
        )
    for name in inputs:
        if name is not None and path.exists() and _split(name)[0].resolve() == path.resolve():
            raise InvalidInputError(f"cannot write {path}: it is the input {name}.")
    return f"{'written over' if path.exists() else 'written':<17}{path}"


def write_array(path: Path, array: NDArray[Any]) -> None:
    """Write a table as text if it is named ``.csv`` or ``.tsv``, otherwise as ``.npy``."""
    delimiter = _DELIMITERS.get(path.suffix.lower())
    with written_whole(path) as file:
        if delimiter is None:
            np.save(file, array)
        else:
            # every digit that float64 has
            np.savetxt(file, array, fmt="%.17g", delimiter=delimiter)


def write_table(path: Path, columns: dict[str, NDArray[Any]]) -> None:
    """Write named columns as ``.csv`` or ``.tsv``, numbers with every digit that they have."""
    text = io.StringIO()
    writer = csv.writer(text, delimiter=_DELIMITERS[path.suffix.lower()], lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*(values.tolist() for values in columns.values()), strict=True))
    with written_whole(path) as file:
        file.write(text.getvalue().encode())


class _Columns(NamedTuple):
    """A table as it was read: words, or numbers that were numbers in the file already."""

    names: list[str]  # empty where the file has none
    values: list[NDArray[Any]]

    def column(self, path: Path, name: str) -> NDArray[Any]:
        """Return a column by its name, of numbers if all of its cells are."""
        if name not in self.names:
            raise InvalidInputError(
                f"{path}: no column named {name!r}; the file has: "
                f"{', '.join(self.names) or 'no line of names'}."
            )
        return _numbers_or_words(self.values[self.names.index(name)])


def _side_of(
    table: _Columns, path: Path, member: str | None, id_column: str | None, label: str | None
) -> Side:
    """Take coordinates, names and labels apart."""
    named = ends_among(table.names)
    if member is id_column is label is None and named is not None:
        ends = [_as_words(table.column(path, name)) for name in named]
        lengths = [table.column(path, LENGTH)] if LENGTH in table.names else []
        _check_numbers(path, [LENGTH], lengths)
        return _network(from_edges(list(zip(*ends, *lengths, strict=True))))
    ids = labels = None
    names, values = list(table.names), list(table.values)
    if id_column is not None:
        ids = table.column(path, id_column)
    elif (names and not names[0].strip() and len(values) > 1) or _are_words(values):
        ids = values[0]
        names, values = names[1:], values[1:]
    if label is not None:
        labels = table.column(path, label)
    if member is not None:
        names = member.split(",")
        values = [table.column(path, name) for name in names]
    elif names:
        kept = [i for i, name in enumerate(names) if name not in (id_column, label)]
        names, values = [names[i] for i in kept], [values[i] for i in kept]
    if not values:
        raise InvalidInputError(f"{path}: has no columns of coordinates.")
    _check_numbers(path, names, values)
    words = [None if part is None else _as_words(part) for part in (ids, labels)]
    return Side(np.column_stack([part.astype(float) for part in values]), *words)


def _as_words(values: NDArray[Any]) -> NDArray[Any]:
    """Make words of names and labels; whole numbers stay whole."""
    if values.dtype.kind == "f" and (values == np.round(values)).all():
        values = values.astype(np.int64)
    return values.astype(str)


def _numbers_or_words(values: NDArray[Any]) -> NDArray[Any]:
    """Make numbers of a column if all of its cells are."""
    return values if len(_words_in(values)) else values.astype(float)


def _words_in(values: NDArray[Any]) -> list[int]:
    """List the cells of a column that are no numbers."""
    if values.dtype.kind != "U":
        return []
    return [row for row, cell in enumerate(values) if not _is_number(cell)]


def _are_words(values: list[NDArray[Any]]) -> bool:
    """Whether there are several columns and the first holds words alone."""
    if len(values) < 2 or values[0].dtype.kind != "U":
        return False
    # 1,000 and 1 000 are numbers that are written otherwise, and refused
    return not any(_is_number(re.sub(r"[,\s]", "", cell) or "0") for cell in values[0])


def _check_numbers(path: Path, names: list[str], columns: list[NDArray[Any]]) -> None:
    """Refuse a cell that is no number, and say where it is."""
    for place, values in enumerate(columns):
        bad = _words_in(values)
        if not bad:
            continue
        named = bool(names and names[place].strip())
        name, what = f"{place + 1}" + (f" ({names[place]})" if named else ""), ""
        if len(bad) == len(values) and named:
            what = (
                f" If it holds labels, pass --label-column {names[place]}; or name the columns "
                f"that are coordinates: {path}:NAME,NAME."
            )
        raise InvalidInputError(
            f"{path}: row {bad[0] + 1}, column {name} is {str(values[bad[0]])[:40]!r}, and every "
            f"cell must be a number (rows are counted from 1, without the header).{what}"
        )


def _read_columns(path: Path) -> _Columns:
    """Read all columns of a table."""
    if _form(path) != ".parquet":
        return _read_text_columns(path, _DELIMITERS[_form(path)])
    table = _read_parquet(path)
    names, values = [str(name) for name in table.columns], [np.asarray(table[n]) for n in table]
    index = table.index
    if index.dtype.kind not in "iu":
        # pandas keeps names of rows as an index
        names, values = ["", *names], [np.asarray(index), *values]
    return _Columns(
        names, [part if part.dtype.kind in "biuf" else part.astype(str) for part in values]
    )


def _read_parquet(path: Path) -> Any:
    """Read a table."""
    _need(path, "parquet files", "pandas", "pyarrow")
    import pandas
    from pyarrow.lib import ArrowException

    try:
        return pandas.read_parquet(path)
    except (ArrowException, OSError) as error:
        raise InvalidInputError(f"{path}: not a readable parquet file: {error}") from error


@contextmanager
def _opened_h5ad(path: Path) -> Iterator[Any]:
    """Open an AnnData file, whose X is read where it is asked for."""
    _need(path, "h5ad files", "anndata")
    import anndata

    try:
        data = anndata.read_h5ad(path, backed="r")
        try:
            yield data
        finally:
            data.file.close()
    except InvalidInputError:
        raise
    except (OSError, KeyError, ValueError) as error:
        raise InvalidInputError(f"{path}: not a readable h5ad file: {error}") from error


def _h5ad_member(path: Path, data: Any, member: str | None) -> NDArray[Any]:
    """Return X, or an entry of obsm, or a column of obs."""
    members = {f"{slot}/{key}": table[key] for slot in ("obsm", "obs")
               for table in [getattr(data, slot)] for key in table}  # fmt: skip
    if data.X is not None:
        members["X"] = data.X
    member = _member(path, list(members), member)
    value = members[member]
    if hasattr(value, "toarray") or hasattr(value, "to_memory"):
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
    return weights / total


def _split(name: str) -> tuple[Path, str | None]:
    """Split ``file.npz:array`` into its parts; other colons belong to the path."""
    file, colon, member = name.rpartition(":")
    if colon and file.lower().endswith(_WITH_MEMBERS):
        return Path(file), member
    return Path(name), None


def _read_numpy(path: Path, member: str | None) -> NDArray[Any]:
    """Map a .npy file, or read one array of a .npz file."""
    try:
        if path.suffix.lower() == ".npy":
            # processes that share a solve share what the system keeps of it
            return np.asarray(np.load(path, mmap_mode="r"))
        # opened here, because np.load leaves a damaged archive open
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            return np.asarray(loaded[_member(path, loaded.files, member)])
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
    if wanted is None and len(members) != 1:
        raise InvalidInputError(
            f"{path}: holds {len(members)} arrays, name one as {path}:ARRAY; the file has: "
            f"{listing}."
        )
    return members[0] if wanted is None else wanted


def _read_text_columns(path: Path, delimiter: str) -> _Columns:
    """Read the columns of a text file as words, after an optional line of column names."""
    text = _read_text(path)
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    names: list[str] = []
    if lines:
        fields = next(csv.reader(lines[:1], delimiter=delimiter))
        first = fields[1:] if _has_names_of_rows(fields, lines, delimiter) else fields
        if not all(map(_is_number, first)):
            names, lines = fields, lines[1:]
    if not lines:
        raise InvalidInputError(f"{path}: has no rows of numbers.")
    plain = _plain_numbers(lines, delimiter)
    if plain is not None and len(names) in (0, plain.shape[1]):
        return _Columns(names, list(plain.T))
    _check_separators(path, lines[0], delimiter)
    rows = list(csv.reader(lines, delimiter=delimiter))
    width = len(names) or len(rows[0])
    for count, row in enumerate(rows, start=1):
        if len(row) != width:
            raise InvalidInputError(
                f"{path}: row {count} has {len(row)} columns, and those before it {width} (rows "
                "are counted from 1, without the header)."
            )
    return _Columns(names, [np.array(column, dtype=str) for column in zip(*rows, strict=True)])


def _has_names_of_rows(fields: list[str], lines: list[str], delimiter: str) -> bool:
    """Whether a table without a line of names begins its rows with a word."""
    second = next(csv.reader(lines[1:2], delimiter=delimiter), fields)
    words = [len(row) > 1 and not _is_number(row[0]) for row in (fields, second)]
    return all(words) and all(map(_is_number, fields[1:]))


def _plain_numbers(lines: list[str], delimiter: str) -> NDArray[Any] | None:
    """Read a table of nothing but numbers, the fast way; ``None`` if it is none."""
    try:
        return np.loadtxt(lines, delimiter=delimiter, ndmin=2, quotechar='"', comments=None)
    except ValueError:
        return None


def _check_separators(path: Path, line: str, delimiter: str) -> None:
    """Refuse a table that would be one of numbers if other signs separated its columns."""
    for mark in ";\t, ":
        parts = [part.strip().replace(",", ".") for part in line.split(mark)]
        if mark != delimiter and len(parts) > 1 and all(map(_is_number, parts)):
            raise InvalidInputError(
                f"{path}: columns must be separated by commas in a .csv file and by tabs in a .tsv "
                f"file; row 1 is {line[:60]!r}."
            )


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
