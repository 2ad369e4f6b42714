"""Run the examples and write a page for each: text, code, what it printed, what it drew.

``python docs/build_gallery.py [NAME ...]`` writes docs/gallery/NAME.md and its pictures, and copies
the optimization log, which lies above the pages. An example is a Python file whose docstring is the
text; figures that are open in pyplot in the end are shown.
"""

from __future__ import annotations

import ast
import contextlib
import io
import shutil
import sys
import time
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot  # noqa: E402

DOCS = Path(__file__).resolve().parent
EXAMPLES = DOCS / "examples"
GALLERY = DOCS / "gallery"


def build(name: str) -> None:
    """Run one example and write its page."""
    path = EXAMPLES / f"{name}.py"
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    text = ast.get_docstring(tree) or name
    code = "\n".join(source.splitlines()[tree.body[0].end_lineno :]).strip()
    printed = io.StringIO()
    start = time.perf_counter()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, str(path), "exec"), {"__name__": "__main__", "__file__": str(path)})
    seconds = time.perf_counter() - start
    title, _, intro = text.partition("\n")
    page = [f"# {title.rstrip('.')}", intro.strip(), f"```python\n{code}\n```"]
    if printed.getvalue():
        page.append(f"Output:\n\n```text\n{printed.getvalue().rstrip()}\n```")
    for number in pyplot.get_fignums():
        picture = f"{name}-{number}.png"
        pyplot.figure(number).savefig(GALLERY / picture, dpi=100)
        page.append(f"![{title.rstrip('.')}]({picture})")
    pyplot.close("all")
    page.append(f"The page took {seconds:.1f} s to run. Source: `docs/examples/{name}.py`.")
    (GALLERY / f"{name}.md").write_text("\n\n".join(page) + "\n", encoding="utf-8")
    sys.stderr.write(f"gallery: {name} {seconds:.1f} s\n")


def main(names: list[str]) -> None:
    """Build the named examples, or all."""
    GALLERY.mkdir(exist_ok=True)
    shutil.copy(DOCS.parent / "OPTIMIZATION_LOG.md", DOCS / "optimization-log.md")
    for name in names or sorted(path.stem for path in EXAMPLES.glob("*.py")):
        build(name)


if __name__ == "__main__":
    main(sys.argv[1:])
