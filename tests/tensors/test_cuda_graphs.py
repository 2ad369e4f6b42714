"""What waits between two uses; graphs themselves are tested where they are used."""

from __future__ import annotations

import pytest
import torch

from torchgw._tensors.cuda_graphs import Idle, capture


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
