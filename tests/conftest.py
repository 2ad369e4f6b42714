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


def pytest_unconfigure():
    """Give it back, so that nothing looks leaked at the end."""
    gc.unfreeze()
