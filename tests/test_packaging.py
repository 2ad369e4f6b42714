"""The outside of the package: layers, imports, exported names, metadata."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import pkgutil
import re
import subprocess
import sys
from fnmatch import fnmatchcase
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import torchgw

PACKAGE = Path(torchgw.__file__).parent

# Imports go down or sideways, never up, and never round in a circle.
LAYERS = {
    0: {"_errors", "_typing", "_launch", "_capture"},
    1: {
        "_options",
        "_relaxation",
        "_inputs",
        "_memory",
        "_graph_inputs",
        "_plan_inputs",
        "_files",
        "_archive",
        "_cache",
        "_console",
        "datasets",
        "metrics",
    },
    2: {"distances", "_cost", "_features", "_losses"},
    3: {
        "_backend",
        "_sinkhorn",
        "_batch_sinkhorn",
        "_eager_sinkhorn",
        "_acceleration",
        "_compiled_sinkhorn",
        "_block_scaling",
        "_tiles",
        "_tiling",
        "_tiled_sinkhorn",
        "_triton_*",
        "_dispatch",
        "_plan",
        "_plan_autograd",
        "_stored_plan",
        "_sparse_plan",
        "_anchors",
        "_gradient",
        "_dense_gradient",
        "_factored_gradient",
        "_half_gradient",
        "_coarse",
        "_coarse_loss",
        "_sampled_gradient",
        "_cross",
        "_moments",
        "_preparation",
        "_given_side",
        "_problem",
        "_polish",
        "_partial",
        "_rounding",
    },
    4: {
        "_rounding",
        "_candidates",
        "_matching",
        "_coarse_search",
        "_multistart",
        "_starts",
        "_schedule",
        "_step",
        "_next_point",
        "_loop_state",
        "_solver",
        "_strategy",
        "_evaluation",
        "_relaxed",
        "_relaxed_search",
        "_solve",
        "_result",
        "_multiscale",
        "_extension",
        "_new_cost",
        "_new_points",
        "_storage",
        "_structure",
        "_drawing",
        "_krylov",
        "_implicit",
        "_tracked",
        "_low_rank",
        "_surrogate",
        "_unrolled",
        "_autograd",
    },
    5: {
        "_api",
        "_pot_problem",
        "_barycenter",
        "_barycenter_result",
        "_embedding",
        "_sampled_gw",
        "_solve_low_rank",
        "_batched",
        "_distributed",
    },
    6: {""},
    7: {
        "pot",
        "sklearn",
        "anndata",
        "backends",
        "plotting",
        "cli",
        "_commands",
        "_completion",
        "__main__",
    },
}


def module_name(path: Path) -> str:
    """Name below torchgw: "" for the package itself, "distances.base" for a nested module."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def test_every_module_is_on_the_map():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    modules = {name.replace(".", "/") for name in MODULES} - {"", "distances"}
    named = set(re.findall(r"`([a-z_/]+)`", page))
    assert not modules - named, "not in docs/architecture.md"
    gone = {name for name in named - modules if name.startswith(("_", "distances/"))}
    assert gone <= {"distances/"}, "docs/architecture.md names what is gone"


def layer(name: str) -> int:
    """Layer of a module; a new top-level module has to be given one."""
    top = name.split(".")[0]
    for number, members in LAYERS.items():
        if any(fnmatchcase(top, member) for member in members):
            return number
    raise AssertionError(f"torchgw/{top} is in no layer: add it to LAYERS in {__file__}")


def absolute(name: str, node: ast.ImportFrom) -> str:
    """Name of the module that a module imports from, also where it is written with dots."""
    here = ["torchgw", *filter(None, name.split("."))]
    if MODULES[name].name != "__init__.py":
        here.pop()
    above = here[: len(here) - node.level + 1] if node.level else []
    return ".".join([*above, *filter(None, [node.module])])


def imported(name: str) -> set[str]:
    """Modules of the package that a module imports anywhere, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
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
    return found - {name}


@pytest.mark.parametrize("name", MODULES, ids=lambda name: name or "torchgw")
def test_imports_go_down(name: str) -> None:
    up = {other for other in imported(name) if layer(other) > layer(name)}
    assert not up, f"torchgw.{name} (layer {layer(name)}) imports from above: {sorted(up)}"


def test_imports_make_no_circle() -> None:
    graph = {name: imported(name) for name in MODULES}
    # Raises CycleError, which names the circle.
    tuple(TopologicalSorter(graph).static_order())


def test_import_is_light() -> None:
    """`import torchgw` loads no optional package and does not touch a GPU."""
    code = (
        "import sys, torchgw, torch\n"
        "heavy = {'triton', 'sklearn', 'matplotlib', 'networkx', 'pandas', 'ot', 'torch._dynamo'}\n"
        "assert not heavy & set(sys.modules), sorted(heavy & set(sys.modules))\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_exported_members() -> None:
    """Every name in the namespace is re-exported on purpose, documented and in an `__all__`."""
    tree = ast.parse(MODULES[""].read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    # `from torchgw._api import solve as solve` is what type checkers read as a re-export.
    exported = {alias.asname: (node.module, alias.name) for node in imports for alias in node.names}
    assert all(asname == name for asname, (_, name) in exported.items())
    public = {
        name
        for name, value in vars(torchgw).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    modules = {name for name in exported if inspect.ismodule(getattr(torchgw, name))}
    assert public == set(exported) - modules
    for name in public:
        assert getattr(torchgw, name).__doc__, f"torchgw.{name} has no docstring"
        assert name in importlib.import_module(exported[name][0]).__all__


@pytest.mark.parametrize(
    "name", [name for name in MODULES if name not in {"", "__main__"}], ids=str
)
def test_every_module_says_what_it_exports(name: str) -> None:
    if "triton" in name:
        pytest.importorskip("triton")
    module = importlib.import_module(f"torchgw.{name}")
    missing = [member for member in module.__all__ if not hasattr(module, member)]
    assert not missing
    assert module.__doc__


def test_every_module_is_found_by_name() -> None:
    """A folder without __init__.py would be left out of a walk, and of the documentation."""
    walked = {info.name for info in pkgutil.walk_packages(torchgw.__path__, "torchgw.")}
    assert walked >= {f"torchgw.{name}" for name in MODULES if name}


def test_metadata() -> None:
    metadata = importlib.metadata.metadata("torchgw")
    requirements = importlib.metadata.requires("torchgw") or []
    core = {
        re.split(r"[^A-Za-z0-9_-]", requirement)[0]
        for requirement in requirements
        if "extra ==" not in requirement
    }
    assert metadata["Version"] == torchgw.__version__
    assert metadata["License-Expression"] == "MIT"
    assert core == {"joblib", "numpy", "scipy", "torch"}
    assert {"docs", "plot", "progress", "test"} <= set(metadata.get_all("Provides-Extra"))
    assert (PACKAGE / "py.typed").is_file()


def test_console_script() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="torchgw")
    assert script.value == "torchgw.cli:main"
