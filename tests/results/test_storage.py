"""Results in files: everything comes back, nothing is pickled, damage is noticed."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from mapping_cases import DISTANCES, solve
from problems import distance_matrices
from scipy.spatial.distance import cdist

import torchgw
from torchgw import InvalidInputError, TorchGWWarning, UnsupportedError
from torchgw._boundary import archive as archive_module
from torchgw._plans.contract import Plan
from torchgw._results.mapping import Extension
from torchgw.cli._files import read_array, read_labels
from torchgw.distances import CallableDistance, DistanceProvider

# points of a barycenter that are compared
EVERY = torch.arange(10)


def equal(first, second):
    """Whether two trees hold the same numbers."""
    if isinstance(first, (Plan, Extension)):
        # by what they do; see test_everything_comes_back
        return True
    if isinstance(first, (torch.Tensor, np.ndarray)):
        same = type(first) is type(second) and first.dtype == second.dtype
        return same and np.array_equal(first, second)
    if isinstance(first, dict):
        return set(first) == set(second) and all(equal(first[k], second[k]) for k in first)
    if isinstance(first, DistanceProvider):
        return type(first) is type(second) and equal(first.columns(EVERY), second.columns(EVERY))
    if dataclasses.is_dataclass(first):
        return type(first) is type(second) and equal(vars(first), vars(second))
    if isinstance(first, tuple):
        return type(first) is type(second) and all(map(equal, first, second))
    return first == second or (first != first and second != second)


def round_trip(result, tmp_path, **settings):
    result.save(tmp_path / "result.npz", **settings)
    return torchgw.load(tmp_path / "result.npz")


@pytest.mark.parametrize("gradient", ["dense", "factored", "sampled"])
@pytest.mark.parametrize("distances", DISTANCES, ids=str)
def test_everything_comes_back(curves, distances, gradient, tmp_path):  # noqa: F811
    X, Y = curves
    try:
        result = solve(
            X, Y, epsilon=5e-3, distances=distances, gradient=gradient, n_anchors=32, a=None
        )
    except UnsupportedError:
        pytest.skip("no factors on either side")
    again = round_trip(result, tmp_path)
    for item in dataclasses.fields(result):
        if item.name not in ("lazy_plan", "extension"):
            assert equal(getattr(result, item.name), getattr(again, item.name)), item.name
    # entries below 1e-12 of a row are left out
    np.testing.assert_allclose(np.asarray(again.plan), np.asarray(result.plan), atol=1e-10)
    np.testing.assert_array_equal(again.lazy_plan.argmax(), result.lazy_plan.argmax())
    np.testing.assert_allclose(again.transform(X[:9]), result.transform(X[:9]), atol=1e-8)
    back = result.inverse_transform(Y[:9])
    np.testing.assert_allclose(again.inverse_transform(Y[:9]), back, atol=1e-8)
    assert str(again.status) == str(result.status)
    assert repr(again) == repr(result)


@pytest.mark.parametrize("dense", [False, True])
def test_plan_operations(curves, tmp_path, dense):  # noqa: F811
    X, Y = curves
    result = solve(X, Y, epsilon=5e-3, distances="euclidean")
    plan = round_trip(result, tmp_path, dense=dense).lazy_plan
    exact = result.lazy_plan
    V, U = np.random.default_rng(0).normal(size=(110, 3)), np.arange(90.0)
    np.testing.assert_allclose(plan @ V, exact @ V, atol=1e-10)
    np.testing.assert_allclose(plan.T @ U, exact.T @ U, atol=1e-10)
    np.testing.assert_allclose(plan.push(U), exact.push(U), atol=1e-10)
    np.testing.assert_allclose(plan.pull(V), exact.pull(V), atol=1e-10)
    np.testing.assert_allclose(plan.barycentric(Y), exact.barycentric(Y), atol=1e-8)
    np.testing.assert_allclose(plan.rows([3, 3, 80]), exact.rows([3, 3, 80]), atol=1e-10)
    np.testing.assert_array_equal(plan.argmax(axis=0), exact.argmax(axis=0))
    for got, expected in zip(plan.topk(4), exact.topk(4), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-10)
    for arguments in ({}, {"k": 3}, {"threshold": 0.1}, {"threshold": 1.0}):
        difference = plan.to_sparse(**arguments) - exact.to_sparse(**arguments)
        assert abs(difference).max() < 1e-10
    for got, expected in zip(plan.marginals(), exact.marginals(), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-10)
    drawn = plan.sample(20_000, torch.Generator().manual_seed(0))
    counts = np.bincount(drawn.source, minlength=90) / 20_000
    # each of 90 shares is 1 / 90 with a standard deviation of 7e-4
    np.testing.assert_allclose(counts, 1 / 90, atol=5e-3)
    with pytest.raises(InvalidInputError, match=r"values of shape \(110,\)"):
        plan @ np.ones(3)
    if not dense:
        with pytest.raises(UnsupportedError, match="dense=True"):
            plan.rounded()
    init = solve(X, Y, distances="euclidean", init=round_trip(result, tmp_path, dense=dense))
    assert init.value == pytest.approx(result.value, abs=0.05)


def test_relaxed_plans_are_drawn_from_by_what_their_rows_carry(curves, tmp_path):  # noqa: F811
    result = solve(*curves, distances="sqeuclidean", mass=0.4, epsilon=5e-3, n_init=1)
    plan = round_trip(result, tmp_path).lazy_plan
    seeds = (torch.Generator().manual_seed(0) for _ in range(2))
    drawn, expected = (
        each.sample(500, seed).source
        for each, seed in zip((plan, result.lazy_plan), seeds, strict=True)
    )
    np.testing.assert_array_equal(drawn, expected)
    # rows that move next to nothing are hardly drawn
    assert len(np.unique(expected)) < 80


@pytest.mark.parametrize("relaxed", [{"mass": 0.4}, {"unbalanced": 1.0}], ids=str)
def test_relaxed_plans_can_be_started_from(curves, tmp_path, relaxed):  # noqa: F811
    settings = {"distances": "euclidean", "epsilon": 5e-3, "n_init": 1, **relaxed}
    result = solve(*curves, **settings)
    loaded = round_trip(result, tmp_path)
    again, expected = (solve(*curves, init=init, **settings) for init in (loaded, result))
    # entries below 1e-12 of a row are left out
    assert again.value == pytest.approx(expected.value, rel=1e-6)
    assert again.value != pytest.approx(solve(*curves, **settings).value, rel=1e-6)


@pytest.mark.parametrize("relaxed", [{}, {"mass": 0.4}], ids=str)
def test_sampled_solves_can_be_started_from(curves, tmp_path, relaxed):  # noqa: F811
    """By pairs that are drawn from the entries kept."""
    settings = {"distances": "euclidean", "epsilon": 5e-3, "n_init": 1, **relaxed}
    loaded = round_trip(solve(*curves, **settings), tmp_path)
    again = solve(*curves, gradient="sampled", n_anchors=500, init=loaded, **settings)
    assert again.value == pytest.approx(loaded.value, rel=0.5)
    order, places = torch.arange(90), torch.linspace(0, 0.999, 500, dtype=torch.float64)
    drawn = loaded.lazy_plan.sample_at(places, order, torch.Generator().manual_seed(0))
    assert (loaded.plan[drawn.source, drawn.target] > 0).all()
    share = torch.bincount(drawn.source, minlength=90) / 500
    # at even steps of the cumulative mass
    np.testing.assert_allclose(share, loaded.plan.sum(1) / loaded.plan.sum(), rtol=0, atol=2 / 500)


def test_polished_results(curves, tmp_path):  # noqa: F811
    X = curves[0]
    result = solve(X, X[::-1] * 2, distances="euclidean", polish=True)
    again = round_trip(result, tmp_path)
    np.testing.assert_allclose(again.plan, result.plan, atol=1e-12)
    np.testing.assert_allclose(again.transform(X[:5]), result.transform(X[:5]), atol=1e-8)
    assert again.epsilon == 0


def test_dense_is_exact(curves, tmp_path):  # noqa: F811
    result = solve(*curves, epsilon=0.1, distances="euclidean")
    again = round_trip(result, tmp_path, dense=True)
    assert np.array_equal(again.plan, result.plan)


def test_wide_plans_are_shortened_with_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr("torchgw._results.parts._ENTRIES_PER_ROW", 10)
    d_x, d_y = distance_matrices(40, 30)
    result = solve(D_X=d_x, D_Y=d_y, epsilon=10.0)
    with pytest.warns(TorchGWWarning, match="leave out 0.6.* of its mass. Pass `dense=True`"):
        result.save(tmp_path / "wide.npz")
    assert np.count_nonzero(torchgw.load(tmp_path / "wide.npz").plan) == 400


def test_given_matrices_are_stored_when_asked_for(tmp_path):
    d_x, d_y = distance_matrices(40, 30)
    result = solve(D_X=d_x, D_Y=d_y, epsilon=5e-3)
    values = np.eye(30)
    expected = result.transform(D_new=d_x[:3], values=values)
    again = round_trip(result, tmp_path, dense=True)
    np.testing.assert_allclose(again.transform(D_new=d_x[:3], values=values), expected)
    again = round_trip(result, tmp_path)
    with pytest.raises(UnsupportedError, match=r"save\(path, dense=True\)"):
        again.transform(D_new=d_x[:3], values=values)


def test_file_is_small_where_the_cost_has_factors(tmp_path):
    rng = np.random.default_rng(0)
    X, Y = rng.normal(size=(900, 3)), rng.normal(size=(800, 2))
    # one start: alternatives are small plans of their own
    result = solve(X, Y, distances="sqeuclidean", n_init=1)
    result.save(tmp_path / "small.npz")
    size = (tmp_path / "small.npz").stat().st_size
    size -= sum(8 * item.plan.numel() for item in result.alternatives)
    # factors, potentials and points, a few dozen numbers per point; alternatives are coarse plans
    assert size < 1700 * 8 * 40


def test_graphs_and_functions(tmp_path):
    import networkx as nx

    graph = nx.path_graph(25)
    hops = np.abs(np.subtract.outer(np.arange(25), np.arange(25)))
    Y = np.linspace(0, 1, 30)[:, None] ** 1.1
    result = solve(graph, Y, epsilon=2e-3)
    again = round_trip(result, tmp_path)
    np.testing.assert_allclose(
        again.transform(D_new=hops[:4]), result.transform(D_new=hops[:4]), atol=1e-8
    )
    table = torch.from_numpy(cdist(Y, Y))
    provider = CallableDistance(30, lambda index: table[:, index], dtype=torch.float64)
    again = round_trip(solve(graph, provider, epsilon=2e-3), tmp_path, dense=True)
    with pytest.raises(UnsupportedError, match="does not hold them"):
        again.transform(D_new=hops[:4], values=Y)


@pytest.mark.parametrize(
    "options",
    [
        {"distances": "euclidean"},
        {"distances": "sqeuclidean", "storage": "streamed", "skip_tiles": True},
        {"distances": "dijkstra", "loss": "kl"},
        {"distances": "landmark", "unbalanced": 1.0},
    ],
    ids=str,
)
def test_results_can_be_pickled(curves, options):  # noqa: F811
    """As processes that share work out send them."""
    result = solve(*curves, epsilon=5e-3, n_init=1, **options)
    again = pickle.loads(pickle.dumps(result))
    np.testing.assert_array_equal(again.plan, result.plan)
    np.testing.assert_array_equal(again.transform(curves[0]), result.transform(curves[0]))


@pytest.mark.parametrize("mode", ["value", "implicit", "unrolled"])
def test_copies_of_a_differentiable_result_leave_its_graph_behind(mode):
    inputs = torch.randn(12, 2, generator=torch.Generator().manual_seed(0)).double()
    X = inputs.requires_grad_() * 2  # noqa: N806
    options = {"distances": "sqeuclidean", "epsilon": 50.0}
    result = torchgw.solve(X, inputs[:9].detach(), differentiable=mode, **options)
    for again in (copy.deepcopy(result), pickle.loads(pickle.dumps(result))):
        assert again.loss == result.loss
        assert not again.loss.requires_grad
        assert not again.plan.requires_grad
        torch.testing.assert_close(again.plan, result.plan.detach(), rtol=1e-6, atol=1e-7)
    shared = copy.copy(result)
    assert shared.loss is result.loss
    assert copy.copy(result.lazy_plan).T.to_dense().requires_grad == (mode != "value")


def test_damage_is_noticed(curves, tmp_path):  # noqa: F811
    path = tmp_path / "result.npz"
    solve(*curves, distances="sqeuclidean").save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InvalidInputError, match="not a torchgw result.*damaged or cut short"):
        torchgw.load(path)
    # but for a few bytes of the headers of members, which mean nothing
    said = []
    for place in range(len(whole) // 16, len(whole), len(whole) // 16):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            torchgw.load(path)
        except InvalidInputError as error:
            said.append(str(error))
    assert len(said) >= 13
    assert all("damaged" in one for one in said)


@pytest.mark.parametrize("kind", ["result.npz", "compressed.npz", "array.npy"])
def test_damage_of_any_byte_is_an_error_of_ours_or_harmless(kind, tmp_path):
    """Of the readers each has errors of its own: of zip, deflate, the header, and the numbers."""
    path, read = tmp_path / kind, lambda: read_array(str(path))
    if kind == "result.npz":
        archive_module.write_archive(path, {"kind": "x"}, {"a": np.arange(3.0)})
        read = lambda: archive_module.read_archive(path)  # noqa: E731
    elif kind == "compressed.npz":
        np.savez_compressed(path, a=np.arange(300.0))
    else:
        np.save(path, np.arange(30.0))
    whole, noticed = path.read_bytes(), 0
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x21]) + whole[place + 1 :])
        try:
            read()
        except InvalidInputError:
            noticed += 1
    assert noticed > 20


@pytest.mark.parametrize("length", [255, 256])
def test_names_as_long_as_the_file_system_takes(length, tmp_path):
    path = tmp_path / ("x" * (length - 4) + ".npz")
    if length > 255:
        with pytest.raises(InvalidInputError, match="cannot write .*: File name too long"):
            archive_module.write_archive(path, {}, {})
        return
    archive_module.write_archive(path, {}, {})
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["labels.npy", "labels.npz:kind", "labels.txt", "labels.csv"])
def test_labels_that_are_not_there(name, tmp_path):
    with pytest.raises(InvalidInputError, match="there is no such file"):
        read_labels(str(tmp_path / name))


def test_labels_that_are_no_text(tmp_path):
    (tmp_path / "labels.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(InvalidInputError, match="not a text file in UTF-8"):
        read_labels(str(tmp_path / "labels.txt"))


def test_a_changed_number_is_noticed(curves, tmp_path):  # noqa: F811
    """A file that is a good archive, in which somebody changed one array."""
    path = tmp_path / "result.npz"
    solve(*curves, distances="sqeuclidean").save(path)
    with np.load(path) as stored:
        members = dict(stored)
    name = next(key for key in members if key.endswith("potential_a"))
    members[name] = members[name] + 1e-9
    np.savez(path, **members)
    with pytest.raises(InvalidInputError, match="do not match their checksum"):
        torchgw.load(path)


def test_foreign_files(tmp_path):
    path = tmp_path / "file.npz"
    with pytest.raises(InvalidInputError, match="no such file"):
        torchgw.load(path)
    path.write_text("x,y\n1,2\n")
    with pytest.raises(InvalidInputError, match="not a torchgw result"):
        torchgw.load(path)
    for save in (np.savez, np.savez_compressed):
        save(path, a=np.ones(3))
        with pytest.raises(InvalidInputError, match="not a torchgw result"):
            torchgw.load(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("metadata", "{}")
    with pytest.raises(InvalidInputError, match="not a torchgw result"):
        torchgw.load(path)
    np.savez(path, metadata=np.array([{"a": 1}], dtype=object), checksum=np.array("x"))
    with pytest.raises(InvalidInputError, match="damaged"):
        torchgw.load(path)


def test_other_versions_and_kinds(tmp_path, monkeypatch):
    path = tmp_path / "file.npz"
    archive_module.write_archive(path, {"kind": "Barycenter", "fields": {}}, {})
    with pytest.raises(InvalidInputError, match="holds a Barycenter"):
        torchgw.load(path)
    for fields, odd in (({"colour": 1}, "alpha, backend, colour, "), ({}, "alpha, backend, ")):
        archive_module.write_archive(path, {"kind": "GWResult", "fields": fields}, {})
        with pytest.raises(InvalidInputError, match=f"its GWResult differs .* in {odd}"):
            torchgw.load(path)
    monkeypatch.setattr(archive_module, "_VERSION", 99)
    archive_module.write_archive(path, {"kind": "GWResult", "fields": {}}, {})
    monkeypatch.undo()
    with pytest.raises(InvalidInputError, match="version 99 of the format"):
        torchgw.load(path)


def test_files_of_parts_that_do_not_fit(tmp_path):
    path, table = tmp_path / "file.npz", {"a": np.ones((4, 3))}
    for size in (0, "two", None):
        archive_module.write_archive(path, {"kind": "parts", "size": size, "key": 7}, {})
        with pytest.raises(InvalidInputError, match="`size` must be the number of parts"):
            torchgw.load(path)
    archive_module.write_archive(path, {"kind": "parts", "size": 2, "key": 7}, {})
    for rank, other in ((0, table), (1, {"a": np.ones((4, 2))})):
        archive_module.write_part(path, rank, 2, 7, {"kind": "GWResult", "fields": {}}, other)
    with pytest.raises(InvalidInputError, match="its parts do not fit together"):
        torchgw.load(path)
    archive_module.write_part(path, 1, 2, 7, {"kind": "GWResult", "fields": {}}, table)
    with pytest.raises(InvalidInputError, match="its GWResult differs"):
        torchgw.load(path)


def test_shares_of_a_result(curves, tmp_path):  # noqa: F811
    result = solve(*curves, gradient="factored", distances="sqeuclidean")
    shards = [result.shard(rank, 3) for rank in range(3)]
    for name in ("potential_a", "marginal_a"):
        parts = [getattr(shard, name) for shard in shards]
        assert np.array_equal(np.concatenate(parts), getattr(result, name))
    plan = np.concatenate([shard.plan for shard in shards])
    # rows of products of factors, whose sums another number of rows may order otherwise
    np.testing.assert_allclose(plan, result.plan, rtol=1e-9, atol=1e-15)
    with pytest.raises(UnsupportedError, match=r"result.extension"):
        shards[0].transform(curves[0][:2])
    with pytest.raises(InvalidInputError, match="`rank` must be an integer between 0 and 2"):
        result.shard(3, 3)
    result.save(tmp_path / "whole.npz")
    again = torchgw.load(tmp_path / "whole.npz", shard=(1, 3))
    np.testing.assert_array_equal(again.potential_a, shards[1].potential_a)
    for share, words in (((3, 3), r"`shard\[0\]` must be"), (3, "a pair"), ((0, 0), r"shard\[1\]")):
        with pytest.raises(InvalidInputError, match=words):
            torchgw.load(tmp_path / "whole.npz", shard=share)
    many = torchgw.solve_many([curves[0][:9]], [curves[1][:9]], epsilon=0.1)
    many.save(tmp_path / "many.npz")
    with pytest.raises(InvalidInputError, match="holds a BatchResult, which has no shares"):
        torchgw.load(tmp_path / "many.npz", shard=(0, 2))
    few = round_trip(solve(*curves, gradient="dense", distances="euclidean"), tmp_path)
    with pytest.raises(UnsupportedError, match="known by its largest entries alone"):
        few.shard(0, 2)


def test_parts_of_a_cache_are_no_results(tmp_path):
    solve(np.arange(10.0)[:, None], np.arange(9.0)[:, None], cache=tmp_path)
    for path in tmp_path.iterdir():
        with pytest.raises(InvalidInputError, match="which a `cache` keeps"):
            torchgw.load(path)


def test_places_that_cannot_be_written(curves, tmp_path):  # noqa: F811
    result = solve(*curves, distances="sqeuclidean")
    with pytest.raises(InvalidInputError, match="no directory"):
        result.save(tmp_path / "absent" / "result.npz")
    with pytest.raises(InvalidInputError, match="it is a directory"):
        result.save(tmp_path)
    odd = dataclasses.replace(result, timings={"extra": object()})
    with pytest.raises(UnsupportedError, match=r"`timings.extra` is a object"):
        odd.save(tmp_path / "odd.npz")
    odd = dataclasses.replace(result, timings={"extra": np.array([{}], dtype=object)})
    with pytest.raises(UnsupportedError, match=r"`timings.extra` is a ndarray"):
        odd.save(tmp_path / "odd.npz")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
def test_files_have_the_permissions_of_others(tmp_path, monkeypatch):
    """Without a look at the umask, which is to change it, for all threads."""
    (tmp_path / "other").touch()
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("the umask was changed"))
    archive_module.write_archive(tmp_path / "archive.npz", {}, {})
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1


def test_the_tree_is_readable_by_others(curves, tmp_path):  # noqa: F811
    path = tmp_path / "result.npz"
    result = solve(*curves, distances="sqeuclidean")
    result.save(path)
    with np.load(path, allow_pickle=False) as stored:
        header = json.loads(stored["metadata"].tobytes())
        fields = header["tree"]["fields"]
        np.testing.assert_array_equal(stored[fields["potential_a"]["array"]], result.potential_a)
    assert fields["epsilon"] == result.epsilon


@pytest.mark.parametrize("distances", ["sqeuclidean", "euclidean"])
def test_barycenters(curves, tmp_path, distances):  # noqa: F811
    """With factors, and with a matrix."""
    X, Y = curves
    options = {"distances": distances, "epsilon": 0.05, "tol": 1e-2, "random_state": 0}
    result = torchgw.barycenter([X, X[::2]], 10, features=[X, X[::2]], **options)
    again = round_trip(result, tmp_path)
    assert type(again) is torchgw.BarycenterResult
    assert equal(result, again)
    assert repr(again) == repr(result)
    for before, after in zip(result.results, again.results, strict=True):
        np.testing.assert_allclose(after.plan, before.plan, atol=1e-10)
    np.testing.assert_allclose(again.points(2), result.points(2))


def test_joint_embeddings(curves, tmp_path):  # noqa: F811
    X, Y = curves
    result = torchgw.joint_embedding([X], Y, [solve(X, Y, distances="euclidean")], dimension=3)
    again = round_trip(result, tmp_path)
    assert type(again) is torchgw.JointEmbedding
    assert equal(result, again)
    assert repr(again) == "JointEmbedding(sources of 90 points, anchor of 110, dimension=3)"
    assert "<tr><th style='text-align:left'>dimension</th>" in again._repr_html_()


def test_results_of_low_rank(curves, tmp_path):  # noqa: F811
    X, Y = curves
    options = {"rank": 4, "distances": "sqeuclidean", "tol": 1e-2, "random_state": 0}
    result = torchgw.solve_low_rank(X, Y, **options)
    again = round_trip(result, tmp_path)
    assert type(again) is torchgw.LowRankResult
    assert equal(result, again)
    assert repr(again) == repr(result)
    assert "LowRankResult 90 &times; 110 &#1" in again._repr_html_()
    assert np.array_equal(again.plan, result.plan)
    assert np.array_equal(again.lazy_plan.T @ X, result.lazy_plan.T @ X)
    # what was saved is where another solve starts
    assert torchgw.solve_low_rank(X, Y, init=again, **options).value <= result.value


@pytest.mark.parametrize("gradient", ["dense", "factored", "sampled"])
def test_files_from_before_a_part_was_renamed(curves, gradient, tmp_path):  # noqa: F811
    """The report was a dictionary, the dual value an objective; the gradient had to be guessed."""
    path = tmp_path / "result.npz"
    result = solve(*curves, epsilon=5e-3, distances="landmark", gradient=gradient, n_anchors=32)
    result.save(path)
    tree, arrays = archive_module.read_archive(path)
    fields = tree["fields"]
    fields["log"] = {"dict": fields.pop("report")["parts"]}
    for entry in fields["history"]["tuple"]:
        entry["parts"]["objective"] = entry["parts"].pop("dual")
    before = [entry._replace(objective=float("nan")) for entry in result.history]
    assert fields["extension"]["parts"].pop("gradient") == gradient
    new = torchgw.load(path)
    archive_module.write_archive(path, tree, arrays)
    old = torchgw.load(path)
    assert old.report == result.report
    assert equal(old.history, tuple(before))
    np.testing.assert_array_equal(old.transform(curves[0]), new.transform(curves[0]))
    back = new.inverse_transform(curves[1])
    np.testing.assert_array_equal(old.inverse_transform(curves[1]), back)


@pytest.mark.slow
def test_results_of_pots_call(tmp_path):
    from torchgw.pot import OTResult, solve_gromov

    result = solve_gromov(*distance_matrices(12, 9), reg=0.05)
    again = round_trip(result, tmp_path)
    assert type(again) is OTResult
    assert repr(again) == repr(result)
    assert again.log == result.log
    np.testing.assert_array_equal(again.plan, result.plan)
    # by a program that has not asked for POT's call
    code = "import sys, torchgw; print(torchgw.load(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(tmp_path / "result.npz")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{result}\n"


def test_links_and_pipes_stay(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    kept, link, pipe = tmp_path / "elsewhere" / "kept", tmp_path / "link", tmp_path / "pipe"
    kept.touch()
    link.symlink_to(kept)
    os.mkfifo(pipe)
    tree = {"answer": 42}
    archive_module.write_archive(link, tree, {})
    assert link.is_symlink()
    assert archive_module.read_archive(kept)[0] == tree
    # opened without waiting for a writer; its buffer is larger than the file
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
        archive_module.write_archive(pipe, tree, {})
        (tmp_path / "copy").write_bytes(reader.read())
    assert pipe.is_fifo()
    assert archive_module.read_archive(tmp_path / "copy")[0] == tree


def test_permission_is_asked_for_first(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(InvalidInputError, match="there is no permission to"):
        archive_module.check_writable(tmp_path / "result.npz")
