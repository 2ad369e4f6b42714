"""Mutation of our own code, as a check of the checks: ``python tests/laws/mutate.py --count 60``.

A comparison or an operator of a module is turned into another one, in a copy of the package, and
the tests of that module are run beside it. Tests that still pass would have noticed nothing: the
mutant has survived. Tests that fail with nothing changed are left out. Mutants are drawn from a
seed; each outcome is a line of ``--out``. Without a GPU Triton's interpreter runs its kernels.

    python tests/laws/mutate.py --only _batch/sweep.py --count 10 --seed 3
    python tests/laws/mutate.py --only triton,kernels --slow
    python tests/laws/mutate.py --show _batch/sweep.py:3
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Rooms whose modules are changed, and tests that notice it where no file bears a module's name.
ROOMS = ("_answer", "_solve", "_sinkhorn", "_search", "_starts", "_batch")
OTHER_NAMES = {
    "_answer/passes.py": "solve/test_solve answer/test_overlap",
    "_answer/reduced.py": "laws/test_twins problem/test_preparation",
    "_batch/advance.py": "batch/test_engine many/test_relaxed_many",
    "_batch/anneal_triton.py": "batch/test_rough",
    "_batch/finish_triton.py": "batch/test_rough",
    "_batch/half_step_triton.py": "batch/test_half_steps",
    "_batch/inner_triton.py": "batch/test_scaled_kernels batch/test_rough",
    "_batch/newton.py": "batch/test_engine",
    "_batch/packing.py": "batch/test_engine batch/test_rough many/test_solve_many",
    "_batch/product_triton.py": "batch/test_rough",
    "_batch/programs_triton.py": "batch/test_rough batch/test_relaxed_programs",
    "_batch/relaxed_triton.py": "batch/test_relaxed_programs",
    "_batch/rough_triton.py": "batch/test_rough",
    "_batch/settle_triton.py": "batch/test_rough",
    "_batch/sweep.py": "batch/test_engine batch/test_marginal_rules",
    "_batch/sweep_triton.py": "batch/test_rough sinkhorn/test_batch_sinkhorn",
    "_batch/tile_triton.py": "batch/test_rough batch/test_half_steps",
    "_batch/worth.py": "batch/test_engine",
    "_batch/worth_triton.py": "batch/test_rough",
    "_many/polishing.py": "many/test_sharp_plans",
    "_search/all_points.py": "search/test_edges search/test_beliefs",
    "_search/optima.py": "search/test_multistart",
    "_search/population.py": "search/test_multistart",
    "_search/stack.py": "search/test_multistart",
    "_search/world.py": "search/test_repair solve/test_forecast",
    "_sinkhorn/annealing.py": "solve/test_descent solve/test_solve sinkhorn/test_partial",
    "_sinkhorn/blocks.py": "solve/test_blocks",
    "_sinkhorn/choose.py": "sinkhorn/test_backends",
    "_sinkhorn/compiled.py": "sinkhorn/test_sinkhorn",
    "_sinkhorn/contract.py": "sinkhorn/test_sinkhorn",
    "_sinkhorn/eager.py": "sinkhorn/test_sinkhorn sinkhorn/test_batch_sinkhorn",
    "_sinkhorn/entries.py": "solve/test_listed",
    "_sinkhorn/exact.py": "solve/test_frank_wolfe",
    "_sinkhorn/kernels/batch.py": "sinkhorn/test_batch_sinkhorn",
    "_sinkhorn/loop.py": "sinkhorn/test_sinkhorn",
    "_sinkhorn/problem.py": "sinkhorn/test_sinkhorn",
    "_sinkhorn/tiles/eager.py": "sinkhorn/tiles/test_tiles",
    "_sinkhorn/tiles/prepared.py": "sinkhorn/tiles/test_tiles",
    "_sinkhorn/tiles/tiling.py": "sinkhorn/tiles/test_tiles",
    "_sinkhorn/tiles/triton.py": "sinkhorn/tiles/test_tiles",
    "_solve/evaluation.py": "laws/test_truth solve/test_solve solve/test_relaxed",
    "_solve/begin.py": "solve/test_solve",
    "_solve/loop.py": "solve/test_descent",
    "_solve/pipeline.py": "solve/test_solve solve/test_proximal solve/test_memory",
    "_solve/polish.py": "solve/test_frank_wolfe",
    "_solve/route.py": "solve/test_dispatch",
    "_solve/state.py": "solve/test_checkpoint solve/test_solve solve/test_dispatch",
    "_solve/step.py": "solve/test_step solve/test_inner",
    "_solve/strategy.py": "solve/test_dispatch solve/test_areas",
    "_starts/alternatives.py": "starts/test_relation search/test_multistart",
    "_starts/chain.py": "search/test_chains search/test_repair",
    "_starts/coarse.py": "search/test_tabu search/test_multistart",
    "_starts/graphs.py": "starts/test_edge_exchange search/test_chains",
    "_starts/guesses.py": "starts/test_congruent search/test_multistart",
    "_starts/standard.py": "laws/test_twins",
    "_starts/subsample.py": "solve/test_resolution",
}


def tests_of(module):
    """Return the files or the folder of tests that are to notice a change of a module."""
    folder, _, name = f"tests/{module[1:]}".rpartition("/")
    named = f"{folder}/test_{name}"
    if module in OTHER_NAMES:
        return [f"tests/{other}.py" for other in OTHER_NAMES[module].split()]
    return [named if (ROOT / named).is_file() else folder]


TESTS = {
    module: tests_of(module)
    for module in sorted(
        {str(path.relative_to(ROOT / "torchgw")) for room in ROOMS
         for path in (ROOT / "torchgw" / room).rglob("[!_]*.py")} | set(OTHER_NAMES)
    )
}  # fmt: skip
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


def failures(copy, tests, limit, *without):
    """Run tests in a copy, by pytest's options; return those that failed."""
    call = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [*call, *without], cwd=copy, env=environment, capture_output=True, text=True,
        timeout=limit, check=False,
    )  # fmt: skip
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", ran.stdout, re.MULTILINE)
    if ran.returncode < 0:
        return ["a crash"]
    # 5: no test of these runs here
    if ran.returncode not in (0, 5) and not failed:
        raise SystemExit(f"{tests}: {ran.stdout[-800:]}{ran.stderr[-800:]}")
    return failed


def attempt(copy, module, number, limit, without):
    """Run the tests of a module with one change, by pytest's options; return what became of it."""
    target = copy / "torchgw" / module
    text = target.read_text(encoding="utf-8")
    changed, told = mutated(text, number)
    target.write_text(changed, encoding="utf-8")
    began = time.monotonic()
    try:
        found = failures(copy, TESTS[module], limit, "-x", *without)
        ended = f"killed by {found[0]}" if found else "survived"
    except subprocess.TimeoutExpired:
        ended = "killed by time"
    finally:
        target.write_text(text, encoding="utf-8")
    return {"module": module, "number": number, "ended": ended, "told": told,
            "seconds": round(time.monotonic() - began, 1)}  # fmt: skip


def copied(folder):
    """Copy the package and its tests into a folder."""
    for part in ("torchgw", "tests"):
        shutil.copytree(ROOT / part, folder / part)
    for part in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / part, folder)
    return folder


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=1, help="copies whose tests run side by side")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="modules, or parts of their names, by commas")
    parser.add_argument("--slow", action="store_true", help="run slow tests too")
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
    only = (options.only or "").split(",")
    modules = [module for module in TESTS if any(part in module for part in only)]
    drawn = [
        (module, number)
        for module in modules
        for number in range(
            len(places(ast.parse((ROOT / "torchgw" / module).read_text(encoding="utf-8"))))
        )
    ]
    random.Random(options.seed).shuffle(drawn)
    drawn = drawn[: options.count]
    which = ["-m", "not gpu and not dist"] if options.slow else []
    outcomes, began, red = [], time.monotonic(), {}
    with tempfile.TemporaryDirectory() as folder, options.out.open("w") as file:
        copies = queue.SimpleQueue()
        for number in range(options.jobs):
            copies.put(copied(Path(folder) / str(number)))

        def tried(task, *rest):
            if time.monotonic() - began > options.seconds:
                return None
            copy = copies.get()
            try:
                return task(copy, *rest)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(options.jobs) as pool:
            sets = sorted({tuple(TESTS[module]) for module, _ in drawn})
            for tests, failed in zip(
                sets,
                pool.map(lambda tests: tried(failures, tests, None, *which), sets),
                strict=True,
            ):
                red[tests] = [f"--deselect={name}" for name in failed or ()]
                print("red with nothing changed:", *failed or ["none"], f"of {tests}", flush=True)
            for outcome in pool.map(
                lambda one: tried(
                    attempt, *one, options.limit, [*which, *red[tuple(TESTS[one[0]])]]
                ),
                drawn,
            ):
                if outcome is not None:
                    outcomes.append(outcome)
                    file.write(json.dumps(outcome) + "\n")
                    file.flush()
                    print(*outcome.values(), flush=True)
    for module in modules:
        ended = [one["ended"] for one in outcomes if one["module"] == module]
        print(f"{module:26} {len(ended):3} mutants, {ended.count('survived')} survived")


if __name__ == "__main__":
    main()
