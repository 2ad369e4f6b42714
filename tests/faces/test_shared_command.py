"""``torchgw --processes N align``, and results read by another process."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from torchgw.cli import main

SOLVE = ["--distances", "sqeuclidean", "--epsilon", "0.1", "--n-init", "1", "--seed", "0"]
READ = "import sys, torchgw; print(torchgw.load(sys.argv[1]).value)"


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name, count in (("X", 70), ("Y", 60)):
        np.save(f"{name}.npy", rng.normal(size=(count, 2)))


def run(*words):
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_the_first_process_writes_and_prints(files):
    for count in ("1", "2"):
        command = ["--processes", count, "align", "X.npy", "Y.npy", "-o", f"{count}.npz", *SOLVE]
        code, output, _ = run("-m", "torchgw", *command)
        assert code == 0
        assert output.count("written") == 1
    one, two = np.load("1.npz"), np.load("2.npz")
    for part in ("f", "g", "value", "matching"):
        assert np.array_equal(one[part], two[part])
    # by a process that has solved nothing
    code, output, errors = run("-c", READ, "2.npz")
    assert code == 0, errors
    assert float(output) == float(two["value"])


@pytest.mark.slow
def test_code_and_words_are_those_of_one_process(files):
    command = ["--processes", "2", "align", "X.npy", "Y.npy", "-o", "out.npz"]
    code, _, errors = run("-m", "torchgw", *command, "--epsilon", "-1")
    assert code == 2
    assert errors.count("torchgw: error: --epsilon ") == 1
    code, output, _ = run("-m", "torchgw", *command, *SOLVE, "--max-iter", "1", "--quiet")
    assert (code, output) == (1, "")


def test_refusals(files, capsys):
    assert main(["--gpus", "99", "align", "X.npy", "Y.npy", "-o", "out.npz"]) == 2
    assert "--processes" in capsys.readouterr().err
    assert main(["--processes", "2", "info"]) == 2
    assert "`align` alone" in capsys.readouterr().err
