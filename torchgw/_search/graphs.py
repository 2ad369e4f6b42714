"""Two graphs of a coarse problem: products with their tables, and starts that only they have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._search.coarse import CoarseProblem
from torchgw._tensors.deadline import is_over
from torchgw._typing import Marginals
from torchgw.distances.sampling import SpreadPoints

# Share of entries that are not zero up to which two tables are taken for graphs. [L337]
_DENSITY = 0.2
# Steps on the convex objective, stages of the path to the other one, and steps of each. [L337]
_CONVEX_STEPS, _STAGES, _STAGE_STEPS = 100, 10, 6
# Sinkhorn iterations of a step. [L337]
_INNER = 5
# How the weight of a step changes when it was good and when it was not. [L337]
_LOWER, _HIGHER = 0.85, 2.0
# Largest weight, as a multiple of the first: from a smaller one no step would be short enough.
# [L337]
_LARGEST = 1e6
# Least share of a b that a logarithm is taken of. [L337]
_LEAST = 1e-30

# Share of entries that are not zero up to which products on a CPU are sparse. [L333]
_SPARSE = 0.05
# Rows of a plan that sparse products advance together. [L1170]
_TOGETHER = 128

# Plans of costs (s, t) at an epsilon after some Sinkhorn iterations.
Project = Callable[[Tensor, float, int], Tensor]
# Times of the heat kernel, and its largest entries of a row that are compared. [L618]
_TIMES = (1.0, 2.0, 4.0, 8.0)
_LARGEST_ENTRIES = 32
# Share of entries that are not zero up to which the heat kernel on a CPU is a sum of products with
# these alone, and its terms: those that follow are below 1e-16. [L1260]
_FEW, _TERMS = 0.02, 18


def density(problem: CoarseProblem) -> float:
    """Share of entries that are not zero, of the fuller table; 1 for losses that transform them."""
    if len(problem.x) > 1 or problem.unit != 1:
        return 1.0
    tables = problem.source.table, problem.target.table
    return max(int(table.count_nonzero()) / table.numel() for table in tables)


def least_value(problem: CoarseProblem) -> float:
    """Bound the values of all plans from below; no bound if a table has negative entries."""
    # <A P B, P> is at most the mass of A times the largest entry of B, and the other way round.
    # Between 0/1 matrices and equal weights this is met where every edge of one meets one of the
    # other.
    sides = [(side.table, side.weights) for side in (problem.source, problem.target)]
    if min(float(table.min()) for table, _ in sides) < 0:
        return -math.inf
    masses = [float(weights @ table @ weights) for table, weights in sides]
    squares = sum(float(weights @ table.square() @ weights) for table, weights in sides)
    largest = [float(table.max()) for table, _ in sides]
    most = min(masses[0] * largest[1], masses[1] * largest[0])
    return float(problem.alpha) * (squares - 2 * most)


class Graphs:
    """The tables A (s, s) and B (t, t) in single precision: sparse on a CPU, dense elsewhere."""

    def __init__(self, problem: CoarseProblem) -> None:
        x, y = problem.source.table.float(), problem.target.table.float()
        self.on_cpu = x.device.type == "cpu"
        self.x: Tensor | SparseRows = SparseRows.of(x) if self.on_cpu else x
        self.y: Tensor | SparseRows = SparseRows.of(y) if self.on_cpu else y
        self.parts = [(rows, self.x[rows]) for rows in self.blocks(len(x))]

    def blocks(self, count: int) -> Iterator[slice]:
        """Divide rows into parts that stay in the cache of a CPU from one product to the next."""
        size = _TOGETHER if self.on_cpu else count
        return (slice(start, min(start + size, count)) for start in range(0, count, size))

    def left(self, plan: Tensor) -> Tensor:
        """Compute A P."""
        return self.x @ plan

    def lefts(self, plan: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Compute A P by parts."""
        return ((rows, part @ plan) for rows, part in self.parts)

    def right(self, plan: Tensor) -> Tensor:
        """Compute P B."""
        return (self.y @ plan.T.contiguous()).T


@dataclass(frozen=True, eq=False)
class SparseRows:
    """A matrix by its entries: each row of a product with it is a sum of few rows."""

    starts: Tensor  # (s + 1,) where each row begins among the entries, int32
    columns: Tensor  # of the entries, int32
    values: Tensor

    @classmethod
    def of(cls, table: Tensor) -> SparseRows:
        """Collect the entries of a table that are not zero."""
        rows, columns = table.nonzero().T
        starts = torch.searchsorted(rows, torch.arange(len(table) + 1, device=rows.device))
        return cls(starts.int(), columns.int(), table[rows, columns])

    def __getitem__(self, rows: slice) -> SparseRows:
        start, stop, _ = rows.indices(len(self.starts) - 1)
        starts = self.starts[start : stop + 1]
        part = slice(int(starts[0]), int(starts[-1]))
        return SparseRows(starts - starts[0], self.columns[part], self.values[part])

    def __matmul__(self, matrix: Tensor) -> Tensor:
        """Multiply a matrix, whose rows lie one after another."""
        # takes two thirds of the time of products of sparse arrays, here and in SciPy
        return torch.nn.functional.embedding_bag(
            self.columns,
            matrix,
            self.starts,
            mode="sum",
            per_sample_weights=self.values,
            include_last_offset=True,
        )


def is_graph(problem: CoarseProblem) -> bool:
    """Tell whether both tables are mostly zeros, as of graphs, and nothing else has a say."""
    return problem.linear is None and density(problem) <= _DENSITY


def is_sparse(table: Tensor) -> bool:
    """Tell whether a table is mostly zeros."""
    return int(table.count_nonzero()) <= _DENSITY * table.numel()


def convex_path(problem: CoarseProblem, project: Project) -> Tensor:
    """Minimise |S Q - Q T|^2 over plans (s, t), then turn its convex part off by stages."""
    # S_ij is A_ij sqrt(a_i a_j), T is B likewise, Q_ij is P_ij / sqrt(a_i b_j): a permutation where
    # P is a matching of equal weights. The first problem is convex, and sees what graphs have in
    # common wherever that is; what is left at the end is the Gromov-Wasserstein objective. Mirror
    # descent, whose step becomes shorter when the objective has risen.
    # M. Zaslavskiy, F. Bach, J.-P. Vert. A path following algorithm for the graph matching problem.
    # IEEE Transactions on Pattern Analysis and Machine Intelligence 2009.
    graphs = Graphs(problem)
    weights = Marginals(problem.source.weights.float(), problem.target.weights.float())
    product = torch.outer(*weights)
    plan, slopes = product, _slopes(graphs, weights, product)
    first = weight = float(slopes.at(1.0).std())
    shares = [1.0] * _CONVEX_STEPS
    shares += [1 - stage / _STAGES for stage in range(1, _STAGES + 1) for _ in range(_STAGE_STEPS)]
    for share in shares:
        if is_over():
            break
        slope = slopes.at(share)
        # a proximal step: its entropy is relative to the plan itself
        near = (plan / product).clamp_min(_LEAST).log_()
        moved = project(slope - weight * near, weight, _INNER)
        after = _slopes(graphs, weights, moved)
        # the objective is quadratic: half the product with its derivative
        if float((after.at(share) * moved).sum()) <= float((slope * plan).sum()):
            plan, slopes = moved, after
            weight *= _LOWER
        else:
            weight = min(_LARGEST * first, _HIGHER * weight)
    return plan


class _Slopes(NamedTuple):
    """Derivatives of |S Q|^2 + |Q T|^2 and of -2 <A P B, P>, (s, t)."""

    convex: Tensor
    crossed: Tensor

    def at(self, share: float) -> Tensor:
        """Add them, the convex part by a share."""
        return torch.add(self.crossed, self.convex, alpha=share)


def _slopes(graphs: Graphs, weights: Marginals, plan: Tensor) -> _Slopes:
    """Differentiate both parts at a plan (s, t)."""
    a, b = weights.a[:, None], weights.b
    convex, crossed = torch.empty_like(plan), torch.empty_like(plan)
    # plans have nothing where a weight is zero
    for rows, left in graphs.lefts(plan):
        torch.mul(graphs.right(left), -4, out=crossed[rows])
        twice = graphs.right(graphs.right(plan[rows]).mul_(b))
        torch.mul(twice, 2 / a[rows].where(a[rows] > 0, 1), out=convex[rows])
    for columns in graphs.blocks(len(b)):
        twice = graphs.left(a * graphs.left(plan[:, columns].contiguous()))
        convex[:, columns] += twice.mul_(2 / b[columns].where(b[columns] > 0, 1))
    return _Slopes(convex, crossed)


def heat_costs(problem: CoarseProblem) -> Tensor:
    """Return squared differences of signatures of the nodes of two graphs, (s, t), mean one."""
    # A signature is what heat from a node leaves there and at the nodes that get most of it, in
    # order. Unlike degrees, it differs among the nodes of a regular graph.
    # J. Sun, M. Ovsjanikov, L. Guibas. A concise and provably informative multi-scale signature
    # based on heat diffusion. Computer Graphics Forum 2009.
    count = min(_LARGEST_ENTRIES, *problem.base.shape)
    x, y = (_signatures(side, count) for side in (problem.source, problem.target))
    costs = torch.cdist(x, y).square()
    return costs / costs.mean().clamp_min(torch.finfo(costs.dtype).tiny)


def _signatures(side: SpreadPoints, count: int) -> Tensor:
    parts = []
    for kernel in _heat_kernels(side.table):
        largest, stays = kernel.topk(count, dim=1).values, kernel.diagonal()[:, None]
        parts += [largest / largest.max(), 4 * stays / stays.max()]
    return torch.cat(parts, dim=1)


def _heat_kernels(table: Tensor) -> Iterator[Tensor]:
    """Compute exp(time (N - 1)) for each time, where N is the normalised adjacency matrix."""
    degree = table.abs().sum(1)
    root = degree.where(degree > 0, 1).sqrt()
    normalised = table / root[:, None] / root
    if table.device.type != "cpu" or int(table.count_nonzero()) > _FEW * table.numel():
        values, vectors = torch.linalg.eigh(normalised)
        yield from ((vectors * (time * (values - 1)).exp()) @ vectors.T for time in _TIMES)
        return
    few = SparseRows.of(normalised)
    term = torch.eye(len(table), dtype=table.dtype, device="cpu").div_(math.e)
    kernel = term.clone()
    for power in range(1, _TERMS + 1):
        term = (few @ term).div_(power)
        kernel += term
    yield kernel
    # each time is twice the one before
    for _ in _TIMES[1:]:
        kernel = kernel @ kernel
        yield kernel


class SparseProducts:
    """-4 alpha x P y by sparse tables A and B.

    x is A - r 1' - 1 r' + c 11', and y likewise.
    """

    def __init__(self, problem: CoarseProblem) -> None:
        tables = problem.source.table, problem.target.table
        weights = problem.source.weights, problem.target.weights
        means = [table @ weight for table, weight in zip(tables, weights, strict=True)]
        self.means = [mean.float() for mean in means]
        self.mean = [float(w @ mean) for w, mean in zip(weights, means, strict=True)]
        self.graphs = Graphs(problem)
        self.weight = float(-4 * problem.alpha)

    @classmethod
    def of(cls, problem: CoarseProblem) -> SparseProducts | None:
        """Make it where it is worth it: on a CPU, both tables mostly zeros, the square loss."""
        on_cpu = problem.source.table.device.type == "cpu"
        return cls(problem) if on_cpu and density(problem) <= _SPARSE else None

    def __call__(self, base: Tensor, plans: Tensor) -> Tensor:
        """Add the products at plans (B, s, t) to the base, one for all (s, t) or for each."""
        found = torch.empty_like(plans)
        (row, column), (mean_x, mean_y) = self.means, self.mean
        for plan, costs, own in zip(plans, found, base.expand_as(plans), strict=True):
            total, down = plan.sum(0), row @ plan
            for rows, half in self.graphs.lefts(plan):
                half.addr_(row[rows] - mean_x, total, alpha=-1).sub_(down)
                sums = half.sum(1)
                product = self.graphs.right(half).addr_(sums, column, alpha=-1)
                product.sub_((half @ column - mean_y * sums)[:, None])
                torch.add(own[rows], product, alpha=self.weight, out=costs[rows])
        return found
