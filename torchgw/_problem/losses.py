"""Losses: how the distance of two source points is compared with that of two target points.

Every loss has the form (docs/algorithm.md, equations 33 and 34)

    loss(x, y) = f_X(x) + f_Y(y) - 2 h(x, y)

with terms of one side alone and a cross term h. For the square and the KL loss h is a function of x
times one of y, so that whatever serves the square loss serves the others on these functions of the
distances. |x - y| = x + y - 2 min(x, y) has no such h.

A loss is one entry of ``LOSSES``; everything in which losses differ is written there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from torchgw._boundary.checks import check_choice
from torchgw._errors import UnsupportedError
from torchgw.distances.base import DistanceProvider, Entrywise, ScaledDistance
from torchgw.distances.nystrom import NystromDistance

LossName = Literal["square", "kl", "absolute"]
# Added to distances inside logarithms, as in POT: zero has no logarithm. [L274]
_LOG_OFFSET = 1e-18


def identity(distance: Tensor) -> Tensor:
    """Give the distances back as they are."""
    return distance


def _log(distance: Tensor) -> Tensor:
    # approximate distances may be slightly negative
    return distance.clamp_min(0).add_(_LOG_OFFSET).log_()


def _half_log(distance: Tensor) -> Tensor:
    return _log(distance).div_(2)


def _entropy(distance: Tensor) -> Tensor:
    """Compute x log x - x."""
    return (_log(distance) - 1).mul_(distance)


def _absolute_difference(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).abs()


@dataclass(frozen=True)
class Loss:
    """A loss of a source distance x and a target distance y, own[0](x) + own[1](y) - 2 h(x, y)."""

    name: LossName
    own: tuple[Entrywise, Entrywise]  # of x and of y
    cross: tuple[Entrywise, Entrywise] | None  # h(x, y) is their product; None for min(x, y)
    # The whole loss, where the sum of its terms loses digits to rounding.
    direct: Callable[[Tensor, Tensor], Tensor] | None = None
    order: int | None = None  # power p of the loss |x - y|^p; None for other losses
    singular: bool = False  # whether the loss is unbounded for target distances near zero
    # Change of a plan below which outer iterations can be extrapolated: they are close to linear
    # then, and no longer at a saddle point.
    linear_below: float = 1e-2
    pot: str | None = None  # POT's name of it

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Evaluate the loss of distances of any shape."""
        if self.direct is not None:
            return self.direct(x, y)
        own = self.own[0](x) + self.own[1](y)
        if self.cross is None:
            return own - 2 * torch.minimum(x, y)
        return own - 2 * (self.cross[0](x) * self.cross[1](y))

    @property
    def is_square(self) -> bool:
        """Whether this is (x - y)^2, for which closed forms are known."""
        return self.own == SQUARE.own and self.cross == SQUARE.cross

    @property
    def parts(self) -> int:
        """Number of products that the cross term is the mean of."""
        return 1

    def part(self, side: int, distance: Tensor, parts: Tensor) -> Tensor:
        """Evaluate the factor of side 0 or 1, (..., s), in the products named by ``parts`` (s,)."""
        assert self.cross is not None
        return self.cross[side](distance)

    def crossed(
        self, source: DistanceProvider, target: DistanceProvider
    ) -> tuple[DistanceProvider, DistanceProvider] | None:
        """Pair the functions of the distances whose product h is; ``None`` if it is no product."""
        if self.cross is None:
            return None
        return transformed(source, self.cross[0]), transformed(target, self.cross[1])


SQUARE = Loss("square", (torch.square, torch.square), (identity, identity), order=2, pot="L2")
KL = Loss(
    "kl", (_entropy, identity), (identity, _half_log), singular=True, linear_below=1e-4, pot="KL"
)
ABSOLUTE = Loss("absolute", (identity, identity), None, direct=_absolute_difference, order=1)
LOSSES: dict[str, Loss] = {loss.name: loss for loss in (SQUARE, KL, ABSOLUTE)}


def find_loss(name: Any) -> Loss:
    """Look a loss up by its name; InvalidInputError for an unknown one."""
    check_choice("loss", name, tuple(LOSSES))
    return LOSSES[name]


def check_loss(loss: Loss, target: DistanceProvider) -> None:
    """Refuse target distances that are too inexact for a loss."""
    inner = target.provider if isinstance(target, ScaledDistance) else target
    if loss.singular and isinstance(inner, NystromDistance):
        raise UnsupportedError(
            f"`loss={loss.name!r}` depends on the ratios of small distances of Y, and small "
            "distances from landmarks have large relative errors. Pass distances='dijkstra' (or "
            "'precomputed', up to a few thousand points) for Y, or drop `n_landmarks`."
        )


def spread_parts(count: int, parts: int, device: torch.device) -> Tensor:
    """Assign one of some parts to each sample, so that any run of samples has all parts evenly."""
    order = torch.arange(count, dtype=torch.float64, device=device)
    # multiples of the golden ratio modulo one fill [0, 1] evenly
    return ((order * 0.6180339887498949) % 1 * parts).long()


def transformed(provider: DistanceProvider, function: Entrywise) -> DistanceProvider:
    """Wrap a provider so that it gives a function of its distances."""
    return provider if function is identity else provider.mapped(function)


def sums(provider: DistanceProvider, function: Entrywise, weights: Tensor) -> Tensor:
    """Compute function(D) @ weights, shape (n,), in the fastest way of the provider."""
    if function is torch.square:
        return provider.mean_square(weights)
    return transformed(provider, function).apply(weights[:, None])[:, 0]
