"""How sure partners are: clear matches, noise, unrelated clouds, groups, files."""

from __future__ import annotations

import numpy as np
import pytest

import torchgw

RNG = np.random.default_rng(0)
CLOUD = RNG.normal(size=(30, 3)) * [3, 2, 1]
ORDER = RNG.permutation(30)


def solved(X, Y, **options):
    return torchgw.solve(X, Y, distances="euclidean", random_state=0, **options)


@pytest.fixture(scope="module")
def clear():
    return solved(CLOUD, CLOUD[ORDER] + 0.01)


def test_clear_partners_are_kept_and_noisy_and_unrelated_ones_are_not(clear):
    sure = clear.confidence(10).partner.mean()
    noisy = solved(CLOUD, CLOUD[ORDER] + 0.8 * RNG.normal(size=CLOUD.shape))
    unrelated = solved(CLOUD, RNG.normal(size=(30, 3)) * [3, 2, 1])
    assert sure > 0.9
    assert noisy.confidence(10).partner.mean() < sure - 0.2
    assert unrelated.confidence(10).partner.mean() < 0.5


def test_what_cannot_be_told_apart_is_kept_by_groups():
    # leaves of one node are twins
    star = np.zeros((12, 12))
    for node in range(1, 5):
        star[0, node] = star[node, 0] = 1
    for node in range(5, 12):
        star[node - 4 if node < 11 else 5, node] = star[node, node - 4 if node < 11 else 5] = 1
    distances = torchgw_paths(star)
    result = torchgw.solve(D_X=distances, D_Y=distances, random_state=0)
    found = result.confidence(8)
    profiles = np.sort(distances, 1)
    same = (np.abs(profiles[:, None] - profiles) < 1e-9).all(2)
    assert np.array_equal(found.groups[:, None] == found.groups, same)
    assert (found.group >= found.partner).all()
    whole = result.confidence(4, groups=np.zeros(12))
    assert (whole.group == 1).all()


def torchgw_paths(adjacency):
    import scipy

    return scipy.sparse.csgraph.shortest_path(adjacency, unweighted=True)


def test_labels_seeds_and_time(clear):
    found, again = clear.confidence(6, random_state=3), clear.confidence(6, random_state=3)
    assert np.array_equal(found.partner, again.partner)
    assert clear.stability is again
    assert found.n_resamples == 6
    assert 1 <= clear.confidence(1000, time_limit=0).n_resamples < 10
    assert "30 points" in repr(found)
    with pytest.raises(torchgw.InvalidInputError, match="`groups`"):
        clear.confidence(groups=np.zeros(4))
    with pytest.raises(torchgw.InvalidInputError, match="`n_resamples`"):
        clear.confidence(0)


def test_files_keep_it(clear, tmp_path):
    found = clear.confidence(5)
    clear.save(tmp_path / "match.npz")
    again = torchgw.load(tmp_path / "match.npz")
    assert np.array_equal(again.stability.partner, found.partner)
    assert np.array_equal(again.stability.groups, found.groups)


def test_other_sizes_weights_and_features():
    Y = np.vstack([CLOUD[ORDER], RNG.normal(size=(9, 3))])
    weights = RNG.random(30) + 0.5
    features = RNG.normal(size=(39, 2))
    result = solved(
        CLOUD, Y, a=weights / weights.sum(),
        features=(features[:30][np.argsort(ORDER)], features), alpha=0.5,
    )  # fmt: skip
    found = result.confidence(5)
    assert found.partner.shape == (30,)
    assert found.groups.shape == (39,)
    assert ((found.partner >= 0) & (found.partner <= 1)).all()


def test_other_problems_are_refused():
    for options in ({"mass": 0.8}, {"unbalanced": 1.0}, {"loss": "absolute"}):
        result = solved(CLOUD[:12], CLOUD[:12], n_init=1, **options)
        with pytest.raises(torchgw.UnsupportedError, match="balanced problems"):
            result.confidence(2)


def test_groups_of_points_too_many_for_a_table_are_refused(limited):
    limited(kept_tables=100)
    groups, factored = [np.arange(12) % 2] * 2, torchgw.Options(gradient="factored")
    options = {"distances": "sqeuclidean", "groups": groups, "options": factored}
    result = torchgw.solve(CLOUD[:12], CLOUD[:12], n_init=1, random_state=0, **options)
    assert not result.extension.restricted
    with pytest.raises(torchgw.UnsupportedError, match="known or allowed"):
        result.confidence(2)


def test_it_is_drawn_as_a_colour(clear):
    plotting = pytest.importorskip("torchgw.plotting")
    first, _ = plotting.plot_match(clear, CLOUD[:, :2], CLOUD[ORDER][:, :2], colour="confidence")
    drawn = first.collections[0].get_array()
    assert np.array_equal(drawn, clear.stability.partner)
