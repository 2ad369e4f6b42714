import os
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from scipy.sparse.csgraph import dijkstra

from torchgw import _errors
from torchgw.distances import (
    FactoredDistance,
    PointDistance,
    PrecomputedDistance,
    connect,
    geodesic_matrices,
    geodesic_matrix,
    geodesics,
    knn_graph,
    precomputed,
)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (torch.ones(2, 3), r"shape \(n, n\).*got \(2, 3\)"),
        (torch.ones(0, 0), "n >= 1"),
        (torch.ones(2, 2, dtype=torch.int64), r"int64.*matrix\.float\(\)"),
        (torch.tensor([[0.0, torch.inf], [torch.inf, 0.0]]), "must be finite.*unreachable"),
        (torch.tensor([[0.0, torch.nan], [torch.nan, 0.0]]), "must be finite"),
        (torch.tensor([[0.0, 1.0], [2.0, 0.0]]), "symmetric.*by up to 1"),
    ],
)
def test_refused_matrices(matrix, message):
    with pytest.raises(_errors.InvalidInputError, match=message):
        PrecomputedDistance(matrix)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (PrecomputedDistance, "matrix"),
        (PointDistance, "points"),
        (lambda array: FactoredDistance(array, torch.ones(2)), "matrix"),
        (lambda array: FactoredDistance(torch.ones(2, 2), array[0]), "signs"),
    ],
)
def test_an_array_is_refused_by_name(make, name):
    with pytest.raises(_errors.InvalidTypeError, match=rf"`{name}` .*torch.as_tensor\({name}\)"):
        make(np.zeros((2, 2)))


@pytest.mark.parametrize(
    ("matrix", "signs", "message"),
    [
        (torch.ones(3), torch.ones(3), r"shape \(n, r\)"),
        (torch.ones(3, 2), torch.ones(3), r"got \(3, 2\) and \(3,\)"),
        (torch.ones(3, 2), torch.ones(2, dtype=torch.float64), "float32 and torch.float64"),
        (torch.ones(3, 2).long(), torch.ones(2).long(), "`matrix` must be float32 or float64"),
        (torch.full((3, 2), torch.nan), torch.ones(2), "finite"),
        (torch.ones(3, 2), torch.tensor([1.0, torch.inf]), "finite"),
    ],
)
def test_refused_factors(matrix, signs, message):
    with pytest.raises(_errors.InvalidInputError, match=message):
        FactoredDistance(matrix, signs)


def test_asymmetry_in_a_later_block_is_found(monkeypatch):
    monkeypatch.setattr(precomputed, "BLOCK_BYTES", 3 * 10 * 4)
    matrix = torch.ones(10, 10)
    assert torch.equal(PrecomputedDistance(matrix).mean_square(torch.ones(10)), 10 * torch.ones(10))
    matrix[9, 8] = 2
    with pytest.raises(_errors.InvalidInputError, match="symmetric"):
        PrecomputedDistance(matrix)


def test_the_matrix_is_not_copied():
    matrix = torch.zeros(3, 3)
    assert PrecomputedDistance(matrix).matrix() is matrix


def test_geodesics_of_a_path(path_graph):
    expected = [[0.0, 1, 3, 6], [1, 0, 2, 5], [3, 2, 0, 3], [6, 5, 3, 0]]
    assert geodesic_matrix(path_graph).tolist() == expected


def test_geodesics_in_processes_are_those_in_this_one(monkeypatch, two_paths):
    monkeypatch.setattr(geodesics, "_PROCESS_PAIRS", 0)
    # A few rows at a time, so that results arrive in several parts.
    monkeypatch.setattr(geodesics, "BLOCK_BYTES", 8 * 300 * 70)
    cloud = knn_graph(np.random.default_rng(0).normal(size=(300, 3)))
    with pytest.warns(_errors.GraphWarning):
        parts = connect(two_paths)
    parallel = geodesic_matrices([cloud, parts], n_jobs=2)
    serial = geodesic_matrices([cloud, parts], n_jobs=1)
    np.testing.assert_array_equal(parallel[0], dijkstra(cloud, directed=False))
    for one, other in zip(parallel, serial, strict=True):
        assert torch.equal(one, other)
        assert bool(one.isfinite().all())


@pytest.mark.parametrize(
    ("n", "n_jobs", "worth"), [(1900, 16, 1), (2100, 16, 16), (2100, 2, 1), (5000, 2, 2)]
)
def test_processes_are_started_when_they_repay_it(n, n_jobs, worth):
    tasks = [(geodesics.Geodesics(sp.csr_matrix((n, n))), np.arange(n))] * 2
    assert geodesics._worth_jobs(tasks, n_jobs) == worth


def test_small_graphs_start_no_processes(path_graph, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("joblib was called")

    monkeypatch.setattr("joblib.Parallel", refuse)
    geodesic_matrices([path_graph, path_graph], n_jobs=4)
    monkeypatch.setattr(geodesics, "_PROCESS_PAIRS", 0)
    with pytest.raises(AssertionError, match="joblib was called"):
        geodesic_matrices([path_graph, path_graph], n_jobs=4)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no files in memory here")
@pytest.mark.parametrize(("free", "folder"), [(8 * 5 * 5, None), (8 * 5 * 5 + 1, "/dev/shm")])
def test_files_in_memory_are_made_where_they_fit(monkeypatch, free, folder):
    """A process that writes beyond the end of a container's 64 MB of them is killed."""
    used, plain = [], geodesics.TemporaryDirectory
    monkeypatch.setattr(
        geodesics, "TemporaryDirectory", lambda dir, **more: used.append(dir) or plain(**more)
    )
    monkeypatch.setattr(geodesics.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    graph = knn_graph(torch.arange(5.0, dtype=torch.float64)[:, None], 1)
    assert geodesic_matrix(graph).max() == 4
    assert used == [folder]
