"""Kernels that are compiled before they are launched."""

from __future__ import annotations

import inspect
import json
import logging
import os
import subprocess
import sys
import threading
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from torchgw._tensors import ahead
from torchgw._tensors.ahead import (
    Variant,
    compile_beside,
    compile_together,
    launch,
    probe_beside,
    ready,
    variants,
)
from torchgw._tensors.deadline import compiles_within

GPU = torch.device("cuda")


class Compiled:
    run = None


class Kernel:
    """A kernel that takes as long to compile as it is told."""

    __module__ = __name__
    __name__ = "KERNEL"

    def __init__(self):
        self.begun, self.go, self.fails = threading.Event(), threading.Event(), False
        self.given = []

    def warmup(self, *arguments, grid, **given):
        self.given.append(given)
        self.begun.set()
        assert self.go.wait(20)
        if self.fails:
            raise RuntimeError("no such type")
        return Compiled()


KERNEL = Kernel()
X = torch.zeros(4, dtype=torch.float64)
VARIANT = Variant(
    f"{__name__}:KERNEL", {"x": "*fp64:16", "n": "i32"}, {"BLOCK": 8}, {"num_warps": 4}, (500,)
)


@pytest.fixture
def kernel(monkeypatch):
    """One kernel that is listed for solves of 500 points, and a GPU."""
    made = Kernel()
    monkeypatch.setitem(globals(), "KERNEL", made)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    monkeypatch.setattr(ahead, "_begin", bool)
    monkeypatch.setattr(ahead, "_asked", set())
    monkeypatch.setattr(ahead, "variants", lambda: (VARIANT,))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(ahead, "processors", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(ahead, "find_spec", lambda name: name)
    yield made
    made.go.set()
    for thread in threading.enumerate():
        if thread.name == "torchgw-compile":
            thread.join()
    assert not ahead._waiting
    assert not ahead._begun


def launched(kernel, options):
    """Start a thread that launches, and say whether it waits."""
    thread = threading.Thread(target=ready, args=(kernel, (X, 4), options))
    thread.start()
    thread.join(0.2)
    return thread


def test_every_entry_is_a_kernel_of_the_package():
    assert len(variants()) > 40
    for variant in variants():
        module, name = variant.kernel.split(":")
        pytest.importorskip("triton")
        parameters = inspect.signature(getattr(import_module(module), name).fn).parameters
        assert sorted(parameters) == sorted([*variant.arguments, *variant.constants])
        assert {"*": True}.get(next(iter(variant.arguments.values()))[0])
        for kind in variant.arguments.values():
            ahead._stand_in(kind)
        assert variant.sizes


def test_a_launch_waits_for_its_kernel_and_for_no_other(kernel):
    compile_beside(GPU, ("auto",), torch.zeros(400, 2))
    assert kernel.begun.wait(20)
    assert not launched(kernel, {"BLOCK": 16, "num_warps": 4}).is_alive()
    assert not launched(kernel, {"BLOCK": 8, "num_warps": 8}).is_alive()
    waiting = launched(kernel, {"BLOCK": 8, "num_warps": 4})
    assert waiting.is_alive()
    kernel.go.set()
    waiting.join(20)
    assert not waiting.is_alive()
    (given,) = kernel.given
    assert (given["BLOCK"], given["num_warps"], given["n"]) == (8, 4, 19)
    assert given["x"].dtype == torch.float64
    assert given["x"].data_ptr() % 16 == 0


def test_numbers_that_a_launch_names_are_no_constants(kernel):
    """A kernel is compiled for all of their values, so that the launch waits for it."""
    compile_beside(GPU, ("auto",), torch.zeros(400, 2))
    assert kernel.begun.wait(20)
    waiting = launched(kernel, {"BLOCK": 8, "num_warps": 4, "n": 4})
    assert waiting.is_alive()
    kernel.go.set()
    waiting.join(20)
    assert not waiting.is_alive()


def test_what_no_thread_has_begun_is_left_to_the_launch(kernel, monkeypatch):
    later = VARIANT._replace(constants={"BLOCK": 32})
    monkeypatch.setattr(ahead, "variants", lambda: (VARIANT, later))
    compile_beside(GPU, ("auto",), torch.zeros(400, 2))
    assert kernel.begun.wait(20)
    assert not launched(kernel, {"BLOCK": 32, "num_warps": 4}).is_alive()
    kernel.go.set()
    while ahead._begun:
        pass
    assert len(kernel.given) == 1


def test_kernels_for_factors_of_a_rank_wait_until_a_solve_has_it(kernel, monkeypatch):
    kernel.go.set()
    ranks = [VARIANT._replace(constants={"BLOCK": 8, "RANK": rank}) for rank in (0, -1, 16, 32)]
    monkeypatch.setattr(ahead, "variants", lambda: tuple(ranks))
    monkeypatch.setattr(ahead, "_later", [])
    compile_beside(GPU, ("auto",), torch.zeros(400, 2))
    for rank, known in ((0, [0, -1]), (17, [0, -1, 32]), (32, [0, -1, 32]), (3, [0, -1, 32, 16])):
        ahead.compile_for_rank(GPU, rank)
        while ahead._waiting or ahead._begun:
            pass
        assert [given["RANK"] for given in kernel.given] == known


@pytest.mark.parametrize("least", [-1.0, 1e9])
def test_kernels_of_another_rank_follow_a_solve_that_compiled(least, kernel, monkeypatch):
    ranks = [VARIANT._replace(constants={"BLOCK": 8, "RANK": rank}) for rank in (0, 16, 32, 32)]
    monkeypatch.setattr(ahead, "variants", lambda: tuple(ranks))
    monkeypatch.setattr(ahead, "_later", [])
    monkeypatch.setattr(ahead, "_compiled", threading.Event())
    # how long a kernel takes that does not come from the cache
    monkeypatch.setattr(ahead, "COMPILING", least)
    kernel.go.set()
    compile_beside(GPU, ("auto",), torch.zeros(400, 2))
    ahead.compile_for_rank(GPU, 3)
    for known in ([0, 16], [0, 16, 32, 32] if least < 0 else [0, 16]):
        while threads := [one for one in threading.enumerate() if one.name == "torchgw-compile"]:
            threads[0].join(20)
        assert [given["RANK"] for given in kernel.given] == known
        ahead.compile_rest(GPU)


def test_each_class_of_sizes_is_asked_for_once(kernel):
    kernel.go.set()
    for n in (400, 300, 7):
        compile_beside(GPU, ("auto",), torch.zeros(n, 2), None)
    compile_beside(GPU, ("auto",), None, "no shape")
    compile_beside(torch.device("cpu"), ("auto",), torch.zeros(400, 2))
    while ahead._waiting or ahead._begun:
        pass
    assert len(kernel.given) == 1


def test_kernels_of_some_distances_are_theirs_alone(kernel, monkeypatch):
    kernel.go.set()
    curved = VARIANT._replace(constants={"BLOCK": 32}, distances=("poincare", "lorentz"))
    monkeypatch.setattr(ahead, "variants", lambda: (VARIANT, curved))
    for name in ("auto", torch.zeros(2), "lorentz", "poincare"):
        compile_beside(GPU, (name, "auto"), torch.zeros(90_000, 2))
        while ahead._waiting or ahead._begun:
            pass
    assert [given["BLOCK"] for given in kernel.given] == [8, 32]


def test_what_tells_whether_triton_runs_is_compiled_once(kernel, monkeypatch):
    kernel.go.set()
    probe = VARIANT._replace(kernel=f"{__name__}:_check_kernel", constants={"BLOCK": 1})
    monkeypatch.setitem(globals(), "_check_kernel", kernel)
    monkeypatch.setattr(ahead, "variants", lambda: (VARIANT, probe))
    probe_beside(torch.device("cpu"))
    for _ in range(2):
        probe_beside(GPU)
    while ahead._waiting or ahead._begun:
        pass
    assert [given["BLOCK"] for given in kernel.given] == [1]


def test_a_failure_is_left_to_the_launch(kernel, caplog):
    kernel.fails = True
    kernel.go.set()
    with caplog.at_level(logging.INFO, logger="torchgw"):
        compile_beside(GPU, ("auto",), torch.zeros(400, 2))
        while ahead._waiting or ahead._begun:
            pass
    assert "could not be compiled ahead: no such type" in caplog.text
    assert not launched(kernel, {"BLOCK": 8, "num_warps": 4}).is_alive()


def test_kernels_of_launches_that_are_not_made_are_compiled_side_by_side(kernel):
    options = {"BLOCK": 8, "num_warps": 4}
    kernel.__getitem__ = lambda grid: pytest.fail("launched")
    # where nothing is compiled, nothing is tried
    compile_together(torch.device("cpu"), lambda: pytest.fail("run"))
    (compiled,) = compile_together(GPU, lambda: launch(kernel, (1,), X, 4, **options))
    assert kernel.begun.wait(20)
    # what other work launches too is compiled once
    (again,) = compile_together(GPU, lambda: launch(kernel, (1,), X, 4, **options))
    assert again is compiled
    assert not compiled.is_set()
    assert not launched(kernel, {"BLOCK": 16, "num_warps": 4}).is_alive()
    waiting = launched(kernel, options)
    assert waiting.is_alive()
    kernel.go.set()
    waiting.join(20)
    assert not waiting.is_alive()
    assert compiled.is_set()
    assert kernel.given == [options]


def test_nobody_waits_for_kernels_once_the_main_thread_has_ended(kernel, monkeypatch):
    ended = SimpleNamespace(is_alive=lambda: False)
    monkeypatch.setattr(ahead.threading, "main_thread", lambda: ended)
    (compiled,) = compile_together(GPU, lambda: launch(kernel, (1,), X, 4))
    assert compiled.wait(20)
    assert not kernel.begun.is_set()


def test_a_launch_that_compiles_is_logged(caplog, monkeypatch):
    """Not one that finds its kernel loaded."""

    class Launched:
        __name__ = "_late_kernel"

        def __init__(self):
            self.device_caches = {0: ({}, {})}

        def __getitem__(self, grid):
            return lambda *arguments, **options: self.device_caches[0][0].update(variant=1)

    kernel = Launched()
    monkeypatch.setattr(ahead, "COMPILING", -1.0)
    before = ahead.waited()
    with caplog.at_level(logging.INFO, logger="torchgw"):
        launch(kernel, (1,), X)
        assert ahead.waited() > before
        assert "s for _late_kernel, which was compiled" in caplog.text
        caplog.clear()
        launch(kernel, (1,), X)
    assert not caplog.text


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("least", [-1.0, 1e9])
def test_one_thread_reads_kernels_until_one_has_to_be_compiled(seen, least, kernel, monkeypatch):
    started = []
    kernel.go.set()
    monkeypatch.setattr(ahead, "_begin", lambda: seen)
    monkeypatch.setattr(ahead, "COMPILING", least)
    monkeypatch.setattr(ahead, "_start", lambda device, others: started.append(others))
    ahead._waiting.extend(ahead._Task(VARIANT) for _ in range(3))
    ahead._work(torch.device("cuda"), 4)
    assert started == ([] if seen and least > 0 else [3])


def test_tritons_hash_is_read_while_its_files_are_as_they_were(tmp_path, monkeypatch):
    knobs = SimpleNamespace(cache=SimpleNamespace(dir=tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "triton.knobs", knobs)
    source = tmp_path / "triton" / "runtime" / "cache.py"
    source.parent.mkdir(parents=True)
    source.write_text("first")
    hashed = []

    def begin():
        """What a process does first: hash, or read the hash."""
        files = SimpleNamespace(__file__=str(source))
        files.triton_key = lambda: hashed.append(source.read_text()) or f"of {hashed[-1]}"
        ahead._hash(files)
        return files.triton_key

    begin()
    assert begin()() == "of first"
    assert hashed == ["first"]
    source.write_text("another")
    begin()
    assert begin()() == "of another"
    # where nothing can be written it is hashed each time
    knobs.cache.dir = source / "no folder"
    begin()
    assert begin()() == "of another"
    assert hashed == ["first", "another", "another", "another", "another"]


def test_a_short_limit_leaves_no_time_to_compile(tmp_path, kernel, monkeypatch):
    """Unless the cache says that kernels have been compiled."""
    knobs = SimpleNamespace(cache=SimpleNamespace(dir=tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "triton.knobs", knobs)
    for limit in (None, 60.0):
        assert compiles_within(limit, GPU)
    assert not compiles_within(1.0, GPU)
    assert compiles_within(1.0, torch.device("cpu"))
    knobs.cache.dir.mkdir()
    (knobs.cache.dir / "torchgw-hash").touch()
    assert compiles_within(1.0, GPU)
    # nor while threads do
    compile_together(GPU, lambda: launch(kernel, (1,), X, 4))
    assert kernel.begun.wait(20)
    assert not compiles_within(1.0, GPU)


FRESH = """
import json, threading, warnings
import torch, triton
import torchgw
from torchgw.datasets import spiral, swiss_roll

late = []
def note(**given):
    if threading.current_thread() is threading.main_thread():
        late.append(given["repr"])
triton.knobs.runtime.jit_post_compile_hook = note
warnings.simplefilter("ignore")
for n in (400, 4000):
    x, y = spiral(n, random_state=0)[0], swiss_roll(n + n // 4, random_state=1)[0]
    torchgw.solve(x, y, device="cuda", random_state=0)
print(json.dumps(late))
"""


@pytest.mark.gpu
def test_default_solves_launch_what_is_listed(tmp_path):
    """With an empty cache nearly all is compiled by threads; ``coldstart --record`` mends it."""
    done = subprocess.run(
        [sys.executable, "-c", FRESH],
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    late = json.loads(done.stdout.splitlines()[-1])
    assert len(late) <= 4, late
