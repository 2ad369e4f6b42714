"""Matrices of values: symmetry, resuming, processes."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import torchgw

# of one start, whose bits and answers are those of the engine alone; searches have their own tests
pairwise = partial(torchgw.pairwise, n_init=1)
solve_many = partial(torchgw.solve_many, n_init=1)
RNG = np.random.default_rng(0)
XS = [RNG.normal(size=(n, 2)) for n in (8, 18, 11, 17, 9)]
QUIET = {"epsilon": 0.05, "progress": False}

# A slow job, in a process that is to be killed.
JOB = """
import sys
import numpy as np, torch, torchgw
from torchgw._many import pairwise as module
module.LONG, module._FIRST_CHUNK = 0.05, 4
rng = np.random.default_rng(1)
Xs = [rng.normal(size=(n, 3)) for n in rng.integers(8, 16, 16)]
print("begin", flush=True)
values = torchgw.pairwise(Xs, resume=sys.argv[1], epsilon=0.02, progress=False, n_init=1)
np.save(sys.argv[2], values)
"""


@pytest.mark.slow
def test_entries_are_those_of_solve_many():
    matrix = pairwise(XS, **QUIET)
    rows, columns = np.divmod(np.arange(25), 5)
    half = rows <= columns
    batch = solve_many([XS[i] for i in rows[half]], [XS[j] for j in columns[half]], epsilon=0.05)
    assert np.array_equal(matrix[rows[half], columns[half]], batch.value)
    assert np.array_equal(matrix, matrix.T)
    whole = pairwise(XS, symmetric=False, **QUIET)
    np.testing.assert_allclose(whole, matrix, rtol=1e-4, atol=1e-7)
    rest = pairwise(XS[:2], XS[2:], **QUIET)
    assert np.array_equal(rest, matrix[:2, 2:])
    objective = pairwise(XS, output="objective", **QUIET)
    assert np.array_equal(objective[rows[half], columns[half]], batch.objective)


def test_pairs_are_computed_once_and_put_in_their_order():
    matrix = pairwise(XS, **QUIET)
    pairs = [(3, 1), (1, 3), (0, 0), (3, 1), (4, 2)]
    found = pairwise(XS, pairs=pairs, **QUIET)
    assert np.array_equal(found, [matrix[i, j] for i, j in pairs])
    table = pairwise(XS[:2], XS[2:], pairs=[(1, 2), (0, 0)], **QUIET)
    assert np.array_equal(table, [matrix[1, 4], matrix[0, 2]])


@pytest.mark.parametrize(
    "pairs", ["all", [(0.0, 1.0)], [(True, False)], [("a", "b")], [], [(0, 9)]]
)
def test_pairs_that_are_no_places_are_refused(pairs):
    with pytest.raises((torchgw.InvalidInputError, torchgw.InvalidTypeError), match="`pairs`"):
        pairwise(XS, pairs=pairs, **QUIET)


def test_features_and_weights_belong_to_spaces():
    features = [RNG.normal(size=(len(x), 3)) for x in XS]
    weights = [RNG.dirichlet(np.ones(len(x))) for x in XS]
    matrix = pairwise(XS, a=weights, features=features, alpha=0.4, **QUIET)
    batch = solve_many(
        XS[:1], XS[1:2], a=weights[:1], b=weights[1:2], features=(features[:1], features[1:2]),
        alpha=0.4, epsilon=0.05,
    )  # fmt: skip
    assert float(matrix[0, 1]) == float(batch.value[0])


def test_a_file_is_used_again_and_only_for_the_same_job(tmp_path):
    path = tmp_path / "values.npz"
    matrix = pairwise(XS, resume=path, **QUIET)
    written = path.stat().st_mtime_ns
    assert np.array_equal(pairwise(XS, resume=path, **QUIET), matrix)
    assert path.stat().st_mtime_ns == written
    with pytest.raises(torchgw.InvalidInputError, match="other spaces"):
        pairwise(XS[:4], resume=path, **QUIET)
    with pytest.raises(torchgw.InvalidInputError, match="other spaces"):
        pairwise(XS, resume=path, epsilon=0.04, progress=False)


@pytest.mark.slow
def test_a_killed_job_goes_on_with_the_same_bits(tmp_path):
    resume, whole, part = (tmp_path / name for name in ("a.npz", "whole.npy", "part.npy"))
    root = str(Path(torchgw.__file__).parents[1])
    command = [sys.executable, "-W", "ignore", "-c", JOB]
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen([*command, str(resume), str(part)], env=environment)
    deadline = time.monotonic() + 60
    while not resume.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    job.send_signal(signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    assert not part.exists()
    with np.load(resume) as stored:
        done = int(np.isfinite(stored["numbers"][0]).sum())
    assert 0 < done < 136
    subprocess.run([*command, str(resume), str(part)], env=environment, check=True)
    subprocess.run([*command, str(tmp_path / "b.npz"), str(whole)], env=environment, check=True)
    assert np.array_equal(np.load(part), np.load(whole))
    assert np.isfinite(np.load(part)).all()


@pytest.mark.slow
def test_processes_give_the_same_bits():
    assert np.array_equal(pairwise(XS, n_jobs=2, **QUIET), pairwise(XS, **QUIET))


def test_pairs_that_take_long_are_said_after_the_first_and_once(monkeypatch):
    """A grid search over 100 spaces searched 5,050 pairs, and said nothing for half an hour."""
    module = importlib.import_module("torchgw._many.pairwise")
    chunks = []

    def solved(job, i, j):
        chunks.append(len(i))
        return np.zeros((len(module.Numbers._fields), len(i)))

    monkeypatch.setattr(module, "_solve_chunk", solved)
    monkeypatch.setattr(module, "_FIRST_SEARCHED", 2)
    small, large = ([np.eye(n)] * 4 for n in (3, 33))

    def warned(longest, spaces, **options):
        monkeypatch.setattr(module, "LONG", longest)
        with warnings.catch_warnings(record=True) as made:
            warnings.simplefilter("always")
            torchgw.pairwise(spaces, progress=False, **options)
        return [str(one.message) for one in made if one.category is torchgw.PerformanceWarning]

    assert not warned(np.inf, small)
    (text,) = warned(-1.0, small)
    assert text.startswith("These pairs take long, as each is searched: 8 more take about")
    assert chunks == 2 * [2, 8]
    # single starts are quick; beside small pairs so are larger ones, which come last
    assert not warned(-1.0, small, n_init=1)
    assert "8 more take" in warned(-1.0, large)[0]
    (text,) = warned(-1.0, small[:2] + large)
    # one of 3 x 3 points, and all of 3 x 33
    assert "9 more" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"symmetric": True, "Ys": XS}, "another list"),
        ({"pairs": [(0, 5)]}, "places in lists"),
        ({"pairs": [0.5]}, "shape"),
        ({"output": "plan"}, "`output` must be"),
        ({"b": [None] * 5}, "second list"),
        ({"mass": 1.5}, "`mass` must be"),
        ({"unbalanced": (0.1, 0.2), "symmetric": True}, "same `unbalanced`"),
        ({"n_jobs": 0}, "`n_jobs`"),
        ({"resume": "/nowhere/file"}, "cannot write"),
        ({"epsilon": "small"}, "`epsilon`"),
        ({"feature_metric": "cosine"}, "without `features`"),
        ({"distances": ["euclidean"]}, "a pair of them; got 1"),
        ({"distances": ("euclidean", "cosine")}, "one list of spaces"),
        ({"a": 3}, "`a` must be a list"),
        ({"features": 3}, "`features` must be a list"),
        ({"features": 3, "Ys": XS}, "pair of lists"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(torchgw.TorchGWError, match=message):
        pairwise(XS, **options)


def test_tables_have_known_distances_all_the_same():
    tables = [np.abs(np.subtract.outer(X[:, 0], X[:, 0])) for X in XS]
    with pytest.raises(torchgw.InvalidInputError, match="`distances` must be one of"):
        solve_many(D_X=tables, D_Y=tables, distances="manhattan")
    with pytest.raises(torchgw.InvalidInputError, match="without `features`"):
        solve_many(XS, XS, feature_metric="cosine")


@pytest.mark.parametrize("function", [pairwise, solve_many])
def test_options_may_be_numbers_of_numpy(function):
    given = {"tol": np.float32(1e-4), "inner_tol": np.float32(1e-6), "max_iter": np.int64(90)}
    plain = {name: value.item() for name, value in given.items()}
    both = [function(XS[:2], XS[:2], epsilon=0.05, **options) for options in (given, plain)]
    first, second = (np.asarray(getattr(one, "value", one)) for one in both)
    assert np.array_equal(first, second)
