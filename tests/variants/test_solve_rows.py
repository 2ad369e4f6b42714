"""Tables that are matched by rows: what is read, what is written, and that it is the plan."""

from __future__ import annotations

import resource
import warnings

import numpy as np
import pytest
import torch

import torchgw
from benchmarks.harness.storages import StorageMeter
from torchgw import InvalidInputError
from torchgw._boundary.rows import Rows
from torchgw._variants import solve_rows as module
from torchgw.cli import main

N, M = 1_500, 1_300
SMALL = {"epsilon": 5e-3, "n_base": 128, "block": 400, "device": "cpu"}
# one solve is compared with others to the bit, whichever test asks for it first
pytestmark = [pytest.mark.exact] + [
    pytest.mark.filterwarnings(f"ignore::torchgw.{name}Warning")
    for name in ("Convergence", "Graph", "Search")
]


def curve(n, seed):
    """Points along a bent curve, closer together at one end, and how far along each is."""
    t = np.random.default_rng(seed).random(n) ** 2
    return on_curve(t), t


def on_curve(t):
    return np.stack([np.cos(4 * t), np.sin(4 * t), t], axis=1)


(X, AT_X), (Y, AT_Y) = curve(N, 0), curve(M, 1)


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*-*.npz"))}


@pytest.fixture(scope="module")
def solved(tmp_path_factory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torchgw.solve_rows(X, Y, tmp_path_factory.mktemp("solved"), **SMALL)


def test_partners_and_places_are_those_of_the_curve(solved):
    for side, here, there, points in (("X", AT_X, AT_Y, Y), ("Y", AT_Y, AT_X, X)):
        found = solved.rows(side=side)
        missed = np.abs(there[found["partner"]] - here).mean()
        assert missed < 0.03
        assert np.linalg.norm(found["place"] - points[found["partner"]], axis=1).mean() < 0.1
        part = solved.rows(395, 812, side=side)
        assert all(np.array_equal(part[name], found[name][395:812]) for name in found)
        none = solved.rows(812, 812, side=side)
        assert all(
            (part.shape, part.dtype) == ((0, *found[name].shape[1:]), found[name].dtype)
            for name, part in none.items()
        )
    assert solved.converged
    assert solved.marginal_error < 0.02


def test_a_base_is_as_large_as_a_sample_needs(tmp_path, monkeypatch, capsys):
    """Its plan has the weights of rows that no base had."""
    monkeypatch.setattr(module, "_FIRST", 32)
    monkeypatch.setattr(module, "_ALLOWED", 0.02)
    found = torchgw.solve_rows(X, Y, tmp_path, **SMALL | {"n_base": "auto"}, verbose=True)
    assert 32 < found.cells[0] < N / 2
    assert found.marginal_error < 0.03
    assert found.value_change > 0
    # the base before was further off than this one
    missed = found.rows()["place"] - on_curve(AT_X)
    assert np.linalg.norm(missed, axis=1).mean() < found.place_change < 0.5
    assert found.distance_error < found.epsilon**0.5
    told = capsys.readouterr().err
    for words in (
        "base of 32: marginal error",
        "8 blocks of rows are matched",
        "cells of Y, block 4 of 4",
        "rows, block 8 of 8",
    ):
        assert words in told


def test_detail_that_a_small_base_does_not_see_calls_for_a_larger_one(tmp_path, monkeypatch):
    """A coil whose turns touch, for few points, is a band: and a long curve for more."""
    monkeypatch.setattr(module, "_FIRST", 32)
    monkeypatch.setattr(module, "_ALLOWED", 1.0)
    t = np.sort(np.random.default_rng(0).random(1_000))
    coil = np.stack([np.cos(30 * t), np.sin(30 * t), 1.5 * t], axis=1)
    line = np.stack([t, 0 * t, 0 * t], axis=1)
    call = SMALL | {"n_base": "auto", "options": torchgw.Options(search="fast")}
    found = torchgw.solve_rows(coil, line, tmp_path, **call)
    assert found.cells[0] >= 256
    assert found.distance_error < 0.07


def test_distances_that_no_base_knows_are_told(tmp_path, monkeypatch):
    """Graphs of clusters in many dimensions depend on how many points they have."""
    monkeypatch.setattr(module, "_FIRST", 64)
    monkeypatch.setattr(module, "_MOST", 256)
    monkeypatch.setattr(module, "_ALLOWED", 1.0)
    rng = np.random.default_rng(0)
    points = 2 * rng.normal(size=(8, 10))[np.arange(600) % 8] + rng.normal(size=(600, 10))
    call = SMALL | {"n_base": "auto", "options": torchgw.Options(search="fast")}
    with pytest.warns(torchgw.GraphWarning, match="finer detail counts for nothing") as told:
        found = torchgw.solve_rows(points, points[::-1], tmp_path, **call)
    # one of each side's graph beside it: not those of samples
    assert sum(one.category is torchgw.GraphWarning for one in told) <= 3
    assert found.distance_error > 0.05


def test_rows_are_those_of_an_ordinary_solve(solved):
    """Geodesics of 128 points stand for those of 1,500."""
    whole = torchgw.solve(X, Y, epsilon=5e-3, distances="landmark", random_state=0)
    assert solved.value == pytest.approx(whole.value, rel=0.03, abs=1e-4)
    places = whole.transform(X)
    assert np.abs(solved.rows()["place"] - places).mean() < 0.02


@pytest.mark.gpu
def test_a_gpu_finds_what_a_cpu_does(solved, tmp_path):
    found = torchgw.solve_rows(X, Y, tmp_path, **SMALL | {"device": "cuda"})
    assert found.value == pytest.approx(solved.value, rel=0.03, abs=1e-4)
    assert found.marginal_error == pytest.approx(solved.marginal_error, rel=0.3)
    assert np.abs(AT_Y[found.rows()["partner"]] - AT_X).mean() < 0.03


def test_memory_does_not_grow_with_the_table(tmp_path):
    peaks = []
    for n in (1_200, 6_000):
        np.save(tmp_path / f"{n}.npy", curve(n, 0)[0])
        with StorageMeter() as meter:
            torchgw.solve_rows(tmp_path / f"{n}.npy", Y[:800], tmp_path / str(n), **SMALL)
        peaks.append(meter.peak)
    assert peaks[1] < 1.05 * peaks[0]


def test_numbers_are_those_of_the_plan_between_all_rows(solved):
    """Masses of drawn rows, and the value, by the (n, m) table of the plan."""
    ways = module._read_head(solved.folder, torch.device("cpu"))
    sides = [torch.from_numpy(points) for points in (X, Y)]
    factors = [way.side.factors_of(points)[0] for way, points in zip(ways, sides, strict=True)]
    there, back = (way.cost(part) for way, part in zip(ways, factors, strict=True))
    cost = there.row[:, None] + back.row - there.left @ back.left.T
    f, g = (torch.from_numpy(solved.rows(side=side)["potential"]) for side in "XY")
    plan = ((f[:, None] + g - cost) / solved.epsilon).exp() / (N * M)
    errors = [
        float((plan.sum(axis)[way.side.drawn] * size - 1).abs().mean())
        for way, axis, size in zip(ways, (1, 0), (N, M), strict=True)
    ]
    assert solved.marginal_error == pytest.approx(max(errors), rel=1e-6)
    tables = [(part * way.side.signs) @ part.T for part, way in zip(factors, ways, strict=True)]
    value = tables[0].square().mean() + tables[1].square().mean()
    value -= 2 * ((tables[0] @ plan @ tables[1]) * plan).sum()
    # the value is that of the best plan near by, whose marginals are right
    rows, columns = plan.sum(1) - 1 / N, plan.sum(0) - 1 / M
    excess = float(rows @ f + columns @ g)
    assert solved.value == pytest.approx(float(value) - excess, rel=0.02, abs=2e-5)


def test_factors_that_distances_hardly_need_are_left_out(monkeypatch):
    base = torch.from_numpy(curve(400, 5)[0])
    call = module._Call(None, (), {}, None, torch.device("cpu"), None, None, np.inf)
    found = []
    for share in (0.0, module._NEGLIGIBLE, 1.0):
        monkeypatch.setattr(module, "_NEGLIGIBLE", share)
        matrix, signs = module._factors(call, Rows("X", base), base)
        found.append(((matrix * signs) @ matrix.T, len(signs)))
    (whole, most), (some, rank), (_, least) = found
    assert least == 1 < rank < most
    assert 0 < float((some - whole).norm() / whole.norm()) <= 1e-3


class Recorded:
    """A table that remembers how many rows were read at once."""

    def __init__(self, table):
        self.table, self.shape, self.most = table, table.shape, 0

    def __getitem__(self, rows):
        part = self.table[rows]
        self.most = max(self.most, len(part))
        return part


def test_any_table_is_read_by_blocks_alone(solved, tmp_path):
    zarr, h5py = pytest.importorskip("zarr"), pytest.importorskip("h5py")
    np.save(tmp_path / "X.npy", X)
    zarr.save(tmp_path / "X.zarr", X)
    with h5py.File(tmp_path / "Y.h5", "w") as file:
        file["obsm/points"] = Y
    with h5py.File(tmp_path / "Y.h5") as file:
        mapped = np.load(tmp_path / "X.npy", mmap_mode="r")
        given = {
            "recorded": (Recorded(X), Recorded(Y)),
            "paths": (tmp_path / "X.npy", file["obsm/points"]),
            "maps": (mapped, torch.from_numpy(Y)),
            "zarr": (str(tmp_path / "X.zarr"), f"{tmp_path}/Y.h5:obsm/points"),
        }
        for name, pair in given.items():
            torchgw.solve_rows(*pair, tmp_path / name, **SMALL)
            assert contents(tmp_path / name) == contents(solved.folder), name
    assert [table.most for table in given["recorded"]] == [400, 400]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_backed_anndata_is_read_by_rows(solved, tmp_path):
    anndata = pytest.importorskip("anndata")
    anndata.AnnData(X, obsm={"X_pca": X}).write_h5ad(tmp_path / "X.h5ad")
    backed = anndata.read_h5ad(tmp_path / "X.h5ad", backed="r")
    for name, table in (("X", backed.X), ("obsm", f"{tmp_path}/X.h5ad:obsm/X_pca")):
        torchgw.solve_rows(table, Y, tmp_path / name, **SMALL)
        assert contents(tmp_path / name) == contents(solved.folder), name


def test_parquet_is_read_by_its_groups(solved, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({name: X[:, k] for k, name in enumerate("xyz")})
    parquet.write_table(table, tmp_path / "X.parquet", row_group_size=170)
    read = Rows("X", tmp_path / "X.parquet")
    assert np.array_equal(read.read(slice(160, 345), torch.device("cpu")), X[160:345])
    torchgw.solve_rows(tmp_path / "X.parquet", Y, tmp_path / "out", **SMALL)
    assert contents(tmp_path / "out") == contents(solved.folder)


def test_an_ended_call_goes_on(solved, tmp_path, monkeypatch):
    written = module.write_archive

    def ending(path, tree, arrays):
        if "X-000000000800" in str(path):
            raise KeyboardInterrupt
        written(path, tree, arrays)

    with monkeypatch.context() as patched:
        patched.setattr(module, "write_archive", ending)
        with pytest.raises(KeyboardInterrupt):
            torchgw.solve_rows(X, Y, tmp_path, **SMALL)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*-*.npz")}
    # some blocks are matched while others are written
    assert 2 <= len(kept) < 8
    torchgw.solve_rows(X, Y, tmp_path, **SMALL)
    assert contents(tmp_path) == contents(solved.folder)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    with pytest.raises(InvalidInputError, match="holds the result of another call"):
        torchgw.solve_rows(X, Y, tmp_path, **SMALL | {"epsilon": 0.1})


def test_a_disk_that_is_full_is_named(tmp_path):
    """Files may not grow beyond some size, which a write meets as it does a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(InvalidInputError, match=r"cannot write .*npz: File too large"):
            torchgw.solve_rows(X, Y, tmp_path, **SMALL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.glob("*"))


def test_weights_count(solved, tmp_path):
    """Rows without weight change nothing but their own answers, though some are of the base."""
    far = np.concatenate([X, X[:300] + [0, 0, 0.02]])
    weights = np.concatenate([np.full(N, 2.0), np.zeros(300)])
    found = torchgw.solve_rows(far, Y, tmp_path / "far", a=weights, **SMALL)
    assert found.marginal_error < 0.05
    assert found.value == pytest.approx(solved.value, rel=0.2, abs=2e-4)
    missed = np.abs(AT_Y[found.rows(0, N)["partner"]] - AT_X).mean()
    assert missed < 0.03
    with pytest.raises(InvalidInputError, match="`a` must be non-negative"):
        torchgw.solve_rows(far, Y, tmp_path / "no", a=-weights, **SMALL)
    with pytest.raises(InvalidInputError, match="`a` must have a positive sum"):
        torchgw.solve_rows(far, Y, tmp_path / "no", a=0 * weights, **SMALL)
    with pytest.raises(InvalidInputError, match=r"`a` must have shape \(1500,\); got"):
        torchgw.solve_rows(X, Y, tmp_path / "no", a=weights, **SMALL)


def test_new_points_go_where_rows_go(solved):
    places = solved.transform(X[:50])
    assert np.allclose(places, solved.rows(0, 50)["place"], atol=1e-5)
    assert "1,500 x 1,300 rows" in repr(solved)


def test_the_command_line_writes_a_folder(solved, tmp_path, capsys):
    np.save(tmp_path / "X.npy", X)
    np.save(tmp_path / "Y.npy", Y)
    np.save(tmp_path / "a.npy", np.full(N, 3.0))
    call = ["align", str(tmp_path / "X.npy"), str(tmp_path / "Y.npy")]
    call += ["-o", f"{tmp_path}/out/", "--epsilon", "5e-3", "--base", "128"]
    call += ["--device", "cpu", "--seed", "0"]
    assert main([*call, "--a", str(tmp_path / "a.npy")]) == 0
    assert "1500 and 1300 rows" in capsys.readouterr().out
    found = torchgw.RowsResult(tmp_path / "out").rows()
    assert np.allclose(found["potential"], solved.rows()["potential"], atol=1e-9)
    call[4] = f"{tmp_path}/stopped/"
    assert main([*call, "--time-limit", "1e-3"]) == 1
    assert "status           STOPPED" in capsys.readouterr().out
    assert main([*call, "--plan"]) == 2
    assert "--plan: an output that ends in / is a folder" in capsys.readouterr().err


def test_refusals(tmp_path):
    h5py = pytest.importorskip("h5py")
    with pytest.raises(InvalidInputError, match=r"there is no .*missing.npy"):
        torchgw.solve_rows(tmp_path / "missing.npy", Y, tmp_path, **SMALL)
    (tmp_path / "X.csv").write_text("1,2")
    with pytest.raises(InvalidInputError, match="is not read by rows"):
        torchgw.solve_rows(tmp_path / "X.csv", Y, tmp_path, **SMALL)
    with h5py.File(tmp_path / "X.h5ad", "w") as file:
        file["obsm/pca"] = X
    with pytest.raises(InvalidInputError, match=r"h5ad has no X, but obsm"):
        torchgw.solve_rows(tmp_path / "X.h5ad", Y, tmp_path, **SMALL)
    with pytest.raises(torchgw.InvalidTypeError, match=r"`X` must be a table \(n, d\)"):
        torchgw.solve_rows(X[:, 0], Y, tmp_path, **SMALL)
    with pytest.raises(InvalidInputError, match=r"`X` must have shape \(n, d\), one row per point"):
        torchgw.solve_rows(X[:0], Y, tmp_path, **SMALL)


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor, Recorded])
def test_the_first_bad_row_is_named(tmp_path, kind):
    """Wherever it is read first: among rows that are drawn, or in its block."""
    bad = X.copy()
    bad[[501, 1_200]] = np.nan
    with pytest.raises(InvalidInputError, match=r"`X` .* NaN or infinite.* first such row is 501"):
        torchgw.solve_rows(kind(bad), Y, tmp_path, **SMALL)
    with pytest.raises(InvalidInputError, match=r"shape \(1500, 3\).* \[400:800\] .*\(400, 2\)"):
        torchgw.solve_rows(Ragged(X), Y, tmp_path, **SMALL)


class Ragged(Recorded):
    """A table whose second block has too few columns."""

    def __getitem__(self, rows):
        part = super().__getitem__(rows)
        return part[:, :2] if rows.start == 400 else part


def test_a_base_smaller_than_the_number_of_blocks(tmp_path):
    """Blocks of which no row is drawn; and rows that are whole numbers."""
    steps = np.arange(120).reshape(60, 2) % 37
    call = {"epsilon": 0.05, "n_base": 12, "block": 4, "device": "cpu"}
    files = []
    for name, kind in (("whole", np.int32), ("real", np.float64)):
        torchgw.solve_rows(steps.astype(kind), steps[::-1].astype(kind), tmp_path / name, **call)
        files.append(contents(tmp_path / name))
    assert len(files[0]) == 30
    assert files[0] == files[1]


def test_a_call_whose_time_is_up_goes_on(solved, tmp_path):
    with pytest.warns(torchgw.ConvergenceWarning, match="The same call, with the same folder, go"):
        stopped = torchgw.solve_rows(X, Y, tmp_path, **SMALL, time_limit=0)
    assert stopped.status == "STOPPED"
    assert not stopped.converged
    assert np.isnan(stopped.value)
    assert len(contents(tmp_path)) == 1
    assert np.array_equal(stopped.rows(3, 7)["partner"], solved.rows(3, 7)["partner"])
    for side, start, stop in (("X", 0, 401), ("X", 800, 800), ("Y", 0, None)):
        with pytest.raises(InvalidInputError, match=rf"rows \[{start}:.* of {side} are not there"):
            stopped.rows(start, stop, side=side)
    whole = torchgw.solve_rows(X, Y, tmp_path, **SMALL, time_limit=1e6)
    assert contents(tmp_path) == contents(solved.folder)
    assert (whole.value, whole.status) == (solved.value, solved.status)
    assert len(solved.rows(1_300, 900)["partner"]) == 0


def test_what_is_missing_is_cut_into_blocks_anew():
    """Such as after a call whose rows were dealt out among more processes."""
    table = Rows("X", X)
    done = [(0, 400), (700, 800), (900, 1_500)]
    left = table.blocks(250, 0, 1, done)
    assert [(rows.start, rows.stop) for rows in left] == [(400, 650), (650, 700), (800, 900)]
    assert table.blocks(250, 1, 2, done) == [slice(650, 700)]
    assert not table.blocks(250, 0, 1, [(0, 1_500)])


def test_a_disk_that_will_be_full_is_named(tmp_path, monkeypatch):
    free = module.disk_usage(tmp_path)._replace(free=2**10)
    monkeypatch.setattr(module, "disk_usage", lambda path: free)
    with pytest.raises(InvalidInputError, match=r"its 8 blocks take .* GiB, and .* are free"):
        torchgw.solve_rows(X, Y, tmp_path, **SMALL)
    assert not contents(tmp_path)


def test_a_large_error_is_told(tmp_path):
    with pytest.warns(torchgw.ConvergenceWarning, match="Pass a larger `n_base`, such as 64"):
        torchgw.solve_rows(X, Y, tmp_path, **SMALL | {"n_base": 16, "epsilon": 5e-3})
