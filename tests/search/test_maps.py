"""Tabu search of maps against all maps, and what it is worth to a solve."""

import itertools

import numpy as np
import pytest
import torch

import torchgw
from torchgw._search.maps import Sides, _Search, best_maps


def make(n, m, seed, alpha=0.6):
    rng = np.random.default_rng(seed)
    x, y = (rng.normal(size=(size, size)) for size in (n, m))
    a = rng.random(n)
    parts = (x + x.T, y + y.T, a / a.sum())
    linear = torch.as_tensor(rng.normal(size=(n, m)))
    return Sides(*map(torch.as_tensor, parts), alpha, linear if alpha < 1 else None)


def value_of(sides, images):
    x, y, a = (part.numpy() for part in sides[:3])
    found = sides.alpha * (a[:, None] * a * (x - y[np.ix_(images, images)]) ** 2).sum()
    if sides.linear is None:
        return found
    return found + (1 - sides.alpha) * a @ sides.linear.numpy()[np.arange(len(a)), images]


@pytest.mark.parametrize("alpha", [0.6, 1.0])
def test_each_step_adds_what_it_was_chosen_for(alpha):
    sides, rng = make(9, 7, 0, alpha), np.random.default_rng(1)
    search = _Search(sides, rng.integers(0, 7, (5, 9)), rng)
    for _ in range(40):
        search.step()
        assert search.value == pytest.approx([value_of(sides, one) for one in search.images])
        assert search.least == pytest.approx([value_of(sides, one) for one in search.best])


@pytest.mark.parametrize("alpha", [0.6, 1.0])
@pytest.mark.parametrize("seed", range(10))
def test_no_map_is_better(alpha, seed):
    n, m = 5, 4
    sides = make(n, m, seed, alpha)
    lowest = min(value_of(sides, list(one)) for one in itertools.product(range(m), repeat=n))
    found = best_maps(sides, torch.zeros(0, n, m, dtype=torch.float64))
    assert found.sum((1, 2)) == pytest.approx(1)
    assert value_of(sides, found[0].argmax(1).numpy()) == pytest.approx(lowest)


@pytest.mark.parametrize("turned", [False, True])
def test_a_part_of_a_graph_is_found_in_it(turned):
    # by chance one of eight may be missed (none of 60 was), or have to be said
    missed = 0
    for seed in range(8):
        rng = np.random.default_rng(seed)
        upper = np.triu(rng.random((20, 20)) < 0.3, 1).astype(float)
        whole = upper + upper.T
        nodes = rng.permutation(20)[:14]
        part = whole[np.ix_(nodes, nodes)]
        sides = (whole, part) if turned else (part, whole)
        free = (0, np.inf) if turned else (np.inf, 0)
        result = torchgw.solve(D_X=sides[0], D_Y=sides[1], unbalanced=free, polish=True)
        missed += result.value > 1e-9 and not result.doubt
    assert missed <= 1
