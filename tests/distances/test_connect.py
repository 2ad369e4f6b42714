import warnings

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from scipy.sparse.csgraph import connected_components, dijkstra, minimum_spanning_tree
from scipy.spatial.distance import cdist

from torchgw import _errors
from torchgw.datasets import spiral
from torchgw.distances import connect, geodesic_matrix, knn_graph, symmetrise
from torchgw.distances import graph as module
from torchgw.distances._graph import leaves
from torchgw.distances.geodesics import largest_path


@pytest.fixture(autouse=True, params=["table", "boxes", "boxes of five parts"])
def way(request, monkeypatch):
    """Every way to find the closest pairs, whatever the size."""
    monkeypatch.setattr(module, "_TABLE_POINTS", 2**30 if request.param == "table" else 0)
    if request.param == "boxes of five parts":
        monkeypatch.setattr(leaves, "_LEAF_POINTS", 5)
        monkeypatch.setattr(leaves, "_MANY_LEVELS", 3)


def clusters(count, d=2, seed=0):
    """Far clusters of different sizes."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(4, 9, count)
    centres = rng.normal(size=(count, d)) * 1000
    return np.concatenate(
        [c + rng.normal(size=(s, d)) for c, s in zip(centres, sizes, strict=True)]
    )


def quiet_connect(*args, **kwargs):
    with pytest.warns(_errors.GraphWarning):
        return connect(*args, **kwargs)


@pytest.mark.parametrize("d", [2, 30], ids=["tree", "tiles"])
@pytest.mark.parametrize("count", [2, 3, 17])
def test_stitching_adds_the_minimum_spanning_tree_of_components(count, d, device):
    points = clusters(count, d)
    graph = knn_graph(points, 3)
    n_components, labels = connected_components(graph)
    assert n_components == count
    joined = quiet_connect(graph, torch.tensor(points, device=device)).graph
    assert connected_components(joined)[0] == 1
    assert joined.nnz == graph.nnz + 2 * (count - 1)
    # By brute force: the closest pair of every two components, then the tree over them.
    distance = cdist(points, points)
    between = np.array(
        [[distance[labels == i][:, labels == j].min() for j in range(count)] for i in range(count)]
    )
    added = (joined - graph).sum() / 2
    assert added == pytest.approx(minimum_spanning_tree(between).sum(), rel=1e-9)
    assert (joined != joined.T).nnz == 0


@pytest.mark.parametrize("work", [2**28, 2**12], ids=["at once", "in parts"])
@pytest.mark.parametrize("kind", ["halves", "interleaved", "scales", "coincident", "one dimension"])
def test_bridges_are_a_minimum_spanning_tree(kind, work, device, monkeypatch):
    monkeypatch.setattr(module, "_WORK_BYTES", {"cpu": work, "cuda": work})
    monkeypatch.setattr(module, "_PAIRS", max(4, work >> 8))
    rng = np.random.default_rng(0)
    points = rng.normal(size=(400, 1 if kind == "one dimension" else 3))
    labels = np.arange(400) * 2 // 400
    if kind in ("interleaved", "one dimension"):
        # no box holds one component alone
        labels = rng.integers(0, 7, 400)
    elif kind == "scales":
        labels = np.arange(400) // 40
        points = points * 10.0 ** -labels[:, None] + labels[:, None] * 3
    elif kind == "coincident":
        labels = np.arange(400) // 8
        points = np.ones((400, 3))
    places = [torch.tensor(part, device=device) for part in (points, labels)]
    bridges = module.shortest_bridges(*places)
    source, target, length = (part.cpu().numpy() for part in bridges)
    count = labels.max() + 1
    assert len(length) == count - 1
    np.testing.assert_allclose(
        length, np.linalg.norm(points[source] - points[target], axis=1), rtol=1e-12
    )
    ends = labels[source], labels[target]
    assert connected_components(sp.coo_matrix((np.ones(count - 1), ends), (count, count)))[0] == 1
    distance = cdist(points, points)
    between = np.array(
        [[distance[labels == i][:, labels == j].min() for j in range(count)] for i in range(count)]
    )
    assert length.sum() == pytest.approx(minimum_spanning_tree(between).sum(), rel=1e-9)


@pytest.mark.parametrize("seed", [8, 10, 81, 86])
def test_edges_of_the_largest_component_are_chosen_by_the_others(seed):
    """Its own are not searched for: one met on the way may be longer than what the tree needs."""
    points = torch.from_numpy(spiral(400, seed)[0])
    labels = connected_components(knn_graph(points, 5), directed=False)[1]
    count = labels.max() + 1
    bridges = module.shortest_bridges(points, torch.from_numpy(labels).long())
    distance = cdist(points, points)
    between = np.array(
        [[distance[labels == i][:, labels == j].min() for j in range(count)] for i in range(count)]
    )
    assert float(bridges.length.sum()) == pytest.approx(minimum_spanning_tree(between).sum())


def test_stitching_a_grid_of_equal_gaps_closes_no_cycle():
    points = np.array([[x, y] for x in range(6) for y in range(6)], dtype=float) * 10
    joined = quiet_connect(sp.csr_matrix((36, 36)), points).graph
    assert joined.nnz == 2 * 35
    assert set(joined.data) == {10.0}


def test_stitching_coincident_components_and_keeping_zero_edges():
    # Five copies of one point and five of another, in separate cliques of four neighbours, and a
    # third clique on top of the first that shares no edge with it.
    points = np.repeat([[0.0], [2.0], [0.0]], 5, axis=0)
    blocks = sp.block_diag([sp.csr_matrix(np.ones((5, 5)))] * 3).tocsr()
    blocks.data[:] = 0.0
    joined = quiet_connect(blocks, points).graph
    assert connected_components(joined)[0] == 1
    matrix = dijkstra(joined)
    assert (matrix == cdist(points, points)).all()


def test_stitched_edges_are_measured_in_the_metric():
    points = np.array([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
    graph = knn_graph(points, 1, metric="cosine")
    joined = quiet_connect(graph, points, metric="cosine").graph
    assert joined[1, 3] == pytest.approx(cdist(points, points, "cosine")[1, 3])


def test_filling_gives_unreachable_pairs_a_multiple_of_the_longest_path(two_paths):
    filled = quiet_connect(two_paths, policy="fill", fill=2.0)
    assert filled.unreachable == 6.0
    matrix = geodesic_matrix(filled)
    assert matrix[0].tolist() == [0, 1, 3, 6, 6, 6]
    assert matrix[5].tolist() == [6, 6, 6, 6, 6, 0]
    assert (matrix == matrix.T).all()


def test_the_warning_says_what_was_done(two_paths):
    with pytest.warns(
        _errors.GraphWarning,
        match=r"3 components \(of 3, 2, 1 vertices, the first of each \d, \d, \d\).*4.5, 1.5",
    ):
        connect(two_paths, policy="fill")
    with pytest.warns(_errors.GraphWarning, match="no points to join them by: pairs.*4.5"):
        connect(two_paths)
    points = np.array([[0.0], [1.0], [3.0], [10.0], [11.0], [15.0]])
    with pytest.warns(_errors.GraphWarning, match="by the 2 shortest edges.*the longest of.*7"):
        connect(two_paths, points)
    with pytest.warns(_errors.GraphWarning, match="1, 1, 1, 1, 1, ... vertices"):
        connect(sp.csr_matrix((8, 8)))


def test_a_graph_without_edges_gets_distance_one_and_a_half():
    matrix = geodesic_matrix(quiet_connect(sp.csr_matrix((3, 3))))
    assert matrix.tolist() == [[0, 1.5, 1.5], [1.5, 0, 1.5], [1.5, 1.5, 0]]


def test_a_connected_graph_is_left_alone_silently(path_graph):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        connected = connect(path_graph)
        assert connected.unreachable is None
        assert (connected.graph != path_graph).nnz == 0
        assert connect(sp.csr_matrix((1, 1))).n == 1


def test_refused_options(two_paths):
    with pytest.raises(_errors.InvalidInputError, match="'stitch' or 'fill'; got 'drop'"):
        connect(two_paths, policy="drop")
    with pytest.raises(_errors.InvalidInputError, match="at least 1.*got 0.5"):
        connect(two_paths, policy="fill", fill=0.5)
    with pytest.raises(_errors.InvalidInputError, match="each of the 6 vertices; got 5 rows"):
        connect(two_paths, np.zeros((5, 2)))


def test_longest_path_is_exact_on_trees_and_a_bound_elsewhere():
    rng = np.random.default_rng(0)
    for _ in range(10):
        dense = np.triu(rng.uniform(1, 2, size=(60, 60)), 1)
        tree = symmetrise(minimum_spanning_tree(dense))
        both = sp.block_diag([tree, tree * 0.5]).tocsr()
        exact = dijkstra(tree).max()
        assert largest_path(both, sweeps=1) == pytest.approx(exact, rel=1e-12)
        graph = knn_graph(rng.normal(size=(200, 2)), 8)
        lengths = dijkstra(graph)
        exact = lengths[np.isfinite(lengths)].max()
        # Half is guaranteed; four sweeps of a plane cloud come within a few percent.
        assert 0.9 * exact <= largest_path(graph) <= exact
