"""Spaces that are the same but for the order of their points, and the match that says so.

They differ by rounding too. Sums over all distances of each point are the same at a point and at
its image. Where few points share theirs, they tell which point is whose image, and points that
share them are told apart by their distances to those that are matched. Whether the match keeps all
distances is computed from all of them: if so, no plan is better, however it was found.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._problem.problem import Problem, stored_matrix
from torchgw._search.refinement import match_by_classes
from torchgw.distances.base import DistanceProvider
from torchgw.distances.precomputed import PrecomputedDistance
from torchgw.distances.profiles import decays, differences, moments

# A match keeps all distances if their root mean square difference is at most the first share of
# their size, and for each single point at most the second. Sums over distances may differ by the
# second share before two lists of them count as different. [L589]
_SAME, _ROUGHLY = 1e-5, 1e-3
# The distances of a point may differ by so many times their uncertainty instead, where that is
# more, as near the border of the Poincare ball; and the uncertainty, as a share of the size, that
# makes a space too coarse to compare. [L629]
_UNCERTAINTIES, _TOO_COARSE = 4.0, 0.03
# Squared number of points up to which distances are stored, to be read several times. [L589]
_STORED_ENTRIES = {"cpu": 12_000_000, "cuda": 40_000_000}
# So many times stored distances spread what is known of each point to the others. [L589]
_ROUNDS = 4
# A sum whose spread is below this share of its size is not magnified. [L589]
_LEAST_SPREAD = 1e-3
# A point is compared with so many points on either side of its place in order; for spaces of few
# points, and of many. [L589]
_FEW, _NEAR_OF_FEW, _NEAR = 10_000, 64, 16
# Other points are partners too if they are at most so many times as far as the nearest, or at most
# so far. [L589]
_TIMES, _ROUNDING = 10.0, 1e-7
# Points with several partners, at most; and among these, points whose partners may lie beyond the
# places that are compared, at most. [L589]
_MOST_TIED, _MOST_LOST = 2048, 32


class Isometry(NamedTuple):
    """A match that keeps all distances but for rounding."""

    partners: Tensor  # (n,) int64
    value: float  # mean squared difference of the distances
    moments: tuple[Tensor, Tensor]  # of both sides: mean and mean square of each point's, (n, 2)


class _Space(NamedTuple):
    """A space with what is known of the distances of each of its points."""

    distances: DistanceProvider  # float64
    weights: Tensor
    sums: Tensor  # (n, 2) mean and mean square of the distances of each point
    size: float  # root mean square of all distances
    doubt: Tensor  # (n,) how much those of a point may be off, beside the size


def find_isometry(problem: Problem, *, streamed: bool) -> Isometry | None:
    """Match the points of two spaces that are the same but for rounding; ``None`` for others."""
    # This takes a few sums over all distances, and less where the first sums differ. If the
    # distances are too many to be stored, they are read only if they may be `streamed`.
    a, b = problem.marginals
    stored = len(a) ** 2 <= _STORED_ENTRIES.get(a.device.type, 0)
    if not _is_plain(problem) or not (stored or streamed):
        return None
    if float(a.min()) <= 0 or not _same_sums(a, b):
        return None
    if stored and not _same_squares(problem):
        return None
    spaces = _measured(problem, stored=stored)
    if spaces is None or not _look_same(*spaces):
        return None
    near, far = spaces
    found = _checked(near, far, _partners(near, far, _signatures(near), _signatures(far)))
    x, y = near.distances.matrix(), far.distances.matrix()
    if found is None and x is not None and y is not None:
        found = _checked(near, far, match_by_classes(x, y, a.double(), b.double()))
    return found


def _checked(near: _Space, far: _Space, partners: Tensor | None) -> Isometry | None:
    """Return a match if it keeps all weights and distances."""
    a, b = near.weights, far.weights
    if partners is None or bool(((a - b[partners]).abs() > _SAME * a).any()):
        return None
    missed = differences(near.distances, far.distances, partners, a)
    if not _keeps_distances(near, far, partners, missed):
        return None
    return Isometry(partners, float(a @ missed), (near.sums, far.sums))


def _is_plain(problem: Problem) -> bool:
    """Whether a match that keeps distances would have no cost, and columns can be read."""
    plain = problem.linear is None and problem.loss.is_square and not problem.directed
    as_many = problem.source.n == problem.target.n
    return plain and as_many and problem.source.cheap_columns and problem.target.cheap_columns


def _same_squares(problem: Problem) -> bool:
    """Whether mean squares of all points may be the same, where they are fast to find."""
    sides = problem.source, problem.target
    # for other distances such sums take as long as the table
    if not all(side.matrix() is not None or side.factors() is not None for side in sides):
        return True
    x, y = (
        side.mean_square(weight.to(side.dtype))
        for side, weight in zip(sides, problem.marginals, strict=True)
    )
    return _same_sums(x, y)


def _measured(problem: Problem, *, stored: bool) -> tuple[_Space, _Space] | None:
    """Sum the distances of each point of both sides; ``None`` where all of a side are zero."""
    sides, weights = (problem.source, problem.target), problem.marginals
    distances = [side.to(side.device, torch.float64) for side in sides]
    if stored:
        distances = [PrecomputedDistance.unchecked(stored_matrix(side)) for side in distances]
    sums = [moments(*side) for side in zip(distances, weights, strict=True)]
    squares = [weight @ known[:, 1] for weight, known in zip(weights, sums, strict=True)]
    sizes = torch.stack(squares).sqrt().tolist()
    if min(sizes) == 0:
        return None
    doubts = [
        _UNCERTAINTIES * side.uncertainty() / size for side, size in zip(sides, sizes, strict=True)
    ]
    near, far = map(_Space, distances, weights, sums, sizes, doubts)
    return near, far


def _look_same(near: _Space, far: _Space) -> bool:
    """Whether two spaces may be the same, by their sizes and the sums of their points."""
    # rounding changes the sums of the outermost points, and the size where that is set by such
    # points
    slack = float(torch.maximum(near.doubt.max(), far.doubt.max()))
    if slack > _TOO_COARSE or abs(near.size / far.size - 1) > max(_SAME, slack):
        return False
    return all(_same_sums(x, y, slack) for x, y in zip(near.sums.T, far.sums.T, strict=True))


def _keeps_distances(near: _Space, far: _Space, partners: Tensor, missed: Tensor) -> bool:
    """Whether a match keeps the distances of all points, by mean squared differences of each."""
    squares = near.sums[:, 1], far.sums[partners, 1]
    # the difference in units of each side: one point that is off may change the scale of all
    # distances
    means = (squares[0] + squares[1] - missed) / (near.size * far.size)
    apart = squares[0] / near.size**2 + squares[1] / far.size**2 - means
    allowed = near.doubt.square() + far.doubt[partners].square()
    too_far = apart > allowed.clamp_min(_ROUGHLY**2)
    return float(near.weights @ apart) <= _SAME**2 and not bool(too_far.any())


def rounding_advice(problem: Problem) -> str:
    """Say why copies are not recognised whose points lie too near the border, and what helps."""
    sides = problem.source, problem.target
    moved = [float(side.uncertainty().max()) for side in sides]
    # the largest distance may take long to find
    worst = max(u and u / side.maximum() for u, side in zip(moved, sides, strict=True))
    if worst <= _SAME:
        return ""
    return (
        f" Rounding of the coordinates moves distances by up to {worst:.1g} of the largest, as "
        "points lie near the border of the Poincare ball: copies may not be recognised. Give "
        "float64 or Lorentz coordinates, or CurvedDistance(directions, depth=-log(1 - r))."
    )


def _same_sums(x: Tensor, y: Tensor, slack: float = 0.0) -> bool:
    """Tell whether two lists may be of the same numbers, in whatever order."""
    x, y = x.sort().values, y.sort().values
    return bool((x - y).abs().max() <= max(_ROUGHLY, slack) * x.abs().max())


def _signatures(space: _Space) -> Tensor:
    """Compute numbers that a point and its image share, (n, k), of a spread of at most one."""
    # in units of each side, as scales by the largest distance differ by rounding
    side, weights, sums = space.distances, space.weights, space.sums
    size = float(weights @ sums[:, 1]) ** 0.5
    first = sums / sums.new_tensor([size, size**2])
    parts = [first, decays(side, weights, size), weights[:, None] * len(weights)]
    latest, table = _levelled(torch.cat(parts, 1), weights), side.matrix()
    known = [latest]
    for _ in range(_ROUNDS if table is not None else 0):
        assert table is not None
        latest = _levelled(table @ (weights[:, None] * latest * latest.abs()), weights)
        known.append(latest)
    return torch.cat(known, 1)


def _levelled(table: Tensor, weights: Tensor) -> Tensor:
    """Subtract means, and divide by deviations that are more than rounding."""
    mean, square = weights @ table, weights @ table.square()
    deviation = (square - mean.square()).clamp_min(0).sqrt()
    least = (_LEAST_SPREAD * square.sqrt()).clamp_min(torch.finfo(table.dtype).tiny)
    return (table - mean) / torch.maximum(deviation, least)


def _partners(near: _Space, far: _Space, x: Tensor, y: Tensor) -> Tensor | None:
    """Match points by numbers that partners share, (n,); ``None`` if too many are alike."""
    n, device = len(x), x.device
    reach = min(n - 1, _NEAR_OF_FEW if n <= _FEW else _NEAR)
    # a random mean of all numbers puts both sides in order
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(x.shape[1], dtype=x.dtype, device="cpu", generator=generator).to(device)
    order, others = (x @ mix).argsort(), (y @ mix).argsort()
    rank = torch.arange(n, device=device)
    places = rank[:, None] + torch.arange(-reach, reach + 1, device=device)
    outside = (places < 0) | (places >= n)
    around = others[places.clamp(0, n - 1)]
    apart = torch.zeros(around.shape, dtype=x.dtype, device=device)
    for mine, theirs in zip(x.T, y.T, strict=True):
        apart += (mine[order, None] - theirs[around]).square_()
    apart = apart.sqrt_().masked_fill_(outside, torch.inf)
    least, place = apart.min(1)
    doubt = near.doubt[order, None] + far.doubt[around]
    possible = apart <= torch.maximum((_TIMES * least + _ROUNDING)[:, None], doubt)
    chosen = around.gather(1, place[:, None])[:, 0]
    tied = (possible.sum(1) > 1) | (torch.bincount(chosen, minlength=n)[chosen] > 1)
    # if the last place is as near as the best one, a nearer partner may lie beyond the places
    lost = possible[:, [0, -1]].any(1) & (reach < n - 1)
    tied |= lost
    partners = torch.empty_like(rank)
    partners[order] = chosen
    if not bool(tied.any()):
        return partners
    if int(tied.sum()) > _MOST_TIED or int(lost.sum()) > _MOST_LOST:
        return None
    _untie(near.distances, far.distances, partners, order[tied], around[tied], lost[tied])
    return partners


def _untie(
    near: DistanceProvider,
    far: DistanceProvider,
    partners: Tensor,
    tied: Tensor,
    around: Tensor,
    lost: Tensor,
) -> None:
    """Match points one after the other by their distances to those that are matched already."""
    # The partner of each is one of those `around` its own place, (t, w); points that are `lost`,
    # (t,), come last and may take any that is left. `partners` is changed in place.
    sure = torch.ones(len(partners), dtype=torch.bool, device=tied.device)
    sure[tied] = False
    free = torch.ones_like(sure)
    free[partners[sure]] = False
    matched = sure.nonzero()[:, 0]
    for row in [*(~lost).nonzero()[:, 0].tolist(), *lost.nonzero()[:, 0].tolist()]:
        point, choice = tied[row : row + 1], around[row][free[around[row]]]
        if lost[row] or len(choice) == 0:
            choice = free.nonzero()[:, 0]
        apart = near.columns(point)[matched] - far.columns(choice)[partners[matched]]
        best = choice[apart.square_().sum(0).argmin()]
        partners[point], free[best] = best, False
        matched = torch.cat([matched, point])
