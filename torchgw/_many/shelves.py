"""Spaces of many problems, packed by size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._batch.packing import Stack, make_stack, pack, padded_sizes
from torchgw._many.spaces import Space
from torchgw._search.starts import AXES
from torchgw.distances.profiles import distance_quantiles


class Shelves:
    """Spaces packed by size, with what starts of their problems are made from.

    They are padded less for a search on a CPU, which follows many plans of each problem.
    """

    def __init__(self, spaces: Sequence[Space], *, searched: bool) -> None:
        counts = np.array([len(space.table) for space in spaces], dtype=np.int64)
        self.sizes = counts
        narrow = searched and bool(spaces) and spaces[0].table.device.type == "cpu"
        for size in self._sort(spaces, padded_sizes(counts, narrow=narrow)):
            mine = [spaces[k] for k in (self.padded == size).nonzero()[0]]
            self.stacks[size] = pack(
                [space.table for space in mine], [space.weights for space in mine], size
            )
            features = [space.features for space in mine]
            if features[0] is not None:
                self.features[size] = _padded(features, size)

    @classmethod
    def stacked(cls, sides: Sequence[tuple[Tensor, Tensor, Tensor]], *, searched: bool) -> Shelves:
        """Shelve zero-padded stacks (S, n, n), (S, n) of so many points (S,), one after another."""
        shelves = cls.__new__(cls)
        narrow = searched and sides[0][0].device.type == "cpu"
        padded = [padded_sizes(sizes.cpu().numpy(), narrow=narrow) for _, _, sizes in sides]
        shelves.sizes = np.concatenate([sizes.cpu().numpy() for _, _, sizes in sides])
        for size in shelves._sort(_Slices(sides), np.concatenate(padded)):
            tables = sides[0][0].new_zeros(int((shelves.padded == size).sum()), size, size)
            weights, sizes, done = tables.new_zeros(tables.shape[:2]), [], 0
            for (table, weight, used), sizes_of in zip(sides, padded, strict=True):
                index = torch.from_numpy((sizes_of == size).nonzero()[0]).to(used.device)
                least = min(size, table.shape[1])
                # a stack of one size is not copied twice
                mine = slice(None) if len(index) == len(table) else index
                here = slice(done, done + len(index))
                tables[here, :least, :least] = table[mine, :least, :least]
                weights[here, :least] = weight[mine, :least]
                sizes.append(used[index])
                done += len(index)
            shelves.stacks[size] = make_stack(tables, weights, torch.cat(sizes))
        return shelves

    def _sort(self, spaces: Sequence[Space], padded: NDArray[np.int64]) -> list[int]:
        """Find the stack of each space, by its padded size, and its place; list the stacks."""
        self.spaces, self.padded = spaces, padded
        self.place = np.zeros_like(padded)
        self.stacks: dict[int, Stack] = {}
        self.features: dict[int, Tensor] = {}
        self._signatures: dict[int, Tensor] = {}
        self._axes: dict[int, Tensor] = {}
        used: list[int] = np.unique(self.padded[self.padded > 0]).tolist()
        for size in used:
            mine = self.padded == size
            self.place[mine] = np.arange(mine.sum())
        return used

    def signatures(self, size: int) -> Tensor:
        """Compute quantiles of the distances of each point, (S, n, q)."""
        if size not in self._signatures:
            tables, weights, sizes, _ = self.stacks[size]
            found = [
                distance_quantiles(table[:n, :n], weight[:n])
                for table, weight, n in zip(tables, weights, sizes.tolist(), strict=True)
            ]
            self._signatures[size] = _padded(found, size)
        return self._signatures[size]

    def axes(self, size: int) -> Tensor:
        """Compute leading axes of the distances of each space, and means, (S, n, 4)."""
        if size not in self._axes:
            tables, weights, _, _ = self.stacks[size]
            self._axes[size] = _leading_axes(tables.cpu(), weights.cpu()).to(tables.device)
        return self._axes[size]


class _Slices(Sequence[Space]):
    """Spaces of stacks, cut out when they are asked for."""

    def __init__(self, sides: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        self._sides = sides

    def __len__(self) -> int:
        return sum(len(tables) for tables, _, _ in self._sides)

    def __getitem__(self, place: Any) -> Any:
        for tables, weights, sizes in self._sides:
            if place < len(tables):
                n = int(sizes[place])
                return Space(tables[place, :n, :n], weights[place, :n])
            place -= len(tables)
        raise IndexError(place)


def _leading_axes(tables: Tensor, weights: Tensor) -> Tensor:
    """Compute axes of centred tables, table ~ +- axes axes', and centred mean distances."""
    means = (tables * weights[:, None, :]).sum(2)
    overall = (means * weights).sum(1)[:, None]
    centred = tables - means[:, :, None] - means[:, None, :] + overall[:, :, None]
    root = weights.sqrt()
    values, vectors = torch.linalg.eigh(root[:, :, None] * centred * root[:, None, :])
    order = values.abs().argsort(1, descending=True)[:, None, :AXES]
    found = vectors.gather(2, order.expand(-1, len(root[0]), -1))
    found = found * values.abs().gather(1, order[:, 0])[:, None, :]
    used = torch.where(root > 0, root, torch.inf)[:, :, None]
    return torch.cat([found / used, (means - overall)[:, :, None]], 2)


def _padded(parts: Sequence[Any], size: int) -> Tensor:
    """Stack tables (n, q) as (S, size, q)."""
    stacked: Tensor = parts[0].new_zeros(len(parts), size, parts[0].shape[1])
    for place, part in enumerate(parts):
        stacked[place, : len(part)] = part
    return stacked
