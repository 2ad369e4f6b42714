"""Spaces that are the same but for the order of their points, and the match that says so.

They differ by rounding too. Sums over all distances of each point are the same at a point and at
its image. Where few points share theirs, they tell which point is whose image, and points that
share them are told apart by their distances to those that are matched. Whether the match keeps all
distances is computed from all of them: if so, no plan is better, however it was found. With a
linear cost, such as that of known pairs, this holds if each point has the least one there is for
it; and if that is less than at any other partner, no other plan is as good.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchgw._boundary.arrays import SAME_DISTANCE
from torchgw._plans.contract import Anchors
from torchgw._plans.given import PairPlan
from torchgw._problem.limits import limits_of
from torchgw._problem.problem import Problem, is_sparse, stored_matrix
from torchgw._tensors.operations import centred
from torchgw.distances.base import BLOCK_ENTRIES, DistanceProvider
from torchgw.distances.precomputed import PrecomputedDistance
from torchgw.distances.sampling import decays, differences, distance_quantiles, moments

# Sums count as the same if they differ by at most this share of their spread over random numbers.
# A choice. [L1273]
ROUNDING = 1e-6
# Rounds at most, and entries that they read: of a match, and of an order. [L1273, L1331]
_MOST_ROUNDS, _MOST_ENTRIES, _TO_ORDER = 5_000, 5e9, 2e8

# Random sums over a row that tell it from others. A choice. [L1331]
_SUMS = 3


def match_by_classes(near: Tensor, far: Tensor, a: Tensor, b: Tensor) -> Tensor | None:
    """Match the points of two tables (n, n) of weights (n,), (n,); ``None`` if none is found.

    Points are put into classes by their weights, and classes are split by random sums over the
    table, which are the same for points that see the same classes alike. If no class splits any
    more, a point is taken for the partner of the first of its class on the other side with which
    both sides still split alike, and these two have a class of their own. A wrong partner may be
    taken where that shows later only, so that the match has to be checked.

    References
    ----------
    B. D. McKay, A. Piperno. Practical graph isomorphism, II. Journal of Symbolic Computation 2014.
    """
    n = len(a)
    tables = [table.to_sparse() if is_sparse(table) else table for table in (near, far)]
    read = sum(table._nnz() if table.is_sparse else table.numel() for table in tables)
    rounds = iter(range(int(min(_MOST_ROUNDS, _MOST_ENTRIES / max(1, read)))))
    first = split(a.new_zeros(2 * n, dtype=torch.int64), torch.cat([a, b]), ROUNDING / n)
    classes = refined(tables, first, rounds)
    while classes is not None and (count := int(classes.max()) + 1) < n:
        # the first of the smallest class of several points
        sizes = torch.bincount(classes[:n])
        chosen = int(sizes.where(sizes > 1, n + 1).argmin())
        point, *_ = (classes[:n] == chosen).nonzero()[:, 0].tolist()
        found = None
        for other in (classes[n:] == chosen).nonzero()[:, 0].tolist():
            both = classes.clone()
            both[[point, n + other]] = count
            found = refined(tables, both, rounds)
            if found is not None:
                break
        classes = found
    return None if classes is None else classes[n:].argsort()[classes[:n]]


def put_in_order(table: Tensor, classes: Tensor) -> Tensor:
    """Order the points of a table (n, n), and of classes (n,), by what they are among the others.

    A table in another order gets the same order of its points, but for points that no automorphism
    tells apart; a rounding may do so for others that look alike.
    """
    rounds = iter(range(max(1, int(_TO_ORDER / table.numel()))))
    found, copies = refined([table], classes, rounds), list[Tensor]()
    while found is not None and int(found.max()) + 1 < len(found):
        classes = found
        if not copies:
            # points that see all others alike, at no distance from each other or at the least one
            near = float(table.clone().fill_diagonal_(torch.inf).amin())
            alike = table, table.clone().fill_diagonal_(near)
            copies = [find_copies([each]) for each in alike]
        tied = _first_tied(classes, copies)
        if tied is None:
            break
        found = classes.clone()
        found[tied] = int(classes.max()) + 1
        found = refined([table], found, rounds)
    return (classes if found is None else found).argsort(stable=True)


def find_copies(tables: Sequence[Tensor]) -> Tensor:
    """Give points one number, (n,), whose rows are the same in all of some tables (n, k)."""
    generator = torch.Generator("cpu").manual_seed(0)
    found = torch.zeros(len(tables[0]), dtype=torch.int64, device=tables[0].device)
    for table in tables:
        least = ROUNDING * float(table.square().sum().sqrt()) / len(table) ** 0.5
        # one sum may be the same by chance
        for _ in range(_SUMS):
            drawn = torch.randn(
                table.shape[1], dtype=table.dtype, device="cpu", generator=generator
            )
            found = split(found, table @ drawn, least)
    return found


def _first_tied(classes: Tensor, copies: Sequence[Tensor]) -> int | None:
    """Choose the first point of the smallest class of points that are not copies of each other."""
    kinds = classes.new_full((int(classes.max()) + 1,), len(classes))
    for numbers in copies:
        pairs = (classes * len(classes) + numbers).unique()
        kinds = torch.minimum(kinds, torch.bincount(pairs // len(classes)))
    chosen = int(kinds.where(kinds > 1, len(classes) + 1).argmin())
    return int((classes == chosen).byte().argmax()) if int(kinds[chosen]) > 1 else None


def refined(tables: Sequence[Tensor], classes: Tensor, rounds: Iterator[int]) -> Tensor | None:
    """Split classes of the points of tables until none splits.

    ``None`` where the tables differ, or no rounds are left.
    """
    sides, count = len(tables), 0
    n = len(classes) // sides
    # of a sum of so many numbers
    size = float(tables[0].square().sum().sqrt()) / n**0.5
    for number in rounds:
        latest = int(classes.max()) + 1
        sizes = [torch.bincount(side, minlength=latest) for side in classes.chunk(sides)]
        if not all(torch.equal(sizes[0], other) for other in sizes[1:]):
            return None
        if latest in (count, n):
            return classes
        count = latest
        generator = torch.Generator("cpu").manual_seed(number)
        numbers = torch.randn(count, dtype=torch.float64, device="cpu", generator=generator).to(
            classes.device
        )
        known = numbers[classes].view(sides, n, 1)
        sums = torch.cat([table @ side for table, side in zip(tables, known, strict=True)])
        classes = split(classes, sums[:, 0], ROUNDING * size)
    return None


def split(classes: Tensor, values: Tensor, least: float) -> Tensor:
    """Split classes of points by their values, which differ if they are further apart."""
    # by NumPy, whose operations on few numbers take a fifth of the time
    known, numbers = classes.numpy(force=True), values.numpy(force=True)
    order = np.lexsort((numbers, known))
    begins = (np.diff(known[order]) > 0) | (np.diff(numbers[order]) > least)
    found = np.zeros_like(known)
    found[order[1:]] = begins.cumsum()
    return torch.from_numpy(found).to(classes.device)


# A match keeps all distances if they are the same in the root mean square, and those of each single
# point up to this share of their size. Sums over distances may differ by as much before two lists
# of them count as different. [L589]
_ROUGHLY = 1e-3
# The distances of a point may differ by so many times their uncertainty instead, where that is
# more, as near the border of the Poincare ball; and the uncertainty, as a share of the size, that
# makes a space too coarse to compare. [L629]
_UNCERTAINTIES, _TOO_COARSE = 4.0, 0.03
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
    only: bool = False  # whether each point has a higher linear cost at any other partner


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
    stored = len(a) ** 2 <= limits_of(a.device).dense
    plain = problem.plain and len(a) == len(b) and all(s.cheap_columns for s in problem.sides)
    if not plain or not (stored or streamed and problem.linear is None):
        return None
    if float(a.min()) <= 0 or not _same_sums(a, b):
        return None
    if stored and not _same_squares(problem):
        return None
    spaces = _measured(problem, stored=stored)
    if spaces is None or not _look_same(*spaces):
        return None
    near, far = spaces
    costs = _linear_costs(problem)
    found = None if costs is None else _checked(near, far, costs.argmin(1))
    if found is None:
        found = _checked(near, far, _partners(near, far, _signatures(near), _signatures(far)))
    x, y = near.distances.matrix(), far.distances.matrix()
    if found is None and x is not None and y is not None:
        found = _checked(near, far, match_by_classes(x, y, a.double(), b.double()))
    return found if found is None or costs is None else _at_least_cost(found, costs)


def _linear_costs(problem: Problem) -> Tensor | None:
    """Compute how far the linear cost lies above the least of each point of X, (n, n), if any."""
    if problem.linear is None:
        return None
    table = problem.linear.dense().matrix.double()
    if problem.support is not None:
        table = table.masked_fill(~problem.support, torch.inf)
    return table - table.amin(1, keepdim=True)


def _at_least_cost(found: Isometry, costs: Tensor) -> Isometry | None:
    """Return a match if its linear cost is the least that there is for each point."""
    allowed = costs[costs.isfinite()]
    own, size = costs.gather(1, found.partners[:, None]), float(allowed.mean())
    if float(own.max()) > SAME_DISTANCE**2 * size:
        return None
    others = costs.scatter(1, found.partners[:, None], torch.inf)
    return found._replace(only=float(others.min()) > _ROUGHLY**2 * size)


def _checked(near: _Space, far: _Space, partners: Tensor | None) -> Isometry | None:
    """Return a match if it keeps all weights and distances."""
    a, b = near.weights, far.weights
    if partners is None or bool(((a - b[partners]).abs() > SAME_DISTANCE * a).any()):
        return None
    if len(partners.unique()) < len(b):
        return None
    missed = differences(near.distances, far.distances, partners, a)
    if not _keeps_distances(near, far, partners, missed):
        return None
    return Isometry(partners, float(a @ missed), (near.sums, far.sums))


def _same_squares(problem: Problem) -> bool:
    """Whether mean squares of all points may be the same, where they are fast to find."""
    sides = problem.sides
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
    sides, weights = problem.sides, problem.marginals
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
    if slack > _TOO_COARSE or abs(near.size / far.size - 1) > max(SAME_DISTANCE, slack):
        return False
    return all(_same_sums(x, y, slack) for x, y in zip(near.sums.T, far.sums.T, strict=True))


def _keeps_distances(near: _Space, far: _Space, partners: Tensor, missed: Tensor) -> bool:
    """Whether a match keeps the distances of all points, by mean squared differences of each."""
    squares = near.sums[:, 1], far.sums[partners, 1]
    # the difference in units of each side: one point that is off may change the scale of all
    # distances
    means = (squares[0] + squares[1] - missed) / (near.size * far.size)
    apart = squares[0] / near.size**2 + squares[1] / far.size**2 - means
    too_far = apart > (near.doubt.square() + far.doubt[partners].square()).clamp_min(_ROUGHLY**2)
    return float(near.weights @ apart) <= SAME_DISTANCE**2 and not bool(too_far.any())


def rounding_advice(problem: Problem) -> str:
    """Say why copies are not recognised whose points lie too near the border, and what helps."""
    sides = problem.sides
    moved = [float(side.uncertainty().max()) for side in sides]
    # the largest distance may take long to find
    worst = max(u and u / side.maximum() for u, side in zip(moved, sides, strict=True))
    if worst <= SAME_DISTANCE:
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


# Share of the partners that are looked at: those that are clearest beside their second nearest, as
# most right ones are. [L232]
_CLEAR_SHARE = 1 / 3


def match_points(problem: Problem) -> PairPlan | None:
    """Match points by their distance distributions, if the matches agree with each other."""
    # Two points are partners if the quantiles of their distances to all others (Memoli's third
    # lower bound) are nearest to each other both ways. Of a noisy copy some are right and the
    # others are anywhere, so the doubly centred distances among partners correlate on both sides;
    # otherwise, or where distances come by costly columns or a linear cost has a say, there is no
    # plan.
    sides = problem.sides
    limits = limits_of(problem.source.device)
    if problem.linear is not None or max(problem.shape) > limits.all_pairs_points:
        return None
    if not all(side.cheap_columns for side in sides):
        return None
    used = [(weight > 0).nonzero()[:, 0] for weight in problem.marginals]
    x, y = (
        _quantiles(side, weight, index)
        for side, weight, index in zip(sides, problem.marginals, used, strict=True)
    )
    if min(len(x), len(y)) < limits.fewest_matches:
        return None
    distance = torch.cdist(x, y)
    nearest, there = distance.topk(2, dim=1, largest=False)
    back = distance.argmin(0)
    mutual = (back[there[:, 0]] == torch.arange(len(x), device=x.device)).nonzero()[:, 0]
    clear = (nearest[mutual, 0] / nearest[mutual, 1].clamp_min(torch.finfo(x.dtype).tiny)).argsort()
    chosen = mutual[clear[: max(limits.fewest_matches, int(_CLEAR_SHARE * len(mutual)))]]
    pairs = Anchors(used[0][chosen], used[1][there[chosen, 0]])
    few = len(chosen) < limits.fewest_matches
    if few or _correlation(problem, pairs) < limits.believed:
        return None
    mass = (problem.marginals.a[pairs.source] * problem.marginals.b[pairs.target]).sqrt()
    return PairPlan(pairs, mass / mass.sum(), problem.shape)


def _quantiles(provider: DistanceProvider, weights: Tensor, index: Tensor) -> Tensor:
    """Return quantiles of the distances of some points to all others, float32."""
    blocks = index.split(max(1, BLOCK_ENTRIES // provider.n))
    tables = (provider.columns(block).T for block in blocks)
    return torch.cat([distance_quantiles(table.float(), weights.float()) for table in tables])


def _correlation(problem: Problem, pairs: Anchors) -> float:
    """Return the correlation of the doubly centred distances among pairs, but those to itself."""
    sides = zip(problem.sides, pairs, strict=True)
    x, y = (_centred(side.between(index, index).double()) for side, index in sides)
    size = (x.norm() * y.norm()).clamp_min(torch.finfo(x.dtype).tiny)
    return float((x * y).sum() / size)


def _centred(table: Tensor) -> Tensor:
    others = table.sum(1) / (len(table) - 1)
    table = table - table.diag().diag() + others.diag()
    return centred(table)
