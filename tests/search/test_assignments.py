"""Tabu search of quadratic assignment problems against all matchings."""

import itertools

import numpy as np
import pytest
import torch

from torchgw._search import assignments
from torchgw._search.assignments import (
    Assignments,
    _Draws,
    _kicked,
    _mixed,
    _Walk,
    search_matchings,
)


def drawn(kind, k, n, seed=0):
    """Tables of k points on one side and n places on the other, and what a matching costs."""
    rng = np.random.default_rng(seed)
    tables = [[rng.normal(size=(size, size)) for _ in range(2)] for size in (k, n)]
    if kind == "symmetric":
        tables = [[table + table.T for table in side] for side in tables]
    if kind == "one directed":
        tables[0] = [table + table.T for table in tables[0]]
    if kind == "antisymmetric":
        tables = [[table - table.T for table in side] for side in tables]
    linear = rng.normal(size=(k, n))

    def cost(partners):
        chosen = np.asarray(partners)[:k]
        pairs = zip(*tables, strict=True)
        total = sum((a * b[np.ix_(chosen, chosen)]).sum() for a, b in pairs)
        return total + linear[np.arange(k), chosen].sum()

    parts = [tuple(map(torch.from_numpy, pair)) for pair in zip(*tables, strict=True)]
    return Assignments.of(parts, torch.from_numpy(linear)), cost


KINDS = ["symmetric", "directed", "one directed", "antisymmetric"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [9, 6])
def test_each_exchange_adds_what_it_was_chosen_for(kind, k):
    problem, cost = drawn(kind, k, 9)
    draws = _Draws(9, torch.device("cpu"))
    walk = _Walk(problem, draws, 5)
    walk.begin(draws.uniform(5, 9).argsort(1))
    for _ in range(18):
        before = walk.partners.clone()
        walk.exchange()
        # the places of no point are not exchanged with each other
        assert bool((walk.partners != before)[:, :k].any(1).all())
        # float64 sums of a few hundred numbers of size one
        assert [*map(cost, walk.partners)] == pytest.approx(walk.value.tolist(), abs=1e-10)
        assert [*map(cost, walk.best)] == pytest.approx(walk.least.tolist(), abs=1e-10)
    changes, own, value = problem.changes(walk.partners)
    assert torch.allclose(changes, walk._changes, atol=1e-10)
    assert torch.allclose(own, walk._costs, atol=1e-10)
    assert torch.allclose(value, walk.value, atol=1e-10)
    partners = walk.partners[0].clone()
    partners[[2, 7]] = partners[[7, 2]]
    added = cost(partners) - cost(walk.partners[0])
    assert float(changes[0, 2, 7]) == pytest.approx(added, abs=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [7, 5])
@pytest.mark.parametrize("seed", range(3))
def test_no_assignment_is_better(kind, k, seed):
    problem, cost = drawn(kind, k, 7, seed)
    least = min(map(cost, itertools.permutations(range(7))))
    found = search_matchings(problem, torch.arange(7)[None], 1e8)
    assert found.agreed
    assert cost(found.partners[0]) == pytest.approx(least, abs=1e-9)
    assert [*map(cost, found.partners)] == pytest.approx(found.values.tolist(), abs=1e-9)


def test_a_search_that_has_no_time_returns_what_was_known(monkeypatch):
    monkeypatch.setattr(assignments, "is_over", lambda: True)
    problem, cost = drawn("symmetric", 20, 20)
    best = search_matchings(problem, torch.arange(20)[None], 1e8).partners
    monkeypatch.undo()
    # the best of a long search is no worse where it was known
    known = search_matchings(problem, torch.arange(20)[None], 1e8).partners[:1]
    again = search_matchings(problem, torch.cat([known, best[:2]]), 1.0)
    assert cost(again.partners[0]) <= cost(known[0]) + 1e-9


def test_kicked_and_mixed_matchings_are_matchings():
    draws = _Draws(11, torch.device("cpu"))
    first, second = (draws.uniform(50, 11).argsort(1) for _ in range(2))
    second = torch.where(torch.arange(50)[:, None] < 10, first, second)
    for made in (_kicked(first, draws), _mixed(first, second, draws)):
        assert bool((made.sort(1).values == torch.arange(11)).all())
    moved = (_kicked(first, draws) != first).sum(1)
    assert 3 <= int(moved.min()) <= int(moved.max()) <= 6
    mixed = _mixed(first, second, draws)
    # what two matchings share is kept
    assert bool((mixed == first)[first == second].all())
