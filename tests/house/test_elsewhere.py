from __future__ import annotations

import datetime
import importlib.util
from pathlib import Path

import elsewhere
import pytest
import torch
from elsewhere import Run, main, read, table, variants

NEW = {"sse2", "sse4_2", "avx2", "avx512f"}


def test_a_processor_runs_what_it_has():
    assert len(variants(NEW)) == 11
    assert list(variants(NEW - {"avx512f"})) == [
        name for name in variants(NEW) if name not in ("aten-avx512", "openblas-skylakex")
    ]
    assert list(variants(set())) == ["aten-default", "one-thread", "two-threads", "moved"]


ENDS = [
    ("..\n2 passed, 1 skipped in 0.10s\n", 0, 2, ()),
    (
        "F.E\nFAILED tests/a.py::test_b[1-x y] - assert 1 == 2\nERROR tests/c.py\n"
        "1 failed, 7 passed, 1 error in 2s (0:00:02)\n",
        1, 7, ("tests/a.py::test_b[1-x y]", "tests/c.py"),
    ),
    ("Killed\n", -9, 0, ("pytest ended with code -9",)),
]  # fmt: skip


@pytest.mark.parametrize(("output", "code", "passed", "failed"), ENDS)
def test_an_end_is_read(output, code, passed, failed):
    assert read(output, code, 1.0) == Run(passed, failed, 1.0)


@pytest.fixture
def ran(monkeypatch):
    """The settings of each run; those with two threads fail."""
    ran = []

    def run(settings, arguments):
        ran.append((settings, arguments))
        return Run(1, ("test_a",) if "2" in settings.values() else (), 1.0)

    monkeypatch.setattr(elsewhere, "run", run)
    monkeypatch.setattr(elsewhere, "processor", lambda: NEW)
    return ran


def test_the_variants_asked_for_run_so_often(ran, capsys):
    assert main(["--variants", "moved one-thread", "--runs", "2", "--pytest=-k 'a or b'"]) == 0
    moved, one = ({"TORCHGW_TEST_MOVE": "1e-12"}, {"OMP_NUM_THREADS": "1"})
    assert ran == [(settings, ["-k", "a or b"]) for settings in (moved, moved, one, one)]
    assert main(["--runs", "1"]) == 1
    before, _ = capsys.readouterr().out.split("    1 of 1: test_a\n")
    assert before.splitlines()[-1].split() == ["two-threads", "1", "1", "1"]
    with pytest.raises(SystemExit, match="2"):
        main(["--variants", "other"])


def test_every_day_has_its_variant(ran, monkeypatch):
    for day in range(11):

        class Clock(datetime.date):
            @classmethod
            def today(cls, day=day):
                return cls(2026, 1, 1 + day)

        monkeypatch.setattr(datetime, "date", Clock)
        main(["--today"])
    assert len(ran) == len({str(one) for one in ran}) == 11


def test_a_failure_is_counted():
    shown = table({"moved": [Run(5, ("a",), 2.0), Run(7, ("a", "b"), 4.0)]})
    assert [line.split() for line in shown.splitlines()[1:]] == [
        ["moved", "6", "2", "3"], ["2", "of", "2:", "a"], ["1", "of", "2:", "b"],
    ]  # fmt: skip


def test_numbers_are_moved_by_themselves_alone():
    path = Path(__file__).parents[1] / "conftest.py"
    spec = importlib.util.spec_from_file_location("conftest_again", path)
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    given = torch.tensor([0.3, -0.3, 0, torch.inf, torch.nan, 1e-9, 7, 0.25], dtype=torch.float64)
    moved = conftest.moved(given, 1e-12)
    assert moved[1] == -moved[0]
    assert (moved != given).tolist() == [True, True, False, False, True, True, False, False]
    torch.testing.assert_close(moved, given, rtol=1e-12, atol=0, equal_nan=True)
