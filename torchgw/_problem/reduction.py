"""Known pairs as a smaller problem: their mass is fixed, and the points that are left see it.

With the plan P + sum_k w_k e_i(k) e_j(k)' of pairs k, whose weights w sum to W, the objective is

    alpha <L(P), P> + <N, P> + constant,    N = 2 alpha sum_k w_k loss(DX_ii(k), DY_jj(k))
                                                + (1 - alpha) M

for plans P of the other points, of mass 1 - W. Divided by that it is a problem of the usual form,
of weight alpha (1 - W) and the linear cost N / (1 - alpha (1 - W)), at the same epsilon, whose
linearised cost is that of the whole problem. N has factors where distances have: those of a side,
so that a cost in its factors is of no larger rank than without pairs.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw._problem.limits import limits_of
from torchgw._problem.problem import Problem
from torchgw._problem.support import KnownPairs, usable, usable_entries
from torchgw._sinkhorn.entries import Entries
from torchgw._sinkhorn.problem import Cost, DenseCost, FactoredCost, added, block
from torchgw._tensors.operations import EQUAL
from torchgw._typing import Indices, Marginals
from torchgw.distances.base import both_ways


class Reduction(NamedTuple):
    """A problem without the points whose partners are known."""

    whole: Problem  # its support does not say what the pairs do
    problem: Problem  # of the points that are left, whose weights sum to one
    pairs: Indices  # (k,) points of X and of Y
    mass: Tensor  # (k,) float64
    kept: Indices  # points of X and of Y that are left, ascending

    @property
    def left(self) -> float:
        """Mass of the points that are left."""
        return float(self.whole.marginals.a[self.kept.source].sum())


def without_pairs(problem: Problem, pairs: Indices) -> Reduction:
    """Take the points of known pairs out of a problem with strict marginals."""
    a, b = problem.marginals
    here, there = a[pairs.source], b[pairs.target]
    differ = ((here - there).abs() > EQUAL * torch.maximum(here, there)).nonzero()[:, 0].tolist()
    if differ:
        k = differ[0]
        i, j = int(pairs.source[k]), int(pairs.target[k])
        raise InvalidInputError(
            f"Points of a known pair hold all of each other's weight, and pairs[{k}] = ({i}, {j}) "
            f"has the weights {float(here[k]):.6g} and {float(there[k]):.6g}. No plan has both. "
            "Give them equal weights `a` and `b`, or relax the weights by `unbalanced` or `mass`."
        )
    if problem.support is not None:
        _check_supported(problem.support[pairs.source, pairs.target], pairs)
    if problem.restriction is not None:
        _check_supported(problem.restriction.hold(pairs), pairs)
    # something is left to solve for: the heaviest pair, if all mass is known
    if float(a.sum() - here.sum()) <= EQUAL or len(pairs.source) in (len(a), len(b)):
        rest = torch.arange(len(here), device=here.device) != here.argmax()
        pairs = Indices(*(side[rest] for side in pairs))
        here = here[rest]
    kept = Indices(
        *(_others(side, len(weight)) for side, weight in zip(pairs, (a, b), strict=True))
    )
    own = Marginals(a[kept.source], b[kept.target])
    weights = Marginals(*(part / part.sum() for part in own))
    alpha = problem.alpha * float(1 - here.sum())
    linear = None  # pairs of points without weight are not seen
    if alpha < 1:
        linear = seen(problem, pairs, here, kept).scaled(here.new_tensor(1 / (1 - alpha)))
    support = problem.support
    if support is not None:
        support = usable(support[kept.source][:, kept.target], weights, None)
    source, target = problem.source.subset(kept.source), problem.target.subset(kept.target)
    restriction = problem.restriction
    if restriction is not None:
        restriction = restriction.at(kept)
    if isinstance(restriction, Entries):
        restriction = usable_entries(restriction, weights)
    small = Problem(source, target, weights, alpha, linear, problem.loss, support, restriction)
    return Reduction(problem, small, pairs, here, kept)


def _others(index: Tensor, size: int) -> Tensor:
    """List the points that an index does not name."""
    used = torch.zeros(size, dtype=torch.bool, device=index.device)
    used[index] = True
    return (~used).nonzero()[:, 0]


def _check_supported(inside: Tensor, pairs: Indices) -> None:
    """Refuse known pairs that something else forbids."""
    if not bool(inside.all()):
        k = int((~inside).nonzero()[0, 0])
        raise InvalidInputError(
            f"pairs[{k}] = ({int(pairs.source[k])}, {int(pairs.target[k])}) is a known pair, and "
            "`allowed`, `groups` or an infinite entry of `M` says that it cannot be. Drop one."
        )


def seen(problem: Problem, pairs: Indices, mass: Tensor, kept: Indices) -> Cost:
    """Compute the linear cost N between points, (n, m) float64, that the mass of pairs makes."""
    cost = compared(problem, pairs, 2 * problem.alpha * mass, kept)
    if problem.linear is None or problem.alpha == 1:
        return cost
    return added(cost, block(problem.linear, *kept), 1 - problem.alpha)


def with_likely(problem: Problem, pairs: KnownPairs) -> Problem:
    """Add to the linear cost what likely pairs say, by their confidence."""
    if pairs.likely is None:
        return problem
    every = Indices(*(torch.arange(len(side), device=side.device) for side in problem.marginals))
    cost = compared(problem, pairs.likely, pairs.weights(problem.marginals), every)
    return replace(problem, linear=cost if problem.linear is None else added(cost, problem.linear))


def compared(problem: Problem, pairs: Indices, weights: Tensor, kept: Indices) -> Cost:
    """Compute sum_k weights_k loss(DX_ii(k), DY_jj(k)) between points, (n, m) float64."""
    # the mean of both directions of directed costs
    ways = both_ways(*problem.sides)
    weights = weights / len(ways)
    loss, cost = problem.loss, None
    shape = len(kept.source), len(kept.target)
    stores = limits_of(problem.source.device).stores(*shape)
    if loss.cross is None and not stores:
        raise UnsupportedError(
            f"`pairs` with loss={loss.name!r} would store {shape[0]} x {shape[1]} entries, which "
            "is too many: that loss has no factors. Pass loss='square', or take fewer points."
        )
    for way in ways:
        near, far = (
            side.columns(index)[rest].double()
            for side, index, rest in zip(way, pairs, kept, strict=True)
        )
        row, column = loss.own[0](near) @ weights, loss.own[1](far) @ weights
        if loss.cross is None:
            table = row[:, None] + column
            for weight, x, y in zip(weights.tolist(), near.T, far.T, strict=True):
                table -= 2 * weight * torch.minimum(x[:, None], y)
            part: Cost = DenseCost(table)
        else:
            left, right = _in_factors(
                problem, pairs, kept, loss.cross[0](near), loss.cross[1](far), 2 * weights
            )
            part = FactoredCost(left, right, row, column)
        cost = part if cost is None else added(cost, part)
    assert cost is not None
    with_factors = any(side.factors() for side in problem.crossed() or ())
    return cost.dense() if stores and not with_factors else cost


def _in_factors(
    problem: Problem, pairs: Indices, kept: Indices, near: Tensor, far: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Write near diag(weights) far', (n, k) and (m, k), in the factors of a side if it has any."""
    # of the side of smaller rank, in whose factors the gradient has its cost too
    crossed = problem.crossed()
    assert crossed is not None
    source, target = (side.factors() for side in crossed)
    ranks = [factors.signs.numel() if factors else float("inf") for factors in (source, target)]
    if source is not None and ranks[0] < ranks[1]:
        known = (source.matrix[pairs.source] * source.signs).double()
        return source.matrix[kept.source].double(), far @ (weights[:, None] * known)
    if target is not None:
        known = (target.matrix[pairs.target] * target.signs).double()
        return near @ (weights[:, None] * known), target.matrix[kept.target].double()
    return near * weights, far


def count_allowed(problem: Problem, reduction: Reduction | None) -> dict[str, float] | None:
    """Count the entries that a plan may use, and the source points with one partner left."""
    pairs = 0 if reduction is None else len(reduction.mass)
    small = problem if reduction is None else reduction.problem
    n, m = len(small.marginals.a), len(small.marginals.b)
    known = small.support if small.restriction is None else small.restriction
    if known is not None:
        count = known.sum(1) if isinstance(known, Tensor) else known.partners()
        entries, alone = int(count.sum()), count == 1
    elif reduction is None:
        return None
    else:
        entries, alone = n * m, torch.full((n,), m == 1, device=reduction.mass.device)
    left = 1.0 if reduction is None else reduction.left
    return {
        "entries": entries + pairs,
        "share": (entries + pairs) / (len(problem.marginals.a) * len(problem.marginals.b)),
        "decided": int(alone.sum()) + pairs,
        "mass": 1 - left + left * float(small.marginals.a[alone].sum()),
    }
