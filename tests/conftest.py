"""Set up what must be known before the first import of the package or of Triton."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

# Without a GPU our Triton kernels are tested in Triton's interpreter, which is chosen on import.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Tests that poison uninitialised memory switch on deterministic algorithms, and cuBLAS wants this.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# POT imports JAX where it finds it, which warns of its float32.
os.environ.setdefault("POT_BACKEND_DISABLE_JAX", "1")
# Arrays of users are moved by so much, relatively: tests/house/elsewhere.py asks for it.
MOVE = float(os.environ.get("TORCHGW_TEST_MOVE", "0"))
# Of tests that are marked as exact they are not.
_moving = True


def moved(given, share):
    """Move numbers by a share of themselves that depends on their size alone.

    So equal entries stay equal and opposites opposite, and tables symmetric. Whole numbers stay as
    they are, and those of a few binary places: no processor rounds sums of them.
    """
    part = (1e7 * given).abs_().sin_().mul_(share).mul_(given).nan_to_num_(0.0, 0.0, 0.0)
    part.masked_fill_((1024 * given).frac_() == 0, 0.0)
    return part.add_(given) if part.any() else given


def pytest_configure():
    """Move every array and tensor of float64 that the package is given, if that is asked for."""
    gc.disable()  # until the tests are collected, which makes little garbage
    if not MOVE:
        return
    from torchgw._boundary import arrays

    convert = arrays.to_tensor

    def to_tensor(name, value):
        given = convert(name, value)
        return moved(given, MOVE) if _moving and given.dtype == torch.float64 else given

    # modules that take it from there are imported later
    arrays.to_tensor = to_tensor


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    global _moving
    _moving = item.get_closest_marker("exact") is None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the cases that ``slow.txt`` lists, before any are deselected.

    It holds what took more than a second of a core in a run with ``--durations=400``, except the
    quickest case of a test that would otherwise have none, if that took less than a second and a
    half.
    """
    listed = set((Path(__file__).parent / "slow.txt").read_text().splitlines())
    for item in items:
        if item.nodeid in listed:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    """Leave what is imported out of the search for garbage, which is 6% of a run."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    """Give it back, so that nothing looks leaked at the end."""
    gc.unfreeze()


@pytest.fixture
def limited(monkeypatch):
    """Change numbers at which paths part, on all devices: limited(subsample=100)."""
    from torchgw._problem import limits

    def change(**new):
        for device, known in limits.LIMITS.items():
            monkeypatch.setitem(limits.LIMITS, device, known._replace(**new))

    return change
