"""Values of foreign origin, checked against the annotations of what they are to become."""

from __future__ import annotations

import types
import typing
from typing import Any

import numpy as np

from torchgw._errors import InvalidInputError


def check_fields(parts: dict[str, Any], hints: dict[str, Any]) -> None:
    """Refuse parts that are not of the types that annotations say, by name."""
    for name, hint in hints.items():
        if name in parts and not fits(parts[name], hint):
            wanted = str(getattr(hint, "__name__", hint) if isinstance(hint, type) else hint)
            raise InvalidInputError(
                f"`{name}` must be {wanted.replace('torchgw.', '')}; got "
                f"{type(parts[name]).__name__}, {str(parts[name])[:60]}."
            )


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of the type that an annotation says, its parts included."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is np.ndarray:
        return isinstance(value, np.ndarray)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, each) for each in inner)
    if origin is typing.Literal:
        return isinstance(value, str) and value in inner
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if inner[-1] is Ellipsis:
            return all(fits(part, inner[0]) for part in value)
        return len(value) == len(inner) and all(map(fits, value, inner))
    if origin is list:
        return isinstance(value, list) and all(fits(part, inner[0]) for part in value)
    if typing.is_typeddict(hint):
        wanted = typing.get_type_hints(hint)
        return (
            isinstance(value, dict)
            and value.keys() == wanted.keys()
            and all(fits(value[name], each) for name, each in wanted.items())
        )
    if origin is dict:
        return isinstance(value, dict) and all(fits(part, inner[1]) for part in value.values())
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)
