"""Backends by name: one entry each, from which checks, messages and the order of "auto" follow."""

from __future__ import annotations

import sys
import types
from typing import get_args

import pytest
import torch
from problems import solve_by_name

import torchgw
from torchgw._sinkhorn import choose
from torchgw._sinkhorn.choose import BackendName, choose_backend, unavailable_backends
from torchgw._sinkhorn.eager import EagerBackend
from torchgw.backends import NAMES

CPU = torch.device("cpu")


@pytest.mark.slow
def test_names_are_those_of_the_entries():
    assert NAMES == get_args(BackendName) == ("auto", *choose._BUILT_IN)
    assert list(unavailable_backends(CPU)) == list(choose._BUILT_IN)
    assert unavailable_backends(CPU)["eager"] is None


def test_every_entry_names_what_there_is():
    for entry in choose._BUILT_IN.values():
        if entry.needs is not None:
            pytest.importorskip(entry.needs)
        assert choose._load(entry.backend)(**entry.automatic).name in choose._BUILT_IN
        for place in (entry.tiles, entry.batch):
            assert place is None or choose._load(place)


def test_a_package_that_is_missing_is_the_reason(monkeypatch):
    monkeypatch.setattr(choose, "find_spec", lambda name: None)
    message = r"`backend='triton'` cannot run here: triton is not installed \(pip install triton\)"
    with pytest.raises(torchgw.BackendUnavailableError, match=message):
        choose_backend("triton", CPU, torch.float64)


def test_a_backend_takes_its_own_file_and_an_entry(monkeypatch):
    """The recipe: a module with a class, and one line in ``_BUILT_IN``."""

    class OddBackend(EagerBackend):
        name = "odd"

        @staticmethod
        def why_not(device, dtype):
            return None if device.type == "cpu" else f"{device} has no odd numbers."

    module = types.ModuleType("odd_backend")
    module.OddBackend = OddBackend
    monkeypatch.setitem(sys.modules, "odd_backend", module)
    entry = choose._BuiltIn("odd_backend:OddBackend", automatic_on=("cpu",))
    # before the others, to be the first that "auto" tries
    monkeypatch.setattr(choose, "_BUILT_IN", {"odd": entry, **choose._BUILT_IN})
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    options = {"distances": "euclidean", "epsilon": 0.1}
    for name in ("odd", "auto"):
        assert solve_by_name(x, 2 * x, backend=name, **options).backend == "odd"
    assert unavailable_backends(CPU)["odd"] is None
    with pytest.raises(torchgw.BackendUnavailableError, match="cuda has no odd numbers"):
        choose_backend("odd", torch.device("cuda"), torch.float32)
    with pytest.raises(torchgw.InvalidInputError, match="'auto', 'odd', 'triton'"):
        torchgw.solve(x, x, options=torchgw.Options(backend="even"))
    with pytest.raises(torchgw.UnsupportedError, match="backend='odd' has no form that skips"):
        torchgw.solve(
            x, 2 * x, distances="sqeuclidean",
            options=torchgw.Options(backend="odd", skip_tiles=True, storage="streamed"),
        )  # fmt: skip
