"""Regions of a matching of graphs are matched anew where edges are lost around them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchgw._problem import limits
from torchgw._search.beliefs import kept_share, match_edges_alone, rematch_regions
from torchgw._starts.graphs import Edges, exchange_ends
from torchgw._typing import Marginals

CPU = torch.device("cpu")


def sparse_graph(n, rng, degree=3.0):
    table = np.triu(rng.random((n, n)) < degree / n, 1)
    return np.asarray(table | table.T, dtype=np.float64)


def edges(table):
    found = Edges.of(torch.from_numpy(table))
    assert found is not None
    return found


def share_kept(x, y, partners):
    return (x * y[np.ix_(partners, partners)]).sum() / min(x.sum(), y.sum())


@pytest.mark.parametrize(
    ("turned", "together", "device"),
    [
        (False, 1, "cpu"),
        (True, 1, "cpu"),
        (False, 2, "cpu"),
        pytest.param(False, 16, "cuda", marks=pytest.mark.gpu),
    ],
)
def test_all_edges_are_found_from_any_matching(turned, together, device, monkeypatch):
    # exchanges alone keep six tenths
    monkeypatch.setitem(limits.LIMITS, device, limits.LIMITS[device]._replace(regions=together))
    shares = []
    for seed in range(2):
        rng = np.random.default_rng(seed)
        y = sparse_graph(150, rng)
        x = y * ~((gone := np.triu(rng.random(y.shape) < 0.1, 1)) | gone.T)
        order = rng.permutation(150)
        y = y[np.ix_(order, order)]
        x, y = (y, x) if turned else (x, y)
        found = rematch_regions(edges(x), edges(y), rng.permutation(150), 0.2, torch.device(device))
        assert sorted(found) == list(range(150))
        shares.append(share_kept(x, y, found))
    assert np.mean(shares) > 0.97


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_messages_between_all_edges_keep_no_fewer_than_those_among_candidates(device, limited):
    weights = torch.full((150,), 1 / 150, dtype=torch.float64, device=device)
    kept = {0: [], 10**9: []}
    for seed in range(3):
        rng = np.random.default_rng(seed)
        y = sparse_graph(150, rng, degree=2.2)
        x = y * ~((gone := np.triu(rng.random(y.shape) < 0.2, 1)) | gone.T)
        order = rng.permutation(150)
        near, far = edges(x), edges(y[np.ix_(order, order)])
        for walks, shares in kept.items():
            limited(walks=walks)
            partners = match_edges_alone(near, far, Marginals(weights, weights))
            assert sorted(partners.tolist()) == list(range(150))
            shares.append(kept_share(near, far, partners))
    assert all(more >= fewer for fewer, more in zip(*kept.values(), strict=True))


def test_weights_are_kept_no_less_than_by_exchanges_among_the_same_partners():
    rng = np.random.default_rng(5)
    x, y = (sparse_graph(n, rng, 2.0) for n in (90, 120))
    x, y = (table * (draw + draw.T) for table in (x, y) for draw in [rng.random(table.shape)])
    start = rng.permutation(120)[:90]
    found = rematch_regions(edges(x), edges(y), start, 0.1, CPU)
    assert sorted(found) == sorted(start)
    before = share_kept(x, y, exchange_ends(edges(x), edges(y), start))
    assert share_kept(x, y, found) > before


def test_graphs_without_edges_stay_as_they_are():
    empty, some = (sparse_graph(90, np.random.default_rng(0), degree) for degree in (0.0, 2.0))
    found = rematch_regions(edges(empty), edges(some), np.arange(90), 1.0, CPU)
    assert list(found) == list(range(90))


def test_partners_that_no_edge_joins_stay_as_they_are():
    y = np.zeros((90, 90))
    y[0, 1] = y[1, 0] = 1.0
    near = Edges.listed(3, np.array([1, 3]), np.ones(2))
    found = rematch_regions(near, edges(y), np.array([7, 5, 6]), 1.0, CPU)
    assert list(found) == [7, 5, 6]
