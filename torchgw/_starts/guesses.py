"""Where the starts of a multi-start begin: linear costs whose plans are guesses.

Each guess is a linear cost on the coarse problem, in units of the Gromov-Wasserstein cost, and a
schedule for epsilon. Guesses of different kinds fail on different problems.

Other plans begin with a few pairs of points whose distances agree, whatever the others do.

Where two spaces share a part, few pairs within it tell where all of it goes, and pairs outside of
it agree with nothing: pairs are drawn that agree, more are added that agree with these, and what is
judged is how well the share of the points that is to move would agree. A plan between few pairs is
linearised like any other: its cost is the mean squared difference of distances to these pairs.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._sinkhorn.annealing import Annealing
from torchgw._starts.chain import GUESS_EPSILON
from torchgw._starts.coarse import AXES, CoarseProblem, centre
from torchgw._tensors.operations import TINY, categories_at
from torchgw.distances.sampling import SpreadPoints, distance_quantiles

# How far below the target a ladder goes before it comes back, as a share of it. [L281]
_LADDER = 0.25
# Pairs of pairs that are drawn at least, and for each seed that is wanted; pairs that each seed
# grows to; points by which seeds are judged first; and how many times as many seeds grow as are
# wanted. [L1401, L1861]
_DRAWN, _EACH, _PAIRS, _PROBES, _GROWN = 2_048, 32, 8, 48, 4
# Share of the pairs of target points that counts as being as far apart as a pair of source points,
# at most. [L1401]
_WIDEST = 1 / 16
# Differences that are computed at once. [L1401]
TOGETHER = 2**20


class Starts(NamedTuple):
    """Starts to be solved together, on the host; their costs are made by :func:`start_costs`."""

    labels: tuple[str, ...]
    rotations: Tensor  # (R, rank, rank) float64, of the last R starts
    epsilons: Tensor  # (iterations, B) float64


class Hints(NamedTuple):
    """The axes and distances from which the first costs of starts are made."""

    x_axes: Tensor  # (s, rank), leading axes of the centred table
    y_axes: Tensor  # (t, rank)
    # (2, s, t), squared distances between distributions of distances, and eccentricities
    apart: Tensor


def make_starts(
    scale: float, target: float, count: int, iterations: int, rank: int, *, linear: bool = False
) -> Starts:
    """Return ``count`` starts, the most useful ones first."""
    # The product plan annealed from the natural scale; distance distributions (third lower bound
    # [1]) with and without a ladder of epsilons; eccentricities (first lower bound [1]); the plan
    # of the linear cost alone, if there is one; all signs of `rank` leading axes; then random
    # rotations of these.
    # [1] F. Memoli. Gromov-Wasserstein distances and the metric approach to object matching.
    # Foundations of Computational Mathematics 2011.
    whole = Annealing(max(target, scale), target)
    guess = Annealing(max(target, GUESS_EPSILON * scale), target)
    labels, rotations = _names_and_rotations(count, rank, linear)
    schedules = {ladder: _schedule(guess, iterations, ladder=ladder) for ladder in (False, True)}
    epsilons = [schedules[label.endswith("ladder")] for label in labels]
    epsilons[0] = _schedule(whole, iterations, ladder=False)
    return Starts(labels, rotations, torch.tensor(epsilons, dtype=torch.float64, device="cpu").T)


@functools.lru_cache(maxsize=16)
def _names_and_rotations(count: int, rank: int, linear: bool) -> tuple[tuple[str, ...], Tensor]:
    """Return the names of all starts, and the rotations of those that have one."""
    labels = [
        "annealed",
        "distance distributions",
        "distance distributions, ladder",
        "eccentricities",
        *["linear cost"] * linear,
    ]
    fixed, rotations = len(labels), []
    shape, host = (rank, rank), torch.device("cpu")
    for pattern in range(2**rank):
        signs = [1.0 - 2.0 * (pattern >> axis & 1) for axis in range(rank)]
        labels.append("spectral " + "".join("+" if sign > 0 else "-" for sign in signs))
        rotations.append(torch.tensor(signs, dtype=torch.float64, device=host).diag())
    generator = torch.Generator().manual_seed(0)
    for number in range(count - len(labels)):
        normal = torch.randn(shape, dtype=torch.float64, device=host, generator=generator)
        labels.append(f"rotation {number + 1}" + (", ladder" if number % 2 else ""))
        rotations.append(torch.linalg.qr(normal).Q)
    return tuple(labels[:count]), torch.stack(rotations)[: max(0, count - fixed)]


def start_costs(problem: CoarseProblem, hints: Hints, rotations: Tensor, count: int) -> Tensor:
    """Return the first costs of :func:`make_starts`, (B, s, t) float64."""
    # lower bounds alpha |x_i - y_j|^2 + (1 - alpha) M by signatures x and y
    bounds = problem.alpha * problem.unit * hints.apart
    if problem.linear is not None:
        linear = problem.linear - problem.linear.min()
        bounds = bounds + (1 - problem.alpha) * linear
    guesses = [problem.base, bounds[0], bounds[0], bounds[1]]
    if problem.linear is not None:
        # what few known pairs say is little beside the rest, but all that a match has to keep to
        guesses.append(linear * (problem.spread / linear.std().clamp_min(TINY)))
    # all together: on a GPU each product would take longer to launch than to compute
    weight = 4 * problem.alpha * problem.unit
    turned = problem.base - weight * (hints.x_axes @ rotations) @ hints.y_axes.T
    return torch.cat([torch.stack(guesses[:count]), turned])


def _schedule(anneal: Annealing, iterations: int, *, ladder: bool) -> list[float]:
    """Return epsilon at each iteration; of a ladder, the last quarter is at the target."""
    epsilons = [anneal(iteration) for iteration in range(iterations)]
    if ladder:
        rest = iterations - iterations // 4
        below = Annealing(anneal.start, _LADDER * anneal.target, decay=anneal.decay)
        epsilons[:rest] = [below(iteration) for iteration in range(rest)]
    return epsilons


def find_hints(problem: CoarseProblem) -> Hints:
    """Compute the hints for first costs on the host, and return them on the device."""
    # One read; LAPACK is faster at problems of this size, its answer the same everywhere, and a GPU
    # would load the code of sorts and distances for 60 ms. [L1020]
    tables = [part for side in problem.sides for part in (side.table, side.weights)]
    host = torch.cat([part.flatten() for part in tables]).cpu()
    x, a, y, b = host.split([part.numel() for part in tables])
    source = problem.source._replace(table=x.view_as(tables[0]), weights=a)
    target = problem.target._replace(table=y.view_as(tables[2]), weights=b)
    axes = [_axes(centre(side)[0], side.weights) for side in (source, target)]
    rank = min(part.shape[1] for part in axes)
    apart = [
        torch.cdist(signature(source), signature(target)).square()
        for signature in (_distribution, _eccentricity)
    ]
    parts = (*(part[:, :rank] for part in axes), torch.stack(apart))
    return Hints(*(part.to(problem.x) for part in parts))


def _axes(table: Tensor, weights: Tensor) -> Tensor:
    """Return leading axes of a centred table, (s, rank), scaled so that table ~ +- axes axes'."""
    # The scale of a pair of axes in x P y is then that of a perfect match of the two.
    root = weights.sqrt()
    matrix = root[:, None] * table * root
    # half the time of float64, and only a start; those at each end alone would take two calls
    values, vectors = (part.double() for part in torch.linalg.eigh(matrix.float()))
    order = values.abs().argsort(descending=True)[:AXES]
    found: Tensor = vectors[:, order] * values[order].abs() / root[:, None]
    return found


def _eccentricity(side: SpreadPoints) -> Tensor:
    """Return the root mean squared distance of each point, (s, 1)."""
    return (side.table.square() @ side.weights).sqrt()[:, None]


def _distribution(side: SpreadPoints) -> Tensor:
    return distance_quantiles(side.table, side.weights)


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
    near: tuple[Tensor, Tensor] | None = None,
) -> Congruent:
    """Find few pairs of points at equal distances, those first that most others would agree with.

    ``share`` is how much of the source's mass is to find a partner; distances x (n, n), y (m, m)
    and weights (n,), (m,) are float64 on one device, the generator is of the CPU. Where these are
    some of more points, ``near`` is what :func:`nearest` has read of all. None are found between
    fewer points than pairs.
    """
    used, there = (side.nonzero()[:, 0] for side in weights)
    if min(len(used), len(there)) < _PAIRS:
        nothing = used.new_zeros(0, _PAIRS)
        return Congruent(nothing, nothing, x.new_zeros(0))
    dx, dy = x[used[:, None], used], y[there[:, None], there]
    mass = weights[0][used]
    around = nearest(dx, dy) if near is None else (near[0][used], near[1][there])
    many = max(_DRAWN, _EACH * count)
    drawn = (
        _drawn(dx, dy, mass, many, generator),
        _alike_nearby(dx, dy, around, mass, many, generator),
    )
    source, target = (torch.cat(parts) for parts in zip(*drawn, strict=True))
    probes = _chosen(mass, min(_PROBES, len(mass)), generator)
    # most disagree with a few of the probes already
    some_kept = (probes[: _PROBES // 4], many // 4), (probes, min(_GROWN * count, _DRAWN // 4))
    for some, kept in some_kept:
        errors = _trimmed(dx[some], dy, mass[some], source, target, share)
        best = errors.argsort(stable=True)[:kept]
        source, target = source[best], target[best]
    source, target = _grown(dx, dy, mass, source, target, share, generator)
    errors = _trimmed(dx, dy, mass, source, target, share)
    best = errors.argsort(stable=True)[:count]
    return Congruent(used[source[best]], there[target[best]], errors[best])


def _drawn(
    dx: Tensor, dy: Tensor, mass: Tensor, many: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw pairs of source points, as many that are as far apart, and a third that fits these."""
    n, m, device = len(dx), len(dy), dx.device
    uniform = torch.rand(5, many, device="cpu", generator=generator, dtype=torch.float64)
    uniform = uniform.to(device)
    first, second, third = categories_at(mass, uniform[:3])
    second = torch.where(second == first, (second + 1) % n, second)
    order = dy.flatten().argsort(stable=True)
    # the diagonal is no pair
    order = order[order % (m + 1) != 0]
    place = torch.searchsorted(dy.flatten()[order], dx[first, second].contiguous())
    # how exactly distances agree is not known: pairs are drawn from windows of all widths
    width = torch.exp(uniform[3] * math.log(max(2.0, _WIDEST * len(order))))
    place = (place + ((2 * uniform[4] - 1) * width).round().long()).clamp_(0, len(order) - 1)
    one, other = order[place] // m, order[place] % m
    fits = (dx[third, first][:, None] - dy[one]).square_()
    fits += (dx[third, second][:, None] - dy[other]).square_()
    rows = torch.arange(many, device=device)
    fits[rows, one] = fits[rows, other] = torch.inf
    return torch.stack([first, second, third], 1), torch.stack([one, other, fits.argmin(1)], 1)


def nearest(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Read how far the points of both sides are from the nearest others, (n, k) and (m, k)."""
    count = min(_PAIRS, len(x) - 1, len(y) - 1)
    near, there = (table.sort(1).values[:, 1 : count + 1] for table in (x, y))
    return near, there


def _alike_nearby(
    dx: Tensor,
    dy: Tensor,
    around: tuple[Tensor, Tensor],
    mass: Tensor,
    many: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Draw source points, partners whose nearest points are as far, and two more pairs that fit."""
    # Among many points few pairs are as far apart as two given ones by no chance; what surrounds a
    # point is left to chance less, and is the same within a shared part but at its rim.
    m, device = len(dy), dx.device
    unlike = torch.cdist(*around).square_() / around[0].shape[1]
    uniform = torch.rand(4, many, device="cpu", generator=generator, dtype=torch.float64)
    uniform = uniform.to(device)
    source = categories_at(mass, uniform[:3]).T
    # how much is alike is not known: partners are drawn from all ranks, those first most often
    rank = torch.exp(uniform[3] * math.log(max(2.0, _WIDEST * m))).long() - 1
    target = unlike.argsort(dim=1, stable=True)[source[:, 0], rank][:, None]
    rows = torch.arange(many, device=device)[:, None]
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


def differences(dx: Tensor, dy: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Average squared differences of distances to pairs (S, k), (S, rows, m)."""
    found = dx.new_zeros(len(source), len(dx), len(dy))
    apart = torch.empty_like(found)
    for one, other in zip(source.T, target.T, strict=True):
        torch.sub(dx[:, one].T[:, :, None], dy[other][:, None, :], out=apart)
        found.addcmul_(apart, apart)
    return found.div_(source.shape[1])


def _trimmed(
    dx: Tensor, dy: Tensor, mass: Tensor, source: Tensor, target: Tensor, share: float
) -> Tensor:
    """Average how well points fit pairs (S, k) at best, over the share that fits best, (S,)."""
    step = max(1, TOGETHER // (len(dx) * len(dy)))
    found = []
    for start in range(0, len(source), step):
        some = slice(start, start + step)
        least = differences(dx, dy, source[some], target[some]).amin(2)
        inside = inside_share(least, mass, share * float(mass.sum()))
        found.append((least * inside).sum(1) / inside.sum(1))
    return torch.cat(found)


def inside_share(misfits: Tensor, mass: Tensor, share: float) -> Tensor:
    """Tell the mass of each point, (S, s), of those that fit best, which have the share of it."""
    order = misfits.argsort(1)
    moved = mass[order]
    before = moved.cumsum(1) - moved
    inside = (share - before).clamp_(min=0).minimum(moved)
    return torch.zeros_like(misfits).scatter_(1, order, inside)


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
    fits = differences(dx, dy, source, target) * source.shape[1]
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
        fits += differences(dx, dy, new, match)
        fits[rows, new] = torch.inf
        fits.mT[rows, match] = torch.inf
        source, target = torch.cat([source, new], 1), torch.cat([target, match], 1)
    return source, target
