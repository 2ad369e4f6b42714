"""POT's own tests, on our functions: ``python -m benchmarks pot-tests``.

The source distribution of the installed release comes from the registry into a temporary folder,
and its tests run there with every function of POT that ``torchgw.pot`` has a namesake for replaced
by that, wherever POT keeps it; what ``torchgw.pot`` hands out of POT's stays. Tests that call none
of ours are not counted. A test is refused if it ends in an error of ours that says that something
is not solved here, and one that wants what POT does wrong is counted by itself, as better. The
distribution has only the files at the top of POT's test folder; ``--tests`` takes the whole folder
of a checkout. NumPy and PyTorch only.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "test_solvers.py",
    "test_partial.py",
    "test_ucoot.py",
    "test_da.py",
    "test_gromov.py",
    "gromov",
    "unbalanced",
)
OUTCOMES = ("passed", "better", "refused", "failed")
# Tests of POT that want what POT does wrong, by the beginning of their names.
BETTER = {
    "test_gromov_integer_warnings": "plans of integer costs are rounded to zeros; ours are not",
    "test_fgw_integer_warnings": "plans of integer costs are rounded to zeros; ours are not",
    "test_partial_gromov_wasserstein": "plans of integer costs are integers; ours are not",
    "test_partial_fused_gromov_wasserstein": "plans of integer costs are integers; ours are not",
}
_OUTPUT, _REPLACE = "POT_TESTS_OUTPUT", "POT_TESTS_REPLACE"


def main(arguments: list[str] | None = None) -> int:
    """Fetch the tests, run them, print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks pot-tests", description=__doc__)
    parser.add_argument("--tests", type=Path, help="test folder of a checkout of POT")
    parser.add_argument("--files", help="names of files or folders, by commas")
    parser.add_argument("--only", default="", help="pytest's expression -k")
    parser.add_argument("--pot", action="store_true", help="run POT's functions, to compare")
    parser.add_argument("--output", type=Path, help="file for one JSON line for each test")
    options = parser.parse_args(arguments)
    files = options.files.split(",") if options.files else FILES
    with tempfile.TemporaryDirectory() as folder:
        tests = options.tests or fetch(Path(folder))
        found = [tests / name for name in files if (tests / name).exists()]
        records = run(found, Path(folder), options.only, replace=not options.pot)
    if options.output:
        lines = (json.dumps(record) for record in records)
        options.output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(table(records))
    return 0


def fetch(folder: Path) -> Path:
    """Download the source distribution of the installed release; return its test folder."""
    release = version("pot")
    pip = [sys.executable, "-m", "pip"]
    # pip looks into a source distribution, whose setup wants Cython; nothing is built
    subprocess.run([*pip, "install", "-q", "--target", folder / "tools", "cython"], check=True)
    subprocess.run(
        [*pip, "download", "-q", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
        + ["-d", folder, f"pot=={release}"],
        check=True,
        env=os.environ | {"PYTHONPATH": str(folder / "tools")},
    )
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.glob("*/test"))


def run(files: list[Path], folder: Path, only: str, *, replace: bool) -> list[dict[str, Any]]:
    """Run the tests in a process of their own; return a record for each."""
    output = folder / "outcomes.jsonl"
    settings = folder / "pytest.ini"
    settings.write_text("[pytest]\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-c", settings, "-p", __name__, "-W", "ignore"]
    command += ["-p", "no:cacheprovider", "--noconftest", "--tb=no", "-k", only, *files]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    more = {_OUTPUT: str(output), _REPLACE: str(int(replace)), "PYTHONPATH": paths}
    done = subprocess.run(
        list(map(str, command)), env=os.environ | more, capture_output=True, text=True, check=False
    )
    if not output.exists():
        raise RuntimeError(done.stdout + done.stderr)
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


def summary(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Count outcomes by file, with the reasons of what did not pass."""
    rows: dict[str, dict[str, Any]] = {}
    for record in records:
        if not record["calls"]:
            continue
        ended, reason = record["outcome"], record["reason"]
        known = [BETTER[start] for start in BETTER if record["test"].startswith(start)]
        if ended == "failed" and known:
            ended, reason = "better", known[0]
        elif ended == "refused":
            reason = reason.partition("has no counterpart here. ")[2].removesuffix(" Or use POT's.")
        name = record["file"]
        row = rows.setdefault(name, {"file": name, **dict.fromkeys(OUTCOMES, 0), "reasons": []})
        row[ended] += 1
        if ended != "passed" and reason not in row["reasons"]:
            row["reasons"].append(reason)
    return [rows[name] for name in sorted(rows)]


def table(records: list[dict[str, Any]]) -> str:
    """Return outcomes by file as a Markdown table."""
    rows = summary(records)
    whole = {"file": "all", **{name: sum(row[name] for row in rows) for name in OUTCOMES}}
    lines = [f"| file | {' | '.join(OUTCOMES)} | why |", "|---" * (len(OUTCOMES) + 2) + "|"]
    for row in [*rows, whole]:
        cells = [str(row[name]) for name in ("file", *OUTCOMES)]
        lines.append("| " + " | ".join([*cells, "; ".join(row.get("reasons", ()))]) + " |")
    count = sum(whole[name] for name in OUTCOMES)
    share = whole["passed"] / max(count, 1)
    return "\n".join([*lines, "", f"{share:.1%} passed of {count} that call functions of ours"])


class _Calls:
    """What the functions of ours did in the test that runs."""

    def __init__(self) -> None:
        self.count = 0
        self.refusals: list[str] = []

    def watch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that its calls and refusals are counted."""

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            try:
                return function(*args, **kwargs)
            except NotImplementedError as error:
                self.refusals.append(str(error))
                raise

        return watched


_CALLS = _Calls()


def _replace(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Put functions of ours where POT keeps its own, whatever the name there."""
    for name, function in theirs.items():
        new = _CALLS.watch(ours[name])
        for path, module in list(sys.modules.items()):
            if path == "ot" or path.startswith("ot."):
                for place, value in list(vars(module).items()):
                    if value is function:
                        setattr(module, place, new)


def _backends() -> list[Any]:
    import ot

    return [ot.backend.NumpyBackend(), ot.backend.TorchBackend()]


def pytest_configure(config: Any) -> None:
    """Replace the functions before POT's tests import them, and lend them POT's fixtures."""
    if _OUTPUT not in os.environ:
        return
    import numpy as np
    import ot

    import torchgw.pot
    from torchgw.pot import _solve
    from torchgw.pot._arrays import handed
    from torchgw.pot.gromov import _quantized, _steps

    np.set_printoptions(legacy="1.25")
    names = torchgw.pot.gromov.__all__
    theirs = {name: getattr(ot.gromov, name) for name in names}
    theirs["solve_gromov"] = ot.solve_gromov
    ours = {name: getattr(torchgw.pot.gromov, name) for name in names}
    ours["solve_gromov"] = torchgw.pot.solve_gromov
    _replace(theirs, ours if os.environ[_REPLACE] == "1" else theirs)
    # what ours have POT do is done by POT's own functions
    for module in (_solve, _quantized, _steps):
        setattr(module, "handed", lambda *of: theirs.get(of[0]) or handed(*of))  # noqa: B010

    def skipping(names: Any, values: Any, reason: str = "", getter: Any = str) -> Any:
        return lambda function: function

    pytest.skip_arg = skipping  # type: ignore[attr-defined]
    pytest.skip_backend = functools.partial(skipping, "nx")  # type: ignore[attr-defined]
    config.addinivalue_line("markers", "pot: POT's tests")


def pytest_generate_tests(metafunc: Any) -> None:
    """Run tests of POT on NumPy and on PyTorch."""
    if _OUTPUT in os.environ and "nx" in metafunc.fixturenames:
        metafunc.parametrize("nx", _backends(), ids=["numpy", "torch"])


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: Any) -> Iterator[None]:
    """Note how a test ended."""
    if _OUTPUT not in os.environ:
        yield
        return
    _CALLS.__init__()  # type: ignore[misc]
    outcome = yield
    error = outcome.excinfo
    skipped = error is not None and error[0].__name__ == "Skipped"
    expected = item.get_closest_marker("xfail")
    raised = None if expected is None else expected.kwargs.get("raises", Exception)
    reason = "" if error is None else f"{error[0].__name__}: {error[1]}".strip()
    if error is None or (raised is not None and issubclass(error[0], raised)):
        ended = "passed"
    elif skipped or issubclass(error[0], NotImplementedError):
        ended = "refused" if _CALLS.refusals else "skipped"
        reason = _CALLS.refusals[-1] if _CALLS.refusals else reason
    else:
        ended = "failed"
    where = Path(item.fspath)
    record = {
        "file": f"{where.parent.name}/{where.name}" if where.parent.name != "test" else where.name,
        "test": item.name, "outcome": ended, "calls": _CALLS.count,
        "reason": " ".join(reason.split())[:300],
    }  # fmt: skip
    with open(os.environ[_OUTPUT], "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
