"""Relaxation finds the lengths that Dijkstra finds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix, random_array
from scipy.sparse.csgraph import dijkstra

from torchgw.distances import relaxation as module
from torchgw.distances.relaxation import Relaxation

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def random_graph(n, density, seed=0):
    half = random_array((n, n), density=density, rng=np.random.default_rng(seed))
    graph = csr_matrix(half.maximum(half.T))
    graph.setdiag(0)
    graph.eliminate_zeros()
    return graph


def path_graph(n):
    edges = np.arange(n - 1)
    lengths = np.random.default_rng(1).uniform(0.1, 1, size=n - 1)
    half = csr_matrix((lengths, (edges, edges + 1)), shape=(n, n))
    return csr_matrix(half + half.T)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("most_neighbours", [32, 2])
@pytest.mark.parametrize(
    "graph",
    [random_graph(120, 0.03), random_graph(60, 0.4), path_graph(150), csr_matrix((1, 1))],
    ids=["in pieces", "dense", "path", "one vertex"],
)
def test_equals_dijkstra(graph, most_neighbours, device, monkeypatch):
    monkeypatch.setattr(module, "_MOST_NEIGHBOURS", most_neighbours)
    # several parts
    monkeypatch.setattr(module, "_CANDIDATE_BYTES", 8 * 120 * 2 * 7)
    n = graph.shape[0]
    sources = torch.arange(0, n, 3, device=device)
    got = Relaxation(graph, torch.device(device)).columns(sources).cpu().numpy()
    expected = dijkstra(graph, directed=True, indices=sources.cpu().numpy()).T
    # the same sums in another order
    np.testing.assert_allclose(got, expected, rtol=1e-13)


@pytest.mark.parametrize("device", DEVICES)
def test_an_explicit_zero_is_an_edge(device):
    graph = csr_matrix(([0.0, 0.0, 2.0, 2.0], ([0, 1, 1, 2], [1, 0, 2, 1])), shape=(3, 3))
    got = Relaxation(graph, torch.device(device)).columns(torch.tensor([0], device=device))
    assert got[:, 0].tolist() == [0.0, 0.0, 2.0]


@pytest.mark.parametrize("sources", [1, 5, 40])
def test_the_kernel_equals_dijkstra(sources, device):
    """The Triton pass, by the interpreter on a CPU."""
    from torchgw.distances._triton_relaxation import relax_

    graph = csr_matrix(path_graph(50) + random_graph(50, 0.05))
    layout = Relaxation(graph, device)
    distance = torch.full((50, sources), torch.inf, dtype=torch.float64, device=device)
    distance[torch.arange(sources), torch.arange(sources)] = 0
    changed = torch.ones(1, dtype=torch.int32, device=device)
    passes = 0
    while int(changed):
        changed.zero_()
        relax_(distance, layout._neighbour, layout._length, changed)
        passes += 1
    expected = dijkstra(graph, directed=True, indices=np.arange(sources)).T
    np.testing.assert_allclose(distance.cpu().numpy(), expected, rtol=1e-13)
    assert passes > 1


@pytest.mark.parametrize(
    "graph",
    # the second in pieces: what cannot be reached stays infinite; the last in two blocks
    [path_graph(40), random_graph(50, 0.03), csr_matrix((1, 1)), random_graph(1100, 0.005)],
    ids=["path", "in pieces", "one vertex", "wide"],
)
def test_the_row_kernel_equals_dijkstra(graph, device):
    """All passes in one launch, by the interpreter on a CPU."""
    from torchgw.distances._triton_relaxation import relax_rows_

    n = graph.shape[0]
    sources = np.arange(0, n, 1 + n // 2)
    layout = Relaxation(graph, device)
    distance = torch.full((len(sources), n), torch.inf, dtype=torch.float64, device=device)
    distance[torch.arange(len(sources)), torch.from_numpy(sources)] = 0
    relax_rows_(distance, layout._neighbour, layout._length)
    expected = dijkstra(graph, directed=True, indices=sources)
    np.testing.assert_allclose(distance.cpu().numpy(), expected, rtol=1e-13)


@pytest.mark.gpu
def test_both_ways_of_relaxing_agree(monkeypatch):
    graph = csr_matrix(path_graph(700) + random_graph(700, 0.01))
    device = torch.device("cuda")
    sources = torch.arange(0, 700, 3, device=device)
    rows = Relaxation(graph, device).columns(sources)
    monkeypatch.setattr(module, "_ROW_SOURCES", 10_000)
    passes = Relaxation(graph, device).columns(sources)
    torch.testing.assert_close(rows, passes, rtol=1e-13, atol=0)
