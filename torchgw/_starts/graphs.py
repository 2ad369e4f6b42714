"""Two graphs of a coarse problem: products with their tables, and starts that only they have.

Partners are exchanged by sums over edges. Between tables that are mostly zeros an exchange of two
partners only helps if it puts an end of an edge next to where the other end is. These few exchanges
are listed, many that do not touch each other are made at once, and some that cost a little too,
fewer and fewer of them [1].

[1] S. Kirkpatrick, C. Gelatt, M. Vecchi. Optimization by simulated annealing. Science 1983.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._problem.limits import CPU
from torchgw._problem.losses import SPARSE_SHARE
from torchgw._problem.problem import stored_matrix
from torchgw._problem.signatures import HEAT_TIMES
from torchgw._sinkhorn.eager import SMALLEST
from torchgw._starts.chain import INNER
from torchgw._starts.coarse import CoarseProblem
from torchgw._tensors.deadline import is_over
from torchgw._tensors.operations import EQUAL
from torchgw._typing import Marginals
from torchgw.distances.base import DistanceProvider
from torchgw.distances.geodesics import Geodesics
from torchgw.distances.sampling import SpreadPoints

# Steps on the convex objective, stages of the path to the other one, and steps of each. [L337]
_CONVEX_STEPS, _STAGES, _STAGE_STEPS = 100, 10, 6
# How the weight of a step changes when it was good and when it was not. [L337]
_LOWER, _HIGHER = 0.85, 2.0
# Largest weight, as a multiple of the first: from a smaller one no step would be short enough.
# [L337]
_LARGEST = 1e6

# Rows of a plan that sparse products advance together. [L1170]
_TOGETHER = 128

Array = NDArray[Any]
# Plans of costs (s, t) at an epsilon after some Sinkhorn iterations.
Project = Callable[[Tensor, float, int], Tensor]
# Times of the heat kernel: after longer ones only communities are left to see. [L618]
_TIMES = HEAT_TIMES[:-1]
# Largest entries of a row of it that are compared. [L618]
_LARGEST_ENTRIES = 32
# Terms of the heat kernel as a sum of products: those that follow are below 1e-16. [L1260]
_TERMS = 18
# How likely exchanges are that cost as much as the heaviest edge: exp(-1 / T), with T falling
# geometrically from the first to the last. [L1363]
_FIRST, _LAST = 0.4, 0.05
# Entries of tables that are looked up, and rounds at most: a second or two. [L1363]
_LOOKED_UP, _ROUNDS = 1.5e7, 400


def least_value(problem: CoarseProblem, edges: Sequence[Edges] | None = None) -> float:
    """Bound the values of all plans from below; no bound if a table has negative entries.

    The ``edges`` of both sides are those of plans between equal weights, in each direction.
    """
    # <A P B, P> is at most the mass of A times the largest entry of B, and the other way round.
    # Between 0/1 matrices and equal weights this is met where every edge of one meets one of the
    # other.
    if edges is not None:
        x, y = edges
        own = float(x.weights @ x.weights + y.weights @ y.weights)
        here, there = x.degrees.sum(0) * y.heaviest.max(0), y.degrees.sum(0) * x.heaviest.max(0)
        kept = float(np.minimum(here, there).sum())
        return float(problem.alpha) * (own - 2 * kept) / (x.n**2 * x.layers)
    sides = [(side.table, side.weights) for side in problem.sides]
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
            self.columns, matrix, self.starts, mode="sum", per_sample_weights=self.values,
            include_last_offset=True,
        )  # fmt: skip


def convex_path(problem: CoarseProblem, project: Project) -> Tensor:
    """Minimise |S Q - Q T|^2 over plans (s, t), then turn its convex part off by stages."""
    # S_ij is A_ij sqrt(a_i a_j), T is B likewise, Q_ij is P_ij / sqrt(a_i b_j): a permutation where
    # P is a matching of equal weights. The first problem is convex, and sees what graphs have in
    # common wherever that is; what is left at the end is the Gromov-Wasserstein objective. Mirror
    # descent, whose step becomes shorter when the objective has risen.
    # M. Zaslavskiy, F. Bach, J.-P. Vert. A path following algorithm for the graph matching problem.
    # IEEE Transactions on Pattern Analysis and Machine Intelligence 2009.
    graphs = Graphs(problem)
    weights = Marginals(*(part.float() for part in problem.weights))
    product = torch.outer(*weights)
    plan, slopes = product, _slopes(graphs, weights, product)
    first = weight = float(slopes.at(1.0).std())
    if not first:
        # nothing tells nodes apart, as where each has one edge
        return product
    shares = [1.0] * _CONVEX_STEPS
    shares += [1 - stage / _STAGES for stage in range(1, _STAGES + 1) for _ in range(_STAGE_STEPS)]
    for share in shares:
        if is_over():
            break
        slope = slopes.at(share)
        # a proximal step: its entropy is relative to the plan itself
        near = (plan / product).clamp_min(SMALLEST).log_()
        moved = project(slope - weight * near, weight, INNER)
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
    x, y = (_signatures(side, count) for side in problem.sides)
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
    if table.device.type != "cpu" or int(table.count_nonzero()) > SPARSE_SHARE * table.numel():
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
        weights = problem.weights
        means = [table @ weight for table, weight in zip(tables, weights, strict=True)]
        self.means = [mean.float() for mean in means]
        self.mean = [float(w @ mean) for w, mean in zip(weights, means, strict=True)]
        self.graphs = Graphs(problem)
        self.weight = float(-4 * problem.alpha)

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


class Edges(NamedTuple):
    """Tables (n, n) without negative entries, by those that are not zero: edges of a graph.

    A graph without directions has one layer, in which each edge is listed from both of its ends.
    Otherwise each relation has two: its edges as their first nodes see them, and as their last do.
    """

    starts: Array  # (n + 1,) where each row begins
    columns: Array  # (e,)
    weights: Array  # (e,) float64
    keys: Array  # (e,) (row n + column) layers + layer, in order
    layers: int = 1
    levels: Array | None = None  # (l,) the different weights, zero first
    codes: Array | None = None  # (n n layers,) which of these each key has

    @classmethod
    def of(cls, *tables: Tensor, directed: bool = False) -> Edges | None:
        """List the edges of a table, or of one for each relation; ``None`` if it is no graph."""
        n, layers, found = len(tables[0]), 2 * len(tables) if directed else 1, []
        for number, table in enumerate(tables):
            if int(table.count_nonzero()) > CPU.edge_density * n * n:
                return None
            i, j = table.nonzero().T
            weights = table[i, j].double().cpu().numpy()
            if (weights < 0).any() or bool((i == j).any()):
                return None
            there, back = (k.cpu().numpy() * layers for k in (i * n + j, j * n + i))
            found.append((there + 2 * number, weights))
            if directed:
                found.append((back + 2 * number + 1, weights))
                continue
            order = back.argsort()
            if not (np.array_equal(back[order], there) and np.array_equal(weights[order], weights)):
                return None
        keys, weights = (np.concatenate(part) for part in zip(*found, strict=True))
        return cls.listed(n, keys, weights, layers)

    @classmethod
    def given(cls, graph: Geodesics) -> Edges:
        """List the edges of a graph that was given, whose lengths are no weights: one each."""
        n, edges = graph.n, graph.edges
        keys = (edges.source * n + edges.vertex).cpu().numpy()
        # a node is no neighbour of its own
        keys = keys[keys % (n + 1) > 0]
        return cls.listed(n, keys, np.ones(len(keys)))

    @classmethod
    def listed(cls, n: int, keys: Array, weights: Array, layers: int = 1) -> Edges:
        """Put edges in order."""
        order = keys.argsort()
        keys, weights = keys[order], weights[order]
        rows, columns = np.divmod(keys // layers, n)
        return cls(np.searchsorted(rows, np.arange(n + 1)), columns, weights, keys, layers)

    @property
    def n(self) -> int:
        """Count the nodes."""
        return len(self.starts) - 1

    @property
    def rows(self) -> Array:
        """The node that sees each edge, (e,)."""
        return self.keys // (self.n * self.layers)

    @property
    def layer(self) -> Array:
        """The layer of each edge, (e,)."""
        return self.keys % self.layers

    @property
    def back(self) -> Array:
        """The layer in which its other end sees each edge, (e,)."""
        return self.layer ^ (self.layers > 1)

    @property
    def degrees(self) -> Array:
        """Sum the weights of each node by layers, (n, layers)."""
        size = self.n * self.layers
        places = self.rows * self.layers + self.layer
        return np.bincount(places, self.weights, size).reshape(self.n, self.layers)

    @property
    def heaviest(self) -> Array:
        """The largest weight of each node by layers, (n, layers)."""
        found = np.zeros((self.n, self.layers))
        np.maximum.at(found, (self.rows, self.layer), self.weights)
        return found

    def among(self, nodes: Array) -> Edges:
        """Keep some nodes, in their order."""
        place = np.full(self.n, -1)
        place[nodes] = np.arange(len(nodes))
        rows, columns = place[self.rows], place[self.columns]
        inside = (rows >= 0) & (columns >= 0)
        keys = (rows * len(nodes) + columns) * self.layers + self.layer
        return Edges.listed(len(nodes), keys[inside], self.weights[inside], self.layers)

    def tabled(self) -> Edges:
        """Keep a table too, if it is small enough: searching for edges takes many times as long."""
        levels, codes = np.unique(self.weights, return_inverse=True)
        size, kind = self.n**2 * self.layers, np.min_scalar_type(len(levels))
        if not CPU.stores(size * kind.itemsize // 8, 1):
            return self
        table = np.zeros(size, dtype=kind)
        table[self.keys] = codes + 1
        return self._replace(levels=np.append(0.0, levels), codes=table)

    def at(self, i: Array, j: Array, layer: Array | int) -> Array:
        """Look up weights; zero where there is no edge."""
        keys = (i * self.n + j) * self.layers + layer
        if self.codes is not None and self.levels is not None:
            found: Array = self.levels[self.codes[keys]]
            return found
        place = np.searchsorted(self.keys, keys).clip(max=len(self.keys) - 1)
        return np.where(self.keys[place] == keys, self.weights[place], 0.0)

    def beside(self, nodes: Array) -> tuple[Array, Array]:
        """List all edges of some nodes: which of these it belongs to, and which edge it is."""
        counts = self.starts[nodes + 1] - self.starts[nodes]
        owner = np.repeat(np.arange(len(nodes)), counts)
        within = np.arange(len(owner)) - np.repeat(counts.cumsum() - counts, counts)
        return owner, self.starts[nodes[owner]] + within


class Graph(NamedTuple):
    """A graph by its edges, both directions of each; weights are at most one."""

    rows: Tensor  # (e,) int64 in order
    columns: Tensor  # (e,) int64
    weights: Tensor  # (e, layers) float32, as the node of the row sees them
    nodes: int

    @classmethod
    def of(cls, table: Tensor, largest: float) -> Graph:
        """Collect the edges of a symmetric table (n, n), whose signs do not matter."""
        rows, columns = table.nonzero().T
        weights = (table[rows, columns].abs() / largest).float()
        return cls(rows, columns, weights[:, None], len(table))

    @classmethod
    def together(cls, parts: list[Edges], device: torch.device) -> Graph:
        """Put graphs beside each other, whose weights are at most one."""
        first, sides = np.cumsum([0, *(part.n for part in parts)]), []
        for part, start in zip(parts, first, strict=False):
            # edges between two nodes are one, with a weight in each layer
            keys, pair = np.unique(part.keys // part.layers, return_inverse=True)
            layers = np.zeros((len(keys), part.layers))
            layers[pair, part.layer] = part.weights
            sides.append((keys // part.n + start, keys % part.n + start, layers))
        rows, columns, weights = (
            torch.from_numpy(np.concatenate(side)).to(device) for side in zip(*sides, strict=True)
        )
        return cls(rows, columns, weights.float(), int(first[-1]))

    @classmethod
    def both(
        cls, graphs: tuple[Edges, Edges] | None, tables: tuple[Tensor, Tensor]
    ) -> tuple[Graph, Graph]:
        """Collect the edges of both sides: of graphs with their directions, or else of tables."""
        if graphs is None:
            largest = max(float(table.abs().max()) for table in tables)
            near, far = (cls.of(table, largest) for table in tables)
            return near, far
        largest = max(float(side.weights.max(initial=0.0)) for side in graphs)
        near, far = (
            cls.together([side._replace(weights=side.weights / largest)], tables[0].device)
            for side in graphs
        )
        return near, far

    @property
    def degrees(self) -> Tensor:
        """Sum the weights of each node by layers, (n, layers)."""
        none = self.weights.new_zeros(self.nodes, self.weights.shape[1])
        return none.index_add_(0, self.rows, self.weights)

    @property
    def starts(self) -> Tensor:
        """Where the edges of each node begin, (n + 1,)."""
        return torch.searchsorted(self.rows, torch.arange(self.nodes + 1, device=self.rows.device))

    @property
    def reverse(self) -> Tensor:
        """Where the other direction of each edge is, (e,)."""
        return torch.argsort(self.columns * self.nodes + self.rows)

    def beside(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """List all edges of some nodes: which of these it belongs to, and which edge it is."""
        starts = self.starts
        return spread(starts[nodes], starts.diff()[nodes])


def spread(first: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """List so many numbers from each first one on: of which it is, and the number."""
    owner = torch.repeat_interleave(counts)
    within = torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts)[owner]
    return owner, first[owner] + within


def graphs_of(sides: Sequence[DistanceProvider]) -> tuple[Edges, Edges] | None:
    """List the edges of both sides of a problem; ``None`` if a side is no graph."""
    ways = [side.relations() for side in sides]
    if any(side.matrix() is None for side in sides):
        return None
    directed, count = any(side.directed for side in sides), max(map(len, ways))
    tables = [[stored_matrix(way[k % len(way)]) for k in range(count)] for way in ways]
    near, far = (Edges.of(*side, directed=directed) for side in tables)
    return None if near is None or far is None else (near, far)


def exchange_ends(near: Edges, far: Edges, partners: Array) -> Array:
    """Find partners (n,), an order of the same ones, that keep no less weight of edges."""
    # What is kept is the sum of products of the weights of edges that lie on each other.
    used = np.sort(partners)
    if len(used) < far.n:
        far = far.among(used)
    if not (len(near.keys) and len(far.keys)):
        return partners
    state = Ends(near, far.tabled(), np.searchsorted(used, partners))
    state.run()
    return used[state.best]


class Ends:
    """Partners (n,) of the nodes of one graph among as many of another."""

    def __init__(self, near: Edges, far: Edges, partners: Array) -> None:
        from scipy import sparse  # SciPy takes long to import

        self.near, self.far, self.partners = near, far, partners.copy()
        self.nodes = partners.argsort()
        self.rows, self.layer, self.back = near.rows, near.layer, near.back
        # what is seen of each node of the other graph from those beside it, by layers
        places = far.columns * far.layers + far.layer, far.rows
        self.seen = sparse.csr_array((far.weights, places), shape=(far.n * far.layers, far.n))
        self.heaviest, self.unit = far.heaviest, near.weights.max() * far.weights.max()
        self.draw, self.looked_up = np.random.default_rng(0), 0
        self.best, self.most = partners.copy(), self.kept()
        self.perfect = False  # whether every edge lies on the heaviest one that it can

    def moved(self, partners: Array) -> Ends:
        """Begin at other partners."""
        other = copy(self)
        other.partners, other.nodes = partners.copy(), partners.argsort()
        other.best, other.most = partners.copy(), other.kept()
        return other

    def here(self) -> Array:
        """Look up what lies under each edge."""
        partners = self.partners
        return self.far.at(partners[self.rows], partners[self.near.columns], self.layer)

    def lost(self) -> Array:
        """Compute what each edge would keep more if it lay on the heaviest one that it can."""
        most = self.heaviest[self.partners[self.near.columns], self.back]
        lost: Array = self.near.weights * (most - self.here())
        return lost

    def share_lost(self) -> float:
        """Compute the share of the weight of edges that is lost."""
        return float(self.lost().clip(min=0).sum() / self.near.weights.sum())

    def kept(self) -> float:
        """Sum up what is kept."""
        return float(self.near.weights @ self.here()) / 2

    def run(self) -> None:
        """Exchange until nothing helps; then warm up, and cool down again."""
        self.settle()
        for done in range(_ROUNDS):
            share = max(done / _ROUNDS, self.looked_up / _LOOKED_UP)
            if share >= 1 or self.perfect or is_over():
                break
            self.step(_FIRST * (_LAST / _FIRST) ** share)
        self.settle()

    def settle(self, nodes: Array | None = None) -> None:
        """Exchange until nothing helps; around some nodes only, if these alone have moved."""
        edges = None
        if nodes is not None:
            beside = self.near.columns[self.near.beside(nodes)[1]]
            edges = self.near.beside(np.union1d(nodes, beside))[1]
        while self.step(0.0, edges) and not is_over():
            pass

    def step(self, temperature: float, edges: Array | None = None) -> bool:
        """Make exchanges that do not touch each other; tell whether they keep more than ever."""
        p, q = self.listed(edges)
        self.perfect = not len(p)
        gains = self.gains(p, q) / self.unit
        if temperature:
            wanted = np.log(self.draw.random(len(gains))) < gains / temperature
        else:
            wanted = gains > EQUAL
        p, q, gains = p[wanted], q[wanted], gains[wanted]
        order = (-gains - self.draw.random(len(gains)) / 2).argsort()
        chosen = self.apart(p[order], q[order])
        p, q = p[order][chosen], q[order][chosen]
        self.partners[p], self.partners[q] = self.partners[q], self.partners[p]
        self.nodes[self.partners[p]], self.nodes[self.partners[q]] = p, q
        kept = self.kept()
        better = bool(kept > self.most + EQUAL * self.unit)
        if better:
            self.most, self.best = kept, self.partners.copy()
        elif not temperature:
            # what was gained before is less than the best
            self.partners, self.nodes = self.best.copy(), self.best.argsort()
        return better

    def listed(self, edges: Array | None = None) -> tuple[Array, Array]:
        """List exchanges of nodes p and q that put an edge of p, of all or some, on a heavier."""
        some = slice(None) if edges is None else edges
        p, anchor = self.rows[some], self.partners[self.near.columns[some]]
        here, back = self.far.at(self.partners[p], anchor, self.layer[some]), self.back[some]
        light = here < self.heaviest[anchor, back]
        p, anchor, here, back = p[light], anchor[light], here[light], back[light]
        owner, edge = self.far.beside(anchor)
        q = self.nodes[self.far.columns[edge]]
        useful = (self.far.weights[edge] > here[owner]) & (q != p[owner])
        useful &= self.far.keys[edge] % self.far.layers == back[owner]
        return p[owner][useful], q[useful]

    def gains(self, p: Array, q: Array) -> Array:
        """Compute what exchanges of the partners of p and q keep more."""
        from scipy import sparse  # SciPy takes long to import

        if not len(p):
            return np.zeros(0)
        near, far, partners = self.near, self.far, self.partners
        nodes, place = np.unique(np.concatenate([p, q]), return_inverse=True)
        owner, edge = near.beside(nodes)
        ends = partners[near.columns[edge]] * far.layers + self.layer[edge]
        shape = len(nodes), far.n * far.layers
        edges = sparse.csr_array((near.weights[edge], (owner, ends)), shape=shape)
        # what the edges of each node keep wherever it is sent, if no other moves
        table = edges @ self.seen
        table.sort_indices()
        self.looked_up += table.nnz + 4 * len(p)
        i, j = place.reshape(2, -1)
        places = (np.arange(len(nodes)), partners[nodes]), (i, partners[q]), (j, partners[p])
        here, there, back = (np.asarray(table[each]) for each in places)
        found = there + back - here[i] - here[j]
        # an edge between both is turned round, and seen from both
        for one, other in ((p, q), (q, p)):
            for layer in range(near.layers):
                weight = near.at(one, other, layer)
                turned = weight.nonzero()[0]
                x, y = partners[one[turned]], partners[other[turned]]
                change = (far.at(x, y, layer) + far.at(y, x, layer)) / 2 - far.at(y, y, layer)
                found[turned] += weight[turned] * change
        return found

    def apart(self, p: Array, q: Array) -> list[int]:
        """Choose exchanges, the first ones first, whose nodes are no neighbours of each other."""
        used, chosen = np.zeros(self.near.n, dtype=bool), []
        starts, columns = self.near.starts, self.near.columns
        for place, ends in enumerate(zip(p.tolist(), q.tolist(), strict=True)):
            if used[ends[0]] or used[ends[1]]:
                continue
            chosen.append(place)
            for node in ends:
                used[node] = True
                used[columns[starts[node] : starts[node + 1]]] = True
        return chosen
