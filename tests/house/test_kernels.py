"""What a Triton kernel is compiled for: not for sizes, or a solve of another one compiles again."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchgw
from torchgw.datasets import spiral, swiss_roll

PACKAGE = Path(torchgw.__file__).parent
# Layouts that are worth a variant of a kernel.
LAYOUTS = {("_store_kernel", "stride_m")}


def kernels() -> dict[str, tuple[list[str], ast.FunctionDef]]:
    """Find the functions that are launched, and the source of their modules."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if "@triton.jit" in source:
            for node in ast.parse(source).body:
                if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                    assert node.name not in found, f"two kernels are called {node.name}"
                    found[node.name] = source.splitlines(), node
    return found


KERNELS = kernels()


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_not_compiled_for_sizes(name):
    """A number is not specialised on, or says that it is a multiple of 16 always, or a float."""
    lines, node = KERNELS[name]
    (decorator,) = node.decorator_list
    unspecialised: list[str] = []
    if isinstance(decorator, ast.Call):
        keywords = {word.arg: ast.literal_eval(word.value) for word in decorator.keywords}
        unspecialised = keywords["do_not_specialize"]
    given = {argument.arg for argument in node.args.args}
    assert set(unspecialised) <= given
    for argument in node.args.args:
        comment = lines[argument.lineno - 1].partition("#")[2].strip()
        array = comment.startswith(("[", "("))
        assert not (array and argument.arg in unspecialised)
        if argument.annotation is None and not array and argument.arg not in unspecialised:
            always = re.search(r"a multiple of|float", comment)
            assert always or (name, argument.arg) in LAYOUTS, f"{name}: {argument.arg}"


def test_every_kernel_was_looked_at():
    assert len(KERNELS) >= 28


@pytest.mark.slow
def test_every_kernel_is_seen_by_the_sanitizer():
    """In the interpreter here; ``python tests/house/sanitize.py memcheck`` needs a GPU."""
    pytest.importorskip("triton")
    script = Path(__file__).with_name("sanitize.py")
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert "all kernels were launched" in ended.stdout, ended.stdout + ended.stderr


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_other_sizes_and_seeds_compile_little(monkeypatch):
    """Other sizes and seeds load few variants, for other classes of ranks: 7 when counted."""
    triton = pytest.importorskip("triton")
    loaded: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **given: loaded.append(given["repr"])
    )

    def solve(n: int, m: int, seed: int) -> int:
        before = len(loaded)
        x, y = spiral(n, random_state=seed)[0], swiss_roll(m, random_state=seed + 1)[0]
        torchgw.solve(x, y, device="cuda", random_state=seed)
        return len(loaded) - before

    for n, m in [(400, 500), (4000, 5000), (20000, 25000)]:
        for seed in range(2):
            solve(n, m, seed)
    more = {(n, m): solve(n, m, 7) for n, m in [(397, 512), (3999, 5003), (20001, 24640)]}
    assert more[397, 512] == 0
    assert sum(more.values()) <= 8, more
    assert len(loaded) <= 68
