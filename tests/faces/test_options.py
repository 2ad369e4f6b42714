"""One table of options: the same name, default and refusal wherever an option is given."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
import torch

import torchgw
from torchgw import InvalidTypeError, Options, TorchGWError
from torchgw._api import DATA, solve
from torchgw._problem.table import FORMER, TABLE, spelled
from torchgw.cli import main
from torchgw.cli._align import _solve_settings
from torchgw.cli._arguments import spoken
from torchgw.cli._main import _parser

X = np.random.default_rng(0).normal(size=(12, 2))
RARE = [name for name, option in TABLE.items() if not option.common]
COMMON = [name for name in TABLE if name not in RARE]
# A value of each that is not the default, and one that cannot be meant.
VALUES = {
    "distances": ("euclidean", "chebyshev"), "feature_metric": ("cosine", "manhattan"),
    "alpha": (0.25, 1.5), "loss": ("kl", "hinge"), "n_neighbors": (5, 0), "n_landmarks": (6, 0),
    "curvature": (2.0, -1.0), "disconnected": ("fill", "drop"), "scale": ("max", "median"),
    "epsilon": (0.1, -1.0), "gradient": ("dense", "exact"), "n_anchors": (64, 0),
    "redraw": (0.5, 1.5), "n_init": (2, 0), "search": ("fast", "slow"), "max_iter": (7, 0),
    "reflections": (False, "no"),
    "time_limit": (60.0, -1.0), "min_iter": (30, 0), "tol": (1e-3, -1.0),
    "objective_tol": (0.5, -1.0), "inner_max_iter": (50, 0), "inner_tol": (1e-6, -1.0),
    "unbalanced": (0.5, -1.0), "unbalanced_type": ("l2", "l1"),
    "unbalanced_unit": ("scale", "metre"), "mass": (0.5, 1.5),
    "regularization": ("proximal", "ridge"), "polish": (True, "yes"), "backend": ("eager", "even"),
    "device": ("cpu", "abacus"), "dtype": (torch.float32, torch.int32),
    "precision": ("float64", "half"), "storage": ("stored", "lost"), "skip_tiles": (False, "no"),
    "resolution": (1e-2, -1.0), "random_state": (3, -1), "cache": ("folder", 3),
    "callback": (print, "print"), "verbose": (True, "much"), "distributed": ("auto", "yes"),
    "checkpoint": ("file.npz", 3), "certify": (1e-2, -1.0), "differentiable": ("value", "yes"),
}  # fmt: skip
# Calls of many problems, whose `differentiable` is True or False; and of other problems, of which a
# plan of low rank may have an epsilon of zero.
MANY = (torchgw.solve_many, torchgw.solve_batch, torchgw.pairwise)
OTHERS = {
    torchgw.solve_many: {"Xs": [X], "Ys": [X]}, torchgw.pairwise: {"Xs": [X]},
    torchgw.solve_batch: {"D_X": np.ones((1, 2, 2)), "D_Y": np.ones((1, 2, 2))},
    torchgw.barycenter: {"spaces": [X], "n": 4},
    torchgw.solve_low_rank: {"X": X, "Y": X, "rank": 2, "epsilon": 0.0},
}  # fmt: skip


def refusal(call, *arguments, **named):
    with pytest.raises(TorchGWError) as caught:
        call(*arguments, **named)
    return str(caught.value)


def asked_by(monkeypatch, **named):
    """The options that a call of `solve` is read as."""
    seen = []
    monkeypatch.setattr("torchgw._api._solve", lambda *_, asked, **__: seen.append(asked))
    solve(X, X, **named)
    return seen[0]


def test_every_option_has_values_here():
    assert set(VALUES) == set(TABLE)


def test_solve_has_the_parameters_that_people_use():
    parameters = inspect.signature(solve).parameters
    assert [*parameters][-1] == "former"
    assert set(parameters) == {*DATA, *COMMON, "options", "former"}
    assert len(parameters) - 1 == 34
    hints = get_type_hints(solve)
    for name in COMMON:
        assert parameters[name].default == TABLE[name].default
        assert hints[name] == TABLE[name].type, "the type in the signature is that of the table"
    assert inspect.signature(torchgw.explain).parameters == parameters
    documented = re.findall(r"^([\w, ]+) : ", inspect.getdoc(solve), flags=re.M)
    assert set(", ".join(documented).split(", ")) == {*DATA, *COMMON, "options"}


@pytest.mark.parametrize("name", TABLE)
def test_a_value_is_taken_everywhere_alike(name, monkeypatch):
    value, _ = VALUES[name]
    expected = Options(**{name: value})
    assert expected.given == {name: value}
    assert asked_by(monkeypatch, options=expected) is expected
    if name in COMMON:
        assert asked_by(monkeypatch, **{name: value}) == expected
    flag = TABLE[name].flag
    if flag is not None:
        word = [flag] if value is True else [f"--no-{flag[2:]}"] if value is False else None
        parsed = _parser().parse_args(["explain", "X", "Y", *(word or [f"{flag}={value}"])])
        assert _solve_settings(parsed) == {name: value}


@pytest.mark.parametrize("name", TABLE)
def test_a_wrong_value_is_refused_everywhere_alike(name, tmp_path, capsys):
    _, wrong = VALUES[name]
    expected = refusal(Options, **{name: wrong})
    assert f"`{name}" in expected
    if name in COMMON:
        assert refusal(solve, X, X, **{name: wrong}) == expected
        assert refusal(torchgw.explain, X, X, **{name: wrong}) == expected
    for call, data in OTHERS.items():
        if name in set(inspect.signature(call).parameters) - {"differentiable", *data}:
            assert refusal(call, **data, **{name: wrong}) == expected
    flag = TABLE[name].flag
    # what is read as a number or a time by argparse, and refused by it, has its own test
    if flag is not None and isinstance(wrong, (str, float)) and name not in ("time_limit", "cache"):
        np.save(tmp_path / "X.npy", X)
        if not flag.startswith(("--polish", "--skip", "--reflections")):
            assert main(["explain", *[str(tmp_path / "X.npy")] * 2, f"{flag}={wrong}"]) == 2
            assert spoken(expected) in capsys.readouterr().err


@pytest.mark.parametrize("call", MANY)
def test_many_problems_have_the_same_defaults(call):
    parameters = inspect.signature(call).parameters
    shared = set(parameters) & set(TABLE) - {"differentiable"}
    assert len(shared) > 10
    for name in shared:
        assert parameters[name].default == TABLE[name].default


@pytest.mark.parametrize("call", MANY)
def test_many_problems_take_one_object(call):
    data = OTHERS[call] | ({"progress": False} if call is torchgw.pairwise else {})
    named = {"epsilon": 0.2, "tol": 1e-3, "inner_tol": 1e-6, "polish": True, "n_init": 1}
    first, second = call(**data, **named), call(**data, options=Options(**named))
    first, second = (getattr(result, "value", result) for result in (first, second))
    np.testing.assert_array_equal(first, second)
    with pytest.raises(TorchGWError, match="`gradient` is an option of torchgw.solve that"):
        call(**data, options=Options(gradient="dense"))
    with pytest.raises(TorchGWError, match="`tol` is given twice"):
        call(**data, tol=1e-2, options=Options(tol=1e-3))
    with pytest.raises(InvalidTypeError, match="`options` must be torchgw.Options"):
        call(**data, options=named)


def test_estimators_have_all_of_them():
    sklearn = pytest.importorskip("torchgw.sklearn", reason="needs scikit-learn")
    defaults = {name: option.default for name, option in TABLE.items() if name != "differentiable"}
    more = {"metric": None, "momentum": None}
    for estimator in (sklearn.GWAligner, sklearn.GWTransport):
        assert estimator().get_params() == defaults | more
        with pytest.raises(InvalidTypeError, match="Did you mean 'max_iter'"):
            estimator(maxiter=3)
        for name, (_, wrong) in VALUES.items():
            if name in defaults:
                made = estimator(**{name: wrong})
                fit = (X, None, X) if estimator is sklearn.GWTransport else (X, X)
                assert refusal(made.fit, *fit) == refusal(Options, **{name: wrong})
    for estimator in (sklearn.GWDistance, sklearn.GWKernel):
        own = {name: value for name, value in estimator().get_params().items() if name in TABLE}
        assert own == {name: TABLE[name].default for name in own}


def test_former_names_are_those_of_the_table():
    # options that came later never were parameters of their own
    assert set(FORMER) == {*RARE, "momentum"} - {"reflections"}


@pytest.mark.parametrize("name", FORMER)
def test_a_former_name_works_and_says_the_new_spelling(name, monkeypatch):
    now = "redraw" if name == "momentum" else name
    value, wrong = VALUES[now]
    with pytest.warns(DeprecationWarning, match="is now") as caught:
        asked = asked_by(monkeypatch, **{name: value})
    assert str(caught[0].message) == f"`{name}` is now options=torchgw.Options({now}=...)."
    assert caught[0].filename == __file__
    assert asked == Options(**{now: value})
    with pytest.warns(DeprecationWarning, match="is now"):
        assert refusal(solve, X, X, **{name: wrong}) == refusal(Options, **{now: wrong})


def test_an_option_is_given_once(monkeypatch):
    with pytest.raises(TorchGWError, match="`epsilon` is given twice: epsilon=0.1, and in options"):
        solve(X, X, epsilon=0.1, options=Options(epsilon=0.2))
    # what is the default says nothing
    options = Options(epsilon=0.2)
    assert asked_by(monkeypatch, epsilon="auto", tol=1e-5, options=options) is options
    assert asked_by(monkeypatch, tol=1e-3, options=options) == Options(epsilon=0.2, tol=1e-3)
    with pytest.raises(InvalidTypeError, match=r"`options` must be torchgw.Options.*got dict"):
        solve(X, X, options={"epsilon": 0.2})


def test_names_that_are_none_have_a_nearest_one():
    for call in (Options, solve):
        with pytest.raises(
            InvalidTypeError, match=r"no argument 'maxiter'. Did you mean 'max_iter"
        ):
            call(maxiter=3)
    with pytest.raises(InvalidTypeError, match=r"mean options=torchgw.Options\(inner_tol=...\)\?"):
        solve(X, X, innertol=1e-9)


def test_options_are_one_object_that_does_not_change():
    options = Options(tol=np.float64(1e-8), inner_tol=1e-10)
    assert repr(options) == "Options(tol=1e-08, inner_tol=1e-10)"
    assert repr(Options()) == "Options()"
    assert options == Options(inner_tol=1e-10, tol=1e-8) != Options(tol=1e-8)
    assert hash(options) == hash(Options(inner_tol=1e-10, tol=1e-8))
    assert pickle.loads(pickle.dumps(options)) == copy.deepcopy(options) == options
    assert options.replace(tol=1e-5) == Options(inner_tol=1e-10)
    with pytest.raises(FrozenInstanceError, match=r"options.replace\(tol=...\)"):
        options.tol = 1.0
    with pytest.raises(FrozenInstanceError):
        options.toll = 1.0
    with pytest.raises(FrozenInstanceError):
        del options.tol
    with pytest.raises(TorchGWError, match="`max_iter` must be an integer"):
        options.replace(max_iter=0)


def test_an_option_that_requires_a_gradient_keeps_it():
    epsilon = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    asked = Options(epsilon=epsilon, differentiable="value", distances="euclidean", scale=None)
    torchgw.solve(X, X, options=asked).loss.backward()
    assert epsilon.grad is not None
    with pytest.raises(TorchGWError, match="`epsilon` has gradients with `differentiable` only"):
        torchgw.solve(X, X, options=Options(epsilon=epsilon))
    with pytest.raises(TorchGWError, match="`epsilon` must be a positive finite number"):
        torchgw.solve(X, X, options=asked.replace(epsilon=epsilon - 1))


@pytest.mark.parametrize("name", TABLE)
def test_documentation_has_a_row(name):
    page = (Path(__file__).parents[2] / "docs" / "options.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| `{name}` \| (.*) \|$", page, flags=re.M)
    option = TABLE[name]
    for part in (f"`{option.default!r}`", option.flag or "", spelled(option.type)):
        assert part in row
    assert f"\n{name} : " in Options.__doc__
