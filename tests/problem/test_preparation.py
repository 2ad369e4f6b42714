"""The stages before a solve: what they report, and what a cache keeps."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from problems import solve_by_name

import torchgw
from torchgw._boundary.cache import Cache, content_key
from torchgw._errors import CacheWarning, InvalidInputError, InvalidTypeError
from torchgw._problem import named
from torchgw.datasets import spiral, swiss_roll
from torchgw.distances import connect, geodesic_matrix, knn_graph

FAST = {"epsilon": 5e-2, "max_iter": 3, "tol": 1e-2, "random_state": 0, "n_init": 1}


@pytest.fixture
def pair():
    return spiral(120, 0)[0], swiss_roll(130, 0)[0]


def solve(pair, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchgw.ConvergenceWarning)
        warnings.simplefilter("ignore", torchgw.GraphWarning)
        return solve_by_name(*pair, **FAST, **options)


@pytest.mark.parametrize(
    ("distances", "phases"),
    [
        ("precomputed", {"graph", "geodesics"}),
        ("landmark", {"graph", "landmarks"}),
        ("dijkstra", {"graph"}),
        ("euclidean", set()),
    ],
)
def test_each_stage_has_its_time(pair, distances, phases):
    # an exact gradient has use for all rows
    gradient = "sampled" if distances == "dijkstra" else "auto"
    timings = solve(pair, distances=distances, gradient=gradient).timings
    assert {"graph", "geodesics", "landmarks"} & set(timings) == phases
    assert all(seconds >= 0 for seconds in timings.values())
    assert "distances" in timings


def test_few_rows_on_demand_are_all_rows_at_once(limited):
    """Unless something asks for a sample."""
    pair = spiral(30, 0)[0], swiss_roll(35, 0)[0]
    at_once, all_pairs = (solve(pair, distances=kind) for kind in ("dijkstra", "precomputed"))
    assert at_once.gradient == "dense"
    assert np.array_equal(at_once.plan, all_pairs.plan)
    assert solve(pair, distances="dijkstra", n_anchors=32).gradient == "sampled"
    assert solve(pair, distances="dijkstra", gradient="sampled").gradient == "sampled"
    limited(all_rows_points=34)
    assert solve(pair, distances="dijkstra").gradient == "sampled"


def test_landmarks_are_reported(pair):
    log = solve(pair, distances="landmark").log["landmarks"]
    assert set(log) == {"X", "Y"}
    # of few points all are landmarks
    assert log["X"]["count"] == 120
    assert log["X"]["error"] == log["Y"]["error"] == 0
    for side in solve(pair, distances="landmark", n_landmarks=35).log["landmarks"].values():
        assert 1 <= side["rank"] <= side["count"] == 35
        assert 0 < side["error"] < 0.1
    assert solve(pair, distances=("landmark", "dijkstra")).log["landmarks"].keys() == {"X"}
    assert solve(pair, distances="euclidean").log["landmarks"] is None


def forbid_work(monkeypatch):
    """Let every stage fail that is not read from a cache."""
    for name in ("neighbour_geodesics", "LandmarkDistance", "path_lengths"):
        if name == "LandmarkDistance":
            # its results are still to be put together
            monkeypatch.setattr(named.LandmarkDistance, "__init__", None)
        else:
            monkeypatch.setattr(named, name, None)


def test_auto_takes_landmarks_that_are_as_good_as_all_pairs(limited):
    limited(all_rows_points=300)
    curves, few = ((spiral(n, 0)[0], swiss_roll(n, 1)[0]) for n in (300, 299))
    cloud = curves[0], np.random.default_rng(0).normal(size=(300, 3))
    found = solve(curves)
    assert found.gradient == "factored"
    assert max(side["error"] for side in found.log["landmarks"].values()) <= 0.005
    # the error of one side is enough to take neither, and exact stays what was asked for as exact
    others = [solve(points) for points in (few, cloud, cloud[::-1])]
    others += [solve(curves, gradient="dense"), solve(curves, polish=True)]
    others += [solve(curves, loss="kl")]
    for other in others:
        assert other.gradient == "dense"
        assert other.log["landmarks"] is None
    assert solve((curves[0], None), D_Y=1 - np.eye(5)).log["landmarks"] is None


def test_accurate_landmarks_keep_the_value(limited):
    limited(all_rows_points=300)
    points = spiral(300, 0)[0], swiss_roll(320, 1)[0]
    graphs = [connect(knn_graph(torch.from_numpy(part)), part) for part in points]
    tables = [geodesic_matrix(graph).numpy() for graph in graphs]
    tables = [table / table.max() for table in tables]
    exact, found = (
        torchgw.solve(*points, distances=name, epsilon=5e-4) for name in ("precomputed", "auto")
    )
    assert found.gradient == "factored"
    best, value = (
        reference.gw_value(*tables, np.asarray(result.plan)) for result in (exact, found)
    )
    # 0.4% is usual, the sum of both sides' errors 1% at most
    assert best * 0.999 < value < best * 1.01


@pytest.mark.parametrize("distances", ["precomputed", "landmark"])
def test_what_is_cached_is_not_computed_again(pair, distances, tmp_path, monkeypatch):
    folder = tmp_path / "made" / "when needed"
    first = solve(pair, distances=distances, cache=folder)
    kept = sorted(folder.iterdir())
    # a graph and its distances for each side
    assert len(kept) == 4
    with pytest.MonkeyPatch.context() as patch:
        forbid_work(patch)
        second = solve(pair, distances=distances, cache=str(folder))
    plain = solve(pair, distances=distances)
    assert np.array_equal(first.plan, second.plan)
    assert np.array_equal(first.plan, plain.plan)
    assert first.log["landmarks"] == second.log["landmarks"]
    assert sorted(folder.iterdir()) == kept
    # other content has other files
    solve((pair[0] * 2, pair[1]), distances=distances, n_neighbors=6, cache=folder)
    assert len(list(folder.iterdir())) == 8


def test_new_points_are_mapped_by_what_was_cached(pair, tmp_path):
    results = [solve(pair, distances="landmark", cache=tmp_path) for _ in range(2)]
    new = pair[0][:5] + 0.001
    np.testing.assert_array_equal(*(result.transform(new) for result in results))


@pytest.mark.parametrize("damage", ["cut short", "changed", "empty"])
def test_a_damaged_file_is_made_again_with_a_warning(pair, damage, tmp_path):
    first = solve(pair, distances="landmark", cache=tmp_path)
    for path in tmp_path.iterdir():
        data = bytearray(path.read_bytes())
        if damage == "changed":
            data[len(data) // 2] ^= 255
        path.write_bytes(data[: len(data) // 2] if damage == "cut short" else data)
        if damage == "empty":
            path.write_bytes(b"")
    with pytest.warns(CacheWarning, match="computed again.*damaged"):
        second = solve(pair, distances="landmark", cache=tmp_path)
    assert np.array_equal(first.plan, second.plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        solve(pair, distances="landmark", cache=tmp_path)


def test_a_given_graph_is_known_by_its_content(pair, tmp_path):
    graphs = [torchgw.distances.knn_graph(points, 9) for points in pair]
    solve(graphs, distances="precomputed", cache=tmp_path)
    # the graphs need no making, their distances do
    assert len(list(tmp_path.iterdir())) == 2
    graphs[0].data *= 2
    solve(graphs, distances="precomputed", cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_all_pairs_are_cached_in_parts_that_need_not_be_made_twice(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(named, "_PART_PAIRS", 120 * 40)
    first = solve(pair, distances="precomputed", cache=tmp_path)
    parts = sorted(tmp_path.glob("geodesics-*"))
    assert len(parts) == 3 + 4
    made = []
    plain = named.path_lengths
    monkeypatch.setattr(
        named, "path_lengths", lambda *args, **more: made.append(1) or plain(*args, **more)
    )
    for path in parts[:2]:
        path.unlink()
    second = solve(pair, distances="precomputed", cache=tmp_path)
    assert len(made) == 2
    assert np.array_equal(first.plan, second.plan)


def test_keys_tell_content_apart():
    one = torch.arange(6.0)
    values = [one, one.double(), one.reshape(2, 3), one + 1, 3, "3", None]
    keys = {content_key("stage", value) for value in values}
    assert len(keys) == len(values)
    assert content_key("stage", one) == content_key("stage", one.clone())
    assert content_key("stage", one) != content_key("other", one)


def test_keys_know_numbers_of_any_kind():
    assert content_key("graph", np.int64(5)) == content_key("graph", 5)


def test_refused_caches(pair, tmp_path):
    (tmp_path / "file").write_text("text")
    with pytest.raises(InvalidInputError, match="`cache` must be a folder"):
        solve(pair, cache=tmp_path / "file")
    with pytest.raises(InvalidTypeError, match="`cache` must be the path.*got int"):
        solve(pair, cache=3)


def test_a_cache_makes_no_folder_before_it_writes(tmp_path):
    folder = Path(tmp_path / "new")
    cache = Cache(folder)
    assert not folder.exists()
    made = cache.fetch("stage", "key", torch.device("cpu"), lambda: {"x": np.float64(2), "y": None})
    assert made == {"x": 2, "y": None}
    assert cache.fetch("stage", "key", torch.device("cpu"), dict) == made
