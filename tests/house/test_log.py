"""The log and the ledger: their rows, constants that cite them, results they were made from."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import structure

from benchmarks.harness import ledger, pages, studies

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "torchgw"
LOG = (ROOT / "OPTIMIZATION_LOG.md").read_text(encoding="utf-8")

# Numbers that nobody tuned: versions of formats, exit codes, names for one.
NOT_TUNED = re.compile(r"_VERSION|EXIT_\w+|STRICT")
CITATION = re.compile(r"\[(L\d+(?:, L\d+)*)\]")


LEDGER = ledger.rows()
# The short lines of the log: ids, what was tried, before -> after, kept.
LINES = [line.strip("| ").split(" | ") for line in re.findall(r"^\| L\d.*$", LOG, flags=re.M)]
ENVIRONMENTS = set(re.findall(r"^\| (E\d) \|", LOG, flags=re.M))


def is_number(node):
    """Whether an expression is made of numbers alone: a number, a tuple or a dict of numbers."""
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float)
    if isinstance(node, ast.UnaryOp):
        return is_number(node.operand)
    if isinstance(node, ast.BinOp):
        return is_number(node.left) and is_number(node.right)
    parts = node.elts if isinstance(node, ast.Tuple) else getattr(node, "values", [])
    return bool(parts) and all(map(is_number, parts))


def constants(path):
    """Constants at the top of a module: name, value, the ledger rows that it cites, if it is told.

    A constant cites what the comment above it cites or the comment on its line. One that follows
    another without a line between shares the comment of that one.
    """
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    end, shared, told = 0, set(), False
    for node in structure.parsed(text).body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            target = node.target
        else:
            continue
        names = [name.id for name in getattr(target, "elts", [target]) if hasattr(name, "id")]
        names = [name for name in names if name.strip("_").isupper()]
        if not names:
            continue
        first = node.lineno - 1
        while lines[first - 1].startswith("#"):
            first -= 1
        comment = "\n".join(lines[first : node.end_lineno])
        cited = {row for found in CITATION.findall(comment) for row in found.split(", ")}
        after = first + 1 == node.lineno and end == first
        if after:
            cited |= shared
        told = "#" in comment or (after and told)
        yield from ((name, node.value, cited, told) for name in names)
        end, shared = node.end_lineno, cited


FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


@cache
def constants_of(file):
    """Constants of a module, once."""
    return list(constants(PACKAGE / file))


def test_rows_are_numbered():
    rows = studies.read("ledger")
    assert len(rows) > 500
    # in order; numbers that were set aside for work that came to nothing may be missing
    numbers = [int(row["id"].removeprefix("L")) for row in rows]
    assert numbers == sorted(set(numbers))
    assert {tuple(row) for row in rows} == {ledger.FIELDS}
    assert all(row[field] for row in rows for field in ledger.FIELDS if field != "constants")


def test_rows_name_their_study_environment_and_commit():
    for row in LEDGER.values():
        assert row["study"] in {"-", *studies.studies()}, row
        assert row["environment"] in ENVIRONMENTS | {"-"}, row
        assert re.fullmatch(r"[0-9a-f]{7}(?: [0-9a-f]{7})*", row["commit"]), row
        assert row["kept"] in {"start", "kept", "dropped", "not tried", "not built", "removed"}, row


def test_lines_of_the_log_are_short_and_say_what_the_rows_say():
    assert len(LINES) > 150
    told = [number for line in LINES for number in ledger.ids(line[0])]
    assert len(told) == len(set(told)), "a row is in two lines"
    assert set(told) <= set(LEDGER)
    for ids, tried, result, kept in LINES:
        assert len(f"{tried} {result}".split()) <= 35, ids
        words = {LEDGER[number]["kept"] for number in ledger.ids(ids)}
        assert kept == (words.pop() if len(words) == 1 else "some"), ids


def test_the_log_has_no_row_in_full():
    assert max(map(len, LINES)) == 4, "long rows belong in benchmarks/results/ledger.jsonl"


def test_rows_are_printed(capsys):
    assert ledger.main(["L3", "L5-L6"]) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"^L\d+", printed, flags=re.M) == ["L3", "L5", "L6"]
    for field in ("tried", "gate", "result"):
        assert LEDGER["L6"][field] in " ".join(printed.split())
    assert ledger.main(["SMALLEST_GAP", "backing", "off"]) == 0
    assert re.findall(r"^L\d+", capsys.readouterr().out, flags=re.M) == ["L6"]
    last = list(LEDGER)[-1]
    assert ledger.main([f"L{int(last[1:]) + 1}"]) == 1
    assert f"the last is {last}\n" in capsys.readouterr().err


def test_what_is_kept_is_there():
    """A row that is kept names a file that exists, and constants that are in it."""
    gone = []
    for row in LEDGER.values():
        for file, names in row["constants"].items() if row["kept"] == "kept" else ():
            known = {name for name, *_ in constants_of(file)} if file in FILES else set()
            if file not in FILES or not known >= set(names):
                gone.append((row["id"], file, sorted(set(names) - known)))
    assert not gone


@pytest.mark.parametrize("file", FILES)
def test_tuned_constants_cite_a_row_that_names_them(file):
    """A number that a row names cites it; one that no row names is a guard, or a choice.

    The comment above a guard says what it is, and needs no row.
    """
    named = {}
    for number, row in LEDGER.items():
        for name in row["constants"].get(file, ()):
            named.setdefault(name, set()).add(number)
    for name, value, cited, told in constants_of(file):
        assert cited <= set(LEDGER), f"{name} cites what is not in the ledger: {cited}"
        if is_number(value) and not NOT_TUNED.fullmatch(name) and (cited or name in named):
            assert cited & named.get(name, set()), f"{name} cites no row that names it: {cited}"
        if is_number(value) and not NOT_TUNED.fullmatch(name):
            assert told, f"no comment says what {name} is"


def test_every_citation_is_in_the_ledger():
    for file in FILES:
        found = CITATION.findall((PACKAGE / file).read_text(encoding="utf-8"))
        cited = {number for group in found for number in group.split(", ")}
        assert cited <= set(LEDGER), file


@pytest.mark.parametrize("page", pages.PAGES)
def test_tables_are_what_was_measured(page):
    text = pages.PAGES[page].read_text(encoding="utf-8")
    assert f"made by: python -m benchmarks tables {page}" in text
    assert pages.rendered(page) == text, f"run: python -m benchmarks tables {page}"


def test_every_table_is_on_a_page():
    text = "".join(path.read_text(encoding="utf-8") for path in pages.PAGES.values())
    shown = re.findall(r"<!-- table ([a-z-]+), made by", text)
    assert sorted(shown) == sorted(pages.TABLES)


def test_a_page_is_written_and_checked(tmp_path, monkeypatch, capsys):
    made = pages.PAGES["readme"].read_text(encoding="utf-8")
    page = tmp_path / "README.md"
    page.write_text(made.replace("| spiral", "| circle"), encoding="utf-8")
    monkeypatch.setitem(pages.PAGES, "readme", page)
    assert pages.main(["readme", "--check"]) == 1
    assert "README.md" in capsys.readouterr().err
    assert pages.main(["readme"]) == 0
    assert page.read_text(encoding="utf-8") == made


@pytest.mark.parametrize("study", studies.studies())
def test_results_are_complete(study, capsys):
    for row in studies.read(study):
        assert row["environment"] in ENVIRONMENTS
        assert {"commit", "recorded"} & set(row)
        assert set(row.get("ledger", ())) <= set(LEDGER)
        assert {"section", "group"} & set(row)
    assert studies.main([study]) == 0
    titles = {str(row.get("table", row.get("group"))) for row in studies.read(study)}
    assert capsys.readouterr().out.count("**\n\n") == len(titles)


def test_numbers_keep_their_digits():
    assert str(studies.Numeral("1.0000")) == "1.0000"
    assert studies.Numeral("4.70e-4") == 4.7e-4
    (row,) = (
        r for r in studies.read("standing") if r["goal"] == "fused, 200,000 x 200,000, 16 features"
    )
    assert str(row["value"]) == "0.022413"
    assert "| 1.0e-6 |" in studies.markdown(["error"], [[studies.Numeral("1.0e-6")]])


def test_the_list_of_results_is_complete():
    text = (studies.RESULTS / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`([\w-]+)\.jsonl`", text))
    assert listed == {"ledger", *studies.studies()}
    notes = {path.name for path in (studies.RESULTS / "notes").glob("*.md")}
    assert set(re.findall(r"`notes/([\w-]+\.md)`", text)) == notes
    for path in (studies.RESULTS / "notes").glob("*.md"):
        links = re.findall(r"\]\(([^)]+)\)", path.read_text(encoding="utf-8"))
        assert not [link for link in links if not (path.parent / link).is_file()], path.name
