"""Every way of finding neighbours finds those that scikit-learn's brute force finds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from problems import skip_unless_kernels_run
from scipy.spatial.distance import cdist
from sklearn.neighbors import NearestNeighbors

from torchgw._errors import BackendUnavailableError, InvalidInputError, PerformanceWarning
from torchgw.distances import knn_graph
from torchgw.distances._graph import leaves as leaves_module
from torchgw.distances._graph import neighbours
from torchgw.distances._graph.leaves import box_gaps, into_leaves, leaf_count

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")


def cloud(n, d, seed=0):
    return np.random.default_rng(seed).normal(size=(n, d))


# Name: points and the number of neighbours, a point itself among them.
POINTS = {
    "one point": (cloud(1, 3), 1), "fewer than a leaf": (cloud(7, 3), 7),
    "line": (cloud(150, 1), 9), "plane": (cloud(150, 2), 16), "many dimensions": (cloud(90, 33), 5),
    "all the others": (cloud(40, 3), 40), "ties": (cloud(150, 2).round(), 6),
    "wide": (cloud(230, 3), 9), "ties, wide": (cloud(230, 2).round(1), 9),
    "equal": (np.ones((70, 3)), 4), "few different": (np.repeat(cloud(5, 4), 30, axis=0), 8),
    "far from zero": (cloud(120, 3) + 1e6, 6),
    "unequal scales": (cloud(120, 3) * [1e-6, 1.0, 1e6], 6),
    "outliers": (cloud(120, 3) * np.where(np.arange(120) % 40 == 0, 1e4, 1.0)[:, None], 6),
    "tight clusters": (np.repeat(cloud(6, 20) * 1e4, 20, axis=0) + cloud(120, 20), 6),
}  # fmt: skip


WAYS = {
    "any": neighbours.nearest,
    "products": neighbours._nearest_by_products,
    "tiles": neighbours._nearest_by_tiles,
}


@pytest.fixture
def small(monkeypatch):
    """Have small sets of points take several leaves, tiles and blocks."""
    monkeypatch.setattr(leaves_module, "_LEAF_POINTS", 6)
    monkeypatch.setattr(neighbours, "_WORK_BYTES", (0, 2**17))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("points", "n_neighbors"), POINTS.values(), ids=POINTS)
def test_equals_scikit_learn(points, n_neighbors, way, dtype, device):
    if way == "products":
        skip_unless_kernels_run(device)
    tensor = torch.tensor(points, dtype=dtype, device=device)
    query = tensor[: 1 + len(tensor) // 3] if way == "products" else tensor
    check(WAYS[way](tensor, query, n_neighbors), tensor, query, n_neighbors)


def check(found, tensor, query, n_neighbors):
    """Compare with scikit-learn, and with distances from differences."""
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


# interpreted kernels take seconds for some leaves
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ["fewer than a leaf", "ties", "equal", "outliers"])
@pytest.mark.parametrize("others", [False, True], ids=["themselves", "others"])
def test_one_launch_equals_scikit_learn(name, others, device):
    skip_unless_kernels_run(device)
    points, n_neighbors = POINTS[name]
    tensor = torch.tensor(points[:: 1 + len(points) // 30], device=device)
    query = tensor[::3] + 0.1 if others else tensor
    base = into_leaves(tensor)
    leaves = into_leaves(query) if others else base
    check(neighbours._nearest_by_one_launch(base, leaves, n_neighbors), tensor, query, n_neighbors)


@pytest.mark.parametrize(("n", "pays"), [(1_000, False), (5_000, False), (20_000, True)])
def test_leaves_that_cannot_pay_are_not_made(n, pays, device):
    """So many are visited in any case; on a curve few others."""
    t = torch.linspace(0, 1, n, dtype=torch.float64, device=device)
    leaves = into_leaves(torch.stack([t, t * t, t.sin()], dim=1))
    least = min(1.0, neighbours._SEEDS / leaf_count(n))
    assert neighbours._visits_pay(least, 3) == neighbours._leaves_pay(leaves, leaves, 8) == pays


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ["plane", "wide", "unequal scales", "outliers", "all the others"])
def test_leaves_worth_a_look_hold_all_neighbours(name, device):
    points, n_neighbors = POINTS[name]
    tensor = torch.from_numpy(points).to(device)
    leaves = into_leaves(tensor)
    found = neighbours._worth_a_look(leaves, leaves, n_neighbors)
    apart = torch.cdist(tensor, tensor, compute_mode="donot_use_mm_for_euclid_dist")
    near = apart.topk(n_neighbors, largest=False).indices
    number = torch.arange(len(leaves.row), device=device)[:, None].expand_as(leaves.row)
    home = torch.empty(len(points), dtype=torch.int64, device=device)
    home[leaves.row[leaves.row >= 0]] = number[leaves.row >= 0]
    assert found[home[:, None], home[near]].all()
    if name == "wide":
        assert not found.all()


@pytest.mark.parametrize(
    ("n", "count"), [(1, 1), (5, 1), (64, 1), (65, 2), (300, 8), (400, 7), (310, 5), (500, 8)]
)
def test_leaves_hold_each_point_once_inside_their_boxes(n, count, device, monkeypatch):
    if n > 300:
        # with 3 levels already the number of parts may be odd
        monkeypatch.setattr(leaves_module, "_MANY_LEVELS", 3)
    points = torch.tensor(cloud(n, 2), device=device)
    leaves = into_leaves(points)
    assert len(leaves.row) == count == leaf_count(n)
    size = leaves.row.shape[1]
    tiles = leaves.order.reshape(count, 64)
    assert sorted(tiles[tiles >= 0].tolist()) == list(range(n))
    assert torch.equal(tiles[:, :size], leaves.row)
    assert (tiles[:, size:] == -1).all()
    real = leaves.row >= 0
    assert torch.equal(leaves.points[real], points[leaves.row[real]])
    assert (leaves.points >= leaves.low[:, None]).all()
    assert (leaves.points <= leaves.high[:, None]).all()
    # no two points of two leaves are nearer than the leaves are
    gap = box_gaps(leaves, leaves).sqrt()
    nearest = torch.cdist(leaves.points.flatten(0, 1), leaves.points.flatten(0, 1))
    count, size = leaves.row.shape
    nearest = nearest.reshape(count, size, count, size).amin(dim=(1, 3))
    assert (gap <= nearest + 1e-12).all()


@pytest.mark.parametrize("products", [1, 3])
def test_what_is_no_candidate_is_beyond_the_bound(products, device):
    skip_unless_kernels_run(device)
    from torchgw.distances._graph.neighbours_triton import nearest_candidates

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
    skip_unless_kernels_run(device)
    from torchgw.distances._graph.neighbours_triton import nearest_candidates

    points = torch.tensor(cloud(5, 3), device=device) / 10
    index, bound = nearest_candidates(points, points, 16, 3)
    assert index.sort(dim=1).values[:, -5:].tolist() == [[0, 1, 2, 3, 4]] * 5
    assert (bound == torch.inf).all()


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


class TestApproximate:
    """An approximate search, where faiss is installed."""

    @pytest.mark.parametrize("d", [3, 40])
    def test_most_neighbours_are_found_and_all_distances_are_exact(self, d):
        pytest.importorskip("faiss", reason="pip install faiss-cpu")
        points = torch.tensor(cloud(600, d))
        found = neighbours.nearest_others(points, 8, "approximate")
        exact = neighbours.nearest_others(points, 8)
        measured = (points[found.indices] - points[:, None]).norm(dim=2)
        torch.testing.assert_close(found.distances, measured, rtol=1e-12, atol=0)
        assert (found.indices != torch.arange(600)[:, None]).all()
        assert (found.distances >= exact.distances * (1 - 1e-12)).all()
        # 1.0 here; a search that takes any neighbours would be at 0.01
        assert (found.distances[:, -1] <= exact.distances[:, -1] * 1.001).double().mean() > 0.95

    def test_too_few_candidates_are_made_up_for(self, monkeypatch):
        points = torch.tensor(cloud(50, 4))
        nothing = lambda points, count: torch.full((len(points), count), -1)  # noqa: E731
        monkeypatch.setattr(neighbours, "nearest_approximate", nothing)
        found = neighbours.nearest_others(points, 5, "approximate")
        exact = neighbours.nearest_others(points, 5)
        assert torch.equal(found.indices, exact.indices)

    def test_without_faiss_the_message_names_the_command(self, monkeypatch):
        monkeypatch.setattr("torchgw.distances._graph.neighbours.find_spec", lambda name: None)
        with pytest.raises(BackendUnavailableError, match="pip install faiss-cpu"):
            knn_graph(cloud(20, 3), 4, search="approximate")

    def test_other_searches_are_refused(self):
        with pytest.raises(InvalidInputError, match="'exact' or 'approximate'; got 'quick'"):
            knn_graph(cloud(20, 3), 4, search="quick")


def test_a_long_search_says_what_would_be_faster(monkeypatch):
    monkeypatch.setattr(neighbours, "_MANY_PAIRS", 100)
    with pytest.warns(PerformanceWarning, match="40 points in 20 dimensions.*approximate"):
        knn_graph(cloud(40, 20), 4)
    # trees do not compare all pairs
    knn_graph(cloud(40, 2), 4)
