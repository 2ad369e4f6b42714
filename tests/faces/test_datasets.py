"""The demonstration data lie along a curve, and a neighbour graph can see it."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.neighbors import kneighbors_graph

from torchgw.datasets import spiral, swiss_roll

DATASETS = {"spiral": (spiral, 400, 2), "swiss_roll": (swiss_roll, 500, 3)}


@pytest.fixture(params=DATASETS)
def dataset(request):
    return DATASETS[request.param]


def test_points_follow_the_curve(dataset):
    draw, n, dimensions = dataset
    points, angle = draw(n, random_state=0, noise=0.0)
    assert points.shape == (n, dimensions)
    assert (angle[0], angle[-1]) == (0.0, 9.0)
    # Without noise the plane part is the curve itself: exact up to rounding.
    np.testing.assert_allclose(np.hypot(*points[:, :2].T), np.linspace(0.3, 1.0, n), rtol=1e-14)
    turned = np.unwrap(np.arctan2(points[:, 1], points[:, 0]))
    np.testing.assert_allclose(turned, angle, atol=1e-12)


def test_noise_is_on_every_coordinate(dataset):
    draw, n, _ = dataset
    clean, noisy = draw(n, random_state=3, noise=0.0)[0], draw(n, random_state=3)[0]
    # The heights come first from the generator, so both share them. A normal cut off at two has
    # standard deviation 0.88; its standard error over n draws is below 0.05 / sqrt(2 n) < 0.0018.
    np.testing.assert_allclose((noisy - clean).std(0), 0.05 * 0.88, atol=5 * 0.0018)
    assert np.abs(noisy - clean).max() <= 0.1


def test_same_seed_same_points(dataset):
    draw, n, _ = dataset
    first, again, other = (draw(n, random_state=seed)[0] for seed in (7, 7, 8))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    generator = np.random.default_rng(7)
    np.testing.assert_array_equal(draw(n, random_state=generator)[0], first)


def test_roll_fills_its_height():
    height = swiss_roll(500, random_state=0, noise=0.0, height=2.0)[0][:, 2]
    assert 0.0 <= height.min() < 0.05
    assert 1.95 < height.max() <= 2.0


@pytest.mark.parametrize("size", [1, 100])
@pytest.mark.parametrize("seed", [0, 1])
def test_neighbours_do_not_jump_between_turns(dataset, seed, size):
    draw, n, _ = dataset
    n *= size
    points, angle = draw(n, random_state=seed)
    source, target = kneighbors_graph(points, 5).nonzero()
    # A jump to the next turn is 2 pi; steps along the curve stay under a quarter of a turn.
    assert np.abs(angle[source] - angle[target]).max() < np.pi / 2
