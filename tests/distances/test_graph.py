import warnings

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from scipy.spatial.distance import cdist

from torchgw import _errors
from torchgw.distances import (
    default_n_neighbors,
    geodesic_matrix,
    knn_graph,
    symmetrise,
    validate_graph,
)
from torchgw.distances import graph as graph_module
from torchgw.distances._graph import neighbours


def brute_force_graph(points, n_neighbors, metric="euclidean"):
    """The dense definition: i and j are joined when either is among the other's nearest."""
    distance = cdist(points, points, metric)
    far = distance + np.diag(np.full(len(points), np.inf))
    near = np.argsort(far, axis=1, kind="stable")[:, :n_neighbors]
    directed = np.zeros(distance.shape, dtype=bool)
    np.put_along_axis(directed, near, True, axis=1)
    return np.where(directed | directed.T, distance, 0)


@pytest.mark.parametrize("d", [2, 30], ids=["tree", "tiles"])
@pytest.mark.parametrize("metric", ["euclidean", "cosine", "correlation"])
def test_knn_graph_equals_brute_force(metric, d, device, monkeypatch):
    # Correlation of two coordinates is only 1 or -1: ties.
    d = 3 if (metric, d) == ("correlation", 2) else d
    monkeypatch.setattr(neighbours, "_WORK_BYTES", (0, 4 * 8 * 90 * 40))
    points = np.random.default_rng(0).normal(size=(90, d)) + 0.3
    graph = knn_graph(torch.tensor(points, device=device), 4, metric=metric)
    np.testing.assert_allclose(graph.toarray(), brute_force_graph(points, 4, metric), atol=1e-12)


def test_a_directed_neighbour_relation_becomes_symmetric():
    # The outlier's neighbour has nearer ones of its own: only one direction is found.
    graph = knn_graph(np.array([[0.0], [1.0], [2.1], [10.0]]), 1)
    assert (graph != graph.T).nnz == 0
    assert graph[2, 3] == graph[3, 2] == pytest.approx(7.9)
    assert graph.dtype == np.float64


def test_duplicates_stay_connected_at_distance_zero():
    points = np.array([[0.0], [0.0], [0.0], [1.0], [2.0]])
    graph = knn_graph(points, 3)
    geodesics = geodesic_matrix(graph)
    assert geodesics[:3, :3].tolist() == np.zeros((3, 3)).tolist()
    assert geodesics[0].tolist() == [0, 0, 0, 1, 2]


def test_default_number_of_neighbours():
    sizes = [1, 2, 3, 100, 400, 10_000, 10**6, 10**9]
    assert [default_n_neighbors(n) for n in sizes] == [0, 1, 2, 5, 6, 10, 14, 15]


def test_one_and_two_points():
    assert knn_graph(np.zeros((1, 2))).nnz == 0
    assert knn_graph(np.array([[0.0], [3.0]])).toarray().tolist() == [[0, 3], [3, 0]]


@pytest.mark.parametrize("count", [0, -1, 5, 6])
def test_refused_number_of_neighbours(count):
    with pytest.raises(_errors.InvalidInputError, match=rf"between 1 and 4, .*got {count}"):
        knn_graph(np.arange(5.0)[:, None], count)


@pytest.mark.parametrize(
    ("points", "metric", "message"),
    [
        (np.zeros(4), "euclidean", r"shape \(n, d\).*\(4,\)"),
        (np.full((3, 2), np.nan), "euclidean", "finite"),
        (np.array([[0.0, 1], [0, 0], [1, 0]]), "cosine", "zero vector.*row 1"),
        (np.array([[0.0, 1, 2], [0.1, 0.1, 0.1]]), "correlation", "constant row.*row 1"),
        (np.eye(3), "hamming", "must be one of.*'hamming'"),
    ],
)
def test_refused_points(points, metric, message):
    with pytest.raises(_errors.InvalidInputError, match=message):
        knn_graph(points, 1, metric=metric)


def test_read_only_integer_and_half_precision_points_are_taken():
    points = np.arange(12).reshape(6, 2)
    points.flags.writeable = False
    expected = knn_graph(points.astype(float), 2).toarray()
    assert (knn_graph(points, 2).toarray() == expected).all()
    assert (knn_graph(torch.tensor(points, dtype=torch.float16), 2).toarray() == expected).all()


@pytest.mark.parametrize(
    "kind",
    [sp.csr_matrix, sp.csc_matrix, sp.coo_matrix, sp.lil_matrix, sp.csr_array, sp.coo_array],
)
def test_every_sparse_kind_becomes_csr(kind, path_graph):
    checked = validate_graph(kind(path_graph))
    assert isinstance(checked, sp.csr_matrix)
    assert checked.dtype == np.float64
    assert (checked.toarray() == path_graph.toarray()).all()


def test_integer_weights_and_the_input_are_kept(path_graph):
    whole = path_graph.astype(np.int32)
    assert geodesic_matrix(whole)[0].tolist() == [0, 1, 3, 6]
    assert whole.dtype == np.int32
    checked = validate_graph(path_graph)
    checked.data[:] = 7
    assert path_graph[0, 1] == 1


def test_a_boolean_graph_counts_hops(path_graph):
    unweighted = path_graph.astype(bool)
    # An explicit False is not an edge.
    unweighted.data[unweighted.indices == 3] = False
    unweighted[3, 2] = False
    with pytest.warns(_errors.GraphWarning, match="2 components"):
        matrix = geodesic_matrix(unweighted)
    assert matrix[0].tolist() == [0, 1, 2, 3]  # 3 is 1.5 times the longest path, 2


@pytest.mark.parametrize("unit", [1.0, 1e-12])
def test_different_lengths_back_and_forth_are_refused_in_any_unit(unit):
    with pytest.raises(_errors.InvalidInputError, match="directed"):
        validate_graph(sp.csr_matrix(np.array([[0.0, 1], [3, 0]]) * unit))
    rounded = validate_graph(sp.csr_matrix(np.array([[0.0, 1], [1 + 2e-6, 0]]) * unit))
    assert rounded[0, 1] == rounded[1, 0] == pytest.approx((1 + 1e-6) * unit, rel=1e-12)


def test_a_directed_graph_is_refused_with_the_remedy():
    directed = sp.csr_matrix(np.array([[0.0, 1, 0], [0, 0, 2], [0, 0, 0]]))
    with pytest.raises(_errors.InvalidInputError, match=r"graph\.maximum\(graph\.T\)"):
        validate_graph(directed)
    assert symmetrise(directed).toarray().tolist() == [[0, 1, 0], [1, 0, 2], [0, 2, 0]]


def test_two_different_weights_of_an_edge_are_refused(path_graph):
    path_graph[0, 1] = 1.1
    with pytest.raises(_errors.InvalidInputError, match="symmetric"):
        validate_graph(path_graph)


def test_rounding_differences_are_averaged(path_graph):
    path_graph[0, 1] = 1 + 1e-8
    checked = validate_graph(path_graph)
    assert checked[0, 1] == checked[1, 0] == pytest.approx(1 + 5e-9, abs=1e-12)


@pytest.mark.parametrize("weight", [-1.0, np.nan, np.inf])
def test_refused_weights(weight, path_graph):
    path_graph[0, 1] = path_graph[1, 0] = weight
    with pytest.raises(_errors.InvalidInputError, match="finite, non-negative.*got 2 others"):
        validate_graph(path_graph)


def test_refused_shapes_and_kinds():
    with pytest.raises(_errors.InvalidInputError, match=r"square.*\(2, 3\)"):
        validate_graph(sp.csr_matrix((2, 3)))
    with pytest.raises(_errors.InvalidInputError, match="without nodes"):
        validate_graph(sp.csr_array((0, 0)))
    with pytest.raises(_errors.InvalidInputError, match="real weights; got dtype complex128"):
        validate_graph(sp.eye_array(2, dtype=complex).tocsr())
    with pytest.raises(_errors.InvalidTypeError, match="SciPy sparse.*got ndarray"):
        validate_graph(np.eye(2))


def test_symmetrise_keeps_explicit_zeros_and_the_larger_weight():
    graph = sp.csr_matrix((np.array([0.0, 2.0, 3.0]), ([0, 1, 2], [1, 2, 1])), shape=(3, 3))
    both = symmetrise(graph)
    assert both.nnz == 4
    assert both.toarray().tolist() == [[0, 0, 0], [0, 0, 3], [0, 3, 0]]
    assert graph.data.tolist() == [0, 2, 3]


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 3])
def test_a_graph_put_together_on_the_host_is_the_same(count, monkeypatch):
    points = torch.rand(300, 3, device="cuda")
    points[:, 0] += torch.arange(300, device="cuda") % count * 10
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", _errors.GraphWarning)
        here = graph_module.neighbour_geodesics(points, 8)
        monkeypatch.setattr(graph_module, "_HOST_VERTICES", 0)
        there = graph_module.neighbour_geodesics(points, 8)
    assert here.edges.start.device.type == "cpu"
    assert there.edges.start.device.type == "cuda"
    for one, other in zip(here.edges, there.edges.to("cpu"), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-15, atol=0)
    device = torch.device("cuda")
    torch.testing.assert_close(here.all_pairs(device), there.all_pairs(device))


def test_a_thousand_points_look_alike_on_any_device(device):
    """Their neighbours are found on a GPU, if there is one, and the rest on the CPU."""
    points = torch.from_numpy(np.random.default_rng(0).normal(size=(1_000, 3)))
    shape, expected = (
        graph_module.neighbourhood(points, where) for where in (device, torch.device("cpu"))
    )
    assert shape.dimension == pytest.approx(expected.dimension, rel=1e-9)
    assert shape.connected == expected.connected
    for part, other in zip(shape.edges, expected.edges, strict=True):
        assert part.device.type == "cpu"
        np.testing.assert_allclose(part.numpy(), other.numpy(), rtol=1e-12)
