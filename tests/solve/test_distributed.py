"""Solves that processes share: the same bits for any number of them, and nobody waits for ever."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import distributed_cases as cases
import numpy as np
import pytest
import torch
import torch.distributed as dist

import torchgw
from torchgw import InvalidInputError, UnsupportedError
from torchgw._sinkhorn.choose import choose_backend
from torchgw._sinkhorn.cost import FactoredCost
from torchgw._sinkhorn.problem import LinearProblem
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


def finish(processes, seconds=120):
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


def compare(size, names, folder):
    expected = cases.run(names)
    processes = start(size, folder, *names)
    errors = finish(processes)
    assert [process.returncode for process in processes] == size * [0], errors
    for rank in range(size):
        found = pickle.loads((folder / f"found{rank}").read_bytes())
        for name in names:
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


def test_two_processes_have_the_bits_of_one(one, tmp_path):
    compare(2, ["tiles", "dense", "cells", "landmark", "one has it"], tmp_path)


def test_ranks_make_things_for_each_other(tmp_path):
    processes = start(2, tmp_path, "makers")
    errors = finish(processes)
    assert [process.returncode for process in processes] == [0, 0], errors
    for rank in range(2):
        things, words = pickle.loads((tmp_path / f"found{rank}").read_bytes())
        assert [thing["by"] for thing in things] == [0, 1, 0]
        assert set(words) == {"0 by 0", "1 by 1", "2 by 0"}
        for number, thing in enumerate(things):
            table, empty = thing["tables"]
            assert torch.equal(table, torch.full((number, 3), number / 3, dtype=torch.float64))
            assert empty.shape == (0, number)
            assert thing["none"] is None


def test_three_processes_share_the_sources_of_landmarks(one, tmp_path):
    compare(3, ["landmark"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_any_number_has_the_bits_of_one(one, tmp_path, size):
    compare(size, [name for name in cases.CASES if name not in SLOW], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_compiled_backends_have_the_bits_of_one(one, tmp_path, name):
    compare(3, [name], tmp_path)


@pytest.mark.parametrize("name", ["tiles", pytest.param("dense", marks=pytest.mark.slow)])
def test_one_process_of_a_group_solves_the_same_problem(one, name):
    """Up to rounding: sums are taken in another order."""
    options = {**cases.LITTLE, **cases.CASES[name], "epsilon": 0.02, "max_iter": 40}
    shared, alone = (torchgw.solve(**options, distributed=how) for how in ("auto", False))
    assert shared.value == pytest.approx(alone.value, rel=1e-5)
    # what is asked of a result needs no other process
    assert type(shared.lazy_plan.backend) is type(alone.lazy_plan.backend)


def test_what_only_another_rank_has_is_refused(one, monkeypatch):
    def gather(table, mine):
        table[:] = [mine, [*mine, "M"]]

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    with pytest.raises(InvalidInputError, match="Rank 1 passes `M`, and rank 0 does not"):
        torchgw.solve(cases.X, cases.Y, distributed=True)


def test_refusals():
    X = cases.X
    with pytest.raises(UnsupportedError, match="torchrun --nproc-per-node"):
        torchgw.solve(X, X, distributed=True)
    with pytest.raises(InvalidInputError, match="`distributed` must be True, False or 'auto'"):
        torchgw.solve(X, X, distributed=2)
    for option in ({"polish": True}, {"differentiable": "value", "epsilon": 0.1}):
        with pytest.raises(UnsupportedError, match="cannot share out"):
            torchgw.solve(X, X, distributed="auto", **option)
