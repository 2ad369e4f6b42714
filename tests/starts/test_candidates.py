"""Messages among a few candidates lead where messages among all nodes do, in less."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchgw._problem import limits
from torchgw._problem.problem import Problem
from torchgw._search import beliefs
from torchgw._search.beliefs import match_graphs, rematch_regions
from torchgw._starts import candidates
from torchgw._starts.candidates import _Candidates, _Squares, match_by_candidates
from torchgw._starts.graphs import Edges, Graph
from torchgw._typing import Marginals
from torchgw.distances.precomputed import PrecomputedDistance

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def sparse_pair(n, seed, *, lost=0.1, degree=4.0, directed=False):
    """A random graph that has lost edges, and the whole one in another order."""
    rng = np.random.default_rng(seed)
    table = np.triu(rng.random((n, n)) < degree / n, 1).astype(float)
    table = table if directed else table + table.T
    gone = np.triu(rng.random((n, n)) < lost, 1)
    order = rng.permutation(n)
    return table * ~(gone | gone.T), table[np.ix_(order, order)]


def edges(*tables, **kw):
    return [Edges.of(torch.from_numpy(table), **kw) for table in tables]


def share_kept(x, y, partners):
    return (x * y[np.ix_(partners, partners)]).sum() / min(x.sum(), y.sum())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("directed", [False, True])
def test_edges_of_sparse_graphs_are_kept(directed, device):
    shares = []
    for seed in range(2):
        x, y = sparse_pair(400, seed, directed=directed)
        found = match_by_candidates(*edges(x, y, directed=directed), torch.device(device))
        assert sorted(found) == list(range(400))
        shares.append(share_kept(x, y, found))
    # messages among all nodes keep .99, degrees a tenth
    assert np.mean(shares) > 0.95


def test_beliefs_in_all_nodes_are_those_of_messages_among_all(monkeypatch):
    # all nodes are candidates, none is proposed, and equal partners are told apart by nothing
    monkeypatch.setattr(candidates, "_CANDIDATES", 60)
    for module in (beliefs, candidates):
        monkeypatch.setattr(module, "_NOISE", 0.0)
    sides = [Graph.together([side], CPU) for side in edges(*sparse_pair(60, 3, degree=2.0))]
    state = _Candidates(*sides)
    for _ in range(15):
        state.tell()
        state.beliefs = state.believe()
    few = state.beliefs.values.view(60, 60)
    weights = Marginals(*(torch.full((60,), 1 / 60) for _ in range(2)))
    every = 60 * beliefs.believed_plans(*sides, weights, rounds=16)[0]
    # columns are balanced otherwise, which changes beliefs but hardly what is the likeliest
    assert float((few.argmax(1) == every.argmax(1)).double().mean()) > 0.9


def test_squares_are_the_edges_that_join_candidates():
    x, y = sparse_pair(40, 0, degree=1.5)
    near, far = (Graph.together([side], CPU) for side in edges(x, y))
    rng = np.random.default_rng(1)
    keys = np.sort(rng.choice(1600, 500, replace=False))
    i, j = np.divmod(keys, 40)
    squares = _Squares.of(near, far, torch.from_numpy(keys))
    end = squares.pair[squares.group]
    other = end[squares.reverse]
    found = set(zip(end.tolist(), other.tolist(), strict=True))
    joined = (x[np.ix_(i, i)] * y[np.ix_(j, j)]).nonzero()
    assert found == set(zip(*(side.tolist() for side in joined), strict=True))
    assert len(end) == len(found)
    assert torch.equal(squares.reverse[squares.reverse], torch.arange(len(end)))
    ends = far.columns[squares.far]
    assert torch.equal(ends, torch.from_numpy(j)[other])


def test_hubs_that_would_propose_too_many_do_not(monkeypatch):
    monkeypatch.setitem(limits.LIMITS, "cpu", limits.CPU._replace(walks=100))
    star = np.zeros((80, 80))
    star[0, 1:] = star[1:, 0] = 1
    star[1, 2] = star[2, 1] = 1
    order = np.random.default_rng(0).permutation(80)
    y = star[np.ix_(order, order)]
    found = match_by_candidates(*edges(star, y), CPU)
    assert share_kept(star, y, found) == 1


def test_a_matching_that_tells_nothing_is_made_anew():
    # exchanges along edges alone keep half
    x, y = sparse_pair(1_000, 1)
    start = np.random.default_rng(2).permutation(1_000)
    found = rematch_regions(*edges(x, y), start, 0.0, CPU, anew=True)
    assert share_kept(x, y, found) > 0.98


def test_graphs_too_large_for_messages_among_all_are_matched(monkeypatch):
    monkeypatch.setitem(limits.LIMITS, "cpu", limits.CPU._replace(messages=0.0))
    x, y = sparse_pair(300, 5)
    weights = Marginals(*(torch.full((300,), 1 / 300, dtype=torch.float64) for _ in range(2)))
    sides = (PrecomputedDistance(torch.from_numpy(side)) for side in (x, y))
    found = match_graphs(Problem(*sides, weights, 1.0, None))
    assert share_kept(x, y, found.plan.argmax(1).numpy()) > 0.98
