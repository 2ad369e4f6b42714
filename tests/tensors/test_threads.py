"""Small solves run on one thread, and leave the number of threads as it was."""

from __future__ import annotations

import os
import sys
import threading

import numpy as np
import pytest
import torch

import torchgw
from torchgw._tensors import machine as module
from torchgw._tensors.machine import host_threads, small_on_one_thread

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_small_solve_runs_on_one_thread():
    points = np.random.default_rng(0).normal(size=(12, 2))
    seen = []
    torchgw.solve(
        points,
        points,
        distances="euclidean",
        options=torchgw.Options(callback=lambda _: seen.append(threads())),
    )
    assert set(seen) == {1}
    assert threads() == 2


def test_distances_are_decided_on_one_thread(monkeypatch):
    points, seen = np.random.default_rng(0).normal(size=(30, 3)), []
    monkeypatch.setattr("torchgw._api.agreement", lambda *_, **__: seen.append(threads()) or 1.0)
    torchgw.solve(points, points, n_init=1)
    assert seen == [1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_host_of_a_gpu_keeps_to_one_thread(device):
    with host_threads(torch.device(device)):
        assert threads() == (2 if device == "cpu" else 1)
    assert threads() == 2
    with host_threads(torch.device(device), np.empty((10, 3)), np.empty((100_000, 1))):
        assert threads() == 2


def test_large_work_keeps_its_threads():
    with small_on_one_thread(2**11, 2**11 + 1, CPU):
        assert threads() == 2


def test_threads_come_back_after_an_error():
    with pytest.raises(ZeroDivisionError), small_on_one_thread(3, 3, CPU):
        raise ZeroDivisionError
    assert threads() == 2


def test_one_within_another():
    with small_on_one_thread(3, 3, CPU):
        with small_on_one_thread(3, 3, CPU):
            assert threads() == 1
        assert threads() == 1
    assert threads() == 2


def test_solves_in_several_threads_share_what_there_was():
    entered, leave = threading.Barrier(3), threading.Barrier(3)

    def work():
        with small_on_one_thread(3, 3, CPU):
            entered.wait(60)
            leave.wait(60)

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    entered.wait(60)
    leave.wait(60)
    for worker in workers:
        worker.join(60)
    assert threads() == 2
    # what a new thread begins with
    found = []
    later = threading.Thread(target=lambda: found.append(threads()))
    later.start()
    later.join(60)
    assert found == [2]


def threads():
    return torch.get_num_threads()


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or len(os.sched_getaffinity(0)) > 8,
    reason="two threads are made to sleep on at most eight processors, under Linux",
)
def test_pools_that_do_nothing_outnumber_the_processors(monkeypatch):
    monkeypatch.setattr(module, "_is_busy", lambda: True)
    processors, values = len(os.sched_getaffinity(0)), torch.randn(2**20)
    expected = values.sum()
    before, native = threading.active_count(), len(os.listdir("/proc/self/task"))
    with host_threads(CPU):
        # a pool of two for each processor: the thread that holds it and the one that it waits for
        assert len(os.listdir("/proc/self/task")) >= native + 2 * processors
        assert threads() == 2
        assert values.sum() == expected
    assert threading.active_count() == before
    torch.set_num_threads(1)
    with host_threads(CPU):
        assert threading.active_count() == before
    torch.set_num_threads(2)
    monkeypatch.setattr(module, "_is_busy", lambda: False)
    with host_threads(CPU):
        assert threading.active_count() == before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads what Linux tells")
def test_other_work_that_fills_the_processors_is_seen(monkeypatch):
    processors = len(os.sched_getaffinity(0))

    def told(*numbers, own=1):
        monkeypatch.setattr(module, "_own_running", lambda: own)
        texts = iter(f"0.20 0.18 0.12 {number}/80 11206\n" for number in numbers)
        monkeypatch.setattr(module.Path, "read_text", lambda *_, **__: next(texts))
        return module._is_busy()

    assert told(processors + 1, processors + 2, processors + 1)
    assert not told(processors)
    # it has just ended
    assert not told(processors + 1, processors + 1, 1)
    # it is a pool of this process that waits
    assert not told(processors + 1, own=2)
    assert told(*[processors + 2] * 3, own=2)

    def refuse(*_, **__):
        raise PermissionError

    monkeypatch.setattr(module.Path, "read_text", refuse)
    assert not module._is_busy()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads what Linux tells")
def test_this_thread_runs():
    assert 1 <= module._own_running() <= len(os.listdir("/proc/self/task"))
