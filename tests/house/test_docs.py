"""The documentation does what it says: every block and command is run, links lead somewhere."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import shlex
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import matplotlib as mpl
import networkx as nx
import numpy as np
import pytest

import torchgw
from benchmarks import __main__ as benchmarks
from benchmarks.harness.registry import PROBLEMS
from benchmarks.harness.runners import RUNNERS
from benchmarks.harness.studies import read
from benchmarks.quality.problems import PROBLEMS as QUALITY_PROBLEMS
from benchmarks.quality.solvers import SOLVERS
from benchmarks.quality.unseen_study import PROBLEMS as UNSEEN
from torchgw.cli import main

ROOT = Path(__file__).resolve().parents[2]
# Pages that lie above docs/, and are copied when the site is built.
COPIED = {"optimization-log.md", "changelog.md"}
FILES = [
    ROOT / "README.md",
    *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in COPIED),
]
PAGES = [path.relative_to(ROOT) for path in FILES if "```python" in path.read_text("utf-8")]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))
# Everything that cites a command for developers.
CITING = [
    *FILES,
    *(ROOT / name for name in ("CONTRIBUTING.md", "OPTIMIZATION_LOG.md", "benchmarks/README.md")),
    *sorted((ROOT / "benchmarks" / "results").rglob("*.md")),
    ROOT / "benchmarks" / "results" / "ledger.jsonl",
]
# An optional package that a block imports: without it that block is left out.
OPTIONAL = ("anndata", "dask", "ray", "sklearn", "networkx", "ot", "matplotlib")


def blocks(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)


def missing(code):
    imported = re.findall(r"^(?:from|import) (\w+)", code, flags=re.M)
    # a face of ours needs what it is named for
    imported += re.findall(r"\btorchgw\.(anndata|sklearn)\b", code)
    return [name for name in OPTIONAL if name in imported and find_spec(name) is None]


@pytest.mark.filterwarnings("ignore::torchgw.GraphWarning")
# starts between clouds drawn at random may end apart, which is told
@pytest.mark.filterwarnings("ignore::torchgw.SearchWarning")
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
    table = [
        "kind,x,y,z",
        *(f"{k}," + ",".join(map(str, p)) for k, p in zip(kinds, points["X"], strict=True)),
    ]
    for name in ("a", "b"):
        Path(f"{name}.csv").write_text("\n".join(table), encoding="utf-8")
    np.savez("data.npz", atac=points["Y"], other=kinds)
    np.savetxt("cells.csv", points["X"], delimiter=",", header="x,y,z", comments="")
    for name in ("x", "y", "types"):
        Path(f"{name}.txt").write_text("\n".join(kinds), encoding="utf-8")
    graph = nx.connected_watts_strogatz_graph(30, 4, 0.4, seed=1)
    nx.write_graphml(graph, "worm.graphml")
    nx.write_edgelist(graph, "fly.edges", data=False)
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
        # what the files hold may have several matches of nearly the same cost
        assert main([*shlex.split(command), "--quiet"]) in (0, 3), command


def cited(program):
    """Commands of a program that pages cite, inline or in blocks of their own."""
    found = {row["command"] for row in read("standing") if "command" in row}
    for path in CITING:
        text = path.read_text(encoding="utf-8")
        found.update(" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`", text))
        found.update(re.findall(r"^    (\S[^#\n]*)", text, flags=re.M))
    return sorted({command.strip() for command in found if command.startswith(f"{program} ")})


class Parsed(Exception):  # noqa: N818 - no error: what a command's options were
    pass


def test_commands_of_benchmarks_are_understood(monkeypatch):
    """A cited command gets as far as its options; what it measures is not run."""
    parse = argparse.ArgumentParser.parse_args

    def parse_only(self, *arguments):
        raise Parsed(parse(self, *arguments))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    for command in cited("python -m benchmarks"):
        check_options(command)


def check_options(command):
    words = shlex.split(command)[3:]
    with pytest.raises((Parsed, SystemExit)) as caught:
        benchmarks.main(words)
    if words == ["--help"]:
        assert caught.value.code == 0, command
        return
    assert isinstance(caught.value, Parsed), f"not understood: {command}"
    options = caught.value.args[0]
    suite = words[0] in ("quality", "random-matrices")
    known = QUALITY_PROBLEMS if suite else UNSEEN if words[0] == "unseen" else PROBLEMS
    assert set(getattr(options, "problems", ())) <= set(known), command
    runners = getattr(options, "runners", None)
    assert not runners or set(runners.split(",")) <= set(SOLVERS if suite else RUNNERS), command


@pytest.mark.parametrize("command", cited("pytest"))
def test_commands_of_tests_find_something(command):
    words = shlex.split(command)
    paths = [ROOT / word.split("::")[0] for word in words if word.startswith("tests")]
    assert all(path.exists() for path in paths)
    if "-k" in words:
        wanted = words[words.index("-k") + 1]
        assert any(wanted in path.read_text("utf-8") for path in paths)


@pytest.mark.parametrize("command", cited("make"))
def test_targets_of_make_exist(command):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), flags=re.M)
    assert command.split()[1] in targets


def test_commands_are_found():
    assert len(cited("python -m benchmarks")) > 40
    assert len(cited("pytest")) > 5
    assert len(cited("make")) > 3


@pytest.mark.parametrize("path", CITING, ids=lambda path: path.name)
def test_cited_files_are_there(path):
    """Paths are those of today, but for raw rows, which are of the commit that recorded them."""
    text = path.read_text(encoding="utf-8")
    folders = "tests|torchgw|benchmarks|docs"
    for file in re.findall(rf"\b((?:{folders})/[\w/.-]+\.(?:py|md|jsonl))", text):
        assert (ROOT / file).is_file(), file


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        # made when the site is built
        if not target.startswith(("gallery/", "made/")) and target not in COPIED:
            assert (page.parent / target).is_file(), target


def test_every_page_is_in_the_navigation():
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - COPIED
    assert not [name for name in pages if name not in listed]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_as_the_gallery_reads_them(path):
    """A title in Markdown, and a place in the order; links to examples are to existing ones."""
    assert ast.get_docstring(ast.parse(path.read_text("utf-8"))).startswith("# ")
    assert f'"{path.stem}"' in (ROOT / "docs" / "gallery_conf.py").read_text("utf-8")


def test_links_to_examples_lead_somewhere():
    text = "".join(path.read_text("utf-8") for path in [*FILES, *EXAMPLES])
    names = set(re.findall(r"\bgallery/(\w+)\.md", text)) - {"index"}
    assert len(names) > 3
    assert names <= {path.stem for path in EXAMPLES}


def test_links_of_the_gallery_lead_to_files(monkeypatch):
    """mkdocs-gallery leaves the suffix to the server."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    page = SimpleNamespace(file=SimpleNamespace(src_uri="gallery/index.md"))
    link = '<a class="reference internal" href="spiral">'
    made = importlib.import_module("hooks").on_page_markdown(f"{link}\n", page)
    assert made == f"{link.replace('spiral', 'spiral.html')}\n"


def test_chart_of_time_has_the_peers(monkeypatch):
    """What is drawn is what stands in benchmarks/results."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    times = importlib.import_module("hooks").times()
    assert len(times) == 3
    assert all(len(points) > 1 for points in times.values())
    assert times["torchgw"][-1] == (10_000_000, pytest.approx(4.87))


def test_the_site_asks_no_other_server():
    assert "font: false" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    style = (ROOT / "docs" / "assets" / "katex" / "katex.min.css").read_text(encoding="utf-8")
    fonts = re.findall(r"url\(([^)]*)\)", style)
    assert len(fonts) == 20
    assert all((ROOT / "docs" / "assets" / "katex" / font).is_file() for font in fonts)


def test_products_are_no_tags_of_the_site(monkeypatch):
    """The product of C(P) and P, in angles, was not to be seen on 11 pages."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    page = SimpleNamespace(file=SimpleNamespace(src_uri="algorithm.md"))
    shown = partial(importlib.import_module("hooks").on_page_content, page=page, files=None)
    tags = '<!-- a, b --><p>a <a href="x, y">b</a>, <br> <input type="radio"></p>'
    assert shown(f"{tags} <C(P), P> + <a, f - g>") == f"{tags} &lt;C(P), P> + &lt;a, f - g>"


def test_docstrings_link_the_pages_that_they_name(monkeypatch):
    """Readers of the site have no folder docs."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    shapes = SimpleNamespace(url_relative_to=lambda _: "../shapes.html")
    shapes.page = SimpleNamespace(title="Surfaces")
    files = SimpleNamespace(get_file_from_path={"shapes.md": shapes}.get)
    page = SimpleNamespace(file=SimpleNamespace(src_uri="api/solve.md"))
    made = importlib.import_module("hooks").on_page_content("see docs/shapes.md.", page, files)
    assert made == 'see <a href="../shapes.html">Surfaces</a>.'
    written = set(re.findall(r"\bdocs/([a-z-]+\.md)", "".join(
        path.read_text("utf-8") for path in (ROOT / "torchgw").rglob("*.py")
    )))  # fmt: skip
    assert written
    assert {name for name in written if not (ROOT / "docs" / name).is_file()} == set()
    # each has a title before it is read
    nav = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert {name for name in written if not re.search(rf": {name}$", nav, re.M)} == set()


def test_lists_of_pages_go_on_where_they_are_to():
    """A paragraph of an item is four spaces in, and ends before the next item."""
    for path in [*FILES, ROOT / "CHANGELOG.md"]:
        text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.M | re.S)
        # a number that ends a sentence begins a list at the beginning of a line
        assert not re.findall(r"^ {1,3}\d+\. .*", text, re.M), path
        assert not re.findall(r"\n\n {1,3}\S.*|\n {4}[^-\s].*\n- ", text), path


def test_every_public_name_is_in_the_api():
    text = (ROOT / "docs" / "api.md").read_text("utf-8")
    # of modules at least one name
    documented = set(re.findall(r"^::: torchgw\.(\w+)", text, flags=re.M))
    public = {name for name in dir(torchgw) if not name.startswith("_")}
    assert public <= documented


def test_the_reference_has_a_page_for_each_name(monkeypatch):
    """With a sentence for each in the list."""
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(ROOT / "docs")
    made = importlib.import_module("api_pages")
    found = made.sections((ROOT / "docs" / "api.md").read_text("utf-8"))
    names = [name for part in found.values() for name in part]
    assert len(set(names)) == len(names) > 80
    for name in names:
        assert re.fullmatch(r"- \[`\S+`\]\[\S+\]: .*", made.summary(name), re.S), name
    pages = made.pages_of(found["POT's call"])
    assert "torchgw.pot.gromov.entropic_gromov_wasserstein" in pages
    assert all("heading_level: 1" in text for text in pages.values())


def test_types_that_are_prose_are_shown_as_written(monkeypatch):
    griffe = pytest.importorskip("griffe")
    monkeypatch.syspath_prepend(ROOT / "docs")
    signatures = importlib.import_module("signatures")
    prose = "array-like, shapes (n,) and (m,), optional"
    text = f"Do it.\n\nParameters\n----------\na, b : {prose}\n    X.\n"
    item = griffe.Function("f", docstring=griffe.Docstring(text, parser="numpy"))
    package = griffe.Module("m")
    package.set_member("f", item)
    signatures.Signatures().on_package(pkg=package)
    (shown,) = {str(part.annotation) for part in item.docstring.parsed[1].value}
    assert shown == prose


def test_options_are_a_list_in_the_reference(monkeypatch):
    """They were one paragraph of 800 words."""
    griffe = pytest.importorskip("griffe")
    monkeypatch.syspath_prepend(ROOT / "docs")
    options = griffe.Class("Options", parent=griffe.Module("torchgw._problem.table"))
    importlib.import_module("signatures").Signatures().on_class_instance(cls=options)
    (shown,) = (part.value for part in options.docstring.parsed if part.kind.value == "parameters")
    assert {part.name for part in shown} >= {"epsilon", "n_init", "inner_tol"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", EXAMPLES, ids=str)
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
    numbers = re.findall(r"\\tag\{(S?\d+)\}", text)
    assert len(numbers) > 30
    assert len(numbers) == len(set(numbers))
    code = "\n".join(path.read_text("utf-8") for path in (ROOT / "torchgw").rglob("*.py"))
    cited = re.findall(r"equations? \(?(\d+)(?:, (\d+))?(?: (?:to|and) (\d+))?", code)
    assert {number for found in cited for number in found if number} <= set(numbers)
    assert len(re.findall(r"^\$\$$", text, flags=re.M)) % 2 == 0
