"""The documentation does what it says: every block and command is run, links lead somewhere."""

from __future__ import annotations

import inspect
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest

import torchgw
from torchgw.cli import main

ROOT = Path(__file__).resolve().parents[2]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [path.relative_to(ROOT) for path in FILES if "```python" in path.read_text("utf-8")]
# An optional package that a block imports: without it that block is left out.
OPTIONAL = ("anndata", "sklearn", "networkx", "ot", "matplotlib")


def blocks(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)


def missing(code):
    imported = re.findall(r"^(?:from|import) (\w+)", code, flags=re.M)
    return [name for name in OPTIONAL if name in imported and find_spec(name) is None]


@pytest.mark.filterwarnings("ignore::torchgw.GraphWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("page", PAGES, ids=str)
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mpl.use("Agg")
    namespace = {"__name__": "__main__"}
    for code in blocks(page):
        if not missing(code):
            exec(compile(code, str(page), "exec"), namespace)


def input_files():
    """Write the files that the commands of the documentation name."""
    rng = np.random.default_rng(0)
    points = {name: rng.normal(size=(40, 3)) * [4, 2, 1] for name in ("X", "Y", "new")}
    kinds = np.where(rng.random(40) < 0.5, "a", "b")
    for name, array in points.items():
        np.save(f"{name}.npy", array)
    np.save("partner.npy", rng.permutation(40))
    np.savez("data.npz", atac=points["Y"], other=kinds)
    np.savetxt("cells.csv", points["X"], delimiter=",", header="x,y,z", comments="")
    for name in ("x", "y", "types"):
        Path(f"{name}.txt").write_text("\n".join(kinds), encoding="utf-8")
    if find_spec("anndata") is not None:
        from anndata import AnnData

        for name in ("X_lsi", "X_pca"):
            data = AnnData(points["X"], obsm={name: points["X"]})
            data.obs["cell_type"] = kinds
            data.write_h5ad({"X_lsi": "atac.h5ad", "X_pca": "rna.h5ad"}[name])


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("page", ["README.md", "docs/command-line.md"])
def test_commands_run(page, tmp_path, monkeypatch):
    """In the order of the page, each on what the ones before have written."""
    monkeypatch.chdir(tmp_path)
    input_files()
    commands = re.findall(r"^    torchgw (.*)", (ROOT / page).read_text("utf-8"), flags=re.M)
    assert len(commands) >= 7
    for command in commands:
        # the scripts of `completion` have tests of their own
        if command.startswith("completion") or ("h5ad" in command and not find_spec("anndata")):
            continue
        # enough to see that it runs
        command = command.replace("2000", "200")
        assert main([*shlex.split(command), "--quiet"]) == 0, command


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        # made by docs/build_gallery.py
        if not target.startswith("gallery/") and target != "optimization-log.md":
            assert (page.parent / target).is_file(), target


def test_every_page_is_in_the_navigation():
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"optimization-log.md"}
    examples = {f"gallery/{path.stem}.md" for path in (ROOT / "docs" / "examples").glob("*.py")}
    assert not [name for name in pages | examples if name not in listed]


def test_every_public_name_is_in_the_api():
    text = (ROOT / "docs" / "api.md").read_text("utf-8")
    documented = set(re.findall(r"^::: torchgw\.(\w+)$", text, flags=re.M))
    modules = {name for name, value in vars(torchgw).items() if inspect.ismodule(value)}
    public = {name for name in vars(torchgw) if not name.startswith("_")} - modules
    assert public <= documented


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "examples").glob("*.py")), ids=str)
def test_examples_run(path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    source = path.read_text(encoding="utf-8")
    if missing(source):
        pytest.skip(f"needs {missing(source)}")
    mpl.use("Agg")
    exec(compile(source, str(path), "exec"), {"__name__": "__main__", "__file__": str(path)})
    pyplot.close("all")


def test_equations_have_a_number_of_their_own_and_are_cited_by_it():
    text = "\n".join(path.read_text(encoding="utf-8") for path in FILES)
    numbers = re.findall(r"^    .*  \((\d+)\)$", text, flags=re.M)
    assert len(numbers) > 30
    assert len(numbers) == len(set(numbers))
    code = "\n".join(path.read_text("utf-8") for path in (ROOT / "torchgw").rglob("*.py"))
    cited = re.findall(r"equations? \(?(\d+)(?:, (\d+))?(?: (?:to|and) (\d+))?", code)
    assert {number for found in cited for number in found if number} <= set(numbers)
