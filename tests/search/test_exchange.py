"""Tabu search of matchings against all matchings, and what it is worth to a solve."""

import itertools
import warnings

import numpy as np
import pytest
import torch

import torchgw
from torchgw._problem.losses import find_loss
from torchgw._problem.problem import Problem
from torchgw._search.coarse import coarse_problem
from torchgw._search.exchange import _Search, best_matchings, can_exchange
from torchgw._sinkhorn.problem import DenseCost
from torchgw._typing import Marginals
from torchgw.distances import DirectedDistance, PrecomputedDistance


def tables(n, seed):
    rng = np.random.default_rng(seed)
    return [torch.as_tensor(rng.random((n, n))) for _ in range(3)]


def make(kind, n, seed=0, weights=None):
    x, y, cost = tables(n, seed)
    if kind == "directed":
        sides = DirectedDistance(x), DirectedDistance(y)
    else:
        sides = PrecomputedDistance(x + x.T), PrecomputedDistance(y + y.T)
    loss = find_loss("kl" if kind == "kl" else "square")
    linear = DenseCost(cost) if kind == "fused" else None
    a = torch.full((n,), 1 / n, dtype=torch.float64) if weights is None else weights
    whole = Problem(*sides, Marginals(a, a.clone()), 0.6 if linear else 1.0, linear, loss)
    return coarse_problem(whole, n).problem


def plans_of(partners):
    return torch.nn.functional.one_hot(partners).double() / partners.shape[1]


@pytest.mark.parametrize("kind", ["square", "fused", "kl", "directed"])
def test_each_exchange_adds_what_it_was_chosen_for(kind):
    problem = make(kind, 9)
    rng = np.random.default_rng(1)
    search = _Search(problem, rng.random((5, 9)).argsort(1), rng)
    for _ in range(30):
        search.exchange()
        now, best = (plans_of(torch.from_numpy(part)) for part in (search.partners, search.best))
        constant = float(problem.constant)
        assert problem.value(now).numpy() - constant == pytest.approx(search.value, abs=1e-5)
        assert problem.value(best).numpy() - constant == pytest.approx(search.least, abs=1e-5)
    assert search.costs == pytest.approx(
        _Search(problem, search.partners.copy(), rng).costs, abs=1e-5
    )


@pytest.mark.parametrize("kind", ["square", "fused", "kl", "directed"])
@pytest.mark.parametrize("seed", range(3))
def test_no_matching_is_better(kind, seed):
    problem = make(kind, 7, seed)
    every = torch.tensor(list(itertools.permutations(range(7))))
    found, agreed = best_matchings(problem, torch.full((1, 7, 7), 1 / 49))
    assert agreed
    least = float(problem.value(plans_of(every)).min())
    assert float(problem.value(plans_of(found[:1]))[0]) == pytest.approx(least, rel=1e-9)


def test_what_is_found_is_distinct_and_the_best_comes_first():
    problem = make("square", 14)
    found, _ = best_matchings(problem, torch.full((1, 14, 14), 1 / 196))
    assert len(found.unique(dim=0)) == len(found) > 3
    assert bool((problem.value(plans_of(found)).diff() >= -1e-5).all())


def test_what_is_found_is_no_worse_than_a_known_plan():
    problem, partners = make("square", 12), np.random.default_rng(0).permutation(12)
    known = plans_of(torch.from_numpy(partners)[None])
    found, _ = best_matchings(problem, known)
    assert float(problem.value(plans_of(found[:1]))) <= float(problem.value(known)) + 1e-9


def test_only_few_points_of_equal_weights_have_partners_to_exchange():
    assert can_exchange(make("square", 6))
    assert not can_exchange(make("square", 65))
    unequal = torch.tensor([1.0, 2, 3, 4, 5, 6], dtype=torch.float64) / 21
    assert not can_exchange(make("square", 6, weights=unequal))


def least_of_starts(x, y, epsilon, count):
    rng = np.random.default_rng(0)
    starts = [rng.permutation(len(x)) for _ in range(count)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return min(
            torchgw.solve(D_X=x, D_Y=y, epsilon=epsilon, init=one, n_init=1).report.objective
            for one in starts
        )


@pytest.mark.parametrize("seed", range(3))
def test_unrelated_clouds_end_at_the_best_matching(seed):
    rng = np.random.default_rng(seed)
    x, y = (np.linalg.norm(p[:, None] - p, axis=2) for p in rng.normal(size=(2, 10, 3)))
    with warnings.catch_warnings():
        # two matches may cost nearly the same, and the search says so
        warnings.simplefilter("ignore")
        found = torchgw.solve(D_X=x, D_Y=y)
        chosen = torchgw.solve(D_X=x, D_Y=y, search="thorough")
    assert found.report.objective <= chosen.report.objective * (1 + 1e-4)
    best = least_of_starts(x, y, found.epsilon, 30)
    assert found.report.objective <= best * (1 + 1e-4)
