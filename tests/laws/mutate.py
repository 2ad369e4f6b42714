"""Mutation of our own code, as a check of the checks: ``python tests/laws/mutate.py --count 60``.

A comparison or an operator of a module is turned into another one, in a copy of the package, and
the tests of that module are run beside it. Tests that still pass would have noticed nothing: the
mutant has survived. Mutants are drawn from a seed; each outcome is a line of ``--out``.

    python tests/laws/mutate.py --only _batch/relaxed.py --count 10 --seed 3
    python tests/laws/mutate.py --show _batch/relaxed.py:3
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Modules that are changed, and the tests that are to notice it.
TESTS = {
    "_batch/relaxed.py": ["tests/batch/test_marginal_rules.py"],
    "_batch/worth.py": ["tests/batch/test_engine.py"],
    "_batch/stopping.py": ["tests/batch/test_engine.py"],
    "_batch/newton.py": ["tests/batch/test_engine.py"],
    "_batch/advance.py": ["tests/batch/test_engine.py"],
    "_sinkhorn/annealing.py": ["tests/solve/test_descent.py"],
    "_sinkhorn/exact.py": ["tests/solve/test_frank_wolfe.py"],
    "_sinkhorn/loop.py": ["tests/sinkhorn/test_sinkhorn.py"],
    "_sinkhorn/newton.py": ["tests/sinkhorn/test_newton.py"],
    "_sinkhorn/partial.py": ["tests/sinkhorn/test_partial.py"],
    "_solve/polish.py": ["tests/solve/test_frank_wolfe.py"],
    "_solve/step.py": ["tests/solve/test_step.py", "tests/solve/test_inner.py"],
    "_many/polishing.py": ["tests/many/test_sharp_plans.py"],
    "_search/tabu.py": ["tests/search/test_tabu.py"],
    "_search/turns.py": ["tests/search/test_turns.py"],
    "_sinkhorn/entries.py": ["tests/solve/test_listed.py"],
    "_solve/balance.py": ["tests/solve/test_balance.py"],
}
# What stands in for what. A bound that is met exactly is rare, so < and <= are not exchanged.
OTHERS = {
    ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.And: ast.Or, ast.Or: ast.And, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
# Calls that stand for comparisons.
CALLS = {"minimum": "maximum", "maximum": "minimum", "argmin": "argmax", "argmax": "argmin",
         "clamp_min": "clamp_max", "clamp_max": "clamp_min"}  # fmt: skip


def places(tree):
    """List what can be changed: nodes of functions, not of annotations."""
    notes = set()
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if (note := getattr(node, name, None)) is not None:
                notes.update(map(id, ast.walk(note)))
    found = []
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            operator = node.ops[0] if isinstance(node, ast.Compare) else getattr(node, "op", None)
            called = isinstance(node, ast.Attribute) and node.attr in CALLS
            if id(node) not in notes and (type(operator) in OTHERS or called):
                found.append(node)
    unique = {id(node): node for node in found}
    return sorted(unique.values(), key=lambda node: (node.lineno, node.col_offset))


def mutated(text, number):
    """Change one place of a module; return the text, and what was changed."""
    tree = ast.parse(text)
    node = places(tree)[number]
    before = ast.unparse(node)
    if isinstance(node, ast.Attribute):
        node.attr = CALLS[node.attr]
    elif isinstance(node, ast.Compare):
        node.ops[0] = OTHERS[type(node.ops[0])]()
    else:
        node.op = OTHERS[type(node.op)]()
    return ast.unparse(tree), f"line {node.lineno}: {before} -> {ast.unparse(node)}"


def attempt(copy, module, number, limit):
    """Run the tests of a module with one change; return what became of it."""
    target = copy / "torchgw" / module
    text = target.read_text(encoding="utf-8")
    changed, told = mutated(text, number)
    target.write_text(changed, encoding="utf-8")
    call = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow",
            *TESTS[module]]  # fmt: skip
    began, environment = time.monotonic(), os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        code = subprocess.run(
            call, cwd=copy, env=environment, capture_output=True, timeout=limit, check=False
        ).returncode
        ended = "survived" if code == 0 else "killed"
    except subprocess.TimeoutExpired:
        ended = "killed by time"
    finally:
        target.write_text(text, encoding="utf-8")
    return {"module": module, "number": number, "ended": ended, "told": told,
            "seconds": round(time.monotonic() - began, 1)}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="modules, by commas")
    parser.add_argument("--limit", type=float, default=300, help="seconds for the tests of one")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="seconds of the run")
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument("--show", metavar="MODULE:NUMBER", help="tell what one mutant changes")
    options = parser.parse_args()
    if options.show:
        module, number = options.show.split(":")
        text = (ROOT / "torchgw" / module).read_text(encoding="utf-8")
        print(mutated(text, int(number))[1])
        return
    modules = options.only.split(",") if options.only else list(TESTS)
    drawn = [
        (module, number)
        for module in modules
        for number in range(
            len(places(ast.parse((ROOT / "torchgw" / module).read_text(encoding="utf-8"))))
        )
    ]
    random.Random(options.seed).shuffle(drawn)
    outcomes, began = [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder, options.out.open("w") as file:
        copy = Path(folder) / "copy"
        for part in ("torchgw", "tests"):
            shutil.copytree(ROOT / part, copy / part)
        for part in ("conftest.py", "pyproject.toml"):
            shutil.copy(ROOT / part, copy)
        for module, number in drawn[: options.count]:
            if time.monotonic() - began > options.seconds:
                break
            outcomes.append(attempt(copy, module, number, options.limit))
            file.write(json.dumps(outcomes[-1]) + "\n")
            file.flush()
            print(*outcomes[-1].values(), flush=True)
    for module in modules:
        ended = [one["ended"] for one in outcomes if one["module"] == module]
        print(f"{module:26} {len(ended):3} mutants, {ended.count('survived')} survived")


if __name__ == "__main__":
    main()
