"""Values as trees: JSON whose leaves are plain values or names of arrays, and back."""

import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._boundary.archive import ODD
from torchgw._boundary.arrays import to_numpy
from torchgw._errors import InvalidInputError, UnsupportedError

# Levels that a tree has at most: ours have ten. [L353]
_MOST_LEVELS = 50

# How a tree holds other values: as a name and parts, from which they are built again.
TakeApart = Callable[[Any], "tuple[str, dict[str, Any]] | None"]
Build = Callable[[str, "dict[str, Any]"], Any]
# The type of what stands under the only key of a node, or under the first of two.
_NODES = {"tensor": str, "array": str, "dict": dict, "type": str, "tuple": list, "list": list}


def encode(value: Any, name: str, take_apart: TakeApart, arrays: dict[str, NDArray[Any]]) -> Any:
    """Turn a value into JSON, and put its arrays beside it; refuse unknown ones by name."""

    def inner(part: Any, label: object) -> Any:
        return encode(part, f"{name}.{label}", take_apart, arrays)

    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return inner(value.item(), "item")
    # an array of objects would be pickled
    if isinstance(value, Tensor) or (isinstance(value, np.ndarray) and not value.dtype.hasobject):
        key = f"{len(arrays)}:{name}"
        arrays[key] = to_numpy(value)
        return {"tensor" if isinstance(value, Tensor) else "array": key}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise UnsupportedError(f"`{name}` has keys that are not strings and cannot be saved.")
        return {"dict": {key: inner(part, key) for key, part in value.items()}}
    # a NamedTuple is a tuple: those that have a name come first
    known = take_apart(value)
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


@dataclass(frozen=True)
class Decoder:
    """Turns JSON and its arrays back into values; errors name the part."""

    arrays: dict[str, NDArray[Any]]
    device: torch.device
    build: Build

    def decode(self, node: Any, name: str = "tree", level: int = 0) -> Any:
        """Make the value that a node stands for."""

        def inner(part: Any, label: object) -> Any:
            return self.decode(part, f"{name}.{label}", level + 1)

        if node is None or isinstance(node, (bool, int, float, str)):
            return node
        kind = _kind_of(node) if level < _MOST_LEVELS else None
        if kind is None:
            raise InvalidInputError(f"`{name}` is no part of a result: {str(node)[:60]}.")
        part = node[kind]
        if kind in ("tensor", "array"):
            return self._array(part, name, as_tensor=kind == "tensor")
        if kind == "dict":
            return {key: inner(value, key) for key, value in part.items()}
        if kind == "type":
            parts = {key: inner(value, key) for key, value in node["parts"].items()}
            return self.built(part, parts, name)
        items = [inner(value, place) for place, value in enumerate(part)]
        return tuple(items) if kind == "tuple" else items

    def _array(self, key: Any, name: str, *, as_tensor: bool) -> Any:
        """Read an array, or a tensor of numbers."""
        if not isinstance(key, str) or key not in self.arrays:
            raise InvalidInputError(f"`{name}` names {str(key)[:60]!r}, no array of the file.")
        array = self.arrays[key]
        if not as_tensor:
            return array
        if array.dtype.kind not in "fiub":
            raise InvalidInputError(f"`{name}` must hold numbers; got {array.dtype}.")
        return torch.from_numpy(array).to(self.device)

    def built(self, kind: str, parts: dict[str, Any], name: str) -> Any:
        """Build a value of its parts; an error of any kind becomes one that names it."""
        try:
            return self.build(kind, parts)
        except InvalidInputError as error:
            raise InvalidInputError(f"`{name}`: {error}") from error
        except ODD as error:
            raise InvalidInputError(
                f"`{name}` cannot be made of its parts, {', '.join(parts)[:200]}: {error}"
            ) from error


def _kind_of(node: Any) -> str | None:
    """Tell which kind of value a node of the tree stands for; ``None`` if it is no node."""
    if not isinstance(node, dict):
        return None
    keys = set(node)
    kind = "type" if keys == {"type", "parts"} else next(iter(keys), "") if len(keys) == 1 else ""
    if kind not in _NODES or (kind == "type") != (len(keys) == 2):
        return None
    if kind == "type" and not isinstance(node["parts"], dict):
        return None
    return kind if isinstance(node[kind], _NODES[kind]) else None


def check_fields(parts: dict[str, Any], hints: dict[str, Any]) -> None:
    """Refuse parts that are not of the types that annotations say, by name."""
    for name, hint in hints.items():
        if name in parts and not _fits(parts[name], hint):
            wanted = str(getattr(hint, "__name__", hint) if isinstance(hint, type) else hint)
            raise InvalidInputError(
                f"`{name}` must be {wanted.replace('torchgw.', '')}; got "
                f"{type(parts[name]).__name__}, {str(parts[name])[:60]}."
            )


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of the type that an annotation says, its parts included."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in _GENERIC:
        return _GENERIC[origin](value, inner)
    if hint is Any:
        return True
    if typing.is_typeddict(hint):
        wanted = typing.get_type_hints(hint)
        same = isinstance(value, dict) and value.keys() == wanted.keys()
        return same and all(_fits(value[name], each) for name, each in wanted.items())
    if hint in (int, float):
        number = isinstance(value, (int, float) if hint is float else int)
        return number and not isinstance(value, bool)
    return isinstance(value, hint)


def _fits_any(value: Any, inner: tuple[Any, ...]) -> bool:
    return any(_fits(value, each) for each in inner)


def _fits_tuple(value: Any, inner: tuple[Any, ...]) -> bool:
    if not isinstance(value, tuple):
        return False
    if inner[-1] is Ellipsis:
        return all(_fits(part, inner[0]) for part in value)
    return len(value) == len(inner) and all(map(_fits, value, inner))


# Whether a value is of a generic type, by the arguments of that.
_GENERIC: dict[Any, Callable[[Any, tuple[Any, ...]], bool]] = {
    np.ndarray: lambda value, _: isinstance(value, np.ndarray),
    typing.Union: _fits_any,
    types.UnionType: _fits_any,
    typing.Literal: lambda value, inner: isinstance(value, str) and value in inner,
    tuple: _fits_tuple,
    list: lambda value, inner: (
        isinstance(value, list) and all(_fits(part, inner[0]) for part in value)
    ),
    dict: lambda value, inner: (
        isinstance(value, dict) and all(_fits(part, inner[1]) for part in value.values())
    ),
}
