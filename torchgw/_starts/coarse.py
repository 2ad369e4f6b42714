"""The coarse problem: a few points of each side, with the mass of what is nearest to them.

What is computed on the way reads nothing back from the device and depends on shapes alone, so that
it can be recorded in a CUDA graph; :func:`coarsen` and :func:`choose_points` look at the outcome.
:func:`with_loss` puts other losses, and directed costs, in the place of the square loss.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import scipy
import torch
from torch import Tensor

from torchgw._boundary.arrays import SAME_DISTANCE
from torchgw._gradients.contract import Levels, SampledLoss
from torchgw._problem.limits import CPU, limits_of
from torchgw._problem.losses import SQUARE, Loss
from torchgw._problem.problem import Problem, is_sparse, weigh_alike
from torchgw._sinkhorn.problem import Cost, block
from torchgw._tensors.operations import EQUAL, Call, call_directly
from torchgw._typing import Marginals
from torchgw.distances.sampling import (
    ColumnReader,
    SpreadPoints,
    column_reader,
    draw_points,
    ran_out,
    uniform_draws,
    without_surplus,
)

# Levels of a minimum between as many points as a coarse problem has, and at least: fewer points
# leave room for more. [L278, L1448]
_LEVELS = 16
# Quantiles of the distances of a side that the spread of a loss is computed from. [L278]
_QUANTILES = 256
SQUARE_OF_FLOAT32 = torch.finfo(torch.float32).eps ** 2
# Leading axes of each side, whose signs are tried in all combinations, and in which matches are
# compared. [L224, L374]
AXES = 3
_ALL = slice(None)


class CoarseProblem(NamedTuple):
    """Two coarse sides, with the constants of their objective (docs/algorithm.md, equation 38)."""

    # `x` and `y` are the doubly centred tables, one of each for the square loss and r for one that
    # has r products (`torchgw._starts.coarse`).
    # A plan with the marginals a, b has the value constant + <base, P> - 2 alpha <x P y, P>.

    source: SpreadPoints
    target: SpreadPoints
    alpha: Tensor  # ()
    linear: Tensor | None  # (s, t)
    x: Tensor  # (r, s, s)
    y: Tensor  # (r, t, t)
    column: Tensor  # (r, t), centred row means of the target's tables
    base: Tensor  # (s, t)
    constant: Tensor  # ()
    unit: Tensor  # () of the cost over that of the square loss
    spread: Tensor  # () natural scale of the cost without its linear part

    @property
    def sides(self) -> tuple[SpreadPoints, SpreadPoints]:
        """The points of both sides."""
        return self.source, self.target

    @property
    def weights(self) -> Marginals:
        """The weights of both sides."""
        return Marginals(self.source.weights, self.target.weights)

    def value(self, plans: Tensor) -> Tensor:
        """Return the objective without entropy of plans (B, s, t) whose marginals are exact."""
        cross = (cross_terms(self.x, plans, self.y) * plans).sum((-1, -2))
        return self.constant + (plans * self.base).sum((-1, -2)) - 2 * self.alpha * cross

    def linearised(
        self, plans: Tensor, rows: Tensor | slice = _ALL, columns: Tensor | slice = _ALL
    ) -> Tensor:
        """Return the costs at plans (B, k, l) between some points, (B, s, t)."""
        cross = cross_terms(self.x[:, :, rows], plans, self.y[:, columns])
        return self.base - 4 * self.alpha * cross

    def rounding(self) -> float:
        """Return what rounding leaves of a value: lower ones are zero, and closer ones the same.

        A value is a difference of mean squares; their digits end at float64's precision, and twins
        of data in float32 lie by the square of its precision apart, which is 64 times as much.
        """
        squares = [side.weights @ side.table.square() @ side.weights for side in self.sides]
        return float(sum(squares) * self.alpha + self.constant.abs()) * SQUARE_OF_FLOAT32

    def distances(self, plans: Tensor) -> Tensor:
        """Return how far plans (B, s, t) send a point apart, shape (B, B), 1 for unrelated plans.

        The energy distance of a source point's partners under two plans, averaged over the points,
        relative to the mean distance of two target points. Points of similarities are as far apart
        as each is more like itself than like the other.
        """
        table, b = self.target.table, self.target.weights
        own = table.diagonal() / 2
        table = (table - own[:, None] - own).abs()
        conditional = plans / self.source.weights[:, None]
        gram = (plans @ table).flatten(1) @ conditional.flatten(1).T
        gram = (gram + gram.T) / 2
        own = gram.diagonal()
        mean = (b @ table @ b).clamp_min(torch.finfo(gram.dtype).tiny)
        return (gram - (own[:, None] + own[None, :]) / 2) / mean


def cross_terms(x: Tensor, plans: Tensor, y: Tensor) -> Tensor:
    """Return sum_r x_r P y_r, (B, s, t), for x (r, s, k), plans (B, k, l) and y (r, l, t)."""
    return side_by_side(x.flatten(0, 1) @ plans, len(x)) @ y.flatten(0, 1)


def side_by_side(stacked: Tensor, count: int) -> Tensor:
    """Turn (B, r s, t), r matrices below each other, into (B, s, r t)."""
    found: Tensor = stacked.unflatten(-2, (count, -1)).transpose(-2, -3).flatten(-2)
    return found


class Coarsened(NamedTuple):
    """A coarse problem, and what the host knows of it."""

    problem: CoarseProblem
    floor: float  # the value that the least linear cost amounts to: no plan has a lower one
    scale: float  # natural scale of the cost, equation 8
    resolution: float  # mean distance to a coarse point, relative to that of two points


class _Built(NamedTuple):
    """A coarse problem as built, which has to be checked."""

    problem: CoarseProblem
    numbers: Tensor  # float64: floor, scale, resolution squared; what is to be checked


def coarsen(problem: Problem, size: int, call: Call = call_directly) -> Coarsened:
    """Choose at most ``size`` points per side, always the same ones for one problem."""
    # the sides are drawn differently: the same draws would favour equal indices where both sides
    # are the same
    sides = problem.sides
    uniform = [uniform_draws(side, size, seed) for seed, side in enumerate(sides)]
    alpha = uniform[0].new_full((), problem.alpha)
    arguments = (*map(column_reader, sides), *problem.marginals, *uniform, alpha, problem.linear)
    built = call(f"coarsen {size}", partial(_build, size), *arguments)
    *numbers, used_x, drawn_x, used_y, drawn_y = built.numbers.tolist()
    counts = (int(used_x), int(drawn_x)), (int(used_y), int(drawn_y))
    coarse = built.problem
    if any(ran_out(side.n, size, *count) for side, count in zip(sides, counts, strict=True)):
        source, target = (
            without_surplus(side, weights, drawn, size, count)
            for side, weights, drawn, count in zip(
                sides, problem.marginals, (coarse.source, coarse.target), counts, strict=True
            )
        )
        coarse, constants = _constants(source, target, alpha, problem.linear)
        numbers = constants.tolist()
    floor, scale, ratio = numbers
    if problem.support is not None and coarse.linear is not None:
        # the scale so far is that of all entries
        more = _spread(coarse, problem) - float(coarse.linear.std(correction=0))
        scale += (1 - problem.alpha) * more
    # all points of one side coincide: every plan costs the same and any scale will do
    return Coarsened(coarse, floor, scale or 1.0, math.sqrt(ratio))


def support_of(problem: Problem, source: SpreadPoints, target: SpreadPoints) -> Tensor | None:
    """Say which pairs of coarse points may hold mass, (s, t); ``None`` if all may."""
    if problem.support is None:
        return None
    return problem.support[source.indices[:, None], target.indices]


def _spread(coarse: CoarseProblem, problem: Problem) -> float:
    """Compute the standard deviation of a linear cost between coarse points, where allowed."""
    assert coarse.linear is not None
    support = support_of(problem, coarse.source, coarse.target)
    table = coarse.linear if support is None else coarse.linear[support]
    # few points may have no pair that is allowed
    return float(table.std(correction=0)) if table.numel() else 0.0


def represent(problem: Problem, call: Call = call_directly) -> Coarsened | None:
    """Return the coarse problem to search: all points if few say too little, none if too many."""
    limits = limits_of(problem.source.device)
    # few points may not be matched as their neighbours may, whose mass they have
    if problem.support is None:
        coarse = coarse_problem(problem, limits.few_points, call)
        if coarse.resolution <= limits.coarsest:
            return coarse
    if max(problem.shape) > limits.all_points:
        return None
    return coarse_problem(problem, limits.all_points, call)


def coarse_problem(problem: Problem, size: int, call: Call = call_directly) -> Coarsened:
    """Return a coarse problem with the loss of the whole one."""
    return with_loss(coarsen(problem, size, call), problem)


def as_before(
    problem: Problem, before: tuple[SpreadPoints, SpreadPoints], call: Call = call_directly
) -> Coarsened | None:
    """Make the coarse problem of points that were drawn before, of all points of equal weights."""
    # `None` if weights are not equal, or distances not the same but for a unit.
    alpha = torch.full_like(problem.marginals.a[0], problem.alpha)
    readers = map(column_reader, problem.sides)
    built = call("as before", _build_again, *readers, *problem.marginals, *before, alpha)
    floor, scale, ratio, same = built.numbers.tolist()
    return Coarsened(built.problem, floor, scale, math.sqrt(ratio)) if same else None


def _build_again(
    source: ColumnReader,
    target: ColumnReader,
    a: Tensor,
    b: Tensor,
    x: SpreadPoints,
    y: SpreadPoints,
    alpha: Tensor,
) -> _Built:
    """Read the distances of points drawn before, and compare them with those of before."""
    points, same = [], torch.ones_like(alpha, dtype=torch.bool)
    for reader, weights, old in ((source, a, x), (target, b, y)):
        table = reader.columns(old.indices)[old.indices].double()
        unit = (old.weights @ table @ old.weights) / (old.weights @ old.table @ old.weights)
        near = (table - unit * old.table).abs().amax() <= SAME_DISTANCE * table.amax()
        same &= near & ((weights - 1 / len(weights)).abs().amax() <= SAME_DISTANCE / len(weights))
        table = (table + table.T) / 2
        points.append(old._replace(table=table, square=unit.square() * old.square))
    coarse, numbers = _constants(points[0], points[1], alpha, None)
    return _Built(coarse, torch.cat([numbers, same[None].to(numbers)]))


def _build(
    size: int,
    source: ColumnReader,
    target: ColumnReader,
    a: Tensor,
    b: Tensor,
    uniform_x: Tensor,
    uniform_y: Tensor,
    alpha: Tensor,
    linear: Cost | None,
) -> _Built:
    """Draw points of both sides and compute the constants."""
    x = draw_points(size, 0, source, a, uniform_x)
    y = draw_points(size, 1, target, b, uniform_y)
    coarse, numbers = _constants(x.points, y.points, alpha, linear)
    return _Built(coarse, torch.cat([numbers, x.counts.to(numbers), y.counts.to(numbers)]))


def _constants(
    source: SpreadPoints, target: SpreadPoints, alpha: Tensor, cost: Cost | None
) -> tuple[CoarseProblem, Tensor]:
    """Return the problem between two sides; floor, scale and squared resolution, (3,)."""
    x, row, mean_x, square_x = centre(source)
    y, column, mean_y, square_y = centre(target)
    base = -4 * alpha * torch.outer(row, column)
    variances = (square_x - mean_x * mean_x) * (square_y - mean_y * mean_y)
    scale = spread = 4 * alpha * variances.clamp_min(0).sqrt()
    linear, floor = None, torch.zeros_like(alpha)
    if cost is not None:
        linear = block(cost, source.indices, target.indices).dense().matrix.double()
        # a constant moves no plan, and float32 would lose digits to it
        floor = (1 - alpha) * linear.min()
        base = base + ((1 - alpha) * linear - floor)
        scale = spread + (1 - alpha) * linear.std(correction=0)
    ratios = [
        side.square / square.clamp_min(torch.finfo(square.dtype).tiny)
        for side, square in ((source, square_x), (target, square_y))
    ]
    constant = alpha * (square_x + square_y - 2 * mean_x * mean_y) + floor
    one = torch.ones_like(alpha)
    coarse = CoarseProblem(
        source, target, alpha, linear, x[None], y[None], column[None], base, constant, one, spread
    )
    return coarse, torch.stack([floor, scale, torch.stack(ratios).amax()])


def centre(side: SpreadPoints) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the doubly centred table, centred row means, mean, and mean square."""
    table, weights = side.table, side.weights
    row = table @ weights
    mean = weights @ row
    square = weights @ (table * table) @ weights
    return table - row[:, None] - row[None, :] + mean, row - mean, mean, square


def with_loss(coarse: Coarsened, problem: Problem) -> Coarsened:
    """Return a coarse problem of the square loss with the loss of ``problem`` in its place."""
    # With S and A the symmetric and antisymmetric parts of directed costs, and T and B those of the
    # other side, the mean over both ways of the cross term is S P T - A P B: twice the parts.
    if problem.plain:
        return coarse
    square = coarse.problem
    relations, alpha = directed_points(square.sides, problem), square.alpha
    parts: tuple[list[Any], list[Any]] = ([], [])
    for sides in relations:
        loss = _on_levels(problem.loss, sides)
        for number, side in enumerate(sides):
            parts[number].append(_centre(loss, number, side, both=problem.directed))
    (x, row, mean_x, own_x), (y, column, mean_y, own_y) = (
        [torch.cat(each) for each in zip(*side, strict=True)] for side in parts
    )
    # the objective is the mean over relations
    x, row, mean_x = (each / len(relations) for each in (x, row, mean_x))
    own_x, own_y = own_x.mean(), own_y.mean()
    y = y.mT if problem.directed else y
    base = -4 * alpha * row.T @ column
    if square.linear is not None:
        base = base + (1 - alpha) * (square.linear - square.linear.min())
    quadratic, before = (
        2 * problem.alpha * mean_spread(loss, relations, problem.marginals)
        for loss in (problem.loss, SQUARE)
    )
    unit = quadratic / before if quadratic > 0 and before > 0 else 1.0
    changed = square._replace(
        x=x, y=y, column=column, base=base,
        constant=alpha * (own_x + own_y - 2 * mean_x @ mean_y) + coarse.floor,
        unit=torch.full_like(alpha, unit), spread=torch.full_like(alpha, quadratic),
    )  # fmt: skip
    scale = quadratic
    if square.linear is not None:
        scale += (1 - problem.alpha) * _spread(square, problem)
    return coarse._replace(problem=changed, scale=scale or 1.0)


def _on_levels(loss: Loss, sides: tuple[SpreadPoints, ...]) -> Loss:
    """Write a loss as products, of levels where it is a minimum."""
    reach = min(float(side.table.max()) for side in sides)
    steps = max(_LEVELS, _LEVELS * CPU.few_points // max(len(side.table) for side in sides))
    levels = Levels(reach, steps)
    if loss.cross is None:
        # distances of few points, between which nothing is to be told
        tables = torch.cat([side.table.flatten() for side in sides])
        cuts = torch.cat([tables.new_zeros(1), tables]).clamp(0, reach).unique()
        levels = Levels(reach, len(cuts) - 1, cuts) if 1 < len(cuts) <= steps else levels
    return SampledLoss.of(loss, levels=levels)


def directed_points(
    sides: tuple[SpreadPoints, SpreadPoints], problem: Problem
) -> list[tuple[SpreadPoints, ...]]:
    """Give the points of both sides for each relation, with costs in their direction if any."""
    found = (
        [
            side._replace(table=way.columns(side.indices)[side.indices].double())
            for way in provider.relations()
        ]
        if provider.directed
        else [side]
        for side, provider in zip(sides, problem.sides, strict=True)
    )
    return list(zip(*found, strict=True))


def mean_spread(
    loss: Loss, relations: list[tuple[SpreadPoints, ...]], weights: Marginals, own: float = 0.0
) -> float:
    """Return the mean of the spreads of a loss over relations."""
    spreads = [loss_spread(loss, sides, weights, own) for sides in relations]
    return sum(spreads) / len(spreads)


def _centre(
    loss: Loss, number: int, side: SpreadPoints, *, both: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return centred tables (r, s, s), row means and means of the cross term; mean own term."""
    # Of the source (0) or the target (1); of `both` ways the symmetric parts, then the others.
    weights, table = side.weights, coarse_table(loss, side)
    parts = torch.arange(loss.parts, device=table.device)
    tables = [loss.part(number, table, part) for part in parts]
    if number == 0:
        # each part counts by one over their number, as the cross term is their mean
        tables = [each / loss.parts for each in tables]
    centred, rows, means, _ = (
        torch.stack(each)
        for each in zip(
            *(
                centre(side._replace(table=(each + each.T) / 2 if both else each))
                for each in tables
            ),
            strict=True,
        )
    )
    if both:
        skew = torch.stack([(each - each.T) / 2 for each in tables])
        row = skew @ weights
        centred = torch.cat([centred, skew - row[:, :, None] + row[:, None, :]])
        rows, means = torch.cat([rows, row]), torch.cat([means, torch.zeros_like(means)])
    return centred, rows, means, (weights @ loss.own[number](table) @ weights)[None]


def coarse_table(loss: Loss, side: SpreadPoints) -> Tensor:
    """Return the distances of coarse points as a loss should see them."""
    # Each stands for many, so that its distance to itself is not zero where that is extreme.
    if not loss.singular:
        return side.table
    table = side.table
    itself = torch.eye(len(table), dtype=table.dtype, device=table.device)
    return table + (2 * side.square).sqrt() * itself


def loss_spread(
    loss: Loss, sides: tuple[SpreadPoints, ...], weights: Marginals, own: float = 0.0
) -> float:
    """Return the standard deviation of the loss of two distances, less what either decides alone.

    For the square loss that is 2 std(DX) std(DY); it is at least the share ``own`` of what either
    distance decides. The ``weights`` are those of all points, which the few of ``sides`` stand for.
    """
    (x, p), (y, q) = (_distribution(*pair) for pair in zip(sides, weights, strict=True))
    table = loss(*torch.meshgrid(x, y, indexing="ij"))
    largest = float(table.abs().max())
    column = p @ table
    table = table - column
    row = table @ q
    table = table - row[:, None]
    spread = float((p @ table.square() @ q).sqrt())
    if own > 0:
        alone = float((p @ row.square()).sqrt()), float((q @ (column - q @ column).square()).sqrt())
        spread = max(spread, own * sum(alone))
    # a spread of equal distances is rounding, and counts as zero
    return spread if spread > EQUAL * largest else 0.0


def _distribution(side: SpreadPoints, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return distances of two points drawn by weight, that of one to itself first, and masses."""
    pairs = torch.outer(side.weights, side.weights)
    pairs = pairs - pairs.diagonal().diag()
    values, order = side.table.flatten().sort()
    cumulative = pairs.flatten()[order].cumsum(0)
    levels = torch.arange(_QUANTILES, dtype=values.dtype, device=values.device) + 0.5
    position = torch.searchsorted(cumulative, levels / _QUANTILES * cumulative[-1])
    values = values[position.clamp_(max=len(values) - 1)]
    # the chance that the same point is drawn twice
    same = (weights @ weights).to(values)
    mass = torch.full_like(values, 1 / _QUANTILES) * (1 - same)
    # zero but for similarities
    itself = side.table.diagonal() @ side.weights
    return torch.cat([itself[None], values]), torch.cat([same[None], mass])


def density(problem: CoarseProblem) -> float:
    """Share of entries that are not zero, of the fuller table; 1 for losses that transform them."""
    if len(problem.x) > 1 or problem.unit != 1:
        return 1.0
    tables = problem.source.table, problem.target.table
    return max(int(table.count_nonzero()) / table.numel() for table in tables)


def is_graph(problem: CoarseProblem) -> bool:
    """Tell whether both tables are mostly zeros, as of graphs, and nothing else has a say."""
    most = limits_of(problem.base.device).graph_density
    return problem.linear is None and density(problem) <= most


def has_graphs(problem: CoarseProblem) -> bool:
    """Tell the same of directed costs and several relations, whose means are mostly zeros."""
    plain = problem.linear is None and bool(problem.unit == 1)
    return plain and all(is_sparse(side.table) for side in problem.sides)


def eigenpairs(matrix: Any, first: int, last: int) -> tuple[Any, Any]:
    """Compute eigenvalues of some places in ascending order (k,), and their vectors (n, k)."""
    values, vectors = scipy.linalg.eigh(matrix, subset_by_index=(first, last), driver="evr")
    if len(values) <= last - first:
        # of many equal ones LAPACK's fastest way loses some
        values, vectors = scipy.linalg.eigh(matrix, driver="evd")
        values, vectors = values[first : last + 1], vectors[:, first : last + 1]
    return values, vectors


def can_exchange(problem: CoarseProblem) -> bool:
    """Whether plans may be matchings, of not too many points."""
    weights = problem.source.weights
    few = len(weights) <= limits_of(weights.device).exchanged_points
    return few and weigh_alike(problem.weights)
