"""The correlation of the distances in one space with those between the partners."""

import math

import torch
from torch import Tensor

from torchgw._plans.contract import Plan
from torchgw._results.mapping import Extension
from torchgw.distances.base import DistanceProvider, both_ways

# All distances are read up to so many points, squared, where they have no factors. [L328]
_READ_ENTRIES = 25_000_000
# Pairs of points that are drawn from larger problems. [L328]
_DRAWN_PAIRS = 1024


def distance_correlation(plan: Plan, extension: Extension) -> float:
    """Compute Pearson's correlation of D_X(i, k) and D_Y(j, l), (i, j) and (k, l) from a plan."""
    # both (p, q) and (q, p) occur among pairs of pairs, so one way of directed costs holds them all
    source, target = both_ways(*map(extension.known.distances, (0, 1)))[0]
    with torch.no_grad(), torch.autocast(plan.device.type, enabled=False):
        factored = source.factors() is not None and target.factors() is not None
        few = max(plan.shape) ** 2 <= _READ_ENTRIES
        cheap = source.cheap_columns and target.cheap_columns
        if cheap and (factored or few):
            return _exactly(plan, source, target)
        generator = torch.Generator(plan.device).manual_seed(0)
        pairs = plan.sample(_DRAWN_PAIRS, generator)
        tables = (
            side.columns(index)[index].double()
            for side, index in zip((source, target), pairs, strict=True)
        )
        # a pair is not compared with itself: the two were not drawn independently
        others = ~torch.eye(_DRAWN_PAIRS, dtype=torch.bool, device=plan.device)
        x, y = (table[others] for table in tables)
        moments = torch.stack([x.mean(), y.mean(), x @ x, y @ y, x @ y])
        moments[2:] /= len(x)
        return _correlation(moments, moments[2:4])


def _exactly(plan: Plan, source: DistanceProvider, target: DistanceProvider) -> float:
    """Compute the correlation from the moments of all pairs."""
    source, target = (side.to(plan.device, torch.float64) for side in (source, target))
    p, q = plan.marginals()
    mass = p.sum()
    p, q = p / mass, q / q.sum()
    far = target.factors()
    if far is not None:
        # D_Y = B diag(s) B', so <D_X P D_Y, P> = sum_r s_r b_r' D_X b_r for the columns of P B
        moved = (plan @ far.matrix.double()) / mass
        cross = ((source.apply(moved) * moved).sum(0) * far.signs).sum()
    else:
        matrix = plan.stored().double() / mass
        cross = (target.apply(source.apply(matrix).T.contiguous()).T * matrix).sum()
    moments = [p @ source.apply(p[:, None])[:, 0], q @ target.apply(q[:, None])[:, 0]]
    moments += [p @ source.mean_square(p), q @ target.mean_square(q), cross]
    # all distances between points that have some mass alike
    even = [(mass > 0).double() / (mass > 0).sum() for mass in (p, q)]
    sizes = [
        each @ side.mean_square(each) for side, each in zip((source, target), even, strict=True)
    ]
    return _correlation(torch.stack(moments), torch.stack(sizes))


def _correlation(moments: Tensor, sizes: Tensor) -> float:
    """Compute the correlation from the means of x, y, x^2, y^2 and x y, and two mean squares."""
    x, y, xx, yy, xy = moments.tolist()
    spreads, eps = (xx - x * x, yy - y * y), torch.finfo(torch.float64).eps
    for spread, square, size in zip(spreads, (xx, yy), sizes.tolist(), strict=True):
        # rounding of zero: of the difference, or of distances, where nearly all mass is on pairs
        # that are as far apart. A plan without mass has no moments.
        if not spread > max(1e-12 * square, eps**2 * size):
            return math.nan
    # roots one by one: the product of two variances may be too small for a number
    ratio = (xy - x * y) / (math.sqrt(spreads[0]) * math.sqrt(spreads[1]))
    return float(max(-1.0, min(1.0, ratio)))
