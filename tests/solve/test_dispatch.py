"""Stored or streamed: what the model says, what fits, what the user asked for."""

from __future__ import annotations

import pytest
import torch

from torchgw._solve.cost_model import problem_seconds, store_cost
from torchgw._solve.precision import Dtypes, choose_precision
from torchgw._tensors import memory

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture(autouse=True)
def free(monkeypatch):
    """Bytes that a device has left; a test may change it."""
    left = {"bytes": 10**12}
    monkeypatch.setattr(memory, "free_memory", lambda device: left["bytes"])
    return left


def store(name, device, n, m, rank=30):
    _, dtypes = choose_precision("auto", device, n * m, unresolved=False)
    return store_cost(name, device, dtypes, (n, m), rank)


def test_what_the_user_asks_for():
    assert store("stored", CUDA, 10**5, 10**5)
    assert not store("streamed", CUDA, 10, 10)


# what was the fastest on an H200, see OPTIMIZATION_LOG.md
@pytest.mark.parametrize(
    ("n", "m", "stored"),
    [
        (1000, 1200, True),
        (2000, 2500, True),
        (4000, 5000, True),
        (8000, 10_000, True),
        (12_000, 14_000, True),
        (15_000, 18_000, False),
        (20_000, 25_000, False),
    ],
)
@pytest.mark.parametrize("rank", [9, 30])
def test_the_measured_best(n, m, rank, stored):
    assert store("auto", CUDA, n, m, rank) is stored


# CPU seconds on a curve / on a cloud, see OPTIMIZATION_LOG.md: 0.6 for 0.8 and 10 for 2 at 1,200
@pytest.mark.parametrize(("n", "stored"), [(1200, True), (1700, False), (4500, False)])
@pytest.mark.parametrize("rank", [50, 90])
def test_small_problems_do_without_tiles(n, rank, stored):
    dtypes = choose_precision("auto", CPU, n * n, unresolved=False)[1]
    assert store_cost("auto", CPU, dtypes, (n, n), rank, tiled=True) is stored


def test_a_matrix_that_does_not_fit_is_streamed(free):
    assert store("auto", CUDA, 5000, 5000)
    # cost, kernel and one in the making, in float64
    free["bytes"] = 3 * 8 * 5000 * 5000 - 1
    assert not store("auto", CUDA, 5000, 5000)
    # the dense gradient has no factors to stream
    assert store("auto", CUDA, 5000, 5000, rank=0)


def test_memory_does_not_grow_without_bound():
    # however large the rank, and so the time that storing would save
    assert not store("auto", CUDA, 30_000, 30_000, rank=10_000)
    assert not store("auto", CPU, 9000, 9000, rank=10_000)
    assert store("auto", CPU, 5000, 5000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_time_grows_with_size_and_rank(device, dtype):
    small, large = (problem_seconds(device, dtype, (n, n), 30) for n in (5000, 8000))
    wider = problem_seconds(device, dtype, (8000, 8000), 300)
    assert small[0] < large[0] == wider[0]
    assert small[1] <= large[1] < wider[1]


def test_both_dtypes_of_a_solve_count():
    loop = Dtypes(torch.float32, torch.float64, again=False)
    shape = (12_000, 14_000)
    assert not store_cost("auto", CUDA, loop, shape, 9)
    assert store_cost("auto", CUDA, loop._replace(again=True), shape, 9)
