"""Partners that distances alone show, between nearly isometric spaces and between equal ones.

Equal spaces differ by their order and by rounding. Sums over all distances of each point are then
the same at a point and at its image. Where few points share theirs, they tell which point is whose
image, and points that share them are told apart by their distances to those that are matched.
Whether the match keeps all distances is computed from all of them: if so, no plan is better,
however it was found.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._plans.contract import Anchors
from torchgw._plans.given import PairPlan
from torchgw._problem.problem import Problem, stored_matrix
from torchgw._search.starts import distance_quantiles
from torchgw.distances.base import DistanceProvider
from torchgw.distances.precomputed import PrecomputedDistance
from torchgw.distances.profiles import decays, differences, moments

# Squared number of points of the larger side up to which all distances are read. [L279]
_MOST_ENTRIES = 9_000_000
# Share of the partners that are looked at: those that are clearest beside their second nearest, as
# most right ones are. [L232]
_CLEAR_SHARE = 1 / 3
# The partners are believed if the distances among them correlate by this; so many partners are
# needed at least. [L233, L279]
_BELIEVED = 0.7
_FEWEST = 32
# Distances read at once. [L279]
_BLOCK_ELEMENTS = 2**22
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


def match_points(problem: Problem) -> PairPlan | None:
    """Match points by their distance distributions, if the matches agree with each other."""
    # Two points are partners if the quantiles of their distances to all others (Memoli's third
    # lower bound) are nearest to each other both ways. Of a noisy copy some are right and the
    # others are anywhere, so the doubly centred distances among partners correlate on both sides;
    # otherwise, or where distances come by costly columns or a linear cost has a say, there is no
    # plan.
    sides = (problem.source, problem.target)
    largest = max(side.n for side in sides)
    if problem.linear is not None or largest**2 > _MOST_ENTRIES:
        return None
    if not all(side.cheap_columns for side in sides):
        return None
    used = [(weight > 0).nonzero()[:, 0] for weight in problem.marginals]
    x, y = (
        _quantiles(side, weight, index)
        for side, weight, index in zip(sides, problem.marginals, used, strict=True)
    )
    if min(len(x), len(y)) < _FEWEST:
        return None
    distance = torch.cdist(x, y)
    nearest, there = distance.topk(2, dim=1, largest=False)
    back = distance.argmin(0)
    mutual = (back[there[:, 0]] == torch.arange(len(x), device=x.device)).nonzero()[:, 0]
    clear = (nearest[mutual, 0] / nearest[mutual, 1].clamp_min(torch.finfo(x.dtype).tiny)).argsort()
    chosen = mutual[clear[: max(_FEWEST, int(_CLEAR_SHARE * len(mutual)))]]
    pairs = Anchors(used[0][chosen], used[1][there[chosen, 0]])
    if len(chosen) < _FEWEST or _correlation(problem, pairs) < _BELIEVED:
        return None
    mass = (problem.marginals.a[pairs.source] * problem.marginals.b[pairs.target]).sqrt()
    return PairPlan(pairs, mass / mass.sum(), (problem.source.n, problem.target.n))


def _quantiles(provider: DistanceProvider, weights: Tensor, index: Tensor) -> Tensor:
    """Return quantiles of the distances of some points to all others, float32."""
    blocks = index.split(max(1, _BLOCK_ELEMENTS // provider.n))
    tables = (provider.columns(block).T for block in blocks)
    return torch.cat([distance_quantiles(table.float(), weights.float()) for table in tables])


def _correlation(problem: Problem, pairs: Anchors) -> float:
    """Return the correlation of the doubly centred distances among pairs, but those to itself."""
    sides = zip((problem.source, problem.target), pairs, strict=True)
    x, y = (_centred(side.columns(index)[index].double()) for side, index in sides)
    size = (x.norm() * y.norm()).clamp_min(torch.finfo(x.dtype).tiny)
    return float((x * y).sum() / size)


def _centred(table: Tensor) -> Tensor:
    others = table.sum(1) / (len(table) - 1)
    table = table - table.diag().diag() + others.diag()
    return table - table.mean(0) - table.mean(1, keepdim=True) + table.mean()


class Isometry(NamedTuple):
    """A match that keeps all distances but for rounding."""

    partners: Tensor  # (n,) int64
    value: float  # mean squared difference of the distances
    moments: tuple[Tensor, Tensor]  # of both sides: mean and mean square of each point's, (n, 2)


def find_isometry(problem: Problem, *, streamed: bool) -> Isometry | None:
    """Match the points of two spaces that are the same but for rounding; ``None`` for others."""
    # This takes a few sums over all distances, and less where the first sums differ. It is for the
    # square loss, without a linear cost, where all points have weight and columns of distances are
    # cheap. If the distances are too many to be stored, they are read only if they may be
    # `streamed`.
    a, b = problem.marginals
    sides = problem.source, problem.target
    plain = problem.linear is None and problem.loss.is_square and not problem.directed
    if not plain or len(a) != len(b) or not all(side.cheap_columns for side in sides):
        return None
    stored = len(a) ** 2 <= _STORED_ENTRIES.get(a.device.type, 0)
    if not (stored or streamed) or float(a.min()) <= 0 or not _same_sums(a, b):
        return None
    # for other distances such sums take as long as the table
    if stored and all(side.matrix() is not None or side.factors() is not None for side in sides):
        x, y = (
            side.mean_square(weight.to(side.dtype))
            for side, weight in zip(sides, (a, b), strict=True)
        )
        if not _same_sums(x, y):
            return None
    near, far = (side.to(side.device, torch.float64) for side in sides)
    if stored:
        near, far = (PrecomputedDistance.unchecked(stored_matrix(side)) for side in (near, far))
    known = moments(near, a), moments(far, b)
    sizes = torch.stack([a @ known[0][:, 1], b @ known[1][:, 1]]).sqrt().tolist()
    if min(sizes) == 0:
        return None
    doubts = [
        _UNCERTAINTIES * side.uncertainty() / size for side, size in zip(sides, sizes, strict=True)
    ]
    # rounding changes the sums of the outermost points, and the size where that is set by such
    # points
    slack = float(torch.maximum(*(doubt.max() for doubt in doubts)))
    if slack > _TOO_COARSE or abs(sizes[0] / sizes[1] - 1) > max(_SAME, slack):
        return None
    if not all(_same_sums(x, y, slack) for x, y in zip(known[0].T, known[1].T, strict=True)):
        return None
    x, y = (
        _signatures(side, sums, weight)
        for side, sums, weight in zip((near, far), known, (a, b), strict=True)
    )
    partners = _partners(near, far, x, y, doubts)
    if partners is None or bool(((a - b[partners]).abs() > _SAME * a).any()):
        return None
    missed = differences(near, far, partners, a)
    squares = known[0][:, 1], known[1][partners, 1]
    # the difference in units of each side: one point that is off may change the scale of all
    # distances
    means = (squares[0] + squares[1] - missed) / (sizes[0] * sizes[1])
    apart = squares[0] / sizes[0] ** 2 + squares[1] / sizes[1] ** 2 - means
    allowed = doubts[0].square() + doubts[1][partners].square()
    if float(a @ apart) > _SAME**2 or bool((apart > allowed.clamp_min(_ROUGHLY**2)).any()):
        return None
    return Isometry(partners, float(a @ missed), known)


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


def _signatures(side: DistanceProvider, sums: Tensor, weights: Tensor) -> Tensor:
    """Compute numbers that a point and its image share, (n, k), of a spread of at most one."""
    # in units of each side, as scales by the largest distance differ by rounding
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


def _partners(
    near: DistanceProvider, far: DistanceProvider, x: Tensor, y: Tensor, doubts: list[Tensor]
) -> Tensor | None:
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
    doubt = doubts[0][order, None] + doubts[1][around]
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
    _untie(near, far, partners, order[tied], around[tied], lost[tied])
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
