"""Losses: how the distance of two source points is compared with that of two target points.

Whatever the loss, what a plan costs is (docs/algorithm.md, equations 33 and 34)

    loss(x, y) = f_X(x) + f_Y(y) - 2 h(x, y)

with terms of one side alone and a cross term. For the square and the KL loss h is the product of a
function of x and one of y, so that all of the square loss's machinery works on the distances after
these functions. |x - y| = x + y - 2 min(x, y) has no such h, but one that is a mean of products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from torchgw._errors import InvalidInputError
from torchgw.distances.base import DerivedDistance, DistanceProvider

__all__ = [
    "ABSOLUTE",
    "Entrywise",
    "EntrywiseDistance",
    "KL",
    "LOSSES",
    "Levels",
    "Loss",
    "LossName",
    "SQUARE",
    "find_loss",
    "identity",
    "spread_parts",
    "sums",
    "transformed",
]

LossName = Literal["square", "kl", "absolute"]
# A function of every distance on its own.
Entrywise = Callable[[Tensor], Tensor]
# What is added to a distance in a logarithm, as in POT: a distance of zero has none.
_LOG_OFFSET = 1e-18


def identity(distance: Tensor) -> Tensor:
    """Return the distances."""
    return distance


def _log(distance: Tensor) -> Tensor:
    # approximate distances may be slightly negative
    return distance.clamp_min(0).add_(_LOG_OFFSET).log_()


def _half_log(distance: Tensor) -> Tensor:
    return _log(distance).div_(2)


def _entropy(distance: Tensor) -> Tensor:
    """Return x log x - x."""
    return (_log(distance) - 1).mul_(distance)


def _raised(function: Entrywise, floor: float, distance: Tensor) -> Tensor:
    """Return a function of distances none of which is below the floor."""
    return function(distance.clamp_min(floor))


@dataclass(frozen=True)
class Loss:
    """loss(x, y) = own[0](x) + own[1](y) - 2 h(x, y), h the cross term.

    Attributes
    ----------
    name : str
    own : pair of functions
        Of a source distance and of a target distance.
    cross : pair of functions or None
        Of which h is the product; ``None`` for the minimum of x and y.
    singular : bool
        Whether a distance of zero costs out of all proportion.
    linear_below : float
        Change of the plan below which outer iterations can be extrapolated: there they are close to
        linear, and no longer at a saddle point.
    floor : float
        Target distances below it count as this in the cross term, see :meth:`bounded`.
    levels : Levels or None
        By which a minimum is split into products, see :meth:`split`.
    """

    name: str
    own: tuple[Entrywise, Entrywise]
    cross: tuple[Entrywise, Entrywise] | None
    singular: bool = False
    linear_below: float = 1e-2
    floor: float = 0.0
    levels: Levels | None = None

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of distances of any shape."""
        if self.cross is None:
            return (x - y).abs()
        cross = self.cross[0](x) * self.cross[1](y)
        return self.own[0](x) + self.own[1](y) - 2 * cross

    def bounded(self, floor: float) -> Loss:
        """Return the loss whose cross term takes target distances below ``floor`` for that."""
        known = LOSSES[self.name].cross
        if floor == 0 or known is None:
            return self
        near, far = known
        return replace(self, cross=(near, partial(_raised, far, floor)), floor=floor)

    def split(self, levels: Levels | None) -> Loss:
        """Return the loss with its cross term, if that is no product, as a mean of products.

        min(x, y) is the integral over t of [x > t] [y > t], which levels in equal steps approximate
        to half a step.
        """
        return self if self.cross is not None else replace(self, levels=levels)

    @property
    def parts(self) -> int:
        """Number of products that the cross term is the mean of."""
        return 1 if self.levels is None else self.levels.steps

    def part(self, side: int, distance: Tensor, parts: Tensor) -> Tensor:
        """Return the factor of one side (0 or 1) in each of some products.

        Parameters
        ----------
        side : int
        distance : Tensor, shape (..., s)
        parts : Tensor of int64, shape (s,) or ()
            Which product.
        """
        if self.cross is not None:
            return self.cross[side](distance)
        assert self.levels is not None
        above = distance > (parts + 0.5) * (self.levels.reach / self.levels.steps)
        return above.to(distance.dtype) * (self.levels.reach if side == 0 else 1.0)

    def sides(
        self, source: DistanceProvider, target: DistanceProvider
    ) -> tuple[DistanceProvider, DistanceProvider] | None:
        """Return what the cross term is a product of: distances after their functions."""
        if self.cross is None:
            return None
        return transformed(source, self.cross[0]), transformed(target, self.cross[1])


class Levels(NamedTuple):
    """Equal steps from zero to ``reach``."""

    reach: float
    steps: int


SQUARE = Loss("square", (torch.square, torch.square), (identity, identity))
KL = Loss("kl", (_entropy, identity), (identity, _half_log), singular=True, linear_below=1e-4)
ABSOLUTE = Loss("absolute", (identity, identity), None)
LOSSES = {loss.name: loss for loss in (SQUARE, KL, ABSOLUTE)}


def find_loss(name: Any) -> Loss:
    """Return a loss by name; InvalidInputError for an unknown one."""
    if not isinstance(name, str) or name not in LOSSES:
        known = ", ".join(repr(known) for known in get_args(LossName))
        raise InvalidInputError(f"`loss` must be one of {known}; got {name!r}.")
    return LOSSES[name]


class EntrywiseDistance(DerivedDistance):
    """A function of every distance of another provider; no distances of their own.

    Parameters
    ----------
    provider : DistanceProvider
    function : callable
    """

    def __init__(self, provider: DistanceProvider, function: Entrywise) -> None:
        super().__init__(provider)
        self.function = function
        # made once it is asked for
        self._matrix: Tensor | None = None

    def columns(self, index: Tensor) -> Tensor:
        """Return the function of D[:, index]."""
        if self._matrix is not None:
            return self._matrix[index].T
        return self.function(self.provider.columns(index))

    def of(self, provider: DistanceProvider) -> EntrywiseDistance:
        """Return the same function of the distances of another provider."""
        return EntrywiseDistance(provider, self.function)

    def matrix(self) -> Tensor | None:
        """Return the function of D if D is stored."""
        if self._matrix is None and (matrix := self.provider.matrix()) is not None:
            self._matrix = self.function(matrix)
        return self._matrix

    def apply(self, values: Tensor) -> Tensor:
        """Return the product with values, (n, c)."""
        matrix = self.matrix()
        return super().apply(values) if matrix is None else matrix @ values


def spread_parts(count: int, parts: int, device: torch.device) -> Tensor:
    """Return a part for each of some samples, any number in a row evenly over all parts."""
    order = torch.arange(count, dtype=torch.float64, device=device)
    # multiples of the golden ratio modulo one fill [0, 1] evenly
    return ((order * 0.6180339887498949) % 1 * parts).long()


def transformed(provider: DistanceProvider, function: Entrywise) -> DistanceProvider:
    """Return a function of the distances of a provider."""
    return provider if function is identity else EntrywiseDistance(provider, function)


def sums(provider: DistanceProvider, function: Entrywise, weights: Tensor) -> Tensor:
    """Return function(D) @ weights, shape (n,), by what the provider is fastest at."""
    if function is torch.square:
        return provider.mean_square(weights)
    return transformed(provider, function).apply(weights[:, None])[:, 0]
