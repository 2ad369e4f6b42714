"""Seeds of pairs at equal distances, and the relaxed searches that begin with them."""

import warnings

import numpy as np
import pytest
import torch

import torchgw
from torchgw._starts.guesses import congruent_pairs, nearest


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


def test_seeds_of_many_points_lie_in_the_part_that_is_shared():
    """Two windows that share half of 150 spots: few pairs of many are as far apart by truth."""
    weights = torch.full((150,), 1 / 150, dtype=torch.float64)
    right = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        spots = np.stack(np.meshgrid(np.arange(23), np.arange(10)), -1).reshape(-1, 2)[:225]
        spots = spots + 0.25 * rng.normal(size=spots.shape)
        spots = spots[spots[:, 0].argsort()]
        x, y = spots[:150] + 0.03 * rng.normal(size=(150, 2)), spots[75:] @ [[0, 1], [1, 0]]
        generator = torch.Generator("cpu").manual_seed(0)
        found = congruent_pairs(table(x), table(y), (weights, weights), 0.5, 4, generator)
        right.append((found.source[0] == found.target[0] + 75).double().mean())
    assert float(torch.stack(right).mean()) > 0.7


def test_some_points_are_told_by_what_surrounds_them_among_all():
    """Two windows that share half: a third of the spots of one have other neighbours than all."""
    n, few, right = 180, 60, {True: 0, False: 0}
    for seed in range(4):
        rng = np.random.default_rng(seed)
        spots = rng.uniform(size=(270, 2)) * [27, 10]
        spots = spots[spots[:, 0].argsort()]
        x, y = table(spots[:n] + 0.03 * rng.normal(size=(n, 2))), table(spots[n // 2 :])
        some = torch.from_numpy(rng.permutation(n)[:few])
        weights = (torch.full((size,), 1 / size, dtype=torch.float64) for size in (few, n))
        question = x[some[:, None], some], y, tuple(weights), 0.5, 64
        around, there = nearest(x, y)
        for near in (None, (around[some], there)):
            found = congruent_pairs(*question, torch.Generator("cpu").manual_seed(0), near)
            pairs = some[found.source] == found.target + n // 2
            right[near is not None] += int((pairs.double().mean(1) > 0.5).sum())
    assert right[True] > 5 * right[False] + 10


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "n", "shared"), [*((100 + seed, 24, 14) for seed in range(4)), (7, 110, 60)]
)
def test_overlaps_end_no_higher_than_their_truth_or_say_so(seed, n, shared):
    x, y = overlap(seed, n, shared, noise=0.01)
    x, y = (np.linalg.norm(side[:, None] - side, axis=2) for side in (x, y))
    truth = np.zeros((n, n))
    truth[np.arange(shared), np.arange(shared)] = 1 / n
    options = {"mass": shared / n, "scale": None}
    found = torchgw.solve(D_X=x, D_Y=y, **options)
    known = torchgw.solve(D_X=x, D_Y=y, init=truth, epsilon=found.epsilon, **options)
    assert found.report.objective <= known.report.objective * (1 + 1e-3) or found.doubt


# whether starts agree is not what is asked here
@pytest.mark.filterwarnings("ignore::torchgw.SearchWarning")
@pytest.mark.parametrize("used", [90, 5])
def test_points_without_weight_take_no_part_in_a_larger_search(used):
    rng = np.random.default_rng(0)
    x, y, a = rng.normal(size=(100, 2)), rng.normal(size=(100, 2)), np.zeros(100)
    a[:used] = 1 / used
    result = torchgw.solve(x, y, a=a, mass=0.5, scale=None)
    assert result.report.mass == pytest.approx(0.5)
    assert (result.plan[used:] == 0).all()


def test_where_no_pairs_were_followed_none_disagree():
    rng = np.random.default_rng(0)
    t, s = rng.random(100), rng.random(7)
    found = torchgw.solve(np.c_[t, t**2], np.c_[s, s**2], mass=0.5, scale=None)
    assert not found.doubt


def part_of_whole(seed, n):
    """Half of a cloud of lumps, and all of it in another pose; where each point of the half is."""
    rng = np.random.default_rng(seed)
    widths = rng.uniform(0.2, 0.8, (6, 1, 3))
    whole = 1.5 * rng.normal(size=(6, 1, 3)) + widths * rng.normal(size=(6, n // 6, 3))
    whole = whole.reshape(-1, 3)
    half = (whole @ rng.normal(size=3)).argsort()[: n // 2]
    order = rng.permutation(n)
    turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    part = whole[half] + 0.02 * rng.normal(size=(n // 2, 3))
    return part, (whole @ turn)[order], order.argsort()[half]


@pytest.mark.slow
def test_a_part_finds_its_place_in_a_whole_of_which_some_points_are_looked_at():
    x, y, partner = part_of_whole(1, 600)
    found = torchgw.solve(x, y, distances="euclidean", mass=0.5, random_state=0)
    assert np.linalg.norm(y[found.plan.argmax(1)] - y[partner], axis=1).mean() < 0.1
    assert not found.doubt


@pytest.mark.slow
def test_spots_that_are_given_in_order_are_looked_at_all_over():
    """Two windows of spots in order: the first of 300 lie in a corner, which the other lacks."""
    rng = np.random.default_rng(0)
    spots = np.stack(np.meshgrid(np.arange(30), np.arange(14)), -1).reshape(-1, 2)
    spots = spots + 0.25 * rng.normal(size=spots.shape)
    spots = spots[spots[:, 0].argsort()]
    x, y = spots[:300] + 0.03 * rng.normal(size=(300, 2)), spots[120:] @ [[0, 1], [1, 0]]
    options = {"distances": "euclidean", "mass": 0.6, "random_state": 0}
    truth = np.zeros((300, 300))
    truth[np.arange(120, 300), np.arange(180)] = 1 / 300
    known = torchgw.solve(x, y, init=truth, **options)
    with warnings.catch_warnings():
        # that starts led to different optima
        warnings.simplefilter("ignore", torchgw.SearchWarning)
        found = torchgw.solve(x, y, **options)
    assert found.report.objective <= known.report.objective * (1 + 1e-3)


def test_where_a_side_is_free_points_of_both_are_labelled_before_few_are_searched():
    x, y, partner = part_of_whole(3, 240)
    options = {"distances": "euclidean", "unbalanced": (float("inf"), 0.0), "random_state": 0}
    found = torchgw.solve(x, y, **options)
    assert found.alternatives[0].label.startswith("labels")
    assert not found.doubt
    truth = np.zeros((120, 240))
    truth[np.arange(120), partner] = 1 / 120
    known = torchgw.solve(x, y, init=truth, **options)
    assert found.report.objective <= known.report.objective * (1 + 1e-3)


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_part_that_lies_in_the_whole_in_two_ways_is_ambiguous(symmetric):
    rng = np.random.default_rng(5)
    half = rng.normal(size=(120, 3)) * [2, 1, 1] + [0, 0, 2]
    whole = np.concatenate([half, half * [1, 1, -1]])
    if not symmetric:
        whole = rng.normal(size=(240, 3)) * [2, 1, 1]
    part = whole[whole[:, 0].argsort()[:120]] + 0.02 * rng.normal(size=(120, 3))
    options = {"distances": "euclidean", "unbalanced": (float("inf"), 0.0), "random_state": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchgw.AmbiguityWarning)
        found = torchgw.solve(part, whole, **options)
    assert found.is_ambiguous == symmetric
    assert (found.ambiguity > 0.9) == symmetric
    if symmetric:
        assert len({one.relation for one in found.alternatives}) > 1
