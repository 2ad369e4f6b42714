"""Results of costly stages, kept in a folder under a hash of what they were made from."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._boundary.archive import read_archive, write_archive
from torchgw._boundary.trees import Decoder, encode
from torchgw._errors import CacheWarning, InvalidInputError, InvalidTypeError, warn_user

# Part of every key: raised when a stage changes what it computes.
_VERSION = 1

Parts = dict[str, Any]


def content_key(stage: str, *content: Any) -> str:
    """Compute the SHA-256 of a stage's name and of tensors and plain values."""
    digest = hashlib.sha256(f"{stage}|{_VERSION}".encode())
    for value in content:
        if isinstance(value, Tensor):
            array = value.detach().cpu().contiguous().numpy()
            digest.update(f"|{array.dtype.str}|{array.shape}|".encode())
            digest.update(array.tobytes())
        else:
            plain = value.item() if isinstance(value, np.generic) else value
            digest.update(f"|{plain!r}".encode())
    return digest.hexdigest()


class Cache:
    """A folder, made on the first write, with one verified file for each result."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fetch(self, stage: str, key: str, device: torch.device, make: Callable[[], Parts]) -> Parts:
        """Read the tensors and plain values under a key; make and store them if there are none."""
        found = self.read(stage, key, device)
        if found is None:
            found = make()
            self.write(stage, key, found)
        return found

    def read(self, stage: str, key: str, device: torch.device) -> Parts | None:
        """Read the tensors and plain values under a key, if there are any."""
        path = self._path(stage, key)
        if not path.exists():
            return None
        try:
            tree, arrays = read_archive(path)
            parts = Decoder(arrays, device, _no_types).decode(tree)
            if not isinstance(parts, dict):
                kind = type(parts).__name__
                raise InvalidInputError(f"{path}: holds a {kind}, and no parts by name.")
        except InvalidInputError as error:
            warn_user(
                f"A cached result cannot be used, and is computed again: {error}", CacheWarning
            )
            return None
        return parts

    def write(self, stage: str, key: str, parts: Parts) -> None:
        """Store tensors and plain values under a key."""
        self.folder.mkdir(parents=True, exist_ok=True)
        stored: dict[str, NDArray[np.generic]] = {}
        tree = encode(parts, stage, lambda value: None, stored)
        write_archive(self._path(stage, key), tree, stored)

    def _path(self, stage: str, key: str) -> Path:
        return self.folder / f"{stage}-{key[:32]}.npz"


def open_cache(folder: Any) -> Cache | None:
    """Open the cache that the option ``cache`` names."""
    if folder is None:
        return None
    if not isinstance(folder, (str, os.PathLike)):
        raise InvalidTypeError(
            f"`cache` must be the path of a folder, or None; got {type(folder).__name__}."
        )
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise InvalidInputError(f"`cache` must be a folder; {path} is none.")
    return Cache(path)


def _no_types(kind: str, parts: Parts) -> Any:
    raise InvalidInputError(f"A cached result holds a {kind!r}, which none has.")
