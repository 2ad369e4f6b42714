"""Features of nodes by name: what they are, where they are refused, what they are good for."""

from __future__ import annotations

import networkx
import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
import torch
from problems import solve_by_name

import torchgw
from torchgw._problem import signatures
from torchgw._problem.signatures import named_features
from torchgw.distances import connect

NAMES = ["degree", "clustering", "heat", "wl"]
NOTHING = (None, None)


def pair(n=40, seed=0):
    """A network with an isolated node, and its shuffled copy; node i went to match[i]."""
    graph = networkx.gnp_random_graph(n, 0.15, seed=seed)
    graph.remove_edges_from(list(graph.edges(0)))
    table = networkx.to_numpy_array(graph)
    order = np.random.default_rng(seed).permutation(n)
    return graph, table, table[np.ix_(order, order)], np.argsort(order)


def raw(name, table):
    return signatures._SIGNATURES[name](scipy.sparse.csr_array(table))


def test_signatures_are_what_they_are_called():
    graph, table, _, _ = pair()
    degree = table.sum(1)
    assert raw("degree", table)[:, 0] == pytest.approx(np.log1p(degree))
    known = np.array(list(networkx.clustering(graph).values()))
    assert raw("clustering", table)[:, 0] == pytest.approx(known)
    laplacian = networkx.normalized_laplacian_matrix(graph).toarray()
    heat = raw("heat", table)
    for place, time in enumerate(signatures.HEAT_TIMES):
        assert heat[:, place] == pytest.approx(np.diag(scipy.linalg.expm(-time * laplacian)))
    rounds = raw("wl", table)
    mean = (table @ rounds[:, 1]) / np.maximum(degree, 1)
    assert rounds[:, 2] == pytest.approx((rounds[:, 1] + mean) / 2)


def test_heat_of_large_graphs_is_that_of_small_ones(monkeypatch):
    _, table, _, _ = pair()
    small = raw("heat", table)
    monkeypatch.setattr(signatures, "CPU", signatures.CPU._replace(all_pairs_points=10))
    monkeypatch.setattr(signatures, "BLOCK_ENTRIES", 17 * len(table))
    assert raw("heat", table) == pytest.approx(small, rel=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_features_follow_the_nodes_and_have_variance_one(name):
    _, table, copy, match = pair()
    first, second = named_features(name, NOTHING, (table, copy))
    assert first.dtype == second.dtype == torch.float64
    assert (second[match] - first).abs().max() < 1e-9
    pooled = torch.cat([first, second])
    assert float(pooled.square().sum(1).mean()) == pytest.approx(1)
    assert pooled.mean(0).abs().max() < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_all_kinds_of_graphs_have_the_same_features(name):
    graph, table, _, _ = pair()
    lengths = scipy.sparse.csr_array(table * 0.3)
    lengths.data[::7] = 0.0
    # a length of zero is an edge; made symmetric again
    lengths = torchgw.distances.symmetrise(lengths)
    looped = table + np.eye(len(table))
    ways = [
        ((graph, graph), NOTHING),
        ((scipy.sparse.csr_array(table), lengths), NOTHING),
        ((None, graph), (table * 5, None)),
        (NOTHING, (torch.from_numpy(looped), table > 0)),
    ]
    want = named_features(name, NOTHING, (table, table))
    for sides, tables in ways:
        for part, known in zip(named_features(name, sides, tables), want, strict=True):
            assert (part - known).abs().max() < 1e-12


def test_a_connected_graph_object_is_a_graph():
    graph = networkx.to_scipy_sparse_array(networkx.cycle_graph(9), dtype=float)
    chord = graph.tolil()
    chord[0, 4] = chord[4, 0] = 1.0
    made = connect(scipy.sparse.csr_matrix(chord))
    by_object = named_features("degree", (made, made), NOTHING)
    by_table = named_features("degree", NOTHING, (chord.toarray(), chord.toarray()))
    assert torch.equal(by_object[0], by_table[0])


def test_alike_nodes_have_features_of_zero():
    ring = networkx.to_numpy_array(networkx.cycle_graph(8))
    for name in NAMES:
        first, second = named_features(name, NOTHING, (ring, ring))
        assert not first.any()
        assert not second.any()
    result = torchgw.solve(D_X=ring, D_Y=ring, features="heat", random_state=0)
    assert result.value_linear == 0


def test_features_that_are_no_name_pass_through():
    assert named_features(None, NOTHING, NOTHING) is None
    given = (np.zeros((3, 1)), np.zeros((2, 1)))
    assert named_features(given, NOTHING, NOTHING) is given


def test_what_is_no_graph_is_refused():
    graph, table, _, _ = pair()
    points = np.random.default_rng(0).normal(size=(40, 3))
    distances = np.abs(points[:, :1] - points[:, :1].T)
    with pytest.raises(torchgw.InvalidInputError, match="`features` must be one of"):
        torchgw.solve(graph, graph, features="colour")
    with pytest.raises(torchgw.InvalidInputError, match="both sides, and `Y` is a ndarray"):
        torchgw.solve(graph, points, features="degree")
    with pytest.raises(torchgw.InvalidInputError, match="of `D_X` 100% of the entries"):
        torchgw.solve(D_X=distances, D_Y=table, features="wl")
    with pytest.raises(torchgw.InvalidInputError, match="for graphs, a name such as"):
        torchgw.solve(graph, graph, features=3)


def test_alpha_has_its_own_default_with_a_name():
    _, table, copy, _ = pair()
    options = {"D_X": table, "D_Y": copy, "random_state": 0, "n_init": 1}
    by_name = solve_by_name(features="wl", **options)
    given = named_features("wl", NOTHING, (table, copy))
    assert np.array_equal(by_name.plan, solve_by_name(features=given, alpha=0.99, **options).plan)
    low = torchgw.solve_low_rank(D_X=table, D_Y=copy, features="wl", rank=4, random_state=0)
    again = torchgw.solve_low_rank(
        D_X=table, D_Y=copy, features=given, alpha=0.99, rank=4, random_state=0
    )
    assert low.value == again.value


def test_an_attribute_by_name_weighs_as_other_features():
    graph = networkx.connected_watts_strogatz_graph(30, 4, 0.3, seed=0)
    for node, data in graph.nodes(data=True):
        data["size"] = float(node)
    plain = torchgw.solve(graph, graph, features="size", random_state=0, n_init=1)
    half = torchgw.solve(graph, graph, features="size", alpha=0.5, random_state=0, n_init=1)
    assert np.array_equal(plain.plan, half.plan)
    low, again = (
        torchgw.solve_low_rank(graph, graph, features="size", rank=4, random_state=0, **options)
        for options in ({}, {"alpha": 0.5})
    )
    assert low.value == again.value


@pytest.fixture(scope="module")
def rewired():
    """A sparse network, its shuffled copy with a tenth of the edges elsewhere, and the match."""
    rng = np.random.default_rng(1)
    table = networkx.to_numpy_array(networkx.gnm_random_graph(120, 240, seed=1))
    noisy = table.copy()
    edges, free = (np.argwhere(np.triu(part, 1)) for part in (table, table == 0))
    for ends, value in ((edges, 0), (free, 1)):
        moved = ends[rng.choice(len(ends), 24, replace=False)]
        noisy[tuple(moved.T)] = noisy[tuple(moved.T[::-1])] = value
    order = rng.permutation(120)
    return table, noisy[np.ix_(order, order)], np.argsort(order)


def share_right(rewired, features):
    table, copy, match = rewired
    result = torchgw.solve(
        D_X=table, D_Y=copy, features=features, n_init=1, search="fast", random_state=0
    )
    return (np.asarray(result.lazy_plan.argmax()) == match).mean()


@pytest.mark.parametrize(
    "name", [name if name == "wl" else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_features_lead_a_single_start_to_a_better_match(name, rewired):
    # 20% of the nodes without features; 29 to 52% with them
    assert share_right(rewired, name) > share_right(rewired, None) + 0.05
