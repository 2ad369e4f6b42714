"""What distances="auto" is for points: decided by the data, and said."""

import numpy as np
import pytest
import torch
from problems import solve_by_name
from scipy.stats import spearmanr

import torchgw
from benchmarks.solves.first_use import clusters, rotated
from torchgw import TorchGWWarning, solve
from torchgw._problem.decide import _passed_over, decide
from torchgw._search.optima import agreement
from torchgw.datasets import spiral, swiss_roll
from torchgw.distances import DijkstraDistance, PointDistance
from torchgw.distances.geodesics import Geodesics


def refuse(*_):
    raise AssertionError("nothing was to be tried")


def tensors(*sides):
    return tuple(torch.as_tensor(np.array(side)) for side in sides)


def test_curves_surfaces_and_solids_have_geodesics_without_a_trial():
    rng = np.random.default_rng(0)
    spirals = spiral(400, random_state=1)[0], swiss_roll(500, random_state=1)[0]
    clouds = rng.normal(size=(250, 3)), rng.normal(size=(220, 2))
    for sides in (spirals, clouds):
        found = decide(tensors(*sides), refuse)
        assert (found.chosen, found.agreement) == ("geodesic", {})
        assert "dimension" in found.why


@pytest.mark.parametrize("n", [1, 3, 6])
def test_few_points_have_geodesics(n):
    points = np.random.default_rng(0).normal(size=(n, 9))
    assert decide(tensors(points, points), refuse).chosen == "geodesic"


@pytest.mark.parametrize("n", [150, 250])
def test_all_paths_of_few_points_are_read_at_once(monkeypatch, n):
    asked, rows = [], Geodesics.rows

    def counted(*given, **options):
        asked.append(len(given[1]))
        return rows(*given, **options)

    monkeypatch.setattr(Geodesics, "rows", counted)
    # of too many dimensions to take geodesics untried
    points = torch.as_tensor(np.random.default_rng(0).normal(size=(n, 5)))
    found = decide((points, points.flip(0)), lambda x, y, *_: agreement(x, y) - 0.5)
    assert "geodesic" in found.agreement
    assert asked[:1] == [n if n == 150 else 1]
    assert (len(asked) == 2) == (n == 150)


def test_points_that_coincide_are_decided_on():
    points = torch.zeros(40, 8, dtype=torch.float64)
    assert decide((points, points), lambda *_: 0.0).chosen in ("geodesic", "euclidean")


def test_clusters_have_straight_distances():
    rng = np.random.default_rng(1)
    points, _ = clusters(rng, 300)
    found = decide(tensors(points, rotated(rng, points, 30)), agreement)
    assert found.chosen == "euclidean"
    assert "geodesic" not in found.agreement
    assert "in pieces" in found.why


def test_directions_under_lengths_of_noise_have_angles():
    rng = np.random.default_rng(2)
    points, _ = clusters(rng, 300, 10, 5, 8.0)
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    basis = np.linalg.qr(rng.normal(size=(19, 19)))[0][:10]
    first, second = (np.exp(0.7 * rng.normal(size=(300, 1))) for _ in range(2))
    found = decide(tensors(points * first, points @ basis * second * 1e3), agreement)
    assert found.chosen == "cosine"
    assert found.agreement["cosine"] > found.agreement["euclidean"]


def test_arms_that_bend_in_many_dimensions_have_geodesics():
    rng = np.random.default_rng(3)
    length, arm = rng.uniform(0, [0.7, 0.9, 1.2, 1.6], (300, 4)), rng.integers(4, size=300)
    length = length[np.arange(300), arm]
    sides = []
    for _ in range(2):
        points = np.zeros((300, 20))
        for which in range(4):
            speed = rng.uniform(4, 9, 3)
            angle = length[arm == which, None] * speed
            wave = np.hstack([(np.cos(angle) - 1) / speed, np.sin(angle) / speed])
            points[arm == which] = wave @ np.linalg.qr(rng.normal(size=(20, 6)))[0].T
        sides.append(points + 0.01 * rng.normal(size=points.shape))
    found = decide(tensors(*sides), agreement)
    assert found.chosen == "geodesic"
    assert found.agreement["geodesic"] > found.agreement["euclidean"]


def test_angles_that_agree_by_chance_are_not_taken():
    rng = np.random.default_rng(4)
    sides = tensors(rng.normal(size=(200, 6)), rng.normal(size=(200, 6)))
    scores = iter([0.7, 0.6, 0.78])
    found = decide(sides, lambda *_: next(scores))
    assert found.chosen == "euclidean"
    scores = iter([0.5, 0.4, 0.9])
    assert decide(sides, lambda *_: next(scores)).chosen == "cosine"


def test_many_points_are_squared_if_they_agree_as_well_so():
    rng = np.random.default_rng(5)
    sides = tensors(rng.normal(size=(1_100, 8)), rng.normal(size=(1_100, 8)))
    seen = []

    def judge(source, target, found_by=None):
        seen.append((source.n, target.n))
        assert source.metric == target.metric == "euclidean"
        assert found_by is None or {each.metric for each in found_by} == {"sqeuclidean"}
        return 0.97 if found_by is None else squares

    squares = 0.91
    assert decide(sides, judge).chosen == "sqeuclidean"
    squares = 0.89
    assert decide(sides, judge).chosen == "euclidean"
    assert set(seen) == {(1_000, 1_000)}


@pytest.mark.parametrize(("count", "seed"), [(6, 7), (6, 19), (10, 0), (20, 2)])
def test_many_points_in_clusters_are_squared(count, seed):
    """Plain distances took five times as long before, and geodesics twenty times."""
    rng = np.random.default_rng(seed)
    points, _ = clusters(rng, 3_000, count=count)
    order = rng.permutation(3_000)
    sides = points, rotated(rng, points)[order]
    assert decide(tensors(*sides), agreement).chosen == "sqeuclidean"


def test_far_points_keep_distances_from_being_squared():
    rng = np.random.default_rng(0)
    centres = 8 * np.linalg.qr(rng.normal(size=(10, 10)))[0][:5]
    labels = rng.choice(5, 1_200, p=[0.1, 0.15, 0.2, 0.25, 0.3])
    first, second = (centres[labels] + rng.standard_t(2, (1_200, 10)) for _ in range(2))
    found = decide(tensors(first, rotated(rng, second)), agreement)
    assert found.chosen != "sqeuclidean"
    assert found.agreement.get("sqeuclidean", 0) < found.agreement["euclidean"] - 0.1


def test_clusters_of_uneven_size_in_many_dimensions_have_no_geodesics():
    """Paths between fifteen clusters agree by .88, straight distances by .69."""
    rng = np.random.default_rng(3)
    centres = rng.normal(size=(15, 40))
    centres *= 7 / np.linalg.norm(centres, axis=1, keepdims=True)
    labels = rng.choice(15, 300, p=rng.dirichlet(np.full(15, 3.0)))
    first, second = (centres[labels] + rng.normal(size=(300, 40)) for _ in range(2))
    order = rng.permutation(300)
    found = decide(tensors(first, rotated(rng, second)[order]), agreement)
    assert found.agreement["geodesic"] > found.agreement["euclidean"] + 0.1
    assert found.chosen == "euclidean"


def test_agreement_of_a_plan_that_other_distances_find():
    rng = np.random.default_rng(6)
    points, _ = clusters(rng, 90, 5)
    first, second = tensors(points, rotated(rng, points)[::-1].copy())
    plain, squares = (
        [PointDistance(each, metric) for each in (first, second)]
        for metric in ("euclidean", "sqeuclidean")
    )
    assert agreement(*plain, found_by=tuple(plain)) == pytest.approx(agreement(*plain), abs=1e-12)
    assert agreement(*plain, found_by=tuple(squares)) > 0.99
    bad = [PointDistance(torch.randn(90, 5).double(), "euclidean") for _ in range(2)]
    assert agreement(*plain, found_by=tuple(bad)) < 0.5


def test_a_zero_row_has_no_angles():
    points = torch.randn(100, 9, dtype=torch.float64)
    points[0] = 0
    assert "cosine" not in decide((points, points + 1), lambda *_: 0.5).agreement


def test_agreement_of_a_copy_is_one():
    rng = np.random.default_rng(6)
    points, _ = clusters(rng, 90, 5)
    copy = rotated(rng, points)[::-1].copy()
    sides = [PointDistance(each, "euclidean") for each in tensors(points, copy)]
    assert agreement(*sides) > 0.99


def test_the_result_says_what_was_decided():
    rng = np.random.default_rng(7)
    points, labels = clusters(rng, 120)
    order = rng.permutation(120)
    # an option of geodesics is not refused, which other points would have
    result = torchgw.solve(
        points,
        rotated(rng, points)[order],
        random_state=0,
        options=torchgw.Options(disconnected="fill"),
    )
    assert (labels[order][result.lazy_plan.argmax()] == labels).all()
    decided = result.log["distances"]
    assert decided["chosen"] == "euclidean"
    assert decided["why"] in repr(result)
    assert "decision" in result.timings


def test_geodesics_are_printed_as_other_choices_are():
    curve = spiral(300, random_state=0)[0]
    told = repr(solve(curve, curve, n_init=1, epsilon=0.1, random_state=0))
    assert "distances: geodesic (neighbour graphs of dimension" in told
    few = np.random.default_rng(0).normal(size=(12, 3))
    told = repr(solve(few, few * [1, -1, 1], random_state=0))
    assert "distances: geodesic (points are few)" in told


@pytest.mark.filterwarnings("ignore::torchgw.GraphWarning")
def test_what_asks_for_geodesics_has_them():
    rng = np.random.default_rng(8)
    points, _ = clusters(rng, 60, 6)
    for option in ({"distances": "precomputed"}, {"n_neighbors": 10}):
        result = solve_by_name(points, points, disconnected="fill", **option)
        assert result.log["distances"] is None
        assert "distances:" not in repr(result)


def test_many_points_that_do_not_agree_are_refused_on_a_cpu(limited):
    limited(unstructured=90_000)
    rng = np.random.default_rng(9)
    with pytest.raises(torchgw.UnsupportedError, match="sqeuclidean"):
        torchgw.solve(rng.normal(size=(350, 20)), rng.normal(size=(310, 20)))


@pytest.mark.parametrize(("n", "seed"), [(60, 1), (100, 1), (150, 3)])
def test_short_cuts_of_few_points_are_seen(n, seed):
    """Spirals that neighbour graphs of few points cut across, without a word before."""
    first, second = spiral(n, random_state=seed), swiss_roll(n, random_state=seed + 1_000)
    result = torchgw.solve(first[0], second[0], random_state=0)
    assert result.log["distances"]["chosen"] == "euclidean"
    assert spearmanr(first[1], second[1][result.lazy_plan.argmax()])[0] > 0.99


@pytest.mark.slow
@pytest.mark.parametrize("n", [400, 1_000, 3_000])
def test_rotated_clusters_are_right(n):
    """Ten seeds; nearest-neighbour geodesics had 54, 19 and 10% of the labels right."""
    for seed in range(10):
        rng = np.random.default_rng(seed)
        points, labels = clusters(rng, n)
        order = rng.permutation(n)
        result = torchgw.solve(points, rotated(rng, points)[order], random_state=seed)
        assert (labels[order][result.lazy_plan.argmax()] == labels).all(), seed


@pytest.mark.gpu
def test_a_gpu_reads_all_paths_and_decides_alike():
    # of too many dimensions to take geodesics untried
    points = torch.as_tensor(np.random.default_rng(0).normal(size=(250, 5)))

    def decided(device):
        kinds = set()

        def judge(x, y, *_):
            kinds.update(map(type, (x, y)))
            return agreement(x, y) - 0.5

        return decide((points, points.flip(0)), judge, torch.device(device)), kinds

    (here, on_cpu), (there, on_gpu) = decided("cpu"), decided("cuda")
    assert DijkstraDistance in on_cpu - on_gpu
    assert here.chosen == there.chosen
    # up to which of nearly equal optima a search comes to, of points that have nothing in common
    assert here.agreement == pytest.approx(there.agreement, abs=0.1)


def test_places_have_no_angles_and_parts_no_paths():
    # a part of a cloud in space and the whole, turned; by geodesics 41% of these were right, and
    # cosine distances were taken of others of this kind
    generator = np.random.default_rng(10)
    centres = generator.normal(size=(6, 3)) * 1.5
    whole = centres[generator.integers(6, size=400)] + generator.normal(size=(400, 3)) / 2
    turn, _ = np.linalg.qr(generator.normal(size=(3, 3)))
    result = solve(whole[:240], whole @ turn, mass=0.6, random_state=0)
    assert result.log["distances"]["chosen"] == "euclidean"
    assert (np.asarray(result.lazy_plan.argmax()) == np.arange(240)).mean() > 0.9


def test_the_rule_is_said():
    few = {"euclidean": 0.57, "geodesic": 0.3, "cosine": 0.60}
    assert "cosine agrees better by chance: it is taken from 0.80 on" in _passed_over(
        "euclidean", few
    )
    assert not _passed_over("euclidean", {"euclidean": 0.57, "cosine": 0.5})
    assert not _passed_over("cosine", {"euclidean": 0.57, "cosine": 0.9})


def test_relaxed_problems_by_angles_say_so():
    # directions whose lengths are noise
    generator = np.random.default_rng(0)
    points = generator.normal(size=(60, 8))
    lengths = generator.lognormal(sigma=1.5, size=(2, 60, 1))
    with pytest.warns(TorchGWWarning, match="took cosine distances"):
        result = solve(points * lengths[0], points * lengths[1], mass=0.9, random_state=0)
    assert result.log["distances"]["chosen"] == "cosine"


def test_geodesic_is_a_name():
    points = np.random.default_rng(0).normal(size=(60, 3))
    named = solve(points, points[::-1], distances="geodesic", random_state=0)
    same = solve(points, points[::-1], distances="precomputed", random_state=0)
    np.testing.assert_array_equal(named.plan, same.plan)
    assert named.log["distances"] is None


@pytest.mark.parametrize(("n", "m"), [(320, 320), (320, 280)])
def test_sides_may_be_swapped(n, m):
    # paths between so many points are costly, so that their problems have no standard form
    rng = np.random.default_rng(3)
    centres = 3 * rng.normal(size=(8, 3))
    X, Y = (centres[rng.integers(0, 8, k)] + 0.4 * rng.normal(size=(k, 3)) for k in (n, m))
    one, other = decide(tensors(X, Y), agreement), decide(tensors(Y, X), agreement)
    assert one.agreement
    assert one[:3] == other[:3]
