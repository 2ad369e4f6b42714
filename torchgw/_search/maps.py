"""Maps of one space into another, improved point by point.

Where one marginal is strict and the other one free, the best plans without entropy are maps: each
point of the strict side goes to one point, and several may go to the same. A step sends one point
elsewhere, where that costs least, even if it is more than nothing, and the point does not come back
for a while, as in tabu search over matchings (``exchange.py``). It finds a part of a graph in the
whole one, which no plan comes to that follows epsilon down.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._tensors.deadline import is_over

Array = NDArray[Any]

# Starts, and those of them that are not random; steps of each for each point at most, and after the
# last that helped any; and entries of tables that all may look at. [L1332]
_STARTS, _KNOWN, _STEPS, _PATIENCE, _LOOKED_AT = 32, 8, 64, 24, 2e7
# For how many steps for each point it does not come back, at least and at most. [L1332]
_TENURE = 0.3, 0.6
# Share of the largest change that is rounding. A choice. [L1332]
_ROUNDING = 1e-9
# Maps that are returned at most. [L1332]
_FOLLOWED = 8


class Sides(NamedTuple):
    """A problem of the square loss, whose source has a strict marginal and whose target is free."""

    x: Tensor  # (n, n)
    y: Tensor  # (m, m)
    a: Tensor  # (n,) weights of the source
    alpha: float
    linear: Tensor | None  # (n, m)


def best_maps(sides: Sides, plans: Tensor) -> Tensor:
    """Find the best plans (k, n, m) that are maps.

    Some maps begin at plans (s, n, m), the first of them, the others at random.
    """
    n, m = plans.shape[1:]
    generator = np.random.default_rng(0)
    known = plans[:_KNOWN].argmax(2).cpu().numpy()
    drawn = generator.integers(0, m, (_STARTS - len(known), n))
    search = _Search(sides, np.concatenate([known, drawn]), generator)
    most, last, before = min(_STEPS * n, int(_LOOKED_AT / (_STARTS * n * m))), 0, math.inf
    while search.done < most and search.done - last <= _PATIENCE * n and not is_over():
        search.step()
        if search.least.sum() < before:
            before, last = search.least.sum(), search.done
        if sides.linear is None and search.least.min() <= search.rounding:
            # no map is better than one that keeps all distances
            break
    images, places = np.unique(search.best, axis=0, return_index=True)
    kept = images[search.least[places].argsort()[:_FOLLOWED]]
    found: Tensor = torch.nn.functional.one_hot(torch.from_numpy(kept), m) * sides.a.cpu()[:, None]
    return found


class _Search:
    """Maps of B starts side by side, on the host."""

    # With p the map, c_iu = sum_j a_j (x_ij - y_u p_j)^2 is what a point i at u would see of the
    # others, and of itself where it is now.

    def __init__(self, sides: Sides, images: Array, generator: np.random.Generator) -> None:
        self.x, self.y, self.a = (part.double().cpu().numpy() for part in sides[:3])
        self.alpha, self.images, self.generator = sides.alpha, images, generator
        count, n = images.shape
        self.starts, self.points, self.done = np.arange(count), np.arange(n), 0
        self.linear = np.zeros((n, len(self.y)))
        if sides.linear is not None:
            self.linear = (1 - self.alpha) * sides.linear.double().cpu().numpy()
        squares, own = self.y**2, self.x**2 @ self.a
        there = self.a[:, None] * np.moveaxis(self.y[:, images], 0, 2)
        self.costs = own[:, None] - 2 * self.x @ there
        self.costs += np.einsum("ubj,j->bu", squares[:, images], self.a)[:, None, :]
        here = np.take_along_axis(self.costs, images[:, :, None], 2)[:, :, 0]
        fixed = self.linear[self.points, images]
        self.value = (self.alpha * here + fixed) @ self.a
        self.least, self.best = self.value.copy(), images.copy()
        self.until = np.zeros_like(self.costs)
        # of a point's own pair: what a move changes beside the others
        self.itself = self.x.diagonal()[:, None]
        self.own = (self.itself - self.y.diagonal()) ** 2
        self.rounding = _ROUNDING * float(np.abs(self.value).max() or 1.0)

    def step(self) -> None:
        """Send one point of each start elsewhere."""
        at, a = self.images[:, :, None], self.a[:, None]
        between = np.moveaxis(self.y[:, self.images], 0, 2)
        seen = 2 * self.costs - a * (2 * (self.itself - between) ** 2 - self.own)
        seen = a * (self.alpha * seen + self.linear)
        rise = seen - np.take_along_axis(seen, at, 2)
        np.put_along_axis(rise, at, np.inf, 2)
        flat = rise.reshape(len(rise), -1)
        waiting = (self.until > self.done).reshape(flat.shape)
        free, least = np.where(waiting, np.inf, flat).argmin(1), flat.argmin(1)
        enough = self.least - self.rounding
        place = np.where(self.value + flat[self.starts, least] < enough, least, free)
        self.value += flat[self.starts, place]
        self._move(*np.divmod(place, rise.shape[2]))
        better = (self.value < enough).nonzero()[0]
        self.least[better], self.best[better] = self.value[better], self.images[better]
        self.done += 1

    def _move(self, point: Array, to: Array) -> None:
        """Send points (B,) to others (B,)."""
        before = self.images[self.starts, point]
        waits = len(self.a) * self.generator.uniform(*_TENURE, len(self.starts))
        self.until[self.starts, point, before] = self.done + waits
        self.images[self.starts, point] = to
        new, old = self.y[:, to].T, self.y[:, before].T
        weight = self.a[point][:, None]
        self.costs += (weight * (new**2 - old**2))[:, None, :]
        self.costs -= self.x[:, point].T[:, :, None] * (2 * weight * (new - old))[:, None, :]
