"""Exchanges by edges: what they keep more, and that none is left that helps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from torchgw._starts.graphs import Edges, Ends, exchange_ends


def weighted_graph(n, rng, degree=3.0, *, equal):
    table = np.triu(rng.random((n, n)) < degree / n, 1) * (1.0 if equal else rng.random((n, n)))
    return table + table.T


def directed_graph(n, rng, relations):
    """Edges of one direction and of both, of a weight for each."""
    table = rng.random((relations, n, n)) * (rng.random((relations, n, n)) < 1.2 / n)
    table[0] += table[0].T * (rng.random((n, n)) < 0.5)
    table[:, range(n), range(n)] = 0
    return table


def edges(table):
    found = Edges.of(*map(torch.from_numpy, np.atleast_3d(table.T).T), directed=table.ndim == 3)
    assert found is not None
    return found


def kept(x, y, partners):
    return (x * y[..., partners, :][..., partners]).sum() / (2 if x.ndim == 2 else 1)


@pytest.mark.parametrize("kind", ["equal", "weighted", "directed", "relations"])
def test_gains_are_what_exchanges_keep_more_and_none_is_left(kind):
    rng = np.random.default_rng(0)
    x, y = (
        weighted_graph(70, rng, 2.5, equal=kind == "equal")
        if kind in ("equal", "weighted")
        else directed_graph(70, rng, 1 + (kind == "relations"))
        for _ in range(2)
    )
    start = rng.permutation(70)
    state = Ends(edges(x), edges(y), start)
    pairs = np.array(list(itertools.combinations(range(70), 2)))
    gains = state.gains(*pairs.T)
    exact = []
    for p, q in pairs:
        after = start.copy()
        after[[p, q]] = start[[q, p]]
        exact.append(kept(x, y, after) - kept(x, y, start))
    assert np.allclose(gains, exact, atol=1e-12)
    listed = {tuple(sorted(pair)) for pair in zip(*state.listed(), strict=True)}
    useful = {tuple(pair) for pair in pairs[np.array(exact) > 1e-9]}
    assert useful
    assert useful <= listed
    end = exchange_ends(edges(x), edges(y), start)
    assert sorted(end) == list(range(70))
    assert kept(x, y, end) > kept(x, y, start)
    last = Ends(edges(x), edges(y), end)
    assert last.gains(*pairs.T).max() < 1e-9


def test_partners_that_were_exchanged_find_back():
    rng = np.random.default_rng(1)
    x = weighted_graph(100, rng, 4.0, equal=True)
    order = rng.permutation(100)
    y = x[np.ix_(order, order)]
    truth = order.argsort()
    wrong = truth.copy()
    wrong[:10] = truth[np.roll(np.arange(10), 1)]
    assert kept(x, y, exchange_ends(edges(x), edges(y), wrong)) == x.sum() / 2


def test_partners_among_more_stay_the_same_ones():
    rng = np.random.default_rng(2)
    x, y = (weighted_graph(n, rng, 1.5, equal=True) for n in (40, 60))
    start = rng.permutation(60)[:40]
    end = exchange_ends(edges(x), edges(y), start)
    assert sorted(end) == sorted(start)
    assert kept(x, y, end) >= kept(x, y, start)


def test_weights_are_the_same_from_a_table():
    """Large graphs have none, and search for each edge."""
    rng = np.random.default_rng(3)
    x = weighted_graph(70, rng, 2.5, equal=False)
    pairs = rng.integers(70, size=(2, 4_000))
    found, listed = edges(x).tabled(), edges(x)
    assert found.codes is not None
    assert listed.codes is None
    np.testing.assert_array_equal(found.at(*pairs, 0), x[tuple(pairs)])
    np.testing.assert_array_equal(listed.at(*pairs, 0), x[tuple(pairs)])


def test_other_tables_are_no_graphs():
    table = weighted_graph(60, np.random.default_rng(3), 1.5, equal=True)
    loop, negative, directed = table.copy(), -table, np.triu(table)
    loop[0, 0] = 1
    for other in (loop, negative, directed, np.ones((60, 60))):
        assert Edges.of(torch.from_numpy(other)) is None
