"""Seeds of pairs at equal distances, and the relaxed searches that begin with them."""

import numpy as np
import pytest
import torch

import torchgw
from torchgw._search.congruent import congruent_pairs


def overlap(seed, n, shared, noise=0.0):
    """Draw two clouds in the plane that share their first points, the second one turned."""
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(n, 2)), rng.normal(size=(n, 2))
    angle = rng.uniform(0, 2 * np.pi)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    y[:shared] = x[:shared] @ turn + noise * rng.normal(size=(shared, 2))
    return x, y


def table(points):
    points = torch.from_numpy(points)
    return torch.cdist(points, points)


def test_seeds_lie_in_the_part_that_is_shared():
    weights = torch.full((30,), 1 / 30, dtype=torch.float64)
    right = []
    for seed in range(6):
        x, y = overlap(seed, 30, 18)
        generator = torch.Generator("cpu").manual_seed(0)
        found = congruent_pairs(table(x), table(y), (weights, weights), 0.6, 4, generator)
        right.append((found.source[0] == found.target[0]).double().mean())
        assert float(found.plans(30, 30)[0].sum()) == pytest.approx(1)
    # unrelated pairs would be right once in 30
    assert float(torch.stack(right).mean()) > 0.7


def test_few_points_have_no_seeds():
    x, y = overlap(0, 6, 4)
    weights = torch.full((6,), 1 / 6, dtype=torch.float64)
    found = congruent_pairs(table(x), table(y), (weights, weights), 0.6, 4, torch.Generator("cpu"))
    assert found.plans(6, 6).shape == (0, 6, 6)


def test_points_without_weight_are_in_no_seed():
    x, y = overlap(1, 30, 20)
    weights = torch.full((30,), 1 / 28, dtype=torch.float64)
    weights[[0, 3]] = 0
    generator = torch.Generator("cpu").manual_seed(0)
    found = congruent_pairs(table(x), table(y), (weights, weights), 0.6, 4, generator)
    for side in (found.source, found.target):
        assert not torch.isin(side, torch.tensor([0, 3])).any()


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow) for seed in range(4)])
def test_partial_overlaps_end_no_higher_than_their_truth(seed):
    x, y = overlap(100 + seed, 24, 14, noise=0.01)
    x, y = (np.linalg.norm(side[:, None] - side, axis=2) for side in (x, y))
    truth = np.zeros((24, 24))
    truth[np.arange(14), np.arange(14)] = 1 / 24
    options = {"mass": 14 / 24, "scale": None}
    found = torchgw.solve(D_X=x, D_Y=y, **options)
    known = torchgw.solve(D_X=x, D_Y=y, init=truth, epsilon=found.epsilon, **options)
    assert found.report.objective <= known.report.objective * (1 + 1e-3) or found.doubt


@pytest.mark.slow
def test_larger_overlaps_end_no_higher_than_their_truth_or_say_so():
    x, y = overlap(7, 110, 60, noise=0.01)
    x, y = (np.linalg.norm(side[:, None] - side, axis=2) for side in (x, y))
    truth = np.zeros((110, 110))
    truth[np.arange(60), np.arange(60)] = 1 / 110
    options = {"mass": 60 / 110, "scale": None}
    found = torchgw.solve(D_X=x, D_Y=y, **options)
    known = torchgw.solve(D_X=x, D_Y=y, init=truth, epsilon=found.epsilon, **options)
    assert found.report.objective <= known.report.objective * (1 + 1e-3) or found.doubt
