"""Relaxation and closing by blocks find the lengths that Dijkstra finds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from problems import quick, skip_unless_kernels_run
from scipy.sparse import csr_matrix, random_array
from scipy.sparse.csgraph import connected_components, dijkstra

from torchgw.distances import geodesics as module
from torchgw.distances._graph import edges as graph_edges
from torchgw.distances._graph.edges import components, from_csr, symmetric_edges
from torchgw.distances.geodesics import EdgeRelaxation


def random_graph(n, density, seed=0):
    half = random_array((n, n), density=density, rng=np.random.default_rng(seed))
    graph = csr_matrix(half.maximum(half.T))
    graph.setdiag(0)
    graph.eliminate_zeros()
    graph.sort_indices()
    return graph


def path_graph(n):
    edges = np.arange(n - 1)
    lengths = np.random.default_rng(1).uniform(0.1, 1, size=n - 1)
    half = csr_matrix((lengths, (edges, edges + 1)), shape=(n, n))
    graph = csr_matrix(half + half.T)
    graph.sort_indices()
    return graph


def star_graph(n):
    """One vertex joined to all others, some of these to each other by shorter or longer ways."""
    hub = csr_matrix((np.arange(1.0, n), (np.zeros(n - 1, int), np.arange(1, n))), shape=(n, n))
    graph = csr_matrix(hub + hub.T).maximum(random_graph(n, 0.05) * 20)
    graph.sort_indices()
    return csr_matrix(graph)


GRAPHS = {
    "in pieces": random_graph(30, 0.06), "dense": random_graph(16, 0.5), "path": path_graph(20),
    "hub": star_graph(40), "one vertex": csr_matrix((1, 1)),
}  # fmt: skip


def small_tiles(monkeypatch):
    """Have small graphs span several tiles, and visit these in rounds."""
    from torchgw.distances._paths import relaxation_triton

    monkeypatch.setattr(relaxation_triton, "ROWS", 16)
    monkeypatch.setattr(relaxation_triton, "_PROGRAMS", 3)
    # the interpreter takes its time over rounds in which nothing happens
    monkeypatch.setattr(module, "_ROUNDS", 2)
    monkeypatch.setattr(module, "_ONE_LAUNCH_ROWS", 0)


@pytest.mark.parametrize(
    ("implementation", "most_edges"),
    [
        ("tiles", 3),
        ("tiles", 5),
        pytest.param("one launch", 32, marks=pytest.mark.slow),
        ("one launch", 4),
    ],
)
@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_equals_dijkstra(graph, most_edges, implementation, device, monkeypatch):
    skip_unless_kernels_run(device)
    small_tiles(monkeypatch)
    monkeypatch.setattr(module, "_MOST_EDGES", most_edges)
    if implementation == "one launch":
        monkeypatch.setattr(module, "_ONE_LAUNCH_ROWS", 10**6)
    # several parts
    monkeypatch.setattr(module, "_TABLE_BYTES", 8 * graph.shape[0] * 5)
    monkeypatch.setattr(module, "_LEAST_SOURCES", 1)
    n = graph.shape[0]
    sources = torch.arange(0, n, 8, device=device)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0)).to(device)
    # tiles may be filled up, here each with two vertices that are none
    order = torch.cat([torch.nn.functional.pad(tile, (0, 2), value=-1) for tile in order.split(14)])
    layout = EdgeRelaxation(from_csr(graph).to(device), order)
    got = layout.columns(sources)
    expected = dijkstra(graph, directed=True, indices=sources.cpu().numpy()).T
    # the same sums in another order
    np.testing.assert_allclose(got.cpu().numpy(), expected, rtol=1e-13)
    # what a request leaves behind does not disturb the next one
    assert torch.equal(layout.columns(sources[-2:]), got[:, -2:])


@pytest.mark.parametrize("implementation", ["tiles", "one launch"])
def test_lengths_in_float32_are_those_up_to_its_rounding(implementation, device, monkeypatch):
    skip_unless_kernels_run(device)
    if implementation != "one launch":
        small_tiles(monkeypatch)
    graph, sources = GRAPHS["dense"], torch.arange(3, device=device)
    layout = EdgeRelaxation(from_csr(graph).to(device), dtype=torch.float32)
    got = layout.columns(sources)
    assert got.dtype == torch.float32
    expected = dijkstra(graph, directed=True, indices=sources.cpu().numpy()).T
    # paths of at most 16 edges
    np.testing.assert_allclose(got.cpu().numpy(), expected, rtol=16 * 2**-24)


@pytest.mark.parametrize("seed", quick(1, range(4)))
def test_graphs_are_united_and_laid_out_the_same_by_parts(seed, monkeypatch):
    draw = torch.Generator().manual_seed(seed)
    n, k = int(torch.randint(20, 120, (), generator=draw)), 5
    # hubs in twelve dimensions have several rows
    points = torch.randn(n, 12, generator=draw, dtype=torch.float64)
    apart = torch.cdist(points, points).fill_diagonal_(torch.inf)
    near = torch.maximum(apart, apart.T).topk(k, largest=False)
    directed = torch.arange(n).repeat_interleave(k), near.indices.flatten(), near.values.flatten()
    order = torch.randperm(n, generator=draw)
    order = torch.cat([order[:7], torch.full((3,), -1), order[7:]])
    whole = symmetric_edges(n, *directed)
    laid_out = module._laid_out(whole, order, torch.float64)
    monkeypatch.setattr(graph_edges, "VERTICES", 17)
    monkeypatch.setattr(module, "VERTICES", 13)
    parts = symmetric_edges(n, *directed)
    assert all(map(torch.equal, parts, whole))
    assert all(map(torch.equal, module._laid_out(parts, order, torch.float64), laid_out))


@pytest.mark.parametrize("step", [0.0, 0.1, 1e9])
def test_any_order_of_the_work_gives_the_same_lengths(step, device, monkeypatch):
    skip_unless_kernels_run(device)
    small_tiles(monkeypatch)
    monkeypatch.setattr(module, "_IDLE_STEP", step)
    graph = path_graph(30)
    # one edge far longer than the others must not take a round for each mean length
    graph.data[graph.data == graph[20, 21]] = 1e7
    got = EdgeRelaxation(from_csr(graph).to(device)).columns(torch.tensor([0, 29], device=device))
    expected = dijkstra(graph, directed=True, indices=[0, 29]).T
    np.testing.assert_allclose(got.cpu().numpy(), expected, rtol=1e-13)


@pytest.mark.parametrize("implementation", ["tiles", "one launch"])
def test_an_explicit_zero_is_an_edge(implementation, device, monkeypatch):
    skip_unless_kernels_run(device)
    if implementation != "one launch":
        small_tiles(monkeypatch)
    graph = csr_matrix(([0.0, 0.0, 2.0, 2.0], ([0, 1, 1, 2], [1, 0, 2, 1])), shape=(3, 3))
    # laid out here, and used there
    where = torch.device(device)
    layout = EdgeRelaxation(from_csr(graph), device=where)
    assert layout.columns(torch.tensor([0], device=device))[:, 0].tolist() == [0.0, 0.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("graph", [GRAPHS["in pieces"], path_graph(140)], ids=["pieces", "path"])
def test_closing_by_blocks_equals_dijkstra(graph, dtype, device):
    skip_unless_kernels_run(device)
    from torchgw.distances._paths.min_plus_triton import close_

    edges = from_csr(graph).to(device)
    table = torch.full(graph.shape, torch.inf, dtype=dtype, device=device)
    table[edges.source, edges.vertex] = edges.length.to(dtype)
    got = close_(table.fill_diagonal_(0)).cpu()
    # sums of up to 140 lengths
    rtol = 140 * torch.finfo(dtype).eps
    np.testing.assert_allclose(got.numpy(), dijkstra(graph, directed=True), rtol=rtol)
    assert torch.equal(got, got.T)


def test_edges_come_and_go_from_scipy():
    graph = random_graph(60, 0.05)
    graph.data[:2] = 0
    back = from_csr(graph).csr()
    for part in ("indptr", "indices", "data"):
        np.testing.assert_array_equal(getattr(back, part), getattr(graph, part))


def test_directed_edges_become_symmetric(device):
    source = torch.tensor([0, 1, 2, 2], device=device)
    target = torch.tensor([1, 0, 1, 3], device=device)
    length = torch.tensor([1.0, 1.0, 0.0, 5.0], dtype=torch.float64, device=device)
    edges = symmetric_edges(5, source, target, length)
    assert edges.source.tolist() == [0, 1, 1, 2, 2, 3]
    assert edges.vertex.tolist() == [1, 0, 2, 1, 3, 2]
    assert edges.length.tolist() == [1, 1, 0, 0, 5, 5]
    assert edges.degree.tolist() == [1, 2, 2, 1, 0]


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_components_equal_scipys(graph, device):
    count, labels = connected_components(graph, directed=False)
    found, got = components(from_csr(graph).to(device))
    assert found == count
    # the same partition, whatever the names
    assert len({*zip(labels.tolist(), got.tolist(), strict=True)}) == count
