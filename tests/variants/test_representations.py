"""Representations of the same items: their matches, and scores that take the items as known."""

from __future__ import annotations

import numpy as np
import pytest
import scipy

import torchgw
from torchgw.metrics import category_accuracy, top_k_accuracy

ITEMS = 12
CATEGORIES = np.array(["animal", "tool", "food"])[np.arange(ITEMS) % 3]


def people(count=4, noise=0.1):
    rng = np.random.default_rng(0)
    items = rng.normal(size=(ITEMS, 4))
    return {f"s{k}": items + noise * rng.normal(size=items.shape) for k in range(count)}


@pytest.fixture(scope="module")
def found():
    whole = torchgw.Representations(people(), metric="euclidean", categories=CATEGORIES)
    return whole.grouped([0, 1, 0, 1]).align(random_state=0)


def test_noisy_copies_are_matched_without_the_items(found):
    assert found.names == ("0", "1")
    for table in (found.top_k(1), found.top_k(5), found.category_accuracy()):
        np.testing.assert_array_equal(table, np.ones((2, 2)))
    # where all items find themselves, the match has the correlation of known items
    np.testing.assert_allclose(found.distance_correlation(), found.rsa, atol=1e-9)
    assert "top_1=100.0%" in repr(found)
    assert "category=100.0%" in repr(found)


def test_groups_are_means_of_distances():
    whole = torchgw.Representations(people(), metric="cosine")
    assert len(whole) == 4
    groups = whole.grouped(["a", "b", "a", "b"])
    mean = whole.distances[[0, 2]].mean(0)
    np.testing.assert_allclose(groups.distances[0], mean / (mean.sum() / (ITEMS * (ITEMS - 1))))
    drawn = whole.grouped(2, random_state=0)
    assert drawn.names == ("group 0", "group 1")
    assert np.array_equal(drawn.distances, whole.grouped(2, random_state=0).distances)


def test_rsa_is_the_correlation_of_distances():
    whole = torchgw.Representations(people(3), metric="euclidean")
    above = np.triu_indices(ITEMS, 1)
    flat = [scipy.spatial.distance.squareform(np.asarray(t), checks=False)
            for t in whole.distances]  # fmt: skip
    assert len(flat[0]) == len(above[0])
    for kind, expected in (
        ("pearson", scipy.stats.pearsonr(flat[0], flat[2])),
        ("spearman", scipy.stats.spearmanr(flat[0], flat[2])),
    ):
        assert whole.rsa(kind)[0, 2] == pytest.approx(expected.statistic)


def test_files_keep_it(found, tmp_path):
    found.save(tmp_path / "match.npz", dense=True)
    again = torchgw.load(tmp_path / "match.npz")
    assert repr(again) == repr(found)
    np.testing.assert_array_equal(again.category_accuracy(), found.category_accuracy())


def test_scores_of_a_plan():
    plan = np.array([[0.5, 0.3, 0.2], [0.6, 0.3, 0.1], [0.1, 0.2, 0.7]])
    assert top_k_accuracy(plan) == pytest.approx(2 / 3)
    assert top_k_accuracy(plan, 2) == 1
    assert top_k_accuracy(plan, truth=[0, 0, 2]) == 1
    assert category_accuracy(plan, ["x", "y", "y"], ["x", "y", "y"]) == pytest.approx(2 / 3)
    with pytest.raises(torchgw.InvalidInputError, match="`k`"):
        top_k_accuracy(plan, 4)
    with pytest.raises(torchgw.InvalidInputError, match="`target_labels`"):
        category_accuracy(plan, [1, 2, 3], [1, 2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tables": [np.eye(3)]}, "at least two"),
        ({"tables": [np.eye(3), np.eye(4)]}, "the same items"),
        ({"metric": "hamming"}, "`metric`"),
        ({"categories": [1, 2]}, "`categories`"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(torchgw.InvalidInputError, match=message):
        torchgw.Representations(**({"tables": people(2)} | change))


def test_bad_groups(found):
    whole = torchgw.Representations(people(2))
    with pytest.raises(torchgw.InvalidInputError, match="one label per subject"):
        whole.grouped([1])
    with pytest.raises(torchgw.InvalidInputError, match="`groups`"):
        whole.grouped(3)
    alone = torchgw.RepresentationMatch(found.result, found.names, None, found.rsa)
    with pytest.raises(torchgw.InvalidInputError, match="no categories"):
        alone.category_accuracy()
