"""Belief propagation between two graphs: which node is whose partner, told by their neighbours.

Nodes whose neighbourhoods look alike are partners of each other only if their neighbours are, and
theirs. Each node tells every neighbour where it believes to be, from what all others have told it
but that neighbour [1]: an edge (i, k) of A says that j, the partner of i, is next to that of k, or,
with small odds, that the edge is lost. Without leaving out what came from there, beliefs would
confirm themselves. On sparse graphs that finds partners where every linearisation at a blurred plan
sees little more than degrees. It takes |edges of A| m numbers, and sums over edges alone.

[1] J. Pearl. Probabilistic Reasoning in Intelligent Systems. Morgan Kaufmann 1988. For sparse
random graphs: G. Piccioli, G. Semerjian, G. Sicuro, L. Zdeborova. Aligning random graphs with a
sub-tree similarity message-passing algorithm. Journal of Statistical Mechanics 2022.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._errors import PerformanceWarning, warn_user
from torchgw._problem.limits import limits_of
from torchgw._problem.problem import Problem
from torchgw._search.alternatives import Alternative
from torchgw._search.chain import COMPARED_AT
from torchgw._search.coarse import is_sparse
from torchgw._search.graphs import SparseRows
from torchgw._tensors.deadline import is_over
from torchgw._tensors.machine import known_free
from torchgw._typing import Marginals

# Odds of a lost edge, for one of the nodes that its end might be at; rounds of messages, of which
# the first leave beliefs free; what beliefs then add to their own evidence in each round, so that
# of equally good partners one is chosen; and noise in which these differ. [L1362]
_LOST, _ROUNDS, _FREE, _REINFORCED, _NOISE = 0.1, 60, 20, 0.1, 0.1
# Share of a message that is kept in the next round; without it they go to and fro. [L1362]
_KEPT = 0.3
# Sinkhorn iterations of a round. [L1362]
_INNER = 5
# Logarithms of beliefs, relative to the largest of a row, that are none. A choice.
_NONE = -30.0
# Share of a node's largest belief that is kept in a plan that others read by its entries. A choice.
_LEAST = 1e-6
# Seconds for each message and round on a CPU, and from how many in all on there is a warning.
# [L1362]
_MESSAGE, _LONG = 2e-8, 20.0
# Entries of messages that are computed at a time: what a cache holds, or little memory. [L1362]
_CACHED, _AT_ONCE = 2**18, 2**26


class Graph(NamedTuple):
    """A graph by its edges, both directions of each; weights are at most one."""

    rows: Tensor  # (e,) int64 in order
    columns: Tensor  # (e,) int64
    weights: Tensor  # (e,) float32
    nodes: int

    @classmethod
    def of(cls, table: Tensor, largest: float) -> Graph:
        """Collect the edges of a symmetric table (n, n), whose signs do not matter."""
        rows, columns = table.nonzero().T
        return cls(rows, columns, (table[rows, columns].abs() / largest).float(), len(table))

    @property
    def matrix(self) -> SparseRows:
        """The adjacency matrix."""
        return SparseRows(self.starts.int(), self.columns.int(), self.weights)

    @property
    def degrees(self) -> Tensor:
        """Sum the weights of each node, (n,)."""
        return self.weights.new_zeros(self.nodes).index_add_(0, self.rows, self.weights)

    @property
    def starts(self) -> Tensor:
        """Where the edges of each node begin, (n + 1,)."""
        every = torch.arange(self.nodes + 1, device=self.rows.device)
        return torch.searchsorted(self.rows, every)

    @property
    def reverse(self) -> Tensor:
        """Where the other direction of each edge is, (e,)."""
        return torch.argsort(self.columns * self.nodes + self.rows)


def believed_plan(source: Graph, target: Graph, marginals: Marginals, seed: int = 0) -> Tensor:
    """Find a plan (n, m) float32 by messages along the edges of one graph."""
    # Weights of nodes are float32 of sum one, and positive.
    if len(source.rows) > len(target.rows):
        # messages run along the edges of the graph that has fewer
        return believed_plan(target, source, Marginals(*marginals[::-1]), seed).T.contiguous()
    (a, b), m = marginals, target.nodes
    odds = _LOST / m
    evidence = torch.cdist(source.degrees[:, None], target.degrees[:, None], p=1)
    # an edge that must be lost has two ends
    evidence *= math.log(odds) / 2
    generator = torch.Generator("cpu").manual_seed(seed)
    noise = torch.randn(evidence.shape, generator=generator, device="cpu")
    evidence += noise.to(evidence).mul_(_NOISE)
    messages = evidence.new_zeros(len(source.rows), m)
    beside, reverse, column = target.matrix, source.reverse, torch.zeros_like(b)
    parts = list(_parts(source, m))
    # points without weight stay where logarithms are finite
    b = b.clamp_min(torch.finfo(b.dtype).tiny)
    for number in range(_ROUNDS):
        sums = evidence.clone()
        for nodes, edges, owner in parts:
            sums[nodes].index_add_(0, owner, messages[edges])
        believed = _exponentials(sums + column)
        v = torch.ones_like(b)
        for _ in range(_INNER):
            u = 1 / (believed @ v)
            v = b / ((a * u) @ believed)
        column = column + v.log()
        believed.mul_(u[:, None]).mul_(v)
        if is_over():
            break
        if number >= _FREE:
            evidence.add_(believed.log(), alpha=_REINFORCED)
        for nodes, edges, owner in parts:
            # what a node believes without what it was told by the one that it tells
            told = sums[nodes][owner].sub_(messages[edges]).add_(column)
            _exponentials(told)
            told /= told.sum(1, keepdim=True)
            said = (beside @ told.T.contiguous()).T.contiguous().div_(odds).log1p_()
            said *= source.weights[edges, None]
            places = reverse[edges]
            messages.index_copy_(0, places, said.lerp_(messages[places], _KEPT))
    return believed.mul_(a[:, None])


def match_graphs(problem: Problem) -> Alternative | None:
    """Match two graphs that are too large for chains; ``None`` if they are none, or far too large.

    Their tables are stored, symmetric and mostly zeros, and nothing else has a say.
    """
    plain = problem.linear is None and problem.support is None and problem.loss.is_square
    if not plain or problem.directed:
        return None
    tables = [side.matrix() for side in (problem.source, problem.target)]
    x, y = tables
    if x is None or y is None or not (is_sparse(x) and is_sparse(y)):
        return None
    if min(float(table.min()) for table in (x, y)) < 0:
        return None
    largest = max(float(table.abs().max()) for table in (x, y))
    source, target = Graph.of(x, largest), Graph.of(y, largest)
    marginals = Marginals(*(weight.float() for weight in problem.marginals))
    count = min(len(source.rows) * target.nodes, len(target.rows) * source.nodes)
    needed = 4 * (count + 4 * problem.source.n * problem.target.n)
    if count > limits_of(x.device).messages or needed > known_free(needed, x.device):
        return None
    seconds = 0.0 if x.is_cuda else _MESSAGE * _ROUNDS * count
    if seconds > _LONG:
        warn_user(
            f"Messages along the edges of these graphs take about {seconds:.0f} s on this CPU. "
            "search='fast' leaves them out, and a start that is known (`init`) needs none.",
            PerformanceWarning,
        )
    plan = believed_plan(source, target, marginals)
    plan = plan.where(plan > _LEAST * plan.amax(1, keepdim=True), 0.0)
    plan /= plan.sum()
    rows, columns = (torch.arange(size, device=plan.device) for size in plan.shape)
    value = _value(problem, source, target, plan, largest)
    shape = (source.nodes, target.nodes)
    return Alternative(value, "beliefs", plan, rows, columns, shape, epsilon=COMPARED_AT)


def _value(problem: Problem, source: Graph, target: Graph, plan: Tensor, largest: float) -> float:
    """Compute the objective of a plan by sums over edges."""
    squares = 0.0
    for graph, weight in zip((source, target), problem.marginals, strict=True):
        ends = weight[graph.rows] * weight[graph.columns]
        squares += float(ends @ graph.weights.double().square())
    there = (target.matrix @ (source.matrix @ plan).T.contiguous()).T
    cross = float((there * plan).sum(1).sum(dtype=torch.float64))
    return problem.alpha * largest**2 * (squares - 2 * cross)


def _exponentials(logarithms: Tensor) -> Tensor:
    """Turn rows into exponentials, the largest of a row one, in place."""
    # without tiny numbers, by which CPUs take long
    return logarithms.sub_(logarithms.amax(1, keepdim=True)).clamp_min_(_NONE).exp_()


def _parts(graph: Graph, m: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Divide nodes into parts: their places, those of their edges, and whose each of these is."""
    most = _AT_ONCE if graph.rows.is_cuda else _CACHED
    starts, first = graph.starts.tolist(), 0
    while first < graph.nodes:
        last = first + 1
        while last < graph.nodes and (starts[last + 1] - starts[first]) * m <= most:
            last += 1
        edges = slice(starts[first], starts[last])
        yield slice(first, last), edges, graph.rows[edges] - first
        first = last
