"""Belief propagation between two graphs: which node is whose partner, told by their neighbours.

Nodes whose neighbourhoods look alike are partners of each other only if their neighbours are, and
theirs. Each node tells every neighbour where it believes to be, from what all others have told it
but that neighbour [1]: an edge (i, k) of A says that j, the partner of i, is next to that of k, or,
with small odds, that the edge is lost. Without leaving out what came from there, beliefs would
confirm themselves. On sparse graphs that finds partners where every linearisation at a blurred plan
sees little more than degrees. It takes |edges of A| m numbers, and sums over edges alone.

A path of A would still fold upon itself in B, its third node where the first one is. So a node that
tells a neighbour to be at l, next to j, does not count what its other neighbours say of j [2]: then
it has a belief for every edge (l, j) of B, |edges of A| |edges of B| numbers in all.

[1] J. Pearl. Probabilistic Reasoning in Intelligent Systems. Morgan Kaufmann 1988.

[2] For sparse random graphs: G. Piccioli, G. Semerjian, G. Sicuro, L. Zdeborova. Aligning random
graphs with a sub-tree similarity message-passing algorithm. Journal of Statistical Mechanics 2022.

A matching of all nodes has regions that lie where others belong, with lost edges around them. The
nodes of a region get new partners, the old ones of each other, by messages among them alone: what
the rest of the matching keeps with a pair is evidence. It stays where no fewer edges are kept [3].

[3] P. Shaw. Using constraint programming and local search methods to solve vehicle routing
problems. Principles and Practice of Constraint Programming 1998.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchgw._errors import PerformanceWarning, warn_user
from torchgw._problem.limits import CPU, limits_of
from torchgw._problem.problem import Problem, is_sparse, stored_matrix, weigh_alike
from torchgw._starts.alternatives import Alternative
from torchgw._starts.candidates import LOST, match_by_candidates
from torchgw._starts.chain import COMPARED_AT, INNER
from torchgw._starts.graphs import Array, Edges, Ends, Graph, SparseRows, exchange_ends, graphs_of
from torchgw._tensors.cuda_graphs import CAPTURED_BYTES, Captured, borrow_memory
from torchgw._tensors.deadline import is_over, say_beside
from torchgw._tensors.machine import known_free, slowness
from torchgw._tensors.operations import EQUAL
from torchgw._typing import Marginals
from torchgw.distances.base import both_ways

# Rounds of messages, the first share of which leaves beliefs free; what beliefs then add to their
# own evidence in each round, so that of equally good partners one is chosen; and noise in which
# these differ. [L1362]
_ROUNDS, _FREE, _REINFORCED, _NOISE = 60, 1 / 3, 0.1, 0.1
# Change of a node's largest belief, a share of it, at which rounds are over. [L1654]
_STILL = 0.01
# Share of a message that is kept in the next round; without it they go to and fro. [L1362]
_KEPT = 0.3
# Logarithms of beliefs, relative to the largest of a row, that are none. A choice.
_NONE = -30.0
# Share of a node's largest belief that is kept in a plan that others read by its entries. A choice.
_LEAST = 1e-6
# Seconds for each message and round on a CPU, and from how many in all on there is a warning.
# [L1362]
_MESSAGE, LONG = 2e-8, 20.0
# Entries of messages that are computed at a time: what a cache holds, or little memory. [L1362]
_CACHED, _AT_ONCE = 2**18, 2**26

# Rounds of messages in a region. [L1817]
_BRIEF = 30
# Nodes of a region, by chance, at most half of all but for once; and how often each lost edge is
# tried in vain in a row. [L1535, L1954]
_SIZES, _TRIED = (60, 120, 240), 3
# Tries for each node in a search and in a matching. [L1535]
SEARCH_TRIES, MATCHING_TRIES = 0.1, 0.02
# Seconds of a message in a round between regions. [L1599]
_IN_REGION = 1.1e-8
# Seconds of messages among candidates for each edge and direction. [L1816, L1921]
_BY_CANDIDATES = 6.5e-4


class Places(NamedTuple):
    """Where the partner of a node may be; of some places, next to which node it does not look.

    Graphs beside each other have as many places each, of which the last may be none.
    """

    node: Tensor  # (graphs, p) of the graph; the first places are the nodes, which look next to all
    # (graphs p, graphs p) weights of the edges from a place to where it looks, of each layer
    beside: list[SparseRows]

    @classmethod
    def of(cls, graph: Graph, count: int, most: float) -> Places:
        """Make one of every node, and of every direction of an edge unless these are too many."""
        nodes, m, rows = graph.nodes, graph.nodes // count, graph.rows
        every = torch.arange(nodes, device=rows.device)
        if m + len(rows) // count > most:
            beside = _by_layers(rows, graph.columns, graph.weights, nodes)
            return cls(every.view(count, m) % m, beside)
        within, room = _numbered(rows // m, count)
        node, owned = torch.cat([every, rows]), torch.cat([every % m, m + within])
        place = node // m * (m + room) + owned
        owner, edge = graph.beside(node)
        # a place does not look along the edge that it is of
        other = edge != owner - nodes
        owner, edge = place[owner[other]], edge[other]
        owner, order = owner.sort(stable=True)
        edge, last = edge[order], count * (m + room)
        ends = place[nodes + graph.reverse[edge]]
        found = place.new_zeros(last).index_copy_(0, place, node % m)
        return cls(found.view(count, -1), _by_layers(owner, ends, graph.weights[edge], last))


def _by_layers(rows: Tensor, columns: Tensor, weights: Tensor, count: int) -> list[SparseRows]:
    """Make a matrix (count, count) of each layer of some entries, by rows."""
    found, every = [], torch.arange(count + 1, device=rows.device)
    for layer in weights.T:
        used = layer != 0
        starts = torch.searchsorted(rows[used], every)
        found.append(SparseRows(starts.int(), columns[used].int(), layer[used]))
    return found


def _numbered(owner: Tensor, count: int) -> tuple[Tensor, int]:
    """Give what each owner has numbers, in order, and tell the most that one has."""
    counts = torch.bincount(owner, minlength=count)
    first = counts.cumsum(0) - counts
    return torch.arange(len(owner), device=owner.device) - first[owner], int(counts.max())


def believed_plan(source: Graph, target: Graph, marginals: Marginals) -> Tensor:
    """Find a plan (n, m) float32 by messages along the edges of the graph that has fewer."""
    if len(source.rows) > len(target.rows):
        return believed_plans(target, source, Marginals(*marginals[::-1]))[0].T.contiguous()
    return believed_plans(source, target, marginals)[0]


def believed_plans(
    source: Graph,
    target: Graph,
    marginals: Marginals,
    seed: int = 0,
    lost: Tensor | None = None,
    rounds: int = _ROUNDS,
) -> Tensor:
    """Find plans (k, n, m) float32 between k graphs a side by messages along edges of the first."""
    # `lost` (k, n, m) are the edges that each pair must lose, less those that it keeps for sure.
    # Weights of nodes are float32 of sum one, and positive.
    (a, b), n, m = marginals, len(marginals.a), len(marginals.b)
    count, edges = source.nodes // n, len(source.rows)
    odds = LOST / m
    if lost is None:
        # an edge that must be lost has two ends
        degrees = source.degrees.view(count, n, -1), target.degrees.view(count, m, -1)
        lost = torch.cdist(*degrees, p=1) / 2
    evidence = lost * math.log(odds)
    generator = torch.Generator("cpu").manual_seed(seed)
    noise = torch.randn(evidence.shape, generator=generator, device="cpu")
    evidence += noise.to(evidence).mul_(_NOISE)
    node, beside = Places.of(
        target, count, limits_of(evidence.device).walks * count / max(1, edges)
    )
    # where each edge is among as many of each graph, the other direction, and whose it is
    within, room = _numbered(source.rows // n, count)
    edge = source.rows // n * room + within
    reverse = torch.arange(count * room, device=edge.device)
    owner = reverse // max(1, room) * n
    reverse[edge], owner[edge] = edge[source.reverse], source.rows
    # who is told sees the edge from its other end
    told = source.weights[source.reverse]
    weights = evidence.new_zeros(count * room, told.shape[1]).index_copy_(0, edge, told)
    # the sum of what the neighbours of each node have said, along the edges from them
    every = torch.ones_like(source.weights[:, 0])
    heard = SparseRows(source.starts.int(), reverse[edge].int(), every)
    width = node.shape[1]
    messages = evidence.new_zeros(count * room, width)
    column, before, free = evidence.new_zeros(count, 1, m), evidence.clone(), True
    looked = node[:, None].expand(count, n, width)
    parts = list(_parts(source, width)) if count == 1 else [(slice(None), slice(None))]
    # points without weight stay where logarithms are finite
    a, b = a[:, None], b.clamp_min(torch.finfo(b.dtype).tiny)[:, None]

    def believe() -> tuple[Tensor, Tensor]:
        """Balance what nodes have heard; return that, and whether beliefs rest."""
        sums = (heard @ messages).view(looked.shape) + evidence.gather(2, looked)
        believed = _exponentials(sums[:, :, :m] + column)
        v = torch.ones_like(b)
        for _ in range(INNER):
            u = (believed @ v).reciprocal_()
            v = b / (believed.mT @ (a * u))
        column.add_(v.log().mT)
        believed.mul_(u).mul_(v.mT)
        still = before.sub_(believed).abs_().amax(2) < _STILL * believed.amax(2)
        before.copy_(believed)
        return sums, still.all()

    def tell(sums: Tensor) -> None:
        """Send what a node believes without what it was told by the one that it tells."""
        sums += column.gather(2, node[:, None])
        for nodes, some in parts:
            mine = owner[some] - (nodes.start or 0)
            told = sums.flatten(0, 1)[nodes].index_select(0, mine)
            _exponentials(told.sub_(messages.index_select(0, reverse[some])))
            total = told[:, :m].sum(1, keepdim=True).mul_(odds)
            each = len(told) // count
            turned = told.view(count, each, width).mT.contiguous().view(count * width, each)
            said = torch.zeros_like(told)
            for look, weight in zip(beside, weights[some].T, strict=True):
                near = (look @ turned).view(count, width, each).mT.contiguous().view_as(told)
                said.addcmul_(near.div_(total).log1p_(), weight[:, None])
            messages[some].lerp_(said, 1 - _KEPT)

    steps: list[Callable[..., Any]] = [believe, tell]
    if messages.is_cuda and messages.nbytes <= CAPTURED_BYTES:
        memory = borrow_memory(believe, messages.device)
        steps = [Captured(step, memory, in_place=1) for step in steps]
    for number in range(rounds):
        sums, still = steps[0]()
        if is_over():
            break
        rests = bool(still)
        if rests and not free:
            break
        free = free and not rests and number < _FREE * rounds
        if not free:
            evidence.add_(before.log(), alpha=_REINFORCED)
        steps[1](sums)
    return before.mul_(a)


def rematch_regions(
    near: Edges,
    far: Edges,
    partners: Array | None,
    tries: float,
    device: torch.device,
    *,
    anew: bool = False,
) -> Array:
    """Find partners (n,), an order of the same ones, that keep no less weight of edges.

    Ends of edges are exchanged, and regions matched anew by messages on a device, so many `tries`
    for each node at most; before, if asked for, all nodes, where more edges are lost than messages
    expect. Without partners it begins by that.
    """
    if not (len(near.keys) and len(far.keys)):
        return np.arange(near.n) if partners is None else partners
    largest = max(near.weights.max(), far.weights.max())
    near, far = (side._replace(weights=side.weights / largest) for side in (near, far))
    if partners is None:
        partners = _by_candidates(near, far, device)
    elif anew and near.n < far.n:
        # regions get no other nodes than those that are partners
        kept = _weight(near, far, partners)
        if kept < (1 - LOST) * near.weights.sum():
            other = _by_candidates(near, far, device)
            partners = other if _weight(near, far, other) > kept else partners
    partners = exchange_ends(near, far, partners)
    used = np.sort(partners)
    far = far if len(used) == far.n else far.among(used)
    if not (len(near.keys) and len(far.keys)):
        return partners
    partners = np.searchsorted(used, partners)
    if len(near.keys) <= len(far.keys):
        return used[_repaired(near, far, partners, tries, device, anew)]
    # only of the graph that has fewer can all edges be kept
    return used[_repaired(far, near, partners.argsort(), tries, device, anew).argsort()]


def _weight(near: Edges, far: Edges, partners: Array) -> float:
    """Sum up what partners (n,) keep, of each edge from both ends."""
    return float(near.weights @ far.at(partners[near.rows], partners[near.columns], near.layer))


def _by_candidates(near: Edges, far: Edges, device: torch.device) -> Array:
    """Match all nodes, whose edges weigh one at most, by messages among candidates."""
    if near.n == far.n and len(near.keys) > len(far.keys):
        return _by_candidates(far, near, device).argsort()
    if device.type == "cpu":
        seconds = seconds_of_candidates(len(near.keys))
        say_beside(seconds, "all nodes are matched by few candidates of each")
    return match_by_candidates(near, far, device)


def seconds_of_candidates(edges: int) -> float:
    """Model the time on this CPU of a match of all nodes, by edges in both directions."""
    return slowness() * _BY_CANDIDATES * edges


def seconds_of_regions(nodes: int, edges: int, most: float = math.inf) -> float:
    """Model the time on a CPU of regions of a start, all or so many, matched anew in vain."""
    if edges > CPU.edge_density * nodes**2:
        return 0.0
    messages = list[float]()
    for size in (*(min(size, nodes // 2) for size in _SIZES), nodes):
        told = edges / nodes * size
        turns = told * (size + told) <= CPU.walks
        messages.append(told * (size + told * turns))
    *regions, whole = messages
    tries = min(math.ceil(SEARCH_TRIES * nodes), most)
    each = sum(regions) / len(regions)
    return _BRIEF * _IN_REGION * (tries * each + whole * (nodes <= max(_SIZES)))


def _repaired(
    near: Edges, far: Edges, partners: Array, tries: float, device: torch.device, anew: bool
) -> Array:
    """Match all nodes and regions around lost edges anew, until each of these was tried in vain."""
    far = far.tabled()
    draw, idle, best = np.random.default_rng(0), 0, Ends(near, far, partners)
    left, room = math.ceil(tries * near.n), near.n
    if anew and best.share_lost() > LOST and not is_over():
        other = best.moved(_by_candidates(near, far, device))
        other.run()
        best = best.moved(max(best, other, key=lambda state: state.most).best)
    most = min(left, _TRIED * np.count_nonzero(best.lost().clip(min=0)) / 2)
    if most and device.type == "cpu":
        seconds = slowness() * seconds_of_regions(near.n, len(near.keys), most)
        say_beside(seconds, "regions of graphs are matched anew")
    while left > 0:
        lost = best.lost().clip(min=0)
        if idle >= _TRIED * np.count_nonzero(lost) / 2 or is_over():
            break
        drawn = draw.choice(len(lost), limits_of(device).regions, p=lost / lost.sum())
        ends = np.stack([best.rows, near.columns])[:, drawn].T
        size = min(int(draw.choice(_SIZES)), room)
        if size == near.n:
            # that asks nothing of where the nodes are now, and need not be asked again
            room = near.n // 2
        regions, taken = list[Array](), set[int]()
        for pair in ends.tolist():
            # as large as the first one, and apart from all
            if taken.isdisjoint(pair):
                nodes = _region(best, pair, size, draw, taken)
                if not regions or len(nodes) == len(regions[0]):
                    regions.append(nodes)
                    taken.update(nodes.tolist())
        found = _anew(best, np.stack(regions), left, device)
        left -= len(regions)
        for nodes, there in zip(regions, found, strict=True):
            # what another region led to may have exchanged some of these
            if not np.array_equal(np.sort(best.partners[nodes]), np.sort(there)):
                continue
            partners = best.partners.copy()
            partners[nodes] = there
            state = best.moved(partners)
            state.settle(nodes)
            rounding = EQUAL * state.unit
            idle = 0 if state.most > best.most + rounding else idle + 1
            if state.most >= best.most - rounding:
                best = best.moved(state.best)
    return best.best


def _region(
    state: Ends, found: list[int], size: int, draw: np.random.Generator, taken: set[int]
) -> Array:
    """Collect nodes around some, along edges of both graphs, none of those that are taken."""
    sides, known = ((state.near, None), (state.far, state.nodes)), taken.union(found)
    # the list grows as it is read
    for node in found:
        if len(found) >= size:
            break
        beside = []
        for graph, nodes in sides:
            at = node if nodes is None else state.partners[node]
            ends = graph.columns[graph.starts[at] : graph.starts[at + 1]]
            beside.append(ends if nodes is None else nodes[ends])
        fresh = [end for end in draw.permutation(np.concatenate(beside)) if end not in known]
        fresh = list(dict.fromkeys(fresh))
        known.update(fresh)
        found += fresh
    return np.array(found[:size])


def _anew(state: Ends, regions: Array, seed: int, device: torch.device) -> list[Array]:
    """Give the nodes of regions (k, s) new partners, the old ones of each other."""
    from scipy.optimize import linear_sum_assignment  # SciPy takes long to import

    there, size = state.partners[regions], regions.shape[1]
    source = Graph.together([state.near.among(nodes) for nodes in regions], device)
    target = Graph.together([state.far.among(nodes) for nodes in there], device)
    share = torch.full((size,), 1 / size, device=device)
    lost = np.stack([_lost(state, *nodes) for nodes in zip(regions, there, strict=True)])
    evidence = torch.from_numpy(lost).float().to(device)
    plans = believed_plans(source, target, Marginals(share, share), seed, evidence, _BRIEF).cpu()
    chosen = (linear_sum_assignment(plan, maximize=True)[1] for plan in plans)
    return [old[place] for old, place in zip(there, chosen, strict=True)]


def _lost(state: Ends, nodes: Array, there: Array) -> Array:
    """Count the edges to all others that each pair of nodes must lose, less those that it keeps."""
    near, far, partners = state.near, state.far, state.partners
    place = np.full(near.n, -1)
    place[there] = np.arange(len(there))
    owner, edge = near.beside(nodes)
    end = partners[near.columns[edge]]
    # edges to the rest, and those of the other graph that they may lie on
    outside = place[end] < 0
    owner, edge, end = owner[outside], edge[outside], end[outside]
    which, on = far.beside(end)
    at = place[far.columns[on]]
    inside = at >= 0
    inside &= far.keys[on] % far.layers == state.back[edge[which]]
    which, on, at = which[inside], on[inside], at[inside]
    degrees = near.degrees[nodes][:, None], far.degrees[there]
    lost: Array = np.abs(degrees[0] - degrees[1]).sum(2) / 2
    np.subtract.at(lost, (owner[which], at), near.weights[edge[which]] * far.weights[on])
    return lost


def match_graphs(problem: Problem) -> Alternative | None:
    """Match two graphs that are too large for chains; ``None`` if they are none, or far too large.

    Their tables are stored and mostly zeros, and nothing else has a say.
    """
    if not (problem.linear is None and problem.support is None and problem.loss.is_square):
        return None
    x, y = (side.matrix() for side in problem.sides)
    if x is None or y is None or not (is_sparse(x) and is_sparse(y)):
        return None
    if min(float(table.min()) for table in (x, y)) < 0:
        return None
    graphs = graphs_of(problem.sides)
    source, target = Graph.both(graphs, (x, y))
    count = min(len(source.rows) * target.nodes, len(target.rows) * source.nodes)
    graphs = graphs if weigh_alike(problem.marginals) else None
    found = list[tuple[float, Tensor]]()
    tables = 16 * problem.source.n * problem.target.n
    if tables > known_free(tables, x.device):
        return None
    needed = 4 * count + tables
    told = count <= limits_of(x.device).messages and needed <= known_free(needed, x.device)
    if graphs is not None:
        partners = rematch_regions(*graphs, None, 0.0 if told else MATCHING_TRIES, x.device)
        found.append(_matching(problem, torch.from_numpy(partners)))
    if told and not (graphs is not None and _keeps_all(*graphs, partners)):
        plan = _sparse_belief(source, target, problem.marginals, count)
        found.append((_value(problem, plan), plan))
        if graphs is not None:
            found.append(_matching(problem, rematched(*graphs, plan)))
    if not found:
        return None
    value, plan = min(found, key=lambda each: each[0])
    rows, columns = (torch.arange(size, device=plan.device) for size in plan.shape)
    shape = (source.nodes, target.nodes)
    return Alternative(value, "beliefs", plan, rows, columns, shape, epsilon=COMPARED_AT)


def _sparse_belief(source: Graph, target: Graph, marginals: Marginals, count: int) -> Tensor:
    """Find a plan (n, m) float32 by so many messages, the least entries of which are zero."""
    seconds = 0.0 if source.rows.is_cuda else _MESSAGE * _ROUNDS * count
    if seconds > LONG:
        warn_user(
            f"Messages along the edges of these graphs take about {seconds:.0f} s on this CPU. "
            "search='fast' leaves them out, and a start that is known (`init`) needs none.",
            PerformanceWarning,
        )
    plan = believed_plan(source, target, Marginals(*(weight.float() for weight in marginals)))
    plan = plan.where(plan > _LEAST * plan.amax(1, keepdim=True), 0.0)
    return plan / plan.sum()


def match_edges_alone(near: Edges, far: Edges, marginals: Marginals) -> Tensor:
    """Match two graphs by their edges, the one with fewer nodes first: partners (n,).

    Messages among a few candidates of each node; and where these lose edges, those of all edges to
    all others, if there is room for them.
    """
    device, edges = marginals.a.device, (len(near.keys), len(far.keys))
    found = rematch_regions(near, far, None, MATCHING_TRIES, device)
    partners = torch.from_numpy(found)
    # messages between all edges leave no node out
    told = near.n == far.n and math.prod(edges) <= limits_of(device).walks
    needed = 4 * math.prod(edges) + 16 * near.n**2
    if not told or _keeps_all(near, far, found) or needed > known_free(needed, device):
        return partners.to(device)
    source, target = (Graph.together([side], device) for side in (near, far))
    plan = _sparse_belief(source, target, marginals, min(edges) * near.n)
    ends = partners, rematched(near, far, plan).cpu()
    return max(ends, key=lambda one: kept_share(near, far, one)).to(device)


def kept_share(near: Edges, far: Edges, partners: Tensor) -> float:
    """Compute the share of the edges of the graph that has fewer which partners (n,) keep."""
    return float(is_kept(near, far, partners).sum() / min(len(near.keys), len(far.keys)))


def is_kept(near: Edges, far: Edges, partners: Tensor) -> Array:
    """Tell which edges lie on others, (e,)."""
    there = partners.cpu().numpy()
    found: Array = far.at(there[near.rows], there[near.columns], near.layer) > 0
    return found


def _keeps_all(near: Edges, far: Edges, partners: Array) -> bool:
    """Tell whether no edge of the graph that has fewer could lie on a heavier one."""
    if len(near.keys) > len(far.keys):
        near, far, partners = far, near, partners.argsort()
    return Ends(near, far, partners).share_lost() == 0


def _matching(problem: Problem, partners: Tensor) -> tuple[float, Tensor]:
    """Make a plan (n, n) float32 of partners (n,), and compute its objective."""
    n, device = len(partners), problem.source.device
    plan = torch.zeros(n, n, device=device)
    plan.scatter_(1, partners.to(device)[:, None], 1 / n)
    return _value(problem, plan), plan


def rematched(near: Edges, far: Edges, plan: Tensor, tries: float = SEARCH_TRIES) -> Tensor:
    """Round a plan (n, n) to a matching, and improve that along edges; return partners (n,)."""
    from scipy.optimize import linear_sum_assignment  # SciPy takes long to import

    partners = linear_sum_assignment(plan.cpu(), maximize=True)[1]
    partners = rematch_regions(near, far, partners, tries, plan.device)
    return torch.from_numpy(partners).to(plan.device)


def _value(problem: Problem, plan: Tensor) -> float:
    """Compute the objective of a plan by sums over edges, the mean over directions."""
    ways, found = both_ways(*problem.sides), 0.0
    for way in ways:
        x, y = (SparseRows.of(stored_matrix(side)) for side in way)
        for side, weight in zip((x, y), problem.marginals, strict=True):
            rows = torch.repeat_interleave(side.starts.diff())
            found += float(weight[rows] * weight[side.columns] @ side.values.double().square())
        x, y = (replace(side, values=side.values.float()) for side in (x, y))
        there = (y @ (x @ plan).T.contiguous()).T
        found -= 2 * float((there * plan).sum(1).sum(dtype=torch.float64))
    return problem.alpha * found / len(ways)


def _exponentials(logarithms: Tensor) -> Tensor:
    """Turn rows into exponentials, the largest of a row one, in place."""
    # without tiny numbers, by which CPUs take long
    return logarithms.sub_(logarithms.amax(-1, keepdim=True)).clamp_min_(_NONE).exp_()


def _parts(graph: Graph, width: int) -> Iterator[tuple[slice, slice]]:
    """Divide nodes into parts: their places, and those of their edges."""
    most = _AT_ONCE if graph.rows.is_cuda else _CACHED
    starts, first = graph.starts.tolist(), 0
    while first < graph.nodes:
        last = first + 1
        while last < graph.nodes and (starts[last + 1] - starts[first]) * width <= most:
            last += 1
        yield slice(first, last), slice(starts[first], starts[last])
        first = last
