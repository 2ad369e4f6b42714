"""What waits between two uses; graphs themselves are tested where they are used."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest
import torch

from torchgw._tensors.cuda_graphs import Captured, Idle, borrow_memory, capture


def test_the_latest_of_a_kind_is_handed_out_once():
    idle = Idle[str]()
    for key, item in (("a", "old"), ("b", "other"), ("a", "new")):
        idle.put(key, item)
    assert [idle.take("a") for _ in range(3)] == ["new", "old", None]
    assert idle.take("b") == "other"


def test_the_longest_unused_goes_when_there_is_too_much():
    idle = Idle[str](most=10)
    for number in range(3):
        idle.put(number, f"item {number}", size=4)
    assert [idle.take(number) for number in range(3)] == [None, "item 1", "item 2"]
    idle.put(0, "larger than all", size=11)
    assert idle.take(0) is None


@pytest.mark.gpu
def test_a_replay_draws_what_a_call_would_however_late_the_capture_ends():
    """Else the generator's offset goes back to zero below a replay that has set it."""
    stream, generator = torch.cuda.Stream(), torch.Generator("cuda").manual_seed(1)
    drawn = torch.empty(8, device="cuda")

    def draw():
        torch.cuda._sleep(2**28)
        drawn.copy_(torch.rand(8, device="cuda", generator=generator))

    draw()
    state = generator.get_state()
    draw()
    expected = drawn.clone()
    generator.set_state(state)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2**27)
    graph = capture(draw, stream, generator=generator)
    graph.replay()
    assert torch.equal(drawn, expected)


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_no_memory_that_cannot_be_used():
    """As where memory runs out in it: PyTorch would refuse all later captures in its pool."""
    device = torch.device("cuda")
    numbers = torch.ones(8, device=device)

    class Owner:
        pass

    def failing(given):
        found = given + 1
        if torch.cuda.is_current_stream_capturing():
            raise MemoryError
        return found

    owner = Owner()
    memory = borrow_memory(owner, device)
    captured = Captured(failing, memory)
    captured(numbers)
    with pytest.raises(MemoryError):
        captured(numbers)
    del owner, captured
    other = Owner()
    again = borrow_memory(other, device)
    assert again.pool != memory.pool
    adding = Captured(lambda given: given + 1, again)
    for _ in range(3):
        assert torch.equal(adding(numbers), numbers + 1)


@pytest.mark.gpu
def test_where_another_thread_ends_a_capture_the_function_is_called():
    """As where a user's thread waits for the device, which no capture allows."""
    device, waited = torch.device("cuda"), []
    numbers = torch.ones(8, device=device)

    def wait():
        with suppress(RuntimeError):
            torch.cuda.synchronize()

    def adding(given):
        if torch.cuda.is_current_stream_capturing() and not waited:
            waited.append(threading.Thread(target=wait))
            waited[0].start()
            waited[0].join()
        return given + 1

    class Owner:
        pass

    owner = Owner()
    captured = Captured(adding, borrow_memory(owner, device))
    for number in range(3):
        assert torch.equal(captured(numbers + number), numbers + number + 1)
    assert waited
    # neither the user's random numbers nor their memory are left behind in a capture
    assert bool(torch.rand(3, device=device).isfinite().all())
    torch.cuda.empty_cache()
