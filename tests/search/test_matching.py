"""Starts from points that find their partners by themselves."""

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

import torchgw
from torchgw._problem.problem import Problem
from torchgw._search import coarse
from torchgw._search.matching import match_points
from torchgw._sinkhorn.problem import DenseCost
from torchgw._typing import Marginals
from torchgw.distances import PrecomputedDistance


def copied(n, noise=0.0, d=5, seed=0):
    """A round cloud, a rotated and permuted copy, and where each point went."""
    rng = np.random.default_rng(seed)
    x, order = rng.normal(size=(n, d)), rng.permutation(n)
    y = (x @ np.linalg.qr(rng.normal(size=(d, d)))[0])[order] + noise * rng.normal(size=(n, d))
    return x, y, np.argsort(order)


def problem(x, y, a=None, **options):
    """Euclidean distances of two clouds."""
    tables = [torch.from_numpy(cdist(side, side)) for side in (x, y)]
    weights = [torch.full((len(side),), 1 / len(side), dtype=torch.float64) for side in (x, y)]
    if a is not None:
        weights[0] = a
    options = {"alpha": 1.0, "linear": None} | options
    return Problem(*map(PrecomputedDistance, tables), Marginals(*weights), **options)


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_points_of_a_copy_find_their_partners(noise):
    x, y, answer = copied(300, noise)
    plan = match_points(problem(x, y))
    right = plan.pairs.target.numpy() == answer[plan.pairs.source.numpy()]
    # among the clearest third of all pairs chance would be right once in 300
    assert right.mean() > 0.9
    assert len(right) >= 60
    assert float(plan.mass.sum()) == pytest.approx(1)


def test_points_without_weight_have_no_partner():
    x, y, _ = copied(300)
    a = torch.ones(300, dtype=torch.float64)
    a[::10] = 0
    plan = match_points(problem(x, y, a / a.sum()))
    assert not bool((plan.pairs.source % 10 == 0).any())


def test_partners_that_disagree_are_not_believed():
    x, y, _ = copied(300)
    other = np.random.default_rng(9).normal(size=(280, 5))
    assert match_points(problem(x, y)) is not None
    assert match_points(problem(x, other)) is None
    # all points look alike
    assert match_points(problem(np.eye(100), np.eye(90))) is None
    assert match_points(problem(np.ones((100, 2)), np.ones((90, 2)))) is None


def test_costly_columns_and_linear_costs_are_left_alone():
    x, y, _ = copied(100)
    given = problem(x, y)
    assert match_points(given) is not None
    linear = DenseCost(torch.zeros(100, 100, dtype=torch.float64))
    assert match_points(problem(x, y, alpha=0.5, linear=linear)) is None
    given.source.cheap_columns = False
    assert match_points(given) is None


def test_a_copy_in_five_dimensions_is_recognised(monkeypatch):
    """Sampled gradients annealed from the product plan end in another of the many rotations."""
    monkeypatch.setattr(coarse, "_WHOLE", 96)
    x, y, answer = copied(300, 0.02)
    result = torchgw.solve(x, y, distances="euclidean", gradient="sampled", random_state=0)
    assert result.converged
    assert (np.asarray(result.lazy_plan.argmax()) == answer).mean() > 0.95


def test_doubt_between_coarse_optima_is_settled_by_all_points(monkeypatch):
    """Equal directions in six dimensions, of which 96 points show several optima alike."""
    monkeypatch.setattr(coarse, "_WHOLE", 96)
    x, y, answer = copied(400, 0.01, d=6)
    result = torchgw.solve(x, y, distances="cosine", random_state=0)
    # the match of all points is none of those that few have found
    assert result.ambiguity < 0.1
    assert (np.asarray(result.lazy_plan.argmax()) == answer).mean() > 0.95
