"""The house: ranks of the rooms, imports, exported names, metadata."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.metadata
import inspect
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatchcase
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import structure
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import torchgw
from hatch_build import write_tree
from torchgw._starts import alternatives

PACKAGE = Path(torchgw.__file__).parent

# Rooms of the package by rank. A room may import from rooms of a lower rank only: rooms of one rank
# never meet, and the two pillars, distances and _sinkhorn, know nothing of each other.
RANKS = {
    "_errors": 0,
    "_typing": 0,
    "_boundary": 1,
    "_tensors": 1,
    "distances": 2,
    "_sinkhorn": 2,
    "metrics": 2,
    "datasets": 2,
    "_plans": 3,
    "_problem": 3,
    "_batch": 4,
    "_certify": 4,
    "_gradients": 4,
    "_starts": 5,
    "_search": 6,
    "_solve": 7,
    "_answer": 8,
    "_results": 8,
    "_derivatives": 9,
    "_api": 10,
    "_many": 11,
    "_variants": 12,
    "torchgw": 13,
    "pot": 14,
    "sklearn": 14,
    "anndata": 14,
    "plotting": 14,
    "backends": 14,
    "losses": 14,
    "cli": 15,
    "__main__": 16,
}
# A required name at the top that belongs to a room.
LODGERS = {"_triton_sinkhorn": "_sinkhorn"}
# Where Triton is imported: kernels, and what launches them over kept tiles.
TRITON = (
    "_sinkhorn.kernels.*",
    "_sinkhorn.tiles.triton",
    "_batch.*_triton",
    "distances.*_triton",
    "_triton_sinkhorn",
)


def module_name(path: Path) -> str:
    """Name below torchgw: "" for the package itself, "distances.base" for a nested module."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def test_every_module_says_what_it_is():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    table = page.split("rank  room")[1].split("```")[0]
    missing = set(RANKS) - set(re.findall(r"\w+", table))
    assert not missing, "not in the table of docs/architecture.md"
    assert set(structure.mapped()) == {
        path.relative_to(PACKAGE).as_posix() for path in MODULES.values()
    }
    named = {name.rstrip("/") for name in re.findall(r"`([a-z_/]+)`", page)}
    modules = {name.replace(".", "/") for name in MODULES} - {""}
    gone = {name for name in named - modules if name.startswith("_") or "/" in name}
    assert not gone, "docs/architecture.md names what is gone"


def test_the_structure_is_counted():
    """The numbers that a redesign is judged by, without the solves that count files."""
    assert structure.numbers("A, _B = 1, 2.5\nC = {'x': (3, 4)}\nname = 7\nD: int = 5") == 5
    assert structure.numbers("A = 64 * 2**20\nB = -1 / 3, 2 * A") == 3
    text = '"""A."""\n\nimport ast\n\n\ndef f(\n    a,\n):\n    # b\n    return a\n'
    assert [*structure.kinds_of_lines(text).values()] == [1, 3, 1, 1, 1, 3]
    count, edges, floors = structure.arrows("a", {
        "a/x.py": "from torchgw.a.y import z", "a/y.py": "from torchgw.b.z import q", "b/z.py": "",
    })  # fmt: skip
    assert (count, edges, floors) == (2, 1, 2)
    # a limit, and a number of the module once: a value is no size
    text = "_FEW = 3\nA = n * m <= limits.few\nB = x.n > _FEW\nC = value > _FEW"
    assert structure.compared(text) == (1, 1)
    found = structure.kinds(
        {"a.py": "# [L1]\n_A = 3\n\n# A choice.\n_B, _C = 1e-9, 2", "b_triton.py": text}
    )
    assert found == {
        "how far an algorithm goes": [("a.py: _A", 1)],
        "rounding": [("a.py: _B", 1), ("a.py: _C", 1)],
        "shapes of programs on a GPU": [("b_triton.py: _FEW", 1)],
    }


def room(name: str) -> str:
    """Name of the room that a module is in; a new top-level name has to be given a rank."""
    top = name.split(".")[0] or "torchgw"
    top = LODGERS.get(top, top)
    assert top in RANKS, f"torchgw/{top} has no rank: add it to RANKS in {__file__}"
    return top


def parsed(name: str) -> ast.Module:
    return structure.parsed(MODULES[name].read_text(encoding="utf-8"))


def absolute(name: str, node: ast.ImportFrom) -> str:
    """Name of the module that a module imports from, also where it is written with dots."""
    here = ["torchgw", *filter(None, name.split("."))]
    if MODULES[name].name != "__init__.py":
        here.pop()
    above = here[: len(here) - node.level + 1] if node.level else []
    return ".".join([*above, *filter(None, [node.module])])


@cache
def imported(name: str) -> frozenset[str]:
    """Modules of the package that a module imports anywhere, also inside functions."""
    found = set()
    for node in ast.walk(parsed(name)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # `from torchgw import _plan` imports a module, `from torchgw import solve` a name.
            targets = [f"{absolute(name, node)}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            if target.split(".")[0] == "torchgw":
                inside = target.removeprefix("torchgw").removeprefix(".")
                found.add(inside if inside in MODULES else inside.rpartition(".")[0])
    return frozenset(found - {name})


@pytest.mark.parametrize("name", MODULES, ids=lambda name: name or "torchgw")
def test_imports_go_down(name: str) -> None:
    own = room(name)
    others = {other: room(other) for other in imported(name)}
    up = sorted(other for other, its in others.items() if its != own and RANKS[its] >= RANKS[own])
    assert not up, f"torchgw.{name} (rank {RANKS[own]}) imports from above or beside it: {up}"
    # a room's folders and modules with an underscore are its own affair
    hidden = sorted(
        other
        for other in imported(name)
        if room(other) != own and any(part.startswith("_") for part in other.split(".")[1:])
    )
    assert not hidden, f"torchgw.{name} imports what belongs to another room: {hidden}"


def test_triton_is_imported_where_kernels_are() -> None:
    importing = {
        name
        for name in MODULES
        for node in ast.walk(parsed(name))
        if (
            isinstance(node, ast.Import)
            and any(a.name.split(".")[0] == "triton" for a in node.names)
        )
        or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "triton")
    }
    assert importing, "nothing was read"
    strangers = {n for n in importing if not any(fnmatchcase(n, place) for place in TRITON)}
    assert not strangers


def test_imports_make_no_circle() -> None:
    graph = {name: imported(name) for name in MODULES}
    # Raises CycleError, which names the circle.
    tuple(TopologicalSorter(graph).static_order())


# What makes a tensor on PyTorch's default device, or moves one there, unless it is told where.
MADE = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace",
    "logspace", "normal", "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor",
    "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip


def test_tensors_are_made_where_they_are_told() -> None:
    """A default device may be a GPU, or none at all, where everything given is on the host."""
    calls = [
        (name, node)
        for name in MODULES
        for node in ast.walk(parsed(name))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{one}" for one in MADE}
    ]
    assert len(calls) > 100, "nothing was read"
    untold = [
        f"{MODULES[name].relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"
        for name, node in calls
        if not {"device", None} & {word.arg for word in node.keywords}
    ]
    assert not untold, "these leave the device to the default"


# Gradients, couplings and steps: other rooms ask them, and never what class they are of.
OPAQUE = ("_gradients.*", "_solve.step")


def test_warnings_begin_with_what_filters_can_name() -> None:
    """A filter compares the beginning of a message: numbers come after it."""
    begun = [text for name, text in vars(alternatives).items() if name.startswith("WHY_")]
    begun = [
        one for text in begun for one in ([*text.values()] if isinstance(text, dict) else [text])
    ]
    for name in MODULES:
        for call in ast.walk(parsed(name)):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "warn_user":
                first = call.args[0].values[0] if isinstance(call.args[0], ast.JoinedStr) else None
                begun += [first.value] if isinstance(first, ast.Constant) else []
    assert len(begun) > 40
    for text in begun:
        assert re.match("`|[A-Za-z(][^{0-9]{4}", text), text


def test_gradients_couplings_and_steps_are_not_looked_into() -> None:
    trees = {name: parsed(name) for name in MODULES}
    owners = {
        node.name: room(name)
        for name, tree in trees.items()
        if any(fnmatchcase(name, place) for place in OPAQUE)
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    assert {"FactoredGradient", "AnchorCoupling", "Step"} <= set(owners)
    asked = {
        (name, one.id)
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance"
        for one in ast.walk(node.args[1])
        if isinstance(one, ast.Name) and owners.get(one.id, room(name)) != room(name)
    }
    assert not asked


# What neither `import torchgw` nor a first look at its names loads: optional packages, what takes a
# tenth of a second and is not always needed, and what touches a GPU.
HEAVY = {
    "joblib",
    "matplotlib",
    "networkx",
    "ot",
    "pandas",
    "scipy.linalg",
    "scipy.optimize",
    "scipy.sparse",
    "scipy.spatial",
    "scipy.special",
    "scipy.stats",
    "sklearn",
    "torch._dynamo",
    "triton",
}


@pytest.mark.parametrize(
    ("used", "also"),
    [("torchgw.__version__", {"torch", "numpy", "torchgw._api"}), ("torchgw.solve", set())],
)
def test_import_is_light(used: str, also: set[str]) -> None:
    code = (
        f"import sys, torchgw; {used}; print(*sorted({HEAVY | also} & set(sys.modules)))\n"
        "assert 'torch' not in sys.modules or not sys.modules['torch'].cuda.is_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


def test_exported_members() -> None:
    """Every name in the namespace is re-exported on purpose, and documented."""
    stub = PACKAGE / "__init__.pyi"
    tree = ast.parse(stub.read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    # `from torchgw._api import solve as solve` is what type checkers read as a re-export.
    exported = {alias.asname: (node.module, alias.name) for node in imports for alias in node.names}
    assert all(asname == name for asname, (_, name) in exported.items())
    assert {name for name in dir(torchgw) if not name.startswith("_")} == set(exported)
    assert {name: home for name, (home, _) in exported.items()} == torchgw._HOMES
    # all that is raised or warned of can be caught by a public name
    errors = importlib.import_module("torchgw._errors")
    assert {name for name in vars(errors) if name.endswith(("Error", "Warning"))} <= set(exported)
    # what users import from, but for the command line, comes with `import torchgw` alone
    modules = {name for name in DOORS if "." not in name} - {"cli"}
    assert modules == {name for name, (home, _) in exported.items() if home == "torchgw"}
    for name, (home, _) in exported.items():
        if name in modules:
            assert getattr(torchgw, name) is importlib.import_module(f"torchgw.{name}")
            continue
        assert RANKS[room(home.removeprefix("torchgw."))] < RANKS["torchgw"]
        module = importlib.import_module(home)
        assert getattr(torchgw, name) is getattr(module, name)
        assert getattr(torchgw, name).__doc__, f"torchgw.{name} has no docstring"
    with pytest.raises(AttributeError, match="torchgw.*no attribute 'slove'"):
        torchgw.slove  # noqa: B018


def test_distances_say_what_their_methods_do() -> None:
    """By a docstring of their own, or by that of the method that they override."""
    kinds = [kind for kind in vars(torchgw.distances).values() if inspect.isclass(kind)]
    assert kinds
    bare = {
        f"{kind.__name__}.{name}"
        for kind in kinds
        for name, method in inspect.getmembers(kind, inspect.isroutine)
        if not name.startswith("_") and not inspect.getdoc(method)
    }
    assert not bare


# What users import from, besides torchgw itself.
DOORS = [
    "anndata",
    "backends",
    "cli",
    "datasets",
    "distances",
    "losses",
    "metrics",
    "plotting",
    "pot",
    "pot.gromov",
    "sklearn",
]


@pytest.mark.parametrize(
    "name", [name for name in MODULES if name not in {"", "__main__"}], ids=str
)
def test_every_module_says_what_it_exports(name: str) -> None:
    """A door by `__all__`; other modules by names without an underscore, and these alone."""
    if "triton" in name:
        pytest.importorskip("triton")
    module = importlib.import_module(f"torchgw.{name}")
    assert module.__doc__
    if name in DOORS:
        assert not [member for member in module.__all__ if not hasattr(module, member)]
    taken = [
        f"{node.module}.{alias.name}"
        for node in ast.walk(parsed(name))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchgw")
        for alias in node.names
        if alias.name.startswith("_")
        and f"{node.module}.{alias.name}".removeprefix("torchgw.") not in MODULES
    ]
    assert not taken, f"torchgw.{name} imports what other modules keep to themselves"


def test_every_module_is_found_by_name() -> None:
    """A folder without __init__.py would be left out of a walk, and of the documentation."""
    walked = {info.name for info in pkgutil.walk_packages(torchgw.__path__, "torchgw.")}
    assert walked >= {f"torchgw.{name}" for name in MODULES if name}


def test_metadata() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="torchgw")
    assert script.dist is not None
    metadata, requirements = script.dist.metadata, script.dist.requires or []
    core = {
        re.split(r"[^A-Za-z0-9_-]", requirement)[0]
        for requirement in requirements
        if "extra ==" not in requirement
    }
    assert metadata["Version"] == torchgw.__version__
    assert metadata["License-Expression"] == "MIT"
    assert core == {"joblib", "numpy", "scipy", "torch"}
    assert {"docs", "plot", "test"} <= set(metadata.get_all("Provides-Extra"))
    assert (PACKAGE / "py.typed").is_file()


def test_what_needs_a_newer_python_is_pinned_for_it_alone() -> None:
    """`make demo` installs under the oldest Python that is promised, 3.10."""
    text = (PACKAGE.parent / "constraints.txt").read_text()
    pinned = [Requirement(line) for line in text.splitlines() if not line.startswith("#")]
    for requirement in pinned:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            needs = importlib.metadata.metadata(requirement.name)["Requires-Python"] or ""
            exact = "==" in str(requirement.specifier)
            marker = requirement.marker
            assert (
                not exact
                or SpecifierSet(needs).contains("3.10.0")
                or (marker is not None and not marker.evaluate({"python_version": "3.10"}))
            ), f"{requirement.name} needs Python {needs}"


def test_the_citation_is_of_this_version() -> None:
    """What `cffconvert --validate` accepts, of the version that is here."""
    root = Path(torchgw.__file__).parents[1]
    lines = (root / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    fields = dict(line.split(": ", 1) for line in lines if re.match(r"[\w-]+: ", line))
    assert fields["cff-version"] == "1.2.0"
    assert fields["version"] == torchgw.__version__
    assert {"message", "title", "license"} <= set(fields)


def test_console_script() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="torchgw")
    assert script.value == "torch_gromov.cli:main"


def test_the_name_of_another_project_is_not_ours_to_install() -> None:
    """PyPI's torchgw is another project: what is missing is named by its own name."""
    root = PACKAGE.parent
    pages = [root / "README.md", *root.glob("docs/*.md"), *PACKAGE.rglob("*.py")]
    told = [page.name for page in pages if re.search(r"pip install '?torchgw\[", page.read_text())]
    assert not told
    text = (root / "pyproject.toml").read_text()
    assert re.search(r'^name = "torch-gromov"$', text, re.MULTILINE)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a wheel puts into a folder of packages."""
    folder = tmp_path_factory.mktemp("site")
    write_tree(folder)
    return folder


def _in(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code where the folder comes first, and the checkout is not found."""
    alone = {"PYTHONPATH": str(folder), "PATH": os.environ.get("PATH", ""), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env=alone
    )


def test_a_wheel_has_a_name_of_its_own_and_torchgw_where_that_is_free(installed: Path) -> None:
    code = """
import torchgw, torch_gromov, torchgw.pot, torch_gromov.pot
import torchgw.distances.landmark as landmark
assert torchgw is torch_gromov and torchgw.pot is torch_gromov.pot
assert torchgw.solve.__module__ == "torch_gromov._api"
assert landmark.__spec__.name == landmark.__name__ == "torch_gromov.distances.landmark"
print(torchgw.__file__)
"""
    done = _in(installed, code)
    assert done.stdout.strip() == str(installed / "torch_gromov" / "__init__.py"), done.stderr
    done = _in(installed, "import runpy; runpy.run_module('torchgw', run_name='__main__')")
    assert "torchgw: error: the following arguments are required: COMMAND" in done.stderr


def test_the_other_project_may_be_installed_too(installed: Path, tmp_path: Path) -> None:
    """Its folder `torchgw` comes before our file `torchgw.py`; ours needs nothing of it."""
    shutil.copytree(installed, tmp_path / "site")
    (tmp_path / "site" / "torchgw").mkdir()
    (tmp_path / "site" / "torchgw" / "__init__.py").write_text("theirs = True")
    code = """
import importlib, pkgutil, torchgw, torch_gromov
assert torchgw.theirs
for module in pkgutil.walk_packages(torch_gromov.__path__, "torch_gromov."):
    if "triton" not in module.name and "kernels" not in module.name:
        importlib.import_module(module.name)
import sys
assert [name for name in sys.modules if name.split(".")[0] == "torchgw"] == ["torchgw"]
import numpy as np, warnings
X = np.random.default_rng(0).normal(size=(20, 3))
result = torch_gromov.solve(X, X[::-1], distances="euclidean", epsilon=1e-3, random_state=0)
result.save("out.npz")
assert torch_gromov.load("out.npz").value == result.value
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    torch_gromov.solve(X, X, max_iter=1, n_init=1)
assert caught[0].filename == "<string>", caught[0]
"""
    done = _in(tmp_path / "site", code)
    assert done.returncode == 0, done.stderr


def test_a_checkout_that_is_hidden_says_so(tmp_path: Path) -> None:
    assert sys.modules["torchgw"] is importlib.import_module("torch_gromov")
    shutil.copy(PACKAGE.parent / "torch_gromov.py", tmp_path)
    (tmp_path / "other" / "torchgw").mkdir(parents=True)
    (tmp_path / "other" / "torchgw" / "__init__.py").touch()
    code = "import sys; sys.path.insert(0, 'other'); import torch_gromov"
    done = _in(tmp_path, code)
    assert "ImportError" in done.stderr
    assert "is another project or another copy" in done.stderr


def test_slow_cases_exist() -> None:
    """Names in ``slow.txt`` are those of functions that are there."""
    root = PACKAGE.parent
    for name in (root / "tests/slow.txt").read_text().splitlines():
        path, function = name.split("[")[0].split("::")
        text = (root / path).read_text()
        assert f"def {function.split('.')[-1]}(" in text, name
