"""What is told of a space by reading it: sums over its distances, and spread-out points."""

import math
from collections.abc import Iterator
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchgw._tensors.operations import ALL_PAIRS, FEW_PAIRS, NOTHING, accumulate, lesser, power
from torchgw.distances.base import DistanceProvider, Factors, ScaledDistance
from torchgw.distances.curved import CurvedDistance
from torchgw.distances.points import PointDistance

# A point is drawn in proportion to this power of its distance to the points so far: large enough to
# spread them evenly, small enough not to collect outliers. [L108, L311]
SPREAD = 4
# Among so few points some are drawn by random numbers of the host, so that they are the same on a
# GPU; so many are also looked at where distances are decided on. [L610]
SAME_POINTS = 1_000


class StoredColumns(NamedTuple):
    """Columns of a stored table."""

    matrix: Tensor  # (n, n)

    def columns(self, index: Tensor) -> Tensor:
        """Read D[:, index], a view of gathered rows."""
        return self.matrix[index].T


# Anything that gives columns of distances: a provider, or the tensors that it reads.
ColumnReader = DistanceProvider | Factors | StoredColumns


class SpreadPoints(NamedTuple):
    """Some spread-out points of one side, float64; the first few alone are spread out too."""

    indices: Tensor  # (s,) int64, which points these are
    table: Tensor  # (s, s) distances among them, symmetric
    weights: Tensor  # (s,) mass of the points nearest to each, total one
    square: Tensor  # () mean squared distance of all points to the nearest of them


class _Drawn(NamedTuple):
    """Points as drawn; where better ones ran out, some have no weight or are duplicates."""

    points: SpreadPoints
    counts: Tensor  # (2,) int64: points of positive weight; points drawn that are no duplicates


def column_reader(provider: DistanceProvider) -> ColumnReader:
    """Find what a provider reads its columns from: a named tuple of tensors, or itself."""
    matrix = provider.matrix()
    if matrix is not None:
        return StoredColumns(matrix)
    factors = provider.factors()
    # all straight distances of few points take less time than a launch
    few = isinstance(provider, PointDistance) and provider.n**2 <= FEW_PAIRS
    if factors is None and few:
        return StoredColumns(provider.columns(torch.arange(provider.n, device=provider.device)))
    return factors or provider


def choose_points(provider: DistanceProvider, weights: Tensor, size: int) -> SpreadPoints:
    """Draw at most ``size`` spread-out points; all those of positive weight if there are no more.

    A fixed seed draws them, so that exact solves do not depend on ``random_state``.
    """
    drawn = draw_points(size, 0, column_reader(provider), weights, uniform_draws(provider, size, 0))
    used, distinct = drawn.counts.tolist()
    if not ran_out(provider.n, size, used, distinct):
        return drawn.points
    return without_surplus(provider, weights, drawn.points, size, (used, distinct))


def ran_out(n: int, size: int, used: int, distinct: int) -> bool:
    """Tell whether more points were drawn than have a weight and duplicate no other."""
    return used <= size < n or min(n, size) > distinct


def without_surplus(
    provider: DistanceProvider,
    weights: Tensor,
    drawn: SpreadPoints,
    size: int,
    counts: tuple[int, int],
) -> SpreadPoints:
    """Leave out points without weight and duplicates, which were drawn for want of others."""
    used, distinct = counts
    weights = cut(weights)
    if used <= size:
        return _all_points(provider, weights, weights.nonzero()[:, 0])
    index = drawn.indices[:distinct]
    return _nearest(weights, index, provider.columns(index))


def cut(weights: Tensor) -> Tensor:
    """Set negligible weights to zero, and the total to one."""
    # float32 could not hold the plan of points of a smaller weight
    weights = torch.where(weights > NOTHING * weights.max(), weights, 0.0)
    return weights / weights.sum()


def uniform_draws(provider: DistanceProvider, size: int, seed: int) -> Tensor:
    """Make the random numbers that draw at most ``size`` points, (rounds, n) float64."""
    rounds = math.ceil(math.log2(size)) if provider.n > size else 0
    # the numbers for few points are the same on every device
    device = provider.device if provider.n > SAME_POINTS else torch.device("cpu")
    generator = torch.Generator(device=device).manual_seed(seed)
    drawn = torch.rand(rounds, provider.n, dtype=torch.float64, device=device, generator=generator)
    return drawn.to(provider.device)


def draw_points(
    size: int, first: int, provider: ColumnReader, weights: Tensor, uniform: Tensor
) -> _Drawn:
    """Draw spread-out points, beginning with that of number ``first``; each round doubles them."""
    weights = cut(weights)
    number = (weights > 0).cumsum(0)
    used = number[-1]
    if len(weights) <= size:
        index = torch.arange(len(weights), device=weights.device)
        return _Drawn(_all_points(provider, weights, index), torch.stack([used, used]))
    index = torch.searchsorted(number, used.clamp(max=first + 1)[None])
    first_column = provider.columns(index)
    columns = first_column.new_empty(len(weights), size)
    columns[:, :1], closest, drawn = first_column, first_column.amin(1), [weights.new_zeros(1)]
    # after all distinct points of positive weight have been drawn, others follow
    for logarithm in uniform.log():
        share = weights * power(closest.double().clamp_min(0), SPREAD)
        # approximate distances may keep a point away from itself
        share = share.index_fill(0, index, 0.0)
        share = share / share.amax().clamp_min(torch.finfo(share.dtype).tiny)
        # the largest of log(u) / share, -inf where there is none, are a draw without replacement
        # (Efraimidis and Spirakis 2006)
        keys = logarithm / share
        fresh = _largest(keys, min(size - len(index), len(index)))
        drawn.append(keys[fresh])
        here = slice(len(index), len(index) + len(fresh))
        columns[:, here] = provider.columns(fresh)
        index, closest = torch.cat([index, fresh]), lesser(closest, columns[:, here].amin(1))
    points = _nearest(weights, index, columns)
    distinct = (torch.cat(drawn) > -torch.inf).sum()
    return _Drawn(points, torch.stack([used, distinct]))


def _largest(keys: Tensor, count: int) -> Tensor:
    """Find the places of the largest keys, (count,), the largest first."""
    if not keys.is_cuda or len(keys) ** 2 > ALL_PAIRS:
        return keys.topk(count).indices
    # by the number of keys that come before each; those that are equal stay in order
    number = torch.arange(len(keys), device=keys.device)
    rank = torch.where(number < number[:, None], keys >= keys[:, None], keys > keys[:, None]).sum(1)
    return number.index_copy(0, rank, number)[:count]


def _all_points(provider: ColumnReader, weights: Tensor, index: Tensor) -> SpreadPoints:
    """Take points as they are, each with its own weight."""
    table = provider.columns(index)[index].double()
    return SpreadPoints(index, (table + table.T) / 2, weights[index], torch.zeros_like(weights[0]))


def _nearest(weights: Tensor, index: Tensor, columns: Tensor) -> SpreadPoints:
    """Give each of some points the mass nearest to it, by their columns (n, s)."""
    closest, nearest = columns.min(1)
    # approximate distances may put a point nearer to another than to itself
    nearest = nearest.index_copy(0, index, torch.arange(len(index), device=index.device))
    mass = accumulate(nearest, weights, len(index))
    square = weights @ (closest.double() * closest.double())
    table = columns[index].double()
    return SpreadPoints(index, (table + table.T) / 2, mass, square)


# Distances read at once. [L588]
_BLOCK_ELEMENTS = {"cpu": 2**21, "cuda": 2**26}
# Kernels hold points of at most so many numbers on chip. [L588]
_WIDEST = 20
# Levels of the distance distributions that are compared. [L224]
_QUANTILES = 32
# Entries of a row from which on a CPU sorts by NumPy, which takes 40 to 70% of the time. [L1242]
_SORTED = 64


def moments(provider: DistanceProvider, weights: Tensor) -> Tensor:
    """Compute the mean and the mean square of each point's distances by weight, (n, 2)."""
    curved = _on_chip(provider)
    if curved is not None:
        from torchgw.distances.profiles_triton import sum_functions

        table, scale = curved
        return sum_functions(table, weights, None) * weights.new_tensor([scale, scale**2])
    return torch.cat(
        [torch.stack([weights @ d, weights @ d.square()], 1) for d in _columns(provider)]
    )


def decays(provider: DistanceProvider, weights: Tensor, length: float) -> Tensor:
    """Compute the means of exp(-|d| / length) and of its fourth power by weight, (n, 2)."""
    curved = _on_chip(provider)
    if curved is not None:
        from torchgw.distances.profiles_triton import sum_functions

        table, scale = curved
        return sum_functions(table, weights, scale / length)
    sums = []
    for d in _columns(provider):
        near = d.abs().div_(-length).exp_()
        sums.append(torch.stack([weights @ near, weights @ near.square_().square_()], 1))
    return torch.cat(sums)


def differences(
    source: DistanceProvider, target: DistanceProvider, partners: Tensor, weights: Tensor
) -> Tensor:
    """Compute the mean of (d_ij - d'_kl)^2 over all j by weight, for partners k of i, l of j."""
    near, far = _on_chip(source), _on_chip(target)
    if near is not None and far is not None:
        from torchgw.distances.profiles_triton import sum_differences

        tables = near[0], far[0][partners].contiguous()
        return sum_differences(*tables, weights, (near[1], far[1]))
    sums = []
    for block in _blocks(source):
        apart = source.columns(block).double() - target.columns(partners[block])[partners].double()
        sums.append(weights @ apart.square_())
    return torch.cat(sums)


def _blocks(provider: DistanceProvider) -> tuple[Tensor, ...]:
    width = max(1, _BLOCK_ELEMENTS[provider.device.type] // provider.n)
    return torch.arange(provider.n, device=provider.device).split(width)


def _columns(provider: DistanceProvider) -> Iterator[Tensor]:
    """Read all distances, some columns at a time."""
    for block in _blocks(provider):
        yield provider.columns(block).double()


def _on_chip(provider: DistanceProvider) -> tuple[Tensor, float] | None:
    """Give the table and the scale of hyperbolic distances on a GPU, for kernels."""
    inner, scale = provider, 1.0
    if isinstance(provider, ScaledDistance):
        inner, scale = provider.provider, provider.scale
    if not isinstance(inner, CurvedDistance) or inner.device.type != "cuda":
        return None
    table = inner.coordinates()
    if table is None or table.shape[1] > _WIDEST or find_spec("triton") is None:
        return None
    return table, scale / inner.curvature**0.5


def distance_quantiles(table: Tensor, weights: Tensor) -> Tensor:
    """Return quantiles of each row of distances (s, n) by weight, (s, q), each over sqrt(q)."""
    if table.device.type == "cpu" and bool((weights == weights[0]).all()):
        # NumPy sorts by vector instructions, without returning the order, which is not needed
        values = torch.from_numpy(np.sort(table.numpy(), axis=1))
        cumulative = weights.cumsum(0).expand_as(values).contiguous()
    else:
        order = _order(table)
        values, cumulative = table.gather(1, order), weights[order].cumsum(1)
    levels = torch.arange(_QUANTILES, dtype=values.dtype, device=values.device) + 0.5
    levels = (levels / _QUANTILES * cumulative[:, -1:]).contiguous()
    position = torch.searchsorted(cumulative, levels).clamp_(max=values.shape[1] - 1)
    return values.gather(1, position) / _QUANTILES**0.5


def _order(table: Tensor) -> Tensor:
    """Sort each row of a table: the places of its entries, ascending."""
    if table.device.type == "cpu" and table.shape[1] >= _SORTED:
        return torch.from_numpy(np.argsort(table.numpy(), axis=1))
    return table.argsort(dim=1)
