"""Plans that begin with a few pairs of points whose distances agree, whatever the others do.

Where two spaces share a part, few pairs within it tell where all of it goes, and pairs outside of
it agree with nothing: pairs are drawn that agree, more are added that agree with these, and what is
judged is how well the share of the points that is to move would agree. A plan between few pairs is
linearised like any other: its cost is the mean squared difference of distances to these pairs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

# Pairs of pairs that are drawn; pairs that each grows to; points by which seeds are judged first;
# and how many times as many seeds grow as are wanted. [L1401]
_DRAWN, _PAIRS, _PROBES, _GROWN = 2_048, 8, 48, 4
# Share of the pairs of target points that counts as being as far apart as a pair of source points,
# at most. [L1401]
_WIDEST = 1 / 16
# Differences that are computed at once. [L1401]
_TOGETHER = 2**24


class Congruent(NamedTuple):
    """Pairs of points, k of each of S seeds."""

    source: Tensor  # (S, k) int64
    target: Tensor  # (S, k)
    errors: Tensor  # (S,) mean squared difference of the distances to them, of the share that fits

    def plans(self, n: int, m: int) -> Tensor:
        """Divide a mass of one among the pairs of each, (S, n, m)."""
        seeds, pairs = self.source.shape
        found = self.errors.new_zeros(seeds, n, m)
        rows = torch.arange(seeds, device=found.device)[:, None]
        found[rows, self.source, self.target] = 1 / pairs
        return found


def congruent_pairs(
    x: Tensor,
    y: Tensor,
    weights: tuple[Tensor, Tensor],
    share: float,
    count: int,
    generator: torch.Generator,
) -> Congruent:
    """Find few pairs of points at equal distances, those first that most others would agree with.

    ``share`` is how much of the source's mass is to find a partner; distances x (n, n), y (m, m)
    and weights (n,), (m,) are float64 on one device, the generator is of the CPU. None are found
    between fewer points than pairs.
    """
    used, there = (side.nonzero()[:, 0] for side in weights)
    if min(len(used), len(there)) < _PAIRS:
        nothing = used.new_zeros(0, _PAIRS)
        return Congruent(nothing, nothing, x.new_zeros(0))
    dx, dy = x[used[:, None], used], y[there[:, None], there]
    mass = weights[0][used]
    drawn = _drawn(dx, dy, mass, generator), _alike_nearby(dx, dy, mass, generator)
    source, target = (torch.cat(parts) for parts in zip(*drawn, strict=True))
    probes = _chosen(mass, min(_PROBES, len(mass)), generator)
    # most disagree with a few of the probes already
    for some, kept in ((probes[: _PROBES // 4], _DRAWN // 4), (probes, _GROWN * count)):
        errors = _trimmed(dx[some], dy, mass[some], source, target, share)
        best = errors.argsort(stable=True)[:kept]
        source, target = source[best], target[best]
    source, target = _grown(dx, dy, mass, source, target, share, generator)
    errors = _trimmed(dx, dy, mass, source, target, share)
    best = errors.argsort(stable=True)[:count]
    return Congruent(used[source[best]], there[target[best]], errors[best])


def _drawn(
    dx: Tensor, dy: Tensor, mass: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw pairs of source points, as many that are as far apart, and a third that fits these."""
    n, m, device = len(dx), len(dy), dx.device
    uniform = torch.rand(5, _DRAWN, device="cpu", generator=generator, dtype=torch.float64)
    uniform = uniform.to(device)
    edges = (mass.cumsum(0) / mass.sum()).contiguous()
    first, second, third = (
        torch.searchsorted(edges, part.contiguous()).clamp_(max=n - 1) for part in uniform[:3]
    )
    second = torch.where(second == first, (second + 1) % n, second)
    order = dy.flatten().argsort(stable=True)
    # the diagonal is no pair
    order = order[order % (m + 1) != 0]
    lengths = dy.flatten()[order]
    place = torch.searchsorted(lengths, dx[first, second].contiguous())
    # how exactly distances agree is not known: pairs are drawn from windows of all widths
    width = torch.exp(uniform[3] * math.log(max(2.0, _WIDEST * len(order))))
    place = (place + ((2 * uniform[4] - 1) * width).round().long()).clamp_(0, len(order) - 1)
    one, other = order[place] // m, order[place] % m
    fits = (dx[third, first][:, None] - dy[one]).square_()
    fits += (dx[third, second][:, None] - dy[other]).square_()
    rows = torch.arange(_DRAWN, device=device)
    fits[rows, one] = fits[rows, other] = torch.inf
    return torch.stack([first, second, third], 1), torch.stack([one, other, fits.argmin(1)], 1)


def _alike_nearby(
    dx: Tensor, dy: Tensor, mass: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw source points, partners whose nearest points are as far, and two more pairs that fit.

    Among many points few pairs are as far apart as two given ones by no chance; what surrounds a
    point is left to chance less, and is the same within a shared part but at its rim.
    """
    m, device = len(dy), dx.device
    count = min(_PAIRS, len(dx) - 1, m - 1)
    near, there = (table.sort(1).values[:, 1 : count + 1] for table in (dx, dy))
    unlike = torch.cdist(near, there).square_() / count
    uniform = torch.rand(4, _DRAWN, device="cpu", generator=generator, dtype=torch.float64)
    edges = (mass.cumsum(0) / mass.sum()).contiguous()
    uniform = uniform.to(device)
    source = torch.searchsorted(edges, uniform[:3].contiguous()).clamp_(max=len(dx) - 1).T
    # how much is alike is not known: partners are drawn from all ranks, those first most often
    rank = torch.exp(uniform[3] * math.log(max(2.0, _WIDEST * m))).long() - 1
    target = unlike.argsort(dim=1, stable=True)[source[:, 0], rank][:, None]
    rows = torch.arange(_DRAWN, device=device)[:, None]
    for place in (1, 2):
        new, before = source[:, place], source[:, :place]
        fits = unlike[new].clone()
        for one, other in zip(before.T, target.T, strict=True):
            fits += (dx[new, one][:, None] - dy[other]).square_()
        fits[rows, target] = torch.inf
        target = torch.cat([target, fits.argmin(1)[:, None]], 1)
    return source, target


def _chosen(mass: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Choose different points."""
    return torch.randperm(len(mass), device="cpu", generator=generator)[:count].to(mass.device)


def _differences(dx: Tensor, dy: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Average squared differences of distances to pairs (S, k), (S, rows, m)."""
    found = dx.new_zeros(len(source), len(dx), len(dy))
    for one, other in zip(source.T, target.T, strict=True):
        found += (dx[:, one].T[:, :, None] - dy[other][:, None, :]).square_()
    return found / source.shape[1]


def _trimmed(
    dx: Tensor, dy: Tensor, mass: Tensor, source: Tensor, target: Tensor, share: float
) -> Tensor:
    """Average how well points fit pairs (S, k) at best, over the share that fits best, (S,)."""
    step = max(1, _TOGETHER // (len(dx) * len(dy)))
    found = []
    for start in range(0, len(source), step):
        some = slice(start, start + step)
        least = _differences(dx, dy, source[some], target[some]).amin(2)
        least, order = least.sort(1)
        moved = mass[order]
        before = moved.cumsum(1) - moved
        inside = (share * mass.sum() - before).clamp_(min=0).minimum(moved)
        found.append((least * inside).sum(1) / inside.sum(1))
    return torch.cat(found)


def _grown(
    dx: Tensor,
    dy: Tensor,
    mass: Tensor,
    source: Tensor,
    target: Tensor,
    share: float,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Add pairs that agree with those (S, k) that there are."""
    rows = torch.arange(len(source), device=dx.device)[:, None]
    fits = _differences(dx, dy, source, target) * source.shape[1]
    fits[rows, source] = torch.inf
    fits.mT[rows, target] = torch.inf
    while source.shape[1] < _PAIRS:
        least, partner = fits.min(2)
        # any of those that fit best: the very best ones lie next to those that there are
        kept = max(1, int(share * len(mass)) - source.shape[1])
        drawn = torch.rand(len(source), device="cpu", generator=generator, dtype=torch.float64)
        place = (drawn.to(dx.device) * kept).long().clamp_(max=kept - 1)[:, None]
        new = least.argsort(dim=1, stable=True).gather(1, place)
        match = partner.gather(1, new)
        fits += _differences(dx, dy, new, match)
        fits[rows, new] = torch.inf
        fits.mT[rows, match] = torch.inf
        source, target = torch.cat([source, new], 1), torch.cat([target, match], 1)
    return source, target
