"""Scores against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

from torchgw import InvalidInputError, metrics
from torchgw.metrics import foscttm, label_accuracy, transfer_labels


def test_foscttm_is_its_definition(monkeypatch):
    monkeypatch.setattr(metrics, "BLOCK", 30 * 7)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 3))
    y = x + rng.normal(size=(30, 3))
    distance = cdist(x, y)
    shares = [
        np.mean([np.sum(row < row[i]) / 30 for i, row in enumerate(table)])
        for table in (distance, distance.T)
    ]
    assert foscttm(torch.from_numpy(x), y) == pytest.approx(np.mean(shares))
    assert 0.05 < np.mean(shares) < 0.5
    assert foscttm(x, x) == 0


def test_labels_are_voted(monkeypatch):
    monkeypatch.setattr(metrics, "BLOCK", 7 * 2)
    anchors = np.array([[0.0], [0.1], [0.2], [5.0], [5.1], [5.2], [5.3]])
    names = np.array(list("aabbbbb"))
    found = transfer_labels([[0.0], [5.0], [0.21]], anchors, names, n_neighbors=3)
    assert list(found) == ["a", "b", "a"]
    assert label_accuracy([[0.0], [5.0]], ["a", "a"], anchors, names, n_neighbors=3) == 0.5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: foscttm(np.ones((3, 2)), np.ones((4, 2))), "one shape"),
        (lambda: foscttm(np.full((3, 2), np.nan), np.ones((3, 2))), "finite"),
        (lambda: foscttm(np.ones((0, 2)), np.ones((0, 2))), "shape"),
        (lambda: transfer_labels(np.ones((3, 2)), np.ones((4, 2)), [1, 2]), "one row per anchor"),
        (lambda: transfer_labels(np.ones((3, 1)), np.ones((4, 2)), [1] * 4), "many columns"),
        (lambda: transfer_labels(np.ones((3, 2)), np.ones((4, 2)), [1] * 4), "between 1 and 4"),
        (
            lambda: transfer_labels(np.ones((3, 2)), np.ones((6, 2)), ["a", None, np.nan] * 2),
            "`anchor_labels` has 4 missing labels, of 6",
        ),
        (
            lambda: label_accuracy(np.ones((2, 2)), [1, np.nan], np.ones((9, 2)), [1] * 9),
            "`labels` has 1 missing",
        ),
        (lambda: label_accuracy(np.ones((3, 2)), [1], np.ones((9, 2)), [1] * 9), "one label per"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(InvalidInputError, match=message):
        call()


def test_words_for_nothing_are_labels():
    names = np.array(["None", "nan", "drug"], dtype=object)
    assert list(transfer_labels(np.eye(3), np.eye(3), names, n_neighbors=1)) == list(names)
