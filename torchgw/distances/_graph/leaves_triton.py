"""Nearest neighbours among the leaves of a tree, in one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchgw._tensors.ahead import launch
from torchgw._tensors.operations import quotient
from torchgw.distances._graph.leaves import Leaves

# Boxes that a program compares with its own at once, and leaves in a group of them. [L538]
_BOXES = 64
# Warps of a program: so few that each query point has a thread. [L830]
_WARPS = 2
# The bits of an infinite float64.
_INFINITE = tl.constexpr(0x7FF0000000000000)


@triton.jit
def _bound(worst):
    """Compute the squared distance from which on leaves cannot hold anything nearer."""
    bits = tl.max(worst, axis=0) & -64
    return bits.to(tl.float64, bitcast=True) * (1 + 1e-13)


@triton.jit
def _gaps(boxes, at, inside, box, d):
    """Compute squared distances between a box, low and high corner, and others; else infinity."""
    total = tl.where(inside, 0.0, float("inf")).to(tl.float64)
    for axis in range(d):
        low = tl.load(boxes + at.to(tl.int64) * 2 * d + axis, mask=inside, other=0.0)
        high = tl.load(boxes + at.to(tl.int64) * 2 * d + d + axis, mask=inside, other=0.0)
        gap = tl.maximum(low - tl.load(box + d + axis), tl.load(box + axis) - high)
        gap = tl.maximum(gap, 0.0)
        total += gap * gap
    return total


@triton.jit
def _visit(query, real, leaf, points, row, size, d, score, place, worst, POINTS: tl.constexpr):
    """Offer the points of a leaf to the lists of some query points."""
    # A thread holds all distances of a query point: nothing passes between threads.
    lane = tl.arange(0, POINTS)
    slot = tl.arange(0, score.shape[0])
    inside = lane < size
    first = leaf.to(tl.int64) * size
    total = tl.zeros((POINTS, POINTS), tl.float64)
    for axis in range(d):
        x = tl.load(query + axis, mask=real, other=0.0)
        y = tl.load(points + (first + lane) * d + axis, mask=inside, other=0.0)
        difference = x[None, :] - y[:, None]
        total += difference * difference
    known = tl.load(row + first + lane, mask=inside, other=-1) >= 0
    # A square is not negative: its bits order it. The last six make room for the point, so that one
    # integer is minimised. Neighbours whose squares agree up to 1e-13 count as equally near.
    key = tl.where(known[:, None], total, float("inf")).to(tl.int64, bitcast=True)
    key = (key & -64) | lane[:, None]
    least = tl.min(key, axis=0)
    while tl.max(((least >> 6) < (worst >> 6)).to(tl.int32), axis=0) > 0:
        take = (least >> 6) < (worst >> 6)
        replaced = (slot[:, None] == (worst & 63)[None, :]) & take[None, :]
        score = tl.where(replaced, (least & -64)[None, :] | slot[:, None], score)
        at = leaf * size + (least & 63).to(tl.int32)
        place = tl.where(replaced, at[None, :], place)
        worst = tl.where(real, tl.max(score, axis=0), 0)
        key = tl.where(key == least[None, :], _INFINITE, key)
        least = tl.min(key, axis=0)
    return score, place, worst


@triton.jit(do_not_specialize=["groups", "per", "size", "query_size", "d"])
def _in_leaves_kernel(
    points,  # [leaves, size, d] float64
    row,  # [leaves, size] int64, -1 for none
    boxes,  # [leaves, 2, d] float64, low and high corners
    group_boxes,  # [groups, 2, d]
    query,  # [query leaves, query_size, d]
    query_row,  # [query leaves, query_size]
    query_boxes,  # [query leaves, 2, d]
    seeds,  # [query leaves] int32, the group of leaves that each visits first
    best_square,  # [q, KEEP] out
    best_place,  # [q, KEEP] int32 out, places in ``row``
    groups,
    per,  # leaves in a group
    size,
    query_size,
    d,
    KEEP: tl.constexpr,
    POINTS: tl.constexpr,
    BOXES: tl.constexpr,
):
    """Keep the KEEP nearest points of each point of one leaf."""
    # Groups of leaves, and leaves of a group, are visited if they can hold anything nearer, the
    # nearest first.
    me = tl.program_id(0)
    lane = tl.arange(0, POINTS)
    slot = tl.arange(0, KEEP)
    at = me.to(tl.int64) * query_size + lane
    own = tl.load(query_row + at, mask=lane < query_size, other=-1)
    real = own >= 0
    looking = query + at * d
    box = query_boxes + me.to(tl.int64) * 2 * d
    # of each neighbour the first 58 bits of its squared distance, and its slot
    score = tl.full((KEEP, POINTS), _INFINITE, tl.int64) | slot[:, None]
    place = tl.full((KEEP, POINTS), -1, tl.int32)
    # copies of points need no neighbours
    worst = tl.where(real, tl.max(score, axis=0), 0)
    several = tl.arange(0, BOXES)
    first = tl.load(seeds + me)
    # the first turn is the group of the seed alone, the others are some groups each
    for turn in range(1 + tl.cdiv(groups, BOXES)):
        begin = tl.where(turn == 0, first, (turn - 1) * BOXES)
        group = begin + several
        among = tl.where(turn == 0, several == 0, (group < groups) & (group != first))
        far = _gaps(group_boxes, group, among, box, d)
        while tl.min(far, axis=0) < _bound(worst):
            chosen = tl.argmin(far, axis=0)
            far = tl.where(several == chosen, float("inf"), far)
            leaf = (begin + chosen) * per + several
            gap = _gaps(boxes, leaf, several < per, box, d)
            while tl.min(gap, axis=0) < _bound(worst):
                nearest = tl.argmin(gap, axis=0)
                gap = tl.where(several == nearest, float("inf"), gap)
                score, place, worst = _visit(
                    looking, real, (begin + chosen) * per + nearest, points, row, size, d,
                    score, place, worst, POINTS,
                )  # fmt: skip
    out = own[None, :] * KEEP + slot[:, None]
    square = tl.where(place >= 0, 0.0, float("inf")).to(tl.float64)
    for axis in range(d):
        x = tl.load(looking + axis, mask=real, other=0.0)
        found = points + place.to(tl.int64) * d + axis
        difference = x[None, :] - tl.load(found, mask=place >= 0, other=0.0)
        square += difference * difference
    tl.store(best_square + out, square, mask=real[None, :])
    tl.store(best_place + out, place, mask=real[None, :])


def nearest_in_leaves(
    base: Leaves, query: Leaves, seeds: Tensor, n_neighbors: int
) -> tuple[Tensor, Tensor]:
    """Find squared distances and places of the nearest base points, in no order, (q, k or more)."""
    # `seeds` (query leaves,) are near leaves of the base. Places are those in `base.row`; where
    # there are too few points the square is infinite and the place -1.
    keep = max(16, triton.next_power_of_2(n_neighbors))
    per = min(_BOXES, len(base.row))
    boxes, query_boxes = (torch.stack([side.low, side.high], dim=1) for side in (base, query))
    groups = boxes.unflatten(0, (-1, per))
    group_boxes = torch.stack([groups[:, :, 0].amin(1), groups[:, :, 1].amax(1)], dim=1)
    count, device = int(query.row.max()) + 1, query.row.device
    square = torch.empty(count, keep, dtype=torch.float64, device=device)
    place = torch.empty(count, keep, dtype=torch.int32, device=device)
    sizes = base.row.shape[1], query.row.shape[1]
    launch(
        _in_leaves_kernel, (len(query.row),),
        base.points, base.row, boxes, group_boxes, query.points, query.row, query_boxes,
        quotient(seeds, per).int(), square, place, len(group_boxes), per, *sizes,
        base.points.shape[2], KEEP=keep, POINTS=triton.next_power_of_2(max(sizes)), BOXES=_BOXES,
        num_warps=_WARPS,
    )  # fmt: skip
    return square, place
