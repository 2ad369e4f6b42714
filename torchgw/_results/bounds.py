"""What a result is worth: lower bounds of the objective, and the correlation of distances.

For a loss |x - y|^p every plan P of a balanced problem costs at least (Memoli 2011, in our units)

    FLB   OT of the eccentricities of the points, (sum_k a_k D_ik^p)^(1/p) for p = 2
    SLB   OT of all distances of one side, by a x a, with those of the other, by b x b
    TLB   min_P sum_ij P_ij OT(distances of i, distances of j)

with optimal transport (OT) of numbers at the cost |x - y|^p. The third is the largest. Each is only
made smaller here by what makes it cheap: quantile functions are averaged over equal parts of the
mass, which lowers a convex cost; a linear problem is bounded by a feasible dual pair.
"""

import math
from typing import Any

import scipy
import torch
from torch import Tensor

from torchgw._certify.tables import PARTS, quantile_means
from torchgw._plans.contract import Plan
from torchgw._problem.limits import limits_of
from torchgw._problem.losses import LOSSES
from torchgw._problem.problem import is_assignment, stored_matrix
from torchgw._results.mapping import Extension
from torchgw._sinkhorn.annealing import Annealing
from torchgw._sinkhorn.eager import EagerBackend
from torchgw._sinkhorn.loop import sinkhorn
from torchgw._sinkhorn.problem import Cost, DenseCost, LinearProblem
from torchgw._tensors.operations import plainly
from torchgw._typing import Marginals, Potentials
from torchgw.distances.base import BLOCK_ENTRIES, DistanceProvider

# Parts of equal mass over which the quantiles of all distances of a side are averaged. [L329]
_FINE_PARTS = 65_536
# Epsilon of the last entropic dual as a share of the mean cost, its decay from the mean cost, and
# the iterations at each. [L330]
_LEAST_EPSILON = 3e-4
_DECAY = 0.5
_ITERATIONS = 100
_TOLERANCE = 1e-4


def lower_bound(extension: Extension, weights: Marginals) -> float:
    """Compute the largest bound that is affordable; NaN where none is known."""
    known = extension.known
    order, alpha = LOSSES[known.loss.name].order, known.alpha
    sides = known.distances(0), known.distances(1)
    cheap = all(side.cheap_columns for side in sides)
    if known.own is not None or (alpha > 0 and (order is None or not cheap)):
        return math.nan
    with plainly(weights.a.device):
        linear = extension.linear_cost() if alpha < 1 else None
        limits = limits_of(weights.a.device)
        small = math.prod(map(len, weights)) <= limits.exact
        squares = max(side.n for side in sides) ** 2
        if small and squares <= limits.read:
            table: Any = 0.0 if linear is None else (1 - alpha) * linear.dense().matrix.double()
            if alpha > 0:
                assert order is not None
                table = table + alpha * _local(sides, weights, order)
            bound = _transport(table, weights)
            return max(0.0, bound) if linear is None else bound
        least = 0.0 if linear is None else (1 - alpha) * _least(linear, weights)
        quadratic = [0.0]
        if alpha > 0:
            assert order is not None
            quadratic.append(_first(sides, weights, order))
            if squares <= limits.read:
                quadratic.append(_second(sides, weights, order))
        return alpha * max(quadratic) + least


Sides = tuple[DistanceProvider, DistanceProvider]


def _first(sides: Sides, weights: Marginals, order: int) -> float:
    """Compute the first lower bound."""
    spreads = []
    for side, weight in zip(sides, weights, strict=True):
        mass = weight.to(side.dtype)
        if order == 2:
            values = side.mean_square(mass).clamp_min(0).sqrt()
        else:
            values = side.apply(mass[:, None])[:, 0]
        spreads.append((values, mass.double()))
    return _transport_of_numbers(spreads, order)


def _second(sides: Sides, weights: Marginals, order: int) -> float:
    """Compute the second lower bound."""
    spreads = [
        (stored_matrix(side).flatten(), torch.outer(weight, weight).flatten())
        for side, weight in zip(sides, weights, strict=True)
    ]
    return _transport_of_numbers(spreads, order)


def _transport_of_numbers(spreads: list[tuple[Tensor, Tensor]], order: int) -> float:
    """Bound the cost of transport between two distributions, each of numbers and their weights."""
    x, y = (quantile_means(part.double()[None], mass, _FINE_PARTS) for part, mass in spreads)
    return float((x - y).abs().pow(order).mean())


def _local(sides: Sides, weights: Marginals, order: int) -> Tensor:
    """Compute the costs of the third lower bound, (n, m)."""
    # with as many parts as points of equal weight the bound loses nothing
    parts = sides[0].n if is_assignment(weights) else PARTS
    x, y = (
        quantile_means(stored_matrix(side).double(), weight, parts)
        for side, weight in zip(sides, weights, strict=True)
    )
    return torch.cdist(x, y, p=float(order)).pow(order) / parts


def _transport(cost: Tensor, weights: Marginals) -> float:
    """Bound the least <C, P> from below: exact for n = m and equal weights, otherwise by a dual."""
    used = [(weight > 0).nonzero()[:, 0] for weight in weights]
    a, b = (weight[index] / weight.sum() for weight, index in zip(weights, used, strict=True))
    cost = cost[used[0]][:, used[1]]
    marginals = Marginals(a, b)
    if is_assignment(marginals):
        table = cost.cpu().numpy()
        return float(table[scipy.optimize.linear_sum_assignment(table)].mean())
    scale = float(cost.max() - cost.min())
    g = torch.zeros_like(b)
    best = _dual(cost, marginals, g)
    if scale == 0:
        return best
    potentials: Potentials | None = None
    anneal = Annealing(scale, _LEAST_EPSILON * scale, decay=_DECAY)
    epsilons = [anneal(step) for step in range(math.ceil(math.log(_LEAST_EPSILON, _DECAY)) + 1)]
    for epsilon in epsilons:
        prepared = EagerBackend().prepare(LinearProblem(DenseCost(cost), marginals, epsilon))
        found = sinkhorn(prepared, potentials, max_iter=_ITERATIONS, tol=_TOLERANCE)
        potentials = found.potentials
        best = max(best, _dual(cost, marginals, potentials.g))
    return best


def _dual(cost: Tensor, weights: Marginals, g: Tensor) -> float:
    """Compute the dual value of the largest feasible potentials made from a guess g (m,)."""
    f = (cost - g).min(1).values
    g = (cost - f[:, None]).min(0).values
    return float(weights.a @ f + weights.b @ g)


def _least(cost: Cost, weights: Marginals) -> float:
    """Bound the least <M, P> from below by the least cost of each point; nothing is stored."""
    a, b = weights
    height = max(1, BLOCK_ENTRIES // len(b))
    columns, rows = torch.full_like(b, torch.inf), 0.0
    for start in range(0, len(a), height):
        block = slice(start, start + height)
        table = cost.rows(block).dense().matrix.double()
        rows += float(a[block] @ table.min(1).values)
        columns = torch.minimum(columns, table.min(0).values)
    return max(rows, float(b @ columns))


# Pairs of points that are drawn from larger problems. [L328]
_DRAWN_PAIRS = 1024


def distance_correlation(plan: Plan, extension: Extension) -> float:
    """Compute Pearson's correlation of D_X(i, k) and D_Y(j, l), (i, j) and (k, l) from a plan."""
    # both (p, q) and (q, p) occur among pairs of pairs, so one way of directed costs holds them all
    source, target = map(extension.known.distances, (0, 1))
    relations = list(zip(source.relations(), target.relations(), strict=True))
    with plainly(plan.device):
        factored = source.factors() is not None and target.factors() is not None
        few = max(plan.shape) ** 2 <= limits_of(plan.device).read
        cheap = source.cheap_columns and target.cheap_columns
        if cheap and (factored or few):
            return _correlation([_exactly(plan, *sides) for sides in relations])
        generator = torch.Generator(plan.device).manual_seed(0)
        pairs = plan.sample(_DRAWN_PAIRS, generator)
        # a pair is not compared with itself: the two were not drawn independently
        others = ~torch.eye(_DRAWN_PAIRS, dtype=torch.bool, device=plan.device)
        found = []
        for sides in relations:
            x, y = (
                side.between(index, index).double()[others]
                for side, index in zip(sides, pairs, strict=True)
            )
            moments = torch.stack([x.mean(), y.mean(), x @ x, y @ y, x @ y])
            moments[2:] /= len(x)
            found.append((moments, moments[2:4]))
        return _correlation(found)


def _exactly(
    plan: Plan, source: DistanceProvider, target: DistanceProvider
) -> tuple[Tensor, Tensor]:
    """Compute the moments of all pairs, and the mean squares of points that count alike."""
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
    return torch.stack(moments), torch.stack(sizes)


def _correlation(relations: list[tuple[Tensor, Tensor]]) -> float:
    """Compute the correlation from the means of x, y, x^2, y^2 and x y, and two mean squares."""
    # of each relation, whose distances are put together
    moments, sizes = (torch.stack(each).mean(0) for each in zip(*relations, strict=True))
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
