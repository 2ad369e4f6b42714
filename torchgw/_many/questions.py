"""Many problems between shelved spaces, as they are asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._batch.stopping import Rules
from torchgw._boundary.cache import content_key
from torchgw._many.shelves import Shelves


class Relaxations(NamedTuple):
    """How marginals of B problems are relaxed, if they are: by penalties or by bounds."""

    penalties: NDArray[np.float64] | None = None  # (B, 2) weights of both sides
    mass: NDArray[np.float64] | None = None  # (B,) share of the mass that is moved

    def used(self, count: int) -> NDArray[np.bool_]:
        """Tell which problems have relaxed marginals, (B,)."""
        if self.mass is not None:
            return np.asarray(self.mass < 1)
        if self.penalties is not None:
            return np.asarray(np.isfinite(self.penalties).any(1))
        return np.full(count, False)

    def repeated(self, count: int) -> Relaxations:
        """Repeat what holds for one problem for so many."""
        return Relaxations(*(None if part is None else part.repeat(count, 0) for part in self))

    def of(self, numbers: NDArray[np.int64], turned: NDArray[np.bool_]) -> Relaxations:
        """Take some problems, with their sides exchanged where they are ``turned``."""
        penalties, mass = (None if part is None else part[numbers] for part in self)
        if penalties is not None:
            penalties = np.where(turned[:, None], penalties[:, ::-1], penalties)
        return Relaxations(penalties, mass)

    def arguments(self, number: int) -> dict[str, Any]:
        """Make the arguments of one problem for :func:`torchgw.solve`."""
        penalties, mass = (None if part is None else part[number].tolist() for part in self)
        return {"unbalanced": penalties and tuple(penalties), "mass": mass}


class Sharpening(NamedTuple):
    """How plans of B problems become sharp, if they do."""

    proximal: NDArray[np.bool_] | None = None  # (B,) KL(P | last plan) for KL(P | a x b)
    polish: NDArray[np.bool_] | None = None  # (B,) conditional gradient steps at the end

    def used(self, count: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Tell which problems take proximal steps, and which are polished, (B,) each."""
        proximal, polish = (np.full(count, False) if part is None else part for part in self)
        return proximal, polish

    def alike(self) -> Sharpening:
        """Take what holds for all problems, as that of one."""
        return Sharpening(*(None if part is None else np.array([part.all()]) for part in self))

    def repeated(self, count: int) -> Sharpening:
        """Repeat what holds for one problem for so many."""
        return Sharpening(*(None if part is None else part.repeat(count) for part in self))

    def of(self, numbers: NDArray[np.int64]) -> Sharpening:
        """Take some problems."""
        return Sharpening(*(None if part is None else part[numbers] for part in self))

    def arguments(self, number: int) -> dict[str, Any]:
        """Make the arguments of one problem for :func:`torchgw.solve`."""
        proximal, polish = (part is not None and bool(part[number]) for part in self)
        return {"regularization": "proximal" if proximal else "entropic", "polish": polish}


@dataclass(frozen=True)
class Questions:
    """B problems between shelved spaces."""

    shelves: Shelves
    i: NDArray[np.int64]
    j: NDArray[np.int64]
    alpha: NDArray[np.float64]
    epsilon: NDArray[np.float64]  # NaN for "auto"
    # M of each problem, (n, m) float64; from a stack without its padding
    tables: Sequence[Tensor] | Tensor | None = None
    squared: bool = True  # whether distances of features are squared
    n_init: int | None = None  # starts; None is a search
    rules: Rules = field(default_factory=Rules)
    marginals: Relaxations = Relaxations()
    sharpening: Sharpening = Sharpening()

    def __len__(self) -> int:
        """Count the problems."""
        return len(self.i)

    def some(self, numbers: Tensor) -> Questions:
        """Take some of the problems."""
        at, tables = numbers.numpy(), self.tables
        if isinstance(tables, Tensor):
            tables = tables[numbers.to(tables.device)]
        elif tables is not None:
            tables = [tables[number] for number in at]
        return replace(
            self, i=self.i[at], j=self.j[at], alpha=self.alpha[at], epsilon=self.epsilon[at],
            tables=tables, marginals=self.marginals.of(at, np.full(len(at), False)),
            sharpening=self.sharpening.of(at),
        )  # fmt: skip

    def key(self) -> str:
        """Hash everything that the answers depend on."""
        shelves, tables = self.shelves, self.tables
        large = (shelves.padded == 0).nonzero()[0]
        content: list[Any] = [part for stack in shelves.stacks.values() for part in stack[:2]]
        content += shelves.features.values()
        content += (part for number in large for part in shelves.spaces[number])
        content += tables if isinstance(tables, list) else [tables]
        given = self.i, self.j, self.alpha, self.epsilon, *self.marginals, *self.sharpening
        for part in (shelves.sizes, *given):
            content.append(None if part is None else torch.from_numpy(np.array(part)))
        return content_key("many", *content, self.squared, self.n_init, tuple(self.rules))

    def arguments(self, number: int) -> dict[str, Any]:
        """Make the arguments of one problem for :func:`torchgw.solve`."""
        source, target = (self.shelves.spaces[side[number]] for side in (self.i, self.j))
        linear = None if self.tables is None else self.tables[number]
        if linear is not None:
            linear = linear[: len(source.table), : len(target.table)]
        if source.features is not None and target.features is not None:
            linear = self.feature_costs(source.features, target.features)
        fused = {} if linear is None else {"M": linear, "alpha": float(self.alpha[number])}
        sides = {"D_X": source.table, "D_Y": target.table, "a": source.weights, "b": target.weights}
        return {**sides, **fused, **self.marginals.arguments(number)}

    def feature_costs(self, source: Tensor, target: Tensor) -> Tensor:
        """Compute M of features (..., n, d) and (..., m, d), by operations that go pair by pair."""
        cost = torch.cdist(source, target, compute_mode="donot_use_mm_for_euclid_dist")
        return cost.square_() if self.squared else cost
