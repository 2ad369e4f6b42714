"""Count what makes the package hard or easy to live in: ``python tests/house/structure.py``.

Lines and words, module-level numbers, rooms and the imports between them, cut points on n m, and
the files that a solve enters. A count is no aim in itself; one that rises wants a reason. ``--map``
prints what each module is instead, ``--numbers`` what kind of number each constant holds.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "torchgw"
# One tree of each text, as several tests read all modules.
parsed = cache(ast.parse)

# Words for a number of points, of pairs, of bytes or of rows.
_SIZES = {
    "n", "m", "size", "sizes", "entries", "numel", "nnz", "larger", "smaller", "shape", "count",
    "work", "most", "fewer", "len", "rows", "columns", "vertices", "edges", "points", "pairs",
    "nbytes", "needed",
}  # fmt: skip
# What lines are counted as.
_LINES = "statements", "signatures", "imports", "docstrings", "comments", "blank"
# Files that hold the numbers of paths. A number that a size is compared with anywhere else is to
# choose between two programs that compute the same, or to say how much is done at once.
_PATHS = "_problem/limits.py", "_solve/route.py"
# What is shown and said.
_SHOWN = "plotting", "cli/", "_boundary/console"
_ORDERS = ast.Lt, ast.LtE, ast.Gt, ast.GtE
_ENTERED = """
import json, sys, warnings
import numpy as np
import torchgw
warnings.simplefilter("ignore")
entered, package, loading = set(), {package!r}, 0
def enter(frame, event, arg):
    global loading
    code = frame.f_code
    if event in ("call", "return") and code.co_filename.startswith(package):
        # what runs while a module is imported, as bodies of classes do, is no part of the solve
        if code.co_name == "<module>":
            loading += 1 if event == "call" else -1
        elif not loading:
            entered.add(code.co_filename)
sys.setprofile(enter)
x, y = (np.random.default_rng(seed).normal(size=(240, 3)) for seed in (0, 1))
torchgw.solve(x, y, distances="euclidean", random_state=0, **{options!r})
sys.setprofile(None)
print(json.dumps(sorted(entered)))
"""


def modules() -> dict[str, str]:
    """Read every module of the package, by its path below it."""
    return {
        path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def constants(text: str) -> dict[str, int]:
    """Count the numbers that each constant of a module holds, by the first name assigned."""
    found: dict[str, int] = {}
    for node in parsed(text).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [
            part.id
            for target in targets
            for part in getattr(target, "elts", [target])
            if isinstance(part, ast.Name)
        ]
        if names and all(name.strip("_").isupper() for name in names):
            # a name for each of several values, or the first for all of them
            values = getattr(node.value, "elts", [])
            each = map(_held, values) if len(values) == len(names) > 1 else [_held(node)]
            found |= dict.fromkeys(names, 0) | dict(zip(names, each, strict=False))
    return found


def _held(node: ast.AST) -> int:
    """Count the numbers of an expression, of which one that is computed of numbers alone is one."""
    if isinstance(node, ast.Subscript):
        # a place is no number that is held
        return _held(node.value)
    parts = [part for part in ast.walk(node) if isinstance(part, ast.expr)]
    kinds = ast.BinOp, ast.UnaryOp, ast.Constant
    if isinstance(node, ast.expr) and all(isinstance(part, kinds) for part in parts):
        values = (part.value for part in parts if isinstance(part, ast.Constant))
        return int(all(type(value) in (int, float) for value in values))
    return sum(map(_held, ast.iter_child_nodes(node)))


def numbers(text: str) -> int:
    """Count the numbers that the constants of a module hold."""
    return sum(constants(text).values())


def kinds(texts: dict[str, str]) -> dict[str, list[tuple[str, int]]]:
    """Divide constants by what they are, each with the numbers that it holds: by rules, roughly.

    Fitted are those that choose a path and those that say how far an algorithm goes.
    """
    found: dict[str, list[tuple[str, int]]] = defaultdict(list)
    of_all = {name for text in texts.values() for name in set().union(*_sides(text))}
    for path, text in texts.items():
        # other modules may compare what has no underscore
        own, public = set().union(*_sides(text)), {name for name in of_all if name[0] != "_"}
        for name, count in constants(text).items():
            # the constant, up to the next line without indentation, and the comment above
            line = re.search(rf"^(?:\w+, )*{name}\b.*\n(?:[ )}}\]].*\n)*", text + "\n", re.M)
            value = (line[0] if line else "").partition("=")[2]
            above = text[: line.start() if line else 0].rsplit("\n\n", 1)[-1]
            told = re.split(r"^[A-Z_]", above, flags=re.M)[-1]
            whole = not re.search(r"\d\.|e-\d", value)
            if re.search(r"_VERSION|EXIT_", name):
                kind = "formats, and how much at once"
            elif whole and re.search("triton|/kernels/", path):
                kind = "shapes of programs on a GPU"
            elif path.startswith(_SHOWN) or re.search(r'", "|, "\w+"\)', value):
                # a table of words, such as those of units
                kind = "formats, and how much at once"
            elif "econds" in told or path in (*_PATHS, "_solve/forecast.py"):
                kind = "choose a path"
            elif re.search(r"e-(?:[89]|\d\d)|e\d\d|tiny|eps", value) or "rounding" in told:
                kind = "rounding"
            elif name in own or (name in public and "at once" not in told):
                kind = "choose a path"
            elif re.search(r"\*\*\d|<<", value) or re.search("at once|together|kept|bytes", told):
                kind = "formats, and how much at once"
            else:
                kind = "how far an algorithm goes"
            found[kind] += [(f"{path}: {name}", count)] if count else []
    return dict(sorted(found.items()))


def kinds_of_lines(text: str) -> dict[str, int]:
    """Count lines by what they are: each of the first kind that it is, the rest are statements."""
    tree, lines, found = ast.parse(text), text.splitlines(), dict.fromkeys(_LINES, 0)
    places: dict[int, str] = {}

    def mark(kind: str, first: int, last: int) -> None:
        places.update((number, kind) for number in range(first, last + 1) if number not in places)

    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(
            node
        ):
            mark("docstrings", node.body[0].lineno, node.body[0].end_lineno or 0)
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            mark("imports", node.lineno, node.end_lineno or 0)
        if isinstance(node, ast.FunctionDef):
            last = node.body[0].lineno - 1
            # the last line of a signature may be marked
            while last > node.lineno and not re.search(r":(  # fmt: skip)?$", lines[last - 1]):
                last -= 1
            mark("signatures", node.lineno, last)
    for number, line in enumerate(lines, start=1):
        kind = "blank" if not line.strip() else "comments" if line.strip()[0] == "#" else None
        found[places.get(number) or kind or "statements"] += 1
    return found


def _sides(text: str) -> list[set[str]]:
    """List the names in each side of a comparison whose other side is a size."""
    found = []
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], _ORDERS):
            sides = [_names(side) for side in (node.left, *node.comparators)]
            sized = [bool(names & _SIZES) for names in sides]
            found += [
                names
                for place, names in enumerate(sides)
                if any(sized[:place] + sized[place + 1 :])
            ]
    return found


def compared(text: str) -> tuple[int, int]:
    """Count the comparisons of a size with a limit, and with a number of the module itself."""
    sides, own = _sides(text), constants(text)
    with_limits = sum(bool(names & {"limits", "limits_of", "CPU"}) for names in sides)
    return with_limits, sum(bool(names & own.keys()) for names in sides)


def _names(tree: ast.AST) -> set[str]:
    """List the names and attributes in an expression."""
    parts = list(ast.walk(tree))
    return {part.id for part in parts if isinstance(part, ast.Name)} | {
        part.attr for part in parts if isinstance(part, ast.Attribute)
    }


def imports(name: str, text: str) -> set[str]:
    """List the modules of the package that one imports, as paths below it."""
    found = set()
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchgw."):
            found.add((node.module or "").removeprefix("torchgw.").replace(".", "/"))
    return found - {name.removesuffix(".py")}


def arrows(room: str, texts: dict[str, str]) -> tuple[int, int, int]:
    """Count the modules of a room, the imports between them, and the floors that these make."""
    inside = {name.removesuffix(".py") for name in texts if name.startswith(f"{room}/")}
    inside -= {f"{room}/__init__"}
    edges = {name: imports(name, texts[f"{name}.py"]) & inside for name in inside}
    floors: dict[str, int] = {}

    def floor(name: str, above: tuple[str, ...] = ()) -> int:
        if name not in floors and name not in above:
            floors[name] = 1 + max((floor(one, (*above, name)) for one in edges[name]), default=0)
        return floors.get(name, 0)

    return len(inside), sum(map(len, edges.values())), max(map(floor, inside))


def entered(**options: object) -> int:
    """Count the files whose functions a solve of 240 points calls."""
    code = _ENTERED.format(package=str(PACKAGE), options=options)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return len(json.loads(done.stdout))


def words(text: str, heading: str, level: str) -> int:
    """Count the words below a heading, tables that are made and code left out."""
    part = re.search(
        rf"^{level} {re.escape(heading)}\n(.*?)(?=^#{{1,{len(level)}}} |\Z)", text, re.M | re.S
    )
    assert part, f"no heading {heading}"
    kept = re.sub(r"<!-- table.*?<!-- end -->|```.*?```", "", part[1], flags=re.S)
    return len(kept.split())


def parameters() -> tuple[int, int]:
    """Count the parameters of `solve` and the words of its docstring."""
    tree = ast.parse((PACKAGE / "_api.py").read_text(encoding="utf-8"))
    found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    arguments = found["solve"].args
    count = len(arguments.args) + len(arguments.kwonlyargs)
    return count, len((ast.get_docstring(found["solve"]) or "").split())


def counted() -> dict[str, str]:
    """Count everything."""
    texts = modules()
    rooms = defaultdict(int)
    for name, text in texts.items():
        rooms[name.split("/")[0]] += text.count("\n")
    sized = {name: compared(text) for name, text in texts.items()}
    limited = [one for one, _ in sized.values() if one]
    beside = [own for name, (_, own) in sized.items() if own and name not in _PATHS]
    docs = {page: (ROOT / "docs" / page).read_text("utf-8") for page in (
        "how-to-choose.md", "algorithm.md"
    )}  # fmt: skip
    options, docstring = parameters()
    found = {
        "lines of torchgw/": f"{sum(rooms.values()):,}",
        **{
            f"  {kind}": f"{sum(kinds_of_lines(text)[kind] for text in texts.values()):,}"
            for kind in _LINES
        },
        "files": f"{len(texts):,}",
        "files that compare a size with a limit; times": f"{len(limited)}; {sum(limited)}",
        "files that do with a number of their own; times": f"{len(beside)}; {sum(beside)}",
        "module-level numbers": f"{sum(map(numbers, texts.values())):,}",
        **{f"  {kind}": f"{sum(dict(of).values()):,}" for kind, of in kinds(texts).items()},
        "files that a solve enters, n_init=1; defaults": f"{entered(n_init=1)}; {entered()}",
        "words of `solve`; Local optima; Chains": f"{docstring:,}; "
        f"{words(docs['how-to-choose.md'], 'Local optima', '##'):,}; "
        f"{words(docs['algorithm.md'], 'Chains on all points', '###'):,}",
        "parameters of `solve`": str(options),
    }
    for room in ("_starts", "_search", "_solve", "_answer", "_batch", "_sinkhorn", "pot"):
        count, edges, floors = arrows(room, texts)
        found[f"{room}: modules, floors, arrows; lines"] = (
            f"{count}, {floors}, {edges}; {rooms[room]:,}"
        )
    return found


def mapped() -> dict[str, str]:
    """Read what every module says that it is."""
    known = {name: ast.get_docstring(parsed(text)) for name, text in modules().items()}
    return {name: (text or "").splitlines()[0] for name, text in known.items() if text}


def numbered() -> dict[str, str]:
    """Name the kind of each constant."""
    found = kinds(modules()).items()
    return {f"{name} ({count})": kind for kind, of in found for name, count in of}


if __name__ == "__main__":
    asked = {"--map": mapped, "--numbers": numbered}.get(sys.argv[-1], counted)
    for what, amount in asked().items():
        print(f"{what:52}{amount}")
