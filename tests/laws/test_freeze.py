"""A slice of the frozen problems comes out as it was frozen, and changes are told by their kind.

``python -m benchmarks freeze --compare`` has all of them.
"""

from __future__ import annotations

import itertools
import json

import pytest

from benchmarks import __main__ as command_line
from benchmarks.freeze import compare, study
from benchmarks.freeze.cases import problems
from benchmarks.freeze.record import attempt, attempt_all, environment, one_thread, read
from torchgw._sinkhorn import loop

# bits are those of the arrays as they are
pytestmark = pytest.mark.exact
HEAD, FROZEN = read(study.frozen_file())
SAME = not compare.same_machine(HEAD, environment())


def cheap(count):
    """The quickest problems of every kind in turn, of one start or of a known answer."""
    kinds = {}
    for row in sorted(FROZEN.values(), key=lambda row: (row["s"], row["problem"])):
        kind = row["problem"].partition("/")[0]
        if row["s"] < 0.2 and ("bits" in row or kind == "known"):
            kinds.setdefault(kind, []).append(row["problem"])
    turns = itertools.chain.from_iterable(itertools.zip_longest(*kinds.values()))
    return list(itertools.islice(filter(None, turns), count))


# One that is refused has no value.
REFUSED = next(name for name, row in FROZEN.items() if row["value"] is None)


@pytest.mark.parametrize("name", [*cheap(39), REFUSED])
def test_what_was_frozen_comes_out_again(name):
    """Bits on the same kind of machine, elsewhere values as far as they are the same anywhere."""
    with one_thread():
        row = attempt(problems()[name])
    found = compare.differences(FROZEN[name], row, same=SAME)
    assert not [one for one in found if one.kind != "time"]


def test_the_record_is_of_all_problems():
    known = problems()
    assert list(FROZEN) == list(known)
    assert len(known) == 400
    assert sum("bits" in row for row in FROZEN.values()) > 150
    assert not [row for row in FROZEN.values() if row["status"].startswith("crash")]
    assert study.frozen_file().stat().st_size < 150_000
    # what depends on the machine is not compared elsewhere, which is little
    assert sum(row["room"] is None for row in FROZEN.values()) < 40


def test_a_changed_constant_is_told(monkeypatch):
    """With over-relaxation of 1.17 at most, in place of 1.98, iterates are others."""
    name = "options/0"
    with one_thread():
        before = attempt(problems()[name])
        monkeypatch.setattr(loop, "SMALLEST_GAP", 0.5)
        after = attempt(problems()[name])
    assert "bits" in {one.kind for one in compare.differences(before, after, same=True)}


OLD = {
    "problem": "some/1", "value": 1.0, "objective": 1.5, "status": "CONVERGED", "said": [],
    "s": 0.1, "bits": "0f", "room": 1e-6,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({}, []),
        ({"bits": "1f"}, ["bits"]),
        ({"status": "FLAT"}, ["status"]),
        ({"said": ["SearchWarning"]}, ["warnings"]),
        ({"objective": 1.5 + 3e-9}, ["higher-1e-9"]),
        ({"objective": 1.5 - 3e-6}, ["lower-1e-6"]),
        ({"objective": 1.6, "bits": "1f"}, ["bits", "higher-1e-3"]),
        ({"value": 0.9}, ["lower-1e-3"]),
        ({"objective": None, "value": None, "status": "NumericalError"}, ["status", "higher-1e-3"]),
        ({"s": 0.29}, []),
        ({"s": 0.31}, ["time"]),
    ],
)
def test_differences_are_told_by_kind(change, kinds):
    new = OLD | change
    assert [one.kind for one in compare.differences(OLD, new, same=True)] == kinds
    # elsewhere there are no bits and no times, and a value has room
    elsewhere = [kind for kind in kinds if kind not in ("bits", "time", "higher-1e-9")]
    assert [one.kind for one in compare.differences(OLD, new, same=False)] == elsewhere
    assert not list(compare.differences(OLD | {"room": None}, new, same=False))


def test_rooms_are_ten_times_what_was_measured():
    near, far = OLD | {"objective": 1.5 + 1e-7}, OLD | {"objective": 1.5 + 1e-5}
    assert compare.room(OLD, [OLD, near]) == 1e-6
    assert compare.room(OLD, [near, far]) == 1e-3
    assert compare.room(OLD, [OLD | {"objective": 1.51}]) is None
    assert compare.room(OLD, [OLD | {"status": "FLAT"}]) is None


def here(names, device, jobs, threads, variables):
    """Solve in this process, which is quicker than to begin others."""
    with one_thread():
        yield from (attempt(problems()[name], device) for name in names)


def test_a_part_is_frozen_and_compared(tmp_path, monkeypatch, capsys):
    """What differs is an error unless it is allowed."""
    monkeypatch.setattr(study, "attempt_all", here)
    record = tmp_path / "part.jsonl"
    part = ["freeze", "--only", "known", "--slice", "12"]
    assert command_line.main([*part, "--out", str(record)]) == 0
    again = [*part, "--compare", "--frozen", str(record)]
    assert command_line.main(again) == 0
    head, *rows = map(json.loads, record.read_text().splitlines())
    rows[0]["objective"] += 0.1
    rows[1]["said"] = ["ConvergenceWarning"]
    record.write_text("\n".join(map(json.dumps, [head, *rows])))
    capsys.readouterr()
    assert command_line.main(again) == 1
    told = capsys.readouterr().out
    assert "| lower-1e-3 | 1 |" in told
    assert f"{rows[1]['problem']} ConvergenceWarning -> " in told
    assert command_line.main([*again, "--allow", "lower,warnings,time"]) == 0
    assert command_line.main([*again, "--allow", "lower,time"]) == 1


@pytest.mark.slow
def test_other_processes_find_the_same():
    names = ["options/0", "pot/exact"]
    rows = {row["problem"]: row for row in attempt_all(names, "cpu", 1)}
    with one_thread():
        assert [rows[name]["bits"] for name in names] == [
            attempt(problems()[name])["bits"] for name in names
        ]


def test_a_part_does_not_replace_the_record():
    with pytest.raises(SystemExit):
        command_line.main(["freeze", "--slice", "2"])
    with pytest.raises(SystemExit):
        command_line.main(["freeze", "--only", "nothing"])
