"""Labels: which of many points each of some others goes to, improved from many seeds at once.

Where the masses of one side are free, or some are left out, a plan is little more than a choice of
one partner, a label, for each point. The points of a block are labelled anew while the others keep
theirs, as in iterated conditional modes [1]: the cost of a label is that of a matrix product. Each
seed of few pairs becomes a local optimum of few points, and only the lowest ones are followed by
plans.

[1] J. Besag. On the statistical analysis of dirty pictures. J. R. Stat. Soc. B 1986.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._starts.alternatives import OTHER
from torchgw._starts.guesses import TOGETHER, congruent_pairs, differences, inside_share
from torchgw._tensors.operations import accumulate

# Points that are labelled, and points that are labels, at most. [L1840]
POINTS, LABELS = 96, 300
# Seeds that are improved; sweeps after which so many of the lowest are left; and the blocks that a
# sweep goes through. [L1840]
_SEEDS, _STAGES, _BLOCKS = 256, ((2, 64), (6, 16), (24, 8)), 8


class Labelled(NamedTuple):
    """S choices of partners, those of lowest cost first, none near another."""

    partners: Tensor  # (S, s) int64, of each point
    masses: Tensor  # (S, s) that each point sends there; points that are left out send none
    costs: Tensor  # (S,) sum over pairs of points of squared differences of distances, and of M
    met: Tensor  # (S,) float64, seeds that have come to each, or near it

    def plans(self, m: int) -> Tensor:
        """Write plans (S, s, m) of mass one."""
        found = self.masses.new_zeros(*self.partners.shape, m, dtype=torch.float64)
        found.scatter_(2, self.partners[..., None], self.masses.double()[..., None])
        return found / found.sum((1, 2), keepdim=True)


def label_points(
    x: Tensor,
    y: Tensor,
    weights: tuple[Tensor, Tensor],
    share: float,
    generator: torch.Generator,
    near: tuple[Tensor, Tensor] | None = None,
    linear: Tensor | None = None,
) -> Labelled:
    """Find the labels of lowest cost, from seeds of pairs at equal distances.

    ``share`` is how much of the source's mass is to find a partner; distances x (s, s), y (t, t)
    and weights (s,), (t,) are float64 on one device, the generator is of the CPU. What surrounds
    the points may be ``near``, as for :func:`congruent_pairs`. A ``linear`` cost M (s, t), in the
    unit of squared distances, is added to that of each point.
    """
    seeds = congruent_pairs(x, y, weights, share, _SEEDS, generator, near)
    # which labels cost less is told in float32, and plans are followed in float64
    mass, dx, dy = (part.float() for part in (weights[0], x, y))
    # of a pair of points each has half the cost
    own = dx.new_zeros(len(dx), len(dy)) if linear is None else linear.float() / 2
    found = [seeds.source.new_zeros(0, len(dx))]
    for pairs in _together(dx, dy, seeds.source, seeds.target):
        found.append(differences(dx, dy, *pairs).add_(own, alpha=1 / share).argmin(2))
    partners = torch.cat(found)
    misfits = partial(_misfits, dx, dy, own)
    masses = inside_share(misfits(partners, mass.expand(partners.shape)), mass, share)
    met = partners.new_ones(len(partners), dtype=torch.float64)
    for sweeps, kept in _STAGES:
        for _ in range(sweeps):
            before = partners.clone()
            order = torch.randperm(len(dx), device="cpu", generator=generator).to(dx.device)
            _sweep(dx, dy, own, partners, masses, order.split(math.ceil(len(dx) / _BLOCKS)))
            masses = inside_share(misfits(partners, masses), mass, share)
            if torch.equal(before, partners):
                break
        costs = ((misfits(partners, masses) + _at(own, partners)) * masses).sum(1)
        # where points that both leave out are sent says nothing
        apart = dy[partners[:, None], partners].square_() * (masses[:, None] + masses) / (2 * share)
        lowest, group = _divided(costs, apart.sum(2) <= OTHER**2 * dy.square().mean())
        partners, masses, costs = (part[lowest[:kept]] for part in (partners, masses, costs))
        met = accumulate(group, met, len(lowest))[:kept]
    return Labelled(partners, masses, costs, met)


def _together(dx: Tensor, dy: Tensor, *parts: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Divide seeds into those of which tables (k, s, t) are held at once."""
    step = max(1, TOGETHER // (len(dx) * len(dy)))
    return zip(*(part.split(step) for part in parts), strict=True)


def _at(own: Tensor, partners: Tensor) -> Tensor:
    """Read the costs of points (s, t) at their partners, (S, s)."""
    return own.expand(len(partners), -1, -1).gather(2, partners[..., None])[..., 0]


def _sweep(
    dx: Tensor,
    dy: Tensor,
    own: Tensor,
    partners: Tensor,
    masses: Tensor,
    blocks: tuple[Tensor, ...],
) -> None:
    """Give the points of one block after the other the labels that cost least beside the others."""
    squares = dy.square()
    for labels, mass in _together(dx, dy, partners, masses):
        sent = dy[labels] * mass[:, :, None]  # (k, s, t)
        for block in blocks:
            cost = torch.bmm(mass[:, None], squares[labels]) - 2 * dx[block] @ sent
            # how far a point is from its own label says nothing
            cost -= squares[labels[:, block]] * mass[:, block, None]
            cost += own[block]
            labels[:, block] = cost.argmin(2)
            sent[:, block] = dy[labels[:, block]] * mass[:, block, None]


def _misfits(dx: Tensor, dy: Tensor, own: Tensor, partners: Tensor, masses: Tensor) -> Tensor:
    """Sum the squared differences of distances to all points by mass, with own costs, (S, s)."""
    found = [masses[:0]]
    for labels, mass in _together(dx, dx, partners, masses):
        apart = (dx - dy[labels[:, :, None], labels[:, None]]).square_()
        found.append((apart @ mass[:, :, None])[:, :, 0])
    return torch.cat(found) + _at(own, partners)


def _divided(costs: Tensor, near: Tensor) -> tuple[Tensor, Tensor]:
    """Group labels around those that are near none of lower cost; tell all groups."""
    order = costs.argsort(stable=True).tolist()
    group, chosen, taken = [0] * len(order), list[int](), near.tolist()
    for one in order:
        nearest = (place for place, other in enumerate(chosen) if taken[one][other])
        group[one] = next(nearest, len(chosen))
        chosen += [one] * (group[one] == len(chosen))
    index = partial(torch.tensor, dtype=torch.int64, device=costs.device)
    return index(chosen), index(group)
