"""Run the suite as other processors would: ``python tests/house/elsewhere.py``.

Sums are rounded differently where registers are wider, where another kernel multiplies, or where
threads share the work; each variant asks the libraries here for what they do there. One of them
moves the input instead. The exit code is 1 if a test fails in any. ``--today`` runs one variant
once, another one every day.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Run(NamedTuple):
    passed: int
    failed: tuple[str, ...]
    seconds: float


def processor() -> set[str]:
    """Read which instructions the processor has."""
    known = Path("/proc/cpuinfo")
    found = re.search(r"^flags\s*:(.*)$", known.read_text() if known.exists() else "", re.M)
    return set(found[1].split()) if found else set()


def variants(flags: set[str]) -> dict[str, dict[str, str]]:
    """Name the variants that a processor can run, and what each sets in the environment."""
    every = [
        ("aten-default", "", {"ATEN_CPU_CAPABILITY": "default"}),
        ("aten-avx2", "avx2", {"ATEN_CPU_CAPABILITY": "avx2"}),
        ("aten-avx512", "avx512f", {"ATEN_CPU_CAPABILITY": "avx512"}),
        ("mkl-compatible", "sse2", {"MKL_CBWR": "COMPATIBLE"}),
        ("mkl-avx2", "avx2", {"MKL_CBWR": "AVX2"}),
        ("openblas-nehalem", "sse4_2", {"OPENBLAS_CORETYPE": "Nehalem"}),
        ("openblas-haswell", "avx2", {"OPENBLAS_CORETYPE": "Haswell"}),
        ("openblas-skylakex", "avx512f", {"OPENBLAS_CORETYPE": "SkylakeX"}),
        ("one-thread", "", {"OMP_NUM_THREADS": "1"}),
        ("two-threads", "", {"OMP_NUM_THREADS": "2"}),
        ("moved", "", {"TORCHGW_TEST_MOVE": "1e-12"}),
    ]
    return {name: settings for name, needed, settings in every if not needed or needed in flags}


def read(output: str, code: int, seconds: float) -> Run:
    """Read what pytest says at its end."""
    names = re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", output, re.M)
    passed = re.findall(r"^(?:\d+ \w+, )*(\d+) passed", output, re.M)
    if code and not names:
        names = [f"pytest ended with code {code}"]
    return Run(int(passed[-1]) if passed else 0, tuple(names), seconds)


def run(settings: dict[str, str], arguments: list[str]) -> Run:
    """Run the suite once, and show what it says."""
    command = [sys.executable, "-m", "pytest", "-q", "--numprocesses", "auto", *arguments]
    # processes that tests start read bytecode
    given = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": ""}
    environment = os.environ | given | settings
    start, lines = time.monotonic(), []
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as going:
        for line in going.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return read("".join(lines), going.returncode, time.monotonic() - start)


def table(runs: dict[str, list[Run]]) -> str:
    """Say how each variant ended: means over its runs, and in how many of them a test failed."""
    lines = [f"{'variant':20}{'passed':>8}{'failed':>8}{'seconds':>9}"]
    for name, those in runs.items():
        passed, seconds = (sum(part) / len(those) for part in (
            [one.passed for one in those], [one.seconds for one in those]
        ))  # fmt: skip
        failed = collections.Counter(test for one in those for test in one.failed)
        lines.append(f"{name:20}{passed:8.0f}{len(failed):8}{seconds:9.0f}")
        lines += [f"    {count} of {len(those)}: {test}" for test, count in sorted(failed.items())]
    return "\n".join(lines)


def main(given: list[str] | None = None) -> int:
    """Run the variants that are asked for."""
    here = variants(processor())
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--today", action="store_true", help="one variant, by the date, once")
    parser.add_argument("--variants", default="", help=f"of: {' '.join(here)} (default all)")
    parser.add_argument("--runs", type=int, default=3, help="of each variant (default 3)")
    parser.add_argument("--pytest", default="", help="arguments of pytest")
    asked = parser.parse_args(given)
    names = asked.variants.split() or list(here)
    if unknown := [name for name in names if name not in here]:
        parser.error(f"{', '.join(unknown)} cannot run here; {', '.join(here)} can")
    if asked.today:
        asked.runs, names = 1, [names[datetime.date.today().toordinal() % len(names)]]
    runs = {}
    for name in names:
        for number in range(asked.runs):
            settings = " ".join(f"{key}={value}" for key, value in here[name].items())
            print(f"{name}, {number + 1} of {asked.runs}: {settings}", flush=True)
            runs.setdefault(name, []).append(run(here[name], shlex.split(asked.pytest)))
    print(table(runs))
    return int(any(one.failed for those in runs.values() for one in those))


if __name__ == "__main__":
    sys.exit(main())
