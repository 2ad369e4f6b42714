"""Every way of finding neighbours finds those that scikit-learn's brute force finds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from sklearn.neighbors import NearestNeighbors

from torchgw.distances import leaves as leaves_module
from torchgw.distances import neighbours
from torchgw.distances.leaves import gaps, split

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")


def cloud(n, d, seed=0):
    return np.random.default_rng(seed).normal(size=(n, d))


# Name: points and the number of neighbours, a point itself among them.
POINTS = {
    "one point": (cloud(1, 3), 1),
    "fewer than a leaf": (cloud(7, 3), 7),
    "line": (cloud(150, 1), 9),
    "plane": (cloud(150, 2), 16),
    "many dimensions": (cloud(90, 33), 5),
    "all the others": (cloud(40, 3), 40),
    "ties": (cloud(150, 2).round(), 6),
    "equal": (np.ones((70, 3)), 4),
    "few different": (np.repeat(cloud(5, 4), 30, axis=0), 8),
    "far from zero": (cloud(120, 3) + 1e6, 6),
    "unequal scales": (cloud(120, 3) * [1e-6, 1.0, 1e6], 6),
    "outliers": (cloud(120, 3) * np.where(np.arange(120) % 40 == 0, 1e4, 1.0)[:, None], 6),
    "tight clusters": (np.repeat(cloud(6, 20) * 1e4, 20, axis=0) + cloud(120, 20), 6),
}


def by_leaves(base, query, n_neighbors):
    parts = split(base), split(query)
    return neighbours._nearest_by_leaves(*parts, n_neighbors)


WAYS = {
    "any": neighbours.nearest,
    "leaves": by_leaves,
    "products": neighbours._nearest_by_products,
    "tiles": neighbours._nearest_by_tiles,
}


@pytest.fixture
def small(monkeypatch):
    """Have small sets of points take several leaves, tiles and blocks."""
    monkeypatch.setattr(leaves_module, "_LEAF_POINTS", 6)
    monkeypatch.setattr(neighbours, "_WORK_BYTES", 2**17)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("points", "n_neighbors"), POINTS.values(), ids=POINTS)
def test_equals_scikit_learn(points, n_neighbors, way, dtype, device):
    tensor = torch.tensor(points, dtype=dtype, device=device)
    query = tensor[: 1 + len(tensor) // 3] if way == "products" else tensor
    found = WAYS[way](tensor, query, n_neighbors)
    host = tensor.double().cpu().numpy()
    brute = NearestNeighbors(n_neighbors=n_neighbors, algorithm="brute").fit(host)
    got = found.distances.cpu().numpy()
    # its squares lose digits where distances are small beside the coordinates
    size = np.abs(host).max()
    theirs = brute.kneighbors(query.double().cpu().numpy())[0]
    np.testing.assert_allclose(got, theirs, rtol=1e-7, atol=1e-7 * size)
    # differences do not
    exact = np.sort(cdist(query.double().cpu().numpy(), host), axis=1)[:, :n_neighbors]
    np.testing.assert_allclose(got, exact, rtol=1e-12, atol=0)
    chosen = found.indices.cpu().numpy()
    measured = np.linalg.norm(host[chosen] - query.double().cpu().numpy()[:, None], axis=2)
    np.testing.assert_allclose(got, measured, rtol=1e-12)
    assert all(len(set(row)) == n_neighbors for row in chosen.tolist())


@pytest.mark.parametrize("n", [1, 5, 64, 65, 300])
def test_leaves_hold_each_point_once_inside_their_boxes(n, device):
    points = torch.tensor(cloud(n, 2), device=device)
    leaves = split(points)
    assert sorted(leaves.order.tolist()) == list(range(n))
    real = leaves.row >= 0
    assert torch.equal(leaves.points[real], points[leaves.row[real]])
    assert (leaves.points >= leaves.low[:, None]).all()
    assert (leaves.points <= leaves.high[:, None]).all()
    # no two points of two leaves are nearer than the leaves are
    gap = gaps(leaves, leaves, slice(0, None)).sqrt()
    nearest = torch.cdist(leaves.points.flatten(0, 1), leaves.points.flatten(0, 1))
    count, size = leaves.row.shape
    nearest = nearest.reshape(count, size, count, size).amin(dim=(1, 3))
    assert (gap <= nearest + 1e-12).all()


@pytest.mark.parametrize("products", [1, 3])
def test_what_is_no_candidate_is_beyond_the_bound(products, device):
    from torchgw.distances._triton_neighbours import nearest_candidates

    points = torch.tensor(cloud(250, 40), device=device)
    points[0] *= 30
    points = points / points.norm(dim=1).max()
    index, bound = nearest_candidates(points, points[:60], 16, products)
    half = torch.cdist(points[:60], points).square() / 2
    # a bound that is exact would leave no room for rounding; one that is far off would be no use
    beyond = half.scatter(1, index.long(), torch.inf).amin(dim=1)
    assert (beyond >= bound).all()
    assert (beyond - bound <= (0.02 if products == 1 else 2e-4)).all()


def test_few_points_fill_no_list(device):
    from torchgw.distances._triton_neighbours import nearest_candidates

    points = torch.tensor(cloud(5, 3), device=device) / 10
    index, bound = nearest_candidates(points, points, 16, 3)
    assert index.sort(dim=1).values[:, -5:].tolist() == [[0, 1, 2, 3, 4]] * 5
    assert (bound == torch.inf).all()


@pytest.mark.parametrize("d", [2, 30])
def test_nearest_foreign(d, device):
    points = torch.tensor(cloud(80, d), device=device)
    labels = torch.arange(80, device=device) % 5
    query = torch.arange(0, 80, 3, device=device)
    distance = torch.cdist(points, points)
    distance[labels[:, None] == labels] = torch.inf
    expected = distance[query].min(dim=1)
    ways = [neighbours.nearest_foreign(points, labels, query)]
    marks = labels, labels[query]
    ways.append(neighbours._nearest_by_products(points, points[query], 1, marks))
    ways.append(neighbours._nearest_by_tiles(points, points[query], 1, marks))
    for found in ways:
        assert torch.equal(found.indices[:, 0], expected.indices)
        torch.testing.assert_close(found.distances[:, 0], expected.values)


@pytest.mark.parametrize("d", [2, 30], ids=["tree", "tiles"])
def test_many_duplicates_have_exactly_the_neighbours_asked_for(d, device):
    found = neighbours.nearest_others(torch.ones(40, d, device=device), 3)
    assert (found.distances == 0).all()
    assert found.indices.shape == (40, 3)
    assert (found.indices.cpu() != torch.arange(40)[:, None]).all()
    assert all(len(set(row)) == 3 for row in found.indices.tolist())


@pytest.mark.gpu
@pytest.mark.parametrize("d", [1, 3, 50])
def test_large_sets_on_a_gpu_equal_a_tree(d):
    points = torch.tensor(cloud(20_000, d), dtype=torch.float32)
    got = neighbours.nearest_others(points.cuda(), 10)
    expected = neighbours.nearest_others(points, 10)
    torch.testing.assert_close(got.distances.cpu(), expected.distances, rtol=1e-12, atol=1e-300)
