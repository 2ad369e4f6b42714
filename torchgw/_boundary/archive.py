"""Trees and their arrays in one file: NumPy's npz, described by JSON, never pickled.

The member ``metadata`` is UTF-8 JSON: the format, its version, and a tree whose leaves are plain
values or names of arrays. The member ``checksum`` is the SHA-256 of all the others. Arrays that the
tree does not name are for other readers.
"""

import hashlib
import json
import math
import os
import secrets
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from torchgw._errors import InvalidInputError, InvalidTypeError

_FORMAT = "torchgw result"
_VERSION = 1
RESERVED = _METADATA, _CHECKSUM = "metadata", "checksum"

# Errors of NumPy for a damaged file: by a bad header, archive or compressed stream, and by flipped
# bits that ask for encryption, for example.
UNREADABLE = (
    ValueError, EOFError, OSError, RuntimeError, zipfile.BadZipFile, zlib.error,
    tokenize.TokenError, SyntaxError,
)  # fmt: skip
# Errors that arise if a value is made of parts of the wrong kind.
ODD = (*UNREADABLE, TypeError, KeyError, AttributeError, IndexError, OverflowError, AssertionError)
# Characters of the header of an array, which is a dtype and a shape. [L353]
_MOST_HEADER = 2_000


def write_archive(path: str | os.PathLike[str], tree: Any, arrays: dict[str, NDArray[Any]]) -> None:
    """Write a tree and its arrays; the file appears whole or not at all."""
    text = json.dumps({"format": _FORMAT, "version": _VERSION, "tree": tree})
    members = {**arrays, _METADATA: np.frombuffer(text.encode(), np.uint8)}
    members[_CHECKSUM] = np.asarray(_digest(members))
    with written_whole(path) as file:
        np.savez(file, **members)  # type: ignore[arg-type]


def write_part(
    path: str | os.PathLike[str],
    rank: int,
    size: int,
    key: int,
    tree: Any,
    arrays: dict[str, NDArray[Any]],
) -> None:
    """Write one of ``size`` files that each hold a share of the rows of every array."""
    shares = {
        name: np.array_split(array, size)[rank] if array.ndim else array
        for name, array in arrays.items()
    }
    write_archive(f"{os.fspath(path)}.{rank}", {"key": key, "tree": tree}, shares)


def read_parts(
    path: str | os.PathLike[str],
    size: object,
    key: object,
    rows_of: Callable[[str], slice] = lambda name: slice(None),
) -> tuple[Any, dict[str, NDArray[Any]]]:
    """Put together what :func:`write_part` wrote ``size`` times, one part in memory at a time."""
    if not isinstance(size, int) or size < 1:
        raise InvalidInputError(f"{path}: `size` must be the number of parts; got {size!r:.60}.")
    kept: dict[str, list[NDArray[Any]]] = {}
    past: dict[str, int] = {}
    for rank in range(size):
        tree, arrays = read_archive(f"{os.fspath(path)}.{rank}")
        if not isinstance(tree, dict) or tree.get("key") != key:
            raise InvalidInputError(f"{path}.{rank}: no part of what {path} is now. Save it again.")
        for name, array in arrays.items():
            if array.ndim and rows_of(name) != slice(None):
                rows, first = rows_of(name), past.get(name, 0)
                past[name] = first + len(array)
                # a copy of these rows, so that the memory of the others can be freed
                array = array[max(rows.start - first, 0) : max(rows.stop - first, 0)].copy()
            kept.setdefault(name, []).append(array)
    try:
        joined = {
            name: np.concatenate(parts) if parts[0].ndim else parts[0]
            for name, parts in kept.items()
        }
        if any(len(parts) != size for parts in kept.values()):
            raise ValueError("an array is missing from some of them")
    except ODD as error:
        raise InvalidInputError(f"{path}: its parts do not fit together ({error}).") from error
    return tree.get("tree"), joined


@contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file to write, which takes the place of the old one when the block ends well."""
    target = check_writable(path)
    try:
        if target.exists() and not target.is_file():
            # a pipe or /dev/null is written to: a file moved there would take its place
            with target.open("wb") as file:
                yield file
            return
        # a link stays, and what it points to is replaced
        place = target.resolve()
        # Files of mkstemp could be read by their owner only. The temporary name does not contain
        # the name of the target, which may be as long as names can be.
        temporary = place.with_name(f".{secrets.token_hex(8)}.part")
        try:
            with temporary.open("xb") as file:
                yield file
            temporary.replace(place)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise InvalidInputError(f"cannot write {target}: {error.strerror}.") from error


def check_writable(path: object) -> Path:
    """Refuse a path that cannot be written, for calls that take long before they write."""
    target = _checked(path)
    reason = None
    try:
        if not target.parent.is_dir():
            reason = f"there is no directory {target.parent}"
        elif target.is_dir():
            reason = "it is a directory"
        elif not os.access(target if target.exists() else target.parent, os.W_OK):
            reason = "there is no permission to"
    except OSError as error:
        # a name that is too long
        reason = error.strerror
    if reason is not None:
        raise InvalidInputError(f"cannot write {target}: {reason}.")
    return target


def read_archive(path: str | os.PathLike[str]) -> tuple[Any, dict[str, NDArray[Any]]]:
    """Read a tree and its arrays; refuse a file that is damaged or not ours."""
    source = _checked(path)
    if not source.is_file():
        raise InvalidInputError(f"{source}: there is no such file.")
    foreign = (
        f"{source}: not a torchgw result. `torchgw.load` reads what `result.save` and "
        "`torchgw align` write."
    )
    if not zipfile.is_zipfile(source):
        raise InvalidInputError(f"{foreign} If it was one, it is damaged or cut short.")
    try:
        with source.open("rb") as file, zipfile.ZipFile(file) as stored:
            names = {info.filename.removesuffix(".npy"): info for info in stored.infolist()}
            if not set(RESERVED) <= set(names):
                raise InvalidInputError(foreign)
            _check_members(stored, names, source.stat().st_size)
            members = {name: _read_member(stored, names[name], name) for name in names}
    except InvalidInputError:
        raise
    except UNREADABLE as error:
        raise InvalidInputError(f"{source}: the file is damaged ({error}).") from error
    if str(members.pop(_CHECKSUM)) != _digest(members):
        raise InvalidInputError(
            f"{source}: the file is damaged: its contents do not match their checksum. Save the "
            "result again."
        )
    try:
        header = json.loads(members.pop(_METADATA).tobytes(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{source}: `{_METADATA}` is damaged ({error}).") from error
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise InvalidInputError(foreign)
    if header.get("version") != _VERSION:
        raise InvalidInputError(
            f"{source}: written in version {header.get('version')} of the format, and this torchgw "
            f"reads version {_VERSION}. Use the torchgw that wrote it, or solve again."
        )
    return header.get("tree"), members


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dictionary; refuse a key that comes twice, of which readers may take either."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"a key comes twice among {', '.join(found)[:200]}")
    return found


def _check_members(stored: zipfile.ZipFile, names: dict[str, zipfile.ZipInfo], size: int) -> None:
    """Refuse members that are compressed, come twice or exceed the file."""
    entries = stored.infolist()
    if len(names) < len(entries):
        raise ValueError("a member comes twice")
    for name, info in names.items():
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise ValueError(f"`{name}` is compressed, as `save` leaves none")
    if sum(info.file_size for info in entries) > size:
        raise ValueError("its members claim to be larger than the file")


def _read_member(stored: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> NDArray[Any]:
    """Read an array; refuse one whose header claims more or fewer bytes than there are."""
    with stored.open(info) as stream:
        version = np.lib.format.read_magic(stream)
        readers = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }
        if version not in readers:
            raise ValueError(f"`{name}` is of version {version} of NumPy's format")
        shape, by_columns, dtype = readers[version](stream, max_header_size=_MOST_HEADER)
        if dtype.hasobject or dtype.itemsize == 0 or min(shape, default=0) < 0:
            raise ValueError(f"`{name}` has the shape {shape} and the dtype {dtype}")
        claimed = math.prod(shape) * dtype.itemsize
        if stream.tell() + claimed != info.file_size:
            raise ValueError(
                f"`{name}` claims {claimed} bytes and has {info.file_size - stream.tell()}"
            )
        content = bytearray(stream.read())
    if claimed == 0:
        return np.empty(shape, dtype)
    array = np.frombuffer(content, dtype)
    return array.reshape(shape[::-1]).T if by_columns else array.reshape(shape)


def _checked(path: object) -> Path:
    if not isinstance(path, (str, os.PathLike)) or "\0" in str(path):
        raise InvalidTypeError(f"`path` must be the name of a file; got {path!r}.")
    return Path(path)


def _digest(members: dict[str, NDArray[Any]]) -> str:
    """Compute the SHA-256 of names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(members):
        array = np.ascontiguousarray(members[name])
        digest.update(f"{name}|{array.dtype.str}|{members[name].shape}|".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
