"""Draws without replacement."""

from __future__ import annotations

import pytest
import torch

from torchgw._tensors import operations
from torchgw._tensors.operations import at_even_steps


@pytest.mark.parametrize("count", [1, 40, 99, 100])
def test_distinct_numbers_are_drawn_alike(monkeypatch, count):
    monkeypatch.setattr(operations, "HOST_DRAWN", 10)
    generator = torch.Generator().manual_seed(0)
    tally = torch.zeros(2, 100)
    for _ in range(400):
        drawn = operations.distinct(100, count, generator)
        assert len(drawn.unique()) == len(drawn) == count
        tally[0, drawn] += 1
        tally[1, drawn[0]] += 1
    # each number as often as any other, among all and as the first: six standard errors
    for times, expected in zip(tally, (4 * count, 4), strict=True):
        assert float((times - expected).abs().max()) <= 6 * expected**0.5


@pytest.mark.parametrize("n", [1, 2, 7, 2**24 + 3, 50_000_000, 2**31 + 11])
def test_even_steps_end_at_the_last_place(n):
    places = at_even_steps(n, min(n, 1000), torch.device("cpu"))
    assert places[0] == 0
    assert places[-1] == n - 1
    assert bool((places.diff() > 0).all())
