"""Which path a problem takes: what the model says, what fits, what the user asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import torchgw
from torchgw._problem.limits import LIMITS
from torchgw._problem.problem import Facts
from torchgw._solve.forecast import problem_seconds
from torchgw._solve.route import (
    MOVES,
    choose_dtypes,
    choose_gradient,
    choose_precision,
    make_route,
    store_cost,
)
from torchgw._solve.state import Dtypes, Options

CUDA, CPU = "cuda", "cpu"


def facts(n, m, device=CUDA, rank=30, free=10**12, **others):
    given = {
        "loss": "square", "square": True, "products": True, "factors": (rank, rank),
        "directed": (False, False), "cheap": True, "linear": None, "alpha": 1.0, "rule": "strict",
        "assignment": n == m, "clouds": True, "spread": 1.0, "epsilon": 0.01,
    }  # fmt: skip
    return Facts(n=n, m=m, device=device, free=free, **given | others)


def store(name, device, n, m, rank=30, free=10**12, tiled=False, dtypes=None):
    known, limits = facts(n, m, device, rank, free), LIMITS[device]
    precision = choose_precision(known, Options(), limits).chosen
    dtypes = dtypes or choose_dtypes(known, precision, limits, "dense")
    return store_cost(known, name, limits, dtypes, rank, tiled=tiled)[0]


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
    assert store("auto", CPU, n, n, rank, tiled=True) is stored


def test_a_matrix_that_does_not_fit_is_streamed():
    assert store("auto", CUDA, 5000, 5000)
    # cost, kernel and one in the making, in float64
    free = 3 * 8 * 5000 * 5000 - 1
    assert not store("auto", CUDA, 5000, 5000, free=free)
    # the dense gradient has no factors to stream
    assert store("auto", CUDA, 5000, 5000, rank=0, free=free)


def test_memory_does_not_grow_without_bound():
    # however large the rank, and so the time that storing would save
    assert not store("auto", CUDA, 30_000, 30_000, rank=10_000)
    assert not store("auto", CPU, 9000, 9000, rank=10_000)
    assert store("auto", CPU, 5000, 5000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_time_grows_with_size_and_rank(device, dtype):
    small, large = (problem_seconds(device, dtype, (n, n), 30) for n in (5000, 8000))
    wider = problem_seconds(device, dtype, (8000, 8000), 300)
    assert small[0] < large[0] == wider[0]
    assert small[1] <= large[1] < wider[1]


def test_both_dtypes_of_a_solve_count():
    loop = Dtypes(torch.float32, torch.float64, again=False)
    shape = (12_000, 14_000)
    assert not store("auto", CUDA, *shape, 9, dtypes=loop)
    assert store("auto", CUDA, *shape, 9, dtypes=loop._replace(again=True))


def test_a_path_follows_from_facts_alone():
    """The same facts, the same path, without a problem; and the other gradient on the other side
    of each limit."""
    limits, options = LIMITS[CPU], Options()
    most = int(limits.dense**0.5)
    for n, factors, chosen in (
        (most, (None, None), "dense"), (most + 1, (None, None), "sampled"),
        (most, (5, 5), "factored"), (most + 1, (5, None), "factored"),
    ):  # fmt: skip
        known = facts(n, n, CPU, factors=factors)
        assert choose_gradient(known, options, limits).chosen == chosen
    triples = round(limits.triples ** (1 / 3))
    for n, chosen in ((triples - 1, "dense"), (triples + 1, "sampled")):
        known = facts(n, n, CPU, loss="absolute", products=False)
        assert choose_gradient(known, options, limits).chosen == chosen


@pytest.mark.parametrize(
    ("options", "moves", "not_moves"),
    [
        ({}, {"few points", "chains", "ends", "product", "optima"}, {"relaxed", "edges"}),
        ({"search": "fast"}, {"few points", "optima"}, {"chains", "ends", "twice"}),
        ({"n_init": 1}, set(), {move.name for move in MOVES}),
        ({"init": np.eye(30) / 30}, set(), {move.name for move in MOVES}),
        ({"mass": 0.5}, {"few points", "relaxed"}, {"chains", "product"}),
        ({"unbalanced": 0.1}, {"few points", "relaxed"}, {"chains", "product"}),
        ({"loss": "absolute"}, {"few points"}, {"chains", "ends"}),
    ],
)
@pytest.mark.filterwarnings("ignore::torchgw.TorchGWWarning")
def test_what_is_explained_is_what_is_done(options, moves, not_moves):
    """Before the solve and after it; and each move that is made has been named."""
    rng = np.random.default_rng(0)
    given = {"X": rng.normal(size=(30, 3)), "Y": rng.normal(size=(30, 2)), **options}
    route = torchgw.explain(**given, distances="euclidean", random_state=0)
    result = torchgw.solve(**given, distances="euclidean", random_state=0)
    assert result.report.route == str(route)
    assert result.gradient == route.gradient.chosen
    assert result.precision == route.precision.chosen
    named = {one.what for one in route.begin}
    assert named >= moves
    assert not named & not_moves
    assert all(str(choice) in str(route) for choice in (route.gradient, route.end))
    usual, longer = route.seconds
    assert 0 < usual <= longer


def test_what_is_refused_is_not_explained():
    x = np.zeros((4, 2))
    with pytest.raises(torchgw.UnsupportedError, match="needs factors on at least one side"):
        torchgw.explain(x, x, distances="euclidean", gradient="factored")
    with pytest.raises(TypeError, match="Did you mean 'epsilon'"):
        torchgw.explain(x, x, epsilom=1)


def test_a_result_file_keeps_its_route(tmp_path):
    x = np.random.default_rng(0).normal(size=(9, 2))
    result = torchgw.solve(x, x, distances="euclidean", random_state=0)
    result.save(tmp_path / "match.npz")
    assert "the match that keeps all distances" in result.report.route
    assert torchgw.load(tmp_path / "match.npz").report.route == result.report.route


@pytest.mark.parametrize("storage", ["auto", "streamed"])
def test_what_begins_far_is_forecast_with_all_tiles(storage):
    known, limits = facts(3200, 3840, CPU, 60, clouds=False), LIMITS[CPU]
    options = Options(storage=storage)
    gradient = choose_gradient(known, options, limits)
    route = make_route(known, options, limits, gradient, 0)
    assert route.storage.width is not None
    assert route.annealed(known, options, limits).each > 2 * route.each
    clouds = known._replace(clouds=True)
    streamed = make_route(clouds, Options(storage="streamed"), limits, gradient, 0)
    assert route.annealed(known, options, limits).each <= streamed.each
