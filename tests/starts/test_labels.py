"""Labels of few points: which of many points each goes to, improved from seeds."""

import pytest
import torch

from torchgw._starts.labels import label_points


def part_of_cloud(seed, n, m):
    """Draw a cloud in space, and the distances of some of its points and of all, shuffled."""
    generator = torch.Generator("cpu").manual_seed(seed)
    cloud = torch.randn(m, 3, dtype=torch.float64, generator=generator)
    chosen = torch.randperm(m, generator=generator)[:n]
    return torch.cdist(cloud[chosen], cloud[chosen]), torch.cdist(cloud, cloud), chosen


def label(x, y, share=1.0):
    weights = tuple(torch.full((len(side),), 1 / len(side), dtype=torch.float64) for side in (x, y))
    return label_points(x, y, weights, share, torch.Generator("cpu").manual_seed(0))


@pytest.mark.parametrize("seed", range(4))
def test_points_of_a_part_are_sent_to_themselves(seed):
    x, y, chosen = part_of_cloud(seed, 25, 60)
    found = label(x, y)
    assert torch.equal(found.partners[0], chosen)
    assert float(found.costs[0]) == pytest.approx(0, abs=1e-6)
    assert int(found.met[0]) > 1


@pytest.mark.parametrize("share", [1.0, 0.6])
def test_costs_masses_and_plans_are_those_of_the_labels(share):
    x, y, _ = part_of_cloud(9, 20, 40)
    x = x + torch.rand(20, 20, dtype=torch.float64).triu(1)
    x = x.triu(1) + x.triu(1).T
    found = label(x, y, share)
    assert bool((found.costs.diff() >= 0).all())
    assert found.masses.sum(1).tolist() == pytest.approx([share] * len(found.costs), abs=1e-6)
    apart = (x - y[found.partners[:, :, None], found.partners[:, None]]).square()
    costs = torch.einsum("ki,kij,kj->k", found.masses.double(), apart, found.masses.double())
    torch.testing.assert_close(found.costs.double(), costs, rtol=1e-4, atol=1e-7)
    plans = found.plans(40)
    torch.testing.assert_close(plans.sum(2), found.masses.double() / share, rtol=1e-5, atol=1e-7)
    assert bool((plans.argmax(2) == found.partners)[found.masses > 0].all())


def test_a_linear_cost_decides_between_mirror_images():
    """A line of points fits in the plane both ways; what a point costs alone tells which."""
    places = torch.arange(12, dtype=torch.float64)[:, None]
    x = torch.cdist(places, places)
    for target in (torch.arange(12), torch.arange(12).flip(0)):
        linear = torch.ones(12, 12, dtype=torch.float64)
        linear[torch.arange(12), target] = 0
        weights = (torch.full((12,), 1 / 12, dtype=torch.float64),) * 2
        generator = torch.Generator("cpu").manual_seed(0)
        found = label_points(x, x, weights, 0.5, generator, linear=linear)
        inside = found.masses[0] > 0
        assert torch.equal(found.partners[0][inside], target[inside])
        apart = (x - x[found.partners[:, :, None], found.partners[:, None]]).square()
        masses = found.masses.double()
        costs = torch.einsum("ki,kij,kj->k", masses, apart, masses)
        costs += (linear.gather(1, found.partners.T).T * masses).sum(1)
        torch.testing.assert_close(found.costs.double(), costs, rtol=1e-4, atol=1e-6)


def test_parts_of_one_match_are_one():
    """Which points of an overlap are left out is no other match."""
    x, y, chosen = part_of_cloud(5, 30, 50)
    found = label(x, y, 0.4)
    inside = found.masses[0] > 0
    assert torch.equal(found.partners[0][inside], chosen[inside])
    right = (found.partners == chosen).double() * (found.masses > 0)
    assert int((right.sum(1) > 10).sum()) == 1


def test_no_label_of_one_point_could_be_better():
    x, y, _ = part_of_cloud(3, 20, 40)
    found = label(1.3 * x, y)
    partners, mass = found.partners[0], found.masses[0].double()
    for point in range(20):
        others = torch.arange(20) != point
        cost = (1.3 * x[point, others] - y[:, partners[others]]).square() @ mass[others]
        # float32 tells no more
        assert float(cost[partners[point]]) <= float(cost.min()) * (1 + 1e-5) + 1e-7


def test_too_few_points_have_no_labels():
    x, y, _ = part_of_cloud(0, 5, 6)
    found = label(x, y)
    assert found.plans(6).shape == (0, 5, 6)
