"""The documentation does what it says: every Python block is run, every link leads somewhere."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import matplotlib as mpl
import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "docs/index.md", "docs/migrating.md", "docs/extending.md", "docs/failures.md"]
# An optional package that a block imports: without it that block is left out.
OPTIONAL = ("anndata", "sklearn", "networkx", "ot", "matplotlib")


def blocks(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)


def missing(code):
    imported = re.findall(r"^(?:from|import) (\w+)", code, flags=re.M)
    return [name for name in OPTIONAL if name in imported and find_spec(name) is None]


@pytest.mark.filterwarnings("ignore::torchgw.GraphWarning")
@pytest.mark.filterwarnings("ignore::torchgw.ConvergenceWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("page", PAGES)
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mpl.use("Agg")
    namespace = {"__name__": "__main__"}
    found = blocks(page)
    assert found
    for code in found:
        if not missing(code):
            exec(compile(code, page, "exec"), namespace)


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
