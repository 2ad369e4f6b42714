"""Operations that are loaded beside other work."""

import logging
import threading
from types import SimpleNamespace

import pytest
import torch

from torchgw._tensors import preload


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "part", [preload._leaves, preload._stored, preload._neighbours, *preload._PARTS]
)
def test_operations_run_on_few_numbers(part, device):
    """They are launched for their code alone: a shape that one refuses would stop the rest."""
    assert part(torch.ones(64, 4, dtype=torch.float64, device=device)) is None


def test_nothing_is_loaded_for_a_cpu(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", pytest.fail)
    preload.load_beside(torch.device("cpu"))


@pytest.mark.parametrize(
    ("n", "more"),
    [(512, ["_stored"]), (600, ["_stored", "_neighbours"]), (1_001, ["_leaves", "_neighbours"])],
)
def test_what_few_points_do_not_need_is_not_loaded(n, more, monkeypatch):
    begun = []
    thread = SimpleNamespace(start=lambda: None)
    monkeypatch.setattr(
        threading, "Thread", lambda **given: begun.extend(given["args"][1]) or thread
    )
    preload._begin.cache_clear()
    preload.load_beside(torch.device("cuda"), torch.empty(n, 2), None)
    preload._begin.cache_clear()
    assert [part.__name__ for part in begun] == [*more, "_spaces", "_search"]


def test_what_cannot_run_is_logged(monkeypatch, caplog):
    """A solve that needs it says so itself."""
    monkeypatch.setattr(torch.cuda, "device", torch.device)

    def fail(x):
        raise RuntimeError("no such operation")

    with caplog.at_level(logging.INFO, logger="torchgw"):
        preload._load(torch.device("cpu"), (fail,))
    assert "no such operation" in caplog.text
