"""Points grouped in space: leaves of equal size by recursive median splits, with their boxes."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._tensors.operations import quotient

# Points in a leaf at most: fewer make tighter boxes, more make fewer pairs of boxes. [L151]
_LEAF_POINTS = 64
# With so many levels or more, the first three together may have 5, 6 or 7 parts, so that leaves are
# nearly full: those of 10,000,000 points have 62 points in place of 39. [L791]
_MANY_LEVELS = 9


class Leaves(NamedTuple):
    """Points in leaves of equal size, 2^h or 5 to 7 times that, padded with copies of points."""

    row: Tensor  # (leaves, size) int64, row of each point; -1 for a copy
    points: Tensor  # (leaves, size, d) float64
    low: Tensor  # (leaves, d) float64, corner of the box of each leaf
    high: Tensor  # (leaves, d) float64

    def at(self, index: Tensor | slice) -> "Leaves":
        """Choose some of the leaves."""
        return Leaves(*(part[index] for part in self))

    @property
    def order(self) -> Tensor:
        """Rows of the points leaf by leaf, each filled up to a tile with -1."""
        missing = -self.row.shape[1] % _LEAF_POINTS
        return torch.nn.functional.pad(self.row, (0, missing), value=-1).flatten()


def _splits(n: int) -> list[int]:
    """Choose into how many parts each level splits n points."""
    height = max(0, math.ceil(math.log2(n / _LEAF_POINTS)))
    splits = [2] * height
    if height >= _MANY_LEVELS and (parts := math.ceil(n / (_LEAF_POINTS * 2 ** (height - 3)))) < 8:
        splits[:3] = [parts]
    return splits


def leaf_count(n: int) -> int:
    """Count the leaves of n points."""
    return math.prod(_splits(n))


def into_leaves(points: Tensor) -> Leaves:
    """Split points (n, d) into equal parts along their widest coordinate until leaves are small."""
    # all nodes of a level have the same size, so that a level is one sort of a rectangular table
    n, d = points.shape
    points, splits, leaves = points.detach().double(), _splits(n), leaf_count(n)
    size = -(-n // leaves)
    padding = size * leaves - n
    row = torch.arange(n, device=points.device)
    # the copies are of points from all over, so that no leaf holds copies alone
    copied = quotient(torch.arange(padding, device=points.device) * n, max(padding, 1))
    row = torch.cat([row, torch.full_like(copied, -1)])[None]
    points = torch.cat([points, points[copied]])[None]
    for split in splits:
        widest = (points.amax(dim=1) - points.amin(dim=1)).argmax(dim=1)
        key = points.gather(2, widest[:, None, None].expand(-1, points.shape[1], 1))[:, :, 0]
        order = key.argsort(dim=1)
        nodes = split * len(row)
        row = row.gather(1, order).reshape(nodes, -1)
        points = points.gather(1, order[:, :, None].expand(-1, -1, d)).reshape(nodes, -1, d)
    return Leaves(row, points, points.amin(dim=1), points.amax(dim=1))


def box_gaps(query: Leaves, base: Leaves) -> Tensor:
    """Compute squared distances between the boxes of leaves, (query leaves, base leaves)."""
    low, high = query.low, query.high
    total = low.new_zeros(len(low), len(base.low))
    for axis in range(low.shape[1]):
        # at least one of the two is zero
        above = (base.low[:, axis] - high[:, axis, None]).clamp_(min=0)
        below = (low[:, axis, None] - base.high[:, axis]).clamp_(min=0)
        total.add_(above.add_(below).mul_(above))
    return total


def pair_squares(one: Tensor, other: Tensor) -> Tensor:
    """Compute squared distances (g, p, q) of points (g, p, d), (g, q, d) from their differences."""
    # in few dimensions a GPU is far quicker at this than at torch.cdist, which has a block of
    # threads for each distance
    total = one.new_zeros(one.shape[0], one.shape[1], other.shape[1])
    for axis in range(one.shape[2]):
        difference = one[:, :, None, axis] - other[:, None, :, axis]
        total.add_(difference.mul_(difference))
    return total
