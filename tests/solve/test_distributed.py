"""Solves that processes share: the same bits for any number of them, and nobody waits for ever."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import time
from pathlib import Path

import distributed_cases as cases
import numpy as np
import pytest
import torch
import torch.distributed as dist
from problems import solve_by_name

import torchgw
from torchgw import InvalidInputError, UnsupportedError
from torchgw._sinkhorn.choose import choose_backend
from torchgw._sinkhorn.problem import FactoredCost, LinearProblem
from torchgw._sinkhorn.tiles.eager import _SharedEngine
from torchgw._sinkhorn.tiles.tiling import Tiling
from torchgw._tensors.ranks import join
from torchgw._typing import Marginals, Potentials

# those that compile, or run in Triton's interpreter
SLOW = ["compile", "triton tiles"]
SCRIPT = Path(cases.__file__)
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def one(tmp_path):
    """A process group of this process alone."""
    threads = torch.get_num_threads()
    folder = tmp_path / "alone"
    folder.mkdir()
    cases.enter(0, 1, folder)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def start(size, folder, *words, script=SCRIPT):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(size), str(folder), *words],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip


def finish(processes, seconds=240):
    """Wait for all, and end those that are late."""
    end, texts = time.monotonic() + seconds, []
    try:
        for process in processes:
            process.output, errors = process.communicate(timeout=max(1, end - time.monotonic()))
            texts.append(errors)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return texts


def found_by(size, folder, *tasks):
    """What each of some processes finds at each of some tasks."""
    errors = finish(processes := start(size, folder, *tasks))
    assert [process.returncode for process in processes] == size * [0], errors
    (folder / "meeting").unlink(missing_ok=True)
    return [pickle.loads((folder / f"found{rank}").read_bytes()) for rank in range(size)]


def compare(size, names, folder, expected=None):
    """Compare what processes find with what one does; ``names`` are cases, or a function."""
    expected = expected or cases.run(names)
    same(expected, [found for (found,) in found_by(size, folder, "; ".join(names))])


def same(expected, found_by_ranks):
    for rank, found in enumerate(found_by_ranks):
        for name in expected:
            for key, value in expected[name].items():
                assert np.array_equal(found[name][key], value, equal_nan=True), (name, key, rank)
            assert np.isfinite(found[name]["f"]).all()


def test_ranks_share_the_tiles_of_sweeps(one):
    cpu = torch.device("cpu")
    backend = choose_backend("eager", cpu, torch.float64, Tiling((60, 50), 8), join(True, cpu))
    left, right = torch.rand(60, 3).double(), torch.rand(50, 3).double()
    weights = Marginals(torch.full((60,), 1 / 60).double(), torch.full((50,), 1 / 50).double())
    prepared = backend.prepare(LinearProblem(FactoredCost.of_products(left, right), weights, 0.1))
    start = Potentials(torch.zeros(60).double(), torch.zeros(50).double())
    engine = prepared.sweeper(start)._engine
    assert isinstance(engine, _SharedEngine)


SOME = ["tiles", "dense", "cells", "landmark", "one has it"]


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    """What two processes find at several tasks: to start them is most of the work."""
    folder = tmp_path_factory.mktemp("two")
    names = "makers", "batches", "spoiled", "rows", "full"
    by_ranks = found_by(2, folder, "; ".join(SOME), *names)
    return {name: [found[k] for found in by_ranks] for k, name in enumerate(("some", *names))}


# processes that are started move no arrays
@pytest.mark.exact
def test_two_processes_have_the_bits_of_one(one, of_two):
    same(cases.run(SOME), of_two["some"])


def test_ranks_make_things_for_each_other(of_two):
    for things, words in of_two["makers"]:
        assert [thing["by"] for thing in things] == [0, 1, 0]
        assert set(words) == {"0 by 0", "1 by 1", "2 by 0"}
        for number, thing in enumerate(things):
            table, empty = thing["tables"]
            assert torch.equal(table, torch.full((number, 3), number / 3, dtype=torch.float64))
            assert empty.shape == (0, number)
            assert thing["none"] is None


def test_processes_share_the_pairs_of_a_matrix(one, tmp_path):
    compare(3, ["matrix"], tmp_path, cases.matrix(tmp_path))
    with pytest.raises(UnsupportedError, match="`resume` is a file of one process"):
        torchgw.pairwise([cases.X], distributed=True, resume=tmp_path / "file")


@pytest.mark.exact
def test_two_processes_share_the_problems_of_a_batch(one, of_two):
    same(cases.batches(), of_two["batches"])


@pytest.mark.exact
def test_two_processes_share_the_rows_of_tables(one, tmp_path, of_two):
    same(cases.rows(tmp_path), of_two["rows"])


def test_a_process_whose_disk_is_full_ends_the_others(of_two):
    first, second = of_two["full"]
    wanted = r"InvalidInputError: cannot write .*-000000000\d00.npz: File too large"
    assert re.search(f"^RankError: .*rank 1 ended with {wanted}", first)
    assert re.search(f"^{wanted}", second)


@pytest.mark.exact
def test_a_killed_process_is_named_and_the_others_go_on_with_its_rows(one, tmp_path):
    expected = cases.by_rows(tmp_path, "whole", distributed=False)
    finish(processes := start(3, tmp_path, "killed"))
    assert [process.returncode for process in processes] == [3, 3, -9]
    died = (tmp_path / "died").stat().st_mtime
    for process in processes[:2]:
        told, when = process.output.split("; told at ")
        assert "rank 2 does not answer" in told
        assert float(when) - died < 60
    assert 0 < len(list((tmp_path / "rows").glob("*-*.npz"))) < 14
    # one goes on with what three began
    same({"rows": expected}, [{"rows": cases.by_rows(tmp_path, distributed=False)}])


@pytest.mark.slow
def test_three_processes_share_the_problems_of_a_batch(one, tmp_path):
    compare(3, ["batches"], tmp_path, cases.batches())


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_process_that_cannot_read_its_spaces_ends_the_others(tmp_path, request, size):
    if size == 2:
        told = request.getfixturevalue("of_two")["spoiled"]
    else:
        told = [words for (words,) in found_by(3, tmp_path, "spoiled")]
    for rank, words in enumerate(told):
        assert len(words) == 4
        for nan, other in (words[:2], words[2:]):
            wanted = (
                r"^InvalidInputError: " if rank == 1 else r"^RankError: .*rank 1 ended with Inv"
            )
            assert re.search(wanted, nan), (rank, nan)
            assert re.search("^RankError: The ranks have come apart: the start of a hash", other)


def test_processes_save_and_read_a_result_together(one, tmp_path):
    """Each writes some rows; any number of processes reads the whole, or shares of it."""
    (tmp_path / "one").mkdir()
    expected, kept = cases.files(tmp_path / "one"), []
    # the files of three take the place of those of two
    for size in (2, 3):
        compare(size, ["files"], tmp_path, expected)
        whole, together = (torchgw.load(tmp_path / f"{how}.npz") for how in ("alone", "together"))
        assert np.array_equal(together.potential_a, whole.potential_a)
        assert together.value == whole.value
        parts = [torchgw.load(tmp_path / f"part{rank}.npz") for rank in range(size)]
        assert np.array_equal(np.concatenate([part.marginal_a for part in parts]), whole.marginal_a)
        products = [part.lazy_plan @ cases.Y for part in parts]
        assert max(map(len, products)) == -(-len(cases.X) // size)
        assert np.allclose(np.concatenate(products), whole.lazy_plan @ cases.Y, rtol=1e-6)
        kept.append((tmp_path / "together.npz.1").read_bytes())
    (tmp_path / "together.npz.1").write_bytes(kept[0])
    with pytest.raises(InvalidInputError, match=r"together.npz.1: no part of what"):
        torchgw.load(tmp_path / "together.npz")
    (tmp_path / "together.npz.1").unlink()
    with pytest.raises(InvalidInputError, match="there is no such file"):
        torchgw.load(tmp_path / "together.npz")


@pytest.mark.parametrize("size", [3, 4])
def test_more_processes_than_sides_share_the_sources_of_paths(one, tmp_path, size):
    names = ["landmark", "neighbours", "wide neighbours", "geodesic"]
    names += ["graph", "graph landmark", "graph dijkstra"]
    expected = cases.run(names), cases.rows(tmp_path / "one")
    by_ranks = found_by(size, tmp_path, "; ".join(names), "rows")
    for found, wanted in zip(zip(*by_ranks, strict=True), expected, strict=True):
        same(wanted, found)


def test_more_processes_than_sides_share_a_cache(one, tmp_path):
    (tmp_path / "one").mkdir()
    compare(3, ["cached"], tmp_path, cases.cached(tmp_path / "one"))
    names = [
        {path.name for path in tmp_path.glob(f"{place}/*")} for place in ("one/cache0", "cache0")
    ]
    assert names[0] == names[1]
    assert len(names[0]) == 4
    # the others have read what the first one has
    assert not (tmp_path / "cache2").exists()


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_any_number_has_the_bits_of_one(one, tmp_path, size):
    compare(size, [name for name in cases.CASES if name not in SLOW], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_compiled_backends_have_the_bits_of_one(one, tmp_path, name):
    compare(3, [name], tmp_path)


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("tiles", "cpu"),
        pytest.param("dense", "cpu", marks=pytest.mark.slow),
        # NCCL's group of one
        *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in ("tiles", "landmark")),
    ],
)
def test_one_process_of_a_group_solves_the_same_problem(one, name, device):
    """Up to rounding: sums are taken in another order."""
    options = {**cases.LITTLE, **cases.CASES[name], "epsilon": 0.02, "max_iter": 40}
    options["device"] = device
    shared, alone = (solve_by_name(**options, distributed=how) for how in ("auto", False))
    assert shared.value == pytest.approx(alone.value, rel=1e-5)
    # what is asked of a result needs no other process
    assert type(shared.lazy_plan.backend) is type(alone.lazy_plan.backend)


def test_what_only_another_rank_has_is_refused(one, monkeypatch):
    def gather(table, mine):
        table[:] = [mine, [*mine, "M"]]

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    with pytest.raises(InvalidInputError, match="Rank 1 passes `M`, and rank 0 does not"):
        torchgw.solve(cases.X, cases.Y, options=torchgw.Options(distributed=True))


def test_refusals():
    X = cases.X
    with pytest.raises(UnsupportedError, match="torchrun --nproc-per-node"):
        torchgw.solve(X, X, options=torchgw.Options(distributed=True))
    with pytest.raises(InvalidInputError, match="`distributed` must be True, False or 'auto'"):
        torchgw.solve(X, X, options=torchgw.Options(distributed=2))
    for option in ({"polish": True}, {"differentiable": "value", "epsilon": 0.1}):
        with pytest.raises(UnsupportedError, match="cannot share out"):
            solve_by_name(X, X, distributed="auto", **option)
