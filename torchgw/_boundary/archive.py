"""Trees of plain values and arrays in one file: NumPy's npz, described by JSON, never pickled.

The member ``metadata`` is UTF-8 JSON: the format, its version, and a tree whose leaves are plain
values or names of arrays. The member ``checksum`` is the SHA-256 of all the others. Arrays that the
tree does not name are for other readers.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import tokenize
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._errors import InvalidInputError, InvalidTypeError, UnsupportedError

__all__ = [
    "Decode",
    "Encode",
    "RESERVED",
    "UNREADABLE",
    "check_writable",
    "decode",
    "encode",
    "read_archive",
    "write_archive",
]

_FORMAT = "torchgw result"
_VERSION = 1
RESERVED = _METADATA, _CHECKSUM = "metadata", "checksum"

# What NumPy raises for a damaged file: for a bad header, archive or compressed stream, and for
# what flipped bits ask for, such as encryption.
UNREADABLE = (
    ValueError, EOFError, OSError, RuntimeError, zipfile.BadZipFile, zlib.error,
    tokenize.TokenError, SyntaxError,
)  # fmt: skip

# How a tree holds other values: as a name and parts, from which they are built again.
Encode = Callable[[Any], "tuple[str, dict[str, Any]] | None"]
Decode = Callable[[str, "dict[str, Any]"], Any]


def encode(value: Any, name: str, parts_of: Encode, arrays: dict[str, NDArray[Any]]) -> Any:
    """Turn a value into JSON and put its arrays into ``arrays``; refuse unknown values by name."""

    def inner(part: Any, label: object) -> Any:
        return encode(part, f"{name}.{label}", parts_of, arrays)

    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return inner(value.item(), "item")
    # an array of objects would be pickled
    if isinstance(value, Tensor) or (isinstance(value, np.ndarray) and not value.dtype.hasobject):
        kind = "tensor" if isinstance(value, Tensor) else "array"
        key = f"{len(arrays)}:{name}"
        arrays[key] = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
        return {kind: key}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise UnsupportedError(f"`{name}` has keys that are not strings and cannot be saved.")
        return {"dict": {key: inner(part, key) for key, part in value.items()}}
    # a NamedTuple is a tuple: those that have a name come first
    known = parts_of(value)
    if known is not None:
        kind, parts = known
        return {"type": kind, "parts": {key: inner(part, key) for key, part in parts.items()}}
    if isinstance(value, (tuple, list)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [inner(part, place) for place, part in enumerate(value)]}
    raise UnsupportedError(
        f"`{name}` is a {type(value).__name__}, which has no form in a file; drop it with "
        "dataclasses.replace before saving."
    )


def decode(node: Any, arrays: dict[str, NDArray[Any]], device: torch.device, build: Decode) -> Any:
    """Turn JSON and its arrays back into the value."""
    if not isinstance(node, dict):
        return node
    if "tensor" in node:
        return torch.from_numpy(arrays[node["tensor"]]).to(device)
    if "array" in node:
        return arrays[node["array"]]
    if "dict" in node:
        return {key: decode(part, arrays, device, build) for key, part in node["dict"].items()}
    if "type" in node:
        parts = {key: decode(part, arrays, device, build) for key, part in node["parts"].items()}
        return build(node["type"], parts)
    kind = "tuple" if "tuple" in node else "list"
    items = [decode(part, arrays, device, build) for part in node[kind]]
    return tuple(items) if kind == "tuple" else items


def write_archive(path: str | os.PathLike[str], tree: Any, arrays: dict[str, NDArray[Any]]) -> None:
    """Write a tree and its arrays; the file appears whole or not at all."""
    target = check_writable(path)
    text = json.dumps({"format": _FORMAT, "version": _VERSION, "tree": tree})
    members = {**arrays, _METADATA: np.frombuffer(text.encode(), np.uint8)}
    members[_CHECKSUM] = np.asarray(_digest(members))
    try:
        if target.exists() and not target.is_file():
            # a pipe or /dev/null is written to: a file moved there would take its place
            with target.open("wb") as file:
                np.savez(file, **members)  # type: ignore[arg-type]
        else:
            # a link stays, and what it points to is replaced
            _replace(target.resolve(), members)
    except OSError as error:
        raise InvalidInputError(f"cannot write {target}: {error.strerror}.") from error


def _replace(target: Path, members: dict[str, NDArray[Any]]) -> None:
    """Write a file beside the target, and move it there."""
    # Files of mkstemp can be read by their owner only. The name does not contain the target's, to
    # which nothing can be added where it is as long as names may be.
    temporary = target.with_name(f".{secrets.token_hex(8)}.npz")
    try:
        with temporary.open("xb") as file:
            np.savez(file, **members)  # type: ignore[arg-type]
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


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
        # opened here, because np.load leaves a damaged archive open
        with source.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            if _METADATA not in stored.files or _CHECKSUM not in stored.files:
                raise InvalidInputError(foreign)
            members = {name: stored[name] for name in stored.files}
    except InvalidInputError:
        raise
    except UNREADABLE as error:
        raise InvalidInputError(f"{source}: the file is damaged ({error}).") from error
    checksum = members.pop(_CHECKSUM)
    if str(checksum) != _digest(members):
        raise InvalidInputError(
            f"{source}: the file is damaged: its contents do not match their checksum. Save the "
            "result again."
        )
    header = json.loads(members.pop(_METADATA).tobytes().decode())
    if header.get("format") != _FORMAT:
        raise InvalidInputError(foreign)
    if header["version"] != _VERSION:
        raise InvalidInputError(
            f"{source}: written in version {header['version']} of the format, and this torchgw "
            f"reads version {_VERSION}. Use the torchgw that wrote it, or solve again."
        )
    return header["tree"], members


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
