"""docs/architecture.md says what is so: its picture, nouns and trace, and recipes that work."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np
import pytest
import recipe_checks
from problems import distance_matrices, random_weights, solve_by_name
from test_packaging import RANKS

import torchgw
from torchgw._problem.losses import LOSSES, Loss, LossName, identity
from torchgw._problem.named import BY_SIZE, NAMED, DistanceName

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
# Tests of the package that remind a newcomer of a step, or that take what is new on their own.
NAMES = "test_recipes.py::test_built_in_names_are_typed_and_documented"
REMINDERS = {
    "A provider": [f"house/{NAMES}"],
    "A backend": ["sinkhorn/test_backends.py"],
    "A loss": [f"house/{NAMES}", "problem/test_losses.py::test_the_parts_of_a_loss_are_the_loss"],
    "An option": [
        f"faces/test_options.py::{test}"
        for test in ("test_every_option_has_values_here", "test_documentation_has_a_row")
    ],
}
# What every new module has to pass.
HOUSE = ["test_imports_go_down", "test_every_module_says_what_it_exports"]

CHECKS = [name for name in vars(recipe_checks) if name.startswith("test_")]


class Recipe(NamedTuple):
    """One recipe of the page. Names are those of the page, below torchgw/ or from the root."""

    steps: list[str]  # the file of each numbered step
    new: dict[str, str]  # files that it adds, and their text
    changes: dict[str, list[tuple[str, str]]]  # texts of files, and what takes their place


def recipe(title):
    text = PAGE.split(f"### {title}\n")[1].split("\n## ")[0].split("\n### ")[0]
    steps = re.findall(r"^\d\. `([\w/.]+)`:", text, flags=re.M)
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)
    (diff,) = re.findall(r"^```diff\n(.*?)^```", text, flags=re.M | re.S)
    changes = {}
    for part in re.split(r"^--- ", diff, flags=re.M)[1:]:
        name, body = part.split("\n", 1)
        changes[name] = [hunk(piece.splitlines()) for piece in re.split(r"^@@\n", body, flags=re.M)]
    added = [name for name in steps if name not in changes]
    return Recipe(steps, dict(zip(added, blocks, strict=True)), changes)


def hunk(lines):
    """The text of a file that some lines of a diff are about, before and after."""
    assert {line[0] for line in lines} <= set(" -+")
    before, after = ("\n".join(x[1:] for x in lines if x[0] in kinds) for kinds in (" -", " +"))
    return before, after


def place(root, name):
    return root / name if name.startswith(("docs/", "tests/")) else root / "torchgw" / name


def follow(title, root, left_out=None):
    """Copy what the tests need, and follow a recipe there but for the steps in one file."""
    without = shutil.ignore_patterns("__pycache__", ".*", "gallery", "made")
    for folder in ("torchgw", "tests", "docs"):
        shutil.copytree(ROOT / folder, root / folder, ignore=without)
    shutil.copy(ROOT / "pyproject.toml", root)
    found = recipe(title)
    for name, text in found.new.items():
        if name != left_out:
            place(root, name).write_text(text, encoding="utf-8")
        # the rule of all recipes: the table of modules
        with (root / "docs" / "architecture.md").open("a", encoding="utf-8") as page:
            page.write(f"\n`{name.removesuffix('.py')}`\n")
    for name, hunks in found.changes.items():
        path = place(root, name)
        text = path.read_text(encoding="utf-8")
        for before, after in hunks:
            lines = f"\n{text}"
            assert lines.count(f"\n{before}\n") == 1, f"{name} has not once:\n{before}"
            text = lines.replace(f"\n{before}\n", f"\n{after}\n")[1:]
        if name != left_out:
            path.write_text(text, encoding="utf-8")


def tried(title, root):
    """Run the checks of a recipe in a copy, and the tests that watch over new code."""
    kind = title.split()[1]
    tests = [f"house/recipe_checks.py::{name}" for name in CHECKS if kind in name]
    tests += ["house/recipe_checks.py::test_it_is_the_copy", *REMINDERS[title]]
    for name in recipe(title).new:
        module = name.removesuffix(".py").replace("/", ".")
        tests += [f"house/test_packaging.py::{test}[{module}]" for test in HOUSE]
        tests += ["house/test_packaging.py::test_every_module_says_what_it_is"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    return subprocess.run(
        [*command, *(f"tests/{test}" for test in tests)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "title",
    [
        title if title == "A provider" else pytest.param(title, marks=pytest.mark.slow)
        for title in REMINDERS
    ],
)
def test_a_recipe_works(title, tmp_path):
    follow(title, tmp_path)
    done = tried(title, tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


@pytest.mark.parametrize("title", REMINDERS)
def test_a_recipe_names_the_files_that_it_touches(title):
    found = recipe(title)
    assert found.steps == [*found.new, *found.changes]
    assert [name for name in found.steps if not place(ROOT, name).exists()] == list(found.new)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "file"), [(title, file) for title in REMINDERS for file in recipe(title).steps]
)
def test_no_step_can_be_left_out(title, file, tmp_path):
    follow(title, tmp_path, left_out=file)
    assert tried(title, tmp_path).returncode != 0


def test_there_is_a_test_for_each_recipe():
    section = PAGE.split("## Four recipes")[1].split("\n## ")[0]
    assert re.findall(r"^### (.*)$", section, flags=re.M) == list(REMINDERS)


def test_the_picture_shows_the_ranks():
    picture = PAGE.split("rank  room")[1].split("```")[0]
    shown = {}
    for line in picture.splitlines()[1:]:
        rank, names = re.fullmatch(r" *(\d+)   ((?:\w+, )*\w+)\b.*", line).groups()
        shown |= dict.fromkeys(names.split(", "), int(rank))
    assert shown == RANKS


def test_the_nouns_are_where_the_page_says():
    named = re.findall(r"`([\w/]+)\.py: (\w+)`", PAGE)
    assert {"Problem", "Cost", "Coupling", "Plan", "Backend"} <= {name for _, name in named}
    for module, name in named:
        assert hasattr(importlib.import_module(f"torchgw.{module.replace('/', '.')}"), name)


def test_the_trace_is_what_happens():
    """The calls of the page, in its order, and the types of what they return."""
    text = PAGE.split("## One solve")[1].split("```text\n")[1].split("```")[0]
    steps = re.findall(r"^ *([\w/]+\.py): (\w+)\(.*\) -> (.*)$", text, flags=re.M)
    assert len(steps) == len(text.splitlines())
    folder = f"{Path(torchgw.__file__).parent}{os.sep}"
    asked, calls, running = {step[:2] for step in steps}, [], []

    def watch(frame, event, argument):
        code = frame.f_code
        file = code.co_filename.removeprefix(folder).replace(os.sep, "/")
        if (file, code.co_name) in asked:
            if event == "call":
                calls.append([file, code.co_name, None])
                running.append(calls[-1])
            elif event == "return":
                running.pop()[2] = argument

    X, Y = (np.random.default_rng(seed).normal(size=(240 + seed, 2)) for seed in (0, 1))
    sys.setprofile(watch)
    try:
        torchgw.solve(X, Y, random_state=0)
    finally:
        sys.setprofile(None)
    rest = iter(calls)
    for file, name, returned in steps:
        value = next((call[2] for call in rest if call[:2] == [file, name]), None)
        assert value is not None, f"{file}: {name} is not called, or not there in the order"
        # a coupling is of a type that each gradient has for itself
        if returned != "Coupling":
            assert fits(value, returned), f"{file}: {name} returns {type(value)}, not {returned}"


def fits(value, described):
    """Whether a value is what the page says: some types, or a tensor of length n."""
    if described == "Tensor (n) float64":
        return value.shape == (240,) and str(value.dtype) == "torch.float64"
    values, names = (value, described.split(", ")) if ", " in described else ([value], [described])
    kinds = [{kind.__name__ for kind in type(each).__mro__} for each in values]
    return len(kinds) == len(names) and all(a in b for a, b in zip(names, kinds, strict=True))


def test_a_loss_may_have_a_minimum_for_its_cross_term(monkeypatch):
    """x + y - 2 min(x, y) is the absolute loss."""
    monkeypatch.setitem(LOSSES, "gap", Loss("gap", (identity, identity), None))
    given = dict(zip(("D_X", "D_Y"), distance_matrices(14, 11), strict=True))
    given |= {"a": random_weights(14), "b": random_weights(11, 1), "epsilon": 0.1}
    tight = {"tol": 1e-9, "inner_tol": 1e-11, "objective_tol": 0, "random_state": 0}
    gap, absolute = (solve_by_name(**given, **tight, loss=loss) for loss in ("gap", "absolute"))
    assert gap.value == pytest.approx(absolute.value, rel=1e-9)
    assert np.abs(gap.plan - absolute.plan).max() < 1e-9


def test_built_in_names_are_typed_and_documented():
    """The other places that a built-in name is written: its Literal, and documentation."""
    assert get_args(DistanceName) == (*BY_SIZE, *NAMED)
    assert get_args(LossName) == tuple(LOSSES)
    for name in (*BY_SIZE, *NAMED, *LOSSES):
        assert f'"{name}"' in torchgw.solve.__doc__
    page = (ROOT / "docs" / "losses.md").read_text(encoding="utf-8")
    for name in LOSSES:
        assert re.search(rf'^\| `"{name}"`.*\|.*\|', page, flags=re.M)
