import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from torchgw import _errors
from torchgw.distances import DijkstraDistance, connect, geodesic_matrix, knn_graph


@pytest.fixture(scope="module")
def cloud():
    return knn_graph(np.random.default_rng(0).normal(size=(100, 3)), 8)


@pytest.fixture(scope="module")
def exact(cloud):
    return geodesic_matrix(cloud)


def ask(provider, vertices):
    return provider.columns(torch.tensor(vertices, device=provider.device))


def test_the_cache_counts_hits_and_misses(cloud, device):
    provider = DijkstraDistance(cloud, cache_size=10, device=device)
    ask(provider, [1, 2, 3, 2])
    assert provider.cache_info() == (0, 3, 3)
    ask(provider, [3, 4, 1])
    assert provider.cache_info() == (2, 4, 4)


def test_the_oldest_row_goes_first(cloud):
    provider = DijkstraDistance(cloud, cache_size=3)
    ask(provider, [1])
    ask(provider, [2])
    ask(provider, [3])
    # Used again, yet still the oldest: first in, first out.
    ask(provider, [1])
    ask(provider, [4])
    before = provider.cache_info()
    ask(provider, [2, 3, 4])
    assert provider.cache_info() == (before.hits + 3, before.misses, 3)
    ask(provider, [1])
    assert provider.cache_info().misses == before.misses + 1


@pytest.mark.parametrize("cache_size", [0, 1, 7, 30, 1000])
def test_any_sequence_of_requests_is_right_and_bounded(cache_size, cloud, exact, device):
    provider = DijkstraDistance(cloud, cache_size=cache_size, device=device)
    rng = np.random.default_rng(cache_size)
    for _ in range(30):
        index = torch.from_numpy(rng.integers(0, 100, rng.integers(1, 40)))
        block = provider.columns(index.to(device))
        assert torch.equal(block.cpu(), exact[index].T)
        assert provider.cache_info().size <= cache_size


def test_a_request_larger_than_the_cache_does_not_evict_its_own_rows(cloud, exact):
    provider = DijkstraDistance(cloud, cache_size=4)
    ask(provider, [50, 51, 52, 53])
    # Two rows are in the cache, and storing the other six would evict them.
    wanted = [50, 1, 2, 3, 53, 4, 5, 6]
    assert torch.equal(ask(provider, wanted), exact[wanted].T)
    assert provider.cache_info() == (2, 10, 4)


def test_the_cache_is_bounded_in_bytes_too(cloud):
    provider = DijkstraDistance(cloud, dtype=torch.float32, cache_bytes=5 * 100 * 4)
    ask(provider, list(range(20)))
    assert provider.cache_info().size == 5


def test_rows_once_computed_are_not_computed_again(cloud, monkeypatch):
    provider = DijkstraDistance(cloud)
    ask(provider, [1, 2])
    monkeypatch.setattr("scipy.sparse.csgraph.dijkstra", None)
    ask(provider, [2, 1, 1])
    with pytest.raises(TypeError):
        ask(provider, [3])


def test_threads_share_the_cache(cloud, exact):
    """No row is overwritten by one while another reads it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    provider = DijkstraDistance(cloud, cache_size=6)

    def right(seed):
        vertices = torch.randint(12, (4,), generator=torch.Generator().manual_seed(seed))
        return torch.equal(ask(provider, vertices.tolist()), exact[vertices].T)

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(right, range(600)))
    sys.setswitchinterval(before)
    assert all(answers)


def test_changing_a_result_does_not_change_the_cache(cloud, exact):
    provider = DijkstraDistance(cloud)
    ask(provider, [1, 2]).zero_()
    ask(provider, [1, 2]).zero_()
    assert torch.equal(ask(provider, [1, 2]), exact[[1, 2]].T)


def test_pickles_without_its_rows(cloud, exact):
    provider = DijkstraDistance(cloud, cache_size=100)
    empty = len(pickle.dumps(provider))
    ask(provider, list(range(100)))
    data = pickle.dumps(provider)
    assert len(data) < empty + 1000
    copied = pickle.loads(data)
    assert copied.cache_info() == (0, 0, 0)
    assert torch.equal(ask(copied, [3]), exact[[3]].T)


def test_maximum_is_exact_on_a_path_and_includes_the_fill(path_graph, two_paths):
    assert DijkstraDistance(path_graph).maximum() == 6
    with pytest.warns(_errors.GraphWarning):
        provider = DijkstraDistance(two_paths)
    assert provider.maximum() == 4.5
    assert provider.columns(torch.tensor([5])).flatten().tolist() == [4.5] * 5 + [0]


def test_processes_give_the_same_rows(cloud, exact, monkeypatch):
    monkeypatch.setattr("torchgw.distances.geodesics._PROCESS_PAIRS", 0)
    provider = DijkstraDistance(cloud, n_jobs=2)
    assert torch.equal(ask(provider, list(range(20))), exact[:20].T)


def test_takes_a_connected_graph_without_a_warning(two_paths):
    with pytest.warns(_errors.GraphWarning):
        geodesics = connect(two_paths, policy="fill")
    assert DijkstraDistance(geodesics).geodesics is geodesics


def test_refused_cache_sizes(cloud):
    with pytest.raises(_errors.InvalidInputError, match="negative; got -1"):
        DijkstraDistance(cloud, cache_size=-1)
