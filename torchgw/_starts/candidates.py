"""Messages along the edges of two graphs, among a few candidates of each node.

Beliefs in all partners (``beliefs.py``) take |edges of A| m numbers, and more where walks must not
turn back: too many for 10,000 nodes on a CPU. Here a node has a few candidates, nodes of B whose
surroundings are like its own. Where an edge (i, k) of A and one (j, l) of B join candidates, j of i
and l of k, there is a square, and messages are sums over squares [1]. A node that believes in a
partner proposes the neighbours of it to its own neighbours, until no more edges lie on each other.
What is no candidate stays as likely as degrees alone make it.

[1] M. Bayati, D. Gleich, A. Saberi, Y. Wang. Message-passing algorithms for sparse network
alignment. ACM Transactions on Knowledge Discovery from Data 2013.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchgw._problem.limits import limits_of
from torchgw._starts.graphs import Array, Edges, Graph, SparseRows, spread
from torchgw._tensors.deadline import is_over

# Odds of a lost edge, for one of the nodes that its end might be at. A matching that loses a larger
# share is not what messages expect, and all nodes are matched anew. [L1362]
LOST = 0.1
# Candidates of each node, as many proposed ones, how many propose, and the belief from which they
# do. [L1816]
_CANDIDATES, _PROPOSING, _BELIEVED = 20, 3, 0.01
# Rounds of messages at most, rounds between proposals, and how often these may lead to no more
# edges. [L1816, L1921]
_ROUNDS, _BETWEEN, _IN_VAIN = 600, 4, 3
# Sinkhorn iterations of a round, the share of a message that is kept in the next one, and noise by
# which equal partners differ. [L1816]
_BALANCED, _KEPT, _NOISE = 3, 0.3, 0.1
# Classes of degrees, steps of the walks that count them, and the weight of each further step.
# [L1816]
_CLASSES, _STEPS, _FADING = 12, 3, 0.6
# Logarithms relative to the largest of a node: others are none, or as large. A choice.
_RANGE = 30.0
# Entries of tables that are computed at a time: little memory. A choice.
_AT_ONCE = 2**22
# What a row that is left out costs, where pairs cost from 1 to 2. [L325]
LEAVING = 4.0


class _Sums(NamedTuple):
    """Sums of values by their groups."""

    order: Tensor | None  # of the values, by their groups; None if they are in order
    counts: Tensor  # of each group

    @classmethod
    def of(cls, groups: Tensor, count: int, *, sort: bool = False) -> _Sums:
        """Prepare sums of values, each in one of so many groups."""
        order = groups.argsort(stable=True) if sort else None
        return cls(order, torch.bincount(groups, minlength=count))

    def __call__(self, values: Tensor, reduce: str = "sum") -> Tensor:
        """Reduce the values of each group."""
        values = values if self.order is None else values[self.order]
        return torch.segment_reduce(values, reduce, lengths=self.counts, unsafe=True)


class _Squares(NamedTuple):
    """Edges of two graphs that join candidates, each as both of its pairs see it.

    Those that one pair (i, j) sees lie together, and of these the group of one neighbour of i.
    """

    far: Tensor  # (s,) the edge from j
    group: Tensor  # (s,)
    place: Tensor  # (s,) which pair and edge from j it is
    reverse: Tensor  # (s,) the same square as the other pair sees it
    pair: Tensor  # (g,) of each group
    near: Tensor  # (g,) the edge from i
    by_group: _Sums
    by_place: _Sums
    by_pair: _Sums  # of groups
    by_edge: _Sums  # of groups

    @classmethod
    def of(cls, near: Graph, far: Graph, pairs: Tensor) -> _Squares:
        """List the squares of pairs i m + j, which are in order."""
        edges, others = len(near.rows), len(far.rows)
        pair, edge, along, end = _joined(near, far, pairs)
        half, back, turned = len(pair), near.reverse, far.reverse
        pair = torch.cat([pair, end])
        edge, along = torch.cat([edge, back[edge]]), torch.cat([along, turned[along]])
        keys, order = ((pair * edges + edge) * others + along).sort()
        reverse = torch.empty_like(order)
        reverse[order] = torch.arange(2 * half, device=order.device)
        reverse = reverse[(order + half) % max(1, 2 * half)]
        groups, group = (keys // others).unique_consecutive(return_inverse=True)
        pair, along = groups // edges, along[order]
        places, place = (pair[group] * others + along).unique(return_inverse=True)
        edge = groups % edges
        return cls(
            along, group, place, reverse, pair, edge,
            _Sums.of(group, len(groups)), _Sums.of(place, len(places), sort=True),
            _Sums.of(pair, len(pairs)), _Sums.of(edge, edges, sort=True),
        )  # fmt: skip


def _joined(near: Graph, far: Graph, pairs: Tensor) -> Tensor:
    """List squares once: pair, edge of either graph from it, and pair at the other end, (4, s)."""
    n, m, device = near.nodes, far.nodes, pairs.device
    i, j = pairs // m, pairs % m
    starts = torch.searchsorted(i, torch.arange(n + 1, device=device))
    # edges are followed from that end whose candidates have fewer edges
    work = torch.zeros(n, dtype=torch.int64, device=device).index_add_(0, i, far.starts.diff()[j])
    here, there = work[near.rows], work[near.columns]
    first = (here < there) | ((here == there) & (near.rows < near.columns))
    edges = first.nonzero()[:, 0]
    # remainders tell most of what is no pair
    size = 2**24 - 3
    known = torch.zeros(size, dtype=torch.bool, device=device)
    known[pairs % size] = True
    found = [pairs.new_zeros(4, 0)]
    part = work[near.rows[edges]].cumsum(0) // _AT_ONCE
    for some in edges.split(part.unique_consecutive(return_counts=True)[1].tolist()):
        at = near.rows[some]
        which, pair = spread(starts[at], starts.diff()[at])
        edge = some[which]
        which, along = far.beside(j[pair])
        end = near.columns[edge][which] * m + far.columns[along]
        likely = known[end % size].nonzero()[:, 0]
        end, which, along = end[likely], which[likely], along[likely]
        place = torch.searchsorted(pairs, end).clamp_(max=len(pairs) - 1)
        square = (pairs[place] == end).nonzero()[:, 0]
        which = which[square]
        found.append(torch.stack([pair[which], edge[which], along[square], place[square]]))
    return torch.cat(found, 1)


class _Listed(NamedTuple):
    """Pairs of nodes and candidates, and what was told of them."""

    keys: Tensor  # (p,) i m + j in order
    i: Tensor
    j: Tensor
    squares: _Squares
    evidence: Tensor  # (p,) of degrees alone
    rest: Tensor  # (n,) logarithm of the beliefs in all others
    rows: _Sums
    columns: _Sums
    messages: Tensor  # (g,) that each group has sent
    less: Tensor  # (s,) what is sent at each square, less that


class _Beliefs(NamedTuple):
    """What nodes believe."""

    sums: Tensor  # (p,) logarithms
    top: Tensor  # (n,) the largest of each node
    shares: Tensor  # (p,) exponentials relative to that
    values: Tensor  # (p,)


class _Candidates:
    """Beliefs of the nodes of one graph in their candidates in another."""

    def __init__(self, near: Graph, far: Graph) -> None:
        self.near, self.far, self.odds = near, far, math.log(LOST / far.nodes)
        self.degrees, device = (near.degrees, far.degrees), near.rows.device
        generator = torch.Generator("cpu").manual_seed(0)
        self.noise = [
            torch.randn(size, generator=generator, device="cpu").to(device)
            for size in (near.nodes, far.nodes)
        ]
        self.column = torch.zeros(far.nodes, device=device)
        alike, self.all = self._alike()
        every = torch.arange(near.nodes, device=device) * far.nodes
        self.listed = self._list((every[:, None] + alike).flatten().sort().values)
        self.beliefs = self.believe()

    def _alike(self) -> tuple[Tensor, Tensor]:
        """Choose nodes (n, k) whose surroundings are alike; sum up beliefs by degrees alone."""
        # of the edges of a node: a part of a graph has fewer nodes
        share = len(self.near.rows) * self.far.nodes / (len(self.far.rows) * self.near.nodes)
        here, there = _surroundings(self.near, 1.0), _surroundings(self.far, share)
        kinds, counts = self.degrees[1].unique(dim=0, return_counts=True)
        count, height = min(_CANDIDATES, self.far.nodes), max(1, _AT_ONCE // self.far.nodes)
        alike, sums = [], []
        for some, own in zip(here.split(height), self.degrees[0].split(height), strict=True):
            alike.append(torch.cdist(some, there).topk(count, largest=False).indices)
            sums.append((torch.cdist(own, kinds, p=1) / 2 * self.odds).exp_() @ counts.to(own))
        return torch.cat(alike), torch.cat(sums)

    def _list(self, keys: Tensor) -> _Listed:
        """List pairs of which nothing was told."""
        i, j = keys // self.far.nodes, keys % self.far.nodes
        evidence = (self.degrees[0][i] - self.degrees[1][j]).abs().sum(1) / 2 * self.odds
        rows = _Sums.of(i, self.near.nodes)
        least = torch.finfo(evidence.dtype).tiny
        rest = (self.all - rows(evidence.exp())).clamp_min_(least).log_()
        evidence += _NOISE * self.noise[0][i] * self.noise[1][j]
        squares = _Squares.of(self.near, self.far, keys)
        return _Listed(
            keys, i, j, squares, evidence, rest, rows, _Sums.of(j, self.far.nodes, sort=True),
            evidence.new_zeros(len(squares.pair)), evidence.new_zeros(len(squares.far)),
        )  # fmt: skip

    def believe(self) -> _Beliefs:
        """Balance what nodes have heard."""
        listed = self.listed
        heard = listed.evidence + listed.squares.by_pair(listed.messages)
        for _ in range(_BALANCED):
            sums = heard + self.column[listed.j]
            top = torch.maximum(listed.rows(sums, "max"), listed.rest)
            shares = (sums - top[listed.i]).clamp_min_(-_RANGE).exp_()
            values = shares / (listed.rows(shares) + (listed.rest - top).exp())[listed.i]
            # no node is believed to be the partner of more than one
            full = listed.columns(values).clamp_min_(math.exp(-_RANGE))
            self.column.sub_(full.log_()).clamp_(max=0.0)
        return _Beliefs(sums, top, shares, values)

    def tell(self) -> None:
        """Send what nodes believe without what they were told by those that they tell."""
        near, (sums, top, shares, _) = self.near, self.beliefs
        listed, squares = self.listed, self.listed.squares
        # the sums of beliefs of a node as it tells its neighbours: candidates of which these have
        # told nothing, others, and the rest
        own = shares[squares.pair]
        total = (listed.rows(shares)[near.rows] - squares.by_edge(own)).clamp_min_(0)
        total += squares.by_edge(own * (-listed.messages).exp())
        total += (listed.rest - top).exp()[near.rows]
        least = math.exp(-_RANGE)
        believed = sums[squares.pair] - listed.messages - top[listed.i[squares.pair]]
        believed -= total.clamp_min_(least).log_()[squares.near]
        # at each place, without what others have said of where it tells
        there = believed[squares.group] + squares.by_place(listed.less)[squares.place]
        there.sub_(listed.less).clamp_(-_RANGE, _RANGE).sub_(self.odds).exp_()
        told = there[squares.reverse]
        said, less = torch.zeros_like(listed.messages), torch.zeros_like(told)
        for mine, other in zip(near.weights.T, self.far.weights.T, strict=True):
            each, weight = told * other[squares.far], mine[squares.near]
            every = squares.by_group(each)
            said += weight * every.log1p()
            less += weight[squares.group] * (every[squares.group] - each).clamp_min_(0).log1p_()
        less -= said[squares.group]
        listed.messages.lerp_(said, 1 - _KEPT)
        listed.less.lerp_(less, 1 - _KEPT)

    @property
    def costly(self) -> bool:
        """Whether messages among all nodes would take less."""
        squares = limits_of(self.near.rows.device).squares * len(self.listed.squares.far)
        return squares > len(self.near.rows) * self.far.nodes

    def kept(self) -> float:
        """Sum up what the likeliest partners keep of the edges."""
        first = _first(self.beliefs.values, self.listed.i, 1)
        partners, near, far = self.listed.j[first], self.near, self.far
        keys = far.rows * far.nodes + far.columns
        ends = partners[near.rows] * far.nodes + partners[near.columns]
        at = torch.searchsorted(keys, ends).clamp_(max=len(keys) - 1)
        kept = (near.weights * far.weights[at]).sum(1)
        return float(kept.where(keys[at] == ends, 0.0).sum(dtype=torch.float64))

    def propose(self) -> None:
        """Let nodes that believe in partners propose the neighbours of these to their own."""
        near, far, m = self.near, self.far, self.far.nodes
        before, values = self.listed, self.beliefs.values
        chosen = _first(values, before.i, _PROPOSING)
        chosen = chosen[values[chosen] > _BELIEVED]
        # nodes of many neighbours come last, and not at all where they would propose too many
        work = near.starts.diff()[before.i[chosen]] * far.starts.diff()[before.j[chosen]]
        work, order = work.sort(stable=True)
        chosen = chosen[order[work.cumsum(0) <= limits_of(work.device).walks]]
        which, edge = near.beside(before.i[chosen])
        owner, along = far.beside(before.j[chosen][which])
        keys, order = (near.columns[edge][owner] * m + far.columns[along]).sort(stable=True)
        keys, counts = keys.unique_consecutive(return_counts=True)
        heard = _Sums(order, counts)(values[chosen][which[owner]])
        proposed = keys[_first(heard, keys // m, _CANDIDATES)]
        stay = before.keys[_first(values, before.i, _CANDIDATES)]
        after = self._list(torch.cat([stay, proposed]).unique())
        # what was told of pairs that stay is kept
        own, new = (
            side.keys[side.squares.pair] * len(near.rows) + side.squares.near
            for side in (before, after)
        )
        if len(own):
            at = torch.searchsorted(own, new).clamp_(max=len(own) - 1)
            after.messages.copy_(before.messages[at].where(own[at] == new, 0.0))
        self.listed = after


def _first(values: Tensor, rows: Tensor, most: int) -> Tensor:
    """List where the largest values of each row are, so many at most; rows are in order."""
    order = values.argsort(descending=True, stable=True)
    order = order[rows[order].argsort(stable=True)]
    rank = torch.arange(len(rows), device=rows.device) - torch.searchsorted(rows, rows)
    return order[rank < most]


def _surroundings(graph: Graph, share: float) -> Tensor:
    """Describe nodes by degrees along walks that never turn back, if a share of edges is left."""
    # square roots of counts vary alike
    degrees, total = graph.degrees * share, graph.degrees.sum(1, keepdim=True)
    table = SparseRows(graph.starts.int(), graph.columns.int(), graph.weights.sum(1))
    places = torch.arange(_CLASSES, device=degrees.device)
    # two classes for each doubling, between which degrees are shared out
    shares = 1 - (2 * (1 + degrees).log2()[:, :, None] - places).abs()
    walks = [shares.clamp_min_(0).flatten(1)]
    for step in range(_STEPS):
        walk = table @ walks[-1]
        if step:
            walk -= (total - int(step > 1)) * walks[-2]
        walks.append(walk)
    parts = [(total * share).sqrt()]
    for step, walk in enumerate(walks):
        parts.append(walk.clamp_min(0).sqrt() * share ** (step / 2) * _FADING**step)
    return torch.cat(parts, 1)


def match_by_candidates(near: Edges, far: Edges, device: torch.device) -> Array:
    """Find partners (n,) by messages among candidates; weights of edges are at most one."""
    state = _Candidates(*(Graph.together([side], device) for side in (near, far)))
    most, in_vain = 0.0, 0
    for number in range(_ROUNDS):
        if number % _BETWEEN == _BETWEEN - 1:
            kept = state.kept()
            in_vain = 0 if kept > most else in_vain + 1
            if in_vain > _IN_VAIN:
                break
            most = max(most, kept)
            state.propose()
            state.beliefs = state.believe()
        if is_over() or state.costly:
            break
        state.tell()
        state.beliefs = state.believe()
    i, j, values = (
        part.cpu().numpy() for part in (state.listed.i, state.listed.j, state.beliefs.values)
    )
    found = assign_listed(i, j, 2 - values.astype(np.float64), near.n, far.n).astype(np.int64)
    # the others by their degrees
    left, free = np.flatnonzero(found < 0), np.setdiff1d(np.arange(far.n), found)
    left, free = (
        nodes[side.degrees.sum(1)[nodes].argsort()]
        for side, nodes in ((near, left), (far, free))
    )  # fmt: skip
    found[left] = free[len(free) - len(left) :]
    return found


def assign_listed(rows: Array, columns: Array, costs: Array, n: int, m: int) -> Array:
    """Assign columns (n,) among some pairs, whose costs are 1 to 2; -1 if a row is left out."""
    from scipy import sparse  # SciPy takes long to import

    # every row also has a place of its own
    own = np.arange(n)
    entries = (
        np.concatenate([costs, np.full(n, LEAVING)]),
        (np.concatenate([rows, own]), np.concatenate([columns, m + own])),
    )
    graph = sparse.csr_array(entries, shape=(n, m + n))
    found = sparse.csgraph.min_weight_full_bipartite_matching(graph)[1]
    return np.where(found < m, found, -1)
