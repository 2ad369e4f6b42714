"""Solves that go on from a file: in one process, and in another number of them."""

from __future__ import annotations

import pickle
import signal
from pathlib import Path

import distributed_cases as cases
import numpy as np
import pytest
from problems import solve_by_name
from test_distributed import finish, start

import torchgw
from torchgw import InvalidInputError
from torchgw._solve import state

pytestmark = pytest.mark.filterwarnings("ignore")


class PowerCutError(Exception):
    pass


def cut_after(count):
    def callback(entry):
        if entry.iteration == count:
            raise PowerCutError

    return callback


@pytest.mark.parametrize(
    "name",
    ["tiles", *(pytest.param(n, marks=pytest.mark.slow) for n in ("dense", "sampled", "partial"))],
)
def test_a_solve_goes_on(tmp_path, monkeypatch, name):
    monkeypatch.setattr(state, "WRITTEN_EVERY", 0.0)
    options = {**cases.LITTLE, **cases.CASES[name], "max_iter": 60, "epsilon": 0.02}
    if name == "sampled":
        options["n_anchors"] = 512
    path = tmp_path / "state"
    with pytest.raises(PowerCutError):
        solve_by_name(**options, checkpoint=path, callback=cut_after(9))
    assert [path] == list(tmp_path.iterdir())
    whole, rest = solve_by_name(**options), solve_by_name(**options, checkpoint=path)
    assert rest.history[0].iteration == 10
    assert rest.history[0].epsilon == whole.history[10].epsilon
    assert rest.value == pytest.approx(whole.value, rel=0.1 if name == "sampled" else 1e-3)
    assert not path.exists()


def test_a_stopped_solve_is_kept(tmp_path):
    path, options = tmp_path / "state", cases.LITTLE | cases.CASES["dense"]
    solve_by_name(**options, checkpoint=path, callback=lambda entry: entry.iteration == 2)
    assert solve_by_name(**options, checkpoint=path).history[0].iteration == 3


def test_refusals(tmp_path):
    path, options = tmp_path / "state", cases.LITTLE | cases.CASES["dense"]
    with pytest.raises(InvalidInputError, match="no directory"):
        solve_by_name(**options, checkpoint=tmp_path / "absent" / "state")
    solve_by_name(**options, checkpoint=path, callback=lambda entry: True)
    with pytest.raises(InvalidInputError, match="of another problem"):
        solve_by_name(**{**options, "epsilon": 0.1}, checkpoint=path)
    with pytest.raises(InvalidInputError, match="holds a checkpoint"):
        torchgw.load(path)
    torchgw.solve(**options).save(path)
    with pytest.raises(InvalidInputError, match="no checkpoint of a solve"):
        solve_by_name(**options, checkpoint=path)


KILLED = """
import os, pickle, signal, sys, warnings
sys.path.insert(0, {folder!r})
import distributed_cases as cases
import torchgw
from torchgw._solve import state
warnings.simplefilter("ignore")
state.WRITTEN_EVERY = 0.0
rank, size, folder, kill = sys.argv[1:]
os.makedirs(folder + "/" + size, exist_ok=True)
cases.enter(int(rank), int(size), folder + "/" + size)

def callback(entry):
    if kill == "kill" and entry.iteration == 5 and rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)

result = torchgw.solve(
    **cases.LITTLE | cases.CASES["tiles"] | {{"max_iter": 40}}, distributed=True, callback=callback,
    checkpoint=folder + "/state",
)
if rank == "0":
    found = cases.numbers(result), result.history[0].iteration
    open(folder + "/found" + size, "wb").write(pickle.dumps(found))
os._exit(0)
"""


@pytest.fixture
def taken(tmp_path):
    """A script, and a state that two processes have left, of which one was killed."""
    script, state = tmp_path / "script.py", tmp_path / "state"
    script.write_text(KILLED.format(folder=str(Path(__file__).parent)))
    processes = start(2, tmp_path, "kill", script=script)
    finish(processes)
    assert processes[1].returncode == -signal.SIGKILL
    assert processes[0].returncode == 1
    return script, state


def test_taken_by_two_and_continued_by_one(taken):
    options = cases.LITTLE | cases.CASES["tiles"] | {"max_iter": 40}
    rest = solve_by_name(**options, checkpoint=taken[1])
    assert rest.history[0].iteration == 6
    assert rest.value == pytest.approx(solve_by_name(**options).value, rel=1e-3)
    assert not taken[1].exists()


@pytest.mark.slow
def test_taken_by_two_and_continued_by_three(tmp_path, taken):
    script, state = taken
    kept = state.read_bytes()
    found = {}
    for size in (3, 1):
        state.write_bytes(kept)
        processes = start(size, tmp_path, "go on", script=script)
        errors = finish(processes)
        assert [process.returncode for process in processes] == size * [0], errors
        found[size], first = pickle.loads((tmp_path / f"found{size}").read_bytes())
        assert first == 6
        assert not state.exists()
    for key, value in found[1].items():
        assert np.array_equal(found[3][key], value), key
