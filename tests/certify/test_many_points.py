"""Cuts by prices of cells: what they prove is below the least cost, and near it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

from benchmarks.quality.many_points import _normal, _Prices, _Question
from torchgw._certify.question import Question
from torchgw._sinkhorn.duals import Transport


def clouds(n):
    """Two unrelated clouds in the plane, centred and of mean square one."""
    rng = np.random.default_rng(0)
    return _normal(rng.normal(size=(n, 2))), _normal(rng.random((n, 2)) ** 2)


def test_prices_of_cells_prove_nearly_the_least_cost_of_all_points():
    X, Y = clouds(100)
    device = torch.device("cpu")
    question = _Question(X, Y, 40, device)
    prices = _Prices(question, device)
    even = np.full(len(X), 1 / len(X))
    whole = Question(cdist(X, X) ** 2, cdist(Y, Y) ** 2, even, even, 1.0, None)
    assert question.constant == pytest.approx(whole.constant, rel=1e-9)
    squares = -4 * np.outer((X**2).sum(1), (Y**2).sum(1))
    for slope in np.random.default_rng(1).normal(size=(2, 2, 2)):
        cost = squares + 2 * X @ slope @ Y.T
        plan, _ = Transport(even, even)(cost)
        prices.slope = slope
        height = prices.reach(question.linear, np.inf, np.inf)[2]
        least = float((cost * plan).sum())
        assert least - 5e-3 * question.constant < height <= least + 1e-9
