"""Points ordered into compact blocks, by halving them again and again."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._tensors.operations import lengths

# Steps of power iteration towards the direction in which a segment is widest. [L299]
_POWER_STEPS = 3


class Order(NamedTuple):
    """Points of one side in blocks of ``width``; the last block may be shorter."""

    point: Tensor  # (n,) int64, the point at each place
    place: Tensor  # (n,) int64, place of each point
    width: int

    @classmethod
    def of(cls, point: Tensor, width: int) -> "Order":
        """Make blocks of points in some order."""
        place = torch.empty_like(point)
        place[point] = torch.arange(len(point), device=point.device)
        return cls(point, place, width)

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return math.ceil(len(self.point) / self.width)

    def split(self, values: Tensor, fill: float | None = None) -> Tensor:
        """Arrange values (n, ...) in blocks, filled up by ``fill`` or by the last point."""
        missing, point = self.blocks * self.width - len(self.point), self.point
        if missing and fill is None:
            point = torch.cat([point, point[-1:].expand(missing)])
        ordered = values[point]
        if missing and fill is not None:
            end = torch.full_like(ordered[-1:], fill).expand(missing, *ordered.shape[1:])
            ordered = torch.cat([ordered, end])
        return ordered.unflatten(0, (self.blocks, self.width))

    def join(self, values: Tensor) -> Tensor:
        """Arrange values (blocks, width, ...) in the order of the points again."""
        return values.flatten(0, 1)[self.place]


def block_order(points: Tensor, width: int) -> Order:
    """Order points (n, r) so that blocks of ``width`` are compact in Euclidean distance."""
    # Segments are halved along their widest direction, at multiples of ``width`` points, so that
    # only the last block is short.
    n = len(points)
    levels = (math.ceil(n / width) - 1).bit_length()
    order = torch.arange(width << levels, device=points.device)
    for level in range(levels):
        segments = order.view(1 << level, -1)
        inside = segments < n
        # the parts beyond the last point are empty, and stay at the end
        used = int(inside[:, 0].sum())
        segments, inside = segments[:used], inside[:used]
        coordinate = _along_widest(points[segments.clamp(max=n - 1)], inside)
        turn = torch.where(inside, coordinate, torch.inf).argsort(dim=1, stable=True)
        order = torch.cat([segments.gather(1, turn).flatten(), order[segments.numel() :]])
    return Order.of(order[:n], width)


def _along_widest(points: Tensor, inside: Tensor) -> Tensor:
    """Compute coordinates of points (s, l, r), overwritten, along their segment's widest axis."""
    # the direction is found by power iteration, which begins with the widest axis
    weight = inside.to(points.dtype)
    mean = torch.einsum("slr,sl->sr", points, weight) / weight.sum(1)[:, None]
    points.sub_(mean[:, None]).mul_(weight[..., None])
    direction = torch.nn.functional.one_hot((points * points).sum(1).argmax(1), points.shape[2]).to(
        points.dtype
    )
    for _ in range(_POWER_STEPS):
        along = torch.einsum("slr,sr->sl", points, direction)
        direction = torch.einsum("slr,sl->sr", points, along)
        direction = direction / lengths(direction, 1, keepdim=True).clamp_min(1e-12)
    return torch.einsum("slr,sr->sl", points, direction)
